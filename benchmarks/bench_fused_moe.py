"""The fused mixture-of-experts layer, from the top-k ids to its output, against a composition in PyTorch and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.fused_moe import FusedMoEQuantConfig

TOKENS = (1, 16, 64, 1024, 4096)
BLOCK = 128
# Of the outputs' norm: intermediate results are rounded elsewhere, in FP8 twice more.
_DIFFERENCE = {"bfloat16": 0.02, "float8_e4m3fn": 0.08}


class Sizes(NamedTuple):
    experts: int
    inter: int
    hidden: int
    topk: int


MIXTRAL, HALF_MIXTRAL = Sizes(8, 14336, 4096, 2), Sizes(8, 7168, 4096, 2)
DEEPSEEK_V3, QWEN3 = Sizes(32, 2048, 7168, 8), Sizes(128, 768, 2048, 8)


def used_experts(sizes: Sizes, tokens: int) -> float:
    """How many experts random routing is expected to use: the weights of the others need not be read."""
    return sizes.experts * (1 - (1 - sizes.topk / sizes.experts) ** tokens)


def _random(generator: torch.Generator, *shape: int, scale: float = 1.0, dtype: str = "bfloat16") -> torch.Tensor:
    """In parts, since the float32 numbers of all weights would take twice their memory."""
    made = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
    for part in made if len(shape) == 3 else made[None]:
        values = torch.randn(part.shape, generator=generator, device=generator.device) * scale
        part.copy_(values)
    return made


def _blocks(generator: torch.Generator, weights: torch.Tensor) -> torch.Tensor:
    """Scales for the blocks of FP8 weights."""
    experts, n, k = weights.shape
    shape = experts, -(-n // BLOCK), -(-k // BLOCK)
    return torch.rand(shape, generator=generator, device=generator.device) + 0.5


def _routing(generator: torch.Generator, tokens: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(tokens, sizes.experts, generator=generator, device=generator.device)
    weights, ids = scores.topk(sizes.topk, dim=1)
    return weights / weights.sum(dim=1, keepdim=True), ids.int()


# --- baselines ------------------------------------------------------------------------------------------


def _grouped_mm() -> Callable[..., torch.Tensor]:
    """torch's grouped product; ImportError where there is none."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    function = public or getattr(torch, "_grouped_mm", None)
    if function is None:
        raise ImportError("torch has no grouped product")
    return function


def composed() -> Callable[..., torch.Tensor]:
    """Sort, gather, grouped product, activation, grouped product, weigh, add up: nothing waits for the GPU."""
    grouped_mm = _grouped_mm()

    def layer(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        tokens, topk = ids.shape
        order = ids.flatten().argsort(stable=True)
        experts = torch.arange(w1.shape[0], device=x.device)
        ends = torch.searchsorted(ids.flatten()[order].long(), experts, right=True, out_int32=True)
        rows = x[order // topk]
        gate, up = grouped_mm(rows, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
        activated = torch.nn.functional.silu(gate) * up
        rows = grouped_mm(activated, w2.transpose(1, 2), offs=ends)
        back = torch.empty_like(rows).index_copy_(0, order, rows).view(tokens, topk, -1)
        return torch.einsum("tsh,ts->th", back.float(), weights).to(x.dtype)

    return layer


def _vllm() -> Callable[..., torch.Tensor]:
    from vllm.model_executor.layers.fused_moe import fused_experts

    return lambda x, w1, w2, weights, ids, *_: fused_experts(x, w1, w2, weights, ids)


def _vllm_fp8() -> Callable[..., torch.Tensor]:
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    def layer(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *s: torch.Tensor
    ) -> torch.Tensor:
        config = fp8_w8a8_moe_quant_config(w1_scale=s[0], w2_scale=s[1], block_shape=[BLOCK, BLOCK])
        return fused_experts(x, w1, w2, weights, ids, quant_config=config)

    return layer


# --- cases ----------------------------------------------------------------------------------------------


def _agree(dtype: str) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return bool((ours.float() - theirs.float()).norm() <= _DIFFERENCE[dtype] * theirs.float().norm())

    return agree


def _case(sizes: Sizes, tokens: int, dtype: str) -> Case:
    experts, inter, hidden, topk = sizes
    fp8 = dtype == "float8_e4m3fn"

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        x = _random(generator, tokens, hidden)
        w1 = _random(generator, experts, 2 * inter, hidden, scale=1 if fp8 else hidden**-0.5, dtype=dtype)
        w2 = _random(generator, experts, hidden, inter, scale=1 if fp8 else inter**-0.5, dtype=dtype)
        arguments = (x, w1, w2, *_routing(generator, tokens, sizes))
        if not fp8:
            return arguments
        # Scales that bring products back to magnitude 1.
        scales = _blocks(generator, w1) * hidden**-0.5, _blocks(generator, w2) * inter**-0.5
        return (*arguments, *scales)

    def call(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *s: torch.Tensor
    ) -> torch.Tensor:
        quant = FusedMoEQuantConfig.fp8_block(*s) if s else None
        return cukern.fused_experts(x, w1, w2, weights, ids, quant=quant)

    item = 1 if fp8 else 2
    weight_bytes = round(used_experts(sizes, tokens) * 3 * inter * hidden * item)
    # FP8 multiplies at twice the rate of the product that the floor is measured with.
    flops = 2 * tokens * topk * 3 * inter * hidden // (2 if fp8 else 1)
    baselines = {"vllm": Baseline(_vllm_fp8 if fp8 else _vllm, slow=True)}
    if not fp8:
        baselines = {"torch": Baseline(composed), **baselines}
    return Case(
        op="fused_experts",
        case={"tokens": tokens, "experts": experts, "inter": inter, "hidden": hidden, "topk": topk, "dtype": dtype},
        variant="auto",
        inputs=inputs,
        call=call,
        bytes=weight_bytes + 2 * tokens * hidden * 2 + tokens * topk * 8,
        flops=flops,
        baselines=baselines,
        agree=_agree(dtype),
        host=tokens == 1 and sizes in (DEEPSEEK_V3, QWEN3),
    )


def cases() -> list[Case]:
    made = [
        _case(sizes, tokens, "bfloat16") for sizes in (MIXTRAL, HALF_MIXTRAL, DEEPSEEK_V3, QWEN3) for tokens in TOKENS
    ]
    return [*made, _case(DEEPSEEK_V3, 1024, "float8_e4m3fn")]
