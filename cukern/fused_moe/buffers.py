"""Allocate the memory of a layer.

When a layer runs, the functions return arrays. When a layer is recorded as a plan, they return array descriptions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from cukern.runtime import arrays, gpu, plan
from cukern.runtime.describe import Array, Place
from cukern.runtime.kernel import arch_of_device

_ALIGNMENT = 256  # each array inside a workspace starts at a multiple of this many bytes


def dtype_of(array: Any) -> str:
    """Return the name of an array's dtype."""
    return array.dtype if isinstance(array, Array) else _library(array).dtype(array)


def arch_of(array: Any) -> str | None:
    """Return the architecture ("90a" for Hopper) of the GPU that holds an array. Return None for host memory."""
    if isinstance(array, Array):
        return None if array.on_host else array.gpu.arch
    device = _library(array).device(array)
    return None if device is None else arch_of_device(device)


def gpu_of(array: Any) -> gpu.Gpu | None:
    """Return the GPU that holds an array; None for host memory."""
    if isinstance(array, Array):
        return None if array.on_host else array.gpu
    device = _library(array).device(array)
    return None if device is None else gpu.of_device(device)


def is_of_units(array: Any) -> bool:
    """Return whether an array is contiguous and 16-byte aligned."""
    if not isinstance(array, Array):
        library = _library(array)
        address, strides = library.address(array), library.strides(array)
        alignment, place = min(address & -address or 16, 16), Place(library, None, None)
        array = Array(library.dtype(array), array.shape, strides, alignment, place, 0)
    return array.is_contiguous and array.alignment >= 16


def empty(shape: Sequence[Any], dtype: str, like: Any) -> Any:
    """Return an uninitialized array in the library and on the device of `like`."""
    return plan.empty(shape, dtype) if isinstance(like, Array) else _library(like).empty(tuple(shape), dtype, like)


def part(workspace: Any, start: Any, shape: tuple[Any, ...], dtype: str) -> Any:
    """Return a view of a workspace as an array of this shape and dtype, starting at byte `start`."""
    if isinstance(workspace, Array):
        return workspace.view(shape, dtype, start)
    own = workspace[start : start + math.prod(shape) * arrays.ITEM_SIZE[dtype]]
    library = _library(workspace)
    if library.name == "torch":
        return own.view(getattr(sys.modules["torch"], dtype)).view(shape)
    if library is arrays.NUMPY or dtype != "float8_e4m3fn":
        own = own.view(arrays.numpy_dtype(dtype))
    return own.reshape(shape)


def aligned(size: int) -> int:
    """Round a size in bytes up to the alignment of the arrays inside a workspace."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _library(array: Any) -> arrays.Library:
    library = arrays.library_of(array)
    assert library is not None
    return library
