"""Read a CUDA template: each kernel's parameter struct, and constants.

A launch names the fields of a kernel's parameter struct, so this module parses the `.cu` file and its includes.
`assertions` adds static assertions to every instance, so the compiler checks each offset.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cukern.runtime import sources
from cukern.runtime.each import Each

_SCALARS = {
    "bool": "?",
    "char": "b",
    "signed char": "b",
    "unsigned char": "B",
    "int": "i",
    "unsigned": "I",
    "unsigned int": "I",
    "long long": "q",
    "unsigned long long": "Q",
    "float": "f",
    "double": "d",
}
_POINTER = "Q"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(
    r"(?:\btemplate\s*<\s*typename\s+(\w+)\s*>\s*)?\bstruct\s+(?:alignas\((\d+)\)\s*)?(\w+)\s*(?::\s*(?:public\s+)?(\w+)\s*)?\{"
)
_INNER_BLOCK = re.compile(r"\{[^{}]*\}")
_MEMBER = re.compile(r"(?:alignas\((\d+)\) )?((?:\w+ )*\w+(?:<[\w ]+>)?)((?: |\*)+\w+.*)")
_DECLARATOR = re.compile(r"([ *]*)(\w+) ?((?:\[\w+\])*) ?")
_KERNEL = re.compile(r"__global__[^;{]*?\b(\w+)\s*\(\s*const\s+__grid_constant__\s+(\w+)\s+\w+\s*\)")
_CONSTANTS = re.compile(r"^constexpr\s+(?:int|unsigned|long long|unsigned long long)\s+([^;{}]*);", re.MULTILINE)
_ENUM = re.compile(r"^enum\s*(?:\w+\s*)?\{([^}]*)\}", re.MULTILINE)


class TemplateError(RuntimeError):
    """The host cannot read a template or fill its struct. This is an error of the library, never of its caller."""


@dataclass(frozen=True)
class Scalar:
    code: str  # format character of Python's `struct`

    @property
    def size(self) -> int:
        return struct.calcsize(f"={self.code}")

    @property
    def alignment(self) -> int:
        return self.size


@dataclass(frozen=True)
class Array:
    """`count` adjacent values of one type."""

    of: Scalar | Array | Struct
    count: int

    @property
    def size(self) -> int:
        return self.of.size * self.count

    @property
    def alignment(self) -> int:
        return self.of.alignment


@dataclass(frozen=True)
class Struct:
    name: str
    fields: dict[str, tuple[int, Scalar | Array | Struct]]
    size: int
    alignment: int

    __hash__ = object.__hash__


@functools.cache
def text(file: str) -> str:
    """Return a template and the `cuda_src` files that it includes, without comments."""
    found: dict[Path, str] = {}

    def read(path: Path) -> None:
        # Like the preprocessor, put an included file before the includer, at its first inclusion.
        if path in found or not path.is_file():
            return
        found[path] = ""
        source = path.read_text()
        for quoted in sources.quoted_includes(source):
            read(sources.CUDA_SRC / quoted)
        del found[path]
        found[path] = _COMMENT.sub(" ", source)

    read(sources.CUDA_SRC / f"{file}.cu")
    return "\n".join(found.values())


@functools.cache
def constants(file: str) -> Mapping[str, int]:
    """Return the integers that a template declares as `constexpr` or in an `enum`, by name."""
    found: dict[str, int] = {}
    for declarations in _CONSTANTS.findall(text(file)):
        for declaration in re.split(r",(?![^(]*\))", declarations):
            name, _, value = declaration.partition("=")
            number = _evaluate(value, found)
            if number is not None and name.strip().isidentifier():
                found[name.strip()] = number
    for names in _ENUM.findall(text(file)):
        number = -1
        for entry in filter(None, (x.strip() for x in names.split(","))):
            name, _, value = (part.strip() for part in entry.partition("="))
            number = number + 1 if not value else _evaluate(value, found) or 0
            found.setdefault(name, number)
    return found


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # C++ integer division
    ast.LShift: operator.lshift,
}


def _evaluate(expression: str, names: Mapping[str, int]) -> int | None:
    """Evaluate an expression of integers and `names`; None for any other expression."""

    def value(node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)
        return None

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return None


@functools.cache
def params(file: str, function: str) -> Struct:
    for kernel, name in _KERNEL.findall(text(file)):
        if kernel == function:
            return struct_named(file, name)
    raise TemplateError(f"{file}.cu has no kernel {function} with one `const __grid_constant__` struct of parameters")


@functools.cache
def struct_named(file: str, name: str) -> Struct:
    source = text(file)
    bare, _, argument = name.partition("<")
    for found in _STRUCT.finditer(source):
        if found[3] != bare:
            continue
        depth, at = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(source[at], 0)
            at += 1
        body = source[found.end() : at - 1]
        while "{" in body:
            body = _INNER_BLOCK.sub(";", body)
        if found[1]:
            body = re.sub(rf"\b{found[1]}\b", argument.rstrip(">"), body)
        return _lay_out(file, name, body, found[4], int(found[2] or 1))
    raise TemplateError(f"{file}.cu declares no struct {name}")


def _lay_out(file: str, name: str, body: str, base: str | None, alignment: int) -> Struct:
    fields: dict[str, tuple[int, Scalar | Array | Struct]] = {}
    end = 0
    if base:
        inherited = struct_named(file, base)
        fields.update(inherited.fields)
        end, alignment = inherited.size, max(alignment, inherited.alignment)
    for statement in body.split(";"):
        statement = " ".join(statement.split())
        if not statement or "(" in re.sub(r"alignas\(\d+\)", "", statement):
            continue  # a function
        member = _MEMBER.fullmatch(statement)
        if member is None:
            raise TemplateError(f"{file}.cu: cannot read `{statement}` of struct {name}")
        for declarator in member[3].split(","):
            stars, field, counts = _DECLARATOR.fullmatch(declarator).groups()  # type: ignore[union-attr]
            kind: Scalar | Array | Struct = _type(file, member[2], "*" in stars or "*" in member[2])
            for count in reversed(re.findall(r"\w+", counts)):
                kind = Array(kind, int(count) if count.isdigit() else constants(file)[count])
            each = max(int(member[1] or 1), kind.alignment)
            alignment, end = max(alignment, each), -(-end // each) * each
            fields[field] = end, kind
            end += kind.size
    return Struct(name, fields, -(-end // alignment) * alignment, alignment)


def _type(file: str, words: str, is_pointer: bool) -> Scalar | Struct:
    if is_pointer:
        return Scalar(_POINTER)
    plain = " ".join(word for word in words.split() if word != "const")
    return Scalar(_SCALARS[plain]) if plain in _SCALARS else struct_named(file, plain)


def assertions(file: str) -> str:
    """Return static assertions of each parameter struct's layout, as this module reads it."""
    lines = []
    for name in dict.fromkeys(name for _, name in _KERNEL.findall(text(file))):
        layout = struct_named(file, name)
        lines.append(f'static_assert(sizeof({name}) == {layout.size}, "{name}");')
        for field, (offset, _) in layout.fields.items():
            # NVRTC has no offsetof. __INTADDR__ gives a constant expression.
            place = f"__INTADDR__(&(({name}*)0)->{field})"
            lines.append(f'static_assert({place} == {offset}, "{name}::{field}");')
        lines += [
            f'static_assert(sizeof({inner.name}) == {inner.size}, "{inner.name}");' for inner in _structs_within(layout)
        ]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _structs_within(layout: Struct) -> Iterator[Struct]:
    for _, kind in layout.fields.values():
        inner = kind.of if isinstance(kind, Array) else kind
        if isinstance(inner, Struct):
            yield inner
            yield from _structs_within(inner)


