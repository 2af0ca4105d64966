"""Memory for the parts of a layer, and what its choices read of arrays and of views."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from cukern.runtime import arrays, gpu, launch
from cukern.runtime.arrays import View

_ALIGNMENT = 256  # of the parts of a workspace, in bytes


def dtype_of(array: Any) -> str:
    """The name of an array's dtype."""
    return array.dtype if type(array) is View else _library(array).dtype(array)


def gpu_of(array: Any) -> gpu.Gpu | None:
    """The GPU that an array is on; None in host memory."""
    if type(array) is View:
        return None if array.device is None else launch.gpu_of(array)
    device = _library(array).device(array)
    return None if device is None else gpu.of_device(device)


def arch_of(array: Any) -> str | None:
    """The compile target of the GPU that an array is on; None in host memory."""
    found = gpu_of(array)
    return None if found is None else found.arch


def is_of_units(array: Any) -> bool:
    """Whether an array is contiguous, and begins at a multiple of 16 bytes."""
    if type(array) is not View:
        library = _library(array)
        shape, strides = tuple(array.shape), library.strides(array)
        array = View(array, library, library.address(array), library.dtype(array), shape, strides, None)
    return array.is_contiguous and array.alignment >= 16


def empty(shape: Sequence[Any], dtype: str, like: Any) -> Any:
    """An uninitialized array in the library and on the device of `like`."""
    return _library(like).empty(tuple(shape), dtype, like)


def part(workspace: Any, start: int, shape: tuple[int, ...], dtype: str) -> Any:
    """The bytes of a workspace from `start` on, as an array."""
    own = workspace[start : start + math.prod(shape) * arrays.ITEM_SIZE[dtype]]
    library = _library(workspace)
    if library.name == "torch":
        return own.view(getattr(sys.modules["torch"], dtype)).view(shape)
    if library is arrays.NUMPY or dtype != "float8_e4m3fn":
        own = own.view(arrays.numpy_dtype(dtype))
    return own.reshape(shape)


def aligned(size: int) -> int:
    """A number of bytes, rounded up to where another part may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _library(array: Any) -> arrays.Library:
    library = arrays.library_of(array)
    assert library is not None
    return library
