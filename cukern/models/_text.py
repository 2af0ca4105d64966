"""Texts and their tokens, by the tokenizer of a model's directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from cukern.models.checkpoint import need, read_json

_SENTENCEPIECE = ("source.spm", "target.spm", "vocab.json")
_UNKNOWN, _END, _SPECIAL = "<unk>", "</s>", ("</s>", "<pad>", "<unk>")


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """The ids of a source, its special tokens included."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a target, without its special tokens."""


class _Fast:
    """`tokenizer.json`, by the package tokenizers."""

    def __init__(self, path: Path) -> None:
        tokenizers = need("tokenizers", "reading texts")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no class of its own
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*ids], skip_special_tokens=True)


class _Marian:
    """Marian's two SentencePiece models, over a vocabulary of its own."""

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
        targets = read_json(target) if target.is_file() else self._ids
        self._pieces = {index: piece for piece, index in targets.items()}

    def encode(self, text: str) -> list[int]:
        pieces = []
        if text.startswith(">>") and "<<" in text:  # the code of the target's language, such as >>fra<<
            code, text = text.split("<<", 1)
            pieces = [f"{code}<<"]
        pieces += self._source.encode(text, out_type=str)
        return [self._ids.get(piece, self._ids[_UNKNOWN]) for piece in (*pieces, _END)]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._pieces.get(index, _UNKNOWN) for index in ids]
        return self._target.decode_pieces([x for x in pieces if x not in _SPECIAL]).replace("▁", " ").strip()


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a directory: `tokenizer.json`, or Marian's source.spm, target.spm and vocab.json.

    Raises FileNotFoundError where there is neither, ImportError with the pip command of a package that is missing, and
    ValueError for a file that is none.
    """
    if (directory / "tokenizer.json").is_file():
        return _Fast(directory / "tokenizer.json")
    if all((directory / name).is_file() for name in _SENTENCEPIECE):
        return _Marian(directory)
    raise FileNotFoundError(f"{directory}: no tokenizer.json, and not all of {', '.join(_SENTENCEPIECE)}")
