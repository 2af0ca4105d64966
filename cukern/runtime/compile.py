"""Compile templates of `cuda_src` to cubins in the cache, without a CUDA context.

A cubin's file name contains a digest of the template, its headers (also CUDA's), the template arguments, the options,
the NVRTC version and the architecture. So a cached cubin is never stale, and machines and checkouts can share a cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import queue
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cukern.runtime import nvrtc, sources, template, temporary
from cukern.runtime.cuda import INSTALL
from cukern.runtime.nvrtc import is_intact as is_intact
from cukern.runtime.nvrtc import read_note as read_note

#: With this line, NVRTC's messages about the host's assertions name their source.
_ASSERTIONS_LINE = '\n#line 1 "what the host knows of the template"\n'
#: Seconds between checks for Ctrl-C while workers compile.
_POLL_S = 0.1
# From this compute capability on, some instructions need a compile target with the suffix "a".
_ARCH_SPECIFIC_FROM = 90


class CompileError(RuntimeError):
    """NVRTC refused a template. The message is its log, which cites file and line in `cuda_src`."""


@dataclass(frozen=True)
class Instance:
    """The kernel `function` of `cuda_src/<file>.cu` with template arguments.

    Example: `Instance("mla_decode/plan", "plan_parts", (256,))`.
    """

    file: str
    function: str
    arguments: tuple[str | int, ...]
    #: Static assertions of the launch configuration.
    assertions: str = field(default="", compare=False)

    @property
    def expression(self) -> str:
        return f"{self.function}<{', '.join(map(str, self.arguments))}>"

    def __str__(self) -> str:
        return self.expression


def arch_of(compute_capability: tuple[int, int]) -> str:
    """Return the compile target: "80" for `(8, 0)`, "90a" for `(9, 0)`."""
    number = compute_capability[0] * 10 + compute_capability[1]
    return f"{number}a" if number >= _ARCH_SPECIFIC_FROM else str(number)


@functools.cache
def available() -> str | None:
    """Return why NVRTC cannot be used here, or None if it can."""
    try:
        _nvrtc_library()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _nvrtc_library() -> Path | None:
    """Return the file of the loaded NVRTC; None if `/proc/self/maps` does not list it.

    An NVRTC of an older CUDA release, such as torch's, cannot compile newer headers. So this function
    first loads the NVRTC that belongs to the headers.
    """
    from cupy_backends.cuda.libs import nvrtc as binding

    with nvrtc.LOCK:
        with contextlib.suppress(Exception):
            from cuda.pathfinder import find_nvidia_header_directory

            if headers := find_nvidia_header_directory("cudart"):
                for beside in (Path(headers).parent / "lib").glob("libnvrtc.so.*"):
                    nvrtc.load(str(beside))
        major, _ = binding.getVersion()  # loads the library if none is loaded
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip().partition("/")[2]
            if re.search(rf"/libnvrtc\.so\.{major}[.\d]*$", path):
                return Path("/", path)
    return None


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version with its build number, such as "13.0.88".

    Only compiled output contains the build number. Compiling takes a tenth of a warm import's time, so the cache folder
    stores the version, keyed by path, size and time of the library.

    Raises RuntimeError, with the pip command, if there is no NVRTC.
    """
    if reason := available():
        raise RuntimeError(f"a kernel needs NVRTC: {INSTALL} ({reason.splitlines()[0]})")
    library = _nvrtc_library()
    if library is None:
        return nvrtc.build()
    status = library.stat()
    identity = "\0".join(map(str, (library, status.st_size, status.st_mtime_ns)))
    name = f"nvrtc-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.txt"
    for note in (folder / name for folder in folders()):
        with contextlib.suppress(OSError):
            if not nvrtc.distrust(note) and re.fullmatch(r"\d+\.\d+\.\d+", known := note.read_text()):
                return known
    version = nvrtc.build()
    if not cache_problem():
        with contextlib.suppress(OSError):
            nvrtc.write_atomically(str(cache_directory() / name), version.encode())
    return version


