"""Time the encoder beside PyTorch, transformers and sentence-transformers, and decoding beside `generate`.

Weights are random. All calls share them, also the calls of a baseline, so weights of a small model stay in L2. Calls of
the encoder are captured in CUDA graphs, which needs the number of words. One case is also timed eagerly ("eager"), as
other libraries are, because they wait for the GPU. The wall clock times decoding and the vectors of texts. A search has
seen its sizes before, so its steps are replayed graphs.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding, layer_norm, linear, normalize

from benchmarks.harness import Baseline, Case
from benchmarks.random_models import (
    Batch,
    EncoderSizes,
    Seq2SeqSizes,
    State,
    half_lengths,
    random_batch,
    random_state,
    random_texts,
    save,
    text_lengths,
    uniform_lengths,
)
from cukern.models import Decoding, Encoder, Generated
from cukern.runtime.arrays import ITEM_SIZE

BERT_BASE = EncoderSizes("BERT-base", hidden=768, layers=12, heads=12, inter=3072)
MINI_LM = EncoderSizes("all-MiniLM-L6", hidden=384, layers=6, heads=12, inter=1536)
MARIAN = Seq2SeqSizes("opus-mt", "marian", 512, 6, heads=8, inter=2048, vocab=58101, positions=512)
BART_BASE = Seq2SeqSizes("BART-base", "bart", 768, 6, heads=12, inter=3072, vocab=50265, positions=1024)

#: Allowed difference, relative to the norm of an encoder's states, and to a text's vector of length 1.
_DIFFERENCE = {"float16": 0.02, "bfloat16": 0.1, "float32": 0.002}
# The batch sizes of the other libraries. 32 is the default of sentence-transformers.
_TEXTS_AT_ONCE, _MANY_TEXTS_AT_ONCE = 32, 256
_MEAN_TOKENS = 60

Run = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Model:
    """A model with random weights, which is hashable as a key of caches."""

    sizes: Any
    state: State
    ours: Any

    @property
    def nbytes(self) -> int:
        """The bytes of the layers, which each call reads."""
        return sum(weight.nbytes for name, weight in self.state.items() if ".layer" in name)

    @property
    def like(self) -> torch.Tensor:
        """A weight, for its device and dtype."""
        return next(iter(self.state.values()))


# The cache keeps a model until a case needs another one.
@functools.lru_cache(maxsize=1)
def _encoder(sizes: EncoderSizes, dtype: str, device: torch.device) -> Model:
    state = random_state(sizes, dtype, device)
    return Model(sizes, state, Encoder.from_state_dict(state, sizes.config))


@functools.lru_cache(maxsize=1)
def _text_encoder(sizes: EncoderSizes, dtype: str, device: torch.device) -> Model:
    """Return an encoder with a tokenizer."""
    state = random_state(sizes, dtype, device)
    with tempfile.TemporaryDirectory() as folder:
        save(sizes, state, Path(folder))
        encoder = Encoder.from_directory(folder, library="torch", device=device)
        encoder.tokenize(["abc"])  # reads the tokenizer's file
    return Model(sizes, state, encoder)


@functools.lru_cache(maxsize=1)
def _decoding(sizes: Seq2SeqSizes, dtype: str, device: torch.device) -> Model:
    state = random_state(sizes, dtype, device)
    return Model(sizes, state, Decoding.from_state_dict(state, sizes.config))


# --- other encoders -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def transformers_encoder(model: Model) -> Any:
    """Return transformers' model with the same weights, with PyTorch's attention."""
    from transformers import BertConfig, BertModel

    options = {name: value for name, value in model.sizes.config.items() if name != "model_type"}
    with torch.device(model.like.device):
        reference = BertModel(BertConfig(**options, attn_implementation="sdpa"), add_pooling_layer=False)
    reference.to(model.like.dtype).load_state_dict(model.state)
    return reference.eval().requires_grad_(False)


def _by_transformers(masked: bool) -> Callable[[], Callable[..., Run]]:
    def load() -> Callable[..., Run]:
        import transformers  # noqa: F401

        def prepare(model: Model, batch: Batch) -> Run:
            reference, mask = transformers_encoder(model), batch.mask if masked else None
            return lambda: reference(input_ids=batch.ids, attention_mask=mask).last_hidden_state

        return prepare

    return load


#: Names of a layer's weights in BERT, and in `torch.nn.TransformerEncoder`.
_TORCH_NAMES = {
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "linear1",
    "output.dense": "linear2",
    "output.LayerNorm": "norm2",
}


@functools.lru_cache(maxsize=1)
def _torch_state(model: Model) -> State:
    """Return the weights of the layers, under the names of `torch.nn.TransformerEncoder`."""
    state, found = model.state, {}
    for layer in range(model.sizes.layers):
        theirs, ours = f"encoder.layer.{layer}", f"layers.{layer}"
        for part in ("weight", "bias"):
            projections = [state[f"{theirs}.attention.self.{x}.{part}"] for x in ("query", "key", "value")]
            found[f"{ours}.self_attn.in_proj_{part}"] = torch.cat(projections)
            found |= {f"{ours}.{x}.{part}": state[f"{theirs}.{name}.{part}"] for name, x in _TORCH_NAMES.items()}
    return found


def _torch_encoder(nested: bool) -> Callable[..., Run]:
    """Return `torch.nn.TransformerEncoder` after the embeddings, on the padded batch or with nested tensors."""

    def prepare(model: Model, batch: Batch) -> Run:
        sizes, like = model.sizes, model.like
        layer = torch.nn.TransformerEncoderLayer(
            sizes.hidden, sizes.heads, sizes.inter, activation="gelu", layer_norm_eps=1e-12, batch_first=True,
            device=like.device, dtype=like.dtype,
        )  # fmt: skip
        encoder = torch.nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=nested)
        encoder.load_state_dict(_torch_state(model))
        encoder.eval().requires_grad_(False)
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        words, positions, types = (model.state[f"embeddings.{name}.weight"] for name in names)
        norm = [model.state[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")]
        places = positions[: batch.ids.shape[1]] + types[0]
        is_padding = batch.mask == 0

        @torch.no_grad()
        def run() -> torch.Tensor:
            x = layer_norm(embedding(batch.ids, words) + places, (sizes.hidden,), *norm, 1e-12)
            return encoder(x, src_key_padding_mask=is_padding)

        return run

    return prepare


def _padding_kept(model: Model, batch: Batch) -> Run:
    """Return the encoder without a mask, so that padding counts as words."""
    return lambda: model.ours(batch.ids)


def _products_alone(model: Model, batch: Batch) -> Run:
    """Return only the products of the words with the weights."""
    sizes, like, words = model.sizes, model.like, int(batch.mask.sum())
    narrow, wide = (torch.randn(words, n, device=like.device).to(like.dtype) for n in (sizes.hidden, sizes.inter))
    theirs = _torch_state(model)
    names = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight")

    def run() -> None:
        for layer in range(sizes.layers):
            for name in names:
                linear(narrow, theirs[f"layers.{layer}.{name}"])
            linear(wide, theirs[f"layers.{layer}.linear2.weight"])

    return run


def _agree(dtype: str) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        is_word = ours.ne(0).any(-1)  # the states of padding are zeros
        mine, other = ours[is_word].float(), theirs[is_word].float()
        return ours.shape == theirs.shape and bool((mine - other).norm() <= _DIFFERENCE[dtype] * other.norm())

    return agree


def _is_like(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Accept results of other words, of the same shape."""
    return ours.shape == theirs.shape and bool(theirs.isfinite().all())


