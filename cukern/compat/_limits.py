"""What the modules of `cukern.compat` say where they do not cover a peer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

#: Marks a function that only raises, so that `enable` never puts it in the place of a real one.
RAISES = "__cukern_raises__"


def refuse(function: str, argument: str, wanted: str, got: object) -> NoReturn:
    """Raise NotImplementedError for an argument of a peer's function that cukern does not have."""
    raise NotImplementedError(f"{function}: {argument} must be {wanted} with cukern, got {got}")


def unless_default(function: str, wanted: object, **arguments: Any) -> None:
    """Refuse each of the arguments that is not `wanted`, which is None, True or False."""
    for name, value in arguments.items():
        if value is not wanted:
            refuse(function, name, repr(wanted), type(value).__name__ if wanted is None else repr(value))


def not_covered(module: str, names: Collection[str], covered: Collection[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module: functions that raise for the peer's `names` that cukern does not have.

    They are found, so that an import of several names works for who calls only those that are covered. Any other name
    is an AttributeError.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no {name!r}; it has {', '.join(sorted(covered))}")

        def function(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(f"{name} is not covered by {module}, which has {', '.join(sorted(covered))}")

        function.__name__ = function.__qualname__ = name
        setattr(function, RAISES, True)
        return function

    return get
