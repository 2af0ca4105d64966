"""`moe_permute`: its kernels, how their work is divided among blocks and warps, and the launches.

A pair (token, slot) stands for a token and one of its topk experts. The sort of the pairs by expert assigns each pair a
row of the permuted array. To rank a pair means to compute its row. The kernel sort_chunks ranks the pairs in chunks of
32 pairs. A unit is the data of one load or store of a thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check, template
from cukern.runtime.describe import Array, Result, expect_contiguous, expect_place, type_name
from cukern.runtime.gpu import CLUSTERED_ARCHS
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import asked, empty, launch, write_into
from cukern.runtime.vectors import ceil_div, divisor, vector_bytes, why_width

SUM_DTYPES = ("float32", "float16", "bfloat16")
SORT_VARIANTS = ("auto", "one_block", "many_blocks", "counted", "chunks", "clusters")
SUM_VARIANTS = ("auto", "specialized", "dynamic")
MAX_PAIRS = 2**30

#: The values of topk that have a specialized unpermute kernel, and models with this topk.
SPECIALIZED = {
    2: "Mixtral",
    4: "gpt-oss, Qwen1.5-MoE",
    6: "DeepSeek-V2, Kimi-VL",
    8: "DeepSeek-V3, Qwen3, Kimi-K2, OLMoE",
}

_count = Kernel("moe_permute/count_pairs", "count_pairs")
_sort = Kernel("moe_permute/sort_pairs", "sort_pairs")
_chunks = Kernel("moe_permute/sort_chunks", "sort_chunks")
_permute = Kernel("moe_permute/permute_rows", "permute_rows")
_permute_quantized = Kernel("moe_permute/permute_quantized", "permute_quantized")
_unpermute = Kernel("moe_permute/unpermute_rows", "unpermute_rows")

_MAX_SHARED_BYTES = 96 * 2**10
_MAX_CHUNKED_BYTES = 99 * 2**10
_STAGED_ROWS = 2**13  # up to this many rows of the result, a block collects them in shared memory
# Parameters to tune on a GPU.
_ONE_BLOCK_PAIRS = 2048  # up to this many pairs, a single block sorts
_COUNT_AGAIN_PAIRS = 2**15  # up to this many pairs, every block counts all pairs; above, a separate kernel counts first
_PAIRS_PER_BLOCK = 1024
_TURNS = 2  # groups of 32 pairs that a warp ranks one after the other; more groups if there are not enough warps
_MAX_BLOCKS = 128
_CHUNKS = (16, 64)  # the values of a template argument of sort_chunks: chunks of 32 pairs that a block ranks
_CLUSTER, _CLUSTER_CHUNKS = 8, 16  # blocks per cluster, and chunks that each block ranks
_CLUSTERED_PAIRS = 2**16  # up to this many pairs, sort_chunks sorts with clusters
_ROWS_PER_BLOCK = 1024  # rows of the result that a block of sort_chunks collects at once
_PERMUTE_ITEMS = 4  # units per thread of permute_rows
_FEW_UNITS = 2**19  # below this many units in all rows, a thread of permute_rows has one unit
_UNPERMUTE_THREADS = 128

_ID_TYPE = {4: "unsigned", 8: "unsigned long long"}
_BITS = (5, 8, 12)
_CHUNK_BITS = (5, 8, 9)
#: The largest number of experts for sort_chunks, because a block has one thread for each expert.
_CHUNKED_EXPERTS = 512
registered = set(SPECIALIZED)
MAX_SPECIALIZED_TOPK = 64


#: The pair (experts, size of the expert map) for which the compiler checks the shared memory.
_EXAMPLE = 20, 30


def sort_variant(id_bytes: int, experts: int) -> Variant:
    bits = next(b for b in _BITS if experts <= 1 << b)
    warps, staged = 3, 100
    at = *_EXAMPLE, warps, staged
    launched = Launched(0, _sort_bytes(*at), at, _MAX_SHARED_BYTES)
    return _sort.variant(_ID_TYPE[id_bytes], bits, launched=launched)


def chunks_variant(id_bytes: int, experts: int, chunks: int, cluster: int = 1) -> Variant:
    bits = next(b for b in _CHUNK_BITS if experts <= 1 << b)
    shared_bytes = _shared_bytes_of_chunks(*_EXAMPLE, chunks, cluster)
    launched = Launched(_CHUNKED_EXPERTS, shared_bytes, (*_EXAMPLE, _ROWS_PER_BLOCK), _MAX_CHUNKED_BYTES)
    return _chunks.variant(_ID_TYPE[id_bytes], bits, chunks, cluster, launched=launched)


def count_variant(id_bytes: int) -> Variant:
    launched = Launched(0, _count_bytes(*_EXAMPLE), _EXAMPLE, _MAX_SHARED_BYTES)
    return _count.variant(_ID_TYPE[id_bytes], launched=launched)


# --- shared memory per block in bytes; `mapped` is the size of the expert map, or 0 without one ---------


def _sort_bytes(experts: int, mapped: int, warps: int, staged: int) -> int:
    """Return the bytes for sort_pairs. `staged` is the number of rows that a block collects in shared memory, or 0."""
    return 4 * ((3 + warps) * (experts + 1) + (mapped + 1 if mapped else 0) + staged)


def _count_bytes(experts: int, mapped: int) -> int:
    return 4 * (experts + 1 + (mapped + 1 if mapped else 0))


@functools.cache
def _shared_bytes_of_chunks(experts: int, mapped: int, chunks: int, cluster: int) -> int:
    words = chunks // 4
    ints = 2 * experts * (words if words // 4 % 2 else words + 4) + (mapped + 1 if mapped else 0)
    return 4 * (ints + (3 * (experts + 1) + (cluster + 1) * experts if cluster > 1 else _ROWS_PER_BLOCK))


def permute_quantized_variant(dtype: str) -> Variant:
    return _permute_quantized.variant(arrays.CUDA_TYPE[dtype])


def permute_variant(width: int, items: int) -> Variant:
    return _permute.variant(width, items)


def unpermute_variant(dtype: str, width: int, topk: int) -> Variant:
    return _unpermute.variant(arrays.CUDA_TYPE[dtype], width, topk)


def _list_instances() -> None:
    # int64 ids, float32, odd widths and other topk are compiled at their first use.
    _sort.at_import = [sort_variant(4, experts).instance for experts in (32, 256)]
    _sort.specialized = [sort_variant(size, 1 << bits).instance for size in (4, 8) for bits in _BITS]
    few = [chunks_variant(4, experts, chunks).instance for experts in (32, 256) for chunks in _CHUNKS]
    clustered = [chunks_variant(4, experts, _CLUSTER_CHUNKS, _CLUSTER).instance for experts in (32, 256)]
    _chunks.at_import = _chunks.specialized = few + clustered
    _count.at_import = _count.specialized = [count_variant(4).instance]
    _permute.at_import = _permute.specialized = [permute_variant(16, items).instance for items in (1, _PERMUTE_ITEMS)]
    _unpermute.at_import = [unpermute_variant(d, 16, topk).instance for d in ("bfloat16", "float16") for topk in (8, 2)]
    _unpermute.specialized = [unpermute_variant(d, 16, topk).instance for d in SUM_DTYPES for topk in SPECIALIZED]
    variants = [permute_quantized_variant(dtype).instance for dtype in ("bfloat16", "float16")]
    _permute_quantized.at_import, _permute_quantized.specialized = variants[:1], variants


_list_instances()


# --- sorting ------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """How the pairs of a sort are divided among blocks and warps."""

    blocks: int
    threads: int
    shared_bytes: int
    pairs_per_block: int
    pairs_per_warp: int
    warps: int  # warps per block that rank pairs
    capacity: int
    staged: int  # 1 if there is one block, which collects the result `rows` in shared memory; else 0


@functools.lru_cache(maxsize=4096)
def split_pairs(experts: int, mapped: int, one_block: bool, most_threads: int, pairs: int, capacity: int) -> Split:
    """Return how `pairs` pairs are divided among blocks and warps.

    `mapped` is the size of the expert map, or 0 without one. `capacity` is the size of the result `rows`, or 0 if the
    kernel does not write `rows`.
    """
    fixed = _sort_bytes(experts, mapped, 0, 0)
    most_warps = min(most_threads // 32, (_MAX_SHARED_BYTES - fixed) // (4 * (experts + 1)))
    if one_block:
        per_block, blocks = max(pairs, 1), 1
        warps = min(most_warps, -(-per_block // 32))
    else:
        per_block = max(_PAIRS_PER_BLOCK, -(-pairs // (_MAX_BLOCKS * 32)) * 32)
        blocks = max(1, -(-pairs // per_block))
        warps = min(most_warps, -(-per_block // (32 * _TURNS)))
    per_warp = -(-per_block // (32 * warps)) * 32
    threads = most_threads if blocks > 1 else min(most_threads, max(warps * 32, -(-experts // 32) * 32, 128))
    shared_bytes = _sort_bytes(experts, mapped, warps, capacity)
    staged = blocks == 1 and 0 < capacity <= _STAGED_ROWS and shared_bytes <= _MAX_SHARED_BYTES
    if not staged:
        shared_bytes = _sort_bytes(experts, mapped, warps, 0)
    return Split(blocks, threads, shared_bytes, per_block, per_warp, warps, capacity, int(staged))


class Chunked(NamedTuple):
    """The launch configuration of sort_chunks."""

    blocks: int
    threads: int
    shared_bytes: int
    capacity: int


@functools.lru_cache(maxsize=4096)
def split_chunks(experts: int, mapped: int, chunks: int, cluster: int, pairs: int, capacity: int) -> Chunked:
    """Return the launch configuration for `pairs` pairs.

    `chunks` is the number of chunks that a block ranks. `cluster` is the number of blocks per cluster, or 1 without
    clusters. `mapped` and `capacity` are as in `split_pairs`.
    """
    of_pairs = -(-pairs // 32)
    if cluster > 1:
        blocks, warps = max(1, -(-of_pairs // (chunks * cluster))) * cluster, 16
    else:
        blocks = min(_MAX_BLOCKS, max(1, -(-capacity // _ROWS_PER_BLOCK)))
        warps = 16 if chunks > 16 else max(1, min(of_pairs, 16), -(-experts // 32))
    return Chunked(blocks, 32 * warps, _shared_bytes_of_chunks(experts, mapped, chunks, cluster), capacity)


#: Default values of the fields of sort_pairs' Params that only some functions set.
_NO_RESULTS = {
    **dict.fromkeys(("id_of", "offsets", "offsets_long", "rows", "inverse", "group_ids", "end_of_rows")),
    **dict.fromkeys(("fill", "groups", "group_fill", "max_tokens"), 0),
    "block_size": 1,
    "group_rows": 1,
    "topk": divisor(1),
}


def _form_of_chunks(
    topk_ids: Array, experts: int, mapped: int, variant: str, pairs: Any, results: dict[str, Any]
) -> tuple[int, int] | None:
    """Return a pair: the chunks that a block of sort_chunks ranks, and the blocks per cluster; None for sort_pairs.

    Raises ValueError if the caller asks for sort_chunks (variant "chunks" or "clusters") but it cannot sort the pairs.
    """
    if variant not in ("auto", "chunks", "clusters"):
        return None
    # sort_chunks writes group_ids only for groups that have a pair. If the groups are smaller than a block (in
    # `moe_permute` a group is a single row), padding rows need group_ids, too. In that case sort_pairs is used.
    fits = experts <= _CHUNKED_EXPERTS and (
        results.get("group_ids") is None or results.get("group_rows", 1) == results["block_size"]
    )
    most_shared = functools.partial(_shared_bytes_of_chunks, experts, mapped)
    if fits and variant != "clusters":
        for chunks in _CHUNKS:
            if pairs <= 32 * chunks and most_shared(chunks, 1) <= _MAX_CHUNKED_BYTES:
                return chunks, 1
    clustered = _CLUSTER_CHUNKS, _CLUSTER
    fits = fits and topk_ids.gpu.arch in CLUSTERED_ARCHS and most_shared(*clustered) <= _MAX_CHUNKED_BYTES
    if fits and variant != "chunks" and pairs <= _CLUSTERED_PAIRS:
        return clustered
    if variant != "auto":
        most = {"chunks": 32 * _CHUNKS[-1], "clusters": _CLUSTERED_PAIRS}[variant]
        on = " and a GPU with clusters" if variant == "clusters" else ""
        wanted = f"another one, or at most {most} pairs and {_CHUNKED_EXPERTS} experts, blocks of rows{on}"
        check.fail("variant", wanted, f"{variant!r} with {pairs} pairs and {experts} experts on {topk_ids.gpu.arch}")
    return None


def _launch_chunks(
    topk_ids: Array,
    global_experts: int,
    experts: int,
    expert_map: Array | None,
    form: tuple[int, int],
    capacity: Any,
    results: dict[str, Any],
    asks: str,
) -> None:
    """Launch sort_chunks. `form` is the pair from `_form_of_chunks`. The other arguments are as in `launch_sort`."""
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    mapped = 0 if expert_map is None else global_experts
    split = Chunked(*split_chunks(experts, mapped, *form, pairs, capacity))
    fields = _NO_RESULTS | results
    del fields["group_rows"]
    chunks, cluster = form
    taken = f"each block ranks all in chunks of 32 (up to {32 * chunks} pairs and {_CHUNKED_EXPERTS} experts)"
    if cluster > 1:
        taken = f"clusters of {cluster} blocks of {32 * chunks} pairs (up to {_CLUSTERED_PAIRS} pairs)"
    launch(
        chunks_variant(8 if topk_ids.dtype == "int64" else 4, experts, *form),
        split.blocks,
        split.threads,
        split.shared_bytes,
        why=f"{asks}{pairs} pairs: {taken}",
        pairs=(topk_ids, expert_map, pairs, global_experts, experts),
        capacity=split.capacity,
        rows_per_block=_ROWS_PER_BLOCK,
        by_block_size=divisor(fields["block_size"]),
        **fields,
    )


def launch_sort(
    topk_ids: Array,
    global_experts: int,
    experts: int,
    expert_map: Array | None,
    variant: str,
    capacity: Any = 0,
    **results: Any,
) -> None:
    """Launch the sort of the pairs. `capacity` is as in `split_pairs`; `results` are fields of sort_pairs' Params."""
    check.one_of("variant", variant, SORT_VARIANTS)
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    mapped = 0 if expert_map is None else global_experts
    form = _form_of_chunks(topk_ids, experts, mapped, variant, pairs, results)
    asks = f"{asked(variant)}; " if variant != "auto" else ""
    if form:
        _launch_chunks(topk_ids, global_experts, experts, expert_map, form, capacity, results, asks)
        return
    one_block = variant == "one_block" or (variant == "auto" and pairs <= _ONE_BLOCK_PAIRS)
    most_uncounted = {"auto": _COUNT_AGAIN_PAIRS, "counted": _PAIRS_PER_BLOCK}.get(variant, MAX_PAIRS)
    threads = template.constants(_sort.file)["SORT_THREADS"]
    split = Split(*split_pairs(experts, mapped, one_block, threads, pairs, capacity))
    of_pairs = (topk_ids, expert_map, pairs, global_experts, experts)
    id_bytes = 8 if topk_ids.dtype == "int64" else 4
    counts = None
    blocks = "one block" if one_block else f"{split.blocks} blocks of {split.pairs_per_block} pairs"
    why = f"{asks}{pairs} pairs: {blocks} (one block up to {_ONE_BLOCK_PAIRS} pairs)"
    if not one_block and pairs > most_uncounted:
        counts = empty((split.blocks, experts), "int32")
        launch(
            count_variant(id_bytes),
            split.blocks,
            min(threads, _PAIRS_PER_BLOCK),
            _count_bytes(experts, mapped),
            why=f"first pass: each block counts its pairs (each counts all itself up to {most_uncounted} pairs)",
            pairs=of_pairs,
            counts=counts,
            pairs_per_block=split.pairs_per_block,
        )
        why = f"second pass; {why}"
    launch(
        sort_variant(id_bytes, experts),
        split.blocks,
        split.threads,
        split.shared_bytes,
        why=why,
        pairs=of_pairs,
        counts=counts,
        pairs_per_block=split.pairs_per_block,
        pairs_per_warp=split.pairs_per_warp,
        warps=split.warps,
        capacity=split.capacity,
        staged=split.staged,
        **_NO_RESULTS | results,
    )


