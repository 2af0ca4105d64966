"""Time RMS norm and layer norm beside PyTorch's, eager and compiled, and the kernels of FlashInfer, SGLang and vLLM."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.bench_quantization import groups_by_torch, static_by_torch, tokens_by_torch
from benchmarks.harness import Baseline, Case
from cukern.ops.norm import SPECIALIZED, SPECIALIZED_HEADS, SPECIALIZED_LAYER_NORM

EPSILON = 1e-6
SCALE = 0.02
GROUP = 128
#: Tokens and width: DeepSeek-V3's layers in prefill and decode; Llama-3-8B's and gpt-oss's; DeepSeek-V3's q_a.
SIZES = ((8192, 7168), (32, 7168), (1, 7168), (8192, 4096), (8192, 2880), (8192, 1536))
ADDED = SIZES[:3]
QUANTIZED = ((8192, 7168), (32, 7168))
#: Tokens, heads and head_dim of q in Qwen3-8B. q is a part of each row of the product for q, k and v.
HEADS = ((2048, 32, 128), (32, 32, 128))
OTHER_HEADS = 16
#: Tokens and width: BERT-base (half of 64 x 512 positions valid), BERT-large, MiniLM, one short text, Marian's step.
LAYER_SIZES = ((16384, 768), (16384, 1024), (16384, 384), (16, 384), (128, 512))

Call = Callable[..., Any]


# --- by torch -------------------------------------------------------------------------------------------


def by_torch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def added_by_torch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    residual.add_(x)
    return x.copy_(by_torch(residual, weight)), residual


def shifted_by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, EPSILON)


def added_and_shifted_by_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, input_bias: torch.Tensor
) -> torch.Tensor:
    return shifted_by_torch(x + input_bias + residual, weight, bias)


def quantized_by_torch(how: str) -> Call:
    quantize = {"group": groups_by_torch, "token": tokens_by_torch}.get(how)

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = by_torch(x.float(), weight.float())
        return quantize(y) if quantize else static_by_torch(y, scale)

    return run


def _near(ours: Any, theirs: Any) -> bool:
    """Return whether results are close: the others round more than once."""
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    return all(torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6) for a, b in pairs)


def _quantized_alike(ours: Any, theirs: Any) -> bool:
    """Return whether numbers are equal up to the last bit: the others round the norm to 16 bits before quantizing."""
    (our_bytes, our_scales), (their_bytes, their_scales) = ours, theirs
    same = (our_bytes.view(torch.uint8) == their_bytes.view(torch.uint8)).float().mean()
    numbers, others = our_bytes.float(), their_bytes.float()
    near = (numbers - others).abs() <= others.abs() / 4 + 1 / 64
    scales = our_scales.flatten(), their_scales.flatten()
    return bool(same > 0.8 and near.all()) and torch.allclose(*scales, rtol=2e-2, atol=0)


# --- the kernels of vLLM 0.26, sglang-kernel 0.4 and FlashInfer 0.6 ---------------------------------------


def _vllm() -> Call:
    function = importlib.import_module("vllm._custom_ops").rms_norm

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        function(out, x, weight, EPSILON)
        return out

    return run


def _vllm_added() -> Call:
    function = importlib.import_module("vllm._custom_ops").fused_add_rms_norm
    return lambda x, residual, weight: (function(x, residual, weight, EPSILON), (x, residual))[1]


def _vllm_quantized(how: str) -> Call:
    ops, fp8 = importlib.import_module("vllm._custom_ops"), torch.float8_e4m3fn
    if how == "group":
        return lambda x, weight, scale: ops.rms_norm_per_block_quant(x, weight, EPSILON, fp8, [1, GROUP])
    if how == "token":
        return lambda x, weight, scale: ops.rms_norm_dynamic_per_token_quant(x, weight, EPSILON, fp8)

    def run(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = x.new_empty(x.shape, dtype=fp8)
        torch.ops._C.rms_norm_static_fp8_quant(out, x, weight, scale, EPSILON)
        return out, scale

    return run


def _rmsnorm(module: str) -> Call:
    function = importlib.import_module(module).rmsnorm
    return lambda x, weight: function(x, weight, EPSILON)


def _added_rmsnorm(module: str) -> Call:
    function = importlib.import_module(module).fused_add_rmsnorm
    return lambda x, residual, weight: (function(x, residual, weight, EPSILON), (x, residual))[1]


# --- the cases ------------------------------------------------------------------------------------------


def _baselines(function: Call) -> dict[str, Baseline]:
    def compiled() -> Call:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return {"torch": Baseline(lambda: function), "torch.compile": Baseline(compiled, slow=True)}


def _drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, device=generator.device).bfloat16()


def _variant(width: int) -> str:
    return "specialized" if width in (*SPECIALIZED, *SPECIALIZED_HEADS) else "dynamic"


def _norm(tokens: int, width: int) -> Case:
    return Case(
        op="rms_norm",
        case={"tokens": tokens, "width": width, "dtype": "bfloat16"},
        variant=_variant(width),
        inputs=lambda generator: (_drawn(generator, tokens, width), _drawn(generator, width)),
        call=lambda x, weight: cukern.rms_norm(x, weight, EPSILON),
        bytes=4 * tokens * width,
        baselines=_baselines(by_torch),
        peers={
            "vLLM": Baseline(_vllm),
            "SGLang": Baseline(lambda: _rmsnorm("sgl_kernel")),
            "FlashInfer": Baseline(lambda: _rmsnorm("flashinfer.norm")),
        },
        agree=_near,
        host=tokens == 32,
    )


def _heads(tokens: int, heads: int, head_dim: int) -> Case:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        product = _drawn(generator, tokens, heads + OTHER_HEADS, head_dim)
        return product[:, :heads], _drawn(generator, head_dim)

    return dataclasses.replace(
        _norm(tokens, head_dim),
        case={"tokens": tokens, "heads": heads, "width": head_dim, "dtype": "bfloat16"},
        inputs=inputs,
        bytes=4 * tokens * heads * head_dim,
        peers={"vLLM": Baseline(_vllm), "FlashInfer": Baseline(lambda: _rmsnorm("flashinfer.norm"))},
        host=False,
    )


def _added(tokens: int, width: int) -> Case:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        x, residual = (_drawn(generator, tokens, width) for _ in range(2))
        return x, residual, _drawn(generator, width)

    return Case(
        op="fused_add_rms_norm",
        case={"tokens": tokens, "width": width, "dtype": "bfloat16"},
        variant=_variant(width),
        inputs=inputs,
        call=lambda x, residual, weight: cukern.fused_add_rms_norm(x, residual, weight, EPSILON),
        bytes=8 * tokens * width,
        baselines=_baselines(added_by_torch),
        peers={
            "vLLM": Baseline(_vllm_added),
            "SGLang": Baseline(lambda: _added_rmsnorm("sgl_kernel")),
            "FlashInfer": Baseline(lambda: _added_rmsnorm("flashinfer.norm")),
        },
        agree=_near,
        host=tokens == 32,
    )


def _quantized(tokens: int, width: int, how: str) -> Case:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        scale = torch.full((1,), SCALE, device=generator.device)
        return _drawn(generator, tokens, width), _drawn(generator, width), scale

    def call(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        options = {"group": {"group_size": GROUP}, "token": {"group_size": None}, "given": {"scale": scale}}[how]
        return cukern.rms_norm_quant(x, weight, EPSILON, **options)

    return Case(
        op="rms_norm_quant",
        case={"tokens": tokens, "width": width, "scales": how, "dtype": "bfloat16"},
        variant=_variant(width),
        inputs=inputs,
        call=call,
        bytes=3 * tokens * width + (4 * tokens * width // GROUP if how == "group" else 0),
        baselines=_baselines(quantized_by_torch(how)),
        peers={"vLLM": Baseline(lambda: _vllm_quantized(how))},
        agree=_quantized_alike,
    )


def _added_and_quantized(tokens: int, width: int) -> Case:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        residual.add_(x)
        return quantized_by_torch("group")(residual, weight, None)

    def vllm() -> Call:
        ops, fp8 = importlib.import_module("vllm._custom_ops"), torch.float8_e4m3fn
        return lambda x, residual, weight: ops.rms_norm_per_block_quant(
            x, weight, EPSILON, fp8, [1, GROUP], None, residual
        )

    return dataclasses.replace(
        _added(tokens, width),
        op="fused_add_rms_norm_quant",
        case={"tokens": tokens, "width": width, "scales": "group", "dtype": "bfloat16"},
        call=lambda x, residual, weight: cukern.fused_add_rms_norm_quant(x, residual, weight, EPSILON),
        bytes=7 * tokens * width + 4 * tokens * width // GROUP,
        baselines=_baselines(function),
        peers={"vLLM": Baseline(vllm)},
        agree=_quantized_alike,
        host=False,
    )


def _layer_norm(tokens: int, width: int) -> Case:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return tuple(_drawn(generator, *shape).half() for shape in ((tokens, width), (width,), (width,)))

    return Case(
        op="layer_norm",
        case={"tokens": tokens, "width": width, "dtype": "float16"},
        variant="specialized" if width in SPECIALIZED_LAYER_NORM else "dynamic",
        inputs=inputs,
        call=lambda x, weight, bias: cukern.layer_norm(x, weight, bias, EPSILON),
        bytes=4 * tokens * width,
        baselines=_baselines(shifted_by_torch),
        agree=_near,
        host=tokens == 16,
    )


def _added_layer_norm(tokens: int, width: int) -> Case:
    """Return a case of the end of a BERT layer: the product's bias, the residual and the norm. The sum is not kept."""

    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        shapes = [(tokens, width)] * 2 + [(width,)] * 3
        return tuple(_drawn(generator, *shape).half() for shape in shapes)

    def call(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, more: Any) -> Any:
        return cukern.fused_add_layer_norm(x, residual, weight, bias, EPSILON, input_bias=more)

    return dataclasses.replace(
        _layer_norm(tokens, width),
        op="fused_add_layer_norm",
        inputs=inputs,
        call=call,
        bytes=6 * tokens * width,
        baselines=_baselines(added_and_shifted_by_torch),
    )


def shrunk(case: Case) -> Case:
    """Return the case with few tokens and columns, for a machine without a GPU."""
    if "heads" in case.case:
        return _heads(3, 4, 128)
    if case.op == "rms_norm_quant":
        return _quantized(3, 256, str(case.case["scales"]))
    makers = {
        "rms_norm": _norm,
        "fused_add_rms_norm": _added,
        "fused_add_rms_norm_quant": _added_and_quantized,
        "layer_norm": _layer_norm,
        "fused_add_layer_norm": _added_layer_norm,
    }
    return makers[case.op](3, 256)


def cases() -> list[Case]:
    """Return all cases, the headline first."""
    return [
        *(_norm(*sizes) for sizes in SIZES),
        *(_heads(*sizes) for sizes in HEADS),
        *(_added(*sizes) for sizes in ADDED),
        *(_quantized(*sizes, how) for sizes in QUANTIZED for how in ("group", "token", "given")),
        *(_added_and_quantized(*sizes) for sizes in QUANTIZED),
        *(_layer_norm(*sizes) for sizes in LAYER_SIZES),
        *(_added_layer_norm(*sizes) for sizes in LAYER_SIZES),
    ]
