"""Encoders built at random with transformers, small, and the tokenizer that goes with them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from cukern.runtime import arrays

WORDS = [f"{x}{y}" for x in ("ka", "lo", "mi", "nu", "re") for y in ("", "ta", "son", "ver", "lig", "do", "per")]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
#: More ids than the tokenizer has, as in most models.
VOCAB = len(WORDS) + len(SPECIAL) + 5


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch: among other processes those of a small product wait far longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    """An architecture in one size."""

    config: type
    model: type
    sizes: Mapping[str, Any]
    scale: float = 0.15  # of the weights of products and of the embeddings


def _sizes(hidden: int, heads: int, layers: int, wide: int, positions: int, **others: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers,
        "intermediate_size": wide, "max_position_embeddings": positions, "pad_token_id": 1, **others,
    }  # fmt: skip


def _distil(hidden: int, heads: int, layers: int, wide: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "dim": hidden, "n_heads": heads, "n_layers": layers, "hidden_dim": wide,
        "max_position_embeddings": positions, "pad_token_id": 1,
    }  # fmt: skip


#: Each architecture in two sizes: several layers, and one with a head alone and sizes that are no powers of two.
CASES = {
    "bert": Case(BertConfig, BertModel, _sizes(64, 4, 3, 128, 40)),
    "bert-odd": Case(BertConfig, BertModel, _sizes(42, 1, 1, 50, 24, type_vocab_size=3, layer_norm_eps=1e-3)),
    "bert-minilm": Case(BertConfig, BertModel, _sizes(96, 3, 2, 384, 40)),
    "roberta": Case(RobertaConfig, RobertaModel, _sizes(64, 4, 3, 128, 42, type_vocab_size=1, layer_norm_eps=1e-5)),
    "roberta-odd": Case(RobertaConfig, RobertaModel, _sizes(42, 1, 1, 50, 24)),
    "xlm-roberta": Case(XLMRobertaConfig, XLMRobertaModel, _sizes(64, 2, 2, 96, 40, type_vocab_size=1)),
    "xlm-roberta-odd": Case(XLMRobertaConfig, XLMRobertaModel, _sizes(42, 3, 1, 50, 24, type_vocab_size=1)),
    "distilbert": Case(DistilBertConfig, DistilBertModel, _distil(64, 4, 2, 128, 40)),
    "distilbert-odd": Case(DistilBertConfig, DistilBertModel, _distil(42, 1, 1, 50, 24)),
}
ARCHITECTURES = ("bert", "roberta", "xlm-roberta", "distilbert")
#: The sizes of layers of known models, a few of them.
LARGER = {
    "bert-base": Case(BertConfig, BertModel, _sizes(768, 12, 3, 3072, 512), 0.04),
    "minilm-l6": Case(BertConfig, BertModel, _sizes(384, 12, 3, 1536, 512), 0.05),
    "xlm-roberta-base": Case(XLMRobertaConfig, XLMRobertaModel, _sizes(768, 12, 2, 3072, 514, type_vocab_size=1), 0.04),
    "distilbert-base": Case(DistilBertConfig, DistilBertModel, _distil(768, 12, 2, 3072, 512), 0.04),
}


def randomized(model: torch.nn.Module, scale: float = 0.15) -> Any:
    """The model with weights of which each, biases and norms too, shows in the result."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.15 if weight.ndim == 1 else scale))
            if "norm.weight" in name.lower():
                weight += 1
    return model.eval()


@functools.cache
def model(name: str, **options: Any) -> Any:
    """The model of a case; shared, so not to be written."""
    case = (CASES | LARGER)[name]
    return randomized(case.model(case.config(**{**case.sizes, **options}, attn_implementation="eager")), case.scale)


def state_of(source: torch.nn.Module, library: str) -> dict[str, Any]:
    """The weights of a model in a library: "torch", "numpy", or on the GPU "cuda" or "cupy"."""
    state = {name: weight.detach().clone() for name, weight in source.state_dict().items()}
    return {name: put(weight, library) for name, weight in state.items()}


def put(tensor: torch.Tensor, library: str) -> Any:
    """A tensor on the CPU as an array of a library, by the names of `state_of`."""
    if library == "cuda":
        return tensor.cuda()
    if library == "cupy":
        import cupy

        return cupy.asarray(tensor.numpy())
    return tensor if library == "torch" else tensor.numpy()


def numpy_of(array: Any) -> np.ndarray[Any, Any]:
    """An array of any library in NumPy."""
    library = arrays.library_of(array)
    assert library is not None
    return library.to_numpy(array)


class Batch(NamedTuple):
    """Sequences with padding after them."""

    ids: torch.Tensor
    mask: torch.Tensor


def batch(lengths: list[int], seq: int, pad: int = 1) -> Batch:
    """A batch of words drawn at random, without special ids."""
    generator = torch.Generator().manual_seed(sum(lengths) + seq)
    mask = (torch.arange(seq) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(len(SPECIAL), VOCAB, mask.shape, generator=generator)
    return Batch(ids.masked_fill(mask == 0, pad), mask)


@torch.no_grad()
def wanted(source: Any, ids: torch.Tensor, mask: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    """The hidden states by transformers, with zeros where there is no word."""
    states = source(input_ids=ids, attention_mask=mask, **others).last_hidden_state
    return states.masked_fill(mask[..., None] == 0, 0)


def tokenizer() -> Tokenizer:
    """Words by spaces, between `<s>` and `</s>`. It cuts and pads, as the files of some models ask for."""
    ids = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", ids["<s>"]), ("</s>", ids["</s>"])]
    )
    made.enable_truncation(6)
    made.enable_padding(length=8, pad_id=1, pad_token="<pad>")
    return made


def texts(lengths: list[int]) -> list[str]:
    """Texts of so many words."""
    rng = np.random.default_rng(sum(lengths))
    return [" ".join(rng.choice(WORDS, size)) for size in lengths]


def save(source: Any, folder: Path, **options: Any) -> Path:
    """A directory with a model and a tokenizer, as transformers writes it."""
    source.save_pretrained(folder, **options)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder
