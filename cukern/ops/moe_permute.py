"""Tokens grouped by expert for the grouped products of an MoE layer, and brought together again after them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from cukern.reference import moe_permute as twin
from cukern.runtime import arrays, check
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.units import divisor, unit_width

__all__ = [
    "moe_align_block_size",
    "moe_permute",
    "moe_sort",
    "moe_sort_batched",
    "moe_sum",
    "moe_unpermute",
    "permute_rows",
]

ID_DTYPES = ("int32", "int64", "uint32")
ROW_DTYPES = tuple(name for name in arrays.ITEM_SIZE if name != "bool")
SUM_DTYPES = ("float32", "float16", "bfloat16")
SORT_VARIANTS = ("auto", "one_block", "many_blocks", "counted")
SUM_VARIANTS = ("auto", "specialized", "dynamic")
#: Their counts, of each warp of a block, and the map of all must fit into shared memory.
MAX_EXPERTS = 4096
MAX_PAIRS = 2**30
MAX_BLOCK_SIZE = 2**15
MAX_HIDDEN = 2**24

#: The topk of the models that have unpermute kernels of their own.
SPECIALIZED = [
    2,  # Mixtral
    4,  # gpt-oss, Qwen1.5-MoE
    6,  # DeepSeek-V2, Kimi-VL
    8,  # DeepSeek-V3, Qwen3, Kimi-K2, OLMoE
]

_PAIRS, _TILING = "2P3i", "4iIi"
_count = Kernel("moe_permute", "count_pairs", f"{_PAIRS}Pi")
_sort = Kernel("moe_permute", "sort_pairs", f"{_PAIRS}8P11iIi")
_permute = Kernel("moe_permute", "permute_rows", f"5P2q3i{_TILING}")
_unpermute = Kernel("moe_permute", "unpermute_rows", f"5Pq2i{_TILING}")

_SORT_THREADS = 1024
_MAX_SHARED_BYTES = 96 * 2**10
_STAGED_ROWS = 2**13  # at most so many are put together in shared memory
# For tuning on a GPU.
_ONE_BLOCK_PAIRS = 2048  # up to so many, one block sorts
_COUNT_AGAIN_PAIRS = 2**15  # up to so many, each of many blocks counts all pairs itself
_PAIRS_PER_BLOCK = 1024
_ROUNDS = 2  # of 32 pairs, that a warp ranks; more where there are not enough warps
_MAX_BLOCKS = 128
_PERMUTE_THREADS, _PERMUTE_ITEMS = 256, 4
_FEW_UNITS = 2**19  # with fewer, a thread of permute_rows has one
_UNPERMUTE_THREADS = 128

_ID_TYPE = {4: "unsigned", 8: "unsigned long long"}
_ID_BYTES = {"int32": 4, "uint32": 4, "int64": 8}
_BITS = (5, 8, 12)
_registered = set(SPECIALIZED)


def _sort_variant(id_bytes: int, experts: int) -> Variant:
    bits = next(b for b in _BITS if experts <= 1 << b)
    return _sort.variant(_ID_TYPE[id_bytes], bits, max_shared_bytes=_MAX_SHARED_BYTES)


def _count_variant(id_bytes: int) -> Variant:
    return _count.variant(_ID_TYPE[id_bytes])


def _permute_variant(width: int, items: int) -> Variant:
    return _permute.variant(width, items)


def _unpermute_variant(dtype: str, width: int, topk: int) -> Variant:
    return _unpermute.variant(arrays.CUDA_TYPE[dtype], width, topk)


def _list_instances() -> None:
    # int64 ids, float32, odd widths and other topk are compiled when they are first used.
    _sort.at_import = [_sort_variant(4, experts).instance for experts in (32, 256)]
    _sort.specialized = [_sort_variant(size, 1 << bits).instance for size in (4, 8) for bits in _BITS]
    _count.at_import = _count.specialized = [_count_variant(4).instance]
    _permute.at_import = _permute.specialized = [_permute_variant(16, items).instance for items in (1, _PERMUTE_ITEMS)]
    _unpermute.at_import = [
        _unpermute_variant(d, 16, topk).instance for d in ("bfloat16", "float16") for topk in (8, 2)
    ]
    _unpermute.specialized = [_unpermute_variant(d, 16, topk).instance for d in SUM_DTYPES for topk in SPECIALIZED]


_list_instances()


def specialize(*, topk: int, dtype: str = "bfloat16") -> list[Instance]:
    """Give this topk an unpermute kernel of its own in this process and say which; see `cukern.specialize`."""
    check.one_of("dtype", dtype, SUM_DTYPES)
    check.integer("topk", topk, 1, 64)
    _registered.add(topk)
    _sum_plan.cache_clear()
    return [_unpermute_variant(dtype, 16, topk).instance]


# --- sorting ------------------------------------------------------------------------------------------


class _SortPlan(NamedTuple):
    """How a number of pairs is sorted, worked out once for each set of sizes."""

    variant: Variant
    counting: Variant | None
    blocks: int
    threads: int
    shared_bytes: int
    count_bytes: int
    pairs_per_block: int
    split: tuple[int, int, int]  # the fields of SortParams from pairs_per_block
    staged: int


@functools.lru_cache(maxsize=1024)
def _sort_plan(pairs: int, experts: int, mapped: int, id_bytes: int, capacity: int, variant: str) -> _SortPlan:
    """`mapped` is how many ids the map has that the kernel reads, `capacity` the rows it writes; 0 without."""
    check.one_of("variant", variant, SORT_VARIANTS)
    one_block = variant == "one_block" or (variant == "auto" and pairs <= _ONE_BLOCK_PAIRS)
    counted = variant == "counted" or (variant == "auto" and pairs > _COUNT_AGAIN_PAIRS)
    bins, map_entries = experts + 1, mapped + 1 if mapped else 0
    fixed = 3 * bins + map_entries
    most_warps = min(_SORT_THREADS // 32, (_MAX_SHARED_BYTES // 4 - fixed) // bins)
    if one_block:
        per_block, blocks = max(pairs, 1), 1
        warps = min(most_warps, -(-per_block // 32))
    else:
        per_block = max(_PAIRS_PER_BLOCK, -(-pairs // (_MAX_BLOCKS * 32)) * 32)
        blocks = max(1, -(-pairs // per_block))
        warps = min(most_warps, -(-per_block // (32 * _ROUNDS)))
    per_warp = -(-per_block // (32 * warps)) * 32
    threads = _SORT_THREADS if blocks > 1 else min(_SORT_THREADS, max(warps * 32, -(-experts // 32) * 32, 128))
    ints = fixed + warps * bins
    staged = blocks == 1 and 0 < capacity <= _STAGED_ROWS and ints + capacity <= _MAX_SHARED_BYTES // 4
    return _SortPlan(
        _sort_variant(id_bytes, experts),
        _count_variant(id_bytes) if counted and blocks > 1 else None,
        blocks,
        threads,
        4 * (ints + (capacity if staged else 0)),
        4 * (bins + map_entries),
        per_block,
        (per_block, per_warp, warps),
        int(staged),
    )


def _launch_sort(
    library: arrays.Library,
    device: int,
    topk_ids: Any,
    global_experts: int,
    experts: int,
    expert_map: int,
    variant: str,
    *,
    id_of: int = 0,
    offsets: int = 0,
    offsets_long: int = 0,
    rows: int = 0,
    inverse: int = 0,
    group_ids: int = 0,
    end_of_rows: int = 0,
    block_size: int = 1,
    capacity: int = 0,
    fill: int = 0,
    group_rows: int = 1,
    groups: int = 0,
    group_fill: int = 0,
    topk: int = 1,
    room: int = 0,
) -> None:
    """Arrays are addresses here, 0 where there is none."""
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    id_bytes = _ID_BYTES[library.dtype(topk_ids)]
    plan = _sort_plan(pairs, experts, global_experts if expert_map else 0, id_bytes, capacity, variant)
    stream = library.stream(device)
    of_pairs = (library.address(topk_ids) if pairs else 0, expert_map, pairs, global_experts, experts)
    counts = 0
    if plan.counting is not None:
        workspace = library.empty((plan.blocks, experts), "int32", topk_ids)
        counts = library.address(workspace)
        grid, block = (plan.blocks, 1, 1), (min(_SORT_THREADS, plan.pairs_per_block), 1, 1)
        plan.counting.launch(device, stream, grid, block, plan.count_bytes, *of_pairs, counts, plan.pairs_per_block)
    plan.variant.launch(
        device,
        stream,
        (plan.blocks, 1, 1),
        (plan.threads, 1, 1),
        plan.shared_bytes,
        *of_pairs,
        counts,
        id_of,
        offsets,
        offsets_long,
        rows,
        inverse,
        group_ids,
        end_of_rows,
        *plan.split,
        block_size,
        capacity,
        fill,
        group_rows,
        groups,
        group_fill,
        plan.staged,
        room,
        *divisor(topk),
    )


def _ids(topk_ids: Any) -> tuple[arrays.Library, int | None, int, int]:
    """The library, the device and the sizes of topk_ids, once it has been checked."""
    library, device, _ = arrays.leader("topk_ids", topk_ids, ID_DTYPES, ("tokens", "topk"))
    tokens, topk = topk_ids.shape
    if not topk:
        check.fail("topk_ids", "of at least one expert for each token", f"shape {list(topk_ids.shape)}")
    if tokens * topk > MAX_PAIRS:
        check.fail("topk_ids", f"of at most {MAX_PAIRS} ids", tokens * topk)
    if library.strides(topk_ids) != (topk, 1):
        arrays.contiguous("topk_ids", topk_ids, library)
    return library, device, tokens, topk


def _number_of_experts(name: str, value: Any, high: int = MAX_EXPERTS, why: str = "") -> int:
    return value if type(value) is int and 1 <= value <= high else check.integer(name, value, 1, high, why)


def _map(expert_map: Any, library: arrays.Library, device: int | None, num_experts: int, name: str) -> None:
    if expert_map is not None:
        arrays.expect("expert_map", expert_map, "topk_ids", library, device, ("int32",), (num_experts,), f"[{name}]")


def _experts(
    num_experts: int, expert_map: Any, num_local_experts: int | None, library: arrays.Library, device: int | None
) -> tuple[int, int]:
    """How many experts there are, and how many of them are here, once that has been checked."""
    num_experts = _number_of_experts("num_experts", num_experts)
    _map(expert_map, library, device, num_experts, "num_experts")
    if num_local_experts is not None:
        return num_experts, _number_of_experts("num_local_experts", num_local_experts, num_experts, "num_experts")
    if expert_map is not None:
        check.fail("num_local_experts", "given with expert_map", "None", TypeError)
    return num_experts, num_experts


@arrays.takes_dlpack
def moe_sort(
    topk_ids: Any,
    num_experts: int,
    *,
    expert_map: Any = None,
    num_local_experts: int | None = None,
    out: tuple[Any, Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any, Any]:
    """The pairs (token, slot) in the order of their experts, and of the pairs of one expert in their own order.

    One launch, a parallel counting sort; a second one that counts, where there are many pairs.

    Args:
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. An id outside of [0, num_experts), such as -1, has
            no expert.
        num_experts: how many experts the ids name, at most 4096.
        expert_map: int32 [num_experts]: the number here of each expert; one outside of [0, num_local_experts), such
            as -1, is not here.
        num_local_experts: how many experts are here; required with expert_map. Without it all are: num_experts.
        out: a triple to write into and return.
        variant: "auto", or by name: "one_block", "many_blocks" (each of which counts all pairs itself) or "counted"
            (the launch before counts). All give the same.

    Returns:
        expert_offsets int32 [experts + 1]: expert e has the rows from expert_offsets[e] to expert_offsets[e + 1].
        row_token int32 [tokens * topk]: the token of each row; 0 at and past expert_offsets[-1].
        inverse int32 [tokens, topk]: the row of each pair, -1 for one whose expert is not here.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    library, device, tokens, topk = _ids(topk_ids)
    num_experts, experts = _experts(num_experts, expert_map, num_local_experts, library, device)
    pairs = tokens * topk
    shapes = (experts + 1,), (pairs,), (tokens, topk)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 3:
            check.fail("out", "a triple (expert_offsets, row_token, inverse)", type(out).__name__, TypeError)
        symbols = "[experts + 1]", "[tokens * topk]", "[tokens, topk]"
        for i in range(3):
            arrays.expect(f"out[{i}]", out[i], "topk_ids", library, device, ("int32",), shapes[i], symbols[i])
    if device is None:
        check.host_variant(variant, SORT_VARIANTS)
        results = arrays.on_host(
            twin.moe_sort,
            topk_ids,
            topk_ids,
            num_experts,
            expert_map=expert_map,
            num_local_experts=num_local_experts,
            out=out,
        )
        return results if out is None else out
    if out is None:
        offsets, rows, inverse = (library.empty(shape, "int32", topk_ids) for shape in shapes)
        out = offsets, rows, inverse
    address = library.address
    _launch_sort(
        library,
        device,
        topk_ids,
        num_experts,
        experts,
        0 if expert_map is None else address(expert_map),
        variant,
        offsets=address(out[0]),
        rows=address(out[1]) if pairs else 0,
        inverse=address(out[2]) if pairs else 0,
        capacity=pairs,
        topk=topk,
    )
    return out


