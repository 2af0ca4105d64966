"""Decoding against transformers' `generate`, on models built at random."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cukern.models import Decoder, DecoderWeights, Decoding, Step
from cukern.models._steps import StepGraphs
from cukern.models.decoder_weights import sinusoids
from cukern.runtime import arrays
from tests.decoders import FAMILIES, assert_same, decoding_of, generated, kept, model_of, sources
from tests.encoders import numpy_of, one_thread  # noqa: F401

#: Settings of `generate`, and why they are there.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_length": 24},
    "beams": {"max_length": 24, "num_beams": 4},
    "early": {"max_new_tokens": 20, "num_beams": 4, "early_stopping": True, "length_penalty": 2.0},
    "never": {"max_length": 24, "num_beams": 4, "early_stopping": "never", "length_penalty": 0.6,
        "num_return_sequences": 3},
    "negative penalty": {"max_length": 16, "num_beams": 2, "length_penalty": -1.0, "min_length": 5},
    "summary": {"max_length": 20, "num_beams": 3, "no_repeat_ngram_size": 2, "min_length": 8,
        "forced_bos_token_id": 5, "repetition_penalty": 1.2},
    "bad words": {"max_length": 20, "bad_words_ids": [[7], [11, 12], [0]], "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.3},
    "renormalized": {"max_length": 12, "num_beams": 4, "forced_eos_token_id": 2, "renormalize_logits": True,
        "bad_words_ids": [[20], [21, 22]]},
    "three ends": {"max_length": 20, "num_beams": 3, "eos_token_id": [0, 5, 9]},
    "three ends, greedy": {"max_length": 20, "eos_token_id": [0, 5, 9], "min_new_tokens": 3},
    "one step": {"max_length": 2, "num_beams": 4},
}  # fmt: skip


# --- against transformers -------------------------------------------------------------------------------


# The others differ in embeddings and filling, which few settings touch.
CASES = [
    (family, settings)
    for family in FAMILIES
    for settings in (SETTINGS if family in ("marian", "bart", "mbart") else ("greedy", "beams", "early"))
]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_the_tokens_are_those_of_transformers(family: str, settings: str) -> None:
    ids, mask = sources()
    wanted = generated(model_of(family), ids, mask, **SETTINGS[settings])
    assert_same(kept(family)(ids, mask, **SETTINGS[settings]), wanted)


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("family", ["marian", "bart", "mbart"])
@pytest.mark.parametrize("beams", [1, 4])
def test_other_weights(family: str, seed: int, beams: int) -> None:
    ids, mask = sources(seed)
    wanted = generated(model_of(family, seed), ids, mask, num_beams=beams, max_length=24)
    assert_same(kept(family, seed)(ids, mask, num_beams=beams, max_length=24), wanted)


def test_rows_finish_at_different_steps_and_some_reach_the_end() -> None:
    # The tests above say little if all rows are alike.
    lengths = set()
    for family in ("marian", "bart", "mbart"):
        for beams in (1, 4):
            lengths |= {*kept(family)(*sources(), num_beams=beams, max_length=24).lengths.tolist()}
    assert len(lengths) >= 5
    assert 24 in lengths


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", ["marian", "mbart"])
def test_the_numpy_path_is_the_twin(family: str, beams: int) -> None:
    ids, mask = sources()
    settings = {"num_beams": beams, "max_length": 16, "no_repeat_ngram_size": 3}
    found = kept(family, library="numpy")(ids.numpy(), mask.numpy(), **settings)
    assert isinstance(found.sequences, np.ndarray)
    assert_same(found, generated(model_of(family), ids, mask, **settings))


@pytest.mark.parametrize("beams", [1, 4])
def test_a_row_alone(beams: int) -> None:
    ids, mask = sources()
    for row in (0, 2):
        one = slice(row, row + 1)
        wanted = generated(model_of("marian"), ids[one], mask[one], num_beams=beams, max_length=20)
        assert_same(kept("marian")(ids[one], mask[one], num_beams=beams, max_length=20), wanted)


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("family", ["marian", "bart"])
def test_padding_in_front_and_within(family: str, beams: int) -> None:
    ids, mask = sources()
    mask[0, :3] = 0
    mask[3, 2:5] = 0
    found = kept(family)(ids, mask, num_beams=beams, max_length=20)
    assert_same(found, generated(model_of(family), ids, mask, num_beams=beams, max_length=20))


@pytest.mark.parametrize("beams", [1, 4])
def test_without_a_mask_all_counts(beams: int) -> None:
    ids, mask = sources(lengths=(6, 6))
    found = kept("bart")(ids, num_beams=beams, max_length=12)
    assert_same(found, generated(model_of("bart"), ids, mask, num_beams=beams, max_length=12))


@pytest.mark.parametrize("beams", [1, 4])
def test_empty_sources_change_nothing_for_the_others(beams: int) -> None:
    decoding, (ids, mask) = kept("bart"), sources()
    wanted = decoding(ids, mask, num_beams=beams, max_length=12)
    mask = mask.clone()
    mask[1] = 0
    found = decoding(ids, mask, num_beams=beams, max_length=12)
    others = [0, 2, 3, 4]
    for row in others:
        length = int(wanted.lengths[row])
        assert found.sequences[row, :length].tolist() == wanted.sequences[row, :length].tolist()
    nothing = decoding(ids[:2, :0], num_beams=beams, max_length=12)
    length = int(nothing.lengths[0])
    assert nothing.sequences.tolist() == nothing.sequences[:1].tolist() * 2
    assert found.sequences[1, :length].tolist() == nothing.sequences[0, :length].tolist()
    none = decoding(ids[:0], num_beams=beams)
    assert tuple(none.sequences.shape) == (0, 1)


def test_the_settings_of_the_model_are_the_defaults() -> None:
    model = decoding_of(model_of("marian"))
    assert model.settings().max_length == 21  # transformers' default: 20 new tokens
    assert model.settings().bad_words == ((89,),)
    own = {"num_beams": 3, "max_length": 9, "length_penalty": 2.0, "forced_bos_token_id": 4, "eos_token_id": 0}
    state = model_of("bart").state_dict()
    config = model_of("bart").config.to_dict()
    found = Decoding.from_state_dict(state, config, generation_config={**own, "typical_p": 1.0}).settings()
    assert (found.beams, found.max_length, found.length_penalty, found.first, found.ends) == (3, 9, 2.0, (4,), (0,))
    assert (found.start, found.pad) == (2, 1)  # from the configuration
    # Older models keep all in their configuration.
    legacy = Decoding.from_state_dict(state, config | own | {"force_bos_token_to_be_generated": True}).settings()
    assert (legacy.beams, legacy.max_length, legacy.first) == (3, 9, (4,))
    assert decoding_of(model_of("bart")).settings(max_new_tokens=5, min_new_tokens=2)[3:5] == (6, 3)


def test_a_given_length_replaces_the_number_of_new_tokens_of_the_model() -> None:
    state, config = model_of("bart").state_dict(), model_of("bart").config.to_dict()
    own = {"max_new_tokens": 9, "min_new_tokens": 4}
    model = Decoding.from_state_dict(state, config, generation_config=own)
    for given, lengths in (
        ({}, (10, 5)),
        ({"max_length": 8, "min_length": 3}, (8, 3)),
        ({"max_length": 8, "max_new_tokens": 5, "min_length": 3, "min_new_tokens": 2}, (6, 3)),
    ):
        settings = model.settings(**given)
        assert (settings.max_length, settings.min_length) == lengths


def test_the_positions_of_marian_are_those_of_transformers() -> None:
    made = model_of("marian").model.encoder.embed_positions.create_weight()
    np.testing.assert_array_equal(sinusoids(*made.shape), made.numpy())


# --- the weights decide where it runs ---------------------------------------------------------------------


LIBRARIES = ["torch", "numpy", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("cuda", "cupy"))]


class _Foreign:
    """An array that is known by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


