"""Warnings about slow calls that the caller could make much faster, for example by `cukern.prepare_weights`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from cukern.runtime.plan import Trace, note

#: The advice that this process has given so far.
_given: set[str] = set()


class PerformanceWarning(UserWarning):
    """A warning about a call that an additional step of the caller would make much faster. The message names the step.

    A process gives each warning once, at the first call that it applies to. `warnings.filterwarnings("ignore",
    category=cukern.PerformanceWarning)` silences the warnings.
    """


def advise(text: str) -> None:
    """In the body of an op, request that the call warns with `text`."""
    note(advice=text)


def warn(trace: Trace) -> None:
    """Warn with the advice of a new plan, at the caller's first line outside of this package."""
    for text in {step.notes["advice"] for step in trace.steps if "advice" in step.notes}:
        if text not in _given:
            _given.add(text)
            warnings.warn(text, PerformanceWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """Return the `stacklevel`, as seen from `warn`, of the first frame outside of this package."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "cukern":
        frame, level = frame.f_back, level + 1
    return level
