"""Grouped products: the twin against torch, the kernels against the twin."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from benchmarks import bench_moe_gemm, harness
from cukern.commands import resources
from cukern.ops import moe_gemm as op
from cukern.ops.moe_gemm import kernels, stream_one
from cukern.ops.moe_gemm.product import Product
from cukern.reference import moe_gemm as twin
from cukern.runtime import arrays, gpu, plan
from cukern.runtime.activation import ACTIVATIONS, is_gated
from cukern.runtime.cuda import cupy
from cukern.runtime.each import Each
from cukern.runtime.gpu import Gpu
from cukern.runtime.kernel import arch_of_device
from cukern.runtime.op import OPS, Op
from cukern.runtime.vectors import ceil_div
from cukern.testing import assert_matches
from notebooks import moe_gemm_steps
from tests.activations import activated
from tests.buffers import POISON, Buffer, OnlyDLPack, as_torch, on_gpu, same_bits, to_numpy
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
NAN = np.nan
DTYPES = ("bfloat16", "float16")
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
#: Forms of `a` and `b`: 16 bits; FP8 with scales by blocks, of rows ("column": of rows of weights) or one; b of 4 bits.
WEIGHTS = ("16", "fp8 block", "fp8 row column", "fp8 one one", "fp8 one column", "fp8 row one", "mxfp4", "nvfp4")
#: The token of a row of no expert, where none may be read.
JUNK = 2**31 - 1


class Case(NamedTuple):
    """A call. Rows that may not be read are NaN, and so are the weights of experts without rows."""

    arguments: dict[str, Any]
    rows: Array  # bool, of the result's shape but its last dimension: the rows that are written

    @property
    def is_batched(self) -> bool:
        return "expert_num_tokens" in self.arguments

    @property
    def is_fp8(self) -> bool:
        return self.arguments["a"].dtype.itemsize == 1

    @property
    def tolerance(self) -> str:
        return "moe_gemm.fp8_out" if self.is_fp8 else "moe_gemm.out"

    @property
    def out_shape(self) -> tuple[int, ...]:
        columns = self.arguments["b"].shape[1] // (2 if is_gated(self.arguments.get("activation")) else 1)
        return (*self.rows.shape, columns)

    @property
    def out_dtype(self) -> str:
        return self.arguments.get("out_dtype") or ("bfloat16" if self.is_fp8 else self.arguments["a"].dtype.name)

    def run(self, **more: Any) -> Any:
        function = cukern.moe_gemm_batched if self.is_batched else cukern.moe_gemm
        return function(**{**self.arguments, **more})

    def twin(self) -> Array:
        function = twin.moe_gemm_batched if self.is_batched else twin.moe_gemm
        return function(**self.arguments)

    def replaced(self, **more: Any) -> Case:
        return self._replace(arguments={**self.arguments, **more})


def drawn(rng: np.random.Generator, shape: tuple[int, ...], whole: bool, scale: float = 1.0) -> Array:
    """Normal numbers times `scale`, or whole numbers from -2 to 2, in float32."""
    if whole:
        return rng.integers(-2, 3, shape).astype(np.float32)
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def scales(rng: np.random.Generator, shape: tuple[int, ...], whole: bool, scale: float = 1.0) -> Array:
    """Scales about `scale`, or powers of two, in float32."""
    if whole:
        return np.exp2(rng.integers(-2, 3, shape)).astype(np.float32)
    return (rng.uniform(0.5, 2, shape) * scale).astype(np.float32)


def _weights_of_16_bits(
    rng: np.random.Generator, shape: tuple[int, int, int], weights: str, dtype: str, whole: bool, share: Any
) -> dict[str, Array]:
    """`b` of 16 bits, or of FP8 without its scales."""
    fp8 = weights.startswith("fp8")
    b = drawn(rng, shape, whole, 1 if fp8 else shape[2] ** -0.5)
    return {"b": (b if fp8 or not whole else b * share).astype(E4M3 if fp8 else arrays.numpy_dtype(dtype))}


def _weights_of_4_bits(
    rng: np.random.Generator, shape: tuple[int, int, int], weights: str, whole: bool, share: Any
) -> dict[str, Array]:
    """`b` of MXFP4 or NVFP4 with its scales, which are not bytes yet."""
    experts, n, k = shape
    b = rng.integers(0, 256, (experts, n, k // 2)).astype(np.uint8)
    group = 32 if weights == "mxfp4" else 16
    b_scale = scales(rng, (experts, n, k // group), whole or group == 32)
    if group == 32:
        return {"b": b, "b_scale": (b_scale * share / 2).astype(E8M0)}
    global_scale = scales(rng, (experts,), whole, 0.25 * k**-0.5) * (share / 2 if whole else 1)
    return {"b": b, "b_scale": b_scale.astype(E4M3), "b_global_scale": global_scale}


def _fp8_scales(
    rng: np.random.Generator,
    rows: tuple[int, ...],
    shape: tuple[int, int, int],
    weights: str,
    whole: bool,
    share: Any,
) -> dict[str, Array]:
    """The scales of FP8 for so many rows."""
    experts, n, k = shape
    of_a, of_b = ["block"] * 2 if weights == "fp8 block" else weights.split()[1:]
    blocks = -(-k // 128)
    a_shape = {"block": (*rows, blocks), "row": rows, "one": (1,)}[of_a]
    b_shape = {"block": (experts, -(-n // 128), blocks), "column": (experts, n), "one": (experts,)}[of_b]
    a_scale = scales(rng, a_shape, whole)
    return {"a_scale": a_scale, "b_scale": scales(rng, b_shape, whole, k**-0.5) * (share if whole else 1)}


def made(
    rng: np.random.Generator,
    counts: Sequence[int],
    n: int,
    k: int,
    weights: str = "16",
    dtype: str = "bfloat16",
    activation: str | None = None,
    max_tokens: int | None = None,
    tokens: int | None = None,
    whole: bool = False,
    spare: int = 3,
    offsets_dtype: str = "int32",
) -> Case:
    """A call with so many rows of each expert.

    Args:
        dtype: the dtype of `a` where that has 16 bits, else of the result.
        max_tokens: batched, with room for so many.
        tokens: gathered from so many.
        whole: whole numbers times powers of two: their sums, about as large, are exact, whatever their order.
        spare: rows of no expert, behind all others.
    """
    experts, rows, fp8 = len(counts), sum(counts) + spare, weights.startswith("fp8")
    offsets = np.cumsum([0, *counts]).astype(offsets_dtype)
    if max_tokens is not None:
        is_row = np.arange(max_tokens) < np.array(counts)[:, None]
    else:
        is_row = np.arange(rows) < offsets[-1]
    a_shape = is_row.shape if tokens is None else (tokens,)
    unread = ~is_row if tokens is None else np.zeros(tokens, bool)
    share = np.exp2(np.round(-np.log2(2 * k**0.5)), dtype=np.float32)
    a = drawn(rng, (*a_shape, k), whole).astype(E4M3 if fp8 else arrays.numpy_dtype(dtype))
    a[unread] = NAN
    shape = experts, n, k
    if weights == "16" or fp8:
        of_b = _weights_of_16_bits(rng, shape, weights, dtype, whole, share)
    else:
        of_b = _weights_of_4_bits(rng, shape, weights, whole, share)
    x: dict[str, Any] = {}
    if fp8:
        found = _fp8_scales(rng, a_shape, shape, weights, whole, share)
        x, of_b["b_scale"] = {"a_scale": found["a_scale"], "out_dtype": dtype}, found["b_scale"]
        if weights.split()[1] != "one":
            x["a_scale"][unread] = NAN
    for array in of_b.values():
        if array.dtype != np.uint8:
            array[np.array(counts) == 0] = NAN
    if weights.endswith("4"):
        of_b["b_scale"] = of_b["b_scale"].view(np.uint8)
    x |= of_b
    if tokens is not None:
        x["row_token"] = np.where(is_row, rng.integers(0, max(tokens, 1), rows), JUNK).astype(np.int32)
    if activation is not None:
        x["activation"] = activation
    if max_tokens is not None:
        return Case({"a": a, "expert_num_tokens": np.array(counts, np.int32), **x}, is_row)
    return Case({"a": a, "expert_offsets": offsets, **x}, is_row)


# --- the twin against torch -----------------------------------------------------------------------------


def of_4_bits(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of e2m1: a sign, two bits of exponent with bias 1, one of mantissa."""
    exponent, mantissa = (codes >> 1 & 3).double(), (codes & 1).double()
    size = torch.where(exponent > 0, (1 + mantissa / 2) * 2 ** (exponent - 1), mantissa / 2)
    return torch.where(codes >= 8, -size, size)


def weights_by_torch(x: dict[str, Any], k: int) -> torch.Tensor:
    """The weights [experts, n, k] in float64."""
    b = as_torch(x["b"])
    if "b_scale" not in x:
        return b.double()
    scale = as_torch(x["b_scale"])
    if b.shape[2] != k:
        numbers = torch.empty(*b.shape[:2], k, dtype=torch.float64)
        numbers[:, :, 0::2], numbers[:, :, 1::2] = of_4_bits(b & 15), of_4_bits(b >> 4)
        group = k // scale.shape[2]
        if group == 32:
            factor = 2 ** (scale.double() - 127)
        else:
            factor = scale.view(torch.float8_e4m3fn).double() * as_torch(x["b_global_scale"]).double()[:, None, None]
        return numbers * factor.repeat_interleave(group, 2)
    if scale.ndim == 3:
        scale = scale.repeat_interleave(128, 1)[:, : b.shape[1]].repeat_interleave(128, 2)[:, :, :k]
    else:
        scale = scale.view(len(b), -1, 1)
    return b.double() * scale.double()


