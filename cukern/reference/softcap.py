"""The soft cap of logits in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime.tolerance import Tolerance

Array = NDArray[Any]

TOLERANCES = {
    # For float32 the kernel divides, applies CUDA's tanhf (accurate to two units in the last place), and multiplies.
    # For 16 bits it approximates tanh with an error of 2**-21.
    "capped": {
        "float32": Tolerance(relative=1e-6, absolute=1e-37),
        "float16": Tolerance(relative=2**-10, absolute=6e-8),
        "bfloat16": Tolerance(relative=2**-7, absolute=1e-37),
    },
}


def softcap_logits(logits: Array, cap: float, *, out: Array | None = None) -> Array:
    """Compute the cap in float64."""
    out = np.empty(logits.shape, logits.dtype) if out is None else out
    limit = float(np.float32(cap))
    # NumPy would warn of a signalling NaN that it converts, and of a large cap that overflows float16.
    with np.errstate(invalid="ignore", over="ignore"):
        out[...] = (limit * np.tanh(logits.astype(np.float64) / limit)).astype(logits.dtype)
    return out
