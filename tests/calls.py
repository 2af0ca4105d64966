"""Small calls of every public function, with which the contract and the operators are tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
import cukern.torch_ops
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from tests.buffers import OnlyDLPack

#: Places of a call's arrays. Tensors and CuPy arrays may be on another GPU: "cuda:1", "cupy:1". Arrays of "foreign" and
#: "foreign cuda" are known by DLPack alone.
PLACES = ("numpy", "cpu", "foreign", "cupy", "cuda", "foreign cuda")


#: The public functions that are no ops; `swap_blocks` launches no kernel.
NO_OPS = {"explain", "specialize", "swap_blocks"}
#: The ops that only others of the package call: `tests/test_moe_gemm_quantized.py` and `test_moe_permute_quantized.py`
#: have the tests.
INTERNAL = {"moe_gemm_quantized", "permute_quantized"}
#: The ops of an exchange: their first argument is a state, which no torch operator takes, and a call means something
#: beside those of the other ranks only. `tests/test_all_to_all.py` holds them to the contract.
WITH_STATE = {"all_to_all_combine", "all_to_all_dispatch"}


BF16 = torch.bfloat16


class Call(NamedTuple):
    """A function of cukern by its name, and its arguments; those of `CALLS` are tensors in host memory."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    #: The argument that is a tensor where the default overload of the operator takes a number.
    late: str = ""

    def operator(self, overload: str = "default") -> Any:
        if self.late:
            overload = self.late if overload == "default" else f"{self.late}_{overload}"
        return getattr(getattr(torch.ops.cukern, self.name), overload)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(cukern, self.name)

    @property
    def results(self) -> list[str]:
        """The names of the operator's results; none if it only writes arguments."""
        return [result.name for result in self.operator()._schema.returns]

    @property
    def written(self) -> list[str]:
        """The names of the arguments that are written, where they are given."""
        arguments = self.operator()._schema.arguments
        return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by their names."""
        names = [a.name for a in self.operator()._schema.arguments]
        return dict(zip(names, self.args, strict=False)) | self.options

    def changed(self, change: Callable[[str, Any], Any]) -> Call:
        """This call with `change(name, array)` for each array, also those in lists."""

        def change_all(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [change_all(name, x) for x in value]
            return change(name, value) if hasattr(value, "__dlpack__") else value

        given = {name: change_all(name, value) for name, value in self.given.items()}
        args, options = tuple(given.values())[: len(self.args)], {name: given[name] for name in self.options}
        return self._replace(args=args, options=options)

    def on(self, place: str) -> Call:
        """This call on arrays of its own, of one of `PLACES`."""
        return self.changed(lambda _, array: copied(array, place))

    @property
    def arrays(self) -> list[Any]:
        """All arrays among the arguments, also those in lists."""
        return [x for value in self.given.values() for x in as_list(value) if hasattr(x, "__dlpack__")]

    @property
    def writes(self) -> list[Any]:
        """The arguments that are written."""
        given = self.given
        return [x for name in self.written if given.get(name) is not None for x in as_list(given[name])]

    def run(self, function: Callable[..., Any] | None = None, **options: Any) -> list[Any]:
        """What a call of `function` returns, then the arguments that it writes."""
        returned = (function or self.function)(*self.args, **self.options, **options)
        return (as_list(returned) if self.results else []) + self.writes

    def outcome(self, function: Callable[..., Any] | None = None) -> list[Any]:
        """`run` on copies of the arguments that are written, so that those of this call stay as they are."""
        return self.changed(lambda name, x: _copied(x, x.device) if name in self.written else x).run(function)

    def expected(self) -> list[Any]:
        """The outcome of the function."""
        return self.outcome()

    def poisoned_results(self) -> dict[str, torch.Tensor]:
        """Tensors for the results of the overload `.out`, poisoned."""
        return {name: poisoned(x) for name, x in zip(self.results, self.expected(), strict=False)}


def as_list(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def poisoned(wanted: torch.Tensor) -> torch.Tensor:
    """A tensor like `wanted` of which no element is right."""
    if wanted.dtype == torch.bool:
        return ~wanted
    if wanted.itemsize == 1:
        return (~wanted.view(torch.uint8)).view(wanted.dtype)
    return torch.full_like(wanted, torch.nan if wanted.is_floating_point() else -7)


def _copied(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """A copy of `tensor` with its strides; the bytes between its elements are NaN or -1."""
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.full((elements * tensor.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def copied(tensor: torch.Tensor, place: str) -> Any:
    """A copy of a tensor in host memory, with its strides, as an array of one of `PLACES`."""
    if place.startswith("foreign"):
        return OnlyDLPack(copied(tensor, "cupy" if place == "foreign cuda" else "numpy"))
    library, _, index = place.partition(":")
    if library in ("cpu", "cuda"):
        return _copied(tensor, place)
    copy = _copied(tensor, "cpu")
    # NumPy knows bfloat16 only through ml_dtypes, so the bits travel as integers.
    extended = copy.dtype == torch.bfloat16
    array = copy.view(torch.int16).numpy().view(arrays.numpy_dtype("bfloat16")) if extended else copy.numpy()
    if library == "numpy":
        return array
    memory = torch.empty(0, dtype=torch.uint8).set_(copy.untyped_storage())
    with cupy.cuda.Device(int(index or 0)):
        # Byte by byte, whatever the dtype and the strides.
        return cupy.ndarray(array.shape, array.dtype, cupy.asarray(memory.numpy()).data, array.strides)


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def drawn(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Integers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def outputs(tokens: int, topk: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of a gate, poisoned, so that an element that is not written shows."""
    weights = torch.full((tokens, topk), torch.nan, device=device)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=device)


