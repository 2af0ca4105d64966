"""Time embedding lookups beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import embedding

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

STEP = 7
POSITIONS = 512


def sine_eager(table: torch.Tensor, encoding: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the scaled embeddings plus the encoding of one position with torch operators."""
    return embedding(ids, table) * table.shape[1] ** 0.5 + encoding[STEP]


def learned_eager(table: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the embeddings plus the embeddings of the positions of a sequence."""
    return embedding(ids, table) + positions[: ids.shape[1]]


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether results are equal up to the rounding of the product, which the op does not round."""
    return torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def _compiled(function: Callable[..., Any]) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _case(
    op: str,
    shape: tuple[int, ...],
    hidden: int,
    dtype: str,
    call: Callable[..., torch.Tensor],
    eager: Callable[..., torch.Tensor],
    position_rows: int,
    compiled: bool = False,
    host: bool = False,
) -> Case:
    vocab = 32768
    sizes: dict[str, int | str] = dict(zip(("batch", "length"), shape, strict=False))
    sizes |= {"hidden": hidden, "vocab": vocab, "dtype": dtype}

    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        def normal(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
            return made.normal_(generator=generator)

        ids = torch.randint(vocab, shape, dtype=torch.int32, device=generator.device, generator=generator)
        return normal(vocab, hidden), normal(POSITIONS, hidden), ids

    rows = torch.Size(shape).numel()
    size = ITEM_SIZE[dtype] * hidden * (2 * rows + position_rows) + 4 * rows
    baselines = {"torch": Baseline(lambda: eager)}
    if compiled:
        baselines["torch.compile"] = _compiled(eager)
    return Case(op, sizes, "wide", inputs, call, size, baselines=baselines, agree=agree, host=host)


def _sine(table: torch.Tensor, encoding: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cukern.embedding_lookup_sine_position_encoding(table, encoding, ids, STEP, variant="wide")


def _copied(table: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cukern.embedding_lookup(table, ids, variant="wide")


def _learned(table: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cukern.embedding_lookup(table, ids, positions, variant="wide")


def _torch_copied(table: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return embedding(ids, table)


def cases() -> list[Case]:
    """Return cases: a decoding step for few and for many sequences, and the words of whole sequences."""
    sine = "embedding_lookup_sine_position_encoding"
    return [
        _case(sine, (64,), 1024, "bfloat16", _sine, sine_eager, 1, host=True),
        _case(sine, (8192,), 1024, "bfloat16", _sine, sine_eager, 1),
        _case(sine, (8192,), 4096, "bfloat16", _sine, sine_eager, 1, compiled=True),
        _case("embedding_lookup", (8192,), 4096, "bfloat16", _copied, _torch_copied, 0),
        _case("embedding_lookup", (32, 512), 1024, "bfloat16", _learned, learned_eager, 512),
    ]
