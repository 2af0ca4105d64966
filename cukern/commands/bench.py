"""`cukern bench`: measure the ops on this GPU. The benchmarks themselves are in the repository only."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cukern.commands import UserError
from cukern.runtime import kernel

_ROOT = Path(__file__).resolve().parents[2]
_REPLAYS, _QUICK_REPLAYS = 11, 3
_IMPORT = "import"
# Without a terminal, rich would fold the tables at 80 characters.
_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="a family, such as moe_gate, a function of cukern, or import, for the import itself (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results of this run to FILE")
    parser.add_argument(
        "--results",
        action="store_true",
        help="also keep them: in benchmarks/results, benchmarks/RESULTS.md and the plots",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few replays, and no baseline that takes seconds to compile"
    )
    parser.add_argument("--no-baselines", action="store_true", help="measure the ops alone")


def _functions_by_stem() -> dict[str, list[str]]:
    """The public functions of each family that has a bench file."""
    functions = {}
    for stem in sorted(path.stem.removeprefix("bench_") for path in (_ROOT / "benchmarks").glob("bench_*.py")):
        # A composition of ops is a package beside `cukern.ops`.
        is_op = importlib.util.find_spec(f"cukern.ops.{stem}") is not None
        module = importlib.import_module(f"cukern.ops.{stem}" if is_op else f"cukern.{stem}")
        functions[stem] = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    return {**functions, _IMPORT: [_IMPORT]}


def _chosen(wanted: Sequence[str], families: dict[str, list[str]]) -> dict[str, list[str]]:
    """The functions asked for, by family."""
    if not wanted:
        return families
    chosen: dict[str, list[str]] = {}
    for name in wanted:
        for stem, functions in families.items():
            if name == stem or name in functions:
                chosen.setdefault(stem, []).extend(functions if name == stem else [name])
                break
        else:
            raise UserError(f"OP must be one of {', '.join(families)} or a function of cukern, got {name!r}")
    return chosen


def _require(args: argparse.Namespace) -> None:
    """Raises UserError where there is no GPU to measure on, and for arguments that would fail only after measuring."""
    if args.quick and args.results:
        raise UserError("--results keeps figures, and --quick takes them with too few replays for that")
    if args.json and not args.json.parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {args.json.parent}")
    if not kernel.device_count():
        raise UserError("there is no NVIDIA GPU here to measure on (`cukern doctor` says why)")
    for module, extra in (("torch", "torch"), *([("matplotlib", "bench")] if args.results else [])):
        if importlib.util.find_spec(module) is None:
            raise UserError(f'{module} is needed and not installed: pip install "cukern[{extra}]"')
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"PyTorch {torch.__version__} cannot use the GPU; install its build for your driver")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the files asked for; 1 if an op failed."""
    if not (_ROOT / "benchmarks" / "harness.py").is_file():
        raise UserError("the benchmarks are in the repository, not in the installed package: run this in a clone of it")
    families = _functions_by_stem()
    chosen = _chosen(args.ops, families)
    _require(args)

    # First on the path, on which another package may have a folder `benchmarks`.
    sys.path.insert(0, str(_ROOT))
    harness: Any = importlib.import_module("benchmarks.harness")
    report: Any = importlib.import_module("benchmarks.report")
    # First, because a GPU in use would slow the import.
    of_import = importlib.import_module("benchmarks.start_up").rows() if chosen.pop(_IMPORT, None) else []
    cases = []
    for stem, functions in chosen.items():
        of_stem = importlib.import_module(f"benchmarks.bench_{stem}").cases()
        measured = {case.op for case in of_stem}
        for function in set(functions) & set(args.ops) - measured:
            raise UserError(f"{function} has no case in benchmarks/bench_{stem}.py, which measures {sorted(measured)}")
        cases += [case for case in of_stem if case.op in functions]

    timer = harness.Timer(_QUICK_REPLAYS if args.quick else _REPLAYS)
    rows, problems, failed = {}, [], []
    # Cases with host times come first: torch.compile, for a baseline, starts threads and processes that slow the host.
    order = sorted(range(len(cases)), key=lambda i: (not cases[i].host, bool(cases[i].baselines or cases[i].peers)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("ceilings", total=len(cases))
        ceilings = timer.ceilings(matrix=any(case.flops for case in cases))
        for i in order:
            case = cases[i]
            progress.update(task, description=str(case))
            try:
                measurement = harness.measure(
                    case, timer, ceilings, baselines=not args.no_baselines, slow=not args.quick
                )
            except Exception as error:
                failed.append(f"{case}: {type(error).__name__}: {error}")
            else:
                rows[i] = measurement.row
                problems += measurement.problems
            progress.advance(task)

    content = report.document(report.machine(), asdict(ceilings), [*(rows[i] for i in sorted(rows)), *of_import])
    report.print_tables(Console(width=None if sys.stdout.isatty() else _WIDTH), content)
    for line in problems + failed:
        print(line, file=sys.stderr)
    if args.json:
        report.save(content, args.json)
    if args.results and failed:
        print("the results are not kept, since an op failed", file=sys.stderr)
    elif args.results:
        for path in report.write(content):
            print(f"wrote {os.path.relpath(path)}")
    return 1 if failed else 0
