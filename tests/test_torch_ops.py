"""torch.ops.cukern: the operators against the functions they stand for."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cukern
import cukern.torch_ops
from cukern import fused_moe, ops

DECLARED = {
    re.split(r"[.(]", schema)[0]: module
    for module in (*vars(ops).values(), fused_moe)
    if isinstance(module, ModuleType)
    for schema in getattr(module, "TORCH_OPS", {})
}
FUNCTIONS = [
    name
    for module in (*vars(ops).values(), fused_moe)
    if isinstance(module, ModuleType)
    for name in getattr(module, "__all__", [])
    if inspect.isfunction(getattr(module, name))
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def _random(*shape: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # Made on the CPU, so that each device gets the same numbers.
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _outputs(tokens: int, topk: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned, so that what is not written shows."""
    weights = torch.full((tokens, topk), torch.nan, device=device)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=device)


class Call(NamedTuple):
    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)

    def operator(self, overload: str = "default") -> Any:
        return getattr(getattr(torch.ops.cukern, self.name), overload)

    @property
    def results(self) -> list[str]:
        """The names of what the operator returns: none if that is only what it writes."""
        return [result.name for result in self.operator()._schema.returns]

    def outcome(self, function: Callable[..., Any]) -> list[Any]:
        """What a call of `function` returns, then what it writes, in tensors of its own."""
        arguments = self.operator()._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        names = [a.name for a in arguments]
        args = [_clone(x) if name in written else x for name, x in zip(names, self.args, strict=False)]
        options = {name: x.clone() if name in written and x is not None else x for name, x in self.options.items()}
        returned = function(*args, **options)
        given = dict(zip(names, args, strict=False)) | options
        writes = [x for name in written if given.get(name) is not None for x in _all(given[name])]
        return (_all(returned) if self.results else []) + writes

    def expected(self) -> list[Any]:
        """The outcome of the function."""
        return self.outcome(getattr(cukern, self.name))

    def poisoned_results(self) -> dict[str, torch.Tensor]:
        """For the overload that writes its results."""
        return {name: _poisoned(x) for name, x in zip(self.results, self.expected(), strict=False)}


def _clone(value: Any) -> Any:
    return [x.clone() for x in value] if isinstance(value, list) else value.clone()


