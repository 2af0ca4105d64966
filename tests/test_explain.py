"""What `cukern.explain` says of a call, on machines with and without a GPU."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cukern
from cukern.ops import moe_gate
from cukern.ops.moe_gate import choose as gates
from cukern.runtime import arrays, compile, gpu
from cukern.runtime import kernel as kernel_module
from cukern.runtime.arrays import AnyArray
from cukern.runtime.cuda import cupy
from cukern.runtime.describe import Result
from cukern.runtime.kernel import KERNELS, Kernel, Launched, Variant
from cukern.runtime.op import OPERATORS, OPS, Op, op, operator
from cukern.runtime.plan import empty, launch, note, outputs, run_twin
from docs import examples
from tests.buffers import OnlyDLPack
from tests.plans import plan_of
from tests.spec import Call
from tests.specs import CALLS

# What the package calls so is the function.
module: Any = sys.modules["cukern.explain"]
ROOT = Path(__file__).resolve().parents[1]
X = np.zeros((8192, 7168), ml_dtypes.bfloat16)
DECLARED = {key: call for key, call in CALLS.items() if call.name in OPERATORS}


def test_a_launch_is_said_with_all_that_decides_it() -> None:
    said = cukern.explain(cukern.per_token_group_quant_fp8, X, 128, arch="90a")
    assert said.gpu == gpu.of_arch("90a") and not said.twin
    (launched,) = said.launches
    names = "T=__nv_bfloat16, FORMAT=E4M3, ACTIVATION=0, GROUP=128, VECTORS=2, ITEMS=2"
    assert launched.kernel == f"quantize_groups<{names}>"
    assert launched.why == "vector: rows of x are 16-byte aligned multiples of 8"
    assert (launched.grid, launched.block, launched.shared_bytes) == ((8192, 1, 1), (224, 1, 1), 0)
    fields = {"in.x": "x", "in.stride": 14336, "in.rows": 8192, "q": "x_q", "scales.out": "x_s", "smallest": 1e-10}
    assert fields.items() <= launched.fields.items()
    assert "in.counts" not in launched.fields  # a null pointer
    assert said.results == ("x_q: float8_e4m3fn [8192, 7168]", "x_s: float32 [8192, 56]")
    moved = X.nbytes + X.size + 8192 * 56 * 4
    assert (said.bytes, said.flops, said.workspace_bytes) == (moved, 0, 0)
    ceilings = module._ceilings("NVIDIA H200", "per_token_group_quant_fp8")
    assert said.floor_us == pytest.approx(moved / ceilings.copy_tb_s / 1e6)
    lines = str(said).splitlines()
    assert lines[0] == "per_token_group_quant_fp8 on sm_90a with 132 multiprocessors"
    assert all(re.match(r"  (kernel|why|grid|fields|registers|result|moves|floor| {6}) ", line) for line in lines[1:])
    assert max(map(len, lines)) <= 120
    assert {line[14] for line in lines[1:]} & {" "} == set()  # aligned


def test_every_launch_and_the_workspace_are_said() -> None:
    said = cukern.explain(cukern.scaled_fp8_quant, X, arch="90a")
    first, second = said.launches
    assert first.kernel.startswith("largest_magnitude<") and second.kernel.startswith("quantize_tensor<")
    assert first.fields["partial"] == second.fields["partial"] == "workspace"
    assert said.workspace_bytes == 1280  # 264 floats, rounded up
    assert "  workspace   1.28 kB\n" in str(said)


def test_the_architecture_decides() -> None:
    grids = {arch: cukern.explain(cukern.scaled_fp8_quant, X, arch=arch).launches[0].grid for arch in gpu.BY_ARCH}
    assert grids == {arch: (2 * of.multiprocessors, 1, 1) for arch, of in gpu.BY_ARCH.items()}
    said = cukern.explain(cukern.scaled_fp8_quant, X, arch="80")
    assert said.floor_us is None and "floor       not known: no rates of any card of sm_80 are measured" in str(said)
    with pytest.raises(
        ValueError,
        match="arch must be one of 80, 86, 89, 90a, 100a, 120a, or a card such as H200, L40S or A100, got '42'",
    ):
        cukern.explain(cukern.scaled_fp8_quant, X, arch="42")


def test_a_card_has_the_floor_of_its_own_rates() -> None:
    floors = {x: cukern.explain(cukern.scaled_fp8_quant, X, arch=x) for x in ("H200", "sm_90a", "90", "H100", "a100")}
    known = {x for x, said in floors.items() if said.floor_us is not None}
    assert known == {"H200", "sm_90a", "90"}
    assert all(floors[x].floor_by.endswith("an NVIDIA H200") for x in known)
    assert {said.launches[0].grid for x, said in floors.items() if x != "a100"} == {(264, 1, 1)}
    assert "floor       not known: no rates of NVIDIA H100 are measured, only of NVIDIA H200" in str(floors["H100"])
    assert floors["a100"].gpu == gpu.of_arch("80") and floors["a100"].floor_by == "NVIDIA A100"


@pytest.mark.parametrize("kernel", [pytest.param(x, id=x.file) for own in KERNELS.values() for x in own])
def test_every_template_argument_has_a_name(kernel: Kernel) -> None:
    names = module._parameter_names(kernel.file, kernel.function)
    assert names and len({*names}) == len(names) and all(re.fullmatch(r"[A-Z]\w*", name) for name in names)
    for instance in {*kernel.at_import, *kernel.specialized, *(x.instance for x in kernel.variants())}:
        assert len(instance.arguments) <= len(names)
        said = module._expression(instance)
        first = names[0] if instance.arguments else ">"
        assert said.count("=") == len(instance.arguments) and said.startswith(f"{kernel.function}<{first}")


@pytest.mark.parametrize("key", DECLARED)
def test_every_declared_op_can_be_explained(key: str) -> None:
    call = DECLARED[key]
    before = [x.clone() for x in call.arrays]
    said = cukern.explain(call.function, *call.args, **call.options)
    assert (
        said.gpu is None
        and said.twin.endswith(f".{call.name}")
        and f"the NumPy reference, {said.twin}" in " ".join(str(said).split())
    )
    assert cukern.explain(call.function, *call.args, **call.options, arch="90a").gpu is not None
    for array, kept in zip(call.arrays, before, strict=True):  # nothing ran
        torch.testing.assert_close(array, kept, rtol=0, atol=0, equal_nan=True)


#: By function and architecture.
EXPLAINED = [(name, arch) for name in {call.name: None for call in CALLS.values()} for arch in ("80", "90a")]


@pytest.mark.parametrize(("name", "arch"), EXPLAINED)
def test_every_launch_says_why(name: str, arch: str) -> None:
    for call in (call for call in CALLS.values() if call.name == name):
        for launched in cukern.explain(call.function, *call.args, **call.options, arch=arch).launches:
            wanted = "launch(..., why=f'...') with the rule that chose it and the numbers of the rule"
            assert launched.why, f"a launch of {launched.kernel} by {name} gives no reason: write {wanted}"


_FORCED = [name for name in dict(EXPLAINED) if "variant" in inspect.signature(getattr(cukern, name)).parameters]


@pytest.mark.parametrize("name", _FORCED)
def test_a_variant_that_is_asked_for_is_the_reason(name: str) -> None:
    calls = [call for call in CALLS.values() if call.name == name]
    function = calls[0].function
    with pytest.raises(ValueError, match="variant must be one of ") as refused:
        cukern.explain(function, *calls[0].args, **{**calls[0].options, "variant": "none"}, arch="90a")
    for variant in re.findall(r"'(\w+)'", str(refused.value).partition(", got ")[0]):
        for call in calls:
            try:
                said = cukern.explain(function, *call.args, **{**call.options, "variant": variant}, arch="90a")
            except ValueError:
                continue
            asks = [f"variant={variant!r} asks for it" in x.why for x in said.launches]
            assert any(asks) is (variant != "auto" and bool(asks)), [x.why for x in said.launches]


@pytest.fixture
def other_gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what gates chose by the limits and the sizes of a test."""
    monkeypatch.setattr(gates, "registered", {*gates.registered})
    yield
    gates.choose.cache_clear()


