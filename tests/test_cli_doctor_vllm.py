"""`cukern doctor --vllm MODEL`: what cukern would take of a model in vLLM."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cukern.__main__ import main
from cukern.commands import doctor
from cukern.commands.models_of import NAMED
from cukern.integrations.vllm import VARIABLE

QWEN = NAMED["qwen3-moe"]["Qwen3-30B-A3B"]


@pytest.fixture(autouse=True)
def no_seam_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: str, version: str | None = "0.26.1",
    capability: tuple[int, int] = (9, 0),
) -> list[str]:  # fmt: skip
    """The lines of the report on a machine with a GPU and a version of vLLM."""

    def version_of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    gpu = doctor.Gpu("a GPU", capability, 1 << 30)
    monkeypatch.setattr(doctor, "driver", lambda: doctor.Driver((13, 0), [gpu]))
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor", "--vllm", wanted]) == 0
    return [re.sub(" +", " ", line).strip() for line in capsys.readouterr().out.splitlines()]


TAKEN = {
    "gpt-oss-20b": [
        "ok experts takes MXFP4 experts, 32 of 2880 x 2880",
        "ok attention takes attention, heads of 64 in bfloat16, with a window of 128 and sinks",
    ],
    "Qwen3-30B-A3B": [
        "ok experts takes 16-bit experts, 128 of 2048 x 768",
        "ok attention takes attention, heads of 128 in bfloat16",
    ],
    "DeepSeek-V3": [
        "ok experts takes FP8 block experts, 256 of 7168 x 2048",
        "note attention leaves MLA to vLLM",
    ],
    "Llama-3.1-8B": ["ok attention takes attention, heads of 128 in bfloat16"],
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_would_be_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config,) = [configs[name] for configs in NAMED.values() if name in configs]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert said(monkeypatch, capsys, str(tmp_path)) == ["ok vLLM 0.26.1", *TAKEN[name]]


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"moe_intermediate_size": 100},
            "note experts leaves 16-bit experts, 128 of 2048 x 100, to vLLM: intermediate_size_per_partition is 100, "
            "not a multiple of 8",
        ),
        (
            {"torch_dtype": "float32"},
            "note experts leaves 16-bit experts, 128 of 2048 x 768, to vLLM: the dtype is float32",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "note experts leaves fp8 experts, 128 of 2048 x 768, to vLLM: their quantization",
        ),
        (
            {"head_dim": 512},
            "note attention leaves attention, heads of 512 in bfloat16, to vLLM: heads of 512, not of a multiple of 8 "
            "up to 256",
        ),
    ],
)
def test_why_not(
    changed: dict[str, Any], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(QWEN | changed))
    assert line in said(monkeypatch, capsys, str(tmp_path))


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, "attention")
    assert said(monkeypatch, capsys, "qwen3-moe", None, (8, 0))[:5] == [
        "note vLLM not installed",
        '-> pip install "cukern[vllm]"',
        "note GPU none of compute capability 9.0: without one, everything stays on vLLM's kernels",
        "ok model 128 experts, hidden size 2048",
        "note experts off (CUKERN_VLLM=attention)",
    ]
    first = said(monkeypatch, capsys, "llama", "0.33.0")[0]
    assert first == "note vLLM 0.33.0: runs without cukern, which is tested with 0.26"


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_unknown_model_is_refused(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "driver", lambda: doctor.Driver(None, []))
    assert main(["doctor", "--vllm", str(tmp_path) if is_folder else "nothing"]) != 0
    error = capsys.readouterr().err
    assert "--vllm" in error and "--for" not in error and error.count("\n") == 1


def test_an_unknown_seam_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(VARIABLE, "norms")
    monkeypatch.setattr(doctor, "driver", lambda: doctor.Driver(None, []))
    assert main(["doctor", "--vllm", "llama"]) != 0
    assert "CUKERN_VLLM must be 0, 1 or names of experts, attention, got 'norms'" in capsys.readouterr().err
