"""Compile templates in `cuda_src` to cubins in the cache.

The name of a cubin contains a digest of everything that determines it: the text of the template, its headers (also
CUDA's), the template arguments, the options, the version of NVRTC and the architecture. So a cached file is never
stale, and machines and checkouts can share a cache. This module uses no CUDA context.
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

#: The line directive before the host's assertions. NVRTC's messages cite this file name if an assertion fails.
_ASSERTIONS_LINE = '\n#line 1 "what the host knows of the template"\n'
#: Seconds between two checks for Ctrl-C while worker processes compile.
_LOOK_S = 0.1
# From this compute capability on, some instructions need the target with the suffix "a".
_ARCH_SPECIFIC_FROM = 90


class CompileError(RuntimeError):
    """NVRTC refused a template. The message is its log, which cites the file and line in `cuda_src`."""


@dataclass(frozen=True)
class Instance:
    """The kernel `function` of `cuda_src/<file>.cu` with its template arguments.

    `Instance("mla_decode/plan", "plan_parts", (256,))`.
    """

    file: str
    function: str
    arguments: tuple[str | int, ...]
    #: Assertions of the host's launch configuration (`Kernel.variant`), compiled with the template.
    assertions: str = field(default="", compare=False)

    @property
    def expression(self) -> str:
        return f"{self.function}<{', '.join(map(str, self.arguments))}>"

    def __str__(self) -> str:
        return self.expression


def arch_of(compute_capability: tuple[int, int]) -> str:
    """Return the target for a GPU: `(8, 0)` gives "80", `(9, 0)` gives "90a"."""
    number = compute_capability[0] * 10 + compute_capability[1]
    return f"{number}a" if number >= _ARCH_SPECIFIC_FROM else str(number)


@functools.cache
def available() -> str | None:
    """Return None if NVRTC can be used here, otherwise the reason why not."""
    try:
        _nvrtc_library()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _nvrtc_library() -> Path | None:
    """Return the file of this process's NVRTC; None if `/proc/self/maps` does not list it.

    CuPy uses an NVRTC that the process has loaded, such as torch's for another CUDA release. NVRTC cannot compile the
    headers of a later release, so this function loads the NVRTC beside the headers first.
    """
    from cupy_backends.cuda.libs import nvrtc as binding

    with nvrtc.LOCK:
        with contextlib.suppress(Exception):
            from cuda.pathfinder import find_nvidia_header_directory

            if headers := find_nvidia_header_directory("cudart"):
                for beside in (Path(headers).parent / "lib").glob("libnvrtc.so.*"):
                    nvrtc.load(str(beside))
        major, _ = binding.getVersion()  # loads the library
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip().partition("/")[2]
            if re.search(rf"/libnvrtc\.so\.{major}[.\d]*$", path):
                return Path("/", path)
    return None


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version with its build, such as "13.0.88".

    The build number is only in NVRTC's compiled output. A compilation would take a tenth of the time of a warm import,
    so the cache folder keeps the answer, with the path, size and time of the library file as the key.

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
    """Return the folder of `cuda_fp16.h`, from the pip wheels or a toolkit.

    Raises RuntimeError if there is none.
    """
    with nvrtc.LOCK:
        return _find_cuda_headers()


def _find_cuda_headers() -> str:
    candidates = []
    if library := _nvrtc_library():
        # The first candidate is the include folder of a toolkit and of the CUDA 13 wheels. The second is the folder of
        # the CUDA 12 wheels, which have one folder per package.
        candidates += [str(library.parents[1] / "include"), str(library.parents[2] / "cuda_runtime" / "include")]
    with contextlib.suppress(Exception):
        from cuda.pathfinder import find_nvidia_header_directory

        candidates.append(find_nvidia_header_directory("cudart"))
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            candidates.append(os.path.join(os.environ[variable], "include"))
    with contextlib.suppress(Exception):
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
    """Return the version of CUDA's headers, such as "13.0".

    Raises RuntimeError if there are none.
    """
    text = Path(cuda_include_directory(), "cuda_runtime_api.h").read_text(errors="replace")
    found = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else "unknown"


@functools.cache
def _cuda_header_digest(name: str) -> str:
    """Return the digest of one of CUDA's headers and its inline definitions; empty if the header is not found."""
    try:
        header = Path(cuda_include_directory(), name)
    except RuntimeError:
        return ""
    parts = [path.read_bytes() for path in (header, header.with_suffix(".hpp")) if path.is_file()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@functools.cache
def _source_digest(file: str) -> str:
    digest = hashlib.sha256(sources.source(file).encode())
    # The assertions of cukern.runtime.template are compiled with every template, so its source is part of the digest.
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
    """Return the name of the cubin of an instance in the cache."""
    text = instance.expression + instance.assertions
    parts = (_source_digest(instance.file), text, *_options(arch), nvrtc_version())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    readable = re.sub(r"[^A-Za-z0-9]+", "_", instance.expression).strip("_")
    return f"{readable}-sm_{arch}-{digest}.cubin"


def cached_path(instance: Instance, arch: str) -> Path:
    """Return the path of the cubin of an instance in the cache. The file need not exist."""
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
    """The state of a cache folder: whether kernels are read from it, and why kernels are not written to it, or None."""

    is_read: bool
    problem: str | None


@functools.cache
def _cache(folder: Path) -> _Cache:
    """Return the state of a cache folder. Create the folder if needed, and let only its owner write to it."""
    if not folder.is_absolute():
        return _Cache(False, "it is not an absolute path (is HOME set?)")
    try:
        # A folder that root creates, as in a container image, is readable by all users.
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
#: For each cache folder that cannot be written, the temporary folder that replaces it.
_temporary: dict[Path, Path] = {}


def cache_directory() -> Path:
    """Return the folder for new kernels: the user's folder, or a temporary folder if that one cannot be written."""
    wanted = _default_cache_directory()
    # Without the lock, two threads could create two temporary folders.
    with _cache_lock:
        if _cache(wanted).problem is None:
            return wanted
        if wanted not in _temporary:
            _temporary[wanted] = Path(temporary.process_folder("cukern-"))
        return _temporary[wanted]


def folders() -> list[Path]:
    """Return the folders that kernels are read from: the user's folder, and the temporary folder if there is one."""
    wanted = _default_cache_directory()
    with _cache_lock:
        own = [wanted] if _cache(wanted).is_read else []
        return own + [folder for folder in (_temporary.get(wanted),) if folder]


def cache_problem() -> str | None:
    """Return why nothing can be written to the user's cache folder; None if it can be written.

    `folders` may still read from the folder.
    """
    with _cache_lock:
        return _cache(_default_cache_directory()).problem


@functools.cache
def _warn(folder: Path) -> None:
    """Warn once, when something is compiled, that the compiled kernels are lost when the process ends."""
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
    """Return the text that is compiled for instances of one template."""
    file = instances[0].file
    own = "".join(instance.assertions for instance in instances)
    return sources.source(file) + _ASSERTIONS_LINE + template.assertions(file) + own


def _job(instance: Instance, arch: str) -> dict[str, Any]:
    # An absolute path: NVRTC looks for quoted includes beside this file first, not in the working directory.
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
    """Return the path of an intact cubin, compiled now if needed, and the kernel's name in it.

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
    """Return the instances whose cubin is not in the cache.

    Only names are compared, so that a warm import stays fast. `cubin` checks the content before it is loaded.
    """
    present = set()
    for folder in folders():
        with contextlib.suppress(OSError):
            present |= {*os.listdir(folder)}
    return [i for i in instances if f"{_file_name(i, arch)}.json" not in present]


def _worker_count(jobs: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Starting Python and CuPy in a worker takes as long as compiling a few small kernels, so a worker has at least two
    # jobs.
    return max(1, min(cores, jobs // 2, 32))


def _start_worker() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, nvrtc.__file__, *map(str, filter(None, [_nvrtc_library()]))]
    # The terminal sends Ctrl-C to the workers, too. A worker inherits the mask and ignores it; this process ends the
    # workers.
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
    """End the workers at once, then the threads that wait for them. Remove files that a worker was writing."""
    for worker in workers:
        worker.kill()
    for thread in threads:
        thread.join()
    for worker in workers:
        with worker:  # the end of the block closes the pipes of the worker
            worker.wait()
        for path in cache_directory().glob(f"{nvrtc.WRITING}{worker.pid}-*"):
            path.unlink(missing_ok=True)


def _ask(worker: subprocess.Popen[str], job: dict[str, Any]) -> str | None:
    """Send a job to a worker, and wait for it. Return the text of the error if the job failed, else None."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except OSError:
        answer = ""
        # Close the pipe here. Otherwise the release of the worker would try to write the buffered line again, and fail.
        with contextlib.suppress(OSError):
            worker.stdin.close()
    if not answer:
        raise ChildProcessError("the worker ended")
    return json.loads(answer).get("error")


def compile_all(work: Sequence[tuple[Instance, str]], progress: Callable[[Instance, str], None] | None = None) -> None:
    """Compile (instance, arch) pairs into the cache, in worker processes if there are enough cores.

    Processes that start at the same time on a host need the same instances. One of them compiles, on all cores. The
    others wait for `nvrtc.PATIENCE_S` seconds at most, and then compile the missing instances themselves.

    `progress` is called after each instance, from any thread.
    Raises CompileError with the messages of all failures, after all instances have been tried.
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
    """Compile all of `work`, and return the messages of the failures."""
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
                    # No worker can run here (an embedded Python, a process limit), so this thread compiles instead.
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
                thread.join(_LOOK_S)
        if not threads:
            drain(None)
    finally:
        stopped.set()
        _end(workers, threads)
    return errors
