"""The FP8 formats of a cache, and the scales of what it holds."""

from __future__ import annotations

from typing import Any

from cukern.runtime import arrays, check
from cukern.runtime.describe import Array, expect_place
from cukern.runtime.late import Late

#: The dtype that the bytes of a cache have by its `kv_cache_dtype`; "auto" leaves it to the array.
FORMATS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
DTYPES = tuple(dict.fromkeys(FORMATS.values()))
KV_CACHE_DTYPES = ("auto", *FORMATS)


def scale_of(name: str, value: Any, like: Array, like_name: str) -> tuple[Array | None, Any]:
    """A scale as the kernels take it: the array of one float32, or None; and the number that counts without it.

    None is 1. Raises TypeError and ValueError for what is neither a finite number nor a float32 array of one element
    where the argument `like` is.
    """
    if value is None:
        return None, 1.0
    given = value.value if isinstance(value, Late) else value
    if not arrays.is_array(given):
        return None, check.number(name, value)
    expect_place(name, given, like, like_name)
    check.dtype(name, given.dtype, ("float32",))
    if any(size != 1 for size in given.shape):
        check.fail(name, "a number or an array of one element", f"an array of shape {list(given.shape)}")
    return given, 1.0
