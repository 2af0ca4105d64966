"""Attention over a paged cache of latents, in NumPy.

`plan` splits the work evenly into parts. A part is the range of cache blocks that one thread block reads. It may span
several sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # These are the tolerances of FlashMLA's tests, for latents of magnitude 0.1. Softmax weights are rounded to the
    # query's dtype before the multiplication by values, and results are rounded again. The tests also limit the cosine
    # distance of all results.
    "out": dict.fromkeys(("float16", "bfloat16"), Tolerance(relative=2.01 / 128, absolute=8e-4)),
    # The softmax weights in the sum are not rounded. An lse near 0 has the absolute error of the largest score. A score
    # is a sum of 576 products, times 1 / 24, and the sums have magnitude 100. The tensor core adds 16 products at a
    # time, and drops the bits of a product below 2^-23 of the sum.
    "lse": {"float32": Tolerance(relative=1e-5, absolute=4e-5)},
}

Array = NDArray[Any]

#: The number of multiprocessors of an H200. Without a GPU, the work is split as for an H200.
MULTIPROCESSORS = 132
BLOCK_TOKENS = 64
#: The largest number of query rows per thread block.
ROWS = 64
#: The load of a sequence in a part is FIXED plus the number of its cache blocks in the part.
FIXED = 5

#: In an 8-bit cache of slots, a slot holds a token: LATENT_DIMS e4m3 elements, a float32 scale per SCALE_DIMS of them,
#: and ROTARY_DIMS bfloat16 elements, the rotary part of the key.
LATENT_DIMS, SCALE_DIMS, ROTARY_DIMS = 512, 128, 64
SLOT_BYTES = LATENT_DIMS + LATENT_DIMS // SCALE_DIMS * 4 + ROTARY_DIMS * 2
#: A paged 8-bit cache has PAGED_DIMS elements per token. A page first holds the one-byte elements and the bfloat16
#: rotary elements of all its tokens. Then it holds each token's scales and an unused byte. A scale is a power of two in
#: one byte, for PAGED_SCALE_DIMS elements.
PAGED_DIMS, PAGED_SCALE_DIMS = 512, 64
PAGED_LATENT_DIMS = PAGED_DIMS - ROTARY_DIMS
PAGED_NUMBER_BYTES = PAGED_LATENT_DIMS + ROTARY_DIMS * 2
PAGED_SLOT_BYTES = PAGED_NUMBER_BYTES + PAGED_LATENT_DIMS // PAGED_SCALE_DIMS + 1


def parts_of(rows: int, num_heads_k: int, multiprocessors: int) -> int:
    """Return the number of parts that fill a GPU. A part takes one thread block per kv head and ROWS query rows."""
    return max(1, multiprocessors // (num_heads_k * max(1, -(-rows // ROWS))))


class Part(NamedTuple):
    """The cache blocks from block `begin` of sequence `first` to the block before block `end` of sequence `last`."""

    first: int
    begin: int
    last: int
    end: int


def deal(blocks: Array, ends: Array, load: int) -> list[Part]:
    """Split sequences into parts whose load is at most `load`.

    Args:
        blocks: the number of cache blocks of each sequence.
        ends: cumulative sum of the sequences' loads.
    """
    parts = []
    sequence = done = 0
    while sequence < len(blocks):
        start = ends[sequence] - FIXED - (blocks[sequence] - done)
        whole = int(np.searchsorted(ends, start + load, side="right"))  # the first sequence that does not fully fit
        room = int(start + load - ends[whole - 1]) if whole > sequence else load
        if whole == len(blocks) or room <= FIXED:
            parts.append(Part(sequence, done, whole - 1, int(blocks[whole - 1])))
            sequence, done = whole, 0
        else:
            end = room - FIXED + (done if whole == sequence else 0)
            parts.append(Part(sequence, done, whole, end))
            sequence, done = whole, end
    return parts


def plan(blocks: Any, parts: int) -> tuple[Array, Array]:
    """Split sequences into parts. `blocks` is the number of cache blocks of each sequence.

    Return the metadata of the parts, and the cumulative sums of the number of parts of each sequence.
    """
    blocks = np.asarray(blocks, np.int64)
    count, ends = len(blocks), np.cumsum(blocks + FIXED)
    load = max(FIXED + 1, -(-int(blocks.sum() + FIXED * count) // parts))
    dealt = deal(blocks, ends, load)
    while len(dealt) > parts:
        load += 1
        dealt = deal(blocks, ends, load)
    metadata = np.zeros((parts, 8), np.int32)
    metadata[:, 0] = count
    changes = np.zeros(count + 1, np.int64)  # parts of sequence i minus parts of sequence i - 1
    earlier = 0
    for i, part in enumerate(dealt):
        # `earlier` counts the earlier parts that have blocks of sequence `part.first`.
        is_same = i > 0 and dealt[i - 1].first == part.first
        earlier = 0 if part.begin == 0 else earlier + 1 if is_same else 1
        metadata[i, :5] = *part, earlier
        changes[part.first] += 1
        changes[part.last + 1] -= 1
    visits = np.cumsum(changes[:-1])
    return metadata, np.concatenate([[0], np.cumsum(visits)]).astype(np.int32)


def get_mla_metadata(
    cache_seqlens: Array,
    num_heads_per_head_k: int,
    num_heads_k: int,
    *,
    num_heads_q: int | None = None,
    topk: int | None = None,
    topk_length: Array | None = None,
    extra_topk: int = 0,
    extra_topk_length: Array | None = None,
) -> tuple[Array, Array]:
    lengths, rows = cache_seqlens.astype(np.int64), num_heads_per_head_k
    if topk is not None:
        assert num_heads_q is not None
        query_tokens = num_heads_per_head_k * num_heads_k // num_heads_q
        counts = counted(topk_length, topk, len(lengths)) + counted(extra_topk_length, extra_topk, len(lengths))
        lengths, rows = np.repeat(counts, query_tokens), num_heads_q // num_heads_k
    return plan(-(-np.maximum(lengths, 0) // BLOCK_TOKENS), parts_of(rows, num_heads_k, MULTIPROCESSORS))


def counted(topk_length: Array | None, topk: int, batch: int) -> Array:
    """Return how many of the `topk` indices of each sequence are valid, int64 [batch]."""
    return np.full(batch, topk) if topk_length is None else np.clip(topk_length.astype(np.int64), 0, topk)


def dequantize(slots: Array, dtype: Any) -> Array:
    """Dequantize slots [..., 656] to float64 [..., 576]. Rotary elements are rounded to `dtype` first."""
    slots = np.ascontiguousarray(slots).view(np.uint8)
    scales_end = SLOT_BYTES - ROTARY_DIMS * 2
    latent = slots[..., :LATENT_DIMS].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = np.ascontiguousarray(slots[..., LATENT_DIMS:scales_end]).view(np.float32).astype(np.float64)
    rotary = np.ascontiguousarray(slots[..., scales_end:]).view(ml_dtypes.bfloat16).astype(np.float32).astype(dtype)
    return np.concatenate([latent * np.repeat(scales, SCALE_DIMS, -1), rotary.astype(np.float64)], -1)


def dequantize_paged(pages: Array, dtype: Any) -> Array:
    """Dequantize pages [pages, page_size, 1, 584] to [pages, page_size, 1, 512], like `dequantize`."""
    count, page_size = pages.shape[:2]
    flat = np.ascontiguousarray(pages).view(np.uint8).reshape(count, page_size * PAGED_SLOT_BYTES)
    numbers, exponents = np.split(flat, [page_size * PAGED_NUMBER_BYTES], -1)
    numbers = numbers.reshape(count, page_size, PAGED_NUMBER_BYTES)
    exponents = exponents.reshape(count, page_size, PAGED_SLOT_BYTES - PAGED_NUMBER_BYTES)[..., :-1]
    latent = numbers[..., :PAGED_LATENT_DIMS].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = exponents.copy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    rotary = numbers[..., PAGED_LATENT_DIMS:].copy().view(ml_dtypes.bfloat16).astype(np.float32).astype(dtype)
    latent *= np.repeat(scales, PAGED_SCALE_DIMS, -1)
    return np.concatenate([latent, rotary.astype(np.float64)], -1)[:, :, None]


def _tokens(cache: Array, slots: Array, dtype: Any, is_fp8: bool) -> Array:
    """Return the latents in cache slots, float64 [slots, kv_heads, head_dim]."""
    page_size = cache.shape[1]
    if is_fp8 and cache.shape[3] == PAGED_SLOT_BYTES:
        used, which = np.unique(slots // page_size, return_inverse=True)
        return dequantize_paged(cache[used], dtype)[which, slots % page_size]
    latents = cache[slots // page_size, slots % page_size]
    return dequantize(latents, dtype) if is_fp8 else latents.astype(np.float64)


def _listed_slots(indices: Array, topk_length: Array | None, at: tuple[int, int], cache: Array) -> Array | None:
    """Return the cache slots that `indices` lists for query token `at`, or None if one is outside the cache."""
    count = counted(topk_length, indices.shape[2], len(indices))[at[0]]
    listed = indices[at][:count].astype(np.int64)
    listed = listed[listed >= 0]
    return None if (listed >= cache.shape[0] * cache.shape[1]).any() else listed


def _slots(
    query_tokens: int,
    pages: int,
    page_size: int,
    block_table: Array | None,
    cache_seqlens: Array | None,
    causal: bool,
) -> Iterator[tuple[tuple[int, int], Array | None]]:
    """Yield each query token with its slots, or with None if a slot is outside the cache."""
    assert block_table is not None and cache_seqlens is not None
    for s, length in enumerate(cache_seqlens.tolist()):
        length = max(length, 0)
        ids = block_table[s, : -(-length // page_size)].astype(np.int64)
        is_whole = length <= block_table.shape[1] * page_size and ((ids >= 0) & (ids < pages)).all()
        slots = (ids[:, None] * page_size + np.arange(page_size)).ravel() if is_whole else None
        for i in range(query_tokens):
            seen = max(length - query_tokens + 1 + i, 0) if causal else length
            yield (s, i), None if slots is None else slots[:seen]


def flash_mla_with_kvcache(
    q: Array,
    k_cache: Array,
    block_table: Array | None,
    cache_seqlens: Array | None,
    head_dim_v: int,
    tile_scheduler_metadata: Array | None,
    num_splits: Array | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    is_fp8_kvcache: bool = False,
    indices: Array | None = None,
    attn_sink: Array | None = None,
    extra_k_cache: Array | None = None,
    extra_indices_in_kvcache: Array | None = None,
    topk_length: Array | None = None,
    extra_topk_length: Array | None = None,
) -> tuple[Array, Array]:

    def seen() -> Iterator[tuple[tuple[int, int], Array | None]]:
        """Yield each query token with its latents, or with None if a slot is outside the cache."""
        if indices is None:
            found = _slots(query_tokens, pages, page_size, block_table, cache_seqlens, causal)
            for at, slots in found:
                yield at, None if slots is None else _tokens(k_cache, slots, q.dtype, is_fp8_kvcache)
            return
        for at in np.ndindex(indices.shape[:2]):
            both = [(k_cache, _listed_slots(indices, topk_length, at, k_cache))]
            if extra_k_cache is not None and extra_indices_in_kvcache is not None:
                listed = _listed_slots(extra_indices_in_kvcache, extra_topk_length, at, extra_k_cache)
                both.append((extra_k_cache, listed))
            tokens = [_tokens(cache, slots, q.dtype, is_fp8_kvcache) for cache, slots in both if slots is not None]
            yield at, np.concatenate(tokens) if len(tokens) == len(both) else None

    batch, query_tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((batch, query_tokens, heads, head_dim_v), q.dtype)
    lse = np.full((batch, heads, query_tokens), np.inf, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for (s, i), latents in seen():
            if latents is None:
                out[s, i], lse[s, :, i] = np.nan, np.nan
                continue
            for k in range(kv_heads):
                own, its = latents[:, k], np.arange(k * group, (k + 1) * group)
                scores = scale * (q[s, i, its].astype(np.float64) @ own.T)
                largest = scores.max(1, initial=-np.inf)
                some = largest != -np.inf  # heads with a score above -inf
                probabilities = np.exp(scores[some] - largest[some, None])
                totals = probabilities.sum(1)
                attended = probabilities @ own[:, :head_dim_v] / totals[:, None]
                of_rows = largest[some] + np.log(totals)
                if attn_sink is not None:
                    sinks = attn_sink[its[some]].astype(np.float64)
                    attended = attended / (1 + np.exp(sinks - of_rows))[:, None]
                out[s, i, its[some]], lse[s, its[some], i] = attended, of_rows
    return out, lse
