"""Grouped products with biases, activations of any form, sizes, strides and scales of experts: twin and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import cukern
from cukern.ops.moe_gemm import kernels
from cukern.reference import moe_gemm as twin
from cukern.runtime import arrays
from cukern.runtime.activation import UNGATED, is_gated
from cukern.runtime.kernel import arch_of_device
from cukern.testing import assert_matches
from tests.activations import activated
from tests.buffers import Buffer, as_torch, on_gpu, same_bits, to_numpy
from tests.test_moe_gemm import (
    EDGES,
    WEIGHTS,
    Case,
    by_torch,
    compare,
    function_for,
    made,
    planned,
    shaped,
    there,
    unreal,
    variants_of,
)
from tests.test_moe_gemm_prepared import HINTS, prepared, shaped_prepared

Array = NDArray[Any]
NAN = np.nan
GPT_OSS = {"activation": "swigluoai", "interleaved": True}


def finished(
    rng: np.random.Generator,
    counts: Sequence[int],
    n: int,
    k: int,
    *,
    bias: str | None = "float32",
    whole: bool = False,
    alpha: float | None = None,
    limit: float | None = None,
    interleaved: bool = False,
    expert_scale: bool = False,
    **changes: Any,
) -> Case:
    """A call of `made` with a bias of a dtype ("own": the result's), and what is given of the rest."""
    x = made(rng, counts, n, k, whole=whole, **changes)
    more: dict[str, Any] = {"interleaved": True} if interleaved else {}
    more |= {name: value for name, value in (("alpha", alpha), ("limit", limit)) if value is not None}
    if bias is not None:
        shape = len(counts), n
        values = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape)
        more["bias"] = values.astype(arrays.numpy_dtype(x.out_dtype if bias == "own" else bias))
        more["bias"][np.array(counts) == 0] = NAN
    if expert_scale:
        more["a_scale"] = np.exp2(rng.integers(-2, 3, len(counts))).astype(np.float32)
    return x.replaced(**more)


def of_sums(x: Case, sums: torch.Tensor) -> torch.Tensor:
    """The activation of sums in float64, with or without a gate."""
    given = x.arguments
    name = given.get("activation")
    if name is None:
        return sums
    if not is_gated(name):
        return activated(name.removesuffix("_no_mul"), sums)
    gate, up = (sums[..., ::2], sums[..., 1::2]) if given.get("interleaved") else sums.chunk(2, dim=-1)
    return activated(name, gate, up, **{x: given[x] for x in ("alpha", "limit") if x in given})


def finished_by_torch(x: Case) -> Array:
    """The result in float64."""
    given = dict(x.arguments)
    bias = given.pop("bias", None)
    plain = {
        name: value for name, value in given.items() if name not in ("activation", "alpha", "limit", "interleaved")
    }
    if plain.get("a_scale", np.zeros(0)).shape == (len(given["b"]),) and x.is_batched:
        plain["a_scale"] = np.repeat(plain["a_scale"][:, None], x.rows.shape[1], 1)
    sums = torch.from_numpy(by_torch(x._replace(arguments=plain)))
    if bias is not None:
        if x.is_batched:
            sums += as_torch(bias).double()[:, None]
        else:
            place = torch.arange(len(sums))
            expert = torch.searchsorted(as_torch(given["expert_offsets"]).long(), place, right=True) - 1
            sums += as_torch(bias).double()[expert.clamp(max=len(bias) - 1)]
    out = of_sums(x, sums)
    out[~torch.from_numpy(x.rows)] = 0
    return out.numpy()


# --- the twin -------------------------------------------------------------------------------------------

