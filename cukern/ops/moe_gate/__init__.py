"""The MoE gates: choose the experts of each token and compute their weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.ops.moe_gate import choose as kernels
from cukern.ops.moe_gate.choose import BIAS_DTYPES, DTYPES, MAX_EXPERTS, MAX_TOKENS, SCORING, VARIANTS, Config
from cukern.reference import moe_gate as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Array, Result, expect, expect_array, expect_place, expect_row_stride, type_name
from cukern.runtime.op import forget_plans, op
from cukern.runtime.plan import asked, check_each_call, launch, outputs, run_twin
from cukern.runtime.vectors import ceil_div

__all__ = ["biased_grouped_topk", "grouped_topk", "moe_fused_gate", "topk_sigmoid", "topk_softmax"]


def specialize(*, experts: int, groups: int = 1, scoring_func: str = "sigmoid", biased: bool = True) -> list[Instance]:
    """Register variants for these sizes in this process, and return their instances; see `cukern.specialize`.

    Raises ValueError unless at least one number of lanes (4, 8, 16 or 32) is a multiple of `groups`, divides `experts`,
    and is at least experts / 32.
    """
    check.integer("experts", experts, 1, MAX_EXPERTS)
    check.integer("groups", groups, 1, experts)
    check.one_of("scoring_func", scoring_func, SCORING)
    config = Config(experts, groups, scoring_func if biased else "any", bool(biased))
    if not kernels.lanes_of(config):
        check.fail(
            "experts and groups",
            "sizes where a group is whole lanes of at most 32 experts (the dynamic variant takes all others)",
            f"{experts} experts in {groups} groups",
        )
    kernels.registered.add(config)
    kernels.choose.cache_clear()
    forget_plans()
    return kernels.variants_of(config)


#: Defaults of `cukern.specialize` for the functions that usually have no bias.
DEFAULTS: dict[str, dict[str, Any]] = {
    "topk_softmax": {"scoring_func": "softmax", "biased": False},
    "grouped_topk": {"scoring_func": "softmax", "biased": False},
    "topk_sigmoid": {"biased": False},
}


def _valid_tokens(count: Any, tokens: int) -> int:
    return check.integer("num_token_non_padded", count, 0, tokens, "tokens")


class _Call(NamedTuple):
    """The arguments that all five gates share. `bias_name` is the bias's name in error messages."""

    name: str
    logits: Any
    bias_name: str
    bias: Any
    renormalize: bool
    scoring: str
    num_token_non_padded: Any
    variant: str


def _check_sizes(sizes: tuple[Any, ...]) -> kernels.Sizes:
    low = {"num_expert_group": 1, "topk_group": 1, "topk": 1, "num_fused_shared_experts": 0}
    groups, topk_group, topk, shared = (
        n if type(n) is int else check.integer(x, n, low[x]) for x, n in zip(low, sizes, strict=True)
    )
    return groups, topk_group, topk, shared


def _check_valid(call: _Call) -> tuple[Any, Array | None]:
    """Return the number of tokens that are not padding, and the device array that holds this number, or None.

    If the number is in a device array, which only the kernel reads, the first result is the number of all tokens.
    """
    tokens, count = call.logits.shape[0], call.num_token_non_padded
    if count is None:
        return tokens, None
    if not isinstance(count, Array):
        return check_each_call(_valid_tokens, count, tokens), None
    on_device = expect_place("num_token_non_padded", count, call.logits, call.name)
    check.dtype("num_token_non_padded", on_device.dtype, ("int32", "int64"))
    if on_device.shape not in ((), (1,)):
        check.shape("num_token_non_padded", on_device.shape, (1,), "[1]")
    return tokens, on_device


