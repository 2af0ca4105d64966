"""Forwards of transformers with other functions for names that they use."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

#: What transformers wraps the forward of a layer in, for the sake of training alone.
_CHECKPOINTING = "forward_with_checkpointing"


def own_forward(module: Any) -> types.FunctionType | None:
    """The forward of a module's class as it is written; None where something is wrapped around it."""
    forward = type(module).forward
    if getattr(getattr(forward, "__code__", None), "co_name", "") == _CHECKPOINTING:
        forward = forward.__wrapped__
    if not isinstance(forward, types.FunctionType) or forward.__closure__ or hasattr(forward, "__wrapped__"):
        return None
    return forward


def rewritten(
    forward: types.FunctionType,
    names: dict[str, Any],
    change: Callable[[list[ast.stmt]], list[ast.stmt]] = lambda body: body,
) -> Callable[..., Any] | None:
    """The function with its statements changed, in which `names` stand for other values; None without its source.

    They are free variables of the new function. It shares all other globals with the old one, so that torch.compile
    finds these in their module.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    function.body = change(function.body)
    # Annotations and defaults would be evaluated anew; those of the function stay.
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
    return found
