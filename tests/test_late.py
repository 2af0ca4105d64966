"""Late numbers: what a plan relies on holds for a call where the plan would have been the same."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cukern
from cukern.runtime import arrays, gpu, launch, plan
from cukern.runtime.kernel import Variant
from cukern.runtime.late import Guards, Late, ceil_div
from cukern.runtime.op import OPS, Op, forget_plans
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES
from tests.spec import Call
from tests.specs import CALLS, FUNCTIONS, why_exempt

COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
STEPS = {
    "add": operator.add,
    "mul": operator.mul,
    "sub": operator.sub,
    "floordiv": operator.floordiv,
    "ceil_div": ceil_div,
    "from the right": lambda number, by: by * number,
    "falls": lambda number, by: by - number,
}


def computed(number: Any, steps: list[tuple[str, int]]) -> Any:
    for name, by in steps:
        number = STEPS[name](number, by)
    return number


@settings(max_examples=500)
@given(
    st.integers(0, 300),
    st.lists(st.integers(0, 300), min_size=1),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 9)), max_size=3),
    st.sampled_from(COMPARISONS),
    st.integers(-20, 2000),
)
def test_guards_hold_where_the_outcome_is_the_same(
    first: int, others: list[int], steps: list[tuple[str, int]], compare: Any, limit: int
) -> None:
    guards = Guards()
    outcome = compare(computed(Late.at(0, first, guards), steps), limit)
    assert outcome is compare(computed(first, steps), limit)
    assert guards.hold([first])
    rises = not any(name == "falls" for name, _ in steps)
    for other in others:
        same = compare(computed(other, steps), limit) is outcome
        assert same or not guards.hold([other])
        # To differ from a number can be kept as to be above it.
        if not (compare in (operator.eq, operator.ne) and rises):
            assert guards.hold([other]) is same
    if rises and compare not in (operator.eq, operator.ne):
        assert not guards.others


# --- late scalars ---------------------------------------------------------------------------------------

H200 = gpu.of_arch("90a")
#: What a late scalar may be where a call has none.
NUMBERS = (2, 0.5, 1, 0)
#: What no late scalar may be, then what some may not.
NEVER, SOMETIMES = ("x", [2]), (2.5, -3, 2**40, True, float("nan"))


def ops_of(name: str) -> Sequence[str]:
    """The ops behind a public function, most often one of its name."""
    return FUNCTIONS[name].parts or (name,)


def late_scalars(call: Call) -> list[str]:
    ops = [OPS[name] for name in ops_of(call.name) if name in OPS]
    # A generator is no number: `tests/test_sampling.py` checks it.
    return sorted({scalar for own in ops for scalar in own.late_scalars} - {"generator"})


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors in host memory are taken for ones on an H200, on which launches do nothing."""
    library = arrays.library_of(torch.empty(0))
    say = Op.say

    def make(shape: Any, dtype: str, device: int | None, is_current: bool = True) -> Callable[[Any], torch.Tensor]:
        kind = getattr(torch, dtype)
        return lambda environment: torch.zeros(shape(environment) if callable(shape) else shape, dtype=kind)

    monkeypatch.setattr(Op, "say", lambda self, form, values: say(self, form, values, H200))
    monkeypatch.setattr(library, "maker", make)
    monkeypatch.setattr(library, "current_device", lambda: 0)
    monkeypatch.setattr(library, "stream", lambda device: 0)
    monkeypatch.setattr(library, "quick", arrays.Quick(torch.Tensor.data_ptr, lambda: 0, lambda device: 0))
    nothing = SimpleNamespace(setDevice=lambda device: None)
    for name, value in (
        ("runtime", nothing),
        ("current_device", lambda device: nullcontext()),
        ("encode", lambda *sizes: bytes(TENSOR_MAP_BYTES)),
    ):
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(launch, "THREAD", threading.local())
    monkeypatch.setattr(Variant, "load", lambda self, device: 1)
    monkeypatch.setattr(Variant, "launcher", lambda self, device: lambda *sizes: None)
    forget_plans()
    yield
    forget_plans()


