"""What the notebooks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "h200.json"


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
