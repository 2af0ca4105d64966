"""Descriptions of arrays, and checks of them. An op's body gets descriptions instead of arrays."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from cukern.runtime import arrays, check
from cukern.runtime.arrays import strides_of
from cukern.runtime.gpu import Gpu

#: Alignment in bytes of every library's allocations, and the largest alignment that a plan relies on.
ALLOCATED_ALIGNMENT = 16


class Place(NamedTuple):
    """A library, a CUDA device and its GPU. `device` and `gpu` are None for host memory."""

    library: arrays.Library
    device: int | None
    gpu: Gpu | None

    def __str__(self) -> str:
        return "the CPU" if self.device is None else f"CUDA device {self.device}"


class NoNumbers(TypeError):
    """An op's body tried to read an element. No element exists before the kernels have run."""


class Array:
    """An array's description. In a launch it stands for the array's address.

    `strides` are in elements. `alignment` is a power of two up to 16 that divides the address.
    """

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        alignment: int,
        place: Place,
        source: int,
        address: int = 0,
        offset: int = 0,
    ) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.strides = strides_of(self.shape) if strides is None else tuple(strides)
        self.alignment = alignment
        self.place = place
        #: The array begins `offset` bytes after the address with index `source` in the plan's environment.
        self.source = source
        self.offset = offset
        self.address = address  # in the call that makes the plan; 0 for an array that the call allocates

    @property
    def gpu(self) -> Gpu:
        assert self.place.gpu is not None
        return self.place.gpu

    @property
    def array_type(self) -> type:
        return self.place.library.array_type

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory, where the NumPy reference computes."""
        return self.place.device is None

    @property
    def item_size(self) -> int:
        return arrays.ITEM_SIZE[self.dtype]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        wanted = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if stride != wanted and size != 1:
                return 0 in self.shape
            wanted *= size
        return True

    def view(self, shape: Sequence[int], dtype: str | None = None, offset: int = 0) -> Array:
        """Return a contiguous array in this memory, `offset` bytes (a multiple of 16) from the start."""
        return self._part(dtype or self.dtype, shape, None, self.alignment, offset)

    def _part(
        self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None, alignment: int, offset: int
    ) -> Array:
        address = self.address and self.address + offset
        return Array(dtype, shape, strides, alignment, self.place, self.source, address, self.offset + offset)

    def reshape(self, *shape: int) -> Array:
        """Reshape a contiguous array. One size may be -1."""
        known = math.prod(n for n in shape if n >= 0)
        return self.view([self.size // known if n < 0 else n for n in shape])

    @property
    def transposed(self) -> Array:
        """The array with its last two dimensions exchanged."""
        shape, strides = ((*of[:-2], of[-1], of[-2]) for of in (self.shape, self.strides))
        return self._part(self.dtype, shape, strides, self.alignment, 0)

    def __getitem__(self, rows: slice) -> Array:
        """Return the rows of a slice. Raises NoNumbers for an index."""
        if not isinstance(rows, slice):
            raise NoNumbers("a plan cannot read the elements of an array")
        first, stop = rows.start or 0, self.shape[0] if rows.stop is None else rows.stop
        between = self.strides[0] * self.item_size
        alignment = self.alignment if first == 0 else math.gcd(self.alignment, between)
        return self._part(self.dtype, (stop - first, *self.shape[1:]), self.strides, alignment, first * between)


class Result(NamedTuple):
    """A contiguous result of an op, in the library and on the device of the op's first array.

    `symbols` is the shape in messages. Sizes may be symbolic under torch.compile, so do not compare them.
    """

    shape: tuple[Any, ...]
    dtype: str
    symbols: str = ""
    transposed: bool = False  # contiguous after its last two dimensions are exchanged

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that `out` may have. An array of uint8 may hold an FP8 result."""
        return (self.dtype, "uint8") if self.dtype == "float8_e4m3fn" else (self.dtype,)


def dtype_name(array: Any) -> str:
    """Return the dtype name of a description, or of a tensor that torch traces."""
    return str(array.dtype).removeprefix("torch.")


def type_name(value: Any) -> str:
    return (value.array_type if isinstance(value, Array) else type(value)).__name__


# --- checks -------------------------------------------------------------------------------------------


