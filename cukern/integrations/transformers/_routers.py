"""Replace the routers of a model that compute the same formula as a gate of cukern."""

from __future__ import annotations

from typing import Any

import torch

from cukern.integrations.transformers._deferred import Ids
from cukern.integrations.transformers._gates import Gate, gate_of
from cukern.integrations.transformers._products import product
from cukern.integrations.transformers._rewrite import only_argument, takes_one_argument
from cukern.integrations.transformers._state import Notes, State, active, simple_attributes, wants_gradient

_GATE = "_cukern_gate"
_FLOAT32_WEIGHT = "_cukern_weight"


def _float32_weight(self: Any) -> torch.Tensor:
    """Return a router's cached float32 weight."""
    weight: torch.Tensor = self.weight
    if weight.dtype == torch.float32 or torch.compiler.is_compiling():
        return weight.float()
    cached = self.__dict__.get(_FLOAT32_WEIGHT)
    if cached is None or cached[0] != (weight.data_ptr(), weight._version):
        cached = self.__dict__[_FLOAT32_WEIGHT] = (weight.data_ptr(), weight._version), weight.detach().float()
    return cached[1]  # type: ignore[no-any-return]


def router_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Return logits, weights and ids. With further arguments the router's own `forward` runs."""
    hidden_states = only_argument(args, kwargs)
    if hidden_states is None or wants_gradient(hidden_states, self.weight):
        return type(self).forward(self, *args, **kwargs)  # type: ignore[no-any-return]
    gate: Gate = self.__dict__[_GATE]
    correction_bias = getattr(self, gate.bias) if gate.bias else None
    x, weight, linear_bias = hidden_states.reshape(-1, self.weight.shape[1]), self.weight, getattr(self, "bias", None)
    if gate.in_float32:
        x, weight = x.float(), _float32_weight(self)
        linear_bias = None if linear_bias is None else linear_bias.float()
    with torch.no_grad():
        logits = product(x, weight, linear_bias)
        weights, ids = gate.route(logits, correction_bias)
        # This package's experts take int32 ids, so convert to int64 only for other code.
        defers = not torch.compiler.is_compiling() and active.session is not None
        return logits, weights, Ids.of(ids) if defers else ids.long()


def _is_router(module: Any) -> bool:
    if not type(module).__name__.endswith(("Router", "Gate", "TopKGate")):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and takes_one_argument(module)


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    known: dict[Any, tuple[Gate | None, str]] = {}
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        if not _is_router(module):
            if type(module).__name__.endswith("Router"):
                notes.kept.add("routers", module, "it is not one product and a choice")
            continue
        key = simple_attributes(module)
        if key not in known:
            known[key] = gate_of(module)
        gate, why_not = known[key]
        if gate is None:
            notes.kept.add("routers", module, why_not)
            continue
        module.__dict__[_GATE] = gate
        state.undo.append(lambda module=module: [module.__dict__.pop(x, None) for x in (_GATE, _FLOAT32_WEIGHT)])  # type: ignore
        state.replace_forward(module, router_forward)
        notes.replaced.add("routers", module, str(gate))
