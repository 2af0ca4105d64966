"""Calls of every public function: small ones, on whose arguments the contract and the operators are tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
import cukern.torch_ops
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from tests.buffers import OnlyDLPack

#: Where a call can have its arrays. Tensors and CuPy arrays may be on another GPU: "cuda:1", "cupy:1". An array of
#: "foreign" or "foreign cuda" is known by DLPack alone.
PLACES = ("numpy", "cpu", "foreign", "cupy", "cuda", "foreign cuda")


#: The public functions that are no ops.
NO_OPS = {"explain", "specialize"}


class Call(NamedTuple):
    """A function of cukern by its name, and its arguments; those of `CALLS` are tensors in host memory."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    def operator(self, overload: str = "default") -> Any:
        return getattr(getattr(torch.ops.cukern, self.name), overload)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(cukern, self.name)

    @property
    def results(self) -> list[str]:
        """The names of what the operator returns: none if that is only what it writes."""
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
        return Call(self.name, tuple(given.values())[: len(self.args)], {name: given[name] for name in self.options})

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
        """The same of a call that leaves the arguments as they are: what it writes are tensors of its own."""
        return self.changed(lambda name, x: _copied(x, x.device) if name in self.written else x).run(function)

    def expected(self) -> list[Any]:
        """The outcome of the function."""
        return self.outcome()

    def poisoned_results(self) -> dict[str, torch.Tensor]:
        """For the overload that writes its results."""
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
    """A copy of `tensor` with its strides; between its elements bytes that are NaN or -1."""
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
    """Weights and ids of a gate, poisoned, so that what is not written shows."""
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
}


