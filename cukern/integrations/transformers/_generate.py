"""A decoding loop whose whole step is one CUDA graph: the model over a static paged cache, and the draw of a token.

What `generate` of transformers spends on the host, several times what the GPU works at a batch of one, happens once for
each size here. The host sees a step's tokens while the next one runs, so that it never holds the GPU up.
"""

from __future__ import annotations

import inspect
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import cukern
from cukern.integrations.transformers import _attention
from cukern.integrations.transformers._cache import CACHE_NAME, CACHE_NAMES, Slots, static_cache
from cukern.integrations.transformers._rewrite import written
from cukern.integrations.transformers._state import ATTRIBUTE, State, running
from cukern.models._steps import StepGraphs, watch
from cukern.runtime import check
from cukern.runtime.progress import progress as progress_bar

#: Tokens by which a cache grows, so that prompts of similar lengths share their graphs.
_CAPACITY = 256
#: Sessions kept of a model, each with its cache and its graph.
_SESSIONS = 4


@dataclass(frozen=True)
class Generated:
    """What `generate` returns."""

    tokens: list[list[int]]  # of each prompt, the new ones, a stop token included
    steps: int  # tokens that were drawn for each prompt, the longest one's
    ready_s: float  # until a step was captured; 0 where one of these sizes is kept
    prefill_s: float  # from there, until the first token was there
    decode_s: float  # for all others
    captured: bool  # whether the steps were replays of a CUDA graph
    why: str  # why they were not; empty if they were

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all prompts per second, from the second one of each on."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class _Sampling:
    """The numbers of a draw that are fixed in a graph."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    stop: tuple[int, ...]


class _Session:
    """The buffers of a batch of one size, its cache, and the graph of its step."""

    def __init__(self, model: Any, batch: int, tokens: int, sampling: _Sampling) -> None:
        device = next(model.parameters()).device
        self.model, self.batch, self.tokens, self.sampling, self.device = model, batch, tokens, sampling, device
        self._count(batch, device)
        found = static_cache(model, tokens, self.counters[0], self.counters[2 + batch :])
        self.why = found if isinstance(found, str) else ""
        self.cache: Any = None
        self.slots: Slots | None = None
        if not isinstance(found, str):
            self.cache, self.slots = found
        self.seen = 0  # tokens in a cache that grows
        self.is_ready = False

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.padding = zeros(batch, 1), zeros(batch, tokens)
        self.mask = zeros(batch, 1, 1, tokens, dtype=torch.bool)
        self.starts, self.finished, self.seed = zeros(batch), zeros(batch, dtype=torch.bool), zeros(1)
        self.rows = torch.arange(batch, device=device)  # of a draw: int64, as its tokens are then
        self.angles: dict[Any, torch.Tensor | None] = {}  # of all positions, by modules of angles and dtypes
        self.stop = torch.tensor(sampling.stop or (-1,), device=device)
        # The cache has a page of free tokens behind each sequence.
        self.mask.__dict__["_cukern_rows"] = _attention.Rows(self.starts, self.lengths, _attention.PAGE)
        self._tables: dict[int, torch.Tensor] = {}
        layers = SimpleNamespace(is_cuda_torch=device.type == "cuda", device=device, host=lambda x: x.numpy())
        self.layers, self.graphs = layers, StepGraphs(layers)  # type: ignore[arg-type]
        if device.type != "cuda":
            self.why = self.why or "the model is on the CPU"
        takes = inspect.signature(written(model)).parameters
        self._takes = {name for name in ("position_ids", "logits_to_keep") if name in takes}
        # A forward that names no cache hands its keywords on.
        self._cache_name = next((name for name in takes if name in CACHE_NAMES), CACHE_NAME)

    def _count(self, batch: int, device: torch.device) -> None:
        """Make what a step counts up, by one kernel: tokens in the cache, those drawn, positions, slots, lengths.

        Only the lengths are int32. A number that is int64 is counted up in its lower half, which does not overflow.
        """
        wide = 2 + 2 * batch
        counts = torch.zeros(2 * wide + batch + batch % 2, dtype=torch.int32, device=device)
        self._counts, self._ones = counts, torch.ones_like(counts)
        self._ones[1 : 2 * wide : 2] = 0
        self.counters, self.lengths = counts[: 2 * wide].view(torch.int64), counts[2 * wide : 2 * wide + batch]
        self.drawn, self.positions = self.counters[1:2], self.counters[2 : 2 + batch, None]

    @property
    def captures(self) -> bool:
        return not self.why

    def block_tables(self, distance: int) -> torch.Tensor:
        """The pages of each sequence where sequences lie `distance` tokens apart: the same in all steps."""
        if distance not in self._tables:
            pages = self.tokens // _attention.PAGE
            self._tables[distance] = _attention.tables(self.starts, distance, pages)
        return self._tables[distance]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The logits [batch, vocab] after the last of these tokens."""
        session = self if self.slots is not None else SimpleNamespace(mask=None, tokens=0)
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: options[name] for name in self._takes} | {self._cache_name: self.cache}
        with running(session):
            out = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        if self.slots is None:
            self.cache = getattr(out, self._cache_name)
        logits: torch.Tensor = out.logits
        return logits[:, -1]

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw a token of each sequence, and note which are finished."""
        own = self.sampling
        # A configuration may name tokens that the vocabulary does not have.
        stop = [x for x in own.stop if x < logits.shape[1]]
        ends: dict[str, Any] = {"finished": self.finished, "end_id": stop[0]} if stop else {}
        cukern.sample(
            logits.contiguous(), temperature=own.temperature, top_k=own.top_k, top_p=own.top_p, min_p=own.min_p,
            seed=self.seed, offset=self.drawn, indices=self.rows, out=self.token.view(-1), **ends,
        )  # fmt: skip
        if len(stop) > 1:
            self.finished |= torch.isin(self.token[:, 0], self.stop)

    def ready(self) -> None:
        """Run two steps of an empty cache, the second one captured: kernels load, and products choose, only once."""
        if self.device.type != "cuda" or self.is_ready:
            return
        self.is_ready = True
        if self.captures:
            self._clear()
            self._follow(0)
            self.run()
            self.run()

    def _clear(self) -> None:
        for buffer in (self.mask, self.finished, self._counts, self.token, self.starts):
            buffer.zero_()
        self.padding.fill_(1)

    def _follow(self, count: int) -> None:
        """Let steps follow `count` tokens of each sequence: the lengths of a step have its own token in them."""
        if self.slots is not None:
            self.slots.follow(count)
            self.lengths += 1

    def prefill(self, ids: torch.Tensor, padding: torch.Tensor, seed: int) -> None:
        """Begin anew: run the prompts, padded on the left, and draw the first token of each."""
        count = ids.shape[1]
        self._clear()
        self.seed.fill_(seed)
        positions = (padding.cumsum(1) - 1).clamp(min=0)
        self.padding[:, :count] = padding
        self.mask[:, 0, 0, :count] = padding.bool()
        self.starts.copy_(count - padding.sum(1))
        self.lengths.copy_(padding.sum(1))
        self.positions.copy_(positions[:, -1:] + 1)
        for distance, table in self._tables.items():
            table.copy_(_attention.tables(self.starts, distance, table.shape[1]))
        self.seen = count
        if self.slots is None:
            self.cache = None  # the model makes its own
        else:
            self.slots.begin(count)
        logits = self._forward(ids, positions, padding)
        self._draw(logits)
        self.drawn += 1
        self._follow(count)

    def step(self) -> None:
        """Run the token that was drawn last, and draw the next one."""
        mask = self.padding
        if self.slots is not None:
            self.mask.index_fill_(3, self.slots.places, True)
        else:
            self.seen += 1
            mask = self.padding[:, : self.seen]
        self._draw(self._forward(self.token, self.positions, mask))
        self._counts += self._ones

    def run(self) -> None:
        """A step, as a graph where it can be one."""
        if not self.captures:
            self.step()
            return
        try:
            self.graphs.run("step", self.step)
        except RuntimeError as error:
            # Of a capture: what it would have launched has not run.
            self.why = f"its step cannot be captured ({str(error).splitlines()[0]})"
            warnings.warn(f"generate: {self.why}", stacklevel=3)
            torch.cuda.synchronize(self.device)
            self.step()


# --- arguments ------------------------------------------------------------------------------------------


def _prompts(prompts: Any, attention_mask: Any, pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and padding int64 [batch, tokens], padded on the left."""
    if not isinstance(prompts, torch.Tensor):
        if attention_mask is not None:
            check.fail("attention_mask", "None with prompts of their own lengths", type(attention_mask).__name__)
        if not isinstance(prompts, Iterable):
            check.fail("prompts", "a tensor or a sequence of prompts", type(prompts).__name__, TypeError)
        rows = [torch.as_tensor(x, dtype=torch.int64).flatten() for x in prompts]
        if not rows or min(map(len, rows)) < 1:
            check.fail("prompts", "of at least one prompt, each of at least one token", [len(x) for x in rows])
        longest = max(map(len, rows))
        ids = torch.stack([torch.cat([x.new_full((longest - len(x),), pad), x]) for x in rows])
        padding = torch.stack([torch.arange(longest) >= longest - len(x) for x in rows]).long()
        return ids.to(device), padding.to(device)
    if prompts.dim() != 2 or prompts.is_floating_point() or 0 in prompts.shape:
        check.fail("prompts", "integers of shape [batch, tokens], none of them 0", list(prompts.shape))
    ids = prompts.to(device, torch.int64)
    if attention_mask is None:
        return ids, torch.ones_like(ids)
    if tuple(attention_mask.shape) != tuple(ids.shape):
        check.fail("attention_mask", f"of the shape of prompts, {list(ids.shape)}", list(attention_mask.shape))
    padding = (attention_mask.to(device) != 0).long()
    if not bool((padding.diff(dim=1) >= 0).all()) or not bool(padding[:, -1].all()):
        check.fail("attention_mask", "of prompts that are padded on the left alone", "zeros elsewhere")
    return ids, padding


