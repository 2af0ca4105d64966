"""What the shared suites know of the exchange between GPUs."""

from __future__ import annotations

from tests.spec import COPIES, Function, Spec

WITH_OTHERS = {"call": "a call means something beside the calls of the other ranks only"}

SPEC = Spec(
    functions={
        "all_to_all_combine": Function(exempt=WITH_OTHERS),
        "all_to_all_dispatch": Function(bits=COPIES, exempt=WITH_OTHERS),
    },
    allowed_spills={("combine_tokens", "90a"): {"13.5": 76}},
    alike=5,
)
