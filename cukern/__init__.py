"""CUDA kernels for LLM inference on NumPy, CuPy and PyTorch arrays, compiled at run time."""

from __future__ import annotations

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

from cukern.explain import explain
from cukern.fused_moe import fused_experts
from cukern.ops.all_to_all import AllToAllError, AllToAllState, all_to_all_combine, all_to_all_dispatch
from cukern.ops.beam_search import beam_search_step, beam_topk, gather_tree, update_kv_cache
from cukern.ops.decoder_attention import cross_attention, masked_attention
from cukern.ops.decoding import (
    apply_penalties,
    decoding_init,
    stop_words_criterion,
    topp_init,
    update_finished,
    update_logits,
)
from cukern.ops.embedding import embedding_lookup, embedding_lookup_sine_position_encoding
from cukern.ops.kv_cache import (
    concat_and_cache_mla,
    copy_blocks,
    gather_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
)
from cukern.ops.mla_decode import flash_mla_with_kvcache, get_mla_metadata
from cukern.ops.moe_activation import (
    add_bias_act,
    bias_gelu,
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh_and_mul,
    moe_activation,
    mul_and_silu,
    relu2_and_mul,
    silu_and_mul,
    swigluoai_and_mul,
)
from cukern.ops.moe_gate import biased_grouped_topk, grouped_topk, moe_fused_gate, topk_sigmoid, topk_softmax
from cukern.ops.moe_gemm import moe_gemm, moe_gemm_batched, prepare_weights, restore_weights
from cukern.ops.moe_permute import (
    moe_align_block_size,
    moe_permute,
    moe_sort,
    moe_sort_batched,
    moe_sum,
    moe_unpermute,
    permute_rows,
)
from cukern.ops.norm import (
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_add_rms_norm_quant,
    layer_norm,
    rms_norm,
    rms_norm_quant,
)
from cukern.ops.padding import (
    add_qkv_bias_rebuild_padding,
    build_sequence_length_padding_offset,
    rebuild_sequence_length_padding,
    remove_sequence_length_padding,
    transpose_remove_padding,
)
from cukern.ops.paged_attention import (
    merge_attention_states,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
)
from cukern.ops.quantization import (
    dequantize_mxfp4,
    dequantize_nvfp4,
    per_token_group_quant_fp8,
    per_token_group_quant_int8,
    quantize_mxfp4,
    scaled_fp4_quant,
    scaled_fp8_quant,
    scaled_int8_quant,
    silu_and_mul_quant,
)
from cukern.ops.rotary_embedding import fused_qk_norm_rope_and_cache, rotary_embedding
from cukern.ops.sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sample,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from cukern.ops.varlen_attention import varlen_attention
from cukern.runtime import kernel as _kernel
from cukern.runtime.compile import CompileError
from cukern.runtime.kernel import specialize

__version__ = "0.2.0"


def __getattr__(name: str) -> _ModuleType:
    """`cukern.models`, imported when it is first used: most programs do without."""
    if name == "models":
        return _import_module("cukern.models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AllToAllError",
    "AllToAllState",
    "CompileError",
    "add_bias_act",
    "add_qkv_bias_rebuild_padding",
    "all_to_all_combine",
    "all_to_all_dispatch",
    "apply_penalties",
    "beam_search_step",
    "beam_topk",
    "bias_gelu",
    "biased_grouped_topk",
    "build_sequence_length_padding_offset",
    "chain_speculative_sampling",
    "concat_and_cache_mla",
    "copy_blocks",
    "cross_attention",
    "decoding_init",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "embedding_lookup",
    "embedding_lookup_sine_position_encoding",
    "explain",
    "flash_mla_with_kvcache",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_quant",
    "fused_experts",
    "fused_qk_norm_rope_and_cache",
    "gather_cache",
    "gather_tree",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "get_mla_metadata",
    "grouped_topk",
    "layer_norm",
    "masked_attention",
    "merge_attention_states",
    "min_p_sampling_from_probs",
    "moe_activation",
    "moe_align_block_size",
    "moe_fused_gate",
    "moe_gemm",
    "moe_gemm_batched",
    "moe_permute",
    "moe_sort",
    "moe_sort_batched",
    "moe_sum",
    "moe_unpermute",
    "mul_and_silu",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "per_token_group_quant_fp8",
    "per_token_group_quant_int8",
    "permute_rows",
    "prepare_weights",
    "quantize_mxfp4",
    "rebuild_sequence_length_padding",
    "relu2_and_mul",
    "remove_sequence_length_padding",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "restore_weights",
    "rms_norm",
    "rms_norm_quant",
    "rotary_embedding",
    "sample",
    "sampling_from_logits",
    "sampling_from_probs",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul",
    "silu_and_mul_quant",
    "softmax",
    "specialize",
    "stop_words_criterion",
    "swap_blocks",
    "swigluoai_and_mul",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
    "topk_sigmoid",
    "topk_softmax",
    "topp_init",
    "transpose_remove_padding",
    "update_finished",
    "update_kv_cache",
    "update_logits",
    "varlen_attention",
]

_kernel.compile_at_import()
