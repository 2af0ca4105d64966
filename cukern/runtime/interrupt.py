"""Handle Ctrl-C in a command of cukern, from the first import on: one line on stderr, exit status 130."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

STATUS = 130
#: Seconds until KeyboardInterrupt is raised again, in case other code has caught the first one.
_AGAIN_S = 1.0
_LEFT = {"cukern compile": "; the cache keeps each kernel that was compiled"}
_interrupted = False


def named(arguments: Sequence[str]) -> str:
    return " ".join(["cukern", *[a for a in arguments if not a.startswith("-")][:1]])


def ignore() -> None:
    """Ignore Ctrl-C in a finished command, where it would interrupt the interpreter's exit."""
    if is_command():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def say(arguments: Sequence[str]) -> int:
    """Print the line of an interrupted command. Return its exit status."""
    ignore()
    name = named(arguments)
    print(f"{name}: interrupted{_LEFT.get(name, '')}", file=sys.stderr)
    return STATUS


def is_command() -> bool:
    program = getattr(sys, "argv", [""])[0]
    if program == "-m":
        given = sys.orig_argv
        return given[given.index("-m") + 1] == "cukern" if "-m" in given else False
    path = Path(program)
    return path.name == "cukern" or path.parts[-2:] == ("cukern", "__main__.py")


def was_interrupted() -> bool:
    """Return whether Ctrl-C was pressed, even if other code has caught the KeyboardInterrupt."""
    return _interrupted


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt now, and again after _AGAIN_S seconds in case other code catches the first one."""
    global _interrupted
    _interrupted = True
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
    raise KeyboardInterrupt


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an error during a command's imports. Ctrl-C and an invalid CUKERN_COMPILE get one line."""
    if _interrupted:
        raise SystemExit(say(sys.argv[1:]))
    if issubclass(kind, ValueError) and "CUKERN_COMPILE" in str(error):
        print(f"{named(sys.argv[1:])}: {error}", file=sys.stderr)
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """Hide exceptions in callbacks after Ctrl-C."""
    if not _interrupted:
        sys.__unraisablehook__(lost)


if is_command():
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    # SIGINT is ignored in a command that runs with `&` or `nohup`; keep it so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_signal)
