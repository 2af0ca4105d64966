"""What the body of an op says, and the plan that is made of it.

The functions here are the vocabulary of such a body: `outputs`, `empty`, `launch`, `run_twin`, `note`. What
they say is recorded in a `Trace`, from which a `Plan` is made: it allocates, packs and launches in a few microseconds.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check, template
from cukern.runtime import launch as launching
from cukern.runtime.arrays import Quick
from cukern.runtime.cuda import current_device, runtime
from cukern.runtime.describe import ALLOCATED_ALIGNMENT, Array, Place, Result, expect, type_name
from cukern.runtime.kernel import Variant
from cukern.runtime.late import Environment, Guards, Late, evaluator
from cukern.runtime.launch import asked as asked
from cukern.runtime.straight import Text
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES, encode

_ALIGNMENT = 256  # of the parts of a workspace, in bytes
_RUNS_BEFORE_TEXT = 4
_MOST_MAPS = 256  # tensor maps that a plan keeps, of arrays at different addresses


class _Step(NamedTuple):
    """A launch with the numbers that are late."""

    variant: Variant
    grid: tuple[Any, Any, Any]
    block: tuple[Any, Any, Any]
    shared_bytes: Any
    packing: template.Packing
    notes: dict[str, Any]  # of the op whose body says it
    why: str = ""
    fields: Mapping[str, Any] = {}


class Trace:
    """What the body of an op has said so far."""

    def __init__(self, place: Place, addresses: int, guards: Guards, lates: int) -> None:
        self.place = place
        self.guards = guards
        self.steps: list[_Step] = []
        self.first_made = addresses + lates  # place of the first made array's address in the environment
        self.made: list[tuple[tuple[Any, ...], str]] = []  # shapes and dtypes of the arrays to allocate
        self.starts: dict[int, int] = {}  # the addresses that `described` gives arrays, by their sources
        self.transposed: set[int] = set()  # sources of made arrays that are returned transposed
        self.is_host_call = False
        self.for_twin: Callable[[], dict[str, Any]] = dict
        self.outputs: list[Array | None] = []
        self.notes: dict[str, Any] = {}

    def make(self, shape: tuple[Any, ...], dtype: str) -> Array:
        self.made.append((shape, dtype))
        source = self.first_made + len(self.made) - 1
        return Array(dtype, shape, None, ALLOCATED_ALIGNMENT, self.place, source, self.guards)


_tracing = threading.local()


def current() -> Trace:
    """The trace of the plan that this thread is making."""
    return _tracing.trace


def follow(trace: Trace, plan: Callable[[], Any]) -> Any:
    """The result of `plan`, which records what it says in `trace`."""
    previous = getattr(_tracing, "trace", None)
    _tracing.trace = trace
    try:
        return plan()
    finally:
        _tracing.trace = previous


def follow_part(plan: Callable[[], Any]) -> Any:
    """The result of the body of an op that another op's body calls: it has notes of its own."""
    trace = current()
    outer, trace.notes = trace.notes, {}
    try:
        return plan()
    finally:
        trace.notes = outer


