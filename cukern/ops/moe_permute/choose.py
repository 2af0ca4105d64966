"""The kernels of `moe_permute`, how their work is divided among blocks and warps, and the launches.

A pair (token, slot) is a token and one of its topk experts. To rank a pair is to compute its row in the permuted array.
A chunk is 32 pairs. A vector is the bytes of one load or store of a thread.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check
from cukern.runtime.describe import Array, Result, expect_contiguous, expect_place, type_name
from cukern.runtime.gpu import CLUSTERED_ARCHS
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import asked, empty, launch, write_into
from cukern.runtime.vectors import ceil_div, divisor, vector_bytes, why_width

SUM_DTYPES = ("float32", "float16", "bfloat16")
SORT_VARIANTS = ("auto", "one_block", "many_blocks", "counted", "chunks", "clusters")
SUM_VARIANTS = ("auto", "specialized", "dynamic")
MAX_PAIRS = 2**30

#: {topk of a specialized unpermute kernel: models}
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
_STAGED_ROWS = 2**13  # up to this many rows of the result, one block collects them in shared memory
# Parameters to tune on a GPU.
_ONE_BLOCK_PAIRS = 2048  # up to this many pairs, a single block sorts
_COUNT_AGAIN_PAIRS = 2**15  # up to this many pairs, every block counts all pairs; above, count_pairs runs first
_PAIRS_PER_BLOCK = 1024
_ITERATIONS = 2  # iterations of a warp, of 32 pairs each; more if there are not enough warps
_MAX_BLOCKS = 128
_CHUNKS = (16, 64)  # chunks that a block of sort_chunks ranks
_CLUSTER, _CLUSTER_CHUNKS = 8, 16  # blocks per cluster, chunks per block
_CLUSTERED_PAIRS = 2**16  # up to this many pairs, sort_chunks sorts with clusters
_ROWS_PER_BLOCK = 1024  # of sort_chunks, at once
_PERMUTE_ITEMS = 4  # vectors per thread of permute_rows
_FEW_VECTORS = 2**19  # below this many vectors in all rows, a thread of permute_rows has one vector
_UNPERMUTE_THREADS = 128

_ID_TYPE = {4: "unsigned", 8: "unsigned long long"}
_BITS = (5, 8, 12)
_CHUNK_BITS = (5, 8, 9)
#: The limit for sort_chunks, because a block has one thread for each expert.
_CHUNKED_EXPERTS = 512
registered = set(SPECIALIZED)
MAX_SPECIALIZED_TOPK = 64


#: Example sizes (experts, size of the expert map), with which the compiler checks the shared memory.
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
    """Return the bytes of shared memory of sort_pairs. `staged`: how many rows a block collects there, or 0."""
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
    # Instances for int64 ids, float32, vectors below 16 bytes and other topk are compiled at their first use.
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
    blocks: int
    threads: int
    shared_bytes: int
    pairs_per_block: int
    pairs_per_warp: int
    warps: int  # warps per block that rank pairs
    capacity: int
    rows_in_shared: int  # 1 if there is one block, which collects the result `rows` in shared memory; else 0


@functools.lru_cache(maxsize=4096)
def split_pairs(experts: int, mapped: int, one_block: bool, max_threads: int, pairs: int, capacity: int) -> Split:
    """Divide the pairs among blocks and warps.

    `mapped` is the size of the expert map, or 0 without one. `capacity` is the size of the result `rows`, or 0.
    """
    fixed = _sort_bytes(experts, mapped, 0, 0)
    max_warps = min(max_threads // 32, (_MAX_SHARED_BYTES - fixed) // (4 * (experts + 1)))
    if one_block:
        per_block, blocks = max(pairs, 1), 1
        warps = min(max_warps, -(-per_block // 32))
    else:
        per_block = max(_PAIRS_PER_BLOCK, -(-pairs // (_MAX_BLOCKS * 32)) * 32)
        blocks = max(1, -(-pairs // per_block))
        warps = min(max_warps, -(-per_block // (32 * _ITERATIONS)))
    per_warp = -(-per_block // (32 * warps)) * 32
    threads = max_threads if blocks > 1 else min(max_threads, max(warps * 32, -(-experts // 32) * 32, 128))
    shared_bytes = _sort_bytes(experts, mapped, warps, capacity)
    rows_in_shared = blocks == 1 and 0 < capacity <= _STAGED_ROWS and shared_bytes <= _MAX_SHARED_BYTES
    if not rows_in_shared:
        shared_bytes = _sort_bytes(experts, mapped, warps, 0)
    return Split(blocks, threads, shared_bytes, per_block, per_warp, warps, capacity, int(rows_in_shared))


class Chunked(NamedTuple):
    blocks: int
    threads: int
    shared_bytes: int
    capacity: int


@functools.lru_cache(maxsize=4096)
def split_chunks(experts: int, mapped: int, chunks: int, cluster: int, pairs: int, capacity: int) -> Chunked:
    """Return the launch configuration of sort_chunks. `mapped` and `capacity` are as in `split_pairs`."""
    chunk_count = -(-pairs // 32)
    if cluster > 1:
        blocks, warps = max(1, -(-chunk_count // (chunks * cluster))) * cluster, 16
    else:
        blocks = min(_MAX_BLOCKS, max(1, -(-capacity // _ROWS_PER_BLOCK)))
        warps = 16 if chunks > 16 else max(1, min(chunk_count, 16), -(-experts // 32))
    return Chunked(blocks, 32 * warps, _shared_bytes_of_chunks(experts, mapped, chunks, cluster), capacity)


#: Defaults of the fields of sort_pairs' Params.
_NO_RESULTS = {
    **dict.fromkeys(("id_of", "offsets", "offsets_long", "rows", "inverse", "group_ids", "end_of_rows")),
    **dict.fromkeys(("fill", "groups", "group_fill", "max_tokens"), 0),
    "block_size": 1,
    "group_rows": 1,
    "topk": divisor(1),
}


def _chunk_config(
    topk_ids: Array, experts: int, mapped: int, variant: str, pairs: Any, results: dict[str, Any]
) -> tuple[int, int] | None:
    """Return (chunks per block, blocks per cluster) for sort_chunks, or None if sort_pairs is to be launched.

    Raises ValueError if the caller asks for sort_chunks but it cannot sort the pairs.
    """
    if variant not in ("auto", "chunks", "clusters"):
        return None
    # sort_chunks writes group_ids only for groups that have a pair, so sort_pairs is needed if a group can have only
    # padding rows.
    fits = experts <= _CHUNKED_EXPERTS and (
        results.get("group_ids") is None or results.get("group_rows", 1) == results["block_size"]
    )
    shared_bytes_of = functools.partial(_shared_bytes_of_chunks, experts, mapped)
    if fits and variant != "clusters":
        for chunks in _CHUNKS:
            if pairs <= 32 * chunks and shared_bytes_of(chunks, 1) <= _MAX_CHUNKED_BYTES:
                return chunks, 1
    clustered = _CLUSTER_CHUNKS, _CLUSTER
    fits = fits and topk_ids.gpu.arch in CLUSTERED_ARCHS and shared_bytes_of(*clustered) <= _MAX_CHUNKED_BYTES
    if fits and variant != "chunks" and pairs <= _CLUSTERED_PAIRS:
        return clustered
    if variant != "auto":
        max_pairs = {"chunks": 32 * _CHUNKS[-1], "clusters": _CLUSTERED_PAIRS}[variant]
        on = " and a GPU with clusters" if variant == "clusters" else ""
        wanted = f"another one, or at most {max_pairs} pairs and {_CHUNKED_EXPERTS} experts, blocks of rows{on}"
        check.fail("variant", wanted, f"{variant!r} with {pairs} pairs and {experts} experts on {topk_ids.gpu.arch}")
    return None


def _launch_chunks(
    topk_ids: Array,
    global_experts: int,
    experts: int,
    expert_map: Array | None,
    chunk_config: tuple[int, int],
    capacity: Any,
    results: dict[str, Any],
    asks: str,
) -> None:
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    mapped = 0 if expert_map is None else global_experts
    split = split_chunks(experts, mapped, *chunk_config, pairs, capacity)
    fields = _NO_RESULTS | results
    del fields["group_rows"]
    chunks, cluster = chunk_config
    taken = f"each block ranks all in chunks of 32 (up to {32 * chunks} pairs and {_CHUNKED_EXPERTS} experts)"
    if cluster > 1:
        taken = f"clusters of {cluster} blocks of {32 * chunks} pairs (up to {_CLUSTERED_PAIRS} pairs)"
    launch(
        chunks_variant(8 if topk_ids.dtype == "int64" else 4, experts, *chunk_config),
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
    """Launch the sort. `capacity` is as in `split_pairs`; `results` are fields of sort_pairs' Params."""
    check.one_of("variant", variant, SORT_VARIANTS)
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    mapped = 0 if expert_map is None else global_experts
    chunk_config = _chunk_config(topk_ids, experts, mapped, variant, pairs, results)
    asks = asked(variant, "; ")
    if chunk_config:
        _launch_chunks(topk_ids, global_experts, experts, expert_map, chunk_config, capacity, results, asks)
        return
    one_block = variant == "one_block" or (variant == "auto" and pairs <= _ONE_BLOCK_PAIRS)
    max_uncounted = {"auto": _COUNT_AGAIN_PAIRS, "counted": _PAIRS_PER_BLOCK}.get(variant, MAX_PAIRS)
    threads = _sort.constant("SORT_THREADS")
    split = split_pairs(experts, mapped, one_block, threads, pairs, capacity)
    pair_fields = (topk_ids, expert_map, pairs, global_experts, experts)
    id_bytes = 8 if topk_ids.dtype == "int64" else 4
    counts = None
    blocks = "one block" if one_block else f"{split.blocks} blocks of {split.pairs_per_block} pairs"
    why = f"{asks}{pairs} pairs: {blocks} (one block up to {_ONE_BLOCK_PAIRS} pairs)"
    if not one_block and pairs > max_uncounted:
        counts = empty((split.blocks, experts), "int32")
        launch(
            count_variant(id_bytes),
            split.blocks,
            min(threads, _PAIRS_PER_BLOCK),
            _count_bytes(experts, mapped),
            why=f"first pass: each block counts its pairs (each counts all itself up to {max_uncounted} pairs)",
            pairs=pair_fields,
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
        pairs=pair_fields,
        counts=counts,
        pairs_per_block=split.pairs_per_block,
        pairs_per_warp=split.pairs_per_warp,
        warps=split.warps,
        capacity=split.capacity,
        rows_in_shared=split.rows_in_shared,
        **_NO_RESULTS | results,
    )


