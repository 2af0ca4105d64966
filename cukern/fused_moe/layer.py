"""The fused mixture-of-experts layer as one function."""

from __future__ import annotations

from typing import Any

from cukern.formats.fused_moe import NOT_QUANTIZED, SCALES, FusedMoEQuantConfig
from cukern.fused_moe.launches import NAMES, Layer, choose_layer
from cukern.fused_moe.output import check_layer
from cukern.reference import fused_moe as twin
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.decisions import Decisions
from cukern.runtime.describe import Result, dtype_name
from cukern.runtime.launch import returned, run_twin
from cukern.runtime.op import operator
from cukern.runtime.view import read

#: The layers of calls, with their launches by the number of tokens, which is free.
DECISIONS = Decisions((0,), (), (), (0,), (0,), (), *[()] * len(SCALES), (0,))
_MAX_LAUNCHES = 4096  # numbers of tokens of a layer that are kept


def _config(quant: Any, numbers: dict[str, Any], scales: dict[str, Any]) -> FusedMoEQuantConfig:
    """The configuration with these scales: the numbers of one, or its name with some of its numbers."""
    if isinstance(quant, FusedMoEQuantConfig):
        return FusedMoEQuantConfig(**quant.numbers, **scales)
    if quant is not None and not isinstance(quant, str):
        check.fail("quant", "a FusedMoEQuantConfig, its name, or None", type(quant).__name__, TypeError)
    return FusedMoEQuantConfig.make(quant, **numbers, **scales)


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
    """Send each token through its experts, from the top-k ids to the layer's output.

    out[t] = sum over s of topk_weights[t, s] * w2[e] activation(gate, up), with e = topk_ids[t, s] and gate and up the
    halves of w1[e] hidden_states[t]; products are added up in float32, the slots of a token in their order.

    Four launches: a sort of the tokens by expert, two products of all experts at once (the first with the activation),
    and the weighted sum of each token's rows. With many rows per expert a fifth permutes the rows first; FP8 has one
    more for each time that activations are quantized, but in groups the launch that permutes tokens quantizes them. One
    token in 16 bits takes two: products that find their experts by the ids, the second with the sum, with the bits of
    the four.

    Args:
        hidden_states: [tokens, hidden], float16, bfloat16 or, without quantization, float32 (not tuned).
        w1: [experts, 2 * inter, hidden], the gate's rows first, of the same dtype; quantized as `quant` says, of 4 bits
            uint8 with two numbers in a byte. Without a gate: [experts, inter, hidden].
        w2: [experts, hidden, inter]. Rows of both may have a stride; without quantization either may be a view
            `w.transpose(1, 2)` of an array [experts, in, out], which is not copied. Sizes may be any that the
            quantization has groups for; `cukern.moe_gemm` says which are fast.
        topk_weights: float32 [tokens, topk].
        topk_ids: int32 or int64 [tokens, topk]. A slot whose id is -1, or of no expert, has no part in the result.
        activation: silu, gelu, gelu_tanh, swigluoai or relu2; `cukern.moe_activation` has the formulas. Of experts
            without a gate silu_no_mul, gelu_no_mul, gelu_tanh_no_mul or relu2_no_mul, as vLLM calls them.
        quant: a `cukern.fused_moe.FusedMoEQuantConfig`, or the name of one, "fp8_block", "fp8", "mxfp4" or "nvfp4",
            with the scales it needs in the arguments below, as described there. Weights of 4 bits may be prepared by
            `cukern.prepare_weights`: then w1_scale and w2_scale are None. "mxfp4_fp8" takes MXFP4 weights prepared for
            FP8 rows and quantizes the activations to FP8, with a scale for 128 of a row (on Hopper), as vLLM's backend
            DEEPGEMM_MXFP4 does.
        expert_map: int32 [all experts], over all ranks: the index of each expert in w1 and w2, or -1 for one of another
            rank. topk_ids are then ids among the experts of all ranks; an id past the map has no part in the result.
        apply_router_weight_on_input: the weights multiply the input in place of the output; topk must be 1.
        w1_scale, w2_scale, a1_scale, a2_scale, w1_global_scale, w2_global_scale: the scales that `quant` asks for.
        w1_bias, w2_bias: [experts, 2 * inter] (without a gate [experts, inter]) and [experts, hidden], float32 or of
            the dtype of hidden_states: added to the products, before the activation and before topk_weights.
        alpha, limit: of swigluoai.
        interleaved: rows 2 j and 2 j + 1 of w1, and of w1_bias, are gate j and its up, as in gpt-oss.
        per_act_token_quant: with "fp8" whether each row of activations has a scale of its own, or all have one:
            a1_scale and a2_scale, or found at each call without waiting for the GPU. None: it has, unless a2_scale is
            given.
        out: [tokens, hidden], written and returned.

    Returns:
        [tokens, hidden], in the dtype of hidden_states.

    Raises:
        TypeError: a dtype, or a library, that is not taken.
        ValueError: shapes, devices, strides or options that do not fit; the message names the argument.

    The name and the order of the arguments are those of vLLM's `fused_experts`. This is the layer of
    `cukern.fused_moe` with `MoEPrepareAndFinalizeNoEP` and `AutoExperts`.
    """
    form = alpha, limit, interleaved, per_act_token_quant
    scales: tuple[Any, ...] = (
        w1_scale, w2_scale, a1_scale, a2_scale, w1_global_scale, w2_global_scale, w1_bias, w2_bias
    )  # fmt: skip
    if isinstance(quant, FusedMoEQuantConfig):
        if form != _DEFAULT_FORM or any(scale is not None for scale in scales):
            _refuse_beside(scales, form)
        scales, numbers = quant.arrays, quant.facts
    else:
        numbers = ()
    arrays = hidden_states, w1, w2, topk_weights, topk_ids, expert_map, *scales, out
    facts = activation, apply_router_weight_on_input, quant if numbers == () else None, *form, *numbers
    decision = DECISIONS.find(facts, arrays)
    if decision is not None:
        library, tokens, layer = decision.library, hidden_states.shape[0], decision.own
        address_of = library.address
        addresses = [0 if x is None else address_of(x) for x in arrays]
        if (
            (addresses[0] | addresses[1] | addresses[2] | addresses[-1]) % 16 == 0
            and topk_weights.shape[0] == tokens == topk_ids.shape[0]
            and (out is None or out.shape[0] == tokens)
        ):
            if out is None:
                out = library.allocate((tokens, layer.hidden), layer.dtype, decision.device)
                addresses[-1] = address_of(out)
            if tokens:
                launches = decision.choices.get(tokens)
                if launches is None:
                    if len(decision.choices) >= _MAX_LAUNCHES:
                        decision.choices.clear()
                    launches = decision.choices[tokens] = choose_layer(layer, tokens)
                launches.run(library, decision.device, addresses)
            return out
    return _decide(facts, arrays, quant, form)


