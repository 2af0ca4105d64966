"""Read a model's sentence-transformers configuration, and pool hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import Layers, Words
from cukern.models.checkpoint import read_json, read_optional
from cukern.runtime import check

#: The implemented pooling modes, in the order in which sentence-transformers concatenates their vectors.
POOLINGS = ("cls", "max", "mean")
#: sentence-transformers' pooling modes, keyed by the configuration keys that select them.
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULES = ("Transformer", "Pooling", "Normalize")
#: Maximum tokens per batch. On a GPU a matrix multiplication with more rows is hardly faster per row.
_BATCH_TOKENS = 16384


class TextConfig(NamedTuple):
    """The settings for tokenizing a text and for pooling the hidden states of its words (tokens)."""

    #: The pooling modes, in the order of `POOLINGS`. Their vectors are concatenated.
    pooling: tuple[str, ...] = ("mean",)
    normalize: bool = True
    #: Maximum tokens of a text; None: the tokenizer's and the model's limits.
    max_seq_length: int | None = None
    lower_case: bool = False
    strip: bool = False
    prompt: str = ""  # precedes each text


def read_text_config(folder: Path) -> tuple[Path, TextConfig]:
    """Return the encoder's folder in a model's directory, and its sentence-transformers configuration.

    Without a modules.json, return the directory and the default configuration. Raises ValueError for an unsupported
    module, pooling or option.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return folder, TextConfig()
    folders: dict[str, Path] = {}
    for module in read_json(listing):
        kind = str(module.get("type")).rpartition(".")[2]
        check.one_of(f"the type of a module of {listing}", kind, _MODULES)
        folders[kind] = folder / module.get("path", "")
    if "Transformer" not in folders:
        raise ValueError(f"{listing} has no module Transformer")
    sentence = _sentence_config(folders["Transformer"])
    pooling = _read_pooling(folders["Pooling"]) if "Pooling" in folders else {}
    prompt = _default_prompt(folder / "config_sentence_transformers.json")
    if prompt and not pooling.get("include_prompt", True):
        check.fail("include_prompt of the pooling", "true where the model has a default prompt", "false")
    text = TextConfig(
        pooling.get("modes", ("mean",)),
        "Normalize" in folders,
        sentence.get("max_seq_length"),
        bool(sentence.get("do_lower_case")),
        True,
        prompt,
    )
    return folders["Transformer"], text


def _sentence_config(folder: Path) -> dict[str, Any]:
    """Return the content of sentence_*_config.json, whose name depends on the version of sentence-transformers."""
    files = sorted(folder.glob("sentence_*_config.json"))
    return read_json(files[0]) if files else {}


def _read_pooling(folder: Path) -> dict[str, Any]:
    """Return the pooling modes in the order of `POOLINGS`, and whether the prompt is pooled too."""
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
    config = read_optional(file)
    name = config.get("default_prompt_name")
    return config["prompts"][name] if name else ""


def check_texts(texts: Any) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        check.fail("texts", "a list of texts", type(texts).__name__, TypeError)
    found = list(texts)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            check.fail(f"texts[{i}]", "a str", type(text).__name__, TypeError)
    return found


def pooled(layers: Layers, hidden: Any, words: Words, modes: Sequence[str], normalize: bool) -> Any:
    """Pool the hidden states by each mode, and concatenate the vectors: float32 [batch, len(modes) * hidden]."""
    parts = [layers.pool(hidden, words, mode) for mode in modes]
    vectors = parts[0] if len(parts) == 1 else layers.concatenate(parts, 1)
    return layers.normalized(vectors) if normalize else vectors


def by_length(tokens: Sequence[Sequence[int]], batch_size: int | None) -> list[np.ndarray[Any, np.dtype[np.intp]]]:
    """Group texts of similar lengths into batches of `batch_size` texts. Return the indices of each batch's texts.

    The longest texts come first, so that the first batch fails if memory is too small. Without `batch_size` a batch has
    at most `_BATCH_TOKENS` tokens, or one text.
    """
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    order = np.argsort(-lengths, kind="stable")
    if batch_size is not None:
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    ends: list[int] = []
    count = 0
    for number, length in enumerate(lengths[order].tolist()):
        # Count a text without tokens as one token.
        count += max(length, 1)
        if count > _BATCH_TOKENS and number > (ends[-1] if ends else 0):
            ends.append(number)
            count = max(length, 1)
    return [batch for batch in np.split(order, ends) if len(batch)]
