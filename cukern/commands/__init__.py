"""The commands of `cukern`, one module each, and the functions that they share."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc

#: The command that installs CuPy and NVRTC.
INSTALL = 'pip install "cukern[cuda13]"'


class UserError(Exception):
    """Input that cannot be used; the message fits on one line."""


class Resources(NamedTuple):
    """The registers of each thread of a compiled kernel, and the bytes that it spills."""

    registers: int
    spill_bytes: int


def resources(note: dict[str, Any]) -> Resources:
    """The resources of a kernel, from the log of ptxas in a cache note."""
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", note["log"])), default=0)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", note["log"]))
    return Resources(registers, spilled)


@contextlib.contextmanager
def progress(command: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """The progress of a command over so many pieces of work; gives the function to call after, or within, a piece.

    It takes what is being done, and how many pieces are done since. On a terminal stderr has a bar, which vanishes at
    the end; elsewhere a line for each tenth of the work, and the first.
    """
    if not sys.stderr.isatty():
        begin, done, told = time.perf_counter(), 0, -1

        def tell(what: str, count: int) -> None:
            nonlocal done, told
            done += count
            if done * 10 // max(total, 1) > told:
                told = done * 10 // max(total, 1)
                seconds = time.perf_counter() - begin
                print(f"{command}: {done} of {total}, {seconds:.0f} s: {what}", file=sys.stderr, flush=True)

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(command, total=total)
        yield lambda what, count: bar.update(task, description=what, advance=count)


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
