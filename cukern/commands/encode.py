"""`cukern encode`: compute a vector for each text of a file."""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.commands import UserError, console, texts, writing

_SHOWN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "the directory of a model of the BERT family, as transformers or sentence-transformers write it"
    texts.add_arguments(parser, model, "where to keep the vectors, float32", "FILE.npy")
    parser.epilog = (
        "The vectors are pooled and normalized as the model's modules.json says; without one, they are normalized\n"
        "means. An empty line is an empty text. Of a text that is too long the first tokens count, and that is said."
    )


def _nearest(vectors: NDArray[Any], shown: int) -> list[tuple[int, float]]:
    """Return, for each of the first `shown` texts, the nearest other text and the cosine of the two."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines = unit[:shown] @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    best = cosines.argmax(1)
    return [(int(other), float(cosines[row, other])) for row, other in enumerate(best)]


def _show(lines: list[str], tokens: list[list[int]], vectors: NDArray[Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    screen = console()
    # The numbers of a row take 30 characters; two texts share the rest.
    room = max(8, min(48, (screen.width - 30) // 2))

    def words(number: int) -> Text:
        text = Text(lines[number] or "(empty)")
        text.truncate(room, overflow="ellipsis")
        return text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("text", justify="right")
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("nearest other text")
    table.add_column("cosine", justify="right")
    shown = min(_SHOWN, len(lines))
    others = _nearest(vectors, shown) if len(lines) > 1 else []
    for row in range(shown):
        found = (words(others[row][0]), f"{others[row][1]:.4f}") if others else ("", "")
        table.add_row(str(row + 1), words(row), str(len(tokens[row])), *found)
    screen.print(table)


def run(args: argparse.Namespace) -> int:
    from cukern.models import Encoder
    from cukern.runtime import arrays

    place = texts.placed(args)
    texts.check_output(args.output, ".npy")
    lines = texts.read_lines(args.input)
    if not lines:
        raise UserError(f"{args.input}: there are no texts")
    screen = console()
    with texts.refusing():
        encoder = Encoder.from_directory(args.model, **place)
        screen.print(str(encoder), markup=False, soft_wrap=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            start = time.perf_counter()
            tokens = encoder.tokenize(lines)
            found = encoder.embed_tokens(tokens, batch_size=args.batch_size)
    library = arrays.library_of(found)
    assert library is not None
    vectors = library.to_numpy(found)  # waits for the GPU
    seconds = time.perf_counter() - start
    for warning in caught:
        screen.print(str(warning.message), markup=False, soft_wrap=True)
    if args.output is None:
        _show(lines, tokens, vectors)
    else:
        with writing(args.output) as path:
            np.save(path, vectors)
    kept = f", in {args.output}" if args.output else ""
    counted = f"{len(lines)} texts, {sum(map(len, tokens))} tokens, {seconds:.2f} s"
    line = f"{counted} ({len(lines) / seconds:.0f} texts/s): float32 {list(vectors.shape)}{kept}"
    screen.print(line, markup=False, soft_wrap=True)
    return 0
