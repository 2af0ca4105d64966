"""Which cases a process runs: a share by number, or those that it takes from a board."""

from __future__ import annotations

import random
from collections.abc import Iterator
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


class Turns:
    """The cases of one process, and where it writes what they come to."""

    def __init__(self, part: Part, path: Path | None, done: frozenset[tuple[str, str]] = frozenset()) -> None:
        self.part = part
        self.path = path
        self.done = done  # names of files and cases that have been run before

    def chosen(self, cases: list[Any], names: list[str]) -> list[Any]:
        """The cases that this process could run, of all that there are."""
        return self.part.of_list(cases)

    def of(self, cases: list[Any]) -> Iterator[Any]:
        """Those that it does run, one after the other."""
        return iter(cases)

    def begin(self, file: str, name: str) -> None:
        tally.append(self.path, tally.Case(file, name, tally.BEGUN))

    def is_done(self, file: str, name: str) -> bool:
        return (file, name) in self.done


class SharedTurns(Turns):
    """Cases of a job that several processes share."""

    def __init__(self, board: Board, job: int, part: Part, path: Path, done: frozenset[tuple[str, str]]) -> None:
        super().__init__(part, path, done)
        self.board, self.job = board, job

    def chosen(self, cases: list[Any], names: list[str]) -> list[Any]:
        has = self.board.jobs[self.job].has
        found = self.part.of_list([case for case, name in zip(cases, names, strict=True) if has(name)])
        self.board.count(self.job, len(found))
        return found

    def of(self, cases: list[Any]) -> Iterator[Any]:
        while (number := self.board.take(self.job)) is not None:
            yield cases[number]
