"""Gates of mixture-of-experts layers in NumPy, step by step as in the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The hardware's exp2, log2 and reciprocal each have a relative error of about 2**-22. Rounding exp2's argument adds
    # an error proportional to the logit.
    "weights": {"float32": Tolerance(relative=2e-5, absolute=1e-9)},
}

Array = NDArray[Any]


def _scores(logits: Array, scoring_func: str, softcap: float) -> Array:
    """Return the scores of float32 logits. The score of NaN and -inf is 0."""
    regular = logits > -np.inf
    limit = np.finfo(np.float32).max
    x = np.clip(np.where(regular, logits, -limit), -limit, limit).astype(np.float64)
    if softcap:
        x = softcap * np.tanh(x / softcap)
    with np.errstate(over="ignore", under="ignore"):
        if scoring_func == "sigmoid":
            scores = 1 / (1 + np.exp(-x))
        elif scoring_func == "softmax":
            scores = np.exp(x - x.max(axis=-1, keepdims=True)) * regular
            total = scores.sum(axis=-1, keepdims=True)
            scores = np.divide(scores, total, out=np.zeros_like(scores), where=total > 0)
        else:
            softplus = np.logaddexp(0, x)
            scores = np.sqrt(np.where(softplus >= np.finfo(np.float32).tiny, softplus, 0))
    # The hardware's exp and reciprocal flush subnormal numbers to 0.
    return np.where(regular & (scores >= np.finfo(np.float32).tiny), scores, 0).astype(np.float32)


def _best_first(keys: Array) -> Array:
    """Return the indices of the keys, largest first; ties keep their order."""
    return np.argsort(-keys, axis=-1, kind="stable")


def gate(
    logits: Array,
    bias: Array | None,
    groups: int,
    topk_group: int,
    topk: int,
    shared: int,
    routed_scaling_factor: float,
    scale_output: bool,
    renormalize: bool,
    scoring_func: str,
    group_by_two: bool,
    num_token_non_padded: Any,
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    """Compute any of the five gates, which differ only in these arguments."""
    tokens, experts = logits.shape
    x = logits.astype(np.float32)
    scores = _scores(x, scoring_func, softcap)
    with np.errstate(over="ignore"):
        choice = x if bias is None else scores + bias.astype(np.float32)
    choice = np.where((x > -np.inf) & ~np.isnan(choice), choice, np.float32(-np.inf))

    by_group = choice.reshape(tokens, groups, experts // groups)
    in_order = -np.sort(-by_group, axis=-1)
    group_score = in_order[..., 0]
    if group_by_two and experts > groups:
        with np.errstate(invalid="ignore"):
            group_score = in_order[..., 0] + in_order[..., 1]
        group_score = np.where(np.isnan(group_score), np.float32(-np.inf), group_score)
    kept = np.zeros((tokens, groups), bool)
    np.put_along_axis(kept, _best_first(group_score)[:, :topk_group], True, axis=-1)

    # Experts outside of the kept groups come last, even after experts of the kept groups with a score of -inf.
    outside = np.repeat(~kept, experts // groups, axis=-1)
    routed = topk - shared
    ids = np.lexsort((np.broadcast_to(np.arange(experts), choice.shape), -choice, outside), axis=-1)[:, :routed]
    weights = np.take_along_axis(scores, ids, axis=-1)
    weights = np.where(np.take_along_axis(choice, ids, axis=-1) > -np.inf, weights, np.float32(0))

    total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
    shared_weights = np.broadcast_to(total / np.float32(routed_scaling_factor), (tokens, shared))
    shared_ids = np.broadcast_to(experts + np.arange(shared), (tokens, shared))
    weights = np.concatenate([weights, shared_weights], axis=-1)
    ids = np.concatenate([ids, shared_ids], axis=-1).astype(np.int32)
    if renormalize:
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    if scale_output:
        weights = weights * np.float32(routed_scaling_factor)
    if num_token_non_padded is not None:
        padding = np.arange(tokens) >= int(np.asarray(num_token_non_padded).reshape(()))
        weights[padding] = 0
        ids[padding] = -1
    return weights.astype(np.float32), ids


def moe_fused_gate(
    input: Array,
    bias: Array,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    renormalize: bool = True,
    scoring_func: str = "sigmoid",
    num_token_non_padded: Any = None,
) -> tuple[Array, Array]:
    return gate(
        input,
        bias,
        num_expert_group,
        topk_group,
        topk,
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        renormalize,
        scoring_func,
        True,
        num_token_non_padded,
    )


def biased_grouped_topk(
    hidden_states: Any,
    gating_output: Array,
    correction_bias: Array,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    scoring_func: str = "sigmoid",
    num_token_non_padded: Any = None,
) -> tuple[Array, Array]:
    return gate(
        gating_output,
        correction_bias,
        num_expert_group or 1,
        topk_group or 1,
        topk,
        num_fused_shared_experts,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
        renormalize and apply_routed_scaling_factor_on_output,
        renormalize,
        scoring_func,
        True,
        num_token_non_padded,
    )


def grouped_topk(
    hidden_states: Any,
    gating_output: Array,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    scoring_func: str = "softmax",
    num_token_non_padded: Any = None,
) -> tuple[Array, Array]:
    return gate(
        gating_output,
        None,
        num_expert_group or 1,
        topk_group or 1,
        topk,
        num_fused_shared_experts,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
        renormalize and apply_routed_scaling_factor_on_output,
        renormalize,
        scoring_func,
        False,
        num_token_non_padded,
    )


def topk_softmax(
    topk_weights: Array,
    topk_ids: Array,
    gating_output: Array,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: Array | None = None,
    *,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = True,
    num_token_non_padded: Any = None,
) -> tuple[Array, Array]:
    topk_weights[...], topk_ids[...] = gate(
        gating_output,
        correction_bias,
        1,
        1,
        topk_ids.shape[1],
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        renormalize,
        "softmax",
        False,
        num_token_non_padded,
        moe_softcapping,
    )
    return topk_weights, topk_ids


def topk_sigmoid(
    topk_weights: Array,
    topk_ids: Array,
    gating_output: Array,
    renormalize: bool = False,
    correction_bias: Array | None = None,
    *,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = True,
    num_token_non_padded: Any = None,
) -> tuple[Array, Array]:
    topk_weights[...], topk_ids[...] = gate(
        gating_output,
        correction_bias,
        1,
        1,
        topk_ids.shape[1],
        num_fused_shared_experts,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        renormalize,
        "sigmoid",
        False,
        num_token_non_padded,
    )
    return topk_weights, topk_ids
