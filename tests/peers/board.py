"""What several processes share: of each job the number of the next case, so that each case is one process's."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple

from tests.peers.files import Job

_UNKNOWN = -1
_MOST_PROCESSES = 4096  # that are ever started
_LEAST_CASES = 4  # for each process that is there already: with fewer, another is not worth its collecting
_LEAST_S = 4.0  # of each process: with less, another is not worth its start


class State(NamedTuple):
    """How far a job is."""

    taken: int
    count: int | None  # of cases; None until a process has collected them
    processes: int

    @property
    def is_over(self) -> bool:
        return self.count is not None and self.taken >= self.count


class Board:
    """The jobs of all processes, in shared memory."""

    def __init__(self, jobs: Sequence[Job], context: BaseContext, end: float) -> None:
        self.jobs = tuple(jobs)
        self.end = end  # by `time.monotonic`, which is one for all processes
        self._numbers = context.Array("q", [0, _UNKNOWN, 0] * len(self.jobs))
        self._places = context.Array("q", [_UNKNOWN] * _MOST_PROCESSES)
        self._stop = context.Value("b", 0)

    def stop(self) -> None:
        """Let no more cases be taken."""
        self._stop.value = 1

    @property
    def is_stopped(self) -> bool:
        return bool(self._stop.value) or time.monotonic() >= self.end

    def state(self, job: int) -> State:
        with self._numbers.get_lock():
            taken, count, processes = self._numbers[3 * job : 3 * job + 3]
        return State(taken, None if count == _UNKNOWN else count, processes)

    def has_room(self, job: int) -> bool:
        """Whether another process is of use."""
        state, most = self.state(job), self.jobs[job].load.most
        if state.is_over or state.processes >= most:
            return False
        if not state.processes:
            return True
        has_cases = state.count is None or state.count - state.taken > _LEAST_CASES * state.processes
        return has_cases and self.seconds_left(job) > _LEAST_S * state.processes

    def seconds_left(self, job: int) -> float:
        """What is left of what a job takes, as far as that is known."""
        state, seconds = self.state(job), self.jobs[job].load.seconds / self.jobs[job].every
        return seconds * (1 - state.taken / state.count) if state.count else seconds * (state.count is None)

    def join(self, process: int, without: Container[Path] = (), waits: bool | None = None) -> int | None:
        """Enter the job in which a process is of most use, None if it is of none in any.

        `without`: folders whose jobs are not begun; `waits`: whether jobs that wait for the GPU go first, or last.
        """

        def use(i: int) -> tuple[bool, int, float]:
            job = self.jobs[i]
            return job.load.waits == waits, job.rank, self.seconds_left(i) / (self.state(i).processes + 1)

        with self._numbers.get_lock():
            jobs = [i for i, job in enumerate(self.jobs) if job.folder not in without and self.has_room(i)]
            if self.is_stopped or not jobs:
                return None
            best = max(jobs, key=use)
            self._numbers[3 * best + 2] += 1
            self._places[process] = best
            return best

    def leave(self, process: int) -> None:
        """Leave the job that a process is in, if it is in one."""
        with self._numbers.get_lock():
            job = self._places[process]
            if job != _UNKNOWN:
                self._numbers[3 * job + 2] -= 1
                self._places[process] = _UNKNOWN

    def limit(self, process: int, limit: float) -> float:
        """The seconds that a case may take in the job that a process is in."""
        job = self._places[process]
        return limit if job == _UNKNOWN else max(limit, self.jobs[job].load.limit)

    def count(self, job: int, count: int) -> None:
        """Say how many cases there are."""
        with self._numbers.get_lock():
            self._numbers[3 * job + 1] = count

    def take(self, job: int) -> int | None:
        """The number of a case that nobody has had, or None if there is none, or no time."""
        with self._numbers.get_lock():
            taken, count = self._numbers[3 * job : 3 * job + 2]
            if self.is_stopped or (count != _UNKNOWN and taken >= count):
                return None
            self._numbers[3 * job] += 1
            return int(taken)
