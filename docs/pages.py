"""Generate the sources of the site from this folder, docstrings, results, the GPU record and the stored notebooks."""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import io
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from PIL import Image

import cukern
from benchmarks import report
from cukern.__main__ import COMMANDS
from docs import support
from tests.specs import FUNCTIONS

ROOT = Path(__file__).resolve().parents[1]
DOCS = Path(__file__).resolve().parent
FAMILIES = sorted(path.stem for path in (DOCS / "families").glob("*.md"))
#: The name of a function or class in the first cell of a family's table.
FIRST_CELL = re.compile(r"^\| `(?:cukern\.models\.)?(\w+)` \|", re.MULTILINE)
SOURCES = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1] + "/blob/main"  # type: ignore[index]
#: The public names that belong to no family.
TOOLS = ("explain", "specialize", "CompileError", "PerformanceWarning")
_THUMBNAIL = 480, 300
#: Libraries whose functions are not in `cukern.compat`.
_OTHERS = ("FasterTransformer", "DeepGEMM", "DeepEP", "transformers", "torch")


def write(folder: Path) -> None:
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copytree(report.RESULTS, folder / "results")
    shutil.copy(ROOT / "CHANGELOG.md", folder / "changelog.md")
    _write_notebooks(folder / "notebooks")
    contents = [report.load(path) for path in sorted(report.RESULTS.glob("*.json"), key=lambda path: path.stem)]
    measured = _write_benchmarks(folder / "benchmarks", contents)
    for page in sorted(DOCS.rglob("*.md")):
        copy = folder / page.relative_to(DOCS)
        text = _with_site_links(page, measured)
        copy.write_text(_family(text, page.stem) if page.parent.name == "families" else text, encoding="utf-8")
    _write_index(folder / "families")
    titles = {stem: _title(DOCS / "families" / f"{stem}.md") for stem in FAMILIES}
    _append(folder / "index.md", _toctrees())
    _append(folder / "tools.md", "".join(_directive(f"cukern.{name}", getattr(cukern, name)) for name in TOOLS))
    _append(folder / "differences.md", _counterparts())
    _append(folder / "support.md", support.tables(titles))
    _append(folder / "cli.md", _commands())


def _append(page: Path, text: str) -> None:
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{text}", encoding="utf-8")


def _toctrees() -> str:
    """Return a hidden table of contents for each section of the first page."""
    index = DOCS / "index.md"
    _, *sections = re.split(r"^## ", index.read_text(encoding="utf-8"), flags=re.MULTILINE)
    trees = []
    for section in sections:
        links = re.findall(r"^- \[[^]]*\]\(([^)]*)\)", section, re.MULTILINE)
        trees.append(_toctree([site_link(index, x).removesuffix(".md") for x in links], section.split("\n")[0]))
    return "\n".join(trees)


def site_link(page: Path, target: str, measured: Collection[str] = ()) -> str:
    """Return the site's target for a page's link to a file. `measured` holds the families with a page of benchmarks."""
    path, _, anchor = target.partition("#")
    if not path or "://" in path:
        return target
    file = Path(os.path.normpath(page.parent / path))
    if file == DOCS / "families":
        return f"{path}index.md"
    if file.is_relative_to(DOCS):
        return target
    inside = file.relative_to(ROOT).as_posix()
    own = page.stem if page.parent.name == "families" and page.stem in measured else "index"
    moved = {
        "notebooks": "notebooks/index.md",
        "CHANGELOG.md": "changelog.md",
        "benchmarks/RESULTS.md": f"benchmarks/{own}.md",
    }
    up = "../" * (len(page.relative_to(DOCS).parts) - 1)
    if inside in moved:
        return up + moved[inside]
    if inside.startswith(("notebooks/", "benchmarks/results/")):
        return up + inside.removeprefix("benchmarks/")
    return f"{SOURCES}/{inside}" + (f"#{anchor}" if anchor else "")


def _with_site_links(page: Path, measured: Collection[str]) -> str:
    def linked(found: re.Match[str]) -> str:
        return f"]({site_link(page, found[1], measured)})"

    return re.sub(r"\]\(([^)\s]+)\)", linked, page.read_text(encoding="utf-8"))


#: The column headings of the tables in `docs/batch_invariance.md`.
_BITS = {
    "row": ("functions", "the bits of", "depend on"),
    "copies": ("functions",),
    "batch": ("functions", "depend on"),
}