#: Ids and masks of other libraries than the weights, from a tensor on the CPU.
GIVEN: dict[str, Callable[[Any], Any]] = {
    "torch": lambda x: x, "numpy": lambda x: x.numpy(), "lists": lambda x: x.tolist(), "foreign": lambda x: _Foreign(x)
}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("library", LIBRARIES)
def test_ids_and_masks_of_any_library(library: str, given: str, beams: int) -> None:
    ids, mask = sources()
    wanted = generated(model_of("marian"), ids, mask, num_beams=beams, max_length=16)
    decoding = kept("marian", library=library)
    found = decoding(GIVEN[given](ids), GIVEN[given](mask), num_beams=beams, max_length=16)
    assert_same(found, wanted)
    own = decoding._model.weights.head
    for x in found:
        assert x is None or (type(x) is type(own) and x.device == own.device)
    assert type(decoding(ids[:0]).sequences) is type(own)


# --- 16 bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_in_16_bits_a_token_is_the_best_within_the_rounding(library: str, dtype: str) -> None:
    model, (ids, mask) = model_of("marian"), sources()
    found = decoding_of(model, library, dtype)(ids, mask, num_beams=1, max_length=16)
    clean = torch.where(mask == 1, ids, 89)
    sequences, lengths = (torch.from_numpy(numpy_of(x)).long() for x in (found.sequences, found.lengths))
    with torch.no_grad():
        logits = model(input_ids=clean, attention_mask=mask, decoder_input_ids=sequences[:, :-1]).logits
    logits[:, :, 89] = -math.inf
    chosen = logits.gather(-1, sequences[:, 1:, None])[..., 0]
    counts = torch.arange(1, sequences.shape[1]) < lengths[:, None].clamp(max=15)
    behind = (logits.max(-1).values - chosen)[counts]
    assert behind.max() < (0.1 if dtype == "float16" else 0.6)


