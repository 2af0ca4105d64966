"""The GPU record: what was proved on a GPU, and on which sources.

    python -m tests.gpu_record run        GPU tests, sanitizer and benchmarks; writes tests/gpu_record.json
    python -m tests.gpu_record sanitize   the sanitizer alone
    python -m tests.gpu_record check      what is unproved, or was proved on other sources than today's

Each takes `--ops "STEM ..."`. A stem's tests are those of `tests/test_<stem>.py`; all other tests with the marker
`gpu` are proved together, as `runtime`. The sanitizer slows a kernel down by orders of magnitude, so it runs a stem's
tests that have the marker `sanitize` as well.

The record is `{"gpu", "driver", "cuda", "versions", "date", "stems": {stem: {"digest", "passed", "failed", "skipped",
"sanitizer": {tool: errors}, "gpu", "date"}}}`; `errors` is null for a tool that did not run to its end. A stem keeps
the GPU and the date of its own run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import digest, machine, now

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SHARED = "runtime"
# Far beyond what any of them takes: a kernel that hangs must not hold the machine for ever.
_TIMEOUT_S = 1800
_ERRORS_FOUND = 99

#: What is made of ops and has no kernels of its own: the name of its package in `cukern`, and the stems of these ops.
COMPOSITIONS = {"fused_moe": ("moe_activation", "moe_gemm", "moe_permute", "quantization")}

Entry = dict[str, Any]


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin of the sanitized run: give each array an allocation of its own, whose bounds a tool can see."""
    import cupy

    cupy.cuda.set_allocator(None)


# --- what there is to prove -----------------------------------------------------------------------------


def stems() -> list[str]:
    """Of the ops, and of what is composed of them."""
    composed = (name for name in COMPOSITIONS if (ROOT / "cukern" / name).is_dir())
    return sorted([*(path.stem for path in (ROOT / "cuda_src").glob("*.cu")), *composed])


def test_files(name: str) -> list[Path]:
    """The files with the GPU tests of a stem, or of all that belongs to none."""
    folder = ROOT / "tests"
    if name in COMPOSITIONS:
        return sorted(folder.glob(f"test_{name}*.py"))
    if name != SHARED:
        return [folder / f"test_{name}.py"]
    owned = {file for stem in stems() for file in test_files(stem)}
    return [file for file in sorted(folder.glob("test_*.py")) if file not in owned and "mark.gpu" in file.read_text()]


def _rooms(stem: str) -> list[Path]:
    """The files of an op in `cuda_src` and `cukern`; of what is composed of ops, its own and theirs."""
    package = ROOT / "cukern"
    twin = package / "reference" / f"{stem}.py"
    if stem in COMPOSITIONS:
        return [package / stem, twin, *(path for op in COMPOSITIONS[stem] for path in _rooms(op))]
    return [ROOT / "cuda_src" / f"{stem}.cu", package / "ops" / f"{stem}.py", twin]


def sources(name: str) -> list[Path]:
    """What a proof is about: a change to any of these ends it."""
    package, templates = ROOT / "cukern", ROOT / "cuda_src"
    shared = [templates / "common", package / "runtime"]
    if name != SHARED:
        return [*_rooms(name), *shared, *test_files(name)]
    rooms = [package / "ops", package / "reference", *(package / composition for composition in COMPOSITIONS)]
    others = [path for path in package.iterdir() if path not in rooms]
    return [*others, *shared, *test_files(name), ROOT / "tests" / "conftest.py"]


def provable() -> list[str]:
    return stems() + ([SHARED] if test_files(SHARED) else [])


def unproved(name: str, entry: Entry | None) -> str | None:
    """Why a stem is not proved on today's sources; None when it is."""
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


def write_entry(name: str, entry: Entry, machine: dict[str, Any]) -> None:
    """Store what is known of one stem; the others keep what they had."""
    entries = read_record()["stems"]
    date = now()
    entries[name] = {**entry, "gpu": machine["gpu"], "date": date}
    content = {**machine, "date": date, "stems": dict(sorted(entries.items()))}
    RECORD.write_text(json.dumps(content, indent=1) + "\n")


# --- running --------------------------------------------------------------------------------------------


def run(command: Sequence[str | Path], show: bool = False, **environment: str) -> tuple[int, str]:
    """The exit status of a command in the checkout, and its output unless that is to be shown as it comes.

    A command that takes too long is ended, with what it started, and has a negative status.
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


def counts(report: Path) -> dict[str, int] | None:
    """Passed, failed and skipped in a JUnit file; None when the run did not live to write it."""
    if not report.exists():
        return None
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(report).iter("testsuite"):
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def run_tests(name: str) -> dict[str, int]:
    """Run the GPU tests of a stem. A run that crashes counts as one failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--junit-xml", str(report)]
        run([*command, *test_files(name)], show=True)
        return counts(report) or {"passed": 0, "failed": 1, "skipped": 0}


@functools.cache
def sanitizer() -> str | None:
    """The path of compute-sanitizer."""
    folders = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(f"{folder}/bin" for folder in folders if folder)])
    return shutil.which("compute-sanitizer", path=path)


