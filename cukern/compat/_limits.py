"""What the modules of `cukern.compat` say where they do not cover a peer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

#: Marks a function that only raises, so that `enable` never puts it in the place of a real one.
RAISES = "__cukern_raises__"

#: The module of Python that looks up the names of `from package import name`.
_IMPORTS_NAMES = "importlib._bootstrap"


def refuse(function: str, argument: str, wanted: str, got: object) -> NoReturn:
    """Raise NotImplementedError for an argument of a peer's function that cukern does not have."""
    raise NotImplementedError(f"{function}: {argument} must be {wanted} with cukern, got {got}")


def unless_default(function: str, wanted: object, **arguments: Any) -> None:
    """Refuse each of the arguments that is not `wanted`, which is None, True or False."""
    for name, value in arguments.items():
        if value is not wanted:
            refuse(function, name, repr(wanted), type(value).__name__ if wanted is None else repr(value))


def sentence(name: str, module: str, library: str, covers: str | None = None) -> str:
    """What is said of a name of a library that a module of cukern does not have; `covers` does what it does."""
    advice = f" {covers} does this with other arguments." if covers else ""
    stands = f"cukern stands in for {library} here."
    return f"{name} is not covered by {module}: {stands}{advice} docs/differences.md lists what it covers."


def not_covered(
    module: str, library: str, covers: Mapping[str, str] = {}, names: Collection[str] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a module that stands in for a module of a library.

    The library's `names` are functions that raise when they are called, so that an import of several names works for
    who calls only what is covered. Any other name is an AttributeError, and an ImportError where a statement imports
    it: Python replaces the text of an AttributeError there. `covers` has the function of cukern that does what a name
    of the library does.
    """

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        says = sentence(name, module, library, covers.get(name))
        if name not in names:
            is_import = sys._getframe(1).f_globals.get("__name__") == _IMPORTS_NAMES
            raise (ImportError if is_import else AttributeError)(says)

        def function(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(says)

        function.__name__ = function.__qualname__ = name
        setattr(function, RAISES, True)
        return function

    return get