# --- sampling -------------------------------------------------------------------------------------------


def test_a_draw_depends_on_its_seed_and_its_source_alone() -> None:
    decoding, (ids, mask) = kept("bart"), sources()
    settings = {"do_sample": True, "max_length": 12, "temperature": 1.5, "top_k": 20, "top_p": 0.95}
    together = decoding(ids, mask, seed=[5, 6, 7, 8, 9], **settings)
    again = decoding(ids, mask, seed=5, **settings)
    assert (together.sequences == again.sequences).all()
    alone = decoding(ids[3:4], mask[3:4], seed=[8], **settings)
    length = int(alone.lengths[0])
    assert together.sequences[3, :length].tolist() == alone.sequences[0].tolist()
    other = decoding(ids, mask, seed=50, **settings)
    assert other.sequences.shape != together.sequences.shape or (other.sequences != together.sequences).any()
    assert not (decoding(ids, mask, **settings).sequences.shape[0] - 5)


def test_the_best_of_one_is_greedy_and_copies_differ() -> None:
    decoding, (ids, mask) = kept("marian"), sources()
    greedy = decoding(ids, mask, max_length=12)
    for settings in ({"top_k": 1}, {"top_p": 0.0, "top_k": 0}, {"temperature": 0.0}):
        drawn = decoding(ids, mask, max_length=12, do_sample=True, seed=1, **settings)
        assert (drawn.sequences == greedy.sequences).all()
    several = decoding(ids, mask, max_length=12, do_sample=True, seed=1, temperature=2.0, num_return_sequences=3)
    assert several.sequences.shape[0] == 15
    rows = {tuple(row) for row in several.sequences[:3].tolist()}
    assert len(rows) == 3


def test_drawn_tokens_are_among_the_best() -> None:
    model, (ids, mask) = model_of("bart"), sources()
    drawn = kept("bart")(ids, mask, do_sample=True, seed=3, top_k=3, temperature=3.0, max_length=10, min_p=0.01)
    clean, sequences = torch.where(mask == 1, ids, 1), drawn.sequences.long()
    with torch.no_grad():
        logits = model(input_ids=clean, attention_mask=mask, decoder_input_ids=sequences[:, :-1]).logits
    ranks = (logits > logits.gather(-1, sequences[:, 1:, None])).sum(-1)
    counts = torch.arange(1, sequences.shape[1]) < drawn.lengths[:, None].clamp(max=9)
    assert ranks[counts].max() == 2


def test_presence_and_frequency_penalties() -> None:
    decoding, (ids, mask) = kept("marian"), sources()
    for settings in ({"presence_penalty": 1e3}, {"frequency_penalty": 1e3}):
        found = decoding(ids, mask, max_length=14, **settings)
        for row, length in zip(found.sequences.tolist(), found.lengths.tolist(), strict=True):
            own = row[1 : min(length, 13)]
            assert len({*own}) == len(own)


# --- while it runs --------------------------------------------------------------------------------------


