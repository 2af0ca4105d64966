"""`cukern compile`: fill the cache of compiled kernels before they are needed.

By default it compiles the instances that `import cukern` compiles. `--for` adds the instances that an engine launches
to serve a model (`cukern.commands.serving`). `--all` adds every listed instance, and what `--for` adds for every known
model.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
from typing import Any

from cukern.commands import UserError, console, refusal, require_nvrtc, resources
from cukern.commands.models_of import KINDS, NAMED, models_of
from cukern.runtime import compile, gpu, kernel
from cukern.runtime.compile import Instance
from cukern.runtime.progress import progress

_ANOTHER = "set CUKERN_CACHE_DIR to a folder of yours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH[,ARCH...]",
        help="what to compile for, such as 80,90a,100a,120a, or a card: H200 (default: the GPUs of this machine)",
    )
    parser.add_argument(
        "--op",
        action="append",
        metavar="OP",
        help=f"a family ({', '.join(kernel.KERNELS)}), or a function of cukern for the kernels that its calls reach; "
        "may be repeated (default: all families)",
    )
    parser.add_argument(
        "--for",
        action="append",
        dest="models",
        metavar="MODEL",
        help=f"also the kernels that serving a model reaches: {', '.join(NAMED)}, or a directory with its config.json; "
        "may be repeated",
    )
    parser.add_argument(
        "--specialize",
        action="append",
        metavar="OP,SIZE=N,...",
        help="also the kernels of cukern.specialize, such as topk_softmax,experts=60; may be repeated",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="the kernels of the import, all specialized ones, and what --for compiles for every named model",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile nothing: count the kernels that the cache has; exit status 0 when all are there, 1 when some are "
        "missing",
    )
    parser.epilog = "\n".join(
        [
            "Without --for and --all, the kernels of the import are compiled, and all others at their first use.",
            "The names of --for stand for these checkpoints:",
            *(f"  {name}: {' and '.join(own)}" for name, own in NAMED.items()),
            "--for covers 1 to 16384 tokens and sequences, samples of the length of the context,",
            "and 1, 2, 4 and 8 GPUs, in the dtype and the quantization of the configuration.",
            "--for covers no exchange between GPUs, beam search, penalties, other page sizes,",
            "and FP8 caches of keys and values.",
            f"config.json has one of these values of model_type: {', '.join(KINDS)}.",
            "The cache is CUKERN_CACHE_DIR, or the user's cache folder. For a container image:",
            "  CUKERN_CACHE_DIR=/opt/cukern cukern compile --arch 80,90a --for qwen3-moe",
        ]
    )


def _archs(given: list[str] | None) -> list[str]:
    if not given:
        found = sorted({kernel.arch_of_device(d) for d in range(kernel.device_count())})
        if not found:
            raise UserError("there is no GPU here to compile for: name one with --arch, such as --arch 80,90a")
        return found
    archs: dict[str, None] = {}
    for text in ",".join(given).split(","):
        try:
            gpu.refuse_old(text)
        except ValueError as error:
            raise UserError(f"--{error}") from None
        card = gpu.CARDS.get(text.strip().upper().removeprefix("NVIDIA "))
        match = re.fullmatch(r"(?:sm_)?(\d{2,3})(a?)", card.arch if card else text.strip())
        if not match:
            wanted = "like 80, 90a or sm_100a, or a card such as H200, L40S or A100"
            raise UserError(f"--arch must be {wanted}, got {text.strip()!r}")
        number, suffix = int(match[1]), match[2]
        # Compile targets from "90" on need the suffix "a" for architecture-specific instructions.
        archs[f"{number}{suffix}" if suffix else compile.arch_of(divmod(number, 10))] = None
    for arch in archs:
        if reason := refusal(arch):
            raise UserError(f"--arch: NVRTC {compile.nvrtc_version()} cannot compile for sm_{arch} ({reason})")
    return list(archs)


def _stems(given: list[str] | None) -> dict[str, list[str]]:
    """Return, for each family to compile, the functions whose kernels are compiled (empty: all functions)."""
    stems: dict[str, list[str]] = {}
    wholes = set()
    for op in given or kernel.KERNELS:
        function = getattr(sys.modules["cukern"], op, None)
        module = getattr(function, "__module__", "")
        stem = module.split(".")[2] if module.startswith("cukern.ops.") else op
        if stem not in kernel.KERNELS:
            raise UserError(f"--op must be one of {', '.join(kernel.KERNELS)} or a function of cukern, got {op!r}")
        stems.setdefault(stem, []).append(op)
        if op == stem or not inspect.isfunction(function):
            wholes.add(stem)
    return {stem: [] if stem in wholes else list(dict.fromkeys(ops)) for stem, ops in stems.items()}


def _stem_of(instance: Instance) -> str:
    return instance.file.partition("/")[0]


def _wanted(args: argparse.Namespace, arch: str) -> list[Instance]:
    """Return the instances to compile for an architecture. Those of `import cukern` come first."""
    from cukern.commands.serving import instances_of

    found = list(kernel.instances())
    for text in args.specialize or ():
        found += _specialized(text)
    if args.all:
        kernels = [own for kernels in kernel.KERNELS.values() for own in kernels]
        found += [i for own in kernels for i in own.specialized if i not in own.unused.get(arch, ())]
    names = [*(args.models or ()), *(NAMED if args.all else ())]
    return list(dict.fromkeys(found + instances_of([model for name in names for model in models_of(name)], arch)))


def _specialized(text: str) -> list[Instance]:
    """Return the instances that `cukern.specialize` compiles for a text such as "topk_softmax,experts=60"."""
    op, *pairs = text.split(",")
    values: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        values[name] = int(value) if value.isdecimal() else {"True": True, "False": False}.get(value, value)
    try:
        return kernel.specialized(op, **values)
    except (TypeError, ValueError) as error:
        raise UserError(f"--specialize {text}: {error}") from None


def _of_functions(names: list[str], instances: list[Instance], arch: str) -> list[Instance]:
    """Return the instances that these functions launch; all instances if none is found or `arch` is unknown."""
    from cukern.commands.explain import reached_by

    if not names or arch not in gpu.BY_ARCH:
        return instances
    reached = set[Instance]().union(*(reached_by(name, instances, gpu.BY_ARCH[arch]) for name in names))
    return [instance for instance in instances if instance in reached] or instances


def _rest(names: list[str], own: list[Instance], family: list[Instance], row: list[str]) -> str:
    """Return a line about the family's kernels that the named functions do not launch, with their compile time."""
    stem, arch, _, compiled, _, seconds, *_ = row
    others = [i for i in family if i not in own]
    left = len(compile.missing(others, arch.removeprefix("sm_")))
    if not names or not left:
        return ""
    guess = f", about {left * float(seconds) / int(compiled):.0f} s at that rate" if int(compiled) else ""
    return (
        f"{', '.join(names)}: {len(own)} of the {len(family)} kernels of {stem} for {arch}, {compiled} compiled now; "
        f"{left} of the other {len(others)} are not compiled{guess}: --op {stem}"
    )


