"""`softcap_logits`: limit logits to a range by a soft cap."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.reference import softcap as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, dtype_name, expect_array, expect_place, same_shape
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, launch, outputs, run_twin
from cukern.runtime.rows import Rows, rows_of, tile
from cukern.runtime.vectors import ceil_div, why_width

__all__ = ["softcap_logits"]

DTYPES = ("float32", "float16", "bfloat16")
#: "vector" handles 16 bytes at a time, "scalar" handles one element at a time.
VARIANTS = ("auto", "vector", "scalar")

_kernel = Kernel("softcap", "softcap")
#: The number of units per thread: (for few logits, for many logits). With one unit per thread there are more blocks, so
#: few logits use more multiprocessors.
_ITEMS = (1, 4)
#: From this number of logits on, a thread has four units. The limit lies between the sizes of two benchmark cases
#: (softcap_logits, tokens 1 and tokens 64), far from both.
_MANY = 2**21
#: The smallest normal and the largest finite float32.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _variant(dtype: str, width: int, items: int) -> Variant:
    return _kernel.variant(arrays.CUDA_TYPE[dtype], width, items)


# Gemma 2 caps its bfloat16 logits. Other dtypes and unaligned rows are compiled at their first use.
_kernel.at_import = [_variant("bfloat16", 16, items).instance for items in _ITEMS]
_kernel.specialized = [_variant(dtype, 16, items).instance for dtype in DTYPES for items in _ITEMS]


def _capped(logits: Any, *_: Any, **__: Any) -> Result:
    return Result(logits.shape, dtype_name(logits), "[..., vocab]")


def _rows_like(out: Any, logits: Array) -> Rows:
    """Return the rows of the caller's `out`."""
    expect_place("out", out, logits, "logits")
    check.dtype("out", out.dtype, (logits.dtype,))
    if not same_shape(out, logits.shape):
        check.shape("out", out.shape, logits.shape, "[..., vocab]")
    return rows_of("out", out)


def _check_cap(cap: Any) -> float:
    limit = check.number("cap", cap)
    if not _SMALLEST <= limit <= _LARGEST:
        check.fail("cap", "a positive number of float32", cap)
    return limit


@op(twin.softcap_logits, "capped", _capped)
def softcap_logits(logits: AnyArray, cap: float, *, out: AnyArray | None = None, variant: str = "auto") -> AnyArray:
    """Bound logits by -cap and cap, with little change near 0: cap * tanh(logits / cap).

    Args:
        logits: [..., vocab], float32, float16 or bfloat16; rows may be strided, with one stride for all.
        cap: a positive number, such as 30 (the logits of Gemma 2) or 50 (its attention scores).
        out: an array to write into and return; its rows may be strided as the rows of `logits`. `logits` itself gives
            the result in place.
        variant: "auto", or a kernel by name: "vector" (16 bytes at a time; needs aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        [..., vocab], in the dtype and library and on the device of `logits`, computed in float32 and rounded once. An
        infinity becomes -cap or cap; NaN stays NaN. Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides, devices or numbers that do not fit; the message names the argument.

    Example:
        cukern.softcap_logits(logits, 30.0, out=logits)

    The method is from Gemma 2 (arXiv:2408.00118). SGLang's `Softcap` computes the same.
    """
    expect_array("logits", logits, DTYPES)
    rows, limit = rows_of("logits", logits), _check_cap(cap)
    if out is None:
        out = outputs(None, logits, "logits", _capped(logits))
        distance = rows.size
        if logits.on_host:
            return run_twin(variant, VARIANTS)
    else:
        distance = _rows_like(out, logits).distance
        if logits.on_host:
            run_twin(variant, VARIANTS)
            return out
    check.one_of("variant", variant, VARIANTS)
    if rows.total == 0 or rows.size == 0:
        return out
    item_size = logits.item_size
    wide = min(logits.alignment, out.alignment) == 16 and (rows.size | rows.distance | distance) * item_size % 16 == 0
    if variant == "vector" and not wide:
        check.fail("variant", "'auto' or 'scalar' here", "'vector': rows of logits or out are not 16-byte aligned")
    width = 16 if wide and variant != "scalar" else item_size
    items = _ITEMS[rows.total * rows.size >= _MANY]
    plan = tile(rows.size * item_size // width, items)
    few = f"{rows.total * rows.size} logits: {items} loads per thread ({_ITEMS[1]} from {_MANY} logits on)"
    launch(
        _variant(logits.dtype, width, items),
        (ceil_div(rows.total, plan.rows), plan.chunks),
        plan.threads,
        why=f"{asked(variant) or why_width(width, 'rows of logits and out')}; {few}",
        logits=logits,
        out=out,
        logits_stride=rows.distance * item_size,
        out_stride=distance * item_size,
        cap=limit,
        reciprocal=1 / limit,
        rows=rows.total,
        **plan.fields,
    )
    return out
