"""`cukern explain`, and the kernels that calls of a function reach."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cukern
import cukern.runtime.compile as compiler
from cukern.__main__ import main
from cukern.commands import compile as compile_command
from cukern.commands import explain
from cukern.runtime import gpu, kernel

#: What `explain` cannot describe by sizes, and why.
REFUSED = {
    "all_to_all_combine": "takes state (AllToAllState), which no shape in its docstring describes",
    "all_to_all_dispatch": "takes state (AllToAllState), which no shape in its docstring describes",
    "swap_blocks": "takes src (Array), which no shape in its docstring describes",
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
    assert said.split("\n", 1)[1].rstrip() == expected.text(120)


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


def test_what_launches_nothing_moves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    said = _said(capsys, "fused_experts", "--shape", "tokens=0")
    assert "none, there is nothing to do" in said and "  moves       0 bytes\n" in said and "floor" not in said


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
        (["rms_norm", "--arch", "87"], "--arch must be one of "),
        (["rms_norm", "--arch", "V100"], "--arch must be a GPU of compute capability 8.0 or later, got 'V100'"),
        (["topk_softmax", "tokens=64"], "unrecognized arguments: tokens=64 (use --shape tokens=64)"),
        (["rms_norm", "width=8", "variant=scalar"], "(use --shape width=8 --set variant=scalar)"),
        (["rms_norm", "width"], "unrecognized arguments: width (--help lists the arguments)"),
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


# --- compile --op FUNCTION --------------------------------------------------------------------------------


def test_a_function_reaches_its_own_kernels() -> None:
    listed = [*kernel.instances("moe_gate")]
    found = explain.reached_by("topk_softmax", listed, gpu.BY_ARCH["90a"])
    # Softmax without a bias has no kernels of DeepSeek's scores; it has all others.
    assert found == {i for i in listed if "SIGMOID" not in i.arguments and "LANE_ALIGNED" not in i.arguments} - {
        i for i in listed if i.function == "gate_by_thread" and "ANY" in i.arguments
    }
    norms = explain.reached_by("layer_norm", [*kernel.instances("norm")], gpu.BY_ARCH["90a"])
    assert norms and all(i.function.startswith("layer_norm") for i in norms)


def test_compile_for_a_function_says_how_long_the_rest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["compile", "--arch", "H200", "--op", "silu_and_mul", "--op", "softcap"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    line = re.search(
        r"moe_activation sm_90a 1 1 0 ([\d.]+) .*silu_and_mul: 1 of the 2 kernels of moe_activation for sm_90a, 1 "
        r"compiled now; 1 of the other 1 are not compiled, about (\d+) s at that rate: --op moe_activation",
        said,
    )
    assert line and abs(float(line[1]) - int(line[2])) <= 1
    assert "softcap:" not in said  # a family has no rest
    assert len(compiler.missing(kernel.instances("moe_activation"), "90a")) == 1

    assert main(["compile", "--arch", "H200", "--op", "silu_and_mul"]) == 0
    assert "sm_90a, 0 compiled now; 1 of the other 1 are not compiled: --op moe_act" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_counts_of_a_function_and_of_the_rest_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    norms = [*kernel.instances("norm")]
    own = explain.reached_by("rms_norm", norms, gpu.BY_ARCH["90a"])
    others = [i for i in norms if i not in own]
    compiler.cubin(others[0], "90a")
    assert main(["compile", "--arch", "H200", "--op", "rms_norm"]) == 0
    expected = f"{len(own)} of the {len(norms)} kernels of norm for sm_90a, {len(own)} compiled now; "
    expected += f"{len(others) - 1} of the other {len(others)} are not compiled"
    assert len(others) == len(norms) - len(own) > 1 and expected in " ".join(capsys.readouterr().out.split())


def test_a_function_that_sizes_do_not_describe_stands_for_its_family() -> None:
    listed = [*kernel.instances("all_to_all")]
    assert compile_command._of_functions(["all_to_all_dispatch"], listed, "90a") == listed