def _all(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def _poisoned(wanted: torch.Tensor) -> torch.Tensor:
    if wanted.dtype == torch.bool:
        return ~wanted
    return torch.full_like(wanted, torch.nan if wanted.is_floating_point() else -7)


def _gate(device: str, tokens: int = 5, dtype: torch.dtype = torch.float32) -> Call:
    args = (_random(tokens, 256, device=device, dtype=dtype), _random(256, device=device, seed=1), 8, 4, 8)
    return Call("moe_fused_gate", args)


def _gate_with_all_options(device: str) -> Call:
    padding = torch.tensor([4], dtype=torch.int32, device=device)
    args = (_random(6, 60, device=device), _random(60, device=device, seed=1), 12, 5, 9, 1, 2.5, True)
    return Call(
        "moe_fused_gate", args, {"renormalize": False, "scoring_func": "softmax", "num_token_non_padded": padding}
    )


def _gate_of_strided_rows(device: str) -> Call:
    logits = _random(5, 300, device=device)[:, :256]
    return Call("moe_fused_gate", (logits, _random(256, device=device, seed=1), 8, 4, 8))


def _biased_grouped_topk(device: str) -> Call:
    logits, bias = _random(5, 128, device=device), _random(128, device=device, seed=1)
    return Call("biased_grouped_topk", (None, logits, bias, 6, True, 4, 2, 1, 2.5), {"scoring_func": "sqrtsoftplus"})


def _grouped_topk(device: str) -> Call:
    hidden_states = _random(5, 16, device=device, seed=1)
    return Call("grouped_topk", (hidden_states, _random(5, 160, device=device), 6, False, 8, 3))


def _topk_softmax(device: str) -> Call:
    return Call("topk_softmax", (*_outputs(5, 8, device), _random(5, 128, device=device)))


def _topk_softmax_with_all_options(device: str) -> Call:
    logits, bias = _random(5, 8, device=device, dtype=torch.float16), _random(8, device=device, seed=1)
    padding = torch.tensor(3, device=device)
    return Call("topk_softmax", (*_outputs(5, 2, device), logits, True, 30.0, bias), {"num_token_non_padded": padding})


def _topk_sigmoid(device: str) -> Call:
    logits, bias = _random(5, 384, device=device), _random(384, device=device, seed=1)
    return Call("topk_sigmoid", (*_outputs(5, 8, device), logits, True, bias))


GATE_CALLS = {
    "moe_fused_gate": _gate,
    "moe_fused_gate bfloat16": lambda device: _gate(device, dtype=torch.bfloat16),
    "moe_fused_gate no tokens": lambda device: _gate(device, tokens=0),
    "moe_fused_gate all options": _gate_with_all_options,
    "moe_fused_gate strided rows": _gate_of_strided_rows,
    "biased_grouped_topk": _biased_grouped_topk,
    "grouped_topk": _grouped_topk,
    "topk_softmax": _topk_softmax,
    "topk_softmax all options": _topk_softmax_with_all_options,
    "topk_sigmoid": _topk_sigmoid,
}


def _calls(device: str) -> dict[str, Call]:
    """Small calls of all other operators, those that draw with seeds; several where optional arguments are written."""

    def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return _random(*shape, device=device, seed=seed, dtype=dtype)

    def integers(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def flags(*values: bool) -> torch.Tensor:
        return torch.tensor(values, device=device)

    bf16 = torch.bfloat16
    logits, probs = floats(3, 50, dtype=bf16), torch.softmax(floats(3, 50, seed=1), dim=1)
    lengths, offsets = integers(2, 0, 3), integers(0, 0, 6, 6, 6)  # words of sequences of at most 4
    random = {"seed": integers(5, 6, 7, dtype=torch.int64), "offset": integers(1, 2, 3)}
    top_k, share = integers(5, 1, 50), torch.tensor(0.7, device=device)
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
    block_caches = [torch.zeros(3, 2, *shape, dtype=torch.uint8, device=device) for shape in ((1, 4, 16), (16, 4))]
    flash_caches = [floats(3, 4, 2, 16, seed=seed) for seed in range(2)]
    paged = [
        floats(3, 4, 16), floats(3, 2, 4, 8, 4, seed=1), floats(3, 2, 16, 8, seed=2),
        integers([2, 0], [1, 1], [0, 0]), integers(9, 3, 0),
    ]  # fmt: skip
    topk_ids = integers([3, 0], [1, -1], [1, 3])
    vllm = [*paged[:3], 2, 0.25, *paged[3:], 8, 512, floats(4, seed=3), "auto", share, None, 0, 1, 2, 8, 1]
    workspaces = [torch.zeros(3, 4, 1, *rest, device=device) for rest in ((), (), (16,))]
    latents = [floats(3, 2, 4, 48, dtype=bf16), floats(3, 16, 2, 48, seed=1, dtype=bf16)]
    mla_options = {"attn_sink": floats(4, seed=2), "indices": integers(*[[[40, -1, 2], [5, 6, 7]]] * 3)}
    experts = floats(2, 32, 128, seed=1, dtype=bf16)
    # As bytes: opcheck cannot multiply numbers of FP8.
    fp8_rows, fp8_experts = (x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (floats(5, 128, dtype=bf16), experts))
    packed = fp8_rows[:2, :32].contiguous()
    fp8_scales = {"a_scale": floats(5, 1, seed=2), "b_scale": floats(2, 1, 1, seed=3)}
    fp4_scales = {"b_scale": integers(*[[[120] * 4] * 32] * 2, dtype=torch.uint8)}
    layer = floats(5, 128, dtype=bf16), floats(3, 64, 128, dtype=bf16), floats(3, 128, 32, seed=1, dtype=bf16)
    routing = floats(5, 2).abs(), integers([0, 2], [2, 1], [-1, 0], [1, 2], [0, 1])
    # Numbers of 4 bits, times 2**-4.
    halves = [x.view(torch.uint8)[..., : x.shape[-1] // 2].contiguous() for x in layer[1:]]
    halves_scale = {
        f"w{i + 1}_scale": torch.full((3, x.shape[1], x.shape[2] // 16), 123, dtype=torch.uint8, device=device)
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
        Call("quantize_mxfp4", (floats(3, 64),)),
        Call("dequantize_mxfp4", (packed, integers([120, 3], [130, 127], dtype=torch.uint8), "float32")),
        Call("scaled_fp4_quant", (floats(3, 64), share)),
        Call("dequantize_nvfp4", (packed, packed[:, :4].contiguous(), share)),
    ]  # fmt: skip
    return {" ".join((call.name, *call.options)): call for call in calls}


CALLS: dict[str, Callable[[str], Call]] = GATE_CALLS | {
    key: lambda device, key=key: _calls(device)[key]  # type: ignore[misc]
    for key in _calls("cpu")
}
WITH_OUT = [key for key, make in CALLS.items() if "out" in getattr(torch.ops.cukern, make("cpu").name).overloads()]
#: What each backend of torch.compile is tried on: operators that write, return, do both, or return a number.
THOROUGH = [
    *GATE_CALLS,
    *(key for key in CALLS if key.split()[0] in ("build_sequence_length_padding_offset", "masked_attention", "sample")),
]


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param](device)


@pytest.fixture(params=WITH_OUT)
def call_with_out(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param](device)


@pytest.fixture(params=THOROUGH)
def thorough_call(request: pytest.FixtureRequest, device: str) -> Call:
    return CALLS[request.param](device)


def _assert_same(got: Any, wanted: Any) -> None:
    """The same bits, in tensors of the same kind, the same numbers, and None for None."""
    assert len(got) == len(wanted) > 0
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.device) == (other.dtype, other.device)
            assert torch.equal(one, other)
        else:
            assert type(one) is type(other) in (int, type(None))
            assert one == other


# --- what is registered -------------------------------------------------------------------------------


def test_each_function_has_an_operator_and_a_case_here() -> None:
    assert FUNCTIONS
    assert sorted(DECLARED) == sorted(FUNCTIONS) == sorted({name.split()[0] for name in CALLS})


@pytest.mark.parametrize("name", DECLARED)
def test_the_schema_has_the_arguments_of_the_function(name: str) -> None:
    parameters = dict(inspect.signature(getattr(cukern, name)).parameters)
    # Where vLLM's functions have `out`, it is an argument like the others.
    has_out = "out" in parameters and parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
    if has_out:
        del parameters["out"]
    flags = re.findall(rf"(?:^|\n){name}\.(\w+)", "\n".join(DECLARED[name].TORCH_OPS))
    packet = getattr(torch.ops.cukern, name)
    written = [a for a in packet.default._schema.arguments if a.alias_info is not None]
    functional = bool(written) and all(isinstance(a.type, torch.OptionalType) for a in written)
    of_flags = [overload for flag in flags for overload in (flag, *[f"{flag}_out"] * has_out)]
    assert packet.overloads() == ["default", *["out"] * has_out, *["functional"] * functional, *of_flags]
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        returning = getattr(packet, "default" if overload == "out" else overload.removesuffix("_out"))
        added = [result.name for result in returning._schema.returns] if overload.endswith("out") else []
        assert [a.name for a in arguments[len(arguments) - len(added) :]] == added
        taken = {a.name: a for a in arguments[: len(arguments) - len(added)]}
        # An operator may leave out what changes how many results there are.
        left_out = [p for p in parameters if p not in taken]
        without = [a.name for a in written] if overload == "functional" else []
        assert all(p in without or (p.startswith("return_") and parameters[p].default is False) for p in left_out)
        assert list(taken) == [p for p in parameters if p not in left_out]
        for argument in taken.values():
            parameter = parameters[argument.name]
            assert argument.kwarg_only == (parameter.kind is parameter.KEYWORD_ONLY)
            assert argument.has_default_value() == (parameter.default is not parameter.empty)
            if argument.has_default_value() and not _stands_for_a_number(argument, parameter):
                # The dispatcher leaves out an argument that has its default.
                assert argument.default_value == parameter.default
        # What is written may not be taken for the same memory.
        # A list keeps its letter elsewhere.
        aliases = [set(a.alias_info.before_set) or {a.name} for a in arguments if a.alias_info is not None]
        assert len(set().union(*aliases)) == len(aliases) >= len(added)


def _stands_for_a_number(argument: Any, parameter: inspect.Parameter) -> bool:
    """Whether an optional tensor has None for the default of a function that also takes a number."""
    optional = isinstance(argument.type, torch.OptionalType) and argument.default_value is None
    return optional and isinstance(parameter.default, (int, float))


def test_importing_the_module_again_leaves_the_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.ops.cukern.moe_fused_gate.default
    importlib.reload(cukern.torch_ops)
    monkeypatch.delitem(sys.modules, "cukern.torch_ops")
    again = importlib.import_module("cukern.torch_ops")
    monkeypatch.setattr(cukern, "torch_ops", again)
    assert torch.ops.cukern.moe_fused_gate.default is before
    call = _gate("cpu")
    _assert_same(before(*call.args), call.expected())


def test_a_new_ops_module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def test_only_double(input: Any, factor: int = 2, *, out: Any = None) -> Any:
        return torch.mul(input, factor, out=out)

    module = SimpleNamespace(
        test_only_double=test_only_double,
        TORCH_OPS={
            "test_only_double(Tensor input, int factor=2) -> (Tensor doubled)": (
                lambda input, factor=2: [(input, input.shape, "float32")]
            )
        },
    )
    monkeypatch.setattr(ops, "test_only", module, raising=False)
    cukern.torch_ops._register_all()
    x, out = torch.ones(3), torch.zeros(3)
    assert torch.equal(torch.ops.cukern.test_only_double(x), 2 * x)
    assert torch.ops.cukern.test_only_double.out(x, 3, doubled=out) is None
    assert torch.equal(out, 3 * x)
    torch.library.opcheck(torch.ops.cukern.test_only_double.default, (x,))
    torch.library.opcheck(torch.ops.cukern.test_only_double.out, (x,), {"doubled": out})
    compiled = torch.compile(
        lambda x, out: (test_only_double(x), test_only_double(x, 5, out=out)), fullgraph=True, backend="aot_eager"
    )
    doubled, written = compiled(x, out)
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(written, 5 * x)
    assert torch.equal(out, 5 * x)


def test_operators_that_write_and_return(monkeypatch: pytest.MonkeyPatch) -> None:
    def test_only_add(input: Any, total: Any, count: Any = None, *, out: Any = None) -> Any:
        total += input
        if count is not None:
            count += 1
        return torch.mul(input, 2, out=out)

    schema = "test_only_add(Tensor input, Tensor(a!) total, Tensor(c!)? count=None) -> Tensor doubled"
    results = {schema: lambda input, *_: [(input, input.shape, "float32")]}
    module = SimpleNamespace(test_only_add=test_only_add, TORCH_OPS=results)
    monkeypatch.setattr(ops, "test_only_add", module, raising=False)
    cukern.torch_ops._register_all()
    packet = torch.ops.cukern.test_only_add
    assert packet.overloads() == ["default", "out"]  # one argument is always written

    def run(x: Any, total: Any, count: Any, out: Any) -> Any:
        doubled = test_only_add(x, total, count) + total
        assert test_only_add(x, total, count=count, out=out) is out
        return doubled, out + total

    for count in (None, 0):
        for backend in ("none", "aot_eager", "inductor"):
            counts = () if count is None else (torch.zeros(1),)
            x, total, out = torch.ones(3), torch.full((3,), 5.0), torch.zeros(3)
            compiled = _compiled(run, backend) if backend != "none" else run
            first, second = compiled(x, total, *(counts or (None,)), out)
            assert first.tolist() == [8] * 3 and second.tolist() == [9] * 3 and total.tolist() == [7] * 3
            assert all(c == 2 for c in counts)
        torch.library.opcheck(packet.default, (x, total, *counts))
        torch.library.opcheck(packet.out, (x, total, *counts), {"doubled": out})


def test_the_results_of_out_have_letters_of_their_own() -> None:
    schema = "f(Tensor x, Tensor(a!) y, Tensor(c!)? z=None, *, int n=1) -> (Tensor p, Tensor q)"
    wanted = "f.out(Tensor x, Tensor(a!) y, Tensor(c!)? z=None, *, int n=1, Tensor(b!) p, Tensor(d!) q) -> ()"
    assert cukern.torch_ops._out_schema(schema) == wanted
    assert cukern.torch_ops._out_schema("f(Tensor x) -> Tensor y") == "f.out(Tensor x, *, Tensor(a!) y) -> ()"


def test_the_package_does_not_import_torch() -> None:
    code = "import sys, cukern; assert 'torch' not in sys.modules and 'cukern.torch_ops' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- eager --------------------------------------------------------------------------------------------


def test_an_operator_returns_and_writes_what_its_function_does(call: Call) -> None:
    _assert_same(call.outcome(call.operator()), call.expected())
    if not call.results:
        assert call.operator()(*call.args, **call.options) is None


def test_an_operator_takes_keywords(device: str) -> None:
    call = _gate(device)
    names = ("input", "bias", "num_expert_group", "topk_group", "topk")
    _assert_same(torch.ops.cukern.moe_fused_gate(**dict(zip(names, call.args, strict=True))), call.expected())
    call = _topk_softmax(device)
    names = ("topk_weights", "topk_ids", "gating_output")
    torch.ops.cukern.topk_softmax(**dict(zip(names, call.args, strict=True)))
    _assert_same(call.args[:2], call.expected())


def test_the_out_overload_writes_what_the_operator_returns(call_with_out: Call) -> None:
    results = call_with_out.poisoned_results()

    def into_results(*args: Any, **options: Any) -> list[torch.Tensor]:
        assert call_with_out.operator("out")(*args, **options, **results) is None
        return list(results.values())

    _assert_same(call_with_out.outcome(into_results), call_with_out.expected())


def test_opcheck(call: Call) -> None:
    torch.library.opcheck(call.operator(), call.args, call.options)


@pytest.mark.parametrize("key", [*(key for key in GATE_CALLS if key in WITH_OUT), "masked_attention scale"])
def test_opcheck_of_the_out_overload(key: str, device: str) -> None:
    call = CALLS[key](device)
    torch.library.opcheck(call.operator("out"), call.args, {**call.options, **call.poisoned_results()})


def test_meta_tensors_give_shapes() -> None:
    logits, bias = _random(9, 256, device="meta"), _random(256, device="meta")
    weights, ids = torch.ops.cukern.moe_fused_gate(logits, bias, 8, 4, 6)
    assert (weights.shape, weights.dtype, weights.device.type) == ((9, 6), torch.float32, "meta")
    assert (ids.shape, ids.dtype, ids.device.type) == ((9, 6), torch.int32, "meta")


def _bad_calls(device: str) -> dict[str, Call]:
    logits, bias, *sizes = _gate(device).args
    weights, ids = _outputs(5, 8, device)
    return {
        "dtype": Call("moe_fused_gate", (logits.double(), bias, *sizes)),
        "bias length": Call("moe_fused_gate", (logits, bias[:-1], *sizes)),
        "dimensions": Call("moe_fused_gate", (logits[0], bias, *sizes)),
        "groups that do not divide": Call("moe_fused_gate", (logits, bias, 7, 4, 8)),
        "topk too large": Call("moe_fused_gate", (logits, bias, 8, 1, 33)),
        "scoring": Call("moe_fused_gate", (logits, bias, *sizes), {"scoring_func": "tanh"}),
        "strides": Call("moe_fused_gate", (logits.t().contiguous().t(), bias, *sizes)),
        "padding dtype": Call("moe_fused_gate", (logits, bias, *sizes), {"num_token_non_padded": bias[:1]}),
        "hidden states": Call("grouped_topk", (logits[:3], logits, 8, True)),
        "ids dtype": Call("topk_softmax", (weights, ids.long(), logits)),
        "weights shape": Call("topk_sigmoid", (weights[:2], ids, logits)),
    }


@pytest.mark.parametrize("case", _bad_calls("cpu"))
def test_an_operator_raises_what_its_function_raises(case: str, device: str) -> None:
    call = _bad_calls(device)[case]
    with pytest.raises((ValueError, TypeError)) as wanted:
        getattr(cukern, call.name)(*call.args, **call.options)
    with pytest.raises(wanted.type) as got:
        call.operator()(*call.args, **call.options)
    assert str(got.value) == str(wanted.value)


def test_an_error_of_the_out_overload_comes_through(device: str) -> None:
    call = _gate(device)
    weights, ids = _outputs(5, 7, device)
    with pytest.raises(ValueError, match=r"out\[0\] must be of shape \[tokens, topk\] = \[5, 8\], got \[5, 7\]"):
        torch.ops.cukern.moe_fused_gate.out(*call.args, weights=weights, ids=ids)


def test_a_number_where_a_tensor_must_be_is_refused() -> None:
    call = _gate("cpu")
    with pytest.raises(RuntimeError, match=r"Tensor.*num_token_non_padded.*int"):
        torch.ops.cukern.moe_fused_gate(*call.args, num_token_non_padded=3)


# --- gradients ----------------------------------------------------------------------------------------

NO_GRADIENT = r" must be a tensor that does not require grad \(there is no backward"


def _with_gradient(call: Call, position: int) -> Call:
    args = list(call.args)
    args[position] = args[position].clone().requires_grad_()
    return call._replace(args=tuple(args))


@pytest.mark.parametrize(
    ("case", "position", "name"),
    [
        ("moe_fused_gate", 0, "input"),
        ("moe_fused_gate", 1, "bias"),
        ("biased_grouped_topk", 1, "gating_output"),
        ("topk_softmax", 2, "gating_output"),
        ("topk_softmax", 0, "topk_weights"),
    ],
)
def test_a_gradient_that_would_be_lost_is_refused(case: str, position: int, name: str, device: str) -> None:
    call = _with_gradient(CALLS[case](device), position)
    with pytest.raises(RuntimeError, match=name + NO_GRADIENT):
        call.operator()(*call.args, **call.options)
    with torch.no_grad():
        returned = call.operator()(*call.args, **call.options) or call.args[:2]
        _assert_same(returned, call.expected())
    assert not call.results or not any(result.requires_grad for result in returned)


def test_the_out_overload_refuses_gradients(device: str) -> None:
    call = _gate(device)
    weights, ids = _outputs(5, 8, device)
    with pytest.raises(RuntimeError, match="weights" + NO_GRADIENT):
        torch.ops.cukern.moe_fused_gate.out(*call.args, weights=weights.requires_grad_(), ids=ids)


def test_a_gradient_is_refused_when_it_is_traced(device: str) -> None:
    call = _with_gradient(_gate(device), 0)
    route = torch.compile(lambda *args: cukern.moe_fused_gate(*args), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        _assert_same(route(*call.args), call.expected())
    with pytest.raises(Exception, match="input" + NO_GRADIENT):
        route(*call.args)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_operators_run_in_every_inference_mode(mode: Callable[[], Any], call: Call) -> None:
    with mode():
        _assert_same(call.outcome(call.operator()), call.expected())


def test_autograd_notices_that_a_saved_tensor_was_written(device: str) -> None:
    call = _topk_softmax(device)
    weights, ids = call.args[:2]
    factor = torch.ones(5, 8, device=device, requires_grad=True)
    product = factor * weights  # keeps weights for the backward
    call.operator()(*call.args)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    product = factor * weights
    torch.ops.cukern.moe_fused_gate.out(*_gate(device).args, weights=weights, ids=ids)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("key", ["masked_attention scale", "sample seed offset finished end_id", "update_finished"])
def test_a_write_counts_as_a_new_version(key: str, device: str) -> None:
    call = CALLS[key](device)
    versions: list[tuple[torch.Tensor, int]] = []

    def observe(*args: Any, **options: Any) -> Any:
        versions.extend((x, x._version) for x in (*args, *options.values()) if isinstance(x, torch.Tensor))
        return call.operator()(*args, **options)

    call.outcome(observe)
    arguments = call.operator()._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None]
    names = [a.name for a in arguments][: len(call.args)] + list(call.options)
    tensors = [name for name, x in zip(names, (*call.args, *call.options.values()), strict=True)
               if isinstance(x, torch.Tensor)]  # fmt: skip
    grown = [name for name, (x, before) in zip(tensors, versions, strict=True) if x._version > before]
    assert grown == [name for name in tensors if name in written] != []


# --- torch.compile ------------------------------------------------------------------------------------

BACKENDS = ["eager", "aot_eager", "inductor"]


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    # A function of its own: dynamo would look at the one that the operator stands for.
    return torch.compile(lambda *args, **options: function(*args, **options), fullgraph=True, backend=backend)


def _writes_nothing_though_it_could(call: Call) -> bool:
    operator = getattr(torch.ops.cukern, call.name)
    return "functional" in operator.overloads() and len(call.expected()) == len(call.results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_operators_return_the_same(backend: str, thorough_call: Call) -> None:
    call = thorough_call
    operator = call.operator("functional" if _writes_nothing_though_it_could(call) else "default")
    _assert_same(call.outcome(_compiled(operator, backend)), call.expected())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_functions_are_their_operators(backend: str, thorough_call: Call) -> None:
    call = thorough_call
    _assert_same(call.outcome(_compiled(getattr(cukern, call.name), backend)), call.expected())


def test_each_function_can_be_compiled(call: Call) -> None:
    found: list[str] = []
    backend = _backend_that_lists_operators(found, aot_eager=True)
    _assert_same(call.outcome(_compiled(getattr(cukern, call.name), backend)), call.expected())
    overload = "functional" if _writes_nothing_though_it_could(call) else "default"
    assert found == [f"cukern.{call.name}.{overload}"]


def _targets(graph: torch.fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def _backend_that_lists_operators(found: list[str], aot_eager: bool = False) -> Any:
    """A backend of torch.compile that adds the operators of cukern in its graph to `found`."""

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.extend(name for name in map(str, _targets(module.graph)) if name.startswith("cukern."))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs) if aot_eager else module.forward

    return backend


def _operators_in_graph_of(function: Callable[..., Any], *args: Any) -> list[str]:
    found: list[str] = []
    torch.compile(function, fullgraph=True, backend=_backend_that_lists_operators(found))(*args)
    return found


def test_a_function_stays_in_the_graph_as_its_operator() -> None:
    def route(logits: Any, bias: Any, weights: Any, ids: Any) -> Any:
        cukern.moe_fused_gate(logits, bias, 8, 4, topk=8, out=(weights, ids))
        first = cukern.topk_softmax(weights, topk_ids=ids, gating_output=logits, renormalize=True)
        assert first[0] is weights and first[1] is ids
        return cukern.grouped_topk(None, logits, 8, renormalize=False)

    found = _operators_in_graph_of(route, *_gate("cpu").args[:2], *_outputs(5, 8, "cpu"))
    assert found == ["cukern.moe_fused_gate.out", "cukern.topk_softmax.default", "cukern.grouped_topk.default"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_written_in_a_graph_is_read_in_order(backend: str, device: str) -> None:
    def route(logits: torch.Tensor, kept: torch.Tensor, kept_ids: torch.Tensor) -> Any:
        weights = logits.new_empty(5, 8)
        ids = logits.new_empty(5, 8, dtype=torch.int32)
        torch.ops.cukern.topk_softmax(weights, ids, logits)
        # The weights are the logits here, once before and once after they are written again.
        torch.ops.cukern.topk_sigmoid(kept, kept_ids, weights)
        torch.ops.cukern.topk_sigmoid(weights, ids, logits)
        return cukern.grouped_topk(None, weights, 4, True)

    logits = _random(5, 128, device=device)
    wanted_kept, kept = _outputs(5, 8, device), _outputs(5, 8, device)
    wanted = route(logits, *wanted_kept)
    _assert_same(torch.compile(route, fullgraph=True, backend=backend)(logits, *kept), wanted)
    _assert_same(kept, wanted_kept)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoding_step_is_one_graph(backend: str, device: str) -> None:
    # What a step writes, the next one reads: the caches, the ends and the lengths.
    def step(q: Any, caches: Any, step: int, weight: Any, seed: Any, finished: Any, sequence_length: Any) -> Any:
        attended = cukern.masked_attention(q, q + 1, q * 2, None, None, None, *caches, step)
        entered = caches[0][step - 1].clone()
        ids = cukern.sample(attended @ weight, seed=seed, finished=finished, end_id=3, sequence_length=sequence_length)
        return attended, entered, ids, finished | (ids == 0), sequence_length + 1

    def run(function: Callable[..., Any]) -> list[Any]:
        caches = tuple(torch.zeros(4, 5, 2, 16, device=device) for _ in range(2))
        finished = torch.tensor([False, True, False, False, False], device=device)
        sequence_length = torch.full((5,), 7, dtype=torch.int32, device=device)
        weight = _random(32, 6, device=device, seed=1)
        returned = []
        for i in (1, 2):
            q = _random(5, 32, device=device, seed=i)
            returned += function(q, caches, i, weight, torch.tensor(i, device=device), finished, sequence_length)
        return [*returned, *caches, finished, sequence_length]

    _assert_same(run(_compiled(step, backend)), run(step))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_any_number_of_words(backend: str, device: str) -> None:
    # How many words there are is only known when the graph runs.
    def through(padded: torch.Tensor, lengths: torch.Tensor) -> Any:
        offsets, cu_seqlens, words = cukern.build_sequence_length_padding_offset(lengths, padded.shape[1])
        packed = cukern.remove_sequence_length_padding(padded, offsets) * 2
        rebuilt = cukern.rebuild_sequence_length_padding(packed, offsets, *padded.shape[:2])
        return rebuilt, cu_seqlens, words, words + 1

    torch._dynamo.mark_dynamic(padded := _random(3, 4, 6, device=device), 0)
    compiled = torch.compile(through, fullgraph=True, backend=backend)
    for lengths in ([4, 2, 1], [1, 1, 4], [0, 0, 0]):
        given = torch.tensor(lengths, dtype=torch.int32, device=device)
        got = compiled(padded, given)
        _assert_same(got, through(padded, given))
        assert got[2:] == (sum(lengths), sum(lengths) + 1)


def test_out_in_a_graph_of_an_operator_that_also_writes(device: str) -> None:
    call = CALLS["masked_attention scale"](device)
    out = torch.full_like(call.args[0], torch.nan)

    def attend(*args: Any) -> Any:
        assert cukern.masked_attention(*args, scale=0.25, out=out) is out
        return out * 2

    doubled, *written = call.outcome(lambda *args, **_: torch.compile(attend, fullgraph=True)(*args))
    attended, *wanted = call.expected()
    _assert_same([out, doubled, *written], [attended, attended * 2, *wanted])


def test_one_graph_serves_any_number_of_tokens(device: str) -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def route(logits: torch.Tensor, bias: torch.Tensor) -> Any:
        weights, ids = torch.ops.cukern.moe_fused_gate(logits, bias, 8, 4, 8)
        # In a later shape the number of tokens must still be a symbol.
        return weights.view(logits.shape[0] * 2, 4), ids

    for tokens in (3, 7, 40):
        logits, bias, *_ = _gate(device, tokens).args
        torch._dynamo.mark_dynamic(logits, 0)
        weights, ids = route(logits, bias)
        wanted = _gate(device, tokens).expected()
        assert weights.shape == (2 * tokens, 4)
        _assert_same((weights.view(tokens, 8), ids), wanted)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_in_compiled_code_is_the_functions(backend: str, device: str) -> None:
    logits, bias, *_ = _gate(device).args
    route = torch.compile(lambda *args: torch.ops.cukern.moe_fused_gate(*args, 7, 4, 8), backend=backend)
    with pytest.raises(ValueError, match="num_expert_group must be a divisor of the 256 experts, got 7"):
        route(logits, bias)


# --- torch.export -------------------------------------------------------------------------------------


class Router(torch.nn.Module):
    """A router as models have it, with parameters that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(_random(256, 16, device="cpu"))
        self.bias = torch.nn.Parameter(_random(256, device="cpu", seed=1))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden_states, self.weight)
        return torch.ops.cukern.moe_fused_gate(logits, self.bias, 8, 4, 8, renormalize=False)


def test_an_exported_router_takes_any_number_of_tokens(device: str) -> None:
    router = Router().to(device)
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(router, (_random(6, 16, device=device),), dynamic_shapes=({0: tokens},))
        assert torch.ops.cukern.moe_fused_gate.default in _targets(program.graph)
        for count in (1, 6, 33):
            hidden_states = _random(count, 16, device=device, seed=count)
            _assert_same(program.module()(hidden_states), router(hidden_states))


def test_an_export_keeps_what_is_written(device: str) -> None:
    class Route(torch.nn.Module):
        def forward(self, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
            torch.ops.cukern.topk_softmax(weights, ids, logits)
            return weights.sum(dim=1)

    call = _topk_softmax(device)
    wanted = call.expected()
    program = torch.export.export(Route(), (call.args[2], *_outputs(5, 8, device))).run_decompositions()
    weights, ids = _outputs(5, 8, device)
    total = program.module()(call.args[2], weights, ids)
    _assert_same((weights, ids), wanted)
    assert torch.equal(total, wanted[0].sum(dim=1))


def test_an_export_refuses_a_gradient() -> None:
    with pytest.raises(Exception, match="input" + NO_GRADIENT):
        torch.export.export(Router(), (_random(6, 16, device="cpu"),))


# --- streams and graphs -------------------------------------------------------------------------------


def _operator_into(call: Call, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run the overload that writes."""
    if not call.results:
        call.operator()(*outputs, *call.args[2:], **call.options)
    else:
        call.operator("out")(*call.args, **call.options, weights=outputs[0], ids=outputs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["moe_fused_gate", "moe_fused_gate all options", "grouped_topk", "topk_softmax"])
def test_operators_replay_in_a_cuda_graph(case: str) -> None:
    call = CALLS[case]("cuda")
    logits = call.args[{"moe_fused_gate": 0, "grouped_topk": 1, "topk_softmax": 2}[call.name]]
    shape = call.expected()[0].shape  # which loads the kernel, as a capture cannot
    written = _outputs(*shape, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = call.operator()(*call.args, **call.options) if call.results else None
        _operator_into(call, written)
    for seed in (5, 6):
        logits.copy_(_random(*logits.shape, device="cuda", seed=seed))
        for tensor in (*written, *(returned or ())):
            tensor.fill_(-7)
        graph.replay()
        wanted = call.expected()
        _assert_same(written, wanted)
        if returned is not None:
            _assert_same(returned, wanted)


@pytest.mark.gpu
def test_operators_run_on_the_current_stream() -> None:
    call = _gate("cuda")
    logits = call.args[0]
    wanted = call.expected()
    values = logits.clone()
    written = _outputs(5, 8, "cuda")
    logits.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # The logits are there only after a while: a kernel on another stream would see the zeros.
        torch.cuda._sleep(100_000_000)
        logits.copy_(values)
        returned = call.operator()(*call.args)
        _operator_into(call, written)
    stream.synchronize()
    _assert_same(returned, wanted)
    _assert_same(written, wanted)


@pytest.mark.gpu
def test_compiled_code_replays_in_a_cuda_graph() -> None:
    # mode="reduce-overhead" records what inductor made in CUDA graphs of its own.
    route = torch.compile(
        lambda logits, bias: cukern.moe_fused_gate(logits * 2, bias, 8, 4, 8), fullgraph=True, mode="reduce-overhead"
    )
    bias = _gate("cuda").args[1]
    for seed in range(4):  # warm-up, recording, replays
        logits = _random(5, 256, device="cuda", seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        _assert_same(route(logits, bias), cukern.moe_fused_gate(logits * 2, bias, 8, 4, 8))
