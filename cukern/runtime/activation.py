"""Names and template numbers of the activations of a feed-forward layer."""

from __future__ import annotations

from typing import Any

from cukern.runtime import check, template

_DECLARED = [*template.constants("moe_activation/moe_activation")]
#: Activation names in the order of the enum in `common/activation.cuh`, which has the formulas.
ACTIVATIONS = tuple(
    name.lower() for name in _DECLARED[_DECLARED.index("NO_ACTIVATION") + 1 : _DECLARED.index("ACTIVATIONS")]
)
#: Activations without a gate, with vLLM's names. The kernels compute activate(x, 1): 1 replaces the up projection.
UNGATED = tuple(f"{name}_no_mul" for name in ACTIVATIONS if name != "swigluoai")
ALPHA, LIMIT = 1.702, 7.0
_NUMBERS: dict[Any, int] = {None: 0, **{name: i + 1 for i, name in enumerate(ACTIVATIONS)}}


def is_gated(activation: str | None) -> bool:
    return activation is not None and not activation.endswith("_no_mul")


def number(activation: Any, *, optional: bool = False) -> int:
    """Return an activation's number in the templates; 0 for None if `optional`."""
    return _NUMBERS[check.one_of("activation", activation, (None, *ACTIVATIONS) if optional else ACTIVATIONS)]


def function_number(activation: Any, *, optional: bool = False) -> int:
    """Like `number`, but also take the ungated names."""
    names = *ACTIVATIONS, *UNGATED
    name = check.one_of("activation", activation, (None, *names) if optional else names)
    return _NUMBERS[name.removesuffix("_no_mul") if name else None]


def check_bounds(alpha: Any, limit: Any) -> tuple[float, float]:
    """Check swigluoai's constants. An infinity, NaN or a negative limit raises ValueError."""
    alpha, limit = check.number("alpha", alpha), check.number("limit", limit)
    if not limit >= 0:
        check.fail("limit", "at least 0", limit)
    return alpha, limit
