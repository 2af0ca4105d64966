"""The benchmarks: what is measured, and what is kept of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from rich.console import Console

import cukern
from benchmarks import (
    bench_all_to_all,
    bench_decoding,
    bench_fused_moe,
    bench_kv_cache,
    bench_mla_decode,
    bench_moe_activation,
    bench_moe_gate,
    bench_moe_gemm,
    bench_moe_permute,
    bench_norm,
    bench_paged_attention,
    bench_quantization,
    bench_sampling,
    harness,
    plots,
    publish,
    report,
    several,
    start_up,
)
from benchmarks.harness import Baseline, Case, Ceilings
from cukern.__main__ import main
from cukern.commands import bench
from cukern.runtime import kernel

ROOT = Path(__file__).resolve().parents[1]
MACHINE = {"gpu": "NVIDIA H200", "driver": "600.1", "cuda": "13.0", "versions": {"cukern": "0.1.0", "torch": "2.11"}}
CEILINGS = Ceilings(kernel_us=1.0, copy_tb_s=4.0, matmul_tflop_s=None)
CASES = bench_moe_gate.cases()


# --- the harness --------------------------------------------------------------------------------------


class Clock:
    """Stands in for the GPU's: a call takes as long as its `us` says, or 8."""

    device = "cpu"
    l2_bytes = 1000

    def __init__(self, replays: int = 1) -> None:
        self.replays = replays

    def gpu_us(self, call: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
        for inputs in sets:
            call(*inputs)
        return getattr(call, "us", 8.0)

    def host_us(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        call(*arguments)
        return 5.0

    def wall_us(self, call: Callable[..., Any], arguments: tuple[Any, ...], once: bool = False) -> float:
        call(*arguments)
        return 70.0

    def ceilings(self, matrix: bool) -> Ceilings:
        return CEILINGS


def _case(**changes: Any) -> Case:
    """Doubling 16 numbers."""
    case = Case(
        op="double",
        case={"tokens": 16, "dtype": "float32"},
        variant="auto",
        inputs=lambda generator: (torch.rand(16, generator=generator),),
        call=lambda x: x * 2,
        bytes=128,
        agree=torch.equal,
    )
    return replace(case, **changes)


def _takes(us: float, function: Callable[..., Any]) -> Baseline:
    function.us = us
    return Baseline(lambda: function)


def test_a_row_has_the_fields_of_the_format() -> None:
    baselines = {"sum": _takes(24.0, lambda x: x + x)}
    measured = harness.measure(_case(baselines=baselines, host=True), Clock(), CEILINGS)
    assert measured.problems == []
    assert measured.row == {
        "op": "double",
        "case": {"tokens": 16, "dtype": "float32"},
        "variant": "auto",
        "us": 8.0,
        "floor_us": 1.0,
        "baselines": {"sum": 24.0},
        "host_us": 5.0,
    }
    assert harness.measure(_case(), Clock(), CEILINGS).row["host_us"] is None


def test_a_baseline_that_is_not_installed_is_absent_and_one_that_fails_is_reported() -> None:
    def missing() -> Callable[..., Any]:
        import no_such_library

        return no_such_library.double

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image\nis available")

    def unloadable() -> Callable[..., Any]:
        raise OSError("libfoo.so: undefined symbol")

    baselines = {
        "missing": Baseline(missing),
        "broken": Baseline(lambda: broken),
        "unloadable": Baseline(unloadable),
        "wrong": _takes(0.1, lambda x: x * 3),
        "right": _takes(9.0, lambda x: x + x),
    }
    measured = harness.measure(_case(baselines=baselines), Clock(), CEILINGS)
    assert measured.row["baselines"] == {"right": 9.0}
    broken_line, unloadable_line, wrong_line = measured.problems
    assert broken_line.endswith("broken failed: RuntimeError: no kernel image")
    assert unloadable_line.endswith("unloadable failed: OSError: libfoo.so: undefined symbol")
    assert "wrong disagrees" in wrong_line


def test_a_baseline_that_leaves_the_results_alone_disagrees() -> None:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(16, generator=generator), torch.zeros(16)

    case = _case(
        inputs=inputs,
        call=lambda x, out: torch.mul(x, 2, out=out),
        baselines={"idle": Baseline(lambda: lambda x, out: out)},
    )
    measured = harness.measure(case, Clock(), CEILINGS)
    assert measured.row["baselines"] == {}
    assert "idle disagrees" in measured.problems[0]


def test_what_is_made_ahead_is_not_timed() -> None:
    prepared: list[int] = []

    def prepare(x: torch.Tensor) -> Callable[[], torch.Tensor]:
        prepared.append(x.data_ptr())
        return lambda: x + x

    class Inspecting(Clock):
        def gpu_us(self, call: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
            before = len(prepared)
            # The bytes of the inputs count for how often a graph goes over them.
            assert harness.nbytes(sets) == 64 * len(sets)
            us = super().gpu_us(call, sets)
            assert len(prepared) == before
            return us

    case = _case(peers={"planned": Baseline(lambda: prepare, prepared=True)})
    measured = harness.measure(case, Inspecting(), CEILINGS)
    assert measured.problems == [] and measured.row["baselines"] == {"planned": 8.0}
    assert len(set(prepared)) == len(prepared) > 2


def test_what_no_graph_holds_is_timed_by_the_wall_clock() -> None:
    made: list[int] = []

    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        made.append(generator.initial_seed())
        return (torch.rand(16, generator=generator),)

    baselines = {
        "captured": Baseline(lambda: lambda x: x + x),
        "asking": Baseline(lambda: lambda x: x + x, eager=True),
        "prepared": Baseline(lambda: lambda x: lambda: x + x, prepared=True, eager=True),
        "wrong": Baseline(lambda: lambda x: x * 3, eager=True),
    }
    measured = harness.measure(_case(baselines=baselines), Clock(), CEILINGS)
    assert measured.row["us"] == 8.0
    assert measured.row["baselines"] == {"captured": 8.0, "asking": 70.0, "prepared": 70.0}
    assert ["wrong disagrees" in line for line in measured.problems] == [True]
    measured = harness.measure(_case(inputs=inputs, eager=True, baselines=baselines), Clock(), CEILINGS)
    assert measured.row["us"] == 70.0 and set(measured.row["baselines"].values()) == {70.0}
    # A call that is waited for finds nothing of another in L2, so that one set of inputs will do.
    assert set(made) == {0}


def test_the_wall_clock_leaves_out_the_first_calls_and_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], iter([100.0, 100.0, 0.2, 0.4, 0.3, 0.2, 0.1])
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])
    # The result is there only when the GPU has finished.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.__setitem__(0, now[0] + pending.pop()))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    timer = object.__new__(harness.Timer)
    timer.replays, pending = 11, [0.0]

    def call() -> None:
        pending[:] = [0.0, next(taken)]

    assert timer.wall_us(call, ()) == pytest.approx(0.25e6)
    assert [*taken] == [0.1]
    taken = iter([9.0, 8.0, 7.0])
    assert timer.wall_us(call, (), once=True) == pytest.approx(9e6)
    assert [*taken] == [8.0, 7.0]


def test_a_baseline_ends_at_its_limit_and_at_that_of_the_run() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with contextlib.suppress(TimeoutError):  # as a compiler may
                time.sleep(30)
        time.sleep(30)
        return x + x

    baselines = {
        "slow": Baseline(lambda: slow, eager=True, limit_s=0.05),
        "quick": Baseline(lambda: lambda x: x + x, eager=True, limit_s=30.0),
    }
    with patch.object(harness, "_INSIST_S", 0.05):
        measured = harness.measure(_case(baselines=baselines), Clock(), CEILINGS)
    assert measured.row["baselines"] == {"quick": 70.0}
    assert len(measured.problems) == 1 and "slow failed: TimeoutError: not done in 0 s" in measured.problems[0]
    measured = harness.measure(_case(baselines=baselines), Clock(), CEILINGS, until=time.monotonic() - 1)
    assert measured.row["us"] == 8.0 and measured.row["baselines"] == {}
    assert ["the run's time was over" in line for line in measured.problems] == [True, True]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_baseline_may_be_absent_at_its_first_call_and_agree_in_its_own_way() -> None:
    def absent(x: torch.Tensor) -> torch.Tensor:
        raise ImportError("a part that is compiled at the first call")

    peers = {
        "absent": Baseline(lambda: absent),
        "rounded": Baseline(lambda: lambda x: x * 2.000001, agree=torch.allclose),
        "wrong": Baseline(lambda: lambda x: x * 3, agree=torch.allclose),
    }
    measured = harness.measure(_case(peers=peers), Clock(), CEILINGS)
    assert list(measured.row["baselines"]) == ["rounded"]
    assert ["wrong disagrees" in line for line in measured.problems] == [True]


def test_where_several_results_are_right_each_must_be_one() -> None:
    def right(inputs: tuple[Any, ...], result: torch.Tensor) -> bool:
        return bool((result.abs() == 2 * inputs[0]).all())

    peers = {"negative": Baseline(lambda: lambda x: -2 * x), "wrong": Baseline(lambda: lambda x: 3 * x)}
    measured = harness.measure(_case(peers=peers, agree=None, right=right), Clock(), CEILINGS)
    assert list(measured.row["baselines"]) == ["negative"]
    # A wrong result of the op itself is not passed off as another right one.
    measured = harness.measure(_case(call=lambda x: x, peers=peers, agree=None, right=right), Clock(), CEILINGS)
    assert measured.row["baselines"] == {} and len(measured.problems) == 2


def test_baselines_can_be_left_out() -> None:
    quick, compiled = _takes(9.0, lambda x: x + x), Baseline(_takes(7.0, lambda x: 2 * x).load, slow=True)
    case = _case(baselines={"quick": quick, "compiled": compiled})
    assert harness.measure(case, Clock(), CEILINGS).row["baselines"] == {"quick": 9.0, "compiled": 7.0}
    assert harness.measure(case, Clock(), CEILINGS, slow=False).row["baselines"] == {"quick": 9.0}
    assert harness.measure(case, Clock(), CEILINGS, baselines=False).row["baselines"] == {}


def test_the_op_failing_is_an_error() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        harness.measure(_case(call=broken), Clock(), CEILINGS)


@pytest.mark.parametrize(
    ("l2_bytes", "count"),
    [(0, 2), (64, 3), (6400, 256), (10**9, 256)],
    ids=["at least two", "three times L2", "the most", "no more"],
)
def test_inputs_rotate_over_more_than_the_cache(l2_bytes: int, count: int) -> None:
    sets = harness.input_sets(_case(), l2_bytes, "cpu")
    assert len(sets) == count
    assert not torch.equal(sets[0][0], sets[1][0])
    assert harness.nbytes(sets) == 64 * count
    assert torch.equal(sets[1][0], harness.inputs(_case(), 1, "cpu")[0])


def test_the_floor_is_the_longest_of_three() -> None:
    ceilings = Ceilings(kernel_us=1.0, copy_tb_s=4.0, matmul_tflop_s=500.0)
    assert ceilings.floor_us(_case(bytes=100, flops=100)) == 1.0
    assert ceilings.floor_us(_case(bytes=40_000_000, flops=100)) == pytest.approx(10.0)
    assert ceilings.floor_us(_case(bytes=40_000_000, flops=10**10)) == pytest.approx(20.0)
    assert CEILINGS.floor_us(_case(bytes=100, flops=0)) == 1.0


