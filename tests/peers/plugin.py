"""A plugin of pytest for the peers' test files: fixtures that they expect, and what cukern refuses."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch

#: The bytes of a cache by name, where it is not the model's dtype.
_CACHE_DTYPES = {"fp8": torch.uint8, "fp8_e4m3": torch.uint8, "fp8_e5m2": torch.uint8}


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Generator[None, Any, None]:
    """Count as skipped, with the reason, what cukern does not cover and says so."""
    outcome = yield
    error = outcome.excinfo and outcome.excinfo[1]
    if isinstance(error, NotImplementedError) and "cukern" in str(error):
        outcome.force_exception(pytest.skip.Exception(f"refused: {error}"))


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
def default_vllm_config() -> None:
    """vLLM's configuration, which nothing here reads."""


@pytest.fixture
def workspace_init() -> None:
    """vLLM's workspaces, which nothing here uses."""
