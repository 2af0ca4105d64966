"""Prepared weights of 4 bits: their layout, products with them against those with weights as they are."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cukern
import cukern.runtime.compile as compiler
from cukern.commands import resources
from cukern.formats.fused_moe import FusedMoEQuantConfig
from cukern.formats.weights import rows_of_weights
from cukern.ops.moe_gemm import kernels
from cukern.reference.moe_gemm import values_of_b
from cukern.runtime import arrays
from cukern.runtime.activation import is_gated
from cukern.runtime.kernel import arch_of_device
from tests.buffers import on_gpu, same_bits, to_numpy
from tests.test_moe_gemm import (
    ACTIVATED_CASES,
    CASES,
    E4M3,
    EDGES,
    LONG,
    Case,
    as_torch,
    compare,
    launch,
    made,
    planned,
    shaped,
    there,
    unreal,
)

FORMATS = ("mxfp4", "nvfp4")
GROUPS = {"mxfp4": 32, "nvfp4": 16}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: Rows of a group, as a hint, by each of which another form is taken.
HINTS = (1, 8, 16, 40, 60, 100, 1000)


def random_weights(rng: np.random.Generator, shape: tuple[int, int, int], weights: str) -> tuple[Any, Any]:
    """Weights [experts, n, k] and their scales as bytes, of the usual range, none of them 0 or negative."""
    experts, n, k = shape
    low, high = {"mxfp4": (100, 140), "nvfp4": (1, 127)}[weights]
    b_scale = rng.integers(low, high, (experts, n, k // GROUPS[weights])).astype(np.uint8)
    return rng.integers(0, 256, (experts, n, k // 2)).astype(np.uint8), b_scale


class PreparedCase(Case):
    """A call with prepared weights, whose second dimension is not that of the result."""

    @property
    def out_shape(self) -> tuple[int, ...]:
        rows = rows_of_weights(self.arguments["b"])
        return (*self.rows.shape, rows // (2 if is_gated(self.arguments.get("activation")) else 1))


def prepared(x: Case) -> PreparedCase:
    """The case with prepared weights."""
    given = dict(x.arguments)
    given["b"] = cukern.prepare_weights(given["b"], given.pop("b_scale"))
    return PreparedCase(given, x.rows)


# --- the layout -----------------------------------------------------------------------------------------


def number_at(prepared: Any, weights: str, expert: int, row: int, i: int) -> float:
    """Number i of a row of weights without its global scale, as the documentation of the layout says."""
    group = GROUPS[weights]
    unit = prepared[expert, row // 8, i // 64]
    in_unit, of_row = i % 64, row % 8
    half, in_half = divmod(in_unit, 32)
    step, in_step = divmod(in_half, 16)
    second, in_eight = divmod(in_step, 8)
    lane, high = of_row * 4 + in_eight // 2, in_eight % 2
    at = lane * 8 + half * 4
    word, pair = int.from_bytes(bytes(unit[at : at + 4]), "little"), step * 2 + second
    # The bits of a number: its lowest, the next two, and its sign.
    bits = {
        (0, 0): (0, 1, 2, 9), (0, 1): (16, 17, 18, 25), (1, 0): (4, 5, 6, 13), (1, 1): (20, 21, 22, 29),
        (2, 0): (26, 27, 28, 3), (2, 1): (10, 11, 12, 19), (3, 0): (30, 7, 8, 15), (3, 1): (14, 23, 24, 31),
    }[pair, high]  # fmt: skip
    code = sum((word >> bit & 1) << place for place, bit in enumerate(bits))
    scale = int(unit[256 + of_row * (64 // group) + in_unit // group])
    factor = 2.0 ** (scale - 127) if group == 32 else (1 + scale % 8 / 8) * 2.0 ** (scale // 8 - 16)
    return E2M1[code & 7] * (-1 if code & 8 else 1) * factor


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("k", [32, 160])
def test_the_layout_is_the_documented_one(weights: str, k: int, rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (2, 24, k), weights)
    found = cukern.prepare_weights(b, b_scale)
    assert found.shape == (2, 3, -(-k // 64), {"mxfp4": 272, "nvfp4": 288}[weights]) and found.dtype == np.uint8
    want = [values_of_b(b[e], b_scale[e], np.float32(1), k) for e in range(2)]
    for expert, row, i in zip(rng.integers(0, 2, 400), rng.integers(0, 24, 400), rng.integers(0, k, 400), strict=True):
        assert number_at(found, weights, expert, row, i) == want[expert][row, i]
    if k % 64:
        assert not (found[:, :, -1, :256].reshape(2, 3, 32, 2, 4)[:, :, :, 1]).any()


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("k", [32, 64, 288])
def test_restored_weights_are_those_that_were_prepared(weights: str, k: int, rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (3, 40, k), weights)
    found = cukern.prepare_weights(b, b_scale)
    for got, want in zip(cukern.restore_weights(found, k), (b, b_scale), strict=True):
        same_bits(got, want)
    wide, _ = cukern.restore_weights(found)
    same_bits(wide[:, :, : k // 2], b)
    assert wide.shape[2] == -(-k // 64) * 32 and not wide[:, :, k // 2 :].any()
    pair = np.full_like(b, 7), np.full_like(b_scale, 7)
    returned = cukern.restore_weights(found, k, out=pair)
    assert returned[0] is pair[0] and returned[1] is pair[1]
    same_bits(pair[1], b_scale)


def test_each_scale_keeps_its_value(rng: np.random.Generator) -> None:
    every = np.arange(256, dtype=np.uint8)
    b = rng.integers(0, 256, (1, 8, 256 * 16 // 2)).astype(np.uint8)
    of_e4m3 = np.where(every & 127 == 127, 8, every).astype(np.uint8)  # without NaN
    b_scale = np.broadcast_to(of_e4m3, (1, 8, 256)).copy()
    again = cukern.restore_weights(cukern.prepare_weights(b, b_scale))
    before = values_of_b(b[0], b_scale[0], np.float32(1), 4096)
    np.testing.assert_array_equal(values_of_b(again[0][0], again[1][0], np.float32(1), 4096), before)
    assert not (again[1] & 128).any()
    b_scale = np.broadcast_to(every, (1, 8, 256)).copy()
    wide = rng.integers(0, 256, (1, 8, 256 * 32 // 2)).astype(np.uint8)
    same_bits(cukern.restore_weights(cukern.prepare_weights(wide, b_scale))[1], np.minimum(b_scale, 161))


@pytest.mark.parametrize("weights", FORMATS)
def test_tensors_and_their_dtypes(weights: str, rng: np.random.Generator) -> None:
    b, b_scale = random_weights(rng, (2, 16, 96), weights)
    want = cukern.prepare_weights(b, b_scale)
    kind = E4M3 if weights == "nvfp4" else ml_dtypes.float8_e8m0fnu
    same_bits(cukern.prepare_weights(b, b_scale.view(kind)), want)
    out = torch.zeros(want.shape, dtype=torch.uint8)
    assert cukern.prepare_weights(as_torch(b), as_torch(b_scale), out=out) is out
    same_bits(to_numpy(out), want)
    same_bits(to_numpy(cukern.restore_weights(out, 96)[1]), b_scale)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((zeros(2, 8, 16), zeros(2, 8, 3)), ValueError, "b_scale must be of shape [experts, n, k / 32] = [2, 8, 1]"),
        (
            (zeros(2, 8, 16), np.zeros((2, 8, 1), E4M3)),
            TypeError,
            "b_scale must be float8_e8m0fnu or uint8, got float8",
        ),
        ((zeros(2, 12, 16), zeros(2, 12, 1)), ValueError, "b must be of n that is a positive multiple of 8, got 12"),
        ((zeros(2, 8, 8), zeros(2, 8, 1)), ValueError, "b must be of k that is a positive multiple of 32, got 16"),
        ((zeros(8, 16), zeros(8, 1)), ValueError, "b must be"),
        ((zeros(2, 8, 16).astype(np.int8), zeros(2, 8, 1)), TypeError, "b must be uint8, got int8"),
        ((zeros(2, 16, 16)[:, ::2], zeros(2, 8, 1)), ValueError, "b must be contiguous"),
        ((zeros(2, 1, 1, 272), zeros(2, 8, 1)), ValueError, "b must be"),
    ],
)
def test_what_cannot_be_prepared_is_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cukern.prepare_weights(*arguments)


def test_what_cannot_be_restored_is_named() -> None:
    with pytest.raises(ValueError, match=r"prepared must be of 272 \(MXFP4\) or 288 \(NVFP4\) bytes .*, got 256"):
        cukern.restore_weights(zeros(2, 3, 4, 256))
    with pytest.raises(ValueError, match=r"k must be 224 or 256, for 4 units of 64, got 192"):
        cukern.restore_weights(zeros(2, 3, 4, 272), 192)


# --- products, by the twin ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "float16"}, {"tokens": 5}, {"max_tokens": 6}, {"activation": "silu"}],
    ids=str,
)
def test_the_twin_takes_them(weights: str, changes: dict[str, Any], rng: np.random.Generator) -> None:
    x = made(rng, [3, 0, 4], 48, 96, weights, **changes)
    # NaN among the scales of experts without rows is not kept, and has no part in the result.
    same_bits(prepared(x).run(), x.run())
    tensors = prepared(x).replaced(
        **{key: as_torch(v) for key, v in prepared(x).arguments.items() if arrays.is_array(v)}
    )
    same_bits(to_numpy(tensors.run()), x.run())


def test_a_call_that_does_not_fit_them_is_named(rng: np.random.Generator) -> None:
    x = made(rng, [3, 1], 16, 96, "mxfp4")
    y = prepared(x)
    for changes, error, message in (
        ({"b_scale": x.arguments["b_scale"]}, ValueError, "b_scale must be None with prepared weights"),
        ({"b": y.arguments["b"][:, :, :1].copy()}, ValueError, "b must be of shape [experts, n / 8, ceil(k / 64),"),
        ({"b": zeros(2, 2, 2, 271)}, ValueError, "as prepare_weights makes it, got [2, 2, 2, 271]"),
        ({"b_global_scale": np.ones(2, np.float32)}, ValueError, "b_global_scale must be None with MXFP4"),
        ({"b": zeros(2, 2, 2, 288)}, TypeError, "b_global_scale must be an array with NVFP4"),
        ({"b": y.arguments["b"].astype(np.int32)}, TypeError, "b must be"),
    ):  # fmt: skip
        with pytest.raises(error, match=re.escape(message)):
            y.replaced(**changes).run()
    half = y.replaced(a=np.zeros((7, 96), E4M3), a_scale=np.ones(1, np.float32), b_scale=np.ones(2, np.float32))
    with pytest.raises(ValueError, match="b must be"):
        half.run()


def layer(rng: np.random.Generator, weights: str, tokens: int = 7) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `fused_experts`: 3 experts of 64 x 96, top 2."""
    x = (rng.standard_normal((tokens, 96)) / 8).astype(ml_dtypes.bfloat16)
    pairs = [random_weights(rng, shape, weights) for shape in ((3, 128, 96), (3, 96, 64))]
    if weights == "mxfp4":
        pairs = [(b, np.full_like(scale, 124)) for b, scale in pairs]
    names = {f"w{i + 1}_scale": scale for i, (_, scale) in enumerate(pairs)}
    if weights == "nvfp4":
        names |= {f"w{i}_global_scale": np.full(3, 1e-3, np.float32) for i in (1, 2)}
    ids = np.argsort(rng.random((tokens, 3)), 1)[:, :2].astype(np.int32)
    given = x, pairs[0][0], pairs[1][0], rng.random((tokens, 2)).astype(np.float32), ids
    return given, {"quant": weights, **names}


