"""Read and run the tokenizer of an encoder or of an encoder-decoder."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cukern.models.checkpoint import need, read_json, read_optional
from cukern.models.text import TextConfig
from cukern.runtime import check

_FAST = "tokenizer.json"
_SENTENCEPIECE = ("source.spm", "target.spm", "vocab.json")
_UNKNOWN, _END, _SPECIAL = "<unk>", "</s>", ("</s>", "<pad>", "<unk>")


def _open(file: Path) -> Any:
    """Open a tokenizer.json. Raises ValueError for a malformed file."""
    tokenizers = need("tokenizers", "reading texts")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises `Exception` itself
        raise ValueError(f"{file} is not a tokenizer: {error}") from None
    # Turn off padding and truncation, which the file may ask for.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class Tokenizer:
    """The tokenizer of an encoder's directory.

    Args:
        folder: the folder with tokenizer.json, and tokenizer_config.json if there is one.
        text: the settings for preprocessing a text, and its maximum number of tokens.
        positions: the number of positions of the model, which limits the tokens of a text.
    """

    def __init__(self, folder: Path, text: TextConfig, positions: int) -> None:
        self.file = folder / _FAST
        self.text = text
        self._config = read_optional(folder / "tokenizer_config.json")
        limits = text.max_seq_length, self._config.get("model_max_length")
        #: The maximum number of tokens of a text. A tokenizer without a limit may have a `model_max_length` of 1e30.
        self.max_length = int(min([positions, *(limit for limit in limits if limit)]))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        if not self.file.is_file():
            advice = "transformers' AutoTokenizer.from_pretrained(path).save_pretrained(path) writes one"
            raise FileNotFoundError(f"{self.file.parent} has no {_FAST}, so texts cannot be read ({advice})")
        return _open(self.file)

    def __call__(self, texts: Sequence[str], max_length: int | None = None) -> tuple[list[list[int]], int]:
        """Return the token ids of `texts` with special tokens, and the number of texts cut to `max_length`."""
        tokenizer = self._tokenizer
        min_length = tokenizer.num_special_tokens_to_add(False) + 1
        why = f"{min_length - 1} special tokens and a word, up to what the model takes"
        limit = self.max_length if max_length is None else max_length
        limit = check.integer("max_length", limit, min_length, max(self.max_length, min_length), why)
        tokenizer.enable_truncation(limit, direction=self._config.get("truncation_side", "right"))
        found = tokenizer.encode_batch_fast([self._prepared(text) for text in texts])
        return [encoding.ids for encoding in found], sum(bool(encoding.overflowing) for encoding in found)

    def _prepared(self, text: str) -> str:
        text = self.text.prompt + text
        text = text.strip() if self.text.strip else text
        return text.lower() if self.text.lower_case else text


def warn_of_cut(cut: int, total: int, limit: int) -> None:
    """Warn the caller of the encoder that texts have been cut."""
    if cut:
        what = f"{cut} of {total} texts are longer than {limit} tokens: only the first {limit} tokens count"
        warnings.warn(what, UserWarning, stacklevel=4)


class Translator(Protocol):
    def encode(self, text: str) -> list[int]:
        """Return the ids of a source text, including special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""


class _Fast:
    def __init__(self, file: Path) -> None:
        self._tokenizer = _open(file)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*ids], skip_special_tokens=True)


class _Marian:
    """Marian's tokenizer: two SentencePiece models, and a file with the ids of their tokens."""

    def __init__(self, directory: Path) -> None:
        try:
            import sentencepiece
        except ImportError:
            wanted = f"{directory / 'source.spm'}: reading it needs a package: pip install sentencepiece"
            raise ImportError(f"{wanted} (or keep the tokenizer as tokenizer.json)") from None

        def model(name: str) -> Any:
            return sentencepiece.SentencePieceProcessor(model_file=str(directory / name))

        self._source, self._target = model("source.spm"), model("target.spm")
        self._ids = read_json(directory / "vocab.json")
        for token in (_UNKNOWN, _END):
            if token not in self._ids:
                raise ValueError(f"{directory / 'vocab.json'}: it has no {token}")
        target = directory / "target_vocab.json"
        targets = read_optional(target) or self._ids
        self._pieces = {index: piece for piece, index in targets.items()}

    def encode(self, text: str) -> list[int]:
        pieces = []
        if text.startswith(">>") and "<<" in text:  # the target language, such as >>fra<<
            code, text = text.split("<<", 1)
            pieces = [f"{code}<<"]
        pieces += self._source.encode(text, out_type=str)
        return [self._ids.get(piece, self._ids[_UNKNOWN]) for piece in (*pieces, _END)]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._pieces.get(index, _UNKNOWN) for index in ids]
        return self._target.decode_pieces([x for x in pieces if x not in _SPECIAL]).replace("▁", " ").strip()


def read_translator(directory: Path) -> Translator:
    """Read a tokenizer.json, or Marian's source.spm, target.spm and vocab.json.

    Raises FileNotFoundError for missing files, ImportError (with the pip command) for a missing package, and ValueError
    for a malformed file.
    """
    if (directory / _FAST).is_file():
        return _Fast(directory / _FAST)
    if all((directory / name).is_file() for name in _SENTENCEPIECE):
        return _Marian(directory)
    raise FileNotFoundError(f"{directory}: no {_FAST}, and not all of {', '.join(_SENTENCEPIECE)}")
