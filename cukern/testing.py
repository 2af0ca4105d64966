"""Compare a kernel's result with its NumPy reference."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np

from cukern.runtime import arrays
from cukern.runtime.tolerance import Tolerance


def tolerances(stem: str) -> Mapping[str, Mapping[str, Tolerance]]:
    """Return `TOLERANCES` of the reference module `stem`: tolerances by result and dtype."""
    room = "cukern.reference" if importlib.util.find_spec(f"cukern.reference.{stem}") else "cukern"
    return getattr(importlib.import_module(f"{room}.{stem}"), "TOLERANCES", {})


def _to_numpy(name: str, array: Any) -> np.ndarray[Any, Any]:
    array = arrays.enter(name, array)
    library = arrays.library_of(array)
    assert library is not None
    return library.to_numpy(array)


def assert_matches(name: str, got: Any, want: Any) -> None:
    """Assert that arrays of any library have the same dtype, shape and values.

    Floats may differ by their tolerance; NaN and infinities must be at the same indices. Other dtypes must be equal.
    `name` is `stem.result`: "moe_gate.weights" uses `tolerances("moe_gate")["weights"]`.

    Raises AssertionError, whose message gives the largest difference and its index. Raises KeyError for a float dtype
    that `TOLERANCES` does not list.
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
        stem, _, result = name.partition(".")
        tolerance = tolerances(stem)[result][want.dtype.name]
        allowed = f"{tolerance.absolute} + {tolerance.relative} of the wanted value"
        # Equal infinities and two NaN are equal, although their difference is NaN.
        x, y = got.astype(np.float64), want.astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        bound = tolerance.absolute + tolerance.relative * np.where(np.isfinite(y), np.abs(y), 0)
        bound = np.where(np.isfinite(y), bound, 0)
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
