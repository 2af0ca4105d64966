"""`cukern compile`: fill the cache ahead of use."""

from __future__ import annotations

import argparse
import re
import sys
import time

from cukern.commands import UserError, cache_problem, refusal, require_nvrtc, resources
from cukern.runtime import compile, kernel

_OLDEST = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH[,ARCH...]",
        help="what to compile for, such as 80,90a,100a,120a (default: the GPUs of this machine)",
    )
    parser.add_argument(
        "--op",
        action="append",
        metavar="OP",
        help=f"a family ({', '.join(kernel.KERNELS)}) or a function of cukern; may be repeated (default: all)",
    )
    parser.epilog = (
        "The cache is CUKERN_CACHE_DIR, or the user's cache folder. For a container image:\n"
        "  CUKERN_CACHE_DIR=/opt/cukern cukern compile --arch 80,90a"
    )


def _archs(given: list[str] | None) -> list[str]:
    if not given:
        found = sorted({kernel.arch_of_device(d) for d in range(kernel.device_count())})
        if not found:
            raise UserError("there is no GPU here to compile for: name one with --arch, such as --arch 80,90a")
        return found
    archs: dict[str, None] = {}
    for text in ",".join(given).split(","):
        match = re.fullmatch(r"(?:sm_)?(\d{2,3})(a?)", text.strip())
        if not match:
            raise UserError(f"--arch must be like 80, 90a or sm_100a, got {text.strip()!r}")
        number, suffix = int(match[1]), match[2]
        if number < _OLDEST:
            raise UserError(f"--arch must be {_OLDEST} or later, got {text.strip()!r}")
        # From 90 on GPUs load the target with the suffix "a", which has their own instructions.
        archs[f"{number}{suffix}" if suffix else compile.arch_of(divmod(number, 10))] = None
    for arch in archs:
        if reason := refusal(arch):
            raise UserError(f"--arch: NVRTC {compile.nvrtc_version()} cannot compile for sm_{arch} ({reason})")
    return list(archs)


def _stems(given: list[str] | None) -> list[str]:
    stems: dict[str, None] = {}
    for op in given or kernel.KERNELS:
        function = getattr(sys.modules["cukern"], op, None)
        module = getattr(function, "__module__", "")
        # A stem is a module or a package of several.
        stem = module.split(".")[2] if module.startswith("cukern.ops.") else op
        if stem not in kernel.KERNELS:
            raise UserError(f"--op must be one of {', '.join(kernel.KERNELS)} or a function of cukern, got {op!r}")
        stems[stem] = None
    return list(stems)


def run(args: argparse.Namespace) -> int:
    """Compile the kernels that the cache lacks, and show those that it has then."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    stems = _stems(args.op)
    require_nvrtc()
    archs = _archs(args.arch)
    if problem := cache_problem():
        raise UserError(f"the cache folder cannot be used: {problem}; set CUKERN_CACHE_DIR to a folder of yours")

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("op")
    table.add_column("arch")
    for heading in ("kernels", "compiled", "cached", "seconds", "registers", "spills"):
        table.add_column(heading, justify="right")
    begin = time.perf_counter()
    for arch in archs:
        for stem in stems:
            instances = list(kernel.instances(stem))
            absent = compile.missing(instances, arch)
            start = time.perf_counter()
            if absent:
                kernel.compile_with_progress([(instance, arch) for instance in absent], f"{stem} for sm_{arch}")
            seconds = time.perf_counter() - start
            notes = [compile.read_note(compile.cached_path(instance, arch)) for instance in instances]
            used = [resources(note) for note in notes if note]
            registers = sorted({r.registers for r in used})
            spilled = [r.spill_bytes for r in used if r.spill_bytes]
            table.add_row(
                stem,
                f"sm_{arch}",
                str(len(instances)),
                str(len(absent)),
                str(len(instances) - len(absent)),
                f"{seconds:.1f}",
                "-".join(map(str, dict.fromkeys((registers[0], registers[-1])))),
                f"{len(spilled)} (<= {max(spilled)} B)" if spilled else "none",
            )
    console = Console()
    console.print(table)
    console.print(
        f"{time.perf_counter() - begin:.1f} s, NVRTC {compile.nvrtc_version()}, in {compile.cache_directory()}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