def by_torch(x: Case) -> Array:
    """The result in float64; rows that are not written are 0."""
    given = x.arguments
    a, k = as_torch(given["a"]).double(), given["a"].shape[-1]
    if "a_scale" in given:
        scale = as_torch(given["a_scale"]).double()
        if scale.ndim == a.ndim:
            scale = scale.repeat_interleave(128, -1)[..., :k]
        elif scale.shape != (1,):
            scale = scale[..., None]
        a = a * scale
    weights = weights_by_torch(given, k)
    is_row = torch.from_numpy(x.rows)
    if x.is_batched:
        expert = torch.arange(len(weights))[:, None].expand(is_row.shape)[is_row]
        a = a[is_row]
    else:
        count = int(is_row.sum())
        expert = torch.searchsorted(as_torch(given["expert_offsets"]).long(), torch.arange(count), right=True) - 1
        a = a[as_torch(given["row_token"])[:count].long()] if "row_token" in given else a[:count]
    sums = torch.stack([weights[e] @ row for e, row in zip(expert, a, strict=True)])
    if given.get("activation"):
        sums = activated(given["activation"], *sums.chunk(2, dim=1))
    out = torch.zeros(x.out_shape, dtype=torch.float64)
    out[is_row] = sums
    return out.numpy()


#: Calls by their reason: counts, n, k, and other arguments of `made`.
TORCH_TOO: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    "plain": ([3, 0, 1, 5], 24, 40, {}),
    "float16": ([3, 0, 1, 5], 24, 40, {"dtype": "float16"}),
    "int64 offsets": ([3, 0, 1, 5], 24, 40, {"offsets_dtype": "int64"}),
    "one expert": ([7], 8, 8, {"spare": 0}),
    "gathered": ([3, 0, 1, 5], 24, 40, {"tokens": 4}),
    "batched": ([3, 0, 1, 5], 24, 40, {"max_tokens": 5}),
    **{f"{name}": ([3, 0, 4], 32, 24, {"activation": name}) for name in ACTIVATIONS},
    **{f"{w}": ([3, 0, 4], 136, 272, {"weights": w}) for w in WEIGHTS[1:-2]},
    "fp8 block, gathered": ([3, 0, 4], 136, 272, {"weights": "fp8 block", "tokens": 5, "dtype": "float16"}),
    "fp8 row column, gathered": ([3, 0, 4], 24, 48, {"weights": "fp8 row column", "tokens": 5}),
    "fp8 block, batched": ([3, 0, 4], 136, 272, {"weights": "fp8 block", "max_tokens": 6}),
    "fp8 row column, batched": ([3, 0, 4], 24, 48, {"weights": "fp8 row column", "max_tokens": 6}),
    "fp8 one one, batched": ([3, 0, 4], 24, 48, {"weights": "fp8 one one", "max_tokens": 6}),
    "fp8 block, silu": ([3, 0, 4], 272, 128, {"weights": "fp8 block", "activation": "silu"}),
    "mxfp4": ([3, 0, 4], 24, 96, {"weights": "mxfp4"}),
    "nvfp4": ([3, 0, 4], 24, 96, {"weights": "nvfp4", "dtype": "float16"}),
    "nvfp4, batched": ([3, 0, 4], 24, 64, {"weights": "nvfp4", "max_tokens": 6}),
    "mxfp4, gathered, swigluoai": ([3, 0, 4], 32, 64, {"weights": "mxfp4", "tokens": 2, "activation": "swigluoai"}),
}


@pytest.mark.parametrize(("counts", "n", "k", "changes"), TORCH_TOO.values(), ids=TORCH_TOO)
def test_the_twin_is_torchs_product(
    counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator
) -> None:
    x = made(rng, counts, n, k, **changes)
    got, want = x.run(), by_torch(x)
    assert got.dtype.name == x.out_dtype
    # Rounded once, from sums in float32; of no row without an expert.
    assert_matches("moe_gemm.out", got, want.astype(got.dtype))
    assert not got[~x.rows].astype(np.float32).any()
    out = np.full(x.out_shape, NAN, got.dtype)
    assert x.run(out=out) is out
    same_bits(out[x.rows], got[x.rows])
    assert np.isnan(out[~x.rows].astype(np.float32)).all()
    whole = made(rng, counts, n, k, whole=True, **{**changes, "activation": None})
    same_bits(whole.run(), by_torch(whole).astype(got.dtype))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_cpu_tensors_and_foreign_arrays_go_through_the_twin(weights: str, rng: np.random.Generator) -> None:
    shapes: tuple[dict[str, Any], ...] = ({}, {"max_tokens": 6})
    for shape in shapes:
        x = made(rng, [3, 0, 4], 32, 128, weights, **shape)
        want = x.twin()
        tensors = x.replaced(**{key: as_torch(v) for key, v in x.arguments.items() if arrays.is_array(v)})
        got = tensors.run()
        assert type(got) is torch.Tensor
        same_bits(to_numpy(got), want)
        out = torch.full(x.out_shape, NAN, dtype=got.dtype)
        assert tensors.run(out=out) is out
        same_bits(to_numpy(out)[x.rows], want[x.rows])
        assert to_numpy(out[torch.from_numpy(~x.rows)].isnan()).all()
        # FP8 as bytes; `out` tells the dtype of the result.
        if x.is_fp8:
            by_bytes = x.replaced(a=x.arguments["a"].view(np.uint8), b=x.arguments["b"].view(np.uint8))
            same_bits(by_bytes.run(), want)
            out = np.zeros(x.out_shape, np.float16)
            x.run(out=out, out_dtype=None)
            same_bits(out, x.replaced(out_dtype="float16").twin())
    x = made(rng, [3, 1], 16, 16, dtype="float16")
    foreign = x.replaced(**{key: OnlyDLPack(v) for key, v in x.arguments.items()})
    same_bits(foreign.run(), x.twin())


def test_scales_of_one_shape_or_the_other(rng: np.random.Generator) -> None:
    x = made(rng, [3, 0, 4], 16, 48, "fp8 row column")
    a_scale = x.arguments["a_scale"]
    same_bits(x.replaced(a_scale=a_scale[:, None]).run(), x.twin())
    # Of one row, scales by row and one scale for all are the same.
    x = made(rng, [1, 0], 16, 48, "fp8 row one", spare=0)
    same_bits(x.replaced(a_scale=x.arguments["a_scale"][:, None]).run(), x.run())
    x = made(rng, [3, 2], 16, 48, "fp8 row column", max_tokens=5)
    same_bits(x.replaced(a_scale=x.arguments["a_scale"][..., None]).run(), x.twin())
    codes = made(rng, [3, 2], 16, 64, "nvfp4")
    same_bits(codes.replaced(b_scale=codes.arguments["b_scale"].view(E4M3)).run(), codes.twin())
    codes = made(rng, [3, 2], 16, 64, "mxfp4")
    same_bits(codes.replaced(b_scale=codes.arguments["b_scale"].view(E8M0)).run(), codes.twin())


def test_weights_of_4_bits_by_hand() -> None:
    # 1, 2 | 3 at the end; times 2 in the first group of MXFP4 and 1/2 in the second.
    b = np.zeros((1, 8, 32), np.uint8)
    b[0, 3, 0], b[0, 3, -1] = 0x42, 0x50
    a = np.zeros((3, 64), np.float16)
    a[0, 0], a[1, 1], a[2, 63] = 1, 10, 100
    scale = np.full((1, 8, 2), 128, np.uint8)
    scale[..., 1] = 126
    out = cukern.moe_gemm(a, b, np.array([0, 3], np.int32), b_scale=scale)
    assert out[:, 3].tolist() == [2, 40, 150] and np.count_nonzero(out) == 3
    scale = np.full((1, 8, 4), 0x40, np.uint8)  # 2
    scale[..., 3] = 0x34  # 0.75
    options: dict[str, Any] = {"b_scale": scale, "b_global_scale": np.array([0.5], np.float32)}
    out = cukern.moe_gemm(a, b, np.array([0, 3], np.int32), **options)
    assert out[:, 3].tolist() == [1, 20, 112.5]


def test_offsets_outside_of_the_rows_are_their_end(rng: np.random.Generator) -> None:
    x = made(rng, [3, 2], 8, 8, spare=0)
    bad = x.replaced(expert_offsets=np.array([-5, 3, 2**31 - 1], np.int32))
    same_bits(bad.run(), x.twin())
    batch = made(rng, [3, 0], 8, 8, max_tokens=3)
    bad = batch.replaced(expert_num_tokens=np.array([2**31 - 1, -3], np.int32))
    same_bits(bad.run(), batch.twin())


# --- what is refused ------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = "bfloat16") -> Array:
    return np.zeros(shape, arrays.numpy_dtype(dtype))


def good(name: str) -> dict[str, Any]:
    """Arguments that are accepted; each test changes one."""
    batched, _, kind = name.partition(" ")
    a, b = (2, 4, 256), (2, 16, 256)
    x: dict[str, Any] = {"a": zeros(*(a if batched == "batched" else (8, 256))), "b": zeros(*b)}
    if batched == "batched":
        x["expert_num_tokens"] = np.array([3, 4], np.int32)
    else:
        x["expert_offsets"] = np.array([0, 3, 7], np.int32)
    if kind.startswith("fp8"):
        x["a"], x["b"] = x["a"].astype(E4M3), x["b"].astype(E4M3)
        rows = x["a"].shape[:-1]
        x["a_scale"] = np.ones((*rows, 2) if kind == "fp8 block" else rows, np.float32)
        x["b_scale"] = np.ones((2, 1, 2) if kind == "fp8 block" else (2, 16), np.float32)
    elif kind:
        x["b"] = zeros(2, 16, 128, dtype="uint8")
        x["b_scale"] = zeros(2, 16, 8 if kind == "mxfp4" else 16, dtype="uint8")
        if kind == "nvfp4":
            x["b_global_scale"] = zeros(2, dtype="float32")
    return x


GOOD = [f"{how}{kind}" for how in ("rows", "batched") for kind in ("", " fp8 block", " fp8 row", " mxfp4", " nvfp4")]


def called(x: dict[str, Any]) -> Any:
    return (cukern.moe_gemm_batched if "expert_num_tokens" in x else cukern.moe_gemm)(**x)


@pytest.mark.parametrize("name", GOOD)
def test_good_arguments_are_taken(name: str) -> None:
    assert called(good(name)).shape == ((2, 4, 16) if name.startswith("batched") else (8, 16))


