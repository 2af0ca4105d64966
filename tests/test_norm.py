"""RMS norm and layer norm: the twin against torch, the kernels against the twin, to the bit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_norm, harness
from cukern.ops import norm as op
from cukern.ops.norm import rows as parts
from cukern.reference import norm as twin
from cukern.reference import quantization
from cukern.runtime import arrays, describe
from cukern.runtime.cuda import cupy
from cukern.runtime.op import OPS
from cukern.testing import assert_matches
from tests.buffers import Buffer, as_torch, place, same_bits, to_numpy
from tests.plans import plan_of

Array = NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")
E4M3 = ml_dtypes.float8_e4m3fn
#: Each way to scale FP8.
WAYS: dict[str, dict[str, Any]] = {
    "groups": {},
    "small groups": {"group_size": 32},
    "rows": {"group_size": None},
    "a scale": {"scale": 0.03},
    "a tiny scale": {"scale": 1e-38},
    "an array": {"scale": np.array([0.7], np.float32)},
}


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool = False) -> Array:
    """Rows of different magnitudes; if `special`, with NaN, infinities, huge numbers and a row of zeros."""
    size = np.exp2(rng.integers(-8, 8, (*shape[:-1], 1)))
    x = (rng.standard_normal(shape) * size).astype(arrays.numpy_dtype(dtype))
    if special and x.size:
        rows = x.reshape(-1, x.shape[-1])
        for value in (np.nan, np.inf, -np.inf, 3e38):
            with np.errstate(over="ignore"):
                rows[rng.integers(0, len(rows)), rng.integers(0, x.shape[-1])] = value
        rows[rng.integers(0, len(rows))] = 0
    return x


def weights(rng: np.random.Generator, width: int, dtype: str | None) -> Array | None:
    return None if dtype is None else draw(rng, (width,), dtype)


def matches(got: Any, want: Array) -> None:
    assert_matches("norm.out", got, want)


def same(got: Any, want: Any) -> None:
    """Assert that FP8 numbers and scales are the same."""
    assert_matches("norm.quantized", to_numpy(got[0]).view(E4M3), want[0])
    assert_matches("norm.scales", got[1], want[1])


def fits(way: str, width: int) -> bool:
    options = {"group_size": 128} | WAYS[way]
    return "scale" in options or not options["group_size"] or width % options["group_size"] == 0


# --- the twin -----------------------------------------------------------------------------------------


def by_torch(x: Array, weight: Array | None, epsilon: float, offset: float = 0.0) -> Array:
    """torch's norm, in float64."""
    of_torch = None if weight is None else torch.from_numpy(weight.astype(np.float64) + offset)
    x = torch.from_numpy(x.astype(np.float64))
    return torch.nn.functional.rms_norm(x, x.shape[-1:], of_torch, epsilon).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 128, 1000, 7168, 20000])
def test_the_twin_is_what_torch_has(width: int, dtype: str, rng: np.random.Generator) -> None:
    x = draw(rng, (5, width), dtype)
    tolerance = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for weight_dtype, offset in ((None, 0.0), (dtype, 0.0), (dtype, 1.0), ("float32", 0.5)):
        weight = weights(rng, width, weight_dtype)
        got = twin.rms_norm(x, weight, 1e-5, weight_offset=offset)
        assert got.dtype == x.dtype
        want = by_torch(x, weight, 1e-5, offset)
        np.testing.assert_allclose(got.astype(np.float64), want, tolerance, 1e-6)


def test_the_twin_is_what_the_models_have(rng: np.random.Generator) -> None:
    x, weight = (torch.from_numpy(draw(rng, shape, "float32")).bfloat16() for shape in ((6, 512), (512,)))
    normalized = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    gemma = (normalized * (1.0 + weight.float())).bfloat16()
    torch.testing.assert_close(cukern.rms_norm(x, weight, weight_offset=1.0), gemma, rtol=2**-8, atol=0)
    llama = weight * normalized.bfloat16()  # rounded twice
    torch.testing.assert_close(cukern.rms_norm(x, weight), llama, rtol=2**-7, atol=0)


def test_by_hand(put: Callable[[Any], Any]) -> None:
    x, weight = np.array([[3.0, -4, 0, 0], [0, 0, 0, 0]], np.float32), np.array([1.0, 2, 3, 4], np.float32)
    assert to_numpy(cukern.rms_norm(put(x), put(weight), 0.0))[0].tolist() == [np.float32(1.2), np.float32(-3.2), 0, 0]
    assert to_numpy(cukern.rms_norm(put(x), None, 1.0))[1].tolist() == [0, 0, 0, 0]
    assert np.isnan(to_numpy(cukern.rms_norm(put(x), None, 0.0))[1]).all()
    given, residual = put(x - 1), put(np.ones_like(x))
    got = cukern.fused_add_rms_norm(given, residual, put(weight - 1), 0.0, weight_offset=1.0)
    assert got[0] is given and got[1] is residual
    np.testing.assert_array_equal(to_numpy(residual), x)
    assert to_numpy(given)[0].tolist() == [np.float32(1.2), np.float32(-3.2), 0, 0]


def test_nan_infinities_and_overflow(put: Callable[[Any], Any]) -> None:
    x = np.ones((5, 40), np.float32)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6] = np.nan, np.inf, -np.inf, 2e19  # whose square is past the largest float32
    got = to_numpy(cukern.rms_norm(put(x), None))
    assert np.isnan(got[0]).all()
    for row, column in ((1, 4), (2, 5)):
        assert np.isnan(got[row, column]) and not np.delete(got[row], column).any()
    assert not got[3].any() and (got[4] == np.float32(1 / np.sqrt(1 + 1e-6))).all()
    q, s = cukern.rms_norm_quant(put(x), None, group_size=None)
    q = to_numpy(q).view(E4M3).astype(np.float32)
    assert np.isnan(q[0]).all() and np.isnan(q[1, 4]) and not q[3].any() and (q[4] == 448).all()
    np.testing.assert_array_equal(to_numpy(s)[:4, 0], np.float32(1 / 512) / np.float32(448))


