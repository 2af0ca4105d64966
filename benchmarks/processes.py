"""Time exchanges of other libraries between GPUs, with one process per GPU.

    python -m benchmarks.processes KIND FOLDER RANKS SIZES RANK

SIZES are the total bytes that each process sends to the others; it receives as many. KIND is `nccl`
(`all_to_all_single`) or `symm_mem` (`all_to_all_vdev` of PyTorch's symmetric memory). Rank 0 writes
`FOLDER/times.json`, a list of [name, bytes, microseconds]: means over the ranks of medians of several runs. Exit status
77 means that this build of PyTorch does not have the kind.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

#: The exit status if PyTorch does not have the kind.
NOT_HERE = 77

_CALLS, _RUNS = 20, 9
_TIMEOUT = datetime.timedelta(seconds=80)
# These libraries use NVLink multicast by default. It needs rights that some machines do not give.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

Call = Callable[[], None]


def nccl(size: int, rank: int, ranks: int) -> Call:
    """Return a call of `all_to_all_single` that sends `size` bytes in total to the other ranks, none to itself."""
    each = size // (ranks - 1)
    splits = [0 if other == rank else each for other in range(ranks)]
    source = torch.randint(0, 256, (sum(splits),), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: dist.all_to_all_single(target, source, splits, splits)


def symm_mem(size: int, rank: int, ranks: int) -> Call:
    """Return a call of `all_to_all_vdev`, with splits on the device and buffers in symmetric memory."""
    symmetric = importlib.import_module("torch.distributed._symmetric_memory")
    if not symmetric.is_nvshmem_available():
        raise SystemExit(NOT_HERE)
    symmetric.set_backend("NVSHMEM")
    group = dist.group.WORLD.group_name
    each = size // (ranks - 1)

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        made = symmetric.empty(*shape, dtype=dtype, device=torch.device("cuda", rank))
        symmetric.rendezvous(made, group=group)
        return made

    source, target = (empty(each * (ranks - 1), dtype=torch.uint8) for _ in range(2))
    splits, found = empty(ranks, dtype=torch.int64), empty(2, ranks, dtype=torch.int64)
    splits.copy_(torch.tensor([0 if other == rank else each for other in range(ranks)]))
    return lambda: torch.ops.symm_mem.all_to_all_vdev(source, target, splits, found, group)


KINDS = {"nccl": ("NCCL", nccl), "symm_mem": ("torch symm_mem", symm_mem)}


def _mean(us: float) -> float:
    total = torch.tensor([us], dtype=torch.float64, device="cuda")
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _us(run: Call, calls: int) -> float:
    """Return the time of a run of `calls` calls, per call: the median of several runs, the mean over the ranks."""
    run()
    spans = []
    for _ in range(_RUNS):
        dist.barrier()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) * 1e3 / calls)
    return _mean(statistics.median(spans))


def times(name: str, size: int, call: Call) -> list[tuple[str, int, float]]:
    """Return the time of a call in a CUDA graph as `name`, and of an eager call as "`name` eager"."""

    def several() -> None:
        for _ in range(_CALLS):
            call()

    eager = _us(several, _CALLS)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        several()

    def replays() -> None:
        for _ in range(3):
            graph.replay()

    return [(name, size, _us(replays, 3 * _CALLS)), (f"{name} eager", size, eager)]


def main(kind: str, folder: str, ranks: int, sizes: list[int], rank: int) -> None:
    """Measure as one of the ranks."""
    os.environ.update(_NO_MULTICAST)
    if not dist.is_nccl_available():
        raise SystemExit(NOT_HERE)
    torch.cuda.set_device(rank)
    store = f"file://{Path(folder).resolve()}/store"
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=ranks, timeout=_TIMEOUT, device_id=torch.device("cuda", rank)
    )
    name, make = KINDS[kind]
    found = [row for size in sizes for row in times(name, size, make(size, rank, ranks))]
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    kind, folder, ranks, sizes, rank = sys.argv[1:]
    main(kind, folder, int(ranks), [int(size) for size in sizes.split(",")], int(rank))
