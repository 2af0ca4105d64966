"""MoE gates: which experts each token goes to, and with what weights."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from cukern.reference import moe_gate as twin
from cukern.runtime import arrays, check
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import Kernel, Variant

__all__ = ["biased_grouped_topk", "grouped_topk", "moe_fused_gate", "topk_sigmoid", "topk_softmax"]

DTYPES = ("float32", "float16", "bfloat16")
SCORING = ("sigmoid", "softmax", "sqrtsoftplus")
VARIANTS = ("auto", "specialized", "dynamic")
#: A lane keeps one bit for each of its experts in a 32-bit word.
MAX_EXPERTS = 1024
_WARPS = 4  # WARPS, CAPACITY and the enum Scoring of the template
_CAPACITY = 64
_SCORING_CODE = {"any": 0, "sigmoid": 1, "softmax": 2, "sqrtsoftplus": 3}
# What every GPU from sm_80 on grants a block; the largest sizes the dynamic variant takes need nearly all.
_MAX_SHARED_BYTES = 99 * 1024
_DYNAMIC_LANES = 32


class Config(NamedTuple):
    """Sizes worth a variant of their own. With a bias the scoring decides the order, so it is fixed too."""

    experts: int
    groups: int
    scoring: str  # "any" where there is no bias: the logits order the experts
    biased: bool
    lanes: int = 16


SPECIALIZED = [
    Config(256, 8, "sigmoid", biased=True),  # DeepSeek-V3, DeepSeek-R1, Ling
    Config(256, 16, "sigmoid", biased=True),  # the other three of SGLang's moe_fused_gate
    Config(128, 4, "sigmoid", biased=True),
    Config(128, 8, "sigmoid", biased=True),
    Config(384, 1, "sigmoid", biased=True),  # Kimi-K2
    Config(256, 1, "sigmoid", biased=True),  # MiniMax-M2
    Config(160, 1, "sigmoid", biased=True),  # GLM-4.5
    Config(128, 1, "sigmoid", biased=True),  # GLM-4.5-Air
    Config(512, 1, "any", biased=False),  # Qwen3-Next
    Config(256, 1, "any", biased=False),
    Config(128, 1, "any", biased=False),  # Qwen3-30B-A3B, Qwen3-235B-A22B, Llama-4-Maverick
    Config(64, 1, "any", biased=False),  # OLMoE
    Config(8, 1, "any", biased=False, lanes=8),  # Mixtral
]

_kernel = Kernel("moe_gate", "moe_gate", "5P3q12i3f")


def _variant(dtype: str, config: Config) -> Variant:
    return _kernel.variant(
        arrays.CUDA_TYPE[dtype],
        config.experts,
        config.groups,
        config.scoring.upper(),
        config.lanes,
        "true" if config.biased else "false",
    )


def _dynamic(dtype: str) -> Variant:
    arguments = (arrays.CUDA_TYPE[dtype], 0, 0, "ANY", _DYNAMIC_LANES, "false")
    return _kernel.variant(*arguments, max_shared_bytes=_MAX_SHARED_BYTES)


_kernel.specialized = [_variant(dtype, config).instance for config in SPECIALIZED for dtype in DTYPES]
_kernel.at_import = [_dynamic(dtype).instance for dtype in DTYPES] + _kernel.specialized

_registered = {config[:4]: config for config in SPECIALIZED}


def specialize(*, experts: int, groups: int = 1, scoring_func: str = "sigmoid", biased: bool = True) -> list[Instance]:
    """Give these sizes a variant of their own in this process and say which; see `cukern.specialize`.

    Raises ValueError where the specialized kernel cannot lay the experts out: groups must be a power of two up to
    32, and experts a multiple of it and at most 32 per lane.
    """
    check.integer("experts", experts, 1, MAX_EXPERTS)
    check.integer("groups", groups, 1, experts)
    check.one_of("scoring_func", scoring_func, SCORING)
    for lanes in (16, 32, 8, 4, 2, 1):
        if experts % lanes == 0 and lanes % groups == 0 and experts // lanes <= 32:
            config = Config(experts, groups, scoring_func if biased else "any", biased, lanes)
            break
    else:
        check.fail(
            "experts and groups",
            "sizes where a group is whole lanes of at most 32 experts (the dynamic variant takes all others)",
            f"{experts} experts in {groups} groups",
        )
    config = _registered.setdefault(config[:4], config)
    _plan.cache_clear()
    return [_variant(dtype, config).instance for dtype in DTYPES]


class _Plan(NamedTuple):
    """What the scalar arguments decide, worked out once for each set of them."""

    routed: int
    dynamic: Variant
    dynamic_shared_bytes: int
    capacity: int
    lanes_per_group: int
    specialized: Variant | None
    specialized_lanes: int
    specialized_shared_bytes: int


def _shared_bytes(lanes: int, capacity: int, topk: int, choices: int = 0) -> int:
    words = capacity + (topk + 1) // 2 + (choices + 1) // 2
    return words * 8 * _WARPS * (32 // lanes)


@functools.lru_cache(maxsize=1024)
def _plan(
    dtype: str,
    experts: int,
    groups: int,
    topk_group: int,
    topk: int,
    shared: int,
    scoring: str,
    biased: bool,
    softcap: bool,
) -> _Plan:
    """Check the scalar arguments against each other and choose the variants for them."""
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("the number of experts", f"in [1, {MAX_EXPERTS}]", experts)
    check.one_of("scoring_func", scoring, SCORING)
    check.integer("num_expert_group", groups, 1, experts)
    if experts % groups:
        check.fail("num_expert_group", f"a divisor of the {experts} experts", groups)
    check.integer("topk_group", topk_group, 1, groups, "num_expert_group")
    check.integer("num_fused_shared_experts", shared, 0)
    group_size = experts // groups
    reachable = topk_group * group_size
    check.integer("topk", topk, 1 + shared, reachable + shared, "the experts of the kept groups, plus shared ones")

    routed = topk - shared
    capacity = max(_CAPACITY, routed)
    lanes_per_group = 1
    while group_size % (2 * lanes_per_group) == 0 and 2 * lanes_per_group * groups <= _DYNAMIC_LANES:
        lanes_per_group *= 2
    choices = -(-experts // _DYNAMIC_LANES) * _DYNAMIC_LANES + 2 * groups
    config = _registered.get((experts, groups, scoring if biased else "any", biased))
    if config is None or softcap or routed > _CAPACITY:
        specialized, lanes = None, 1
    else:
        specialized, lanes = _variant(dtype, config), config.lanes
    return _Plan(
        routed,
        _dynamic(dtype),
        _shared_bytes(_DYNAMIC_LANES, capacity, routed, choices),
        capacity,
        lanes_per_group,
        specialized,
        lanes,
        _shared_bytes(lanes, _CAPACITY, routed),
    )


def _gate(
    name: str,
    logits: Any,
    bias_name: str,
    bias: Any,
    groups: int,
    topk_group: int,
    topk: int,
    shared: int,
    routed_scaling_factor: float,
    scale_output: bool,
    renormalize: bool,
    scoring: str,
    group_by_two: bool,
    num_token_non_padded: Any,
    out: tuple[Any, Any] | None,
    variant: str,
    softcap: float = 0.0,
) -> tuple[Any, Any]:
    """All five gates: check, choose a variant, launch."""
    library = arrays.library_of(logits)
    if library is None:
        if out is not None:
            check.fail("out", f"None where {name} enters through DLPack", "a pair")
        results = _gate(
            name,
            arrays.enter(name, logits),
            bias_name,
            None if bias is None else arrays.enter(bias_name, bias),
            groups,
            topk_group,
            topk,
            shared,
            routed_scaling_factor,
            scale_output,
            renormalize,
            scoring,
            group_by_two,
            arrays.enter("num_token_non_padded", num_token_non_padded)
            if hasattr(num_token_non_padded, "__dlpack__")
            else num_token_non_padded,
            None,
            variant,
            softcap,
        )
        return arrays.leave(results[0], logits), arrays.leave(results[1], logits)
    dtype = library.dtype(logits)
    if dtype not in DTYPES:
        check.dtype(name, dtype, DTYPES)
    if len(logits.shape) != 2:
        check.dimensions(name, tuple(logits.shape), ("tokens", "experts"))
    tokens, experts = logits.shape
    row_stride, stride = library.strides(logits)
    if stride != 1 and experts > 1:
        check.fail(name, "contiguous along its last dimension", f"strides {row_stride, stride} (in elements)")
    if not (type(groups) is type(topk_group) is type(topk) is type(shared) is int):
        groups = check.integer("num_expert_group", groups, 1)
        topk_group = check.integer("topk_group", topk_group, 1)
        topk = check.integer("topk", topk, 1)
        shared = check.integer("num_fused_shared_experts", shared, 0)
    plan = _plan(dtype, experts, groups, topk_group, topk, shared, scoring, bias is not None, softcap != 0)
    scaling = check.number("routed_scaling_factor", routed_scaling_factor)
    if shared and scaling == 0:
        check.fail("routed_scaling_factor", "nonzero with fused shared experts", scaling)
    if variant not in VARIANTS:
        check.one_of("variant", variant, VARIANTS)

    device = library.device(logits)
    bias_is_float = False
    if bias is not None:
        arrays.same_place(bias_name, bias, name, library, device)
        bias_dtype = library.dtype(bias)
        if bias_dtype != "float32" and bias_dtype != dtype:
            check.dtype(bias_name, bias_dtype, dict.fromkeys(("float32", dtype)))
        if tuple(bias.shape) != (experts,):
            check.shape(bias_name, bias.shape, (experts,), "[experts]")
        if library.strides(bias) != (1,) and experts > 1:
            check.fail(bias_name, "contiguous", f"strides {library.strides(bias)} (in elements)")
        bias_is_float = bias_dtype == "float32"
    if out is None:
        weights = ids = None
    else:
        weights, ids = _check_out(out, (tokens, topk), name, library, device)

    valid, valid_address, valid_is_int64 = tokens, 0, False
    if num_token_non_padded is not None:
        if hasattr(num_token_non_padded, "shape"):
            arrays.same_place("num_token_non_padded", num_token_non_padded, name, library, device)
            valid_dtype = library.dtype(num_token_non_padded)
            check.dtype("num_token_non_padded", valid_dtype, ("int32", "int64"))
            if tuple(num_token_non_padded.shape) not in ((), (1,)):
                check.shape("num_token_non_padded", num_token_non_padded.shape, (1,), "[1]")
            valid_is_int64 = valid_dtype == "int64"
            if device is not None:
                valid_address = library.address(num_token_non_padded)
        else:
            valid = check.integer("num_token_non_padded", num_token_non_padded, 0, tokens, "tokens")

    if device is None:
        if variant != "auto":
            check.fail("variant", "'auto' for arrays in host memory, where the NumPy twin runs", repr(variant))
        results = twin.gate(
            library.to_numpy(logits),
            None if bias is None else library.to_numpy(bias),
            groups,
            topk_group,
            topk,
            shared,
            scaling,
            scale_output,
            renormalize,
            scoring,
            group_by_two,
            library.to_numpy(num_token_non_padded) if hasattr(num_token_non_padded, "shape") else num_token_non_padded,
            None if out is None else (library.to_numpy(weights), library.to_numpy(ids)),
            softcap,
        )
        if out is not None:
            return weights, ids
        return library.from_numpy(results[0], logits), library.from_numpy(results[1], logits)

    address = library.address(logits)
    bias_address = library.address(bias) if bias is not None else 0
    chosen = plan.specialized
    if chosen is not None and (
        (address | bias_address) % 16 or (tokens > 1 and row_stride * arrays.ITEM_SIZE[dtype] % 16)
    ):
        # Wide loads need aligned rows.
        chosen = None
    if variant != "auto":
        if variant == "dynamic":
            chosen = None
        elif chosen is None:
            check.fail(
                "variant",
                "'auto' or 'dynamic' here",
                f"'specialized': there is none for {experts} experts in {groups} groups with scoring {scoring} "
                f"{'with' if bias is not None else 'without'} a bias, or the rows are not 16-byte aligned "
                "(cukern.specialize adds one)",
            )
    if weights is None:
        weights = library.empty((tokens, topk), "float32", logits)
        ids = library.empty((tokens, topk), "int32", logits)
    if tokens == 0:
        return weights, ids
    if chosen is None:
        chosen, lanes, shared_bytes = plan.dynamic, _DYNAMIC_LANES, plan.dynamic_shared_bytes
    else:
        lanes, shared_bytes = plan.specialized_lanes, plan.specialized_shared_bytes
    tokens_per_block = _WARPS * 32 // lanes
    chosen.launch(
        device,
        library.stream(device),
        (-(-tokens // tokens_per_block), 1, 1),
        (_WARPS * 32, 1, 1),
        shared_bytes,
        address,
        bias_address,
        library.address(weights),
        library.address(ids),
        valid_address,
        row_stride,
        tokens,
        valid,
        experts,
        groups,
        topk_group,
        plan.routed,
        shared,
        _SCORING_CODE[scoring],
        group_by_two,
        renormalize,
        bias_is_float,
        valid_is_int64,
        plan.capacity,
        plan.lanes_per_group,
        1 / scaling if shared else 0.0,
        scaling if scale_output else 1.0,
        softcap,
    )
    return weights, ids


def _check_out(
    out: tuple[Any, Any], shape: tuple[int, int], name: str, library: arrays.Library, device: int | None
) -> tuple[Any, Any]:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        check.fail("out", "a pair (weights, ids)", type(out).__name__, TypeError)
    for part, array, dtype in (("out[0]", out[0], "float32"), ("out[1]", out[1], "int32")):
        arrays.same_place(part, array, name, library, device)
        check.dtype(part, library.dtype(array), (dtype,))
        check.shape(part, tuple(array.shape), shape, "[tokens, topk]")
        if 0 not in shape and library.strides(array) != (shape[1], 1) and shape != (1, 1):
            check.fail(part, "contiguous", f"strides {library.strides(array)} (in elements)")
    return out[0], out[1]


def moe_fused_gate(
    input: Any,
    bias: Any,
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
    out: tuple[Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """Route tokens to experts with DeepSeek-V3's biased grouped top-k, in one kernel.

    The scores are `scoring_func` of the logits, in float32 whatever the input. The choice is score + bias. A
    group's score is the sum of its two best choices (of its one, if it has one). Of the experts of the
    `topk_group` best groups, the best choices are routed to, best first. Their weights are the scores without
    the bias, divided by their sum if `renormalize`. Ties go to the lower group and the lower expert. An expert
    whose logit is NaN or -inf, or whose bias is, ranks last and weighs 0; a row of them gets the lowest ids.

    Fused shared experts take the last slots of `topk`, with ids `experts + j` and, before the division, the
    weight sum(routed) / routed_scaling_factor.

    Args:
        input: router logits [tokens, experts], float32, float16 or bfloat16, contiguous along experts; rows may be
            strided. At most 1024 experts.
        bias: correction bias [experts], float32 or the dtype of `input`.
        num_expert_group: groups of neighbouring experts; divides experts. 1 for no groups.
        topk_group: groups kept per token.
        topk: slots per token, shared experts included.
        num_fused_shared_experts: how many of the slots are shared experts.
        routed_scaling_factor: the model's scaling of the routed experts' output.
        apply_routed_scaling_factor_on_output: multiply the weights by it.
        renormalize: divide the weights by the sum of the routed ones.
        scoring_func: "sigmoid", "softmax" or "sqrtsoftplus".
        num_token_non_padded: rows from this one on are padding: ids -1, weights 0. An int, or one int32 or int64
            on the device of `input`, read by the kernel.
        out: a pair (weights, ids) to write into and return.
        variant: "auto", or a kernel by name: "specialized" (sizes fixed at compile time) or "dynamic". Both return
            the same bits.

    Returns:
        weights float32 [tokens, topk] and ids int32 [tokens, topk], in the library and on the device of `input`.
        Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are SGLang's `sgl_kernel.moe_fused_gate`; the method is that of the
    DeepSeek-V3 technical report (arXiv:2412.19437, section 2.1.2).
    """
    if bias is None:
        check.fail("bias", "an array [experts]", "None", TypeError)
    return _gate(
        "input",
        input,
        "bias",
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
        out,
        variant,
    )


def _check_hidden_states(hidden_states: Any, gating_output: Any) -> None:
    if hidden_states is not None and hidden_states.shape[0] != gating_output.shape[0]:
        check.fail("hidden_states", f"of {gating_output.shape[0]} tokens like gating_output", hidden_states.shape[0])


def biased_grouped_topk(
    hidden_states: Any,
    gating_output: Any,
    correction_bias: Any,
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
    out: tuple[Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """`moe_fused_gate` under the name and argument order of the reference function in SGLang's `topk.py`.

    `hidden_states` [tokens, ...] only has its number of tokens checked, and may be None; no groups means one, no
    scaling factor 1. The rest, and what is returned and raised, is as in `moe_fused_gate` with `gating_output` for
    `input` and `correction_bias` for `bias`.
    """
    _check_hidden_states(hidden_states, gating_output)
    if correction_bias is None:
        check.fail("correction_bias", "an array [experts]", "None (grouped_topk takes none)", TypeError)
    return _gate(
        "gating_output",
        gating_output,
        "correction_bias",
        correction_bias,
        1 if num_expert_group is None else num_expert_group,
        1 if topk_group is None else topk_group,
        topk,
        num_fused_shared_experts,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        renormalize,
        scoring_func,
        True,
        num_token_non_padded,
        out,
        variant,
    )


def grouped_topk(
    hidden_states: Any,
    gating_output: Any,
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
    out: tuple[Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """Grouped top-k without a bias, as DeepSeek-V2's: a group's score is its best expert's.

    The logits themselves order groups and experts, which every scoring function preserves, so experts that only
    rounding would tie stay in order. Arguments, results and errors are as in `biased_grouped_topk` (SGLang's
    `grouped_topk`); the method is that of the DeepSeek-V2 paper (arXiv:2405.04434).
    """
    _check_hidden_states(hidden_states, gating_output)
    return _gate(
        "gating_output",
        gating_output,
        "",
        None,
        1 if num_expert_group is None else num_expert_group,
        1 if topk_group is None else topk_group,
        topk,
        num_fused_shared_experts,
        1.0 if routed_scaling_factor is None else routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
        renormalize,
        scoring_func,
        False,
        num_token_non_padded,
        out,
        variant,
    )


def _slots(topk_ids: Any) -> int:
    if len(getattr(topk_ids, "shape", ())) != 2:
        wanted = "an int32 array [tokens, topk]"
        check.fail("topk_ids", wanted, getattr(topk_ids, "shape", type(topk_ids).__name__), TypeError)
    return topk_ids.shape[1]


def topk_softmax(
    topk_weights: Any,
    topk_ids: Any,
    gating_output: Any,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: Any = None,
    *,
    num_token_non_padded: Any = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """Route tokens by the softmax of their logits (Mixtral, Qwen3, OLMoE, Grok), without groups.

    Args:
        topk_weights: float32 [tokens, topk], written.
        topk_ids: int32 [tokens, topk], written; its width is the number of experts per token.
        gating_output: router logits [tokens, experts], float32, float16 or bfloat16.
        renormalize: divide the weights by their sum.
        moe_softcapping: if not 0, the softmax is of cap * tanh(logits / cap).
        correction_bias: [experts], added to the softmax for the choice but not for the weights.

    Returns (topk_weights, topk_ids). The other arguments, ties, NaN and the errors are as in `moe_fused_gate`;
    without a bias the logits themselves order the experts. The function is SGLang's `sgl_kernel.topk_softmax`.
    """
    return _gate(
        "gating_output",
        gating_output,
        "correction_bias",
        correction_bias,
        1,
        1,
        _slots(topk_ids),
        0,
        1.0,
        False,
        renormalize,
        "softmax",
        False,
        num_token_non_padded,
        (topk_weights, topk_ids),
        variant,
        check.number("moe_softcapping", moe_softcapping),
    )


def topk_sigmoid(
    topk_weights: Any,
    topk_ids: Any,
    gating_output: Any,
    renormalize: bool = False,
    correction_bias: Any = None,
    *,
    num_token_non_padded: Any = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """Route tokens by the sigmoid of their logits (Llama-4; with a bias GLM-4.5 and Kimi-K2), without groups.

    Arguments, results and errors are those of `topk_softmax`. The function is SGLang's `sgl_kernel.topk_sigmoid`.
    """
    return _gate(
        "gating_output",
        gating_output,
        "correction_bias",
        correction_bias,
        1,
        1,
        _slots(topk_ids),
        0,
        1.0,
        False,
        renormalize,
        "sigmoid",
        False,
        num_token_non_padded,
        (topk_weights, topk_ids),
        variant,
    )
