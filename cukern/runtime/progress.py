"""Progress of long work: a bar on a terminal, else plain lines in the commands of cukern."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

#: The name of the running command. Each printed line begins with it.
_command: ContextVar[str] = ContextVar("_command", default="")


class Advance(Protocol):
    """Count finished tasks, and name the next one."""

    def __call__(self, count: int = 1, what: str = "") -> None: ...


@contextlib.contextmanager
def in_command(name: str) -> Iterator[None]:
    """Report progress in lines that begin with `name` where stderr is no terminal."""
    token = _command.set(name)
    try:
        yield
    finally:
        _command.reset(token)


@contextlib.contextmanager
def progress(what: str, total: int, shown: bool | None = None) -> Iterator[Advance]:
    """Yield a function to call after each of `total` tasks, from any thread.

    A terminal shows a bar, which vanishes at the end. Elsewhere a command prints a line for the first task and each
    tenth of the tasks. `shown=True` shows a bar everywhere, and the bar stays. `shown=False` shows nothing.
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
    # On a terminal, text printed meanwhile appears above the bar.
    own = {"console": Console(stderr=True), "transient": transient, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, **own) as bar:  # type: ignore[arg-type]
        task = bar.add_task(f"{command}: {said}", total=total)

        def advance(count: int = 1, what: str = "") -> None:
            description = {"description": f"{command}: {what}"} if what else {}
            bar.update(task, advance=count, **description)  # type: ignore[arg-type]

        yield advance