def test_the_added_and_quantized_norms_are_compositions(rng: np.random.Generator) -> None:
    x, residual, weight = draw(rng, (6, 256), "bfloat16"), draw(rng, (6, 256), "bfloat16"), draw(rng, (256,), "float32")
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    given, added = x.copy(), residual.copy()
    twin.fused_add_rms_norm(given, added, weight, 1e-5)
    same_bits(added, total)
    same_bits(given, twin.rms_norm(total, weight, 1e-5))
    y = twin.normalized(total, weight, 1e-5, 0.0)
    assert y.dtype == np.float32
    for options, want in (
        ({"group_size": 64}, quantization.per_token_group_quant_fp8(y, 64)),
        ({"group_size": None}, quantization.scaled_fp8_quant(y, None, None, None, True)),
        ({"scale": 0.2}, quantization.scaled_fp8_quant(y, 0.2)),
    ):
        added, given = residual.copy(), x.copy()
        same(twin.fused_add_rms_norm_quant(given, added, weight, 1e-5, **options), want)
        same_bits(added, total)
        same_bits(given, x)
        same(twin.rms_norm_quant(total, weight, 1e-5, **options), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_sum_that_is_not_rounded(dtype: str, rng: np.random.Generator) -> None:
    x, residual, weight = draw(rng, (6, 256), dtype), draw(rng, (6, 256), dtype), draw(rng, (256,), "float32")
    total = x.astype(np.float32) + residual.astype(np.float32)
    norms, sums = {}, {}
    for rounded in (True, False):
        norms[rounded], sums[rounded] = x.copy(), residual.copy()
        cukern.fused_add_rms_norm(norms[rounded], sums[rounded], weight, 1e-5, round_sum=rounded)
        same_bits(sums[rounded], total.astype(x.dtype))
    same_bits(norms[False], twin.rms_norm(total, weight, 1e-5).astype(x.dtype))
    exact = by_torch(total, weight, 1e-5)
    off = {rounded: np.abs(got.astype(np.float64) - exact).sum() for rounded, got in norms.items()}
    assert off[False] < off[True] if dtype != "float32" else off[False] == off[True]
    q, s = cukern.fused_add_rms_norm_quant(x, residual.copy(), weight, 1e-5, round_sum=False)
    same((q, s), twin.rms_norm_quant(total, weight, 1e-5))


def vectors_of(rng: np.random.Generator, width: int, dtype: str | None) -> tuple[Array | None, Array | None]:
    """A weight and a bias for layer norm."""
    return weights(rng, width, dtype), weights(rng, width, dtype)


def shifted_by_torch(x: Array, weight: Array | None, bias: Array | None, epsilon: float) -> Array:
    """torch's layer norm, in float64."""
    x, weight, bias = (None if v is None else torch.from_numpy(v.astype(np.float64)) for v in (x, weight, bias))
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 384, 768, 1000, 20000])
def test_the_twin_of_layer_norm_is_what_torch_has(width: int, dtype: str, rng: np.random.Generator) -> None:
    x = draw(rng, (5, width), dtype)
    tolerance = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for weight_dtype in (None, dtype, "float32"):
        weight, bias = vectors_of(rng, width, weight_dtype)
        for pair in ((weight, bias), (weight, None), (None, bias)):
            got = twin.layer_norm(x, *pair, 1e-5)
            assert got.dtype == x.dtype
            # A sum with the bias may cancel: its error is that of the product.
            scale = 1 if pair[0] is None else float(np.abs(pair[0].astype(np.float64)).max())
            want = shifted_by_torch(x, *pair, 1e-5)
            np.testing.assert_allclose(got.astype(np.float64), want, tolerance, 6e-6 * scale)


@pytest.mark.parametrize("width", [768, 9001])
def test_layer_norm_keeps_the_digits_of_rows_far_from_zero(width: int, rng: np.random.Generator) -> None:
    small = rng.standard_normal((6, width)).astype(np.float32)
    x = small + np.float32([[0], [1e2], [-1e3], [1e4], [1e5], [3e6]])
    got = cukern.layer_norm(x, None, None, 1e-12)
    np.testing.assert_allclose(got, shifted_by_torch(x, None, None, 1e-12), 1e-5, 1e-5)
    bias = small[0]
    for value in (0.1, 100, -7.7e4, 3e-30):
        equal = np.full((1, width), value, np.float32)
        np.testing.assert_allclose(cukern.layer_norm(equal, None, bias, 1e-12)[0], bias, 0, 1e-4)


def test_layer_norm_by_hand(put: Callable[[Any], Any]) -> None:
    x, weight = np.array([[1.0, 3, 5, 7], [2, 2, 2, 2]], np.float32), np.array([1.0, 1, 2, 0], np.float32)
    bias = np.array([0.0, 0, 1, 5], np.float32)
    got = to_numpy(cukern.layer_norm(put(x), put(weight), put(bias), 0.0))
    third, last = np.float32(1) * np.float32(1 / np.sqrt(5)), np.float32(-3) * np.float32(1 / np.sqrt(5))
    assert got[0].tolist() == [last, -third, np.float32(2 * third + 1), 5]
    assert np.isnan(got[1, :3]).all()  # 0 * inf
    assert to_numpy(cukern.layer_norm(put(x), None, put(bias), 1.0))[1].tolist() == bias.tolist()