def _other_calls() -> dict[str, Call]:
    """Small calls of all functions that are no gates."""

    bf16 = torch.bfloat16
    logits, probs = floats(3, 50, dtype=bf16), torch.softmax(floats(3, 50, seed=1), dim=1)
    lengths, offsets = integers(2, 0, 3), integers(0, 0, 6, 6, 6)  # words of sequences of at most 4
    random = {"seed": integers(5, 6, 7, dtype=torch.int64), "offset": integers(1, 2, 3)}
    top_k, share = integers(5, 1, 50), torch.tensor(0.7)
    table, ids, positions = floats(20, 16, dtype=bf16), integers([3, 19], [0, 7]), floats(9, 16, seed=1, dtype=bf16)
    rows = [floats(2, 64, seed=seed) for seed in range(3)]
    bias = floats(64, seed=3)
    caches = [floats(5, 2, 2, 32, seed=seed) for seed in range(2)]
    memories = [floats(2, 7, 2, 32, seed=seed) for seed in range(2)]
    log_probs = torch.log_softmax(floats(2, 3, 20), dim=2)
    finished = floats(2, 3, seed=5), integers([4, 4, 0], [4, 0, 0]), integers([1, 2, 0], [3, 0, 0])
    tree = integers([[1, 2], [3, 4]], [[5, 6], [7, 8]]), integers([[0, 1], [1, 0]], [[1, 0], [0, 0]])
    output_ids = integers([4, 5, 4, 0], [1, 2, 3, 0], [6, 6, 6, 6])
    sequence_length = integers(3, 3, 4)
    words = integers([5, 4, 6, 0], [2, 3, -1, -1])  # "5 4" and "6"
    new_tokens = [floats(3, 2, 16, seed=seed) for seed in range(2)]
    slots = integers(9, -1, 4, dtype=torch.int64)
    block_caches = [torch.zeros(3, 2, *shape, dtype=torch.uint8) for shape in ((1, 4, 16), (16, 4))]
    flash_caches = [floats(3, 4, 2, 16, seed=seed) for seed in range(2)]
    paged = [
        floats(3, 4, 16), floats(3, 2, 4, 8, 4, seed=1), floats(3, 2, 16, 8, seed=2),
        integers([2, 0], [1, 1], [0, 0]), integers(9, 3, 0),
    ]  # fmt: skip
    topk_ids = integers([3, 0], [1, -1], [1, 3])
    vllm = [*paged[:3], 2, 0.25, *paged[3:], 8, 512, floats(4, seed=3), "auto", share, None, 0, 1, 2, 8, 1]
    workspaces = [torch.zeros(3, 4, 1, *rest) for rest in ((), (), (16,))]
    latents = [floats(3, 2, 4, 48, dtype=bf16), floats(3, 16, 2, 48, seed=1, dtype=bf16) / 10]
    mla_options = {"attn_sink": floats(4, seed=2), "indices": integers(*[[[40, -1, 2], [5, 6, 7]]] * 3)}
    experts = floats(2, 32, 128, seed=1, dtype=bf16)
    # As bytes: opcheck cannot multiply numbers of FP8.
    fp8_rows, fp8_experts = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (floats(5, 128, dtype=bf16), experts))
    packed = fp8_rows[:2, :32].contiguous()
    fp8_scales = {"a_scale": floats(5, 1, seed=2) / 10, "b_scale": floats(2, 1, 1, seed=3)}
    fp4_scales = {"b_scale": integers(*[[[120] * 4] * 32] * 2, dtype=torch.uint8)}
    layer = floats(5, 128, dtype=bf16), floats(3, 64, 128, dtype=bf16) / 11, floats(3, 128, 32, seed=1, dtype=bf16) / 6
    routing = floats(5, 2).abs(), integers([0, 2], [2, 1], [-1, 0], [1, 2], [0, 1])
    # Numbers of 4 bits, times 2**-4.
    halves = [x.view(torch.uint8)[..., : x.shape[-1] // 2].contiguous() for x in layer[1:]]
    halves_scale = {
        f"w{i + 1}_scale": torch.full((3, x.shape[1], x.shape[2] // 16), 123, dtype=torch.uint8)
        for i, x in enumerate(halves)
    }
    calls = [
        Call("fused_experts", (*layer, *routing)),
        Call(
            "fused_experts",
            (layer[0], *halves, routing[0][:, :1].contiguous(), routing[1][:, :1].contiguous()),
            {
                "activation": "gelu", "quant": "mxfp4", "expert_map": integers(1, -1, 2, 0), **halves_scale,
                "apply_router_weight_on_input": True,
            },
        ),
        Call("moe_sort_batched", (routing[1], 4, 2), {"expert_map": integers(1, -1, 2, 0), "num_local_experts": 3}),
        Call("moe_gemm", (floats(4, 128, dtype=bf16), experts, integers(0, 1, 4))),
        Call(
            "moe_gemm",
            (fp8_rows, fp8_experts, integers(0, 1, 3, dtype=torch.int64)),
            {**fp8_scales, "row_token": integers(4, 0, 2), "activation": "silu", "out_dtype": "float16"},
        ),
        Call(
            "moe_gemm_batched",
            (floats(2, 3, 128, dtype=bf16), experts[:, :, :32].contiguous().view(torch.uint8), integers(3, 3)),
            fp4_scales,
        ),
        Call("build_sequence_length_padding_offset", (lengths, 4)),
        Call("build_sequence_length_padding_offset", (lengths, 4), {"valid_word_num": 5}),
        Call("remove_sequence_length_padding", (floats(3, 4, 6), offsets)),
        Call("transpose_remove_padding", (floats(3, 2, 4, 3, dtype=bf16), offsets)),
        Call("rebuild_sequence_length_padding", (floats(5, 6), offsets, 3, 4), {"fill": 1.5}),
        Call(
            "add_qkv_bias_rebuild_padding",
            (*(floats(5, 6, seed=i) for i in range(3)), *(floats(6, seed=i) for i in range(3)), offsets, 3, 4, 2),
        ),
        Call("embedding_lookup", (table, ids)),
        Call("embedding_lookup", (table, ids, positions, 2), {"position_ids": integers(3)}),
        Call("embedding_lookup_sine_position_encoding", (table, positions, ids[0], 4)),
        Call("masked_attention", (*rows, bias, None, bias, *caches, 3), {"scale": 0.25}),
        Call("cross_attention", (rows[0], bias, *memories, integers(7, 2))),
        Call("beam_topk", (floats(2, 3, 200), 4), {"diversity_rate": -0.5}),
        Call(
            "beam_search_step",
            (log_probs, floats(2, 3), *finished, integers([0, 0, 0], [0, 0, 0]), flags(False, False), 3, 9, [2]),
        ),
        Call("gather_tree", (*tree, integers(2, 1), 0)),
        Call("update_kv_cache", (floats(4, 6, 2, 8), floats(4, 6, 2, 8, seed=1), integers([2, 0, 0], [0, 1, 1]), 4)),
        Call("paged_attention", (*paged,), {"window": 5, "sinks": floats(4, seed=5), "k_scale": share}),
        Call("paged_attention_v1", (torch.zeros_like(paged[0]), *vllm)),
        Call("paged_attention_v2", (torch.zeros_like(paged[0]), *workspaces, *vllm)),
        Call("merge_attention_states", (paged[0], floats(3, 4, seed=1), floats(3, 4, 16, seed=2), floats(3, 4))),
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2)),
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2), {"num_heads_q": 4, "topk": 100}),
        Call("flash_mla_with_kvcache", (*latents, *paged[3:], 32, None, None, 0.2, True)),
        Call("flash_mla_with_kvcache", (*latents, None, None, 32, None, None), mla_options),
        Call("reshape_and_cache", (*new_tokens, *block_caches, slots, "fp8", share, share)),
        Call("reshape_and_cache_flash", (*new_tokens, *flash_caches, slots, "auto", share, share)),
        Call("concat_and_cache_mla", (*(x[:, 0] for x in new_tokens), floats(3, 4, 32), slots, "auto", share)),
        Call(
            "concat_and_cache_mla",
            (floats(3, 512), floats(3, 64), floats(3, 4, 164).view(torch.uint8), slots, "fp8_ds_mla", None),
        ),
        Call("copy_blocks", (flash_caches, flash_caches[::-1], integers([0, 2], dtype=torch.int64))),
        Call(
            "gather_cache",
            (flash_caches[0], floats(6, 2, 16), integers([2, 0], [1, 1]), integers(0, 2, 5), 2),
            {"seq_starts": integers(0, 4), "scale": share},
        ),
        Call("sampling_from_logits", (logits,), {**random, "indices": integers(2, 2, 0)}),
        Call("sampling_from_probs", (probs,), random),
        Call("top_k_sampling_from_probs", (probs, top_k), random),
        Call("top_p_sampling_from_probs", (probs, share), random),
        Call("min_p_sampling_from_probs", (probs, share), random),
        Call("top_k_top_p_sampling_from_logits", (logits, top_k, share), {"filter_apply_order": "joint", **random}),
        Call("top_k_top_p_sampling_from_probs", (probs, top_k, share), random),
        Call("sample", (logits,), random),
        Call("sample", (logits,), {**random, "finished": flags(False, True, False), "end_id": 4}),
        Call("sample", (logits,), {**random, "sequence_length": integers(4, 5, 6)}),
        Call(
            "sample",
            (logits,),
            {
                "temperature": share, "top_k": top_k, "top_p": share, "min_p": share / 10, **random,
                "bias": floats(50, seed=2, dtype=bf16), "finished": flags(False, True, False), "end_id": 4,
                "sequence_length": integers(4, 5, 6),
            },
        ),
        Call("softmax", (logits, share)),
        Call("top_k_renorm_probs", (probs, top_k)),
        Call("top_p_renorm_probs", (probs, share)),
        Call("top_k_mask_logits", (logits, top_k)),
        Call(
            "chain_speculative_sampling",
            (torch.softmax(floats(3, 2, 50), 2), integers([3, 4], [0, 9], [7, 7]), torch.softmax(floats(3, 3, 50), 2)),
            random,
        ),
        Call("decoding_init", (integers(3, 1, 2),)),
        Call("topp_init", (integers(3, 1, 2), 5)),
        Call("update_logits", (logits, floats(50, dtype=bf16), flags(False, True, False), 4)),
        Call(
            "apply_penalties",
            (logits,),
            {
                "temperature": share, "repetition_penalty": share + 1, "presence_penalty": share,
                "frequency_penalty": share, "output_ids": output_ids, "sequence_length": sequence_length,
                "min_length": integers(4, 0, 0), "end_id": 4, "bad_words": words,
            },
        ),
        Call("stop_words_criterion", (output_ids, sequence_length, words, flags(False, False, False))),
        Call("update_finished", (integers(4, 4, 1), flags(False, True, False), integers(1, 2, 3), 4)),
        Call("moe_sort", (topk_ids, 4), {"expert_map": integers(-1, 1, 0, -1), "num_local_experts": 2}),
        Call("moe_align_block_size", (topk_ids, 4, 4, integers(-1, 1, 0, -1), True)),
        Call("permute_rows", (floats(3, 12), integers([5, 0], [2, 1], [3, 4]))),
        Call("moe_permute", (floats(3, 12), floats(3, 2, seed=1), integers([3, 0], [1, 2], [1, 3]), 4, -1, None, 1)),
        Call("moe_unpermute", (floats(3, 12), floats(6, 12), floats(3, 2, seed=1), integers([5, 0], [2, -1], [3, 4]))),
        Call("moe_sum", (floats(3, 2, 12, dtype=bf16),)),
        Call("moe_activation", (floats(2, 3, 32, dtype=bf16), "gelu")),
        *(Call(name, (floats(3, 32),)) for name in (
            "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swigluoai_and_mul", "relu2_and_mul",
        )),
        Call("scaled_fp8_quant", (floats(3, 32, dtype=bf16), share)),
        Call("scaled_fp8_quant", (floats(3, 32, dtype=bf16),), {"use_per_token_if_dynamic": True}),
        Call("per_token_group_quant_fp8", (floats(3, 64), 32), {"column_major_scales": True}),
        Call("per_token_group_quant_int8", (floats(3, 64, dtype=bf16), 16)),
        Call("scaled_int8_quant", (floats(3, 32),)),
        Call("scaled_int8_quant", (floats(3, 32), share, integers(3), False), {"variant": "auto"}),
        Call("silu_and_mul_quant", (floats(3, 64, dtype=bf16), "gelu_tanh"), {"group_size": 16}),
        Call("rms_norm", (floats(3, 2, 48, dtype=bf16), floats(48, seed=1, dtype=bf16))),
        Call("rms_norm", (floats(3, 37), None, 0.0), {"variant": "auto"}),
        Call("fused_add_rms_norm", (floats(3, 40), floats(3, 40, seed=1), floats(40, seed=2)), {"weight_offset": 1.0}),
        Call("rms_norm_quant", (floats(3, 256, dtype=bf16), floats(256, seed=1))),
        Call("rms_norm_quant", (floats(3, 50), floats(50, seed=1)), {"group_size": None}),
        Call("rms_norm_quant", (floats(3, 40), None), {"scale": share}),
        Call("fused_add_rms_norm_quant", (floats(3, 64), floats(3, 64, seed=1), None, 1e-5), {"group_size": 32}),
        Call("quantize_mxfp4", (floats(3, 64),)),
        Call("dequantize_mxfp4", (packed, integers([120, 3], [130, 127], dtype=torch.uint8), "float32")),
        Call("scaled_fp4_quant", (floats(3, 64), share)),
        Call("dequantize_nvfp4", (packed, packed[:, :4].contiguous(), share)),
    ]  # fmt: skip
    return {" ".join((call.name, *call.options)): call for call in calls}


