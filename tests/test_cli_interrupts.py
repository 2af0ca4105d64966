"""Ctrl-C, and a reader that leaves, in the commands of `cukern`, as processes."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cukern.commands import UserError, writing
from cukern.runtime import kernel
from tests import encoders

ROOT = Path(__file__).resolve().parents[1]


def _environment(cache: Path) -> dict[str, str]:
    own = {"CUKERN_COMPILE": "lazy", "CUDA_VISIBLE_DEVICES": "", "CUKERN_CACHE_DIR": str(cache)}
    return os.environ | own


def _group(leader: int) -> list[int]:
    """The processes of a group that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


class Running:
    """A command in a process group of its own."""

    def __init__(self, arguments: list[str], cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cukern", *arguments], cwd=ROOT, env=_environment(cache), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            # A process inherits the ignored signal where the tests run in the background of a shell.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def interrupt(self) -> tuple[int, str]:
        """Send SIGINT to all processes, as a terminal does; the status and what was said last."""
        os.killpg(self.process.pid, signal.SIGINT)
        _, said = self.process.communicate(timeout=60)
        assert "Traceback" not in said, said
        assert _group(self.process.pid) == []
        return self.process.returncode, said.splitlines()[-1]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    yield folder
    assert [*folder.glob(".writing*")] == []


@pytest.mark.parametrize(
    ("command", "library"),
    [
        *itertools.product(
            ("compile", "demo", "doctor", "encode", "translate", "generate"), ("_multiarray_umath", "cupy_backends")
        ),
        ("explain", "_multiarray_umath"),
    ],
)
def test_an_interrupt_while_modules_are_imported(command: str, library: str, cache: Path, tmp_path: Path) -> None:
    # No command ends before the signal: the texts come from a pipe that nobody writes to.
    os.mkfifo(tmp_path / "texts")
    arguments = {
        "compile": ["--arch", "90a", "--op", "moe_gate"], "demo": [], "doctor": [], "explain": ["moe_gemm"],
        "generate": ["--config", "tiny", "--random-weights", "--max-new-tokens", "2000"],
    }  # fmt: skip
    of_texts = ["--model", "/", "--input", str(tmp_path / "texts")]
    running = Running([command, *arguments.get(command, of_texts)], cache)
    maps, end = Path(f"/proc/{running.process.pid}/maps"), time.monotonic() + 60
    while library not in maps.read_text() and time.monotonic() < end:
        time.sleep(0.002)
    kept = "; the cache keeps each kernel that was compiled" if command == "compile" else ""
    assert running.interrupt() == (130, f"cukern {command}: interrupted{kept}")


@pytest.mark.parametrize("workers", [False, True])
def test_an_interrupt_stops_the_workers(workers: bool, cache: Path) -> None:
    running = Running(["compile", "--arch", "90a", "--op", "moe_gate", "--op", "norm"], cache)
    assert running.process.stderr is not None
    count = len([*kernel.instances("moe_gate"), *kernel.instances("norm")])
    assert f"{count} kernels for sm_90a, {count} of them to compile" in running.process.stderr.readline()
    # The first line of progress comes before the workers start; kernels are in the cache once these are at work.
    assert f"0 of {count}" in running.process.stderr.readline()
    end = time.monotonic() + 60
    while workers and not [*cache.glob("*.cubin")] and time.monotonic() < end:
        time.sleep(0.05)
    begin = len(_group(running.process.pid))
    assert not workers or begin > 1 or len(os.sched_getaffinity(0)) == 1
    assert running.interrupt() == (130, "cukern compile: interrupted; the cache keeps each kernel that was compiled")
    notes = {path.name for path in cache.glob("*.cubin.json")}
    assert notes <= {f"{path.name}.json" for path in cache.glob("*.cubin")}


def test_an_interrupt_leaves_no_file(tmp_path: Path, cache: Path) -> None:
    model = encoders.save(encoders.model("bert"), tmp_path / "model")
    texts, output = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("ka to\n" * 400_000)
    running = Running(["encode", "--model", str(model), "--input", str(texts), "--output", str(output)], cache)
    time.sleep(4)
    assert running.interrupt() == (130, "cukern encode: interrupted")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "texts.txt", *(["cache"] if cache.exists() else [])}


@pytest.mark.parametrize(
    ("arguments", "status"),
    # argparse itself ignores that nobody reads the help.
    [(("--help",), 0), (("demo", "--help"), 0), (("doctor", "--moe"), 141), (("explain", "moe_gemm"), 141)],
)
def test_a_reader_that_leaves(arguments: tuple[str, ...], status: int, cache: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "cukern", *arguments], cwd=ROOT, env=_environment(cache), stdout=write,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (status, "")


def test_a_wrong_setting_of_the_import_is_one_line(cache: Path) -> None:
    environment = _environment(cache) | {"CUKERN_COMPILE": "later"}
    command = [sys.executable, "-m", "cukern", "doctor"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cukern doctor: CUKERN_COMPILE must be 'import' or 'lazy', got 'later'\n"


# --- files ------------------------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), writing(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]
    with writing(path) as temporary:
        np.save(temporary, np.arange(3))
    assert np.load(path).tolist() == [0, 1, 2] and [*tmp_path.iterdir()] == [path]

    link = tmp_path / "link.npy"
    link.symlink_to(path)
    with writing(link) as temporary:
        np.save(temporary, np.arange(2))
    assert link.is_symlink() and np.load(path).tolist() == [0, 1]


def test_a_device_is_written_as_it_is() -> None:
    with writing(Path("/dev/null")) as path:
        assert path == Path("/dev/null")
        path.write_text("x")
    assert Path("/dev/null").is_char_device()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none/x: No such file or directory"), writing(tmp_path / "none/x") as path:
        path.write_text("x")
