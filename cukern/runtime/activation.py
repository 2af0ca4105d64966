"""The activations of a gated feed-forward layer, by the names users know and the numbers the kernels have."""

from __future__ import annotations

from typing import Any

from cukern.runtime import check

#: By their number in `common/activation.cuh`; the formulas are there, and in `cukern/reference/moe_activation.py`.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2")
_NUMBERS: dict[Any, int] = {None: 0, **{name: i + 1 for i, name in enumerate(ACTIVATIONS)}}


def number(activation: Any, *, optional: bool = False) -> int:
    """What a template calls this activation; 0 is none, where that is allowed. Raises ValueError for another name."""
    return _NUMBERS[check.one_of("activation", activation, (None, *ACTIVATIONS) if optional else ACTIVATIONS)]
