"""Arrays for the tests: guarded against writes, poisoned against reads, moved to the GPU, or of an unknown library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import arrays
from cukern.runtime.cuda import cupy

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]
#: Bytes before and after each array that a kernel writes; each is of this value, before and after.
GUARD, POISON = 512, 0xA5


class Buffer:
    """A poisoned array on the GPU between guards; `skip` elements past a 256-byte boundary."""

    def __init__(self, shape: tuple[int, ...], dtype: str, skip: int = 0) -> None:
        kind = arrays.numpy_dtype(dtype)
        self._from = GUARD + skip * kind.itemsize
        self._to = self._from + int(np.prod(shape)) * kind.itemsize
        self._bytes = cupy.full(self._to + GUARD, POISON, cupy.uint8)
        inside = self._bytes[self._from : self._to]
        self.array = inside.view(kind).reshape(shape) if inside.size else cupy.empty(shape, kind)

    def numpy(self) -> Array:
        around = cupy.concatenate([self._bytes[: self._from], self._bytes[self._to :]])
        assert (around == POISON).all(), "written outside of the results"
        return cupy.asnumpy(self.array)


def place(values: Array, skip: int = 0, apart: int = 0) -> Any:
    """`values` on the GPU, `skip` elements past a 256-byte boundary, with `apart` NaN after each row."""
    wide = np.full((*values.shape[:-1], values.shape[-1] + apart), np.nan, values.dtype)
    wide[..., : values.shape[-1]] = values
    buffer = Buffer(wide.shape, values.dtype.name, skip)
    buffer.array[...] = cupy.asarray(wide)
    return buffer.array[..., : values.shape[-1]]


def on_gpu(array: Any, skip: int = 0) -> Any:
    """`array` on the GPU, `skip` elements past a multiple of 16 bytes; a value that is no array is returned as it is.

    FP8 arrays become bytes, since CuPy has no FP8.
    """
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name.startswith("float8"):
        array = array.view(np.uint8)
    if not skip:
        return cupy.asarray(array)
    return cupy.asarray(np.concatenate([np.zeros(skip, array.dtype), array.ravel()]))[skip:].reshape(array.shape)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return rng.standard_normal(shape, np.float32).astype(arrays.numpy_dtype(dtype))


def as_torch(array: Array) -> torch.Tensor:
    """A tensor of the same dtype, in memory of its own."""
    import torch

    like = torch.empty(0)
    library = arrays.library_of(like)
    assert library is not None
    return library.from_numpy(array.copy(), like)


def to_numpy(array: Any) -> Array:
    """An array of any library in NumPy."""
    library = arrays.library_of(array)
    assert library is not None
    return library.to_numpy(array)


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def same_bits(got: Any, want: Array) -> None:
    """`got` has the dtype, the shape and the bits of `want`, NaN included."""
    got = to_numpy(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    got, want = (np.ascontiguousarray(x).view(f"u{want.itemsize}") for x in (got, want))
    np.testing.assert_array_equal(got, want)


class OnlyDLPack:
    """An array of a library that cukern does not know."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()
