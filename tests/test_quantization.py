"""Quantization: the twin against torch and ml_dtypes, the kernels against the twin, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_quantization, harness
from cukern.reference import moe_activation as activated
from cukern.reference import quantization as twin
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from cukern.runtime.op import Op
from cukern.runtime.plan import empty
from cukern.testing import assert_matches
from tests.buffers import Buffer, place, to_numpy
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")
E4M3 = ml_dtypes.float8_e4m3fn
#: Each way to quantize to 8 bits: the function, and its arguments after the array.
WAYS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "fp8 of a tensor": ("scaled_fp8_quant", (), {}),
    "fp8 of a tensor, bounded": ("scaled_fp8_quant", (None, None, 1.5), {}),
    "fp8 with a scale": ("scaled_fp8_quant", (0.37,), {}),
    "fp8 with a tiny scale": ("scaled_fp8_quant", (1e-38,), {}),
    "fp8 with a huge scale": ("scaled_fp8_quant", (3e38,), {}),
    "fp8 with a scale of 0": ("scaled_fp8_quant", (0.0,), {}),
    "fp8 of tokens": ("scaled_fp8_quant", (None, None, None, True), {}),
    "fp8 of tokens, bounded": ("scaled_fp8_quant", (None, None, np.array([2.5], np.float32), True), {}),
    "fp8 of groups": ("per_token_group_quant_fp8", (64,), {}),
    "fp8 of small groups": ("per_token_group_quant_fp8", (8,), {"column_major_scales": True}),
    "fp8 of large groups": ("per_token_group_quant_fp8", (256,), {"use_ue8m0": True}),
    "fp8 of any groups": ("per_token_group_quant_fp8", (96,), {"use_ue8m0": True, "column_major_scales": True}),
    "int8 of groups": ("per_token_group_quant_int8", (128,), {}),
    "int8 of any groups": ("per_token_group_quant_int8", (48,), {"column_major_scales": True}),
    "int8 of groups, cut": ("per_token_group_quant_int8", (32,), {"truncate": True}),
    "int8 of any groups, cut": ("per_token_group_quant_int8", (48,), {"truncate": True}),
    "int8 of tokens": ("scaled_int8_quant", (), {}),
    "int8 with zero points": ("scaled_int8_quant", (None, None, False), {}),
    "int8 with a scale": ("scaled_int8_quant", (0.02,), {}),
    "int8 with both": ("scaled_int8_quant", (0.02, np.array([-7], np.int32), False), {}),
}


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool = False) -> Array:
    """Rows of different magnitudes; if `special`, with NaN, infinities, zeros and tiny numbers in some places."""
    size = np.exp2(rng.integers(-8, 8, (*shape[:-1], 1)))
    x = (rng.standard_normal(shape) * size).astype(arrays.numpy_dtype(dtype))
    if special and x.size:
        for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-38):
            x.reshape(-1)[rng.integers(0, x.size)] = value
    return x


def fits(way: str, k: int) -> bool:
    name, args, _ = WAYS[way]
    return not name.startswith("per_token") or k % args[0] == 0


def same(got: Any, want: Any) -> None:
    """The same quantized numbers, zeros' signs included, and the same scales."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        if theirs is None:
            assert ours is None
            continue
        ours = to_numpy(ours)
        if theirs.dtype == E4M3:
            ours = ours.view(E4M3)
            assert_matches("quantization.quantized", ours, theirs)
            numbers = ~np.isnan(theirs.astype(np.float32))
            np.testing.assert_array_equal(np.signbit(ours)[numbers], np.signbit(theirs)[numbers])
        else:
            assert_matches("quantization.scales", ours, theirs)


def call(name: str, put: Callable[[Any], Any], x: Any, *args: Any, **options: Any) -> tuple[Any, ...]:
    moved = [put(a) if isinstance(a, np.ndarray) else a for a in args]
    return getattr(cukern, name)(x, *moved, **options)


def run_twin(way: str, x: Array) -> tuple[Any, ...]:
    name, args, options = WAYS[way]
    return getattr(twin, name)(x, *args, **options)


