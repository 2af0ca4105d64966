"""Time the decoder's attention of one new token beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

Arguments = tuple[torch.Tensor, ...]


def _append(q: Any, k: Any, v: Any, bias_q: Any, bias_k: Any, bias_v: Any, keys: Any, values: Any) -> torch.Tensor:
    """Write the new key and value as the last entry of the caches. Return the query [batch, heads, 1, dim]."""
    _, batch, heads, dim = keys.shape
    keys[-1] = (k + bias_k).view(batch, heads, dim)
    values[-1] = (v + bias_v).view(batch, heads, dim)
    return (q + bias_q).view(batch, heads, 1, dim)


def masked_eager(*arguments: torch.Tensor) -> torch.Tensor:
    """Compute torch's attention on a view of the caches."""
    query = _append(*arguments)
    by_head = (cache.permute(1, 2, 0, 3) for cache in arguments[6:])
    return scaled_dot_product_attention(query, *by_head).reshape(arguments[0].shape)


def masked_composed(*arguments: torch.Tensor) -> torch.Tensor:
    """Compute the formula with torch operators, for torch.compile."""
    query = _append(*arguments)[:, :, 0].float()
    keys, values = arguments[6:]
    scores = (keys.float() * query).sum(dim=-1) * query.shape[-1] ** -0.5
    weights = scores.softmax(dim=0)
    return (weights[..., None] * values.float()).sum(dim=0).to(keys.dtype).reshape(arguments[0].shape)


def cross_eager(q: Any, bias_q: Any, keys: Any, values: Any, lengths: Any) -> torch.Tensor:
    """Compute torch's attention on a view of the encoder's output, with a mask from the lengths."""
    batch, length, heads, dim = keys.shape
    query = (q + bias_q).view(batch, heads, 1, dim)
    used = torch.arange(length, device=q.device)[None, :] < lengths[:, None]
    by_head = (memory.transpose(1, 2) for memory in (keys, values))
    return scaled_dot_product_attention(query, *by_head, attn_mask=used[:, None, None, :]).reshape(q.shape)


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two results agree up to the rounding of intermediate results, which the op does not round."""
    return torch.allclose(ours.float(), theirs.float(), rtol=3e-2, atol=3e-2)


def _compiled(function: Callable[..., Any]) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _masked(
    batch: int, heads: int, head_dim: int, length: int, dtype: str, variants: tuple[str, ...], compared: bool
) -> Iterator[Case]:
    sizes: dict[str, int | str] = {"batch": batch, "heads": heads, "head_dim": head_dim, "length": length}
    width = heads * head_dim

    def inputs(generator: torch.Generator) -> Arguments:
        def normal(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
            return made.normal_(generator=generator)

        rows = [normal(batch, width) for _ in range(3)]
        biases = [normal(width) for _ in range(3)]
        return (*rows, *biases, *(normal(length, batch, heads, head_dim) for _ in range(2)))

    def call(variant: str) -> Callable[..., Any]:
        return lambda *arguments: cukern.masked_attention(*arguments, length, variant=variant)

    # Each entry is read once, except the new entry, which is written. Then the new rows, the biases and the result.
    size = ITEM_SIZE[dtype] * width * (2 * length * batch + 4 * batch + 3)
    for variant in variants:
        baselines = {}
        if variant == variants[0]:
            baselines["torch"] = Baseline(lambda: masked_eager)
            if compared:
                baselines["torch.compile"] = _compiled(masked_composed)
        host = variant == variants[0]
        yield Case(
            "masked_attention",
            sizes | {"dtype": dtype},
            variant,
            inputs,
            call(variant),
            size,
            baselines=baselines,
            agree=agree,
            host=host,
        )


def _cross(batch: int, heads: int, head_dim: int, length: int, dtype: str) -> Case:
    case: dict[str, int | str] = {
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "length": length,
        "dtype": dtype,
    }
    width = heads * head_dim

    def inputs(generator: torch.Generator) -> Arguments:
        def normal(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
            return made.normal_(generator=generator)

        memories = [normal(batch, length, heads, head_dim) for _ in range(2)]
        lengths = torch.full((batch,), length, dtype=torch.int32, device=generator.device)
        return normal(batch, width), normal(width), *memories, lengths

    size = ITEM_SIZE[dtype] * width * (2 * length * batch + 2 * batch + 1) + 4 * batch
    baselines = {"torch": Baseline(lambda: cross_eager)}

    def call(*arguments: torch.Tensor) -> torch.Tensor:
        return cukern.cross_attention(*arguments, variant="specialized")

    return Case("cross_attention", case, "specialized", inputs, call, size, baselines=baselines, agree=agree)


def cases() -> list[Case]:
    """Return cases: a batch that fills the GPU, a sequence that is split among blocks, and an encoder's output."""
    return [
        *_masked(64, 16, 64, 1024, "bfloat16", ("specialized", "dynamic"), compared=True),
        *_masked(1, 32, 128, 4096, "bfloat16", ("specialized",), compared=True),
        *_masked(64, 16, 80, 1024, "bfloat16", ("dynamic",), compared=False),
        *_masked(8, 32, 128, 256, "float16", ("specialized",), compared=False),
        _cross(64, 16, 64, 512, "bfloat16"),
    ]