def _stop_tokens(model: Any, given: Any) -> tuple[int, ...]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None) if given == "model" else given
    if found is None:
        return ()
    many = [found] if isinstance(found, int) else list(found)
    return tuple(check.integer("eos_token_id", x, 0) for x in many)


def _session(state: State | None, model: Any, batch: int, tokens: int, sampling: _Sampling) -> _Session:
    """A session for these sizes: a kept one if there is one."""
    tokens = -(-(tokens + _attention.PAGE) // _CAPACITY) * _CAPACITY
    if state is None:
        return _Session(model, batch, tokens, sampling)
    # A graph has the addresses of the weights.
    places = hash(tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers())))
    if state.places != places:
        state.sessions.clear()
        state.places = places
    key = batch, tokens, sampling
    found = state.sessions.pop(key, None)
    while len(state.sessions) >= _SESSIONS:
        del state.sessions[next(iter(state.sessions))]
    state.sessions[key] = found or _Session(model, batch, tokens, sampling)
    return state.sessions[key]  # type: ignore[no-any-return]


def _check_model(model: Any) -> State | None:
    if not isinstance(model, PreTrainedModel):
        check.fail("model", "a PreTrainedModel of transformers", type(model).__name__, TypeError)
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        check.fail("model", "a decoder that can generate", type(model).__name__)
    if model.training:
        check.fail("model", "in evaluation mode (model.eval())", "one in training mode")
    state = model.__dict__.get(ATTRIBUTE)
    if state is None:
        warnings.warn(
            "the model is not enabled: its own kernels run (cukern.integrations.transformers.enable)", stacklevel=3
        )
    return state  # type: ignore[no-any-return]