def errors_in(output: str) -> int | None:
    """The number of errors a tool reports at its end; None when it did not get there."""
    found = re.findall(r"RACECHECK SUMMARY: (\d+) hazards?|ERROR SUMMARY: (\d+) errors?", output)
    return sum(int(hazards or errors) for hazards, errors in found) if found else None


def _kernels(stem: str) -> list[str]:
    """The names of the kernels that a stem runs."""
    import cukern  # noqa: F401  (its import declares the kernels)
    from cukern.runtime.kernel import KERNELS

    return [kernel.function for op in COMPOSITIONS.get(stem, (stem,)) for kernel in KERNELS[op]]


def _run_tool(stem: str, tool: str) -> int | None:
    command: list[str | Path] = [
        str(sanitizer()), "--tool", tool, "--error-exitcode", str(_ERRORS_FOUND),
        "--target-processes", "application-only",
    ]  # fmt: skip
    if tool != "initcheck":
        # Other libraries' kernels make the inputs; only initcheck has to watch what they write.
        for name in _kernels(stem):
            command += ["--kernel-name", f"kns={name}"]
    command += [sys.executable, "-m", "pytest", "-p", "tests.gpu_record", "-m", "gpu and sanitize", "-q"]
    command += test_files(stem)
    # torch's pool, like CuPy's, would hide the bounds of an array.
    status, output = run(command, CUKERN_COMPILE="lazy", PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    errors = errors_in(output)
    # Status 0 or the tool's own; a failed or missing test has another, and then nothing is proved.
    finished = status in (0, _ERRORS_FOUND) and errors is not None
    lines = output.strip().splitlines()
    shown = lines[-1:] if finished and not errors else lines[-200:]
    print(f"{stem} under {tool}:", *shown, sep="\n", flush=True)
    return errors if finished else None


def run_sanitizer(stem: str) -> dict[str, int | None]:
    """Errors by tool, all tools at once: each spends most of its time on the host."""
    if sanitizer() is None:
        print("compute-sanitizer was not found: it comes with the CUDA toolkit", file=sys.stderr)
        return dict.fromkeys(TOOLS)
    _kernels(stem)
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return dict(zip(TOOLS, pool.map(lambda tool: _run_tool(stem, tool), TOOLS), strict=True))


# --- commands -------------------------------------------------------------------------------------------


def prove(names: Sequence[str]) -> int:
    """Test, sanitize and measure; the record is written stem by stem, whatever happens to the next one."""
    environment = machine()
    for name in names:
        # Taken before, so that a change made meanwhile leaves the proof stale.
        of_sources = digest(*sources(name), root=ROOT)
        entry: Entry = {"digest": of_sources, **run_tests(name), "sanitizer": {}}
        if name != SHARED:
            entry["sanitizer"] = run_sanitizer(name)
        write_entry(name, entry, environment)
    status = check(names)
    measured = [name for name in names if name != SHARED]
    if measured:
        command = [sys.executable, "-m", "cukern", "bench", *measured, "--results"]
        status |= run(command, show=True)[0] != 0
    return int(status)


def sanitize(names: Sequence[str]) -> int:
    """Run the sanitizer alone. The record takes the outcome where its tests were of the same sources."""
    clean = True
    for name in names:
        if name == SHARED:
            continue
        of_sources = digest(*sources(name), root=ROOT)
        found = run_sanitizer(name)
        clean = clean and all(found[tool] == 0 for tool in TOOLS)
        entry = read_record()["stems"].get(name)
        if entry and entry["digest"] == of_sources:
            write_entry(name, {**entry, "sanitizer": found}, machine())
        print(f"{name}: " + ", ".join(f"{tool} {'not finished' if n is None else n}" for tool, n in found.items()))
    return 0 if clean else 1


def check(names: Sequence[str]) -> int:
    """Say of each stem whether it is proved on today's sources; 1 if any is not."""
    entries = read_record()["stems"]
    status = 0
    for name in names:
        entry = entries.get(name)
        reason = unproved(name, entry)
        if reason is None:
            skipped = f", {entry['skipped']} skipped" if entry["skipped"] else ""
            reason = f"proved on {entry['gpu']}, {entry['date'][:10]}: {entry['passed']} tests passed{skipped}"
        else:
            status = 1
        print(f"{name}: {reason}", flush=True)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_record", description="The GPU record.")
    parser.add_argument("command", choices=("run", "sanitize", "check"))
    parser.add_argument("--ops", default="", metavar="STEMS", help=f"separated by spaces; also {SHARED} (default: all)")
    args = parser.parse_args(argv)
    names = args.ops.split() or provable()
    if unknown := [name for name in names if name not in provable()]:
        parser.error(f"no stem is called {unknown[0]!r}; there are {', '.join(provable())}")
    if args.command == "check":
        return check(names)
    with tempfile.TemporaryDirectory(prefix="cukern-gpu-") as cache:
        # One cache for all the processes started here, and none of the user's.
        os.environ.setdefault("CUKERN_CACHE_DIR", cache)
        return prove(names) if args.command == "run" else sanitize(names)


if __name__ == "__main__":
    sys.exit(main())
