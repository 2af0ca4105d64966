"""Read the weights and the configuration of Hugging Face's Marian, BART and mBART."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cukern.models import checkpoint
from cukern.models._layers import ACTIVATIONS, DTYPES, Affine, Layers, layers_of, library_of
from cukern.models.decoder import DecoderWeights
from cukern.models.encoder_layer import EncoderLayerWeights
from cukern.runtime import check


class Family(NamedTuple):
    """Properties that transformers' code fixes, so that no configuration contains them."""

    learned_positions: bool
    position_offset: int  # the table's row of position 0
    embedding_norm: bool
    normalize_before: bool  # pre-norm layers, and a norm after the last layer


FAMILIES = {
    "marian": Family(False, 0, False, False),
    "bart": Family(True, 2, True, False),
    "mbart": Family(True, 2, True, True),
}


class Config(NamedTuple):
    """The sizes of an encoder-decoder."""

    family: Family
    hidden: int
    vocab: int  # source vocabulary
    encoder_layers: int
    decoder_layers: int
    encoder_heads: int
    decoder_heads: int
    activation: str
    scale_embedding: bool
    max_positions: int
    tied: bool  # the output projection's weight is the embedding table
    shared: bool  # source and target share the embedding table


def read_config(config: Any) -> tuple[Config, dict[str, Any]]:
    """Return a configuration's sizes, and the configuration (a dict or an object with `to_dict`) as a dict."""
    found = checkpoint.content("config", config)
    kind = found.get("model_type")
    if kind not in FAMILIES:
        wanted = f"of an encoder-decoder of model_type {', '.join(FAMILIES)}"
        check.fail("config", wanted, f"model_type {kind!r} (architectures: {found.get('architectures')})")

    def size(key: str) -> int:
        if found.get(key) is None:
            check.fail("config", f"a configuration with {key!r}", f"one of {', '.join(map(str, sorted(found)))}")
        return check.integer(f"config[{key!r}]", found[key], 1)

    activation = found.get("activation_function") or "gelu"
    if activation not in ACTIVATIONS:
        check.fail("config['activation_function']", f"one of {', '.join(ACTIVATIONS)}", repr(activation))
    hidden = size("d_model")
    for key in ("encoder_attention_heads", "decoder_attention_heads"):
        if hidden % size(key):
            check.fail(f"config[{key!r}]", f"a divisor of d_model ({hidden})", found[key])
    sizes = Config(
        FAMILIES[kind], hidden, size("vocab_size"), size("encoder_layers"), size("decoder_layers"),
        size("encoder_attention_heads"), size("decoder_attention_heads"), ACTIVATIONS[activation],
        bool(found.get("scale_embedding")), found.get("max_position_embeddings") or 1024,
        found.get("tie_word_embeddings", True) is not False,
        kind != "marian" or found.get("share_encoder_decoder_embeddings", True) is not False,
    )  # fmt: skip
    return sizes, dict(found)


class Side(NamedTuple):
    """Weights of the encoder or the decoder outside its layers."""

    embeddings: Any  # [vocab, hidden]
    positions: Any  # [positions, hidden]
    embedding_norm: Affine | None
    last_norm: Affine | None


class Weights(NamedTuple):
    source: Side
    target: Side
    encoder: list[EncoderLayerWeights]
    decoder: list[DecoderWeights]
    head: Any  # [target vocab, hidden]
    head_bias: Any  # [target vocab] or None


