"""The group sizes and the smallest scales of the quantized formats."""

from __future__ import annotations

import numpy as np

#: A scale is computed from the largest magnitude, but at least from this value. SMALLEST_FP8 is the value for FP8 with
#: one scale per row or per tensor, as in vLLM. SMALLEST is the value for all other scales.
SMALLEST_FP8, SMALLEST = np.float32(1 / 512), np.float32(1e-10)

#: The number of elements along k, and along n, that share an FP8 scale.
BLOCK = 128
#: The number of elements that share a scale in the 4-bit formats.
MXFP4_GROUP, NVFP4_GROUP = 32, 16
