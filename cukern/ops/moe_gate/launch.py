"""A call of a gate: its checks, its results, and its launch."""

from __future__ import annotations

from typing import Any

from cukern.ops.moe_gate.choose import (
    BIAS_DTYPES,
    DTYPES,
    MAX_EXPERTS,
    MAX_TOKENS,
    SCORING,
    VARIANTS,
    Config,
    choose,
    token_class,
)  # fmt: skip
from cukern.reference import moe_gate as twin
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import ITEM_SIZE, Library, View
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.view import out_of, read, read_like, row_stride, view_of

_FLOAT32, _INT32 = ("float32",), ("int32",)
AXES = ("tokens", "experts")
#: The sizes of a gate, with their least values.
_SIZES = {"num_expert_group": 1, "topk_group": 1, "topk": 1, "num_fused_shared_experts": 0}
#: What earlier calls chose, by the alignment, the token class, and whether a call has several tokens.
DECISIONS = Decisions((0,), (0,), (0,), (), ())


def gate(
    x: Any, name: str, bias: Any, bias_name: str, sizes: tuple[Any, Any, Any, Any], factor: Any, scales: Any,
    renormalize: Any, scoring: Any, num_token_non_padded: Any, variant: Any, out: Any = None, *,
    written: tuple[Any, Any] | None = None, by_two: bool = False, scales_sums_alone: bool = False, softcap: Any = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """Launch the kernel that an alike call has chosen, or check and choose; the weights and the ids.

    `name` and `bias_name` are what messages call the logits `x` and the bias. `sizes` are the groups, how many groups
    are kept, the slots (None: as many as topk_ids has) and how many slots are for shared experts. `scales`: the scaling
    factor multiplies the weights, or with `scales_sums_alone` only renormalized ones. `written` are topk_weights and
    topk_ids, where there is no `out`. `by_two`: a group's score is the sum of its two best choices.
    """
    weights, ids = written or out_of(out, 2, "a pair (weights, ids)")
    valid, counter = num_token_non_padded, None
    if type(valid) is not int:
        valid, counter = None, valid
    arrays = x, weights, ids, bias, counter
    facts = *sizes, factor, scales, renormalize, scoring, variant, by_two, scales_sums_alone, softcap
    decision = DECISIONS.find(facts, arrays)
    if decision is not None:
        library, tokens = decision.library, x.shape[0]
        address, bias_address = library.address(x), 0 if bias is None else library.address(bias)
        # The stride of one row does not matter.
        of_call = (address | bias_address) % 16, token_class(tokens), tokens > 1
        config = decision.choices.get(of_call)
        if (
            config is not None
            and (weights is None or weights.shape[0] == tokens)
            and (ids is None or ids.shape[0] == tokens)
            and (valid is None or 0 <= valid <= tokens)
        ):
            counter = 0 if counter is None else library.address(counter)
            of_logits = address, decision.own, tokens, tokens if valid is None else valid
            return launch(config, library, decision.device, of_logits, bias_address, counter, weights, ids)
    return _decide(decision, facts, arrays, valid, name, bias_name, written is not None)


def _decide(
    decision: Decision | None, facts: tuple[Any, ...], arrays: tuple[Any, ...], valid: int | None, name: str,
    bias_name: str, is_written: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Check a call, choose its kernel, keep the choice, launch. `decision` may lack a choice for this call."""
    groups, topk_group, topk, shared, factor, scales, renormalize, scoring, variant, by_two, sums_alone, softcap = facts
    given, weights, ids, bias, counter = arrays
    x = read(name, given, DTYPES, AXES)
    _, library, alignment, dtype, (tokens, experts), (stride, between), device, foreign = x
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail(name, f"of 1 to {MAX_EXPERTS} experts", experts)
    if tokens > MAX_TOKENS:
        check.fail(name, f"of at most {MAX_TOKENS} tokens", tokens)
    if between != 1:
        row_stride(name, x)
    if is_written:
        ids = _view_of_ids(ids, shared)
        topk = ids.shape[1]
    sizes = zip(_SIZES.items(), (groups, topk_group, topk, shared), strict=True)
    groups, topk_group, topk, shared = (n if type(n) is int else check.integer(own, n, low) for (own, low), n in sizes)
    renormalize = check.flag("renormalize", renormalize)
    scales = check.flag("apply_routed_scaling_factor_on_output", scales) and (renormalize or not sums_alone)
    scoring = str(check.one_of("scoring_func", scoring, SCORING))
    variant = str(check.one_of("variant", variant, VARIANTS))
    factor, softcap = check.number("routed_scaling_factor", factor), check.number("moe_softcapping", softcap)
    bias_dtype = count_dtype = None
    if bias is not None:
        bias = read_like(bias_name, bias, x, name, BIAS_DTYPES, (experts,), "[experts]")
        alignment, bias_dtype = alignment | bias.address, bias.dtype
    count: Any = valid
    if valid is not None or counter is not None:
        count = _valid_tokens(counter if valid is None else valid, x, name)
        count_dtype = count.dtype if type(count) is View else None
    if device is None:
        check.host_variant(variant, VARIANTS)
    # Wide loads need aligned rows.
    aligned = alignment % 16 == 0 and (stride * ITEM_SIZE[dtype] % 16 == 0 or tokens <= 1)
    config = choose(
        dtype, experts, bias_dtype, groups, topk_group, topk, shared, factor, scales, renormalize, scoring, by_two,
        softcap, count_dtype, aligned, variant, token_class(tokens),
    )  # fmt: skip
    names = ("topk_weights", "topk_ids") if is_written else ("out[0]", "out[1]")
    if weights is not None or is_written:
        weights = read_like(names[0], weights, x, name, _FLOAT32, (tokens, topk), "[tokens, topk]")
    if ids is not None:
        ids = read_like(names[1], ids, x, name, _INT32, (tokens, topk), "[tokens, topk]")
    if device is None:
        arguments = {
            "logits": x, "bias": bias, "groups": groups, "topk_group": topk_group, "topk": topk, "shared": shared,
            "routed_scaling_factor": factor, "scale_output": scales, "renormalize": renormalize,
            "scoring_func": scoring, "group_by_two": by_two, "num_token_non_padded": count, "softcap": softcap,
        }  # fmt: skip
        return runtime.run_twin(twin.gate, x, (weights, ids), arguments)
    if foreign is None and library.recorder is None and (counter is None or count_dtype):
        if decision is None:
            decision = DECISIONS.keep(facts, arrays, library, device, stride)
        decision.choices[alignment % 16, token_class(tokens), tokens > 1] = config
    own_weights, own_ids = launch(
        config, library, device, (x.address, stride, tokens, tokens if count is None or count_dtype else count),
        0 if bias is None else bias.address, count.address if count_dtype else 0,
        None if weights is None else weights.array, None if ids is None else ids.array,
    )  # fmt: skip
    return runtime.returned(own_weights, weights, x), runtime.returned(own_ids, ids, x)


def _view_of_ids(topk_ids: Any, shared: Any) -> View:
    """The ids to write. A column is a slot of each token; the last `shared` ones are for shared experts."""
    view = view_of("topk_ids", topk_ids)
    if view is None or len(view.shape) != 2:
        wanted = "an int32 array [tokens, topk]"
        check.fail("topk_ids", wanted, type(topk_ids).__name__ if view is None else [*view.shape], TypeError)
    slots = view.shape[1]
    if slots < 1:
        check.fail("topk_ids", "of at least one slot", slots)
    check.integer("num_fused_shared_experts", shared, 0, slots - 1, "the columns of topk_ids but one")
    return view


def _valid_tokens(count: Any, x: View, name: str) -> Any:
    """The number of tokens that are not padding, or the view of the array that holds it."""
    view = None if type(count) is int else view_of("num_token_non_padded", count)
    if view is None:
        return check.integer("num_token_non_padded", count, 0, x.shape[0], "tokens")
    view = read_like("num_token_non_padded", view, x, name, ("int32", "int64"))
    if view.shape not in ((), (1,)):
        check.shape("num_token_non_padded", view.shape, (1,), "[1]")
    return view


def launch(
    config: Config, library: Library, device: int, of_logits: tuple[int, int, int, int], bias: int, counter: int,
    weights: Any, ids: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Make the results that the caller does not give, and launch.

    `of_logits` are the address, the row stride, the tokens, and how many tokens are not padding; `bias` and `counter`
    are addresses.
    """
    address, stride, tokens, valid = of_logits
    if weights is None:
        weights = library.allocate((tokens, config.topk), "float32", device)
    if ids is None:
        ids = library.allocate((tokens, config.topk), "int32", device)
    if tokens:
        address_of = library.address
        values = address, bias, address_of(weights), address_of(ids), counter, stride, tokens, valid  # of FIELDS
        runtime.launch(config, library, device, (-(-tokens // config.tokens_per_block), 1, 1), values)
    return weights, ids
