"""Greedy search, sampling and beam search for an encoder-decoder.

A step chooses the next token of every row. A step reads and writes fixed buffers and does not wait for the GPU, so a
CUDA graph can capture it. The index of the step is in an array, which the step increments, so the same graph works for
every step. Only a step that forces a token launches additional kernels.
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

#: The initial score of all beams except beam 0, as in transformers. So the first step only extends beam 0.
_NOTHING = -1e9


def _words_array(words: tuple[tuple[int, ...], ...], layers: Layers) -> Any:
    """Convert words, which are lists of token ids, to FasterTransformer's array layout. Return None without words."""
    if not words:
        return None
    ids = [x for word in words for x in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    return layers.put(np.array([ids, ends + [-1] * (len(ids) - len(ends))], np.int32))


class Found(NamedTuple):
    """The tokens that a search generated, in host memory."""

    tokens: np.ndarray[Any, Any]  # int32 [sequences, length], beginning with the start token, padded
    lengths: np.ndarray[Any, Any]  # int32 [sequences], including the start token
    scores: np.ndarray[Any, Any] | None  # float32 [sequences] after a beam search, otherwise None


class Search:
    """Base class of the searches. It holds the buffers that both kinds of search need, and changes the logits.

    The buffers are the KV caches, the keys and values of the encoder output, and the tokens. A search has
    `batch * copies` rows: each source has `settings.copies` beams or samples.
    """

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
        # `position` is the index of the step, and also the position of the latest tokens. `next` is `position + 1`,
        # which is the number of tokens so far.
        self._begin = self.layers.put(np.arange(2, dtype=np.int64))
        self._counters = full((2,), 0, "int64")
        self.position, self.next = self._counters[:1], self._counters[1:]
        self.words = full((self.rows,), settings.start, "int32")
        self.history = full((self.rows, settings.max_length), settings.start, "int32")
        self.lengths = full((self.rows,), 1, "int32")
        self.one = full((self.rows,), 1, "int32")
        self.bad_words = _words_array(settings.bad_words, self.layers)
        self.finished: Any = None

    def start(self, source: Source, seeds: np.ndarray[Any, Any]) -> None:
        """Run the encoder on the sources, and initialize the buffers for the first step."""
        settings, layers = self.settings, self.layers
        states = self.model.encode(source)
        places = layers.put(source.rows * self.memory_len + source.places)
        for layer, memory in zip(self.model.decoder, self.memories, strict=True):
            for projected, buffer in zip(layer.memory(states), memory, strict=True):
                layers.assign_rows_(buffer.reshape(-1, self.model.config.hidden), places, projected)
        layers.assign_(self.memory_lengths, layers.put(source.lengths))
        layers.assign_(self._counters, self._begin)
        layers.assign_(self.words, settings.start)
        layers.assign_(self.history, settings.start)
        layers.assign_(self.lengths, 1)

    def forced(self, step: int) -> tuple[int, ...]:
        """Return the tokens that a step is restricted to. The tuple is empty if the step may choose any token."""
        settings = self.settings
        if settings.last and step == settings.steps - 1:
            return settings.last
        return settings.first if step == 0 else ()

    def _logits(self) -> Any:
        position, length = map(self.layers.low_word, (self.position, self.next))
        return self.model.logits(self.words, position, length, self.caches, self.memories, self.memory_lengths)

    def _process_(self, scores: Any, forced: tuple[int, ...]) -> None:
        """Apply penalties, bad words and forced tokens to `scores`, float32 [rows, vocab], in transformers' order."""
        settings, layers = self.settings, self.layers
        if settings.repetition_penalty or settings.presence_penalty or settings.frequency_penalty:
            apply_penalties(
                scores, repetition_penalty=settings.repetition_penalty,
                presence_penalty=settings.presence_penalty, frequency_penalty=settings.frequency_penalty,
                output_ids=self.history, sequence_length=self.lengths, prompt_length=self.one, out=scores,
            )  # fmt: skip
        if settings.repeated:
            layers.forbid_repeats_(scores, self.history, self.next, settings.repeated)
        if self.bad_words is not None:
            apply_penalties(
                scores, output_ids=self.history, sequence_length=self.lengths, bad_words=self.bad_words, out=scores
            )
        if settings.min_length > 1:
            layers.forbid_below_(scores, settings.ends, self.next, settings.min_length)
        if forced:
            layers.force_(scores, forced)

    def step(self, forced: tuple[int, ...]) -> None:
        """Enqueue the kernels of the next step. The step chooses the token at position `next` of each row."""
        raise NotImplementedError

    def shown(self, tokens: bool) -> list[Any]:
        """Return the arrays that the host reads after a step: the finished flags and, if `tokens`, tokens and parents.

        Only a beam search has parents.
        """
        raise NotImplementedError

    def result(self, steps: int) -> Found:
        """Return the tokens after `steps` steps. This waits for a GPU."""
        raise NotImplementedError


class Sampling(Search):
    """A search that appends the most likely token (greedy) or a sampled token to each row."""

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
        drawn: dict[str, Any] = {"temperature": 0.0}
        if settings.sampled:
            drawn = {"temperature": settings.temperature, "top_k": settings.top_k}
            drawn |= {"top_p": settings.top_p, "min_p": settings.min_p}
        sample(
            scores, **drawn, seed=self.seeds, offset=self.position.reshape(()), finished=self.finished,
            end_id=settings.ends[0], sequence_length=self.lengths, out=self.words,
        )  # fmt: skip
        layers.assign_column_(self.history, self.next, self.words)
        if self.stop_words is not None:
            stop_words_criterion(self.history, self.lengths, self.stop_words, self.finished)
        layers.add_(self._counters, 1)

    def shown(self, tokens: bool) -> list[Any]:
        return [self.finished, self.words, None] if tokens else [self.finished]

    def result(self, steps: int) -> Found:
        lengths = self.layers.host(self.lengths)
        longest = int(lengths.max(initial=1))
        tokens = self.layers.host(self.history)[:, :longest].copy()
        tokens[np.arange(longest) >= lengths[:, None]] = self.settings.pad
        return Found(tokens, lengths.copy(), None)


class Beams(Search):
    """A beam search that keeps the best hypotheses with `beam_search_step`."""

    def __init__(self, model: Seq2Seq, settings: Settings, batch: int, memory_len: int, dtype: str) -> None:
        super().__init__(model, settings, batch, memory_len, dtype)
        full, each = self.layers.full, (batch, settings.beams)
        # `latest` contains the tokens and the parents of the latest step. `tree` contains the tokens and parents of all
        # steps.
        self.latest = full((2, *each), 0, "int32")
        self.tree = full((2, settings.steps, *each), 0, "int32")
        self.words = self.latest[0].reshape(-1)
        self.finished = full((batch,), False, "bool")
        # The state of `beam_search_step` is six arrays: the scores of the running beams; the scores, lengths, last
        # tokens and last parents of the finished hypotheses; and a flag for each finished sequence.
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

    def step(self, forced: tuple[int, ...]) -> None:
        settings, layers = self.settings, self.layers
        scores = layers.log_softmax(self._logits())
        self._process_(scores, forced)
        if settings.renormalized:
            scores = layers.log_softmax(scores)
        ids, parents = self.latest
        beam_search_step(
            scores.reshape(self.batch, settings.beams, self.model.vocab), *self.state,
            layers.low_word(self.position), settings.steps, settings.ends,
            length_penalty=settings.length_penalty, early_stopping=settings.early_stopping,
            out=(ids, parents, *self.state),
        )  # fmt: skip
        for cache in self.caches:
            update_kv_cache(*cache, parents, layers.low_word(self.next), out=cache)
        layers.assign_column_(self.tree, self.position, self.latest)
        if settings.needs_history:
            layers.assign_(self.history, layers.take(self.history, layers.flat_parents(parents)))
            layers.assign_column_(self.history, self.next, self.words)
            layers.add_(self.lengths, 1)
        layers.add_(self._counters, 1)

    def shown(self, tokens: bool) -> list[Any]:
        return [self.finished, *self.latest] if tokens else [self.finished]

    def result(self, steps: int) -> Found:
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
        return Found(tokens, found + 1, self.layers.host(scores)[:, chosen].reshape(-1).copy())
