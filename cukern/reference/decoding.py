"""The steps of decoding before and after the choice of a token, in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernel does the float32 operations of this file in the same order, without fused multiply-add.
    "values": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
}

Array = NDArray[Any]


def decoding_init(start_ids: Array) -> tuple[Array, Array, Array, Array]:
    batch = len(start_ids)
    return start_ids.copy(), np.zeros(batch, np.int32), np.zeros(batch, bool), np.zeros(batch, np.float32)


def topp_init(start_ids: Array, vocab: int) -> tuple[Array, Array, Array, Array, Array, Array]:
    batch = len(start_ids)
    offsets = vocab * np.arange(batch + 1, dtype=np.int32)
    return *decoding_init(start_ids), offsets, np.tile(np.arange(vocab, dtype=np.int32), (batch, 1))


def update_logits(
    logits: Array, bias: Array | None = None, finished: Array | None = None, end_id: int | None = None
) -> Array:
    x = logits.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if bias is not None:
            x += bias.astype(np.float32)
        result = x.astype(logits.dtype)
    if finished is not None:
        largest = ml_dtypes.finfo(logits.dtype).max
        result[finished] = -largest
        result[finished, end_id] = largest
    return result


def _words(words: Array, row: int) -> list[list[int]]:
    """Return the words of a row as lists of token ids, without malformed words.

    `words` has FasterTransformer's layout, a row of ids and a row of end positions. It is [2, size] for all rows, or
    [batch, 2, size].
    """
    ids, ends = words if words.ndim == 2 else words[row]
    begins = np.concatenate([[0], ends])[:-1]
    return [ids[a:b].tolist() for a, b in zip(begins, ends, strict=True) if 0 <= a < b <= len(ids)]


def _ends_with(sequence: Array, word: list[int]) -> bool:
    return len(word) <= len(sequence) and sequence[len(sequence) - len(word) :].tolist() == word


def apply_penalties(
    logits: Array,
    *,
    temperature: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    output_ids: Array | None = None,
    sequence_length: Array | None = None,
    prompt_length: Array | None = None,
    min_length: Any = None,
    end_id: int | None = None,
    bad_words: Array | None = None,
    prompt_mask: Array | None = None,
    output_mask: Array | None = None,
) -> Array:
    batch, vocab = logits.shape

    def per_row(value: Any, default: float, dtype: Any = np.float32) -> Array:
        return np.broadcast_to(np.asarray(default if value is None else value, dtype), batch)

    temperature = per_row(temperature, 1)
    repetition = per_row(repetition_penalty, 1)
    presence = per_row(presence_penalty, 0)
    frequency = per_row(frequency_penalty, 0)
    at_least = per_row(min_length, 0, np.int32)
    length = np.maximum(per_row(sequence_length, 0, np.int32), 0)
    prompt = np.maximum(per_row(prompt_length, 0, np.int32), 0)
    ids = np.zeros((batch, 0), np.int32) if output_ids is None else output_ids

    result = logits.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for b, x in enumerate(result):
            sequence = ids[b, : length[b]]
            in_vocab = (sequence >= 0) & (sequence < vocab)
            is_generated = np.arange(len(sequence)) >= prompt[b]
            count = np.bincount(sequence[in_vocab & is_generated], minlength=vocab)
            counted = count > 0
            generated = counted if output_mask is None else counted | output_mask[b]
            seen = (np.bincount(sequence[in_vocab], minlength=vocab) > 0) | generated
            if prompt_mask is not None:
                seen |= prompt_mask[b]
            x[seen] *= np.where(x[seen] > 0, np.float32(1) / repetition[b], repetition[b])
            x[counted] -= frequency[b] * count[counted].astype(np.float32)
            x[generated] -= presence[b]

            words = [] if bad_words is None else _words(bad_words, b)
            for *start, last in words:
                if 0 <= last < vocab and _ends_with(sequence, start):
                    x[last] = -np.inf
            if max(length[b] - prompt[b], 0) < at_least[b]:
                x[end_id] = -np.inf
        divides = (temperature >= np.finfo(np.float32).tiny) & np.isfinite(temperature)
        scale = np.where(divides, 1 / np.where(divides, temperature, 1), 1).astype(np.float32)
        return (result * scale[:, None]).astype(logits.dtype)


def stop_words_criterion(output_ids: Array, sequence_length: Array, stop_words: Array, finished: Array) -> Array:
    for b, length in enumerate(np.maximum(sequence_length, 0)):
        if any(_ends_with(output_ids[b, :length], word) for word in _words(stop_words, b)):
            finished[b] = True
    return finished


def update_finished(word_ids: Array, finished: Array, sequence_length: Array, end_id: int) -> tuple[Array, Array]:
    sequence_length += ~finished
    finished |= word_ids == end_id
    return finished, sequence_length
