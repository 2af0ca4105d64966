"""Compare the results of a module and of a kernel on several kinds of random inputs, which are called regimes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Regime(NamedTuple):
    """A kind of random input rows. `change` makes the rows from normally distributed values."""

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
#: Rows whose squares overflow float16.
LARGE_HALVES = Regime("large rows of float16", lambda x: x * 1e3, torch.float16)
#: The allowed difference between two results, in units of eps times the largest element of the row. It is larger for
#: float32, because float32 sums accumulate many rounding errors.
_ROUNDINGS = {torch.float32: 80, torch.float16: 4, torch.bfloat16: 4}
#: Exceptions that a `forward` may raise if it cannot handle the random rows.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


def are_near(got: torch.Tensor, wanted: Any) -> bool:
    """Return whether two results differ only by rounding errors, relative to the largest element of each row."""
    if not isinstance(wanted, torch.Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    bound = _ROUNDINGS[got.dtype] * torch.finfo(got.dtype).eps
    got, wanted = got.float(), wanted.float()
    largest = wanted.abs().amax(-1, keepdim=True)
    return bool(((got - wanted).abs() <= bound * largest).all())


def difference(
    own: Callable[[torch.Tensor], Any],
    kernel: Callable[[torch.Tensor], torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    regimes: Sequence[Regime] = REGIMES,
    spread: float = 1.0,
    seed: int = 3,
) -> str | None:
    """Return the name of the first regime for which the module's code and the kernel differ. It is empty if they agree.

    The keys of `shapes` are suffixes of the name. The result is None if the module's code fails for the first regime,
    or differs already for it.
    """
    generator = torch.Generator().manual_seed(seed)
    for i, ((besides, shape), regime) in enumerate(itertools.product(shapes.items(), regimes)):
        rows = regime.change(torch.randn(shape, generator=generator) * spread).to(regime.dtype)
        try:
            wanted = own(rows.clone())
        except REFUSALS:
            if i:
                continue
            return None
        if not are_near(kernel(rows), wanted):
            return regime.name + besides if i else None
    return ""