def test_stop_words_end_a_row() -> None:
    decoding, (ids, mask) = kept("marian"), sources()
    plain = decoding(ids, mask, max_length=24)
    row = int(plain.lengths.argmax())
    tokens = plain.sequences[row].tolist()
    # A pair that is not there before.
    at = next(i for i in range(3, 20) if (tokens[i], tokens[i + 1]) not in itertools.pairwise(tokens[: i + 1]))
    word = tokens[at : at + 2]
    found = decoding(ids, mask, max_length=24, stop_words=[[88, 88, 88], word])
    assert int(found.lengths[row]) == at + 2
    assert found.sequences[row, : at + 2].tolist() == tokens[: at + 2]
    assert (found.sequences[row, at + 2 :] == 89).all()
    for other in range(5):
        own = found.sequences[other, : int(found.lengths[other])].tolist()
        assert own == plain.sequences[other, : len(own)].tolist()
        assert len(own) == plain.lengths[other] or own[-2:] == word


def test_each_step_is_told() -> None:
    decoding, (ids, mask) = kept("marian"), sources()
    told: list[Step] = []
    found = decoding(ids, mask, max_length=24, on_step=told.append)
    assert [x.step for x in told] == [*range(len(told))]
    assert found.sequences.shape[1] == len(told) + 1
    tokens = np.stack([x.tokens for x in told], 1)
    for row, length in enumerate(found.lengths.tolist()):
        assert tokens[row, : length - 1].tolist() == found.sequences[row, 1:length].tolist()
    assert told[-1].finished.all() or len(told) == 23
    assert told[0].parents is None

    told.clear()
    found = decoding(ids, mask, max_length=12, num_beams=3, on_step=told.append)
    assert all(x.tokens.shape == (5, 3) and x.parents is not None and x.finished.shape == (5,) for x in told)
    assert len(told) >= int(found.lengths.max()) - 1

    def stop(step: Step) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        decoding(ids, mask, on_step=stop)
    assert (decoding(ids, mask, max_length=12, num_beams=3).sequences == found.sequences).all()


def test_a_bar_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    decoding, (ids, mask) = kept("marian"), sources()
    plain = decoding(ids, mask, max_length=6)
    assert (decoding(ids, mask, max_length=6, progress=True).sequences == plain.sequences).all()
    assert capsys.readouterr().out == ""


def test_buffers_are_kept_for_the_latest_sizes() -> None:
    decoding = decoding_of(model_of("bart"))
    wanted = {}
    for round_ in range(2):
        for seed, length in enumerate((5, 8, 11, 12, 9)):
            ids, mask = sources(seed, (length, 3))
            for beams in (1, 2):
                found = decoding(ids, mask, num_beams=beams, max_length=10).sequences.tolist()
                assert wanted.setdefault((length, beams), found) == found, round_
    assert len(decoding._searches) == 4


# --- a layer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["marian", "mbart"])
def test_a_layer_is_that_of_transformers(family: str) -> None:
    model = model_of(family)
    layer, config = model.model.decoder.layers[0], model.config
    ours = kept(family)._model.decoder[0]
    generator = torch.Generator().manual_seed(3)
    batch, steps, memory_len, heads, dim = 3, 4, 6, 2, 16
    states = torch.randn(batch, memory_len, 32, generator=generator)
    x = torch.randn(batch, steps, 32, generator=generator)
    lengths = torch.tensor([6, 1, 4], dtype=torch.int32)
    seen = torch.arange(memory_len) < lengths[:, None]
    bias = torch.where(seen, 0.0, -math.inf)[:, None, None].expand(batch, 1, steps, memory_len)
    causal = torch.full((steps, steps), -math.inf).triu(1).expand(batch, 1, steps, steps)
    with torch.no_grad():
        wanted = layer(x, causal, states, encoder_attention_mask=bias)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    states[~seen] = math.nan
    keys, values = (y.reshape(batch, memory_len, heads, dim).contiguous() for y in ours.memory(states.reshape(-1, 32)))
    caches = [torch.full((steps + 1, batch, heads, dim), math.nan) for _ in range(2)]
    assert config.decoder_attention_heads == heads
    for step in range(steps):
        found = ours(x[:, step].contiguous(), *caches, step + 1, keys, values, lengths)
        torch.testing.assert_close(found, wanted[:, step], atol=2e-5, rtol=1e-4)


