"""The allowed difference between a kernel's result and its twin's."""

from __future__ import annotations

from typing import NamedTuple


class Tolerance(NamedTuple):
    """The allowed difference of a value from the wanted one: absolute + relative * |wanted|."""

    relative: float
    absolute: float
