"""A replacement for `flashinfer` of flashinfer-python 0.7.2.post1.

Attention, rope, GEMMs, fused mixtures of experts and communication are not covered. Their names raise AttributeError,
or ImportError in an import statement.
"""

from cukern.compat._limits import not_covered
from cukern.runtime.packages import missing

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing(error, __name__, "torch") from None

from cukern.compat.flashinfer import activation, norm, page, sampling
from cukern.compat.flashinfer.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from cukern.compat.flashinfer.norm import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_quant,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    layernorm,
    rmsnorm,
    rmsnorm_quant,
)
from cukern.compat.flashinfer.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from cukern.compat.flashinfer.sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
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

__all__ = [
    "activation",
    "append_paged_kv_cache",
    "chain_speculative_sampling",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_quant",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "get_batch_indices_positions",
    "get_seq_lens",
    "layernorm",
    "min_p_sampling_from_probs",
    "norm",
    "page",
    "rmsnorm",
    "rmsnorm_quant",
    "sampling",
    "sampling_from_logits",
    "sampling_from_probs",
    "silu_and_mul",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

COVERS = {
    "BatchDecodeWithPagedKVCacheWrapper": "cukern.paged_attention",
    "BatchMLAPagedAttentionWrapper": "cukern.flash_mla_with_kvcache",
    "BatchPrefillWithPagedKVCacheWrapper": "cukern.varlen_attention",
    "BatchPrefillWithRaggedKVCacheWrapper": "cukern.varlen_attention",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "cukern.paged_attention",
    "apply_rope_with_cos_sin_cache_inplace": "cukern.rotary_embedding",
    "cutlass_fused_moe": "cukern.fused_experts",
    "merge_state": "cukern.merge_attention_states",
}
__getattr__ = not_covered("cukern.compat.flashinfer", "flashinfer", COVERS)
