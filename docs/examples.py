"""Run the examples of the pages and store their outputs: `make pages`.

The Python blocks of a page share their names. A `console` block has commands of cukern after `$`. A Python block that
begins with `# on a GPU` runs only on a machine with a GPU.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from cukern import __main__ as command_line
from cukern import compat
from cukern.runtime import kernel

ROOT = Path(__file__).resolve().parents[1]
ON_A_GPU = "# on a GPU"
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(\n```text\n.*?^```\n)?", re.MULTILINE | re.DOTALL)
_TERMINAL = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def has_any(text: str) -> bool:
    return _BLOCK.search(text) is not None


def without_output(text: str) -> list[str]:
    return [code for kind, code, output in _BLOCK.findall(text) if kind == "python" and not output]


def with_outputs(text: str) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(found: re.Match[str]) -> str:
        kind, code, _ = found.groups()
        if kind == "console":
            return f"```console\n{''.join(_commands(code))}```\n"
        if code.startswith(ON_A_GPU) and not kernel.device_count():
            return found[0]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, "a page", "exec"), names)
        output = f"\n```text\n{said.getvalue()}```\n" if said.getvalue() else ""
        return f"```python\n{code}```\n{output}"

    # With an empty cache, `explain` prints what a new user sees: the registers are not known.
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, _TERMINAL | {"CUKERN_CACHE_DIR": folder}):
        try:
            return _BLOCK.sub(run, text)
        finally:
            compat.disable()


def _commands(code: str) -> Iterator[str]:
    for line in code.splitlines(keepends=True):
        if line.startswith("$ "):
            program, *arguments = shlex.split(line[2:])
            assert program == "cukern", f"an example runs {program}"
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
                command_line.main(arguments)
            yield line + said.getvalue()


def main(names: Sequence[str]) -> None:
    """Write the generated parts of the named pages, or of all pages."""
    # Import here, because these modules need nbformat and Sphinx, which a GPU machine may lack.
    from docs import family_pages
    from docs import pages as source_pages

    for page in [ROOT / name for name in names] or pages():
        text = page.read_text(encoding="utf-8")
        if page.parent.name == "families":
            text = family_pages.with_sections(text, page.stem)
        text = source_pages.with_sizes(source_pages.with_bits(text))
        page.write_text(with_outputs(text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
