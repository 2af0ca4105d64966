"""`python -m docs`: build the site into `build/docs/html`, or report errors.

The errors are warnings of Sphinx, dead links, undocumented arguments, public functions on no page, and missing tests.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

os.environ.setdefault("CUKERN_COMPILE", "lazy")

import inspect

from sphinx.cmd.build import main as sphinx

import cukern
import cukern.fused_moe
import cukern.models
from docs import links, pages
from docs.docstrings import undocumented, undocumented_methods

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "docs"


def problems_of_docstrings() -> list[str]:
    found = []
    for module in (cukern, cukern.models, cukern.fused_moe):
        for name in module.__all__:
            thing = getattr(module, name)
            of = undocumented_methods(thing) if inspect.isclass(thing) else {}
            if inspect.isfunction(thing):
                of = {"": undocumented(thing)}
            found += [(f"{module.__name__}.{name}{method}", x) for method, names in of.items() for x in names]
    return [f"{name} has an argument {x}, of which its docstring says nothing" for name, x in found]


def problems_of_tests(sources: Path) -> list[str]:
    found = []
    for page in sources.rglob("*.md"):
        for file, name in re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text()):
            path = ROOT / file
            if not path.is_file() or f"def {name}(" not in path.read_text():
                found.append(f"{page.relative_to(sources)} names {file}::{name}, which is not there")
    return found


def main() -> int:
    sources, html = BUILD / "source", BUILD / "html"
    # Delete the old build, because Sphinx does not rebuild an unchanged page when other pages change its navigation.
    shutil.rmtree(BUILD, ignore_errors=True)
    pages.write(sources)
    problems = problems_of_docstrings() + problems_of_tests(sources)
    quiet = ["-q"] if not sys.stdout.isatty() else []
    options = ["-W", "--keep-going", "-j", "2", "-c", str(ROOT / "docs"), "-d", str(BUILD / "doctrees")]
    status = sphinx([*quiet, "-b", "html", *options, str(sources), str(html)])
    if html.is_dir():
        problems += links.problems(html) + links.missing(html / "objects.inv", cukern.__all__)
    for line in problems:
        print(f"docs: {line}", file=sys.stderr)
    if status or problems:
        return 1
    print(f"the site is in {os.path.relpath(html)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
