"""The trace of an op's body, and the plan made from it.

The body calls `outputs`, `empty`, `launch`, `run_twin` and `note`, which record their arguments in a `Trace`. At each
call the `Plan` allocates, packs the parameter structs and launches, in a few microseconds.
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

_PARAMETER_BYTES = 4096  # the largest parameter struct of a kernel
_MAX_TENSOR_MAPS = 256  # tensor maps that a plan keeps, one per array address


class _Step(NamedTuple):
    variant: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    pack: struct.Struct
    values: list[Any]
    notes: dict[str, Any]  # from `note`
    why: str = ""
    fields: Mapping[str, Any] = {}


class Trace:
    """The allocations, launches and notes that a body has recorded."""

    def __init__(self, place: Place, addresses: Sequence[int], numbers: int) -> None:
        self.place = place
        self.addresses = addresses  # of the call's arrays
        self.steps: list[_Step] = []
        self.computed: list[Each] = []  # values that each call computes, in order
        self.compares = False  # whether the body has compared array addresses
        self.first_made = len(addresses) + numbers  # the first index in the plan's environment for an allocated array
        self.made: list[tuple[tuple[int, ...], str]] = []  # shapes and dtypes to allocate
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
    return _tracing.trace


def run_traced(trace: Trace, plan: Callable[[], Any]) -> Any:
    previous = getattr(_tracing, "trace", None)
    _tracing.trace = trace
    try:
        return plan()
    finally:
        _tracing.trace = previous


def run_nested(plan: Callable[[], Any]) -> Any:
    """Run an op's body inside another op's plan. The two bodies record separate notes."""
    trace = current()
    outer, trace.notes = trace.notes, {}
    try:
        return plan()
    finally:
        trace.notes = outer


def outputs(
    out: Any, first: Array, first_name: str, *results: Result | Array | None, names: str | Sequence[str] = ""
) -> Any:
    """Return the arrays for an op's results, one or a tuple: `out`, or new arrays if it is None.

    For messages, `names` describes an `out` of several arrays, such as "a pair (weights, ids)", or lists a name for
    each array. An entry of `results` that is no `Result`, such as a written argument, is returned unchanged.
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
    """Record the arguments that the NumPy reference writes. An op that checks `out` itself calls this function."""
    current().outputs = list(results)


def run_twin(
    variant: str = "auto", variants: Collection[str] = ("auto",), arguments: Callable[[], dict[str, Any]] = dict
) -> Any:
    """Let the NumPy reference compute a call on host arrays.

    `arguments` is a function that is called just before the reference. It returns the reference's arguments. After
    `run_twin` the body returns nothing, or the arguments that the reference writes.
    """
    check.host_variant(variant, variants)
    trace = current()
    trace.is_host_call, trace.for_twin = True, arguments
    return None


def empty(shape: Sequence[Any], dtype: str) -> Array:
    """Return an uninitialized array in the plan's workspace, for data that one launch writes and a later one reads."""
    return current().make(tuple(shape), dtype)


