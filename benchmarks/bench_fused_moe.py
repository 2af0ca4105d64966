"""Time the fused mixture-of-experts layer, from the top-k ids to its output, beside PyTorch and vLLM's layers.

On two GPUs each GPU has half of the experts. That layer is compared with the same rows on one of the GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks import bench_all_to_all, bench_moe_gemm, peers, several
from benchmarks.harness import Baseline, Case
from cukern.fused_moe import All2AllManager, AutoExperts, FusedMoEModularKernel, FusedMoEQuantConfig

TOKENS = (1, 16, 64, 1024, 4096)
BLOCK = 128
# Allowed difference relative to the outputs' norm. Intermediate results are rounded elsewhere; FP8 rounds twice more.
_DIFFERENCE = {"bfloat16": 0.02, "float8_e4m3fn": 0.08, "mxfp4": 0.02}
FP8, MXFP4 = "float8_e4m3fn", "mxfp4"
_GROUP = 32


class Sizes(NamedTuple):
    experts: int
    inter: int
    hidden: int
    topk: int


MIXTRAL, HALF_MIXTRAL = Sizes(8, 14336, 4096, 2), Sizes(8, 7168, 4096, 2)
DEEPSEEK_V3, QWEN3 = Sizes(32, 2048, 7168, 8), Sizes(128, 768, 2048, 8)
GPT_OSS = Sizes(32, 2880, 2880, 4)


def used_experts(sizes: Sizes, tokens: int) -> float:
    """Return how many experts random routing is expected to use. Weights of other experts need not be read."""
    return sizes.experts * (1 - (1 - sizes.topk / sizes.experts) ** tokens)


def _random(generator: torch.Generator, *shape: int, scale: float = 1.0, dtype: str = "bfloat16") -> torch.Tensor:
    """Draw random numbers expert by expert: in float32 all weights together would take twice their memory."""
    made = torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device)
    for part in made if len(shape) == 3 else made[None]:
        values = torch.randn(part.shape, generator=generator, device=generator.device) * scale
        part.copy_(values)
    return made


def _blocks(generator: torch.Generator, weights: torch.Tensor) -> torch.Tensor:
    """Return scales for the blocks of FP8 weights."""
    experts, n, k = weights.shape
    shape = experts, -(-n // BLOCK), -(-k // BLOCK)
    return torch.rand(shape, generator=generator, device=generator.device) + 0.5


def _routing(generator: torch.Generator, tokens: int, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(tokens, sizes.experts, generator=generator, device=generator.device)
    weights, ids = scores.topk(sizes.topk, dim=1)
    return weights / weights.sum(dim=1, keepdim=True), ids.int()


# --- baselines ------------------------------------------------------------------------------------------


def _grouped_mm() -> Callable[..., torch.Tensor]:
    """Return torch's grouped product, or raise ImportError if torch has none."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    function = public or getattr(torch, "_grouped_mm", None)
    if function is None:
        raise ImportError("torch has no grouped product")
    return function


def composed() -> Callable[..., torch.Tensor]:
    """Sort, gather, grouped product, activation, grouped product, weighted sum, without waiting for the GPU."""
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


Layer = Callable[[], torch.Tensor]


