"""Names that `tests.gpu_record` shares with the test processes that it starts."""

from __future__ import annotations

from collections.abc import Sequence

#: The variable that lists the GPUs for the workers of pytest-xdist, in the syntax of CUDA_VISIBLE_DEVICES.
GPUS = "CUKERN_TEST_GPUS"
#: The property of a test's report that names the stem it is marked with.
STEM = "stem"


def from_gpu(names: Sequence[str], first: int) -> dict[str, str]:
    """The environment with GPU `first` as device 0 and the others behind it."""
    if len(names) < 2:
        return {}
    first %= len(names)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*names[first:], *names[:first]])}
