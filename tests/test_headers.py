"""The headers of cuda_src: each includes what it uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc, sources

HEADERS = sorted(sources.CUDA_SRC.rglob("*.cuh"))
FOLDERS = sorted({path.parent.name for path in HEADERS})
#: What a header may define: a function, a struct, a constant.
_DEFINITION = re.compile(
    r"^(?:template\s*<[^;{]*>\s*)?(?:"
    r"(?:static |inline |constexpr )*__device__[^;{}()=]*?\b(\w+)\s*\(|"
    r"struct\s+(?:alignas\(\w+\)\s*)?(\w+)|"
    r"constexpr\s+\w+\s+(\w+))",
    re.MULTILINE,
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_header_compiles_alone(folder: str) -> None:
    for path in HEADERS:
        if path.parent.name == folder:
            source = f'#include "{path.relative_to(sources.CUDA_SRC)}"\n__global__ void kernel() {{}}\n'
            options = [*compiler._options("90a"), f"-I{sources.CUDA_SRC}", f"-I{compiler.cuda_include_directory()}"]
            nvrtc.compile_cubin(source, "alone.cu", "kernel", options)


def _uses(text: str, name: str) -> bool:
    """Whether a header calls a function or names a template, and declares no variable of the same name."""
    is_declared = re.search(rf"(?<!return)(?<=[\w>&*]) {name}\b", text)
    return not is_declared and re.search(rf"(?<![\w.>]){name}\s*[(<]", text) is not None


def missing_includes(headers: list[Path], root: Path) -> list[str]:
    """The names that a header uses of another one of its folder, or of common, that it does not include.

    A template's body is compiled where it is instantiated, behind other headers: NVRTC does not report these names
    reliably.
    """
    texts = {path: re.sub(r"//.*|\"[^\"\n]*\"", "", path.read_text()) for path in headers}
    defined = {
        path: {name for found in _DEFINITION.findall(text) for name in found if name} for path, text in texts.items()
    }
    missing = []
    for path, text in texts.items():
        reached, _ = sources.included([path], root)
        known = set().union(*(defined[x] for x in reached if x in defined))
        for other in headers:
            if other.parent.name in ("common", path.parent.name):
                used = [name for name in sorted(defined[other] - known) if _uses(text, name)]
                missing += [f"{path.relative_to(root)} uses {name} of {other.relative_to(root)}" for name in used]
    return missing


def test_each_header_includes_what_it_uses() -> None:
    assert len(HEADERS) > 100
    assert not missing_includes(HEADERS, sources.CUDA_SRC)


def test_a_header_without_its_include_is_named(tmp_path: Path) -> None:
    texts = {
        "common/address.cuh": "__device__ inline unsigned shared_address(const void* p) { return 0; }\n",
        "gemm/scales.cuh": "template <class T> __device__ void load(T& t) { return shared_address(&t.full); }\n",
        "gemm/tiles.cuh": '#include "common/address.cuh"\n__device__ unsigned at() { return shared_address(0); }\n',
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    headers = sorted(tmp_path.rglob("*.cuh"))
    assert missing_includes(headers, tmp_path) == ["gemm/scales.cuh uses shared_address of common/address.cuh"]


@pytest.mark.parametrize(
    "first",
    [
        "import torch, cukern",
        "import cukern, torch",
        # The binding keeps the NVRTC that it finds, which is torch's.
        "import torch; from cupy_backends.cuda.libs import nvrtc; nvrtc.getVersion(); import cukern",
    ],
)
def test_the_headers_fit_the_nvrtc_of_any_order_of_imports(first: str, tmp_path: Path) -> None:
    code = f"""
import sys
{first}
import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc, sources
assert compiler.nvrtc_version().startswith(compiler.headers_version() + ".")
options = compiler._options("90a") + ["-I" + compiler.cuda_include_directory()]
nvrtc.compile_cubin("#include <cuda_fp8.h>\\n__global__ void kernel() {{}}", "fp8.cu", "kernel", options)
worker = compiler._start_worker()
assert str(compiler._nvrtc_library()) in worker.args
worker.kill()
"""
    environment = {"CUKERN_COMPILE": "lazy", "CUKERN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=sources.CUDA_SRC.parent, env=os.environ | environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