def test_a_layer_refuses_what_does_not_fit() -> None:
    good = kept("marian")._model.decoder[0].weights
    cases: list[tuple[DecoderWeights, dict[str, Any], str]] = [
        (good, {"heads": 5}, "heads must be a divisor of the hidden size 32, got 5"),
        (good, {"heads": 2, "activation": "tanh"}, "activation must be one of 'gelu'"),
        (good._replace(up=good.down), {"heads": 2}, r"weights.up.weight must be of shape"),
        (good._replace(cross_kv=good.qkv), {"heads": 2}, r"weights.cross_kv.weight must be of shape"),
    ]
    for weights, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            Decoder(weights, **settings)
    layer, entry = Decoder(good, 2), torch.zeros(1, 1, 2, 16)
    with pytest.raises(ValueError, match=r"x must be of shape \[batch, hidden\]"):
        layer(torch.zeros(1, 31), entry, entry, 1, entry, entry, torch.ones(1).int())


# --- bad input ------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"beams": 4}, TypeError, "'beams' is no setting; there are num_beams"),
    ({"num_beams": 0}, ValueError, "num_beams must be an integer of at least 1"),
    ({"num_beams": 2, "do_sample": True}, ValueError, "do_sample must be False with num_beams above 1"),
    ({"num_beams": 2, "num_return_sequences": 3}, ValueError, r"num_return_sequences must be at most num_beams \(2\)"),
    ({"num_return_sequences": 3}, ValueError, "num_return_sequences must be 1 without beams"),
    ({"num_beams": 2, "stop_words": [[3]]}, ValueError, "stop_words must be None with num_beams above 1"),
    ({"stop_words": [[]]}, ValueError, "stop_words must be a list of lists of token ids, none of them empty"),
    ({"bad_words_ids": [[90]]}, ValueError, r"bad_words_ids must be an integer in \[0, 89\]"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer of at least 1"),
    ({"max_length": 1}, ValueError, "max_length must be an integer of at least 2"),
    ({"max_length": 42}, ValueError, "max_length must be at most 41, for the model has 40 positions, got 42"),
    ({"early_stopping": "now"}, ValueError, "early_stopping must be one of False, True, 'never'"),
    ({"top_p": 1.5}, ValueError, r"top_p must be in \[0, 1\], got 1.5"),
    ({"repetition_penalty": 0}, ValueError, r"repetition_penalty must be in \[1e-30, 1e\+30\]"),
    ({"diversity_penalty": 0.5}, ValueError, "diversity_penalty must be left out or 0: it is not implemented, got 0.5"),
    ({"suppress_tokens": [3]}, ValueError, "suppress_tokens must be left out: it is not implemented"),
    ({"eos_token_id": []}, ValueError, "eos_token_id must be the id of the token that ends a sequence"),
    ({"do_sample": True, "seed": [1, 2]}, ValueError, r"seed must be of shape \[batch \* num_return_sequences\]"),
    ({"seed": -1}, ValueError, "seed must be an integer in"),
]


@pytest.mark.parametrize(("settings", "error", "message"), REFUSED, ids=[str([*x[0]]) for x in REFUSED])
def test_settings_that_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kept("marian")(*sources(), **settings)


@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (None, None, TypeError, r"input_ids must be an array \(.*\), got NoneType"),
        ("a text", None, TypeError, r"input_ids must be an array \(.*\), got str"),
        (
            [[1, 2], [3]],
            None,
            ValueError,
            "input_ids must be lists of one length, padded, got lists of several lengths",
        ),
        (torch.zeros(2, 3), None, TypeError, "input_ids must be int32 or int64, got float32"),
        (torch.zeros(3).long(), None, ValueError, r"input_ids must be of shape \[batch, seq\], got \[3\]"),
        (torch.full((1, 2), 90), None, ValueError, r"input_ids\[0, 0\] must be in \[0, 90\), got 90"),
        (torch.ones(1, 41).long(), None, ValueError, r"input_ids must be of at most 40 positions .* a token at 40"),
        (torch.ones(1, 4).long(), [[1]], ValueError, r"attention_mask must be of shape \[batch, seq\] = \[1, 4\], got"),
        (
            torch.ones(1, 4).long(),
            torch.ones(1, 5).long(),
            ValueError,
            r"attention_mask must be of shape \[batch, seq\]",
        ),
        (
            torch.ones(1, 4).long(),
            torch.ones(1, 4),
            TypeError,
            "attention_mask must be bool or uint8 or int8 or int32 or int64, got float32",
        ),
    ],
)
def test_sources_that_are_refused(ids: Any, mask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kept("marian")(ids, mask)


def _without(key: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(state: dict[str, Any], config: dict[str, Any]) -> None:
        (config if key in config else state).pop(key)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, config: config.update(model_type="t5"), "of an encoder-decoder of model_type marian"),
        (_without("d_model"), "config must be a configuration with 'd_model'"),
        (lambda state, config: config.update(activation_function="gelu_10"), "'activation_function'.* one of gelu"),
        (lambda state, config: config.update(decoder_attention_heads=5), "decoder_att.* a divisor of d_model"),
        (lambda state, config: config.update(decoder_layers=3), "'model.decoder.layers.2.self_attn.q_proj.weight'"),
        (_without("model.decoder.layers.1.fc2.bias"), "a state dict with 'model.decoder.layers.1.fc2.bias'"),
        (_without("model.encoder.layernorm_embedding.weight"), "'model.encoder.layernorm_embedding.weight'"),
        (lambda state, config: config.update(vocab_size=91), r"embeddings must be of shape \[vocab_size, d_"),
    ],
)  # fmt: skip
def test_models_that_are_refused(change: Callable[[dict[str, Any], dict[str, Any]], None], message: str) -> None:
    state, config = dict(model_of("bart").state_dict()), model_of("bart").config.to_dict()
    change(state, config)
    with pytest.raises(ValueError, match=message):
        Decoding.from_state_dict(state, config)


