"""Values that differ at each call of a plan, such as a seed, and values computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Each:
    """A value that may differ at each call of a plan. `value` is its value while the plan is made.

    If the value is an argument, `place` is its index among the call's numbers. Any other value is
    `function(*operands)`. Operands are arguments, arrays (as addresses), other `Each` values and constants.
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
