"""Permute tokens into expert order and back, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.reference.quantization import per_token_group_quant_fp8

Array = NDArray[Any]


def _experts(topk_ids: Array, num_experts: int, expert_map: Array | None, local: int) -> Array:
    """Return each pair's local expert index; `local` for experts of other ranks."""
    ids = topk_ids.reshape(-1).astype(np.int64)
    ids = np.where((ids >= 0) & (ids < num_experts), ids, -1)
    if expert_map is not None:
        ids = np.where(ids >= 0, expert_map[ids], -1)
    return np.where((ids >= 0) & (ids < local), ids, local)


def _sort(experts: Array, local: int, block_size: int = 1) -> tuple[Array, Array]:
    """Sort the pairs (token, slot) by expert.

    The first result has the first row of each expert, then the end of the last expert's rows. The second result has the
    row of each pair, or -1 if the pair's expert is not local.
    """
    counts = np.bincount(experts, minlength=local + 1)[:local]
    starts = np.concatenate([[0], np.cumsum(-(-counts // block_size) * block_size)])
    order = np.argsort(experts, kind="stable")[: counts.sum()]
    before = np.cumsum(counts) - counts
    inverse = np.full(experts.size, -1)
    inverse[order] = np.arange(len(order)) + (starts[:-1] - before)[experts[order]]
    return starts, inverse


def moe_sort(
    topk_ids: Array, num_experts: int, *, expert_map: Array | None = None, num_local_experts: int | None = None
) -> tuple[Array, Array, Array]:
    local = num_experts if num_local_experts is None else num_local_experts
    offsets, inverse = _sort(_experts(topk_ids, num_experts, expert_map, local), local)
    row_token = np.zeros(topk_ids.size, np.int32)
    there = inverse >= 0
    row_token[inverse[there]] = np.flatnonzero(there) // topk_ids.shape[1]
    return offsets.astype(np.int32), row_token, inverse.astype(np.int32).reshape(topk_ids.shape)


def moe_sort_batched(
    topk_ids: Array,
    num_experts: int,
    max_tokens: int,
    *,
    expert_map: Array | None = None,
    num_local_experts: int | None = None,
) -> tuple[Array, Array]:
    local = num_experts if num_local_experts is None else num_local_experts
    experts = _experts(topk_ids, num_experts, expert_map, local)
    starts, inverse = _sort(experts, local)
    rank = inverse - starts[experts]
    positions = np.where((inverse >= 0) & (rank < max_tokens), experts * max_tokens + rank, -1)
    counts = np.minimum(np.diff(starts), max_tokens)
    return counts.astype(np.int32), positions.astype(np.int32).reshape(topk_ids.shape)


def aligned_rows(pairs: int, num_experts: int, block_size: int, whole_blocks: bool) -> int:
    """Return the maximum number of rows for `pairs` pairs if each expert's rows are padded to whole blocks."""
    rows = pairs + num_experts * (block_size - 1)
    if whole_blocks:
        rows = -(-rows // block_size) * block_size
    return min(rows, pairs * block_size) if pairs < num_experts else rows


def moe_align_block_size(
    topk_ids: Array,
    block_size: int,
    num_experts: int,
    expert_map: Array | None = None,
    pad_sorted_ids: bool = False,
    *,
    ignore_invalid_experts: bool = False,
    out: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    early = expert_map if ignore_invalid_experts else None
    starts, inverse = _sort(_experts(topk_ids, num_experts, early, num_experts), num_experts, block_size)
    rows = aligned_rows(topk_ids.size, num_experts, block_size, pad_sorted_ids)
    if out is None:
        out = np.empty(rows, np.int32), np.empty(-(-rows // block_size), np.int32), np.empty(1, np.int32)
    sorted_token_ids, expert_ids, end = out
    sorted_token_ids[:], expert_ids[:], end[:] = topk_ids.size, -1, starts[-1]
    there = inverse >= 0
    sorted_token_ids[inverse[there]] = np.flatnonzero(there)
    names = np.arange(num_experts) if expert_map is None or ignore_invalid_experts else expert_map
    blocks = np.repeat(names, np.diff(starts) // block_size)
    expert_ids[: len(blocks)] = blocks
    return out


def _by_token(inverse: Array, tokens: int) -> Array:
    return inverse.reshape(tokens, inverse.size // max(tokens, 1))


def permute_rows(hidden_states: Array, inverse: Array, rows: int | None = None, *, out: Array | None = None) -> Array:
    if out is None:
        out = np.zeros((inverse.size if rows is None else rows, hidden_states.shape[1]), hidden_states.dtype)
    for slot in _by_token(inverse, len(hidden_states)).T:
        there = (slot >= 0) & (slot < len(out))
        out[slot[there]] = hidden_states[there]
    return out


def permute_quantized(hidden_states: Array, inverse: Array, *, out_q: Array, out_s: Array) -> tuple[Array, Array]:
    q, scale = per_token_group_quant_fp8(hidden_states, 128)
    permute_rows(q.view(out_q.dtype), inverse, out=out_q)
    permute_rows(scale, inverse, out=out_s)
    return out_q, out_s


def moe_permute(
    hidden_states: Array,
    a1q_scale: Array | None,
    topk_ids: Array,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Array | None = None,
    align_block_size: int | None = None,
    fill_invalid_expert: int = -1,
    permuted_hidden_states: Array | None = None,
) -> tuple[Array, Array | None, Array, Array, Array | None]:
    local = n_expert if n_local_expert == -1 else n_local_expert
    block_size = 1 if align_block_size is None else align_block_size
    starts, inverse = _sort(_experts(topk_ids, n_expert, expert_map, local), local, block_size)
    rows = topk_ids.size
    m_indices = None
    if align_block_size is not None:
        rows = -(-(rows + n_expert * (block_size - 1)) // block_size) * block_size
        m_indices = np.full(rows, fill_invalid_expert, np.int32)
        m_indices[: starts[-1]] = np.repeat(np.arange(local), np.diff(starts))
    inverse = inverse.astype(np.int32)
    permuted = permute_rows(hidden_states, inverse, rows, out=permuted_hidden_states)
    if a1q_scale is not None and a1q_scale.ndim > 1:
        a1q_scale = permute_rows(a1q_scale, inverse, rows)
    return permuted, a1q_scale, starts.astype(np.int64), inverse, m_indices


def _sum_of_slots(rows: Array, weights: Array | None, inverse: Array, end: int) -> Array:
    tokens, topk = inverse.shape
    total = np.zeros((tokens, rows.shape[1]), np.float32)
    for slot in range(topk):
        there = (inverse[:, slot] >= 0) & (inverse[:, slot] < end)
        part = rows[inverse[there, slot]].astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            total[there] += part if weights is None else weights[there, slot, None] * part
    with np.errstate(over="ignore"):
        return total.astype(rows.dtype)


def moe_unpermute(
    out: Array,
    permuted_hidden_states: Array,
    topk_weights: Array | None,
    inv_permuted_idx: Array | None,
    expert_first_token_offset: Array | None = None,
) -> Array:
    end = len(permuted_hidden_states)
    if inv_permuted_idx is None:
        assert topk_weights is not None
        inv_permuted_idx = np.arange(topk_weights.size, dtype=np.int32).reshape(topk_weights.shape)
    if expert_first_token_offset is not None:
        end = min(end, int(expert_first_token_offset[-1]))
    out[...] = _sum_of_slots(permuted_hidden_states, topk_weights, _by_token(inv_permuted_idx, len(out)), end)
    return out


def moe_sum(input: Array, output: Array | None = None) -> Array:
    tokens, topk, hidden = input.shape
    pairs = np.arange(tokens * topk).reshape(tokens, topk)
    result = _sum_of_slots(input.reshape(tokens * topk, hidden), None, pairs, tokens * topk)
    if output is None:
        return result
    output[...] = result
    return output
