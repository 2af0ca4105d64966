"""Ops: how a public function is declared, and how its calls run.

The Python body of an op computes no result. It makes a plan: from descriptions of the arrays (`Array`) it checks the
arguments, chooses the kernel, and records allocations and launches with `outputs`, `empty` and `launch`. It does not
use the GPU, and all its numbers are plain ints and floats.

A later call with equal arguments, apart from array addresses, runs the kept plan: it allocates, packs the parameter
structs and launches. Any other call runs the body again. For host arrays, the NumPy reference (the twin) computes the
result after the body's checks. If a body calls another op with descriptions, both ops' steps form one plan.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator as operators
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cukern.runtime import arrays, check, gpu, performance
from cukern.runtime.describe import Array, Place
from cukern.runtime.each import Each
from cukern.runtime.plan import Plan, Trace, run_nested, run_traced

_F = TypeVar("_F", bound=Callable[..., Any])


class Operator(NamedTuple):
    """A torch operator; `op` describes its fields."""

    function: Callable[..., Any]
    names: Sequence[str]  # of the results
    results: Callable[..., Any] | None


OPS: dict[str, Op] = {}
OPERATORS: dict[str, Operator] = {}
#: After this number of runs of its body, an op drops all plans. Plans for sizes that never repeat would fill the
#: memory.
_MAX_RUNS = 1024
#: The maximum number of plans per key. A key holds the argument values that select a plan, and the first array's
#: shape.
_MAX_LAYOUTS = 16


class _Kept(NamedTuple):
    plan: Plan
    matches: Callable[..., bool]
    memory: tuple[tuple[int, int], ...] | None
    requires_grad: bool


class _CallKind:
    """The plans for calls that agree in the number of positional arguments, the keywords and the types."""

    def __init__(self, names: Sequence[str], values: Sequence[Any], numbers: Collection[str]) -> None:
        self.names = names  # of the arguments, in order
        self.plans: dict[tuple[Any, ...], list[_Kept]] = {}
        self.is_nested = any(type(value) in (tuple, list) for value in values)
        flat, named = _flatten(values)
        libraries = [arrays.library_of(x) for x in flat]
        given = [i for i, of in enumerate(libraries) if of is not None]
        own = [i for i, x in enumerate(flat) if libraries[i] is None and x is not None]
        differs = [i for i in own if names[named[i]] in numbers]
        self.arrays = _getter(given)
        #: `numbers` selects the values that may differ at each call, `facts` the values that select the plan.
        self.numbers, self.facts = _getter(differs), _getter([i for i in own if i not in differs])
        #: Keep plans only if all arrays belong to one known library. A DLPack array would be part of the key, which
        #: would keep it alive.
        self.keeps = len({*libraries} - {None}) == 1 and not any(hasattr(flat[i], "__dlpack__") for i in own)


def _getter(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return operators.itemgetter(*places)
    return operators.itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))


def _flatten(values: Sequence[Any]) -> tuple[tuple[Any, ...], list[int]]:
    """Expand the tuples and lists in `values`. Also return, for each element, the index of the value it is from."""
    flat: list[Any] = []
    positions: list[int] = []
    for i, value in enumerate(values):
        own = value if type(value) in (tuple, list) else (value,)
        flat += own
        positions += [i] * len(own)
    return tuple(flat), positions


class Op:
    def __init__(
        self,
        function: Callable[..., Any],
        twin: Callable[..., Any] | None,
        numbers: Collection[str] = (),
        leader: str = "",
        instead: Callable[..., Any] | None = None,
    ) -> None:
        self.name = function.__name__
        self.body = function
        self.twin = twin
        self.signature = inspect.signature(function)
        empty = inspect.Parameter.empty
        self._defaults = {x.name: x.default for x in self.signature.parameters.values() if x.default is not empty}
        self.numbers = frozenset(numbers)
        self.flags = frozenset(x.name for x in self.signature.parameters.values() if x.annotation == "bool")
        self.leader = leader
        self.instead = instead
        self.kinds: dict[tuple[Any, ...], _CallKind] = {}
        self.call: Callable[..., Any] = _call_of(self, function)
        self._runs = 0
        unknown = {*self.numbers, *([leader] if leader else [])} - {*self.signature.parameters}
        if unknown:
            raise TypeError(f"{self.name} has no arguments {unknown}")

    def kind_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _CallKind:
        """Return the kind of a call. Raises TypeError if the arguments do not fit; the message lists the parameters."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}({self._order()}): {error}") from None
        values = (*args, *kwargs.values())
        names = [*list(self.signature.parameters)[: len(args)], *kwargs]
        return _CallKind(names, values, self.numbers)

    def _order(self) -> str:
        parameters = self.signature.parameters.values()
        positional = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
        keywords = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
        return ", ".join([*positional, *(["*", *keywords] if keywords else [])])

    def miss(self, kind: _CallKind, key: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call without a kept plan. Keep its plan if there is a key."""
        if self.instead is not None:
            answer = self.instead(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        values = (*args, *kwargs.values())
        flat = _flatten(values)[0]
        if any(type(x) is Array for x in flat):
            return run_nested(lambda: self.body(*args, **kwargs))  # another op's body is the caller
        if self.leader:
            first = dict(zip(kind.names, values, strict=True)).get(self.leader)
        else:
            first = next((x for x in flat if arrays.library_of(x) or hasattr(x, "__dlpack__")), None)
        if arrays.library_of(first) is None and hasattr(first, "__dlpack__"):
            return self._foreign(first, args, kwargs)
        trace, returned, reader = self.record(kind, values)
        if trace.is_host_call:
            return self._run_twin(trace, returned, reader, kind, values)
        plan, given = Plan(trace, returned, reader.paths), kind.arrays(flat)
        performance.warn(trace)
        if key is not None and kind.keeps:
            if self._runs >= _MAX_RUNS:
                self.forget()
            self._runs += 1
            if key in kind.plans:
                self._keep(kind, key, plan, given, reader.addresses)
            else:
                kind.plans[key] = []  # the second call keeps a plan, because many sizes occur only once
        return plan.run(values, given, [*reader.addresses, *(x.value for x in reader.numbers)])

    def _run_twin(self, trace: Trace, returned: Any, reader: _Reader, kind: _CallKind, values: Sequence[Any]) -> Any:
        """Run the NumPy reference on views of the caller's memory. Return the results in `out` or in
        arrays of the caller's library."""
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
        arguments = self._defaults | dict(zip(kind.names, values, strict=True))
        taken = {name for name in arguments if name in takes or (takes_all and name not in ("out", "variant"))}
        given_arguments = {name: to_numpy(x) for name, x in arguments.items() if name in taken}
        results = self.twin(**given_arguments | trace.for_twin())
        if returned is not None:  # the plan returns arguments that the reference has written
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
        """Run a call on arrays known only by DLPack. New results get the library of the first array."""
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

    def _keep(
        self, kind: _CallKind, key: tuple[Any, ...], plan: Plan, given: Sequence[Any], addresses: Sequence[int]
    ) -> None:
        matches = plan.library.alike(given)
        requires_grad = any(getattr(x, "requires_grad", False) for x in given)
        made = _Kept(plan, matches, _memory(addresses, plan.compares), requires_grad)
        kind.plans[key] = [made, *kind.plans.get(key, [])[: _MAX_LAYOUTS - 1]]

    def forget(self) -> None:
        self.kinds.clear()
        self._runs = 0

    def record(self, kind: _CallKind, values: Sequence[Any], on: gpu.Gpu | None = None) -> tuple[Trace, Any, _Reader]:
        """Run the body. Return its trace, its result and the reader. `on` replaces the GPU of the arrays."""
        reader = _Reader(self, on)
        given = {
            name: reader.read(i, name, value) for i, (name, value) in enumerate(zip(kind.names, values, strict=True))
        }
        for i, number in enumerate(reader.numbers):
            number.place = len(reader.addresses) + i
        place = reader.first.place if reader.first is not None else Place(arrays.NUMPY, None, None)
        trace = Trace(place, reader.addresses, len(reader.numbers))
        return trace, run_traced(trace, lambda: self.body(**given)), reader


def _memory(addresses: Sequence[int], compares: bool) -> tuple[tuple[int, int], ...] | None:
    """Return what a plan depends on: for each address its alignment and, if `compares`, the index of the first equal
    address.

    None stands for the usual case: all addresses are multiples of 16 and, if `compares`, distinct.
    """
    if functools.reduce(operators.or_, addresses) & 15 or (compares and len({*addresses}) < len(addresses)):
        return tuple([(address & 15, addresses.index(address) if compares else 0) for address in addresses])
    return None


def forget_plans() -> None:
    """Drop the plans of all ops, because the choice of variants has changed."""
    for op in OPS.values():
        op.forget()


class _Reader:
    """Describes the arrays of a call, in argument order."""

    def __init__(self, op: Op, on: gpu.Gpu | None) -> None:
        self.op = op
        self.on = on
        self.addresses: list[int] = []
        self.numbers: list[Each] = []
        self.first: Array | None = None
        self.paths: list[tuple[int, int | None]] = []  # (argument index, index in a tuple or None) of each array
        self._places: dict[tuple[str, int | None], Place] = {}

    def read(self, position: int, name: str, value: Any) -> Any:
        if name in self.op.flags:
            return check.flag(name, value)
        if type(value) in (tuple, list) and any(arrays.library_of(x) is not None for x in value):
            return type(value)(self._describe(position, i, name, x) for i, x in enumerate(value))
        if arrays.library_of(value) is not None:
            return self._describe(position, None, name, value)
        if name in self.op.numbers and value is not None:
            self.numbers.append(Each(value))
            return self.numbers[-1]
        return value

    def _describe(self, position: int, inner: int | None, name: str, value: Any) -> Any:
        library = arrays.library_of(value)
        if library is None:
            return value
        called = name if inner is None else f"{name}[{inner}]"
        view = library.view(called, value)
        address = view.address
        place = self._places.get((library.name, view.device))
        if place is None:
            device = view.device if self.on is None else 0
            on = self.on or (None if device is None else gpu.of_device(device))
            place = self._places[library.name, view.device] = Place(library, device, on)
        alignment = min(address & -address or 16, 16) if place.device is not None else 16
        self.paths.append((position, inner))
        self.addresses.append(address)
        made = Array(view.dtype, view.shape, view.strides, alignment, place, len(self.addresses) - 1, address)
        if self.first is None or (name == self.op.leader and not inner):
            self.first = made
        return made


def op(
    twin: Callable[..., Any] | None,
    names: str = "",
    results: Callable[..., Any] | None = None,
    *,
    numbers: Collection[str] = (),
    leader: str = "",
    instead: Callable[..., Any] | None = None,
) -> Callable[[_F], _F]:
    """Declare an op. The decorated function has the public signature and docstring, and its body makes the plan.

    Args:
        twin: the NumPy function that defines the op, with the same arguments except `variant`. It takes `out` only if
            the old content of `out` matters.
        names: the result names in the torch operator's schema, such as "weights, ids". Only an op with names or a
            `WrittenArray` has a torch operator.
        results: a function of the operator's arguments. It returns for each name a `Result`, or a number that is
            returned unchanged.
        numbers: arguments that differ at each call, such as a seed. The body gets an `Each`.
        leader: the array that decides the library and device of a call; by default the first array.
        instead: a function of the call's arguments, called if no kept plan fits. It returns the result, or
            NotImplemented to let the op run. Arguments that cannot be hashed or do not fit the signature never match a
            plan.
    """

    def declare(function: _F) -> _F:
        made = OPS[function.__name__] = Op(function, twin, numbers, leader, instead)
        return operator(names, results)(made.call)  # type: ignore[return-value]

    return declare


def operator(names: str = "", results: Callable[..., Any] | None = None) -> Callable[[_F], _F]:
    """Declare the torch operator of a function; the arguments are as in `op`."""

    def declare(function: _F) -> _F:
        if names or any("WrittenArray" in str(x) for x in function.__annotations__.values()):
            OPERATORS[function.__name__] = Operator(function, names.split(", ") if names else [], results)
        return function

    return declare


def _call_of(op: Op, function: _F) -> _F:
    kinds = op.kinds

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        types = (len(args), *kwargs, *map(type, values))
        kind, flat = kinds.get(types), values
        if kind is None or kind.is_nested:
            flat = _flatten(values)[0]
            types += (*[len(x) for x in values if type(x) in (tuple, list)], *map(type, flat))
            kind = kinds.get(types)
        if kind is None:
            if op.instead is not None:
                answer = op.instead(*args, **kwargs)
                if answer is not NotImplemented:
                    return answer
            kind = op.kind_of(args, kwargs)
            kinds[types] = kinds[types[: 1 + len(kwargs) + len(values)]] = kind
        given, key = kind.arrays(flat), None
        if given:
            try:
                key = kind.facts(flat), given[0].shape
                kept = kind.plans.get(key, ())
            except TypeError:  # unhashable: the body's checks will name the argument
                key, kept = None, ()
            for plan, matches, memory, requires_grad in kept:
                if matches(*given) and not (requires_grad and plan.library.wants_gradients()):
                    environment = [*map(plan.library.address, given)]
                    if _memory(environment, plan.compares) == memory:
                        return plan.run(values, given, [*environment, *kind.numbers(flat)])
        return op.miss(kind, key, args, kwargs)

    return call  # type: ignore[return-value]
