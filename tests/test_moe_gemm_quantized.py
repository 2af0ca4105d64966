"""Products in FP8 by blocks in wide tiles, and those whose activation is quantized again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cukern
from cukern.ops.moe_gemm import kernels, moe_gemm_quantized
from cukern.runtime.op import forget_plans
from tests.buffers import POISON, on_gpu, same_bits, to_numpy
from tests.test_moe_gemm import E4M3, compare, made

FORMS = [
    kernels.Fp8Blocks(cluster, stages, turns) for cluster in (1, 2) for stages in (3, 4) for turns in (False, True)
]
#: Groups of no rows, of parts of 64 rows and of both blocks of a cluster; more experts than a warp looks at.
GROUPS = [([3, 0, 4], 272), ([64, 65, 1, 127, 129, 192, 193, 255, 257], 400), ([1] * 40 + [300], 144)]
PLACES = [np.asarray, pytest.param(on_gpu, marks=pytest.mark.gpu)]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that sets the forms of all calls."""

    def use(plain: kernels.Fp8Blocks | None, quantized: kernels.Fp8Blocks | None = None) -> None:
        monkeypatch.setattr(kernels, "_fp8_blocks_form", lambda *_: plain)
        if quantized:
            monkeypatch.setattr(kernels, "FP8_QUANTIZED", (quantized, quantized))
        forget_plans()

    yield use
    monkeypatch.undo()
    forget_plans()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("counts", "k"), GROUPS, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wide_tiles(form: kernels.Fp8Blocks, counts: list[int], k: int, forms: Any, rng: np.random.Generator) -> None:
    forms(form)
    for n, dtype in ((264, "bfloat16"), (1032, "float16")):
        compare(made(rng, counts, n, k, "fp8 block", dtype, whole=True))


@pytest.mark.gpu
def test_wide_tiles_give_the_bits_of_narrow_ones(forms: Any, rng: np.random.Generator) -> None:
    x = made(rng, [300, 20, 130], 520, 1040, "fp8 block")
    given = x.replaced(**{name: on_gpu(x.arguments[name].view(np.uint8)) for name in ("a", "b")})
    given = given.replaced(**{name: on_gpu(x.arguments[name]) for name in ("expert_offsets", "a_scale", "b_scale")})
    forms(None)
    want = to_numpy(given.run(variant="wgmma"))[x.rows]
    for form in FORMS:
        forms(form)
        same_bits(to_numpy(given.run(variant="wgmma"))[x.rows], want)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize(("counts", "k"), GROUPS, ids=str)
def test_a_quantized_activation_is_that_of_two_calls(
    counts: list[int], k: int, activation: str, place: Any, forms: Any, rng: np.random.Generator
) -> None:
    for n, dtype in ((256, "bfloat16"), (768, "float16")):
        x = made(rng, counts, n, k, "fp8 block", spare=2).arguments
        bytes_of = {name: place(x[name].view(np.uint8)) for name in ("a", "b")}
        given = {**bytes_of, **{name: place(x[name]) for name in ("expert_offsets", "a_scale", "b_scale")}}
        rows = sum(counts)
        forms(None)
        q, s = cukern.silu_and_mul_quant(cukern.moe_gemm(**given, out_dtype=dtype), activation)
        for form in (None,) if place is np.asarray else [x for x in FORMS if x.stages == 4]:
            forms(None, form)
            out_q = place(np.full((rows + 2, n // 2), POISON, np.uint8))
            out_s = place(np.full((rows + 2, n // 256), np.nan, np.float32))
            moe_gemm_quantized(**given, activation=activation, out_dtype=dtype, out_q=out_q, out_s=out_s)
            same_bits(to_numpy(out_q)[:rows], to_numpy(q)[:rows].view(np.uint8))
            same_bits(to_numpy(out_s)[:rows], to_numpy(s)[:rows])
            assert (to_numpy(out_q)[rows:] == POISON).all()
            assert np.isnan(to_numpy(out_s)[rows:]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": (2, 128, 128), "b_scale": (2, 1, 1), "out_q": (4, 64)}, "b must be of n that is a multiple of 256"),
        ({"out_q": (4, 256)}, r"out_q must be of shape \[rows, n / 2\]"),
        ({"out_s": (4, 2)}, r"out_s must be of shape \[rows, n / 256\]"),
        ({"b_scale": (2,), "a_scale": (4,)}, "b_scale must be by blocks"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"a": (4, 128), "b": (2, 256, 128), "a_scale": (4, 1), "b_scale": (2, 2, 1), "out_q": (4, 128)}
    shapes |= {"out_s": (4, 1), **changes}
    given = {name: np.zeros(x, "float32" if "_s" in name else E4M3) for name, x in shapes.items()}
    with pytest.raises(ValueError, match=message):
        moe_gemm_quantized(expert_offsets=np.array([0, 1, 4], np.int32), **given)
