"""Sizes of expert weights: plain ones, and weights that `cukern.prepare_weights` has prepared."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP

#: A unit of prepared weights has UNIT_ROWS rows of UNIT_K elements. UNIT_BYTES maps the number of elements per scale to
#: the bytes of a unit.
UNIT_ROWS, UNIT_K = 8, 64
UNIT_BYTES = {MXFP4_GROUP: 272, NVFP4_GROUP: 288}
#: A unit for FP8 activations has UNIT_ROWS rows of FOLDED_K elements: first all 4-bit elements, then 32 bits of
#: exponents for each row.
FOLDED_K, FOLDED_BYTES = 128, 544


def is_prepared(b: Any) -> bool:
    """Return whether weights are prepared. Only prepared weights have four dimensions."""
    return len(b.shape) == 4


def is_folded(b: Any) -> bool:
    return is_prepared(b) and b.shape[3] == FOLDED_BYTES


def rows_of_weights(b: Any) -> Any:
    """Return n, the rows of an expert's plain or prepared weights."""
    return b.shape[1] * UNIT_ROWS if is_prepared(b) else b.shape[1]
