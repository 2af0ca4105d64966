"""Time bias and penalties beside their floor and compositions of torch operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case

_END = 2
_REPETITION, _PRESENCE, _FREQUENCY, _TEMPERATURE = 1.2, 0.5, 0.25, 0.8


def eager_update(logits: torch.Tensor, bias: torch.Tensor, finished: torch.Tensor) -> torch.Tensor:
    """Add the bias, then overwrite the rows of finished sequences."""
    largest = torch.finfo(logits.dtype).max
    row = torch.full_like(bias, -largest)
    row[_END : _END + 1].fill_(largest)
    return torch.where(finished[:, None], row, logits + bias)


def eager_penalties(logits: torch.Tensor, output_ids: torch.Tensor, temperature: float = _TEMPERATURE) -> torch.Tensor:
    """Count all tokens by a scatter, then apply each penalty in a pass over the logits, as vLLM does."""
    zeros = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    counts = zeros.scatter_add_(1, output_ids.long(), torch.ones_like(output_ids))
    seen = counts > 0
    logits = torch.where(seen, torch.where(logits > 0, logits / _REPETITION, logits * _REPETITION), logits)
    return (logits - _FREQUENCY * counts - _PRESENCE * seen) / temperature


def eager_penalties_in_place(logits: torch.Tensor, output_ids: torch.Tensor) -> torch.Tensor:
    """Read and write only the tokens of the history. Each position counts the positions with its token."""
    index = output_ids.long()
    counts = (output_ids[:, :, None] == output_ids[:, None, :]).sum(dim=2)
    x = logits.gather(1, index)
    x = torch.where(x > 0, x / _REPETITION, x * _REPETITION) - _FREQUENCY * counts - _PRESENCE
    return logits.scatter_(1, index, x)


def _compiled(function: Callable[..., Any]) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def _logits(generator: torch.Generator, batch: int, vocab: int) -> torch.Tensor:
    return 3 * torch.randn(batch, vocab, device=generator.device, generator=generator)


def _update(batch: int, vocab: int) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        bias = torch.randn(vocab, device=generator.device, generator=generator)
        # No sequence is finished, because rows of finished sequences are not read.
        return _logits(generator, batch, vocab), bias, torch.zeros(batch, dtype=torch.bool, device=generator.device)

    return Case(
        "update_logits",
        {"batch": batch, "vocab": vocab, "dtype": "float32"},
        "wide",
        inputs,
        lambda logits, bias, finished: cukern.update_logits(logits, bias, finished, _END),
        4 * (2 * batch * vocab + vocab) + batch,
        baselines={"torch": Baseline(lambda: eager_update)},
        agree=_close,
        host=True,
    )


def _penalties(batch: int, vocab: int, length: int, in_place: bool) -> Case:
    """Return a case with all penalties of a history: with the temperature into a new array, or without it in place."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        # Most of a text is a few frequent tokens: the cube makes low ids frequent.
        drawn = torch.rand(batch, length, device=generator.device, generator=generator) ** 3
        lengths = torch.full((batch,), length, dtype=torch.int32, device=generator.device)
        return _logits(generator, batch, vocab), (drawn * vocab).int().clamp_(max=vocab - 1), lengths

    def call(logits: torch.Tensor, output_ids: torch.Tensor, lengths: torch.Tensor) -> Any:
        return cukern.apply_penalties(
            logits,
            temperature=None if in_place else _TEMPERATURE,
            repetition_penalty=_REPETITION,
            presence_penalty=_PRESENCE,
            frequency_penalty=_FREQUENCY,
            output_ids=output_ids,
            sequence_length=lengths,
            out=logits if in_place else None,
        )

    eager = eager_penalties_in_place if in_place else eager_penalties
    baselines = {"torch": Baseline(lambda: lambda logits, output_ids, lengths: eager(logits, output_ids))}
    if not in_place:
        baselines["torch.compile"] = _compiled(lambda logits, output_ids, lengths: eager(logits, output_ids))
    changed = batch * (length if in_place else vocab)
    return Case(
        "apply_penalties",
        {"batch": batch, "vocab": vocab, "length": length, "dtype": "float32"},
        "in place" if in_place else "wide",
        inputs,
        call,
        4 * (2 * changed + batch * length + batch),
        baselines=baselines,
        agree=_close,
        host=True,
    )