@functools.cache
def cuda_include_directory() -> str:
    candidates = []
    if library := _nvrtc_library():
        # A toolkit and the CUDA 13 wheels have the first path. The CUDA 12 wheels, with one folder per package, have
        # the second.
        candidates += [str(library.parents[1] / "include"), str(library.parents[2] / "cuda_runtime" / "include")]
    with nvrtc.LOCK, contextlib.suppress(Exception):
        from cuda.pathfinder import find_nvidia_header_directory

        candidates.append(find_nvidia_header_directory("cudart"))
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            candidates.append(os.path.join(os.environ[variable], "include"))
    with nvrtc.LOCK, contextlib.suppress(Exception):
        import cupy

        candidates.append(os.path.join(cupy.cuda.get_cuda_path() or "", "include"))
    candidates.append("/usr/local/cuda/include")
    for folder in candidates:
        if folder and os.path.isfile(os.path.join(folder, "cuda_fp16.h")):
            return folder
    raise RuntimeError(
        "no folder with cuda_fp16.h was found: install the CUDA headers with "
        '`pip install "cupy-cuda13x[ctk]"` (or cuda12x), or set CUDA_PATH to a toolkit'
    )


def headers_version() -> str:
    text = Path(cuda_include_directory(), "cuda_runtime_api.h").read_text(errors="replace")
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else "unknown"


