"""Warnings about slow calls."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from cukern.runtime.plan import Trace, note

_given: set[str] = set()


class PerformanceWarning(UserWarning):
    """A call would be much faster with an additional step, such as `cukern.prepare_weights`. The message names the
    step.

    A process gives each warning once. `warnings.filterwarnings("ignore", category=cukern.PerformanceWarning)` silences
    them.
    """


def advise(text: str) -> None:
    """Request a `PerformanceWarning` with this text. The bodies of ops call this function."""
    note(advice=text)


def warn(trace: Trace) -> None:
    """Give the warnings that a new plan's body has requested. They cite the first line outside of this package."""
    for text in {step.notes["advice"] for step in trace.steps if "advice" in step.notes}:
        if text not in _given:
            _given.add(text)
            warnings.warn(text, PerformanceWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Return the `stacklevel` for `warn`."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "cukern":
        frame, level = frame.f_back, level + 1
    return level