def expect_array(name: str, array: Any, dtypes: Collection[str] = (), symbols: tuple[str, ...] | None = None) -> Array:
    """Check an array's dtype, and its dimensions, named in `symbols`."""
    if not isinstance(array, Array):
        wanted = "an array (NumPy, CuPy, torch, or any with __dlpack__)"
        check.fail(name, wanted, type(array).__name__, TypeError)
    if dtypes:
        check.dtype(name, array.dtype, dtypes)
    if symbols is not None:
        check.dimensions(name, array.shape, symbols)
    return array


def expect_place(name: str, array: Any, like: Array, like_name: str) -> Array:
    """Check that `array` has the library and the device of `like`, which messages call `like_name`."""
    if not isinstance(array, Array) or array.place.library is not like.place.library:
        found = array.place.library.array_type if isinstance(array, Array) else type(array)
        wanted = f"a {like.place.library.name} array like {like_name}"
        check.fail(name, wanted, f"{found.__module__}.{found.__name__}", TypeError)
    if array.place.device != like.place.device:
        check.fail(name, f"on {like.place} like {like_name}", f"one on {array.place}")
    return array


def expect(
    name: str, array: Any, like: Array, like_name: str, dtypes: Collection[str], shape: Sequence[Any], symbols: str
) -> Array:
    """Check that `array` is contiguous, has this shape and one of these dtypes, and is where `like` is."""
    expect_strided(name, array, like, like_name, dtypes, shape, symbols)
    expect_contiguous(name, array)
    return array


def expect_strided(
    name: str, array: Any, like: Array, like_name: str, dtypes: Collection[str], shape: Sequence[Any], symbols: str
) -> Array:
    """Like `expect`, for an array with any strides."""
    expect_place(name, array, like, like_name)
    check.dtype(name, array.dtype, dtypes)
    check.shape(name, array.shape, tuple(shape), symbols)
    return array


def expect_one(name: str, array: Any, like: Array, like_name: str, dtype: str) -> Array:
    """Like `expect`, for an array of shape [1] or []."""
    return expect(name, array, like, like_name, (dtype,), array.shape and (1,), "[1]")


def expect_contiguous(name: str, array: Array) -> None:
    if not array.is_contiguous:
        check.fail(name, "contiguous", f"strides {array.strides} (in elements)")


def expect_aligned(name: str, array: Array, when: str = "") -> None:
    """Check that the address is a multiple of 16 bytes."""
    if array.alignment < 16:
        check.fail(name, f"at a multiple of 16 bytes{when}", f"an address that is a multiple of {array.alignment}")


def is_transposed(weights: Array) -> bool:
    """Return whether n is the contiguous dimension of weights [experts, n, k]."""
    return weights.strides[-1] != 1 and weights.shape[-1] > 1 and not weights.is_contiguous


def expect_weights(name: str, weights: Array) -> None:
    """Raise ValueError unless weights [experts, n, k] are contiguous along k, or, with elements of 16 or 32 bits, along
    n.

    Negative strides are refused.
    """
    if weights.is_contiguous:
        return
    along, wanted = 2, "contiguous along its last dimension"
    if weights.item_size > 1 and is_transposed(weights):
        along, wanted = 1, "contiguous along its last dimension, or along the one before"
    if (weights.strides[along] != 1 and weights.shape[along] > 1) or min(weights.strides) < 0:
        check.fail(name, wanted, f"strides {weights.strides} (in elements)")


def expect_row_stride(name: str, matrix: Array) -> Any:
    """Check that rows are contiguous. Return the row stride in elements."""
    between_rows, stride = matrix.strides
    if stride != 1 and matrix.shape[1] > 1 and matrix.shape[0]:
        check.fail(name, "contiguous along its last dimension", f"strides {between_rows, stride} (in elements)")
    return between_rows


def expect_table(name: str, array: Any, like: Array, like_name: str, rows: Any, symbols: tuple[str, str]) -> Any:
    """Check an int32 matrix of `rows` rows. Return its columns, and its row stride in elements."""
    expect_place(name, array, like, like_name)
    check.dtype(name, array.dtype, ("int32",))
    check.dimensions(name, array.shape, symbols)
    columns = array.shape[1]
    check.shape(name, array.shape, (rows, columns), f"[{', '.join(symbols)}]")
    return columns, expect_row_stride(name, array)
