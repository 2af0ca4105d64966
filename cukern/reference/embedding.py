"""Embedding lookups in NumPy.

An id or position out of range gives a row of zeros, unless `refusing` wraps the function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import check
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # As in the kernel, rows are copied, or multiplied and added in float32 (not fused) and then rounded once.
    "rows": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
}

Array = NDArray[Any]


def _positions(word_ids: Array, step: int, position_ids: Array | None) -> Array:
    if position_ids is not None:
        return np.broadcast_to(step + position_ids.astype(np.int64), word_ids.shape)
    along = np.arange(word_ids.shape[-1]) if word_ids.ndim > 1 else np.zeros(1, np.int64)
    return np.broadcast_to(step + along, word_ids.shape)


def _rows(table: Array, ids: Array) -> tuple[Array, Array]:
    """Return the rows for `ids`, and which ids are in range. Other ids get an arbitrary row."""
    valid = (ids >= 0) & (ids < len(table))
    if not valid.any():
        return np.zeros((*ids.shape, table.shape[1]), table.dtype), valid
    return table[np.where(valid, ids, ids[valid][0])], valid


def embedding_lookup(
    embedding_table: Array,
    word_ids: Array,
    position_table: Array | None = None,
    step: int = 0,
    *,
    position_ids: Array | None = None,
) -> Array:
    rows, valid = _rows(embedding_table, word_ids)
    if position_table is not None:
        rows, valid = _add_positions(rows, valid, 1.0, position_table, _positions(word_ids, step, position_ids))
    return np.where(valid[..., None], rows, np.zeros((), rows.dtype))


def embedding_lookup_sine_position_encoding(
    embedding_table: Array,
    position_encoding: Array,
    word_ids: Array,
    step: int,
    *,
    position_ids: Array | None = None,
) -> Array:
    """Return embedding_table[word_ids] * sqrt(hidden) + position_encoding[positions]."""
    rows, valid = _rows(embedding_table, word_ids)
    scale = embedding_table.shape[1] ** 0.5
    rows, valid = _add_positions(rows, valid, scale, position_encoding, _positions(word_ids, step, position_ids))
    return np.where(valid[..., None], rows, np.zeros((), rows.dtype))


def _add_positions(rows: Array, valid: Array, scale: float, table: Array, positions: Array) -> tuple[Array, Array]:
    """Return rows * scale + table[positions], computed in float32 and rounded once.

    Also return which rows are valid: the rows that `valid` marks and whose position is in range.
    """
    added, valid_too = _rows(table, positions)
    with np.errstate(over="ignore", invalid="ignore"):
        result = rows.astype(np.float32) * np.float32(scale) + added.astype(np.float32)
        return result.astype(rows.dtype), valid & valid_too


def refusing(function: Callable[..., Array]) -> Callable[..., Array]:
    """Wrap a function to raise ValueError for ids or positions out of range, and to take only keyword arguments."""

    @functools.wraps(function)
    def checked(**arguments: Any) -> Array:
        _check_range("word_ids", arguments["word_ids"], 0, len(arguments["embedding_table"]), "vocab")
        if arguments["position_ids"] is not None:
            table = next(arguments[x] for x in ("position_table", "position_encoding") if x in arguments)
            _check_range("position_ids", arguments["position_ids"], arguments["step"], len(table), "positions")
        return function(**arguments)

    return checked


def _check_range(name: str, indices: Array, offset: int, count: int, of: str) -> None:
    if not indices.size:
        return
    low, high = int(indices.min()), int(indices.max())
    if low + offset < 0 or high + offset >= count:
        wanted = f"in [0, {count}) ({of})" if not offset else f"in [0, {count}) ({of}) after adding step = {offset}"
        check.fail(name, wanted, f"{low} to {high}")
