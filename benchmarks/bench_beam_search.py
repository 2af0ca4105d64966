"""Time beam search beside its floor and compositions of torch operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case

_ITEM_SIZE = {"float32": 4, "bfloat16": 2}
_END = 2
_MAX_STEPS = 128
_STEP = 20


def eager_topk(log_probs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k best continuations of all beams."""
    values, ids = log_probs.flatten(1).topk(k, dim=1)
    return values.float(), ids.int()


def eager_step(
    log_probs: torch.Tensor,
    scores: torch.Tensor,
    finished_scores: torch.Tensor,
    finished_lengths: torch.Tensor,
    finished_ids: torch.Tensor,
    finished_parents: torch.Tensor,
    done: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Compute a step as transformers does, with one end token and a length penalty of 1."""
    _, beams, vocab = log_probs.shape
    length = _STEP + 1
    totals = (log_probs.float() + scores[:, :, None]).flatten(1)
    totals, candidates = totals.topk(2 * beams, dim=1)
    tokens, parents = candidates % vocab, candidates // vocab
    ends = tokens == _END
    running = torch.where(ends, float("-inf"), totals).topk(beams, dim=1)
    finishing = ends[:, :beams] & ~done[:, None]
    ended = torch.where(finishing, totals[:, :beams] / length, float("-inf"))
    pool = torch.cat([finished_scores, ended], dim=1).topk(beams, dim=1)
    lengths = torch.where(finishing, length, 0)
    new = [
        torch.cat([old, added.int()], dim=1).gather(1, pool.indices)
        for old, added in (
            (finished_lengths, lengths),
            (finished_ids, tokens[:, :beams]),
            (finished_parents, parents[:, :beams]),
        )
    ]
    full = (new[0] > 0).all(dim=1)
    done = done | (full & (running.values[:, 0] / length <= pool.values[:, -1]))
    ids, parents = (x.gather(1, running.indices).int() for x in (tokens, parents))
    return ids, parents, running.values, pool.values, *new, done


def eager_tree(ids: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Walk back from the last step, without filling the steps after the end."""
    out = torch.empty_like(ids)
    beam = torch.arange(ids.shape[2], device=ids.device).expand(ids.shape[1:])
    for step in range(len(ids) - 1, -1, -1):
        torch.gather(ids[step], 1, beam, out=out[step])
        beam = parents[step].gather(1, beam).long()
    return out


def eager_caches(keys: torch.Tensor, values: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorder both caches by index_select."""
    batch, beams = parents.shape
    rows = (parents + beams * torch.arange(batch, device=parents.device)[:, None]).flatten()
    return keys.index_select(1, rows), values.index_select(1, rows)


def _compiled(function: Callable[..., Any]) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _same_values(ours: Any, theirs: Any) -> bool:
    return torch.equal(ours[0], theirs[0])


def _same_step(ours: Any, theirs: Any) -> bool:
    return all(torch.allclose(a.float(), b.float(), rtol=1e-5) for a, b in zip(ours[:4], theirs[:4], strict=True))


def _same(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    return all(torch.equal(a, b) for a, b in pairs)


def _log_probs(generator: torch.Generator, batch: int, beams: int, vocab: int, dtype: str) -> torch.Tensor:
    logits = 3 * torch.randn(batch, beams, vocab, device=generator.device, generator=generator)
    return logits.sub_(logits.logsumexp(dim=-1, keepdim=True)).to(getattr(torch, dtype))


def _topk(batch: int, beams: int, vocab: int, topk: int, dtype: str, compiled: bool = False) -> Case:
    baselines = {"torch": Baseline(lambda: lambda log_probs: eager_topk(log_probs, topk))}
    if compiled:
        baselines["torch.compile"] = _compiled(lambda log_probs: eager_topk(log_probs, topk))
    return Case(
        "beam_topk",
        {"batch": batch, "beams": beams, "vocab": vocab, "topk": topk, "dtype": dtype},
        "narrow" if topk <= 16 else "wide",
        lambda generator: (_log_probs(generator, batch, beams, vocab, dtype),),
        lambda log_probs: cukern.beam_topk(log_probs, topk),
        batch * (beams * vocab * _ITEM_SIZE[dtype] + topk * 8),
        baselines=baselines,
        agree=_same_values,
        host=batch == 1,
    )


def _step(batch: int, beams: int, vocab: int) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        scores = -torch.rand(batch, beams, device=device, generator=generator).sort(dim=1).values
        pool = torch.full((batch, beams), float("-inf"), device=device)
        zeros = (torch.zeros(batch, beams, dtype=torch.int32, device=device) for _ in range(3))
        done = torch.zeros(batch, dtype=torch.bool, device=device)
        return _log_probs(generator, batch, beams, vocab, "float32"), scores, pool, *zeros, done

    return Case(
        "beam_search_step",
        {"batch": batch, "beams": beams, "vocab": vocab, "dtype": "float32"},
        "narrow",
        inputs,
        lambda *args: cukern.beam_search_step(*args, _STEP, _MAX_STEPS, _END),
        # The state: five words per beam are read and seven written, and a byte per batch entry.
        batch * (beams * (vocab * 4 + 12 * 4) + 2),
        baselines={"torch": Baseline(lambda: eager_step), "torch.compile": _compiled(eager_step)},
        agree=_same_step,
        host=True,
    )


def _tree(max_steps: int, batch: int, beams: int) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        make = lambda high: torch.randint(  # noqa: E731
            high, (max_steps, batch, beams), dtype=torch.int32, device=generator.device, generator=generator
        )
        return make(32000), make(beams)

    return Case(
        "gather_tree",
        {"length": max_steps, "batch": batch, "beams": beams},
        "dynamic",
        inputs,
        lambda ids, parents: cukern.gather_tree(ids, parents, None, -1),
        3 * 4 * max_steps * batch * beams,
        baselines={"torch": Baseline(lambda: eager_tree)},
        agree=_same,
        host=True,
    )


def _caches(length: int, batch: int, beams: int, heads: int, head_dim: int) -> Case:
    shape = (length, batch * beams, heads, head_dim)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        caches = (torch.randn(shape, device=device, generator=generator).bfloat16() for _ in range(2))
        parents = torch.randint(beams, (batch, beams), dtype=torch.int32, device=device, generator=generator)
        return *caches, parents

    return Case(
        "update_kv_cache",
        {"length": length, "batch": batch, "beams": beams, "heads": heads, "head_dim": head_dim, "dtype": "bfloat16"},
        "vector",
        inputs,
        lambda keys, values, parents: cukern.update_kv_cache(keys, values, parents, length),
        2 * 2 * 2 * length * batch * beams * heads * head_dim,
        baselines={"torch": Baseline(lambda: eager_caches)},
        agree=_same,
        host=True,
    )


def cases() -> list[Case]:
    """Return cases: Llama 3's vocabulary for 32 requests of 4 beams, a small call, and the functions after a step."""
    return [
        _topk(32, 4, 128256, 4, "float32", compiled=True),
        _topk(32, 4, 128256, 8, "float32"),
        _topk(32, 4, 128256, 4, "bfloat16"),
        _topk(32, 4, 50257, 4, "float32"),
        _topk(1, 4, 32000, 4, "float32"),
        _step(32, 4, 128256),
        _tree(_MAX_STEPS, 32, 4),
        _caches(512, 8, 4, 16, 64),
    ]
