"""The errors for functions and arguments that `cukern.compat` does not cover."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

#: The attribute that marks a function that does nothing but raise an error.
RAISES = "__cukern_raises__"

#: The Python module that looks up names for `from package import name`.
_IMPORTS_NAMES = "importlib._bootstrap"


def refuse(function: str, argument: str, wanted: str, got: object) -> NoReturn:
    raise NotImplementedError(f"{function}: {argument} must be {wanted} with cukern, got {got}")


def unless_default(function: str, wanted: object, **arguments: Any) -> None:
    """Refuse each of the `arguments` that differs from `wanted`, the default of all of them."""
    for name, value in arguments.items():
        if value is not wanted:
            refuse(function, name, repr(wanted), type(value).__name__ if wanted is None else repr(value))


def not_covered_message(name: str, module: str, library: str, covers: str | None = None) -> str:
    """Return the error message for a missing name. `covers` is the cukern function with the same purpose, if any."""
    advice = f" {covers} does this with other arguments." if covers else ""
    stands = f"cukern stands in for {library} here."
    return f"{name} is not covered by {module}: {stands}{advice} docs/differences.md lists what it covers."


def not_covered(
    module: str, library: str, covers: Mapping[str, str] = {}, names: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that replaces a module of a library.

    Each of the `names` becomes a function that raises, so that a program can import a name that it never calls. Any
    other name raises AttributeError. An import statement of such a name raises ImportError, because Python would
    replace the message of an AttributeError. `covers` maps a name of the library to the cukern function with the same
    purpose.
    """

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = not_covered_message(name, module, library, covers.get(name))
        if name not in names:
            is_import = sys._getframe(1).f_globals.get("__name__") == _IMPORTS_NAMES
            raise (ImportError if is_import else AttributeError)(message)

        def function(*_: Any, **__: Any) -> NoReturn:
            raise NotImplementedError(message)

        function.__name__ = function.__qualname__ = name
        setattr(function, RAISES, True)
        return function

    return get
