"""Rotary position embedding in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.formats.rotary import LAYOUTS, has_second_half
from cukern.reference import kv_cache, norm
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernel does the same float32 operations: two multiplications, an addition, one rounding.
    "heads": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
}

Array = NDArray[Any]


def rotary_embedding(
    query: Array,
    key: Array,
    cos: Array,
    sin: Array,
    *,
    layout: str = "half",
    rotary_dim: int | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Array, Array]:
    rotary_dim = rotary_dim or cos.shape[-1]
    half = rotary_dim // 2
    second = slice(half, rotary_dim) if has_second_half(layout, cos.shape[-1], rotary_dim) else slice(half)
    cos, sin = (np.expand_dims(x, unsqueeze_dim).astype(np.float32) for x in (cos, sin))
    loaded, stored = (_sides(half, in_pairs) for in_pairs in LAYOUTS[layout])
    for x in (query, key):
        first, other = (x[..., side].astype(np.float32) for side in loaded)
        with np.errstate(over="ignore", invalid="ignore"):
            x[..., stored[0]] = (first * cos[..., :half] - other * sin[..., :half]).astype(x.dtype)
            x[..., stored[1]] = (other * cos[..., second] + first * sin[..., second]).astype(x.dtype)
    return query, key


def fused_qk_norm_rope_and_cache(
    query: Array,
    key: Array,
    value: Array,
    cos: Array,
    sin: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    q_weight: Array | None = None,
    k_weight: Array | None = None,
    epsilon: float | None = None,
    *,
    weight_offset: float = 0.0,
    layout: str = "half",
    rotary_dim: int | None = None,
) -> Array:
    key = key.copy()
    if epsilon is not None:
        for x, weight in ((query, q_weight), (key, k_weight)):
            norm.rms_norm(x, weight, epsilon, weight_offset=weight_offset, out=x)
    rotary_embedding(query, key, cos, sin, layout=layout, rotary_dim=rotary_dim)
    kv_cache.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, "auto", 1.0, 1.0)
    return query


def _sides(half: int, in_pairs: bool) -> tuple[slice, slice]:
    """Return the slices of a head with the first and the second elements of its pairs."""
    if in_pairs:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(half), slice(half, 2 * half)
