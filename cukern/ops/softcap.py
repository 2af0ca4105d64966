"""`softcap_logits`: limit logits to a range by a soft cap."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.reference import softcap as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Result, dtype_name, expect_array, expect_strided
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, launch, outputs, run_twin
from cukern.runtime.rows import rows_of, tile
from cukern.runtime.vectors import ceil_div, why_width

__all__ = ["softcap_logits"]

DTYPES = ("float32", "float16", "bfloat16")
#: "vector" loads 16 bytes at a time, "scalar" one element.
VARIANTS = ("auto", "vector", "scalar")

_kernel = Kernel("softcap", "softcap")
#: Vectors per thread: one for few logits, four for many. With one vector per thread, few logits occupy more
#: multiprocessors.
_ITEMS = (1, 4)
#: Below this number of logits, a thread has one vector. The benchmark softcap_logits has far fewer logits with 1 token,
#: and far more with 64 tokens.
_MANY_LOGITS = 2**21
#: Smallest normal and largest finite float32.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _variant(dtype: str, width: int, items: int) -> Variant:
    return _kernel.variant(arrays.CUDA_TYPE[dtype], width, items)


# Gemma 2 caps bfloat16 logits.
_kernel.at_import = [_variant("bfloat16", 16, items).instance for items in _ITEMS]
_kernel.specialized = [_variant(dtype, 16, items).instance for dtype in DTYPES for items in _ITEMS]


def _capped(logits: Any, *_: Any, **__: Any) -> Result:
    return Result(logits.shape, dtype_name(logits), "[..., vocab]")


@op(twin.softcap_logits, "capped", _capped)
def softcap_logits(logits: AnyArray, cap: float, *, out: AnyArray | None = None, variant: str = "auto") -> AnyArray:
    """Limit logits smoothly to [-cap, cap]: cap * tanh(logits / cap), in float32, rounded once.

    Args:
        logits: [..., vocab], float32, float16 or bfloat16; rows may be strided, with one stride.
        cap: a positive number, such as 30 (the logits of Gemma 2).
        out: an array like `logits` to write into and return, or `logits` itself.
        variant: "auto", "vector" (loads of 16 bytes; aligned rows) or "scalar", with the same bits.

    Returns:
        [..., vocab] of the dtype of `logits`. An infinity becomes -cap or cap; NaN stays NaN.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    Example:
        cukern.softcap_logits(logits, 30.0, out=logits)

    The method is from Gemma 2 (arXiv:2408.00118).
    """
    expect_array("logits", logits, DTYPES)
    rows, limit = rows_of("logits", logits), check.number("cap", cap)
    if not _SMALLEST <= limit <= _LARGEST:
        check.fail("cap", "a positive number of float32", cap)
    given, distance = out, rows.size
    if out is None:
        out = outputs(None, logits, "logits", _capped(logits))
    else:
        expect_strided("out", out, logits, "logits", (logits.dtype,), logits.shape, "[..., vocab]")
        distance = rows_of("out", out).distance
    if logits.on_host:
        run_twin(variant, VARIANTS)
        return given
    check.one_of("variant", variant, VARIANTS)
    if rows.total == 0 or rows.size == 0:
        return out
    item_size = logits.item_size
    wide = min(logits.alignment, out.alignment) == 16 and (rows.size | rows.distance | distance) * item_size % 16 == 0
    if variant == "vector" and not wide:
        check.fail("variant", "'auto' or 'scalar' here", "'vector': rows of logits or out are not 16-byte aligned")
    width = 16 if wide and variant != "scalar" else item_size
    items = _ITEMS[rows.total * rows.size >= _MANY_LOGITS]
    plan = tile(rows.size * item_size // width, items)
    amount = f"{rows.total * rows.size} logits: {items} loads per thread ({_ITEMS[1]} from {_MANY_LOGITS} logits on)"
    launch(
        _variant(logits.dtype, width, items),
        (ceil_div(rows.total, plan.rows), plan.chunks),
        plan.threads,
        why=f"{asked(variant) or why_width(width, 'rows of logits and out')}; {amount}",
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
