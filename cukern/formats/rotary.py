"""The layouts of rows that a rotary embedding turns."""

from __future__ import annotations

#: What is read in pairs, and what is written in pairs; all else is in halves.
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


def has_second_half(layout: str, columns: int, rotary_dim: int) -> bool:
    """Whether the second number of a pair has a cosine of its own, as in `rotate_half`; else it has the first one's."""
    return layout != "interleaved" and columns == rotary_dim
