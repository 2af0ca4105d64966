"""Models of transformers on cukern: every class that takes an experts implementation, against eager."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import cukern
import cukern.integrations.transformers as ck
from cukern.integrations.transformers import _attention, _cache, _deferred, _experts, _fit, _norms
from cukern.integrations.transformers._cache import CACHE_NAME
from tests import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore:the model is on the CPU", "ignore:.*generation flags.*")

CLASSES = tiny_models.experts_classes()
#: Classes that are not compared, each with why.
LEFT_OUT = {
    ("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextExperts"): "transformers cannot build it from its own configuration",
}
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    LEFT_OUT["diffusion_gemma", "DiffusionGemmaTextExperts"] = "before 5.23 transformers does not build it by default"
COMPARED = [x for x in CLASSES if x not in LEFT_OUT]
NEW_TOKENS = 4
PROMPT = 20


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts, the second one padded on its left."""
    ids = torch.randint(3, 90, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return ids, mask


def logits_of(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """What a model gives for the tokens that are not padding; its hidden states, where it has no head."""
    torch.manual_seed(0)  # some models draw
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, **options)
    found = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return found[mask.bool()] if found.shape[1] == ids.shape[1] else found


def steps_of(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """What a model without `generate` gives for two more tokens over its cache; None for one without a cache."""
    torch.manual_seed(0)
    with torch.no_grad():
        out = model(input_ids=ids[:, :-2], attention_mask=mask[:, :-2], use_cache=True)
        cache, found = getattr(out, CACHE_NAME, None), []
        if cache is None:
            return None
        for end in (ids.shape[1] - 1, ids.shape[1]):
            given = {CACHE_NAME: cache, "use_cache": True}
            out = model(input_ids=ids[:, end - 1 : end], attention_mask=mask[:, :end], **given)
            found.append(out.last_hidden_state)
    return torch.cat(found, 1)


def tokens_of(model: Any, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> list[list[int]]:
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None,
        **options,
    )  # fmt: skip
    found: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return found


def tokens_alone(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The tokens of each prompt in a batch of its own, without padding."""
    prompts = [row[own][None] for row, own in zip(ids, mask.bool(), strict=True)]
    return [tokens_of(model, x, torch.ones_like(x))[0] for x in prompts]


def small_model(**changes: Any) -> Any:
    """A dense model: Llama."""
    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "eos_token_id": None,
    }  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()
    for x in model.parameters():
        x.data.mul_(8 if x.dim() > 1 else 1)
    return model


@pytest.fixture
def llama() -> Any:
    return small_model()


@pytest.fixture
def qwen() -> Any:
    return tiny_models.tiny("qwen3_moe", "Qwen3MoeExperts")


# --- every class ----------------------------------------------------------------------------------------


def test_all_classes_are_listed() -> None:
    assert not {*LEFT_OUT} - {*CLASSES}
    assert len(COMPARED) >= 40
    assert ("mixtral", "MixtralExperts") in COMPARED


@pytest.mark.parametrize(("folder", "name"), COMPARED, ids=[name for _, name in COMPARED])
def test_a_class_gives_what_eager_gives(folder: str, name: str) -> None:
    model = tiny_models.tiny(folder, name)
    experts = [x for x in model.modules() if type(x).__name__ == name]
    assert experts and all(x.config._experts_implementation != "cukern" for x in experts)
    for x in experts:
        x.config._experts_implementation_internal = "eager"
    ids, mask = prompts()
    wanted = logits_of(model, ids, mask)
    generates = model.can_generate()
    steps = tokens_of(model, ids, mask) if generates else None
    # A model may see the padding of a batch; `generate` of cukern does not.
    alone = tokens_alone(model, ids, mask) if generates else None
    rows = None if generates or folder == "diffusion_gemma" else steps_of(model, ids, mask)

    report = ck.enable(model)
    assert any(line.what == name for line in report.replaced), report
    assert all(x.config._experts_implementation == "cukern" for x in experts)
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)
    if generates:
        assert tokens_of(model, ids, mask) == steps
        got = ck.generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None)
        assert got.tokens == alone
    if rows is not None:
        torch.testing.assert_close(steps_of(model, ids, mask), rows, rtol=0, atol=1e-4)

    ck.disable(model)
    assert torch.equal(logits_of(model, ids, mask), wanted)
    assert not any("forward" in x.__dict__ for x in model.modules())


def _transposed_classes() -> list[tuple[str, str]]:
    found = []
    for folder, name in COMPARED:
        module = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[name])
        lines = inspect.getsource(module).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(f"class {name}("))
        found += [(folder, name)] * ("is_transposed=True" in "".join(lines[at - 5 : at]))
    return found


TRANSPOSED = _transposed_classes()


def test_classes_with_transposed_weights_are_found() -> None:
    assert {("gpt_oss", "GptOssExperts"), ("aria", "AriaExperts")} & {*CLASSES} <= {*TRANSPOSED}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("folder", "name"), TRANSPOSED, ids=[name for _, name in TRANSPOSED])
def test_transposed_weights_are_not_copied(
    folder: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.tiny(folder, name).to(dtype)
    ids, mask = prompts()
    ck.enable(model)
    taken = []
    op = cukern.fused_experts

    def spy(x: Any, w1: torch.Tensor, w2: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        taken.append((w1, w2))
        return op(x, w1, w2, *arguments, **options)

    monkeypatch.setattr(cukern, "fused_experts", spy)
    logits_of(model, ids, mask)
    experts = [x for x in model.modules() if type(x).__name__ == name]
    assert len(taken) == len(experts) > 0
    for given, x in zip(taken, experts, strict=True):
        for weights, own in zip(given, (x.gate_up_proj, x.down_proj), strict=True):
            assert weights.data_ptr() == own.data_ptr()
            assert weights.shape == own.transpose(1, 2).shape and weights.stride() == own.transpose(1, 2).stride()


# --- what is replaced -----------------------------------------------------------------------------------


def test_the_report_says_what_was_replaced_and_what_not(qwen: Any) -> None:
    report = ck.enable(qwen, parts=["experts", "norms"])
    assert str(report).splitlines()[:4] == [
        "Qwen3MoeForCausalLM on cukern",
        "  replaced",
        "    experts    2 x Qwen3MoeExperts: fused_experts, silu",
        "    norms      9 x Qwen3MoeRMSNorm: rms_norm",
    ]
    assert report.parts() == {"experts", "norms"}
    assert {(x.part, x.how) for x in report.kept} == {(x, "not asked for") for x in ck.PARTS[1:] if x != "norms"}


def test_the_forms_of_well_known_models() -> None:
    def hows(folder: str, name: str) -> dict[str, str]:
        return {x.part: x.how for x in ck.enable(tiny_models.tiny(folder, name)).replaced}

    found = hows("deepseek_v3", "DeepseekV3Experts")
    assert found["routers"] == "moe_fused_gate, the best 2 by sigmoid and a bias, 1 of 2 groups"
    assert found["rotary"] == "rotary_embedding, deinterleaved, rotary_embedding, half"
    assert "attention" in found
    assert found["sums"] == "fused_add_rms_norm, in generate of this package"
    assert hows("mixtral", "MixtralExperts")["routers"] == "topk_softmax, the best 2 by softmax"
    assert hows("deepseek_v2", "DeepseekV2Experts")["experts"] == "fused_experts, silu"
    assert hows("gpt_oss", "GptOssExperts")["experts"] == "fused_experts, swigluoai, interleaved"
    assert hows("nemotron_h", "NemotronHExperts")["experts"] == "fused_experts, relu2_no_mul"
    assert hows("qwen3_next", "Qwen3NextExperts")["norms"] == "rms_norm, of weights that are stored minus 1"
    model = tiny_models.tiny("deepseek_v3", "DeepseekV3Experts")
    for x in model.modules():
        if hasattr(x, "qk_head_dim"):
            x.qk_head_dim = 24
    kept = [x.how for x in ck.enable(model).kept if x.part == "attention"]
    assert kept == ["sdpa, since its keys have 24 numbers and its values 16"]
    assert "around the activation of the model" in hows("deepseek_v4", "DeepseekV4Experts")["experts"]


def test_a_dense_model(llama: Any) -> None:
    ids, mask = prompts()
    wanted, tokens = logits_of(llama, ids, mask), tokens_of(llama, ids, mask)
    report = ck.enable(llama)
    assert report.parts() == {"norms", "sums", "rotary", "attention", "products"}
    assert [x.how for x in report.kept if x.part == "experts"] == ["there are none that are known here"]
    torch.testing.assert_close(logits_of(llama, ids, mask), wanted, rtol=0, atol=1e-4)
    assert tokens_of(llama, ids, mask) == tokens
    assert tokens_of(llama, ids, mask, cache_implementation="static") == tokens


@pytest.mark.parametrize("changed", [{"hidden_act": "gelu"}, {"rms_norm_eps": 0.5}, {"sliding_window": 5}])
def test_what_a_configuration_changes(changed: dict[str, Any]) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = tiny_models.small(MixtralConfig, "mixtral")
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes | changed)).eval()
    for x in model.parameters():
        x.data.normal_(0, 0.2) if x.dim() > 1 else None
    ids, mask = prompts()
    wanted, tokens = logits_of(model, ids, mask), tokens_of(model, ids, mask)
    ck.enable(model)
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)
    assert tokens_of(model, ids, mask) == tokens
    assert ck.generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None).tokens == tokens


def test_another_formula_stays(qwen: Any) -> None:
    class OtherRMSNorm(type(qwen.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * 1.01  # type: ignore[no-any-return]

    qwen.model.norm = OtherRMSNorm(32).eval()
    report = ck.enable(qwen)
    kept = [x for x in report.kept if x.what == "OtherRMSNorm"]
    assert [x.how for x in kept] == ["its formula is not that of an RMS norm alone"]


def test_sentinel_ids_have_no_part(qwen: Any) -> None:
    ck.enable(qwen)
    experts = next(filter(_experts.is_experts, qwen.modules()))
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.randint(0, 8, (5, 2))
    left = ids.clone()
    left[:, 1] = 8
    with torch.no_grad():
        alone = experts(x, ids[:, :1], weights[:, :1])
        torch.testing.assert_close(experts(x, left, weights), alone, rtol=1e-5, atol=1e-5)


# --- gradients, compilation, caches ---------------------------------------------------------------------


def test_where_a_gradient_is_asked_for_the_own_code_runs(qwen: Any) -> None:
    ids, mask = prompts()
    wanted = qwen(input_ids=ids, attention_mask=mask).logits
    ck.enable(qwen)
    got = qwen(input_ids=ids, attention_mask=mask).logits
    assert got.requires_grad
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-4)
    got.sum().backward()
    assert all(x.grad is not None for x in qwen.parameters())


def test_the_step_is_paged_attention(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = _attention.cukern.paged_attention

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[0].shape)
        return original(*args, **options)

    monkeypatch.setattr(_attention.cukern, "paged_attention", counted)
    ids, mask = prompts()
    ck.enable(qwen)
    _fit.fit(qwen)
    calls.clear()
    tokens_of(qwen, ids, mask)
    assert len(calls) == 2 * (NEW_TOKENS - 1)  # layers, and steps after the prefill
    ck.generate(qwen, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert len(calls) == 4 * (NEW_TOKENS - 1)


def test_a_mask_with_holes_is_left_to_sdpa(qwen: Any) -> None:
    ids, mask = prompts()
    mask[0, 5:7] = 0
    tokens = tokens_of(qwen, ids, mask)
    ck.enable(qwen)
    assert tokens_of(qwen, ids, mask) == tokens


@pytest.mark.parametrize("window", [10**6, 4])
@pytest.mark.parametrize(("queries", "past", "room"), [(7, 0, 0), (5, 6, 0), (6, 3, 4)])
@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 2, 5)])
def test_a_prefill_is_varlen_attention(
    padding: tuple[int, ...], queries: int, past: int, room: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    original = _attention.cukern.varlen_attention
    monkeypatch.setattr(_attention.cukern, "varlen_attention", lambda *x, **y: calls.append(x) or original(*x, **y))
    torch.manual_seed(0)
    end, heads, kv_heads = queries + past, 4, 2
    position, place = torch.arange(past, end)[:, None], torch.arange(end + room)
    seen = (place <= position) & (place > position - window)
    mask = torch.stack([seen & (place >= first) for first in padding])[:, None]
    query = torch.randn(3, queries, heads, 16).bfloat16().transpose(1, 2)
    key, value = (torch.randn(3, kv_heads, end + room, 16).bfloat16() for _ in range(2))
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    got, _ = _attention.attention_forward(module, query, key, value, mask, scaling=0.4)
    assert len(calls) == 1
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), mask, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    for i, first in enumerate(padding):
        rows = slice(max(0, first - past), None)
        torch.testing.assert_close(got[i, rows].float(), wanted[i, rows], rtol=2**-6, atol=2**-6)
    # A mask with a hole is for sdpa.
    mask[0, 0, -1, end - 2] = False
    mask = mask.clone()
    _attention.attention_forward(module, query, key, value, mask, scaling=0.4)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("folder", "name"), [("deepseek_v32", "DeepseekV32Experts"), ("glm_moe_dsa", "GlmMoeDsaExperts")]
)
def test_attention_to_the_tokens_of_an_indexer_stays(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer chooses 5 tokens of the prompt, and the model masks the others for eager and sdpa alone."""
    monkeypatch.setitem(tiny_models.SIZES, "index_topk", 5)
    model = tiny_models.tiny(folder, name)
    ids, mask = prompts()
    wanted, tokens = logits_of(model, ids, mask), tokens_of(model, ids, mask)
    report = ck.enable(model)
    kept = [x.how for x in report.kept if x.part == "attention"]
    assert kept == ["a forward of its configuration tells sdpa from other attentions"]
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)
    assert tokens_of(model, ids, mask) == tokens
    # The padding of a batch has a part in what the indexer chooses: `generate` of cukern runs the prompts without it.
    ck.disable(model)
    alone = tokens_alone(model, ids, mask)
    ck.enable(model)
    assert ck.generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None).tokens == alone


def test_attention_that_joins_its_mask_with_numbers_stays() -> None:
    """DeepSeek-V4 joins the mask with that of compressed tokens, in numbers."""
    kept = [
        x.how for x in ck.enable(tiny_models.tiny("deepseek_v4", "DeepseekV4Experts")).kept if x.part == "attention"
    ]
    assert kept == ["a forward of its configuration joins its mask with numbers"]


def test_a_mask_that_cannot_be_asked_about_gives_nan_for_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_attention, "is_traced", lambda: True)
    mask = torch.ones(3, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., :7], mask[2, ..., 5:9] = False, False
    rows = _attention.Rows.of_mask(mask, 3)
    assert rows is not None and rows.starts[:2].tolist() == [0, 7]
    assert rows.lengths.tolist() == [40, 33, 2**30 + 1]


