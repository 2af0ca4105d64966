"""MXFP4 weights prepared for FP8 rows: their layout and numbers, and products with them."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukern
import cukern.runtime.compile as compiler
from cukern.commands import resources
from cukern.formats.fused_moe import FusedMoEQuantConfig
from cukern.ops.moe_gemm import folded, kernels
from cukern.reference import moe_gemm as twin
from cukern.reference.quantization import dequantize_mxfp4, quantize_mxfp4
from cukern.runtime import activation as activations
from cukern.runtime.kernel import arch_of_device
from tests.buffers import as_torch, on_gpu, same_bits, to_numpy
from tests.test_moe_gemm import E4M3, EDGES, LONG, NAN, planned, shaped, unreal

FP8 = "float8_e4m3fn"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: Rows of a group, as a hint, by each of which another form is taken.
HINTS = (1, 8, 16, 40, 100, 1000)


def random_weights(rng: np.random.Generator, shape: tuple[int, int, int], low: int = 110, high: int = 124) -> Any:
    """Weights [experts, n, k] and their scales, as bytes."""
    experts, n, k = shape
    b = rng.integers(0, 256, (experts, n, k // 2)).astype(np.uint8)
    return b, rng.integers(low, high + 1, (experts, n, k // 32)).astype(np.uint8)


def made(
    rng: np.random.Generator,
    counts: list[int],
    n: int,
    k: int,
    *,
    whole: bool = True,
    max_tokens: int | None = None,
    spare: int = 3,
    biased: bool = False,
    **options: Any,
) -> tuple[dict[str, Any], Any]:
    """A call, and which rows of its result are written. Rows that may not be read are NaN.

    whole: whole numbers times powers of two: their sums, about as large, are exact, whatever their order.
    """
    experts = len(counts)
    if max_tokens is None:
        is_row = np.arange(sum(counts) + spare) < sum(counts)
        x: dict[str, Any] = {"expert_offsets": np.cumsum([0, *counts]).astype(np.int32)}
    else:
        is_row = np.arange(max_tokens) < np.array(counts)[:, None]
        x = {"expert_num_tokens": np.array(counts, np.int32)}
    shape, blocks = is_row.shape, -(-k // 128)
    drawn = rng.integers(-2, 3, (*shape, k)) if whole else rng.standard_normal((*shape, k)) * 60
    a = drawn.astype(np.float32).astype(E4M3)
    scales = np.exp2(rng.integers(-9, -5, (*shape, blocks))) if whole else rng.random((*shape, blocks)) / 2048
    scales = scales.astype(np.float32)
    a[~is_row], scales[~is_row] = NAN, NAN
    low, high = (126, 127) if whole else (108, 122)
    b = cukern.prepare_weights(*random_weights(rng, (experts, n, k), low, high), a_dtype=FP8)
    if biased:
        x["bias"] = rng.integers(-2, 3, (experts, n)).astype(np.float32)
    return {"a": a, "b": b, "a_scale": scales, **x, **options}, is_row


def run(x: dict[str, Any], **more: Any) -> Any:
    function = cukern.moe_gemm_batched if "expert_num_tokens" in x else cukern.moe_gemm
    return function(**{**x, **more})


# --- the layout and the numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("k", [32, 128, 288])
def test_the_layout_is_the_documented_one(k: int, rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (2, 24, k), 100, 118)
    found = cukern.prepare_weights(b, b_scale, a_dtype=FP8)
    assert found.shape == (2, 3, -(-k // 128), 544) and found.dtype == np.uint8
    for expert, row, i in zip(rng.integers(0, 2, 400), rng.integers(0, 24, 400), rng.integers(0, k, 400), strict=True):
        unit, group, in_group = found[expert, row // 8, i // 128], i % 128 // 32, i % 32
        high, in_half = divmod(int(in_group), 16)
        lane, place = row % 8 * 4 + in_half // 4, in_half % 4
        at = 256 * (group // 2) + 8 * lane + 4 * (group % 2)
        word = int.from_bytes(bytes(unit[at : at + 4]), "little")
        code = word >> 16 * high + 4 * place & 7 | (word >> 8 * place + (3 if high else 7) & 1) << 3
        assert code == b[expert, row, i // 2] >> 4 * (i % 2) & 15
        of_row = [int(x) for x in unit[512 + row % 8 * 4 :][:4]]
        exponent = of_row[0] & 7 | (of_row[1] & 7) << 3 | (of_row[2] & 3) << 6
        assert exponent == b_scale[expert, row].max()
        assert exponent - (of_row[group] >> 3) == b_scale[expert, row, i // 32]


@pytest.mark.parametrize("k", [32, 128, 288])
def test_restored_weights_are_those_that_were_prepared(k: int, rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (3, 40, k), 100, 119)
    found = cukern.prepare_weights(b, b_scale, a_dtype=FP8)
    for got, want in zip(cukern.restore_weights(found, k), (b, b_scale), strict=True):
        same_bits(got, want)
    wide, _ = cukern.restore_weights(found)
    same_bits(wide[:, :, : k // 2], b)
    assert wide.shape[2] == -(-k // 128) * 64 and not wide[:, :, k // 2 :].any()
    pair = np.full_like(b, 7), np.full_like(b_scale, 7)
    assert cukern.restore_weights(found, k, out=pair)[1] is pair[1]
    same_bits(pair[1], b_scale)


def test_a_scale_far_below_its_rows_largest_is_19_below_it(rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (1, 8, 1024))
    b_scale[0] = np.arange(100, 132)
    again = cukern.restore_weights(cukern.prepare_weights(b, b_scale, a_dtype=FP8))
    same_bits(again[0], b)
    same_bits(again[1], np.maximum(b_scale, 131 - 19))


@pytest.mark.parametrize("difference", [0, 1, 11, 12, 14, 15, 16, 17, 18, 19, 40])
def test_each_number_at_each_distance(difference: int) -> None:
    """A number is the nearest e4m3 number times a power of two of its row: exact up to a distance of 14."""
    codes = np.arange(16, dtype=np.uint8).repeat(2).reshape(-1)  # 32 numbers
    b = np.zeros((1, 8, 32), np.uint8)
    b[0, :, :16] = codes[::2] | codes[1::2] << 4
    b_scale = np.zeros((1, 8, 2), np.uint8)
    b_scale[..., 0], b_scale[..., 1] = 127 - difference, 127
    found = twin.folded_values(cukern.prepare_weights(b, b_scale, a_dtype=FP8)[0], 64)
    exact = dequantize_mxfp4(b, b_scale, "float32")[0].astype(np.float64)
    want = (exact * 64).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) / 64
    np.testing.assert_array_equal(found, want)
    assert (found == exact).all() == (difference <= 14)
    assert np.abs(found - exact).max() <= 2.0**-16
    if difference >= 19:
        assert not found.any()


def test_a_row_of_nan_and_one_of_tiny_numbers(rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (1, 8, 64))
    b_scale[0, 0, 1], b_scale[0, 1], b_scale[0, 2], b_scale[0, 3] = 255, 6, 7, 250
    found = twin.folded_values(cukern.prepare_weights(b, b_scale, a_dtype=FP8)[0], 64)
    assert np.isnan(found[0]).all() and not found[1].any()
    exact = dequantize_mxfp4(b, b_scale, "float32")[0].astype(np.float64)
    np.testing.assert_array_equal(found[2:], exact[2:])


def test_the_product_is_off_from_that_of_16_bits_by_what_is_told(rng: np.random.Generator) -> None:
    """The docstring of `moe_gemm` tells the error."""
    m, n, k = 128, 128, 4096
    rows, weights = (rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for shape in ((m, k), (1, n, k)))
    b, b_scale = quantize_mxfp4(weights)
    blocks = rows.astype(np.float32).reshape(m, -1, 128)
    scale = (np.abs(blocks).max(-1) / 448).astype(np.float32)
    a = (blocks / scale[..., None]).astype(E4M3).reshape(m, k)
    offsets = np.array([0, m], np.int32)
    got = cukern.moe_gemm(a, cukern.prepare_weights(b, b_scale, a_dtype=FP8), offsets, a_scale=scale).astype(np.float64)
    of_16_bits = cukern.moe_gemm(rows, b, offsets, b_scale=b_scale).astype(np.float64)
    exact = rows.astype(np.float64) @ weights[0].astype(np.float64).T

    def error(found: Any, want: Any) -> float:
        return float(np.sqrt(((found - want) ** 2).mean() / (want**2).mean()))

    assert error(got, of_16_bits) == pytest.approx(0.026, abs=0.001)
    assert error(got, exact) == pytest.approx(0.117, abs=0.004)
    assert error(of_16_bits, exact) == pytest.approx(0.114, abs=0.004)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_dtype": "float16"},
        {"activation": "silu"},
        {"max_tokens": 9},
        {"max_tokens": 9, "activation": "gelu"},
        {"biased": True},
        {"activation": "swigluoai", "interleaved": True, "biased": True},
    ],
    ids=str,
)
def test_the_twin_is_the_formula(options: dict[str, Any], rng: np.random.Generator) -> None:
    x, is_row = made(rng, [5, 0, 9], 48, 160, whole=False, **options)
    got = run(x)
    b, b_scale = cukern.restore_weights(x["b"], 160)
    weights = dequantize_mxfp4(b, b_scale, "float32").astype(np.float64)
    rows = x["a"].astype(np.float64) * np.repeat(x["a_scale"], 128, -1)[..., :160]
    experts = (
        np.broadcast_to(np.arange(3)[:, None], is_row.shape) if is_row.ndim == 2 else np.repeat(range(3), [5, 0, 9])
    )
    if is_row.ndim == 2:
        experts = experts[is_row]
    sums = np.einsum("rk,rnk->rn", rows[is_row], weights[experts])
    if "bias" in x:
        sums += x["bias"][experts]
    if activation := options.get("activation"):
        from cukern.reference.moe_activation import activate

        halves = (sums[:, ::2], sums[:, 1::2]) if "interleaved" in x else np.split(sums, 2, axis=1)
        sums = activate(activation, *(half.astype(np.float32) for half in halves))
    same_bits(got[is_row], sums.astype(np.float32).astype(got.dtype))
    assert got.dtype == (np.float16 if "out_dtype" in options else ml_dtypes.bfloat16)
    tensors = {name: as_torch(v) if isinstance(v, np.ndarray) else v for name, v in x.items()}
    same_bits(to_numpy(run(tensors))[is_row], got[is_row])


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.uint8)


def test_a_call_that_does_not_fit_is_named(rng: np.random.Generator) -> None:
    x, _ = made(rng, [3, 1], 16, 160)
    ones = np.ones(2, np.float32)
    for changes, error, message in (
        ({"a_scale": None}, TypeError, "a_scale must be an array with FP8, got None"),
        ({"a_scale": ones[:1]}, ValueError, "a_scale must be of shape [tokens, ceil(k / 128)], with MXFP4 weights"),
        ({"a_scale": x["a_scale"].astype(np.float64)}, TypeError, "a_scale must be float32, got float64"),
        ({"b_scale": ones}, ValueError, "b_scale must be None with prepared weights"),
        ({"b_global_scale": ones}, ValueError, "b_global_scale must be None with MXFP4"),
        ({"row_token": np.zeros(3, np.int32)}, ValueError, "row_token must be None with FP8 rows and MXFP4 weights"),
        ({"b": zeros(2, 2, 3, 272)}, ValueError, "as prepare_weights makes it with a_dtype='float8_e4m3fn', got [2,"),
        ({"b": x["b"][:, :, :1].copy()}, ValueError, "b must be of shape [experts, n / 8, ceil(k / 128), bytes]"),
        ({"a": np.zeros((7, 160), ml_dtypes.bfloat16), "a_scale": None}, ValueError, "b must be of shape [experts, n"),
    ):  # fmt: skip
        with pytest.raises(error, match=re.escape(message)):
            run(x, **changes)


def test_what_cannot_be_prepared_is_named() -> None:
    b = zeros(2, 8, 64)
    with pytest.raises(ValueError, match=r"a_dtype must be one of 'float8_e4m3fn', got 'float8_e5m2'"):
        cukern.prepare_weights(b, zeros(2, 8, 4), a_dtype="float8_e5m2")
    with pytest.raises(
        ValueError, match=r"b_scale must be of shape \[experts, n, k / 32\] = \[2, 8, 4\] \(MXFP4\) with"
    ):
        cukern.prepare_weights(b, zeros(2, 8, 8), a_dtype=FP8)
    with pytest.raises(ValueError, match=r"k must be 416 or 448 or 480 or 512, for 4 units of 128, got 384"):
        cukern.restore_weights(zeros(2, 3, 4, 544), 384)


@pytest.mark.parametrize("side", [0, 1])
def test_lanes_have_a_gate_and_its_up(side: int, rng: np.random.Generator) -> None:
    """The places that gemm_folded_wgmma computes with interleaved gates, of a lane's words in 16 rows."""
    b, b_scale = random_weights(rng, (1, 16, 128), 110, 118)
    flat = cukern.prepare_weights(b, b_scale, a_dtype=FP8).reshape(-1)
    for lane in range(32):
        row, unit = lane // 4 * 2 % 8, lane // 16 * 544
        weight = [lane // 4 * 2 + side] * 8
        want = cukern.prepare_weights(b[:, weight], b_scale[:, weight], a_dtype=FP8)[0, 0, 0]
        for half in range(2):
            at = unit + row * 32 + lane % 4 * 8 + side * 32 + half * 256
            same_bits(flat[at : at + 8], want[half * 256 + lane % 4 * 8 :][:8])
        at = unit + 512 + row * 4 + side * 4
        same_bits(flat[at : at + 4], want[512:516])


# --- layers ---------------------------------------------------------------------------------------------


def layer(rng: np.random.Generator, tokens: int) -> tuple[Any, ...]:
    """The arguments of `fused_experts`, and the weights as they were: 3 experts of 128 x 256, top 2."""
    x = (rng.standard_normal((tokens, 256)) / 8).astype(ml_dtypes.bfloat16)
    pairs = [quantize_mxfp4(rng.standard_normal(shape, np.float32) / 16) for shape in ((3, 256, 256), (3, 256, 128))]
    w1, w2 = (cukern.prepare_weights(b, scale, a_dtype=FP8) for b, scale in pairs)
    ids = np.argsort(rng.random((tokens, 3)), 1)[:, :2].astype(np.int32)
    factors = rng.random((tokens, 2)).astype(np.float32)
    return (x, w1, w2, factors, ids), (x, pairs[0][0], pairs[1][0], factors, ids), (pairs[0][1], pairs[1][1])


def test_a_layer_takes_them(rng: np.random.Generator) -> None:
    given, plain, scales = layer(rng, 7)
    got = cukern.fused_experts(*given, quant="mxfp4_fp8")
    want = cukern.fused_experts(*plain, quant="mxfp4", w1_scale=scales[0], w2_scale=scales[1]).astype(np.float64)
    error = got.astype(np.float64) - want
    assert 0 < np.sqrt((error**2).mean()) <= 0.06 * np.sqrt((want**2).mean())
    for form in ({"activation": "swigluoai", "interleaved": True}, {"activation": "gelu"}):
        biases = {f"w{i}_bias": rng.standard_normal((3, 256), np.float32) / 8 for i in (1, 2)}
        mine = cukern.fused_experts(*given, quant="mxfp4_fp8", **biases, **form).astype(np.float64)
        want = cukern.fused_experts(*plain, quant="mxfp4", w1_scale=scales[0], w2_scale=scales[1], **biases, **form)
        error = mine - want.astype(np.float64)
        assert 0 < np.sqrt((error**2).mean()) <= 0.06 * np.sqrt((want.astype(np.float64) ** 2).mean())
    config = FusedMoEQuantConfig.mxfp4_fp8()
    assert config.is_prepared and config.is_in_groups and config.name == "mxfp4_fp8"
    same_bits(cukern.fused_experts(*given, quant=config), got)
    with pytest.raises(ValueError, match=r"w1_scale must be the scales of w1, which is not prepared, got None"):
        cukern.fused_experts(*plain, quant=config)
    with pytest.raises(ValueError, match=r"w1 must be of shape \[experts, n / 8, ceil\(k / 128\), bytes\]"):
        cukern.fused_experts(given[0], cukern.prepare_weights(plain[1], scales[0]), *given[2:], quant=config)
    with pytest.raises(ValueError, match="w1_scale must be None with mxfp4_fp8"):
        cukern.fused_experts(*given, quant="mxfp4_fp8", w1_scale=scales[0], w2_scale=scales[1])


# --- the launch -----------------------------------------------------------------------------------------


def shaped_folded(rows: int, **changes: Any) -> dict[str, Any]:
    """A call as `shaped` makes it, with weights prepared for FP8 rows."""
    x = shaped(rows, weights="fp8 block", **changes)
    experts, n, k = x["b"].shape
    x["b"] = unreal(experts, n // 8, -(-k // 128), 544, dtype="uint8")
    del x["b_scale"]
    return x


@pytest.mark.parametrize("how", ["rows", "batched"])
def test_every_form_fits_a_multiprocessor(how: str) -> None:
    seen = set()
    for hint in (8, 16, 32, 128, 1000) if how == "batched" else HINTS:
        found = planned(shaped_folded(800, how=how, expected_m=hint))
        assert found is not None and found.function == "gemm_folded_wgmma"
        arguments = found.step.variant.instance.arguments
        form = folded.FoldedWgmma(arguments[2], *arguments[4:6], arguments[6] == "true")
        seen.add(form)
        assert arguments[3] == form.stages >= 4
        assert found.step.shared_bytes == form.shared_bytes
        # 228 KiB of a multiprocessor, of which each block's system takes 1.
        assert form.blocks * (found.step.shared_bytes + 1024) <= 228 * 1024
    assert seen == set(folded.FOLDED_FORMS)


@pytest.mark.parametrize(("mean", "tokens"), [(3, 8), (8, 16), (20, 32), (33, 128), (128, 128), (129, 256)])
def test_the_form_by_the_mean(mean: int, tokens: int) -> None:
    found = planned(shaped_folded(32 * mean, experts=32))
    assert found is not None and found.step.variant.instance.arguments[2] == tokens


def test_the_maps_of_folded_weights() -> None:
    def maps_of(x: dict[str, Any]) -> list[Any]:
        found = planned(x)
        assert found is not None
        return found.maps

    line = 56 * 544
    b_map, a_map = maps_of(shaped_folded(8192))
    wanted = (56 * 68, 512, 8, 1), (line, line * 512, line * 512 * 8), (68, 16, 1, 1)
    assert b_map == ("uint64", *wanted, 256, False)
    assert a_map == ("uint8", (7168, 8192, 1, 1), (7168, 7168 * 8192, 7168 * 8192), (128, 32, 1, 1), 256, True)
    gated, _ = maps_of(shaped_folded(8192, activation="silu"))
    assert gated == ("uint64", (56 * 68, 2, 256, 8), (line * 256, line, line * 512), (68, 2, 8, 1), 256, False)


def test_other_gpus_and_variants_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"b must be weights of 8 bits, got MXFP4 prepared for FP8 rows: .* sm_100a"):
        planned(shaped_folded(800), on="100a")
    for variant in ("mma", "stream"):
        with pytest.raises(ValueError, match=rf"prepared for FP8 rows: variant '{variant}' takes others"):
            planned(shaped_folded(800), variant)
    assert planned(shaped_folded(800), "wgmma") is not None


PAIRS = kernels.epilogue(activations.number("swigluoai"), is_gated=True, interleaved=True, biased=True)


@pytest.mark.rare
@pytest.mark.parametrize("activation", [0, 1, PAIRS])
def test_products_overlap_and_nothing_spills(activation: int) -> None:
    """The compiler says where it lets each product wait for the one before."""
    if compiler.available():
        pytest.skip("NVRTC cannot be used")
    for form in folded.FOLDED_FORMS:
        path, _ = compiler.cubin(form.variant("bfloat16", activation).instance, "90a")
        note = compiler.read_note(path)
        assert note is not None and "wgmma.mma_async instructions are serialized" not in note["log"]
        assert resources(note).spill_bytes == 0


# --- the kernels ----------------------------------------------------------------------------------------


def only_hopper() -> None:
    if arch_of_device(0) != "90a":
        pytest.skip("prepared weights are for sm_90a")


def compare(x: dict[str, Any], is_row: Any, whole: bool = True) -> None:
    """Compare every form with the twin, in the rows that are written; bit by bit where sums are exact."""
    want = run(x)
    given = {name: on_gpu(v) if isinstance(v, np.ndarray) else v for name, v in x.items()}
    for hint in HINTS:
        out = on_gpu(np.full(want.shape, NAN, want.dtype))
        assert run(given, expected_m=hint, out=out) is out
        got = to_numpy(out)
        assert np.isnan(got[~is_row].astype(np.float32)).all()
        # Only rows that are written are copied to the host.
        of_its_own = run(given, expected_m=hint).view(np.uint16)[on_gpu(is_row)]
        same_bits(to_numpy(of_its_own), got[is_row].view(np.uint16))
        if whole and "activation" not in x:
            same_bits(got[is_row], want[is_row])
        elif is_row.any():
            mine, other = got[is_row].astype(np.float64), want[is_row].astype(np.float64)
            assert (np.abs(mine - other) <= 0.012 * np.abs(other) + 1e-3 * np.abs(other).max()).all()


#: Calls by their reason: counts, n, k, and other arguments of `made`.
KERNEL_CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    "tile edges": (EDGES, 264, 160, {}),
    "long tile edges": (LONG, 264, 96, {}),
    "tile edges, silu": (EDGES, 272, 224, {"activation": "silu"}),
    "float16": (LONG[:4], 136, 160, {"out_dtype": "float16"}),
    "the least": ([1], 8, 32, {"spare": 0}),
    "n of a tile, k of a stage": ([9, 70], 128, 128, {}),
    "n and k of several tiles": ([9, 300], 520, 1056, {}),
    "a row each": ([1] * 130, 72, 288, {}),
    "some of many experts": ([0] * 200 + [2, 0, 1] + [0] * 400 + [9, 70] + [0] * 31 + [1], 40, 64, {}),
    "many tiles": ([700] * 9, 520, 64, {}),
    "no row": ([0, 0], 64, 64, {}),
    "batched": (EDGES, 264, 224, {"max_tokens": 150}),
    "batched, silu": (EDGES, 272, 224, {"activation": "silu", "max_tokens": 150}),
    "bias": (LONG, 264, 96, {"biased": True}),
    "bias, silu": (EDGES, 272, 224, {"biased": True, "activation": "silu"}),
    "pairs, bias": (LONG, 272, 288, {"biased": True, "interleaved": True, "activation": "swigluoai"}),
    "pairs, alpha and limit": (EDGES, 272, 96, {"interleaved": True, "activation": "swigluoai", "limit": 0.5}),
    "no gate": (EDGES, 136, 224, {"activation": "relu2_no_mul"}),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "n", "k", "changes"), KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_every_form_of_the_kernel(
    counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator
) -> None:
    only_hopper()
    compare(*made(rng, counts, n, k, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_sums_of_any_numbers_are_the_same_at_every_run(out_dtype: str, rng: np.random.Generator) -> None:
    only_hopper()
    compare(*made(rng, [5, 0, 130, 1, 300], 144, 1024, whole=False, out_dtype=out_dtype), whole=False)


@pytest.mark.gpu
def test_scales_of_any_distance(rng: np.random.Generator) -> None:
    only_hopper()
    x, is_row = made(rng, [20, 3], 16, 1024)
    b, b_scale = random_weights(rng, (2, 16, 1024))
    # Row 0 is NaN, row 1 is 0. The others have one distance each, of numbers that are not exact from 15 on.
    b_scale[:] = 127
    b_scale[:, 0, 3], b_scale[:, 1] = 255, 6
    for row in range(2, 16):
        b_scale[:, row, 1:] = 127 - (row + 6)
    b[:, 2:, :16] = 0
    x["b"] = cukern.prepare_weights(b, b_scale, a_dtype=FP8)
    want = run(x)[is_row]
    given = {name: on_gpu(v) if isinstance(v, np.ndarray) else v for name, v in x.items()}
    for hint in HINTS:
        got = to_numpy(run(given, expected_m=hint))[is_row]
        assert np.isnan(got[:, 0].astype(np.float32)).all() and not got[:, 1].any()
        same_bits(got[:, 2:], want[:, 2:])


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    "shape",
    [{}, {"max_tokens": 40}, {"activation": "silu"}, {"activation": "swigluoai", "interleaved": True, "biased": True}],
    ids=str,
)
def test_each_form_stays_inside_its_arrays(shape: dict[str, Any], rng: np.random.Generator) -> None:
    only_hopper()
    compare(*made(rng, [19, 0, 33], 80, 160, spare=0, **shape))


@pytest.mark.gpu
@pytest.mark.sanitize
def test_the_kernels_that_prepare_and_restore(rng: np.random.Generator) -> None:
    for experts, n, k in ((3, 40, 288), (1, 8, 32), (2, 256, 2880)):
        b, b_scale = random_weights(rng, (experts, n, k), 0, 255)
        want = cukern.prepare_weights(b, b_scale, a_dtype=FP8)
        found = cukern.prepare_weights(on_gpu(b), on_gpu(b_scale), a_dtype=FP8)
        same_bits(to_numpy(found), want)
        for got, back in zip(cukern.restore_weights(found, k), cukern.restore_weights(want, k), strict=True):
            same_bits(to_numpy(got), back)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_a_layer_on_the_gpu(tokens: int, rng: np.random.Generator) -> None:
    only_hopper()
    given, _, _ = layer(rng, tokens)
    want = cukern.fused_experts(*given, quant="mxfp4_fp8").astype(np.float32)
    got = to_numpy(cukern.fused_experts(*(on_gpu(x) for x in given), quant="mxfp4_fp8")).astype(np.float32)
    assert np.abs(got - want).max() <= 0.03 * np.abs(want).max()
