"""What the GPU record's run and the test processes that it starts say to each other."""

from __future__ import annotations

from collections.abc import Sequence

#: The variable that tells the workers of pytest-xdist the GPUs, by the names of CUDA_VISIBLE_DEVICES.
GPUS = "CUKERN_TEST_GPUS"
#: The property of a test's report that names the stem it is marked with.
STEM = "stem"


def from_gpu(names: Sequence[str], first: int) -> dict[str, str]:
    """The environment in which a GPU is device 0 and the others follow."""
    if len(names) < 2:
        return {}
    first %= len(names)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*names[first:], *names[:first]])}
