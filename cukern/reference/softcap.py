"""The soft cap of logits in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime.tolerance import Tolerance

Array = NDArray[Any]

#: The allowed errors of the kernels, keyed by result and dtype. Integers and booleans must match exactly.
TOLERANCES = {
    # For float32 logits the kernel divides, applies CUDA's tanhf (accurate to two units in the last place), and
    # multiplies. For 16-bit logits it uses a fast approximation of tanh with an error of 2**-21. A value near a
    # rounding boundary may round the other way.
    "capped": {
        "float32": Tolerance(relative=1e-6, absolute=1e-37),
        "float16": Tolerance(relative=2**-10, absolute=6e-8),
        "bfloat16": Tolerance(relative=2**-7, absolute=1e-37),
    },
}


def softcap_logits(logits: Array, cap: float, *, out: Array | None = None) -> Array:
    """See `cukern.softcap_logits`. The result is computed in float64."""
    out = np.empty(logits.shape, logits.dtype) if out is None else out
    limit = float(np.float32(cap))
    # Silence NumPy: the conversion warns for a signalling NaN, and a large cap overflows float16.
    with np.errstate(invalid="ignore", over="ignore"):
        out[...] = (limit * np.tanh(logits.astype(np.float64) / limit)).astype(logits.dtype)
    return out