#: Calls by their reason: counts, n, k, and other arguments of `finished`.
TWIN_CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    "bias": ([3, 0, 4], 24, 40, {}),
    "bias of the rows' dtype": ([3, 0, 4], 24, 40, {"bias": "own", "dtype": "float16"}),
    "bias, batched": ([3, 0, 4], 24, 40, {"max_tokens": 5}),
    "bias, gathered": ([3, 0, 4], 24, 40, {"tokens": 6}),
    "bias, silu": ([3, 0, 4], 32, 40, {"activation": "silu"}),
    "gpt-oss": ([3, 0, 4], 32, 64, {"weights": "mxfp4", **GPT_OSS}),
    "gpt-oss, alpha and limit": ([3, 0, 4], 32, 64, {"weights": "mxfp4", "alpha": 1.0, "limit": 0.5, **GPT_OSS}),
    "halves, alpha and limit": ([3, 4], 32, 64, {"activation": "swigluoai", "alpha": 2.0, "limit": 0.25}),
    "interleaved silu": ([3, 0, 4], 32, 40, {"activation": "silu", "interleaved": True, "bias": None}),
    "fp8, interleaved": ([3, 0, 4], 32, 48, {"weights": "fp8 row column", **GPT_OSS}),
    **{name: ([3, 0, 4], 24, 40, {"activation": name}) for name in UNGATED},
    "odd sizes": ([3, 0, 4], 511, 13, {}),
    "odd sizes, silu": ([3, 0, 4], 22, 511, {"activation": "silu"}),
    "odd sizes, fp8": ([3, 0, 4], 511, 131, {"weights": "fp8 block"}),
    "odd sizes, nvfp4": ([3, 0, 4], 21, 48, {"weights": "nvfp4"}),
    "a scale of each expert": ([3, 0, 4], 24, 48, {"weights": "fp8 one one", "max_tokens": 5, "expert_scale": True}),
}


@pytest.mark.parametrize(("counts", "n", "k", "changes"), TWIN_CASES.values(), ids=TWIN_CASES)
def test_the_twin_is_torchs_formula(
    counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator
) -> None:
    x = finished(rng, counts, n, k, **changes)
    got, want = x.run(), finished_by_torch(x)
    assert got.dtype.name == x.out_dtype
    assert_matches("moe_gemm.out", got, want.astype(got.dtype))


def test_a_view_of_padded_weights_is_those_weights(rng: np.random.Generator) -> None:
    for weights in WEIGHTS:
        x = finished(rng, [3, 0, 4], 32, 64, weights=weights)
        same_bits(x.replaced(b=padded(x.arguments["b"])).run(), x.run())


def padded(b: Array, columns: int = 24, rows: int = 3) -> Array:
    """A view of `b` in an array of longer rows, and more of them, whose other numbers are NaN or all ones."""
    experts, n, k = b.shape
    whole = np.full((experts, n + rows, k + columns), 255, np.uint8) if b.itemsize == 1 else None
    whole = np.full((experts, n + rows, k + columns), NAN, b.dtype) if whole is None else whole.view(b.dtype)
    whole[:, :n, :k] = b
    return whole[:, :n, :k]


# --- the choice -----------------------------------------------------------------------------------------


def strided(x: dict[str, Any], between: int) -> dict[str, Any]:
    """The call with rows of weights `between` numbers apart."""
    experts, n, k = x["b"].shape
    return {**x, "b": unreal(experts, n, between, dtype=x["b"].dtype.name)[..., :k]}


def test_the_kernel_for_sizes_strides_and_addresses() -> None:
    for rows in (8, 8192):
        odd = [shaped(rows, n=511), shaped(rows, k=511), shaped(rows, k=4095, n=4095, weights="fp8 block")]
        odd += [shaped(rows, n=1022, activation="silu"), shaped(rows, k=48, weights="nvfp4")]
        for x in odd:
            assert function_for(x) == "gemm_fma"
            with pytest.raises(ValueError, match="variant must be 'auto' or another here, got 'mma': rows or addr"):
                planned(x, "mma")
        x = shaped(rows)
        assert function_for(strided(x, 7168 + 8)) == "gemm_wgmma"
        assert function_for(strided(x, 7168 + 8), on="80") == "gemm_fma"
        assert function_for(strided(x, 7168 + 1)) == "gemm_fma"
        assert function_for(strided(shaped(rows, weights="fp8 block"), 7168 + 16)) == "gemm_fp8_wgmma"
        assert function_for(strided(shaped(rows, weights="mxfp4"), 3584 + 16)) == "gemm_fma"
        with pytest.raises(ValueError, match="rows of b have a stride"):
            planned(strided(x, 7168 + 8), "stream")
        assert function_for({**x, "interleaved": True, "activation": "silu"}) == function_for(shaped(rows))
    assert function_for({**shaped(8192, weights="fp8 row", activation="silu"), "interleaved": True}) == "gemm_mma"


