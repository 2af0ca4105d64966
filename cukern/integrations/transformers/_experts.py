"""Run the experts of a model on `fused_experts`, or on two grouped GEMMs around the model's own activation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

import cukern
from cukern.integrations.transformers import _packed
from cukern.integrations.transformers._deferred import Ids
from cukern.integrations.transformers._regimes import difference
from cukern.integrations.transformers._rewrite import undecorated_forward
from cukern.integrations.transformers._state import DTYPES, NAME, Notes, State, simple_attributes, wants_gradient

_MATCHED = "_cukern_activation"
#: The number of arguments of an experts module's forward: the module, tokens, ids and weights.
_FORWARD_ARGUMENTS = 4
_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}


@dataclass(frozen=True)
class MatchedActivation:
    activation: str | None  # None: the module's own code computes it
    options: dict[str, Any] = field(default_factory=dict)
    why: str = ""  # without a match: how the module differs from the most similar activation

    @property
    def is_fused(self) -> bool:
        return self.activation is not None

    def __str__(self) -> str:
        if self.is_fused:
            return f"fused_experts, {self.activation}{', interleaved' * bool(self.options.get('interleaved'))}"
        return f"moe_permute, moe_gemm and moe_unpermute around the activation of the model{self.why}"


def is_experts(module: torch.nn.Module) -> bool:
    """Return whether transformers looks up the implementation of this module by name."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj"))


def _up_weights(module: Any) -> torch.Tensor:
    weights = module.gate_up_proj if module.has_gate else module.up_proj
    assert isinstance(weights, torch.Tensor)
    return weights


def _swigluoai_constants(module: Any) -> Iterator[tuple[float, float]]:
    for alpha in ("alpha", "swiglu_alpha"):
        for limit in ("limit", "swiglu_limit"):
            found = getattr(module, alpha, None), getattr(module, limit, None)
            if all(isinstance(x, (int, float)) for x in found):
                yield float(found[0]), float(found[1])  # type: ignore[arg-type]


def _candidates(module: Any) -> Iterator[tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]]:
    """Yield the name, the options and the formula of each kernel activation.

    The formula takes the output of the first GEMM: gates and ups, or only ups.
    """
    if not module.has_gate:
        for name, function in _GATES.items():
            yield f"{name}_no_mul", {}, function
        return
    for interleaved in (False, True):

        def halves(x: torch.Tensor, interleaved: bool = interleaved) -> tuple[torch.Tensor, ...]:
            return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)

        shared = {"interleaved": True} if interleaved else {}
        for name, function in _GATES.items():
            yield name, shared, lambda x, f=function, h=halves: f(h(x)[0]) * h(x)[1]  # type: ignore[misc]
        for alpha, limit in _swigluoai_constants(module):

            def oai(x: torch.Tensor, a: float = alpha, m: float = limit, h: Any = halves) -> torch.Tensor:
                gate, up = h(x)
                gate = gate.clamp(max=m)
                return gate * torch.sigmoid(gate * a) * (up.clamp(-m, m) + 1)

            yield "swigluoai", {"alpha": alpha, "limit": limit, **shared}, oai