# --- the cases of the gate ------------------------------------------------------------------------------


def test_the_cases_of_the_gate_are_distinct_and_public() -> None:
    rows = [(case.op, json.dumps(case.case), case.variant) for case in CASES]
    assert len(set(rows)) == len(rows)
    assert {case.op for case in CASES} <= set(cukern.__all__)


def test_the_cases_of_the_gate_cover_the_models() -> None:
    measured = {
        (c.op, c.case["experts"], c.case.get("groups"), c.case["dtype"], c.case["tokens"], c.variant) for c in CASES
    }
    for variant in ("specialized", "dynamic"):
        for tokens in (1, 64, 1024, 8192, 65536):
            for experts, groups, dtype in (
                (256, 8, "float32"), (256, 8, "bfloat16"), (256, 1, "float32"), (384, 1, "float32")
            ):  # fmt: skip
                assert ("moe_fused_gate", experts, groups, dtype, tokens, variant) in measured
        for tokens in (1, 1024, 65536):
            for experts in (128, 8):
                assert ("topk_softmax", experts, None, "bfloat16", tokens, variant) in measured


def _by_twin(case: Case, inputs: tuple[Any, ...]) -> Any:
    """The result of a case's op on tensors in host memory."""
    if case.op != "moe_fused_gate":
        logits, weights, ids = inputs
        return getattr(cukern, case.op)(weights, ids, logits)
    sizes = (case.case[name] for name in ("groups", "topk_group", "topk"))
    return cukern.moe_fused_gate(*inputs, *sizes)


def _small(case: Case) -> bool:
    return case.case["tokens"] in (64, 1024) and "call" not in case.case


@pytest.mark.parametrize("case", [c for c in CASES if _small(c)], ids=str)
def test_the_bytes_are_those_of_the_arrays(case: Case) -> None:
    inputs = harness.inputs(case, 0, "cpu")
    results = _by_twin(case, inputs)
    arrays = {tensor.data_ptr(): tensor for tensor in (*inputs, *results)}
    assert case.bytes == sum(tensor.nbytes for tensor in arrays.values())


@pytest.mark.parametrize("case", [c for c in CASES if _small(c) and c.baselines], ids=str)
def test_the_composition_in_torch_agrees_with_the_twin(case: Case) -> None:
    assert case.agree is not None
    ours = _by_twin(case, harness.inputs(case, 0, "cpu"))
    inputs = harness.inputs(case, 0, "cpu")
    theirs = case.baselines["torch"].load()(*inputs)
    assert case.agree(ours, theirs)
    assert ours[1].dtype == theirs[1].dtype
    other = case.baselines["torch"].load()(*harness.inputs(case, 1, "cpu"))
    assert not case.agree(ours, other)


def test_agreement_ignores_the_order_of_experts_and_minds_their_weights() -> None:
    weights, ids = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[7, 1, 4]], dtype=torch.int32)
    turned = [2, 0, 1]
    assert bench_moe_gate.agree((weights, ids), (weights[:, turned], ids[:, turned]))
    assert not bench_moe_gate.agree((weights, ids), (weights[:, turned], ids))
    assert not bench_moe_gate.agree((weights, ids), (weights, ids + 1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in CASES if _small(c) and c.baselines], ids=str)
def test_installed_baselines_agree_with_the_twin(case: Case) -> None:
    assert case.agree is not None
    ours = _by_twin(case, tuple(tensor.cpu() for tensor in harness.inputs(case, 0, "cuda")))
    compared = []
    for name, baseline in (case.baselines | case.peers).items():
        if baseline.slow:
            continue
        try:
            function = baseline.load()
        except ImportError:
            continue
        weights, ids = function(*harness.inputs(case, 0, "cuda"))
        assert case.agree(ours, (weights.cpu(), ids.cpu())), name
        compared.append(name)
    assert "torch" in compared


@pytest.mark.gpu
@pytest.mark.large(4)
def test_the_timer_measures_what_runs() -> None:
    timer = harness.Timer(replays=3)
    ceilings = timer.ceilings(matrix=True)
    assert 0.2 < ceilings.kernel_us < 20
    assert ceilings.matmul_tflop_s is not None and ceilings.matmul_tflop_s > 1

    def copies(mebibytes: int) -> float:
        sets = [tuple(torch.randn(2, mebibytes << 18, device="cuda")) for _ in range(3)]
        return timer.gpu_us(lambda to, source: torch.neg(source, out=to), sets)

    # Twice the bytes take about twice as long, at about the bandwidth that the ceiling has.
    small, large = copies(256), copies(512)
    assert 1.7 < large / small < 2.3
    assert 2 * 512 * 2**20 / large / 1e6 == pytest.approx(ceilings.copy_tb_s, rel=0.2)


@pytest.mark.gpu
def test_the_wall_clock_waits_for_the_gpu() -> None:
    # 20 million cycles take any GPU more than 5 ms.
    assert harness.Timer(replays=3).wall_us(torch.cuda._sleep, (20_000_000,)) > 5000


@pytest.mark.gpu
@pytest.mark.large(3)
@pytest.mark.parametrize("case", [c for c in CASES if c.host], ids=str)
def test_each_way_to_call_the_op_is_captured_and_timed(case: Case) -> None:
    timer = harness.Timer(replays=3)
    ceilings = timer.ceilings(matrix=False)
    measured = harness.measure(case, timer, ceilings, baselines=False)
    # A call that went to another stream would be missing from the graph.
    assert measured.row["us"] > ceilings.kernel_us / 2
    assert 1 < measured.row["host_us"] < 1000


# --- several GPUs ---------------------------------------------------------------------------------------

PEERS = several.Ceilings(kernel_us=1.0, copy_tb_s=4.0, matmul_tflop_s=None, peer_tb_s=0.4, exchange_us=2.5)


class HostClock(several.Clock):
    """Ranks in host memory: all calls are made, and take as long as it says, or 8 us."""

    l2_bytes = 1000
    us = 8.0

    def __init__(self, replays: int = 1, gpus: int = 2) -> None:
        self.ranks = range(gpus)
        self.one_gpu = Clock()
        self.made: list[str] = []

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[Any]:
        yield None

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def gpu_us(self, call: Callable[..., Any], calls: int, before: Callable[..., Any] | None = None) -> float:
        for function in (call, before):
            if function is not None:
                self.warm_up(function)
                self.made.append(function.__name__)
        return self.us

    def host_us(self, call: Callable[..., Any]) -> float:
        self.warm_up(call)
        return 5.0

    def ceilings(self, matrix: bool = False) -> several.Ceilings:
        return PEERS


def _exchange(op: str, variant: str = "auto", dtype: str = "bfloat16", **changes: Any) -> several.Case:
    sizes = bench_all_to_all.Sizes(2, 3, hidden=256, topk=4, experts=16)
    return replace(bench_all_to_all._case(sizes, op, variant, dtype), baselines={}, **changes)


@pytest.mark.parametrize(
    "case",
    [
        _exchange("all_to_all_dispatch"),
        _exchange("all_to_all_dispatch", dtype="float8_e4m3fn"),
        _exchange("all_to_all_combine", "by slot"),
        _exchange("all_to_all_combine", "summed"),
    ],
    ids=str,
)
def test_a_case_of_several_gpus_gives_a_row(case: several.Case) -> None:
    clock = HostClock()
    measured = several.measure(case, clock, PEERS)
    assert measured.problems == []
    assert measured.row == {
        "op": case.op,
        "case": {"ranks": 2, "tokens": 3, "hidden": 256, "topk": 4, "experts": 16, "dtype": case.case["dtype"]},
        "variant": case.variant,
        "us": 8.0,
        "floor_us": 1.0,
        "baselines": {"minimal exchange": 2.5},
        "host_us": None,
    }
    # The time of a combine is that of both less that of the dispatch.
    assert clock.made == (["call"] if case.op == "all_to_all_dispatch" else ["call", "before"])
    assert several.measure(replace(case, host=True), HostClock(), PEERS).row["host_us"] == 5.0


def test_a_layer_over_ranks_gives_a_row() -> None:
    sizes = bench_fused_moe.Sizes(experts=8, inter=128, hidden=256, topk=2)
    case = bench_fused_moe._over_two(sizes, 3)
    row = several.measure(case, HostClock(), PEERS).row
    assert row["case"] == {"ranks": 2, "tokens": 3, **sizes._asdict(), "dtype": "float8_e4m3fn"}
    assert row["baselines"] == {"same rows on one GPU": 8.0} and row["floor_us"] == 9.0

    clock = HostClock()
    calls = case.begin(clock)
    found: dict[int, torch.Tensor] = {}
    clock.warm_up(lambda rank, number: found.setdefault(rank, calls.call(rank, number)), 1)
    # The part of rank 0 of the tokens of both.
    own = calls.alone(0)
    assert own.shape == (6, sizes.hidden) and own.isfinite().all()
    assert all(out.shape == (3, sizes.hidden) and out.isfinite().all() and out.any() for out in found.values())
    calls.check()
    calls.close()
    assert {case.gpus for case in bench_fused_moe.cases()} == {1, 2}


def test_an_exchange_that_fails_gives_no_row() -> None:
    def begin(clock: several.Clock) -> several.Calls:
        calls = _exchange("all_to_all_dispatch").begin(clock)

        def call(rank: int, number: int) -> Any:
            if rank == 1:
                raise RuntimeError("no kernel image")

        return calls._replace(call=call, close=lambda: closed.append(True))

    closed: list[bool] = []
    with pytest.raises(RuntimeError, match="no kernel image"):
        several.measure(_exchange("all_to_all_dispatch", begin=begin), HostClock(), PEERS)
    assert closed == [True]


def test_baselines_of_other_processes_are_rows_or_problems() -> None:
    def missing(case: several.Case) -> float:
        raise ImportError("no NCCL")

    def broken(case: several.Case) -> float:
        raise RuntimeError("process 1 ended with status 1: Traceback\nNCCL error")

    given = {"missing": missing, "broken": broken, "NCCL": lambda case: float(case.sent_bytes)}
    case = replace(_exchange("all_to_all_dispatch"), baselines=given)
    measured = several.measure(case, HostClock(), PEERS)
    assert measured.row["baselines"] == {"minimal exchange": 2.5, "NCCL": float(case.sent_bytes)}
    assert [line.endswith("broken failed: RuntimeError: NCCL error") for line in measured.problems] == [True]
    assert "NCCL" not in several.measure(case, HostClock(), PEERS, baselines=False).row["baselines"]
    assert "NCCL" not in several.measure(case, HostClock(), PEERS, slow=False).row["baselines"]
    # Of the rest, only NCCL is another library.
    assert report.peers_of(measured.row) == {"NCCL": float(case.sent_bytes)}


def test_the_floor_of_an_exchange_is_its_bytes_by_the_bandwidth_of_stores() -> None:
    assert PEERS.exchange_floor_us(100) == 1.0
    assert PEERS.exchange_floor_us(40_000_000) == pytest.approx(100.0)
    case = _exchange("all_to_all_dispatch", sent_bytes=4_000_000)
    assert several.measure(case, HostClock(), PEERS).row["floor_us"] == pytest.approx(10.0)

    def begin(clock: several.Clock) -> several.Calls:
        return _exchange("all_to_all_dispatch").begin(clock)._replace(alone=lambda number: None)

    # Of a layer, what its rows take on one GPU counts as well.
    measured = several.measure(replace(case, begin=begin), HostClock(), PEERS)
    assert measured.row["floor_us"] == pytest.approx(18.0)
    assert measured.row["baselines"] == {"same rows on one GPU": 8.0}


