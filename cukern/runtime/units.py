"""The host's side of `common/units.cuh`."""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=1024)
def divisor(number: int) -> tuple[int, int]:
    """The fields of a Divisor: `n * multiplier >> shift` is n // number for n below 2**31.

    The method is that of Granlund and Montgomery (1994).
    """
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift
