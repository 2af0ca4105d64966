"""The tolerance between a kernel's result and the NumPy reference."""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """The allowed difference from the reference's value `wanted`: absolute + relative * |wanted|.

    A 16-bit value near a rounding boundary may round the other way, so `relative` is one unit in the last place for
    16-bit dtypes: 2**-10 for float16, 2**-7 for bfloat16.
    """

    relative: float
    absolute: float