def _bad_calls() -> Iterator[Any]:
    f32, one, i32 = np.float32, np.ones(1, np.float32), np.int32
    fortran = np.asfortranarray(zeros(8, 256))
    for name, changes, error, message in (
        ("rows", {"a": 3}, TypeError, "a must be an array"),
        ("rows", {"a": zeros(8, 256, dtype="float64")}, TypeError, "a must be bfloat16 or float16 or float32 or"),
        ("rows", {"a": zeros(8, 256, dtype="float32")}, TypeError, "b must be float32, got bfloat16"),
        ("rows", {"a": zeros(8, 2, 128)}, ValueError, "a must be of shape [tokens, k], got [8, 2, 128]"),
        ("rows", {"a": fortran}, ValueError, "a must be contiguous, got strides (1, 8)"),
        ("rows", {"a": zeros(8, 252)}, ValueError,
         "b must be of shape [experts, n, k] = [2, 16, 252], got [2, 16, 256]"),
        ("rows", {"a": zeros(8, 0), "b": zeros(2, 16, 0)}, ValueError, "a must be of k that is a positive"),
        ("rows mxfp4", {"a": zeros(8, 40), "b": zeros(2, 16, 20, dtype="uint8")}, ValueError,
         "a must be of k that is a multiple of 16 with weights of 4 bits, got 40"),
        ("rows mxfp4", {"a": zeros(8, 48), "b": zeros(2, 16, 24, dtype="uint8"),
                        "b_scale": zeros(2, 16, 1, dtype="uint8")}, ValueError,
         "(MXFP4) or [experts, n, k / 16] = [2, 16, 3] (NVFP4), got [2, 16, 1]"),
        ("rows", {"b": None}, TypeError, "b must be a NumPy array like a, got builtins.NoneType"),
        ("rows", {"b": torch.zeros(2, 16, 256)}, TypeError, "b must be a NumPy array like a, got torch.Tensor"),
        ("rows", {"b": zeros(2, 16, 256, dtype="float16")}, TypeError, "b must be bfloat16 or uint8, got float16"),
        ("rows fp8 row", {"b": zeros(2, 16, 256)}, TypeError, "b must be float8_e4m3fn or uint8, got bfloat16"),
        ("rows", {"b": zeros(16, 256)}, ValueError, "b must be of shape [experts, n, k], got [16, 256]"),
        ("rows", {"b": zeros(0, 16, 256)}, ValueError, "b must be of at least one and at most 4096 experts, got 0"),
        ("rows", {"b": zeros(4097, 8, 256)}, ValueError, "at most 4096 experts, got 4097"),
        ("rows", {"b": zeros(2, 0, 256)}, ValueError, "b must be of n that is a positive number, got 0"),
        ("rows", {"b": zeros(2, 23, 256), "activation": "silu"}, ValueError,
         "b must be of n that is a positive multiple of 2 (with a gate), got 23"),
        ("rows", {"b": zeros(2, 16, 512)[..., ::2]}, ValueError,
         "b must be contiguous along its last dimension, or along the one before, got strides (8192, 512, 2)"),
        ("rows", {"b": zeros(2, 16, 256)[:, ::-1]}, ValueError,
         "b must be contiguous along its last dimension, got strides (4096, -256, 1)"),
        ("rows", {"bias": np.zeros((2, 17), f32)}, ValueError,
         "bias must be of shape [experts, n] = [2, 16], got [2, 17]"),
        ("rows", {"bias": np.zeros((2, 16))}, TypeError, "bias must be float32 or bfloat16, got float64"),
        ("rows fp8 row", {"bias": zeros(2, 16, dtype="float16")}, TypeError,
         "bias must be float32 or bfloat16, got float16"),
        ("rows", {"bias": [0.0]}, TypeError, "bias must be a NumPy array like a, got builtins.list"),
        ("rows", {"interleaved": True}, ValueError,
         "interleaved must be False without a gate, got True with activation None"),
        ("rows", {"interleaved": True, "activation": "silu_no_mul"}, ValueError,
         "interleaved must be False without a gate, got True with activation 'silu_no_mul'"),
        ("rows", {"alpha": None}, TypeError, "alpha must be a number"),
        ("rows", {"limit": -1}, ValueError, "limit must be at least 0, got -1.0"),
        ("rows", {"activation": "swigluoai_no_mul"}, ValueError, "activation must be one of None, 'silu', 'gelu'"),
        ("batched", {"b": zeros(3, 16, 256)}, ValueError,
         "a must be of shape [experts, max_tokens, k] = [3, 4, 256], got [2, 4, 256]"),
        ("batched", {"a": zeros(8, 256)}, ValueError, "a must be of shape [experts, max_tokens, k], got [8, 256]"),
        ("rows", {"expert_offsets": None}, TypeError, "expert_offsets must be a NumPy array like a, got builtins"),
        ("rows", {"expert_offsets": np.zeros(3, f32)}, TypeError, "expert_offsets must be int32 or int64, got float32"),
        ("rows", {"expert_offsets": np.zeros(2, i32)}, ValueError,
         "expert_offsets must be of shape [experts + 1] = [3], got [2]"),
        ("rows", {"expert_offsets": np.zeros(6, i32)[::2]}, ValueError, "expert_offsets must be contiguous"),
        ("batched", {"expert_num_tokens": np.zeros(2, np.int64)}, TypeError,
         "expert_num_tokens must be int32, got int64"),
        ("batched", {"expert_num_tokens": np.zeros(3, i32)}, ValueError,
         "expert_num_tokens must be of shape [experts] = [2], got [3]"),
        ("rows", {"a_scale": one}, ValueError, "a_scale must be None with bfloat16 a, got an array"),
        ("rows", {"b_scale": one}, ValueError, "b_scale must be None with bfloat16 b, got an array"),
        ("rows", {"b_global_scale": one}, ValueError, "b_global_scale must be None without weights of 4 bits"),
        ("rows fp8 row", {"b_global_scale": one}, ValueError, "b_global_scale must be None without weights of 4 bits"),
        ("rows fp8 row", {"a_scale": None}, TypeError, "a_scale must be an array with FP8, got None"),
        ("rows fp8 row", {"b_scale": None}, TypeError, "b_scale must be an array with FP8, got None"),
        ("rows fp8 row", {"a_scale": 1.0}, TypeError, "a_scale must be a NumPy array like a, got builtins.float"),
        ("rows fp8 row", {"a_scale": np.ones(8)}, TypeError, "a_scale must be float32, got float64"),
        ("rows fp8 row", {"b_scale": np.ones((2, 16))}, TypeError, "b_scale must be float32, got float64"),
        ("rows fp8 row", {"a_scale": np.ones(7, f32)}, ValueError,
         "a_scale must be of shape [1], [tokens] = [8] or [tokens, 1], as b_scale is not by blocks, got [7]"),
        ("rows fp8 row", {"a_scale": np.ones((8, 2), f32)}, ValueError, "as b_scale is not by blocks, got [8, 2]"),
        ("batched fp8 row", {"a_scale": np.ones(8, f32)}, ValueError,
         "a_scale must be of shape [1], [experts], [experts, max_tokens] = [2, 4] or [experts, max_tokens, 1]"),
        ("rows fp8 row", {"b_scale": np.ones((2, 17), f32)}, ValueError,
         "b_scale must be of shape [experts] = [2], [experts, n] = [2, 16] or by blocks, got [2, 17]"),
        ("rows fp8 block", {"b_scale": np.ones((2, 2, 2), f32)}, ValueError,
         "b_scale must be of shape [experts, ceil(n / 128), ceil(k / 128)] = [2, 1, 2], got [2, 2, 2]"),
        ("rows fp8 block", {"a_scale": np.ones(8, f32)}, ValueError,
         "a_scale must be of shape [tokens, ceil(k / 128)], as b_scale is by blocks, = [8, 2], got [8]"),
        ("batched fp8 block", {"a_scale": np.ones((2, 4, 1), f32)}, ValueError,
         "a_scale must be of shape [experts, max_tokens, ceil(k / 128)], as b_scale is by blocks, = [2, 4, 2]"),
        ("rows mxfp4", {"a_scale": one}, ValueError, "a_scale must be None with bfloat16 a"),
        ("rows mxfp4", {"b_scale": None}, TypeError, "b_scale must be an array with weights of 4 bits, got None"),
        ("rows mxfp4", {"b_scale": zeros(2, 16, 4, dtype="uint8")}, ValueError,
         "[experts, n, k / 32] = [2, 16, 8] (MXFP4) or [experts, n, k / 16] = [2, 16, 16] (NVFP4), got [2, 16, 4]"),
        ("rows mxfp4", {"b_scale": zeros(2, 16, 8, dtype=E4M3)}, TypeError,
         "b_scale must be float8_e8m0fnu or uint8, got float8_e4m3fn"),
        ("rows mxfp4", {"b_global_scale": np.ones(2, f32)}, ValueError, "b_global_scale must be None with MXFP4"),
        ("rows nvfp4", {"b_scale": zeros(2, 16, 16, dtype="float32")}, TypeError,
         "b_scale must be float8_e4m3fn or uint8, got float32"),
        ("rows nvfp4", {"b_global_scale": None}, TypeError, "b_global_scale must be an array with NVFP4, got None"),
        ("rows nvfp4", {"b_global_scale": np.ones(3, f32)}, ValueError,
         "b_global_scale must be of shape [experts] = [2], got [3]"),
        ("rows", {"row_token": np.zeros(9, np.int64)}, TypeError, "row_token must be int32, got int64"),
        ("rows", {"row_token": np.zeros((9, 1), i32)}, ValueError, "row_token must be of shape [rows], got [9, 1]"),
        ("rows", {"row_token": np.zeros(9, i32), "a": zeros(0, 256)}, ValueError,
         "a must be of at least one token, as row_token has rows, got [0, 256]"),
        ("rows", {"expected_m": -1}, ValueError, "expected_m must be an integer of at least 0, got -1"),
        ("rows", {"expected_m": 1.5}, TypeError, "expected_m must be an integer of at least 0, got 1.5 (float)"),
        ("rows", {"activation": "tanh"}, ValueError, "activation must be one of None, 'silu', 'gelu'"),
        ("rows", {"out_dtype": "float16"}, ValueError, "out_dtype must be one of 'bfloat16', got 'float16'"),
        ("rows fp8 row", {"out_dtype": "float32"}, ValueError, "out_dtype must be one of 'bfloat16', 'float16'"),
        ("rows", {"out": zeros(7, 16)}, ValueError, "out must be of shape [rows, n] = [8, 16], got [7, 16]"),
        ("rows", {"out": zeros(8, 16), "row_token": np.zeros(9, i32)}, ValueError, "[rows, n] = [9, 16], got [8, 16]"),
        ("rows", {"out": zeros(8, 16), "activation": "silu"}, ValueError, "[rows, n / 2] = [8, 8], got [8, 16]"),
        ("batched", {"out": zeros(8, 16)}, ValueError, "out must be of shape [experts, max_tokens, n] = [2, 4, 16]"),
        ("rows", {"out": zeros(8, 16, dtype="float16")}, TypeError, "out must be bfloat16, got float16"),
        ("rows fp8 row", {"out": zeros(8, 16, dtype="float32")}, TypeError, "out must be bfloat16, got float32"),
        ("rows", {"out": zeros(8, 32)[:, ::2]}, ValueError, "out must be contiguous"),
        ("rows", {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'wgmma', 'mma', 'stream', 'fma'"),
        ("rows", {"variant": "mma"}, ValueError, "variant must be 'auto' for arrays in host memory"),
    ):  # fmt: skip
        words = re.sub(r"[^\w]+", " ", message)[:50]
        yield pytest.param(name, changes, error, message, id=f"{name}, {', '.join(changes)}: {words}")


@pytest.mark.parametrize(("name", "changes", "error", "message"), list(_bad_calls()))
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    x = good(name)
    out = np.full((*x["a"].shape[:-1], 16), NAN, ml_dtypes.bfloat16)
    with pytest.raises(error, match=re.escape(message)):
        called({**x, "out": out, **changes} if "row_token" not in changes else {**x, **changes})
    assert np.isnan(out.astype(np.float32)).all()


# --- the choice of a variant ----------------------------------------------------------------------------


def unreal(*shape: int, dtype: Any = "bfloat16") -> Array:
    """An array of any size, without its memory."""
    kind = np.dtype(arrays.numpy_dtype(dtype))
    strides = [kind.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.empty(64, np.uint8).view(kind), shape, strides)


def shaped(
    rows: int,
    *,
    how: str = "rows",
    weights: str = "16",
    experts: int = 8,
    n: int = 4096,
    k: int = 7168,
    dtype: str = "bfloat16",
    activation: str | None = None,
    expected_m: int | None = -1,
) -> dict[str, Any]:
    """A call on so many rows; batched, of each expert. expected_m -1: the mean."""
    if expected_m == -1:
        expected_m = rows if how == "batched" else -(-rows // experts)
    a_shape, blocks = ((experts, rows) if how == "batched" else (rows,)), -(-k // 128)
    kind = "float8_e4m3fn" if weights.startswith("fp8") else dtype
    x: dict[str, Any] = {"a": unreal(*a_shape, k, dtype=kind), "b": unreal(experts, n, k, dtype=kind)}
    if how == "batched":
        x["expert_num_tokens"] = unreal(experts, dtype="int32")
    else:
        x["expert_offsets"] = unreal(experts + 1, dtype="int32")
    if how == "gathered":
        x["row_token"] = unreal(rows, dtype="int32")
    if weights == "fp8 block":
        x["a_scale"] = unreal(*a_shape, blocks, dtype="float32")
        x["b_scale"] = unreal(experts, -(-n // 128), blocks, dtype="float32")
    elif weights == "fp8 row":
        x["a_scale"], x["b_scale"] = unreal(*a_shape, dtype="float32"), unreal(experts, n, dtype="float32")
    elif weights != "16":
        x["b"] = unreal(experts, n, k // 2, dtype="uint8")
        x["b_scale"] = unreal(experts, n, k // (32 if weights == "mxfp4" else 16), dtype="uint8")
        if weights == "nvfp4":
            x["b_global_scale"] = unreal(experts, dtype="float32")
    return {**x, "activation": activation, "expected_m": expected_m}


class Planned(NamedTuple):
    """The launch of a call."""

    step: Any

    @property
    def function(self) -> str:
        return self.step.variant.instance.function

    @property
    def maps(self) -> list[Any]:
        """The arguments of `tensor_map.encode` for the weights and for `a`, but the address."""
        with mock.patch.object(plan, "encode", lambda address, *arguments: arguments):
            return [x.function(0) for x in self.step.values if isinstance(x, Each)]


def planned(x: dict[str, Any], variant: str = "auto", on: str | Gpu = "90a") -> Planned | None:
    """The launch of a call on a GPU; None: there is none."""
    function = OPS["moe_gemm_batched" if "expert_num_tokens" in x else "moe_gemm"]
    given, where = {**x, "variant": variant}, gpu.of_arch(on) if isinstance(on, str) else on
    trace, *_ = function.record(function.kind_of((), given), [*given.values()], where)
    return Planned(trace.steps[0]) if trace.steps else None


def function_for(x: dict[str, Any], variant: str = "auto", on: str = "90a") -> str:
    found = planned(x, variant, on)
    assert found is not None
    return found.function


@pytest.mark.parametrize(
    ("rows", "changes", "function"),
    [
        (32, {}, "gemm_stream"),
        (33, {}, "gemm_wgmma"),
        (8, {"experts": 256}, "gemm_stream"),
        (2048, {"experts": 256}, "gemm_wgmma"),
        (8192, {}, "gemm_wgmma"),
        (8192, {"expected_m": 4}, "gemm_stream"),
        (8192, {"dtype": "float16", "activation": "silu"}, "gemm_wgmma"),
        (40, {"how": "gathered"}, "gemm_wgmma"),
        (8192, {"how": "gathered", "activation": "silu"}, "gemm_wgmma"),
        (8192, {"how": "gathered", "weights": "fp8 row"}, "gemm_mma"),
        (32, {"how": "gathered"}, "gemm_stream"),
        (4, {"how": "batched"}, "gemm_stream"),
        (256, {"how": "batched"}, "gemm_wgmma"),
        (256, {"how": "batched", "expected_m": 1}, "gemm_stream"),
        (32, {"weights": "fp8 block"}, "gemm_stream"),
        (8192, {"weights": "fp8 block"}, "gemm_fp8_wgmma"),
        (8192, {"weights": "fp8 row"}, "gemm_fp8_wgmma"),
        (8192, {"weights": "fp8 block", "activation": "silu"}, "gemm_fp8_wgmma"),
        (8192, {"weights": "fp8 block", "activation": "silu", "n": 4096 + 16}, "gemm_mma"),
        (8192, {"weights": "mxfp4"}, "gemm_mma"),
        (8, {"weights": "nvfp4"}, "gemm_mma"),
        # More groups than a grid has along y.
        (2**18 + 2**13, {"experts": 4096, "expected_m": 4}, "gemm_wgmma"),
        # 64 GiB of the weights of an expert, or of a, and more.
        (8, {"n": 2**13, "k": 2**22}, "gemm_stream"),
        (8, {"n": 2**13 + 8, "k": 2**22}, "gemm_wgmma"),
        (8, {"n": 2**13 + 16, "k": 2**22, "how": "gathered"}, "gemm_wgmma"),
        (2**13, {"k": 2**22, "expected_m": 1}, "gemm_stream"),
        (2**13 + 1, {"k": 2**22, "expected_m": 1}, "gemm_wgmma"),
        (2**10 + 1, {"k": 2**22, "expected_m": 1, "how": "batched"}, "gemm_wgmma"),
        (2**13 + 1, {"weights": "fp8 block", "k": 2**22, "expected_m": 1}, "gemm_stream"),
    ],
    ids=str,
)
def test_the_variant_for_a_call(rows: int, changes: dict[str, Any], function: str) -> None:
    assert function_for(shaped(rows, **changes)) == function


def test_what_stream_cannot_count_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'stream': a, or the weights of one expert, are larger than 64 GiB"):
        planned(shaped(8, n=2**13 + 8, k=2**22), "stream")


@pytest.mark.parametrize(
    ("rows", "expected_m", "function"),
    [
        (16, None, "gemm_stream"),  # a mean of 2
        (17, None, "gemm_wgmma"),
        (17, 4, "gemm_stream"),
        (17, 5, "gemm_wgmma"),
        (8192, 1, "gemm_stream"),
    ],
)
def test_the_rows_of_a_group_that_are_expected(rows: int, expected_m: int | None, function: str) -> None:
    assert function_for(shaped(rows, n=96, k=64, expected_m=expected_m)) == function


def why(rows: int, variant: str = "auto", on: str = "90a", **changes: Any) -> str:
    found = planned(shaped(rows, **{"expected_m": None, **changes}), variant, on)
    assert found is not None
    return found.step.why


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((16,), "16 rows for 8 experts, 2 an expert: stream, which reads the weights once for a few rows (up to 2 an"),
        ((17,), "17 rows for 8 experts, 2.125 an expert: wgmma, Hopper's tensor cores (stream only up to 2 an"),
        ((17, "auto", "80"), "mma, tensor cores of every GPU (stream only up to 2 an expert); wgmma cannot: this GPU"),
        ((64, "mma"), "variant='mma' asks for it; tiles of 16 rows (up to 16 an expert)"),
    ],
)  # fmt: skip
def test_the_reason_for_a_variant(given: tuple[Any, ...], wanted: str) -> None:
    assert wanted in why(*given)


def test_the_reasons_for_other_weights_and_sizes() -> None:
    assert "4 rows an expert by expected_m: stream" in why(8192, expected_m=4)
    assert "room for 40 rows an expert: wgmma" in why(40, how="batched")
    for gathered in ({}, {"how": "gathered"}):
        assert ("rows of FP8 are gathered; rows in the order of the experts (cukern.moe_permute) take wgmma" in why(
            8192, weights="fp8 block", **gathered
        )) == bool(gathered)  # fmt: skip
    general = "fma, the slow general kernel, without tensor cores; "
    sizes = "the others take k of multiples of 8 and results of multiples of 8 columns, at multiples of 16 bytes"
    assert all(x in why(8192, n=97) for x in (general, sizes))
    assert f"{general}wgmma, mma cannot: a is float32; tensor cores take bfloat16 and float16" in why(
        8192, dtype="float32"
    )
    assert "(no stream: sm_80 has no instruction that converts FP8)" in why(8, "auto", "80", weights="fp8 block")


@pytest.mark.parametrize(
    ("changes", "on"),
    [
        *(({}, on) for on in ("90a", "80")),
        *(({"weights": "fp8 block"}, on) for on in ("80", "89")),
        *(({"weights": "mxfp4"}, on) for on in ("90a", "80")),
        ({"dtype": "float32"}, "90a"),
    ],
    ids=str,
)
def test_the_number_in_a_reason_is_where_the_choice_changes(changes: dict[str, Any], on: str) -> None:
    experts, rows, met = 8, 8, 0

    def choice(rows: int) -> tuple[str, str]:
        found = planned(shaped(rows, experts=experts, n=4096, k=4096, expected_m=None, **changes), on=on)
        assert found is not None
        return str(found.step.variant), found.step.why

    while up_to := re.findall(r"tiles of \d+ rows \(up to (\d+) an expert", choice(rows)[1]):
        most = experts * int(up_to[0])
        assert choice(rows)[0] == choice(most)[0] != choice(most + 1)[0]
        rows, met = most + 1, met + 1
    assert met and re.search(r"tiles of \d+ rows \(from \d+ an expert on\)", choice(rows)[1])


def test_the_reasons_for_tiles_of_8_bits() -> None:
    fp8 = {"weights": "fp8 block", "expected_m": None}
    small = "tiles of 128 rows (up to 128 an expert); clusters of 2 for 32 strips of 128 columns (1 up to 64 rows"
    assert small in why(1024, **fp8, n=4096)
    assert "with which 132 multiprocessors are expected to take less than 0.9" in why(8 * 512, **fp8, n=512)
    assert "tiles of 288 rows, a tail among them (scales by blocks, up to 600 an expert)" in why(4096, **fp8, n=4096)
    assert "tiles of 256 rows (from 129 an expert on)" in why(8192, **fp8, n=4096)


def test_the_variant_without_hopper() -> None:
    for arch in ("80", "100a", "120a"):
        for rows in (32, 33, 8192):
            for weights in ("16", "fp8 block", "nvfp4"):
                found = planned(shaped(rows, weights=weights), on=arch)
                assert found is not None
                streamed = ("16",) if arch == "80" else ("16", "fp8 block")  # that one converts FP8 slowly
                is_few = rows == 32 and weights in streamed
                assert found.function == ("gemm_stream" if is_few else "gemm_mma")
                assert found.step.shared_bytes <= gpu.of_arch(arch).shared_per_block
        with pytest.raises(ValueError, match=re.escape(f"'wgmma': this GPU is of sm_{arch}, not sm_90a")):
            planned(shaped(8192), "wgmma", arch)


@pytest.mark.parametrize(
    ("changes", "variant", "reason"),
    [
        ({"how": "gathered", "weights": "fp8 block"}, "wgmma", "rows of FP8 are gathered"),
        ({"weights": "mxfp4"}, "wgmma", "weights are of 4 bits"),
        (
            {"weights": "fp8 block", "activation": "silu", "n": 208},
            "wgmma",
            "the halves of n (208) are no multiples of 64",
        ),
        ({"weights": "mxfp4"}, "stream", "weights are of 4 bits"),
        ({"experts": 4096, "how": "batched", "expected_m": 4}, "stream", "there may be too many groups of rows"),
    ],
    ids=str,
)
def test_a_variant_that_is_not_there_is_refused(changes: dict[str, Any], variant: str, reason: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"variant must be 'auto' or another here, got '{variant}': {reason}")
    ):
        planned(shaped(8192, **changes), variant)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 600), min_size=1, max_size=50), st.integers(0, 20), st.sampled_from((16, 64, 128, 256)))
def test_there_are_blocks_for_all_tiles(counts: list[int], spare: int, tile: int) -> None:
    needed = sum(-(-count // tile) for count in counts)
    nothing: dict[str, Any] = dict.fromkeys(Product._fields)
    x = Product(**{**nothing, "rows": sum(counts) + spare, "experts": len(counts)})
    assert needed <= x.tiles(tile) if x.rows else needed == 0
    assert x._replace(rows=max(counts), is_batched=True).tiles(tile) >= needed


def test_as_many_stages_as_fit() -> None:
    of = gpu.of_arch("90a")
    for form in kernels.WGMMA_FORMS:
        # The system has 1 KiB of each block.
        most = min(of.shared_per_block, of.shared_per_multiprocessor // form.blocks - 1024)
        assert form.shared_bytes(True) <= most < form._replace(stages=form.stages + 1).shared_bytes(False)


@pytest.mark.rare
@pytest.mark.parametrize("activation", [0, 1, kernels.epilogue(0, is_gated=False, biased=True)])
@pytest.mark.parametrize("gathers", [False, True])
def test_products_of_the_largest_tiles_overlap_and_nothing_spills(activation: int, gathers: bool) -> None:
    """The compiler says where it lets each product wait for the one before."""
    if compiler.available():
        pytest.skip("NVRTC cannot be used")
    path, _ = compiler.cubin(kernels.WGMMA_FORMS[-1].variant("bfloat16", activation, gathers).instance, "90a")
    note = compiler.read_note(path)
    assert note is not None and "wgmma.mma_async instructions are serialized" not in note["log"]
    assert resources(note).spill_bytes == 0


@pytest.mark.parametrize("how", ["rows", "gathered"])
def test_tiles_of_96_tokens_only_where_they_fill_the_gpu(how: str) -> None:
    def tokens_of(experts: int, mean: int, n: int) -> int:
        found = planned(shaped(experts * mean, experts=experts, n=n, how=how), "wgmma")
        assert found is not None
        return next(
            form.tokens
            for form in kernels.WGMMA_FORMS
            if form.variant("bfloat16", 0, how == "gathered") == found.step.variant
        )

    # 132 multiprocessors, tiles of 128 weights.
    assert [tokens_of(66, mean, 512) for mean in (46, 47, 74, 75)] == [64, 96, 96, 128]
    assert [tokens_of(65, mean, 512) for mean in (46, 47, 74, 75)] == [64, 128, 128, 128]
    assert tokens_of(1, 64, 4096) == 128


def test_the_tensor_maps() -> None:
    def maps_of(x: dict[str, Any]) -> list[Any]:
        found = planned(x, "wgmma")
        assert found is not None
        return found.maps

    b_map, a_map = maps_of(shaped(8192))
    assert b_map == (
        "bfloat16",
        (7168, 4096, 8, 1),
        (14336, 14336 * 4096, 14336 * 4096 * 8),
        (64, 128, 1, 1),
        256,
        True,
    )
    assert a_map == ("bfloat16", (7168, 8192, 1, 1), (14336, 14336 * 8192, 14336 * 8192), (64, 32, 1, 1), 256, True)
    gated, _ = maps_of(shaped(8192, activation="silu"))
    dims, strides = (7168, 8, 2, 256, 8), (14336, 14336 * 2048, 14336 * 8, 14336 * 4096)
    assert gated == ("bfloat16", dims, strides, (64, 8, 2, 8, 1), 256, True)
    b_map, a_map = maps_of(shaped(8192, weights="fp8 block", activation="silu"))
    assert b_map == ("uint8", (7168, 4096, 8, 1), (7168, 7168 * 4096, 7168 * 4096 * 8), (128, 64, 1, 1), 256, True)
    assert a_map == ("uint8", (7168, 8192, 1, 1), (7168, 7168 * 8192, 7168 * 8192), (128, 64, 1, 1), 256, True)
    # Boxes of gathered rows are one row of 128 bytes.
    _, a_map = maps_of(shaped(8192, how="gathered"))
    assert a_map == ("bfloat16", (7168, 8192), (14336,), (64, 1), 256, True)
    # Streamed weights are fetched to L2 by 128 bytes, not 256.
    assert [x[-2] for x in maps_of(shaped(64))] == [128, 128]


@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize("how", ["rows", "gathered"])
@pytest.mark.parametrize("weights", ["16", "fp8 block", "fp8 row", "nvfp4"])
def test_few_kernels_serve_any_rows(weights: str, how: str, arch: str) -> None:
    variants = set()
    for rows in [*range(1, 70), *range(70, 70_000, 1111)]:
        for expected_m in (None, rows % 300):
            found = planned(shaped(rows, weights=weights, how=how, n=96, k=128, expected_m=expected_m), on=arch)
            assert found is not None
            variants.add(found.step.variant)
    assert len(variants) <= 8


@pytest.mark.parametrize("batched", [False, True])
def test_products_in_the_plan_of_another_op(batched: bool) -> None:
    experts, inter, hidden, topk = 64, 1024, 256, 8
    weights = unreal(experts, 2 * inter, hidden), unreal(experts, hidden, inter)
    offsets = unreal(experts + (not batched), dtype="int32")

    def calls(x: Any, empty: Any) -> list[dict[str, Any]]:
        """The arguments of both products, but for the weights."""
        tokens = x.shape[0]
        rows = tokens * topk
        shape, expected = (experts, tokens) if batched else (rows,), max(ceil_div(rows, experts), 1)
        gathers = not batched and expected <= 4
        first: dict[str, Any] = {"a": x if gathers else empty((*shape, hidden), "bfloat16"), "activation": "silu"}
        first |= {"row_token": empty((rows,), "int32")} if gathers else {}
        return [{"expected_m": expected, **own} for own in (first, {"a": empty((*shape, inter), "bfloat16")})]

    def layer(x: Any, w1: Any, w2: Any, offsets: Any) -> None:
        product: Any = cukern.moe_gemm_batched if batched else cukern.moe_gemm
        for own, weight in zip(calls(x, plan.empty), (w1, w2), strict=True):
            product(**own, b=weight, **{name: offsets})

    name = "expert_num_tokens" if batched else "expert_offsets"
    for tokens in [*range(1, 70), *range(70, 70_000, 11_111)]:
        x = unreal(tokens, hidden)
        trace, _ = plan_of(Op(layer, None), x, *weights, offsets)
        alone = calls(x, lambda shape, dtype: unreal(*shape, dtype=dtype))
        steps = [planned({**own, "b": b, name: offsets}) for own, b in zip(alone, weights, strict=True)]
        assert [step[:4] for step in trace.steps] == [found and found.step[:4] for found in steps]


# --- calls that repeat others -----------------------------------------------------------------------------


def product(rows: int = 64, fp8: bool = False, **given: Any) -> Any:
    a, b = torch.zeros(rows, 128, dtype=torch.bfloat16), torch.zeros(4, 256, 128, dtype=torch.bfloat16)
    if fp8:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        given["b_scale"] = torch.ones(4)
    return cukern.moe_gemm(a, **{"b": b, "expert_offsets": torch.zeros(5).int(), **given})


def test_every_call_is_checked(pretended: PretendedGPU) -> None:  # noqa: F811
    out, tokens, trained = torch.zeros(64, 256).bfloat16(), torch.zeros(100).int(), torch.zeros(4, 256, 128).bfloat16()
    trained.requires_grad_()
    counts = (64, 3, 0, 64, 9000, 64)
    for rows in counts:
        assert product(rows, expected_m=3).shape == (rows, 256)
        assert product(out=out) is out and product(row_token=tokens).shape == (100, 256)
    assert [x.fields["rows"] for x in pretended.launches] == [n for rows in counts for n in (rows, 64, 100) if n]
    with torch.no_grad():
        product(b=trained)
    count = len(pretended.launches)
    for bad in (-1, 3.0, 3.5, True, "3", torch.ones(())):
        with pytest.raises((TypeError, ValueError), match=r"^expected_m must be an integer"):
            product(expected_m=bad)
    for rows, options, message in (
        (63, {"out": out}, r"^out must be of shape \[rows, n\] = \[63, 256\]"),
        (0, {"row_token": tokens}, r"^a must be of at least one token, as row_token has rows"),
        (64, {"b": trained}, r"^b must be a tensor that does not require grad"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            product(rows, **options)
    assert len(pretended.launches) == count


def test_a_scale_of_all_rows_is_not_one_of_each(pretended: PretendedGPU) -> None:  # noqa: F811
    for rows, scales in ((64, 64), (64, 1), (32, 32), (32, 1), (64, 64), (1, 1), (33, 1)) * 2:
        product(rows, fp8=True, a_scale=torch.ones(scales))
    assert [x.fields["a_scale_stride"] for x in pretended.launches] == [1, 0, 1, 0, 1, 1, 0] * 2
    with pytest.raises(ValueError, match=r"^a_scale must be of shape"):
        product(64, fp8=True, a_scale=torch.ones(32))


# --- the kernels against the twin -----------------------------------------------------------------------


def variants_of(x: Case) -> list[str]:
    """The variants that a call can ask for."""
    found = []
    for variant in op.VARIANTS:
        with contextlib.suppress(ValueError):
            planned(x.arguments, variant, gpu.of_device(0))
            found.append(variant)
    return found


def there(x: Case) -> Case:
    """The case with its arrays on the GPU; FP8 as bytes, as CuPy has no such dtype."""
    moved = {
        key: on_gpu(v.view(np.uint8) if arrays.is_array(v) and v.dtype in (E4M3, E8M0) else v)
        for key, v in x.arguments.items()
    }
    return x._replace(arguments=moved)


def launch(x: Case, variant: str = "auto") -> Array:
    """The result of a case on the GPU, in NumPy. Rows of no expert must stay as they were."""
    out = Buffer(x.out_shape, x.out_dtype)
    assert x.run(out=out.array, variant=variant) is out.array
    got = out.numpy()
    assert (got[~x.rows].view(np.uint8) == POISON).all(), "a row of no expert was written"
    return got


def compare(x: Case, whole: bool = True) -> None:
    """Compare every variant with the twin, in the rows that are written; bit by bit where sums are exact."""
    want, given = x.twin()[x.rows], there(x)
    for variant in variants_of(x):
        got = launch(given, variant)[x.rows]
        if whole and "activation" not in x.arguments:
            same_bits(got, want)
        else:
            assert_matches("moe_gemm.out" if whole else x.tolerance, got, want)


EDGES = [0, 1, 7, 8, 9, 0, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0]
LONG = [191, 192, 193, 255, 256, 257, 0, 320, 513]

#: Calls by their reason: counts, n, k, and other arguments of `made`.
CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    "tile edges": (EDGES, 264, 200, {}),
    "long tile edges": (LONG, 264, 72, {}),
    "float16": (LONG[:4], 264, 136, {"dtype": "float16"}),
    "int64 offsets": (EDGES, 264, 72, {"offsets_dtype": "int64"}),
    "the least": ([1], 8, 8, {"spare": 0}),
    "n and k of one step": ([3, 70], 64, 64, {}),
    "n and k of a step more": ([3, 70], 72, 72, {}),
    "n and k of a step less": ([3, 70], 56, 56, {}),
    "large n": ([5, 130], 2056, 64, {}),
    "large k": ([5, 130, 1], 136, 4104, {}),
    "one row": ([0, 0, 1, 0], 520, 1024, {}),
    "a row each": ([1] * 130, 72, 264, {}),
    "some of many experts": ([0] * 200 + [2, 0, 1] + [0] * 400 + [9, 70] + [0] * 31 + [1], 40, 40, {}),
    "4096 experts": ([0] * 4000 + [3] + [0] * 94 + [4], 8, 16, {}),
    "many tiles": ([700] * 9, 520, 64, {}),
    "no row": ([0, 0], 64, 64, {}),
    "nothing": ([0, 0], 64, 64, {"spare": 0}),
    "gathered": (EDGES, 264, 200, {"tokens": 50}),
    "gathered, long": (LONG, 264, 72, {"tokens": 300}),
    "gathered, one long group": ([1290], 520, 136, {"tokens": 160}),
    "gathered, many tiles": ([700] * 9, 520, 64, {"tokens": 999}),
    "gathered, large k": ([5, 130, 1], 136, 4104, {"tokens": 30}),
    "gathered, 4096 experts": ([0] * 4000 + [3] + [0] * 94 + [4], 8, 16, {"tokens": 3}),
    "gathered, a row each": ([1] * 130, 72, 264, {"tokens": 7}),
    "gathered, float16, one token": ([1, 1, 0], 520, 1024, {"tokens": 1, "dtype": "float16"}),
    "batched": (EDGES, 264, 200, {"max_tokens": 150}),
    "batched, full": ([5, 5, 5], 264, 200, {"max_tokens": 5}),
    "batched, a row each": ([1, 0, 1], 520, 1024, {"max_tokens": 1}),
    "batched, no room": ([0, 0], 64, 64, {"max_tokens": 0}),
    "batched, long": ([300, 0, 70], 264, 72, {"max_tokens": 1000, "dtype": "float16"}),
    **{
        f"{w}, {name}": (counts, 272, 288, {"weights": w, **changes})
        for w in WEIGHTS[1:]
        for name, counts, changes in (
            ("tile edges", [*EDGES, 257], {}),
            ("gathered, float16", [3, 0, 70], {"tokens": 9, "dtype": "float16"}),
            ("batched", [3, 0, 70, 260], {"max_tokens": 300}),
        )
    },
    "fp8 block, large k": ([5, 130, 300], 136, 4112, {"weights": "fp8 block"}),
    "fp8 block, large n": ([5, 130, 300], 1032, 144, {"weights": "fp8 block"}),
    "fp8 block, 16 along k": ([5, 130], 8, 16, {"weights": "fp8 block"}),
    "fp8 block, a row each": ([1] * 40, 264, 400, {"weights": "fp8 block"}),
    "fp8 block, many tiles": ([700] * 9, 520, 128, {"weights": "fp8 block"}),
    "fp8 row column, int64 offsets": (LONG, 264, 144, {"weights": "fp8 row column", "offsets_dtype": "int64"}),
    "mxfp4, 32 along k": ([5, 130], 8, 32, {"weights": "mxfp4"}),
    "mxfp4, large k": ([1, 0, 9], 136, 2880, {"weights": "mxfp4"}),
    "nvfp4, 32 along k": ([5, 130], 8, 32, {"weights": "nvfp4"}),
    "nvfp4, large k": ([1, 0, 9], 136, 2880, {"weights": "nvfp4", "dtype": "float16"}),
}
ACTIVATED_CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    **{name: ([3, 0, 70, 130], 144, 72, {"activation": name}) for name in ACTIVATIONS},
    "tile edges": (EDGES, 528, 200, {"activation": "silu"}),
    "long tile edges, float16": (LONG, 272, 72, {"activation": "silu", "dtype": "float16"}),
    "the least": ([1], 16, 8, {"activation": "silu"}),
    "one row": ([0, 1], 1040, 1024, {"activation": "silu"}),
    "gathered": (EDGES, 272, 200, {"activation": "swigluoai", "tokens": 50}),
    "gathered, long, float16": (LONG, 272, 72, {"activation": "silu", "tokens": 300, "dtype": "float16"}),
    "batched": (EDGES, 272, 200, {"activation": "silu", "max_tokens": 150}),
    **{
        f"{w}, {inter}": ([3, 0, 70, 260], 2 * inter, 288, {"weights": w, "activation": "silu"})
        for w in WEIGHTS[1:]
        for inter in (136, 256)
    },
}


@pytest.fixture(scope="module", autouse=True)
def _compiled_on_all_cores(request: pytest.FixtureRequest) -> None:
    """Compile in parallel what the GPU tests would compile one by one, if many of them run."""
    own = [item for item in request.session.items if item.path == request.path and item.get_closest_marker("gpu")]
    if len(own) < 50:
        return
    rng, needed = np.random.default_rng(0), set()
    for counts, n, k, changes in (*CASES.values(), *ACTIVATED_CASES.values()):
        x = made(rng, counts, n, k, **changes)
        if x.rows.any():
            plans = [planned(x.arguments, variant, gpu.of_device(0)) for variant in variants_of(x)]
            needed |= {found.step.variant.instance for found in plans if found is not None}
    arch = arch_of_device(0)
    compiler.compile_all([(i, arch) for i in compiler.missing(needed, arch)])


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "n", "k", "changes"), CASES.values(), ids=CASES)
def test_the_kernels(counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator) -> None:
    compare(made(rng, counts, n, k, whole=True, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "n", "k", "changes"), ACTIVATED_CASES.values(), ids=ACTIVATED_CASES)
def test_the_kernels_with_an_activation(
    counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator
) -> None:
    compare(made(rng, counts, n, k, whole=True, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sums_of_any_numbers(weights: str, dtype: str, rng: np.random.Generator) -> None:
    compare(made(rng, [5, 0, 130, 1], 144, 1024, weights, dtype), whole=False)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [{}, {"tokens": 5}, {"max_tokens": 40}], ids=str)
@pytest.mark.parametrize("weights", ["16", "fp8 block", "fp8 row column", "mxfp4", "nvfp4"])
def test_each_path_stays_inside_its_arrays(weights: str, shape: dict[str, Any], rng: np.random.Generator) -> None:
    compare(made(rng, [19, 0, 33], 80, 160, weights, whole=True, spare=0, **shape))
    if weights in ("16", "fp8 block"):
        compare(made(rng, [19, 0, 33], 80, 160, weights, whole=True, spare=0, activation="silu", **shape))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["16", "fp8 block", "mxfp4"])
def test_bad_offsets_stay_inside_the_rows(weights: str, rng: np.random.Generator) -> None:
    x = made(rng, [100, 30, 0, 70], 72, 160, weights, whole=True, spare=0)
    rows, low, high = 200, -(2**31), 2**31 - 1
    given = there(x)
    for bad in (
        [0, 150, 50, 200, 100], [high, low, high, low, high], [rows] * 5, [5000, 6000, 7000, 8000, 9000],
        [low, low, low, low, low], [-7, -3, 300, -1, 1 << 30],
    ):  # fmt: skip
        for variant in variants_of(x):
            # Only where it writes matters: `numpy` checks the buffer's guards.
            out = Buffer(x.out_shape, x.out_dtype)
            given.replaced(expert_offsets=on_gpu(np.array(bad, np.int32))).run(out=out.array, variant=variant)
            out.numpy()
    outside = x.replaced(expert_offsets=np.array([-5, 100, 130, 130, high], np.int32))
    compare(outside)
    batch = made(rng, [40, 0, 40], 72, 160, weights, whole=True, max_tokens=40)
    compare(batch.replaced(expert_num_tokens=np.array([high, low, 40], np.int32)))


@pytest.mark.gpu
def test_numbers_of_no_token(rng: np.random.Generator) -> None:
    x = made(rng, [5, 40], 72, 72, tokens=7, whole=True, spare=0)
    x.arguments["row_token"][::3] = np.resize(np.array([-1, 7, 2**31 - 1, -(2**31)], np.int32), 15)
    compare(x)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["16", "fp8 block", "fp8 row column"])
def test_nan_stays_in_its_row_and_column(weights: str, rng: np.random.Generator) -> None:
    x = made(rng, [40, 90], 136, 272, weights, whole=True)
    x.arguments["a"][7, 100] = x.arguments["a"][60, 3] = NAN
    x.arguments["b"][1, 77, 200] = NAN
    want, given = x.twin()[x.rows], there(x)
    assert np.isnan(want.astype(np.float32)).sum() == 2 * 136 + 90 - 1
    for variant in variants_of(x):
        # Any NaN will do.
        assert_matches("moe_gemm.out", launch(given, variant)[x.rows], want)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["16", "fp8 block", "fp8 row column", "mxfp4", "nvfp4"])
def test_every_size_of_tiles(weights: str, rng: np.random.Generator) -> None:
    x = made(rng, [5, 130, 0, 33, 300], 264, 288, weights, whole=True)
    gated = made(rng, [5, 130, 0, 33, 300], 272, 288, weights, activation="silu", whole=True)
    for expected_m in (0, 1, 2, 3, 5, 12, 20, 40, 70, 100, 200, 2000):
        compare(x.replaced(expected_m=expected_m))
        compare(gated.replaced(expected_m=expected_m))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathered_rows_give_the_bits_of_copied_ones(
    dtype: str, activation: str | None, rng: np.random.Generator
) -> None:
    counts = [5, 130, 0, 33, 300, 64, 577, 1, 288]
    x = made(rng, counts, 272, 296, dtype=dtype, activation=activation, tokens=170)
    a, row_token = x.arguments["a"], x.arguments["row_token"]
    copied = Case({**x.arguments, "a": a[np.where(x.rows, row_token, 0)], "row_token": None}, x.rows)
    gathered, copied = there(x), there(copied)
    for expected_m in (1, 4, 8, 12, 20, 40, 90, 2000):
        got, again, want = (
            launch(case.replaced(expected_m=expected_m))[x.rows] for case in (gathered, gathered, copied)
        )
        same_bits(got, want)
        same_bits(again, want)


@pytest.mark.gpu
def test_every_size_of_tiles_gathers(rng: np.random.Generator) -> None:
    x = made(rng, [5, 130, 0, 33, 300, 577], 264, 296, whole=True, tokens=170)
    for expected_m in (0, 1, 5, 12, 20, 40, 70, 100, 200, 2000):
        compare(x.replaced(expected_m=expected_m))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, 400])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_tiles_of_96_tokens(activation: str | None, tokens: int | None, rng: np.random.Generator) -> None:
    # So many experts that there are two tiles of weights for each multiprocessor.
    counts = [5, 130, 0, 33, 96, 64, 97, 1, 88, 24, 31, 193] * 12
    compare(made(rng, counts, 272, 136, activation=activation, tokens=tokens, whole=True).replaced(expected_m=64))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu"])
