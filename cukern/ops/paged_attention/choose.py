"""Paged attention: the kernels, the assignment of work items to thread blocks, and the launch.

A work item is a sequence, one of its kv heads, and a tile of query rows. A split is a range of an item's tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.ops.paged_attention.checks import LAYOUTS, MAX_BLOCK_SIZE, Call, Sizes, Sparse
from cukern.runtime import arrays, check, template
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Array
from cukern.runtime.gpu import BY_ARCH, CLUSTERED_ARCHS, Gpu
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.op import forget_plans
from cukern.runtime.plan import asked, empty, launch

VARIANTS = ("auto", "specialized", "dynamic", "scalar")
_DIMS = 64, 128, 256  # largest head_dim of a dynamic instance
#: The kernels index splits and query rows with 32 bits.
MAX_UNITS = 2**31 - 2**16
_MAX_BLOCKS = 2  # resident per multiprocessor, for `attend_scalar` and by default for `attend`
_TILE_TOKENS, _UNIT_BYTES = 16, 16  # on tensor cores, tokens per cache block and bytes per head are multiples of these
_RESERVED_SHARED = 1024  # bytes of shared memory per block
#: The smallest split in the queue, in units of UNIT_TOKENS tokens (tuned on an H200).
_MIN_UNITS = 4
#: Blocks per cluster if each item gets a cluster. Larger clusters are slower on an H200.
_BLOCKS_PER_ITEM = 2
#: If the block table has room for at most this many tokens per sequence, one cluster per item is faster than a queue of
#: splits, whatever the lengths are.
_EVEN_TOKENS = 2048
_ARE_EVEN = f"is even enough (up to {_EVEN_TOKENS})"
#: If the block table has room for at most this many tokens per warp of an item, it is not faster to multiply two tiles
#: at once.
_AT_ONCE_TOKENS = 64
#: Up to this many query rows per kv head are the columns (N) of the MMA.
_FEW_ROWS = 8
#: If there are at most this many items per resident block, each item gets its own block. With more items, it takes too
#: long to start the blocks.
_BLOCK_ITEMS = 4

#: head_dim of specialized variants, and models that have it.
MODELS = {
    64: "GPT-OSS, Qwen2-0.5B, Llama-3.2-1B",
    80: "Phi-2, Qwen2-VL's vision tower",
    96: "Phi-3-mini",
    112: "Zamba, Yi-VL",
    120: "H2O-Danube",
    128: "Llama, Qwen, Mistral",
    192: "Nemotron",
    256: "Gemma",
}
#: (head_dim, block_size) of specialized variants.
SPECIALIZED = [(head_dim, block_size) for head_dim in MODELS for block_size in (16, 32, 64)]
CUDA_TYPE = {**arrays.CUDA_TYPE, "float8_e4m3fn": "__nv_fp8_e4m3", "float8_e5m2": "__nv_fp8_e5m2"}

_attend = Kernel("paged_attention/attend", "attend", compile_s=1.1)
scalar = Kernel("paged_attention/attend_scalar", "attend_scalar")
_clear_counters = Kernel("paged_attention/clear_counters", "clear_counters")
_CLEAR_THREADS = 256  # threads per block of `clear_counters`
_clear_counters.at_import = [_clear_counters.variant(_CLEAR_THREADS).instance]


def unit_tokens() -> int:
    """Return the number of tokens in a unit. Splits are multiples of a unit."""
    return _attend.constant("UNIT_TOKENS")


class Schedule(NamedTuple):
    """The assignment of work items to blocks."""

    cluster: int = 1  # blocks
    scheduling: str = "QUEUE"  # template argument: QUEUE, CLUSTERS or EITHER
    wide: bool = False  # one block per multiprocessor, with twice the warps of a narrow block
    # A multiprocessor has room for 2 narrow blocks with 100 KiB of stages each, 3 with 68 KiB, or 4 with 50 KiB.
    stage_kib: int = 100
    at_once: int = 1  # tiles that a team of warps multiplies at once
    fit: int = _MAX_BLOCKS  # narrow blocks per multiprocessor, by registers


_QUEUE = Schedule()
#: {largest number of items: schedule}, measured on an H200. All clusters must be resident at once. An H200 has room for
#: 15 clusters of 8 wide blocks, 30 clusters of 4 or 66 clusters of 2, and for at least twice as many clusters of narrow
#: blocks. Clusters of 16 blocks start sooner with 68 KiB of stages than with more.
_FEW_ITEMS = {
    7: Schedule(16, "CLUSTERS", False, 68),
    15: Schedule(8, "CLUSTERS", True, 200),
    30: Schedule(4, "CLUSTERS", True, 200),
    32: Schedule(2, "CLUSTERS", True, 200),
}
#: With an 8-bit cache the dependent instructions for a tile take longer than its load. If a team multiplies two tiles
#: at once, their instructions overlap.
_FEW_ITEMS_FP8 = {
    7: Schedule(16, "CLUSTERS", False, 68, 2),
    15: Schedule(8, "CLUSTERS", True, 200, 2),
    16: Schedule(8, "CLUSTERS", False, 68, 2),
    32: Schedule(4, "CLUSTERS", False, 68, 2),
}
#: For one block per item, with an 8-bit cache and up to 8 rows per kv head. Four blocks are resident on a
#: multiprocessor, and their dependent instructions overlap.
_BLOCK_PER_ITEM_FP8 = Schedule(1, "EITHER", False, 50, fit=4)
#: For a head_dim above 128. There are no wide blocks for it.
_FEW_ITEMS_LARGE_HEADS = {n: Schedule(128 // n, "CLUSTERS", False, 68) for n in (8, 16, 32)}


class AttendConfig(NamedTuple):
    dtype: str
    cache: str
    layout: str
    head_dim: int  # 0: dynamic
    dims: int  # head_dim rounded up to a multiple of 16, or if it is dynamic to one of _DIMS
    block_size: int  # 0: dynamic
    team: int
    extras: bool
    schedule: Schedule = _QUEUE
    rows: int = 16  # per warp: 8 are the N side of the MMA

    @property
    def warps(self) -> int:
        return (2 if self.dims > 128 else 4) << self.schedule.wide

    @property
    def fit(self) -> int:
        return 1 if self.schedule.wide else self.schedule.fit

    @property
    def _stage_bytes(self) -> int:
        """The bytes of a stage: a tile of keys and a tile of values for each team."""
        chunks = self.dims * arrays.ITEM_SIZE[self.cache] // 16
        if self.layout == "flash" and chunks % 8:
            chunks |= 1
        return self.warps // self.team * 2 * 16 * 16 * chunks

    @property
    def stages(self) -> int:
        # With a head_dim above 128, shared memory has room for two stages.
        kib = 68 if self.dims > 128 else self.schedule.stage_kib
        return min(max((kib << 10) // self._stage_bytes, 2), 4)

    def shared_bytes(self, rows: int) -> int:
        """Return the bytes of shared memory of a block. Partial results of `rows` rows overwrite the last stage."""
        results = self.warps // self.team * rows * (self.dims + self.rows // 2) * 4
        found = (self.stages - 1) * self._stage_bytes + max(self._stage_bytes, results)
        cluster = self.schedule.cluster
        if cluster == 1:
            return found
        quads = -(-rows * self.dims // 4 // cluster) * cluster
        return found + quads * 16 + cluster * rows * 8

    @property
    def static_bytes(self) -> int:
        """Return an upper bound for the static shared memory."""
        query = self.dims // 16 * 512 * self.warps if self.dims * self.rows > 128 * 16 else 0
        return 128 + 8 * self.rows * self.warps + query

    @property
    def variant(self) -> Variant:
        most_rows = self.rows * self.team
        most = self.shared_bytes(most_rows)
        return _attend.variant(
            CUDA_TYPE[self.dtype],
            CUDA_TYPE[self.cache],
            self.layout.upper(),
            self.head_dim,
            self.dims,
            self.block_size,
            self.team,
            self.extras,
            self.stages,
            self.schedule.cluster,
            self.warps,
            self.schedule.scheduling,
            self.schedule.at_once,
            self.rows,
            self.fit,
            launched=Launched(32 * self.warps, most, (most_rows,), most),
            large_clusters=self.schedule.cluster > 8,
        )


def specialized_config(
    dtype: str,
    cache: str,
    layout: str,
    head_dim: int,
    block_size: int,
    team: int = 1,
    extras: bool = False,
    schedule: Schedule = _QUEUE,
    rows: int = 16,
) -> AttendConfig:
    dims = -(-head_dim // 16) * 16
    return AttendConfig(dtype, cache, layout, head_dim, dims, block_size, team, extras, schedule, rows)


def _same_dtype_instances(head_dim: int, block_size: int) -> list[Instance]:
    return [
        specialized_config(dtype, dtype, layout, head_dim, block_size).variant.instance
        for dtype in ("bfloat16", "float16")
        for layout in LAYOUTS
    ]


# A test checks that these instances do not spill registers. Other block sizes and float16 differ only in constants.
_many_row_instances = [
    specialized_config("bfloat16", cache, layout, head_dim, 16, team).variant.instance
    for layout in LAYOUTS
    for cache, head_dim, team in [
        *(("bfloat16", head_dim, 1) for head_dim in sorted({d for d, _ in SPECIALIZED})),
        ("bfloat16", 128, 2),
        ("bfloat16", 128, 4),
        ("float8_e4m3fn", 128, 1),
        ("float8_e5m2", 128, 1),
    ]
]
_few_row_instances = [
    specialized_config("bfloat16", cache, layout, 128, 16, 1, False, schedule, _FEW_ROWS).variant.instance
    for cache, layout, schedule in [
        ("bfloat16", "flash", _FEW_ITEMS[15]),
        ("bfloat16", "vllm", Schedule(_BLOCKS_PER_ITEM, "EITHER")),
        ("float8_e4m3fn", "vllm", _FEW_ITEMS_FP8[15]),
        *(("float8_e4m3fn", layout, _BLOCK_PER_ITEM_FP8) for layout in LAYOUTS),
    ]
]
_attend.specialize_by_arch(
    {arch: _many_row_instances + _few_row_instances * (arch in CLUSTERED_ARCHS) for arch in BY_ARCH}
)
_attend.at_import = _same_dtype_instances(128, 16)

_registered = set(SPECIALIZED)


def specialize(*, head_dim: int, block_size: int) -> list[Instance]:
    """Register variants for these sizes in this process, and return their instances; see `cukern.specialize`.

    The instances are for up to 16 query rows per kv head, a cache of the query's dtype, and calls without softcap,
    slopes and block-sparse pattern. Other variants are compiled at their first use.

    Raises ValueError unless head_dim is a multiple of 8 and at most 256, and block_size is a multiple of 16.
    """
    check.integer("head_dim", head_dim, 8, _DIMS[-1])
    if head_dim % 8:
        check.fail("head_dim", "a multiple of 8", head_dim)
    check.integer("block_size", block_size, 16, MAX_BLOCK_SIZE)
    if block_size % 16:
        check.fail("block_size", "a multiple of 16", block_size)
    _registered.add((head_dim, block_size))
    forget_plans()
    return _same_dtype_instances(head_dim, block_size)


# --- how the work is assigned to blocks ---------------------------------------------------------------


class Request(NamedTuple):
    dtype: str
    cache: str  # of the cached elements
    layout: str
    sizes: Sizes
    extras: bool  # softcap, ALiBi slopes or a block-sparse pattern
    split: int  # tokens; 0: the device decides
    vllm_workspace: bool
    aligned: bool  # all addresses and strides are multiples of 16 bytes
    variant: str

    @property
    def group_rows(self) -> int:
        return self.sizes.query_tokens * (self.sizes.heads // self.sizes.kv_heads)

    @property
    def few_rows(self) -> bool:
        return self.group_rows <= _FEW_ROWS


class _KernelConfig(NamedTuple):
    variant: Variant
    threads: int
    shared_bytes: int
    rows: int  # per work item
    blocks: int  # resident per multiprocessor
    why: str
    schedule: Schedule = _QUEUE


class LaunchPlan(NamedTuple):
    variant: Variant
    blocks: int
    threads: int
    shared_bytes: int
    rows: int  # per partial result
    row_blocks: int
    slots: int  # rows of all partial results
    counters: int
    why: str
    shares: int = 0  # blocks that take splits from the queue


def _why_scalar(x: Request) -> str:
    """Return why tensor cores cannot compute a call; empty if they can."""
    if x.dtype == "float32":
        return "float32 is not computed on tensor cores"
    if x.sizes.head_dim > _DIMS[-1]:
        return f"heads of {x.sizes.head_dim} are larger than {_DIMS[-1]}"
    if x.sizes.block_size % _TILE_TOKENS:
        return f"blocks of {x.sizes.block_size} tokens are no multiple of {_TILE_TOKENS}"
    if x.sizes.head_dim * arrays.ITEM_SIZE[x.cache] % _UNIT_BYTES:
        return f"a head of {x.sizes.head_dim} in {x.cache} is no multiple of {_UNIT_BYTES} bytes"
    return "" if x.aligned else "an array or one of its strides is no multiple of 16 bytes"


def _choose(gpu: Gpu, x: Request) -> _KernelConfig:
    check.one_of("variant", x.variant, VARIANTS)
    head_dim, block_size = x.sizes.head_dim, x.sizes.block_size
    reason = _why_scalar(x)
    if x.variant in ("specialized", "dynamic") and reason:
        check.fail("variant", "'auto' or 'scalar' here", f"{x.variant!r}: {reason}")
    if x.variant == "specialized" and (head_dim, block_size) not in _registered:
        got = f"'specialized': there is none for heads of {head_dim} and blocks of {block_size} tokens"
        check.fail("variant", "'auto', 'dynamic' or 'scalar' here", f"{got} (cukern.specialize adds one)")
    return _choose_scalar(x, reason) if x.variant == "scalar" or reason else _choose_attend(gpu, x)


def _choose_scalar(x: Request, reason: str) -> _KernelConfig:
    constants = template.constants("paged_attention/attend_scalar")
    large = [constants["MAX_DIM"]] * (x.sizes.head_dim > constants["USUAL_DIM"])
    variant = scalar.variant(CUDA_TYPE[x.dtype], CUDA_TYPE[x.cache], x.layout.upper(), x.aligned, *large)
    fast = (
        f"16-bit queries, heads of whole {_UNIT_BYTES} bytes up to {_DIMS[-1]}, blocks of multiples of {_TILE_TOKENS}"
    )
    why = (
        asked(x.variant) or f"attend_scalar, the slow general kernel: {reason} (tensor cores take {fast}, all aligned)"
    )
    return _KernelConfig(variant, 32 * constants["WARPS"], 0, constants["ROWS"], _MAX_BLOCKS, why)


def _choose_attend(gpu: Gpu, x: Request) -> _KernelConfig:
    sizes = x.sizes
    most_warps = 2 if sizes.head_dim > 128 else 4
    team = next(n for n in (1, 2, 4) if 16 * n >= x.group_rows or n == most_warps)
    items = max(1, sizes.seqs) * sizes.kv_heads * -(-x.group_rows // (16 * team))
    schedule, reason = _schedule_of(gpu, x, items)
    # With scheduling `QUEUE`, which a call with `split` has, a warp always processes 16 rows. So the order of a row's
    # additions is the same in any batch.
    rows = _FEW_ROWS if x.few_rows and schedule.scheduling != "QUEUE" else 16
    of_sizes = f"heads of {sizes.head_dim} and blocks of {sizes.block_size} tokens"
    is_own = (sizes.head_dim, sizes.block_size) in SPECIALIZED
    why = f"{of_sizes}: specialized ({MODELS[sizes.head_dim] if is_own else 'by cukern.specialize'})"
    if (sizes.head_dim, sizes.block_size) in _registered and x.variant != "dynamic":
        config = specialized_config(
            x.dtype, x.cache, x.layout, sizes.head_dim, sizes.block_size, team, x.extras, schedule, rows
        )
    else:
        dims = next(n for n in _DIMS if n >= sizes.head_dim)
        config = AttendConfig(x.dtype, x.cache, x.layout, 0, dims, 0, team, x.extras, schedule, rows)
        own = f"head_dim={sizes.head_dim}, block_size={sizes.block_size}"
        why = f"dynamic: no instance has {of_sizes} (cukern.specialize('paged_attention', {own}) makes one)"
    shared_bytes = config.shared_bytes(min(rows * team, x.group_rows))
    block_bytes = shared_bytes + config.static_bytes + _RESERVED_SHARED
    blocks = max(1, min(config.fit, gpu.shared_per_multiprocessor // block_bytes))
    why = f"{asked(x.variant) or why}; {x.group_rows} rows for each kv head: {rows} a warp, teams of {team}; {reason}"
    return _KernelConfig(config.variant, 32 * config.warps, shared_bytes, rows * team, blocks, why, schedule)


def _schedule_of(gpu: Gpu, x: Request, items: int) -> tuple[Schedule, str]:
    if x.vllm_workspace:
        return (
            _QUEUE,
            f"partitions of {x.split} tokens for the given workspaces (paged_attention takes none and no such cuts)",
        )
    if x.split:
        return _QUEUE, f"split={x.split} cuts the tokens, and blocks draw the pieces"
    # Only data-center GPUs have clusters of 16 blocks and the shared memory for them.
    if gpu.arch not in CLUSTERED_ARCHS:
        return _QUEUE, f"blocks draw pieces of equal shares, as sm_{gpu.arch} has no clusters of this size"
    large, fp8_cache = x.sizes.head_dim > 128, arrays.ITEM_SIZE[x.cache] == 1
    few = _FEW_ITEMS_LARGE_HEADS if large else _FEW_ITEMS_FP8 if fp8_cache else _FEW_ITEMS
    max_tokens = x.sizes.max_blocks * x.sizes.block_size
    what = f"{items} items (sequences, times kv heads, times blocks of rows)"
    for most, schedule in few.items():
        if items <= most:
            is_short = max_tokens <= _AT_ONCE_TOKENS * schedule.cluster * (4 << schedule.wide)
            why = f"{what}: a cluster of {schedule.cluster} blocks for each (up to {most} items)"
            return schedule._replace(at_once=1) if is_short else schedule, why
    blocks, resident = _BLOCKS_PER_ITEM * items, _MAX_BLOCKS * gpu.multiprocessors
    at_once = 2 if fp8_cache and not large else 1
    if resident < items <= _BLOCK_ITEMS * resident and not large:
        schedule = _BLOCK_PER_ITEM_FP8 if fp8_cache and x.few_rows else Schedule(1, "EITHER", at_once=at_once)
        why = f"{what}: a block for each (from {resident + 1} to {_BLOCK_ITEMS * resident} items)"
        if max_tokens <= _EVEN_TOKENS:
            return schedule._replace(scheduling="CLUSTERS"), f"{why}, as room for {max_tokens} tokens {_ARE_EVEN}"
        return schedule, f"{why}, or a queue where the lengths are uneven"
    if blocks > resident:
        more = f"{_BLOCKS_PER_ITEM} blocks for each are more than the {resident} that run at once"
        return _QUEUE, f"{what}: blocks draw pieces of equal shares, as {more}"
    wide = blocks <= gpu.multiprocessors and not large
    why = f"{what}: a cluster of {_BLOCKS_PER_ITEM} blocks for each (up to {resident // _BLOCKS_PER_ITEM} items)"
    if max_tokens <= _EVEN_TOKENS:
        even = f"{why}, as room for {max_tokens} tokens {_ARE_EVEN}"
        return Schedule(_BLOCKS_PER_ITEM, "CLUSTERS", wide, 100 << wide, at_once), even
    # With 136 KiB a wide block has two stages of 64 KiB, which are faster than three stages on an H200. With an 8-bit
    # cache, 8 sequences of 8192 tokens take 39.8 us with clusters of two blocks and 45.4 us with the queue. For unequal
    # lengths clusters take at most 6% longer than the queue.
    why += ", or a queue where the lengths are uneven"
    return Schedule(_BLOCKS_PER_ITEM, "EITHER", wide, 136 if wide else 100, at_once), why


def plan_launch(gpu: Gpu, x: Request) -> LaunchPlan:
    """Return the variant and the grid of a call. Only the device knows the lengths."""
    sizes, config = x.sizes, _choose(gpu, x)
    row_blocks = -(-x.group_rows // config.rows)
    items = sizes.seqs * sizes.kv_heads * row_blocks
    split_tokens = x.split or unit_tokens()
    max_item_splits = max(1, -(-sizes.max_blocks * sizes.block_size // split_tokens))
    if items * max_item_splits > MAX_UNITS or sizes.seqs * sizes.query_tokens * sizes.heads > MAX_UNITS:
        wanted = f"at most {MAX_UNITS} pieces of {split_tokens} tokens in all"
        check.fail("block_tables", wanted, f"{sizes.seqs} sequences of {sizes.max_blocks} blocks")
    rows = min(config.rows, x.group_rows)
    variant, threads, shared_bytes, *_ = config
    cluster, scheduling = config.schedule.cluster, config.schedule.scheduling
    if scheduling == "CLUSTERS":
        return LaunchPlan(variant, items * cluster, threads, shared_bytes, rows, row_blocks, 0, 0, config.why)
    all_splits = items * max_item_splits
    blocks = shares = min(all_splits, config.blocks * gpu.multiprocessors)
    if scheduling == "EITHER" and cluster == 1:
        blocks = max(items, shares)
    elif scheduling == "EITHER":
        # The grid has at least as many clusters as are resident at once. So all multiprocessors have work if the kernel
        # chooses the queue.
        blocks = shares = max(items, blocks // cluster) * cluster
    if not x.split:
        # There is at most one split per block of the queue, plus one split per item because of rounding.
        all_splits = min(all_splits, shares + items)
    slots = 0 if x.vllm_workspace or max_item_splits == 1 else all_splits * rows
    return LaunchPlan(variant, blocks, threads, shared_bytes, rows, row_blocks, slots, 1 + items, config.why, shares)


# --- the launch ---------------------------------------------------------------------------------------


def attend(
    call: Call, split: int, variant: str, sparse: Sparse, workspaces: tuple[Array, Array, Array] | None, **fields: Any
) -> None:
    query, sizes, vllm_workspace = call.query, call.sizes, workspaces is not None
    if sparse.sparse_stride <= 1:
        sparse = sparse._replace(sparse_stride=0)
    extras = fields["slopes"] is not None or fields["softcap"] != 0 or sparse.sparse_stride > 0
    wanted = (query.dtype, call.cache, call.layout, sizes, extras, split, vllm_workspace, call.aligned, variant)
    plan = plan_launch(query.gpu, Request(*wanted))
    if plan.blocks == 0:
        return
    counters = partial = maxima = sums = None
    if plan.counters:
        counters = empty((plan.counters,), "int32")
        clearing = _clear_counters.variant(_CLEAR_THREADS)
        own = {"counters": counters, "count": plan.counters}
        why = f"blocks draw pieces: {plan.counters} counters of them are set to 0 before"
        launch(clearing, -(-plan.counters // _CLEAR_THREADS), _CLEAR_THREADS, 0, why=why, **own)
    if plan.slots:
        partial = empty((plan.slots, sizes.head_dim), "float32")
        maxima, sums = empty((plan.slots,), "float32"), empty((plan.slots,), "float32")
    if workspaces is not None:
        sums, maxima, partial = workspaces
    if not sizes.blocks:
        # The kernel reads block 0 for an invalid id. In a cache without blocks it must not read any token.
        sizes = sizes._replace(max_blocks=0)
    launch(
        plan.variant,
        plan.blocks,
        plan.threads,
        plan.shared_bytes,
        why=plan.why,
        **call.fields,
        **fields,
        **sizes._asdict(),
        **sparse._asdict(),
        partial=partial,
        maxima=maxima,
        sums=sums,
        taken=counters,
        arrived=None if counters is None else counters[1:],
        group=sizes.heads // sizes.kv_heads,
        row_blocks=plan.row_blocks,
        split=split,
        min_units=_MIN_UNITS,
        rows=plan.rows,
        shares=plan.shares,
        max_splits=0 if workspaces is None else workspaces[0].shape[-1],
        vllm_workspace=vllm_workspace,
    )
