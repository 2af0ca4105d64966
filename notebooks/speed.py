"""Measure times for the notebooks, and print and draw them beside their floor and other kernels."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from benchmarks import report
from benchmarks.kernels import kernels_of as kernels_of  # for the notebooks

_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
RESULTS = _FOLDER / "h200.json"

Row = dict[str, Any]

#: Default sizes, which the name of a case omits.
_USUAL = {"ragged": "false", "causal": "false", "topk": 0, "query_tokens": 1, "layout": "vllm", "page_size": 64}
_USUAL |= {"decodes": 0, "window": 0, "softcap": 0, "sinks": "false"}
_USUAL_VARIANTS = ("auto", "specialized", "vector")
_STYLES = {"cukern": "C0o-", "torch": "C3v-", "torch.compile": "C4^-", "floor": "k--"}
_OTHER_STYLES = ("C1s-", "C2D-", "C5P-", "C6X-", "C7*-", "C8h-")


# --- axes ---------------------------------------------------------------------------------------------


def round_ticks(ax: Axes, *which: str, at: Iterable[float] | None = None) -> None:
    """Make the axes "x" or "y" logarithmic. The ticks are plain numbers: 1, 2, 5, 10, 20 ..., or those in `at`."""
    for name in which:
        axis = getattr(ax, f"{name}axis")
        getattr(ax, f"set_{name}scale")("log")
        low, high = sorted(getattr(ax, f"get_{name}lim")())
        if at is None:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 2, 5) if math.log10(high / low) < 2.6 else (1,) if math.log10(high / low) > 5 else (1, 3)
            ticks = [step * 10.0**decade for decade in decades for step in steps]
        else:
            ticks = list(at)
        axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def curves(
    ax: Axes,
    lines: Mapping[str, Mapping[float, float]],
    *,
    xlabel: str,
    title: str = "",
    ylabel: str = "microseconds per call",
    at: Iterable[float] | None = None,
) -> None:
    """Draw lines, mappings from a size to a time, on logarithmic axes with round ticks.

    `at`: the ticks of the size axis. By default these are the sizes themselves, if there are at most 9.
    """
    others = iter(_OTHER_STYLES)
    for name, line in lines.items():
        if line:
            ax.plot(list(line), list(line.values()), _STYLES.get(name) or next(others), markersize=4, label=name)
    sizes = sorted({size for line in lines.values() for size in line})
    round_ticks(ax, "y")
    round_ticks(ax, "x", at=at if at is not None else sizes if len(sizes) <= 9 else None)
    ax.set(xlabel=xlabel, ylabel=ylabel, title=title)
    ax.grid(which="major", alpha=0.3)
    ax.legend(frameon=False)


# --- times of this run --------------------------------------------------------------------------------


class Clock:
    """Time cases of the benchmarks, and compare them with their floor and their baselines.

    `is_here` says whether there is a GPU and PyTorch. Without them the clock prints a note and measures nothing.
    """

    def __init__(self, on_gpu: bool, *, matrix: bool = False) -> None:
        try:
            import torch
        except ImportError:
            self.is_here = False
        else:
            self.is_here = on_gpu and torch.cuda.is_available()
        if not self.is_here:
            print("Nothing was timed: that takes a GPU and PyTorch, and a time of the twin says nothing of the kernel.")
            return
        from benchmarks import harness

        self.timer = harness.Timer(replays=7)
        self.ceilings = self.timer.ceilings(matrix=matrix)
        print(
            f"an empty kernel takes {self.ceilings.kernel_us:.2f} us, a copy moves {self.ceilings.copy_tb_s:.2f} TB/s"
        )
        if matrix:
            print(f"a large product of matrices in bfloat16 makes {self.ceilings.matmul_tflop_s:.0f} TFLOP/s")

    def row(self, case: Any, baselines: Sequence[str] = ("torch",), peers: Sequence[str] = ()) -> Row:
        """Measure a case with these baselines and peers, and return its row in the format of the stored results."""
        from benchmarks import harness

        case = dataclasses.replace(
            case,
            baselines={name: case.baselines[name] for name in baselines if name in case.baselines},
            peers={name: case.peers[name] for name in peers if name in case.peers},
            host=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile's advice
            measured = harness.measure(case, self.timer, self.ceilings)
        print(*measured.problems, sep="\n", end="\n" * len(measured.problems))
        return measured.row

    def rows(
        self,
        cases: Iterable[Any],
        baselines: Sequence[str] = ("torch",),
        peers: Sequence[str] = (),
        name_of: Callable[[Row], str] | None = None,
    ) -> list[Row]:
        """Measure several cases, print them as a table, and return their rows. Without a GPU return an empty list."""
        if not self.is_here:
            return []
        rows = [self.row(case, baselines, peers) for case in cases]
        print_rows(rows, name_of or words)
        return rows


def print_rows(rows: Sequence[Row], name_of: Callable[[Row], str] | None = None) -> None:
    """Print a table of rows: time, floor, share of the floor, and the time of each baseline."""
    named = [(name_of or words)(row) for row in rows]
    wide = max(map(len, named), default=0)
    others = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    heads = "".join(f" {name:>{max(9, len(name))}}" for name in others)
    print(f"\n{'microseconds':{wide}} {'us':>8} {'floor':>8} {'share':>6}{heads}")
    for name, row in zip(named, rows, strict=True):
        cells = (row["baselines"].get(other) for other in others)
        told = "".join(
            f" {'' if us is None else report.figure(us):>{max(9, len(other))}}"
            for us, other in zip(cells, others, strict=True)
        )
        share = f"{row['floor_us'] / row['us']:.0%}"
        print(f"{name:{wide}} {report.figure(row['us']):>8} {report.figure(row['floor_us']):>8} {share:>6}{told}")


def bars(rows: Sequence[Row], name_of: Callable[[Row], str] | None = None) -> None:
    """Draw the times of rows as bars, beside their floors and their baselines."""
    if not rows:
        print("There are no times to plot.")
        return
    others = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    names = ["cukern", *others]
    height = 0.8 / len(names)
    _, ax = plt.subplots(figsize=(11, 0.9 + (0.13 + 0.11 * len(names)) * len(rows)), layout="constrained")
    for i, name in enumerate(names):
        found = [(y, row["us"] if i == 0 else row["baselines"].get(name)) for y, row in enumerate(rows)]
        places = [(y + (i - len(others) / 2) * height, us) for y, us in found if us is not None]
        color = _STYLES.get(name, _OTHER_STYLES[i % len(_OTHER_STYLES)])[:2]
        ax.barh(*zip(*places, strict=True), height=height, color=color, label=name)
    y = [place - len(others) / 2 * height for place in range(len(rows))]
    ax.scatter([row["floor_us"] for row in rows], y, marker="|", s=90, color="0", zorder=3, label="floor")
    ax.set_xlim(min(row["floor_us"] for row in rows) / 1.6)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    round_ticks(ax, "x")
    ax.set(xlabel="microseconds per call")
    ax.set_yticks(range(len(rows)), [(name_of or words)(row) for row in rows], fontsize=7)
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    plt.show()


# --- kept results -------------------------------------------------------------------------------------


@functools.cache
def _variants(op: str) -> set[str]:
    """Return the variants of an op in the stored results."""
    return {row["variant"] for row in json.loads(RESULTS.read_text())["rows"] if row["op"] == op}


def words(row: Row) -> str:
    """Return the op and the sizes of a row, without default sizes; add the variant if it is not the default."""
    usual = _USUAL | {"cache_dtype": row["case"].get("dtype")}
    sizes = [f"{name} {value}" for name, value in row["case"].items() if usual.get(name) != value]
    is_special = row["variant"] not in _USUAL_VARIANTS and len(_variants(row["op"])) > 1
    return " ".join([row["op"], *sizes, *([row["variant"]] if is_special else [])])


def kept(*ops: str, gpus: int = 1) -> tuple[str, list[Row]]:
    """Return a description (GPU and days of measurement) and the rows of these ops from the stored results.

    `gpus`: the number of GPUs that were used together. Without results for this number, both are empty.
    """
    path = RESULTS if gpus == 1 else _FOLDER / f"h200-x{gpus}.json"
    if gpus > 1 and not path.exists():
        return "", []
    content = json.loads(path.read_text())
    rows = [row for row in content["rows"] if row["op"] in ops]
    days = sorted({content["ops"][op]["date"][:10] for op in ops if op in content["ops"]})
    return f"{content['gpu']}, {' and '.join(days)}", rows


def roofline(*ops: str, most: int = 20) -> None:
    """Print and draw the stored times of ops, their floors, and the fastest baseline.

    The floor is the longer of two times: the time of the bytes at the speed of a copy, and the time of the products at
    the speed of a large matrix product. Both speeds were measured in the same run. At most `most` cases are printed,
    the cases farthest from their floor first. All cases are drawn.
    """
    where, rows = kept(*ops)
    if not rows:
        print(f"No results of {', '.join(ops)} are kept.")
        return
    rows.sort(key=_share)
    print(f"{where}: {len(rows)} cases\n")
    print(f"{'us':>9} {'floor':>9} {'share':>6}  {'fastest other':32} {'ratio':>5}  case")
    for row in rows[:most]:
        told, ratio = _fastest(row)
        figures = f"{report.figure(row['us']):>9} {report.figure(row['floor_us']):>9} {_share(row):6.0%}"
        print(f"{figures}  {told:32} {ratio:>5}  {words(row)}")
    if len(rows) > most:
        print(f"and {len(rows) - most} more, which reach {_share(rows[most]):.0%} or more of their floor")
    _draw_roofline(rows, [op for op in ops if any(row["op"] == op for row in rows)])


def _share(row: Row) -> float:
    return row["floor_us"] / row["us"]


def _fastest(row: Row) -> tuple[str, str]:
    """Return the fastest baseline with its time, and its time divided by ours; empty strings without a baseline."""
    if not row["baselines"]:
        return "", ""
    best = min(row["baselines"], key=row["baselines"].__getitem__)
    return f"{best} {report.figure(row['baselines'][best])}", f"{row['baselines'][best] / row['us']:.2f}"


def _draw_roofline(rows: list[Row], ops: Sequence[str]) -> None:
    _, ax = plt.subplots(figsize=(9, 4.4), layout="constrained")
    for row in rows:
        if row["baselines"]:
            best = row["floor_us"] / min(row["baselines"].values())
            ax.plot([row["floor_us"]] * 2, [_share(row), best], color="0.85", linewidth=0.9, zorder=1)
            ax.plot(row["floor_us"], best, "_", color="0.35", markersize=8, zorder=2)
    for i, op in enumerate(ops):
        points = [(row["floor_us"], _share(row)) for row in rows if row["op"] == op]
        ax.plot(*zip(*points, strict=True), "os^DvPX*h"[i // 10 % 9], color=f"C{i % 10}", markersize=5, label=op)
    ax.plot([], [], "_", color="0.35", label="fastest other")
    ax.axhline(1, color="0", linewidth=0.9)
    low, high = (limit(row["floor_us"] for row in rows) for limit in (min, max))
    ax.set_xlim(low / 1.5, high * 1.5)
    round_ticks(ax, "x")
    ax.set_ylim(0, 1.1)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set(xlabel="floor, microseconds", ylabel="floor by time", title="The share of the floor that is reached")
    ax.grid(which="major", alpha=0.3)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    plt.show()


def beside(*ops: str, most: int = 24) -> None:
    """Print and draw the stored times of other libraries' kernels, measured in one run on an H200.

    At most `most` cases are shown: the cases with the lowest ratio of the other library's time to ours.
    """
    where, rows = kept(*ops)
    rows = sorted((row for row in rows if report.peers_of(row)), key=_best_ratio)
    if not rows:
        print(f"No results of {', '.join(ops)} beside other libraries are kept.")
        return
    behind = sum(_best_ratio(row) < 1 for row in rows)
    print(f"{where}: {len(rows)} cases, in {behind} of them another library is faster\n")
    print(f"{'us':>9}  {'ratio':>5}  {'fastest other library':32} case")
    for row in rows[:most]:
        peers = report.peers_of(row)
        best = min(peers, key=peers.__getitem__)
        named = f"{best} {peers[best]:.2f}"
        print(f"{row['us']:9.2f}  {_best_ratio(row):5.2f}  {named:32} {words(row)}")
    if len(rows) > most:
        print(f"and {len(rows) - most} more, in which the ratio is {_best_ratio(rows[most]):.2f} or more")
    _draw_ratios(rows[:most], dict.fromkeys(name for row in rows[:most] for name in report.peers_of(row)))


def _best_ratio(row: Row) -> float:
    return min(report.peers_of(row).values()) / row["us"]


def _draw_ratios(rows: list[Row], names: Mapping[str, None]) -> None:
    wide = max(11, 6.5 + 0.055 * max(len(words(row)) for row in rows))
    _, ax = plt.subplots(figsize=(wide, 1.3 + 0.26 * len(rows)), layout="constrained")
    ax.axvline(1, color="0.2", linewidth=1)
    largest = smallest = 1.0
    for i, name in enumerate(names):
        found = [(report.peers_of(row).get(name), y, row["us"]) for y, row in enumerate(rows)]
        points = [(us / own, y) for us, y, own in found if us is not None]
        ax.plot(*zip(*points, strict=True), "o^svDPX*h<>d"[i % 12], color=f"C{i}", markersize=6, label=name)
        largest, smallest = max(largest, *(x for x, _ in points)), min(smallest, *(x for x, _ in points))
    ax.axvspan(smallest / 1.15, 1, color="C3", alpha=0.07)
    ax.set_xlim(smallest / 1.15, largest * 1.15)
    near_one = [0.75, 0.9, 1, 1.1, 1.25] if largest < 7 * smallest else [1]
    round_ticks(ax, "x", at=[0.25, 0.5, *near_one, 1.5, 2, 3, 5, 10, 20, 50])
    ax.set_yticks(range(len(rows)), [words(row) for row in rows], fontsize=7)
    ax.set_xlabel("time of another library's kernel by the time of cukern's; shaded: the other one is faster")
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    plt.show()
