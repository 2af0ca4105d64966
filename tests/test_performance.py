"""Warnings of calls that a step of the caller's makes much faster."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import cukern
from cukern.ops.moe_gemm import PREPARE
from cukern.runtime import gpu, op, performance
from cukern.runtime.kernel import arch_of_device
from tests.buffers import on_gpu
from tests.specs import CALLS

UNPREPARED = ["moe_gemm_batched b_scale", "moe_gemm b_scale bias activation alpha limit interleaved"]
LAYER = "fused_experts activation quant expert_map w1_scale w2_scale apply_router_weight_on_input"


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has warned of nothing."""
    monkeypatch.setattr(performance, "_given", set())


@pytest.fixture
def as_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets calls plan as on a GPU of an architecture, and launch nothing."""

    class NoPlan:
        def __init__(self, *_: Any) -> None: ...
        def run(self, *_: Any) -> None: ...

    record = op.Op.record

    def arrange(arch: str) -> None:
        def on_arch(self: op.Op, form: Any, values: Any) -> Any:
            return record(self, form, values, gpu.of_arch(arch))

        monkeypatch.setattr(op, "Plan", NoPlan)
        monkeypatch.setattr(op.Op, "_keep", lambda *arguments: None)
        monkeypatch.setattr(op.Op, "record", on_arch)

    yield arrange
    op.forget_plans()


def texts_of(key: str, changes: dict[str, Any] | None = None) -> list[warnings.WarningMessage]:
    """The warnings of two calls alike."""
    call = CALLS[key]
    op.forget_plans()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call.function(*call.args, **{**call.options, **(changes or {})})
    return caught


@pytest.mark.parametrize("key", [*UNPREPARED, LAYER])
def test_weights_of_4_bits_that_are_not_prepared_are_warned_of_once(key: str, as_on: Any) -> None:
    as_on("90a")
    (found,) = texts_of(key)
    assert found.category is cukern.PerformanceWarning and issubclass(found.category, UserWarning)
    assert str(found.message) == PREPARE and "cukern.prepare_weights(weights, scales)" in PREPARE
    assert found.filename == __file__  # the caller's line, not one of the library
    assert texts_of(UNPREPARED[0]) == []  # another function, the same step


def test_a_warning_that_is_an_error_stops_one_call(as_on: Any) -> None:
    as_on("90a")
    call = CALLS[UNPREPARED[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(cukern.PerformanceWarning, match="prepare_weights"):
            call.function(*call.args, **call.options)
        call.function(*call.args, **call.options)


def test_what_no_step_makes_faster_is_not_warned_of(as_on: Any) -> None:
    as_on("90a")
    assert texts_of(UNPREPARED[0], {"variant": "mma"}) == []  # asked for
    for key in CALLS:
        if key.startswith(("moe_gemm", "fused_experts")) and key not in (*UNPREPARED, LAYER):
            assert texts_of(key) == []
    as_on("80")
    assert texts_of(UNPREPARED[0]) == []  # whose kernels take no others


@pytest.mark.parametrize("arch", [None, "90a"])
def test_an_explanation_warns_of_nothing(arch: str | None) -> None:
    for key in (*UNPREPARED, LAYER):
        call = CALLS[key]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cukern.explain(call.function, *call.args, **call.options, arch=arch)


@pytest.mark.gpu
def test_a_call_on_hopper_warns_once() -> None:
    if arch_of_device(0) != "90a":
        pytest.skip("prepared weights are for sm_90a")
    a = on_gpu(np.zeros((4, 128), np.float16))
    b, b_scale = on_gpu(np.zeros((2, 32, 64), np.uint8)), on_gpu(np.full((2, 32, 4), 120, np.uint8))
    offsets = on_gpu(np.array([0, 1, 4], np.int32))
    op.forget_plans()  # another test may have made the plan
    with pytest.warns(cukern.PerformanceWarning, match="prepare_weights"):
        cukern.moe_gemm(a, b, offsets, b_scale=b_scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cukern.moe_gemm(a[:3], b, offsets, b_scale=b_scale)
