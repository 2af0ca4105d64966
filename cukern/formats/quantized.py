"""The groups and the scales of quantized numbers."""

from __future__ import annotations

import numpy as np

#: A scale is computed from the largest magnitude, or from this number if it is larger. SMALLEST_FP8 is for FP8 scales
#: per row and per tensor, as in vLLM; SMALLEST is for all other scales.
SMALLEST_FP8, SMALLEST = np.float32(1 / 512), np.float32(1e-10)

#: Size of an FP8 block: numbers per scale, along k and along n.
BLOCK = 128
#: Numbers per scale of 4-bit formats.
MXFP4_GROUP, NVFP4_GROUP = 32, 16
