"""The groups and the scales of quantized numbers."""

from __future__ import annotations

import numpy as np

#: Lower bounds of the magnitude that a scale is computed from: for FP8 rows and tensors (vLLM's bound), and otherwise.
SMALLEST_FP8, SMALLEST = np.float32(1 / 512), np.float32(1e-10)

#: Size of an FP8 block: numbers per scale, along k and along n.
BLOCK = 128
#: Numbers per scale of 4-bit formats.
MXFP4_GROUP, NVFP4_GROUP = 32, 16
