"""The trace of an op's body, and the plan that is made from the trace.

The body of an op calls the functions `outputs`, `empty`, `launch`, `run_twin` and `note` of this module, which record
their arguments in a `Trace`. A `Plan` is made from the trace. At each call the plan allocates arrays, packs the structs
of parameters and launches kernels, in a few microseconds.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check, template
from cukern.runtime.cuda import current_device, runtime
from cukern.runtime.describe import ALLOCATED_ALIGNMENT, Array, Place, Result, expect, type_name
from cukern.runtime.each import Each
from cukern.runtime.kernel import Variant
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES, encode

_PARAMETER_BYTES = 4096  # the largest struct of parameters of a kernel
_MOST_MAPS = 256  # tensor maps that a plan keeps, for arrays at different addresses


class _Step(NamedTuple):
    """A launch."""

    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    pack: struct.Struct
    parts: list[Any]  # the values to pack
    notes: dict[str, Any]  # the notes of the op whose body launches (see `note`)
    why: str = ""
    fields: Mapping[str, Any] = {}


class Trace:
    """The allocations, launches and notes that an op's body has requested so far."""

    def __init__(self, place: Place, addresses: Sequence[int], numbers: int) -> None:
        self.place = place
        self.addresses = addresses  # the addresses of the arrays of the call
        self.steps: list[_Step] = []
        self.computed: list[Each] = []  # the values that each call computes, in order
        self.compares = False  # whether the body has compared the addresses of arrays
        self.first_made = len(addresses) + numbers  # index in the environment of the first allocated array's address
        self.made: list[tuple[tuple[int, ...], str]] = []  # shapes and dtypes of the arrays to allocate
        self.transposed: set[int] = set()  # `source` of allocated arrays that are returned transposed
        self.is_host_call = False
        self.for_twin: Callable[[], dict[str, Any]] = dict
        self.outputs: list[Array | None] = []
        self.notes: dict[str, Any] = {}

    def make(self, shape: tuple[int, ...], dtype: str) -> Array:
        self.made.append((shape, dtype))
        source = self.first_made + len(self.made) - 1
        return Array(dtype, shape, None, ALLOCATED_ALIGNMENT, self.place, source)


_tracing = threading.local()


def current() -> Trace:
    """Return the trace of the plan that this thread is making."""
    return _tracing.trace


def follow(trace: Trace, plan: Callable[[], Any]) -> Any:
    """Run `plan` with `trace` as the current trace, and return its result."""
    previous = getattr(_tracing, "trace", None)
    _tracing.trace = trace
    try:
        return plan()
    finally:
        _tracing.trace = previous


def follow_part(plan: Callable[[], Any]) -> Any:
    """Run the body of an op that the body of another op calls, and return its result. Its notes are separate."""
    trace = current()
    outer, trace.notes = trace.notes, {}
    try:
        return plan()
    finally:
        trace.notes = outer


