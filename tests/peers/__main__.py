"""Run the peers' test files of a folder on cukern: `python -m tests.peers FOLDER [arguments of pytest]`."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tests
from cukern import compat
from tests.peers import modules

#: The test files of the families that cukern has, below a folder of each peer.
FILES = (
    # vLLM
    "tests/kernels/attention/test_attention.py",
    "tests/kernels/attention/test_cache.py",
    "tests/kernels/attention/test_merge_attn_states.py",
    "tests/kernels/core/test_activation.py",
    "tests/kernels/core/test_fused_quant_layernorm.py",
    "tests/kernels/core/test_fused_silu_mul_block_quant.py",
    "tests/kernels/core/test_layernorm.py",
    "tests/kernels/moe/test_fused_topk.py",
    "tests/kernels/moe/test_grouped_topk.py",
    "tests/kernels/moe/test_moe_align_block_size.py",
    "tests/kernels/moe/test_moe_permute_unpermute.py",
    "tests/kernels/quantization/test_fp8_quant.py",
    "tests/kernels/quantization/test_int8_quant.py",
    "tests/kernels/quantization/test_nvfp4_quant.py",
    "tests/kernels/test_apply_repetition_penalties.py",
    "tests/kernels/test_cache_kernels.py",
    "tests/kernels/test_cp_gather_fp8.py",
    "tests/kernels/test_fused_quant_activation.py",
    # FlashInfer
    "tests/utils/test_sampling.py",
    "tests/utils/test_norm.py",
    "tests/utils/test_activation.py",
    "tests/attention/test_page.py",
    # SGLang
    "sgl-kernel/tests/test_activation.py",
    "sgl-kernel/tests/test_kimi_k2_moe_fused_gate.py",
    "sgl-kernel/tests/test_merge_state_v2.py",
    "sgl-kernel/tests/test_moe_align.py",
    "sgl-kernel/tests/test_moe_fused_gate.py",
    "sgl-kernel/tests/test_moe_topk_sigmoid.py",
    "sgl-kernel/tests/test_moe_topk_softmax.py",
    "sgl-kernel/tests/test_norm.py",
    "sgl-kernel/tests/test_per_token_group_quant_8bit.py",
    "sgl-kernel/tests/test_per_token_quant_fp8.py",
    "sgl-kernel/tests/test_sampling.py",
    # FlashMLA
    "tests/test_flash_mla.py",
    "tests/test_flash_mla_dense_decoding.py",
    "tests/test_flash_mla_sparse_decoding.py",
)


def is_script(file: Path) -> bool:
    """Whether a file is run by itself, as FlashMLA's are."""
    text = file.read_text()
    return "__main__" in text and "import pytest" not in text


def _no_times() -> None:
    """Have FlashMLA's `kernelkit` run what it would time, and give no times: it looks for FlashMLA's kernels."""
    try:
        kit: Any = importlib.import_module("kernelkit")
    except ImportError:
        return

    def run(function: Any, *_: Any, **__: Any) -> Any:
        function()
        nothing = {"get_kernel_names": list, "get_kernel_time": lambda *_: 1.0, "get_e2e_time": lambda *_: 1.0}
        return SimpleNamespace(**nothing)

    kit.bench_kineto, kit.is_using_profiling_tools = run, lambda: True


def run_script(file: Path, every: int = 1) -> int:
    """Run a file as a program, with its folder first on the path; its exit status.

    Of the cases that its function `gen_testcase` lists, every `every`-th is run.
    """
    sys.path.insert(0, str(file.parent))
    argv, sys.argv = sys.argv, [str(file)]
    tree = ast.parse(file.read_text(), str(file))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "gen_testcase":
            node.decorator_list.append(ast.copy_location(ast.Name("_some_cases", ast.Load()), node))
    names = {"__name__": "__main__", "__file__": str(file)}
    try:
        _no_times()
        exec(compile(tree, str(file), "exec"), {**names, "_some_cases": lambda made: lambda: made()[::every]})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = argv
        sys.path.remove(str(file.parent))
    return 0


def main(folder: Path, arguments: list[str]) -> int:
    """Run what is there; the worst exit status."""
    files = [folder / name for name in FILES if (folder / name).exists()] or sorted(folder.glob("test_*.py"))
    if not files:
        raise SystemExit(f"FOLDER must hold test files of a peer, got {folder} (see tests.peers.__main__.FILES)")
    for line in compat.enable(*compat.PEERS):
        print(line)
    modules.install(folder)
    tests.__path__.append(str(folder / "tests"))  # vLLM's files import from their own package of that name
    scripts = [file for file in files if is_script(file)]
    status, counts = 0, [int(x.removeprefix("--every=")) for x in arguments if x.startswith("--every=")]
    arguments = [x for x in arguments if not x.startswith("--every=")]
    for file in scripts:
        print(f"\n{file.relative_to(folder)}")
        status = max(status, run_script(file, *counts[:1]))
    others = [str(file) for file in files if file not in scripts]
    if others:
        options = ["--noconftest", "--import-mode=importlib", "--continue-on-collection-errors", "-q", "-rs"]
        options += ["-p", "tests.peers.plugin", "-c", "/dev/null", f"--rootdir={folder}"]
        options += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        status = max(status, int(pytest.main([*options, *arguments, *others])))
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tests.peers FOLDER [arguments of pytest]")
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