def gate(tokens: int = 5, dtype: torch.dtype = torch.float32) -> Call:
    args = (floats(tokens, 256, dtype=dtype), floats(256, seed=1), 8, 4, 8)
    return Call("moe_fused_gate", args)


def gate_with_all_options() -> Call:
    padding = torch.tensor([4], dtype=torch.int32)
    args = (floats(6, 60), floats(60, seed=1), 12, 5, 9, 1, 2.5, True)
    return Call(
        "moe_fused_gate", args, {"renormalize": False, "scoring_func": "softmax", "num_token_non_padded": padding}
    )


def gate_of_strided_rows() -> Call:
    logits = floats(5, 300)[:, :256]
    return Call("moe_fused_gate", (logits, floats(256, seed=1), 8, 4, 8))


def biased_grouped_topk() -> Call:
    logits, bias = floats(5, 128), floats(128, seed=1)
    return Call("biased_grouped_topk", (None, logits, bias, 6, True, 4, 2, 1, 2.5), {"scoring_func": "sqrtsoftplus"})


def grouped_topk() -> Call:
    hidden_states = floats(5, 16, seed=1)
    return Call("grouped_topk", (hidden_states, floats(5, 160), 6, False, 8, 3))


def topk_softmax() -> Call:
    return Call("topk_softmax", (*outputs(5, 8), floats(5, 128)))


def topk_softmax_with_all_options() -> Call:
    logits, bias = floats(5, 8, dtype=torch.float16), floats(8, seed=1)
    padding = torch.tensor(3)
    return Call("topk_softmax", (*outputs(5, 2), logits, True, 30.0, bias), {"num_token_non_padded": padding})


def topk_sigmoid() -> Call:
    logits, bias = floats(5, 384), floats(384, seed=1)
    return Call("topk_sigmoid", (*outputs(5, 8), logits, True, bias))


def topk_sigmoid_with_all_options() -> Call:
    logits, bias = floats(5, 100), floats(100, seed=1, dtype=BF16)
    options = {
        "num_fused_shared_experts": 1, "routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": False,
        "num_token_non_padded": torch.tensor(3),
    }  # fmt: skip
    return Call("topk_sigmoid", (*outputs(5, 7), logits, True, bias), options)


