"""Multi-head latent attention at decode time: the last tokens of each sequence over a paged cache of latents."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

from cukern.reference import mla_decode as twin
from cukern.runtime import arrays, check
from cukern.runtime.cuda import runtime
from cukern.runtime.kernel import Kernel, Variant, arch_of_device, multiprocessors
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES, encode

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

DTYPES = ("bfloat16", "float16")
#: Of an 8-bit cache: only its bytes count.
FP8_DTYPES = ("uint8", "int8", "float8_e4m3fn")
VARIANTS = ("auto", "wgmma", "mma", "dynamic")
MAX_DIM = 576
MAX_PAGE_SIZE = 2**16
SLOT_BYTES = twin.SLOT_BYTES
BLOCK_TOKENS = twin.BLOCK_TOKENS
#: Of rows, sequences and slots: the kernels count them in 31 bits, and round up to whole tiles.
MAX_COUNT = 2**31 - 2**12
MAX_GRID = 2**16 - 1  # along y and z
_LARGEST_SCALE = 1e30
#: Of variant "wgmma", which takes the largest product for the largest score, and multiplies what it left out by it.
_SMALLEST_SCALE = 1e-30
_LOG2_E = math.log2(math.e)
_THREADS = 256  # of plan, attend_mma and combine
_SHARED_PER_BLOCK = 97  # the driver's attribute
#: What a block takes of it at most; sm_86 and 89 are like sm_120a.
_SHARED_BYTES = {"80": 163 << 10, "90a": 227 << 10, "100a": 220 << 10, "120a": 99 << 10}
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

_WGMMA_ROWS, _WGMMA_THREADS = 64, 384
#: With which `attend_mma` is faster, measured on an H200: over a cache of 16 and of 8 bits.
_FEW_ROWS, _FEW_ROWS_FP8 = 16, 32
_WGMMA_SHARED_BYTES = 227 << 10  # all that a block can have: it is alone on its multiprocessor
_WGMMA_COLUMNS = 64  # of a tile
_LARGEST_STRIDE = 2**40  # bytes, of a tensor map

_PARAMS = "12P9q12if"
_plan_kernel = Kernel("mla_decode", "plan_parts", "3P3i")
_attend = Kernel("mla_decode", "attend_mma", _PARAMS)
#: A tensor map, the same, and the tokens of a tile's box; aligned to 64 bytes.
_wgmma = Kernel("mla_decode", "attend_wgmma", f"{TENSOR_MAP_BYTES}s{_PARAMS}4xi28x", compile_s=2.5)
_combine = Kernel("mla_decode", "combine_parts", _PARAMS)


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
        tiles = rings * self.stages * (self.tile * (SLOT_BYTES if self.is_fp8 else dims * 2) + 32)
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


# Both formats compile to the same instructions but for constants.
_attend.specialize_by_arch(
    {
        arch: [
            _attend_variant(_form("bfloat16", is_fp8, rows, dims, most)).instance
            for dims in SPECIALIZED
            for is_fp8 in (False, True)
            for rows in _ROWS
        ]
        for arch, most in _SHARED_BYTES.items()
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


@functools.cache
def _shared_per_block(device: int) -> int:
    most = runtime.deviceGetAttribute(_SHARED_PER_BLOCK, device)
    # The form that takes more than that spills on sm_100, not on sm_90.
    return min(most, _SHARED_BYTES["100a"]) if arch_of_device(device).startswith("10") else most


class _Sizes(NamedTuple):
    """What the shapes say, and strides in elements, 0 between what there is only one of."""

    batch: int
    query_tokens: int
    heads: int
    head_dim: int
    head_dim_v: int
    pages: int
    page_size: int
    kv_heads: int
    q_strides: tuple[int, ...]  # between sequences, tokens, heads
    cache_strides: tuple[int, ...]  # between pages, tokens, heads; in bytes where these are the elements
    is_fp8: bool
    #: All strides in bytes, or-ed.
    q_bits: int
    cache_bits: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def _strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Raises ValueError unless the last dimension is contiguous."""
    if strides[-1] != 1 and 0 not in shape:
        check.fail(name, "contiguous along its last dimension", f"strides {tuple(strides)} (in elements)")
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape[:-1], strides, strict=False))