# --- a directory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["marian", "marian-two-vocabularies", "bart", "bart-untied", "mbart"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_directory(family: str, library: str, tmp_path: Path) -> None:
    model, (ids, mask) = model_of(family), sources()
    model.save_pretrained(tmp_path)
    decoding = Decoding.from_directory(tmp_path, library=library, device="cpu")
    assert (decoding.dtype, decoding.directory) == ("float32", tmp_path)
    settings = {"max_length": 8, "num_beams": 2}
    # Marian's positions are not in the file: they are computed.
    again = type(model).from_pretrained(tmp_path).eval()
    assert_same(decoding(ids, mask, **settings), generated(again, ids, mask, **settings))


def test_shards_and_pickles_are_read(tmp_path: Path) -> None:
    model, (ids, mask) = model_of("bart"), sources()
    wanted = generated(model, ids, mask, max_length=8)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_same(Decoding.from_directory(tmp_path, library="numpy")(ids, mask, max_length=8), wanted)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    # Files of the base model have no prefix.
    state = {name.removeprefix("model."): x for name, x in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = Decoding.from_directory(tmp_path, library="torch", device="cpu", dtype="float32")
    assert_same(found(ids, mask, max_length=8), wanted)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .* \(it has pytorch_model\.bin"):
        Decoding.from_directory(tmp_path, library="numpy")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not this")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a state dict"):
        Decoding.from_directory(tmp_path, library="torch", device="cpu")
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safeten"):
        Decoding.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not a JSON file"):
        Decoding.from_directory(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        Decoding.from_directory(tmp_path)
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        Decoding.from_directory(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="library must be one of 'torch', 'cupy', 'numpy'"):
        Decoding.from_directory(tmp_path, library="jax")


# --- with a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cuda", "cupy"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["marian", "bart", "mbart"])
def test_a_gpu_gives_the_tokens_of_transformers(family: str, settings: dict[str, Any], library: str) -> None:
    decoding, (ids, mask) = decoding_of(model_of(family), library), sources()
    wanted = generated(model_of(family), ids, mask, **settings)
    # As they are, captured, replayed.
    for _ in range(3):
        assert_same(decoding(ids, mask, **settings), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"num_beams": 4}, {"num_beams": 1}, {"do_sample": True, "seed": 4, "top_k": 9}])