# --- the twin -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_what_torch_has(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 256) * 3).to(dtype)
    for quotient, got in (
        (x.float().view(7, 2, 128), cukern.per_token_group_quant_fp8(x, 128)),
        (x.float().view(7, 1, 256), cukern.scaled_fp8_quant(x, use_per_token_if_dynamic=True)),
        (x.float().view(1, 1, -1), cukern.scaled_fp8_quant(x)),
    ):
        scales = quotient.abs().amax(-1, keepdim=True) / 448
        want = (quotient / scales).to(torch.float8_e4m3fn).reshape(7, 256)
        assert got[0].dtype == torch.float8_e4m3fn
        assert torch.equal(got[0].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(got[1].flatten(), scales.flatten())


def test_int8_is_what_torch_has() -> None:
    x = torch.randn(7, 256) * 3
    for groups, got in (
        (x.view(7, 4, 64), cukern.per_token_group_quant_int8(x, 64)),
        (x.view(7, 1, 256), cukern.scaled_int8_quant(x)),
    ):
        scales = groups.abs().amax(-1, keepdim=True) / 127
        want = torch.fake_quantize_per_tensor_affine(groups / scales, 1.0, 0, -128, 127).to(torch.int8)
        assert torch.equal(got[0], want.reshape(7, 256))
        assert torch.equal(got[1].flatten(), scales.flatten())
    cut, scales = cukern.per_token_group_quant_int8(x, 64, truncate=True)
    assert torch.equal(cut, (x.view(7, 4, 64) / scales[..., None]).to(torch.int8).reshape(7, 256))
    quantized, scales, zeros = cukern.scaled_int8_quant(x, symmetric=False)
    again = (quantized.float() - zeros) * scales
    assert (again - x).abs().max() <= scales.max() * 0.501
    assert (quantized.amin(1) == -128).all() and (quantized.amax(1) >= 126).all()
    constant = torch.tensor([[5.0, 5.0], [-3e4, -3e4], [0.0, 0.0]])
    quantized, scales, zeros = cukern.scaled_int8_quant(constant, symmetric=False)
    torch.testing.assert_close((quantized.float() - zeros) * scales, constant, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [8, 9, 4096])
def test_a_range_that_is_no_float32_has_a_finite_scale(dtype: str, width: int, put: Callable[[Any], Any]) -> None:
    x = np.ones((3, width), np.float32)
    x[0, :2] = -2e38, 2e38
    x[1, :2] = np.finfo(np.float32).min * 0.99, np.finfo(np.float32).max * 0.99
    x[2, :2] = -1e38, 1e38
    x = x.astype(arrays.numpy_dtype(dtype))
    quantized, scales, zeros = (to_numpy(found) for found in cukern.scaled_int8_quant(put(x), symmetric=False))
    wide = x.astype(np.float64)
    want = (wide.max(axis=1) - wide.min(axis=1)) / 255
    np.testing.assert_allclose(scales[:, 0], want, rtol=1e-6)
    again = (quantized.astype(np.float64) - zeros) * scales
    assert (np.abs(again - wide).max(axis=1) <= want * 1.001).all()
    assert (quantized[:, 0] == -128).all() and (quantized[:, 1] >= 126).all()
    np.testing.assert_array_equal(quantized, twin.scaled_int8_quant(x, symmetric=False)[0])


def test_by_hand(put: Callable[[Any], Any]) -> None:
    numbers = np.zeros((1, 32), np.float32)
    numbers[0, :9] = [448, 17, -19, -0.0, 2**-10, 3 * 2**-10, 1e-30, -25, 27]  # of scale 1: ties to even
    quantized, scales = cukern.per_token_group_quant_fp8(put(numbers), 16)
    got = to_numpy(quantized).view(E4M3).astype(np.float32)[0]
    assert got[:9].tolist() == [448, 16, -20, 0, 0, 2**-8, 0, -24, 28] and np.signbit(got[3]) and not got[9:].any()
    np.testing.assert_array_equal(to_numpy(scales), [[1, np.float32(1e-10) / np.float32(448)]])
    _, scales = cukern.per_token_group_quant_fp8(put(numbers * 1.01), 32, use_ue8m0=True)
    assert to_numpy(scales).tolist() == [[2.0]]
    quantized, scale = cukern.scaled_fp8_quant(put(numbers), 0.5)
    assert to_numpy(quantized).view(E4M3).astype(np.float32)[0, :3].tolist() == [448, 32, -40]
    assert to_numpy(scale) == [0.5]
    quantized, scale, zero = cukern.scaled_int8_quant(
        put(np.array([[0.0, 255, 100.5, 101.5]], np.float32)), None, None, False
    )
    assert to_numpy(quantized).tolist() == [[-128, 127, -28, -26]]
    assert to_numpy(scale) == [[1]] and to_numpy(zero) == [[-128]]
    quantized, _, zero = cukern.scaled_int8_quant(put(numbers), 2.0)
    assert to_numpy(quantized)[0, :3].tolist() == [127, 8, -10] and zero is None


def test_mxfp4_by_hand(put: Callable[[Any], Any]) -> None:
    x = np.zeros((1, 96), np.float32)
    # Between two numbers of e2m1, ties to the even code; 7.9 is past the largest, and below it by the scale of 1.
    x[0, :12] = [7.9, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5.01, -0.0, 0.2501, 6]
    x[0, 32:34] = [2**-130, -(2.0**-126)]
    x[0, 64] = np.nan
    packed, scale = cukern.quantize_mxfp4(put(x))
    assert to_numpy(scale).tolist() == [[127, 0, 255]]
    assert to_numpy(packed)[0, :6].tolist() == [0x07, 0x22, 0x44, 0x66, 0x8F, 0x71]
    assert to_numpy(packed)[0, 16] == 0xC0
    again = to_numpy(cukern.dequantize_mxfp4(packed, scale, "float32"))[0]
    assert again[:12].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -6, 0, 0.5, 6]
    assert again[33] == -(2.0**-126) and np.isnan(again[64:]).all()