def test_a_reason_has_the_numbers_of_the_choice(other_gates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(tokens: int, experts: int = 256, groups: int = 8, **options: Any) -> str:
        given = np.zeros((tokens, experts), np.float32), np.zeros(experts, np.float32)
        (launched,) = cukern.explain(cukern.moe_fused_gate, *given, groups, 1, 8, arch="H200", **options).launches
        return launched.why

    sizes = "specialized for 256 experts in 8 groups by sigmoid with a bias (DeepSeek-V3, DeepSeek-R1, Ling)"
    assert why(1024) == f"1024 tokens: one warp per token (from 513 to 4096 tokens); {sizes}"
    assert why(20000) == f"20000 tokens: 8 lanes per token (from 16385 tokens); {sizes}"
    monkeypatch.setitem(gates.UP_TO_TOKENS, 32, 1000)
    gates.choose.cache_clear()
    assert why(1024) == f"1024 tokens: 16 lanes per token (from 1001 to 16384 tokens); {sizes}"
    assert why(64, variant="dynamic") == "variant='dynamic' asks for it"
    call = "cukern.specialize(\"moe_fused_gate\", experts=96, groups=4, scoring_func='sigmoid')"
    dynamic = why(64, 96, 4)
    assert dynamic.startswith("dynamic, 16 lanes per token: no specialized instance is for 96 experts in 4 groups")
    assert dynamic.endswith(f"{call} compiles one")
    moe_gate.specialize(experts=96, groups=4, scoring_func="sigmoid")  # what that call asks for, without a compiler
    own = "specialized for 96 experts in 4 groups by sigmoid with a bias (by cukern.specialize)"
    assert why(64, 96, 4) == f"64 tokens: one warp per token (up to 1000 tokens); {own}"


@pytest.mark.parametrize("name", dict(EXPLAINED))
def test_an_offer_to_specialize_is_true(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "available", lambda: None)
    monkeypatch.setattr(kernel_module, "device_count", lambda: 0)
    for key in [key for key in sys.modules if key.startswith("cukern.ops.")]:
        for word, value in vars(sys.modules[key]).items():
            if isinstance(value, set) and "registered" in word:
                monkeypatch.setattr(sys.modules[key], word, {*value})

    def reasons(call: Call) -> str:
        said = cukern.explain(call.function, *call.args, **call.options, arch="90a")
        return "; ".join(launched.why for launched in said.launches)

    for call in (call for call in CALLS.values() if call.name == name):
        for offer in re.findall(r"cukern\.specialize\([^)]*\)", reasons(call)):
            eval(offer, {"cukern": cukern})
            assert "by cukern.specialize" in reasons(call), offer


@pytest.mark.parametrize("function", [cukern.rms_norm, cukern.layer_norm])
def test_a_general_kernel_says_what_is_fast(function: Any) -> None:
    def why(x: Any, **options: Any) -> str:
        vectors = (None,) * (1 + (function is cukern.layer_norm))
        return cukern.explain(function, x, *vectors, arch="90a", **options).launches[0].why

    x = np.zeros((64, 1032), np.float16)
    assert why(x[:, :1031]) == (
        "scalar, the slow general kernel: width 1031 is not a multiple of 8, as the faster kernels need"
    )
    assert why(x[:, 8:]).startswith("specialized for width 1024 (BERT-large") or function is cukern.rms_norm
    call = "cukern.specialize(\"rms_norm\", width=1032, dtype='float16') compiles one of each norm"
    assert why(x) == f"dynamic, loads of 16 bytes: no specialized instance has width 1032; {call}"
    assert why(x, variant="scalar") == "variant='scalar' asks for it"


def test_nothing_to_do() -> None:
    said = cukern.explain(cukern.silu_and_mul, X[:0], arch="90a")
    assert said.launches == () and "none, there is nothing to do" in str(said) and "moves       0 bytes" in str(said)


def test_arguments_that_are_written_are_results() -> None:
    out = np.zeros((8192, 3584), ml_dtypes.bfloat16)
    said = cukern.explain(cukern.silu_and_mul, X, out=out, arch="90a")
    assert said.results == ("out: bfloat16 [8192, 3584]",)
    assert said.launches[0].fields["out"] == "out" and said.bytes == X.nbytes + out.nbytes


def test_registers_of_what_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if compile.available() is not None:
        pytest.skip("there is no NVRTC")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path))
    x = np.zeros((3, 64), np.float16)
    assert "registers   not known before it is compiled" in str(cukern.explain(cukern.silu_and_mul, x, arch="90a"))
    (step,) = plan_of("silu_and_mul", x)[0].steps
    assert step.variant is not None
    compile.cubin(step.variant.instance, "90a")
    said = cukern.explain(cukern.silu_and_mul, x, arch="90a")
    used = said.launches[0].resources
    assert used is not None and used.registers > 0 and used.spill_bytes == 0
    assert f"registers   {used.registers} of each thread, no spills" in str(said)


