"""Read, write and print the results of measurements.

A results file belongs to one GPU, or to several GPUs of one host, such as `h200-x2.json`. The top level describes the
latest run. `ops` describes, for each op, the run that measured it, which may be an older run. `rows` holds the figures:

    {"gpu", "driver", "cuda", "versions", "digest", "date", "ceilings",
     "ops": {op: {"driver", "cuda", "versions", "digest", "date", "ceilings"}},
     "rows": [{"op", "case", "variant", "us", "floor_us", "baselines": {name: us}, "host_us"}]}

A row may also have "parts": {name: us}, the GPU time of the parts of a call.

`op` is the public function, `case` an object of named sizes. `host_us` is null if it was not measured. The ceilings are
`kernel_us` (an empty kernel), `copy_tb_s`, and `matmul_tflop_s` (null if no op needs it). Files of several GPUs also
have `peer_tb_s` (stores into a peer's memory, per direction, in both directions at once) and `exchange_us` (a minimal
exchange).
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import platform
import re
import shutil
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.digest import digest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_ROW = ("op", "case", "variant", "us", "floor_us", "baselines", "host_us")
_RUN = ("driver", "cuda", "versions", "digest", "date", "ceilings")
#: The distributions that may provide each module.
_LIBRARIES = {
    "torch": ("torch",),
    "triton": ("triton",),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "sgl_kernel": ("sglang-kernel", "sgl-kernel"),
    "flashinfer": ("flashinfer-python",),
    "flash_mla": ("flash-mla", "flash_mla"),
    "deep_gemm": ("deep-gemm", "deep_gemm"),
    "triton_kernels": ("triton-kernels", "triton_kernels"),
    "transformers": ("transformers",),
    "sentence_transformers": ("sentence-transformers",),
}
#: Prefixes of the names of baselines that are not kernels of another library.
_COMPOSITIONS = ("torch", "Triton", "minimal exchange", "same rows on one GPU", "padding kept", "products alone")
#: Units of throughput. The product of the named sizes is the number of texts or tokens of a call.
_RATES = {"texts/s": ("texts",), "tokens/s": ("batch", "steps")}

Document = dict[str, Any]
Row = dict[str, Any]


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def machine() -> dict[str, Any]:
    """Return the GPU and the software: `gpu`, `driver`, `cuda` and `versions`."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    import cukern
    from cukern.runtime import compile

    driver = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True)
        driver = answer.stdout.split("\n")[0].strip() if answer.returncode == 0 else None
    versions = {
        "cukern": cukern.__version__, "python": platform.python_version(), "cupy": cupy.__version__,
        "nvrtc": compile.nvrtc_version(), "CUDA headers": compile.headers_version(),
    }  # fmt: skip
    versions |= {name: found for name in _LIBRARIES if (found := library_version(name)) is not None}
    return {
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "driver": driver,
        "cuda": "{}.{}".format(*nvrtc.getVersion()),
        "versions": versions,
    }


