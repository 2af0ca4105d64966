"""Attention over a batch of sequences of different lengths, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import check
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # Softmax weights are rounded to 16 bits before the multiplication by values. That changes a result by up to half a
    # unit in the last place of the largest value. The largest value in the tests is 1. In float32 the error comes from
    # the scores.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-11),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-8),
    },
}

Array = NDArray[Any]


def _check_sums(name: str, cu_seqlens: Array, tokens: int) -> None:
    if cu_seqlens[0] != 0 or (np.diff(cu_seqlens) < 0).any() or cu_seqlens[-1] > tokens:
        check.fail(name, f"0, then sums of lengths up to {tokens} at most", cu_seqlens.tolist())


def _attend(query: Array, key: Array, value: Array, scale: float, causal: bool) -> Array:
    """Attend within one sequence in float64: query [heads, n, dim], key and value [heads, m, dim].

    The result is 0 for a query token without keys, or with only -inf scores.
    """
    queries, keys = query.shape[1], key.shape[1]
    with np.errstate(invalid="ignore", over="ignore"):
        scores = query @ key.swapaxes(1, 2) * scale
        if causal:
            seen = np.tri(queries, keys, keys - queries, dtype=bool)
            scores = np.where(seen, scores, -np.inf)
        largest = scores.max(axis=2, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
        total = weights.sum(axis=2, keepdims=True)
        return weights @ value / np.where(total == 0, 1, total)


def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> Array:
    of_keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    _check_sums("cu_seqlens_q", cu_seqlens_q, len(q))
    if cu_seqlens_k is not None:
        _check_sums("cu_seqlens_k", of_keys, len(k))
    group = q.shape[1] // k.shape[1]
    out = np.zeros(q.shape, q.dtype)
    for s in range(len(cu_seqlens_q) - 1):
        rows, memory = slice(*cu_seqlens_q[s : s + 2]), slice(*of_keys[s : s + 2])
        query, key, value = (x.astype(np.float64).swapaxes(0, 1) for x in (q[rows], k[memory], v[memory]))
        key, value = (x.repeat(group, axis=0) for x in (key, value))
        attended = _attend(query, key, value, q.shape[2] ** -0.5 if scale is None else scale, causal)
        out[rows] = attended.swapaxes(0, 1).astype(q.dtype)
    return out
