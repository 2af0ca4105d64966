"""CuPy's import. `cupy`, `driver` and `runtime` are None without CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from cukern.runtime import temporary

__all__ = ["INSTALL", "cupy", "current_device", "driver", "libcuda", "need_cupy", "runtime"]


def _ensure_cupy_cache() -> None:
    """Give CuPy a writable cache folder, because its import fails without one."""
    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        # Child processes inherit the variable. The folder lasts as long as this process.
        os.environ["CUPY_CACHE_DIR"] = temporary.process_folder("cukern-cupy-")
        warnings.warn(
            f"CuPy's cache folder {folder} cannot be made: {error.strerror}. What CuPy compiles lasts for this process "
            "only; set CUPY_CACHE_DIR to a folder of yours.",
            RuntimeWarning,
            stacklevel=2,
        )


try:
    if "cupy" not in sys.modules and find_spec("cupy"):
        _ensure_cupy_cache()
    import cupy
    from cupy_backends.cuda.api import driver, runtime
except ImportError:
    cupy = driver = runtime = None


INSTALL = 'pip install "cukern[cuda13]" (or cuda12)'


def need_cupy(what: str) -> None:
    """Raise ImportError with the pip command unless CuPy is installed. `what` names the feature."""
    if cupy is None:
        raise ImportError(f"{what} needs the package cupy: {INSTALL}")


@functools.cache
def libcuda() -> ctypes.CDLL:
    """Return the driver's library, for functions that CuPy lacks."""
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: Any) -> None:
    status = getattr(libcuda(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function} failed: CUDA error {status}")


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


@contextlib.contextmanager
def current_device(device: int) -> Iterator[None]:
    """Make `device` the thread's current device, then restore the previous one.

    Restoring with `cudaSetDevice` would create a context on an unused previous device, so push a driver context
    instead.
    """
    _call("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
