"""The layout of an expert's weights, prepared or not."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP

#: Rows of prepared weights and numbers along k of a unit, and its bytes by the numbers that share a scale.
UNIT_ROWS, UNIT_K = 8, 64
UNIT_BYTES = {MXFP4_GROUP: 272, NVFP4_GROUP: 288}
#: Numbers along k of a unit of weights prepared for FP8 rows, and its bytes: numbers, and a word for each row.
FOLDED_K, FOLDED_BYTES = 128, 544


def is_prepared(b: Any) -> bool:
    """Whether weights are prepared: an array of four dimensions, which no others have."""
    return len(b.shape) == 4


def is_folded(b: Any) -> bool:
    """Whether weights are prepared for FP8 rows."""
    return is_prepared(b) and b.shape[3] == FOLDED_BYTES


def rows_of_weights(b: Any) -> Any:
    """The number n of rows of an expert's weights, prepared or not."""
    return b.shape[1] * UNIT_ROWS if is_prepared(b) else b.shape[1]
