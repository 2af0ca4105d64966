"""The benchmarks and the GPU record: what is measured, what is kept of it, and when a proof is out of date."""

from __future__ import annotations

import copy
import importlib.metadata
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from rich.console import Console

import cukern
from benchmarks import bench_moe_gate, harness, report
from benchmarks.harness import Baseline, Case, Ceilings
from cukern import bench
from cukern.__main__ import main
from cukern.runtime import kernel
from tests import gpu_record

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
    if case.op == "topk_softmax":
        logits, weights, ids = inputs
        return cukern.topk_softmax(weights, ids, logits)
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
@pytest.mark.parametrize("case", [c for c in CASES if c.host], ids=str)
def test_each_way_to_call_the_op_is_captured_and_timed(case: Case) -> None:
    timer = harness.Timer(replays=3)
    ceilings = timer.ceilings(matrix=False)
    measured = harness.measure(case, timer, ceilings, baselines=False)
    # A call that went to another stream would be missing from the graph.
    assert measured.row["us"] > ceilings.kernel_us / 2
    assert 1 < measured.row["host_us"] < 1000


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


def test_where_an_op_is_behind_is_said(tmp_path: Path) -> None:
    peers = [{"torch": 8.0, "vLLM": 1.999}, {"Triton": 0.5, "vLLM": 6.0, "SGLang Triton": 3.0}, {"torch": 1.0}]
    rows = [_row("gate", tokens, 2.0, baselines=each) for tokens, each in zip((1, 64, 1024), peers, strict=True)]
    (standing,) = report.standings([*rows, _row("lonely", 8, 1.0, baselines={"torch": 1.0, "torch dense": 1.0})])
    assert standing.ratios == [pytest.approx(0.9995), 1.5]
    where = "vLLM: tokens 1, experts 256, dtype float32"
    assert standing.cells == ["gate", "2", "1", "**1.00**", "1.25", "1.50", where]
    report.write(_document(*rows), tmp_path / "results")
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
    written = report.write(_results(), folder)
    assert written == [folder / "h200.json", tmp_path / "RESULTS.md", folder / "h200-gate.png"]
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## NVIDIA H200" in text
    assert "| 64 | specialized | 2.50 | 1.00 | 40% | 10.0 (4.0×) | 3.75 (1.5×) | 9.25 |" in text
    assert "| 1 | specialized | 2.00 | 1.00 | 50% | 8.00 (4.0×) |  |  |" in text
    assert "![gate: time against tokens](results/h200-gate.png)" in text
    assert report.load(written[0])["digest"] in text
    # One size makes no curve.
    assert not (folder / "h200-lonely.png").exists()
    plot = written[2].read_bytes()
    assert len(plot) < 300_000
    drawn = imread(written[2])[:, :, :3]
    for line in ("C0", "C1", "C2", "C3", "black"):
        assert (abs(drawn - to_rgb(line)).max(axis=2) < 0.01).any(), line

    report.write(_document(_row("lonely", 8, 1000.0)), folder)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| 8 | auto | 1,000 |" in text and "1,234" not in text
    assert "| 64 | specialized | 2.50 |" in text
    assert written[2].read_bytes() == plot


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


def _tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    source = {"a_dot_py": "1", "sub__b_dot_cu": "2"}
    first = _tree(tmp_path / "first", **source)
    again = _tree(tmp_path / "again", **dict(reversed(source.items())), sub__b_dot_pyc="3", note_dot_txt="4")
    reference = report.digest(first, root=first)
    assert report.digest(again, root=again) == reference
    assert report.digest(first / "sub", first / "a.py", first / "missing.py", root=first) == reference
    for changed in ({**source, "a_dot_py": "2"}, {"c_dot_py": "1", "sub__b_dot_cu": "2"}, {"a_dot_py": "1"}):
        other = _tree(tmp_path / str(len(list(tmp_path.iterdir()))), **changed)
        assert report.digest(other, root=other) != reference


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
    message = f"OP must be one of {', '.join(stems)} or a function of cukern, got 'nonsense'"
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
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
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


