"""Rotary position embedding against the composition of transformers."""

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
    """What the models of transformers do, which leaves the inputs as they are."""
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def _ours(query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ours: tuple[torch.Tensor, torch.Tensor] = cukern.rotary_embedding(query, key, *angles, variant="wide")
    return ours


def _compiled() -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(eager, dynamic=False)


def agree(ours: Any, theirs: Any) -> bool:
    """Anything: each call rotates what the one before has left, and the tests compare the op with transformers."""
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


def cases() -> list[Case]:
    """Qwen3-30B-A3B's heads in a step of one and of many sequences and in a prefill, and DeepSeek's rotated part."""
    return [
        _case(1, 32, 4, 128, "bfloat16", host=True),
        _case(64, 32, 4, 128, "bfloat16"),
        _case(16384, 32, 4, 128, "bfloat16"),
        _case(8192, 128, 1, 64, "bfloat16"),
    ]
