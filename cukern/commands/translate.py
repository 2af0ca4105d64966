"""`cukern translate`: a line of output for each line of a text, by an encoder-decoder."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cukern.commands import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("--model", required=True, type=Path, metavar="DIR", help="Marian, BART or mBART, as Hugging Face keeps them")
    add("--input", required=True, type=Path, metavar="FILE", help="the texts, one a line, in UTF-8")
    add("--output", type=Path, metavar="FILE", help="where the translations go, one a line (default: stdout)")
    add(
        "--beams", type=int, metavar="N", help="of a beam search, 1 for the best token each time (default: the model's)"
    )
    add("--max-new-tokens", type=int, metavar="N", help="of a translation (default: the model's)")
    add("--batch-size", type=int, default=32, metavar="N", help="texts at once (default: 32)")
    add("--sample", action="store_true", help="draw the tokens")
    add("--temperature", type=float, metavar="T", help="of --sample")
    add("--top-k", type=int, metavar="K", help="of --sample, 0 for all tokens (default: the model's, else 50)")
    add("--top-p", type=float, metavar="P", help="of --sample")
    add("--seed", type=int, default=0, metavar="N", help="of --sample: line i draws by N + i (default: 0)")
    add("--library", choices=("torch", "cupy", "numpy"), help="default: torch where it is installed")
    add("--device", metavar="NAME", help="of torch, such as cpu (default: cuda where there is one); of cupy an index")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="default: that of the weights")
    parser.epilog = (
        "Texts are translated in batches of like lengths; an empty line stays empty. A text of more tokens than the\n"
        "model has positions is cut off there, its last token kept, and named on stderr."
    )


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None
    # The last line ends where the file does.
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What cannot be used, on one line."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise UserError(str(error)) from None


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("texts", total=total)
        yield lambda n: progress.advance(task, n)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a call, from the arguments that are given."""
    if args.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {args.batch_size}")
    if args.seed < 0:
        raise UserError(f"--seed must be at least 0, got {args.seed}")
    draws = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    for name, value in draws.items():
        if value is not None and not args.sample:
            raise UserError(f"--{name.replace('_', '-')} needs --sample")
    beams = 1 if args.sample and args.beams is None else args.beams
    settings = {
        "num_return_sequences": 1,
        "num_beams": beams,
        "max_new_tokens": args.max_new_tokens,
        "do_sample": args.sample or None,
        **draws,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _encode(texts: list[str], tokenizer: Any, most: int) -> dict[int, list[int]]:
    """The tokens of each text that is not empty, by its line; those that are too long are cut off and named."""
    encoded = {line: tokenizer.encode(text) for line, text in enumerate(texts) if text.strip()}
    for line, ids in encoded.items():
        if len(ids) > most:
            encoded[line] = ids[: most - 1] + ids[-1:]
            print(f"cukern translate: line {line + 1} has {len(ids)} tokens: cut off at {most}", file=sys.stderr)
    return {line: ids for line, ids in encoded.items() if ids}


def run(args: argparse.Namespace) -> int:
    """Translate the texts."""
    settings, texts = _settings(args), _lines(args.input)
    from cukern.models import Decoding
    from cukern.models._text import read_tokenizer

    device = int(args.device) if args.library == "cupy" and args.device and args.device.isdigit() else args.device
    with _refusing():
        decoding = Decoding.from_directory(args.model, library=args.library, device=device, dtype=args.dtype)
        tokenizer = read_tokenizer(args.model)
        decoding.settings(**settings)
        encoded = _encode(texts, tokenizer, decoding.config.max_positions)
        order = sorted(encoded, key=lambda line: len(encoded[line]), reverse=True)
        translated, tokens, begin = [""] * len(texts), 0, time.perf_counter()
        with _bar(len(order)) as advance:
            for i in range(0, len(order), args.batch_size):
                lines = order[i : i + args.batch_size]
                longest = max(len(encoded[line]) for line in lines)
                ids, mask = np.zeros((2, len(lines), longest), np.int32)
                for row, line in enumerate(lines):
                    ids[row, : len(encoded[line])], mask[row, : len(encoded[line])] = encoded[line], 1
                found = decoding(ids, mask, seed=[args.seed + line for line in lines], **settings)
                for row, line in enumerate(lines):
                    own = found.sequences[row, 1 : int(found.lengths[row])].tolist()
                    translated[line], tokens = " ".join(tokenizer.decode(own).splitlines()), tokens + len(own)
                advance(len(lines))
        seconds = time.perf_counter() - begin
    output = "".join(f"{line}\n" for line in translated)
    if args.output is None:
        sys.stdout.write(output)
    else:
        with _refusing():
            args.output.write_text(output, "utf-8")
    rate = f"{len(encoded) / max(seconds, 1e-9):.1f} texts and {tokens / max(seconds, 1e-9):.0f} tokens per second"
    print(f"{len(encoded)} texts, {tokens} tokens in {seconds:.2f} s: {rate}", file=sys.stderr)
    return 0
