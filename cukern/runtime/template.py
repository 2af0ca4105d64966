"""The declarations of a template that the host shares: each kernel's struct of parameters, and constants.

They are read from the text of the `.cu` and of the files that it includes, so that a launch names the fields of the
struct. `assertions` is compiled with every instance: the compiler confirms each offset that was read here.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cukern.runtime import sources
from cukern.runtime.late import Late, item

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
    """A declaration in a template that the host cannot read: a mistake of this library, never of its caller."""


@dataclass(frozen=True)
class Scalar:
    """A number or a pointer."""

    code: str  # its format character in the module `struct`

    @property
    def size(self) -> int:
        return struct.calcsize(f"={self.code}")

    @property
    def alignment(self) -> int:
        return self.size


@dataclass(frozen=True)
class Array:
    """`count` values of one type, side by side."""

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
    """Named fields with their offsets in bytes."""

    name: str
    fields: dict[str, tuple[int, Scalar | Array | Struct]]
    size: int
    alignment: int

    __hash__ = object.__hash__


@functools.cache
def text(file: str) -> str:
    """The template `cuda_src/<file>.cu` and all files of `cuda_src` that it includes, without comments."""
    found: dict[Path, str] = {}

    def read(path: Path) -> None:
        # As for the compiler, what a file includes stands before it, at its first inclusion.
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
    """The integers that a template declares as `constexpr` or in an `enum`, by name."""
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
    ast.Div: operator.floordiv,  # C++ divides integers so
    ast.LShift: operator.lshift,
}


def _evaluate(expression: str, names: Mapping[str, int]) -> int | None:
    """The value of an expression of integers and `names`; None for any other expression."""

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
    """The struct that the kernel `function` of a template takes."""
    for kernel, name in _KERNEL.findall(text(file)):
        if kernel == function:
            return struct_named(file, name)
    raise TemplateError(f"{file}.cu has no kernel {function} with one `const __grid_constant__` struct of parameters")


@functools.cache
def struct_named(file: str, name: str) -> Struct:
    """The struct `name` that a template declares."""
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
    """Static assertions of the layout of each struct of parameters as it was read here."""
    lines = []
    for name in dict.fromkeys(name for _, name in _KERNEL.findall(text(file))):
        layout = struct_named(file, name)
        lines.append(f'static_assert(sizeof({name}) == {layout.size}, "{name}");')
        for field, (offset, _) in layout.fields.items():
            # NVRTC has no offsetof; this is a constant expression too.
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
    """Append offset, code, value and name of every number of a field; bytes are the value of a whole field."""
    if isinstance(kind, Scalar):
        leaves.append((offset, kind.code, 0 if value is None else value, path))
        return
    if value is None or (type(value) is int and value == 0):
        value = bytes(kind.size)
    found = value.value if isinstance(value, Late) else value
    if isinstance(found, bytes) or (isinstance(value, Late) and not isinstance(found, tuple)):
        if not isinstance(found, bytes) or len(found) != kind.size:
            got = len(found) if isinstance(found, bytes) else repr(found)
            raise TemplateError(f"{path} must be {kind.size} bytes, got {got}")
        leaves.append((offset, f"{kind.size}s", value, path))
        return
    if isinstance(kind, Array):
        if not isinstance(value, Sequence) or len(value) != kind.count:
            raise TemplateError(f"{path} must be {kind.count} values, got {value!r}")
        for i, one in enumerate(value):
            _add_leaves(leaves, kind.of, one, offset + i * kind.of.size, f"{path}[{i}]")
        return
    if isinstance(value, Late):  # of a tuple, in the order of the fields
        value = [value.apply(item(i)) for i in range(len(value.value))]
    if not isinstance(value, Mapping):
        if not isinstance(value, Sequence) or len(value) != len(kind.fields):
            raise TemplateError(f"{path} must be the fields {', '.join(kind.fields)}, got {value!r}")
        value = dict(zip(kind.fields, value, strict=True))
    leaves += named_leaves(kind, value, offset, path + ".")


def named_leaves(layout: Struct, values: Mapping[str, Any], offset: int = 0, prefix: str = "") -> list[_Leaf]:
    """Offset, format character, value and name of every number of a struct, in their order.

    `values` has every field by name: a number; for a struct a mapping, a tuple in the order of its fields, or its
    bytes; for an array a sequence; None or 0 for zeros. Raises TemplateError for a missing or an unknown name.
    """
    if values.keys() != layout.fields.keys():
        wrong = [f"no {name}" for name in layout.fields if name not in values]
        wrong += [f"an unknown {name}" for name in values if name not in layout.fields]
        raise TemplateError(f"the fields of {layout.name} are {', '.join(layout.fields)}: there is {', '.join(wrong)}")
    leaves: list[_Leaf] = []
    for name, (at, kind) in layout.fields.items():
        _add_leaves(leaves, kind, values[name], offset + at, prefix + name)
    return leaves


class Packing:
    """The format by which a struct is packed, of bytes that are known ahead and the numbers of each call."""

    def __init__(self, layout: Struct, leaves: list[_Leaf], is_open: Any) -> None:
        known, opened = bytearray(layout.size), []
        for offset, code, value, path in leaves:
            if type(value) is not int and is_open(value):
                opened.append((offset, code, value))
                continue
            try:
                _compiled(f"={code}").pack_into(known, offset, value)
            except struct.error as error:
                raise TemplateError(f"{layout.name}::{path}: {error}, got {value!r}") from None
        codes, at = "=", 0
        #: The values to pack, in order: bytes known ahead, and open values.
        self.parts: list[Any] = []
        for offset, code, value in [*opened, (layout.size, "", None)]:
            if offset > at:
                codes += f"{offset - at}s"
                self.parts.append(bytes(known[at:offset]))
            if code:
                codes += code
                self.parts.append(value)
                at = offset + struct.calcsize(f"={code}")
        self.struct = _compiled(codes)


class Packer(NamedTuple):
    """Packs a kernel's struct: `into(buffer, 0, *order(values + known))`, with the values of a call."""

    into: Callable[..., None]
    #: None where the values are in the struct's order and all that is known is behind them.
    order: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None
    #: The bytes of the fields that are the same in every call.
    known: tuple[bytes, ...]
    #: The names of the values, None for those that the struct does without.
    names: tuple[str | None, ...]
    #: The other fields, by name.
    fixed: dict[str, Any]

    def fields(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """The fields of the struct by name, for the values of a call. A struct within is a dictionary."""
        found: dict[str, Any] = {}
        for path, x in [*zip(self.names, values, strict=True), *self.fixed.items()]:
            if path:
                *outer, name = path.split(".")
                functools.reduce(lambda fields, struct: fields.setdefault(struct, {}), outer, found)[name] = x
        return found


def packer(file: str, function: str, names: Sequence[str], fixed: Mapping[str, Any]) -> Packer:
    """The packer of a kernel's struct, for the values `names` of each call and the `fixed` ones.

    A value is a number, or the bytes of a field that is an array or a struct; "in.stride" is the field `stride` of the
    struct `in` within. A struct may do without some of both. Raises TemplateError for a field that has no value.
    """
    layout, leaves, paths = params(file, function), list[_Leaf](), set[str]()

    def add(struct: Struct, start: int, prefix: str) -> None:
        for name, (offset, kind) in struct.fields.items():
            at, path = start + offset, prefix + name
            if path in fixed:
                _add_leaves(leaves, kind, fixed[path], at, path)
            elif path in names:
                leaves.append((at, kind.code if isinstance(kind, Scalar) else f"{kind.size}s", path, path))
            elif isinstance(kind, Struct):
                add(kind, at, path + ".")
            else:
                raise TemplateError(f"{layout.name} of {function} has the field {path}, which no call gives")
            paths.add(path)

    add(layout, 0, "")
    opened = tuple((offset, code, value) for offset, code, value, _ in leaves if type(value) is str)
    fixed_leaves = [(offset, code, value, path) for offset, code, value, path in leaves if type(value) is not str]
    form = _form(layout.size, tuple(names), opened, tuple((offset, code) for offset, code, *_ in fixed_leaves))
    try:
        packed = form.fixed.pack(*[value for _, _, value, _ in fixed_leaves])
    except struct.error:
        Packing(layout, leaves, lambda value: type(value) is str)  # which names the field
        raise
    known = tuple(packed[start:end] for start, end in form.known)
    own = {path: x for path, x in fixed.items() if path in paths}
    taken = tuple(path if path in paths and path not in fixed else None for path in names)
    return Packer(form.whole.pack_into, form.order, known, taken, own)


class _Form(NamedTuple):
    """How the structs of one layout are packed, whatever their fixed numbers are."""

    fixed: struct.Struct  # of the fixed numbers alone, in a struct of the same size
    known: list[tuple[int, int]]  # the bytes from one value of a call to the next
    whole: struct.Struct  # of the values of a call, and of all that is known
    order: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None


@functools.lru_cache(maxsize=1024)
def _form(
    size: int, names: tuple[str, ...], opened: tuple[tuple[int, str, str], ...], fixed: tuple[tuple[int, str], ...]
) -> _Form:
    """The form of a struct of `size` bytes with the values `opened` of each call and the `fixed` numbers."""
    text, end = "=", 0
    for offset, code in fixed:
        text += f"{offset - end}x{code}"
        end = offset + struct.calcsize(f"={code}")
    numbers = struct.Struct(f"{text}{size - end}x")
    known: list[tuple[int, int]] = []
    text, end, places = "=", 0, []
    for offset, code, name in (*opened, (size, "", "")):
        if offset > end:
            text += f"{offset - end}s"
            places.append(len(names) + len(known))
            known.append((end, offset))
        if code:
            text += code
            places.append(names.index(name))
            end = offset + struct.calcsize(f"={code}")
    order = None if places == [*range(len(names) + len(known))] else operator.itemgetter(*places)
    return _Form(numbers, known, struct.Struct(text), order)


_compiled = functools.lru_cache(maxsize=1024)(struct.Struct)