def test_a_product_has_flops() -> None:
    a, b = np.zeros((64, 256), np.float16), np.zeros((2, 128, 256), np.float16)
    offsets = np.array([0, 40, 64], np.int32)
    assert cukern.explain(cukern.moe_gemm, a, b, offsets, arch="90a").flops == 2 * 64 * 128 * 256


def test_an_exchange_is_explained_and_its_state_stays() -> None:
    sizes = {"num_experts": 8, "max_tokens": 16, "hidden": 256, "topk": 2}
    state = cukern.AllToAllState.local([None, None], **sizes)[0]
    x, weights, ids = np.zeros((5, 256), np.float16), np.zeros((5, 2), np.float32), np.zeros((5, 2), np.int32)
    assert cukern.explain(cukern.all_to_all_dispatch, state, x, weights, ids).gpu is None
    sent = cukern.explain(cukern.all_to_all_dispatch, state, x, weights, ids, quantize=True, arch="H200")
    (launch,) = sent.launches
    assert launch.kernel == "dispatch_tokens<T=__half, ID=unsigned, QUANTIZE=true, PHASES=3>"
    assert launch.why.startswith("send and receive in one launch, rows in FP8") and launch.grid == (5, 1, 1)
    rows = np.zeros((32, 256), np.float16)
    (launch,) = cukern.explain(cukern.all_to_all_combine, state, rows, None, ids, arch="H200").launches
    assert launch.why.startswith("send and receive in one launch, rows that are added up already")
    with pytest.raises(RuntimeError, match="must follow an all_to_all_dispatch"):  # nothing ran
        cukern.all_to_all_combine(state, rows, None, ids)
    with pytest.raises(TypeError, match="state must be an AllToAllState, got int"):
        cukern.explain(cukern.all_to_all_combine, 3, rows, None, ids)


