"""The specs of all families, found by their files, and the calls in them by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.spec import Call, Function, Spec


def _spec(stem: str) -> Spec:
    try:
        return importlib.import_module(f"tests.specs.{stem}").SPEC
    except AttributeError as error:
        wanted = f"define SPEC, and import the functions of cukern.ops.{stem} in cukern/__init__.py"
        raise AttributeError(f"tests/specs/{stem}.py: {error}; {wanted}") from error


#: The specs by stem.
SPECS = {path.stem: _spec(path.stem) for path in sorted(Path(__file__).parent.glob("[!_]*.py"))}
#: The facts of each public function, and the stem of its family.
FUNCTIONS: dict[str, Function] = {name: own for spec in SPECS.values() for name, own in spec.functions.items()}
STEM_OF = {name: stem for stem, spec in SPECS.items() for name in spec.functions}


def _named(calls: Iterable[Call], word: str = "") -> Iterator[tuple[str, Call]]:
    """The calls, each by the names of its function and of its options, or by its note."""
    seen: set[str] = set()
    for call in calls:
        of_call = [call.note] if call.note else [*[f"late {call.late}"] * bool(call.late), *call.options]
        key = " ".join([call.name, *([word, call.options.get("variant", "auto")] if word else of_call)])
        assert word or key not in seen, f"two calls are named {key!r}: give one of them a note"
        key = f"{key} again" if key in seen else key
        seen.add(key)
        yield key, call


CALLS: dict[str, Call] = dict(_named(call for spec in SPECS.values() for call in spec.calls))
LARGE_CALLS: dict[str, Call] = dict(_named((call for spec in SPECS.values() for call in spec.large_calls), "large"))
ALL = {**CALLS, **LARGE_CALLS}
WITH_OUT = [key for key, call in CALLS.items() if "out" in call.operator().overloadpacket.overloads()]


def why_exempt(key: str, promise: str) -> str | None:
    """Why a call does not make a promise; None where it makes it."""
    call = ALL[key]
    return call.exempt.get(promise) or FUNCTIONS[call.name].exempt.get(promise)


def calls_of(promise: str) -> list[str]:
    """The calls that make a promise."""
    return [key for key in ALL if not why_exempt(key, promise)]


def parameters(keys: Iterable[str]) -> list[object]:
    """Parameters of a test that begin with the name of a function, each in the GPU record of its family."""
    return [pytest.param(key, marks=pytest.mark.stem(STEM_OF[key.split()[0]])) for key in keys]
