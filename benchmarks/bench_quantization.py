"""Time quantization beside the same formulas in PyTorch, eager and compiled, and the kernels of SGLang and vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

#: SIZES: (tokens, hidden). ACTIVATED: (tokens, inter), with an activation before the quantization.
SIZES = ((8192, 7168), (64, 7168), (1, 7168))
ACTIVATED = ((8192, 2048), (64, 2048))
GROUP = 128

Call = Callable[..., Any]


def _fp8(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True)


def groups_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = _largest(groups).clamp(min=1e-10) / 448
    return _fp8(groups, scales).flatten(-2), scales[..., 0]


def groups_of_int8_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().unflatten(-1, (-1, GROUP))
    scales = _largest(groups).clamp(min=1e-10) / 127
    return (groups / scales).round().to(torch.int8).flatten(-2), scales[..., 0]


def tokens_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = x.float()
    scales = _largest(numbers).clamp(min=1 / 512) / 448
    return _fp8(numbers, scales), scales


def tensor_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = x.float()
    scale = numbers.abs().amax().clamp(min=1 / 512) / 448
    return _fp8(numbers, scale), scale.reshape(1)


def static_by_torch(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _fp8(x.float(), scale), scale


def tokens_of_int8_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = x.float()
    scales = _largest(numbers).clamp(min=1e-10) / 127
    return (numbers / scales).round().to(torch.int8), scales


def activated_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.float().chunk(2, -1)
    return groups_by_torch(torch.nn.functional.silu(gate) * up)


def _exactly(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, theirs, strict=True))


def _nearly(ours: Any, theirs: Any) -> bool:
    """Return whether results are equal except for a few numbers at a rounding boundary."""
    same = (ours[0].view(torch.uint8) == theirs[0].view(torch.uint8)).float().mean()
    return bool(same > 0.98) and torch.allclose(ours[1], theirs[1], rtol=1e-4, atol=0)


def _within_one(ours: Any, theirs: Any) -> bool:
    """Return whether integers differ by at most one: vLLM's and SGLang's groups truncate, and cukern rounds."""
    apart = (ours[0].int() - theirs[0].int()).abs()
    return bool(apart.max() <= 1) and torch.allclose(ours[1], theirs[1], rtol=1e-4, atol=0)


def _roughly(ours: Any, theirs: Any) -> bool:
    """Return whether numbers differ by about one step: the other library first rounds the activation to 16 bits."""
    (our_bytes, our_scales), (their_bytes, their_scales) = ours, theirs
    same = (our_bytes.view(torch.uint8) == their_bytes.view(torch.uint8)).float().mean()
    numbers, others = our_bytes.float(), their_bytes.float()
    near = (numbers - others).abs() <= others.abs() / 4 + 1 / 64
    return bool(same > 0.85 and near.all()) and torch.allclose(our_scales, their_scales, rtol=1e-2, atol=0)


# --- the kernels of vLLM 0.26 and sglang-kernel 0.4 -------------------------------------------------------


def _vllm_groups() -> Call:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return lambda x: per_token_group_quant_fp8(x, GROUP)


def _vllm_groups_of_int8() -> Call:
    from vllm.model_executor.layers.quantization.utils.int8_utils import per_token_group_quant_int8

    return lambda x: per_token_group_quant_int8(x, GROUP)


def _vllm_fp8(per_token: bool) -> Call:
    from vllm._custom_ops import scaled_fp8_quant

    return lambda x, *scale: scaled_fp8_quant(x, *scale, use_per_token_if_dynamic=per_token)


def _vllm_int8() -> Call:
    from vllm._custom_ops import scaled_int8_quant

    return lambda x: scaled_int8_quant(x)[:2]


def _vllm_activated() -> Call:
    from vllm._custom_ops import silu_and_mul_per_block_quant

    return lambda x: silu_and_mul_per_block_quant(x, GROUP, torch.float8_e4m3fn)


def _sglang_groups(dtype: torch.dtype) -> Call:
    from sgl_kernel import sgl_per_token_group_quant_8bit

    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = x.new_empty(x.shape, dtype=dtype)
        scales = x.new_empty(len(x), x.shape[1] // GROUP, dtype=torch.float32)
        limits = 1e-10, float(info.min), float(info.max)
        sgl_per_token_group_quant_8bit(x, numbers, scales, GROUP, *limits, enable_v2=True)
        return numbers, scales

    return quantize


def _sglang_tokens() -> Call:
    from sgl_kernel import sgl_per_token_quant_fp8

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)
        sgl_per_token_quant_fp8(x, numbers, scales)
        return numbers, scales

    return quantize


#: By op and scope of a scale. Some of them multiply by a reciprocal where cukern divides.
PEERS: dict[tuple[str, str], dict[str, Callable[[], Call]]] = {
    ("per_token_group_quant_fp8", "group"): {
        "SGLang": lambda: _sglang_groups(torch.float8_e4m3fn),
        "vLLM": _vllm_groups,
    },
    ("per_token_group_quant_int8", "group"): {
        "SGLang": lambda: _sglang_groups(torch.int8),
        "vLLM": _vllm_groups_of_int8,
    },
    ("scaled_fp8_quant", "token"): {"SGLang": _sglang_tokens, "vLLM": lambda: _vllm_fp8(True)},
    ("scaled_fp8_quant", "tensor"): {"vLLM": lambda: _vllm_fp8(False)},
    ("scaled_fp8_quant", "given"): {"vLLM": lambda: _vllm_fp8(False)},
    ("scaled_int8_quant", "token"): {"vLLM": _vllm_int8},
    ("silu_and_mul_quant", "group"): {"vLLM": _vllm_activated},
}


def _peers(op: str, how: str) -> dict[str, Baseline]:
    agree = {"silu_and_mul_quant": _roughly, "per_token_group_quant_int8": _within_one}.get(op, _nearly)
    return {name: Baseline(load, agree=agree) for name, load in PEERS.get((op, how), {}).items()}


# --- the cases ------------------------------------------------------------------------------------------


def _baselines(function: Call | None) -> dict[str, Baseline]:
    if function is None:
        return {}

    def compiled() -> Call:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return {"torch": Baseline(lambda: function), "torch.compile": Baseline(compiled, slow=True)}


def _case(
    op: str,
    tokens: int,
    k: int,
    how: str,
    call: Call,
    bits: float,
    function: Call | None,
    *,
    halves: int = 1,
    agree: Call = _nearly,  # torch divides by a Python number by multiplying by the reciprocal
    extra: Callable[[str], tuple[torch.Tensor, ...]] = lambda device: (),
) -> Case:
    dtype = "bfloat16"

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, halves * k, generator=generator, device=generator.device)
        return x.to(getattr(torch, dtype)), *extra(str(generator.device))

    size = "inter" if halves == 2 else "hidden"
    return Case(
        op=op,
        case={"tokens": tokens, size: k, "scales": how, "dtype": dtype},
        variant="vector",
        inputs=inputs,
        call=call,
        bytes=round(tokens * k * (halves * ITEM_SIZE[dtype] + bits / 8)),
        baselines=_baselines(function),
        peers=_peers(op, how),
        agree=agree if function else None,
        host=tokens == 64 and how in ("group", "tensor"),
    )


def _packed(tokens: int, k: int, group: int, op: str, call: Call) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        options = {"generator": generator, "device": generator.device, "dtype": torch.uint8}
        return tuple(torch.randint(0, 120, (tokens, k // each), **options) for each in (2, group))

    return Case(
        op=op,
        case={"tokens": tokens, "hidden": k, "scales": "group", "dtype": "bfloat16"},
        variant="vector",
        inputs=inputs,
        call=call,
        bytes=tokens * k * 2 + tokens * k // 2 + tokens * k // group,
    )


def _scale(device: str) -> tuple[torch.Tensor, ...]:
    return (torch.full((1,), 0.01, device=device),)


def _cases(tokens: int, k: int) -> list[Case]:
    by_group = 8 + 32 / GROUP
    fp8 = "scaled_fp8_quant"
    return [
        _case("per_token_group_quant_fp8", tokens, k, "group", lambda x: cukern.per_token_group_quant_fp8(x, GROUP),
              by_group, groups_by_torch),
        _case(fp8, tokens, k, "token", lambda x: cukern.scaled_fp8_quant(x, use_per_token_if_dynamic=True), 8,
              tokens_by_torch),
        _case(fp8, tokens, k, "tensor", cukern.scaled_fp8_quant, 8, tensor_by_torch),
        _case(fp8, tokens, k, "given", cukern.scaled_fp8_quant, 8, static_by_torch, extra=_scale),
        _case("per_token_group_quant_int8", tokens, k, "group", lambda x: cukern.per_token_group_quant_int8(x, GROUP),
              by_group, groups_of_int8_by_torch),
        _case("scaled_int8_quant", tokens, k, "token", lambda x: cukern.scaled_int8_quant(x)[:2], 8,
              tokens_of_int8_by_torch),
        _case("quantize_mxfp4", tokens, k, "group", cukern.quantize_mxfp4, 4 + 8 / 32, None),
        _case("scaled_fp4_quant", tokens, k, "group", lambda x: cukern.scaled_fp4_quant(x, 500.0), 4 + 8 / 16, None),
        _packed(tokens, k, 32, "dequantize_mxfp4", cukern.dequantize_mxfp4),
        _packed(tokens, k, 16, "dequantize_nvfp4", lambda x, s: cukern.dequantize_nvfp4(x, s, 500.0)),
    ]  # fmt: skip


def _activated(tokens: int, inter: int) -> list[Case]:
    name = "silu_and_mul_quant"
    return [
        _case(name, tokens, inter, "group", cukern.silu_and_mul_quant, 8 + 32 / GROUP, activated_by_torch, halves=2,
              agree=_nearly),
        _case(name, tokens, inter, "token", lambda x: cukern.silu_and_mul_quant(x, group_size=None), 8, None,
              halves=2),
    ]  # fmt: skip


def shrunk(case: Case) -> Case:
    """Return the case with few tokens and columns, for a machine without a GPU."""
    sizes = case.case
    small = [*_cases(3, 256), *_activated(3, 256)]
    found = next(c for c in small if c.op == case.op and c.case["scales"] == sizes["scales"])
    return found if found.agree else dataclasses.replace(found, agree=_exactly)


def cases() -> list[Case]:
    """Return all cases, the headline first."""
    return [
        *(case for tokens, k in SIZES for case in _cases(tokens, k)),
        *(case for tokens, inter in ACTIVATED for case in _activated(tokens, inter)),
    ]
