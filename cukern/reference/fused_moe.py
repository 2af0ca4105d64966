"""The fused mixture-of-experts layer in NumPy.

Each step's result is rounded to the layer's dtype or FP8, because the kernels write it to memory in that dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.formats.fused_moe import GROUP, FusedMoEQuantConfig
from cukern.reference.moe_gemm import product
from cukern.reference.quantization import per_token_group_quant_fp8, scaled_fp8_quant, silu_and_mul_quant
from cukern.runtime.activation import ALPHA, LIMIT
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernels round activations and expert outputs to the dtype of the layer. Outputs have magnitude 1, or up to 16
    # with relu2.
    "out": {
        "float32": Tolerance(relative=4e-5, absolute=4e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-7),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-4),
    },
    # An activation near an FP8 rounding boundary may round the other way, which changes a term of the second GEMM's sum
    # by up to an eighth. Terms have magnitude `2 / sqrt(inter)`, 0.2 in the tests; a few in a million are five times as
    # large. On an H200 the largest difference is 0.31, with relu2. The tests also limit the norm of all differences.
    "fp8_out": {
        "float16": Tolerance(relative=2**-7, absolute=0.375),
        "bfloat16": Tolerance(relative=2**-7, absolute=0.375),
    },
}

Array = NDArray[Any]

FP8_NAMES = ("fp8_block", "fp8", "mxfp4_fp8")


def quantize_input(x: Array, quant: Any) -> tuple[Array, Array | None]:
    """Return the first GEMM's input rows and their scales. Without FP8 activations the scales are None."""
    if quant is None or quant.name not in FP8_NAMES:
        return x, None
    if quant.is_in_groups:
        return per_token_group_quant_fp8(x, GROUP)
    return scaled_fp8_quant(x, quant.a1_scale, use_per_token_if_dynamic=quant.per_act_token_quant)


def experts(
    rows: dict[int, tuple[Array, Array | None]], w1: Array, w2: Array, activation: str, quant: Any, dtype: Any
) -> dict[int, Array]:
    """Return the output rows of each expert.

    `rows` maps an expert's index to (input rows, scales). In a quantized layer the rows are quantized. The scales are
    None, one per row, or [1].
    """

    def multiply(index: int, x: Array, scale: Array | None, weights: Array, layer: str, **form: Any) -> Array:
        names = "scale", "global_scale", "bias"
        b_scale, global_scale, bias = (_own(getattr(quant, f"{layer}_{name}", None), index) for name in names)
        with np.errstate(over="ignore"):
            return product(x, weights[index], scale, b_scale, global_scale, bias=bias, **form).astype(dtype)

    is_fp8 = quant is not None and quant.name in FP8_NAMES
    form: dict[str, Any] = {"activation": None}
    is_activated = not is_fp8 or quant.quantizes_activated(activation)
    if is_activated:
        form = {"activation": activation, **({} if quant is None else quant.form)}
    first = {index: multiply(index, a, scale, w1, "w1", **form) for index, (a, scale) in rows.items()}
    second: dict[int, tuple[Array, Array | None]]
    if not is_fp8:
        second = {index: (x, None) for index, x in first.items()}
    elif is_activated:
        second = _quantized(first, quant)
    else:
        group = GROUP if quant.is_in_groups else None
        second = {
            index: silu_and_mul_quant(x, activation, group_size=group, scale=quant.a2_scale)
            for index, x in first.items()
        }
    return {index: multiply(index, x, scale, w2, "w2", activation=None) for index, (x, scale) in second.items()}


def _own(values: Array | None, index: int) -> Any:
    return None if values is None else values[index]


def _quantized(activated: dict[int, Array], quant: Any) -> dict[int, tuple[Array, Array | None]]:
    if quant.is_in_groups:
        return {index: per_token_group_quant_fp8(x, GROUP) for index, x in activated.items()}
    scale = quant.a2_scale
    if scale is None and not quant.per_act_token_quant and activated:
        scale = scaled_fp8_quant(np.concatenate(list(activated.values())))[1]
    return {
        index: scaled_fp8_quant(x, scale, use_per_token_if_dynamic=quant.per_act_token_quant)
        for index, x in activated.items()
    }


def local_ids(topk_ids: Array, experts: int, expert_map: Array | None) -> Array:
    """Return local expert indices; -1 for experts of other ranks and invalid ids."""
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
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    interleaved: bool = False,
    per_act_token_quant: bool | None = None,
) -> Array:
    if quant is None or isinstance(quant, str):
        quant = FusedMoEQuantConfig.make(
            quant,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            w1_global_scale=w1_global_scale,
            w2_global_scale=w2_global_scale,
            w1_bias=w1_bias,
            w2_bias=w2_bias,
            gemm1_alpha=alpha,
            gemm1_clamp_limit=limit,
            gemm1_interleaved=interleaved,
            **({} if per_act_token_quant is None else {"per_act_token_quant": per_act_token_quant}),
        )
    dtype = hidden_states.dtype
    ids = local_ids(topk_ids, len(w1), expert_map)
    x = hidden_states
    if apply_router_weight_on_input:
        x = (x.astype(np.float32) * topk_weights).astype(dtype)
        topk_weights = np.ones_like(topk_weights)
    a, a_scale = quantize_input(x, quant)
    rows = np.zeros((*ids.shape, x.shape[1]), dtype)
    own = {}
    for index in np.unique(ids[ids >= 0]).tolist():
        token, _ = np.nonzero(ids == index)
        own[index] = a[token], a_scale if a_scale is None or a_scale.size == 1 else a_scale[token]
    for index, found in experts(own, w1, w2, activation, quant, dtype).items():
        rows[np.nonzero(ids == index)] = found
    total = np.zeros(x.shape, np.float32)
    for column in range(ids.shape[1]):
        chosen = ids[:, column] >= 0
        total[chosen] += topk_weights[chosen, column, None] * rows[chosen, column].astype(np.float32)
    with np.errstate(over="ignore"):
        return total.astype(dtype)
