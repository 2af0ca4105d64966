"""The fused mixture-of-experts layer as one function."""

from __future__ import annotations

from typing import Any

from cukern.fused_moe.config import FusedMoEQuantConfig
from cukern.fused_moe.experts import AutoExperts, on_host
from cukern.fused_moe.modular_kernel import DTYPES, FusedMoEModularKernel, check_layer
from cukern.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoEP
from cukern.reference import fused_moe as twin
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check

_PREPARE_FINALIZE = MoEPrepareAndFinalizeNoEP()
_NOT_QUANTIZED = AutoExperts()
_LAYER = FusedMoEModularKernel(_PREPARE_FINALIZE, _NOT_QUANTIZED)


def _config(quant: Any, scales: dict[str, Any]) -> FusedMoEQuantConfig:
    given = {name: scale for name, scale in scales.items() if scale is not None}
    if not isinstance(quant, FusedMoEQuantConfig):
        if quant is not None and not isinstance(quant, str):
            check.fail("quant", "a FusedMoEQuantConfig, its name, or None", type(quant).__name__, TypeError)
        return FusedMoEQuantConfig.make(quant, **given)
    for name in given:
        check.fail(name, "None, since quant holds the scales", type(given[name]).__name__)
    return quant


@arrays.takes_dlpack
def fused_experts(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    *,
    activation: str = "silu",
    quant: FusedMoEQuantConfig | str | None = None,
    expert_map: Any = None,
    apply_router_weight_on_input: bool = False,
    w1_scale: Any = None,
    w2_scale: Any = None,
    a1_scale: Any = None,
    a2_scale: Any = None,
    w1_global_scale: Any = None,
    w2_global_scale: Any = None,
    out: Any = None,
) -> Any:
    """Send each token through its experts, from the top-k ids to the layer's output.

    out[t] = sum over s of topk_weights[t, s] * w2[e] activation(gate, up), with e = topk_ids[t, s] and gate and up the
    halves of w1[e] hidden_states[t]; products are added up in float32, the slots of a token in their order.

    Four launches: the tokens are sorted by expert, both products run over all experts at once (the first with the
    activation), and the rows are weighed and added up. With many rows per expert a fifth copies the rows side by side;
    FP8 has one more for each time that activations are quantized.

    Args:
        hidden_states: [tokens, hidden], float16 or bfloat16.
        w1: [experts, 2 * inter, hidden], the gate's rows first, of the same dtype; quantized as `quant` says, of 4 bits
            uint8 with two numbers in a byte.
        w2: [experts, hidden, inter].
        topk_weights: float32 [tokens, topk].
        topk_ids: int32 or int64 [tokens, topk]. A slot whose id is -1, or no expert's, has no part in the result.
        activation: silu, gelu, gelu_tanh, swigluoai or relu2; `cukern.moe_activation` has the formulas.
        quant: a `cukern.fused_moe.FusedMoEQuantConfig`, or the name of one, "fp8_block", "fp8", "mxfp4" or "nvfp4",
            with the scales it needs in the arguments below, as described there.
        expert_map: int32 [all experts], the place of each in w1 and w2, -1 for those that are on other ranks.
        apply_router_weight_on_input: the weights multiply the input in place of the output; topk must be 1.
        out: [tokens, hidden], written and returned.

    Returns:
        [tokens, hidden], in the dtype of hidden_states.

    Raises:
        TypeError: a dtype, or a library, that is not taken.
        ValueError: shapes, devices, strides or options that do not fit; the message names the argument.

    The name and the order of the arguments are those of vLLM's `fused_experts`. This is the layer of
    `cukern.fused_moe` with `MoEPrepareAndFinalizeNoEP` and `AutoExperts`.
    """
    scales: dict[str, Any] = {
        "w1_scale": w1_scale, "w2_scale": w2_scale, "a1_scale": a1_scale, "a2_scale": a2_scale,
        "w1_global_scale": w1_global_scale, "w2_global_scale": w2_global_scale,
    }  # fmt: skip
    config = _config(quant, scales)
    library, device = arrays.place("hidden_states", hidden_states)
    if device is None:
        library, device, _ = arrays.leader("hidden_states", hidden_states, DTYPES, ("tokens", "hidden"))
        activations.number(activation)
        check_layer(
            hidden_states, w1, w2, topk_weights, topk_ids, config, expert_map, apply_router_weight_on_input, out,
            library, device,
        )  # fmt: skip
        return arrays.on_host(
            twin.fused_experts,
            hidden_states,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=activation,
            quant=on_host(config),
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
            out=out,
        )
    layer = _LAYER if config.name is None else FusedMoEModularKernel(_PREPARE_FINALIZE, AutoExperts(config))
    return layer(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation=activation,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
        out=out,
    )


# --- PyTorch ------------------------------------------------------------------------------------------


def _result(hidden_states: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    return ((hidden_states, tuple(hidden_states.shape), str(hidden_states.dtype).removeprefix("torch.")),)


#: For `cukern.torch_ops`. The operator takes a quantization by its name.
TORCH_OPS: dict[str, Any] = {
    "fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, *, "
    "str activation='silu', str? quant=None, Tensor? expert_map=None, bool apply_router_weight_on_input=False, "
    "Tensor? w1_scale=None, Tensor? w2_scale=None, Tensor? a1_scale=None, Tensor? a2_scale=None, "
    "Tensor? w1_global_scale=None, Tensor? w2_global_scale=None) -> (Tensor output)": _result,
}
