"""Time MLA decode attention beside FlashMLA, FlashAttention-3, FlashInfer, vLLM's Triton and PyTorch's products."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

import cukern
from benchmarks.harness import Baseline, Case
from cukern.ops.mla_decode import choose as mla_decode
from cukern.runtime.arrays import ITEM_SIZE
from cukern.runtime.kernel import Variant, arch_of_device, device_count
from cukern.runtime.op import OPS, Op
from cukern.runtime.plan import launch

HEAD_DIM, HEAD_DIM_V = 576, 512
FP8_BYTES, PAGED_BYTES = 656, 584
FP8 = "fp8"
_FP8_GROUP = 128
_WORKSPACE_BYTES = 256 * 2**20
# Relative to the largest output, because outputs are means of many values.
_TOLERANCE = 0.03


class Sizes(NamedTuple):
    """Sizes with one kv head. Several query tokens attend causally."""

    batch: int
    query_tokens: int
    heads: int
    length: int  # the mean length if lengths differ; with `topk` the total tokens of the cache
    page_size: int = 64
    dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    ragged: bool = False
    topk: int = 0

    @property
    def fp8(self) -> bool:
        return self.cache_dtype == FP8

    @property
    def lengths(self) -> list[int]:
        """The tokens of the sequences: all equal, or evenly spaced from 1/8 to 15/8 of the mean, shuffled."""
        if not self.ragged:
            return [self.length] * self.batch
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        first = self.length // 8
        step = 2 * (self.length - first) / max(self.batch - 1, 1)
        return [first + round(i * step) for i in order]

    @property
    def pages(self) -> list[int]:
        """The pages of the sequences."""
        return [-(-length // self.page_size) for length in self.lengths]

    @property
    def bytes(self) -> int:
        """The bytes of the attended tokens (each counted once), the queries and the results."""
        tokens = sum(self.lengths)
        if self.topk:
            missed = (1 - self.topk / self.length) ** (self.batch * self.query_tokens)
            tokens = round(self.length * (1 - missed))
        cached = tokens * (FP8_BYTES if self.fp8 else HEAD_DIM * ITEM_SIZE[self.dtype])
        rows = self.batch * self.query_tokens * self.heads
        return cached + rows * ((HEAD_DIM + HEAD_DIM_V) * ITEM_SIZE[self.dtype] + 4)

    @property
    def flops(self) -> int:
        """The flops of both products, over the tokens that a query sees."""
        if self.topk:
            seen = self.batch * self.query_tokens * self.topk
        else:
            seen = sum(length - i for length in self.lengths for i in range(self.query_tokens))
        return 2 * (HEAD_DIM + HEAD_DIM_V) * self.heads * seen

    @property
    def case(self) -> dict[str, int | str]:
        flags = {"ragged": self.ragged, "causal": self.query_tokens > 1}
        return {**self._asdict(), **{name: str(flag).lower() for name, flag in flags.items()}}

    @property
    def small(self) -> Sizes:
        """Smaller sizes, for the NumPy reference."""
        few = {"batch": min(self.batch, 3), "heads": min(self.heads, 4)}
        return self._replace(**few, length=max(self.length // 32, 128), topk=min(self.topk, 24))


SIZES = (
    Sizes(128, 1, 128, 4096),
    Sizes(128, 2, 128, 4096),
    Sizes(64, 1, 128, 8192),
    Sizes(32, 1, 128, 4096),
    Sizes(1, 1, 128, 8192),
    Sizes(4, 1, 128, 8192),
    Sizes(128, 1, 64, 4096),
    Sizes(128, 1, 16, 4096),
    Sizes(1, 1, 16, 16384),
)
MANY_HEADS, ONE, FOUR, SOME_HEADS, FEW_HEADS = SIZES[0], *SIZES[4:8]
SPARSE = Sizes(64, 1, 128, 524288, topk=2048)  # exceeds L2, so that chosen tokens come from memory


@dataclass
class Elsewhere:
    """Inputs that only the baselines need. Not a tuple, so that the clock does not count its bytes."""

    dense: torch.Tensor | None  # [batch, length, 576]: the cache without pages
    hidden: torch.Tensor | None  # bool [batch, query_tokens, 1, length]: the tokens that a query must not see


class Inputs(NamedTuple):
    """The arguments of a call or of a baseline."""

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor | None  # None with indices
    lengths: torch.Tensor
    plan: tuple[torch.Tensor, torch.Tensor]
    indices: torch.Tensor | None
    elsewhere: Elsewhere | None  # None without baselines


# --- inputs -------------------------------------------------------------------------------------------


def _normal(generator: torch.Generator, dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=generator.device).normal_(generator=generator)


def to_fp8(cache: torch.Tensor) -> torch.Tensor:
    """Convert a cache [pages, page_size, 1, 576] to bytes [pages, page_size, 1, 656].

    A token has 512 numbers of e4m3, their four scales in float32, and 64 numbers in bfloat16.
    """
    stored = torch.zeros(*cache.shape[:2], FP8_BYTES, dtype=torch.uint8, device=cache.device)
    tokens = cache.view(-1, HEAD_DIM)
    slots = torch.arange(len(tokens), device=cache.device)
    cukern.concat_and_cache_mla(tokens[:, :HEAD_DIM_V], tokens[:, HEAD_DIM_V:], stored, slots, "fp8_ds_mla", None)
    return stored[:, :, None]


def from_fp8(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert bytes [..., 656] to numbers [..., 576]."""
    numbers, scales, rotary = stored.split([HEAD_DIM_V, 16, 128], dim=-1)
    groups = numbers.contiguous().view(torch.float8_e4m3fn).to(dtype).unflatten(-1, (-1, _FP8_GROUP))
    latent = (groups * scales.contiguous().view(torch.float32)[..., None]).to(dtype).flatten(-2)
    return torch.cat([latent, rotary.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)


def tables(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block table and the lengths.

    Pages are shuffled, in the same order for every generator, so that a baseline may plan once for all inputs.
    """
    pages = torch.randperm(sum(sizes.pages), generator=torch.Generator().manual_seed(1)).int().split(sizes.pages)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    return table.to(device), torch.tensor(sizes.lengths, dtype=torch.int32, device=device)


def chosen_tokens(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Return, for each query, the slots of `topk` different tokens of the cache, the same for every generator."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randperm(sizes.length, generator=generator) for _ in range(sizes.batch * sizes.query_tokens)]
    chosen = torch.stack([row[: sizes.topk] for row in rows]).int()
    return chosen.view(sizes.batch, sizes.query_tokens, sizes.topk).to(device)


def planned(sizes: Sizes, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sparse = {"num_heads_q": sizes.heads, "topk": sizes.topk} if sizes.topk else {}
    return cukern.get_mla_metadata(lengths, sizes.query_tokens * sizes.heads, 1, **sparse)


def inputs_of(sizes: Sizes, compared: bool) -> Callable[[torch.Generator], tuple[Inputs]]:
    def inputs(generator: torch.Generator) -> tuple[Inputs]:
        device = generator.device
        if sizes.topk:
            table, lengths = None, torch.full((sizes.batch,), sizes.length, dtype=torch.int32, device=device)
            indices, pages = chosen_tokens(sizes, device), sizes.length // sizes.page_size
        else:
            table, lengths = tables(sizes, device)
            indices, pages = None, sum(sizes.pages)
        query = _normal(generator, sizes.dtype, sizes.batch, sizes.query_tokens, sizes.heads, HEAD_DIM)
        cache = _normal(generator, sizes.dtype, pages, sizes.page_size, 1, HEAD_DIM)
        if sizes.fp8:
            cache = to_fp8(cache)
        elsewhere = _elsewhere(sizes, cache, table, lengths) if compared else None
        return (Inputs(query, cache, table, lengths, planned(sizes, lengths), indices, elsewhere),)

    return inputs


def _elsewhere(sizes: Sizes, cache: torch.Tensor, table: torch.Tensor | None, lengths: torch.Tensor) -> Elsewhere:
    if table is None:
        return Elsewhere(None, None)
    if sizes.query_tokens == 1 and not sizes.ragged:
        return Elsewhere(None if sizes.fp8 else gathered(cache, table, sizes.length), None)
    tokens = torch.arange(max(sizes.lengths), device=lengths.device)
    last = lengths[:, None] + torch.arange(1 - sizes.query_tokens, 1, device=lengths.device)
    return Elsewhere(None, (tokens >= last[:, :, None])[:, :, None])


def _on(query: torch.Tensor, variant: str) -> str:
    """Return the variant to pass: "auto" on the CPU, where the tests run, because it has no variants."""
    return variant if query.is_cuda else "auto"


# --- baselines ----------------------------------------------------------------------------------------


def gathered(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the pages of each sequence, in order: [batch, length, 576]."""
    return cache[table].flatten(1, 2)[:, :length, 0]


def absorbed(query: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """Compute two products and a softmax, over tokens [batch, length, 576]."""
    rows = (query * HEAD_DIM**-0.5).flatten(1, 2)
    scores = torch.bmm(rows, tokens.transpose(1, 2))
    if hidden is not None:
        scores.view(*query.shape[:3], -1).masked_fill_(hidden, -torch.inf)
    return torch.bmm(scores.softmax(dim=-1), tokens[..., :HEAD_DIM_V]).view(*query.shape[:3], HEAD_DIM_V)


def _paged(sizes: Sizes) -> Callable[[Inputs], torch.Tensor]:
    """Return PyTorch's attention, which gathers the pages or the chosen tokens before it multiplies."""

    def attend(given: Inputs) -> torch.Tensor:
        query, hidden = given.query, None
        if given.indices is not None:
            tokens = given.cache.flatten(0, 2)[given.indices.flatten(0, 1)]
            # Each query has its own tokens, so treat it as a sequence.
            query = query.flatten(0, 1)[:, None]
        else:
            assert given.table is not None and given.elsewhere is not None
            tokens, hidden = gathered(given.cache, given.table, max(sizes.lengths)), given.elsewhere.hidden
        if sizes.fp8:
            tokens = from_fp8(tokens, query.dtype)
        return absorbed(query, tokens, hidden).view(*given.query.shape[:3], HEAD_DIM_V)

    return attend


def _dense(given: Inputs) -> torch.Tensor:
    assert given.elsewhere is not None and given.elsewhere.dense is not None
    return given.elsewhere.dense


def dense(given: Inputs) -> torch.Tensor:
    """Compute PyTorch's attention over a cache without pages."""
    return absorbed(given.query, _dense(given), None)


def dense_sdpa(given: Inputs) -> torch.Tensor:
    """Compute `dense` as one call of SDPA, with all heads as rows of one head."""
    keys = _dense(given)[:, None]
    out = scaled_dot_product_attention(given.query.flatten(1, 2)[:, None], keys, keys[..., :HEAD_DIM_V])
    return out.reshape(*given.query.shape[:3], HEAD_DIM_V)


def _flash_mla_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import FlashMLA's `get_mla_metadata` and `flash_mla_with_kvcache` from flash_mla, sgl_kernel or vllm."""
    try:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata
    except ImportError:
        try:
            from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
        except ImportError:
            from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata
    return get_mla_metadata, flash_mla_with_kvcache


def _flash_mla(sizes: Sizes) -> Callable[[], Callable[[Inputs], torch.Tensor]]:
    """Return FlashMLA. All calls share the plan of the first call, because their lengths are equal."""

    def load() -> Callable[[Inputs], torch.Tensor]:
        get_metadata, function = _flash_mla_functions()
        quantized = {"is_fp8_kvcache": True} if sizes.fp8 else {}
        sparse = {"num_heads_q": sizes.heads, "topk": sizes.topk} if sizes.topk else {}
        plans: list[Any] = []

        def attend(given: Inputs) -> torch.Tensor:
            if not plans:
                plans.append(get_metadata(given.lengths, sizes.query_tokens * sizes.heads, 1, **sparse, **quantized))
            table, lengths, chosen = given.table, given.lengths, {}
            if given.indices is not None:
                table, lengths, chosen = None, None, {"indices": given.indices}
            places = given.query, given.cache, table, lengths, HEAD_DIM_V
            return function(*places, *plans[0], causal=sizes.query_tokens > 1, **quantized, **chosen)[0]

        return attend

    return load


def _flash_mla_choosing_all(sizes: Sizes) -> Callable[[], Callable[[Inputs], Callable[[], torch.Tensor]]]:
    """Return FlashMLA's sparse kernel with all tokens as indices: FlashMLA has no dense kernel for an 8-bit cache."""

    def load() -> Callable[[Inputs], Callable[[], torch.Tensor]]:
        get_metadata, function = _flash_mla_functions()

        def prepare(given: Inputs) -> Callable[[], torch.Tensor]:
            assert given.table is not None
            within = torch.arange(sizes.page_size, dtype=torch.int32, device=given.table.device)
            slots = (
                (given.table[:, :, None] * sizes.page_size + within).flatten(1)[:, None, : sizes.length].contiguous()
            )
            options = {"num_heads_q": sizes.heads, "topk": sizes.length, "is_fp8_kvcache": True}
            plan = get_metadata(given.lengths, sizes.query_tokens * sizes.heads, 1, **options)
            places = given.query, given.cache, None, None, HEAD_DIM_V
            return lambda: function(*places, *plan, is_fp8_kvcache=True, indices=slots)[0]

        return prepare

    return load


def _flash_attention(sizes: Sizes) -> Callable[[], Callable[[Inputs], Callable[[], torch.Tensor]]]:
    """Return FlashAttention-3 as vLLM 0.26 calls it for MLA: rotary parts are keys, latents are values. The two parts
    of a query are separate arrays, as the model's projections make them."""

    def load() -> Callable[[Inputs], Callable[[], torch.Tensor]]:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, get_scheduler_metadata

        def prepare(given: Inputs) -> Callable[[], torch.Tensor]:
            tokens, longest = sizes.query_tokens, max(sizes.lengths)
            device, dtype = given.query.device, given.query.dtype
            latent, rotary = (part.flatten(0, 1).contiguous() for part in given.query.split([HEAD_DIM_V, 64], dim=-1))
            starts = torch.arange(sizes.batch + 1, dtype=torch.int32, device=device) * tokens
            common = {"max_seqlen_q": tokens, "max_seqlen_k": longest, "cu_seqlens_q": starts, "causal": True}
            plan = get_scheduler_metadata(
                batch_size=sizes.batch,
                num_heads_q=sizes.heads,
                num_heads_kv=1,
                headdim=HEAD_DIM - HEAD_DIM_V,
                cache_seqlens=given.lengths,
                qkv_dtype=dtype,
                headdim_v=HEAD_DIM_V,
                page_size=sizes.page_size,
                **common,
            )

            def run() -> torch.Tensor:
                out = flash_attn_varlen_func(
                    q=rotary,
                    k=given.cache[..., HEAD_DIM_V:],
                    v=given.cache[..., :HEAD_DIM_V],
                    q_v=latent,
                    seqused_k=given.lengths,
                    softmax_scale=HEAD_DIM**-0.5,
                    block_table=given.table,
                    out=torch.empty_like(latent),
                    scheduler_metadata=plan,
                    fa_version=3,
                    **common,
                )
                return out.view(*given.query.shape[:3], HEAD_DIM_V)

            return run

        return prepare

    return load


def _vllm_triton(sizes: Sizes) -> Callable[[], Callable[[Inputs], Callable[[], torch.Tensor]]]:
    """Return vLLM 0.26's Triton kernel, with the number of splits that its backend chooses."""

    def load() -> Callable[[Inputs], Callable[[], torch.Tensor]]:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

        def prepare(given: Inputs) -> Callable[[], torch.Tensor]:
            query = given.query.flatten(0, 1)
            device = query.device
            splits = max(1, max(sizes.lengths) // 512)
            splits = min(
                1 << (splits - 1).bit_length(), 2 * torch.cuda.get_device_properties(device).multi_processor_count
            )
            partial = torch.empty(sizes.batch, sizes.heads, splits, HEAD_DIM_V + 1, device=device)
            lse = torch.zeros(sizes.batch, sizes.heads, dtype=query.dtype, device=device)
            out = torch.zeros(sizes.batch, sizes.heads, HEAD_DIM_V, dtype=query.dtype, device=device)
            one = torch.ones(1, device=device)

            def run() -> torch.Tensor:
                decode_attention_fwd(
                    query,
                    given.cache,
                    given.cache[..., :HEAD_DIM_V],
                    out,
                    lse,
                    given.table,
                    given.lengths,
                    partial,
                    splits,
                    HEAD_DIM**-0.5,
                    sizes.page_size,
                    k_scale=one,
                    v_scale=one,
                    is_mla=True,
                )
                return out[:, None]

            return run

        return prepare

    return load


def _flashinfer(sizes: Sizes, backend: str) -> Callable[[], Callable[[Inputs], torch.Tensor]]:
    """Return FlashInfer's wrapper for MLA, planned at the first call.

    It takes the latents and the rotary parts as two caches. Chosen tokens are passed as pages of one token.
    """

    def load() -> Callable[[Inputs], torch.Tensor]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        wrappers: list[Any] = []

        def plan(given: Inputs) -> Any:
            device, dtype = given.query.device, given.query.dtype
            make = lambda numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
            if given.table is not None:
                queries, counts, lengths, page_size = sizes.query_tokens, sizes.pages, sizes.lengths, sizes.page_size
                ids = torch.cat([row[:count] for row, count in zip(given.table, counts, strict=True)])
            else:
                assert given.indices is not None
                queries, page_size = 1, 1
                counts = lengths = [sizes.topk] * (sizes.batch * sizes.query_tokens)
                ids = given.indices.flatten()
            starts = make(range(len(lengths) + 1)) * queries
            first_pages = make([0, *counts]).cumsum(0, dtype=torch.int32)
            workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
            widths = sizes.heads, HEAD_DIM_V, HEAD_DIM - HEAD_DIM_V, page_size
            form = queries > 1, HEAD_DIM**-0.5, dtype, dtype
            wrapper.plan(starts, first_pages, ids, make(lengths), *widths, *form)
            return wrapper

        def attend(given: Inputs) -> torch.Tensor:
            if not wrappers:
                wrappers.append(plan(given))
            pages = given.cache[:, :, 0] if given.indices is None else given.cache.flatten(0, 1)
            split = [HEAD_DIM_V, HEAD_DIM - HEAD_DIM_V]
            rows = given.query.flatten(0, 1)
            out = wrappers[0].run(*rows.split(split, dim=-1), *pages.split(split, dim=-1))
            return out.view(*given.query.shape[:3], HEAD_DIM_V)

        return attend

    return load


def _baselines(sizes: Sizes) -> dict[str, Baseline]:
    baselines = {"torch": Baseline(lambda: _paged(sizes))}
    if not (sizes.topk or sizes.fp8 or sizes.ragged or sizes.query_tokens > 1):
        baselines |= {"torch dense": Baseline(lambda: dense), "torch SDPA": Baseline(lambda: dense_sdpa)}
    return baselines


def _peers(sizes: Sizes) -> dict[str, Baseline]:
    peers = {}
    # FlashMLA is dense only in 16 bits, and sparse only in 8 bits with 64 or 128 heads.
    if sizes.fp8 == bool(sizes.topk) and sizes.page_size == 64:
        peers["FlashMLA"] = Baseline(_flash_mla(sizes))
    if sizes.fp8 and not sizes.topk and sizes.heads in (64, 128):
        peers["FlashMLA, all chosen"] = Baseline(_flash_mla_choosing_all(sizes), prepared=True)
    if sizes.fp8 or sizes.topk:
        return peers
    if sizes.dtype == "bfloat16":
        peers["FlashAttention-3"] = Baseline(_flash_attention(sizes), prepared=True)
    if sizes.query_tokens == 1 and sizes.heads <= 16:
        peers["vLLM Triton"] = Baseline(_vllm_triton(sizes), slow=True, prepared=True)
    # FlashInfer compiles its kernels.
    peers["FlashInfer"] = Baseline(_flashinfer(sizes, "auto"), slow=True)
    return peers


def _portable_peers(sizes: Sizes) -> dict[str, Baseline]:
    return {"FlashInfer fa2": Baseline(_flashinfer(sizes, "fa2"), slow=True)}


def agree(ours: tuple[torch.Tensor, torch.Tensor], theirs: torch.Tensor) -> bool:
    """Return whether results agree up to intermediate rounding: libraries round probabilities or scores."""
    out, theirs = ours[0].float(), theirs.float()
    return bool((out - theirs).abs().max() <= _TOLERANCE * theirs.abs().max())


# --- cases --------------------------------------------------------------------------------------------


@functools.cache
def combining_twice() -> Callable[..., Any]:
    """Return a `flash_mla_with_kvcache` that launches `combine_parts` twice, one after the other."""
    declared = OPS["flash_mla_with_kvcache"]

    def launch_again(variant: Variant, *args: Any, **fields: Any) -> None:
        for _ in range(1 + (variant.instance.function == mla_decode.combine.function)):
            launch(variant, *args, **fields)

    @functools.wraps(declared.body)
    def plan(*args: Any, **kwargs: Any) -> Any:
        with patch.object(mla_decode, "launch", launch_again):
            return declared.body(*args, **kwargs)

    return Op(plan, declared.twin).call


PLANNING, OPERATOR, TWICE = "plan inside", "torch.ops", "combine twice"


def attention(sizes: Sizes, variant: str = "auto", compared: bool = False, host: bool = False, how: str = "") -> Case:
    """Return a case of `flash_mla_with_kvcache`, with its baselines if `compared`.

    Args:
        how: PLANNING: the call makes the plan. OPERATOR: the call uses the torch operator. TWICE: the call launches
            `combine_parts` twice, with the same result, so it takes longer by the time of that kernel.
    """
    function = combining_twice() if how == TWICE else cukern.flash_mla_with_kvcache
    if how == OPERATOR:
        importlib.import_module("cukern.torch_ops")
        function = torch.ops.cukern.flash_mla_with_kvcache

    def call(given: Inputs) -> Any:
        plan = (None, None) if how == PLANNING else given.plan
        options = {"causal": sizes.query_tokens > 1, "is_fp8_kvcache": sizes.fp8, "indices": given.indices}
        places = given.query, given.cache, given.table, given.lengths, HEAD_DIM_V
        return function(*places, *plan, **options, variant=_on(given.query, variant))

    portable = variant == "mma"
    return Case(
        "flash_mla_with_kvcache",
        sizes.case,
        f"{variant}, {how}" if how else variant,
        inputs_of(sizes, compared),
        call,
        sizes.bytes,
        sizes.flops,
        baselines=_baselines(sizes) if compared and not portable else {},
        peers=(_portable_peers if portable else _peers)(sizes) if compared else {},
        agree=agree,
        host=host,
    )


class TwoCaches(NamedTuple):
    """Calls with two 8-bit caches for heads of 512, with `topk` and `extra_topk` indices. extra_topk = 0: one cache."""

    batch: int
    query_tokens: int
    heads: int
    length: int  # tokens of each cache
    topk: int
    extra_topk: int
    page_size: int
    extra_page_size: int

    @property
    def small(self) -> TwoCaches:
        return self._replace(batch=2, heads=4, length=512, topk=min(self.topk, 40), extra_topk=min(self.extra_topk, 24))


TWO_CACHES = (
    TwoCaches(64, 1, 128, 65536, 2048, 0, 64, 64),
    TwoCaches(128, 2, 128, 16384, 128, 1024, 256, 64),
    TwoCaches(128, 2, 64, 16384, 128, 512, 256, 2),
)


def _paged_cache(generator: torch.Generator, length: int, page_size: int) -> torch.Tensor:
    """Return bytes [pages, page_size, 1, 584]: 448 numbers of e4m3, 64 of bfloat16, then the scales, all 2^-9."""
    pages = length // page_size
    numbers = _normal(generator, "float32", pages, page_size, 448).mul_(50).to(torch.float8_e4m3fn).view(torch.uint8)
    rotary = _normal(generator, "bfloat16", pages, page_size, 64).div_(10).view(torch.uint8)
    size = -(-page_size * PAGED_BYTES // 576) * 576  # as in FlashMLA's tests
    flat = torch.full((pages, size), 127 - 9, dtype=torch.uint8, device=generator.device)
    flat[:, : page_size * 576] = torch.cat([numbers, rotary], 2).flatten(1)
    return flat.as_strided((pages, page_size, 1, PAGED_BYTES), (size, PAGED_BYTES, PAGED_BYTES, 1))


def two_caches(sizes: TwoCaches) -> Case:
    """Return a case of `flash_mla_with_kvcache` with two caches, planned ahead."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        def chosen(topk: int) -> torch.Tensor:
            shape, device = (sizes.batch, sizes.query_tokens, topk), generator.device
            return torch.randint(0, sizes.length, shape, generator=generator, device=device, dtype=torch.int32)

        query = _normal(generator, "bfloat16", sizes.batch, sizes.query_tokens, sizes.heads, HEAD_DIM_V)
        options = {"is_fp8_kvcache": True, "indices": chosen(sizes.topk)}
        if sizes.extra_topk:
            options["extra_k_cache"] = _paged_cache(generator, sizes.length, sizes.extra_page_size)
            options["extra_indices_in_kvcache"] = chosen(sizes.extra_topk)
        meta, _ = cukern.get_mla_metadata()
        cache = _paged_cache(generator, sizes.length, sizes.page_size)
        cukern.flash_mla_with_kvcache(query, cache, None, None, HEAD_DIM_V, meta, None, **options)
        plan = meta.tile_scheduler_metadata, meta.num_splits
        return query, cache, plan, Options(options)

    def call(query: torch.Tensor, cache: torch.Tensor, plan: Any, options: Options) -> Any:
        return cukern.flash_mla_with_kvcache(query, cache, None, None, HEAD_DIM_V, *plan, **options.given)

    rows, seen = sizes.batch * sizes.query_tokens, sizes.topk + sizes.extra_topk
    tokens = min(rows * seen, sizes.length * (1 + bool(sizes.extra_topk)))
    moved = tokens * PAGED_BYTES + rows * sizes.heads * (4 * HEAD_DIM_V + 4) + 4 * rows * seen
    case = {**sizes._asdict(), "dtype": "bfloat16", "cache_dtype": FP8, "slot_bytes": PAGED_BYTES}
    flops = 4 * HEAD_DIM_V * sizes.heads * rows * seen
    return Case("flash_mla_with_kvcache", case, "auto", inputs, call, moved, flops)


@dataclass
class Options:
    """Named arguments. Not a tuple, so that the clock does not count their bytes."""

    given: dict[str, Any]


def metadata(batch: int, heads: int = 128, length: int = 4096, host: bool = False) -> Case:
    """Return a case of `get_mla_metadata`."""

    def inputs(generator: torch.Generator) -> tuple[torch.Tensor]:
        shape = {"size": (batch,), "generator": generator, "device": generator.device}
        return (torch.randint(length // 8, length * 15 // 8, **shape, dtype=torch.int32),)

    def flash_mla() -> Callable[..., Any]:
        function, _ = _flash_mla_functions()
        if "cache_seqlens" not in inspect.signature(function).parameters:
            raise ImportError("this version of FlashMLA plans in its first call")
        return lambda lengths: function(lengths, heads, 1)

    def same_shape(ours: Any, theirs: Any) -> bool:
        # FlashMLA's plan differs; it has the same number of sequences.
        return ours[1].shape == theirs[1].shape

    return Case(
        "get_mla_metadata",
        {"batch": batch, "heads": heads, "length": length, "ragged": "true"},
        "auto",
        inputs,
        lambda lengths: cukern.get_mla_metadata(lengths, heads, 1),
        4 * (2 * batch + 1),
        peers={"FlashMLA": Baseline(flash_mla)},
        agree=same_shape,
        host=host,
    )


def has_wgmma() -> bool:
    """Return whether cases of variant "wgmma" are listed: on Hopper, and on a machine without a GPU."""
    return not device_count() or arch_of_device(0) == "90a"


def _all_cases(size: Callable[[Sizes], Sizes]) -> Iterator[Case]:
    for sizes in SIZES:
        yield attention(size(sizes), compared=True, host=sizes == ONE)
        if has_wgmma():
            yield attention(size(sizes), "wgmma")
    for sizes in (MANY_HEADS, FEW_HEADS):
        yield attention(size(sizes), "mma", compared=True)
        yield attention(size(sizes), "dynamic")
        yield attention(size(sizes._replace(cache_dtype=FP8)), compared=True)
    yield attention(size(SOME_HEADS._replace(cache_dtype=FP8)), compared=True)
    yield attention(size(FEW_HEADS._replace(page_size=16)), compared=True)
    yield attention(size(MANY_HEADS._replace(dtype="float16", cache_dtype="float16")), compared=True)
    yield attention(size(MANY_HEADS._replace(ragged=True)), compared=True)
    yield attention(size(SPARSE), compared=True)
    yield attention(size(SPARSE._replace(cache_dtype=FP8)), compared=True)
    yield attention(size(SPARSE._replace(heads=64)), compared=True)
    yield attention(size(SPARSE._replace(heads=64, cache_dtype=FP8)), compared=True)
    for both in TWO_CACHES:
        yield two_caches(both.small if size(SPARSE) != SPARSE else both)
    yield attention(size(MANY_HEADS), how=PLANNING)
    yield attention(size(ONE), host=True, how=PLANNING)
    yield attention(size(FOUR), how=PLANNING)
    yield attention(size(ONE), host=True, how=OPERATOR)
    for sizes in (MANY_HEADS._replace(ragged=True), ONE, SIZES[-1]):
        yield attention(size(sizes), how=TWICE)
    for batch in (1, 128, 1024):
        yield metadata(batch, host=batch == 128)


def cases(small: bool = False) -> list[Case]:
    """Return cases: many and few heads and sequences, equal and ragged, 16 and 8 bits. `small`: for the reference."""
    return list(_all_cases(lambda sizes: sizes.small if small else sizes))
