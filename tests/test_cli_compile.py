"""`cukern compile --for`: the instances that serving a model reaches; and the trial of kernels by `cukern doctor`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cukern
import cukern.runtime.compile as compiler
from cukern.__main__ import main
from cukern.commands import compile as compile_command
from cukern.commands import doctor, models_of, serving
from cukern.ops.moe_gate import choose as gates
from cukern.runtime import gpu, kernel
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import KERNELS

ARCHS = ("90a", "80")
TINY = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 1000, "max_position_embeddings": 512, "dtype": "float16",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_gpu() -> Iterator[None]:
    """Models that are not shared out, with one number of query tokens: a sweep of all takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "RANKS", (1,))
        patch.setattr(serving, "_QUERY_TOKENS", (1,))
        patch.setattr(kernel, "device_count", lambda: 0)
        yield


@functools.cache
def _calls(name: str) -> list[serving.Call]:
    return list(dict.fromkeys(serving.calls_of(models_of.models_of(name)[0])))


@functools.cache
def _instances(name: str, arch: str) -> frozenset[Instance]:
    return frozenset(serving.instances_of(models_of.models_of(name)[:1], arch))


def _directory(folder: Path, **changed: Any) -> Path:
    config = {name: value for name, value in {**TINY, **changed}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# --- the instances --------------------------------------------------------------------------------------

#: Some files below `cuda_src` of the kernels that each model must reach.
REACHED = {
    ("deepseek-v3", "90a"): ["moe_gemm/fp8_wgmma", "moe_gemm/stream", "mla_decode/attend_wgmma", "moe_gate/moe_gate"],
    ("deepseek-v3", "80"): ["moe_gemm/mma", "mla_decode/attend_mma", "quantization/quantize_groups"],
    ("qwen3-moe", "90a"): ["moe_gemm/wgmma", "moe_gemm/stream_routed", "paged_attention/attend", "sampling/sample"],
    ("qwen3-moe", "80"): ["moe_gemm/mma", "varlen_attention/attention_mma", "rotary_embedding/norm_rotate_store"],
    ("gpt-oss", "90a"): ["moe_gemm/fp4_wgmma", "moe_gemm/mma", "moe_gemm/prepare", "paged_attention/attend"],
    ("gpt-oss", "80"): ["moe_gemm/mma", "moe_permute/sort_chunks", "kv_cache/store_blocks"],
    ("llama", "90a"): ["varlen_attention/attention_wgmma", "moe_gemm/stream_one", "paged_attention/merge_states"],
    ("llama", "80"): ["varlen_attention/attention_mma", "norm/rms_norm", "embedding/embedding_copy"],
}


@pytest.mark.parametrize(("name", "arch"), REACHED)
def test_each_named_model_reaches_its_kernels(name: str, arch: str) -> None:
    found = _instances(name, arch)
    assert {*REACHED[name, arch]} <= {instance.file for instance in found}
    # A GPU before Hopper has no warpgroups.
    assert any("wgmma" in instance.file for instance in found) == (arch == "90a")


def test_deepseek_reaches_the_products_by_blocks_of_fp8() -> None:
    of_file = {file: [i for i in _instances("deepseek-v3", "90a") if i.file == file] for file in
               ("moe_gemm/fp8_wgmma", "moe_gemm/fp8_blocks")}  # fmt: skip
    assert {i.arguments[1] for i in of_file["moe_gemm/fp8_wgmma"]} == {128, 256, 288}
    assert all(i.arguments[4] == "true" for i in of_file["moe_gemm/fp8_wgmma"])
    assert "MXFP4" in {argument for i in _instances("gpt-oss", "80") for argument in i.arguments}


@settings(max_examples=150)
@given(st.data())
def test_random_sizes_reach_no_other_instances(data: st.DataObject) -> None:
    arch = data.draw(st.sampled_from(ARCHS))
    name = data.draw(st.sampled_from([*models_of.NAMED]))
    call = data.draw(st.sampled_from(_calls(name)))
    sizes = {}
    for axis, most in call.axes.items():
        power = data.draw(st.integers(1, most.bit_length()))
        sizes[axis] = data.draw(st.integers(1 << (power - 1), min((1 << power) - 1, most)))
    try:
        own = serving.launched(call.function, call.at(sizes), gpu.BY_ARCH[arch])
    except ValueError:
        assert call.is_optional
        return
    assert own <= _instances(name, arch), (call.function, sizes)


@given(st.lists(st.integers(2, serving.MOST), unique=True, max_size=12))
def test_a_sweep_finds_each_range(starts: list[int]) -> None:
    starts = sorted(starts)
    ranges = [Instance("a", "b", (i,)) for i in range(len(starts) + 1)]

    def at(n: int) -> frozenset[Instance]:
        return frozenset([ranges[sum(start <= n for start in starts)]])

    assert serving._sweep(at, {1, serving.MOST}) == {*ranges}


def test_a_second_size_is_swept_too() -> None:
    call = next(call for call in _calls("llama") if call.function == "paged_attention")
    assert [*call.axes] == ["sequences", "pages"]
    found = serving.reached(call, gpu.BY_ARCH["90a"])
    short = serving.reached(_with_pages(call, 1), gpu.BY_ARCH["90a"])
    assert short < found


def _with_pages(call: serving.Call, pages: int) -> serving.Call:
    """The call with a block table of `pages` columns."""
    table = dict(call.arguments)["block_tables"]
    own = table._replace(shape=(table.shape[0], pages))
    return call._replace(arguments=tuple((k, own if k == "block_tables" else v) for k, v in call.arguments))


# --- configurations -------------------------------------------------------------------------------------


def test_a_directory_is_read_as_hugging_face_writes_it(tmp_path: Path) -> None:
    (model,) = models_of.models_of(str(_directory(tmp_path)))
    assert (model.dtype, model.hidden, model.heads, model.kv_heads, model.head_dim) == ("float16", 256, 4, 2, 64)
    assert (model.experts, model.topk, model.expert_inter, model.quantization) == (8, 2, 128, None)
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (model,) = models_of.models_of(str(_directory(tmp_path, quantization_config=quantized, head_dim=None, dtype=None)))
    assert (model.quantization, model.head_dim, model.dtype) == ("fp8_block", 64, "bfloat16")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "bert"},
            "model_type must be one of llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gpt_oss, ",
        ),
        ({"model_type": None}, "got nothing"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got nothing"),
        ({"num_experts": None}, "n_routed_experts or num_experts or num_local_experts must be a positive integer"),
        ({"hidden_size": "wide"}, "hidden_size must be a positive integer, got 'wide'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of the 4 num_attention_heads, got 3"),
        ({"dtype": "float64"}, "dtype must be one of float32, float16, bfloat16, got 'float64'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method must be one of fp8, mxfp4, got 'awq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size must be [128, 128], got [64, 64]",
        ),
        ({"head_dim": 320}, "varlen_attention refuses its sizes: q must be of 1 to "),
        ({"num_experts": 5000}, "fused_experts refuses its sizes: num_experts must be an integer in [1, 4096]"),
    ],
)
def test_a_configuration_is_refused_in_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "--arch", "90a", "--for", str(_directory(tmp_path, **changed))]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "finding kernels" not in line]
    assert len(said) == 1 and message in said[0]


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(wanted: str | Path, arch: str = "90a") -> str:
        assert main(["compile", "--arch", arch, "--for", str(wanted)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1
        return line

    known = "deepseek-v3, qwen3-moe, gpt-oss, llama"
    assert f"--for must be one of {known} or a model's directory, got 'gpt-2'" in said("gpt-2")
    assert "config.json cannot be read: No such file or directory" in said(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not JSON: " in said(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "config.json must hold an object, got list" in said(tmp_path)
    assert "--for takes --arch 80, 86, 89, 90a, 100a, 120a, got '87'" in said("llama", "87")


# --- the commands ---------------------------------------------------------------------------------------


def _write(work: list[tuple[Instance, str]], progress: Any = None) -> None:
    """Stands for the compiler: empty files by the names of the cubins and of their notes."""
    for instance, arch in work:
        path = compiler.cached_path(instance, arch)
        for name in (path, path.with_name(path.name + ".json")):
            name.write_bytes(b"")


def test_compile_for_leaves_no_instance_to_a_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_all", _write)
    folder = str(_directory(tmp_path))
    (model,) = models_of.models_of(folder)
    calls = [(call, n) for call in dict.fromkeys(serving.calls_of(model)) for n in (1, 100, 3000)]

    def missing() -> set[Instance]:
        found: set[Instance] = set()
        for call, n in calls:
            sizes = {axis: min(n, most) for axis, most in call.axes.items()}
            found |= serving.launched(call.function, call.at(sizes), gpu.BY_ARCH["90a"])
        return {*compiler.missing(found, "90a")}

    assert main(["compile", "--arch", "90a"]) == 0
    assert len(missing()) > 10
    assert main(["compile", "--arch", "90a", "--for", folder]) == 0
    assert missing() == set() == {*compiler.missing(kernel.instances(), "90a")}


def test_compile_all_is_all_that_is_listed_and_all_named_models(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = Instance("norm/rms_norm", "rms_norm", ("reached",))
    asked: list[models_of.Model] = []

    def instances_of(models: list[models_of.Model], arch: str) -> list[Instance]:
        asked.extend(models)
        return [reached]

    monkeypatch.setattr(serving, "instances_of", instances_of)
    args = type("Arguments", (), {"all": True, "models": None, "specialize": None})()
    wanted = {*compile_command._wanted(args, "80")}
    assert {model.source for model in asked} == {*models_of.NAMED}
    for own in (own for kernels in KERNELS.values() for own in kernels):
        assert {*own.at_import, *own.specialized} - {*own.unused.get("80", ())} <= wanted
    assert reached in wanted


def test_a_family_that_does_not_compile_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_some(work: list[tuple[Instance, str]], progress: Any) -> None:
        if work[0][0].file.startswith("moe_gemm"):
            raise cukern.CompileError("fp8_scales.cuh(7): error: no operator")
        _write(work)

    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_all", compile_some)
    assert main(["compile", "--arch", "80"]) == 1
    said = capsys.readouterr()
    assert "a kernel did not compile\nfp8_scales.cuh(7): error: no operator" in said.err
    rows = {line.split()[0]: line.split() for line in said.out.splitlines() if "sm_80" in line}
    assert rows["moe_gemm"][3] == "0" and rows["varlen_attention"][2] == rows["varlen_attention"][3]


def test_doctor_tries_each_kernel() -> None:
    for arch in ARCHS:
        tried = doctor.one_of_each(arch)
        functions = [instance.function for instance in tried]
        assert len(functions) == len({*functions})
        for own in (own for kernels in KERNELS.values() for own in kernels):
            if {*own.at_import, *own.specialized} - {*own.unused.get(arch, ())}:
                assert own.function in functions
    assert {"gemm_fp8_wgmma", "gemm_fp8_blocks"} <= {i.function for i in doctor.one_of_each("90a")}


def test_doctor_reports_a_kernel_that_nvrtc_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Instance("embedding/embedding_copy", "embedding_copy", (16,))
    bad = Instance("moe_gemm/prepare", "prepare_weights", ("MXFP5",))
    monkeypatch.setattr(doctor, "one_of_each", lambda arch: [good, bad])
    (finding,) = doctor.try_kernels("90a")
    assert finding.kind == "problem" and 'error: identifier "MXFP5" is undefined' in finding.state
    assert finding.state.startswith("moe_gemm: prepare_weights does not compile for sm_90a: ")
    assert "cuda-toolkit[cudart,nvrtc]==13.0" in finding.fix
    monkeypatch.setattr(doctor, "one_of_each", lambda arch: [good])
    (finding,) = doctor.try_kernels("90a")
    assert (finding.kind, finding.state) == ("ok", "one instance of each of 1 kernels compiles for sm_90a")


def test_doctor_counts_kernels_of_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    listed, other = next(kernel.instances("embedding")), Instance("embedding/embedding_copy", "embedding_copy", (2,))
    for instance in (listed, other):
        path = compiler.cached_path(instance, "90a")
        path.write_bytes(b"")
        note = {"name": "", "sha256": "", "log": "", "expression": instance.expression, "arch": "90a"}
        path.with_name(path.name + ".json").write_text(json.dumps(note))
    rows, _ = doctor.look_at_kernels(doctor.Driver(None, []))
    (row,) = (row for row in rows if row.stem == "embedding")
    assert row == ("embedding", "90a", 1, len([*kernel.instances("embedding")]), 1, 0)
    assert doctor._sum_of(rows, "90a").state == f"sm_90a: 1 of {row.total} of the import compiled, 1 of first use"


def test_sizes_of_your_own_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gates, "registered", set(gates.registered))
    wanted = ["compile", "--arch", "80", "--op", "moe_gate", "--specialize", "topk_softmax,experts=60", "--check"]
    assert main(wanted) == 1
    with_own = capsys.readouterr().out.splitlines()[-1]
    assert main(wanted[:5] + wanted[-1:]) == 1
    without = capsys.readouterr().out.splitlines()[-1]
    assert int(with_own.split()[0]) == int(without.split()[0]) + 3  # one for each dtype
    for own, says in (("topk_softmax,expert=60", "the sizes of topk_softmax are"), ("softmax,n=1", "op must be")):
        assert main(["compile", "--arch", "80", "--specialize", own]) == 2
        assert f"--specialize {own}: {says}" in capsys.readouterr().err
