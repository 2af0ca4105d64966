"""Time attention over a paged cache, beside PyTorch without pages, FlashAttention-3, FlashInfer and vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

_PARTITION = 512
_WORKSPACE_BYTES = 256 * 2**20
# Relative to the largest output, because outputs are means of many values.
_TOLERANCE = 0.03
_NO_ALIBI = None


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int  # the mean length if lengths differ
    query_tokens: int = 1
    block_size: int = 16
    layout: str = "vllm"
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    ragged: bool = False

    @property
    def lengths(self) -> list[int]:
        """The lengths of the sequences: all equal, or evenly spaced from 1/32 of the mean on, shuffled."""
        if not self.ragged:
            return [self.length] * self.batch
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        first = self.length // 32
        step = 2 * (self.length - first) / max(self.batch - 1, 1)
        return [first + round(i * step) for i in order]

    @property
    def bytes(self) -> int:
        """The bytes moved: the cache of all tokens once, the query and the result."""
        cached = 2 * sum(self.lengths) * self.kv_heads * self.head_dim * ITEM_SIZE[self.cache_dtype]
        return cached + 2 * self.batch * self.query_tokens * self.heads * self.head_dim * ITEM_SIZE[self.dtype]

    @property
    def case(self) -> dict[str, int | str]:
        return {**self._asdict(), "ragged": str(self.ragged).lower()}


SIZES = (
    Sizes(1, 32, 8, 128, 4096),
    Sizes(1, 32, 8, 128, 32768),
    Sizes(64, 32, 8, 128, 1024),
    Sizes(64, 32, 8, 128, 4096),
    Sizes(128, 64, 8, 128, 2048),
    Sizes(64, 32, 32, 128, 2048),
    Sizes(16, 32, 8, 128, 2048),
    Sizes(16, 32, 8, 128, 2048, ragged=True),
    Sizes(8, 32, 8, 128, 8192),
)
ONE, MANY = SIZES[0], SIZES[2]


@dataclass
class Elsewhere:
    """The cache in the layouts of the baselines. Not a tuple, so that the clock does not count its bytes."""

    flash: tuple[torch.Tensor, torch.Tensor]  # [blocks, block_size, kv_heads, head_dim]
    dense: tuple[torch.Tensor, torch.Tensor] | None  # [batch, kv_heads, length, head_dim]


Inputs = Callable[[torch.Generator], tuple[Any, ...]]


# --- inputs -------------------------------------------------------------------------------------------


def _normal(generator: torch.Generator, dtype: str, *shape: int) -> torch.Tensor:
    if dtype.startswith("float8"):
        return _normal(generator, "bfloat16", *shape).to(getattr(torch, dtype))
    return torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device).normal_(generator=generator)


def tables(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block tables and lengths.

    Blocks are shuffled, in the same order for every generator, so that a baseline may plan once for all inputs.
    """
    counts = [-(-length // sizes.block_size) for length in sizes.lengths]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int().split(counts)
    block_tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    return block_tables.to(device), torch.tensor(sizes.lengths, dtype=torch.int32, device=device)


def to_vllm(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert caches from the layout "flash" to the layout "vllm"."""
    blocks, block_size, kv_heads, head_dim = keys.shape
    dtype, x = keys.dtype, 16 // keys.itemsize
    if keys.itemsize == 1:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    chunks = keys.view(blocks, block_size, kv_heads, head_dim // x, x)
    return chunks.permute(0, 2, 3, 1, 4).contiguous().view(dtype), values.permute(0, 2, 3, 1).contiguous().view(dtype)


def inputs_of(sizes: Sizes, compared: bool) -> Inputs:
    """Return query, caches, block tables and lengths, and if `compared` the cache of the baselines, else None."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        block_tables, seq_lens = tables(sizes, generator.device)
        tokens = (sizes.query_tokens,) if sizes.query_tokens > 1 else ()
        query = _normal(generator, sizes.dtype, sizes.batch, *tokens, sizes.heads, sizes.head_dim)
        blocks = sum(-(-length // sizes.block_size) for length in sizes.lengths)
        shape = blocks, sizes.block_size, sizes.kv_heads, sizes.head_dim
        flash = _normal(generator, sizes.cache_dtype, *shape), _normal(generator, sizes.cache_dtype, *shape)
        caches = to_vllm(*flash) if sizes.layout == "vllm" else flash
        elsewhere = None
        if compared:
            dense = None
            if not sizes.ragged and sizes.cache_dtype == sizes.dtype:
                at = block_tables.long()
                by_token = (cache[at].flatten(1, 2)[:, : sizes.length] for cache in flash)
                dense = tuple(cache.transpose(1, 2).contiguous() for cache in by_token)
            elsewhere = Elsewhere(flash, dense)  # type: ignore[arg-type]
        return query, *caches, block_tables, seq_lens, elsewhere

    return inputs


def _on(query: torch.Tensor, variant: str) -> str:
    """Return the variant to pass: "auto" on the CPU, where the tests run, because it has no variants."""
    return variant if query.is_cuda else "auto"


# --- baselines ----------------------------------------------------------------------------------------


def gathered(query: Any, key_cache: Any, value_cache: Any, block_tables: Any, seq_lens: Any, _: Any) -> torch.Tensor:
    """Gather the blocks of the layout "vllm", then attend. All lengths are equal and fill their blocks."""
    batch = len(query)
    keys, values = key_cache[block_tables], value_cache[block_tables]
    head_dim, kv_heads = query.shape[-1], values.shape[2]
    keys = keys.permute(0, 2, 1, 4, 3, 5).reshape(batch, kv_heads, -1, head_dim)
    values = values.permute(0, 2, 1, 4, 3).reshape(batch, kv_heads, -1, head_dim)
    return scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def dense(query: Any, _k: Any, _v: Any, _tables: Any, _lens: Any, elsewhere: Elsewhere) -> torch.Tensor:
    """Compute PyTorch's attention over a cache without pages."""
    assert elsewhere.dense is not None
    return scaled_dot_product_attention(query[:, :, None], *elsewhere.dense, enable_gqa=True)[:, :, 0]


def _flashinfer(sizes: Sizes) -> Callable[[], Callable[..., torch.Tensor]]:
    """Return FlashInfer's decode wrapper on tensor cores, or its prefill wrapper, planned at the first call."""

    def load() -> Callable[..., torch.Tensor]:
        import flashinfer

        planned: list[Any] = []

        def plan(query: torch.Tensor, flash: tuple[torch.Tensor, torch.Tensor], block_tables: torch.Tensor) -> Any:
            counts = [-(-length // sizes.block_size) for length in sizes.lengths]
            make = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=query.device)  # noqa: E731
            indptr = make([0, *counts]).cumsum(0, dtype=torch.int32)
            indices = torch.cat([row[:count] for row, count in zip(block_tables, counts, strict=True)])
            last = make([(length - 1) % sizes.block_size + 1 for length in sizes.lengths])
            widths = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.block_size
            dtypes = {"q_data_type": query.dtype, "kv_data_type": flash[0].dtype}
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
            if sizes.query_tokens == 1:
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
                wrapper.plan(indptr, indices, last, *widths, **dtypes)
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
                starts = torch.arange(sizes.batch + 1, dtype=torch.int32, device=query.device) * sizes.query_tokens
                wrapper.plan(starts, indptr, indices, last, *widths, causal=True, **dtypes)
            return wrapper

        def attend(query: Any, _k: Any, _v: Any, block_tables: Any, _lens: Any, elsewhere: Elsewhere) -> torch.Tensor:
            if not planned:
                planned.append(plan(query, elsewhere.flash, block_tables))
            rows = query.view(-1, sizes.heads, sizes.head_dim)
            return planned[0].run(rows, elsewhere.flash).view(query.shape)

        return attend

    return load


def partition_results(query: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate exp_sums, max_logits and tmp_out of `paged_attention_v2`."""
    seqs, heads, head_dim = query.shape
    partitions = -(-length // _PARTITION)
    sums, largest = (query.new_empty(seqs, heads, partitions, dtype=torch.float32) for _ in range(2))
    return sums, largest, query.new_empty(seqs, heads, partitions, head_dim)


def _like_vllm(function: Callable[..., Any], version: int, sizes: Sizes) -> Callable[..., torch.Tensor]:
    """Return `paged_attention_v1` or `_v2` on the inputs of a case."""
    kv_cache_dtype = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(sizes.cache_dtype, "auto")
    longest = max(sizes.lengths)
    scales: dict[torch.device, torch.Tensor] = {}

    def attend(query: Any, keys: Any, values: Any, block_tables: Any, seq_lens: Any, _: Any = None) -> torch.Tensor:
        if query.device not in scales:  # only in a call before the capture
            scales[query.device] = torch.ones((), device=query.device)
        one = scales[query.device]
        if kv_cache_dtype != "auto":
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        out = torch.empty_like(query)
        partial = partition_results(query, longest) if version == 2 else ()
        scale = sizes.head_dim**-0.5
        lengths = seq_lens, sizes.block_size, longest
        cached = query, keys, values, sizes.kv_heads, scale, block_tables
        function(out, *partial, *cached, *lengths, _NO_ALIBI, kv_cache_dtype, one, one)
        return out

    return attend


def _flash_attention(sizes: Sizes) -> Callable[[], Callable[..., Callable[[], torch.Tensor]]]:
    """Return FlashAttention-3 as vLLM 0.26 calls it, with the scheduler's metadata made ahead."""

    def load() -> Callable[..., Callable[[], torch.Tensor]]:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

        def prepare(
            query: torch.Tensor, _k: Any, _v: Any, block_tables: torch.Tensor, seq_lens: torch.Tensor, other: Elsewhere
        ) -> Callable[[], torch.Tensor]:
            starts = torch.arange(sizes.batch + 1, dtype=torch.int32, device=query.device) * sizes.query_tokens
            common = {
                "max_seqlen_q": sizes.query_tokens,
                "max_seqlen_k": max(sizes.lengths),
                "cu_seqlens_q": starts,
                "causal": True,
            }
            plan = get_scheduler_metadata(
                batch_size=sizes.batch,
                num_heads_q=sizes.heads,
                num_heads_kv=sizes.kv_heads,
                headdim=sizes.head_dim,
                cache_seqlens=seq_lens,
                qkv_dtype=query.dtype,
                page_size=sizes.block_size,
                **common,
            )
            rows = query.view(-1, sizes.heads, sizes.head_dim)

            def run() -> torch.Tensor:
                out = flash_attn_varlen_func(
                    rows,
                    *other.flash,
                    seqused_k=seq_lens,
                    softmax_scale=sizes.head_dim**-0.5,
                    block_table=block_tables,
                    out=torch.empty_like(rows),
                    scheduler_metadata=plan,
                    fa_version=3,
                    **common,
                )
                return out.view(query.shape)

            return run

        return prepare

    return load


def _vllm_triton(sizes: Sizes) -> Callable[[], Callable[..., Callable[[], torch.Tensor]]]:
    """Return vLLM 0.26's Triton attention, with its backend's buffers for 16 parts of a sequence."""
    parts = 16

    def load() -> Callable[..., Callable[[], torch.Tensor]]:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        def prepare(
            query: torch.Tensor, _k: Any, _v: Any, block_tables: torch.Tensor, seq_lens: torch.Tensor, other: Elsewhere
        ) -> Callable[[], torch.Tensor]:
            device, most = query.device, 128 // sizes.kv_heads
            of_parts = torch.empty(most, sizes.heads, parts, sizes.head_dim, device=device)
            largest, total = (torch.empty(most, sizes.heads, parts, device=device) for _ in range(2))
            starts = torch.arange(sizes.batch + 1, dtype=torch.int32, device=device) * sizes.query_tokens
            scale = torch.ones(1, device=device).expand(sizes.batch, sizes.kv_heads)
            rows = query.view(-1, sizes.heads, sizes.head_dim)

            def run() -> torch.Tensor:
                out = torch.empty_like(rows)
                unified_attention(
                    q=rows,
                    k=other.flash[0],
                    v=other.flash[1],
                    out=out,
                    cu_seqlens_q=starts,
                    max_seqlen_q=sizes.query_tokens,
                    seqused_k=seq_lens,
                    max_seqlen_k=max(sizes.lengths),
                    softmax_scale=sizes.head_dim**-0.5,
                    causal=True,
                    window_size=(-1, -1),
                    block_table=block_tables,
                    softcap=0,
                    q_descale=None,
                    k_descale=scale,
                    v_descale=scale,
                    seq_threshold_3D=most,
                    num_par_softmax_segments=parts,
                    softmax_segm_output=of_parts,
                    softmax_segm_max=largest,
                    softmax_segm_expsum=total,
                )
                return out.view(query.shape)

            return run

        return prepare

    return load


def _baselines(sizes: Sizes, gather: bool) -> dict[str, Baseline]:
    baselines = {}
    if gather:
        baselines["torch"] = Baseline(lambda: gathered)
    if sizes.query_tokens == 1 and not sizes.ragged and sizes.cache_dtype == sizes.dtype:
        baselines["torch dense"] = Baseline(lambda: dense)
    return baselines


def _peers(sizes: Sizes) -> dict[str, Baseline]:
    peers = {}
    if sizes.cache_dtype == sizes.dtype:
        peers["FlashAttention-3"] = Baseline(_flash_attention(sizes), prepared=True)
        peers["vLLM Triton"] = Baseline(_vllm_triton(sizes), slow=True, prepared=True)
    # FlashInfer compiles its kernel.
    peers["FlashInfer"] = Baseline(_flashinfer(sizes), slow=True)
    return peers


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two results agree up to the rounding of intermediate results: weights or scores."""
    ours, theirs = ours.float(), theirs.float()
    return bool((ours - theirs).abs().max() <= _TOLERANCE * theirs.abs().max())


# --- cases --------------------------------------------------------------------------------------------


def attention(
    sizes: Sizes,
    variant: str = "specialized",
    compared: bool = False,
    gather: bool = False,
    host: bool = False,
    split: int | None = None,
) -> Case:
    """Return a case of `paged_attention`, with its baselines if `compared`; the gathering baseline only if `gather`."""

    def call(query: Any, keys: Any, values: Any, block_tables: Any, seq_lens: Any, _: Any) -> torch.Tensor:
        inputs = query, keys, values, block_tables, seq_lens
        return cukern.paged_attention(*inputs, layout=sizes.layout, split=split, variant=_on(query, variant))

    return Case(
        "paged_attention",
        sizes.case | ({} if split is None else {"split": split}),
        variant,
        inputs_of(sizes, compared),
        call,
        sizes.bytes,
        baselines=_baselines(sizes, gather) if compared else {},
        peers=_peers(sizes) if compared else {},
        agree=agree,
        host=host,
    )


def _operator(sizes: Sizes) -> Case:
    """Return a case of the torch operator, to measure its host time."""
    import cukern.torch_ops  # noqa: F401

    operator = torch.ops.cukern.paged_attention
    call = lambda *inputs: operator(*inputs[:5], layout=sizes.layout)  # noqa: E731
    case = sizes.case | {"call": "torch.ops"}
    return Case("paged_attention", case, "auto", inputs_of(sizes, False), call, sizes.bytes, host=True)


def _version(version: int, sizes: Sizes) -> Case:
    name = f"paged_attention_v{version}"
    call = _like_vllm(getattr(cukern, name), version, sizes)
    inputs = inputs_of(sizes, True)
    peers, host = _peers(sizes), sizes == ONE
    return Case(name, sizes.case, "auto", inputs, call, sizes.bytes, peers=peers, agree=agree, host=host)


def merged(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, heads_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `merge_attention_states` in torch, without infinite log-sum-exps."""
    lse = torch.logaddexp(lse_a, lse_b)
    logs = ((x - lse).t() if heads_first else x - lse for x in (lse_a, lse_b))
    shares = (x.exp()[..., None] * out.float() for out, x in zip((out_a, out_b), logs, strict=True))
    return sum(shares).to(out_a.dtype), lse  # type: ignore[union-attr, return-value]


@dataclass
class States:
    """The log-sum-exps in the forms of the baselines."""

    base_two: tuple[torch.Tensor, torch.Tensor]  # [tokens, heads]
    by_head: tuple[torch.Tensor, torch.Tensor]  # [heads, tokens]


def _merge(tokens: int, heads: int, head_dim: int, dtype: str, heads_first: bool = False) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        outs = [_normal(generator, dtype, tokens, heads, head_dim) for _ in range(2)]
        lses = [_normal(generator, "float32", tokens, heads) for _ in range(2)]
        others = States(
            (lses[0] / math.log(2), lses[1] / math.log(2)),
            (lses[0].t().contiguous(), lses[1].t().contiguous()),
        )
        given = others.by_head if heads_first else lses
        return outs[0], given[0], outs[1], given[1], others

    def compiled() -> Callable[..., Any]:
        torch.compiler.reset()
        function = torch.compile(merged, dynamic=False)
        return lambda *inputs: function(*inputs[:4], heads_first)

    def flashinfer() -> Callable[..., Any]:
        from flashinfer import merge_state

        def merge(out_a: Any, _a: Any, out_b: Any, _b: Any, others: States) -> Any:
            return merge_state(out_a, others.base_two[0], out_b, others.base_two[1])

        return merge

    def vllm() -> Callable[..., Any]:
        from vllm._custom_ops import merge_attn_states

        def merge(out_a: Any, _a: Any, out_b: Any, _b: Any, others: States) -> Any:
            out, lse = torch.empty_like(out_a), torch.empty_like(others.by_head[0])
            merge_attn_states(out, out_a, others.by_head[0], out_b, others.by_head[1], lse)
            return out, lse

        return merge

    def sglang() -> Callable[..., Any]:
        from sgl_kernel import merge_state_v2

        return lambda out_a, lse_a, out_b, lse_b, _: merge_state_v2(out_a, lse_a, out_b, lse_b)

    # A user has the log-sum-exps in one layout, and only some libraries take heads first.
    peers = {"vLLM": Baseline(vllm)}
    if not heads_first:
        peers |= {"FlashInfer": Baseline(flashinfer, slow=True), "SGLang": Baseline(sglang)}

    def agree_on_outputs(ours: Any, theirs: Any) -> bool:
        return agree(ours[0], theirs[0])  # log-sum-exps have another base or another layout

    sizes: dict[str, int | str] = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    return Case(
        "merge_attention_states",
        sizes | ({"lse_heads_first": True} if heads_first else {}),
        "auto",
        inputs,
        lambda *inputs: cukern.merge_attention_states(*inputs[:4], lse_heads_first=heads_first),
        3 * tokens * heads * (head_dim * ITEM_SIZE[dtype] + 4),
        baselines={
            "torch": Baseline(lambda: lambda a, lse_a, b, lse_b, _: merged(a, lse_a, b, lse_b, heads_first)),
            "torch.compile": Baseline(compiled, slow=True),
        },
        peers=peers,
        agree=agree_on_outputs,
    )


def _all_cases() -> Iterator[Case]:
    for sizes in SIZES:
        yield attention(sizes, compared=True, gather=sizes in (ONE, MANY), host=sizes == ONE)
        yield attention(sizes, "dynamic")
        yield attention(sizes._replace(cache_dtype="float8_e4m3fn"), compared=True)
    yield _operator(ONE)
    for sizes in (ONE, SIZES[3]):
        yield attention(sizes._replace(layout="flash"), compared=True)
    yield attention(SIZES[3]._replace(ragged=True), compared=True)
    yield attention(SIZES[3]._replace(query_tokens=4), compared=True)
    yield attention(SIZES[3], split=1024)
    for version in (1, 2):
        for sizes in (ONE, MANY):
            yield _version(version, sizes)
    for heads_first in (False, True):
        yield _merge(8192, 32, 128, "bfloat16", heads_first)


def cases() -> list[Case]:
    """Return cases: one sequence and many, with and without grouped heads, for each cache layout, dtype and call."""
    return list(_all_cases())