def refusal(call: Call) -> str | None:
    """The type and the message of what a call raises."""
    try:
        call.function(*call.args, **call.options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def with_value(call: Call, name: str, value: Any) -> Call:
    given = {**call.given, name: value}
    args = list(given.values())[: len(call.args)]
    return Call(call.name, tuple(args), dict(list(given.items())[len(call.args) :]))


def with_a_number(call: Call, name: str) -> Call | None:
    """The call with a number for a late scalar: its own, or one of `NUMBERS`; None where it takes none of them."""
    given = call.given.get(name)
    if isinstance(given, torch.Tensor):
        given = given.flatten()[0].item() if given.numel() else None
    numbers = NUMBERS if given is None else (given,)
    calls = (with_value(call, name, number) for number in numbers)
    return next((one for one in calls if refusal(one) is None), None)


def check_late_scalars(call: Call) -> int:
    """Every call of a plan raises what the one raises that it is made for; how many scalars were tried."""
    tried = 0
    for name in late_scalars(call):
        good = with_a_number(call, name)
        if good is None:
            continue
        tried += 1
        for value in (*NEVER, *SOMETIMES):
            bad = with_value(call, name, value)
            forget_plans()
            wanted = refusal(bad)
            if value in NEVER:
                assert wanted is not None and f"{name} must be" in wanted, f"{name}={value!r}: {wanted}"
            for calls in (1, 5):  # the plan's loops, and its text
                forget_plans()
                for _ in range(calls):
                    assert refusal(good) is None
                assert refusal(bad) == wanted, f"{name}={value!r} after {calls} calls"
    return tried


WITH_LATE_SCALARS = [key for key, call in CALLS.items() if late_scalars(call)]


@pytest.mark.parametrize("key", WITH_LATE_SCALARS)
def test_a_late_scalar_is_checked_at_every_call(key: str, pretended_gpu: None) -> None:
    wanted = [name for name in late_scalars(CALLS[key]) if not why_exempt(key, f"late {name}")]
    assert check_late_scalars(CALLS[key]) == len(wanted)


@pytest.mark.parametrize("key", WITH_LATE_SCALARS)
def test_a_late_scalar_is_checked_where_the_batch_is_empty(key: str, pretended_gpu: None) -> None:
    call = CALLS[key]
    dims = FUNCTIONS[call.name].batch_dims

    def emptied(name: str, value: Any) -> Any:
        if name not in dims or value is None:
            return value
        if isinstance(value, int):
            return 0
        return value.narrow(dims[name], 0, int(name.startswith("cu_seq"))) if value.ndim else value

    given = {name: emptied(name, value) for name, value in call.given.items()}
    args = tuple(given.values())[: len(call.args)]
    check_late_scalars(Call(call.name, args, {name: given[name] for name in call.options}))


def test_every_late_scalar_has_a_call() -> None:
    ops = {name for call in CALLS.values() for name in ops_of(call.name)}
    assert {name for name, own in OPS.items() if own.late_scalars} & {*FUNCTIONS} <= ops


# --- gradients ------------------------------------------------------------------------------------------

NO_GRADIENT = r" must be a tensor that does not require grad \(there is no backward"


@pytest.mark.parametrize("calls", [1, 6])
def test_a_plan_refuses_gradients_at_every_call(calls: int, pretended_gpu: None) -> None:
    x, weight = torch.ones(3, 64), torch.ones(64)
    caches = CALLS["copy_blocks"]
    for _ in range(calls):  # the plan's loops, and its text
        cukern.rms_norm(x, weight)
        caches.run()
    with pytest.raises(RuntimeError, match="^weight" + NO_GRADIENT):
        cukern.rms_norm(x, weight.requires_grad_())
    trained = caches.changed(lambda name, x: x.clone().requires_grad_() if name == "value_caches" else x)
    with pytest.raises(RuntimeError, match=r"^value_caches\[0\]" + NO_GRADIENT):
        trained.run()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            cukern.rms_norm(x, weight)
            trained.run()
