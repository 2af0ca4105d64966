"""Replace the RMS norms of a model, and fuse each norm with the residual sum before it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

import cukern
from cukern.integrations.transformers._deferred import Sum, computed
from cukern.integrations.transformers._regimes import LARGE_HALVES, REGIMES, difference
from cukern.integrations.transformers._rewrite import MANY_ARGUMENTS, only_argument, rewritten, takes_one_argument
from cukern.integrations.transformers._state import (
    DTYPES,
    Notes,
    State,
    active,
    randomized_copy,
    simple_attributes,
    wants_gradient,
)

#: The attribute of a norm that holds (epsilon, weight_offset).
NORM_CONSTANTS = "_cukern_norm"


def _supports(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    if x.dtype not in DTYPES or (weight is not None and weight.dtype not in (x.dtype, torch.float32)):
        return False
    return x.stride(-1) == 1 and (x.dim() <= 3 or x.is_contiguous()) and not wants_gradient(x, weight)


def _detached(weight: torch.Tensor | None) -> torch.Tensor | None:
    return weight.detach() if weight is not None and torch.is_grad_enabled() else weight


def norm_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a norm on the kernel. With further arguments, such as a gate, run the norm's own `forward`."""
    hidden_states = only_argument(args, kwargs)
    if isinstance(hidden_states, Sum):
        return entry_norm(self, hidden_states)[0]
    weight = getattr(self, "weight", None)
    if hidden_states is None or not _supports(computed(hidden_states), weight):
        computed_kwargs = {name: computed(x) for name, x in kwargs.items()}
        return type(self).forward(self, *map(computed, args), **computed_kwargs)  # type: ignore[no-any-return]
    epsilon, offset = self.__dict__[NORM_CONSTANTS]
    return cukern.rms_norm(computed(hidden_states), _detached(weight), epsilon, weight_offset=offset)  # type: ignore[return-value]