def test_the_bytes_that_a_rank_sends_are_those_of_its_tokens() -> None:
    sizes = bench_all_to_all.Sizes(4, 2000, topk=3, experts=16, hidden=256)
    tokens = bench_all_to_all.random_tokens(sizes, torch.device("cpu"), 0)
    assert len({*tokens.topk_ids[0].tolist()}) == sizes.topk
    ranks = tokens.topk_ids // (sizes.experts // sizes.ranks)
    rows = sum(int((ranks == rank).any(dim=1).sum()) for rank in (1, 2, 3))
    routing = 3 * sizes.tokens * sizes.topk * 8
    for dtype, row in (("bfloat16", 512), ("float8_e4m3fn", 256 + 8)):
        assert bench_all_to_all.dispatched_bytes(sizes, dtype) == pytest.approx(rows * row + routing, rel=0.03)
    assert bench_all_to_all.combined_bytes(sizes) == pytest.approx(rows * 512, rel=0.03)


def test_the_cases_of_the_exchange_are_distinct_and_public() -> None:
    cases = bench_all_to_all.cases()
    rows = [(case.op, json.dumps(case.case), case.variant) for case in cases]
    assert len(set(rows)) == len(rows)
    assert {case.op for case in cases} == {"all_to_all_dispatch", "all_to_all_combine"}
    # Buffers alternate, so that a graph must have an even number of calls.
    assert all(case.gpus == 2 and case.calls % 2 == 0 for case in cases)
    # NCCL is asked for all sizes at once.
    assert {case.sent_bytes for case in cases} == {*bench_all_to_all._sent_sizes()}


def test_processes_that_fail_are_ended_and_say_why() -> None:
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ImportError, match="nccl is not in this build"):
            several.of_processes("nccl", 1, (1024,))
    with pytest.raises(RuntimeError, match=r"process \d ended with status 1: [\s\S]*ValueError") as first:
        several.of_processes("nccl", 1, ("many",))
    # Each case asks, and none starts them again.
    with pytest.raises(RuntimeError) as second:
        several.of_processes("nccl", 1, ("many",))
    assert second.value is first.value


@pytest.mark.gpu
def test_the_clock_of_several_gpus_measures_what_runs() -> None:
    if kernel.device_count() < 2:
        pytest.skip("needs a second GPU")
    clock = several.Clock(3, 2)
    ceilings = clock.ceilings()
    assert ceilings.exchange_us > ceilings.kernel_us
    assert 0.005 < ceilings.peer_tb_s < ceilings.copy_tb_s
    row = several.measure(_exchange("all_to_all_combine", "by slot"), clock, ceilings).row
    # A call that went to another stream would be missing from the graph.
    assert ceilings.kernel_us / 2 < row["us"] < 1000


# --- other libraries ------------------------------------------------------------------------------------
#
# Functions with the signatures of the public ones that compute by torch or by the twins: an adapter that gives them
# other arguments disagrees with the op, or is refused.


