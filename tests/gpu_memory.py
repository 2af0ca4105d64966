"""The memory of a GPU on which several test processes run at once.

A test that allocates more than a GiB is marked `large`. Large tests take turns, so that no other one takes what a test
finds free. The pools of CuPy and torch keep little between tests, so that the processes leave room for a large one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: Bytes that the pools of a process may keep unused between two tests.
MOST_UNUSED = 2**30
_LOCK = Path(tempfile.gettempdir(), f"cukern-tests-{os.getuid()}.lock")


@contextlib.contextmanager
def turn(lock: Path = _LOCK) -> Iterator[None]:
    """Wait until no other process has its turn. A process that dies ends its turn."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def of_test(large: bool) -> Iterator[None]:
    """Surround a test on a GPU."""
    if not large:
        yield
        if _unused() > MOST_UNUSED:
            _release()
        return
    with turn():
        _release()
        yield
        _release()


def free() -> int:
    """The bytes of the current GPU that no process has."""
    import cupy

    return cupy.cuda.runtime.memGetInfo()[0]


def _unused() -> int:
    """The bytes in the pools of CuPy and torch that no array has."""
    unused = 0
    if cupy := sys.modules.get("cupy"):
        unused += cupy.get_default_memory_pool().free_bytes()
    if torch := sys.modules.get("torch"):
        unused += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return unused


def _release() -> None:
    """Collect reference cycles, then return the unused memory of the pools to the driver."""
    gc.collect()
    if cupy := sys.modules.get("cupy"):
        cupy.get_default_memory_pool().free_all_blocks()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()
