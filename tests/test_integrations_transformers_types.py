"""Every text model type of transformers: `generate` gives the tokens of stock, as the table of the docs says."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import pytest
import transformers

from tests import transformers_types
from tests.transformers_types import DIFFERS, FAILS, SAME, UNBUILT

pytestmark = pytest.mark.filterwarnings("ignore")
GUIDE = (Path(__file__).parents[1] / "docs" / "guides" / "transformers.md").read_text()


def named() -> list[str]:
    """The types that the guide names."""
    sentence = re.search(r"`make test` compares (.*?); `make test-all`", GUIDE, re.DOTALL)
    assert sentence
    return re.findall(r"`(\w+)`", sentence[1])


def check(name: str) -> None:
    """A type is as the table says; of another version than the table's it does not differ."""
    row = transformers_types.compare(name)
    version, outcomes = transformers_types.recorded()
    assert row.outcome not in (DIFFERS, FAILS), row
    if version == transformers.__version__:
        assert row.outcome == outcomes[name], row


def test_the_table_has_the_counts_that_the_guide_names() -> None:
    _, outcomes = transformers_types.recorded()
    counts = collections.Counter(outcomes.values())
    assert counts[SAME] >= 80 and not counts[DIFFERS] + counts[FAILS]
    assert f"for {counts[SAME]} of the {len(outcomes)} text model types" in GUIDE
    assert len(named()) >= 10 and all(outcomes[name] == SAME for name in named())


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another seed the weights, and so the tokens, are others."""
    real = transformers_types.stock
    monkeypatch.setattr(transformers_types, "stock", lambda model, prompt: real(model, prompt.flip(0)))
    row = transformers_types.compare("llama")
    assert row.outcome == DIFFERS and row.how.startswith("prompt 0 of 1: token ")


def test_a_configuration_that_does_not_build_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transformers_types.SIZES, "num_attention_heads", 0)
    assert transformers_types.compare("llama").outcome == UNBUILT


@pytest.mark.parametrize("name", named())
def test_a_type_that_the_guide_names(name: str) -> None:
    check(name)


@pytest.mark.rare
@pytest.mark.parametrize("name", [x for x in transformers_types.types() if x not in named()])
def test_a_type(name: str) -> None:
    check(name)
