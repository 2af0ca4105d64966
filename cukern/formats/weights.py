"""The sizes of an expert's weights in the plain layout and in the prepared layouts of `cukern.prepare_weights`."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP

#: A unit of prepared weights contains UNIT_ROWS rows of UNIT_K elements. UNIT_BYTES maps the number of elements that
#: share a scale to the size of a unit in bytes.
UNIT_ROWS, UNIT_K = 8, 64
UNIT_BYTES = {MXFP4_GROUP: 272, NVFP4_GROUP: 288}
#: A unit of weights prepared for FP8 rows contains UNIT_ROWS rows of FOLDED_K elements. Its FOLDED_BYTES bytes are the
#: 4-bit elements, then a 32-bit word for each row with the exponents of the row.
FOLDED_K, FOLDED_BYTES = 128, 544


def is_prepared(b: Any) -> bool:
    """Return whether weights are prepared. Only prepared weights have four dimensions."""
    return len(b.shape) == 4


def is_folded(b: Any) -> bool:
    """Return whether weights are prepared for FP8 rows."""
    return is_prepared(b) and b.shape[3] == FOLDED_BYTES


def rows_of_weights(b: Any) -> Any:
    """Return n, the number of rows of an expert's weights, which may be prepared."""
    return b.shape[1] * UNIT_ROWS if is_prepared(b) else b.shape[1]
