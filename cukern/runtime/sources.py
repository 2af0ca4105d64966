"""The files of `cuda_src`: their text, and their includes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the sources are inside the package, in a checkout beside it.
CUDA_SRC = _PACKAGE / "cuda_src" if (_PACKAGE / "cuda_src").is_dir() else _PACKAGE.parent / "cuda_src"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


@functools.cache
def source(file: str) -> str:
    """Return the text of a template for NVRTC, whose messages cite the file in `cuda_src`."""
    return f'#line 1 "{file}.cu"\n{(CUDA_SRC / f"{file}.cu").read_text()}'


def quoted_includes(source: str) -> list[str]:
    """Return the files of `cuda_src` that a source includes, in order."""
    return [quoted for quoted, _ in _INCLUDE.findall(source) if quoted]


def included(files: Iterable[Path], root: Path) -> tuple[list[Path], list[str]]:
    """Find the files that `files` include, directly or through others.

    Returns `files` and the included files below `root`, where quoted includes start; and the names of CUDA's headers.
    """
    found, headers = list(files), set()
    for file in found:
        for quoted, bracketed in _INCLUDE.findall(file.read_text()):
            path = root / quoted
            if bracketed:
                headers.add(bracketed)
            elif path not in found and path.is_file():  # NVRTC reports a missing file
                found.append(path)
    return found, sorted(headers)
