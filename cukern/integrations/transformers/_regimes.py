"""Compare the results of a module and of a kernel on regimes: kinds of random inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Regime(NamedTuple):
    """A kind of input rows. `change` makes them from normally distributed values."""

    name: str
    change: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype = torch.float32


REGIMES = (
    Regime("ordinary rows", lambda x: x),
    Regime("large rows", lambda x: x * 1e3),
    Regime("tiny rows", lambda x: x * 1e-4),
    Regime("negative rows", lambda x: -x.abs()),
    Regime("zero rows", torch.zeros_like),
    Regime("rows of float16", lambda x: x, torch.float16),
    Regime("rows of bfloat16", lambda x: x, torch.bfloat16),
)
#: The squares of these rows overflow float16.
LARGE_HALVES = Regime("large rows of float16", lambda x: x * 1e3, torch.float16)
#: The allowed difference, in multiples of eps * (the row's largest element). float32 sums accumulate many rounding
#: errors.
_ROUNDINGS = {torch.float32: 80, torch.float16: 4, torch.bfloat16: 4}
#: Errors of a `forward` that cannot run the random rows.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def are_near(got: torch.Tensor, wanted: Any) -> bool:
    """Return whether results differ only by rounding errors, relative to each row's largest element."""
    if not isinstance(wanted, torch.Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    bound = _ROUNDINGS[got.dtype] * torch.finfo(got.dtype).eps
    got, wanted = got.float(), wanted.float()
    largest = wanted.abs().amax(-1, keepdim=True)
    return bool(((got - wanted).abs() <= bound * largest).all())


def difference(
    original: Callable[[torch.Tensor], Any],
    kernel: Callable[[torch.Tensor], torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    regimes: Sequence[Regime] = REGIMES,
    spread: float = 1.0,
    seed: int = 3,
) -> str | None:
    """Return the name of the first regime for which module and kernel differ, plus the shape's suffix; "" for none.

    Return None if the module fails or differs for the very first regime.
    """
    generator = torch.Generator().manual_seed(seed)
    for i, ((suffix, shape), regime) in enumerate(itertools.product(shapes.items(), regimes)):
        rows = regime.change(torch.randn(shape, generator=generator) * spread).to(regime.dtype)
        try:
            wanted = original(rows.clone())
        except REFUSALS:
            if i:
                continue
            return None
        if not are_near(kernel(rows), wanted):
            return regime.name + suffix if i else None
    return ""
