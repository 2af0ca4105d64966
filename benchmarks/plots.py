"""Plot results: the times of each function by size and by case, and all functions beside the other libraries."""

from __future__ import annotations

import importlib.util
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import (
    ROOT,
    Document,
    Row,
    Section,
    figure,
    file_name,
    peers_of,
    plot_name,
    sections,
)

#: Color and marker of each library in every plot. Other names take the unused combinations in order.
_LOOKS = {
    "vLLM": ("C0", "s"), "vLLM Triton": ("C9", "s"), "vLLM Marlin": ("C4", "s"), "vLLM CUTLASS": ("C6", "s"),
    "SGLang": ("C2", "^"), "SGLang Triton": ("C8", "^"), "SGLang CUTLASS": ("olive", "^"),
    "FlashInfer": ("C1", "D"), "FlashMLA": ("C5", "v"), "FlashAttention-3": ("C1", "v"), "DeepGEMM": ("C5", "D"),
    "torch": ("0.45", "x"), "torch.compile": ("0.6", "+"), "Triton": ("0.3", "1"),
}  # fmt: skip
_OURS = "crimson"
#: Rows of functions that belong to no family are models of transformers.
_INTEGRATION = "transformers"
_LEFT_OVER = [(color, marker) for marker in "Ph*X8" for color in ("C0", "C1", "C2", "C4", "C5", "C9")]
#: A section with at least this many sizes is drawn as lines. The cases of other sections are drawn as dots.
_LINE = 3
_COLUMNS = 2
_DPI = 96
#: Leaves out the version of matplotlib, so that a file changes only if the figures change.
_SAVE: dict[str, Any] = {"dpi": _DPI, "metadata": {"Software": None}}


