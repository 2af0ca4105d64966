"""Check whether a session gives the same results as a model.

A session runs steps over a static cache. The check runs the session and the model on random tokens, and reads
properties of the model.
"""

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

#: Kinds of rotary embeddings whose angles depend only on the position.
_FIXED_ROPE = "default", "linear", "llama3", "proportional", "yarn"
#: The lengths of the test prompts, and the number of prompts of each length.
_LENGTHS, _ROWS = (6, 4), 2
#: The cache length of the tested session. It is much longer than needed, to detect a dependence on the cache length.
_TOKENS = 1024
#: Largest allowed difference between the session's and the model's logits, relative to the spread of the logits.
_BOUND_OF_32_BITS = 1e-3
_BOUND_OF_16_BITS = 0.1
#: If later tokens change the logits of a token by at least this, relative to their spread, the token attends to them.
_SEEN = 1e-2
#: Exceptions of a forward that cannot handle the arguments that a session passes.
_REFUSALS = (
    ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Fit(NamedTuple):
    """What a session can do for a model."""

    why: str  # why a session cannot serve the model; empty if it can
    pads: bool  # whether a session serves prompts of several lengths
    sees_later: bool = False  # whether tokens attend to later ones, so that the model is an encoder


_known: weakref.WeakKeyDictionary[Any, dict[bool, Fit]] = weakref.WeakKeyDictionary()


def fit(model: Any) -> Fit:
    """Return what a session can do for a model. The result is cached, separately for the enabled model."""
    found = _known.setdefault(model, {})
    enabled = ATTRIBUTE in model.__dict__
    if enabled not in found:
        found[enabled] = _measured(model)
    return found[enabled]


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference of two rows of logits, relative to their spread: the median over the rows."""
    spread = (wanted - wanted.mean(1, keepdim=True)).norm(dim=1)
    return float(((got - wanted).norm(dim=1) / spread.clamp(min=1e-30)).nan_to_num(float("inf")).median())


def _distance_of(model: Any, batches: list[torch.Tensor]) -> float:
    """Return the distance between a session's and the model's logits, after prompts and after one more token.

    The model runs each length of prompts as a batch; the session runs all prompts in one batch.
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
            # transformers passes positions to a forward that takes them.
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
    """Return the distance, or the error message if the model's forward cannot handle what a session passes."""
    try:
        return _distance_of(model, batches)
    except torch.OutOfMemoryError:
        raise
    except _REFUSALS as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sees_later(model: Any) -> bool:
    """Return whether a token's logits depend on later tokens, for a model whose configuration says it is no decoder."""
    if getattr(model.config, "is_decoder", None) is not False:
        return False
    device = next(model.parameters()).device
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]], device=device)
    logits = model(input_ids=ids).logits[:, 1].float()
    return _distance(logits[:1], logits[1:]) > _SEEN


# --- properties of a model ------------------------------------------------------------------------------


def _named(numbers: Any, name: str) -> Iterator[int]:
    """Yield the values of a key in nested dicts."""
    for key, value in numbers.items() if isinstance(numbers, dict) else ():
        if key == name and isinstance(value, int):
            yield value
        yield from _named(value, name)


def positions(model: Any) -> int | None:
    """Return the number of positions of a model; None if its configuration does not say."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def drops_seen_tokens(model: Any, tokens: int) -> bool:
    """Return whether the model's own cache would drop tokens that the model's masks do not hide.

    A session keeps all `tokens` tokens, so it would give other results for such a model.
    """
    layers = StaticCache(config=model.config, max_cache_len=tokens).layers
    if all(type(x) is not StaticSlidingWindowLayer or x.max_cache_len >= tokens for x in layers):
        return False
    names = set().union(*(read_names(module) for module in model.modules()))
    return not any("sliding" in name or "chunked" in name or "masks" in name for name in names)


def rope_limit(model: Any) -> int | None:
    """Return the length above which a rotary embedding depends on the sequence length; None if it never does."""
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
    """Return whether a rotary embedding of the model remembers the longest sequence so far."""
    kinds = [getattr(x, "rope_type", None) for x in model.modules()]
    return any("dynamic" in str(kind) for kind in kinds)


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or (type(one) is type(other) and one == other)


def prepares_alike(model: Any, prompt: int, most: int) -> bool:
    """Return whether the model's `prepare_inputs_for_generation` gives the same inputs as transformers' default one."""
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
