"""The examples: that they run on a machine with no GPU, and find what is wrong."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cukern
from cukern.runtime import kernel

ROOT = Path(__file__).resolve().parents[1]
EXPERT_PARALLEL = ROOT / "examples" / "expert_parallel.py"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "CUKERN_COMPILE": "lazy", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _run(*command: str, gpus: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | ENVIRONMENT
    if gpus:
        environment.pop("CUDA_VISIBLE_DEVICES")
        environment |= {name: os.environ[name] for name in ["CUDA_VISIBLE_DEVICES"] if name in os.environ}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=120)


def _over_processes(count: int, *arguments: str, gpus: bool = False) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{count}", str(EXPERT_PARALLEL)]
    return _run(*start, *arguments, gpus=gpus)


@pytest.fixture(scope="module")
def expert_parallel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("expert_parallel", EXPERT_PARALLEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_expert_parallel_runs_over_two_processes() -> None:
    done = _over_processes(2, "--tokens", "3", "20", "--experts", "8", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    assert "8 experts over 2 ranks, hidden 256" in done.stdout
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "nccl" in line]
    assert [line[0] for line in lines] == ["3", "20"]
    for _, _, *times, _, _, apart in lines:
        assert all(float(us.replace(",", "")) > 0 for us in times)
        assert 0 <= float(apart.removesuffix("%")) < 1


def test_expert_parallel_says_how_it_is_started() -> None:
    done = _run(str(EXPERT_PARALLEL))
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N examples/expert_parallel.py" in done.stderr


def test_expert_parallel_compares_with_one_gpu(expert_parallel: ModuleType) -> None:
    sizes, cpu = expert_parallel.SMALL, torch.device("cpu")
    experts = expert_parallel.make_experts(sizes, range(sizes.experts), cpu)
    x, weights, ids = tokens = expert_parallel.make_tokens(sizes, 20, 0, cpu)
    out = cukern.fused_experts(x, experts.w1, experts.w2, weights, ids, quant=experts.config)
    assert expert_parallel.difference(sizes, tokens, out) == 0
    one_expert_less = weights.clone()
    one_expert_less[5, 1] = 0
    out = cukern.fused_experts(x, experts.w1, experts.w2, one_expert_less, ids, quant=experts.config)
    assert expert_parallel.difference(sizes, tokens, out) > expert_parallel.DIFFERENCE
    out[0, 0] = float("nan")
    assert not expert_parallel.difference(sizes, tokens, out) < expert_parallel.DIFFERENCE


def test_expert_parallel_has_the_sizes_of_deepseek_v3(expert_parallel: ModuleType) -> None:
    assert expert_parallel.DEEPSEEK_V3 == (7168, 2048, 256, 8, 8, 4)


@pytest.mark.gpu
@pytest.mark.waits
def test_expert_parallel_runs_on_all_gpus() -> None:
    count = min(kernel.device_count(), 8)
    done = _over_processes(count, "--small", "--tokens", "5", "300", "--repeats", "2", gpus=True)
    assert done.returncode == 0, done.stderr
    assert f"16 experts over {count} ranks" in done.stdout
    linked = all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(count), 2))
    way = "push" if linked else "nccl"
    assert sum(way in line for line in done.stdout.splitlines()) == 2
