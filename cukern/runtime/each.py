"""Values that differ at each call of a plan, such as a seed, and values computed from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Each:
    """A value that may differ at each call of a plan. `value` is its value while the plan is made.

    If the value is an argument, `place` is its index among the call's numbers. Any other value is
    `function(*operands)`. Operands are arguments, arrays (as addresses), other `Each` values and constants.
    """

    value: Any
    function: Callable[..., Any] | None = None
    operands: Sequence[Any] = ()
    place: int | None = None
