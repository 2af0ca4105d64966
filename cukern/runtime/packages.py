"""Packages that parts of cukern need besides those that it is installed with."""

from __future__ import annotations


def missing(error: ModuleNotFoundError, module: str, extra: str) -> ModuleNotFoundError:
    """The error of an import that failed in `module`, with the pip command where a package of an extra is missing."""
    if error.name not in ("torch", "transformers"):
        return error
    says = f'{module} needs the package {error.name}: pip install "cukern[{extra}]"'
    return ModuleNotFoundError(says, name=error.name)