# --- the GPU record -------------------------------------------------------------------------------------

OUTCOMES = """
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.sanitize
def test_passes():
    pass

def test_fails():
    assert False

@pytest.mark.skip
def test_skips():
    pass

@pytest.fixture
def broken():
    raise RuntimeError

def test_errs(broken):
    pass
"""
CLEAN = dict.fromkeys(gpu_record.TOOLS, 0)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout with one stem, and a shared GPU test."""
    root = _tree(
        tmp_path / "checkout",
        cuda_src__moe_gate_dot_cu="kernel",
        cuda_src__common__warp_dot_cuh="header",
        cukern__runtime__kernel_dot_py="runtime",
        cukern__ops__moe_gate_dot_py="op",
        cukern__reference__moe_gate_dot_py="twin",
        cukern__testing_dot_py="tolerances",
        tests__test_moe_gate_dot_py=OUTCOMES,
        tests__test_streams_dot_py="@pytest.mark.gpu",
        tests__test_style_dot_py="no GPU here",
        tests__conftest_dot_py="",
        pytest_dot_ini="[pytest]\nmarkers =\n  gpu: x\n  sanitize: x\n",
    )
    monkeypatch.setattr(gpu_record, "ROOT", root)
    monkeypatch.setattr(gpu_record, "RECORD", root / "tests" / "gpu_record.json")
    monkeypatch.setattr(gpu_record, "machine", lambda: MACHINE)
    # The processes started there import the plugin from here.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return root


def _entry(name: str, **changes: Any) -> dict[str, Any]:
    digest = report.digest(*gpu_record.sources(name), root=gpu_record.ROOT)
    counts = {"passed": 3, "failed": 0, "skipped": 1}
    return {"digest": digest, **counts, "sanitizer": CLEAN, "gpu": "NVIDIA H200", "date": "2026-01-02", **changes}


def test_what_there_is_to_prove(checkout: Path) -> None:
    assert gpu_record.provable() == ["moe_gate", "runtime"]
    assert [path.name for path in gpu_record.test_files("runtime")] == ["test_streams.py"]


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("cuda_src/moe_gate.cu", ["moe_gate"]),
        ("cukern/ops/moe_gate.py", ["moe_gate"]),
        ("cukern/reference/moe_gate.py", ["moe_gate"]),
        ("tests/test_moe_gate.py", ["moe_gate"]),
        ("cuda_src/common/warp.cuh", ["moe_gate", "runtime"]),
        ("cukern/runtime/kernel.py", ["moe_gate", "runtime"]),
        ("cukern/testing.py", ["runtime"]),
        ("tests/test_streams.py", ["runtime"]),
        ("tests/test_style.py", []),
        ("cukern/ops/sampling.py", []),
    ],
)
def test_a_change_makes_stale_what_depends_on_it(checkout: Path, changed: str, stale: list[str]) -> None:
    entries = {name: _entry(name) for name in gpu_record.provable()}
    assert [gpu_record.unproved(name, entry) for name, entry in entries.items()] == [None, None]
    path = checkout / changed
    path.write_text((path.read_text() if path.exists() else "") + "# mark.gpu\n" * ("streams" in changed) + "# more\n")
    found = {name: gpu_record.unproved(name, entry) for name, entry in entries.items()}
    assert [name for name, reason in found.items() if reason] == stale
    assert all(found[name] == "stale: the sources have changed since 2026-01-02" for name in stale)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failed": 2}, "2 tests failed"),
        ({"passed": 0}, "no test passed"),
        ({"sanitizer": {**CLEAN, "racecheck": 3}}, "racecheck found 3 errors"),
        ({"sanitizer": {**CLEAN, "initcheck": None}}, "initcheck did not run to its end"),
        ({"sanitizer": {}}, "memcheck did not run to its end"),
    ],
)
def test_only_a_clean_run_is_a_proof(checkout: Path, changes: dict[str, Any], reason: str) -> None:
    assert gpu_record.unproved("moe_gate", _entry("moe_gate", **changes)) == reason


def test_check_says_which_stems_are_unproved(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_record.main(["check"]) == 1
    assert capsys.readouterr().out == "moe_gate: never proved\nruntime: never proved\n"
    for name in gpu_record.provable():
        gpu_record.write_entry(name, _entry(name), MACHINE)
    assert gpu_record.main(["check"]) == 0
    assert "moe_gate: proved on NVIDIA H200, " in capsys.readouterr().out
    (checkout / "cuda_src/moe_gate.cu").write_text("another kernel")
    assert gpu_record.main(["check"]) == 1
    assert gpu_record.main(["check", "--ops", "runtime"]) == 0
    with pytest.raises(SystemExit, match="2"):
        gpu_record.main(["check", "--ops", "nonsense"])
    assert "no stem is called 'nonsense'; there are moe_gate, runtime" in capsys.readouterr().err


def test_the_outcomes_of_a_run_are_counted(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu_record.run_tests("moe_gate") == {"passed": 1, "failed": 2, "skipped": 1}
    assert "test_fails" in capfd.readouterr().out


def test_a_run_that_crashes_is_a_failure(checkout: Path) -> None:
    (checkout / "tests/test_moe_gate.py").write_text("import os\nos._exit(0)\n")
    assert gpu_record.run_tests("moe_gate") == {"passed": 0, "failed": 1, "skipped": 0}


def test_a_run_that_hangs_is_ended(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "_TIMEOUT_S", 1)
    start = time.monotonic()
    status, output = gpu_record.run(["sh", "-c", "sleep 60 & echo started; wait"])
    assert status < 0
    assert output == "started\n"
    # What it started holds its output open, and would be waited for.
    assert time.monotonic() - start < 30


@pytest.fixture
def pretended_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a compute-sanitizer on the path that runs the command and reports what it is told."""

    def install(summary: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "compute-sanitizer"
        script.write_text(
            f'#!/bin/sh\nwhile [ "$1" != "{sys.executable}" ]; do echo "$1"; shift; done\n'
            f'"$@" || exit\n{summary}\n'
        )  # fmt: skip
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        gpu_record.sanitizer.cache_clear()

    yield install
    gpu_record.sanitizer.cache_clear()


@pytest.mark.parametrize(
    ("summary", "errors"),
    [
        ('echo "========= ERROR SUMMARY: 0 errors"', 0),
        ('echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"', 0),
        ('echo "========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)"', 1),
        ('echo "========= ERROR SUMMARY: 12 errors"; exit 99', 12),
        ("true", None),
        ('echo "========= ERROR SUMMARY: 0 errors"; exit 1', None),
    ],
)
def test_the_sanitizer_is_believed_only_when_it_finishes(
    checkout: Path, pretended_sanitizer: Callable[[str], None], summary: str, errors: int | None
) -> None:
    pretended_sanitizer(summary)
    assert gpu_record._run_tool("moe_gate", "racecheck") == errors


def test_the_sanitizer_runs_the_marked_tests_on_our_kernels(
    checkout: Path, pretended_sanitizer: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pretended_sanitizer('echo "========= ERROR SUMMARY: 7 errors"; exit 99')
    assert gpu_record.run_sanitizer("moe_gate") == dict.fromkeys(gpu_record.TOOLS, 7)
    said = capsys.readouterr().out
    assert said.count("1 passed, 3 deselected") == len(gpu_record.TOOLS)
    by_tool = {tool: said.split(f"under {tool}:")[1].split(" under ")[0] for tool in gpu_record.TOOLS}
    assert all(f"--tool\n{tool}\n" in by_tool[tool] for tool in gpu_record.TOOLS)
    assert [tool for tool in gpu_record.TOOLS if "kns=moe_gate" not in by_tool[tool]] == ["initcheck"]


def test_a_stem_without_marked_tests_is_not_sanitized(
    checkout: Path, pretended_sanitizer: Callable[[str], None]
) -> None:
    pretended_sanitizer('echo "========= ERROR SUMMARY: 0 errors"')
    path = checkout / "tests/test_moe_gate.py"
    path.write_text(path.read_text().replace("@pytest.mark.sanitize", ""))
    assert gpu_record._run_tool("moe_gate", "memcheck") is None


def test_a_missing_sanitizer_is_recorded(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_record, "sanitizer", lambda: None)
    monkeypatch.setattr(gpu_record, "run_tests", lambda name: {"passed": 3, "failed": 0, "skipped": 0})
    monkeypatch.setattr(gpu_record, "run", lambda command, show: (0, ""))
    assert gpu_record.main(["run", "--ops", "moe_gate"]) == 1
    entry = gpu_record.read_record()["stems"]["moe_gate"]
    assert entry["sanitizer"] == dict.fromkeys(gpu_record.TOOLS)
    assert "compute-sanitizer was not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failed", "bench_status", "status"), [(0, 0, 0), (2, 0, 1), (0, 1, 1)], ids=["clean", "a test", "the benchmark"]
)
def test_run_records_each_stem_and_says_whether_all_is_well(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, failed: int, bench_status: int, status: int
) -> None:
    started = []

    def run(command: list[str], show: bool) -> tuple[int, str]:
        started.append(command[1:])
        return bench_status, ""

    monkeypatch.setattr(gpu_record, "run_tests", lambda name: {"passed": 3, "failed": failed, "skipped": 1})
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name: CLEAN)
    monkeypatch.setattr(gpu_record, "run", run)
    assert gpu_record.main(["run", "--ops", ""]) == status
    assert started == [["-m", "cukern", "bench", "moe_gate", "--results"]]
    record = json.loads(gpu_record.RECORD.read_text())
    assert record.keys() == {"gpu", "driver", "cuda", "versions", "date", "stems"}
    assert record["stems"].keys() == {"moe_gate", "runtime"}
    assert record["stems"]["moe_gate"] == _entry("moe_gate", failed=failed, date=record["stems"]["moe_gate"]["date"])
    assert record["stems"]["runtime"]["sanitizer"] == {}