def layer_prepared(given: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    w1, w2 = (cukern.prepare_weights(given[i], options[f"w{i}_scale"]) for i in (1, 2))
    rest = {key: value for key, value in options.items() if key not in ("w1_scale", "w2_scale")}
    return (given[0], w1, w2, *given[3:]), rest


@pytest.mark.parametrize("weights", FORMATS)
def test_a_layer_takes_them(weights: str, rng: np.random.Generator) -> None:
    given, options = layer(rng, weights)
    want = cukern.fused_experts(*given, **options)
    prepared_given, rest = layer_prepared(given, options)
    same_bits(cukern.fused_experts(*prepared_given, **rest), want)
    config = FusedMoEQuantConfig.make(rest.pop("quant"), **rest)
    assert config.is_prepared
    same_bits(cukern.fused_experts(*prepared_given, quant=config), want)
    with pytest.raises(ValueError, match=r"w1_scale must be the scales of w1, which is not prepared, got None"):
        cukern.fused_experts(*given, quant=config)
    with pytest.raises(ValueError, match=r"w2 must be of shape \[experts, n / 8, ceil\(k / 64\), bytes\]"):
        cukern.fused_experts(*prepared_given[:2], prepared_given[1], *given[3:], quant=config)
    with pytest.raises(ValueError, match=r"w1 must be"):
        cukern.fused_experts(*prepared_given, **options)


# --- the launch -----------------------------------------------------------------------------------------


def shaped_prepared(rows: int, weights: str = "mxfp4", **changes: Any) -> dict[str, Any]:
    """A call as `shaped` makes it, with prepared weights."""
    x = shaped(rows, weights=weights, **changes)
    experts, n, half = x["b"].shape
    x["b"] = unreal(experts, n // 8, -(-half // 32), {"mxfp4": 272, "nvfp4": 288}[weights], dtype="uint8")
    del x["b_scale"]
    return x


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("how", ["rows", "gathered", "batched"])
def test_every_form_fits_a_multiprocessor(weights: str, how: str) -> None:
    seen = set()
    hints = (8, 16, 32, 64, 96, 128, 1000) if how == "batched" else HINTS
    for hint in hints:
        found = planned(shaped_prepared(800, weights, how=how, expected_m=hint))
        assert found is not None and found.function == "gemm_fp4_wgmma"
        arguments = found.step.variant.instance.arguments
        form = kernels.Fp4Wgmma(*arguments[3:5], *arguments[6:11], arguments[11] == "true")
        seen.add(form)
        assert arguments[5] == form.stages(str(arguments[1])) and found.step.block[0] == form.threads
        assert found.step.shared_bytes == form.shared_bytes(arguments[1])
        assert (arguments[12] == "true") == (how == "gathered")
        if how == "gathered":
            assert form.cluster == 1 and form.tokens <= 128
    assert len(seen) == len(HINTS) - (how == "gathered")
    for form in (*kernels.FP4_FORMS, *kernels.FP4_SPLIT_FORMS):
        assert form.stages(weights.upper()) >= 3 and form.threads <= 1024
        # A box of TMA has at most 256 elements along a dimension, of weights 8 bytes each.
        assert form.units * {"mxfp4": 272, "nvfp4": 288}[weights] // 8 <= 256 and form.tokens % form.box == 0
        # 228 KiB of a multiprocessor, of which each block's system takes 1.
        assert form.blocks * (form.shared_bytes(weights.upper()) + 1024) <= 228 * 1024


def test_the_maps_of_prepared_weights() -> None:
    def maps_of(x: dict[str, Any]) -> list[Any]:
        found = planned(x)
        assert found is not None
        return found.maps

    line = 112 * 272
    b_map, a_map = maps_of(shaped_prepared(8192))
    wanted = (112 * 34, 512, 8, 1), (line, line * 512, line * 512 * 8), (34, 16, 1, 1)
    assert b_map == ("uint64", *wanted, 256, False)
    assert a_map == ("bfloat16", (7168, 8192, 1, 1), (14336, 14336 * 8192, 14336 * 8192), (64, 32, 1, 1), 256, True)
    gated, _ = maps_of(shaped_prepared(8192, activation="silu"))
    assert gated == ("uint64", (112 * 34, 2, 256, 8), (line * 256, line, line * 512), (34, 2, 8, 1), 256, False)
    few, rows = maps_of(shaped_prepared(8, "nvfp4", n=72, k=96))
    assert few == ("uint64", (72, 9, 8, 1), (576, 576 * 9, 576 * 72), (144, 16, 1, 1), 128, False)
    assert rows == ("bfloat16", (96, 8, 1, 1), (192, 192 * 8, 192 * 8), (64, 8, 1, 1), 128, True)
    # Where k is whole units, a box has those of a stage.
    _, rows = maps_of(shaped_prepared(8))
    assert rows == ("bfloat16", (64, 8, 112, 1), (14336, 128, 14336 * 8), (64, 8, 4, 1), 128, True)


def test_few_tiles_are_divided_along_k() -> None:
    def form_of(rows: int, experts: int, n: int, k: int, **changes: Any) -> tuple[int, int, int]:
        found = planned(shaped_prepared(rows, n=n, k=k, experts=experts, **changes))
        assert found is not None
        arguments = found.step.variant.instance.arguments
        assert found.step.grid[0] % (int(arguments[6]) * int(arguments[10])) == 0
        return int(arguments[3]), int(arguments[4]), int(arguments[10])  # tokens, units, parts

    dense = {m: form_of(m, 1, 8192, 8192) for m in (1, 8, 16, 17, 33, 65, 97, 129)}
    assert dense == {
        1: (8, 4, 2), 8: (8, 4, 2), 16: (16, 4, 2), 17: (32, 4, 2), 33: (64, 4, 2), 65: (96, 1, 2), 97: (128, 1, 2),
        129: (128, 1, 1),
    }  # fmt: skip
    assert form_of(100, 1, 4096, 7168) == (64, 4, 2)
    # The cases of `test_every_form_of_the_kernel` with these forms.
    assert form_of(170, 2, 2816, 320, expected_m=60) == (96, 1, 2)
    assert form_of(100, 1, 8192, 320, expected_m=100) == (128, 1, 2)
    assert form_of(64, 1, 28672, 4096) == (64, 1, 1)
    # A block has at least two stages.
    assert (form_of(1, 1, 4096, 1024)[2], form_of(1, 1, 4096, 768)[2]) == (2, 1)
    assert form_of(2, 8, 28672, 4096, expected_m=1) == form_of(2, 8, 4096, 14336, expected_m=1) == (8, 4, 2)
    assert form_of(128, 32, 5760, 2880, expected_m=1) == (8, 4, 1)
    assert form_of(8, 8, 4096, 7168, expected_m=1, how="gathered") == (8, 4, 2)


def test_other_gpus_and_variants_refuse_them() -> None:
    with pytest.raises(ValueError, match=r"b must be weights that are not prepared, got prepared ones: .* sm_100a"):
        planned(shaped_prepared(800), on="100a")
    for variant in ("mma", "stream"):
        with pytest.raises(ValueError, match=rf"got prepared ones: variant '{variant}' takes others"):
            planned(shaped_prepared(800), variant)
    assert planned(shaped_prepared(800), "wgmma") is not None


@pytest.mark.rare
@pytest.mark.parametrize("weights", ["MXFP4", "NVFP4"])
@pytest.mark.parametrize("gathers", [False, True])
def test_products_overlap_and_nothing_spills(weights: str, gathers: bool) -> None:
    """The compiler says where it lets each product wait for the one before."""
    if compiler.available():
        pytest.skip("NVRTC cannot be used")
    for form in (*kernels.FP4_FORMS, *kernels.FP4_SPLIT_FORMS):
        if gathers and form.tokens > 128:
            continue
        variant = form._replace(cluster=1 if gathers else form.cluster).variant("bfloat16", weights, 0, gathers)
        path, _ = compiler.cubin(variant.instance, "90a")
        note = compiler.read_note(path)
        assert note is not None and "wgmma.mma_async instructions are serialized" not in note["log"]
        assert resources(note).spill_bytes == 0


# --- the kernels ----------------------------------------------------------------------------------------


def only_hopper() -> None:
    if arch_of_device(0) != "90a":
        pytest.skip("prepared weights are for sm_90a")


#: Calls by their reason: counts, n, k, and other arguments of `made`.
KERNEL_CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    **{name: case for name, case in {**CASES, **ACTIVATED_CASES}.items() if case[3].get("weights") in FORMATS},
    **{
        f"{weights}, {name}": (counts, n, k, {"weights": weights, **changes})
        for weights in FORMATS
        for name, counts, n, k, changes in (
            ("long tile edges", LONG, 264, 96, {}),
            ("tile edges, silu", EDGES, 272, 224, {"activation": "silu"}),
            ("tile edges, gathered, silu", EDGES, 272, 224, {"activation": "silu", "tokens": 50}),
            ("float16", LONG[:4], 136, 160, {"dtype": "float16"}),
            ("n of a tile, k of a stage", [9, 70], 128, 256, {}),
            ("a row each", [1] * 130, 72, 288, {}),
            ("a row each, many tiles", [1] * 900, 136, 352, {}),
            ("k between two blocks", [3, 0, 70, 128, 1], 264, 1120, {}),
            ("k between two blocks, silu", [9, 70], 272, 1024, {"activation": "silu"}),
            ("k between two blocks, 96 tokens", [90, 80], 2816, 320, {}),
            ("k between two blocks, 128 tokens", [100], 8192, 320, {}),
            ("k between two blocks, gathered", [9, 0, 70, 1], 272, 1120, {"activation": "silu", "tokens": 50}),
            ("k between two blocks, many tiles", [1] * 300, 72, 1088, {}),
            ("some of many experts", [0] * 200 + [2, 0, 1] + [0] * 400 + [9, 70] + [0] * 31 + [1], 40, 64, {}),
            ("no row", [0, 0], 64, 64, {}),
            ("batched, silu", EDGES, 272, 224, {"activation": "silu", "max_tokens": 150}),
        )
    },
}


@pytest.fixture(scope="module")
def _compiled_on_all_cores(request: pytest.FixtureRequest) -> None:
    """Compile in parallel what the tests of all cases would compile one by one."""
    own = [item for item in request.session.items if item.path == request.path and item.get_closest_marker("gpu")]
    if len(own) < 20 or arch_of_device(0) != "90a":
        return
    rng, needed = np.random.default_rng(0), set()
    for counts, n, k, changes in KERNEL_CASES.values():
        x = prepared(made(rng, counts, n, k, **changes))
        for hint in HINTS if x.rows.any() else ():
            found = planned({**x.arguments, "expected_m": hint}, on="90a")
            assert found is not None
            needed.add(found.step.variant.instance)
    compiler.compile_all([(i, "90a") for i in compiler.missing(needed, "90a")])


@pytest.mark.gpu
@pytest.mark.usefixtures("_compiled_on_all_cores")
@pytest.mark.parametrize(("counts", "n", "k", "changes"), KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_every_form_of_the_kernel(
    counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator
) -> None:
    only_hopper()
    x = prepared(made(rng, counts, n, k, whole=True, **changes))
    for hint in HINTS:
        compare(x.replaced(expected_m=hint))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weights", FORMATS)
def test_sums_of_any_numbers_are_the_same_at_every_run(weights: str, dtype: str, rng: np.random.Generator) -> None:
    only_hopper()
    x = prepared(made(rng, [5, 0, 130, 1, 300], 144, 1024, weights, dtype))
    for hint in HINTS:
        hinted = x.replaced(expected_m=hint)
        compare(hinted, whole=False)
        given = there(hinted)
        same_bits(launch(given)[x.rows], launch(given)[x.rows])


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("k", "shape"),
    [(160, {}), (160, {"tokens": 5}), (160, {"max_tokens": 40}), (160, {"activation": "silu"}), (1024, {})],
    ids=str,
)
@pytest.mark.parametrize("weights", FORMATS)
def test_each_form_stays_inside_its_arrays(
    weights: str, k: int, shape: dict[str, Any], rng: np.random.Generator
) -> None:  # fmt: skip
    """Two blocks divide a k of 1024."""
    only_hopper()
    x = prepared(made(rng, [19, 0, 33], 80, k, weights, whole=True, spare=0, **shape))
    for hint in HINTS:
        compare(x.replaced(expected_m=hint))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("weights", FORMATS)
def test_the_kernels_that_prepare_and_restore(weights: str, rng: np.random.Generator) -> None:
    for experts, n, k in ((3, 40, 288), (1, 8, 32), (2, 1024, 2880)):
        b, b_scale = (rng.integers(0, 256, (experts, n, k // x)).astype(np.uint8) for x in (2, GROUPS[weights]))
        want = cukern.prepare_weights(b, b_scale)
        found = cukern.prepare_weights(on_gpu(b), on_gpu(b_scale))
        same_bits(to_numpy(found), want)
        for got, back in zip(cukern.restore_weights(found, k), cukern.restore_weights(want, k), strict=True):
            same_bits(to_numpy(got), back)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_layer_on_the_gpu(weights: str, tokens: int, rng: np.random.Generator) -> None:
    only_hopper()
    given, options = layer(rng, weights, tokens)
    want = cukern.fused_experts(*given, **options).astype(np.float32)
    moved = [on_gpu(x) for x in given], {name: on_gpu(x) for name, x in options.items()}
    prepared_given, rest = layer_prepared(tuple(moved[0]), moved[1])
    got = to_numpy(cukern.fused_experts(*prepared_given, **rest)).astype(np.float32)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
