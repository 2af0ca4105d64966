"""Attention of one new token per sequence, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import check
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # A score is a float32 sum of `dim` terms. Its absolute error is the relative error of exp(score). The hardware
    # approximates exp2 and division.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=4e-5),
        "bfloat16": Tolerance(relative=2**-7, absolute=4e-5),
    },
}

Array = NDArray[Any]


def _biased(rows: Array, bias: Array | None) -> Array:
    x = rows.astype(np.float32)
    return x if bias is None else x + bias.astype(np.float32)


def _attend(query: Array, key: Array, value: Array, scale: float | None) -> Array:
    """Return softmax(scale * key @ query) @ value of one head: query [dim], key and value [entries, dim].

    The result is 0 without entries, or if every score is -inf.
    """
    if scale is None:
        scale = query.shape[0] ** -0.5
    with np.errstate(invalid="ignore", over="ignore"):
        scores = key.astype(np.float64) @ query.astype(np.float64) * scale
        largest = scores.max(initial=-np.inf)
        weights = np.exp(scores - (0 if largest == -np.inf else largest))
        total = weights.sum()
        return weights @ value.astype(np.float64) / (1 if total == 0 else total)


def masked_attention(
    q: Array,
    k: Array,
    v: Array,
    bias_q: Array | None,
    bias_k: Array | None,
    bias_v: Array | None,
    key_cache: Array,
    value_cache: Array,
    step: int | Array,
    *,
    scale: float | None = None,
) -> Array:
    """Append the new token to the caches, and attend to all `step` entries."""
    max_steps, batch, heads, dim = key_cache.shape
    step = check.element("step", step, 1, max_steps, "max_steps")
    key_cache[step - 1] = _biased(k, bias_k).reshape(batch, heads, dim).astype(key_cache.dtype)
    value_cache[step - 1] = _biased(v, bias_v).reshape(batch, heads, dim).astype(value_cache.dtype)
    query = _biased(q, bias_q).reshape(batch, heads, dim)
    out = np.zeros((batch, heads, dim), q.dtype)
    for b in range(batch):
        for h in range(heads):
            out[b, h] = _attend(query[b, h], key_cache[:step, b, h], value_cache[:step, b, h], scale)
    return out.reshape(q.shape)


def cross_attention(
    q: Array,
    bias_q: Array | None,
    key_memory: Array,
    value_memory: Array,
    memory_lengths: Array,
    *,
    scale: float | None = None,
) -> Array:
    """Attend to the first `memory_lengths[b]` entries of memory b, which `beams` consecutive rows of `q` share."""
    batch, memory_len, heads, dim = key_memory.shape
    if batch and (memory_lengths.min() < 0 or memory_lengths.max() > memory_len):
        check.fail("memory_lengths", f"in [0, {memory_len}] (memory_len)", memory_lengths.tolist())
    query = _biased(q, bias_q).reshape(-1, heads, dim)
    out = np.zeros((len(q), heads, dim), q.dtype)
    for row in range(len(q)):
        b = row * batch // len(q)
        length = memory_lengths[b]
        for h in range(heads):
            out[row, h] = _attend(query[row, h], key_memory[b, :length, h], value_memory[b, :length, h], scale)
    return out.reshape(q.shape)
