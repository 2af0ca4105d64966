"""Transformer models made of the ops and of the array libraries' dense products."""

from __future__ import annotations

from cukern.models.decoder import Decoder, DecoderWeights
from cukern.models.decoding import Decoding, Generated, Step
from cukern.models.encoder import Encoder
from cukern.models.encoder_weights import EncoderConfig
from cukern.models.text import TextConfig
from cukern.models.tokenizer import Tokenizer

__all__ = [
    "Decoder",
    "DecoderWeights",
    "Decoding",
    "Encoder",
    "EncoderConfig",
    "Generated",
    "Step",
    "TextConfig",
    "Tokenizer",
]