def outputs(
    out: Any, first: Array, first_name: str, *results: Result | Array | None, names: str | Sequence[str] = ""
) -> Any:
    """Return the arrays for the results of an op, one array or a tuple: the arrays of `out`, or new arrays if None.

    `names` describes an `out` of several arrays in error messages, such as "a pair (weights, ids)". If each array has
    its own argument, `names` is the list of these arguments' names. A result that is not a `Result`, such as a written
    argument or None, is returned unchanged.

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
    """Record the arguments that the NumPy reference writes to. Ops that check `out` themselves call this."""
    current().outputs = list(results)


def run_twin(
    variant: str = "auto", variants: Collection[str] = ("auto",), arguments: Callable[[], dict[str, Any]] = dict
) -> Any:
    """Let the NumPy reference compute the call after the body has checked its arrays, which are in host memory.

    `arguments` is called just before the reference, and returns arguments that replace the caller's. After this call
    the body returns nothing, or those arguments that the reference writes and the op returns.
    """
    check.host_variant(variant, variants)
    trace = current()
    trace.is_host_call, trace.for_twin = True, arguments
    return None


def empty(shape: Sequence[Any], dtype: str) -> Array:
    """Return an uninitialized array for data that one launch writes and a later launch of the same plan reads.

    All such arrays of a plan share one allocation, the workspace.
    """
    return current().make(tuple(shape), dtype)


def launch(
    variant: Variant, grid: Any, block: Any = None, shared_bytes: int = 0, /, *, why: str = "", **fields: Any
) -> None:
    """Launch a kernel, with the fields of its struct of parameters by name.

    `why` is the reason for the kernel and its instance, which `cukern.explain` shows: the rule, with the constants that
    it compares.

    The value of a field is a number, an `Each`, an Array (for its address), or None (for a null pointer). If the field
    is an array in the struct, its value is a sequence. If the field is an inner struct, its value is a mapping or a
    tuple. For both, None or 0 means zeros. `grid` and `block` are numbers or tuples of up to three numbers. `block` and
    `shared_bytes` may be left out if they are the same for all calls; they then come from the variant's `launched`.
    Raises TemplateError for a missing or an unknown field, and for dynamic shared memory without `launched`.
    """
    file, function, launched = variant.instance.file, variant.instance.function, variant.launched
    if block is None and not launched.at:
        block, shared_bytes = launched.threads, launched.shared_bytes
    elif not launched.shared_bytes and shared_bytes:
        raise template.TemplateError(
            f"nothing asserts the shared memory of {function}: declare {function}_launch in cuda_src/{file}.cu, "
            "and give Kernel.variant what it says as `launched`"
        )
    layout = template.params(file, function)
    pack, parts = template.packing(layout, template.named_leaves(layout, fields), _is_open)
    trace = current()
    trace.steps.append(_Step(variant, _three(grid), _three(block), shared_bytes, pack, parts, trace.notes, why, fields))


def tensor_map(
    array: Array,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promotion: int = 256,
    swizzled: bool = True,
) -> Each:
    """Return the value of a field that is a tensor map of an array. The arguments are as in `tensor_map.encode`."""
    encoded: dict[int, bytes] = {}

    def find(address: int) -> bytes:
        made = encoded.get(address)
        if made is None:
            if len(encoded) >= _MOST_MAPS:
                encoded.clear()
            made = encoded[address] = encode(address, dtype, dims, strides, box, promotion, swizzled)
        return made

    # A call encodes the map of an address that no earlier call had. The map cannot be encoded here, because
    # `cukern.explain` also plans calls that have no address or run without a driver.
    return each_call(find, bytes(TENSOR_MAP_BYTES), array)


def note(**facts: Any) -> None:
    """Record facts for `cukern.explain`: the `bytes` moved and the `flops` done."""
    current().notes.update(facts)


def begin_together(first: Array, second: Array) -> bool:
    """Return whether two arrays begin at the same address. A later call with another answer needs another plan."""
    trace = current()
    trace.compares = True
    return (first.address or (first.source, first.offset)) == (second.address or (second.source, second.offset))


def each_call(function: Callable[..., Any], like: Any, *operands: Any) -> Each:
    """Return a value that each call of the plan computes as `function(*operands)`, such as a random number.

    An operand is an argument that differs at each call, an array (for its address), an earlier result of `each_call`,
    or a constant. Each call runs `function` once, before its launches. While the plan is made, the value is `like`.
    """
    made = Each(like, function, operands)
    current().computed.append(made)
    return made


def check_each_call(function: Callable[..., Any], *operands: Any) -> Each:
    """Let each call of the plan run `function`, which raises for invalid values. Also run it now."""
    given = [x.value if isinstance(x, Each) else x.address if isinstance(x, Array) else x for x in operands]
    return each_call(function, function(*given), *operands)


def _three(sizes: Any) -> tuple[int, int, int]:
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def _is_open(value: Any) -> bool:
    return isinstance(value, (Each, Array))


def asked(variant: str) -> str:
    """Return a text that says that the caller has chosen the kernel by `variant`; empty for "auto"."""
    return "" if variant == "auto" else f"variant={variant!r} asks for it"


# --- a plan, ready to run -----------------------------------------------------------------------------


#: The attribute `state` is a tuple for each thread: its buffer for kernel parameters, the address of the pointer to
#: this buffer, and the set of devices on which the thread has a context.
_THREAD = threading.local()


def thread_state() -> tuple[Any, int, set[int]]:
    """Return the state of this thread."""
    try:
        return _THREAD.state
    except AttributeError:
        buffer = ctypes.create_string_buffer(_PARAMETER_BYTES)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        _THREAD.keep = pointers
        _THREAD.state = buffer, ctypes.addressof(pointers), set()
        return _THREAD.state


class Workspace:
    """The single allocation that contains all arrays that a plan allocates and does not return."""

    def __init__(self, trace: Trace, returned: Any) -> None:
        kept = {x.source - trace.first_made for x in _arrays_in(returned)}
        #: Indices of the allocated arrays: `kept` are returned, and `parts` are in the workspace.
        self.kept = [i for i in range(len(trace.made)) if i in kept]
        self.parts = [i for i in range(len(trace.made)) if i not in kept]
        made = [trace.made[i] for i in self.parts]
        #: The size of the workspace in bytes, and the start of each array in it.
        self.bytes, self.starts = arrays.lay_out(tuple(math.prod(shape) * arrays.ITEM_SIZE[x] for shape, x in made))


def _arrays_in(returned: Any) -> list[Array]:
    if isinstance(returned, (tuple, list)):
        return [x for one in returned for x in _arrays_in(one)]
    return [returned] if isinstance(returned, Array) else []


class Plan:
    """The steps of a call: allocate arrays, compute the values that differ at each call, launch, and return results.

    A plan serves calls with equal facts (the argument values that select a plan) whose arrays have the same dtypes,
    shapes, strides, device and alignments. The environment is a list with the values that a call needs, in this order:
    the addresses of its arrays, its numbers, the addresses of the arrays that it allocates, addresses inside of arrays,
    the constants of the plan, and the computed values.
    """

    def __init__(self, trace: Trace, returned: Any, paths: Sequence[tuple[int, int | None]] = ()) -> None:
        self.library, self.device, self.compares = trace.place.library, trace.place.device, trace.compares
        workspace = Workspace(trace, returned)
        #: The shapes and dtypes of the arrays to allocate: the returned arrays, then the workspace if there is one.
        self._sizes = [trace.made[i] for i in workspace.kept]
        self._has_workspace = bool(workspace.parts)
        if self._has_workspace:
            self._sizes.append(((workspace.bytes,), "uint8"))
        self._transposed = [i for i, x in enumerate(workspace.kept) if trace.first_made + x in trace.transposed]
        self._makers = [self.library.maker(*size, self.device) for size in self._sizes]  # type: ignore[arg-type]
        #: For each allocated array: (its index among the returned arrays, 0), or (None, its start in the workspace).
        self._made = [
            (workspace.kept.index(i), 0) if i in workspace.kept else (None, workspace.starts[workspace.parts.index(i)])
            for i in range(len(trace.made))
        ]
        parts = [*(x.operands for x in trace.computed), *(step.parts for step in trace.steps)]
        flat = [x for own in parts for x in own]
        self._inside = [*dict.fromkeys((x.source, x.offset) for x in flat if isinstance(x, Array) and x.offset)]
        self._known = [x for x in flat if not _is_open(x)]
        begin = trace.first_made + len(trace.made)
        known = itertools.count(begin + len(self._inside))
        first_computed = begin + len(self._inside) + len(self._known)
        computed = {id(x): first_computed + i for i, x in enumerate(trace.computed)}

        def place_of(value: Any) -> int:
            """Return the index in the environment of `value`, which is an operand or the value of a field."""
            if isinstance(value, Array):
                return begin + self._inside.index((value.source, value.offset)) if value.offset else value.source
            if isinstance(value, Each):
                return computed[id(value)] if value.place is None else value.place
            return next(known)

        def getter(values: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
            found = [place_of(x) for x in values]
            if len(found) > 1:
                return operator.itemgetter(*found)
            return lambda environment: [environment[i] for i in found]

        self._computed = [(x.function, getter(x.operands)) for x in trace.computed]
        self._launches = [
            (x.variant.ready, *x.grid, *x.block, x.shared_bytes, x.pack.pack_into, getter(x.parts)) for x in trace.steps
        ]
        given = len(trace.addresses)

        def place(array: Array) -> int:
            """Return the index of a returned array in the list of the call's arrays and then the allocated arrays."""
            made = array.source - trace.first_made
            return array.source if made < 0 else given + workspace.kept.index(made)

        self._single = place(returned) if isinstance(returned, Array) else None
        self._return = _returning(returned, place, paths)

    def run(self, values: Sequence[Any], given: Sequence[Any], environment: list[Any], is_current: bool = False) -> Any:
        """Allocate, launch and return, for the arguments `values` with the arrays `given`.

        `environment` begins with the addresses and numbers of the call. `is_current`: the device is already the current
        device of this thread.
        """
        library, device = self.library, self.device
        if not is_current and library.current_device() != device:
            with current_device(device):  # type: ignore[arg-type]
                return self.run(values, given, environment, is_current=True)
        if is_current:
            # torch postpones `cudaSetDevice` for a device without a context. It then reports that device as the current
            # one, and a maker would allocate there.
            made = [library.allocate(*size, device) for size in self._sizes]
        else:
            made = [make() for make in self._makers]
        for at in self._transposed:
            made[at] = made[at].swapaxes(-1, -2)
        if self._has_workspace:
            # The variable keeps the workspace alive until the last launch. Otherwise the allocator could give the
            # memory to another thread.
            workspace = made.pop()
            base = library.address(workspace)
            environment += [base + start if i is None else library.address(made[i]) for i, start in self._made]
        elif made:
            environment += map(library.address, made)
        if self._inside:
            environment += [environment[source] + offset for source, offset in self._inside]
        environment += self._known
        for function, operands in self._computed:
            environment.append(function(*operands(environment)))  # type: ignore[misc]
        if self._launches:
            try:
                buffer, pointers, devices = _THREAD.state
            except AttributeError:
                buffer, pointers, devices = thread_state()
            if device not in devices and not is_current:
                # A thread that never set a device has no context, and the driver's launch would fail. If `is_current`,
                # `current_device` has pushed the device's context.
                runtime.setDevice(device)
                devices.add(device)  # type: ignore[arg-type]
            stream = library.stream(device)  # type: ignore[arg-type]
            for ready, x, y, z, i, j, k, shared_bytes, pack, parameters in self._launches:
                start, handle = ready[device]
                pack(buffer, 0, *parameters(environment))
                start(handle, x, y, z, i, j, k, shared_bytes, stream, pointers, 0)
        if self._single is not None:
            return (*given, *made)[self._single]
        return self._return(values, (*given, *made))


def _returning(
    returned: Any, place_of: Callable[[Array], int], paths: Sequence[tuple[int, int | None]]
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """Return a function that builds a call's result from its arguments and the list of its and all allocated arrays."""
    if not isinstance(returned, (tuple, list)):
        return lambda values, arrays: returned
    places = [place_of(x) if isinstance(x, Array) else None for x in returned]
    own = [paths[i] for i in places if i is not None and i < len(paths)]
    if own and own == [(own[0][0], i) for i in range(len(places))]:
        return lambda values, arrays: values[own[0][0]]  # the caller's own tuple
    if len(places) > 1 and None not in places:
        getter = operator.itemgetter(*places)
        return lambda values, arrays: getter(arrays)
    pairs = [*zip(places, returned, strict=True)]
    return lambda values, arrays: tuple([value if i is None else arrays[i] for i, value in pairs])
