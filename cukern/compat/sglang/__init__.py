"""A replacement for SGLang's `sgl_kernel`, as of sglang-kernel 0.4.2.post2.

`enable_pdl`, `cumsum_buffer` and `enable_v2` are ignored. The functions in `NOT_COVERED` raise NotImplementedError.

Differences:

- Gates compute scores in float32 for every dtype of the logits.
- The rows of an expert are always in token order.
- Activations are not rounded to 16 bits before they are quantized. They are divided by the scale, not multiplied by its
  reciprocal.
"""

from __future__ import annotations

from typing import Any

from cukern.runtime.packages import missing

try:
    import torch
except ModuleNotFoundError as error:
    raise missing(error, __name__, "torch") from None

import cukern
from cukern.compat._limits import not_covered, refuse
from cukern.compat.flashinfer import sampling
from cukern.compat.flashinfer.norm import fused_add_rmsnorm, gemma_fused_add_rmsnorm, gemma_rmsnorm, rmsnorm
from cukern.compat.sglang import flash_mla
from cukern.runtime.arrays import AnyArray

__all__ = [
    "flash_mla",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "kimi_k2_moe_fused_gate",
    "merge_state_v2",
    "moe_align_block_size",
    "moe_fused_gate",
    "moe_sum",
    "moe_sum_reduce",
    "rmsnorm",
    "sgl_per_token_group_quant_8bit",
    "sgl_per_token_group_quant_fp8",
    "sgl_per_token_group_quant_int8",
    "sgl_per_token_quant_fp8",
    "silu_and_mul",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "topk_sigmoid",
    "topk_softmax",
]

NOT_COVERED = (
    "apply_shuffle_mul_sum",
    "apply_token_bitmask_inplace_cuda",
    "awq_dequantize",
    "bmm_fp8",
    "build_tree_kernel_efficient",
    "concat_mla_absorb_q",
    "concat_mla_k",
    "cutlass_mla_decode",
    "fast_topk",
    "fast_topk_transform_fused",
    "fast_topk_transform_ragged_fused",
    "fast_topk_v2",
    "fp8_blockwise_scaled_grouped_mm",
    "fp8_blockwise_scaled_mm",
    "fp8_scaled_mm",
    "fused_qk_norm_rope",
    "gptq_gemm",
    "int8_scaled_mm",
    "prepare_moe_input",
    "rotary_embedding",
    "shuffle_rows",
    "transfer_kv_all_layer",
    "transfer_kv_all_layer_mla",
    "transfer_kv_per_layer",
    "transfer_kv_per_layer_mla",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
)
COVERS = {
    "fused_qk_norm_rope": "cukern.fused_qk_norm_rope_and_cache",
    "rotary_embedding": "cukern.rotary_embedding",
}
__getattr__ = not_covered("cukern.compat.sglang", "sgl_kernel", COVERS, names=NOT_COVERED)


# --- activations and renormalization ------------------------------------------------------------------


def silu_and_mul(input: AnyArray, out: AnyArray | None = None) -> AnyArray:
    """Call `cukern.silu_and_mul`."""
    return cukern.silu_and_mul(input, out=out)


def gelu_tanh_and_mul(input: AnyArray, out: AnyArray | None = None) -> AnyArray:
    """Call `cukern.gelu_tanh_and_mul`."""
    return cukern.gelu_tanh_and_mul(input, out=out)


def gelu_and_mul(input: AnyArray, out: AnyArray | None = None) -> AnyArray:
    """Call `cukern.gelu_and_mul`."""
    return cukern.gelu_and_mul(input, out=out)


def gelu_quick(input: AnyArray, out: AnyArray | None = None) -> AnyArray:
    """Call `cukern.gelu_quick`. SGLang has this function only for AMD GPUs."""
    return cukern.gelu_quick(input, out=out)


def top_k_renorm_probs(probs: AnyArray, top_k: AnyArray | int) -> AnyArray:
    """Call `cukern.top_k_renorm_probs`, which keeps exactly k probabilities; among equal ones, lower ids come first.

    SGLang keeps all probabilities that are equal to the k-th largest one.
    """
    return sampling.top_k_renorm_probs(probs, top_k)


def top_p_renorm_probs(probs: AnyArray, top_p: AnyArray | float) -> AnyArray:
    """Call `cukern.top_p_renorm_probs`."""
    return sampling.top_p_renorm_probs(probs, top_p)


top_k_renorm_prob = top_k_renorm_probs
top_p_renorm_prob = top_p_renorm_probs


# --- mixture of experts -------------------------------------------------------------------------------


def topk_softmax(
    topk_weights: AnyArray,
    topk_ids: AnyArray,
    gating_output: AnyArray,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: AnyArray | None = None,
) -> None:
    """Call `cukern.topk_softmax`."""
    cukern.topk_softmax(topk_weights, topk_ids, gating_output, renormalize, moe_softcapping, correction_bias)


def topk_sigmoid(
    topk_weights: AnyArray,
    topk_ids: AnyArray,
    gating_output: AnyArray,
    renormalize: bool = False,
    correction_bias: AnyArray | None = None,
) -> None:
    """Call `cukern.topk_sigmoid`."""
    cukern.topk_sigmoid(topk_weights, topk_ids, gating_output, renormalize, correction_bias)


