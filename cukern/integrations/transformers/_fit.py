"""Check on random tokens whether a session, with its static cache, gives the same results as the model's own code."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

from cukern.integrations.transformers import _attention
from cukern.integrations.transformers._cache import CACHE_NAME, static_cache
from cukern.integrations.transformers._options import Sampling
from cukern.integrations.transformers._rewrite import read_names
from cukern.integrations.transformers._session import Session
from cukern.integrations.transformers._state import ATTRIBUTE

#: The types of rotary embeddings whose angles depend only on the position.
_FIXED_ROPE = "default", "linear", "llama3", "proportional", "yarn"
_LENGTHS, _PROMPTS_PER_LENGTH = (6, 4), 2
#: The cache is much longer than the prompts, so that the check notices results that depend on its length.
_CACHE_TOKENS = 1024
#: The largest allowed `_distance` between the logits of the session and of the model.
_BOUND_OF_32_BITS = 1e-3
_BOUND_OF_16_BITS = 0.1
#: A token attends to later tokens if they change its logits by at least this `_distance`.
_CAUSAL_BOUND = 1e-2
#: Errors of a `forward` that cannot run in a session.
_REFUSALS = (
    ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Fit(NamedTuple):
    """Whether a session can run a model, and whether it can run prompts of different lengths in one batch."""

    why: str  # why a session cannot run the model; empty if it can
    pads: bool  # whether a batch may have prompts of different lengths
    sees_later: bool = False  # whether tokens attend to later tokens


_known: weakref.WeakKeyDictionary[Any, dict[bool, Fit]] = weakref.WeakKeyDictionary()


def fit(model: Any) -> Fit:
    """Check a model. Cache one result for the enabled model, and one for the original model."""
    found = _known.setdefault(model, {})
    enabled = ATTRIBUTE in model.__dict__
    if enabled not in found:
        found[enabled] = _measured(model)
    return found[enabled]


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median over the rows of ||got - wanted|| / ||wanted - mean(wanted)||, for logits [rows, vocab]."""
    spread = (wanted - wanted.mean(1, keepdim=True)).norm(dim=1)
    return float(((got - wanted).norm(dim=1) / spread.clamp(min=1e-30)).nan_to_num(float("inf")).median())


def _distance_of(model: Any, batches: list[torch.Tensor]) -> float:
    """Return the distance between the logits of a session and of the model, after the prompts and one more token.

    The session runs all prompts together. The model runs one batch, whose prompts have the same length, at a time.
    """
    prompts = [x for batch in batches for x in batch]
    session = Session(model, len(prompts), _CACHE_TOKENS, Sampling())
    logits = [session.prefill(prompts, 0, [0] * len(prompts)).float()]
    sampled = session.token.clone()
    logits.append(session.advance().float())
    worst = 0.0
    for i, batch in enumerate(batches):
        rows = slice(i * _PROMPTS_PER_LENGTH, (i + 1) * _PROMPTS_PER_LENGTH)
        for got, ids in zip(logits, (batch, torch.cat([batch, sampled[rows]], 1)), strict=True):
            position_ids = {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)}
            options = position_ids if "position_ids" in session.parameter_names else {}
            wanted = model(input_ids=ids, use_cache=False, **options).logits[:, -1].float()
            worst = max(worst, _distance(got[rows], wanted))
    return worst


@torch.no_grad()
def _measured(model: Any) -> Fit:
    device = next(model.parameters()).device
    counters = torch.zeros(3, dtype=torch.int64, device=device)
    sees = _sees_later(model)
    if isinstance(why := static_cache(model, _attention.PAGE, counters[0], counters[1:]), str):
        return Fit(why, False, sees)
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(vocab, (_PROMPTS_PER_LENGTH, count), generator=generator).to(device) for count in _LENGTHS]
    unpadded = _tried(model, batches[:1])
    if isinstance(unpadded, str):
        return Fit(f"its forward does not take a static cache ({unpadded})", False, sees)
    bound = _BOUND_OF_32_BITS if model.dtype in (torch.float32, torch.float64) else _BOUND_OF_16_BITS
    if unpadded > bound:
        return Fit("its steps over a static cache give other logits than its forward without one", False, sees)
    padded = _tried(model, batches)
    return Fit("", not isinstance(padded, str) and padded <= bound, sees)


def _tried(model: Any, batches: list[torch.Tensor]) -> float | str:
    try:
        return _distance_of(model, batches)
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sees_later(model: Any) -> bool:
    """Return whether logits depend on later tokens, in a model with the configuration `is_decoder=False`."""
    if getattr(model.config, "is_decoder", None) is not False:
        return False
    device = next(model.parameters()).device
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], device=device)
    logits = model(input_ids=ids).logits[:, 1].float()
    return _distance(logits[:1], logits[1:]) > _CAUSAL_BOUND


def _named(numbers: Any, name: str) -> Iterator[int]:
    for key, value in numbers.items() if isinstance(numbers, dict) else ():
        if key == name and isinstance(value, int):
            yield value
        yield from _named(value, name)


def positions(model: Any) -> int | None:
    """Return max_position_embeddings, or None if the configuration does not have it."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def drops_seen_tokens(model: Any, tokens: int) -> bool:
    """Return whether the model's own cache drops tokens that the model would attend to in a session."""
    layers = StaticCache(config=model.config, max_cache_len=tokens).layers
    if all(type(x) is not StaticSlidingWindowLayer or x.max_cache_len >= tokens for x in layers):
        return False
    names = set().union(*(read_names(module) for module in model.modules()))
    return not any("sliding" in name or "chunked" in name or "masks" in name for name in names)


def rope_limit(model: Any) -> int | None:
    """Return the length above which a rotary embedding depends on the sequence length, or None."""
    limits: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = [*kinds.values()] if isinstance(kinds, dict) else [kinds]
        config = getattr(module, "config", None)
        if config is None or all(kind is None or kind in _FIXED_ROPE for kind in kinds):
            continue
        numbers = getattr(config, "rope_parameters", None)
        limits += _named(numbers, "original_max_position_embeddings")
        limits += [x for x in (getattr(config, "max_position_embeddings", None),) if x is not None]
    return min(limits, default=None)


def is_dynamic(model: Any) -> bool:
    """Return whether a rotary embedding has a "dynamic" type, which remembers the longest sequence."""
    kinds = [getattr(x, "rope_type", None) for x in model.modules()]
    return any("dynamic" in str(kind) for kind in kinds)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or (type(one) is type(other) and one == other)


def prepares_default_inputs(model: Any, prompt: int, steps: int) -> bool:
    """Return whether the model prepares the inputs of a step as transformers' default does."""
    default = GenerationMixin.prepare_inputs_for_generation
    if type(model).prepare_inputs_for_generation is default:
        return True
    for length in range(prompt, prompt + steps):
        seen = 0 if length == prompt else length - 1
        cache = SimpleNamespace(get_seq_length=lambda *_, seen=seen: seen)
        ids = torch.arange(length)[None]
        given: dict[str, Any] = {
            "next_sequence_length": None if length == prompt else 1, "is_first_iteration": length == prompt,
            "attention_mask": torch.ones_like(ids), "position_ids": ids, "use_cache": True, CACHE_NAME: cache,
        }  # fmt: skip
        try:
            inputs, wanted = (f(model, ids, **given) for f in (type(model).prepare_inputs_for_generation, default))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        inputs = {name: x for name, x in inputs.items() if x is not None and (name, x) != ("logits_to_keep", 0)}
        if inputs.keys() != wanted.keys() or not all(_is_equal(inputs[name], wanted[name]) for name in inputs):
            return False
    return True
