"""A plugin of pytest for the peers' test files: which cases run, fixtures that they expect, what cukern refuses."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.peers import tally
from tests.peers.again import AGAIN
from tests.peers.turns import SharedTurns, Turns

#: The bytes of a cache by name, where it is not the model's dtype.
_CACHE_DTYPES = {"fp8": torch.uint8, "fp8_e4m3": torch.uint8, "fp8_e5m2": torch.uint8}
_WAITS = 8
_WAIT_S = 3.0


#: The exit status of a process whose GPU can do no more, by an error that stays.
LOST = 86
_LOST = re.compile(r"CUDA error|CUDA_ERROR|cudaError|illegal memory access|device-side assert")
#: Bytes that a process may keep for itself of the GPU's memory between cases.
_KEPT_BYTES = 4 * 2**30


def with_memory(call: Callable[[], Any]) -> Any:
    """Call; where other processes have the memory of the GPU, wait until they have given it back."""
    for wait in range(_WAITS):
        try:
            return call()
        except torch.OutOfMemoryError:
            if wait == _WAITS - 1:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(_WAIT_S)
    return None


def refusal_of(error: BaseException | None) -> str | None:
    """What cukern says that it does not have: in an error, or in what that one came from."""
    while error is not None:
        if isinstance(error, NotImplementedError) and "cukern" in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool:
    """Run a case, and count as refused, with the reason, what cukern does not cover and says so."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    other = AGAIN.get(pyfuncitem.originalname)
    try:
        with_memory(lambda: pyfuncitem.obj(**arguments))
        return True
    except Exception as error:
        reason = refusal_of(error)
        if reason is not None:
            pytest.skip(f"refused: {reason}")
        if other is None or not isinstance(error, AssertionError):
            raise
    # Without the error, whose frames have the tensors of the first try.
    with other.reference(pyfuncitem.module):
        with_memory(lambda: pyfuncitem.obj(**arguments))
    pytest.skip(f"differs: {other.reason}")


def _case(report: Any) -> tally.Case:
    file, _, name = report.nodeid.partition("::")
    test, outcome, reason = name.partition("[")[0], report.outcome, ""
    if outcome == "skipped":
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith("refused: "):
            outcome, reason = "refused", reason.removeprefix("refused: ")
        elif reason.startswith("differs: "):
            outcome, reason = "differs", reason.removeprefix("differs: ")
    elif outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = (str(report.longrepr).strip().splitlines() or [""])[-1] if crash is None else crash.message
        known = tally.DIFFERENT.get(test)
        if known is not None and known.is_in(name, reason):
            outcome, reason = "differs", known.reason
        elif test in tally.PROGRAMS and "Tensor-likes" not in reason:  # never a wrong result
            outcome, reason = "skipped", tally.PROGRAMS[test]
    return tally.Case(file, name, outcome, reason.partition("\n")[0][:200], round(getattr(report, "duration", 0.0), 3))


def is_lost(text: str) -> bool:
    """Whether a failure says that nothing can run on the GPU any more in this process."""
    return bool(_LOST.search(text)) and "out of memory" not in text


def give_back() -> None:
    """Give the memory of the GPU back to the other processes."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Runner:
    """A plugin that runs the cases that are this process's turn, and writes what each comes to."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    @pytest.hookimpl(trylast=True)  # after what an argument such as -k leaves out
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = self.turns.chosen(items, [item.nodeid.partition("::")[2] for item in items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> bool:
        if session.config.option.collectonly:
            return True
        for item in self.turns.of(session.items):
            file, _, name = item.nodeid.partition("::")
            # Any other case: fixtures of the file live on, those of the case do not.
            other = next((x for x in session.items[:2] if x is not item), None)
            self.turns.begin(file, name)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=other)
            if session.shouldfail or session.shouldstop:
                break
            if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _KEPT_BYTES:
                give_back()
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            case = _case(report)
            tally.append(self.turns.path, case)
            if isinstance(self.turns, SharedTurns) and case.outcome == "failed" and is_lost(str(report.longrepr)):
                print(report.longrepr, flush=True)
                os._exit(LOST)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            tally.append(self.turns.path, _case(report))


def _dtype(cache_dtype: Any, model_dtype: Any) -> Any:
    if cache_dtype in (None, "auto"):
        return getattr(torch, model_dtype) if isinstance(model_dtype, str) else model_dtype
    return _CACHE_DTYPES.get(cache_dtype) or getattr(torch, cache_dtype)


def _random(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Random numbers; bytes of finite e4m3 numbers in an FP8 cache."""
    if dtype == torch.uint8:
        return torch.randint(0, 64, shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-0.1, 0.1)


@pytest.fixture
def kv_cache_factory() -> Any:
    """vLLM's caches of keys [blocks, heads, dim / x, block, x] and values [blocks, heads, dim, block], by layers."""

    def make(
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        cache_dtype: Any,
        model_dtype: Any = None,
        seed: Any = None,
        device: Any = "cuda",
    ) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(seed or 0)
        dtype = _dtype(cache_dtype, model_dtype)
        x = 16 // dtype.itemsize
        keys, values = (num_heads, head_size // x, block_size, x), (num_heads, head_size, block_size)
        return tuple(  # type: ignore[return-value]
            [_random((num_blocks, *shape), dtype, device) for _ in range(num_layers)] for shape in (keys, values)
        )

    return make


@pytest.fixture
def kv_cache_factory_flashinfer() -> Any:
    """vLLM's caches [blocks, 2, block, heads, dim], split in keys and values, by layers."""

    def make(
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_heads: int,
        head_size: int,
        cache_dtype: Any,
        model_dtype: Any = None,
        seed: Any = None,
        device: Any = "cuda",
        cache_layout: str = "NHD",
    ) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(seed or 0)
        dtype = _dtype(cache_dtype, model_dtype)
        by_head = cache_layout == "HND"
        inner = (num_heads, block_size) if by_head else (block_size, num_heads)
        caches = [_random((num_blocks, 2, *inner, head_size), dtype, device) for _ in range(num_layers)]
        if by_head:
            caches = [cache.transpose(2, 3) for cache in caches]
        return [cache[:, 0] for cache in caches], [cache[:, 1] for cache in caches]

    return make


@pytest.fixture
def default_vllm_config() -> Any:
    """vLLM's configuration."""
    from tests.peers import modules

    return modules.CONFIG


@pytest.fixture
def workspace_init() -> None:
    """vLLM's workspaces, which nothing here uses."""


@pytest.fixture
def disable_deepgemm_ue8m0() -> None:
    """A switch of vLLM's own FP8 scales, which are not used here."""


@pytest.fixture
def dist_init() -> None:
    """vLLM's process groups, which are not here."""
    pytest.skip("needs the process groups of vLLM")
