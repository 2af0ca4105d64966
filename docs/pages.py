"""The sources of the site, put together from the pages of this folder and from what the repository keeps.

Functions come from their docstrings, figures from the files of results, what is proved from the GPU record, and
notebooks as they are kept.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import io
import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from PIL import Image

import cukern
from benchmarks import report
from cukern.__main__ import COMMANDS
from docs import support
from tests.specs import FUNCTIONS, SPECS

ROOT = Path(__file__).resolve().parents[1]
DOCS = Path(__file__).resolve().parent
#: The families: each has a page and a spec.
FAMILIES = sorted(path.stem for path in (DOCS / "families").glob("*.md"))
#: The public names that no family has.
TOOLS = ("explain", "specialize", "CompileError")
_THUMBNAIL = 480, 300
#: Libraries whose functions are not in `cukern.compat`.
_OTHERS = ("FasterTransformer", "DeepGEMM", "DeepEP", "FlashAttention", "transformers", "torch")


def write(folder: Path) -> None:
    """Write all sources of the site into `folder`."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    _share_readme(folder)
    shutil.copytree(report.RESULTS, folder / "results")
    shutil.copy(ROOT / "CHANGELOG.md", folder / "changelog.md")
    titles = _write_notebooks(folder / "notebooks")
    contents = [report.load(path) for path in sorted(report.RESULTS.glob("*.json"), key=lambda path: path.stem)]
    measured = _write_benchmarks(folder / "benchmarks", contents)
    for stem in FAMILIES:
        _write_family(folder / "families" / f"{stem}.md", stem, titles, measured)
    _write_index(folder / "families")
    with (folder / "differences.md").open("a", encoding="utf-8") as page:
        page.write(_counterparts())
    of_families = {stem: _title(DOCS / "families" / f"{stem}.md") for stem in FAMILIES}
    (folder / "support.md").write_text(support.page(of_families), encoding="utf-8")
    page = folder / "batch_invariance.md"
    page.write_text(with_bits(page.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / "cli.md").write_text(_commands(), encoding="utf-8")


def _share_readme(folder: Path) -> None:
    """Put sections of the README, each up to the next heading, where pages name them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in folder.rglob("*.md"):
        text = path.read_text(encoding="utf-8")
        for marker, heading in re.findall(r"(<!-- README: (.*) -->)", text):
            found = re.search(rf"^#+ {re.escape(heading)}\n\n(.*?)(?=^#+ \w)", readme, re.M | re.S)
            assert found, f"{path} names a section of README.md that is not there: {heading}"
            shared = found[1].strip().replace("](notebooks/", "](../notebooks/").replace("](docs/", "](../")
            path.write_text(text.replace(marker, shared), encoding="utf-8")


#: The heads of the tables of batch invariance.
_BITS = {
    "row": ("functions", "the bits of", "depend on"),
    "copies": ("functions",),
    "batch": ("functions", "depend on"),
}


def with_bits(text: str) -> str:
    """The page of batch invariance with its tables, which the specs of the families hold."""

    def table(found: re.Match[str]) -> str:
        heads, names = _BITS[found[1]], dict[tuple[str, ...], list[str]]()
        for name, own in FUNCTIONS.items():
            if own.bits and own.bits.table == found[1]:
                names.setdefault(tuple(filter(None, own.bits[1:])), []).append(f"`{name}`")
        rows = [heads, ("---",) * len(heads), *((", ".join(own), *on) for on, own in names.items())]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    return re.sub(r"<!-- bits: (\w+) -->", table, text)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def _toctree(entries: list[str], caption: str = "") -> str:
    options = [":hidden:", ":titlesonly:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


# --- families -------------------------------------------------------------------------------------------


def _module(stem: str) -> Any:
    package = "cukern.ops" if importlib.util.find_spec(f"cukern.ops.{stem}") else "cukern"
    return importlib.import_module(f"{package}.{stem}")


def _write_family(path: Path, stem: str, titles: dict[str, str], measured: dict[str, str]) -> None:
    """Complete a family's page: links in its table, then notebooks, benchmarks and the functions."""
    text = path.read_text(encoding="utf-8")
    module = _module(stem)
    text = re.sub(
        r"^\| `(?:cukern\.models\.)?(\w+)` \|",
        lambda found: f"| {{py:obj}}`~{_public(module, found[1])}` |",
        text,
        flags=re.M,
    )
    further = [f"the notebook [{titles[name]}](../notebooks/{name}.ipynb)" for name in SPECS[stem].notebooks or [stem]]
    if stem in measured:
        further.append(f"[the benchmarks](../benchmarks/{stem}.md)")
    text += f"\nFurther: {', '.join(further)}; [what is supported where](../support.md).\n\n## Reference\n"
    # In the order of the table, then the others.
    for name in sorted(module.__all__, key=lambda name: text.find(f".{name}`") % len(text)):
        thing = getattr(module, name)
        if not callable(thing) or (_owner(module) == "cukern" and name not in cukern.__all__):
            continue
        text += _directive(_public(module, name), thing)
    path.write_text(text, encoding="utf-8")


def _owner(module: Any) -> str:
    """Where users find a family's functions."""
    return "cukern" if module.__name__ not in ("cukern.models", "cukern.fused_moe") else module.__name__


def _public(module: Any, name: str) -> str:
    """The name by which users call what a family has."""
    return f"cukern.{name}" if name in cukern.__all__ else f"{_owner(module)}.{name}"


def _directive(name: str, thing: Any) -> str:
    """autodoc's directive for a function or class."""
    if inspect.isclass(thing):
        kind = "autoexception" if issubclass(thing, Exception) else "autoclass"
        options = "" if kind == "autoexception" else "   :members:\n"
    else:
        kind, options = "autofunction", ""
    return f"\n```{{eval-rst}}\n.. {kind}:: {name}\n{options}```\n"


def _write_index(folder: Path) -> None:
    """The page of all functions, by family, and that of the tools."""
    lines = ["# Functions by family", ""]
    for stem in FAMILIES:
        text = (folder / f"{stem}.md").read_text(encoding="utf-8")
        table = re.search(r"^\| (?:function|class) \|.*?\n\n", text, re.M | re.S)
        assert table, stem
        lines += [f"## [{_title(folder / f'{stem}.md')}]({stem}.md)", "", table[0].rstrip(), ""]
    lines += ["## [Tools](tools.md)", "", "What a call does, sizes of your own, errors of the compiler.", ""]
    (folder / "index.md").write_text("\n".join([*lines, _toctree([*FAMILIES, "tools"])]), encoding="utf-8")
    text = "# Tools\n" + "".join(_directive(f"cukern.{name}", getattr(cukern, name)) for name in TOOLS)
    (folder / "tools.md").write_text(text, encoding="utf-8")


def _reference(name: str) -> str:
    return f"~cukern.{name}" if name in cukern.__all__ else f"~cukern.models.{name}"


def _counterparts() -> str:
    """The functions that stand for those of libraries without a module in `cukern.compat`, by the families' tables."""
    text = [
        "\n## FasterTransformer, DeepGEMM and others\n",
        "These have no module in `cukern.compat`, and their functions take arguments of another kind: kernels of C++,",
        "objects that hold buffers. The page of each function says what its arguments are.\n",
    ]
    rows = []
    for stem in FAMILIES:
        table = (DOCS / "families" / f"{stem}.md").read_text(encoding="utf-8")
        rows += re.findall(r"^\| `(?:cukern\.models\.)?(\w+)` \| (.*) \| (.*) \|$", table, re.M)
    for library in _OTHERS:
        own = [row for row in rows if library in row[2]]
        lines = [f"| {{py:obj}}`{_reference(name)}` | {upstream} | {what} |" for name, what, upstream in own]
        text += [f"### {library}\n", "| function | there | what it does |", "| --- | --- | --- |", *lines, ""]
    return "\n".join(text)


# --- notebooks ------------------------------------------------------------------------------------------


def _write_notebooks(folder: Path) -> dict[str, str]:
    """Copy the notebooks as they are kept and make the gallery; their titles."""
    (folder / "thumbnails").mkdir(parents=True)
    titles, cards = {}, []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        shutil.copy(path, folder)
        first = notebook.cells[0].source.split("\n\n")
        titles[path.stem] = first[0].removeprefix("# ").strip()
        cards.append(_card(path.stem, titles[path.stem], first[1], _thumbnail(notebook, folder, path.stem)))
    introduction = (
        "Each notebook teaches one family of kernels: the problem, the formula in NumPy, a drawing of who computes\n"
        "what, the template part by part, one element followed through every stage, and the speed. The outputs are\n"
        "those that were kept, of an NVIDIA H200.\n"
    )
    grid = ["::::{grid} 1 2 2 3", ":gutter: 3", "", *cards, "::::", ""]
    text = "\n".join(["# Notebooks", "", introduction, *grid, _toctree(list(titles))])
    (folder / "index.md").write_text(text, encoding="utf-8")
    return titles


def _card(stem: str, title: str, paragraph: str, image: str) -> str:
    sentence = re.split(r"(?<=[.:?])\s", paragraph.replace("\n", " "))[0].rstrip(":")
    lines = [f":::{{grid-item-card}} {title}", f":link: {stem}", ":link-type: doc"]
    return "\n".join([*lines, *([f":img-top: {image}"] if image else []), "", sentence, ":::"])


def _thumbnail(notebook: Any, folder: Path, stem: str) -> str:
    """The first picture of a notebook, small; its path from the folder of the notebooks."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if encoded := output.get("data", {}).get("image/png"):
                picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
                picture = picture.crop((0, 0, _end_of_panel(picture), picture.height))
                picture.thumbnail(_THUMBNAIL)
                whole = Image.new("RGB", _THUMBNAIL, "white")
                whole.paste(picture, tuple((a - b) // 2 for a, b in zip(_THUMBNAIL, picture.size, strict=True)))
                whole.save(folder / "thumbnails" / f"{stem}.png")
                return f"thumbnails/{stem}.png"
    return ""


def _end_of_panel(picture: Image.Image) -> int:
    """Where the left part of a wide picture ends: all of it would be too small to be seen.

    At the widest gap between panels, if there is one that is white from top to bottom.
    """
    most = int(1.9 * picture.height)
    if picture.width <= most:
        return picture.width
    white = (np.asarray(picture).min((0, 2)) > 250).astype(np.int8)
    first = picture.height
    edges = np.flatnonzero(np.diff(white[first:most], prepend=0, append=0)) + first
    gaps = [(end - begin, begin) for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)]
    return max(gaps)[1] if gaps else most


# --- benchmarks -----------------------------------------------------------------------------------------


def family_of(op: str) -> str:
    for stem in FAMILIES:
        if op in _module(stem).__all__:
            return stem
    return ""


def _write_benchmarks(folder: Path, contents: list[report.Document]) -> dict[str, str]:
    """A page of results for each family, and the one before them; the titles of the families measured."""
    folder.mkdir()
    ops = dict.fromkeys(row["op"] for content in contents for row in content["rows"])
    by_family: dict[str, list[str]] = {}
    for op in ops:
        by_family.setdefault(family_of(op), []).append(op)
    measured = {}
    for stem in FAMILIES:
        if stem not in by_family:
            continue
        measured[stem] = _title(DOCS / "families" / f"{stem}.md")
        text = [
            f"# {measured[stem]}: times",
            "",
            f"The functions are those of [{measured[stem]}](../families/{stem}.md).",
            "",
        ]
        for op in by_family[stem]:
            text += [f"## {op}", ""]
            for content in contents:
                if op not in content["ops"]:
                    continue
                text += report.of_op(content, op, f"../{report.RESULTS.name}")
        (folder / f"{stem}.md").write_text("\n".join(text), encoding="utf-8")
    introduction = report.introduction(contents, f"../{report.RESULTS.name}").replace("# Results", "# Benchmarks", 1)
    # Each function's name leads to all that was measured of it.
    introduction = re.sub(
        r"^\| (\w+) \|",
        lambda found: (
            f"| [{found[1]}]({family_of(found[1])}.md#{found[1].lower()}) |" if family_of(found[1]) else found[0]
        ),
        introduction,
        flags=re.M,
    )
    text = [introduction, "## By family", ""]
    text += [f"- [{title}]({stem}.md)" for stem, title in measured.items()]
    (folder / "index.md").write_text("\n".join([*text, "", _toctree(list(measured))]), encoding="utf-8")
    return measured


# --- the command line -----------------------------------------------------------------------------------


def _commands() -> str:
    """The commands, by their `--help`."""
    from cukern.__main__ import _parser

    text = ["# Command line", "", "`cukern` and `python -m cukern` are the same command.", ""]
    for name, (_, summary) in COMMANDS.items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            _parser(name).parse_args([name, "--help"])
        usage = re.sub(r"usage: .*? " + name, f"usage: cukern {name}", said.getvalue(), count=1)
        text += [
            f"## cukern {name}",
            "",
            f"{summary[0].upper()}{summary[1:]}.",
            "",
            "```text",
            usage.rstrip(),
            "```",
            "",
        ]
    return "\n".join(text)
