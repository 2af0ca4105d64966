"""Run the peers' test files of folders on cukern: `python -m tests.peers FOLDER... [options] [arguments of pytest]`.

With `--jobs` several processes run at the same time, each with a part of a file, and files do not disturb each other.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

import tests
from cukern import compat
from tests.peers import modules, scripts, tally
from tests.peers.plugin import Part

#: The test files of the families that cukern has, below a folder of each peer, and into how many parts the long ones
#: are cut with `--jobs`.
FILES = {
    # vLLM
    "tests/kernels/attention/test_attention.py": 4,
    "tests/kernels/attention/test_cache.py": 8,
    "tests/kernels/attention/test_merge_attn_states.py": 8,
    "tests/kernels/core/test_activation.py": 4,
    "tests/kernels/core/test_fused_quant_layernorm.py": 6,
    "tests/kernels/core/test_fused_silu_mul_block_quant.py": 4,
    "tests/kernels/core/test_layernorm.py": 8,
    "tests/kernels/moe/test_fused_topk.py": 4,
    "tests/kernels/moe/test_grouped_topk.py": 2,
    "tests/kernels/moe/test_moe_align_block_size.py": 2,
    "tests/kernels/moe/test_moe_permute_unpermute.py": 4,
    "tests/kernels/quantization/test_fp8_quant.py": 1,
    "tests/kernels/quantization/test_int8_quant.py": 2,
    "tests/kernels/quantization/test_nvfp4_quant.py": 1,
    "tests/kernels/test_apply_repetition_penalties.py": 2,
    "tests/kernels/test_cache_kernels.py": 1,
    "tests/kernels/test_cp_gather_fp8.py": 1,
    "tests/kernels/test_fused_quant_activation.py": 1,
    # FlashInfer
    "tests/utils/test_sampling.py": 12,
    "tests/utils/test_norm.py": 6,
    "tests/utils/test_activation.py": 1,
    "tests/attention/test_page.py": 1,
    # SGLang
    "sgl-kernel/tests/test_activation.py": 1,
    "sgl-kernel/tests/test_kimi_k2_moe_fused_gate.py": 1,
    "sgl-kernel/tests/test_merge_state_v2.py": 2,
    "sgl-kernel/tests/test_moe_align.py": 4,
    "sgl-kernel/tests/test_moe_fused_gate.py": 1,
    "sgl-kernel/tests/test_moe_topk_sigmoid.py": 2,
    "sgl-kernel/tests/test_moe_topk_softmax.py": 2,
    "sgl-kernel/tests/test_norm.py": 1,
    "sgl-kernel/tests/test_per_token_group_quant_8bit.py": 4,
    "sgl-kernel/tests/test_per_token_quant_fp8.py": 1,
    "sgl-kernel/tests/test_sampling.py": 4,
    # FlashMLA
    "tests/test_flash_mla.py": 1,
    "tests/test_flash_mla_dense_decoding.py": 12,
    "tests/test_flash_mla_sparse_decoding.py": 12,
}


_LEAST_S = 5.0  # in which a process can do anything


class _Unit(NamedTuple):
    """What one of several processes runs."""

    folder: Path
    file: str
    part: Part


def files_of(folder: Path, only: str) -> list[str]:
    """The files of a folder that are known, or all of one without known ones, as far as their names hold `only`."""
    names = [name for name in FILES if (folder / name).exists()] or sorted(x.name for x in folder.glob("test_*.py"))
    if not names:
        raise SystemExit(f"FOLDER must hold test files of a peer, got {folder} (see tests.peers.__main__.FILES)")
    return [name for name in names if only in name]


def run_folder(folder: Path, options: argparse.Namespace, arguments: list[str]) -> int:
    """Run what is there in this process; the worst exit status."""
    names = files_of(folder, options.only)
    for line in compat.enable(*compat.PEERS):
        print(line)
    modules.install(folder)
    tests.__path__.append(str(folder / "tests"))  # vLLM's files import from their own package of that name
    programs = [name for name in names if scripts.is_script(folder / name)]
    status = 0
    for name in programs:
        print(f"\n{name}")
        status = max(status, scripts.run(folder / name, name, options.part, options.every, options.tally))
    others = [str(folder / name) for name in names if name not in programs]
    if others:
        given = ["--noconftest", "--import-mode=importlib", "--continue-on-collection-errors", "-q", "-rs"]
        given += ["-p", "tests.peers.plugin", "-c", "/dev/null", f"--rootdir={folder}"]
        given += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        given += [f"--peers-part={options.part.index}/{options.part.count}", f"--peers-tally={options.tally}"]
        status = max(status, int(pytest.main([*given, *arguments, *others])))
    return status


def _run_unit(
    unit: _Unit, number: int, work: Path, options: argparse.Namespace, arguments: list[str]
) -> list[tally.Case]:
    """The cases of a unit, run by a process of its own; one more that failed if it did not come to its end."""
    path, part, name = work / f"{number}.json", unit.part, f"{unit.folder.name}/{unit.file}"
    begin = time.monotonic()
    limit = min(options.limit, options.end - begin)
    if limit < _LEAST_S:
        return [tally.Case(name, f"part {part.index + 1} of {part.count}", "failed", "not begun in time (--until)")]
    command = [sys.executable, "-m", "tests.peers", str(unit.folder), f"--only={unit.file}", f"--tally={path}"]
    command += [f"--part={part.index}/{part.count}", f"--every={options.every}", *arguments]
    with (work / f"{number}.log").open("w") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
            ended = "" if status in (0, 1, 5) else f"the process ended with {status}"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {limit:.0f} s"
    cases = [case._replace(file=name) for case in tally.read(path)]
    print(
        f"{time.monotonic() - begin:6.1f} s  {name} {part.index + 1}/{part.count}: {len(cases)} cases {ended}",
        flush=True,
    )
    if ended:
        last = (work / f"{number}.log").read_text(errors="replace").strip().splitlines()[-1:]
        cases.append(
            tally.Case(name, f"part {part.index + 1} of {part.count}", "failed", " ".join([ended, *last])[:200])
        )
    return cases


def run_jobs(folders: list[Path], options: argparse.Namespace, arguments: list[str]) -> int:
    """Run all folders by `options.jobs` processes, and print the table; 1 if a case failed."""
    units = [
        _Unit(folder, name, Part(i, FILES.get(name, 1)))
        for folder in folders
        for name in files_of(folder, options.only)
        for i in range(FILES.get(name, 1))
    ]
    units.sort(key=lambda unit: -unit.part.count)
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(_run_unit, unit, number, Path(work), options, arguments) for number, unit in enumerate(units)
        ]
        cases = [case for each in waiting for case in each.result()]
    print(tally.table(cases))
    return int(any(case.outcome == "failed" for case in cases))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--jobs", type=int, default=0, help="processes that run at the same time")
    parser.add_argument("--limit", type=float, default=600, help="seconds that each of them may take")
    parser.add_argument("--until", type=float, default=86400, help="seconds after which no more of them are begun")
    parser.add_argument("--only", default="", help="only files with this in their names")
    parser.add_argument("--part", type=Part.of, default=Part(), help="INDEX/COUNT: the share of the cases to run")
    parser.add_argument("--every", type=int, default=1, help="of FlashMLA's cases, one in so many")
    parser.add_argument("--tally", type=Path, help="a file to write each case to")
    options, arguments = parser.parse_known_args()
    if options.jobs or len(options.folders) > 1:
        options.end = time.monotonic() + options.until
        options.jobs = options.jobs or 1
        return run_jobs(options.folders, options, arguments)
    if options.tally is not None:
        return run_folder(options.folders[0], options, arguments)
    with tempfile.TemporaryDirectory() as work:
        options.tally = Path(work) / "cases.json"
        status = run_folder(options.folders[0], options, arguments)
        print(tally.table(tally.read(options.tally)))
    return status


if __name__ == "__main__":
    sys.exit(main())
