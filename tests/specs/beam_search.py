"""What the shared suites know of beam search."""

from __future__ import annotations

import torch

import cukern
from tests.spec import COLUMNS, COPIES, SMALL, Bits, Call, Function, Spec, drawn, flags, floats, in_variants, integers

OF_A_ROW = Bits("row", "an entry of the batch", "its own beams")
BY_BATCH = {"rows": "the batch is not the first dimension"}


def _calls() -> list[Call]:
    log_probs = torch.log_softmax(floats(2, 3, 20), dim=2)
    finished = floats(2, 3, seed=5), integers([4, 4, 0], [4, 0, 0]), integers([1, 2, 0], [3, 0, 0])
    tree = integers([[1, 2], [3, 4]], [[5, 6], [7, 8]]), integers([[0, 1], [1, 0]], [[1, 0], [0, 0]])
    state = floats(2, 3), *finished, integers([0, 0, 0], [0, 0, 0]), flags(False, False)
    caches = floats(4, 6, 2, 8), floats(4, 6, 2, 8, seed=1), integers([2, 0, 0], [0, 1, 1])
    return [
        Call("beam_topk", (floats(2, 3, 200), 4), {"diversity_rate": -0.5}),
        Call("beam_search_step", (log_probs, *state, 3, 9, [2])),
        Call("beam_search_step", (log_probs, *state, integers(3), 9, [2]), late="step"),
        Call("gather_tree", (*tree, integers(2, 1), 0)),
        Call("update_kv_cache", (*caches, 4)),
        # All entries: what comes after the `step` first ones of new arrays means nothing.
        Call("update_kv_cache", (*caches, integers(4)), late="step"),
    ]


def _large_calls() -> list[Call]:
    log_probs = torch.log_softmax(floats(3, 4, 5001), dim=2)
    scores, finished_scores = floats(3, 4), floats(3, 4, seed=1)
    finished = drawn(9, 3, 4), drawn(9, 3, 4), drawn(4, 3, 4)
    caches = Call("update_kv_cache", (floats(6, 12, 4, 32), floats(6, 12, 4, 32, seed=1), drawn(4, 3, 4), 6))
    return [
        *in_variants(Call("beam_topk", (log_probs, 6)), "narrow", "wide"),
        Call("beam_topk", (log_probs, 6), {"diversity_rate": -0.5}),
        Call(
            "beam_search_step",
            (log_probs, scores, finished_scores, *finished, flags(False, True, False), 3, 9, [5]),
        ),
        Call("gather_tree", (drawn(50, 20, 3, 4), drawn(4, 20, 3, 4), None, 3)),
        *in_variants(caches, "vector", "scalar"),
    ]


SPEC = Spec(
    functions={
        "beam_search_step": Function(
            "log_probs scores finished_scores finished_lengths finished_ids finished_parents done",
            OF_A_ROW,
            tolerance="beam_search.scores",
            exempt={"many rows": "it reads log_probs as beam_topk does, which is tested"},
        ),
        "beam_topk": Function(
            "log_probs",
            OF_A_ROW,
            tolerance="beam_search.values",
            many_rows=[lambda x: cukern.beam_topk(x.reshape(-1, 4, COLUMNS), 3)],
        ),
        "gather_tree": Function("ids:1 parents:1 lengths", COPIES, exempt=SMALL | BY_BATCH),
        "update_kv_cache": Function("key_cache:1 value_cache:1 parents", COPIES, exempt=SMALL | BY_BATCH),
    },
    calls=_calls(),
    large_calls=_large_calls(),
)