def _nothing(ours: torch.Tensor, theirs: None) -> bool:
    """Accept a part of the work, which has no result."""
    return True


def _encoder_baselines(padded: bool, small: bool) -> tuple[dict[str, Baseline], dict[str, Baseline]]:
    """Return the compositions and the other libraries. A small call takes longer on the host than on the GPU."""
    alone = {"products alone": Baseline(lambda: _products_alone, prepared=True, agree=_nothing)}
    if not padded:
        peers = {"transformers, eager": Baseline(_by_transformers(False), prepared=True, eager=True)}
        if small:
            peers["transformers in a graph"] = Baseline(_by_transformers(False), prepared=True)
        return alone, peers
    compositions = {
        "padding kept": Baseline(lambda: _padding_kept, prepared=True, agree=_is_like),
        "torch.nn.TransformerEncoder, eager": Baseline(lambda: _torch_encoder(False), prepared=True, eager=True),
        "torch.nn.TransformerEncoder nested, eager": Baseline(lambda: _torch_encoder(True), prepared=True, eager=True),
    }
    return alone | compositions, {"transformers, eager": Baseline(_by_transformers(True), prepared=True, eager=True)}


def _parameters(sizes: EncoderSizes | Seq2SeqSizes) -> int:
    """Return the number of weights in an encoder's products."""
    return sizes.layers * (4 * sizes.hidden**2 + 2 * sizes.hidden * sizes.inter)


