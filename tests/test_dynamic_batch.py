"""One compiled graph of each operator serves any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.spec import Call
from tests.specs import CALLS, FUNCTIONS, calls_of, parameters

pytestmark = pytest.mark.usefixtures("fresh_compiler")

#: The batches are so many times that of the call. A batch of one has graphs of its own.
TIMES = (2, 5, 3)


def larger(call: Call, times: int) -> Call:
    """The call with its batch so many times."""
    dims, values = FUNCTIONS[call.name].batch_dims, FUNCTIONS[call.name].grown

    def grown(name: str, value: Any) -> Any:
        if name not in dims or value is None:
            return value
        if isinstance(value, int):
            return value * times
        if name in values:
            return values[name](value, times)
        return torch.cat([value] * times, dims[name]) if value.ndim else value

    given = {name: grown(name, value) for name, value in call.given.items()}
    return Call(call.name, tuple(given.values())[: len(call.args)], {name: given[name] for name in call.options})


def dynamic(call: Call, backend: Any) -> Callable[..., Any]:
    """The compiled function of a call, in whose graph the batch is a symbol, as are the numbers that grow with it."""
    dims = FUNCTIONS[call.name].batch_dims
    names = list(call.given)
    sizes = {name for name, value in call.given.items() if name in dims and type(value) is int}

    function, count = call.function, len(call.args)  # torch 2.10 traces no method of a named tuple

    @torch.compile(fullgraph=True, backend=backend)
    def compiled(*values: Any) -> Any:
        values = [x.shape[0] if name in sizes else x for name, x in zip(names, values, strict=True)]
        options = dict(zip(names[count:], values[count:], strict=True))
        return function(*values[:count], **options)

    def marked(*args: Any, **options: Any) -> Any:
        values = []
        for name, value in zip(names, (*args, *options.values()), strict=True):
            if name in sizes:
                # A number is a constant of a graph, but a size is not.
                value = torch.empty(value, 0)
            if name in dims and value is not None and value.ndim:
                torch._dynamo.mark_dynamic(value, dims[name])
            values.append(value)
        return compiled(*values)

    return marked


@pytest.mark.parametrize("key", parameters(key for key in calls_of("batch") if key in CALLS))
def test_one_graph_serves_any_batch(key: str, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    function = dynamic(CALLS[key], counter)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for times in TIMES:
            call = larger(CALLS[key], times).on(device)
            got, wanted = call.outcome(function), call.expected()
            assert len(got) == len(wanted) > 0
            for one, other in zip(got, wanted, strict=True):
                if isinstance(other, torch.Tensor):
                    assert one.shape == other.shape
                    assert torch.equal(one, other)
                else:
                    assert one == other
    assert counter.frame_count == 1
