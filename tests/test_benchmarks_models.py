"""The benchmarks of the models, in sizes for the CPU: all that they compare agrees, and would not by chance."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_models, harness, random_models
from benchmarks.harness import Baseline
from cukern import models
from cukern.commands import bench
from tests.encoders import one_thread  # noqa: F401
from tests.test_benchmarks import CEILINGS, Clock

CASES = bench_models.cases()
TINY = random_models.EncoderSizes("tiny", hidden=32, layers=2, heads=2, inter=64, vocab=100, positions=64)
HALF = random_models.half_lengths(4, 16)


def _seq2seq(kind: str) -> random_models.Seq2SeqSizes:
    return random_models.Seq2SeqSizes("tiny", kind, 32, 2, heads=2, inter=64, vocab=200, positions=64)


def _installed(*names: str) -> list[str]:
    """Of names of baselines, those whose library is installed."""
    library = {"sentence-transformers": "sentence_transformers"}
    return [name for name in names if name not in library or importlib.util.find_spec(library[name])]


TRANSFORMERS = ["transformers, eager", "transformers in a graph"]
TORCH = ["torch.nn.TransformerEncoder, eager", "torch.nn.TransformerEncoder nested, eager"]
SMALL = {
    "padded": (
        bench_models._encode(TINY, HALF, 16, "float32"),
        ["products alone", "padding kept", *TORCH, *TRANSFORMERS[:1]],
    ),
    "padded f16": (bench_models._encode(TINY, HALF, 16, "float16", "eager"), []),
    "one text": (bench_models._encode(TINY, [7], 7, "float32"), ["products alone", *TRANSFORMERS]),
    "full": (bench_models._encode(TINY, [7] * 3, 7, "float32"), ["products alone", *TRANSFORMERS[:1]]),
    "texts": (bench_models._embed(TINY, 70, "float32", from_tokens=False), _installed("sentence-transformers")),
    "tokens": (
        bench_models._embed(TINY, 70, "float32", from_tokens=True),
        ["transformers, sorted", "transformers, as they come"],
    ),
    **{
        f"{kind}, {beams} beams, {dtype}": (
            bench_models._generated(_seq2seq(kind), 8, beams, 6, dtype, seq=9),
            ["transformers generate"],
        )
        for kind, beams, dtype in (("marian", 1, "float32"), ("bart", 4, "float32"), ("marian", 4, "float16"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_what_is_compared_agrees(name: str) -> None:
    case, baselines = SMALL[name]
    measured = harness.measure(replace(case, host=False), Clock(), CEILINGS)
    assert measured.problems == []
    assert [*measured.row["baselines"]] == baselines
    us = 70.0 if case.eager else 8.0
    assert measured.row["us"] == us
    for baseline, found in measured.row["baselines"].items():
        assert found == (70.0 if "eager" in baseline else us), baseline


def _spoiled(baseline: Baseline, weight: str) -> Baseline:
    """A baseline whose model has one weight changed."""

    def load() -> Any:
        function = baseline.load()

        def prepare(model: bench_models.Model, *given: Any) -> Any:
            state = {**model.state, weight: -model.state[weight]}
            return function(replace(model, state=state), *given)

        return prepare

    return replace(baseline, load=load)


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("padded", "encoder.layer.1.output.dense.weight"),
        ("one text", "encoder.layer.0.attention.self.value.bias"),
        ("tokens", "encoder.layer.0.intermediate.dense.weight"),
        ("marian, 1 beams, float32", "model.decoder.layers.1.encoder_attn.v_proj.weight"),
        ("bart, 4 beams, float32", "model.encoder.layers.0.fc1.weight"),
        ("marian, 4 beams, float16", "model.decoder.layers.1.final_layer_norm.weight"),
    ],
)
def test_another_model_disagrees(name: str, weight: str) -> None:
    case, _ = SMALL[name]
    peers = {key: _spoiled(baseline, weight) for key, baseline in case.peers.items()}
    measured = harness.measure(replace(case, baselines={}, peers=peers, host=False), Clock(), CEILINGS)
    assert measured.row["baselines"] == {}
    assert len(measured.problems) == len(peers) > 0
    assert all("disagrees with the op" in line for line in measured.problems)


def test_the_cases_of_the_models_are_distinct_and_public() -> None:
    rows = [(case.op, json.dumps(case.case), case.variant) for case in CASES]
    assert len(set(rows)) == len(rows)
    assert {case.op for case in CASES} == {"Encoder", "Decoding"} <= set(models.__all__)
    keys = {
        "Encoder": ["model", "batch", "seq", "valid", "dtype"],
        "Decoding": ["model", "batch", "beams", "steps", "dtype"],
    }
    for case in CASES:
        assert [*case.case] == keys[case.op] or "texts" in case.case
    # The command finds the classes by their names.
    assert bench._chosen(["Decoding"], bench._functions_by_stem()) == {"models": ["Decoding"]}


def test_half_of_the_positions_of_the_headline_hold_words() -> None:
    assert CASES[0].case == {"model": "BERT-base", "batch": 64, "seq": 512, "valid": 16384, "dtype": "float16"}
    for lengths in (random_models.half_lengths(64, 512), random_models.uniform_lengths(64, 512)):
        assert len(lengths) == 64 and 1 <= min(lengths) < 64 < 448 < max(lengths) <= 512
    assert sum(random_models.half_lengths(64, 512)) == 64 * 256


def test_floors_of_an_encoder_are_those_of_its_products() -> None:
    # 12 layers of 4 h h + 2 h 4 h weights; two operations for each weight and word.
    assert CASES[0].flops == 2 * 16384 * 12 * 12 * 768**2
    assert CASES[0].bytes == 2 * 12 * 12 * 768**2 + 2 * 768 * (16384 + 32768) + 16 * 32768


def test_floors_of_decoding_are_those_of_the_weights_of_each_step() -> None:
    case = next(c for c in CASES if c.case == {**c.case, "model": "opus-mt", "batch": 1, "beams": 1})
    each = 6 * (6 * 512**2 + 2 * 512 * 2048) + 512 * 58101
    once = 6 * (6 * 512**2 + 2 * 512 * 2048)
    entries = 64 * 48 + 64 * 65 // 2  # of the memory and of the cache, over all steps
    assert case.bytes == 2 * (once + 64 * each + 6 * 2 * 512 * entries)
    assert case.flops == 2 * (48 * once + 64 * each)
    assert all(c.flops == 0 for c in CASES if c.case["dtype"] == "float32")


def test_texts_have_the_tokens_of_their_lengths(tmp_path: Path) -> None:
    lengths = random_models.text_lengths(1000, 60, 512)
    assert sum(lengths) == pytest.approx(60_000, rel=0.05) and min(lengths) < 15 and max(lengths) > 300
    state = random_models.random_state(TINY, "float32", torch.device("cpu"))
    random_models.save(TINY, state, tmp_path)
    encoder = models.Encoder.from_directory(tmp_path, library="torch", device="cpu")
    few = [length for length in lengths if length <= TINY.positions][:50]
    tokens = encoder.tokenize(random_models.random_texts(few, TINY.vocab))
    assert [len(ids) for ids in tokens] == few
    assert all(ids[0] == 2 and ids[-1] == 3 and min(ids[1:-1]) >= 4 for ids in tokens)


def test_no_sequence_ends_by_itself() -> None:
    case = SMALL["bart, 4 beams, float32"][0]
    found = case.call(*harness.inputs(case, 0, "cpu"))
    assert (found.lengths == 7).all() and len(found.sequences) == 8


def test_calls_share_their_weights() -> None:
    """Copies for each call would turn over the L2 cache, for a baseline alone."""
    case = SMALL["one text"][0]
    (model, _), (again, _) = (harness.inputs(case, seed, "cpu") for seed in (0, 1))
    assert model is again and bench_models.transformers_encoder(model) is bench_models.transformers_encoder(again)
    assert bench_models._torch_state(model) is bench_models._torch_state(again)
    assert harness.nbytes((model,)) == sum(x.nbytes for name, x in model.state.items() if name.startswith("encoder."))
