"""The ground of all tests: a kernel cache, a GPU for tests that ask for one, repeatable random numbers, fixtures."""

from __future__ import annotations

import functools
import os
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from tests import gpu_memory, gpu_workers

# Hypothesis times the first example too, which may compile a kernel.
settings.register_profile("cukern", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("cukern")

_cache = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


@functools.cache
def _why_no_gpu() -> str | None:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if count else "the driver reports no device"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stem", action="append", help="leave out the tests that are marked as another stem's")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def stem_of(item: pytest.Item) -> str | None:
        if owner := item.get_closest_marker("stem"):
            return owner.args[0]
        return gpu_workers.SHARED if item.path.name in gpu_workers.SUITES else None

    marked = [(item, stem) for item in items if (stem := stem_of(item))]
    for item, stem in marked:
        item.user_properties.append((gpu_workers.STEM, stem))
    stems = config.getoption("--stem")
    if stems:
        others = [item for item, stem in marked if stem not in stems]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_configure(config: pytest.Config) -> None:
    # Before anything asks for a device, each worker of a GPU run takes another GPU as its first.
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (gpus := os.environ.get(gpu_workers.GPUS)):
        os.environ.update(gpu_workers.from_gpu(gpus.split(","), int(worker.removeprefix("gw"))))
    # Set before any test module imports cukern, and inherited by pytest-xdist's processes, which so share it.
    if not os.environ.get("CUKERN_CACHE_DIR"):
        config.stash[_cache] = folder = tempfile.TemporaryDirectory(prefix="cukern-tests-", ignore_cleanup_errors=True)
        os.environ["CUKERN_CACHE_DIR"] = folder.name
    if _why_no_gpu():
        os.environ.setdefault("CUKERN_COMPILE", "lazy")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache in config.stash:
        config.stash[_cache].cleanup()
        del os.environ["CUKERN_CACHE_DIR"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if not item.get_closest_marker("gpu") or _why_no_gpu():
        return (yield)
    with gpu_memory.of_test(large=item.get_closest_marker("large") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # A GPU test that is skipped looks like one that passed.
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.fail(f"this test needs an NVIDIA GPU, and none can be used here ({reason})", pytrace=False)
    if large := item.get_closest_marker("large"):
        (gib,) = large.args
        if (found := gpu_memory.free()) < gib * 2**30:
            pytest.skip(f"this test needs {gib} GiB of GPU memory, and {found / 2**30:.1f} GiB are free")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ between tests and are the same in every run of one."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
def put(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Puts an array where the function shall run."""
    # Not at the top: importing cukern looks for its kernel cache.
    from tests.buffers import on_gpu

    return on_gpu if request.param == "gpu" else np.asarray


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a test are."""
    return request.param


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget the compiled graphs of torch.compile after the test."""
    import torch

    yield
    torch.compiler.reset()
