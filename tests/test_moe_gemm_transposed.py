"""Grouped products of weights that lie as [experts, k, n], given as views [experts, n, k]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from cukern.commands import resources
from cukern.ops.moe_gemm import kernels
from cukern.runtime import gpu
from cukern.runtime.kernel import arch_of_device
from cukern.testing import assert_matches
from tests.buffers import as_torch, on_gpu, same_bits, to_numpy
from tests.test_moe_gemm import CASES, EDGES, LONG, Case, function_for, launch, planned, shaped, there, unreal, zeros
from tests.test_moe_gemm_epilogue import GPT_OSS, finished

Array = NDArray[Any]


def turned(b: Array) -> Array:
    """The same weights, as a view of [experts, k, n]."""
    return np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)


def shaped_turned(rows: int, **changes: Any) -> dict[str, Any]:
    """A call of `shaped` whose weights lie as [experts, k, n]."""
    x = shaped(rows, **changes)
    experts, n, k = x["b"].shape
    return {**x, "b": unreal(experts, k, n, dtype=x["b"].dtype.name).swapaxes(1, 2)}


# --- the functions in host memory -----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(24, 40), (7, 5), (1, 3), (6, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_views_give_the_bits_of_copies(dtype: str, n: int, k: int, rng: np.random.Generator) -> None:
    x = finished(rng, [3, 0, 4], n, k, dtype=dtype, bias="own")
    want = x.run()
    same_bits(x.replaced(b=turned(x.arguments["b"])).run(), want)
    tensors = {name: as_torch(y) if isinstance(y, np.ndarray) else y for name, y in x.arguments.items()}
    tensors["b"] = tensors["b"].transpose(1, 2).contiguous().transpose(1, 2)
    same_bits(to_numpy(cukern.moe_gemm(**tensors)), want)


def test_layers_take_views(rng: np.random.Generator) -> None:
    x, w1, w2 = (
        torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16()
        for shape in ((9, 32), (4, 48, 32), (4, 32, 24))
    )
    ids = torch.from_numpy(rng.integers(0, 4, (9, 2)))
    weights = torch.rand(9, 2)
    want = cukern.fused_experts(x, w1, w2, weights, ids)
    first, second = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    got = cukern.fused_experts(x, first, second, weights, ids)
    assert isinstance(got, torch.Tensor) and torch.equal(got, want)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": zeros(2, 256, 32)[..., ::2].swapaxes(1, 2)},
         "b must be contiguous along its last dimension, or along the one before, got strides (8192, 2, 32)"),
        ({"b": zeros(2, 256, 16)[:, ::-1].swapaxes(1, 2)},
         "b must be contiguous along its last dimension, or along the one before, got strides (4096, 1, -16)"),
        ({"a": zeros(8, 256, dtype="float8_e4m3fn"), "b": zeros(2, 256, 16, dtype="float8_e4m3fn").swapaxes(1, 2)},
         "b must be contiguous along its last dimension, got strides (4096, 1, 16)"),
        ({"b": zeros(2, 128, 16, dtype="uint8").swapaxes(1, 2)},
         "b must be contiguous along its last dimension, got strides (2048, 1, 16)"),
    ],
)  # fmt: skip
def test_strides_that_are_refused(changes: dict[str, Any], message: str) -> None:
    given = {"a": zeros(8, 256), "expert_offsets": np.array([0, 3, 8], np.int32), **changes}
    with pytest.raises(ValueError) as found:
        cukern.moe_gemm(**given)
    assert message in str(found.value)


# --- the plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "changes", "on", "function"),
    [
        (8, {}, "90a", "gemm_wgmma"),
        (8192, {}, "90a", "gemm_wgmma"),
        (8192, {"how": "gathered"}, "90a", "gemm_wgmma"),
        (8192, {"activation": "silu"}, "90a", "gemm_wgmma"),
        (8, {}, "80", "gemm_mma"),
        (8192, {"activation": "silu"}, "120a", "gemm_mma"),
        (8192, {"n": 4092}, "90a", "gemm_fma"),
        (8192, {"k": 7164}, "90a", "gemm_fma"),
        (8192, {"dtype": "float32"}, "90a", "gemm_fma"),
    ],
)
def test_the_kernel_for_a_call(rows: int, changes: dict[str, Any], on: str, function: str) -> None:
    assert function_for(shaped_turned(rows, **changes), on=on) == function


def test_gaps_between_steps_along_k() -> None:
    x = shaped_turned(8192)
    x["b"] = unreal(8, 7168, 4160)[..., :4096].swapaxes(1, 2)
    assert [function_for(x, on=on) for on in ("90a", "80")] == ["gemm_wgmma", "gemm_fma"]
    x["b"] = unreal(8, 7168, 4100)[..., :4096].swapaxes(1, 2)
    assert function_for(x) == "gemm_fma"
    for variant, reason in (("stream", "b lies as [experts, k, n]"), ("mma", "rows of b have a stride")):
        with pytest.raises(ValueError, match="variant must be 'auto' or another here") as found:
            planned(x, variant)
        assert reason in str(found.value)


def test_the_tensor_map() -> None:
    for rows, activation, interleaved in ((8192, None, False), (64, None, False), (64, "silu", True)):
        x = {**shaped_turned(rows, activation=activation), "interleaved": interleaved}
        found = planned(x)
        assert found is not None
        b_map = found.maps[0]
        dims, strides = (4096, 7168, 8, 1), (4096 * 2, 7168 * 4096 * 2, 7168 * 4096 * 2 * 8)
        assert b_map == ("bfloat16", dims, strides, (64, 64, 1, 1), 256, True)


@pytest.mark.rare
@pytest.mark.parametrize("on", ["80", "86", "90a", "120a"])
def test_no_registers_spill(on: str) -> None:
    most = gpu.of_arch(on).shared_per_block
    forms = [form.fit("TRANSPOSED", False, most) for form in kernels.MMA_FORMS["TRANSPOSED"]]
    epilogues = 0, kernels.epilogue(1, is_gated=True), kernels.epilogue(1, is_gated=True, interleaved=True, biased=True)
    variants = [form.variant("bfloat16", "TRANSPOSED", False, x) for form in (forms[0], forms[-1]) for x in epilogues]
    if on == "90a":
        form = kernels.WGMMA_FORMS[-1]
        variants += [form.variant("bfloat16", x, gathers, True) for x in epilogues[::2] for gathers in (False, True)]
        halves = kernels._WGMMA_BY_TOKENS
        variants += [form.variant("bfloat16", epilogues[1], False, True) for form in (halves[0], halves[-1])]
    for variant in variants:
        path, _ = compiler.cubin(variant.instance, on)
        note = compiler.read_note(path)
        assert note is not None and not resources(note).spill_bytes, variant


# --- the kernels ----------------------------------------------------------------------------------------


def turned_there(x: Case) -> Case:
    """The case on the GPU, with its weights as [experts, k, n]."""
    placed = there(x)
    b = on_gpu(np.ascontiguousarray(x.arguments["b"].swapaxes(1, 2)))
    return placed.replaced(b=b.swapaxes(1, 2))


def compare_turned(x: Case) -> None:
    """Compare every variant with the twin, and with the bits that it gives for weights [experts, n, k]."""
    want, given, plain = x.twin()[x.rows], turned_there(x), there(x)
    turned_x = x.replaced(b=turned(x.arguments["b"]))
    hopper = arch_of_device(0) == "90a"
    tried = 0
    for variant in ("auto", "wgmma", "mma", "fma"):
        try:
            planned(turned_x.arguments, variant, gpu.of_device(0))
        except ValueError:
            assert variant != "fma" and (variant != "wgmma" or not hopper or x.arguments["b"].shape[1] % 16)
            continue
        tried += 1
        got = launch(given, variant)[x.rows]
        assert_matches("moe_gemm.out", got, want)
        if variant != "auto":
            same_bits(got, launch(plain, variant)[x.rows])
    assert tried >= 2


PLAIN_CASES = {
    name: case for name, case in CASES.items() if "weights" not in case[3] and case[0] != [0, 0] and "4096" not in name
}
FORMS: dict[str, tuple[Sequence[int], int, int, dict[str, Any]]] = {
    "halves": (EDGES, 528, 200, {"activation": "silu"}),
    "halves, long": (LONG, 272, 72, {"activation": "swigluoai", "bias": "own"}),
    "halves, gathered, float16": (LONG, 2576, 136, {"activation": "gelu", "tokens": 300, "dtype": "float16"}),
    "halves, batched": ([3, 0, 70, 260], 272, 288, {"activation": "silu", "max_tokens": 300}),
    "halves, the least": ([1], 16, 8, {"activation": "silu"}),
    "gpt-oss": (EDGES, 528, 200, {**GPT_OSS}),
    "gpt-oss, its sizes": ([4, 0, 130], 5760, 2880, {**GPT_OSS, "bias": "own"}),
    "gpt-oss, long": (LONG, 272, 72, {**GPT_OSS, "alpha": 1.5, "limit": 3.0}),
    "gpt-oss, gathered": (LONG, 272, 136, {**GPT_OSS, "tokens": 300}),
    "gpt-oss, batched, float16": ([3, 0, 70, 260], 144, 288, {**GPT_OSS, "max_tokens": 300, "dtype": "float16"}),
    "interleaved, the least": ([1, 2], 16, 8, {"activation": "silu", "interleaved": True, "bias": None}),
    "without a gate": ([3, 0, 70, 130], 144, 72, {"activation": "relu2_no_mul"}),
    "odd sizes": ([3, 0, 70], 511, 13, {}),
    "odd sizes, interleaved": ([3, 0, 70], 22, 511, {**GPT_OSS}),
    "odd sizes, halves": ([3, 0, 70], 22, 131, {"activation": "silu"}),
    "float32": ([3, 0, 70], 150, 72, {"activation": "silu", "dtype": "float32"}),
}

SANITIZED = "without a gate", "halves, the least", "interleaved, the least"


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "n", "k", "changes"), PLAIN_CASES.values(), ids=PLAIN_CASES)
def test_the_kernels(counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator) -> None:
    compare_turned(finished(rng, counts, n, k, bias=None, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "n", "k", "changes"),
    [pytest.param(*form, id=name, marks=[pytest.mark.sanitize] * (name in SANITIZED)) for name, form in FORMS.items()],
)
def test_the_kernels_with_an_epilogue(
    counts: list[int], n: int, k: int, changes: dict[str, Any], rng: np.random.Generator
) -> None:
    compare_turned(finished(rng, counts, n, k, **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"activation": "silu"}, GPT_OSS], ids=str)
@pytest.mark.parametrize("tokens", [None, 100])
def test_every_size_of_tiles(changes: dict[str, Any], tokens: int | None, rng: np.random.Generator) -> None:
    counts = [1, 40, 290, 0, 130, 16, 288, 257]
    x = finished(rng, counts, 272, 136, bias=None, tokens=tokens, **changes)
    for expected_m in (4, 8, 16, 30, 60, 90, 128, 1000):
        compare_turned(x.replaced(expected_m=expected_m))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [None, 100])
@pytest.mark.parametrize("changes", [{}, {"activation": "silu"}, GPT_OSS], ids=str)
def test_gaps_are_not_read(changes: dict[str, Any], tokens: int | None, rng: np.random.Generator) -> None:
    """Rows in order and gathered; without gates, with gates in halves, and interleaved with their ups."""
    x = finished(rng, [3, 0, 70, 260], 144, 72, bias=None, tokens=tokens, **changes)
    b = np.full((4, 72, 160), np.nan, x.arguments["b"].dtype)
    b[..., :144] = x.arguments["b"].swapaxes(1, 2)
    given = there(x).replaced(b=on_gpu(b)[..., :144].swapaxes(1, 2))
    for variant in ["auto", "fma"] + ["wgmma"] * (arch_of_device(0) == "90a"):
        assert_matches("moe_gemm.out", launch(given, variant)[x.rows], x.twin()[x.rows])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 300])
@pytest.mark.parametrize("interleaved", [False, True])
def test_layers(interleaved: bool, tokens: int, rng: np.random.Generator) -> None:
    x, w1, w2 = (
        torch.from_numpy(rng.standard_normal(shape, np.float32) / 8).bfloat16().cuda()
        for shape in ((tokens, 256), (8, 384, 256), (8, 256, 192))
    )
    ids = torch.from_numpy(rng.integers(0, 8, (tokens, 3))).cuda()
    options: dict[str, Any] = {"activation": "swigluoai", "interleaved": interleaved}
    weights = torch.rand(tokens, 3, device="cuda")
    want = cukern.fused_experts(x, w1, w2, weights, ids, **options)
    first, second = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    got = cukern.fused_experts(x, first, second, weights, ids, **options)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
