"""Multi-head latent attention (MLA) for decoding: the last tokens of each sequence attend over a paged latent cache."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, overload

from cukern.ops.mla_decode.choose import (
    MAX_DIM,
    VARIANTS,
    Counts,
    Work,
    launch_attention,
    launch_plan,
    no_wgmma,
    takes_wgmma,
    why_attend,
    why_parts,
)
from cukern.ops.mla_decode.first_call import FlashMLASchedMeta, attend_by_a_plan, plan_of_the_first_call
from cukern.reference import mla_decode as twin
from cukern.runtime import check, gpu
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    expect_table,
)
from cukern.runtime.op import op
from cukern.runtime.plan import empty, outputs, run_twin

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

DTYPES = ("bfloat16", "float16")
#: The dtypes of 8-bit caches. The kernels read the elements as bytes.
FP8_DTYPES = ("uint8", "int8", "float8_e4m3fn")
MAX_PAGE_SIZE = 2**16
#: The limit for rows, sequences and slots. It is below 2^31, because kernels round 32-bit indices up to whole tiles.
MAX_COUNT = 2**31 - 2**12
MAX_GRID = 2**16 - 1  # blocks along y or z
_LARGEST_SCALE = 1e30


# --- checks -------------------------------------------------------------------------------------------


def _strides(name: str, array: Array) -> tuple[int, ...]:
    """Return the strides except the last, in elements; 0 for a dimension of size 1."""
    if array.strides[-1] != 1 and 0 not in array.shape:
        check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")
    return tuple(stride if size > 1 else 0 for size, stride in zip(array.shape[:-1], array.strides, strict=False))


def _check_alignment(name: str, array: Array, strides: tuple[int, ...] = ()) -> None:
    if array.alignment < 16 or any(stride * array.item_size % 16 for stride in strides):
        wanted, got = "at a multiple of 16 bytes", f"address at a multiple of {array.alignment}"
        if strides:
            wanted, got = f"{wanted}, and so its strides", f"{got} and strides {strides} (in elements)"
        check.fail(name, wanted, got)


def _check_head(q: Array, head_dim_v: int, is_fp8: bool, is_sparse: bool) -> None:
    head_dim = q.shape[3]
    if head_dim % 16 or not 16 <= head_dim <= MAX_DIM:
        check.fail("q", f"of a head_dim that is a multiple of 16 in [16, {MAX_DIM}]", head_dim)
    if is_fp8 and head_dim not in (MAX_DIM, twin.PAGED_DIMS):
        check.fail("q", f"of a head_dim of {MAX_DIM} or {twin.PAGED_DIMS} with is_fp8_kvcache", head_dim)
    if is_fp8 and head_dim_v != twin.LATENT_DIMS:
        check.fail("head_dim_v", f"{twin.LATENT_DIMS} with is_fp8_kvcache", head_dim_v)
    if head_dim_v % 16 or not 16 <= head_dim_v <= head_dim:
        check.fail("head_dim_v", f"a multiple of 16 in [16, {head_dim}] (head_dim of q)", head_dim_v)
    if is_fp8 and head_dim == twin.PAGED_DIMS and not is_sparse:
        check.fail("indices", f"given with is_fp8_kvcache and a head_dim of {twin.PAGED_DIMS}", None)


def _check_pages(name: str, cache: Array, q: Array, is_fp8: bool, is_sparse: bool) -> tuple[int, ...]:
    """Check a cache, and return its strides."""
    check.dtype(name, cache.dtype, FP8_DTYPES if is_fp8 else (q.dtype,))
    symbols = "pages", "page_size", "kv_heads", "slot_bytes" if is_fp8 else "head_dim"
    check.dimensions(name, cache.shape, symbols)
    (pages, page_size, kv_heads, _), head_dim = cache.shape, q.shape[3]
    is_paged = is_fp8 and head_dim == twin.PAGED_DIMS
    slot_bytes = twin.PAGED_SLOT_BYTES if is_paged else twin.SLOT_BYTES
    wanted = (pages, page_size, kv_heads, slot_bytes if is_fp8 else head_dim)
    check.shape(name, cache.shape, wanted, f"[{', '.join(symbols)}]")
    if is_sparse:
        if not 1 <= page_size <= MAX_COUNT:
            check.fail(name, f"of pages of at least one and at most {MAX_COUNT} tokens", page_size)
    elif page_size % 16 or not 16 <= page_size <= MAX_PAGE_SIZE:
        check.fail(name, f"of pages of a multiple of 16 tokens, at most {MAX_PAGE_SIZE}, without indices", page_size)
    if not 1 <= kv_heads <= MAX_GRID:
        check.fail(name, f"of at least one and at most {MAX_GRID} kv heads", kv_heads)
    if pages > MAX_COUNT:
        check.fail(name, f"of at most {MAX_COUNT} pages", pages)
    strides = _strides(name, cache)
    if is_paged and kv_heads > 1:
        check.fail(name, f"of one kv head with slots of {slot_bytes} bytes", kv_heads)
    if is_paged and page_size > 1 and strides[1] != slot_bytes:
        check.fail(name, "contiguous within a page", f"strides {cache.strides} (in elements)")
    return strides


def _check_cache(q: Array, k_cache: Array, head_dim_v: int, is_fp8: bool, is_sparse: bool) -> tuple[int, ...]:
    """Check k_cache, and return its strides."""
    batch, query_tokens, heads, _ = q.shape
    check.dtype("k_cache", k_cache.dtype, FP8_DTYPES if is_fp8 else (q.dtype,))
    _check_head(q, head_dim_v, is_fp8, is_sparse)
    strides = _check_pages("k_cache", k_cache, q, is_fp8, is_sparse)
    kv_heads = k_cache.shape[2]
    if heads < 1 or heads % kv_heads:
        check.fail("q", f"of a multiple of {kv_heads} heads (kv_heads of k_cache), and at least one", heads)
    if batch * query_tokens * heads > MAX_COUNT:
        check.fail("q", f"of at most {MAX_COUNT} rows in all", list(q.shape))
    return strides


def _check_indices(name: str, indices: Any, q: Array) -> int:
    """Return topk."""
    expect_place(name, indices, q, "q")
    check.dtype(name, indices.dtype, ("int32",))
    check.dimensions(name, indices.shape, ("batch", "query_tokens", "topk"))
    topk = indices.shape[2]
    if topk > MAX_COUNT:
        check.fail(name, f"of at most {MAX_COUNT} slots for each query token", topk)
    check.shape(name, indices.shape, (*q.shape[:2], topk), "[batch, query_tokens, topk]")
    return topk


class _Extra(NamedTuple):
    cache: Array
    strides: tuple[int, ...]
    indices: Array
    indices_strides: tuple[int, ...]


def _check_alignments(
    q: Array, q_strides: tuple[int, ...], cache: Array, strides: tuple[int, ...], extra: _Extra | None, is_paged: bool
) -> None:
    aligned = slice(0, 1 if is_paged else 3)  # pages with slots of 584 bytes are contiguous
    _check_alignment("q", q, q_strides)
    _check_alignment("k_cache", cache, strides[aligned])
    if extra is not None:
        _check_alignment("extra_k_cache", extra.cache, extra.strides[aligned])


class _Tokens(NamedTuple):
    block_table: Array | None  # None with indices
    lengths: Array | None
    indices: Array | None
    max_pages: int
    table_stride: int
    counts: Counts
    indices_strides: tuple[int, ...]
    extra: _Extra | None = None


def _check_extra(cache: Any, indices: Any, length: Any, q: Array, k_cache: Array, is_fp8: bool) -> _Extra | None:
    if cache is None:
        for name, array in (("extra_indices_in_kvcache", indices), ("extra_topk_length", length)):
            if array is not None:
                check.fail("extra_k_cache", f"given with {name}", None)
        return None
    if indices is None:
        check.fail("extra_indices_in_kvcache", "given with extra_k_cache", None, TypeError)
    expect_place("extra_k_cache", cache, q, "q")
    strides = _check_pages("extra_k_cache", cache, q, is_fp8, True)
    if cache.shape[2] != k_cache.shape[2]:
        check.fail("extra_k_cache", f"of {k_cache.shape[2]} kv heads like k_cache", cache.shape[2])
    _check_indices("extra_indices_in_kvcache", indices, q)
    return _Extra(cache, strides, indices, _strides("extra_indices_in_kvcache", indices))


def _check_sparse(
    q: Array, k_cache: Array, is_fp8: bool, indices: Any, topk_length: Any, extra: tuple[Any, Any, Any]
) -> _Tokens | None:
    """Check topk_length and the second cache, which are only valid with indices."""
    named = {"topk_length": topk_length, "extra_k_cache": extra[0]}
    named |= {"extra_indices_in_kvcache": extra[1], "extra_topk_length": extra[2]}
    if indices is None:
        for name, array in named.items():
            if array is not None:
                check.fail("indices", f"given with {name}", None)
        return None
    topk = _check_indices("indices", indices, q)
    strides = _strides("indices", indices)
    second = _check_extra(*extra, q, k_cache, is_fp8)
    for name in ("topk_length", "extra_topk_length"):
        if named[name] is not None:
            expect(name, named[name], q, "q", ("int32",), (q.shape[0],), "[batch]")
    extra_topk = 0 if second is None else second.indices.shape[2]
    if topk + extra_topk > MAX_COUNT:
        check.fail("extra_indices_in_kvcache", f"of at most {MAX_COUNT - topk} slots for each query token", extra_topk)
    counts = Counts(q.shape[1], topk, topk_length, extra_topk, extra[2])
    return _Tokens(None, None, indices, 0, 0, counts, strides, second)


def _check_tokens(
    block_table: Any, cache_seqlens: Any, sparse: _Tokens | None, causal: bool, q: Array, pages: int
) -> _Tokens:
    """`sparse`: result of `_check_sparse`."""
    if sparse is not None:
        if causal:
            check.fail("causal", "False with indices", True)
        return sparse
    for name, array in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if array is None:
            check.fail(name, "an array, unless there are indices", None, TypeError)
    batch = q.shape[0]
    max_pages, stride = expect_table("block_table", block_table, q, "q", batch, ("batch", "max_pages"))
    expect("cache_seqlens", cache_seqlens, q, "q", ("int32",), (batch,), "[batch]")
    # A cache without pages holds no tokens.
    return _Tokens(block_table, cache_seqlens, None, max_pages if pages else 0, stride, Counts(1, 0), (0, 0))


def _check_scale(softmax_scale: Any, head_dim: int) -> float:
    scale = head_dim**-0.5 if softmax_scale is None else check.number("softmax_scale", softmax_scale)
    if abs(scale) > _LARGEST_SCALE:
        check.fail("softmax_scale", f"of at most {_LARGEST_SCALE:g}", scale)
    return scale


def _check_plan(metadata: Any, num_splits: Any, sequences: int, q: Array) -> int:
    """Return the number of parts of the caller's plan."""
    if metadata is None or num_splits is None:
        given, missing = ("num_splits", "tile_scheduler_metadata")[:: 1 if metadata is None else -1]
        check.fail(missing, f"given, like {given} (or neither)", None, TypeError)
    expect_place("tile_scheduler_metadata", metadata, q, "q")
    parts = metadata.shape[0] if len(metadata.shape) == 2 else 0
    expect("tile_scheduler_metadata", metadata, q, "q", ("int32",), (parts, 8), "[parts, 8]")
    _check_alignment("tile_scheduler_metadata", metadata)
    if not 1 <= parts <= MAX_GRID:
        check.fail("tile_scheduler_metadata", f"of 1 to {MAX_GRID} parts", parts)
    expect("num_splits", num_splits, q, "q", ("int32",), (sequences + 1,), "[sequences + 1]")
    return parts


