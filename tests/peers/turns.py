"""Which cases a process runs: a share by number, or those that it takes from a board."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.peers import tally
from tests.peers.board import Board


class Part(NamedTuple):
    """A share of the cases of a file."""

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Part:
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def of_list(self, cases: list[Any]) -> list[Any]:
        """A share of all kinds in equal measure, in an order that is always the same."""
        places = list(range(len(cases)))
        random.Random(0).shuffle(places)
        return [cases[place] for place in places[self.index :: self.count]]


class Before(NamedTuple):
    """The names of the cases of a file that earlier runs have run: those that failed are run again."""

    done: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, cases: Iterable[tally.Case], file: str) -> Before:
        found: dict[bool, set[str]] = {False: set(), True: set()}
        for case in cases:
            if case.file == file:
                found[case.outcome == "failed"].add(case.name)
        return cls(frozenset(found[False]), frozenset(found[True]))


class Turns:
    """The cases of one process, and where it writes what they come to."""

    def __init__(self, part: Part, path: Path | None, every: int = 1, before: Before | None = None) -> None:
        self.part = part
        self.path = path
        self.every = every
        self.before = before or Before()

    def chosen(self, cases: list[Any], names: list[str], tests: list[str] | None = None) -> list[Any]:
        """Those that are to be run, of all that there are: what has failed before, and a sample of each test.

        Cases that have been run before count for the sample. `tests` are by case the names of their tests, which are
        by themselves what is before the first bracket of a case's name.
        """
        tests = tests or [name.partition("[")[0] for name in names]
        order = self.part.of_list([*range(len(cases))])
        found = [place for place in order if names[place] in self.before.failed]
        run = self.before.failed | self.before.done
        lacking = self.sizes(tests[place] for place in order)
        for place in order:
            lacking[tests[place]] -= names[place] in run
        for place in order:
            if names[place] not in run and lacking[tests[place]] > 0:
                lacking[tests[place]] -= 1
                found.append(place)
        return [cases[place] for place in found]

    def sizes(self, tests: Iterable[str]) -> dict[str, int]:
        """How many cases of each test are a sample, from the test of each case."""
        return {test: -(-count // self.every) for test, count in Counter(tests).items()}

    def of(self, cases: list[Any]) -> Iterator[Any]:
        """Those that it does run, one after the other."""
        return iter(cases)

    def begin(self, file: str, name: str) -> None:
        tally.append(self.path, tally.Case(file, name, tally.BEGUN))


class SharedTurns(Turns):
    """Cases of a job that several processes share."""

    def __init__(self, board: Board, job: int, part: Part, path: Path, before: Before) -> None:
        super().__init__(part, path, board.jobs[job].every, before)
        self.board, self.job = board, job

    def chosen(self, cases: list[Any], names: list[str], tests: list[str] | None = None) -> list[Any]:
        job = self.board.jobs[self.job]
        tests = tests or [name.partition("[")[0] for name in names]
        own = [place for place, name in enumerate(names) if job.has(name)]
        of_job = [[of_all[place] for place in own] for of_all in (cases, names, tests)]
        found = super().chosen(*of_job)
        if job.load.first:
            slow = {id(case) for case, name in zip(*of_job[:2], strict=True) if re.search(job.load.first, name)}
            found.sort(key=lambda case: id(case) not in slow)  # all others stay in their order
        tally.append(self.path, tally.Case(job.file, job.load.cases, tally.COUNTED, str(len(own))))
        size = sum(self.sizes(of_job[2]).values())
        tally.append(self.path, tally.Case(job.file, job.load.cases, tally.SAMPLED, f"{size} {job.every}"))
        self.board.count(self.job, len(found))
        return found

    def of(self, cases: list[Any]) -> Iterator[Any]:
        while (number := self.board.take(self.job)) is not None:
            yield cases[number]
