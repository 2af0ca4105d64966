"""Validation. Each error names the argument, the expected value and the actual value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np


def fail(name: str, wanted: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"{name} must be {wanted}, got {got}")


def refuse_gradient(name: str) -> NoReturn:
    """Refuse a tensor that requires gradients: a missing gradient would train the model wrongly."""
    wanted = "a tensor that does not require grad (there is no backward: use torch.no_grad() or .detach())"
    fail(name, wanted, "one that does", RuntimeError)


def integer(name: str, value: Any, low: int, high: int | None = None, why: str = "") -> int:
    """Return an int in [low, high]. NumPy integers are accepted, booleans and floats are refused."""
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    wanted = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if why:
        wanted += f" ({why})"
    _refuse_array(name, value, wanted)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        fail(name, wanted, f"{value!r} ({type(value).__name__})", TypeError)
    if number < low or (high is not None and number > high):
        fail(name, wanted, number)
    return number


def array_type(value: Any) -> type | None:
    """Return the type of the caller's array; None for other values and NumPy scalars."""
    described: type | None = getattr(value, "array_type", None)
    is_array = hasattr(value, "__dlpack__") and not isinstance(value, np.generic)
    return described or (type(value) if is_array else None)


def _refuse_array(name: str, value: Any, wanted: str) -> None:
    """Refuse descriptions of arrays, and arrays of libraries other than NumPy. To read an element of a GPU array, the
    host would have to wait."""
    kind = array_type(value)
    if kind is not None and not isinstance(value, np.ndarray):
        fail(name, wanted, f"an array ({kind.__name__})", TypeError)


def element(name: str, value: Any, low: int, high: int, why: str = "") -> int:
    """Like `integer`, but also accept a NumPy array of one element."""
    return integer(name, value.item() if hasattr(value, "dtype") else value, low, high, why)


def number(name: str, value: Any) -> float:
    if type(value) is float and value - value == 0.0:
        return value
    _refuse_array(name, value, "a number")
    try:
        # `float` would accept text and, before NumPy 2.4, an array of one element (with a warning).
        is_other = isinstance(value, (str, bytes, bool, np.bool_))
        if isinstance(value, np.ndarray):
            is_other = value.ndim > 0 or value.dtype == np.bool_
        result = float("no number" if is_other else value)
    except (TypeError, ValueError):
        fail(name, "a number", f"{value!r} ({type(value).__name__})", TypeError)
    if result != result or result in (float("inf"), float("-inf")):
        fail(name, "a finite number", result)
    return result


def flag(name: str, value: Any) -> bool:
    """Return a bool; accept 0 and 1."""
    if value is True or value is False:
        return value
    return bool(one_of(name, value, (False, True)))


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    if type(value) is str and value in allowed:
        return value
    options = tuple(allowed)
    kind = array_type(value)  # refuse arrays first, because they compare element by element
    if kind is not None or value not in options:
        fail(name, "one of " + ", ".join(map(repr, options)), kind.__name__ if kind else repr(value))
    return value


def host_variant(variant: str, variants: Collection[str]) -> None:
    """Accept only "auto": the NumPy reference has no variants."""
    if one_of("variant", variant, variants) != "auto":
        fail("variant", "'auto' for arrays in host memory, where the NumPy reference runs", repr(variant))


def dtype(name: str, got: str, allowed: Iterable[str]) -> None:
    options = dict.fromkeys(allowed)
    if got not in options:
        fail(name, " or ".join(options), got, TypeError)


def shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...], symbols: str) -> None:
    """Raise ValueError unless `got` equals `wanted`; the message shows both and `symbols`."""
    if tuple(got) != wanted:
        fail(name, f"of shape {symbols} = {list(wanted)}", list(got))


def dimensions(name: str, got: tuple[int, ...], symbols: tuple[str, ...], takers: Mapping[int, str] = {}) -> None:
    """Raise ValueError unless a shape has as many dimensions as `symbols`.

    `takers` maps a wrong number of dimensions to the cukern function that takes arrays with this number. The message
    names this function.
    """
    if len(got) != len(symbols):
        taker = f", which {takers[len(got)]} takes" if len(got) in takers else ""
        fail(name, f"of shape [{', '.join(symbols)}]", f"{list(got)}{taker}")
