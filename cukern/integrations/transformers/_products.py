"""Speed up linear layers with few input rows, and linear layers that share an input.

A decoding step multiplies few rows by every weight, so it is bound by memory bandwidth. On an H200, `moe_gemm` with one
expert reaches 50% to 80% of the bandwidth. cuBLAS takes 1.1 to 3.9 times as long as `moe_gemm`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import FP8Linear

import cukern
from cukern.formats.quantized import BLOCK
from cukern.integrations.transformers import _packed
from cukern.integrations.transformers._regimes import difference
from cukern.integrations.transformers._rewrite import MANY_ARGUMENTS, only_argument, takes_one_argument
from cukern.integrations.transformers._state import Notes, State, active, simple_attributes, wants_gradient

#: `moe_gemm` replaces cuBLAS for up to MAX_ROWS rows. For a weight of at most _SMALL_WEIGHT elements it replaces cuBLAS
#: for up to _MAX_ROWS_SMALL rows, because cuBLAS launches too few blocks for small weights.
MAX_ROWS, _MAX_ROWS_SMALL, _SMALL_WEIGHT = 2, 4, 2**21
#: For a weight of more than _LARGE_WEIGHT elements, cuBLAS reaches the memory bandwidth too.
_LARGE_WEIGHT = 2**26
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_JOINED, _ACTIVATION = "_cukern_together", "_cukern_activation"
_offsets: dict[tuple[int, torch.device], torch.Tensor] = {}


def _offsets_of(rows: int, device: torch.device) -> torch.Tensor:
    """Return cached offsets [0, rows], which assign all rows to one expert of `moe_gemm`."""
    if (rows, device) not in _offsets:
        _offsets[rows, device] = torch.tensor([0, rows], dtype=torch.int32, device=device)
    return _offsets[rows, device]


def _uses_moe_gemm(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and active.session is not None
        and 0 < x.shape[0] <= (_MAX_ROWS_SMALL if weight.numel() <= _SMALL_WEIGHT else MAX_ROWS)
        and x.dtype == weight.dtype
        and x.dtype in _HALF_DTYPES
        and weight.shape[0] % 16 == 0
        and weight.shape[1] % 8 == 0
        and weight.numel() <= _LARGE_WEIGHT
        and weight.is_contiguous()
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return activation(x @ weight.T + bias) for x [rows, k] and weight [n, k].

    The result is [rows, n], or [rows, n / 2] if the activation is gated.
    """
    if not _uses_moe_gemm(x, weight):
        made = F.linear(x, weight, bias)
        return made if activation is None else cukern.moe_activation(made, activation)  # type: ignore[return-value]
    return cukern.moe_gemm(  # type: ignore[return-value]
        x.contiguous(), weight.detach()[None], _offsets_of(x.shape[0], x.device), activation=activation,
        bias=None if bias is None else bias.detach()[None], expected_m=min(x.shape[0], MAX_ROWS),
    )  # fmt: skip


class _JoinedWeights(NamedTuple):
    """The weights of several modules in one tensor. The modules' parameters are views of the tensor."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    contents: tuple[Any, ...]  # of the parameters, to detect that one was replaced
    scale: torch.Tensor | None = None  # of FP8 weights, by blocks

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether `product` takes rows of a dtype."""
        return dtype == self.weight.dtype if self.scale is None else dtype in _HALF_DTYPES

    def product(self, x: torch.Tensor, activation: str | None = None) -> torch.Tensor:
        """Return activation(x @ weight.T + bias) for x [rows, k]."""
        if self.scale is None:
            return product(x, self.weight, self.bias, activation)
        made = _packed.fp8_product(x, self.weight, self.scale, None, self.bias)
        return made if activation is None else cukern.moe_activation(made, activation)  # type: ignore[return-value]


def _runs_its_class(module: Any) -> bool:
    """Return whether a call of a layer runs the `forward` of its class, on its own parameters."""
    if "forward" in module.__dict__:  # replaced, for example by a library that offloads weights
        return False
    return not module._forward_hooks and not module._forward_pre_hooks and not hasattr(module, "parametrizations")


def is_linear(module: Any) -> bool:
    is_plain = type(module) is torch.nn.Linear and isinstance(module.weight, torch.nn.Parameter)
    return is_plain and _runs_its_class(module)


def _is_fp8(module: Any) -> bool:
    """Return whether a layer has FP8 weights by blocks, whole blocks of rows, and dynamic scales of its input."""
    if not isinstance(module, FP8Linear) or _packed.why_not_linear(module) or not _runs_its_class(module):
        return False
    return module.block_size is not None and module.activation_scale is None and module.out_features % BLOCK == 0


def are_linear(module: Any, names: Sequence[str]) -> bool:
    """Return whether all layers `names` of a module are linear layers of one kind, with 16-bit or FP8 weights."""
    layers = [getattr(module, name, None) for name in names]
    return all(map(is_linear, layers)) or all(map(_is_fp8, layers))


def _parameters(module: Any, names: Sequence[str]) -> list[list[torch.Tensor | None]]:
    layers = [getattr(module, name) for name in names]
    scales = [x._parameters.get("weight_scale_inv") for x in layers]
    return [[x.weight for x in layers], [x.bias for x in layers], scales]


def _contents(parameters: list[list[torch.Tensor | None]]) -> tuple[Any, ...]:
    return tuple(0 if x is None else _packed.content_of(x) for of_kind in parameters for x in of_kind)


