"""The paged KV cache: store new keys and values in their slots, copy blocks, gather sequences."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from cukern.ops.kv_cache.choose import (
    CACHE_DTYPES,
    DS_MLA,
    DS_MLA_DTYPES,
    DTYPES,
    FEW_TOKENS,
    FORMAT,
    LATENTS_WARPS,
    MAX_COUNT,
    MLA_CACHE_DTYPES,
    SAME,
    SPLITS,
    THREADS_ITEMS,
    WARPS,
    blocks_variant,
    check_keys_and_values,
    check_slots,
    copy_variant,
    distances,
    expect_dimensions,
    format_of,
    gather_latents_variant,
    gather_variant,
    rows_variant,
    store_latents_variant,
    tile_of,
)
from cukern.ops.kv_cache.swap_blocks import swap_blocks
from cukern.reference import kv_cache as twin
from cukern.runtime import check, fp8
from cukern.runtime.arrays import AnyArray, Size, WrittenArray
from cukern.runtime.describe import Array, expect_array, expect_contiguous, expect_place, expect_strided, type_name
from cukern.runtime.op import op
from cukern.runtime.plan import launch, run_twin
from cukern.runtime.template import constants
from cukern.runtime.vectors import ceil_div, divisor, vector_bytes, why_width

__all__ = [
    "concat_and_cache_mla",
    "copy_blocks",
    "gather_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]


@op(twin.reshape_and_cache)
def reshape_and_cache(
    key: AnyArray,
    value: AnyArray,
    key_cache: WrittenArray,
    value_cache: WrittenArray,
    slot_mapping: AnyArray,
    kv_cache_dtype: str,
    k_scale: AnyArray | float,
    v_scale: AnyArray | float,
) -> None:
    """Store new keys and values in a paged cache in vLLM's layout.

    For block, offset = divmod(slot_mapping[token], block_size):

        key_cache[block, head, d // x, offset, d % x] = key[token, head, d]
        value_cache[block, head, d, offset] = value[token, head, d]

    An FP8 cache stores key / k_scale and value / v_scale, computed in float32, rounded to nearest even, and saturated.

    Args:
        key, value: [tokens, kv_heads, head_dim], float32, float16 or bfloat16. Tokens may be strided. Rows past the end
            of slot_mapping are ignored.
        key_cache: [blocks, kv_heads, head_dim / x, block_size, x], where x elements are 16 bytes. Blocks and heads may
            be strided. Of the dtype of `key`, or FP8: float8_e4m3fn or float8_e5m2 (of torch or ml_dtypes), or uint8.
        value_cache: [blocks, kv_heads, head_dim, block_size], of the dtype of key_cache. Blocks and heads may be
            strided.
        slot_mapping: int64 [tokens]. A slot outside of the cache, such as -1, is skipped. If two tokens have the same
            slot, it may get elements of both.
        kv_cache_dtype: "auto" (the dtype of the cache), "fp8_e4m3" (or "fp8") or "fp8_e5m2"; not "auto" for uint8.
        k_scale, v_scale: float32 arrays of one element on the device of `key`, floats, or None for 1.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The function is from vLLM.
    """
    strides, cache_format = check_keys_and_values(key, value, key_cache, kv_cache_dtype)
    _, heads, head_dim = key.shape
    wanted_axes = ("blocks", "kv_heads", "head_dim / x", "block_size", "x")
    check.dimensions("key_cache", key_cache.shape, wanted_axes, {4: "reshape_and_cache_flash"})
    blocks, _, _, block_size, _ = key_cache.shape
    x = 16 // key_cache.item_size
    if head_dim % x:
        check.fail("key", f"of a head_dim that is a multiple of the {x} elements in 16 bytes of key_cache", head_dim)
    wanted = (blocks, heads, head_dim // x, block_size, x)
    check.shape("key_cache", key_cache.shape, wanted, "[blocks, kv_heads, head_dim / x, block_size, x]")
    symbols = ("blocks", "kv_heads", "head_dim", "block_size")
    expect_dimensions("value_cache", value_cache, key, "key", (key_cache.dtype,), symbols)
    check.shape("value_cache", value_cache.shape, (blocks, heads, head_dim, block_size), f"[{', '.join(symbols)}]")
    key_steps = distances("key_cache", key_cache, 2, written=True)
    value_steps = distances("value_cache", value_cache, 2, written=True)
    slots = check_slots(slot_mapping, key, "key", "key_cache", blocks, block_size)
    scales = fp8.scale_of("k_scale", k_scale, key, "key"), fp8.scale_of("v_scale", v_scale, key, "key")
    if key.on_host:
        return run_twin()
    columns = heads * head_dim
    if slots.is_empty or columns == 0:
        return
    # Rows are whole 16-byte vectors, because head_dim is a multiple of x, the number of elements in 16 bytes.
    steps = (*strides, *key_steps, *value_steps)
    alignment = min(array.alignment for array in (key, value, key_cache, value_cache))
    aligned = alignment == 16 and not any(step % 16 for step in steps)
    splits = SPLITS if slots.tokens <= FEW_TOKENS else 1
    # The grid has enough blocks to copy all vectors of `value`. An FP8 key cache has fewer vectors, because 16 bytes of
    # it hold more elements.
    vectors, token_lanes = columns * key.item_size // 16, constants("kv_cache/store_blocks")["TOKEN_LANES"]
    tile = constants("kv_cache/store_blocks")["TILE"]
    why = why_width(16 if aligned else key.item_size, "the rows of keys, values and caches")
    launch(
        blocks_variant(key.dtype, cache_format, aligned, splits),
        (ceil_div(slots.tokens, tile) * splits, -(-vectors // (WARPS * token_lanes)), 2),
        WARPS * 32,
        why=f"{why}; {slots.tokens} tokens: {splits} blocks to {tile} tokens ({SPLITS} up to {FEW_TOKENS} tokens)",
        key=(key, key_cache, scales[0], strides[0], *key_steps),
        value=(value, value_cache, scales[1], strides[1], *value_steps),
        columns=columns,
        head_dim=head_dim,
        by_head_dim=divisor(head_dim),
        **slots.fields,
    )


@op(twin.reshape_and_cache_flash)
def reshape_and_cache_flash(
    key: AnyArray,
    value: AnyArray,
    key_cache: WrittenArray,
    value_cache: WrittenArray,
    slot_mapping: AnyArray,
    kv_cache_dtype: str,
    k_scale: AnyArray | float,
    v_scale: AnyArray | float,
) -> None:
    """Store new keys and values in a paged cache in FlashAttention's layout.

        key_cache[slot // block_size, slot % block_size] = key[token], with slot = slot_mapping[token]

    Args:
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], of one dtype as in `reshape_and_cache`.
            Blocks, tokens and heads may be strided, in any order.
        key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale: as in `reshape_and_cache`, and so are the errors.

    The function is from vLLM.
    """
    new_strides, cache_format = check_keys_and_values(key, value, key_cache, kv_cache_dtype)
    _, heads, head_dim = key.shape
    symbols = ("blocks", "block_size", "kv_heads", "head_dim")
    check.dimensions("key_cache", key_cache.shape, symbols, {5: "reshape_and_cache"})
    shape = (*key_cache.shape[:2], heads, head_dim)
    cache_strides = []
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        expect_strided(name, cache, key, "key", (key_cache.dtype,), shape, f"[{', '.join(symbols)}]")
        cache_strides.append(distances(name, cache, 3, written=True))
    slots = check_slots(slot_mapping, key, "key", "key_cache", *shape[:2])
    scales = fp8.scale_of("k_scale", k_scale, key, "key"), fp8.scale_of("v_scale", v_scale, key, "key")
    if key.on_host:
        return run_twin()
    if slots.is_empty or heads * head_dim == 0:
        return
    item_size = key.item_size
    ratio = 1 if cache_format == SAME else item_size
    mask = key.alignment | value.alignment | new_strides[0] | new_strides[1] | head_dim * item_size
    for of_cache in (key_cache.alignment, value_cache.alignment, *cache_strides[0], *cache_strides[1]):
        mask |= of_cache * ratio
    width = vector_bytes("key", mask, item_size)
    columns, head_columns = heads * head_dim * item_size // width, head_dim * item_size // width
    tile = tile_of("store_rows", columns)
    launch(
        rows_variant(key.dtype, cache_format, width, False),
        (ceil_div(slots.tokens, tile.rows), tile.chunks, 2),
        tile.threads,
        why=why_width(width, "the rows of keys, values and caches"),
        rows=[
            (new, cache, scale, new_stride, *strides, columns, head_columns, divisor(head_columns))
            for new, cache, scale, new_stride, strides in zip(
                (key, value), (key_cache, value_cache), scales, new_strides, cache_strides, strict=True
            )
        ],
        **slots.fields,
        **tile.fields,
    )


def _check_latent_cache(kv_c: Array, k_pe: Array, kv_cache: Any, kv_cache_dtype: str) -> str:
    """Check the cache. Return the template argument FORMAT, which is SAME for FlashMLA's FP8 cache."""
    rank, rope_dim = kv_c.shape[1], k_pe.shape[-1]
    expect_place("kv_cache", kv_cache, kv_c, "kv_c")
    check.one_of("kv_cache_dtype", kv_cache_dtype, MLA_CACHE_DTYPES)
    scaled = kv_cache_dtype == DS_MLA
    if scaled:
        check.dtype("kv_cache", kv_cache.dtype, DS_MLA_DTYPES)
        if rank != twin.LATENTS:
            check.fail("kv_c", f"of a kv_lora_rank of {twin.LATENTS} for {DS_MLA!r}", rank)
        if rope_dim not in (0, twin.ROTARY):
            check.fail("k_pe", f"of a rope_dim of {twin.ROTARY} or 0 for {DS_MLA!r}", rope_dim)
    cache_format = SAME if scaled else format_of(kv_c.dtype, "kv_cache", kv_cache, kv_cache_dtype)
    last, entry = (str(twin.ENTRY), twin.ENTRY) if scaled else ("kv_lora_rank + rope_dim", rank + rope_dim)
    check.dimensions("kv_cache", kv_cache.shape, ("blocks", "block_size", last))
    blocks, block_size, _ = kv_cache.shape
    check.shape("kv_cache", kv_cache.shape, (blocks, block_size, entry), f"[blocks, block_size, {last}]")
    if entry > MAX_COUNT:
        check.fail("kv_c", f"of at most {MAX_COUNT} elements per token", entry)
    return cache_format


@op(twin.concat_and_cache_mla)
def concat_and_cache_mla(
    kv_c: AnyArray,
    k_pe: AnyArray,
    kv_cache: WrittenArray,
    slot_mapping: AnyArray,
    kv_cache_dtype: str,
    scale: AnyArray | float | None,
) -> None:
    """Store the latent and the rotary key of each new token in an MLA cache.

        kv_cache[slot // block_size, slot % block_size] = [kv_c[token], k_pe[token]], with slot = slot_mapping[token]

    An FP8 cache stores these elements divided by `scale`.

    Args:
        kv_c: [tokens, kv_lora_rank], float32, float16 or bfloat16; tokens may be strided.
        k_pe: [tokens, rope_dim] or [tokens, 1, rope_dim], of the same dtype; tokens may be strided.
        kv_cache: [blocks, block_size, kv_lora_rank + rope_dim], of a dtype as in `reshape_and_cache`; blocks and tokens
            may be strided. For "fp8_ds_mla": [blocks, block_size, 656], uint8 or float8_e4m3fn.
        slot_mapping, scale: as in `reshape_and_cache`, and so are the errors.
        kv_cache_dtype: as in `reshape_and_cache`, or "fp8_ds_mla" for FlashMLA's FP8 cache, which needs a kv_lora_rank
            of 512 and a rope_dim of 64 (or 0: zeros are stored), and computes its own scales.

    A token in FlashMLA's FP8 cache has 656 bytes: 512 float8_e4m3fn elements, one float32 scale per 128 elements, and
    64 bfloat16 elements. The scale of 128 elements x is the smallest power of two that is at least max(max(abs(x)) /
    448, 1e-4). The maximum ignores NaN. x / scale is rounded to nearest even. If one of the 128 elements is an
    infinity, all of them are read as NaN.

    The function is from vLLM.
    """
    tokens, rank = expect_array("kv_c", kv_c, DTYPES, ("tokens", "kv_lora_rank")).shape
    expect_place("k_pe", k_pe, kv_c, "kv_c")
    symbols = ("tokens", "1", "rope_dim") if len(k_pe.shape) == 3 and k_pe.shape[1] == 1 else ("tokens", "rope_dim")
    rope_dim = expect_array("k_pe", k_pe, (kv_c.dtype,), symbols).shape[-1]
    check.shape("k_pe", (k_pe.shape[0], rope_dim), (tokens, rope_dim), "[tokens, rope_dim]")
    cache_format = _check_latent_cache(kv_c, k_pe, kv_cache, kv_cache_dtype)
    blocks, block_size, entry = kv_cache.shape
    block_stride, token_stride = distances("kv_cache", kv_cache, 2, written=True)
    (kv_c_stride,), (k_pe_stride,) = distances("kv_c", kv_c, 1), distances("k_pe", k_pe, 1)
    slots = check_slots(slot_mapping, kv_c, "kv_c", "kv_cache", blocks, block_size)
    scale = fp8.scale_of("scale", scale, kv_c, "kv_c")
    if kv_c.on_host:
        return run_twin()
    if slots.is_empty or entry == 0:
        return
    sources = [array for array, size in ((kv_c, rank), (k_pe, rope_dim)) if size]
    mask = functools.reduce(int.__or__, (array.alignment for array in sources), kv_c_stride | k_pe_stride)
    cache_mask = kv_cache.alignment | block_stride | token_stride
    if kv_cache_dtype == DS_MLA:
        aligned = (mask | cache_mask) % 16 == 0
        launch(
            store_latents_variant(kv_c.dtype, aligned),
            ceil_div(slots.tokens, LATENTS_WARPS),
            LATENTS_WARPS * 32,
            why=f"{DS_MLA}: one warp per token; {why_width(16 if aligned else kv_c.item_size, 'the rows')}",
            latents=kv_c,
            rotary=k_pe if rope_dim else None,
            cache=kv_cache,
            latents_stride=kv_c_stride,
            rotary_stride=k_pe_stride,
            block_stride=block_stride,
            token_stride=token_stride,
            **slots.fields,
        )
        return
    item_size = kv_c.item_size
    mask |= rank * item_size | rope_dim * item_size | cache_mask * (1 if cache_format == SAME else item_size)
    width = vector_bytes("kv_c", mask, item_size)
    columns = rank * item_size // width, rope_dim * item_size // width
    tile = tile_of("store_rows", sum(columns))
    launch(
        rows_variant(kv_c.dtype, cache_format, width, True),
        (ceil_div(slots.tokens, tile.rows), tile.chunks),
        tile.threads,
        why=why_width(width, "the rows of kv_c, k_pe and the cache"),
        rows=[
            (kv_c if rank else None, kv_cache, scale, kv_c_stride, block_stride, token_stride, 0, columns[0], 0, None),
            (k_pe if rope_dim else None, None, (None, 1.0), k_pe_stride, 0, 0, 0, 0, 0, None),
        ],
        **slots.fields,
        **tile.fields,
    )


_FIRST_CACHE = "key_caches[0]"


def _check_caches(key_caches: Sequence[Any], value_caches: Sequence[Any]) -> int:
    """Check the caches. Return the block stride in bytes that all caches have in common."""
    first, like = key_caches[0], _FIRST_CACHE
    expect_array(like, first, CACHE_DTYPES)
    if not first.shape:
        check.dimensions(like, (), ("blocks", "..."))
    blocks, block_elements = first.shape[0], math.prod(first.shape[1:])
    (block_stride,) = distances(like, first, 1, written=True)
    for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        for i, cache in enumerate(caches):
            expect_place(f"{name}[{i}]", cache, first, like)
            check.dtype(f"{name}[{i}]", cache.dtype, (first.dtype,))
            if (cache.shape, cache.strides) == (first.shape, first.strides):
                continue
            if not cache.shape or (cache.shape[0], math.prod(cache.shape[1:])) != (blocks, block_elements):
                wanted = f"of {blocks} blocks of {block_elements} elements like {like}"
                check.fail(f"{name}[{i}]", wanted, f"shape {list(cache.shape)}")
            if distances(f"{name}[{i}]", cache, 1, written=True) != (block_stride,):
                distance = f"with its blocks at the distance of those of {like}"
                check.fail(f"{name}[{i}]", distance, f"strides {cache.strides} (in elements)")
    return block_stride


@op(twin.copy_blocks)
def copy_blocks(
    key_caches: Sequence[WrittenArray], value_caches: Sequence[WrittenArray], block_mapping: AnyArray
) -> None:
    """Copy blocks in the caches of all layers: cache[j] = cache[i] for each pair (i, j) of block_mapping.

    Args:
        key_caches, value_caches: lists of arrays [blocks, ...], one per layer, with one dtype, block size and block
            stride, and contiguous blocks. value_caches is empty for MLA caches.
        block_mapping: int64 [pairs, 2], on the device of the caches. A pair with a block outside of the cache is
            skipped. The order is undefined, so a block that one pair writes must be in no other pair.

    One launch copies up to 64 caches, whose addresses are kernel parameters.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The function is vLLM's `copy_blocks`. With an empty value_caches it is vLLM's `copy_blocks_mla`.
    """
    for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        if not isinstance(caches, (tuple, list)):
            check.fail(name, "a list of arrays, one per layer", type_name(caches), TypeError)
    if len(value_caches) not in (0, len(key_caches)):
        check.fail("value_caches", f"of the {len(key_caches)} layers of key_caches", len(value_caches))
    if not key_caches:
        if not isinstance(block_mapping, Array) or block_mapping.on_host:
            run_twin()
        return
    first, like = key_caches[0], _FIRST_CACHE
    block_stride = _check_caches(key_caches, value_caches)
    blocks, block_elements = first.shape[0], math.prod(first.shape[1:])
    expect_dimensions("block_mapping", block_mapping, first, like, ("int64",), ("pairs", "2"))
    pairs = block_mapping.shape[0]
    check.shape("block_mapping", block_mapping.shape, (pairs, 2), "[pairs, 2]")
    expect_contiguous("block_mapping", block_mapping)
    if first.on_host:
        return run_twin()
    block_bytes = block_elements * first.item_size
    if pairs == 0 or blocks == 0 or block_bytes == 0:
        return
    every = [*key_caches, *value_caches]
    width = vector_bytes(like, block_stride | block_bytes | min(cache.alignment for cache in every), first.item_size)
    threads, items = THREADS_ITEMS["copy_blocks"]
    columns = block_bytes // width
    splits = -(-columns // (threads * items))
    if columns > MAX_COUNT:
        check.fail(like, f"of blocks of at most {MAX_COUNT * width} bytes", block_bytes)
    if pairs > MAX_COUNT // splits:
        check.fail("block_mapping", f"of at most {MAX_COUNT // splits} pairs for blocks of this size", pairs)
    most = constants("kv_cache/copy_blocks")["CACHES"]
    for i in range(0, len(every), most):
        some = every[i : i + most]
        which = f"caches {i + 1} to {i + len(some)} of {len(every)}, at most {most} to a launch"
        launch(
            copy_variant(width),
            (pairs if splits == 1 else pairs * splits, len(some)),
            threads,
            why=f"{which}; {why_width(width, 'the blocks')}",
            cache=[*some, *[None] * (most - len(some))],
            block_mapping=block_mapping,
            block_stride=block_stride,
            blocks=blocks,
            columns=columns,
            splits=splits,
        )


def _check_gathered(src_cache: Any, dst: Any, kv_cache_dtype: str) -> str:
    """Check `src_cache` and `dst`. Return the template argument FORMAT."""
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
        check.dtype("src_cache", src_cache.dtype, DS_MLA_DTYPES)
        if entry != (twin.ENTRY,):
            wanted = blocks, block_size, twin.ENTRY
            check.shape("src_cache", src_cache.shape, wanted, f"[blocks, block_size, {twin.ENTRY}]")
        cache_format = FORMAT["float8_e4m3fn"]
    else:
        cache_format = format_of(dst.dtype, "src_cache", src_cache, kv_cache_dtype)
    row = (twin.LATENTS + twin.ROTARY,) if scaled else entry
    if not dst.shape or dst.shape[1:] != row:
        if scaled:
            tokens = dst.shape[0] if dst.shape else 0
            check.shape("dst", dst.shape, (tokens, *row), f"[tokens, {row[0]}]")
        check.fail("dst", f"of shape [tokens, ...] = {['tokens', *row]} like src_cache", list(dst.shape))
    return cache_format


def _check_sequences(src_cache: Array, block_table: Any, cu_seq_lens: Any, batch_size: Any, seq_starts: Any) -> Any:
    """Check the arrays that describe the sequences. Return the number of sequences."""
    expect_dimensions("block_table", block_table, src_cache, "src_cache", ("int32",), ("batch", "max_blocks"))
    vectors = [("cu_seq_lens", cu_seq_lens, 1, "batch + 1")]
    if seq_starts is not None:
        vectors.append(("seq_starts", seq_starts, 0, "batch"))
    for name, vector, _, symbol in vectors:
        expect_dimensions(name, vector, src_cache, "src_cache", ("int32",), (symbol,))
        expect_contiguous(name, vector)
    batch = check.integer("batch_size", batch_size, 0, block_table.shape[0], "the rows of block_table")
    for name, vector, more, _ in vectors:
        if vector.shape[0] < batch + more:
            check.fail(name, f"of at least {batch + more} elements for batch_size {batch}", vector.shape[0])
    return batch


@op(twin.gather_cache)
def gather_cache(
    src_cache: AnyArray,
    dst: WrittenArray,
    block_table: AnyArray,
    cu_seq_lens: AnyArray,
    batch_size: Size,
    seq_starts: AnyArray | None = None,
    *,
    kv_cache_dtype: str = "auto",
    scale: AnyArray | float | None = None,
) -> None:
    """Gather the cached tokens of several sequences into one array.

    Token t of sequence b is at position u = seq_starts[b] + t:

        dst[cu_seq_lens[b] + t] = src_cache[block_table[b, u // block_size], u % block_size]

    Args:
        src_cache: [blocks, block_size, ...], of any cache dtype; blocks and tokens may be strided.
        dst: [tokens, ...], with the last dimensions of src_cache; tokens may be strided. Of the dtype of src_cache, or
            for an FP8 cache float32, float16 or bfloat16; elements are then multiplied by `scale` in float32 and
            rounded once. For FlashMLA's FP8 cache, rows have 576 elements.
        block_table: int32 [batch, max_blocks], with at least batch_size rows; rows may be strided.
        cu_seq_lens: int32 [batch + 1], ascending: the number of tokens before each sequence, then the number of all
            tokens.
        batch_size: the number of sequences to gather.
        seq_starts: int32 [batch], not negative: the tokens to skip in each sequence.
        kv_cache_dtype: as in `concat_and_cache_mla`. It matters only if the dtypes of src_cache and dst differ.
        scale: as in `reshape_and_cache`; not for FlashMLA's FP8 cache.

    A row of dst is not written if its sequence, block table entry or block does not exist.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The function is vLLM's `gather_cache` (later `cp_gather_cache`), with the conversions of
    `gather_and_maybe_dequant_cache` and `cp_gather_and_upconvert_fp8_kv_cache`.
    """
    cache_format = _check_gathered(src_cache, dst, kv_cache_dtype)
    scaled = kv_cache_dtype == DS_MLA and cache_format != SAME
    (blocks, block_size), tokens = src_cache.shape[:2], dst.shape[0]
    block_stride, token_stride = distances("src_cache", src_cache, 2)
    (dst_stride,) = distances("dst", dst, 1, written=True)
    batch = _check_sequences(src_cache, block_table, cu_seq_lens, batch_size, seq_starts)
    table_columns = block_table.shape[1]
    (table_stride,) = distances("block_table", block_table, 1)
    scale = fp8.scale_of("scale", scale, src_cache, "src_cache")
    elements = math.prod(dst.shape[1:])
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
    if is_empty:
        return
    item_size = dst.item_size
    mask, dst_mask = src_cache.alignment | block_stride | token_stride, dst.alignment | dst_stride
    if scaled:
        vector_bytes("dst", dst_mask, item_size)
        aligned = (mask | dst_mask) % 16 == 0
        variant, width = gather_latents_variant(dst.dtype, aligned), 16 if aligned else item_size
    else:
        mask = mask * (1 if cache_format == SAME else item_size) | dst_mask | elements * item_size
        width = vector_bytes("src_cache", mask, item_size)
        variant = gather_variant(dst.dtype, cache_format, width)
    tile = tile_of("gather_rows", elements * item_size // width)
    launch(
        variant,
        (ceil_div(tokens, tile.rows), tile.chunks),
        tile.threads,
        why=f"{f'{DS_MLA}: ' if scaled else ''}{why_width(width, 'the rows of src_cache and dst')}",
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
