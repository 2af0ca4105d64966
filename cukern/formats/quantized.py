"""Group sizes and scales of the quantized formats."""

from __future__ import annotations

from typing import Any

import numpy as np

#: A scale is computed from the largest magnitude of its elements, but at least from these values. SMALLEST_FP8 is for
#: FP8 with a scale per row or tensor, as in vLLM.
SMALLEST_FP8, SMALLEST = np.float32(1 / 512), np.float32(1e-10)

#: An FP8 scale covers BLOCK elements along k, and BLOCK along n.
BLOCK = 128
#: Elements per scale.
MXFP4_GROUP, NVFP4_GROUP = 32, 16


def number_of(scale: Any) -> float:
    """Convert a number or an array of one element to a float; None is 1."""
    return 1.0 if scale is None else float(np.asarray(scale).reshape(()))