GATE_CALLS = {
    "moe_fused_gate": gate(),
    "moe_fused_gate bfloat16": gate(dtype=torch.bfloat16),
    "moe_fused_gate no tokens": gate(tokens=0),
    "moe_fused_gate all options": gate_with_all_options(),
    "moe_fused_gate strided rows": gate_of_strided_rows(),
    "biased_grouped_topk": biased_grouped_topk(),
    "grouped_topk": grouped_topk(),
    "topk_softmax": topk_softmax(),
    "topk_softmax all options": topk_softmax_with_all_options(),
    "topk_sigmoid": topk_sigmoid(),
    "topk_sigmoid all options": topk_sigmoid_with_all_options(),
}


def _padding_calls() -> list[Call]:
    lengths, offsets = integers(2, 0, 3), integers(0, 0, 6, 6, 6)  # words of sequences of at most 4
    return [
        Call("build_sequence_length_padding_offset", (lengths, 4)),
        Call("build_sequence_length_padding_offset", (lengths, 4), {"valid_word_num": 5}),
        Call("remove_sequence_length_padding", (floats(3, 4, 6), offsets)),
        Call("transpose_remove_padding", (floats(3, 2, 4, 3, dtype=BF16), offsets)),
        Call("rebuild_sequence_length_padding", (floats(5, 6), offsets, 3, 4), {"fill": 1.5}),
        Call(
            "add_qkv_bias_rebuild_padding",
            (*(floats(5, 6, seed=i) for i in range(3)), *(floats(6, seed=i) for i in range(3)), offsets, 3, 4, 2),
        ),
    ]


def _embedding_calls() -> list[Call]:
    table, ids, positions = floats(20, 16, dtype=BF16), integers([3, 19], [0, 7]), floats(9, 16, seed=1, dtype=BF16)
    return [
        Call("embedding_lookup", (table, ids)),
        Call("embedding_lookup", (table, ids, positions, 2), {"position_ids": integers(3)}),
        Call("embedding_lookup_sine_position_encoding", (table, positions, ids[0], 4)),
    ]


def _fused_rotary_calls() -> list[Call]:
    name = "fused_qk_norm_rope_and_cache"
    slots = torch.tensor([7, 0, -1])
    small = floats(3, 4, 32), floats(3, 2, 32, seed=1), floats(3, 2, 32, seed=2), floats(3, 16), floats(3, 16, seed=3)
    caches = floats(2, 8, 2, 32, seed=4), floats(2, 8, 2, 32, seed=5)
    large = [floats(3, heads, 128, seed=heads, dtype=BF16) for heads in (4, 2, 2)]
    of_large = [floats(3, 128, seed=x, dtype=BF16) for x in (1, 2)]
    pages = [floats(1, 16, 2, 128, seed=x, dtype=BF16) for x in (1, 2)]
    weights = [floats(128, seed=x, dtype=BF16) for x in (1, 2)]
    return [
        Call(name, (*small, *caches, slots), {"layout": "deinterleaved"}),
        Call(name, (*large, *of_large, *pages, slots, *weights, 1e-6), {"weight_offset": 1.0}),
    ]


def _rotary_calls() -> list[Call]:
    heads = floats(3, 4, 40, dtype=BF16), floats(3, 2, 32, seed=1, dtype=BF16)
    angles = floats(3, 3, 24, seed=2), floats(3, 3, 24, seed=3)
    return [
        Call("rotary_embedding", (*heads, floats(3, 32, seed=2), floats(3, 32, seed=3))),
        Call("rotary_embedding", (floats(3, 2, 3, 24), floats(3, 1, 3, 24), *angles), {"layout": "deinterleaved"}),
        Call(
            "rotary_embedding",
            (floats(3, 5, 2, 16), floats(3, 5, 2, 8), floats(3, 5, 4), floats(3, 5, 4)),
            {"layout": "interleaved", "rotary_dim": 8, "unsqueeze_dim": 2},
        ),
        *_fused_rotary_calls(),
    ]


