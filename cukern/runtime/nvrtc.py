"""One NVRTC compilation, in this process or a worker.

NVRTC compiles for one thread at a time, so `cukern.runtime.compile` runs this file as a script in several processes. It
imports nothing of cukern, because that import compiles.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: NVRTC loads its built-in functions in the first compilation. A second compilation, or a search for CUDA's folders,
#: meanwhile fails with NVRTC_ERROR_BUILTIN_OPERATION_FAILURE.
LOCK = threading.RLock()
#: Seconds to wait for another process that compiles the same instance, before compiling it here.
PATIENCE_S = 60.0
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def load(library: str) -> None:
    """Load an NVRTC library. CuPy uses it unless CuPy is already bound to another."""
    # NVRTC opens libnvrtc-builtins by its bare name. That works only if this library is already loaded.
    for file in (*Path(library).parent.glob("libnvrtc-builtins.so.*"), library):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def _program(source: str, filename: str) -> Iterator[tuple[Any, Any]]:
    """Yield CuPy's binding of NVRTC and a program. This thread holds the lock until the program is destroyed."""
    with LOCK:
        from cupy_backends.cuda.libs import nvrtc

        program = nvrtc.createProgram(source, filename, (), ())
        try:
            yield nvrtc, program
        finally:
            nvrtc.destroyProgram(program)


def compile_cubin(source: str, filename: str, expression: str, options: list[str]) -> tuple[bytes, str, str]:
    """Return the cubin of a template instance, the kernel's mangled name and the log.

    Raises RuntimeError with the log if NVRTC refuses the source.
    """
    with _program(source, filename) as (nvrtc, program):
        nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).rstrip("\x00\n ")
            raise RuntimeError(f"{expression}: {error}\n{log}") from None
        name = nvrtc.getLoweredName(program, expression)
        log = nvrtc.getProgramLog(program).rstrip("\x00\n ")
        # CuPy drops the last byte as if it ended a string. In a cubin that byte is the high byte of a number, always 0.
        return nvrtc.getCUBIN(program) + b"\0", name, log


def build() -> str:
    """Return NVRTC's version with its build number, such as "13.0.88", from compiled output."""
    with _program("__global__ void probe() {}", "probe.cu") as (nvrtc, program):
        nvrtc.compileProgram(program, ["-arch=compute_80"])
        found = re.search(rb"\bV(\d+\.\d+\.\d+)", nvrtc.getPTX(program))
        return found[1].decode() if found else ".".join(map(str, nvrtc.getVersion()))


#: Names of files that are being written begin with this prefix and the process id.
WRITING = ".writing-"


def write_atomically(path: str, data: bytes) -> None:
    """Write a file so that readers see the old or the complete new content, with any number of writers.

    The folder's permissions decide who can read it.
    """
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f"{WRITING}{os.getpid()}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def distrust(path: Path) -> str | None:
    """Return why a cache path is not trusted: its owner is neither this user nor root, or others may write to it."""
    status = path.stat()
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & OTHERS_WRITE:
        return f"users beside its owner may write it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def read_note(path: Path) -> dict[str, Any] | None:
    """Return the trusted JSON note beside a cubin, or None."""
    note = path.with_name(path.name + ".json")
    try:
        if distrust(path) or distrust(note):
            return None
        content = json.loads(note.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"name", "sha256", "log"} <= content.keys() else None


class Resources(NamedTuple):
    registers: int
    spill_bytes: int


def resources(note: dict[str, Any]) -> Resources:
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", note["log"])), default=0)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", note["log"]))
    return Resources(registers, spilled)


def is_intact(path: Path) -> bool:
    """Return whether a cubin matches the digest in the JSON note beside it."""
    note = read_note(path)
    try:
        return note is not None and hashlib.sha256(path.read_bytes()).hexdigest() == note["sha256"]
    except OSError:
        return False


@functools.cache
def _lock_file(folder: str) -> int:
    # Keep the descriptor open: closing any descriptor of a file releases all of the process's locks on it.
    return os.open(os.path.join(folder, ".locks"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Hold the lock of a cache file, so that one process at a time compiles it.

    The lock only avoids duplicate work. After `PATIENCE_S`, or on a file system without locks, the caller proceeds
    without it.
    """
    # The lock is one byte of the lock file, at a position derived from the path.
    place = int.from_bytes(hashlib.sha256(path.encode()).digest()[:7], "big")
    end, held = time.monotonic() + PATIENCE_S, False
    with contextlib.suppress(OSError):
        file = _lock_file(os.path.dirname(path))
        while not held and time.monotonic() < end:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                held = True
            except (BlockingIOError, PermissionError):
                time.sleep(0.02)
    try:
        yield
    finally:
        if held:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def compile_to_cache(job: dict[str, Any]) -> None:
    """Compile `job` unless the cache has an intact cubin. Store the cubin, then its note with its digest."""
    with LOCK, alone(job["path"]):
        if is_intact(Path(job["path"])):
            return
        cubin, name, log = compile_cubin(job["source"], job["filename"], job["expression"], job["options"])
        write_atomically(job["path"], cubin)
        note = {
            "expression": job["expression"],
            "assertions": job["assertions"],
            "arch": job["arch"],
            "nvrtc": job["nvrtc"],
            "name": name,
            "sha256": hashlib.sha256(cubin).hexdigest(),
            "log": log,
        }
        write_atomically(job["path"] + ".json", json.dumps(note, indent=1).encode())


def main() -> None:
    """Answer the jobs on stdin, one JSON object per line. argv lists the NVRTC libraries to load."""
    for library in sys.argv[1:]:
        load(library)
    # Reserve stdout for answers; libraries print to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            compile_to_cache(json.loads(line))
            answers.write("{}\n")
        except Exception as error:
            answers.write(json.dumps({"error": str(error) or repr(error)}) + "\n")


if __name__ == "__main__":
    # Remove the script's folder, where Python would find cukern's modules under wrong names.
    sys.path.pop(0)
    main()
