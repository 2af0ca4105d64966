"""Schemas of torch operators, derived from function signatures.

Annotations decide the types: `AnyArray` becomes Tensor, `WrittenArray` a Tensor that the function writes, `Size`
SymInt. Other types keep their names. A union becomes its first type, optional if it contains None.

`step: int | AnyArray` adds the overload `.step`, with a Tensor `step`. A flag such as `return_lse` becomes the overload
`.lse`, which also returns `lse`. The overload `.out` takes the results as arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

_TYPES = {"AnyArray": "Tensor", "WrittenArray": "Tensor", "Size": "SymInt"}
_TYPES |= {name: name for name in ("Generator", "bool", "float", "int", "str")}


class Argument(NamedTuple):
    name: str
    type: str
    suffix: str = ""  # "[]" for a list, "?" for an optional argument
    default: str = ""
    is_written: bool = False
    is_keyword: bool = False


class Schema(NamedTuple):
    """The schema of an overload. The default overload has an empty name."""

    operator: str
    overload: str
    arguments: list[Argument]
    results: list[Argument]

    @property
    def name(self) -> str:
        return f"{self.operator}.{self.overload}".rstrip(".")

    def __str__(self) -> str:
        letters = iter(ascii_lowercase)
        parts = []
        for x in self.arguments:
            if x.is_keyword and "*" not in parts:
                parts.append("*")
            alias = f"({next(letters)}!)" if x.is_written else ""
            parts.append(f"{x.type}{alias}{x.suffix} {x.name}" + (f"={x.default}" if x.default else ""))
        results = ", ".join(f"{x.type}{x.suffix} {x.name}" for x in self.results)
        return f"{self.name}({', '.join(parts)}) -> ({results})"

    def out(self) -> Schema:
        """The overload that takes the results as its last arguments."""
        written = [x._replace(is_written=True, is_keyword=True) for x in self.results]
        overload = f"{self.overload}_out" if self.overload else "out"
        return Schema(self.operator, overload, [*self.arguments, *written], [])

    def functional(self) -> Schema | None:
        """The overload without written arguments. None if no argument is written, or if a written one is not
        optional."""
        written = [x for x in self.arguments if x.is_written]
        if self.overload or not written or not all(x.default for x in written):
            return None
        return self._replace(overload="functional", arguments=[x for x in self.arguments if not x.is_written])


def schemas(function: Callable[..., Any], names: Sequence[str]) -> Iterator[Schema]:
    """Yield the schemas of a function's operator, without the overloads that `Schema` derives."""
    signature, operator = inspect.signature(function), function.__name__
    taken = [
        x for x in signature.parameters.values() if not x.name.startswith("return_") and not (names and x.name == "out")
    ]
    arguments = [_argument(operator, x) for x in taken]
    flags = [x for x in names if f"return_{x}" in signature.parameters]
    results = _results(operator, signature.return_annotation, [x for x in names if x not in flags])
    yield Schema(operator, "", arguments, results)
    for i, x in enumerate(taken):
        if arguments[i].type != "Tensor" and "AnyArray" in x.annotation.split(" | "):
            as_tensor = arguments[i]._replace(type="Tensor")
            yield Schema(operator, x.name, [*arguments[:i], as_tensor, *arguments[i + 1 :]], results)
    for flag in flags:
        yield Schema(operator, flag, arguments, [*results, Argument(flag, "Tensor")])


def _type(annotation: Any, where: str) -> tuple[str, str]:
    first, *others = annotation.split(" | ") if isinstance(annotation, str) else [""]
    element = re.sub(r"^Sequence\[(.*)\]$", r"\1", first)
    if element not in _TYPES:
        found = "none" if annotation is inspect.Parameter.empty else repr(annotation)
        raise TypeError(
            f"{where} must have an annotation that begins with {', '.join(_TYPES)} or a Sequence of one, got {found}"
        )
    # A list that may also be a single number is int[1].
    size = "[]" if element != first else "[1]" if f"Sequence[{first}]" in others else ""
    return _TYPES[element], size + "?" * ("None" in others)


def _argument(operator: str, parameter: inspect.Parameter) -> Argument:
    type_, suffix = _type(parameter.annotation, f"{operator}: the argument {parameter.name}")
    default = "" if parameter.default is parameter.empty else repr(parameter.default)
    if default and type_ == "Tensor":
        default = "None"  # the dispatcher drops arguments that equal their default, so the function's default applies
    is_written = "WrittenArray" in parameter.annotation
    return Argument(parameter.name, type_, suffix, default, is_written, parameter.kind is parameter.KEYWORD_ONLY)


def _results(operator: str, annotation: Any, names: Sequence[str]) -> list[Argument]:
    """Return the named results. The annotation of several results is a tuple."""
    if not names:
        return []
    found = str(annotation)
    types = re.sub(r"^tuple\[(.*)\]$", r"\1", found).split(", ")
    if types[-1] == "...":
        types = types[:1] * len(names)
    if len(types) != len(names):
        wanted = "AnyArray" if len(names) == 1 else f"tuple[{', '.join(['AnyArray'] * len(names))}]"
        raise TypeError(f"{operator} must return {wanted} for {', '.join(names)}, got the annotation {found!r}")
    return [Argument(name, *_type(x, f"{operator}: the result {name}")) for name, x in zip(names, types, strict=True)]