# --- what is no op, and wrong arguments ------------------------------------------------------------------


EXCHANGES = {"all_to_all_dispatch", "all_to_all_combine"}


@pytest.mark.parametrize("function", sorted({*cukern.__all__} - {*OPERATORS} - EXCHANGES))
def test_other_functions_of_cukern_are_refused(function: str) -> None:
    with pytest.raises(TypeError, match=f"function must be a function of cukern that launches kernels, got {function}"):
        cukern.explain(getattr(cukern, function), X)


@pytest.mark.parametrize("function", [len, np.sum, "moe_gemm", None, lambda x: x])
def test_what_is_no_function_of_cukern_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match="function must be a function of cukern that launches kernels, got "):
        cukern.explain(function, X, arch="90a")


def test_a_function_that_reads_a_result_between_its_launches() -> None:
    lengths = np.array([3, 5], np.int32)
    function = cukern.build_sequence_length_padding_offset
    first, second = cukern.explain(function, lengths, 7, arch="90a").launches
    assert first.why.startswith("first launch: the host reads the number of words") and second.fields["tokens"] == 14
    said = cukern.explain(function, lengths, 7, valid_word_num=8, arch="90a")
    assert said.results == ("padding_offset: int32 [8]", "cu_seqlens: int32 [3]")
    assert [x.why for x in said.launches] == ["2 sequences: blocks of 256 threads (of 256 up to 1024 sequences)"]


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "missing": ((), {}, TypeError, "missing a required argument: 'x'"),
    "too many": ((X, 1, 2), {}, TypeError, "too many positional arguments"),
    "twice": ((X,), {"x": X}, TypeError, "multiple values for argument 'x'"),
    "unknown": ((X,), {"y": X}, TypeError, "got an unexpected keyword argument 'y'"),
    "no array": (([1.0],), {}, TypeError, "x must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
    "a size": ((X[:, :3],), {}, ValueError, "x must be of shape [..., 2 * inter], got [8192, 3]"),
    "out": ((X,), {"out": X}, ValueError, "out must be of shape [..., inter] = [8192, 3584], got [8192, 7168]"),
}