def _vllm_triton(dtype: str) -> Callable[[], Callable[..., Layer]]:
    """Return the launches of vLLM 0.26's `TritonExperts`, with its tiles and with workspaces allocated ahead."""

    def load() -> Callable[..., Layer]:
        import triton.language as tl
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe import fused_moe
        from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

        fp8 = dtype == FP8
        blocks = [BLOCK, BLOCK] if fp8 else None
        kind = torch.float8_e4m3fn if fp8 else None
        options = {**peers.TRITON_16_BITS, "use_fp8_w8a8": fp8, "block_shape": blocks, "compute_type": tl.bfloat16}

        def prepare(
            x: torch.Tensor,
            w1: torch.Tensor,
            w2: torch.Tensor,
            weights: torch.Tensor,
            ids: torch.Tensor,
            w1_scale: torch.Tensor | None = None,
            w2_scale: torch.Tensor | None = None,
        ) -> Layer:
            (tokens, topk), (experts, two, hidden) = ids.shape, w1.shape
            name = "fp8_w8a8" if fp8 else None
            config = fused_moe.try_get_optimal_moe_config(w1.shape, w2.shape, topk, name, tokens, blocks)
            workspace = x.new_empty(tokens * topk * max(two, hidden))
            first = workspace[: tokens * topk * two].view(tokens, topk, two)
            second = workspace[: tokens * topk * hidden].view(tokens, topk, hidden)
            activated = x.new_empty(tokens * topk, two // 2)
            multiply = fused_moe.invoke_fused_moe_triton_kernel

            def run() -> torch.Tensor:
                rows, scale = moe_kernel_quantize_input(x, None, kind, False, blocks)
                order = fused_moe._prepare_expert_assignment(
                    ids, config, tokens, topk, experts, None, block_shape=blocks
                )
                multiply(rows, w1, first, scale, w1_scale, weights, *order, False, topk, config, **options)
                if fp8:
                    rows, scale = ops.silu_and_mul_per_block_quant(first.view(-1, two), BLOCK, kind)
                else:
                    torch.ops._C.silu_and_mul(activated, first.view(-1, two))
                    rows, scale = activated, None
                multiply(rows, w2, second, scale, w2_scale, weights, *order, True, 1, config, **options)
                out = torch.empty_like(x)
                ops.moe_sum(second, out)
                return out

            return run

        return prepare

    return load


def _padded(numbers: torch.Tensor, scales: torch.Tensor, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad 4-bit weights with rows and columns of zeros."""
    rows = n - numbers.shape[1]
    pad = torch.nn.functional.pad
    columns = k // 2 - numbers.shape[2], k // _GROUP - scales.shape[2]
    return pad(numbers, (0, columns[0], 0, rows)), pad(scales, (0, columns[1], 0, rows))


def _vllm_marlin() -> Callable[..., Layer]:
    """Return the launches of vLLM 0.26's `MarlinExperts`, with weights repacked and padded as vLLM does."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    def prepare(
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        w1_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        *_: torch.Tensor,
    ) -> Layer:
        (tokens, hidden), experts, topk = x.shape, len(w1), ids.shape[1]
        inter = w2.shape[2] * 2
        wide, long = -(-hidden // 256) * 256, -(-inter // 128) * 128
        halves = [_padded(w, s, long, wide) for w, s in zip(w1.chunk(2, 1), w1_scale.chunk(2, 1), strict=True)]
        up = peers.marlin_weights(*(torch.cat(parts, 1) for parts in zip(*halves, strict=True)))
        down = peers.marlin_weights(*_padded(w2, w2_scale, wide, long))
        block, workspace = peers.marlin_block(tokens * topk, experts), peers.marlin_workspace(x.device)
        scratch = x.new_empty(tokens * topk * max(2 * long, wide))
        first = scratch[: tokens * topk * 2 * long].view(-1, 2 * long)
        second = scratch[: tokens * topk * wide].view(-1, wide)
        activated = x.new_empty(tokens * topk, long)

        def run() -> torch.Tensor:
            rows = x if wide == hidden else torch.nn.functional.pad(x, (0, wide - hidden))
            order = moe_align_block_size(ids, block, experts)
            peers.marlin_product(rows, first, up, workspace, order, weights, block, topk, False)
            torch.ops._C.silu_and_mul(activated, first)
            peers.marlin_product(activated, second, down, workspace, order, weights, block, 1, True)
            out = x.new_empty(tokens, wide)
            ops.moe_sum(second.view(tokens, topk, wide), out)
            return out[:, :hidden]

        return run

    return prepare


# --- cases ----------------------------------------------------------------------------------------------


def _agree(dtype: str) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return bool((ours.float() - theirs.float()).norm() <= _DIFFERENCE[dtype] * theirs.float().norm())

    return agree


def _four_bits(generator: torch.Generator, experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MXFP4 weights, scaled so that products over k have magnitude 1."""
    random = {"generator": generator, "device": generator.device, "dtype": torch.uint8}
    # 2.93 is the root mean square of e2m1's numbers.
    exponent = 127 - round(math.log2(2.93 * k**0.5))
    numbers = torch.randint(0, 256, (experts, n, k // 2), **random)
    return numbers, torch.randint(exponent - 1, exponent + 2, (experts, n, k // _GROUP), **random)


def _weights(generator: torch.Generator, sizes: Sizes, dtype: str) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return w1 and w2 and their scales, so that products have magnitude 1."""
    experts, inter, hidden, _ = sizes
    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    if dtype == MXFP4:
        (w1, s1), (w2, s2) = (_four_bits(generator, *shape) for shape in shapes)
        return (w1, w2), (s1, s2)
    scale = [1.0 if dtype == FP8 else shape[-1] ** -0.5 for shape in shapes]
    w1, w2 = (_random(generator, *shape, scale=x, dtype=dtype) for shape, x in zip(shapes, scale, strict=True))
    if dtype != FP8:
        return (w1, w2), ()
    return (w1, w2), (_blocks(generator, w1) * hidden**-0.5, _blocks(generator, w2) * inter**-0.5)


def _case(sizes: Sizes, tokens: int, dtype: str) -> Case:
    experts, inter, hidden, topk = sizes

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        x = _random(generator, tokens, hidden)
        weights, scales = _weights(generator, sizes, dtype)
        prepared: tuple[torch.Tensor, ...] = ()
        if dtype == MXFP4 and bench_moe_gemm.has_wgmma():
            prepared = tuple(cukern.prepare_weights(w, s) for w, s in zip(weights, scales, strict=True))
        return (x, *weights, *_routing(generator, tokens, sizes), *scales, *prepared)

    def call(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *s: torch.Tensor
    ) -> torch.Tensor:
        if len(s) == 4:  # MXFP4, prepared
            return cukern.fused_experts(x, s[2], s[3], weights, ids, quant=FusedMoEQuantConfig.mxfp4())
        config = {FP8: FusedMoEQuantConfig.fp8_block, MXFP4: FusedMoEQuantConfig.mxfp4}
        return cukern.fused_experts(x, w1, w2, weights, ids, quant=config[dtype](*s) if s else None)

    item = {FP8: 1.0, MXFP4: 0.5 + 1 / _GROUP}.get(dtype, 2.0)
    weight_bytes = round(used_experts(sizes, tokens) * 3 * inter * hidden * item)
    # The floor's product has 16 bits, and FP8 multiplies at twice its rate.
    flops = 2 * tokens * topk * 3 * inter * hidden // (2 if dtype == FP8 else 1)
    layer = {"vLLM Triton": Baseline(_vllm_triton(dtype), slow=True, prepared=True)}
    if dtype == MXFP4:
        layer = {"vLLM Marlin": Baseline(_vllm_marlin, slow=True, prepared=True)}
    return Case(
        op="fused_experts",
        case={"tokens": tokens, "experts": experts, "inter": inter, "hidden": hidden, "topk": topk, "dtype": dtype},
        variant="auto",
        inputs=inputs,
        call=call,
        bytes=weight_bytes + 2 * tokens * hidden * 2 + tokens * topk * 8,
        flops=flops,
        baselines={"torch": Baseline(composed)} if dtype == "bfloat16" else {},
        peers=layer,
        agree=_agree(dtype),
        host=tokens == 1 and sizes in (DEEPSEEK_V3, QWEN3) and dtype == "bfloat16",
    )


def _gpt_oss(tokens: int) -> Case:
    """Return a case of gpt-oss-20b's layer with its biases, gates and ups in pairs, and its activation."""
    plain = _case(GPT_OSS, tokens, MXFP4)
    experts, inter, hidden, _ = GPT_OSS

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        biases = _random(generator, experts, 2 * inter), _random(generator, experts, hidden)
        return (*plain.inputs(generator), *biases)

    def call(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *s: torch.Tensor
    ) -> torch.Tensor:
        *scales, w1_bias, w2_bias = s
        form: dict[str, Any] = {"w1_bias": w1_bias, "w2_bias": w2_bias, "gemm1_interleaved": True}
        if len(scales) == 4:  # prepared
            (w1, w2), scales = scales[2:], [None, None]
        config = FusedMoEQuantConfig.mxfp4(*scales, **form)
        return cukern.fused_experts(x, w1, w2, weights, ids, activation="swigluoai", quant=config)

    case = {**plain.case, "activation": "swigluoai"}
    return dataclasses.replace(plain, case=case, inputs=inputs, call=call, baselines={}, peers={}, agree=None)


# --- two GPUs -------------------------------------------------------------------------------------------


class _Rank(NamedTuple):
    """The layer of one rank, and its weights."""

    manager: All2AllManager
    layer: FusedMoEModularKernel
    w1: torch.Tensor
    w2: torch.Tensor
    config: FusedMoEQuantConfig

    def __call__(self, tokens: bench_all_to_all.Tokens) -> torch.Tensor:
        return self.layer(tokens.hidden_states, self.w1, self.w2, tokens.topk_weights, tokens.topk_ids)


def _received(ranks: list[_Rank], tokens: list[bench_all_to_all.Tokens], clock: several.Clock) -> tuple[Any, ...]:
    """Return the rows, weights and ids that rank 0 receives, in 16 bits."""

    def send(rank: int) -> Callable[[], Any]:
        return cukern.all_to_all_dispatch(ranks[rank].manager.state, *tokens[rank], return_receiver=True)

    receivers = clock.on_all(send)
    got = clock.on_all(lambda rank: receivers[rank]())[0]
    clock.synchronize()
    return got.hidden_states.clone(), got.topk_weights, got.topk_ids


def _over_ranks(sizes: Sizes, tokens: int, clock: several.Clock) -> several.Calls:
    count, sets = len(clock.ranks), 2
    exchanged = bench_all_to_all.Sizes(count, tokens, sizes.hidden, sizes.topk, sizes.experts)
    managers = All2AllManager.local(
        [clock.device(rank).index for rank in clock.ranks],
        num_experts=sizes.experts,
        max_num_tokens=tokens,
        hidden=sizes.hidden,
        topk=sizes.topk,
        deadline_s=5.0,
    )

    def begin(rank: int) -> _Rank:
        generator = torch.Generator(clock.device(rank)).manual_seed(rank)
        (w1, w2), scales = _weights(generator, sizes._replace(experts=sizes.experts // count), FP8)
        config = FusedMoEQuantConfig.fp8_block(*scales)
        layer = FusedMoEModularKernel(managers[rank].prepare_finalize(), AutoExperts(config))
        return _Rank(managers[rank], layer, w1, w2, config)

    ranks = clock.on_all(begin)
    given = bench_all_to_all.inputs(exchanged, clock, sets)

    def rehearse(rank: int) -> None:
        with ranks[rank].layer.prepare_finalize.rehearsal():
            ranks[rank](given[rank][0])

    clock.on_all(rehearse)
    clock.synchronize()
    received = [_received(ranks, [own[number] for own in given], clock) for number in range(sets)]
    here = managers[0].expert_map(received[0][0])

    def alone(number: int) -> torch.Tensor:
        first, (x, weights, ids) = ranks[0], received[number]
        return cukern.fused_experts(x, first.w1, first.w2, weights, ids, quant=first.config, expert_map=here)

    def check() -> None:
        for manager in managers:
            manager.check()

    def close() -> None:
        for manager in managers:
            manager.close()

    return several.Calls(lambda rank, number: ranks[rank](given[rank][number % sets]), sets, None, alone, check, close)


def _over_two(sizes: Sizes, tokens: int) -> several.Case:
    """Return a case of a layer on two ranks, with `tokens` tokens each."""
    exchanged = bench_all_to_all.Sizes(2, tokens, sizes.hidden, sizes.topk, sizes.experts)
    sent = bench_all_to_all.dispatched_bytes(exchanged, FP8) + bench_all_to_all.combined_bytes(exchanged)
    return several.Case(
        op="fused_experts",
        case={"ranks": 2, "tokens": tokens, **sizes._asdict(), "dtype": FP8},
        variant="push",
        sent_bytes=sent,
        begin=functools.partial(_over_ranks, sizes, tokens),
        calls=20 if tokens < 1000 else 4,
    )


def cases() -> list[Case | several.Case]:
    """Return cases: layers of four models in bfloat16, one in FP8, two in MXFP4, a whole layer in FP8 over two GPUs.

    gpt-oss's layer is also measured with its biases and its activation.
    """
    made: list[Case | several.Case] = [
        _case(sizes, tokens, "bfloat16") for sizes in (MIXTRAL, HALF_MIXTRAL, DEEPSEEK_V3, QWEN3) for tokens in TOKENS
    ]
    made += [_case(DEEPSEEK_V3, tokens, FP8) for tokens in TOKENS]
    made += [_case(sizes, tokens, MXFP4) for sizes in (GPT_OSS, MIXTRAL) for tokens in TOKENS]
    made += [_gpt_oss(tokens) for tokens in (1, 64, 1024)]
    return made + [_over_two(DEEPSEEK_V3._replace(experts=256), tokens) for tokens in (128, 4096)]
