"""Late numbers: what a plan relies on holds for a call where the plan would have been the same."""

from __future__ import annotations

import operator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cukern.runtime.late import Guards, Late, ceil_div

COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
STEPS = {
    "add": operator.add,
    "mul": operator.mul,
    "sub": operator.sub,
    "floordiv": operator.floordiv,
    "ceil_div": ceil_div,
    "from the right": lambda number, by: by * number,
    "falls": lambda number, by: by - number,
}


def computed(number: Any, steps: list[tuple[str, int]]) -> Any:
    for name, by in steps:
        number = STEPS[name](number, by)
    return number


@settings(max_examples=500)
@given(
    st.integers(0, 300),
    st.lists(st.integers(0, 300), min_size=1),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 9)), max_size=3),
    st.sampled_from(COMPARISONS),
    st.integers(-20, 2000),
)
def test_guards_hold_where_the_outcome_is_the_same(
    first: int, others: list[int], steps: list[tuple[str, int]], compare: Any, limit: int
) -> None:
    guards = Guards()
    outcome = compare(computed(Late.at(0, first, guards), steps), limit)
    assert outcome is compare(computed(first, steps), limit)
    assert guards.hold([first])
    rises = not any(name == "falls" for name, _ in steps)
    for other in others:
        same = compare(computed(other, steps), limit) is outcome
        assert same or not guards.hold([other])
        # To differ from a number can be kept as to be above it.
        if not (compare in (operator.eq, operator.ne) and rises):
            assert guards.hold([other]) is same
    if rises and compare not in (operator.eq, operator.ne):
        assert not guards.others
