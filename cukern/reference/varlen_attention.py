"""Attention over a batch of sequences of different lengths in NumPy, computed as the formulas say.

`cukern.ops.varlen_attention` has checked the arguments, but not the values in arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import check
from cukern.runtime.tolerance import Tolerance

#: The allowed errors of the kernels, keyed by result and dtype. Integers and booleans must match exactly.
TOLERANCES = {
    # The softmax weights are rounded to float16 or bfloat16 before they are multiplied by the values. This changes a
    # result by up to half a unit in the last place of the largest value, which is 1 in the tests. In float32 the error
    # comes from the scores.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-11),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-8),
    },
}

Array = NDArray[Any]


def _check_sums(name: str, cu_seqlens: Array, tokens: int) -> None:
    """Raise ValueError unless `cu_seqlens` are cumulative lengths of at most `tokens` rows in total."""
    if cu_seqlens[0] != 0 or (np.diff(cu_seqlens) < 0).any() or cu_seqlens[-1] > tokens:
        check.fail(name, f"0, then sums of lengths up to {tokens} at most", cu_seqlens.tolist())


def _attend(query: Array, key: Array, value: Array, scale: float, causal: bool) -> Array:
    """Compute the attention of one sequence in float64, for query [heads, n, dim] and key and value [heads, m, dim].

    The result of a query token is zeros if it attends to nothing, or if all its scores are -inf.
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
    """See `cukern.varlen_attention`."""
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
