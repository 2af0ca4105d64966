"""Attention of many tokens per sequence in NumPy, computed as the formulas say.

`cukern.ops.varlen_attention` has checked the arguments, but not the values in arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    # The lse is the logarithm of a sum of softmax weights that are not rounded. Its error comes from the scores, which
    # are float32 sums of dim products, and from exp2.
    "lse": {"float32": Tolerance(relative=2e-6, absolute=3e-5)},
}

Array = NDArray[Any]


def _check_sums(name: str, cu_seqlens: Array, tokens: int) -> None:
    """Raise ValueError unless `cu_seqlens` are cumulative lengths of at most `tokens` rows in total."""
    if cu_seqlens[0] != 0 or (np.diff(cu_seqlens) < 0).any() or cu_seqlens[-1] > tokens:
        check.fail(name, f"0, then sums of lengths up to {tokens} at most", cu_seqlens.tolist())


class _Memory(NamedTuple):
    """The keys and values of a sequence, float64 [kv_heads, keys, dim], and whether the sequence is invalid."""

    keys: Array
    values: Array
    is_invalid: bool = False


def _packed(k: Array, v: Array, begin: int, end: int) -> _Memory:
    keys, values = (x[begin:end].astype(np.float64).swapaxes(0, 1) for x in (k, v))
    return _Memory(keys, values)


def _paged(k: Array, v: Array, table: Array, length: int, first: int) -> _Memory:
    """Read a sequence from its pages. Keys before `first`, which no query sees, and invalid pages are zeros."""
    pages, page_size, kv_heads = k.shape[:3]
    is_invalid = length > len(table) * page_size
    length = 0 if is_invalid else max(length, 0)
    keys, values = (np.zeros((kv_heads, length, x.shape[-1])) for x in (k, v))
    for place in range(first // page_size, -(-length // page_size)):
        page, rows = int(table[place]), slice(place * page_size, min((place + 1) * page_size, length))
        if not 0 <= page < pages:
            # A query that sees a key of the page is NaN.
            keys[:, rows] = np.nan
            continue
        for to, cache in ((keys, k), (values, v)):
            to[:, rows] = cache[page, : rows.stop - rows.start].swapaxes(0, 1)
    return _Memory(keys, values, is_invalid)


def _attend(
    query: Array, memory: _Memory, scale: float, low: Array, high: Array, softcap: float | None, sinks: Array | None
) -> tuple[Array, Array]:
    """Compute attention in float64 for query [heads, n, dim]. Query i sees the keys low[i] ... high[i] - 1.

    Returns the result [heads, n, dim_v] and lse [heads, n].
    """
    group = len(query) // len(memory.keys)
    key, value = (x.repeat(group, axis=0) for x in memory[:2])
    place = np.arange(key.shape[1])
    seen = (place >= low[:, None]) & (place < high[:, None])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores = query @ key.swapaxes(1, 2) * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores = np.where(seen, scores, -np.inf)
        largest = scores.max(axis=2, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
        total = weights.sum(axis=2, keepdims=True)
        attended = weights @ value / np.where(total == 0, 1, total)
        lse = (largest + np.log(total))[..., 0]
        if sinks is not None:
            joint = np.logaddexp(lse, sinks.astype(np.float64)[:, None])
            attended = attended * np.where(joint == -np.inf, 0, np.exp(lse - joint))[..., None]
            lse = joint
    return attended, lse


def varlen_attention(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    block_table: Array | None = None,
    seqused_k: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """See `cukern.varlen_attention`."""
    tokens, heads = q.shape[:2]
    _check_sums("cu_seqlens_q", cu_seqlens_q, tokens)
    of_keys = cu_seqlens_k
    if block_table is None:
        of_keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        _check_sums("cu_seqlens_k", of_keys, len(k))
    out = np.zeros((tokens, heads, v.shape[-1]), q.dtype)
    lse = np.full((heads, tokens), -np.inf, np.float32)
    if sinks is not None:
        lse[...] = sinks[:, None]
    left, right = (-1, -1) if window is None else window
    for s in range(len(cu_seqlens_q) - 1):
        rows = slice(*cu_seqlens_q[s : s + 2].tolist())
        length = 0 if of_keys is None else int(of_keys[s + 1] - of_keys[s])
        if seqused_k is not None:
            used = max(int(seqused_k[s]), 0)
            length = used if block_table is not None else min(length, used)
        position = length - (rows.stop - rows.start) + np.arange(rows.stop - rows.start)
        low = np.maximum(position - left, 0) if left >= 0 else np.zeros_like(position)
        high = np.full_like(position, length)
        if causal or right >= 0:
            high = np.minimum(high, position + (0 if causal else right) + 1)
        if block_table is None:
            assert of_keys is not None
            memory = _packed(k, v, int(of_keys[s]), int(of_keys[s]) + length)
        else:
            memory = _paged(k, v, block_table[s], length, int(low.min(initial=length)))
        query = q[rows].astype(np.float64).swapaxes(0, 1)
        options = q.shape[2] ** -0.5 if scale is None else scale, low, high, softcap, sinks
        attended, of_rows = _attend(query, memory, *options)
        if memory.is_invalid:
            attended, of_rows = np.full_like(attended, np.nan), np.full_like(of_rows, np.nan)
        out[rows], lse[:, rows] = attended.swapaxes(0, 1).astype(q.dtype), of_rows
    return (out, lse) if return_lse else out
