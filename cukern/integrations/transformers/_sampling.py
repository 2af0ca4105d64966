"""Sampling in transformers' `generate`: a `LogitsProcessor` that draws by `cukern.sample`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

import cukern


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """Draw the next token by `cukern.sample`, and leave `generate` no other: pass it in `logits_processor=[...]`.

    What `generate` does then, greedy or not, chooses that token, so leave its own temperature, top_k and top_p alone.
    One sampler is for one generation: draws depend on its seed and on how many came before.

    Args:
        temperature, top_k, top_p, min_p: as in `cukern.sample`. A temperature of 0 takes the largest logit.
        seed: of the draws.

    Raises ValueError where `cukern.sample` does, at the first token.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
    ) -> None:
        self.options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        self.seed, self.drawn = seed, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = cukern.sample(  # type: ignore[assignment]
            scores.detach().contiguous(), seed=self.seed, offset=self.drawn, **self.options
        )
        self.drawn += 1
        left = torch.full_like(scores, float("-inf"))
        return left.scatter_(1, tokens.long()[:, None], 0.0)
