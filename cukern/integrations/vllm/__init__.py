"""Run the experts and the attention of vLLM on cukern's kernels.

vLLM finds `register` by its entry point (group `vllm.general_plugins`) and calls it in each of its processes, so an
installed cukern needs no flag. The environment variable `CUKERN_VLLM` chooses the seams: 0 turns all of them off, and
`CUKERN_VLLM=experts,attention` names them. `docs/guides/engine.md` says what each seam takes.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

__all__ = ["SEAMS", "TESTED", "VARIABLE", "chosen_seams", "register"]

#: The places of vLLM that take cukern's classes, in the order of their installation.
SEAMS = ("experts", "attention")
#: The releases of vLLM that run with cukern.
TESTED = ("0.26",)
VARIABLE = "CUKERN_VLLM"
#: The attribute of an installed function that holds vLLM's own function.
STOCK = "cukern_stock"

# vLLM configures the handlers of the logger "vllm".
_logger = logging.getLogger("vllm.cukern")


@functools.cache
def say(line: str, level: int = logging.INFO) -> None:
    """Log a line once in this process, because each layer of a model makes the same choice."""
    _logger.log(level, line)


def report(seam: str, what: str, why_not: str | None) -> None:
    """Log whether cukern takes `what`, and why not."""
    say(f"cukern {seam}: takes {what}" if why_not is None else f"cukern {seam}: leaves {what} to vLLM: {why_not}")


def chosen_seams(value: str | None) -> tuple[str, ...]:
    """Return the seams that a value of `CUKERN_VLLM` chooses.

    Args:
        value: None, "" or "1" for all seams; "0" for none; or names of `SEAMS`, separated by commas.

    Raises:
        ValueError: an unknown name.

    >>> chosen_seams("attention")
    ('attention',)
    """
    words = [word.strip() for word in (value or "").split(",") if word.strip()]
    if words in ([], ["1"]):
        return SEAMS
    if words == ["0"]:
        return ()
    for word in words:
        if word not in SEAMS:
            raise ValueError(f"{VARIABLE} must be 0, 1 or names of {', '.join(SEAMS)}, got {word!r}")
    return tuple(seam for seam in SEAMS if seam in words)


def install(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set the attribute `name` of a module or class to `make(stock)`, unless an earlier call has done so."""
    stock = getattr(owner, name)
    if hasattr(stock, STOCK):
        return
    own = make(stock)
    setattr(getattr(own, "__func__", own), STOCK, stock)
    setattr(owner, name, own)


def _why_not() -> tuple[str, int] | None:
    """Return why no seam can be installed, with the level of the log line; None if all can."""
    import vllm
    from vllm.platforms import current_platform

    from cukern.runtime import cuda

    release = ".".join(vllm.__version__.split(".")[:2])
    if release not in TESTED:
        return f"vLLM {vllm.__version__} is not one of the tested releases {', '.join(TESTED)}", logging.WARNING
    if not current_platform.is_cuda():
        return "the platform is not CUDA", logging.INFO
    if cuda.cupy is None:
        return f"the kernels need the package cupy: {cuda.INSTALL}", logging.WARNING
    return None


def register() -> None:
    """Install the seams that `CUKERN_VLLM` chooses into vLLM, in this process.

    A repeated call changes nothing. The function makes no CUDA context, so vLLM may fork this process. Each seam then
    logs what it takes and what it leaves to vLLM when the engine chooses its classes. An untested release of vLLM gets
    one warning and runs without cukern.

    Raises:
        ValueError: an unknown name in `CUKERN_VLLM`.
    """
    seams = chosen_seams(os.environ.get(VARIABLE))
    if seams and (found := _why_not()):
        why, level = found
        say(f"cukern leaves everything to vLLM: {why}", level)
        return
    for seam in SEAMS:
        if seam in seams:
            importlib.import_module(f"cukern.integrations.vllm._{seam}").install_seam()
        else:
            say(f"cukern {seam}: off ({VARIABLE}={os.environ.get(VARIABLE)})")
