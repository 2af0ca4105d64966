"""Modules that need a package of an extra say so, with the pip command, where it is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("cukern.torch_ops", "torch", "torch"),
        ("cukern.compat.vllm", "torch", "torch"),
        ("cukern.compat.sglang", "torch", "torch"),
        ("cukern.compat.flashinfer", "torch", "torch"),
        ("cukern.compat.flash_attn", "torch", "torch"),
        ("cukern.integrations.transformers", "torch", "transformers"),
        ("cukern.integrations.transformers", "transformers", "transformers"),
    ],
)
def test_an_import_without_its_package(module: str, package: str, extra: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
try:
    import {module}
except ModuleNotFoundError as error:
    print(error.name, error, sep=": ")
"""
    settings = os.environ | {"CUKERN_COMPILE": "lazy"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == f'{package}: {module} needs the package {package}: pip install "cukern[{extra}]"\n'


def test_a_package_that_lacks_another_says_so_itself() -> None:
    from cukern.runtime.packages import missing

    error = ModuleNotFoundError("No module named 'typing_extensions'", name="typing_extensions")
    assert missing(error, "cukern.torch_ops", "torch") is error
