"""Attention over a paged KV cache, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.formats.quantized import number_of
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # Softmax weights are rounded to 16 bits before the multiplication by values. That changes a result by up to half a
    # unit in the last place of the largest value. The largest value in the tests is 1. In float32 the error comes from
    # the scores.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-11),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-8),
    },
    # The softmax weights in the sum are not rounded. The error comes from exp2 and from the scores, which are float32
    # sums of head_dim products. The tolerance detects a single missing token among a few thousand.
    "lse": {"float32": Tolerance(relative=2e-6, absolute=3e-5)},
    # A term is exp(score - largest score), so the error of the largest score counts twice.
    "exp_sums": {"float32": Tolerance(relative=6e-5, absolute=0)},
    # A result is a float32 sum of two terms, rounded once. Nearly equal terms of opposite sign cancel.
    "merged": {
        "float32": Tolerance(relative=2e-6, absolute=2e-6),
        "float16": Tolerance(relative=2**-10, absolute=2e-6),
        "bfloat16": Tolerance(relative=2**-7, absolute=2e-6),
    },
}

Array = NDArray[Any]

#: Tokens per partition of `paged_attention_v2`.
PARTITION = 512


class _Row(NamedTuple):
    """The tokens that one head of a query token attends to, in float64."""

    at: tuple[int, int, int]  # sequence, query token, head
    tokens: Array  # [seen], positions
    scores: Array  # [seen]
    values: Array  # [seen, head_dim]


def _tokens(cache: Array, ids: Array, layout: str, kv_cache_dtype: str) -> Array:
    """Return the keys or values in cache blocks, float64 [kv_heads, slots, head_dim]."""
    if cache.dtype == np.uint8:
        cache = cache.view(ml_dtypes.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else ml_dtypes.float8_e4m3fn)
    blocks = cache[ids].astype(np.float64)
    if layout == "flash":
        blocks = blocks.transpose(2, 0, 1, 3)
    elif blocks.ndim == 5:
        blocks = blocks.transpose(1, 0, 3, 2, 4)
    else:
        blocks = blocks.transpose(1, 0, 3, 2)
    kv_heads, count, block_size = blocks.shape[:3]
    return blocks.reshape(kv_heads, count * block_size, -1)


def _rows(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    layout: str,
    scale: float,
    alibi_slopes: Array | None,
    window: int | None,
    softcap: float | None,
    kv_cache_dtype: str,
    is_seen: Callable[[int, int, Array], Array] | None = None,
) -> Iterator[_Row | int]:
    """Yield a `_Row` for each sequence, query token and head of query [seqs, query_tokens, heads, head_dim].

    Skip sequences without tokens. If a sequence has a block outside the cache, or more tokens than its block table
    holds, yield only its index. `is_seen(length, head, tokens)` selects the tokens that a head attends to.
    """
    _, query_tokens, heads, _ = query.shape
    blocks, block_size = len(key_cache), key_cache.shape[3 if layout == "vllm" else 1]
    kv_heads = key_cache.shape[1 if layout == "vllm" else 2]
    for s, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        positions = range(length - query_tokens, length)
        first = 0 if window is None else max(0, max(0, positions[0]) - window + 1)
        ids = block_tables[s, first // block_size : -(-length // block_size)]
        if length > block_tables.shape[1] * block_size or ((ids < 0) | (ids >= blocks)).any():
            yield s
            continue
        keys = _tokens(key_cache, ids, layout, kv_cache_dtype)[:, first % block_size :]
        values = _tokens(value_cache, ids, layout, kv_cache_dtype)[:, first % block_size :]
        for i, position in enumerate(positions):
            low = first if window is None else max(first, position - window + 1)
            for h in range(heads):
                tokens = np.arange(low, position + 1)
                if is_seen is not None:
                    tokens = tokens[is_seen(length, h, tokens)]
                kv_head = h // (heads // kv_heads)
                # A query token before the sequence's start attends to nothing.
                whole = slice(low - first, low - first + len(tokens))
                seen = whole if is_seen is None else tokens - first
                scores = scale * (keys[kv_head, seen] @ query[s, i, h].astype(np.float64))
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi_slopes is not None:
                    scores = scores + float(alibi_slopes[h]) * (tokens - position)
                yield _Row((s, i, h), tokens, scores, values[kv_head, seen])


def _softmax(scores: Array, values: Array) -> tuple[Array, float, float]:
    """Return the weighted mean of the values, the largest score, and the sum of exp(score - largest score).

    Without a finite score the results are 0, -inf and 0.
    """
    largest = scores.max(initial=-np.inf)
    weights = np.exp(scores - (0 if largest == -np.inf else largest))
    total = weights.sum()
    return weights @ values / (1 if total == 0 else total), largest, total


def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    layout: str = "vllm",
    scale: float | None = None,
    alibi_slopes: Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_cache_dtype: str = "auto",
    return_lse: bool = False,
    split: int | None = None,
) -> Any:
    """Ignore `split`, which only affects the order of a kernel's sums."""
    rows = query[:, None] if query.ndim == 3 else query
    if scale is None:
        scale = query.shape[-1] ** -0.5
    out = np.zeros(rows.shape, query.dtype)
    lse = np.full(rows.shape[:3], -np.inf, np.float32)
    if sinks is not None:
        lse[...] = sinks
    options = layout, scale * number_of(k_scale), alibi_slopes, window, softcap, kv_cache_dtype
    with np.errstate(invalid="ignore", over="ignore"):
        for row in _rows(rows, key_cache, value_cache, block_tables, seq_lens, *options):
            if isinstance(row, int):
                out[row], lse[row] = np.nan, np.nan
                continue
            attended, largest, total = _softmax(row.scores, row.values)
            if total == 0:
                continue
            of_row = largest + np.log(total)
            if sinks is not None:
                joint = np.logaddexp(of_row, float(sinks[row.at[2]]))
                attended, of_row = attended * np.exp(of_row - joint), joint
            out[row.at], lse[row.at] = number_of(v_scale) * attended, of_row
    out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out