def _bits(strides: tuple[int, ...], item: int) -> int:
    return functools.reduce(operator.or_, (stride * item for stride in strides))


@functools.lru_cache(maxsize=4096)
def _sizes(
    dtype: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    cache_dtype: str,
    cache_shape: tuple[int, ...],
    cache_strides: tuple[int, ...],
    head_dim_v: int,
    is_fp8: bool,
) -> _Sizes:
    """Check q, k_cache and head_dim_v against each other."""
    batch, query_tokens, heads, head_dim = shape
    check.dtype("k_cache", cache_dtype, FP8_DTYPES if is_fp8 else (dtype,))
    symbols = "pages", "page_size", "kv_heads", "slot_bytes" if is_fp8 else "head_dim"
    if len(cache_shape) != 4:
        check.dimensions("k_cache", cache_shape, symbols)
    if head_dim % 16 or not 16 <= head_dim <= MAX_DIM:
        check.fail("q", f"of a head_dim that is a multiple of 16 in [16, {MAX_DIM}]", head_dim)
    if is_fp8 and head_dim != MAX_DIM:
        check.fail("q", f"of a head_dim of {MAX_DIM} with is_fp8_kvcache", head_dim)
    if is_fp8 and head_dim_v != twin.LATENT:
        check.fail("head_dim_v", f"{twin.LATENT} with is_fp8_kvcache", head_dim_v)
    if head_dim_v % 16 or not 16 <= head_dim_v <= head_dim:
        check.fail("head_dim_v", f"a multiple of 16 in [16, {head_dim}] (head_dim of q)", head_dim_v)
    pages, page_size, kv_heads, _ = cache_shape
    wanted = (pages, page_size, kv_heads, SLOT_BYTES if is_fp8 else head_dim)
    check.shape("k_cache", cache_shape, wanted, f"[{', '.join(symbols)}]")
    if page_size % 16 or not 16 <= page_size <= MAX_PAGE_SIZE:
        check.fail("k_cache", f"of pages of a multiple of 16 tokens, at most {MAX_PAGE_SIZE}", page_size)
    if not 1 <= kv_heads <= MAX_GRID:
        check.fail("k_cache", f"of at least one and at most {MAX_GRID} kv heads", kv_heads)
    if heads < 1 or heads % kv_heads:
        check.fail("q", f"of a multiple of {kv_heads} heads (kv_heads of k_cache), and at least one", heads)
    if batch * query_tokens * heads > MAX_COUNT:
        check.fail("q", f"of at most {MAX_COUNT} rows in all", list(shape))
    if pages > MAX_COUNT:
        check.fail("k_cache", f"of at most {MAX_COUNT} pages", pages)
    q_strides = _strides("q", shape, strides)
    cache_strides = _strides("k_cache", cache_shape, cache_strides)
    return _Sizes(
        batch,
        query_tokens,
        heads,
        head_dim,
        head_dim_v,
        pages,
        page_size,
        kv_heads,
        q_strides,
        cache_strides,
        is_fp8,
        _bits(q_strides, arrays.ITEM_SIZE[dtype]),
        _bits(cache_strides, 1 if is_fp8 else arrays.ITEM_SIZE[dtype]),
    )


def _check_alignment(sizes: _Sizes, q: int, k_cache: int) -> None:
    """Raises ValueError unless all rows begin at multiples of 16 bytes."""
    for name, bits, address, strides in (
        ("q", sizes.q_bits, q, sizes.q_strides),
        ("k_cache", sizes.cache_bits, k_cache, sizes.cache_strides),
    ):
        if (bits | address) % 16:
            got = f"address {address:#x} and strides {strides} (in elements)"
            check.fail(name, "at a multiple of 16 bytes, and so its strides", got)


class _Schedule(NamedTuple):
    """What a plan is made for."""

    parts: int
    sequences: int
    topk: int  # tokens of every sequence; -1: those that the lengths say


