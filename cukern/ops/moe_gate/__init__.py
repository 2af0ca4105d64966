"""The MoE gates: the experts of each token, and their weights."""

from __future__ import annotations

from typing import Any

from cukern.ops.moe_gate import choose as kernels
from cukern.ops.moe_gate.choose import DTYPES, MAX_EXPERTS, SCORING, Sizes
from cukern.ops.moe_gate.launch import AXES, DECISIONS, gate
from cukern.runtime import check
from cukern.runtime.arrays import KNOWN, AnyArray, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Result
from cukern.runtime.op import operator
from cukern.runtime.view import read

__all__ = ["biased_grouped_topk", "grouped_topk", "moe_fused_gate", "topk_sigmoid", "topk_softmax"]


def specialize(*, experts: int, groups: int = 1, scoring_func: str = "sigmoid", biased: bool = True) -> list[Instance]:
    """Give these sizes variants of their own in this process and say which; see `cukern.specialize`.

    Raises ValueError where the specialized kernel cannot lay the experts out: there must be a number of lanes (4, 8, 16
    or 32) that is a multiple of groups, divides experts, and is at least experts / 32.
    """
    check.integer("experts", experts, 1, MAX_EXPERTS)
    check.integer("groups", groups, 1, experts)
    check.one_of("scoring_func", scoring_func, SCORING)
    sizes = Sizes(experts, groups, scoring_func if biased else "any", bool(biased))
    if not kernels.lanes_of(sizes):
        check.fail(
            "experts and groups",
            "sizes where a group is whole lanes of at most 32 experts (the dynamic variant takes all others)",
            f"{experts} experts in {groups} groups",
        )
    kernels.registered.add(sizes)
    kernels.choose.cache_clear()
    DECISIONS.clear()
    return kernels.variants_of(sizes)


#: Other defaults of `cukern.specialize` for the functions that take no bias by default.
DEFAULTS: dict[str, dict[str, Any]] = {
    "topk_softmax": {"scoring_func": "softmax", "biased": False},
    "grouped_topk": {"scoring_func": "softmax", "biased": False},
    "topk_sigmoid": {"biased": False},
}


def _results(gating_output: Any, topk: Any) -> tuple[Result, Result]:
    shape = (gating_output.shape[0], topk)
    return Result(shape, "float32", "[tokens, topk]"), Result(shape, "int32", "[tokens, topk]")


