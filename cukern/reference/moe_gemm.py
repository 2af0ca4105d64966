"""Grouped GEMMs in NumPy: each expert's rows times the expert's weights."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.formats.quantized import BLOCK, MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import (
    FOLDED_BYTES,
    FOLDED_K,
    UNIT_BYTES,
    UNIT_K,
    UNIT_ROWS,
    is_folded,
    is_prepared,
    rows_of_weights,
)
from cukern.reference.moe_activation import activate_sums
from cukern.reference.quantization import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    per_token_group_quant_fp8,
    scaled_fp8_quant,
    silu_and_mul_quant,
)
from cukern.runtime.activation import ALPHA, LIMIT, is_gated
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernel adds the products in another order than NumPy, and activates with the hardware's exp2 and reciprocal.
    # The sums have magnitude 1.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=1e-4),
        "bfloat16": Tolerance(relative=2**-7, absolute=1e-4),
    },
    # Hopper's tensor core adds 128 FP8 products in an accumulator of 14 bits. Among a few hundred thousand sums of
    # magnitude 1, the largest error on an H200 is 0.005.
    "fp8_out": {
        "float16": Tolerance(relative=2**-10, absolute=2**-7),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-7),
    },
}

Array = NDArray[Any]

_UNIT_NUMBERS = UNIT_ROWS * UNIT_K // 2
_FOLDED_NUMBERS = UNIT_ROWS * FOLDED_K // 2
#: In weights prepared for FP8 activations, a row stores its largest exponent. Each group of 32 elements stores how far
#: its exponent is below the largest exponent, at most _FOLDED_DIFFERENCE. The kernel converts the weights to FP8
#: elements that are 2^_FOLDED_SHIFT too large, and the row's factor divides by 2^_FOLDED_SHIFT.
_FOLDED_DIFFERENCE, _FOLDED_SHIFT = 19, 6
#: e2m1 magnitudes by code.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: This scale, 2^34, replaces larger MXFP4 scales. The kernel turns it into infinity.
_LARGEST_E8M0 = 161


# --- prepared weights -----------------------------------------------------------------------------------


def _rotated(words: Array, by: int) -> Array:
    """Rotate 32-bit words left."""
    return words << np.uint32(by) | words >> np.uint32(32 - by)


def _packed_pairs(pairs: Array) -> Array:
    """Pack four pairs of 4-bit elements [..., 4] into one 32-bit word.

    An unpacked pair has its signs in bits 15 and 31, its magnitudes in bits 6 to 8 and 22 to 24.
    """
    first, second, third, fourth = (pairs[..., i] for i in range(4))
    last = _rotated(fourth & np.uint32(0x00400040), 24)
    return first >> np.uint32(6) | second >> np.uint32(2) | _rotated(third, 20) | fourth & np.uint32(0x81808180) | last


def _unpacked_pairs(words: Array) -> Array:
    bits, last = np.uint32(0x81C081C0), _rotated(words, 8) & np.uint32(0x00400040)
    pairs = words << np.uint32(6) & bits, words << np.uint32(2) & bits, _rotated(words, 12) & bits
    return np.stack([*pairs, words & np.uint32(0x81808180) | last], -1)


def _widened(scales: Array) -> Array:
    """Convert e4m3 bytes to 5 exponent bits (bias 16) and 3 mantissa bits, without the sign."""
    size = scales & np.uint8(127)
    top = np.where(size >= 4, 2, np.where(size >= 2, 1, 0))
    small = (top + 7) << 3 | (size.astype(int) << (3 - top) & 7)
    return np.where(size >= 8, size + 72, np.where(size == 0, 0, small)).astype(np.uint8)


def _narrowed(scales: Array) -> Array:
    exponent, mantissa = (scales >> 3).astype(int) - 9, (scales & 7).astype(int)
    small = (8 | mantissa) >> np.clip(1 - exponent, 0, 7)
    return np.where(scales == 0, 0, np.where(exponent > 0, exponent << 3 | mantissa, small)).astype(np.uint8)


def _folded(b: Array, scales: Array) -> Array:
    """Convert weights [experts, n, k / 2] and scales [experts, n, k / 32] to the layout for FP8 activations."""
    (experts, n, half), groups = b.shape, scales.shape[2]
    units = -(-2 * half // FOLDED_K)
    exponents = scales.max(2).astype(np.uint8)
    differences = np.full((experts, n, units * 4), _FOLDED_DIFFERENCE, np.uint8)
    differences[..., :groups] = np.minimum(exponents[..., None] - scales, _FOLDED_DIFFERENCE)
    of_units = (differences << 3).reshape(experts, n, units, 4)
    for i, part in enumerate((exponents & 7, exponents >> 3 & 7, exponents >> 6)):
        of_units[..., i] |= part[..., None]
    b = np.pad(b, ((0, 0), (0, 0), (0, units * FOLDED_K // 2 - half)))
    # Split each group of 32 elements into two halves. A half has four elements for each of four lanes.
    two = b.reshape(experts, n // UNIT_ROWS, UNIT_ROWS, units, 2, 2, 2, 4, 2)
    four = np.stack([two & 15, two >> 4], -1).reshape(*two.shape[:-1], 4).astype(np.uint32)
    words = np.zeros(four.shape[:6] + four.shape[7:8], np.uint32)  # rows, units, halves of a unit, groups, lanes
    for half_of, i in itertools.product(range(2), range(4)):
        number = four[..., half_of, :, i]
        words |= (number & 7) << (16 * half_of + 4 * i) | number >> 3 << (8 * i + 7 - 4 * half_of)
    shape = experts, n // UNIT_ROWS, units
    numbers = np.ascontiguousarray(words.transpose(0, 1, 3, 4, 2, 6, 5), "<u4").view(np.uint8)
    of_units = of_units.reshape(experts, n // UNIT_ROWS, UNIT_ROWS, units, 4).swapaxes(2, 3)
    return np.concatenate([numbers.reshape(*shape, _FOLDED_NUMBERS), of_units.reshape(*shape, -1)], -1)


def _unfolded(prepared: Array) -> tuple[Array, Array, Array]:
    """Undo `_folded`.

    Return the 4-bit elements [experts, n, k], the exponent differences [experts, n, k / 32] and the row exponents
    [experts, n].
    """
    experts, eights, units, _ = prepared.shape
    words = np.ascontiguousarray(prepared[..., :_FOLDED_NUMBERS]).view("<u4").astype(np.uint32)
    words = words.reshape(experts, eights, units, 2, UNIT_ROWS, 4, 2).transpose(0, 1, 4, 2, 3, 6, 5)
    four = [
        words >> (16 * half + 4 * i) & 7 | (words >> (8 * i + 7 - 4 * half) & 1) << 3
        for half, i in itertools.product(range(2), range(4))
    ]
    numbers = np.stack(four, -1).reshape(*words.shape, 2, 4).swapaxes(6, 7)
    n = eights * UNIT_ROWS
    of_rows = prepared[..., _FOLDED_NUMBERS:].reshape(experts, eights, units, UNIT_ROWS, 4).swapaxes(2, 3)
    of_rows = of_rows.reshape(experts, n, units, 4)
    first = of_rows[:, :, 0]
    exponents = first[..., 0] & 7 | (first[..., 1] & 7) << 3 | (first[..., 2] & 3) << 6
    shape = experts, n, units * FOLDED_K
    return numbers.astype(np.uint8).reshape(shape), (of_rows >> 3).reshape(experts, n, units * 4), exponents


def prepare_weights(b: Array, b_scale: Array, *, a_dtype: str | None = None) -> Array:
    if a_dtype == "float8_e4m3fn":
        return _folded(b, b_scale.view(np.uint8))
    (experts, n, half), scales = b.shape, b_scale.view(np.uint8)
    k, units = 2 * half, -(-2 * half // UNIT_K)
    group = k // scales.shape[2]
    if group == NVFP4_GROUP:
        of_bytes = np.repeat(scales, group // 2, 2)
        flipped = b ^ np.where(of_bytes & 128, np.uint8(0x88), np.uint8(0))
        b, scales = np.where(of_bytes & 127, flipped, np.uint8(0)), _widened(scales)
    else:
        scales = np.minimum(scales, np.uint8(_LARGEST_E8M0))
    spare = units * UNIT_K - k
    b = np.pad(b, ((0, 0), (0, 0), (0, spare // 2)))
    scales = np.pad(scales, ((0, 0), (0, 0), (0, spare // group)))
    # The last five dimensions of `two` are rows, units, halves of a unit along k, pairs of a lane, and lanes.
    two = b.reshape(experts, n // UNIT_ROWS, UNIT_ROWS, units, 2, 4, 4).astype(np.uint32)
    pairs = (two & 7) << 6 | (two & 8) << 12 | (two & 0x70) << 18 | (two & 0x80) << 24
    words = _packed_pairs(pairs.swapaxes(5, 6)).transpose(0, 1, 3, 2, 5, 4)
    shape = experts, n // UNIT_ROWS, units
    numbers = np.ascontiguousarray(words, "<u4").view(np.uint8).reshape(*shape, _UNIT_NUMBERS)
    of_units = scales.reshape(experts, n // UNIT_ROWS, UNIT_ROWS, units, UNIT_K // group).swapaxes(2, 3)
    return np.concatenate([numbers, of_units.reshape(*shape, -1)], -1)


def restore_weights(prepared: Array, k: int | None = None) -> tuple[Array, Array]:
    experts, eights, units, size = prepared.shape
    if size == FOLDED_BYTES:
        k = units * FOLDED_K if k is None else k
        numbers, differences, exponents = _unfolded(prepared)
        b = np.ascontiguousarray((numbers[..., ::2] | numbers[..., 1::2] << 4)[..., : k // 2])
        scales = np.maximum(exponents[..., None].astype(int) - differences, 0)[..., : k // MXFP4_GROUP]
        return b, np.ascontiguousarray(scales.astype(np.uint8))
    group = next(group for group, unit_bytes in UNIT_BYTES.items() if unit_bytes == size)
    k = units * UNIT_K if k is None else k
    words = np.ascontiguousarray(prepared[..., :_UNIT_NUMBERS]).view("<u4")
    words = words.reshape(experts, eights, units, UNIT_ROWS, 4, 2).transpose(0, 1, 3, 2, 5, 4)
    pairs = _unpacked_pairs(words.astype(np.uint32)).swapaxes(5, 6)
    two = pairs >> 6 & 7 | pairs >> 12 & 8 | pairs >> 18 & 0x70 | pairs >> 24 & 0x80
    b = two.astype(np.uint8).reshape(experts, eights * UNIT_ROWS, units * UNIT_K // 2)
    scales = prepared[..., _UNIT_NUMBERS:].reshape(experts, eights, units, UNIT_ROWS, UNIT_K // group).swapaxes(2, 3)
    scales = scales.reshape(experts, eights * UNIT_ROWS, units * UNIT_K // group)[..., : k // group]
    scales = np.ascontiguousarray(_narrowed(scales) if group == NVFP4_GROUP else scales)
    return np.ascontiguousarray(b[..., : k // 2]), scales


# --- products -------------------------------------------------------------------------------------------


def fp8_values(array: Array) -> Array:
    """Convert e4m3 elements, or their bytes, to float64."""
    return array.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def values_of_a(a: Array, a_scale: Array | None) -> Array:
    """Dequantize `a` [rows, k] to float64. `a_scale` is [rows, k / 128], [rows], [rows, 1] or [1]."""
    if a_scale is None:
        return a.astype(np.float64)
    values = fp8_values(a)
    if a_scale.ndim == 1 or a_scale.shape[1] == 1:
        return values * a_scale.reshape(-1, 1)
    return values * np.repeat(a_scale, BLOCK, 1)[:, : a.shape[1]]


def folded_values(b: Array, k: int) -> Array:
    """Return one expert's weights [n, k] with the values that the GEMM of FP8 activations uses.

    `b` is [n / 8, units, bytes]. A unit is 8 rows of weights and 128 elements along k. Each row has a power of two: a
    weight is an e4m3 value times this power.
    """
    numbers, differences, exponents = (x[0] for x in _unfolded(b[None]))
    sizes = _E2M1[numbers & 7] * np.repeat(np.exp2(_FOLDED_SHIFT - differences.astype(float)), MXFP4_GROUP, 1)
    values = fp8_values(np.where(numbers & 8, -sizes, sizes).astype(ml_dtypes.float8_e4m3fn))
    smallest = 127 - 120  # rows with smaller exponents are 0
    factors = np.exp2(np.where(exponents < smallest, 0, exponents.astype(float) - 127 - _FOLDED_SHIFT))
    factors = np.where(exponents < smallest, 0, np.where(exponents == 255, np.nan, factors))
    return (values * factors[:, None])[:, :k]


def values_of_b(b: Array, b_scale: Array | None, b_global_scale: Array | None, k: int) -> Array:
    """Dequantize one expert's weights, prepared (3 dimensions) or not (2), to float64 [n, k]."""
    if b.ndim == 3 and b.shape[2] == FOLDED_BYTES:
        return folded_values(b, k)
    if b.ndim == 3:
        b, b_scale = (x[0] for x in restore_weights(b[None], k))
    if b_scale is None:
        return b.astype(np.float64)
    if b.shape[1] == k:
        values = fp8_values(b)
        if b_scale.ndim < 2:
            return values * b_scale.reshape(-1, 1)  # per tensor or per channel
        return values * np.repeat(np.repeat(b_scale, BLOCK, 0), BLOCK, 1)[: len(b), :k]
    if k // b_scale.shape[1] == MXFP4_GROUP:
        return dequantize_mxfp4(b, b_scale, "float32").astype(np.float64)
    assert b_global_scale is not None
    return dequantize_nvfp4(b, b_scale, 1, "float32").astype(np.float64) * b_global_scale


