"""The notebooks: that they run on a machine with no GPU, and that what they keep is fit to be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from notebooks import names
from notebooks.refresh import code_cells, printed, run, shows_files, text

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 2 * 2**20
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|tmp|usr|opt|mnt|var|work|Users)/")
LINE_NUMBER = re.compile(r"^ *\d+  ")

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _shows(cell: NotebookNode) -> set[str]:
    """What kinds of output a cell has: text, and each kind of image."""
    kinds: set[str] = set()
    for output in cell.outputs:
        kinds.update(output.get("data", {"text": ""}))
    return {kind if kind.startswith("image/") else "text" for kind in kinds}


def _check_outputs(notebook: NotebookNode) -> None:
    """Every cell ran, once and in order, and none complained or told of the machine."""
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run `make notebooks OPS=...`, which keeps the outputs"
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", f"{cell.id}: {output.ename}: {output.evalue}"
            assert output.get("name") != "stderr", f"{cell.id} wrote to stderr: {output.text}"
            shown = text(output)
            assert "Warning:" not in shown, f"{cell.id} warns: {shown}"
            found = MACHINE_PATH.search(shown)
            assert found is None, f"{cell.id} prints a path of the machine: {found}"


def test_there_are_notebooks() -> None:
    # The tests below run over this list: an empty one would pass them all.
    assert NOTEBOOKS


@notebooks
def test_a_notebook_is_well_formed(path: Path) -> None:
    assert path.stat().st_size <= MAX_BYTES
    # `nbformat.read` would give ids to cells that have none.
    ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
    assert len(set(ids)) == len(ids)
    notebook: Any = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)


@notebooks
def test_the_notebook_of_a_stem_links_to_its_other_lessons(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0].source
    assert not [name for name in names.of_stem(path.stem)[1:] if f"]({name}.ipynb)" not in first]


@notebooks
def test_the_kept_outputs_are_those_of_one_clean_run(path: Path) -> None:
    _check_outputs(nbformat.read(path, as_version=4))


def _runs_of_three(lines: list[str]) -> set[tuple[str, ...]]:
    """Each three lines with something in them that follow one another, of 30 characters at least."""
    lines = [line.strip() for line in lines if line.strip()]
    return {three for three in zip(lines, lines[1:], lines[2:], strict=False) if sum(map(len, three)) >= 30}


@pytest.fixture(scope="module")
def of_sources() -> set[tuple[str, ...]]:
    files = [path for room in ("cuda_src", "cukern") for path in (ROOT / room).rglob("*.*") if path.suffix != ".pyc"]
    return set().union(*(_runs_of_three(path.read_text().splitlines()) for path in files if path.is_file()))


@notebooks
def test_a_cell_that_shows_files_says_so(path: Path, of_sources: set[tuple[str, ...]]) -> None:
    # Without its tag, its output would go stale and nothing would tell.
    for cell in code_cells(nbformat.read(path, as_version=4)):
        if "source" in cell.metadata.get("tags", ()):
            assert {output.output_type for output in cell.outputs} <= {"stream"}, f"{cell.id} shows more than sources"
        if shows_files(cell):
            continue
        shown = _runs_of_three([LINE_NUMBER.sub("", line) for line in printed(cell).splitlines()])
        lines = next(iter(shown & of_sources), None)
        assert lines is None, f"{cell.id} shows sources: tag it `source`, and move the rest into another cell"
        assert "getsource" not in cell.source, f"{cell.id} shows sources: tag it `source`"


@pytest.mark.rare
@notebooks
def test_a_notebook_runs_without_a_gpu(path: Path) -> None:
    kept, ran = nbformat.read(path, as_version=4), run(path)
    _check_outputs(ran)
    assert len(nbformat.writes(ran)) <= MAX_BYTES
    for now, cell in zip(code_cells(ran), code_cells(kept), strict=True):
        # On a GPU a cell may show more, but what shows something here must show it there.
        assert _shows(now) <= _shows(cell), f"{cell.id} has lost its output: run `make notebooks`"
        if shows_files(cell):
            assert printed(now) == printed(cell), f"{cell.id} does not show the sources: run `make notebooks SOURCES=1`"
