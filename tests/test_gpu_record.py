"""The GPU record: what a proof is about, when it is out of date, and what makes one."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.digest import digest
from tests import gpu_record
from tests.gpu_record import ROOT

VERSIONS = {"cukern": "0.1.0", "nvrtc": "13.0.88"}
MACHINE = {"gpu": "NVIDIA H200", "driver": "600.1", "cuda": "13.0", "versions": VERSIONS}
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
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--stem")
"""
FILES = {
    "cuda_src/moe_gate.cu": '#include "common/warp.cuh"\n#include <cuda_fp16.h>',
    "cuda_src/sampling.cu": "",
    "cuda_src/common/warp.cuh": '#include "common/numeric.cuh"',
    "cuda_src/common/numeric.cuh": "",
    "cuda_src/common/fp8.cuh": "",
    "cukern/__init__.py": "import cukern.ops.moe_gate, cukern.ops.sampling",
    "cukern/runtime/__init__.py": "",
    "cukern/runtime/kernel.py": "from cukern.runtime.compile import Instance",
    "cukern/runtime/compile.py": "",
    "cukern/runtime/fp8.py": "",
    "cukern/ops/moe_gate.py": "from cukern.runtime import kernel\nimport numpy",
    "cukern/ops/sampling.py": "def later():\n    from cukern.runtime import fp8",
    "cukern/reference/moe_gate.py": "",
    "cukern/reference/sampling.py": "",
    "cukern/fused_moe/__init__.py": "from cukern.fused_moe.layer import Layer",
    "cukern/fused_moe/layer.py": "from cukern.ops import moe_gate",
    "cukern/reference/fused_moe.py": "",
    "cukern/models/__init__.py": "from cukern.models.encoder import Encoder",
    "cukern/models/encoder.py": "from cukern.ops import sampling",
    "cukern/testing.py": "",
    "tests/test_moe_gate.py": f"if 0:\n  import cukern, cukern.testing\n  from tests import buffers\n{OUTCOMES}",
    "tests/test_sampling.py": "",
    "tests/test_fused_moe.py": "",
    "tests/test_models_encoder.py": "from tests import encoders",
    "tests/test_models_text.py": "",
    "tests/encoders.py": "",
    "tests/test_streams.py": "import pytest\npytestmark = pytest.mark.gpu",
    "tests/test_style.py": "",
    "tests/test_contract.py": "if 0:\n  from tests.specs import ALL",
    "tests/buffers.py": "",
    "tests/specs/__init__.py": "",
    "tests/specs/moe_gate.py": "",
    "tests/specs/sampling.py": "",
    "tests/specs/fused_moe.py": "",
    "tests/specs/models.py": "",
    "tests/conftest.py": CONFTEST,
    "pytest.ini": "[pytest]\nmarkers =\n  gpu: x\n  sanitize: x\n",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkout with one stem, and a shared GPU test."""
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(gpu_record, "ROOT", root)
    monkeypatch.setattr(gpu_record, "RECORD", root / "tests" / "gpu_record.json")
    monkeypatch.setattr(gpu_record, "machine", lambda: MACHINE)
    monkeypatch.setattr(gpu_record, "gpu_count", lambda: 1)
    # The processes started there import the plugin from here.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return root


def _entry(name: str, **changes: Any) -> dict[str, Any]:
    of_sources = digest(*gpu_record.sources(name), root=gpu_record.ROOT)
    counts = {"passed": 3, "failed": 0, "skipped": 1}
    run = {"gpu": "NVIDIA H200", "gpus": 1, "nvrtc": "13.0.88", "date": "2026-01-02"}
    return {"digest": of_sources, **counts, "sanitizer": CLEAN, **run, **changes}


def test_what_there_is_to_prove(checkout: Path) -> None:
    assert gpu_record.provable() == ["fused_moe", "models", "moe_gate", "sampling", "runtime"]
    assert [path.name for path in gpu_record.test_files("runtime")] == ["test_streams.py"]
    assert [path.name for path in gpu_record.test_files("moe_gate")] == ["test_moe_gate.py", "test_contract.py"]
    # What begins with a stem's name is that stem's.
    (checkout / "tests" / "test_moe_gate_forms.py").write_text("pytest.mark.gpu")
    of_gate = [path.name for path in gpu_record.test_files("moe_gate")]
    assert of_gate == ["test_moe_gate.py", "test_moe_gate_forms.py", "test_contract.py"]
    assert [path.name for path in gpu_record.test_files("runtime")] == ["test_streams.py"]


GATE = ["fused_moe", "moe_gate"]
STEMS = ["fused_moe", "models", "moe_gate", "sampling"]


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("cuda_src/moe_gate.cu", GATE),
        ("cukern/ops/moe_gate.py", GATE),
        ("cukern/reference/moe_gate.py", ["moe_gate"]),
        ("tests/test_moe_gate.py", ["moe_gate"]),
        ("tests/buffers.py", ["moe_gate"]),
        ("cuda_src/common/warp.cuh", GATE),
        ("cuda_src/common/numeric.cuh", GATE),
        ("cuda_src/common/fp8.cuh", []),
        ("cukern/runtime/kernel.py", [*GATE, "runtime"]),
        ("cukern/runtime/compile.py", [*GATE, "runtime"]),
        ("cukern/ops/sampling.py", ["models", "sampling"]),
        ("cukern/runtime/fp8.py", ["models", "sampling", "runtime"]),
        ("cukern/testing.py", ["moe_gate", "runtime"]),
        ("cukern/fused_moe/layer.py", ["fused_moe"]),
        ("cukern/models/encoder.py", ["models"]),
        ("tests/test_models_text.py", ["models"]),
        ("tests/encoders.py", ["models"]),
        ("cukern/__init__.py", []),
        ("tests/specs/moe_gate.py", ["moe_gate"]),
        ("tests/specs/another.py", []),
        ("tests/test_contract.py", STEMS),
        ("tests/specs/__init__.py", STEMS),
        ("tests/test_streams.py", ["runtime"]),
        ("tests/test_style.py", []),
        ("tests/conftest.py", ["runtime"]),
        ("cukern/ops/another.py", []),
    ],
)
def test_a_change_makes_stale_what_depends_on_it(checkout: Path, changed: str, stale: list[str]) -> None:
    entries = {name: _entry(name) for name in gpu_record.provable()}
    assert not any(gpu_record.unproved(name, entry) for name, entry in entries.items())
    path = checkout / changed
    before = path.read_text() if path.exists() else ""
    comment = "# a comment\n" if path.suffix == ".py" else "/* a\ncomment */ // more\n"
    path.write_text(f"\n{comment}\n{before}")
    unless_new = {name: gpu_record.unproved(name, entry) for name, entry in entries.items()}
    assert not before or not any(unless_new.values())
    path.write_text(f"{before}\nmore = 1\n")
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


def test_check_says_which_stems_are_unproved(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_record.main(["check"]) == 1
    assert capsys.readouterr().out == "".join(f"{name}: never proved\n" for name in gpu_record.provable())
    for name in gpu_record.provable():
        gpu_record.write_entry(name, _entry(name), MACHINE)
    assert gpu_record.main(["check"]) == 0
    assert "moe_gate: proved on NVIDIA H200, NVRTC 13.0.88, " in capsys.readouterr().out
    monkeypatch.setattr(gpu_record, "gpu_count", lambda: 2)
    gpu_record.write_entry("moe_gate", _entry("moe_gate"), MACHINE)
    assert gpu_record.main(["check", "--ops", "moe_gate"]) == 0
    assert "moe_gate: proved on 2 x NVIDIA H200, " in capsys.readouterr().out
    (checkout / "cuda_src/moe_gate.cu").write_text("another kernel")
    assert gpu_record.main(["check"]) == 1
    assert gpu_record.main(["check", "--ops", "runtime"]) == 0
    with pytest.raises(SystemExit, match="2"):
        gpu_record.main(["check", "--ops", "nonsense"])
    assert (
        "no stem is called 'nonsense'; there are fused_moe, models, moe_gate, sampling, runtime"
        in capsys.readouterr().err
    )


def test_the_outcomes_of_a_run_are_counted(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = {"passed": 1, "failed": 2, "skipped": 1}
    none = dict.fromkeys(outcomes, 0)
    assert gpu_record.run_tests(["moe_gate", "sampling"]) == {"moe_gate": outcomes, "sampling": none}
    said = capfd.readouterr().out
    assert "test_fails" in said and "[gw" not in said
    assert gpu_record.run_tests(["moe_gate"], workers=2) == {"moe_gate": outcomes}
    assert "[gw1]" in capfd.readouterr().out


def test_marked_tests_are_counted_with_their_stem(checkout: Path) -> None:
    (checkout / "tests" / gpu_record.SUITES[0]).write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        '@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.stem("sampling")),\n'
        '    *(pytest.param(i, marks=pytest.mark.stem("moe_gate")) for i in (2, 3))])\n'
        "def test_it(n): pass\n"
    )
    shutil.copy(ROOT / "tests/conftest.py", checkout / "tests")
    for module in ("gpu_memory", "gpu_workers"):
        shutil.copy(ROOT / f"tests/{module}.py", checkout / "tests")
    (checkout / "tests/test_moe_gate.py").write_text("")
    # A test of a suite without a stem is of no family.
    suite = checkout / "tests" / gpu_record.SUITES[1]
    suite.write_text("import pytest\n@pytest.mark.gpu\ndef test_of_all(): pass\n")

    def numbers(*names: str) -> dict[str, int]:
        return {name: sum(own.values()) for name, own in gpu_record.run_tests([*names]).items()}

    # There is no GPU here, so they fail.
    assert numbers("sampling", "moe_gate") == {"sampling": 1, "moe_gate": 2}
    assert numbers("sampling") == {"sampling": 1}
    assert numbers("sampling", "runtime") == {"sampling": 1, "runtime": 1}


def test_a_file_that_cannot_be_collected_is_a_failure_of_its_stem(checkout: Path) -> None:
    (checkout / "tests/test_moe_gate.py").write_text("import no_such_module")
    found = gpu_record.run_tests(["moe_gate", "sampling"])
    assert {name: own["failed"] for name, own in found.items()} == {"moe_gate": 1, "sampling": 0}
    (checkout / "tests" / gpu_record.SUITES[0]).write_text("import no_such_module")
    found = gpu_record.run_tests(["moe_gate", "sampling"])
    assert {name: own["failed"] for name, own in found.items()} == {"moe_gate": 2, "sampling": 1}


def test_a_run_that_crashes_is_a_failure(checkout: Path) -> None:
    (checkout / "tests/test_moe_gate.py").write_text("import os\nos._exit(0)\n")
    assert gpu_record.run_tests(["moe_gate"]) == {"moe_gate": {"passed": 0, "failed": 1, "skipped": 0}}


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
    assert gpu_record._run_tool("moe_gate", "racecheck", {}) == errors


def test_the_sanitizer_runs_the_marked_tests_on_our_kernels(
    checkout: Path, pretended_sanitizer: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    pretended_sanitizer('echo "========= ERROR SUMMARY: 7 errors"; exit 99')
    assert gpu_record.run_sanitizer("moe_gate", {}) == dict.fromkeys(gpu_record.TOOLS, 7)
    said = capsys.readouterr().out
    assert said.count("1 passed, 3 deselected") == len(gpu_record.TOOLS)
    by_tool = {tool: said.split(f"under {tool}:")[1].split(" under ")[0] for tool in gpu_record.TOOLS}
    assert all(f"--tool\n{tool}\n" in by_tool[tool] for tool in gpu_record.TOOLS)
    assert [tool for tool in gpu_record.TOOLS if "kns=moe_gate" not in by_tool[tool]] == ["initcheck"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(None, ["0,1,2", "1,2,0", "2,0,1"]), ("5,GPU-7,6", ["5,GPU-7,6", "GPU-7,6,5", "6,5,GPU-7"])],
)
def test_each_gpu_has_stems_of_its_own(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, wanted: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(gpu_record, "gpu_count", lambda: 3)
    monkeypatch.setattr(gpu_record.os, "cpu_count", lambda: 4 * 6)
    barrier = threading.Barrier(6, timeout=30)
    seen: list[tuple[str, str]] = []

    def work(name: str, environment: dict[str, str]) -> None:
        barrier.wait()  # passed only if all six are at work at once
        seen.append((name, environment["CUDA_VISIBLE_DEVICES"]))

    gpu_record.spread("abcdef", work)
    assert sorted(name for name, _ in seen) == [*"abcdef"]
    assert sorted(environment for _, environment in seen) == sorted(2 * wanted)

    def fail(name: str, environment: dict[str, str]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gpu_record.spread("abc", fail)
    monkeypatch.setattr(gpu_record, "gpu_count", lambda: 1)
    gpu_record.spread("a", lambda name, environment: seen.append((name, str(environment))))
    assert seen[-1] == ("a", "{}")


def test_each_worker_has_a_gpu_of_its_own_first(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "tests/conftest.py", checkout / "tests")
    for module in ("gpu_memory", "gpu_workers"):
        shutil.copy(ROOT / f"tests/{module}.py", checkout / "tests")
    (checkout / "tests/test_moe_gate.py").write_text(
        "import os, pytest\n"
        '@pytest.mark.parametrize("n", range(8))\n'
        "def test_it(n):\n"
        '    first = int(os.environ["PYTEST_XDIST_WORKER"][2:]) % 2\n'
        '    assert os.environ["CUDA_VISIBLE_DEVICES"] == ["7,3", "3,7"][first]\n'
    )
    monkeypatch.setattr(gpu_record, "gpu_names", lambda: ["7", "3"])
    found = gpu_record.run_tests(["moe_gate"], "not gpu", workers=3)
    assert found == {"moe_gate": {"passed": 8, "failed": 0, "skipped": 0}}


def test_what_waits_for_ranks_comes_first_and_alone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "gpu_count", lambda: 2)
    (checkout / "tests/test_moe_gate.py").write_text("pytest.mark.waits")
    seen: list[tuple[list[str], str, int]] = []

    def run_tests(names: list[str], marked: str = "gpu", workers: int = 0) -> dict[str, dict[str, int]]:
        seen.append((list(names), marked, workers))
        return {name: {"passed": 3, "failed": int("not" in marked), "skipped": 1} for name in names}

    monkeypatch.setattr(gpu_record, "run_tests", run_tests)
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name, environment: CLEAN)
    monkeypatch.setattr(gpu_record, "run", lambda command, show: (0, ""))
    assert gpu_record.main(["run", "--ops", "sampling moe_gate", "--workers", "14"]) == 1
    assert seen == [
        (["moe_gate"], "gpu and waits", 0),
        (["sampling", "moe_gate"], "gpu and not waits", 14),
    ]
    entry = gpu_record.read_record()["stems"]["moe_gate"]
    assert (entry["passed"], entry["failed"], entry["skipped"]) == (6, 1, 2)


def test_a_stem_without_marked_tests_is_not_sanitized(
    checkout: Path, pretended_sanitizer: Callable[[str], None]
) -> None:
    pretended_sanitizer('echo "========= ERROR SUMMARY: 0 errors"')
    path = checkout / "tests/test_moe_gate.py"
    path.write_text(path.read_text().replace("@pytest.mark.sanitize", ""))
    assert gpu_record._run_tool("moe_gate", "memcheck", {}) is None


def passing(names: list[str], *_: object) -> dict[str, dict[str, int]]:
    return {name: {"passed": 3, "failed": 0, "skipped": 0} for name in names}


def test_a_missing_sanitizer_is_recorded(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_record, "sanitizer", lambda: None)
    monkeypatch.setattr(gpu_record, "run_tests", passing)
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

    monkeypatch.setattr(
        gpu_record,
        "run_tests",
        lambda names, *_: {name: {"passed": 3, "failed": failed, "skipped": 1} for name in names},
    )
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name, environment: CLEAN)
    monkeypatch.setattr(gpu_record, "run", run)
    assert gpu_record.main(["run", "--ops", "moe_gate runtime"]) == status
    assert started == [["-m", "cukern", "bench", "moe_gate", "--results"]]
    record = json.loads(gpu_record.RECORD.read_text())
    assert record.keys() == {"gpu", "driver", "cuda", "versions", "date", "stems"}
    assert record["stems"].keys() == {"moe_gate", "runtime"}
    assert record["stems"]["moe_gate"] == _entry("moe_gate", failed=failed, date=record["stems"]["moe_gate"]["date"])
    assert record["stems"]["runtime"]["sanitizer"] == {}


def test_proving_one_stem_leaves_the_others(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_record.write_entry("moe_gate", _entry("moe_gate", digest="before"), MACHINE)
    before = copy.deepcopy(gpu_record.read_record()["stems"]["moe_gate"])
    monkeypatch.setattr(gpu_record, "run_tests", passing)
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name, environment: dict.fromkeys(gpu_record.TOOLS))
    monkeypatch.setattr(gpu_record, "run", lambda command, show: pytest.fail("there is nothing to measure"))
    assert gpu_record.main(["run", "--ops", "runtime"]) == 0
    assert gpu_record.main(["prove", "--ops", "fused_moe"]) == 1  # its sanitizer has not run
    entries = gpu_record.read_record()["stems"]
    assert entries["moe_gate"] == before
    assert entries["runtime"]["passed"] == entries["fused_moe"]["passed"] == 3


@pytest.mark.parametrize("same_sources", [True, False])
def test_sanitize_alone_amends_a_proof_of_the_same_sources(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, same_sources: bool
) -> None:
    gpu_record.write_entry("moe_gate", _entry("moe_gate", sanitizer=dict.fromkeys(gpu_record.TOOLS)), MACHINE)
    if not same_sources:
        (checkout / "cuda_src/moe_gate.cu").write_text("another kernel")
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name, environment: CLEAN)
    assert gpu_record.main(["sanitize", "--ops", "moe_gate"]) == 0
    kept = gpu_record.read_record()["stems"]["moe_gate"]["sanitizer"]
    assert kept == (CLEAN if same_sources else dict.fromkeys(gpu_record.TOOLS))
    monkeypatch.setattr(gpu_record, "run_sanitizer", lambda name, environment: {**CLEAN, "memcheck": 1})
    assert gpu_record.main(["sanitize", "--ops", "moe_gate"]) == 1