@pytest.mark.parametrize("arch", [None, "90a"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_raise_what_the_op_raises(case: str, arch: str | None) -> None:
    args, options, error, message = WRONG[case]
    with pytest.raises(error, match=re.escape(message)):
        cukern.explain(cukern.silu_and_mul, *args, **options, arch=arch)
    with pytest.raises(error, match=re.escape(message)):
        cukern.silu_and_mul(*args, **options)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, lambda x: OnlyDLPack(torch.from_numpy(x))])
def test_arrays_of_every_library(make: Any) -> None:
    x = make(np.zeros((3, 64), np.float32))
    said = cukern.explain(cukern.silu_and_mul, x, arch="90a")
    assert said.results == ("activated: float32 [3, 32]",)
    assert cukern.explain(cukern.silu_and_mul, x).twin == "cukern.reference.moe_activation.silu_and_mul"


# --- notes, clears and compositions, of ops of these tests --------------------------------------------------

_kernel = next(kernel for kernel in KERNELS["moe_activation"] if kernel.function == "moe_activation")
FIELDS = ["counts", "x_stride", "rows", "max_tokens", "by_max_tokens"]
FIELDS += ["columns", "tile_rows", "tile_columns", "by_threads", "alpha", "limit"]


@pytest.fixture(autouse=True)
def _own_ops() -> Any:
    ops, declared = dict(OPS), dict(OPERATORS)
    yield
    for own, before in ((OPS, ops), (OPERATORS, declared)):
        own.clear()
        own.update(before)


def _declare(why: str = "", **notes: Any) -> Any:
    @op(np.copy, "y", lambda x: Result(x.shape, "float32"))
    def twice_(x: AnyArray) -> AnyArray:
        y = outputs(None, x, "x", Result(x.shape, "float32"))
        if x.on_host:
            return run_twin()
        between = empty((10,), "float32")
        variant = Variant(_kernel.variant("float", 1, 16, 2).instance, Launched(128, 1024), False)
        launch(variant, (3, 2), (32, 4), 1024, why=why, x=x, out=between, **dict.fromkeys(FIELDS, 0))
        note(**notes)
        return y

    return twice_


def test_an_op_gives_bytes_flops_and_why() -> None:
    x = np.zeros((4, 8), np.float32)
    plain = cukern.explain(_declare(), x, arch="90a")
    assert plain.bytes == 2 * x.nbytes and plain.floor_by.startswith("an empty kernel")
    said = cukern.explain(_declare(bytes=10**9, flops=10**15, why="as it is"), x, arch="90a")
    assert (said.bytes, said.flops) == (10**9, 10**15)
    assert said.launches[0].why == "as it is"
    assert plain.moves_all and not said.moves_all and "  moves       1 GB\n" in str(said)
    assert said.floor_us == pytest.approx(1e9 / module._ceilings("NVIDIA H200", "").matmul_tflop_s)
    text = str(said)
    assert "  grid        3 x 2 blocks of 32 x 4 threads, 1,024 bytes of dynamic shared memory\n" in text
    assert (
        "  computes    1e+06 GFLOP of 16 bits, or what takes as long\n" in text
        and "TFLOP/s, a large 16-bit product" in text
    )
    assert "  result      y: float32 [4, 8]\n" in text and "  workspace   256 bytes\n" in text


