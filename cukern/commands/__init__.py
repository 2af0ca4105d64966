"""The commands of `cukern`, one module each, and the functions that they share."""

from __future__ import annotations

import warnings

import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc
from cukern.runtime.nvrtc import Resources as Resources
from cukern.runtime.nvrtc import resources as resources

#: The command that installs CuPy and NVRTC.
INSTALL = 'pip install "cukern[cuda13]"'


class UserError(Exception):
    """Input that cannot be used; the message fits on one line."""


def refusal(arch: str) -> str | None:
    """Why NVRTC cannot compile for `arch`, or None when it can."""
    try:
        nvrtc.compile_cubin("template <int N> __global__ void probe() {}", "probe.cu", "probe<0>", [f"-arch=sm_{arch}"])
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None


def require_nvrtc() -> None:
    """Raises UserError where nothing can be compiled."""
    if reason := compiler.available():
        raise UserError(f"NVRTC cannot be used ({reason.splitlines()[0]}): {INSTALL}")
    try:
        compiler.cuda_include_directory()
    except RuntimeError as error:
        raise UserError(str(error)) from None


def cache_problem() -> str | None:
    """Why the cache folder cannot be used, or None. Without the warning, because a command reports it itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return compiler.cache_problem()
