"""Beam search in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import check
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernel does the same IEEE additions and divisions. The tolerance is below one unit in the last place, so
    # results must be equal.
    "values": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=2**-30, absolute=0)),
    "keys": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=2**-30, absolute=0)),
    "scores": {"float32": Tolerance(relative=2**-30, absolute=0)},
    "finished_scores": {"float32": Tolerance(relative=2**-30, absolute=0)},
}

Array = NDArray[Any]


def _best_first(keys: Array, k: int) -> Array:
    """Return the indices of the k largest keys, largest first; ties keep their order."""
    return np.argsort(-keys, axis=-1, kind="stable")[..., :k]


def _candidates(totals: Array, k: int, diversity_rate: float) -> tuple[Array, Array]:
    """Return the k largest values of `totals` [batch, beams, vocab] per batch entry, and their ids.

    An id is an index into the flattened array [beams * vocab].
    """
    batch, beams, vocab = totals.shape
    totals = np.where(np.isnan(totals), np.float32(-np.inf), totals)
    flat = totals.reshape(batch, beams * vocab)
    if diversity_rate == 0:
        ids = _best_first(flat, k)
        return np.take_along_axis(flat, ids, axis=-1), ids.astype(np.int32)
    ranked = _best_first(totals, k)
    with np.errstate(over="ignore", invalid="ignore"):
        bonus = np.float32(diversity_rate) * np.arange(ranked.shape[-1], dtype=np.float32)
        values = np.take_along_axis(totals, ranked, axis=-1) + bonus
    values = np.where(np.isnan(values), np.float32(-np.inf), values)
    ids = (ranked + vocab * np.arange(beams)[:, None]).reshape(batch, beams * ranked.shape[-1])
    values = values.reshape(ids.shape)
    # Sort by value, then id. The columns are not in id order, so a stable sort by value would not order ties.
    order = np.lexsort((ids, -values), axis=-1)[:, :k]
    return np.take_along_axis(values, order, axis=-1), np.take_along_axis(ids, order, axis=-1).astype(np.int32)


def beam_topk(log_probs: Array, k: int, *, diversity_rate: float = 0.0) -> tuple[Array, Array]:
    return _candidates(log_probs.astype(np.float32) + np.float32(0), k, diversity_rate)


def beam_search_step(
    log_probs: Array,
    scores: Array,
    finished_scores: Array,
    finished_lengths: Array,
    finished_ids: Array,
    finished_parents: Array,
    done: Array,
    step: int | Array,
    max_steps: int,
    end_id: int | Sequence[int],
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str | None = False,
    diversity_rate: float = 0.0,
) -> tuple[Array, ...]:
    batch, beams, vocab = log_probs.shape
    ends = sorted(set(end_id) if isinstance(end_id, (tuple, list)) else {end_id})
    step = check.element("step", step, 0, max_steps - 1, "below max_steps")
    length, last = step + 1, step + 1 == max_steps
    with np.errstate(invalid="ignore"):
        totals = log_probs.astype(np.float32) + scores[:, :, None]
    totals = np.where(np.isnan(totals), np.float32(-np.inf), totals)
    _, candidates = _candidates(totals, max(2, 1 + len(ends)) * beams, diversity_rate)
    # `diversity_rate` affects the choice of candidates, but not their scores.
    totals = np.take_along_axis(totals.reshape(batch, beams * vocab), candidates, axis=-1)
    penalty = np.float32(float(length) ** length_penalty)
    furthest = max_steps if early_stopping in (None, "never") and length_penalty > 0 else length
    furthest_penalty = np.float32(float(furthest) ** length_penalty)

    ids, parents = np.empty((2, batch, beams), np.int32)
    pool: list[Array] = [x.copy() for x in (finished_scores, finished_lengths, finished_ids, finished_parents)]
    pool[0][np.isnan(pool[0])] = -np.inf
    scores, done = np.empty((batch, beams), np.float32), done.copy()
    for b in range(batch):
        token, parent, total = candidates[b] % vocab, candidates[b] // vocab, totals[b]
        is_end = np.isin(token, ends)
        running = np.flatnonzero(~is_end)[:beams]
        ids[b], parents[b], scores[b] = token[running], parent[running], total[running]
        if not done[b]:
            # Only the best `beams` candidates may finish. There are more candidates, so that at least `beams` of them
            # can continue.
            new = np.flatnonzero((is_end[:beams] | last) & (total[:beams] > -np.inf))
            lengths = np.full(len(new), length)
            added = (total[new] / penalty, lengths, token[new], parent[new])
            merged = [np.concatenate([old[b], more]) for old, more in zip(pool, added, strict=True)]
            kept = _best_first(merged[0], beams)
            for old, both in zip(pool, merged, strict=True):
                old[b] = both[kept]
        full = (pool[1][b] > 0).all()
        can_improve = not full or scores[b].max() / furthest_penalty > pool[0][b].min()
        done[b] |= not can_improve or (early_stopping is True and full) or last
    return (ids, parents, scores, *pool, done)


def gather_tree(
    ids: Array,
    parents: Array,
    lengths: Array | None,
    end_id: int,
    *,
    last_ids: Array | None = None,
    last_parents: Array | None = None,
) -> Array:
    max_steps, batch, beams = ids.shape
    result = np.full((max_steps, batch, beams), end_id, np.int32)
    for b in range(batch):
        for j in range(beams):
            length = max_steps if lengths is None else lengths[b] if lengths.ndim == 1 else lengths[b, j]
            length = min(max(int(length), 0), max_steps)
            beam = j
            for level in range(length - 1, -1, -1):
                if last_ids is not None and last_parents is not None and level == length - 1:
                    result[level, b, j], beam = last_ids[b, j], last_parents[b, j]
                else:
                    result[level, b, j], beam = ids[level, b, beam], parents[level, b, beam]
                beam = min(max(int(beam), 0), beams - 1)
            ended = np.flatnonzero(result[:, b, j] == end_id)
            if len(ended):
                result[ended[0] :, b, j] = end_id
    return result


def update_kv_cache(
    key_cache: Array,
    value_cache: Array,
    parents: Array,
    step: int | Array,
    *,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    batch, beams = parents.shape
    rows = (np.clip(parents, 0, beams - 1) + beams * np.arange(batch)[:, None]).reshape(-1)
    steps = check.element("step", step, 0, len(key_cache), "max_steps")
    results = key_cache[:steps, rows], value_cache[:steps, rows]
    if out is None and not isinstance(step, np.ndarray):
        return results
    if out is None:
        out = np.zeros_like(key_cache), np.zeros_like(value_cache)
    out[0][:steps], out[1][:steps] = results
    return out
