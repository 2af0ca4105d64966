"""The command `cukern`: what its commands print, and how they refuse input."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
import cukern.commands
import cukern.runtime.compile as compiler
from cukern.__main__ import COMMANDS, main
from cukern.commands import compile as compile_command
from cukern.commands import demo, demo_encoder, doctor
from cukern.commands.models_of import NAMED
from cukern.commands.profile_moe import HostTrace
from cukern.reference import norm as reference
from cukern.runtime import arrays, kernel
from cukern.runtime.op import OPS
from cukern.runtime.progress import in_command, progress

ROOT = Path(__file__).resolve().parents[1]
HOPPER = doctor.Gpu("H200", (9, 0), 141 << 30)


def _run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it, on a machine that shows no GPU unless `environment` says so."""
    settings = {"CUDA_VISIBLE_DEVICES": "", "CUKERN_COMPILE": "lazy", "PYTHONIOENCODING": "utf-8", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", "cukern", *map(str, arguments)],
        cwd=ROOT, env=os.environ | settings | environment, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "device_count", lambda: 0)
    monkeypatch.setenv("COLUMNS", "100")
    # Few texts: tests/test_models_demo.py has all.
    monkeypatch.setattr(demo_encoder, "_STEP_ON_HOST", 20)


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line by which a command refuses its input."""
    assert main([str(a) for a in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("\n") and said.err.count("\n") == 1, said.err
    return said.err.strip()


def _rows(output: str) -> dict[str, str]:
    """The rest of each line, by its first word."""
    lines = (line.strip().partition(" ") for line in output.splitlines())
    return {first: rest.strip() for first, _, rest in lines}


# --- the parser ---------------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert _run("--version").stdout == f"cukern {cukern.__version__}\n"
    output = _run("--help").stdout
    assert {*COMMANDS} <= {*output.split()}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert COMMANDS[command][1][1:] in output
    assert "--" in output.split("options:")[1] or command == "doctor"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["route"], "cukern: argument COMMAND: invalid choice: 'route' (choose from"),
        (["compil"], "cukern: argument COMMAND: invalid choice: 'compil' (did you mean compile?)"),
        (
            ["demo", "--model", "mixtrl"],
            "cukern demo: argument --model: invalid choice: 'mixtrl' (did you mean mixtral",
        ),
        (["demo", "--model", "gpt-2"], "cukern demo: argument --model: invalid choice: 'gpt-2'"),
        (["demo", "--tokens", "many"], "cukern demo: argument --tokens: invalid int value: 'many'"),
        (["demo", "--tokens", "0"], "cukern demo: --tokens must be at least 1, got 0"),
        (["demo", "--tokens", "99999999"], "cukern demo: --tokens must be at most 1048576 without --logits, got"),
        (["demo", "--seed", "-1"], "cukern demo: --seed must be at least 0, got -1"),
        (["compile", "--arch"], "cukern compile: argument --arch: expected one argument"),
        (["doctor", "--now"], "cukern: unrecognized arguments: --now"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The parser that meets an unknown option is the outer one, but the command is known.
    expected = message.replace("cukern: unrec", "cukern doctor: unrec")
    assert _refused(capsys, *arguments).startswith(expected)


def test_a_refusal_as_a_user_sees_it() -> None:
    done = _run("demo", "--logits", "missing.npy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cukern demo: missing.npy: No such file or directory\n"


@pytest.mark.parametrize(
    ("started_as", "prog"), [("/site/cukern/__main__.py", "python -m cukern"), ("/venv/bin/cukern", "cukern")]
)
def test_the_help_names_the_command_as_it_was_called(
    started_as: str, prog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [started_as])
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {prog} doctor ")


def test_no_command_is_a_wish_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr()
    assert said.err == "" and said.out.startswith("usage: ") and {*COMMANDS} <= {*said.out.split()}


def test_importing_the_command_line_is_quick() -> None:
    heavy = ["rich", "torch", "safetensors", "cukern.commands.demo", "cukern.commands.doctor", "cukern.commands.bench"]
    code = f"import sys, cukern.__main__; print([m for m in {heavy} if m in sys.modules])"
    settings = os.environ | {"CUKERN_COMPILE": "lazy"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


# --- demo ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", demo.MODELS)
def test_demo_routes_each_model(name: str, no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    model = demo.MODELS[name]
    assert main(["demo", "--model", name, "--tokens", "48"]) == 0
    output = capsys.readouterr().out
    rows = _rows(output.split("tokens per expert")[0])
    assert f"{model.name}: {model}" in output
    assert "48 made-up tokens" in output

    slots = [rows[str(rank)] for rank in range(1, model.topk + 1)]
    assert all(len(slot.split()) == 2 * 5 for slot in slots)
    for token in range(5):
        ids = [int(slot.split()[2 * token]) for slot in slots]
        weights = [float(slot.split()[2 * token + 1]) for slot in slots]
        assert len(set(ids)) == model.topk and max(ids) < model.experts
        assert sum(weights) == pytest.approx(1, abs=1e-3)

    mean = 48 * model.topk / model.experts
    assert f"mean {mean:.0f} tokens" in output
    assert ("with the bias" in output) == model.biased
    assert "No GPU can be used here, so the NumPy reference routed the tokens" in output
    words = " ".join(output.split())
    built = re.search(r"The kernel for sm_90a, [^:]*: (\w*gate\w*<.*>), (\d+) registers, no spills\.", words)
    assert built and 16 <= int(built[2]) <= 255
    # `cukern explain` names the same kernel for the demo's call.
    function, sizes = "topk_softmax", {"tokens": 48, "experts": model.experts, "topk": model.topk}
    if model.scoring == "sigmoid":
        function, sizes = "moe_fused_gate", sizes | {"num_expert_group": model.groups, "topk_group": model.topk_group}
    given = ",".join(f"{name}={size}" for name, size in sizes.items())
    assert main(["explain", function, "--shape", given, "--dtype", "float32", "--arch", "H200"]) == 0
    assert f"kernel {built[1]} why" in " ".join(capsys.readouterr().out.split())


def test_demo_takes_the_kernel_from_the_cache(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["demo", "--model", "mixtral", "--tokens", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The kernel for sm_90a, from the cache: gate_by_thread<T=float, EXPERTS=8, SCORING=SOFTMAX>," in said


def test_demo_is_repeatable(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in "0", "0", "1":
        assert main(["demo", "--model", "mixtral", "--tokens", "9", "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out.split("No GPU")[0])
    assert outputs[0] == outputs[1] != outputs[2]


def test_demo_without_utf8() -> None:
    done = _run("demo", "--model", "qwen3-moe", "--tokens", "8", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and "# is the mean" not in done.stdout and "= is the mean" in done.stdout


def test_demo_charts_the_load(no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Each token's two largest logits are known, so the load is.
    logits = np.zeros((10, 8), np.float32)
    logits[:, 3] = 2
    logits[:7, 5] = 1
    logits[7:, 0] = 1
    np.save(tmp_path / "logits.npy", logits)
    assert main(["demo", "--logits", str(tmp_path / "logits.npy")]) == 0
    rows = _rows(capsys.readouterr().out.split("tokens per expert")[1])
    counts = [int(rows[str(expert)].split()[-1]) for expert in range(8)]
    assert counts == [3, 0, 0, 10, 0, 7, 0, 0]
    assert len(rows["3"].split()[0]) == 30 and len(rows["5"].split()[0]) == 21
    assert rows["busiest"] == "4.00 x the mean"
    assert rows["idle"] == "5 of 8"


def test_the_bias_evens_out_the_load(no_gpu: None) -> None:
    model = demo.MODELS["deepseek-v3"]
    make = demo._made_up(model, np.random.default_rng(0))
    sample, others = make(1024), make(1024)
    bias = demo.balancing_bias(model, sample)

    def busiest(by: Any) -> float:
        load = np.bincount(demo._route_on_host(model, others, by)[1].ravel(), minlength=256)
        return load.max() / load.mean()

    assert busiest(bias) < 0.5 * busiest(np.zeros_like(bias))


def test_the_agreement_is_told_as_it_is(rng: np.random.Generator) -> None:
    model = demo.MODELS["deepseek-v3"]
    logits, bias = rng.standard_normal((40, 256), np.float32), rng.standard_normal(256, np.float32) / 10
    twin = demo._route_on_host(model, logits, bias)
    weights, ids = twin[0].copy(), twin[1].copy()
    weights[3, 2] += np.float32(0.25)
    words = demo.agreement(model, logits, bias, weights, ids, twin)
    assert words == "ids equal in 40 of 40 tokens, weights there within 2.5e-01"

    ids[3, [0, 1]] = ids[3, [1, 0]]
    choice = 1 / (1 + np.exp(-logits[3].astype(np.float64))) + bias
    gap = abs(choice[ids[3, 0]] - choice[ids[3, 1]])
    words = demo.agreement(model, logits, bias, weights, ids, twin)
    assert words.startswith("ids equal in 39 of 40 tokens, weights there within 0.0e+00; ")
    assert words.endswith(f"; where ids differ, the choices are within {gap:.1e}")


# --- demo: a user's file ------------------------------------------------------------------------------


def _save(path: Path, **tensors: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, tensors["logits"])
    elif path.suffix == ".npz":
        np.savez(path, **tensors)
    else:
        from safetensors.numpy import save_file

        save_file(tensors, path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_demo_routes_a_file(
    suffix: str,
    dtype: str,
    no_gpu: None,
    tmp_path: Path,
    rng: np.random.Generator,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logits = rng.standard_normal((20, 256)).astype(arrays.numpy_dtype(dtype))
    bias = None if suffix == ".npy" else (rng.standard_normal(256) / 10).astype(np.float32)
    tensors = {"logits": logits} | ({} if bias is None else {"bias": bias})
    path = _save(tmp_path / f"router{suffix}", **tensors)
    assert main(["demo", "--logits", str(path), "--tokens", "12"]) == 0
    output = capsys.readouterr().out
    words = " ".join(output.split())
    routed = "float32" if dtype == "float64" else dtype
    assert f"12 of 20 tokens of router{suffix}, {routed}, {'no' if bias is None else 'with a'} bias" in words
    assert ("logits converted from float64 to float32" in words) == (dtype == "float64")

    used = logits[:12].astype(routed) if dtype == "float64" else logits[:12]
    zero = np.zeros(256, np.float32)
    weights, ids = cukern.moe_fused_gate(used, zero if bias is None else bias, 8, 4, 8)
    rows = _rows(output)
    for rank in range(8):
        expected = [part for t in range(5) for part in (str(ids[t, rank]), f"{weights[t, rank]:.4f}")]
        assert rows[str(rank + 1)].split() == expected


def test_demo_takes_other_layouts(no_gpu: None, tmp_path: Path, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((6, 12)).astype(np.float32)
    expected, *_ = demo._load_file(_save(tmp_path / "plain.npy", logits=logits), None)
    for name, same in {"fortran": np.asfortranarray(logits), "big_endian": logits.astype(">f4")}.items():
        loaded, bias, _ = demo._load_file(_save(tmp_path / f"{name}.npy", logits=same), None)
        assert bias is None and loaded.flags.c_contiguous and loaded.dtype == np.float32
        np.testing.assert_array_equal(loaded, expected)


def test_the_sizes_decide_the_model() -> None:
    assert {m.experts: demo._model_for(m.experts, m.biased) for m in demo.MODELS.values()} == {
        m.experts: m for m in demo.MODELS.values()
    }
    # A router that takes a bias also goes without; one that takes none is not the one of a file with a bias.
    assert demo._model_for(256, False) is demo.MODELS["deepseek-v3"]
    assert demo._model_for(128, True)[1:] == (128, 1, 1, 8, "sigmoid", True)
    assert demo._model_for(96, False)[1:] == (96, 1, 1, 8, "softmax", False)
    assert demo._model_for(5, True)[1:] == (5, 1, 1, 5, "sigmoid", True)


def test_demo_takes_any_number_of_experts(
    no_gpu: None, tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _save(tmp_path / "odd.npy", logits=rng.standard_normal((4, 77)).astype(np.float16))
    assert main(["demo", "--logits", str(path)]) == 0
    output = capsys.readouterr().out
    assert "77 experts, top 8, softmax" in output and " 64-76 " in output
    assert re.search(r"The kernel for sm_90a, [^:]*: moe_gate<[^>]*__half, [^>]*0, ", " ".join(output.split()))


def test_demo_routes_nan(no_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _save(tmp_path / "nan.npy", logits=np.full((3, 8), np.nan, np.float32))
    assert main(["demo", "--logits", str(path), "--model", "mixtral"]) == 0
    rows = _rows(capsys.readouterr().out.split("tokens per expert")[0])
    assert rows["1"].split() == ["0", "0.0000"] * 3
    assert rows["2"].split() == ["1", "0.0000"] * 3


LOGITS = np.zeros((4, 8), np.float32)
# What is in the file, and what is said of it.
BAD_FILES: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "dimensions.npy": ({"logits": LOGITS[0]}, "logits must be of shape [tokens, experts], got [8]"),
    "scalar.npy": ({"logits": np.float32(1)}, "logits must be of shape [tokens, experts], got []"),
    "empty.npy": ({"logits": LOGITS[:0]}, "logits must be of shape [tokens, experts], got [0, 8]"),
    "integers.npy": ({"logits": LOGITS.astype(np.int64)}, "logits must be float32, float16, bfloat16 or float64"),
    "fp8.safetensors": ({"logits": LOGITS.astype(ml_dtypes.float8_e5m2)}, "logits must be float32, float16, bfloat16"),
    "objects.npy": ({"logits": np.array([[{}]], object)}, "Python objects"),
    "noise.npy": (bytes(range(256)), "not a file of NumPy, or one of Python objects, which are not loaded"),
    "nothing.npy": (b"", "No data left in file"),
    "text.npy": (b"logits: 1, 2, 3\n", ""),
    "text.npz": (b"logits: 1, 2, 3\n", ""),
    "text.safetensors": (b"logits: 1, 2, 3\n", "not a safetensors file"),
    "cut.npz": (b"PK\x03\x04", "File is not a zip file"),
    "names.npz": ({"scores": LOGITS}, "holds no array named 'logits' (it holds scores)"),
    "names.safetensors": ({"scores": LOGITS}, "holds no array named 'logits' (it holds scores)"),
    "bias.npz": ({"logits": LOGITS, "bias": LOGITS[0, :7]}, "bias must be of shape [experts] = [8], got [7]"),
    "bias.safetensors": ({"logits": LOGITS, "bias": LOGITS}, "bias must be of shape [experts] = [8], got [4, 8]"),
    "wide.npy": ({"logits": np.zeros((1, 1025), np.float32)}, "at most 1024 experts, got 1025"),
    "logits.txt": (b"1 2 3\n", "must end in .npy, .npz or .safetensors"),
}


# NumPy leaves the file open when it is no archive.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", BAD_FILES)
def test_demo_refuses_a_bad_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name == "objects.npy":
        np.save(path, content["logits"], allow_pickle=True)
    else:
        _save(path, **content)
    said = _refused(capsys, "demo", "--logits", path)
    assert said.startswith(f"cukern demo: {path}: ") and message in said and "unsafely" not in said


def test_demo_refuses_a_cut_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _save(tmp_path / "cut.npy", logits=np.zeros((64, 256), np.float32))
    path.write_bytes(path.read_bytes()[:1000])
    assert str(path) in _refused(capsys, "demo", "--logits", path)


def test_demo_refuses_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder.npy"
    folder.mkdir()
    assert _refused(capsys, "demo", "--logits", folder) == f"cukern demo: {folder}: Is a directory"


@pytest.mark.parametrize(
    ("model", "tensors", "message"),
    [
        ("deepseek-v3", {"logits": LOGITS}, "DeepSeek-V3 has 256 experts, got 8"),
        ("mixtral", {"logits": LOGITS, "bias": LOGITS[0]}, "Mixtral takes no bias"),
    ],
)
def test_demo_refuses_a_file_of_another_model(
    model: str, tensors: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _save(tmp_path / "router.npz", **tensors)
    assert _refused(capsys, "demo", "--model", model, "--logits", path) == f"cukern demo: {path}: {message}"


def test_demo_names_the_package_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _save(tmp_path / "router.safetensors", logits=LOGITS)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert _refused(capsys, "demo", "--logits", path).endswith("pip install safetensors")


def test_demo_without_nvrtc(no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiler, "available", lambda: "ModuleNotFoundError: No module named 'cupy_backends'")
    assert main(["demo", "--model", "mixtral", "--tokens", "3"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Nor can a kernel be compiled here (ModuleNotFoundError" in output
    assert cukern.commands.INSTALL in output


# --- compile ------------------------------------------------------------------------------------------

STEM = "embedding"  # few kernels, quick to compile


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache that one command filled for sm_80, and what the command said."""
    cache = tmp_path_factory.mktemp("compiled") / "cache"
    done = _run("compile", "--arch", "sm_80", "--op", STEM, CUKERN_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    return cache, done.stdout


def _table_row(output: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [STEM])


def test_compile_fills_the_cache(filled_cache: tuple[Path, str]) -> None:
    cache, output = filled_cache
    count = len(list(kernel.instances(STEM)))
    _, arch, kernels, compiled, cached, seconds, registers, spills = _table_row(output)
    assert (arch, kernels, compiled, cached, spills) == ("sm_80", str(count), str(count), "0", "none")
    assert float(seconds) > 0
    fewest, most = map(int, registers.split("-"))
    assert 16 <= fewest <= most <= 255
    assert len(list(cache.glob("*-sm_80-*.cubin"))) == count
    assert str(cache) in output


def test_compile_takes_what_is_in_the_cache(filled_cache: tuple[Path, str]) -> None:
    cache, _ = filled_cache
    count = len(list(kernel.instances(STEM)))
    # A function stands for its family, and a target named twice is one.
    arguments = ("--arch", "80", "--arch", "80,sm_80", "--op", "embedding_lookup", "--op", STEM)
    done = _run("compile", *arguments, CUKERN_CACHE_DIR=str(cache))
    assert _table_row(done.stdout)[2:5] == [str(count), "0", str(count)], done.stderr
    assert done.stdout.count(STEM) == 1


def test_compile_knows_the_family_of_every_function() -> None:
    for stem in kernel.KERNELS:
        names = importlib.import_module(f"cukern.ops.{stem}").__all__
        for name in {*names} & {*cukern.__all__} - {"AllToAllState", "AllToAllError", "swap_blocks"}:
            assert compile_command._stems([name]) == {stem: [] if name == stem else [name]}
            assert compile_command._stems([name, stem]) == {stem: []}


def _doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path, *arguments: str) -> str:
    """What `doctor` prints on a machine without a GPU, for a cache; it tries no kernels."""
    monkeypatch.setattr(doctor, "driver", lambda: NOTHING)
    monkeypatch.setattr(doctor, "try_kernels", lambda arch: [])
    for name, value in (("CUKERN_CACHE_DIR", cache), ("CUKERN_COMPILE", "lazy"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, str(value))
    assert main(["doctor", *arguments]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_doctor_counts_what_is_compiled(
    filled_cache: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, _ = filled_cache
    count = len(list(kernel.instances(STEM)))
    said = _doctor(monkeypatch, capsys, cache, "--kernels")
    assert re.search(rf"{STEM} +sm_80 +{count} of {count} +0 +0\b", said)
    assert re.search(rf"{cache}, drwx\S+, {count} kernels", " ".join(said.split()))

    # Under another name a cubin is what another version of the sources left behind.
    old = tmp_path / "old"
    old.mkdir(mode=0o700)
    cubin = min(cache.glob("*.cubin"))
    for path in (cubin, cubin.with_name(f"{cubin.name}.json")):
        (old / path.name.replace("-sm_80-", "-sm_80-0")).write_bytes(path.read_bytes())
    assert re.search(rf"{STEM} +sm_80 +0 of {count} +0 +1\b", _doctor(monkeypatch, capsys, old, "--kernels"))


def test_doctor_counts_the_kernels_of_a_folder_that_is_only_read(
    filled_cache: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, _ = filled_cache
    count = len(list(kernel.instances(STEM)))
    monkeypatch.setattr(compiler, "_cache", lambda folder: compiler._Cache(True, "Read-only file system"))
    said = " ".join(_doctor(monkeypatch, capsys, cache).split())
    assert f"ok cache {cache}, drwx" in said and f"read-only (Read-only file system), {count} kernels" in said
    assert f"sm_80: {count} of {count} of the import compiled" in said
    (tmp_path / "empty").mkdir()
    said = " ".join(_doctor(monkeypatch, capsys, tmp_path / "empty").split())
    assert "note cache " in said and "0 kernels, 0.0 MiB -> fill it where it can be written: cukern compile" in said


def test_compile_needs_no_folder_to_write_to_where_nothing_is_missing(
    filled_cache: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, _ = filled_cache
    count = len(list(kernel.instances(STEM)))
    monkeypatch.setattr(compiler, "_cache", lambda folder: compiler._Cache(True, "Read-only file system"))
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(cache))
    assert main(["compile", "--arch", "80", "--op", STEM]) == 0
    assert _table_row(capsys.readouterr().out)[2:5] == [str(count), "0", str(count)]
    said = _refused(capsys, "compile", "--arch", "86", "--op", STEM)
    assert f"{count} of {count} kernels are missing in {cache}, which cannot be written: Read-only file system;" in said


def test_compile_checks_what_is_there(
    filled_cache: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, _ = filled_cache
    count = len(list(kernel.instances(STEM)))
    copy = shutil.copytree(cache, tmp_path / "copy")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(copy))
    monkeypatch.setattr(compiler, "compile_all", None)
    check = ("compile", "--check", "--arch", "80", "--op", STEM)
    assert main([*check]) == 0
    said = capsys.readouterr().out
    assert _table_row(said)[1:] == ["sm_80", str(count), str(count), "0"]
    assert said.splitlines()[-1] == f"all {count} kernels are in {copy}"

    assert main([*check, "--op", "silu_and_mul"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"1 of {count + 1} kernels are missing in {copy}: the same command without --check compiles them"
    )
    min(copy.glob("*.cubin")).write_bytes(b"")  # a file that is not loaded
    assert main([*check]) == 1
    said = capsys.readouterr().out
    assert _table_row(said)[3:] == [str(count - 1), "1"]
    says = f"1 of {count} kernels are missing in {copy}: the same command without --check compiles them"
    assert said.splitlines()[-1] == says


def test_the_progress_of_compile_is_one_for_all_families(tmp_path: Path) -> None:
    given = ("--arch", "80,86", "--op", STEM, "--op", "softcap")
    done = _run("compile", *given, CUKERN_CACHE_DIR=str(tmp_path / "cache"))
    total = 2 * len([*kernel.instances(STEM), *kernel.instances("softcap")])
    lines = done.stderr.splitlines()
    assert lines[0] == f"cukern compile: {total} kernels for sm_80, sm_86, {total} of them to compile"
    counts = [re.match(rf"cukern compile: (\d+) of {total}, \d+ s: (\w+) for sm_8[06]$", line) for line in lines[1:]]
    assert all(counts), done.stderr
    numbers = [int(found[1]) for found in counts if found]
    assert numbers == sorted(numbers) and (numbers[0], numbers[-1]) == (0, total)
    assert {found[2] for found in counts if found} == {STEM, "softcap"}


def test_the_help_of_compile_names_the_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compile", "--help"])
    said, page = capsys.readouterr().out, (ROOT / "docs/guides/compile.md").read_text()
    for name, checkpoints in NAMED.items():
        assert f"\n  {name}: {' and '.join(checkpoints)}\n" in said
        assert f"| `{name}` | {', '.join(checkpoints)} |" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--arch", "hopper"),
            "--arch must be like 80, 90a or sm_100a, or a card such as H200, L40S or A100, got 'hopper'",
        ),
        (("--arch", "80,"), "--arch must be like 80, 90a or sm_100a, or a card such as H200, L40S or A100, got ''"),
        (("--arch", "75"), "--arch must be a GPU of compute capability 8.0 or later, got '75'"),
        (("--arch", "H200,sm_70"), "--arch must be a GPU of compute capability 8.0 or later, got 'sm_70'"),
        (("--arch", "Tesla T4"), "--arch must be a GPU of compute capability 8.0 or later, got 'Tesla T4'"),
        (("--arch", "80,998"), "cannot compile for sm_998a (nvrtc: error: invalid value for --gpu-architecture"),
        (("--arch", "80a"), "cannot compile for sm_80a"),
        (("--arch", "80", "--op", "matmul"), "or a function of cukern, got 'matmul'"),
        (("--arch", "80", "--op", "CompileError"), "or a function of cukern, got 'CompileError'"),
        ((), "there is no GPU here to compile for: name one with --arch"),
    ],
)
def test_compile_refuses(
    arguments: tuple[str, ...], message: str, no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in _refused(capsys, "compile", *arguments)


def test_hopper_is_compiled_with_its_own_instructions() -> None:
    from cukern.commands.compile import _archs

    assert _archs(["80,86,90,sm_90a", "100,120a"]) == ["80", "86", "90a", "100a", "120a"]
    assert _archs(["h200,NVIDIA A100,L40S", "RTX 5090"]) == ["90a", "80", "89", "120a"]


def test_compile_refuses_a_cache_it_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = _run("compile", "--arch", "80", CUKERN_CACHE_DIR=str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"cukern compile: the cache folder {tmp_path / 'file'} cannot be used: ")
    assert done.stderr.count("\n") == 1


def test_compile_refuses_without_nvrtc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiler, "available", lambda: "ImportError: libnvrtc.so.13\nand more")
    said = _refused(capsys, "compile", "--arch", "80")
    assert said == f"cukern compile: NVRTC cannot be used (ImportError: libnvrtc.so.13): {cukern.commands.INSTALL}"


def test_a_kernel_that_does_not_compile_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise cukern.CompileError("moe_gate.cu(28): error: expected a ;")

    monkeypatch.setattr(compiler, "missing", lambda instances, arch: list(instances))
    monkeypatch.setattr(compiler, "compile_all", fail)
    assert main(["compile", "--arch", "80"]) == 1
    assert "a kernel did not compile\nmoe_gate.cu(28): error: expected a ;" in capsys.readouterr().err


def test_resources_are_read_from_the_log() -> None:
    log = (
        "ptxas info    : Function properties for f\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 420 bytes cmem[0]"
    )
    assert cukern.commands.resources({"log": log}) == (40, 20)


# --- doctor -------------------------------------------------------------------------------------------


def test_doctor_reports_a_machine_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _doctor(monkeypatch, capsys, tmp_path / "cache")
    words = said.split()
    for subject in ("cukern", "Python", "system", "driver", "GPU", "CuPy", "NVRTC", "headers", "torch", "cache"):
        assert subject in words
    assert "PROBLEM" not in said


def test_doctor_fits_on_a_screen(
    filled_cache: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, _ = filled_cache
    count = len(list(kernel.instances(STEM)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    output = _doctor(monkeypatch, capsys, cache)
    assert len(output.splitlines()) <= 24, output
    assert re.search(rf"ok +kernels +sm_80: {count} of \d+ of the import compiled, 0 of first use", output)
    assert re.search(rf"ok +cukern +{re.escape(cukern.__version__)}, in ", output)
    said = " ".join(output.split())
    assert "variables CUKERN_COMPILE=lazy" in said and "CUDA_VISIBLE_DEVICES=0" in said
    assert "compiled at their first use -> python -m cukern compile --for MODEL --arch 90a" in said
    assert " of other versions" not in said


def test_progress_is_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def work(**shown: Any) -> list[str]:
        with progress("measuring", 20, **shown) as advance:
            advance(0)
            for i in range(20):
                advance(1, f"case {i}")
        return capsys.readouterr().err.splitlines()

    assert work() == []  # of no command
    with in_command("cukern bench"):
        lines = work()
        assert work(shown=False) == []
    assert len(lines) == 11
    assert lines[0] == "cukern bench: 0 of 20, 0 s: measuring" and lines[-1] == "cukern bench: 20 of 20, 0 s: case 19"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    with in_command("cukern bench"), progress("measuring", 4) as advance, ThreadPoolExecutor(2) as pool:
        for i in range(4):
            pool.submit(advance, 1, f"case {i}")
    assert "cukern bench: case" in screen.getvalue() and "4/4" in screen.getvalue()


def test_the_demo_tells_of_its_progress(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "64"]) == 0
    said = capsys.readouterr().err
    assert "cukern demo: 2 of 2, " in said and "routing tokens" in said
    assert "cukern demo: 3 of 3, " in said and "encoding texts" in said


def test_doctor_fails_on_a_cache_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = _run("doctor", CUKERN_CACHE_DIR=str(tmp_path / "file"))
    assert done.returncode == 1
    assert "PROBLEM  cache" in done.stdout and "-> export CUKERN_CACHE_DIR=" in done.stdout
    assert "1 problem:" in done.stdout and "Traceback" not in done.stderr


def test_doctor_does_not_import_torch() -> None:
    pytest.importorskip("torch")
    tries = "from cukern.commands import doctor; doctor.try_kernels = lambda arch: []"
    code = f"import sys; from cukern.__main__ import main; {tries}; main(['doctor']); print('torch' in sys.modules)"
    settings = os.environ | {"CUKERN_COMPILE": "lazy"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def _problem(findings: list[doctor.Finding]) -> doctor.Finding:
    (problem,) = (finding for finding in findings if finding.kind == "problem")
    return problem


def _fine(findings: list[doctor.Finding]) -> bool:
    return all(finding.kind == "ok" for finding in findings)


CUDA_12 = doctor.Driver((12, 8), [HOPPER])
CUDA_13 = doctor.Driver((13, 0), [HOPPER])
NOTHING = doctor.Driver(None, [])


def test_doctor_on_the_driver() -> None:
    assert _fine(doctor.look_at_driver(CUDA_13))
    assert "H200, 141 GiB, sm_90a" in doctor.look_at_driver(CUDA_13)[1].state
    assert not any(f.kind == "problem" for f in doctor.look_at_driver(NOTHING))
    assert not any(f.kind == "problem" for f in doctor.look_at_driver(doctor.Driver((13, 0), [])))

    broken = _problem(doctor.look_at_driver(doctor.Driver((13, 0), [], "system not yet initialized (CUDA error 802)")))
    assert "802" in broken.state and "nvidia-smi" in broken.fix

    turing = doctor.Gpu("T4", (7, 5), 15 << 30)
    old = _problem(doctor.look_at_driver(doctor.Driver((13, 0), [turing, HOPPER])))
    assert old.subject == "GPU 0" and old.fix.endswith("CUDA_VISIBLE_DEVICES=1")


def test_doctor_on_cupy() -> None:
    newest, older = ("cupy-cuda13x", "14.2.0"), ("cupy-cuda12x", "14.2.0")
    assert _fine(doctor.look_at_cupy(CUDA_13, [newest], None))
    assert _fine(doctor.look_at_cupy(CUDA_12, [older], None))
    # A driver runs what was made for an older CUDA.
    assert _fine(doctor.look_at_cupy(CUDA_13, [older], None))

    missing = ImportError("No module named 'cupy'")
    assert _problem(doctor.look_at_cupy(CUDA_12, [], missing)).fix == 'pip install "cukern[cuda12]"'
    assert _problem(doctor.look_at_cupy(CUDA_13, [], missing)).fix == 'pip install "cukern[cuda13]"'
    assert [f.kind for f in doctor.look_at_cupy(NOTHING, [], missing)] == ["note"]

    ahead = _problem(doctor.look_at_cupy(CUDA_12, [newest], None))
    assert ahead.fix.startswith('pip uninstall -y cupy-cuda13x && pip install "cukern[cuda12]"')
    both = _problem(doctor.look_at_cupy(CUDA_13, [older, newest], None))
    assert both.fix == 'pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install "cukern[cuda13]"'
    unloadable = _problem(doctor.look_at_cupy(CUDA_13, [newest], ImportError("libcudart.so.13: no such\nfile")))
    assert "libcudart.so.13: no such file" in unloadable.state
    no_home = _problem(doctor.look_at_cupy(CUDA_13, [newest], PermissionError("/home/x")))
    assert no_home.fix.startswith("export CUPY_CACHE_DIR=")


def test_doctor_on_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fine(doctor.look_at_nvrtc(CUDA_13))
    future = doctor.Driver((13, 0), [doctor.Gpu("Future", (99, 8), 1 << 30)])
    assert "cannot compile for sm_998a" in _problem(doctor.look_at_nvrtc(future)).state
    states = {finding.subject: finding.state for finding in doctor.look_at_nvrtc(CUDA_13)}
    assert states["NVRTC"] == compiler.nvrtc_version()
    assert states["CUDA headers"].startswith(f"{compiler.headers_version()}, in ")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "nvrtc_version", lambda: "12.6.85")
        old = next(finding for finding in doctor.look_at_nvrtc(CUDA_12) if finding.subject == "NVRTC")
        assert (old.kind, old.fix) == ("note", 'pip install "cukern[cuda12]"')
        assert old.state.startswith("12.6.85: older than 12.8")

    def no_headers() -> str:
        raise RuntimeError("no folder")

    monkeypatch.setattr(compiler, "cuda_include_directory", no_headers)
    assert _problem(doctor.look_at_nvrtc(CUDA_12)).fix == 'pip install "cukern[cuda12]"'
    monkeypatch.setattr(compiler, "available", lambda: "ImportError: libnvrtc.so.13")
    assert "libnvrtc.so.13" in _problem(doctor.look_at_nvrtc(CUDA_13)).state


def test_doctor_on_torch() -> None:
    assert _fine(doctor.look_at_torch(CUDA_13, ("2.11.0+cu130", "13.0")))
    assert _fine(doctor.look_at_torch(CUDA_13, ("2.11.0+cu128", "12.8")))
    assert _fine(doctor.look_at_torch(NOTHING, ("2.11.0+cpu", None)))
    assert [f.kind for f in doctor.look_at_torch(CUDA_13, None)] == ["note"]
    assert [f.kind for f in doctor.look_at_torch(CUDA_13, ("2.11.0+cpu", None))] == ["note"]
    assert "CUDA 12" in _problem(doctor.look_at_torch(CUDA_12, ("2.11.0+cu130", "13.0"))).fix


def test_doctor_reads_the_build_of_torch() -> None:
    torch = pytest.importorskip("torch")
    # A wheel of an index has no local part in its version.
    assert doctor.torch_build() == (importlib.metadata.version("torch"), torch.version.cuda)


def test_doctor_on_kernels_that_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    count = len(list(kernel.instances("moe_gate")))
    rows, findings = doctor.look_at_kernels(CUDA_13)
    assert ("moe_gate", "90a", 0, count, 0, 0) in rows
    total = sum(len(list(kernel.instances(stem))) for stem in kernel.KERNELS)
    advice = "python -m cukern compile --arch 90a"
    assert findings == [
        doctor.Finding(
            "kernels", f"{total} of {total} of the import not compiled for sm_90a: done at first use", "note", advice
        )
    ]


def test_doctor_names_the_families_that_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled_cache: tuple[Path, str]
) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(filled_cache[0]))
    monkeypatch.setattr(kernel, "KERNELS", {stem: kernel.KERNELS[stem] for stem in (STEM, "moe_gate", "padding")})
    ampere = doctor.Driver((13, 0), [doctor.Gpu("A100", (8, 0), 80 << 30)])
    _, findings = doctor.look_at_kernels(ampere)
    assert [f.fix for f in findings] == ["python -m cukern compile --op moe_gate --op padding --arch 80"]
    monkeypatch.setattr(kernel, "KERNELS", {STEM: kernel.KERNELS[STEM]})
    assert doctor.look_at_kernels(ampere)[1] == []


# --- models that are not here, and devices ------------------------------------------------------------


@pytest.mark.parametrize("command", ["encode", "translate", "generate"])
def test_a_model_that_is_not_here_is_downloaded_first(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "texts").write_text("one\n")
    given = ["--prompt", "one"] if command == "generate" else ["--input", tmp_path / "texts"]
    fetch = "`hf download openai/gpt-oss-20b --local-dir gpt-oss-20b`"
    said = _refused(capsys, command, "--model", "openai/gpt-oss-20b", *given)
    assert said == f"cukern {command}: --model: openai/gpt-oss-20b is no directory here; download it first: {fetch}"
    said = _refused(capsys, command, "--model", tmp_path / "none", *given)
    assert said == f"cukern {command}: --model: {tmp_path / 'none'} is no directory"


def test_a_model_to_compile_for_is_downloaded_first(capsys: pytest.CaptureFixture[str]) -> None:
    said = _refused(capsys, "compile", "--arch", "90a", "--for", "openai/gpt-oss-20b")
    assert "download it first: `hf download openai/gpt-oss-20b --local-dir gpt-oss-20b`" in said


@pytest.mark.parametrize("command", ["encode", "translate"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "cuda"], "--device cuda needs a GPU, and torch "),
        (["--device", "cuda:1", "--library", "torch"], "--device cuda:1 needs a GPU, and torch "),
        (["--device", "abacus"], "--device must be cpu, cuda or cuda:N, got abacus"),
        (["--library", "cupy"], "--library cupy needs a GPU and CuPy, and there is no GPU here"),
        (["--library", "cupy", "--device", "0"], "--library cupy needs a GPU and CuPy, and there is no GPU here"),
    ],
)
def test_a_device_that_is_not_here(
    command: str, given: list[str], message: str, no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "texts").write_text("one\n")
    said = _refused(capsys, command, "--model", tmp_path, "--input", tmp_path / "texts", *given)
    assert said.startswith(f"cukern {command}: {message}")


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_generate_names_the_package_it_lacks(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from cukern.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["generate", "--config", "tiny", "--random-weights"]
    settings = os.environ | {"CUKERN_COMPILE": "lazy"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=settings, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith("cukern generate: torch and transformers are needed (")


@pytest.mark.parametrize("name", ["folder", "none/trace.json"])
def test_profile_moe_refuses_a_trace_that_it_cannot_write(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    pair = ["--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "AutoExperts"]
    assert f"--trace {tmp_path / name}" in _refused(capsys, "profile-moe", *pair, "--trace", tmp_path / name)


# --- tables -------------------------------------------------------------------------------------------


def test_a_table_is_cut_between_its_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.table import Table

    headings = ["op", *(f"baseline {i}" for i in range(8))]
    for width in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        table = Table()
        for heading in headings:
            table.add_column(heading)
        table.add_row("decoder_attention", *(f"{i}00.5 (12.{i}x)" for i in range(8)))
        cukern.commands.console().print(table)
        output = capsys.readouterr().out
        assert max(map(len, output.splitlines())) <= width
        for word in [*headings, *(f"{i}00.5 (12.{i}x)" for i in range(8))]:
            assert word in output, (width, word)
        assert output.count("decoder_attention") == {40: 8, 80: 3, 200: 1}[width]


@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--moe"), ("doctor", "--kernels")])
def test_no_word_is_broken_at_80_columns(
    arguments: tuple[str, ...],
    filled_cache: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = {}
    for width in (400, 80):
        monkeypatch.setenv("CUKERN_CACHE_DIR", str(filled_cache[0]))
        monkeypatch.setattr(doctor, "driver", lambda: NOTHING)
        monkeypatch.setattr(doctor, "try_kernels", lambda arch: [])
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([*arguments]) == 0
        output = capsys.readouterr().out
        # A word that is wider than the terminal, such as a path, stays whole.
        assert all(len(line.rstrip()) <= width or len(line.split()) == 1 for line in output.splitlines())
        words[width] = {*re.sub("[─]+", "", output).split()}
    assert words[80] == words[400]


# --- profile-moe --------------------------------------------------------------------------------------


def test_the_host_trace_has_the_time_of_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, own = HostTrace(), OPS["rms_norm"]
    assert own.twin is not None
    inside: list[list[str]] = []

    @functools.wraps(own.twin)
    def twin(*args: Any, **kwargs: Any) -> Any:
        inside.append([name for _, name, _ in trace._open])
        return reference.rms_norm(*args, **kwargs)

    monkeypatch.setattr(own, "twin", twin)
    with trace.running():
        for _ in range(2):
            cukern.rms_norm(np.ones((3, 8), np.float32), None)
            cukern.build_sequence_length_padding_offset(np.array([2, 1], np.int32), 4)
    assert inside == [["rms_norm"]] * 2
    assert [event["name"] for event in trace.events] == ["rms_norm", "build_sequence_length_padding_offset"] * 2


_SMALL = ["--tokens=5", "--experts=4", "--inter=128", "--hidden=128"]


@pytest.mark.parametrize(
    ("pf_name", "experts_name", "stage"),
    [
        ("PushPrepareAndFinalize", "AutoExperts", "all_to_all_combine"),
        ("PushPrepareAndFinalize:batched", "BatchedAutoExperts", "moe_sort_batched"),
        ("NcclPrepareAndFinalize", "AutoExperts", "permute_rows"),
    ],
)
def test_profile_moe_traces_an_exchange(
    pf_name: str,
    experts_name: str,
    stage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(kernel, "device_count", lambda: 0)
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "trace.json"
    arguments = ["--pf-type", pf_name, "--experts-type", experts_name, "--trace", str(path), *_SMALL]
    assert main(["profile-moe", *arguments]) == 0
    assert f"wrote {path}: " in capsys.readouterr().out
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    kind = pf_name.partition(":")[0]
    assert names[0] == "FusedMoEModularKernel.forward" and stage in names
    assert f"{kind}.prepare" in names and f"{kind}.finalize" in names


@pytest.mark.parametrize(
    ("devices", "arguments", "message"),
    [
        (
            2,
            ["NcclPrepareAndFinalize", "AutoExperts"],
            "takes a process for each GPU: torchrun --nproc-per-node 2 -m cukern",
        ),
        (3, ["PushPrepareAndFinalize", "AutoExperts"], "--experts must be a multiple of the 3 ranks, got 4"),
        (2, ["PushPrepareAndFinalize:batched", "NaiveBatchedExperts"], "CUDA_VISIBLE_DEVICES=0 runs it on one GPU"),
    ],
)
def test_profile_moe_refuses_an_exchange(
    devices: int,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(kernel, "device_count", lambda: devices)
    monkeypatch.delenv("RANK", raising=False)
    pf_name, experts_name = arguments
    given = ["--pf-type", pf_name, "--experts-type", experts_name, "--trace", str(tmp_path / "trace.json"), *_SMALL]
    assert main(["profile-moe", *given]) == 2
    assert message in capsys.readouterr().err


def test_doctor_lists_the_classes_of_the_exchange(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["doctor", "--moe"]) == 0
    output = capsys.readouterr().out
    rows = {tuple(line.split(maxsplit=2)[:2]): line.split(maxsplit=2)[2].strip() for line in output.splitlines()
            if "PrepareAndFinalize" in line and len(line.split()) > 2}  # fmt: skip
    every = "16 bits, fp8_block, fp8, mxfp4, nvfp4"
    assert rows["AutoExperts", "PushPrepareAndFinalize"] == rows["AutoExperts", "NcclPrepareAndFinalize"] == every
    assert rows["BatchedAutoExperts", "PushPrepareAndFinalize:batched"] == every
    assert ("BatchedAutoExperts", "PushPrepareAndFinalize") not in rows
    assert "TwoLevelPrepareAndFinalize, for several hosts, goes with what PushPrepareAndFinalize goes with." in output


# --- with a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.large(3)
@pytest.mark.parametrize("name", demo.MODELS)
def test_demo_measures_each_model(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["demo", "--model", name, "--tokens", "300"]) == 0
    output = capsys.readouterr().out
    rows = _rows(output)
    us, floor = float(rows["time"].split()[0]), float(rows["floor"].split()[0])
    assert 0 < floor < us < 1000
    assert int(rows["share"].split("%")[0]) == pytest.approx(100 * floor / us, abs=1.5)
    equal = re.search(r"ids equal in (\d+) of 300 tokens, weights there within ([\d.e+-]+)", output)
    assert equal and int(equal[1]) >= 297 and float(equal[2]) < 1e-5
    assert "No GPU" not in output


@pytest.mark.gpu
@pytest.mark.large(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_demo_measures_a_file(
    dtype: str,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    logits = rng.standard_normal((50, 77)).astype(arrays.numpy_dtype(dtype))
    assert main(["demo", "--logits", str(_save(tmp_path / "router.npz", logits=logits))]) == 0
    output = capsys.readouterr().out
    assert f"50 tokens of router.npz, {dtype}, no bias" in output
    assert "ids equal in 50 of 50 tokens" in output


@pytest.mark.gpu
def test_doctor_sees_the_gpu_and_makes_no_context() -> None:
    code = """
import ctypes
from cukern.__main__ import main
status = main(["doctor"])
cuda, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int(-1)
assert cuda.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
print(status, active.value)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 0", done.stdout + done.stderr
    assert re.search(r"^ok +GPU 0 +\S+.* GiB, sm_\d+", done.stdout, re.MULTILINE)
