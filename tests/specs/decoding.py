"""What the shared suites know of decoding."""

from __future__ import annotations

import cukern
from tests.spec import (
    BF16,
    COPIES,
    SHARE,
    SMALL,
    Bits,
    Call,
    Function,
    Spec,
    drawn,
    flags,
    floats,
    in_variants,
    integers,
)

OF_A_ROW = Bits("row", "a row", "the row")


def _calls() -> list[Call]:
    logits = floats(3, 50, dtype=BF16)
    output_ids = integers([4, 5, 4, 0], [1, 2, 3, 0], [6, 6, 6, 6])
    sequence_length = integers(3, 3, 4)
    words = integers([5, 4, 6, 0], [2, 3, -1, -1])  # "5 4" and "6"
    return [
        Call("decoding_init", (integers(3, 1, 2),)),
        Call("topp_init", (integers(3, 1, 2), 5)),
        Call("update_logits", (logits, floats(50, dtype=BF16), flags(False, True, False), 4)),
        Call(
            "apply_penalties",
            (logits,),
            {
                "temperature": SHARE,
                "repetition_penalty": SHARE + 1,
                "presence_penalty": SHARE,
                "frequency_penalty": SHARE,
                "output_ids": output_ids,
                "sequence_length": sequence_length,
                "min_length": integers(4, 0, 0),
                "end_id": 4,
                "bad_words": words,
            },
        ),
        Call(
            "apply_penalties",
            (logits,),
            {
                "repetition_penalty": SHARE + 1,
                "output_ids": output_ids,
                "sequence_length": sequence_length,
                "end_id": 4,
                "prompt_mask": logits > 1,
                "output_mask": logits < -1,
            },
        ),
        Call("stop_words_criterion", (output_ids, sequence_length, words, flags(False, False, False))),
        Call("update_finished", (integers(4, 4, 1), flags(False, True, False), integers(1, 2, 3), 4)),
    ]


def _large_calls() -> list[Call]:
    penalties = {
        "repetition_penalty": floats(4).abs() + 0.5, "output_ids": drawn(9000, 4, 60),
        "sequence_length": integers(60, 0, 7, 33), "min_length": integers(9, 9, 9, 9), "end_id": 5,
    }  # fmt: skip
    finished = flags(False, True, False, True)
    calls = [
        Call("apply_penalties", (floats(4, 9000, dtype=BF16),), penalties),
        Call("update_logits", (floats(4, 9000), floats(9000), finished, 5)),
    ]
    return [each for call in calls for each in in_variants(call, "wide", "narrow")]


SPEC = Spec(
    functions={
        "apply_penalties": Function(
            "logits output_ids sequence_length min_length prompt_mask output_mask",
            OF_A_ROW,
            many_rows=[lambda x: cukern.apply_penalties(x, temperature=0.7)],
        ),
        "decoding_init": Function("start_ids", OF_A_ROW, exempt=SMALL),
        "stop_words_criterion": Function("output_ids sequence_length finished", OF_A_ROW, exempt=SMALL),
        "topp_init": Function("start_ids", COPIES, exempt=SMALL | {"rows": "the seeds are counted over the batch"}),
        "update_finished": Function("word_ids finished sequence_length", OF_A_ROW, exempt=SMALL),
        "update_logits": Function("logits finished", OF_A_ROW, many_rows=[cukern.update_logits]),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    allowed_spills={("apply_penalties", "100a"): {"12.8": 16, "12.9": 16}},
)