def test_proving_one_stem_leaves_the_others(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_record.write_entry("moe_gate", _entry("moe_gate", digest="before"), MACHINE)
    before = copy.deepcopy(gpu_record.read_record()["stems"]["moe_gate"])
    monkeypatch.setattr(gpu_record, "run_tests", lambda name: {"passed": 3, "failed": 0, "skipped": 0})
    monkeypatch.setattr(gpu_record, "run", lambda command, show: pytest.fail("there is nothing to measure"))
    assert gpu_record.main(["run", "--ops", "runtime"]) == 0
    entries = gpu_record.read_record()["stems"]
    assert entries["moe_gate"] == before
    assert entries["runtime"]["passed"] == 3


@pytest.mark.parametrize("same_sources", [True, False])
def test_sanitize_alone_amends_a_proof_of_the_same_sources(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, same_sources: bool
) -> None:
    gpu_record.write_entry("moe_gate", _entry("moe_gate", sanitizer=dict.fromkeys(gpu_record.TOOLS)), MACHINE)
    if not same_sources:
        (checkout / "cuda_src/moe_gate.cu").write_text("another kernel")
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name: CLEAN)
    assert gpu_record.main(["sanitize"]) == 0
    kept = gpu_record.read_record()["stems"]["moe_gate"]["sanitizer"]
    assert kept == (CLEAN if same_sources else dict.fromkeys(gpu_record.TOOLS))
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name: {**CLEAN, "memcheck": 1})
    assert gpu_record.main(["sanitize"]) == 1
