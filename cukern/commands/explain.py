"""`cukern explain`: explain a call's kernels from its sizes. The arrays have no memory, and no kernel runs.

Shapes and dtypes come from docstrings: "logits: float32 [tokens, experts]", or "as in `rms_norm`", which refers to the
docstring of `rms_norm`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import cukern
from cukern.commands import UserError
from cukern.commands.serving import launched, placeholder
from cukern.explain import WIDTH
from cukern.runtime import arrays, gpu, kernel
from cukern.runtime.compile import Instance
from cukern.runtime.progress import progress
from cukern.runtime.template import TemplateError

#: Default sizes by name in docstrings. Other sizes are 8.
SIZES = {
    "tokens": 4096, "rows": 4096, "words": 4096, "memory_tokens": 4096, "experts": 256, "topk": 8, "topk_group": 4,
    "hidden": 4096, "width": 4096, "inter": 2048, "k": 4096, "n": 4096, "vocab": 131072, "positions": 4096, "heads": 32,
    "kv_heads": 8, "head_dim": 128, "dim": 128, "rotary_dim": 128, "kv_lora_rank": 512, "rope_dim": 64, "batch": 64,
    "seqs": 64, "sequences": 64, "seq": 512, "beams": 4, "pages": 4096, "blocks": 4096, "page_size": 64,
    "block_size": 16, "max_pages": 64, "max_blocks": 256, "max_tokens": 512, "max_steps": 512, "max_length": 2048,
    "max_seq_len": 512, "memory_len": 512, "query_tokens": 1, "max_partitions": 8, "size": 16, "pairs": 64,
    "group_size": 128, "num_experts": 256, "n_expert": 256, "step": 1, "end_id": 2, "batch_size": 64,
    "num_heads_per_head_k": 128, "num_heads_k": 1,
}  # fmt: skip
#: These defaults hold for functions whose docstrings have all four sizes: attention over latents (MLA).
_OF_LATENTS = {"head_dim": 576, "head_dim_v": 512, "heads": 128, "kv_heads": 1}
_ANOTHER = 8
_FLOATS = ("bfloat16", "float16", "float32")
_DTYPE = re.compile(rf"\b({'|'.join(sorted(arrays.ITEM_SIZE, key=len, reverse=True))})\b")
_SHAPE = re.compile(r"(?<![\w\])])\[([^\[\]]*)\](?! or less)")
#: Matches "of the dtype of `a`", "of q's dtype", "of the query's dtype", "the same dtype" and "a dtype as in".
_LIKE = re.compile(r"\b(?:dtype of `(\w+)`|(?:of (?:the )?(\w+)'s dtype)|the same dtype|a dtype as in)")
_A_FLOAT = 0.9
#: Errors for invalid arguments. TemplateError: a size does not fit in a kernel's field.
_REFUSALS = (TypeError, ValueError, TemplateError)
_WIDEST = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="FUNCTION", help="a function of cukern, such as moe_fused_gate")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=N[,NAME=N...]",
        help="sizes of the arrays by the names of the docstring, and integers among the arguments, such as "
        "tokens=8192,experts=256 (default: sizes of a large model, which the output shows)",
    )
    parser.add_argument(
        "--arch", metavar="ARCH", help="90a, sm_90a, 90, or a card such as H200 (default: the GPU here, else H200)"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        default=[],
        metavar="[ARRAY=]DTYPE",
        help="of the arrays that take any of float32, float16 and bfloat16, the default; or of one array, such as "
        "a=float8_e4m3fn",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="scalars",
        metavar="NAME=VALUE",
        help="another argument, such as scoring_func=softmax or variant=dynamic",
    )
    parser.add_argument(
        "--with",
        action="append",
        default=[],
        dest="optional",
        metavar="ARRAY",
        help="an array that the function takes as an option, such as expert_map",
    )
    parser.epilog = "\n".join(
        [
            "--shape, --dtype, --set and --with may be repeated. In Python, `cukern.explain` takes a call on arrays.",
            "examples:",
            "  cukern explain moe_fused_gate --shape tokens=8192,experts=256 --arch H200",
            "  cukern explain paged_attention --shape head_dim=72,block_size=24 --set layout=flash --arch A100",
            "",
            *textwrap.wrap(f"functions: {', '.join(functions())}", 80, subsequent_indent="  "),
        ]
    )


# --- parsing docstrings -----------------------------------------------------------------------------------


class ArgumentDoc(NamedTuple):
    """The text about an argument in a docstring."""

    text: str
    shape: str  # such as "experts, 2 * inter, hidden"; empty for a number or a string


@functools.cache
def _entries(function: str) -> dict[str, ArgumentDoc]:
    text = inspect.getdoc(getattr(cukern, function)) or ""
    groups: list[tuple[list[str], str]] = []
    for line in text.partition("\nArgs:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        if found := re.match(r"    (\w+(?:, \w+)*,?)(?::\s+(.*))?$", line):
            groups.append((found[1].strip(",").split(", "), found[2] or ""))
        elif groups:
            groups[-1] = (groups[-1][0], f"{groups[-1][1]} {line.strip()}")
    entries: dict[str, ArgumentDoc] = {}
    before = ""
    for names, doc in groups:
        shape = _SHAPE.search(doc)
        if shape:
            before = shape[1]
        elif not re.search(r"\bthe same\b(?! dtype)", doc):
            before = ""
        # "key_cache, value_cache: [...], and [...]" gives a shape for each name.
        pair = re.search(r"\[([^\]]*)\](?: with [^;\[]*)?,(?: and)? \[([^\]]*)\]", doc) if len(names) == 2 else None
        for i, name in enumerate(names):
            entries[name] = ArgumentDoc(doc, pair[i + 1] if pair else before)
    return entries


def _doc_of(function: str, name: str, asked: tuple[tuple[str, str], ...] = ()) -> ArgumentDoc | None:
    """Return the text about an argument from a function's docstring, or from a docstring to which it refers."""
    if (function, name) in asked or not inspect.isfunction(getattr(cukern, function, None)):
        return None
    asked = (*asked, (function, name))
    whole = inspect.getdoc(getattr(cukern, function)) or ""
    own = _entries(function).get(name, ArgumentDoc("", ""))
    if own.shape:
        return own
    renamed = dict(re.findall(r"`(\w+)` for `(\w+)`", whole))
    for other in re.findall(r"`(?:cukern\.)?(\w+)`", f"{own.text}\n{whole}"):
        for known in dict.fromkeys((renamed.get(name, name), name)):
            if found := _doc_of(other, known, asked):
                return found
    if inline := re.search(rf"`{name}`[^`\[]*\[([^\]]*)\]", whole):
        return ArgumentDoc(own.text or inline[0], inline[1])
    return own if own.text else None