@operator(
    "weights, ids",
    lambda input, bias, num_expert_group, topk_group, topk, *_, **__: _results(input, topk),
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

    The scores are `scoring_func` of the logits, in float32 whatever the dtype. The choice is score + bias. A group's
    score is the sum of its two best choices (of its only one, if it has one expert). Each token goes to the experts of
    its `topk_group` best groups with the best choices, best first. Their weights are the scores without the bias,
    divided by their sum if `renormalize`. Ties go to the lower group and the lower expert. An expert whose logit or
    bias is NaN or -inf ranks last and has weight 0; a row of such experts gets the lowest ids.

    A score below float32's normal numbers (2^-126: the sigmoid of a logit below -87.3) is 0. Where all scores of the
    chosen experts are 0, the weights are 0, renormalized or not. vLLM and DeepSeek's own code divide by sum + 1e-20:
    they come to 0 there too, and to half of a weight at a logit of -46. SGLang's kernel divides 0 by 0, and returns
    NaN.

    Fused shared experts take the last slots of `topk`, with ids `experts + j` and, before the division, the
    weight sum(routed) / routed_scaling_factor.

    Args:
        input: router logits [tokens, experts], float32, float16 or bfloat16, contiguous along experts; rows may be
            strided. At most 1024 experts.
        bias: correction bias [experts], float32, float16, bfloat16 or float64; used as float32. The kernels of one that
            is neither float32 nor of the dtype of `input` are compiled at their first use.
        num_expert_group: groups of neighbouring experts; divides experts. 1 for no groups.
        topk_group: groups kept per token.
        topk: slots per token, shared experts included.
        num_fused_shared_experts: slots of shared experts.
        routed_scaling_factor: the model's scaling of the routed experts' output.
        apply_routed_scaling_factor_on_output: multiply the weights by it.
        renormalize: divide the weights by the sum of the routed ones.
        scoring_func: "sigmoid", "softmax" or "sqrtsoftplus".
        num_token_non_padded: the number of tokens that are not padding; those after them get ids -1 and weights 0. An
            int, or an array of one int32 or int64 on the device of `input`, which the kernel reads.
        out: a pair (weights, ids) to write into and return.
        variant: "auto", or a kernel by name: "specialized" (sizes fixed at compile time) or "dynamic". Both return
            the same bits.

    Returns:
        weights float32 [tokens, topk] and ids int32 [tokens, topk], in the library and on the device of `input`.
        Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are SGLang's `sgl_kernel.moe_fused_gate`; the method is that of the
    DeepSeek-V3 technical report (arXiv:2412.19437, section 2.1.2).
    """
    if bias is None:
        check.fail("bias", "an array [experts]", "None", TypeError)
    return gate(
        input, "input", bias, "bias",
        (num_expert_group, topk_group, topk, num_fused_shared_experts),
        routed_scaling_factor, apply_routed_scaling_factor_on_output, renormalize, scoring_func, num_token_non_padded,
        variant, out, by_two=True,
    )  # fmt: skip


def _or_one(number: Any) -> Any:
    return 1 if number is None else number


def _expect_tokens(hidden_states: Any, gating_output: Any) -> None:
    """Raise ValueError for hidden states of another number of tokens. These are not read: they may be on any device."""
    is_trained = getattr(hidden_states, "requires_grad", False)
    if not is_trained and KNOWN.get(type(hidden_states)) and KNOWN.get(type(gating_output)):
        given, wanted = hidden_states.shape, gating_output.shape
        if given and wanted and given[0] == wanted[0]:
            return
    x = read("gating_output", gating_output, DTYPES, AXES)
    shape = read("hidden_states", hidden_states).shape
    if not shape:
        check.fail("hidden_states", "of shape [tokens, ...]", [])
    if shape[0] != x.shape[0]:
        check.fail("hidden_states", f"of {x.shape[0]} tokens like gating_output", shape[0])


@operator(
    "weights, ids",
    lambda hidden_states, gating_output, correction_bias, topk, *_, **__: _results(gating_output, topk),
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
    """`moe_fused_gate` under the name and argument order of the reference function in SGLang's `topk.py`.

    Of `hidden_states` [tokens, ...], which may be None, only the number of tokens is checked. Without
    `num_expert_group` and `topk_group` there is one group; without `routed_scaling_factor` it is 1. As there,
    `apply_routed_scaling_factor_on_output` does nothing without `renormalize`. Unlike there, where one of several
    shared experts is drawn for the last slot, each has a slot. Other arguments, results and errors are those of
    `moe_fused_gate`, with `gating_output` for `input` and `correction_bias` for `bias`.
    """
    if hidden_states is not None:
        _expect_tokens(hidden_states, gating_output)
    if correction_bias is None:
        check.fail("correction_bias", "an array [experts]", "None (grouped_topk takes none)", TypeError)
    return gate(
        gating_output, "gating_output", correction_bias, "correction_bias",
        (_or_one(num_expert_group), _or_one(topk_group), topk, num_fused_shared_experts),
        1.0 if routed_scaling_factor is None else routed_scaling_factor, apply_routed_scaling_factor_on_output,
        renormalize, scoring_func, num_token_non_padded, variant, out, by_two=True, scales_sums_alone=True,
    )  # fmt: skip


@operator(
    "weights, ids",
    lambda hidden_states, gating_output, topk, *_, **__: _results(gating_output, topk),
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
    """Grouped top-k without a bias, as DeepSeek-V2's: a group's score is its best expert's.

    Groups and experts are ordered by their logits. Every scoring function preserves that order, but its rounding would
    make ties. Arguments, results and errors are those of `biased_grouped_topk` (SGLang's `grouped_topk`); the method is
    that of the DeepSeek-V2 paper (arXiv:2405.04434).
    """
    if hidden_states is not None:
        _expect_tokens(hidden_states, gating_output)
    return gate(
        gating_output, "gating_output", None, "",
        (_or_one(num_expert_group), _or_one(topk_group), topk, num_fused_shared_experts),
        1.0 if routed_scaling_factor is None else routed_scaling_factor, apply_routed_scaling_factor_on_output,
        renormalize, scoring_func, num_token_non_padded, variant, out, scales_sums_alone=True,
    )  # fmt: skip


@operator()
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
        moe_softcapping: a cap; if not 0, the softmax is of cap * tanh(logits / cap).
        correction_bias: [experts], added to the softmax for the choice but not for the weights.
        num_fused_shared_experts: the number of the last topk slots, which hold shared experts.
        routed_scaling_factor: the model's scaling of the routed experts' output.
        apply_routed_scaling_factor_on_output: multiply the weights by it, whether they are renormalized or not; unlike
            in `moe_fused_gate` it is on unless turned off, so that a factor acts as in vLLM's `topk_sigmoid`.

    Returns (topk_weights, topk_ids). The other arguments, shared experts, ties, NaN and the errors are as in
    `moe_fused_gate`; without a bias the logits themselves order the experts. The function is SGLang's
    `sgl_kernel.topk_softmax`.
    """
    gate(
        gating_output, "gating_output", correction_bias, "correction_bias",
        (1, 1, None, num_fused_shared_experts), routed_scaling_factor, apply_routed_scaling_factor_on_output,
        renormalize, "softmax", num_token_non_padded, variant, written=(topk_weights, topk_ids),
        softcap=moe_softcapping,
    )  # fmt: skip
    return topk_weights, topk_ids


@operator()
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
    """Route tokens by the sigmoid of their logits (Llama-4; with a bias GLM-4.5 and Kimi-K2), without groups.

    Arguments, results and errors are those of `topk_softmax`. The function is SGLang's `sgl_kernel.topk_sigmoid`, with
    the scaling of vLLM's operator of this name.
    """
    gate(
        gating_output, "gating_output", correction_bias, "correction_bias",
        (1, 1, None, num_fused_shared_experts), routed_scaling_factor, apply_routed_scaling_factor_on_output,
        renormalize, "sigmoid", num_token_non_padded, variant, written=(topk_weights, topk_ids),
    )  # fmt: skip
    return topk_weights, topk_ids
