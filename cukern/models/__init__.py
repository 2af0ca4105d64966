"""Models over the ops: FasterTransformer's modules, as plain classes."""

from __future__ import annotations

from cukern.models.decoder import Decoder
from cukern.models.decoding import Decoding, Generated, Step

__all__ = ["Decoder", "Decoding", "Generated", "Step"]
