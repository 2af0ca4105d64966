"""What the shared suites know of rotary embedding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cukern.ops import rotary_embedding as op
from cukern.runtime.kernel import Variant
from tests.spec import BF16, COPIES, DTYPES, IN_ITS_FILE, Bits, Call, Function, Spec, floats


def _fused_rotary_calls() -> list[Call]:
    name = "fused_qk_norm_rope_and_cache"
    slots = torch.tensor([7, 0, -1])
    small = floats(3, 4, 32), floats(3, 2, 32, seed=1), floats(3, 2, 32, seed=2), floats(3, 16), floats(3, 16, seed=3)
    caches = floats(2, 8, 2, 32, seed=4), floats(2, 8, 2, 32, seed=5)
    large = [floats(3, heads, 128, seed=heads, dtype=BF16) for heads in (4, 2, 2)]
    of_large = [floats(3, 128, seed=x, dtype=BF16) for x in (1, 2)]
    pages = [floats(1, 16, 2, 128, seed=x, dtype=BF16) for x in (1, 2)]
    weights = [floats(128, seed=x, dtype=BF16) for x in (1, 2)]
    return [
        Call(name, (*small, *caches, slots), {"layout": "deinterleaved"}),
        Call(name, (*large, *of_large, *pages, slots, *weights, 1e-6), {"weight_offset": 1.0}),
    ]


def _calls() -> list[Call]:
    heads = floats(3, 4, 40, dtype=BF16), floats(3, 2, 32, seed=1, dtype=BF16)
    angles = floats(3, 3, 24, seed=2), floats(3, 3, 24, seed=3)
    return [
        Call("rotary_embedding", (*heads, floats(3, 32, seed=2), floats(3, 32, seed=3))),
        Call("rotary_embedding", (floats(3, 2, 3, 24), floats(3, 1, 3, 24), *angles), {"layout": "deinterleaved"}),
        Call(
            "rotary_embedding",
            (floats(3, 5, 2, 16), floats(3, 5, 2, 8), floats(3, 5, 4), floats(3, 5, 4)),
            {"layout": "interleaved", "rotary_dim": 8, "unsqueeze_dim": 2},
        ),
        *_fused_rotary_calls(),
    ]


def _at_first_use() -> Iterator[Variant]:
    for dtype, wide, layout in itertools.product(DTYPES, (False, True), op.LAYOUTS):
        yield from (op._variant(dtype, angles, wide, layout) for angles in dict.fromkeys((dtype, "float32")))
    for dtype, layout, norms in itertools.product(DTYPES, op.LAYOUTS, (True, False)):
        for head_dim, other in ((32, dtype), (64, "float32"), (128, dtype), (256, dtype), (512, "float32")):
            yield op._fused_variant(dtype, other, other, head_dim, layout, norms)


SPEC = Spec(
    functions={
        "fused_qk_norm_rope_and_cache": Function(
            "query key value cos sin slot_mapping", COPIES, exempt=IN_ITS_FILE | {"rows": "slots are of one cache"}
        ),
        "rotary_embedding": Function("query key cos sin", Bits("row", "a row", "the row"), exempt=IN_ITS_FILE),
    },
    calls=_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
