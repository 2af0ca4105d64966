"""What the shared suites know of sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import cukern
from cukern.ops.sampling import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    IN_ITS_FILE,
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

OF_A_ROW = Bits("row", "a row", "the row and its parameters")
SAME_KERNEL = {"many rows": "it runs the kernel of sample"}
DRAW = Bits(
    "row",
    "a row's token",
    "its row, parameters, seed and offset. With one seed for all rows its place counts, as in FlashInfer; with a seed "
    "for each row it does not",
)


def _calls() -> list[Call]:
    logits, probs = floats(3, 50, dtype=BF16), torch.softmax(floats(3, 50, seed=1), dim=1)
    random = {"seed": integers(5, 6, 7, dtype=torch.int64), "offset": integers(1, 2, 3)}
    top_k, finished = integers(5, 1, 50), {"finished": flags(False, True, False), "end_id": 4}
    chain = torch.softmax(floats(3, 2, 50), 2), integers([3, 4], [0, 9], [7, 7]), torch.softmax(floats(3, 3, 50), 2)
    return [
        Call("sampling_from_logits", (logits,), {**random, "indices": integers(2, 2, 0, dtype=torch.int64)}),
        Call("sampling_from_probs", (probs,), random),
        Call("top_k_sampling_from_probs", (probs, top_k), random),
        Call("top_p_sampling_from_probs", (probs, SHARE), random),
        Call("min_p_sampling_from_probs", (probs, integers(0, 1, 0, dtype=torch.int64)), random),
        Call("top_k_top_p_sampling_from_logits", (logits, top_k, SHARE), {"filter_apply_order": "joint", **random}),
        Call("top_k_top_p_sampling_from_probs", (probs, top_k, SHARE), random),
        Call("sample", (logits,), random),
        Call("sample", (logits,), {**random, **finished}),
        Call("sample", (logits,), {**random, "sequence_length": integers(4, 5, 6)}),
        Call(
            "sample",
            (logits,),
            {
                "temperature": SHARE,
                "top_k": top_k,
                "top_p": SHARE,
                "min_p": SHARE / 10,
                **random,
                "bias": floats(50, seed=2, dtype=BF16),
                **finished,
                "sequence_length": integers(4, 5, 6),
            },
        ),
        Call("softmax", (logits, SHARE)),
        Call("top_k_renorm_probs", (probs, top_k)),
        Call("top_p_renorm_probs", (probs, SHARE)),
        Call("top_k_mask_logits", (logits, top_k)),
        Call("chain_speculative_sampling", chain, random),
    ]


def _large_calls() -> list[Call]:
    logits, random = floats(50, 5000) * 4, {"seed": torch.arange(50), "offset": torch.arange(50)}
    top_p, top_k = torch.linspace(0.1, 1, 50), drawn(5000, 50) + 1
    step = {"top_p": top_p, **random, "finished": drawn(2, 50).bool(), "end_id": 4, "sequence_length": drawn(9, 50)}
    probs = torch.softmax(logits, 1)
    chain = torch.softmax(floats(9, 3, 500), 2), drawn(500, 9, 3), torch.softmax(floats(9, 4, 500, seed=1), 2)
    calls = [
        Call("sample", (logits,), step),
        Call("softmax", (logits,)),
        Call("top_k_sampling_from_probs", (probs, top_k), random),
        Call("top_k_renorm_probs", (probs, top_k)),
        Call("top_p_renorm_probs", (probs, top_p)),
        Call("chain_speculative_sampling", chain, {"seed": torch.arange(9)}),
    ]
    return [each for call in calls for each in in_variants(call, "auto", "block")]


def _at_first_use() -> Iterator[Variant]:
    # Each takes a second or two, so each dtype, mode and cluster appears, but not with all others.
    yield op.sampler("bfloat16", True, 1)
    yield op.sampler("float16", False, op.CLUSTER)
    yield op.best_taker("float16", 1)
    yield op.renormalizer("float16", "SOFTMAX", 1)
    yield op.renormalizer("bfloat16", "TOP_P_RENORM", 1)
    yield op.renormalizer("float32", "TOP_K_MASK", op.CLUSTER)
    yield op.renormalizer("float16", "TOP_K_RENORM", op.CLUSTER)


SPEC = Spec(
    functions={
        "chain_speculative_sampling": Function(
            "draft_probs draft_token_ids target_probs seed offset", DRAW, exempt=SMALL
        ),
        "min_p_sampling_from_probs": Function("probs min_p seed offset", DRAW, exempt=SAME_KERNEL),
        "sample": Function(
            "logits seed offset finished sequence_length top_k",
            DRAW,
            tolerance=(None, None, "sampling.logprobs"),
            exempt=IN_ITS_FILE,
        ),
        "sampling_from_logits": Function("logits seed offset indices", DRAW, exempt=SAME_KERNEL),
        **dict.fromkeys(
            ("sampling_from_probs", "top_p_sampling_from_probs"),
            Function("probs seed offset", DRAW, exempt=SAME_KERNEL),
        ),
        "softmax": Function("logits", OF_A_ROW, tolerance="sampling.probs", many_rows=[cukern.softmax]),
        "top_k_mask_logits": Function("logits top_k", OF_A_ROW, many_rows=[lambda x: cukern.top_k_mask_logits(x, 9)]),
        "top_k_renorm_probs": Function(
            "probs top_k",
            OF_A_ROW,
            tolerance="sampling.renormalized",
            many_rows=[lambda x: cukern.top_k_renorm_probs(abs(x), 9)],
        ),
        **dict.fromkeys(
            ("top_k_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
            Function("probs top_k seed offset", DRAW, exempt=SAME_KERNEL),
        ),
        "top_k_top_p_sampling_from_logits": Function("logits top_k seed offset", DRAW, exempt=SAME_KERNEL),
        "top_p_renorm_probs": Function(
            "probs",
            OF_A_ROW,
            tolerance="sampling.renormalized",
            exempt={"many rows": "it runs the kernel of top_k_renorm_probs"},
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
)
