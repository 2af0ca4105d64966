"""The forms of FP8 products by warpgroups, each forced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cukern.ops.moe_gemm import fp8
from cukern.ops.moe_gemm.fp8 import Fp8Wgmma
from cukern.runtime.kernel import arch_of_device
from cukern.runtime.op import forget_plans
from tests.buffers import same_bits
from tests.test_moe_gemm import launch, made, planned, shaped, there

#: Groups around the 32 rows past a multiple of 256 that tiles of 288 rows have.
TAILS = [257, 280, 288, 289, 263, 0, 544, 545, 511, 800]
FORMS = [Fp8Wgmma(288, 2), Fp8Wgmma(288, 1), Fp8Wgmma(256, 2), Fp8Wgmma(256, 1), Fp8Wgmma(128, 2), Fp8Wgmma(128, 1)]
#: Calls by their reason: counts, n, k, and other arguments of `made`.
CASES: dict[str, tuple[list[int], int, int, dict[str, Any]]] = {
    "tails": (TAILS, 1032, 400, {}),
    "float16": (TAILS[:5], 136, 272, {"dtype": "float16"}),
    "batched": (TAILS[:3], 264, 144, {"max_tokens": 300}),
    "few rows": ([1, 33, 0, 65, 129, 193], 24, 1168, {}),
    "more tiles than blocks": ([270] * 20, 1096, 128, {}),
    "odd tiles of several windows of experts": ([20, 256, 0, 270, 300, 130] * 14, 520, 128, {}),
}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that sets the form of all products."""

    def use(form: Fp8Wgmma) -> None:
        monkeypatch.setattr(fp8, "_fp8_wgmma_form", lambda *_: (form, ""))
        forget_plans()

    yield use
    monkeypatch.undo()
    forget_plans()


@pytest.mark.parametrize(
    ("rows", "experts", "changes", "tokens"),
    [
        (32 * 256, 32, {}, 288),
        (32 * 512, 32, {}, 288),
        (32 * 768, 32, {}, 256),
        (8 * 1024, 8, {}, 256),
        (32 * 64, 32, {}, 128),
        (32 * 256, 32, {"activation": "silu"}, 256),  # gates and ups are neighbours of no tail
        (32 * 256, 32, {"weights": "fp8 row"}, 256),
    ],
)
def test_which_tiles_have_tails(rows: int, experts: int, changes: dict[str, Any], tokens: int) -> None:
    found = planned(shaped(rows, experts=experts, **{"weights": "fp8 block", **changes}), "wgmma")
    assert found is not None
    assert found.step.variant.instance.arguments[1] == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("counts", "n", "k", "changes"), CASES.values(), ids=CASES)
def test_the_forms(
    form: Fp8Wgmma, counts: list[int], n: int, k: int, changes: dict[str, Any], forced: Any, rng: np.random.Generator
) -> None:
    if arch_of_device(0) != "90a":
        pytest.skip("wgmma is Hopper's")
    x = made(rng, counts, n, k, "fp8 block", whole=True, **changes)
    forced(form)
    same_bits(launch(there(x), "wgmma")[x.rows], x.twin()[x.rows])


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_forms_stay_inside_their_arrays(form: Fp8Wgmma, forced: Any, rng: np.random.Generator) -> None:
    # Stages are filled once. Racecheck takes it for a race where a stage's scales are written again: the lanes of a
    # warp read them, __syncwarp orders the reads, and one lane arrives at the barrier for them all.
    if arch_of_device(0) != "90a":
        pytest.skip("wgmma is Hopper's")
    x = made(rng, [19, 0, 33, 290], 80, 160, "fp8 block", whole=True, spare=0)
    forced(form)
    same_bits(launch(there(x), "wgmma")[x.rows], x.twin()[x.rows])