@functools.cache
def _cuda_header_digest(name: str) -> str:
    try:
        header = Path(cuda_include_directory(), name)
    except RuntimeError:
        return ""
    parts = [path.read_bytes() for path in (header, header.with_suffix(".hpp")) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@functools.cache
def _source_digest(file: str) -> str:
    digest = hashlib.sha256(sources.source(file).encode())
    # Every program contains assertions that template.py generates, so the digest covers template.py.
    digest.update(Path(template.__file__).read_bytes())
    root = sources.CUDA_SRC
    (_, *shared), cuda_headers = sources.included([root / f"{file}.cu"], root)
    for path in sorted(shared):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    for name in cuda_headers:
        digest.update(f"{name}\0{_cuda_header_digest(name)}".encode())
    return digest.hexdigest()


def _options(arch: str) -> list[str]:
    # Without -default-device NVRTC treats a generic lambda as a host function.
    return [f"-arch=sm_{arch}", "-std=c++17", "-default-device", "-Xptxas=-v"]


def _file_name(instance: Instance, arch: str) -> str:
    text = instance.expression + instance.assertions
    parts = (_source_digest(instance.file), text, *_options(arch), nvrtc_version())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    readable = re.sub(r"[^A-Za-z0-9]+", "_", instance.expression).strip("_")
    return f"{readable}-sm_{arch}-{digest}.cubin"


def cached_path(instance: Instance, arch: str) -> Path:
    """Return the path in the cache for a cubin, which may not be compiled yet."""
    name = _file_name(instance, arch)
    if cache_problem():
        for folder in folders():
            if is_intact(folder / name):
                return folder / name
    return cache_directory() / name


# --- the cache folder ---------------------------------------------------------------------------------


def _default_cache_directory() -> Path:
    configured = os.environ.get("CUKERN_CACHE_DIR")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "cukern"


class _Cache(NamedTuple):
    """Whether kernels are read from a cache folder, and why kernels cannot be written there (None: they can)."""

    is_read: bool
    problem: str | None


@functools.cache
def _cache(folder: Path) -> _Cache:
    """Check a cache folder, create it if needed, and let only its owner write to it."""
    if not folder.is_absolute():
        return _Cache(False, "it is not an absolute path (is HOME set?)")
    try:
        # Other users may read a folder that root creates, as in a container image.
        folder.mkdir(mode=0o700 if os.getuid() else 0o755, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            problem = f"it belongs to {f'user {status.st_uid}' if status.st_uid else 'root'}"
        else:
            if status.st_mode & nvrtc.OTHERS_WRITE:
                folder.chmod(stat.S_IMODE(status.st_mode) & ~nvrtc.OTHERS_WRITE)
            with tempfile.TemporaryFile(dir=folder):
                return _Cache(True, None)
    except OSError as error:
        problem = error.strerror or str(error)
    try:
        os.listdir(folder)
        distrust = nvrtc.distrust(folder)
    except OSError as error:
        distrust = error.strerror or str(error)
    return _Cache(not distrust, distrust or problem)


_cache_lock = threading.Lock()
#: The temporary folder that replaces each unwritable cache folder.
_temporary: dict[Path, Path] = {}


def cache_directory() -> Path:
    """Return the folder for new kernels: the user's, or a temporary one if that is not writable."""
    wanted = _default_cache_directory()
    # The lock prevents a second temporary folder from another thread.
    with _cache_lock:
        if _cache(wanted).problem is None:
            return wanted
        if wanted not in _temporary:
            _temporary[wanted] = Path(temporary.process_folder("cukern-"))
        return _temporary[wanted]


def folders() -> list[Path]:
    """Return the cache folders from which kernels are read."""
    wanted = _default_cache_directory()
    with _cache_lock:
        own = [wanted] if _cache(wanted).is_read else []
        return own + [folder for folder in (_temporary.get(wanted),) if folder]


def cache_problem() -> str | None:
    """Return why the user's cache folder cannot be written; None if it can. It may be readable."""
    with _cache_lock:
        return _cache(_default_cache_directory()).problem


@functools.cache
def _warn(folder: Path) -> None:
    """Warn once that compiled kernels last only for this process."""
    is_read, problem = _cache(folder)
    if problem:
        warnings.warn(
            f"the cache folder {folder} cannot be {'written' if is_read else 'used'}: {problem}. Kernels compiled now "
            "last for this process only; set CUKERN_CACHE_DIR to a folder of yours.",
            RuntimeWarning,
            stacklevel=3,
        )


# --- compiling ----------------------------------------------------------------------------------------


def program(instances: Sequence[Instance]) -> str:
    file = instances[0].file
    own = "".join(instance.assertions for instance in instances)
    return sources.source(file) + _ASSERTIONS_LINE + template.assertions(file) + own


def _job(instance: Instance, arch: str) -> dict[str, Any]:
    # NVRTC looks for quoted includes beside this file first, so the path is absolute.
    filename = str(sources.CUDA_SRC / f"{instance.file}.cu")
    include = [f"-I{sources.CUDA_SRC}", f"-I{cuda_include_directory()}"]
    return {
        "source": program([instance]),
        "filename": filename,
        "expression": instance.expression,
        "assertions": instance.assertions,
        "options": _options(arch) + include,
        "arch": arch,
        "nvrtc": nvrtc_version(),
        "path": str(cached_path(instance, arch)),
    }


def cubin(instance: Instance, arch: str) -> tuple[Path, str]:
    """Return the path of a cubin and the kernel's name in it. Compile it if it is missing or damaged.

    Raises CompileError if NVRTC refuses the template.
    """
    path = cached_path(instance, arch)
    if not is_intact(path):
        _warn(_default_cache_directory())
        try:
            nvrtc.compile_to_cache(_job(instance, arch))
        except RuntimeError as error:
            raise CompileError(str(error)) from None
    note = read_note(path)
    assert note is not None
    return path, note["name"]


def missing(instances: Iterable[Instance], arch: str) -> list[Instance]:
    """Return the instances without a cubin in the cache, judged by name only, so that a warm import stays fast."""
    present = set()
    for folder in folders():
        with contextlib.suppress(OSError):
            present |= {*os.listdir(folder)}
    return [i for i in instances if f"{_file_name(i, arch)}.json" not in present]


def _worker_count(jobs: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # The start of a worker takes as long as compiling a few small kernels, so each worker gets at least two jobs.
    return max(1, min(cores, jobs // 2, 32))


def _start_worker() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, nvrtc.__file__, *map(str, filter(None, [_nvrtc_library()]))]
    # The terminal also sends Ctrl-C to the workers. They inherit the signal mask and ignore Ctrl-C; this process kills
    # them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(workers: Sequence[subprocess.Popen[str]], threads: Sequence[threading.Thread]) -> None:
    """Kill the workers, and remove files that they were writing."""
    for worker in workers:
        worker.kill()
    for thread in threads:
        thread.join()
    for worker in workers:
        with worker:  # closes the worker's pipes
            worker.wait()
        for path in cache_directory().glob(f"{nvrtc.WRITING}{worker.pid}-*"):
            path.unlink(missing_ok=True)


def _ask(worker: subprocess.Popen[str], job: dict[str, Any]) -> str | None:
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except OSError:
        answer = ""
        # If stdin stayed open, the worker's destructor would flush the line again, and fail.
        with contextlib.suppress(OSError):
            worker.stdin.close()
    if not answer:
        raise ChildProcessError("the worker ended")
    return json.loads(answer).get("error")


def compile_all(work: Sequence[tuple[Instance, str]], progress: Callable[[Instance, str], None] | None = None) -> None:
    """Compile (instance, arch) pairs into the cache, in worker processes if there are enough cores.

    Of processes that start together, one compiles on all cores. The others wait `nvrtc.PATIENCE_S` seconds at most,
    then compile what is missing.

    `progress` is called after each instance, from any thread. Raises CompileError with all messages at the end.
    """
    with nvrtc.alone(str(cache_directory() / "all")):
        archs = {arch for _, arch in work}
        absent = {(instance, arch) for arch in archs for instance in missing((i for i, _ in work), arch)}
        for item in work:
            if progress and item not in absent:
                progress(*item)
        if absent:
            _warn(_default_cache_directory())
        errors = _compile_on_workers([item for item in work if item in absent], progress)
    if errors:
        raise CompileError("\n".join(errors))


def _compile_on_workers(
    work: Sequence[tuple[Instance, str]], progress: Callable[[Instance, str], None] | None
) -> list[str]:
    pending: queue.SimpleQueue[tuple[Instance, str]] = queue.SimpleQueue()
    for item in work:
        pending.put(item)
    errors: list[str] = []
    stopped = threading.Event()

    def here(instance: Instance, arch: str) -> str | None:
        try:
            nvrtc.compile_to_cache(_job(instance, arch))
        except RuntimeError as error:
            return str(error)
        return None

    def drain(worker: subprocess.Popen[str] | None) -> None:
        while not stopped.is_set():
            try:
                instance, arch = pending.get_nowait()
            except queue.Empty:
                return
            if worker is None:
                error = here(instance, arch)
            else:
                try:
                    error = _ask(worker, _job(instance, arch))
                except ChildProcessError:
                    if stopped.is_set():
                        return
                    # No worker can start (an embedded Python, a process limit), so compile in this thread.
                    worker = None
                    error = here(instance, arch)
            if error:
                errors.append(error)
            if progress:
                progress(instance, arch)

    count = _worker_count(len(work))
    if count == 1 or not sys.executable:
        drain(None)
        return errors
    workers: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    try:
        with contextlib.suppress(OSError):
            for _ in range(count):
                workers.append(_start_worker())
        for worker in workers:
            threads.append(threading.Thread(target=drain, args=(worker,)))
            threads[-1].start()
        for thread in threads:
            # Another thread may receive SIGINT. Short waits let this thread handle it.
            while thread.is_alive():
                thread.join(_POLL_S)
        if not threads:
            drain(None)
    finally:
        stopped.set()
        _end(workers, threads)
    return errors
