"""Generate the end of each family's page for `make pages`: signatures, measured speed and the notebook."""

from __future__ import annotations

import enum
import inspect
import textwrap
from typing import Any

import nbformat

from benchmarks import report
from docs import pages
from tests.specs import SPECS

_MARK = "<!-- `make pages` writes the rest of this page. -->"


def with_sections(text: str, stem: str) -> str:
    module = pages.family_module(stem)
    table = pages.FIRST_CELL.findall(text)
    names = sorted(pages.public_of(module), key=lambda name: table.index(name) if name in table else len(table))
    signatures = [_signature(module, name) for name in names if not _is_enum(getattr(module, name))]
    parts = [text.partition(_MARK)[0].rstrip(), "", _MARK, "", "## Signatures", "", "```text", *signatures, "```", ""]
    for path in sorted(report.RESULTS.glob("*.json"), key=lambda path: path.stem):
        content = report.load(path)
        if lines := report.summary(row for row in content["rows"] if row["op"] in names):
            dates = sorted({content["ops"][line[0]]["date"][:10] for line in lines})
            parts += [f"## Speed on {content['gpu'].removeprefix('NVIDIA ')}", ""]
            anchor = lines[0][0].lower()
            said = f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {_COLUMNS.format(anchor)}"
            parts += [textwrap.fill(said, 124, break_long_words=False, break_on_hyphens=False), ""]
            parts += [report.markdown(report.SUMMARY, lines), ""]
            if peers := _beside_peers(content, names):
                parts += [_PEERS, ""]
                parts += [report.markdown(["function", "library", "cases", "its time / cukern's"], peers), ""]
    notebooks = [f"[{notebook_title(name)}](../../notebooks/{name}.ipynb)" for name in SPECS[stem].notebooks or [stem]]
    return "\n".join([*parts, "## Notebook", "", *notebooks, ""])


_COLUMNS = (
    "The table gives the median and the range over the cases. The floor is the least time for the bytes and flops of a "
    "case. The peer is the fastest other library. [Results](../../benchmarks/RESULTS.md#{}) has all cases."
)
_PEERS = "Time of every other library divided by the time of cukern (above 1: cukern is faster), median and range:"


def notebook_title(name: str) -> str:
    first = nbformat.read(pages.ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells[0].source
    return first.split("\n\n")[0].removeprefix("# ").strip()


def _beside_peers(content: report.Document, names: list[str]) -> list[list[str]]:
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in content["rows"]:
        if row["op"] in names:
            for peer, us in report.peers_of(row).items():
                ratios.setdefault((row["op"], peer), []).append(us / row["us"])
    return [[op, peer, f"{len(found)}", report.spread(found, ".2f")] for (op, peer), found in ratios.items()]


def _is_enum(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, enum.Enum)


class _Named(str):
    """The text that a signature shows for a long default value: its type."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(module: Any, name: str) -> str:
    of = inspect.signature(getattr(module, name))
    short = [
        x.replace(default=_Named(f"{type(x.default).__name__}()")) if len(repr(x.default)) > 40 else x
        for x in of.parameters.values()
    ]
    bare = of.replace(
        parameters=[x.replace(annotation=inspect.Parameter.empty) for x in short],
        return_annotation=inspect.Signature.empty,
    )
    line = f"{pages.public_name(module, name)}{bare}"
    return textwrap.fill(line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