def _in_variants(call: Call, *variants: str) -> list[Call]:
    return [call._replace(options={**call.options, "variant": variant}) for variant in variants]


def _large_attention() -> list[Call]:
    rows, caches = [floats(1, 64, seed=i) for i in range(3)], [floats(3000, 1, 1, 64, seed=i) for i in range(2)]
    whole = [floats(3, 256, seed=i, dtype=torch.bfloat16) for i in range(3)]
    whole_caches = [floats(20, 3, 4, 64, seed=i, dtype=torch.bfloat16) for i in range(2)]
    memories = [floats(2, 3000, 2, 64, seed=i) for i in range(2)]
    half = {"dtype": torch.float16}
    blocks = floats(192, 2, 8, 16, 8, seed=1, **half), floats(192, 2, 64, 16, seed=2, **half).clamp(-1, 1)
    query, lengths = floats(3, 8, 64, **half), integers(3000, 0, 17)
    tables = torch.arange(3 * 188, dtype=torch.int32).view(3, 188) % 192
    paged = query, *blocks, tables, lengths
    one = torch.ones(1)
    vllm = [query, *blocks, 2, 0.125, tables, lengths, 16, 3000, None, "auto", one, one, 0, 0, 0, 64, 0]
    workspaces = [torch.zeros(3, 8, 6), torch.zeros(3, 8, 6), torch.zeros(3, 8, 6, 64, **half)]
    latents = floats(3, 2, 16, 576, dtype=torch.bfloat16), floats(40, 64, 1, 576, seed=1, dtype=torch.bfloat16) / 10
    pages = torch.arange(3 * 32, dtype=torch.int32).view(3, 32) % 40
    mla = Call("flash_mla_with_kvcache", (*latents, pages, integers(30, 0, 2000), 512, None, None, None, True))
    return [
        Call("masked_attention", (*rows, None, None, None, *caches, 3000)),
        *_in_variants(
            Call("masked_attention", (*whole, None, None, None, *whole_caches, 20)), "specialized", "dynamic"
        ),
        Call("cross_attention", (floats(2, 128), None, *memories, integers(3000, 17))),
        *_in_variants(Call("paged_attention", paged), "specialized", "dynamic", "scalar"),
        Call("paged_attention_v1", (torch.zeros_like(query), *vllm)),
        Call("paged_attention_v2", (torch.zeros_like(query), *workspaces, *vllm)),
        Call("get_mla_metadata", (integers(30, 0, 2000), 32, 1)),
        mla,
        *_in_variants(mla, "mma", "dynamic"),
    ]


