"""Soft caps: the twin against torch, the kernels against the twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cukern
from cukern.ops import softcap as op
from cukern.reference import softcap as twin
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from cukern.testing import assert_matches
from tests.buffers import normal, on_gpu, zeros

NAN, INF = np.nan, np.inf
CAPPED = "softcap.capped"


@pytest.mark.parametrize("dtype", op.DTYPES)
def test_the_twin_is_torchs_tanh(dtype: str, rng: np.random.Generator) -> None:
    logits = normal(rng, (3, 5, 40), dtype) * np.array(20, arrays.numpy_dtype(dtype))
    wide = torch.from_numpy(logits.astype(np.float64))
    want = (30 * torch.tanh(wide / 30)).to(getattr(torch, dtype))
    assert_matches(CAPPED, cukern.softcap_logits(logits, 30), want)


def test_by_hand() -> None:
    got = cukern.softcap_logits(np.array([0, 1, -2, 60, INF, -INF, NAN], np.float32), 2.0)
    wanted = [0, 2 * np.tanh(0.5), -2 * np.tanh(1), 2, 2, -2, NAN]
    np.testing.assert_allclose(got, np.array(wanted, np.float32), rtol=1e-6)


def test_small_logits_stay_nearly_as_they_are() -> None:
    x = np.array([[1e-30, -1e-6, 1e-3, 0.0]], np.float32)
    np.testing.assert_allclose(cukern.softcap_logits(x, 50.0), x, rtol=2e-7)


def test_in_place_and_into_strided_rows(rng: np.random.Generator) -> None:
    padded = normal(rng, (4, 64), "float32")
    logits, rest = padded[:, :50], padded[:, 50:].copy()
    want = twin.softcap_logits(logits, 3.0)
    assert cukern.softcap_logits(logits, 3.0, out=logits) is logits
    np.testing.assert_array_equal(padded, np.concatenate([want, rest], axis=1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits": [1.0]}, TypeError, "logits must be an array"),
        ({"logits": zeros(3, 8, dtype="int32")}, TypeError, "logits must be float32 or float16 or bfloat16, got int32"),
        ({"logits": zeros(3, 8, dtype="float32").T}, ValueError, "logits must be contiguous along its last dimension"),
        ({"cap": 0}, ValueError, "cap must be a positive number of float32, got 0"),
        ({"cap": -30.0}, ValueError, "cap must be a positive number of float32, got -30.0"),
        ({"cap": 1e39}, ValueError, "cap must be a positive number of float32, got 1e[+]39"),
        ({"cap": NAN}, ValueError, "cap must be a finite number, got nan"),
        ({"cap": "30"}, TypeError, r"cap must be a number, got '30' \(str\)"),
        ({"cap": [30.0]}, TypeError, r"cap must be a number, got \[30.0\] \(list\)"),
        (
            {"out": zeros(3, 9, dtype="float32")},
            ValueError,
            r"out must be of shape \[..., vocab\] = \[3, 8\], got \[3, 9\]",
        ),
        ({"out": zeros(3, 8, dtype="float16")}, TypeError, "out must be float32, got float16"),
        ({"out": torch.zeros(3, 8)}, TypeError, "out must be a NumPy array like logits, got torch.Tensor"),
        ({"variant": "vector"}, ValueError, "variant must be 'auto' for arrays in host memory"),
        ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'vector', 'scalar', got 'fast'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"logits": zeros(3, 8, dtype="float32"), "cap": 30.0, **changes}
    with pytest.raises(error, match=message):
        cukern.softcap_logits(**arguments)


def test_what_is_launched() -> None:
    def kernel_of(logits: Any, **options: Any) -> str:
        return cukern.explain(cukern.softcap_logits, logits, 30.0, arch="90a", **options).launches[0].kernel

    aligned = zeros(3, 64, dtype="float16")
    assert kernel_of(aligned) == "softcap<T=__half, BYTES=16, ITEMS=1>"
    assert kernel_of(zeros(64, 2**15, dtype="float16")) == "softcap<T=__half, BYTES=16, ITEMS=4>"
    assert (
        kernel_of(zeros(3, 50, dtype="float16")) == kernel_of(aligned, variant="scalar") == kernel_of(aligned[:, :50])
    )
    assert "BYTES=2" in kernel_of(aligned[:, :50])
    assert "BYTES=2" in kernel_of(aligned, out=zeros(3, 68, dtype="float16")[:, :64])
    with pytest.raises(ValueError, match="'vector': rows of logits or out are not 16-byte aligned"):
        kernel_of(zeros(3, 50, dtype="float16"), variant="vector")
    assert not cukern.explain(cukern.softcap_logits, zeros(0, 50, dtype="float16"), 30.0, arch="90a").launches


# --- on the GPU -------------------------------------------------------------------------------------------


def check(logits: Any, cap: float, variant: str = "auto", in_place: bool = False) -> None:
    given = on_gpu(logits)
    got = cukern.softcap_logits(given, cap, out=given if in_place else None, variant=variant)
    assert (got is given) == in_place
    assert_matches(CAPPED, got, twin.softcap_logits(logits, cap))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("variant", op.VARIANTS)
@pytest.mark.parametrize("dtype", op.DTYPES)
def test_the_kernels(dtype: str, variant: str, in_place: bool, rng: np.random.Generator) -> None:
    # Rows that share a block, a row with several blocks and a tail, four units per thread.
    for shape in ((9, 48), (1, 8), (3, 4096), (2, 3, 33328), (70, 33328)):
        check(normal(rng, shape, dtype) * np.array(30, arrays.numpy_dtype(dtype)), 30.0, variant, in_place)


@pytest.mark.gpu
@pytest.mark.parametrize("cap", [1e-3, 1.0, 50.0, 1e30])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits(dtype: str, cap: float) -> None:
    check(np.arange(2**16, dtype=np.uint16).view(arrays.numpy_dtype(dtype))[None], cap)


@pytest.mark.gpu
def test_numbers_of_32_bits(rng: np.random.Generator) -> None:
    x = rng.integers(0, 2**32, (64, 4096), np.uint32).view(np.float32)
    check(np.where(np.abs(x) < 1e-35, 0, x), 30.0)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_strided_rows_in_place_leave_the_rest(rng: np.random.Generator) -> None:
    for width, dtype in ((48, "bfloat16"), (50, "float32")):
        padded = normal(rng, (7, 64), dtype)
        given, want = on_gpu(padded), padded.copy()
        want[:, :width] = twin.softcap_logits(padded[:, :width], 2.0)
        cukern.softcap_logits(given[:, :width], 2.0, out=given[:, :width])
        assert_matches(CAPPED, given, want)


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.integers(0, 70), st.integers(0, 3000), st.sampled_from(op.DTYPES), st.integers(0, 2**32))
def test_random_shapes(rows: int, vocab: int, dtype: str, seed: int) -> None:
    x = normal(np.random.default_rng(seed), (rows, vocab), dtype)
    assert_matches(CAPPED, cukern.softcap_logits(cupy.asarray(x), 0.7), twin.softcap_logits(x, 0.7))
