"""Routers: those whose formula is one of the gates."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import cukern
from cukern.integrations.transformers._deferred import Ids
from cukern.integrations.transformers._products import product
from cukern.integrations.transformers._rewrite import written
from cukern.integrations.transformers._state import (
    Notes,
    State,
    active,
    copied,
    simple_attributes,
    wants_gradient,
)

#: The attribute of a router that holds its `Gate`.
_GATE = "_cukern_gate"
#: And the one that holds its weight in float32, where its product is.
_WEIGHT = "_cukern_weight"
_BIASES = ("e_score_correction_bias", "correction_bias", "expert_bias")


class Gate(NamedTuple):
    """The arguments of the gate that a router is."""

    scoring: str
    topk: int
    groups: int
    topk_group: int
    renormalize: bool
    scaling: float
    bias: str  # the name of the correction bias; empty: there is none
    in_float32: bool  # whether the product is

    def __str__(self) -> str:
        name = "moe_fused_gate" if self.bias or self.groups > 1 or self.scoring == "sqrtsoftplus" else "topk_softmax"
        name = "topk_sigmoid" if name == "topk_softmax" and self.scoring == "sigmoid" else name
        groups = f", {self.topk_group} of {self.groups} groups" if self.groups > 1 else ""
        return f"{name}, the best {self.topk} by {self.scoring}{' and a bias' * bool(self.bias)}{groups}"

    def route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """weights float32 and ids int32, [tokens, topk]."""
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


def _in_float32(self: Any) -> torch.Tensor:
    """The weight of a router in float32, made once: it is small, and each step would make it anew."""
    weight: torch.Tensor = self.weight
    if weight.dtype == torch.float32 or torch.compiler.is_compiling():
        return weight.float()
    kept = self.__dict__.get(_WEIGHT)
    if kept is None or kept[0] != (weight.data_ptr(), weight._version):
        kept = self.__dict__[_WEIGHT] = (weight.data_ptr(), weight._version), weight.detach().float()
    return kept[1]  # type: ignore[no-any-return]


def router_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The forward of a router that is replaced: logits, weights and ids."""
    gate: Gate = self.__dict__[_GATE]
    bias = getattr(self, gate.bias) if gate.bias else None
    if wants_gradient(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)  # type: ignore[no-any-return]
    x, weight, own_bias = hidden_states.reshape(-1, self.weight.shape[1]), self.weight, getattr(self, "bias", None)
    if gate.in_float32:
        x, weight = x.float(), _in_float32(self)
        own_bias = None if own_bias is None else own_bias.float()
    with torch.no_grad():
        logits = product(x, weight, own_bias)
        weights, ids = gate.route(logits, bias)
        # The experts of this package take ids of int32.
        defers = not torch.compiler.is_compiling() and active.session is not None
        return logits, weights, Ids.of(ids) if defers else ids.long()


# --- which routers are gates ----------------------------------------------------------------------------


def _number(module: Any, *names: str, default: Any = None) -> Any:
    found = (getattr(module, name, None) for name in names)
    return next((x for x in found if isinstance(x, (int, float))), default)


def _gates(module: Any) -> Iterator[Gate]:
    """The gates that a router may be, by its numbers."""
    topk = _number(module, "top_k", "num_experts_per_tok", "topk")
    if not isinstance(topk, int) or topk < 1:
        return
    groups = int(_number(module, "num_group", "n_group", "num_expert_group", default=1) or 1)
    kept = int(_number(module, "topk_group", default=1) or 1)
    bias = next((name for name in _BIASES if isinstance(getattr(module, name, None), torch.Tensor)), "")
    scaling = float(_number(module, "routed_scaling_factor", "route_scale", "router_scale", default=1.0))
    of_groups = [(groups, kept)] if groups == 1 else [(groups, kept), (1, 1)]
    biases, scalings = dict.fromkeys((bias, "")), dict.fromkeys((scaling, 1.0))
    scorings = ("softmax", "sigmoid", "sqrtsoftplus")
    for pair, scoring, own, renormalize, factor in itertools.product(
        of_groups, scorings, biases, (True, False), scalings
    ):
        if scoring != "sqrtsoftplus" or own or pair[0] > 1:
            yield Gate(scoring, topk, pair[0], pair[1], renormalize, factor, own, False)


def _same(weights: torch.Tensor, ids: torch.Tensor, wanted: tuple[Any, ...]) -> bool:
    """Whether two routings are the same but for the order of a token's experts."""
    of_theirs, theirs = wanted[1].float(), wanted[2].long()
    if of_theirs.shape != weights.shape or theirs.shape != ids.shape:
        return False
    ids, order = ids.long().sort(-1)
    theirs, order_of_theirs = theirs.sort(-1)
    if not torch.equal(ids, theirs):
        return False
    return torch.allclose(weights.gather(1, order), of_theirs.gather(1, order_of_theirs), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def _gate_of(module: Any) -> Gate | None:
    """The gate that a router is, found by where it sends random tokens; None for another formula."""
    probe = copied(module)
    rows = torch.randn(48, module.weight.shape[1], generator=torch.Generator().manual_seed(2)) * 0.3
    try:
        wanted = type(probe).forward(probe, rows)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    if not isinstance(wanted, tuple) or len(wanted) != 3 or not all(isinstance(x, torch.Tensor) for x in wanted):
        return None
    logits = F.linear(rows, probe.weight, getattr(probe, "bias", None))
    if wanted[0].shape != logits.shape or not torch.allclose(wanted[0], logits, rtol=1e-4, atol=1e-5):
        return None
    for gate in _gates(probe):
        try:
            weights, ids = gate.route(logits, getattr(probe, gate.bias).float() if gate.bias else None)
        except ValueError:
            continue
        if _same(weights, ids, wanted):
            return gate._replace(in_float32=_is_in_float32(module, rows))
    return None


def _is_in_float32(module: Any, rows: torch.Tensor) -> bool:
    """Whether the product of a router is in float32 whatever the dtype of the model."""
    halves = copied(module).to(torch.bfloat16)
    try:
        logits: torch.Tensor = type(halves).forward(halves, rows.bfloat16())[0]
    except RuntimeError:
        return True  # it takes weights of float32 alone
    return logits.dtype == torch.float32


def _is_router(module: Any) -> bool:
    name = type(module).__name__
    if not name.endswith(("Router", "Gate", "TopKGate")):
        return False
    weight = getattr(module, "weight", None)
    takes = list(inspect.signature(written(module)).parameters.values())[1:]
    required = [x for x in takes if x.default is x.empty and x.kind not in (x.VAR_KEYWORD, x.VAR_POSITIONAL)]
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and len(required) == 1


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    """Let the routers of the model run on the gates, where their formula is one."""
    known: dict[Any, Gate | None] = {}
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        if not _is_router(module):
            if type(module).__name__.endswith("Router"):
                notes.kept.add("routers", module, "it is not one product and a choice")
            continue
        key = simple_attributes(module)
        if key not in known:
            known[key] = _gate_of(module)
        gate = known[key]
        if gate is None:
            notes.kept.add("routers", module, "its formula is none of the gates")
            continue
        module.__dict__[_GATE] = gate
        state.undo.append(lambda module=module: [module.__dict__.pop(x, None) for x in (_GATE, _WEIGHT)])  # type: ignore
        state.replace_forward(module, router_forward)
        notes.replaced.add("routers", module, str(gate))
