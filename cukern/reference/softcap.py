"""The soft cap of logits in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime.tolerance import Tolerance

Array = NDArray[Any]

#: How closely the kernels match the twin, by result, then by dtype. Integers and booleans are exact.
TOLERANCES = {
    # Float32 has CUDA's tanhf, good to two units in the last place, beside a division and a product. The quick form for
    # 16 bits is good to 2**-21. A value near a rounding boundary may fall on the other side of it.
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
    # A signalling NaN warns in a conversion, and a large cap overflows float16.
    with np.errstate(invalid="ignore", over="ignore"):
        out[...] = (limit * np.tanh(logits.astype(np.float64) / limit)).astype(logits.dtype)
    return out
