"""The comparison of the machine code of two checkouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import machine_code
from cukern.ops import embedding
from cukern.runtime import compile

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(compile.available() is not None, reason="NVRTC is not installed")


def test_the_digest_is_of_the_code() -> None:
    narrow, wide = (embedding._variant("float16", width, False).instance for width in (1, 2))
    first, _ = compile.cubin(narrow, "90a")
    other, _ = compile.cubin(wide, "90a")
    names = [name for name, _, _ in machine_code.sections(first.read_bytes())]
    assert sum(name.startswith(".text.") for name in names) == 1
    assert machine_code.code_digest(first) == machine_code.code_digest(first) != machine_code.code_digest(other)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, which a test may change."""
    for name in ("cuda_src", "cukern"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.rare
def test_comments_leave_the_code_as_it_is_and_a_change_shows(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkout / "cuda_src/embedding/embedding_copy.cu"
    source = file.read_text()
    arguments = [str(checkout), "--op", "embedding"]

    file.write_text(f"// A comment.\n\n{source}")
    assert machine_code.main(arguments) == 0
    count = len(machine_code.instances("90a", ["embedding"]))
    assert capsys.readouterr().out == f"{count} of {count} instances are the same on sm_90a\n"

    body = source.index("{", source.index("__global__"))
    file.write_text(f"{source[: body + 1]} if (threadIdx.x == 1000) __trap(); {source[body + 1 :]}")
    assert machine_code.main(arguments) == 1
    output = capsys.readouterr().out
    assert "differs  embedding: embedding_copy<" in output
    assert "embedding_add<" not in output