def launch(
    variant: Variant, grid: Any, block: Any = None, shared_bytes: int = 0, /, *, why: str = "", **fields: Any
) -> None:
    """Launch a kernel. `fields` fill its parameter struct.

    `why` is the rule that chose the instance, with the constants it compares; `cukern.explain` shows it.

    A field is a number, an `Each`, an Array (its address) or None (a null pointer). An array in the struct takes a
    sequence, an inner struct a mapping or a tuple. For an array or an inner struct, None or 0 means zeros. `grid` and
    `block` have up to three numbers. `block` and `shared_bytes` default to the values in the variant's `launched`, if
    these are the same for all calls.
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
    """Return a tensor map of an array as a field; the arguments are as in `tensor_map.encode`."""
    encoded: dict[int, bytes] = {}

    def find(address: int) -> bytes:
        made = encoded.get(address)
        if made is None:
            if len(encoded) >= _MAX_TENSOR_MAPS:
                encoded.clear()
            made = encoded[address] = encode(address, dtype, dims, strides, box, promotion, swizzled)
        return made

    # A call encodes the map if the array has a new address. Encoding here would fail for `cukern.explain`, which has no
    # addresses and may have no driver.
    return each_call(find, bytes(TENSOR_MAP_BYTES), array)


def note(**facts: Any) -> None:
    """Record facts for `cukern.explain`: `bytes` moved and `flops` done."""
    current().notes.update(facts)


def begin_together(first: Array, second: Array) -> bool:
    """Return whether two arrays begin at the same address. A later call with another answer needs another plan."""
    trace = current()
    trace.compares = True
    return (first.address or (first.source, first.offset)) == (second.address or (second.source, second.offset))


def each_call(function: Callable[..., Any], like: Any, *operands: Any) -> Each:
    """Return a value that each call computes once, before its launches, as `function(*operands)`.

    An operand is an argument that differs at each call, an array (its address), another `each_call` value, or a
    constant. While the plan is made, the value is `like`.
    """
    made = Each(like, function, operands)
    current().computed.append(made)
    return made


def check_each_call(function: Callable[..., Any], *operands: Any) -> Each:
    """Run `function` now and at each call, to check values. `function` raises an error for invalid ones."""
    given = [x.value if isinstance(x, Each) else x.address if isinstance(x, Array) else x for x in operands]
    return each_call(function, function(*given), *operands)


def _three(sizes: Any) -> tuple[int, int, int]:
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def _is_open(value: Any) -> bool:
    return isinstance(value, (Each, Array))


def asked(variant: str, then: str = "") -> str:
    """Return the reason "the caller has chosen this variant", followed by `then`; empty for "auto"."""
    return "" if variant == "auto" else f"variant={variant!r} asks for it{then}"


# --- a plan, ready to run -----------------------------------------------------------------------------


class _Thread(threading.local):
    """Per thread, `state` holds the kernel parameter buffer, the address of a pointer to it, and the set of devices
    with a context."""

    def __init__(self) -> None:
        buffer = ctypes.create_string_buffer(_PARAMETER_BYTES)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.state: tuple[Any, int, set[int]] = buffer, ctypes.addressof(self.pointers), set()


_thread = _Thread()


class Workspace:
    """The single allocation for all arrays that a plan allocates and does not return."""

    def __init__(self, trace: Trace, returned: Any) -> None:
        kept = {x.source - trace.first_made for x in _arrays_in(returned)}
        #: Indices of the allocated arrays that are returned, and of the arrays in the workspace.
        self.returned = [i for i in range(len(trace.made)) if i in kept]
        self.temporary = [i for i in range(len(trace.made)) if i not in kept]
        made = [trace.made[i] for i in self.temporary]
        #: The workspace size, and the start of each of its arrays, in bytes.
        self.bytes, self.starts = arrays.lay_out(tuple(math.prod(shape) * arrays.ITEM_SIZE[x] for shape, x in made))


def _arrays_in(returned: Any) -> list[Array]:
    if isinstance(returned, (tuple, list)):
        return [x for one in returned for x in _arrays_in(one)]
    return [returned] if isinstance(returned, Array) else []


class Plan:
    """The steps of a call: allocate, compute the values that differ, launch, and return.

    A plan's calls agree in the arguments that select a plan, and in dtypes, shapes, strides, device and alignments of
    the arrays. Its environment is a list: addresses of the call's arrays, the call's numbers, addresses of allocated
    arrays, addresses inside arrays, constants, computed values.
    """

    def __init__(self, trace: Trace, returned: Any, paths: Sequence[tuple[int, int | None]] = ()) -> None:
        self.library, self.device, self.compares = trace.place.library, trace.place.device, trace.compares
        workspace = Workspace(trace, returned)
        #: Shapes and dtypes to allocate: the returned arrays, then the workspace if there is one.
        self._sizes = [trace.made[i] for i in workspace.returned]
        self._has_workspace = bool(workspace.temporary)
        if self._has_workspace:
            self._sizes.append(((workspace.bytes,), "uint8"))
        self._transposed = [i for i, x in enumerate(workspace.returned) if trace.first_made + x in trace.transposed]
        self._makers = [self.library.maker(*size, self.device) for size in self._sizes]  # type: ignore[arg-type]
        #: For each allocated array: (its index among the returned arrays, 0), or (None, its start in the workspace).
        self._made = [
            (workspace.returned.index(i), 0)
            if i in workspace.returned
            else (None, workspace.starts[workspace.temporary.index(i)])
            for i in range(len(trace.made))
        ]
        parts = [*(x.operands for x in trace.computed), *(step.values for step in trace.steps)]
        flat = [x for own in parts for x in own]
        self._inside = [*dict.fromkeys((x.source, x.offset) for x in flat if isinstance(x, Array) and x.offset)]
        self._known = [x for x in flat if not _is_open(x)]
        begin = trace.first_made + len(trace.made)
        known = itertools.count(begin + len(self._inside))
        first_computed = begin + len(self._inside) + len(self._known)
        computed = {id(x): first_computed + i for i, x in enumerate(trace.computed)}

        def place_of(value: Any) -> int:
            """Return the environment index of an operand or a field's value."""
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
            (x.variant.ready, *x.grid, *x.block, x.shared_bytes, x.pack.pack_into, getter(x.values))
            for x in trace.steps
        ]
        given = len(trace.addresses)

        def place(array: Array) -> int:
            """Return the index of a returned array in the list of all given arrays, then all allocated arrays."""
            made = array.source - trace.first_made
            return array.source if made < 0 else given + workspace.returned.index(made)

        self._single = place(returned) if isinstance(returned, Array) else None
        self._return = _returning(returned, place, paths)

    def run(self, values: Sequence[Any], given: Sequence[Any], environment: list[Any], is_current: bool = False) -> Any:
        """Run a call: allocate, launch and return the result. `values` are its arguments, `given` its arrays.

        `environment` begins with the call's addresses and numbers. `is_current`: the device is the thread's current
        device.
        """
        library, device = self.library, self.device
        if not is_current and library.current_device() != device:
            with current_device(device):  # type: ignore[arg-type]
                return self.run(values, given, environment, is_current=True)
        if is_current:
            # torch postpones `cudaSetDevice` for a device without a context. It then reports that device as current,
            # and a maker would allocate there.
            made = [library.allocate(*size, device) for size in self._sizes]
        else:
            made = [make() for make in self._makers]
        for at in self._transposed:
            made[at] = made[at].swapaxes(-1, -2)
        if self._has_workspace:
            # This variable holds the workspace until the last launch. Otherwise the allocator could give the memory to
            # another thread.
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
            buffer, pointers, devices = _thread.state
            if device not in devices and not is_current:
                # A thread that never set a device has no context, and the launch would fail. If `is_current`,
                # `current_device` has pushed a context.
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
    """Return a function that builds the result from two lists: the arguments, and all given and allocated arrays."""
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
