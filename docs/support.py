"""Generate the support matrix: the dtypes and strides that each function takes on each architecture, and the proofs.

The calls of the tests are explained (`cukern.explain`) with each dtype and with strided rows, without a GPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import cukern
from tests import gpu_record
from tests.spec import Call
from tests.specs import CALLS, FUNCTIONS, STEM_OF

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
ARCHS = ("80", "90a", "100a", "120a")
_GPUS = {"NVIDIA H200": "90a", "NVIDIA H100 80GB HBM3": "90a", "NVIDIA A100-SXM4-80GB": "80"}
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_PROVED, _PROVED_BEFORE, _COMPILED, _NO = "●", "◐", "○", "–"


def tables(titles: dict[str, str]) -> str:
    """Return the tables of `support.md`. `titles` maps stems to titles, in the page's order."""
    record = json.loads(RECORD.read_text())
    fresh = {stem: not gpu_record.unproved(stem, of) for stem, of in record["stems"].items()}
    text: list[str] = []
    by_stem: dict[str, list[str]] = {}
    for name in sorted(FUNCTIONS):
        by_stem.setdefault(STEM_OF[name], []).append(name)
    heads = ["function", "dtype", *(f"sm_{arch}" for arch in ARCHS), "strided rows"]
    for stem, names in sorted(by_stem.items(), key=lambda item: [*titles].index(item[0])):
        rows = [row for name in names for row in _rows(name, record["stems"].get(stem, {}), fresh.get(stem, False))]
        text.append(f"\n## [{titles[stem]}](families/{stem}.md)\n\n{_table(heads, rows)}")
    text.append("\n## GPU record\n")
    heads = ["family", "GPU", "passed", "failed", "skipped", "sanitizer", "sources", "date"]
    lines = []
    for stem, of in record["stems"].items():
        found = of["sanitizer"]
        clean = "clean" if not any(found.values()) else ", ".join(f"{tool} {n}" for tool, n in found.items() if n)
        gpus = of["gpu"] if of["gpus"] == 1 else f"{of['gpus']} of {of['gpu']}"
        counts = (str(of[x]) for x in ("passed", "failed", "skipped"))
        lines.append([stem, gpus, *counts, clean, "these" if fresh[stem] else "earlier", of["date"][:10]])
    text.append(_table(heads, lines))
    return "\n".join(text) + "\n"


def _table(heads: list[str], lines: Iterable[list[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _rows(name: str, proved: dict[str, Any], is_fresh: bool) -> list[list[str]]:
    """Return one row for each group of dtypes with the same marks."""
    calls = [call for call in CALLS.values() if call.name == name]
    passed = bool(proved) and not proved["failed"] and not any(proved["sanitizer"].values())

    def mark(arch: str, can: bool) -> str:
        if not can:
            return _NO
        if passed and _GPUS.get(proved["gpu"]) == arch:
            return _PROVED if is_fresh else _PROVED_BEFORE
        return _COMPILED

    found: dict[tuple[str, ...], list[str]] = {}
    for dtype, text in _DTYPES.items():
        marks = tuple(mark(arch, any(_takes(call, dtype, arch) for call in calls)) for arch in ARCHS)
        found.setdefault(marks, []).append(text)
    found.pop((_NO,) * len(ARCHS), None)
    if not found:
        own = tuple(mark(arch, not calls or any(_can(call, arch) for call in calls)) for arch in ARCHS)
        found = {own: []}
    strided = any(_is_strided(call) and _can(_strided(call)) for call in calls)
    function = f"{{py:func}}`~cukern.{name}`"
    return [[function, ", ".join(dtypes) or _NO, *marks, "yes" if strided else _NO] for marks, dtypes in found.items()]


def _can(call: Call, arch: str = "90a") -> bool:
    try:
        cukern.explain(call.function, *call.args, arch=arch, **call.options)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def _floats(call: Call) -> list[torch.Tensor]:
    """Return the floating-point arrays. The arrays that are only read come first."""
    found: list[tuple[bool, torch.Tensor]] = []
    for name, value in call.given.items():
        flat = value if isinstance(value, (list, tuple)) else [value]
        found += [(name in call.written, x) for x in flat if isinstance(x, torch.Tensor) and x.dtype in _DTYPES]
    return [x for _, x in sorted(found, key=lambda one: one[0])]


def _takes(call: Call, dtype: torch.dtype, arch: str) -> bool:
    """Return whether the first floating-point array takes a dtype, alone or with other arrays of its dtype."""
    found = _floats(call)
    if not found:
        return False
    first, *others = found
    with_it = [x for x in others if x.dtype == first.dtype]
    for count in range(len(with_it), -1, -1):
        for chosen in itertools.combinations(with_it, count):
            cast = {id(x) for x in (first, *chosen)}
            if _can(_mapped(call, lambda x, cast=cast: x.to(dtype) if id(x) in cast else x), arch):
                return True
    return False


def _is_strided(call: Call) -> bool:
    found = _floats(call)
    return bool(found) and found[0].dim() >= 2


def _strided(call: Call) -> Call:
    """Return the call with a strided first floating-point array."""
    first = _floats(call)[0]
    wide = torch.zeros(*first.shape[:-1], first.shape[-1] + 64, dtype=first.dtype)
    wide[..., : first.shape[-1]] = first
    return _mapped(call, lambda x: wide[..., : first.shape[-1]] if x is first else x)


def _mapped(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(of(x) for x in value)
        return change(value) if isinstance(value, torch.Tensor) else value

    options = {name: of(value) for name, value in call.options.items()}
    return call._replace(args=tuple(of(x) for x in call.args), options=options)
