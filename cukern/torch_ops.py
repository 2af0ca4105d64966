"""PyTorch operators: `import cukern.torch_ops` registers the functions of cukern as `torch.ops.cukern.*`.

An operator is its function where the dispatcher can see it, for `torch.compile(fullgraph=True)`, `torch.export` and
whoever looks an operator up by name: the same arguments, results and errors, on CUDA tensors and, through the NumPy
twin, on CPU tensors. What differs:

- An argument that is an array must be a tensor, also where the function takes a number as well.
- A function with `out=` has a second overload instead, which takes its results one by one and returns nothing:
  `torch.ops.cukern.moe_fused_gate.out(..., weights=weights, ids=ids)`. A function that writes into its arguments
  returns nothing either.
- There is no backward. A tensor that requires grad raises RuntimeError where grad mode is on, at the call or as it is
  traced, since without its gradient a model would train wrongly; `torch.no_grad()` or `.detach()` says that none
  is wanted. To forward-mode differentiation and the transforms of `torch.func` the results are constants.

The functions take tensors without this module, but only with it does `torch.compile` keep a call of one, such as
`cukern.moe_fused_gate(...)`, in the graph: as its operator.

A module of `cukern.ops` declares its operators in `TORCH_OPS`: for each schema a function of the same arguments that
gives `(like, shape, dtype)` for each result, with `like` a tensor on its device; None where nothing is returned.
The results have names in the schema, which `.out` takes over.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

import torch

from cukern import ops
from cukern.runtime import check

# The operators live as long as this object, and a reload of the module must leave them to those who hold them.
if "_library" not in globals():
    _library = torch.library.Library("cukern", "FRAGMENT")


def _check_gradients(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            names = (argument.name for argument in operator._schema.arguments)
            name = next(n for n, v in (*zip(names, args, strict=False), *kwargs.items()) if v is value)
            wanted = "a tensor that does not require grad (there is no backward: use torch.no_grad() or .detach())"
            check.fail(name, wanted, "one that does", RuntimeError)


def _out_schema(schema: str) -> str:
    """The schema of the overload that takes the results of `schema` as its last arguments."""
    name, rest = schema.split("(", 1)
    arguments, results = rest.rsplit(") -> ", 1)
    names = [result.split()[1] for result in results.strip("()").split(",")]
    written = ", ".join(f"Tensor({letter}!) {name}" for letter, name in zip(ascii_lowercase, names, strict=False))
    return f"{name}.out({arguments}, {'' if '*' in arguments else '*, '}{written}) -> ()"


def _written(operator: Any) -> list[tuple[int, str]]:
    """Position and name of each argument that an operator writes."""
    arguments = enumerate(operator._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


def _register(function: Callable[..., Any], schema: str, results: Callable[..., Any] | None) -> None:
    """Make `schema` an operator that calls `function`."""
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.cukern, packet), overload or "default")
    written = _written(operator)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _check_gradients(operator, args, kwargs)
        return function(*args, **kwargs)

    def write(*args: Any, **kwargs: Any) -> None:
        if torch.is_grad_enabled():
            _check_gradients(operator, args, kwargs)
        if overload == "out":
            tensors = [kwargs.pop(name) for _, name in written]
            function(*args, **kwargs, out=_one_or_all(tensors))
        else:
            tensors = [args[i] for i, _ in written]
            function(*args, **kwargs)
        # Autograd may have saved what was in them.
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)

    def fake(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _check_gradients(operator, args, kwargs)
        if results is None:
            return None
        made = [like.new_empty(shape, dtype=getattr(torch, dtype)) for like, shape, dtype in results(*args, **kwargs)]
        return _one_or_all(made)

    for device in ("CPU", "CUDA"):
        _library.impl(name, write if written else call, device)
    # Autograd's default for an operator without a backward costs time to warn of what has been refused.
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"cukern::{name}", fake, lib=_library)


def _keep_in_graph(function: Callable[..., Any], packet: Any) -> None:
    """Let torch.compile take a call of `function` as one of its operator."""
    written = _written(packet.default)
    out_names = [name for _, name in _written(packet.out)] if "out" in packet.overloads() else []

    def traceable(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if out is not None:
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            packet.out(*args, **kwargs, **dict(zip(out_names, tensors, strict=True)))
            return out
        returned = packet.default(*args, **kwargs)
        if written:
            return _one_or_all([args[i] if i < len(args) else kwargs[name] for i, name in written])
        return returned

    torch.compiler.substitute_in_graph(function)(traceable)


def _register_all() -> None:
    for module in list(vars(ops).values()):
        for schema, results in getattr(module, "TORCH_OPS", {}).items():
            name = schema.split("(", 1)[0]
            if hasattr(torch.ops.cukern, name):
                continue  # this module was imported before
            function = getattr(module, name)
            _register(function, schema, results)
            if "out" in inspect.signature(function).parameters:
                _register(function, _out_schema(schema), None)
            _keep_in_graph(function, getattr(torch.ops.cukern, name))


_register_all()