def test_instances_without_an_epilogue_are_those_of_before() -> None:
    assert kernels.epilogue(1, is_gated=True) == 1
    assert kernels.epilogue(0, is_gated=False) == 0


def test_the_maps_of_interleaved_and_strided_weights() -> None:
    def b_map(x: dict[str, Any]) -> Any:
        found = planned(x, "wgmma")
        assert found is not None
        return found.maps[0]

    x = {**shaped(8192, activation="swigluoai"), "interleaved": True}
    _, dims, strides, box, *_ = b_map(x)
    assert (dims, box) == ((7168, 8, 2, 256, 8), (64, 8, 2, 8, 1))
    # From a gate to the next, to its up, to the gate 8 further on, to the next expert's.
    assert strides == (14336 * 2, 14336, 14336 * 16, 14336 * 4096)
    _, dims, strides, *_ = b_map(strided(shaped(8192), 7200))
    assert (dims[:3], strides[:2]) == ((7168, 4096, 8), (14400, 14400 * 4096))
    # Rows of prepared weights stay in their order: the kernel takes gates and ups apart.
    plain, gated = shaped_prepared(8192), {**shaped_prepared(8192, activation="swigluoai"), "interleaved": True}
    assert b_map(gated)[1:4] == b_map(plain)[1:4]


