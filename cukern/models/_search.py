"""Searches: buffers of one size, in which a step is made of launches alone.

A step reads and writes static buffers and asks the host for nothing, so that it can be captured. The position of a step
is a number of the host, which the ops take as one: a captured graph is that of its position.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import Layers
from cukern.models._seq2seq import Seq2Seq, Source
from cukern.models.generation import Settings
from cukern.ops.beam_search import beam_search_step, gather_tree, update_kv_cache
from cukern.ops.decoding import apply_penalties, stop_words_criterion
from cukern.ops.sampling import sample

#: The log-probability of what is no hypothesis yet, as in transformers.
_NOTHING = -1e9


def _words_array(words: tuple[tuple[int, ...], ...], layers: Layers) -> Any:
    """Words in FasterTransformer's layout; None without any."""
    if not words:
        return None
    ids = [x for word in words for x in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return layers.put(np.array([ids, ends + [-1] * (len(ids) - len(ends))], np.int32))


class Found(NamedTuple):
    """The tokens of a search, in host memory."""

    tokens: np.ndarray[Any, Any]  # int32 [sequences, length], the start token first, padded
    lengths: np.ndarray[Any, Any]  # int32 [sequences], the start token counted
    scores: np.ndarray[Any, Any] | None  # float32 [sequences], of beams


class Search:
    """What all searches share: caches and memories for `batch * copies` rows, and the processing of scores."""

    def __init__(self, model: Seq2Seq, settings: Settings, batch: int, memory_len: int, dtype: str) -> None:
        self.model, self.settings, self.batch, self.memory_len = model, settings, batch, memory_len
        self.layers, config = model.layers, model.config
        self.rows = batch * settings.copies
        heads, full = config.decoder_heads, self.layers.full
        head = (heads, config.hidden // heads)
        cache, memory = (settings.steps, self.rows, *head), (self.rows, memory_len, *head)
        count = range(config.decoder_layers)
        self.caches = [(full(cache, 0, dtype), full(cache, 0, dtype)) for _ in count]
        self.memories = [(full(memory, 0, dtype), full(memory, 0, dtype)) for _ in count]
        self.memory_lengths = full((self.rows,), 0, "int32")
        self.words = full((self.rows,), settings.start, "int32")
        self.history = full((self.rows, settings.max_length), settings.start, "int32")
        self.lengths = full((self.rows,), 1, "int32")
        self.one = full((self.rows,), 1, "int32")
        self.bad_words = _words_array(settings.bad_words, self.layers)
        self.finished: Any = None

    def start(self, source: Source, seeds: np.ndarray[Any, Any]) -> None:
        """Encode the sources, and put everything where the first step wants it."""
        settings, layers, copies = self.settings, self.layers, self.settings.copies
        states = self.model.encode(source)
        first = source.rows * copies
        places = [layers.put((first + i) * self.memory_len + source.places) for i in range(copies)]
        for layer, memory in zip(self.model.decoder, self.memories, strict=True):
            for projected, buffer in zip(layer.memory(states), memory, strict=True):
                flat = buffer.reshape(-1, self.model.config.hidden)
                for place in places:
                    layers.assign_rows_(flat, place, projected)
        layers.assign_(self.memory_lengths, layers.put(np.repeat(source.lengths, copies)))
        layers.assign_(self.words, settings.start)
        layers.assign_(self.history, settings.start)
        layers.assign_(self.lengths, 1)

    def _logits(self, step: int) -> Any:
        return self.model.logits(self.words, step, self.caches, self.memories, self.memory_lengths)

    def _process_(self, scores: Any, step: int) -> None:
        """What transformers' processors make of scores float32 [rows, vocab], in their order."""
        settings, layers, length = self.settings, self.layers, step + 1
        if settings.repetition_penalty or settings.presence_penalty or settings.frequency_penalty:
            apply_penalties(
                scores, repetition_penalty=settings.repetition_penalty,
                presence_penalty=settings.presence_penalty, frequency_penalty=settings.frequency_penalty,
                output_ids=self.history, sequence_length=self.lengths, prompt_length=self.one, out=scores,
            )  # fmt: skip
        if settings.repeated:
            layers.forbid_repeats_(scores, self.history, length, settings.repeated)
        if self.bad_words is not None:
            apply_penalties(
                scores, output_ids=self.history, sequence_length=self.lengths, bad_words=self.bad_words, out=scores
            )
        if length < settings.min_length:
            layers.forbid_(scores, settings.ends)
        if step == 0 and settings.first:
            layers.force_(scores, settings.first)
        if length == settings.max_length - 1 and settings.last:
            layers.force_(scores, settings.last)

    def step(self, step: int) -> None:
        """Enqueue a step, from 0 on: the tokens at the position `step` are known, those after it are found."""
        raise NotImplementedError

    def shown(self, step: int, tokens: bool) -> list[Any]:
        """What the host looks at after a step: what has finished; with `tokens` those and their parents, or None."""
        raise NotImplementedError

    def result(self, steps: int) -> Found:
        """What was found after that many steps, for which a GPU is waited for."""
        raise NotImplementedError


class Sampling(Search):
    """A token for each row: the best one, or one that is drawn."""

    def __init__(self, model: Seq2Seq, settings: Settings, batch: int, memory_len: int, dtype: str) -> None:
        super().__init__(model, settings, batch, memory_len, dtype)
        self.finished = self.layers.full((self.rows,), False, "bool")
        self.seeds = self.layers.full((self.rows,), 0, "int64")
        others = tuple((end,) for end in settings.ends[1:])
        self.stop_words = _words_array(others + settings.stop_words, self.layers)

    def start(self, source: Source, seeds: np.ndarray[Any, Any]) -> None:
        super().start(source, seeds)
        self.layers.assign_(self.finished, False)
        self.layers.assign_(self.seeds, self.layers.put(seeds))

    def step(self, step: int) -> None:
        settings, layers = self.settings, self.layers
        scores = layers.float32(self._logits(step))
        self._process_(scores, step)
        drawn: dict[str, Any] = {"temperature": 0.0}
        if settings.sampled:
            drawn = {"temperature": settings.temperature, "top_k": settings.top_k}
            drawn |= {"top_p": settings.top_p, "min_p": settings.min_p}
        sample(
            scores, **drawn, seed=self.seeds, offset=step, finished=self.finished, end_id=settings.ends[0],
            sequence_length=self.lengths, out=self.words,
        )  # fmt: skip
        layers.assign_(self.history[:, step + 1], self.words)
        if self.stop_words is not None:
            stop_words_criterion(self.history, self.lengths, self.stop_words, self.finished)

    def shown(self, step: int, tokens: bool) -> list[Any]:
        return [self.finished, self.words, None] if tokens else [self.finished]

    def result(self, steps: int) -> Found:
        lengths = self.layers.host(self.lengths)
        longest = int(lengths.max(initial=1))
        tokens = self.layers.host(self.history)[:, :longest].copy()
        tokens[np.arange(longest) >= lengths[:, None]] = self.settings.pad
        return Found(tokens, lengths.copy(), None)


class Beams(Search):
    """The best hypotheses of a beam search, as `beam_search_step` keeps them."""

    def __init__(self, model: Seq2Seq, settings: Settings, batch: int, memory_len: int, dtype: str) -> None:
        super().__init__(model, settings, batch, memory_len, dtype)
        full, each = self.layers.full, (batch, settings.beams)
        self.ids, self.parents = (full((settings.steps, *each), 0, "int32") for _ in range(2))
        self.finished = full((batch,), False, "bool")
        # Running scores, then the pool: scores, lengths, last tokens and their parents; then what is done.
        dtypes = ("float32", "float32", "int32", "int32", "int32")
        state = [*(full(each, 0, dtype) for dtype in dtypes), self.finished]
        self.state: tuple[Any, Any, Any, Any, Any, Any] = tuple(state)  # type: ignore[assignment]

    def start(self, source: Source, seeds: np.ndarray[Any, Any]) -> None:
        super().start(source, seeds)
        running, finished, *pool, done = self.state
        self.layers.assign_(running, _NOTHING)
        self.layers.assign_(running[:, 0], 0.0)
        self.layers.assign_(finished, -np.inf)
        for x in pool:
            self.layers.assign_(x, 0)
        self.layers.assign_(done, False)

    def step(self, step: int) -> None:
        settings, layers = self.settings, self.layers
        layers.assign_(self.lengths, step + 1)
        scores = layers.log_softmax(self._logits(step))
        self._process_(scores, step)
        if settings.renormalized:
            scores = layers.log_softmax(scores)
        ids, parents = self.ids[step], self.parents[step]
        beam_search_step(
            scores.reshape(self.batch, settings.beams, self.model.vocab), *self.state,
            step, settings.steps, settings.ends,
            length_penalty=settings.length_penalty, early_stopping=settings.early_stopping,
            out=(ids, parents, *self.state),
        )  # fmt: skip
        for cache in self.caches:
            update_kv_cache(*cache, parents, step + 1, out=cache)
        layers.assign_(self.words, ids.reshape(-1))
        if settings.needs_history:
            layers.assign_(self.history, layers.take(self.history, layers.flat_parents(parents)))
            layers.assign_(self.history[:, step + 1], self.words)

    def shown(self, step: int, tokens: bool) -> list[Any]:
        return [self.finished, self.ids[step], self.parents[step]] if tokens else [self.finished]

    def result(self, steps: int) -> Found:
        settings, (_, scores, lengths, last_ids, last_parents, _) = self.settings, self.state
        tree = gather_tree(
            self.ids[:steps], self.parents[:steps], lengths, settings.ends[0],
            last_ids=last_ids, last_parents=last_parents,
        )  # fmt: skip
        chosen = slice(None, settings.returned)
        found = self.layers.host(lengths)[:, chosen].reshape(-1)
        longest = int(found.max(initial=0))
        tokens = np.full((len(found), longest + 1), settings.start, np.int32)
        tokens[:, 1:] = self.layers.host(tree)[:longest, :, chosen].reshape(longest, -1).T
        # transformers fills with the first id of an end where the padding is 0.
        tokens[:, 1:][np.arange(longest) >= found[:, None]] = settings.pad or settings.ends[0]
        return Found(tokens, found + 1, self.layers.host(scores)[:, chosen].reshape(-1).copy())
