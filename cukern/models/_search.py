"""Greedy search, sampling and beam search for an encoder-decoder.

A step uses fixed buffers, keeps its index in an array, and does not wait for the GPU, so that one CUDA graph serves all
steps. A step that forces a token has additional kernels, and its own graph.
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

#: The initial score of all beams but beam 0, as in transformers: the first step extends only beam 0.
_EXCLUDED_SCORE = -1e9


def _words_array(words: tuple[tuple[int, ...], ...], layers: Layers) -> Any:
    """Convert lists of token ids to FasterTransformer's array layout."""
    if not words:
        return None
    ids = [x for word in words for x in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return layers.put(np.array([ids, ends + [-1] * (len(ids) - len(ends))], np.int32))


class SearchResult(NamedTuple):
    tokens: np.ndarray[Any, Any]  # int32 [sequences, length], padded, including the start token
    lengths: np.ndarray[Any, Any]  # int32 [sequences], including the start token
    scores: np.ndarray[Any, Any] | None  # float32 [sequences] after a beam search, otherwise None


class Search:
    """Base class of the searches. Each source has `settings.copies` rows, its beams or samples."""

    def __init__(self, model: Seq2Seq, settings: Settings, batch: int, memory_len: int, dtype: str) -> None:
        self.model, self.settings, self.batch, self.memory_len = model, settings, batch, memory_len
        self.layers, config = model.layers, model.config
        self.rows = batch * settings.copies
        heads, full = config.decoder_heads, self.layers.full
        head = (heads, config.hidden // heads)
        cache, memory = (settings.steps, self.rows, *head), (batch, memory_len, *head)
        count = range(config.decoder_layers)
        self.caches = [(full(cache, 0, dtype), full(cache, 0, dtype)) for _ in count]
        self.memories = [(full(memory, 0, dtype), full(memory, 0, dtype)) for _ in count]
        self.memory_lengths = full((batch,), 0, "int32")
        # `position` is the index of the step and of the latest tokens. `next` is `position + 1`, the number of tokens.
        self._initial_counters = self.layers.put(np.arange(2, dtype=np.int64))
        self._counters = full((2,), 0, "int64")
        self.position, self.next = self._counters[:1], self._counters[1:]
        self.latest_tokens = full((self.rows,), settings.start, "int32")
        self.history = full((self.rows, settings.max_length), settings.start, "int32")
        self.lengths = full((self.rows,), 1, "int32")
        self.prompt_lengths = full((self.rows,), 1, "int32")
        self.bad_words = _words_array(settings.bad_words, self.layers)
        self.finished: Any = None

    def start(self, source: Source, seeds: np.ndarray[Any, Any]) -> None:
        settings, layers = self.settings, self.layers
        states = self.model.encode(source)
        memory_rows = layers.put(source.rows * self.memory_len + source.word_indices)
        for layer, memory in zip(self.model.decoder, self.memories, strict=True):
            for projected, buffer in zip(layer.memory(states), memory, strict=True):
                layers.assign_rows_(buffer.reshape(-1, self.model.config.hidden), memory_rows, projected)
        layers.assign_(self.memory_lengths, layers.put(source.lengths))
        layers.assign_(self._counters, self._initial_counters)
        layers.assign_(self.latest_tokens, settings.start)
        layers.assign_(self.history, settings.start)
        layers.assign_(self.lengths, 1)

    def forced(self, step: int) -> tuple[int, ...]:
        """Return the only tokens that a step may choose, or () for any token."""
        settings = self.settings
        if settings.last and step == settings.steps - 1:
            return settings.last
        return settings.first if step == 0 else ()

    def _logits(self) -> Any:
        position, length = map(self.layers.low_int32, (self.position, self.next))
        return self.model.logits(self.latest_tokens, position, length, self.caches, self.memories, self.memory_lengths)

    def _process_(self, scores: Any, forced: tuple[int, ...]) -> None:
        """Apply penalties and forbid or force tokens in `scores`, float32 [rows, vocab], in transformers' order."""
        settings, layers = self.settings, self.layers
        if settings.repetition_penalty or settings.presence_penalty or settings.frequency_penalty:
            apply_penalties(
                scores, repetition_penalty=settings.repetition_penalty,
                presence_penalty=settings.presence_penalty, frequency_penalty=settings.frequency_penalty,
                output_ids=self.history, sequence_length=self.lengths, prompt_length=self.prompt_lengths, out=scores,
            )  # fmt: skip
        if settings.ngram_size:
            layers.forbid_repeats_(scores, self.history, self.next, settings.ngram_size)
        if self.bad_words is not None:
            apply_penalties(
                scores, output_ids=self.history, sequence_length=self.lengths, bad_words=self.bad_words, out=scores
            )
        if settings.min_length > 1:
            layers.forbid_below_(scores, settings.ends, self.next, settings.min_length)
        if forced:
            layers.force_(scores, forced)

    def step(self, forced: tuple[int, ...]) -> None:
        """Enqueue the kernels that choose the token at position `next` of each row."""
        raise NotImplementedError

    def outputs(self, tokens: bool) -> list[Any]:
        """Return arrays for the host: the finished flags and, if `tokens`, the tokens and the parents of the beams."""
        raise NotImplementedError

    def result(self, steps: int) -> SearchResult:
        """Return the tokens after `steps` steps. This waits for a GPU."""
        raise NotImplementedError


class Sampling(Search):
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

    def step(self, forced: tuple[int, ...]) -> None:
        settings, layers = self.settings, self.layers
        scores = layers.float32(self._logits())
        self._process_(scores, forced)
        sampling: dict[str, Any] = {"temperature": 0.0}
        if settings.sampled:
            sampling = {"temperature": settings.temperature, "top_k": settings.top_k}
            sampling |= {"top_p": settings.top_p, "min_p": settings.min_p}
        sample(
            scores, **sampling, seed=self.seeds, offset=self.position.reshape(()), finished=self.finished,
            end_id=settings.ends[0], sequence_length=self.lengths, out=self.latest_tokens,
        )  # fmt: skip
        layers.assign_column_(self.history, self.next, self.latest_tokens)
        if self.stop_words is not None:
            stop_words_criterion(self.history, self.lengths, self.stop_words, self.finished)
        layers.add_(self._counters, 1)

    def outputs(self, tokens: bool) -> list[Any]:
        return [self.finished, self.latest_tokens, None] if tokens else [self.finished]

    def result(self, steps: int) -> SearchResult:
        lengths = self.layers.host(self.lengths)
        longest = int(lengths.max(initial=1))
        tokens = self.layers.host(self.history)[:, :longest].copy()
        tokens[np.arange(longest) >= lengths[:, None]] = self.settings.pad
        return SearchResult(tokens, lengths.copy(), None)


class Beams(Search):
    def __init__(self, model: Seq2Seq, settings: Settings, batch: int, memory_len: int, dtype: str) -> None:
        super().__init__(model, settings, batch, memory_len, dtype)
        full, shape = self.layers.full, (batch, settings.beams)
        # `latest` holds the tokens and the parents of the latest step, and `tree` holds them for all steps.
        self.latest = full((2, *shape), 0, "int32")
        self.tree = full((2, settings.steps, *shape), 0, "int32")
        self.latest_tokens = self.latest[0].reshape(-1)
        self.finished = full((batch,), False, "bool")
        # The state of `beam_search_step`: the scores of the running beams; the scores, lengths, last tokens and last
        # parents of the finished hypotheses; a flag for each finished sequence.
        dtypes = ("float32", "float32", "int32", "int32", "int32")
        state = [*(full(shape, 0, dtype) for dtype in dtypes), self.finished]
        self.state: tuple[Any, Any, Any, Any, Any, Any] = tuple(state)  # type: ignore[assignment]

    def start(self, source: Source, seeds: np.ndarray[Any, Any]) -> None:
        super().start(source, seeds)
        running, finished, *pool, done = self.state
        self.layers.assign_(running, _EXCLUDED_SCORE)
        self.layers.assign_(running[:, 0], 0.0)
        self.layers.assign_(finished, -np.inf)
        for x in pool:
            self.layers.assign_(x, 0)
        self.layers.assign_(done, False)

    def step(self, forced: tuple[int, ...]) -> None:
        settings, layers = self.settings, self.layers
        scores = layers.log_softmax(self._logits())
        self._process_(scores, forced)
        if settings.renormalized:
            scores = layers.log_softmax(scores)
        ids, parents = self.latest
        beam_search_step(
            scores.reshape(self.batch, settings.beams, self.model.vocab), *self.state,
            layers.low_int32(self.position), settings.steps, settings.ends,
            length_penalty=settings.length_penalty, early_stopping=settings.early_stopping,
            out=(ids, parents, *self.state),
        )  # fmt: skip
        for cache in self.caches:
            update_kv_cache(*cache, parents, layers.low_int32(self.next), out=cache)
        layers.assign_column_(self.tree, self.position, self.latest)
        if settings.needs_history:
            layers.assign_(self.history, layers.take(self.history, layers.flat_parents(parents)))
            layers.assign_column_(self.history, self.next, self.latest_tokens)
            layers.add_(self.lengths, 1)
        layers.add_(self._counters, 1)

    def outputs(self, tokens: bool) -> list[Any]:
        return [self.finished, *self.latest] if tokens else [self.finished]

    def result(self, steps: int) -> SearchResult:
        settings, (_, scores, lengths, last_ids, last_parents, _) = self.settings, self.state
        ids, parents = self.tree
        tree = gather_tree(
            ids[:steps], parents[:steps], lengths, settings.ends[0],
            last_ids=last_ids, last_parents=last_parents,
        )  # fmt: skip
        chosen = slice(None, settings.returned)
        found = self.layers.host(lengths)[:, chosen].reshape(-1)
        longest = int(found.max(initial=0))
        tokens = np.full((len(found), longest + 1), settings.start, np.int32)
        tokens[:, 1:] = self.layers.host(tree)[:longest, :, chosen].reshape(longest, -1).T
        # If the padding id is 0, transformers pads with the first end id.
        tokens[:, 1:][np.arange(longest) >= found[:, None]] = settings.pad or settings.ends[0]
        return SearchResult(tokens, found + 1, self.layers.host(scores)[:, chosen].reshape(-1).copy())