@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4"])
def test_lanes_have_a_gate_and_its_up_of_prepared_weights(weights: str, rng: np.random.Generator) -> None:
    """The places that gemm_fp4_wgmma computes, of a lane's words and scales in 16 rows."""
    group = 32 if weights == "mxfp4" else 16
    b, scales = (rng.integers(1, 100, (1, 16, 64 // x)).astype(np.uint8) for x in (2, group))
    found = cukern.prepare_weights(b, scales)[0, :, 0]
    eight, numbers, of_row = found.shape[1], 256, 64 // group
    flat = found.reshape(-1)
    for lane in range(32):
        row, unit = lane // 4 * 2 % 8, lane // 16 * eight
        words, own = unit + row * 32 + lane % 4 * 8, unit + numbers + row * of_row
        for side in range(2):
            weight = lane // 4 * 2 + side
            alone = cukern.prepare_weights(
                np.repeat(b[:, weight : weight + 1], 8, 1), np.repeat(scales[:, weight : weight + 1], 8, 1)
            )
            want = alone[0, 0, 0]
            at = words + side * 32
            same_bits(flat[at : at + 8], want[lane % 4 * 8 : lane % 4 * 8 + 8])
            at = own + side * of_row
            same_bits(flat[at : at + of_row], want[numbers : numbers + of_row])


# --- the kernels ----------------------------------------------------------------------------------------

#: Calls by their reason: counts, n, k, and other arguments of `finished`.
CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    **{
        f"{w}, bias{', ' + dtype if dtype != 'bfloat16' else ''}": (
            [*EDGES, 257], 272, 288, {"weights": w, "dtype": dtype, "bias": "own" if dtype == "float16" else "float32"}
        )
        for w in WEIGHTS
        for dtype in ("bfloat16", "float16")
    },
    **{f"{w}, pairs": ([3, 0, 70, 260], 272, 288, {"weights": w, **GPT_OSS}) for w in WEIGHTS},
    **{f"{w}, bias, silu": ([3, 0, 70, 260], 272, 288, {"weights": w, "activation": "silu"}) for w in WEIGHTS},
    **{f"{w}, batched, pairs": ([3, 0, 70], 272, 288, {"weights": w, "max_tokens": 90, **GPT_OSS}) for w in WEIGHTS},
    **{f"{w}, gathered, pairs": ([3, 0, 70], 272, 288, {"weights": w, "tokens": 9, **GPT_OSS}) for w in WEIGHTS},
    **{f"{w}, relu2_no_mul": ([3, 0, 70], 136, 288, {"weights": w, "activation": "relu2_no_mul"}) for w in WEIGHTS},
    **{name: ([3, 0, 70], 136, 72, {"activation": name, "bias": None}) for name in UNGATED},
    "alpha and limit": ([3, 0, 70], 272, 288, {"alpha": 1.0, "limit": 1.5, **GPT_OSS}),
    "alpha and limit, halves": ([3, 0, 70], 272, 288, {"alpha": 1.0, "limit": 1.5, "activation": "swigluoai"}),
    **{f"{w}, n and k of any size": ([3, 0, 70], 511, 131, {"weights": w}) for w in WEIGHTS[:-2]},
    "n and k of any size, silu": ([3, 0, 70], 1022, 511, {"activation": "silu"}),
    "n and k of any size, pairs": ([3, 0, 70], 1022, 511, GPT_OSS),
    "n and k of one": ([3, 0, 70], 1, 1, {}),
    "mxfp4, n of any size": ([3, 0, 70], 511, 96, {"weights": "mxfp4"}),
    "nvfp4, n of any size": ([3, 0, 70], 511, 112, {"weights": "nvfp4"}),
    "n and k of any size, batched": ([3, 0, 70], 511, 131, {"max_tokens": 80}),
    "n and k of any size, gathered": ([3, 0, 70], 511, 131, {"tokens": 9, "dtype": "float16"}),
    **{
        f"{w}, a scale of each expert": (
            [3, 0, 70, 260], 272, 288, {"weights": w, "max_tokens": 300, "expert_scale": True}
        )
        for w in ("fp8 one one", "fp8 one column")
    },
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "n", "k", "changes"), CASES.values(), ids=CASES)
def test_the_kernels(counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator) -> None:
    compare(finished(rng, counts, n, k, whole=True, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["bias", "pairs", "pairs, gathered", "relu2_no_mul", "bias, silu", "float16"])
def test_every_form_with_prepared_weights(weights: str, name: str, rng: np.random.Generator) -> None:
    if arch_of_device(0) != "90a":
        pytest.skip("prepared weights are for sm_90a")
    changes: dict[str, dict[str, Any]] = {
        "bias": {}, "pairs": GPT_OSS, "pairs, gathered": {"tokens": 50, **GPT_OSS},
        "relu2_no_mul": {"activation": "relu2_no_mul"}, "bias, silu": {"activation": "silu"},
        "float16": {"dtype": "float16", "bias": "own", **GPT_OSS},
    }  # fmt: skip
    x = prepared(finished(rng, [*EDGES, 257], 272, 224, whole=True, weights=weights, **changes[name]))
    for hint in HINTS:
        compare(x.replaced(expected_m=hint))


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 3])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_with_a_stride(weights: str, columns: int, rng: np.random.Generator) -> None:
    for changes in ({}, GPT_OSS, {"tokens": 9}):
        x = finished(rng, [3, 0, 70, 260], 272, 288, weights=weights, whole=True, **changes)
        want, given = x.twin()[x.rows], there(x)
        view = padded(x.arguments["b"], columns)
        whole = on_gpu(np.ascontiguousarray(view.base))
        given = given.replaced(b=whole.view(given.arguments["b"].dtype)[:, : view.shape[1], : view.shape[2]])
        for variant in ("auto", "wgmma", "fma"):
            if variant == "wgmma" and (columns == 3 or "wgmma" not in variants_of(x)):
                continue
            out = Buffer(x.out_shape, x.out_dtype)
            given.run(out=out.array, variant=variant)
            assert_matches("moe_gemm.out", out.numpy()[x.rows], want)


@pytest.mark.gpu
def test_arrays_at_any_address(rng: np.random.Generator) -> None:
    x = finished(rng, [3, 0, 70], 272, 288, whole=True)
    want, given = x.twin()[x.rows], there(x)
    for name in ("a", "b", "bias"):
        moved = given.replaced(**{name: on_gpu(x.arguments[name], 1)})
        same_bits(to_numpy(moved.run())[x.rows], want)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("weights", ["16", "fp8 block", "fp8 row column", "mxfp4", "nvfp4"])
def test_each_path_stays_inside_its_arrays(weights: str, rng: np.random.Generator) -> None:
    compare(finished(rng, [19, 0, 33], 80, 160, weights=weights, whole=True, spare=0, **GPT_OSS))
    k = 144 if weights == "nvfp4" else 160 if weights == "mxfp4" else 145
    compare(finished(rng, [19, 0, 33], 83, k, weights=weights, whole=True, spare=0))


def test_the_twin_ignores_alpha_without_swigluoai(rng: np.random.Generator) -> None:
    x = finished(rng, [3, 4], 32, 40, activation="silu")
    same_bits(twin.moe_gemm(**x.arguments, alpha=3.0, limit=0.0), x.twin())
