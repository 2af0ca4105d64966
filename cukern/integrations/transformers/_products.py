"""Speed up linear layers with few input rows, and linear layers that share an input.

A decoding step multiplies one or a few rows by every weight of the model, so the memory bandwidth limits its speed. On
an H200, `moe_gemm` with one expert reaches 50% to 80% of the bandwidth. cuBLAS takes 1.1 to 3.9 times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import cukern
from cukern.integrations.transformers._regimes import difference
from cukern.integrations.transformers._rewrite import NOT_ONE, alone, takes_one
from cukern.integrations.transformers._state import Notes, State, active, simple_attributes, wants_gradient

#: `moe_gemm` replaces cuBLAS for up to FEW rows. For weights with at most _SMALL elements it replaces cuBLAS for up to
#: _FEW_OF_SMALL rows, because cuBLAS launches too few blocks for small weights.
FEW, _FEW_OF_SMALL, _SMALL = 2, 4, 2**21
#: Weights with more elements than this use cuBLAS, because cuBLAS reaches the memory bandwidth for them.
_LARGE = 2**26
_HALVES = (torch.float16, torch.bfloat16)
#: The attributes of a module that hold its joined weights (`_Together`), and the activation of a gated MLP.
_TOGETHER, _ACTIVATION = "_cukern_together", "_cukern_activation"
_offsets: dict[tuple[int, torch.device], torch.Tensor] = {}


def _offsets_of(rows: int, device: torch.device) -> torch.Tensor:
    """Return the offsets [0, rows], with which `moe_gemm` treats all rows as the rows of one expert.

    The tensor is cached. The first step of a session runs before the capture and creates it.
    """
    if (rows, device) not in _offsets:
        _offsets[rows, device] = torch.tensor([0, rows], dtype=torch.int32, device=device)
    return _offsets[rows, device]


def _streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `moe_gemm` should multiply `x` by the weight.

    It should in a step of `generate`, for few rows with 16-bit elements, if the sizes and the alignment allow it.
    """
    return (
        not torch.compiler.is_compiling()
        and active.session is not None
        and 0 < x.shape[0] <= (_FEW_OF_SMALL if weight.numel() <= _SMALL else FEW)
        and x.dtype == weight.dtype
        and x.dtype in _HALVES
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 8 == 0
        and weight.numel() <= _LARGE
        and weight.is_contiguous()
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return activation(x @ weight.T + bias), for x [rows, k] and weight [n, k].

    The result is [rows, n], or [rows, n / 2] with a gated activation.
    """
    if not _streams(x, weight):
        made = F.linear(x, weight, bias)
        return made if activation is None else cukern.moe_activation(made, activation)  # type: ignore[return-value]
    return cukern.moe_gemm(  # type: ignore[return-value]
        x.contiguous(), weight.detach()[None], _offsets_of(x.shape[0], x.device), activation=activation,
        bias=None if bias is None else bias.detach()[None], expected_m=min(x.shape[0], FEW),
    )  # fmt: skip


# --- several products of one input ----------------------------------------------------------------------


class _Together(NamedTuple):
    """The weights of several modules in one tensor. The parameters of the modules are views of this tensor."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    places: tuple[int, ...]  # addresses of the parameters, to detect that one was replaced


def is_linear(module: Any) -> bool:
    """Return whether a module is a plain linear layer."""
    if type(module) is not torch.nn.Linear or not isinstance(module.weight, torch.nn.Parameter):
        return False
    if "forward" in module.__dict__:  # another library replaced it, for example a library that offloads weights
        return False
    return not module._forward_hooks and not module._forward_pre_hooks and not hasattr(module, "parametrizations")


def _parameters(module: Any, names: Sequence[str]) -> list[list[torch.Tensor | None]]:
    own = [getattr(module, name) for name in names]
    return [[x.weight for x in own], [x.bias for x in own]]


def _places(parameters: list[list[torch.Tensor | None]]) -> tuple[int, ...]:
    return tuple(0 if x is None else x.data_ptr() for of_kind in parameters for x in of_kind)


@torch.no_grad()
def join(module: Any, names: Sequence[str], state: State) -> bool:
    """Copy the weights of the linear layers `names` of a module into one tensor. Return whether that is possible."""
    if not all(is_linear(getattr(module, name, None)) for name in names):
        return False
    weights, biases = _parameters(module, names)
    kinds = {(x.dtype, x.device, x.shape[1]) for x in weights if x is not None}
    if len(kinds) > 1 or (None in biases and any(x is not None for x in biases)):
        return False
    joined: list[torch.Tensor | None] = [None, None]
    for i, of_kind in enumerate((weights, biases)):
        found = [x for x in of_kind if x is not None]
        if found:
            joined[i] = together = torch.cat([x.detach() for x in found])
            for x, part in zip(found, together.split([len(x) for x in found]), strict=True):
                x.data = part
    weight = joined[0]
    assert weight is not None
    module.__dict__[_TOGETHER] = _Together(weight, joined[1], _places([weights, biases]))

    def separate() -> None:
        module.__dict__.pop(_TOGETHER, None)
        for of_kind in _parameters(module, names):
            for x in of_kind:
                if x is not None:
                    x.data = x.data.clone()

    state.undo.append(separate)
    return True


def together(module: Any, names: Sequence[str]) -> _Together | None:
    """Return the weights that `join` has joined. Return None if a parameter has been replaced since."""
    found: _Together | None = module.__dict__.get(_TOGETHER)
    if found is None or torch.compiler.is_compiling() or found.places != _places(_parameters(module, names)):
        return None
    return found


# --- modules --------------------------------------------------------------------------------------------


def linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Run a `torch.nn.Linear`. In a decoding step with few rows, `moe_gemm` runs it."""
    if torch.compiler.is_compiling() or active.session is None:
        return F.linear(input, self.weight, self.bias)
    made = product(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
    return made.view(*input.shape[:-1], made.shape[-1])


_GATE_UP = ("gate_proj", "up_proj")


def mlp_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a gated MLP, with one matrix multiplication for gates and ups.

    If a call has further arguments, the module's own `forward` runs.
    """
    own, x = together(self, _GATE_UP), alone(args, kwargs)
    if own is None or x is None or wants_gradient(x, self.gate_proj.weight) or x.dtype != own.weight.dtype:
        return type(self).forward(self, *args, **kwargs)  # type: ignore[no-any-return]
    with torch.no_grad():
        activated = product(x.reshape(-1, x.shape[-1]), own.weight, own.bias, self.__dict__[_ACTIVATION])
        made = self.down_proj(activated)
    return made.view(*x.shape[:-1], made.shape[-1])  # type: ignore[no-any-return]


def _small(module: Any, inputs: int, inner: int) -> Any:
    """Return an MLP of the same class with small random float32 weights."""
    probe = copy.copy(module)
    probe.__dict__ = {k: v for k, v in module.__dict__.items() if k != "forward"}
    probe._modules = dict(module._modules)
    generator = torch.Generator().manual_seed(4)
    for name, sizes in {"gate_proj": (inputs, inner), "up_proj": (inputs, inner), "down_proj": (inner, inputs)}.items():
        linear = torch.nn.Linear(*sizes, bias=getattr(module, name).bias is not None)
        for x in linear.parameters():
            x.copy_(torch.randn(x.shape, generator=generator) * 0.5)
        probe._modules[name] = linear
    return probe


@torch.no_grad()
def _activation_of(module: Any) -> tuple[str | None, str]:
    """Find the activation of an MLP, by running small MLPs of its class on random inputs.

    Return its name and an empty text. Return None and the reason if no kernel has this activation.
    """
    found: list[str] = []
    probes = {inputs: _small(module, inputs, inner) for inputs, inner in ((16, 24), (15, 25))}

    def of(rows: torch.Tensor) -> Any:
        probe = probes[rows.shape[-1]]
        for name in (*_GATE_UP, "down_proj"):
            probe._modules[name].to(rows.dtype)
        return probe

    for name in ("silu", "gelu", "gelu_tanh"):

        def kernel(rows: torch.Tensor, name: str = name) -> torch.Tensor:
            gate, up, down = (of(rows)._modules[x] for x in (*_GATE_UP, "down_proj"))
            both = torch.cat([gate(rows), up(rows)], 1)
            return down(cukern.moe_activation(both, name))  # type: ignore[no-any-return]

        shapes = {"": (9, 16), " of 15 numbers": (1, 15)}
        regime = difference(lambda rows: type(module).forward(of(rows), rows), kernel, shapes)
        if regime == "":
            return name, ""
        found += [f"it differs from a gated perceptron with {name} for {regime}"] * (regime is not None)
    return None, found[0] if found else "its formula is not that of a gated perceptron"


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    """Make gated MLPs run two matrix multiplications instead of three, and linear layers of few rows use `moe_gemm`."""
    known: dict[Any, tuple[str | None, str]] = {}
    for module in list(model.modules()):
        if "forward" in module.__dict__:
            continue
        if all(is_linear(getattr(module, name, None)) for name in (*_GATE_UP, "down_proj")):
            key = simple_attributes(module)
            if key not in known:
                known[key] = _activation_of(module) if takes_one(module) else (None, NOT_ONE)
            activation, why_not = known[key]
            if activation is None:
                notes.kept.add("products", module, why_not)
            elif join(module, _GATE_UP, state):
                module.__dict__[_ACTIVATION] = activation
                state.undo.append(lambda module=module: module.__dict__.pop(_ACTIVATION, None))  # type: ignore[misc]
                state.replace_forward(module, mlp_forward)
                notes.replaced.add("products", module, f"gates and ups in one product, {activation}")
    for module in list(model.modules()):
        if is_linear(module) and module.weight.dtype in _HALVES:
            state.replace_forward(module, linear_forward)
            notes.replaced.add("products", module, f"moe_gemm for at most {FEW} rows, in generate of this package")