@functools.lru_cache(maxsize=1024)
def _schedule(batch: int, query_tokens: int, heads: int, kv_heads: int, topk: int, device: int | None) -> _Schedule:
    """For `topk` < 0 rows of all query tokens share a sequence, else each query token is one of its own."""
    count = twin.MULTIPROCESSORS if device is None else multiprocessors(device)
    rows = heads // kv_heads * (query_tokens if topk < 0 else 1)
    return _Schedule(twin.parts_of(rows, kv_heads, count), batch * (query_tokens if topk >= 0 else 1), topk)


@functools.lru_cache(maxsize=1024)
def _metadata_schedule(
    batch: int,
    num_heads_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None,
    topk: int | None,
    device: int | None,
) -> _Schedule:
    """Check the sizes that `get_mla_metadata` was given."""
    query_tokens, heads = 1, num_heads_per_head_k * num_heads_k
    if num_heads_q is not None:
        if num_heads_q % num_heads_k:
            check.fail("num_heads_q", f"a multiple of num_heads_k ({num_heads_k})", num_heads_q)
        if heads % num_heads_q:
            wanted = f"a divisor of num_heads_per_head_k * num_heads_k ({heads})"
            check.fail("num_heads_q", wanted, num_heads_q)
        query_tokens, heads = heads // num_heads_q, num_heads_q
    elif topk is not None:
        check.fail("num_heads_q", "given with topk", None)
    if batch * query_tokens > MAX_COUNT:
        check.fail("cache_seqlens", f"of at most {MAX_COUNT} sequences", batch * query_tokens)
    return _schedule(batch, query_tokens, heads, num_heads_k, -1 if topk is None else topk, device)


def _launch_plan(schedule: _Schedule, lengths: int, metadata: int, splits: int, device: int, stream: int) -> None:
    """Make a plan; the arrays by their addresses."""
    sequences, parts, topk = schedule.sequences, schedule.parts, schedule.topk
    lengths = lengths if topk < 0 else 0
    fields = lengths, metadata, splits, sequences, parts, max(topk, 0)
    _plan_kernel.variant().launch(device, stream, (1, 1, 1), (_THREADS, 1, 1), 0, *fields)


class _Launches(NamedTuple):
    """The kernels of a call and how they are launched."""

    attend: Variant
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    #: Of a tensor map: dimensions, strides and box; empty where none is used, None where the kernel takes none.
    tensor_map: tuple[tuple[int, ...], ...] | None
    combine: Variant
    combine_grid: tuple[int, int, int]
    #: The workspace, in elements of 4 bytes: where the partial lse, the metadata and the splits begin, and its size.
    lse_at: int
    metadata_at: int
    splits_at: int
    size: int


def _no_wgmma(sizes: _Sizes, is_sparse: bool, device: int) -> str:
    """Why the kernel for Hopper cannot do it, if so."""
    if arch_of_device(device) != "90a":
        return f"this GPU is of sm_{arch_of_device(device)}, not sm_90a"
    if (sizes.head_dim, sizes.head_dim_v) != (MAX_DIM, twin.LATENT):
        return f"heads are of {sizes.head_dim} and {sizes.head_dim_v}, not {MAX_DIM} and {twin.LATENT}"
    if sizes.is_fp8 or is_sparse:
        return ""
    if not sizes.pages:
        return "the cache has no pages"
    counts = sizes.kv_heads, sizes.page_size, sizes.pages
    for size, stride in zip(counts, reversed(sizes.cache_strides), strict=True):
        if size > 1 and not 0 < 2 * stride < _LARGEST_STRIDE:
            return f"k_cache has a stride of {stride} elements"
    return ""


def _tensor_map(sizes: _Sizes, is_sparse: bool) -> tuple[tuple[int, ...], ...]:
    """Of a cache, innermost dimensions first; none where tokens are converted or lie anywhere."""
    if sizes.is_fp8 or is_sparse:
        return ()
    dims = sizes.head_dim, sizes.kv_heads, sizes.page_size, sizes.pages
    # Where there is only one, any stride does but 0.
    strides = tuple(2 * (stride or sizes.head_dim) for stride in reversed(sizes.cache_strides))
    return dims, strides, (_WGMMA_COLUMNS, 1, math.gcd(sizes.page_size, BLOCK_TOKENS), 1)