_DEFAULT_FORM = *NOT_QUANTIZED.form.values(), None


def _refuse_beside(scales: tuple[Any, ...], form: tuple[Any, ...]) -> None:
    """Raise ValueError for scales and numbers beside a configuration that holds them."""
    for name, scale in zip(SCALES, scales, strict=True):
        if scale is not None:
            check.fail(name, "None, since quant holds the scales and biases", type(scale).__name__)
    activations.check_bounds(*form[:2])
    wanted = "as they are by default, since quant holds them"
    check.fail("alpha, limit, interleaved and per_act_token_quant", wanted, form)


def _decide(facts: tuple[Any, ...], arrays: tuple[Any, ...], quant: Any, form: tuple[Any, ...]) -> Any:
    """Check a call, choose its launches, keep the layer, launch."""
    activation, weighs_input = facts[0], check.flag("apply_router_weight_on_input", facts[1])
    alpha, limit = activations.check_bounds(*form[:2])
    check.one_of("interleaved", form[2], (False, True))
    check.one_of("per_act_token_quant", form[3], (None, False, True))
    numbers = dict(zip(("gemm1_alpha", "gemm1_clamp_limit", "gemm1_interleaved"), (alpha, limit, form[2]), strict=True))
    if form[3] is not None:
        numbers["per_act_token_quant"] = form[3]
    given = dict(zip(NAMES, arrays, strict=True))
    config = _config(quant, numbers, {name: given[name] for name in SCALES})
    *of_layer, out = arrays
    views = check_layer(
        (*of_layer[:6], out, *of_layer[6:]), activation, config.name, weighs_input, *config.form.values()
    )
    x, into = views[0], views[-1]
    if x.device is None:
        arguments = dict(zip(NAMES[:-1], views[:-1], strict=True))
        options = {"activation": activation, "apply_router_weight_on_input": weighs_input}
        return run_twin(lambda **own: _on_host(quant, numbers, **own), x, (into,), {**arguments, **options})
    out_view = into or read("out", x.library.allocate(x.shape, x.dtype, x.device))
    own = [None if view is None else view._replace(array=None) for view in (*views[:-1], out_view)]
    layer = Layer(own, activation, _config(quant, numbers, dict(zip(SCALES, own[6:-1], strict=True))), weighs_input)
    if x.shape[0] and x.shape[1]:
        launches = choose_layer(layer, x.shape[0])
        is_aligned = all(view.address % 16 == 0 for view in (*own[:3], own[-1]))  # type: ignore[union-attr]
        if x.foreign is None and x.library.recorder is None and is_aligned:
            kept = DECISIONS.keep(facts, arrays, x.library, x.device, layer)
            kept.choices[x.shape[0]] = launches
        launches.run(x.library, x.device, [0 if view is None else view.address for view in own])
    return returned(out_view.array, into, x)


def _on_host(quant: Any, numbers: dict[str, Any], **given: Any) -> Any:
    """The NumPy reference of a layer."""
    scales = {name: given.pop(name) for name in SCALES}
    return twin.fused_experts(**given, quant=_config(quant, numbers, scales))
