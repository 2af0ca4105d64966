"""Latent attention: the kernels, the choice among them, and the launches.

A plan divides the tokens of all sequences into parts. A thread block processes a part for one kv head and one tile of
query rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cukern.reference import mla_decode as twin
from cukern.runtime import arrays, check, gpu, template
from cukern.runtime.describe import Array
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import asked, launch, tensor_map

VARIANTS = ("auto", "wgmma", "mma", "dynamic")
MAX_DIM = 576
THREADS = 256  # per block of attend_mma, and of plan_parts with one step per sequence
_BY_PARTS_THREADS = 384, 768  # per block of plan_parts with one step per part
#: plan_parts tests a cost limit in a chain of dependent steps. The chain has one step per sequence, or one step per
#: part. One step per sequence is faster up to _FEW_SEQUENCES sequences. It is also used above _MANY_SEQUENCES
#: sequences, because then the table that one step per part needs does not fit in shared memory.
_FEW_SEQUENCES, _MANY_SEQUENCES = 48, 4096
_SPAN = f"from {_FEW_SEQUENCES + 1} to {_MANY_SEQUENCES} sequences"
_PLAN_SHARED_BYTES = 99 << 10  # available on every GPU
_TABLE_BYTES = 24 << 10, 640  # minimum, and per sequence, with one step per part

#: (head_dim, head_dim_v) of specialized variants.
SPECIALIZED = [
    (576, 512),  # DeepSeek-V2, V3 and R1, Kimi-K2
]
#: Query rows per block of `attend_mma`.
_ROWS = (16, 32, 64)
_MAX_STAGES = 4
#: Tokens per tile of `attend_mma`, the fastest size first. With an 8-bit cache and 64 rows, more than 32 tokens would
#: need too many registers.
_TILES, _FP8_TILES = (64, 32), {16: (64, 32, 16), 32: (64, 32), 64: (32,)}

#: Up to this many query rows per kv head `attend_mma` is faster than `attend_wgmma` on an H200. The second number is
#: for 8-bit caches.
_FEW_ROWS, _FEW_ROWS_FP8 = 16, 32
#: `attend_wgmma` takes the maximum score of a row before it multiplies by the scale, so the scale must be positive.
_SMALLEST_WGMMA_SCALE = 1e-30
_LARGEST_STRIDE = 2**40  # in bytes, of a tensor map

#: (WARPS_PER_ROW, VECTORS) of `combine_parts`: several blocks per row, one block per row, or one warp per row.
MANY_BLOCKS, ONE_BLOCK, ONE_WARP = (8, 1), (8, 4), (1, 4)
#: Up to 64 query rows there are several blocks per row, so that all multiprocessors have work. From 65 to 512 query
#: rows there is one block per row.
_FEW_COMBINED_ROWS = 64, 512
_COMBINED_COLUMNS = 128  # per block, with several blocks per row
_COMBINE_BLOCKS = 2  # resident per multiprocessor

plan_kernel = Kernel("mla_decode/plan", "plan_parts")
attend_mma = Kernel("mla_decode/attend_mma", "attend_mma")
attend_wgmma = Kernel("mla_decode/attend_wgmma", "attend_wgmma", compile_s=2.5)
attend_two_loaders = Kernel("mla_decode/attend_two_loaders", "attend_two_loaders", compile_s=2.5)
combine = Kernel("mla_decode/combine", "combine_parts")


# --- variants -----------------------------------------------------------------------------------------


class MmaConfig(NamedTuple):
    """The template arguments of `attend_mma`."""

    dtype: str
    is_fp8: bool
    rows: int
    tile: int
    stages: int
    head_dim: int  # 0: dynamic
    head_dim_v: int
    has_extra: bool = False

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block, as in the template's struct `MmaConfig`."""
        dims = self.head_dim or MAX_DIM
        is_fp8 = self.is_fp8 and dims == MAX_DIM  # other tiles are converted to 16 bits
        groups = 2 if is_fp8 or self.rows == 64 else 1
        rings = 2 if is_fp8 and self.rows == 16 else 1
        group_rows, token_ranges = self.rows // groups * rings, 1 if is_fp8 else 2
        row_fragments, dim_ranges = group_rows // 16, 8 // groups // token_ranges
        fragments = self.tile // token_ranges // 8  # of 8 tokens
        owned_fragments = max(fragments // dim_ranges, 1)
        sent = fragments - owned_fragments if fragments >= dim_ranges else fragments
        steps = dims // 16 // dim_ranges
        register_steps = steps if row_fragments == 1 or groups == 1 else 0 if is_fp8 else 4
        scales = twin.LATENT_DIMS // twin.SCALE_DIMS if is_fp8 else 1
        tiles = rings * self.stages * (self.tile * (twin.SLOT_BYTES if is_fp8 else dims * 2) + 32)
        queries = self.rows // 16 * dim_ranges * (steps - register_steps) * 512
        partial_scores = 8 * sent * row_fragments * 512
        probabilities = groups * group_rows * self.tile * 2 * scales
        maxima_and_sums = 2 * 8 * group_rows * 4
        return tiles + queries + partial_scores + probabilities + maxima_and_sums


def best_mma_config(
    dtype: str, is_fp8: bool, group_rows: int, dims: tuple[int, int], max_shared_bytes: int, has_extra: bool = False
) -> MmaConfig:
    """Return the fastest configuration for `group_rows` query rows per kv head. For a dynamic one `dims` is (0, 0)."""
    wanted = next((rows for rows in _ROWS if rows >= group_rows), _ROWS[-1])
    most = _ROWS[-1] if dims[0] else _ROWS[-2]
    for rows in (rows for rows in reversed(_ROWS) if rows <= min(wanted, most)):
        for tile in _FP8_TILES[rows] if is_fp8 and dims[0] == MAX_DIM else _TILES:
            # There are at least two stages, because one is loaded while another is in use.
            for stages in range(_MAX_STAGES, 1, -1):
                config = MmaConfig(dtype, is_fp8, rows, tile, stages, *dims, has_extra)
                if config.shared_bytes <= max_shared_bytes:
                    return config
    raise AssertionError("the smallest configuration fits every GPU")


def mma_variant(config: MmaConfig) -> Variant:
    sizes = config.rows, config.tile, config.stages, config.head_dim, config.head_dim_v
    arguments: list[str | int] = [config.is_fp8, *sizes, *[True] * config.has_extra]
    launched = Launched(THREADS, config.shared_bytes)
    return attend_mma.variant(arrays.CUDA_TYPE[config.dtype], *arguments, launched=launched)


def _max_shared(kernel: Kernel, threads: str) -> Launched:
    """Return the launch configuration of a block that uses all shared memory of its multiprocessor."""
    return Launched(kernel.constant(threads), gpu.BY_ARCH["90a"].shared_per_block)


def wgmma_variant(dtype: str, is_fp8: bool, is_sparse: bool, extra_bytes: int = 0) -> Variant:
    """Return the variant for `extra_bytes` bytes per token of an 8-bit cache. With 0 bytes, EXTRA is false."""
    flags: list[str | int] = [is_fp8, is_sparse]
    if extra_bytes:
        flags += [True] + [extra_bytes] * (extra_bytes != twin.SLOT_BYTES)
    return attend_wgmma.variant(arrays.CUDA_TYPE[dtype], *flags, launched=_max_shared(attend_wgmma, "WGMMA_THREADS"))


def two_loaders_variant(dtype: str, is_fp8: bool, is_sparse: bool) -> Variant:
    arguments = arrays.CUDA_TYPE[dtype], is_fp8, is_sparse
    return attend_two_loaders.variant(*arguments, launched=_max_shared(attend_two_loaders, "TWO_LOADERS_THREADS"))


def plan_threads(sequences: int, parts: int) -> int:
    if parts > plan_kernel.constant("MAX_PARTS") or not _FEW_SEQUENCES < sequences <= _MANY_SEQUENCES:
        return THREADS
    return next(n for n in _BY_PARTS_THREADS if sequences <= n or n == _BY_PARTS_THREADS[-1])


def plan_variant(has_extra: bool, threads: int = THREADS) -> Variant:
    flags: list[str | int] = [True] if has_extra else []
    sequences = 1000  # example size
    shared_bytes, table = plan_shared_bytes(sequences, threads)
    launched = Launched(threads, shared_bytes, (sequences, table), _PLAN_SHARED_BYTES)
    return plan_kernel.variant(threads, *flags, launched=launched)


def plan_shared_bytes(sequences: int, threads: int) -> tuple[int, int]:
    """Return the bytes of shared memory per block, and the bytes of the table in shared memory."""
    constants = template.constants(plan_kernel.file)
    by_sequences, by_parts = constants["BY_SEQUENCES_BYTES"], constants["BY_PARTS_BYTES"]
    if threads == THREADS:
        return by_sequences, 0
    starts = 4 * (sequences + 1)
    most = _PLAN_SHARED_BYTES - by_parts - starts
    table = min(max(sequences * _TABLE_BYTES[1], _TABLE_BYTES[0]), most) // 16 * 16
    return max(by_sequences, by_parts + table + starts), table


def combine_variant(dtype: str, head_dim_v: int, combine_config: tuple[int, int]) -> Variant:
    """Return the variant for `head_dim_v` columns. 0 means any number."""
    warps_per_row, vectors = combine_config
    # If the number of columns is not known, 5 vectors per lane suffice for any row.
    return combine.variant(
        arrays.CUDA_TYPE[dtype], head_dim_v, warps_per_row, vectors if head_dim_v or vectors == 1 else 5
    )


def mma_shared_bytes(of: gpu.Gpu) -> int:
    # On sm_100 the limit is 220 KiB, because the only configuration that takes more would spill registers.
    return min(of.shared_per_block, 220 << 10) if of.arch.startswith("10") else of.shared_per_block


# Only bfloat16 is listed, because float16 compiles to the same instructions with other constants.
attend_mma.specialize_by_arch(
    {
        arch: [
            mma_variant(best_mma_config("bfloat16", is_fp8, rows, dims, mma_shared_bytes(of))).instance
            for dims in SPECIALIZED
            for is_fp8 in (False, True)
            for rows in _ROWS
        ]
        for arch, of in gpu.BY_ARCH.items()
    }
)
attend_wgmma.specialized = [
    wgmma_variant("bfloat16", *flags).instance
    for flags in ((False, False), (True, True, twin.SLOT_BYTES), (True, True, twin.PAGED_SLOT_BYTES))
]
attend_two_loaders.specialized = [
    two_loaders_variant("bfloat16", is_fp8, is_sparse).instance
    for is_fp8, is_sparse in ((True, False), (True, True), (False, True))
]
combine.specialized = [
    combine_variant("bfloat16", 512, combine_config).instance for combine_config in (MANY_BLOCKS, ONE_BLOCK, ONE_WARP)
]
plan_kernel.specialized = [
    plan_variant(has_extra, threads).instance
    for has_extra in (False, True)
    for threads in (THREADS, *_BY_PARTS_THREADS)
]
# Other instances are compiled at their first use, because the fastest ones depend on the GPU.
attend_wgmma.at_import = attend_wgmma.specialized[:1]
combine.at_import = combine.specialized
plan_kernel.at_import = plan_kernel.specialized[:1]


# --- the choice of a variant --------------------------------------------------------------------------


class Work(NamedTuple):
    """A call, without the lengths of its sequences, which only the device knows."""

    dtype: str
    is_fp8: bool
    is_sparse: bool  # each query token is then a sequence
    dims: tuple[int, int]  # (head_dim, head_dim_v)
    kv_heads: int
    rows: int  # per kv head of a sequence
    sequences: int
    parts: int
    has_extra: bool  # a second cache, or topk_length

    @property
    def few_rows(self) -> int:
        return _FEW_ROWS_FP8 if self.is_fp8 else _FEW_ROWS

    @property
    def is_paged(self) -> bool:
        """Whether slots have 584 bytes. A page then has two areas, for elements and for scales."""
        return self.is_fp8 and self.dims[0] == twin.PAGED_DIMS


def no_wgmma(work: Work, k_cache: Array, strides: tuple[int, ...], scale: float, arch: str) -> str:
    """Return why `attend_wgmma` cannot compute the call; empty if it can."""
    if arch != "90a":
        return f"this GPU is of sm_{arch}, not sm_90a"
    if work.dims != (MAX_DIM, twin.LATENT_DIMS) and not work.is_paged:
        return f"heads are of {work.dims[0]} and {work.dims[1]}, not {MAX_DIM} and {twin.LATENT_DIMS}"
    if not (work.is_fp8 or work.is_sparse):
        if not k_cache.shape[0]:
            return "the cache has no pages"
        for size, stride in zip(k_cache.shape[2::-1], reversed(strides), strict=True):
            if size > 1 and not 0 < 2 * stride < _LARGEST_STRIDE:
                return f"k_cache has a stride of {stride} elements"
    return "" if scale >= _SMALLEST_WGMMA_SCALE else f"softmax_scale is below {_SMALLEST_WGMMA_SCALE:g}"


def takes_two_loaders(work: Work) -> bool:
    # TMA can copy neither the tokens of an 8-bit cache nor tokens that indices choose. With an 8-bit cache the queries
    # must be bfloat16, because the kernel does not convert the bfloat16 rotary elements.
    return not work.has_extra and (work.dtype == "bfloat16" if work.is_fp8 else work.is_sparse)


def takes_wgmma(work: Work, variant: str, reason: str) -> bool:
    check.one_of("variant", variant, VARIANTS)
    if variant == "wgmma" and reason:
        check.fail("variant", "'auto', 'mma' or 'dynamic' here", f"'wgmma': {reason}")
    if variant == "mma" and work.dims not in SPECIALIZED and not work.is_fp8:
        got = f"'mma': there is none for heads of {work.dims[0]} and {work.dims[1]}"
        check.fail("variant", "'auto' or 'dynamic' here", got)
    # With few query rows, most of the 64 rows of a wgmma would be unused. With slots of 584 bytes wgmma is used for any
    # number of query rows, because the conversion of elements limits `attend_mma`.
    return variant == "wgmma" or (variant == "auto" and not reason and (work.is_paged or work.rows > work.few_rows))


def why_parts(work: Work, is_given: bool, multiprocessors: int) -> str:
    if is_given:
        return f"{work.parts} parts of the tokens, by the given plan"
    blocks = f"a part is a block for each kv head ({work.kv_heads}) and each {twin.ROWS} rows"
    return f"{work.parts} parts of the tokens, so that {multiprocessors} multiprocessors have work ({blocks})"


def why_attend(work: Work, variant: str, is_wgmma: bool, reason: str) -> str:
    rows = f"{work.rows} query rows for each kv head of a sequence"
    if asked(variant):
        return asked(variant)
    if is_wgmma and work.is_paged:
        return f"slots of {twin.PAGED_SLOT_BYTES} bytes: wgmma for any number of rows"
    if is_wgmma:
        return f"{rows}: wgmma (mma up to {work.few_rows})"
    return f"{rows}: mma, as wgmma cannot: {reason}" if reason else f"{rows}: mma (up to {work.few_rows})"


# --- launches -----------------------------------------------------------------------------------------


class Counts(NamedTuple):
    """How many indices each query token has."""

    query_tokens: int
    topk: int
    topk_length: Array | None = None
    extra_topk: int = 0
    extra_topk_length: Array | None = None

    @property
    def vary(self) -> bool:
        return self.topk_length is not None or self.extra_topk_length is not None


def launch_plan(lengths: Array | None, metadata: Array, splits: Array, counts: Counts, why: str = "") -> None:
    fields: dict[str, Any] = {"lengths": lengths, "metadata": metadata, "splits": splits}
    fields |= {"sequences": splits.shape[0] - 1, "parts": metadata.shape[0]}
    if counts.vary:
        fields |= {"length": counts.topk, "topk_lengths": counts.topk_length, "query_tokens": counts.query_tokens}
        fields |= {"extra_topk": counts.extra_topk, "extra_topk_lengths": counts.extra_topk_length}
    else:
        unused: dict[str, Any] = {"topk_lengths": None, "query_tokens": 1, "extra_topk": 0, "extra_topk_lengths": None}
        fields |= {"length": counts.topk + counts.extra_topk} | unused
    threads = plan_threads(fields["sequences"], fields["parts"])
    shared_bytes, fields["table_bytes"] = plan_shared_bytes(fields["sequences"], threads)
    chain = "sequences" if threads == THREADS else "parts"
    why += (
        f"{fields['sequences']} sequences in {fields['parts']} parts: a chain over the {chain} ({_SPAN} over the parts)"
    )
    launch(plan_variant(counts.vary, threads), 1, threads, shared_bytes, why=why, **fields)


def launch_attention(
    work: Work, variant: str, is_wgmma: bool, k_cache: Array, of: gpu.Gpu, why: str, fields: dict[str, Any]
) -> None:
    """Launch the attention kernel, and the kernel that combines the parts."""
    is_special = (work.dims in SPECIALIZED or work.is_paged) and variant != "dynamic"
    if is_wgmma:
        _launch_wgmma(work, k_cache, why, fields)
    else:
        # An 8-bit cache has specialized dimensions only.
        dims = work.dims if is_special or work.is_fp8 else (0, 0)
        most = mma_shared_bytes(of)
        config = best_mma_config(work.dtype, work.is_fp8, work.rows, dims, most, work.has_extra)
        grid = -(-work.rows // config.rows), work.kv_heads, work.parts
        if not (is_special or work.is_fp8 or asked(variant)):
            heads = ", ".join(f"{dim} and {dim_v}" for dim, dim_v in SPECIALIZED)
            why += f"; dynamic, the slow general kernel: heads of {heads} have a faster one"
        why += f"; {config.rows} rows a block, tiles of {config.tile} tokens in {config.stages} stages"
        why += f" (the best that {most} bytes of shared memory hold)"
        launch(mma_variant(config), grid, why=why, **fields)
    if work.parts > 1:
        combine_config, grid, why = _combine_launch(work, of.multiprocessors)
        head_dim_v = work.dims[1] if is_special else 0
        threads = 32 * combine.constant("COMBINE_WARPS")
        launch(combine_variant(work.dtype, head_dim_v, combine_config), grid, threads, why=why, **fields)


def _launch_wgmma(work: Work, k_cache: Array, why: str, fields: dict[str, Any]) -> None:
    constants = template.constants(attend_wgmma.file)
    pages, page_size, kv_heads, head_dim = k_cache.shape
    tiles, box_tokens = None, 0
    # TMA copies neither tokens that need a conversion nor tokens in arbitrary slots.
    if not (work.is_fp8 or work.is_sparse):
        box_tokens = math.gcd(page_size, twin.BLOCK_TOKENS)
        # A dimension of size 1 may have any stride except 0.
        strides = tuple(2 * (stride or head_dim) for stride in reversed(fields["cache_strides"]))
        dims, box = (head_dim, kv_heads, page_size, pages), (constants["COLUMNS"], 1, box_tokens, 1)
        tiles = tensor_map(k_cache, work.dtype, dims, strides, box)
    slot_bytes = twin.PAGED_SLOT_BYTES if work.is_paged else twin.SLOT_BYTES
    if takes_two_loaders(work):
        variant = two_loaders_variant(work.dtype, work.is_fp8, work.is_sparse)
        of_what = "of an 8-bit cache" if work.is_fp8 else "by indices"
        why += f"; two warpgroups load the tokens {of_what}, which TMA cannot copy"
    else:
        variant = wgmma_variant(work.dtype, work.is_fp8, work.is_sparse, slot_bytes if work.has_extra else 0)
    grid = -(-work.rows // constants["WGMMA_ROWS"]), work.kv_heads, work.parts
    launch(variant, grid, why=why, map=tiles, p=fields, box_tokens=box_tokens)


def _combine_launch(work: Work, multiprocessors: int) -> tuple[tuple[int, int], tuple[int, int, int], str]:
    """Return the template arguments of `combine_parts`, its grid, and the reason."""
    rows = work.sequences * work.rows
    what = f"what {work.parts} parts found is put together: {rows * work.kv_heads} rows"
    if rows * work.kv_heads <= _FEW_COMBINED_ROWS[0]:
        grid = rows, work.kv_heads, -(-work.dims[1] // _COMBINED_COLUMNS)
        each = f"a block for each {_COMBINED_COLUMNS} columns of one (up to {_FEW_COMBINED_ROWS[0]} rows)"
        return MANY_BLOCKS, grid, f"{what}, {each}"
    if rows * work.kv_heads <= _FEW_COMBINED_ROWS[1]:
        return ONE_BLOCK, (rows, work.kv_heads, 1), f"{what}, a block for each (up to {_FEW_COMBINED_ROWS[1]} rows)"
    # If there are about as many sequences as parts, few sequences have several splits. Then most blocks of a full grid
    # would be idle, so the grid is smaller.
    most = -(-work.rows // 8)
    if 2 * work.sequences > work.parts:
        most = min(most, _COMBINE_BLOCKS * multiprocessors // (work.parts * work.kv_heads))
    why = f"{what}, a warp for each (from {_FEW_COMBINED_ROWS[1] + 1} rows on)"
    return ONE_WARP, (max(most, 1), work.kv_heads, work.parts), why
