"""Placeholders for what of a peer is not here: a test that uses one is skipped, and says which."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def placeholder(name: str) -> Any:
    """A class that skips the test that makes or calls one, and has placeholders for attributes.

    While a file is collected, a call gives another, or what it decorates.
    """

    def skip(_: Any, *args: Any, **kwargs: Any) -> Any:
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(f"needs {name} of the peer")
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else placeholder(f"{name}()")

    class Meta(type):
        def __iter__(cls) -> Any:
            return iter(())

        def __getitem__(cls, _: Any) -> Any:
            return cls

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return placeholder(f"{name}.{attribute}")

    return Meta(name.rpartition(".")[2], (), {"__new__": skip, "__module__": "tests.peers"})


def attribute_of(module: str) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{module}.{name}")

    return get
