"""The support matrix: what each function takes on which architecture, tried on its plan, and what is proved on a GPU.

A plan says without a GPU whether a call can be launched on an architecture (`cukern.explain`). So the calls of the
tests are tried with each dtype and with strided rows; the GPU record says on which GPU a family's tests have passed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import cukern
from tests.calls import CALLS, NO_OPS, WITH_STATE, Call

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
ARCHS = ("80", "90a", "100a", "120a")
_GPUS = {"NVIDIA H200": "90a", "NVIDIA H100 80GB HBM3": "90a", "NVIDIA A100-SXM4-80GB": "80"}
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

_INTRODUCTION = """\
# What is supported where

Three things are said of each function: a **twin** in NumPy defines it, and runs for NumPy arrays and CPU tensors on any
machine; **compiled** is an architecture for which the tests compile its kernels, without register spills in the
specialized ones, and for which its plan takes the small call of `tests/calls.py`; **proved** is one on whose GPU its
tests have passed, under `compute-sanitizer` too. This page is made from the plans and from `tests/gpu_record.json`.

"""


def page() -> str:
    """The page, in Markdown."""
    record = json.loads(RECORD.read_text())
    text = [_INTRODUCTION, "## Functions by architecture, dtype and layout\n", _NOTE]
    names = sorted({call.name for call in CALLS.values()} | WITH_STATE)
    heads = ["function", "twin", *(f"sm_{arch}" for arch in ARCHS), "dtypes", "strided rows"]
    text.append(_table(heads, [_row(name, record) for name in names]))
    text.append("\n## GPU record\n")
    heads = ["family", "GPU", "passed", "failed", "skipped", "sanitizer", "date"]
    lines = []
    for stem, of in record["stems"].items():
        found = of["sanitizer"]
        clean = "clean" if not any(found.values()) else ", ".join(f"{tool} {n}" for tool, n in found.items() if n)
        gpus = of["gpu"] if of["gpus"] == 1 else f"{of['gpus']} of {of['gpu']}"
        lines.append([stem, gpus, *(str(of[x]) for x in ("passed", "failed", "skipped")), clean, of["date"][:10]])
    text.append(_table(heads, lines))
    return "\n".join(text) + "\n"


_NOTE = """\
The dtypes are those that the first floating-point array that is read may have, as far as one call of the tests shows:
FP8, int8 and 4-bit arguments are in the functions' own pages. So are the other arrays that may be strided: the column
is of that first array. `swap_blocks` launches no kernel, and the exchange between GPUs has states of its own beside
arrays, so that its dtypes are not tried. The caches of `paged_attention` have a layout for each dtype; it takes float16
and bfloat16 too.
"""


def _table(heads: list[str], lines: Iterable[list[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _stem(name: str) -> str:
    parts = getattr(cukern, name).__module__.split(".")
    return parts[2] if parts[1] == "ops" else parts[1]


def _row(name: str, record: dict[str, Any]) -> list[str]:
    calls = [call for call in CALLS.values() if call.name == name and name not in NO_OPS]
    proved = record["stems"].get(_stem(name), {})
    passed = bool(proved) and not proved["failed"] and not any(proved["sanitizer"].values())
    cells = [f"{{py:func}}`~cukern.{name}`", "yes"]
    for arch in ARCHS:
        if passed and _GPUS.get(proved["gpu"]) == arch:
            cells.append("**proved**")
        elif not calls or any(_can(call, arch) for call in calls):
            cells.append("compiled")
        else:
            cells.append("-")
    dtypes = [text for dtype, text in _DTYPES.items() if any(_takes(call, dtype) for call in calls)]
    strided = any(_is_strided(call) and _can(_strided(call)) for call in calls)
    return [*cells, ", ".join(dtypes) or "-", "yes" if strided else "-"]


def _can(call: Call, arch: str = "90a") -> bool:
    """Whether a plan takes the call there."""
    try:
        cukern.explain(call.function, *call.args, arch=arch, **call.options)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def _floats(call: Call) -> list[torch.Tensor]:
    """The floating-point arrays, those first that are only read."""
    found: list[tuple[bool, torch.Tensor]] = []
    for name, value in call.given.items():
        flat = value if isinstance(value, (list, tuple)) else [value]
        found += [(name in call.written, x) for x in flat if isinstance(x, torch.Tensor) and x.dtype in _DTYPES]
    return [x for _, x in sorted(found, key=lambda one: one[0])]


def _takes(call: Call, dtype: torch.dtype) -> bool:
    """Whether the first floating-point array may have a dtype, with some or all of the others of it."""
    found = _floats(call)
    if not found:
        return False
    first, *others = found
    with_it = [x for x in others if x.dtype == first.dtype]
    for count in range(len(with_it), -1, -1):
        for chosen in itertools.combinations(with_it, count):
            cast = {id(x) for x in (first, *chosen)}
            if _can(_mapped(call, lambda x, cast=cast: x.to(dtype) if id(x) in cast else x)):
                return True
    return False


def _is_strided(call: Call) -> bool:
    found = _floats(call)
    return bool(found) and found[0].dim() >= 2


def _strided(call: Call) -> Call:
    """The call with space behind each row of its first floating-point array."""
    first = _floats(call)[0]
    wide = torch.zeros(*first.shape[:-1], first.shape[-1] + 64, dtype=first.dtype)
    wide[..., : first.shape[-1]] = first
    return _mapped(call, lambda x: wide[..., : first.shape[-1]] if x is first else x)


def _mapped(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The call with each of its tensors changed."""

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(of(x) for x in value)
        return change(value) if isinstance(value, torch.Tensor) else value

    options = {name: of(value) for name, value in call.options.items()}
    return call._replace(args=tuple(of(x) for x in call.args), options=options)
