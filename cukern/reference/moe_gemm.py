"""Grouped products of tokens and experts' weights in NumPy, as the formulas define them.

The arguments are those of `cukern.ops.moe_gemm`, already checked there.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.reference.moe_activation import activate
from cukern.reference.quantization import MXFP4_GROUP, dequantize_mxfp4, dequantize_nvfp4

Array = NDArray[Any]

#: Numbers that share a scale of FP8 along k, and along n.
BLOCK = 128


def fp8_values(array: Array) -> Array:
    """The numbers of e4m3, or of their bytes, in float64."""
    return array.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def values_of_a(a: Array, a_scale: Array | None) -> Array:
    """The numbers [rows, k] that `a` stands for, in float64; `a_scale` is [rows, k / 128], [rows], [rows, 1] or [1]."""
    if a_scale is None:
        return a.astype(np.float64)
    values = fp8_values(a)
    if a_scale.ndim == 1 or a_scale.shape[1] == 1:
        return values * a_scale.reshape(-1, 1)
    return values * np.repeat(a_scale, BLOCK, 1)[:, : a.shape[1]]


def values_of_b(b: Array, b_scale: Array | None, b_global_scale: Array | None, k: int) -> Array:
    """The numbers [n, k] that the weights of one expert stand for, in float64."""
    if b_scale is None:
        return b.astype(np.float64)
    if b.shape[1] == k:
        values = fp8_values(b)
        if b_scale.ndim < 2:
            return values * b_scale.reshape(-1, 1)  # per tensor, or per channel
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
) -> Array:
    """The product of one expert's rows and weights in float32; with an activation, half as many columns."""
    weights = values_of_b(b, b_scale, b_global_scale, a.shape[1])
    with np.errstate(invalid="ignore", over="ignore"):
        sums = (values_of_a(a, a_scale) @ weights.T).astype(np.float32)
    if activation is None:
        return sums
    gate, up = np.split(sums, 2, axis=1)
    return activate(activation, gate, up)


def result_dtype(a: Array, out_dtype: str | None) -> Any:
    """The dtype of the result: that of `a`; with FP8 bfloat16, or float16 where `out_dtype` says so."""
    if a.itemsize == 2:
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
    activation: str | None = None,
    out_dtype: str | None = None,
    out: Array | None = None,
    expected_m: int | None = None,
) -> Array:
    """out[r] = a[r] b[e]^T for the rows r in [expert_offsets[e], expert_offsets[e + 1]); see `cukern.moe_gemm`.

    Rows of no expert are left as they are; without `out` they are 0. `expected_m` has no effect.
    """
    if row_token is not None:
        # Rows of no expert may name no token.
        tokens = np.clip(row_token, 0, max(len(a) - 1, 0))
        a = a[tokens]
        if a_scale is not None and len(a_scale) > 1:
            a_scale = a_scale[tokens]
    if out is None:
        columns = b.shape[1] // (1 if activation is None else 2)
        out = np.zeros((len(a), columns), result_dtype(a, out_dtype))
    bounds = np.clip(expert_offsets, 0, len(a))
    for expert, (first, end) in enumerate(itertools.pairwise(bounds)):
        rows = slice(first, end)
        scale_of_rows = a_scale if a_scale is None or len(a_scale) == 1 else a_scale[rows]
        scale = None if b_scale is None else b_scale[expert]
        global_scale = None if b_global_scale is None else b_global_scale[expert]
        with np.errstate(over="ignore", invalid="ignore"):
            out[rows] = product(a[rows], b[expert], scale_of_rows, scale, global_scale, activation).astype(out.dtype)
    return out


def moe_gemm_batched(
    a: Array,
    b: Array,
    expert_num_tokens: Array,
    *,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    b_global_scale: Array | None = None,
    activation: str | None = None,
    out_dtype: str | None = None,
    out: Array | None = None,
    expected_m: int | None = None,
) -> Array:
    """out[e, t] = a[e, t] b[e]^T for the tokens t < expert_num_tokens[e]; see `cukern.moe_gemm_batched`.

    Rows past the count are left as they are; without `out` they are 0. `expected_m` has no effect.
    """
    experts, max_tokens, _ = a.shape
    if out is None:
        columns = b.shape[1] // (1 if activation is None else 2)
        out = np.zeros((experts, max_tokens, columns), result_dtype(a, out_dtype))
    for expert, count in enumerate(np.clip(expert_num_tokens, 0, max_tokens)):
        own = slice(expert, expert + 1)
        moe_gemm(
            a[expert, :count],
            b[own],
            np.array([0, count]),
            a_scale=a_scale if a_scale is None or a_scale.shape == (1,) else a_scale[expert, :count],
            b_scale=None if b_scale is None else b_scale[own],
            b_global_scale=None if b_global_scale is None else b_global_scale[own],
            activation=activation,
            out=out[expert, :count],
        )
    return out
