"""A replacement for `vllm._custom_ops` of vLLM 0.33.0, and of vLLM 0.10.2 for functions that 0.33.0 lacks.

On CPU tensors the NumPy references run. Refused arguments and the functions in `NOT_COVERED` raise NotImplementedError.

Differences:

- Norms round once, at the end. vLLM also rounds before it multiplies by the weight.
- The rows of an expert are always in token order.
- Unused elements of `experts_ids` are -1.
- Activations are not rounded to 16 bits before they are quantized.
- The smallest scale is the same as in `cukern.rms_norm_quant` and `cukern.silu_and_mul_quant`.
"""

from __future__ import annotations

from typing import Any

import torch

import cukern
from cukern.compat._limits import not_covered, refuse, unless_default
from cukern.compat.vllm._cache import (
    concat_and_cache_mla,
    copy_blocks,
    copy_blocks_mla,
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_cache,
    gather_and_maybe_dequant_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
)
from cukern.runtime.arrays import AnyArray

__all__ = [
    "apply_repetition_penalties",
    "apply_repetition_penalties_cuda",
    "apply_repetition_penalties_torch",
    "concat_and_cache_mla",
    "copy_blocks",
    "copy_blocks_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "flash_mla_with_kvcache",
    "fused_add_rms_norm",
    "gather_and_maybe_dequant_cache",
    "get_flash_mla_metadata",
    "grouped_topk",
    "merge_attn_states",
    "moe_align_block_size",
    "moe_sum",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul_per_block_quant",
    "swap_blocks",
    "topk_sigmoid",
    "topk_softmax",
]

NOT_COVERED = (
    "batched_moe_align_block_size",
    "concat_and_cache_mla_grouped",
    "concat_and_cache_mla_rope_fused",
    "convert_fp8",
    "cutlass_moe_mm",
    "cutlass_scaled_mm",
    "fused_qk_norm_rope",
    "fused_qknorm_rope_cache",
    "indexer_k_quant_and_cache",
    "moe_lora_align_block_size",
    "moe_wna16_marlin_gemm",
    "poly_norm",
    "rotary_embedding",
    "scaled_fp4_experts_quant",
    "shuffle_rows",
    "silu_and_mul_scaled_fp4_experts_quant",
    "swap_blocks_batch",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "topk_hash_softplus_sqrt",
)
COVERS = {
    "fused_qk_norm_rope": "cukern.fused_qk_norm_rope_and_cache",
    "rotary_embedding": "cukern.rotary_embedding",
}
__getattr__ = not_covered("cukern.compat.vllm", "vllm._custom_ops", COVERS, names=NOT_COVERED)

_E4M3 = torch.float8_e4m3fn


# --- attention ----------------------------------------------------------------------------------------