@functools.lru_cache(maxsize=4096)
def _launches(
    dtype: str,
    sizes: _Sizes,
    schedule: _Schedule,
    has_plan: bool,
    is_steep: bool,
    variant: str,
    device: int,
) -> _Launches:
    """How a call runs; what depends on the lengths is left to the device."""
    check.one_of("variant", variant, VARIANTS)
    is_sparse = schedule.topk >= 0
    group_rows = sizes.group * (1 if is_sparse else sizes.query_tokens)
    dims = sizes.head_dim, sizes.head_dim_v
    reason = _no_wgmma(sizes, is_sparse, device)
    if not reason and not is_steep:
        reason = f"softmax_scale is below {_SMALLEST_SCALE:g}"
    # Few rows leave most of a product of 64 unused, and memory is what takes the time.
    is_wgmma = variant == "wgmma" or (
        variant == "auto" and not reason and group_rows > (_FEW_ROWS_FP8 if sizes.is_fp8 else _FEW_ROWS)
    )
    if variant == "wgmma" and reason:
        check.fail("variant", "'auto', 'mma' or 'dynamic' here", f"'wgmma': {reason}")
    if variant == "mma" and dims not in SPECIALIZED:
        got = f"'mma': there is none for heads of {dims[0]} and {dims[1]}"
        check.fail("variant", "'auto' or 'dynamic' here", got)
    tensor_map: tuple[tuple[int, ...], ...] | None = None
    if is_wgmma:
        attend = _wgmma_variant(dtype, sizes.is_fp8, is_sparse)
        threads, shared_bytes, rows = _WGMMA_THREADS, _WGMMA_SHARED_BYTES, _WGMMA_ROWS
        tensor_map = _tensor_map(sizes, is_sparse)
    else:
        # An 8-bit cache is of one kind.
        is_special = dims in SPECIALIZED and (variant != "dynamic" or sizes.is_fp8)
        form_dims = dims if is_special else (0, 0)
        form = _form(dtype, sizes.is_fp8, group_rows, form_dims, _shared_per_block(device))
        attend, threads, shared_bytes, rows = _attend_variant(form), _THREADS, form.shared_bytes, form.rows
    all_rows, chunks = schedule.sequences * sizes.kv_heads * group_rows, -(-sizes.head_dim_v // 128)
    if all_rows <= _FEW_COMBINED_ROWS[1]:
        combining = _MANY_BLOCKS if all_rows <= _FEW_COMBINED_ROWS[0] else _BLOCK
        combine_grid = schedule.sequences * group_rows, sizes.kv_heads, chunks if combining == _MANY_BLOCKS else 1
    else:
        # Where there are about as many sequences as parts, few are in several of them: most blocks have nothing to do.
        combining, most = _WARP, -(-group_rows // 8)
        if 2 * schedule.sequences > schedule.parts:
            most = min(most, _COMBINING_BLOCKS * multiprocessors(device) // (schedule.parts * sizes.kv_heads))
        combine_grid = max(most, 1), sizes.kv_heads, schedule.parts
    special_v = sizes.head_dim_v if dims in SPECIALIZED and variant != "dynamic" else 0
    slots = 2 * schedule.parts * sizes.kv_heads * group_rows
    lse_at = slots * sizes.head_dim_v
    metadata_at = -(-(lse_at + slots) // 8) * 8
    splits_at = metadata_at + 8 * schedule.parts
    return _Launches(
        attend,
        (-(-group_rows // rows), sizes.kv_heads, schedule.parts),
        threads,
        shared_bytes,
        tensor_map,
        _combine_variant(dtype, special_v, combining),
        combine_grid,
        lse_at,
        metadata_at,
        splits_at,
        metadata_at if has_plan else splits_at + schedule.sequences + 1,
    )


def _flag(name: str, value: Any) -> bool:
    if value is not True and value is not False:
        check.one_of(name, value, (False, True))
    return bool(value)


def _check_out(out: Any, library: arrays.Library, device: int | None, dtype: str, sizes: _Sizes) -> tuple[Any, Any]:
    """The arrays to write into, None where one is to be made."""
    shape = sizes.batch, sizes.query_tokens, sizes.heads, sizes.head_dim_v
    attended, lse, name = out, None, "out"
    if isinstance(out, (tuple, list)):
        if len(out) != 2:
            check.fail("out", "an array, or a pair (out, lse)", f"{len(out)} of them")
        (attended, lse), name = out, "out[0]"
        symbols = "[batch, heads, query_tokens]"
        lse_shape = sizes.batch, sizes.heads, sizes.query_tokens
        arrays.expect("out[1]", lse, "q", library, device, ("float32",), lse_shape, symbols)
    symbols = "[batch, query_tokens, heads, head_dim_v]"
    arrays.expect(name, attended, "q", library, device, (dtype,), shape, symbols)
    if device is not None and library.address(attended) % 16:
        check.fail(name, "at a multiple of 16 bytes", f"address {library.address(attended):#x}")
    return attended, lse


def _check_tables(
    block_table: Any, cache_seqlens: Any, batch: int, library: arrays.Library, device: int | None
) -> tuple[int, int]:
    """How many pages a row of the table names, and the distance between rows."""
    for name, array in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if array is None:
            check.fail(name, "an array, unless there are indices", None, TypeError)
    found = arrays.table("block_table", block_table, "q", library, device, batch, ("batch", "max_pages"))
    arrays.expect("cache_seqlens", cache_seqlens, "q", library, device, ("int32",), (batch,), "[batch]")
    return found


def _check_indices(
    indices: Any, sizes: _Sizes, library: arrays.Library, device: int | None
) -> tuple[int, tuple[int, ...]]:
    """How many slots each query token names, and the distances between sequences and query tokens."""
    arrays.same_place("indices", indices, "q", library, device)
    if library.dtype(indices) != "int32":
        check.dtype("indices", library.dtype(indices), ("int32",))
    if len(indices.shape) != 3:
        check.dimensions("indices", tuple(indices.shape), ("batch", "query_tokens", "topk"))
    topk = indices.shape[2]
    if topk > MAX_COUNT:
        check.fail("indices", f"of at most {MAX_COUNT} slots for each query token", topk)
    shape, symbols = (sizes.batch, sizes.query_tokens, topk), "[batch, query_tokens, topk]"
    check.shape("indices", tuple(indices.shape), shape, symbols)
    return topk, _strides("indices", shape, tuple(library.strides(indices)))


def _check_plan(metadata: Any, num_splits: Any, sequences: int, library: arrays.Library, device: int | None) -> int:
    """How many parts the caller's plan has."""
    if metadata is None or num_splits is None:
        given, missing = ("num_splits", "tile_scheduler_metadata")[:: 1 if metadata is None else -1]
        check.fail(missing, f"given, like {given} (or neither)", None, TypeError)
    arrays.same_place("tile_scheduler_metadata", metadata, "q", library, device)
    parts = metadata.shape[0] if len(metadata.shape) == 2 else 0
    symbols = "[parts, 8]"
    arrays.expect("tile_scheduler_metadata", metadata, "q", library, device, ("int32",), (parts, 8), symbols)
    if device is not None and library.address(metadata) % 16:
        check.fail("tile_scheduler_metadata", "at a multiple of 16 bytes", f"address {library.address(metadata):#x}")
    if not 1 <= parts <= MAX_GRID:
        check.fail("tile_scheduler_metadata", f"of 1 to {MAX_GRID} parts", parts)
    wanted = (sequences + 1,), "[sequences + 1]"
    arrays.expect("num_splits", num_splits, "q", library, device, ("int32",), *wanted)
    return parts


@arrays.takes_dlpack
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
    library, device, _ = arrays.leader("cache_seqlens", cache_seqlens, ("int32",), ("batch",))
    arrays.contiguous("cache_seqlens", cache_seqlens, library)
    num_heads_per_head_k = check.integer("num_heads_per_head_k", num_heads_per_head_k, 0, MAX_COUNT)
    num_heads_k = check.integer("num_heads_k", num_heads_k, 1, MAX_GRID)
    if num_heads_q is not None:
        num_heads_q = check.integer("num_heads_q", num_heads_q, 1, MAX_COUNT)
    if topk is not None:
        topk = check.integer("topk", topk, 0, MAX_COUNT)
    batch = cache_seqlens.shape[0]
    schedule = _metadata_schedule(batch, num_heads_per_head_k, num_heads_k, num_heads_q, topk, device)
    shapes = (schedule.parts, 8), (schedule.sequences + 1,)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            check.fail("out", "a pair (tile_scheduler_metadata, num_splits)", type(out).__name__, TypeError)
        symbols = "[parts, 8]", "[sequences + 1]"
        for i in range(2):
            arrays.expect(f"out[{i}]", out[i], "cache_seqlens", library, device, ("int32",), shapes[i], symbols[i])
    if device is None:
        sizes = num_heads_per_head_k, num_heads_k
        options = {"num_heads_q": num_heads_q, "topk": topk}
        return arrays.on_host(twin.get_mla_metadata, cache_seqlens, cache_seqlens, *sizes, out=out, **options)
    made = out or tuple(library.empty(shape, "int32", cache_seqlens) for shape in shapes)
    metadata, splits = map(library.address, made)
    stream = library.stream(device)
    _launch_plan(schedule, library.address(cache_seqlens), metadata, splits, device, stream)
    return made


@arrays.takes_dlpack
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
    library, device, dtype = arrays.leader("q", q, DTYPES, ("batch", "query_tokens", "heads", "head_dim"))
    arrays.same_place("k_cache", k_cache, "q", library, device)
    sizes = _sizes(
        dtype,
        q.shape,
        library.strides(q),
        library.dtype(k_cache),
        k_cache.shape,
        library.strides(k_cache),
        check.integer("head_dim_v", head_dim_v, 1),
        _flag("is_fp8_kvcache", is_fp8_kvcache),
    )
    causal = _flag("causal", causal)
    scale = sizes.head_dim**-0.5 if softmax_scale is None else check.number("softmax_scale", softmax_scale)
    if abs(scale) > _LARGEST_SCALE:
        check.fail("softmax_scale", f"of at most {_LARGEST_SCALE:g}", scale)
    max_pages, table_row, topk = 0, 0, -1
    index_strides: tuple[int, ...] = (0, 0)
    if indices is None:
        max_pages, table_row = _check_tables(block_table, cache_seqlens, sizes.batch, library, device)
    else:
        topk, index_strides = _check_indices(indices, sizes, library, device)
        if causal:
            check.fail("causal", "False with indices", True)
        block_table = cache_seqlens = None
    if attn_sink is not None:
        arrays.expect("attn_sink", attn_sink, "q", library, device, ("float32",), (sizes.heads,), "[heads]")
    schedule = _schedule(sizes.batch, sizes.query_tokens, sizes.heads, sizes.kv_heads, topk, device)
    if not (tile_scheduler_metadata is None and num_splits is None):
        parts = _check_plan(tile_scheduler_metadata, num_splits, schedule.sequences, library, device)
        schedule = schedule._replace(parts=parts)
    attended, lse = (None, None) if out is None else _check_out(out, library, device, dtype, sizes)
    if device is None:
        check.host_variant(variant, VARIANTS)
        inputs = q, k_cache, block_table, cache_seqlens, head_dim_v, None, None, softmax_scale, causal
        options = {"is_fp8_kvcache": is_fp8_kvcache, "indices": indices, "attn_sink": attn_sink}
        results = arrays.on_host(twin.flash_mla_with_kvcache, q, *inputs, **options)
        for array, result in ((attended, results[0]), (lse, results[1])):
            if array is not None:
                library.to_numpy(array)[...] = library.to_numpy(result)
        return results[0] if attended is None else attended, results[1] if lse is None else lse

    launches = _launches(dtype, sizes, schedule, num_splits is not None, scale >= _SMALLEST_SCALE, variant, device)
    address = library.address
    addresses = address(q), address(k_cache)
    _check_alignment(sizes, *addresses)
    if attended is None:
        attended = library.empty((sizes.batch, sizes.query_tokens, sizes.heads, sizes.head_dim_v), dtype, q)
    if lse is None:
        lse = library.empty((sizes.batch, sizes.heads, sizes.query_tokens), "float32", q)
    if not (sizes.batch and sizes.query_tokens):
        return attended, lse
    stream = library.stream(device)
    # Held until the last launch: else another thread that uses the stream could be given it before.
    workspace = library.empty((launches.size,), "float32", q)
    partial = address(workspace)
    lengths = 0 if cache_seqlens is None else address(cache_seqlens)
    if num_splits is None:
        plan = partial + 4 * launches.metadata_at, partial + 4 * launches.splits_at
        _launch_plan(schedule, lengths, *plan, device, stream)
    else:
        plan = address(tile_scheduler_metadata), address(num_splits)
    fields = (
        *addresses,
        0 if block_table is None else address(block_table),
        lengths,
        # That they are there counts, also if they are empty.
        0 if indices is None else address(indices) or addresses[0],
        0 if attn_sink is None else address(attn_sink),
        *plan,
        address(attended),
        address(lse),
        partial,
        partial + 4 * launches.lse_at,
        *sizes.q_strides,
        *sizes.cache_strides,
        table_row,
        *index_strides,
        sizes.batch,
        sizes.query_tokens,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.head_dim_v,
        sizes.pages,
        sizes.page_size,
        # A cache without pages has room for no token.
        max_pages if sizes.pages else 0,
        max(topk, 0),
        causal,
        schedule.parts,
        scale * _LOG2_E,
    )
    attend, grid, threads = launches.attend, launches.grid, (launches.threads, 1, 1)
    tiles = launches.tensor_map
    if tiles is None:
        attend.launch(device, stream, grid, threads, launches.shared_bytes, *fields)
    else:
        tensor_map, box_tokens = (encode(addresses[1], dtype, *tiles), tiles[2][2]) if tiles else (b"", 0)
        attend.launch(device, stream, grid, threads, launches.shared_bytes, tensor_map, *fields, box_tokens)
    if schedule.parts > 1:
        launches.combine.launch(device, stream, launches.combine_grid, (_THREADS, 1, 1), 0, *fields)
    return attended, lse


def _plan_results(
    cache_seqlens: Any,
    num_heads_per_head_k: int,
    num_heads_k: int,
    *,
    num_heads_q: int | None = None,
    topk: int | None = None,
) -> list[tuple[Any, Any, str]]:
    # Without caches: sizes may be symbols here.
    count = multiprocessors(cache_seqlens.get_device()) if cache_seqlens.is_cuda else twin.MULTIPROCESSORS
    sequences, rows = cache_seqlens.shape[0], num_heads_per_head_k
    if topk is not None and num_heads_q is not None:
        sequences = sequences * (num_heads_per_head_k * num_heads_k // num_heads_q)
        rows = num_heads_q // num_heads_k
    parts = twin.parts_of(rows, num_heads_k, count)
    return [(cache_seqlens, (parts, 8), "int32"), (cache_seqlens, (sequences + 1,), "int32")]


def _attention_results(q: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any, str]]:
    batch, query_tokens, heads, _ = q.shape
    head_dim_v = args[3] if len(args) > 3 else kwargs["head_dim_v"]
    dtype = str(q.dtype).removeprefix("torch.")
    return [(q, (batch, query_tokens, heads, head_dim_v), dtype), (q, (batch, heads, query_tokens), "float32")]


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    "get_mla_metadata(Tensor cache_seqlens, int num_heads_per_head_k, int num_heads_k, *, int? num_heads_q=None, "
    "int? topk=None) -> (Tensor tile_scheduler_metadata, Tensor num_splits)": _plan_results,
    "flash_mla_with_kvcache(Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, int head_dim_v, "
    "Tensor? tile_scheduler_metadata, Tensor? num_splits, float? softmax_scale=None, bool causal=False, *, "
    "bool is_fp8_kvcache=False, Tensor? indices=None, Tensor? attn_sink=None, str variant='auto') "
    "-> (Tensor attended, Tensor lse)": _attention_results,
}
