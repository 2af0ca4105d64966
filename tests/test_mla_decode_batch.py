"""Latent attention: what the bits of a sequence depend on, in the twin and in the kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cukern.reference import mla_decode as twin
from tests.buffers import on_gpu, same_bits, to_numpy
from tests.test_mla_decode import Array, Case, paged, there, variants_of

#: What differs from 16 heads of bfloat16 in pages of 64; "few" and "many" rows are of other kernels on an H200.
CASES: dict[str, dict[str, Any]] = {
    "few": {},
    "many": {"heads": 128},
    "float16, several tokens": {"dtype": "float16", "query_tokens": 2, "causal": True},
    "two kv heads": {"kv_heads": 2},
    "fp8": {"fp8": True},
    "fp8, many": {"fp8": True, "heads": 64},
    "other dimensions": {"head_dim": 96, "head_dim_v": 64},
}
#: The sequence that is looked at: in blocks of 64 tokens, 8, the last of them not full.
LENGTH, BLOCKS = 490, 8
BESIDE = [130, 1, 700, 0, 64]


def batch(rng: np.random.Generator, lengths: list[int], changes: dict[str, Any]) -> Case:
    return paged(rng, lengths, **{"heads": 16, **changes})


def of_sequence(x: Case, sequence: int) -> Case:
    """The case of one sequence of a batch, in the same pages."""
    own = slice(sequence, sequence + 1)
    return x._replace(
        q=x.q[own], block_table=x.block_table[own], cache_seqlens=x.cache_seqlens[own], latents=x.latents[own]
    )


def plan_of(lengths: list[int], cuts: dict[int, list[int]]) -> tuple[Array, Array]:
    """A plan in which each sequence is a part of its own, or several that begin at the blocks of `cuts` too."""
    rows, splits = [], [0]
    for sequence, length in enumerate(lengths):
        bounds = [0, *cuts.get(sequence, []), -(-length // twin.BLOCK_TOKENS)]
        parts = [*itertools.pairwise(bounds)]
        rows += [[sequence, begin, sequence, end, i, 0, 0, 0] for i, (begin, end) in enumerate(parts)]
        splits.append(splits[-1] + len(parts))
    return np.array(rows, np.int32), np.array(splits, np.int32)


def in_one_part(lengths: list[int]) -> tuple[Array, Array]:
    """A plan in which one part has all sequences."""
    last = len(lengths) - 1
    rows = [[0, 0, last, -(-lengths[last] // twin.BLOCK_TOKENS), 0, 0, 0, 0], [last + 1, *[0] * 7]]
    return np.array(rows, np.int32), np.arange(last + 2, dtype=np.int32)


def attend(x: Case, plan: tuple[Array, Array], variant: str, sequence: int) -> list[Array]:
    """Result and lse of a sequence, by a plan of the caller's."""
    given = there(x)
    return [to_numpy(array)[sequence] for array in given.run(*map(on_gpu, plan), variant=variant)]


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_sequence_of_the_twin_has_the_same_bits_in_any_batch(
    changes: dict[str, Any], rng: np.random.Generator
) -> None:
    x = batch(rng, [*BESIDE[:2], LENGTH, *BESIDE[2:]], changes)
    for ours, theirs in zip(of_sequence(x, 2).run(), x.run(), strict=True):
        same_bits(ours[0], theirs[2])


def test_the_plans_are_plans_of_the_lengths() -> None:
    lengths = [LENGTH, 0, 64]
    rows, splits = plan_of(lengths, {0: [3, 5]})
    assert rows[:, :5].tolist() == [
        [0, 0, 0, 3, 0],
        [0, 3, 0, 5, 1],
        [0, 5, 0, BLOCKS, 2],
        [1, 0, 1, 0, 0],
        [2, 0, 2, 1, 0],
    ]
    assert splits.tolist() == [0, 3, 4, 5]
    assert in_one_part(lengths)[0][:, :5].tolist() == [[0, 0, 2, 1, 0], [3, 0, 0, 0, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_sequence_that_is_not_cut_depends_on_itself_alone(changes: dict[str, Any], rng: np.random.Generator) -> None:
    for place in (0, 2, len(BESIDE)):
        lengths = [*BESIDE[:place], LENGTH, *BESIDE[place:]]
        x = batch(rng, lengths, changes)
        for variant in variants_of(x):
            alone = attend(of_sequence(x, place), plan_of([LENGTH], {}), variant, 0)
            for plan in (plan_of(lengths, {}), plan_of(lengths, {lengths.index(700): [4]}), in_one_part(lengths)):
                for ours, theirs in zip(attend(x, plan, variant, place), alone, strict=True):
                    same_bits(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_sequence_depends_on_where_it_is_cut(changes: dict[str, Any], rng: np.random.Generator) -> None:
    # Batches of as many sequences: by their number the parts of a row are added up in one order or in another.
    x = batch(rng, [*BESIDE, LENGTH], changes)
    y = x._replace(
        q=x.q[[4, 0, 5, 3, 2, 1]],
        block_table=x.block_table[[4, 0, 5, 3, 2, 1]],
        cache_seqlens=x.cache_seqlens[[4, 0, 5, 3, 2, 1]],
    )
    for variant in variants_of(x):
        found = {}
        for cuts in ((), (4,), (1, 2, 7)):
            plans = plan_of(x.cache_seqlens.tolist(), {5: [*cuts]}), plan_of(y.cache_seqlens.tolist(), {2: [*cuts]})
            found[cuts] = attend(x, plans[0], variant, 5)
            for ours, theirs in zip(attend(y, plans[1], variant, 2), found[cuts], strict=True):
                same_bits(ours, theirs)
        # The cuts do count, as far as rounding shows it.
        if x.q.shape[2] >= 64:
            assert len({tuple(array.tobytes() for array in of) for of in found.values()}) > 1
