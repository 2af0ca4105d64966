"""Configure Sphinx, which `python -m docs` runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cukern  # noqa: E402
from docs.docstrings import signature, to_rst  # noqa: E402

project = "cukern"
copyright = "the cukern authors, Apache-2.0"
version = release = cukern.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
html_theme = "furo"
html_title = f"cukern {release}"
html_show_sourcelink = False
html_use_index = False  # the families' pages list every name
html_static_path = ["static"]
html_css_files = ["site.css"]

nb_execution_mode = "off"  # the notebooks keep their stored outputs, from an H200
nb_number_source_lines = False
myst_enable_extensions = ["colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
# Suppress the warning that the first headings of a notebook are two levels apart.
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]

autodoc_member_order = "bysource"
maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = "$ "


def setup(app: Any) -> None:
    def convert(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
        lines[:] = to_rst(lines)

    def sign(app: Any, what: str, name: str, thing: Any, options: Any, *_: Any) -> tuple[str, str | None] | None:
        return signature(thing) if what == "function" else None

    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", sign)
