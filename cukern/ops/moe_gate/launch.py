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
)
from cukern.reference import moe_gate as twin
from cukern.runtime import arrays, check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import View
from cukern.runtime.view import out_of, read, read_like, read_near, row_stride, view_of

_SIZES = {"num_expert_group": 1, "topk_group": 1, "topk": 1, "num_fused_shared_experts": 0}


def read_logits(name: str, logits: Any) -> View:
    """The router logits, the array that decides where a gate runs."""
    x = read(name, logits, DTYPES, ("tokens", "experts"))
    tokens, experts = x.shape
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail(name, f"of 1 to {MAX_EXPERTS} experts", experts)
    if tokens > MAX_TOKENS:
        check.fail(name, f"of at most {MAX_TOKENS} tokens", tokens)
    return x


def gate(
    x: View,
    name: str,
    bias: Any,
    bias_name: str,
    sizes: tuple[Any, Any, Any, Any],
    factor: Any,
    scales: Any,
    renormalize: Any,
    scoring: Any,
    num_token_non_padded: Any,
    variant: Any,
    out: Any = None,
    *,
    written: tuple[Any, Any] | None = None,
    by_two: bool = False,
    scales_sums_alone: bool = False,
    softcap: float = 0.0,
) -> tuple[Any, Any]:
    """Check, choose a kernel, launch; the weights and the ids as the caller gets them.

    `name` and `bias_name` are what messages call the logits `x` and the bias. `sizes` are the groups, those that are
    kept, the slots, and how many of them are for shared experts. `scales`: the scaling factor multiplies the weights,
    or with `scales_sums_alone` only renormalized ones. `written` are topk_weights and the view of topk_ids, in place of
    an `out`. `by_two`: a group's score is the sum of its two best choices.
    """
    tokens, experts = x.shape
    stride = row_stride(name, x)
    groups, topk_group, topk, shared = (
        n if type(n) is int else check.integer(own, n, _SIZES[own]) for own, n in zip(_SIZES, sizes, strict=True)
    )
    addresses = x.address
    if bias is not None:
        bias = read_like(bias_name, bias, x, name, BIAS_DTYPES, (experts,), "[experts]")
        addresses |= bias.address
    check.one_of("scoring_func", scoring, SCORING)
    check.one_of("variant", variant, VARIANTS)
    if x.device is None:
        check.host_variant(variant, VARIANTS)
    # Wide loads need aligned rows.
    aligned = addresses % 16 == 0 and (stride * arrays.ITEM_SIZE[x.dtype] % 16 == 0 or tokens <= 1)
    config = choose(
        x.dtype, experts, groups, topk_group, topk, shared, scoring, None if bias is None else bias.dtype, by_two,
        softcap != 0, aligned, variant, token_class(tokens),
    )  # fmt: skip
    renormalize = check.flag("renormalize", renormalize)
    scales = check.flag("apply_routed_scaling_factor_on_output", scales) and (renormalize or not scales_sums_alone)
    factor = check.number("routed_scaling_factor", factor)
    if shared and factor == 0:
        check.fail("routed_scaling_factor", "nonzero with fused shared experts", factor)
    count = _valid_tokens(num_token_non_padded, x, name)
    weights = ids = None
    if written is not None:
        weights = _result("topk_weights", written[0], "float32", x, name, topk)
        ids = _result("topk_ids", written[1], "int32", x, name, topk)
    elif out is not None:
        first, second = out_of(out, 2, "a pair (weights, ids)")
        weights = None if first is None else _result("out[0]", first, "float32", x, name, topk)
        ids = None if second is None else _result("out[1]", second, "int32", x, name, topk)
    if x.device is None:
        arguments = {
            "logits": x, "bias": bias, "groups": groups, "topk_group": topk_group, "topk": topk, "shared": shared,
            "routed_scaling_factor": factor, "scale_output": scales, "renormalize": renormalize,
            "scoring_func": scoring, "group_by_two": by_two, "num_token_non_padded": count, "softcap": softcap,
        }  # fmt: skip
        return runtime.run_twin(twin.gate, x, (weights, ids), arguments)
    fields = {
        "row_stride": stride,
        "renormalize": renormalize,
        "shared_scale": 1 / factor if shared else 0.0,
        "output_scale": factor if scales else 1.0,
    }
    if bias is not None:
        fields["bias"] = bias.address
    if softcap:
        fields["softcap"] = softcap
    return launch(config, x, topk, weights, ids, count, fields)


def _valid_tokens(count: Any, x: View, name: str) -> Any:
    """The number of tokens that are not padding, or the view of the array that holds it; None if all count."""
    if count is None:
        return None
    view = None if type(count) is int else view_of("num_token_non_padded", count)
    if view is None:
        return check.integer("num_token_non_padded", count, 0, x.shape[0], "tokens")
    view = read_near("num_token_non_padded", view, x, name, ("int32", "int64"))
    if view.shape not in ((), (1,)):
        check.shape("num_token_non_padded", view.shape, (1,), "[1]")
    return view


def _result(own: str, array: Any, dtype: str, x: View, name: str, topk: int) -> View:
    return read_like(own, array, x, name, (dtype,), (x.shape[0], topk), "[tokens, topk]")


def launch(
    config: Config, x: View, topk: int, weights: View | None, ids: View | None, count: Any, fields: dict[str, Any]
) -> tuple[Any, Any]:
    """Make the results that the caller does not give, and launch."""
    library, tokens = x.library, x.shape[0]
    shape = tokens, topk
    own_weights = library.allocate(shape, "float32", x.device) if weights is None else weights.array
    own_ids = library.allocate(shape, "int32", x.device) if ids is None else ids.array
    if tokens:
        is_counted = type(count) is View  # on the device
        fields["logits"] = x.address
        fields["weights"] = library.address(own_weights)
        fields["ids"] = library.address(own_ids)
        fields["tokens"] = tokens
        fields["valid"] = tokens if count is None or is_counted else count
        fields["valid_on_device"] = count.address if is_counted else 0
        fields["valid_is_int64"] = is_counted and count.dtype == "int64"
        runtime.launch(config, x, (-(-tokens // config.tokens_per_block), 1, 1), fields)
    if x.foreign is None:
        return own_weights, own_ids
    return runtime.returned(own_weights, weights, x), runtime.returned(own_ids, ids, x)
