"""The fused mixture-of-experts layer as one function, `fused_experts`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from cukern.formats.fused_moe import NOT_QUANTIZED, FusedMoEQuantConfig
from cukern.fused_moe.experts import AutoExperts
from cukern.fused_moe.modular_kernel import FusedMoEModularKernel
from cukern.fused_moe.output import layer_output
from cukern.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoEP
from cukern.reference import fused_moe as twin
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Result, dtype_name, expect_array
from cukern.runtime.op import op, operator
from cukern.runtime.plan import run_twin


@dataclass(frozen=True)
class _Numbers:
    """A quantization without its scales: its name with options, or the options of a `FusedMoEQuantConfig`."""

    name: Any
    numbers: tuple[tuple[str, Any], ...]


def _config(quant: _Numbers, scales: dict[str, Any]) -> FusedMoEQuantConfig:
    numbers = dict(quant.numbers)
    if "quant_dtype" in numbers:
        return FusedMoEQuantConfig(**numbers, **scales)
    if quant.name is not None and not isinstance(quant.name, str):
        check.fail("quant", "a FusedMoEQuantConfig, its name, or None", type(quant.name).__name__, TypeError)
    return FusedMoEQuantConfig.make(quant.name, **numbers, **scales)


def _layer_on_host(
    hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: str, quant: Any,
    apply_router_weight_on_input: bool, *, expert_map: Any = None, **scales: Any,
) -> Any:  # fmt: skip
    return twin.fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, activation=activation, quant=_config(quant, scales),
        expert_map=expert_map, apply_router_weight_on_input=apply_router_weight_on_input,
    )  # fmt: skip


@op(_layer_on_host)
def _layer(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: str,
    quant: Any,
    apply_router_weight_on_input: bool,
    *,
    expert_map: Any = None,
    out: Any = None,
    **scales: Any,
) -> Any:
    """Record the layer as one plan, by running its classes on array descriptions."""
    config = _config(quant, scales)
    if expect_array("hidden_states", hidden_states).on_host:
        options = {} if expert_map is None else {"expert_map": expert_map}
        layer_output(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, config.name, apply_router_weight_on_input,
            out=out, activation_options=tuple(config.form.values()), **options, **scales,
        )  # fmt: skip
        return run_twin()
    layer = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), AutoExperts(config))
    return layer(
        hidden_states, w1, w2, topk_weights, topk_ids, activation=activation, expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input, out=out,
    )  # fmt: skip


def _result(hidden_states: Any, *_: Any, **__: Any) -> Result:
    return Result(tuple(hidden_states.shape), dtype_name(hidden_states), "[tokens, hidden]")


@operator("output", _result)
def fused_experts(
    hidden_states: AnyArray,
    w1: AnyArray,
    w2: AnyArray,
    topk_weights: AnyArray,
    topk_ids: AnyArray,
    *,
    activation: str = "silu",
    quant: str | FusedMoEQuantConfig | None = None,
    expert_map: AnyArray | None = None,
    apply_router_weight_on_input: bool = False,
    w1_scale: AnyArray | None = None,
    w2_scale: AnyArray | None = None,
    a1_scale: AnyArray | None = None,
    a2_scale: AnyArray | None = None,
    w1_global_scale: AnyArray | None = None,
    w2_global_scale: AnyArray | None = None,
    w1_bias: AnyArray | None = None,
    w2_bias: AnyArray | None = None,
    alpha: float = activations.ALPHA,
    limit: float = activations.LIMIT,
    interleaved: bool = False,
    per_act_token_quant: bool | None = None,
    out: AnyArray | None = None,
) -> AnyArray:
    """Run a mixture-of-experts layer: send each token through its top-k experts, and add up the results.

    out[t] = sum over s of topk_weights[t, s] * w2[e] activation(gate, up), with e = topk_ids[t, s]. `gate` and `up` are
    the halves of w1[e] hidden_states[t]. Sums are in float32, and the slots s of a token are added in order.

    The layer launches a sort by expert, two grouped GEMMs and the weighted sum. Many rows per expert also need a
    permute kernel, and FP8 needs quantization kernels. A single token with 16-bit weights needs only the GEMMs.

    Args:
        hidden_states: [tokens, hidden], float16, bfloat16 or, without quantization, float32 (not tuned).
        w1: [experts, 2 * inter, hidden], the gate's rows first, of the same dtype; without a gate [experts, inter,
            hidden]. 4-bit weights are uint8 with two elements per byte.
        w2: [experts, hidden, inter]. The rows of w1 and w2 may have a stride. Without quantization either may be a view
            `w.transpose(1, 2)`, which is not copied. `inter` and `hidden` are multiples of the quantization's group
            size; `cukern.moe_gemm` says which sizes are fast.
        topk_weights: float32 [tokens, topk].
        topk_ids: int32 or int64 [tokens, topk]. A slot whose id names no expert, such as -1, adds nothing.
        activation: silu, gelu, gelu_tanh, swigluoai or relu2; without a gate silu_no_mul, gelu_no_mul, gelu_tanh_no_mul
            or relu2_no_mul. `cukern.moe_activation` has the formulas.
        quant: a `cukern.fused_moe.FusedMoEQuantConfig`, or the name of a quantization with the scales below:
            "fp8_block", "fp8", "mxfp4" or "nvfp4". 4-bit weights from `cukern.prepare_weights` need no w1_scale and
            w2_scale. "mxfp4_fp8" (on Hopper) takes MXFP4 weights prepared for FP8 activations, and quantizes
            activations to FP8 with one scale per 128 elements.
        expert_map: int32 [all experts]: the index of each expert in w1 and w2, or -1 for an expert of another rank.
            topk_ids then refer to the experts of all ranks.
        apply_router_weight_on_input: multiply the input by the weights instead of the output; topk must be 1.
        w1_scale, w2_scale, a1_scale, a2_scale, w1_global_scale, w2_global_scale: the scales that `quant` asks for.
        w1_bias, w2_bias: [experts, 2 * inter] (without a gate [experts, inter]) and [experts, hidden], float32 or of
            the dtype of hidden_states, added to the results of the first and of the second GEMM.
        alpha, limit: the constants of swigluoai.
        interleaved: rows `2 * j` and `2 * j + 1` of w1 and w1_bias are the gate row j and the up row j, as in gpt-oss.
        per_act_token_quant: with "fp8", whether each row of activations has its own scale. Otherwise all rows share
            a1_scale and a2_scale, or scales that each call computes. None: per row, unless a2_scale is given.
        out: [tokens, hidden], written and returned.

    Returns:
        [tokens, hidden], in the dtype of hidden_states.

    Raises:
        TypeError, ValueError: invalid arguments; the message names the argument.

    The argument order is the same as in vLLM's `fused_experts`.
    """
    given: dict[str, Any] = {
        "expert_map": expert_map, "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale,
        "a2_scale": a2_scale, "w1_global_scale": w1_global_scale, "w2_global_scale": w2_global_scale,
        "w1_bias": w1_bias, "w2_bias": w2_bias, "out": out,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    alpha, limit = activations.check_bounds(alpha, limit)
    check.one_of("interleaved", interleaved, (False, True))
    check.one_of("per_act_token_quant", per_act_token_quant, (None, False, True))
    activation_options = alpha, limit, interleaved
    if isinstance(quant, FusedMoEQuantConfig):
        for name in itertools.filterfalse(("expert_map", "out").__contains__, options):
            check.fail(name, "None, since quant holds the scales and biases", type(options[name]).__name__)
        if (activation_options, per_act_token_quant) != (tuple(NOT_QUANTIZED.form.values()), None):
            wanted = "as they are by default, since quant holds them"
            check.fail(
                "alpha, limit, interleaved and per_act_token_quant", wanted, (*activation_options, per_act_token_quant)
            )
        options.update(quant.scales)
        numbers = _Numbers(quant.name, tuple(quant.numbers.items()))
    else:
        fields = dict(zip(("gemm1_alpha", "gemm1_clamp_limit", "gemm1_interleaved"), activation_options, strict=True))
        if per_act_token_quant is not None:
            fields["per_act_token_quant"] = per_act_token_quant
        numbers = _Numbers(quant, tuple(fields.items()))
    return _layer(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, numbers, apply_router_weight_on_input, **options
    )
