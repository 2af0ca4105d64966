"""Time soft caps of logits beside PyTorch's operations, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

CAP = 30.0
#: Tokens of a step, the vocabulary of Gemma 2, and the dtype of the logits.
SIZES = ((1, 256000, "bfloat16"), (64, 256000, "bfloat16"), (64, 256000, "float32"), (512, 256000, "bfloat16"))


def by_torch(logits: torch.Tensor) -> torch.Tensor:
    return CAP * torch.tanh(logits / CAP)


def _compiled() -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(by_torch, dynamic=False)


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether results are close: PyTorch rounds each step to the dtype of the logits."""
    return torch.allclose(ours.float(), theirs.float(), rtol=2**-6, atol=2**-6)


def _case(tokens: int, vocab: int, dtype: str) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        logits = torch.randn(tokens, vocab, generator=generator, device=generator.device) * 10
        return (logits.to(getattr(torch, dtype)),)

    return Case(
        op="softcap_logits",
        case={"tokens": tokens, "vocab": vocab, "dtype": dtype},
        variant="vector",
        inputs=inputs,
        call=lambda logits: cukern.softcap_logits(logits, CAP),
        bytes=2 * tokens * vocab * ITEM_SIZE[dtype],
        baselines={"torch": Baseline(lambda: by_torch), "torch.compile": Baseline(_compiled, slow=True)},
        agree=agree,
        host=tokens == 1,
    )


def cases() -> list[Case]:
    """Return cases of the logits of a decoding step, for one sequence and for many."""
    return [_case(*sizes) for sizes in SIZES]
