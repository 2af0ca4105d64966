"""Values that differ at each call of a plan: arguments such as a seed, and values computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Each:
    """A value that may differ at each call of a plan. `value` is its value in the call that makes the plan.

    If the value is an argument, `place` is its index among the numbers of a call. If the value is computed, each call
    computes it as `function(*operands)`. An operand is an argument, an array (its address is passed), another computed
    value, or a constant.
    """

    __slots__ = ("function", "operands", "place", "value")

    def __init__(
        self,
        value: Any,
        function: Callable[..., Any] | None = None,
        operands: Sequence[Any] = (),
        place: int | None = None,
    ) -> None:
        self.value = value
        self.function = function
        self.operands = operands
        self.place = place
