"""The end of `cukern demo`: an encoder with and without the padding of its texts."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rich.console import Console

from cukern.__main__ import main
from cukern.commands import demo_encoder
from cukern.models import Encoder, EncoderConfig
from cukern.runtime import kernel


def test_texts_are_words_in_order() -> None:
    tokens, size = demo_encoder.tokenized(["A norm of rows.", "", "rows of a norm, " * 50])
    assert tokens[0] == [1, 2, 3, 4, 5] and tokens[1] == []
    assert tokens[2][:6] == [4, 3, 1, 2, 6, 4] and len(tokens[2]) == 128
    assert size == 7


def test_the_texts_are_those_of_the_functions() -> None:
    found = demo_encoder.descriptions()
    assert len(found) > 60 and "silu_and_mul" in found
    assert not any("Args:" in text for text in found.values())


def test_padding_that_is_kept_changes_no_word(rng: np.random.Generator) -> None:
    config = EncoderConfig("bert", 50, 32, 2, 2, 64, 20)
    encoder = Encoder.from_state_dict(demo_encoder.random_state(config, rng), config)
    batch = demo_encoder.padded([[3, 4, 5], [], [6] * 9, [49]])
    assert batch.mask.sum(1).tolist() == [3, 0, 9, 1] and batch.ids.shape == (4, 9)
    kept = batch.with_padding()
    assert kept.mask.sum() == batch.mask.size
    want = encoder(batch.ids, batch.mask)
    np.testing.assert_allclose(encoder(kept.ids, kept.mask)[::2], want, atol=1e-5)
    assert np.abs(want[batch.mask]).min(1).max() > 0


@pytest.mark.parametrize("place", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_what_is_shown(place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if place == "host":
        monkeypatch.setattr(kernel, "device_count", lambda: 0)
    demo_encoder.show(Console(width=100))
    output = capsys.readouterr().out
    kept, removed = (re.search(rf"{name} +(\d+) +(\d+)% +(\S+) GFLOP +\S+ ms", output) for name in ("kept", "removed"))
    assert kept and removed
    assert int(kept[1]) > int(removed[1]) and removed[2] == "100"
    assert round(100 * int(removed[1]) / int(kept[1])) == int(kept[2])
    assert float(kept[3]) > float(removed[3]) > 0
    output = " ".join(output.split())
    within = re.search(r"The hidden states of the (\d+) words are the same(?: within (\S+)|, bit for bit)\. ", output)
    assert within and within[1] == removed[1] and float(within[2] or 0) < 1e-4
    assert len(re.findall(r"\w+ and \w+ 0\.\d\d", output)) == 4


def without_times(output: str) -> str:
    """What `cukern demo` prints, without what differs between runs: times, whether a kernel was cached, rounding."""
    output = re.sub(r"─+", "─", re.sub(r"\s+", " ", output))
    output = re.sub(r"(compiled in [\d.]+ s|from the cache)", "compiled", output)
    output = re.sub(r"the same( within \S+|, bit for bit)\.", "the same.", output)
    return re.sub(r"[\d.]+ (ms|s)\b", r"T \1", output)


def test_the_demo_prints_the_same_but_for_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel, "device_count", lambda: 0)
    monkeypatch.setattr(demo_encoder, "_STEP_ON_HOST", 20)
    said = []
    for _ in range(2):
        assert main(["demo", "--tokens", "32"]) == 0
        said.append(without_times(capsys.readouterr().out))
    assert said[0] == said[1] and "in T s" in said[0] and "compiled: " in said[0]
    assert main(["demo", "--tokens", "33"]) == 0
    assert without_times(capsys.readouterr().out) != said[0]