def _result_arrays(out: Any, q: Array, results: list[Result]) -> tuple[Array, Array]:
    """Return the arrays for out and lse. `out` may be a pair, or the array for out alone."""
    is_single = not (out is None or isinstance(out, (tuple, list)))
    if is_single:
        out = expect("out", out, q, "q", (q.dtype,), results[0].shape, results[0].symbols), None
    elif out is not None and len(out) != 2:
        check.fail("out", "an array, or a pair (out, lse)", f"{len(out)} of them")
    attended, lse = outputs(out, q, "q", *results)
    _check_alignment("out" if is_single else "out[0]", attended)
    return attended, lse


# --- the functions -----------------------------------------------------------------------------------


def _multiprocessors(array: Any) -> int:
    """Return the multiprocessors of an array's GPU; for host memory, the NumPy reference's default."""
    if isinstance(array, Array):
        return twin.MULTIPROCESSORS if array.on_host else array.gpu.multiprocessors
    return gpu.of_device(array.get_device()).multiprocessors if array.is_cuda else twin.MULTIPROCESSORS


def _plan_results(
    cache_seqlens: Any,
    num_heads_per_head_k: int,
    num_heads_k: int,
    *,
    num_heads_q: Any = None,
    topk: Any = None,
    **_: Any,
) -> list[Result]:
    sequences, rows = cache_seqlens.shape[0], num_heads_per_head_k
    if topk is not None and num_heads_q is not None:
        sequences, rows = sequences * (rows * num_heads_k // num_heads_q), num_heads_q // num_heads_k
    parts = twin.parts_of(rows, num_heads_k, _multiprocessors(cache_seqlens))
    return [Result((parts, 8), "int32", "[parts, 8]"), Result((sequences + 1,), "int32", "[sequences + 1]")]


@overload
def get_mla_metadata() -> tuple[FlashMLASchedMeta, None]: ...
@overload
def get_mla_metadata(
    cache_seqlens: AnyArray, num_heads_per_head_k: int, num_heads_k: int, *, num_heads_q: int | None = ..., topk: int
    | None = ..., topk_length: AnyArray | None = ..., extra_topk: int = ..., extra_topk_length: AnyArray | None = ...,
    out: tuple[AnyArray, AnyArray] | None = ...
) -> tuple[AnyArray, AnyArray]: ...  # fmt: skip
@op(  # type: ignore[misc]  # `instead` takes the call without arguments
    twin.get_mla_metadata, "tile_scheduler_metadata, num_splits", _plan_results, instead=plan_of_the_first_call
)
def get_mla_metadata(
    cache_seqlens: AnyArray,
    num_heads_per_head_k: int,
    num_heads_k: int,
    *,
    num_heads_q: int | None = None,
    topk: int | None = None,
    topk_length: AnyArray | None = None,
    extra_topk: int = 0,
    extra_topk_length: AnyArray | None = None,
    out: tuple[AnyArray, AnyArray] | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Divide the tokens of all sequences among the multiprocessors, for `flash_mla_with_kvcache`.

    A part is the work of one thread block, for one kv head and up to 64 query rows: consecutive blocks of 64 tokens,
    which may continue from one sequence into the next. A split is the range of a sequence's tokens in one part, and
    costs the part 5 additional token blocks. The plan fills the parts in order, up to the smallest cost limit with
    which all tokens fit. A sequence without tokens has one split, because its result must be written.

    A kernel makes the plan asynchronously. If a CUDA graph has captured the call, each replay makes the plan again,
    from the current lengths. One plan serves all layers of a decoding step.

    Without arguments the function returns (FlashMLASchedMeta(), None). Pass this placeholder to
    `flash_mla_with_kvcache` as tile_scheduler_metadata, with num_splits None. The first such call makes the plan. Later
    calls use it, and raise an error if their sizes differ. Their lengths are not compared: with other lengths the plan
    leaves tokens out. torch.compile cannot put the placeholder into a graph.

    Args:
        cache_seqlens: int32 [batch], tokens in the cache; negative numbers count as 0.
        num_heads_per_head_k: query rows that share a kv head: query tokens * query heads // kv heads.
        num_heads_k: kv heads.
        num_heads_q: query heads; needed with `topk`.
        topk: slots per query token, for calls with `indices`. Each query token is then a sequence of topk tokens, and
            only the size of cache_seqlens matters.
        topk_length: int32 [batch], with `topk`: the number of valid indices, as in `flash_mla_with_kvcache`.
        extra_topk: with `topk`: the number of indices of a second cache.
        extra_topk_length: like topk_length, for the second cache.
        out: a pair of arrays like the results to write into.

    Returns:
        tile_scheduler_metadata, int32 [parts, 8], with parts = max(1, multiprocessors // (num_heads_k *
        ceil(num_heads_per_head_k / 64))), and num_splits, int32 [sequences + 1]: the number of splits of all earlier
        sequences. A row of the metadata has 8 numbers: the first sequence (the number of sequences if the part has no
        work), its first token block, the last sequence, its end token block, the number of earlier parts with tokens of
        the first sequence, and three zeros. For arrays in host memory the plan is for 132 multiprocessors.

    Raises:
        TypeError: a value that is not an array, or has the wrong dtype or library.
        ValueError: sizes that do not fit each other.

    The function and its results are FlashMLA's (DeepSeek, 2025). The call without arguments is from FlashMLA's later
    releases. FlashMLA computes the cost limit differently, and limits the batch size.
    """
    expect_array("cache_seqlens", cache_seqlens, ("int32",), ("batch",))
    expect_contiguous("cache_seqlens", cache_seqlens)
    num_heads_per_head_k = check.integer("num_heads_per_head_k", num_heads_per_head_k, 0, MAX_COUNT)
    num_heads_k = check.integer("num_heads_k", num_heads_k, 1, MAX_GRID)
    query_tokens, heads = 1, num_heads_per_head_k * num_heads_k
    topk = None if topk is None else check.integer("topk", topk, 0, MAX_COUNT)
    if num_heads_q is not None:
        num_heads_q = check.integer("num_heads_q", num_heads_q, 1, MAX_COUNT)
        if num_heads_q % num_heads_k:
            check.fail("num_heads_q", f"a multiple of num_heads_k ({num_heads_k})", num_heads_q)
        if heads % num_heads_q:
            check.fail("num_heads_q", f"a divisor of num_heads_per_head_k * num_heads_k ({heads})", num_heads_q)
        query_tokens = heads // num_heads_q
    elif topk is not None:
        check.fail("num_heads_q", "given with topk", None)
    counts = _check_counts(cache_seqlens, query_tokens, topk, topk_length, extra_topk, extra_topk_length)
    sequences = cache_seqlens.shape[0] * query_tokens
    if sequences > MAX_COUNT:
        check.fail("cache_seqlens", f"of at most {MAX_COUNT} sequences", sequences)
    results = _plan_results(cache_seqlens, num_heads_per_head_k, num_heads_k, num_heads_q=num_heads_q, topk=topk)
    made = outputs(out, cache_seqlens, "cache_seqlens", *results, names="a pair (tile_scheduler_metadata, num_splits)")
    if cache_seqlens.on_host:
        return run_twin()
    launch_plan(cache_seqlens if topk is None else None, made[0], made[1], counts)
    return made


def _check_counts(lengths: Array, query_tokens: int, topk: Any, length: Any, extra: Any, extra_length: Any) -> Counts:
    extra = check.integer("extra_topk", extra, 0, MAX_COUNT - (topk or 0))
    for name, array in (("topk_length", length), ("extra_topk_length", extra_length)):
        if array is not None:
            if topk is None:
                check.fail(name, "None without topk", "an array")
            expect(name, array, lengths, "cache_seqlens", ("int32",), lengths.shape, "[batch]")
    if extra and topk is None:
        check.fail("extra_topk", "0 without topk", extra)
    return Counts(query_tokens, topk or 0, length, extra, extra_length)


def _attention_results(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, *_: Any, **__: Any
) -> list[Result]:
    batch, query_tokens, heads, _ = q.shape
    attended = batch, query_tokens, heads, head_dim_v
    lse = Result((batch, heads, query_tokens), "float32", "[batch, heads, query_tokens]")
    return [Result(attended, dtype_name(q), "[batch, query_tokens, heads, head_dim_v]"), lse]


def _work(
    q: Array, k_cache: Array, head_dim_v: int, is_fp8: bool, tokens: _Tokens, metadata: Any, num_splits: Any
) -> Work:
    """Describe a call. The number of parts is from the caller's plan. Without a plan the parts occupy the whole GPU."""
    batch, query_tokens, heads, head_dim = q.shape
    kv_heads, is_sparse = k_cache.shape[2], tokens.indices is not None
    rows, sequences = heads // kv_heads * query_tokens, batch
    if is_sparse:
        rows, sequences = heads // kv_heads, batch * query_tokens
    if metadata is None and num_splits is None:
        parts = twin.parts_of(rows, kv_heads, _multiprocessors(q))
    else:
        parts = _check_plan(metadata, num_splits, sequences, q)
    dims, is_paged = (head_dim, head_dim_v), is_fp8 and head_dim == twin.PAGED_DIMS
    has_extra = tokens.counts.vary or tokens.extra is not None or is_paged
    return Work(q.dtype, is_fp8, is_sparse, dims, kv_heads, rows, sequences, parts, has_extra)


def _fields(q: Array, k_cache: Array, tokens: _Tokens, work: Work) -> dict[str, Any]:
    """Return the fields of struct Params that depend on the inputs alone."""
    counts, extra = tokens.counts, tokens.extra
    second = {
        "topk_lengths": counts.topk_length,
        "extra_cache": extra and extra.cache,
        "extra_indices": extra and extra.indices,
        "extra_topk_lengths": counts.extra_topk_length,
        "extra_strides": extra.strides if extra else (0, 0, 0),
        "extra_indices_strides": extra.indices_strides if extra else (0, 0),
        "extra_pages": extra.cache.shape[0] if extra else 0,
        "extra_page_size": extra.cache.shape[1] if extra else 1,
        "extra_topk": counts.extra_topk,
    }
    return second | {
        "q": q,
        "cache": k_cache,
        "block_table": tokens.block_table,
        "lengths": tokens.lengths,
        # A null pointer tells the kernel to use the block table. If there are indices but topk is 0, the kernel gets
        # the address of q, which it does not read.
        "indices": tokens.indices if counts.topk else q if work.is_sparse else None,
        "table_stride": tokens.table_stride,
        "indices_strides": tokens.indices_strides,
        "batch": q.shape[0],
        "query_tokens": q.shape[1],
        "heads": q.shape[2],
        "kv_heads": work.kv_heads,
        "head_dim": work.dims[0],
        "head_dim_v": work.dims[1],
        "pages": k_cache.shape[0],
        "page_size": k_cache.shape[1],
        "max_pages": tokens.max_pages,
        "topk": counts.topk,
        "parts": work.parts,
    }


def _results(work: Work, attended: Array, lse: Array) -> dict[str, Any]:
    slots = 2 * work.parts, work.kv_heads, work.rows
    partial = empty((*slots, work.dims[1]), "float32"), empty(slots, "float32")
    return {"out": attended, "lse": lse, "partial_out": partial[0], "partial_lse": partial[1]}


def _make_plan(work: Work, tokens: _Tokens) -> tuple[Array, Array]:
    plan = empty((work.parts, 8), "int32"), empty((work.sequences + 1,), "int32")
    why = "no plan is given (get_mla_metadata makes one for all layers of a step); "
    launch_plan(tokens.lengths, *plan, tokens.counts, why)
    return plan


@op(twin.flash_mla_with_kvcache, "attended, lse", _attention_results, instead=attend_by_a_plan)
def flash_mla_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    block_table: AnyArray | None,
    cache_seqlens: AnyArray | None,
    head_dim_v: int,
    tile_scheduler_metadata: AnyArray | FlashMLASchedMeta | None,
    num_splits: AnyArray | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    is_fp8_kvcache: bool = False,
    indices: AnyArray | None = None,
    attn_sink: AnyArray | None = None,
    extra_k_cache: AnyArray | None = None,
    extra_indices_in_kvcache: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    extra_topk_length: AnyArray | None = None,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Attend from the last tokens of each sequence over its latents in a paged cache. A latent is both key and value.

    With g = heads / kv_heads, the results for head h of query token i of sequence b, over all tokens t of the sequence:

        score[t]  = softmax_scale * q[b, i, h] . key[t, h // g]
        out[i, h] = sum of softmax(score)[t] * key[t, h // g, :head_dim_v]
        lse[h, i] = log of the sum of exp(score[t])

    If `causal`, query token i of s query tokens sees the tokens up to its position, cache_seqlens[b] - s + i. Token t
    is in slot t % page_size of page block_table[b, t // page_size].

    Sums are accumulated in float32. The kernels round the probabilities to the query's dtype before they multiply them
    by the values. With an 8-bit cache they round the product of a probability and the value's scale to float16; variant
    "wgmma", and all variants with slots of 584 bytes, instead convert the values to the query's dtype.

    Args:
        q: [batch, query_tokens, heads, head_dim], bfloat16 or float16, contiguous along the last dimension, which is a
            multiple of 16, at most 576. On a GPU rows begin at multiples of 16 bytes.
        k_cache: [pages, page_size, kv_heads, head_dim], of q's dtype, contiguous along the last dimension. Pages,
            tokens and heads may be strided, on a GPU by multiples of 16 bytes. page_size is a multiple of 16, or with
            `indices` any number. With `is_fp8_kvcache` [pages, page_size, kv_heads, slot_bytes], of uint8, int8 or
            float8_e4m3fn, and head_dim_v is 512.
            For a head_dim of 576 a slot has 656 bytes: 512 elements in float8_e4m3fn, 4 float32 scales (each for 128
            elements), and 64 rotary elements in bfloat16, which are rounded to q's dtype.
            For a head_dim of 512, all of it key and value, a slot has 584 bytes, and each page is contiguous. A page
            holds, for each slot, 448 elements in float8_e4m3fn and 64 rotary elements in bfloat16; then, for each slot,
            7 scales in float8_e8m0fnu (each for 64 elements) and an unused byte. Such a cache needs `indices` and one
            kv head.
        block_table: int32 [batch, max_pages]; rows may be strided. Entries beyond the tokens of a sequence are not
            used. May be None with `indices`.
        cache_seqlens: int32 [batch], tokens in the cache, including the tokens of q; negative numbers count as 0. May
            be None with `indices`.
        head_dim_v: a multiple of 16, at most head_dim.
        tile_scheduler_metadata, num_splits: results of `get_mla_metadata` for these lengths, or without arguments. None
            for both: the call makes a plan.
        softmax_scale: head_dim ** -0.5 by default; variant "wgmma" needs at least 1e-30.
        causal: not allowed with `indices`.
        indices: int32 [batch, query_tokens, topk]: the slots (page * page_size + position in the page) that a query
            token attends to. Negative numbers are skipped. block_table and cache_seqlens are then not used.
        attn_sink: float32 [heads], the score of an additional token whose value is 0: out is multiplied by exp(lse) /
            (exp(lse) + exp(attn_sink)), and lse does not change.
        extra_k_cache: a second cache like k_cache, with its own number of pages and page_size. Only with `indices`.
        extra_indices_in_kvcache: int32 [batch, query_tokens, extra_topk], slots of the second cache. The softmax is
            over the tokens of both caches.
        topk_length: int32 [batch], clamped to [0, topk]: the number of leading indices that are used. None: all.
        extra_topk_length: the same for extra_indices_in_kvcache.
        out: an array like the (contiguous) result to write into, at a multiple of 16 bytes, or a pair of arrays for out
            and lse (under torch.compile always a pair).
        variant: "auto", "wgmma" (sm_90a, a head_dim of 576 or 512), "mma" (a head_dim of 576 or 512) or "dynamic"
            (everything).

    Returns:
        out [batch, query_tokens, heads, head_dim_v] of q's dtype and lse float32 [batch, heads, query_tokens]. Without
        tokens out is 0 and lse is +inf, as in FlashMLA. On a GPU lengths, pages and slots cannot be checked before the
        launch. If one points outside the table or the cache, nothing is read there, and the rows of that sequence (with
        `indices`: of that query token) are NaN. A token with NaN or infinities may affect all rows that share its kv
        head, even rows that do not see the token. Unused slots do not affect any row.

    Raises:
        TypeError: a value that is not an array, or has the wrong dtype or library.
        ValueError: a shape, stride, device or option that does not fit.

    Sources: latent attention is from DeepSeek-V2 (2024), the functions and the cache of 656 bytes from FlashMLA
    (DeepSeek, 2025), the online softmax from Milakov and Gimelshein (2018), indices from DeepSeek-V3.2 (2025), the
    second cache, topk_length and slots of 584 bytes from FlashMLA's later releases (2026).
    """
    expect_array("q", q, DTYPES, ("batch", "query_tokens", "heads", "head_dim"))
    expect_place("k_cache", k_cache, q, "q")
    head_dim_v = check.integer("head_dim_v", head_dim_v, 1)
    is_fp8 = bool(check.one_of("is_fp8_kvcache", is_fp8_kvcache, (False, True)))
    cache_strides = _check_cache(q, k_cache, head_dim_v, is_fp8, indices is not None)
    q_strides = _strides("q", q)
    check.one_of("causal", causal, (False, True))
    scale = _check_scale(softmax_scale, q.shape[3])
    second = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
    sparse = _check_sparse(q, k_cache, is_fp8, indices, topk_length, second)
    tokens = _check_tokens(block_table, cache_seqlens, sparse, causal, q, k_cache.shape[0])
    if attn_sink is not None:
        expect("attn_sink", attn_sink, q, "q", ("float32",), (q.shape[2],), "[heads]")
    work = _work(q, k_cache, head_dim_v, is_fp8, tokens, tile_scheduler_metadata, num_splits)
    attended, lse = _result_arrays(out, q, _attention_results(q, k_cache, block_table, cache_seqlens, head_dim_v))
    if q.on_host:
        return run_twin(variant, VARIANTS)

    reason = no_wgmma(work, k_cache, cache_strides, scale, q.gpu.arch)
    is_wgmma = takes_wgmma(work, variant, reason)
    _check_alignments(q, q_strides, k_cache, cache_strides, tokens.extra, work.is_paged)
    if not work.sequences * q.shape[1]:
        return attended, lse
    fields = _fields(q, k_cache, tokens, work) | _results(work, attended, lse)
    fields |= {"sinks": attn_sink, "q_strides": q_strides, "cache_strides": cache_strides}
    fields |= {"causal": bool(causal), "scale_log2": scale * math.log2(math.e)}
    is_given = tile_scheduler_metadata is not None
    plan = (tile_scheduler_metadata, num_splits) if is_given else _make_plan(work, tokens)
    fields |= dict(zip(("metadata", "splits"), plan, strict=True))
    why = f"{why_attend(work, variant, is_wgmma, reason)}; {why_parts(work, is_given, q.gpu.multiprocessors)}"
    launch_attention(work, variant, is_wgmma, k_cache, q.gpu, why, fields)
    return attended, lse
