"""The GPU record: the tests that passed on a GPU, and the digest of the sources that they ran on.

    python -m tests.gpu_record run        GPU tests, sanitizer and benchmarks; writes tests/gpu_record.json
    python -m tests.gpu_record prove      the same without benchmarks
    python -m tests.gpu_record sanitize   the sanitizer alone
    python -m tests.gpu_record check      lists the stems that are not proved on today's sources

All commands take `--ops "STEM ..."`. `run` and `prove` take `--workers N`: pytest-xdist runs the tests of all stems on
N processes, which share the GPUs. If there are several GPUs, each worker has a different first GPU, and sees the others
as further devices.

A stem owns the tests of `tests/test_<stem>.py`, and the tests with the marker `stem("<stem>")` in the files that test
every op. All other tests with the marker `gpu` are proved together, as `runtime`. The sanitizer slows a kernel down by
orders of magnitude, so it only runs a stem's tests that also have the marker `sanitize`.

The record is `{"gpu", "driver", "cuda", "versions", "date", "stems": {stem: {"digest", "passed", "failed", "skipped",
"sanitizer": {tool: errors}, "gpu", "gpus", "nvrtc", "date"}}}`. `errors` is null for a tool that did not finish. A stem
has the GPU, the number of GPUs, the compiler and the date of its own run.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.digest import digest
from benchmarks.report import machine, now
from tests.gpu_workers import GPUS, ONE_THREAD, SHARED, STEM, SUITES, from_gpu

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Ends a kernel that hangs; no run takes nearly as long.
_TIMEOUT_S = 1800
_ERRORS_FOUND = 99

#: Test processes. They leave cores for the processes that they start; each takes several GiB of host memory.
_WORKERS = max(1, min(14, (os.cpu_count() or 1) - 2))
#: Stems that run under the sanitizer at the same time, per GPU of 80 GB.
_STEMS_AT_ONCE_PER_GPU = 4

Entry = dict[str, Any]


def pytest_configure(config: pytest.Config) -> None:
    """Give each array its own allocation, so that a tool of the sanitizer sees its bounds. Runs as a pytest plugin."""
    import cupy

    cupy.cuda.set_allocator(None)


# --- what there is to prove -----------------------------------------------------------------------------


def compositions() -> list[str]:
    """Return the packages of `cukern` that consist of ops and have no kernels of their own: each has a spec."""
    specs = (path.stem for path in (ROOT / "tests" / "specs").glob("[!_]*.py"))
    return sorted(name for name in specs if (ROOT / "cukern" / name).is_dir())


def integrations() -> list[str]:
    """Return the libraries whose models run on the ops."""
    found = (ROOT / "cukern" / "integrations").glob("[!_]*")
    return sorted(path.stem for path in found if path.suffix == ".py" or path.is_dir())


def stems() -> list[str]:
    """Return the stems of the ops and of the compositions."""
    kernels = (path.relative_to(ROOT / "cuda_src") for path in (ROOT / "cuda_src").rglob("*.cu"))
    return sorted({*(path.parts[0].removesuffix(".cu") for path in kernels), *compositions()})


def waits(name: str) -> bool:
    """Return whether a kernel of a stem's tests waits for kernels of other GPUs or processes.

    GPUs are time-sliced in milliseconds between processes, so such a wait takes many slices beside other tests. Tests
    with the marker `waits` therefore run first, alone.
    """
    return any("mark.waits" in file.read_text() for file in test_files(name))


def templates(name: str) -> list[Path]:
    """Return the files with the kernels of a stem: one file, or the files of its folder."""
    folder = ROOT / "cuda_src" / name
    return sorted(folder.glob("*.cu")) if folder.is_dir() else [p for p in [folder.with_suffix(".cu")] if p.is_file()]


def test_files(name: str) -> list[Path]:
    """Return the files with the GPU tests of a stem, or for `SHARED` the files that belong to no stem."""
    folder = ROOT / "tests"
    suites = [path for path in (folder / suite for suite in SUITES) if path.is_file()]
    if name in compositions():
        return sorted(folder.glob(f"test_{name}*.py")) + suites
    if name != SHARED:
        own = [folder / f"test_{name}.py", *sorted(folder.glob(f"test_{name}_*.py"))]
        return [path for path in own if path.is_file()] + suites
    owned = {file for stem in stems() for file in test_files(stem)} - {*suites}
    return [file for file in sorted(folder.glob("test_*.py")) if file not in owned and "mark.gpu" in file.read_text()]


def _module_file(name: str) -> Path | None:
    """Return the file of a module of the package or of the tests."""
    path = ROOT.joinpath(*name.split("."))
    if path.parts[len(ROOT.parts)] not in ("cukern", "tests"):
        return None
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(file: Path) -> set[Path]:
    """Return the files of the modules that a file imports from the package and the tests.

    `import cukern` adds none, because it imports every op and every test has it. `tests.specs` finds the specs by their
    file names.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    found = {_module_file(name) for name in names - {"cukern"}}
    return {path for path in found if path}


