"""From a declaration to a call: how every function of `cukern.ops` runs.

An op is written as a function of its public arguments whose body is the *plan*: it is given an `Array`, a description,
in place of each array; checks what concerns several arguments, chooses the kernel, and says with `outputs`, `empty` and
`launch` what is allocated and launched. It touches no GPU, and runs once for each signature: the dtypes, shapes,
strides, places and alignments of the arrays, and the values of the other arguments. What is declared late (the first
dimension of some arrays, some scalars) is no part of the signature: the body sees it as a `Late` number.

A call reads each array once, finds its plan by the signature, allocates, packs the structs and launches. Arrays in host
memory go to the NumPy reference once the body has checked them. An op that is called in the body of another one, with
descriptions, becomes a part of its plan.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator as operators
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cukern.runtime import arrays, check, gpu, performance, straight
from cukern.runtime.describe import Array, Place
from cukern.runtime.late import Guards, Late
from cukern.runtime.plan import Plan, Trace, Trainable, follow, follow_part

_F = TypeVar("_F", bound=Callable[..., Any])


class Operator(NamedTuple):
    """A torch operator; see `op`."""

    function: Callable[..., Any]
    names: Sequence[str]  # of the results
    results: Callable[..., Any] | None


#: Every op, by the name of its function.
OPS: dict[str, Op] = {}
#: Every torch operator, by the name of its function.
OPERATORS: dict[str, Operator] = {}
#: Plans that an op keeps at most, the newest ones; and those of one signature, which differ in their guards.
_MOST_PLANS, _MOST_ALTERNATIVES = 1024, 64
#: Readers that a form keeps at most.
_MOST_READERS = 64

#: Lists of more arrays than this are read as a whole.
_MANY = 4

# Bits of an argument's kind: an array has a late first dimension; a number is late.
_ROWS, _LATE = 1, 2
_LATE_MARK = object()


class _Form:
    """Calls with the same number of positional arguments and the same named ones."""

    __slots__ = ("kinds", "names", "plans", "readers")

    def __init__(self, names: list[str], kinds: list[int]) -> None:
        self.names = names  # of the arguments, in their order
        self.kinds = kinds
        self.plans: dict[tuple[Any, ...], Plan | list[Plan]] = {}
        #: Readers by the types of the arguments; None leaves these to `_read`.
        self.readers: dict[tuple[type, ...], Any] = {}

    def find_reader(self, op: Op, values: Sequence[Any]) -> Any:
        """The reader of arguments of these types, if it can be written out: all arrays are tensors, none in a list."""
        libraries, types = [arrays.library_of(x) for x in values], tuple(map(type, values))
        found = None
        if not {tuple, list} & {*types} and all(x is None or x.reads_as_tensor for x in libraries):
            rows, lates = ([bool(kind & flag) for kind in self.kinds] for flag in (_ROWS, _LATE))
            found = straight.reader(op.name, types, [x is not None for x in libraries], rows, lates, _LATE_MARK)
        if len(self.readers) < _MOST_READERS:
            self.readers[types] = found
        return found

    def refuse_unreadable(self, values: Sequence[Any]) -> None:
        """Raise TypeError for the first tensor that has no memory of its own, such as a sparse one."""
        for name, value in zip(self.names, values, strict=True):
            for x in value if isinstance(value, (tuple, list)) else (value,):
                library = arrays.library_of(x)
                if library is None or not library.reads_as_tensor:
                    continue
                try:
                    library.address(x)
                except RuntimeError:
                    got = f"{type(x).__name__} of layout {x.layout}"
                    check.fail(name, "a strided tensor with memory of its own", got, TypeError)


class Op:
    """A declared op; see `op`."""

    def __init__(
        self,
        function: Callable[..., Any],
        twin: Callable[..., Any] | None,
        rows: Mapping[str, Sequence[str]],
        late_scalars: Collection[str],
        leader: str = "",
        instead: Callable[..., Any] | None = None,
    ) -> None:
        self.name = function.__name__
        self.plan = function
        self.twin = twin
        self.signature = inspect.signature(function)
        empty = inspect.Parameter.empty
        self._defaults = {x.name: x.default for x in self.signature.parameters.values() if x.default is not empty}
        self.rows = {array: size for size, of in rows.items() for array in of}
        self.late_scalars = frozenset(late_scalars)
        self.flags = frozenset(x.name for x in self.signature.parameters.values() if x.annotation == "bool")
        self.leader = leader
        self.instead = instead
        self.forms: dict[tuple[Any, ...], _Form] = {}
        self.call: Callable[..., Any] = _call_of(self, function)
        self._lock = threading.Lock()
        self._ages: dict[tuple[_Form, tuple[Any, ...]], None] = {}
        unknown = {*self.rows, *self.late_scalars, *([leader] if leader else [])} - {*self.signature.parameters}
        if unknown:
            raise TypeError(f"{self.name} has no arguments {unknown}")

    def form(self, count: int, named: tuple[str, ...]) -> _Form:
        """The form of calls with so many positional arguments and these named ones.

        Raises TypeError, in Python's words after the order of the arguments, where they do not fit the signature.
        """
        try:
            self.signature.bind(*range(count), **dict.fromkeys(named))
        except TypeError as error:
            raise TypeError(f"{self.name}({self._order()}): {error}") from None
        names = [*list(self.signature.parameters)[:count], *named]
        kinds = [_ROWS * (x in self.rows) | _LATE * (x in self.late_scalars) for x in names]
        return self.forms.setdefault((count, *named), _Form(names, kinds))

    def _order(self) -> str:
        """The names of the arguments in their order; those after `*` are keyword-only."""
        parameters = self.signature.parameters.values()
        positional = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
        keywords = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
        return ", ".join([*positional, *(["*", *keywords] if keywords else [])])

    def miss(self, form: _Form, key: tuple[Any, ...] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call without a plan: make one, keep it where there is a key, and run it."""
        if self.instead is not None:
            answer = self.instead(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        values = (*args, *kwargs.values())
        flat = [x for value in values for x in (value if isinstance(value, (tuple, list)) else (value,))]
        if any(isinstance(x, Array) for x in flat):
            return follow_part(lambda: self.plan(*args, **kwargs))  # called in the plan of another op
        known = len(arrays.KNOWN)
        libraries = [arrays.library_of(x) for x in flat]
        if len(arrays.KNOWN) > known:
            return self.call(*args, **kwargs)  # the key took arrays of a new type for plain values
        if self.leader:
            first = dict(zip(form.names, values, strict=True)).get(self.leader)
        else:
            first = next((x for x, of in zip(flat, libraries, strict=True) if of or hasattr(x, "__dlpack__")), None)
        if arrays.library_of(first) is None and hasattr(first, "__dlpack__"):
            return self._foreign(first, args, kwargs)
        trace, returned, reader = self.say(form, values)
        trainable = Trainable(form.names, reader.trainable) if reader.trainable else None
        if trace.is_host_call:
            if trainable is not None and trace.place.library.wants_gradients():
                trainable.refuse(values)
            return self._run_twin(trace, returned, reader, form, values)
        plan = Plan(trace, returned, reader.paths, trainable)
        performance.warn(trace)
        # A key that holds a foreign array would keep it alive.
        if key is not None and not any(
            of is None and hasattr(x, "__dlpack__") for x, of in zip(flat, libraries, strict=True)
        ):
            self._keep(form, key, plan)
        return plan.run(values, [*reader.addresses, *reader.lates])

    def _run_twin(self, trace: Trace, returned: Any, reader: _Reader, form: _Form, values: Sequence[Any]) -> Any:
        """The results of the NumPy reference for arrays in host memory, in the library of these or in `out`.

        The twin is given views of the caller's memory, so that the caller sees what it writes.
        """
        assert self.twin is not None
        library = trace.place.library

        def to_numpy(value: Any) -> Any:
            if type(value) in (tuple, list):
                return type(value)(to_numpy(x) for x in value)
            return library.to_numpy(value) if arrays.library_of(value) is library else value

        def given(array: Array) -> Any:
            position, inner = reader.paths[array.source]
            return values[position] if inner is None else values[position][inner]

        takes = inspect.signature(self.twin).parameters
        takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in takes.values())
        arguments = self._defaults | dict(zip(form.names, values, strict=True))
        taken = {name for name in arguments if name in takes or (takes_all and name not in ("out", "variant"))}
        given_arguments = {name: to_numpy(x) for name, x in arguments.items() if name in taken}
        results = self.twin(**given_arguments | trace.for_twin())
        if returned is not None:  # the plan returns arguments that the twin has written
            return tuple(map(given, returned)) if isinstance(returned, tuple) else given(returned)
        if results is None:
            return None
        assert reader.first is not None
        like = given(reader.first)

        def from_numpy(result: Any, place: Array | None) -> Any:
            if place is not None and place.source in trace.transposed:
                return library.from_numpy(result.swapaxes(-1, -2), like).swapaxes(-1, -2)
            return library.from_numpy(result, like)

        found = []
        many = results if isinstance(results, tuple) else (results,)
        for result, place in itertools.zip_longest(many, trace.outputs):
            if place is None or place.source >= trace.first_made:
                found.append(from_numpy(result, place) if isinstance(result, np.ndarray) else result)
                continue
            found.append(given(place))
            into = library.to_numpy(found[-1])
            if "out" not in takes and not np.may_share_memory(into, result):
                into[...] = result
        out = arguments.get("out")
        if isinstance(out, (tuple, list)) and len(out) == len(found) and all(map(operators.is_, out, found)):
            return out
        return tuple(found) if isinstance(results, tuple) else found[0]

    def _foreign(self, first: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call on arrays that are known by DLPack alone; new results are of the library of the first one."""
        values = [*zip(self.signature.parameters, args, strict=False), *kwargs.items()]
        entered = [arrays.enter_all(name, value) for name, value in values]
        results = self.call(*entered[: len(args)], **dict(zip(kwargs, entered[len(args) :], strict=True)))
        out = kwargs.get("out")
        if out is not None:
            return out

        def leave(result: Any) -> Any:
            given = next((x for own, (_, x) in zip(entered, values, strict=True) if own is result), None)
            if given is not None:
                return given
            return arrays.leave(result, first) if arrays.is_array(result) else result

        return tuple(map(leave, results)) if isinstance(results, tuple) else leave(results)

    def _keep(self, form: _Form, key: tuple[Any, ...], plan: Plan) -> None:
        with self._lock:
            found = form.plans.get(key)
            if plan.guards is None:
                form.plans[key] = plan
            else:
                others = found if isinstance(found, list) else []
                form.plans[key] = [plan, *others[: _MOST_ALTERNATIVES - 1]]
            self._ages.pop((form, key), None)
            self._ages[form, key] = None
            while len(self._ages) > _MOST_PLANS:
                oldest, its_key = next(iter(self._ages))
                del self._ages[oldest, its_key]
                oldest.plans.pop(its_key, None)

    def forget(self) -> None:
        """Forget all plans."""
        with self._lock:
            self._ages.clear()
            for form in list(self.forms.values()):  # another thread may add one
                form.plans.clear()

    def say(self, form: _Form, values: Sequence[Any], on: gpu.Gpu | None = None) -> tuple[Trace, Any, _Reader]:
        """What the plan says and returns for these arguments; `on` is a GPU to take them to be on."""
        reader = _Reader(self, on)
        given = {
            name: reader.read(i, name, kind, value)
            for i, (name, kind, value) in enumerate(zip(form.names, form.kinds, values, strict=True))
        }
        reader.finish()
        place = reader.first.place if reader.first is not None else Place(arrays.NUMPY, None, None)
        trace = Trace(place, len(reader.addresses), reader.guards, len(reader.lates))
        return trace, follow(trace, lambda: self.plan(**given)), reader


def forget_plans() -> None:
    """Forget the plans of all ops, because the variants that they choose among have changed."""
    for op in OPS.values():
        op.forget()


class _Reader:
    """Describes the arrays of a call, in the order in which the call reads them."""

    def __init__(self, op: Op, on: gpu.Gpu | None) -> None:
        self.op = op
        self.on = on
        self.addresses: list[int] = []
        self.guards = Guards(self.addresses)
        self.lates: list[Any] = []
        self.first: Array | None = None
        self.paths: dict[int, tuple[int, int | None]] = {}
        #: The paths of the arrays that may require gradients.
        self.trainable: list[tuple[int, int | None]] = []
        self._numbers: list[Late] = []
        self._sizes: dict[str, Late] = {}  # by their name in `rows`, the first of each
        self._same: list[tuple[Late, Late]] = []  # sizes of one name that are equal in this call

    def read(self, position: int, name: str, kind: int, value: Any) -> Any:
        """The value that the plan is given for an argument."""
        if name in self.op.flags:
            return check.flag(name, value)
        if type(value) in (tuple, list) and any(arrays.library_of(x) is not None for x in value):
            return type(value)(self._describe(position, i, name, kind, x) for i, x in enumerate(value))
        if arrays.library_of(value) is not None:
            return self._describe(position, None, name, kind, value)
        return self._late(value) if kind & _LATE and value is not None else value

    def _late(self, value: Any) -> Late:
        number = Late(value, lambda environment: None, self.guards)
        self.lates.append(value)
        self._numbers.append(number)
        return number

    def _describe(self, position: int, inner: int | None, name: str, kind: int, value: Any) -> Any:
        library = arrays.library_of(value)
        if library is None:
            return value
        address, device = library.address(value), library.device(value, name)
        shape: tuple[Any, ...] = tuple(value.shape)
        if kind & _ROWS and shape:
            size = self._late(shape[0])
            found = self._sizes.setdefault(self.op.rows[name], size)
            if found is not size and found.value == size.value:
                self._same.append((found, size))
                size = found
            shape = (size, *shape[1:])
        if self.on is not None:
            place = Place(library, 0, self.on)
        else:
            place = Place(library, device, None if device is None else gpu.of_device(device))
        alignment = min(address & -address or 16, 16) if place.device is not None else 16
        source = len(self.addresses)
        self.addresses.append(address)
        self.paths[source] = position, inner
        if library.reads_as_tensor and value.is_floating_point():
            self.trainable.append((position, inner))
        made = Array(library.dtype(value), shape, library.strides(value), alignment, place, source, self.guards)
        if self.first is None or (name == self.op.leader and not inner):
            self.first = made
        return made

    def finish(self) -> None:
        """Give the late numbers their places in the environment, now that all addresses before them are known."""
        for i, number in enumerate(self._numbers):
            number.place = len(self.addresses) + i
            number.evaluate = operators.itemgetter(number.place)
        for first, second in self._same:
            self.guards.add(second, operators.eq, first)


def op(
    twin: Callable[..., Any] | None,
    names: str = "",
    results: Callable[..., Any] | None = None,
    *,
    rows: Mapping[str, Sequence[str]] | None = None,
    late: Collection[str] = (),
    leader: str = "",
    instead: Callable[..., Any] | None = None,
) -> Callable[[_F], _F]:
    """Declare an op by the function that is its public signature, its docstring and its plan.

    Args:
        twin: the NumPy function that defines it, with the same arguments except `variant`. It takes `out` only where
            what `out` held matters.
        names: the names of the results, such as "weights, ids"; the signature says the rest of the torch operator, see
            `cukern.runtime.schema`. An op has an operator if it has names or a `WrittenArray`.
        results: a function of the operator's arguments that gives a `Result` for each name, or a number, which is
            returned as it is.
        rows: late sizes by name, each with the arrays that have it as their first dimension.
        late: late scalars; one that may also be an array is in `rows` too.
        leader: the array that decides the library and the device of a call; by default the first one.
        instead: a function of a call's arguments that may answer in its place, or else gives NotImplemented. It is
            asked where there is no plan: always if an argument cannot be hashed, or if they do not fit the signature.
    """

    def declare(function: _F) -> _F:
        made = OPS[function.__name__] = Op(function, twin, rows or {}, late, leader, instead)
        return operator(names, results)(made.call)  # type: ignore[return-value]

    return declare


def operator(names: str = "", results: Callable[..., Any] | None = None) -> Callable[[_F], _F]:
    """Declare the torch operator of a function of `cukern.ops`, with the arguments of `op`."""

    def declare(function: _F) -> _F:
        if names or any("WrittenArray" in str(x) for x in function.__annotations__.values()):
            OPERATORS[function.__name__] = Operator(function, names.split(", ") if names else [], results)
        return function

    return declare


def _read(form: _Form, values: Sequence[Any]) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """The signature of a call, and the start of its environment: the addresses, then the late numbers."""
    library_of = arrays.KNOWN.get
    key: list[Any] = []
    environment: list[Any] = []
    lates: list[Any] = []
    bits = 0
    for kind, value in zip(form.kinds, values):  # noqa: B905
        of = type(value)
        library = library_of(of)
        if library is not None:
            if library.reads_as_tensor:
                shape, address = value.shape, value.data_ptr()
                if kind & _ROWS and shape:
                    lates.append(shape[0])
                    shape = shape[1:]
                key += value.dtype, value.stride(), shape, value.get_device()
            else:
                address = library.read(value, key)
                if kind & _ROWS and key[-2]:
                    lates.append(key[-2][0])
                    key[-2] = key[-2][1:]
            bits |= address
            environment.append(address)
        elif kind & _LATE and value is not None:
            key.append(_LATE_MARK)
            lates.append(value)
        elif of is int or of is str or value is None:
            key.append(value)
        elif of is tuple or of is list:
            key += of, len(value)
            if len(value) > _MANY and not kind & _ROWS and len({*map(type, value)}) == 1:
                library = library_of(type(value[0]))
                if library is not None:
                    addresses = library.read_all(value, key)
                    bits = functools.reduce(operators.or_, addresses, bits)
                    environment += addresses
                    continue
            for x in value:
                library = library_of(type(x))
                if library is None:
                    key += type(x), x
                    continue
                address = library.read(x, key)
                bits |= address
                environment.append(address)
                if kind & _ROWS and key[-2]:
                    lates.append(key[-2][0])
                    key[-2] = key[-2][1:]
        else:
            key += of, value  # with the type, since 1 == 1.0 == True
    if bits & 15:
        key.append(tuple([address & 15 for address in environment]))
    return tuple(key), environment + lates


def _call_of(op: Op, function: _F) -> _F:
    forms = op.forms

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        form = forms.get((len(args), *kwargs))
        if form is None:
            if op.instead is not None:
                answer = op.instead(*args, **kwargs)
                if answer is not NotImplemented:
                    return answer
            form = op.form(len(args), tuple(kwargs))
        values = (*args, *kwargs.values()) if kwargs else args
        types = tuple(map(type, values))
        try:
            read = form.readers[types]
        except KeyError:
            read = form.find_reader(op, values)
        try:
            signature, environment = (read and read(values)) or _read(form, values)
        except RuntimeError:
            form.refuse_unreadable(values)
            raise
        try:
            plan: Plan | None = None
            found = form.plans.get(signature)  # type: ignore[arg-type]
            if isinstance(found, list):
                for one in found:
                    if one.holds(environment):
                        plan = one
                        break
            else:
                plan = found
        except TypeError:
            # A value that cannot be hashed or compared fits no plan: the checks of a new one name the argument.
            plan = signature = None
        if plan is None:
            return op.miss(form, signature, args, kwargs)
        return plan.run(values, environment)

    return call  # type: ignore[return-value]