def _shape_with(doc: ArgumentDoc, scalars: Mapping[str, Any]) -> str:
    """Return an array's shape. A text may give one shape per value of a string argument: 'layout "flash": [...]'."""
    for word in scalars.values():
        if found := re.search(rf'"{word}":[^\[]*\[([^\]]*)\]', doc.text):
            return found[1]
    return doc.shape


# --- the call ---------------------------------------------------------------------------------------------


def _size(text: str, sizes: Mapping[str, int]) -> int:
    """Evaluate a size expression such as "ceil(k / 64)"."""
    return math.ceil(eval(text, {"ceil": math.ceil}, dict(sizes)))


def _array(name: str, dtype: str, shape: Sequence[str], sizes: Mapping[str, int]) -> Any:
    try:
        numbers = tuple(_size(text, sizes) for text in shape)
    except (SyntaxError, NameError, TypeError):
        raise UserError(f"{name}: its docstring gives no sizes, but [{', '.join(shape)}]") from None
    try:
        return placeholder(dtype, numbers)
    except (OverflowError, ValueError):
        raise UserError(f"{name} must have less than 2**63 bytes, got the shape {list(numbers)}") from None


def _dimensions(shape: str) -> list[str]:
    """Return a shape's size expressions; "..." stands for at most one dimension."""
    parts = [
        part.strip().removeprefix("*").removeprefix("all ") for part in re.split(r",(?![^(]*\))", shape) if part.strip()
    ]
    middle = {"...": "tokens" if len(parts) > 1 and parts[0] == "..." else "hidden"}
    return [middle.get(part, part) for i, part in enumerate(parts) if part != "..." or i in (0, len(parts) - 1)]


def _names(expressions: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name for text in expressions for name in re.findall(r"[a-z_]\w*", text)
                              if name not in ("ceil", "or", "x")))  # fmt: skip


class Parameter(NamedTuple):
    name: str
    kind: str  # "array", "arrays" (a list with one array), "int" or "other"
    is_required: bool
    is_left_out: bool  # whether calls usually pass None
    annotation: str
    doc: ArgumentDoc


@functools.cache
def parameters(function: Callable[..., Any]) -> list[Parameter]:
    found = []
    for own in inspect.signature(function).parameters.values():
        annotation = str(own.annotation)
        doc = _doc_of(function.__name__, own.name) or ArgumentDoc("", "")
        kind = "other"
        if re.search(r"\b(int|Size)\b", annotation):
            kind = "int"
        elif "Array" in annotation and "float" not in annotation and (doc.shape or "one element" in doc.text):
            kind = "arrays" if annotation.startswith("Sequence[") else "array"
        is_left_out = "None" in annotation and (kind == "other" or " or None" in doc.text)
        found.append(Parameter(own.name, kind, own.default is own.empty, is_left_out, annotation, doc))
    return found


