"""Processes that want the same kernels at once: one compiles, the others wait for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cukern.runtime.compile as compiler
from cukern.runtime import kernel, nvrtc
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import KERNELS

ROOT = Path(__file__).resolve().parents[1]

#: Another process, which says when it waits and compiles nothing itself.
WAITING = """
import cukern, time
import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc
from cukern.runtime.compile import Instance
def refuse(*_):
    raise AssertionError("compiled in two processes")
def say(seconds):
    print("waits", flush=True)
    sleep(seconds)
sleep, nvrtc.time.sleep = time.sleep, say
nvrtc.compile_cubin = compiler._start_worker = refuse
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    compiler.nvrtc_version()  # the other process reads it from the folder
    return tmp_path


def _instances() -> tuple[Instance, Instance]:
    one, two, *_ = (instance for own in KERNELS["decoding"] for instance in own.at_import)
    return one, two


def other_process(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITING + code]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends_well(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_an_instance_is_compiled_by_one_process(cache: Path) -> None:
    one, _ = _instances()
    path = compiler.cached_path(one, "80")
    with nvrtc.alone(str(path)):
        other = other_process(f"compiler.cubin(Instance{one.file, one.function, one.arguments}, '80')")
        assert other.stdout is not None and other.stdout.readline() == "waits\n", other.communicate()
        nvrtc.compile_to_cache(compiler._job(one, "80"))
    ends_well(other)
    assert compiler.is_intact(path)


def test_the_workers_of_one_process_compile(cache: Path) -> None:
    work = [(instance, "80") for instance in _instances()]
    given = [(i.file, i.function, i.arguments) for i, _ in work]
    with nvrtc.alone(str(cache / "all")):
        other = other_process(
            "seen = []\n"
            f"compiler.compile_all([(Instance(*own), '80') for own in {given}], lambda *own: seen.append(own))\n"
            "assert len(seen) == 2, seen"
        )
        assert other.stdout is not None and other.stdout.readline() == "waits\n", other.communicate()
        for instance, arch in work:
            compiler.cubin(instance, arch)
    ends_well(other)


def holder(path: str) -> subprocess.Popen[str]:
    """Another process that holds the lock of a path until it is killed."""
    code = f"with nvrtc.alone({path!r}):\n    print('holds', flush=True)\n    sleep(60)"
    process = other_process(code)
    assert process.stdout is not None and process.stdout.readline() == "holds\n", process.communicate()
    return process


def test_a_process_that_dies_gives_its_lock_back(cache: Path) -> None:
    path = str(cache / "anything")
    other = holder(path)
    other.kill()
    other.communicate()
    with nvrtc.alone(path):
        holder(path + " else").kill()


def test_patience_ends(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = _instances()
    path = compiler.cached_path(one, "80")
    monkeypatch.setattr(nvrtc, "PATIENCE_S", 0.1)
    other = holder(str(path))
    compiler.cubin(one, "80")
    assert compiler.is_intact(path) and other.poll() is None
    other.kill()
    other.communicate()


def test_a_file_system_without_locks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(nvrtc.fcntl, "lockf", refuse)
    one, _ = _instances()
    compiler.cubin(one, "80")
    assert compiler.is_intact(compiler.cached_path(one, "80"))


def test_a_manager_loads_what_is_compiled_and_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _instances()
    compiler.cubin(one, "80")
    loaded: list[Instance] = []
    monkeypatch.setattr(kernel, "KERNELS", {})  # a kernel enters itself
    own = kernel.Kernel(one.file, one.function)
    monkeypatch.setattr(kernel, "arch_of_device", lambda device: "80")
    monkeypatch.setattr(kernel, "current_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(kernel.Variant, "load", lambda self, device: loaded.append(self.instance))
    for instance in (one, two):
        own.variant(*instance.arguments)
    kernel.load_all(["decoding"], 0, compiles=False)
    assert loaded == [one] and not compiler.is_intact(compiler.cached_path(two, "80"))
    kernel.load_all(["decoding"], 0)
    assert loaded == [one, one, two] and compiler.is_intact(compiler.cached_path(two, "80"))
