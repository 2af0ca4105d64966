"""A replacement for `flashinfer.activation` of flashinfer-python 0.7.2.post1. `enable_pdl` is ignored."""

from __future__ import annotations

import cukern
from cukern.compat._limits import not_covered
from cukern.runtime.arrays import AnyArray

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]

NOT_COVERED = ("silu_and_mul_scaled_nvfp4_experts_quantize",)
__getattr__ = not_covered("cukern.compat.flashinfer.activation", "flashinfer.activation", names=NOT_COVERED)


def silu_and_mul(input: AnyArray, out: AnyArray | None = None, enable_pdl: bool | None = None) -> AnyArray:
    """Call `cukern.silu_and_mul`."""
    return cukern.silu_and_mul(input, out=out)


def gelu_tanh_and_mul(input: AnyArray, out: AnyArray | None = None, enable_pdl: bool | None = None) -> AnyArray:
    """Call `cukern.gelu_tanh_and_mul`."""
    return cukern.gelu_tanh_and_mul(input, out=out)


def gelu_and_mul(input: AnyArray, out: AnyArray | None = None, enable_pdl: bool | None = None) -> AnyArray:
    """Call `cukern.gelu_and_mul`."""
    return cukern.gelu_and_mul(input, out=out)
