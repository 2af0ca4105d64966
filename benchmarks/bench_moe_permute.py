"""Time the permutation of tokens by expert and its inverse, beside torch compositions, SGLang and vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

Inputs = Callable[[torch.Generator], tuple[Any, ...]]


class Sizes(NamedTuple):
    tokens: int
    topk: int
    experts: int
    hidden: int
    dtype: str = "bfloat16"

    @property
    def pairs(self) -> int:
        return self.tokens * self.topk

    @property
    def row_bytes(self) -> int:
        return self.hidden * ITEM_SIZE[self.dtype]


HEADLINE = Sizes(8192, 8, 256, 7168)
ROWS = (
    HEADLINE,
    Sizes(1024, 8, 256, 7168),
    Sizes(4096, 2, 8, 4096),
    Sizes(4096, 8, 128, 2048),
    Sizes(64, 8, 256, 7168),
)
SMALL = Sizes(48, 4, 16, 64)
ALIGN, FEW_ALIGNED = Sizes(4096, 8, 256, 0), Sizes(64, 8, 256, 0)
SORTS = tuple(Sizes(tokens, 8, experts, 0) for tokens in (1, 64, 1024, 4096) for experts in (32, 128, 256))
BLOCK_SIZE = 64


def random_ids(sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Return topk different experts per token, all equally likely."""
    scores = torch.rand(sizes.tokens, sizes.experts, generator=generator, device=generator.device)
    return scores.topk(sizes.topk).indices.int()


def _random(generator: torch.Generator, sizes: Sizes, *shape: int) -> torch.Tensor:
    # Draw directly in the dtype: in float32 the largest case would take 4 GB before rounding.
    made = torch.empty(shape, dtype=getattr(torch, sizes.dtype), device=generator.device)
    return made.normal_(generator=generator)


