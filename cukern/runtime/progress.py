"""Show the progress of long work: as a bar on a terminal, otherwise as plain lines in the commands of cukern."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

#: The running command. Lines begin with its name.
_command: ContextVar[str] = ContextVar("_command", default="")


class Advance(Protocol):
    """Report that `count` more tasks are done, and name the next task (`what`)."""

    def __call__(self, count: int = 1, what: str = "") -> None: ...


@contextlib.contextmanager
def in_command(name: str) -> Iterator[None]:
    """Within this context, report progress without a terminal in lines that begin with the name of the command."""
    token = _command.set(name)
    try:
        yield
    finally:
        _command.reset(token)


@contextlib.contextmanager
def progress(what: str, total: int, shown: bool | None = None) -> Iterator[Advance]:
    """Report the progress of `total` tasks. Yield a function to call after each task, from any thread.

    On a terminal stderr shows a bar, which vanishes at the end. Elsewhere a command prints a line for the first task
    and for each tenth of the tasks, and other programs print nothing. With `shown` True the bar is shown anywhere and
    stays. With `shown` False nothing is shown.
    """
    if shown or (shown is None and sys.stderr.isatty()):
        with _bar(what, total, transient=shown is None) as advance:
            yield advance
    elif shown is None and _command.get():
        yield _lines(_command.get(), what, total)
    else:
        yield lambda count=1, what="": None


def _lines(command: str, said: str, total: int) -> Advance:
    begin, done, told, lock = time.perf_counter(), 0, -1, threading.Lock()

    def advance(count: int = 1, what: str = "") -> None:
        nonlocal done, told
        with lock:
            done += count
            if done * 10 // max(total, 1) > told:
                told = done * 10 // max(total, 1)
                seconds = time.perf_counter() - begin
                print(f"{command}: {done} of {total}, {seconds:.0f} s: {what or said}", file=sys.stderr, flush=True)

    return advance


@contextlib.contextmanager
def _bar(said: str, total: int, transient: bool) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    command = _command.get() or "cukern"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # If stdout is a terminal, text that is printed meanwhile appears above the bar.
    own = {"console": Console(stderr=True), "transient": transient, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, **own) as bar:  # type: ignore[arg-type]
        task = bar.add_task(f"{command}: {said}", total=total)

        def advance(count: int = 1, what: str = "") -> None:
            description = {"description": f"{command}: {what}"} if what else {}
            bar.update(task, advance=count, **description)  # type: ignore[arg-type]

        yield advance