def _dtype(parameter: Parameter, first: str, chosen: Mapping[str, str]) -> str:
    """Return an array's dtype: the chosen one if the docstring allows it, else the docstring's first."""
    if parameter.name in chosen:
        return chosen[parameter.name]
    common, text = chosen[""], parameter.doc.text
    before, _, after = text.partition("[")
    named = _DTYPE.findall(before)
    if not named and before.startswith("bytes"):
        return "uint8"
    if not named and (like := _LIKE.search(text)):
        return chosen.get(like[1] or like[2] or first, common)
    named = named or _DTYPE.findall(after.partition(":")[0])
    return common if not named or common in named else named[0]


def _shapes(function: Callable[..., Any], scalars: Mapping[str, Any], optional: Sequence[str]) -> dict[str, list[str]]:
    return {
        p.name: _dimensions(_shape_with(p.doc, scalars) or "1")
        for p in parameters(function)
        if p.kind in ("array", "arrays") and (p.name in optional or (p.is_required and not p.is_left_out))
    }


def sizes_of(function: Callable[..., Any], scalars: Mapping[str, Any], optional: Sequence[str]) -> list[str]:
    names = _names([text for shape in _shapes(function, scalars, optional).values() for text in shape])
    return list(dict.fromkeys([*names, *(p.name for p in parameters(function) if p.kind == "int")]))


