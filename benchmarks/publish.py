"""Write results files, `RESULTS.md` and the plots."""

from __future__ import annotations

from pathlib import Path

from benchmarks import plots
from benchmarks.report import RESULTS, Document, file_name, introduction, load, merge, of_op, save


def write(content: Document, folder: Path | None = None) -> list[Path]:
    """Merge a run into the file of its GPU, and rewrite `RESULTS.md` and the plots. Return the written files."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(content["gpu"])
    save(merge(load(path), content) if path.exists() else content, path)
    return [path, *render(folder)]


def render(folder: Path) -> list[Path]:
    """Write `RESULTS.md` beside `folder`, and the plots into `folder`, from its results files."""
    contents = {path: load(path) for path in sorted(folder.glob("*.json"), key=lambda path: path.stem)}
    written = [path for content in contents.values() for path in plots.draw_all(content, folder)]
    text = [introduction([*contents.values()], folder.name, folder)]
    for content in contents.values():
        text.append(f"## {content['gpu']}: all cases\n")
        for op in dict.fromkeys(row["op"] for row in content["rows"]):
            text += [f"### {op}\n", *of_op(content, op, folder.name, folder)]
    results = folder.parent / "RESULTS.md"
    results.write_text("\n".join(text))
    return [results, *written]
