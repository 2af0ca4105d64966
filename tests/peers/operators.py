"""vLLM's and SGLang's operators over cukern's functions, where their files ask for another form or rounding."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import cukern
from cukern.compat import sglang as compat_sglang
from cukern.compat import vllm as compat_vllm
from cukern.compat.vllm import moe_permute_unpermute as permutation
from tests.peers.placeholders import placeholder


def fp8_allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """`torch.allclose` that takes FP8 too."""
    return bool(torch.allclose(a.float(), b.float(), rtol, atol, equal_nan))


def fp8_ulp_distance(a: Any, b: Any) -> Any:
    """How many e4m3 numbers apart the elements are."""
    codes = [x.view(torch.uint8).int() for x in (a, b)]
    ordered = [torch.where(x >= 128, 128 - x, x) for x in codes]
    return (ordered[0] - ordered[1]).abs()


def into(function: Callable[..., Any]) -> Callable[..., None]:
    def call(out: Any, x: Any, *_: Any) -> None:
        function(x, out=out)

    return call


def scaled(out: Any, x: Any, scale: Any, group_shape: Any = None) -> None:
    sys.modules["vllm._custom_ops"].scaled_fp8_quant(x, scale, output=out, group_shape=group_shape)


def scaled_dynamically(out: Any, x: Any, scale: Any, bound: Any = None, per_token: bool = False) -> None:
    _, found = cukern.scaled_fp8_quant(x, None, None, bound, per_token, out)
    scale.copy_(found)


def quantized(out: Any, x: Any, norm: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> None:
    """A fused norm and quantization as vLLM rounds it, to 16 bits in between: cukern's is at most one step away."""
    if residual is None:
        cukern.rms_norm_quant(x, weight, epsilon, scale=scale, out_q=out)
    else:
        cukern.fused_add_rms_norm_quant(x, residual, weight, epsilon, scale=scale, out_q=out)
    rounded, _ = cukern.scaled_fp8_quant(norm, scale)
    assert int(fp8_ulp_distance(out, rounded).max()) <= 1
    out.copy_(rounded)


def quantized_norm(out: Any, x: Any, weight: Any, scale: Any, epsilon: float) -> None:
    quantized(out, x, cukern.rms_norm(x, weight, epsilon), None, weight, scale, epsilon)


def quantized_sum(out: Any, x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> None:
    norm, total = x.clone(memory_format=torch.contiguous_format), residual.clone()
    cukern.fused_add_rms_norm(norm, total, weight, epsilon)
    quantized(out, x, norm, residual, weight, scale, epsilon)


def bounded(found: tuple[Any, Any], rounded: tuple[Any, Any]) -> tuple[Any, Any]:
    """Fused FP8 and scales as vLLM rounds them, `rounded`: cukern's are at most a step of both formats away."""
    (q, scales), (wanted, wanted_scales) = found, rounded
    wanted_scales = wanted_scales.reshape(scales.shape)
    torch.testing.assert_close(scales, wanted_scales, rtol=2**-6, atol=0)
    assert int(fp8_ulp_distance(q, wanted).max()) <= 1
    return q.copy_(wanted), scales.copy_(wanted_scales)


def quantized_activation(out: Any, x: Any, scale: Any) -> None:
    """A fused activation and quantization as vLLM rounds it, to 16 bits in between: cukern's is at most a step away."""
    cukern.silu_and_mul_quant(x, scale=scale, out_q=out)
    gate, up = x.chunk(2, -1)
    rounded, _ = cukern.scaled_fp8_quant(torch.nn.functional.silu(gate) * up, scale)
    assert int(fp8_ulp_distance(out, rounded).max()) <= 1
    out.copy_(rounded)


def norm_of(x: Any, weight: Any, epsilon: float, residual: Any) -> Any:
    """The norm as vLLM rounds it: before the weight too."""
    if residual is None:
        return cukern.rms_norm(x.contiguous(), None, epsilon) * weight
    norm, total = x.clone(memory_format=torch.contiguous_format), residual.clone()
    cukern.fused_add_rms_norm(norm, total, None, epsilon, round_sum=False)
    return norm * weight


def norm_by_tokens(x: Any, weight: Any, epsilon: float, dtype: Any, scale_ub: Any = None, residual: Any = None) -> Any:
    norm = norm_of(x, weight, epsilon, residual)
    found = compat_vllm.rms_norm_dynamic_per_token_quant(x, weight, epsilon, dtype, scale_ub, residual)
    return bounded(found, cukern.scaled_fp8_quant(norm, None, None, None, True))


def norm_by_blocks(
    x: Any,
    weight: Any,
    epsilon: float,
    dtype: Any,
    group_size: list[int],
    scale_ub: Any = None,
    residual: Any = None,
    *layout: Any,
) -> Any:
    norm = norm_of(x, weight, epsilon, residual)
    arguments = x, weight, epsilon, dtype, group_size, scale_ub, residual, *layout
    found = compat_vllm.rms_norm_per_block_quant(*arguments)
    return bounded(found, cukern.per_token_group_quant_fp8(norm, group_size[1]))


def by_groups(x: Any, q: Any, scales: Any, group_size: int, eps: float, low: float, high: float, *flags: Any) -> None:
    if flags and flags[0]:
        raise NotImplementedError("per_token_group_fp8_quant: use_ue8m0 must be False with cukern")
    _, found = cukern.per_token_group_quant_fp8(x, group_size, eps, out_q=q)
    scales.copy_(found)


def by_groups_of_int8(x: Any, q: Any, scales: Any, group_size: int, eps: float, *_: Any) -> None:
    _, found = cukern.per_token_group_quant_int8(x, group_size, eps, truncate=True, out_q=q)
    scales.copy_(found)


def activation_of_experts(y: Any, counts: Any, group_size: int = 128, eps: float = 1e-10) -> tuple[Any, Any]:
    """vLLM 0.10.2's `silu_mul_fp8_quant_deep_gemm`."""
    found: tuple[Any, Any] = cukern.silu_and_mul_quant(y, "silu", group_size=group_size, expert_num_tokens=counts)
    return found


class Operators:
    """A namespace of `torch.ops`: the operators below, and placeholders."""

    def __init__(self, name: str, **operators: Any) -> None:
        self.name = name
        vars(self).update(operators)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"torch.ops.{self.name}.{name}")


