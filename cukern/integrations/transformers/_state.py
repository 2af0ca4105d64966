"""The changes that `enable` makes to a model, and its report on them."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

#: Dtypes of the models that `enable` changes.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ATTRIBUTE = "_cukern"
NAME = "cukern"


@dataclass(frozen=True)
class Line:
    """A line of the report: modules of one class, and how they run."""

    part: str  # a kind of modules, such as "experts"
    what: str
    count: int
    how: str  # the ops that run the modules, or the reason why they were not replaced


@dataclass
class Report:
    """The modules that `enable` has replaced, and the reasons why it kept the others. `str(report)` is a table."""

    model: str
    replaced: list[Line] = field(default_factory=list)
    kept: list[Line] = field(default_factory=list)

    def parts(self) -> set[str]:
        """Return the kinds ("experts", "norms", ...) of the replaced modules."""
        return {line.part for line in self.replaced}

    def __str__(self) -> str:
        lines = [f"{self.model} on cukern"]
        for title, rows in (("replaced", self.replaced), ("as it was", self.kept)):
            lines += [f"  {title}"] * bool(rows)
            lines += [f"    {x.part:9}  {f'{x.count} x ' if x.count > 1 else ''}{x.what}: {x.how}" for x in rows]
        return "\n".join(lines)


class State:
    """The changes that `disable` undoes."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.undo: list[Callable[[], None]] = []
        self.sessions: dict[Any, Any] = {}  # of `generate`, keyed by sizes and sampling parameters
        self.weights_hash = 0  # a hash of the weights' addresses in the sessions

    def replace_forward(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        """Replace the `forward` of one module, not of its class."""
        before = module.__dict__.get("forward")
        module.forward = types.MethodType(forward, module)

        def restore() -> None:
            del module.forward
            if before is not None:
                module.forward = before

        self.undo.append(restore)

    def restore(self) -> None:
        while self.undo:
            self.undo.pop()()
        self.sessions.clear()


def report_of(model: Any) -> Report | None:
    """Return the report of an enabled model; None for a model that is not enabled."""
    known: State | None = model.__dict__.get(ATTRIBUTE)
    return None if known is None else known.report


class _LineCounts(dict[tuple[str, str, str], int]):
    def add(self, part: str, module: Any, how: str) -> None:
        name = module if isinstance(module, str) else type(module).__name__
        key = part, name, how
        self[key] = self.get(key, 0) + 1

    def lines(self) -> list[Line]:
        return [Line(part, name, count, how) for (part, name, how), count in self.items()]


class Notes:
    def __init__(self) -> None:
        self.replaced, self.kept = _LineCounts(), _LineCounts()


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd may need a gradient. The kernels have no backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def is_traced() -> bool:
    """Return whether the host cannot read from the device, because of torch.compile or graph capture."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Active(threading.local):
    """The session of the `generate` call in this thread."""

    session: Any = None


active = _Active()


@contextlib.contextmanager
def running(session: Any) -> Iterator[None]:
    """Make `session` active. Kernels may then overwrite hidden states, because no other code reads them."""
    before, active.session = active.session, session
    try:
        yield
    finally:
        active.session = before


def randomized_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a float32 copy of a small module on the CPU, with random parameters."""
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
    """Return the attributes that a module's formula may depend on, as a key for the cached formula."""
    plain = (str, int, float, bool, type(None), types.FunctionType, types.BuiltinFunctionType)
    own = {k: v for k, v in vars(module).items() if isinstance(v, plain) and k not in ("layer_idx", "forward")}
    shapes = {k: tuple(x.shape) for k, x in [*module.named_parameters(), *module.named_buffers()]}
    children = tuple((name, simple_attributes(x)) for name, x in module.named_children())
    config = id(vars(module).get("config"))
    return type(module), tuple(sorted(own.items(), key=lambda x: x[0])), config, tuple(sorted(shapes.items())), children