def _encode(sizes: EncoderSizes, lengths: Sequence[int], seq: int, dtype: str, variant: str = "graph") -> Case:
    """Return a case of hidden states of sequences padded to `seq`, for a caller that knows the number of words."""
    batch, valid, item = len(lengths), sum(lengths), ITEM_SIZE[dtype]
    padded = valid < batch * seq

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        made = random_batch(lengths, seq, sizes.vocab, generator)
        return _encoder(sizes, dtype, generator.device), made

    def call(model: Model, given: Batch) -> torch.Tensor:
        if padded:
            return model.ours(given.ids, given.mask, valid_word_num=valid)
        return model.ours(given.ids)

    parameters = _parameters(sizes)
    compositions, peers = _encoder_baselines(padded, batch == 1) if variant == "graph" else ({}, {})
    return Case(
        op="Encoder",
        case={"model": sizes.name, "batch": batch, "seq": seq, "valid": valid, "dtype": dtype},
        variant=variant,
        inputs=inputs,
        call=call,
        bytes=item * (parameters + (valid + batch * seq) * sizes.hidden) + 16 * batch * seq,
        flops=2 * valid * parameters,
        baselines=compositions,
        peers=peers,
        agree=_agree(dtype),
        host=batch == 1,
        eager=variant == "eager",
    )


# --- texts ----------------------------------------------------------------------------------------------


def _sentence_transformers(at_once: int) -> Callable[[], Callable[..., Run]]:
    """Return `encode` of sentence-transformers on the same model; it sorts by length."""

    def load() -> Callable[..., Run]:
        from sentence_transformers import SentenceTransformer

        def prepare(model: Model, texts: list[str]) -> Run:
            with tempfile.TemporaryDirectory() as folder:
                save(model.sizes, model.state, Path(folder))
                reference = SentenceTransformer(folder, device=str(model.like.device))
            reference.to(model.like.dtype)
            options = {"batch_size": at_once, "convert_to_tensor": True, "show_progress_bar": False}
            return lambda: reference.encode(texts, **options)

        return prepare

    return load


def _batches_by_transformers(is_sorted: bool) -> Callable[[], Callable[..., Run]]:
    """Return transformers' model over padded batches, with the mean of the words."""

    def load() -> Callable[..., Run]:
        import transformers  # noqa: F401
        from torch.nn.utils.rnn import pad_sequence

        def prepare(model: Model, tokens: list[list[int]]) -> Run:
            reference, device = transformers_encoder(model), model.like.device

            def vectors(batch: list[list[int]]) -> torch.Tensor:
                given = [torch.tensor(ids) for ids in batch]
                ids = pad_sequence(given, batch_first=True).to(device)
                mask = pad_sequence([torch.ones_like(x) for x in given], batch_first=True).to(device)
                hidden = reference(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                return normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)

            def run() -> torch.Tensor:
                order = torch.arange(len(tokens))
                if is_sorted:
                    order = torch.tensor([len(ids) for ids in tokens]).argsort(descending=True)
                found = [vectors([tokens[i] for i in batch.tolist()]) for batch in order.split(_TEXTS_AT_ONCE)]
                return torch.cat(found)[order.argsort().to(device)]

            return run

        return prepare

    return load


def _are_near(dtype: str) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return bool(((ours.float() - theirs.float()).norm(dim=1) <= _DIFFERENCE[dtype]).all())

    return agree


def _embed(sizes: EncoderSizes, texts: int, dtype: str, from_tokens: bool) -> Case:
    """Return a case of vectors of texts, from the texts or their tokens. The lengths have a realistic distribution."""
    lengths = text_lengths(texts, _MEAN_TOKENS, sizes.positions)
    words = sum(lengths)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        model, given = _text_encoder(sizes, dtype, generator.device), random_texts(lengths, sizes.vocab)
        return model, model.ours.tokenize(given) if from_tokens else given

    def call(model: Model, given: Any) -> torch.Tensor:
        embed = model.ours.embed_tokens if from_tokens else model.ours.embed
        return embed(given, progress=False)

    peers = {
        "sentence-transformers": Baseline(_sentence_transformers(_TEXTS_AT_ONCE), slow=True, prepared=True),
        "sentence-transformers, 256 at once": Baseline(
            _sentence_transformers(_MANY_TEXTS_AT_ONCE), slow=True, prepared=True
        ),
    }
    if from_tokens:
        peers = {
            "transformers, sorted": Baseline(_batches_by_transformers(True), prepared=True),
            "transformers, as they come": Baseline(_batches_by_transformers(False), prepared=True),
        }
    parameters = _parameters(sizes)
    return Case(
        op="Encoder",
        case={"model": sizes.name, "texts": texts, "valid": words, "dtype": dtype},
        variant="embed_tokens" if from_tokens else "embed",
        inputs=inputs,
        call=call,
        bytes=ITEM_SIZE[dtype] * (parameters + words * sizes.hidden) + 4 * texts * sizes.hidden,
        flops=2 * words * parameters,
        peers=peers,
        agree=_are_near(dtype),
        eager=True,
    )