def _e2m1(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What MXFP4 weights [n, k / 2] with scales [n, k / 32] stand for."""
    return cukern.dequantize_mxfp4(numbers.contiguous(), scales.contiguous(), dtype="float32")


def _rows_by_expert(sorted_ids: torch.Tensor | None, experts: torch.Tensor, block: int, pairs: int) -> torch.Tensor:
    """The expert of each pair, from the sorted ids in blocks."""
    if sorted_ids is None:
        return experts[:pairs].long()
    found = torch.full((pairs,), -1)
    for i, expert in enumerate(experts.tolist()):
        mine = sorted_ids[i * block : (i + 1) * block].long()
        found[mine[mine < pairs]] = expert
    return found


def _grouped(
    a: torch.Tensor, weights: Sequence[torch.Tensor], expert_of: torch.Tensor, topk: int, weigh: torch.Tensor | None
) -> torch.Tensor:
    rows = torch.stack([weights[e].float() @ a[i // topk].float() for i, e in enumerate(expert_of.tolist())])
    return rows if weigh is None else rows * weigh.reshape(-1, 1)


def _moe_c() -> dict[str, Any]:
    def grouped_topk(
        scores: Any, num_expert_group: int, topk_group: int, topk: int, renormalize: bool, routed_scaling_factor: float,
        bias: Any, scoring_func: int = 0,
    ) -> Any:  # fmt: skip
        assert renormalize and routed_scaling_factor == 1.0 and scoring_func == 1
        return bench_moe_gate.eager(scores, bias, num_expert_group, topk_group, topk)

    def routes(gate: Callable[..., Any]) -> Callable[..., None]:
        def topk(
            topk_weights: Any, topk_ids: Any, token_expert_indices: Any, gating_output: Any, renormalize: bool = False,
            e_score_correction_bias: Any = None,
        ) -> None:  # fmt: skip
            assert not renormalize and e_score_correction_bias is None and token_expert_indices.shape == topk_ids.shape
            for out, found in zip((topk_weights, topk_ids), gate(gating_output, topk_ids.shape[1]), strict=True):
                out.copy_(found)

        return topk

    def moe_sum(input: Any, output: Any, topk_ids: Any = None, expert_map: Any = None) -> None:
        output.copy_(input.float().sum(1))

    def cutlass_moe_mm(
        out_tensors: Any, a_tensors: Any, b_tensors: Any, a_scales: Any, b_scales: Any, expert_offsets: Any,
        problem_sizes: Any, a_strides: Any, b_strides: Any, c_strides: Any, per_act_token: bool, per_out_ch: bool,
    ) -> None:  # fmt: skip
        assert per_act_token and per_out_ch and expert_offsets.dtype == torch.int64
        for e, (first, (m, n, k)) in enumerate(zip(expert_offsets.tolist(), problem_sizes.tolist(), strict=True)):
            assert (a_strides[e], b_strides[e], c_strides[e]) == (k, k, n)
            product = a_tensors[first : first + m].float() @ b_tensors[e].float().T
            out_tensors[first : first + m] = product * a_scales[first : first + m] * b_scales[e].T

    def gptq_marlin_repack(
        b_q_weight: Any, perm: Any, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
    ) -> Any:
        assert b_q_weight.shape == (size_k // 8, size_n) and num_bits == 4 and perm.numel() == 0
        return b_q_weight

    def moe_wna16_marlin_gemm(
        input: Any, output: Any, b_qweight: Any, b_bias: Any, b_scales: Any, a_scales: Any, global_scale: Any,
        b_qzeros: Any, g_idx: Any, perm: Any, workspace: Any, sorted_token_ids: Any, expert_ids: Any,
        num_tokens_past_padded: Any, topk_weights: Any, moe_block_size: int, top_k: int, mul_topk_weights: bool,
        b_q_type: Any, size_m: int, size_n: int, size_k: int, is_k_full: bool, use_atomic_add: bool,
        use_fp32_reduce: bool, is_zp_float: bool, thread_k: int = -1, thread_n: int = -1, blocks_per_sm: int = -1,
    ) -> Any:  # fmt: skip
        assert {b_bias, a_scales, global_scale, b_qzeros, g_idx, perm} == {None} and b_q_type == "float4_e2m1f"
        assert input.shape == (size_m, size_k) and output.shape == (size_m * top_k, size_n)
        weights = [
            _e2m1(w.T.contiguous().view(torch.uint8), s.T.to(torch.float8_e8m0fnu).view(torch.uint8))
            for w, s in zip(b_qweight, b_scales.float(), strict=True)
        ]
        expert_of = _rows_by_expert(sorted_token_ids, expert_ids, moe_block_size, size_m * top_k)
        weigh = topk_weights if mul_topk_weights else None
        return output.copy_(_grouped(input, weights, expert_of, top_k, weigh))

    return {
        "grouped_topk": grouped_topk,
        "topk_softmax": routes(bench_moe_gate.eager_softmax),
        "topk_sigmoid": routes(bench_moe_gate.eager_sigmoid),
        "moe_sum": moe_sum,
        "cutlass_moe_mm": cutlass_moe_mm,
        "gptq_marlin_repack": gptq_marlin_repack,
        "moe_wna16_marlin_gemm": moe_wna16_marlin_gemm,
    }


def _c() -> dict[str, Any]:
    def scaled_fp8_quant(
        input: Any, scale: Any = None, num_token_padding: Any = None, scale_ub: Any = None,
        use_per_token_if_dynamic: bool = False, output: Any = None, group_shape: Any = None,
    ) -> Any:  # fmt: skip
        return cukern.scaled_fp8_quant(input, scale, use_per_token_if_dynamic=use_per_token_if_dynamic)

    def scaled_int8_quant(input: Any, scale: Any = None, azp: Any = None, symmetric: bool = True) -> Any:
        return cukern.scaled_int8_quant(input, scale)

    def silu_and_mul_per_block_quant(
        input: Any, group_size: int, quant_dtype: Any, scale_ub: Any = None, is_scale_transposed: bool = False
    ) -> Any:
        assert quant_dtype == torch.float8_e4m3fn
        return cukern.per_token_group_quant_fp8(bench_moe_activation.by_torch("silu")(input), group_size)

    def rms_norm(out: Any, input: Any, weight: Any, epsilon: float) -> None:
        out.copy_(torch.nn.functional.rms_norm(input, weight.shape, weight, epsilon))

    def fused_add_rms_norm(input: Any, residual: Any, weight: Any, epsilon: float) -> None:
        residual.add_(input)
        rms_norm(input, residual, weight, epsilon)

    def rms_norm_dynamic_per_token_quant(
        input: Any, weight: Any, epsilon: float, quant_dtype: Any, scale_ub: Any = None, residual: Any = None
    ) -> Any:
        assert quant_dtype == torch.float8_e4m3fn
        y = torch.nn.functional.rms_norm(input, weight.shape, weight, epsilon)
        return cukern.scaled_fp8_quant(y, use_per_token_if_dynamic=True)

    def rms_norm_per_block_quant(
        input: Any, weight: Any, epsilon: float, quant_dtype: Any, group_size: Any, scale_ub: Any = None,
        residual: Any = None, is_scale_transposed: bool = False, tma_alignment: int = 0,
    ) -> Any:  # fmt: skip
        assert quant_dtype == torch.float8_e4m3fn and group_size[0] == 1
        if residual is not None:
            input = residual.add_(input)
        y = torch.nn.functional.rms_norm(input, weight.shape, weight, epsilon)
        return cukern.per_token_group_quant_fp8(y, group_size[1])

    def reshape(function: Callable[..., Any]) -> Callable[..., None]:
        def store(
            key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, kv_cache_dtype: str,
            k_scale: Any, v_scale: Any,
        ) -> None:  # fmt: skip
            function(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)

        return store

    def concat_and_cache_mla(
        kv_c: Any, k_pe: Any, kv_cache: Any, slot_mapping: Any, kv_cache_dtype: str, scale: Any
    ) -> None:
        scale = None if kv_cache_dtype == "fp8_ds_mla" else scale
        cukern.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)

    def swap_blocks(src: Any, dst: Any, block_size_in_bytes: int, block_mapping: Any) -> None:
        assert not block_mapping.is_cuda and src.nbytes % block_size_in_bytes == 0
        dst[block_mapping[:, 1]] = src[block_mapping[:, 0]]

    def cp_gather_cache(
        src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, batch_size: int, seq_starts: Any = None
    ) -> None:
        cukern.gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size)

    def gather_and_maybe_dequant_cache(
        src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, token_to_seq: Any, num_tokens: int,
        kv_cache_dtype: str, scale: Any, seq_starts: Any = None,
    ) -> None:  # fmt: skip
        assert len(dst) == num_tokens == len(token_to_seq) and token_to_seq.dtype == torch.int32
        assert torch.equal(torch.bincount(token_to_seq), cu_seq_lens.diff())
        src = src_cache.view(torch.float8_e4m3fn)
        cukern.gather_cache(src, dst, block_table, cu_seq_lens, len(block_table), scale=scale)

    def cp_gather_and_upconvert_fp8_kv_cache(
        src_cache: Any, dst: Any, block_table: Any, workspace_starts: Any, batch_size: int, seq_starts: Any = None
    ) -> None:
        assert len(workspace_starts) == batch_size
        lengths = torch.cat([workspace_starts, torch.tensor([len(dst)], dtype=torch.int32)])
        cukern.gather_cache(src_cache, dst, block_table, lengths, batch_size, kv_cache_dtype="fp8_ds_mla")

    def merge_attn_states(
        output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, output_lse: Any = None,
        prefill_tokens_with_context: Any = None, output_scale: Any = None,
    ) -> None:  # fmt: skip
        lses = prefix_lse.T.contiguous(), suffix_lse.T.contiguous()
        merged, lse = cukern.merge_attention_states(prefix_output, lses[0], suffix_output, lses[1])
        output.copy_(merged)
        output_lse.copy_(lse.T)

    def apply_repetition_penalties(logits: Any, prompt_mask: Any, output_mask: Any, repetition_penalties: Any) -> None:
        factor = torch.where(prompt_mask | output_mask, repetition_penalties[:, None], 1.0)
        logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))

    return {
        "scaled_fp8_quant": scaled_fp8_quant,
        "scaled_int8_quant": scaled_int8_quant,
        "silu_and_mul_per_block_quant": silu_and_mul_per_block_quant,
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "rms_norm_dynamic_per_token_quant": rms_norm_dynamic_per_token_quant,
        "rms_norm_per_block_quant": rms_norm_per_block_quant,
        "reshape_and_cache": reshape(cukern.reshape_and_cache),
        "reshape_and_cache_flash": reshape(cukern.reshape_and_cache_flash),
        "concat_and_cache_mla": concat_and_cache_mla,
        "swap_blocks": swap_blocks,
        "cp_gather_cache": cp_gather_cache,
        "gather_and_maybe_dequant_cache": gather_and_maybe_dequant_cache,
        "cp_gather_and_upconvert_fp8_kv_cache": cp_gather_and_upconvert_fp8_kv_cache,
        "merge_attn_states": merge_attn_states,
        "apply_repetition_penalties": apply_repetition_penalties,
    }


def _vllm_moe() -> dict[str, dict[str, Any]]:
    def moe_align_block_size(
        topk_ids: Any, block_size: int, num_experts: int, expert_map: Any = None, pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
    ) -> Any:  # fmt: skip
        return bench_moe_permute.torch_align(topk_ids, block_size, num_experts)

    def try_get_optimal_moe_config(
        w1_shape: Any, w2_shape: Any, top_k: int, dtype: str | None, M: int, block_shape: Any = None
    ) -> dict[str, int]:
        assert (dtype, block_shape) in ((None, None), ("fp8_w8a8", [128, 128])) and w1_shape[2] == w2_shape[1]
        return {"BLOCK_SIZE_M": 16}

    def invoke_fused_moe_triton_kernel(
        A: Any, B: Any, C: Any, A_scale: Any, B_scale: Any, topk_weights: Any, sorted_token_ids: Any, expert_ids: Any,
        num_tokens_post_padded: Any, mul_routed_weight: bool, top_k: int, config: dict[str, int], compute_type: Any,
        use_fp8_w8a8: bool, use_int8_w8a8: bool, use_int8_w8a16: bool, use_int4_w4a16: bool, per_channel_quant: bool,
        block_shape: Any = None, B_bias: Any = None,
    ) -> None:  # fmt: skip
        assert C.ndim == 3 and compute_type == "bfloat16" and (A_scale is not None) == use_fp8_w8a8
        if use_fp8_w8a8:
            A = A.float() * A_scale.repeat_interleave(128, 1)
            B = B.float() * B_scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        expert_of = _rows_by_expert(sorted_token_ids, expert_ids, config["BLOCK_SIZE_M"], len(A) * top_k)
        weigh = topk_weights if mul_routed_weight else None
        C.copy_(_grouped(A, list(B), expert_of, top_k, weigh).view(C.shape))

    def _prepare_expert_assignment(
        topk_ids: Any, config: Any, num_tokens: int, top_k_num: int, global_num_experts: int, expert_map: Any, *,
        use_int8_w8a16: bool = False, use_int4_w4a16: bool = False, block_shape: Any = None,
        ignore_invalid_experts: bool = False,
    ) -> Any:  # fmt: skip
        assert topk_ids.shape == (num_tokens, top_k_num)
        return moe_align_block_size(topk_ids, config["BLOCK_SIZE_M"], global_num_experts)

    def moe_kernel_quantize_input(
        A: Any, A_scale: Any, quant_dtype: Any, per_act_token_quant: bool, block_shape: Any = None
    ) -> Any:
        return (A, A_scale) if quant_dtype is None else cukern.per_token_group_quant_fp8(A, block_shape[1])

    def moe_permute(
        hidden_states: Any, a1q_scale: Any, topk_ids: Any, n_expert: int, n_local_expert: int = -1,
        expert_map: Any = None, permuted_hidden_states: Any = None, scratch: Any = None,
    ) -> Any:  # fmt: skip
        assert scratch["max_num_tokens"] == len(topk_ids) and scratch["num_local_experts"] == n_expert
        permuted, _, offsets, inverse, row = cukern.moe_permute(hidden_states, a1q_scale, topk_ids, n_expert)
        return permuted, None, offsets, inverse.flatten(), row

    def moe_unpermute(
        out: Any, permuted_hidden_states: Any, topk_weights: Any, inv_permuted_idx: Any,
        expert_first_token_offset: Any = None,
    ) -> None:  # fmt: skip
        inverse = inv_permuted_idx.view(topk_weights.shape)
        cukern.moe_unpermute(out, permuted_hidden_states, topk_weights, inverse)

    def scratch(
        *, max_num_tokens: int, topk: int, num_experts: int, num_local_experts: int, device: Any, hidden_size: int,
        hidden_dtype: Any,
    ) -> dict[str, Any]:  # fmt: skip
        return {"max_num_tokens": max_num_tokens, "num_local_experts": num_local_experts}

    return {
        "moe_align_block_size": {"moe_align_block_size": moe_align_block_size},
        "fused_moe": {
            "moe_align_block_size": moe_align_block_size,
            "try_get_optimal_moe_config": try_get_optimal_moe_config,
            "invoke_fused_moe_triton_kernel": invoke_fused_moe_triton_kernel,
            "_prepare_expert_assignment": _prepare_expert_assignment,
        },
        "utils": {"moe_kernel_quantize_input": moe_kernel_quantize_input},
        "moe_permute_unpermute": {
            "MoEPermuteScratch": scratch, "moe_permute": moe_permute, "moe_unpermute": moe_unpermute
        },
    }  # fmt: skip


def _vllm_attention() -> dict[str, dict[str, Any]]:
    def get_scheduler_metadata(
        batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
        cache_seqlens: Any, qkv_dtype: Any = torch.bfloat16, headdim_v: Any = None, cu_seqlens_q: Any = None,
        cu_seqlens_k_new: Any = None, cache_leftpad: Any = None, page_size: Any = None, max_seqlen_k_new: int = 0,
        causal: bool = False, window_size: Any = (-1, -1), has_softcap: bool = False, num_splits: int = 0,
        pack_gqa: Any = None, sm_margin: int = 0,
    ) -> Any:  # fmt: skip
        assert causal and int(cache_seqlens.max()) == max_seqlen_k and len(cache_seqlens) == batch_size
        assert int(cu_seqlens_q[-1]) == batch_size * max_seqlen_q
        return num_heads_q, num_heads_kv, headdim, headdim_v, page_size

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, cu_seqlens_k: Any = None,
        seqused_k: Any = None, q_v: Any = None, dropout_p: float = 0.0, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = None, softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
        return_softmax_lse: bool = False, out: Any = None, scheduler_metadata: Any = None, q_descale: Any = None,
        k_descale: Any = None, v_descale: Any = None, num_splits: int = 0, output_scale: Any = None,
        fa_version: int = 2,
    ) -> Any:  # fmt: skip
        headdim_v = None if q_v is None else v.shape[-1]
        assert scheduler_metadata == (q.shape[1], k.shape[2], q.shape[2], headdim_v, k.shape[1]) and fa_version == 3
        if q_v is None:
            return out.copy_(_paged_attention(q, k, v, max_seqlen_q, seqused_k, block_table, softmax_scale, causal))
        query = torch.cat([q_v, q], dim=-1).view(len(seqused_k), max_seqlen_q, *q.shape[1:-1], 576)
        cache = torch.cat([v, k], dim=-1)
        found = _latent_attention(query, cache, block_table, seqused_k, softmax_scale, causal)
        return out.copy_(found.view(out.shape))

    def unified_attention(
        q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int,
        softmax_scale: float, causal: bool, window_size: Any, block_table: Any, softcap: float, q_descale: Any,
        k_descale: Any, v_descale: Any, seq_threshold_3D: Any = None, num_par_softmax_segments: Any = None,
        softmax_segm_output: Any = None, softmax_segm_max: Any = None, softmax_segm_expsum: Any = None,
    ) -> None:  # fmt: skip
        assert softmax_segm_output.shape == (seq_threshold_3D, q.shape[1], num_par_softmax_segments, q.shape[2])
        assert int(cu_seqlens_q[-1]) == len(q) and int(seqused_k.max()) == max_seqlen_k
        assert (k_descale == 1).all() and k_descale.shape == (len(seqused_k), k.shape[2])
        out.copy_(_paged_attention(q, k, v, max_seqlen_q, seqused_k, block_table, softmax_scale, causal))

    def decode_attention_fwd(
        q: Any, k_buffer: Any, v_buffer: Any, o: Any, lse: Any, req_to_token: Any, b_seq_len: Any, attn_logits: Any,
        num_kv_splits: int, sm_scale: float, page_size: int = 1, logit_cap: float = 0.0, k_scale: Any = None,
        v_scale: Any = None, is_mla: bool = False,
    ) -> None:  # fmt: skip
        assert is_mla and page_size == k_buffer.shape[1] and v_buffer.shape[-1] == 512
        assert attn_logits.shape == (*o.shape[:2], num_kv_splits, 513) and lse.shape == o.shape[:2]
        o.copy_(_latent_attention(q[:, None], k_buffer, req_to_token, b_seq_len, sm_scale, True)[:, 0])

    def get_mla_metadata(*args: Any, **kwargs: Any) -> Any:
        return "plan", None

    def flash_mla_with_kvcache(
        q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, tile_scheduler_metadata: Any,
        num_splits: None = None, softmax_scale: Any = None, causal: bool = False, is_fp8_kvcache: bool = False,
        indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices_in_kvcache: Any = None,
        topk_length: Any = None, extra_topk_length: Any = None, out: Any = None,
    ) -> Any:  # fmt: skip
        assert tile_scheduler_metadata == "plan" and num_splits is None and not (causal and indices is not None)
        assert is_fp8_kvcache == (indices is not None), "it has 8 bits for chosen tokens only"
        options = {"causal": causal, "is_fp8_kvcache": is_fp8_kvcache, "indices": indices}
        places = q, k_cache, block_table, cache_seqlens, head_dim_v, None, None
        return cukern.flash_mla_with_kvcache(*places, softmax_scale=softmax_scale, **options)

    return {
        "vllm_flash_attn.flash_attn_interface": {
            "get_scheduler_metadata": get_scheduler_metadata, "flash_attn_varlen_func": flash_attn_varlen_func
        },
        "v1.attention.ops.triton_unified_attention": {"unified_attention": unified_attention},
        "v1.attention.ops.triton_decode_attention": {"decode_attention_fwd": decode_attention_fwd},
        "v1.attention.ops.flashmla": {
            "get_mla_metadata": get_mla_metadata, "flash_mla_with_kvcache": flash_mla_with_kvcache
        },
    }  # fmt: skip


def _paged_attention(
    q: Any, k: Any, v: Any, query_tokens: int, lengths: Any, tables: Any, scale: float, causal: bool
) -> Any:
    assert causal
    query = q.view(len(lengths), query_tokens, *q.shape[1:]) if query_tokens > 1 else q
    return cukern.paged_attention(query, k, v, tables, lengths, scale=scale, layout="flash").reshape(q.shape)


def _latent_attention(query: Any, cache: Any, tables: Any, lengths: Any, scale: float, causal: bool) -> Any:
    return cukern.flash_mla_with_kvcache(
        query, cache, tables, lengths, 512, None, None, softmax_scale=scale, causal=causal
    )[0]


def _vllm() -> dict[str, dict[str, Any]]:
    def per_token_group_quant_fp8(
        x: Any, group_size: int, eps: float = 1e-10, dtype: Any = None, column_major_scales: bool = False,
        tma_aligned_scales: bool = False, out_q: Any = None, use_ue8m0: Any = None,
    ) -> Any:  # fmt: skip
        return cukern.per_token_group_quant_fp8(x, group_size)

    def per_token_group_quant_int8(x: Any, group_size: int, eps: float = 1e-10, dtype: Any = torch.int8) -> Any:
        return cukern.per_token_group_quant_int8(x, group_size)

    def marlin_make_workspace_new(device: Any, max_blocks_per_sm: int = 1) -> Any:
        return torch.zeros(max_blocks_per_sm)

    def marlin_permute_scales(s: Any, size_k: int, size_n: int, group_size: int, is_a_8bit: bool = False) -> Any:
        assert s.shape == (size_k // group_size, size_n) and s.dtype == torch.bfloat16
        return s

    quantized = "model_executor.layers.quantization.utils"
    return {
        "_custom_ops": {**_moe_c(), **_c()},
        "scalar_type": {"scalar_types": SimpleNamespace(float4_e2m1f="float4_e2m1f")},
        **{f"model_executor.layers.fused_moe.{name}": functions for name, functions in _vllm_moe().items()},
        **_vllm_attention(),
        f"{quantized}.fp8_utils": {"per_token_group_quant_fp8": per_token_group_quant_fp8},
        f"{quantized}.int8_utils": {"per_token_group_quant_int8": per_token_group_quant_int8},
        f"{quantized}.marlin_utils": {
            "marlin_make_workspace_new": marlin_make_workspace_new, "marlin_permute_scales": marlin_permute_scales
        },
        f"{quantized}.marlin_utils_fp4": {"mxfp4_marlin_process_scales": lambda marlin_scales, input_dtype=None: (
            marlin_scales
        )},
    }  # fmt: skip


def _sgl_kernel() -> dict[str, Any]:
    def moe_fused_gate(
        input_tensor: Any, bias: Any, num_expert_group: int, topk_group: int, topk: int,
        num_fused_shared_experts: int = 0, routed_scaling_factor: float = 0,
        apply_routed_scaling_factor_on_output: bool = False,
    ) -> Any:  # fmt: skip
        assert bias.dtype == input_tensor.dtype and input_tensor.shape[1] // num_expert_group <= 32
        return bench_moe_gate.eager(input_tensor, bias, num_expert_group, topk_group, topk)

    def kimi_k2_moe_fused_gate(
        input_tensor: Any, bias: Any, topk: int, renormalize: bool = True, routed_scaling_factor: float = 1.0,
        apply_routed_scaling_factor_on_output: bool = False,
    ) -> Any:  # fmt: skip
        assert input_tensor.shape[1] == 384
        return bench_moe_gate.eager(input_tensor, bias, 1, 1, topk)

    def routes(gate: Callable[..., Any]) -> Callable[..., None]:
        def topk(topk_weights: Any, topk_ids: Any, gating_output: Any, renormalize: bool = False) -> None:
            assert not renormalize
            for out, found in zip((topk_weights, topk_ids), gate(gating_output, topk_ids.shape[1]), strict=True):
                out.copy_(found)

        return topk

    def moe_align_block_size(
        topk_ids: Any, num_experts: int, block_size: int, sorted_token_ids: Any, experts_ids: Any,
        num_tokens_post_pad: Any, cumsum_buffer: Any, pad_sorted_token_ids: bool = False,
    ) -> None:  # fmt: skip
        assert pad_sorted_token_ids and len(cumsum_buffer) == num_experts + 1
        found = bench_moe_permute.torch_align(topk_ids, block_size, num_experts - 1)
        for out, result in zip((sorted_token_ids, experts_ids, num_tokens_post_pad), found, strict=True):
            out[: len(result)] = result

    def moe_sum_reduce(input_tensor: Any, output_tensor: Any, routed_scaling_factor: float = 0) -> None:
        output_tensor.copy_(input_tensor.float().sum(1) * routed_scaling_factor)

    def shuffle_rows(input_tensor: Any, dst2src_map: Any, output_tensor_shape: Any) -> Any:
        assert len(dst2src_map) == output_tensor_shape[0]
        return input_tensor[dst2src_map.long()]

    def merge_state_v2(v_a: Any, s_a: Any, v_b: Any, s_b: Any, v_merged: Any = None, s_merged: Any = None) -> Any:
        return cukern.merge_attention_states(v_a, s_a, v_b, s_b)

    def activation(name: str) -> Callable[..., Any]:
        return lambda input, out=None: bench_moe_activation.by_torch(name)(input)

    def sgl_per_token_group_quant_8bit(
        input: Any, output_q: Any, output_s: Any, group_size: int, eps: float, fp8_min: float, fp8_max: float,
        scale_ue8m0: bool = False, fuse_silu_and_mul: bool = False, masked_m: Any = None, enable_v2: Any = None,
    ) -> None:  # fmt: skip
        assert (fp8_min, fp8_max) == ((-448, 448) if output_q.dtype.is_floating_point else (-128, 127))
        x = bench_moe_activation.by_torch("silu")(input) if fuse_silu_and_mul else input
        fp8 = output_q.dtype.is_floating_point
        function = cukern.per_token_group_quant_fp8 if fp8 else cukern.per_token_group_quant_int8
        for out, found in zip((output_q, output_s), function(x, group_size), strict=True):
            out.copy_(found)

    def sgl_per_token_quant_fp8(input: Any, output_q: Any, output_s: Any) -> None:
        found = cukern.scaled_fp8_quant(input, use_per_token_if_dynamic=True)
        for out, result in zip((output_q, output_s), found, strict=True):
            out.copy_(result)

    def fp8_blockwise_scaled_grouped_mm(
        output: Any, a_ptrs: Any, b_ptrs: Any, out_ptrs: Any, a_scales_ptrs: Any, b_scales_ptrs: Any, a: Any, b: Any,
        scales_a: Any, scales_b: Any, stride_a: Any, stride_b: Any, stride_c: Any, layout_sfa: Any, layout_sfb: Any,
        problem_sizes: Any, expert_offsets: Any, workspace: Any,
    ) -> None:  # fmt: skip
        assert b.stride(1) == 1 and expert_offsets.dtype == torch.int32
        for e, (first, (m, n, k)) in enumerate(zip(expert_offsets.tolist(), problem_sizes.tolist(), strict=True)):
            assert (stride_a[e], stride_b[e], stride_c[e]) == (k, k, n)
            rows, scale = a[first : first + m].float(), scales_a[first : first + m].repeat_interleave(128, 1)
            weights = b[e].float() * scales_b[e].repeat_interleave(128, 0).repeat_interleave(128, 1)
            output[first : first + m] = rows * scale @ weights

    return {
        "moe_fused_gate": moe_fused_gate,
        "kimi_k2_moe_fused_gate": kimi_k2_moe_fused_gate,
        "topk_softmax": routes(bench_moe_gate.eager_softmax),
        "topk_sigmoid": routes(bench_moe_gate.eager_sigmoid),
        "moe_align_block_size": moe_align_block_size,
        "moe_sum_reduce": moe_sum_reduce,
        "shuffle_rows": shuffle_rows,
        "merge_state_v2": merge_state_v2,
        **{f"{name}_and_mul": activation(name) for name in ("silu", "gelu", "gelu_tanh")},
        **_norms(),
        "sgl_per_token_group_quant_8bit": sgl_per_token_group_quant_8bit,
        "sgl_per_token_quant_fp8": sgl_per_token_quant_fp8,
        "fp8_blockwise_scaled_grouped_mm": fp8_blockwise_scaled_grouped_mm,
        "top_k_renorm_prob": lambda probs, top_k: cukern.top_k_renorm_probs(probs, top_k),
        "top_p_renorm_prob": lambda probs, top_p: cukern.top_p_renorm_probs(probs, top_p),
    }


def _sglang_router(
    scores: Any, bias: Any, topk: int, scoring_func: str = "sigmoid", num_fused_shared_experts: int = 0,
    renormalize: bool = True, routed_scaling_factor: float = 1.0, apply_routed_scaling_factor_on_output: bool = False,
    moe_softcapping: float = 0.0, num_expert_group: int = 1, topk_group: int = 1,
) -> Any:  # fmt: skip
    return bench_moe_gate.eager(scores, bias, num_expert_group, topk_group, topk)


def _deep_gemm() -> dict[str, Any]:
    def numbers(x: Any) -> Any:
        """In 16 bits, or FP8 and its scales, which lie column by column of the rows'."""
        if isinstance(x, torch.Tensor):
            return x.float()
        values, scales = x
        wide = scales.repeat_interleave(128, -1)
        return values.float() * (wide if scales.shape[-2] == values.shape[-2] else wide.repeat_interleave(128, -2))

    def contiguous(a: Any, b: Any, d: Any, m_indices: Any) -> None:
        rows, weights = numbers(a), numbers(b)
        assert m_indices.dtype == torch.int32 and m_indices.is_contiguous()
        for e in range(len(weights)):
            d[m_indices == e] = (rows[m_indices == e] @ weights[e].T).to(d.dtype)

    def masked(a: Any, b: Any, d: Any, masked_m: Any, expected_m: int) -> None:
        rows, weights = numbers(a), numbers(b)
        for e, m in enumerate(masked_m.tolist()):
            d[e, :m] = rows[e, :m] @ weights[e].T

    def dense(a: Any, b: Any, d: Any) -> None:
        d[:] = numbers(a) @ numbers(b).T

    return {
        "get_mk_alignment_for_contiguous_layout": lambda: 4,
        "fp8_gemm_nt": dense,
        "get_mn_major_tma_aligned_tensor": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        **{f"m_grouped_{kind}_gemm_nt_contiguous": contiguous for kind in ("bf16", "fp8")},
        **{f"m_grouped_{kind}_gemm_nt_masked": masked for kind in ("bf16", "fp8")},
    }


def _triton_kernels() -> dict[str, dict[str, Any]]:
    def matmul_ogs(
        x: Any, w: Any, bias: Any, routing_data: Any, gather_indx: Any = None, scatter_indx: Any = None,
        precision_config: Any = None, betas: Any = None, gammas: Any = None, out_alpha: Any = None, y: Any = None,
    ) -> Any:  # fmt: skip
        counts, experts = routing_data.counts, routing_data.experts
        assert bias is None and w.shape[1] * 2 == x.shape[1] and len(counts) == experts
        weights = [
            _e2m1(numbers.T, scales.T[:, : x.shape[1] // 32])
            for numbers, scales in zip(w, precision_config.weight_scale, strict=True)
        ]
        rows = _grouped(x, weights, torch.arange(experts).repeat_interleave(counts), 1, None)
        return y.copy_(rows.view(y.shape))

    routing = lambda weights, counts, experts, topk, data: SimpleNamespace(counts=counts, experts=experts)  # noqa: E731
    config = lambda weight_scale, flex_ctx: SimpleNamespace(weight_scale=weight_scale)  # noqa: E731
    return {
        "matmul_ogs": {"FlexCtx": lambda rhs_data: None, "PrecisionConfig": config, "matmul_ogs": matmul_ogs},
        "matmul_ogs_details.opt_flags": {"update_opt_flags_constraints": lambda constraints: None},
        "numerics": {"InFlexData": lambda: None},
        "routing": {"RoutingData": routing, "compute_expt_data": lambda hist, experts, rows: None},
        "tensor": {
            "FP4": "FP4",
            "wrap_torch_tensor": lambda x, dtype=None: x,
            "convert_layout": lambda x, layout, **options: x,
        },
        "tensor_details": {
            "layout": SimpleNamespace(
                make_default_matmul_mxfp4_w_layout=lambda mx_axis: (None, {}),
                make_default_matmul_mxfp4_w_scale_layout=lambda mx_axis, num_warps: (None, {}),
            )
        },
    }


def _flashinfer_sampling() -> dict[str, Any]:
    def drawn(function: Callable[..., Any]) -> Callable[..., Any]:
        def sample(
            values: Any, *filters: Any, indices: Any = None, filter_apply_order: str = "top_k_first",
            deterministic: bool = True, generator: Any = None, check_nan: bool = False, seed: Any = None,
            offset: Any = None,
        ) -> Any:  # fmt: skip
            assert offset == 0
            order = {"filter_apply_order": filter_apply_order} if len(filters) == 2 else {}
            # Its draws are others than ours.
            return function(values, *filters, seed=seed + 1, **order)

        return sample

    names = (
        "sampling_from_logits", "sampling_from_probs", "top_k_sampling_from_probs", "top_p_sampling_from_probs",
        "top_k_top_p_sampling_from_logits",
    )  # fmt: skip
    return {
        **{name: drawn(getattr(cukern, name)) for name in names},
        "softmax": lambda logits, temperature=None, enable_pdl=None: cukern.softmax(logits),
    }


def _norms() -> dict[str, Any]:
    def rmsnorm(input: Any, weight: Any, eps: float = 1e-6, out: Any = None, enable_pdl: Any = None) -> Any:
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    def fused_add_rmsnorm(input: Any, residual: Any, weight: Any, eps: float = 1e-6, enable_pdl: Any = None) -> None:
        input.copy_(rmsnorm(residual.add_(input), weight, eps))

    return {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm}


class _FlashInferDecode:
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD", *, use_tensor_cores: bool = False) -> None:
        assert kv_layout == "NHD" and use_tensor_cores and float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, *, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        self._set(indptr, indices, last_page_len, page_size, 1)

    def _set(self, indptr: Any, indices: Any, last_page_len: Any, page_size: int, query_tokens: int) -> None:
        pages = indices.split(indptr.diff().tolist())
        self._tables = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
        self._lengths = (indptr.diff() - 1) * page_size + last_page_len
        self._query_tokens = query_tokens

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        places = self._query_tokens, self._lengths, self._tables, q.shape[-1] ** -0.5, True
        return _paged_attention(q, *paged_kv_cache, *places)


class _FlashInferPrefill(_FlashInferDecode):
    def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_tensor_cores=True)

    def plan(  # type: ignore[override]
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, q_data_type: Any,
        kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert causal
        self._set(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, int(qo_indptr[1]))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, SGLang, DeepGEMM, FlashInfer's sampling and triton_kernels, as if they were installed."""
    modules = {
        "triton": {},
        "triton.language": {"bfloat16": "bfloat16"},
        **{f"vllm.{name}": functions for name, functions in _vllm().items()},
        "sgl_kernel": _sgl_kernel(),
        "sglang.kernels.ops.moe.moe_fused_gate": {"moe_fused_gate": _sglang_router},
        "deep_gemm": _deep_gemm(),
        **{f"triton_kernels.{name}": functions for name, functions in _triton_kernels().items()},
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": _FlashInferDecode,
            "BatchPrefillWithPagedKVCacheWrapper": _FlashInferPrefill,
        },
        "flashinfer.sampling": _flashinfer_sampling(),
        "flashinfer.norm": _norms(),
    }
    for path, members in modules.items():
        names = path.split(".")
        for i in range(1, len(names) + 1):
            name = ".".join(names[:i])
            if name not in sys.modules or i == len(names):
                module = ModuleType(name)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, name, module)
            if i > 1:
                monkeypatch.setattr(sys.modules[".".join(names[: i - 1])], names[i - 1], sys.modules[name], False)
        for name, member in members.items():
            monkeypatch.setattr(sys.modules[path], name, member, raising=False)

    def activation(name: str) -> Callable[..., None]:
        return lambda out, input: out.copy_(bench_moe_activation.by_torch(name)(input))

    def rms_norm_static_fp8_quant(result: Any, input: Any, weight: Any, scale: Any, epsilon: float) -> None:
        y = torch.nn.functional.rms_norm(input, weight.shape, weight, epsilon)
        result.copy_(cukern.scaled_fp8_quant(y, scale)[0])

    operators: dict[str, Any] = {f"{name}_and_mul": activation(name) for name in ("silu", "gelu", "gelu_tanh")}
    for name, by_torch in bench_moe_activation._VLLMS.items():
        operators[name] = lambda out, input, by_torch=by_torch: out.copy_(by_torch(input))
    operators["rms_norm_static_fp8_quant"] = rms_norm_static_fp8_quant
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(**operators), raising=False)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def _small_sampling() -> Iterator[Case]:
    for op in bench_sampling.TORCH:
        dtype = "bfloat16" if op == "sample" else "float32"
        yield bench_sampling._case(op, 64, 500, dtype)
    yield bench_sampling._case("sampling_from_logits", 64, 500, seeded=False)
    yield bench_sampling._greedy_case(64, 500, "bfloat16", "cluster")