def call_of(
    function: Callable[..., Any],
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    scalars: Mapping[str, Any],
    optional: Sequence[str],
) -> dict[str, Any]:
    own, title = parameters(function), f"cukern.{function.__name__}"
    arrays_of = [p for p in own if p.kind in ("array", "arrays")]
    shapes = _shapes(function, scalars, optional)
    names = _names([text for shape in shapes.values() for text in shape])
    known = sizes_of(function, scalars, optional)
    _refuse_others("--shape", sizes, known, f"a size of {title}")
    _refuse_others("--set", scalars, [p.name for p in own if p not in arrays_of], f"an argument of {title}")
    able = [p.name for p in arrays_of if p.is_left_out or not p.is_required]
    _refuse_others("--with", optional, able, f"an array that {title} can do without")
    _refuse_others("--dtype", [name for name in dtypes if name], list(shapes), f"an array of {title}")

    defaults = {**SIZES, **(_OF_LATENTS if {*_OF_LATENTS} <= {*known} else {}), **({} if "k" in names else {"k": 8})}
    required = [p.name for p in own if p.kind == "int" and p.is_required]
    full = {name: defaults.get(name, _ANOTHER) for name in [*names, *required]} | dict(sizes)
    arguments: dict[str, Any] = {}
    for p in own:
        if p.name in scalars:
            arguments[p.name] = scalars[p.name]
        elif p.name in shapes:
            dtype = _dtype(p, next(iter(shapes)), dtypes)
            at = {**full, "x": 16 // arrays.ITEM_SIZE[dtype]}
            array = _array(p.name, dtype, shapes[p.name], at)
            arguments[p.name] = [array] if p.kind == "arrays" else array
        elif p.kind == "int" and p.name in full:
            arguments[p.name] = full[p.name]
        elif p.is_required:
            arguments[p.name] = _value(p, title)
    return arguments


def _value(parameter: Parameter, title: str) -> Any:
    if "bool" in parameter.annotation:
        return True
    if "float" in parameter.annotation:
        return _A_FLOAT
    if parameter.annotation == "str" and (word := re.search(r'"(\w+)"', parameter.doc.text)):
        return word[1]
    if "None" in parameter.annotation or parameter.is_left_out:
        return None
    raise UserError(
        f"{title} takes {parameter.name} ({parameter.annotation}), which no shape in its docstring describes"
    )


def _refuse_others(option: str, given: Any, known: Any, what: str) -> None:
    for name in given:
        if name not in known:
            raise UserError(f"{option} must name {what} ({', '.join(known) or 'there is none'}), got {name!r}")


# --- the kernels of a function ----------------------------------------------------------------------------

#: Sizes where the launched kernels may change. `reached_by` also tries, as sizes, all integer template arguments of the
#: listed instances.
_SWEPT = (1, 16, 64, 1024, 4096, 8192, 65536)
_LOADS = (4, 8)  # elements per 16-byte vector; some template arguments count such vectors


def reached_by(name: str, listed: Collection[Instance], on: gpu.Gpu) -> set[Instance]:
    """Return the instances among `listed` that calls of a function may launch on a GPU.

    It changes one option or one size at a time, then each pair of the sizes that affect the result.
    """
    function = getattr(cukern, name)
    own = parameters(function)
    values = sorted({*_SWEPT, *(x for i in listed for x in i.arguments if type(x) is int and x > 0)})
    words = [(p.name, word) for p in own if p.annotation == "str" and p.name != "variant"
             for word in re.findall(r'"(\w+)"', p.doc.text)]  # fmt: skip
    flags = [(p.name, value) for p in own if p.annotation == "bool" for value in (False, True)]
    optional = [
        p.name for p in own if p.kind == "array" and (p.is_left_out or not p.is_required) and "out" not in p.name
    ]
    options: list[tuple[dict[str, Any], list[str]]] = [({}, []), *(({k: v}, []) for k, v in words + flags)]
    options += [({}, given) for given in [*([each] for each in optional), optional]]
    loads = sorted({x * n for x in values for n in _LOADS})

    ones = {p.name: 1 for p in own if p.kind == "int" and p.is_required}

    def at(dtype: str, option: tuple[dict[str, Any], list[str]], **sizes: int) -> frozenset[Instance]:
        # An integer argument, such as the number of groups, may be too large for these sizes. Then try again with 1 for
        # all integers.
        for given in (sizes, ones | sizes):
            with contextlib.suppress(*_REFUSALS, UserError):
                return launched(name, call_of(function, given, {"": dtype}, *option), on)
        return frozenset()

    found: set[Instance] = set()
    with progress(f"finding kernels of {name}", len(options)) as advance:
        for option in options:
            for dtype in _FLOATS:
                base = at(dtype, option)
                deciding = []
                for size in sizes_of(function, *option):
                    sets = [at(dtype, option, **{size: n}) for n in (*values, *loads)]
                    found.update(base, *sets)
                    if any(own - base for own in sets):
                        deciding.append(size)
                if option == options[0]:
                    for (first, second), a, b in itertools.product(itertools.combinations(deciding, 2), values, values):
                        found |= at(dtype, option, **{first: a, second: b})
            advance(1)
    return found & {*listed}


# --- the command ------------------------------------------------------------------------------------------


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, _, value = (part.strip() for part in text.partition("="))
        if not (name and value):
            raise UserError(f"{option} must be NAME=VALUE, got {text!r}")
        pairs[name] = value
    return pairs


def _sizes(given: Sequence[str]) -> dict[str, int]:
    pairs = _pairs("--shape", [text for each in given for text in each.split(",")])
    for name, value in pairs.items():
        if not value.isdecimal():
            raise UserError(f"--shape {name} must be an integer of at least 0, got {value!r}")
    return {name: int(value) for name, value in pairs.items()}


def _dtypes(given: Sequence[str]) -> dict[str, str]:
    """Return dtypes by array name. The key "" is for all other arrays."""
    dtypes = {"": _FLOATS[0]}
    for text in given:
        name, _, dtype = text.rpartition("=")
        if dtype not in arrays.ITEM_SIZE:
            raise UserError(f"--dtype must be one of {', '.join(arrays.ITEM_SIZE)}, got {dtype!r}")
        dtypes[name] = dtype
    return dtypes


def _literal(text: str) -> Any:
    """Parse a Python literal; return any other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _written(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else repr(value)


def functions() -> list[str]:
    public = {name: getattr(cukern, name) for name in cukern.__all__}
    rooms = ("cukern.ops.", "cukern.fused_moe")
    return [name for name, x in public.items() if inspect.isfunction(x) and x.__module__.startswith(rooms)]


def run(args: argparse.Namespace) -> int:
    if args.function not in functions():
        near = difflib.get_close_matches(args.function, functions()) or ["moe_fused_gate"]
        raise UserError(f"FUNCTION must be a function of cukern, such as {' or '.join(near)}, got {args.function!r}")
    function = getattr(cukern, args.function)
    arch = args.arch or (kernel.arch_of_device(0) if kernel.device_count() else "H200")
    try:
        gpu.of_arch(arch)
    except ValueError as error:
        raise UserError(f"--{error}") from None
    scalars = {name: _literal(value) for name, value in _pairs("--set", args.scalars).items()}
    arguments = call_of(function, _sizes(args.shape), _dtypes(args.dtype), scalars, args.optional)
    try:
        explanation = cukern.explain(function, **arguments, arch=arch)
    except _REFUSALS as error:
        raise UserError(str(error)) from None
    width = min(_WIDEST, shutil.get_terminal_size((WIDTH, 24)).columns)
    shown = ", ".join(f"{name}={_written(value)}" for name, value in arguments.items())
    print(textwrap.fill(f"{args.function}({shown})", width, subsequent_indent="    ", break_long_words=False))
    print(explanation.text(width))
    return 0