def test_every_width_of_a_tile(activation: str | None, rng: np.random.Generator) -> None:
    # Either side of each width of the largest tiles. From 289 rows on there are two tiles, from 545 on three; from 513
    # to 544 the second one has more than 256.
    counts = [64, 65, 128, 129, 160, 161, 192, 193, 224, 225, 240, 241, 256, 257, 272, 273, 288, 289, 577]
    counts += [511, 512, 513, 529, 544, 545, 800, 801]
    x = made(rng, counts, 272, 160, activation=activation, whole=True)
    for expected_m in (2, 8, 20, 40, 90, 2000):
        compare(x.replaced(expected_m=expected_m))


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [31, 256, 257])
@pytest.mark.parametrize("tokens", [None, 100])
def test_the_order_of_groups(experts: int, tokens: int | None, rng: np.random.Generator) -> None:
    # The largest tiles are taken by their sizes, with up to 256 experts.
    counts = [(37 * e) % 290 * (e % 5 > 0) for e in range(experts)]
    compare(made(rng, counts, 272, 72, tokens=tokens, whole=True).replaced(expected_m=2000))


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data())
def test_random_products(data: st.DataObject) -> None:
    draw = data.draw
    weights = draw(st.sampled_from(WEIGHTS))
    counts = draw(st.lists(st.integers(0, 5) | st.integers(0, 300), min_size=1, max_size=40))
    gated = draw(st.booleans())
    n = draw(st.integers(1, 40)) * (16 if gated else 8)
    k = draw(st.integers(1, 20)) * (32 if weights[-1] == "4" else 16 if "fp8" in weights else 8)
    shape = draw(st.sampled_from(("rows", "gathered", "batched")))
    all_changes: dict[str, dict[str, Any]] = {
        "rows": {"offsets_dtype": draw(st.sampled_from(("int32", "int64")))},
        "gathered": {"tokens": draw(st.integers(1, 50))},
        "batched": {"max_tokens": max(counts) + draw(st.integers(0, 40))},
    }
    changes = all_changes[shape]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    activation = draw(st.sampled_from(ACTIVATIONS)) if gated else None
    compare(made(rng, counts, n, k, weights, dtype, activation, whole=True, **changes))


