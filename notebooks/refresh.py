"""The outputs of the cells that show files of the checkout, made again without a GPU:

    python notebooks/refresh.py [notebook ...]

Such a cell is tagged `source`, or `results` if it shows kept results of the benchmarks. It finds what it shows by name,
and needs no cell but the notebook's first and others of its kind. So only these run, and all else in the file stays as
it is: results, times and pictures of the machine that the notebook was run on.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

CELL_TIMEOUT_S = 120
# Nobody sees the pictures of a run without a GPU, so they are drawn once, and not again to cut their margins off.
_SMALL_PICTURES = f"--InlineBackend.print_figure_kwargs={ {'bbox_inches': None, 'dpi': 30} }"


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def shows_files(cell: NotebookNode) -> bool:
    return bool({"source", "results"} & {*cell.metadata.get("tags", ())})


def text(output: NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    return "\n".join(text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))


def printed(cell: NotebookNode) -> str:
    """The text of a cell's outputs. Where one stream is cut into several depends on the time."""
    return "".join(map(text, cell.outputs))


def run(path: Path, *, sources_only: bool = False) -> NotebookNode:
    """A copy of the notebook, run in its folder with the GPUs left out."""
    notebook = nbformat.read(path, as_version=4)
    if sources_only:
        first, *others = code_cells(notebook)
        notebook.cells = [first, *filter(shows_files, others)]
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=ERROR", *([] if sources_only else [_SMALL_PICTURES])],
        resources={"metadata": {"path": str(path.parent)}},
    )
    # IPython keeps its history in a folder of its own. Several notebooks run side by side, so each has one thread.
    with TemporaryDirectory() as folder:
        client.execute(env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "IPYTHONDIR": folder, "OMP_NUM_THREADS": "1"})
    return notebook


def refresh(path: Path) -> list[str]:
    """The ids of the cells whose output was not what the sources are."""
    kept = nbformat.read(path, as_version=4)
    if not any(map(shows_files, kept.cells)):
        return []
    ran = {cell.id: cell for cell in code_cells(run(path, sources_only=True))}
    stale = [cell for cell in code_cells(kept) if shows_files(cell) and printed(cell) != printed(ran[cell.id])]
    for cell in stale:
        pictures = [output for output in ran[cell.id].outputs if "image/png" in output.get("data", {})]
        told = "".join(output.text for output in ran[cell.id].outputs if output.output_type == "stream")
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=told), *pictures]
    if stale:
        nbformat.write(kept, path)
    return [cell.id for cell in stale]


def told(path: Path) -> tuple[str, bool]:
    """What `refresh` did, and whether it could."""
    try:
        return ", ".join(refresh(path)) or "equal to the sources", True
    except CellExecutionError as error:
        return f"{error.ename}: {error.evalue}", False


def main() -> int:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or sorted(Path(__file__).resolve().parent.glob("*.ipynb"))
    done = True
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, (what, could) in zip(paths, pool.map(told, paths), strict=True):
            print(f"{path.stem:20} {what}")
            done &= could
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
