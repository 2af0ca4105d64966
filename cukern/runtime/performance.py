"""Warnings of calls that take much longer than after a step of the caller's, such as `cukern.prepare_weights`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from cukern.runtime.arrays import Library
from cukern.runtime.plan import Trace

#: The advice that this process has given.
_given: set[str] = set()


class PerformanceWarning(UserWarning):
    """A warning of a call that takes much longer than it would after a step that the warning names.

    Each step is named once a process, by the first call of its kind. `warnings.filterwarnings("ignore",
    category=cukern.PerformanceWarning)` silences it.
    """


def warn(trace: Trace) -> None:
    """Warn with the advice of a new plan, at the first line of the caller's outside of this package."""
    for text in {step.notes["advice"] for step in trace.steps if "advice" in step.notes}:
        warn_once(text)


def advise(library: Library, text: str) -> None:
    """Warn with `text` of a call, or let the plan warn that the call is a part of."""
    if library.recorder is None:
        warn_once(text)
    else:
        library.recorder.note(advice=text)


def warn_once(text: str) -> None:
    """Warn with `text`, once a process, at the first line of the caller's outside of this package."""
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
