"""Tokens grouped by expert for the grouped products of an MoE layer, and brought together again after them."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from cukern.reference import moe_permute as twin
from cukern.runtime import arrays, check, template
from cukern.runtime.compile import Instance
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    expect_row_stride,
    same_shape,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.late import ceil_div, late, parts
from cukern.runtime.op import OPS, op
from cukern.runtime.plan import empty, launch, outputs, run_twin
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

_count = Kernel("moe_permute", "count_pairs")
_sort = Kernel("moe_permute", "sort_pairs")
_permute = Kernel("moe_permute", "permute_rows")
_unpermute = Kernel("moe_permute", "unpermute_rows")

_MAX_SHARED_BYTES = 96 * 2**10
_STAGED_ROWS = 2**13  # at most so many are put together in shared memory
# For tuning on a GPU.
_ONE_BLOCK_PAIRS = 2048  # up to so many, one block sorts
_COUNT_AGAIN_PAIRS = 2**15  # up to so many, each of many blocks counts all pairs itself
_PAIRS_PER_BLOCK = 1024
_ROUNDS = 2  # of 32 pairs, that a warp ranks; more where there are not enough warps
_MAX_BLOCKS = 128
_PERMUTE_ITEMS = 4
_FEW_UNITS = 2**19  # with fewer, a thread of permute_rows has one
_UNPERMUTE_THREADS = 128

_ID_TYPE = {4: "unsigned", 8: "unsigned long long"}
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
    for name in ("moe_unpermute", "moe_sum"):
        OPS[name].forget()
    return [_unpermute_variant(dtype, 16, topk).instance]


# --- sorting ------------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """How the pairs of a sort are split over its blocks and warps."""

    blocks: int
    threads: int
    shared_bytes: int
    pairs_per_block: int
    pairs_per_warp: int
    warps: int  # so many of a block rank its pairs
    capacity: int
    staged: int


@functools.lru_cache(maxsize=4096)
def _split(
    experts: int, mapped: int, padding: tuple[int, bool] | None, one_block: bool, most_threads: int, pairs: int
) -> _Split:
    """How `pairs` pairs are split.

    `mapped` is how many ids the map has that the kernel reads, 0 without; `padding` the last arguments of
    `aligned_rows` where the kernel writes rows.
    """
    capacity = twin.aligned_rows(pairs, experts, *padding) if padding else 0
    bins = experts + 1
    fixed = 3 * bins + (mapped + 1 if mapped else 0)
    most_warps = min(most_threads // 32, (_MAX_SHARED_BYTES // 4 - fixed) // bins)
    if one_block:
        per_block, blocks = max(pairs, 1), 1
        warps = min(most_warps, -(-per_block // 32))
    else:
        per_block = max(_PAIRS_PER_BLOCK, -(-pairs // (_MAX_BLOCKS * 32)) * 32)
        blocks = max(1, -(-pairs // per_block))
        warps = min(most_warps, -(-per_block // (32 * _ROUNDS)))
    per_warp = -(-per_block // (32 * warps)) * 32
    threads = most_threads if blocks > 1 else min(most_threads, max(warps * 32, -(-experts // 32) * 32, 128))
    ints = fixed + warps * bins
    staged = blocks == 1 and 0 < capacity <= _STAGED_ROWS and ints + capacity <= _MAX_SHARED_BYTES // 4
    shared_bytes = 4 * (ints + (capacity if staged else 0))
    return _Split(blocks, threads, shared_bytes, per_block, per_warp, warps, capacity, int(staged))


#: The fields of SortParams that not every function needs.
_NO_RESULTS = {
    **dict.fromkeys(("id_of", "offsets", "offsets_long", "rows", "inverse", "group_ids", "end_of_rows")),
    **dict.fromkeys(("fill", "groups", "group_fill", "room"), 0),
    "block_size": 1,
    "group_rows": 1,
    "topk": divisor(1),
}


def _launch_sort(
    topk_ids: Array,
    global_experts: int,
    experts: int,
    expert_map: Array | None,
    variant: str,
    padding: tuple[int, bool] | None = None,
    **results: Any,
) -> None:
    check.one_of("variant", variant, SORT_VARIANTS)
    tokens, topk = topk_ids.shape
    pairs = tokens * topk
    # The number of tokens decides, for it is what the environment holds.
    one_block = variant == "one_block" or (variant == "auto" and tokens <= _ONE_BLOCK_PAIRS // topk)
    most_uncounted = {"auto": _COUNT_AGAIN_PAIRS, "counted": _PAIRS_PER_BLOCK}.get(variant, MAX_PAIRS)
    threads = template.constants("moe_permute")["SORT_THREADS"]
    mapped = 0 if expert_map is None else global_experts
    split = _Split(*parts(functools.partial(_split, experts, mapped, padding, one_block, threads), pairs))
    of_pairs = (topk_ids, expert_map, pairs, global_experts, experts)
    id_bytes = 8 if topk_ids.dtype == "int64" else 4
    counts = None
    if not one_block and tokens > most_uncounted // topk:
        counts = empty((split.blocks, experts), "int32")
        shared_bytes = 4 * (experts + 1 + (mapped + 1 if mapped else 0))
        launch(
            _count_variant(id_bytes),
            split.blocks,
            min(threads, _PAIRS_PER_BLOCK),
            shared_bytes,
            pairs=of_pairs,
            counts=counts,
            pairs_per_block=split.pairs_per_block,
        )
    launch(
        _sort_variant(id_bytes, experts),
        split.blocks,
        split.threads,
        split.shared_bytes,
        pairs=of_pairs,
        counts=counts,
        pairs_per_block=split.pairs_per_block,
        pairs_per_warp=split.pairs_per_warp,
        warps=split.warps,
        capacity=split.capacity,
        staged=split.staged,
        **_NO_RESULTS | results,
    )


def _check_ids(topk_ids: Any) -> tuple[Any, int]:
    """The sizes of topk_ids, once it has been checked."""
    tokens, topk = expect_array("topk_ids", topk_ids, ID_DTYPES, ("tokens", "topk")).shape
    if not topk:
        check.fail("topk_ids", "of at least one expert for each token", f"shape {list(topk_ids.shape)}")
    if tokens > MAX_PAIRS // topk:
        check.fail("topk_ids", f"of at most {MAX_PAIRS} ids", tokens * topk)
    expect_contiguous("topk_ids", topk_ids)
    return tokens, topk


def _check_map(expert_map: Any, topk_ids: Array, num_experts: int, name: str = "num_experts") -> None:
    if expert_map is not None:
        expect("expert_map", expert_map, topk_ids, "topk_ids", ("int32",), (num_experts,), f"[{name}]")


def _check_experts(topk_ids: Array, num_experts: Any, expert_map: Any, num_local_experts: Any) -> tuple[int, int]:
    """How many experts there are, and how many of them are here, once that has been checked."""
    num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    _check_map(expert_map, topk_ids, num_experts)
    if num_local_experts is not None:
        return num_experts, check.integer("num_local_experts", num_local_experts, 1, num_experts, "num_experts")
    if expert_map is not None:
        check.fail("num_local_experts", "given with expert_map", "None", TypeError)
    return num_experts, num_experts


def _sorted(topk_ids: Any, num_experts: Any, *, num_local_experts: Any = None, **_: Any) -> list[Result]:
    tokens, topk = topk_ids.shape
    experts = num_experts if num_local_experts is None else num_local_experts
    return [
        Result((experts + 1,), "int32", "[experts + 1]"),
        Result((tokens * topk,), "int32", "[tokens * topk]"),
        Result((tokens, topk), "int32", "[tokens, topk]"),
    ]


@op(
    twin.moe_sort,
    "moe_sort(Tensor topk_ids, int num_experts, *, Tensor? expert_map=None, int? num_local_experts=None, "
    "str variant='auto') -> (Tensor expert_offsets, Tensor row_token, Tensor inverse)",
    _sorted,
    rows={"tokens": ("topk_ids", "out")},
)
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
    _, topk = _check_ids(topk_ids)
    num_experts, experts = _check_experts(topk_ids, num_experts, expert_map, num_local_experts)
    names = "a triple (expert_offsets, row_token, inverse)"
    out = outputs(out, topk_ids, "topk_ids", *_sorted(topk_ids, experts), names=names)
    if topk_ids.on_host:
        return run_twin(variant, SORT_VARIANTS)  # type: ignore[return-value]
    results = dict(zip(("offsets", "rows", "inverse"), out, strict=True))
    _launch_sort(topk_ids, num_experts, experts, expert_map, variant, (1, False), topk=divisor(topk), **results)
    return out


def _sorted_batched(
    topk_ids: Any, num_experts: Any, max_tokens: Any, *, num_local_experts: Any = None, **_: Any
) -> list[Result]:
    experts = num_experts if num_local_experts is None else num_local_experts
    return [Result((experts,), "int32", "[experts]"), Result(tuple(topk_ids.shape), "int32", "[tokens, topk]")]


@op(
    twin.moe_sort_batched,
    "moe_sort_batched(Tensor topk_ids, int num_experts, int max_tokens, *, Tensor? expert_map=None, "
    "int? num_local_experts=None, str variant='auto') -> (Tensor expert_num_tokens, Tensor positions)",
    _sorted_batched,
    rows={"tokens": ("topk_ids", "out")},
    late=("max_tokens",),
)
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
    _check_ids(topk_ids)
    num_experts, experts = _check_experts(topk_ids, num_experts, expert_map, num_local_experts)
    room = check.integer("max_tokens", max_tokens, 1, MAX_PAIRS // experts)
    results = _sorted_batched(topk_ids, experts, room)
    out = outputs(out, topk_ids, "topk_ids", *results, names="a pair (expert_num_tokens, positions)")
    if topk_ids.on_host:
        return run_twin(variant, SORT_VARIANTS)  # type: ignore[return-value]
    _launch_sort(topk_ids, num_experts, experts, expert_map, variant, offsets=out[0], inverse=out[1], room=room)
    return out


def _aligned(
    topk_ids: Any, block_size: Any, num_experts: Any, expert_map: Any = None, pad_sorted_ids: bool = False, **_: Any
) -> list[Result]:
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    rows = late(twin.aligned_rows, pairs, num_experts, block_size, pad_sorted_ids)
    return [Result((rows,), "int32"), Result((ceil_div(rows, block_size),), "int32"), Result((1,), "int32")]


@op(
    twin.moe_align_block_size,
    "moe_align_block_size(Tensor topk_ids, int block_size, int num_experts, Tensor? expert_map=None, "
    "bool pad_sorted_ids=False, *, bool ignore_invalid_experts=False, str variant='auto') "
    "-> (Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_pad)",
    _aligned,
    rows={"tokens": ("topk_ids",)},
)
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
    tokens, topk = _check_ids(topk_ids)
    num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    block_size = check.integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
    _check_map(expert_map, topk_ids, num_experts)
    padding = (block_size, bool(pad_sorted_ids))
    results = _aligned(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids)
    (rows,), (groups,), _ = (result.shape for result in results)
    if rows > MAX_PAIRS:
        check.fail("block_size", f"such that there are at most {MAX_PAIRS} rows", f"{block_size} with {rows} rows")
    out = outputs(None, topk_ids, "topk_ids", *results)
    if topk_ids.on_host:
        return run_twin(variant, SORT_VARIANTS)  # type: ignore[return-value]
    early, id_of = (expert_map, None) if ignore_invalid_experts else (None, expert_map)
    _launch_sort(
        topk_ids,
        num_experts,
        num_experts,
        early,
        variant,
        padding,
        id_of=id_of,
        rows=out[0],
        group_ids=out[1],
        end_of_rows=out[2],
        block_size=block_size,
        fill=tokens * topk,
        group_rows=block_size,
        groups=groups,
        group_fill=-1,
    )
    return out


# --- rows ---------------------------------------------------------------------------------------------


class _Tiles(NamedTuple):
    blocks: Any
    threads: tuple[int, Any]
    tiling: dict[str, Any]


def _tiles(tokens: Any, columns: int, threads: int, items: int) -> _Tiles:
    """Blocks of at most `threads`, each with `items` units of one token."""
    chunks = max(1, -(-columns // (threads * items)))
    tile_columns = max(1, -(-columns // chunks))
    x = -(-tile_columns // items)
    y = threads // x
    blocks = ceil_div(tokens, y) * chunks
    if y > 1 and tokens < y:
        y, blocks = tokens, chunks
    tiling = {"tokens": tokens, "columns": columns, "tile_columns": tile_columns, "chunks": chunks}
    return _Tiles(blocks, (x, y), tiling | {"by_chunks": divisor(chunks)})


def _width(name: str, one: Array, other: Array, hidden: int, row_stride: int) -> int:
    """The bytes of a unit of rows of two arrays, the first of which lie `row_stride` elements apart."""
    mask = one.alignment | other.alignment | (hidden | row_stride) * one.item_size
    return unit_width(name, mask, one.item_size)


def _check_hidden(name: str, hidden: int) -> None:
    if hidden > MAX_HIDDEN:
        check.fail(name, f"of a hidden size up to {MAX_HIDDEN}", hidden)


def _slots(pairs: int, tokens: int) -> int:
    """The slots of each token; -1 where the tokens do not have as many each."""
    return pairs // tokens if tokens and pairs % tokens == 0 else -1


def _topk_of(name: str, inverse: Any, like: Array, like_name: str) -> int:
    """The slots of each token of `like`, once the array of the rows of all pairs has been checked."""
    expect_place(name, inverse, like, like_name)
    shape, tokens = inverse.shape, like.shape[0]
    topk = shape[1] if len(shape) == 2 else 1
    wanted: tuple[Any, ...] = (tokens, topk)
    if len(shape) == 1:
        slots = 1 if shape[0] is tokens else int(late(_slots, shape[0], tokens))
        if slots >= 0:
            topk, wanted = slots, (tokens * slots if slots != 1 else tokens,)
        elif not tokens:
            wanted = (0,)
    expect(name, inverse, like, like_name, ("int32",), wanted, "[tokens, topk] or [tokens * topk]")
    return topk


def _launch_permute(
    x: Array, row_stride: int, inverse: Array, topk: int, out: Array, scale: Array | None = None, out_scale: Any = None
) -> None:
    """Copy rows of at least one token, which has at least one slot."""
    tokens, hidden = x.shape
    if not hidden and scale is None:
        return
    width = _width("hidden_states", x, out, hidden, row_stride)
    columns = hidden * x.item_size // width
    items = 1 if not columns or tokens < -(-_FEW_UNITS // columns) else _PERMUTE_ITEMS
    tiles = _tiles(tokens, columns, template.constants("moe_permute")["ROW_THREADS"], items)
    launch(
        _permute_variant(width, items),
        tiles.blocks,
        tiles.threads,
        src=x,
        inverse=inverse,
        out=out,
        scale=scale,
        out_scale=None if scale is None else out_scale,
        row_stride=row_stride * x.item_size // width,
        scale_stride=0 if scale is None else scale.strides[0],
        topk=topk,
        rows=out.shape[0],
        scale_columns=0 if scale is None else scale.shape[1],
        tiling=tiles.tiling,
    )


def _permuted_rows(hidden_states: Any, inverse: Any, rows: Any = None) -> Result:
    rows = math.prod(inverse.shape) if rows is None else rows
    return Result((rows, hidden_states.shape[1]), dtype_name(hidden_states), "[rows, hidden]")


@op(
    twin.permute_rows,
    "permute_rows(Tensor hidden_states, Tensor inverse, SymInt? rows=None) -> (Tensor permuted)",
    _permuted_rows,
    rows={"tokens": ("hidden_states", "inverse"), "rows": ("out",)},
    late=("rows",),
)
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
    tokens, hidden = expect_array("hidden_states", hidden_states, ROW_DTYPES, ("tokens", "hidden")).shape
    _check_hidden("hidden_states", hidden)
    row_stride = expect_row_stride("hidden_states", hidden_states)
    topk = _topk_of("inverse", inverse, hidden_states, "hidden_states")
    if rows is not None:
        rows = check.integer("rows", rows, 0, MAX_PAIRS)
    out = outputs(out, hidden_states, "hidden_states", _permuted_rows(hidden_states, inverse, rows))
    if hidden_states.on_host:
        return run_twin()
    if topk and tokens != 0 and (rows is None or rows != 0):
        _launch_permute(hidden_states, row_stride, inverse, topk, out)
    return out


def _padded_rows(pairs: Any, experts: Any, block_size: Any) -> Any:
    return -(-(pairs + experts * (block_size - 1)) // block_size) * block_size


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
    """The results; those that the caller gave as they are."""
    rows = pairs = topk_ids.shape[0] * topk_ids.shape[1]
    m_indices, permuted, scale = None, permuted_hidden_states, a1q_scale
    if align_block_size is not None:
        rows = late(_padded_rows, pairs, n_expert, align_block_size)
        m_indices = Result((rows,), "int32")
    if permuted is None:
        permuted = Result((rows, hidden_states.shape[1]), dtype_name(hidden_states))
    if scale is not None and len(scale.shape) > 1:
        scale = Result((rows, scale.shape[1]), dtype_name(scale))
    experts = n_expert if n_local_expert == -1 else n_local_expert
    return [permuted, scale, Result((experts + 1,), "int64"), Result((pairs,), "int32"), m_indices]


@op(
    twin.moe_permute,
    "moe_permute(Tensor hidden_states, Tensor? a1q_scale, Tensor topk_ids, int n_expert, int n_local_expert=-1, "
    "Tensor? expert_map=None, int? align_block_size=None, int fill_invalid_expert=-1, "
    "Tensor(a!)? permuted_hidden_states=None, *, str variant='auto') -> (Tensor permuted, Tensor scale, "
    "Tensor expert_first_token_offset, Tensor inv_permuted_idx, Tensor m_indices)",
    _permuted,
    rows={"tokens": ("hidden_states", "a1q_scale", "topk_ids"), "rows": ("permuted_hidden_states",)},
)
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
    tokens, hidden = expect_array("hidden_states", hidden_states, ROW_DTYPES, ("tokens", "hidden")).shape
    _check_hidden("hidden_states", hidden)
    row_stride = expect_row_stride("hidden_states", hidden_states)
    expect_place("topk_ids", topk_ids, hidden_states, "hidden_states")
    _, topk = _check_ids(topk_ids)
    if not same_shape(topk_ids, (tokens, topk)):
        check.shape("topk_ids", topk_ids.shape, (tokens, topk), "[tokens, topk]")
    experts = n_expert = check.integer("n_expert", n_expert, 1, MAX_EXPERTS)
    if n_local_expert != -1:
        experts = check.integer("n_local_expert", n_local_expert, 1, n_expert, "n_expert")
    _check_map(expert_map, topk_ids, n_expert, "n_expert")
    permutes_scale = False
    if a1q_scale is not None:
        expect_place("a1q_scale", a1q_scale, hidden_states, "hidden_states")
        permutes_scale = len(a1q_scale.shape) > 1
    if permutes_scale:
        check.dtype("a1q_scale", a1q_scale.dtype, ("float32", "int32"))
        if not same_shape(a1q_scale, (tokens, a1q_scale.shape[-1])):
            check.shape("a1q_scale", a1q_scale.shape, (tokens, a1q_scale.shape[-1]), "[tokens, groups]")
        expect_row_stride("a1q_scale", a1q_scale)
    block_size, group_fill = 1, 0
    if align_block_size is not None:
        block_size = check.integer("align_block_size", align_block_size, 1, MAX_BLOCK_SIZE)
        rows = late(_padded_rows, tokens * topk, n_expert, block_size)
        if rows > MAX_PAIRS:
            got = f"{block_size} with {rows} rows"
            check.fail("align_block_size", f"such that there are at most {MAX_PAIRS} rows", got)
        group_fill = check.integer("fill_invalid_expert", fill_invalid_expert, -(2**31), 2**31 - 1)
    given = permuted_hidden_states
    results = _permuted(hidden_states, a1q_scale, topk_ids, n_expert, experts, None, align_block_size)
    if given is not None:
        like, dtypes = (hidden_states, "hidden_states"), (hidden_states.dtype,)
        results[0] = expect("permuted_hidden_states", given, *like, dtypes, results[0].shape, "[rows, hidden]")
    found = outputs(None, hidden_states, "hidden_states", *results)
    if hidden_states.on_host:
        return run_twin(variant, SORT_VARIANTS)  # type: ignore[return-value]
    permuted, scale, offsets, inverse, m_indices = found
    _launch_sort(
        topk_ids,
        n_expert,
        experts,
        expert_map,
        variant,
        offsets_long=offsets,
        inverse=inverse,
        group_ids=m_indices,
        block_size=block_size,
        groups=permuted.shape[0],
        group_fill=group_fill,
    )
    if tokens != 0:
        has_scale = permutes_scale and a1q_scale.shape[1]
        _launch_permute(hidden_states, row_stride, inverse, topk, permuted, a1q_scale if has_scale else None, scale)
    return found


def _sum_variant(dtype: str, topk: int, width: int, variant: str) -> Variant:
    check.one_of("variant", variant, SUM_VARIANTS)
    known = topk in _registered and width == 16
    if variant == "specialized" and not known:
        why = f"there is none for topk {topk}, or the rows are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {why} (cukern.specialize adds one)")
    return _unpermute_variant(dtype, width, topk if known and variant != "dynamic" else 0)


def _launch_sum(
    name: str, src: Array, rows: Any, row_stride: int, out: Array, topk: int, variant: str, **arrays: Any
) -> None:
    """The sums of rows that lie `row_stride` elements apart."""
    check.one_of("variant", variant, SUM_VARIANTS)
    tokens, hidden = out.shape
    if not hidden or tokens == 0:
        return
    width = _width(name, src, out, hidden, row_stride)
    tiles = _tiles(tokens, hidden * out.item_size // width, _UNPERMUTE_THREADS, 1)
    launch(
        _sum_variant(out.dtype, topk, width, variant),
        tiles.blocks,
        tiles.threads,
        src=src,
        out=out,
        row_stride=row_stride * out.item_size // width,
        topk=topk,
        rows=rows,
        tiling=tiles.tiling,
        **arrays,
    )


@op(
    twin.moe_unpermute,
    "moe_unpermute(Tensor(a!) out, Tensor permuted_hidden_states, Tensor? topk_weights, Tensor inv_permuted_idx, "
    "Tensor? expert_first_token_offset=None, *, str variant='auto') -> ()",
    rows={"tokens": ("out", "topk_weights", "inv_permuted_idx"), "rows": ("permuted_hidden_states",)},
)
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
    tokens, hidden = expect_array("out", out, SUM_DTYPES, ("tokens", "hidden")).shape
    _check_hidden("out", hidden)
    expect_contiguous("out", out)
    src = expect_place("permuted_hidden_states", permuted_hidden_states, out, "out")
    check.dtype("permuted_hidden_states", src.dtype, (out.dtype,))
    check.dimensions("permuted_hidden_states", src.shape, ("rows", "hidden"))
    rows = src.shape[0]
    if src.shape[1] != hidden:
        check.shape("permuted_hidden_states", src.shape, (rows, hidden), "[rows, hidden]")
    if rows > MAX_PAIRS:
        check.fail("permuted_hidden_states", f"of at most {MAX_PAIRS} rows", rows)
    row_stride = expect_row_stride("permuted_hidden_states", src)
    topk = _topk_of("inv_permuted_idx", inv_permuted_idx, out, "out")
    if topk_weights is not None:
        if (
            isinstance(topk_weights, Array)
            and len(topk_weights.shape) == 2
            and topk_weights.shape[1] != topk
            and not tokens
        ):
            topk = topk_weights.shape[1]
        expect("topk_weights", topk_weights, out, "out", ("float32",), (tokens, topk), "[tokens, topk]")
    end = None
    if expert_first_token_offset is not None:
        name, offsets = "expert_first_token_offset", expert_first_token_offset
        expect_place(name, offsets, out, "out")
        if len(offsets.shape) != 1 or not offsets.shape[0]:
            check.fail(name, "of shape [experts + 1]", list(offsets.shape))
        expect(name, offsets, out, "out", ("int64", "int32"), offsets.shape, "[experts + 1]")
        # Of an int64, the kernel reads the low word.
        end = offsets[offsets.shape[0] - 1 :]
    if out.on_host:
        run_twin(variant, SUM_VARIANTS)
        return out
    # Without slots nothing is read, and the sum is 0.
    weights, inverse = (topk_weights, inv_permuted_idx) if topk else (None, None)
    _launch_sum("out", src, rows, row_stride, out, topk, variant, weights=weights, inverse=inverse, offsets=end)
    return out


def _summed(input: Any, output: Any = None, **_: Any) -> Any:
    return output if output is not None else Result((input.shape[0], input.shape[2]), dtype_name(input))


@op(
    twin.moe_sum,
    "moe_sum(Tensor input, Tensor(a!)? output=None, *, str variant='auto') -> (Tensor sum)",
    _summed,
    rows={"tokens": ("input", "output")},
)
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
    tokens, topk, hidden = expect_array("input", input, SUM_DTYPES, ("tokens", "topk", "hidden")).shape
    _check_hidden("input", hidden)
    expect_contiguous("input", input)
    if topk and tokens > MAX_PAIRS // topk:
        check.fail("input", f"of at most {MAX_PAIRS} rows", tokens * topk)
    if output is not None:
        expect("output", output, input, "input", (input.dtype,), (tokens, hidden), "[tokens, hidden]")
    output = outputs(None, input, "input", _summed(input, output))
    if input.on_host:
        return run_twin(variant, SUM_VARIANTS)
    no_arrays = dict.fromkeys(("weights", "inverse", "offsets"))
    _launch_sum("input", input, tokens * topk, hidden, output, topk, variant, **no_arrays)
    return output
