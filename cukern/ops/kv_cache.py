"""The paged KV cache: new keys and values into their slots, blocks copied, sequences gathered."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.reference import kv_cache as twin
from cukern.runtime import check, fp8
from cukern.runtime.arrays import CUDA_TYPE, ITEM_SIZE
from cukern.runtime.describe import Array, contiguous_strides, expect_array, expect_contiguous, expect_place, given_type
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.late import ceil_div, late
from cukern.runtime.op import op
from cukern.runtime.plan import launch, run_twin
from cukern.runtime.template import constants
from cukern.runtime.units import divisor, unit_width

__all__ = [
    "concat_and_cache_mla",
    "copy_blocks",
    "gather_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
]

DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = (*DTYPES, "uint8", *fp8.DTYPES)
#: FORMAT of the templates.
SAME = "SAME"
#: The `kv_cache_dtype` of FlashMLA's FP8 cache, for which there are templates apart.
DS_MLA = "fp8_ds_mla"
MLA_CACHE_DTYPES = (*fp8.KV_CACHE_DTYPES, DS_MLA)
_FORMAT = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
_DS_MLA_DTYPES = ("uint8", "float8_e4m3fn")
#: T of the templates where nothing is converted, by size.
_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}

#: Tokens, slots, and units of a row or a block: the kernels count in 31 bits, and round up to whole tiles.
MAX_COUNT = 2**31 - 2**12
WIDTHS = (16, 8, 4, 2, 1)  # bytes of a unit; what the alignment of a call allows

_store_rows = Kernel("kv_cache", "store_rows")
_store_blocks = Kernel("kv_cache", "store_blocks")
_copy_blocks = Kernel("kv_cache", "copy_blocks")
_gather_rows = Kernel("kv_cache", "gather_rows")
_store_latents = Kernel("kv_cache", "store_latents")
_gather_latents = Kernel("kv_cache", "gather_latents")

_THREADS_ITEMS = {"store_rows": (192, 3), "copy_blocks": (256, 4), "gather_rows": (256, 2)}
_WARPS = 2
_LATENTS_WARPS = 4
#: Up to so many tokens a window is shared among 8 blocks: each is then in a run of its own, or alone.
_FEW_TOKENS, _PARTS = 512, 8


def _rows_variant(dtype: str, cache_format: str, width: int, concat: bool) -> Variant:
    element = _BITS[1] if cache_format == SAME else CUDA_TYPE[dtype]
    return _store_rows.variant(element, cache_format, width, str(concat).lower(), *_THREADS_ITEMS["store_rows"])


def _blocks_variant(dtype: str, cache_format: str, aligned: bool, parts: int) -> Variant:
    element = _BITS[ITEM_SIZE[dtype]] if cache_format == SAME else CUDA_TYPE[dtype]
    return _store_blocks.variant(element, cache_format, str(aligned).lower(), _WARPS, parts)


def _gather_variant(dtype: str, cache_format: str, width: int) -> Variant:
    element = _BITS[1] if cache_format == SAME else CUDA_TYPE[dtype]
    return _gather_rows.variant(element, cache_format, width, *_THREADS_ITEMS["gather_rows"])


def _store_latents_variant(dtype: str, aligned: bool) -> Variant:
    return _store_latents.variant(CUDA_TYPE[dtype], str(aligned).lower(), _LATENTS_WARPS)


def _gather_latents_variant(dtype: str, aligned: bool) -> Variant:
    return _gather_latents.variant(CUDA_TYPE[dtype], str(aligned).lower(), *_THREADS_ITEMS["gather_rows"])


# FP8 caches, float32 and narrower units are compiled when they are first used.
for _kernel, _variants in (
    (_store_rows, [_rows_variant("bfloat16", SAME, WIDTHS[0], concat) for concat in (False, True)]),
    (_store_blocks, [_blocks_variant("bfloat16", SAME, True, parts) for parts in (1, _PARTS)]),
    (_copy_blocks, [_copy_blocks.variant(WIDTHS[0], *_THREADS_ITEMS["copy_blocks"])]),
    (_gather_rows, [_gather_variant("bfloat16", SAME, WIDTHS[0])]),
):
    _kernel.at_import = _kernel.specialized = [variant.instance for variant in _variants]


# --- what the sizes decide ----------------------------------------------------------------------------


class _Tile(NamedTuple):
    """How a block lays its units over rows."""

    threads: int
    rows: int
    chunks: int  # tiles side by side in a row
    fields: dict[str, Any]  # of the kernel's parameters


@functools.lru_cache(maxsize=1024)
def _tile(kernel: str, columns: int) -> _Tile:
    threads, items = _THREADS_ITEMS[kernel]
    chunks = -(-columns // (threads * items))
    tile_columns = -(-columns // chunks)
    rows = threads * items // tile_columns
    fields = {"columns": columns, "tile_rows": rows, "tile_columns": tile_columns}
    return _Tile(threads, rows, chunks, {**fields, "by_tile_columns": divisor(tile_columns)})


def _format(dtype: str, name: str, cache: Array, kv_cache_dtype: str) -> str:
    """FORMAT for elements of `dtype` and a cache, the argument `name`."""
    if kv_cache_dtype == "auto":
        check.dtype(name, cache.dtype, (dtype, *fp8.DTYPES))
        return SAME if cache.dtype == dtype else _FORMAT[cache.dtype]
    check.dtype(name, cache.dtype, ("uint8", fp8.FORMATS[kv_cache_dtype]))
    return _FORMAT[fp8.FORMATS[kv_cache_dtype]]


# --- checks -------------------------------------------------------------------------------------------


def _expect(
    name: str, array: Any, like: Array, like_name: str, dtypes: Sequence[str], symbols: tuple[str, ...]
) -> None:
    """`array` is where `like` is, of one of these dtypes and with the dimensions `symbols`."""
    expect_place(name, array, like, like_name)
    expect_array(name, array, dtypes, symbols)


def _distances(name: str, array: Array, outer: int, written: bool = False) -> tuple[int, ...]:
    """The strides of the first `outer` dimensions in bytes, 0 where there is nothing to step to.

    Raises ValueError unless the other dimensions lie in C order without gaps, and unless an array that is written has
    memory of its own for each element of the first ones.
    """
    shape, strides = array.shape, array.strides
    if any(size == 0 for size in shape):
        return (0,) * outer
    inner = zip(shape[outer:], strides[outer:], contiguous_strides(shape[outer:]), strict=True)
    if not all(size == 1 or stride == wanted for size, stride, wanted in inner):
        kept = f"contiguous but for its first {outer} dimensions" if outer > 1 else "contiguous within each row"
        check.fail(name, kept, f"strides {strides} (in elements)")
    if written and any(stride == 0 and size > 1 for size, stride in zip(shape[:outer], strides, strict=False)):
        check.fail(name, "an array with memory of its own for each element", "one that repeats its elements")
    return tuple(strides[i] * array.item_size if shape[i] > 1 else 0 for i in range(outer))


class _Slots(NamedTuple):
    """Where tokens go."""

    tokens: Any
    fields: dict[str, Any]  # of the kernels' parameters
    is_empty: bool


def _slots(slot_mapping: Any, like: Array, like_name: str, name: str, blocks: int, block_size: int) -> _Slots:
    """The slots of some tokens, of which `like` may have more, in the cache `name`."""
    slots = blocks * block_size
    if slots > MAX_COUNT:
        check.fail(name, f"of at most {MAX_COUNT} slots", f"{blocks} blocks of {block_size}")
    _expect("slot_mapping", slot_mapping, like, like_name, ("int64",), ("tokens",))
    expect_contiguous("slot_mapping", slot_mapping)
    tokens, most = slot_mapping.shape[0], like.shape[0]
    if tokens is not most and tokens > most:
        check.fail("slot_mapping", f"of at most the {most} tokens of {like_name}", tokens)
    if tokens > MAX_COUNT:
        check.fail("slot_mapping", f"of at most {MAX_COUNT} tokens", tokens)
    fields = {"slot_mapping": slot_mapping, "tokens": tokens, "slots": slots, "block_size": block_size}
    return _Slots(tokens, fields | {"by_block_size": divisor(max(block_size, 1))}, tokens == 0 or slots == 0)


def _keys_and_values(key: Any, value: Any) -> tuple[int, ...]:
    """The distances between tokens, of keys and of values, in bytes."""
    symbols = ("tokens", "kv_heads", "head_dim")
    expect_array("key", key, DTYPES, symbols)
    _expect("value", value, key, "key", (key.dtype,), symbols)
    if value.shape != key.shape:
        check.shape("value", value.shape, key.shape, "[tokens, kv_heads, head_dim]")
    if key.shape[1] * key.shape[2] > MAX_COUNT:
        check.fail("key", f"of at most {MAX_COUNT} elements per token", key.shape[1] * key.shape[2])
    return _distances("key", key, 1) + _distances("value", value, 1)


# --- the functions ------------------------------------------------------------------------------------

_STORE = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
_TOKENS = {"tokens": ("key", "value", "slot_mapping")}


@op(twin.reshape_and_cache, f"reshape_and_cache{_STORE}", rows=_TOKENS, late=("k_scale", "v_scale"))
def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Store new keys and values in their slots of a paged cache in vLLM's layout.

    For slot = slot_mapping[token], block = slot // block_size and place = slot % block_size:
    key_cache[block, head, d // x, place, d % x] = key[token, head, d] and
    value_cache[block, head, d, place] = value[token, head, d], divided by their scales in an FP8 cache.

    Args:
        key, value: [tokens, kv_heads, head_dim], float32, float16 or bfloat16; tokens may be strided, as in slices of a
            fused projection. Rows past the last of slot_mapping are left out.
        key_cache: [blocks, kv_heads, head_dim / x, block_size, x], where x elements are 16 bytes. Blocks and heads may
            be strided. Of the dtype of `key`, or FP8: torch.float8_e4m3fn, torch.float8_e5m2, their namesakes of
            ml_dtypes, or uint8.
        value_cache: [blocks, kv_heads, head_dim, block_size], of the dtype of key_cache; may be strided likewise.
        slot_mapping: int64 [tokens]. A token whose slot is negative, or lies beyond the cache, is left out. Where two
            tokens have the same slot, which of them each part of it then holds is undefined.
        kv_cache_dtype: "auto" (what the cache's dtype says), "fp8_e4m3" (or "fp8") or "fp8_e5m2", which a uint8 cache
            needs.
        k_scale, v_scale: float32 arrays of one element on the device of `key`, read by the kernel, or floats, or None
            for 1. An FP8 cache holds key / k_scale, computed in float32, rounded to the nearest number of the format
            (ties to even), or to its largest where that is too small. Not used for other caches.

    Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `reshape_and_cache`. There each element is written by itself; here the kernel turns up to 8
    tokens whose slots follow each other in registers, and writes whole vectors of values.
    """
    key_stride, value_stride = _keys_and_values(key, value)
    _, heads, head_dim = key.shape
    expect_place("key_cache", key_cache, key, "key")
    check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)
    cache_format = _format(key.dtype, "key_cache", key_cache, kv_cache_dtype)
    check.dimensions("key_cache", key_cache.shape, ("blocks", "kv_heads", "head_dim / x", "block_size", "x"))
    blocks, _, _, block_size, _ = key_cache.shape
    x = 16 // key_cache.item_size
    if head_dim % x:
        check.fail("key", f"of a head_dim that is a multiple of the {x} elements in 16 bytes of key_cache", head_dim)
    wanted = (blocks, heads, head_dim // x, block_size, x)
    check.shape("key_cache", key_cache.shape, wanted, "[blocks, kv_heads, head_dim / x, block_size, x]")
    symbols = ("blocks", "kv_heads", "head_dim", "block_size")
    _expect("value_cache", value_cache, key, "key", (key_cache.dtype,), symbols)
    check.shape("value_cache", value_cache.shape, (blocks, heads, head_dim, block_size), f"[{', '.join(symbols)}]")
    key_steps = _distances("key_cache", key_cache, 2, written=True)
    value_steps = _distances("value_cache", value_cache, 2, written=True)
    slots = _slots(slot_mapping, key, "key", "key_cache", blocks, block_size)
    scales = fp8.scale_of("k_scale", k_scale, key, "key"), fp8.scale_of("v_scale", v_scale, key, "key")
    if key.on_host:
        return run_twin()
    columns = heads * head_dim
    if slots.is_empty or columns == 0:
        return None
    # The rows themselves are whole units: head_dim is a multiple of x.
    steps = (key_stride, value_stride, *key_steps, *value_steps)
    alignment = min(array.alignment for array in (key, value, key_cache, value_cache))
    aligned = alignment == 16 and not any(step % 16 for step in steps)
    parts = _PARTS if slots.tokens <= _FEW_TOKENS else 1
    # The keys of an FP8 cache have longer units than the values, and fewer of them.
    units, line = columns * key.item_size // 16, constants("kv_cache")["LINE"]
    window = constants("kv_cache")["WINDOW"]
    launch(
        _blocks_variant(key.dtype, cache_format, aligned, parts),
        (late(lambda tokens: -(-tokens // window) * parts, slots.tokens), -(-units // (_WARPS * line)), 2),
        _WARPS * 32,
        key=(key, key_cache, scales[0], key_stride, *key_steps),
        value=(value, value_cache, scales[1], value_stride, *value_steps),
        columns=columns,
        head_dim=head_dim,
        by_head_dim=divisor(head_dim),
        **slots.fields,
    )
    return None


@op(twin.reshape_and_cache_flash, f"reshape_and_cache_flash{_STORE}", rows=_TOKENS, late=("k_scale", "v_scale"))
def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Store new keys and values in their slots of a paged cache in FlashAttention's layout.

    For slot = slot_mapping[token]: cache[slot // block_size, slot % block_size] = key[token] or value[token], divided
    by its scale in an FP8 cache.

    Args:
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], of one dtype as in `reshape_and_cache`.
            Blocks, tokens and heads may be strided, so that slices of one array [blocks, 2, ...] do, and heads may come
            before tokens in memory.
        key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale: as in `reshape_and_cache`, with any head_dim; and so
            are the errors.

    The function is vLLM's `reshape_and_cache_flash`.
    """
    new_strides = _keys_and_values(key, value)
    _, heads, head_dim = key.shape
    expect_place("key_cache", key_cache, key, "key")
    check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)
    cache_format = _format(key.dtype, "key_cache", key_cache, kv_cache_dtype)
    symbols = ("blocks", "block_size", "kv_heads", "head_dim")
    check.dimensions("key_cache", key_cache.shape, symbols)
    shape = (*key_cache.shape[:2], heads, head_dim)
    cache_strides = []
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        expect_place(name, cache, key, "key")
        check.dtype(name, cache.dtype, (key_cache.dtype,))
        check.shape(name, cache.shape, shape, f"[{', '.join(symbols)}]")
        cache_strides.append(_distances(name, cache, 3, written=True))
    slots = _slots(slot_mapping, key, "key", "key_cache", *shape[:2])
    scales = fp8.scale_of("k_scale", k_scale, key, "key"), fp8.scale_of("v_scale", v_scale, key, "key")
    if key.on_host:
        return run_twin()
    if slots.is_empty or heads * head_dim == 0:
        return None
    item_size = key.item_size
    ratio = 1 if cache_format == SAME else item_size
    mask = key.alignment | value.alignment | new_strides[0] | new_strides[1] | head_dim * item_size
    for of_cache in (key_cache.alignment, value_cache.alignment, *cache_strides[0], *cache_strides[1]):
        mask |= of_cache * ratio
    width = unit_width("key", mask, item_size)
    columns, head_columns = heads * head_dim * item_size // width, head_dim * item_size // width
    tile = _tile("store_rows", columns)
    launch(
        _rows_variant(key.dtype, cache_format, width, False),
        (ceil_div(slots.tokens, tile.rows), tile.chunks, 2),
        tile.threads,
        rows=[
            (new, cache, scale, new_stride, *strides, columns, head_columns, divisor(head_columns))
            for new, cache, scale, new_stride, strides in zip(
                (key, value), (key_cache, value_cache), scales, new_strides, cache_strides, strict=True
            )
        ],
        **slots.fields,
        **tile.fields,
    )
    return None


@op(
    twin.concat_and_cache_mla,
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
    "Tensor? scale) -> ()",
    rows={"tokens": ("kv_c", "k_pe", "slot_mapping")},
    late=("scale",),
)
def concat_and_cache_mla(
    kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, scale: Any
) -> None:
    """Store the latents and the rotated parts of new tokens, side by side, in their slots of an MLA cache.

    For slot = slot_mapping[token]: kv_cache[slot // block_size, slot % block_size] = [kv_c[token], k_pe[token]],
    divided by the scale in an FP8 cache.

    Args:
        kv_c: [tokens, kv_lora_rank], float32, float16 or bfloat16; tokens may be strided.
        k_pe: [tokens, rope_dim] or [tokens, 1, rope_dim], of the same dtype; tokens may be strided.
        kv_cache: [blocks, block_size, kv_lora_rank + rope_dim], of a dtype as in `reshape_and_cache`; blocks and tokens
            may be strided. For "fp8_ds_mla" it is [blocks, block_size, 656] of bytes, uint8 or float8_e4m3fn.
        slot_mapping, scale: as in `reshape_and_cache`, and so are the errors.
        kv_cache_dtype: as in `reshape_and_cache`, or "fp8_ds_mla", FlashMLA's FP8 cache, which takes a kv_lora_rank of
            512 and a rope_dim of 64 and has its own scales: `scale` is not used there.

    A token in FlashMLA's FP8 cache, which `flash_mla_with_kvcache` reads with is_fp8_kvcache, takes 656 bytes: 512 of
    float8_e4m3fn, 4 float32 scales, one for each 128 of those, and 64 bfloat16. For each 128 of kv_c, in float32,
    scale = max(max(abs(x)) / 448, 2**-126) and stored = x / scale, each operation and the conversion rounded to the
    nearest (ties to even); k_pe is rounded to bfloat16. So zeros stay zeros. NaN is left out of the maximum and stored
    as NaN; an infinity makes the scale infinite, and all its 128 numbers are read as NaN.

    The function is vLLM's `concat_and_cache_mla`.
    """
    expect_array("kv_c", kv_c, DTYPES, ("tokens", "kv_lora_rank"))
    expect_place("k_pe", k_pe, kv_c, "kv_c")
    symbols = ("tokens", "1", "rope_dim") if len(k_pe.shape) == 3 and k_pe.shape[1] == 1 else ("tokens", "rope_dim")
    expect_array("k_pe", k_pe, (kv_c.dtype,), symbols)
    (rows, rank), rope_dim = kv_c.shape, k_pe.shape[-1]
    if k_pe.shape[0] is not rows and k_pe.shape[0] != rows:
        check.shape("k_pe", (k_pe.shape[0], rope_dim), (rows, rope_dim), "[tokens, rope_dim]")
    expect_place("kv_cache", kv_cache, kv_c, "kv_c")
    check.one_of("kv_cache_dtype", kv_cache_dtype, MLA_CACHE_DTYPES)
    scaled = kv_cache_dtype == DS_MLA
    if scaled:
        check.dtype("kv_cache", kv_cache.dtype, _DS_MLA_DTYPES)
        if rank != twin.LATENTS:
            check.fail("kv_c", f"of a kv_lora_rank of {twin.LATENTS} for {DS_MLA!r}", rank)
        if rope_dim != twin.ROTARY:
            check.fail("k_pe", f"of a rope_dim of {twin.ROTARY} for {DS_MLA!r}", rope_dim)
    cache_format = SAME if scaled else _format(kv_c.dtype, "kv_cache", kv_cache, kv_cache_dtype)
    last, entry = (str(twin.ENTRY), twin.ENTRY) if scaled else ("kv_lora_rank + rope_dim", rank + rope_dim)
    check.dimensions("kv_cache", kv_cache.shape, ("blocks", "block_size", last))
    blocks, block_size, _ = kv_cache.shape
    check.shape("kv_cache", kv_cache.shape, (blocks, block_size, entry), f"[blocks, block_size, {last}]")
    if entry > MAX_COUNT:
        check.fail("kv_c", f"of at most {MAX_COUNT} elements per token", entry)
    block_stride, token_stride = _distances("kv_cache", kv_cache, 2, written=True)
    (kv_c_stride,), (k_pe_stride,) = _distances("kv_c", kv_c, 1), _distances("k_pe", k_pe, 1)
    slots = _slots(slot_mapping, kv_c, "kv_c", "kv_cache", blocks, block_size)
    scale = fp8.scale_of("scale", scale, kv_c, "kv_c")
    if kv_c.on_host:
        return run_twin()
    if slots.is_empty or entry == 0:
        return None
    sources = [array for array, size in ((kv_c, rank), (k_pe, rope_dim)) if size]
    mask = functools.reduce(int.__or__, (array.alignment for array in sources), kv_c_stride | k_pe_stride)
    cache_mask = kv_cache.alignment | block_stride | token_stride
    if scaled:
        launch(
            _store_latents_variant(kv_c.dtype, (mask | cache_mask) % 16 == 0),
            ceil_div(slots.tokens, _LATENTS_WARPS),
            _LATENTS_WARPS * 32,
            latents=kv_c,
            rotary=k_pe,
            cache=kv_cache,
            latents_stride=kv_c_stride,
            rotary_stride=k_pe_stride,
            block_stride=block_stride,
            token_stride=token_stride,
            **slots.fields,
        )
        return None
    item_size = kv_c.item_size
    mask |= rank * item_size | rope_dim * item_size | cache_mask * (1 if cache_format == SAME else item_size)
    width = unit_width("kv_c", mask, item_size)
    columns = rank * item_size // width, rope_dim * item_size // width
    tile = _tile("store_rows", sum(columns))
    launch(
        _rows_variant(kv_c.dtype, cache_format, width, True),
        (ceil_div(slots.tokens, tile.rows), tile.chunks),
        tile.threads,
        rows=[
            (kv_c if rank else None, kv_cache, scale, kv_c_stride, block_stride, token_stride, 0, columns[0], 0, None),
            (k_pe if rope_dim else None, None, (None, 1.0), k_pe_stride, 0, 0, 0, 0, 0, None),
        ],
        **slots.fields,
        **tile.fields,
    )
    return None


@op(
    twin.copy_blocks,
    "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()",
    rows={"pairs": ("block_mapping",)},
)
def copy_blocks(key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks of the caches of all layers: cache[to] = cache[from] for each pair (from, to) of block_mapping.

    Args:
        key_caches, value_caches: lists of arrays [blocks, ...], one per layer, all of one dtype that a cache may have,
            with as many blocks of as many elements, in any layout. A block must be contiguous; all caches have their
            blocks at one distance.
        block_mapping: int64 [pairs, 2], on the device of the caches. A pair with a block that is not in the cache is
            left out. The pairs are copied at the same time: what becomes of a block that one pair writes and another
            one reads or writes is undefined.

    One launch copies 64 caches, 32 layers of keys and values; nothing but block_mapping has to be on the device.
    Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `copy_blocks`, which waits for a copy of the caches' addresses to the device.
    """
    for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        if not isinstance(caches, (tuple, list)):
            check.fail(name, "a list of arrays, one per layer", type_name(caches), TypeError)
    if len(key_caches) != len(value_caches):
        check.fail("value_caches", f"of the {len(key_caches)} layers of key_caches", len(value_caches))
    if not key_caches:
        on_gpu = isinstance(block_mapping, Array) and not block_mapping.on_host
        return None if on_gpu else run_twin()
    first, like = key_caches[0], "key_caches[0]"
    expect_array(like, first, CACHE_DTYPES)
    if not first.shape:
        check.dimensions(like, (), ("blocks", "..."))
    blocks, block_elements = first.shape[0], math.prod(first.shape[1:])
    (block_stride,) = _distances(like, first, 1, written=True)
    for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        for i, cache in enumerate(caches):
            expect_place(f"{name}[{i}]", cache, first, like)
            check.dtype(f"{name}[{i}]", cache.dtype, (first.dtype,))
            if (cache.shape, cache.strides) == (first.shape, first.strides):
                continue
            if not cache.shape or (cache.shape[0], math.prod(cache.shape[1:])) != (blocks, block_elements):
                wanted = f"of {blocks} blocks of {block_elements} elements like {like}"
                check.fail(f"{name}[{i}]", wanted, f"shape {list(cache.shape)}")
            if _distances(f"{name}[{i}]", cache, 1, written=True) != (block_stride,):
                distance = f"with its blocks at the distance of those of {like}"
                check.fail(f"{name}[{i}]", distance, f"strides {cache.strides} (in elements)")
    _expect("block_mapping", block_mapping, first, like, ("int64",), ("pairs", "2"))
    pairs = block_mapping.shape[0]
    if block_mapping.shape[1] != 2:
        check.shape("block_mapping", block_mapping.shape, (pairs, 2), "[pairs, 2]")
    expect_contiguous("block_mapping", block_mapping)
    if first.on_host:
        return run_twin()
    block_bytes = block_elements * first.item_size
    if pairs == 0 or blocks == 0 or block_bytes == 0:
        return None
    every = [*key_caches, *value_caches]
    width = unit_width(like, block_stride | block_bytes | min(cache.alignment for cache in every), first.item_size)
    threads, items = _THREADS_ITEMS["copy_blocks"]
    columns = block_bytes // width
    parts = -(-columns // (threads * items))
    if columns > MAX_COUNT:
        check.fail(like, f"of blocks of at most {MAX_COUNT * width} bytes", block_bytes)
    if pairs > MAX_COUNT // parts:
        check.fail("block_mapping", f"of at most {MAX_COUNT // parts} pairs for blocks of this size", pairs)
    most = constants("kv_cache")["CACHES"]
    for i in range(0, len(every), most):
        some = every[i : i + most]
        launch(
            _copy_blocks.variant(width, threads, items),
            (pairs if parts == 1 else pairs * parts, len(some)),
            threads,
            cache=[*some, *[None] * (most - len(some))],
            block_mapping=block_mapping,
            block_stride=block_stride,
            blocks=blocks,
            columns=columns,
            parts=parts,
        )
    return None


def _batch(batch_size: Any, rows: int, lengths: int, starts: int | None) -> int:
    """How many sequences to gather, with so many rows of the table, cu_seq_lens and seq_starts."""
    batch = check.integer("batch_size", batch_size, 0, rows, "the rows of block_table")
    for name, least, found in (("cu_seq_lens", batch + 1, lengths), ("seq_starts", batch, starts)):
        if found is not None and found < least:
            check.fail(name, f"of at least {least} elements for batch_size {batch}", found)
    return batch


@op(
    twin.gather_cache,
    "gather_cache(Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor cu_seq_lens, SymInt batch_size, "
    "Tensor? seq_starts=None, *, str kv_cache_dtype='auto', Tensor? scale=None) -> ()",
    rows={"tokens": ("dst",), "table": ("block_table",), "lengths": ("cu_seq_lens",), "starts": ("seq_starts",)},
    late=("batch_size", "scale"),
)
def gather_cache(
    src_cache: Any,
    dst: Any,
    block_table: Any,
    cu_seq_lens: Any,
    batch_size: int,
    seq_starts: Any = None,
    *,
    kv_cache_dtype: str = "auto",
    scale: Any = None,
) -> None:
    """The tokens of sequences, one after the other, out of a paged cache.

    For sequence b and t < cu_seq_lens[b + 1] - cu_seq_lens[b]: dst[cu_seq_lens[b] + t] =
    src_cache[block_table[b, seq_starts[b] // block_size + t // block_size], t % block_size].

    Args:
        src_cache: [blocks, block_size, ...], of any dtype that a cache may have; blocks and tokens may be strided.
        dst: [tokens, ...], with the last dimensions of src_cache; tokens may be strided. Of the same dtype, or float32,
            float16 or bfloat16 for an FP8 cache: then it gets scale * stored, computed in float32 and rounded once.
            From FlashMLA's FP8 cache these are rows of 576 numbers, the last 64 of them rounded from bfloat16.
        block_table: int32 [batch, max_blocks], with at least batch_size rows; rows may be strided.
        cu_seq_lens: int32 [batch + 1], the tokens before each sequence, and of all. They must not fall.
        batch_size: how many sequences to gather.
        seq_starts: int32 [batch], how many tokens of each sequence come before those to gather; only whole blocks of
            them are left out. Not negative.
        kv_cache_dtype: as in `concat_and_cache_mla`; it matters only where an FP8 cache is converted.
        scale: as in `reshape_and_cache`; not used where bits are copied, nor for FlashMLA's FP8 cache.

    Rows of dst that belong to no sequence, or to an entry outside of the block table or a block outside of the cache,
    are left as they are. Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `gather_cache`, with the conversions of `gather_and_maybe_dequant_cache` and
    `cp_gather_and_upconvert_fp8_kv_cache`.
    """
    expect_array("src_cache", src_cache, CACHE_DTYPES)
    if len(src_cache.shape) < 2:
        check.dimensions("src_cache", src_cache.shape, ("blocks", "block_size", "..."))
    (blocks, block_size), entry = src_cache.shape[:2], src_cache.shape[2:]
    expect_place("dst", dst, src_cache, "src_cache")
    check.one_of("kv_cache_dtype", kv_cache_dtype, MLA_CACHE_DTYPES)
    scaled = kv_cache_dtype == DS_MLA and dst.dtype != src_cache.dtype
    if dst.dtype == src_cache.dtype:
        cache_format = SAME
    elif src_cache.item_size > 1 or dst.dtype not in DTYPES:
        convertible = () if src_cache.item_size > 1 else DTYPES
        check.dtype("dst", dst.dtype, (src_cache.dtype, *convertible))
    elif scaled:
        check.dtype("src_cache", src_cache.dtype, _DS_MLA_DTYPES)
        if entry != (twin.ENTRY,):
            wanted = blocks, block_size, twin.ENTRY
            check.shape("src_cache", src_cache.shape, wanted, f"[blocks, block_size, {twin.ENTRY}]")
        cache_format = _FORMAT["float8_e4m3fn"]
    else:
        cache_format = _format(dst.dtype, "src_cache", src_cache, kv_cache_dtype)
    tokens = dst.shape[0] if dst.shape else 0
    row = (twin.LATENTS + twin.ROTARY,) if scaled else entry
    if not dst.shape or dst.shape[1:] != row:
        if scaled:
            check.shape("dst", dst.shape, (tokens, *row), f"[tokens, {row[0]}]")
        check.fail("dst", f"of shape [tokens, ...] = {['tokens', *row]} like src_cache", list(dst.shape))
    block_stride, token_stride = _distances("src_cache", src_cache, 2)
    (dst_stride,) = _distances("dst", dst, 1, written=True)
    _expect("block_table", block_table, src_cache, "src_cache", ("int32",), ("batch", "max_blocks"))
    rows, table_columns = block_table.shape
    (table_stride,) = _distances("block_table", block_table, 1)
    vectors = [("cu_seq_lens", cu_seq_lens, "batch + 1")]
    if seq_starts is not None:
        vectors.append(("seq_starts", seq_starts, "batch"))
    for name, vector, symbol in vectors:
        _expect(name, vector, src_cache, "src_cache", ("int32",), (symbol,))
        expect_contiguous(name, vector)
    starts = None if seq_starts is None else seq_starts.shape[0]
    batch = late(_batch, batch_size, rows, cu_seq_lens.shape[0], starts)
    scale = fp8.scale_of("scale", scale, src_cache, "src_cache")
    elements = math.prod(row)
    for name, count in (
        ("src_cache", blocks),
        ("src_cache", elements),
        ("dst", tokens),
        ("block_table", table_columns),
    ):
        if count > MAX_COUNT:
            check.fail(name, f"of sizes up to {MAX_COUNT}", count)
    if src_cache.on_host:
        return run_twin()
    is_empty = tokens == 0 or elements == 0 or batch_size == 0 or blocks * block_size * table_columns == 0
    if is_empty and batch >= 0:  # compared, so that the plan checks the batch of each call
        return None
    item_size = dst.item_size
    mask, dst_mask = src_cache.alignment | block_stride | token_stride, dst.alignment | dst_stride
    if scaled:
        unit_width("dst", dst_mask, item_size)
        aligned = (mask | dst_mask) % 16 == 0
        variant, width = _gather_latents_variant(dst.dtype, aligned), 16 if aligned else item_size
    else:
        mask = mask * (1 if cache_format == SAME else item_size) | dst_mask | elements * item_size
        width = unit_width("src_cache", mask, item_size)
        variant = _gather_variant(dst.dtype, cache_format, width)
    tile = _tile("gather_rows", elements * item_size // width)
    launch(
        variant,
        (ceil_div(tokens, tile.rows), tile.chunks),
        tile.threads,
        src=src_cache,
        dst=dst,
        block_table=block_table,
        cu_seq_lens=cu_seq_lens,
        seq_starts=seq_starts,
        scale=scale,
        block_stride=block_stride,
        token_stride=token_stride,
        dst_stride=dst_stride,
        table_stride=table_stride // 4,
        blocks=blocks,
        table_columns=table_columns,
        batch=batch,
        tokens=tokens,
        block_size=block_size,
        by_block_size=divisor(block_size),
        **tile.fields,
    )
    return None
