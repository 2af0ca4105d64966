"""The probes by which `enable` finds what a module of transformers computes: each regime, ties, and signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import cukern.integrations.transformers as ck
from cukern.integrations.transformers import _experts, _gates, _norms, _products, _rotary, _routers
from tests import tiny_models
from tests.test_integrations_transformers import COMPARED, logits_of, prompts, small_model

pytestmark = pytest.mark.filterwarnings("ignore:the model is on the CPU")

Spoil = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ToyRouter(nn.Module):
    """DeepSeek-V3's router, with what models do otherwise as options. `spoil` changes weights by logits and bias."""

    def __init__(
        self, *, masked: float = -torch.inf, epsilon: float = 1e-20, last_of_ties: bool = False, groups: int = 4,
        scoring: str = "sigmoid", spoil: Spoil | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.top_k, self.n_group, self.topk_group, self.routed_scaling_factor = 5, groups, max(groups // 2, 1), 2.5
        self.weight = nn.Parameter(torch.zeros(16, 32))
        self.e_score_correction_bias = nn.Buffer(torch.zeros(16))
        self.masked, self.epsilon, self.last_of_ties, self.scoring = masked, epsilon, last_of_ties, scoring
        self.spoil = spoil

    def best(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """The ids of the largest numbers, of equal ones the first or the last."""
        if not self.last_of_ties:
            return x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        return x.shape[1] - 1 - x.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :count]

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(hidden_states.float(), self.weight.float())
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores + self.e_score_correction_bias
        by_group = choice.view(len(choice), self.n_group, -1).topk(2).values.sum(-1)
        kept = torch.zeros_like(by_group, dtype=torch.bool).scatter(1, self.best(by_group, self.topk_group), True)
        choice = choice.masked_fill(~kept.repeat_interleave(16 // self.n_group, 1), self.masked)
        ids = self.best(choice, self.top_k)
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon) * self.routed_scaling_factor
        if self.spoil is not None:
            weights = weights * self.spoil(logits, self.e_score_correction_bias, weights)
        return logits, weights, ids


class UnbiasedRouter(ToyRouter):
    """The same without a bias, as Mistral-4's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.e_score_correction_bias
        self.e_score_correction_bias = 0.0  # type: ignore[assignment]


def axk2(**changes: Any) -> Any:
    sizes = {**tiny_models.SIZES, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, **changes}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {**sizes, "num_local_experts": 16, "n_routed_experts": 16}.items():
            patch.setitem(tiny_models.SIZES, name, size)
        return tiny_models.tiny("axk2", "AXK2Experts")


def lfm2(**changes: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"use_expert_bias": False, **changes}.items():
            patch.setitem(tiny_models.OF_MODEL["lfm2_moe"], name, value)
        return tiny_models.tiny("lfm2_moe", "Lfm2MoeExperts")


def kept_routers(report: ck.Report) -> list[str]:
    return [x.how for x in report.kept if x.part == "routers"]


# --- routers of transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [-2.0, -0.3])
def test_a_router_with_another_value_for_other_groups_stays(mean: float) -> None:
    """AXK2 gives the choice 0 to the experts of groups that are not kept."""
    model, (ids, mask) = axk2(), prompts()
    routers = [x for x in model.modules() if type(x).__name__ == "AXK2TopkRouter"]
    for x in routers:
        x.e_score_correction_bias.copy_(mean + 0.3 * torch.randn(16, generator=torch.Generator().manual_seed(7)))
    wanted = logits_of(model, ids, mask)
    report = ck.enable(model)
    (why,) = kept_routers(report)
    assert why.startswith("it chooses other experts than moe_fused_gate for logits ") and " with a bias around -" in why
    assert why in str(report)
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("groups", [None, 4])
def test_the_same_router_that_leaves_no_group_out_is_replaced(groups: int | None) -> None:
    model, (ids, mask) = axk2(topk_group=4), prompts()
    for x in model.modules():
        if type(x).__name__ == "AXK2TopkRouter":
            x.num_group = groups
            x.e_score_correction_bias.sub_(2)
    wanted = logits_of(model, ids, mask)
    report = ck.enable(model)
    assert not kept_routers(report) and "routers" in report.parts()
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)


def test_a_router_with_an_optional_argument_takes_it() -> None:
    model, (ids, mask) = lfm2(norm_topk_prob=False), prompts()
    wanted = logits_of(model, ids, mask)
    report = ck.enable(model)
    assert [x.how for x in report.replaced if x.part == "routers"] == ["topk_sigmoid, the best 2 by sigmoid"]
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)
    router = next(x for x in model.modules() if type(x).__name__ == "Lfm2MoeTopKRouter")
    x, bias = torch.randn(5, 32), torch.randn(8)
    with torch.no_grad():
        by_name = router(hidden_states=x, expert_bias=None)
        assert torch.equal(by_name[2].sort(-1)[0], router(x)[2].sort(-1)[0])
        router.use_expert_bias = True
        for got, own in zip(router(x, bias), type(router).forward(router, x, bias), strict=True):
            assert torch.equal(got, own)


def test_an_epsilon_of_1e_6_in_a_model_is_named() -> None:
    model, (ids, mask) = lfm2(norm_topk_prob=True), prompts()
    wanted = logits_of(model, ids, mask)
    assert kept_routers(ck.enable(model)) == ["it gives other weights than topk_sigmoid for logits of size 1"]
    torch.testing.assert_close(logits_of(model, ids, mask), wanted, rtol=0, atol=1e-4)


def _routers_of(folder: str, name: str) -> list[Any]:
    return [x for x in tiny_models.tiny(folder, name).modules() if _routers._is_router(x)]


@pytest.mark.rare
@pytest.mark.parametrize(("folder", "name"), COMPARED, ids=[name for _, name in COMPARED])
def test_ties_and_rounding_refuse_no_router(folder: str, name: str) -> None:
    """A router that is a gate with the numbers of one seed is that gate with those of others."""
    for router in _routers_of(folder, name)[:1]:
        gate, _ = _gates.gate_of(router)
        for seed in range(20, 24):
            assert _gates.gate_of(router, seed)[0] == gate


def test_sqrtsoftplus() -> None:
    module = transformers.models.deepseek_v4.modeling_deepseek_v4
    config = module.DeepseekV4Config(hidden_size=32, num_local_experts=16, n_routed_experts=16, num_experts_per_tok=4)
    gate, _ = _gates.gate_of(module.DeepseekV4TopKRouter(config))
    assert str(gate) == "moe_fused_gate, the best 4 by sqrtsoftplus and a bias"


def test_a_configuration_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"num_hidden_layers": 6, "first_k_dense_replace": 1}.items():
        monkeypatch.setitem(tiny_models.SIZES, name, size)
    model = tiny_models.tiny("deepseek_v3", "DeepseekV3Experts")
    probed: list[str] = []
    owners = (
        (_routers, "gate_of"),
        (_experts, "match_activation"),
        (_norms, "_constants_of"),
        (_products, "_activation_of"),
    )
    for owner, name in owners:
        probe = getattr(owner, name)
        counted = lambda x, probe=probe, name=name: (probed.append(name), probe(x))[1]  # noqa: E731
        monkeypatch.setattr(owner, name, counted)
    report = ck.enable(model)
    assert {x.part: x.count for x in report.replaced if x.part in ("routers", "experts")} == {
        "routers": 5,
        "experts": 5,
    }
    # Norms are of three widths. The dense perceptron has another width than the shared experts.
    assert sorted(probed) == ["_activation_of"] * 2 + ["_constants_of"] * 2 + ["gate_of", "match_activation"]


# --- routers by their formula ---------------------------------------------------------------------------


@pytest.mark.parametrize("last_of_ties", [False, True])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("made", [ToyRouter, UnbiasedRouter])
def test_ties_are_broken_in_any_way(made: Any, groups: int, scoring: str, last_of_ties: bool) -> None:
    for seed in range(3):
        router = made(groups=groups, scoring=scoring, last_of_ties=last_of_ties)
        gate, why_not = _gates.gate_of(router, seed)
        assert gate is not None, why_not
        assert (gate.scoring, gate.groups, bool(gate.bias)) == (scoring, groups, made is ToyRouter)


def test_ids_above_a_tie_count() -> None:
    class Twice(UnbiasedRouter):
        """Chooses the first of two equal experts twice."""

        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, ids = super().forward(hidden_states)
            ids[:, 1] = torch.where(weights[:, 0] == weights[:, 1], ids[:, 0], ids[:, 1])
            return logits, weights, ids

    gate, why_not = _gates.gate_of(Twice(groups=1))
    assert gate is None and why_not.startswith("it chooses other experts than topk_sigmoid for ")


@pytest.mark.parametrize("masked", [0.0, -1.0])
def test_the_value_of_groups_that_are_not_kept(masked: float) -> None:
    for seed in range(3):
        gate, why_not = _gates.gate_of(ToyRouter(masked=masked), seed)
        assert gate is None and "chooses other experts than moe_fused_gate" in why_not


def test_scores_are_never_below_a_value_of_0() -> None:
    """Without a bias a choice of 0 for other groups differs from -inf in ties alone."""
    for seed in range(3):
        assert _gates.gate_of(UnbiasedRouter(masked=0.0, scoring="softmax", last_of_ties=True), seed)[0] is not None


@pytest.mark.parametrize(("epsilon", "replaced"), [(0.0, True), (1e-20, True), (1e-6, False), (1e-3, False)])
def test_the_epsilon_of_a_denominator(epsilon: float, replaced: bool) -> None:
    gate, why_not = _gates.gate_of(ToyRouter(epsilon=epsilon))
    assert (gate is not None) == replaced
    if epsilon == 1e-6:
        assert why_not.startswith("it gives other weights than moe_fused_gate for ")


def _when(condition: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | bool], share: float = 0.1) -> Spoil:
    def spoil(logits: torch.Tensor, bias: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = torch.as_tensor(condition(logits, bias)).expand(len(logits))[:, None]
        return torch.where(found, 1 + share, 1.0)

    return spoil


REGIMES: dict[str, Spoil] = {
    "a bias around -4": _when(lambda _, bias: bias.mean() < -3),
    "a bias around -0.5": _when(lambda _, bias: bool(-1 < bias.mean() < -0.3) and bool(bias.min() > -2)),
    "a bias around 0.5": _when(lambda _, bias: bool(0.3 < bias.mean() < 1)),
    "a bias around 4": _when(lambda _, bias: bias.mean() > 3),
    "groups below 0 by their bias": _when(lambda _, bias: bias.max() - bias.min() > 3),
    "logits of size 60": _when(lambda x, _: x.abs().amax(-1) > 61),
    "logits of size 14": _when(lambda x, _: (x.std(-1) > 11.5) & (x.std(-1) < 17)),
    "logits of size 8": _when(lambda x, _: (x.std(-1) > 5.5) & (x.std(-1) < 8)),
    "logits of size 0.1": _when(lambda x, _: (x.std(-1) < 0.3) & (x.std(-1) > 0.01)),
    "logits below 0": _when(lambda x, _: (x.amax(-1) < 0) & (x.std(-1) > 0.1)),
    "equal logits": _when(lambda x, _: x.amax(-1) == x.amin(-1)),
    "logits of size 1": _when(lambda x, _: (x.std(-1) > 0.6) & (x.std(-1) < 1.6) & (x.amax(-1) > 0), 1e-6),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_a_router_that_differs_in_one_regime_stays(regime: str) -> None:
    gate, why_not = _gates.gate_of(ToyRouter(spoil=REGIMES[regime]))
    assert gate is None
    assert why_not.startswith("it gives other weights than moe_fused_gate for ") and regime in why_not


def test_logits_that_are_no_product_are_no_gate() -> None:
    class Capped(ToyRouter):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, ids = super().forward(hidden_states)
            return 50 * (logits / 50).tanh(), weights, ids

    assert _gates.gate_of(Capped()) == (None, "its formula is none of the gates")


# --- norms ----------------------------------------------------------------------------------------------


class ToyRMSNorm(nn.Module):
    def __init__(self, formula: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.ones(24)), 1e-6, formula

    def forward(self, hidden_states: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        made = self.weight * self.formula(hidden_states)
        return made if scale is None else made * scale


def _rms(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tiny rows": lambda x: (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)).to(x.dtype),
    "large rows": lambda x: _rms(x.clamp(-100, 100)),
    "negative rows": lambda x: _rms(x) * (1 + 0.1 * (x.amax(-1, keepdim=True) <= 0)),
    "zero rows": lambda x: _rms(x) + (x.abs().amax(-1, keepdim=True) == 0),
    "rows of float16": lambda x: _rms(x) * (1.5 if x.dtype == torch.float16 else 1),
    "rows of bfloat16": lambda x: _rms(x).float() if x.dtype == torch.bfloat16 else _rms(x),
    "large rows of float16": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "ordinary rows in four dimensions": lambda x: _rms(x) * (1 if x.dim() < 4 else 1.5),
}


def test_a_norm_is_found() -> None:
    assert _norms._constants_of(ToyRMSNorm(_rms)) == ((1e-6, 0.0), "")


@pytest.mark.parametrize("regime", NORMS)
def test_a_norm_that_differs_in_one_regime_stays(regime: str) -> None:
    module = ToyRMSNorm(NORMS[regime])
    assert _norms._constants_of(module) == (None, f"it differs from rms_norm for {regime}")


def test_a_norm_takes_the_whole_signature() -> None:
    model = small_model()
    model.model.norm = ToyRMSNorm(_rms).eval()
    model.model.norm.weight.data = torch.rand(32)
    report = ck.enable(model, parts=["norms"])
    assert "ToyRMSNorm" in {x.what for x in report.replaced}
    x, scale = torch.randn(3, 32), torch.rand(32)
    norm = model.model.norm
    with torch.no_grad():
        for args, kwargs in (((x, scale), {}), ((x,), {"scale": scale}), ((), {"hidden_states": x}), ((x, None), {})):
            torch.testing.assert_close(norm(*args, **kwargs), type(norm).forward(norm, *args, **kwargs))


# --- perceptrons ----------------------------------------------------------------------------------------


class ToyMLP(nn.Module):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = F.silu, limit: float | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act, self.limit = act, limit

    def forward(self, hidden_state: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self.gate_proj(hidden_state), self.up_proj(hidden_state)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        made = self.down_proj(self.act(gate) * up)
        return made if mask is None else made * mask


MLPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows of bfloat16": lambda x: F.silu(x) * (1.5 if x.dtype == torch.bfloat16 else 1),
    "ordinary rows of 15 numbers": lambda x: F.silu(x) * (1.5 if len(x) == 1 else 1),
}


def test_a_perceptron_with_a_limit_stays() -> None:
    assert _products._activation_of(ToyMLP()) == ("silu", "")
    said = "it differs from a gated perceptron with silu for large rows"
    assert _products._activation_of(ToyMLP(limit=50.0)) == (None, said)
    model = tiny_models.tiny("deepseek_v4", "DeepseekV4Experts")
    assert [x.how for x in ck.enable(model).kept if x.what == "DeepseekV4MLP"] == [said]


@pytest.mark.parametrize("regime", ["rows of bfloat16", "ordinary rows of 15 numbers"])
def test_a_perceptron_that_differs_in_one_regime_stays(regime: str) -> None:
    said = f"it differs from a gated perceptron with silu for {regime}"
    assert _products._activation_of(ToyMLP(MLPS[regime])) == (None, said)


def test_a_perceptron_takes_the_whole_signature() -> None:
    model = small_model()
    model.model.layers[0].mlp = ToyMLP().eval()
    report = ck.enable(model, parts=["products"])
    assert "ToyMLP" in {x.what for x in report.replaced}
    mlp, x, mask = model.model.layers[0].mlp, torch.randn(3, 32), torch.rand(32)
    with torch.no_grad():
        for args, kwargs in (((x, mask), {}), ((x,), {"mask": mask}), ((), {"hidden_state": x}), ((x, None), {})):
            torch.testing.assert_close(mlp(*args, **kwargs), type(mlp).forward(mlp, *args, **kwargs))


class FlaggedMLP(ToyMLP):
    def forward(self, hidden_state: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden_state) * scale


def test_a_perceptron_with_a_default_that_is_not_none_stays() -> None:
    model = small_model()
    model.model.layers[0].mlp = FlaggedMLP().eval()
    report = ck.enable(model, parts=["products"])
    kept = [x.how for x in report.kept if x.what == "FlaggedMLP"]
    assert kept == ["its forward has an argument besides the rows whose default is not None"]


# --- experts --------------------------------------------------------------------------------------------


class Activation(nn.Module):
    def __init__(self, formula: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(x)


EXPERTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "large rows": lambda x: F.silu(x.clamp(max=100)),
    "tiny rows": lambda x: F.silu(x) * (1 if x.abs().amax() > 0.1 else 1.01),
    "negative rows": lambda x: F.silu(x) * (1 if x.amax() > 0 else 1.01),
    "rows of float16": lambda x: F.silu(x) * (1.5 if x.dtype == torch.float16 else 1),
    "ordinary rows of 14 numbers": lambda x: F.silu(x) * (1 if len(x) > 3 else 1.01),
}


@pytest.mark.parametrize("regime", EXPERTS)
def test_experts_that_differ_in_one_regime_keep_their_activation(regime: str) -> None:
    model = tiny_models.tiny("qwen3_moe", "Qwen3MoeExperts")
    experts = next(filter(_experts.is_experts, model.modules()))
    assert _experts.match_activation(experts).activation == "silu"
    experts.act_fn = Activation(EXPERTS[regime])
    matched = _experts.match_activation(experts)
    assert matched.activation is None
    assert str(matched).endswith(f"around the activation of the model, which differs from silu for {regime}")


# --- rotary embedding -----------------------------------------------------------------------------------


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def _rotary_function(change: Callable[[torch.Tensor], torch.Tensor | float], back: bool = False) -> Any:
    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        made = [_rotated(x, cos, sin) * change(x) for x in (q, k)]
        return tuple(x.to(q.dtype) for x in made) if back else tuple(made)

    return rotate


def test_a_rotation_says_whether_it_takes_angles_in_float32() -> None:
    for back in (False, True):
        formula, why_not = _rotary._formula_of(_rotary_function(lambda x: 1.0, back))
        assert formula == ("half", 2, back) and not why_not


def test_angles_in_float32_keep_the_dtype_of_the_function() -> None:
    function = _rotary_function(lambda x: 1.0)
    formula, _ = _rotary._formula_of(function)
    assert formula is not None
    q, k, angles = torch.randn(1, 2, 3, 16).bfloat16(), torch.randn(1, 1, 3, 16).bfloat16(), torch.randn(1, 3, 16)
    assert [x.dtype for x in _rotary._in_place(function, formula)(q, k, angles, angles)] == [torch.float32] * 2


@pytest.mark.parametrize(
    ("regime", "change"),
    [
        ("large rows", lambda x: 1.0 if x.abs().amax() < 100 else 1.01),
        ("zero rows", lambda x: 1.0 if x.abs().amax() > 0 else torch.nan),
        ("rows of bfloat16", lambda x: 1.5 if x.dtype == torch.bfloat16 else 1.0),
        ("ordinary rows of one head and 7 tokens", lambda x: 1.0 if x.shape[2] == 5 else 1.01),
    ],
)
def test_a_rotation_that_differs_in_one_regime_stays(regime: str, change: Any) -> None:
    said = f"differs from rotary_embedding, half, for {regime}"
    assert _rotary._formula_of(_rotary_function(change)) == (None, said)
