"""An encoder-decoder model: the encoder without padding, and the decoder for one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.models._inputs import check_ids, read_batch
from cukern.models._layers import Affine, Layers, Words
from cukern.models.decoder import Decoder
from cukern.models.decoder_weights import Config, Side, Weights
from cukern.models.encoder_layer import EncoderLayer
from cukern.ops.embedding import embedding_lookup, embedding_lookup_sine_position_encoding
from cukern.ops.norm import layer_norm
from cukern.runtime import check

_EPSILON = 1e-5


class Source(NamedTuple):
    """A batch of source sequences whose words (tokens that are not padding) are concatenated."""

    ids: np.ndarray[Any, Any]  # int32 [words]
    columns: np.ndarray[Any, Any]  # int32 [words]: the column in the padded batch, the word's position
    rows: np.ndarray[Any, Any]  # int64 [words]: the sequence of each word
    lengths: np.ndarray[Any, Any]  # int32 [batch]

    @property
    def word_indices(self) -> np.ndarray[Any, Any]:
        """int64 [words]: the index of each word in its sequence."""
        first = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.ids)) - first[self.rows]


def read_source(input_ids: Any, attention_mask: Any, config: Config) -> Source:
    """Remove the padding: the tokens whose mask is 0.

    Raises the errors of `read_batch`, and ValueError for an id or a position out of range.
    """
    ids, mask, _ = read_batch(input_ids, attention_mask).to_numpy()
    counts = np.ones(ids.shape, bool) if mask is None else mask != 0
    check_ids("input_ids", ids, counts, config.vocab)
    rows, columns = np.nonzero(counts)
    if len(columns) and columns.max() >= config.max_positions:
        wanted = f"of at most {config.max_positions} positions (those of the model)"
        check.fail("input_ids", wanted, f"a token at {int(columns.max())}")
    words = ids[rows, columns].astype(np.int32)
    return Source(words, columns.astype(np.int32), rows, counts.sum(1).astype(np.int32))


class Seq2Seq:
    def __init__(self, weights: Weights, layers: Layers, config: Config) -> None:
        self.config, self.weights, self.layers = config, weights, layers
        self.vocab = int(weights.head.shape[0])
        normalize_before = config.family.normalize_before
        options: dict[str, Any] = {
            "activation": config.activation,
            "normalize_before": normalize_before,
            "epsilon": _EPSILON,
        }
        self.encoder = [EncoderLayer(layers, layer, config.encoder_heads, **options) for layer in weights.encoder]
        self.decoder = [Decoder(layer, config.decoder_heads, **options) for layer in weights.decoder]

    @property
    def target_positions(self) -> int:
        return int(self.weights.target.positions.shape[0])

    def _norm(self, x: Any, norm: Affine | None) -> Any:
        return x if norm is None else layer_norm(x, *norm, _EPSILON)

    def _embed(self, side: Side, ids: Any, step: int, position_ids: Any = None) -> Any:
        table, positions = side.embeddings, side.positions
        if self.config.scale_embedding:
            x = embedding_lookup_sine_position_encoding(table, positions, ids, step, position_ids=position_ids)
        else:
            x = embedding_lookup(table, ids, positions, step, position_ids=position_ids)
        return self._norm(x, side.embedding_norm)

    def encode(self, source: Source) -> Any:
        """Return the last hidden state of each word, [words, hidden]."""
        layers, weights = self.layers, self.weights
        bounds = np.concatenate([[0], np.cumsum(source.lengths)])
        words = Words(layers.put(bounds.astype(np.int32)), bounds.tolist())
        x = self._embed(weights.source, layers.put(source.ids), 0, layers.put(source.columns))
        for layer in self.encoder:
            x = layer(x, words)
        return self._norm(x, weights.source.last_norm)

    def logits(
        self,
        words: Any,
        position: Any,
        length: Any,
        caches: list[tuple[Any, Any]],
        memories: list[tuple[Any, Any]],
        memory_lengths: Any,
    ) -> Any:
        """Return the logits [rows, vocab] of the next token. `words`, int32 [rows], are the tokens at `position`.

        `position` and `length` (`position + 1`) are int32 arrays [1], so that one CUDA graph serves all steps.
        """
        x = self._embed(self.weights.target, words, 0, position)
        for layer, cache, memory in zip(self.decoder, caches, memories, strict=True):
            x = layer(x, *cache, length, *memory, memory_lengths)
        x = self._norm(x, self.weights.target.last_norm)
        return self.layers.linear(x, self.weights.head, self.weights.head_bias)