def _followed(files: Iterable[Path]) -> list[Path]:
    """Return `files`, all files that they import directly or indirectly, and the kernels of the ops among them."""
    from cukern.runtime.sources import included

    found = [path for path in files if path.is_file()]
    for file in found:
        found += sorted(_imported(file) - {*found})
    ops = ROOT / "cukern" / "ops"
    names = [path.relative_to(ops).parts[0].removesuffix(".py") for path in found if path.is_relative_to(ops)]
    files = [path for name in dict.fromkeys(names) for path in templates(name)]
    kernels, _ = included(files, ROOT / "cuda_src")
    return found + kernels


def sources(name: str) -> list[Path]:
    """Return the files that a stem's proof covers. A change to any of them invalidates the proof."""
    package = ROOT / "cukern"
    if name == SHARED:
        # `cukern/__init__.py` only imports the ops.
        rooms = ["ops", "reference", "__init__.py", *compositions()]
        others = [path for path in package.rglob("*.py") if path.relative_to(package).parts[0] not in rooms]
        tests = [*test_files(name), ROOT / "tests" / "conftest.py"]
        return [*others, *(path for path in _followed(tests) if path.is_relative_to(ROOT / "tests"))]
    twin = package / "reference" / f"{name}.py"
    host = package / (name if name in compositions() else f"ops/{name}")
    files = sorted(host.glob("*.py")) if host.is_dir() else [host.with_suffix(".py")]
    return _followed([*files, twin, ROOT / "tests" / "specs" / f"{name}.py", *test_files(name)])


def provable() -> list[str]:
    return stems() + ([SHARED] if test_files(SHARED) else [])


def unproved(name: str, entry: Entry | None) -> str | None:
    """Return why a stem is not proved on today's sources, or None if it is proved."""
    if entry is None:
        return "never proved"
    if entry["digest"] != digest(*sources(name), root=ROOT):
        return f"stale: the sources have changed since {entry['date'][:10]}"
    if entry["failed"]:
        return f"{entry['failed']} tests failed"
    if not entry["passed"]:
        return "no test passed"
    if name != SHARED:
        for tool in TOOLS:
            errors = entry["sanitizer"].get(tool)
            if errors is None:
                return f"{tool} did not run to its end"
            if errors:
                return f"{tool} found {errors} errors"
    return None


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"stems": {}}


_record_lock = threading.Lock()


def write_entry(name: str, entry: Entry, machine: dict[str, Any]) -> None:
    """Write the entry of one stem into the record, and keep the other entries."""
    date = now()
    with _record_lock:
        entries = read_record()["stems"]
        own = {"gpu": machine["gpu"], "gpus": gpu_count(), "nvrtc": machine["versions"]["nvrtc"]}
        entries[name] = {**entry, **own, "date": date}
        content = {**machine, "date": date, "stems": dict(sorted(entries.items()))}
        RECORD.write_text(json.dumps(content, indent=1) + "\n")


def gpu_count() -> int:
    """Return the number of GPUs that this process sees."""
    # Import here: the import compiles kernels, into the cache that `main` chooses.
    from cukern.runtime import kernel

    return kernel.device_count()


# --- running --------------------------------------------------------------------------------------------


def gpu_names() -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    count = gpu_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return given if len(given) == count else [str(i) for i in range(count)]


def _most_to_test(name: str) -> int:
    """Return a sort key that puts the stems with the largest test files first; they take longest."""
    return -sum(file.stat().st_size for file in test_files(name) if file.is_file())


