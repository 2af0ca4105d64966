"""What the shared suites know of embeddings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cukern.ops import embedding
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    COPIES,
    DTYPES,
    IN_ITS_FILE,
    Call,
    Function,
    Spec,
    drawn,
    floats,
    in_variants,
    integers,
    widths,
)

BY_BATCH = {"rows": "the batch is not the first dimension"}


def _calls() -> list[Call]:
    table, ids, positions = floats(20, 16, dtype=BF16), integers([3, 19], [0, 7]), floats(9, 16, seed=1, dtype=BF16)
    return [
        Call("embedding_lookup", (table, ids)),
        Call("embedding_lookup", (table, ids, positions, 2), {"position_ids": integers(3)}),
        Call("embedding_lookup_sine_position_encoding", (table, positions, ids[0], 4)),
    ]


def _large_calls() -> list[Call]:
    tables = floats(50, 256, dtype=torch.float16), floats(50, 256, seed=1, dtype=torch.float16)
    options = {"position_ids": integers(9, dtype=torch.int64)}
    call = Call("embedding_lookup_sine_position_encoding", (*tables, drawn(50, 8), 0), options)
    return in_variants(call, "wide", "narrow")


def _at_first_use() -> Iterator[Variant]:
    for dtype, add in itertools.product(DTYPES, (False, True)):
        for width in widths(dtype):
            yield embedding._variant(dtype, width, add)


SPEC = Spec(
    functions={
        "embedding_lookup": Function("word_ids", COPIES, exempt=IN_ITS_FILE | BY_BATCH),
        "embedding_lookup_sine_position_encoding": Function(
            "word_ids", COPIES, exempt=BY_BATCH | {"many rows": "it runs the kernel of embedding_lookup"}
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