def _row(stem: str, arch: str, instances: list[Instance], absent: list[Instance], seconds: float) -> list[str]:
    notes = [compile.read_note(compile.cached_path(instance, arch)) for instance in instances]
    used = [resources(note) for note in notes if note]
    registers = sorted({r.registers for r in used} or {0})
    spilled = [r.spill_bytes for r in used if r.spill_bytes]
    return [
        stem,
        f"sm_{arch}",
        str(len(instances)),
        str(len(absent) - len(compile.missing(absent, arch))),
        str(len(instances) - len(absent)),
        f"{seconds:.1f}",
        "-".join(map(str, dict.fromkeys((registers[0], registers[-1])))),
        f"{len(spilled)} (<= {max(spilled)} B)" if spilled else "none",
    ]


def _table(*numbers: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("op")
    table.add_column("arch")
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _check(wanted: dict[tuple[str, str], list[Instance]]) -> int:
    table, total, absent = _table("kernels", "cached", "missing"), 0, 0
    for (stem, arch), instances in wanted.items():
        # A cached file that cannot be loaded, such as a truncated one, counts as missing.
        missing = sum(not compile.is_intact(compile.cached_path(i, arch)) for i in instances)
        table.add_row(stem, f"sm_{arch}", *map(str, (len(instances), len(instances) - missing, missing)))
        total += len(instances)
        absent += missing
    screen, folder = console(), compile._default_cache_directory()
    screen.print(table)
    if absent:
        says = f"{absent} of {total} kernels are missing in {folder}: the same command without --check compiles them"
        screen.print(says, soft_wrap=True)
        return 1
    screen.print(f"all {total} kernels are in {folder}", soft_wrap=True)
    return 0


def run(args: argparse.Namespace) -> int:
    stems = _stems(args.op)
    require_nvrtc()
    archs = _archs(args.arch)
    problem, folder = compile.cache_problem(), compile._default_cache_directory()
    if folder not in compile.folders():
        raise UserError(f"the cache folder {folder} cannot be used: {problem}; {_ANOTHER}")
    families: dict[tuple[str, str], list[Instance]] = {}
    wanted: dict[tuple[str, str], list[Instance]] = {}
    for arch in archs:
        found = _wanted(args, arch)
        for stem, names in stems.items():
            families[stem, arch] = [i for i in found if _stem_of(i) == stem]
            wanted[stem, arch] = _of_functions(names, families[stem, arch], arch)
    if args.check:
        return _check(wanted)

    absent = {place: compile.missing(instances, place[1]) for place, instances in wanted.items()}
    total, count = (sum(map(len, each.values())) for each in (wanted, absent))
    where = ", ".join(f"sm_{arch}" for arch in archs)
    if count and problem:
        absence = f"{count} of {total} kernels are missing in {folder}, which cannot be written"
        raise UserError(f"{absence}: {problem}; {_ANOTHER}")
    print(f"cukern compile: {total} kernels for {where}, {count} of them to compile", file=sys.stderr, flush=True)
    table = _table("kernels", "compiled", "cached", "seconds", "registers", "spills")
    begin = time.perf_counter()
    problems: list[str] = []
    rest: list[str] = []
    with progress("compiling", count) as advance:
        for (stem, arch), instances in wanted.items():
            own, start = absent[stem, arch], time.perf_counter()
            said = f"{stem} for sm_{arch}"
            try:
                if own:
                    advance(0, said)
                    compile.compile_all([(i, arch) for i in own], lambda *_, said=said: advance(1, said))
            except compile.CompileError as error:
                problems.append(str(error))
            table.add_row(*(row := _row(stem, arch, instances, own, time.perf_counter() - start)))
            rest.append(_rest(stems[stem], instances, families[stem, arch], row))
    screen = console()
    screen.print(table)
    screen.print(f"{time.perf_counter() - begin:.1f} s, NVRTC {compile.nvrtc_version()}, in {folder}", soft_wrap=True)
    for line in filter(None, rest):
        screen.print(line)
    if problems:
        raise compile.CompileError("\n".join(problems))
    return 0
