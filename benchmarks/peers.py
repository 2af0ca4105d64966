"""Products of other libraries for several benchmarks: vLLM's Marlin and Triton kernels, and triton_kernels.

The interfaces are from vLLM 0.26 and its triton_kernels (3.5). The functions here do what a user does once for many
calls, and return the product as a function without arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_GROUP = 32


def rows_by_expert(experts: int, each: int, device: torch.device) -> torch.Tensor:
    """Return expert ids [rows, 1] with `each` rows for each expert, one expert after the other."""
    return torch.arange(experts, dtype=torch.int32, device=device).repeat_interleave(each)[:, None].contiguous()


class MarlinWeights(NamedTuple):
    """MXFP4 weights [experts, n, k] in Marlin's layout."""

    numbers: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int


def marlin_weights(numbers: torch.Tensor, scales: torch.Tensor) -> MarlinWeights:
    """Repack weights as vLLM does for a model, from uint8 [experts, n, k / 2] and scales [experts, n, k / 32]."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_scales
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import mxfp4_marlin_process_scales

    n, k = numbers.shape[1], numbers.shape[2] * 2
    no_order = torch.empty(0, dtype=torch.int32, device=numbers.device)
    repacked, permuted = [], []
    for of_expert, its_scales in zip(numbers, scales, strict=True):
        columns = of_expert.view(torch.int32).T.contiguous()
        repacked.append(ops.gptq_marlin_repack(columns, no_order, k, n, 4))
        powers = its_scales.view(torch.float8_e8m0fnu).to(torch.bfloat16).T.contiguous()
        permuted.append(mxfp4_marlin_process_scales(marlin_permute_scales(powers, k, n, _GROUP)))
    return MarlinWeights(torch.stack(repacked), torch.stack(permuted), n, k)


def marlin_block(rows: int, experts: int) -> int:
    """Return the rows of a tile, by vLLM's rule."""
    return next((block for block in (8, 16, 32, 48) if rows / experts / block < 0.9), 64)


def marlin_product(
    a: torch.Tensor,
    out: torch.Tensor,
    weights: MarlinWeights,
    workspace: torch.Tensor,
    aligned: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor,
    block: int,
    topk: int,
    weigh: bool,
) -> torch.Tensor:
    """Compute the grouped product of the rows `a` for `topk` slots each, times the router's weights if `weigh`."""
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    return ops.moe_wna16_marlin_gemm(
        a,
        out,
        weights.numbers,
        None,  # bias
        weights.scales,
        *[None] * 5,  # arguments of other formats
        workspace,
        *aligned,
        topk_weights,
        moe_block_size=block,
        top_k=topk,
        mul_topk_weights=weigh,
        b_q_type=scalar_types.float4_e2m1f,
        size_m=a.shape[0],
        size_n=weights.n,
        size_k=weights.k,
        is_k_full=True,
        use_atomic_add=False,
        use_fp32_reduce=True,
        is_zp_float=False,
    )


def marlin_workspace(device: torch.device) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new

    return marlin_make_workspace_new(device, 4)


def marlin_grouped(a: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the grouped product with the same number of rows for each expert, one expert after the other."""
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    rows, experts = len(a), len(numbers)
    weights, workspace = marlin_weights(numbers, scales), marlin_workspace(a.device)
    block = marlin_block(rows, experts)
    aligned = moe_align_block_size(rows_by_expert(experts, rows // experts, a.device), block, experts)
    ones = torch.ones(rows, 1, device=a.device)

    def run() -> torch.Tensor:
        out = torch.empty(rows, weights.n, dtype=a.dtype, device=a.device)
        return marlin_product(a, out, weights, workspace, aligned, ones, block, 1, False)

    return run


def triton_kernels_grouped(a: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the grouped product of triton_kernels' `matmul_ogs`, with swizzled weights and no split-k, as in vLLM."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig, matmul_ogs
    from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
    from triton_kernels.numerics import InFlexData
    from triton_kernels.routing import RoutingData, compute_expt_data
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    update_opt_flags_constraints({"split_k": 1})
    rows, experts, n = len(a), len(numbers), numbers.shape[1]
    of_numbers, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    weights = convert_layout(wrap_torch_tensor(numbers.transpose(1, 2), dtype=FP4), of_numbers, **options)
    of_scales, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4)).transpose(1, 2)
    weight_scale = convert_layout(wrap_torch_tensor(padded), of_scales, **options)
    precision = PrecisionConfig(weight_scale=weight_scale, flex_ctx=FlexCtx(rhs_data=InFlexData()))
    counts = torch.full((experts,), rows // experts, dtype=torch.int32, device=a.device)
    routing = RoutingData(None, counts, experts, 1, compute_expt_data(counts, experts, rows))

    def run() -> torch.Tensor:
        out = torch.empty(1, rows, n, dtype=a.dtype, device=a.device)
        matmul_ogs(a, weights, None, routing, precision_config=precision, y=out)
        return out[0]

    return run


def vllm_triton_grouped(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return the 16-bit grouped product of vLLM's fused experts, with the tiles of the layer's first product."""
    import triton.language as tl
    from vllm.model_executor.layers.fused_moe import fused_moe

    (rows, k), (experts, n, _) = a.shape, b.shape
    config = fused_moe.try_get_optimal_moe_config(tuple(b.shape), (experts, k, n // 2), 1, None, rows)
    ids = rows_by_expert(experts, rows // experts, a.device)
    aligned = fused_moe.moe_align_block_size(ids, config["BLOCK_SIZE_M"], experts)

    def run() -> torch.Tensor:
        out = torch.empty(rows, 1, n, dtype=a.dtype, device=a.device)
        fused_moe.invoke_fused_moe_triton_kernel(
            a, b, out, None, None, None, *aligned, False, 1, config, compute_type=tl.bfloat16, **TRITON_16_BITS
        )
        return out[:, 0]

    return run


#: Options of `invoke_fused_moe_triton_kernel` for 16-bit weights and activations.
TRITON_16_BITS: dict[str, Any] = {
    "use_fp8_w8a8": False,
    "use_int8_w8a8": False,
    "use_int8_w8a16": False,
    "use_int4_w4a16": False,
    "per_channel_quant": False,
}
