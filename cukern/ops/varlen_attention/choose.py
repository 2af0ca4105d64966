"""Attention of many tokens: the choice of a kernel, and its launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.runtime import arrays, check, template
from cukern.runtime.describe import Array
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import asked, empty, launch, tensor_map

#: "wgmma" (Hopper only) and "mma" (all GPUs) use tensor cores, and take 16-bit arrays. "fma" computes products in
#: float32, and takes all dtypes and alignments.
VARIANTS = ("auto", "wgmma", "mma", "fma")
MAX_DIM = 256

#: Head dimensions of the instances of "mma" and "fma". A call uses the smallest one that is at least its dimensions.
DIMS = (
    32,  # all-MiniLM-L6, BGE-small, E5-small
    64,  # BERT, RoBERTa, DistilBERT, XLM-R, BART, Marian, BGE, E5
    128,  # encoders made of Llama, Qwen and Mistral
    256,  # Gemma
)
#: Head dimensions (of queries and keys, of values) of the instances of "wgmma".
WGMMA_DIMS = (
    (64, 64),  # BERT, gpt-oss
    (128, 128),  # Llama, Qwen, Mistral
    (192, 128),  # DeepSeek-V3, not absorbed
    (256, 256),  # Gemma
)
_LOG2_E = 1.4426950408889634
#: "wgmma" takes the maximum of a query's dot products before it multiplies by the scale, so the scale must be positive.
_SMALLEST_WGMMA_SCALE = 1e-30
_LARGEST_STRIDE = 2**40  # the largest stride in a tensor map, in bytes
_PLAN_THREADS = 256
_SINK_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

_plan = Kernel("varlen_attention/plan_tiles", "plan_tiles")
_wgmma = Kernel("varlen_attention/attention_wgmma", "attention_wgmma", compile_s=2)
_mma = Kernel("varlen_attention/attention_mma", "attention_mma")
_fma = Kernel("varlen_attention/attention_fma", "attention_fma")


class Choice(NamedTuple):
    """A variant, and the sizes of its tiles."""

    variant: Variant
    rows: int  # of a tile of queries; with "wgmma" of each warpgroup's part of the tile
    warpgroups: int
    keys: int  # of a tile of keys
    dims: tuple[int, int]  # the largest dimensions that the instance can process


def _keys(room: int) -> int:
    """Return the keys per tile, so that a block fits in the 99 KiB of shared memory of any GPU from sm_80 on."""
    return 64 if room <= 128 else 32


def _room(dim: int) -> int:
    return next(room for room in DIMS if room >= dim)


def by_mma(dtype: str, dim: int) -> Choice:
    room, sizes = _room(dim), template.constants(_mma.file)
    keys, rows = _keys(room), sizes["ROWS"]
    shared = 2 * room * (rows + 4 * keys)  # queries, and two stages of keys and values
    launched = Launched(sizes["MMA_THREADS"], shared)
    return Choice(_mma.variant(arrays.CUDA_TYPE[dtype], room, keys, launched=launched), rows, 1, keys, (room, room))


def by_wgmma(dtype: str, dim: int, dim_v: int) -> Choice:
    room, room_v = next(room for room in WGMMA_DIMS if room[0] >= dim and room[1] >= dim_v)
    # Three consumer warpgroups are faster than two with heads of 64 (varlen_attention, query_tokens 1024, head_dim 64);
    # for larger heads a multiprocessor has registers for two. With 256 dimensions the sums of a row take the registers
    # that scores of 128 keys would need.
    warpgroups, keys, q_stages = 3 if room == 64 else 2, 64 if room == 256 else 128, 2 if room == 64 else 1
    stages = {64: 4, 128: 3}.get(room, 2)  # as many as fit in shared memory, at most 4
    # Queries, stages of keys and of values, up to 1024 bytes for their alignment, and `Shared`.
    tiles = 2 * (q_stages * 64 * warpgroups * room + stages * keys * (room + room_v))
    slots = template.constants(_wgmma.file)["TILE_SLOTS"]
    barriers = 8 * (2 * q_stages + 4 * stages + 2 * slots) + slots * 4 * (11 + 1)
    arguments = arrays.CUDA_TYPE[dtype], room, room_v, warpgroups, keys, q_stages, stages
    launched = Launched(128 * (warpgroups + 1), tiles + 1024 + -(-barriers // 16) * 16)
    return Choice(_wgmma.variant(*arguments, launched=launched), 64, warpgroups, keys, (room, room_v))


def by_fma(dtype: str, dim: int, wide: bool) -> Choice:
    room = _room(dim)
    rows = _keys(room)
    # In float32: queries, a tile of keys or values, and softmax weights. Each row has 16 bytes of padding.
    shared = 4 * rows * (2 * (room + 4) + rows + 4)
    width = 16 if wide else arrays.ITEM_SIZE[dtype]
    launched = Launched(template.constants(_fma.file)["FMA_THREADS"], shared)
    return Choice(
        _fma.variant(arrays.CUDA_TYPE[dtype], room, rows, width, launched=launched), rows, 1, rows, (room, room)
    )


_plan.at_import = [_plan.variant(_PLAN_THREADS).instance]
_wgmma.at_import = [by_wgmma("float16", 64, 64).variant.instance]
_wgmma.specialized = [
    by_wgmma(dtype, *rooms).variant.instance for dtype in ("float16", "bfloat16") for rooms in WGMMA_DIMS
]
_mma.at_import = [by_mma("float16", 64).variant.instance]
_mma.specialized = [by_mma(dtype, room).variant.instance for dtype in ("float16", "bfloat16") for room in DIMS]
# 16-bit instances are compiled at their first use, because only unaligned rows need them.
_fma.specialized = [by_fma("float32", room, True).variant.instance for room in DIMS]


class Heads(NamedTuple):
    """An array [..., tokens, heads, dim], and its strides of tokens, heads and, with a block table, pages in bytes."""

    name: str
    array: Array
    strides: tuple[int, ...]

    def map_strides(self) -> list[int] | None:
        """Return the strides of heads, tokens and pages for a tensor map; None if a tensor map cannot have them."""
        *outer, tokens, heads, dim = self.array.shape
        between_tokens, between_heads, *between_pages = self.strides
        found = []
        for size, stride in zip((heads, tokens, *outer), (between_heads, between_tokens, *between_pages), strict=False):
            # A dimension of size 1 may have any stride.
            one = dim * self.array.item_size
            found.append(stride if 0 < stride < _LARGEST_STRIDE else one if size == 1 else 0)
        return found if all(found) else None

    def map(self, tokens: int, heads: int) -> Any:
        """Return a tensor map whose boxes hold 64 columns of these numbers of tokens and heads."""
        *outer, all_tokens, all_heads, dim = self.array.shape
        strides = self.map_strides()
        assert strides is not None
        dims = (dim, all_heads, all_tokens, outer[0] if outer else 1)
        # L2 promotion is 128 bytes. A head may have only 128 bytes, so a larger promotion would fetch another head.
        columns = template.constants(_wgmma.file)["COLUMNS"]
        return tensor_map(
            self.array,
            self.array.dtype,
            dims,
            (strides[0], strides[1], strides[2] if outer else strides[1]),
            (columns, heads, tokens, 1),
            promotion=128,
        )


class Call(NamedTuple):
    """The checked arguments of a call."""

    reads: list[Heads]  # q, k and v
    sequences: int
    table: Array | None
    page_size: int
    scale: float
    softcap: float
    aligned: bool  # whether all addresses, strides and dimensions are multiples of 16 bytes
    fields: dict[str, Any]  # fields of the kernels' parameters


def _no_wgmma(x: Call) -> str:
    """Return why "wgmma" cannot compute a call that "mma" can; empty if it can."""
    arch = x.reads[0].array.gpu.arch
    if arch != "90a":
        return f"this GPU is of sm_{arch}, not sm_90a"
    for heads in x.reads:
        if 0 in heads.array.shape:
            return f"{heads.name} has no tokens"
        if heads.map_strides() is None:
            return f"{heads.name} has strides of {' and '.join(map(str, heads.strides))} bytes"
    return "" if x.scale >= _SMALLEST_WGMMA_SCALE else f"scale is below {_SMALLEST_WGMMA_SCALE:g}"


def _box(page_size: int, keys: int) -> int:
    """Return the tokens of a TMA box of keys: the largest power of two that divides a page, at most 64."""
    return min(page_size & -page_size, 64, keys)


def _launch_wgmma(x: Call, choice: Choice, pack: int, fields: dict[str, Any], why: str) -> None:
    q, k, v = x.reads
    tokens, heads = q.array.shape[:2]
    warpgroup_tokens = choice.rows // pack
    tile_tokens = warpgroup_tokens * choice.warpgroups
    starts, counter = empty((x.sequences + 2,), "int32"), empty((1,), "int32")
    launch(
        _plan.variant(_PLAN_THREADS), 1, _PLAN_THREADS,
        why=f"counts the tiles of {tile_tokens} tokens of each sequence, which only the device knows",
        cu_seqlens_q=fields["cu_seqlens_q"], starts=starts, counter=counter,
        tokens=tokens, sequences=x.sequences, tile_tokens=tile_tokens,
    )  # fmt: skip
    box = _box(x.page_size, choice.keys) if x.table is not None else 64
    tiles = (tokens // tile_tokens + x.sequences + 1) * (heads // pack)
    launch(
        choice.variant, min(q.array.gpu.multiprocessors, tiles), why=why,
        q_map=q.map(warpgroup_tokens, pack), k_map=k.map(box, 1), v_map=v.map(box, 1),
        p=fields, starts=starts, counter=counter, warpgroup_tokens=warpgroup_tokens, box_tokens=box,
    )  # fmt: skip


def attend(x: Call, variant: str, options: dict[str, Any]) -> None:
    """Choose the kernel of a call and launch it. `options` are the fields that do not affect the choice."""
    check.one_of("variant", variant, VARIANTS)
    q, k, v = (heads.array for heads in x.reads)
    (tokens, heads, dim), dim_v = q.shape, v.shape[-1]
    none = "there is none for float32" if q.item_size == 4 else ""
    none = none or ("" if x.aligned else "there is none for rows that are not 16-byte aligned")
    if variant == "mma" and none:
        check.fail("variant", "'auto' or 'fma' here", f"'mma': {none}")
    no_wgmma = ""
    if variant in ("auto", "wgmma"):
        no_wgmma = none or _no_wgmma(x)
    if variant == "wgmma" and no_wgmma:
        check.fail("variant", "'auto', 'mma' or 'fma' here", f"'wgmma': {no_wgmma}")
    # The choice must not depend on the lengths or the batch, so that the bits of a result depend on its own sequence
    # alone.
    is_wgmma = variant in ("auto", "wgmma") and not no_wgmma
    widest = max(dim, dim_v)
    if none or variant == "fma":
        choice = by_fma(q.dtype, widest, x.aligned)
        why = "float32" if q.item_size == 4 else "rows that are not 16-byte aligned"
        why = f"{why}: fma, the slow general kernel (16 bits in aligned rows take tensor cores)"
    else:
        choice = by_wgmma(q.dtype, dim, dim_v) if is_wgmma else by_mma(q.dtype, widest)
        why = (
            "wgmma, Hopper's tensor cores"
            if is_wgmma
            else f"mma, tensor cores of every GPU, as wgmma cannot: {no_wgmma}"
        )
        why = f"16 bits in aligned rows: {why}"
    group = heads // k.shape[-2]
    pack = next(n for n in range(min(group, choice.rows), 0, -1) if group % n == 0)
    tile_tokens = choice.rows // pack * choice.warpgroups
    rooms = choice.dims[0] if choice.dims[0] == choice.dims[1] else f"{choice.dims[0]} and {choice.dims[1]}"
    why = f"{asked(variant) or why}; heads of {dim} in room for {rooms}, tiles of {tile_tokens} tokens of {pack} heads"
    capped = x.softcap > 0
    sinks = options["sinks"]
    fields = (
        x.fields
        | options
        | {
            "pack": pack,
            "scale": 1.0 if capped else x.scale * _LOG2_E,
            "cap": x.softcap * _LOG2_E,
            "cap_factor": 2 * x.scale / x.softcap * _LOG2_E if capped else 0.0,
            "sink_type": _SINK_TYPES[sinks.dtype] if sinks is not None else 0,
        }
    )
    if is_wgmma:
        _launch_wgmma(x, choice, pack, fields, why)
    else:
        launch(choice.variant, (tokens // tile_tokens + x.sequences + 1, heads // pack), why=why, **fields)
