"""`cukern translate`: write a line of output for each line of a text, with an encoder-decoder."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from cukern.commands import UserError, texts, writing
from cukern.runtime.progress import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "the directory of Marian, BART or mBART, as Hugging Face keeps them"
    texts.add_arguments(parser, model, "where the translations go, one a line (default: stdout)", batch_size=32)
    add(
        "--beams", type=int, metavar="N", help="of a beam search, 1 for the best token each time (default: the model's)"
    )
    add("--max-new-tokens", type=int, metavar="N", help="of a translation (default: the model's)")
    add("--sample", action="store_true", help="draw the tokens")
    add("--temperature", type=float, metavar="T", help="of --sample")
    add("--top-k", type=int, metavar="K", help="of --sample, 0 for all tokens (default: the model's, else 50)")
    add("--top-p", type=float, metavar="P", help="of --sample")
    add("--seed", type=int, default=0, metavar="N", help="of --sample: line i draws by N + i (default: 0)")
    parser.epilog = (
        "Texts are translated in batches of like lengths; an empty line stays empty. A text of more tokens than the\n"
        "model has positions is cut off there, its last token kept, and named on stderr."
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
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


def _encode(lines: list[str], tokenizer: Any, most: int) -> dict[int, list[int]]:
    """Return the tokens of each non-empty text by line number. Cut texts that are too long, with a message."""
    encoded = {line: tokenizer.encode(text) for line, text in enumerate(lines) if text.strip()}
    for line, ids in encoded.items():
        if len(ids) > most:
            encoded[line] = ids[: most - 1] + ids[-1:]
            print(f"cukern translate: line {line + 1} has {len(ids)} tokens: cut off at {most}", file=sys.stderr)
    return {line: ids for line, ids in encoded.items() if ids}


def run(args: argparse.Namespace) -> int:
    from cukern.models import Decoding
    from cukern.models.text import by_length
    from cukern.models.tokenizer import read_translator

    settings, place = _settings(args), texts.placed(args)
    texts.check_output(args.output)
    given = texts.read_lines(args.input)
    with texts.refusing():
        decoding = Decoding.from_directory(args.model, **place)
        tokenizer = read_translator(args.model)
        decoding.settings(**settings)
        encoded = _encode(given, tokenizer, decoding.config.max_positions)
        numbers = [*encoded]
        translated, tokens, begin = [""] * len(given), 0, time.perf_counter()
        with progress("translating texts", len(encoded)) as advance:
            for batch in by_length([*encoded.values()], args.batch_size):
                lines = [numbers[i] for i in batch]
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
        with writing(args.output) as path:
            path.write_text(output, "utf-8")
    rate = f"{len(encoded) / max(seconds, 1e-9):.1f} texts and {tokens / max(seconds, 1e-9):.0f} tokens per second"
    print(f"{len(encoded)} texts, {tokens} tokens in {seconds:.2f} s: {rate}", file=sys.stderr)
    return 0