def _block_sparse(
    heads: int,
    kv_heads: int,
    tp_rank: int,
    local_blocks: int,
    vert_stride: int,
    block_size: int,
    head_sliding_step: int,
) -> Callable[[int, int, Array], Array] | None:
    """Return vLLM's block-sparse selection of the tokens that a head attends to, or None if it selects all."""
    if vert_stride <= 1:
        return None

    def is_seen(length: int, head: int, tokens: Array) -> Array:
        if head_sliding_step >= 0:
            offset = (tp_rank * heads + head) * head_sliding_step + 1
        else:
            offset = (tp_rank * kv_heads + head // (heads // kv_heads)) * -head_sliding_step + 1
        block = tokens // block_size
        return ((block + offset) % vert_stride == 0) | (block > (length - 1) // block_size - local_blocks)

    return is_seen


def paged_attention_v1(
    out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attend from the last token of each sequence."""
    sparse = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step
    is_seen = _block_sparse(query.shape[1], num_kv_heads, tp_rank, *sparse)
    options = "vllm", scale * number_of(k_scale), alibi_slopes, None, None, kv_cache_dtype, is_seen
    out[...] = 0
    with np.errstate(invalid="ignore", over="ignore"):
        for row in _rows(query[:, None], key_cache, value_cache, block_tables, seq_lens, *options):
            if isinstance(row, int):
                out[row] = np.nan
                continue
            s, _, h = row.at
            out[s, h] = number_of(v_scale) * _softmax(row.scores, row.values)[0]


def paged_attention_v2(
    out: Array,
    exp_sums: Array,
    max_logits: Array,
    tmp_out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Run `paged_attention_v1`, and write each partition's softmax state and output.

    The partitions of sequences with NaN results are not written.
    """
    sparse = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step
    shared = query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len
    paged_attention_v1(out, *shared, alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank, *sparse)
    is_seen = _block_sparse(query.shape[1], num_kv_heads, tp_rank, *sparse)
    options = "vllm", scale * number_of(k_scale), alibi_slopes, None, None, kv_cache_dtype, is_seen
    with np.errstate(invalid="ignore", over="ignore"):
        for row in _rows(query[:, None], key_cache, value_cache, block_tables, seq_lens, *options):
            if isinstance(row, int):
                continue
            s, _, h = row.at
            for j in range(-(-int(seq_lens[s]) // PARTITION)):
                part = row.tokens // PARTITION == j
                attended, max_logits[s, h, j], exp_sums[s, h, j] = _softmax(row.scores[part], row.values[part])
                tmp_out[s, h, j] = number_of(v_scale) * attended


def merge_attention_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, lse_heads_first: bool = False
) -> tuple[Array, Array]:
    """Combine the attention results for two sets of keys into the result for their union."""
    if lse_heads_first:
        merged, lse = merge_attention_states(out_a, lse_a.swapaxes(-1, -2), out_b, lse_b.swapaxes(-1, -2))
        return merged, np.ascontiguousarray(lse.swapaxes(-1, -2))
    # An lse of -inf or inf means an empty set of keys.
    a, b = (np.where(np.isinf(x), -np.inf, x.astype(np.float64)) for x in (lse_a, lse_b))
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = np.maximum(a, b)
        weight_a = np.where(a == -np.inf, 0, np.exp(a - largest))
        weight_b = np.where(b == -np.inf, 0, np.exp(b - largest))
        total = weight_a + weight_b
        lse = np.where(total == 0, -np.inf, largest + np.log(total)).astype(np.float32)
        # An empty set's result may be NaN.
        sum_a = np.where(a[..., None] == -np.inf, 0, weight_a[..., None] * out_a.astype(np.float64))
        sum_b = np.where(b[..., None] == -np.inf, 0, weight_b[..., None] * out_b.astype(np.float64))
        merged = ((sum_a + sum_b) / np.where(total == 0, 1, total)[..., None]).astype(out_a.dtype)
    return merged, lse
