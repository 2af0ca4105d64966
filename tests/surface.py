"""The surface on which programs rely: schemas, signatures, the names of variants, and the sizes to specialize.

Exported programs hold the schemas of operators, and code has the names and defaults of arguments, so that none of it
may change unnoticed: `tests/surface.json` has all of it. For an intended change, `python -m tests.surface` writes it
anew.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cukern
from cukern.runtime.kernel import KERNELS
from tests.specs import CALLS

FILE = Path(__file__).with_name("surface.json")


def _schemas() -> dict[str, str]:
    packets = [getattr(torch.ops.cukern, name) for name in cukern.__all__ if hasattr(torch.ops.cukern, name)]
    schemas = [getattr(packet, overload)._schema for packet in packets for overload in packet.overloads()]
    return {f"{x.name}.{x.overload_name}".rstrip("."): str(x) for x in schemas}


def _arguments(function: Callable[..., Any]) -> str:
    """The names, kinds and defaults of the arguments: no program relies on the annotations."""
    signature = inspect.signature(function)
    bare = [x.replace(annotation=inspect.Parameter.empty) for x in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _signatures() -> dict[str, str]:
    functions = {name: getattr(cukern, name) for name in cukern.__all__}
    # An exception has no signature of its own.
    return {
        name: _arguments(x) if inspect.isfunction(x) else f"class({x.__base__.__name__})"
        for name, x in functions.items()
    }


def _variants() -> dict[str, list[str]]:
    """The values of `variant=` by function, read from the error that lists them."""
    variants = {}
    for call in CALLS.values():
        if call.name in variants or "variant" not in inspect.signature(call.function).parameters:
            continue
        with pytest.raises(ValueError, match="variant must be one of ") as refused:
            call.function(*call.args, **call.options | {"variant": "?"})
        variants[call.name] = re.findall(r"'(\w+)'", str(refused.value).split(", got ")[0])
    return variants


def _specialize() -> dict[str, str]:
    functions = {stem: getattr(sys.modules[f"cukern.ops.{stem}"], "specialize", None) for stem in KERNELS}
    return {stem: _arguments(function) for stem, function in functions.items() if function}


def surface() -> dict[str, dict[str, Any]]:
    """The surface as `FILE` holds it."""
    parts = {
        "schemas": _schemas(),
        "signatures": _signatures(),
        "variants": _variants(),
        "specialize": _specialize(),
    }
    return {part: dict(sorted(entries.items())) for part, entries in parts.items()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n")
