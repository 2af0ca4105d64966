"""Time the MoE gates beside PyTorch, Triton and the kernels of SGLang and vLLM."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Routing = tuple[torch.Tensor, torch.Tensor]
Baselines = dict[str, Baseline]

TOKENS = (1, 64, 1024, 8192, 65536)
VARIANTS = ("specialized", "dynamic")
# A baseline that rounds differently may choose another expert for a few near ties.
_MATCHED_TOKENS = 0.99
_SHARED_EXPERTS = 0.97


def eager(logits: torch.Tensor, bias: torch.Tensor, groups: int, topk_group: int, topk: int) -> Routing:
    """Compute the biased grouped top-k with torch operators, by the formulas of the DeepSeek-V3 report."""
    tokens, experts = logits.shape
    scores = logits.float().sigmoid()
    choice = scores + bias
    if groups > 1:
        group_scores = choice.view(tokens, groups, -1).topk(2, dim=-1).values.sum(dim=-1)
        best_groups = group_scores.topk(topk_group, dim=-1, sorted=False).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best_groups, False)
        choice = choice.view(tokens, groups, -1).masked_fill(dropped[:, :, None], float("-inf")).view(tokens, experts)
    ids = choice.topk(topk, dim=-1).indices
    weights = scores.gather(1, ids)
    return weights / weights.sum(dim=-1, keepdim=True), ids.int()


def eager_sigmoid(logits: torch.Tensor, topk: int) -> Routing:
    """Compute the top-k of the sigmoid."""
    weights, ids = logits.float().sigmoid().topk(topk, dim=-1)
    return weights, ids.int()


def eager_softmax(logits: torch.Tensor, topk: int) -> Routing:
    """Compute the softmax, then its top-k."""
    weights, ids = logits.float().softmax(dim=-1).topk(topk, dim=-1)
    return weights, ids.int()


if triton is not None:
    # One warp per program keeps every reduction within a warp. do_bench with a CUDA graph leaves out the launch cost.
    @triton.autotune(
        configs=[triton.Config({"BLOCK": block}, num_warps=1) for block in (1, 2, 4)],
        key=["tokens"],
        do_bench=lambda call, quantiles: triton.testing.do_bench_cudagraph(call, rep=2, quantiles=quantiles),
    )
    @triton.jit(do_not_specialize=["tokens"])
    def _router(
        logits,
        bias,
        weights,
        ids,
        tokens,
        EXPERTS: tl.constexpr,
        GROUPS: tl.constexpr,
        TOPK_GROUP: tl.constexpr,
        TOPK: tl.constexpr,
        SOFTMAX: tl.constexpr,
        COLUMNS: tl.constexpr,  # EXPERTS rounded up to a power of two
        SLOTS: tl.constexpr,  # TOPK rounded up to a power of two
        BLOCK: tl.constexpr,
    ):
        """One program per BLOCK tokens: keep the best groups, then take the best expert TOPK times."""
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.arange(0, COLUMNS)
        row = logits + token[:, None] * EXPERTS
        inside = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
        x = tl.load(row + expert[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        if SOFTMAX:
            choice = x
        else:
            b = tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
            choice = tl.where(inside, tl.sigmoid(x) + b[None, :], float("-inf"))

        if GROUPS > 1:
            group = tl.arange(0, GROUPS)
            member = tl.arange(0, COLUMNS // GROUPS)
            grouped = tl.reshape(choice, (BLOCK, GROUPS, COLUMNS // GROUPS))
            best, at = tl.max(grouped, axis=2, return_indices=True)
            others = tl.where(member[None, None, :] == at[:, :, None], float("-inf"), grouped)
            score = best + tl.max(others, axis=2)
            mine, theirs = score[:, :, None], score[:, None, :]
            before = (theirs > mine) | ((theirs == mine) & (group[None, None, :] < group[None, :, None]))
            kept = tl.sum(before.to(tl.int32), axis=2) < TOPK_GROUP
            choice = tl.reshape(tl.where(kept[:, :, None], grouped, float("-inf")), (BLOCK, COLUMNS))

        slot = tl.arange(0, SLOTS)
        chosen = tl.zeros((BLOCK, SLOTS), tl.int32)
        for k in tl.static_range(TOPK):
            _, best_expert = tl.max(choice, axis=1, return_indices=True)
            chosen = tl.where(slot[None, :] == k, best_expert[:, None], chosen)
            choice = tl.where(expert[None, :] == best_expert[:, None], float("-inf"), choice)

        used = (token < tokens)[:, None] & (slot < TOPK)[None, :]
        chosen_x = tl.load(row + chosen, mask=used, other=float("-inf")).to(tl.float32)
        if SOFTMAX:
            largest = tl.max(x, axis=1)[:, None]
            weight = tl.exp(chosen_x - largest) / tl.sum(tl.exp(x - largest), axis=1)[:, None]
        else:
            weight = tl.sigmoid(chosen_x)
            weight = weight / tl.sum(weight, axis=1)[:, None]
        out = token[:, None] * TOPK + slot[None, :]
        tl.store(weights + out, weight, mask=used)
        tl.store(ids + out, chosen, mask=used)

    def triton_router(
        logits: torch.Tensor, bias: torch.Tensor | None, groups: int, topk_group: int, topk: int
    ) -> Routing:
        """Compute the fused gate in Triton: with a bias sigmoid, renormalized; without a bias softmax."""
        tokens, experts = logits.shape
        columns = triton.next_power_of_2(experts)
        if groups > 1 and columns != experts:
            raise ValueError(f"with groups, experts must be a power of two, got {experts}")
        weights = torch.empty(tokens, topk, device=logits.device)
        ids = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
        slots = triton.next_power_of_2(topk)
        _router[lambda chosen: (triton.cdiv(tokens, chosen["BLOCK"]),)](
            logits, bias, weights, ids, tokens, experts, groups, topk_group, topk, bias is None, columns, slots
        )  # fmt: skip
        return weights, ids


def _triton(function: Callable[..., Routing]) -> Baseline:
    def load() -> Callable[..., Routing]:
        if triton is None:
            raise ImportError("triton")
        return function

    return Baseline(load)


def _compiled(function: Callable[..., Routing]) -> Baseline:
    def load() -> Callable[..., Routing]:
        # torch allows few recompilations of a function, and each case counts as one.
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _gate_baselines(groups: int, topk_group: int, topk: int, compiled: bool) -> Baselines:
    def composed(logits: torch.Tensor, bias: torch.Tensor) -> Routing:
        return eager(logits, bias, groups, topk_group, topk)

    baselines = {"torch": Baseline(lambda: composed)}
    if compiled:
        baselines["torch.compile"] = _compiled(composed)
    baselines["Triton"] = _triton(lambda logits, bias: triton_router(logits, bias, groups, topk_group, topk))
    return baselines


def _gate_peers(experts: int, groups: int, topk_group: int, topk: int, dtype: str) -> Baselines:
    """Return the kernels of sglang-kernel 0.4.2, SGLang 0.5.17 and vLLM 0.26."""

    def sglang() -> Callable[..., Any]:
        from sgl_kernel import moe_fused_gate

        return lambda logits, bias: moe_fused_gate(logits, bias, groups, topk_group, topk)

    def sglang_kimi() -> Callable[..., Any]:
        from sgl_kernel import kimi_k2_moe_fused_gate

        return lambda logits, bias: kimi_k2_moe_fused_gate(logits, bias, topk)

    def sglang_triton() -> Callable[..., Any]:
        from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

        return lambda logits, bias: moe_fused_gate(logits, bias, topk, num_expert_group=groups, topk_group=topk_group)

    def vllm() -> Callable[..., Any]:
        from vllm import _custom_ops

        sigmoid = 1
        return lambda logits, bias: _custom_ops.grouped_topk(logits, groups, topk_group, topk, True, 1.0, bias, sigmoid)

    peers = {}
    # SGLang's kernel only takes a bias of the logits' dtype, and at most 32 experts per group.
    if groups > 1 and dtype == "float32":
        peers["SGLang"] = Baseline(sglang)
    if (experts, groups, dtype) == (384, 1, "float32"):
        peers["SGLang"] = Baseline(sglang_kimi)
    return {**peers, "SGLang Triton": Baseline(sglang_triton), "vLLM": Baseline(vllm)}


def _topk_baselines(op: str, topk: int) -> Baselines:
    eager_gate = eager_softmax if op == "topk_softmax" else eager_sigmoid

    def composed(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Routing:
        return eager_gate(logits, topk)

    baselines = {"torch": Baseline(lambda: composed), "torch.compile": _compiled(composed)}
    if op == "topk_softmax":
        baselines["Triton"] = _triton(lambda logits, weights, ids: triton_router(logits, None, 1, 1, topk))
    return baselines


def _topk_peers(op: str) -> Baselines:
    """Return `topk_softmax` or `topk_sigmoid` of sglang-kernel 0.4.2 and vLLM 0.26."""

    def sglang() -> Callable[..., Any]:
        function = getattr(importlib.import_module("sgl_kernel"), op)

        def route(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Routing:
            function(weights, ids, logits, False)
            return weights, ids

        return route

    def vllm() -> Callable[..., Any]:
        function = getattr(importlib.import_module("vllm._custom_ops"), op)

        def route(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Routing:
            function(weights, ids, torch.empty_like(ids), logits, False)
            return weights, ids

        return route

    return {"SGLang": Baseline(sglang), "vLLM": Baseline(vllm)}


def agree(ours: Routing, theirs: Routing) -> bool:
    """Return whether nearly all tokens have the same experts with the same weights, in any order.

    Tied experts, which are frequent in bfloat16, may be swapped; then equal weights are enough.
    """
    (our_weights, our_ids), (their_weights, their_ids) = ours, theirs
    same_expert = our_ids[:, :, None] == their_ids[:, None, :]
    same_weight = torch.isclose(our_weights[:, :, None], their_weights[:, None, :], rtol=1e-2)
    shared = same_expert.any(dim=2)
    matched = ((same_expert & same_weight).any(dim=2) | (~shared & same_weight.any(dim=2))).all(dim=1)
    return bool(matched.float().mean() >= _MATCHED_TOKENS and shared.float().mean() >= _SHARED_EXPERTS)


def _traffic(tokens: int, experts: int, topk: int, dtype: str, biased: bool) -> int:
    """Return the bytes of the logits and the bias, and of a float32 and an int32 per slot."""
    return tokens * (experts * ITEM_SIZE[dtype] + topk * 8) + (experts * 4 if biased else 0)


def _gate_inputs(tokens: int, experts: int, dtype: str) -> Callable[[torch.Generator], tuple[Any, ...]]:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        logits = torch.randn(tokens, experts, device=device, generator=generator).to(getattr(torch, dtype))
        return logits, 0.1 * torch.randn(experts, device=device, generator=generator)

    return inputs


def _fused_gate(tokens: int, experts: int, groups: int, topk_group: int, dtype: str) -> Iterator[Case]:
    topk = 8
    sizes = {"tokens": tokens, "experts": experts, "groups": groups, "topk_group": topk_group, "topk": topk}
    case: dict[str, int | str] = {**sizes, "dtype": dtype}
    inputs = _gate_inputs(tokens, experts, dtype)
    size = _traffic(tokens, experts, topk, dtype, biased=True)

    def call(variant: str) -> Callable[..., Any]:
        return lambda logits, bias: cukern.moe_fused_gate(logits, bias, groups, topk_group, topk, variant=variant)

    headline = groups == 8 and dtype == "float32"
    for variant in VARIANTS:
        baselines = {}
        if variant == "specialized" and dtype == "float32":
            baselines = _gate_baselines(groups, topk_group, topk, compiled=headline)
        peers = _gate_peers(experts, groups, topk_group, topk, dtype) if variant == "specialized" else {}
        host = headline and tokens == 64 and variant == "specialized"
        yield Case(
            "moe_fused_gate",
            case,
            variant,
            inputs,
            call(variant),
            size,
            baselines=baselines,
            peers=peers,
            agree=agree,
            host=host,
        )
    if headline and tokens == 64:
        # Other ways to call the op, to measure their host time.
        yield Case("moe_fused_gate", case | {"call": "CuPy"}, "auto", _as_cupy(inputs), call("auto"), size, host=True)
        operator = _operator(groups, topk_group, topk)
        yield Case("moe_fused_gate", case | {"call": "torch.ops"}, "auto", inputs, operator, size, host=True)


def _as_cupy(inputs: Callable[[torch.Generator], tuple[Any, ...]]) -> Callable[[torch.Generator], tuple[Any, ...]]:
    import cupy

    return lambda generator: tuple(cupy.from_dlpack(tensor) for tensor in inputs(generator))


def _operator(groups: int, topk_group: int, topk: int) -> Callable[..., Any]:
    import cukern.torch_ops  # noqa: F401

    operator = torch.ops.cukern.moe_fused_gate
    return lambda logits, bias: operator(logits, bias, groups, topk_group, topk)


def _topk(op: str, tokens: int, experts: int, topk: int, dtype: str, compared: bool) -> Iterator[Case]:
    """Yield cases of `topk_softmax` or `topk_sigmoid`, with baselines if `compared`."""
    function = getattr(cukern, op)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        logits = torch.randn(tokens, experts, device=device, generator=generator).to(getattr(torch, dtype))
        weights = torch.empty(tokens, topk, device=device)
        return logits, weights, torch.empty(tokens, topk, dtype=torch.int32, device=device)

    def call(variant: str) -> Callable[..., Any]:
        return lambda logits, weights, ids: function(weights, ids, logits, variant=variant)

    case: dict[str, int | str] = {"tokens": tokens, "experts": experts, "topk": topk, "dtype": dtype}
    size = _traffic(tokens, experts, topk, dtype, biased=False)
    for variant in VARIANTS:
        first = variant == "specialized"
        baselines = _topk_baselines(op, topk) if compared and first else {}
        peers = _topk_peers(op) if first else {}
        yield Case(op, case, variant, inputs, call(variant), size, baselines=baselines, peers=peers, agree=agree)


def cases() -> list[Case]:
    """Return cases: the gates of DeepSeek-V3, MiniMax-M2 and Kimi-K2; without a bias of Qwen3, Mixtral and GLM."""
    found: list[Case] = []
    for dtype in ("float32", "bfloat16"):
        for tokens in TOKENS:
            found += _fused_gate(tokens, 256, 8, 4, dtype)
    for experts in (256, 384):
        for tokens in TOKENS:
            found += _fused_gate(tokens, experts, 1, 1, "float32")
    for tokens in TOKENS[:2]:
        found += _fused_gate(tokens, 256, 1, 1, "bfloat16")
    for experts, topk in ((128, 8), (8, 2)):
        for tokens in (1, 1024, 8192, 65536):
            compared = (experts, tokens) == (128, 1024)
            found += _topk("topk_softmax", tokens, experts, topk, "bfloat16", compared)
    for tokens in (1, 1024, 65536):
        found += _topk("topk_sigmoid", tokens, 128, 8, "bfloat16", compared=tokens == 1024)
    return found