def of_several(machine: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Return `machine` for several of its GPUs: "NVIDIA H200" becomes "NVIDIA H200 x2"."""
    return machine if gpus == 1 else {**machine, "gpu": f"{machine['gpu']} x{gpus}"}


def library_version(name: str) -> str | None:
    """Return the version of a library from its metadata, else from its module; None if it is not installed."""
    for distribution in _LIBRARIES[name]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    try:
        return getattr(importlib.import_module(name), "__version__", None)
    except ImportError:
        return None


def document(machine: dict[str, Any], ceilings: dict[str, float | None], rows: Sequence[Row]) -> Document:
    """Return the results of one run."""
    top = {
        **machine,
        "digest": digest(ROOT / "cuda_src", ROOT / "cukern"),
        "date": now(),
        "ceilings": {name: None if value is None else round(value, 4) for name, value in ceilings.items()},
    }
    run = {name: top[name] for name in _RUN}
    return {**top, "ops": {row["op"]: run for row in rows}, "rows": list(rows)}


def merge(old: Document, new: Document) -> Document:
    """Return `new`, with the rows of `old` for ops that `new` has not measured."""
    kept = {op: run for op, run in old["ops"].items() if op not in new["ops"]}
    rows = [row for row in old["rows"] if row["op"] in kept]
    return {**new, "ops": {**kept, **new["ops"]}, "rows": rows + new["rows"]}


def file_name(gpu: str) -> str:
    """Return the name of the results file of a GPU: "NVIDIA H200" gives "h200.json"."""
    words = [word for word in gpu.lower().split() if word not in ("nvidia", "geforce", "tesla", "quadro")]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words)).strip("-") + ".json"


def load(path: Path) -> Document:
    """Read a results file.

    Raises ValueError if the file does not have the format.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or not {"gpu", *_RUN, "ops", "rows"} <= content.keys():
        raise ValueError(f"{path} has not the fields of a results file")
    for row in content["rows"]:
        if set(row) - {"parts"} != set(_ROW) or row["op"] not in content["ops"]:
            raise ValueError(f"{path} has a row that is not in the format: {row}")
    return content


def save(content: Document, path: Path) -> None:
    """Write a document with one line per row, so that a diff is readable."""
    rows = ",\n  ".join(json.dumps(row) for row in content["rows"])
    rest = json.dumps({name: value for name, value in content.items() if name != "rows"}, indent=1)
    path.write_text(f'{rest[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n')


def look_up(content: Document, op: str, variant: str | None = None, **sizes: int | str) -> Row:
    """Return the only row of `op` with these sizes, and with this variant if one is given.

    Raises LookupError if there is no such row, or several.
    """
    found = [
        row
        for row in content["rows"]
        if row["op"] == op
        and variant in (None, row["variant"])
        and all(row["case"].get(name) == value for name, value in sizes.items())
    ]
    if len(found) != 1:
        wanted = ", ".join([op, *([variant] if variant else []), *(f"{n}={v}" for n, v in sizes.items())])
        raise LookupError(f"{len(found)} rows of the results are of {wanted}, wanted one")
    return found[0]


# --- tables ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """Rows of an op that differ only in one size, `axis`, and in the variant."""

    op: str
    axis: str
    fixed: dict[str, int | str]
    rows: list[Row]

    @property
    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.fixed.items())

    @property
    def baselines(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row["baselines"]))

    @property
    def host(self) -> bool:
        return any(row["host_us"] is not None for row in self.rows)

    @property
    def rates(self) -> list[str]:
        return [name for name, sizes in _RATES.items() if all({*sizes} <= row["case"].keys() for row in self.rows)]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and cells. A cell is empty if the figure was not measured."""
        headings = [self.axis, "variant", "µs", "floor", "of floor", *self.rates, *self.baselines]
        headings += ["host µs"] if self.host else []
        lines = []
        for row in self.rows:
            line = [f"{row['case'].get(self.axis, '')}", row["variant"], figure(row["us"]), figure(row["floor_us"])]
            line.append(f"{row['floor_us'] / row['us']:.0%}")
            line += [figure(rate(row, name)) for name in self.rates]
            for name in self.baselines:
                us = row["baselines"].get(name)
                line.append("" if us is None else f"{figure(us)} ({_ratio(us, row)})")
            if self.host:
                line.append("" if row["host_us"] is None else figure(row["host_us"]))
            lines.append(line)
        return headings, lines


def rate(row: Row, name: str) -> float:
    """Return the throughput of a row, per second, in a unit of `_RATES`."""
    return math.prod(row["case"][size] for size in _RATES[name]) / row["us"] * 1e6


def figure(us: float) -> str:
    """Format a time or a throughput with three digits."""
    return f"{us:.2f}" if us < 9.995 else f"{us:.1f}" if us < 99.95 else f"{us:,.0f}"


def _ratio(us: float, row: Row) -> str:
    """Format a time as a multiple of the op's time: two decimals below 1.05, bold below 1."""
    ratio = us / row["us"]
    return f"{ratio:.1f}×" if ratio >= 1.05 else f"{ratio:.2f}×" if ratio >= 1 else f"**{ratio:.2f}×**"


@dataclass(frozen=True)
class Standing:
    """An op compared with the fastest other library in each case: that library's times as multiples of the op's."""

    op: str
    ratios: list[float]
    worst: Row
    against: str

    @property
    def cells(self) -> list[str]:
        worst = ", ".join(f"{name} {value}" for name, value in self.worst["case"].items())
        spread = [min(self.ratios), statistics.median(self.ratios), max(self.ratios)]
        behind = sum(ratio < 1 for ratio in self.ratios)
        figures = [f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}" for ratio in spread]
        return [self.op, f"{len(self.ratios)}", f"{behind}", *figures, f"{self.against}: {worst}"]


STANDING = ["op", "cases", "behind", "min", "median", "max", "worst case"]


def peers_of(row: Row) -> dict[str, float]:
    """Return the times of other libraries' kernels from the baselines of a row."""
    return {name: us for name, us in row["baselines"].items() if not name.startswith(_COMPOSITIONS)}


