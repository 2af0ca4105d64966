"""Replace the routers of a model that compute the same formula as a gate of cukern."""

from __future__ import annotations

from typing import Any

import torch

from cukern.integrations.transformers._deferred import Ids
from cukern.integrations.transformers._gates import Gate, gate_of
from cukern.integrations.transformers._products import product
from cukern.integrations.transformers._rewrite import alone, takes_one
from cukern.integrations.transformers._state import Notes, State, active, simple_attributes, wants_gradient

#: The attribute of a router that holds its `Gate`.
_GATE = "_cukern_gate"
#: The attribute of a router that caches its weight in float32, if the router multiplies in float32.
_WEIGHT = "_cukern_weight"


def _in_float32(self: Any) -> torch.Tensor:
    """Return a router's weight in float32. The converted weight is cached, because it is small."""
    weight: torch.Tensor = self.weight
    if weight.dtype == torch.float32 or torch.compiler.is_compiling():
        return weight.float()
    kept = self.__dict__.get(_WEIGHT)
    if kept is None or kept[0] != (weight.data_ptr(), weight._version):
        kept = self.__dict__[_WEIGHT] = (weight.data_ptr(), weight._version), weight.detach().float()
    return kept[1]  # type: ignore[no-any-return]


def router_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Run a replaced router. Return its logits, weights and ids.

    If a call has further arguments, the router's own `forward` runs.
    """
    hidden_states = alone(args, kwargs)
    if hidden_states is None or wants_gradient(hidden_states, self.weight):
        return type(self).forward(self, *args, **kwargs)  # type: ignore[no-any-return]
    gate: Gate = self.__dict__[_GATE]
    bias = getattr(self, gate.bias) if gate.bias else None
    x, weight, own_bias = hidden_states.reshape(-1, self.weight.shape[1]), self.weight, getattr(self, "bias", None)
    if gate.in_float32:
        x, weight = x.float(), _in_float32(self)
        own_bias = None if own_bias is None else own_bias.float()
    with torch.no_grad():
        logits = product(x, weight, own_bias)
        weights, ids = gate.route(logits, bias)
        # The experts of this package take the int32 ids, so convert to int64 only if other code reads them.
        defers = not torch.compiler.is_compiling() and active.session is not None
        return logits, weights, Ids.of(ids) if defers else ids.long()


# --- enable ---------------------------------------------------------------------------------------------


def _is_router(module: Any) -> bool:
    if not type(module).__name__.endswith(("Router", "Gate", "TopKGate")):
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and takes_one(module)


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    """Make the routers of the model run on cukern's gates, if they compute the formula of a gate."""
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
        state.undo.append(lambda module=module: [module.__dict__.pop(x, None) for x in (_GATE, _WEIGHT)])  # type: ignore
        state.replace_forward(module, router_forward)
        notes.replaced.add("routers", module, str(gate))
