"""Temporary folders, for files that the user's folders cannot keep."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile


def process_folder(prefix: str) -> str:
    """Create a folder that this process removes at its exit."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    # A forked child inherits the exit functions of its parent, which still uses the folder, so only the parent removes
    # it.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