def aligned_outputs(out: Any, topk_ids: Array, results: Sequence[Result]) -> tuple[Array, ...]:
    """Check the argument `out` of `moe_align_block_size`, and return its arrays. The first two may be longer.

    Raises TypeError and ValueError for arrays that do not fit.
    """
    if not isinstance(out, (tuple, list)) or len(out) != len(results):
        wanted = "a triple (sorted_token_ids, expert_ids, num_tokens_post_pad)"
        check.fail("out", wanted, type_name(out), TypeError)
    for i, (array, result) in enumerate(zip(out, results, strict=True)):
        name, (least,) = f"out[{i}]", result.shape
        expect_place(name, array, topk_ids, "topk_ids")
        check.dtype(name, array.dtype, (result.dtype,))
        check.dimensions(name, array.shape, ("rows", "blocks", "1")[i : i + 1])
        size = array.shape[0]
        if size < least or (i == 2 and size > 1):
            check.fail(name, f"of {'at least ' if i < 2 else ''}{int(least)} elements", int(size))
        if size > MAX_PAIRS:
            check.fail(name, f"of at most {MAX_PAIRS} elements", int(size))
        expect_contiguous(name, array)
    write_into(*out)
    return tuple(out)


# --- rows ---------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """How rows are divided among blocks, and the fields of the template's struct Tiling."""

    blocks: Any
    threads: tuple[int, Any]
    tiling: dict[str, Any]


