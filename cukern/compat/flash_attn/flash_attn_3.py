"""A replacement for FlashAttention 3's `flash_attn_interface`, with the same arguments and results.

The signatures match flash_attn_3 3.0.0 as of 2026-08-15 (github.com/Dao-AILab/flash-attention, folder hopper).

`num_splits`, `pack_gqa`, `deterministic`, `sm_margin`, `scheduler_metadata`, `max_seqlen_q` and `max_seqlen_k` do not
change the results, and are ignored. `q_descale`, `k_descale` and `v_descale` are ignored, because FlashAttention 3 uses
them only for FP8 tensors. FP8 tensors raise NotImplementedError. A tensor that requires gradients raises RuntimeError
in grad mode, because there is no backward. The functions in `NOT_COVERED` raise NotImplementedError when called.

Differences:

- A dense tensor is copied if strides cannot merge its dimensions batch and tokens.
- A page must have a multiple of 8 tokens.
- Small torch kernels compute the slots of the keys and values that `flash_attn_with_kvcache` stores.
"""

from __future__ import annotations

from typing import Any

import torch

from cukern.compat._limits import not_covered, unless_default
from cukern.compat.flash_attn import _attend
from cukern.runtime.arrays import AnyArray

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

NOT_COVERED = ("flash_attn_combine", "flash_attn_qkvpacked_func", "get_scheduler_metadata")
__getattr__ = not_covered("cukern.compat.flash_attn.flash_attn_3", "flash_attn_interface", names=NOT_COVERED)


def flash_attn_func(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: AnyArray | None = None,
    q_descale: AnyArray | None = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Call `cukern.varlen_attention` for dense batches [batch, tokens, heads, dim]. Refuses `qv`, `attention_chunk`.

    Returns out; with `return_attn_probs` (out, lse float32 [batch, heads, tokens]), as FlashAttention 3 does.
    """
    unless_default("flash_attn_func", None, qv=qv)
    _attend.refuse_unless_zero("flash_attn_func", attention_chunk=attention_chunk)
    options = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    return _attend.dense("flash_attn_func", q, k, v, return_lse=return_attn_probs, **options)


def flash_attn_varlen_func(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: AnyArray | None = None,
    seqused_k: AnyArray | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: AnyArray | None = None,
    q_descale: AnyArray | None = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Call `cukern.varlen_attention`. Refuses `seqused_q`, `qv` and `attention_chunk`.

    Returns out; with `return_attn_probs` (out, lse float32 [heads, tokens]), as FlashAttention 3 does.
    """
    unless_default("flash_attn_varlen_func", None, seqused_q=seqused_q, qv=qv)
    _attend.refuse_unless_zero("flash_attn_varlen_func", attention_chunk=attention_chunk)
    return _attend.packed(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: AnyArray | None = None,
    v: AnyArray | None = None,
    qv: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: AnyArray | int | None = None,
    cache_batch_idx: AnyArray | None = None,
    cache_leftpad: AnyArray | None = None,
    page_table: AnyArray | None = None,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k_new: AnyArray | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: AnyArray | None = None,
    q_descale: AnyArray | None = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: AnyArray | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Store k and v in the cache by `cukern.reshape_and_cache_flash`, and call `cukern.varlen_attention`.

    Refuses `qv`, `rotary_cos`, `rotary_sin`, `cache_leftpad` and `attention_chunk`. With `cache_batch_idx`, or if the
    rows of the cache do not follow each other in memory, the length of a row must be a multiple of 8. New tokens past
    the end of the cache are not stored.
    Returns out [batch, tokens, heads, dim_v], or [tokens, heads, dim_v] with `cu_seqlens_q`. With `return_softmax_lse`
    returns (out, lse, an empty tensor, an empty tensor), because FlashAttention 3 returns partial results of splits,
    too. lse is float32 [batch, heads, tokens], or [heads, tokens] with `cu_seqlens_q`.
    """
    unless_default(
        "flash_attn_with_kvcache",
        None,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
    )
    _attend.refuse_unless_zero("flash_attn_with_kvcache", attention_chunk=attention_chunk)
    found = _attend.with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens,
        cache_batch_idx,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k_new,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        return_lse=return_softmax_lse,
    )
    return (*found, *(torch.empty(0, device=q.device) for _ in range(2))) if return_softmax_lse else found