def torch_sort(topk_ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = topk_ids.flatten()
    ordered, order = torch.sort(ids, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device, dtype=ids.dtype), out_int32=True)
    inverse = torch.empty_like(ids)
    inverse[order] = torch.arange(len(ids), device=ids.device, dtype=ids.dtype)
    return offsets, (order // topk_ids.shape[1]).int(), inverse.view_as(topk_ids)


def torch_align(topk_ids: torch.Tensor, block_size: int, experts: int) -> tuple[torch.Tensor, ...]:
    pairs = topk_ids.numel()
    rows = pairs + experts * (block_size - 1)
    ordered, order = torch.sort(topk_ids.flatten(), stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(experts + 1, device=ordered.device, dtype=ordered.dtype))
    padded = (offsets.diff() + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    sorted_ids = torch.full((rows,), pairs, dtype=torch.int32, device=ordered.device)
    shift = ends - padded - offsets[:-1]
    sorted_ids[torch.arange(pairs, device=ordered.device) + shift[ordered]] = order.int()
    blocks = torch.arange(-(-rows // block_size), device=ordered.device) * block_size
    expert_ids = torch.searchsorted(ends, blocks, right=True, out_int32=True)
    return sorted_ids, torch.where(expert_ids < experts, expert_ids, -1), ends[-1:].int()


def agree(ours: Any, theirs: Any) -> bool:
    """Return whether all values are equal."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def agree_nearly(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether sums are close. They may have another order, and be rounded once or after each slot."""
    return torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=5e-2)


# --- the kernels of vLLM 0.26 and sglang-kernel 0.4 -------------------------------------------------------


def _vllm_align(sizes: Sizes) -> Callable[..., Any]:
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size

    return lambda ids: moe_align_block_size(ids, BLOCK_SIZE, sizes.experts)


def _sglang_align(sizes: Sizes) -> Callable[..., Any]:
    """Return SGLang's function, which needs one more expert, for the ids of other ranks."""
    from sgl_kernel import moe_align_block_size

    experts = sizes.experts + 1
    rows = sizes.pairs + experts * (BLOCK_SIZE - 1)

    def align(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        make = lambda size: torch.empty(size, dtype=torch.int32, device=ids.device)  # noqa: E731
        sorted_ids, expert_ids, used = make(rows), make(-(-rows // BLOCK_SIZE)), make(1)
        moe_align_block_size(ids, experts, BLOCK_SIZE, sorted_ids, expert_ids, used, make(experts + 1), True)
        return sorted_ids, expert_ids, used

    return align


def _vllm_permute(sizes: Sizes) -> Callable[..., Any]:
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import MoEPermuteScratch, moe_permute

    def prepare(x: torch.Tensor, ids: torch.Tensor) -> Callable[[], Any]:
        scratch = MoEPermuteScratch(
            max_num_tokens=sizes.tokens,
            topk=sizes.topk,
            num_experts=sizes.experts,
            num_local_experts=sizes.experts,
            device=x.device,
            hidden_size=sizes.hidden,
            hidden_dtype=x.dtype,
        )

        def run() -> tuple[torch.Tensor, ...]:
            permuted, _, offsets, inverse, _ = moe_permute(x, None, ids, sizes.experts, scratch=scratch)
            return permuted, offsets, inverse

        return run

    return prepare


def _vllm_unpermute() -> Callable[..., Any]:
    from vllm.model_executor.layers.fused_moe.moe_permute_unpermute import moe_unpermute

    def run(out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        moe_unpermute(out, rows, weights, inverse.flatten())
        return out

    return run


def _sglang_rows(sizes: Sizes) -> Callable[..., Any]:
    from sgl_kernel import shuffle_rows

    return lambda x, inverse, row_token: shuffle_rows(x, row_token, (sizes.pairs, sizes.hidden))


def _vllm_sum() -> Callable[..., Any]:
    from vllm._custom_ops import moe_sum

    def run(slots: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(slots[:, 0], memory_format=torch.contiguous_format)
        moe_sum(slots, out)
        return out

    return run


def _sglang_sum() -> Callable[..., Any]:
    from sgl_kernel import moe_sum_reduce

    def run(slots: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(slots[:, 0], memory_format=torch.contiguous_format)
        moe_sum_reduce(slots, out, 1.0)
        return out

    return run


# --- the cases ------------------------------------------------------------------------------------------


def _named(sizes: Sizes, *names: str) -> dict[str, int | str]:
    return {name: getattr(sizes, name) for name in names}


def _sort(sizes: Sizes, variant: str = "auto") -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return (random_ids(sizes, generator),)

    return Case(
        "moe_sort",
        _named(sizes, "tokens", "topk", "experts"),
        variant,
        inputs,
        lambda ids: cukern.moe_sort(ids, sizes.experts),
        (3 * sizes.pairs + sizes.experts + 1) * 4,
        baselines={"torch": Baseline(lambda: lambda ids: torch_sort(ids, sizes.experts))},
        agree=agree,
        host=sizes.tokens == 64 and sizes.experts == 256,
    )


def _sort_batched(sizes: Sizes) -> Case:
    room = -(-2 * sizes.pairs // sizes.experts)

    def compose(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        offsets, _, inverse = torch_sort(ids, sizes.experts)
        rank = inverse - offsets[ids]
        return offsets.diff().clamp(max=room), torch.where(rank < room, ids * room + rank, -1)

    return Case(
        "moe_sort_batched",
        {**_named(sizes, "tokens", "topk", "experts"), "max_tokens": room},
        "auto",
        lambda generator: (random_ids(sizes, generator),),
        lambda ids: cukern.moe_sort_batched(ids, sizes.experts, room),
        (2 * sizes.pairs + sizes.experts) * 4,
        baselines={"torch": Baseline(lambda: compose)},
        agree=agree,
    )


def _align(sizes: Sizes) -> Case:
    rows = sizes.pairs + sizes.experts * (BLOCK_SIZE - 1)
    baselines = {"torch": Baseline(lambda: lambda ids: torch_align(ids, BLOCK_SIZE, sizes.experts))}

    def agree_by_experts(ours: Any, theirs: Any) -> bool:
        # The order of rows within an expert may differ.
        used = int(ours[2])
        same = torch.equal(ours[2], theirs[2]) and torch.equal(
            ours[1][: used // BLOCK_SIZE], theirs[1][: used // BLOCK_SIZE]
        )
        return same and torch.equal(ours[0][:used].sort().values, theirs[0][:used].sort().values)

    return Case(
        "moe_align_block_size",
        {**_named(sizes, "tokens", "topk", "experts"), "block_size": BLOCK_SIZE},
        "auto",
        lambda generator: (random_ids(sizes, generator),),
        lambda ids: cukern.moe_align_block_size(ids, BLOCK_SIZE, sizes.experts),
        (sizes.pairs + rows + rows // BLOCK_SIZE) * 4,
        baselines=baselines,
        peers={
            "SGLang": Baseline(lambda: _sglang_align(sizes)),
            "vLLM": Baseline(lambda: _vllm_align(sizes)),
        },
        agree=agree_by_experts,
    )


def _permute_rows(sizes: Sizes) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        _, row_token, inverse = torch_sort(random_ids(sizes, generator), sizes.experts)
        return _random(generator, sizes, sizes.tokens, sizes.hidden), inverse, row_token

    return Case(
        "permute_rows",
        _named(sizes, "tokens", "topk", "hidden", "dtype"),
        "auto",
        inputs,
        lambda x, inverse, row_token: cukern.permute_rows(x, inverse),
        (sizes.tokens + sizes.pairs) * sizes.row_bytes + 4 * sizes.pairs,
        baselines={"torch": Baseline(lambda: lambda x, inverse, row_token: x.index_select(0, row_token))},
        peers={"SGLang": Baseline(lambda: _sglang_rows(sizes))},
        agree=agree,
        host=sizes == HEADLINE,
    )


def _permute(sizes: Sizes) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return _random(generator, sizes, sizes.tokens, sizes.hidden), random_ids(sizes, generator)

    def call(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        permuted, _, offsets, inverse, _ = cukern.moe_permute(x, None, ids, sizes.experts)
        return permuted, offsets, inverse

    def compose(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offsets, row_token, inverse = torch_sort(ids, sizes.experts)
        return x.index_select(0, row_token), offsets.long(), inverse.flatten()

    return Case(
        "moe_permute",
        _named(sizes, "tokens", "topk", "experts", "hidden", "dtype"),
        "auto",
        inputs,
        call,
        (sizes.tokens + sizes.pairs) * sizes.row_bytes + 8 * sizes.pairs,
        baselines={"torch": Baseline(lambda: compose)},
        peers={"vLLM": Baseline(lambda: _vllm_permute(sizes), prepared=True)},
        agree=agree,
        host=sizes == HEADLINE,
    )


def _unpermute(sizes: Sizes, variant: str) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        _, _, inverse = torch_sort(random_ids(sizes, generator), sizes.experts)
        rows = _random(generator, sizes, sizes.pairs, sizes.hidden)
        weights = torch.rand(sizes.tokens, sizes.topk, generator=generator, device=generator.device)
        return torch.empty_like(rows[: sizes.tokens]), rows, weights, inverse

    def call(out: Any, rows: Any, weights: Any, inverse: Any) -> torch.Tensor:
        return cukern.moe_unpermute(out, rows, weights, inverse, variant=variant if out.is_cuda else "auto")

    def compose(out: Any, rows: Any, weights: Any, inverse: Any) -> torch.Tensor:
        slots = rows.index_select(0, inverse.flatten()).view(sizes.tokens, sizes.topk, sizes.hidden)
        return torch.sum(slots * weights[..., None], dim=1).to(rows.dtype)

    return Case(
        "moe_unpermute",
        _named(sizes, "tokens", "topk", "hidden", "dtype"),
        variant,
        inputs,
        call,
        (sizes.tokens + sizes.pairs) * sizes.row_bytes + 8 * sizes.pairs,
        baselines={"torch": Baseline(lambda: compose)},
        peers={"vLLM": Baseline(_vllm_unpermute)},
        agree=agree_nearly,
        host=sizes == HEADLINE and variant == "specialized",
    )


def _sum(sizes: Sizes) -> Case:
    return Case(
        "moe_sum",
        _named(sizes, "tokens", "topk", "hidden", "dtype"),
        "auto",
        lambda generator: (_random(generator, sizes, sizes.tokens, sizes.topk, sizes.hidden),),
        lambda slots: cukern.moe_sum(slots),
        (sizes.tokens + sizes.pairs) * sizes.row_bytes,
        baselines={"torch": Baseline(lambda: lambda slots: slots.sum(1))},
        peers={"SGLang": Baseline(_sglang_sum), "vLLM": Baseline(_vllm_sum)},
        agree=agree_nearly,
    )


def cases() -> list[Case]:
    found = [_align(sizes) for sizes in (ALIGN, FEW_ALIGNED, SMALL)]
    found += [_sort(sizes) for sizes in (*SORTS, SMALL)]
    found += [_sort_batched(sizes) for sizes in (ALIGN, SMALL)]
    found += [make(sizes) for make in (_permute_rows, _permute, _sum) for sizes in (*ROWS, SMALL)]
    found += [_unpermute(sizes, "specialized") for sizes in (*ROWS, SMALL)]
    found += [_unpermute(sizes, "dynamic") for sizes in (HEADLINE, ROWS[-1])]
    return found