def tensors(x: Case) -> Case:
    moved = {key: as_torch(v).cuda() if arrays.is_array(v) else v for key, v in x.arguments.items()}
    return x._replace(arguments=moved)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", WEIGHTS)
def test_tensors(weights: str, rng: np.random.Generator) -> None:
    shapes: tuple[dict[str, Any], ...] = ({}, {"max_tokens": 80})
    for shape in shapes:
        x = made(rng, [3, 0, 70], 272, 256, weights, whole=True, **shape)
        got = tensors(x).run()
        assert type(got) is torch.Tensor and got.is_cuda
        same_bits(to_numpy(got)[x.rows], x.twin()[x.rows])
        # Without `out`, in CuPy.
        same_bits(cupy.asnumpy(there(x).run())[x.rows], x.twin()[x.rows])
        if x.is_fp8:
            out = torch.empty(x.out_shape, dtype=torch.float16, device="cuda")
            tensors(x).run(out=out, out_dtype=None)
            same_bits(to_numpy(out)[x.rows], x.replaced(out_dtype="float16").twin()[x.rows])
    foreign = tensors(made(rng, [3, 1], 16, 16, whole=True))
    foreign = foreign.replaced(**{key: OnlyDLPack(v) for key, v in foreign.arguments.items()})
    assert foreign.run().shape == (7, 16)