def _small_cases() -> Iterator[Case]:
    """Cases with peers, of sizes for the CPU: one for each op and each peer."""
    permuted = [c for c in bench_moe_permute.cases() if c.case["tokens"] == bench_moe_permute.SMALL.tokens]
    paged = bench_paged_attention.Sizes(3, 8, 2, 32, 70)
    attentions = [bench_paged_attention.attention(paged._replace(**changes), compared=True) for changes in (
        {}, {"layout": "flash"}, {"ragged": True}, {"query_tokens": 3}
    )]  # fmt: skip
    layer = bench_fused_moe.Sizes(4, 128, 256, 2)
    gates = (replace(c, call=lambda *inputs, c=c: _by_twin(c, inputs)) for c in CASES if "call" not in c.case)
    yield from (c for c in gates if c.case["tokens"] == 64 or (c.op, c.case["tokens"]) == ("topk_sigmoid", 1))
    yield from permuted
    yield from (bench_quantization.shrunk(c) for c in bench_quantization.cases())
    yield from bench_kv_cache.cases(small=True)
    yield from (bench_moe_activation.shrunk(c) for c in bench_moe_activation.cases())
    yield from (bench_norm.shrunk(c) for c in bench_norm.cases())
    yield bench_decoding._repetition(2, 600, 40)
    yield bench_decoding._masked(2, 600, 40)
    yield from _small_sampling()
    yield from (c for c in bench_moe_gemm.cases(small=True) if c.peers)
    yield from (bench_fused_moe._case(layer, 24, dtype) for dtype in ("bfloat16", "float8_e4m3fn", "mxfp4"))
    yield bench_fused_moe._case(layer._replace(inter=96, hidden=192), 24, "mxfp4")
    yield from (c for c in bench_mla_decode.cases(small=True) if c.peers and c.op == "flash_mla_with_kvcache")
    yield from attentions
    yield bench_paged_attention._version(2, paged)
    yield bench_paged_attention._merge(5, 4, 32, "bfloat16")
    yield bench_paged_attention._merge(5, 4, 32, "bfloat16", heads_first=True)


