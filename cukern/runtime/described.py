"""Calls of arrays that are only described: what `cukern.explain` and plans of several ops see of a plain function.

A description is a `describe.Array`. Its library allocates further descriptions, and its launches join the trace of the
plan. Each array has an address of its own in no memory, so that a launch tells which array a field points to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from cukern.runtime import arrays, plan
from cukern.runtime.arrays import Library, View
from cukern.runtime.describe import Array
from cukern.runtime.gpu import Gpu
from cukern.runtime.launch import Config
from cukern.runtime.view import READERS

_APART = 44  # bits between the addresses of two arrays


class Described(Library):
    """The descriptions of arrays of a library. It is the `recorder` of its launches."""

    def __init__(self, library: Library) -> None:
        self.name, self.array_type, self.recorder = library.name, library.array_type, self

    def view(self, name: str, array: Array) -> View:
        shape, strides = tuple(map(int, array.shape)), tuple(map(int, array.strides))
        return View(array, self, self.address(array), array.dtype, shape, strides, array.place.device)

    def address(self, array: Array) -> int:
        trace, source = plan.current(), array.source
        given = trace.guards.addresses  # the arrays made for the call come after these, and are aligned
        start = (source + 1 << _APART) + (given[source] % 16 if source < len(given) else 0)
        trace.starts[source] = start
        return start + int(array.offset)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Array:
        return plan.current().make(shape, dtype)

    def transposed(self, array: Array) -> Array:
        plan.current().transposed.add(array.source)
        return array.transposed

    def workspace(self, sizes: Sequence[int], device: int | None) -> tuple[Any, list[int]]:
        parts = [self.allocate((size,), "uint8", device) for size in sizes]
        return parts, [*map(self.address, parts)]

    @property
    def gpu(self) -> Gpu:
        """The GPU of the plan."""
        found = plan.current().place.gpu
        assert found is not None
        return found

    def note(self, flops: int = 0, **facts: Any) -> None:
        """Note facts of a call; several calls of one plan add their flops."""
        if flops:
            facts["flops"] = plan.current().notes.get("flops", 0) + flops
        plan.note(**facts)

    def launch(self, config: Config, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        """Add a launch to the trace."""
        fields = config.pack.fields(values)
        why = config.reason.format(**fields, grid=grid)
        plan.launch(config.variant, grid, config.block, config.shared_bytes, why=why, **_with_arrays(fields))

    def run_twin(self) -> None:
        """Leave the arrays to the twin."""
        plan.current().is_host_call = True


def _with_arrays(value: Any) -> Any:
    """A field of a launch, with the arrays for its addresses."""
    if isinstance(value, dict):
        return {name: _with_arrays(x) for name, x in value.items()}
    return _array_at(value) if type(value) is int else value


def _array_at(value: int) -> Any:
    """The array at an address; a number that is none as it is."""
    trace, source = plan.current(), (value >> _APART) - 1
    if source not in trace.starts:
        return value
    return Array("uint8", (), None, 16, trace.place, source, trace.guards, value - trace.starts[source])


@functools.cache
def _described(library: arrays.Library) -> Described:
    return Described(library)


def _view(name: str, array: Array) -> View:
    return _described(array.place.library).view(name, array)


READERS[Array] = _view