def _decoder_attention_calls() -> list[Call]:
    rows, bias = [floats(2, 64, seed=seed) for seed in range(3)], floats(64, seed=3)
    caches = [floats(5, 2, 2, 32, seed=seed) for seed in range(2)]
    memories = [floats(2, 7, 2, 32, seed=seed) for seed in range(2)]
    return [
        Call("masked_attention", (*rows, bias, None, bias, *caches, 3), {"scale": 0.25}),
        Call("masked_attention", (*rows, bias, None, bias, *caches, integers(3)), late="step"),
        Call("cross_attention", (rows[0], bias, *memories, integers(7, 2))),
        Call("cross_attention", (floats(4, 64), None, *memories, integers(7, 2)), {"scale": 0.3}),
    ]


def _beam_search_calls() -> list[Call]:
    log_probs = torch.log_softmax(floats(2, 3, 20), dim=2)
    finished = floats(2, 3, seed=5), integers([4, 4, 0], [4, 0, 0]), integers([1, 2, 0], [3, 0, 0])
    tree = integers([[1, 2], [3, 4]], [[5, 6], [7, 8]]), integers([[0, 1], [1, 0]], [[1, 0], [0, 0]])
    state = floats(2, 3), *finished, integers([0, 0, 0], [0, 0, 0]), flags(False, False)
    caches = floats(4, 6, 2, 8), floats(4, 6, 2, 8, seed=1), integers([2, 0, 0], [0, 1, 1])
    return [
        Call("beam_topk", (floats(2, 3, 200), 4), {"diversity_rate": -0.5}),
        Call("beam_search_step", (log_probs, *state, 3, 9, [2])),
        Call("beam_search_step", (log_probs, *state, integers(3), 9, [2]), late="step"),
        Call("gather_tree", (*tree, integers(2, 1), 0)),
        Call("update_kv_cache", (*caches, 4)),
        # All entries: what comes after the `step` first ones of new arrays means nothing.
        Call("update_kv_cache", (*caches, integers(4)), late="step"),
    ]


#: The block tables and the lengths of three sequences in a paged cache.
PAGES = integers([2, 0], [1, 1], [0, 0]), integers(9, 3, 0)
#: A parameter for all rows.
SHARE = torch.tensor(0.7)


def _paged_attention_calls() -> list[Call]:
    paged = floats(3, 4, 16), floats(3, 2, 4, 8, 4, seed=1), floats(3, 2, 16, 8, seed=2)
    vllm = [*paged, 2, 0.25, *PAGES, 8, 512, floats(4, seed=3), "auto", SHARE, None, 0, 1, 2, 8, 1]
    workspaces = [torch.zeros(3, 4, 1, *rest) for rest in ((), (), (16,))]
    return [
        Call("paged_attention", (*paged, *PAGES), {"window": 5, "sinks": floats(4, seed=5), "k_scale": SHARE}),
        Call("paged_attention_v1", (torch.zeros_like(paged[0]), *vllm)),
        Call("paged_attention_v2", (torch.zeros_like(paged[0]), *workspaces, *vllm)),
        Call("merge_attention_states", (paged[0], floats(3, 4, seed=1), floats(3, 4, 16, seed=2), floats(3, 4))),
        Call(
            "merge_attention_states",
            (floats(3, 2, 4, 16), floats(3, 4, 2, seed=1), floats(3, 2, 4, 16, seed=2), floats(3, 4, 2)),
            {"lse_heads_first": True},
        ),
    ]


def _mla_decode_calls() -> list[Call]:
    latents = [floats(3, 2, 4, 48, dtype=BF16), floats(3, 16, 2, 48, seed=1, dtype=BF16) / 10]
    sparse = {"attn_sink": floats(4, seed=2), "indices": integers(*[[[40, -1, 2], [5, 6, 7]]] * 3)}
    extra = {"extra_k_cache": floats(5, 7, 2, 48, seed=3, dtype=BF16) / 10, "extra_topk_length": integers(1, 0, 2)}
    extra |= {"extra_indices_in_kvcache": integers(*[[[30, 2], [-1, 9]]] * 3), "topk_length": integers(2, 3, 0)}
    counts = {"topk_length": integers(70, 0, 100), "extra_topk": 200, "extra_topk_length": integers(0, 200, 3)}
    return [
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2)),
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2), {"num_heads_q": 4, "topk": 100}),
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2), {"num_heads_q": 4, "topk": 100, **counts}),
        Call("flash_mla_with_kvcache", (*latents, *PAGES, 32, None, None, 0.2, True)),
        Call("flash_mla_with_kvcache", (*latents, None, None, 32, None, None), sparse),
        Call("flash_mla_with_kvcache", (*latents, None, None, 32, None, None), sparse | extra),
    ]