def product(
    a: Array,
    b: Array,
    a_scale: Array | None,
    b_scale: Array | None,
    b_global_scale: Array | None,
    activation: str | None,
    bias: Array | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    interleaved: bool = False,
) -> Array:
    """Multiply one expert's rows by its weights and activate, in float32. A gated activation halves the columns."""
    weights = values_of_b(b, b_scale, b_global_scale, a.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        sums = (values_of_a(a, a_scale) @ weights.T).astype(np.float32)
    if bias is not None:
        sums += bias.astype(np.float32)
    return activate_sums(activation, sums, alpha, limit, interleaved)


def result_dtype(a: Array, out_dtype: str | None) -> Any:
    if a.itemsize > 1:
        return a.dtype
    return ml_dtypes.bfloat16 if out_dtype in (None, "bfloat16") else np.float16


def moe_gemm(
    a: Array,
    b: Array,
    expert_offsets: Array,
    *,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    b_global_scale: Array | None = None,
    row_token: Array | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    interleaved: bool = False,
    out_dtype: str | None = None,
    out: Array | None = None,
    expected_m: int | None = None,
) -> Array:
    """Compute out[r] = a[r] b[e]^T for expert_offsets[e] <= r < expert_offsets[e + 1].

    Rows without an expert are not written; in a new array they are 0. `expected_m` has no effect.
    """
    if row_token is not None:
        # Rows without an expert may have an invalid token index.
        tokens = np.clip(row_token, 0, max(len(a) - 1, 0))
        a = a[tokens]
        if a_scale is not None and len(a_scale) > 1:
            a_scale = a_scale[tokens]
    if out is None:
        columns = rows_of_weights(b) // (2 if is_gated(activation) else 1)
        out = np.zeros((len(a), columns), result_dtype(a, out_dtype))
    bounds = np.clip(expert_offsets, 0, len(a))
    for expert, (first, end) in enumerate(itertools.pairwise(bounds)):
        rows = slice(first, end)
        scale_of_rows = a_scale if a_scale is None or len(a_scale) == 1 else a_scale[rows]
        scale = None if b_scale is None else b_scale[expert]
        global_scale = None if b_global_scale is None else b_global_scale[expert]
        own_bias, form = None if bias is None else bias[expert], (alpha, limit, interleaved)
        with np.errstate(over="ignore", invalid="ignore"):
            result = product(a[rows], b[expert], scale_of_rows, scale, global_scale, activation, own_bias, *form)
            out[rows] = result.astype(out.dtype)
    return out


def moe_gemm_quantized(
    a: Array,
    b: Array,
    expert_offsets: Array,
    *,
    a_scale: Array,
    b_scale: Array,
    activation: str = "silu",
    out_dtype: str | None = None,
    out_q: Array,
    out_s: Array,
    expected_m: int | None = None,
) -> tuple[Array, Array]:
    """Multiply, activate, and quantize in groups of 128. Rows without an expert are not written."""
    both = moe_gemm(a, b, expert_offsets, a_scale=a_scale, b_scale=b_scale, out_dtype=out_dtype)
    first, end = np.clip(expert_offsets[[0, -1]], 0, len(a))
    q, scale = silu_and_mul_quant(both[first:end], activation)
    out_q[first:end], out_s[first:end] = q.view(out_q.dtype), scale
    return out_q, out_s


def _own_scale(a_scale: Array | None, expert: int, count: int) -> Array | None:
    """Return the scales of an expert's rows, or a single scale if `a_scale` is [1] or [experts]."""
    if a_scale is None or a_scale.shape == (1,):
        return a_scale
    return a_scale[expert : expert + 1] if a_scale.ndim == 1 else a_scale[expert, :count]


def moe_gemm_batched(
    a: Array,
    b: Array,
    expert_num_tokens: Array,
    *,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    b_global_scale: Array | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    interleaved: bool = False,
    out_dtype: str | None = None,
    out: Array | None = None,
    expected_m: int | None = None,
) -> Array:
    """Compute out[e, t] = a[e, t] b[e]^T for t < expert_num_tokens[e].

    Other rows are not written; in a new array they are 0. `expected_m` has no effect.
    """
    experts, max_tokens, _ = a.shape
    if out is None:
        columns = rows_of_weights(b) // (2 if is_gated(activation) else 1)
        out = np.zeros((experts, max_tokens, columns), result_dtype(a, out_dtype))
    for expert, count in enumerate(np.clip(expert_num_tokens, 0, max_tokens)):
        own = slice(expert, expert + 1)
        moe_gemm(
            a[expert, :count],
            b[own],
            np.array([0, count]),
            a_scale=_own_scale(a_scale, expert, count),
            b_scale=None if b_scale is None else b_scale[own],
            b_global_scale=None if b_global_scale is None else b_global_scale[own],
            bias=None if bias is None else bias[own],
            activation=activation,
            alpha=alpha,
            limit=limit,
            interleaved=interleaved,
            out=out[expert, :count],
        )
    return out


def quantized_matmul(
    x: Array,
    w: Array,
    w_scale: Array | None,
    *,
    x_scale: Array | None = None,
    bias: Array | None = None,
    out_dtype: str | None = None,
    expected_m: int | None = None,
) -> Array:
    """Compute x w^T + bias. `expected_m` has no effect.

    FP8 weights multiply FP8 rows. A 16-bit x is quantized in groups of 128 if the weights have scales by blocks or are
    MXFP4, otherwise with the scale `x_scale` or with a scale per row.
    """
    (rows, k), dtype = x.shape, out_dtype
    is_fp8 = is_folded(w) if is_prepared(w) else w.shape[1] == k
    is_in_groups = w_scale is None or w_scale.shape == (-(-len(w) // BLOCK), -(-k // BLOCK))
    if is_fp8 and x.itemsize > 1:
        dtype = x.dtype.name
        if is_in_groups:
            x, x_scale = per_token_group_quant_fp8(x, BLOCK)
        else:
            given = None if x_scale is None else x_scale.reshape(1)
            x, x_scale = scaled_fp8_quant(x, given, use_per_token_if_dynamic=True)
    if w_scale is not None:
        w_scale = w_scale.reshape(-1) if is_fp8 and not is_in_groups else w_scale
        w_scale = w_scale if w_scale.shape == (1,) else w_scale[None]
    return moe_gemm(
        x, w if is_prepared(w) else w[None], np.array([0, rows]), a_scale=x_scale, b_scale=w_scale,
        bias=None if bias is None else bias[None], out_dtype=dtype,
    )  # fmt: skip
