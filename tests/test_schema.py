"""Schemas from signatures, and what an annotation must say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cukern.runtime.arrays import AnyArray, Generator, Size, WrittenArray
from cukern.runtime.op import OPERATORS, op, operator
from cukern.runtime.schema import schemas


def written_out(function: Callable[..., Any], *names: str) -> list[str]:
    """The schemas of a function, all overloads written out."""
    found = []
    for schema in schemas(function, names):
        found += [schema, *[schema.out()] * bool(names), *filter(None, [schema.functional()])]
    return [str(x) for x in found]


def test_a_type_follows_from_each_annotation() -> None:
    def f(
        x: AnyArray,
        weight: AnyArray | None,
        caches: Sequence[WrittenArray],
        rows: Size,
        ids: int | Sequence[int],
        sizes: Sequence[int],
        scale: AnyArray | float | None = 1.0,
        mode: str | None = None,
        early: bool | str = False,
        *,
        eps: float = 1e-6,
        generator: Generator | None = None,
    ) -> tuple[AnyArray, AnyArray | None, Size]:
        return x, weight, rows

    arguments = (
        "Tensor x, Tensor? weight, Tensor(a!)[] caches, SymInt rows, int[1] ids, int[] sizes, Tensor? scale=None, "
        "str? mode=None, bool early=False, *, float eps=1e-06, Generator? generator=None"
    )
    assert [str(x) for x in schemas(f, ["y", "z", "n"])] == [f"f({arguments}) -> (Tensor y, Tensor? z, SymInt n)"]


def test_overloads_follow_from_the_signature() -> None:
    def written(x: WrittenArray, y: WrittenArray | None = None) -> None: ...

    def copied(x: AnyArray, y: WrittenArray | None = None, *, out: AnyArray | None = None) -> AnyArray: ...

    def step(
        x: AnyArray, step: int | AnyArray, *, return_lse: bool = False, return_valid: bool = False
    ) -> AnyArray: ...

    assert written_out(written) == ["written(Tensor(a!) x, Tensor(b!)? y=None) -> ()"]
    assert written_out(copied, "z") == [
        "copied(Tensor x, Tensor(a!)? y=None) -> (Tensor z)",
        "copied.out(Tensor x, Tensor(a!)? y=None, *, Tensor(b!) z) -> ()",
        "copied.functional(Tensor x) -> (Tensor z)",
    ]
    assert [str(x) for x in schemas(step, ["z", "lse"])] == [
        "step(Tensor x, int step) -> (Tensor z)",
        "step.step(Tensor x, Tensor step) -> (Tensor z)",
        "step.lse(Tensor x, int step) -> (Tensor z, Tensor lse)",
    ]


def test_names_or_a_written_array_declare_an_operator() -> None:
    before = dict(OPERATORS)

    @op(None)
    def internal(x: AnyArray) -> Any: ...

    @op(None, "y, z")
    def returns(x: AnyArray) -> tuple[AnyArray, AnyArray]: ...

    @operator()
    def writes(x: WrittenArray) -> None: ...

    new = {name: OPERATORS.pop(name).names for name in {*OPERATORS} - {*before}}
    assert new == {"returns": ["y", "z"], "writes": []}


LIST = "AnyArray, WrittenArray, Size, Generator, bool, float, int, str"


def test_an_annotation_that_says_no_type_is_named() -> None:
    def unannotated(x, y: AnyArray) -> AnyArray: ...  # type: ignore[no-untyped-def]

    def unknown(x: AnyArray, y: dict[str, int] | None) -> AnyArray: ...

    def evaluated(x: AnyArray) -> AnyArray: ...

    evaluated.__annotations__["x"] = int

    for function, argument, got in (
        (unannotated, "x", "none"),
        (unknown, "y", "'dict[str, int] | None'"),
        (evaluated, "x", "<class 'int'>"),
    ):
        message = (
            f"{function.__name__}: the argument {argument} must have an annotation that begins with {LIST} or a "
            f"Sequence of one, got {got}"
        )
        with pytest.raises(TypeError) as refused:
            list(schemas(function, ["z"]))
        assert str(refused.value) == message


def test_results_that_the_annotation_does_not_have_are_named() -> None:
    def one(x: AnyArray) -> AnyArray: ...

    def two(x: AnyArray) -> tuple[AnyArray, AnyArray]: ...

    def wrong(x: AnyArray) -> tuple[AnyArray, dict]: ...  # type: ignore[type-arg]

    for function, names, message in (
        (one, ["y", "z"], "one must return tuple[AnyArray, AnyArray] for y, z, got the annotation 'AnyArray'"),
        (two, ["y"], "two must return AnyArray for y, got the annotation 'tuple[AnyArray, AnyArray]'"),
        (wrong, ["y", "z"], f"wrong: the result z must have an annotation that begins with {LIST}"),
    ):
        with pytest.raises(TypeError) as refused:
            list(schemas(function, names))
        assert message in str(refused.value)
