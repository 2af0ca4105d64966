"""The kernels of `kv_cache`, and shared checks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.runtime import check, fp8
from cukern.runtime.arrays import CUDA_TYPE, ITEM_SIZE, strides_of
from cukern.runtime.describe import Array, expect_array, expect_contiguous, expect_place
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.vectors import divisor

DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = (*DTYPES, "uint8", *fp8.DTYPES)
#: Template argument FORMAT: SAME for a copy without conversion, else the FP8 format of the cache.
SAME = "SAME"
FORMAT = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
#: FlashMLA's FP8 cache, which has its own kernels.
DS_MLA = "fp8_ds_mla"
MLA_CACHE_DTYPES = (*fp8.KV_CACHE_DTYPES, DS_MLA)
DS_MLA_DTYPES = ("uint8", "float8_e4m3fn")
#: Template argument T for a copy without conversion, by element size in bytes.
_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned"}

#: The largest number of tokens, of slots, and of vectors per row or block. Kernels round these numbers up to whole
#: tiles, and have 32-bit indices.
MAX_COUNT = 2**31 - 2**12
WIDTHS = (16, 8, 4, 2, 1)  # bytes of a vector: the widest that the alignment allows

_store_rows = Kernel("kv_cache/store_rows", "store_rows")
_store_blocks = Kernel("kv_cache/store_blocks", "store_blocks")
_copy_blocks = Kernel("kv_cache/copy_blocks", "copy_blocks")
_gather_rows = Kernel("kv_cache/gather_rows", "gather_rows")
_store_latents = Kernel("kv_cache/store_latents", "store_latents")
_gather_latents = Kernel("kv_cache/gather_latents", "gather_latents")

#: For each kernel: threads per block, and vectors per thread.
THREADS_ITEMS = {"store_rows": (192, 3), "copy_blocks": (256, 4), "gather_rows": (256, 2)}
WARPS = 2  # per block of store_blocks
LATENTS_WARPS = 4  # per block of store_latents
#: For up to FEW_TOKENS tokens, store_blocks has SPLITS thread blocks per tile of tokens, and each thread copies one
#: token. For more tokens it has one thread block per tile.
FEW_TOKENS, SPLITS = 512, 8


def rows_variant(dtype: str, cache_format: str, width: int, concat: bool) -> Variant:
    element = _BITS[1] if cache_format == SAME else CUDA_TYPE[dtype]
    return _store_rows.variant(element, cache_format, width, concat, *THREADS_ITEMS["store_rows"])


def blocks_variant(dtype: str, cache_format: str, aligned: bool, splits: int) -> Variant:
    element = _BITS[ITEM_SIZE[dtype]] if cache_format == SAME else CUDA_TYPE[dtype]
    return _store_blocks.variant(element, cache_format, aligned, WARPS, splits)


def gather_variant(dtype: str, cache_format: str, width: int) -> Variant:
    element = _BITS[1] if cache_format == SAME else CUDA_TYPE[dtype]
    return _gather_rows.variant(element, cache_format, width, *THREADS_ITEMS["gather_rows"])


def store_latents_variant(dtype: str, aligned: bool) -> Variant:
    return _store_latents.variant(CUDA_TYPE[dtype], aligned, LATENTS_WARPS)


def gather_latents_variant(dtype: str, aligned: bool) -> Variant:
    return _gather_latents.variant(CUDA_TYPE[dtype], aligned, *THREADS_ITEMS["gather_rows"])


def copy_variant(width: int) -> Variant:
    return _copy_blocks.variant(width, *THREADS_ITEMS["copy_blocks"])


# Instances for FP8 caches, float32 or narrower vectors are compiled at first use.
for _kernel, _variants in (
    (_store_rows, [rows_variant("bfloat16", SAME, WIDTHS[0], concat) for concat in (False, True)]),
    (_store_blocks, [blocks_variant("bfloat16", SAME, True, splits) for splits in (1, SPLITS)]),
    (_copy_blocks, [copy_variant(WIDTHS[0])]),
    (_gather_rows, [gather_variant("bfloat16", SAME, WIDTHS[0])]),
):
    _kernel.at_import = _kernel.specialized = [variant.instance for variant in _variants]


# --- sizes --------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The rows of a thread block: several whole rows, or one chunk of a long row."""

    threads: int
    rows: int
    chunks: int  # per row; 1 if a tile has whole rows
    fields: dict[str, Any]  # fields of the kernel's parameters


