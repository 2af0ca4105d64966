"""The decisions of earlier calls: a call like one before repeats its decision without the checks.

Alike calls differ in the addresses of their arrays and in the sizes that their family leaves free, and in nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cukern.runtime.arrays import Library, is_array

#: A family keeps 1024 sets of facts, and 16 layouts of the arrays for each.
_MAX_CALLS, _MAX_LAYOUTS = 1024, 16


class Decision(NamedTuple):
    """What alike calls share: the library and the device of their arrays, and the family's choices.

    A family keeps a choice for each of its own keys, such as a class of token counts.
    """

    types: list[type]  # of the facts and the arrays
    is_alike: Callable[..., bool]
    given: Callable[[Sequence[Any]], Sequence[Any]]
    requires_grad: bool
    library: Library
    device: int
    own: Any  # what the family keeps beside its choices
    choices: dict[Any, Any]


class Decisions:
    """The decisions of a family. `free` has the free dimensions of each array; see `Library.alike`.

    Each call checks the sizes of the free dimensions against each other.
    """

    def __init__(self, *free: tuple[int, ...]) -> None:
        self._free = free
        self._found: dict[tuple[Any, ...], list[Decision]] = {}

    def find(self, facts: tuple[Any, ...], arrays: tuple[Any, ...]) -> Decision | None:
        """The decision of an alike call; None where there was none.

        `facts` are the arguments that are no arrays; an array may be None.
        """
        try:
            found = self._found.get(facts)
        except TypeError:  # not hashable: the checks name the argument
            return None
        if found is not None:
            types = [*map(type, facts + arrays)]  # 1 == 1.0 == True
            for decision in found:
                if decision.types == types and decision.is_alike(*decision.given(arrays)):
                    if decision.requires_grad and decision.library.wants_gradients():
                        return None
                    return decision
        return None

    def keep(
        self, facts: tuple[Any, ...], arrays: tuple[Any, ...], library: Library, device: int, own: Any = None,
        free: Sequence[tuple[int, ...]] | None = None,
    ) -> Decision:  # fmt: skip
        """Keep the decision of a call that has passed its checks, without a choice yet.

        `free` stands in for the family's where the free dimensions depend on the call.
        """
        places = [i for i, x in enumerate(arrays) if x is not None]
        # By a slice for one array: its place alone would give no tuple.
        given = operator.itemgetter(*(places if len(places) > 1 else [slice(places[0], places[0] + 1)]))
        present = given(arrays)
        # A size of 0 or 1 is not free: one scale is not one of each row, and no check looks at the stride of one row.
        sizes = [(free or self._free)[i] for i in places]
        many = [
            tuple(n for n in own_free if max(x.shape[n : n + 1], default=2) > 1)
            for x, own_free in zip(present, sizes, strict=True)
        ]
        is_alike = library.alike(present, many)
        requires_grad = any(getattr(x, "requires_grad", False) for x in present)
        types = [*map(type, facts), *map(type, arrays)]
        made = Decision(types, is_alike, given, requires_grad, library, device, own, {})
        # The elements of an array that passes for a number may change.
        if not any(map(is_array, facts)):
            if len(self._found) >= _MAX_CALLS and facts not in self._found:
                self._found.clear()
            self._found[facts] = [made, *self._found.get(facts, [])[: _MAX_LAYOUTS - 1]]
        return made

    def clear(self) -> None:
        self._found.clear()
