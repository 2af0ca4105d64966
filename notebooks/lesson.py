"""What the notebooks share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"

T = TypeVar("T")


def read(name: str) -> list[str]:
    """The lines of a file, whose name is that in the checkout."""
    return (ROOT / name).read_text().splitlines()


def the_one(found: list[T], wanted: str, name: str = "the file") -> T:
    """The only entry of a list of what matches `wanted` in the file `name`; `LookupError` if it has none or more."""
    if len(found) != 1:
        raise LookupError(f"{len(found)} places in {name} match {wanted!r}, wanted one")
    return found[0]


def print_lines(lines: list[str], start: int, stop: int) -> None:
    """Print the lines from `start`, of which the first is 0, up to `stop`, each with its number in the file."""
    print("\n".join(f"{i + 1:4}  {lines[i]}" for i in range(start, stop)).rstrip())


@dataclass(frozen=True)
class Lesson:
    """What a notebook prints of the sources and says of them: those of one kernel's file, unless it names another.

    Names of files are those in the checkout. What is looked for has to be in one place, else it is a `LookupError`.
    """

    kernel: str
    # The kernel is shown section by section, so its definition up to the first of them.
    in_sections: bool = False
    # Functions of Python are shown with the blank lines after them.
    with_gaps: bool = False

    def definition(self, text: str, name: str | None = None) -> None:
        """Print the definition whose first line, which is not indented, has `text`, in the kernel's file or `name`.

        With it comes what is above it without a gap: its comment, its decorators, the header of its template.
        """
        name = name or self.kernel
        lines = read(name)
        starts = [i for i, line in enumerate(lines) if text in line and not line.startswith((" ", "//", "#"))]
        start = first = the_one(starts, text, name)
        headings = _headings(lines)
        # The second line of a template's header is indented as far as its first parameter.
        above = ("//", "template", " " * len("template <"), "__", "@")
        while lines[start - 1].startswith(above) and start - 1 not in headings:
            start -= 1
        stop = _end(lines, first, headings if self.in_sections else {})
        while lines[first].startswith("def ") and not self.with_gaps and not lines[stop - 1]:
            stop -= 1
        print_lines(lines, start, stop)

    def section(self, heading: str) -> None:
        """Print the part of the kernel under the `// --- heading ---` that starts so.

        It goes on to the next heading, to the bracket that ends the function, or to the end of the file. Of a heading
        that is not indented it is the comment.
        """
        lines = read(self.kernel)
        headings = _headings(lines)
        starts = [i for i, text in headings.items() if text.startswith(heading)]
        start = the_one(starts, f"// --- {heading}", self.kernel)
        if lines[start].startswith("//"):
            stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("//"))
        else:
            ends = (i for i in range(start + 1, len(lines) - 1) if i in headings or lines[i] == "}")
            stop = next(ends, len(lines))
        print_lines(lines, start, stop)

    def rely_on(self, *snippets: str, name: str | None = None) -> None:
        """Fail if the kernel's file, or `name`, no longer has these lines, on which what follows in the notebook rests.

        How they are broken and indented makes no difference.
        """
        name = name or self.kernel
        text = " ".join(" ".join(read(name)).split())
        for snippet in snippets:
            if snippet not in text:
                raise LookupError(f"{name} no longer has {snippet!r}")


def _headings(lines: list[str]) -> dict[int, str]:
    """Line index and text of each `// --- heading ---`."""
    found = {i: re.match(r"\s*// ---+ (.*?)[ -]*$", line) for i, line in enumerate(lines)}
    return {i: match[1] for i, match in found.items() if match}


def _end(lines: list[str], first: int, headings: dict[int, str]) -> int:
    """The index after the last line of the definition that begins with line `first`.

    That is its closing bracket in the first column, or what is before a heading; of a Python function, what is before
    the next line that is not indented.
    """
    if lines[first].startswith("def "):
        return next(i for i in range(first + 1, len(lines)) if lines[i] and not lines[i].startswith((" ", ")")))
    if lines[first].endswith(("}", ";")):
        return first + 1
    return next(i + 1 for i in range(first, len(lines)) if lines[i] in ("}", "};", "]", ")") or i + 1 in headings)


def beside(*ops: str, most: int = 24) -> None:
    """Print and draw how long the kernels of other libraries take, of the results kept of one run on an H200.

    At most so many cases are shown, and among them those in which an op does worst.
    """
    content = json.loads(RESULTS.read_text())
    rows = [row for row in content["rows"] if row["op"] in ops and report.peers_of(row)]
    dates = sorted({content["ops"][op]["date"][:10] for op in ops if op in content["ops"]})
    rows.sort(key=_best_ratio)
    behind = sum(_best_ratio(row) < 1 for row in rows)
    print(
        f"{content['gpu']}, {' and '.join(dates)}: {len(rows)} cases, in {behind} of them another library is faster\n"
    )
    print(f"{'us':>9}  {'ratio':>5}  {'fastest other library':32} case")
    for row in rows[:most]:
        peers = report.peers_of(row)
        best = min(peers, key=peers.__getitem__)
        named = f"{best} {peers[best]:.2f}"
        print(f"{row['us']:9.2f}  {_best_ratio(row):5.2f}  {named:32} {_words(row)}")
    if len(rows) > most:
        print(f"and {len(rows) - most} more, in which the ratio is {_best_ratio(rows[most]):.2f} or more")
    _draw(rows[:most], dict.fromkeys(name for row in rows[:most] for name in report.peers_of(row)))


def _best_ratio(row: dict[str, Any]) -> float:
    return min(report.peers_of(row).values()) / row["us"]


def _words(row: dict[str, Any]) -> str:
    """An op and its sizes, without those that say that nothing is special."""
    usual = {"ragged": "false", "causal": "false", "topk": 0, "query_tokens": 1, "layout": "vllm", "page_size": 64}
    sizes = [f"{name} {value}" for name, value in row["case"].items() if usual.get(name) != value]
    return f"{row['op']} {' '.join(sizes)}"


def _draw(rows: list[dict[str, Any]], names: dict[str, None]) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    _, ax = plt.subplots(figsize=(11, 1.3 + 0.26 * len(rows)), layout="constrained")
    ax.axvline(1, color="0.2", linewidth=1)
    largest = smallest = 1.0
    for i, name in enumerate(names):
        found = [(report.peers_of(row).get(name), y, row["us"]) for y, row in enumerate(rows)]
        points = [(us / own, y) for us, y, own in found if us is not None]
        ax.plot(*zip(*points, strict=True), "o^svDPX*h<>d"[i % 12], color=f"C{i}", markersize=6, label=name)
        largest, smallest = max(largest, *(x for x, _ in points)), min(smallest, *(x for x, _ in points))
    ax.axvspan(smallest / 1.15, 1, color="C3", alpha=0.07)
    ax.set_xscale("log")
    ax.set_xlim(smallest / 1.15, largest * 1.15)
    ax.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.set_yticks(range(len(rows)), [_words(row) for row in rows], fontsize=7)
    ax.set_xlabel("time of another library's kernel by the time of cukern's; shaded: the other one is faster")
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    plt.show()