@torch.no_grad()
def join(module: Any, names: Sequence[str], state: State) -> bool:
    """Copy the weights of the linear layers `names` into one tensor. Return whether that is possible."""
    if not are_linear(module, names):
        return False
    weights, biases, scales = parameters = _parameters(module, names)
    kinds = {(x.dtype, x.device, x.shape[1]) for x in weights if x is not None}
    if len(kinds) > 1 or (None in biases and any(x is not None for x in biases)):
        return False
    if len({x.dtype for x in scales if x is not None}) > 1:
        return False
    joined: list[torch.Tensor | None] = [None, None, None]
    for i, of_kind in enumerate(parameters):
        found = [x for x in of_kind if x is not None]
        if found:
            # torch concatenates bytes on every device, but not FP8.
            parts = [x.detach().view(torch.uint8) if x.itemsize == 1 else x.detach() for x in found]
            joined[i] = concatenated = torch.cat(parts).view(found[0].dtype)
            for x, view in zip(found, concatenated.split([len(x) for x in found]), strict=True):
                x.data = view
    weight, bias, scale = joined
    assert weight is not None
    scale = None if scale is None else scale.float()
    module.__dict__[_JOINED] = _JoinedWeights(weight, bias, _contents(parameters), scale)

    def separate() -> None:
        module.__dict__.pop(_JOINED, None)
        for of_kind in _parameters(module, names):
            for x in of_kind:
                if x is not None:
                    x.data = x.data.clone()

    state.undo.append(separate)
    return True


def joined_weights(module: Any, names: Sequence[str]) -> _JoinedWeights | None:
    """Return the result of `join`, or None if a parameter has been replaced since."""
    found: _JoinedWeights | None = module.__dict__.get(_JOINED)
    if found is None or torch.compiler.is_compiling() or found.contents != _contents(_parameters(module, names)):
        return None
    return found


def linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Run a `torch.nn.Linear`, on `moe_gemm` for few rows in a decoding step."""
    if torch.compiler.is_compiling() or active.session is None:
        return F.linear(input, self.weight, self.bias)
    made = product(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
    return made.view(*input.shape[:-1], made.shape[-1])


_GATE_UP = ("gate_proj", "up_proj")


def mlp_forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a gated MLP with one matrix multiplication for gates and ups."""
    joined, x = joined_weights(self, _GATE_UP), only_argument(args, kwargs)
    weight = self.gate_proj.weight if joined is None or joined.scale is None else None  # FP8 weights have no gradient
    if joined is None or x is None or wants_gradient(x, weight) or not joined.takes(x.dtype):
        return type(self).forward(self, *args, **kwargs)  # type: ignore[no-any-return]
    with torch.no_grad():
        activated = joined.product(x.reshape(-1, x.shape[-1]), self.__dict__[_ACTIVATION])
        made = self.down_proj(activated)
    return made.view(*x.shape[:-1], made.shape[-1])  # type: ignore[no-any-return]


def _small_copy(module: Any, inputs: int, inner: int) -> Any:
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
    """Find an MLP's activation on random inputs. Return (name, "") or (None, reason)."""
    found: list[str] = []
    probes = {inputs: _small_copy(module, inputs, inner) for inputs, inner in ((16, 24), (15, 25))}

    def probe_of(rows: torch.Tensor) -> Any:
        probe = probes[rows.shape[-1]]
        for name in (*_GATE_UP, "down_proj"):
            probe._modules[name].to(rows.dtype)
        return probe

    for name in ("silu", "gelu", "gelu_tanh"):

        def kernel(rows: torch.Tensor, name: str = name) -> torch.Tensor:
            gate, up, down = (probe_of(rows)._modules[x] for x in (*_GATE_UP, "down_proj"))
            both = torch.cat([gate(rows), up(rows)], 1)
            return down(cukern.moe_activation(both, name))  # type: ignore[no-any-return]

        shapes = {"": (9, 16), " of 15 numbers": (1, 15)}
        regime = difference(lambda rows: type(module).forward(probe_of(rows), rows), kernel, shapes)
        if regime == "":
            return name, ""
        found += [f"it differs from a gated perceptron with {name} for {regime}"] * (regime is not None)
    return None, found[0] if found else "its formula is not that of a gated perceptron"


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    known: dict[Any, tuple[str | None, str]] = {}
    for module in list(model.modules()):
        if "forward" in module.__dict__:
            continue
        if are_linear(module, (*_GATE_UP, "down_proj")):
            key = simple_attributes(module)
            if key not in known:
                known[key] = _activation_of(module) if takes_one_argument(module) else (None, MANY_ARGUMENTS)
            activation, why_not = known[key]
            if activation is None:
                notes.kept.add("products", module, why_not)
            elif join(module, _GATE_UP, state):
                module.__dict__[_ACTIVATION] = activation
                state.undo.append(lambda module=module: module.__dict__.pop(_ACTIVATION, None))  # type: ignore[misc]
                state.replace_forward(module, mlp_forward)
                notes.replaced.add("products", module, f"gates and ups in one product, {activation}")
    for module in list(model.modules()):
        if is_linear(module) and module.weight.dtype in _HALF_DTYPES:
            state.replace_forward(module, linear_forward)
            notes.replaced.add("products", module, f"moe_gemm for at most {MAX_ROWS} rows, in generate of this package")
        elif isinstance(module, _packed.ScaledLinear):
            notes.replaced.add("products", module, "quantized_matmul, FP8")
        elif isinstance(module, FP8Linear):
            if reason := _packed.why_not_linear(module):
                notes.kept.add("products", module, reason)
                continue
            _packed.replace_forward(module, _packed.fp8_linear_forward, state)
            notes.replaced.add("products", module, "quantized_matmul, FP8")