def sinusoids(positions: int, hidden: int) -> np.ndarray[Any, Any]:
    """Return Marian's position encodings, float32 [positions, hidden]: hidden / 2 sines, then hidden / 2 cosines.

    "Attention Is All You Need" (arXiv:1706.03762) interleaves the same values.
    """
    rates = np.power(10000.0, 2 * (np.arange(hidden) // 2) / hidden)
    angles = np.arange(positions)[:, None] / rates
    return np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1).astype(np.float32)


class _State:
    """A state dict without the prefix `model.` in its keys."""

    def __init__(self, state: Mapping[str, Any], layers: Layers, dtype: str) -> None:
        self._state = {key.removeprefix("model."): value for key, value in state.items()}
        self._layers, self._dtype = layers, dtype
        self._converted: dict[int, Any] = {}

    def get(self, *keys: str) -> Any:
        """Return the array of the first key that exists, in the model's dtype. Each array is converted only once."""
        for key in keys:
            if key in self._state:
                array = self._state[key]
                if id(array) not in self._converted:
                    self._converted[id(array)] = self._layers.cast(array, self._dtype)
                return self._converted[id(array)]
        names = " or ".join(f"'model.{key}'" if key != "lm_head.weight" else repr(key) for key in keys)
        check.fail("state", f"a state dict with {names}", f"{len(self._state)} keys without it")

    def find(self, key: str) -> Any:
        return self.get(key) if key in self._state else None

    def affine(self, *names: str) -> Affine:
        both = [[self.get(f"{name}.{part}") for name in names] for part in ("weight", "bias")]
        return Affine(*(x[0] if len(x) == 1 else self._layers.concatenate(x) for x in both))

    def attention(self, name: str) -> tuple[Affine, Affine]:
        """Return a self-attention's QKV projection and output projection."""
        return self.affine(*(f"{name}.{x}_proj" for x in "qkv")), self.affine(f"{name}.out_proj")


def _encoder_layer(state: _State, name: str) -> EncoderLayerWeights:
    qkv, out = state.attention(f"{name}.self_attn")
    norms = state.affine(f"{name}.self_attn_layer_norm"), state.affine(f"{name}.final_layer_norm")
    return EncoderLayerWeights(qkv, out, norms[0], state.affine(f"{name}.fc1"), state.affine(f"{name}.fc2"), norms[1])


def decoder_layer(state: _State, name: str) -> DecoderWeights:
    qkv, out = state.attention(f"{name}.self_attn")
    cross = f"{name}.encoder_attn"
    return DecoderWeights(
        qkv, out, state.affine(f"{name}.self_attn_layer_norm"),
        state.affine(f"{cross}.q_proj"), state.affine(f"{cross}.k_proj", f"{cross}.v_proj"),
        state.affine(f"{cross}.out_proj"), state.affine(f"{name}.encoder_attn_layer_norm"),
        state.affine(f"{name}.fc1"), state.affine(f"{name}.fc2"), state.affine(f"{name}.final_layer_norm"),
    )  # fmt: skip


def _side(state: _State, name: str, config: Config, layers: Layers, dtype: str) -> Side:
    names = [f"{name}.embed_tokens.weight", *(["shared.weight"] if config.shared else [])]
    if config.shared and config.tied:
        # A file may store tied embeddings under any of their names.
        names = ["shared.weight", "decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight"]
    embeddings = state.get(*names)
    key = f"{name}.embed_positions.weight"
    positions = state.get(key) if config.family.learned_positions else state.find(key)
    if positions is None:
        positions = layers.cast(layers.put(sinusoids(config.max_positions, config.hidden)), dtype)
    norms = [
        state.affine(f"{name}.{norm}") if has else None
        for norm, has in (
            ("layernorm_embedding", config.family.embedding_norm),
            ("layer_norm", config.family.normalize_before),
        )
    ]
    return Side(embeddings, positions[config.family.position_offset :], *norms)


def read_weights(state: Mapping[str, Any], config: Config, dtype: str | None) -> tuple[Weights, Layers, str]:
    """Return a state dict's weights, the operations on them, and their dtype. Raises ValueError for a missing key."""
    if not isinstance(state, Mapping) or not state:
        check.fail("state", "a dict of arrays by name", f"{type(state).__name__}", TypeError)
    first = next(iter(state.values()))
    layers, library = layers_of("state", first), library_of("state", first)
    if dtype is None:
        floats = (library.dtype(x) for x in state.values())
        dtype = next((x for x in floats if x in DTYPES), "float32")
    check.one_of("dtype", dtype, DTYPES)
    named = _State(state, layers, dtype)
    source, target = (_side(named, name, config, layers, dtype) for name in ("encoder", "decoder"))
    head = target.embeddings if config.tied else named.get("lm_head.weight")
    check.shape("the embeddings", source.embeddings.shape, (config.vocab, config.hidden), "[vocab_size, d_model]")
    check.shape("the output product", head.shape, (head.shape[0], config.hidden), "[vocab, d_model]")
    bias = named.find("final_logits_bias")
    weights = Weights(
        source, target,
        [_encoder_layer(named, f"encoder.layers.{i}") for i in range(config.encoder_layers)],
        [decoder_layer(named, f"decoder.layers.{i}") for i in range(config.decoder_layers)],
        head, None if bias is None else bias.reshape(-1),
    )  # fmt: skip
    if bias is not None:
        check.shape("final_logits_bias", tuple(bias.shape[-1:]), (head.shape[0],), "[1, vocab]")
    return weights, layers, dtype


def read_directory(path: str | Path, library: str | None, device: Any) -> tuple[dict[str, Any], Any, Any]:
    """Return the state dict, `config.json`, and `generation_config.json` or None."""
    library, folder = checkpoint.choose_library(library), checkpoint.expect_directory(path)
    config = checkpoint.read_config(folder)
    read_config(config)
    state = checkpoint.read_weights(folder, library, device)
    return state, config, checkpoint.read_optional(folder / "generation_config.json") or None
