"""The errors that `cukern.compat` raises for functions and arguments that cukern does not cover."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

#: This attribute marks functions that only raise. `enable` never replaces a real function with such a function.
RAISES = "__cukern_raises__"

#: The Python module that runs `from package import name`. If it looks up a name, the lookup is part of an import.
_IMPORTS_NAMES = "importlib._bootstrap"


def refuse(function: str, argument: str, wanted: str, got: object) -> NoReturn:
    """Raise NotImplementedError for an argument value that cukern does not support."""
    raise NotImplementedError(f"{function}: {argument} must be {wanted} with cukern, got {got}")


def unless_default(function: str, wanted: object, **arguments: Any) -> None:
    """Raise NotImplementedError if one of the `arguments` is not `wanted`, which is its default."""
    for name, value in arguments.items():
        if value is not wanted:
            refuse(function, name, repr(wanted), type(value).__name__ if wanted is None else repr(value))


def sentence(name: str, module: str, library: str, covers: str | None = None) -> str:
    """Return the error message for a name that `module` does not have.

    `covers` is the name of a cukern function with the same purpose, if there is one.
    """
    advice = f" {covers} does this with other arguments." if covers else ""
    stands = f"cukern stands in for {library} here."
    return f"{name} is not covered by {module}: {stands}{advice} docs/differences.md lists what it covers."


def not_covered(
    module: str, library: str, covers: Mapping[str, str] = {}, names: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that replaces a module of a library.

    It returns, for each name in `names`, a function that raises when it is called. So a program can import supported
    and unsupported names in one statement, and fails only if it calls an unsupported function. Any other name raises
    AttributeError. In an import statement it raises ImportError, because Python would replace the message of an
    AttributeError. `covers` maps a name of the library to the cukern function with the same purpose.
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
