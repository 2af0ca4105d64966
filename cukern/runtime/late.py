"""Late numbers, which a plan leaves open, so that it serves calls which differ in them alone.

A plan is made from one call. A number that the op declares late, such as the number of tokens, is then a `Late`: it has
the value of that call, and knows how to find the value of another one. Arithmetic gives further late numbers. A
comparison decides something for the plan, so its outcome is kept as a guard: the plan serves only calls with the same
outcomes. A late number that is used as an integer (`int`, `range`, an index) ties the plan to its value. So a plan
serves a call only if the call would have made the same plan.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from cukern.runtime.straight import Text

#: The numbers of a call that late numbers are found in: addresses, sizes and scalars.
Environment = Sequence[Any]


class Guards:
    """The outcomes that a plan relies on."""

    def __init__(self, addresses: Sequence[int] = ()) -> None:
        #: Addresses of the arrays of the call that the plan is made from.
        self.addresses = addresses
        #: The least and the largest value allowed of a number, by its place in the environment.
        self.ranges: dict[int, list[float]] = {}
        #: Places of two numbers that must be equal.
        self.pairs: list[tuple[int, int]] = []
        #: Outcomes that are neither ranges nor pairs.
        self.others: list[Callable[[Environment], bool]] = []
        #: Numbers whose evaluation raises for a value that an argument may not have.
        self.checked: list[Late] = []
        #: Computed numbers, by function and operands: the same computation gives the same late number.
        self.made: dict[tuple[Any, ...], Late] = {}

    def __bool__(self) -> bool:
        return bool(self.ranges or self.pairs or self.others)

    def hold(self, environment: Environment) -> bool:
        """Whether all outcomes are the same for these numbers."""
        for place, (least, largest) in self.ranges.items():
            if not least <= environment[place] <= largest:
                return False
        for first, second in self.pairs:
            if environment[first] != environment[second]:
                return False
        for guard in self.others:  # noqa: SIM110 (as a generator it takes twice as long)
            if not guard(environment):
                return False
        return True

    def straight(self) -> Callable[[Environment], bool]:
        """`hold`, written out as one expression."""
        text = Text("def hold(e):")
        ranges = [(f"e[{place}]", *ends) for place, ends in self.ranges.items()]
        tests = [f"{number} >= {least}" for number, least, _ in ranges if least != float("-inf")]
        tests += [f"{number} <= {largest}" for number, _, largest in ranges if largest != float("inf")]
        tests += [f"e[{first}] == e[{second}]" for first, second in self.pairs]
        tests += [f"{text.name(guard)}(e)" for guard in self.others]
        text.add(f"return {' and '.join(tests) or 'True'}")
        return text.compiled("guards")

    def add(self, number: Late, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        """The outcome of a comparison, kept as a guard."""
        outcome = compare(number.value, other.value if isinstance(other, Late) else other)
        ends = number.place, other.place if isinstance(other, Late) else None
        if outcome and compare is operator.eq and None not in ends:
            self.pairs.append(ends)  # type: ignore[arg-type]
            return outcome
        if isinstance(other, Late) or not self._narrow(number, compare, other, outcome):
            left, right = number.evaluate, other.evaluate if isinstance(other, Late) else lambda environment: other
            self.others.append(lambda environment: compare(left(environment), right(environment)) is outcome)
        return outcome

    def _narrow(self, number: Late, compare: Callable[[Any, Any], bool], other: Any, outcome: bool) -> bool:
        """Keep the outcome as a range, if it is a comparison of integers that a range can express."""
        if type(number.value) is not int or type(other) is not int:
            return False
        if number.place is None:
            return number.rise is not None and self._narrow_root(*number.rise, number.value, compare, other, outcome)
        least, largest = self.ranges.setdefault(number.place, [float("-inf"), float("inf")])
        if compare is operator.eq or compare is operator.ne:
            if outcome is (compare is operator.eq):
                least = largest = other
            elif other < number.value and (least >= other or other == 0):  # sizes are not negative
                least = max(least, other + 1)
            else:
                return False
        elif (compare is operator.le and outcome) or (compare is operator.gt and not outcome):
            largest = min(largest, other)
        elif (compare is operator.lt and outcome) or (compare is operator.ge and not outcome):
            largest = min(largest, other - 1)
        elif (compare is operator.gt and outcome) or (compare is operator.le and not outcome):
            least = max(least, other + 1)
        else:
            least = max(least, other)
        self.ranges[number.place][:] = least, largest
        return True

    def _narrow_root(
        self,
        root: Late,
        limit: Callable[[int], int],
        value: int,
        compare: Callable[[Any, Any], bool],
        other: int,
        outcome: bool,
    ) -> bool:
        """`_narrow` for a number that rises with `root`: the range is one of the root."""
        if compare is operator.le or compare is operator.gt:
            return self._narrow(root, operator.le, limit(other), outcome is (compare is operator.le))
        if compare is operator.lt or compare is operator.ge:
            return self._narrow(root, operator.le, limit(other - 1), outcome is (compare is operator.lt))
        if outcome is (compare is operator.eq):
            return self._narrow(root, operator.le, limit(other), True) and self._narrow(
                root, operator.gt, limit(other - 1), True
            )
        return other == 0 < value and self._narrow(root, operator.gt, limit(0), True)  # sizes are not negative


class Late:
    """A number that each call of a plan has its own value of; `value` is that of the call that the plan is made from.

    `place` is its place in the environment; None for a computed number, which has a `formula`: a function and the
    numbers that it is computed from. `rise` is for a computed number that never falls while another one, its root in
    the environment, rises: the root, and a function from a limit of the number to the largest root that keeps it.
    """

    __slots__ = ("evaluate", "formula", "guards", "place", "rise", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, value: Any, evaluate: Callable[[Environment], Any], guards: Guards, place: int | None = None
    ) -> None:
        self.value = value
        self.evaluate = evaluate
        self.guards = guards
        self.place = place
        self.rise: tuple[Late, Callable[[int], int]] | None = None
        self.formula: tuple[Callable[..., Any], tuple[Any, ...]] | None = None

    @classmethod
    def at(cls, place: int, value: Any, guards: Guards) -> Late:
        """The number that the environment holds at `place`."""
        return cls(value, operator.itemgetter(place), guards, place)

    def apply(self, function: Callable[[Any], Any]) -> Late:
        """`function` of the number, late."""
        return late(function, self)

    def _exact(self) -> Any:
        self.guards.add(self, operator.eq, self.value)
        return self.value

    def __repr__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __bool__(self) -> bool:
        return self.guards.add(self, operator.ne, 0)

    def __index__(self) -> int:
        return operator.index(self._exact())

    def __int__(self) -> int:
        return int(self._exact())

    def __float__(self) -> float:
        return float(self._exact())

    def __neg__(self) -> Late:
        return self.apply(operator.neg)


def late(function: Callable[..., Any], *numbers: Any) -> Any:
    """`function` of the numbers, late where one of them is."""
    first = next((x for x in numbers if isinstance(x, Late)), None)
    if first is None:
        return function(*numbers)
    known = first.guards.made
    key = (function, *(_name(x) for x in numbers))
    try:
        if key in known:
            return known[key]
    except TypeError:  # an operand that cannot be hashed
        known = {}
    value = function(*(x.value if isinstance(x, Late) else x for x in numbers))
    made = Late(value, evaluator(function, numbers), first.guards)
    made.formula = function, numbers
    if len(numbers) == 2:
        left, right = numbers
        if not isinstance(right, Late):
            made.rise = _rise(_LIMITS.get(function), left, right)
        elif not isinstance(left, Late) and function in _SYMMETRIC:
            made.rise = _rise(_LIMITS.get(function), right, left)
    if known is first.guards.made:
        known[key] = made
    return made


def checked(function: Callable[..., Any], *numbers: Any) -> Any:
    """`late` for a function that raises where an argument has a value that it may not have.

    Every call evaluates it, also where nothing that is launched needs the number.
    """
    made = late(function, *numbers)
    if isinstance(made, Late):
        made.guards.checked.append(made)
    return made


def evaluator(function: Callable[..., Any], numbers: Sequence[Any]) -> Callable[[Environment], Any]:
    """A function that finds a computed number in the environment, operands included."""
    if len(numbers) == 1:
        of = numbers[0].evaluate
        return lambda environment: function(of(environment))
    if len(numbers) == 2 and not isinstance(numbers[1], Late):
        of, right = numbers[0].evaluate, numbers[1]
        return lambda environment: function(of(environment), right)
    finders = [x.evaluate if isinstance(x, Late) else (lambda environment, x=x: x) for x in numbers]
    return lambda environment: function(*[find(environment) for find in finders])


def _name(number: Any) -> Any:
    """The identity of a number, for which 1 and 1.0 are two."""
    if not isinstance(number, Late):
        return type(number), number
    return id(number) if number.place is None else ("at", number.place)


def parts(function: Callable[..., tuple[Any, ...]], *numbers: Any) -> tuple[Any, ...]:
    """The elements of the tuple that `function` returns for `numbers`, each of them late where one of those is.

    A call computes the tuple once for all elements.
    """
    whole = late(function, *numbers)
    if not isinstance(whole, Late):
        return whole
    return tuple(whole.apply(item(i)) for i in range(len(whole.value)))


item = functools.cache(operator.itemgetter)


def ceil_div(number: Any, divisor: Any) -> Any:
    """`number / divisor` rounded up, of late numbers too."""
    return late(_ceil_div, number, divisor)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


#: For a function of a number and a positive integer: the largest number whose result keeps to a limit.
_LIMITS: dict[Callable[..., Any], Callable[[int, int], int]] = {
    operator.add: lambda limit, more: limit - more,
    operator.sub: lambda limit, less: limit + less,
    operator.mul: lambda limit, times: limit // times,
    operator.floordiv: lambda limit, divisor: limit * divisor + divisor - 1,
    _ceil_div: lambda limit, divisor: limit * divisor,
}
_SYMMETRIC = (operator.add, operator.mul)


def _rise(limit_of: Callable[[int, int], int] | None, number: Late, by: Any) -> Any:
    """The `rise` of a result of `number` and `by`; see `Late`."""
    if limit_of is None or type(by) is not int or by <= 0:
        return None
    if number.place is not None:
        return number, lambda limit: limit_of(limit, by)
    if number.rise is None:
        return None
    root, within = number.rise
    return root, lambda limit: within(limit_of(limit, by))


def _add_operators() -> None:
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "lshift", "rshift", "and_", "or_"):
        function = getattr(operator, name)
        word = name.rstrip("_")
        setattr(Late, f"__{word}__", lambda self, other, function=function: late(function, self, other))
        setattr(Late, f"__r{word}__", lambda self, other, function=function: late(function, other, self))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        compare = getattr(operator, name)
        setattr(Late, f"__{name}__", lambda self, other, compare=compare: self.guards.add(self, compare, other))


_add_operators()
