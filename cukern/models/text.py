"""From texts to token ids, and from the vectors of words to one vector for a text."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import Layers, Words
from cukern.models.checkpoint import need, read_json
from cukern.runtime import check

#: Poolings by sentence-transformers' names, in the order in which it concatenates their vectors.
POOLINGS = ("cls", "max", "mean")
#: Poolings of sentence-transformers by their keys in a configuration, the implemented ones and others.
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


class TextConfig(NamedTuple):
    """How a text becomes token ids, and vectors of words one of the text."""

    #: The poolings whose vectors are concatenated, in the order of `POOLINGS`.
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = True
    #: The most tokens of a text; None leaves it to the tokenizer and the positions of the model.
    max_seq_length: int | None = None
    lower_case: bool = False
    strip: bool = False
    #: What stands before each text.
    prompt: str = ""


def read_text_config(folder: Path) -> tuple[Path, TextConfig]:
    """The folder of the encoder in a model's directory, and sentence-transformers' configuration of it.

    Without a modules.json the folder is the directory itself, and vectors are normalized means.

    Raises:
        FileNotFoundError: a file that modules.json asks for is missing.
        ValueError: a module, a pooling or an option that is not taken.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return folder, TextConfig()
    places: dict[str, Path] = {}
    for module in read_json(listing):
        kind = str(module.get("type")).rpartition(".")[2]
        check.one_of(f"the type of a module of {listing}", kind, _MODULES)
        places[kind] = folder / module.get("path", "")
    if "Transformer" not in places:
        raise ValueError(f"{listing} has no module Transformer")
    own = _sentence_config(places["Transformer"])
    pooling = _read_pooling(places["Pooling"]) if "Pooling" in places else {}
    prompt = _default_prompt(folder / "config_sentence_transformers.json")
    if prompt and not pooling.get("include_prompt", True):
        check.fail("include_prompt of the pooling", "true where the model has a default prompt", "false")
    text = TextConfig(
        pooling.get("modes", ("mean",)),
        "Normalize" in places,
        own.get("max_seq_length"),
        bool(own.get("do_lower_case")),
        True,
        prompt,
    )
    return places["Transformer"], text


def _sentence_config(folder: Path) -> dict[str, Any]:
    """The options of the module Transformer: older versions name the file after the architecture."""
    files = sorted(folder.glob("sentence_*_config.json"))
    return read_json(files[0]) if files else {}


def _read_pooling(folder: Path) -> dict[str, Any]:
    """The modes of a module Pooling, in their order, and whether the prompt is pooled."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}, the configuration of the pooling, does not exist")
    config = read_json(file)
    given = config.get("pooling_mode")
    modes = [given] if isinstance(given, str) else given or [_POOLING_KEYS[x] for x in _POOLING_KEYS if config.get(x)]
    if not modes:
        raise ValueError(f"{file} names no pooling")
    for mode in modes:
        check.one_of(f"the pooling in {file}", mode, POOLINGS)
    return {"modes": tuple(x for x in POOLINGS if x in modes), "include_prompt": config.get("include_prompt", True)}


def _default_prompt(file: Path) -> str:
    config = read_json(file) if file.is_file() else {}
    name = config.get("default_prompt_name")
    return config["prompts"][name] if name else ""


class Tokenizer:
    """The tokenizer of a model's directory.

    Args:
        folder: the folder with tokenizer.json, and tokenizer_config.json if there is one.
        text: what is done with a text first, and its most tokens.
        positions: the most tokens that the model has positions for.
    """

    def __init__(self, folder: Path, text: TextConfig, positions: int) -> None:
        self.file = folder / "tokenizer.json"
        self.text = text
        file = folder / "tokenizer_config.json"
        self._config = read_json(file) if file.is_file() else {}
        limits = text.max_seq_length, self._config.get("model_max_length")
        #: The most tokens of a text. Configurations have 1e30 for any number.
        self.max_length = int(min([positions, *(limit for limit in limits if limit)]))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        tokenizers = need("tokenizers", "reading texts")
        if not self.file.is_file():
            advice = "transformers' AutoTokenizer.from_pretrained(path).save_pretrained(path) writes one"
            raise FileNotFoundError(f"{self.file.parent} has no tokenizer.json, so texts cannot be read ({advice})")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(self.file))
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"{self.file} is not a tokenizer: {error}") from None
        # The file may ask for a fixed length, which no unpadded batch needs.
        tokenizer.no_padding()
        return tokenizer

    def __call__(self, texts: Sequence[str], max_length: int | None = None) -> tuple[list[list[int]], int]:
        """The token ids of each text, special tokens among them, and how many texts were cut to `max_length`."""
        tokenizer = self._tokenizer
        least = tokenizer.num_special_tokens_to_add(False) + 1
        why = f"{least - 1} special tokens and a word, up to what the model takes"
        limit = self.max_length if max_length is None else max_length
        limit = check.integer("max_length", limit, least, max(self.max_length, least), why)
        tokenizer.enable_truncation(limit, direction=self._config.get("truncation_side", "right"))
        found = tokenizer.encode_batch_fast([self._prepared(text) for text in texts])
        return [encoding.ids for encoding in found], sum(bool(encoding.overflowing) for encoding in found)

    def _prepared(self, text: str) -> str:
        text = self.text.prompt + text
        text = text.strip() if self.text.strip else text
        return text.lower() if self.text.lower_case else text


def warn_of_cut(cut: int, total: int, limit: int) -> None:
    """Says to the caller of the encoder how many texts were too long, and what was done with them."""
    if cut:
        what = f"{cut} of {total} texts are longer than {limit} tokens: only the first {limit} tokens count"
        warnings.warn(what, UserWarning, stacklevel=4)


def check_texts(texts: Any) -> list[str]:
    """`texts` as a list. Raises TypeError for what is not a list of texts."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        check.fail("texts", "a list of texts", type(texts).__name__, TypeError)
    found = list(texts)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            check.fail(f"texts[{i}]", "a str", type(text).__name__, TypeError)
    return found


def pooled(layers: Layers, hidden: Any, words: Words, modes: Sequence[str], normalize: bool) -> Any:
    """A vector for each sequence, float32 [batch, len(modes) * hidden]; see `ArrayLayers.pool`."""
    parts = [layers.pool(hidden, words, mode) for mode in modes]
    vectors = parts[0] if len(parts) == 1 else layers.concatenate(parts, 1)
    return layers.normalized(vectors) if normalize else vectors


def by_length(tokens: Sequence[Sequence[int]], batch_size: int) -> list[np.ndarray[Any, np.dtype[np.intp]]]:
    """The numbers of the texts in batches of like lengths, the longest first: if memory is short, it fails at once."""
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    order = np.argsort(-lengths, kind="stable")
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
