"""The activations by torch's functions, for the tests of all ops that have them."""

from __future__ import annotations

import torch


def activated(
    name: str, gate: torch.Tensor, up: torch.Tensor | float = 1.0, alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    """The activation `name` of a gate, times its up."""
    functional = torch.nn.functional
    if name == "swigluoai":
        gate, up = gate.clamp(max=limit), torch.as_tensor(up).clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    forms = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "relu2": lambda x: functional.relu(x) ** 2,
        "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    }
    return forms[name](gate) * up
