"""The NumPy reference of the experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.formats.fused_moe import FusedMoEQuantConfig
from cukern.fused_moe.experts import BATCHED, AutoExperts, Formats
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEPermuteExpertsUnpermute, Workspaces
from cukern.fused_moe.topk_weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate
from cukern.reference import fused_moe as twin
from cukern.runtime import arrays, check


class NaiveBatchedExperts(FusedMoEPermuteExpertsUnpermute):
    """The NumPy reference of the experts, for any quantization, in the batched format. Arrays on a GPU are copied."""

    quantizations = AutoExperts.quantizations

    @property
    def activation_formats(self) -> Formats:
        return BATCHED

    def supports_chunking(self) -> bool:
        return False

    def supports_expert_map(self) -> bool:
        return False

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        return Workspaces((0,), (0,), (local_num_experts, M, K), dtype)

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: str,
        global_num_experts: int, expert_map: Any, a1q_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: ExpertTokensMetadata | None, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        library = arrays.library_of(output)
        assert library is not None and expert_tokens_meta is not None
        counts = library.to_numpy(expert_tokens_meta.expert_num_tokens)
        a, first, second = (library.to_numpy(x) for x in (hidden_states, w1, w2))
        scale = None if a1q_scale is None else library.to_numpy(a1q_scale)
        config = on_host(self.quant_config)
        result = np.zeros(tuple(output.shape), arrays.numpy_dtype(library.dtype(output)))
        inputs: dict[int, tuple[Any, Any]] = {}
        for index, count in enumerate(np.clip(counts, 0, a.shape[1]).tolist()):
            if count:
                inputs[index] = a[index, :count], scale if scale is None or scale.size == 1 else scale[index, :count]
        for index, rows in twin.experts(inputs, first, second, activation, config, result.dtype).items():
            result[index, : len(rows)] = rows
        output[...] = library.from_numpy(result, output)


def on_host(config: FusedMoEQuantConfig) -> FusedMoEQuantConfig:
    scales: dict[str, Any] = {}
    for name, value in config.scales.items():
        library = arrays.library_of(value)
        if library is None:
            check.fail(name, "an array", type(value).__name__, TypeError)
        scales[name] = library.to_numpy(value)
    return FusedMoEQuantConfig(**config.numbers, **scales)
