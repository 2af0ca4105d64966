"""The first step of two ranks on a fresh machine: an empty cache, and other work on all cores."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cukern.fused_moe import All2AllManager
from cukern.reference import fused_moe as twin
from tests.test_fused_moe_all_to_all import as_tensor, compare, layer_on, made, to_numpy

RANKS = 2
LIMIT_S = 60.0
#: The library's default deadline.
DEADLINE_S = 30.0
#: Two starts detect a stall that always occurs. CUKERN_COLD_STARTS=10 detects a rare one.
STARTS = int(os.environ.get("CUKERN_COLD_STARTS", "2"))


def process(rank: int, folder: str) -> None:
    """One rank, from the import to two steps of a layer."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store, limit = f"file://{folder}/store", datetime.timedelta(seconds=LIMIT_S)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=limit)
    case = made(np.random.default_rng(3), [5, 7], "fp8_block")
    with All2AllManager(**case.sizes(deadline_s=DEADLINE_S)) as manager:
        own = case.of_rank(rank).map(as_tensor("cuda"))
        module = layer_on(manager, own)
        outs = [to_numpy(module(*own.arrays)) for _ in range(2)]
        manager.check()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(outs))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def load_on_all_cores() -> Iterator[None]:
    """Processes that compute until the end of the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
        for each in busy:
            each.wait()


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("start", range(STARTS))
def test_two_ranks_start_cold_under_load(start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUKERN_COMPILE", raising=False)
    with load_on_all_cores():
        begin = time.monotonic()
        context = torch.multiprocessing.spawn(process, (str(tmp_path),), nprocs=RANKS, join=False)
        try:
            while not context.join(timeout=1.0):
                assert time.monotonic() < begin + LIMIT_S, f"two ranks have not ended in {LIMIT_S:g} s"
        finally:
            for each in context.processes:
                each.kill()
                each.join()
    print(f"\nstart {start}: {time.monotonic() - begin:.1f} s")
    case = made(np.random.default_rng(3), [5, 7], "fp8_block")
    want = twin.fused_experts(*case.layer.arrays, quant=case.layer.config)
    found = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(RANKS)]
    for step in range(2):
        compare(case.layer, np.concatenate([outs[step] for outs in found]), want)