def add_norm(norm: Any, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_states, residual = computed(hidden_states), computed(residual)
    weight, constants = getattr(norm, "weight", None), norm.__dict__.get(NORM_CONSTANTS)
    fits = constants is not None and hidden_states.dtype == residual.dtype and hidden_states.shape == residual.shape
    # The kernel overwrites both tensors, so it runs only in a session, where no other code reads them.
    if active.session is not None and fits and _supports(hidden_states, weight) and _supports(residual, weight):
        return cukern.fused_add_rms_norm(  # type: ignore[return-value]
            hidden_states, residual, _detached(weight), constants[0], weight_offset=constants[1]
        )
    residual = residual + hidden_states
    return norm(residual), residual


def entry_norm(norm: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return norm(hidden_states) and hidden_states. One kernel computes a deferred sum and its norm."""
    if isinstance(hidden_states, Sum) and (terms := hidden_states.terms()) is not None:
        normed, made = add_norm(norm, *terms)
        hidden_states.store(made)
        return normed, made
    hidden_states = computed(hidden_states)
    return norm(hidden_states), hidden_states


def last_sum(hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return hidden_states + residual, which the next norm's kernel computes during `generate`."""
    hidden_states, residual = computed(hidden_states), computed(residual)
    same_type = hidden_states.dtype == residual.dtype and hidden_states.shape == residual.shape
    if same_type and not torch.compiler.is_compiling() and active.session is not None:
        return Sum.of(hidden_states, residual)
    return residual + hidden_states


@torch.no_grad()
def _constants_of(module: Any) -> tuple[tuple[float, float] | None, str]:
    """Find an RMS norm's (epsilon, weight_offset) on random inputs. Return (constants, "") or (None, reason)."""
    unknown = "its formula is not that of an RMS norm alone"
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, (int, float)) or (weight is not None and weight.dim() != 1):
        return None, unknown
    probes = {dtype: randomized_copy(module).to(dtype) for dtype in DTYPES}
    width = 24 if weight is None else len(weight)
    shapes: dict[str, tuple[int, ...]] = {"": (5, width), " in four dimensions": (2, 3, 1, width)}
    if weight is None:
        shapes[" of 7 numbers"] = (3, 7)

    def original(rows: torch.Tensor) -> Any:
        return type(module).forward(probes[rows.dtype], rows)

    found: list[str] = []
    for offset in (0.0, 1.0):

        def kernel(rows: torch.Tensor, offset: float = offset) -> torch.Tensor:
            weight = getattr(probes[rows.dtype], "weight", None)
            return cukern.rms_norm(rows, weight, float(epsilon), weight_offset=offset)  # type: ignore[return-value]

        regime = difference(original, kernel, shapes, regimes=(*REGIMES, LARGE_HALVES))
        if regime == "":
            return (float(epsilon), offset), ""
        found += [f"it differs from rms_norm for {regime}"] * (regime is not None)
    return None, found[0] if found else unknown


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    known: dict[Any, tuple[tuple[float, float] | None, str]] = {}
    for module in model.modules():
        if "RMSNorm" not in type(module).__name__ or next(module.children(), None) is not None:
            continue
        if "forward" in module.__dict__:
            notes.kept.add("norms", module, "its forward was replaced before")
            continue
        if not takes_one_argument(module):
            notes.kept.add("norms", module, MANY_ARGUMENTS)
            continue
        key = simple_attributes(module)
        if key not in known:
            known[key] = _constants_of(module)
        constants, why_not = known[key]
        if constants is None:
            notes.kept.add("norms", module, why_not)
            continue
        module.__dict__[NORM_CONSTANTS] = constants
        state.undo.append(lambda module=module: module.__dict__.pop(NORM_CONSTANTS, None))  # type: ignore[misc]
        state.replace_forward(module, norm_forward)
        notes.replaced.add("norms", module, f"rms_norm{', of weights that are stored minus 1' * bool(constants[1])}")


def _is(statement: ast.stmt, text: str) -> bool:
    return ast.dump(statement) == ast.dump(ast.parse(text).body[0])


def _norm_in(statement: ast.stmt) -> str | None:
    """Return the name of the norm in `hidden_states = self.NAME(hidden_states)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name("hidden_states")],
            value=ast.Call(ast.Attribute(ast.Name("self"), name), [ast.Name("hidden_states")], []),
        ):
            return name
    return None


def _replaced(text: str, at: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.parse(text).body[0], at)


def _fused(body: list[ast.stmt]) -> tuple[list[ast.stmt], list[str]]:
    """Fuse each residual sum with the norm after it. Return the new statements, and the names of these norms.

    A layer's last sum is fused with the next layer's first norm.
    """
    added, kept, made = "hidden_states = residual + hidden_states", "residual = hidden_states", list(body)
    names: list[str] = []
    for i in range(len(body) - 2):
        name = _norm_in(body[i + 2])
        if name is not None and _is(body[i], added) and _is(body[i + 1], kept):
            text = f"hidden_states, residual = _cukern_add_norm(self.{name}, hidden_states, residual)"
            made[i : i + 3] = [_replaced(text, body[i]), ast.Pass(), ast.Pass()]
            names.append(name)
    begin = next((i for i, x in enumerate(body) if not isinstance(x, ast.Expr)), 0)
    name = _norm_in(body[begin + 1]) if begin + 1 < len(body) and _is(body[begin], kept) else None
    if name is not None:
        text = f"hidden_states, residual = _cukern_entry_norm(self.{name}, hidden_states)"
        made[begin : begin + 2] = [_replaced(text, body[begin]), ast.Pass()]
        names.append(name)
    if len(body) > 1 and _is(body[-2], added) and ast.unparse(body[-1]) == "return hidden_states":
        made[-2] = _replaced("hidden_states = _cukern_last_sum(hidden_states, residual)", body[-2])
    return [ast.copy_location(x, body[0]) for x in made if not isinstance(x, ast.Pass)], names


def _rewritten(module: Any) -> tuple[Callable[..., Any], list[str]] | None:
    """Return a copy of `forward` with fused sums, and the names of their norms; None: no such sum."""
    names: list[str] = []
    functions = {"_cukern_add_norm": add_norm, "_cukern_entry_norm": entry_norm, "_cukern_last_sum": last_sum}

    def change(body: list[ast.stmt]) -> list[ast.stmt]:
        made, found = _fused(body)
        names.extend(found)
        return made

    made = rewritten(module, functions, change)
    return None if made is None or not names else (made, names)


def enable_sums(model: torch.nn.Module, state: State, notes: Notes) -> None:
    known: dict[Any, Any] = {}
    for module in model.modules():
        forward = type(module).forward
        if not type(module).__name__.endswith(("Layer", "Block")) or "forward" in module.__dict__:
            continue
        if forward not in known:
            known[forward] = _rewritten(module)
        if known[forward] is None:
            continue
        made, names = known[forward]
        if not all(NORM_CONSTANTS in getattr(module, name).__dict__ for name in names):
            notes.kept.add("sums", module, "their norm is not replaced")
            continue
        state.replace_forward(module, made)
        notes.replaced.add("sums", module, "fused_add_rms_norm, in generate of this package")