def draw(shown: Sequence[Section], path: Path) -> bool:
    """Draw a function's times beside the floor and the others. Return False if there is nothing to compare.

    A section with three or more sizes gets a panel: time against size. All other cases share a last panel with one line
    per case. If a case has several variants, the first is drawn, which a call chooses by itself.
    """
    from matplotlib.figure import Figure

    lines = [s for s in shown if len({row["case"].get(s.axis) for row in s.rows}) >= _LINE]
    cases = [row for s in shown if s not in lines for row in _first(s.rows)]
    if len(cases) < 2 and not (cases and cases[0]["baselines"]):
        cases = []
    if not lines and not cases:
        return False
    every = [row for s in lines for row in _first(s.rows)] + cases
    looks = _looks(row["baselines"] for row in every)
    common, usual = _common(every), _usual(cases)
    columns = min(_COLUMNS, len(lines)) or 1
    rows = -(-len(lines) // columns)
    labels = [_label(row, common | usual) for row in cases]
    lengths = [0.6 + 0.7 * label.count("\n") for label in labels]
    heights = [3.2] * rows + ([0.9 + 0.4 * sum(lengths)] if cases else [])
    canvas = Figure(figsize=(9, 0.9 + sum(heights)), layout="constrained")
    top = canvas.subfigures(1, 2, width_ratios=(8, 2.3))
    grid = top[0].add_gridspec(len(heights), columns, height_ratios=heights)
    handles: dict[str, Any] = {}
    for i, section in enumerate(lines):
        panel = top[0].add_subplot(grid[i // columns, i % columns])
        _draw_lines(panel, section, looks, handles)
        panel.set_title("\n".join(textwrap.wrap(_words(section.fixed, common), 34)), fontsize=9)
    if cases:
        _draw_cases(top[0].add_subplot(grid[rows, :]), cases, labels, looks, handles)
    words = _words(common, {})
    if cases and usual.keys() - common.keys():
        of = "other cases" if lines else "all cases"
        words += f"{'; ' if words else ''}{of} with {_words(usual, common)}, unless said"
    words = "\n".join(textwrap.wrap(words, 72))
    top[0].suptitle(f"{every[0]['op']}\n{words}" if words else every[0]["op"], fontsize=11)
    order = ["cukern", *(name for name in looks if name in handles), "floor"]
    top[1].legend([handles[n] for n in order], order, loc="center left", frameon=False, fontsize=9)
    canvas.savefig(path, **_SAVE)
    return True


def draw_all(content: Document, folder: Path) -> list[Path]:
    """Draw a results file or a run into a folder: each function, and all functions beside the other libraries."""
    stem = Path(file_name(content["gpu"])).stem
    written = []
    if draw_standings(content, folder / f"{stem}.png"):
        written.append(folder / f"{stem}.png")
    for op in content["ops"]:
        path = folder / plot_name(content, op)
        if draw(sections(row for row in content["rows"] if row["op"] == op), path):
            written.append(path)
        path = folder / plot_name(content, f"{op}-parts")
        if draw_parts([row for row in content["rows"] if row["op"] == op], path):
            written.append(path)
    return written


def draw_parts(rows: Sequence[Row], path: Path) -> bool:
    """Draw the share of each part of a call, and the floor. Return False if no row has parts."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.get("parts")]
    if not shown:
        return False
    totals: Counter[str] = Counter()
    for row in shown:
        for name, us in row["parts"].items():
            totals[name] += us / row["us"]
    canvas = Figure(figsize=(10.5, 1.8 + 0.75 * len(shown)), layout="constrained")
    panel = canvas.subplots()
    for y, row in enumerate(shown):
        left = 0.0
        for i, name in enumerate(name for name, _ in totals.most_common()):
            share = 100 * row["parts"].get(name, 0.0) / row["us"]
            panel.barh(y, share, left=left, height=0.6, color=f"C{i % 10}", label=name if y == 0 else None)
            if share >= 4:
                panel.text(left + share / 2, y, f"{share:.0f}", ha="center", va="center", fontsize=8.5, color="white")
            left += share
        panel.plot([100 * row["floor_us"] / row["us"]] * 2, [y - 0.38, y + 0.38], color="black", linewidth=2)
    labels = [f"{_words(dict(row['case']), {})}\n{figure(row['us'])} µs" for row in shown]
    panel.set_yticks(range(len(shown)), ["\n".join(textwrap.wrap(x, 44)) for x in labels], fontsize=8.5)
    panel.set(ylim=(len(shown) - 0.5, -0.6), xlim=(0, None))
    panel.set_xlabel("% of the time; the black line is the floor")
    panel.set_title(f"{shown[0]['op']}: the parts of a call", fontsize=11)
    canvas.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    canvas.savefig(path, **_SAVE)
    return True


def draw_standings(content: Document, path: Path) -> bool:
    """Draw each family beside the fastest other library in each case. Return False if there is no other library.

    A dot is the first variant of a case. Only rows of the newest measured release of cukern are drawn. A family without
    another library is compared with the fastest composition of torch functions, in another color. The README names the
    families and gives their order.
    """
    from matplotlib.figure import Figure

    runs = content["ops"]
    current = content["versions"]["cukern"]
    rows = [row for row in content["rows"] if runs[row["op"]]["versions"]["cukern"] == current]
    rows = [row for op in dict.fromkeys(x["op"] for x in rows) for row in _first(x for x in rows if x["op"] == op)]
    peers, alone = _ratios(rows, peers_of), _ratios(rows, lambda row: row["baselines"])
    if not peers:
        return False
    titles = _titles()
    order = [*titles, *sorted({*alone} - {*titles})]
    shown = {stem: peers.get(stem) or alone[stem] for stem in order if stem in alone}
    canvas = Figure(figsize=(8, 1.6 + 0.25 * len(shown)), layout="constrained")
    panel = canvas.subplots()
    panel.axvspan(1e-3, 1, color="0.95", zorder=0)
    panel.axvline(1, color="0.3", linewidth=1)
    for y, (stem, ratios) in enumerate(shown.items()):
        color = _OURS if stem in peers else "0.45"
        panel.plot(ratios, [y] * len(ratios), "o", color=color, alpha=0.3, markersize=6, mew=0)
        panel.plot([statistics.median(ratios)], [y], "|", color="black", markersize=14, mew=2)
    low, high = (pick(ratio for of in shown.values() for ratio in of) for pick in (min, max))
    panel.set(xscale="log", xlim=(low / 1.1, high * 1.1), ylim=(len(shown) - 0.4, -0.6))
    panel.set_yticks(range(len(shown)), [titles.get(stem, stem) for stem in shown], fontsize=10)
    ticks = [x for x in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if low / 1.1 <= x <= high * 1.1]
    _fix(panel.xaxis, ticks, lambda x, _: f"{x:g}×")
    panel.grid(axis="x", alpha=0.3)
    dates = sorted(runs[row["op"]]["date"][:10] for row in rows)
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    panel.set_title(f"Time of the fastest other library / time of cukern\n{content['gpu']}, {when}", fontsize=11)
    words = "right of 1: cukern is faster\na dot is a case, a bar the median of the family"
    panel.set_xlabel(words + ("; gray: beside torch alone" if {*shown} - {*peers} else ""))
    canvas.savefig(path, **_SAVE)
    return True


def _ratios(rows: Iterable[Row], others: Callable[[Row], dict[str, float]]) -> dict[str, list[float]]:
    """Return, by family and case, the time of the fastest of `others` divided by cukern's time."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if times := others(row):
            found.setdefault(_family(row["op"]), []).append(min(times.values()) / row["us"])
    return found


def _titles() -> dict[str, str]:
    """Return the names of the families by stem, in the order of the README."""
    links = re.findall(r"\[([^]]+)\]\(docs/families/(\w+)\.md\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    return {stem: title for title, stem in links} | {_INTEGRATION: "transformers models"}


def _family(op: str) -> str:
    """Return the stem of the family that has a function or class."""
    for path in sorted((ROOT / "benchmarks").glob("bench_*.py")):
        stem = path.stem.removeprefix("bench_")
        for room in ("cukern.ops", "cukern"):
            if importlib.util.find_spec(f"{room}.{stem}") and op in importlib.import_module(f"{room}.{stem}").__all__:
                return stem
    return _INTEGRATION


def _first(rows: Iterable[Row]) -> list[Row]:
    """Return the first variant of each case."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(repr(sorted(row["case"].items(), key=str)), row)
    return [*found.values()]


def _looks(baselines: Iterable[dict[str, float]]) -> dict[str, tuple[str, str]]:
    """Return the color and marker of each baseline, other libraries first."""
    names = dict.fromkeys(name for of in baselines for name in of)
    free = iter(_LEFT_OVER * 3)
    ordered = sorted(names, key=lambda name: not peers_of({"baselines": {name: 0.0}}))
    return {name: _LOOKS.get(name) or next(free) for name in ordered}


def _common(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the sizes that all cases share."""
    first = rows[0]["case"]
    return {name: value for name, value in first.items() if all(row["case"].get(name) == value for row in rows)}


def _usual(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the values that more than half of the cases have."""
    counts = Counter(item for row in rows for item in row["case"].items())
    return {name: value for (name, value), count in counts.items() if 2 * count > len(rows)}


def _label(row: Row, left_out: dict[str, Any]) -> str:
    """Return the unusual sizes of a case, and cukern's time."""
    sizes = {name: value for name, value in row["case"].items() if left_out.get(name) != value}
    return "\n".join(textwrap.wrap(f"{_words(sizes, {})}: {figure(row['us'])} µs".removeprefix(": "), 44))


def _words(sizes: dict[str, Any], common: dict[str, Any]) -> str:
    # Keep a name and its value on one line.
    return ", ".join(f"{name}\u00a0{value}" for name, value in sizes.items() if name not in common)


def _draw_lines(panel: Any, section: Section, looks: dict[str, tuple[str, str]], handles: dict[str, Any]) -> None:
    """Draw time against the size on the axis."""
    rows = sorted(_first(section.rows), key=lambda row: row["case"][section.axis])
    x = [row["case"][section.axis] for row in rows]
    for name, (color, marker) in looks.items():
        points = [(a, row["baselines"][name]) for a, row in zip(x, rows, strict=True) if name in row["baselines"]]
        if points:
            style = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1, "alpha": 0.9}
            handles[name] = panel.plot(*zip(*points, strict=True), **style)[0]
    floor = [row["floor_us"] for row in rows]
    handles["floor"] = panel.plot(x, floor, color="black", linestyle=":", linewidth=1.5)[0]
    times = [row["us"] for row in rows]
    handles["cukern"] = panel.plot(x, times, color=_OURS, marker="o", markersize=6, linewidth=2.5, zorder=3)[0]
    panel.set(xscale="log", yscale="log", xlabel=section.axis, ylabel="µs per call")
    _round(panel.yaxis, panel.get_ylim())
    _fix(panel.xaxis, _apart(x), lambda value, _: f"{value / 1024:g}k" if value % 1024 == 0 else f"{value:,.0f}")
    panel.grid(alpha=0.3)


def _draw_cases(
    panel: Any, cases: Sequence[Row], labels: Sequence[str], looks: dict[str, tuple[str, str]], handles: dict[str, Any]
) -> None:
    """Draw one line for each case, with all times on it as multiples of the floor, so that close times stay distinct.

    The markers of other libraries are small and lie on cukern's circle, so that equal times are visible.
    """
    y = range(len(cases))
    floor = panel.axvline(1, color="black", linestyle=":", linewidth=1.5)
    handles.setdefault("floor", floor)
    ours = panel.plot([row["us"] / row["floor_us"] for row in cases], y, "o", color=_OURS, markersize=10, alpha=0.85)[0]
    handles.setdefault("cukern", ours)
    for place, (name, (color, marker)) in enumerate(looks.items()):
        # Place markers above and below the line, so that both of two equal times are visible.
        up = 0.16 * (1, -1, 0)[place % 3]
        of = [(r["baselines"][name] / r["floor_us"], i - up) for i, r in enumerate(cases) if name in r["baselines"]]
        if of:
            style = {"color": color, "marker": marker, "markersize": 6, "linestyle": "none", "zorder": 4}
            handles.setdefault(name, panel.plot(*zip(*of, strict=True), **style)[0])
    panel.set(xscale="log", xlabel="time / floor", ylim=(len(cases) - 0.4, -0.6))
    panel.set_yticks(y, labels, fontsize=9)
    _round(panel.xaxis, panel.get_xlim())
    panel.grid(alpha=0.3)


def _apart(x: Sequence[float]) -> list[float]:
    """Return the sizes whose labels do not overlap on a logarithmic axis."""
    least = (x[-1] / x[0]) ** 0.1
    kept = [x[0]]
    kept += [value for i, value in enumerate(x[1:], 1) if value >= least * x[i - 1] or i == len(x) - 1]
    return kept


def _round(axis: Any, limits: tuple[float, float]) -> None:
    """Place ticks at 1, 2 and 5, at more numbers on a short axis, or only at powers of ten on a long axis."""
    span = limits[1] / limits[0]
    steps = (1, 1.2, 1.5, 2, 3, 5, 7) if span < 8 else (1, 2, 5) if span < 200 else (1, 3) if span < 2000 else (1,)
    ticks = [step * 10.0**power for power in range(-3, 9) for step in steps]
    inside = [tick for tick in ticks if limits[0] <= tick <= limits[1]]
    _fix(axis, inside or ticks, lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")


def _fix(axis: Any, ticks: Sequence[float], words: Callable[[float, int], str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(words))
