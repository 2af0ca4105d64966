"""`quantized_matmul`: its twin against dequantized weights in float32, its kernels against the twin, its errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cukern
from benchmarks import bench_moe_gemm, harness
from cukern.ops import moe_gemm
from cukern.reference import moe_gemm as twin
from cukern.runtime.kernel import arch_of_device
from cukern.testing import assert_matches
from tests.buffers import same_bits, to_numpy
from tests.plans import plan_of

#: The largest error of an e4m3 element, relative to the element: half of the distance between two elements.
FP8_ROUNDING = 2**-4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALES = {"block": lambda n, k: (-(-n // 128), -(-k // 128)), "row": lambda n, k: (n, 1), "one": lambda n, k: (1,)}
#: 576 rows have a partial block, as `kv_a_proj_with_mqa` of DeepSeek-V3.
SIZES = ((1, 576, 256), (17, 128, 384), (70, 264, 128))


def made(m: int, n: int, k: int, scales: str, dtype: str = "bfloat16", seed: int = 0) -> dict[str, Any]:
    """Return an `x` of 16 bits, and FP8 weights with scales. The sums have magnitude 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(getattr(torch, dtype))
    w = (torch.randn(n, k, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    factors = (torch.rand(SCALES[scales](n, k), generator=generator) + 0.5) / (100 * k**0.5)
    return {"x": x, "w": w, "w_scale": factors}


def made_mxfp4(m: int, n: int, k: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(m, k, generator=generator).bfloat16()
    packed = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    return {
        "x": x, "w": packed, "w_scale": torch.randint(118, 124, (n, k // 32), generator=generator, dtype=torch.uint8)
    }  # fmt: skip


def dequantized(w: torch.Tensor, w_scale: torch.Tensor) -> torch.Tensor:
    """Return FP8 weights [n, k] or MXFP4 weights [n, k / 2] in float32."""
    if w_scale.dtype == torch.uint8:
        numbers = torch.stack([E2M1[(w & 15).long()], E2M1[(w >> 4).long()]], -1).flatten(1)
        return numbers * torch.exp2(w_scale.float() - 127).repeat_interleave(32, 1)
    n, k = w.shape
    if w_scale.shape == (-(-n // 128), -(-k // 128)):
        w_scale = w_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return w.float() * w_scale


def prepared(given: dict[str, Any], a_dtype: str | None = None) -> dict[str, Any]:
    w = cukern.prepare_weights(given["w"][None], given["w_scale"][None], a_dtype=a_dtype)
    return {"x": given["x"], "w": w, "w_scale": None}


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("scales", SCALES)
def test_fp8_weights_are_those_of_the_dequantized_matrix(scales: str, m: int, n: int, k: int) -> None:
    given = made(m, n, k, scales)
    w = dequantized(given["w"], given["w_scale"])
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2))
    got = cukern.quantized_matmul(**given, bias=bias)
    if scales == "block":
        q, s = cukern.per_token_group_quant_fp8(given["x"], 128)
        x = q.float() * s.repeat_interleave(128, 1)
    else:
        q, s = cukern.scaled_fp8_quant(given["x"], use_per_token_if_dynamic=True)
        x = q.float() * s
    assert_matches("moe_gemm.out", got, (x @ w.T + bias).bfloat16())
    # Quantized rows differ from the rows by the rounding of e4m3.
    exact = given["x"].float() @ w.T + bias
    allowed = FP8_ROUNDING * (given["x"].float().abs() @ w.abs().T) + 0.02
    assert ((got.float() - exact).abs() <= allowed).all()
    # An x that the caller has quantized gives the same.
    same_bits(to_numpy(cukern.quantized_matmul(q, *[*given.values()][1:], x_scale=s, bias=bias)), to_numpy(got))


def test_a_static_scale_quantizes_x() -> None:
    given = made(5, 32, 128, "row")
    scale = torch.tensor([0.01])
    q, _ = cukern.scaled_fp8_quant(given["x"], scale)
    want = (q.float() * scale) @ dequantized(given["w"], given["w_scale"]).T
    for x_scale in (scale, scale[0]):
        assert_matches("moe_gemm.out", cukern.quantized_matmul(**given, x_scale=x_scale), want.bfloat16())


@pytest.mark.parametrize(("m", "n", "k"), [(3, 64, 96), (9, 16, 256)])
def test_mxfp4_weights_are_those_of_the_dequantized_matrix(m: int, n: int, k: int) -> None:
    given = made_mxfp4(m, n, k)
    want = (given["x"].float() @ dequantized(given["w"], given["w_scale"]).T).bfloat16()
    assert_matches("moe_gemm.out", cukern.quantized_matmul(**given), want)
    assert_matches("moe_gemm.out", cukern.quantized_matmul(**prepared(given)), want)


def test_prepared_weights_for_fp8_rows_take_rows_of_16_bits() -> None:
    given = made_mxfp4(4, 32, 256)
    q, s = cukern.per_token_group_quant_fp8(given["x"], 128)
    want = (q.float() * s.repeat_interleave(128, 1)) @ dequantized(given["w"], given["w_scale"]).T
    folded = prepared(given, "float8_e4m3fn")
    assert_matches("moe_gemm.out", cukern.quantized_matmul(**folded), want.bfloat16())
    assert_matches("moe_gemm.out", cukern.quantized_matmul(q, folded["w"], None, x_scale=s), want.bfloat16())


def test_out_and_the_dtypes_of_results() -> None:
    given = made(3, 16, 128, "one", "float16")
    out = torch.full((3, 16), torch.nan, dtype=torch.float16)
    assert cukern.quantized_matmul(**given, out=out) is out
    assert torch.equal(out, cukern.quantized_matmul(**given))
    q, s = cukern.scaled_fp8_quant(given["x"], use_per_token_if_dynamic=True)
    rest = given["w"], given["w_scale"]
    assert cukern.quantized_matmul(q, *rest, x_scale=s).dtype == torch.bfloat16
    assert torch.equal(cukern.quantized_matmul(q, *rest, x_scale=s, out_dtype="float16"), out)
    assert cukern.quantized_matmul(given["x"][:0], *rest).shape == (0, 16)


BLOCKS, ONE_SCALE = made(3, 200, 256, "block"), made(3, 8, 256, "one")
ERRORS = {
    "x must be of k that is a multiple of 128, or in FP8, got 200": made(3, 8, 200, "block"),
    "x must be bfloat16 or float16 or float8_e4m3fn or uint8, got float32": BLOCKS | {"x": torch.zeros(3, 256)},
    "x must be contiguous": BLOCKS | {"x": torch.zeros(256, 3, dtype=torch.bfloat16).T},
    r"w must be of shape \[n, k\] = \[n, 128\], or of 4 bits": BLOCKS | {"x": BLOCKS["x"][:, :128].contiguous()},
    "w_scale must be an array with weights that are not prepared, got None": BLOCKS | {"w_scale": None},
    r"w_scale must be of shape \[ceil\(n / 128\), ceil\(k / 128\)\] = \[2, 2\]": BLOCKS | {"w_scale": torch.ones(2, 3)},
    "w_scale must be float32, got bfloat16": BLOCKS | {"w_scale": torch.ones(2, 2, dtype=torch.bfloat16)},
    "x_scale must be None with a 16-bit x": BLOCKS | {"x_scale": torch.ones(1)},
    "x_scale must be an array with an FP8 x, got None": BLOCKS | {"x": BLOCKS["x"].to(torch.float8_e4m3fn)},
    r"x_scale must be of shape \[1\], \[rows\] = \[3\] or \[rows, 1\]": made(3, 8, 128, "one")
    | {"x": torch.zeros(3, 128).to(torch.float8_e4m3fn), "x_scale": torch.ones(4)},
    r"bias must be of shape \[n\] = \[200\], got \[199\]": BLOCKS | {"bias": torch.zeros(199)},
    "out_dtype must be one of 'bfloat16', got 'float16'": BLOCKS | {"out_dtype": "float16"},
    r"w must be of one expert, got 2": {
        "x": BLOCKS["x"], "w": torch.zeros(2, 1, 4, 272, dtype=torch.uint8), "w_scale": None
    },
    "w must be of at least one row, got none": ONE_SCALE | {"w": ONE_SCALE["w"][:0]},
    "w must be of FP8 or MXFP4, got prepared NVFP4 weights": {
        "x": BLOCKS["x"], "w": torch.zeros(1, 1, 4, 288, dtype=torch.uint8), "w_scale": None
    },
    "w_scale must be None with prepared weights": {
        "x": BLOCKS["x"], "w": torch.zeros(1, 1, 4, 272, dtype=torch.uint8), "w_scale": torch.ones(1)
    },
    "x must be bfloat16 or float16 with these weights of 4 bits": {
        "x": torch.zeros(3, 256).to(torch.float8_e4m3fn), "w": torch.zeros(1, 1, 4, 272, dtype=torch.uint8),
        "w_scale": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_are_named(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        cukern.quantized_matmul(**ERRORS[message])


def test_a_value_that_is_no_array_is_refused() -> None:
    with pytest.raises(TypeError, match="x must be an array"):
        cukern.quantized_matmul([[1.0]], BLOCKS["w"], BLOCKS["w_scale"])
    with pytest.raises(TypeError, match="w must be a torch array like x"):
        cukern.quantized_matmul(BLOCKS["x"], to_numpy(BLOCKS["w"]), BLOCKS["w_scale"])


def test_tensors_without_memory_are_not_kept() -> None:
    """A trace of torch.export may call the function with fake tensors."""
    moe_gemm._all_rows.clear()
    given = made(4, 128, 128, "block")
    with FakeTensorMode() as mode:
        moe_gemm._offsets_of_one(mode.from_tensor(given["x"]))
    assert not moe_gemm._all_rows
    cukern.quantized_matmul(**given)
    assert [type(x) for x in moe_gemm._all_rows.values()] == [torch.Tensor]


@pytest.mark.parametrize(("scales", "first"), [("block", "quantize_groups"), ("row", "quantize_rows"), ("", "")])
def test_one_plan_quantizes_and_multiplies(scales: str, first: str) -> None:
    given = made(64, 256, 512, scales) if scales else prepared(made_mxfp4(64, 256, 512))
    arguments = {**given, "offsets": torch.tensor([0, 2**30], dtype=torch.int32)}
    options = dict.fromkeys(("x_scale", "bias", "out_dtype", "out", "expected_m"))
    trace, _ = plan_of("_quantized_matmul", **arguments, **options, variant="auto")
    product = "gemm_fp8_wgmma" if scales else "gemm_fp4_wgmma"
    assert [step.variant.instance.function for step in trace.steps] == [first, product][not first :]


def test_the_bytes_the_flops_and_the_baselines_of_a_benchmark() -> None:
    cases = [case for case in bench_moe_gemm.cases(small=True) if case.op == "quantized_matmul"]
    assert {case.case["weights"] for case in cases} == {"float8_e4m3fn", "mxfp4"}
    for case in cases:
        x, w, w_scale, x_scale = harness.inputs(case, 0, "cpu")
        out = case.call(x, w, w_scale, x_scale)
        # Prepared weights hold their scales: 17 bytes for 32 elements.
        assert case.bytes == sum(y.nbytes for y in (x, w, w_scale, x_scale, out) if y is not None)
        assert case.flops == 2 * len(x) * 256 * 256 // (2 if case.case["weights"] == "float8_e4m3fn" else 1)
        for baseline in case.baselines.values():
            assert case.agree is not None and case.agree(out, baseline.load()(x, w, w_scale, x_scale)())


# --- on a GPU -----------------------------------------------------------------------------------------


def _on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("scales", SCALES)
def test_the_kernels_of_fp8(scales: str, m: int, n: int, k: int) -> None:
    given = made(m, n, k, scales)
    got = cukern.quantized_matmul(**_on_gpu(given))
    assert_matches("moe_gemm.fp8_out", got, cukern.quantized_matmul(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("a_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_the_kernels_of_mxfp4(m: int, a_dtype: str | None) -> None:
    given = made_mxfp4(m, 256, 512)
    want = cukern.quantized_matmul(**given)
    if a_dtype is None:
        assert_matches("moe_gemm.out", cukern.quantized_matmul(**_on_gpu(given)), want)
    if arch_of_device(0) == "90a":
        want = cukern.quantized_matmul(**prepared(given, a_dtype))
        got = cukern.quantized_matmul(**prepared(_on_gpu(given), a_dtype))
        assert_matches("moe_gemm.fp8_out" if a_dtype else "moe_gemm.out", got, want)


def test_the_expected_rows_decide_whether_blocks_divide_k() -> None:
    given = prepared(made_mxfp4(400, 7168, 4096))

    def parts_of(rows: int, expected_m: int | None = None, variant: str = "auto") -> int:
        offsets = torch.tensor([0, 2**30], dtype=torch.int32)
        arguments = {**given, "x": given["x"][:rows], "offsets": offsets, "expected_m": expected_m, "variant": variant}
        trace, _ = plan_of("_quantized_matmul", **arguments, **dict.fromkeys(("x_scale", "bias", "out_dtype", "out")))
        return int(trace.steps[-1].variant.instance.arguments[10])

    assert [parts_of(64), parts_of(400)] == [2, 1]
    assert [parts_of(rows, 64, "wgmma") for rows in (1, 64, 129, 400)] == [2] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [*SCALES, "mxfp4"])
def test_a_row_depends_on_the_variant_and_the_expected_rows(scales: str) -> None:
    """Also where blocks divide k."""
    given = _on_gpu(made(300, 256, 1152, scales) if scales in SCALES else made_mxfp4(300, 256, 1152))
    variants = ["mma", "stream", "fma"] if scales in SCALES else ["mma", "fma"]
    if arch_of_device(0) == "90a":
        variants.append("wgmma")
    for variant in variants:
        own = prepared(given) if (scales, variant) == ("mxfp4", "wgmma") else given
        want = to_numpy(cukern.quantized_matmul(**own, variant=variant, expected_m=64))
        for rows in (1, 9, 64, 200):
            fewer = own | {"x": own["x"][:rows]}
            got = cukern.quantized_matmul(**fewer, variant=variant, expected_m=64)
            same_bits(to_numpy(got), want[:rows])


def test_the_twin_is_the_function(rng: np.random.Generator) -> None:
    given = {name: to_numpy(x) for name, x in made(4, 40, 128, "row").items()}
    same_bits(cukern.quantized_matmul(**given), twin.quantized_matmul(**given))
