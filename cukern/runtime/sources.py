"""Text and includes of the files of `cuda_src`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# A wheel contains the sources, a checkout has them beside the package.
CUDA_SRC = _PACKAGE / "cuda_src" if (_PACKAGE / "cuda_src").is_dir() else _PACKAGE.parent / "cuda_src"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


@functools.cache
def source(file: str) -> str:
    """Return a template's text for NVRTC, whose messages then cite the file."""
    return f'#line 1 "{file}.cu"\n{(CUDA_SRC / f"{file}.cu").read_text()}'


def quoted_includes(source: str) -> list[str]:
    return [quoted for quoted, _ in _INCLUDE.findall(source) if quoted]


def included(files: Iterable[Path], root: Path) -> tuple[list[Path], list[str]]:
    """Return `files` with all files below `root` that they include, and the names of the included CUDA headers."""
    found, headers = list(files), set()
    for file in found:
        for quoted, bracketed in _INCLUDE.findall(file.read_text()):
            path = root / quoted
            if bracketed:
                headers.add(bracketed)
            elif path not in found and path.is_file():  # NVRTC reports missing files
                found.append(path)
    return found, sorted(headers)
