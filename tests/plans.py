"""The plans of calls, made without a GPU."""

from __future__ import annotations

from typing import Any

from cukern.runtime.gpu import of_arch
from cukern.runtime.op import OPS, Op
from cukern.runtime.plan import Trace


def plan_of(op: Op | str, *args: Any, on: str = "90a", **kwargs: Any) -> tuple[Trace, Any]:
    """What the plan of an op says for a call, and what it returns; the arrays are taken to be on a GPU `on`."""
    declared = OPS[op] if isinstance(op, str) else op
    trace, returned, _ = declared.say(declared.form(args, kwargs), (*args, *kwargs.values()), of_arch(on))
    return trace, returned
