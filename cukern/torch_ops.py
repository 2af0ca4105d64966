"""PyTorch operators: `import cukern.torch_ops` registers cukern's functions as `torch.ops.cukern.*`.

`torch.compile(fullgraph=True)`, `torch.export` and look-up by name need operators. An operator has the arguments,
results and errors of the function, and takes CUDA tensors, or CPU tensors for the NumPy reference. An operator differs
from the function in these points:

- An argument that may be an array must be a tensor. If it is usually a number, the operator takes a number, and an
  overload with the argument's name takes a tensor: `torch.ops.cukern.masked_attention.step` (with `out=`: `.step_out`).
- The overload `.out` replaces `out=`. It takes each result tensor and returns nothing:
  `torch.ops.cukern.moe_fused_gate.out(..., weights=weights, ids=ids)`. If a function returns only arguments that it
  writes, its operator also returns nothing.
- If all written arguments are optional, as in `sample`, an overload leaves them out:
  `torch.ops.cukern.sample.functional`. Inductor compiles this overload if a call gives none of these arguments.
- A flag such as `return_lse` becomes an overload with the additional result: `torch.ops.cukern.paged_attention.lse`
  (with `out=`: `.lse_out`).
- A sampler without a seed takes one from torch's generator at each run, also in a compiled graph, so two runs differ.
  torch.compile refuses `generator=`, because a graph cannot contain a generator. Use torch's default generator, or
  `torch.compiler.disable(cukern.sample)`.
- Operators have no backward. In grad mode a tensor that requires grad raises RuntimeError, also in tracing, because a
  missing gradient would train a model wrongly. Use `torch.no_grad()` or `.detach()`. Forward-mode differentiation and
  `torch.func` treat results as constants.

cukern's functions also take tensors without this module. With it, `torch.compile` keeps a call such as
`cukern.moe_fused_gate(...)` in the graph as an operator.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from cukern.runtime import check
from cukern.runtime.describe import Result
from cukern.runtime.op import OPERATORS, Operator
from cukern.runtime.packages import missing
from cukern.runtime.schema import Schema, schemas

try:
    import torch
except ModuleNotFoundError as error:
    raise missing(error, __name__, "torch") from None

#: The part of torch.compile that captures graphs.
_COMPILER = "torch._dynamo"

# torch removes the operators when the library object is deleted, so keep the object when this module is reloaded.
if "_library" not in globals():
    _library = torch.library.Library("cukern", "FRAGMENT")


def _draws(function: Callable[..., Any]) -> bool:
    """Return whether a function may use random numbers, so that torch must not merge equal calls."""
    return "generator" in inspect.signature(function).parameters


def _keep_draws_apart(packets: Sequence[Any]) -> None:
    """Prevent torch from merging equal calls of samplers in training graphs.

    In training graphs torch ignores operator tags and uses a list of operators, so add the samplers to this list.
    """
    try:
        from torch._functorch.compile_utils import rand_ops
    except ImportError:
        warnings.warn("this PyTorch may merge two equal draws of cukern in a training graph", RuntimeWarning, 2)
    else:
        rand_ops.extend(packets)


def _check_gradients(schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            names = (argument.name for argument in schema.arguments)
            name = next(n for n, v in (*zip(names, args, strict=False), *kwargs.items()) if v is value)
            check.refuse_gradient(name)


def _written(schema: Schema) -> list[tuple[int, str]]:
    return [(i, argument.name) for i, argument in enumerate(schema.arguments) if argument.is_written]


def _empty(like: torch.Tensor, result: Any) -> Any:
    """Convert a `Result` to an empty tensor on the device of `like`; return other values unchanged."""
    if not isinstance(result, Result):
        return result
    shape, dtype = result.shape, getattr(torch, result.dtype)
    if result.transposed:
        return like.new_empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).swapaxes(-1, -2)
    return like.new_empty(shape, dtype=dtype)


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _register(function: Callable[..., Any], schema: Schema, declared: Operator, out_names: Sequence[str] = ()) -> None:
    """Register an operator that calls `function`. Its arguments `out_names` become the function's argument `out`."""
    tags = [torch.Tag.pt2_compliant_tag]
    if _draws(function):
        tags.append(torch.Tag.nondeterministic_seeded)
    _library.define(str(schema), tags=tags)
    written = _written(schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _check_gradients(schema, args, kwargs)
        return function(*args, **kwargs)

    def write(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _check_gradients(schema, args, kwargs)
        tensors = [args[i] if i < len(args) else kwargs.get(name) for i, name in written]
        if out_names:
            kwargs["out"] = _one_or_all([kwargs.pop(name) for name in out_names])
        returned = function(*args, **kwargs)
        # Tell autograd about the writes, because it may have saved these tensors for a backward.
        for tensor in tensors:
            if tensor is not None:
                torch.autograd.graph.increment_version(tensor)
        return returned if schema.results else None

    def fake(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _check_gradients(schema, args, kwargs)
        if not schema.results:
            return None
        assert declared.results is not None
        like = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        found = dict(zip(declared.names, _as_results(declared.results(*args, **kwargs)), strict=True))
        return _one_or_all([_empty(like, found[x.name]) for x in schema.results])

    for device in ("CPU", "CUDA"):
        _library.impl(schema.name, write if written else call, device)
    # Skip Autograd's default kernel for operators without a backward, because it spends time on a warning.
    _library.impl(schema.name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"cukern::{schema.name}", fake, lib=_library)


def _keep_in_graph(declared: Operator, packet: Any, out_names: dict[str, list[str]]) -> None:
    """Make torch.compile replace calls of a function by calls of its operator.

    `out_names` maps each overload ("" is the default) to the names of the results in `out`.
    """
    function, default = declared.function, next(schemas(declared.function, declared.names))
    written, returns = _written(default), bool(default.results)
    returns_nothing = function.__annotations__.get("return") == "None"
    parameters = [*inspect.signature(function).parameters]
    # Indices of arguments that are numbers in the default overload, and tensors in another one.
    numbers = [(parameters.index(name), name) for name in out_names if name in parameters]
    functional = getattr(packet, "functional", None)

    def traceable(*args: Any, **kwargs: Any) -> Any:
        flag = next((name for name in out_names if name and kwargs.pop(f"return_{name}", False)), "")
        for i, name in numbers:
            if isinstance(args[i] if i < len(args) else kwargs.get(name), torch.Tensor):
                flag = name
        out = kwargs.pop("out", None) if out_names else None
        if out is not None:
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            overload = getattr(packet, f"{flag}_out" if flag else "out")
            overload(*args, **kwargs, **dict(zip(out_names[flag], tensors, strict=True)))
            return out
        if flag:
            return getattr(packet, flag)(*args, **kwargs)
        if functional is not None and all(kwargs.get(name) is None for _, name in written):
            for _, name in written:
                kwargs.pop(name, None)
            return functional(*args, **kwargs)
        returned = packet.default(*args, **kwargs)
        if written and not returns and not returns_nothing:
            return _one_or_all([args[i] if i < len(args) else kwargs[name] for i, name in written])
        return returned

    torch.compiler.substitute_in_graph(function)(traceable)


def _as_results(found: Any) -> list[Any]:
    return [found] if isinstance(found, Result) else list(found)


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import hook that calls `function` right after the import of module `name`."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((x for x in (finder.find_spec(fullname, path, target) for finder in others) if x), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self.function()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _register_all() -> None:
    new = {name: entry for name, entry in OPERATORS.items() if not hasattr(torch.ops.cukern, name)}
    out_names = {name: _register_op(declared) for name, declared in new.items()}

    def keep_in_graph() -> None:
        for name, declared in new.items():
            _keep_in_graph(declared, getattr(torch.ops.cukern, name), out_names[name])
        _keep_draws_apart([getattr(torch.ops.cukern, name) for name, x in new.items() if _draws(x.function)])

    # Importing the compiler takes more than a second, so wait until torch.compile or torch.export imports it.
    if sys.modules.get(_COMPILER) is not None:
        keep_in_graph()
    elif new:
        sys.meta_path.insert(0, _AfterImport(_COMPILER, keep_in_graph))


def _register_op(declared: Operator) -> dict[str, list[str]]:
    """Register an operator with its overloads. Return, for each overload, the names of the results in `out`."""
    out_names = {}
    function = declared.function
    parameters = inspect.signature(function).parameters
    for schema in schemas(function, declared.names):
        flag = f"return_{schema.overload}"
        call = functools.partial(function, **{flag: True}) if flag in parameters else function
        _register(call, schema, declared)
        if schema.results and "out" in parameters:
            out_names[schema.overload] = [x.name for x in schema.results]
            _register(call, schema.out(), declared, out_names[schema.overload])
        if functional := schema.functional():
            _register(call, functional, declared)
    return out_names


_register_all()
