"""Time rotary position embedding beside the composition of transformers, alone and with norms and cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what the models of transformers compute, without changing the inputs."""
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def _ours(query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ours: tuple[torch.Tensor, torch.Tensor] = cukern.rotary_embedding(query, key, *angles, variant="wide")
    return ours


def _compiled() -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(eager, dynamic=False)


def agree(ours: Any, theirs: Any) -> bool:
    """Compare shapes only: each call rotates the result of the call before. The tests compare with transformers."""
    return all(x.shape == y.shape and bool(torch.isfinite(x).all()) for x, y in zip(ours, theirs, strict=True))


def _case(tokens: int, heads: int, kv_heads: int, dim: int, dtype: str, host: bool = False) -> Case:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        kind, device = getattr(torch, dtype), generator.device
        angles = torch.rand(tokens, dim // 2, device=device, generator=generator).repeat(1, 2) * 6
        rows = (torch.empty(tokens, n, dim, dtype=kind, device=device) for n in (heads, kv_heads))
        return *(x.normal_(generator=generator) for x in rows), angles.cos().to(kind), angles.sin().to(kind)

    sizes: dict[str, int | str] = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    size = ITEM_SIZE[dtype] * tokens * dim * (2 * (heads + kv_heads) + 2)
    baselines = {"torch": Baseline(lambda: eager), "torch.compile": Baseline(_compiled, slow=True)}
    sizes["dtype"] = dtype
    return Case("rotary_embedding", sizes, "wide", inputs, _ours, size, baselines=baselines, agree=agree, host=host)


# --- norms of heads, rotation, and the cache's new keys and values --------------------------------------

_EPSILON, _BLOCK_SIZE = 1e-6, 16


def _fused(query: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cukern.fused_qk_norm_rope_and_cache(query, *others, _EPSILON)
    return query, *others[4:6]


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor, *weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Call the functions of cukern that the fused function replaces: four launches."""
    for x, weight in zip((query, key), weights, strict=True):
        cukern.rms_norm(x, weight, _EPSILON, out=x)
    cukern.rotary_embedding(query, key, cos, sin)
    cukern.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", 1.0, 1.0)
    return query, key_cache, value_cache


def eager_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor, *weights: torch.Tensor,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Compute the fused function with torch operators, without changing the queries."""
    normed = [
        torch.nn.functional.rms_norm(x, x.shape[-1:], weight, _EPSILON)
        for x, weight in zip((query, key), weights, strict=True)
    ]
    query, key = eager(normed[0], normed[1], cos, sin)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)
    return query, key_cache, value_cache


def agree_fused(ours: Any, theirs: Any) -> bool:
    """Return whether results agree up to rounding: torch rounds each product of the rotation."""
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(x.float(), y.float(), rtol=2e-2, atol=6e-2) for x, y in pairs)


def _compiled_fused() -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(eager_fused, dynamic=False)


def _fused_case(tokens: int, heads: int, kv_heads: int, dim: int, dtype: str, host: bool = False) -> Case:
    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        kind, device = getattr(torch, dtype), generator.device
        rows = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device, generator=generator).to(kind)
        angles = torch.rand(tokens, dim // 2, device=device, generator=generator).repeat(1, 2) * 6
        pages = -(-2 * tokens // _BLOCK_SIZE)
        caches = (torch.zeros(pages, _BLOCK_SIZE, kv_heads, dim, dtype=kind, device=device) for _ in range(2))
        slots = torch.randperm(pages * _BLOCK_SIZE, device=device, generator=generator)[:tokens]
        weights = (torch.rand(dim, device=device, generator=generator).to(kind) + 0.5 for _ in range(2))
        # Queries, keys and values are parts of one product.
        parts = rows.split([heads, kv_heads, kv_heads], 1)
        return *parts, angles.cos().to(kind), angles.sin().to(kind), *caches, slots, *weights

    sizes: dict[str, int | str] = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    size = tokens * (ITEM_SIZE[dtype] * dim * (2 * heads + 4 * kv_heads + 2) + 8)
    baselines = {
        "one by one": Baseline(lambda: _one_by_one),
        "torch": Baseline(lambda: eager_fused),
        "torch.compile": Baseline(_compiled_fused, slow=True),
    }
    sizes["dtype"] = dtype
    op = "fused_qk_norm_rope_and_cache"
    return Case(op, sizes, "auto", inputs, _fused, size, baselines=baselines, agree=agree_fused, host=host)


def cases() -> list[Case]:
    """Return cases: Qwen3-30B-A3B's heads in steps of 1 and 64 sequences and in a prefill; DeepSeek's rotary part."""
    return [
        _fused_case(1, 32, 4, 128, "bfloat16", host=True),
        _fused_case(64, 32, 4, 128, "bfloat16"),
        _fused_case(16384, 32, 4, 128, "bfloat16"),
        _case(1, 32, 4, 128, "bfloat16", host=True),
        _case(64, 32, 4, 128, "bfloat16"),
        _case(16384, 32, 4, 128, "bfloat16"),
        _case(8192, 128, 1, 64, "bfloat16"),
    ]
