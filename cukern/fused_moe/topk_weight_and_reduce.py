"""Reduce the experts' outputs over the slots of each token, weighted by the router."""

from __future__ import annotations

import abc
from typing import Any

from cukern.formats.fused_moe import FusedMoEActivationFormat
from cukern.ops.moe_permute import moe_sort_batched, moe_sum, moe_unpermute
from cukern.runtime import check


class TopKWeightAndReduce(abc.ABC):
    """out[t] = sum over the slots s of topk_weights[t, s] * (the output of expert topk_ids[t, s] for token t)."""

    @abc.abstractmethod
    def apply(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        expert_tokens_meta: Any = None,
    ) -> None:
        """Write `output` [tokens, hidden].

        Args:
            fused_expert_output: the experts' output, of the shape that the subclass documents.
            topk_weights, topk_ids: [tokens, topk].
            apply_router_weight_on_input: True: the inputs are already multiplied by the weights, so the weights are 1.
            expert_tokens_meta: from `prepare`, or None.
        """


class TopKWeightAndReduceNoOp(TopKWeightAndReduce):
    """Copies the experts' output, because the experts have done the reduction."""

    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, expert_tokens_meta: Any = None,
    ) -> None:  # fmt: skip
        if fused_expert_output is not output:
            output[...] = fused_expert_output


class TopKWeightAndReduceDelegate(TopKWeightAndReduce):
    """A placeholder, which the prepare/finalize class replaces by the reduction for its format."""

    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, expert_tokens_meta: Any = None,
    ) -> None:  # fmt: skip
        raise RuntimeError("the prepare/finalize class must choose a TopKWeightAndReduce in place of the Delegate")


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """Reduces outputs [tokens, topk, hidden]."""

    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, expert_tokens_meta: Any = None,
    ) -> None:  # fmt: skip
        tokens, topk = topk_ids.shape
        wanted = (tokens, topk, output.shape[1])
        check.shape("fused_expert_output", tuple(fused_expert_output.shape), wanted, "[tokens, topk, hidden]")
        if apply_router_weight_on_input:
            moe_sum(fused_expert_output, output)
            return
        rows = fused_expert_output.reshape(tokens * topk, output.shape[1])
        moe_unpermute(output, rows, topk_weights, None)


class TopKWeightAndReduceNaiveBatched(TopKWeightAndReduce):
    """Reduces outputs [experts, max_tokens, hidden], with the tokens of an expert in token order.

    Args:
        expert_map: as for `cukern.fused_experts`; used only if `expert_tokens_meta` has no positions.
    """

    def __init__(self, expert_map: Any = None) -> None:
        self.expert_map = expert_map

    def apply(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, expert_tokens_meta: Any = None,
    ) -> None:  # fmt: skip
        check.dimensions("fused_expert_output", tuple(fused_expert_output.shape), ("experts", "max_tokens", "hidden"))
        experts, max_tokens, hidden = fused_expert_output.shape
        positions = expert_tokens_meta.positions if expert_tokens_meta is not None else None
        if positions is None:
            count = experts if self.expert_map is None else self.expert_map.shape[0]
            _, positions = moe_sort_batched(
                topk_ids, count, max_tokens, expert_map=self.expert_map, num_local_experts=experts
            )
        weights = None if apply_router_weight_on_input else topk_weights
        moe_unpermute(output, fused_expert_output.reshape(experts * max_tokens, hidden), weights, positions)


#: The reduction that replaces `TopKWeightAndReduceDelegate`, keyed by the format of the experts' output.
DELEGATES = {
    FusedMoEActivationFormat.Standard: TopKWeightAndReduceContiguous,
    FusedMoEActivationFormat.BatchedExperts: TopKWeightAndReduceNaiveBatched,
}
