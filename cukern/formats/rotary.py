"""The layouts of the element pairs that a rotary embedding rotates."""

from __future__ import annotations

#: Each layout maps to two bools: whether the elements of a pair are adjacent in the input, and whether they are
#: adjacent in the output. If not, the elements `i` and `i + half` are a pair.
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "deinterleaved": (True, False)}


def has_second_half(layout: str, columns: int, rotary_dim: int) -> bool:
    """Return whether the second element of a pair has its own cosine and sine, as in `rotate_half`.

    Otherwise both elements of a pair share a cosine and a sine.
    """
    return layout != "interleaved" and columns == rotary_dim
