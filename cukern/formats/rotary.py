"""The layouts of the rotated pairs in a row."""

from __future__ import annotations

#: (pairs are interleaved when read, pairs are interleaved when written). False: element i pairs with element i + half.
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


def has_second_half(layout: str, columns: int, rotary_dim: int) -> bool:
    """Return whether the second number of a pair has its own cosine, as in `rotate_half`, and not the first one's."""
    return layout != "interleaved" and columns == rotary_dim