def _large_routing() -> list[Call]:
    gate = Call(
        "moe_fused_gate",
        (floats(1000, 256), floats(256, seed=1), 8, 4, 8),
        {"num_token_non_padded": integers(900)},
    )
    ids, rows = drawn(64, 3000, 8), floats(3000, 512, dtype=torch.bfloat16)
    inverse = torch.randperm(24000, generator=torch.Generator().manual_seed(0)).int().view(3000, 8)
    product = Call(
        "moe_gemm",
        (floats(170, 256, dtype=torch.bfloat16), floats(3, 264, 256, dtype=torch.bfloat16), integers(0, 30, 30, 170)),
    )
    by_block = Call(
        "moe_gemm",
        tuple(x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (product.args[0], product.args[1]))
        + product.args[2:],
        {"a_scale": floats(170, 2).abs() / 10, "b_scale": floats(3, 3, 2).abs(), "out_dtype": "float16"},
    )
    layer = (
        floats(33, 128, dtype=torch.bfloat16),
        *(floats(*shape, seed=i, dtype=torch.bfloat16) / 11 for i, shape in enumerate(((3, 64, 128), (3, 128, 32)))),
    )
    return [
        *_in_variants(gate, "specialized", "dynamic"),
        *_in_variants(Call("moe_sort", (ids, 64)), "many_blocks", "counted"),
        Call("moe_sort", (ids[:50].contiguous(), 64), {"variant": "one_block"}),
        Call("moe_align_block_size", (ids, 64, 64)),
        Call("moe_permute", (rows[:500], None, ids[:500].contiguous(), 64)),
        *_in_variants(
            Call("moe_unpermute", (floats(3000, 64), floats(24000, 64), floats(3000, 8), inverse)), "auto", "dynamic"
        ),
        *_in_variants(product, "auto", "mma", "stream"),
        by_block,
        Call("fused_experts", (*layer, floats(33, 2).abs(), drawn(3, 33, 2))),
    ]  # fmt: skip