def outputs(
    out: Any, first: Array, first_name: str, *results: Result | Array | None, names: str | Sequence[str] = ""
) -> Any:
    """The arrays for the results of an op, one or a tuple: those of `out`, or new ones where it is None or holds None.

    `names` is what messages call an `out` of several arrays, such as "a pair (weights, ids)"; if each array has an
    argument of its own, `names` are those of the arguments. A result that is no `Result`, such as an argument that is
    written or None, is returned as it is.
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
    """Tell the NumPy reference which arguments get its results, in an op that checks `out` itself."""
    current().outputs = list(results)


def run_twin(
    variant: str = "auto", variants: Collection[str] = ("auto",), arguments: Callable[[], dict[str, Any]] = dict
) -> Any:
    """Leave arrays in host memory, which are checked by now, to the NumPy reference.

    `arguments` gives those that the twin gets in place of the caller's; it is called when the twin is. The body then
    returns nothing, or arguments that the twin writes and the op returns.
    """
    check.host_variant(variant, variants)
    trace = current()
    trace.is_host_call, trace.for_twin = True, arguments
    return None


def empty(shape: Sequence[Any], dtype: str) -> Array:
    """An array for what one launch leaves to the next. All those of a plan are parts of one workspace."""
    return current().make(tuple(shape), dtype)


def launch(
    variant: Variant, grid: Any, block: Any = None, shared_bytes: Any = 0, /, *, why: Any = "", **fields: Any
) -> None:
    """Launch a kernel, with the fields of its struct of parameters by name.

    `why` tells `cukern.explain` the rule that chose the kernel and its instance, with the numbers: an f-string of the
    constants of the choice. A late number in it is shown as it is in this call; a comparison of one would be a guard.

    A field is a number, late or not; an Array, for its address; None, for a null pointer. For an array in the struct it
    is a sequence, for an inner struct a mapping or a tuple, or None or 0 for zeros. `grid` and `block` are numbers or
    tuples of up to three; the variant's `launched` has `block` and `shared_bytes` where no call decides them. Raises
    TemplateError for a missing or an unknown field, and for dynamic shared memory without `launched`.
    """
    file, function, launched = variant.instance.file, variant.instance.function, variant.launched
    if block is None and not launched.at:
        block, shared_bytes = launched.threads, launched.shared_bytes
    elif not launched.shared_bytes and (type(shared_bytes) is not int or shared_bytes):
        raise template.TemplateError(
            f"nothing asserts the shared memory of {function}: declare {function}_launch in cuda_src/{file}.cu, "
            "and give Kernel.variant what it says as `launched`"
        )
    layout = template.params(file, function)
    packing = template.Packing(layout, template.named_leaves(layout, fields), _is_open)
    trace = current()
    trace.steps.append(_Step(variant, _three(grid), _three(block), shared_bytes, packing, trace.notes, why, fields))


def tensor_map(
    array: Array,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promotion: int = 256,
    swizzled: bool = True,
) -> Late:
    """The field of a struct that holds a tensor map of an array; the arguments are those of `tensor_map.encode`."""
    rank, sizes = len(dims), (*dims, *strides)
    encoded: dict[tuple[int, ...], bytes] = {}
    open_at = [i for i, x in enumerate(sizes) if _is_open(x)]
    numbers = (array.address, *(sizes[i] for i in open_at))

    def find(*key: int) -> bytes:
        made = encoded.get(key)
        if made is None:
            if len(encoded) >= _MOST_MAPS:
                encoded.clear()
            known = list(sizes)
            for i, size in zip(open_at, key[1:], strict=True):
                known[i] = size
            found = tuple(known[:rank]), tuple(known[rank:])
            made = encoded[key] = encode(key[0], dtype, *found, box, promotion, swizzled)
        return made

    # Not encoded here: an explained call may have no address, and the machine no driver.
    made = Late(bytes(TENSOR_MAP_BYTES), evaluator(find, numbers), current().guards)
    made.formula = find, numbers
    return made


def note(**facts: Any) -> None:
    """Facts for `cukern.explain`: the `bytes` moved and the `flops` done."""
    current().notes.update(facts)


def each_call(function: Callable[..., Any], like: Any, *numbers: Late) -> Late:
    """What `function` of the late numbers gives at each call, such as a random number.

    It is called once by each call, and not for the plan, which is given `like` in its place.
    """
    made = Late(like, evaluator(function, numbers), current().guards)
    made.formula = function, numbers
    return made


def _three(sizes: Any) -> tuple[Any, Any, Any]:
    sizes = tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,)
    return (*sizes, 1, 1)[:3]  # type: ignore[return-value]


def _is_open(value: Any) -> bool:
    return isinstance(value, (Late, Array))


class Trainable(NamedTuple):
    """The arguments of a call that may require gradients: all names, and the paths of tensors of floats."""

    names: Sequence[str]
    paths: Sequence[tuple[int, int | None]]

    def refuse(self, values: Sequence[Any]) -> None:
        """Raise RuntimeError for the first of the tensors that requires gradients."""
        for position, inner in self.paths:
            value = values[position] if inner is None else values[position][inner]
            if value.requires_grad:
                check.refuse_gradient(self.names[position] if inner is None else f"{self.names[position]}[{inner}]")


# --- a plan, ready to run -----------------------------------------------------------------------------

_Finder = Callable[[Environment], tuple[Any, ...]]


class _Places:
    """The places of a plan's numbers in the environment.

    It holds, in this order: the addresses and the late numbers of the call; the addresses of the arrays made for it;
    the computed numbers, each once; the numbers that are known ahead.
    """

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.known: list[Any] = []
        self.computed: list[Callable[[Environment], Any]] = []
        #: For each computed number: the function, the places of its operands (None: known ahead), and the operands.
        self.formulas: list[tuple[Callable[..., Any], list[int | None], Sequence[Any]]] = []
        self._seen: dict[int, tuple[int, Late]] = {}  # by the identity of the number

    def _of(self, value: Any) -> tuple[bool, int]:
        """Whether a value is known ahead, and its place in `known` or in the environment."""
        if isinstance(value, Array):
            if type(value.offset) is int and not value.offset:
                return False, value.source
            value = value.address
        if isinstance(value, Late):
            return False, self._place(value)
        self.known.append(value)
        return True, len(self.known) - 1

    def _place(self, value: Late) -> int:
        if value.place is not None:
            return value.place
        if id(value) not in self._seen:
            function, numbers = value.formula or (value.evaluate, ())
            places = [self._place(x) if isinstance(x, Late) else None for x in numbers]
            if value.formula is None:
                # Of no operands, such as a random number.
                function = functools.partial(value.evaluate, ())
            self.computed.append(_computing(function, places, numbers))
            self.formulas.append((function, places, numbers))
            self._seen[id(value)] = self.begin + len(self.computed) - 1, value
        return self._seen[id(value)][0]

    def finder(self, values: Sequence[Any]) -> list[tuple[bool, int]]:
        """The places of values, for `find` once those of all values are fixed."""
        return [self._of(value) for value in values]

    def find(self, places: list[tuple[bool, int]]) -> _Finder:
        """A function that finds values in the environment."""
        known = self.begin + len(self.computed)
        flat = [known + place if is_known else place for is_known, place in places]
        if len(flat) == 1:
            only = flat[0]
            return lambda environment: (environment[only],)
        return operator.itemgetter(*flat)


def _computing(
    function: Callable[..., Any], places: list[int | None], numbers: Sequence[Any]
) -> Callable[[Environment], Any]:
    """A function that computes a number from operands that the environment holds."""
    if not places:
        return lambda environment: function()
    if len(places) == 1:
        only: Any = places[0]
        return lambda environment: function(environment[only])
    if len(places) == 2:
        i: Any
        j: Any
        (i, j), (left, right) = places, numbers
        if j is None:
            return lambda environment: function(environment[i], right)
        if i is None:
            return lambda environment: function(left, environment[j])
        return lambda environment: function(environment[i], environment[j])
    pairs: list[tuple[Any, Any]] = list(zip(places, numbers, strict=True))
    return lambda environment: function(*[x if place is None else environment[place] for place, x in pairs])


class Workspace:
    """The arrays that a plan makes and does not return, side by side in one allocation."""

    def __init__(self, trace: Trace, returned: Any) -> None:
        kept = {x.source - trace.first_made for x in _arrays_in(returned)}
        #: Indices of the made arrays that are returned, and of the others.
        self.kept = [i for i in range(len(trace.made)) if i in kept]
        self.parts = [i for i in range(len(trace.made)) if i not in kept]
        made = [trace.made[i] for i in self.parts]
        #: Bytes of each part; late if its shape is.
        self.sizes: list[Any] = [
            functools.reduce(operator.mul, shape, arrays.ITEM_SIZE[dtype]) for shape, dtype in made
        ]

    @property
    def bytes(self) -> int:
        """The size for the call that the plan was made from."""
        return _lay_out([x.value if isinstance(x, Late) else x for x in self.sizes])[0]

    def layout(self) -> tuple[int, list[int]] | Callable[[Environment], tuple[int, list[int]]]:
        """The size and the offset of each part, or a function that finds them for each call."""
        if not any(isinstance(x, Late) for x in self.sizes):
            return _lay_out(self.sizes)
        finders = [x.evaluate if isinstance(x, Late) else (lambda environment, x=x: x) for x in self.sizes]
        return lambda environment: _lay_out([find(environment) for find in finders])


def _lay_out(sizes: Sequence[int]) -> tuple[int, list[int]]:
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return end, starts


def _arrays_in(returned: Any) -> list[Array]:
    if isinstance(returned, (tuple, list)):
        return [x for one in returned for x in _arrays_in(one)]
    return [returned] if isinstance(returned, Array) else []


class _Launch:
    """A launch of a plan that runs."""

    __slots__ = ("function", "late_sizes", "launch", "pack", "parameters", "sizes", "variant")

    def __init__(self, step: _Step, parameters: _Finder, late_sizes: _Finder | None) -> None:
        self.variant = step.variant
        self.pack = step.packing.struct.pack_into
        self.parameters = parameters
        self.sizes = (*step.grid, *step.block, step.shared_bytes)
        self.late_sizes = late_sizes
        self.function = 0  # the driver's handle, from the first launch on

    def load(self, device: int) -> None:
        self.launch = self.variant.launcher(device)
        self.function = self.variant.load(device)


class Plan:
    """All that a call of one signature does: allocate, launch, return."""

    def __init__(
        self,
        trace: Trace,
        returned: Any,
        paths: Mapping[int, tuple[int, int | None]],
        trainable: Trainable | None = None,
    ) -> None:
        self.place = trace.place
        #: None where no argument may require gradients.
        self._trainable = trainable
        self.guards = trace.guards or None
        workspace = Workspace(trace, returned)
        self._kept = [(_shape_finder(trace.made[i][0]), trace.made[i][1]) for i in workspace.kept]
        self._transposed = {i for i, x in enumerate(workspace.kept) if x + trace.first_made in trace.transposed}
        self._makers = self._find_makers(is_current=True)
        self._layout = workspace.layout() if workspace.parts else None
        #: For each made array: whether it is returned, and its index among those; else its index in the workspace.
        self._made = [
            (True, workspace.kept.index(i)) if i in workspace.kept else (False, workspace.parts.index(i))
            for i in range(len(trace.made))
        ]
        places = _Places(trace.first_made + len(trace.made))
        open_steps: list[tuple[_Step, Any, Any]] = []
        for step in trace.steps:
            sizes = (*step.grid, *step.block, step.shared_bytes)
            late_sizes = places.finder(sizes) if any(isinstance(x, Late) for x in sizes) else None
            open_steps.append((step, places.finder(step.packing.parts), late_sizes))
        # Also those that no field needs: an argument is refused at any call as at the first one.
        places.finder(trace.guards.checked)
        self._returned = _returned(returned, trace.first_made, workspace.kept, paths)
        self._runs = 0
        self._begin, self._places, self._open_steps = trace.first_made, places, open_steps
        self.holds: Callable[[Environment], bool] = trace.guards.hold
        self._known, self._computed = places.known, places.computed
        self._steps = [
            _Launch(step, places.find(parts), late_sizes and places.find(late_sizes))
            for step, parts, late_sizes in open_steps
        ]

    def _find_makers(self, is_current: bool) -> tuple[list[Any], Any]:
        """The functions that allocate each returned array, and the workspace."""
        make, device = self.place.library.maker, self.place.device
        found = [make(shape, dtype, device, is_current) for shape, dtype in self._kept]
        found = [_transposing(x) if i in self._transposed else x for i, x in enumerate(found)]
        return found, make(_one_dimension, "uint8", device, is_current)

    def run(self, values: Sequence[Any], environment: list[Any]) -> Any:
        """Allocate, launch and return, for the arguments `values` with the addresses and late numbers `environment`."""
        place = self.place
        if self._trainable is not None and place.library.wants_gradients():
            self._trainable.refuse(values)
        if place.library.current_device() != place.device:
            with current_device(place.device):  # type: ignore[arg-type]
                return self._run(values, environment, place, self._find_makers(is_current=False))
        _, _, devices = launching.thread_state()
        if place.device not in devices:
            # A thread that never set a device has no context, and a launch by the driver would fail.
            runtime.setDevice(place.device)
            devices.add(place.device)
        self._runs += 1
        if self._runs == _RUNS_BEFORE_TEXT and place.library.quick is not None:
            self.run = self._straight(place.library.quick)  # type: ignore[assignment, method-assign]
        return self._run(values, environment, place, self._makers)

    def _straight(self, quick: Quick) -> Callable[[Sequence[Any], list[Any]], Any]:
        """`run`, written out as text for calls whose device is the current one; other calls go to `slow`."""
        text, slow = Text("def run(values, e):"), self.run
        self.holds = self.guards.straight() if self.guards is not None else self.holds
        of = [f"e{i}" for i in range(self._begin + len(self._made) + len(self._places.formulas))]
        text.names |= {"thread": launching.THREAD, "slow": slow}
        text.names |= {"current": quick.current_device, "address_of": quick.address}
        if self._trainable is not None:
            tensors = [_argument_text(*path) for path in self._trainable.paths]
            wants, refuse = text.name(self.place.library.wants_gradients), text.name(self._trainable.refuse)
            text.add(f"if {wants}() and ({' or '.join(f'{x}.requires_grad' for x in tensors)}): {refuse}(values)")
        text.add("try: buffer, pointers, devices = thread.state")
        text.add("except AttributeError: return slow(values, e)")
        text.add(f"if current() != {self.place.device} or {self.place.device} not in devices: return slow(values, e)")
        text.add(f"{', '.join(of[: self._begin])}, = e")
        make_each, make_workspace = self._makers
        for i, make in enumerate(make_each):
            text.add(f"m{i} = {text.name(make)}(e)")
        if self._layout is not None:
            text.add(f"size, starts = {text.name(self._layout)}{'' if type(self._layout) is tuple else '(e)'}")
            text.add(f"workspace = {text.name(make_workspace)}(size)")
            text.add("base = address_of(workspace)")
        starts = self._layout[1] if type(self._layout) is tuple else None
        for i, (is_kept, which) in enumerate(self._made):
            place = (
                f"address_of(m{which})"
                if is_kept
                else f"base + {f'starts[{which}]' if starts is None else starts[which]}"
            )
            text.add(f"{of[self._begin + i]} = {place}")
        for i, formula in enumerate(self._places.formulas):
            function, places, numbers = formula
            operands = [text.name(x) if at is None else of[at] for at, x in zip(places, numbers, strict=True)]
            text.add(f"{of[self._begin + len(self._made) + i]} = {text.computed(function, operands)}")

        def named(places: Sequence[tuple[bool, int]]) -> list[str]:
            return [text.name(self._known[at]) if is_known else of[at] for is_known, at in places]

        if self._steps:
            text.add(f"stream = {text.name(quick.stream)}({self.place.device})")
        for step, (_, parts, late_sizes) in zip(self._steps, self._open_steps, strict=True):
            sizes = [text.name(x) for x in step.sizes] if late_sizes is None else named(late_sizes)
            text.add(f"{text.name(step.pack)}({', '.join(['buffer', '0', *named(parts)])})")
            if not step.function:
                step.load(self.place.device)  # type: ignore[arg-type]
            launch = text.name(step.launch)
            text.add(f"{launch}({', '.join([str(step.function), *sizes[:6], sizes[6], 'stream', 'pointers', '0'])})")
        text.add(f"return {_returned_text(*self._returned, text)}")
        return text.compiled("a plan")

    def _run(self, values: Sequence[Any], environment: list[Any], place: Place, makers: tuple[list[Any], Any]) -> Any:
        library, device = place.library, place.device
        make_each, make_workspace = makers
        made = [make(environment) for make in make_each]
        address_of = library.address
        if self._layout is None:
            environment += map(address_of, made)
        else:
            size, starts = self._layout if type(self._layout) is tuple else self._layout(environment)  # type: ignore[operator]
            # Held until the last launch: else the allocator could give it to another thread on this stream.
            workspace = make_workspace(size)
            base = address_of(workspace)
            for is_kept, i in self._made:
                environment.append(address_of(made[i]) if is_kept else base + starts[i])
        for compute in self._computed:
            environment.append(compute(environment))
        environment += self._known
        if self._steps:
            buffer, address, _ = launching.thread_state()
            stream = library.stream(device)  # type: ignore[arg-type]
            for step in self._steps:
                step.pack(buffer, 0, *step.parameters(environment))
                x, y, z, i, j, k, shared_bytes = step.late_sizes(environment) if step.late_sizes else step.sizes
                if not step.function:
                    step.load(device)  # type: ignore[arg-type]
                step.launch(step.function, x, y, z, i, j, k, shared_bytes, stream, address, 0)
        kind, where = self._returned
        if kind is _MADE:
            return made[where]
        return _take(kind, where, values, made, environment)


_NOTHING, _MADE, _ARGUMENT, _VALUE, _TUPLE = "nothing", "made", "argument", "value", "tuple"


def _returned(
    returned: Any, first_made: int, kept: list[int], paths: Mapping[int, tuple[int, int | None]]
) -> tuple[str, Any]:
    """How a returned value is found: among the made arrays, by its path in the arguments, or as a number."""
    if returned is None:
        return _NOTHING, None
    if isinstance(returned, (tuple, list)):
        found = [_returned(x, first_made, kept, paths) for x in returned]
        arguments = [where for kind, where in found if kind is _ARGUMENT]
        if len(arguments) == len(found) > 0 and arguments == [(arguments[0][0], i) for i in range(len(found))]:
            return _ARGUMENT, (arguments[0][0], None)  # the caller's own tuple
        return _TUPLE, found
    if isinstance(returned, Array):
        if returned.source >= first_made:
            return _MADE, kept.index(returned.source - first_made)
        return _ARGUMENT, paths[returned.source]
    return _VALUE, returned.evaluate if isinstance(returned, Late) else lambda environment: returned


def _one_dimension(size: Any) -> tuple[int, ...]:
    return (size,)


def _take(kind: str, where: Any, values: Sequence[Any], made: list[Any], environment: Environment) -> Any:
    if kind is _TUPLE:
        return tuple([made[x] if k is _MADE else _take(k, x, values, made, environment) for k, x in where])
    if kind is _ARGUMENT:
        position, inner = where
        return values[position] if inner is None else values[position][inner]
    return None if kind is _NOTHING else made[where] if kind is _MADE else where(environment)


def _returned_text(kind: str, where: Any, text: Text) -> str:
    if kind is _TUPLE:
        return f"({', '.join(_returned_text(kind, place, text) for kind, place in where)},)"
    if kind is _ARGUMENT:
        return _argument_text(*where)
    return "None" if kind is _NOTHING else f"m{where}" if kind is _MADE else f"{text.name(where)}(e)"


def _argument_text(position: int, inner: int | None) -> str:
    return f"values[{position}]" + ("" if inner is None else f"[{inner}]")


def _transposing(make: Callable[[Environment], Any]) -> Callable[[Environment], Any]:
    return lambda environment: make(environment).swapaxes(-1, -2)


def _shape_finder(shape: tuple[Any, ...]) -> tuple[int, ...] | Callable[[Environment], tuple[int, ...]]:
    """A shape, or a function that finds it for each call."""
    if not any(isinstance(size, Late) for size in shape):
        return shape
    if not any(isinstance(size, Late) for size in shape[1:]):
        first, rest = shape[0].evaluate, shape[1:]
        return lambda environment: (first(environment), *rest)
    finders = [x.evaluate if isinstance(x, Late) else (lambda environment, x=x: x) for x in shape]
    return lambda environment: tuple([find(environment) for find in finders])