def _kv_cache_calls() -> list[Call]:
    new_tokens = [floats(3, 2, 16, seed=seed) for seed in range(2)]
    slots = integers(9, -1, 4, dtype=torch.int64)
    block_caches = [torch.zeros(3, 2, *shape, dtype=torch.uint8) for shape in ((1, 4, 16), (16, 4))]
    flash_caches = [floats(3, 4, 2, 16, seed=seed) for seed in range(2)]
    return [
        Call("reshape_and_cache", (*new_tokens, *block_caches, slots, "fp8", SHARE, SHARE)),
        Call("reshape_and_cache_flash", (*new_tokens, *flash_caches, slots, "auto", SHARE, SHARE)),
        Call("concat_and_cache_mla", (*(x[:, 0] for x in new_tokens), floats(3, 4, 32), slots, "auto", SHARE)),
        Call(
            "concat_and_cache_mla",
            (floats(3, 512), floats(3, 64), floats(3, 4, 164).view(torch.uint8), slots),
            {"kv_cache_dtype": "fp8_ds_mla", "scale": None},
        ),
        Call("copy_blocks", (flash_caches, flash_caches[::-1], integers([0, 2], dtype=torch.int64))),
        Call(
            "copy_blocks", (flash_caches,), {"value_caches": [], "block_mapping": integers([0, 2], dtype=torch.int64)}
        ),
        Call(
            "gather_cache",
            (flash_caches[0], floats(6, 2, 16), integers([2, 0], [1, 1]), integers(0, 2, 5), 2),
            {"seq_starts": integers(0, 2), "scale": SHARE},
        ),
    ]


def _sampling_calls() -> list[Call]:
    logits, probs = floats(3, 50, dtype=BF16), torch.softmax(floats(3, 50, seed=1), dim=1)
    random = {"seed": integers(5, 6, 7, dtype=torch.int64), "offset": integers(1, 2, 3)}
    top_k, finished = integers(5, 1, 50), {"finished": flags(False, True, False), "end_id": 4}
    chain = torch.softmax(floats(3, 2, 50), 2), integers([3, 4], [0, 9], [7, 7]), torch.softmax(floats(3, 3, 50), 2)
    return [
        Call("sampling_from_logits", (logits,), {**random, "indices": integers(2, 2, 0, dtype=torch.int64)}),
        Call("sampling_from_probs", (probs,), random),
        Call("top_k_sampling_from_probs", (probs, top_k), random),
        Call("top_p_sampling_from_probs", (probs, SHARE), random),
        Call("min_p_sampling_from_probs", (probs, integers(0, 1, 0, dtype=torch.int64)), random),
        Call("top_k_top_p_sampling_from_logits", (logits, top_k, SHARE), {"filter_apply_order": "joint", **random}),
        Call("top_k_top_p_sampling_from_probs", (probs, top_k, SHARE), random),
        Call("sample", (logits,), random),
        Call("sample", (logits,), {**random, **finished}),
        Call("sample", (logits,), {**random, "sequence_length": integers(4, 5, 6)}),
        Call(
            "sample",
            (logits,),
            {
                "temperature": SHARE, "top_k": top_k, "top_p": SHARE, "min_p": SHARE / 10, **random,
                "bias": floats(50, seed=2, dtype=BF16), **finished, "sequence_length": integers(4, 5, 6),
            },
        ),
        Call("softmax", (logits, SHARE)),
        Call("top_k_renorm_probs", (probs, top_k)),
        Call("top_p_renorm_probs", (probs, SHARE)),
        Call("top_k_mask_logits", (logits, top_k)),
        Call("chain_speculative_sampling", chain, random),
    ]  # fmt: skip