def _select(choices: kernels.Choices, call: _Call, row_stride: Any, groups: int) -> tuple[kernels.Choice, str]:
    """Return the variant, and the reason."""
    logits, bias = call.logits, call.bias
    # The specialized kernels load 16 bytes at a time, so rows must be aligned.
    aligned = min(logits.alignment, 16 if bias is None else bias.alignment) == 16
    if choices.specialized and aligned and (row_stride * logits.item_size % 16 == 0 or logits.shape[0] <= 1):
        if call.variant == "dynamic":
            return choices.dynamic, asked(call.variant)
        chosen, least = choices.specialized[0], 1
        for for_more in choices.specialized[1:]:
            if logits.shape[0] > chosen.max_tokens:
                chosen, least = for_more, chosen.max_tokens + 1
        lanes = {1: "one thread", 32: "one warp"}.get(chosen.lanes, f"{chosen.lanes} lanes")
        most = f"{'to' if least > 1 else 'up to'} {chosen.max_tokens}"
        bounds = [f"from {least}"] * (least > 1) + [most] * (chosen.max_tokens < MAX_TOKENS)
        taken = f" ({' '.join(bounds)} tokens)" if bounds else ""
        return chosen, f"{asked(call.variant, '; ')}{logits.shape[0]} tokens: {lanes} per token{taken}; {choices.why}"
    if call.variant == "specialized":
        check.fail(
            "variant",
            "'auto' or 'dynamic' here",
            f"'specialized': there is none for {logits.shape[1]} experts in {groups} groups with scoring "
            f"{call.scoring} {'without' if bias is None else 'with'} a bias, or the rows are not 16-byte aligned "
            "(cukern.specialize adds one)",
        )
    why = choices.why
    if choices.specialized:
        unaligned = "rows" if bias is None else "rows or the bias"
        why = f"the {unaligned} are not 16-byte aligned ({kernels.PADDED}), as the faster kernel needs ({why})"
    return choices.dynamic, asked(call.variant) or f"dynamic, {choices.dynamic.lanes} lanes per token: {why}"


