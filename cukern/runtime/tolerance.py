"""The allowed difference between the result of a kernel and the result of its NumPy reference."""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """The allowed difference between a result and the reference's value `wanted`: absolute + relative * |wanted|."""

    relative: float
    absolute: float
