"""vLLM's attention backend on `varlen_attention` and `paged_attention`, over the cache of vLLM without a copy.

The cache of a layer is [blocks, kv_heads, block_size, 2 * head_size], with the key and then the value of a token in the
last dimension. Its memory is in the order blocks, tokens, heads, or blocks, heads, tokens. Both kernels take strides,
so keys and values are views [blocks, block_size, kv_heads, head_size].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import vllm.envs as envs
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

import cukern
from cukern.integrations.vllm._limits import CAPABILITY, why_not_head


class CukernAttentionBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's cache, and cukern's kernels.

    The capabilities that the base class reads from FlashAttention's version are answered here.
    """

    @staticmethod
    def get_name() -> str:
        # vLLM looks the name up in its table of backends, and knows by it the layout of the cache.
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[CukernAttentionImpl]:
        return CukernAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CukernMetadataBuilder]:
        return CukernMetadataBuilder

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return why_not_head(head_size) is None

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16")

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) == CAPABILITY

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        if kv_cache_dtype in (None, "auto", str(dtype).removeprefix("torch.")):
            return None
        return f"the cache is in {kv_cache_dtype} and the layer in {dtype}"


@dataclasses.dataclass
class CukernAttentionMetadata(AttentionMetadata):  # type: ignore[misc]
    """A batch, with the names of FlashAttention's metadata.

    The tensors are the engine's own, so a CUDA graph reads the lengths of its replay from them.

    Args:
        num_actual_tokens: the number of query rows, including the padding of a CUDA graph.
        is_decode: each sequence has exactly one query token.
        query_start_loc: int32 [sequences + 1].
        seq_lens: int32 [sequences].
        block_table: int32 [sequences, max_blocks].
        slot_mapping: int64 [tokens].
    """

    num_actual_tokens: int
    is_decode: bool
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class CukernMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    # A graph of one-token sequences holds `paged_attention`. Other graphs hold `varlen_attention`, which takes all
    # lengths, but vLLM also captures mixed batches of one-token sequences, and replays their graphs for longer ones.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CukernAttentionMetadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ValueError(f"common_attn_metadata.causal must be True, got {batch.causal}")
        tokens = batch.num_actual_tokens
        # The bits of a row of `varlen_attention` depend on its own sequence alone.
        is_decode = batch.max_query_len == 1 and tokens == batch.num_reqs and not envs.VLLM_BATCH_INVARIANT
        return CukernAttentionMetadata(
            tokens, is_decode, batch.query_start_loc, batch.seq_lens, batch.block_table_tensor, batch.slot_mapping
        )

    def update_block_table(
        self, metadata: CukernAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> CukernAttentionMetadata:
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class CukernAttentionImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of a layer. The arguments are vLLM's.

    Raises:
        ValueError: ALiBi slopes, an FP8 cache, or attention that is not of a decoder.
    """

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        for name, value, wanted in (
            ("alibi_slopes", alibi_slopes, (None,)),
            ("attn_type", attn_type, ("decoder",)),
            ("kv_cache_dtype", kv_cache_dtype, ("auto", "float16", "bfloat16")),
        ):
            if value not in wanted:
                raise ValueError(f"{name} must be {' or '.join(map(str, wanted))}, got {value}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None  # vLLM's 0 stands for none
        self.sinks = sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self.sinks = self.sinks.detach().to(torch.float32)  # the dtype of `paged_attention`

    def _keys_and_values(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views [blocks, block_size, kv_heads, head_size] of [blocks, kv_heads, block_size, 2 * head_size]."""
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        # A dimension of size 1 may have a stride that TMA does not take.
        return canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CukernAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from `query` [tokens, heads, head_size] over the cache, into `output` of the same shape.

        The keys and values of the query tokens are in the cache already. Without `attn_metadata` (vLLM's profiling run)
        the result is 0.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale must be None: the kernels do not quantize their result")
        if attn_metadata is None:
            return output.fill_(0)
        batch = attn_metadata
        keys, values = self._keys_and_values(kv_cache)
        query, out = query[: batch.num_actual_tokens], output[: batch.num_actual_tokens]
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "out": out}
        if batch.is_decode:
            cukern.paged_attention(
                query, keys, values, batch.block_table, batch.seq_lens, layout="flash", window=self.window, **options
            )
        else:
            window = None if self.window is None else (self.window - 1, 0)
            cukern.varlen_attention(
                query, keys, values, batch.query_start_loc, block_table=batch.block_table, seqused_k=batch.seq_lens,
                causal=True, window=window, **options,
            )  # fmt: skip
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store `key` and `value` [tokens, kv_heads, head_size] in the slots. Rows without a slot are padding."""
        keys, values = self._keys_and_values(kv_cache)
        cukern.reshape_and_cache_flash(key, value, keys, values, slot_mapping, "auto", 1.0, 1.0)
