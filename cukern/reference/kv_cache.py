"""Store, copy and gather keys and values of a paged cache, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.formats.quantized import number_of
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # An element is copied, or divided by the scale in float32 and rounded once to FP8, as in the kernel. All NaN
    # compare equal.
    "cache": dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), Tolerance(relative=0, absolute=0)),
}

Array = NDArray[Any]

#: FlashMLA's FP8 cache has ENTRY bytes per token: LATENTS e4m3 elements, a float32 scale per GROUP elements, and the
#: rotary part of the key, ROTARY bfloat16 elements.
LATENTS, GROUP, ROTARY = 512, 128, 64
SCALES_AT = LATENTS
ROTARY_AT = SCALES_AT + LATENTS // GROUP * 4
ENTRY = ROTARY_AT + ROTARY * 2

_FP8 = {
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def _dtype(cache: Array, kv_cache_dtype: str) -> np.dtype[Any]:
    """Return the element dtype of a cache, which may be an array of bytes."""
    return _FP8[kv_cache_dtype] if kv_cache_dtype != "auto" and cache.dtype.itemsize == 1 else cache.dtype


def _stored(x: Array, cache: Array, kv_cache_dtype: str, scale: Any) -> Array:
    """Convert `x` for the cache. An FP8 cache stores the float32 quotient x / scale, saturated and rounded once."""
    dtype = _dtype(cache, kv_cache_dtype)
    if dtype == x.dtype:
        return x
    largest = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / np.float32(number_of(scale))
        return np.clip(quotient, -largest, largest).astype(dtype).view(cache.dtype)


def _scaled(latents: Array, rotary: Array) -> Array:
    """Convert tokens to FlashMLA's FP8 format, uint8 [tokens, ENTRY]. Missing rotary elements become 0."""
    if not rotary.shape[1]:
        rotary = np.zeros((len(rotary), ROTARY), rotary.dtype)
    groups = latents.astype(np.float32).reshape(-1, LATENTS // GROUP, GROUP)
    with np.errstate(all="ignore"):
        # fmax ignores NaN, as the kernel does.
        largest = np.fmax.reduce(np.abs(groups), axis=2, initial=0)
        least = np.maximum(largest / np.float32(448), np.float32(1e-4))
        mantissa, exponent = np.frexp(least)
        powers = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))  # the smallest power of two >= `least`
        scales = np.where(np.isinf(least), least, powers)
        quotients = np.clip(groups / scales[..., None], -448, 448)
        quotients[np.isnan(quotients)] = np.nan  # the kernel stores a positive NaN
        stored = quotients.astype(ml_dtypes.float8_e4m3fn).reshape(-1, LATENTS)
        parts = stored, scales, rotary.astype(ml_dtypes.bfloat16)
    return np.concatenate([x.view(np.uint8) for x in parts], axis=1)


def _unscaled(row: Array, dtype: np.dtype[Any]) -> Array:
    """Dequantize the ENTRY bytes of a token to [LATENTS + ROTARY] elements of `dtype`."""
    row = np.ascontiguousarray(row).view(np.uint8)
    stored, rotary = row[:SCALES_AT].view(ml_dtypes.float8_e4m3fn), row[ROTARY_AT:].view(ml_dtypes.bfloat16)
    scales = row[SCALES_AT:ROTARY_AT].view(np.float32).repeat(GROUP)
    return np.concatenate([(stored.astype(np.float32) * scales).astype(dtype), rotary.astype(dtype)])


def _places(slot_mapping: Array, blocks: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (token, block, index in the block) for each token whose slot is in the cache."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < blocks * block_size:
            yield token, *divmod(slot, block_size)


def reshape_and_cache(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    blocks, heads, chunks, block_size, x = key_cache.shape
    keys = _stored(key, key_cache, kv_cache_dtype, k_scale)
    values = _stored(value, value_cache, kv_cache_dtype, v_scale)
    for token, block, place in _places(slot_mapping, blocks, block_size):
        key_cache[block, :, :, place, :] = keys[token].reshape(heads, chunks, x)
        value_cache[block, :, :, place] = values[token]


def reshape_and_cache_flash(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slot_mapping: Array,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    keys = _stored(key, key_cache, kv_cache_dtype, k_scale)
    values = _stored(value, value_cache, kv_cache_dtype, v_scale)
    for token, block, place in _places(slot_mapping, *key_cache.shape[:2]):
        key_cache[block, place] = keys[token]
        value_cache[block, place] = values[token]


def concat_and_cache_mla(
    kv_c: Array, k_pe: Array, kv_cache: Array, slot_mapping: Array, kv_cache_dtype: str, scale: Any
) -> None:
    latents, rotary = kv_c[: len(slot_mapping)], k_pe.reshape(len(k_pe), k_pe.shape[-1])[: len(slot_mapping)]
    if kv_cache_dtype == "fp8_ds_mla":
        row = _scaled(latents, rotary).view(kv_cache.dtype)
    else:
        row = _stored(np.concatenate([latents, rotary], axis=1), kv_cache, kv_cache_dtype, scale)
    for token, block, place in _places(slot_mapping, *kv_cache.shape[:2]):
        kv_cache[block, place] = row[token]


def copy_blocks(key_caches: Sequence[Array], value_caches: Sequence[Array], block_mapping: Array) -> None:
    for cache in (*key_caches, *value_caches):
        inside = ((block_mapping >= 0) & (block_mapping < len(cache))).all(axis=1)
        source, target = block_mapping[inside].T
        cache[target] = cache[source]


def swap_blocks(src: Array, dst: Array, block_size_in_bytes: int, block_mapping: Array) -> None:
    of_src, of_dst = (x.reshape(-1).view(np.uint8).reshape(-1, block_size_in_bytes) for x in (src, dst))
    of_dst[block_mapping[:, 1]] = of_src[block_mapping[:, 0]]


def gather_cache(
    src_cache: Array,
    dst: Array,
    block_table: Array,
    cu_seq_lens: Array,
    batch_size: int,
    seq_starts: Array | None = None,
    *,
    kv_cache_dtype: str = "auto",
    scale: Any = None,
) -> None:
    blocks, block_size = src_cache.shape[:2]
    if block_size == 0:
        return
    for sequence in range(batch_size):
        begin, end = cu_seq_lens[sequence : sequence + 2].tolist()
        start = 0 if seq_starts is None else int(seq_starts[sequence])
        for token in range(max(begin, 0), min(end, len(dst))):
            entry, place = divmod(start + token - begin, block_size)
            if not 0 <= entry < block_table.shape[1]:
                continue
            block = int(block_table[sequence, entry])
            if 0 <= block < blocks:
                row = src_cache[block, place]
                with np.errstate(over="ignore", invalid="ignore"):
                    if src_cache.dtype == dst.dtype:
                        pass
                    elif kv_cache_dtype == "fp8_ds_mla":
                        row = _unscaled(row, dst.dtype)
                    else:
                        stored = row.view(_dtype(src_cache, kv_cache_dtype)).astype(np.float32)
                        row = (stored * np.float32(number_of(scale))).astype(dst.dtype)
                dst[token] = row
