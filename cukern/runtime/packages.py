"""Errors for missing optional packages (extras)."""

from __future__ import annotations


def missing(error: ModuleNotFoundError, module: str, extra: str) -> ModuleNotFoundError:
    """Return the error of a failed import in `module`, with the pip command if an extra is missing."""
    if error.name not in ("torch", "transformers"):
        return error
    says = f'{module} needs the package {error.name}: pip install "cukern[{extra}]"'
    return ModuleNotFoundError(says, name=error.name)