@torch.no_grad()
def generate(
    model: Any,
    prompts: torch.Tensor | Sequence[Any],
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | str | None = "model",
    pad_token_id: int = 0,
    on_token: Callable[[int, NDArray[np.int64]], Any] | None = None,
    progress: bool | None = False,
) -> Generated:
    """Decode with a model of transformers, each step one CUDA graph.

    Args:
        model: a decoder that was enabled. Its steps are captured where its cache is one of keys and values alone;
            elsewhere, and on a CPU, the same loop runs without a graph, and `Generated.why` says so.
        prompts: token ids [batch, tokens], or a sequence of prompts of any lengths.
        attention_mask: [batch, tokens] of a tensor of prompts that is padded on the left: 0 where it is.
        max_new_tokens: of each prompt.
        temperature: of the draws; 0 takes the largest logit.
        top_k, top_p, min_p, seed: as in `cukern.sample`.
        eos_token_id: the tokens that end a sequence: "model" takes those of its generation_config, None has none.
        pad_token_id: what short prompts are padded with; no result depends on it.
        on_token: called with each step's number and its tokens int64 [batch], one step after they were drawn. Once it
            returns False, generation ends.
        progress: show a bar; None: on a terminal.

    Returns:
        The new tokens of each prompt, and the times.

    Raises:
        TypeError: for what is no model of transformers, or no prompts.
        ValueError: a model that cannot generate by itself or is in training mode, or numbers that do not fit.

    A session, with its cache and its graph, is kept with the model for the four latest sizes: batch, prompt with new
    tokens in steps of 256, and numbers of the draw. `disable` frees them.
    """
    state = _check_model(model)
    device = next(model.parameters()).device
    most = check.integer("max_new_tokens", max_new_tokens, 1, 2**24)
    ids, padding = _prompts(prompts, attention_mask, pad_token_id, device)
    stop = _stop_tokens(model, eos_token_id)
    sampling = _Sampling(float(check.number("temperature", temperature)), top_k, top_p, min_p, stop)
    own = _session(state, model, ids.shape[0], ids.shape[1] + most, sampling)
    seed = check.integer("seed", seed, 0, 2**63 - 1)
    return _decode(own, ids, padding, seed, most, on_token, progress)