def _decoding_calls() -> list[Call]:
    logits = floats(3, 50, dtype=BF16)
    output_ids = integers([4, 5, 4, 0], [1, 2, 3, 0], [6, 6, 6, 6])
    sequence_length = integers(3, 3, 4)
    words = integers([5, 4, 6, 0], [2, 3, -1, -1])  # "5 4" and "6"
    return [
        Call("decoding_init", (integers(3, 1, 2),)),
        Call("topp_init", (integers(3, 1, 2), 5)),
        Call("update_logits", (logits, floats(50, dtype=BF16), flags(False, True, False), 4)),
        Call(
            "apply_penalties",
            (logits,),
            {
                "temperature": SHARE, "repetition_penalty": SHARE + 1, "presence_penalty": SHARE,
                "frequency_penalty": SHARE, "output_ids": output_ids, "sequence_length": sequence_length,
                "min_length": integers(4, 0, 0), "end_id": 4, "bad_words": words,
            },
        ),
        Call(
            "apply_penalties",
            (logits,),
            {
                "repetition_penalty": SHARE + 1, "output_ids": output_ids, "sequence_length": sequence_length,
                "end_id": 4, "prompt_mask": logits > 1, "output_mask": logits < -1,
            },
        ),
        Call("stop_words_criterion", (output_ids, sequence_length, words, flags(False, False, False))),
        Call("update_finished", (integers(4, 4, 1), flags(False, True, False), integers(1, 2, 3), 4)),
    ]  # fmt: skip


def _moe_permute_calls() -> list[Call]:
    topk_ids = integers([3, 0], [1, -1], [1, 3])
    batched = integers([0, 2], [2, 1], [-1, 0], [1, 2], [0, 1])
    return [
        Call("moe_sort", (topk_ids, 4), {"expert_map": integers(-1, 1, 0, -1), "num_local_experts": 2}),
        Call("moe_sort_batched", (batched, 4, 2), {"expert_map": integers(1, -1, 2, 0), "num_local_experts": 3}),
        Call("moe_align_block_size", (topk_ids, 4, 4, integers(-1, 1, 0, -1), True)),
        Call("permute_rows", (floats(3, 12), integers([5, 0], [2, 1], [3, 4]))),
        Call("moe_permute", (floats(3, 12), floats(3, 2, seed=1), integers([3, 0], [1, 2], [1, 3]), 4, -1, None, 1)),
        Call("moe_unpermute", (floats(3, 12), floats(6, 12), floats(3, 2, seed=1), integers([5, 0], [2, -1], [3, 4]))),
        Call("moe_sum", (floats(3, 2, 12, dtype=BF16),)),
    ]