def test_captured_steps_find_what_others_do(settings: dict[str, Any]) -> None:
    as_they_are, decoding = (decoding_of(model_of("marian"), "cuda") for _ in range(2))
    as_they_are._model.layers.is_cuda_torch = False
    both = [sources(seed, (9, 5, 2)) for seed in (1, 2)]
    plain = [as_they_are(ids.cuda(), mask.cuda(), max_length=16, **settings) for ids, mask in both]
    ((_, graphs),) = as_they_are._searches.values()
    assert not graphs._graphs
    side = torch.cuda.Stream()
    for _ in range(2):
        for (ids, mask), wanted in zip(both, plain, strict=True):
            told: list[Step] = []
            with torch.cuda.stream(side):
                found = decoding(ids.cuda(), mask.cuda(), max_length=16, on_step=told.append, **settings)
            assert found.sequences.is_cuda
            assert (found.sequences == wanted.sequences).all()
            assert [x.step for x in told] == [*range(len(told))]
    ((_, graphs),) = decoding._searches.values()
    # One for all steps, and that of the last step, if one was reached, which forces the end.
    assert {()} <= {*graphs._graphs} <= {(), (0,)}


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"forced_bos_token_id": 5, "min_length": 9}])
def test_a_search_that_was_stopped_leaves_nothing_behind(settings: dict[str, Any]) -> None:
    decoding, (ids, mask) = decoding_of(model_of("bart"), "cuda"), sources()
    wanted = generated(model_of("bart"), ids, mask, max_length=14, **settings)

    def stop(step: Step) -> None:
        if step.step == 4:
            raise InterruptedError

    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(InterruptedError):
            decoding(ids, mask, max_length=14, on_step=stop, **settings)
        assert_same(decoding(ids, mask, max_length=14, **settings), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_on_a_gpu(dtype: str) -> None:
    found = decoding_of(model_of("bart"), "cuda", dtype)(*sources(), max_length=12, num_beams=2)
    assert ((found.sequences >= 0) & (found.sequences < 90)).all()
    assert found.scores.is_cuda and found.scores.isfinite().all()


def test_the_second_step_is_captured_and_a_kind_the_second_time() -> None:
    graphs, done = StepGraphs(kept("bart")._model.layers), []
    graphs._captures = True

    class Graph:
        def __init__(self, kind: Any) -> None:
            self.kind = kind

        def replay(self) -> None:
            done.append(("replayed", self.kind))

    def capture(kind: Any, step: Callable[[], None]) -> Graph:
        done.append(("captured", kind))
        graphs._graphs[kind] = Graph(kind)
        return graphs._graphs[kind]

    with patch.object(graphs, "_capture", capture):
        for kind in ((5,), (), (), (6,)) * 2:
            graphs.run(kind, lambda kind=kind: done.append(("ran", kind)))  # type: ignore[misc]
    assert done == [
        ("ran", (5,)), ("captured", ()), ("replayed", ()), ("replayed", ()), ("ran", (6,)),
        ("captured", (5,)), ("replayed", (5,)), ("replayed", ()), ("replayed", ()), ("captured", (6,)),
        ("replayed", (6,)),
    ]  # fmt: skip


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_a_step_forbids_by_its_length(library: str, size: int, rng: np.random.Generator) -> None:
    layers = kept("bart", library=library)._model.layers
    history = rng.integers(0, 4, (5, 8), np.int32)
    for length in range(1, 9):
        scores = rng.normal(size=(5, 6)).astype(np.float32)
        wanted = scores.copy()
        for row, ids in enumerate(history[:, :length].tolist()):
            latest = ids[length - size + 1 :]
            for i in range(length - size + 1):
                if ids[i : i + size - 1] == latest:
                    wanted[row, ids[i + size - 1]] = -np.inf
        ours, counter = layers.put(scores.copy()), layers.put(np.array([length]))
        layers.forbid_repeats_(ours, layers.put(history), counter, size)
        np.testing.assert_array_equal(layers.host(ours), wanted)
        layers.forbid_below_(ours, (2, 5), counter, 4)
        wanted[:, [2, 5]] = -np.inf if length < 4 else wanted[:, [2, 5]]
        np.testing.assert_array_equal(layers.host(ours), wanted)


def test_a_step_reads_the_low_word_of_its_counter() -> None:
    for library in ("torch", "numpy"):
        layers = kept("bart", library=library)._model.layers
        counters = layers.put(np.array([3, 70000]))
        low = layers.low_int32(counters[1:])
        layers.add_(counters, 1)
        assert (str(low.dtype).removeprefix("torch."), layers.host(low).tolist()) == ("int32", [70001])


def test_steps_are_run_as_they_are_without_a_gpu() -> None:
    graphs, ran = StepGraphs(kept("bart")._model.layers), []
    for step, kind in enumerate(((5,), (), (), (6,))):
        graphs.run(kind, lambda step=step: ran.append(step))  # type: ignore[misc]
    assert ran == [0, 1, 2, 3]
    library = arrays.library_of(kept("bart")._model.weights.head)
    assert library is not None and library.name == "torch"