@torch.no_grad()
def match_activation(module: Any) -> MatchedActivation:
    """Find the kernel activation that equals a module's activation, by running both on random numbers."""
    if getattr(module, "has_post_expert_norm", False):
        return MatchedActivation(None)
    device = _up_weights(module).device

    def module_activation(rows: torch.Tensor) -> Any:
        rows = rows.to(device)
        return (module._apply_gate(rows) if module.has_gate else module.act_fn(rows)).cpu()

    found: list[str] = []
    for name, options, formula in _candidates(module):

        def kernel(rows: torch.Tensor, formula: Any = formula) -> torch.Tensor:
            return formula(rows.float()).to(rows.dtype)  # type: ignore[no-any-return]

        regime = difference(module_activation, kernel, {"": (64, 32), " of 14 numbers": (3, 14)}, spread=6.0)
        if regime == "":
            return MatchedActivation(name, options)
        found += [f", which differs from {name} for {regime}"] * (regime is not None)
    return MatchedActivation(None, why=found[0] if found else "")


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts on tokens [tokens, hidden], as a function for transformers' `ExpertsInterface`.

    With expert parallelism, an id out of range stands for an expert of another rank, and adds nothing.
    """
    first, second = _up_weights(self), self.down_proj
    if wants_gradient(hidden_states, first, top_k_weights):
        return undecorated_forward(self)(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    with torch.no_grad():
        matched = self.__dict__.get(_MATCHED)
        if matched is None:  # `enable` ran for another model with the same configuration
            matched = self.__dict__[_MATCHED] = match_activation(self)
        biases = None, None
        if self.has_bias:
            biases = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias), self.down_proj_bias
        x = hidden_states.to(first.dtype).contiguous()
        ids = top_k_index.raw if isinstance(top_k_index, Ids) else top_k_index
        weights, ids = top_k_weights.float().contiguous(), ids.contiguous()
        if self.is_transposed:  # [experts, in, out]; the transposed views are not copied
            first, second = first.transpose(1, 2), second.transpose(1, 2)
        if matched.is_fused:
            out = cukern.fused_experts(
                x, first, second, weights, ids, activation=matched.activation, w1_bias=biases[0], w2_bias=biases[1],
                **matched.options,
            )  # fmt: skip
        else:
            out = _run_unfused(self, x, weights, ids, (first, second), biases)
        return out.to(hidden_states.dtype)


def _run_unfused(
    self: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, products: Any, biases: Any
) -> torch.Tensor:
    """Run two grouped GEMMs, with the module's own activation between them and its norm after them."""
    rows, _, offsets, inverse, _ = cukern.moe_permute(x, None, ids, products[0].shape[0])
    sums: Any = cukern.moe_gemm(rows, products[0], offsets, bias=biases[0])
    activated = self._apply_gate(sums) if self.has_gate else self.act_fn(sums)
    sums = cukern.moe_gemm(activated.to(x.dtype).contiguous(), products[1], offsets, bias=biases[1])
    if getattr(self, "has_post_expert_norm", False):
        sums = self.post_expert_norm(sums)
    return cukern.moe_unpermute(torch.empty_like(x), sums.contiguous(), weights, inverse, offsets)  # type: ignore


def _why_not(module: Any) -> str:
    first = _up_weights(module)
    if first.dim() != 3 or first.dtype not in DTYPES:
        return f"weights of {str(first.dtype).removeprefix('torch.')} {list(first.shape)}"
    if first.dtype != module.down_proj.dtype:
        return "its two weights have different dtypes"
    if len(inspect.signature(undecorated_forward(module)).parameters) != _FORWARD_ARGUMENTS:
        return "its forward takes more than tokens, ids and weights"
    return ""


def _enable_packed(model: torch.nn.Module, state: State, notes: Notes) -> None:
    """Replace the `forward` of experts that transformers keeps in FP8."""
    known: dict[Any, MatchedActivation] = {}
    for module in model.modules():
        if isinstance(module, _packed.Mxfp4Experts):
            notes.replaced.add("experts", module, f"fused_experts, {module.activation}, MXFP4")
        if isinstance(module, _packed.ScaledExperts):
            notes.replaced.add("experts", module, f"fused_experts, {module.activation}, FP8")
        if not isinstance(module, FP8Experts):
            continue
        reason, attributes = _packed.why_not_experts(module), simple_attributes(module)
        if not reason:
            if attributes not in known:
                known[attributes] = match_activation(module)
            matched = known[attributes]
            reason = "" if matched.is_fused else f"its activation is none of fused_experts{matched.why}"
        if reason:
            notes.kept.add("experts", module, reason)
            continue
        module.__dict__[_MATCHED] = matched
        state.undo.append(lambda module=module: module.__dict__.pop(_MATCHED, None))  # type: ignore[misc]
        _packed.replace_forward(module, _packed.fp8_experts_forward, state)
        notes.replaced.add("experts", module, f"{matched}, FP8")


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    ExpertsInterface.register(NAME, experts_forward)
    assert NAME in ALL_EXPERTS_FUNCTIONS
    _enable_packed(model, state, notes)
    configs: dict[int, tuple[Any, Any]] = {}
    kept = set()
    known: dict[Any, MatchedActivation] = {}
    for module in filter(is_experts, model.modules()):
        if isinstance(module, FP8Experts):
            continue
        if reason := _why_not(module):
            notes.kept.add("experts", module, reason)
            kept.add(id(module.config))
            continue
        attributes = simple_attributes(module)
        if attributes not in known:
            known[attributes] = match_activation(module)
        module.__dict__[_MATCHED] = matched = known[attributes]
        state.undo.append(lambda module=module: module.__dict__.pop(_MATCHED, None))  # type: ignore[misc]
        notes.replaced.add("experts", module, str(matched))
        configs[id(module.config)] = module.config, module.config._experts_implementation
    for key, (config, before) in configs.items():
        if key in kept:
            raise ValueError(
                "model has experts of one configuration that the kernels take, and others that they do not"
            )
        config._experts_implementation_internal = NAME
        state.undo.append(
            lambda config=config, before=before: setattr(config, "_experts_implementation_internal", before)  # type: ignore[misc]
        )