@functools.lru_cache(maxsize=1024)
def tile_of(kernel: str, columns: int) -> Tile:
    threads, items = THREADS_ITEMS[kernel]
    chunks = -(-columns // (threads * items))
    tile_columns = -(-columns // chunks)
    rows = threads * items // tile_columns
    fields = {"columns": columns, "tile_rows": rows, "tile_columns": tile_columns}
    return Tile(threads, rows, chunks, {**fields, "by_tile_columns": divisor(tile_columns)})


def format_of(dtype: str, name: str, cache: Array, kv_cache_dtype: str) -> str:
    """Return the template argument FORMAT. Error messages call the cache `name`."""
    if kv_cache_dtype == "auto":
        check.dtype(name, cache.dtype, (dtype, *fp8.DTYPES))
        return SAME if cache.dtype == dtype else FORMAT[cache.dtype]
    check.dtype(name, cache.dtype, ("uint8", fp8.FORMATS[kv_cache_dtype]))
    return FORMAT[fp8.FORMATS[kv_cache_dtype]]


# --- checks -------------------------------------------------------------------------------------------


def expect_dimensions(
    name: str, array: Any, like: Array, like_name: str, dtypes: Sequence[str], symbols: tuple[str, ...]
) -> None:
    """Check device, dtype and dimensions of `array`."""
    expect_place(name, array, like, like_name)
    expect_array(name, array, dtypes, symbols)


def distances(name: str, array: Array, outer: int, written: bool = False) -> tuple[int, ...]:
    """Return the strides of the first `outer` dimensions in bytes; 0 for a dimension of size 0 or 1.

    Raises ValueError unless the other dimensions are contiguous and, if `written`, elements do not overlap in memory.
    """
    shape, strides = array.shape, array.strides
    if any(size == 0 for size in shape):
        return (0,) * outer
    inner = zip(shape[outer:], strides[outer:], strides_of(shape[outer:]), strict=True)
    if not all(size == 1 or stride == wanted for size, stride, wanted in inner):
        kept = f"contiguous but for its first {outer} dimensions" if outer > 1 else "contiguous within each row"
        check.fail(name, kept, f"strides {strides} (in elements)")
    if written and any(stride == 0 and size > 1 for size, stride in zip(shape[:outer], strides, strict=False)):
        check.fail(name, "an array with memory of its own for each element", "one that repeats its elements")
    return tuple(strides[i] * array.item_size if shape[i] > 1 else 0 for i in range(outer))


class Slots(NamedTuple):
    tokens: Any
    fields: dict[str, Any]  # fields of the kernels' parameters
    is_empty: bool


def check_slots(slot_mapping: Any, like: Array, like_name: str, name: str, blocks: int, block_size: int) -> Slots:
    """Check slot_mapping, which gives slots to the first tokens of `like`. Error messages call the cache `name`."""
    slots = blocks * block_size
    if slots > MAX_COUNT:
        check.fail(name, f"of at most {MAX_COUNT} slots", f"{blocks} blocks of {block_size}")
    expect_dimensions("slot_mapping", slot_mapping, like, like_name, ("int64",), ("tokens",))
    expect_contiguous("slot_mapping", slot_mapping)
    tokens, most = slot_mapping.shape[0], like.shape[0]
    if tokens > most:
        check.fail("slot_mapping", f"of at most the {most} tokens of {like_name}", tokens)
    if tokens > MAX_COUNT:
        check.fail("slot_mapping", f"of at most {MAX_COUNT} tokens", tokens)
    fields = {"slot_mapping": slot_mapping, "tokens": tokens, "slots": slots, "block_size": block_size}
    return Slots(tokens, fields | {"by_block_size": divisor(max(block_size, 1))}, tokens == 0 or slots == 0)


def check_keys_and_values(key: Any, value: Any, key_cache: Any, kv_cache_dtype: str) -> tuple[tuple[int, ...], str]:
    """Check keys and values. Return their token strides in bytes, and the template argument FORMAT."""
    symbols = ("tokens", "kv_heads", "head_dim")
    expect_array("key", key, DTYPES, symbols)
    expect_dimensions("value", value, key, "key", (key.dtype,), symbols)
    check.shape("value", value.shape, key.shape, "[tokens, kv_heads, head_dim]")
    if key.shape[1] * key.shape[2] > MAX_COUNT:
        check.fail("key", f"of at most {MAX_COUNT} elements per token", key.shape[1] * key.shape[2])
    strides = distances("key", key, 1) + distances("value", value, 1)
    expect_place("key_cache", key_cache, key, "key")
    check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)
    return strides, format_of(key.dtype, "key_cache", key_cache, kv_cache_dtype)