def spread(names: Sequence[str], work: Callable[[str, dict[str, str]], None]) -> None:
    """Call `work(name, environment)` for each stem: several stems at the same time, distributed over all GPUs."""
    gpus = gpu_names()
    # Each tool is a process that spends most of its time on the host, and that takes GPU memory.
    at_once = max(1, min((os.cpu_count() or 1) // len(TOOLS), _STEMS_AT_ONCE_PER_GPU * len(gpus)))
    with ThreadPoolExecutor(at_once) as pool:
        ordered = sorted(names, key=_most_to_test)
        done = [pool.submit(work, name, from_gpu(gpus, i)) for i, name in enumerate(ordered)]
    for future in done:
        future.result()


def run(command: Sequence[str | Path], show: bool = False, **environment: str) -> tuple[int, str]:
    """Run a command in the checkout. Return its exit status and output; with `show` the output goes to the terminal.

    A command that exceeds the time limit is killed with its child processes, and has a negative status.
    """
    pipe = None if show else subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=pipe, stderr=subprocess.STDOUT if pipe else None,
        text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, _ = process.communicate()
    return process.returncode, output or ""


Counts = dict[str, int]


def counts(report: Path, names: Sequence[str]) -> dict[str, Counts]:
    """Return how many tests of each stem passed, failed and were skipped, from a JUnit file."""
    owner = {f"tests.{file.stem}": name for name in names for file in test_files(name) if file.name not in SUITES}
    found = {name: {"passed": 0, "failed": 0, "skipped": 0} for name in names}
    for case in ElementTree.parse(report).iter("testcase"):
        marked = [own.get("value", "") for own in case.iter("property") if own.get("name") == STEM]
        # pytest reports a file that it cannot collect as a case with its name. A failure without a stem fails all
        # stems.
        stem = marked[0] if marked else owner.get(case.get("classname", "")) or owner.get(case.get("name", ""))
        failed = case.find("failure") is not None or case.find("error") is not None
        outcome = "failed" if failed else "passed" if case.find("skipped") is None else "skipped"
        for own in [found[stem]] if stem else found.values():
            own[outcome if stem else "failed"] += 1
    return found


def _pytest(names: Sequence[str], marked: str) -> list[str | Path]:
    """Return the command that runs the tests of stems with these markers."""
    files = dict.fromkeys(file for name in names for file in test_files(name))
    return [sys.executable, "-m", "pytest", "-m", marked, "-q", *(f"--stem={name}" for name in names), *files]


def run_tests(names: Sequence[str], marked: str = "gpu", workers: int = 0) -> dict[str, Counts]:
    """Run the tests of stems with these markers, on `workers` processes, or in one process if it is 0.

    A crash counts as one failure of each stem.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        # `worksteal` gives neighbouring tests to one worker, such as the large tests, which run one at a time.
        parallel = ["-n", str(workers), "--dist", "worksteal"] if workers else []
        environment = {GPUS: ",".join(gpu_names()), **(ONE_THREAD if workers else {})}
        _, output = run([*_pytest(names, marked), *parallel, "--junit-xml", str(report)], **environment)
        print(output.strip(), flush=True)
        if report.exists():
            return counts(report, names)
        return {name: {"passed": 0, "failed": 1, "skipped": 0} for name in names}


@functools.cache
def sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    folders = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{folder}/bin" for folder in folders if folder)])
    return shutil.which("compute-sanitizer", path=path)


def errors_in(output: str) -> int | None:
    """Return the number of errors that a tool reports at its end, or None if it did not finish."""
    found = re.findall(r"RACECHECK SUMMARY: (\d+) hazards?|ERROR SUMMARY: (\d+) errors?", output)
    return sum(int(hazards or errors) for hazards, errors in found) if found else None


def _kernels(stem: str) -> list[str]:
    """Return the names of the kernels that a stem runs."""
    from cukern.runtime import kernel

    cuda_src = ROOT / "cuda_src"
    ops = {path.relative_to(cuda_src).parts[0].removesuffix(".cu") for path in sources(stem) if path.suffix == ".cu"}
    return [own.function for op in sorted(ops) for own in kernel.KERNELS[op]]


def _run_tool(stem: str, tool: str, environment: dict[str, str]) -> int | None:
    command: list[str | Path] = [
        str(sanitizer()), "--tool", tool, "--error-exitcode", str(_ERRORS_FOUND),
        "--target-processes", "application-only",
    ]  # fmt: skip
    if tool != "initcheck":
        # Kernels of other libraries make the inputs. Only initcheck must watch them, because it tracks writes.
        for name in _kernels(stem):
            command += ["--kernel-name", f"kns={name}"]
    command += [*_pytest([stem], "gpu and sanitize"), "-p", "tests.gpu_record"]
    # Disable torch's pool too: a pool hides the bounds of an array.
    settings = {"CUKERN_COMPILE": "lazy", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **ONE_THREAD}
    status, output = run(command, **settings, **environment)
    errors = errors_in(output)
    # The status is 0, or the tool's own for errors. Any other status means a failed or missing test, and proves
    # nothing.
    finished = status in (0, _ERRORS_FOUND) and errors is not None
    lines = output.strip().splitlines()
    shown = lines[-1:] if finished and not errors else lines[-200:]
    print(f"{stem} under {tool}:", *shown, sep="\n", flush=True)
    return errors if finished else None


def run_sanitizer(stem: str, environment: dict[str, str]) -> dict[str, int | None]:
    """Return the errors by tool. The tools run at the same time, because each spends most of its time on the host."""
    if sanitizer() is None:
        print("compute-sanitizer was not found: it comes with the CUDA toolkit", file=sys.stderr)
        return dict.fromkeys(TOOLS)
    _kernels(stem)
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return dict(zip(TOOLS, pool.map(lambda tool: _run_tool(stem, tool, environment), TOOLS), strict=True))


# --- commands -------------------------------------------------------------------------------------------


def prove(names: Sequence[str], workers: int) -> int:
    """Run the tests and the sanitizer. Write the entry of each stem when its results are complete."""
    # Import here: the import compiles kernels, into the cache that `main` chooses.
    from cukern.runtime.progress import in_command, progress

    described = machine()
    print(f"{gpu_count()} GPUs", flush=True)
    # Computed before the run, so that a change during the run makes the proof stale.
    digests = {name: digest(*sources(name), root=ROOT) for name in names}
    waiting = [name for name in names if waits(name)]
    sanitized = [name for name in names if name != SHARED]
    with in_command("tests.gpu_record"), progress("tests and sanitizer", 2 + len(sanitized)) as advance:
        advance(0, "tests that wait for other ranks")
        of_waiting = run_tests(waiting, "gpu and waits") if waiting else {}
        advance(1, f"tests on {workers} processes")
        found = run_tests(names, "gpu and not waits" if waiting else "gpu", workers)
        advance(1)

        def sanitize_and_write(name: str, environment: dict[str, str]) -> None:
            together = {key: count + of_waiting.get(name, {}).get(key, 0) for key, count in found[name].items()}
            entry: Entry = {"digest": digests[name], **together, "sanitizer": {}}
            if name in sanitized:
                entry["sanitizer"] = run_sanitizer(name, environment)
                advance(1, f"{name} under the sanitizer")
            write_entry(name, entry, described)

        spread(names, sanitize_and_write)
    return check(names)


def measure(names: Sequence[str]) -> int:
    """Run the benchmarks of the stems."""
    measured = [name for name in names if name != SHARED]
    command = [sys.executable, "-m", "cukern", "bench", *measured, "--results"]
    return int(bool(measured) and run(command, show=True)[0] != 0)


def sanitize(names: Sequence[str]) -> int:
    """Run the sanitizer alone. The record takes the results if the stem's tests ran on the same sources."""
    from cukern.runtime.progress import in_command, progress

    described, outcomes = machine(), {}

    def sanitize_one(name: str, environment: dict[str, str]) -> None:
        of_sources = digest(*sources(name), root=ROOT)
        advance(0, name)
        outcomes[name] = found = run_sanitizer(name, environment)
        advance(1)
        entry = read_record()["stems"].get(name)
        if entry and entry["digest"] == of_sources:
            write_entry(name, {**entry, "sanitizer": found}, described)
        print(f"{name}: " + ", ".join(f"{tool} {'not finished' if n is None else n}" for tool, n in found.items()))

    chosen = [name for name in names if name != SHARED]
    with in_command("tests.gpu_record"), progress("sanitizer", len(chosen)) as advance:
        spread(chosen, sanitize_one)
    return 0 if all(found[tool] == 0 for found in outcomes.values() for tool in TOOLS) else 1


def check(names: Sequence[str]) -> int:
    """Print for each stem whether it is proved on today's sources. Return 1 if any is not."""
    entries = read_record()["stems"]
    status = 0
    for name in names:
        entry = entries.get(name)
        reason = unproved(name, entry)
        if reason is None:
            skipped = f", {entry['skipped']} skipped" if entry["skipped"] else ""
            gpus = f"{entry['gpus']} x {entry['gpu']}" if entry["gpus"] > 1 else entry["gpu"]
            where = f"{gpus}, NVRTC {entry['nvrtc']}, {entry['date'][:10]}"
            reason = f"proved on {where}: {entry['passed']} tests passed{skipped}"
        else:
            status = 1
        print(f"{name}: {reason}", flush=True)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_record", description="The GPU record.")
    parser.add_argument("command", choices=("run", "prove", "sanitize", "check"))
    parser.add_argument("--ops", default="", metavar="STEMS", help=f"separated by spaces; also {SHARED} (default: all)")
    parser.add_argument(
        "--workers", type=int, default=_WORKERS, metavar="N", help=f"test on N processes (default: {_WORKERS})"
    )
    args = parser.parse_args(argv)
    names = args.ops.split() or provable()
    if unknown := [name for name in names if name not in provable()]:
        parser.error(f"no stem is called {unknown[0]!r}; there are {', '.join(provable())}")
    if args.command == "check":
        return check(names)
    with tempfile.TemporaryDirectory(prefix="cukern-gpu-") as cache:
        # All processes started here share one cache, and do not use the user's cache.
        os.environ.setdefault("CUKERN_CACHE_DIR", cache)
        if args.command == "sanitize":
            return sanitize(names)
        status = prove(names, args.workers)
        return status | measure(names) if args.command == "run" else status


if __name__ == "__main__":
    sys.exit(main())
