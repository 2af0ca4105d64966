"""Encoders (BERT, RoBERTa, XLM-R, DistilBERT) that remove the padding of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cukern.models._inputs import Batch, check_ids, read_batch
from cukern.models._layers import ACTIVATIONS, Words, layers_of, library_of
from cukern.models.checkpoint import expect_directory, read_config, read_weights
from cukern.models.encoder_layer import EncoderLayer
from cukern.models.encoder_weights import EncoderConfig, EncoderWeights, read_state
from cukern.models.text import TextConfig, by_length, check_texts, pooled, read_text_config
from cukern.models.tokenizer import Tokenizer, warn_of_cut
from cukern.ops.embedding import embedding_lookup
from cukern.ops.norm import layer_norm
from cukern.ops.padding import build_sequence_length_padding_offset, rebuild_sequence_length_padding
from cukern.runtime import check
from cukern.runtime.arrays import Array
from cukern.runtime.progress import progress as progress_bar

_MAX_CACHED_SIZES = 16


class Encoder:
    """An encoder of the BERT family that computes only the words of a batch (tokens that are not padding).

    Make one with `Encoder.from_directory` or `Encoder.from_state_dict`. It runs in the library (NumPy, CuPy or torch)
    and on the device of its weights, and converts inputs of the other libraries. As in ByteDance's Effective
    Transformer and FasterTransformer v2.1, the padding is removed before the embedding and restored after the last
    layer.

    A text has the same bits in any batch only with `product_rows`, because the array library chooses a matrix
    multiplication kernel by the number of rows. The words of a batch are padded to a multiple of `product_rows`, and
    every matrix multiplication takes exactly `product_rows` rows. A small `product_rows` uses a GPU badly. NumPy needs
    `product_rows=1`, because its result also depends on the index of a row.

    Args:
        config: the configuration.
        weights: the result of `read_state`.
        text: the settings of `embed` for tokenizing a text and pooling its words.
        tokenizer: the tokenizer that `embed` uses, or None.
        product_rows: the number of rows of each matrix multiplication; None: all rows at once.
    """

    def __init__(
        self,
        config: EncoderConfig,
        weights: EncoderWeights,
        *,
        text: TextConfig | None = None,
        tokenizer: Tokenizer | None = None,
        product_rows: int | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.text = text or TextConfig()
        self.tokenizer = tokenizer
        self.product_rows = None if product_rows is None else check.integer("product_rows", product_rows, 1)
        self._library = library_of("weights.word", weights.word)
        self._layers = layers_of("weights.word", weights.word)
        self._unpadded_words: dict[tuple[int, int], tuple[Words, Any]] = {}
        self._stack = [
            EncoderLayer(
                self._layers,
                layer,
                config.num_attention_heads,
                activation=ACTIVATIONS[config.hidden_act],
                epsilon=config.layer_norm_eps,
                product_rows=product_rows,
            )
            for layer in weights.layers
        ]

    @classmethod
    def from_directory(
        cls,
        path: str | Path,
        *,
        library: str | None = None,
        device: Any = None,
        dtype: str | None = None,
        product_rows: int | None = None,
    ) -> Encoder:
        """Read an encoder from a directory that transformers or sentence-transformers wrote.

        Args:
            path: the directory. It contains config.json, and the weights in model.safetensors, in its shards or (torch
                only) in pytorch_model.bin. Optional files are tokenizer.json, tokenizer_config.json, and modules.json
                with the files that it names.
            library: "torch", "cupy" or "numpy"; None is torch if installed, else CuPy if there is a GPU, else NumPy.
            device: "cuda:1" and the like for torch, a number for CuPy; None is the current GPU, if there is one.
            dtype: "float32", "float16" or "bfloat16"; None keeps the weights' dtype.
            product_rows: see the class.

        Raises:
            FileNotFoundError: the directory or a file in it does not exist.
            ImportError: a package is missing.
            TypeError: an unsupported dtype.
            ValueError: an unsupported architecture or feature, missing or superfluous weights, or a malformed file.
        """
        folder, text = read_text_config(expect_directory(path))
        config = EncoderConfig.from_dict(read_config(folder))
        weights = read_state(read_weights(folder, library, device), config, dtype)
        tokenizer = Tokenizer(folder, text, config.max_seq_len)
        return cls(config, weights, text=text, tokenizer=tokenizer, product_rows=product_rows)

    @classmethod
    def from_state_dict(
        cls,
        state: Mapping[str, Array],
        config: EncoderConfig | Mapping[str, Any] | Any,
        *,
        dtype: str | None = None,
        text: TextConfig | None = None,
        tokenizer: Tokenizer | None = None,
        product_rows: int | None = None,
    ) -> Encoder:
        """Make an encoder from weights in memory. Arrays that need no dtype conversion are not copied.

        Args:
            state: arrays by transformers' names, which may have a prefix, such as `bert.` in a model with a head.
            config: an `EncoderConfig`, the content of a config.json, or a configuration of transformers.
            dtype, product_rows: as in `from_directory`, with the same errors.
            text, tokenizer: see the class.
        """
        if not isinstance(config, EncoderConfig):
            config = EncoderConfig.from_dict(config)
        weights = read_state(state, config, dtype)
        return cls(config, weights, text=text, tokenizer=tokenizer, product_rows=product_rows)

    @property
    def dtype(self) -> str:
        """The dtype of the weights and of the hidden states."""
        return self._library.dtype(self.weights.word)

    @property
    def embedding_size(self) -> int:
        """The size of a vector that `embed` returns."""
        return self.config.hidden_size * len(self.text.pooling)

    def __repr__(self) -> str:
        sizes = self.config
        where = "" if (device := self._library.device(self.weights.word)) is None else f" on CUDA device {device}"
        return (
            f"Encoder({sizes.model_type}, {sizes.num_hidden_layers} layers of {sizes.hidden_size}, "
            f"{sizes.num_attention_heads} heads, {self.dtype}, {self._library.name}{where})"
        )

    def __call__(
        self,
        input_ids: Array | Sequence[Sequence[int]],
        attention_mask: Array | Sequence[Sequence[int]] | None = None,
        token_type_ids: Array | Sequence[Sequence[int]] | None = None,
        *,
        valid_word_num: int | None = None,
    ) -> Any:
        """Return the last hidden states of a batch, with zeros for padding.

        With a mask but without `valid_word_num`, the host waits for the GPU to count the words. In all other cases a
        CUDA graph can capture the call.

        Args:
            input_ids: int32 or int64 [batch, seq], of any library and on any device, or lists. An id outside the
                vocabulary raises ValueError if the ids are in host memory. On a GPU its embedding is zeros.
            attention_mask: bool or integer [batch, seq], nonzero for a word and 0 for padding (on either side of the
                words); None: no padding. A sequence may be empty.
            token_type_ids: int32 or int64 [batch, seq]; None: all types are 0.
            valid_word_num: the number of words, if all padding is at the ends of the sequences; None: the encoder
                counts the words.

        Returns:
            [batch, seq, hidden_size] in the dtype of the weights, in their library and on their device.

        Raises:
            TypeError: an unsupported dtype, or an argument that is neither an array nor lists.
            ValueError: invalid shapes, ids or sizes.
        """
        read = self._read_inputs(input_ids, attention_mask, token_type_ids)
        batch, seq = read.input_ids.shape
        with self._layers.place():
            index, offsets, words = self._find_words(batch, seq, read.attention_mask, valid_word_num)
            rows = self._table_rows(*read, index)
            ids = read.input_ids.reshape(-1)
            hidden = self._encode(ids if index is None else ids[index], rows, words)
            if offsets is None:
                return hidden.reshape(batch, seq, self.config.hidden_size)
            return rebuild_sequence_length_padding(hidden, offsets, batch, seq)

    def _read_inputs(self, *given: Any) -> Batch:
        read, config = read_batch(*given), self.config
        seq = read.input_ids.shape[1]
        if seq > config.max_seq_len:
            check.fail("input_ids", f"of at most {config.max_seq_len} columns, the positions of the model", seq)
        if read.token_type_ids is not None and not config.type_vocab_size:
            check.fail("token_type_ids", f"None for {config.model_type}", type(read.token_type_ids).__name__)
        moved = read.like(self.weights.word)
        in_host_memory = next((x for x in (read, moved) if x.is_in_host_memory()), None)
        if in_host_memory is not None:
            ids, counts, types = in_host_memory.to_numpy()
            check_ids("input_ids", ids, counts, config.vocab_size)
            if types is not None:
                check_ids("token_type_ids", types, counts, config.type_vocab_size)
        return moved

    def _find_words(self, batch: int, seq: int, mask: Any, valid_word_num: int | None) -> tuple[Any, Any, Words]:
        """Return each word's index in the padded batch, the number of padding tokens before it, and the `Words`."""
        layers = self._layers
        if mask is None:
            if valid_word_num not in (None, batch * seq):
                check.fail("valid_word_num", f"{batch * seq} without an attention_mask", valid_word_num)
            return None, None, self._words_without_padding(batch, seq)[0]
        is_word = mask != 0
        lengths = layers.cast(is_word.sum(-1), "int32")
        if valid_word_num is not None:
            if self._library.device(mask) is None and (is_word[:, 1:] & ~is_word[:, :-1]).any():
                wanted = "0 from the end of each sequence on, with valid_word_num"
                check.fail("attention_mask", wanted, "a word after a padded place")
            built = build_sequence_length_padding_offset(lengths, seq, valid_word_num=valid_word_num)
            offsets, cu_seqlens, count = built
            # Clamp the index, because `valid_word_num` may exceed the number of words.
            index = (layers.arange(count) + offsets).clip(0, max(batch * seq - 1, 0))
            return index, offsets, Words(cu_seqlens.clip(0, count))
        index = layers.flat_nonzero(is_word)
        offsets = layers.cast(index - layers.arange(len(index)), "int32")
        return index, offsets, Words(layers.cu_seqlens(lengths))

    def _words_without_padding(self, batch: int, seq: int) -> tuple[Words, Any]:
        """Return the `Words` and the positions. Cache both, because computing them takes five small kernels."""
        layers, size = self._layers, (batch, seq)
        if size not in self._unpadded_words:
            cu_seqlens = layers.cast(layers.arange(batch + 1) * seq, "int32")
            positions = layers.arange(batch * seq) % max(seq, 1)
            made = Words(cu_seqlens, [row * seq for row in range(batch + 1)]), positions
            if layers.is_capturing():
                return made  # not cached: the memory belongs to the graph's pool
            layers.host(positions[:1])  # wait, because the next reader may be on another stream
            while len(self._unpadded_words) >= _MAX_CACHED_SIZES:
                self._unpadded_words.pop(next(iter(self._unpadded_words)), None)
            self._unpadded_words[size] = made
        return self._unpadded_words[size]

    def _upload(self, array: np.ndarray[Any, Any]) -> Any:
        return self._library.from_numpy(array, self.weights.word)

    def _table_rows(self, ids: Any, mask: Any, types: Any, index: Any) -> Any:
        """Return each word's row in the table `EncoderWeights.position`.

        The table has max_position_embeddings rows per token type.
        """
        config, (batch, seq) = self.config, ids.shape
        if config.family.positions_after_padding:
            real = ids != config.pad_token_id
            rows = self._positions_after_padding(real if mask is None else real & (mask != 0)).reshape(-1)
            rows = rows if index is None else rows[index]
        else:
            rows = self._words_without_padding(batch, seq)[1] if index is None else index % max(seq, 1)
        if types is not None:
            word_types = types.reshape(-1)
            rows = rows + (word_types if index is None else word_types[index]) * config.max_position_embeddings
        return rows

    def _positions_after_padding(self, real: Any) -> Any:
        """Return RoBERTa's positions: words count up from `pad_token_id + 1`."""
        return real.cumsum(-1) * real + self.config.pad_token_id

    def _encode(self, ids: Any, rows: Any, words: Words) -> Any:
        """Return the last hidden states [words, hidden]. `rows` is a result of `_table_rows`."""
        weights = self.weights
        hidden = embedding_lookup(weights.word, ids, weights.position, position_ids=rows)
        hidden = layer_norm(hidden, *weights.norm, self.config.layer_norm_eps)
        for layer in self._stack:
            hidden = layer(hidden, words)
        return hidden

    def tokenize(self, texts: Sequence[str], max_length: int | None = None) -> list[list[int]]:
        """Return the token ids of texts, including special tokens.

        Args:
            texts: the texts; a text may be empty.
            max_length: the maximum number of tokens of a text; None: the model's maximum. A warning gives the number of
                cut texts.

        Raises:
            FileNotFoundError: the directory has no tokenizer.json.
            ImportError: the package tokenizers is missing.
            TypeError: texts is not a list of texts.
            ValueError: the encoder has no tokenizer, or max_length exceeds the model's maximum.
        """
        return self._tokenize(texts, max_length)

    def _tokenize(self, texts: Sequence[str], max_length: int | None) -> list[list[int]]:
        """Implement `tokenize`. Warnings refer to the user's call, two calls above this function."""
        found = check_texts(texts)
        if self.tokenizer is None:
            raise ValueError("the encoder has no tokenizer: give it one, or call embed_tokens with token ids")
        tokens, cut = self.tokenizer(found, max_length)
        warn_of_cut(cut, len(found), max_length or self.tokenizer.max_length)
        return tokens

    def embed(
        self,
        texts: Sequence[str],
        *,
        batch_size: int | None = None,
        max_length: int | None = None,
        normalize: bool | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Return one vector for each text, in the order of the texts.

        The model's sentence-transformers configuration decides the pooling and the normalization. The default is the
        mean over the words, normalized to length 1.

        Args:
            texts: the texts; a text may be empty.
            batch_size: the number of texts per batch; None: as many texts as have at most 16384 tokens together. The
                texts of a batch have similar lengths.
            max_length: as in `tokenize`, with the same errors.
            normalize: whether vectors are normalized to length 1; None follows the model's configuration.
            progress: whether to show a progress bar on stderr; None: only if stderr is a terminal.

        Returns:
            float32 [texts, embedding_size], in the library and on the device of the weights.
        """
        _check_batch_size(batch_size)
        tokens = self._tokenize(texts, max_length)
        return self.embed_tokens(tokens, batch_size=batch_size, normalize=normalize, progress=progress)

    def embed_tokens(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        batch_size: int | None = None,
        normalize: bool | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Return the vectors of `embed` for texts given as token ids, including special tokens.

        The vector of a text without tokens is zeros. Raises ValueError for an id outside the vocabulary and for a text
        that is too long.
        """
        _check_batch_size(batch_size)
        for i, ids in enumerate(tokens):
            if len(ids) > self.config.max_seq_len:
                check.fail(f"tokens[{i}]", f"of at most {self.config.max_seq_len} ids", len(ids))
            if len(ids) and (min(ids) < 0 or max(ids) >= self.config.vocab_size):
                check.fail(f"tokens[{i}]", f"ids in [0, {self.config.vocab_size})", f"{min(ids)} to {max(ids)}")
        normalize = self.text.normalize if normalize is None else normalize
        out = self._library.empty((len(tokens), self.embedding_size), "float32", self.weights.word)
        with self._layers.place(), progress_bar("embedding texts", len(tokens), progress) as advance:
            for batch in by_length(tokens, batch_size):
                hidden, words = self._encode_tokens([tokens[i] for i in batch])
                vectors = pooled(self._layers, hidden, words, self.text.pooling, normalize)
                out[self._upload(batch)] = vectors
                advance(len(batch))
        return out

    def _encode_tokens(self, tokens: Sequence[Sequence[int]]) -> tuple[Any, Words]:
        texts = [np.asarray(ids, np.int64) for ids in tokens]
        bounds = np.cumsum([0, *map(len, texts)])
        if self.config.family.positions_after_padding:
            rows = [self._positions_after_padding(ids != self.config.pad_token_id) for ids in texts]
        else:
            rows = [np.arange(len(ids)) for ids in texts]
        # Pack three arrays into one for a single copy to the GPU. Each array starts at a multiple of 16 bytes.
        parts = [np.concatenate(texts), np.concatenate(rows), bounds]
        starts = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)])
        packed = np.zeros(starts[-1], np.int32)
        for part, start in zip(parts, starts, strict=False):
            packed[start : start + len(part)] = part
        uploaded = self._upload(packed)
        ids, rows_on_device, cu_seqlens = (
            uploaded[start : start + len(part)] for part, start in zip(parts, starts, strict=False)
        )
        words = Words(cu_seqlens, bounds.tolist())
        return self._encode(ids, rows_on_device, words), words


def _check_batch_size(batch_size: Any) -> None:
    if batch_size is not None:
        check.integer("batch_size", batch_size, 1)
