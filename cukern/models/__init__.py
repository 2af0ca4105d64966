"""Transformer models made of the ops and of the array libraries' dense products."""

from __future__ import annotations

from cukern.models.encoder import Encoder
from cukern.models.encoder_weights import EncoderConfig
from cukern.models.text import TextConfig, Tokenizer

__all__ = ["Encoder", "EncoderConfig", "TextConfig", "Tokenizer"]
