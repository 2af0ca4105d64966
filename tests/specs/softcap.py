"""What the shared suites know of soft caps."""

from __future__ import annotations

from collections.abc import Iterator

import cukern
from cukern.ops import softcap
from cukern.runtime.kernel import Variant
from tests.spec import BF16, DTYPES, Bits, Call, Function, Spec, floats, in_variants, widths


def _at_first_use() -> Iterator[Variant]:
    for dtype in DTYPES:
        yield from (softcap._variant(dtype, [*widths(dtype)][-1], items) for items in softcap._ITEMS)


SPEC = Spec(
    functions={
        "softcap_logits": Function(
            "logits",
            Bits("row", "a row", "the row and the cap"),
            tolerance="softcap.capped",
            many_rows=[lambda x: cukern.softcap_logits(x, 2.0)],
        ),
    },
    calls=[
        Call("softcap_logits", (floats(3, 50) * 40, 30.0)),
        Call("softcap_logits", (floats(2, 3, 48, dtype=BF16) * 3, 2), {"variant": "auto"}),
    ],
    large_calls=in_variants(Call("softcap_logits", (floats(40, 5000, dtype=BF16) * 40, 30.0)), "vector", "scalar"),
    at_first_use=_at_first_use,
    none_spills=True,
)