@arrays.takes_dlpack
def moe_sort_batched(
    topk_ids: Any,
    num_experts: int,
    max_tokens: int,
    *,
    expert_map: Any = None,
    num_local_experts: int | None = None,
    out: tuple[Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """Where the pairs (token, slot) go when every expert has room for `max_tokens` rows, in their own order.

    Args:
        topk_ids, num_experts, expert_map, num_local_experts, variant: as in `moe_sort`.
        max_tokens: the rows of each expert. Pairs for which an expert has no room are left out, the last ones first.
        out: a pair to write into and return.

    Returns:
        expert_num_tokens int32 [experts]: how many rows of each expert are taken.
        positions int32 [tokens, topk]: the row of each pair in [experts * max_tokens], -1 for one that has none. It is
            what `permute_rows` and `moe_unpermute` take.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    library, device, tokens, topk = _ids(topk_ids)
    num_experts, experts = _experts(num_experts, expert_map, num_local_experts, library, device)
    max_tokens = check.integer("max_tokens", max_tokens, 1, MAX_PAIRS // experts)
    pairs = tokens * topk
    shapes = (experts,), (tokens, topk)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            check.fail("out", "a pair (expert_num_tokens, positions)", type(out).__name__, TypeError)
        for i, symbols in enumerate(("[experts]", "[tokens, topk]")):
            arrays.expect(f"out[{i}]", out[i], "topk_ids", library, device, ("int32",), shapes[i], symbols)
    if device is None:
        check.host_variant(variant, SORT_VARIANTS)
        results = arrays.on_host(
            twin.moe_sort_batched,
            topk_ids,
            topk_ids,
            num_experts,
            max_tokens,
            expert_map=expert_map,
            num_local_experts=num_local_experts,
            out=out,
        )
        return results if out is None else out
    if out is None:
        out = library.empty(shapes[0], "int32", topk_ids), library.empty(shapes[1], "int32", topk_ids)
    _launch_sort(
        library,
        device,
        topk_ids,
        num_experts,
        experts,
        0 if expert_map is None else library.address(expert_map),
        variant,
        offsets=library.address(out[0]),
        inverse=library.address(out[1]) if pairs else 0,
        room=max_tokens,
    )
    return out


@arrays.takes_dlpack
def moe_align_block_size(
    topk_ids: Any,
    block_size: int,
    num_experts: int,
    expert_map: Any = None,
    pad_sorted_ids: bool = False,
    *,
    ignore_invalid_experts: bool = False,
    variant: str = "auto",
) -> tuple[Any, Any, Any]:
    """The pairs in the order of their experts, those of each expert padded to whole blocks of block_size rows.

    Args:
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. An id outside of [0, num_experts), such as -1, has
            no expert and is left out.
        block_size: rows of a block, at most 32768.
        num_experts: how many experts the ids name, at most 4096.
        expert_map: int32 [num_experts]: what expert_ids calls each expert, such as -1 for one that is not here.
        pad_sorted_ids: make sorted_token_ids a whole number of blocks.
        ignore_invalid_experts: with expert_map, leave out the pairs of an expert that it maps outside of
            [0, num_experts), instead of giving them blocks. The others then follow each other by their number here.
        variant: as in `moe_sort`; all give the same.

    Returns:
        sorted_token_ids int32 [rows]: the pair token * topk + slot of each row, and tokens * topk for one that pads.
            rows = tokens * topk + num_experts * (block_size - 1) is enough for any ids; with fewer pairs than experts,
            tokens * topk * block_size where that is less.
        expert_ids int32 [ceil(rows / block_size)]: the expert of each block, -1 past the last.
        num_tokens_post_pad int32 [1]: the rows of all blocks.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `moe_align_block_size`, with -1 for the experts of unused blocks, and in a stable order.
    """
    library, device, tokens, topk = _ids(topk_ids)
    num_experts = _number_of_experts("num_experts", num_experts)
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_SIZE:
        block_size = check.integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
    _map(expert_map, library, device, num_experts, "num_experts")
    pairs = tokens * topk
    rows = twin.aligned_rows(pairs, num_experts, block_size, pad_sorted_ids)
    if rows > MAX_PAIRS:
        check.fail("block_size", f"such that there are at most {MAX_PAIRS} rows", f"{block_size} with {rows} rows")
    if device is None:
        check.host_variant(variant, SORT_VARIANTS)
        return arrays.on_host(
            twin.moe_align_block_size,
            topk_ids,
            topk_ids,
            block_size,
            num_experts,
            expert_map,
            pad_sorted_ids,
            ignore_invalid_experts=ignore_invalid_experts,
        )
    groups = -(-rows // block_size)
    sorted_token_ids = library.empty((rows,), "int32", topk_ids)
    expert_ids = library.empty((groups,), "int32", topk_ids)
    num_tokens_post_pad = library.empty((1,), "int32", topk_ids)
    address = library.address
    mapping = 0 if expert_map is None else address(expert_map)
    _launch_sort(
        library,
        device,
        topk_ids,
        num_experts,
        num_experts,
        mapping if ignore_invalid_experts else 0,
        variant,
        id_of=0 if ignore_invalid_experts else mapping,
        rows=address(sorted_token_ids) if rows else 0,
        group_ids=address(expert_ids) if rows else 0,
        end_of_rows=address(num_tokens_post_pad),
        block_size=block_size,
        capacity=rows,
        fill=pairs,
        group_rows=block_size,
        groups=groups,
        group_fill=-1,
    )
    return sorted_token_ids, expert_ids, num_tokens_post_pad


# --- rows ---------------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    fields: tuple[int, ...]  # of Tiling


@functools.lru_cache(maxsize=1024)
def _tiles(tokens: int, columns: int, threads: int, items: int) -> _Tiles:
    """Blocks of at most `threads`, each with `items` units of one token."""
    chunks = max(1, -(-columns // (threads * items)))
    tile_columns = max(1, -(-columns // chunks))
    x = -(-tile_columns // items)
    y = min(threads // x, tokens)
    blocks = -(-tokens // y) * chunks
    return _Tiles((blocks, 1, 1), (x, y, 1), (tokens, columns, tile_columns, chunks, *divisor(chunks)))


class _SumPlan(NamedTuple):
    variant: Variant
    tiles: _Tiles
    width: int


@functools.lru_cache(maxsize=1024)
def _sum_plan(dtype: str, tokens: int, topk: int, hidden: int, width: int, variant: str) -> _SumPlan:
    check.one_of("variant", variant, SUM_VARIANTS)
    known = topk in _registered and width == 16
    if variant == "specialized" and not known:
        why = f"there is none for topk {topk}, or the rows are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {why} (cukern.specialize adds one)")
    chosen = _unpermute_variant(dtype, width, topk if known and variant != "dynamic" else 0)
    tiles = _tiles(tokens, hidden * arrays.ITEM_SIZE[dtype] // width, _UNPERMUTE_THREADS, 1)
    return _SumPlan(chosen, tiles, width)


def _hidden(name: str, hidden: int) -> None:
    if hidden > MAX_HIDDEN:
        check.fail(name, f"of a hidden size up to {MAX_HIDDEN}", hidden)


def _topk_of(name: str, inverse: Any, like: str, library: arrays.Library, device: int | None, tokens: int) -> int:
    """The slots of each token, once the array of the rows of all pairs has been checked."""
    arrays.same_place(name, inverse, like, library, device)
    shape = tuple(inverse.shape)
    if len(shape) == 1 and tokens and shape[0] % tokens == 0:
        topk = shape[0] // tokens
        wanted: tuple[int, ...] = (tokens * topk,)
    else:
        topk = shape[1] if len(shape) == 2 else 1
        wanted = (tokens, topk)
        if len(shape) == 1 and not tokens:
            wanted = (0,)
    arrays.expect(name, inverse, like, library, device, ("int32",), wanted, "[tokens, topk] or [tokens * topk]")
    return topk


def _launch_permute(
    library: arrays.Library,
    device: int,
    hidden_states: Any,
    row_stride: int,
    inverse: int,
    topk: int,
    out: Any,
    scale: Any = None,
    scale_stride: int = 0,
    out_scale: Any = None,
) -> None:
    tokens, hidden = hidden_states.shape
    rows = out.shape[0]
    if not (tokens and topk and rows and (hidden or scale is not None)):
        return
    item_size = arrays.ITEM_SIZE[library.dtype(hidden_states)]
    addresses = (library.address(hidden_states), library.address(out)) if hidden else (0, 0)
    mask = addresses[0] | addresses[1] | hidden * item_size | row_stride * item_size
    width = unit_width("hidden_states", mask, item_size)
    columns = hidden * item_size // width
    items = 1 if tokens * columns < _FEW_UNITS else _PERMUTE_ITEMS
    tiles = _tiles(tokens, columns, _PERMUTE_THREADS, items)
    _permute_variant(width, items).launch(
        device,
        library.stream(device),
        tiles.grid,
        tiles.block,
        0,
        addresses[0],
        inverse,
        addresses[1],
        0 if scale is None else library.address(scale),
        0 if scale is None else library.address(out_scale),
        row_stride * item_size // width,
        scale_stride,
        topk,
        rows,
        0 if scale is None else scale.shape[1],
        *tiles.fields,
    )


@arrays.takes_dlpack
def permute_rows(hidden_states: Any, inverse: Any, rows: int | None = None, *, out: Any = None) -> Any:
    """Each row of a matrix in all the rows that its token has: out[inverse[t, s]] = hidden_states[t].

    The rows are written from where they lie, so each of them is read once, whatever topk is. Rows of `out` that no
    pair has are not written.

    Args:
        hidden_states: [tokens, hidden] of any dtype, such as activations, or the scales of quantized ones; rows may
            be strided.
        inverse: int32 [tokens, topk] or [tokens * topk], from `moe_sort`. An entry outside of [0, rows) is left out.
        rows: how many rows the result has; tokens * topk by default.
        out: [rows, hidden] to write into and return.

    Returns:
        [rows, hidden], in the dtype and library and on the device of `hidden_states`; in host memory, rows that no pair
        has are 0 where `out` is not given.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    library, device, dtype = arrays.leader("hidden_states", hidden_states, ROW_DTYPES, ("tokens", "hidden"))
    tokens, hidden = hidden_states.shape
    _hidden("hidden_states", hidden)
    row_stride = arrays.row_stride("hidden_states", hidden_states, library)
    topk = _topk_of("inverse", inverse, "hidden_states", library, device, tokens)
    rows = _rows(rows, tokens * topk)
    shape = (rows, hidden)
    if out is not None:
        arrays.expect("out", out, "hidden_states", library, device, (dtype,), shape, "[rows, hidden]")
    if device is None:
        if out is None:
            return arrays.on_host(twin.permute_rows, hidden_states, hidden_states, inverse, rows)
        _on_host_in_place(twin.permute_rows, out, hidden_states, inverse, rows, out=out)
        return out
    if out is None:
        out = library.empty(shape, dtype, hidden_states)
    if tokens and topk:
        _launch_permute(library, device, hidden_states, row_stride, library.address(inverse), topk, out)
    return out


def _rows(rows: Any, pairs: int) -> int:
    if rows is None:
        return pairs
    return rows if type(rows) is int and 0 <= rows <= MAX_PAIRS else check.integer("rows", rows, 0, MAX_PAIRS)


def _on_host_in_place(function: Any, like: Any, *args: Any, **kwargs: Any) -> None:
    """Let a twin write into arrays of host memory, and leave what it does not write."""
    library = arrays.library_of(like)
    assert library is not None

    def to_numpy(value: Any) -> Any:
        return library.to_numpy(value) if arrays.is_array(value) else value

    function(*map(to_numpy, args), **{key: to_numpy(value) for key, value in kwargs.items()})


@arrays.takes_dlpack
def moe_permute(
    hidden_states: Any,
    a1q_scale: Any,
    topk_ids: Any,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: Any = None,
    align_block_size: int | None = None,
    fill_invalid_expert: int = -1,
    permuted_hidden_states: Any = None,
    *,
    variant: str = "auto",
) -> tuple[Any, Any, Any, Any, Any]:
    """The rows of all pairs (token, slot), grouped by expert: a sort, and one launch that copies rows and scales.

    Args:
        hidden_states: [tokens, hidden] of any dtype; rows may be strided.
        a1q_scale: float32 or int32 [tokens, groups], the scales of quantized hidden_states, which go with their rows;
            or one of fewer dimensions, as of the whole tensor, which is returned as it is; or None.
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. An id outside of [0, n_expert), such as -1, has no
            row.
        n_expert: how many experts the ids name, at most 4096.
        n_local_expert: how many experts are here; -1: n_expert.
        expert_map: int32 [n_expert]: the number here of each expert; one outside of [0, n_local_expert), such as -1, is
            not here.
        align_block_size: pad the rows of each expert to a multiple of this, as DeepGEMM's contiguous layout wants it.
        fill_invalid_expert: what m_indices says of rows past the last expert's.
        permuted_hidden_states: [rows, hidden] to write into and return.
        variant: of the sort, as in `moe_sort`; all give the same.

    Returns:
        permuted_hidden_states [rows, hidden], with rows = tokens * topk; with align_block_size,
            tokens * topk + n_expert * (align_block_size - 1) rounded up to its next multiple. Rows that pad, and those
            past the last expert's, are not written.
        a1q_scale [rows, groups], likewise; None if it was.
        expert_first_token_offset int64 [n_local_expert + 1]: the first row of each expert; last, the end of all.
        inv_permuted_idx int32 [tokens * topk]: the row of each pair, -1 for one whose expert is not here.
        m_indices int32 [rows]: the expert of each row, padding included; None without align_block_size.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `moe_permute`, whose pairs without an expert here have rows past the last expert's instead.
    """
    library, device, dtype = arrays.leader("hidden_states", hidden_states, ROW_DTYPES, ("tokens", "hidden"))
    tokens, hidden = hidden_states.shape
    _hidden("hidden_states", hidden)
    row_stride = arrays.row_stride("hidden_states", hidden_states, library)
    arrays.same_place("topk_ids", topk_ids, "hidden_states", library, device)
    _, _, rows_of_ids, topk = _ids(topk_ids)
    if rows_of_ids != tokens:
        check.shape("topk_ids", tuple(topk_ids.shape), (tokens, topk), "[tokens, topk]")
    n_expert = _number_of_experts("n_expert", n_expert)
    if n_local_expert == -1:
        experts = n_expert
    else:
        experts = _number_of_experts("n_local_expert", n_local_expert, n_expert, "n_expert")
    _map(expert_map, library, device, n_expert, "n_expert")
    scale_stride = 0
    permutes_scale = False
    if a1q_scale is not None:
        arrays.same_place("a1q_scale", a1q_scale, "hidden_states", library, device)
        permutes_scale = len(a1q_scale.shape) > 1
        if permutes_scale:
            if library.dtype(a1q_scale) not in ("float32", "int32"):
                check.dtype("a1q_scale", library.dtype(a1q_scale), ("float32", "int32"))
            if len(a1q_scale.shape) != 2 or a1q_scale.shape[0] != tokens:
                groups = a1q_scale.shape[-1]
                check.shape("a1q_scale", tuple(a1q_scale.shape), (tokens, groups), "[tokens, groups]")
            scale_stride = arrays.row_stride("a1q_scale", a1q_scale, library)
    rows, block_size = tokens * topk, 1
    if align_block_size is not None:
        block_size = check.integer("align_block_size", align_block_size, 1, MAX_BLOCK_SIZE)
        rows = -(-(rows + n_expert * (block_size - 1)) // block_size) * block_size
        if rows > MAX_PAIRS:
            got = f"{block_size} with {rows} rows"
            check.fail("align_block_size", f"such that there are at most {MAX_PAIRS} rows", got)
        check.integer("fill_invalid_expert", fill_invalid_expert, -(2**31), 2**31 - 1)
    shape = (rows, hidden)
    if permuted_hidden_states is not None:
        arrays.expect(
            "permuted_hidden_states",
            permuted_hidden_states,
            "hidden_states",
            library,
            device,
            (dtype,),
            shape,
            "[rows, hidden]",
        )
    if device is None:
        check.host_variant(variant, SORT_VARIANTS)
        permuted, scale, offsets, inverse, m_indices = arrays.on_host(
            twin.moe_permute,
            hidden_states,
            hidden_states,
            a1q_scale,
            topk_ids,
            n_expert,
            n_local_expert,
            expert_map,
            align_block_size,
            fill_invalid_expert,
            permuted_hidden_states,
        )
        permuted = permuted if permuted_hidden_states is None else permuted_hidden_states
        return permuted, scale if permutes_scale else a1q_scale, offsets, inverse, m_indices
    empty, address = library.empty, library.address
    offsets = empty((experts + 1,), "int64", hidden_states)
    inverse = empty((tokens * topk,), "int32", hidden_states)
    m_indices = None if align_block_size is None else empty((rows,), "int32", hidden_states)
    out_scale = a1q_scale
    if permutes_scale:
        out_scale = empty((rows, a1q_scale.shape[1]), library.dtype(a1q_scale), hidden_states)
    if permuted_hidden_states is None:
        permuted_hidden_states = empty(shape, dtype, hidden_states)
    _launch_sort(
        library,
        device,
        topk_ids,
        n_expert,
        experts,
        0 if expert_map is None else address(expert_map),
        variant,
        offsets_long=address(offsets),
        inverse=address(inverse) if tokens else 0,
        group_ids=0 if m_indices is None or not rows else address(m_indices),
        block_size=block_size,
        groups=rows,
        group_fill=int(fill_invalid_expert) if m_indices is not None else 0,
    )
    if tokens:
        has_scale = permutes_scale and a1q_scale.shape[1]
        _launch_permute(
            library,
            device,
            hidden_states,
            row_stride,
            address(inverse),
            topk,
            permuted_hidden_states,
            a1q_scale if has_scale else None,
            scale_stride,
            out_scale,
        )
    return permuted_hidden_states, out_scale, offsets, inverse, m_indices


def _launch_sum(
    library: arrays.Library,
    device: int,
    name: str,
    dtype: str,
    rows: Any,
    number_of_rows: int,
    row_stride: int,
    weights: int,
    inverse: int,
    end: int,
    out: Any,
    topk: int,
    variant: str,
) -> None:
    tokens, hidden = out.shape
    item_size = arrays.ITEM_SIZE[dtype]
    addresses = library.address(rows) if number_of_rows else 0, library.address(out)
    mask = addresses[0] | addresses[1] | hidden * item_size | row_stride * item_size
    plan = _sum_plan(dtype, tokens, topk, hidden, unit_width(name, mask, item_size), variant)
    plan.variant.launch(
        device,
        library.stream(device),
        plan.tiles.grid,
        plan.tiles.block,
        0,
        addresses[0],
        weights,
        inverse,
        end,
        addresses[1],
        row_stride * item_size // plan.width,
        topk,
        number_of_rows,
        *plan.tiles.fields,
    )


@arrays.takes_dlpack
def moe_unpermute(
    out: Any,
    permuted_hidden_states: Any,
    topk_weights: Any,
    inv_permuted_idx: Any,
    expert_first_token_offset: Any = None,
    *,
    variant: str = "auto",
) -> Any:
    """The weighted sum of the rows of each token: out[t] = sum over s of topk_weights[t, s] * row[inv[t, s]].

    Each product and each sum is rounded to float32, slot by slot from the first to the last, and the result once more:
    the bits do not depend on the variant.

    Args:
        out: [tokens, hidden], written: float32, float16 or bfloat16.
        permuted_hidden_states: [rows, hidden], of the same dtype; rows may be strided.
        topk_weights: float32 [tokens, topk]; None: all are 1.
        inv_permuted_idx: int32 [tokens, topk] or [tokens * topk], from `moe_permute` or `moe_sort`. A slot whose row is
            outside of [0, rows), such as -1, adds nothing, whatever its weight is.
        expert_first_token_offset: int64 or int32 [experts + 1], from the same; with it, rows at or past its last number
            add nothing either.
        variant: "auto", or a kernel by name: "specialized" (topk fixed at compile time) or "dynamic".

    Returns:
        out.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `moe_unpermute`.
    """
    library, device, dtype = arrays.leader("out", out, SUM_DTYPES, ("tokens", "hidden"))
    tokens, hidden = out.shape
    _hidden("out", hidden)
    arrays.expect("out", out, "out", library, device, (dtype,), (tokens, hidden), "[tokens, hidden]")
    arrays.same_place("permuted_hidden_states", permuted_hidden_states, "out", library, device)
    if library.dtype(permuted_hidden_states) != dtype:
        check.dtype("permuted_hidden_states", library.dtype(permuted_hidden_states), (dtype,))
    if len(permuted_hidden_states.shape) != 2 or permuted_hidden_states.shape[1] != hidden:
        got, symbols = tuple(permuted_hidden_states.shape), ("rows", "hidden")
        check.dimensions("permuted_hidden_states", got, symbols)
        check.shape("permuted_hidden_states", got, (got[0], hidden), "[rows, hidden]")
    rows = permuted_hidden_states.shape[0]
    if rows > MAX_PAIRS:
        check.fail("permuted_hidden_states", f"of at most {MAX_PAIRS} rows", rows)
    row_stride = arrays.row_stride("permuted_hidden_states", permuted_hidden_states, library)
    topk = _topk_of("inv_permuted_idx", inv_permuted_idx, "out", library, device, tokens)
    if topk_weights is not None:
        if not tokens and len(topk_weights.shape) == 2:
            topk = topk_weights.shape[1]
        arrays.expect(
            "topk_weights", topk_weights, "out", library, device, ("float32",), (tokens, topk), "[tokens, topk]"
        )
    end = 0
    if expert_first_token_offset is not None:
        offsets = expert_first_token_offset
        arrays.same_place("expert_first_token_offset", offsets, "out", library, device)
        if len(offsets.shape) != 1 or not offsets.shape[0]:
            check.fail("expert_first_token_offset", "of shape [experts + 1]", list(offsets.shape))
        kinds = ("int64", "int32")
        arrays.expect(
            "expert_first_token_offset", offsets, "out", library, device, kinds, tuple(offsets.shape), "[experts + 1]"
        )
        # Of an int64, the kernel reads the low word.
        if device is not None:
            end = library.address(offsets) + (offsets.shape[0] - 1) * arrays.ITEM_SIZE[library.dtype(offsets)]
    if device is None:
        check.host_variant(variant, SUM_VARIANTS)
        given = (permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset)
        _on_host_in_place(twin.moe_unpermute, out, out, *given)
        return out
    if not (tokens and hidden):
        check.one_of("variant", variant, SUM_VARIANTS)
        return out
    weights = library.address(topk_weights) if topk_weights is not None and topk else 0
    # Without slots nothing is read, and the sum is 0.
    inverse = library.address(inv_permuted_idx) if topk else 0
    _launch_sum(
        library,
        device,
        "out",
        dtype,
        permuted_hidden_states,
        rows,
        row_stride,
        weights,
        inverse,
        end,
        out,
        topk,
        variant,
    )
    return out


@arrays.takes_dlpack
def moe_sum(input: Any, output: Any = None, *, variant: str = "auto") -> Any:
    """The sum over the slots of each token: output[t] = sum over s of input[t, s], in float32 and rounded once.

    Args:
        input: [tokens, topk, hidden], float32, float16 or bfloat16, contiguous.
        output: [tokens, hidden], of the same dtype, to write into and return.
        variant: as in `moe_unpermute`, and so are the errors.

    Returns:
        output, or a new array.

    The function is vLLM's `moe_sum`.
    """
    library, device, dtype = arrays.leader("input", input, SUM_DTYPES, ("tokens", "topk", "hidden"))
    tokens, topk, hidden = input.shape
    _hidden("input", hidden)
    arrays.contiguous("input", input, library)
    if tokens * topk > MAX_PAIRS:
        check.fail("input", f"of at most {MAX_PAIRS} rows", tokens * topk)
    if output is not None:
        arrays.expect("output", output, "input", library, device, (dtype,), (tokens, hidden), "[tokens, hidden]")
    if device is None:
        check.host_variant(variant, SUM_VARIANTS)
        if output is None:
            return arrays.on_host(twin.moe_sum, input, input)
        _on_host_in_place(twin.moe_sum, output, input, output)
        return output
    if output is None:
        output = library.empty((tokens, hidden), dtype, input)
    if not (tokens and hidden):
        check.one_of("variant", variant, SUM_VARIANTS)
        return output
    rows = tokens * topk
    _launch_sum(library, device, "input", dtype, input, rows, hidden, 0, 0, 0, output, topk, variant)
    return output


# --- for PyTorch --------------------------------------------------------------------------------------


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sorted(topk_ids: Any, num_experts: Any, *, num_local_experts: Any = None, **_: Any) -> list[Any]:
    tokens, topk = topk_ids.shape
    experts = num_experts if num_local_experts is None else num_local_experts
    shapes = (experts + 1,), (tokens * topk,), (tokens, topk)
    return [(topk_ids, shape, "int32") for shape in shapes]


def _sorted_batched(
    topk_ids: Any, num_experts: Any, max_tokens: Any, *, num_local_experts: Any = None, **_: Any
) -> list[Any]:
    experts = num_experts if num_local_experts is None else num_local_experts
    return [(topk_ids, shape, "int32") for shape in ((experts,), tuple(topk_ids.shape))]


def _aligned(
    topk_ids: Any,
    block_size: Any,
    num_experts: Any,
    expert_map: Any = None,
    pad_sorted_ids: bool = False,
    **_: Any,
) -> list[Any]:
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    rows = twin.aligned_rows(pairs, num_experts, block_size, pad_sorted_ids)
    shapes = (rows,), (-(-rows // block_size),), (1,)
    return [(topk_ids, shape, "int32") for shape in shapes]


def _permuted_rows(hidden_states: Any, inverse: Any, rows: Any = None) -> list[Any]:
    rows = inverse.numel() if rows is None else rows
    return [(hidden_states, (rows, hidden_states.shape[1]), _name(hidden_states))]


def _permuted(
    hidden_states: Any,
    a1q_scale: Any,
    topk_ids: Any,
    n_expert: Any,
    n_local_expert: Any = -1,
    expert_map: Any = None,
    align_block_size: Any = None,
    fill_invalid_expert: Any = -1,
    permuted_hidden_states: Any = None,
    **_: Any,
) -> list[Any]:
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    rows, m_indices = pairs, None
    if align_block_size is not None:
        rows = -(-(pairs + n_expert * (align_block_size - 1)) // align_block_size) * align_block_size
        m_indices = (hidden_states, (rows,), "int32")
    permuted = permuted_hidden_states
    if permuted is None:
        permuted = (hidden_states, (rows, hidden_states.shape[1]), _name(hidden_states))
    scale = a1q_scale
    if scale is not None and scale.dim() > 1:
        scale = (hidden_states, (rows, scale.shape[1]), _name(scale))
    experts = n_expert if n_local_expert == -1 else n_local_expert
    return [permuted, scale, (hidden_states, (experts + 1,), "int64"), (hidden_states, (pairs,), "int32"), m_indices]


def _summed(input: Any, output: Any = None, **_: Any) -> list[Any]:
    return [output if output is not None else (input, (input.shape[0], input.shape[2]), _name(input))]


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    "moe_sort(Tensor topk_ids, int num_experts, *, Tensor? expert_map=None, int? num_local_experts=None, "
    "str variant='auto') -> (Tensor expert_offsets, Tensor row_token, Tensor inverse)": _sorted,
    "moe_sort_batched(Tensor topk_ids, int num_experts, int max_tokens, *, Tensor? expert_map=None, "
    "int? num_local_experts=None, str variant='auto') -> (Tensor expert_num_tokens, Tensor positions)": _sorted_batched,
    "moe_align_block_size(Tensor topk_ids, int block_size, int num_experts, Tensor? expert_map=None, "
    "bool pad_sorted_ids=False, *, bool ignore_invalid_experts=False, str variant='auto') "
    "-> (Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_pad)": _aligned,
    "permute_rows(Tensor hidden_states, Tensor inverse, SymInt? rows=None) -> (Tensor permuted)": _permuted_rows,
    "moe_permute(Tensor hidden_states, Tensor? a1q_scale, Tensor topk_ids, int n_expert, int n_local_expert=-1, "
    "Tensor? expert_map=None, int? align_block_size=None, int fill_invalid_expert=-1, "
    "Tensor(a!)? permuted_hidden_states=None, *, str variant='auto') -> (Tensor permuted, Tensor scale, "
    "Tensor expert_first_token_offset, Tensor inv_permuted_idx, Tensor m_indices)": _permuted,
    "moe_unpermute(Tensor(a!) out, Tensor permuted_hidden_states, Tensor? topk_weights, Tensor inv_permuted_idx, "
    "Tensor? expert_first_token_offset=None, *, str variant='auto') -> ()": None,
    "moe_sum(Tensor input, Tensor(a!)? output=None, *, str variant='auto') -> (Tensor sum)": _summed,
}