def standings(rows: Iterable[Row]) -> list[Standing]:
    """Return the standings of the ops that were measured beside another library."""
    by_op: dict[str, list[tuple[float, str, Row]]] = {}
    for row in rows:
        if peers := peers_of(row):
            best = min(peers, key=lambda name: peers[name])
            by_op.setdefault(row["op"], []).append((peers[best] / row["us"], best, row))
    found = []
    for op, of_op in by_op.items():
        _, against, worst = min(of_op, key=lambda entry: entry[0])
        found.append(Standing(op, [ratio for ratio, _, _ in of_op], worst, against))
    return found


def sections(rows: Iterable[Row]) -> list[Section]:
    """Group rows that differ only in one size, in their order. The axis is the size with the most values."""
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row["op"], []).append(row)
    result: list[Section] = []
    for op, members in by_op.items():
        values: dict[str, set[int]] = {}
        for row in members:
            for name, value in row["case"].items():
                if isinstance(value, int):
                    values.setdefault(name, set()).add(value)
        axis = max(values, key=lambda name: len(values[name]), default="")
        groups: dict[str, Section] = {}
        for row in members:
            fixed = {name: value for name, value in row["case"].items() if name != axis}
            groups.setdefault(json.dumps(fixed), Section(op, axis, fixed, [])).rows.append(row)
        result += groups.values()
    return result


def _limits(ceilings: dict[str, float | None]) -> str:
    limits = [f"empty kernel {ceilings['kernel_us']:.2f} µs", f"copy {ceilings['copy_tb_s']:.2f} TB/s"]
    if ceilings["matmul_tflop_s"]:
        limits.append(f"product {ceilings['matmul_tflop_s']:.0f} TFLOP/s")
    if ceilings.get("peer_tb_s"):
        limits.append(f"stores to a peer {1000 * ceilings['peer_tb_s']:.0f} GB/s each way")
        limits.append(f"minimal exchange {ceilings['exchange_us']:.2f} µs")
    return ", ".join(limits)


#: Headings of left-aligned columns.
_LEFT = ("variant", "op", "function", "best case", "worst case")


def print_tables(console: Console, content: Document) -> None:
    """Print the results on a terminal: a table per section, with times of baselines and their multiples of the op's."""
    console.print(f"{content['gpu']}: {_limits(content['ceilings'])}", highlight=False)
    found = standings(content["rows"])
    if found:
        console.print("\n[bold]beside the fastest other library[/]", highlight=False)
        _print_table(console, STANDING, [standing.cells for standing in found])
    for section in sections(content["rows"]):
        headings, lines = section.table()
        # A table's own title would wrap at the table's width.
        console.print(f"\n[bold]{section.op}[/]: {section.title}", highlight=False)
        _print_table(console, headings, lines)


def _print_table(console: Console, headings: list[str], lines: list[list[str]]) -> None:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="left" if heading in _LEFT else "right")
    for line in lines:
        table.add_row(*(cell.replace("**", "") for cell in line))  # Markdown's bold
    console.print(table)


# --- RESULTS.md -----------------------------------------------------------------------------------------

_SUMMARY = """\
Each function by its best and its worst case, which are those nearest to and farthest from the floor (what the hardware
allows); the share of the floor that is reached; and the time of the fastest other library as a multiple of cukern's, so
that above 1 cukern is faster. Medians, with the range over the cases in parentheses, and the library of the worst
ratio. Sizes that most cases of a function have are left out. Written by `python -m cukern bench --results` from
`results/*.json`.
"""

_METHOD = """\
A time is the GPU's, in microseconds per call: the median of replays of a CUDA graph of many calls, with inputs that
the L2 cache does not hold. The calls follow one another as in a model: on Hopper the launch of a kernel of cukern
overlaps the end of the one before it, which takes 0.65 us less than a launch by itself, and so do those of baselines
that ask for it. What was measured on 2026-11-22, and `Encoder`, is of launches that did not overlap yet. The floor is
what the hardware allows: the time of an empty kernel, or of the op's bytes at the bandwidth of a copy, or of its flops
at the rate of a large product, whichever is longest, all measured in the same run. In parentheses is how many times as
long a baseline takes as the op, in bold where it takes less long. Host time is that of an eager call.

Calls that no graph can hold, since they ask the GPU for something in between, are timed by the wall clock, from the
call to its result: decoding and the vectors of texts with all their baselines, and what is called eager. Decoding has
met its sizes before, so that its steps are replayed graphs.

A time of several GPUs is that of one call on each, which wait for one another: the mean over the GPUs, of graphs that
are replayed together. The floor is the time of the bytes that a GPU sends, at the bandwidth of a kernel that does
nothing but store into a peer's memory while the peer does the same; of a layer, on top of its rows on one GPU alone. A
minimal exchange is one store of 16 bytes to each peer, a flag behind it, and the wait for theirs.
"""