def _gate(
    call: _Call,
    sizes: tuple[Any, Any, Any, Any],
    scaling: tuple[Any, bool] = (1.0, False),
    *,
    by_two: bool = False,
    softcap: float = 0.0,
    out: Any = None,
    written: dict[str, Any] | None = None,
) -> Any:
    """Check the arguments, choose a variant and launch it.

    `scaling` is a pair: the scaling factor, and whether the weights are multiplied by it. If `by_two`, a group's score
    is the sum of its two largest biased scores, otherwise its largest biased score. `written` maps names to the result
    arrays that the caller passed, if any.
    """
    name, logits, bias = call.name, call.logits, call.bias
    expect_array(name, logits, DTYPES, ("tokens", "experts"))
    tokens, experts = logits.shape
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail(name, f"of 1 to {MAX_EXPERTS} experts", experts)
    if tokens > MAX_TOKENS:
        check.fail(name, f"of at most {MAX_TOKENS} tokens", tokens)
    row_stride = expect_row_stride(name, logits)
    groups, topk_group, topk, shared = sizes = _check_sizes(sizes)
    if bias is not None:
        expect(call.bias_name, bias, logits, name, BIAS_DTYPES, (experts,), "[experts]")
    bias_dtype = None if bias is None else bias.dtype
    check.one_of("scoring_func", call.scoring, SCORING)
    choices = kernels.choose(logits.dtype, experts, sizes, call.scoring, bias_dtype, softcap != 0)
    factor = check.number("routed_scaling_factor", scaling[0])
    if shared and factor == 0:
        check.fail("routed_scaling_factor", "nonzero with fused shared experts", factor)
    check.one_of("variant", call.variant, VARIANTS)
    results = _results(logits, topk)
    if written is None:
        weights, ids = outputs(out, logits, name, *results, names="a pair (weights, ids)")
    else:
        weights, ids = (
            expect(own, array, logits, name, (result.dtype,), result.shape, result.symbols)
            for (own, array), result in zip(written.items(), results, strict=True)
        )
    valid, valid_on_device = _check_valid(call)
    if logits.on_host:
        return run_twin(call.variant, VARIANTS)
    chosen, why = _select(choices, call, row_stride, groups)
    if tokens == 0:
        return weights, ids
    fields = {
        "logits": logits,
        "bias": bias,
        "weights": weights,
        "ids": ids,
        "valid_on_device": valid_on_device,
        "row_stride": row_stride,
        "tokens": tokens,
        "valid": valid,
        "experts": experts,
        "groups": groups,
        "topk_group": topk_group,
        "topk": topk - shared,
        "shared": shared,
        "scoring": kernels.of_template(call.scoring.upper()),
        "group_by_two": by_two,
        "renormalize": call.renormalize,
        "bias_is_float": bias_dtype == "float32",
        "valid_is_int64": valid_on_device is not None and valid_on_device.dtype == "int64",
        "shared_scale": 1 / factor if shared else 0.0,
        "output_scale": factor if scaling[1] else 1.0,
        "softcap": softcap,
    }
    blocks = ceil_div(tokens, chosen.threads // chosen.lanes)
    taken = kernels.fields_of(chosen.variant, fields | {**chosen.fields})
    launch(chosen.variant, blocks, chosen.threads, chosen.shared_bytes, why=why, **taken)
    return weights, ids


def _results(gating_output: Any, topk: Any) -> tuple[Result, Result]:
    shape = (gating_output.shape[0], topk)
    return Result(shape, "float32", "[tokens, topk]"), Result(shape, "int32", "[tokens, topk]")


@op(
    twin.moe_fused_gate,
    "weights, ids",
    lambda input, bias, num_expert_group, topk_group, topk, *_, **__: _results(input, topk),
    numbers=("num_token_non_padded",),
)
def moe_fused_gate(
    input: AnyArray,
    bias: AnyArray,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    renormalize: bool = True,
    scoring_func: str = "sigmoid",
    num_token_non_padded: AnyArray | None = None,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Route tokens to experts with DeepSeek-V3's biased grouped top-k, in one kernel.

    The score of an expert is `scoring_func` of its logit, in float32. Experts are ranked by score + bias, and groups by
    the sum of their two largest values of score + bias. A token goes to the `topk` best experts of its `topk_group`
    best groups, best first. The weights are the scores without the bias; with `renormalize` they are divided by their
    sum. Ties go to the lower group and the lower expert. Experts whose logit or bias is NaN or -inf rank last, in the
    order of their ids, and have weight 0.

    Scores below 2^-126, the smallest normal float32, become 0. If the scores of all chosen experts are 0, the weights
    are 0, even with `renormalize`.

    Fused shared experts occupy the last slots of `topk`, and shared expert j has the id `experts + j`. Before
    renormalization, the weight of a shared expert is the sum of the routed experts' weights, divided by
    routed_scaling_factor.

    Args:
        input: router logits [tokens, experts], float32, float16 or bfloat16, contiguous along experts; at most 1024
            experts.
        bias: correction bias [experts], float32, float16, bfloat16 or float64; used as float32. If its dtype is neither
            float32 nor the dtype of `input`, the kernels are compiled at their first use.
        num_expert_group: groups of neighbouring experts, a divisor of experts; 1 for no groups.
        topk_group: groups whose experts a token may use.
        topk: slots per token, including the slots of shared experts.
        num_fused_shared_experts: slots for shared experts.
        routed_scaling_factor: the model's factor for the output of the routed experts.
        apply_routed_scaling_factor_on_output: multiply the weights by routed_scaling_factor.
        renormalize: divide the weights by the sum of the routed experts' weights.
        scoring_func: "sigmoid", "softmax" or "sqrtsoftplus".
        num_token_non_padded: tokens that are not padding, an int, or an int32 or int64 array of one element on the
            device of `input`. The tokens after them get ids -1 and weights 0.
        out: a pair (weights, ids) to write into and return.
        variant: "auto", "specialized" (sizes fixed at compile time) or "dynamic". All give the same bits.

    Returns:
        weights float32 [tokens, topk] and ids int32 [tokens, topk], in the library and on the device of `input`.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: unsupported shapes, strides, devices or sizes.

    The interface is SGLang's `sgl_kernel.moe_fused_gate`. The method is from the DeepSeek-V3 technical report
    (arXiv:2412.19437, section 2.1.2).
    """
    if bias is None:
        check.fail("bias", "an array [experts]", "None", TypeError)
    call = _Call("input", input, "bias", bias, renormalize, scoring_func, num_token_non_padded, variant)
    sizes = (num_expert_group, topk_group, topk, num_fused_shared_experts)
    scaling = (routed_scaling_factor, apply_routed_scaling_factor_on_output)
    return _gate(call, sizes, scaling, by_two=True, out=out)


def _or_one(number: Any) -> Any:
    return 1 if number is None else number


def _check_hidden_states(hidden_states: Any, gating_output: Any) -> None:
    """Check the number of tokens. The elements of `hidden_states` are not read, so it may be on any device."""
    if hidden_states is None:
        return
    if not hasattr(hidden_states, "shape"):
        hidden_states = arrays.enter("hidden_states", hidden_states)
    wanted = expect_array("gating_output", gating_output, symbols=("tokens", "experts")).shape[0]
    if not hidden_states.shape:
        check.fail("hidden_states", "of shape [tokens, ...]", [])
    given = hidden_states.shape[0]
    if given != wanted:
        check.fail("hidden_states", f"of {wanted} tokens like gating_output", given)


@op(
    twin.biased_grouped_topk,
    "weights, ids",
    lambda hidden_states, gating_output, correction_bias, topk, *_, **__: _results(gating_output, topk),
    leader="gating_output",
    numbers=("num_token_non_padded",),
)
def biased_grouped_topk(
    hidden_states: AnyArray | None,
    gating_output: AnyArray,
    correction_bias: AnyArray,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    scoring_func: str = "sigmoid",
    num_token_non_padded: AnyArray | None = None,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Run `moe_fused_gate` under the name and argument order of the reference function in SGLang's `topk.py`.

    `hidden_states` [tokens, ...] may be None; only its number of tokens is checked. For `num_expert_group`,
    `topk_group` and `routed_scaling_factor`, None means 1. As in SGLang, `apply_routed_scaling_factor_on_output` has an
    effect only with `renormalize`. Other arguments, results and errors are as in `moe_fused_gate`, under other names:
    `gating_output` for `input` and `correction_bias` for `bias`.
    """
    _check_hidden_states(hidden_states, gating_output)
    if correction_bias is None:
        check.fail("correction_bias", "an array [experts]", "None (grouped_topk takes none)", TypeError)
    names = "gating_output", gating_output, "correction_bias", correction_bias
    call = _Call(*names, renormalize, scoring_func, num_token_non_padded, variant)
    sizes = (_or_one(num_expert_group), _or_one(topk_group), topk, num_fused_shared_experts)
    scaling = (_or_one(routed_scaling_factor), renormalize and apply_routed_scaling_factor_on_output)
    return _gate(call, sizes, scaling, by_two=True, out=out)


@op(
    twin.grouped_topk,
    "weights, ids",
    lambda hidden_states, gating_output, topk, *_, **__: _results(gating_output, topk),
    leader="gating_output",
    numbers=("num_token_non_padded",),
)
def grouped_topk(
    hidden_states: AnyArray | None,
    gating_output: AnyArray,
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float | None = None,
    apply_routed_scaling_factor_on_output: bool = False,
    *,
    scoring_func: str = "softmax",
    num_token_non_padded: AnyArray | None = None,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Choose experts by DeepSeek-V2's grouped top-k, without a bias. The score of a group is its best expert's score.

    Groups and experts are ranked by their logits, because different logits may have the same rounded score. Arguments,
    results and errors are as in `biased_grouped_topk`. The interface is SGLang's `grouped_topk`. The method is from the
    DeepSeek-V2 paper (arXiv:2405.04434).
    """
    _check_hidden_states(hidden_states, gating_output)
    names = "gating_output", gating_output, "", None
    call = _Call(*names, renormalize, scoring_func, num_token_non_padded, variant)
    sizes = (_or_one(num_expert_group), _or_one(topk_group), topk, num_fused_shared_experts)
    scaling = (_or_one(routed_scaling_factor), renormalize and apply_routed_scaling_factor_on_output)
    return _gate(call, sizes, scaling, out=out)


def _slots(topk_ids: Any, shared: Any) -> int:
    """Check `topk_ids`, and return the number of slots per token."""
    if len(getattr(topk_ids, "shape", ())) != 2:
        wanted = "an int32 array [tokens, topk]"
        check.fail("topk_ids", wanted, getattr(topk_ids, "shape", type_name(topk_ids)), TypeError)
    slots = topk_ids.shape[1]
    if slots < 1:
        check.fail("topk_ids", "of at least one slot", slots)
    check.integer("num_fused_shared_experts", shared, 0, slots - 1, "the columns of topk_ids but one")
    return slots


@op(twin.topk_softmax, leader="gating_output", numbers=("num_token_non_padded",))
def topk_softmax(
    topk_weights: WrittenArray,
    topk_ids: WrittenArray,
    gating_output: AnyArray,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: AnyArray | None = None,
    *,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = True,
    num_token_non_padded: AnyArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Route tokens by the softmax of their logits (Mixtral, Qwen3, OLMoE, Grok), without groups.

    Args:
        topk_weights: float32 [tokens, topk], written.
        topk_ids: int32 [tokens, topk], written.
        gating_output: router logits [tokens, experts], float32, float16 or bfloat16.
        renormalize: divide the weights by their sum.
        moe_softcapping: cap; if not 0, the softmax is computed from cap * tanh(logits / cap).
        correction_bias: [experts], added to the softmax to choose the experts, but not to the weights.
        num_fused_shared_experts: how many of the last topk slots are for shared experts.
        routed_scaling_factor: the model's factor for the output of the routed experts.
        apply_routed_scaling_factor_on_output: multiply the weights by routed_scaling_factor, with or without
            `renormalize`. The default is True, as in vLLM's `topk_sigmoid` and unlike `moe_fused_gate`.

    Returns (topk_weights, topk_ids). The other arguments, shared experts, ties, NaN and the errors are as in
    `moe_fused_gate`. The interface is SGLang's `sgl_kernel.topk_softmax`.
    """
    names = "gating_output", gating_output, "correction_bias", correction_bias
    call = _Call(*names, renormalize, "softmax", num_token_non_padded, variant)
    written = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    sizes = (1, 1, _slots(topk_ids, num_fused_shared_experts), num_fused_shared_experts)
    scaling = (routed_scaling_factor, apply_routed_scaling_factor_on_output)
    _gate(call, sizes, scaling, softcap=check.number("moe_softcapping", moe_softcapping), written=written)
    return topk_weights, topk_ids


@op(twin.topk_sigmoid, leader="gating_output", numbers=("num_token_non_padded",))
def topk_sigmoid(
    topk_weights: WrittenArray,
    topk_ids: WrittenArray,
    gating_output: AnyArray,
    renormalize: bool = False,
    correction_bias: AnyArray | None = None,
    *,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    apply_routed_scaling_factor_on_output: bool = True,
    num_token_non_padded: AnyArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Route tokens by the sigmoid of their logits, without groups (Llama-4; with a bias GLM-4.5 and Kimi-K2).

    Arguments, results and errors are as in `topk_softmax`. The interface is SGLang's `sgl_kernel.topk_sigmoid`. The
    weights are scaled as in vLLM's operator of the same name.
    """
    names = "gating_output", gating_output, "correction_bias", correction_bias
    call = _Call(*names, renormalize, "sigmoid", num_token_non_padded, variant)
    written = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    sizes = (1, 1, _slots(topk_ids, num_fused_shared_experts), num_fused_shared_experts)
    _gate(call, sizes, (routed_scaling_factor, apply_routed_scaling_factor_on_output), written=written)
    return topk_weights, topk_ids
