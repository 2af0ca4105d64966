"""Multi-head latent attention at decode time: the last tokens of each sequence over a paged cache of latents."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cukern.reference import mla_decode as twin
from cukern.runtime import arrays, check, gpu, template
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
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import empty, launch, outputs, run_twin, tensor_map

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

DTYPES = ("bfloat16", "float16")
#: Of an 8-bit cache: only its bytes count.
FP8_DTYPES = ("uint8", "int8", "float8_e4m3fn")
VARIANTS = ("auto", "wgmma", "mma", "dynamic")
MAX_DIM = 576
MAX_PAGE_SIZE = 2**16
#: Of rows, sequences and slots: the kernels count them in 31 bits, and round up to whole tiles.
MAX_COUNT = 2**31 - 2**12
MAX_GRID = 2**16 - 1  # along y and z
_LARGEST_SCALE = 1e30
#: Of variant "wgmma", which takes the largest product for the largest score, and multiplies what it left out by it.
_SMALLEST_SCALE = 1e-30
_THREADS = 256  # of plan_parts, attend_mma and combine_parts
#: How parts of a row are put together, as template arguments TEAM and EACH: by all warps of a block or by one, in so
#: many times 128 columns. The first for so few rows that it takes several blocks for each to keep the GPU busy.
_MANY_BLOCKS, _BLOCK, _WARP = (8, 1), (8, 4), (1, 4)
_FEW_COMBINED_ROWS = 64, 512
_COMBINING_BLOCKS = 2  # per multiprocessor, at once

#: head_dim and head_dim_v that have variants of their own.
SPECIALIZED = [
    (576, 512),  # DeepSeek-V2, V3 and R1, Kimi-K2
]
#: Query rows that a block of threads may have; the most only where dimensions are specialized.
_ROWS = (16, 32, 64)
_MOST_STAGES = 4
#: Tokens of a tile, the better first; with the most rows more of 8 bits need too many registers.
_TILES, _FP8_TILES = (64, 32), {16: (64, 32, 16), 32: (64, 32), 64: (32,)}

#: With which `attend_mma` is faster, measured on an H200: over a cache of 16 and of 8 bits.
_FEW_ROWS, _FEW_ROWS_FP8 = 16, 32
_WGMMA_SHARED_BYTES = 227 << 10  # all that a block can have: it is alone on its multiprocessor
_LARGEST_STRIDE = 2**40  # bytes, of a tensor map

_plan_kernel = Kernel("mla_decode/plan", "plan_parts")
_attend = Kernel("mla_decode/attend_mma", "attend_mma")
_wgmma = Kernel("mla_decode/attend_wgmma", "attend_wgmma", compile_s=2.5)
_combine = Kernel("mla_decode/combine", "combine_parts")


class _Form(NamedTuple):
    """Template arguments of `attend_mma`, and the shared memory that follows from them (`Form` there)."""

    dtype: str
    is_fp8: bool
    rows: int
    tile: int
    stages: int
    head_dim: int  # 0: dynamic
    head_dim_v: int

    @property
    def shared_bytes(self) -> int:
        dims = self.head_dim or MAX_DIM
        groups = 2 if self.is_fp8 or self.rows == 64 else 1
        rings = 2 if self.is_fp8 and self.rows == 16 else 1
        group_rows, halves = self.rows // groups * rings, 1 if self.is_fp8 else 2
        fragments_of_rows, depths = group_rows // 16, 8 // groups // halves
        fragments = self.tile // halves // 8  # of a warp's tokens
        own = max(fragments // depths, 1)
        sent = fragments - own if fragments >= depths else fragments
        steps = dims // 16 // depths
        kept = steps if fragments_of_rows == 1 or groups == 1 else 0 if self.is_fp8 else 4
        tiles = rings * self.stages * (self.tile * (twin.SLOT_BYTES if self.is_fp8 else dims * 2) + 32)
        queries = self.rows // 16 * depths * (steps - kept) * 512
        scores = 8 * sent * fragments_of_rows * 512
        shares = groups * group_rows * self.tile * 2 * (twin.LATENT // twin.TILE if self.is_fp8 else 1)
        return tiles + queries + scores + shares + 2 * 8 * group_rows * 4


def _form(dtype: str, is_fp8: bool, group_rows: int, dims: tuple[int, int], most_shared_bytes: int) -> _Form:
    """The best form for so many rows of a kv head and a block that can have so much shared memory.

    `dims` are 0 where they are dynamic.
    """
    wanted = next((rows for rows in _ROWS if rows >= group_rows), _ROWS[-1])
    most = _ROWS[-1] if dims[0] else _ROWS[-2]
    for rows in (rows for rows in reversed(_ROWS) if rows <= min(wanted, most)):
        for tile in _FP8_TILES[rows] if is_fp8 else _TILES:
            # A tile must come while another is in use.
            for stages in range(_MOST_STAGES, 1, -1):
                form = _Form(dtype, is_fp8, rows, tile, stages, *dims)
                if form.shared_bytes <= most_shared_bytes:
                    return form
    raise AssertionError("the smallest form fits every GPU")


def _attend_variant(form: _Form) -> Variant:
    arguments = str(form.is_fp8).lower(), *form[2:]
    return _attend.variant(arrays.CUDA_TYPE[form.dtype], *arguments, max_shared_bytes=form.shared_bytes)


def _wgmma_variant(dtype: str, is_fp8: bool, is_sparse: bool) -> Variant:
    flags = str(is_fp8).lower(), str(is_sparse).lower()
    return _wgmma.variant(arrays.CUDA_TYPE[dtype], *flags, max_shared_bytes=_WGMMA_SHARED_BYTES)


def _combine_variant(dtype: str, head_dim_v: int, form: tuple[int, int]) -> Variant:
    team, each = form
    # All columns, also where they are dynamic.
    return _combine.variant(arrays.CUDA_TYPE[dtype], head_dim_v, team, each if head_dim_v or each == 1 else 5)


def _shared_bytes(of: gpu.Gpu) -> int:
    """What a block of `attend_mma` takes of shared memory at most."""
    # The form that takes more than that spills on sm_100, not on sm_90.
    return min(of.shared_per_block, 220 << 10) if of.arch.startswith("10") else of.shared_per_block


# Both formats compile to the same instructions but for constants.
_attend.specialize_by_arch(
    {
        arch: [
            _attend_variant(_form("bfloat16", is_fp8, rows, dims, _shared_bytes(of))).instance
            for dims in SPECIALIZED
            for is_fp8 in (False, True)
            for rows in _ROWS
        ]
        for arch, of in gpu.BY_ARCH.items()
    }
)
_wgmma.specialized = [
    _wgmma_variant("bfloat16", is_fp8, is_sparse).instance for is_fp8 in (False, True) for is_sparse in (False, True)
]
_combine.specialized = [_combine_variant("bfloat16", 512, form).instance for form in (_MANY_BLOCKS, _BLOCK, _WARP)]
_plan_kernel.specialized = [_plan_kernel.variant().instance]
# The rest is compiled at its first use: what is best depends on the GPU.
_wgmma.at_import = _wgmma.specialized[:1]
_combine.at_import = _combine.specialized
_plan_kernel.at_import = _plan_kernel.specialized


# --- checks -------------------------------------------------------------------------------------------


def _strides(name: str, array: Array) -> tuple[int, ...]:
    """The distances along all dimensions but the last, in elements; 0 between what there is only one of.

    Raises ValueError unless the last dimension is contiguous.
    """
    if array.strides[-1] != 1 and 0 not in array.shape:
        check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")
    return tuple(stride if size > 1 else 0 for size, stride in zip(array.shape[:-1], array.strides, strict=False))


def _check_alignment(name: str, array: Array, strides: tuple[int, ...] = ()) -> None:
    """Raises ValueError unless an array begins at a multiple of 16 bytes, and so all rows that are so far apart."""
    if array.alignment < 16 or any(stride * array.item_size % 16 for stride in strides):
        wanted, got = "at a multiple of 16 bytes", f"address at a multiple of {array.alignment}"
        if strides:
            wanted, got = f"{wanted}, and so its strides", f"{got} and strides {strides} (in elements)"
        check.fail(name, wanted, got)


def _check_cache(q: Array, k_cache: Array, head_dim_v: int, is_fp8: bool) -> None:
    """Check q, k_cache and head_dim_v against each other."""
    batch, query_tokens, heads, head_dim = q.shape
    check.dtype("k_cache", k_cache.dtype, FP8_DTYPES if is_fp8 else (q.dtype,))
    symbols = "pages", "page_size", "kv_heads", "slot_bytes" if is_fp8 else "head_dim"
    check.dimensions("k_cache", k_cache.shape, symbols)
    if head_dim % 16 or not 16 <= head_dim <= MAX_DIM:
        check.fail("q", f"of a head_dim that is a multiple of 16 in [16, {MAX_DIM}]", head_dim)
    if is_fp8 and head_dim != MAX_DIM:
        check.fail("q", f"of a head_dim of {MAX_DIM} with is_fp8_kvcache", head_dim)
    if is_fp8 and head_dim_v != twin.LATENT:
        check.fail("head_dim_v", f"{twin.LATENT} with is_fp8_kvcache", head_dim_v)
    if head_dim_v % 16 or not 16 <= head_dim_v <= head_dim:
        check.fail("head_dim_v", f"a multiple of 16 in [16, {head_dim}] (head_dim of q)", head_dim_v)
    pages, page_size, kv_heads, _ = k_cache.shape
    wanted = (pages, page_size, kv_heads, twin.SLOT_BYTES if is_fp8 else head_dim)
    check.shape("k_cache", k_cache.shape, wanted, f"[{', '.join(symbols)}]")
    if page_size % 16 or not 16 <= page_size <= MAX_PAGE_SIZE:
        check.fail("k_cache", f"of pages of a multiple of 16 tokens, at most {MAX_PAGE_SIZE}", page_size)
    if not 1 <= kv_heads <= MAX_GRID:
        check.fail("k_cache", f"of at least one and at most {MAX_GRID} kv heads", kv_heads)
    if heads < 1 or heads % kv_heads:
        check.fail("q", f"of a multiple of {kv_heads} heads (kv_heads of k_cache), and at least one", heads)
    if batch * query_tokens * heads > MAX_COUNT:
        check.fail("q", f"of at most {MAX_COUNT} rows in all", list(q.shape))
    if pages > MAX_COUNT:
        check.fail("k_cache", f"of at most {MAX_COUNT} pages", pages)


def _check_indices(indices: Any, q: Array) -> int:
    """How many slots each query token names."""
    expect_place("indices", indices, q, "q")
    check.dtype("indices", indices.dtype, ("int32",))
    check.dimensions("indices", indices.shape, ("batch", "query_tokens", "topk"))
    topk = indices.shape[2]
    if topk > MAX_COUNT:
        check.fail("indices", f"of at most {MAX_COUNT} slots for each query token", topk)
    check.shape("indices", indices.shape, (*q.shape[:2], topk), "[batch, query_tokens, topk]")
    return topk


def _check_plan(metadata: Any, num_splits: Any, sequences: int, q: Array) -> int:
    """How many parts the caller's plan has."""
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


