"""What a plan sees of the arrays of a call: descriptions, and the checks of them.

Each failure names the argument, what was wanted and what came.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check
from cukern.runtime.gpu import Gpu
from cukern.runtime.late import Guards, Late, late

#: Bytes at a multiple of which every library allocates, at least; more does not matter to any plan.
ALLOCATED_ALIGNMENT = 16


class Place(NamedTuple):
    """Where arrays are: a library, and a CUDA device or None for host memory; and the GPU there."""

    library: arrays.Library
    device: int | None
    gpu: Gpu | None

    def __str__(self) -> str:
        return "the CPU" if self.device is None else f"CUDA device {self.device}"


class NoNumbers(TypeError):
    """A plan asks for what is in an array, which is known only once it has run."""


class Array:
    """The description of an array: what a plan may know of it. It is also how a launch says which array it means.

    `strides` are in elements; `alignment` is a power of two of at most 16 that divides the address.
    """

    def __init__(
        self,
        dtype: str,
        shape: Sequence[Any],
        strides: Sequence[Any] | None,
        alignment: int,
        place: Place,
        source: int,
        guards: Guards,
        offset: Any = 0,
    ) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self._has_no_gaps = strides is None  # known without a look at sizes that may be late
        self.strides = contiguous_strides(shape) if strides is None else tuple(strides)
        self.alignment = alignment
        self.place = place
        #: Of the addresses of the call, the one that this begins at, `offset` bytes further on.
        self.source = source
        self.offset = offset
        self._guards = guards

    @property
    def gpu(self) -> Gpu:
        """The GPU that the plan is for."""
        assert self.place.gpu is not None
        return self.place.gpu

    @property
    def on_host(self) -> bool:
        """Whether it lies in host memory: there the NumPy twin runs."""
        return self.place.device is None

    @property
    def item_size(self) -> int:
        return arrays.ITEM_SIZE[self.dtype]

    @property
    def size(self) -> Any:
        """How many elements there are."""
        return functools.reduce(operator.mul, self.shape, 1)

    @property
    def address(self) -> Late:
        """The address, late; while the plan is made that of an array which will be allocated is 0."""
        known = self._guards.addresses
        root = Late.at(self.source, known[self.source] if self.source < len(known) else 0, self._guards)
        return root if type(self.offset) is int and not self.offset else late(operator.add, root, self.offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in C order without gaps."""
        if self._has_no_gaps:
            return True
        wanted: Any = 1
        for i in reversed(range(len(self.shape))):
            # The size is looked at last: it may be late.
            if self.strides[i] != wanted and self.shape[i] != 1:
                return any(size == 0 for size in self.shape)
            if i:
                wanted = wanted * self.shape[i]
        return True

    def view(self, shape: Sequence[Any], dtype: str | None = None, offset: Any = 0) -> Array:
        """An array without gaps in the memory of this one, from `offset` bytes on (a multiple of 16)."""
        return self._part(dtype or self.dtype, shape, None, self.alignment, offset)

    def _part(
        self, dtype: str, shape: Sequence[Any], strides: Sequence[Any] | None, alignment: int, offset: Any
    ) -> Array:
        start = offset if type(self.offset) is int and not self.offset else self.offset + offset
        return Array(dtype, shape, strides, alignment, self.place, self.source, self._guards, start)

    def reshape(self, *shape: Any) -> Array:
        """The same elements in another shape, of an array without gaps; -1 for what is left."""
        known = functools.reduce(operator.mul, (n for n in shape if type(n) is not int or n >= 0), 1)
        return self.view([self.size // known if type(n) is int and n < 0 else n for n in shape])

    @property
    def transposed(self) -> Array:
        """With the last two dimensions the other way round."""
        shape, strides = ((*of[:-2], of[-1], of[-2]) for of in (self.shape, self.strides))
        return self._part(self.dtype, shape, strides, self.alignment, 0)

    def __getitem__(self, rows: slice) -> Array:
        """The rows from `rows.start` on, or those before `rows.stop`. Raises NoNumbers for an index."""
        if not isinstance(rows, slice):
            raise NoNumbers("a plan knows no numbers of an array")
        first, stop = rows.start or 0, self.shape[0] if rows.stop is None else rows.stop
        between = self.strides[0] * self.item_size
        alignment = self.alignment if type(first) is int and first == 0 else math.gcd(self.alignment, between)
        shape = stop - first if type(first) is not int or first else stop, *self.shape[1:]
        return self._part(self.dtype, shape, self.strides, alignment, first * between)


def contiguous_strides(shape: Sequence[Any]) -> tuple[Any, ...]:
    """Of an array in C order without gaps, in elements."""
    strides: list[Any] = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * late(_at_least_one, shape[i])
    return tuple(strides)


def _at_least_one(size: int) -> int:
    return size or 1


class Result(NamedTuple):
    """An array that an op returns: contiguous, where its first array is. `symbols` is its shape in messages.

    Sizes may be symbols of torch.compile: a function that says what an op returns must not look at them.
    """

    shape: tuple[Any, ...]
    dtype: str
    symbols: str = ""
    transposed: bool = False  # contiguous with the last two dimensions, and `symbols`, the other way round

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What an array that is given for it may be: FP8 numbers, or their bytes."""
        return (self.dtype, "uint8") if self.dtype == "float8_e4m3fn" else (self.dtype,)


def dtype_name(array: Any) -> str:
    """The dtype's name of a description, or of a tensor as torch traces it."""
    return str(array.dtype).removeprefix("torch.")


def type_name(value: Any) -> str:
    """The name of a value's type as the caller knows it."""
    return (value.place.library.array_type if isinstance(value, Array) else type(value)).__name__


# --- checks -------------------------------------------------------------------------------------------


def expect_array(name: str, array: Any, dtypes: Collection[str] = (), symbols: tuple[str, ...] | None = None) -> Array:
    """`array` is one, the first of a call, of one of these dtypes and with the dimensions `symbols`.

    Raises TypeError for what is no array and for a dtype, ValueError for another number of dimensions.
    """
    if not isinstance(array, Array):
        wanted = "an array (NumPy, CuPy, torch, or any with __dlpack__)"
        check.fail(name, wanted, type(array).__name__, TypeError)
    if dtypes:
        check.dtype(name, array.dtype, dtypes)
    if symbols is not None:
        check.dimensions(name, array.shape, symbols)
    return array


def expect_place(name: str, array: Any, like: Array, like_name: str) -> Array:
    """`array` is of the library and on the device of the argument `like`.

    Raises TypeError for another library, ValueError for another device.
    """
    if not isinstance(array, Array) or array.place.library is not like.place.library:
        found = array.place.library.array_type if isinstance(array, Array) else type(array)
        wanted = f"a {like.place.library.name} array like {like_name}"
        check.fail(name, wanted, f"{found.__module__}.{found.__name__}", TypeError)
    if array.place.device != like.place.device:
        check.fail(name, f"on {like.place} like {like_name}", f"one on {array.place}")
    return array


def same_shape(array: Array, shape: Sequence[Any]) -> bool:
    """Whether an array has a shape, of late sizes too."""
    pairs = zip(array.shape, shape, strict=False)
    return len(array.shape) == len(shape) and all(a is b or a == b for a, b in pairs)


def expect(
    name: str,
    array: Any,
    like: Array,
    like_name: str,
    dtypes: Collection[str],
    shape: Sequence[Any],
    symbols: str,
) -> Array:
    """`array` is a contiguous one where the argument `like` is, of this shape and dtype.

    Raises TypeError for a library or a dtype, ValueError for a device, a shape or strides that do not fit.
    """
    expect_place(name, array, like, like_name)
    check.dtype(name, array.dtype, dtypes)
    if not same_shape(array, shape):
        check.shape(name, array.shape, tuple(shape), symbols)
    expect_contiguous(name, array)
    return array


def expect_contiguous(name: str, array: Array) -> None:
    """Raises ValueError unless the elements of `array` lie in C order without gaps."""
    if not array.is_contiguous:
        check.fail(name, "contiguous", f"strides {array.strides} (in elements)")


def expect_row_stride(name: str, matrix: Array) -> Any:
    """The distance between the rows of a matrix, in elements.

    Raises ValueError unless each row is contiguous.
    """
    between_rows, stride = matrix.strides
    if stride != 1 and matrix.shape[1] > 1 and matrix.shape[0]:
        check.fail(name, "contiguous along its last dimension", f"strides {between_rows, stride} (in elements)")
    return between_rows


def expect_table(name: str, array: Any, like: Array, like_name: str, rows: Any, symbols: tuple[str, str]) -> Any:
    """How many columns an int32 matrix of `rows` rows has, and the distance between its rows, in elements.

    Raises TypeError for a library or a dtype, ValueError for a device, a shape or strides that do not fit.
    """
    expect_place(name, array, like, like_name)
    check.dtype(name, array.dtype, ("int32",))
    check.dimensions(name, array.shape, symbols)
    columns = array.shape[1]
    if array.shape[0] != rows:
        check.shape(name, array.shape, (rows, columns), f"[{', '.join(symbols)}]")
    return columns, expect_row_stride(name, array)
