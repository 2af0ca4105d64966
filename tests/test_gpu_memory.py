"""Test processes on one GPU: large tests take turns, and the pools keep little between tests."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, gpu_memory

ROOT = Path(__file__).resolve().parents[1]
IN_TURN = """
import pathlib, sys
from tests import gpu_memory
print("asks", flush=True)
with gpu_memory.turn(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def process(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that asks for its turn, and ends it when it reads a line."""
    command = [sys.executable, "-c", IN_TURN, str(lock)]
    # Without a buffer, which would take a line from `select`.
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as made:
        assert made.stdout is not None and made.stdout.readline() == b"asks\n"
        yield made
        made.kill()


def is_in(one: subprocess.Popen[bytes], within_s: float = 30.0) -> bool:
    """Whether a process that has asked gets its turn."""
    assert one.stdout is not None
    return bool(select.select([one.stdout], [], [], within_s)[0]) and one.stdout.readline() == b"in\n"


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_waits_for_the_turn_of_another(killed: bool, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with process(lock) as first:
        assert is_in(first)
        with process(lock) as second:
            assert not is_in(second, within_s=0.5)
            if killed:
                first.kill()
            else:
                first.communicate(b"\n")
            assert is_in(second)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done around a test, in order."""
    noted: list[str] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        noted.append("turn begins")
        yield
        noted.append("turn ends")

    monkeypatch.setattr(gpu_memory, "turn", turn)
    monkeypatch.setattr(gpu_memory, "_release", lambda: noted.append("release"))
    monkeypatch.setattr(gpu_memory, "_unused", lambda: 0)
    monkeypatch.setattr(conftest, "_why_no_gpu", lambda: None)
    return noted


class Item:
    """A test with these marks."""

    def __init__(self, *marks: Any) -> None:
        self.marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)


def run(item: Any, done: list[str]) -> None:
    protocol = conftest.pytest_runtest_protocol(item)
    next(protocol)
    done.append("test")
    with pytest.raises(StopIteration, match="its outcome"):
        protocol.send("its outcome")


GPU, LARGE = pytest.mark.gpu.mark, pytest.mark.large(17).mark


def test_a_large_test_has_a_turn_and_the_memory_that_no_array_has(done: list[str]) -> None:
    run(Item(GPU, LARGE), done)
    assert done == ["turn begins", "release", "test", "release", "turn ends"]


@pytest.mark.parametrize("unused", [gpu_memory.MOST_UNUSED, gpu_memory.MOST_UNUSED + 1])
def test_pools_are_bounded_after_another_test(unused: int, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "_unused", lambda: unused)
    run(Item(GPU), done)
    assert done == ["test", "release"][: 1 + (unused > 2**30)]
    done.clear()
    run(Item(), done)
    assert done == ["test"]


def test_a_large_test_is_skipped_where_too_little_is_free(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = Item(GPU, LARGE)
    monkeypatch.setattr(gpu_memory, "free", lambda: 17 * 2**30)
    conftest.pytest_runtest_setup(item)
    monkeypatch.setattr(gpu_memory, "free", lambda: 17 * 2**30 - 2**29)
    message = "this test needs 17 GiB of GPU memory, and 16.5 GiB are free"
    with pytest.raises(pytest.skip.Exception, match=f"^{re.escape(message)}$"):
        conftest.pytest_runtest_setup(item)


def test_what_no_array_has_is_that_of_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(free_bytes=lambda: 5, free_all_blocks=lambda: released.append("cupy"))
    cuda = SimpleNamespace(
        memory_reserved=lambda: 30, memory_allocated=lambda: 10, empty_cache=lambda: released.append("torch")
    )
    released: list[str] = []
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool))  # type: ignore
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore
    assert gpu_memory._unused() == 25
    gpu_memory._release()
    assert released == ["cupy", "torch"]


def test_a_test_leaves_the_look_at_free_memory_to_its_mark() -> None:
    looking = re.compile(r"mem_get_info|memGetInfo|\.mem_info")
    files = [file for file in (ROOT / "tests").glob("test_*.py") if file != Path(__file__)]
    assert [file.name for file in files if looking.search(file.read_text())] == []
