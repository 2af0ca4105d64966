"""The code that commands share if they run a model on a file of texts: arguments, reading lines, and errors."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cukern.commands import UserError, check_device, no_directory
from cukern.models._layers import DTYPES
from cukern.models.checkpoint import LIBRARIES
from cukern.runtime import kernel


def add_arguments(
    parser: argparse.ArgumentParser, model: str, output: str, metavar: str = "FILE", *, batch_size: int | None = None
) -> None:
    """Declare the arguments for files and the device. `model` and `output` are help texts.

    `batch_size` is the default of the option `--batch-size`; None: `Encoder.embed` chooses.
    """
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help=model)
    add("--input", type=Path, required=True, metavar="FILE", help="the texts, UTF-8, one on each line")
    add("--output", type=Path, metavar=metavar, help=output)
    default = batch_size or "as many as keep a GPU busy"
    add("--batch-size", type=int, default=batch_size, metavar="N", help=f"texts at once (default: {default})")
    add("--library", choices=LIBRARIES, help="default: torch where it is installed, else cupy where there is a GPU")
    add("--device", metavar="NAME", help="of torch, such as cpu (default: cuda where there is one); of cupy an index")
    add("--dtype", choices=DTYPES, help="of the weights (default: the file's)")


def placed(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments `library`, `device` and `dtype` of `from_directory`. Raises UserError if one is invalid."""
    if not args.model.is_dir() and not args.model.exists():
        raise no_directory("--model", args.model)
    if args.batch_size is not None and args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {args.batch_size}")
    device = args.device
    if args.library == "cupy":
        if not (count := kernel.device_count()):
            raise UserError("--library cupy needs a GPU and CuPy, and there is no GPU here (`cukern doctor` says why)")
        if device is not None and not (device.isdecimal() and int(device) < count):
            raise UserError(f"--device must be the index of a GPU below {count} with --library cupy, got {device}")
        device = None if device is None else int(device)
    elif device is not None and args.library != "numpy":
        with refusing():
            check_device(device)
    return {"library": args.library, "device": device, "dtype": args.dtype}


def read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    if lines[-1] == "":
        # After the last newline.
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def check_output(path: Path | None, suffix: str = "") -> None:
    """Raise UserError if an output file cannot be written. Commands check this before they compute."""
    if path is None:
        return
    if not path.name.endswith(suffix):
        raise UserError(f"--output must end in {suffix}, got {path}")
    if not path.parent.is_dir():
        raise UserError(f"--output: the folder {path.parent} does not exist")
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Convert the models' errors and out-of-memory errors to UserError."""
    try:
        yield
    except (OSError, ImportError, TypeError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(str(error) or type(error).__name__) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's class
            raise
        raise UserError(str(error)) from None
