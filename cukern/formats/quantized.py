"""The groups and the scales of quantized numbers."""

from __future__ import annotations

import numpy as np

#: The least magnitudes that a scale is made from: in FP8 for whole rows and tensors (vLLM's), and for all else.
SMALLEST_FP8, SMALLEST = np.float32(1 / 512), np.float32(1e-10)

#: Numbers that share a scale of FP8 along k, and along n.
BLOCK = 128
#: Numbers that share a scale of 4 bits.
MXFP4_GROUP, NVFP4_GROUP = 32, 16
