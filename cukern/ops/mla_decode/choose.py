"""How the calls of latent attention run: the forms and variants of their kernels, and their launches."""

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
THREADS = 256  # of attend_mma, and of plan_parts where it follows the sequences
_BY_PARTS_THREADS = 384, 768  # of plan_parts where it follows the parts
#: Sequences up to which following them takes less time than following the parts, and up to which the latter can be.
_FEW_SEQUENCES, _MOST_LINED_UP = 48, 4096
_SPAN = f"from {_FEW_SEQUENCES + 1} to {_MOST_LINED_UP} sequences"
_PLAN_SHARED_BYTES = 99 << 10  # the shared memory of `plan_parts` that every GPU has
_TABLE_BYTES = 24 << 10, 640  # of the table of places by parts: at least, and for each sequence

#: head_dim and head_dim_v that have variants of their own.
SPECIALIZED = [
    (576, 512),  # DeepSeek-V2, V3 and R1, Kimi-K2
]
#: ROWS of `attend_mma`; the most only where dimensions are specialized.
_ROWS = (16, 32, 64)
_MOST_STAGES = 4
#: TILE of `attend_mma`, the better first. With the most rows, larger tiles of an 8-bit cache need too many registers.
_TILES, _FP8_TILES = (64, 32), {16: (64, 32, 16), 32: (64, 32), 64: (32,)}

#: Rows of a kv head up to which `attend_mma` is faster, measured on an H200: over a cache of 16 and of 8 bits.
_FEW_ROWS, _FEW_ROWS_FP8 = 16, 32
#: `attend_wgmma` looks for the largest product of a row before it multiplies by the scale, which must then be positive.
_SMALLEST_WGMMA_SCALE = 1e-30
_LARGEST_STRIDE = 2**40  # bytes, of a tensor map

#: TEAM and EACH of `combine_parts`: several blocks put a row together, or one block, or one warp.
MANY_BLOCKS, ONE_BLOCK, ONE_WARP = (8, 1), (8, 4), (1, 4)
#: Rows up to which it takes several blocks for each to keep the GPU busy, and those up to which it takes one.
_FEW_COMBINED_ROWS = 64, 512
_COMBINED_COLUMNS = 128  # of a row, that a block puts together where several do
_COMBINING_BLOCKS = 2  # per multiprocessor, at once

plan_kernel = Kernel("mla_decode/plan", "plan_parts")
attend_mma = Kernel("mla_decode/attend_mma", "attend_mma")
attend_wgmma = Kernel("mla_decode/attend_wgmma", "attend_wgmma", compile_s=2.5)
attend_two_loaders = Kernel("mla_decode/attend_two_loaders", "attend_two_loaders", compile_s=2.5)
combine = Kernel("mla_decode/combine", "combine_parts")


# --- variants -----------------------------------------------------------------------------------------