def tile_rows(tokens: Any, columns: int, threads: int, items: int) -> Tiles:
    """Divide rows of `columns` units among blocks of at most `threads` threads. A thread has `items` units of a row."""
    chunks = max(1, -(-columns // (threads * items)))
    tile_columns = max(1, -(-columns // chunks))
    x = -(-tile_columns // items)
    y = threads // x
    blocks = ceil_div(tokens, y) * chunks
    if y > 1 and tokens < y:
        y, blocks = tokens, chunks
    tiling = {"tokens": tokens, "columns": columns, "tile_columns": tile_columns, "chunks": chunks}
    return Tiles(blocks, (x, y), tiling | {"by_chunks": divisor(chunks)})


def _width(name: str, one: Array, other: Array, hidden: int, row_stride: int) -> int:
    """Return the bytes of the widest unit that divides the addresses and row strides of both arrays.

    `row_stride` is the row stride of `one` in elements. `other` is contiguous.
    """
    mask = one.alignment | other.alignment | (hidden | row_stride) * one.item_size
    return vector_bytes(name, mask, one.item_size)


def launch_permute(
    x: Array,
    row_stride: int,
    inverse: Array,
    topk: int,
    out: Array,
    scale: Array | None = None,
    out_scale: Array | None = None,
) -> None:
    """Copy the row of each token to the result rows that `inverse` lists for the token.

    There must be at least one token and one slot.
    """
    tokens, hidden = x.shape
    if not hidden and scale is None:
        return
    width = _width("hidden_states", x, out, hidden, row_stride)
    columns = hidden * x.item_size // width
    items = 1 if not columns or tokens < -(-_FEW_UNITS // columns) else _PERMUTE_ITEMS
    tiles = tile_rows(tokens, columns, template.constants(_permute.file)["ROW_THREADS"], items)
    each = f"{tokens} tokens of {columns} units: {items} per thread ({_PERMUTE_ITEMS} from {_FEW_UNITS} units on)"
    launch(
        permute_variant(width, items),
        tiles.blocks,
        tiles.threads,
        why=f"{each}; {why_width(width, 'the rows')}",
        src=x,
        inverse=inverse,
        out=out,
        scale=scale,
        out_scale=out_scale,
        row_stride=row_stride * x.item_size // width,
        scale_stride=0 if scale is None else scale.strides[0],
        topk=topk,
        rows=out.shape[0],
        scale_columns=0 if scale is None else scale.shape[1],
        tiling=tiles.tiling,
    )


def launch_permute_quantized(
    x: Array, row_stride: int, inverse: Array, topk: int, out: Array, out_scale: Array, smallest: float
) -> None:
    """Quantize the row of each token, and write it to the result rows that `inverse` lists for the token.

    There must be at least one token and one slot.
    """
    groups, lanes = out_scale.shape[1], 8  # 8 lanes quantize one group of elements that share a scale
    tiles = tile_rows(x.shape[0], groups, template.constants(_permute_quantized.file)["ROW_THREADS"] // lanes, 1)
    launch(
        permute_quantized_variant(x.dtype),
        tiles.blocks,
        (tiles.threads[0] * lanes, tiles.threads[1]),
        why=f"one kernel for all sizes: {lanes} lanes quantize and write each of the {groups} groups of a row",
        src=x,
        inverse=inverse,
        out=out,
        out_scale=out_scale,
        row_stride=row_stride * x.item_size,
        topk=topk,
        rows=out.shape[0],
        smallest=smallest,
        tiling=tiles.tiling,
    )


def sum_variant(dtype: str, topk: int, width: int, variant: str) -> Variant:
    check.one_of("variant", variant, SUM_VARIANTS)
    known = topk in registered and width == 16
    if variant == "specialized" and not known:
        why = f"there is none for topk {topk}, or the rows are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {why} (cukern.specialize adds one)")
    return unpermute_variant(dtype, width, topk if known and variant != "dynamic" else 0)


def _why_sum(dtype: str, topk: int, width: int, variant: str) -> str:
    """Return the reason for the instance that `sum_variant` chooses."""
    if topk in registered and width == 16 and variant != "dynamic":
        asks = f"{asked(variant)}; " if variant != "auto" else ""
        return f"{asks}specialized for topk {topk} ({SPECIALIZED.get(topk, 'by cukern.specialize')})"
    if variant != "auto":
        return asked(variant)
    if width < 16:
        return f"dynamic, {why_width(width, 'the rows')}"
    if topk > MAX_SPECIALIZED_TOPK:
        return f"dynamic: a specialized instance has a topk of at most {MAX_SPECIALIZED_TOPK}, not {topk}"
    call = f'cukern.specialize("moe_unpermute", topk={topk}, dtype={dtype!r})'
    return f"dynamic: no specialized instance has topk {topk}; {call} compiles one"


def launch_sum(
    name: str, src: Array, rows: Any, row_stride: int, out: Array, topk: int, variant: str, **arrays: Any
) -> None:
    """Launch the sum over the rows of each token.

    `row_stride` is the row stride of `src` in elements. `arrays` are further fields of the kernel's parameters.
    """
    check.one_of("variant", variant, SUM_VARIANTS)
    tokens, hidden = out.shape
    if not hidden or tokens == 0:
        return
    width = _width(name, src, out, hidden, row_stride)
    tiles = tile_rows(tokens, hidden * out.item_size // width, _UNPERMUTE_THREADS, 1)
    launch(
        sum_variant(out.dtype, topk, width, variant),
        tiles.blocks,
        tiles.threads,
        why=_why_sum(out.dtype, topk, width, variant),
        src=src,
        out=out,
        row_stride=row_stride * out.item_size // width,
        topk=topk,
        rows=rows,
        tiling=tiles.tiling,
        **arrays,
    )
