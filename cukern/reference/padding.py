"""Remove and restore the padding of batches, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def build_sequence_length_padding_offset(
    sequence_length: Array, max_seq_len: int, *, valid_word_num: int | None = None
) -> tuple[Array, Array, int]:
    lengths = np.clip(sequence_length.astype(np.int64), 0, max_seq_len)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    words = int(cu_seqlens[-1]) if valid_word_num is None else valid_word_num
    # A word's sequence index is the count of sequences that end before the word.
    sequence = np.searchsorted(cu_seqlens[1:], np.arange(words), side="right")
    padding_offset = sequence * max_seq_len - cu_seqlens[sequence]
    return padding_offset.astype(np.int32), cu_seqlens.astype(np.int32), words


def _places(padding_offset: Array, rows: int) -> tuple[Array, Array]:
    """Return each word's row in the padded batch, and whether the batch has that row."""
    row = np.arange(len(padding_offset)) + padding_offset.astype(np.int64)
    return row, (row >= 0) & (row < rows)


def remove_sequence_length_padding(src: Array, padding_offset: Array) -> Array:
    batch, seq, hidden = src.shape
    row, inside = _places(padding_offset, batch * seq)
    result = np.zeros((len(padding_offset), hidden), src.dtype)
    result[inside] = src.reshape(batch * seq, hidden)[row[inside]]
    return result


def rebuild_sequence_length_padding(
    src: Array, padding_offset: Array, batch: int, max_seq_len: int, *, fill: float = 0.0
) -> Array:
    hidden = src.shape[1]
    row, inside = _places(padding_offset, batch * max_seq_len)
    with np.errstate(over="ignore"):
        result = np.full((batch * max_seq_len, hidden), fill, src.dtype)
    result[row[inside]] = src[inside]
    return result.reshape(batch, max_seq_len, hidden)


def transpose_remove_padding(src: Array, padding_offset: Array) -> Array:
    batch, heads, seq, dim = src.shape
    return remove_sequence_length_padding(src.transpose(0, 2, 1, 3).reshape(batch, seq, heads * dim), padding_offset)


def add_qkv_bias_rebuild_padding(
    q: Array,
    k: Array,
    v: Array,
    bias_q: Array,
    bias_k: Array,
    bias_v: Array,
    padding_offset: Array,
    batch: int,
    max_seq_len: int,
    heads: int,
) -> tuple[Array, Array, Array]:

    def one(x: Array, bias: Array) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            biased = (x.astype(np.float32) + bias.astype(np.float32)).astype(x.dtype)
        padded = rebuild_sequence_length_padding(biased, padding_offset, batch, max_seq_len)
        by_head = padded.reshape(batch, max_seq_len, heads, x.shape[1] // heads)
        return np.ascontiguousarray(by_head.transpose(0, 2, 1, 3))

    return one(q, bias_q), one(k, bias_k), one(v, bias_v)