_BESIDE = """\
Each op beside the fastest kernel of another library in each case: how many times as long that takes (the least, the
median and the most over the cases), in how many cases the op is behind, and where it does worst.
"""


def introduction(contents: Sequence[Document], pictures: str, folder: Path | None = None) -> str:
    """Return the first part of the results in Markdown: a table of all functions, and one beside other libraries.

    `pictures` is the path from the page to `folder`, which holds the plots.
    """
    text = ["# Results\n", _SUMMARY]
    for content in contents:
        text.append(f"## {content['gpu']}\n")
        beside = Path(file_name(content["gpu"])).with_suffix(".png").name
        if ((folder or RESULTS) / beside).is_file():
            text.append(f"![Functions beside the fastest other library]({pictures}/{beside})\n")
        text.append(markdown(SUMMARY, summary(content["rows"])) + "\n")
    text += ["## How it is measured\n", _METHOD]
    for content in contents:
        found = standings(content["rows"])
        if found:
            text += [f"## {content['gpu']}: beside other libraries\n", _BESIDE]
            text.append(markdown(STANDING, [standing.cells for standing in found]) + "\n")
    return "\n".join(text)


def of_op(content: Document, op: str, pictures: str, folder: Path | None = None) -> list[str]:
    """Return all results of a function in Markdown: the run, the plots if there are any, and the tables."""
    text = [f"{_provenance(content['ops'][op])}\n"]
    rows = [row for row in content["rows"] if row["op"] == op]
    plot = plot_name(content, op)
    if ((folder or RESULTS) / plot).is_file():
        text.append(f"![{op}: times, floor and others]({pictures}/{plot})\n")
    parts = plot_name(content, f"{op}-parts")
    if ((folder or RESULTS) / parts).is_file():
        text.append(f"![{op}: the parts of a call beside its floor]({pictures}/{parts})\n")
    for section in sections(rows):
        text.append(f"{section.title}\n\n{markdown(*section.table())}\n")
    return text


def plot_name(content: Document, op: str) -> str:
    """Return the file name of a function's plot."""
    return f"{Path(file_name(content['gpu'])).stem}-{op}.png"


SUMMARY = ["function", "cases", "of the floor", "to the best peer", "best case", "worst case"]


def summary(rows: Iterable[Row]) -> list[list[str]]:
    """Return a table row for each function, from the first variant of each case.

    A row has the median and the range of two figures: the share of the floor, and the ratio to the fastest other
    library. It names the library of the worst ratio. It also has the cases with the largest and the smallest share of
    the floor, without the sizes that most cases have.
    """
    by_op: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_op.setdefault(row["op"], {}).setdefault(json.dumps(row["case"], sort_keys=True), row)
    lines = []
    for op, of in by_op.items():
        cases = sorted(of.values(), key=lambda row: row["floor_us"] / row["us"])
        shares = [row["floor_us"] / row["us"] for row in cases]
        found = standings(cases)
        ratios = found[0].ratios if found else []
        counts = Counter(size for row in cases for size in row["case"].items())
        usual = {size for size, count in counts.items() if len(cases) > 1 and 2 * count > len(cases)}
        best, worst = (f"{_sizes(row['case'], usual)}: {figure(row['us'])} µs" for row in (cases[-1], cases[0]))
        share, beside = (spread(values, form) for values, form in ((shares, ".0%"), (ratios, ".2f")))
        beside += f", {found[0].against}" if found else ""
        lines.append([op, f"{len(cases)}", share, beside, best, worst if len(cases) > 1 else ""])
    return lines


def _sizes(case: dict[str, Any], usual: set[tuple[str, Any]]) -> str:
    """Return the sizes of a case without the usual sizes, or its first size if all are usual."""
    told = [f"{name} {value}" for name, value in case.items() if (name, value) not in usual]
    return ", ".join(told or [f"{name} {value}" for name, value in case.items()][:1])


def spread(values: Sequence[float], form: str) -> str:
    """Format the median, and the range if there are several values."""
    if not values:
        return ""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


def _provenance(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    driver = f"driver {run['driver']}, " if run["driver"] else ""
    return (
        f"Measured {run['date'][:10]} on the sources with the digest `{run['digest']}`: {driver}CUDA {run['cuda']}, "
        f"{versions}; {_limits(run['ceilings'])}."
    )


def markdown(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---" if heading in _LEFT else "---:" for heading in headings]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *lines))
