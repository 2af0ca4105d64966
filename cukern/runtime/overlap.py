"""Programmatic dependent launch: a kernel's blocks may start before the stream's previous kernel has ended.

`cuLaunchKernelEx` makes programmatic dependent launches. The kernel must itself wait for earlier results
(`cuda_src/common/overlap.cuh`). A captured graph records a programmatic edge.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

from cukern.runtime import sources
from cukern.runtime.cuda import driver, libcuda

_FIRST_ARCH = 90
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
#: CUlaunchAttribute: its id, and the value 1 in a union of 64 bytes.
_ATTRIBUTE = struct.pack("<i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1)
#: CUlaunchConfig: grid, block, dynamic shared bytes, stream, pointer to the attributes, attribute count.
_CONFIG = struct.Struct("<7I4xQQI4x")
#: Included by every template whose kernels wait for earlier kernels.
_HEADER = "common/overlap.cuh"


@functools.cache
def waits(file: str) -> bool:
    return _HEADER in sources.quoted_includes(sources.source(file))


@functools.cache
def launcher() -> Callable[..., None] | None:
    """Return a function that replaces CuPy's `driver.launchKernel` and raises the same errors. Return None if the
    driver has no cuLaunchKernelEx."""
    launch_kernel_ex = getattr(libcuda(), "cuLaunchKernelEx", None)
    if launch_kernel_ex is None:
        return None
    launch_kernel_ex.argtypes = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    launch_kernel_ex.restype = ctypes.c_int
    attribute = ctypes.create_string_buffer(_ATTRIBUTE, len(_ATTRIBUTE))  # kept alive by the function below
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
    """Return the launch function that lets a file's kernels overlap; None if they must not."""
    return launcher() if int(arch.rstrip("af")) >= _FIRST_ARCH and waits(file) else None
