"""FlashMLA's `flash_mla`: the names, orders and defaults of the arguments, and the results.

The signatures are those of flash_mla 1.0.0 as of 2026-04-29 (github.com/deepseek-ai/FlashMLA). Its `get_mla_metadata`
takes no arguments; those of older releases are accepted and not used, and the pair that it returns is the new one.

Not covered: `extra_k_cache`, `extra_indices_in_kvcache`, `topk_length` and `extra_topk_length`, which raise
NotImplementedError, and prefill: the functions of `NOT_COVERED` raise it when they are called. Beyond FlashMLA, all
GPUs from Ampere on and all pages of a multiple of 16 tokens are taken.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import cukern
from cukern.compat._limits import not_covered, unless_default
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

NOT_COVERED = (
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
)
__getattr__ = not_covered("cukern.compat.flash_mla", NOT_COVERED, __all__)


@dataclasses.dataclass
class FlashMLASchedMeta:
    """A plan that the first call of `flash_mla_with_kvcache` makes and later ones use.

    It holds for calls with the same sizes, and with the same numbers in cache_seqlens.
    """

    have_initialized: bool = False
    config: tuple[Any, ...] | None = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty plan, and None for the splits, which are part of it. The arguments are not used."""
    return FlashMLASchedMeta(), None


_SIZES = ("batch", "query_tokens", "heads", "page_size", "kv_heads", "causal", "is_fp8_kvcache", "topk")


def _plan(meta: FlashMLASchedMeta, q: Any, lengths: Any, sizes: tuple[Any, ...]) -> None:
    """Make the plan at the first call, and check at later ones that it is of these sizes."""
    if meta.config is not None:
        for name, planned, given in zip(_SIZES, meta.config, sizes, strict=True):
            if planned != given:
                check.fail("tile_scheduler_metadata", f"of a call with the {name} of this one, {given}", planned)
        return
    batch, query_tokens, heads, _, kv_heads, _, _, topk = sizes
    if topk is not None:
        lengths = torch.empty(batch, dtype=torch.int32, device=q.device)  # only its size is read
    options = {"num_heads_q": heads, "topk": topk}
    found = cukern.get_mla_metadata(lengths, query_tokens * heads // kv_heads, kv_heads, **options)
    meta.tile_scheduler_metadata, meta.num_splits = found
    meta.have_initialized, meta.config = True, sizes


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
    """`cukern.flash_mla_with_kvcache`, which is planned at the first call with this `tile_scheduler_metadata`.

    Returns out [batch, query_tokens, heads, head_dim_v] and lse float32 [batch, heads, query_tokens]. Refused: the
    extra cache and `topk_length`. Raises TypeError for a plan that `get_mla_metadata` of this module did not give, and
    ValueError for one of other sizes.
    """
    extra = {"extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache}
    lengths = {"topk_length": topk_length, "extra_topk_length": extra_topk_length}
    unless_default("flash_mla_with_kvcache", None, **extra, **lengths)
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        wanted = "what cukern.compat.flash_mla.get_mla_metadata gave"
        check.fail("tile_scheduler_metadata", wanted, type(meta).__name__, TypeError)
    if num_splits is not None:
        check.fail("num_splits", "None", type(num_splits).__name__, TypeError)
    check.dimensions("q", q.shape, ("batch", "query_tokens", "heads", "head_dim"))
    check.dimensions("k_cache", k_cache.shape, ("pages", "page_size", "kv_heads", "head_dim"))
    if indices is None and cache_seqlens is None:
        check.fail("cache_seqlens", "an array, unless there are indices", None, TypeError)
    topk = None if indices is None else indices.shape[-1]
    sizes = (*q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache, topk)
    if k_cache.shape[2] and q.shape[2] and not q.shape[2] % k_cache.shape[2]:
        _plan(meta, q, cache_seqlens, sizes)
    plan = meta.tile_scheduler_metadata, meta.num_splits
    return cukern.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        *plan,
        softmax_scale,
        causal,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
    )
