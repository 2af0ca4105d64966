"""The tested versions of transformers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import transformers

from cukern.integrations.transformers._state import Report

TESTED = "5.17", "5.24"
#: The suffixes of class names for each kind of module. A model has modules of a kind if, for each suffix of the kind, a
#: class name ends with it. cukern replaces the modules whose class name ends with the last suffix.
_KINDS = {
    "experts": ("Experts",),
    "routers": ("Router",),
    "norms": ("RMSNorm",),
    "sums": ("RMSNorm", "DecoderLayer"),
    "rotary": ("RotaryEmbedding", "Attention"),
    "attention": ("Attention",),
    "products": ("MLP",),
}
_warned: set[type] = set()


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _missed_kinds(model: Any, report: Report, parts: Sequence[str]) -> list[str]:
    names = {type(x).__name__ for x in model.modules()}

    def has(part: str) -> bool:
        return all(any(name.endswith(kind) for name in names) for kind in _KINDS[part])

    replaced = {part for part in parts for x in report.replaced if x.part == part and x.what.endswith(_KINDS[part][-1])}
    return [part for part in _KINDS if part in parts and has(part) and part not in replaced]


def warn(model: Any, report: Report, parts: Sequence[str]) -> None:
    """Warn, once per model class, if `enable` misses modules in an untested version of transformers."""
    version = transformers.__version__
    first, last = map(numbers, TESTED)
    if first <= numbers(version) <= last or type(model) in _warned:
        return
    if missed := _missed_kinds(model, report, parts):
        _warned.add(type(model))
        age = "newer" if numbers(version) > last else "older"
        warnings.warn(
            f"transformers {version} is {age} than the tested {TESTED[0]} to {TESTED[1]}: "
            f"{', '.join(missed)} of {type(model).__name__} stay as they were",
            stacklevel=3,
        )
