"""Read the token ids and masks that a model takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import library_of
from cukern.runtime import arrays, check

_IDS = ("int32", "int64")
_MASKS = ("bool", "uint8", "int8", "int32", "int64")


class Batch(NamedTuple):
    """Token ids [batch, seq], mask and types, in NumPy, CuPy or torch."""

    input_ids: Any
    attention_mask: Any  # None: no padding
    token_type_ids: Any = None

    def apply(self, function: Callable[[str, Any], Any]) -> list[Any]:
        return [None if x is None else function(name, x) for name, x in zip(self._fields, self, strict=True)]

    def is_in_host_memory(self) -> bool:
        return not any(x is not None for x in self.apply(lambda name, x: library_of(name, x).device(x, name)))

    def to_numpy(self) -> Batch:
        return Batch(*self.apply(lambda name, x: library_of(name, x).to_numpy(x)))

    def like(self, weight: Any) -> Batch:
        """Convert the batch to the array library and the device of `weight`."""
        return Batch(*self.apply(lambda name, x: _like(name, x, weight)))


def read_batch(input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Batch:
    """Check the arguments, arrays or lists of lists, and return them as a batch.

    Raises TypeError for a wrong type or dtype, and ValueError for a wrong shape.
    """
    found = Batch(*map(_as_array, Batch._fields, (input_ids, attention_mask, token_type_ids)))
    check.dtype("input_ids", library_of("input_ids", found.input_ids).dtype(found.input_ids), _IDS)
    shape = tuple(found.input_ids.shape)
    check.dimensions("input_ids", shape, ("batch", "seq"))
    for (name, array), dtypes in zip([*found._asdict().items()][1:], (_MASKS, _IDS), strict=True):
        if array is not None:
            check.dtype(name, library_of(name, array).dtype(array), dtypes)
            check.shape(name, tuple(array.shape), shape, "[batch, seq]")
    return found


def _as_array(name: str, value: Any) -> Any:
    """Return `value` as an array. None is allowed except for `input_ids`."""
    if value is None and name != "input_ids":
        return None
    if isinstance(value, (list, tuple)):
        try:
            return np.array(value)
        except ValueError:
            check.fail(name, "lists of one length, padded", "lists of several lengths")
    return arrays.enter(name, value)


def _like(name: str, array: Any, weight: Any) -> Any:
    library, target = library_of(name, array), library_of("weights", weight)
    if library is target and target.device(array) == target.device(weight):
        return array
    # Copy, because torch warns about a read-only array.
    return target.from_numpy(np.array(library.to_numpy(array)), weight)


def check_ids(name: str, ids: np.ndarray[Any, Any], counts: np.ndarray[Any, Any] | None, size: int) -> None:
    """Raise ValueError if an id outside [0, size) has a nonzero count."""
    outside = (ids < 0) | (ids >= size)
    if counts is not None:
        outside &= counts != 0
    if outside.any():
        index = tuple(int(x) for x in np.argwhere(outside)[0])
        check.fail(f"{name}[{', '.join(map(str, index))}]", f"in [0, {size})", int(ids[index]))
