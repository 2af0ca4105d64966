"""The paged KV cache: new keys and values into their slots, blocks copied, sequences gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cukern.reference import kv_cache as twin
from cukern.runtime import arrays, check, fp8
from cukern.runtime.kernel import Kernel, Variant
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

_store_rows = Kernel("kv_cache", "store_rows", "3Pf4q2iIi" * 2 + "P3iIi3iIi")
_store_blocks = Kernel("kv_cache", "store_blocks", "3Pf3q" * 2 + "P4iIiiIi")
_copy_blocks = Kernel("kv_cache", "copy_blocks", "64PPq3i")
_gather_rows = Kernel("kv_cache", "gather_rows", "6Pf4q5iIi3iIi")
_store_latents = Kernel("kv_cache", "store_latents", "4P4q3iIi")
_gather_latents = Kernel("kv_cache", "gather_latents", "6Pf4q5iIi3iIi")

_THREADS_ITEMS = {"store_rows": (192, 3), "copy_blocks": (256, 4), "gather_rows": (256, 2)}
_WINDOW, _LINE, _CACHES = 32, 8, 64  # as in the template
_NO_SCALE = 0, 1.0
_NO_HEADS, _NO_CACHE = (0,) * 3, (0,) * 7  # the fields of Rows after columns, and after src_stride
_WARPS = 2
_LATENTS_WARPS = 4
#: Up to so many tokens a window is shared among 8 blocks: each is then in a run of its own, or alone.
_FEW_TOKENS, _PARTS = 512, 8


def _rows_variant(dtype: str, cache_format: str, width: int, concat: bool) -> Variant:
    element = _BITS[1] if cache_format == SAME else arrays.CUDA_TYPE[dtype]
    threads_items = _THREADS_ITEMS["store_rows"]
    return _store_rows.variant(element, cache_format, width, str(concat).lower(), *threads_items)


def _blocks_variant(dtype: str, cache_format: str, aligned: bool, parts: int) -> Variant:
    element = _BITS[arrays.ITEM_SIZE[dtype]] if cache_format == SAME else arrays.CUDA_TYPE[dtype]
    return _store_blocks.variant(element, cache_format, str(aligned).lower(), _WARPS, parts)


def _gather_variant(dtype: str, cache_format: str, width: int) -> Variant:
    element = _BITS[1] if cache_format == SAME else arrays.CUDA_TYPE[dtype]
    return _gather_rows.variant(element, cache_format, width, *_THREADS_ITEMS["gather_rows"])


def _store_latents_variant(dtype: str, aligned: bool) -> Variant:
    return _store_latents.variant(arrays.CUDA_TYPE[dtype], str(aligned).lower(), _LATENTS_WARPS)


def _gather_latents_variant(dtype: str, aligned: bool) -> Variant:
    return _gather_latents.variant(arrays.CUDA_TYPE[dtype], str(aligned).lower(), *_THREADS_ITEMS["gather_rows"])


def _list_instances() -> None:
    # FP8 caches, float32 and narrower units are compiled when they are first used.
    rows = [_rows_variant("bfloat16", SAME, WIDTHS[0], concat).instance for concat in (False, True)]
    blocks = [_blocks_variant("bfloat16", SAME, True, parts).instance for parts in (1, _PARTS)]
    copy = [_copy_blocks.variant(WIDTHS[0], *_THREADS_ITEMS["copy_blocks"]).instance]
    gather = [_gather_variant("bfloat16", SAME, WIDTHS[0]).instance]
    for kernel, instances in (
        (_store_rows, rows),
        (_store_blocks, blocks),
        (_copy_blocks, copy),
        (_gather_rows, gather),
    ):
        kernel.at_import = kernel.specialized = instances


_list_instances()


# --- what the sizes decide ----------------------------------------------------------------------------


class _Tile(NamedTuple):
    """How a block lays its units over rows."""

    threads: int
    rows: int
    chunks: int  # tiles side by side in a row
    geometry: tuple[int, ...]  # the last fields of the kernel's Params


@functools.lru_cache(maxsize=1024)
def _tile(kernel: str, columns: int) -> _Tile:
    threads, items = _THREADS_ITEMS[kernel]
    chunks = -(-columns // (threads * items))
    tile_columns = -(-columns // chunks)
    rows = threads * items // tile_columns
    return _Tile(threads, rows, chunks, (columns, rows, tile_columns, *divisor(tile_columns)))


@functools.lru_cache(maxsize=1024)
def _format(dtype: str, name: str, cache_dtype: str, kv_cache_dtype: str) -> str:
    """FORMAT for elements of `dtype` and a cache of `cache_dtype`, the argument `name`."""
    if kv_cache_dtype == "auto":
        check.dtype(name, cache_dtype, (dtype, *fp8.DTYPES))
        return SAME if cache_dtype == dtype else _FORMAT[cache_dtype]
    check.dtype(name, cache_dtype, ("uint8", fp8.FORMATS[kv_cache_dtype]))
    return _FORMAT[fp8.FORMATS[kv_cache_dtype]]


# --- checks -------------------------------------------------------------------------------------------


def _dtype(name: str, array: Any, library: arrays.Library, allowed: Sequence[str], dimensions: tuple[str, ...]) -> str:
    dtype = library.dtype(array)
    if dtype not in allowed:
        check.dtype(name, dtype, allowed)
    if len(array.shape) != len(dimensions):
        check.dimensions(name, tuple(array.shape), dimensions)
    return dtype


@functools.lru_cache(maxsize=4096)
def _steps(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], item_size: int, outer: int, written: bool
) -> tuple[int, ...]:
    """The strides of the first `outer` dimensions in bytes, 0 where there is nothing to step to.

    Raises ValueError unless the other dimensions lie in C order without gaps, and unless an array that is written has
    memory of its own for each element of the first ones.
    """
    if 0 in shape:
        return (0,) * outer
    wanted = 1
    for i in range(len(shape) - 1, outer - 1, -1):
        if shape[i] != 1 and strides[i] != wanted:
            kept = f"contiguous but for its first {outer} dimensions" if outer > 1 else "contiguous within each row"
            check.fail(name, kept, f"strides {strides} (in elements)")
        wanted *= shape[i]
    for size, stride in zip(shape[:outer], strides, strict=False):
        if written and stride == 0 and size > 1:
            check.fail(name, "an array with memory of its own for each element", "one that repeats its elements")
    return tuple(strides[i] * item_size if shape[i] > 1 else 0 for i in range(outer))


def _outer_strides(name: str, array: Any, library: arrays.Library, dtype: str, outer: int) -> tuple[int, ...]:
    """`_steps` of an array that is read."""
    return _steps(name, tuple(array.shape), tuple(library.strides(array)), arrays.ITEM_SIZE[dtype], outer, False)


def _cache_strides(name: str, array: Any, library: arrays.Library, dtype: str, outer: int) -> tuple[int, ...]:
    """`_steps` of an array that is written."""
    return _steps(name, tuple(array.shape), tuple(library.strides(array)), arrays.ITEM_SIZE[dtype], outer, True)


def _tokens(slot_mapping: Any, like: str, library: arrays.Library, device: int | None, most: int) -> int:
    """How many tokens there are to store, once `slot_mapping` has been checked; `like` may have more rows."""
    arrays.same_place("slot_mapping", slot_mapping, like, library, device)
    _dtype("slot_mapping", slot_mapping, library, ("int64",), ("tokens",))
    tokens = slot_mapping.shape[0]
    arrays.contiguous("slot_mapping", slot_mapping, library)
    if tokens > most:
        check.fail("slot_mapping", f"of at most the {most} tokens of {like}", tokens)
    if tokens > MAX_COUNT:
        check.fail("slot_mapping", f"of at most {MAX_COUNT} tokens", tokens)
    return tokens


def _slots(name: str, blocks: int, block_size: int) -> int:
    slots = blocks * block_size
    if slots > MAX_COUNT:
        check.fail(name, f"of at most {MAX_COUNT} slots", f"{blocks} blocks of {block_size}")
    return slots


class _New(NamedTuple):
    """New keys and values, checked."""

    library: arrays.Library
    device: int | None
    dtype: str
    rows: int  # may be more than there are tokens to store
    heads: int
    head_dim: int
    strides: tuple[int, ...]  # between tokens, of keys and of values, in bytes


def _keys_and_values(key: Any, value: Any) -> _New:
    library, device = arrays.place("key", key)
    dtype = _dtype("key", key, library, DTYPES, ("tokens", "kv_heads", "head_dim"))
    arrays.same_place("value", value, "key", library, device)
    _dtype("value", value, library, (dtype,), ("tokens", "kv_heads", "head_dim"))
    rows, heads, head_dim = key.shape
    if value.shape != key.shape:
        check.shape("value", tuple(value.shape), (rows, heads, head_dim), "[tokens, kv_heads, head_dim]")
    if heads * head_dim > MAX_COUNT:
        check.fail("key", f"of at most {MAX_COUNT} elements per token", heads * head_dim)
    strides = _outer_strides("key", key, library, dtype, 1) + _outer_strides("value", value, library, dtype, 1)
    return _New(library, device, dtype, rows, heads, head_dim, strides)


def _in_host_memory(
    function: Callable[..., None], library: arrays.Library, written: Sequence[Any], *args: Any, **keywords: Any
) -> None:
    """Run the NumPy twin. What it writes into arrays that had to be copied for it is copied back."""
    copies = {id(array): library.to_numpy(array) for array in written}

    def to_numpy(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [to_numpy(x) for x in value]
        if id(value) in copies:
            return copies[id(value)]
        return library.to_numpy(value) if arrays.is_array(value) else value

    function(*map(to_numpy, args), **{name: to_numpy(value) for name, value in keywords.items()})
    for array in written:
        copy = copies[id(array)]
        if copy.size and library.address(array) != arrays.NUMPY.address(copy):
            array[...] = library.from_numpy(copy, array)


# --- the functions ------------------------------------------------------------------------------------


@arrays.takes_dlpack
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
    new = _keys_and_values(key, value)
    library, device, heads, head_dim = new.library, new.device, new.heads, new.head_dim
    arrays.same_place("key_cache", key_cache, "key", library, device)
    if kv_cache_dtype not in fp8.KV_CACHE_DTYPES:
        check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)
    cache_dtype = library.dtype(key_cache)
    cache_format = _format(new.dtype, "key_cache", cache_dtype, kv_cache_dtype)
    if len(key_cache.shape) != 5:
        check.dimensions("key_cache", tuple(key_cache.shape), ("blocks", "kv_heads", "head_dim / x", "block_size", "x"))
    blocks, _, _, block_size, _ = key_cache.shape
    size = arrays.ITEM_SIZE[cache_dtype]
    x = 16 // size
    if head_dim % x:
        check.fail("key", f"of a head_dim that is a multiple of the {x} elements in 16 bytes of key_cache", head_dim)
    if tuple(key_cache.shape) != (blocks, heads, head_dim // x, block_size, x):
        symbols = "[blocks, kv_heads, head_dim / x, block_size, x]"
        check.shape("key_cache", tuple(key_cache.shape), (blocks, heads, head_dim // x, block_size, x), symbols)
    arrays.same_place("value_cache", value_cache, "key", library, device)
    _dtype("value_cache", value_cache, library, (cache_dtype,), ("blocks", "kv_heads", "head_dim", "block_size"))
    if tuple(value_cache.shape) != (blocks, heads, head_dim, block_size):
        symbols = "[blocks, kv_heads, head_dim, block_size]"
        check.shape("value_cache", tuple(value_cache.shape), (blocks, heads, head_dim, block_size), symbols)
    key_strides = _cache_strides("key_cache", key_cache, library, cache_dtype, 2)
    value_strides = _cache_strides("value_cache", value_cache, library, cache_dtype, 2)
    slots = _slots("key_cache", blocks, block_size)
    tokens = _tokens(slot_mapping, "key", library, device, new.rows)
    k_address, k_number = fp8.scale("k_scale", k_scale, "key", library, device)
    v_address, v_number = fp8.scale("v_scale", v_scale, "key", library, device)
    if device is None:
        args = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
        return _in_host_memory(twin.reshape_and_cache, library, (key_cache, value_cache), *args)
    columns = heads * head_dim
    if tokens == 0 or slots == 0 or columns == 0:
        return None
    address = library.address
    sources = address(key), address(value)
    caches = address(key_cache), address(value_cache)
    mask = sources[0] | sources[1] | caches[0] | caches[1] | new.strides[0] | new.strides[1]
    mask |= key_strides[0] | key_strides[1] | value_strides[0] | value_strides[1]
    # The rows themselves are whole units: head_dim is a multiple of x.
    parts = _PARTS if tokens <= _FEW_TOKENS else 1
    variant = _blocks_variant(new.dtype, cache_format, mask % 16 == 0, parts)
    # The keys of an FP8 cache have longer units than the values, and fewer of them.
    units = columns * arrays.ITEM_SIZE[new.dtype] // 16
    variant.launch(
        device,
        library.stream(device),
        (-(-tokens // _WINDOW) * parts, -(-units // (_WARPS * _LINE)), 2),
        (_WARPS * 32, 1, 1),
        0,
        sources[0],
        caches[0],
        k_address,
        k_number,
        new.strides[0],
        *key_strides,
        sources[1],
        caches[1],
        v_address,
        v_number,
        new.strides[1],
        *value_strides,
        address(slot_mapping),
        tokens,
        slots,
        columns,
        head_dim,
        *divisor(head_dim),
        block_size,
        *divisor(block_size),
    )
    return None


@arrays.takes_dlpack
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
    new = _keys_and_values(key, value)
    library, device, heads, head_dim = new.library, new.device, new.heads, new.head_dim
    arrays.same_place("key_cache", key_cache, "key", library, device)
    if kv_cache_dtype not in fp8.KV_CACHE_DTYPES:
        check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)
    cache_dtype = library.dtype(key_cache)
    cache_format = _format(new.dtype, "key_cache", cache_dtype, kv_cache_dtype)
    if len(key_cache.shape) != 4:
        check.dimensions("key_cache", tuple(key_cache.shape), ("blocks", "block_size", "kv_heads", "head_dim"))
    shape = (*tuple(key_cache.shape)[:2], heads, head_dim)
    strides = []
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        arrays.same_place(name, cache, "key", library, device)
        if library.dtype(cache) != cache_dtype:
            check.dtype(name, library.dtype(cache), (cache_dtype,))
        if tuple(cache.shape) != shape:
            check.shape(name, tuple(cache.shape), shape, "[blocks, block_size, kv_heads, head_dim]")
        strides.append(_cache_strides(name, cache, library, cache_dtype, 3))
    blocks, block_size = shape[:2]
    slots = _slots("key_cache", blocks, block_size)
    tokens = _tokens(slot_mapping, "key", library, device, new.rows)
    k_scale_fields = fp8.scale("k_scale", k_scale, "key", library, device)
    v_scale_fields = fp8.scale("v_scale", v_scale, "key", library, device)
    if device is None:
        args = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
        return _in_host_memory(twin.reshape_and_cache_flash, library, (key_cache, value_cache), *args)
    if tokens == 0 or slots == 0 or heads * head_dim == 0:
        return None
    item_size = arrays.ITEM_SIZE[new.dtype]
    ratio = 1 if cache_format == SAME else item_size
    address = library.address
    sources, caches = (address(key), address(value)), (address(key_cache), address(value_cache))
    mask = sources[0] | sources[1] | new.strides[0] | new.strides[1] | head_dim * item_size
    mask |= (caches[0] | caches[1]) * ratio
    for stride in (*strides[0], *strides[1]):
        mask |= stride * ratio
    width = unit_width("key", mask, item_size)
    columns, head_columns = heads * head_dim * item_size // width, head_dim * item_size // width
    tile = _tile("store_rows", columns)
    by_head = (columns, head_columns, *divisor(head_columns))
    _rows_variant(new.dtype, cache_format, width, False).launch(
        device,
        library.stream(device),
        (-(-tokens // tile.rows), tile.chunks, 2),
        (tile.threads, 1, 1),
        0,
        sources[0],
        caches[0],
        *k_scale_fields,
        new.strides[0],
        *strides[0],
        *by_head,
        sources[1],
        caches[1],
        *v_scale_fields,
        new.strides[1],
        *strides[1],
        *by_head,
        address(slot_mapping),
        tokens,
        slots,
        block_size,
        *divisor(block_size),
        *tile.geometry,
    )
    return None


@arrays.takes_dlpack
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
    library, device = arrays.place("kv_c", kv_c)
    dtype = _dtype("kv_c", kv_c, library, DTYPES, ("tokens", "kv_lora_rank"))
    arrays.same_place("k_pe", k_pe, "kv_c", library, device)
    if len(k_pe.shape) == 3 and k_pe.shape[1] == 1:
        k_pe = k_pe[:, 0]
    _dtype("k_pe", k_pe, library, (dtype,), ("tokens", "rope_dim"))
    (rows, rank), rope_dim = kv_c.shape, k_pe.shape[1]
    if k_pe.shape[0] != rows:
        check.shape("k_pe", tuple(k_pe.shape), (rows, rope_dim), "[tokens, rope_dim]")
    arrays.same_place("kv_cache", kv_cache, "kv_c", library, device)
    if kv_cache_dtype not in MLA_CACHE_DTYPES:
        check.one_of("kv_cache_dtype", kv_cache_dtype, MLA_CACHE_DTYPES)
    cache_dtype = library.dtype(kv_cache)
    scaled = kv_cache_dtype == DS_MLA
    if scaled:
        check.dtype("kv_cache", cache_dtype, _DS_MLA_DTYPES)
        if rank != twin.LATENTS:
            check.fail("kv_c", f"of a kv_lora_rank of {twin.LATENTS} for {DS_MLA!r}", rank)
        if rope_dim != twin.ROTARY:
            check.fail("k_pe", f"of a rope_dim of {twin.ROTARY} for {DS_MLA!r}", rope_dim)
    cache_format = SAME if scaled else _format(dtype, "kv_cache", cache_dtype, kv_cache_dtype)
    last, wanted_entry = (str(twin.ENTRY), twin.ENTRY) if scaled else ("kv_lora_rank + rope_dim", rank + rope_dim)
    if len(kv_cache.shape) != 3:
        check.dimensions("kv_cache", tuple(kv_cache.shape), ("blocks", "block_size", last))
    blocks, block_size, entry = kv_cache.shape
    if entry != wanted_entry:
        wanted = blocks, block_size, wanted_entry
        check.shape("kv_cache", tuple(kv_cache.shape), wanted, f"[blocks, block_size, {last}]")
    if entry > MAX_COUNT:
        check.fail("kv_c", f"of at most {MAX_COUNT} elements per token", entry)
    strides = _cache_strides("kv_cache", kv_cache, library, cache_dtype, 2)
    (kv_c_stride,) = _outer_strides("kv_c", kv_c, library, dtype, 1)
    (k_pe_stride,) = _outer_strides("k_pe", k_pe, library, dtype, 1)
    slots = _slots("kv_cache", blocks, block_size)
    tokens = _tokens(slot_mapping, "kv_c", library, device, rows)
    scale_fields = fp8.scale("scale", scale, "kv_c", library, device)
    if device is None:
        args = (kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)
        return _in_host_memory(twin.concat_and_cache_mla, library, (kv_cache,), *args)
    if tokens == 0 or slots == 0 or entry == 0:
        return None
    item_size = arrays.ITEM_SIZE[dtype]
    ratio = 1 if cache_format == SAME else item_size
    address = library.address
    # An array without elements may have no address.
    sources = address(kv_c) if rank else 0, address(k_pe) if rope_dim else 0
    cache = address(kv_cache)
    mask = sources[0] | sources[1] | kv_c_stride | k_pe_stride
    if scaled:
        aligned = (mask | cache | strides[0] | strides[1]) % 16 == 0
        _store_latents_variant(dtype, aligned).launch(
            device,
            library.stream(device),
            (-(-tokens // _LATENTS_WARPS), 1, 1),
            (_LATENTS_WARPS * 32, 1, 1),
            0,
            *sources,
            cache,
            address(slot_mapping),
            kv_c_stride,
            k_pe_stride,
            *strides,
            tokens,
            slots,
            block_size,
            *divisor(block_size),
        )
        return None
    mask |= rank * item_size | rope_dim * item_size | (cache | strides[0] | strides[1]) * ratio
    width = unit_width("kv_c", mask, item_size)
    columns = rank * item_size // width, rope_dim * item_size // width
    tile = _tile("store_rows", sum(columns))
    _rows_variant(dtype, cache_format, width, True).launch(
        device,
        library.stream(device),
        (-(-tokens // tile.rows), tile.chunks, 1),
        (tile.threads, 1, 1),
        0,
        sources[0],
        cache,
        *scale_fields,
        kv_c_stride,
        *strides,
        0,
        columns[0],
        *_NO_HEADS,
        sources[1],
        0,
        *_NO_SCALE,
        k_pe_stride,
        *_NO_CACHE,
        address(slot_mapping),
        tokens,
        slots,
        block_size,
        *divisor(block_size),
        *tile.geometry,
    )
    return None


@arrays.takes_dlpack
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
            check.fail(name, "a list of arrays, one per layer", type(caches).__name__, TypeError)
    if len(key_caches) != len(value_caches):
        check.fail("value_caches", f"of the {len(key_caches)} layers of key_caches", len(value_caches))
    if not key_caches:
        return None
    library, device = arrays.place("key_caches[0]", key_caches[0])
    like = "key_caches[0]"
    dtype = library.dtype(key_caches[0])
    if dtype not in CACHE_DTYPES:
        check.dtype(like, dtype, CACHE_DTYPES)
    if not key_caches[0].shape:
        check.dimensions(like, (), ("blocks", "..."))
    blocks = key_caches[0].shape[0]
    block_elements = functools.reduce(int.__mul__, map(int, key_caches[0].shape[1:]), 1)
    item_size = arrays.ITEM_SIZE[dtype]
    block_stride = _cache_strides(like, key_caches[0], library, dtype, 1)[0]
    known = key_caches[0].shape, library.strides(key_caches[0])
    for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        for i, cache in enumerate(caches):
            if arrays.library_of(cache) is not library or library.device(cache) != device:
                arrays.same_place(f"{name}[{i}]", cache, like, library, device)
            if library.dtype(cache) != dtype:
                check.dtype(f"{name}[{i}]", library.dtype(cache), (dtype,))
            shape, strides = cache.shape, library.strides(cache)
            if shape == known[0] and strides == known[1]:
                continue
            elements = functools.reduce(int.__mul__, map(int, shape[1:]), 1)
            if not shape or (shape[0], elements) != (blocks, block_elements):
                wanted = f"of {blocks} blocks of {block_elements} elements like {like}"
                check.fail(f"{name}[{i}]", wanted, f"shape {list(shape)}")
            if _cache_strides(f"{name}[{i}]", cache, library, dtype, 1)[0] != block_stride:
                distance = f"with its blocks at the distance of those of {like}"
                check.fail(f"{name}[{i}]", distance, f"strides {tuple(strides)} (in elements)")
    arrays.same_place("block_mapping", block_mapping, like, library, device)
    _dtype("block_mapping", block_mapping, library, ("int64",), ("pairs", "2"))
    pairs = block_mapping.shape[0]
    if block_mapping.shape[1] != 2:
        check.shape("block_mapping", tuple(block_mapping.shape), (pairs, 2), "[pairs, 2]")
    arrays.contiguous("block_mapping", block_mapping, library)
    every = [*key_caches, *value_caches]
    if device is None:
        return _in_host_memory(twin.copy_blocks, library, every, key_caches, value_caches, block_mapping)
    block_bytes = block_elements * item_size
    if pairs == 0 or blocks == 0 or block_bytes == 0:
        return None
    addresses = [library.address(cache) for cache in every]
    mask = block_stride | block_bytes
    for address in addresses:
        mask |= address
    width = unit_width(like, mask, item_size)
    threads, items = _THREADS_ITEMS["copy_blocks"]
    columns = block_bytes // width
    parts = -(-columns // (threads * items))
    if columns > MAX_COUNT:
        check.fail(like, f"of blocks of at most {MAX_COUNT * width} bytes", block_bytes)
    if pairs * parts > MAX_COUNT:
        check.fail("block_mapping", f"of at most {MAX_COUNT // parts} pairs for blocks of this size", pairs)
    variant = _copy_blocks.variant(width, threads, items)
    mapping, stream = library.address(block_mapping), library.stream(device)
    for first in range(0, len(addresses), _CACHES):
        some = addresses[first : first + _CACHES]
        grid = (pairs * parts, len(some), 1)
        fields = (*some, *(0,) * (_CACHES - len(some)), mapping, block_stride, blocks, columns, parts)
        variant.launch(device, stream, grid, (threads, 1, 1), 0, *fields)
    return None


@arrays.takes_dlpack
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
    library, device = arrays.place("src_cache", src_cache)
    cache_dtype = library.dtype(src_cache)
    if cache_dtype not in CACHE_DTYPES:
        check.dtype("src_cache", cache_dtype, CACHE_DTYPES)
    if len(src_cache.shape) < 2:
        check.dimensions("src_cache", tuple(src_cache.shape), ("blocks", "block_size", "..."))
    blocks, block_size = src_cache.shape[:2]
    entry = tuple(src_cache.shape)[2:]
    arrays.same_place("dst", dst, "src_cache", library, device)
    check.one_of("kv_cache_dtype", kv_cache_dtype, MLA_CACHE_DTYPES)
    dtype = library.dtype(dst)
    scaled = kv_cache_dtype == DS_MLA and dtype != cache_dtype
    if dtype == cache_dtype:
        cache_format = SAME
    elif arrays.ITEM_SIZE[cache_dtype] > 1 or dtype not in DTYPES:
        convertible = () if arrays.ITEM_SIZE[cache_dtype] > 1 else DTYPES
        check.dtype("dst", dtype, (cache_dtype, *convertible))
    elif scaled:
        check.dtype("src_cache", cache_dtype, _DS_MLA_DTYPES)
        if entry != (twin.ENTRY,):
            wanted = blocks, block_size, twin.ENTRY
            check.shape("src_cache", tuple(src_cache.shape), wanted, f"[blocks, block_size, {twin.ENTRY}]")
        cache_format = _FORMAT["float8_e4m3fn"]
    else:
        cache_format = _format(dtype, "src_cache", cache_dtype, kv_cache_dtype)
    tokens = dst.shape[0] if len(dst.shape) else 0
    if scaled:
        row: tuple[int, ...] = (twin.LATENTS + twin.ROTARY,)
        if tuple(dst.shape) != (tokens, *row):
            check.shape("dst", tuple(dst.shape), (tokens, *row), f"[tokens, {row[0]}]")
    else:
        row = entry
        if tuple(dst.shape) != (tokens, *row):
            check.fail("dst", f"of shape [tokens, ...] = {['tokens', *row]} like src_cache", list(dst.shape))
    block_stride, token_stride = _outer_strides("src_cache", src_cache, library, cache_dtype, 2)
    (dst_stride,) = _cache_strides("dst", dst, library, dtype, 1)
    arrays.same_place("block_table", block_table, "src_cache", library, device)
    _dtype("block_table", block_table, library, ("int32",), ("batch", "max_blocks"))
    rows, table_columns = block_table.shape
    table_stride = _outer_strides("block_table", block_table, library, "int32", 1)[0] // 4
    batch = check.integer("batch_size", batch_size, 0, rows, "the rows of block_table")
    vectors = [("cu_seq_lens", cu_seq_lens, batch + 1)]
    if seq_starts is not None:
        vectors.append(("seq_starts", seq_starts, batch))
    for name, vector, least in vectors:
        arrays.same_place(name, vector, "src_cache", library, device)
        _dtype(name, vector, library, ("int32",), ("batch + 1" if name == "cu_seq_lens" else "batch",))
        if vector.shape[0] < least:
            check.fail(name, f"of at least {least} elements for batch_size {batch}", vector.shape[0])
        arrays.contiguous(name, vector, library)
    scale_fields = fp8.scale("scale", scale, "src_cache", library, device)
    elements = functools.reduce(int.__mul__, map(int, row), 1)
    for name, count in (
        ("src_cache", blocks),
        ("src_cache", elements),
        ("dst", tokens),
        ("block_table", table_columns),
    ):
        if count > MAX_COUNT:
            check.fail(name, f"of sizes up to {MAX_COUNT}", count)
    if tokens == 0 or elements == 0 or batch == 0 or blocks * block_size * table_columns == 0:
        return None
    if device is None:
        args = (src_cache, dst, block_table, cu_seq_lens, batch, seq_starts)
        keywords = {"kv_cache_dtype": kv_cache_dtype, "scale": scale}
        return _in_host_memory(twin.gather_cache, library, (dst,), *args, **keywords)
    item_size = arrays.ITEM_SIZE[dtype]
    ratio = 1 if cache_format == SAME else item_size
    address = library.address
    src_address, dst_address = address(src_cache), address(dst)
    if scaled:
        unit_width("dst", dst_address | dst_stride, item_size)
        aligned = (src_address | block_stride | token_stride | dst_address | dst_stride) % 16 == 0
        variant, width = _gather_latents_variant(dtype, aligned), 16 if aligned else item_size
    else:
        mask = (src_address | block_stride | token_stride) * ratio | dst_address | dst_stride | elements * item_size
        width = unit_width("src_cache", mask, item_size)
        variant = _gather_variant(dtype, cache_format, width)
    tile = _tile("gather_rows", elements * item_size // width)
    variant.launch(
        device,
        library.stream(device),
        (-(-tokens // tile.rows), tile.chunks, 1),
        (tile.threads, 1, 1),
        0,
        src_address,
        dst_address,
        address(block_table),
        address(cu_seq_lens),
        0 if seq_starts is None else address(seq_starts),
        *scale_fields,
        block_stride,
        token_stride,
        dst_stride,
        table_stride,
        blocks,
        table_columns,
        batch,
        tokens,
        block_size,
        *divisor(block_size),
        *tile.geometry,
    )
    return None


#: For `cukern.torch_ops`: the schema of each operator; they return nothing.
TORCH_OPS: dict[str, Any] = {
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()": None,
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()": None,
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str kv_cache_dtype, "
    "Tensor? scale) -> ()": None,
    "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()": None,
    "gather_cache(Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor cu_seq_lens, SymInt batch_size, "
    "Tensor? seq_starts=None, *, str kv_cache_dtype='auto', Tensor? scale=None) -> ()": None,
}
