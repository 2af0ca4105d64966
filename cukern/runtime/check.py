"""Validation: each error names the argument, the expected value and the actual one."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np


def fail(name: str, wanted: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` with a message in the form that all messages of the library have."""
    raise error(f"{name} must be {wanted}, got {got}")


def refuse_gradient(name: str) -> NoReturn:
    """Raise RuntimeError for a tensor that requires gradients. Without the error the model would train wrongly."""
    wanted = "a tensor that does not require grad (there is no backward: use torch.no_grad() or .detach())"
    fail(name, wanted, "one that does", RuntimeError)


def integer(name: str, value: Any, low: int, high: int | None = None, why: str = "") -> int:
    """Check an int in [low, high], and return it. NumPy integers are accepted, booleans and floats are not."""
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
    """Return the type of an array; for a description, the type of the caller's array.

    Return None for other values and for NumPy scalars.
    """
    described: type | None = getattr(value, "array_type", None)
    is_array = hasattr(value, "__dlpack__") and not isinstance(value, np.generic)
    return described or (type(value) if is_array else None)


def _refuse_array(name: str, value: Any, wanted: str) -> None:
    """Raise TypeError for a description of an array, and for an array other than NumPy's.

    Reading the element of an array on a GPU would wait for the GPU.
    """
    kind = array_type(value)
    if kind is not None and not isinstance(value, np.ndarray):
        fail(name, wanted, f"an array ({kind.__name__})", TypeError)


def element(name: str, value: Any, low: int, high: int, why: str = "") -> int:
    """Check the integer in a NumPy array of one element, or `value` itself, and return it: an int in [low, high]."""
    return integer(name, value.item() if hasattr(value, "dtype") else value, low, high, why)


def number(name: str, value: Any) -> float:
    """Check a finite number, and return it as a float."""
    if type(value) is float and value - value == 0.0:
        return value
    _refuse_array(name, value, "a number")
    try:
        # `float` would also accept text, and before NumPy 2.4 an array of one element (with a warning).
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
    """Check a bool, and return it. The numbers 0 and 1 are accepted."""
    if value is True or value is False:
        return value
    return bool(one_of(name, value, (False, True)))


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Check that `value` is among `allowed`, and return it."""
    if type(value) is str and value in allowed:
        return value
    options = tuple(allowed)
    kind = array_type(value)  # arrays are refused first, because they compare element by element
    if kind is not None or value not in options:
        fail(name, "one of " + ", ".join(map(repr, options)), kind.__name__ if kind else repr(value))
    return value


def host_variant(variant: str, variants: Collection[str]) -> None:
    """Check that the variant for arrays in host memory is "auto": the NumPy reference has no variants."""
    if one_of("variant", variant, variants) != "auto":
        fail("variant", "'auto' for arrays in host memory, where the NumPy reference runs", repr(variant))


def dtype(name: str, got: str, allowed: Iterable[str]) -> None:
    """Raise TypeError unless the dtype name `got` is among `allowed`."""
    options = dict.fromkeys(allowed)
    if got not in options:
        fail(name, " or ".join(options), got, TypeError)


def shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...], symbols: str) -> None:
    """Raise ValueError unless the shape `got` is `wanted`. The message also shows the shape in `symbols`."""
    if tuple(got) != wanted:
        fail(name, f"of shape {symbols} = {list(wanted)}", list(got))


def dimensions(name: str, got: tuple[int, ...], symbols: tuple[str, ...], takers: Mapping[int, str] = {}) -> None:
    """Raise ValueError unless a shape has as many dimensions as `symbols`.

    `takers` maps other numbers of dimensions to the function that takes such arrays, for the message.
    """
    if len(got) != len(symbols):
        taker = f", which {takers[len(got)]} takes" if len(got) in takers else ""
        fail(name, f"of shape [{', '.join(symbols)}]", f"{list(got)}{taker}")
