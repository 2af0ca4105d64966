"""Compute digests of sources from their tokens, so that comments, docstrings and layout do not change a digest."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: The tokens of a CUDA source. A directive ends with its line, so the end of that line is a token.
_CUDA = re.compile(
    r"""(?P<comment>//(?:[^\n\\]|\\.)*|/\*.*?\*/)
    |(?P<directive>^[ \t]*\#(?:\\\n|/\*.*?\*/|//[^\n]*|[^\n])*)
    |(?P<token>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*
        |<<<|>>>|<<=|>>=|\.\.\.|->\*?|::|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\#\#|\S)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
#: Python tokens that are only layout. An indentation is one token, whatever its width.
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
# From Python 3.12 on an f-string is several tokens; in older releases it is one.
_FSTRING_START, _FSTRING_END = (getattr(tokenize, f"FSTRING_{name}", None) for name in ("START", "END"))


def cuda_tokens(text: str) -> Iterator[str]:
    """Yield the tokens of a CUDA source without its comments."""
    for found in _CUDA.finditer(text):
        if directive := found["directive"]:
            # Split the directive after its `#` into tokens, too.
            yield "#"
            yield from cuda_tokens(directive.replace("\\\n", " ").strip()[1:])
            yield "\n"
        elif token := found["token"]:
            yield token


def _docstrings(tree: ast.AST) -> set[tuple[int, int]]:
    """Return the positions where the docstrings of a module, its classes and functions begin."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr):
            first = node.body[0].value
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.add((first.lineno, first.col_offset))
    return found


def python_tokens(text: str) -> Iterator[str]:
    """Yield the tokens of a Python source without its comments and docstrings, the same in any release of Python."""
    docstrings, lines = _docstrings(ast.parse(text)), text.splitlines(keepends=True)
    begin, depth, is_behind_docstring = (0, 0), 0, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == _FSTRING_START:
            begin, depth = (begin, depth + 1) if depth else (token.start, 1)
        elif token.type == _FSTRING_END:
            depth -= 1
            if not depth:
                yield _between(lines, begin, token.end)
        elif depth or token.type in _LAYOUT:
            continue
        elif token.type == tokenize.STRING and token.start in docstrings:
            is_behind_docstring = True
        elif is_behind_docstring:  # the rest of the docstring's line
            is_behind_docstring = token.type != tokenize.NEWLINE
        elif token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE):
            yield tokenize.tok_name[token.type]
        else:
            yield token.string


def _between(lines: list[str], begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two positions (line from 1, column)."""
    if begin[0] == end[0]:
        return lines[begin[0] - 1][begin[1] : end[1]]
    whole = lines[begin[0] : end[0] - 1]
    return "".join([lines[begin[0] - 1][begin[1] :], *whole, lines[end[0] - 1][: end[1]]])


_TOKENS = {".py": python_tokens, ".cu": cuda_tokens, ".cuh": cuda_tokens}


@functools.cache
def _of_text(text: str, suffix: str) -> bytes:
    return hashlib.sha256("\0".join(_TOKENS[suffix](text)).encode()).digest()


def digest(*paths: Path, root: Path = ROOT) -> str:
    """Return a digest of source files, and of the sources in folders, by name and tokens. Missing paths add nothing."""
    files: set[Path] = set()
    for path in paths:
        found = path.rglob("*") if path.is_dir() else [path]
        files.update(file for file in found if file.suffix in _TOKENS and file.is_file())
    result = hashlib.sha256()
    for file in sorted(files):
        result.update(f"{file.relative_to(root).as_posix()}\0".encode() + _of_text(file.read_text(), file.suffix))
    return result.hexdigest()[:16]
