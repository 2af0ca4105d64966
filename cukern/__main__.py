"""The command line: `cukern COMMAND`, or `python -m cukern COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import cukern
from cukern.commands import UserError
from cukern.runtime import progress

# Modules and summaries. A module has `add_arguments(parser)` and `run(args) -> int`; only its own command imports it.
COMMANDS = {
    "demo": ("cukern.commands.demo", "route tokens through a model's gate, then encode texts without their padding"),
    "doctor": ("cukern.commands.doctor", "say what works here and what does not, with the command that fixes it"),
    "compile": ("cukern.commands.compile", "compile kernels into the cache ahead of use, also without a GPU"),
    "encode": ("cukern.commands.encode", "turn each text of a file into a vector, by a model in a directory"),
    "translate": ("cukern.commands.translate", "translate texts by Marian, BART or mBART, line by line"),
    "generate": ("cukern.commands.generate", "continue prompts by a model of transformers on these kernels"),
    "explain": ("cukern.commands.explain", "say which kernels a call would launch on a GPU, and why; needs no GPU"),
    "profile-moe": ("cukern.commands.profile_moe", "trace one forward pass of the fused mixture-of-experts layer"),
    "bench": ("cukern.commands.bench", "measure the ops on this GPU against their floors and the alternatives"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the arguments)")


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of `command`; of the other commands it knows only the names."""
    # `python -m cukern` runs this file, the script `cukern` has its own name.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status: 2 for input that cannot be used, with one line on stderr."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = next((a for a in arguments if not a.startswith("-")), None)
    try:
        args = _parser(command).parse_args(arguments)
        with progress.in_command(f"cukern {command}"):
            return args.run(args)
    except UserError as error:
        name = f"cukern {command}" if command in COMMANDS else "cukern"
        print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except cukern.CompileError as error:
        print(f"cukern {command}: a kernel did not compile\n{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
