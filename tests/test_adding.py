"""docs/guides/adding.md is a recipe: its files make an op, and each that is missing is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.digest import digest
from tests import gpu_record

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guides" / "adding.md"
STEM, PACKAGE = "leaky_relu", "cukern/__init__.py"
#: The files of the recipe by name; the notebook, which the guide does not show, is a short one.
FILES = dict(re.findall(r"^```{code-block} \w+\n:caption: (\S+)\n(.*?)^```$", GUIDE.read_text(), re.M | re.S))
NOTEBOOK = f"notebooks/{STEM}.ipynb"
SUITES = (
    "rooms", "specs", "contract", "torch_ops", "dynamic_batch", "kernels", "alike_calls", "overlap", "surface", "docs",
    "headers", STEM,
)  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the repository."""
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    return shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)


def add(checkout: Path, *left_out: str) -> None:
    """Follow the recipe, but for some of its files."""
    for name, text in FILES.items():
        path = checkout / name
        if name == PACKAGE:
            before = "from cukern.ops.mla_decode import *\n"
            assert before in path.read_text()
            path.write_text(path.read_text().replace(before, text + before))
        elif name not in left_out:
            path.write_text(text)
    if NOTEBOOK not in left_out:
        shutil.copy(checkout / "notebooks" / "softcap.ipynb", checkout / NOTEBOOK)


def run(checkout: Path, *command: str) -> subprocess.CompletedProcess[str]:
    settings = os.environ | {"CUKERN_COMPILE": "lazy", "PYTHONPATH": str(checkout)}
    own = [sys.executable, *command]
    return subprocess.run(own, cwd=checkout, env=settings, capture_output=True, text=True, check=False)


def run_suites(checkout: Path, *suites: str) -> str:
    """The output of the tests of the op in some suites."""
    files = [f"tests/test_{suite}.py" for suite in suites]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu and not rare")
    said = run(checkout, "-m", "pytest", *options, *files, "-k", f"{STEM} or surface or missing")
    return said.stdout + said.stderr


@pytest.mark.rare
def test_the_recipe(checkout: Path) -> None:
    add(checkout)
    said = run_suites(checkout, *SUITES)
    failed = re.findall(r"^FAILED (\S+)", said, re.M)
    # The snapshot of the surface and the family's page lack what is new, and a command renews each.
    lacking = {
        "tests/test_surface.py::test_the_surface_is_where_it_was",
        "tests/test_docs.py::test_a_page_ends_with_signatures_speed_and_notebook",
    }
    assert {x.partition("[")[0] for x in failed} == lacking, said
    assert "run `python -m tests.surface`" in said
    assert f"`make pages` writes the end of docs/families/{STEM}.md" in said
    assert run(checkout, "-m", "tests.surface").returncode == 0
    assert run(checkout, "-m", "docs.examples", f"docs/families/{STEM}.md").returncode == 0
    assert " failed" not in run_suites(checkout, "surface", "docs")
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) > 60, said
    ruff = run(checkout, "-m", "ruff", "check", *(name for name in FILES if name.endswith(".py")))
    assert ruff.returncode == 0, ruff.stdout
    clang_format = shutil.which("clang-format", path=str(Path(sys.executable).parent)) or "clang-format"
    layout = f"--style=file:{ROOT}/.clang-format"
    command = [clang_format, layout, "--dry-run", "--Werror", checkout / "cuda_src" / f"{STEM}.cu"]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.rare
@pytest.mark.parametrize(
    "left_out",
    [
        [f"tests/test_{STEM}.py", f"benchmarks/bench_{STEM}.py", NOTEBOOK, f"docs/families/{STEM}.md"],
        [f"tests/specs/{STEM}.py"],
    ],
)
def test_a_missing_file_is_named(checkout: Path, left_out: list[str]) -> None:
    add(checkout, *left_out)
    said = run_suites(checkout, "rooms", "specs")
    for name in left_out:
        assert re.search(rf"write {re.escape(name)}|{re.escape(name)}: write this file", said), f"{name}: {said}"


@pytest.mark.rare
@pytest.mark.parametrize(
    ("file", "before", "after", "wanted"),
    [
        (PACKAGE, "from cukern.ops.leaky_relu import *\n", "", "import the functions of cukern.ops.leaky_relu in"),
        (f"tests/specs/{STEM}.py", '"leaky_relu": Function', '"relu": Function', 'add "leaky_relu": Function('),
        (f"tests/specs/{STEM}.py", 'Bits("row", "a row", "the row"),', "", "give leaky_relu bits=Bits("),
        (f"tests/specs/{STEM}.py", '"x",', '"y",', "batch of leaky_relu names the arguments"),
        (f"tests/specs/{STEM}.py", "many_rows=[cukern.leaky_relu],", "", "give leaky_relu many_rows="),
        (f"tests/specs/{STEM}.py", "leaky_relu.activated", "leaky_relu.other", "add 'other' to TOLERANCES"),
        (f"docs/families/{STEM}.md", "| `leaky_relu` |", "| leaky |", "write one row that starts with `leaky_relu`"),
    ],
)
def test_a_missing_fact_is_named(checkout: Path, file: str, before: str, after: str, wanted: str) -> None:
    add(checkout)
    path = checkout / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    assert wanted in run_suites(checkout, "rooms", "specs")


def test_a_new_op_leaves_all_other_proofs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_record, "ROOT", checkout)

    def proofs() -> dict[str, str]:
        return {name: digest(*gpu_record.sources(name), root=checkout) for name in gpu_record.provable()}

    before = proofs()
    add(checkout)
    after = proofs()
    assert after.keys() - before.keys() == {STEM}
    assert {name for name, found in before.items() if found != after[name]} == set()
