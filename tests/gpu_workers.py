"""Names that `tests.gpu_record` shares with the test processes that it starts."""

from __future__ import annotations

from collections.abc import Sequence

#: The variable that lists the GPUs for the workers of pytest-xdist, in the syntax of CUDA_VISIBLE_DEVICES.
GPUS = "CUKERN_TEST_GPUS"
#: The property of a test's report that names the stem whose proof it belongs to.
STEM = "stem"
#: The name of the proof that holds the tests of no stem.
SHARED = "runtime"
#: The files that test every op. Their tests that are marked with a stem belong to its proof, and the rest to `SHARED`.
SUITES = ("test_contract.py", "test_dynamic_batch.py", "test_torch_ops.py")
#: One CPU thread for each test process: OpenMP's and OpenBLAS's own threads would outnumber the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def from_gpu(names: Sequence[str], first: int) -> dict[str, str]:
    """The environment with GPU `first` as device 0 and the others behind it."""
    if len(names) < 2:
        return {}
    first %= len(names)
    return {"CUDA_VISIBLE_DEVICES": ",".join([*names[first:], *names[:first]])}
