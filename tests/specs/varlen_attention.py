"""What the shared suites know of attention of sequences without padding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import cukern
from cukern.ops.varlen_attention import choose
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    COLUMNS,
    DTYPES,
    Call,
    Function,
    Spec,
    continued,
    floats,
    in_variants,
    integers,
    row_numbers,
)


def _calls() -> list[Call]:
    q, k, v = (floats(7, 2, 16, seed=seed) for seed in range(3))
    memory = [floats(9, 2, 32, seed=seed, dtype=BF16).clamp(-1, 1) for seed in range(2)]
    sums = integers(0, 3, 3, 7), integers(0, 5, 6, 9)
    pages = floats(3, 8, 2, 16, seed=1), floats(3, 8, 2, 16, seed=2).clamp(-1, 1)
    cache = {"block_table": integers([2, 0], [1, 1], [0, 0]), "seqused_k": integers(9, 3, 12)}
    return [
        Call("varlen_attention", (q, k, v, sums[0])),
        Call("varlen_attention", (floats(7, 4, 32, dtype=BF16), *memory, *sums), {"scale": 0.3, "causal": True}),
        Call("varlen_attention", (floats(7, 4, 16), *pages, sums[0]), {"window": (9, 1), "sinks": floats(4), **cache}),
    ]


def _large_calls() -> list[Call]:
    texts = [floats(300, 3, 64, seed=i, dtype=torch.float16).clamp(-1, 1) for i in range(3)]
    call = Call("varlen_attention", (*texts, integers(0, 130, 130, 290)))
    memories = [floats(3000, 1, 64, seed=i) for i in range(2)]
    sums = integers(0, 70, 200), integers(0, 100, 3000)
    return [
        call,
        *in_variants(call, "mma", "fma"),
        Call("varlen_attention", (floats(200, 1, 64), *memories, *sums), {"causal": True}),
    ]


def _at_first_use() -> Iterator[Variant]:
    for dtype, dim, wide in itertools.product(DTYPES, choose.DIMS, (False, True)):
        yield choose.by_fma(dtype, dim, wide).variant


SPEC = Spec(
    functions={
        "varlen_attention": Function(
            "q k v cu_seqlens_q cu_seqlens_k block_table seqused_k",
            tolerance=("varlen_attention.out", "varlen_attention.lse"),
            many_rows=[
                lambda x: cukern.varlen_attention(*[x.reshape(-1, 64, COLUMNS // 64)] * 3, row_numbers(x).reshape(-1)),
                lambda x: cukern.varlen_attention(
                    *[x.reshape(-1, 64, COLUMNS // 64)] * 3,
                    row_numbers(x).reshape(-1),
                    variant="mma" if torch.is_tensor(x) else "auto",
                ),
                lambda x: cukern.varlen_attention(
                    *[x.reshape(-1, 64, COLUMNS // 64)] * 3,
                    row_numbers(x).reshape(-1),
                    variant="fma" if torch.is_tensor(x) else "auto",
                ),
            ],
            exempt={"rows": "places are of the whole batch"},
            grown={"cu_seqlens_q": continued, "cu_seqlens_k": continued},
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
