"""Make the plans of calls without a GPU."""

from __future__ import annotations

from typing import Any

from cukern.runtime.gpu import of_arch
from cukern.runtime.op import OPS, Op
from cukern.runtime.plan import Trace


def plan_of(op: Op | str, *args: Any, on: str = "90a", **kwargs: Any) -> tuple[Trace, Any]:
    """Return the trace of the plan that an op makes for a call on GPU `on`, and the result of the plan."""
    declared = OPS[op] if isinstance(op, str) else op
    trace, returned, _ = declared.record(declared.kind_of(args, kwargs), (*args, *kwargs.values()), of_arch(on))
    return trace, returned
