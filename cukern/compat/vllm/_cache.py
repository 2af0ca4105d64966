"""The functions of `vllm._custom_ops` on a paged KV cache."""

from __future__ import annotations

from typing import Any

import torch

import cukern
from cukern.compat._limits import refuse, unless_default
from cukern.runtime.arrays import AnyArray

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def reshape_and_cache(
    key: AnyArray,
    value: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    slot_mapping: AnyArray,
    kv_cache_dtype: str,
    k_scale: AnyArray,
    v_scale: AnyArray,
    interleaved_v: bool = False,
) -> None:
    """Call `cukern.reshape_and_cache`. Refuses `interleaved_v`."""
    unless_default("reshape_and_cache", False, interleaved_v=interleaved_v)
    cukern.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def _divide_by_head_scales(
    x: AnyArray, cache: AnyArray, kv_cache_dtype: str, scale: AnyArray
) -> tuple[AnyArray, AnyArray | None]:
    """Return `x` and `scale`. If `scale` has one scale per head, return None for it, and divide `x` for an FP8 cache.

    The division rounds as in the kernel: once to float32 here, and once to the format of the cache.
    """
    is_per_head = isinstance(scale, torch.Tensor) and scale.dim() == 1 and scale.numel() > 1
    if not is_per_head or scale.dtype != torch.float32 or scale.device != x.device or scale.shape != x.shape[1:2]:
        return x, scale  # one scale; or invalid scales, which the kernel's checks refuse
    is_fp8 = kv_cache_dtype != "auto" or cache.dtype in _FP8
    return (x / scale[:, None] if is_fp8 else x), None


def reshape_and_cache_flash(
    key: AnyArray,
    value: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    slot_mapping: AnyArray,
    kv_cache_dtype: str,
    k_scale: AnyArray,
    v_scale: AnyArray,
) -> None:
    """Call `cukern.reshape_and_cache_flash`.

    With an FP8 cache and scales per head, float32 copies of the keys and values are divided by the scales first.
    """
    had_same_dtype = key.dtype == value.dtype
    key, k_scale = _divide_by_head_scales(key, key_cache, kv_cache_dtype, k_scale)
    value, v_scale = _divide_by_head_scales(value, value_cache, kv_cache_dtype, v_scale)
    if had_same_dtype and key.dtype != value.dtype:  # only one of the two was divided
        key, value = key.float(), value.float()
    cukern.reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)


def concat_and_cache_mla(
    kv_c: AnyArray,
    k_pe: AnyArray,
    kv_cache: AnyArray,
    slot_mapping: AnyArray,
    kv_cache_dtype: str,
    scale: AnyArray,
    skip_scale: bool = False,
) -> None:
    """Call `cukern.concat_and_cache_mla`. Refuses `skip_scale`."""
    unless_default("concat_and_cache_mla", False, skip_scale=skip_scale)
    cukern.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)


def copy_blocks(key_caches: list[Any], value_caches: list[Any], block_mapping: AnyArray) -> None:
    """Call `cukern.copy_blocks`."""
    cukern.copy_blocks(key_caches, value_caches, block_mapping)


def copy_blocks_mla(kv_caches: list[Any], block_mapping: AnyArray) -> None:
    """Call `cukern.copy_blocks` without value caches."""
    cukern.copy_blocks(kv_caches, [], block_mapping)


def swap_blocks(src: AnyArray, dst: AnyArray, block_size_in_bytes: int, block_mapping: AnyArray) -> None:
    """Call `cukern.swap_blocks`."""
    cukern.swap_blocks(src, dst, block_size_in_bytes, block_mapping)


def gather_and_maybe_dequant_cache(
    src_cache: AnyArray,
    dst: AnyArray,
    block_table: AnyArray,
    cu_seq_lens: AnyArray,
    token_to_seq: AnyArray,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: AnyArray,
    seq_starts: AnyArray | None = None,
) -> None:
    """Call `cukern.gather_cache` for the first `num_tokens` tokens. `token_to_seq` is ignored.

    As in vLLM, the host waits for `num_tokens` if it is a tensor.
    """
    if isinstance(num_tokens, torch.Tensor):
        num_tokens = int(num_tokens)
    if not isinstance(num_tokens, int):
        refuse("gather_and_maybe_dequant_cache", "num_tokens", "an int, as in vLLM 0.33.0", type(num_tokens).__name__)
    batch, options = cu_seq_lens.shape[0] - 1, {"kv_cache_dtype": kv_cache_dtype, "scale": scale}
    cukern.gather_cache(src_cache, dst[:num_tokens], block_table, cu_seq_lens, batch, seq_starts, **options)


def cp_gather_cache(
    src_cache: AnyArray,
    dst: AnyArray,
    block_table: AnyArray,
    cu_seq_lens: AnyArray,
    batch_size: int,
    seq_starts: AnyArray | None = None,
) -> None:
    """Call `cukern.gather_cache` without conversion."""
    cukern.gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: AnyArray,
    dst: AnyArray,
    block_table: AnyArray,
    workspace_starts: AnyArray,
    batch_size: int,
    seq_starts: AnyArray | None = None,
    host_cache: AnyArray | None = None,
    host_row_ids: AnyArray | None = None,
    device_row_ids: AnyArray | None = None,
) -> None:
    """Call `cukern.gather_cache` for FlashMLA's FP8 cache. The last sequence ends at the end of `dst`.

    Refuses `host_cache`, `host_row_ids` and `device_row_ids`.
    """
    rows = {"host_cache": host_cache, "host_row_ids": host_row_ids, "device_row_ids": device_row_ids}
    unless_default("cp_gather_and_upconvert_fp8_kv_cache", None, **rows)
    ends = torch.nn.functional.pad(workspace_starts[:batch_size], (0, 1), value=dst.shape[0])
    cukern.gather_cache(src_cache, dst, block_table, ends, batch_size, seq_starts, kv_cache_dtype="fp8_ds_mla")