def test_layer_norm_of_nan_infinities_and_overflow(put: Callable[[Any], Any]) -> None:
    x = np.zeros((5, 40), np.float32)
    x[:, 0] = 1
    x[0, 3], x[1, 4], x[2, 5], x[3, 6], x[4, :20] = np.nan, np.inf, -np.inf, 1e20, 3e38
    bias = np.arange(40, dtype=np.float32)
    got = to_numpy(cukern.layer_norm(put(x), None, put(bias)))
    assert np.isnan(got[[0, 1, 2, 4]]).all()
    np.testing.assert_array_equal(got[3], bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_added_layer_norm_is_a_composition(dtype: str, rng: np.random.Generator) -> None:
    x, residual = (draw(rng, (6, 200), dtype) for _ in range(2))
    weight, bias = vectors_of(rng, 200, dtype)
    for input_bias in (None, draw(rng, (200,), dtype)):
        wide = x.astype(np.float32) if input_bias is None else x.astype(np.float32) + input_bias.astype(np.float32)
        total = (wide + residual.astype(np.float32)).astype(x.dtype)
        want = twin.layer_norm(total, weight, bias, 1e-6)
        arguments = (weight, bias, 1e-6)
        same_bits(cukern.fused_add_layer_norm(x, residual, *arguments, input_bias=input_bias), want)
        # Written over what is read.
        given, other, kept = x.copy(), residual.copy(), np.empty_like(x)
        options = {"input_bias": input_bias}
        assert cukern.fused_add_layer_norm(given, other, *arguments, **options, out=given, residual_out=kept) is given
        same_bits(given, want)
        same_bits(other, residual)
        same_bits(kept, total)
        got = cukern.fused_add_layer_norm(x, other, *arguments, **options, residual_out=other)
        same_bits(got, want)
        same_bits(other, total)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 700), st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_a_row_of_layer_norm_depends_on_nothing_but_itself(rows: int, width: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, residual = (draw(rng, (rows, width), dtype, special=True) for _ in range(2))
    vectors = vectors_of(rng, width, dtype)
    got, added = cukern.layer_norm(x, *vectors), cukern.fused_add_layer_norm(x, residual, *vectors)
    for i in range(rows):
        matches(got[i], cukern.layer_norm(x[i], *vectors))
        matches(added[i], cukern.fused_add_layer_norm(x[i], residual[i], *vectors))


def dealt_out(x: Array, threads: int) -> np.float32:
    """The sum of squares of a row in the order in which `threads` threads of the kernel add it up."""
    units = -(-len(x) // twin.VECTOR)
    padded = np.zeros((-(-units // threads) * threads, twin.VECTOR), np.float32)
    padded.reshape(-1)[: len(x)] = x
    slots = twin.COLUMNS // threads
    sums = np.zeros((slots, threads), np.float32)  # of a thread: one for each column it has
    for i, of_threads in enumerate(padded.reshape(-1, threads, twin.VECTOR)):
        each = of_threads[:, 0] * of_threads[:, 0]
        for j in range(1, twin.VECTOR):
            each = each + of_threads[:, j] * of_threads[:, j]
        sums[i % slots] += each
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    of_warps = sums[0].reshape(-1, min(threads, 32))
    while len(of_warps) > 1:
        of_warps = of_warps[: len(of_warps) // 2] + of_warps[len(of_warps) // 2 :]
    lanes, step = of_warps[0], min(threads, 32) // 2
    while step:
        lanes = lanes + lanes[np.arange(len(lanes)) ^ step]
        step //= 2
    assert (lanes == lanes[0]).all()
    return lanes[0]


@given(st.integers(1, 30000), st.integers(0, 10), st.integers(0, 2**32))
def test_the_sum_is_the_same_however_it_is_dealt_out(width: int, log_threads: int, seed: int) -> None:
    x = (np.random.default_rng(seed).standard_normal(width) * 3).astype(np.float32)
    want = twin.sum_of_squares(x)
    assert want.shape == (1,) and dealt_out(x, 1 << log_threads) == want[0]
    np.testing.assert_allclose(want[0], np.square(x.astype(np.float64)).sum(), 1e-6)


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 700), st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_a_row_depends_on_nothing_but_itself(rows: int, width: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = draw(rng, (rows, width), dtype, special=True), draw(rng, (width,), dtype)
    got = cukern.rms_norm(x, weight)
    for i in range(rows):
        matches(got[i], cukern.rms_norm(x[i], weight))
    with np.errstate(all="ignore"):
        finite = np.isfinite(x.astype(np.float32)).all(axis=1) & (
            twin.sum_of_squares(x.astype(np.float32))[:, 0] < 3e38
        )
        mean = np.square(cukern.rms_norm(x, None, 0.0).astype(np.float64)).mean(axis=1)
    nonzero = finite & (np.abs(x.astype(np.float64)).max(axis=1) > 1e-3)
    np.testing.assert_allclose(mean[nonzero], 1, 2**-6)


# --- arrays in host memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_on_the_cpu(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 128).to(dtype), torch.randn(128).to(dtype)
    got = cukern.rms_norm(x, weight)
    assert (got.dtype, got.shape) == (dtype, (2, 3, 128))
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (128,), weight, 1e-6), rtol=2**-6, atol=2**-6)
    out = torch.empty_like(x)
    assert cukern.rms_norm(x, weight, out=out) is out and torch.equal(out, got)
    q, s = torch.zeros(2, 3, 128, dtype=torch.uint8), torch.zeros(2, 3, 2)
    found = cukern.rms_norm_quant(x, weight, group_size=64, out_q=q, out_s=s)
    assert found[0] is q and found[1] is s
    want = cukern.rms_norm_quant(x, weight, group_size=64)
    assert want[0].dtype == torch.float8_e4m3fn
    assert torch.equal(q, want[0].view(torch.uint8)) and torch.equal(s, want[1])


def test_heads_of_a_product_in_place() -> None:
    product, weight = torch.randn(5, (4 + 2 + 2) * 64).bfloat16(), torch.randn(64).bfloat16()
    q, k, _ = (x.view(5, -1, 64) for x in product.split([4 * 64, 2 * 64, 2 * 64], dim=1))
    before, want = product.clone(), cukern.rms_norm(q.contiguous(), weight)
    assert torch.equal(cukern.rms_norm(q, weight), want)
    assert cukern.rms_norm(q, weight, out=q) is q
    assert torch.equal(q, want) and torch.equal(product[:, 256:], before[:, 256:])
    residual = torch.zeros_like(k)
    cukern.fused_add_rms_norm(k, residual, weight)
    assert torch.equal(residual, before[:, 256:384].view(5, 2, 64)) and torch.equal(
        k, cukern.rms_norm(residual, weight)
    )


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)])
def test_nothing_to_normalize(put: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    x = put(np.zeros(shape, np.float32))
    assert cukern.rms_norm(x, None).shape == shape
    assert cukern.layer_norm(x, None, None).shape == shape
    both = put(np.zeros(shape, np.float32)), put(np.zeros(shape, np.float32))
    assert cukern.fused_add_layer_norm(x, both[0], None, None, residual_out=both[1]).shape == shape
    cukern.fused_add_rms_norm(x, put(np.zeros(shape, np.float32)), None)
    assert to_numpy(cukern.rms_norm_quant(x, None, scale=0.5)[1]).tolist() == [0.5]
    assert cukern.rms_norm_quant(x, None, group_size=None)[1].shape == (*shape[:-1], 1)
    assert cukern.rms_norm_quant(x, None, group_size=32)[1].shape == (*shape[:-1], shape[-1] // 32)


# --- bad input ----------------------------------------------------------------------------------------

X, WEIGHT = np.zeros((2, 3, 64), np.float32), np.zeros(64, np.float32)
HALF, WRITTEN = WEIGHT.astype(np.float16), X.copy()
BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("rms_norm", {"input": [1.0]}, TypeError, "input must be an array (NumPy, CuPy, torch, or any with"),
    ("rms_norm", {"input": X.astype(int)}, TypeError, "input must be float32 or float16 or bfloat16, got int64"),
    ("rms_norm", {"input": X[..., ::2]}, ValueError, "input must be contiguous along its last dimension, got strides"),
    ("rms_norm", {"weight": WEIGHT[:63]}, ValueError, "weight must be of shape [width] = [64], got [63]"),
    ("rms_norm", {"weight": HALF}, TypeError, "weight must be float32, got float16"),
    ("rms_norm", {"weight": np.zeros(128, np.float32)[::2]}, ValueError, "weight must be contiguous, got strides"),
    ("rms_norm", {"weight": [1.0]}, TypeError, "weight must be a NumPy array like input, got builtins.list"),
    ("rms_norm", {"epsilon": -1e-6}, ValueError, "epsilon must be a number of at least 0, got -1e-06"),
    ("rms_norm", {"epsilon": float("nan")}, ValueError, "epsilon must be a finite number, got nan"),
    ("rms_norm", {"weight_offset": "a"}, TypeError, "weight_offset must be a number, got 'a' (str)"),
    ("rms_norm", {"out": X[0]}, ValueError, "out must be of shape [..., width] = [2, 3, 64], got [3, 64]"),
    ("rms_norm", {"out": X.astype(np.float16)}, TypeError, "out must be float32, got float16"),
    ("rms_norm", {"out": np.broadcast_to(X[:, :1], X.shape)}, ValueError, "out must be of rows that do not overlap"),
    ("rms_norm", {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'specialized', 'dynamic', 'scalar'"),
    ("rms_norm", {"variant": "scalar"}, ValueError, "variant must be 'auto' for arrays in host memory"),
    ("fused_add_rms_norm", {"residual": X[:1]}, ValueError, "residual must be of shape [..., width] = [2, 3, 64], got"),
    ("fused_add_rms_norm", {"residual": X.astype(np.float16)}, TypeError, "residual must be float32, got float16"),
    ("fused_add_rms_norm", {"residual": None}, TypeError, "residual must be a NumPy array like input, got"),
    (
        "fused_add_rms_norm", {"input": np.broadcast_to(X[:, :1], X.shape)}, ValueError,
        "input must be of rows that do not overlap, got strides",
    ),
    ("rms_norm_quant", {}, ValueError, "input must be of whole groups of 128 along its last dimension, got 64"),
    ("rms_norm_quant", {"group_size": 48}, ValueError, "group_size must be one of 32, 64, 128, got 48"),
    ("rms_norm_quant", {"scale": "a"}, TypeError, "scale must be a number, got 'a' (str)"),
    ("rms_norm_quant", {"scale": np.ones(2, np.float32)}, ValueError, "scale must be a number or an array of one"),
    ("rms_norm_quant", {"group_size": None, "out_q": X}, TypeError, "out_q must be float8_e4m3fn or uint8, got"),
    ("rms_norm_quant", {"scale": 1.0, "out_s": WEIGHT}, ValueError, "out_s must be of shape [1] = [1], got [64]"),
    ("rms_norm_quant", {"group_size": None, "variant": "x"}, ValueError, "variant must be one of 'auto',"),
    ("fused_add_rms_norm_quant", {"residual": X[0]}, ValueError, "residual must be of shape [..., width] = [2, 3, 64]"),
    ("layer_norm", {"input": X[..., ::2]}, ValueError, "input must be contiguous along its last dimension, got"),
    ("layer_norm", {"bias": WEIGHT[:63]}, ValueError, "bias must be of shape [width] = [64], got [63]"),
    ("layer_norm", {"bias": HALF}, TypeError, "bias must be float32, got float16"),
    (
        "layer_norm", {"input": X.astype(np.float16), "weight": HALF}, TypeError,
        "bias must be float16, got float32",
    ),
    ("layer_norm", {"epsilon": -1.0}, ValueError, "epsilon must be a number of at least 0, got -1.0"),
    ("layer_norm", {"out": X[0]}, ValueError, "out must be of shape [..., width] = [2, 3, 64], got [3, 64]"),
    ("layer_norm", {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'specialized', 'dynamic',"),
    ("fused_add_layer_norm", {"residual": X[:1]}, ValueError, "residual must be of shape [..., width] = [2, 3, 64]"),
    ("fused_add_layer_norm", {"input_bias": HALF}, TypeError, "input_bias must be float32, got float16"),
    ("fused_add_layer_norm", {"residual_out": X[0]}, ValueError, "residual_out must be of shape [..., width] ="),
    (
        "fused_add_layer_norm", {"residual_out": np.broadcast_to(X[:, :1], X.shape)}, ValueError,
        "residual_out must be of rows that do not overlap",
    ),
    (
        "fused_add_layer_norm", {"residual_out": WRITTEN, "out": WRITTEN}, ValueError,
        "out must be another array than residual_out, got the same",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), BAD)
def test_bad_input_is_refused(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"input": X, "weight": WEIGHT} | ({"residual": X.copy()} if name.startswith("fused") else {})
    arguments |= {"bias": WEIGHT} if name.endswith("layer_norm") else {}
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | change)


# --- the launch -----------------------------------------------------------------------------------------


@given(
    st.integers(0, 2**24), st.booleans(), st.booleans(), st.sampled_from(DTYPES), st.sampled_from([0, *op.GROUPS])
)  # fmt: skip
def test_the_threads_of_a_row_cover_it(width: int, fixed: bool, wide: bool, dtype: str, group: int) -> None:
    tile = op.parts.tile(dtype, width, fixed, wide, group)
    assert 1 <= tile.threads <= 1024 and tile.threads & (tile.threads - 1) == 0 and tile.items >= 1
    assert tile.threads * tile.items * twin.VECTOR >= width or tile.threads == twin.COLUMNS
    assert tile.threads * twin.VECTOR >= group
    assert tile.block == tile.threads if tile.threads > 32 else tile.block % 32 == 0


def test_the_models_widths_are_specialized() -> None:
    listed = {*op._kernel.specialized}
    assert {*op._kernel.at_import} <= listed
    for width in (*op.SPECIALIZED, *op.SPECIALIZED_HEADS):
        for dtype in DTYPES:
            assert op._variant(op._Operation(dtype, dtype), width, True, True).instance in listed
    assert op._variant(op._Operation("bfloat16", "bfloat16", True), 7168, True, True).instance in op._kernel.at_import
    assert {*op._layer_kernel.at_import} <= {*op._layer_kernel.specialized}
    for width, dtype, add in itertools.product(op.SPECIALIZED_LAYER_NORM, DTYPES, (False, True)):
        operation = op._Operation(dtype, dtype, add)
        assert op._layer_variant(operation, width, True, True).instance in op._layer_kernel.specialized


def planned(name: str, *args: Any, **options: Any) -> Any:
    """The one launch of a plan on an H100."""
    (step,) = plan_of(name, *args, **options)[0].steps
    return step


def arguments_of(step: Any) -> dict[str, Any]:
    names = ("dtype", "weight", "result", "group", "sum", "width", "threads", "items", "bytes", "block")
    return dict(zip(names, step.variant.instance.arguments, strict=True))


def test_plans() -> None:
    x, weight = torch.zeros(32, 7168, dtype=torch.bfloat16), torch.zeros(7168, dtype=torch.bfloat16)
    step = planned("rms_norm", x, weight)
    found = arguments_of(step)
    assert (found["width"], found["bytes"], found["result"], found["sum"]) == (7168, 16, "PLAIN", "ALONE")
    assert step.grid[0] == 32 and step.block == (found["threads"], 1, 1)
    assert arguments_of(planned("rms_norm", x, weight, variant="dynamic"))["width"] == 0
    scalar = arguments_of(planned("rms_norm", x, weight, variant="scalar"))
    assert (scalar["width"], scalar["bytes"]) == (0, 2)
    assert arguments_of(planned("rms_norm", x[:, 1:], weight[1:]))["bytes"] == 2
    assert arguments_of(planned("rms_norm", x, weight.float()))["weight"] == "float"
    quantized = arguments_of(planned("fused_add_rms_norm_quant", x, x.clone(), weight, group_size=64))
    assert (quantized["result"], quantized["group"], quantized["sum"]) == ("BY_GROUP", 64, "ROUNDED")
    for dtype, want in ((torch.bfloat16, "UNROUNDED"), (torch.float32, "ROUNDED")):  # float32 sums are not rounded
        given = x.to(dtype), x.to(dtype), None
        assert arguments_of(planned("fused_add_rms_norm", *given, round_sum=False))["sum"] == want
    assert planned("rms_norm_quant", x[:0], weight, scale=1.0).grid[0] == 1  # which writes the scale
    for bad, message in (("specialized", "there is none for width 64"), ("dynamic", "not 16-byte aligned")):
        with pytest.raises(ValueError, match=message):
            planned("rms_norm", x[:, 1:65], None, variant=bad)


def test_plans_of_layer_norm() -> None:
    names = ("dtype", "weight", "add", "width", "threads", "items", "bytes", "block")

    def found(*args: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        step = planned("fused_add_layer_norm" if len(args) == 4 else "layer_norm", *args, **options)
        return step, dict(zip(names, step.variant.instance.arguments, strict=True))

    x, vector = torch.zeros(64, 768, dtype=torch.float16), torch.zeros(768, dtype=torch.float16)
    step, arguments = found(x, vector, vector)
    assert (arguments["width"], arguments["bytes"], arguments["add"]) == (768, 16, "false")
    assert step.grid[0] == 8 and step.block == (256, 1, 1)
    step, arguments = found(x, x, vector, vector, input_bias=vector)
    assert (arguments["width"], arguments["add"], step.fields["residual_out"]) == (768, "true", None)
    assert found(x, vector, None, variant="dynamic")[1]["width"] == 0
    assert found(x, vector.float(), vector.float())[1]["weight"] == "float"
    assert found(x, None, vector.float())[1]["weight"] == "float"
    # One element at a time, whichever of the arrays is not aligned.
    more = torch.zeros(769, dtype=torch.float16)[1:]
    for vectors in ((more, None), (vector, more)):
        assert found(x, *vectors)[1]["bytes"] == 2
    assert found(x, x, vector, vector, input_bias=more)[1]["bytes"] == 2
    assert found(x, torch.zeros(64, 769, dtype=torch.float16)[:, 1:], vector, vector)[1]["bytes"] == 2
    with pytest.raises(ValueError, match="there is none for width 64"):
        found(x[:, :64], None, None, variant="specialized")


def test_rows_with_two_strides() -> None:
    product = torch.zeros(7, 8 * 128, dtype=torch.bfloat16)
    heads = product.view(7, 8, 128)
    total, inner, strides = rows_of(input=heads[:, 4:6], residual=None, out=torch.zeros(7, 2, 128))
    assert (total, inner, strides) == (14, 2, [(1024, 128), None, (256, 128)])
    assert rows_of(input=heads)[1:] == (1, [(128, 0)])
    assert rows_of(input=heads.transpose(0, 1))[1:] == (7, [(128, 1024)])
    assert rows_of(input=torch.zeros(2, 3, 4, 96)[..., :64])[1:] == (1, [(96, 0)])
    assert rows_of(input=torch.zeros(2, 3, 4, 64)[:, :, :2])[1:] == (2, [(256, 64)])
    assert rows_of(input=torch.zeros(64))[1:] == (1, [(0, 0)])
    with pytest.raises(ValueError, match="input must be of rows with at most two strides"):
        rows_of(input=torch.zeros(2, 3, 4, 64)[:, :2, :3])


def rows_of(**given: Any) -> Any:
    def described(x: torch.Tensor) -> describe.Array:
        return describe.Array("bfloat16", x.shape, x.stride(), 16, describe.Place(arrays.NUMPY, 0, None), 0)

    return parts.rows_of(**{name: None if x is None else described(x) for name, x in given.items()})


@pytest.fixture
def own_widths() -> Iterator[None]:
    registries = op._registered, op._registered_layer_norm
    before = [set(registered) for registered in registries]
    yield
    for registered, widths in zip(registries, before, strict=True):
        registered.clear()
        registered.update(widths)
    for name in op.__all__:
        OPS[name].forget()


def test_specialize_adds_a_width(own_widths: None) -> None:
    x = torch.zeros(3, 3072, dtype=torch.bfloat16)
    assert arguments_of(planned("rms_norm", x, None))["width"] == 0
    made = op.specialize(width=3072)
    assert planned("rms_norm", x, None).variant.instance in made
    assert arguments_of(planned("rms_norm", x, None, variant="specialized"))["width"] == 3072
    assert planned("layer_norm", x, None, None, variant="specialized").variant.instance in made
    assert planned("fused_add_layer_norm", x, x, None, None).variant.instance in made
    with pytest.raises(ValueError, match="width must be a multiple of 8, got 3001"):
        op.specialize(width=3001)


# --- benchmarks ---------------------------------------------------------------------------------------


def test_the_benchmark_compares_the_same_thing() -> None:
    for case in bench_norm.cases():
        small = bench_norm.shrunk(case)
        ours, theirs = (harness.inputs(small, 0, "cpu") for _ in range(2))
        assert small.agree is not None
        assert small.agree(small.call(*ours), small.baselines["torch"].load()(*theirs))


# --- on the GPU ---------------------------------------------------------------------------------------

SHAPES = {
    "one": (1, 1),
    "one row": (1, 7168),
    "odd": (5, 77),
    "heads": (300, 4, 128),
    "short rows": (3000, 24),
    "rows of a warp": (130, 1000),
    "a known width": (37, 2880),
    "the largest of a thread": (20, 8192),
    "read again": (7, 8200),
    "odd and long": (3, 20001),
    "very long": (2, 65536),
    "a vector": (512,),
}


def variants_of(width: int) -> list[str]:
    known = width in (*op.SPECIALIZED, *op.SPECIALIZED_HEADS)
    return ["auto", "scalar", *["dynamic"] * (width % 8 == 0), *["specialized"] * known]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_the_twin(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    width = shape[-1]
    for weight_dtype, offset in ((dtype, 0.0), ("float32", 1.0), (None, 0.0)):
        x, residual = (draw(rng, shape, dtype, special=True) for _ in range(2))
        weight = weights(rng, width, weight_dtype)
        on_gpu = None if weight is None else cupy.asarray(weight)
        want = twin.rms_norm(x, weight, 1e-5, weight_offset=offset)
        sums = dict.fromkeys((True, False), (x, residual))
        sums = {rounded: tuple(a.copy() for a in of) for rounded, of in sums.items()}
        for rounded, of in sums.items():
            twin.fused_add_rms_norm(*of, weight, 1e-5, weight_offset=offset, round_sum=rounded)
        for variant in variants_of(width) if weight_dtype == dtype else ["auto"]:
            options: dict[str, Any] = {"weight_offset": offset, "variant": variant}
            out = Buffer(shape, dtype)
            assert cukern.rms_norm(cupy.asarray(x), on_gpu, 1e-5, out=out.array, **options) is out.array
            matches(out.numpy(), want)
            for rounded, of in sums.items():
                both = [Buffer(shape, dtype) for _ in range(2)]
                for buffer, values in zip(both, (x, residual), strict=True):
                    buffer.array[...] = cupy.asarray(values)
                cukern.fused_add_rms_norm(both[0].array, both[1].array, on_gpu, 1e-5, **options, round_sum=rounded)
                for buffer, values in zip(both, of, strict=True):
                    matches(buffer.numpy(), values)


LAYER_SHAPES = {**SHAPES, "BERT-base": (70, 768), "a specialized row": (1, 384)}


def layer_variants_of(width: int) -> list[str]:
    known = width in op.SPECIALIZED_LAYER_NORM
    return ["auto", "scalar", *["dynamic"] * (width % 8 == 0), *["specialized"] * known]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LAYER_SHAPES.values(), ids=LAYER_SHAPES)
def test_the_kernel_of_layer_norm_is_the_twin(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    width = shape[-1]
    for weight_dtype in (dtype, "float32", None):
        x, residual = (draw(rng, shape, dtype, special=True) for _ in range(2))
        vectors, input_bias = vectors_of(rng, width, weight_dtype), weights(rng, width, weight_dtype and dtype)
        on_gpu = [None if v is None else cupy.asarray(v) for v in (*vectors, input_bias)]
        want, total = twin.layer_norm(x, *vectors, 1e-6), np.empty_like(x)
        added = twin.fused_add_layer_norm(x, residual, *vectors, 1e-6, input_bias=input_bias, residual_out=total)
        for variant in layer_variants_of(width) if weight_dtype == dtype else ["auto"]:
            out, kept, given, other = (Buffer(shape, dtype) for _ in range(4))
            assert cukern.layer_norm(cupy.asarray(x), *on_gpu[:2], 1e-6, out=out.array, variant=variant) is out.array
            matches(out.numpy(), want)
            given.array[...], other.array[...] = cupy.asarray(x), cupy.asarray(residual)
            arguments = (given.array, other.array, *on_gpu[:2], 1e-6)
            options: dict[str, Any] = {"input_bias": on_gpu[2], "variant": variant}
            matches(cukern.fused_add_layer_norm(*arguments, **options), added)
            cukern.fused_add_layer_norm(*arguments, **options, residual_out=kept.array, out=out.array)
            matches(out.numpy(), added)
            matches(kept.numpy(), total)
            same_bits(given.numpy(), x)
            # Written over what is read.
            cukern.fused_add_layer_norm(*arguments, **options, residual_out=other.array, out=given.array)
            matches(given.numpy(), added)
            matches(other.numpy(), total)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(5, 77), (3, 5, 64), (9, 768), (2, 9000)])
def test_layer_norm_of_rows_apart_and_off_alignment(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> None:
    x, residual, (weight, bias) = draw(rng, shape, dtype), draw(rng, shape, dtype), vectors_of(rng, shape[-1], dtype)
    want, total = twin.layer_norm(x, weight, bias), np.empty_like(x)
    added = twin.fused_add_layer_norm(x, residual, weight, bias, input_bias=bias, residual_out=total)
    for skip, apart in ((0, 0), (1, 0), (0, 3), (0, 16)):
        out = Buffer(shape, dtype, skip)
        vectors = place(weight, skip), place(bias, skip)
        cukern.layer_norm(place(x, skip, apart), *vectors, out=out.array)
        matches(out.numpy(), want)
        both = place(x, skip, apart), place(residual, 0, 2 * apart)
        matches(cukern.fused_add_layer_norm(*both, *vectors, input_bias=place(bias), residual_out=both[1]), added)
        matches(both[1], total)
        same_bits(both[0], x)


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    st.integers(1, 70), st.integers(1, 1500), st.sampled_from(DTYPES), st.booleans(), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_random_shapes_of_layer_norm(rows: int, width: int, dtype: str, eights: bool, special: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = width * 8 if eights else width
    x, residual = (draw(rng, (rows, width), dtype, special) for _ in range(2))
    vectors = vectors_of(rng, width, dtype)
    on_gpu = [cupy.asarray(v) for v in (x, residual, *vectors)]
    matches(cukern.layer_norm(on_gpu[0], *on_gpu[2:]), twin.layer_norm(x, *vectors))
    matches(cukern.fused_add_layer_norm(*on_gpu), twin.fused_add_layer_norm(x, residual, *vectors))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_quantized(way: str, dtype: str, rng: np.random.Generator) -> None:
    options = WAYS[way]
    moved = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for shape in ((130, 2048), (3, 5, 128), (300, 64), (3, 9088), (6, 77), (2, 65536)):
        if not fits(way, shape[-1]):
            continue
        variants = variants_of(shape[-1]) if dtype == "bfloat16" else ["auto"]
        for special in (False, True):
            x, residual = (draw(rng, shape, dtype, special) for _ in range(2))
            weight = draw(rng, shape[-1:], dtype)
            want, total = twin.rms_norm_quant(x, weight, **options), residual.copy()
            added = {True: twin.fused_add_rms_norm_quant(x, total, weight, **options)}
            added[False] = twin.fused_add_rms_norm_quant(x, residual.copy(), weight, **options, round_sum=False)
            for variant in variants:
                q, s = Buffer(shape, "uint8"), Buffer(want[1].shape, "float32")
                arguments = cupy.asarray(x), cupy.asarray(weight)
                cukern.rms_norm_quant(*arguments, **moved, out_q=q.array, out_s=s.array, variant=variant)
                same((q.numpy(), s.numpy()), want)
                for rounded, sums in added.items():
                    given = cupy.asarray(residual)
                    more = {**moved, "variant": variant, "round_sum": rounded}
                    same(cukern.fused_add_rms_norm_quant(arguments[0], given, arguments[1], **more), sums)
                    matches(given, total)
                    same_bits(arguments[0], x)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(5, 77), (3, 5, 64), (3, 2048), (2, 9000)])
def test_rows_apart_and_off_alignment(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    x, residual, weight = draw(rng, shape, dtype), draw(rng, shape, dtype), draw(rng, shape[-1:], dtype)
    want, added, total = twin.rms_norm(x, weight), x.copy(), residual.copy()
    twin.fused_add_rms_norm(added, total, weight)
    unrounded = x.copy()
    twin.fused_add_rms_norm(unrounded, residual.copy(), weight, round_sum=False)
    for skip, apart in ((0, 0), (1, 0), (0, 3), (0, 16)):
        out = Buffer(shape, dtype, skip)
        cukern.rms_norm(place(x, skip, apart), cupy.asarray(weight), out=out.array)
        matches(out.numpy(), want)
        both = place(x, skip, apart), place(residual, 0, 2 * apart)
        cukern.fused_add_rms_norm(*both, place(weight, skip))
        matches(both[0], added)
        matches(both[1], total)
        both = place(x, skip, apart), place(residual, 0, 2 * apart)
        cukern.fused_add_rms_norm(*both, place(weight, skip), round_sum=False)
        matches(both[0], unrounded)
        matches(both[1], total)
        got = cukern.rms_norm_quant(place(x, skip, apart), None, group_size=None)
        same(got, twin.rms_norm_quant(x, None, group_size=None))


@pytest.mark.gpu
@pytest.mark.sanitize
def test_heads_of_a_product(rng: np.random.Generator) -> None:
    product = draw(rng, (37, 12 * 128), "bfloat16")
    weight = draw(rng, (128,), "bfloat16")
    heads = product.reshape(37, 12, 128)
    want = twin.rms_norm(heads, weight)
    given = cupy.asarray(heads)
    q, k = given[:, :8], given[:, 8:10]
    for part, slices in ((q, slice(0, 8)), (k, slice(8, 10))):
        matches(cukern.rms_norm(part, cupy.asarray(weight)), want[:, slices])
        matches(cukern.rms_norm(part.swapaxes(0, 1), cupy.asarray(weight)), want[:, slices].swapaxes(0, 1))
        same(cukern.rms_norm_quant(part, None), twin.rms_norm_quant(heads[:, slices], None))
        assert cukern.rms_norm(part, cupy.asarray(weight), out=part) is part
    got = cupy.asnumpy(given)
    matches(got[:, :10], want[:, :10])
    same_bits(got[:, 10:], heads[:, 10:])


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    st.integers(1, 70), st.integers(1, 1500), st.sampled_from(DTYPES), st.booleans(), st.booleans(),
    st.integers(0, 2**32),
)  # fmt: skip
def test_random_shapes(rows: int, width: int, dtype: str, eights: bool, special: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = width * 8 if eights else width
    x, weight = draw(rng, (rows, width), dtype, special), draw(rng, (width,), dtype)
    matches(cukern.rms_norm(cupy.asarray(x), cupy.asarray(weight)), twin.rms_norm(x, weight))
    got = cukern.rms_norm_quant(cupy.asarray(x), cupy.asarray(weight), group_size=None)
    same(got, twin.rms_norm_quant(x, weight, group_size=None))


@pytest.mark.gpu
@pytest.mark.large(5)
def test_rows_far_apart(rng: np.random.Generator) -> None:
    # Not for the sanitizer, which would take minutes.
    memory = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    x = draw(rng, (3, 2, 256), "bfloat16")
    far = memory.as_strided((3, 2, 256), (2**30, 512, 1))
    far.copy_(as_torch(x))
    residual = torch.zeros_like(far.contiguous())
    matches(cukern.rms_norm(far, None), twin.rms_norm(x, None))
    cukern.fused_add_rms_norm(far, residual, None)
    matches(far, twin.rms_norm(x, None))


@pytest.mark.gpu
def test_fp8_tensors(rng: np.random.Generator) -> None:
    x, weight = draw(rng, (9, 256), "bfloat16"), draw(rng, (256,), "float32")
    q, s = cukern.rms_norm_quant(as_torch(x).cuda(), torch.from_numpy(weight).cuda())
    assert q.dtype == torch.float8_e4m3fn
    same((q, s), twin.rms_norm_quant(x, weight))