def moe_fused_gate(
    input_tensor: AnyArray,
    bias: AnyArray,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 0,
    apply_routed_scaling_factor_on_output: bool = False,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.moe_fused_gate`."""
    sizes = num_expert_group, topk_group, topk, num_fused_shared_experts
    # The default factor 0 is a placeholder, so pass 1 where the factor has no effect.
    factor = routed_scaling_factor if num_fused_shared_experts or apply_routed_scaling_factor_on_output else 1.0
    return cukern.moe_fused_gate(input_tensor, bias, *sizes, factor, apply_routed_scaling_factor_on_output)


def kimi_k2_moe_fused_gate(
    input_tensor: AnyArray,
    bias: AnyArray,
    topk: int,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.biased_grouped_topk` with one group."""
    scaling: dict[str, Any] = {
        "routed_scaling_factor": routed_scaling_factor,
        "apply_routed_scaling_factor_on_output": apply_routed_scaling_factor_on_output,
    }
    return cukern.biased_grouped_topk(None, input_tensor, bias, topk, renormalize, **scaling)


def moe_align_block_size(
    topk_ids: AnyArray,
    num_experts: int,
    block_size: int,
    sorted_token_ids: AnyArray,
    experts_ids: AnyArray,
    num_tokens_post_pad: AnyArray,
    cumsum_buffer: AnyArray,
    pad_sorted_token_ids: bool = False,
) -> None:
    """Call `cukern.moe_align_block_size`. `num_experts` is the number of experts plus 1, as in SGLang.

    The first of the `num_experts` experts stands for the id -1, a token that was filtered out. So a torch kernel adds 1
    to the ids. The elements after the last block are always filled, so `pad_sorted_token_ids` is ignored.
    """
    ids: Any = topk_ids + 1
    numbers = torch.arange(-1, num_experts - 1, dtype=torch.int32, device=ids.device)
    out = sorted_token_ids, experts_ids, num_tokens_post_pad
    cukern.moe_align_block_size(ids, block_size, num_experts, numbers, out=out)


def moe_sum(input_tensor: AnyArray, output_tensor: AnyArray) -> None:
    """Call `cukern.moe_sum`."""
    cukern.moe_sum(input_tensor, output_tensor)


def moe_sum_reduce(input_tensor: AnyArray, output_tensor: AnyArray, routed_scaling_factor: float = 0) -> None:
    """Call `cukern.moe_unpermute`: add the slots of each token, scale the sum, and round once."""
    tokens, topk, hidden = input_tensor.shape
    weights = torch.full((tokens, topk), routed_scaling_factor, dtype=torch.float32, device=input_tensor.device)
    cukern.moe_unpermute(output_tensor, input_tensor.reshape(tokens * topk, hidden), weights, None)


# --- quantization -------------------------------------------------------------------------------------

#: The (fp8_min, fp8_max) that SGLang's callers pass for each dtype.
_RANGES = {torch.float8_e4m3fn: (-448.0, 448.0), torch.int8: (-128.0, 127.0)}


def sgl_per_token_group_quant_8bit(
    input: AnyArray,
    output_q: AnyArray,
    output_s: AnyArray,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: AnyArray | None = None,
    enable_v2: bool | None = None,
) -> None:
    """Call `cukern.per_token_group_quant_fp8` or `cukern.per_token_group_quant_int8`, by the dtype of `output_q`.

    int8 is rounded toward zero. `fuse_silu_and_mul` calls `cukern.silu_and_mul_quant`, and needs FP8 and an `eps` of
    1e-10. Scales that are not row-major are copied. Refuses `scale_ue8m0`, and a range other than the range of the
    dtype.
    """
    function = "sgl_per_token_group_quant_8bit"
    if scale_ue8m0:
        refuse(function, "scale_ue8m0", "False", True)
    wanted = _RANGES.get(output_q.dtype)
    if wanted is None:
        refuse(function, "output_q", "of float8_e4m3fn or int8", output_q.dtype)
    for name, given, bound in (("fp8_min", fp8_min, wanted[0]), ("fp8_max", fp8_max, wanted[1])):
        if given != bound:
            refuse(function, name, f"{bound} for {output_q.dtype}", given)
    in_place = output_s.is_contiguous()
    options = {"expert_num_tokens": masked_m, "out_q": output_q, "out_s": output_s if in_place else None}
    if fuse_silu_and_mul:
        if output_q.dtype != torch.float8_e4m3fn:
            refuse(function, "output_q", "of float8_e4m3fn with fuse_silu_and_mul", output_q.dtype)
        if eps != 1e-10:
            refuse(function, "eps", "1e-10 with fuse_silu_and_mul", eps)
        _, scales = cukern.silu_and_mul_quant(input, group_size=group_size, **options)
    elif output_q.dtype == torch.int8:
        _, scales = cukern.per_token_group_quant_int8(input, group_size, eps, truncate=True, **options)
    else:
        _, scales = cukern.per_token_group_quant_fp8(input, group_size, eps, **options)
    if not in_place:
        output_s.copy_(scales)


sgl_per_token_group_quant_fp8 = sgl_per_token_group_quant_8bit
sgl_per_token_group_quant_int8 = sgl_per_token_group_quant_8bit


def sgl_per_token_quant_fp8(input: AnyArray, output_q: AnyArray, output_s: AnyArray) -> None:
    """Call `cukern.per_token_group_quant_fp8` with one group per row."""
    scales = output_s.view(*input.shape[:-1], 1)
    cukern.per_token_group_quant_fp8(input, input.shape[-1], out_q=output_q, out_s=scales)


# --- attention ----------------------------------------------------------------------------------------


def merge_state_v2(
    v_a: AnyArray,
    s_a: AnyArray,
    v_b: AnyArray,
    s_b: AnyArray,
    v_merged: AnyArray | None = None,
    s_merged: AnyArray | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Call `cukern.merge_attention_states` on outputs [tokens, heads, head_dim] and lse [tokens, heads]."""
    out = torch.empty_like(v_a) if v_merged is None else v_merged
    lse = torch.empty_like(s_a, dtype=torch.float32) if s_merged is None else s_merged
    return cukern.merge_attention_states(v_a, s_a.float(), v_b, s_b.float(), out=(out, lse))
