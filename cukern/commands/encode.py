"""`cukern encode`: one vector for each text of a file, by a model in a directory."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.commands import UserError

_SHOWN = 5
_BATCH_SIZE = 32
_DTYPES = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="the directory of a model of the BERT family, as transformers or sentence-transformers write it",
    )
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="the texts, UTF-8, one on each line")
    parser.add_argument("--output", type=Path, metavar="FILE.npy", help="where to keep the vectors, float32")
    parser.add_argument(
        "--batch-size", type=int, default=_BATCH_SIZE, metavar="N", help=f"texts at once (default: {_BATCH_SIZE})"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: the file's)")
    parser.epilog = (
        "The vectors are pooled and normalized as the model's modules.json says; without one, they are normalized\n"
        "means. An empty line is an empty text. Of a text that is too long the first tokens count, and that is said."
    )


def _texts(path: Path) -> list[str]:
    """The lines of a file. Raises UserError where they cannot be read, or there are none."""
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise UserError(f"{path}: there are no texts")
    return [line.removesuffix("\r") for line in lines]


def _check_output(path: Path) -> None:
    """Raises UserError where the vectors could not be kept, before any are made."""
    if path.suffix != ".npy":
        raise UserError(f"--output must end in .npy, got {path}")
    if not path.parent.is_dir():
        raise UserError(f"--output: the folder {path.parent} does not exist")
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder")


def _nearest(vectors: NDArray[Any], shown: int) -> list[tuple[int, float]]:
    """The other text that is nearest to each of the first ones, and the cosine of the two."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = unit[:shown] @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    best = cosines.argmax(1)
    return [(int(other), float(cosines[row, other])) for row, other in enumerate(best)]


def _show(texts: list[str], tokens: list[list[int]], vectors: NDArray[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def words(number: int) -> Text:
        text = Text(texts[number] or "(empty)")
        text.truncate(48, overflow="ellipsis")
        return text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("text", justify="right")
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("nearest other text")
    table.add_column("cosine", justify="right")
    shown = min(_SHOWN, len(texts))
    others = _nearest(vectors, shown) if len(texts) > 1 else []
    for row in range(shown):
        found = (words(others[row][0]), f"{others[row][1]:.4f}") if others else ("", "")
        table.add_row(str(row + 1), words(row), str(len(tokens[row])), *found)
    Console().print(table)


def run(args: argparse.Namespace) -> int:
    """Read the texts and the model, and show or keep the vectors."""
    from rich.console import Console

    from cukern.models import Encoder
    from cukern.runtime import arrays

    if args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.output is not None:
        _check_output(args.output)
    texts = _texts(args.input)
    console = Console()
    try:
        encoder = Encoder.from_directory(args.model, dtype=args.dtype)
        console.print(str(encoder), highlight=False, markup=False, soft_wrap=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            start = time.perf_counter()
            tokens = encoder.tokenize(texts)
            found = encoder.embed_tokens(tokens, batch_size=args.batch_size)
    except (OSError, ImportError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    library = arrays.library_of(found)
    assert library is not None
    vectors = library.to_numpy(found)  # waits for the GPU
    seconds = time.perf_counter() - start
    for warning in caught:
        console.print(str(warning.message), highlight=False, markup=False, soft_wrap=True)
    if args.output is None:
        _show(texts, tokens, vectors)
    else:
        try:
            np.save(args.output, vectors)
        except OSError as error:
            raise UserError(f"{args.output}: {error.strerror or error}") from None
    kept = f", in {args.output}" if args.output else ""
    counted = f"{len(texts)} texts, {sum(map(len, tokens))} tokens, {seconds:.2f} s"
    line = f"{counted} ({len(texts) / seconds:.0f} texts/s): float32 {list(vectors.shape)}{kept}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