def paged_attention_v1(
    out: AnyArray,
    query: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    num_kv_heads: int,
    scale: float,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: AnyArray | None,
    kv_cache_dtype: str,
    k_scale: AnyArray,
    v_scale: AnyArray,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Call `cukern.paged_attention_v1`."""
    sizes = num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes
    cache = kv_cache_dtype, k_scale, v_scale
    sparse = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step
    cukern.paged_attention_v1(out, query, key_cache, value_cache, *sizes, *cache, tp_rank, *sparse)


def paged_attention_v2(
    out: AnyArray,
    exp_sum: AnyArray,
    max_logits: AnyArray,
    tmp_out: AnyArray,
    query: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    num_kv_heads: int,
    scale: float,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: AnyArray | None,
    kv_cache_dtype: str,
    k_scale: AnyArray,
    v_scale: AnyArray,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Call `cukern.paged_attention_v2`."""
    arrays = out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache
    sizes = num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes
    cache = kv_cache_dtype, k_scale, v_scale
    sparse = blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step
    cukern.paged_attention_v2(*arrays, *sizes, *cache, tp_rank, *sparse)


def get_flash_mla_metadata(
    cache_seqlens: AnyArray, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.get_mla_metadata`. The plan has cukern's format."""
    return cukern.get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)


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
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.flash_mla_with_kvcache` with a plan from `get_flash_mla_metadata`."""
    plan = tile_scheduler_metadata, num_splits
    return cukern.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, softmax_scale, causal
    )


def merge_attn_states(
    output: AnyArray,
    prefix_output: AnyArray,
    prefix_lse: AnyArray,
    suffix_output: AnyArray,
    suffix_lse: AnyArray,
    output_lse: AnyArray | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: AnyArray | None = None,
) -> None:
    """Call `cukern.merge_attention_states`, with log-sum-exps [heads, tokens].

    Tokens with an index of at least `prefill_tokens_with_context` are not merged, and get their `suffix_output`. With
    `output_scale`, a second kernel quantizes to float8_e4m3fn.
    """
    tokens = suffix_output.shape[0]
    merged: Any = output if output_scale is None else torch.empty_like(suffix_output)
    lse: Any = torch.empty_like(suffix_lse) if output_lse is None else output_lse
    first = tokens if prefill_tokens_with_context is None else min(prefill_tokens_with_context, tokens)
    suffix_tail: Any = suffix_output[first:]
    if first < tokens and merged.data_ptr() == suffix_output.data_ptr():
        suffix_tail = suffix_tail.clone()
    sides = prefix_output, prefix_lse, suffix_output, suffix_lse
    cukern.merge_attention_states(*sides, lse_heads_first=True, out=(merged, lse))
    if first < tokens:
        merged[first:] = suffix_tail
        if output_lse is not None:
            lse[:, first:] = suffix_lse[:, first:]
    if output_scale is not None:
        cukern.scaled_fp8_quant(merged, output_scale, output=output)


# --- norms and quantization ---------------------------------------------------------------------------


def rms_norm(out: AnyArray, input: AnyArray, weight: AnyArray | None, epsilon: float) -> None:
    """Call `cukern.rms_norm`."""
    cukern.rms_norm(input, weight, epsilon, out=out)


def fused_add_rms_norm(input: AnyArray, residual: AnyArray, weight: AnyArray | None, epsilon: float) -> None:
    """Call `cukern.fused_add_rms_norm`, which writes `input` and `residual`."""
    cukern.fused_add_rms_norm(input, residual, weight, epsilon)


def _expect_e4m3(function: str, quant_dtype: Any, scale_ub: Any) -> None:
    if quant_dtype != _E4M3:
        refuse(function, "quant_dtype", "torch.float8_e4m3fn", quant_dtype)
    unless_default(function, None, scale_ub=scale_ub)


def _rms_norm_fp8(input: Any, weight: Any, epsilon: float, residual: Any, group_size: int | None) -> tuple[Any, Any]:
    """Return the RMS norm in FP8, and its scales [rows, groups]. Add `residual` first, in float32."""
    if residual is None:
        q, scales = cukern.rms_norm_quant(input, weight, epsilon, group_size=group_size)
    else:
        options: dict[str, Any] = {"group_size": group_size, "round_sum": False}
        q, scales = cukern.fused_add_rms_norm_quant(input, residual, weight, epsilon, **options)
    return q, scales.reshape(-1, scales.shape[-1])


def _column_major(scales: Any, alignment: int = 0) -> Any:
    """Return a column-major copy of scales [rows, groups], with columns aligned to `alignment` elements."""
    rows, groups = scales.shape
    column_stride = -(-rows // alignment) * alignment if alignment else rows
    transposed = torch.empty_strided((rows, groups), (1, column_stride), dtype=scales.dtype, device=scales.device)
    return transposed.copy_(scales)


def rms_norm_dynamic_per_token_quant(
    input: AnyArray,
    weight: AnyArray,
    epsilon: float,
    quant_dtype: Any,
    scale_ub: AnyArray | None = None,
    residual: AnyArray | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.rms_norm_quant`; if `residual` is given, `cukern.fused_add_rms_norm_quant`.

    Refuses `scale_ub`, and a `quant_dtype` other than float8_e4m3fn.
    """
    _expect_e4m3("rms_norm_dynamic_per_token_quant", quant_dtype, scale_ub)
    return _rms_norm_fp8(input, weight, epsilon, residual, None)


def rms_norm_per_block_quant(
    input: AnyArray,
    weight: AnyArray,
    epsilon: float,
    quant_dtype: Any,
    group_size: list[int],
    scale_ub: AnyArray | None = None,
    residual: AnyArray | None = None,
    is_scale_transposed: bool = False,
    tma_alignment: int = 0,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.rms_norm_quant`; if `residual` is given, `cukern.fused_add_rms_norm_quant`. Copy transposed scales.

    Refuses `scale_ub`, a `quant_dtype` other than float8_e4m3fn, and a `group_size[0]` other than 1.
    """
    _expect_e4m3("rms_norm_per_block_quant", quant_dtype, scale_ub)
    if len(group_size) != 2 or group_size[0] != 1:
        refuse("rms_norm_per_block_quant", "group_size", "[1, columns]", list(group_size))
    q, scales = _rms_norm_fp8(input, weight, epsilon, residual, group_size[1])
    return q, _column_major(scales, tma_alignment) if is_scale_transposed else scales


def silu_and_mul_per_block_quant(
    input: AnyArray,
    group_size: int,
    quant_dtype: Any,
    scale_ub: AnyArray | None = None,
    is_scale_transposed: bool = False,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.silu_and_mul_quant`. Transposed scales are copied.

    Refuses `scale_ub`, and a `quant_dtype` other than float8_e4m3fn.
    """
    _expect_e4m3("silu_and_mul_per_block_quant", quant_dtype, scale_ub)
    q, scales = cukern.silu_and_mul_quant(input, group_size=group_size)
    return q, _column_major(scales) if is_scale_transposed else scales


def scaled_fp8_quant(
    input: AnyArray,
    scale: AnyArray | None = None,
    num_token_padding: int | None = None,
    scale_ub: AnyArray | None = None,
    use_per_token_if_dynamic: bool = False,
    output: AnyArray | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.scaled_fp8_quant`. As in vLLM, `scale_ub` limits only scales per token.

    Refuses a `scale` of several elements, and a `group_shape` other than (-1, -1).
    """
    if group_shape is not None and tuple(group_shape) != (-1, -1):
        refuse("scaled_fp8_quant", "group_shape", "None or (-1, -1)", group_shape)
    if scale is not None and scale.numel() != 1:
        refuse("scaled_fp8_quant", "scale", "of one element", f"shape {list(scale.shape)}")
    bound = scale_ub if scale is None and use_per_token_if_dynamic else None
    padding = num_token_padding or None
    q, found = cukern.scaled_fp8_quant(input, scale, padding, bound, use_per_token_if_dynamic, output)
    return q, found if scale is None else scale


def scaled_int8_quant(
    input: AnyArray, scale: AnyArray | None = None, azp: AnyArray | None = None, symmetric: bool = True
) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """Call `cukern.scaled_int8_quant`. New scales and zero points are [rows, 1]."""
    q, scales, zero = cukern.scaled_int8_quant(input, scale, azp, symmetric)
    if scale is not None:
        return q, scale, azp
    return q, scales.reshape(-1, 1), None if zero is None else zero.reshape(-1, 1)


def _swizzle_scales(scale: Any) -> Any:
    """Copy scales [rows, groups] to the layout for Blackwell's tensor cores: tiles of 128 x 4, padded with zeros.

    In a tile of 128 x 4 scales, the scale of (row, group) is at byte `row % 32 * 16 + row // 32 * 4 + group`.
    """
    rows, groups = scale.shape
    tiles = -(-rows // 128), -(-groups // 4)
    padded = scale.new_zeros((tiles[0] * 128, tiles[1] * 4))
    padded[:rows, :groups] = scale
    return padded.view(tiles[0], 4, 32, tiles[1], 4).permute(0, 3, 2, 1, 4).reshape(padded.shape)


def scaled_fp4_quant(
    input: AnyArray,
    input_global_scale: AnyArray,
    is_sf_swizzled_layout: bool = True,
    backend: str = "none",
    padded_n: int | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.scaled_fp4_quant`. Swizzled scales are copied and padded to multiples of 128 x 4.

    Refuses a `backend` that takes scales in the 8x4 layout (trtllm for up to 32 rows), and a `padded_n` other than n.
    """
    rows = input.reshape(-1, input.shape[-1])
    if "trtllm" in backend and rows.shape[0] <= 32:
        refuse("scaled_fp4_quant", "backend", "one without the 8x4 layout of scales", repr(backend))
    if padded_n is not None and padded_n != rows.shape[1]:
        refuse("scaled_fp4_quant", "padded_n", f"None or {rows.shape[1]}", padded_n)
    packed, scale = cukern.scaled_fp4_quant(rows, input_global_scale)
    return packed, (_swizzle_scales(scale) if is_sf_swizzled_layout else scale).view(_E4M3)


# --- penalties ----------------------------------------------------------------------------------------


def apply_repetition_penalties(
    logits: AnyArray, prompt_mask: AnyArray, output_mask: AnyArray, repetition_penalties: AnyArray
) -> None:
    """Call `cukern.apply_penalties`, which writes `logits`."""
    penalties: Any = repetition_penalties
    masks = {"prompt_mask": prompt_mask, "output_mask": output_mask}
    cukern.apply_penalties(logits, repetition_penalty=penalties.float(), **masks, out=logits)


def apply_repetition_penalties_cuda(
    logits: AnyArray, prompt_mask: AnyArray, output_mask: AnyArray, repetition_penalties: AnyArray
) -> None:
    """Call `apply_repetition_penalties`."""
    apply_repetition_penalties(logits, prompt_mask, output_mask, repetition_penalties)


def apply_repetition_penalties_torch(
    logits: AnyArray, prompt_mask: AnyArray, output_mask: AnyArray, repetition_penalties: AnyArray
) -> None:
    """Apply repetition penalties with torch operations, which support any strides."""
    given: Any = logits
    is_used: Any = prompt_mask | output_mask
    penalties = torch.where(is_used, repetition_penalties.reshape(-1, 1), 1.0)
    given.mul_(torch.where(given > 0, 1.0 / penalties, penalties))


# --- mixture of experts -------------------------------------------------------------------------------


def moe_sum(
    input: AnyArray, output: AnyArray, topk_ids: AnyArray | None = None, expert_map: AnyArray | None = None
) -> None:
    """Call `cukern.moe_sum`. Refuses `topk_ids` and `expert_map`, which leave out other ranks' experts in vLLM."""
    unless_default("moe_sum", None, topk_ids=topk_ids, expert_map=expert_map)
    rows: Any = input
    cukern.moe_sum(rows.contiguous(), output)


def moe_align_block_size(
    topk_ids: AnyArray,
    num_experts: int,
    block_size: int,
    sorted_token_ids: AnyArray,
    experts_ids: AnyArray,
    num_tokens_post_pad: AnyArray,
    expert_map: AnyArray | None = None,
    scatter_idx: AnyArray | None = None,
) -> None:
    """Call `cukern.moe_align_block_size`. `expert_map` leaves out the experts of other ranks.

    The arrays need room for every assignment of tokens to experts, as in vLLM's layers. Refuses `scatter_idx`.
    """
    unless_default("moe_align_block_size", None, scatter_idx=scatter_idx)
    options: dict[str, Any] = {"ignore_invalid_experts": expert_map is not None}
    options["out"] = sorted_token_ids, experts_ids, num_tokens_post_pad
    cukern.moe_align_block_size(topk_ids, block_size, num_experts, expert_map, **options)


def _topk(
    function: Any, topk_weights: Any, topk_ids: Any, token_expert_indices: Any, gating_output: Any, **options: Any
) -> None:
    tokens, topk = topk_ids.shape
    ids = topk_ids if topk_ids.dtype == torch.int32 else torch.empty_like(topk_ids, dtype=torch.int32)
    function(topk_weights, ids, gating_output, **options)
    if ids is not topk_ids:
        topk_ids.copy_(ids)
    if token_expert_indices is not None:
        sources = torch.arange(tokens * topk, dtype=token_expert_indices.dtype, device=token_expert_indices.device)
        token_expert_indices.copy_(sources.view(topk, tokens).t())


def topk_softmax(
    topk_weights: AnyArray,
    topk_ids: AnyArray,
    token_expert_indices: AnyArray,
    gating_output: AnyArray,
    renormalize: bool = False,
    e_score_correction_bias: AnyArray | None = None,
    is_padding: AnyArray | None = None,
) -> None:
    """Call `cukern.topk_softmax`. `token_expert_indices[t, s]` becomes `s * tokens + t`.

    None for `token_expert_indices` saves a kernel launch. Refuses `is_padding`.
    """
    unless_default("topk_softmax", None, is_padding=is_padding)
    arrays = topk_weights, topk_ids, token_expert_indices, gating_output
    _topk(cukern.topk_softmax, *arrays, renormalize=renormalize, correction_bias=e_score_correction_bias)


def topk_sigmoid(
    topk_weights: AnyArray,
    topk_ids: AnyArray,
    token_expert_indices: AnyArray,
    gating_output: AnyArray,
    renormalize: bool = False,
    e_score_correction_bias: AnyArray | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: AnyArray | None = None,
) -> None:
    """Call `cukern.topk_sigmoid`, with the arguments of `topk_softmax`. Refuses `is_padding`."""
    unless_default("topk_sigmoid", None, is_padding=is_padding)
    arrays = topk_weights, topk_ids, token_expert_indices, gating_output
    options = {"correction_bias": e_score_correction_bias, "routed_scaling_factor": routed_scaling_factor}
    _topk(cukern.topk_sigmoid, *arrays, renormalize=renormalize, **options)


def grouped_topk(
    scores: AnyArray,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: AnyArray,
    scoring_func: int = 0,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.moe_fused_gate`. `scoring_func` must be 1, because `scores` are logits only with this value."""
    if scoring_func != 1:
        refuse("grouped_topk", "scoring_func", "1 (sigmoid of logits)", scoring_func)
    options = num_expert_group, topk_group, topk, 0, routed_scaling_factor, True
    return cukern.moe_fused_gate(scores, bias, *options, renormalize=renormalize)
