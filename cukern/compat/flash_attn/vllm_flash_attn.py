"""A replacement for `vllm.vllm_flash_attn`, with the same arguments and results.

The signature matches vLLM 0.26.0. The functions in `NOT_COVERED` raise NotImplementedError when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cukern.compat._limits import not_covered, refuse, unless_default
from cukern.compat.flash_attn import _attend
from cukern.runtime.arrays import AnyArray

__all__ = ["flash_attn_varlen_func"]

NOT_COVERED = (
    "compile_flash_attn_varlen_func_from_specs",
    "fa_version_unsupported_reason",
    "get_scheduler_metadata",
    "is_fa_version_supported",
    "sparse_attn_func",
    "sparse_attn_varlen_func",
)
__getattr__ = not_covered("cukern.compat.flash_attn.vllm_flash_attn", "vllm.vllm_flash_attn", names=NOT_COVERED)


def flash_attn_varlen_func(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    max_seqlen_q: int,
    cu_seqlens_q: AnyArray,
    max_seqlen_k: int,
    cu_seqlens_k: AnyArray | None = None,
    seqused_k: AnyArray | None = None,
    q_v: AnyArray | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: AnyArray | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: AnyArray | None = None,
    return_softmax_lse: bool = False,
    out: AnyArray | None = None,
    scheduler_metadata: AnyArray | None = None,
    q_descale: AnyArray | None = None,
    k_descale: AnyArray | None = None,
    v_descale: AnyArray | None = None,
    num_splits: int = 0,
    output_scale: AnyArray | None = None,
    fa_version: int = 2,
    s_aux: AnyArray | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: AnyArray | None = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    dynamic_causal: AnyArray | None = None,
) -> Any:
    """Call `cukern.varlen_attention` with the sinks `s_aux`.

    Refuses `q_v`, `dropout_p`, `alibi_slopes`, FP8 tensors, `output_scale`, `mask_mod`, `aux_tensors`,
    `dynamic_causal`, `cp_tot_seqused_k`, and a `cp_world_size` other than 1. Ignores `max_seqlen_q`,
    `max_seqlen_k`, `deterministic`, `scheduler_metadata`, `num_splits` and `fa_version`, which do not change the
    results; the descales, which vLLM uses only for FP8 tensors; and `return_attn_probs`, which vLLM does not use.
    Returns `out`, or a new tensor; with `return_softmax_lse` (out, lse float32 [heads, tokens]). A query that sees no
    key has an lse of -inf. vLLM returns inf if fa_version is 2.
    """
    unless_default(
        "flash_attn_varlen_func",
        None,
        q_v=q_v,
        alibi_slopes=alibi_slopes,
        output_scale=output_scale,
        cp_tot_seqused_k=cp_tot_seqused_k,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        dynamic_causal=dynamic_causal,
    )
    _attend.refuse_unless_zero("flash_attn_varlen_func", dropout_p=dropout_p)
    if cp_world_size != 1:
        refuse("flash_attn_varlen_func", "cp_world_size", "1", cp_world_size)
    return _attend.packed(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        out,
        block_table=block_table,
        seqused_k=seqused_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=s_aux,
        return_lse=return_softmax_lse,
    )
