"""How long the functions of a source file are, in lines from the head's first one to the end of the body."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


class Function(NamedTuple):
    """A function, or in CUDA whatever has a body of statements."""

    head: str
    line: int  # the first one, from 1 on
    length: int


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# What opens a brace and has no statements of its own: functions may follow inside.
_NO_FUNCTION = re.compile(r"(template <.*> )?(struct|class|union|enum|namespace|extern)\b|.*= \{$")


def of_python(source: str) -> Iterator[Function]:
    """The functions of a Python file, also those inside of others."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield Function(node.name, node.lineno, node.end_lineno - node.lineno + 1)


def of_cuda(source: str) -> Iterator[Function]:
    """The functions of a CUDA file in clang-format's layout, where a body ends at its head's indent.

    Bodies that are on the line of their brace are left out. Raises ValueError for a body without an end.
    """
    without_comments = _COMMENT.sub(lambda found: "\n" * found[0].count("\n"), source)
    lines = [line.rstrip() for line in without_comments.splitlines()]
    at, first = 0, None  # first: of the statement that `at` is in
    while at < len(lines):
        line = lines[at]
        if line.startswith("#"):
            while lines[at].endswith("\\"):
                at += 1
            first = None
        elif line:
            first = at if first is None else first
            head = " ".join(map(str.strip, lines[first : at + 1]))
            if line.endswith("{") and not _NO_FUNCTION.match(head):
                end = _end_of_body(lines, at, first)
                yield Function(head, first + 1, end - first + 1)
                at, first = end, None
            elif line.endswith(("{", "}", ";", ":")):
                first = None
        at += 1


def _end_of_body(lines: list[str], opened: int, first: int) -> int:
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    closing = re.compile(re.escape(indent) + r"\}")
    for at in range(opened + 1, len(lines)):
        if closing.match(lines[at]):
            return at
    raise ValueError(f"the body after `{lines[opened].strip()}` has no end at its head's indent")
