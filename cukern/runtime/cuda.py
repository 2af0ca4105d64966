"""CuPy, imported in one place: `cupy`, `driver` and `runtime` are None where it is not installed."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from importlib.util import find_spec

__all__ = ["cupy", "driver", "runtime"]

_cupy_cache: tempfile.TemporaryDirectory[str] | None = None


def _ensure_cupy_cache() -> None:
    """CuPy makes its cache folder while it is imported, and would fail where that cannot be made."""
    global _cupy_cache
    folder = os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        # Lives as long as this process; the processes that it starts find it in the environment.
        _cupy_cache = tempfile.TemporaryDirectory(prefix="cukern-cupy-", ignore_cleanup_errors=True)
        os.environ["CUPY_CACHE_DIR"] = _cupy_cache.name
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
