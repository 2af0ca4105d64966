"""Several processes on one GPU or more, which share the cases of all files: each runs cases of one file, and ends.

No case waits for a slow one: a process takes the next case when it has ended one, and another process the next file
when a file has no more. Processes are forks of one that has imported all and never touches the GPU: starting one costs
a fork and a context, and nothing that a file or its cases leave behind reaches another file. Each case is written when
it ends, so that little is lost where the time ends, or a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from tests.peers import tally
from tests.peers.board import Board
from tests.peers.files import Job
from tests.peers.turns import Before, Part, SharedTurns

_WAIT_S = 0.1
_REPORT_S = 20.0
_START_S = 120.0  # for imports, and to collect a file
_GRACE_S = 15.0  # for cases that run when the time has ended
_ENDED, _LOST = 0, 86  # exit statuses: no more for this folder; a GPU that can do no more (plugin.LOST)
_PYTEST_ENDED = (0, 1, 5)  # passed, failed, no cases
_NOT_INITIALIZED = 3  # CUDA's error of a program that has not begun to use it, and can be forked
_ALL = range(sys.maxsize)  # processes
_MOST_FAILURES = 8  # processes of a folder that end by themselves


class Plan(NamedTuple):
    """What all processes do."""

    work: Path  # the folder of what cases came to, and of what the processes print
    part: Part
    arguments: list[str]
    first: int = 0  # the number of the first process; lower ones are those of earlier runs


# --- a worker -----------------------------------------------------------------------------------------


def work(job: int, number: int, gpu: str | None, board: Board, plan: Plan, befores: Mapping[str, Before]) -> None:
    """Run cases of a job, on one GPU, until it has no more: what a process does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a program that ends all processes is no failure of a case
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when the process first uses CUDA
    log = os.open(plan.work / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from tests.peers import session

    folder, file = board.jobs[job].folder, board.jobs[job].file
    path = _tally(plan.work, number, folder)
    try:
        session.prepare(folder)
        turns = SharedTurns(board, job, plan.part, path, befores[board.jobs[job].name])
        status = session.run_file(folder, file, turns, plan.arguments)
        if status not in _PYTEST_ENDED:
            tally.append(path, tally.Case(file, "", "failed", f"pytest ended with {status} (see {number}.log)"))
    except BaseException:
        traceback.print_exc()
        tally.append(path, tally.Case(file, "", "failed", traceback.format_exc().strip().splitlines()[-1][:200]))
    finally:
        if board.state(job).count is None:  # it cannot be collected
            board.count(job, 0)
            tally.append(path, tally.Case(file, board.jobs[job].load.cases, tally.SAMPLED, "0 1"))
        board.leave(number)


def _tally(work: Path, number: int, folder: Path) -> Path:
    return work / f"{number}-{folder.name}.jsonl"


def _paths(work: Path, folder: Path, numbers: Container[int]) -> list[Path]:
    """What processes with these numbers have written, in their order."""
    numbered = {path: int(path.name.partition("-")[0]) for path in work.glob(f"*-{folder.name}.jsonl")}
    return sorted((path for path, number in numbered.items() if number in numbers), key=lambda path: numbered[path])


def _cases(work: Path, folder: Path, numbers: Container[int] = _ALL) -> list[tally.Case]:
    """What the cases of a folder came to in the end, those of the last processes last."""
    paths = _paths(work, folder, numbers)
    return [*{(case.file, case.name): case for path in paths for case in tally.read(path)}.values()]


# --- those who start them -----------------------------------------------------------------------------


def _context() -> Any:
    """How processes start: by a fork, once all is imported; as programs of their own if that has touched the GPU."""
    for name in ("cupy", "triton", "tests.peers.session"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        is_begun = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _NOT_INITIALIZED
    except OSError:
        is_begun = False  # no GPU
    return multiprocessing.get_context("spawn" if is_begun else "fork")


def gpus() -> list[str]:
    """The names of the GPUs that there are, as in CUDA_VISIBLE_DEVICES, without a use of CUDA."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [match[1] for match in re.finditer(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)", found, re.MULTILINE)]


class _Worker:
    """A process, and the case that it is in."""

    def __init__(self, job: Job, number: int, gpu: int, process: BaseProcess, path: Path) -> None:
        self.folder, self.file, self.gpu = job.folder, job.file, gpu
        self.number, self.process, self.path = number, process, path
        self.size, self.since = -1, time.monotonic()

    def is_late(self, limit: float) -> bool:
        """Whether it has written nothing for so many seconds in a case, or for many more out of one."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self.size:
            self.size, self.since = size, time.monotonic()
        seconds = time.monotonic() - self.since
        return seconds > limit and (seconds > limit + _START_S or tally.unended(self.path) is not None)


class Workers:
    """The processes, and the table of what they have done so far."""

    def __init__(self, jobs: Sequence[Job], count: int, seconds: float, limit: float, plan: Plan, report: Path | None):
        self.jobs = tuple(jobs)
        os.environ.setdefault("PYTHONHASHSEED", "0")  # every process must list the same cases
        self.numbers = 1 + max((int(path.stem) for path in plan.work.glob("*.log")), default=-1)
        self.count, self.limit, self.report = count, limit, report
        self.plan = plan._replace(first=self.numbers)
        self.context = _context() if seconds > 0 else multiprocessing.get_context("spawn")
        self.befores = dict[str, Before]()
        self.board = Board(self._ranked(jobs), self.context, time.monotonic() + seconds)
        self.folders = list(dict.fromkeys(job.folder for job in jobs))
        self.gpus = gpus()
        self.workers: list[_Worker] = []
        self.failures = Counter[Path]()
        self.begin = self.reported = time.monotonic()
        self.said: set[int] = set()

    def run(self) -> list[tally.Case]:
        """Run all cases, or as many as the time allows; what they came to."""
        try:
            while time.monotonic() < self.board.end + _GRACE_S:
                self.workers = [worker for worker in self.workers if not self._has_ended(worker)]
                while len(self.workers) < self.count and self._start():
                    pass
                if not self.workers:
                    break
                self._say()
                time.sleep(_WAIT_S)
        finally:
            for worker in self.workers:
                worker.process.kill()
                worker.process.join()
        self._say()
        return self.cases()

    def _ranked(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs in their order: with failures of earlier runs, not begun yet, and others that lack cases."""
        found, totals = [], tally.counted(self._paths(jobs))
        cases = {folder: _cases(self.plan.work, folder) for folder in {job.folder for job in jobs}}
        for job in jobs:
            before = self.befores[job.name] = Before.of(cases[job.folder], job.file)
            done, failed = (sum(map(job.has, names)) for names in before)
            total = totals.get((job.name, job.load.cases))
            if failed or total is None or done < total / job.every:
                found.append(job._replace(rank=2 if failed else int(not done)))
        return found

    def _paths(self, jobs: Sequence[Job]) -> dict[str, list[Path]]:
        """What has been written about each folder, by its name."""
        return {folder.name: _paths(self.plan.work, folder, _ALL) for folder in {job.folder for job in jobs}}

    def cases(self, numbers: Container[int] = _ALL) -> list[tally.Case]:
        """What has come to its end, by the names of folder and file."""
        names = {job.name for job in self.jobs}
        return [
            case._replace(file=f"{folder.name}/{case.file}")
            for folder in self.folders
            for case in _cases(self.plan.work, folder, numbers)
            if f"{folder.name}/{case.file}" in names
        ]

    def left(self) -> dict[str, int | None]:
        """How many cases of each file should have been run and have not, None where nobody has counted them."""
        found, samples = dict[str, int | None](), tally.sampled(self._paths(self.jobs))
        names = defaultdict[str, list[str]](list)
        for case in self.cases():
            names[case.file].append(case.name)
        for job in self.jobs:
            sample, before = samples.get((job.name, job.load.cases)), found.get(job.name, 0)
            run = sum(bool(name) and job.has(name) for name in names[job.name])
            found[job.name] = None if sample is None or before is None else before + max(sample.size - run, 0)
        return found

    def wholes(self) -> dict[str, tally.Whole]:
        """What there is of each file."""
        totals, left, samples = self.totals(), self.left(), tally.sampled(self._paths(self.jobs))
        every = {file: sample.every for (file, _), sample in samples.items()}
        return {name: tally.Whole(total, left[name], every.get(name)) for name, total in totals.items()}

    def table(self) -> str:
        return tally.table(self.cases(), self.left(), self.totals())

    def totals(self) -> dict[str, int | None]:
        """How many cases each file has, None where not all of them have been counted."""
        found, totals = dict[str, int | None](), tally.counted(self._paths(self.jobs))
        for job in self.jobs:
            before, count = found.get(job.name, 0), totals.get((job.name, job.load.cases))
            found[job.name] = None if before is None or count is None else before + count
        return found

    def _start(self) -> bool:
        """Start a process where it is of most use; False if it is of none anywhere."""
        number = self.numbers
        counts = Counter(worker.gpu for worker in self.workers)
        gpu = min(range(max(len(self.gpus), 1)), key=lambda i: counts[i])
        is_last = gpu == len(self.gpus) - 1
        lost = {folder for folder, count in self.failures.items() if count >= _MOST_FAILURES}
        index = self.board.join(number, lost, is_last if len(self.gpus) > 1 else None)
        if index is None:
            return False
        self.numbers += 1
        job, name = self.board.jobs[index], self.gpus[gpu] if self.gpus else None
        process = self.context.Process(target=work, args=(index, number, name, self.board, self.plan, self.befores))
        process.start()
        self.workers.append(_Worker(job, number, gpu, process, _tally(self.plan.work, number, job.folder)))
        return True

    def _has_ended(self, worker: _Worker) -> bool:
        """Whether a process has ended, or takes too long in a case and is ended here; its case has failed then."""
        status, why = worker.process.exitcode, ""
        if status is None:
            limit = self.board.limit(worker.number, self.limit)
            if not worker.is_late(limit):
                return False
            worker.process.kill()
            worker.process.join()
            why = f"stopped after {limit:.0f} s"
        elif status not in (_ENDED, _LOST):
            why = f"the process ended with {status}"
        if why:
            case = tally.unended(worker.path)
            self.failures[worker.folder] += case is None
            file, name = (case.file, case.name) if case else (worker.file, f"process {worker.number}")
            why = f"{why} {_last_line(self.plan.work / f'{worker.number}.log')}"
            tally.append(worker.path, tally.Case(file, name, "failed", why[:200]))
        self.board.leave(worker.number)
        return True

    def _say(self) -> None:
        """Print the counts of each job that has ended, and write the table now and then."""
        for number, job in enumerate(self.board.jobs):
            state = self.board.state(number)
            if number not in self.said and state.is_over and not state.processes:
                self.said.add(number)
                which = f" ({job.load.cases})" if job.load.cases else ""
                print(f"{time.monotonic() - self.begin:6.1f} s  {job.name}: {state.count} cases{which}", flush=True)
        if self.report is not None and time.monotonic() - self.reported > _REPORT_S:
            self.reported = time.monotonic()
            write(self.report, self.table())


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else ""


def write(path: Path, text: str) -> None:
    """Write a file at once, so that it is whole whenever the program is ended."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text + "\n")
    temporary.replace(path)
