"""The arguments of `generate`, its settings, and models whose state depends on the length: against stock."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, GenerationConfig, Phi3Config, Phi3ForCausalLM

import cukern.integrations.transformers as ck
from cukern.integrations.transformers import _fit
from tests import transformers_types
from tests.test_integrations_transformers import small_model

pytestmark = pytest.mark.filterwarnings("ignore:the model is on the CPU", "ignore:.*generation flags.*")
PROMPT = torch.arange(3, 8)


def stock(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> list[int]:
    """The new tokens that stock gives for one prompt."""
    given = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    out = model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], **given)
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def both(model: Any, prompts: list[torch.Tensor], **options: Any) -> tuple[ck.Generated, list[list[int]]]:
    """What an enabled model gives, and stock with one prompt at a time."""
    wanted = [stock(model, x, **options) for x in prompts]
    ck.enable(model)
    got = ck.generate(model, prompts, **{"eos_token_id": None, **options})
    ck.disable(model)
    return got, wanted


def longrope(**changes: Any) -> Any:
    """A Phi-3 whose rotary embedding takes other factors above 32 tokens."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 12.0, 16.0],
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "original_max_position_embeddings": 32,
        "rope_parameters": rope, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(3)
    model = Phi3ForCausalLM(Phi3Config(**sizes | changes)).eval()
    for x in model.parameters():
        x.data.normal_(0, 0.3) if x.dim() > 1 else None
    return model


# --- state that depends on the length -------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(5,), (5, 9, 40)])
def test_a_cache_that_the_model_drops_is_dropped(lengths: tuple[int, ...]) -> None:
    prompts = [torch.arange(3, 3 + x) for x in lengths]
    got, wanted = both(longrope(), prompts, max_new_tokens=40)
    assert got.tokens == wanted
    assert got.why == "its rotary embedding depends on the length above 32 tokens"


def test_below_the_length_a_session_serves_the_model() -> None:
    got, wanted = both(longrope(), [PROMPT], max_new_tokens=27)
    assert got.tokens == wanted and got.why == "the model is on the CPU"


def test_own_preparing_is_found_by_what_it_gives() -> None:
    """Without longrope Phi-3 drops its cache all the same, once the tokens pass its original positions."""
    model = longrope(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert _fit.prepares_default_inputs(model, 5, 27) and not _fit.prepares_default_inputs(model, 5, 29)
    got, wanted = both(model, [PROMPT], max_new_tokens=40)
    assert got.tokens == wanted and got.why == "it prepares the inputs of its steps itself"


def test_a_dynamic_rotary_embedding() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    model = small_model(max_position_embeddings=16, rope_parameters=rope)
    got, wanted = both(model, [PROMPT], max_new_tokens=30)
    assert got.tokens == wanted and got.why == "its rotary embedding depends on the length above 16 tokens"
    ck.enable(model)
    said = "prompts must be of one length, since the rotary embedding remembers lengths above 16, got [5, 6]"
    with pytest.raises(ValueError, match=re.escape(said)):
        ck.generate(model, [PROMPT, torch.arange(6)], max_new_tokens=30)


def test_a_cache_that_drops_what_no_mask_hides() -> None:
    """Moshi has the mask of all tokens, and a cache of a window; Mixtral has both of the window."""
    moshi, mixtral = (transformers_types.build(name) for name in ("moshi", "mixtral"))
    assert [_fit.drops_seen_tokens(moshi, x) for x in (12, 13)] == [False, True]
    assert not _fit.drops_seen_tokens(mixtral, 13)


def test_modules_that_hold_the_state_take_prompts_of_one_length() -> None:
    model = transformers_types.build("recurrent_gemma")
    got, wanted = both(model, [PROMPT, PROMPT + 9], max_new_tokens=6)
    assert got.tokens == wanted
    said = (
        "prompts must be of one length, since RecurrentGemmaRecurrentBlock holds the state of its sequences, got [5, 6]"
    )
    with pytest.raises(ValueError, match=re.escape(said)), pytest.warns(UserWarning, match="not enabled"):
        ck.generate(model, [PROMPT, torch.arange(6)], max_new_tokens=3)


# --- arguments ------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Any:
    model = small_model()
    ck.enable(model)
    return model


@pytest.mark.parametrize(("name", "values"), [("top_k", (0, -1, 96, 1000)), ("top_p", (1.0, 1)), ("min_p", (0.0, 0))])
def test_no_limit_has_many_spellings(llama: Any, name: str, values: tuple[float, ...]) -> None:
    def drawn(value: Any) -> list[list[int]]:
        options = {"temperature": 1.5, "top_k": None, "max_new_tokens": 12, name: value}
        return ck.generate(llama, [PROMPT, PROMPT], **options).tokens

    wanted = drawn(None)
    assert all(drawn(value) == wanted for value in values)
    assert drawn({"top_k": 2, "top_p": 0.2, "min_p": 0.8}[name]) != wanted


def test_the_draw_is_that_of_the_generation_config(llama: Any) -> None:
    def drawn(**options: Any) -> list[list[int]]:
        return ck.generate(llama, [PROMPT] * 2, max_new_tokens=12, **options).tokens

    greedy, sampled = drawn(), drawn(temperature=1.5, top_k=7)
    assert greedy != sampled
    llama.generation_config.update(do_sample=True, temperature=1.5, top_k=7)
    assert drawn() == sampled == drawn(do_sample=True) != drawn(top_k=50)
    assert drawn(do_sample=False) == greedy == drawn(temperature=0)
    assert drawn(generation_config=GenerationConfig(do_sample=False)) == greedy
    llama.generation_config.update(temperature=None, top_k=None)
    assert drawn() == drawn(temperature=1.0, top_k=50)  # the defaults of transformers


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 11}, {"repetition_penalty": 1.7, "max_new_tokens": 20},
        {"no_repeat_ngram_size": 2, "max_new_tokens": 20}, {"bad_words_ids": [[5], [7, 8]], "max_new_tokens": 12},
        {"suppress_tokens": [*range(40)], "max_new_tokens": 12}, {"use_cache": False, "max_new_tokens": 6},
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_argument", [True, False])
def test_settings_are_those_of_stock(options: dict[str, Any], is_argument: bool) -> None:
    model = small_model()
    plain = stock(model, max_new_tokens=20)
    if not is_argument:
        model.generation_config.update(**options)
        options = {}
    got, wanted = both(model, [PROMPT, torch.arange(20, 28)], **options)
    assert got.tokens == wanted
    if "use_cache" not in options and model.generation_config.use_cache:
        assert wanted[0] != plain


