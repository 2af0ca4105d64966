"""A replacement for FlashAttention 2's `flash_attn`, with the same arguments and results.

The signatures match flash_attn 2.8.3.post2. The module `flash_attn_3` replaces FlashAttention 3's
`flash_attn_interface`, and the module `vllm_flash_attn` replaces `vllm.vllm_flash_attn`. All three call
`cukern.varlen_attention`, whose dtypes, head dimensions and GPUs they take. Tensors may be on the CPU, where the NumPy
references run.

`deterministic`, `num_splits`, `max_seqlen_q` and `max_seqlen_k` do not change the results, and are ignored. Dropout,
ALiBi slopes and FP8 tensors raise NotImplementedError. A tensor that requires gradients raises RuntimeError in grad
mode, because there is no backward. The functions in `NOT_COVERED` raise NotImplementedError when called.

Differences:

- A query that sees no key has an lse of -inf. FlashAttention 2 returns inf.
- A dense tensor is copied if strides cannot merge its dimensions batch and tokens.
- A page may have any multiple of 8 tokens. FlashAttention 2 needs a multiple of 256.
- Small torch kernels compute the slots of the keys and values that `flash_attn_with_kvcache` stores.
"""

from __future__ import annotations

from typing import Any

from cukern.compat._limits import not_covered, unless_default
from cukern.runtime.arrays import AnyArray
from cukern.runtime.packages import missing

try:
    import torch
except ModuleNotFoundError as error:
    raise missing(error, __name__, "torch") from None

# Importing the modules before __getattr__ exists lets `from cukern.compat.flash_attn import flash_attn_3` find them.
from cukern.compat.flash_attn import _attend, flash_attn_3, vllm_flash_attn  # noqa: F401

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

NOT_COVERED = (
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
__getattr__ = not_covered("cukern.compat.flash_attn", "flash_attn", names=NOT_COVERED)


def flash_attn_func(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: AnyArray | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Call `cukern.varlen_attention` for dense batches [batch, tokens, heads, dim].

    Returns out; with `return_attn_probs` (out, lse float32 [batch, heads, tokens], an empty tensor). FlashAttention
    returns probabilities only with dropout.
    """
    _attend.refuse_unless_zero("flash_attn_func", dropout_p=dropout_p)
    unless_default("flash_attn_func", None, alibi_slopes=alibi_slopes)
    options = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    found = _attend.dense("flash_attn_func", q, k, v, return_lse=return_attn_probs, **options)
    return (*found, torch.empty(0, dtype=q.dtype, device=q.device)) if return_attn_probs else found


def flash_attn_varlen_func(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: AnyArray | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: AnyArray | None = None,
) -> Any:
    """Call `cukern.varlen_attention`.

    Returns out; with `return_attn_probs` (out, lse float32 [heads, tokens], an empty tensor).
    """
    _attend.refuse_unless_zero("flash_attn_varlen_func", dropout_p=dropout_p)
    unless_default("flash_attn_varlen_func", None, alibi_slopes=alibi_slopes)
    found = _attend.packed(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table=block_table,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
    )
    return (*found, torch.empty(0, dtype=q.dtype, device=q.device)) if return_attn_probs else found


def flash_attn_with_kvcache(
    q: AnyArray,
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: AnyArray | None = None,
    v: AnyArray | None = None,
    rotary_cos: AnyArray | None = None,
    rotary_sin: AnyArray | None = None,
    cache_seqlens: AnyArray | int | None = None,
    cache_batch_idx: AnyArray | None = None,
    cache_leftpad: AnyArray | None = None,
    block_table: AnyArray | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: AnyArray | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Store k and v in the cache by `cukern.reshape_and_cache_flash`, and call `cukern.varlen_attention`.

    Refuses `rotary_cos`, `rotary_sin`, `cache_leftpad` and `alibi_slopes`. With `cache_batch_idx`, or if the rows of
    the cache do not follow each other in memory, the length of a row must be a multiple of 8. New tokens past the end
    of the cache are not stored.
    Returns out [batch, tokens, heads, dim_v]; with `return_softmax_lse` (out, lse float32 [batch, heads, tokens]).
    """
    unless_default(
        "flash_attn_with_kvcache",
        None,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    return _attend.with_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens,
        cache_batch_idx,
        block_table,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        return_lse=return_softmax_lse,
    )