def _outputs(out: Any, q: Array, results: list[Result]) -> tuple[Array, Array]:
    """Where the results go; `out` may be the first of them alone."""
    is_single = not (out is None or isinstance(out, (tuple, list)))
    if is_single:
        out = expect("out", out, q, "q", (q.dtype,), results[0].shape, results[0].symbols), None
    elif out is not None and len(out) != 2:
        check.fail("out", "an array, or a pair (out, lse)", f"{len(out)} of them")
    attended, lse = outputs(out, q, "q", *results)
    _check_alignment("out" if is_single else "out[0]", attended)
    return attended, lse


# --- how a call runs ----------------------------------------------------------------------------------


class _Work(NamedTuple):
    """What a call does; what depends on the lengths is left to the device."""

    dtype: str
    is_fp8: bool
    is_sparse: bool  # of indices: each query token is a sequence of its own
    dims: tuple[int, int]  # head_dim and head_dim_v
    kv_heads: int
    rows: int  # of queries that share a kv head of a sequence
    sequences: int
    parts: int


def _no_wgmma(work: _Work, k_cache: Array, strides: tuple[int, ...], scale: float, arch: str) -> str:
    """Why the kernel for Hopper cannot do it, if so."""
    if arch != "90a":
        return f"this GPU is of sm_{arch}, not sm_90a"
    if work.dims != (MAX_DIM, twin.LATENT):
        return f"heads are of {work.dims[0]} and {work.dims[1]}, not {MAX_DIM} and {twin.LATENT}"
    if not (work.is_fp8 or work.is_sparse):
        if not k_cache.shape[0]:
            return "the cache has no pages"
        for size, stride in zip(k_cache.shape[2::-1], reversed(strides), strict=True):
            if size > 1 and not 0 < 2 * stride < _LARGEST_STRIDE:
                return f"k_cache has a stride of {stride} elements"
    return "" if scale >= _SMALLEST_SCALE else f"softmax_scale is below {_SMALLEST_SCALE:g}"


