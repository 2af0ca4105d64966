"""The kernels of `moe_permute`, which of them takes a call, and the split of its work over blocks and warps."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from cukern.formats.quantized import BLOCK, SMALLEST
from cukern.runtime import arrays, check, template
from cukern.runtime.gpu import CLUSTERED_ARCHS, Gpu
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.template import Packer, packer
from cukern.runtime.units import divisor, unit_width, why_width

SUM_DTYPES = ("float32", "float16", "bfloat16")
SORT_VARIANTS = ("auto", "one_block", "many_blocks", "counted", "chunks", "clusters")
SUM_VARIANTS = ("auto", "specialized", "dynamic")
MAX_PAIRS = 2**30

#: The topk that have unpermute kernels of their own, each with its models.
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
_STAGED_ROWS = 2**13  # most rows that a block puts together in shared memory
# Parameters to tune on a GPU.
_ONE_BLOCK_PAIRS = 2048  # most pairs that one block sorts
_COUNT_AGAIN_PAIRS = 2**15  # most pairs that each of many blocks counts itself
_PAIRS_PER_BLOCK = 1024
_TURNS = 2  # turns of 32 pairs that a warp ranks; more where there are not enough warps
_MAX_BLOCKS = 128
_CHUNKS = (16, 64)  # chunks of 32 pairs that a block of sort_chunks ranks
_CLUSTER, _CLUSTER_CHUNKS = 8, 16  # blocks of a cluster, and the chunks of each
_CLUSTERED_PAIRS = 2**16  # most pairs that clusters sort
_ROWS_PER_BLOCK = 1024  # rows that a block of sort_chunks puts together at once
_PERMUTE_ITEMS = 4  # units per thread of permute_rows
_FEW_UNITS = 2**19  # with fewer units than these, one per thread
_UNPERMUTE_THREADS = 128

_ID_TYPE = {4: "unsigned", 8: "unsigned long long"}
_BITS = (5, 8, 12)
_CHUNK_BITS = (5, 8, 9)
#: sort_chunks has a thread for each expert.
_CHUNKED_EXPERTS = 512
registered = set(SPECIALIZED)
MAX_SPECIALIZED_TOPK = 64


#: Experts and ids of a call at which the compiler compares the shared memory.
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


# --- bytes of shared memory of a block; `mapped` is the size of the map, 0 without one -----------------


def _sort_bytes(experts: int, mapped: int, warps: int, staged: int) -> int:
    """`staged`: rows that a block of sort_pairs puts together, or 0."""
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
    # int64 ids, float32, odd widths and other topk are compiled when they are first used.
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


class Config(NamedTuple):
    """A kernel of a sort, as `cukern.runtime.launch` takes it."""

    variant: Variant
    block: tuple[int, int, int]
    shared_bytes: int
    pack: Packer
    reason: str


@dataclass(frozen=True, eq=False, slots=True)
class SortConfig:
    """What all sorts of a decision launch. `split_sort` adds what the numbers of pairs and rows decide."""

    variant: Variant
    pack: Packer
    reason: str
    #: The kernel that counts the pairs of each block first; None where there is none.
    counting: Config | None
    #: The chunks of a block of sort_chunks and the blocks of its clusters; None for sort_pairs.
    form: tuple[int, int] | None
    experts: int  # here
    mapped: int  # the size of the map, 0 without one
    one_block: bool


#: The values of each sort, in this order. The decision fixes all other fields.
SORT_FIELDS = (
    "pairs.topk_ids", "pairs.expert_map", "id_of", "offsets", "offsets_long", "rows", "inverse", "group_ids",
    "end_of_rows", "pairs.pairs", "capacity", "fill", "groups", "max_tokens", "counts", "pairs_per_block",
    "pairs_per_warp", "warps", "staged",
)  # fmt: skip

#: Up to each of these numbers of pairs another kernel may sort; the last one is past the most.
PAIRS_CLASSES = (
    *sorted({*(32 * n for n in _CHUNKS), _PAIRS_PER_BLOCK, _ONE_BLOCK_PAIRS, _COUNT_AGAIN_PAIRS, _CLUSTERED_PAIRS}),
    MAX_PAIRS,
    2**63,
)


def pairs_class(pairs: int) -> int:
    """The least of the classes that holds `pairs`: sorts of one class share a decision."""
    return PAIRS_CLASSES[bisect_left(PAIRS_CLASSES, pairs)]


@functools.lru_cache(maxsize=4096)
def choose_sort(
    dtype: str, topk: int, num_experts: int, experts: int, is_mapped: bool, gpu: Gpu, up_to_pairs: int,
    variant: str = "auto", block_size: int = 1, group_rows: int = 0, group_fill: int = 0,
) -> SortConfig:  # fmt: skip
    """The kernels of a sort.

    The ids have `dtype` and name `num_experts`; `experts` are here; `up_to_pairs` is a class of pairs. The rows are
    numbers of tokens of `topk` pairs, with topk 1 of pairs. The rows of each expert are padded to whole blocks of
    `block_size`. `group_rows` are the rows of an entry of group_ids, 0 without it; `group_fill` is what it has past all
    rows. Raises ValueError for a variant that does not take the call.
    """
    mapped = num_experts if is_mapped else 0
    form = form_of(variant, experts, mapped, group_rows in (0, block_size), gpu.arch, up_to_pairs)
    fields = {
        "pairs.global_experts": num_experts, "pairs.experts": experts, "topk": divisor(topk),
        "block_size": block_size, "by_block_size": divisor(block_size), "rows_per_block": _ROWS_PER_BLOCK,
        "group_rows": group_rows or 1, "group_fill": group_fill,
    }  # fmt: skip
    id_bytes = 8 if dtype == "int64" else 4
    asks = _asked(variant)
    if form:
        chunks, cluster = form
        taken = f"each block ranks all in chunks of 32 (up to {32 * chunks} pairs and {_CHUNKED_EXPERTS} experts)"
        if cluster > 1:
            taken = f"clusters of {cluster} blocks of {32 * chunks} pairs (up to {_CLUSTERED_PAIRS} pairs)"
        chosen, reason = chunks_variant(id_bytes, experts, *form), f"{asks}{{pairs[pairs]}} pairs: {taken}"
        return SortConfig(chosen, _packer(chosen, SORT_FIELDS, fields), reason, None, form, experts, mapped, False)
    one_block = variant == "one_block" or (variant == "auto" and up_to_pairs <= _ONE_BLOCK_PAIRS)
    most_uncounted = {"auto": _COUNT_AGAIN_PAIRS, "counted": _PAIRS_PER_BLOCK}.get(variant, MAX_PAIRS)
    blocks = "one block" if one_block else "{grid[0]} blocks of {pairs_per_block} pairs"
    reason = f"{asks}{{pairs[pairs]}} pairs: {blocks} (one block up to {_ONE_BLOCK_PAIRS} pairs)"
    counting = None
    if not one_block and up_to_pairs > most_uncounted:
        first = count_variant(id_bytes)
        why = f"first pass: each block counts its pairs (each counts all itself up to {most_uncounted} pairs)"
        threads, shared_bytes = min(_sort_threads(), _PAIRS_PER_BLOCK), _count_bytes(experts, mapped)
        counting = Config(first, (threads, 1, 1), shared_bytes, _packer(first, SORT_FIELDS, fields), why)
        reason = f"second pass; {reason}"
    chosen = sort_variant(id_bytes, experts)
    return SortConfig(chosen, _packer(chosen, SORT_FIELDS, fields), reason, counting, None, experts, mapped, one_block)


def form_of(variant: str, experts: int, mapped: int, fits: bool, arch: str, pairs: int) -> tuple[int, int] | None:
    """The chunks of a block of sort_chunks and the blocks of its clusters; None where sort_pairs sorts.

    `fits`: no group has a row without a pair, which sort_chunks would not write. Raises ValueError where the variant
    asks for sort_chunks, which does not take the call.
    """
    if variant not in ("auto", "chunks", "clusters"):
        return None
    fits = fits and experts <= _CHUNKED_EXPERTS
    most_shared = functools.partial(_shared_bytes_of_chunks, experts, mapped)
    if fits and variant != "clusters":
        for chunks in _CHUNKS:
            if pairs <= 32 * chunks and most_shared(chunks, 1) <= _MAX_CHUNKED_BYTES:
                return chunks, 1
    clustered = _CLUSTER_CHUNKS, _CLUSTER
    fits = fits and arch in CLUSTERED_ARCHS and most_shared(*clustered) <= _MAX_CHUNKED_BYTES
    if fits and variant != "chunks" and pairs <= _CLUSTERED_PAIRS:
        return clustered
    if variant != "auto":
        most = {"chunks": 32 * _CHUNKS[-1], "clusters": _CLUSTERED_PAIRS}[variant]
        on = " and a GPU with clusters" if variant == "clusters" else ""
        wanted = f"another one, or at most {most} pairs and {_CHUNKED_EXPERTS} experts, blocks of rows{on}"
        check.fail("variant", wanted, f"{variant!r} with {pairs} pairs and {experts} experts on {arch}")
    return None


def _asked(variant: str) -> str:
    """The beginning of the reason for a kernel that the caller asks for; empty for "auto"."""
    return "" if variant == "auto" else f"variant={variant!r} asks for it; "


def _packer(variant: Variant, names: tuple[str, ...], fields: dict[str, Any]) -> Packer:
    return packer(variant.instance.file, variant.instance.function, names, fields)


def _sort_threads() -> int:
    return template.constants(_sort.file)["SORT_THREADS"]


class Split(NamedTuple):
    """How the pairs of a sort are split over its blocks and warps."""

    blocks: int
    threads: int
    shared_bytes: int
    pairs_per_block: int
    pairs_per_warp: int
    warps: int  # warps of a block that rank pairs
    capacity: int
    staged: int  # 1: one block puts `rows` together in shared memory


def _blocks_of(pairs: int) -> tuple[int, int]:
    """The blocks that share many pairs, and the pairs of each."""
    per_block = max(_PAIRS_PER_BLOCK, -(-pairs // (_MAX_BLOCKS * 32)) * 32)
    return max(1, -(-pairs // per_block)), per_block


def split_pairs(experts: int, mapped: int, one_block: bool, most_threads: int, pairs: int, capacity: int) -> Split:
    """The split of `pairs` pairs.

    `mapped` is the size of the map, 0 without one; `capacity` that of `rows`, 0 where the kernel does not write it.
    """
    fixed = _sort_bytes(experts, mapped, 0, 0)
    most_warps = min(most_threads // 32, (_MAX_SHARED_BYTES - fixed) // (4 * (experts + 1)))
    if one_block:
        per_block, blocks = max(pairs, 1), 1
        warps = min(most_warps, -(-per_block // 32))
    else:
        blocks, per_block = _blocks_of(pairs)
        warps = min(most_warps, -(-per_block // (32 * _TURNS)))
    per_warp = -(-per_block // (32 * warps)) * 32
    threads = most_threads if blocks > 1 else min(most_threads, max(warps * 32, -(-experts // 32) * 32, 128))
    shared_bytes = _sort_bytes(experts, mapped, warps, capacity)
    staged = blocks == 1 and 0 < capacity <= _STAGED_ROWS and shared_bytes <= _MAX_SHARED_BYTES
    if not staged:
        shared_bytes = _sort_bytes(experts, mapped, warps, 0)
    return Split(blocks, threads, shared_bytes, per_block, per_warp, warps, capacity, int(staged))


class Chunked(NamedTuple):
    """The launch of sort_chunks."""

    blocks: int
    threads: int
    shared_bytes: int
    capacity: int


def split_chunks(experts: int, mapped: int, chunks: int, cluster: int, pairs: int, capacity: int) -> Chunked:
    """The launch for `pairs` pairs in clusters of `cluster` blocks, or 1; the others are as in `split_pairs`."""
    of_pairs = -(-pairs // 32)
    if cluster > 1:
        blocks, warps = max(1, -(-of_pairs // (chunks * cluster))) * cluster, 16
    else:
        blocks = min(_MAX_BLOCKS, max(1, -(-capacity // _ROWS_PER_BLOCK)))
        warps = 16 if chunks > 16 else max(1, min(of_pairs, 16), -(-experts // 32))
    return Chunked(blocks, 32 * warps, _shared_bytes_of_chunks(experts, mapped, chunks, cluster), capacity)


@functools.lru_cache(maxsize=4096)
def split_sort(config: SortConfig, pairs: int, capacity: int) -> tuple[Config, tuple[int, int, int], tuple[int, ...]]:
    """The kernel and the grid of a sort, and the values of its last fields; `capacity` is as in `split_pairs`."""
    variant, pack, reason, experts, mapped = config.variant, config.pack, config.reason, config.experts, config.mapped
    own: tuple[int, ...] = 0, 0, 0, 0
    split: Split | Chunked
    if config.form:
        split = split_chunks(experts, mapped, *config.form, pairs, capacity)
    else:
        split = split_pairs(experts, mapped, config.one_block, _sort_threads(), pairs, capacity)
        own = split.pairs_per_block, split.pairs_per_warp, split.warps, split.staged
    return Config(variant, (split.threads, 1, 1), split.shared_bytes, pack, reason), (split.blocks, 1, 1), own


def sort_workspace(config: SortConfig, pairs: int) -> tuple[int, ...]:
    """The bytes of each part of the workspace of a sort."""
    return () if config.counting is None else (_blocks_of(pairs)[0] * config.experts * 4,)


# --- rows ---------------------------------------------------------------------------------------------


class RowsConfig(NamedTuple):
    """What all calls of a decision on rows launch. Each adds its arrays, its grid and its numbers."""

    variant: Variant
    block: tuple[int, int, int]  # in y a token each; fewer where a call has fewer tokens
    shared_bytes: int
    pack: Packer
    reason: str
    blocks: int  # of the same tokens
    unit: int  # elements of a unit of loads and stores


PERMUTE_FIELDS = ("src", "inverse", "out", "scale", "out_scale", "row_stride", "scale_stride", "rows", "tiling.tokens")
QUANTIZED_FIELDS = ("src", "inverse", "out", "out_scale", "row_stride", "rows", "tiling.tokens")
SUM_FIELDS = ("src", "weights", "inverse", "offsets", "out", "row_stride", "rows", "tiling.tokens")


class Tiles(NamedTuple):
    """The split of a row of `columns` units over blocks, each of at most `threads` threads."""

    threads: tuple[int, int]  # along a row, and of tokens
    tile_columns: int
    chunks: int


def tile_rows(columns: int, threads: int, items: int) -> Tiles:
    """The tiles of rows whose threads have `items` units each, of one token."""
    chunks = max(1, -(-columns // (threads * items)))
    tile_columns = max(1, -(-columns // chunks))
    x = -(-tile_columns // items)
    return Tiles((x, threads // x), tile_columns, chunks)


def width_of(name: str, dtype: str, hidden: int, row_stride: int, *addresses: int) -> int:
    """The bytes of a unit of rows: the most, up to 16, that divide the addresses and the distances of rows.

    Raises ValueError with `name` for addresses that are not aligned to the elements.
    """
    item_size = arrays.ITEM_SIZE[dtype]
    return unit_width(name, functools.reduce(int.__or__, addresses, (hidden | row_stride) * item_size), item_size)


_COPIED_CLASSES = (0, *(_FEW_UNITS * width for width in (1, 2, 4, 8, 16)))


def copied_class(copied: int) -> int:
    """The largest class that is not above the bytes of all tokens: permutations of one class share a decision."""
    return _COPIED_CLASSES[bisect_right(_COPIED_CLASSES, copied) - 1]


@functools.lru_cache(maxsize=4096)
def choose_permute(dtype: str, hidden: int, topk: int, width: int, scale_columns: int, least_copied: int) -> RowsConfig:
    """The kernel that copies rows of `hidden` elements, and of their `scale_columns` scales, to `topk` places each.

    `width_of` gives `width`, and `copied_class` of the bytes of all tokens `least_copied`.
    """
    unit = width // arrays.ITEM_SIZE[dtype]
    columns = hidden // unit
    items = _PERMUTE_ITEMS if columns and least_copied >= _FEW_UNITS * width else 1
    each = f"{columns} units: {items} per thread ({_PERMUTE_ITEMS} from {_FEW_UNITS} units on)"
    reason = f"{{tiling[tokens]}} tokens of {each}; {why_width(width, 'the rows')}"
    threads = template.constants(_permute.file)["ROW_THREADS"]
    fields = {"topk": topk, "scale_columns": scale_columns}
    return _rows(permute_variant(width, items), PERMUTE_FIELDS, fields, columns, threads, items, unit, reason)


@functools.lru_cache(maxsize=4096)
def choose_permute_quantized(dtype: str, hidden: int, topk: int) -> RowsConfig:
    """The kernel that quantizes rows of `hidden` elements and writes each to `topk` places."""
    groups, lanes = hidden // BLOCK, 8  # of a group
    reason = f"one kernel for all sizes: {lanes} lanes quantize and write each of the {groups} groups of a row"
    threads = template.constants(_permute_quantized.file)["ROW_THREADS"] // lanes
    variant, fields = permute_quantized_variant(dtype), {"topk": topk, "smallest": float(SMALLEST)}
    config = _rows(variant, QUANTIZED_FIELDS, fields, groups, threads, 1, 1, reason)
    return config._replace(block=(config.block[0] * lanes, *config.block[1:]))


@functools.lru_cache(maxsize=4096)
def choose_unpermute(dtype: str, hidden: int, topk: int, width: int, variant: str = "auto") -> RowsConfig:
    """The kernel that adds up the `topk` rows of each token; `width_of` gives `width`.

    Raises ValueError for a variant that these sizes do not have.
    """
    unit = width // arrays.ITEM_SIZE[dtype]
    chosen, reason = sum_variant(dtype, topk, width, variant), _why_sum(dtype, topk, width, variant)
    return _rows(chosen, SUM_FIELDS, {"topk": topk}, hidden // unit, _UNPERMUTE_THREADS, 1, unit, reason)


def _rows(
    variant: Variant, names: tuple[str, ...], fields: dict[str, Any], columns: int, threads: int, items: int,
    unit: int, reason: str,
) -> RowsConfig:  # fmt: skip
    own, tile_columns, chunks = tile_rows(columns, threads, items)
    tiling = {"columns": columns, "tile_columns": tile_columns, "chunks": chunks, "by_chunks": divisor(chunks)}
    fields |= {f"tiling.{name}": value for name, value in tiling.items()}
    return RowsConfig(variant, (*own, 1), 0, _packer(variant, names, fields), reason, chunks, unit)


def sum_variant(dtype: str, topk: int, width: int, variant: str) -> Variant:
    check.one_of("variant", variant, SUM_VARIANTS)
    known = topk in registered and width == 16
    if variant == "specialized" and not known:
        why = f"there is none for topk {topk}, or the rows are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {why} (cukern.specialize adds one)")
    return unpermute_variant(dtype, width, topk if known and variant != "dynamic" else 0)


def _why_sum(dtype: str, topk: int, width: int, variant: str) -> str:
    """Why `sum_variant` takes an instance."""
    if topk in registered and width == 16 and variant != "dynamic":
        return f"{_asked(variant)}specialized for topk {topk} ({SPECIALIZED.get(topk, 'by cukern.specialize')})"
    if variant != "auto":
        return f"variant={variant!r} asks for it"
    if width < 16:
        return f"dynamic, {why_width(width, 'the rows')}"
    if topk > MAX_SPECIALIZED_TOPK:
        return f"dynamic: a specialized instance has a topk of at most {MAX_SPECIALIZED_TOPK}, not {topk}"
    call = f'cukern.specialize("moe_unpermute", topk={topk}, dtype={dtype!r})'
    return f"dynamic: no specialized instance has topk {topk}; {call} compiles one"
