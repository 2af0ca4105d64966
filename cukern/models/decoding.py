"""Generate tokens with an encoder-decoder by greedy search, beam search or sampling."""

from __future__ import annotations

import collections
import functools
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cukern.models._search import Beams, Sampling, Search
from cukern.models._seq2seq import Seq2Seq, read_source
from cukern.models._steps import StepGraphs, watch
from cukern.models.decoder_weights import read_config, read_directory, read_weights
from cukern.models.generation import Settings, defaults_of, settle
from cukern.runtime import check
from cukern.runtime.arrays import Array
from cukern.runtime.progress import progress as progress_bar

__all__ = ["Decoding", "Generated", "Step"]

_MAX_CACHED_SEARCHES = 4
#: On a GPU the encoder output is padded to a multiple of this length, so that batches with different source lengths
#: share buffers and graphs.
_MEMORY_LEN_MULTIPLE = 64


class Generated(NamedTuple):
    """The generated tokens, in the library and on the device of the weights."""

    sequences: Any  # int32 [rows, length], padded, including the start token, as in transformers' `generate`
    lengths: Any  # int32 [rows], including start and end tokens
    scores: Any  # float32 [rows] after a beam search: log-probability / length ** length_penalty; otherwise None


class Step(NamedTuple):
    """The results of one step as NumPy arrays. `on_step` takes them as its argument."""

    step: int  # from 0
    tokens: np.ndarray[Any, Any]  # int32 [rows]; in a beam search [batch, beams], the running beams
    finished: np.ndarray[Any, Any]  # bool [rows], or [batch]
    parents: np.ndarray[Any, Any] | None  # int32 [batch, beams] in a beam search: the beam that each beam continues


