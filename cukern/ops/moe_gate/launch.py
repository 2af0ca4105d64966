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
from cukern.runtime.arrays import ITEM_SIZE, View
from cukern.runtime.view import out_of, read, read_like, row_stride, view_of

_FLOAT32, _INT32 = ("float32",), ("int32",)
AXES = ("tokens", "experts")
#: The sizes of a gate, with their least values.
_SIZES = {"num_expert_group": 1, "topk_group": 1, "topk": 1, "num_fused_shared_experts": 0}


def gate(
    x: Any, name: str, bias: Any, bias_name: str, sizes: tuple[Any, Any, Any, Any], factor: Any, scales: Any,
    renormalize: Any, scoring: Any, num_token_non_padded: Any, variant: Any, out: Any = None, *,
    written: tuple[Any, Any] | None = None, by_two: bool = False, scales_sums_alone: bool = False, softcap: float = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """Check, choose a kernel, launch; the weights and the ids as the caller gets them.

    `name` and `bias_name` are what messages call the logits `x`, which may have been read, and the bias. `sizes` are
    the groups, how many of them are kept, the slots, and how many of them are for shared experts. `scales`: the scaling
    factor multiplies the weights, or with `scales_sums_alone` only renormalized ones. `written` are topk_weights and
    the view of topk_ids, where there is no `out`. `by_two`: a group's score is the sum of its two best choices.
    """
    if type(x) is not View:
        x = read(name, x, DTYPES, AXES)
    _, _, alignment, dtype, (tokens, experts), (stride, between), device, _ = x
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail(name, f"of 1 to {MAX_EXPERTS} experts", experts)
    if tokens > MAX_TOKENS:
        check.fail(name, f"of at most {MAX_TOKENS} tokens", tokens)
    if between != 1:
        row_stride(name, x)
    groups, topk_group, topk, shared = sizes
    # Equal values find the same decision: 8.0 and True would pass as 8 and 1.
    if not (
        type(groups) is type(topk_group) is type(topk) is type(shared) is int
        and type(renormalize) is type(scales) is bool
        and type(scoring) is type(variant) is str
        and type(factor) is float
    ):
        groups, topk_group, topk, shared = (
            n if type(n) is int else check.integer(own, n, low)
            for (own, low), n in zip(_SIZES.items(), sizes, strict=True)
        )
        renormalize = check.flag("renormalize", renormalize)
        scales = check.flag("apply_routed_scaling_factor_on_output", scales)
        scoring = str(check.one_of("scoring_func", scoring, SCORING))
        variant = str(check.one_of("variant", variant, VARIANTS))
        factor = check.number("routed_scaling_factor", factor)
    if scales_sums_alone and not renormalize:
        scales = False
    bias_dtype = count_dtype = None
    if bias is not None:
        bias = read_like(bias_name, bias, x, name, BIAS_DTYPES, (experts,), "[experts]")
        alignment, bias_dtype = alignment | bias.address, bias.dtype
    count = num_token_non_padded
    if count is not None:
        count = _valid_tokens(count, x, name)
        count_dtype = count.dtype if type(count) is View else None
    if device is None:
        check.host_variant(variant, VARIANTS)
    # Wide loads need aligned rows.
    aligned = alignment % 16 == 0 and (stride * ITEM_SIZE[dtype] % 16 == 0 or tokens <= 1)
    config = choose(
        dtype, experts, bias_dtype, groups, topk_group, topk, shared, factor, scales, renormalize, scoring, by_two,
        softcap, count_dtype, aligned, variant, token_class(tokens),
    )  # fmt: skip
    weights = ids = None
    if written is not None or out is not None:
        own_names = ("out[0]", "out[1]") if written is None else ("topk_weights", "topk_ids")
        first, second = written or out_of(out, 2, "a pair (weights, ids)")
        if first is not None or written is not None:
            weights = read_like(own_names[0], first, x, name, _FLOAT32, (tokens, topk), "[tokens, topk]")
        if second is not None:
            ids = read_like(own_names[1], second, x, name, _INT32, (tokens, topk), "[tokens, topk]")
    if device is None:
        arguments = {
            "logits": x, "bias": bias, "groups": groups, "topk_group": topk_group, "topk": topk, "shared": shared,
            "routed_scaling_factor": factor, "scale_output": scales, "renormalize": renormalize,
            "scoring_func": scoring, "group_by_two": by_two, "num_token_non_padded": count, "softcap": softcap,
        }  # fmt: skip
        return runtime.run_twin(twin.gate, x, (weights, ids), arguments)
    return launch(config, x, bias, topk, weights, ids, count)


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
    config: Config, x: View, bias: View | None, topk: int, weights: View | None, ids: View | None, count: Any
) -> tuple[Any, Any]:
    """Make the results that the caller does not give, and launch."""
    _, library, address, _, (tokens, _), (stride, _), device, foreign = x
    own_weights = library.allocate((tokens, topk), "float32", device) if weights is None else weights.array
    own_ids = library.allocate((tokens, topk), "int32", device) if ids is None else ids.array
    if tokens:
        on_device = type(count) is View
        values = (  # of FIELDS
            address, 0 if bias is None else bias.address, library.address(own_weights), library.address(own_ids),
            count.address if on_device else 0, stride, tokens, tokens if count is None or on_device else count,
        )  # fmt: skip
        runtime.launch(config, x, (-(-tokens // config.tokens_per_block), 1, 1), values)
    if foreign is None:
        return own_weights, own_ids
    return runtime.returned(own_weights, weights, x), runtime.returned(own_ids, ids, x)
