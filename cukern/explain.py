"""`cukern.explain`: describe a call without running it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cukern.runtime import arrays, check, compile, gpu, template
from cukern.runtime.cuda import runtime
from cukern.runtime.describe import Array
from cukern.runtime.each import Each
from cukern.runtime.nvrtc import Resources, resources
from cukern.runtime.op import OPERATORS, OPS, Op
from cukern.runtime.plan import Trace, Workspace, current
from cukern.runtime.schema import schemas

_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
WIDTH, _INDENT = 88, 14


class Ceilings(NamedTuple):
    """Limits of a GPU, measured by `benchmarks/harness.py`."""

    gpu: str
    kernel_us: float  # an empty kernel
    copy_tb_s: float
    matmul_tflop_s: float | None  # 16-bit dtypes

    def floor(self, bytes: float, flops: float) -> tuple[float, str]:
        """Return the minimum microseconds to move `bytes` and compute `flops`, and the limiting rate."""
        copied = f"{self.copy_tb_s:.2f} TB/s, a copy on an {self.gpu}"
        floors = [(self.kernel_us, f"an empty kernel on an {self.gpu}"), (bytes / self.copy_tb_s / 1e6, copied)]
        if flops and self.matmul_tflop_s:
            product = f"{self.matmul_tflop_s:.0f} TFLOP/s, a large 16-bit product on an {self.gpu}"
            floors.append((flops / self.matmul_tflop_s / 1e6, product))
        return max(floors)


#: The ceilings for an installed package, which has no benchmark results.
CEILINGS = {"NVIDIA H200": Ceilings("NVIDIA H200", 0.53, 4.26, 801.0)}
#: Maps an architecture to the GPU whose ceilings represent it.
_STANDS_FOR = {"90a": "NVIDIA H200"}


class Launch(NamedTuple):
    """A launch of a kernel, or a memset, which has no grid."""

    kernel: str  # with template arguments by name
    why: str = ""  # the rule that chose the kernel and template arguments, with this call's sizes
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared_bytes: int = 0
    fields: Mapping[str, Any] = {}  # of the parameter struct, without null pointers
    resources: Resources | None = None  # None before compilation

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "kernel", self.kernel
        if not self.grid:
            return
        yield "why", self.why
        grid, block = (" x ".join(f"{n:,}" for n in _trimmed(sizes)) for sizes in (self.grid, self.block))
        shared = f", {self.shared_bytes:,} bytes of dynamic shared memory" if self.shared_bytes else ""
        yield "grid", f"{grid} block{'s' * (math.prod(self.grid) > 1)} of {block} threads{shared}"
        yield "fields", "  ".join(f"{name}={value}" for name, value in self.fields.items())
        if self.resources:
            registers, spilled = self.resources
            yield "registers", f"{registers} of each thread, {f'{spilled} bytes spilled' if spilled else 'no spills'}"
        else:
            yield "registers", "not known before it is compiled"


class Explanation(NamedTuple):
    """The description of a call; `str(explanation)` is its text.

    For host arrays `gpu` is None, and `twin` names the NumPy reference that runs. `bytes` and `flops` are the least
    that the op must move and compute. At the GPU's measured rates they take `floor_us` microseconds. `floor_by` names
    the limiting rate, or the card whose rates are unknown. If `moves_all` is True, the op reports no bytes, and `bytes`
    is the size of all arguments and results.
    """

    op: str
    gpu: gpu.Gpu | None = None
    twin: str = ""
    launches: tuple[Launch, ...] = ()
    results: tuple[str, ...] = ()
    workspace_bytes: int = 0
    bytes: int = 0
    moves_all: bool = False
    flops: int = 0
    floor_us: float | None = None
    floor_by: str = ""

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """Return the text in lines of `width` characters, or more for a longer word."""
        if self.gpu is None:
            words = f'the NumPy reference, {self.twin} (arch="90a" and the like ask what a GPU would do)'
            return f"{self.op} on arrays in host memory\n{_wrapped('runs', words, width)}"
        lines = []
        for i, launch in enumerate(self.launches):
            if i:
                lines.append(("", ""))
            lines += launch.lines()
        if not self.launches:
            lines.append(("kernel", "none, there is nothing to do"))
        if len(self.launches) > 1:
            lines.append(("", ""))
        lines += [("result" if i == 0 else "", result) for i, result in enumerate(self.results)]
        if self.workspace_bytes:
            lines.append(("workspace", _bytes(self.workspace_bytes)))
        lines.append(("moves", f"{_bytes(self.bytes)}{', each argument and result once' if self.moves_all else ''}"))
        if self.flops:
            lines.append(("computes", f"{self.flops / 1e9:,.4g} GFLOP of 16 bits, or what takes as long"))
        floor = f"not known: no rates of {self.floor_by} are measured, only of {', '.join(CEILINGS)}"
        if self.floor_us is not None:
            floor = f"{self.floor_us:,.3g} us, by {self.floor_by}"
        if self.launches:
            lines.append(("floor", floor))
        title = f"{self.op} on sm_{self.gpu.arch} with {self.gpu.multiprocessors} multiprocessors"
        return "\n".join([title, *(_wrapped(word, text, width) for word, text in lines)])


def _wrapped(word: str, text: str, width: int) -> str:
    first, rest = f"  {word:<{_INDENT - 2}}", " " * _INDENT
    wrapper = textwrap.TextWrapper(width, first, rest, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def _trimmed(sizes: tuple[int, ...]) -> tuple[int, ...]:
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes = sizes[:-1]
    return sizes


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


def explain(function: Callable[..., Any], /, *args: Any, arch: str | None = None, **kwargs: Any) -> Explanation:
    """Describe what a call would launch, allocate and move, and why. Nothing runs.

    Args:
        function: a public function of cukern, such as `cukern.moe_gemm`.
        args: the arguments of the call.
        arch: plan for this GPU: an architecture ("90a", "sm_90a", "90") or a card ("H200", "L40S", "A100"). The machine
            needs no GPU, and the arrays may be in host memory. None: plan for the arrays' device.
        kwargs: keyword arguments of the call.

    Returns:
        An `Explanation`, which can be printed: the kernels with template arguments, grid, block, parameter fields and
        registers (if compiled), the allocations, and the floor, the minimum time at the rates measured on a card. The
        text names the card. If `arch` is an architecture, this card is the one on which the benchmarks ran.

    Raises:
        TypeError: `function` is not an op of cukern.
        ValueError: an unknown architecture or card.
        The function's own errors for these arguments.
    """
    name = getattr(function, "__name__", "")
    on = None if arch is None else gpu.of_arch(arch)
    # A function that changes a state object has `launched_op`, which returns the op that it calls, and the op's
    # arguments.
    if told := getattr(function, "launched_op", None):
        function, args, kwargs = told(on, *args, **kwargs)
    elif not name or function not in [getattr(OPS.get(name), "call", None), OPERATORS.get(name, (None,))[0]]:
        check.fail("function", "a function of cukern that launches kernels", name or repr(function), TypeError)
    call = _Call(function, args, kwargs)
    trace, returned = call.trace(on)
    if trace.is_host_call:
        _, *parts = function.__module__.split(".")
        stem = parts[1] if parts[0] == "ops" else parts[0]
        return Explanation(name, twin=f"cukern.reference.{stem.strip('_')}.{name}")
    found = trace.place.gpu
    assert found is not None
    notes = {id(step.notes): step.notes for step in trace.steps}
    own = next(iter(notes.values())) if len(notes) == 1 else {}
    names = call.names_of(trace, returned)
    moved = own["bytes"] if "bytes" in own else call.bytes_of(trace, returned) if trace.steps else 0
    flops = sum(each.get("flops", 0) for each in notes.values())
    if arch:
        asked = arch.strip().upper().removeprefix("NVIDIA ")
        card = f"NVIDIA {asked}" if asked in gpu.CARDS else _STANDS_FOR.get(found.arch)
    else:
        card = runtime.getDeviceProperties(trace.place.device)["name"].decode()
    ceilings = _ceilings(card, name)
    floor = ceilings.floor(moved, flops) if ceilings else (None, card or f"any card of sm_{found.arch}")
    return Explanation(
        name,
        found,
        launches=tuple(_launch(step, found.arch, names) for step in trace.steps),
        results=tuple(f"{names[x.source]}: {x.dtype} {list(x.shape)}" for x in _returned(returned)),
        workspace_bytes=Workspace(trace, returned).bytes,
        bytes=moved,
        moves_all=bool(trace.steps) and "bytes" not in own,
        flops=flops,
        floor_us=floor[0],
        floor_by=floor[1],
    )


class _Call:
    """A call of an op or of a function that calls ops, with descriptions instead of arrays."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [*inspect.signature(function).parameters]
        self.function = function
        self.count = len(args)
        self.values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or {*names[: len(args)]} & {*kwargs}:
            function(*args, **kwargs)  # raises the TypeError for wrong arguments
        first = next((x for x in _flat(self.values) if hasattr(x, "__dlpack__")), None)
        if first is not None and arrays.library_of(first) is None:
            self.values = {name: arrays.enter_all(name, value) for name, value in self.values.items()}
        self.arrays: dict[str, Any] = {}
        for name, value in self.values.items():
            _replaced(value, name, lambda path, array: self.arrays.setdefault(path, array))

    def trace(self, on: gpu.Gpu | None) -> tuple[Trace, Any]:
        """Record the call for a GPU. Return the trace and the call's result."""

        def plan(**described: Any) -> Any:
            values = {
                name: _replaced(value, name, lambda path, _: described[path]) for name, value in self.values.items()
            }
            positional = [values.pop(name) for name in [*values][: self.count]]
            try:
                return self.function(*positional, **values)
            except TypeError:
                if current().is_host_call:  # the first op returned None for host arrays, so the next one raised
                    return None
                raise

        op = Op(plan, None)
        trace, returned, _ = op.record(op.kind_of((), self.arrays), tuple(self.arrays.values()), on)
        return trace, returned

    def names_of(self, trace: Trace, returned: Any) -> dict[int, str]:
        names = dict(enumerate(self.arrays))
        found = list(_returned(returned))
        called = _result_names(self.function.__name__, len(found)) or [f"result {i}" for i in range(len(found))]
        for array, name in zip(found, called, strict=True):
            names.setdefault(array.source, name)
        temporary = Workspace(trace, returned).temporary
        for n, i in enumerate(temporary):
            names[trace.first_made + i] = "workspace" if len(temporary) == 1 else f"workspace[{n}]"
        return names

    def bytes_of(self, trace: Trace, returned: Any) -> int:
        given = [(tuple(x.shape), _library(x).dtype(x)) for x in self.arrays.values()]
        made = [(x.shape, x.dtype) for x in _returned(returned) if x.source >= trace.first_made]
        return sum(_size(*each) for each in [*given, *made])


