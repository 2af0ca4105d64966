"""Tests whose reference rounds, or chooses among equals, as cukern does not on purpose: a failed case is tried again.

The second try has the same bounds and a reference that does what docs/differences.md says of cukern. Only a case that
then passes differs on purpose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch


class Again(NamedTuple):
    """Why the first try fails, and a context of the second one, in which the test's module has another reference."""

    reason: str
    reference: Callable[[Any], AbstractContextManager[None]]


@contextlib.contextmanager
def _replaced(owner: Any, names: dict[str, Any]) -> Iterator[None]:
    """Let an object have other attributes of these names."""
    kept = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


def _groups_of_fp8(x: Any, group_size: int, eps: float = 1e-10, dtype: Any = torch.float8_e4m3fn) -> tuple[Any, Any]:
    """FP8 by groups with quotients for scales.

    Where vLLM 0.10.2's reference divides a tensor on a GPU by a number, torch multiplies by its reciprocal. A scale
    that is one step off breaks ties otherwise, of which numbers of 16 bits have many.
    """
    groups = x.float().reshape(-1, group_size)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=eps)
    most = torch.full_like(largest, torch.finfo(dtype).max)
    scales = largest / most
    q = (groups / scales).clamp(-most, most).to(dtype)
    return q.reshape(x.shape), scales.reshape(*x.shape[:-1], x.shape[-1] // group_size)


def _scales_by_quotients(module: Any) -> AbstractContextManager[None]:
    name = "native_per_token_group_quant_fp8"
    return _replaced(module, {name: _groups_of_fp8} if hasattr(module, name) else {})


def _activation_as_it_is(module: Any) -> AbstractContextManager[None]:
    rounded = module.SiluAndMul

    class Unrounded:
        @staticmethod
        def forward_native(x: Any) -> Any:
            return rounded().forward_native(x.float())

    stack = contextlib.ExitStack()
    stack.enter_context(_replaced(module, {"SiluAndMul": Unrounded}))
    stack.enter_context(_scales_by_quotients(module))
    return stack


def _rows_by_quotients(module: Any) -> AbstractContextManager[None]:
    def quotients(tensor: Any, scale: Any) -> Any:
        most = torch.finfo(torch.float8_e4m3fn).max
        return (tensor.float() / scale.view(-1, 1)).clamp(-most, most).to(torch.float8_e4m3fn)

    return _replaced(module, {"torch_per_token_quant_fp8": quotients})


def _scores_in_float32(module: Any) -> AbstractContextManager[None]:
    layer = getattr(module, "GroupedTopk", None)
    if layer is None:
        return contextlib.nullcontext()
    native = layer.forward_native

    def forward_native(self: Any, hidden_states: Any, gating_output: Any, *others: Any, **named: Any) -> Any:
        return native(self, hidden_states, gating_output.float(), *others, **named)

    return _replaced(layer, {"forward_native": forward_native})


def _rounded_once(module: Any) -> AbstractContextManager[None]:
    stack = contextlib.ExitStack()
    for name in ("FastGELU", "NewGELU", "QuickGELU"):
        layer = getattr(module, name)

        def forward_native(self: Any, x: Any, native: Any = layer.forward_native) -> Any:
            return native(self, x.float()).to(x.dtype)

        stack.enter_context(_replaced(layer, {"forward_native": forward_native}))
    return stack


def _with_equals(found: Any, probs: Any, top_k: int) -> Any:
    """What also keeps all that equal the k-th: of `found`, which must be probs' k largest numbers over their sum."""
    kept = found > 0
    assert bool((kept.sum(-1) == top_k).all())
    least = torch.where(kept, probs, torch.inf).amin(-1, keepdim=True)
    assert bool((torch.where(kept, 0, probs) <= least).all())
    own = torch.where(kept, probs, 0)
    torch.testing.assert_close(found, own / own.sum(-1, keepdim=True), rtol=1e-5, atol=0)
    wide = torch.where(probs >= least, probs, 0)
    return wide / wide.sum(-1, keepdim=True)


def _all_equals(module: Any) -> AbstractContextManager[None]:
    kernels = getattr(module, "sgl_kernel", None)
    if kernels is None:
        return contextlib.nullcontext()
    own = kernels.top_k_renorm_prob
    return _replaced(kernels, {"top_k_renorm_prob": lambda probs, top_k: _with_equals(own(probs, top_k), probs, top_k)})


_OF_EXPERTS = Again(
    "an activation is quantized as it is, by scales that are quotients, where the reference rounds it to 16 bits first",
    _activation_as_it_is,
)
_BY_QUOTIENTS = "quotients, where the reference multiplies by a reciprocal"
AGAIN = {
    "test_w8a8_block_fp8_fused_moe": _OF_EXPERTS,
    "test_w8a8_block_fp8_fused_moe_expert_map": _OF_EXPERTS,
    "test_per_token_group_quant_fp8": Again(_BY_QUOTIENTS, _scales_by_quotients),
    "test_per_token_quant_compare_implementations": Again(_BY_QUOTIENTS, _rows_by_quotients),
    "test_grouped_topk": Again(
        "a gate scores in float32, where the reference rounds its scores to 16 bits", _scores_in_float32
    ),
    "test_activation": Again("rounded once, where the reference rounds after each operation", _rounded_once),
    "test_top_k_renorm_probs": Again("k of equal probabilities at the k-th place, not all", _all_equals),
}
