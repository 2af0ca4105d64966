"""Vector widths (bytes of one load or store of a thread) and divisors, as in `common/vectors.cuh`."""

from __future__ import annotations

import functools

from cukern.runtime import check


def ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


@functools.lru_cache(maxsize=1024)
def divisor(number: int) -> tuple[int, int]:
    """Return (multiplier, shift), with `n * multiplier >> shift == n // number` for n below 2**31.

    The method is from Granlund and Montgomery (1994).
    """
    shift = 31 + (number - 1).bit_length()
    return -(-(1 << shift) // number), shift


def vector_bytes(name: str, mask: int, item_size: int) -> int:
    """Return the bytes, at most 16, of the widest vector that divides all addresses and strides.

    `mask` is the bitwise or of all addresses and strides.
    """
    if mask % 16 == 0:
        return 16
    widest = mask & -mask
    if widest < item_size:
        check.fail(name, "aligned to its elements", f"an address that is a multiple of {widest} bytes")
    return widest


def why_width(width: int, what: str) -> str:
    """Return the reason for loads of `width` bytes. `what` names the rows that limit the width."""
    if width == 16:
        return f"loads of 16 bytes, to which {what} are aligned"
    return f"slower loads of {width} bytes: {what} are not multiples of 16 bytes at 16-byte aligned addresses"
