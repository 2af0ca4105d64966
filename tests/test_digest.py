"""The digest of sources: what changes it, and what does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.digest import cuda_tokens, digest, python_tokens
from tests import gpu_record
from tests.gpu_record import ROOT

CUDA = """// A kernel.
#include "common/warp.cuh"
#define TWICE(x) \\
    ((x) + (x))
template <int N> __global__ void kernel(float* x) {
    const char* text = "no // comment"; /* N
    of them */
    if (N >= 2) x[0] = TWICE(1.5e-3f) + 1'000;
}
"""
PYTHON = '''"""A module."""

import os


class A:
    """A class."""

    def f(self, x: int) -> str:
        """Say it."""
        # why
        text = """no docstring"""
        return f"{x:{len(text)}} # no comment {os.sep!r}"
'''


def of(text: str, suffix: str, folder: Path) -> str:
    (folder / f"file{suffix}").write_text(text)
    return digest(folder, root=folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace("// A kernel.\n", "\n\n"),
        lambda t: t.replace("/* N\n    of them */", "// others"),
        lambda t: t.replace("    if", "\tif").replace("{\n", "\n{\n"),
        lambda t: t.replace("(x) + (x)", "(x)+(x)").replace("\\\n", ""),
        lambda t: t.replace("#include", "#  include"),
        lambda t: t + "\n// the end",
    ],
)
def test_comments_and_layout_of_cuda_change_nothing(change: Callable[[str], str], tmp_path: Path) -> None:
    assert change(CUDA) != CUDA
    assert of(change(CUDA), ".cu", tmp_path) == of(CUDA, ".cu", tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1.5e-3f", "1.5e-4f"), ("no // comment", "no / / comment"), (">= 2", "> = 2"), ("x[0]", "x[ 1]"),
        ("((x) + (x))\n", "((x) + (x)) "), ("1'000", "1000"), ("int N", "intN"), ("common/warp", "common/mma"),
    ],
)  # fmt: skip
def test_tokens_of_cuda_change_the_digest(before: str, after: str, tmp_path: Path) -> None:
    assert before in CUDA
    assert of(CUDA.replace(before, after), ".cu", tmp_path) != of(CUDA, ".cu", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace('"""Say it."""', '"""Say\n        something else."""'),
        lambda t: t.replace('        """Say it."""\n', "").replace('"""A module."""\n', ""),
        lambda t: t.replace("# why", "# because").replace("\n\n\n", "\n"),
        lambda t: t.replace("    ", "  "),
        lambda t: t.replace("x: int", "x :int"),
    ],
)
def test_comments_docstrings_and_layout_of_python_change_nothing(change: Callable[[str], str], tmp_path: Path) -> None:
    assert change(PYTHON) != PYTHON
    assert of(change(PYTHON), ".py", tmp_path) == of(PYTHON, ".py", tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""no docstring"""', '"""a string"""'), ("# no comment", "# a comment"), ("sep!r", "sep!s"),
        ("x: int", "x: str"), ("        return", "        if x:\n            return"), ("def f", "async def f"),
    ],
)  # fmt: skip
def test_tokens_of_python_change_the_digest(before: str, after: str, tmp_path: Path) -> None:
    assert before in PYTHON
    changed = PYTHON.replace(before, after)
    assert of(changed, ".py", tmp_path) != of(PYTHON, ".py", tmp_path)


def test_the_tokens_of_a_directive_end_with_its_line() -> None:
    assert list(cuda_tokens("#if A // why\nB\n")) == ["#", "if", "A", "\n", "B"]
    assert list(python_tokens("x = f'{y}'\n")) == ["x", "=", "f'{y}'", "NEWLINE"]


def test_a_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    source = {"a.py": "1", "sub/b.cu": "2"}

    def tree(name: str, files: dict[str, str]) -> Path:
        for file, text in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(text)
        return tmp_path / name

    first = tree("first", source)
    again = tree("again", {**dict(reversed(source.items())), "sub/b.pyc": "3", "note.txt": "4"})
    reference = digest(first, root=first)
    assert digest(again, root=again) == reference
    assert digest(first / "sub", first / "a.py", first / "missing.py", root=first) == reference
    changed = {**source, "a.py": "2"}, {"c.py": "1", "sub/b.cu": "2"}, {"a.py": "1"}
    for i, files in enumerate(changed):
        other = tree(str(i), files)
        assert digest(other, root=other) != reference


# --- the proofs of this checkout --------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which a test may change."""
    for name in ("cuda_src", "cukern", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(gpu_record, "ROOT", tmp_path)
    return tmp_path


def proofs() -> dict[str, str]:
    return {name: digest(*gpu_record.sources(name), root=gpu_record.ROOT) for name in gpu_record.provable()}


@pytest.mark.rare
def test_a_comment_in_every_file_leaves_all_proofs(copy: Path) -> None:
    before = proofs()
    for file in [*copy.rglob("*.cu"), *copy.rglob("*.cuh"), *copy.rglob("*.py")]:
        mark = "#" if file.suffix == ".py" else "//"
        file.write_text(f"{file.read_text()}\n{mark} another comment\n")
    assert proofs() == before


@pytest.mark.rare
def test_a_constant_of_a_kernel_ends_the_proofs_of_its_users(copy: Path) -> None:
    before = proofs()
    file = copy / "cuda_src" / "embedding" / "rows.cuh"
    text, count = re.subn(r"(constexpr int THREADS = )\d+", r"\g<1>7", file.read_text())
    assert count == 1
    file.write_text(text)
    after = proofs()
    assert {name for name in before if before[name] != after[name]} == {"embedding", "models"}
