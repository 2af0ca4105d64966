"""`cukern bench`: measure ops on GPUs. The benchmarks are only in the repository."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cukern.commands import UserError, console, writing
from cukern.runtime import kernel
from cukern.runtime.cuda import runtime
from cukern.runtime.progress import progress

_ROOT = Path(__file__).resolve().parents[2]
_REPLAYS, _QUICK_REPLAYS = 11, 3
_IMPORT = "import"
# Without this width, rich folds tables at 80 characters if there is no terminal.
_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="a family, such as moe_gate, a function or class of cukern, or import, for the import itself "
        "(default: all)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the results of this run to FILE; beside those of one GPU, those of several go to a file of "
        "their own, named with -several",
    )
    parser.add_argument(
        "--results",
        action="store_true",
        help="also keep them: in benchmarks/results, benchmarks/RESULTS.md and the plots",
    )
    parser.add_argument(
        "--plot",
        nargs="?",
        const=Path("."),
        type=Path,
        metavar="FOLDER",
        help="also draw the figures of this run, as the documentation shows them, into FOLDER (default: here)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few replays, and no baseline that takes seconds to compile"
    )
    parser.add_argument("--no-baselines", action="store_true", help="measure the ops alone")
    parser.add_argument(
        "--case",
        action="append",
        metavar="TEXT",
        help="only the cases that have TEXT in their line, as progress shows it",
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="stop baselines once the run has taken so long; the ops go on"
    )


def _functions_by_stem() -> dict[str, list[str]]:
    functions = {}
    for stem in sorted(path.stem.removeprefix("bench_") for path in (_ROOT / "benchmarks").glob("bench_*.py")):
        # A family is a module of `cukern.ops`, or a package that composes ops.
        names = (f"cukern.{room}{stem}" for room in ("ops.", "", "integrations."))
        name = next(name for name in names if importlib.util.find_spec(name) is not None)
        if name.startswith("cukern.integrations.") and importlib.util.find_spec(stem) is None:
            continue  # the integration's library is not installed
        module = importlib.import_module(name)
        functions[stem] = [name for name in module.__all__ if callable(getattr(module, name))]
    return {**functions, _IMPORT: [_IMPORT]}


def _chosen(wanted: Sequence[str], families: dict[str, list[str]]) -> dict[str, list[str]]:
    if not wanted:
        return families
    chosen: dict[str, list[str]] = {}
    for name in wanted:
        for stem, functions in families.items():
            if name == stem or name in functions:
                chosen.setdefault(stem, []).extend(functions if name == stem else [name])
                break
        else:
            raise UserError(f"OP must be one of {', '.join(families)} or a function or class of cukern, got {name!r}")
    return chosen


def _require(args: argparse.Namespace) -> None:
    """Raise UserError if there is no GPU, and for arguments that would fail only after the measurement."""
    if args.quick and args.results:
        raise UserError("--results keeps figures, and --quick takes them with too few replays for that")
    if args.results and (args.case or args.seconds is not None):
        raise UserError("--results keeps all cases of an op with their baselines, not those of --case or --seconds")
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.plot and not args.plot.is_dir():
        raise UserError(f"--plot {args.plot}: there is no such folder")
    if not kernel.device_count():
        raise UserError("there is no NVIDIA GPU here to measure on (`cukern doctor` says why)")
    for module, extra in (("torch", "torch"), *([("matplotlib", "bench")] if args.results or args.plot else [])):
        if importlib.util.find_spec(module) is None:
            raise UserError(f'{module} is needed and not installed: pip install "cukern[{extra}]"')
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"PyTorch {torch.__version__} cannot use the GPU; install its build for your driver")


def run(args: argparse.Namespace) -> int:
    if not (_ROOT / "benchmarks" / "harness.py").is_file():
        raise UserError("the benchmarks are in the repository, not in the installed package: run this in a clone of it")
    begin = time.monotonic()
    families = _functions_by_stem()
    chosen = _chosen(args.ops, families)
    _require(args)

    # Another package may have a folder `benchmarks`, so the folder of this clone goes first.
    sys.path.insert(0, str(_ROOT))
    report: Any = importlib.import_module("benchmarks.report")
    # The import of cukern is slower while the GPU is in use, so it is timed first.
    of_import = importlib.import_module("benchmarks.start_up").rows() if chosen.pop(_IMPORT, None) else []
    cases = []
    for stem, functions in chosen.items():
        of_stem = importlib.import_module(f"benchmarks.bench_{stem}").cases()
        measured = {case.op for case in of_stem}
        for function in set(functions) & set(args.ops) - measured:
            raise UserError(f"{function} has no case in benchmarks/bench_{stem}.py, which measures {sorted(measured)}")
        cases += [case for case in of_stem if case.op in functions]
    if args.case:
        cases = [case for case in cases if any(text in str(case) for text in args.case)]
        if not cases:
            raise UserError(f"--case: no case has {' or '.join(map(repr, args.case))} in its line")

    documents = []
    problems: list[str] = []
    failed: list[str] = []
    for gpus in sorted({case.gpus for case in cases} | ({1} if of_import else set())):
        own = [case for case in cases if case.gpus == gpus]
        if lacking := _lacking(gpus):
            ops = ", ".join(dict.fromkeys(case.op for case in own))
            print(f"{ops}: {len(own)} cases are not measured, since {lacking}", file=sys.stderr)
            continue
        ceilings, rows = _measured(own, gpus, args, begin, problems, failed)
        machine = report.of_several(report.machine(), gpus)
        documents.append(report.document(machine, ceilings, [*rows, *(of_import if gpus == 1 else [])]))
    for content in documents:
        report.print_tables(console(width=None if sys.stdout.isatty() else _WIDTH), content)
    for line in problems + failed:
        print(line, file=sys.stderr)
    if args.json:
        for content, path in zip(documents, _paths(args.json, len(documents)), strict=True):
            with writing(path) as temporary:
                report.save(content, temporary)
    if args.plot:
        plots: Any = importlib.import_module("benchmarks.plots")
        for path in [path for content in documents for path in plots.draw_all(content, args.plot)]:
            print(f"wrote {os.path.relpath(path)}")
    if args.results and failed:
        print("the results are not kept, since an op failed", file=sys.stderr)
    elif args.results:
        publish: Any = importlib.import_module("benchmarks.publish")
        written = [path for content in documents for path in publish.write(content)]
        for path in dict.fromkeys(written):
            print(f"wrote {os.path.relpath(path)}")
    return 1 if failed else 0


def _lacking(gpus: int) -> str | None:
    count = kernel.device_count()
    if gpus > count:
        return f"they take {gpus} GPUs, and there {'is' if count == 1 else 'are'} {count}"
    for device, peer in itertools.combinations(range(gpus), 2):
        if not runtime.deviceCanAccessPeer(device, peer):
            return f"CUDA devices {device} and {peer} cannot map each other's memory"
    return None


def _paths(path: Path, count: int) -> list[Path]:
    return [path, path.with_stem(f"{path.stem}-several")][:count]


def _measured(
    cases: Sequence[Any], gpus: int, args: argparse.Namespace, begin: float, problems: list[str], failed: list[str]
) -> tuple[dict[str, Any], list[Any]]:
    """Measure cases. Return the GPU's measured limits (ceilings) and the result rows.

    Add errors of baselines to `problems`, and errors of ops to `failed`.
    """
    harness: Any = importlib.import_module("benchmarks.harness")
    options: dict[str, Any] = {"baselines": not args.no_baselines, "slow": not args.quick}
    if args.seconds is not None and gpus == 1:
        options["until"] = begin + args.seconds
    replays = _QUICK_REPLAYS if args.quick else _REPLAYS
    if gpus == 1:
        clock, measure = harness.Timer(replays), harness.measure
    else:
        several: Any = importlib.import_module("benchmarks.several")
        clock, measure = several.Clock(replays, gpus), several.measure
    rows = {}
    # Baselines with torch.compile start threads that slow the host, so cases with host times come first.
    order = sorted(range(len(cases)), key=lambda i: (not cases[i].host, cases[i].has_baselines))
    with progress("measuring", len(cases)) as advance:
        advance(0, "ceilings")
        ceilings = clock.ceilings(matrix=gpus == 1 and any(case.flops for case in cases))
        for i in order:
            case = cases[i]
            advance(0, str(case))
            try:
                measurement = measure(case, clock, ceilings, **options)
            except Exception as error:
                failed.append(f"{case}: {type(error).__name__}: {error}")
            else:
                rows[i] = measurement.row
                problems += measurement.problems
            advance(1, str(case))
    return asdict(ceilings), [rows[i] for i in sorted(rows)]
