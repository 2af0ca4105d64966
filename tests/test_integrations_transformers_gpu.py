"""Models of transformers on the kernels: every class on the GPU, real layer sizes in bfloat16, and captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, DeepseekV3Config, GptOssConfig

import cukern.integrations.transformers as ck
from cukern.integrations.transformers._shapes import configuration, random_model
from tests import tiny_models
from tests.test_integrations_transformers import (
    COMPARED,
    NEW_TOKENS,
    logits_of,
    prompts,
    small_model,
    tokens_alone,
    tokens_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*generation flags.*")]


@pytest.mark.filterwarnings("ignore:generate. its step cannot be captured")
@pytest.mark.parametrize(("folder", "name"), COMPARED, ids=[name for _, name in COMPARED])
def test_a_class_gives_what_eager_gives(folder: str, name: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        model = tiny_models.tiny(folder, name).cuda()
        for x in model.modules():
            if type(x).__name__ == name:
                x.config._experts_implementation_internal = "eager"
        ids, mask = (x.cuda() for x in prompts())
        wanted = logits_of(model, ids, mask)
        tokens = tokens_of(model, ids, mask) if model.can_generate() else None
        alone = tokens_alone(model, ids, mask) if model.can_generate() else None
        ck.enable(model)
        torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=2e-3)
        if tokens is not None:
            assert tokens_of(model, ids, mask) == tokens
            options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
            for _ in range(2):  # the second time from kept graphs
                assert ck.generate(model, ids, **options).tokens == alone
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_what_depends_on_the_tokens_so_far_is_in_the_graph() -> None:
    model = small_model().cuda()
    rows = [torch.arange(3, 8).cuda(), torch.arange(20, 28).cuda()]
    options: dict[str, Any] = {"repetition_penalty": 1.7, "min_new_tokens": 6, "max_new_tokens": 16}
    options["eos_token_id"] = [*range(30, 60)]
    wanted = [model.generate(x[None], do_sample=False, pad_token_id=0, **options)[0, len(x) :].tolist() for x in rows]
    ck.enable(model)
    for _ in range(2):  # the second time from kept graphs
        got = ck.generate(model, rows, **options)
        assert got.captured and got.tokens == wanted


def _layers(name: str, count: int) -> Any:
    config = configuration(name)
    config.num_hidden_layers = count
    for listed in ("layer_types", "mlp_layer_types"):
        if getattr(config, listed, None):
            setattr(config, listed, getattr(config, listed)[:count])
    return config


def _deepseek() -> Any:
    return DeepseekV3Config(
        num_hidden_layers=2, first_k_dense_replace=1, vocab_size=4096, n_routed_experts=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip


def _gpt_oss() -> Any:
    return GptOssConfig(num_hidden_layers=2, vocab_size=4096, num_local_experts=32, pad_token_id=0, eos_token_id=None)


#: Layers of real sizes.
REAL = {
    "Qwen3-30B-A3B": lambda: _layers("qwen3-30b-a3b", 2),
    "Mixtral-8x7B": lambda: _layers("mixtral-8x7b", 1),
    "Qwen3-0.6B": lambda: _layers("qwen3-0.6b", 4),
    "DeepSeek-V3": _deepseek,
    "gpt-oss": _gpt_oss,
}


@pytest.mark.large(18)
@pytest.mark.parametrize("made", REAL.values(), ids=REAL)
def test_real_layers_in_bfloat16_are_as_near_to_float32(made: Any) -> None:
    config = made()
    config.output_router_logits = False
    model = random_model(config)
    # Router biases of float32 stay so, as from_pretrained leaves them.
    ids = torch.randint(3, config.vocab_size, (2, 80), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    stock = logits_of(model, ids, mask).float()
    ck.enable(model)
    ours = logits_of(model, ids, mask).float()
    ck.disable(model)
    exact = logits_of(model.float(), ids, mask)
    # By the median token: one whose expert is another, as two are nearly as good, differs far more in either.
    theirs, own = ((x - exact).norm(dim=-1) / exact.norm(dim=-1) for x in (stock, ours))
    assert own.median() < 1.2 * theirs.median() + 1e-3, (own.median(), theirs.median())
    far = [int((x > 0.2).sum()) for x in (own, theirs)]
    assert far[0] <= far[1] + len(own) // 16, far


@pytest.mark.large(5)
def test_a_step_is_captured_and_gives_what_it_gives_without_a_graph() -> None:
    model = random_model(_layers("qwen3-30b-a3b", 2))
    ck.enable(model)
    generator = torch.Generator().manual_seed(2)
    for lengths in ((37,), (5, 100, 64), (300, 2)):
        given = [torch.randint(3, 1000, (n,), generator=generator) for n in lengths]
        out = ck.generate(model, given, max_new_tokens=24, eos_token_id=None)
        assert out.captured and not out.why
        session = list(model.__dict__["_cukern"].sessions.values())[-1]
        assert session.graphs._graphs
        again = ck.generate(model, given, max_new_tokens=24, eos_token_id=None)
        assert again.tokens == out.tokens
        session.why = "for a comparison"
        assert ck.generate(model, given, max_new_tokens=24, eos_token_id=None).tokens == out.tokens
        session.why = ""


def test_other_prompts_of_one_session_do_not_meet() -> None:
    model = random_model(_layers("qwen3-0.6b", 3))
    ck.enable(model)
    generator = torch.Generator().manual_seed(3)
    first, second = ([torch.randint(3, 1000, (n,), generator=generator)] for n in (50, 21))
    alone = ck.generate(model, second, max_new_tokens=10, eos_token_id=None).tokens
    ck.generate(model, first, max_new_tokens=10, eos_token_id=None)
    assert ck.generate(model, second, max_new_tokens=10, eos_token_id=None).tokens == alone


def test_sampling_and_stops_in_a_graph() -> None:
    model = random_model(_layers("qwen3-0.6b", 2))
    ck.enable(model)
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 0.9, "eos_token_id": None}
    one, again, other = (ck.generate(model, [[5, 6, 7]] * 3, seed=x, **options).tokens for x in (1, 1, 2))
    assert one == again != other and len({tuple(x) for x in one}) == 3
    stops = [one[0][9], one[1][20]]
    cut = ck.generate(model, [[5, 6, 7]] * 3, seed=1, **options | {"eos_token_id": stops}).tokens
    for tokens, whole in zip(cut, one, strict=True):
        end = next((i for i, x in enumerate(whole) if x in stops), len(whole))
        assert tokens == whole[: end + 1]


@pytest.mark.parametrize("window", [None, 24])
def test_windows_in_a_graph(window: int | None) -> None:
    config = AutoConfig.for_model(
        "mixtral", **tiny_models.small(type(configuration("mixtral-8x7b")), "mixtral") | {"sliding_window": window}
    )
    torch.manual_seed(0)
    model = random_model(config, dtype=torch.float32)
    ids, mask = (x.cuda() for x in prompts())
    wanted = model.generate(
        ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None
    )[:, ids.shape[1] :].tolist()
    ck.enable(model)
    out = ck.generate(model, ids, attention_mask=mask, max_new_tokens=40, eos_token_id=None)
    assert out.captured and out.tokens == wanted


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_of_transformers(cache: str) -> None:
    """The static cache's steps are compiled by torch.compile."""
    model = small_model().cuda()
    ids, mask = (x.cuda() for x in prompts())
    tokens = tokens_of(model, ids, mask)
    ck.enable(model)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    assert tokens_of(model, ids, mask, **options) == tokens