def _repetition(batch: int, vocab: int, length: int) -> Case:
    """Return a case of the repetition penalty alone, in place. vLLM needs masks, which further kernels make."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        drawn = torch.rand(batch, length, device=generator.device, generator=generator) ** 3
        output_ids = (drawn * vocab).int().clamp_(max=vocab - 1)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=generator.device)
        return _logits(generator, batch, vocab), output_ids, lengths

    def call(logits: torch.Tensor, output_ids: torch.Tensor, lengths: torch.Tensor) -> Any:
        penalty = {"repetition_penalty": _REPETITION, "output_ids": output_ids, "sequence_length": lengths}
        return cukern.apply_penalties(logits, **penalty, out=logits)

    def eager(logits: torch.Tensor, output_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        index = output_ids.long()
        x = logits.gather(1, index)
        return logits.scatter_(1, index, torch.where(x > 0, x / _REPETITION, x * _REPETITION))

    def vllm() -> Callable[..., Any]:
        from vllm._custom_ops import apply_repetition_penalties

        def prepare(logits: torch.Tensor, output_ids: torch.Tensor, lengths: torch.Tensor) -> Callable[[], Any]:
            in_output = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, output_ids.long(), True)
            in_prompt = torch.zeros_like(in_output)
            penalties = torch.full((batch,), _REPETITION, device=logits.device)

            def run() -> torch.Tensor:
                apply_repetition_penalties(logits, in_prompt, in_output, penalties)
                return logits

            return run

        return prepare

    return Case(
        "apply_penalties",
        {"batch": batch, "vocab": vocab, "length": length, "penalties": "repetition", "dtype": "float32"},
        "in place",
        inputs,
        call,
        4 * (2 * batch * length + batch * length + batch),
        baselines={"torch": Baseline(lambda: eager)},
        peers={"vLLM": Baseline(vllm, prepared=True)},
        agree=_close,
    )


def _masked(batch: int, vocab: int, length: int) -> Case:
    """Return a case of the repetition penalty alone, in place, from masks of the tokens, as in vLLM."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        drawn = torch.rand(batch, length, device=generator.device, generator=generator) ** 3
        index = (drawn * vocab).long().clamp_(max=vocab - 1)
        logits = _logits(generator, batch, vocab)
        masks = [torch.zeros_like(logits, dtype=torch.bool).scatter_(1, half, True) for half in index.chunk(2, dim=1)]
        return logits, *masks, torch.full((batch,), _REPETITION, device=generator.device)

    def call(logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, penalties: torch.Tensor) -> Any:
        masks = {"prompt_mask": prompt, "output_mask": output}
        return cukern.apply_penalties(logits, repetition_penalty=penalties, **masks, out=logits)

    def eager(
        logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, penalties: torch.Tensor
    ) -> torch.Tensor:
        factor = torch.where(prompt | output, penalties[:, None], 1.0)
        return logits.mul_(torch.where(logits > 0, 1 / factor, factor))

    def vllm() -> Callable[..., Any]:
        from vllm._custom_ops import apply_repetition_penalties

        def run(logits: torch.Tensor, *masks_and_penalties: torch.Tensor) -> torch.Tensor:
            apply_repetition_penalties(logits, *masks_and_penalties)
            return logits

        return run

    return Case(
        "apply_penalties",
        {"batch": batch, "vocab": vocab, "length": length, "penalties": "repetition, by masks", "dtype": "float32"},
        "in place",
        inputs,
        call,
        2 * batch * vocab + 4 * (2 * batch * length + batch),
        baselines={"torch": Baseline(lambda: eager)},
        peers={"vLLM": Baseline(vllm)},
        agree=_close,
    )


def cases() -> list[Case]:
    """Return cases with Llama 3's vocabulary for 64 sequences; the penalties have a history of 512 tokens."""
    return [
        _update(64, 128256),
        _penalties(64, 128256, 512, in_place=False),
        _penalties(64, 128256, 512, in_place=True),
        _repetition(64, 128256, 512),
        _masked(64, 128256, 512),
    ]
