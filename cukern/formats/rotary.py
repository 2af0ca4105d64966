"""The layouts of the rotated pairs in a row."""

from __future__ import annotations

#: For each layout: whether the two elements of a pair are adjacent in the input, and whether they are in the output. If
#: not, element i forms a pair with element i + half.
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


def has_second_half(layout: str, columns: int, rotary_dim: int) -> bool:
    """Return whether the second element of a pair has its own cosine and sine, as in `rotate_half`.

    Otherwise both elements of a pair share a cosine and a sine.
    """
    return layout != "interleaved" and columns == rotary_dim
