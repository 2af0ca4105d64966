"""What the shared suites know of removal of padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cukern.ops.padding import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    COPIES,
    DTYPES,
    IN_ITS_FILE,
    SMALL,
    Call,
    Function,
    Spec,
    floats,
    in_variants,
    integers,
    widths,
)

BY_BATCH = {"rows": "places are of the whole batch"}


def _shifted(offsets: torch.Tensor, times: int) -> torch.Tensor:
    """The offsets of several batches of five words in three sequences of at most four."""
    return torch.cat([offsets + i * (3 * 4 - 5) for i in range(times)])


def _calls() -> list[Call]:
    lengths, offsets = integers(2, 0, 3), integers(0, 0, 6, 6, 6)  # words of sequences of at most 4
    return [
        Call(
            "build_sequence_length_padding_offset",
            (lengths, 4),
            exempt={"graph": "the host waits for the number of words"},
        ),
        Call("build_sequence_length_padding_offset", (lengths, 4), {"valid_word_num": 5}),
        Call("remove_sequence_length_padding", (floats(3, 4, 6), offsets)),
        Call("transpose_remove_padding", (floats(3, 2, 4, 3, dtype=BF16), offsets)),
        Call("rebuild_sequence_length_padding", (floats(5, 6), offsets, 3, 4), {"fill": 1.5}),
        Call(
            "add_qkv_bias_rebuild_padding",
            (*(floats(5, 6, seed=i) for i in range(3)), *(floats(6, seed=i) for i in range(3)), offsets, 3, 4, 2),
        ),
    ]


def _large_calls() -> list[Call]:
    words = integers(0, 20, 7, 3, 12, 9)
    positions = [s * 20 + t for s, count in enumerate(words.tolist()) for t in range(count)]
    offsets = integers(*(at - i for i, at in enumerate(positions)))
    packed, bias = floats(51, 768), floats(768, seed=1)
    calls = [
        Call("remove_sequence_length_padding", (floats(6, 20, 768), offsets)),
        Call("transpose_remove_padding", (floats(6, 12, 20, 64), offsets)),
        Call("rebuild_sequence_length_padding", (packed, offsets, 6, 20)),
        Call("add_qkv_bias_rebuild_padding", (*[packed] * 3, *[bias] * 3, offsets, 6, 20, 12)),
    ]
    return [
        Call("build_sequence_length_padding_offset", (words, 20), {"valid_word_num": 51}),
        *(each for call in calls for each in in_variants(call, "specialized", "dynamic")),
    ]


def _at_first_use() -> Iterator[Variant]:
    for name, dtype in itertools.product(op.THREADS_ITEMS, DTYPES):
        for width in widths(dtype):
            yield op.variant_of(name, dtype, width)


SPEC = Spec(
    functions={
        "add_qkv_bias_rebuild_padding": Function(
            "q k v padding_offset batch",
            COPIES,
            exempt=BY_BATCH | {"many rows": "it indexes rows as rebuild_sequence_length_padding does, which is tested"},
            grown={"padding_offset": _shifted},
        ),
        "build_sequence_length_padding_offset": Function(
            "sequence_length valid_word_num", COPIES, exempt=SMALL | BY_BATCH, parts=("_count_words", "_build_offsets")
        ),
        "rebuild_sequence_length_padding": Function(
            "src padding_offset batch", COPIES, exempt=IN_ITS_FILE | BY_BATCH, grown={"padding_offset": _shifted}
        ),
        **dict.fromkeys(
            ("remove_sequence_length_padding", "transpose_remove_padding"),
            Function("src padding_offset", COPIES, exempt=IN_ITS_FILE | BY_BATCH, grown={"padding_offset": _shifted}),
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
