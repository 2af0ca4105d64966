"""Progress bars."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, total: int, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; gives the function that advances it.

    `shown` as None shows it on a terminal alone, from which it vanishes at its end.
    """
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=shown is None) as bar:
        task = bar.add_task(f"cukern: {what}", total=total)
        yield lambda count: bar.advance(task, count)