def with_bits(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        heads, names = _BITS[found[1]], dict[tuple[str, ...], list[str]]()
        for name, own in FUNCTIONS.items():
            if own.bits and own.bits.table == found[1]:
                names.setdefault(tuple(filter(None, own.bits[1:])), []).append(f"`{name}`")
        rows = [heads, ("---",) * len(heads), *((", ".join(own), *on) for on, own in names.items())]
        lines = "".join("| " + " | ".join(row) + " |\n" for row in rows)
        return f"{found[1]}{found[2]}\n{lines}"

    return re.sub(r"(?<=<!-- bits: )(\w+)( -->\n)(?:\n(?:\|[^\n]*\n)+)?", table, text)


def with_sizes(text: str) -> str:
    """Return a page with the table of the sizes that `cukern.specialize` takes."""
    rows = ["| family | sizes and their defaults | other defaults |", "| --- | --- | --- |"]
    for stem in FAMILIES:
        module = family_module(stem)
        if register := getattr(module, "specialize", None):
            sizes = ", ".join(
                str(x.replace(annotation=x.empty)) for x in inspect.signature(register).parameters.values()
            )
            others = [
                f"`{name}`: {', '.join(f'`{size}={value!r}`' for size, value in own.items())}"
                for name, own in getattr(module, "DEFAULTS", {}).items()
            ]
            title = f"[{_title(DOCS / 'families' / f'{stem}.md')}](families/{stem}.md)"
            rows.append(f"| {title} | `{sizes}` | {'; '.join(others)} |")
    table = "".join(f"{row}\n" for row in rows)
    return re.sub(r"(<!-- sizes -->\n)(?:\n(?:\|[^\n]*\n)+)?", lambda found: f"{found[1]}\n{table}", text)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")


def _toctree(entries: list[str], caption: str = "") -> str:
    options = [":hidden:", ":titlesonly:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


# --- families -------------------------------------------------------------------------------------------


def family_module(stem: str) -> Any:
    package = "cukern.ops" if importlib.util.find_spec(f"cukern.ops.{stem}") else "cukern"
    return importlib.import_module(f"{package}.{stem}")


def _family(text: str, stem: str) -> str:
    """Return a family's page with links in its table, and with docstrings instead of the signatures."""
    module = family_module(stem)
    text = FIRST_CELL.sub(lambda found: f"| {{py:obj}}`~{public_name(module, found[1])}` |", text)
    text = re.sub(r"^## Signatures\n.*?(?=^## )", "", text, flags=re.MULTILINE | re.DOTALL)
    names = sorted(public_of(module), key=lambda name: text.find(f".{name}`") % len(text))
    reference = "".join(_directive(public_name(module, name), getattr(module, name)) for name in names)
    return f"{text}\n## Reference\n{reference}"


def public_of(module: Any) -> list[str]:
    own = [name for name in module.__all__ if callable(getattr(module, name))]
    return [name for name in own if _owner(module) != "cukern" or name in cukern.__all__]


def _owner(module: Any) -> str:
    return "cukern" if module.__name__ not in ("cukern.models", "cukern.fused_moe") else module.__name__


def public_name(module: Any, name: str) -> str:
    return f"cukern.{name}" if name in cukern.__all__ else f"{_owner(module)}.{name}"


def _directive(name: str, thing: Any) -> str:
    if inspect.isclass(thing):
        kind = "autoexception" if issubclass(thing, Exception) else "autoclass"
        options = "" if kind == "autoexception" else "   :members:\n"
    else:
        kind, options = "autofunction", ""
    return f"\n```{{eval-rst}}\n.. {kind}:: {name}\n{options}```\n"


def _write_index(folder: Path) -> None:
    lines = ["# Functions by family", ""]
    for stem in FAMILIES:
        text = (folder / f"{stem}.md").read_text(encoding="utf-8")
        table = re.search(r"^\| (?:function|class) \|.*?\n\n", text, re.M | re.S)
        assert table, stem
        lines += [f"## [{_title(folder / f'{stem}.md')}]({stem}.md)", "", table[0].rstrip(), ""]
    (folder / "index.md").write_text("\n".join([*lines, _toctree(FAMILIES)]), encoding="utf-8")


def _reference(name: str) -> str:
    return f"~cukern.{name}" if name in cukern.__all__ else f"~cukern.models.{name}"


def _counterparts() -> str:
    """Return the tables of cukern's counterparts to functions of libraries that are not in `cukern.compat`."""
    text = [
        "\n## FasterTransformer, DeepGEMM and others\n",
        "These have no module in `cukern.compat`, and their functions take arguments of another kind: kernels of C++,",
        "objects that hold buffers. The page of each function says what its arguments are.\n",
    ]
    rows = []
    for stem in FAMILIES:
        table = (DOCS / "families" / f"{stem}.md").read_text(encoding="utf-8")
        rows += re.findall(rf"{FIRST_CELL.pattern} (.*) \| (.*) \|$", table, re.M)
    for library in _OTHERS:
        own = [row for row in rows if library in row[2]]
        lines = [f"| {{py:obj}}`{_reference(name)}` | {upstream} | {what} |" for name, what, upstream in own]
        text += [f"### {library}\n", "| function | there | what it does |", "| --- | --- | --- |", *lines, ""]
    return "\n".join(text)


# --- notebooks ------------------------------------------------------------------------------------------


def _write_notebooks(folder: Path) -> dict[str, str]:
    """Copy the stored notebooks and write the gallery. Return their titles."""
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
    """Write a notebook's first picture as a thumbnail. Return its path, or ""."""
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
    """Return the x coordinate of the widest white gap between panels, or the maximum width of a thumbnail."""
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
        if op in family_module(stem).__all__:
            return stem
    return ""


def _write_benchmarks(folder: Path, contents: list[report.Document]) -> dict[str, str]:
    """Write a page of results for each family, and the index. Return the titles of the measured families."""
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
    """Return the `--help` of each command."""
    from cukern.__main__ import _parser

    text = []
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
