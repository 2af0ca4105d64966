"""Ctrl-C in a command of cukern, from the first import on: print one line to stderr, and exit with status 130."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

#: The exit status of a command that SIGINT ends, as shells report it.
STATUS = 130
#: Seconds after Ctrl-C until KeyboardInterrupt is raised again, in case other code has caught the first one.
_AGAIN_S = 1.0
#: Text that an interrupted command appends to its message about unfinished work.
_LEFT = {"cukern compile": "; the cache keeps each kernel that was compiled"}
_came = False


def named(arguments: Sequence[str]) -> str:
    """Return the name of the command that `arguments` call. Messages begin with it."""
    return " ".join(["cukern", *[a for a in arguments if not a.startswith("-")][:1]])


def ignore() -> None:
    """Ignore Ctrl-C from here on, in a finished command: it would interrupt the exit of the interpreter."""
    if is_command():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def say(arguments: Sequence[str]) -> int:
    """Write the line of an interrupted command, and return its exit status."""
    ignore()
    name = named(arguments)
    print(f"{name}: interrupted{_LEFT.get(name, '')}", file=sys.stderr)
    return STATUS


def is_command() -> bool:
    """Return whether this process is `cukern` or `python -m cukern`, which imports the package before the command."""
    program = getattr(sys, "argv", [""])[0]
    if program == "-m":
        given = sys.orig_argv
        return given[given.index("-m") + 1] == "cukern" if "-m" in given else False
    path = Path(program)
    return path.name == "cukern" or path.parts[-2:] == ("cukern", "__main__.py")


def came() -> bool:
    """Return whether Ctrl-C was pressed, even if other code has replaced or caught the KeyboardInterrupt."""
    return _came


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and raise it again after _AGAIN_S seconds, in case other code catches the first one."""
    global _came
    _came = True
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    raise KeyboardInterrupt


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace `sys.excepthook`, so that a command that ends while it imports the package reports this in one line."""
    if _came:
        raise SystemExit(say(sys.argv[1:]))
    if issubclass(kind, ValueError) and "CUKERN_COMPILE" in str(error):
        print(f"{named(sys.argv[1:])}: {error}", file=sys.stderr)
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Replace `sys.unraisablehook`, so that exceptions in callbacks after Ctrl-C are not printed."""
    if not _came:
        sys.__unraisablehook__(lost)


if is_command():
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    # Install no handler if SIGINT is ignored, as in a command that runs with `&` or `nohup`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_signal)
