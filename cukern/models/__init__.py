"""Transformer models that call the ops of cukern and the matrix multiplication of the array library."""

from __future__ import annotations

from cukern.models.decoder import Decoder, DecoderWeights
from cukern.models.decoding import Decoding, Generated, Step
from cukern.models.encoder import Encoder
from cukern.models.encoder_weights import EncoderConfig
from cukern.models.text import TextConfig
from cukern.models.tokenizer import Tokenizer
from cukern.runtime.tolerance import Tolerance

#: Tolerances for comparing the models with transformers, keyed by result and dtype.
TOLERANCES = {
    # The reference is transformers in float32, after a few layers. Hidden states have magnitude 1 to 3. The models add
    # in another order than transformers, and 16-bit dtypes round after each operation.
    "hidden_states": {
        "float32": Tolerance(relative=0, absolute=2e-5),
        "float16": Tolerance(relative=0, absolute=2e-2),
        "bfloat16": Tolerance(relative=2**-7, absolute=6e-2),
    },
    "vectors": {"float32": Tolerance(relative=0, absolute=1e-5)},
}

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
