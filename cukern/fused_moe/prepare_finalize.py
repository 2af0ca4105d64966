"""The prepare/finalize classes for a single rank, and what the classes for several ranks share."""

from __future__ import annotations

from typing import Any

from cukern.formats.fused_moe import GROUP, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.buffers import dtype_of, empty
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEPrepareAndFinalize, Prepared
from cukern.fused_moe.topk_weight_and_reduce import DELEGATES, TopKWeightAndReduce, TopKWeightAndReduceDelegate
from cukern.ops.moe_permute import moe_sort_batched, moe_unpermute, permute_rows
from cukern.ops.quantization import per_token_group_quant_fp8, scaled_fp8_quant
from cukern.runtime import check


def quantize_input(a1: Any, config: FusedMoEQuantConfig) -> tuple[Any, Any]:
    """Return the activations for the first GEMM and their scales; without quantization `a1` and None."""
    if config.is_in_groups:
        return per_token_group_quant_fp8(a1, GROUP)
    if config.name == "fp8":
        return scaled_fp8_quant(a1, config.a1_scale, use_per_token_if_dynamic=config.per_act_token_quant)
    return a1, None


def weigh_input(a1: Any, topk_weights: Any) -> Any:
    """Return a1[t] * topk_weights[t, 0], computed in float32 and rounded once."""
    return moe_unpermute(empty(a1.shape, dtype_of(a1), a1), a1, topk_weights, None)


def refuse_per_call_tensor_scale(quant_config: FusedMoEQuantConfig) -> None:
    """Refuse a per-tensor scale that each call computes, because each rank would compute a different scale."""
    if quant_config.name == "fp8" and not quant_config.per_act_token_quant and quant_config.a1_scale is None:
        wanted = "a1_scale given, or a scale per token (per_act_token_quant): each rank would find another one"
        check.fail("quant_config", wanted, "a scale per tensor that is found at each call")


class SeveralRanks(FusedMoEPrepareAndFinalize):
    """Base class of the classes that exchange tokens between ranks. `prepare_no_receive` sends the tokens."""

    def topk_indices_dtype(self) -> str | None:
        return None

    def has_prepare_no_receive(self) -> bool:
        return True

    def prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Prepared:  # fmt: skip
        return self.prepare_no_receive(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config
        )()


class _OneRank(FusedMoEPrepareAndFinalize):
    def topk_indices_dtype(self) -> str | None:
        return None

    def num_dispatchers(self) -> int:
        return 1

    def finalize(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: TopKWeightAndReduce,
        expert_tokens_meta: ExpertTokensMetadata | None = None,
    ) -> None:  # fmt: skip
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = DELEGATES[self.activation_format]()
        weight_and_reduce_impl.apply(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, expert_tokens_meta
        )


class MoEPrepareAndFinalizeNoEP(_OneRank):
    """Quantizes the tokens and keeps their order, for a rank that has all experts."""

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def can_leave_unquantized(self) -> bool:
        return True

    def prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Prepared:  # fmt: skip
        if apply_router_weight_on_input:
            a1 = weigh_input(a1, topk_weights)
        return Prepared(*quantize_input(a1, quant_config))


class BatchedPrepareAndFinalize(_OneRank):
    """Copies the tokens into an array [experts, max_tokens, hidden], in token order within an expert.

    Rows after the last token of an expert are uninitialized.

    Args:
        max_num_tokens: the maximum number of tokens of a call, and the number of rows of each expert. A token that
            names an expert twice takes two of its rows. An expert without a free row for a token adds nothing to the
            token's result.
        num_local_experts: the number of experts of this rank.
    """

    def __init__(self, max_num_tokens: int, num_local_experts: int) -> None:
        self.max_num_tokens = check.integer("max_num_tokens", max_num_tokens, 1)
        self.num_local_experts: int = check.integer("num_local_experts", num_local_experts, 1)

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self.max_num_tokens

    def prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Prepared:  # fmt: skip
        tokens, hidden = a1.shape
        experts, rows_per_expert = self.num_local_experts, self.max_num_tokens * self.num_dispatchers()
        if tokens > self.max_num_tokens:
            check.fail("hidden_states", f"of at most {self.max_num_tokens} tokens (max_num_tokens)", tokens)
        if expert_map is None and num_experts != experts:
            check.fail("w1", f"of {experts} experts (num_local_experts), or expert_map given", num_experts)
        if apply_router_weight_on_input:
            a1 = weigh_input(a1, topk_weights)
        a1q, scale = quantize_input(a1, quant_config)
        counts, positions = moe_sort_batched(
            topk_ids, num_experts, rows_per_expert, expert_map=expert_map, num_local_experts=experts
        )
        batched = permute_rows(a1q, positions, experts * rows_per_expert).reshape(experts, rows_per_expert, hidden)
        if scale is not None and scale.shape[0] == tokens and quant_config.name != "fp8":
            scale = permute_rows(scale, positions, experts * rows_per_expert).reshape(
                experts, rows_per_expert, scale.shape[1]
            )
        elif scale is not None and quant_config.per_act_token_quant:
            scale = permute_rows(scale.reshape(tokens, 1), positions, experts * rows_per_expert).reshape(
                experts, rows_per_expert
            )
        return Prepared(batched, scale, ExpertTokensMetadata(counts, positions))
