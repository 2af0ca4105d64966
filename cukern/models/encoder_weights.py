"""Read the configurations and the weights of encoders of the BERT family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

from cukern.models._layers import ACTIVATIONS, DTYPES, Affine, layers_of, library_of, place
from cukern.models.checkpoint import content, listed
from cukern.models.encoder_layer import EncoderLayerWeights
from cukern.ops.varlen_attention.choose import MAX_DIM
from cukern.runtime import check


class Names(NamedTuple):
    """The names of a family's weights, without `.weight` and `.bias`. `layer` is the prefix of a layer's names."""

    layer: str  # the prefix in a layer; {} is the layer's index
    query: str
    key: str
    value: str
    out: str
    self_norm: str
    up: str
    down: str
    final_norm: str
    word: str = "embeddings.word_embeddings"
    position: str = "embeddings.position_embeddings"
    token_type: str = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"


_BERT = Names(
    layer="encoder.layer.{}.",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    out="attention.output.dense",
    self_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    final_norm="output.LayerNorm",
)
_DISTILBERT = Names(
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    out="attention.out_lin",
    self_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    final_norm="output_layer_norm",
)

#: Weights that do not affect the last hidden states.
_UNUSED = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids")


class Family(NamedTuple):
    names: Names
    #: Maps the fields of `EncoderConfig` to this family's configuration keys.
    renamed: Mapping[str, str]
    #: Whether positions start at pad_token_id + 1 and count only words, instead of starting at 0.
    positions_after_padding: bool
    pad_token_id: int
    has_token_types: bool = True
    layer_norm_eps: float | None = None  # for families whose configurations have no such key


_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}

FAMILIES = {
    "bert": Family(_BERT, {}, False, 0),
    "roberta": Family(_BERT, {}, True, 1),
    "xlm-roberta": Family(_BERT, {}, True, 1),
    "distilbert": Family(_DISTILBERT, _DISTILBERT_KEYS, False, 0, False, 1e-12),
}


@dataclass(frozen=True)
class EncoderConfig:
    """The configuration of an encoder, with transformers' names. `EncoderConfig.from_dict` reads a config.json.

    Args:
        model_type: "bert", "roberta", "xlm-roberta" or "distilbert".
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: the sizes of the model.
        max_position_embeddings: rows of the table of position embeddings.
        type_vocab_size: rows of the table of token type embeddings; 0 if there is no such table.
        layer_norm_eps: the number that the layer norms add to the variance.
        hidden_act: one of `ACTIVATIONS`; "gelu" uses the error function.
        pad_token_id: the id of padding. RoBERTa's positions start at pad_token_id + 1.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        check.one_of("config.model_type", self.model_type, FAMILIES)
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"):
            check.integer(f"config.{name}", getattr(self, name), 1)
        check.integer("config.num_hidden_layers", self.num_hidden_layers, 0)
        check.integer("config.type_vocab_size", self.type_vocab_size, 0)
        check.integer("config.pad_token_id", self.pad_token_id, 0)
        check.integer("config.max_position_embeddings", self.max_position_embeddings, self.first_position + 1)
        check.number("config.layer_norm_eps", self.layer_norm_eps)
        check.one_of("config.hidden_act", self.hidden_act, ACTIVATIONS)
        if self.hidden_size % self.num_attention_heads:
            wanted = f"a multiple of num_attention_heads {self.num_attention_heads}"
            check.fail("config.hidden_size", wanted, self.hidden_size)
        if self.hidden_size // self.num_attention_heads > MAX_DIM:
            wanted = f"at most {MAX_DIM} for each of the {self.num_attention_heads} heads"
            check.fail("config.hidden_size", wanted, self.hidden_size)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any] | Any) -> EncoderConfig:
        """Make a configuration from the content of a config.json or a configuration object of transformers.

        Raises ValueError for an unsupported architecture, activation or feature, and for a missing size. Raises
        TypeError for another type of `config`.
        """
        config = content("config", config)
        model_type = config.get("model_type")
        check.one_of("config.model_type", model_type, FAMILIES)
        family = FAMILIES[str(model_type)]
        _refuse_features(config)
        values: dict[str, Any] = {"model_type": model_type, "pad_token_id": family.pad_token_id}
        for name, field in cls.__dataclass_fields__.items():
            key = family.renamed.get(name, name)
            if config.get(key) is not None:
                values[name] = config[key]
            elif name not in values and field.default is MISSING:
                check.fail(f"config.{key}", "given", "nothing")
        if not family.has_token_types:
            values["type_vocab_size"] = 0
        if family.layer_norm_eps is not None:
            values["layer_norm_eps"] = family.layer_norm_eps
        return cls(**values)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def first_position(self) -> int:
        """The position of a sequence's first word."""
        return self.pad_token_id + 1 if self.family.positions_after_padding else 0

    @property
    def max_seq_len(self) -> int:
        return self.max_position_embeddings - self.first_position


