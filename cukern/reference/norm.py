"""RMS norm and layer norm in NumPy, with the float32 operations of the kernels in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.formats.quantized import SMALLEST
from cukern.reference import quantization
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernels do the same operations in the same order, including a correctly rounded reciprocal square root. All
    # NaN compare equal.
    "out": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
    "quantized": {"float8_e4m3fn": Tolerance(relative=0, absolute=0)},
    "scales": {"float32": Tolerance(relative=0, absolute=0)},
}

Array = NDArray[Any]

#: `folded_sum` reduces vectors of VECTOR elements to at most COLUMNS partial sums, then adds these pairwise.
VECTOR, COLUMNS = 8, 1024


def folded_sum(x: Array) -> Array:
    """Return the sum along the last axis, added in the order of the kernels. The axis is kept with size 1.

    1. Add the 8 elements of each vector in order.
    2. Add the sums of vectors whose indices differ by a multiple of 1024, in order.
    3. Add the second half of the remaining sums to the first half, until one is left.
    """
    units = max(-(-x.shape[-1] // VECTOR), 1)
    columns = min(1 << (units - 1).bit_length(), COLUMNS)
    turns = -(-units // columns)
    padded = np.zeros((*x.shape[:-1], turns * columns * VECTOR), np.float32)
    padded[..., : x.shape[-1]] = x
    sums = _one_by_one(_one_by_one(padded.reshape(*x.shape[:-1], turns, columns, VECTOR), -1), -2)
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums


def sum_of_squares(x: Array) -> Array:
    return folded_sum(x * x)


def _one_by_one(x: Array, axis: int) -> Array:
    """Return the sum along an axis, added in order."""
    first, *others = np.moveaxis(x, axis, 0)
    total = first.copy()
    for one in others:
        total += one
    return total


def normalized(x: Array, weight: Array | None, epsilon: float, weight_offset: float) -> Array:
    with np.errstate(all="ignore"):
        x = x.astype(np.float32)
        mean = sum_of_squares(x) * np.float32(1 / max(x.shape[-1], 1))
        y = x * _inverse_root(mean + np.float32(epsilon))
        return y if weight is None else y * (weight.astype(np.float32) + np.float32(weight_offset))


def _inverse_root(x: Array) -> Array:
    """Return 1 / sqrt(x), correctly rounded to float32."""
    return (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def _add(input: Array, residual: Array, round_sum: bool) -> Array:
    """Write the rounded sum to `residual`. Return it, or the float32 sum if `round_sum` is False."""
    with np.errstate(all="ignore"):
        total: Array = input.astype(np.float32) + residual.astype(np.float32)
        residual[...] = total.astype(residual.dtype)
    return residual if round_sum else total


def rms_norm(
    input: Array,
    weight: Array | None,
    epsilon: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out: Array | None = None,
) -> Array:
    with np.errstate(over="ignore"):
        y = normalized(input, weight, epsilon, weight_offset).astype(input.dtype if out is None else out.dtype)
    if out is None:
        return y
    out[...] = y
    return out


def fused_add_rms_norm(
    input: Array,
    residual: Array,
    weight: Array | None,
    epsilon: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
) -> tuple[Array, Array]:
    rms_norm(_add(input, residual, round_sum), weight, epsilon, weight_offset=weight_offset, out=input)
    return input, residual


def rms_norm_quant(
    input: Array,
    weight: Array | None,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = 128,
    scale: Any = None,
    weight_offset: float = 0.0,
    out_q: Array | None = None,
    out_s: Array | None = None,
) -> tuple[Array, Array]:
    y = normalized(input, weight, epsilon, weight_offset)
    if scale is None and group_size is not None:
        q, s = quantization.per_token_group_quant_fp8(y, group_size, float(SMALLEST))
    else:
        q, s = quantization.scaled_fp8_quant(y, scale, None, None, scale is None)
    if out_q is not None:
        out_q.view(quantization.E4M3)[...] = q
    if out_s is not None:
        out_s[...] = s
    return q if out_q is None else out_q, s if out_s is None else out_s


def fused_add_rms_norm_quant(
    input: Array,
    residual: Array,
    weight: Array | None,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = 128,
    scale: Any = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    out_q: Array | None = None,
    out_s: Array | None = None,
) -> tuple[Array, Array]:
    options: dict[str, Any] = {"group_size": group_size, "scale": scale, "weight_offset": weight_offset}
    return rms_norm_quant(_add(input, residual, round_sum), weight, epsilon, **options, out_q=out_q, out_s=out_s)


def layer_norm(
    input: Array, weight: Array | None, bias: Array | None, epsilon: float = 1e-5, *, out: Array | None = None
) -> Array:
    """Compute the variance from differences to the mean, with the correction of Chan, Golub and LeVeque.

    `left` is the mean of the differences. Without rounding errors it would be 0.
    """
    per_width = np.float32(1 / max(input.shape[-1], 1))
    with np.errstate(all="ignore"):
        x: Array = input.astype(np.float32)
        x = x - folded_sum(x) * per_width
        left = folded_sum(x) * per_width
        variance = sum_of_squares(x) * per_width - left * left
        variance = np.maximum(variance, np.float32(0))  # keeps NaN
        y = (x - left) * _inverse_root(variance + np.float32(epsilon))
        if weight is not None:
            y = y * weight.astype(np.float32)
        if bias is not None:
            y = y + bias.astype(np.float32)
        y = y.astype(input.dtype)
    if out is None:
        return y
    out[...] = y
    return out


def fused_add_layer_norm(
    input: Array,
    residual: Array,
    weight: Array | None,
    bias: Array | None,
    epsilon: float = 1e-5,
    *,
    input_bias: Array | None = None,
    residual_out: Array | None = None,
    out: Array | None = None,
) -> Array:
    with np.errstate(all="ignore"):
        x: Array = input.astype(np.float32)
        if input_bias is not None:
            x = x + input_bias.astype(np.float32)
        total = (x + residual.astype(np.float32)).astype(input.dtype)
    if residual_out is not None:
        residual_out[...] = total
    return layer_norm(total, weight, bias, epsilon, out=out)