# --- packing ------------------------------------------------------------------------------------------


_Leaf = tuple[int, str, Any, str]


def _add_leaves(leaves: list[_Leaf], kind: Scalar | Array | Struct, value: Any, offset: int, path: str) -> None:
    """Append (offset, format character, value, name) for each number of a field. A value of bytes fills the whole
    field."""
    if isinstance(kind, Scalar):
        leaves.append((offset, kind.code, 0 if value is None else value, path))
        return
    if value is None or (type(value) is int and value == 0):
        value = bytes(kind.size)
    found = value.value if isinstance(value, Each) else value
    if isinstance(found, bytes) or isinstance(value, Each):
        if not isinstance(found, bytes) or len(found) != kind.size:
            got = len(found) if isinstance(found, bytes) else repr(found)
            raise TemplateError(f"{path} must be {kind.size} bytes, got {got}")
        leaves.append((offset, f"{kind.size}s", value, path))
        return
    if isinstance(kind, Array):
        if not isinstance(value, (tuple, list)) or len(value) != kind.count:
            raise TemplateError(f"{path} must be {kind.count} values, got {value!r}")
        for i, one in enumerate(value):
            _add_leaves(leaves, kind.of, one, offset + i * kind.of.size, f"{path}[{i}]")
        return
    if not isinstance(value, dict):
        if not isinstance(value, (tuple, list)) or len(value) != len(kind.fields):
            raise TemplateError(f"{path} must be the fields {', '.join(kind.fields)}, got {value!r}")
        value = dict(zip(kind.fields, value, strict=True))
    leaves += named_leaves(kind, value, offset, path + ".")