def _in_parts_of(output: Any, x: Any) -> Any:
    """Keys [blocks, heads, dim / x, block, x] with the x of `output`: 16 bytes are more numbers of FP8 than of 16 bits.

    vLLM's kernel copies memory, so that the keys of its reference have their dimensions in another order than those of
    the cache; here they keep it.
    """
    if x.shape == output.shape or x.dim() != 5:
        return x
    blocks, heads, _, block_size, part = output.shape
    by_dims = x.transpose(3, 4).reshape(blocks, heads, -1, part, block_size)
    return by_dims.transpose(3, 4).contiguous()


def convert_fp8(output: Any, x: Any, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Bytes of FP8 from numbers over a scale, or numbers from bytes times it: how vLLM's files make their caches."""
    dtype = torch.float8_e5m2 if "e5m2" in kv_dtype else torch.float8_e4m3fn
    if output.element_size() == 1:
        most = torch.finfo(dtype).max
        output.view(dtype).copy_((x.float() / scale).clamp(-most, most))
    else:
        output.copy_(_in_parts_of(output, x).view(dtype).float() * scale)


def swap_blocks(src: Any, dst: Any, *sizes_and_mapping: Any) -> None:
    """`swap_blocks`, also without the bytes of a block, as in vLLM 0.10.2."""
    *sizes, mapping = sizes_and_mapping
    block_bytes = sizes[0] if sizes else src.stride(0) * src.element_size()
    cukern.swap_blocks(src, dst, block_bytes, mapping)


def gather_and_maybe_dequant_cache(src: Any, dst: Any, table: Any, ends: Any, fifth: Any, *others: Any) -> None:
    """`gather_and_maybe_dequant_cache`, also with the batch as the fifth argument, as in vLLM 0.10.2."""
    if not isinstance(fifth, int):
        compat_vllm.gather_and_maybe_dequant_cache(src, dst, table, ends, fifth, *others)
        return
    kv_cache_dtype, scale, *starts = others
    cukern.gather_cache(src, dst, table, ends, fifth, *starts, kv_cache_dtype=kv_cache_dtype, scale=scale)


def fused_topk(
    hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, indices_type: Any = None
) -> tuple[Any, Any, Any]:
    """vLLM's function of this name over its `topk_softmax`."""
    weights, *ids = (
        torch.empty(hidden_states.shape[0], topk, dtype=dtype or torch.int32, device=hidden_states.device)
        for dtype in (torch.float32, indices_type, torch.int32)
    )
    compat_vllm.topk_softmax(weights, *ids, gating_output, renormalize)
    return weights, ids[0], ids[1]


def moe_permute(*args: Any, **kwargs: Any) -> Any:
    """`moe_permute`, also with `align_block_size`, as in vLLM 0.10.2, whose function is cukern's."""
    function = cukern.moe_permute if "align_block_size" in kwargs else permutation.moe_permute
    return function(*args, **kwargs)


def _unused_are_marked(blocks: Any, end: Any, block_size: int) -> Any:
    """Which blocks are used; cukern gives -1 to all others."""
    is_used = torch.arange(blocks.shape[0], device=blocks.device) * block_size < end
    assert bool((blocks[~is_used] == -1).all())
    return is_used


def align_blocks(ids: Any, experts: int, block_size: int, rows: Any, blocks: Any, end: Any, *others: Any) -> None:
    """vLLM's `moe_align_block_size`; that of 0.10.2, with these arguments alone, gives blocks that are not used 0."""
    compat_vllm.moe_align_block_size(ids, experts, block_size, rows, blocks, end, *others)
    if not others:
        blocks.masked_fill_(~_unused_are_marked(blocks, end, block_size), 0)


def align_used_blocks(ids: Any, experts: int, block_size: int, rows: Any, blocks: Any, end: Any, *others: Any) -> None:
    """SGLang's `moe_align_block_size`, which leaves blocks that are not used as they are; cukern gives them -1.

    SGLang's kernel and its reference read the memory of the experts' numbers as if they were contiguous, which those
    of its tests are not; cukern minds strides.
    """
    ids = ids.as_strided(ids.shape, (ids.shape[1], 1))
    found = torch.empty_like(blocks)
    compat_sglang.moe_align_block_size(ids, experts, block_size, rows, found, end, *others)
    blocks.copy_(torch.where(_unused_are_marked(found, end, block_size), found, blocks))
