"""Find the gate of cukern that equals a router of a model, by running both on regimes: kinds of random inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import cukern
from cukern.integrations.transformers._state import randomized_copy

_GROUPS = ("num_group", "n_group", "num_expert_group")
_BIASES = ("e_score_correction_bias", "correction_bias", "expert_bias")
_SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
}
#: Allowed relative difference between two float32 computations of one formula: 4 rounding errors.
_BOUND = 4 * torch.finfo(torch.float32).eps
#: Weights are compared only if a token's scores sum to at least this: some routers divide by the sum plus 1e-20.
_MIN_SCORE_SUM = 1e-12


class Gate(NamedTuple):
    scoring: str
    topk: int
    groups: int
    topk_group: int
    renormalize: bool
    scaling: float
    bias: str  # the correction bias's name; may be empty
    in_float32: bool

    @property
    def op(self) -> str:
        if self.bias or self.groups > 1 or self.scoring == "sqrtsoftplus":
            return "moe_fused_gate"
        return "topk_sigmoid" if self.scoring == "sigmoid" else "topk_softmax"

    def __str__(self) -> str:
        groups = f", {self.topk_group} of {self.groups} groups" if self.groups > 1 else ""
        return f"{self.op}, the best {self.topk} by {self.scoring}{' and a bias' * bool(self.bias)}{groups}"

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, float32, and the ids, int32, both [tokens, topk]."""
        if bias is None and self.groups == 1:
            shape = logits.shape[0], self.topk
            weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
            ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
            gate = cukern.topk_softmax if self.scoring == "softmax" else cukern.topk_sigmoid
            gate(weights, ids, logits, self.renormalize, routed_scaling_factor=self.scaling)
            return weights, ids
        if bias is None:
            bias = torch.zeros(logits.shape[1], dtype=torch.float32, device=logits.device)
        return cukern.moe_fused_gate(  # type: ignore[return-value]
            logits, bias, self.groups, self.topk_group, self.topk, routed_scaling_factor=self.scaling,
            apply_routed_scaling_factor_on_output=True, renormalize=self.renormalize, scoring_func=self.scoring,
        )  # fmt: skip

    def weights_of(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scaling


_LOGIT_SIZES = (1.0, 0.1, 8.0, 14.0, 60.0)
_BIAS_LEVELS = {"0": 0.0, "-0.5": -0.5, "-4": -4.0, "0.5": 0.5, "4": 4.0}
_ROWS = 12


def _logits(experts: int, hidden: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Return input rows [tokens, hidden], a router weight [experts, hidden], and each row's regime.

    The first column of the weight is 1, so that the first element of a row is added to all its logits.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight = normal(experts, hidden) / max(hidden - 1, 1) ** 0.5
    weight[:, 0] = 1
    rows, names = [], []
    for size in _LOGIT_SIZES:
        rows.append(normal(_ROWS, hidden) * size)
        rows[-1][:, 0] = 0
        names += [f"logits of size {size:g}"] * _ROWS
    below = normal(_ROWS, hidden)
    below[:, 0] = -8
    equal = torch.zeros(len(_LOGIT_SIZES) * 2 + 1, hidden)
    equal[:, 0] = torch.tensor([0, *_LOGIT_SIZES, *(-x for x in _LOGIT_SIZES)])
    names += ["logits below 0"] * len(below) + ["equal logits"] * len(equal)
    return torch.cat([*rows, below, equal]), weight, names


def _biases(experts: int, groups: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the correction bias [experts] of each regime."""
    for name, level in _BIAS_LEVELS.items():
        yield f"a bias around {name}", level + 0.3 * torch.randn(experts, generator=generator)
    if groups > 1:
        # Every second group has only values (score plus bias) below 0. This detects a router that writes 0 instead of
        # -inf to the groups that are not selected.
        levels = torch.tensor([0.5, -4.0]).repeat(groups)[:groups].repeat_interleave(experts // groups)
        yield "groups below 0 by their bias", levels + 0.3 * torch.randn(experts, generator=generator)


class _Routing(NamedTuple):
    regime: str
    bias: torch.Tensor | None
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def _routing(probe: Any, rows: torch.Tensor, regime: str, bias: torch.Tensor | None) -> _Routing | None:
    try:
        given = type(probe).forward(probe, rows.clone())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    if not isinstance(given, tuple) or len(given) != 3 or not all(isinstance(x, torch.Tensor) for x in given):
        return None
    logits, weights, ids = given
    wanted = F.linear(rows, probe.weight, getattr(probe, "bias", None))
    if logits.shape != wanted.shape or weights.shape != ids.shape or ids.dim() != 2:
        return None
    largest = wanted.abs().amax(-1, keepdim=True)
    if not ((logits - wanted).abs() <= 1e-5 * largest + 1e-6).all():
        return None
    return _Routing(regime, bias, logits.float(), weights.float(), ids.long())


class _Ranking(NamedTuple):
    """The values [tokens, experts] that rank the experts, and their rounding errors."""

    scores: torch.Tensor
    rounding: torch.Tensor
    values: torch.Tensor
    noise: torch.Tensor  # values that differ by at most this are ties
    decided: torch.Tensor  # [tokens]: whether no selected group ties with another group

    def of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of the experts `ids`, largest first, and the rounding errors (noise) of these values."""
        values, order = self.values.gather(1, ids).sort(-1, descending=True)
        return values, self.noise.gather(1, ids).gather(1, order)

    def above(self, ids: torch.Tensor) -> torch.Tensor:
        """Return which experts among `ids` have a value that is clearly larger than the smallest value among them."""
        values, noise = self.of(ids)
        chosen = torch.zeros_like(self.values, dtype=torch.bool).scatter(1, ids, True)
        return chosen & (self.values > values[:, -1:] + torch.maximum(self.noise, noise[:, -1:]))


def _selected(values: torch.Tensor, noise: torch.Tensor, gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which experts are in a selected group, and which tokens have no tie between groups."""
    best, order = values.view(len(values), gate.groups, -1).topk(min(2, values.shape[1] // gate.groups))
    best, noise = best.sum(-1), noise.view(len(values), gate.groups, -1).gather(-1, order).sum(-1)
    last, at = (x[:, -1:] for x in best.topk(gate.topk_group))
    selected = best >= last - noise - noise.gather(1, at)
    return selected.repeat_interleave(values.shape[1] // gate.groups, 1), selected.sum(-1) == gate.topk_group


def _ranking(gate: Gate, logits: torch.Tensor, bias: torch.Tensor | None) -> _Ranking:
    scores = _SCORES[gate.scoring](logits)
    values = scores if bias is None else scores + bias
    rounding = torch.full_like(scores, _BOUND)
    if gate.scoring == "softmax":  # softmax also rounds `logit - max`
        rounding = rounding * (1 + (logits - logits.amax(-1, keepdim=True)).abs())
    noise = scores * rounding + torch.finfo(torch.float32).tiny
    if bias is not None:
        noise = noise + _BOUND * bias.abs()
    decided = torch.ones(len(logits), dtype=torch.bool)
    if gate.groups > 1:
        selected, decided = _selected(values, noise, gate)
        # Without a bias, scores are at least 0, and masking by 0 is as good as by -inf.
        values = values.masked_fill(~selected, 0.0 if bias is None else -torch.inf)
    return _Ranking(scores, rounding, values, noise, decided)


def _by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(-1)
    return weights.gather(1, order), ids


def _differences(gate: Gate, routing: _Routing, bound: float = _BOUND) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens whose experts differ between gate and router, and the tokens whose weights differ.

    If several experts tie for the last place, `torch.topk` may choose any of them, so values are compared instead of
    ids.
    """
    bias = routing.bias if gate.bias else None
    weights, ids = gate.route(routing.logits, bias)
    weights, ids = _by_id(weights, ids.long())
    router_weights, router_ids = _by_id(routing.weights, routing.ids)
    if router_weights.shape != weights.shape:
        all_tokens = torch.ones(len(weights), dtype=torch.bool)
        return all_tokens, all_tokens
    ranking = _ranking(gate, routing.logits, bias)
    (gate_values, noise), (router_values, router_noise) = ranking.of(ids), ranking.of(router_ids)
    other_experts = ((gate_values - router_values).abs() > noise + router_noise).any(-1)
    other_experts |= (ranking.above(ids) != ranking.above(router_ids)).any(-1)
    same = (ids == router_ids).all(-1, keepdim=True)
    wanted = torch.where(same, weights, gate.weights_of(ranking.scores, router_ids))
    largest = torch.maximum(wanted.abs().amax(-1), router_weights.abs().amax(-1))
    # The bound is the smallest rounding error among the chosen experts, because the largest weight has it: its expert
    # usually has the largest logit, and the largest logit has the smallest rounding error.
    bounds = ranking.rounding.gather(1, router_ids).amin(-1).clamp(min=bound)
    is_close = (wanted - router_weights).abs().amax(-1) <= bounds * largest
    counts = ranking.scores.gather(1, router_ids).sum(-1) >= _MIN_SCORE_SUM
    return other_experts & ranking.decided, ~is_close & counts


def _number(module: Any, *names: str, default: Any = None) -> Any:
    found = (getattr(module, name, None) for name in names)
    return next((x for x in found if isinstance(x, (int, float))), default)


def _gates(module: Any, bias: str) -> Iterator[Gate]:
    """Yield all gates that agree with a router's attributes, such as `top_k`."""
    topk = _number(module, "top_k", "num_experts_per_tok", "topk")
    if not isinstance(topk, int) or topk < 1:
        return
    groups = int(_number(module, *_GROUPS, default=1) or 1)
    kept = int(_number(module, "topk_group", default=1) or 1) if groups > 1 else 1
    scaling = float(_number(module, "routed_scaling_factor", "route_scale", "router_scale", default=1.0))
    group_options = dict.fromkeys(((groups, kept), (1, 1)))
    biases, scalings = dict.fromkeys((bias, "")), dict.fromkeys((scaling, 1.0))
    for pair, scoring, bias_name, renormalize, factor in itertools.product(
        group_options, _SCORES, biases, (True, False), scalings
    ):
        if scoring != "sqrtsoftplus" or bias_name or pair[0] > 1:
            yield Gate(scoring, topk, pair[0], pair[1], renormalize, factor, bias_name, False)


def _resembles(gate: Gate, routing: _Routing, names: list[str]) -> bool:
    rows = names.count(names[0])
    logits, weights, ids = (x[:rows] for x in routing[2:])
    try:
        other_experts, other_weights = _differences(gate, _Routing("", routing.bias, logits, weights, ids), 1e-4)
    except ValueError:
        return False
    return int((other_experts | other_weights).sum()) <= rows // 4


def _disagreement(gate: Gate, routing: _Routing, names: list[str]) -> str:
    """Return the first difference between a router and a gate, and its regime; "" if they agree."""
    for tokens, what in zip(_differences(gate, routing), ("chooses other experts", "gives other weights"), strict=True):
        if tokens.any():
            regime = " with ".join(filter(None, (names[int(tokens.int().argmax())], routing.regime)))
            return f"it {what} than {gate.op} for {regime}"
    return ""


@torch.no_grad()
def gate_of(module: Any, seed: int = 2) -> tuple[Gate | None, str]:
    """Find the gate that equals a router on random tokens. Return (gate, "") or (None, reason)."""
    none = "its formula is none of the gates"
    probe, generator = randomized_copy(module), torch.Generator().manual_seed(seed)
    experts, hidden = probe.weight.shape
    rows, weight, names = _logits(experts, hidden, generator)
    probe.weight.copy_(weight)
    tensors: dict[str, Any] = {name: getattr(probe, name, None) for name in _BIASES}
    bias_name = next((k for k, x in tensors.items() if isinstance(x, torch.Tensor) and x.shape == (experts,)), "")
    groups = int(_number(probe, *_GROUPS, default=1) or 1)
    regimes: list[tuple[str, Any]] = [*_biases(experts, groups, generator)] if bias_name else [("", None)]
    routings: list[_Routing] = []
    candidates: dict[Gate, str] = {}
    for regime, bias in regimes:
        if bias_name:
            tensors[bias_name].copy_(bias)
        routing = _routing(probe, rows, regime, bias)
        if routing is None:
            return None, none
        if not routings:
            candidates = {x: "" for x in _gates(probe, bias_name) if _resembles(x, routing, names)}
        if not candidates:
            return None, none
        routings.append(routing)
    for gate in candidates:
        candidates[gate] = next(filter(None, (_disagreement(gate, x, names) for x in routings)), "")
        if not candidates[gate]:
            return gate._replace(in_float32=_is_in_float32(module, rows[:_ROWS])), ""
    return None, next(iter(candidates.values()))


def _is_in_float32(module: Any, rows: torch.Tensor) -> bool:
    """Return whether a router multiplies in float32 even if the model has another dtype."""
    halves = randomized_copy(module).to(torch.bfloat16)
    try:
        logits: torch.Tensor = type(halves).forward(halves, rows.bfloat16())[0]
    except RuntimeError:
        return True  # bfloat16 weights fail, so it needs float32
    return logits.dtype == torch.float32
