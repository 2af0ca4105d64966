"""A replacement for `flashinfer.norm` of flashinfer-python 0.7.2.post1. `enable_pdl` is ignored.

Functions that add a residual normalize the float32 sum before it is rounded. The functions in `NOT_COVERED` raise
NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import torch

import cukern
from cukern.compat._limits import not_covered, refuse
from cukern.runtime.arrays import AnyArray

__all__ = [
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "layernorm",
    "rmsnorm",
    "rmsnorm_quant",
]

NOT_COVERED = (
    "fused_add_rmsnorm_fp8_block_quant",
    "fused_qk_rmsnorm_rope",
    "fused_rmsnorm_silu",
    "gated_residual_next_rmsnorm",
    "gated_residual_rmsnorm",
    "layernorm_quant",
    "rmsnorm_sigmoid_gate",
)
__getattr__ = not_covered("cukern.compat.flashinfer.norm", "flashinfer.norm", names=NOT_COVERED)


def _expect_e4m3(function: str, out: Any) -> None:
    if out.dtype != torch.float8_e4m3fn:
        refuse(function, "out", "of float8_e4m3fn", out.dtype)


def rmsnorm(
    input: AnyArray, weight: AnyArray, eps: float = 1e-6, out: AnyArray | None = None, enable_pdl: bool | None = None
) -> AnyArray:
    """Call `cukern.rms_norm`."""
    return cukern.rms_norm(input, weight, eps, out=out)


def rmsnorm_quant(
    out: AnyArray,
    input: AnyArray,
    weight: AnyArray,
    scale: float | AnyArray,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Call `cukern.rms_norm_quant` with a given scale. Refuses an `out` that is not float8_e4m3fn."""
    _expect_e4m3("rmsnorm_quant", out)
    cukern.rms_norm_quant(input, weight, eps, scale=scale, out_q=out)


def fused_add_rmsnorm(
    input: AnyArray, residual: AnyArray, weight: AnyArray, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Call `cukern.fused_add_rms_norm`, which writes `input` and `residual`."""
    cukern.fused_add_rms_norm(input, residual, weight, eps, round_sum=False)


def fused_add_rmsnorm_quant(
    out: AnyArray,
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    scale: float | AnyArray,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Call `cukern.fused_add_rms_norm_quant` with a given scale. Refuses an `out` that is not float8_e4m3fn."""
    _expect_e4m3("fused_add_rmsnorm_quant", out)
    cukern.fused_add_rms_norm_quant(input, residual, weight, eps, scale=scale, round_sum=False, out_q=out)


def gemma_rmsnorm(
    input: AnyArray, weight: AnyArray, eps: float = 1e-6, out: AnyArray | None = None, enable_pdl: bool | None = None
) -> AnyArray:
    """Call `cukern.rms_norm` with the factor `1 + weight`, because Gemma stores each weight minus 1."""
    return cukern.rms_norm(input, weight, eps, weight_offset=1.0, out=out)


def gemma_fused_add_rmsnorm(
    input: AnyArray, residual: AnyArray, weight: AnyArray, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    """Call `cukern.fused_add_rms_norm` with Gemma's factor `1 + weight`."""
    cukern.fused_add_rms_norm(input, residual, weight, eps, weight_offset=1.0, round_sum=False)


def layernorm(input: AnyArray, gemma: AnyArray, beta: AnyArray, eps: float = 1e-6) -> AnyArray:
    """Call `cukern.layer_norm` with the weight `gemma` and the bias `beta`."""
    return cukern.layer_norm(input, gemma, beta, eps)
