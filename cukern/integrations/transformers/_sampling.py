"""Sampling with `cukern.sample`, for this package's `generate` and as a `LogitsProcessor` for transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

import cukern
from cukern.integrations.transformers._options import Sampling


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """A logits processor for transformers' `generate` that samples the next token with `cukern.sample`.

    Pass it in `logits_processor=[...]`, without temperature, top_k and top_p. It masks all tokens except the sampled
    one. Use a sampler for only one generation, because it counts its samples.

    Args:
        temperature, top_k, top_p, min_p: as in `cukern.sample`. A temperature of 0 takes the largest logit.
        seed: the seed for sampling.

    Raises the ValueErrors of `cukern.sample` when the first token is sampled.
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
        self.seed, self.sample_count = seed, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = cukern.sample(  # type: ignore[assignment]
            scores.detach().contiguous(), seed=self.seed, offset=self.sample_count, **self.options
        )
        self.sample_count += 1
        masked = torch.full_like(scores, float("-inf"))
        return masked.scatter_(1, tokens.long()[:, None], 0.0)


def draw(
    params: Sampling, logits: torch.Tensor, token: torch.Tensor, finished: torch.Tensor, stop: torch.Tensor, seed: Any,
    offset: Any, rows: torch.Tensor,
) -> None:  # fmt: skip
    """Sample each row's token into `token`, int64 [batch, 1]. A token in `stop` sets `finished`."""
    ends: dict[str, Any] = {"finished": finished, "end_id": params.stop[0]} if params.stop else {}
    cukern.sample(
        logits, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=seed,
        offset=offset, indices=rows, out=token.view(-1), **ends,
    )  # fmt: skip
    if len(params.stop) > 1:
        finished |= (token == stop).any(1)  # torch.isin would wait for the GPU