@pytest.mark.gpu
def test_what_is_off_alignment_has_its_kernel(rng: np.random.Generator) -> None:
    x = made(rng, [3, 1], 16, 32, whole=True)
    want = x.twin()[x.rows]
    for name in ("a", "b"):
        given = there(x).replaced(**{name: on_gpu(x.arguments[name], skip=1)})
        same_bits(to_numpy(given.run())[x.rows], want)
        with pytest.raises(ValueError, match="variant must be 'auto' or another here, got 'mma': rows or addresses"):
            given.run(variant="mma")
    out = Buffer(x.out_shape, "bfloat16", skip=1)
    there(x).run(out=out.array)
    same_bits(out.numpy()[x.rows], want)
    if arch_of_device(0) == "90a":
        y = there(made(rng, [3, 1], 16, 32, "mxfp4"))
        b = cukern.prepare_weights(y.arguments["b"], y.arguments["b_scale"])
        out = Buffer(x.out_shape, "bfloat16", skip=1)
        with pytest.raises(ValueError, match="out must be at a multiple of 16 bytes with prepared weights, got an a"):
            y.run(b=b, b_scale=None, out=out.array)
        assert (cupy.asnumpy(out.array).view(np.uint8) == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["16", "fp8 block", "nvfp4"])
def test_a_cuda_graph_follows_the_offsets(weights: str, rng: np.random.Generator) -> None:
    x = made(rng, [50, 0, 150], 264, 256, weights, whole=True, spare=0)
    given = tensors(x)
    variants = variants_of(x)

    def step() -> list[Any]:
        return [given.run(variant=variant) for variant in variants]

    step()  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    # The second expert's weights are NaN, the others' are not.
    for offsets in ([0, 50, 50, 200], [0, 0, 0, 0], [0, 199, 199, 199], [0, 0, 0, 1], [0, 7, 7, 64]):
        x.arguments["expert_offsets"][:] = offsets
        given.arguments["expert_offsets"].copy_(as_torch(x.arguments["expert_offsets"]))
        for tensor in results:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        want = x.twin()
        for tensor in results:
            same_bits(to_numpy(tensor), want)


