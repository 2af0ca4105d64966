"""Find errors in a built site: dead links, and public names without an entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.util.inventory import InventoryFile


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.targets.append(value)


def problems(html: Path) -> list[str]:
    pages = {}
    for path in html.rglob("*.html"):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        for target in dict.fromkeys(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not file.exists():
                found.append(f"{path.relative_to(html)} links to {target}, which is not there")
            elif anchor and file in pages and anchor not in pages[file].anchors:
                found.append(f"{path.relative_to(html)} links to {target}, a place that is not there")
    return found


def missing(inventory: Path, names: Iterable[str]) -> list[str]:
    with inventory.open("rb") as file:
        # Only names on no page are found here. For a name on several pages, Sphinx gives a warning, which fails the
        # build.
        data = InventoryFile.load(file, "", lambda base, path: path)
    objects = {name for kind in ("py:function", "py:class", "py:exception") for name in data.get(kind, {})}
    count = Counter(name.removeprefix("cukern.") for name in objects)
    return [f"cukern.{name} is in no page" for name in names if not count[name]]