class Form(NamedTuple):
    """Template arguments of `attend_mma`."""

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
        """The shared memory of a block, computed as in the struct `Form` of the template."""
        dims = self.head_dim or MAX_DIM
        is_fp8 = self.is_fp8 and dims == MAX_DIM  # another 8-bit cache is converted to 16 bits first
        groups = 2 if is_fp8 or self.rows == 64 else 1
        rings = 2 if is_fp8 and self.rows == 16 else 1
        group_rows, halves = self.rows // groups * rings, 1 if is_fp8 else 2
        fragments_of_rows, depths = group_rows // 16, 8 // groups // halves
        fragments = self.tile // halves // 8  # of a warp's tokens
        own = max(fragments // depths, 1)
        sent = fragments - own if fragments >= depths else fragments
        steps = dims // 16 // depths
        kept_steps = steps if fragments_of_rows == 1 or groups == 1 else 0 if is_fp8 else 4
        scales = twin.LATENT_DIMS // twin.SCALE_DIMS if is_fp8 else 1
        tiles = rings * self.stages * (self.tile * (twin.SLOT_BYTES if is_fp8 else dims * 2) + 32)
        queries = self.rows // 16 * depths * (steps - kept_steps) * 512
        partial_scores = 8 * sent * fragments_of_rows * 512
        probabilities = groups * group_rows * self.tile * 2 * scales
        maxima_and_sums = 2 * 8 * group_rows * 4
        return tiles + queries + partial_scores + probabilities + maxima_and_sums


def best_form(
    dtype: str, is_fp8: bool, group_rows: int, dims: tuple[int, int], most_shared_bytes: int, has_extra: bool = False
) -> Form:
    """The best form for `group_rows` rows of a kv head, with at most `most_shared_bytes` for a block.

    `dims` are 0 where they are dynamic.
    """
    wanted = next((rows for rows in _ROWS if rows >= group_rows), _ROWS[-1])
    most = _ROWS[-1] if dims[0] else _ROWS[-2]
    for rows in (rows for rows in reversed(_ROWS) if rows <= min(wanted, most)):
        for tile in _FP8_TILES[rows] if is_fp8 and dims[0] == MAX_DIM else _TILES:
            # At least two: a tile must come while another is in use.
            for stages in range(_MOST_STAGES, 1, -1):
                form = Form(dtype, is_fp8, rows, tile, stages, *dims, has_extra)
                if form.shared_bytes <= most_shared_bytes:
                    return form
    raise AssertionError("the smallest form fits every GPU")


def mma_variant(form: Form) -> Variant:
    sizes = form.rows, form.tile, form.stages, form.head_dim, form.head_dim_v
    arguments: list[str | int] = [str(form.is_fp8).lower(), *sizes, *["true"] * form.has_extra]
    launched = Launched(THREADS, form.shared_bytes)
    return attend_mma.variant(arrays.CUDA_TYPE[form.dtype], *arguments, launched=launched)


def _alone(kernel: Kernel, threads: str) -> Launched:
    """What a block is launched with that has a multiprocessor for itself."""
    return Launched(template.constants(kernel.file)[threads], gpu.BY_ARCH["90a"].shared_per_block)


def wgmma_variant(dtype: str, is_fp8: bool, is_sparse: bool, extra_bytes: int = 0) -> Variant:
    """The variant of `attend_wgmma`; `extra_bytes` is 0, or with EXTRA the bytes of a token of an 8-bit cache."""
    flags: list[str | int] = [str(is_fp8).lower(), str(is_sparse).lower()]
    if extra_bytes:
        flags += ["true"] + [extra_bytes] * (extra_bytes != twin.SLOT_BYTES)
    return attend_wgmma.variant(arrays.CUDA_TYPE[dtype], *flags, launched=_alone(attend_wgmma, "WGMMA_THREADS"))


def two_loaders_variant(dtype: str, is_fp8: bool, is_sparse: bool) -> Variant:
    arguments = arrays.CUDA_TYPE[dtype], str(is_fp8).lower(), str(is_sparse).lower()
    return attend_two_loaders.variant(*arguments, launched=_alone(attend_two_loaders, "TWO_LOADERS_THREADS"))


def plan_threads(sequences: int, parts: int) -> int:
    """Threads of `plan_parts`: more than 256 where it follows the parts."""
    if parts > template.constants(plan_kernel.file)["MOST_PARTS"] or not _FEW_SEQUENCES < sequences <= _MOST_LINED_UP:
        return THREADS
    return next(n for n in _BY_PARTS_THREADS if sequences <= n or n == _BY_PARTS_THREADS[-1])


def plan_variant(has_extra: bool, threads: int = THREADS) -> Variant:
    flags: list[str | int] = ["true"] if has_extra else []
    sequences = 1000  # an example of many
    shared_bytes, table = plan_shared_bytes(sequences, threads)
    launched = Launched(threads, shared_bytes, (sequences, table), _PLAN_SHARED_BYTES)
    return plan_kernel.variant(threads, *flags, launched=launched)


def plan_shared_bytes(sequences: int, threads: int) -> tuple[int, int]:
    """The shared memory of `plan_parts`, and the table of `plan_by_parts` in it; 0 where that is not taken."""
    constants = template.constants(plan_kernel.file)
    by_sequences, by_parts = constants["BY_SEQUENCES_BYTES"], constants["BY_PARTS_BYTES"]
    if threads == THREADS:
        return by_sequences, 0
    starts = 4 * (sequences + 1)
    most = _PLAN_SHARED_BYTES - by_parts - starts
    table = min(max(sequences * _TABLE_BYTES[1], _TABLE_BYTES[0]), most) // 16 * 16
    return max(by_sequences, by_parts + table + starts), table


def combine_variant(dtype: str, head_dim_v: int, team_each: tuple[int, int]) -> Variant:
    """The variant of `combine_parts`; `head_dim_v` is 0 where it is dynamic."""
    team, each = team_each
    # Where a row's columns are not divided among blocks, EACH is enough for the most of them.
    return combine.variant(arrays.CUDA_TYPE[dtype], head_dim_v, team, each if head_dim_v or each == 1 else 5)


def mma_shared_bytes(of: gpu.Gpu) -> int:
    """The most shared memory that a block of `attend_mma` takes."""
    # The form that takes more than that spills on sm_100, not on sm_90.
    return min(of.shared_per_block, 220 << 10) if of.arch.startswith("10") else of.shared_per_block


# Both formats compile to the same instructions but for constants.
attend_mma.specialize_by_arch(
    {
        arch: [
            mma_variant(best_form("bfloat16", is_fp8, rows, dims, mma_shared_bytes(of))).instance
            for dims in SPECIALIZED
            for is_fp8 in (False, True)
            for rows in _ROWS
        ]
        for arch, of in gpu.BY_ARCH.items()
    }
)
attend_wgmma.specialized = [
    wgmma_variant("bfloat16", False, False).instance,
]
attend_wgmma.specialized += [
    wgmma_variant("bfloat16", True, True, extra_bytes).instance
    for extra_bytes in (twin.SLOT_BYTES, twin.PAGED_SLOT_BYTES)
]
attend_two_loaders.specialized = [
    two_loaders_variant("bfloat16", is_fp8, is_sparse).instance
    for is_fp8, is_sparse in ((True, False), (True, True), (False, True))
]
combine.specialized = [combine_variant("bfloat16", 512, form).instance for form in (MANY_BLOCKS, ONE_BLOCK, ONE_WARP)]
plan_kernel.specialized = [
    plan_variant(has_extra, threads).instance
    for has_extra in (False, True)
    for threads in (THREADS, *_BY_PARTS_THREADS)
]
# The rest is compiled at its first use: what is best depends on the GPU.
attend_wgmma.at_import = attend_wgmma.specialized[:1]
combine.at_import = combine.specialized
plan_kernel.at_import = plan_kernel.specialized[:1]


# --- the choice of a variant --------------------------------------------------------------------------


class Work(NamedTuple):
    """What a call does; what depends on the lengths is left to the device."""

    dtype: str
    is_fp8: bool
    is_sparse: bool  # with indices: each query token is a sequence of its own
    dims: tuple[int, int]  # head_dim and head_dim_v
    kv_heads: int
    rows: int  # query rows that share a kv head of a sequence
    sequences: int
    parts: int
    has_extra: bool  # a second cache, or numbers of the indices that count

    @property
    def few_rows(self) -> int:
        """The most rows that `attend_mma` is faster with."""
        return _FEW_ROWS_FP8 if self.is_fp8 else _FEW_ROWS

    @property
    def is_paged(self) -> bool:
        """Whether the pages of an 8-bit cache are in two parts, as for heads of 512."""
        return self.is_fp8 and self.dims[0] == twin.PAGED_DIMS


def no_wgmma(work: Work, k_cache: Array, strides: tuple[int, ...], scale: float, arch: str) -> str:
    """The reason why `attend_wgmma` cannot do it; empty where it can."""
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
    """Whether `attend_two_loaders` does what `attend_wgmma` could: TMA does not copy the tokens."""
    # The rotary part of an 8-bit cache is copied as it is, in bfloat16.
    return not work.has_extra and (work.dtype == "bfloat16" if work.is_fp8 else work.is_sparse)


def takes_wgmma(work: Work, variant: str, reason: str) -> bool:
    """Whether `attend_wgmma` does it; `reason` says why it cannot.

    Raises ValueError for a variant that cannot do it.
    """
    check.one_of("variant", variant, VARIANTS)
    if variant == "wgmma" and reason:
        check.fail("variant", "'auto', 'mma' or 'dynamic' here", f"'wgmma': {reason}")
    if variant == "mma" and work.dims not in SPECIALIZED and not work.is_fp8:
        got = f"'mma': there is none for heads of {work.dims[0]} and {work.dims[1]}"
        check.fail("variant", "'auto' or 'dynamic' here", got)
    # Few rows leave most of a product of 64 unused, and memory is what takes the time. `attend_mma` waits while it
    # converts the pages of two parts, for any number of rows.
    return variant == "wgmma" or (variant == "auto" and not reason and (work.is_paged or work.rows > work.few_rows))


def why_parts(work: Work, is_given: bool, multiprocessors: int) -> str:
    """The reason for the number of parts; `is_given`: the caller's plan has them."""
    if is_given:
        return f"{work.parts} parts of the tokens, by the given plan"
    blocks = f"a part is a block for each kv head ({work.kv_heads}) and each {twin.ROWS} rows"
    return f"{work.parts} parts of the tokens, so that {multiprocessors} multiprocessors have work ({blocks})"


def why_attend(work: Work, variant: str, is_wgmma: bool, reason: str) -> str:
    """Why `attend_wgmma` or `attend_mma` does it; `reason` says why the former cannot."""
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
    """The numbers of indices that count, of both caches."""

    query_tokens: int
    topk: int
    topk_length: Array | None = None
    extra_topk: int = 0
    extra_topk_length: Array | None = None

    @property
    def vary(self) -> bool:
        return self.topk_length is not None or self.extra_topk_length is not None


def launch_plan(lengths: Array | None, metadata: Array, splits: Array, counts: Counts, why: str = "") -> None:
    """Make a plan of the lengths, or of a number of indices for each sequence; `why` begins the reason."""
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
    """Attend, and put together what several parts found; `fields` are those of the struct Params."""
    is_special = (work.dims in SPECIALIZED or work.is_paged) and variant != "dynamic"
    if is_wgmma:
        _launch_wgmma(work, k_cache, why, fields)
    else:
        # For an 8-bit cache there are no others.
        dims = work.dims if is_special or work.is_fp8 else (0, 0)
        most = mma_shared_bytes(of)
        form = best_form(work.dtype, work.is_fp8, work.rows, dims, most, work.has_extra)
        grid = -(-work.rows // form.rows), work.kv_heads, work.parts
        if not (is_special or work.is_fp8 or asked(variant)):
            heads = ", ".join(f"{dim} and {dim_v}" for dim, dim_v in SPECIALIZED)
            why += f"; dynamic, the slow general kernel: heads of {heads} have a faster one"
        why += f"; {form.rows} rows a block, tiles of {form.tile} tokens in {form.stages} stages"
        why += f" (the best that {most} bytes of shared memory hold)"
        launch(mma_variant(form), grid, why=why, **fields)
    if work.parts > 1:
        team_each, grid, why = _combining(work, of.multiprocessors)
        head_dim_v = work.dims[1] if is_special else 0
        threads = 32 * template.constants(combine.file)["COMBINE_WARPS"]
        launch(combine_variant(work.dtype, head_dim_v, team_each), grid, threads, why=why, **fields)


def _launch_wgmma(work: Work, k_cache: Array, why: str, fields: dict[str, Any]) -> None:
    constants = template.constants(attend_wgmma.file)
    pages, page_size, kv_heads, head_dim = k_cache.shape
    tiles, box_tokens = None, 0
    # TMA can copy neither tokens that must be converted nor tokens that lie anywhere.
    if not (work.is_fp8 or work.is_sparse):
        box_tokens = math.gcd(page_size, twin.BLOCK_TOKENS)
        # Any stride but 0 will do along a dimension of size 1.
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


def _combining(work: Work, multiprocessors: int) -> tuple[tuple[int, int], tuple[int, int, int], str]:
    """TEAM and EACH of `combine_parts`, its grid, and why."""
    rows = work.sequences * work.rows
    what = f"what {work.parts} parts found is put together: {rows * work.kv_heads} rows"
    if rows * work.kv_heads <= _FEW_COMBINED_ROWS[0]:
        grid = rows, work.kv_heads, -(-work.dims[1] // _COMBINED_COLUMNS)
        each = f"a block for each {_COMBINED_COLUMNS} columns of one (up to {_FEW_COMBINED_ROWS[0]} rows)"
        return MANY_BLOCKS, grid, f"{what}, {each}"
    if rows * work.kv_heads <= _FEW_COMBINED_ROWS[1]:
        return ONE_BLOCK, (rows, work.kv_heads, 1), f"{what}, a block for each (up to {_FEW_COMBINED_ROWS[1]} rows)"
    # Where there are about as many sequences as parts, few are in several of them: most blocks have nothing to do.
    most = -(-work.rows // 8)
    if 2 * work.sequences > work.parts:
        most = min(most, _COMBINING_BLOCKS * multiprocessors // (work.parts * work.kv_heads))
    why = f"{what}, a warp for each (from {_FEW_COMBINED_ROWS[1] + 1} rows on)"
    return ONE_WARP, (max(most, 1), work.kv_heads, work.parts), why
