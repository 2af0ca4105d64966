"""How closely results must match: the one table of tolerances, and the comparison that reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import arrays


class Tolerance(NamedTuple):
    """A value may differ from the wanted one by absolute + relative * |wanted|."""

    relative: float
    absolute: float


#: By `stem.result`, then by the result's dtype. Integers and booleans are exact and have no entry.
TOLERANCES = {
    # The kernel's exp2, log2 and reciprocal are the hardware's approximations: each is good to about 2**-22, and a
    # logit's rounding on its way into exp2 counts as often as the logit is large.
    "moe_gate.weights": {"float32": Tolerance(relative=2e-5, absolute=1e-9)},
}


def _to_numpy(name: str, array: Any) -> np.ndarray[Any, Any]:
    array = arrays.enter(name, array)
    library = arrays.library_of(array)
    assert library is not None
    return library.to_numpy(array)


def assert_matches(name: str, got: Any, want: Any) -> None:
    """The arrays `got` and `want`, of any library, are of one dtype and shape and hold the same values.

    Floats may differ by what `TOLERANCES[name]` allows for their dtype; NaN and infinities must be in the same places.
    All else is exact. `name` is `stem.result`, such as "moe_gate.weights".

    Raises AssertionError, which says where the largest difference is and how large; KeyError for floats that the table
    has no entry for.
    """
    __tracebackhide__ = True
    got, want = _to_numpy(name, got), _to_numpy(name, want)
    for what, ours, theirs in (("dtype", got.dtype, want.dtype), ("shape", got.shape, want.shape)):
        if ours != theirs:
            raise AssertionError(f"{name} is of {what} {ours}, not {theirs}")
    excess: np.ndarray[Any, Any]
    if want.dtype.kind in "biu":
        allowed = "none"
        excess = (got != want).astype(np.float64)
    else:
        tolerance = TOLERANCES[name][want.dtype.name]
        allowed = f"{tolerance.absolute} + {tolerance.relative} of the wanted value"
        # Where both are the same infinity or both NaN the difference is NaN, but there is none.
        x, y = got.astype(np.float64), want.astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        bound = np.where(np.isfinite(y), tolerance.absolute + tolerance.relative * np.abs(y), 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            excess = np.where(same, 0, np.nan_to_num(np.abs(x - y) / bound, nan=np.inf))
        excess = np.where(excess > 1, excess, 0)
    if not excess.any():
        return
    worst = np.unravel_index(excess.argmax(), excess.shape)
    at = ", ".join(map(str, worst))
    difference = np.abs(got[worst].astype(np.float64) - want[worst].astype(np.float64))
    raise AssertionError(
        f"{name} differs in {np.count_nonzero(excess)} of {excess.size} values, most at [{at}]: "
        f"got {got[worst]}, want {want[worst]}, difference {difference:.3g}, allowed {allowed}"
    )
