"""Encoder-decoders built at random with transformers, and what they generate."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import transformers

from cukern.models import Decoding, Generated
from tests.encoders import numpy_of, put

SIZES = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_position_embeddings": 40, "init_std": 0.3, "vocab_size": 90,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # As Helsinki-NLP's models: swish, scaled embeddings, the padding starts a sequence and is banned from it.
    "marian": ("Marian:MTModel", {"activation_function": "swish", "scale_embedding": True, **dict.fromkeys(
        ("pad_token_id", "decoder_start_token_id"), 89), "eos_token_id": 0, "forced_eos_token_id": 0}),
    "marian-two-vocabularies": ("Marian:MTModel", {"activation_function": "relu", "decoder_vocab_size": 77,
        "share_encoder_decoder_embeddings": False, "pad_token_id": 76, "decoder_start_token_id": 76}),
    # Where the id of the padding is 0, transformers' beam search fills with the end.
    "marian-pad-0": ("Marian:MTModel", {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 3,
        "forced_eos_token_id": 3}),
    "bart": ("Bart:ForConditionalGeneration", {}),
    "bart-untied": ("Bart:ForConditionalGeneration", {"tie_word_embeddings": False, "activation_function": "gelu_new"}),
    "mbart": ("MBart:ForConditionalGeneration", {"scale_embedding": True, "activation_function": "relu"}),
}  # fmt: skip
#: The sizes of layers of known models, a few of them, with so few words that tests are quick.
LARGER: dict[str, dict[str, Any]] = {
    # Helsinki-NLP's opus-mt models.
    "opus-mt": {"d_model": 512, "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048, "max_position_embeddings": 512, "init_std": 0.075, "vocab_size": 4000},
    "bart-base": {"d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "max_position_embeddings": 1024, "init_std": 0.06,
        "vocab_size": 4000},
}  # fmt: skip


@functools.cache
def model_of(family: str, seed: int = 2, size: str = "small") -> Any:
    """A model of transformers with random weights, norms and biases, whose rows end at different steps."""
    name, over = FAMILIES[family]
    prefix, suffix = name.split(":")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **over, **LARGER.get(size, {})})
    model = getattr(transformers, prefix + suffix)(config).eval()
    decoder = model.model.decoder
    with torch.no_grad():
        # Positions decide, terms of the residual are small, and the logits far apart: else all rows repeat one token.
        for name, x in model.named_parameters():
            if x.ndim == 1:
                x += 0.1 * torch.randn_like(x)
            elif "embed_positions" in name:
                x.normal_(0, 2.4)
            elif "fc2" in name or "out_proj" in name:
                x *= 0.3
            elif "embed" in name or "shared" in name:
                x *= 0.2
        norm = decoder.layer_norm if family == "mbart" else decoder.layers[-1].final_layer_norm
        norm.weight *= 6
        model.final_logits_bias.normal_(0, 0.5)
        model.final_logits_bias[0, model.generation_config.eos_token_id] += 4 + 0.4 * math.log(config.vocab_size / 90)
    if family == "marian":
        model.generation_config.bad_words_ids = [[89]]
    return model


def decoding_of(model: Any, library: str = "torch", dtype: str | None = None) -> Decoding:
    """Decoding with a model's weights in a library, by the names of `encoders.put`."""
    state = {name: put(x, library) for name, x in model.state_dict().items()}
    return Decoding.from_state_dict(state, model.config, generation_config=model.generation_config, dtype=dtype)


@functools.cache
def kept(family: str, seed: int = 2, library: str = "torch") -> Decoding:
    return decoding_of(model_of(family, seed), library)


def sources(seed: int = 2, lengths: tuple[int, ...] = (11, 4, 1, 7, 10)) -> tuple[Any, Any]:
    """Ids and mask; garbage, out of the vocabulary, where the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(3, 76, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return torch.where(mask == 1, ids, -(10**6)), mask


def generated(model: Any, ids: Any, mask: Any, **settings: Any) -> Any:
    """What transformers generates, with its padding where the mask is 0."""
    clean = torch.where(mask == 1, ids, model.config.pad_token_id)
    with torch.no_grad():
        return model.generate(
            clean, attention_mask=mask, return_dict_in_generate=True, output_scores=True, **settings
        )  # fmt: skip


def assert_same(found: Generated, wanted: Any) -> None:
    """The tokens, and of beams the scores, are those of transformers."""
    np.testing.assert_array_equal(numpy_of(found.sequences), numpy_of(wanted.sequences))
    if found.scores is not None:
        np.testing.assert_allclose(numpy_of(found.scores), numpy_of(wanted.sequences_scores), atol=1e-4, rtol=1e-5)
