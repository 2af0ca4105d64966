"""Programmatic dependent launch: blocks of a kernel may start before the previous kernel on the stream has ended.

The driver's `cuLaunchKernelEx` makes such launches. They are correct only if the kernel itself waits for the results of
earlier kernels (`cuda_src/common/overlap.cuh`). A captured CUDA graph records such a launch as a programmatic edge.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

from cukern.runtime import sources
from cukern.runtime.cuda import driver, libcuda

_FIRST_ARCH = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # a value of CUlaunchAttributeID
#: A packed CUlaunchAttribute: its id, and the value 1 in a union of 64 bytes.
_ATTRIBUTE = struct.pack("<i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
#: The layout of a CUlaunchConfig: grid, block, dynamic shared bytes, stream, pointer to the attributes, their number.
_CONFIG = struct.Struct("<7I4xQQI4x")
#: The header that a template includes if its kernel waits for earlier kernels.
_HEADER = "common/overlap.cuh"


@functools.cache
def waits(file: str) -> bool:
    """Return whether the kernels of `cuda_src/<file>.cu` wait for earlier kernels themselves."""
    return _HEADER in sources.quoted_includes(sources.source(file))


@functools.cache
def launcher() -> Callable[..., None] | None:
    """Return a launch function with the arguments of CuPy's `driver.launchKernel`; None without cuLaunchKernelEx.

    The function raises CuPy's `CUDADriverError`.
    """
    launch_kernel_ex = getattr(libcuda(), "cuLaunchKernelEx", None)
    if launch_kernel_ex is None:
        return None
    launch_kernel_ex.argtypes = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    launch_kernel_ex.restype = ctypes.c_int
    attribute = ctypes.create_string_buffer(_ATTRIBUTE, len(_ATTRIBUTE))  # the function below keeps it alive
    pack = _CONFIG.pack

    def launch(
        f: int, x: int, y: int, z: int, i: int, j: int, k: int, shared: int, stream: int, pointers: int, extra: int
    ) -> None:
        config = pack(x, y, z, i, j, k, shared, stream, attributes, 1)
        status = launch_kernel_ex(config, f, pointers, None)
        if status:
            raise driver.CUDADriverError(status)

    attributes = ctypes.addressof(attribute)
    launch.attribute = attribute  # type: ignore[attr-defined]
    return launch


def overlapping(file: str, arch: str) -> Callable[..., None] | None:
    """Return the launch function that lets kernels of a file overlap; None if they may not overlap."""
    return launcher() if int(arch.rstrip("af")) >= _FIRST_ARCH and waits(file) else None
