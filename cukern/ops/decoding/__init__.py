"""The steps of decoding before and after a token is drawn, as in FasterTransformer."""

from cukern.ops.decoding.logits import apply_penalties, update_logits
from cukern.ops.decoding.state import decoding_init, stop_words_criterion, topp_init, update_finished

__all__ = [
    "apply_penalties",
    "decoding_init",
    "stop_words_criterion",
    "topp_init",
    "update_finished",
    "update_logits",
]