def _decode(
    own: _Session, ids: torch.Tensor, padding: torch.Tensor, seed: int, most: int, on_token: Any, progress: bool | None
) -> Generated:
    columns: list[NDArray[np.int64]] = []
    seen, ended = watch(own.layers), False  # type: ignore[arg-type]
    times = [time.perf_counter()]

    def passed() -> None:
        if own.device.type == "cuda":
            torch.cuda.synchronize(own.device)
        times.append(time.perf_counter())

    own.ready()
    passed()
    own.prefill(ids, padding, seed)
    passed()

    def take(found: Iterable[Any]) -> bool:
        """Keep the tokens of steps that can be seen; whether generation ends."""
        end = False
        for step, (tokens, finished) in found:
            columns.append(tokens[:, 0])
            advance(1)
            end |= on_token is not None and on_token(step, tokens[:, 0]) is False
            end |= bool(own.sampling.stop) and bool(finished.all())
        return end

    with progress_bar("generating", most, progress) as advance:
        for step in range(most):
            if step:
                own.run()
            ended = take(seen.after(step, [own.token, own.finished]))
            if ended:
                break
        if not ended:
            take(seen.rest())
    times.append(time.perf_counter())
    ready_s, prefill_s, decode_s = (after - before for before, after in itertools.pairwise(times))
    rows = np.stack(columns, axis=1)
    tokens = [_until(row.tolist(), own.sampling.stop) for row in rows]
    steps = max(map(len, tokens))
    return Generated(tokens, steps, ready_s, prefill_s, decode_s, own.captures, own.why)


def _until(tokens: list[int], stop: tuple[int, ...]) -> list[int]:
    """The tokens up to the first that stops, which is kept."""
    end = next((i for i, x in enumerate(tokens) if x in stop), len(tokens))
    return tokens[: end + 1]