def _large_decoding() -> list[Call]:
    logits, log_probs = floats(50, 5000) * 4, torch.log_softmax(floats(3, 4, 5001), dim=2)
    random = {"seed": torch.arange(50), "offset": torch.arange(50)}
    top_p, top_k = torch.linspace(0.1, 1, 50), drawn(5000, 50) + 1
    step = {"top_p": top_p, **random, "finished": drawn(2, 50).bool(), "end_id": 4, "sequence_length": drawn(9, 50)}
    probs = torch.softmax(logits, 1)
    chain = torch.softmax(floats(9, 3, 500), 2), drawn(500, 9, 3), torch.softmax(floats(9, 4, 500, seed=1), 2)
    penalized = Call(
        "apply_penalties",
        (floats(4, 9000, dtype=torch.bfloat16),),
        {
            "repetition_penalty": floats(4).abs() + 0.5, "output_ids": drawn(9000, 4, 60),
            "sequence_length": integers(60, 0, 7, 33), "min_length": integers(9, 9, 9, 9), "end_id": 5,
        },
    )  # fmt: skip
    state = [
        floats(3, 4),
        floats(3, 4, seed=1),
        drawn(9, 3, 4),
        drawn(9, 3, 4),
        drawn(4, 3, 4),
        flags(False, True, False),
    ]
    caches = Call("update_kv_cache", (floats(6, 12, 4, 32), floats(6, 12, 4, 32, seed=1), drawn(4, 3, 4), 6))
    return [
        *_in_variants(Call("sample", (logits,), step), "auto", "block"),
        *_in_variants(Call("softmax", (logits,)), "auto", "block"),
        *_in_variants(Call("top_k_sampling_from_probs", (probs, top_k), random), "auto", "block"),
        *_in_variants(Call("top_k_renorm_probs", (probs, top_k)), "auto", "block"),
        *_in_variants(Call("top_p_renorm_probs", (probs, top_p)), "auto", "block"),
        *_in_variants(Call("chain_speculative_sampling", chain, {"seed": torch.arange(9)}), "auto", "block"),
        *_in_variants(Call("beam_topk", (log_probs, 6)), "narrow", "wide"),
        Call("beam_topk", (log_probs, 6), {"diversity_rate": -0.5}),
        Call("beam_search_step", (log_probs, *state, 3, 9, [5])),
        Call("gather_tree", (drawn(50, 20, 3, 4), drawn(4, 20, 3, 4), None, 3)),
        *_in_variants(caches, "vector", "scalar"),
        *_in_variants(penalized, "wide", "narrow"),
        *_in_variants(
            Call("update_logits", (floats(4, 9000), floats(9000), flags(False, True, False, True), 5)), "wide", "narrow"
        ),
    ]  # fmt: skip