class Decoding:
    """An encoder-decoder that generates tokens: Marian, BART or mBART, with the weights of Hugging Face.

    Make one with `from_directory` or `from_state_dict`. It runs in the library (torch, CuPy or NumPy) and on the device
    of its weights, like FasterTransformer's `Decoding`. Padding is removed before the encoder. Only one call may run at
    a time.

    With torch tensors on a CUDA device, a CUDA graph captures the second step of a search. Later steps replay the
    graph, also in later searches of the same size. The host reads the finished flags of a step after it has enqueued
    the next step.

    In float32 the tokens equal the result of transformers' `generate` with the same settings, unless the scores of two
    candidates differ by less than the rounding error of the logits. The beam search (`cukern.beam_search_step`) follows
    transformers. In FasterTransformer finished beams compete with running beams, without a length penalty. In cukern:

    - A step takes the best `max(2, 1 + end tokens) * beams` candidates. A candidate with an end token that is among the
      best `beams` becomes a finished hypothesis, with the score `log-probability / length ** length_penalty`. The
      setting `early_stopping` decides when the search ends.
    - Bad words, forced tokens and penalties change log-probabilities, which are normalized again only if
      `renormalize_logits` is set.
    """

    def __init__(self, model: Seq2Seq, defaults: Mapping[str, Any], dtype: str, directory: Path | None = None) -> None:
        """Make a `Decoding` from a `model`, the `defaults` of a call, the weights' `dtype` and their `directory`."""
        self.config = model.config
        self.dtype = dtype
        #: The default settings of a call, by transformers' names.
        self.defaults = dict(defaults)
        self.directory = directory
        self._model = model
        self._searches: collections.OrderedDict[Any, tuple[Search, StepGraphs]] = collections.OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_directory(
        cls, path: str | Path, *, library: str | None = None, device: Any = None, dtype: str | None = None
    ) -> Decoding:
        """Read a model from a directory: `config.json`, its weights, and `generation_config.json` if there is one.

        Args:
            path: a directory that `save_pretrained` wrote, or a snapshot of the Hugging Face Hub. Its weights are in
                `model.safetensors`, in shards of this file, or in `pytorch_model.bin` (torch only).
            library: "torch", "cupy" or "numpy"; None is torch if installed, else CuPy if there is a GPU, else NumPy.
            device: "cuda:1" and the like for torch, a number for CuPy; None is the current GPU, if there is one.
            dtype: "float32", "float16" or "bfloat16"; None keeps the file's dtype.

        Raises FileNotFoundError for a missing file, ImportError for a missing package, and ValueError for an
        unsupported architecture or missing weights.
        """
        state, config, generation = read_directory(path, library, device)
        made = cls.from_state_dict(state, config, generation_config=generation, dtype=dtype)
        made.directory = Path(path)
        return made

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Array], config: Any, *, generation_config: Any = None, dtype: str | None = None
    ) -> Decoding:
        """Make a model from weights in memory.

        Args:
            state: arrays of one library on one device, by Hugging Face's keys
                (`model.encoder.layers.0.self_attn.q_proj.weight`).
            config: the configuration, a dict or an object with `to_dict()`.
            generation_config: the default settings of a call, also a dict or an object; None takes them from `config`.
            dtype: as in `from_directory`.
        """
        sizes, found = read_config(config)
        weights, layers, dtype = read_weights(state, sizes, dtype)
        return cls(Seq2Seq(weights, layers, sizes), defaults_of(found, generation_config), dtype)

    @property
    def vocab(self) -> int:
        """The size of the target vocabulary."""
        return self._model.vocab

    def settings(self, stop_words: Sequence[Sequence[int]] | None = None, **generation: Any) -> Settings:
        """Check the settings of a call and return them. Raises the errors of `__call__`."""
        return settle(self.defaults, generation, stop_words, self.vocab, self._model.target_positions)

    def __call__(
        self,
        input_ids: Array | Sequence[Sequence[int]],
        attention_mask: Array | Sequence[Sequence[int]] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        stop_words: Sequence[Sequence[int]] | None = None,
        on_step: Callable[[Step], None] | None = None,
        progress: bool = False,
        **generation: Any,
    ) -> Generated:
        """Generate from a padded batch of sources.

        Args:
            input_ids: int32 or int64 [batch, seq], of any library and on any device, or lists.
            attention_mask: bool or integer [batch, seq], 0 for padding; None for no padding. A row may be empty.
            seed: the seeds for sampling: one int per row, or one int, to which row i adds i; None takes an int from
                Python's `random`.
            stop_words: lists of token ids. A row finishes when it ends with one of these lists. Not for a beam search.
            on_step: called with a `Step` after each step. It may raise to stop the search.
            progress: show a progress bar on stderr.
            generation: settings that override the model's defaults, by the names of transformers' `GenerationConfig`:
                num_beams, num_return_sequences, do_sample, temperature, top_k, top_p, min_p, max_new_tokens,
                max_length, min_new_tokens, min_length, early_stopping, length_penalty, repetition_penalty,
                no_repeat_ngram_size, bad_words_ids, forced_bos_token_id, forced_eos_token_id, renormalize_logits and
                the ids of special tokens; and OpenAI's presence_penalty and frequency_penalty.

        Returns a `Generated` with `batch * num_return_sequences` rows. Raises TypeError for an unknown setting, and
        ValueError for an unimplemented setting or an invalid argument.
        """
        settings = self.settings(stop_words, **generation)
        source = read_source(input_ids, attention_mask, self.config)
        batch = len(source.lengths)
        seeds = _seeds(seed, batch * settings.returned)
        if batch == 0:
            empty = np.zeros((0, 1), np.int32), np.zeros(0, np.int32)
            found: tuple[Any, ...] = (*empty, np.zeros(0, np.float32) if settings.beams > 1 else None)
        else:
            with self._lock, self._model.layers.place():
                search, graphs = self._search(settings, batch, int(source.lengths.max()))
                search.start(source, seeds)
                try:
                    steps = _run(search, graphs, on_step, progress)
                except BaseException:
                    # Wait for the GPU, because the next call may use the same buffers on another stream.
                    self._model.layers.host(search.finished)
                    raise
                found = search.result(steps)
        with self._model.layers.place():
            return Generated(*(None if x is None else self._model.layers.put(x) for x in found))

    def _search(self, settings: Settings, batch: int, longest: int) -> tuple[Search, StepGraphs]:
        """Return a cached or a new search. In a full cache the new one replaces the least recently used search."""
        on_gpu = self._model.layers.is_cuda_torch
        memory_len = -(-max(longest, 1) // _MEMORY_LEN_MULTIPLE) * _MEMORY_LEN_MULTIPLE if on_gpu else max(longest, 1)
        key = settings, batch, memory_len
        if key in self._searches:
            self._searches.move_to_end(key)
        else:
            while len(self._searches) >= _MAX_CACHED_SEARCHES:
                self._searches.popitem(last=False)
            kind = Beams if settings.beams > 1 else Sampling
            made = kind(self._model, settings, batch, memory_len, self.dtype)
            self._searches[key] = made, StepGraphs(self._model.layers)
        return self._searches[key]


def _seeds(seed: Any, rows: int) -> np.ndarray[Any, Any]:
    if seed is None:
        seed = random.getrandbits(62)
    if hasattr(seed, "__index__"):
        first = check.integer("seed", seed, 0, 2**63 - 1 - rows)
        return first + np.arange(rows, dtype=np.int64)
    seeds = np.array([check.integer("seed", x, 0, 2**63 - 1) for x in seed], np.int64)
    check.shape("seed", seeds.shape, (rows,), "[batch * num_return_sequences]")
    return seeds


def _run(search: Search, graphs: StepGraphs, on_step: Callable[[Step], None] | None, progress: bool) -> int:
    steps, watcher = search.settings.steps, watch(search.layers)
    with progress_bar("decoding", steps, progress) as advance:
        for step in range(steps):
            forced = search.forced(step)
            graphs.run(forced, functools.partial(search.step, forced))
            advance(1)
            for finished_step, values in watcher.after(step, search.outputs(on_step is not None)):
                if _report(on_step, finished_step, values):
                    return step + 1
        for finished_step, values in watcher.remaining():
            _report(on_step, finished_step, values)
    return steps


def _report(on_step: Callable[[Step], None] | None, step: int, values: list[Any]) -> bool:
    finished, *tokens_and_parents = values
    if on_step is not None:
        tokens, parents = tokens_and_parents
        on_step(Step(step, tokens, finished, parents))
    return bool(finished.all())
