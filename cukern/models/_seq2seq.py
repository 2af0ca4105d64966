"""The two halves of an encoder-decoder: the encoder over words without padding, a step of the decoder."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import Words
from cukern.models._pieces import Pieces
from cukern.models.decoder import Affine, Decoder
from cukern.models.weights import Config, EncoderLayerWeights, Side, Weights
from cukern.ops.embedding import embedding_lookup, embedding_lookup_sine_position_encoding
from cukern.ops.moe_activation import add_bias_act
from cukern.ops.norm import fused_add_layer_norm, layer_norm
from cukern.runtime import arrays, check

_EPSILON = 1e-5
#: The largest magnitude that transformers leaves in float16 between the layers of an encoder.
_LARGEST_HALF = 65504.0 - 1000


class Source(NamedTuple):
    """A batch of sources: the words that count, one sequence after the other."""

    ids: np.ndarray[Any, Any]  # int32 [words]
    columns: np.ndarray[Any, Any]  # int32 [words]: the position of each
    rows: np.ndarray[Any, Any]  # int64 [words]: the sequence of each
    lengths: np.ndarray[Any, Any]  # int32 [batch]

    @property
    def places(self) -> np.ndarray[Any, Any]:
        """int64 [words]: the place of each word among those of its sequence."""
        first = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.ids)) - first[self.rows]


def read_source(input_ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None, config: Config) -> Source:
    """The words of a padded batch. What is where the mask is 0 is not looked at."""
    check.dimensions("input_ids", input_ids.shape, ("batch", "seq"))
    if input_ids.dtype.kind not in "iu":
        check.fail("input_ids", "integers", input_ids.dtype, TypeError)
    if mask is not None:
        check.shape("attention_mask", mask.shape, input_ids.shape, "[batch, seq] (those of input_ids)")
        if mask.dtype.kind not in "iub":
            check.fail("attention_mask", "bool or integers", mask.dtype, TypeError)
    counts = np.ones(input_ids.shape, bool) if mask is None else mask != 0
    rows, columns = np.nonzero(counts)
    ids = input_ids[rows, columns]
    wrong = ids[(ids < 0) | (ids >= config.vocab)]
    if len(wrong):
        check.fail("input_ids", f"in [0, {config.vocab - 1}] where the mask is not 0", int(wrong[0]))
    if len(columns) and columns.max() >= config.max_positions:
        wanted = f"of at most {config.max_positions} positions (those of the model)"
        check.fail("input_ids", wanted, f"a token at {int(columns.max())}")
    return Source(ids.astype(np.int32), columns.astype(np.int32), rows, counts.sum(1).astype(np.int32))


class Seq2Seq:
    """The layers of an encoder-decoder."""

    def __init__(self, weights: Weights, pieces: Pieces, config: Config) -> None:
        self.config, self.weights, self.pieces = config, weights, pieces
        self.vocab = int(weights.head.shape[0])
        before = config.family.normalize_before
        library = arrays.library_of(weights.head)
        self._is_clipped = before and library is not None and library.dtype(weights.head) == "float16"
        self.decoder = [
            Decoder(
                layer, config.decoder_heads, activation=config.activation, normalize_before=before, epsilon=_EPSILON
            )
            for layer in weights.decoder
        ]

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

    # --- the encoder ------------------------------------------------------------------------------------

    def encode(self, source: Source) -> Any:
        """The encoder's last hidden states of the words, [words, hidden]."""
        pieces, weights = self.pieces, self.weights
        bounds = np.concatenate([[0], np.cumsum(source.lengths)])
        longest = int(source.lengths.max(initial=0))
        words = Words(pieces.put(bounds.astype(np.int32)), longest, bounds.tolist())
        x = self._embed(weights.source, pieces.put(source.ids), 0, pieces.put(source.columns))
        for layer in weights.encoder:
            x = self._encoder_layer(layer, x, words)
        return self._norm(x, weights.source.last_norm)

    def _encoder_layer(self, layer: EncoderLayerWeights, x: Any, words: Words) -> Any:
        pieces, config = self.pieces, self.config
        before = config.family.normalize_before
        h = self._norm(x, layer.self_norm) if before else x
        attended = pieces.attention(pieces.linear(h, *layer.qkv), config.encoder_heads, words)
        x = self._add(attended, layer.out, x, layer.self_norm)
        h = self._norm(x, layer.final_norm) if before else x
        up = pieces.linear(h, layer.up.weight)
        up = add_bias_act(up, layer.up.bias, config.activation, out=up)
        x = self._add(up, layer.down, x, layer.final_norm)
        return x.clip(-_LARGEST_HALF, _LARGEST_HALF) if self._is_clipped else x

    def _add(self, term: Any, product: Affine, residual: Any, norm: Affine) -> Any:
        if self.config.family.normalize_before:
            return self.pieces.linear(term, *product) + residual
        y = self.pieces.linear(term, product.weight)
        return fused_add_layer_norm(y, residual, *norm, _EPSILON, input_bias=product.bias, out=y)

    # --- the decoder ------------------------------------------------------------------------------------

    def logits(
        self,
        words: Any,
        position: Any,
        length: Any,
        caches: list[tuple[Any, Any]],
        memories: list[tuple[Any, Any]],
        memory_lengths: Any,
    ) -> Any:
        """The logits [rows, vocab] of what follows `words` int32 [rows], the tokens at a position.

        The position and the length, which is one more, are int32 [1], so that a captured step serves all positions.
        """
        x = self._embed(self.weights.target, words, 0, position)
        for layer, cache, memory in zip(self.decoder, caches, memories, strict=True):
            x = layer(x, *cache, length, *memory, memory_lengths)
        x = self._norm(x, self.weights.target.last_norm)
        return self.pieces.linear(x, self.weights.head, self.weights.head_bias)
