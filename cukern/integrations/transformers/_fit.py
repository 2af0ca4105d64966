"""Whether a session gives what a model gives: found by running both on random tokens, and by what the model says."""

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

#: Kinds of rotary embeddings whose angles depend on the position alone.
_FIXED_ROPE = "default", "linear", "llama3", "proportional", "yarn"
#: The lengths of the prompts that are run, and how many of each.
_LENGTHS, _ROWS = (6, 4), 2
#: The tokens of the session: far more than it runs, as in a generation, so that what goes by the end of a cache shows.
_TOKENS = 1024
#: The largest difference of a session's logits from the model's, as a share of their spread.
_BOUND_OF_32_BITS = 1e-3
_BOUND_OF_16_BITS = 0.1
#: The least difference of a token's logits where it sees later tokens, as a share of their spread.
_SEEN = 1e-2
#: What a forward raises that cannot take what a session gives it.
_REFUSALS = (
    ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Fit(NamedTuple):
    """What a session can do for a model."""

    why: str  # why it serves none of its prompts; empty if it does
    pads: bool  # whether it serves prompts of several lengths
    sees_later: bool = False  # whether tokens see later ones, so that the model is an encoder


_known: weakref.WeakKeyDictionary[Any, dict[bool, Fit]] = weakref.WeakKeyDictionary()


def fit(model: Any) -> Fit:
    """What a session can do for a model. The answer is kept, one before `enable` and one after it."""
    found = _known.setdefault(model, {})
    enabled = ATTRIBUTE in model.__dict__
    if enabled not in found:
        found[enabled] = _measured(model)
    return found[enabled]


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The median over the rows of a relative distance."""
    spread = (wanted - wanted.mean(1, keepdim=True)).norm(dim=1)
    return float(((got - wanted).norm(dim=1) / spread.clamp(min=1e-30)).nan_to_num(float("inf")).median())


def _distance_of(model: Any, batches: list[torch.Tensor]) -> float:
    """How far a session is from the model in the logits after prompts, and after one token more.

    Prompts of one length are a batch of the model; the session has all of them in one.
    """
    prompts = [x for batch in batches for x in batch]
    session = Session(model, len(prompts), _TOKENS, Sampling())
    logits = [session.prefill(prompts, 0, [0] * len(prompts)).float()]
    drawn = session.token.clone()
    logits.append(session.advance().float())
    worst = 0.0
    for i, batch in enumerate(batches):
        own = slice(i * _ROWS, (i + 1) * _ROWS)
        for got, ids in zip(logits, (batch, torch.cat([batch, drawn[own]], 1)), strict=True):
            # Stock hands positions to a forward that takes them.
            places = {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)}
            options = places if "position_ids" in session.takes else {}
            wanted = model(input_ids=ids, use_cache=False, **options).logits[:, -1].float()
            worst = max(worst, _distance(got[own], wanted))
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
    batches = [torch.randint(vocab, (_ROWS, count), generator=generator).to(device) for count in _LENGTHS]
    alone = _tried(model, batches[:1])
    if isinstance(alone, str):
        return Fit(f"its forward does not take a static cache ({alone})", False, sees)
    bound = _BOUND_OF_32_BITS if model.dtype in (torch.float32, torch.float64) else _BOUND_OF_16_BITS
    if alone > bound:
        return Fit("its steps over a static cache give other logits than its forward without one", False, sees)
    padded = _tried(model, batches)
    return Fit("", not isinstance(padded, str) and padded <= bound, sees)


def _tried(model: Any, batches: list[torch.Tensor]) -> float | str:
    """The distance, or what the forward raises that does not take what a session gives it."""
    try:
        return _distance_of(model, batches)
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sees_later(model: Any) -> bool:
    """Whether the logits of a token depend on the ones after it, of a model that says it is no decoder."""
    if getattr(model.config, "is_decoder", None) is not False:
        return False
    device = next(model.parameters()).device
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], device=device)
    logits = model(input_ids=ids).logits[:, 1].float()
    return _distance(logits[:1], logits[1:]) > _SEEN


# --- what a model says ----------------------------------------------------------------------------------


def _named(numbers: Any, name: str) -> Iterator[int]:
    """The values of a name in nested dicts."""
    for key, value in numbers.items() if isinstance(numbers, dict) else ():
        if key == name and isinstance(value, int):
            yield value
        yield from _named(value, name)


def positions(model: Any) -> int | None:
    """The tokens that a model has positions for; None where its configuration does not say."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def drops_seen_tokens(model: Any, tokens: int) -> bool:
    """Whether the model's own cache drops some of `tokens` that no mask of a window hides."""
    layers = StaticCache(config=model.config, max_cache_len=tokens).layers
    if all(type(x) is not StaticSlidingWindowLayer or x.max_cache_len >= tokens for x in layers):
        return False
    names = set().union(*(read_names(module) for module in model.modules()))
    return not any("sliding" in name or "chunked" in name or "masks" in name for name in names)


def rope_limit(model: Any) -> int | None:
    """The length past which a rotary embedding depends on the length seen; None: it never does."""
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
    """Whether a rotary embedding of the model remembers the longest sequence that it has seen."""
    kinds = [getattr(x, "rope_type", None) for x in model.modules()]
    return any("dynamic" in str(kind) for kind in kinds)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or (type(one) is type(other) and one == other)


def prepares_alike(model: Any, prompt: int, most: int) -> bool:
    """Whether the model's own `prepare_inputs_for_generation` agrees with the common one at all these lengths."""
    common = GenerationMixin.prepare_inputs_for_generation
    if type(model).prepare_inputs_for_generation is common:
        return True
    for length in range(prompt, prompt + most):
        seen = 0 if length == prompt else length - 1
        cache = SimpleNamespace(get_seq_length=lambda *_, seen=seen: seen)
        ids = torch.arange(length)[None]
        given: dict[str, Any] = {
            "next_sequence_length": None if length == prompt else 1, "is_first_iteration": length == prompt,
            "attention_mask": torch.ones_like(ids), "position_ids": ids, "use_cache": True, CACHE_NAME: cache,
        }  # fmt: skip
        try:
            own, wanted = (f(model, ids, **given) for f in (type(model).prepare_inputs_for_generation, common))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        own = {name: x for name, x in own.items() if x is not None and (name, x) != ("logits_to_keep", 0)}
        if own.keys() != wanted.keys() or not all(_is_alike(own[name], wanted[name]) for name in own):
            return False
    return True
