"""`cukern compile`: fill the cache ahead of use.

It compiles the instances that `import cukern` compiles. `--for` adds the instances that serving a model reaches, as
`cukern.commands.serving` finds them. `--all` compiles all instances that the families list, and what `--for` of every
name reaches.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
from collections.abc import Iterable

from cukern.commands import UserError, cache_problem, console, refusal, require_nvrtc, resources
from cukern.commands.models_of import KINDS, NAMED, models_of
from cukern.runtime import compile, gpu, kernel
from cukern.runtime.compile import Instance

_OLDEST = 80


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
        "--all",
        action="store_true",
        help="the kernels of the import, all specialized ones, and what --for compiles for every named model",
    )
    parser.epilog = "\n".join(
        [
            "Without --for and --all, the kernels of the import are compiled, and all others at their first use.",
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
        card = gpu.CARDS.get(text.strip().upper().removeprefix("NVIDIA "))
        match = re.fullmatch(r"(?:sm_)?(\d{2,3})(a?)", card.arch if card else text.strip())
        if not match:
            wanted = "like 80, 90a or sm_100a, or a card such as H200, L40S or A100"
            raise UserError(f"--arch must be {wanted}, got {text.strip()!r}")
        number, suffix = int(match[1]), match[2]
        if number < _OLDEST:
            raise UserError(f"--arch must be {_OLDEST} or later, got {text.strip()!r}")
        # From 90 on GPUs load the target with the suffix "a", which has their own instructions.
        archs[f"{number}{suffix}" if suffix else compile.arch_of(divmod(number, 10))] = None
    for arch in archs:
        if reason := refusal(arch):
            raise UserError(f"--arch: NVRTC {compile.nvrtc_version()} cannot compile for sm_{arch} ({reason})")
    return list(archs)


def _stems(given: list[str] | None) -> dict[str, list[str]]:
    """The families to compile, each with the functions whose kernels alone are wanted; none: all of the family."""
    stems: dict[str, list[str]] = {}
    wholes = set()
    for op in given or kernel.KERNELS:
        function = getattr(sys.modules["cukern"], op, None)
        module = getattr(function, "__module__", "")
        # A stem is a module or a package of several.
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
    """The instances to compile for an architecture, the instances of the import first."""
    from cukern.commands.serving import instances_of

    found = list(kernel.instances())
    if args.all:
        kernels = [own for kernels in kernel.KERNELS.values() for own in kernels]
        found += [i for own in kernels for i in own.specialized if i not in own.unused.get(arch, ())]
    names = [*(args.models or ()), *(NAMED if args.all else ())]
    return list(dict.fromkeys(found + instances_of([model for name in names for model in models_of(name)], arch)))


def _of_functions(names: list[str], instances: list[Instance], arch: str) -> list[Instance]:
    """The instances that calls of these functions reach; all where none is found, or the architecture is not known."""
    from cukern.commands.explain import reached_by

    if not names or arch not in gpu.BY_ARCH:
        return instances
    reached = set[Instance]().union(*(reached_by(name, instances, gpu.BY_ARCH[arch]) for name in names))
    return [instance for instance in instances if instance in reached] or instances


def _rest(row: list[str], names: list[str], family: list[Instance], arch: str) -> str | None:
    """The kernels of a family that the named functions do not reach, and an estimate of their time."""
    left = len(compile.missing(family, arch))
    if not names or not left:
        return None
    stem, _, kernels, compiled, _, seconds, *_ = row
    said = f"{', '.join(names)}: {kernels} of the {len(family)} kernels of {stem} for sm_{arch}"
    if not int(compiled):
        return f"{said}; the rest, {left}, is not compiled: --op {stem}"
    guess = left * float(seconds) / int(compiled)
    return (
        f"{said}, {compiled} compiled in {seconds} s; at that rate the rest, {left}, takes {guess:.0f} s: --op {stem}"
    )


def _row(stem: str, arch: str, instances: Iterable[Instance], problems: list[str]) -> list[str]:
    """Compile the instances of a family that the cache lacks; the row of the table. Failures join `problems`."""
    instances = list(instances)
    absent, start = compile.missing(instances, arch), time.perf_counter()
    if absent:
        try:
            kernel.compile_with_progress([(instance, arch) for instance in absent], f"{stem} for sm_{arch}")
        except compile.CompileError as error:
            problems.append(str(error))
    seconds = time.perf_counter() - start
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


def run(args: argparse.Namespace) -> int:
    """Compile the kernels that the cache lacks, and show those that it has then."""
    from rich import box
    from rich.table import Table

    stems = _stems(args.op)
    require_nvrtc()
    archs = _archs(args.arch)
    wanted = {arch: _wanted(args, arch) for arch in archs}
    if problem := cache_problem():
        raise UserError(f"the cache folder cannot be used: {problem}; set CUKERN_CACHE_DIR to a folder of yours")

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("op")
    table.add_column("arch")
    for heading in ("kernels", "compiled", "cached", "seconds", "registers", "spills"):
        table.add_column(heading, justify="right")
    begin = time.perf_counter()
    problems: list[str] = []
    rest: list[str | None] = []
    for arch in archs:
        for stem, names in stems.items():
            family = [i for i in wanted[arch] if _stem_of(i) == stem]
            row = _row(stem, arch, _of_functions(names, family, arch), problems)
            table.add_row(*row)
            rest.append(_rest(row, names, family, arch))
    screen = console()
    screen.print(table)
    screen.print(
        f"{time.perf_counter() - begin:.1f} s, NVRTC {compile.nvrtc_version()}, in {compile.cache_directory()}",
        soft_wrap=True,
    )
    for line in filter(None, rest):
        screen.print(line)
    if problems:
        raise compile.CompileError("\n".join(problems))
    return 0