def _takes_wgmma(work: _Work, variant: str, reason: str) -> bool:
    """Whether the kernel for Hopper does it; `reason` says why it cannot. Raises ValueError for a variant."""
    check.one_of("variant", variant, VARIANTS)
    if variant == "wgmma" and reason:
        check.fail("variant", "'auto', 'mma' or 'dynamic' here", f"'wgmma': {reason}")
    if variant == "mma" and work.dims not in SPECIALIZED:
        got = f"'mma': there is none for heads of {work.dims[0]} and {work.dims[1]}"
        check.fail("variant", "'auto' or 'dynamic' here", got)
    # Few rows leave most of a product of 64 unused, and memory is what takes the time.
    is_many = work.rows > (_FEW_ROWS_FP8 if work.is_fp8 else _FEW_ROWS)
    return variant == "wgmma" or (variant == "auto" and not reason and is_many)


def _combining(work: _Work, multiprocessors: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """How parts of a row are put together, and the grid for that."""
    rows = work.sequences * work.rows
    if rows * work.kv_heads <= _FEW_COMBINED_ROWS[0]:
        return _MANY_BLOCKS, (rows, work.kv_heads, -(-work.dims[1] // 128))
    if rows * work.kv_heads <= _FEW_COMBINED_ROWS[1]:
        return _BLOCK, (rows, work.kv_heads, 1)
    # Where there are about as many sequences as parts, few are in several of them: most blocks have nothing to do.
    most = -(-work.rows // 8)
    if 2 * work.sequences > work.parts:
        most = min(most, _COMBINING_BLOCKS * multiprocessors // (work.parts * work.kv_heads))
    return _WARP, (max(most, 1), work.kv_heads, work.parts)


def _launch_plan(lengths: Array | None, metadata: Array, splits: Array, topk: int) -> None:
    """Make a plan of the lengths, or of `topk` tokens for each sequence."""
    sizes = {"sequences": splits.shape[0] - 1, "parts": metadata.shape[0], "length": topk}
    launch(_plan_kernel.variant(), 1, _THREADS, 0, lengths=lengths, metadata=metadata, splits=splits, **sizes)


def _launch_wgmma(work: _Work, k_cache: Array, fields: dict[str, Any]) -> None:
    constants = template.constants(_wgmma.file)
    pages, page_size, kv_heads, head_dim = k_cache.shape
    tiles, box_tokens = None, 0
    # Tokens that are converted, or lie anywhere, are not copied by tiles.
    if not (work.is_fp8 or work.is_sparse):
        box_tokens = math.gcd(page_size, twin.BLOCK_TOKENS)
        # Where there is only one, any stride does but 0.
        strides = tuple(2 * (stride or head_dim) for stride in reversed(fields["cache_strides"]))
        dims, box = (head_dim, kv_heads, page_size, pages), (constants["COLUMNS"], 1, box_tokens, 1)
        tiles = tensor_map(k_cache, work.dtype, dims, strides, box)
    variant, threads = _wgmma_variant(work.dtype, work.is_fp8, work.is_sparse), constants["WGMMA_THREADS"]
    grid = -(-work.rows // constants["WGMMA_ROWS"]), work.kv_heads, work.parts
    launch(variant, grid, threads, _WGMMA_SHARED_BYTES, map=tiles, p=fields, box_tokens=box_tokens)


def _multiprocessors(array: Any) -> int:
    """Of the GPU of an array, or of a tensor as torch traces it; those of an H200 for host memory."""
    if isinstance(array, Array):
        return twin.MULTIPROCESSORS if array.on_host else array.gpu.multiprocessors
    return gpu.of_device(array.get_device()).multiprocessors if array.is_cuda else twin.MULTIPROCESSORS


def _plan_results(
    cache_seqlens: Any, num_heads_per_head_k: int, num_heads_k: int, *, num_heads_q: Any = None, topk: Any = None
) -> list[Result]:
    sequences, rows = cache_seqlens.shape[0], num_heads_per_head_k
    if topk is not None and num_heads_q is not None:
        sequences, rows = sequences * (rows * num_heads_k // num_heads_q), num_heads_q // num_heads_k
    parts = twin.parts_of(rows, num_heads_k, _multiprocessors(cache_seqlens))
    return [Result((parts, 8), "int32", "[parts, 8]"), Result((sequences + 1,), "int32", "[sequences + 1]")]


@op(
    twin.get_mla_metadata,
    "get_mla_metadata(Tensor cache_seqlens, int num_heads_per_head_k, int num_heads_k, *, int? num_heads_q=None, "
    "int? topk=None) -> (Tensor tile_scheduler_metadata, Tensor num_splits)",
    _plan_results,
)
def get_mla_metadata(
    cache_seqlens: Any,
    num_heads_per_head_k: int,
    num_heads_k: int,
    *,
    num_heads_q: int | None = None,
    topk: int | None = None,
    out: Any = None,
) -> Any:
    """Deal the tokens of all sequences out to the multiprocessors, for `flash_mla_with_kvcache`.

    The tokens of a sequence are cut into blocks of 64. A part is what one block of threads does, for one kv head and
    up to 64 query rows of it: a run of blocks, over the end of one sequence into the next. A visit of a sequence costs
    5 blocks beside its own. Parts are filled in order up to a load that is the smallest with which they suffice; a
    sequence without tokens is visited too, since its rows must be written.

    Nothing here waits for the device: the plan is made there, and a CUDA graph that captured the call makes it anew
    from the lengths of its time. The plan holds for all layers of a decoding step.

    Args:
        cache_seqlens: int32 [batch], tokens in the cache; less than 0 is 0.
        num_heads_per_head_k: query rows that share a kv head: query tokens * query heads // kv heads.
        num_heads_k: kv heads.
        num_heads_q: query heads; needed with `topk`.
        topk: plan for `indices` of so many slots instead: each query token is then a sequence of its own, of topk
            tokens, and cache_seqlens only says the batch.
        out: a pair of arrays like the results to write into.

    Returns:
        tile_scheduler_metadata, int32 [parts, 8], with parts = max(1, multiprocessors // (num_heads_k *
        ceil(num_heads_per_head_k / 64))): for each part its first sequence and the first block of it, its last sequence
        and the end of its blocks there, how many parts visit the first sequence before it, and zeros; a part with
        nothing to do has the number of sequences for its first one. And num_splits, int32 [sequences + 1]: how many
        visits there are before each sequence. For arrays in host memory as on a GPU of 132 multiprocessors.

    Raises:
        TypeError: what is no array, or has the wrong dtype or library.
        ValueError: sizes that do not fit each other.

    The function and its results are FlashMLA's (DeepSeek, 2025), whose parts are of another load, and whose batch is
    limited.
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
    sequences = cache_seqlens.shape[0] * query_tokens
    if sequences > MAX_COUNT:
        check.fail("cache_seqlens", f"of at most {MAX_COUNT} sequences", sequences)
    results = _plan_results(cache_seqlens, num_heads_per_head_k, num_heads_k, num_heads_q=num_heads_q, topk=topk)
    made = outputs(out, cache_seqlens, "cache_seqlens", *results, names="a pair (tile_scheduler_metadata, num_splits)")
    if cache_seqlens.on_host:
        return run_twin()
    _launch_plan(cache_seqlens if topk is None else None, made[0], made[1], topk or 0)
    return made


def _attention_results(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, *_: Any, **__: Any
) -> list[Result]:
    batch, query_tokens, heads, _ = q.shape
    attended = batch, query_tokens, heads, head_dim_v
    lse = Result((batch, heads, query_tokens), "float32", "[batch, heads, query_tokens]")
    return [Result(attended, dtype_name(q), "[batch, query_tokens, heads, head_dim_v]"), lse]


@op(
    twin.flash_mla_with_kvcache,
    "flash_mla_with_kvcache(Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, int head_dim_v, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits, float? softmax_scale=None, bool causal=False, *, "
    "bool is_fp8_kvcache=False, Tensor? indices=None, Tensor? attn_sink=None, str variant='auto') "
    "-> (Tensor attended, Tensor lse)",
    _attention_results,
)
def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Attend from the last tokens of each sequence over its latents in a paged cache, which are keys and values both.

    A value is the first head_dim_v numbers of a key. With g = heads / kv_heads,

        score[t]  = softmax_scale * q[b, i, h] . key[t, h // g]
        out[i, h] = sum of softmax(score)[t] * key[t, h // g, :head_dim_v]
        lse[h, i] = log of the sum of exp(score[t])

    over all tokens t of the sequence; if `causal`, query token i of s stands at position cache_seqlens[b] - s + i and
    sees the tokens up to it. Token t is slot t % page_size of page block_table[b, t // page_size]. Sums are in float32;
    the weights are rounded to the query's dtype before they meet the values (with an 8-bit cache, times a value's scale
    to float16; variant "wgmma" rounds the values of such a cache to the query's dtype instead).

    Args:
        q: [batch, query_tokens, heads, head_dim], bfloat16 or float16, contiguous along the last dimension, which is a
            multiple of 16, at most 576. On a GPU rows begin at multiples of 16 bytes.
        k_cache: [pages, page_size, kv_heads, head_dim], of q's dtype, contiguous along the last dimension; pages,
            tokens and heads may be strided, on a GPU by multiples of 16 bytes. page_size is a multiple of 16. With
            `is_fp8_kvcache` [pages, page_size, kv_heads, 656], of bytes (uint8, int8, or float8_e4m3fn that only counts
            as bytes): 512 numbers in float8_e4m3fn, 4 float32 scales (each for 128 of them: value = number * scale)
            and 64 rotary numbers in bfloat16, whatever q's dtype, rounded to it; head_dim is then 576 and head_dim_v
            512.
        block_table: int32 [batch, max_pages]; rows may be strided. Entries for tokens that a sequence has not are not
            used. May be None with `indices`.
        cache_seqlens: int32 [batch], tokens in the cache, those of q included. Up to 0: no tokens. May be None with
            `indices`.
        head_dim_v: a multiple of 16, at most head_dim.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` gave for these lengths, or None both: then the call
            plans by itself.
        softmax_scale: head_dim ** -0.5 by default; variant "wgmma" takes it from 1e-30 on.
        causal: not with `indices`.
        indices: int32 [batch, query_tokens, topk]: the slots (page * page_size + place in the page) that a query token
            attends to, and no others; less than 0: none. block_table and cache_seqlens are then not used.
        attn_sink: float32 [heads], logits of a token without value: out is multiplied by exp(lse) / (exp(lse) +
            exp(attn_sink)), lse is not changed.
        out: an array like the (contiguous) result to write into, at a multiple of 16 bytes, or a pair of that and one
            for lse (under torch.compile a pair).
        variant: "auto", "wgmma" (sm_90a, heads of 576 and 512), "mma" (heads of 576 and 512) or "dynamic" (everything).

    Returns:
        out [batch, query_tokens, heads, head_dim_v] of q's dtype and lse float32 [batch, heads, query_tokens]. A row
        with nothing to attend to is 0, and its lse +inf, as upstream has it. On a GPU lengths, pages and slots cannot
        be checked ahead: where one points outside the table or the cache, nothing is read there, and the rows of that
        sequence (with `indices` of that query token) are NaN. A token that is NaN or infinite may reach all rows that
        share its kv head, also those that do not see it; what lies in slots of no token reaches none.

    Raises:
        TypeError: what is no array, or has the wrong dtype or library.
        ValueError: a shape, stride, device or option that does not fit.

    Latent attention is DeepSeek-V2's (2024), the functions and the cache of 656 bytes are FlashMLA's (DeepSeek, 2025),
    the online softmax that of Milakov and Gimelshein (2018), indices those of DeepSeek-V3.2 (2025).
    """
    expect_array("q", q, DTYPES, ("batch", "query_tokens", "heads", "head_dim"))
    expect_place("k_cache", k_cache, q, "q")
    head_dim_v = check.integer("head_dim_v", head_dim_v, 1)
    is_fp8 = bool(check.one_of("is_fp8_kvcache", is_fp8_kvcache, (False, True)))
    _check_cache(q, k_cache, head_dim_v, is_fp8)
    q_strides, cache_strides = _strides("q", q), _strides("k_cache", k_cache)
    batch, query_tokens, heads, head_dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    check.one_of("causal", causal, (False, True))
    scale = head_dim**-0.5 if softmax_scale is None else check.number("softmax_scale", softmax_scale)
    if abs(scale) > _LARGEST_SCALE:
        check.fail("softmax_scale", f"of at most {_LARGEST_SCALE:g}", scale)
    is_sparse = indices is not None
    rows, sequences = heads // kv_heads * query_tokens, batch
    max_pages = table_stride = topk = 0
    indices_strides: tuple[int, ...] = (0, 0)
    if is_sparse:
        topk, indices_strides = _check_indices(indices, q), _strides("indices", indices)
        if causal:
            check.fail("causal", "False with indices", True)
        rows, sequences = heads // kv_heads, batch * query_tokens
        block_table = cache_seqlens = None
    else:
        for name, array in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
            if array is None:
                check.fail(name, "an array, unless there are indices", None, TypeError)
        max_pages, table_stride = expect_table("block_table", block_table, q, "q", batch, ("batch", "max_pages"))
        expect("cache_seqlens", cache_seqlens, q, "q", ("int32",), (batch,), "[batch]")
    if attn_sink is not None:
        expect("attn_sink", attn_sink, q, "q", ("float32",), (heads,), "[heads]")
    is_planned = not (tile_scheduler_metadata is None and num_splits is None)
    if is_planned:
        parts = _check_plan(tile_scheduler_metadata, num_splits, sequences, q)
    else:
        parts = twin.parts_of(rows, kv_heads, _multiprocessors(q))
    attended, lse = _outputs(out, q, _attention_results(q, k_cache, block_table, cache_seqlens, head_dim_v))
    if q.on_host:
        return run_twin(variant, VARIANTS)

    work = _Work(q.dtype, is_fp8, is_sparse, (head_dim, head_dim_v), kv_heads, rows, sequences, parts)
    is_wgmma = _takes_wgmma(work, variant, _no_wgmma(work, k_cache, cache_strides, scale, q.gpu.arch))
    _check_alignment("q", q, q_strides)
    _check_alignment("k_cache", k_cache, cache_strides)
    if not sequences * query_tokens:
        return attended, lse
    slots = 2 * parts, kv_heads, rows
    partial_out, partial_lse = empty((*slots, head_dim_v), "float32"), empty(slots, "float32")
    if not is_planned:
        tile_scheduler_metadata, num_splits = empty((parts, 8), "int32"), empty((sequences + 1,), "int32")
        _launch_plan(cache_seqlens, tile_scheduler_metadata, num_splits, topk)
    fields = {
        "q": q,
        "cache": k_cache,
        "block_table": block_table,
        "lengths": cache_seqlens,
        # That they are there counts, also if they are empty.
        "indices": indices if topk else q if is_sparse else None,
        "sinks": attn_sink,
        "metadata": tile_scheduler_metadata,
        "splits": num_splits,
        "out": attended,
        "lse": lse,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
        "q_strides": q_strides,
        "cache_strides": cache_strides,
        "table_stride": table_stride,
        "indices_strides": indices_strides,
        "batch": batch,
        "query_tokens": query_tokens,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "pages": pages,
        "page_size": page_size,
        # A cache without pages has room for no token.
        "max_pages": max_pages if pages else 0,
        "topk": topk,
        "causal": bool(causal),
        "parts": parts,
        "scale_log2": scale * math.log2(math.e),
    }
    is_special = work.dims in SPECIALIZED and variant != "dynamic"
    if is_wgmma:
        _launch_wgmma(work, k_cache, fields)
    else:
        # An 8-bit cache is of one kind.
        dims = work.dims if is_special or is_fp8 else (0, 0)
        form = _form(q.dtype, is_fp8, rows, dims, _shared_bytes(q.gpu))
        launch(_attend_variant(form), (-(-rows // form.rows), kv_heads, parts), _THREADS, form.shared_bytes, **fields)
    if parts > 1:
        combining, grid = _combining(work, q.gpu.multiprocessors)
        launch(_combine_variant(q.dtype, head_dim_v if is_special else 0, combining), grid, _THREADS, 0, **fields)
    return attended, lse