def _refuse_features(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an unimplemented feature that changes the forward pass."""
    if (kind := config.get("position_embedding_type")) not in (None, "absolute"):
        check.fail("config.position_embedding_type", "'absolute' (relative positions are not supported)", repr(kind))
    for name, what in (
        ("is_decoder", "a causal mask"),
        ("add_cross_attention", "cross attention"),
        ("is_encoder_decoder", "a decoder"),
    ):
        if config.get(name):
            check.fail(f"config.{name}", f"False ({what} is not supported)", config[name])
    for name in ("quantization_config", "pruned_heads"):
        if config.get(name):
            check.fail(f"config.{name}", "absent (it is not supported)", config[name])


class EncoderWeights(NamedTuple):
    """The weights of an encoder, of one dtype, in one library and on one device."""

    word: Any  # [vocab, hidden]
    position: Any  # [types * positions, hidden], sums of two embeddings; or [positions, hidden]
    norm: Affine
    layers: tuple[EncoderLayerWeights, ...]


def _prefix(state: Mapping[str, Any], names: Names, model_type: str) -> str:
    """Return the prefix of the encoder's names, such as `bert.` in a model with a head."""
    word = f"{names.word}.weight"
    found = sorted(key.removesuffix(word) for key in state if key.endswith(word))
    if len(found) != 1:
        what = f"several of {listed(prefix + word for prefix in found)}" if found else f"no {word}"
        check.fail("state", f"the weights of one {model_type}", what)
    return found[0]


def _modern(key: str) -> str:
    """Replace `gamma` and `beta`, TensorFlow's names in old checkpoints, by `weight` and `bias`."""
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if key.endswith(f"LayerNorm{old}"):
            return key.removesuffix(old) + new
    return key


class _Reader:
    def __init__(self, state: Mapping[str, Any], prefix: str, dtype: str | None, first: str) -> None:
        self.weights = {_modern(key).removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}
        self.unread = {*self.weights}
        self.prefix = prefix
        self.layers = layers_of(prefix + first, self.weights[first])
        self.library = library_of(prefix + first, self.weights[first])
        self.device = self.library.device(self.weights[first])
        self.dtype = dtype or self.library.dtype(self.weights[first])
        check.dtype(f"the dtype of {prefix}{first}" if dtype is None else "dtype", self.dtype, DTYPES)

    def require(self, wanted: set[str]) -> None:
        """Raise ValueError for a missing or unknown name."""
        if missing := wanted - {*self.weights}:
            raise ValueError(f"state has no {listed(self.prefix + name for name in missing)}")
        extra = {name for name in self.weights if name not in wanted and not name.startswith(_UNUSED)}
        if extra:
            raise ValueError(f"state has {listed(self.prefix + name for name in extra)}, which no encoder has")

    def take(self, name: str, *shape: int) -> Any:
        weight = self.weights[name]
        library = library_of(self.prefix + name, weight)
        if library is not self.library:
            check.fail(self.prefix + name, f"a {self.library.name} array like the others", library.name, TypeError)
        if library.device(weight) != self.device:
            check.fail(self.prefix + name, f"on {place(self.device)} like the others", place(library.device(weight)))
        check.shape(self.prefix + name, tuple(weight.shape), shape, "as config says")
        check.dtype(self.prefix + name, library.dtype(weight), (*DTYPES, "float64"))
        return self.layers.cast(weight, self.dtype)

    def affine(self, name: str, *shape: int) -> Affine:
        return Affine(self.take(f"{name}.weight", *shape), self.take(f"{name}.bias", shape[0]))


def _wanted(config: EncoderConfig) -> set[str]:
    names = config.family.names
    tables = [names.word, names.position, *([names.token_type] if config.type_vocab_size else [])]
    found = {f"{name}.weight" for name in [*tables, names.norm]} | {f"{names.norm}.bias"}
    parts = names[names._fields.index("query") : names._fields.index("word")]
    for layer in range(config.num_hidden_layers):
        prefix = names.layer.format(layer)
        found |= {f"{prefix}{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    return found


def read_state(state: Mapping[str, Any], config: EncoderConfig, dtype: str | None = None) -> EncoderWeights:
    """Return the weights of an encoder from a state dict with transformers' names.

    In a model with a head, the encoder's names have a common prefix (`bert.encoder...`), and names without the prefix
    are ignored. The sum of position and token type embeddings is computed in float32 and rounded once. If `dtype` is
    None, the weights get the dtype of the word embeddings.

    Raises TypeError for an unsupported type or dtype, and ValueError for missing names, unknown names, or wrong shapes.
    """
    names, hidden = config.family.names, config.hidden_size
    prefix = _prefix(state, names, config.model_type)
    reader = _Reader(state, prefix, dtype, f"{names.word}.weight")
    reader.require(_wanted(config))
    concatenate = reader.layers.concatenate

    def layer(number: int) -> EncoderLayerWeights:
        layer_prefix = names.layer.format(number)
        parts = [reader.affine(layer_prefix + part, hidden, hidden) for part in (names.query, names.key, names.value)]
        return EncoderLayerWeights(
            Affine(concatenate([x.weight for x in parts]), concatenate([x.bias for x in parts])),
            reader.affine(layer_prefix + names.out, hidden, hidden),
            reader.affine(layer_prefix + names.self_norm, hidden),
            reader.affine(layer_prefix + names.up, config.intermediate_size, hidden),
            reader.affine(layer_prefix + names.down, hidden, config.intermediate_size),
            reader.affine(layer_prefix + names.final_norm, hidden),
        )

    word = reader.take(f"{names.word}.weight", config.vocab_size, hidden)
    position = reader.take(f"{names.position}.weight", config.max_position_embeddings, hidden)
    if config.type_vocab_size:
        token_types = reader.take(f"{names.token_type}.weight", config.type_vocab_size, hidden)
        float32_tables, cast = [reader.layers.cast(x, "float32") for x in (position, token_types)], reader.layers.cast
        position = concatenate([cast(float32_tables[0] + token_type, reader.dtype) for token_type in float32_tables[1]])
    layers = tuple(layer(number) for number in range(config.num_hidden_layers))
    return EncoderWeights(word, position, reader.affine(names.norm, hidden), layers)
