"""Each family has a spec, and nothing that the shared suites need is missing in one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from cukern import testing
from tests import gpu_record
from tests.spec import PROMISES, Tolerances
from tests.specs import ALL, FUNCTIONS, SPECS, STEM_OF, why_exempt

ROOT = Path(__file__).resolve().parents[1]


def _public_functions() -> Iterator[tuple[str, str]]:
    """The stem and the name of each function that a family makes public."""
    for stem in gpu_record.stems():
        room = "cukern" if stem in gpu_record.compositions() else "cukern.ops"
        module = importlib.import_module(f"{room}.{stem}")
        yield from ((stem, name) for name in module.__all__ if inspect.isfunction(getattr(module, name)))


PUBLIC = [*_public_functions()]


def _missing(stem: str, what: str) -> None:
    pytest.fail(f"tests/specs/{stem}.py: {what} (docs/guides/adding.md shows a spec)", pytrace=False)


@pytest.mark.parametrize("stem", gpu_record.stems())
def test_each_family_has_a_spec(stem: str) -> None:
    if stem not in SPECS:
        _missing(stem, "write this file; it defines SPEC = Spec(functions={...}, calls=[...])")


@pytest.mark.parametrize("stem", SPECS)
def test_a_spec_knows_the_functions_of_its_family_alone(stem: str) -> None:
    if stem not in gpu_record.stems():
        _missing(stem, f"there is no cuda_src/{stem}.cu and no package cukern/{stem}; remove or rename the spec")
    for name in SPECS[stem].functions:
        if (stem, name) not in PUBLIC:
            _missing(stem, f"functions has {name!r}, which `__all__` of the family's module has not")
    for call in (*SPECS[stem].calls, *SPECS[stem].large_calls):
        if call.name not in SPECS[stem].functions:
            _missing(stem, f"a call is of {call.name!r}, which functions has not")


@pytest.mark.parametrize(("stem", "name"), PUBLIC)
def test_the_facts_of_a_function_are_complete(stem: str, name: str) -> None:
    if stem not in SPECS or name not in SPECS[stem].functions:
        _missing(stem, f'add "{name}": Function(batch="...", bits=Bits(...)) to functions')
    own = FUNCTIONS[name]
    if own.exempt.get("call"):
        return
    calls = [call for call in SPECS[stem].calls if call.name == name]
    if not calls:
        _missing(stem, f'add Call("{name}", (...)) to calls')
    arguments = {a.name for a in calls[0].operator()._schema.arguments}
    if not own.batch or not {*own.batch_dims} <= arguments:
        _missing(stem, f"batch of {name} names the arguments that grow with the batch, some of {sorted(arguments)}")
    for call in calls:
        if not {*own.batch_dims} & {*call.given}:
            _missing(stem, f"no argument of {call} is in the batch {own.batch!r}")
    if bool(own.many_rows) == ("many rows" in own.exempt):
        many = 'either calls on arrays of more than 2^31 elements or exempt={"many rows": "why"}'
        _missing(stem, f"give {name} many_rows=[lambda x: ...], {many}")
    page = (ROOT / "docs" / "batch_invariance.md").read_text(encoding="utf-8")
    if own.bits is None and f"`{name}`" not in page:
        _missing(stem, f'give {name} bits=Bits("row", "a row", "the row"), or tell them in docs/batch_invariance.md')
    if own.bits is not None and own.bits.table != "batch" and (own.bits.table == "copies") != ("rows" in own.exempt):
        _missing(stem, f"{name} is exempt from the promise 'rows' if its results are copies, and not if a row decides")


def _names(tolerances: Tolerances) -> list[str]:
    names = tolerances if isinstance(tolerances, tuple) else (tolerances,)
    return [name for name in names if name is not None]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_tolerance_is_in_its_twins_table(name: str) -> None:
    calls = (call for call in ALL.values() if call.name == name)
    for tolerance in {*_names(FUNCTIONS[name].tolerance), *(x for call in calls for x in _names(call.tolerance))}:
        stem, _, result = tolerance.partition(".")
        if result not in testing.tolerances(stem):
            where = f"cukern/reference/{stem}.py: add {result!r} to TOLERANCES"
            pytest.fail(f"{where}, by dtype, for tests/specs/{STEM_OF[name]}.py", pytrace=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_exemption_is_of_a_promise_and_says_why(name: str) -> None:
    calls = (call for call in ALL.values() if call.name == name)
    for exempt in (FUNCTIONS[name].exempt, *(call.exempt for call in calls)):
        for promise, why in exempt.items():
            known = any(promise == x or promise.startswith(f"{x} ") for x in PROMISES)
            if not known or len(why.split()) < 3:
                _missing(STEM_OF[name], f"exempt[{promise!r}] of {name} is one of {[*PROMISES]} with a sentence why")


@pytest.mark.parametrize("name", [name for name, own in FUNCTIONS.items() if not own.exempt.get("call")])
def test_some_call_makes_each_promise_that_the_function_makes(name: str) -> None:
    keys = [key for key, call in ALL.items() if call.name == name]
    for promise in PROMISES:
        if promise not in FUNCTIONS[name].exempt and all(why_exempt(key, promise) for key in keys):
            _missing(STEM_OF[name], f"every call of {name} is exempt from {promise!r}; add one that is not")


def test_the_tables_of_the_suites_are_not_empty() -> None:
    # Every parametrized test above runs over these.
    assert len(PUBLIC) == len(FUNCTIONS) > 90 and len(ALL) > 200
