"""Layouts of the element pairs that a rotary embedding rotates."""

from __future__ import annotations

#: Whether a pair's elements are adjacent in the input, and in the output. If not, elements `i` and `i + half` are a
#: pair.
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


def has_second_half(layout: str, columns: int, rotary_dim: int) -> bool:
    """Return whether a pair's second element has its own cosine and sine, as in `rotate_half`."""
    return layout != "interleaved" and columns == rotary_dim
