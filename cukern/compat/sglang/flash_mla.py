"""A replacement for `sgl_kernel.flash_mla` of sglang-kernel 0.4.2.post2.

`flash_mla_sparse_fwd` and refused arguments raise NotImplementedError.
"""

from __future__ import annotations

import cukern
from cukern.compat._limits import not_covered, refuse, unless_default
from cukern.runtime.arrays import AnyArray

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

NOT_COVERED = ("flash_mla_sparse_fwd",)
__getattr__ = not_covered("cukern.compat.sglang.flash_mla", "sgl_kernel.flash_mla", names=NOT_COVERED)


def get_mla_metadata(
    cache_seqlens: AnyArray,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.get_mla_metadata`. Refuses a dense FP8 cache (`is_fp8_kvcache` without `topk`)."""
    if is_fp8_kvcache and topk is None:
        refuse("get_mla_metadata", "is_fp8_kvcache", "False without topk", True)
    return cukern.get_mla_metadata(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=num_heads_q, topk=topk
    )


def flash_mla_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    block_table: AnyArray,
    cache_seqlens: AnyArray,
    head_dim_v: int,
    tile_scheduler_metadata: AnyArray,
    num_splits: AnyArray,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: AnyArray | None = None,
    descale_k: AnyArray | None = None,
    is_fp8_kvcache: bool = False,
    indices: AnyArray | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.flash_mla_with_kvcache` with a plan from `get_mla_metadata`. Refuses `descale_q` and `descale_k`."""
    unless_default("flash_mla_with_kvcache", None, descale_q=descale_q, descale_k=descale_k)
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
    )
