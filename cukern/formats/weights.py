"""The layout of an expert's weights, prepared or not."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP

#: A unit of prepared weights has UNIT_ROWS rows of UNIT_K numbers. UNIT_BYTES is its size for each scale group size.
UNIT_ROWS, UNIT_K = 8, 64
UNIT_BYTES = {MXFP4_GROUP: 272, NVFP4_GROUP: 288}
#: A unit of weights prepared for FP8 rows has UNIT_ROWS rows of FOLDED_K numbers. Its FOLDED_BYTES bytes hold the 4-bit
#: numbers, then a 32-bit word with the exponents of each row.
FOLDED_K, FOLDED_BYTES = 128, 544


def is_prepared(b: Any) -> bool:
    """Return whether weights are prepared: only prepared weights have four dimensions."""
    return len(b.shape) == 4


def is_folded(b: Any) -> bool:
    """Return whether weights are prepared for FP8 rows."""
    return is_prepared(b) and b.shape[3] == FOLDED_BYTES


def rows_of_weights(b: Any) -> Any:
    """Return the number of rows (n) of an expert's weights, prepared or not."""
    return b.shape[1] * UNIT_ROWS if is_prepared(b) else b.shape[1]
