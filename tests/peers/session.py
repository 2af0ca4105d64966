"""The test files of one folder in one process: the modules that they import, and one run of pytest for each file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tests
from cukern import compat
from tests.peers import modules, plugin, scripts
from tests.peers.turns import Turns


def prepare(folder: Path) -> None:
    """Put cukern, and what else the files of a folder import, in the place of the peers: once in a process."""
    for line in compat.enable(*compat.PEERS):
        print(line)
    tests.__path__.append(str(folder / "tests"))  # vLLM's files import from their own package of that name
    modules.install(folder)


def run_file(folder: Path, name: str, turns: Turns, arguments: list[str]) -> int:
    """Run the cases of a file whose turn it is; the exit status. Nothing that the file sets stays."""
    environment = dict(os.environ)
    try:
        if scripts.is_script(folder / name):
            print(f"\n{name}")
            return scripts.run(folder / name, name, turns)
        given = ["--noconftest", "--import-mode=importlib", "--continue-on-collection-errors", "-q", "-rs"]
        given += ["-p", "tests.peers.plugin", "-c", "/dev/null", f"--rootdir={folder}"]
        given += ["-W", "ignore::pytest.PytestUnknownMarkWarning"]
        return int(pytest.main([*given, *arguments, str(folder / name)], plugins=[plugin.Runner(turns)]))
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        os.environ.clear()
        os.environ.update(environment)
        plugin.give_back()