def _fp8_bytes(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to FP8, as bytes: opcheck cannot multiply numbers of FP8."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _moe_gemm_calls() -> list[Call]:
    experts = floats(2, 32, 128, seed=1, dtype=BF16)
    fp8_scales = {"a_scale": floats(5, 1, seed=2) / 10, "b_scale": floats(2, 1, 1, seed=3)}
    fp4_scales = {"b_scale": integers(*[[[120] * 4] * 32] * 2, dtype=torch.uint8)}
    packed = experts[:, :, :32].contiguous().view(torch.uint8)
    return [
        Call("moe_gemm", (floats(4, 128, dtype=BF16), experts, integers(0, 1, 4))),
        Call(
            "moe_gemm",
            (_fp8_bytes(floats(5, 128, dtype=BF16)), _fp8_bytes(experts), integers(0, 1, 3, dtype=torch.int64)),
            {**fp8_scales, "row_token": integers(4, 0, 2), "activation": "silu", "out_dtype": "float16"},
        ),
        Call(
            "moe_gemm_batched",
            (floats(2, 3, 128, dtype=BF16), packed, integers(3, 3)),
            fp4_scales,
        ),
        Call(
            "moe_gemm",
            (floats(4, 128, dtype=BF16), packed, integers(0, 1, 4)),
            {
                **fp4_scales,
                "bias": floats(2, 32, seed=4),
                "activation": "swigluoai",
                "alpha": 1.5,
                "limit": 3.0,
                "interleaved": True,
            },
        ),
        Call(
            "moe_gemm",
            (floats(4, 13, dtype=BF16), floats(2, 21, 13, seed=1, dtype=BF16), integers(0, 1, 4)),
            {"bias": floats(2, 21, seed=4)},
        ),
        Call("moe_gemm", (floats(4, 24), floats(2, 20, 24, seed=1), integers(0, 1, 4)), {"activation": "silu"}),
        Call("prepare_weights", (packed, fp4_scales["b_scale"])),
        Call("restore_weights", (cukern.prepare_weights(packed, fp4_scales["b_scale"]),)),
        Call("prepare_weights", (packed, fp4_scales["b_scale"]), {"a_dtype": "float8_e4m3fn"}),
    ]


def _fused_moe_calls() -> list[Call]:
    rows, *weights = (
        floats(5, 128, dtype=BF16), floats(3, 64, 128, dtype=BF16) / 11, floats(3, 128, 32, seed=1, dtype=BF16) / 6,
    )  # fmt: skip
    topk_weights, topk_ids = floats(5, 2).abs(), integers([0, 2], [2, 1], [-1, 0], [1, 2], [0, 1])
    # Numbers of 4 bits, times 2**-4.
    halves = [x.view(torch.uint8)[..., : x.shape[-1] // 2].contiguous() for x in weights]
    scales = {
        f"w{i + 1}_scale": torch.full((3, x.shape[1], x.shape[2] // 16), 123, dtype=torch.uint8)
        for i, x in enumerate(halves)
    }
    return [
        Call("fused_experts", (rows, *weights, topk_weights, topk_ids)),
        Call(
            "fused_experts",
            (rows, *halves, topk_weights[:, :1].contiguous(), topk_ids[:, :1].contiguous()),
            {
                "activation": "gelu", "quant": "mxfp4", "expert_map": integers(1, -1, 2, 0), **scales,
                "apply_router_weight_on_input": True,
            },
        ),
        Call(
            "fused_experts",
            (rows, *weights, topk_weights, topk_ids),
            {
                "activation": "swigluoai", "w1_bias": floats(3, 64, seed=2), "w2_bias": floats(3, 128, dtype=BF16),
                "alpha": 1.5, "limit": 3.0, "interleaved": True,
            },
        ),
    ]  # fmt: skip


def _moe_activation_calls() -> list[Call]:
    gated = (
        "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swigluoai_and_mul", "relu2_and_mul", "mul_and_silu",
    )  # fmt: skip
    return [
        Call("moe_activation", (floats(2, 3, 32, dtype=BF16), "gelu")),
        Call("swigluoai_and_mul", (floats(3, 32), 1.5, 3.0), {"interleaved": True}),
        *(Call(name, (floats(3, 32),)) for name in gated),
        Call("add_bias_act", (floats(2, 3, 32, dtype=BF16), floats(32, seed=1, dtype=BF16), "silu")),
        *(Call(name, (floats(3, 32),)) for name in ("gelu_new", "gelu_fast", "gelu_quick")),
        Call("bias_gelu", (floats(3, 30), floats(30, seed=1))),
        Call("bias_gelu", (floats(3, 32, dtype=BF16), None), {"approximate": "tanh"}),
    ]


def _quantization_calls() -> list[Call]:
    packed = _fp8_bytes(floats(5, 128, dtype=BF16))[:2, :32].contiguous()
    return [
        Call("scaled_fp8_quant", (floats(3, 32, dtype=BF16), SHARE)),
        Call("scaled_fp8_quant", (floats(3, 32, dtype=BF16),), {"use_per_token_if_dynamic": True}),
        Call("per_token_group_quant_fp8", (floats(3, 64), 32), {"column_major_scales": True}),
        Call("per_token_group_quant_int8", (floats(3, 64, dtype=BF16), 16)),
        Call("scaled_int8_quant", (floats(3, 32),)),
        Call("scaled_int8_quant", (floats(3, 32), SHARE, integers(3), False), {"variant": "auto"}),
        Call("silu_and_mul_quant", (floats(3, 64, dtype=BF16), "gelu_tanh"), {"group_size": 16}),
        Call("quantize_mxfp4", (floats(3, 64),)),
        Call("dequantize_mxfp4", (packed, integers([120, 3], [130, 127], dtype=torch.uint8), "float32")),
        Call("scaled_fp4_quant", (floats(3, 64), SHARE)),
        Call("dequantize_nvfp4", (packed, packed[:, :4].contiguous(), SHARE)),
    ]


def _norm_calls() -> list[Call]:
    rows = floats(3, 40), floats(3, 40, seed=1)
    return [
        Call("rms_norm", (floats(3, 2, 48, dtype=BF16), floats(48, seed=1, dtype=BF16))),
        Call("rms_norm", (floats(3, 37), None, 0.0), {"variant": "auto"}),
        Call("fused_add_rms_norm", (*rows, floats(40, seed=2)), {"weight_offset": 1.0}),
        Call(
            "fused_add_rms_norm",
            (floats(3, 40, dtype=BF16), floats(3, 40, seed=1, dtype=BF16), None),
            {"round_sum": False},
        ),
        Call("rms_norm_quant", (floats(3, 256, dtype=BF16), floats(256, seed=1))),
        Call("rms_norm_quant", (floats(3, 50), floats(50, seed=1)), {"group_size": None}),
        Call("rms_norm_quant", (floats(3, 40), None), {"scale": SHARE}),
        Call("fused_add_rms_norm_quant", (floats(3, 64), floats(3, 64, seed=1), None, 1e-5), {"group_size": 32}),
        Call("layer_norm", (floats(3, 2, 48, dtype=BF16), floats(48, seed=1), floats(48, seed=2))),
        Call("layer_norm", (floats(3, 37), None, None, 0.0), {"variant": "auto"}),
        Call("fused_add_layer_norm", (*rows, floats(40, seed=2), floats(40, seed=3))),
        Call(
            "fused_add_layer_norm",
            (*rows, floats(40, seed=2), None, 1e-12),
            {"input_bias": floats(40, seed=3), "residual_out": torch.zeros(3, 40)},
        ),
    ]


def _varlen_attention_calls() -> list[Call]:
    q, k, v = (floats(7, 2, 16, seed=seed) for seed in range(3))
    memory = [floats(9, 2, 32, seed=seed, dtype=BF16).clamp(-1, 1) for seed in range(2)]
    sums = integers(0, 3, 3, 7), integers(0, 5, 6, 9)
    return [
        Call("varlen_attention", (q, k, v, sums[0])),
        Call(
            "varlen_attention", (floats(7, 4, 32, dtype=BF16), *memory, *sums), {"scale": 0.3, "causal": True}
        ),
    ]  # fmt: skip


def _named_by_options(*stems: list[Call]) -> dict[str, Call]:
    """The calls of all stems, each by the names of its function and of its options."""
    calls = [call for stem in stems for call in stem]
    named = {" ".join((call.name, *[f"late {call.late}"] * bool(call.late), *call.options)): call for call in calls}
    assert len(named) == len(calls)
    return named


#: With random draws that have seeds; several calls where optional arguments are written.
CALLS: dict[str, Call] = GATE_CALLS | _named_by_options(
    _moe_permute_calls(),
    _moe_gemm_calls(),
    _moe_activation_calls(),
    _fused_moe_calls(),
    _quantization_calls(),
    _norm_calls(),
    _padding_calls(),
    _embedding_calls(),
    _rotary_calls(),
    _decoder_attention_calls(),
    _paged_attention_calls(),
    _varlen_attention_calls(),
    _mla_decode_calls(),
    _kv_cache_calls(),
    _beam_search_calls(),
    _sampling_calls(),
    _decoding_calls(),
)
WITH_OUT = [key for key, call in CALLS.items() if "out" in call.operator().overloadpacket.overloads()]
