"""FP8 formats of a KV cache, and scales."""

from __future__ import annotations

from typing import Any

from cukern.runtime import arrays, check
from cukern.runtime.describe import Array, Result, expect_place

#: Maps `kv_cache_dtype` to the element dtype. "auto" stands for the dtype of the cache array.
FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
DTYPES = tuple(dict.fromkeys(FORMATS.values()))
KV_CACHE_DTYPES = ("auto", *FORMATS)


def scale_of(name: str, value: Any, like: Array, like_name: str) -> tuple[Array | None, Any]:
    """Return a scale for a kernel: (float32 array of one element, 1.0), or (None, number). The value None means 1.

    Raises TypeError or ValueError for other values.
    """
    if value is None:
        return None, 1.0
    if not arrays.is_array(value):
        return None, check.number(name, value)
    expect_place(name, value, like, like_name)
    check.dtype(name, value.dtype, ("float32",))
    if any(size != 1 for size in value.shape):
        check.fail(name, "a number or an array of one element", f"an array of shape {list(value.shape)}")
    return value, 1.0


def scales_result(shape: tuple[Any, ...], columns: str, group_size: Any, scale: Any) -> Result:
    """Describe the scales of a quantized result: one if `scale` is given, else one per row or per group of columns."""
    if scale is not None:
        return Result((1,), "float32", "[1]")
    if group_size is None:
        return Result((*shape[:-1], 1), "float32", "[..., 1]")
    return Result((*shape[:-1], shape[-1] // group_size), "float32", f"[..., {columns} / group_size]")