# --- decoding -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def transformers_seq2seq(model: Model) -> Any:
    """Return transformers' model with the same weights, with PyTorch's attention."""
    import transformers

    kind, head = {"marian": ("Marian", "MTModel"), "bart": ("Bart", "ForConditionalGeneration")}[model.sizes.kind]
    options = {name: value for name, value in model.sizes.config.items() if name != "model_type"}
    with torch.device(model.like.device):
        config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="sdpa")
        reference = getattr(transformers, f"{kind}{head}")(config)
    # The missing keys are aliases of the shared embeddings, and Marian's positions.
    unknown = reference.to(model.like.dtype).load_state_dict(model.state, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"transformers {transformers.__version__} has no {', '.join(unknown)}")
    return reference.eval().requires_grad_(False)


def _generate() -> Callable[..., Run]:
    """Return transformers' `generate` with its dynamic cache."""
    from transformers import GenerationConfig

    def prepare(model: Model, batch: Batch, settings: Mapping[str, Any]) -> Run:
        reference = transformers_seq2seq(model)
        ids = {name: value for name, value in model.sizes.config.items() if name.endswith("token_id")}
        options = {"generation_config": GenerationConfig(**ids, **settings, do_sample=False)}
        return lambda: reference.generate(input_ids=batch.ids, attention_mask=batch.mask, **options)

    return prepare


def _same_tokens(dtype: str) -> Callable[[Generated, torch.Tensor], bool]:
    """Return a function that compares sequences. After a first different token, all later tokens may differ.

    In float32 half of the rows must be equal, in 16 bits a quarter of all tokens. Of fewer than 8 rows in 16 bits only
    the lengths are compared, because rows may have only one token in common.
    """

    def agree(ours: Generated, theirs: torch.Tensor) -> bool:
        if ours.sequences.shape != theirs.shape:
            return False
        same = ours.sequences == theirs
        if dtype == "float32":
            return bool(same.all(1).float().mean() >= 0.5)
        return len(same) < 8 or bool(same[:, 1:].float().mean() >= 0.25)

    return agree


def _generated(sizes: Seq2SeqSizes, batch: int, beams: int, steps: int, dtype: str, seq: int = 48) -> Case:
    """Return a case of greedy or beam search that never stops early. Sources have a third of `seq` to `seq` words."""
    lengths = [seq - seq * 2 // 3 * i // batch for i in range(batch)]
    settings = {"num_beams": beams, "max_new_tokens": steps}

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        made = random_batch(lengths, seq, sizes.vocab, generator)
        return _decoding(sizes, dtype, generator.device), made, settings

    def call(model: Model, given: Batch, own: Mapping[str, Any]) -> Generated:
        return model.ours(given.ids, given.mask, **own)

    hidden, item, words = sizes.hidden, ITEM_SIZE[dtype], sum(lengths)
    once = _parameters(sizes) + sizes.layers * 2 * hidden**2  # the encoder, and the keys and values of cross-attention
    each = sizes.layers * (6 * hidden**2 + 2 * hidden * sizes.inter) + hidden * sizes.vocab
    read = sizes.layers * 2 * hidden * (words * steps + batch * steps * (steps + 1) // 2)
    return Case(
        op="Decoding",
        case={"model": sizes.name, "batch": batch, "beams": beams, "steps": steps, "dtype": dtype},
        variant="step graphs",
        inputs=inputs,
        call=call,
        bytes=item * (once + steps * each + read),
        # The floor's product has 16 bits, so its rate does not fit float32.
        flops=0 if dtype == "float32" else 2 * (words * once + batch * beams * steps * each),
        peers={"transformers generate": Baseline(_generate, slow=True, prepared=True)},
        agree=_same_tokens(dtype),
        eager=True,
    )


def cases() -> list[Case]:
    """Return cases: batches that are half full, of 1 to 512 words, and full; 1 text; 1000 texts; 2 encoder-decoders."""
    half, uniform = half_lengths(64, 512), uniform_lengths(64, 512)
    made = [
        _encode(BERT_BASE, half, 512, "float16"),
        _encode(BERT_BASE, half, 512, "float16", "eager"),
        _encode(BERT_BASE, uniform, 512, "float16"),
        _encode(BERT_BASE, [512] * 64, 512, "float16"),
        _encode(MINI_LM, [16], 16, "float16"),
        _embed(MINI_LM, 1000, "float16", from_tokens=False),
        _embed(MINI_LM, 1000, "float16", from_tokens=True),
    ]
    for sizes in (MARIAN, BART_BASE):
        for dtype, batch in (("float16", 32), ("float16", 1), ("float32", 32)):
            made += [_generated(sizes, batch, beams, 64, dtype) for beams in (1, 4)]
    return made
