"""Allocate the memory of a layer: arrays, or array descriptions if the layer is recorded as a plan."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from cukern.runtime import arrays, gpu, plan
from cukern.runtime.describe import Array, Place
from cukern.runtime.kernel import arch_of_device

_ALIGNMENT = 256  # bytes; alignment of each array in a workspace


def dtype_of(array: Any) -> str:
    return array.dtype if isinstance(array, Array) else _library(array).dtype(array)


def arch_of(array: Any) -> str | None:
    """Return the architecture of the GPU that holds an array ("90a" for Hopper); None: host memory."""
    if isinstance(array, Array):
        return None if array.on_host else array.gpu.arch
    device = _library(array).device(array)
    return None if device is None else arch_of_device(device)


def gpu_of(array: Any) -> gpu.Gpu | None:
    if isinstance(array, Array):
        return None if array.on_host else array.gpu
    device = _library(array).device(array)
    return None if device is None else gpu.of_device(device)


def is_vector_aligned(array: Any) -> bool:
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


def typed_view(workspace: Any, start: Any, shape: tuple[Any, ...], dtype: str) -> Any:
    """Return a view of a workspace from byte `start` on."""
    if isinstance(workspace, Array):
        return workspace.view(shape, dtype, start)
    window = workspace[start : start + math.prod(shape) * arrays.ITEM_SIZE[dtype]]
    library = _library(workspace)
    if library.name == "torch":
        return window.view(getattr(sys.modules["torch"], dtype)).view(shape)
    if library is arrays.NUMPY or dtype != "float8_e4m3fn":
        window = window.view(arrays.numpy_dtype(dtype))
    return window.reshape(shape)


def aligned(size: int) -> int:
    """Round a size in bytes up to a multiple of _ALIGNMENT."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _library(array: Any) -> arrays.Library:
    library = arrays.library_of(array)
    assert library is not None
    return library