def aligned_outputs(out: Any, topk_ids: Array, results: Sequence[Result]) -> tuple[Array, ...]:
    """Check `out` of `moe_align_block_size`, and return its arrays. The first two may be longer than the results."""
    if not isinstance(out, (tuple, list)) or len(out) != len(results):
        wanted = "a triple (sorted_token_ids, expert_ids, num_tokens_post_pad)"
        check.fail("out", wanted, type_name(out), TypeError)
    for i, (array, result) in enumerate(zip(out, results, strict=True)):
        name, (min_size,) = f"out[{i}]", result.shape
        expect_place(name, array, topk_ids, "topk_ids")
        check.dtype(name, array.dtype, (result.dtype,))
        check.dimensions(name, array.shape, ("rows", "blocks", "1")[i : i + 1])
        size = array.shape[0]
        if size < min_size or (i == 2 and size > 1):
            check.fail(name, f"of {'at least ' if i < 2 else ''}{int(min_size)} elements", int(size))
        if size > MAX_PAIRS:
            check.fail(name, f"of at most {MAX_PAIRS} elements", int(size))
        expect_contiguous(name, array)
    write_into(*out)
    return tuple(out)


# --- rows ---------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    blocks: Any
    threads: tuple[int, Any]
    tiling: dict[str, Any]