def _distinct(cases: Iterable[Case]) -> list[Case]:
    found = {(c.op, str(c.case), c.variant): c for c in cases if c.peers}
    return list(found.values())


@pytest.mark.parametrize("case", _distinct(_small_cases()), ids=str)
def test_other_libraries_are_called_as_they_are_meant_to_be(libraries: None, case: Case) -> None:
    compared = []
    for name, peer in case.peers.items():
        try:
            function = peer.load()
        except ImportError:
            assert name.startswith("FlashInfer")
            continue
        assert harness.agrees(case, peer, function, "cpu"), name
        compared.append(name)
    assert compared or set(case.peers) == {"FlashInfer fa2"}


def _spoiled(result: Any) -> Any:
    """A result with its first row wrong in every element, of whatever dtype."""
    if isinstance(result, (tuple, list)):
        return type(result)(_spoiled(x) for x in result)
    wrong = result.clone()
    raw = wrong.view(torch.uint8) if wrong.dtype.itemsize == 1 else wrong
    raw[:] = raw.flip(0) + 3
    return wrong


@pytest.mark.parametrize("case", _distinct(_small_cases()), ids=str)
def test_a_wrong_result_of_another_library_is_seen(libraries: None, case: Case) -> None:
    for name, peer in case.peers.items():
        try:
            function = peer.load()
        except ImportError:
            continue
        run = (lambda *x, f=function: f(*x)()) if peer.prepared else function
        wrong = replace(peer, prepared=False)
        assert not harness.agrees(case, wrong, lambda *x, run=run: _spoiled(run(*x)), "cpu"), name


def test_a_draw_must_be_plausible() -> None:
    probs = torch.rand(256, 100, generator=torch.Generator().manual_seed(0)).softmax(dim=1)
    for op in ("sampling_from_probs", "top_k_sampling_from_probs", "top_p_sampling_from_probs"):
        right = bench_sampling.plausible(op)
        kept = bench_sampling.kept_probabilities(op, probs)
        torch.manual_seed(1)
        assert right((probs,), torch.multinomial(kept, 1)[:, 0])
        # The most probable one always, one that was filtered away, one that does not exist.
        assert not right((probs,), probs.argmax(dim=1))
        assert op == "sampling_from_probs" or not right((probs,), probs.argmin(dim=1))
        assert not right((probs,), torch.full((256,), 100))


