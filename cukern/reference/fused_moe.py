"""The fused mixture-of-experts layer in NumPy.

The arguments are those of `cukern.fused_experts`, already checked there. Between the steps the numbers are rounded as
they are when each step writes its result: to the layer's dtype, or to FP8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.reference.moe_gemm import product
from cukern.reference.quantization import per_token_group_quant_fp8, scaled_fp8_quant, silu_and_mul_quant

Array = NDArray[Any]

GROUP = 128


def quantize_input(x: Array, quant: Any) -> tuple[Array, Array | None]:
    """Rows as the first product takes them, and their scales."""
    if quant is None or quant.name not in ("fp8_block", "fp8", "mxfp4_fp8"):
        return x, None
    if quant.is_in_groups:
        return per_token_group_quant_fp8(x, GROUP)
    return scaled_fp8_quant(x, quant.a1_scale, use_per_token_if_dynamic=quant.per_act_token_quant)


def expert(
    a: Array, a_scale: Array | None, w1: Array, w2: Array, index: int, activation: str, quant: Any, dtype: Any
) -> Array:
    """The output of expert `index` for its rows `a`, which are quantized; `a_scale` is of each row, or [1] for all."""

    def multiply(x: Array, scale: Array | None, weights: Array, layer: str, activation: str | None) -> Array:
        scales = [getattr(quant, f"{layer}_{what}", None) for what in ("scale", "global_scale")]
        own = [None if s is None else s[index] for s in scales]
        with np.errstate(over="ignore"):
            return product(x, weights[index], scale, own[0], own[1], activation).astype(dtype)

    if a_scale is None:
        return multiply(multiply(a, None, w1, "w1", activation), None, w2, "w2", None)
    gate_up = multiply(a, a_scale, w1, "w1", None)
    group = GROUP if quant.is_in_groups else None
    activated, scale = silu_and_mul_quant(gate_up, activation, group_size=group, scale=quant.a2_scale)
    return multiply(activated, scale, w2, "w2", None)


def local_ids(topk_ids: Array, experts: int, expert_map: Array | None) -> Array:
    """The place of each id among this rank's experts, -1 for other ranks' and for ids of no expert."""
    ids = topk_ids.astype(np.int64)
    if expert_map is not None:
        known = (ids >= 0) & (ids < len(expert_map))
        ids = np.where(known, expert_map[np.where(known, ids, 0)], -1)
    return np.where((ids >= 0) & (ids < experts), ids, -1)


def fused_experts(
    hidden_states: Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    *,
    activation: str = "silu",
    quant: Any = None,
    expert_map: Array | None = None,
    apply_router_weight_on_input: bool = False,
    w1_scale: Array | None = None,
    w2_scale: Array | None = None,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    w1_global_scale: Array | None = None,
    w2_global_scale: Array | None = None,
) -> Array:
    """See `cukern.fused_experts`."""
    if isinstance(quant, str):
        # Here, since the package imports this module.
        from cukern.fused_moe.config import FusedMoEQuantConfig

        quant = FusedMoEQuantConfig.make(
            quant,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            w1_global_scale=w1_global_scale,
            w2_global_scale=w2_global_scale,
        )
    dtype = hidden_states.dtype
    ids = local_ids(topk_ids, len(w1), expert_map)
    x = hidden_states
    if apply_router_weight_on_input:
        x = (x.astype(np.float32) * topk_weights).astype(dtype)
        topk_weights = np.ones_like(topk_weights)
    a, a_scale = quantize_input(x, quant)
    rows = np.zeros((*ids.shape, x.shape[1]), dtype)
    for index in np.unique(ids[ids >= 0]).tolist():
        token, slot = np.nonzero(ids == index)
        scale = a_scale if a_scale is None or a_scale.size == 1 else a_scale[token]
        rows[token, slot] = expert(a[token], scale, w1, w2, index, activation, quant, dtype)
    total = np.zeros(x.shape, np.float32)
    for column in range(ids.shape[1]):
        chosen = ids[:, column] >= 0
        total[chosen] += topk_weights[chosen, column, None] * rows[chosen, column].astype(np.float32)
    with np.errstate(over="ignore"):
        return total.astype(dtype)
