"""Time attention without padding, beside PyTorch's attention over the padded batch and over the unpadded batch.

Cases over a paged cache run beside FlashAttention-3 and Triton's attention as vLLM calls them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

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


def packed_case(
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


class Causal(NamedTuple):
    """`batch` chunks of `query_tokens` tokens that end at `length`, after `decodes` single tokens that end there."""

    batch: int
    query_tokens: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16  # 0: keys and values are packed
    decodes: int = 0
    window: int = 0  # tokens that a query sees, including itself; 0: all
    softcap: int = 0
    sinks: bool = False

    @property
    def query_lengths(self) -> list[int]:
        return [1] * self.decodes + [self.query_tokens] * self.batch

    @property
    def limits(self) -> tuple[int, int]:
        return (self.window - 1, 0) if self.window else (-1, -1)

    @property
    def flops(self) -> int:
        first, seen = self.length - self.query_tokens, self.window or self.length
        pairs = self.decodes * min(self.length, seen)
        pairs += self.batch * sum(min(position + 1, seen) for position in range(first, self.length))
        return 4 * self.head_dim * self.heads * pairs

    @property
    def bytes(self) -> int:
        kept = min(self.length, self.window + self.query_tokens) if self.window else self.length
        rows = 2 * sum(self.query_lengths) * self.heads
        return 2 * self.head_dim * (rows + 2 * (self.batch + self.decodes) * kept * self.kv_heads)


def _causal_inputs(sizes: Causal) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """Return a function that makes q, k, v, the sums of query lengths, the block table, the lengths and the sinks."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device, sequences = generator.device, sizes.batch + sizes.decodes

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

        sums = torch.tensor([0, *sizes.query_lengths]).cumsum(0).to(device, torch.int32)
        sinks = normal(sizes.heads).float() if sizes.sinks else None
        q = normal(sum(sizes.query_lengths), sizes.heads, sizes.head_dim)
        if not sizes.page_size:
            k, v = (normal(sequences * sizes.length, sizes.kv_heads, sizes.head_dim) for _ in range(2))
            return q, k, v, sums, None, None, sinks
        columns = -(-sizes.length // sizes.page_size)
        order = torch.randperm(sequences * columns, generator=torch.Generator().manual_seed(1)).int()
        k, v = (normal(sequences * columns, sizes.page_size, sizes.kv_heads, sizes.head_dim) for _ in range(2))
        lengths = torch.full((sequences,), sizes.length, dtype=torch.int32, device=device)
        return q, k, v, sums, order.view(sequences, columns).to(device), lengths, sinks

    return inputs


def _flash_attention(sizes: Causal) -> Callable[[], Callable[..., Call]]:
    """Return FlashAttention-3 as vLLM 0.26 calls it."""

    def load() -> Callable[..., Call]:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        def prepare(q: Any, k: Any, v: Any, sums: Any, table: Any, lengths: Any, sinks: Any) -> Call:
            out, s_aux = torch.empty_like(q), None if sinks is None else sinks.to(q.dtype)
            options = {"window_size": [*sizes.limits], "causal": True, "fa_version": 3, "s_aux": s_aux, "out": out}
            options |= {"max_seqlen_q": sizes.query_tokens, "max_seqlen_k": sizes.length, "cu_seqlens_q": sums}
            options |= {"cu_seqlens_k": sums} if table is None else {"seqused_k": lengths, "block_table": table}
            return lambda: flash_attn_varlen_func(q, k, v, softmax_scale=sizes.head_dim**-0.5, **options)

        return prepare

    return load


def _vllm_triton(sizes: Causal) -> Callable[[], Callable[..., Call]]:
    """Return Triton's attention as vLLM 0.26 calls it for many query tokens."""

    def load() -> Callable[..., Call]:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        def prepare(q: Any, k: Any, v: Any, sums: Any, table: Any, lengths: Any, sinks: Any) -> Call:
            out = torch.empty_like(q)
            scale = torch.ones(1, device=q.device).expand(len(lengths), sizes.kv_heads)

            def run() -> torch.Tensor:
                unified_attention(
                    q=q, k=k, v=v, out=out, cu_seqlens_q=sums, max_seqlen_q=sizes.query_tokens, seqused_k=lengths,
                    max_seqlen_k=sizes.length, softmax_scale=sizes.head_dim**-0.5, causal=True,
                    window_size=sizes.limits, block_table=table, softcap=sizes.softcap, q_descale=None,
                    k_descale=scale, v_descale=scale, sinks=sinks,
                )  # fmt: skip
                return out

            return run

        return prepare

    return load


def causal_case(sizes: Causal) -> Case:
    def call(q: Any, k: Any, v: Any, sums: Any, table: Any, lengths: Any, sinks: Any) -> torch.Tensor:
        return cukern.varlen_attention(  # type: ignore[return-value]
            q, k, v, sums, block_table=table, seqused_k=lengths, causal=True, window=sizes.limits,
            softcap=sizes.softcap or None, sinks=sinks,
        )  # fmt: skip

    peers = {}
    if sizes.head_dim <= 128:
        peers["FlashAttention-3"] = Baseline(_flash_attention(sizes), prepared=True)
    if sizes.page_size:
        peers["vLLM Triton"] = Baseline(_vllm_triton(sizes), slow=True, prepared=True)
    return Case(
        op="varlen_attention",
        case={**sizes._asdict(), "sinks": str(sizes.sinks).lower(), "dtype": "bfloat16"},
        variant="wgmma" if has_wgmma() else "mma",
        inputs=_causal_inputs(sizes),
        call=call,
        bytes=sizes.bytes,
        flops=sizes.flops,
        peers=peers,
        agree=agree,
    )


#: Whole prompts, chunks of a long prompt, decoding beside chunks, and models with windows, sinks and softcap.
CAUSAL = (
    Causal(1, 16384, 16384, 32, 8, 128, page_size=0),
    Causal(16, 1024, 1024, 32, 8, 128, page_size=0),
    Causal(16, 1024, 1024, 32, 8, 64, page_size=0),
    Causal(1, 512, 8192, 32, 8, 128),
    Causal(1, 2048, 32768, 32, 8, 128),
    Causal(1, 2048, 32768, 32, 8, 128, page_size=64),
    Causal(4, 1024, 4096, 32, 8, 128, decodes=60),
    Causal(16, 4096, 4096, 64, 8, 64, window=128, sinks=True),  # gpt-oss
    Causal(16, 4096, 4096, 32, 8, 128, window=1024),  # Mistral
    Causal(8, 4096, 4096, 16, 8, 256, softcap=50),  # Gemma 2
    Causal(0, 1, 4096, 32, 8, 128, decodes=64),
)


def cases(small: bool = False) -> list[Case]:
    """Return cases: BERT-base and MiniLM over texts of up to 512 tokens and over full texts, long texts with large
    heads, and short texts, in 16 and 32 bits. If "auto" is "wgmma", some cases also run as "mma".
    """
    if small:
        small_sizes = Causal(2, 5, 20, 4, 2, 16, page_size=8, decodes=1, window=9, softcap=5, sinks=True)
        return [
            *(packed_case(3, 20, 2, 16, dtype, mixed) for dtype in ("float32", "bfloat16") for mixed in (True, False)),
            causal_case(small_sizes),
            causal_case(small_sizes._replace(page_size=0, decodes=0, query_tokens=20)),
        ]
    both = ("auto", "mma") if has_wgmma() else ("auto",)
    return [
        *(packed_case(64, 512, 12, 64, dtype) for dtype in ("float16", "bfloat16", "float32")),
        *(packed_case(64, 512, 12, 64, "float16", False, variant) for variant in both),
        *(packed_case(64, 256, 12, 64, "float16", False, variant) for variant in both),
        *(packed_case(16, 2048, 16, 128, "bfloat16", False, variant) for variant in both),
        *(packed_case(1024, 16, 12, 64, "float16", False, variant) for variant in both),
        *(packed_case(64, 512, 12, 32, dtype) for dtype in ("float16", "float32")),
        *(packed_case(1, 16, 12, 32, "float16", True, variant) for variant in both),
        packed_case(1, 16, 12, 32, "float32"),
        *map(causal_case, CAUSAL),
    ]
