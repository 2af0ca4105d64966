"""Modules that stand in for vLLM's: the classes and functions of tests/vllm_signatures.json, without their code.

A method or a function returns None. `__init__` keeps its arguments as attributes. A test gives the few methods that it
needs a body.
"""

from __future__ import annotations

import abc
import enum
import importlib.machinery
import json
import sys
import types
from collections.abc import Mapping
from typing import Any

from tests.vllm_signatures import FILE

TABLE: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
OWN = "cukern.integrations.vllm"


class _Names(dict[str, Any]):
    """Names for the defaults of a signature: an unknown one is a string."""

    def __missing__(self, name: str) -> Any:
        if name in ("self", "cls", "float", "int", "str", "bool", "None"):
            raise KeyError(name)
        return types.SimpleNamespace(DECODER="decoder")


def _function(name: str, signature: str, body: str) -> Any:
    names = _Names()
    exec(f"def {name}{signature}:\n    {body}", {}, names)
    return names[name]


def _method(name: str, found: Mapping[str, Any]) -> Any:
    if name == "__init__":
        own = "{k: v for k, v in locals().items() if k != 'self'}"
        function = _function(name, found["signature"], f"vars(self).update({own})")
    else:
        function = _function(name, found["signature"], "return None")
    if found.get("abstract"):
        function = abc.abstractmethod(function)
    kind = {"staticmethod": staticmethod, "classmethod": classmethod, "property": property}.get(found.get("kind", ""))
    return kind(function) if kind else function


def _class(name: str, module: str, found: Mapping[str, Any]) -> Any:
    if found.get("enum"):
        values = {k: k if v is None else v for k, v in found["fields"].items()}
        return enum.Enum(name, values, module=module, type=str if name == "AttentionType" else None)
    methods = {key: _method(key, value) for key, value in found["methods"].items()}
    return abc.ABCMeta(name, (), {**found["fields"], **methods, "__module__": module})


def modules(release: str, version: str | None = None) -> dict[str, types.ModuleType]:
    """Return the modules by name. `version` is vLLM's `__version__`, by default the release."""
    made: dict[str, types.ModuleType] = {}

    def module(name: str) -> types.ModuleType:
        if name not in made:
            made[name] = types.ModuleType(name)
            made[name].__path__ = []  # type: ignore[attr-defined]
            made[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(module(parent), leaf, made[name])
        return made[name]

    defined: dict[str, Any] = {}
    for name, names in TABLE[release].items():
        for key, found in names.items():
            if isinstance(found, dict):
                is_function = "signature" in found
                made_ = _function(key, found["signature"], "return None") if is_function else _class(key, name, found)
                defined[key] = made_
                setattr(module(name), key, made_)
    for name, names in TABLE[release].items():
        for key, found in names.items():
            if found == "imported":
                setattr(module(name), key, defined.get(key))
            elif found == "constant":
                setattr(module(name), key, False if key.isupper() else object())
    module("vllm").__version__ = version or release  # type: ignore[attr-defined]
    return made


def install(monkeypatch: Any, release: str, version: str | None = None) -> dict[str, types.ModuleType]:
    """Put the modules, and a CUDA platform of compute capability 9.0, in the place of vLLM for a test."""
    made = modules(release, version)
    platform = made["vllm.platforms.cuda"].CudaPlatformBase  # type: ignore[attr-defined]
    capability = types.SimpleNamespace(major=9, minor=0)
    platform.get_device_capability = classmethod(lambda cls: capability)
    platform.is_cuda = lambda self: True
    platform.is_device_capability = lambda self, number: number == (9, 0)
    made["vllm.platforms"].current_platform = platform()  # type: ignore[attr-defined]
    for name in [x for x in sys.modules if x.partition(".")[0] == "vllm" or x.startswith(f"{OWN}._")]:
        monkeypatch.delitem(sys.modules, name)
    for name, found in made.items():
        monkeypatch.setitem(sys.modules, name, found)
    return made