def tile_rows(tokens: Any, columns: int, threads: int, items: int) -> Tiles:
    """Divide rows of `columns` vectors among blocks. A thread handles `items` vectors of a row."""
    tiles = max(1, -(-columns // (threads * items)))
    tile_columns = max(1, -(-columns // tiles))
    x = -(-tile_columns // items)
    y = threads // x
    blocks = ceil_div(tokens, y) * tiles
    if y > 1 and tokens < y:
        y, blocks = tokens, tiles
    tiling = {"tokens": tokens, "columns": columns, "tile_columns": tile_columns, "tiles": tiles}
    return Tiles(blocks, (x, y), tiling | {"by_tiles": divisor(tiles)})


def _width(name: str, one: Array, other: Array, hidden: int, row_stride: int) -> int:
    """Return the largest vector size in bytes that divides the addresses and row strides of both arrays.

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
    """Copy the row of each token to the rows that `inverse` lists for it. There must be a token and a slot."""
    tokens, hidden = x.shape
    if not hidden and scale is None:
        return
    width = _width("hidden_states", x, out, hidden, row_stride)
    columns = hidden * x.item_size // width
    items = 1 if not columns or tokens < -(-_FEW_VECTORS // columns) else _PERMUTE_ITEMS
    tiles = tile_rows(tokens, columns, _permute.constant("ROW_THREADS"), items)
    each = f"{tokens} tokens of {columns} vectors: {items} per thread ({_PERMUTE_ITEMS} from {_FEW_VECTORS} vectors on)"
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
    """Quantize the row of each token into the rows that `inverse` lists for it. There must be a token and a slot."""
    groups, lanes = out_scale.shape[1], 8  # 8 lanes quantize the elements that share a scale
    tiles = tile_rows(x.shape[0], groups, _permute_quantized.constant("ROW_THREADS") // lanes, 1)
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
    if topk in registered and width == 16 and variant != "dynamic":
        return f"{asked(variant, '; ')}specialized for topk {topk} ({SPECIALIZED.get(topk, 'by cukern.specialize')})"
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
    """Sum the rows of each token. `row_stride` is the row stride of `src` in elements. `arrays` are more fields."""
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
