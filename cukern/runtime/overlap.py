"""Launches that may overlap: the blocks of a kernel are put in place while the kernel before it on the stream ends.

That is programmatic dependent launch, by the driver's `cuLaunchKernelEx`. Only kernels that wait for the earlier ones
themselves may be launched so: `cuda_src/common/overlap.cuh` tells how. A capture into a CUDA graph makes a programmatic
edge of it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

from cukern.runtime import sources
from cukern.runtime.cuda import driver, libcuda

_FIRST_ARCH = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID
#: A CUlaunchAttribute: its id, and 1 in a union of 64 bytes.
_ATTRIBUTE = struct.pack("<i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
#: A CUlaunchConfig: grid, block, dynamic shared bytes, stream, and the attributes with their number.
_CONFIG = struct.Struct("<7I4xQQI4x")
#: The header that a template includes if its kernel waits.
_HEADER = "common/overlap.cuh"


@functools.cache
def waits(file: str) -> bool:
    """Whether the kernels of `cuda_src/<file>.cu` wait for earlier ones themselves."""
    return _HEADER in sources.quoted_includes(sources.source(file))


@functools.cache
def launcher() -> Callable[..., None] | None:
    """A function with the arguments of CuPy's `driver.launchKernel`; None for a driver that knows no such launch.

    It raises CuPy's `CUDADriverError`.
    """
    launch_kernel_ex = getattr(libcuda(), "cuLaunchKernelEx", None)
    if launch_kernel_ex is None:
        return None
    launch_kernel_ex.argtypes = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    launch_kernel_ex.restype = ctypes.c_int
    attribute = ctypes.create_string_buffer(_ATTRIBUTE, len(_ATTRIBUTE))  # kept by the function below
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
    """How kernels of a file are launched so that they may overlap, or None where they may not."""
    return launcher() if int(arch.rstrip("af")) >= _FIRST_ARCH and waits(file) else None
