"""The notebooks: that they run on a machine with no GPU, and that what they keep is fit to be read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 120
MAX_BYTES = 2 * 2**20
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|tmp|usr|opt|mnt|var|work|Users)/")

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def _text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    return "\n".join(text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def _shows(cell: NotebookNode) -> set[str]:
    """What kinds of output a cell has: text, and each kind of image."""
    kinds: set[str] = set()
    for output in cell.outputs:
        kinds.update(output.get("data", {"text": ""}))
    return {kind if kind.startswith("image/") else "text" for kind in kinds}


def _check_outputs(notebook: NotebookNode) -> None:
    """Every cell ran, once and in order, and none complained or told of the machine."""
    cells = _code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error", f"{cell.id}: {output.ename}: {output.evalue}"
            assert output.get("name") != "stderr", f"{cell.id} wrote to stderr: {output.text}"
            text = _text(output)
            assert "Warning:" not in text, f"{cell.id} warns: {text}"
            found = MACHINE_PATH.search(text)
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
def test_the_kept_outputs_are_those_of_one_clean_run(path: Path) -> None:
    _check_outputs(nbformat.read(path, as_version=4))


@notebooks
def test_a_notebook_runs_without_a_gpu(path: Path, tmp_path: Path) -> None:
    kept, copy = (nbformat.read(path, as_version=4) for _ in range(2))
    for cell in _code_cells(copy):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        copy, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    # A GPU, if there is one, is left out; IPython keeps its history in a folder of its own.
    client.execute(env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "IPYTHONDIR": str(tmp_path)})
    _check_outputs(copy)
    assert len(nbformat.writes(copy)) <= MAX_BYTES
    # On a GPU a cell may show more, but what shows something here must show it there.
    for ran, cell in zip(_code_cells(copy), _code_cells(kept), strict=True):
        assert _shows(ran) <= _shows(cell), f"{cell.id} has lost its output: run `make notebooks`"
