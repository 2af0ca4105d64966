"""Versions of transformers: what `enable` replaces in each, wrapped forwards, and the names of the cache."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import cukern.integrations.transformers as ck
from cukern.integrations.transformers import _cache, _fit, _rewrite, _versions
from tests import transformers_reports
from tests.test_integrations_transformers import LEFT_OUT, logits_of, prompts, small_model, tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:the model is on the CPU", "ignore:.*generation flags.*")
ROOT = Path(__file__).parents[1]
LAYERS = LlamaAttention, LlamaDecoderLayer


@pytest.fixture(autouse=True)
def no_class_has_drawn_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "_warned", set())


# --- what is replaced -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [x for x in transformers_reports.models() if tuple(x.split(".")) not in LEFT_OUT])
def test_a_model_is_replaced_as_the_record_says(model: str) -> None:
    wanted = transformers_reports.recorded(model)
    assert wanted, f"{model} has no record: python -m tests.transformers_reports adds it"
    assert transformers_reports.report(model) == wanted


def test_the_installed_version_is_tested() -> None:
    first, last = map(_versions.numbers, _versions.TESTED)
    assert first <= _versions.numbers(transformers.__version__) <= last
    lower = re.findall(r"transformers>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert {*lower} == {_versions.TESTED[0]}


# --- wrapped forwards -----------------------------------------------------------------------------------

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def renames(calls: list[str]) -> Wrapper:
    """A wrapper that takes another name of the mask and notes its calls, as the library's own wrappers do."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(self).__name__)
            if "seen" in kwargs:
                kwargs["attention_mask"] = kwargs.pop("seen")
            return forward(self, *args, **kwargs)

        return wrapped

    return wrap


class Held:
    """A wrapper that holds a forward as an attribute."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.forward = forward

    def __get__(self, module: Any, owner: Any) -> Any:
        return self if module is None else functools.partial(self.forward, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def opaque(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that does not say what it wraps."""
    return lambda self, *args, **kwargs: forward(self, *args, **kwargs)


def wrap_layers(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any]) -> None:
    for layer in LAYERS:
        monkeypatch.setattr(layer, "forward", wrap(layer.forward))


def test_wrapped_forwards_are_replaced_and_stay_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts()
    plain = ck.enable(small_model())
    wanted, tokens = logits_of(small_model(), ids, mask), tokens_of(small_model(), ids, mask)
    calls: list[str] = []
    wrap_layers(monkeypatch, lambda forward: torch.no_grad()(renames(calls)(forward)))
    model = small_model()
    assert ck.enable(model).replaced == plain.replaced
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)
    assert sorted(calls) == ["LlamaAttention"] * 2 + ["LlamaDecoderLayer"] * 2
    made = ck.generate(model, ids, attention_mask=mask, max_new_tokens=4, eos_token_id=None)
    assert made.tokens == tokens
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 5, 32)
    angles, seen = model.model.rotary_emb(x, torch.arange(5)[None]), torch.ones(1, 1, 5, 5).tril().bool()
    got = attention(x, angles, seen=seen)[0]
    assert not got.requires_grad
    torch.testing.assert_close(got, attention(x, angles, attention_mask=seen)[0])


def test_gradients_pass_wrapped_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_layers(monkeypatch, renames([]))
    ids, mask = prompts()
    wanted = small_model()(input_ids=ids, attention_mask=mask).logits
    model = small_model()
    ck.enable(model)
    got = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-4)
    got.sum().backward()
    assert all(x.grad is not None for x in model.parameters())


def test_wrapped_forwards_are_compiled_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_layers(monkeypatch, renames([]))
    ids, mask = prompts()
    wanted = logits_of(small_model(), ids, mask)
    model = small_model()
    ck.enable(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits_of(compiled, ids, mask, use_cache=False), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("wrap", [Held, opaque])
def test_forwards_that_cannot_be_read_stay_with_a_true_reason(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_layers(monkeypatch, wrap)
    ids, mask = prompts()
    model = small_model()
    wanted = logits_of(model, ids, mask)
    report = ck.enable(model)
    assert not {"LlamaAttention", "LlamaDecoderLayer"} & {x.what for x in report.replaced if x.part != "attention"}
    kept = {x.part: x.how for x in report.kept}
    if wrap is Held:
        assert kept["rotary"] == "the source of its forward, or a wrapper around it, cannot be read"
    else:
        assert kept["attention"] == "no forward that can be read names ALL_ATTENTION_FUNCTIONS"
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)


def test_a_closure_is_not_rewritten() -> None:
    kept = 1.0

    class Closure(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * kept

    assert _rewrite.rewritten(Closure(), {}) is None


# --- warnings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "age"), [("99.1.0", "newer"), ("5.3.2", "older")])
def test_an_untested_version_that_hides_parts_draws_one_warning(
    version: str, age: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_versions.transformers, "__version__", version)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="transformers")
        ck.enable(small_model())  # nothing is hidden
    wrap_layers(monkeypatch, opaque)
    said = (
        f"transformers {version} is {age} than the tested {' to '.join(_versions.TESTED)}: "
        "sums, rotary, attention of LlamaForCausalLM stay as they were"
    )
    with pytest.warns(UserWarning, match=re.escape(said)):
        ck.enable(small_model())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="transformers")
        ck.enable(small_model())


def test_a_tested_version_draws_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap_layers(monkeypatch, opaque)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="transformers")
        ck.enable(small_model())


def test_parts_that_are_not_asked_for_draw_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions.transformers, "__version__", "99.1.0")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="transformers")
        ck.enable(small_model(), parts=["norms"])


# --- the cache ------------------------------------------------------------------------------------------


def test_generate_draws_no_warning_of_a_deprecated_name() -> None:
    ids, mask = prompts()
    model = small_model()
    ck.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ck.generate(model, ids, attention_mask=mask, max_new_tokens=2, eos_token_id=None)


def test_a_forward_that_hands_its_keywords_on_gets_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = prompts()
    tokens = tokens_of(small_model(), ids, mask)
    model = small_model()
    given = []

    class Hands(type(model)):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            given.append({*kwargs} & {*_cache.CACHE_NAMES})
            return super().forward(**kwargs)

    model.__class__ = Hands
    ck.enable(model)
    assert _fit.fit(model).pads
    given.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        made = ck.generate(model, ids, attention_mask=mask, max_new_tokens=4, eos_token_id=None)
    assert made.tokens == tokens
    assert len(given) == 4 and all(len(x) == 1 for x in given)


def test_the_deprecated_name_of_the_cache_is_taken_as_before() -> None:
    def steps(model: Any) -> tuple[torch.Tensor, list[str]]:
        cache, attention = DynamicCache(config=model.config), model.model.layers[0].self_attn
        x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(4))
        angles = model.model.rotary_emb(x, torch.arange(20)[None])
        with torch.no_grad(), warnings.catch_warnings(record=True) as drawn:
            warnings.simplefilter("always", FutureWarning)
            out = attention(x, angles, attention_mask=None, past_key_values=cache)[0]
        assert cache.get_seq_length() == 20
        return out, [str(x.message) for x in drawn]

    model = small_model()
    wanted, warned = steps(model)
    ck.enable(model)
    got, drawn = steps(model)
    assert drawn == warned
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
