"""The changes that `enable` makes to a model, and its report on them."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

#: The attribute of a model that holds its `State`.
ATTRIBUTE = "_cukern"
#: The name of this package's functions in the interfaces of transformers.
NAME = "cukern"


@dataclass(frozen=True)
class Line:
    """A part of the model, and how it runs."""

    part: str  # such as "experts"
    what: str  # the class of the modules
    count: int
    how: str  # the ops that run it, or why it was not replaced


@dataclass
class Report:
    """The parts that `enable` has replaced, and the other parts with the reason. `str` gives a table."""

    model: str
    replaced: list[Line] = field(default_factory=list)
    kept: list[Line] = field(default_factory=list)

    def parts(self) -> set[str]:
        """Return the parts with at least one replaced module."""
        return {line.part for line in self.replaced}

    def __str__(self) -> str:
        lines = [f"{self.model} on cukern"]
        for title, rows in (("replaced", self.replaced), ("as it was", self.kept)):
            lines += [f"  {title}"] * bool(rows)
            lines += [f"    {x.part:9}  {f'{x.count} x ' if x.count > 1 else ''}{x.what}: {x.how}" for x in rows]
        return "\n".join(lines)


class State:
    """The changes of a model, so that they can be undone."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.undo: list[Callable[[], None]] = []
        self.sessions: dict[Any, Any] = {}  # the sessions of `generate`, by their sizes
        self.places = 0  # a hash of the addresses of the weights that the sessions use

    def replace_forward(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the forward of one module, not of its class."""
        before = module.__dict__.get("forward")
        module.forward = types.MethodType(forward, module)

        def restore() -> None:
            del module.forward
            if before is not None:
                module.forward = before

        self.undo.append(restore)

    def restore(self) -> None:
        """Undo all changes, the last one first."""
        while self.undo:
            self.undo.pop()()
        self.sessions.clear()


class _Gathered(dict[tuple[str, str, str], int]):
    """The lines of a report, with the number of modules that each line describes."""

    def add(self, part: str, module: Any, how: str) -> None:
        name = module if isinstance(module, str) else type(module).__name__
        key = part, name, how
        self[key] = self.get(key, 0) + 1

    def lines(self) -> list[Line]:
        return [Line(part, name, count, how) for (part, name, how), count in self.items()]


class Notes:
    """The lines of a report under construction."""

    def __init__(self) -> None:
        self.replaced, self.kept = _Gathered(), _Gathered()


# --- conditions for the kernels -------------------------------------------------------------------------


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether a gradient may be needed. The kernels have none, so the model's own code must run then."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_traced() -> bool:
    """Return whether the host must not read from the device: during torch.compile tracing or CUDA graph capture."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Active(threading.local):
    """The session that this thread's `generate` runs on."""

    session: Any = None


active = _Active()


@contextlib.contextmanager
def running(session: Any) -> Iterator[None]:
    """Make `session` active in this context.

    In the context, sums may overwrite their terms, because no other code sees the hidden states.
    """
    before, active.session = active.session, session
    try:
        yield
    finally:
        active.session = before


def copied(module: torch.nn.Module) -> torch.nn.Module:
    """Return a float32 CPU copy of a small module with random numbers, for comparison with a formula."""
    import copy

    generator = torch.Generator().manual_seed(1)
    state, module.__dict__ = module.__dict__, {k: v for k, v in module.__dict__.items() if k != "forward"}
    try:
        made = copy.deepcopy(module)
    finally:
        module.__dict__ = state
    made = made.to("cpu").float().requires_grad_(False)
    for x in (*made.parameters(), *made.buffers()):
        if x.is_floating_point():
            x.copy_(torch.randn(x.shape, generator=generator) * 0.5)
    return made


def simple_attributes(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return a key with all that the formula of a module may depend on.

    These are its class, numbers, functions, configuration, shapes and children.
    """
    plain = (str, int, float, bool, type(None), types.FunctionType, types.BuiltinFunctionType)
    own = {k: v for k, v in vars(module).items() if isinstance(v, plain) and k not in ("layer_idx", "forward")}
    shapes = {k: tuple(x.shape) for k, x in [*module.named_parameters(), *module.named_buffers()]}
    children = tuple((name, simple_attributes(x)) for name, x in module.named_children())
    config = id(vars(module).get("config"))
    return type(module), tuple(sorted(own.items(), key=lambda x: x[0])), config, tuple(sorted(shapes.items())), children