def _large_rows() -> list[Call]:
    half = {"dtype": torch.float16}
    words = integers(0, 20, 7, 3, 12, 9)
    positions = [s * 20 + t for s, count in enumerate(words.tolist()) for t in range(count)]
    offsets = integers(*(at - i for i, at in enumerate(positions)))
    padded, by_head, packed = floats(6, 20, 768), floats(6, 12, 20, 64), floats(51, 768)
    bias, x, wide = floats(768, seed=1), floats(40, 256), floats(40, 2048, dtype=torch.bfloat16)
    embedding = Call(
        "embedding_lookup_sine_position_encoding",
        (floats(50, 256, **half), floats(50, 256, seed=1, **half), drawn(50, 8), 0),
        {"position_ids": integers(9, dtype=torch.int64)},
    )
    return [
        Call("build_sequence_length_padding_offset", (words, 20), {"valid_word_num": 51}),
        *_in_variants(Call("remove_sequence_length_padding", (padded, offsets)), "specialized", "dynamic"),
        *_in_variants(Call("transpose_remove_padding", (by_head, offsets)), "specialized", "dynamic"),
        *_in_variants(
            Call("rebuild_sequence_length_padding", (packed, offsets, 6, 20)), "specialized", "dynamic"
        ),
        *_in_variants(
            Call("add_qkv_bias_rebuild_padding", (packed, packed, packed, bias, bias, bias, offsets, 6, 20, 12)),
            "specialized", "dynamic",
        ),
        *_in_variants(embedding, "wide", "narrow"),
        *_in_variants(Call("moe_activation", (x, "gelu")), "vector", "scalar"),
        *_in_variants(Call("rms_norm", (wide, wide[0])), "specialized", "dynamic", "scalar"),
        Call("rms_norm", (floats(3, 9001), floats(9001, seed=1))),
        *_in_variants(
            Call("fused_add_rms_norm", (wide, wide.flip(0), wide[0].float())), "specialized", "dynamic", "scalar"
        ),
        Call("fused_add_rms_norm", (floats(3, 20000), floats(3, 20000, seed=1), None)),
        *_in_variants(Call("rms_norm_quant", (wide, wide[0])), "specialized", "dynamic", "scalar"),
        Call("fused_add_rms_norm_quant", (wide, wide.flip(0), wide[0]), {"group_size": None}),
        *_in_variants(Call("scaled_fp8_quant", (x,)), "vector", "scalar"),
        *_in_variants(Call("scaled_fp8_quant", (x, torch.ones(1))), "vector", "scalar"),
        Call("per_token_group_quant_fp8", (x, 64)),
        *_in_variants(Call("scaled_int8_quant", (x, None, None, False)), "vector", "scalar"),
        Call("quantize_mxfp4", (x,)),
        Call("scaled_fp4_quant", (x, torch.ones(1))),
    ]  # fmt: skip


def _large_calls() -> dict[str, Call]:
    calls = [*_large_attention(), *_large_routing(), *_large_decoding(), *_large_rows()]
    named: dict[str, Call] = {}
    for call in calls:
        key = f"{call.name} large {call.options.get('variant', 'auto')}"
        named[key if key not in named else f"{key} again"] = call
    assert len(named) == len(calls)
    return named


#: With random draws that have seeds; several calls where optional arguments are written.
CALLS: dict[str, Call] = GATE_CALLS | _other_calls()
WITH_OUT = [key for key, call in CALLS.items() if "out" in call.operator().overloadpacket.overloads()]

#: The same of sizes that take other ways through the kernels: rows in parts, variants by name.
LARGE_CALLS: dict[str, Call] = _large_calls()