def test_nvfp4_by_hand(put: Callable[[Any], Any]) -> None:
    x = np.zeros((1, 48), np.float32)
    x[0, :4] = [6, 2.5, -1.75, 0.3]
    x[0, 16:18] = [2.3, -0.1]  # 2.3 / 6 rounds to 0.375
    packed, scale = cukern.scaled_fp4_quant(put(x), 1.0)
    assert to_numpy(scale).view(E4M3).astype(np.float32).tolist() == [[1, 0.375, 0]]
    assert to_numpy(packed)[0, [0, 1, 8, 16]].tolist() == [0x47, 0x1C, 0x97, 0]
    again = to_numpy(cukern.dequantize_nvfp4(packed, scale, 1.0, "float32"))[0]
    assert again[:4].tolist() == [6, 2, -2, 0.5] and again[16] == 2.25


def test_four_bits_are_what_ml_dtypes_has(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 256)).astype(np.float32)
    packed, scale = twin.quantize_mxfp4(x)
    groups = x.reshape(5, 8, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    np.testing.assert_array_equal(scale, exponent + 127)
    codes = np.clip(groups / np.exp2(exponent)[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    want = codes.astype(np.float32) * np.exp2(exponent)[..., None]
    np.testing.assert_array_equal(twin.dequantize_mxfp4(packed, scale, "float32"), want.reshape(5, 256))
    global_scale = np.float32(448 * 6 / np.abs(x).max())
    packed, scale = twin.scaled_fp4_quant(x, global_scale)
    groups = x.reshape(5, 16, 16)
    scales = (np.abs(groups).max(-1) / np.float32(6) * global_scale).astype(E4M3)
    np.testing.assert_array_equal(scale.view(E4M3), scales)
    factor = global_scale / scales.astype(np.float32)[..., None]
    codes = np.clip(groups * factor, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    want = codes.astype(np.float32) * (scales.astype(np.float32) / global_scale)[..., None]
    np.testing.assert_array_equal(twin.dequantize_nvfp4(packed, scale, global_scale, "float32"), want.reshape(5, 256))
    assert np.abs(want.reshape(5, 256) - x).mean() < 0.1


def test_an_activation_is_quantized_as_it_is(rng: np.random.Generator) -> None:
    x = draw(rng, (6, 512), "bfloat16")
    halves = activated.activate("gelu", x[:, :256], x[:, 256:])
    same(twin.silu_and_mul_quant(x, "gelu", group_size=64), twin.per_token_group_quant_fp8(halves, 64))
    same(twin.silu_and_mul_quant(x, "gelu", group_size=None), twin.scaled_fp8_quant(halves, None, None, None, True))
    same(twin.silu_and_mul_quant(x, "gelu", scale=0.2), twin.scaled_fp8_quant(halves, 0.2))


@pytest.mark.parametrize("way", WAYS)
def test_arrays_in_host_memory(way: str, rng: np.random.Generator) -> None:
    name, args, options = WAYS[way]
    x = draw(rng, (3, 768), "bfloat16", special=True)
    want = run_twin(way, x)
    same(call(name, np.asarray, x, *args, **options), want)
    tensor = torch.from_numpy(x.astype(np.float32)).bfloat16()
    got = call(name, torch.from_numpy, tensor, *args, **options)
    same(got, run_twin(way, to_numpy(tensor)))
    assert all(isinstance(a, torch.Tensor) for a in got if a is not None)


def test_results_are_written_where_asked() -> None:
    x = torch.randn(2, 4, 64)
    q = torch.full((2, 4, 64), 9, dtype=torch.uint8)
    s = torch.full((2, 2, 4), 9.0).swapaxes(1, 2)
    counts = torch.tensor([1, 4], dtype=torch.int32)
    options = {"expert_num_tokens": counts, "out_q": q, "out_s": s, "column_major_scales": True}
    got = cukern.per_token_group_quant_fp8(x, 32, **options)
    assert got[0] is q and got[1] is s
    assert (q[0, 1:] == 9).all() and (s[0, 1:] == 9).all()
    want = cukern.per_token_group_quant_fp8(x, 32)
    assert torch.equal(q[1], want[0][1].view(torch.uint8)) and torch.equal(s[1], want[1][1])
    output = torch.zeros(2, 4, 64, dtype=torch.float8_e4m3fn)
    assert cukern.scaled_fp8_quant(x, 0.5, output=output)[0] is output
    padded, scales = cukern.scaled_fp8_quant(x[0], None, 7, None, True)
    assert padded.shape == (7, 64) and scales.shape == (7, 1)
    assert torch.equal(
        padded[:4].view(torch.uint8), cukern.scaled_fp8_quant(x[0], None, None, None, True)[0].view(torch.uint8)
    )


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_nothing_to_quantize(put: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    x = put(np.zeros(shape, np.float32))
    assert to_numpy(cukern.scaled_fp8_quant(x)[1]).tolist() == [np.float32(1 / 512) / np.float32(448)]
    assert to_numpy(cukern.scaled_fp8_quant(x, 0.5)[1]).tolist() == [0.5]
    assert cukern.scaled_fp8_quant(x, None, None, None, True)[1].shape == (shape[0], 1)
    assert cukern.per_token_group_quant_fp8(x, 32)[1].shape == (shape[0], shape[1] // 32)
    zeros = cukern.scaled_int8_quant(x, None, None, False)[2]
    assert zeros is not None and zeros.shape == (shape[0], 1)
    assert cukern.silu_and_mul_quant(x, group_size=32)[0].shape == (shape[0], shape[1] // 2)
    packed, scale = cukern.quantize_mxfp4(x)
    assert cukern.dequantize_mxfp4(packed, scale).shape == shape
    packed, scale = cukern.scaled_fp4_quant(x, 1.0)
    assert cukern.dequantize_nvfp4(packed, scale, 1.0).shape == shape


# --- bad input ----------------------------------------------------------------------------------------

X = np.zeros((2, 3, 64), np.float32)
ONE, COUNTS = np.ones(1, np.float32), np.zeros(2, np.int32)
PACKED, SCALE = np.zeros((3, 32), np.uint8), np.zeros((3, 4), np.uint8)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("scaled_fp8_quant", ([1.0],), {}, TypeError, "input must be an array (NumPy, CuPy, torch, or any"),
    ("scaled_fp8_quant", (X.astype(int),), {}, TypeError, "input must be float32 or float16 or bfloat16, got int64"),
    ("scaled_fp8_quant", (X[:, :, ::2],), {}, ValueError, "input must be contiguous along its last dimension"),
    ("scaled_fp8_quant", (X, "a"), {}, TypeError, "scale must be a number, got 'a' (str)"),
    ("scaled_fp8_quant", (X, np.ones(2, np.float32)), {}, ValueError, "scale must be a number or an array of one"),
    ("scaled_fp8_quant", (X, np.ones(1)), {}, TypeError, "scale must be float32, got float64"),
    ("scaled_fp8_quant", (X, ONE, None, 2.0), {}, ValueError, "scale_ub must be None with a scale, got one"),
    ("scaled_fp8_quant", (X, None, -1), {}, ValueError, "num_token_padding must be an integer in [0, 2147479552], got"),
    ("scaled_fp8_quant", (X[0, 0], None, 9), {}, ValueError, "input must be of shape [tokens, hidden], got [64]"),
    ("scaled_fp8_quant", (X,), {"output": X}, TypeError, "output must be float8_e4m3fn or uint8, got float32"),
    ("scaled_fp8_quant", (X, ONE, 4), {"output": X.astype(E4M3)}, ValueError, "output must be of shape [tokens, ..."),
    ("scaled_fp8_quant", (X,), {"variant": "vector"}, ValueError, "variant must be 'auto' for arrays in host memory"),
    ("scaled_fp8_quant", (X,), {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'vector', 'scalar'"),
    ("per_token_group_quant_fp8", (X, 48), {}, ValueError, "x must be of whole groups of 48 along its last dimension"),
    ("per_token_group_quant_fp8", (X, 0), {}, ValueError, "group_size must be an integer of at least 1, got 0"),
    ("per_token_group_quant_fp8", (X, 32, 0.0), {}, ValueError, "eps must be a number of at least 1e-20, got 0.0"),
    ("per_token_group_quant_fp8", (X[0, 0], 32), {"column_major_scales": True}, ValueError, "x must be of shape [..."),
    (
        "per_token_group_quant_fp8", (X, 32), {"column_major_scales": True, "out_s": np.zeros((2, 3, 2), np.float32)},
        ValueError, "out_s must be contiguous, got",
    ),
    ("per_token_group_quant_fp8", (X, 32), {"out_s": np.zeros((2, 3), np.float32)}, ValueError, "out_s must be of sha"),
    ("per_token_group_quant_fp8", (X[0], 32), {"expert_num_tokens": COUNTS}, ValueError, "x must be of shape [experts"),
    ("per_token_group_quant_int8", (X, 32), {"out_q": X.astype(np.uint8)}, TypeError, "out_q must be int8, got uint8"),
    ("per_token_group_quant_int8", (X, 32), {"variant": "scalar"}, ValueError, "variant must be 'auto' for arrays"),
    ("scaled_int8_quant", (X, None, COUNTS[:1], False), {}, ValueError, "azp must be None without a scale, or if symm"),
    ("scaled_int8_quant", (X, ONE, COUNTS[:1]), {}, ValueError, "azp must be None without a scale, or if symmetric"),
    ("scaled_int8_quant", (X, ONE, None, False), {}, TypeError, "azp must be an int32 array of one element with"),
    ("scaled_int8_quant", (X, ONE, COUNTS, False), {}, ValueError, "azp must be an array of one element, got an"),
    ("scaled_int8_quant", (X, ONE, ONE, False), {}, TypeError, "azp must be int32, got float32"),
    ("scaled_int8_quant", (X,), {"variant": "scalar"}, ValueError, "variant must be 'auto' for arrays in host memory"),
    ("silu_and_mul_quant", (X[..., :63],), {}, ValueError, "x must be of shape [..., 2 * inter], got [2, 3, 63]"),
    ("silu_and_mul_quant", (X,), {}, ValueError, "x must be of whole groups of 128 along its last dimension, got 32"),
    ("silu_and_mul_quant", (X, "tanh"), {}, ValueError, "activation must be one of 'silu', 'gelu', 'gelu_tanh'"),
    ("silu_and_mul_quant", (X,), {"scale": 1.0, "out_s": np.zeros(2, np.float32)}, ValueError, "out_s must be of"),
    ("silu_and_mul_quant", (X,), {"scale": 1.0, "variant": "x"}, ValueError, "variant must be one of 'auto', 'vector'"),
    ("quantize_mxfp4", (X[..., :48],), {}, ValueError, "x must be of whole groups of 32 along its last dim"),
    ("scaled_fp4_quant", (X[..., :40], 1.0), {}, ValueError, "input must be of whole groups of 16 along its"),
    ("scaled_fp4_quant", (X, None), {}, TypeError, "input_global_scale must be a number or a float32 array of one"),
    ("dequantize_mxfp4", (X, SCALE), {}, TypeError, "packed must be uint8, got float32"),
    ("dequantize_mxfp4", (PACKED[:, :8], SCALE), {}, ValueError, "packed must be of shape [..., k / 2] with k a"),
    ("dequantize_mxfp4", (PACKED, SCALE), {}, ValueError, "scale must be of shape [..., k / 32] = [3, 2], got"),
    ("dequantize_mxfp4", (PACKED, SCALE[:, :2], "int8"), {}, ValueError, "dtype must be one of 'float32', 'float16'"),
    ("dequantize_nvfp4", (PACKED, SCALE.astype(np.int8), 1.0), {}, TypeError, "scale must be float8_e4m3fn or uint8"),
    ("dequantize_nvfp4", (PACKED, SCALE, None), {}, TypeError, "global_scale must be a number or a float32 array"),
    ("dequantize_nvfp4", (PACKED[:, ::2], SCALE, 1.0), {}, ValueError, "packed must be contiguous, got strides"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "args", "options", "error", "message"), BAD)
def test_bad_input_is_refused(
    name: str, args: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(*args, **options)


# --- plans --------------------------------------------------------------------------------------------


PLANS = {name: (*WAYS[name], 768) for name in WAYS} | {
    "activated": ("silu_and_mul_quant", (), {}, 768),
    "activated by tokens": ("silu_and_mul_quant", (), {"group_size": None}, 768),
    "activated with a scale": ("silu_and_mul_quant", (), {"scale": 0.5}, 768),
    "mxfp4": ("quantize_mxfp4", (), {}, 768),
    "nvfp4": ("scaled_fp4_quant", (3.0,), {}, 768),
    "from mxfp4": ("dequantize_mxfp4", (), {}, 32),
    "from nvfp4": ("dequantize_nvfp4", (), {}, 32),
}


@pytest.mark.parametrize("way", PLANS)
def test_the_rows_decide_no_kernel(way: str) -> None:
    name, args, options, k = PLANS[way]

    def steps(rows: int) -> list[Any]:
        if name.startswith("dequantize"):
            scale = np.zeros((rows, 2 * k // (32 if name.endswith("mxfp4") else 16)), np.uint8)
            numbers = (2.0,) if name.endswith("nvfp4") else ()
            return plan_of(name, np.zeros((rows, k), np.uint8), scale, *numbers)[0].steps
        return plan_of(name, np.zeros((rows, k), np.float16), *args, **options)[0].steps

    first = [step.variant for step in steps(3)]
    assert first
    for rows in (1, 2, 77, 4096, 100_000):
        found = steps(rows)
        assert [step.variant for step in found] == first
        for fields in (step.fields for step in found):
            assert fields["vectors"] == rows * k // 4 if "vectors" in fields else fields["in"][3] == rows


@pytest.mark.parametrize("shape", [(768,), (1, 768), (5, 768), (2, 5, 768), (0, 768), (3, 0)])
def test_a_scale_of_each_call(shape: tuple[int, ...], pretended: PretendedGPU) -> None:  # noqa: F811
    x = torch.zeros(shape, dtype=torch.float16)
    for scale in (0.5, 0.25, 3, np.float32(0.125), 0.5, 0.25, 0.25):
        cukern.scaled_fp8_quant(x, scale)  # type: ignore[arg-type]
        assert pretended.launches[-1].fields["scale"] == {"array": 0, "number": scale}
    count, of_numpy = len(pretended.launches), np.ones(1, np.float32)
    for bad in (float("nan"), True, np.float32("inf"), of_numpy, torch.ones(2)):
        with pytest.raises((TypeError, ValueError), match=r"^scale must be a"):
            cukern.scaled_fp8_quant(x, bad)  # type: ignore[arg-type]
    assert len(pretended.launches) == count


def test_what_is_given_is_written(pretended: PretendedGPU) -> None:  # noqa: F811
    counts, scale, zero = torch.zeros(2, dtype=torch.int32), torch.ones(1), torch.zeros(1, dtype=torch.int32)
    for tokens in (4, 4, 4, 6):
        x, s, q = torch.zeros(2, tokens, 256), torch.zeros(2, tokens, 2), torch.zeros(2, tokens, 256).char()
        found = cukern.per_token_group_quant_int8(x, 128, expert_num_tokens=counts, out_q=q, out_s=s)
        assert found[0] is q and found[1] is s
        fields = pretended.launches[-1].fields
        assert [fields["in"]["x"], fields["in"]["counts"], fields["q"]] == [y.data_ptr() for y in (x, counts, q)]
        assert (fields["scales"]["out"], fields["scales"]["expert_stride"]) == (s.data_ptr(), 2 * tokens)
        assert fields["in"]["max_tokens"] == tokens
        cukern.scaled_fp8_quant(x, None, None, scale, expert_num_tokens=counts)
        first, second = pretended.launches[-2:]
        assert first.fields["partial"] == second.fields["partial"] and second.fields["partials"] == first.grid[0]
        assert second.fields["upper"]["array"] == scale.data_ptr()
        _, scales, zeros = cukern.scaled_int8_quant(x, scale, zero, False)
        found = [pretended.launches[-1].fields[name] for name in ("azp", "azp_out", "scale_out")]
        assert found == [y.data_ptr() for y in (zero, zeros, scales)]


def test_the_kernel_follows_from_the_alignment(pretended: PretendedGPU) -> None:  # noqa: F811
    room, packed = torch.zeros(3 * 256 + 1), torch.zeros(3 * 256 + 8, dtype=torch.uint8)
    for x, q, function in ((0, 0, "quantize_groups"), (1, 0, "quantize_rows"), (0, 4, "quantize_rows")) * 3:
        given, out_q = (y[start:][: 3 * 256].reshape(3, 256) for y, start in ((room, x), (packed, q)))
        cukern.per_token_group_quant_fp8(given, 128, out_q=out_q)
        assert pretended.launches[-1].variant.instance.function == function
    # The stride of one row means nothing, and that of several is refused.
    odd = torch.zeros(2 * 700)[:1024].as_strided((2, 2, 256), (601, 300, 1))
    cukern.per_token_group_quant_fp8(odd[:1], 128)
    with pytest.raises(ValueError, match=r"^x must be contiguous along its last dimension, with all rows at one dist"):
        cukern.per_token_group_quant_fp8(odd, 128)


@pytest.mark.parametrize("tokens", [1, 2, 500, 65536])
@pytest.mark.parametrize("group_size", [128, None])
def test_rows_in_the_plan_of_another_op(group_size: int | None, tokens: int) -> None:
    def layer(x: Any, offsets: Any) -> Any:
        rows = x.shape[0] * 6
        gate_up, q = empty((rows, 1024), "bfloat16"), empty((1, rows, 512), "float8_e4m3fn")
        s = empty((1, rows, 4 if group_size else 1), "float32")
        given = {"group_size": group_size, "expert_num_tokens": offsets[8:], "out_q": q, "out_s": s}
        return cukern.silu_and_mul_quant(gate_up.reshape(1, rows, 1024), **given)[0]

    trace, _ = plan_of(Op(layer, None), np.zeros((tokens, 64), np.float16), np.zeros(9, np.int32))
    (step,) = trace.steps
    x, counts, *sizes = step.fields["in"]
    assert sizes[:3] == [2048, 6 * tokens, 6 * tokens] and (counts.source, counts.offset) == (1, 32)
    made = [trace.first_made + i for i in range(3)]
    assert [x.source, step.fields["q"].source, step.fields["scales"][0].source] == made
    assert step.variant.instance.function == ("quantize_groups" if group_size else "quantize_rows")


# --- benchmarks ---------------------------------------------------------------------------------------


def test_the_benchmark_compares_the_same_thing() -> None:
    for case in bench_quantization.cases():
        small = bench_quantization.shrunk(case)
        ours, theirs = (harness.inputs(small, 0, "cpu") for _ in range(2))
        assert small.agree is not None
        for name, baseline in small.baselines.items():
            if not baseline.slow:
                assert small.agree(small.call(*ours), baseline.load()(*theirs)), name


# --- on the GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_is_the_twin(way: str, dtype: str, rng: np.random.Generator) -> None:
    # One tile; several tiles in a row; rows longer than a block's registers hold; one row; rows of no whole unit.
    name, args, options = WAYS[way]
    for shape in ((1, 768), (3, 5, 768), (130, 2304), (3, 36864), (768,), (6, 77)):
        if not fits(way, shape[-1]) or ("column_major_scales" in options and len(shape) < 2):
            continue
        for special in (False, True):
            x = draw(rng, shape, dtype, special)
            want = run_twin(way, x)
            for variant in ("auto", "scalar") if x.size < 10000 else ("auto",):
                same(call(name, cupy.asarray, cupy.asarray(x), *args, **options, variant=variant), want)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("way", WAYS)
def test_rows_apart_and_off_alignment(way: str, rng: np.random.Generator) -> None:
    name, args, options = WAYS[way]
    x = draw(rng, (3, 768), "bfloat16", special=True)
    want = run_twin(way, x)
    for skip, apart in ((0, 0), (1, 0), (0, 3), (0, 16)):
        same(call(name, cupy.asarray, place(x, skip, apart), *args, **options), want)
    with pytest.raises(ValueError, match="variant must be 'auto' or 'scalar' here, got 'vector'"):
        call(name, cupy.asarray, place(x, 1), *args, **options, variant="vector")


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("group", [None, 8, 24, 96, "scale"])
def test_rows_past_the_count_are_not_touched(group: Any, rng: np.random.Generator) -> None:
    x, counts = draw(rng, (4, 6, 192), "float16"), np.array([0, 6, 2, 9], np.int32)
    valid = activated.valid_rows(x.shape, counts)
    x[~valid] = np.nan
    per_group: dict[str, Any] = {"scale": 0.3} if group == "scale" else {"group_size": group}
    ways: list[tuple[str, tuple[Any, ...], dict[str, Any], int]] = [("silu_and_mul_quant", (), per_group, 96)]
    if isinstance(group, int):
        ways += [
            ("per_token_group_quant_fp8", (group,), {"column_major_scales": turned}, 192) for turned in (False, True)
        ]
    for name, args, options, k in ways:
        groups = 1 if not isinstance(group, int) else k // group
        turned = options.get("column_major_scales", False)
        shape = (1,) if group == "scale" else (4, groups, 6) if turned else (4, 6, groups)
        q, s = Buffer((4, 6, k), "uint8"), Buffer(shape, "float32")
        before = cupy.asnumpy(q.array), cupy.asnumpy(s.array)
        out_s = s.array.swapaxes(1, 2) if turned else s.array
        given_counts = {"expert_num_tokens": cupy.asarray(counts)}
        getattr(cukern, name)(cupy.asarray(x), *args, **options, **given_counts, out_q=q.array, out_s=out_s)
        want_q, want_s = getattr(twin, name)(x, *args, **options, expert_num_tokens=counts)
        got_q, got_s = q.numpy(), s.numpy()
        np.testing.assert_array_equal(got_q[~valid], before[0][~valid])
        exact = name != "silu_and_mul_quant"
        assert_matches(
            "quantization.quantized" if exact else "quantization.activated", got_q[valid].view(E4M3), want_q[valid]
        )
        if group != "scale":
            got_s, poison = (a.swapaxes(1, 2) if turned else a for a in (got_s, before[1]))
            assert_matches(
                "quantization.scales" if exact else "quantization.activated_scales", got_s[valid], want_s[valid]
            )
            np.testing.assert_array_equal(got_s[~valid].view(np.uint32), poison[~valid].view(np.uint32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "swigluoai", "relu2"])
def test_activated_and_quantized(name: str, dtype: str, rng: np.random.Generator) -> None:
    for shape in ((1, 512), (130, 2048), (3, 5, 512), (2, 81920)):
        x = (2 * rng.standard_normal(shape)).astype(arrays.numpy_dtype(dtype))
        ways: list[dict[str, Any]] = [
            {},
            {"group_size": 32},
            {"group_size": None},
            {"scale": 0.05},
            {"variant": "scalar"},
        ]
        for options in ways:
            if shape[-1] > 10000 and options.get("group_size", 0) is not None:
                continue
            got = cukern.silu_and_mul_quant(cupy.asarray(x), name, **options)
            want = twin.silu_and_mul_quant(x, name, **{k: v for k, v in options.items() if k != "variant"})
            assert_matches("quantization.activated", to_numpy(got[0]).view(E4M3), want[0])
            assert_matches("quantization.activated_scales", got[1], want[1])
            assert (to_numpy(got[0]) == want[0].view(np.uint8)).mean() > 0.99


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_four_bits(dtype: str, rng: np.random.Generator) -> None:
    for shape in ((1, 32), (3, 5, 96), (70, 2048), (2, 40960), (64,)):
        for special in (False, True):
            x = draw(rng, shape, dtype, special)
            for skip, apart in ((0, 0), (1, 0), (0, 3)):
                given = place(x, skip, apart) if x.size < 10000 else cupy.asarray(x)
                for got, want in (
                    (cukern.quantize_mxfp4(given), twin.quantize_mxfp4(x)),
                    (cukern.scaled_fp4_quant(given, 40.0), twin.scaled_fp4_quant(x, 40.0)),
                ):
                    for ours, theirs in zip(got, want, strict=True):
                        np.testing.assert_array_equal(to_numpy(ours), theirs)
    packed, scale = (rng.integers(0, 256, (37, size), dtype=np.uint8) for size in (64, 4))
    global_scale = np.array([3.0], np.float32)
    nv_scale = rng.integers(0, 256, (37, 8), dtype=np.uint8)
    for skip in (0, 1):
        given = place_bytes(packed, skip)
        got = cukern.dequantize_mxfp4(given, cupy.asarray(scale), dtype)
        assert_matches("quantization.numbers", got, twin.dequantize_mxfp4(packed, scale, dtype))
        got = cukern.dequantize_nvfp4(given, cupy.asarray(nv_scale), cupy.asarray(global_scale), dtype)
        assert_matches("quantization.numbers", got, twin.dequantize_nvfp4(packed, nv_scale, global_scale, dtype))


def place_bytes(values: Array, skip: int) -> Any:
    buffer = Buffer(values.shape, "uint8", skip)
    buffer.array[...] = cupy.asarray(values)
    return buffer.array


@pytest.mark.gpu
def test_fp8_tensors(rng: np.random.Generator) -> None:
    x = draw(rng, (9, 256), "bfloat16")
    tensor = torch.from_numpy(x.astype(np.float32)).bfloat16().cuda()
    for way, (name, args, options) in WAYS.items():
        if fits(way, 256):
            got = call(name, lambda a: torch.from_numpy(a).cuda(), tensor, *args, **options)
            same(got, run_twin(way, x))
            assert got[0].dtype in (torch.float8_e4m3fn, torch.int8)
    q, s = torch.empty(9, 256, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(9, 2, device="cuda")
    assert cukern.per_token_group_quant_fp8(tensor, 128, out_q=q, out_s=s)[0] is q
    same((q, s), twin.per_token_group_quant_fp8(x, 128))


@pytest.mark.gpu
@settings(max_examples=60)
@given(
    st.integers(0, 70), st.integers(0, 60), st.sampled_from([1, 8, 12, 32, 128]), st.sampled_from(DTYPES),
    st.integers(0, 2**32), st.booleans(), st.booleans(),
)  # fmt: skip
def test_random_shapes(
    rows: int, groups: int, group: int, dtype: str, seed: int, special: bool, column_major_scales: bool
) -> None:
    x = draw(np.random.default_rng(seed), (rows, groups * group), dtype, special)
    given = cupy.asarray(x)
    options: dict[str, Any] = {"column_major_scales": column_major_scales}
    same(cukern.per_token_group_quant_fp8(given, group, **options), twin.per_token_group_quant_fp8(x, group, **options))
    same(cukern.scaled_fp8_quant(given), twin.scaled_fp8_quant(x))
    same(cukern.scaled_fp8_quant(given, None, None, None, True), twin.scaled_fp8_quant(x, None, None, None, True))
    same(cukern.scaled_int8_quant(given, None, None, False), twin.scaled_int8_quant(x, None, None, False))


@pytest.mark.gpu
def test_arrays_of_two_places_are_refused() -> None:
    x, one = torch.rand(4, 64, device="cuda"), torch.ones(1)
    for name, arguments in {
        "scale": {"scale": one},
        "scale_ub": {"scale_ub": one},
        "output": {"output": torch.empty(4, 64, dtype=torch.uint8)},
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be on CUDA device 0 like input, got one on the CPU"):
            cukern.scaled_fp8_quant(x, **arguments)