def _flat(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _replaced(value: Any, path: str, change: Callable[[str, Any], Any]) -> Any:
    """Replace each array in `value`, also in lists and dataclasses, by `change(path, array)`."""
    if arrays.library_of(value) is not None:
        return change(path, value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(x, f"{path}[{i}]", change) for i, x in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: _replaced(x, f"{path}.{name}", change) for name, x in own.items()}
        different = {name: x for name, x in changed.items() if x is not own[name]}
        return dataclasses.replace(value, **different) if different else value
    return value


def _library(array: Any) -> arrays.Library:
    library = arrays.library_of(array)
    assert library is not None
    return library


def _size(shape: Iterable[Any], dtype: str) -> int:
    return math.prod(shape) * arrays.ITEM_SIZE[dtype]


def _returned(returned: Any) -> Iterator[Array]:
    yield from (x for x in (returned if isinstance(returned, (tuple, list)) else [returned]) if isinstance(x, Array))


def _result_names(name: str, count: int) -> list[str] | None:
    declared = OPERATORS.get(name)
    for schema in schemas(declared.function, declared.names) if declared else ():
        names = [x.name for x in schema.results if x.type == "Tensor"]
        if len(names) == count:
            return names
    return None


# --- launches -----------------------------------------------------------------------------------------


def _launch(step: Any, arch: str, names: dict[int, str]) -> Launch:
    instance = step.variant.instance
    layout = template.params(instance.file, instance.function)
    fields = {}
    for _, code, value, path in template.named_leaves(layout, step.fields):
        # Skip null pointers. Also skip the multiplier and the shift that encode a division by another field.
        if (code == "Q" and type(value) is int and value == 0) or path.endswith((".multiplier", ".shift")):
            continue
        text = _field(value, names)
        if text:
            fields[path] = text
    return Launch(
        _expression(instance), step.why, step.grid, step.block, step.shared_bytes, fields, _resources(instance, arch)
    )


def _field(value: Any, names: dict[int, str]) -> Any:
    """Return a field's value for display; "" if the value is bytes that are all zero."""
    if isinstance(value, Array):
        return names[value.source] + (f"+{value.offset}" if value.offset else "")
    if isinstance(value, Each):
        if isinstance(value.value, bytes):
            return "tensor map"
        value = value.value
    if isinstance(value, bytes):
        return f"{len(value)} bytes" if any(value) else ""
    return int(value) if isinstance(value, bool) else value


def _expression(instance: compile.Instance) -> str:
    """Return an instance as text, with named template arguments, and without the defaults at the end."""
    names = _parameter_names(instance.file, instance.function)
    given = ", ".join(f"{name}={value}" for name, value in zip(names, instance.arguments, strict=False))
    return f"{instance.function}<{given}>"


@functools.cache
def _parameter_names(file: str, function: str) -> list[str]:
    declared = rf"template\s*<([^;{{}}]*?)>\s*__global__[^;{{]*?\b{function}\s*\("
    found = re.search(declared, template.text(file))
    return [x.partition("=")[0].split()[-1] for x in found[1].split(",")] if found else []


def _resources(instance: compile.Instance, arch: str) -> Resources | None:
    if compile.available() is not None:
        return None
    note = compile.read_note(compile.cached_path(instance, arch))
    return resources(note) if note else None


# --- ceilings -----------------------------------------------------------------------------------------


def _ceilings(name: str | None, op: str) -> Ceilings | None:
    """Return a GPU's ceilings: from benchmark results in a clone, otherwise from `CEILINGS`."""
    kept = CEILINGS.get(name or "")
    measured = _measured(name) if name else None
    if name is None or measured is None:
        return kept
    own = measured["ops"].get(op, measured)["ceilings"]
    matmul = next((x["ceilings"]["matmul_tflop_s"] for x in measured["ops"].values()), None)
    matmul = own["matmul_tflop_s"] or matmul or (kept and kept.matmul_tflop_s)
    return Ceilings(name, own["kernel_us"], own["copy_tb_s"], matmul)


@functools.cache
def _measured(name: str) -> dict[str, Any] | None:
    for path in sorted(_RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        if content.get("gpu") == name:
            return content
    return None
