"""Warnings of calls that take much longer than after a step of the caller's, such as `cukern.prepare_weights`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from cukern.runtime.plan import Trace, note

#: The advice that this process has given.
_given: set[str] = set()


class PerformanceWarning(UserWarning):
    """A warning of a call that takes much longer than it would after a step that the warning names.

    Each step is named once a process, by the first call of its kind. `warnings.filterwarnings("ignore",
    category=cukern.PerformanceWarning)` silences it.
    """


def advise(text: str) -> None:
    """Let the call that this plan is made for warn with `text`, in the body of an op."""
    note(advice=text)


def warn(trace: Trace) -> None:
    """Warn with the advice of a new plan, at the first line of the caller's outside of this package."""
    for text in {step.notes["advice"] for step in trace.steps if "advice" in step.notes}:
        if text not in _given:
            _given.add(text)
            warnings.warn(text, PerformanceWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The `stacklevel`, for `warn`, of the first frame outside of this package."""
    frame: Any = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "cukern":
        frame, level = frame.f_back, level + 1
    return level
