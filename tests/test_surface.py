"""The surface of the library against the one that is kept."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import cukern
from tests.specs import ALL, calls_of
from tests.surface import FILE, surface

KEPT = json.loads(FILE.read_text())


def moved(kept: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Each entry that was removed, changed or added, in words."""
    lines = []
    for name in sorted({*kept, *found}):
        before, after = kept.get(name, "nothing"), found.get(name, "nothing")
        if before != after:
            lines.append(f"{name}\n    was {before}\n    is  {after}")
    return lines


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return surface()


@pytest.mark.parametrize("part", KEPT)
def test_the_surface_is_where_it_was(part: str, found: dict[str, dict[str, Any]]) -> None:
    lines = moved(KEPT[part], found[part])
    if lines:
        wanted = "If it was meant to move, run `python -m tests.surface` and say so in CHANGELOG.md."
        pytest.fail("\n".join([f"{part}: {len(lines)} moved", *lines, wanted]), pytrace=False)


def test_the_surface_is_complete(found: dict[str, dict[str, Any]]) -> None:
    assert {*found} == {*KEPT}
    functions = {name for name in cukern.__all__ if inspect.isfunction(getattr(cukern, name))}
    assert {*found["signatures"]} == {*cukern.__all__}
    assert {name.split("::")[1].split(".")[0] for name in found["schemas"]} == {
        ALL[key].name for key in calls_of("call")
    }
    with_variants = {x for x in functions if "variant" in inspect.signature(getattr(cukern, x)).parameters}
    assert {*found["variants"]} == with_variants
    assert all(names[0] == "auto" for names in found["variants"].values())


def test_a_removed_a_changed_and_an_added_entry_are_named() -> None:
    assert moved({"same": 1, "gone": 2, "other": 3}, {"same": 1, "other": 4, "new": 5}) == [
        "gone\n    was 2\n    is  nothing",
        "new\n    was nothing\n    is  5",
        "other\n    was 3\n    is  4",
    ]
