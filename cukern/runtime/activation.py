"""The activations of a feed-forward layer: the names for users, and the numbers for the kernels."""

from __future__ import annotations

from typing import Any

from cukern.runtime import check, template

_DECLARED = [*template.constants("moe_activation/moe_activation")]
#: The names of activations, in the order of their numbers in `common/activation.cuh`. That file and the NumPy reference
#: have the formulas.
ACTIVATIONS = tuple(
    name.lower() for name in _DECLARED[_DECLARED.index("NO_ACTIVATION") + 1 : _DECLARED.index("ACTIVATIONS")]
)
#: Activations without a gate, with vLLM's names: the result is activate(x, 1), where 1 replaces the up projection.
UNGATED = tuple(f"{name}_no_mul" for name in ACTIVATIONS if name != "swigluoai")
#: Default constants of swigluoai.
ALPHA, LIMIT = 1.702, 7.0
_NUMBERS: dict[Any, int] = {None: 0, **{name: i + 1 for i, name in enumerate(ACTIVATIONS)}}


def is_gated(activation: str | None) -> bool:
    """Return whether an activation has a gate; false for None."""
    return activation is not None and not activation.endswith("_no_mul")


def number(activation: Any, *, optional: bool = False) -> int:
    """Return the number of an activation in the templates; 0 for None if `optional`. Raises ValueError for others."""
    return _NUMBERS[check.one_of("activation", activation, (None, *ACTIVATIONS) if optional else ACTIVATIONS)]


def function_number(activation: Any, *, optional: bool = False) -> int:
    """Return the number of an activation with or without a gate; 0 for None if `optional`.

    Raises ValueError for another name.
    """
    names = *ACTIVATIONS, *UNGATED
    name = check.one_of("activation", activation, (None, *names) if optional else names)
    return _NUMBERS[name.removesuffix("_no_mul") if name else None]


def check_bounds(alpha: Any, limit: Any) -> tuple[float, float]:
    """Check `alpha` and `limit` of swigluoai, and return them as floats.

    Raises TypeError for a value that is not a number, ValueError for an infinity, NaN or a negative limit.
    """
    alpha, limit = check.number("alpha", alpha), check.number("limit", limit)
    if not limit >= 0:
        check.fail("limit", "at least 0", limit)
    return alpha, limit