@pytest.mark.parametrize("session", [True, False])
def test_a_stop_token_waits_for_the_fewest_tokens(session: bool) -> None:
    model = small_model()
    whole = [stock(model, x, max_new_tokens=16) for x in (PROMPT, torch.arange(20, 28))]
    stops = [whole[0][1], whole[1][2]]
    options: dict[str, Any] = {"eos_token_id": stops, "max_new_tokens": 16, "use_cache": session}
    for fewest in ({}, {"min_new_tokens": 6}, {"min_length": 12}):
        got, wanted = both(model, [PROMPT, torch.arange(20, 28)], **options, **fewest)
        assert got.tokens == wanted
        assert (len(got.tokens[0]) > 2) == bool(fewest)


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_pad_id_in_a_prompt_is_a_token(use_cache: bool) -> None:
    model = small_model()
    model.generation_config.pad_token_id = 0
    got, wanted = both(model, [torch.tensor([0, 5, 0, 7])], max_new_tokens=6, use_cache=use_cache)
    assert got.tokens == wanted


def test_lengths_that_nothing_bounds_end_at_the_positions(llama: Any) -> None:
    prompt = torch.arange(90)
    assert [len(x) for x in ck.generate(llama, [prompt, prompt[:70]]).tokens] == [38, 58]
    llama.generation_config.max_new_tokens = 3
    assert len(ck.generate(llama, [prompt]).tokens[0]) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 2}, ValueError, "num_beams must be 1, since generate of cukern does not serve it, got 2"),
        ({"typical_p": 0.9}, ValueError, "typical_p must be 1.0, since generate of cukern does not serve it, got 0.9"),
        ({"output_scores": True}, ValueError, "output_scores must be left out, since generate of cukern does not"),
        ({"streamer": 1}, TypeError, "generate of cukern takes its own arguments and the settings of a Generat"),
        ({"generation_config": {}}, TypeError, "generation_config must be a GenerationConfig, got dict"),
        ({"prompts": ["a text"]}, TypeError, "prompts must be of token ids, which a tokenizer makes of texts, got str"),
        ({"prompts": "a text"}, TypeError, "prompts must be a tensor or a sequence of prompts, got str"),
        ({"prompts": [[0.5, 1.5]]}, TypeError, "prompts must be integers, got float32"),
        ({"prompts": [[object()]]}, TypeError, "prompts must be sequences of integers, got list"),
        ({"prompts": [[3, 96]]}, ValueError, "prompts must be of ids in the vocabulary, [0, 95], got 96"),
        ({"prompts": torch.tensor([[-1, 3]])}, ValueError, "prompts must be of ids in the vocabulary, [0, 95], got -1"),
        ({"prompts": [[1] * 120], "max_new_tokens": 9}, ValueError, "prompts must be of at most 128 tokens with the n"),
        ({"max_new_tokens": None, "max_length": 3}, ValueError, "max_length must be more than the longest prompt has"),
        ({"eos_token_id": 96}, ValueError, "eos_token_id must be in the vocabulary of 96, got 96"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be above 0, got 0.0"),
        ({"repetition_penalty": "a"}, TypeError, "repetition_penalty must be a number"),
        ({"pad_token_id": 96}, ValueError, "pad_token_id must be an integer in [0, 95]"),
        ({"temperature": -1.0}, ValueError, "temperature must be at least 0, got -1.0"),
        ({"temperature": 1.0, "top_k": -2}, ValueError, "top_k must be"),
        ({"min_new_tokens": -1}, ValueError, "min_new_tokens must be an integer in [0, "),
    ],
)
def test_one_sentence_each(llama: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"prompts": [PROMPT], "max_new_tokens": 2, **options}
    with pytest.raises(error, match=re.escape(message)):
        ck.generate(llama, given.pop("prompts"), **given)


def test_an_encoder_is_refused() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = BertLMHeadModel(BertConfig(**sizes, intermediate_size=16)).eval()
    for x in encoder.parameters():
        x.data.normal_(0, 0.3)
    ck.enable(encoder)
    said = "model must be a decoder, whose tokens see no later ones (config.is_decoder), got BertLMHeadModel"
    with pytest.raises(ValueError, match=re.escape(said)):
        ck.generate(encoder, [PROMPT])
