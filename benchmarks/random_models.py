"""Models with random weights, under the names of Hugging Face models, and inputs for them."""

from __future__ import annotations

import itertools
import json
import math
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

#: A logit below all others, also in 16 bits.
_NEVER = -1e4
#: The special tokens of the tokenizer. They have the first ids.
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

State = dict[str, torch.Tensor]


class EncoderSizes(NamedTuple):
    """A model of BERT's architecture."""

    name: str
    hidden: int
    layers: int
    heads: int
    inter: int
    vocab: int = 30522
    positions: int = 512

    @property
    def config(self) -> dict[str, Any]:
        """The content of the model's config.json."""
        return {
            "model_type": "bert",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inter,
            "max_position_embeddings": self.positions,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
            "pad_token_id": 0,
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, by transformers' names."""
        hidden, found = self.hidden, {}
        for name, rows in (("word", self.vocab), ("position", self.positions), ("token_type", 2)):
            found[f"embeddings.{name}_embeddings.weight"] = (rows, hidden)
        found |= _norm("embeddings.LayerNorm", hidden)
        for layer in range(self.layers):
            own = f"encoder.layer.{layer}"
            for part in ("self.query", "self.key", "self.value", "output.dense"):
                found |= _linear(f"{own}.attention.{part}", hidden, hidden)
            found |= _norm(f"{own}.attention.output.LayerNorm", hidden)
            found |= _linear(f"{own}.intermediate.dense", self.inter, hidden)
            found |= _linear(f"{own}.output.dense", hidden, self.inter) | _norm(f"{own}.output.LayerNorm", hidden)
        return found


class Seq2SeqSizes(NamedTuple):
    """A model of Marian's or BART's architecture, with `layers` layers in the encoder and in the decoder."""

    name: str
    kind: str  # "marian" or "bart"
    hidden: int
    layers: int
    heads: int
    inter: int
    vocab: int
    positions: int

    @property
    def config(self) -> dict[str, Any]:
        """The content of the model's config.json."""
        marian = self.kind == "marian"
        pad, start, end = (self.vocab - 1, self.vocab - 1, 0) if marian else (1, 2, 2)
        sides = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (("layers", self.layers), ("attention_heads", self.heads), ("ffn_dim", self.inter))
        }
        return {
            "model_type": self.kind,
            "vocab_size": self.vocab,
            "d_model": self.hidden,
            **sides,
            "activation_function": "swish" if marian else "gelu",
            "scale_embedding": marian,
            "max_position_embeddings": self.positions,
            "bos_token_id": 0,
            "pad_token_id": pad,
            "decoder_start_token_id": start,
            "eos_token_id": end,
            "forced_eos_token_id": None,
        }

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, by transformers' names."""
        hidden = self.hidden
        found: dict[str, tuple[int, ...]] = {"model.shared.weight": (self.vocab, hidden)}
        for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
            if self.kind == "bart":
                # BART reserves the first two positions for padding.
                found[f"model.{side}.embed_positions.weight"] = (self.positions + 2, hidden)
                found |= _norm(f"model.{side}.layernorm_embedding", hidden)
            for layer in range(self.layers):
                own = f"model.{side}.layers.{layer}"
                for attention in attentions:
                    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                        found |= _linear(f"{own}.{attention}.{part}", hidden, hidden)
                    found |= _norm(f"{own}.{attention}_layer_norm", hidden)
                found |= _linear(f"{own}.fc1", self.inter, hidden) | _linear(f"{own}.fc2", hidden, self.inter)
                found |= _norm(f"{own}.final_layer_norm", hidden)
        return found


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def random_state(sizes: EncoderSizes | Seq2SeqSizes, dtype: str, device: torch.device) -> State:
    """Return weights whose products keep the magnitude. In an encoder-decoder no sequence ends by itself."""
    generator = torch.Generator(device).manual_seed(0)
    state = {}
    for name, shape in sizes.shapes.items():
        values = torch.randn(shape, generator=generator, device=device)
        values *= shape[-1] ** -0.5 if len(shape) > 1 else 0.02
        if "norm" in name.lower() and name.endswith(".weight"):
            values += 1
        state[name] = values.to(getattr(torch, dtype))
    if isinstance(sizes, Seq2SeqSizes):
        bias = torch.zeros(1, sizes.vocab, dtype=getattr(torch, dtype), device=device)
        bias[0, [sizes.config["eos_token_id"], sizes.config["pad_token_id"]]] = _NEVER
        state["final_logits_bias"] = bias
    return state


# --- batches --------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Sequences with their padding at the end."""

    ids: torch.Tensor  # int64 [batch, seq]
    mask: torch.Tensor  # int64 [batch, seq], 1 for a word


def half_lengths(batch: int, seq: int) -> list[int]:
    """Return lengths from 1 to seq - 1 in pairs that add up to `seq`, so half of the positions hold words."""
    first = np.random.default_rng(0).integers(1, seq, batch // 2)
    return [*first.tolist(), *(seq - first).tolist()]


def uniform_lengths(batch: int, seq: int) -> list[int]:
    """Return lengths that are uniform in 1..seq."""
    return np.random.default_rng(1).integers(1, seq + 1, batch).tolist()


def random_batch(lengths: Sequence[int], seq: int, vocab: int, generator: torch.Generator) -> Batch:
    """Return random ids without the special ids, in sequences of these lengths in random order."""
    device = generator.device
    order = torch.randperm(len(lengths), generator=generator, device=device)
    own = torch.tensor(lengths, device=device)[order]
    mask = (torch.arange(seq, device=device) < own[:, None]).long()
    ids = torch.randint(len(_SPECIAL), vocab - 1, mask.shape, generator=generator, device=device)
    return Batch(ids * mask, mask)


# --- texts ----------------------------------------------------------------------------------------------


def text_lengths(texts: int, mean: float, most: int) -> list[int]:
    """Return lengths of texts in tokens, log-normal as in collections of sentences and paragraphs, from 3 to `most`."""
    sigma = 0.8
    drawn = np.random.default_rng(2).lognormal(math.log(mean) - sigma**2 / 2, sigma, texts)
    return np.clip(np.rint(drawn), 3, most).astype(int).tolist()


def _words(vocab: int) -> list[str]:
    """Return words of three letters, enough to fill the vocabulary."""
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=3))
    return [*itertools.islice(words, vocab - len(_SPECIAL))]


def random_texts(lengths: Sequence[int], vocab: int) -> list[str]:
    """Return texts of these lengths in tokens, including the two special tokens around each text."""
    rng, words = np.random.default_rng(3), _words(vocab)
    return [" ".join(words[i] for i in rng.integers(0, len(words), length - 2)) for length in lengths]


def save(sizes: EncoderSizes, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write a directory as sentence-transformers does: model, tokenizer, and the normalized mean of the words."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    ids = {word: i for i, word in enumerate([*_SPECIAL, *_words(sizes.vocab)])}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    like = next(iter(state.values()))
    dtype = str(like.dtype).removeprefix("torch.")
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    files = {
        "config.json": {**sizes.config, "architectures": ["BertModel"], "dtype": dtype},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": sizes.positions, **special
        },
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": sizes.positions, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": sizes.hidden, "pooling_mode_mean_tokens": True},
    }  # fmt: skip
    for path, _ in modules:
        (folder / path).mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    # Published models have a pooler, so write one; no code here reads it.
    pooler = {f"pooler.{name}": like.new_zeros(shape) for name, shape in _linear("dense", *[sizes.hidden] * 2).items()}
    save_file({**state, **pooler}, folder / "model.safetensors", metadata={"format": "pt"})