# --- results --------------------------------------------------------------------------------------------


def _row(op: str, tokens: int, us: float, variant: str = "auto", **more: Any) -> dict[str, Any]:
    row = {"op": op, "case": {"tokens": tokens, "experts": 256, "dtype": "float32"}, "variant": variant}
    return {**row, "us": us, "floor_us": 1.0, "baselines": {}, "host_us": None, **more}


def _document(*rows: dict[str, Any]) -> dict[str, Any]:
    ceilings = {"kernel_us": 1.0, "copy_tb_s": 4.0, "matmul_tflop_s": None}
    return report.document(MACHINE, ceilings, rows)


def test_a_document_has_the_fields_of_the_format(tmp_path: Path) -> None:
    document = _document(_row("gate", 1, 2.0))
    fields = {"gpu", "driver", "cuda", "versions", "digest", "date", "ceilings", "ops", "rows"}
    assert document.keys() == fields
    assert document["ops"].keys() == {"gate"}
    assert document["ops"]["gate"]["digest"] == document["digest"]

    path = tmp_path / "h200.json"
    report.save(document, path)
    assert report.load(path) == json.loads(path.read_text()) == document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "not JSON"),
        (lambda text: text.replace('"digest"', '"hash"'), "fields"),
        (lambda text: text.replace('"floor_us"', '"floor"'), "row"),
        (lambda text: text.replace('"op": "gate"', '"op": "other"'), "row"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = tmp_path / "h200.json"
    report.save(_document(_row("gate", 1, 2.0)), path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        report.load(path)


def test_a_merge_replaces_the_ops_that_were_measured_and_no_other() -> None:
    old = _document(_row("gate", 1, 2.0), _row("gate", 64, 3.0), _row("sample", 1, 9.0))
    for run in old["ops"].values():
        run["digest"] = "before"
    new = _document(_row("gate", 1, 1.5))
    merged = report.merge(old, new)
    assert [(row["op"], row["us"]) for row in merged["rows"]] == [("sample", 9.0), ("gate", 1.5)]
    assert merged["ops"]["sample"]["digest"] == "before"
    assert merged["ops"]["gate"]["digest"] == merged["digest"] == new["digest"] != "before"


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb.json"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090.json"),
        ("NVIDIA RTX PRO 6000 Blackwell (Server)", "rtx-pro-6000-blackwell-server.json"),
    ],
)
def test_a_results_file_is_named_after_the_gpu(gpu: str, name: str) -> None:
    assert report.file_name(gpu) == name


def test_a_figure_can_be_looked_up() -> None:
    document = _document(
        _row("gate", 1, 2.0, "specialized"), _row("gate", 1, 3.0, "dynamic"), _row("gate", 64, 4.0), _row("top", 1, 5.0)
    )
    assert report.look_up(document, "gate", "dynamic", tokens=1)["us"] == 3.0
    assert report.look_up(document, "gate", tokens=64, dtype="float32")["us"] == 4.0
    assert report.look_up(document, "top")["us"] == 5.0
    with pytest.raises(LookupError, match=r"^2 rows .* gate, tokens=1"):
        report.look_up(document, "gate", tokens=1)
    with pytest.raises(LookupError, match=r"^0 rows .* gate, auto, pages=1"):
        report.look_up(document, "gate", "auto", pages=1)


def _results() -> dict[str, Any]:
    rows = []
    for tokens, us in ((1, 2.0), (64, 2.5), (1024, 20.0)):
        baselines = {"torch": 4 * us, "Triton": 1.5 * us} if tokens > 1 else {"torch": 4 * us}
        rows.append(
            _row("gate", tokens, us, "specialized", baselines=baselines, host_us=9.25 if tokens == 64 else None)
        )
        rows.append(_row("gate", tokens, 2 * us, "dynamic"))
    return _document(*rows, _row("lonely", 8, 1234.5))


def test_results_are_shown_in_tables() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    report.print_tables(console, _results())
    text = console.export_text()
    assert "gate: experts 256, dtype float32" in text
    line = next(line for line in text.splitlines() if " 64 " in line and "specialized" in line)
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    assert cells == ["64", "specialized", "2.50", "1.00", "40%", "10.0 (4.0×)", "3.75 (1.5×)", "9.25"]
    assert "1,234" in text


def test_rows_of_texts_and_of_tokens_say_how_many_there_are_per_second() -> None:
    rows = [_row("decode", 1, 2e6, case={"batch": batch, "steps": 64}) for batch in (1, 32)]
    rows += [_row("encode", 1, 5e5, case={"texts": 1000, "batch": 32, "dtype": "float16"})]
    decoding, encoding = report.sections(rows)
    headings, (_, last) = decoding.table()
    assert dict(zip(headings, last, strict=True))["tokens/s"] == "1,024"
    headings, (only,) = encoding.table()
    assert dict(zip(headings, only, strict=True))["texts/s"] == "2,000" and "tokens/s" not in headings
    assert "texts/s" not in report.sections([_row("gate", 1, 2.0)])[0].table()[0]


def test_results_of_several_gpus_have_a_file_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    publish.write(_results(), folder)
    rows = [_row("all_to_all", n, 2.0, case={"ranks": 2, "tokens": n}, baselines={"NCCL": 9.0}) for n in (1, 8)]
    document = report.document(report.of_several(MACHINE, 2), asdict(PEERS), rows)
    written = publish.write(document, folder)
    assert [path.name for path in written if path.suffix == ".json"] == ["h200-x2.json"]
    text = (tmp_path / "RESULTS.md").read_text()
    first, second = text.index("## NVIDIA H200\n"), text.index("## NVIDIA H200 x2\n")
    assert first < second < text.index("### gate") < text.index("### all_to_all")
    assert "stores to a peer 400 GB/s each way, minimal exchange 2.50 µs" in text[second:]
    assert "stores to a peer" not in text[:second].split("## NVIDIA H200")[1]
    assert report.of_several(MACHINE, 1) is MACHINE


def test_where_an_op_is_behind_is_said(tmp_path: Path) -> None:
    peers = [{"torch": 8.0, "vLLM": 1.999}, {"Triton": 0.5, "vLLM": 6.0, "SGLang Triton": 3.0}, {"torch": 1.0}]
    rows = [_row("gate", tokens, 2.0, baselines=each) for tokens, each in zip((1, 64, 1024), peers, strict=True)]
    (standing,) = report.standings([*rows, _row("lonely", 8, 1.0, baselines={"torch": 1.0, "torch dense": 1.0})])
    assert standing.ratios == [pytest.approx(0.9995), 1.5]
    where = "vLLM: tokens 1, experts 256, dtype float32"
    assert standing.cells == ["gate", "2", "1", "**1.00**", "1.25", "1.50", where]
    publish.write(_document(*rows), tmp_path / "results")
    text = (tmp_path / "RESULTS.md").read_text()
    assert f"| gate | 2 | 1 | **1.00** | 1.25 | 1.50 | {where} |" in text
    assert "| 1 | auto | 2.00 | 1.00 | 50% | 8.00 (4.0×) | 2.00 (**1.00×**) |  |  |" in text
    assert "| 64 | auto | 2.00 | 1.00 | 50% |  | 6.00 (3.0×) | 0.50 (**0.25×**) | 3.00 (1.5×) |" in text

    console = Console(width=160, record=True, file=io.StringIO())
    report.print_tables(console, _document(*rows))
    text = console.export_text()
    assert "beside the fastest other library" in text and "(0.25×)" in text and "**" not in text


def test_a_library_without_metadata_says_its_version_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.library_version("torch") == importlib.metadata.version("torch")
    assert report.library_version("deep_gemm") is None
    module = ModuleType("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    assert report.library_version("deep_gemm") is None
    module.__version__ = "2.5.0"  # type: ignore[attr-defined]
    assert report.library_version("deep_gemm") == "2.5.0"


def test_results_are_written_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    written = publish.write(_results(), folder)
    assert written == [folder / "h200.json", tmp_path / "RESULTS.md", folder / "h200-gate.png"]
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## NVIDIA H200" in text
    assert "| 64 | specialized | 2.50 | 1.00 | 40% | 10.0 (4.0×) | 3.75 (1.5×) | 9.25 |" in text
    assert "| 1 | specialized | 2.00 | 1.00 | 50% | 8.00 (4.0×) |  |  |" in text
    assert "![gate: times, floor and others](results/h200-gate.png)" in text
    assert report.load(written[0])["digest"] in text
    # One case without another library leaves nothing to compare.
    assert not (folder / "h200-lonely.png").exists()
    plot = written[2].read_bytes()
    assert len(plot) < 300_000
    drawn = imread(written[2])[:, :, :3]
    for line in ("crimson", "0.45", "0.3", "black"):
        assert (abs(drawn - to_rgb(line)).max(axis=2) < 0.01).any(), line

    publish.write(_document(_row("lonely", 8, 1000.0)), folder)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| 8 | auto | 1,000 |" in text and "1,234" not in text
    assert "| 64 | specialized | 2.50 |" in text
    assert written[2].read_bytes() == plot


def test_the_results_begin_with_a_line_for_each_function(tmp_path: Path) -> None:
    figures = (1, 2.0, {"torch": 8.0, "vLLM": 1.0}), (8, 4.0, {"vLLM": 6.0}), (64, 1.25, {"torch": 1.0})
    rows = [_row("gate", tokens, us, baselines=of) for tokens, us, of in figures]
    # What a call takes by itself is measured first; other variants of a case do not count.
    rows += [_row("gate", 8, 0.5, "dynamic"), _row("lonely", 8, 2.0)]
    gate, lonely = report.summary(rows)
    spread = ["50% (25% to 80%)", "1.00 (0.50 to 1.50), vLLM"]
    assert gate == ["gate", "3", *spread, "tokens 64: 1.25 µs", "tokens 8: 4.00 µs"]
    assert lonely == ["lonely", "1", "50%", "", "tokens 8, experts 256, dtype float32: 2.00 µs", ""]
    folder = tmp_path / "results"
    written = publish.write(_document(*rows), folder)
    assert folder / "h200.png" in written and folder / "h200-gate.png" in written
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.index(" | ".join(gate)) < text.index("## How it is measured") < text.index("### gate")
    assert "![Functions beside the fastest other library](results/h200.png)" in text


def test_a_picture_has_a_panel_for_each_question() -> None:
    rows = [_row("gate", tokens, 2.0, baselines={"vLLM": 3.0}) for tokens in (1, 64, 65536)]
    rows += [_row("gate", 8, 2.0, case={"tokens": 8, "experts": n, "dtype": "float16"}) for n in (8, 16)]
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: shown.append(figure))
        assert plots.draw(report.sections(rows), Path("none.png"))
    by_size, by_case = shown[0].get_axes()
    assert [tick.get_text() for tick in by_size.get_xticklabels()] == ["1", "64", "64k"]
    title, *labels = (
        text.replace("\u00a0", " ")
        for text in (by_size.get_title(), *(tick.get_text() for tick in by_case.get_yticklabels()))
    )
    assert title == "experts 256, dtype float32" and by_size.get_xlabel() == "tokens"
    assert labels == ["experts 8: 2.00 µs", "experts 16: 2.00 µs"]
    (legend,) = [legend for part in shown[0].subfigs for legend in part.legends]
    assert [text.get_text() for text in legend.get_texts()] == ["cukern", "vLLM", "floor"]


def test_the_picture_of_all_families() -> None:
    rows = [_row("rms_norm", 8, 2.0, baselines={"vLLM": 3.0, "torch": 9.0}), _row("rms_norm", 9, 2.0)]
    rows += [_row("rms_norm", 8, 4.0, variant="another", baselines={"vLLM": 3.0})]
    rows += [_row("gather_tree", 8, 2.0, baselines={"torch": 8.0, "torch.compile": 4.0})]
    rows += [_row("swap_blocks", 8, 2.0, baselines={"vLLM": 2.0}), _row("generate", 8, 2.0, baselines={"stock": 4.0})]
    rows += [_row("softmax", 8, 2.0, baselines={"vLLM": 2.0})]
    dates = dict.fromkeys(("rms_norm", "gather_tree", "swap_blocks"), "2026-11-22") | {"generate": "2026-11-24"}
    runs = {op: {"date": f"{date}T00:00:00", "versions": {"cukern": "2"}} for op, date in dates.items()}
    runs["softmax"] = {"date": "2026-11-20T00:00:00", "versions": {"cukern": "1"}}
    content = {"gpu": "NVIDIA H200", "versions": {"cukern": "2"}, "ops": runs, "rows": rows}
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: shown.append(figure))
        assert plots.draw_standings(content, Path("none.png"))
        assert not plots.draw_standings({**content, "rows": rows[3:4]}, Path("none.png"))
    (panel,) = shown[0].get_axes()
    # The README's names and order; a row of an older release is left out.
    names = [tick.get_text() for tick in panel.get_yticklabels()]
    assert names == ["paged KV cache", "beam search", "norms", "transformers models"]
    dots = [line.get_xdata().tolist() for line in panel.get_lines() if line.get_marker() == "o"]
    assert dots == [[1.0], [2.0], [1.5], [2.0]] and "gray: beside torch alone" in panel.get_xlabel()
    assert panel.get_title().endswith("NVIDIA H200, 2026-11-22 to 2026-11-24")


def test_rows_are_put_together_along_the_size_that_varies_most() -> None:
    rows = [_row("gate", tokens, 1.0) for tokens in (1, 2, 4)]
    rows.append(_row("gate", 1, 1.0, case={"tokens": 1, "experts": 8, "dtype": "float32"}))
    first, second = report.sections(rows)
    assert (first.axis, first.fixed, len(first.rows)) == ("tokens", {"experts": 256, "dtype": "float32"}, 3)
    assert (second.fixed["experts"], len(second.rows)) == (8, 1)


@pytest.mark.parametrize(
    ("us", "text"), [(0.9, "0.90"), (9.994, "9.99"), (9.996, "10.0"), (99.96, "100"), (2279.6, "2,280")]
)
def test_figures_have_three_digits(us: float, text: str) -> None:
    assert report.figure(us) == text


def test_the_import_is_a_row_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that nothing is compiled
    cold, warm = start_up.rows({"cold": 1, "warm": 1})
    assert cold.keys() == warm.keys() == set(report._ROW)
    assert (cold["op"], cold["case"]["cache"], warm["case"]["cache"]) == ("import", "cold", "warm")
    for row in (cold, warm):
        assert 1e3 < row["floor_us"] < row["us"]
    monkeypatch.setattr(start_up, "_CLOCK", "raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError):
        start_up.rows()


# --- python -m cukern bench -----------------------------------------------------------------------------


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_bench_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel, "device_count", lambda: 0)
    assert "there is no NVIDIA GPU here" in _refusal(capsys)


def test_bench_lists_the_ops_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    stems = sorted(path.stem.removeprefix("bench_") for path in (ROOT / "benchmarks").glob("bench_*.py"))
    message = f"OP must be one of {', '.join(stems)}, import or a function or class of cukern, got 'nonsense'"
    assert message in _refusal(capsys, "nonsense")


def test_bench_keeps_no_quick_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--quick takes them with too few replays" in _refusal(capsys, "--quick", "--results")


def test_bench_looks_for_the_folder_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "there is no folder" in _refusal(capsys, "--json", str(tmp_path / "missing" / "file.json"))


def test_bench_needs_the_repository(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "_ROOT", tmp_path)
    assert "the benchmarks are in the repository" in _refusal(capsys)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU whose clock is `Clock`; the folder that the results go to."""
    monkeypatch.setattr(kernel, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(harness, "Timer", Clock)
    monkeypatch.setattr(report, "machine", lambda: MACHINE)
    monkeypatch.setattr(publish, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_bench_measures_the_ops_asked_for_and_keeps_the_results(
    pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cases = [_case(op="topk_softmax", case={"tokens": n, "dtype": "float32"}) for n in (1, 2)]
    monkeypatch.setattr(bench_moe_gate, "cases", lambda: [*cases, _case(op="moe_fused_gate")])
    assert main(["bench", "topk_softmax", "--results", "--json", str(tmp_path / "run.json")]) == 0
    said = capsys.readouterr()
    assert "topk_softmax: dtype float32" in said.out and "moe_fused_gate" not in said.out
    kept = report.load(pretended_gpu / "h200.json")
    assert kept == report.load(tmp_path / "run.json")
    assert [row["op"] for row in kept["rows"]] == ["topk_softmax"] * 2

    assert "grouped_topk has no case" in _refusal(capsys, "grouped_topk")


def test_bench_measures_the_cases_asked_for_and_ends_in_time(
    pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cases = [_case(op="topk_softmax", case={"tokens": n, "dtype": "float32"}) for n in (1, 2, 30)]
    cases.append(_case(op="topk_softmax", baselines={"other": Baseline(lambda: lambda x: x + x)}))
    monkeypatch.setattr(bench_moe_gate, "cases", lambda: cases)
    out = str(tmp_path / "run.json")
    given = ["bench", "moe_gate", "--case", "tokens=2 ", "--case", "tokens=30", "--json", out]
    assert main(given) == 0
    assert [row["case"]["tokens"] for row in report.load(tmp_path / "run.json")["rows"]] == [2, 30]
    assert main(["bench", "moe_gate", "--case", "tokens=16", "--seconds", "0", "--json", out]) == 0
    assert "other was not timed, since the run's time was over" in capsys.readouterr().err
    assert report.load(tmp_path / "run.json")["rows"][0]["baselines"] == {}
    assert "no case has 'tokens=77' in its line" in _refusal(capsys, "moe_gate", "--case", "tokens=77")
    assert "--results keeps all cases" in _refusal(capsys, "moe_gate", "--case", "tokens=2", "--results")


def test_bench_draws_the_figures_of_a_run(
    pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cases = [_case(op="topk_softmax", case={"tokens": n, "dtype": "float32"}) for n in (1, 2, 3)]
    monkeypatch.setattr(bench_moe_gate, "cases", lambda: cases)
    assert main(["bench", "topk_softmax", "--plot", str(tmp_path)]) == 0
    assert "h200-topk_softmax.png" in capsys.readouterr().out
    assert (tmp_path / "h200-topk_softmax.png").is_file() and not pretended_gpu.exists()
    assert "there is no such folder" in _refusal(capsys, "topk_softmax", "--plot", str(tmp_path / "missing"))


def test_bench_keeps_no_results_of_a_run_in_which_an_op_failed(
    pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    cases = [_case(op="topk_softmax"), _case(op="moe_fused_gate", call=broken)]
    monkeypatch.setattr(bench_moe_gate, "cases", lambda: cases)
    assert main(["bench", "moe_gate", "--results"]) == 1
    said = capsys.readouterr()
    assert "moe_fused_gate tokens=16 dtype=float32 auto: RuntimeError: no kernel image" in said.err
    assert "topk_softmax" in said.out
    assert not pretended_gpu.exists()


def test_bench_says_what_takes_more_gpus_than_there_are(
    pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "all_to_all", "--results", "--json", str(tmp_path / "run.json")]) == 0
    said = capsys.readouterr()
    assert "all_to_all_dispatch, all_to_all_combine: 24 cases are not measured" in said.err
    assert "they take 2 GPUs, and there is 1" in said.err
    assert not pretended_gpu.exists() and not (tmp_path / "run.json").exists()

    monkeypatch.setattr(kernel, "device_count", lambda: 2)
    monkeypatch.setattr(bench.runtime, "deviceCanAccessPeer", lambda device, peer: 0)
    assert main(["bench", "all_to_all"]) == 0
    assert "CUDA devices 0 and 1 cannot map each other's memory" in capsys.readouterr().err


def test_bench_keeps_the_results_of_one_gpu_and_of_several_apart(
    pretended_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "device_count", lambda: 2)
    monkeypatch.setattr(bench.runtime, "deviceCanAccessPeer", lambda device, peer: 1)
    monkeypatch.setattr(several, "Clock", HostClock)
    monkeypatch.setattr(bench_moe_gate, "cases", lambda: [_case(op="topk_softmax")])
    monkeypatch.setattr(bench_all_to_all, "cases", lambda: [_exchange("all_to_all_dispatch")])
    assert main(["bench", "topk_softmax", "all_to_all", "--results", "--json", str(tmp_path / "run.json")]) == 0
    said = capsys.readouterr()
    assert "NVIDIA H200 x2: empty kernel" in said.out and "NVIDIA H200: empty kernel" in said.out
    one, both = (report.load(pretended_gpu / name) for name in ("h200.json", "h200-x2.json"))
    assert [row["op"] for row in one["rows"]] == ["topk_softmax"]
    assert [row["op"] for row in both["rows"]] == ["all_to_all_dispatch"]
    assert one == report.load(tmp_path / "run.json") and both == report.load(tmp_path / "run-several.json")


def test_the_parts_of_a_call_are_drawn(tmp_path: Path) -> None:
    rows = [
        {
            **_row("generate", batch, 100.0, "graph"),
            "parts": {"experts": 50.0, "attention": 30.0, "other": 20.0 / batch},
        }
        for batch in (1, 16)
    ]
    assert plots.draw_parts(rows, tmp_path / "parts.png") and (tmp_path / "parts.png").stat().st_size > 5000
    assert not plots.draw_parts([_row("generate", 1, 100.0, "graph")], tmp_path / "none.png")


def test_the_parts_of_a_step_are_known_by_their_kernels() -> None:
    from benchmarks.bench_transformers import part_of

    kernels = {
        "void attend<__nv_bfloat16>": "attention", "void gemm_stream<__nv_bfloat16, 0>": "experts",
        "void gemm_stream_one<__nv_bfloat16, 1>": "dense products", "nvjet_sm90_tst_64x8": "dense products",
        "void unpermute_rows<__nv_bfloat16>": "experts", "void gate_by_warp<float>": "gates",
        "void at::native::vectorized_elementwise_kernel": "other", "void norm_rotate_store<float>": "heads and cache",
    }  # fmt: skip
    assert {name: part_of(name) for name in kernels} == kernels


def test_kernels_that_overlap_are_counted_one_after_the_other() -> None:
    from benchmarks.kernels import by_turns

    events = [("b", 12.0, 20.0), ("a", 10.0, 15.0), ("within", 13.0, 18.0), ("later", 30.0, 31.0)]
    assert by_turns(events) == [("a", 5.0), ("b", 5.0), ("within", 0.0), ("later", 1.0)]
    assert by_turns([]) == []
