"""The commands of `cukern`, one module each."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc
from cukern.runtime.nvrtc import Resources as Resources
from cukern.runtime.nvrtc import resources as resources

INSTALL = 'pip install "cukern[cuda13]"'


class UserError(Exception):
    """An error in the user's input. The message is one line."""


def console(width: int | None = None) -> Any:
    """Return a console on stdout that does not break table cells.

    A wide table is split into tables that repeat the first column. A table with a folding column is printed whole, and
    the text of this column wraps between words.
    """
    from rich.console import Console
    from rich.table import Table

    class Whole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            if len(objects) == 1 and isinstance(objects[0], Table):
                objects = (*_parts(self, objects[0]),)
            for each in objects or ("",):
                super().print(each, **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Whole(highlight=False, width=width)


def _parts(console: Any, table: Any) -> Iterator[Any]:
    """Yield the table if it fits, otherwise narrower tables with some of its columns."""
    if not table.columns or any(column.overflow == "fold" for column in table.columns):
        yield table
        return
    wide = console.options.update(width=1 << 16)

    def of(columns: list[Any]) -> Any:
        part = copy.copy(table)
        part.columns = [replace(column, _index=i, no_wrap=True) for i, column in enumerate(columns)]
        return part

    first, *rest = table.columns
    while rest:
        count = len(rest)
        while count > 1 and console.measure(of([first, *rest[:count]]), options=wide).maximum > console.width:
            count -= 1
        yield of([first, *rest[:count]])
        rest = rest[count:]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to `path` at the end, or removed after an exception.

    Raises UserError if the file cannot be written.
    """
    # A device or a pipe is written directly, because no file can replace it.
    whole = not path.exists() or path.is_file()
    target = path.resolve()
    temporary = target.with_name(f".{os.getpid()}-{target.name}") if whole else path
    try:
        yield temporary
        if whole:
            temporary.replace(target)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    finally:
        if whole:
            temporary.unlink(missing_ok=True)


def is_hub_id(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def no_directory(option: str, path: Path) -> UserError:
    if is_hub_id(str(path)):
        fetch = f"hf download {path} --local-dir {path.name}"
        return UserError(f"{option}: {path} is no directory here; download it first: `{fetch}`")
    return UserError(f"{option}: {path} is no directory")


def check_device(device: str | None) -> None:
    """Raise UserError for a device that torch lacks here or cukern does not support."""
    import torch

    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu, cuda or cuda:N, got {device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device} needs a GPU, and torch {torch.__version__} finds none (`cukern doctor`)")


def refusal(arch: str) -> str | None:
    """Return why NVRTC cannot compile for `arch`, or None."""
    try:
        nvrtc.compile_cubin("template <int N> __global__ void probe() {}", "probe.cu", "probe<0>", [f"-arch=sm_{arch}"])
    except RuntimeError as error:
        return str(error).splitlines()[-1]
    return None


def require_nvrtc() -> None:
    if reason := compiler.available():
        raise UserError(f"NVRTC cannot be used ({reason.splitlines()[0]}): {INSTALL}")
    try:
        compiler.cuda_include_directory()
    except RuntimeError as error:
        raise UserError(str(error)) from None
