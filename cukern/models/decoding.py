"""Generate tokens with an encoder-decoder, such as a translation model, by greedy search, beam search or sampling."""

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

#: Buffers and CUDA graphs are kept for at most this many search sizes.
_MOST_SEARCHES = 4
#: On a GPU the length of the encoder output is rounded up to a multiple of this. So batches with different source
#: lengths can use the same buffers and graphs.
_MEMORY_UNIT = 64


class Generated(NamedTuple):
    """The generated tokens, in the library and on the device of the weights."""

    sequences: Any  # int32 [rows, length], padded, beginning with the start token, as transformers' `generate` returns
    lengths: Any  # int32 [rows], the number of tokens of each row, including start and end tokens
    scores: Any  # float32 [rows] after a beam search: log-probability / length ** length_penalty; otherwise None


class Step(NamedTuple):
    """The results of a step that `on_step` is called with, as NumPy arrays."""

    step: int  # from 0
    tokens: np.ndarray[Any, Any]  # int32 [rows]; in a beam search [batch, beams], the running beams
    finished: np.ndarray[Any, Any]  # bool [rows], or [batch]
    parents: np.ndarray[Any, Any] | None  # in a beam search: int32 [batch, beams], the beam that each beam continues


class Decoding:
    """An encoder-decoder that generates tokens: Marian, BART or mBART, with the weights of Hugging Face.

    It corresponds to FasterTransformer's `Decoding`: it runs the encoder, and then decoder steps until every row has
    finished. A step embeds the latest tokens, runs the layers (`Decoder`), and chooses the next tokens from the logits.
    The model runs in the library and on the device of its weights, which are torch, CuPy or NumPy arrays. NumPy is the
    reference. The array library computes the matrix multiplications. Padding is removed: neither the encoder nor the
    cross-attention reads ids where the mask is 0.

    With torch tensors on a CUDA device, the first step of a search is not captured, and the second step is captured in
    a CUDA graph. All further steps replay the graph, also in later searches of the same size. (A step that forces a
    token has its own graph.) The host reads the finished flags of a step after it has enqueued the next step. The
    buffers and graphs of the latest few search sizes are kept. Only one call may run at a time.

    In float32 the tokens equal the result of transformers' `generate` with the same settings, unless the scores of two
    candidates differ by less than the rounding error of the logits. The beam search (`cukern.beam_search_step`) follows
    transformers, not FasterTransformer:

    - In FasterTransformer finished beams compete with running beams, and there is no length penalty.
    - This search takes the best `max(2, 1 + end tokens) * beams` candidates. If one of the best `beams` candidates ends
      with an end token, it moves to the list of finished hypotheses, with the score
      `log-probability / length ** length_penalty`. `early_stopping` decides when the search ends.
    - Bad words, forced tokens and the like change log-probabilities. The log-probabilities are normalized again only if
      `renormalize_logits` is set.

    Make one with `from_directory` or `from_state_dict`.
    """

    def __init__(self, model: Seq2Seq, defaults: Mapping[str, Any], dtype: str, directory: Path | None = None) -> None:
        """Make a `Decoding` from a `model`. Users call `from_directory` or `from_state_dict` instead.

        Args:
            model: the embeddings, layers and logits.
            defaults: the default settings of a call, by transformers' names.
            dtype: the dtype of the weights.
            directory: the directory of the weights, if any.
        """
        self.config = model.config
        self.dtype = dtype
        #: The default settings of a call, by the names of transformers' generation configuration.
        self.defaults = dict(defaults)
        self.directory = directory
        self._model = model
        self._searches: collections.OrderedDict[Any, tuple[Search, StepGraphs]] = collections.OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def from_directory(
        cls, path: str | Path, *, library: str | None = None, device: Any = None, dtype: str | None = None
    ) -> Decoding:
        """Read a model from a directory: its `config.json`, its weights, and `generation_config.json` if there is one.

        Args:
            path: a model that `save_pretrained` wrote, or a snapshot of the Hugging Face Hub, with `model.safetensors`,
                its shards, or `pytorch_model.bin` (torch only).
            library: "torch", "cupy" or "numpy"; None is torch if installed, else CuPy if there is a GPU, else NumPy.
            device: "cuda:1" and the like for torch, a number for CuPy; None is the current GPU, if there is one.
            dtype: "float32", "float16" or "bfloat16"; None keeps the file's dtype.

        Raises FileNotFoundError for a missing file, ImportError with the pip command for a missing package, and
        ValueError for another architecture or a key without weights.
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
            state: arrays by Hugging Face's keys (`model.encoder.layers.0.self_attn.q_proj.weight` and so on), all in
                one library and on one device.
            config: the configuration, a dict or an object with `to_dict()`.
            generation_config: the default settings of a call, a dict or an object with `to_dict()`; None takes them
                from `config`.
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
        """Check the settings of a call and return them. Raises the errors of `__call__` for invalid settings."""
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
            seed: the seed for sampling (`do_sample`), as an int or one int per row. Row i uses `seed + i` if `seed` is
                an int. None takes a seed from Python's `random`.
            stop_words: lists of token ids. A row finishes when it ends with one of these lists. Not for a beam search.
            on_step: called with a `Step` after each step. It may raise to stop the search.
            progress: show a progress bar of the steps on stderr.
            generation: settings that override the model's defaults, by the names of transformers' `GenerationConfig`:
                num_beams, num_return_sequences, do_sample, temperature, top_k, top_p, min_p, max_new_tokens,
                max_length, min_new_tokens, min_length, early_stopping, length_penalty, repetition_penalty,
                no_repeat_ngram_size, bad_words_ids, forced_bos_token_id, forced_eos_token_id, renormalize_logits and
                the ids of special tokens; and OpenAI's presence_penalty and frequency_penalty.

        Returns a `Generated` with `batch * num_return_sequences` rows. Raises TypeError for an unknown setting, and
        ValueError for an unimplemented setting or an invalid argument. The message names the argument.
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
        """Return the search for these sizes and its graphs.

        Searches are cached. A new search replaces the least recently used one.
        """
        on_gpu = self._model.layers.is_cuda_torch
        memory_len = -(-max(longest, 1) // _MEMORY_UNIT) * _MEMORY_UNIT if on_gpu else max(longest, 1)
        key = settings, batch, memory_len
        if key in self._searches:
            self._searches.move_to_end(key)
        else:
            while len(self._searches) >= _MOST_SEARCHES:
                self._searches.popitem(last=False)
            kind = Beams if settings.beams > 1 else Sampling
            made = kind(self._model, settings, batch, memory_len, self.dtype)
            self._searches[key] = made, StepGraphs(self._model.layers)
        return self._searches[key]


def _seeds(seed: Any, rows: int) -> np.ndarray[Any, Any]:
    """Return one seed per row, int64 [rows]."""
    if seed is None:
        seed = random.getrandbits(62)
    if hasattr(seed, "__index__"):
        first = check.integer("seed", seed, 0, 2**63 - 1 - rows)
        return first + np.arange(rows, dtype=np.int64)
    seeds = np.array([check.integer("seed", x, 0, 2**63 - 1) for x in seed], np.int64)
    check.shape("seed", seeds.shape, (rows,), "[batch * num_return_sequences]")
    return seeds


def _run(search: Search, graphs: StepGraphs, on_step: Callable[[Step], None] | None, progress: bool) -> int:
    """Run steps until every row has finished. Return the number of steps."""
    steps, look = search.settings.steps, watch(search.layers)
    with progress_bar("decoding", steps, progress) as advance:
        for step in range(steps):
            forced = search.forced(step)
            graphs.run(forced, functools.partial(search.step, forced))
            advance(1)
            for seen, values in look.after(step, search.shown(on_step is not None)):
                if _tell(on_step, seen, values):
                    return step + 1
        for seen, values in look.rest():
            _tell(on_step, seen, values)
    return steps


def _tell(on_step: Callable[[Step], None] | None, step: int, values: list[Any]) -> bool:
    """Call `on_step`, if it is given, with the results of a step. Return whether all rows have finished."""
    finished, *tokens_and_parents = values
    if on_step is not None:
        tokens, parents = tokens_and_parents
        on_step(Step(step, tokens, finished, parents))
    return bool(finished.all())
