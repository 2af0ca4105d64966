"""Ctrl-C in a command of cukern: one line on stderr and the status of a shell, from the first import on."""

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
#: Seconds after which Ctrl-C counts as lost.
_AGAIN_S = 1.0
#: What a command says of the work that it leaves, beside that it is interrupted.
_LEFT = {"cukern compile": "; the cache keeps each kernel that was compiled"}
_came = False


def named(arguments: Sequence[str]) -> str:
    """The name of the command that `arguments` call, as messages begin with it."""
    return " ".join(["cukern", *[a for a in arguments if not a.startswith("-")][:1]])


def ignore() -> None:
    """Ignore Ctrl-C from here on, in a command that is done: it would interrupt the interpreter's own end."""
    if is_command():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def say(arguments: Sequence[str]) -> int:
    """Write the line of an interrupted command; returns its exit status."""
    ignore()
    name = named(arguments)
    print(f"{name}: interrupted{_LEFT.get(name, '')}", file=sys.stderr)
    return STATUS


def is_command() -> bool:
    """Whether this process is `cukern` or `python -m cukern`, which imports the package before it runs the command."""
    program = getattr(sys, "argv", [""])[0]
    if program == "-m":
        given = sys.orig_argv
        return given[given.index("-m") + 1] == "cukern" if "-m" in given else False
    path = Path(program)
    return path.name == "cukern" or path.parts[-2:] == ("cukern", "__main__.py")


def came() -> bool:
    """Whether Ctrl-C came. The modules of others may turn its exception into another one, or lose it."""
    return _came


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and once more a while later, in case that it is lost."""
    global _came
    _came = True
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    raise KeyboardInterrupt


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Stand for `sys.excepthook`: a command that imports the package says in a line what ends it."""
    if _came:
        raise SystemExit(say(sys.argv[1:]))
    if issubclass(kind, ValueError) and "CUKERN_COMPILE" in str(error):
        print(f"{named(sys.argv[1:])}: {error}", file=sys.stderr)
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Stand for `sys.unraisablehook`, without what Ctrl-C raises in a callback."""
    if not _came:
        sys.__unraisablehook__(lost)


if is_command():
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    # Behind `&` and `nohup` a command ignores SIGINT, and goes on to.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_signal)
