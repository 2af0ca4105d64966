"""What a plan says, and how it runs.

The functions here are the vocabulary of a plan's body: `outputs`, `empty`, `launch`, `clear`, `run_twin`, `note`. They
are written down; a `Plan` is made of them that allocates, packs and launches in a few microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check, template
from cukern.runtime.cuda import current_device, driver, runtime
from cukern.runtime.describe import ALLOCATED_ALIGNMENT, Array, Place, Result, expect, type_name
from cukern.runtime.kernel import Variant
from cukern.runtime.late import Environment, Guards, Late, late
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES, encode

_PARAMETER_BYTES = 4096  # that a kernel can have
_ALIGNMENT = 256  # bytes, of what a workspace holds


class _Step(NamedTuple):
    """A launch as a plan says it, or a part of a workspace to clear."""

    variant: Variant | None
    grid: tuple[Any, Any, Any]
    block: tuple[Any, Any, Any]
    shared_bytes: Any
    packing: template.Packing | None
    notes: dict[str, Any]  # of the op that says it
    fields: Mapping[str, Any] = {}
    cleared: tuple[Any, Any] = (0, 0)  # address and bytes


class Trace:
    """What a plan has said so far."""

    def __init__(self, place: Place, addresses: int, guards: Guards, lates: int) -> None:
        self.place = place
        self.guards = guards
        self.steps: list[_Step] = []
        self.first_made = addresses + lates  # place of the address of the first array that is made
        self.made: list[tuple[tuple[Any, ...], str]] = []
        self.transposed: set[int] = set()  # sources of those whose last two dimensions are turned then
        self.workspace: Array | None = None
        self.workspace_bytes: Any = 0
        self.is_host_call = False
        self.outputs: list[Array | None] = []
        self.notes: dict[str, Any] = {}

    def make(self, shape: tuple[Any, ...], dtype: str) -> Array:
        self.made.append((shape, dtype))
        source = self.first_made + len(self.made) - 1
        return Array(dtype, shape, None, ALLOCATED_ALIGNMENT, self.place, source, self.guards)


_tracing = threading.local()


def current() -> Trace:
    """What the plan that is being made has said so far."""
    return _tracing.trace


def follow(trace: Trace, plan: Callable[[], Any]) -> Any:
    """What `plan` returns; what it says goes to `trace`."""
    previous = getattr(_tracing, "trace", None)
    _tracing.trace = trace
    try:
        return plan()
    finally:
        _tracing.trace = previous


def follow_part(plan: Callable[[], Any]) -> Any:
    """What the plan of an op returns that is called in the one of another op; the notes are its own."""
    trace = current()
    outer, trace.notes = trace.notes, {}
    try:
        return plan()
    finally:
        trace.notes = outer


def outputs(
    out: Any, first: Array, first_name: str, *results: Result | Array | None, names: str | Sequence[str] = ""
) -> Any:
    """Where an op writes its results: `out` where that is given, else new arrays; one alone, or a tuple.

    `names` is what the message calls an `out` of several, such as "a pair (weights, ids)"; None in it is a new array.
    Where each has an argument of its own, `names` are theirs. What is no `Result`, such as an argument that is written
    or None, is a result itself.
    Raises TypeError and ValueError for an `out` that does not fit.
    """
    trace, single = current(), len(results) == 1
    if single or out is None:
        given = [out] * len(results)
    elif isinstance(out, (tuple, list)) and len(out) == len(results):
        given = list(out)
    else:
        check.fail("out", str(names), type_name(out), TypeError)
    found: list[Any] = []
    for i, (array, result) in enumerate(zip(given, results, strict=True)):
        if not isinstance(result, Result):
            found.append(result)
            continue
        shape, turn = result.shape, result.transposed
        if turn:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if array is None:
            made = trace.make(shape, result.dtype)
            if turn:
                trace.transposed.add(made.source)
                made = made.transposed
            found.append(made)
            continue
        name = names[i] if names and not isinstance(names, str) else "out" if single else f"out[{i}]"
        turned = array.transposed if turn and isinstance(array, Array) and len(array.shape) > 1 else array
        expect(name, turned, first, first_name, result.dtypes, shape, result.symbols)
        found.append(array)
    trace.outputs = found
    return found[0] if single else tuple(found)


def write_into(*results: Array) -> None:
    """Name the arguments that get the results, of an op that checks its `out` itself, for the NumPy twin."""
    current().outputs = list(results)


def run_twin(variant: str = "auto", variants: Collection[str] = ("auto",)) -> Any:
    """Leave the rest to the NumPy twin, for arrays in host memory, once they are checked.

    What a plan returns then is nothing, or arguments that the twin writes and that the op returns.
    """
    check.host_variant(variant, variants)
    current().is_host_call = True
    return None


def empty(shape: Sequence[Any], dtype: str) -> Array:
    """Room for what lies between two launches; one workspace holds all of it."""
    trace = current()
    if trace.workspace is None:
        trace.workspace = trace.make((), "uint8")
    start = trace.workspace_bytes
    size = functools.reduce(operator.mul, shape, 1) * arrays.ITEM_SIZE[dtype]
    trace.workspace_bytes = start + late(_aligned, size)
    return trace.workspace.view(shape, dtype, start)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def launch(variant: Variant, grid: Any, block: Any, shared_bytes: Any = 0, /, **fields: Any) -> None:
    """Launch a kernel, with the fields of its struct of parameters by name.

    A field is a number, late or not; an Array, which stands for its address; None, a null pointer; a sequence for an
    array, a mapping or a tuple for a struct, None or 0 for a struct of zeros. `grid` and `block` are numbers or tuples
    of up to three. Raises TemplateError for a missing or an unknown field.
    """
    layout = template.params(variant.instance.stem, variant.instance.function)
    packing = template.Packing(layout, template.named_leaves(layout, fields), _is_open)
    trace = current()
    trace.steps.append(_Step(variant, _three(grid), _three(block), shared_bytes, packing, trace.notes, fields))


def clear(array: Array) -> None:
    """Set all bytes of an array without gaps to 0, after the launches before and before those after."""
    trace, cleared = current(), (array.address, array.size * array.item_size)
    trace.steps.append(_Step(None, (0, 0, 0), (0, 0, 0), 0, None, trace.notes, cleared=cleared))


def tensor_map(
    array: Array,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promotion: int = 256,
) -> Late:
    """The field of a struct that holds a tensor map of an array; the arguments are those of `tensor_map.encode`."""
    address = array.address.evaluate
    numbers: tuple[Any, ...] = (*dims, *strides)
    if not any(isinstance(x, Late) for x in numbers):
        return Late(
            bytes(TENSOR_MAP_BYTES),
            lambda environment: encode(address(environment), dtype, dims, strides, box, promotion),
            current().guards,
        )

    def find(environment: Environment) -> bytes:
        found = tuple([x.evaluate(environment) if isinstance(x, Late) else x for x in numbers])
        return encode(address(environment), dtype, found[: len(dims)], found[len(dims) :], box, promotion)

    return Late(bytes(TENSOR_MAP_BYTES), find, current().guards)


def note(**facts: Any) -> None:
    """Say for `cukern.explain` why a variant was chosen (`why`), and what bytes are moved and flops done."""
    current().notes.update(facts)


def each_call(function: Callable[[], Any]) -> Late:
    """A number that `function` gives anew for each call."""
    return Late(function(), lambda environment: function(), current().guards)


def _three(sizes: Any) -> tuple[Any, Any, Any]:
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def _is_open(value: Any) -> bool:
    return isinstance(value, (Late, Array))


# --- a plan, ready to run -----------------------------------------------------------------------------

_Finder = Callable[[Environment], tuple[Any, ...]]


class _Places:
    """Where the environment holds what a plan needs.

    It begins with the addresses and the late numbers of a call and the addresses of what was made for it; then comes
    what is known, then what is computed.
    """

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.known: list[Any] = []
        self.computed: list[Callable[[Environment], Any]] = []
        self._seen: dict[int, tuple[int, Late]] = {}  # among the computed, by the identity of the number

    def _of(self, value: Any) -> tuple[str, int]:
        if isinstance(value, Array):
            if type(value.offset) is int and not value.offset:
                return "begin", value.source
            value = value.address
        if not isinstance(value, Late):
            self.known.append(value)
            return "known", len(self.known) - 1
        if value.place is not None:
            return "begin", value.place
        return "computed", self._compute(value)

    def _compute(self, value: Late) -> int:
        """Where `value` is among the computed numbers."""
        if id(value) in self._seen:
            return self._seen[id(value)][0]
        evaluate = value.evaluate
        if value.part is not None:
            whole, index = value.part
            back = self._compute(whole) - len(self.computed)  # from the end of what is there by then
            evaluate = lambda environment: environment[back][index]  # noqa: E731
        self.computed.append(evaluate)
        self._seen[id(value)] = len(self.computed) - 1, value
        return len(self.computed) - 1

    def finder(self, values: Sequence[Any]) -> list[tuple[str, int]]:
        """Where the values will be, for `find` once all are known."""
        return [self._of(value) for value in values]

    def find(self, places: list[tuple[str, int]]) -> _Finder:
        """A function that finds values in the environment."""
        starts = {"begin": 0, "known": self.begin, "computed": self.begin + len(self.known)}
        flat = [starts[part] + place for part, place in places]
        if len(flat) == 1:
            only = flat[0]
            return lambda environment: (environment[only],)
        return operator.itemgetter(*flat)


class _Launch:
    """A launch as it runs."""

    __slots__ = ("function", "late_sizes", "pack", "parameters", "sizes", "variant")

    def __init__(self, step: _Step, parameters: _Finder, late_sizes: _Finder | None) -> None:
        assert step.variant is not None and step.packing is not None
        self.variant = step.variant
        self.pack = step.packing.struct.pack_into
        self.parameters = parameters
        self.sizes = (*step.grid, *step.block, step.shared_bytes)
        self.late_sizes = late_sizes
        self.function = 0  # the driver's handle, from the first launch on


class Plan:
    """What a call of one signature does."""

    def __init__(self, trace: Trace, returned: Any, paths: Mapping[int, tuple[int, int | None]]) -> None:
        self.place = trace.place
        self.guards = trace.guards or None
        if trace.workspace is not None:
            trace.made[trace.workspace.source - trace.first_made] = ((trace.workspace_bytes,), "uint8")
        self._made = [(_shape_finder(shape), dtype) for shape, dtype in trace.made]
        self._transposed = {source - trace.first_made for source in trace.transposed}
        self._makers = self._find_makers(is_current=True)
        places = _Places(trace.first_made + len(trace.made))
        open_steps: list[tuple[_Step, Any, Any]] = []
        for step in trace.steps:
            if step.packing is None:
                open_steps.append((step, places.finder(step.cleared), None))
                continue
            sizes = (*step.grid, *step.block, step.shared_bytes)
            late_sizes = places.finder(sizes) if any(isinstance(x, Late) for x in sizes) else None
            open_steps.append((step, places.finder(step.packing.parts), late_sizes))
        if not trace.steps:
            places.finder(trace.guards.checked)
        self._returned = _returned(returned, trace.first_made, paths, places)
        self._known, self._computed = places.known, places.computed
        self._steps: list[Any] = [
            _Launch(step, places.find(parts), late_sizes and places.find(late_sizes))
            if step.packing is not None
            else places.find(parts)
            for step, parts, late_sizes in open_steps
        ]

    def _find_makers(self, is_current: bool) -> list[Callable[[Environment], Any]]:
        make = self.place.library.maker
        found = [make(shape, dtype, self.place.device, is_current) for shape, dtype in self._made]
        return [_transposing(x) if i in self._transposed else x for i, x in enumerate(found)]

    def run(self, values: Sequence[Any], environment: list[Any]) -> Any:
        """Allocate and launch, for the arguments `values` with these addresses and late numbers."""
        place = self.place
        if place.library.current_device() != place.device:
            with current_device(place.device):  # type: ignore[arg-type]
                return self._run(values, environment, place, self._find_makers(is_current=False))
        try:
            devices = _thread.devices
        except AttributeError:
            devices = _thread.devices = set()
        if place.device not in devices:
            # A thread that never set a device has no context, and a driver launch there would fail.
            runtime.setDevice(place.device)
            devices.add(place.device)
        return self._run(values, environment, place, self._makers)

    def _run(self, values: Sequence[Any], environment: list[Any], place: Place, makers: Sequence[Any]) -> Any:
        library, device = place.library, place.device
        made = [make(environment) for make in makers]
        if made:
            environment += map(library.address, made)
        environment += self._known
        for compute in self._computed:
            environment.append(compute(environment))
        if self._steps:
            try:
                buffer, address = _thread.buffer
            except AttributeError:
                buffer, address = _new_buffer()
            stream = library.stream(device)  # type: ignore[arg-type]
            for step in self._steps:
                if type(step) is not _Launch:
                    start, size = step(environment)
                    runtime.memsetAsync(start, 0, size, stream)
                    continue
                step.pack(buffer, 0, *step.parameters(environment))
                x, y, z, i, j, k, shared_bytes = step.late_sizes(environment) if step.late_sizes else step.sizes
                function = step.function
                if not function:
                    function = step.function = step.variant.load(device)  # type: ignore[arg-type]
                driver.launchKernel(function, x, y, z, i, j, k, shared_bytes, stream, address, 0)
        kind, where = self._returned
        if kind is _MADE:
            return made[where]
        return _take(kind, where, values, made, environment)


_NOTHING, _MADE, _ARGUMENT, _VALUE, _TUPLE = "nothing", "made", "argument", "value", "tuple"


def _returned(
    returned: Any, first_made: int, paths: Mapping[int, tuple[int, int | None]], places: _Places
) -> tuple[str, Any]:
    """How each thing that a plan returns is found: as a made array, by its path among the arguments, or as a number."""
    if returned is None:
        return _NOTHING, None
    if isinstance(returned, (tuple, list)):
        found = [_returned(x, first_made, paths, places) for x in returned]
        arguments = [where for kind, where in found if kind is _ARGUMENT]
        if len(arguments) == len(found) > 0 and arguments == [(arguments[0][0], i) for i in range(len(found))]:
            return _ARGUMENT, (arguments[0][0], None)  # a tuple that was given
        return _TUPLE, found
    if isinstance(returned, Array):
        if returned.source >= first_made:
            return _MADE, returned.source - first_made
        return _ARGUMENT, paths[returned.source]
    return _VALUE, returned.evaluate if isinstance(returned, Late) else lambda environment: returned


def _take(kind: str, where: Any, values: Sequence[Any], made: list[Any], environment: Environment) -> Any:
    if kind is _TUPLE:
        return tuple([made[x] if k is _MADE else _take(k, x, values, made, environment) for k, x in where])
    if kind is _ARGUMENT:
        position, inner = where
        return values[position] if inner is None else values[position][inner]
    return None if kind is _NOTHING else made[where] if kind is _MADE else where(environment)


def _transposing(make: Callable[[Environment], Any]) -> Callable[[Environment], Any]:
    return lambda environment: make(environment).swapaxes(-1, -2)


def _shape_finder(shape: tuple[Any, ...]) -> tuple[int, ...] | Callable[[Environment], tuple[int, ...]]:
    """A shape, or how it is found for each call."""
    if not any(isinstance(size, Late) for size in shape):
        return shape
    if not any(isinstance(size, Late) for size in shape[1:]):
        first, rest = shape[0].evaluate, shape[1:]
        return lambda environment: (first(environment), *rest)
    finders = [x.evaluate if isinstance(x, Late) else (lambda environment, x=x: x) for x in shape]
    return lambda environment: tuple([find(environment) for find in finders])


_thread = threading.local()


def _new_buffer() -> tuple[Any, int]:
    """Where the launches of one thread put their parameters, and the address of what points there."""
    buffer = ctypes.create_string_buffer(_PARAMETER_BYTES)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    _thread.keep = pointers
    _thread.buffer = buffer, ctypes.addressof(pointers)
    return _thread.buffer
