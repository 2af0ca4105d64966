"""What the shared suites know of decoder attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cukern.ops import decoder_attention as op
from cukern.runtime.kernel import Variant
from tests.spec import BF16, DTYPES, IN_ITS_FILE, Bits, Call, Function, Spec, floats, in_variants, integers

BY_BATCH = {"rows": "a row is cut by the number of rows"}


def _calls() -> list[Call]:
    rows, bias = [floats(2, 64, seed=seed) for seed in range(3)], floats(64, seed=3)
    caches = [floats(5, 2, 2, 32, seed=seed) for seed in range(2)]
    memories = [floats(2, 7, 2, 32, seed=seed) for seed in range(2)]
    return [
        Call("masked_attention", (*rows, bias, None, bias, *caches, 3), {"scale": 0.25}),
        Call("masked_attention", (*rows, bias, None, bias, *caches, integers(3)), late="step"),
        Call("cross_attention", (rows[0], bias, *memories, integers(7, 2))),
        Call("cross_attention", (floats(4, 64), None, *memories, integers(7, 2)), {"scale": 0.3}),
    ]


def _large_calls() -> list[Call]:
    rows, caches = [floats(1, 64, seed=i) for i in range(3)], [floats(3000, 1, 1, 64, seed=i) for i in range(2)]
    whole = [floats(3, 256, seed=i, dtype=BF16) for i in range(3)]
    whole_caches = [floats(20, 3, 4, 64, seed=i, dtype=BF16) for i in range(2)]
    memories = [floats(2, 3000, 2, 64, seed=i) for i in range(2)]
    return [
        Call("masked_attention", (*rows, None, None, None, *caches, 3000)),
        *in_variants(Call("masked_attention", (*whole, None, None, None, *whole_caches, 20)), "specialized", "dynamic"),
        Call("cross_attention", (floats(2, 128), None, *memories, integers(3000, 17))),
    ]


def _at_first_use() -> Iterator[Variant]:
    for dtype, dim, wide in itertools.product(DTYPES, range(1, op.MAX_DIM + 1), (False, True)):
        yield op._choose(dtype, dim, wide, "dynamic")[0]
        yield op._combiner(dtype)
        if dtype == "bfloat16":
            yield from (op._choose(dtype, dim, wide, "dynamic", mode)[0] for mode in op.MODES[1:])


SPEC = Spec(
    functions={
        "cross_attention": Function(
            "q key_memory value_memory memory_lengths",
            Bits("batch", on="the number of parts into which a row is split, by batch and heads"),
            tolerance="decoder_attention.out",
            exempt=IN_ITS_FILE | BY_BATCH,
        ),
        "masked_attention": Function(
            "q k v key_cache:1 value_cache:1",
            Bits("batch", on="the number of parts into which a row is split, by batch and heads"),
            tolerance=("decoder_attention.out", None, None),
            exempt=IN_ITS_FILE | BY_BATCH,
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
    allowed_spills={("decoder_attention", "120a"): {"13.0": 24}},
)
