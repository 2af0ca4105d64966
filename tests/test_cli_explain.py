"""`cukern explain`, and the kernels that calls of a function reach."""

from __future__ import annotations

import numpy as np
import pytest

import cukern
from cukern.__main__ import main
from cukern.commands import explain

#: What `explain` cannot describe by sizes, and why.
REFUSED = {
    "all_to_all_combine": "takes state (AllToAllState), which no shape in its docstring describes",
    "all_to_all_dispatch": "takes state (AllToAllState), which no shape in its docstring describes",
    "swap_blocks": "takes src (AnyArray), which no shape in its docstring describes",
    "build_sequence_length_padding_offset": "which reads the results of one op before it calls the next",
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("cukern explain: ") and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("name", explain.functions())
@pytest.mark.parametrize("arch", ["90a", "A100"])
def test_every_function_is_explained_by_sizes(name: str, arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in REFUSED:
        assert REFUSED[name] in _refused(capsys, name, "--arch", arch)
        return
    said = _said(capsys, name, "--arch", arch)
    assert said.startswith(f"{name}(") and f"\n{name} on sm_" in said
    assert "  kernel      " in said and "  moves       " in said and "nothing to do" not in said


def test_the_functions_are_all_that_are_explained() -> None:
    assert len(explain.functions()) > 90 and {"explain", "specialize"}.isdisjoint(explain.functions())


def test_sizes_and_integers_have_the_names_of_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    given = "tokens=8192,experts=256,topk=6"
    said = _said(capsys, "moe_fused_gate", "--shape", given, "--shape", "num_expert_group=4", "--arch", "sm_90a")
    assert said.startswith(
        "moe_fused_gate(input=bfloat16 [8192, 256], bias=bfloat16 [256], num_expert_group=4, topk_group=4, topk=6)"
    )
    own = np.zeros((8192, 256), explain.arrays.numpy_dtype("bfloat16"))
    expected = cukern.explain(cukern.moe_fused_gate, own, own[0], 4, 4, 6, arch="90a")
    assert said.split("\n", 1)[1].rstrip() == str(expected)


def test_shapes_with_more_than_names(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--arch", "90", "--shape")
    paged = _said(capsys, "paged_attention", *shape, "blocks=7,head_dim=64,block_size=32", "--dtype", "float32")
    assert "key_cache=float32 [7, 8, 16, 32, 4], value_cache=float32 [7, 8, 64, 32]" in " ".join(paged.split())
    flash = _said(capsys, "paged_attention", *shape, "head_dim=72,block_size=24", "--set", "layout=flash")
    assert "value_cache=bfloat16 [4096, 24, 8, 72]" in " ".join(flash.split()) and "attend_scalar<" in flash
    weights = _said(capsys, "restore_weights", *shape, "k=96,experts=3,n=16")
    assert "prepared=uint8 [3, 2, 2, 272], k=96" in weights


def test_dtypes_options_and_optional_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    said = _said(capsys, "moe_gemm", "--dtype", "a=float8_e4m3fn", "--with", "a_scale", "--with", "b_scale")
    assert "b=float8_e4m3fn [256, 4096, 4096]" in said and "gemm_fp8" in said
    said = _said(capsys, "fused_experts", "--with", "expert_map", "--set", "activation=gelu", "--dtype", "float16")
    words = " ".join(said.split())
    assert "activation='gelu', expert_map=int32 [256])" in words and "w2=float16" in words
    said = _said(capsys, "rms_norm", "--set", "variant=scalar")
    assert "variant='scalar' asks for it" in said


def test_an_explanation_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wide = _said(capsys, "varlen_attention", "--arch", "90a")
    monkeypatch.setenv("COLUMNS", "80")
    narrow = _said(capsys, "varlen_attention", "--arch", "90a")
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert narrow.split() == wide.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rmsnorm"], "FUNCTION must be a function of cukern, such as rms_norm or rms_norm_quant, got 'rmsnorm'"),
        (["CompileError"], "FUNCTION must be a function of cukern, such as "),
        (["rms_norm", "--arch", "77"], "--arch must be one of "),
        (["rms_norm", "--shape", "rows=3"], "--shape must name a size of cukern.rms_norm (tokens, width), got 'rows'"),
        (["rms_norm", "--shape", "width"], "--shape must be NAME=VALUE, got 'width'"),
        (["rms_norm", "--shape", "width=-8"], "--shape width must be an integer of at least 0, got '-8'"),
        (["rms_norm", "--shape", f"tokens={1 << 70}"], "input must have less than 2**63 bytes, got the shape ["),
        (["rms_norm", "--dtype", "float12"], "--dtype must be one of float32, float16, "),
        (["rms_norm", "--dtype", "bias=float32"], "--dtype must name an array of cukern.rms_norm (input, weight), got"),
        (["rms_norm", "--set", "weight=1"], "--set must name an argument of cukern.rms_norm (epsilon, "),
        (["rms_norm", "--with", "bias"], "--with must name an array that cukern.rms_norm can do without ("),
        (["rms_norm", "--set", "epsilon=-1"], "epsilon must be"),
        (["moe_fused_gate", "--shape", "experts=2000"], "experts"),
        (["permute_rows", "--shape", "tokens=65536,topk=65536"], "rows"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in _refused(capsys, *arguments)