@pytest.mark.gpu
@pytest.mark.large(9)
@pytest.mark.parametrize("weights", ["16", "fp8 block"])
def test_more_than_2_31_elements(weights: str, rng: np.random.Generator) -> None:
    """The last of many weights, and the last of many rows."""
    # Not marked for the sanitizer, which would take minutes.
    small = made(rng, [3, 5], 1024, 8192, weights, whole=True, spare=0)
    given, experts = tensors(small), 2**31 // (1024 * 8192) + 4
    more: dict[str, Any] = {}
    for name in ("b", "b_scale"):
        if name in given.arguments:
            of_two = given.arguments[name]
            more[name] = torch.empty(experts, *of_two.shape[1:], dtype=of_two.dtype, device="cuda")
            more[name][-2:] = of_two
    offsets = torch.zeros(experts + 1, dtype=torch.int32, device="cuda")
    offsets[-2], offsets[-1] = 3, 8
    want = small.twin()
    for variant in variants_of(small):
        same_bits(to_numpy(given.replaced(**more, expert_offsets=offsets).run(variant=variant)), want)
    del more, of_two
    # The kernels for few rows and for any sizes would take a second for the rows before the last ones.
    small = made(rng, [0, 100], 4096, 4096, weights, whole=True, spare=0)
    given, rows = tensors(small), 2**19 + 300
    a = torch.zeros(rows, 4096, dtype=given.arguments["a"].dtype, device="cuda")
    a[-100:] = given.arguments["a"]
    more = {"a": a, "expert_offsets": torch.tensor([0, rows - 100, rows], dtype=torch.int32, device="cuda")}
    if "a_scale" in given.arguments:
        more["a_scale"] = torch.ones(rows, 32, device="cuda")
        more["a_scale"][-100:] = given.arguments["a_scale"]
    want = small.twin()
    for variant in set(variants_of(small)) - {"stream", "fma"}:
        same_bits(to_numpy(given.replaced(**more).run(variant=variant)[-100:]), want)


