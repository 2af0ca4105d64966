"""FlashMLA's kernel for chosen tokens as the baseline of a cache of 8 bits, in sizes for the CPU."""

from __future__ import annotations

import pytest

from benchmarks import bench_mla_decode, harness
from tests.test_benchmarks import libraries  # noqa: F401

ALL_CHOSEN = "FlashMLA, all chosen"


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("length", [192, 130])
def test_all_tokens_chosen_are_all_tokens(length: int) -> None:
    sizes = bench_mla_decode.Sizes(2, 1, 64, length, cache_dtype=bench_mla_decode.FP8)
    case = bench_mla_decode.attention(sizes, compared=True)
    baseline = case.peers[ALL_CHOSEN]
    function = baseline.load()
    assert harness.agrees(case, baseline, function, "cpu")
    assert not harness.agrees(case, baseline, lambda given: lambda: function(given)().flip(0), "cpu")


def test_flash_mla_chooses_tokens_for_64_heads_and_128() -> None:
    found = {
        (case.case["heads"], case.case["topk"])
        for case in bench_mla_decode.cases()
        if ALL_CHOSEN in case.peers and case.case["cache_dtype"] == bench_mla_decode.FP8
    }
    assert found == {(64, 0), (128, 0)}
