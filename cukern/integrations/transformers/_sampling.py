"""Sampling with `cukern.sample`, for this package's `generate` and as a `LogitsProcessor` for transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

import cukern
from cukern.integrations.transformers._options import Sampling


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """A logits processor for transformers' `generate` that samples the next token with `cukern.sample`.

    Pass it in `logits_processor=[...]`. It masks all tokens except the sampled one, so `generate` chooses that token,
    whether it decodes greedily or not. Do not set the temperature, top_k and top_p of `generate`. Use a sampler for a
    single generation, because its samples depend on its seed and on the number of earlier samples.

    Args:
        temperature, top_k, top_p, min_p: as in `cukern.sample`. With a temperature of 0, the token with the largest
            logit is chosen.
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
        self.seed, self.drawn = seed, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = cukern.sample(  # type: ignore[assignment]
            scores.detach().contiguous(), seed=self.seed, offset=self.drawn, **self.options
        )
        self.drawn += 1
        left = torch.full_like(scores, float("-inf"))
        return left.scatter_(1, tokens.long()[:, None], 0.0)


def draw(
    own: Sampling, logits: torch.Tensor, token: torch.Tensor, finished: torch.Tensor, stop: torch.Tensor, seed: Any,
    offset: Any, rows: torch.Tensor,
) -> None:  # fmt: skip
    """Sample a token for each row into `token`, int64 [batch, 1]. Set `finished` for rows whose token is a stop token.

    `stop` contains the stop tokens, int64 on the device. `rows` contains the indices of the rows.
    """
    ends: dict[str, Any] = {"finished": finished, "end_id": own.stop[0]} if own.stop else {}
    cukern.sample(
        logits, temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p, seed=seed,
        offset=offset, indices=rows, out=token.view(-1), **ends,
    )  # fmt: skip
    if len(own.stop) > 1:
        finished |= (token == stop).any(1)  # torch.isin would wait for the GPU, which fails during capture