@pytest.mark.parametrize("window", [None, 12, 40])
def test_a_step_that_asks_nothing_of_the_device(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a graph is captured: rows shorter than a page, and windows, are found on the device."""
    model = small_model() if window is None else tiny_models.tiny("mixtral", "MixtralExperts")
    for config in {id(x.config): x.config for x in model.modules() if hasattr(x, "config")}.values():
        config.sliding_window = window
    ids, mask = prompts()
    mask[1, :14] = 0
    wanted = tokens_of(model, ids, mask)
    ck.enable(model)
    monkeypatch.setattr(_attention, "is_traced", lambda: True)
    assert tokens_of(model, ids, mask) == wanted
    assert tokens_of(model, ids, mask, cache_implementation="static") == wanted
    # The cache of `ck.generate` has room for a page after each row, so that no row needs another computation.
    monkeypatch.delattr(_attention, "_one_token")
    assert ck.generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None).tokens == wanted


@pytest.mark.parametrize("tokens", [16, 17, 31, 40])
@pytest.mark.parametrize("pads", [(0, 0), (0, 3), (15, 9), (24, 20)])
@pytest.mark.parametrize("holes", [False, True])
def test_rows_of_a_cache_as_pages(tokens: int, pads: tuple[int, int], holes: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    key, value = (torch.randn(2, 2, tokens, 8, generator=generator) for _ in range(2))
    query = torch.randn(2, 4, 1, 8, generator=generator)
    mask = torch.stack([torch.arange(tokens) >= min(x, tokens - 1) for x in pads])[:, None, None]
    mask[0, ..., tokens // 2] = not holes
    module = torch.nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    with torch.no_grad():
        got, _ = _attention.attention_forward(module, query, key, value, mask, scaling=0.4)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=0.4, enable_gqa=True
        )
    torch.testing.assert_close(got, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_torch_compile(qwen: Any) -> None:
    ids, mask = prompts()
    wanted = logits_of(qwen, ids, mask)
    ck.enable(qwen)
    compiled = torch.compile(qwen, backend="aot_eager")
    torch.testing.assert_close(logits_of(compiled, ids, mask, use_cache=False), wanted, rtol=0, atol=1e-4)


def test_a_compiled_step_over_a_static_cache_is_one_graph(qwen: Any) -> None:
    ids, mask = prompts()
    ck.enable(qwen)
    wanted = logits_of(qwen, ids, mask)[-1]
    cache = StaticCache(config=qwen.config, max_cache_len=64)
    given = {CACHE_NAME: cache, "use_cache": True}
    logits_of(qwen, ids[:, :-1], mask[:, :-1], **given)
    compiled = torch.compile(qwen.forward, backend="aot_eager", fullgraph=True)
    place = torch.full((2, 1), PROMPT - 1)
    with torch.no_grad():
        out = compiled(input_ids=ids[:, -1:], attention_mask=mask, position_ids=place, **given)
    torch.testing.assert_close(out.logits[1, 0], wanted, rtol=0, atol=1e-4)


def test_a_router_in_float32_follows_its_weight() -> None:
    model = tiny_models.tiny("deepseek_v3", "DeepseekV3Experts").to(torch.bfloat16)
    ck.enable(model, parts=["routers"])
    router = next(x for x in model.modules() if type(x).__name__ == "DeepseekV3TopkRouter")
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(2):
            got, wanted = router(x)[0], type(router).forward(router, x)[0]
            assert got.dtype == torch.float32
            torch.testing.assert_close(got, wanted)
            router.weight.mul_(2)


# --- generate -------------------------------------------------------------------------------------------


def test_prompts_of_different_lengths(qwen: Any) -> None:
    ck.enable(qwen)
    ids, mask = prompts()
    wanted = ck.generate(qwen, ids, attention_mask=mask, max_new_tokens=5, eos_token_id=None)
    got = ck.generate(qwen, [ids[0].tolist(), ids[1, 3:]], max_new_tokens=5, eos_token_id=None)
    assert got.tokens == wanted.tokens and got.steps == 5
    again = ck.generate(qwen, [ids[0, 9:], ids[1]], max_new_tokens=5, eos_token_id=None)  # in the same session
    assert again.tokens[0] == ck.generate(qwen, [ids[0, 9:]], max_new_tokens=5, eos_token_id=None).tokens[0]
    alone = ck.generate(qwen, [ids[1, 3:]], max_new_tokens=5, eos_token_id=None)
    assert alone.tokens[0] == got.tokens[1]
    assert not got.captured and got.why == "the model is on the CPU"
    assert got.tokens_per_s > 0


@pytest.mark.parametrize("name", ["stablelm", "phi", "gpt_neox", "glm4", "nemotron", "gpt_oss", "phi3"])
def test_one_prompt_of_models_whose_keys_lie_heads_first(name: str) -> None:
    """At batch 1 the keys of such a model are a view with the strides of the heads, at batch 2 a copy."""
    config_class = type(transformers.AutoConfig.for_model(name))
    sizes = {**tiny_models.small(config_class, name), "num_key_value_heads": 4, "eos_token_id": None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**sizes)).eval()
    for x in model.parameters():
        x.data.normal_(0, 0.3) if x.dim() > 1 else None
    ids = torch.arange(3, 8)
    wanted = tokens_of(model, ids[None], torch.ones(1, 5))
    ck.enable(model)
    for count in (1, 2):
        assert ck.generate(model, [ids] * count, max_new_tokens=NEW_TOKENS).tokens == wanted * count


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_cache_takes_keys_of_any_strides(batch: int, order: tuple[int, ...]) -> None:
    sizes = 3, 5, 8  # heads, tokens, head_dim
    given = torch.randn(batch, *(sizes[i] for i in order))
    states = given.permute(0, *(1 + order.index(i) for i in range(3)))
    cache, slots = _cache.static_cache(small_model(), 32, *(torch.zeros(x, dtype=torch.int64) for x in ((), batch)))
    slots.prepare_prefill(5)
    keys, values = cache.layers[0].update(states, states + 1)
    assert torch.equal(keys[:, :, :5], states) and torch.equal(values[:, :, :5], states + 1)


def test_stop_tokens_and_callbacks(qwen: Any) -> None:
    ck.enable(qwen)
    ids, mask = prompts()
    whole = ck.generate(qwen, ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None).tokens
    stops = [whole[0][2], whole[1][4]]
    seen: list[list[int]] = []
    got = ck.generate(
        qwen,
        ids,
        attention_mask=mask,
        max_new_tokens=8,
        eos_token_id=stops,
        on_token=lambda _, x: seen.append(x.tolist()),
    )
    for tokens, all_of_them in zip(got.tokens, whole, strict=True):
        end = next(i for i, x in enumerate(all_of_them) if x in stops)
        assert tokens == all_of_them[: end + 1]
    assert [x[0] for x in seen][: len(got.tokens[0])] == got.tokens[0]
    assert len(seen) == got.steps < 8
    ended = ck.generate(qwen, ids, max_new_tokens=8, eos_token_id=None, on_token=lambda step, _: step < 2)
    assert ended.steps == 3


def test_sampling_is_repeatable_and_of_the_seed(qwen: Any) -> None:
    ck.enable(qwen)
    ids, _ = prompts()
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "top_k": 50, "eos_token_id": None}
    one, again, other = (ck.generate(qwen, ids, seed=seed, **options).tokens for seed in (1, 1, 2))
    assert one == again != other


def test_the_sampler_in_generate_of_transformers(qwen: Any) -> None:
    ids, mask = prompts()
    greedy = tokens_of(qwen, ids, mask)
    assert tokens_of(qwen, ids, mask, logits_processor=LogitsProcessorList([ck.Sampler(temperature=0)])) == greedy
    drawn = [
        tokens_of(qwen, ids, mask, logits_processor=LogitsProcessorList([ck.Sampler(2.0, top_k=20, seed=seed)]))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def _counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, int]:
    """How often functions of cukern are called from here on."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*args, **options)

        return call

    for name in names:
        monkeypatch.setattr(cukern, name, counted(name, getattr(cukern, name)))
    return counts


@pytest.mark.parametrize(
    ("folder", "name"), [("qwen3_moe", "Qwen3MoeExperts"), ("mixtral", "MixtralExperts"), ("gpt_oss", "GptOssExperts")]
)
def test_a_step_is_of_few_kernels(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_models.tiny(folder, name).config
    config.head_dim = 32
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for x in model.parameters():
        x.data.normal_(0, 0.2) if x.dim() > 1 else x.data.uniform_(0.5, 1.5)
    ids, mask = prompts()
    wanted = tokens_of(model, ids, mask)
    ck.enable(model)
    assert _fit.fit(model) == ("", True, False)
    names = "rms_norm", "fused_add_rms_norm", "rotary_embedding", "fused_qk_norm_rope_and_cache"
    counts = _counted(monkeypatch, *names, "reshape_and_cache_flash")
    linears = []
    original = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linears.append(1) or original(*args))
    out = ck.generate(model, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert out.tokens == wanted
    layers, runs = config.num_hidden_layers, NEW_TOKENS
    assert counts == {
        "rms_norm": runs, "fused_add_rms_norm": 2 * layers * runs, "rotary_embedding": 0,
        "fused_qk_norm_rope_and_cache": layers * runs, "reshape_and_cache_flash": 0,
    }  # fmt: skip
    assert len(linears) == (3 * layers + 1) * runs  # queries to values, results, router, and the head


def test_products_of_a_dense_model(llama: Any) -> None:
    ids, mask = prompts()
    llama = llama.to(torch.bfloat16)
    weights = {name: x.clone() for name, x in llama.state_dict().items()}
    places = {name: x.untyped_storage().data_ptr() for name, x in llama.named_parameters()}
    ck.enable(llama)
    attention, mlp = llama.model.layers[0].self_attn, llama.model.layers[0].mlp
    storages = {getattr(attention, f"{x}_proj").weight.untyped_storage().data_ptr() for x in "qkv"}
    assert len(storages) == 1 and mlp.gate_proj.weight.untyped_storage().data_ptr() == (
        mlp.up_proj.weight.untyped_storage().data_ptr()
    )
    for name, x in llama.state_dict().items():
        assert torch.equal(x, weights[name])
    tokens = ck.generate(llama, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None).tokens
    assert [len(x) for x in tokens] == [NEW_TOKENS] * 2
    # Weights that are replaced are seen, and those that share memory no longer are taken one by one.
    attention.k_proj.weight.data = attention.k_proj.weight.data.clone()
    again = ck.generate(llama, ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, eos_token_id=None).tokens
    assert again == tokens
    ck.disable(llama)
    after = [x.untyped_storage().data_ptr() for x in llama.parameters()]
    assert len({*after}) == len(places)
    assert all(torch.equal(x, weights[name]) for name, x in llama.state_dict().items())


def test_an_enabled_model_can_be_saved(llama: Any, tmp_path: Any) -> None:
    weights = {name: x.clone() for name, x in llama.state_dict().items()}
    ck.enable(llama)
    llama.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(x, weights[name]) for name, x in loaded.state_dict().items())


def test_a_sum_is_made_where_it_is_asked_for() -> None:
    terms = torch.ones(2, 3), torch.full((2, 3), 2.0)
    made = _deferred.Sum.of(*terms)
    assert made.shape == (2, 3) and torch.equal(made * 2, torch.full((2, 3), 6.0))
    assert type(made * 2) is torch.Tensor and made.terms() is None
    kept = _deferred.Sum.of(*terms)
    assert kept.terms() == terms
    kept.store(torch.zeros(2, 3))
    assert kept.sum() == 0
    ids = _deferred.Ids.of(torch.tensor([[3, 1]], dtype=torch.int32))
    assert ids.raw.dtype == torch.int32 and ids.dtype == torch.int64 and ids.tolist() == [[3, 1]]


def test_sessions_are_kept_and_freed(qwen: Any) -> None:
    ck.enable(qwen)
    sessions = qwen.__dict__["_cukern"].sessions
    for count in (1, 2, 1, 3, 4, 5):
        ck.generate(qwen, [[5, 6, 7]] * count, max_new_tokens=2)
    assert [key[0] for key in sessions] == [1, 3, 4, 5]
    ck.disable(qwen)
    assert not sessions


# --- bad input ------------------------------------------------------------------------------------------


def test_a_model_on_the_cpu_is_said_to_be_slow(llama: Any) -> None:
    with pytest.warns(
        UserWarning, match="the model is on the CPU, where the NumPy references do the work: it will be slow"
    ):
        ck.enable(llama)


def test_a_model_enabled_twice_stays_as_it_is(llama: Any) -> None:
    first = ck.enable(llama)
    with pytest.warns(UserWarning, match="enabled already"):
        assert ck.enable(llama, parts=["norms"]) is first
    ck.disable(llama)
    ck.disable(llama)
    assert ck.enable(llama) is not first


def _bad_enables() -> Iterator[Any]:
    yield "a string", "model", {}, TypeError, "model must be a PreTrainedModel of transformers, got str"
    yield (
        "training",
        lambda: small_model().train(),
        {},
        ValueError,
        "model must be in evaluation mode (model.eval()), s",
    )
    yield "a part", small_model, {"parts": ["gates"]}, ValueError, "parts must be one of 'experts', 'routers', 'norms'"

    def mixed() -> Any:
        model = small_model()
        model.lm_head = model.lm_head.to("meta")
        return model

    yield "two devices", mixed, {}, ValueError, "model must be on one device, got one on cpu, meta"
    yield "meta", lambda: small_model().to("meta"), {}, ValueError, "model must be on the CPU or on a CUDA device, got"


@pytest.mark.parametrize(
    ("made", "options", "error", "message"), [pytest.param(*x[1:], id=x[0]) for x in _bad_enables()]
)
def test_what_cannot_be_enabled(made: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = made() if callable(made) else made
    with pytest.raises(error, match=re.escape(message)):
        ck.enable(model, **options)
    if isinstance(model, torch.nn.Module):
        assert "_cukern" not in model.__dict__


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompts": 3}, TypeError, "prompts must be a tensor or a sequence of prompts, got int"),
        ({"prompts": []}, ValueError, "prompts must be of at least one prompt, each of at least one token, got []"),
        ({"prompts": [[1], []]}, ValueError, "each of at least one token, got [1, 0]"),
        ({"prompts": torch.ones(3)}, ValueError, "prompts must be integers of shape [batch, tokens]"),
        ({"attention_mask": torch.ones(1, 2)}, ValueError, "attention_mask must be of the shape of prompts, [1, 3]"),
        (
            {"attention_mask": torch.tensor([[1, 0, 1]])},
            ValueError,
            "attention_mask must be of prompts that are padded on the left alone, got zeros elsewhere",
        ),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be an integer in [1, "),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"eos_token_id": [-1]}, ValueError, "eos_token_id must be an integer of at least 0"),
        ({"seed": -1}, ValueError, "seed must be an integer in [0, "),
    ],
)
def test_what_cannot_be_generated(llama: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    ck.enable(llama)
    given: dict[str, Any] = {"prompts": torch.tensor([[4, 5, 6]]), "max_new_tokens": 1, **options}
    with pytest.raises(error, match=re.escape(message)):
        ck.generate(llama, given.pop("prompts"), **given)


def test_models_that_generate_cannot_take() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ).eval()
    with pytest.raises(ValueError, match="model must be a decoder that can generate, got T5ForConditionalGeneration"):
        ck.generate(t5, [[1]])
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        ck.generate(small_model().train(), [[1]])
    with pytest.warns(UserWarning, match="the model is not enabled"):
        ck.generate(small_model(), [[1]], max_new_tokens=1)


def test_a_failure_leaves_the_model_as_it_was(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("no")

    ids, mask = prompts()
    wanted = logits_of(qwen, ids, mask)
    monkeypatch.setitem(ck._ENABLE, "attention", fails)
    with pytest.raises(KeyError):
        ck.enable(qwen)
    assert torch.equal(logits_of(qwen, ids, mask), wanted)
    assert "_cukern" not in qwen.__dict__


def test_layers_without_a_sum_before_a_norm_stay() -> None:
    assert _norms._rewritten(torch.nn.Linear(2, 2)) is None
