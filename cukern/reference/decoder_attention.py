"""Attention of one new token per sequence in NumPy, computed as the formulas say.

`cukern.ops.decoder_attention` has checked the arguments, but not the values in arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import check
from cukern.runtime.tolerance import Tolerance

#: The allowed errors of the kernels, keyed by result and dtype. Integers and booleans must match exactly.
TOLERANCES = {
    # A score is a float32 sum of `dim` terms. The absolute error of a score is the relative error of exp(score). exp2
    # and the division are hardware approximations. A value near a rounding boundary of float16 or bfloat16 may round
    # the other way.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=4e-5),
        "bfloat16": Tolerance(relative=2**-7, absolute=4e-5),
    },
}

Array = NDArray[Any]


def _biased(rows: Array, bias: Array | None) -> Array:
    """Return the rows in float32, with their bias added."""
    x = rows.astype(np.float32)
    return x if bias is None else x + bias.astype(np.float32)


def _attend(query: Array, key: Array, value: Array, scale: float | None) -> Array:
    """Return softmax(scale * key @ query) @ value of one head: query [dim], key and value [entries, dim], float32.

    Without entries, or if every score is -inf, the result is zeros.
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
    """Write the new token to the caches, and attend to all `step` entries. See `cukern.masked_attention`."""
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
    """Attend to the first `memory_lengths[b]` entries of memory b. `beams` consecutive rows of `q` share a memory."""
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
