"""Quantization to 8 and 4 bits, in NumPy.

All arithmetic is float32. The results have the same bits as in the kernels, except after a fused activation, which the
kernels approximate.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP, SMALLEST, SMALLEST_FP8, number_of
from cukern.reference.moe_activation import activate, valid_rows
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernels do the same operations in the same order. All NaN compare equal.
    "quantized": {"float8_e4m3fn": Tolerance(relative=0, absolute=0)},
    "scales": {"float32": Tolerance(relative=0, absolute=0)},
    "numbers": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
    # The error of a fused activation changes its group's scale, and may move a quotient to the neighbouring FP8 value:
    # by at most 2**-3 of the value (three mantissa bits), or 2**-9 for subnormal values.
    "activated": {"float8_e4m3fn": Tolerance(relative=2**-3, absolute=2**-9)},
    "activated_scales": {"float32": Tolerance(relative=2e-5, absolute=0)},
}

Array = NDArray[Any]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
INT8 = np.dtype(np.int8)
#: The scale of a row or group maps its largest magnitude to this value.
LARGEST = {E4M3: np.float32(448), INT8: np.float32(127)}
#: e2m1 values by code. Codes from 8 on are negative.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _largest(x: Array) -> Array:
    """Return the largest magnitude along the last axis, kept with size 1. NaN is ignored."""
    return np.fmax.reduce(np.abs(x), axis=-1, keepdims=True, initial=0)


def _quantized(x: Array, scale: Any, dtype: np.dtype[Any], azp: Any = None, truncate: bool = False) -> Array:
    """Return round(x / scale) + azp, saturated. Ties round to even; with `truncate`, int8 values round toward zero.

    NaN becomes 0x7f in FP8, and azp in int8.
    """
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / scale
        if dtype == E4M3:
            quotient = np.clip(quotient, -LARGEST[E4M3], LARGEST[E4M3])
            return np.where(np.isnan(quotient), np.float32(np.nan), quotient).astype(E4M3)
        rounded = np.trunc(quotient) if truncate else np.rint(quotient)
        rounded[np.isnan(rounded)] = 0
        if azp is not None:
            rounded = rounded + np.asarray(azp).astype(np.float32)
        return np.clip(rounded, -128, 127).astype(np.int8)


def _power_of_two(scale: Array) -> Array:
    """Return the smallest power of two >= scale."""
    return ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)


def _by_groups(
    x: Array, group_size: int, eps: float | np.float32, use_ue8m0: bool, dtype: np.dtype[Any], truncate: bool = False
) -> tuple[Array, Array]:
    """Return the quantized rows [rows, k] and group scales [rows, k / group_size]."""
    groups = x.astype(np.float32).reshape(len(x), x.shape[1] // group_size, group_size)
    scales = np.maximum(_largest(groups), np.float32(eps)) / LARGEST[dtype]
    if use_ue8m0:
        scales = _power_of_two(scales)
    return _quantized(groups, scales, dtype, truncate=truncate).reshape(x.shape), scales[:, :, 0]


def _results(
    shape: tuple[int, ...], scales: tuple[int, ...], dtype: np.dtype[Any], out_q: Array | None, out_s: Array | None
) -> tuple[Array, Array]:
    """Return `out_q` (float8 or its bytes) and `out_s`. Replace an array that is None by a new array."""
    q = np.zeros(shape, dtype) if out_q is None else out_q
    return q, np.zeros(scales, np.float32) if out_s is None else out_s


def scaled_fp8_quant(
    input: Array,
    scale: Any = None,
    num_token_padding: int | None = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Array | None = None,
    *,
    expert_num_tokens: Array | None = None,
) -> tuple[Array, Array]:
    rows = max(num_token_padding or 0, len(input))
    if output is None:
        output = np.zeros((rows, *input.shape[1:]), E4M3)
    if expert_num_tokens is not None:
        counted = valid_rows(input.shape, expert_num_tokens)
        own, own_scales = scaled_fp8_quant(input[counted], scale, None, scale_ub, use_per_token_if_dynamic)
        output.view(E4M3)[counted] = own
        if scale is not None or not use_per_token_if_dynamic:
            return output, own_scales
        all_scales = np.zeros((*input.shape[:-1], 1), np.float32)
        all_scales[counted] = own_scales
        return output, all_scales
    x = input.astype(np.float32)
    per_token = scale is None and use_per_token_if_dynamic
    if scale is not None:
        scales: Array = np.full(1, np.float32(number_of(scale)))
    else:
        largest = _largest(x if per_token else x.reshape(1, x.size))
        if scale_ub is not None:
            largest = np.minimum(largest, np.float32(number_of(scale_ub)))
        scales = np.maximum(largest, SMALLEST_FP8) / LARGEST[E4M3]
        if not per_token:
            scales = scales.reshape(1)
    output.view(E4M3)[: len(x)] = _quantized(x, scales, E4M3)
    if per_token and rows > len(x):
        scales = np.concatenate([scales, np.zeros((rows - len(x), *scales.shape[1:]), np.float32)])
    return output, scales


def _per_token_group_quant(
    x: Array,
    group_size: int,
    eps: float,
    column_major_scales: bool,
    use_ue8m0: bool,
    expert_num_tokens: Array | None,
    out_q: Array | None,
    out_s: Array | None,
    dtype: np.dtype[Any],
    truncate: bool = False,
) -> tuple[Array, Array]:
    groups = x.shape[-1] // group_size
    if column_major_scales and out_s is None:
        out_s = np.zeros((*x.shape[:-2], groups, x.shape[-2]), np.float32).swapaxes(-1, -2)
    q, s = _results(x.shape, (*x.shape[:-1], groups), dtype, out_q, out_s)
    rows = valid_rows(x.shape, expert_num_tokens)
    q.view(dtype)[rows], s[rows] = _by_groups(x[rows], group_size, eps, use_ue8m0, dtype, truncate)
    return q, s


def per_token_group_quant_fp8(
    x: Array,
    group_size: int,
    eps: float = 1e-10,
    *,
    column_major_scales: bool = False,
    use_ue8m0: bool = False,
    expert_num_tokens: Array | None = None,
    out_q: Array | None = None,
    out_s: Array | None = None,
) -> tuple[Array, Array]:
    options = column_major_scales, use_ue8m0, expert_num_tokens, out_q, out_s
    return _per_token_group_quant(x, group_size, eps, *options, E4M3)


def per_token_group_quant_int8(
    x: Array,
    group_size: int,
    eps: float = 1e-10,
    *,
    column_major_scales: bool = False,
    truncate: bool = False,
    expert_num_tokens: Array | None = None,
    out_q: Array | None = None,
    out_s: Array | None = None,
) -> tuple[Array, Array]:
    options = column_major_scales, False, expert_num_tokens, out_q, out_s
    return _per_token_group_quant(x, group_size, eps, *options, INT8, truncate)


def scaled_int8_quant(
    input: Array, scale: Any = None, azp: Any = None, symmetric: bool = True
) -> tuple[Array, Array, Array | None]:
    x = input.astype(np.float32)
    if scale is not None:
        zero = None if azp is None else np.full(1, np.asarray(azp).reshape(()), np.int32)
        return _quantized(x, np.float32(number_of(scale)), INT8, zero), np.full(1, np.float32(number_of(scale))), zero
    with np.errstate(all="ignore"):
        largest = np.maximum(_largest(x), SMALLEST)
        if symmetric:
            scales = largest / LARGEST[INT8]
            return _quantized(x, scales, INT8), scales, None
        low = np.fmin.reduce(x, axis=-1, keepdims=True, initial=np.inf)
        high = np.fmax.reduce(x, axis=-1, keepdims=True, initial=-np.inf)
        low, high = np.where(low > high, np.float32(0), low), np.where(low > high, np.float32(0), high)
        # A row of nearly equal elements has a tiny range. A scale of at least `largest * 2**-22` keeps |x / scale| <=
        # 2**22, where float32 represents all integers. `high - low` may overflow, so half the range is computed.
        half_range = high * np.float32(0.5) - low * np.float32(0.5)
        scales = np.maximum(half_range / np.float32(127.5), largest * np.float32(2**-22))
        zeros = np.rint(np.float32(-128) - low / scales)
        zeros[np.isnan(zeros)] = 0
    zeros = zeros.astype(np.int32)
    return _quantized(x, scales, INT8, zeros), scales, zeros


def silu_and_mul_quant(
    x: Array,
    activation: str = "silu",
    *,
    group_size: int | None = 128,
    scale: Any = None,
    expert_num_tokens: Array | None = None,
    out_q: Array | None = None,
    out_s: Array | None = None,
) -> tuple[Array, Array]:
    inter = x.shape[-1] // 2
    groups = 1 if group_size is None else inter // group_size
    q, s = _results((*x.shape[:-1], inter), (1,) if scale is not None else (*x.shape[:-1], groups), E4M3, out_q, out_s)
    rows = valid_rows(x.shape, expert_num_tokens)
    activated = activate(activation, x[rows][:, :inter], x[rows][:, inter:])
    if scale is not None:
        s[...] = np.float32(number_of(scale))
        q.view(E4M3)[rows] = _quantized(activated, s, E4M3)
    elif group_size is None:
        q.view(E4M3)[rows], s[rows] = _by_groups(activated, max(inter, 1), SMALLEST_FP8, False, E4M3)
    else:
        q.view(E4M3)[rows], s[rows] = _by_groups(activated, group_size, SMALLEST, False, E4M3)
    return q, s


# --- 4 bits -------------------------------------------------------------------------------------------


def _packed(x: Array, factor: Array) -> Array:
    """Round x * factor to e2m1 (ties to the even code), and pack two codes per byte, the first in the low half.

    Magnitudes above 6 become 6, and NaN becomes 0.
    """
    with np.errstate(all="ignore"):
        magnitude = np.abs(x * factor)
    magnitude = np.minimum(np.nan_to_num(magnitude, nan=0, posinf=6), 6)
    # e2m1 values are 0.5 apart up to 2, 1 apart up to 4, then 2 apart.
    high = np.where(magnitude < 4, np.rint(magnitude) + 2, np.rint(magnitude / 2) + 4)
    code = np.where(magnitude < 2, np.rint(magnitude * 2), high).astype(np.uint8)
    code |= np.signbit(x).astype(np.uint8) << 3
    return code[..., ::2] | code[..., 1::2] << 4


def quantize_mxfp4(x: Array) -> tuple[Array, Array]:
    groups = np.ascontiguousarray(x.astype(np.float32)).reshape(*x.shape[:-1], x.shape[-1] // MXFP4_GROUP, MXFP4_GROUP)
    # Without the sign bit, float32 bit patterns sort like the values, with infinity and NaN last.
    largest = (groups.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=-1, keepdims=True)
    number = largest < 0x7F800000
    exponent = np.clip((largest >> 23).astype(np.int32) - 2, 0, 254)
    factor = np.where(number, np.ldexp(np.float32(1), 127 - exponent), np.float32(0))
    packed = _packed(groups, factor).reshape(*x.shape[:-1], x.shape[-1] // 2)
    return packed, np.where(number, exponent, 255).astype(np.uint8)[..., 0]


def dequantize_mxfp4(packed: Array, scale: Array, dtype: str = "bfloat16") -> Array:
    factor = scale.view(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return _unpacked(packed, factor, MXFP4_GROUP, dtype)


def scaled_fp4_quant(input: Array, input_global_scale: Any) -> tuple[Array, Array]:
    groups = input.astype(np.float32).reshape(*input.shape[:-1], input.shape[-1] // NVFP4_GROUP, NVFP4_GROUP)
    global_scale = np.float32(number_of(input_global_scale))
    with np.errstate(all="ignore"):
        scales = _quantized(global_scale * (_largest(groups) / np.float32(6)), np.float32(1), E4M3)
        stored = scales.astype(np.float32)
        factor = np.where(stored == 0, np.float32(0), global_scale / stored)
    return _packed(groups, factor).reshape(*input.shape[:-1], input.shape[-1] // 2), scales.view(np.uint8)[..., 0]


def dequantize_nvfp4(packed: Array, scale: Array, global_scale: Any, dtype: str = "bfloat16") -> Array:
    with np.errstate(all="ignore"):
        factor = scale.view(np.uint8).view(E4M3).astype(np.float32) / np.float32(number_of(global_scale))
    return _unpacked(packed, factor, NVFP4_GROUP, dtype)


def _unpacked(packed: Array, factor: Array, group_size: int, dtype: str) -> Array:
    """Unpack e2m1 values, multiply by their group's factor, and round once."""
    numbers = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)]
    with np.errstate(all="ignore"):
        product = numbers * factor.repeat(group_size, axis=-1)
        return product.astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
