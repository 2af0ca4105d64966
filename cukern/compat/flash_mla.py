"""A replacement for FlashMLA's `flash_mla` 1.0.0 as of 2026-04-29 (github.com/deepseek-ai/FlashMLA).

Unlike FlashMLA, this module supports all GPUs from Ampere on, any number of heads, an FP8 cache without indices, and a
16-bit cache with indices. Without indices the page size is a multiple of 16 tokens. The functions in `NOT_COVERED`
raise NotImplementedError.
"""

from __future__ import annotations

from typing import Any

import cukern
from cukern.compat._limits import not_covered
from cukern.ops.mla_decode.first_call import FlashMLASchedMeta
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

NOT_COVERED = (
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
)
__getattr__ = not_covered("cukern.compat.flash_mla", "flash_mla", names=NOT_COVERED)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return an empty plan and None, as FlashMLA 1.0.0 does. The arguments of older releases are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    block_table: AnyArray | None,
    cache_seqlens: AnyArray | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: AnyArray | None = None,
    attn_sink: AnyArray | None = None,
    extra_k_cache: AnyArray | None = None,
    extra_indices_in_kvcache: AnyArray | None = None,
    topk_length: AnyArray | None = None,
    extra_topk_length: AnyArray | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.flash_mla_with_kvcache`, which makes a plan if `tile_scheduler_metadata` is empty.

    Raises TypeError for a plan that is not from `get_mla_metadata` of this module, and ValueError for a plan that was
    made for other sizes.
    """
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        wanted, got = "what cukern.compat.flash_mla.get_mla_metadata gave", type(tile_scheduler_metadata).__name__
        check.fail("tile_scheduler_metadata", wanted, got, TypeError)
    return cukern.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
