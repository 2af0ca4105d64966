"""The command line: `cukern COMMAND`, or `python -m cukern COMMAND`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import cukern
from cukern.commands import UserError
from cukern.runtime import interrupt, progress

#: What shells report for a program whose output lost its reader.
_BROKEN_PIPE = 141

# Each module has `add_arguments(parser)` and `run(args) -> int`, and is imported only for its command.
COMMANDS = {
    "demo": ("cukern.commands.demo", "route tokens through a model's gate, then encode texts without their padding"),
    "doctor": ("cukern.commands.doctor", "say what works here and what does not, with the command that fixes it"),
    "explain": ("cukern.commands.explain", "say which kernels a call would launch on a GPU, and why; needs no GPU"),
    "compile": ("cukern.commands.compile", "compile kernels into the cache ahead of use, also without a GPU"),
    "encode": ("cukern.commands.encode", "turn each text of a file into a vector, by a model in a directory"),
    "translate": ("cukern.commands.translate", "translate texts by Marian, BART or mBART, line by line"),
    "generate": ("cukern.commands.generate", "continue prompts by a model of transformers on these kernels"),
    "profile-moe": ("cukern.commands.profile_moe", "trace one forward pass of the fused mixture-of-experts layer"),
    "bench": ("cukern.commands.bench", "measure the ops on this GPU against their floors and the alternatives"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "--help lists the arguments"
        got, _, known = message.partition(" (choose from ")
        if near := difflib.get_close_matches(got.rpartition(": ")[2].strip("'"), re.findall(r"[\w.-]+", known), 1):
            message, hint = got, f"did you mean {near[0]}?"
        raise UserError(f"{message} ({hint})")


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser. It knows the arguments of `command`, but only the names of other commands."""
    prog = "python -m cukern" if Path(sys.argv[0]).name == "__main__.py" else "cukern"
    parser = _Parser(prog=prog, description=cukern.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cukern {cukern.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            implementation = importlib.import_module(module)
            implementation.add_arguments(sub)
            sub.set_defaults(run=implementation.run)
    return parser


def _hint(command: str | None, others: Sequence[str]) -> str:
    """Return advice about arguments that a command does not know."""
    pairs = [text for text in others if re.fullmatch(r"[a-z_]\w*=[^=]+", text)]
    if command != "explain" or not pairs:
        return "--help lists the arguments"
    return "use " + " ".join(f"--{'shape' if text[-1].isdecimal() else 'set'} {text}" for text in pairs)


def _run(arguments: Sequence[str], command: str | None) -> int:
    """Run a command. Return its exit status; unusable input gives 2 and one line on stderr."""
    try:
        parser = _parser(command)
        if not arguments:
            parser.print_help()
            return 0
        args, others = parser.parse_known_args(arguments)
        if others:
            raise UserError(f"unrecognized arguments: {' '.join(others)} ({_hint(command, others)})")
        with progress.in_command(f"cukern {command}"):
            return args.run(args)
    except UserError as error:
        if interrupt.was_interrupted():
            raise
        name = f"cukern {command}" if command in COMMANDS else "cukern"
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except cukern.CompileError as error:
        print(f"cukern {command}: a kernel did not compile\n{error}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return its exit status, without a traceback after Ctrl-C or a closed pipe."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return _run(arguments, next((a for a in arguments if not a.startswith("-")), None))
        finally:
            sys.stdout.flush()
            interrupt.ignore()
    except KeyboardInterrupt:
        return interrupt.say(arguments)
    except BrokenPipeError:
        # A pipe such as `| head` has closed, so discard the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except Exception:
        if not interrupt.was_interrupted():
            raise
        return interrupt.say(arguments)


if __name__ == "__main__":
    sys.exit(main())
