"""Time attention without padding, beside PyTorch's attention over the padded batch and over the unpadded batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE
from cukern.runtime.kernel import arch_of_device, device_count

Call = Callable[[], torch.Tensor]


def _lengths(batch: int, length: int, ragged: bool) -> list[int]:
    """Return the lengths of the sequences: all `length`, or evenly spaced lengths up to `length`."""
    return [-(-length * (i + 1) // batch) for i in range(batch)] if ragged else [length] * batch


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> Call:
    """Pad the batch ahead. Return a call of PyTorch's masked attention that then selects the rows of the sequences."""
    lengths = cu_seqlens.diff().long()
    longest = int(lengths.max())
    valid = torch.arange(longest, device=q.device) < lengths[:, None]
    rows = valid.flatten().nonzero().flatten()

    def padded(x: torch.Tensor) -> torch.Tensor:
        made = x.new_zeros(len(lengths) * longest, *x.shape[1:])
        made[rows] = x
        return made.view(len(lengths), longest, *x.shape[1:]).transpose(1, 2).contiguous()

    given, mask = [padded(x) for x in (q, k, v)], valid[:, None, None, :]

    def run() -> torch.Tensor:
        out = scaled_dot_product_attention(*given, attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)

    return run


def _varlen_by_torch() -> Callable[..., Call]:
    """Return PyTorch's attention without padding. It needs torch 2.10, 16 bits and a GPU."""
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn

    def prepare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> Call:
        longest = int(cu_seqlens.diff().max())
        return lambda: attend(q, k, v, cu_seqlens, cu_seqlens, longest, longest)

    return prepare


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two results agree up to the rounding of the weights and of the result."""
    return torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def has_wgmma() -> bool:
    """Return whether "auto" is "wgmma" for 16-bit heads: on Hopper, and on a machine without a GPU."""
    return not device_count() or arch_of_device(0) == "90a"


def _case(
    batch: int, length: int, heads: int, head_dim: int, dtype: str, ragged: bool = True, variant: str = "auto"
) -> Case:
    """Return a case of a named kernel, or of the kernel that "auto" chooses."""
    lengths = _lengths(batch, length, ragged)
    tokens, size = sum(lengths), ITEM_SIZE[dtype]

    def inputs(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        shape, device = (3, tokens, heads, head_dim), generator.device
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=device).normal_(generator=generator)
        sums = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return (*made.unbind(), sums)

    baselines = {"torch": Baseline(lambda: by_torch, prepared=True)}
    if size == 2:
        baselines["torch varlen"] = Baseline(_varlen_by_torch, prepared=True)
    chosen = "fma" if size == 4 else "wgmma" if has_wgmma() else "mma"

    def call(q: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return cukern.varlen_attention(q, *rest, variant=variant if q.is_cuda else "auto")

    sizes = {"batch": batch, "length": length, "tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    return Case(
        op="varlen_attention",
        case=sizes,
        variant=chosen if variant == "auto" else variant,
        inputs=inputs,
        call=cukern.varlen_attention if variant == "auto" else call,
        bytes=4 * tokens * heads * head_dim * size,
        # The floor's matrix product has 16 bits, so its rate only fits 16-bit cases.
        flops=4 * head_dim * heads * sum(n * n for n in lengths) if size == 2 else 0,
        baselines=baselines,
        agree=agree,
        host=tokens <= 16,
    )


def cases(small: bool = False) -> list[Case]:
    """Return cases: BERT-base and MiniLM over texts of up to 512 tokens and over full texts, long texts with large
    heads, and short texts, in 16 and 32 bits. If "auto" is "wgmma", some cases also run as "mma".
    """
    if small:
        return [_case(3, 20, 2, 16, dtype, ragged) for dtype in ("float32", "bfloat16") for ragged in (True, False)]
    both = ("auto", "mma") if has_wgmma() else ("auto",)
    return [
        *(_case(64, 512, 12, 64, dtype) for dtype in ("float16", "bfloat16", "float32")),
        *(_case(64, 512, 12, 64, "float16", False, variant) for variant in both),
        *(_case(64, 256, 12, 64, "float16", False, variant) for variant in both),
        *(_case(16, 2048, 16, 128, "bfloat16", False, variant) for variant in both),
        *(_case(1024, 16, 12, 64, "float16", False, variant) for variant in both),
        *(_case(64, 512, 12, 32, dtype) for dtype in ("float16", "float32")),
        *(_case(1, 16, 12, 32, "float16", True, variant) for variant in both),
        _case(1, 16, 12, 32, "float32"),
    ]