def test_the_notes_of_a_part_are_its_own() -> None:
    inner = _declare(bytes=1, flops=7, why="of a part")

    @operator("y")
    def outer(x: AnyArray) -> AnyArray:
        return inner(inner(x))

    x = np.zeros((4, 8), np.float32)
    said = cukern.explain(outer, x, arch="90a")
    assert [x.why for x in said.launches] == ["of a part"] * 2
    assert said.flops == 14 and said.bytes == 2 * x.nbytes
    assert said.workspace_bytes == 3 * 256  # and the first result
    assert said.launches[1].fields["x"] == "workspace[0]"
    notes: list[Any] = []
    trace, _ = plan_of(Op(lambda x: notes.append(outer(x)), None), x)
    assert trace.notes == {}


def test_arrays_in_a_configuration_are_described() -> None:
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Pair:
        x: Any
        scale: Any = None

    inner = _declare()
    paths: list[str] = []
    given = {"pairs": [Pair(X[:3])], "n": 3}
    again = module._replaced(given["pairs"], "pairs", lambda path, x: paths.append(path) or "seen")
    assert paths == ["pairs[0].x"] and again == [Pair("seen")] and given["pairs"][0].x is not "seen"  # noqa: F632

    @operator("y")
    def outer(pair: AnyArray | Pair) -> AnyArray:
        return inner(pair.x)

    said = cukern.explain(outer, Pair(np.zeros((2, 8), np.float32)), arch="90a")
    assert said.launches[0].fields["x"] == "pair.x"


# --- ceilings, documentation ----------------------------------------------------------------------------


def test_the_table_is_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, kept in module.CEILINGS.items():
        measured = module._ceilings(name, "moe_gemm")
        assert kept[1:] == pytest.approx(measured[1:], rel=0.05)
    module._measured.cache_clear()
    monkeypatch.setattr(module, "_RESULTS", tmp_path)  # as in a wheel
    assert module._ceilings("NVIDIA H200", "moe_gemm") == module.CEILINGS["NVIDIA H200"]
    assert module._ceilings("another", "moe_gemm") is None
    row = {"ceilings": {"kernel_us": 1.0, "copy_tb_s": 2.0, "matmul_tflop_s": None}}
    (tmp_path / "a.json").write_text(json.dumps({"gpu": "another", "ops": {"softmax": row}, **row}))
    module._measured.cache_clear()
    assert module._ceilings("another", "softmax") == ("another", 1.0, 2.0, None)
    module._measured.cache_clear()


def test_it_is_no_op() -> None:
    assert inspect.isfunction(cukern.explain) and "explain" in cukern.__all__ and "explain" not in OPS


def test_it_needs_no_cupy() -> None:
    code = """
import sys
sys.modules["cupy"] = None
import numpy as np, cukern
print(cukern.explain(cukern.silu_and_mul, np.zeros((3, 64), np.float16), arch="90a"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "  grid        1 block of " in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
def test_arrays_on_a_gpu() -> None:
    x = cupy.zeros((64, 7168), "float16")
    said = cukern.explain(cukern.silu_and_mul, x)
    assert said.gpu == gpu.of_device(0) and said.launches and not said.twin
    cukern.silu_and_mul(x)
    assert cukern.explain(cukern.silu_and_mul, x).launches[0].resources is not None
    assert arrays.library_of(x) is arrays.CUPY
    assert cukern.explain(cukern.silu_and_mul, x, arch="80").gpu == gpu.of_arch("80")


@pytest.mark.gpu
def test_the_examples_of_the_readme_print_its_outputs_on_a_gpu() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert examples.with_outputs(readme) == readme