def named_leaves(layout: Struct, values: Mapping[str, Any], offset: int = 0, prefix: str = "") -> list[_Leaf]:
    """Return (offset, format character, value, name) for each number of a struct, in order.

    A value is a number for a scalar, a sequence for an array, and a mapping, a tuple or bytes for an inner struct. None
    or 0 means zeros.
    """
    if values.keys() != layout.fields.keys():
        wrong = [f"no {name}" for name in layout.fields if name not in values]
        wrong += [f"an unknown {name}" for name in values if name not in layout.fields]
        raise TemplateError(f"the fields of {layout.name} are {', '.join(layout.fields)}: there is {', '.join(wrong)}")
    leaves: list[_Leaf] = []
    for name, (at, kind) in layout.fields.items():
        value = values[name]
        if type(kind) is Scalar:
            leaves.append((offset + at, kind.code, 0 if value is None else value, prefix + name))
        else:
            _add_leaves(leaves, kind, value, offset + at, prefix + name)
    return leaves


def packing(layout: Struct, leaves: list[_Leaf], is_open: Any) -> tuple[struct.Struct, list[Any]]:
    """Return the `struct.Struct` that packs a parameter struct, and the values to pack.

    Numbers known now are packed into bytes. `is_open(value)` is true for a value known only at a call, such as an
    address.
    """
    values = [value for _, _, value, _ in leaves]
    are_open = [type(value) is not int and is_open(value) for value in values]
    form = _format(layout.size, tuple([(offset, code) for offset, code, _, _ in leaves]), tuple(are_open))
    known = [leaf for leaf, each in zip(leaves, are_open, strict=True) if not each]
    try:
        packed = form.fixed.pack(*[value for _, _, value, _ in known])
    except struct.error:
        for _, code, value, path in known:
            try:
                struct.pack(f"={code}", value)
            except struct.error as error:
                raise TemplateError(f"{layout.name}::{path}: {error}, got {value!r}") from None
        raise
    opened = iter([value for value, each in zip(values, are_open, strict=True) if each])
    return form.combined, [next(opened) if part is None else packed[part[0] : part[1]] for part in form.values]


class _Format(NamedTuple):
    """How a parameter struct is packed. Its fixed numbers are known in advance, its open values only at a call."""

    fixed: struct.Struct  # packs the fixed numbers into a struct of the full size
    combined: struct.Struct  # packs `values`
    values: list[tuple[int, int] | None]  # a range of the fixed bytes, or None for an open value


@functools.lru_cache(maxsize=1024)
def _format(size: int, leaves: tuple[tuple[int, str], ...], are_open: tuple[bool, ...]) -> _Format:
    text, end = "=", 0
    for (offset, code), is_open in zip(leaves, are_open, strict=True):
        if not is_open:
            text += f"{offset - end}x{code}"
            end = offset + struct.calcsize(f"={code}")
    fixed = struct.Struct(f"{text}{size - end}x")
    text, end, values = "=", 0, list[tuple[int, int] | None]()
    for (offset, code), is_open in [*zip(leaves, are_open, strict=True), ((size, ""), True)]:
        if not is_open:
            continue
        if offset > end:
            text += f"{offset - end}s"
            values.append((end, offset))
        if code:
            text += code
            values.append(None)
            end = offset + struct.calcsize(f"={code}")
    return _Format(fixed, struct.Struct(text), values)