# --- torch.ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_step_is_the_step(device: str, rng: np.random.Generator) -> None:
    import cukern.torch_ops

    x = made(rng, [3, 1, 5], 32, 64, spare=0)
    a, b, offsets = (as_torch(x.arguments[key]).to(device) for key in ("a", "b", "expert_offsets"))
    counts = torch.tensor([3, 3, 3], dtype=torch.int32, device=device)

    def step(a: Any, b: Any, offsets: Any) -> Any:
        gated = cukern.moe_gemm(a, b, offsets, activation="silu")
        out = torch.empty_like(gated)
        cukern.moe_gemm(a * 2, b, offsets, activation="silu", out=out)
        return gated, out, cukern.moe_gemm_batched(a.view(3, 3, -1), b, counts)

    want = step(a, b, offsets)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(a, b, offsets)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    torch.compiler.reset()


# --- the steps of the notebook --------------------------------------------------------------------------


@pytest.mark.parametrize("step", moe_gemm_steps.STEPS, ids=lambda step: step.name)
def test_a_step_of_the_notebook_compiles_and_does_not_spill(step: moe_gemm_steps.Step) -> None:
    assert len(step.path.read_text().splitlines()) < 200
    for arch in step.archs:
        taken = moe_gemm_steps.compiled(step, arch).resources
        assert taken.registers > 32 and taken.spill_bytes == 0


def test_all_files_of_the_steps_are_listed() -> None:
    assert sorted(moe_gemm_steps.FOLDER.glob("*")) == [step.path for step in moe_gemm_steps.STEPS]


@pytest.mark.gpu
@pytest.mark.parametrize("step", moe_gemm_steps.STEPS, ids=lambda step: step.name)
def test_a_step_of_the_notebook_is_the_twin(step: moe_gemm_steps.Step, rng: np.random.Generator) -> None:
    if step.is_mapped and arch_of_device(0) != "90a":
        pytest.skip("its kernel is for Hopper")
    for counts, n, k in ((EDGES, 264, 200), (LONG, 520, 72), ([0, 0, 1, 0], 8, 8), ([300], 1024, 2048)):
        x = made(rng, counts, n, k, whole=True)
        out = Buffer(x.out_shape, "bfloat16")
        given = there(x).arguments
        moe_gemm_steps.multiply(step, given["a"], given["b"], given["expert_offsets"], out=out.array)
        got = out.numpy()
        same_bits(got[x.rows], x.twin()[x.rows])
        assert (got[~x.rows].view(np.uint8) == POISON).all(), "a row of no expert was written"


# --- the benchmarks -------------------------------------------------------------------------------------


def test_the_baselines_compute_the_same() -> None:
    cases = bench_moe_gemm.cases()
    # Weights are prepared once, which no one waits for.
    assert {case.op for case in cases} == {*op.__all__} - {"prepare_weights", "restore_weights"}
    rows = [(case.op, str(case.case), case.variant) for case in cases]
    assert len(set(rows)) == len(rows)
    for case in (case for case in bench_moe_gemm.cases(small=True) if case.op != "quantized_matmul"):
        inputs = harness.inputs(case, 0, "cpu")
        ours = case.call(*inputs)
        for name, baseline in case.baselines.items():
            # torch's product of FP8 needs a GPU.
            if name == "torch grouped" and inputs[0].a.dtype == torch.float8_e4m3fn:
                continue
            assert case.agree is not None and case.agree(ours, baseline.load()(*harness.inputs(case, 0, "cpu")))


def test_the_bytes_and_the_flops_of_a_benchmark() -> None:
    for case in (case for case in bench_moe_gemm.cases(small=True) if case.op != "quantized_matmul"):
        x = harness.inputs(case, 0, "cpu")[0]
        out = case.call(x)
        k, n = x.a.shape[-1], x.b.shape[1]
        arrays_used = [x.a, out, *([x.scales["a_scale"]] if "a_scale" in x.scales else [])]
        if out.ndim == 3:
            arrays_used = [array[:, : array.shape[1] // bench_moe_gemm._ROOM] for array in arrays_used]
        rows = arrays_used[1].numel() // out.shape[-1]
        assert case.bytes == sum(y.nbytes for y in (*arrays_used, x.b, *([x.scales["b_scale"]] if x.scales else [])))
        # FP8 runs at twice the rate.
        assert case.flops == 2 * rows * n * k // (2 if x.a.dtype == torch.float8_e4m3fn else 1)


# --- few rows of one expert -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "changes", "function"),
    [
        (1, {}, "gemm_stream_one"),
        (2, {"expected_m": None}, "gemm_stream_one"),
        (2, {"activation": "silu", "dtype": "float16"}, "gemm_stream_one"),
        (3, {}, "gemm_stream"),
        (1, {"weights": "fp8 block"}, "gemm_stream"),
        (1, {"how": "gathered"}, "gemm_stream"),
        (1, {"how": "batched"}, "gemm_stream"),
        (5, {}, "gemm_wgmma"),
    ],
)
def test_few_rows_of_one_expert_have_a_kernel(rows: int, changes: dict[str, Any], function: str) -> None:
    assert function_for(shaped(rows, experts=1, **changes)) == function


def test_a_row_is_under_way_at_once() -> None:
    tile = stream_one.tile_for
    assert [tile(k) for k in (8, 1024, 1032, 2048, 2056, 4096, 20480)] == [
        (2, 4, 1), (2, 4, 1), (2, 4, 2), (2, 4, 2), (1, 8, 2), (1, 8, 2), (1, 8, 2),
    ]  # fmt: skip


ONE_SIZES = [
    (5120, 2048),
    (2048, 4096),
    (128, 2048),
    (6144, 1024),
    (1024, 3072),
    (16, 8),
    (48, 264),
    (16, 20480),
    (4240, 520),
]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh", "relu2_no_mul"])
@pytest.mark.parametrize(("n", "k"), ONE_SIZES)
def test_few_rows_of_one_expert(n: int, k: int, activation: str | None) -> None:
    generator = torch.Generator("cuda").manual_seed(n + k)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    for rows, dtype in itertools.product((1, 2, 3, 4, 9), (torch.bfloat16, torch.float16)):
        a, b, bias = normal(rows, k).to(dtype), (normal(1, n, k) * k**-0.5).to(dtype), normal(1, n)
        sums = a.float() @ b[0].float().T + bias
        if activation is None:
            wanted = sums
        elif activation == "relu2_no_mul":
            wanted = torch.relu(sums) ** 2
        else:
            gates, ups = sums.chunk(2, 1)
            gates = (
                torch.nn.functional.silu(gates)
                if activation == "silu"
                else torch.nn.functional.gelu(gates, approximate="tanh")
            )
            wanted = gates * ups
        for begin, end in {(0, rows), (rows // 2, rows), (0, 0)}:
            offsets = torch.tensor([begin, end], dtype=torch.int32, device="cuda")
            out = torch.full_like(wanted, 7.0, dtype=dtype)
            cukern.moe_gemm(a, b, offsets, bias=bias, activation=activation, expected_m=min(rows, 2), out=out)
            torch.testing.assert_close(out[begin:end].float(), wanted[begin:end], rtol=2e-2, atol=2e-2)
            assert (out[:begin] == 7).all() and (out[end:] == 7).all()
