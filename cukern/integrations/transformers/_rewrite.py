"""Rewrite the `forward` of a module of transformers."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any


def undecorated_forward(module: Any) -> Any:
    """Return the `forward` of a module's class without its decorators."""
    return inspect.unwrap(type(module).forward)


MANY_ARGUMENTS = "its forward has an argument besides the rows whose default is not None"


def takes_one_argument(module: Any) -> bool:
    """Return whether every argument of a `forward`, except the first, has the default None."""
    takes = list(inspect.signature(undecorated_forward(module)).parameters.values())[1:]
    named = [x for x in takes if x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    return bool(named) and named[0].default is inspect.Parameter.empty and all(x.default is None for x in named[1:])


def only_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a call's first argument, or None if another argument is not None."""
    if not args or any(x is not None for x in (*args[1:], *kwargs.values())):
        return None
    return args[0]


def read_globals(module: Any) -> dict[str, Any]:
    forward = undecorated_forward(module)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    scope = getattr(forward, "__globals__", {})
    return {name: scope[name] for name in names if name in scope}


def read_names(module: Any) -> set[str]:
    def found(code: types.CodeType) -> set[str]:
        inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
        return {*code.co_names}.union(*map(found, inner))

    code = getattr(undecorated_forward(module), "__code__", None)
    return set() if code is None else found(code)


def rewritten(
    module: Any,
    names: dict[str, Any],
    change: Callable[[list[ast.stmt]], list[ast.stmt]] = lambda body: body,
) -> Callable[..., Any] | None:
    """Return a copy of the `forward` of a module's class with changed statements.

    `names` maps global variables of the function to other values. The copy shares its other global variables and its
    decorators with the original, so that torch.compile finds them in their module.

    Return None if the source is not available, if the undecorated function is a closure, or if a decorator does not
    have the function in its closure.
    """
    forward = undecorated_forward(module)
    if not isinstance(forward, types.FunctionType) or forward.__closure__:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        return None
    function.body = change(function.body)
    function.decorator_list = []
    # Remove annotations and defaults, which would be evaluated again. The defaults are copied below.
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    function.returns = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if x is None else ast.Constant(None) for x in arguments.kw_defaults]
    outer = ast.parse(f"def make({', '.join(names)}):\n    return {function.name}").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body.insert(0, function)
    tree.body = [outer]
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), f"<{forward.__qualname__} on cukern>", "exec")
    exec(code, forward.__globals__, made)
    found: Callable[..., Any] = made["make"](**names)
    found.__defaults__, found.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__  # type: ignore[attr-defined]
    return _wrapped(type(module).forward, found)


def _wrapped(forward: Any, replacement: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wrap `replacement` in copies of the decorators of `forward`, or return None."""
    if not hasattr(forward, "__wrapped__"):
        return replacement
    inner = _wrapped(forward.__wrapped__, replacement)
    cells = getattr(forward, "__closure__", None) or ()
    is_inner = [x.cell_contents is forward.__wrapped__ for x in cells]
    if inner is None or not any(is_inner) or not isinstance(forward, types.FunctionType):
        return None
    closure = tuple(types.CellType(inner) if held else x for x, held in zip(cells, is_inner, strict=True))
    copied = types.FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, closure)
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__dict__.update(forward.__dict__, __wrapped__=inner)
    return copied
