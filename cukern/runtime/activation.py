"""The activations of a gated feed-forward layer, by the names users know and the numbers the kernels have."""

from __future__ import annotations

from typing import Any

from cukern.runtime import check

#: Names in the order of the numbers in `common/activation.cuh`, which has the formulas, as the twin has.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2")
_NUMBERS: dict[Any, int] = {None: 0, **{name: i + 1 for i, name in enumerate(ACTIVATIONS)}}


def number(activation: Any, *, optional: bool = False) -> int:
    """The number of an activation in the templates; 0 for None if `optional`. Raises ValueError for another name."""
    return _NUMBERS[check.one_of("activation", activation, (None, *ACTIVATIONS) if optional else ACTIVATIONS)]
