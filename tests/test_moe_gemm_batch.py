"""Grouped products: what the bits of a row depend on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukern
from cukern.runtime import arrays
from cukern.runtime.kernel import arch_of_device
from tests.buffers import on_gpu, same_bits, to_numpy

Array = np.ndarray[Any, Any]
EXPERTS, N, K = 4, 256, 512
#: Rows of the groups of a batch, and of another one, whose rows are the first ones of these.
ROWS, FEWER = (70, 0, 9, 300), (1, 0, 5, 33)


def given(rng: np.random.Generator, weights: str) -> dict[str, Any]:
    """Rows and weights of 16 bits, or of FP8 with scales by blocks."""
    a = (rng.standard_normal((sum(ROWS), K)) / 4).astype(np.float32)
    b = (rng.standard_normal((EXPERTS, N, K)) / 4).astype(np.float32)
    if weights != "fp8":
        return {name: x.astype(arrays.numpy_dtype(weights)) for name, x in (("a", a), ("b", b))}
    fp8 = arrays.numpy_dtype("float8_e4m3fn")
    scales = {"a_scale": rng.random((sum(ROWS), K // 128)), "b_scale": rng.random((EXPERTS, N // 128, K // 128))}
    found = {name: x.astype(np.float32) for name, x in scales.items()}
    return {"a": a.astype(fp8), "b": b.astype(fp8), **found, "out_dtype": "bfloat16"}


def product(x: dict[str, Any], groups: tuple[int, ...], variant: str, expected_m: int) -> Array:
    offsets = np.cumsum((0, *groups)).astype(np.int32)
    placed = {name: on_gpu(value) if isinstance(value, np.ndarray) else value for name, value in x.items()}
    a, b = placed.pop("a"), placed.pop("b")
    return to_numpy(cukern.moe_gemm(a, b, on_gpu(offsets), **placed, variant=variant, expected_m=expected_m))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("expected_m", [1, 4, 8, 60, 1000])
def test_a_row_depends_on_the_variant_and_the_expected_rows(
    expected_m: int, weights: str, rng: np.random.Generator
) -> None:
    x = given(rng, weights)
    starts = np.cumsum((0, *ROWS))
    chosen = np.concatenate([start + np.arange(rows) for start, rows in zip(starts, FEWER, strict=False)])
    fewer = {name: value[chosen] if name in ("a", "a_scale") else value for name, value in x.items()}
    for variant in ["wgmma"] * (arch_of_device(0) == "90a") + ["mma", "stream", "fma"]:
        want = product(x, ROWS, variant, expected_m)
        same_bits(product(fewer, FEWER, variant, expected_m), want[chosen])
        # Neither do the numbers of the other rows count.
        others = np.setdiff1d(np.arange(len(want)), chosen)
        changed = {name: value.copy() if name == "a" else value for name, value in x.items()}
        changed["a"][others] = changed["a"][others[::-1]]
        same_bits(product(changed, ROWS, variant, expected_m)[chosen], want[chosen])
