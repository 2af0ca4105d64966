"""Convert docstrings of cukern to reStructuredText, and find the arguments that they document.

An entry of a section such as `Args:` begins with one or several names: "alpha, limit: of swigluoai."
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import cukern

_SECTIONS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Attributes": "Attributes"}
_NAMED = ("Args", "Attributes", "Raises")
_ENTRY = re.compile(r"([*\w]+(?:, [*\w]+)*): (.*)|([*\w]+(?:, [*\w]+)*):$")
_FUNCTIONS = {name for name in cukern.__all__ if inspect.isfunction(getattr(cukern, name))}


def inline(text: str) -> str:
    """Convert `...` to code, functions and papers to links, and escape all other markup."""

    def code(found: str) -> str:
        name = found.removeprefix("cukern.")
        return f":py:func:`~cukern.{name}`" if name in _FUNCTIONS else f"``{found}``"

    parts = re.split(r"`([^`]+)`", text)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = code(part)
        else:
            escaped = re.sub(r"(?<!\w)([*|\\])|([*|\\_])(?!\w)|(?<=\w)([*|])(?=\w)", lambda m: "\\" + m[0], part)
            parts[i] = re.sub(r"arXiv:(\d+\.\d+)", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", escaped)
    joined = parts[0]
    for before, part in itertools.pairwise(parts):
        # In reStructuredText, inline markup must begin and end at a word boundary. An escaped blank makes such a
        # boundary, and is invisible.
        touching = re.search(r"\w$", before) if part[:1] in ("`", ":") else re.match(r"\w", part)
        joined += ("\\ " if touching else "") + part
    return joined


def _blocks(lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (section name, lines without indentation); the name is "" outside sections."""
    name, held = "", []
    for line in lines:
        heading = re.fullmatch(r"(\w+):", line)
        if heading and heading[1] in _SECTIONS:
            yield name, held
            name, held = heading[1], []
        elif name and line and not line.startswith(" "):
            yield name, held
            name, held = "", [line]
        else:
            held.append(line[4:] if name else line)
    yield name, held


def entries(lines: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """Return the entries of a section as (names, lines of text)."""
    found: list[tuple[list[str], list[str]]] = []
    # Join a list of names that continues on the next line.
    whole = re.sub(r"^([*\w]+(?:, [*\w]+)*,)\n +", r"\1 ", "\n".join(lines), flags=re.MULTILINE)
    for line in whole.split("\n"):
        entry = _ENTRY.match(line)
        if entry:
            names = entry[1] or entry[3]
            found.append((names.replace("*", "").split(", "), [entry[2] or ""]))
        elif found:
            found[-1][1].append(line[4:] if line.startswith("    ") else line)
        elif line:
            found.append(([], [line]))
    return found


def _text(lines: Sequence[str]) -> list[str]:
    """Convert paragraphs; indented lines are formulas and become literal blocks."""
    result: list[str] = []
    inside = False
    for line in lines:
        if line.startswith("    "):
            if not inside:
                result += ["", "::", ""]
            inside = True
            result.append(line)
        elif line:
            if inside:
                result.append("")
            inside = False
            result.append(inline(line))
        else:
            result.append("")
    return result


def to_rst(lines: Iterable[str]) -> list[str]:
    result: list[str] = []
    for name, held in _blocks(lines):
        if not name:
            result += [*_text(held), ""]
            continue
        result += ["", f":{_SECTIONS[name]}:"]
        for names, said in entries(held) if name in _NAMED else [([], held)]:
            body = _text(said)
            if names:
                result += ["    " + ", ".join(f"``{x}``" for x in names), *("        " + x for x in body), ""]
            else:
                result += ["    " + x for x in body]
        result.append("")
    return result


def signature(function: Callable[..., Any]) -> tuple[str, str | None]:
    """Return the arguments and the return type, with annotations as in the source."""

    class Written(str):
        __slots__ = ()
        __repr__ = str.__str__

    def written(annotation: Any) -> Any:
        return Written(annotation) if isinstance(annotation, str) else annotation

    of = inspect.signature(function)
    given = [x.replace(annotation=written(x.annotation)) for x in of.parameters.values()]
    returned = of.return_annotation
    bare = of.replace(parameters=given, return_annotation=inspect.Signature.empty)
    return str(bare), None if returned is inspect.Signature.empty else str(returned)


def _said(function: Callable[..., Any]) -> tuple[set[str], set[str]]:
    """Return the documented arguments, and the functions of cukern that the docstring names."""
    text = inspect.getdoc(function) or ""
    arguments = {
        name
        for section, held in _blocks(text.splitlines())
        if section in ("Args", "Attributes")
        for names, _ in entries(held)
        for name in names
    }
    quoted = set(re.findall(r"`(?:cukern\.)?(\w+)`", text))
    return arguments | quoted, quoted & _FUNCTIONS


def undocumented(function: Callable[..., Any]) -> list[str]:
    """Return the arguments that are documented neither in this docstring nor in a function that it names."""
    known: set[str] = set()
    seen: set[Any] = set()
    waiting = [function]
    while waiting:
        own = waiting.pop()
        if own in seen:
            continue
        seen.add(own)
        arguments, others = _said(own)
        known |= arguments
        waiting += [getattr(cukern, name) for name in others]
    return [name for name in inspect.signature(function).parameters if name not in known]


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    own = {name: getattr(member, "__func__", member) for name, member in vars(cls).items()}
    return {name: x for name, x in own.items() if inspect.isfunction(x) and x.__module__ == cls.__module__}


def undocumented_methods(cls: type) -> dict[str, list[str]]:
    """Return the arguments of public methods that the class, its bases and their methods all leave undocumented."""
    known = {"self", "cls"}
    for base in cls.__mro__:
        if base.__module__.startswith("cukern"):
            known = known.union(*(_said(thing)[0] for thing in (base, *_methods(base).values())))
    found = {}
    for name, method in _methods(cls).items():
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        lacking = [x for x in undocumented(method) if x not in known]
        # A single undocumented argument is allowed, because the method's summary may document it.
        if len(lacking) > 1:
            found[f".{name}"] = lacking
    return found
