"""Shared by the functions of paged attention: checks, the variants of the kernels, and how work is dealt to blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.runtime import arrays, check, fp8, template
from cukern.runtime.arrays import strides_of
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Array, expect, expect_array, expect_place, expect_table
from cukern.runtime.gpu import BY_ARCH, CLUSTERED_ARCHS, Gpu
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.op import forget_plans
from cukern.runtime.plan import asked, empty, launch

LAYOUTS = ("vllm", "flash")
VARIANTS = ("auto", "specialized", "dynamic", "scalar")
DTYPES = ("float32", "float16", "bfloat16")
_DIMS = 64, 128, 256  # rooms for a head of `attend`
MAX_BLOCK_SIZE = 2**16
#: Most pieces of a batch, and most rows: the kernels count them in 32 bits.
MAX_UNITS = 2**31 - 2**16
_MAX_BLOCKS = 2  # per multiprocessor: of the scalar kernel, and of the forms but for what `Dealt` says
_TILE_TOKENS, _UNIT_BYTES = 16, 16  # that blocks of tokens, and heads, are multiples of on tensor cores
_RESERVED_SHARED = 1024  # bytes that CUDA takes of each block's
#: Least units of a piece, measured on an H200.
_MIN_UNITS = 4
_LARGEST_SCALE = 1e30
#: Size of the clusters that items have where the lengths are even. Measured on an H200: larger ones are slower.
_EVEN_CLUSTER = 2
#: Room for so many tokens of a sequence makes any lengths even enough: its blocks are done with the longest before a
#: queue would be.
_EVEN_TOKENS = 2048
_ARE_EVEN = f"is even enough (up to {_EVEN_TOKENS})"
#: Where there is room for no more than so many tokens for each warp of an item, one tile at once is as fast as two, and
#: faster for short sequences.
_AT_ONCE_TOKENS = 64
#: Most rows of a kv head that are the second operand of the products, of which that has 8.
_FEW_ROWS = 8
#: Most items that have a block each, as a multiple of the blocks that the GPU has room for at once. More of them are
#: short beside what it takes to begin.
_BLOCK_ITEMS = 4

#: Dimensions of a head that have variants of their own, and the models that have them.
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
#: (head_dim, block_size) pairs that have variants of their own.
SPECIALIZED = [(head_dim, block_size) for head_dim in MODELS for block_size in (16, 32, 64)]
CUDA_TYPE = {**arrays.CUDA_TYPE, "float8_e4m3fn": "__nv_fp8_e4m3", "float8_e5m2": "__nv_fp8_e5m2"}

_attend = Kernel("paged_attention/attend", "attend", compile_s=1.1)
scalar = Kernel("paged_attention/attend_scalar", "attend_scalar")
_clear_counters = Kernel("paged_attention/clear_counters", "clear_counters")
_CLEARING = 256  # threads of a block
_clear_counters.at_import = [_clear_counters.variant(_CLEARING).instance]


def unit_tokens() -> int:
    """Tokens of a unit: pieces are whole units."""
    return template.constants("paged_attention/attend")["UNIT_TOKENS"]


class Dealt(NamedTuple):
    """How items are dealt to blocks, and to what blocks."""

    cluster: int = 1
    dealing: str = "QUEUE"
    wide: bool = False  # whether a block has a multiprocessor to itself, and the warps of two
    stage_kib: int = (
        100  # that a block's stages may take: two of narrow blocks fit a multiprocessor, three of 68, four of 50
    )
    at_once: int = 1  # tiles that a team multiplies at once
    fit: int = _MAX_BLOCKS  # narrow blocks that a multiprocessor has registers for


_QUEUE = Dealt()
#: How few items are dealt, by the most items of each way, as measured on an H200. All clusters run at once: it has room
#: for 15 of 8 wide blocks, for 30 of 4, for 66 of 2, and for twice as many and more of narrow blocks. Clusters of 16
#: start sooner with 68 KiB.
_FEW = {
    7: Dealt(16, "CLUSTERS", False, 68),
    15: Dealt(8, "CLUSTERS", True, 200),
    30: Dealt(4, "CLUSTERS", True, 200),
    32: Dealt(2, "CLUSTERS", True, 200),
}
#: A warp's chain of an 8-bit tile, with its conversion, is longer than the wait for its bytes: two at once overlap.
_FEW_IN_FP8 = {
    7: Dealt(16, "CLUSTERS", False, 68, 2),
    15: Dealt(8, "CLUSTERS", True, 200, 2),
    16: Dealt(8, "CLUSTERS", False, 68, 2),
    32: Dealt(4, "CLUSTERS", False, 68, 2),
}
#: A block for each item over an 8-bit cache, for up to 8 rows: a multiprocessor has registers and stages for four, so
#: that chains overlap without two tiles at once.
_ALONE_IN_FP8 = Dealt(1, "EITHER", False, 50, fit=4)
#: For heads of more than 128, which have no wide blocks.
_FEW_OF_LARGE_HEADS = {n: Dealt(128 // n, "CLUSTERS", False, 68) for n in (8, 16, 32)}


class Form(NamedTuple):
    """Template arguments of `attend` and what follows from them."""

    dtype: str
    cache: str
    layout: str
    head_dim: int  # 0: dynamic
    dims: int  # head_dim rounded up
    block_size: int  # 0: dynamic
    team: int
    extras: bool
    dealt: Dealt = _QUEUE
    rows: int = 16  # of a warp: 8 are the second operand of its products, 16 the first

    @property
    def warps(self) -> int:
        return (2 if self.dims > 128 else 4) << self.dealt.wide

    @property
    def fit(self) -> int:
        """Blocks that a multiprocessor has registers for."""
        return 1 if self.dealt.wide else self.dealt.fit

    @property
    def _stage_bytes(self) -> int:
        """Bytes of one stage of all teams: a tile's keys and values for each."""
        chunks = self.dims * arrays.ITEM_SIZE[self.cache] // 16
        if self.layout == "flash" and chunks % 8:
            chunks |= 1
        return self.warps // self.team * 2 * 16 * 16 * chunks

    @property
    def stages(self) -> int:
        # Larger heads leave room for two.
        kib = 68 if self.dims > 128 else self.dealt.stage_kib
        return min(max((kib << 10) // self._stage_bytes, 2), 4)

    def shared_bytes(self, rows: int) -> int:
        """Dynamic shared memory: the stages, of which the last is large enough for the results of `rows` rows too, and
        what a cluster's blocks leave each other."""
        results = self.warps // self.team * rows * (self.dims + self.rows // 2) * 4
        found = (self.stages - 1) * self._stage_bytes + max(self._stage_bytes, results)
        cluster = self.dealt.cluster
        if cluster == 1:
            return found
        quads = -(-rows * self.dims // 4 // cluster) * cluster
        return found + quads * 16 + cluster * rows * 8

    @property
    def static_bytes(self) -> int:
        """An upper bound of the shared memory that the template declares."""
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
            str(self.extras).lower(),
            self.stages,
            self.dealt.cluster,
            self.warps,
            self.dealt.dealing,
            self.dealt.at_once,
            self.rows,
            self.fit,
            launched=Launched(32 * self.warps, most, (most_rows,), most),
            large_clusters=self.dealt.cluster > 8,
        )


def specialized_form(
    dtype: str,
    cache: str,
    layout: str,
    head_dim: int,
    block_size: int,
    team: int = 1,
    extras: bool = False,
    dealt: Dealt = _QUEUE,
    rows: int = 16,
) -> Form:
    dims = -(-head_dim // 16) * 16
    return Form(dtype, cache, layout, head_dim, dims, block_size, team, extras, dealt, rows)


def _of_own_dtype(head_dim: int, block_size: int) -> list[Instance]:
    return [
        specialized_form(dtype, dtype, layout, head_dim, block_size).variant.instance
        for dtype in ("bfloat16", "float16")
        for layout in LAYOUTS
    ]


# Registers must not spill: one block size and one 16-bit format stand for all, which differ in constants only.
_of_many_rows = [
    specialized_form("bfloat16", cache, layout, head_dim, 16, team).variant.instance
    for layout in LAYOUTS
    for cache, head_dim, team in [
        *(("bfloat16", head_dim, 1) for head_dim in sorted({d for d, _ in SPECIALIZED})),
        ("bfloat16", 128, 2),
        ("bfloat16", 128, 4),
        ("float8_e4m3fn", 128, 1),
        ("float8_e5m2", 128, 1),
    ]
]
_of_few_rows = [
    specialized_form("bfloat16", cache, layout, 128, 16, 1, False, dealt, _FEW_ROWS).variant.instance
    for cache, layout, dealt in [
        ("bfloat16", "flash", _FEW[15]),
        ("bfloat16", "vllm", Dealt(_EVEN_CLUSTER, "EITHER")),
        ("float8_e4m3fn", "vllm", _FEW_IN_FP8[15]),
        *(("float8_e4m3fn", layout, _ALONE_IN_FP8) for layout in LAYOUTS),
    ]
]
_attend.specialize_by_arch({arch: _of_many_rows + _of_few_rows * (arch in CLUSTERED_ARCHS) for arch in BY_ARCH})
_attend.at_import = _of_own_dtype(128, 16)

_registered = set(SPECIALIZED)


def specialize(*, head_dim: int, block_size: int) -> list[Instance]:
    """Give these sizes variants of their own in this process and say which; see `cukern.specialize`.

    They are compiled for up to 16 rows per kv head, without softcap, slopes or a block-sparse pattern, over a cache of
    the query's dtype. The other forms of these sizes are compiled at their first use.

    Raises ValueError unless head_dim is a multiple of 8 of at most 256 and block_size a multiple of 16.
    """
    check.integer("head_dim", head_dim, 8, _DIMS[-1])
    if head_dim % 8:
        check.fail("head_dim", "a multiple of 8", head_dim)
    check.integer("block_size", block_size, 16, MAX_BLOCK_SIZE)
    if block_size % 16:
        check.fail("block_size", "a multiple of 16", block_size)
    _registered.add((head_dim, block_size))
    forget_plans()
    return _of_own_dtype(head_dim, block_size)


# --- how the work is dealt out ------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a call, by their names in the kernels' parameters."""

    seqs: int
    query_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    block_size: int
    max_blocks: int


class Request(NamedTuple):
    """What a call asks of the kernels."""

    dtype: str
    cache: str  # dtype
    layout: str
    sizes: Sizes
    extras: bool  # a softcap, slopes or a block-sparse pattern
    split: int  # tokens of a piece; 0: the device decides
    vllm_workspace: bool
    aligned: bool  # whether all that is read is at multiples of 16 bytes
    variant: str

    @property
    def group_rows(self) -> int:
        """Rows that share a kv head."""
        return self.sizes.query_tokens * (self.sizes.heads // self.sizes.kv_heads)

    @property
    def few_rows(self) -> bool:
        """Whether they are few enough to be the second operand of the products."""
        return self.group_rows <= _FEW_ROWS


class _Choice(NamedTuple):
    """A variant and what its blocks take."""

    variant: Variant
    threads: int
    shared_bytes: int
    rows: int  # of an item
    blocks: int  # per multiprocessor at once
    why: str
    dealt: Dealt = _QUEUE


class Deal(NamedTuple):
    """A variant, how it is launched, and what its blocks leave each other."""

    variant: Variant
    blocks: int
    threads: int
    shared_bytes: int
    rows: int  # of a partial result
    row_blocks: int
    slots: int  # of rows of partial results
    counters: int
    why: str
    shares: int = 0  # blocks that draw pieces


def _why_scalar(x: Request) -> str:
    """Why tensor cores cannot take a call; empty if they can."""
    if x.dtype == "float32":
        return "float32 is not computed on tensor cores"
    if x.sizes.head_dim > _DIMS[-1]:
        return f"heads of {x.sizes.head_dim} are larger than {_DIMS[-1]}"
    if x.sizes.block_size % _TILE_TOKENS:
        return f"blocks of {x.sizes.block_size} tokens are no multiple of {_TILE_TOKENS}"
    if x.sizes.head_dim * arrays.ITEM_SIZE[x.cache] % _UNIT_BYTES:
        return f"a head of {x.sizes.head_dim} in {x.cache} is no multiple of {_UNIT_BYTES} bytes"
    return "" if x.aligned else "an array or one of its strides is no multiple of 16 bytes"


def _choose(gpu: Gpu, x: Request) -> _Choice:
    check.one_of("variant", x.variant, VARIANTS)
    head_dim, block_size = x.sizes.head_dim, x.sizes.block_size
    reason = _why_scalar(x)
    if x.variant in ("specialized", "dynamic") and reason:
        check.fail("variant", "'auto' or 'scalar' here", f"{x.variant!r}: {reason}")
    if x.variant == "specialized" and (head_dim, block_size) not in _registered:
        got = f"'specialized': there is none for heads of {head_dim} and blocks of {block_size} tokens"
        check.fail("variant", "'auto', 'dynamic' or 'scalar' here", f"{got} (cukern.specialize adds one)")
    return _choose_scalar(x, reason) if x.variant == "scalar" or reason else _choose_form(gpu, x)


def _choose_scalar(x: Request, reason: str) -> _Choice:
    constants = template.constants("paged_attention/attend_scalar")
    wide = str(x.aligned).lower()
    large = [constants["MAX_DIM"]] * (x.sizes.head_dim > constants["USUAL_DIM"])
    variant = scalar.variant(CUDA_TYPE[x.dtype], CUDA_TYPE[x.cache], x.layout.upper(), wide, *large)
    fast = (
        f"16-bit queries, heads of whole {_UNIT_BYTES} bytes up to {_DIMS[-1]}, blocks of multiples of {_TILE_TOKENS}"
    )
    why = (
        asked(x.variant) or f"attend_scalar, the slow general kernel: {reason} (tensor cores take {fast}, all aligned)"
    )
    return _Choice(variant, 32 * constants["WARPS"], 0, constants["ROWS"], _MAX_BLOCKS, why)


def _choose_form(gpu: Gpu, x: Request) -> _Choice:
    """The form of `attend` for a call: a team has rows enough for a kv head's, where a block has the warps."""
    sizes = x.sizes
    most_warps = 2 if sizes.head_dim > 128 else 4
    team = next(n for n in (1, 2, 4) if 16 * n >= x.group_rows or n == most_warps)
    items = max(1, sizes.seqs) * sizes.kv_heads * -(-x.group_rows // (16 * team))
    dealt, dealing = _dealt(gpu, x, items)
    # QUEUE, which is all there is with `split`, has 16 alone: so the batch has no say in the order of a row's sums.
    rows = _FEW_ROWS if x.few_rows and dealt.dealing != "QUEUE" else 16
    of_sizes = f"heads of {sizes.head_dim} and blocks of {sizes.block_size} tokens"
    is_own = (sizes.head_dim, sizes.block_size) in SPECIALIZED
    why = f"{of_sizes}: specialized ({MODELS[sizes.head_dim] if is_own else 'by cukern.specialize'})"
    if (sizes.head_dim, sizes.block_size) in _registered and x.variant != "dynamic":
        form = specialized_form(
            x.dtype, x.cache, x.layout, sizes.head_dim, sizes.block_size, team, x.extras, dealt, rows
        )
    else:
        dims = next(n for n in _DIMS if n >= sizes.head_dim)
        form = Form(x.dtype, x.cache, x.layout, 0, dims, 0, team, x.extras, dealt, rows)
        own = f"head_dim={sizes.head_dim}, block_size={sizes.block_size}"
        why = f"dynamic: no instance has {of_sizes} (cukern.specialize('paged_attention', {own}) makes one)"
    shared_bytes = form.shared_bytes(min(rows * team, x.group_rows))
    block_bytes = shared_bytes + form.static_bytes + _RESERVED_SHARED
    blocks = max(1, min(form.fit, gpu.shared_per_multiprocessor // block_bytes))
    why = f"{asked(x.variant) or why}; {x.group_rows} rows for each kv head: {rows} a warp, teams of {team}; {dealing}"
    return _Choice(form.variant, 32 * form.warps, shared_bytes, rows * team, blocks, why, dealt)


def _dealt(gpu: Gpu, x: Request, items: int) -> tuple[Dealt, str]:
    """How a number of items is dealt, and why."""
    # Clusters of 16 blocks, and the shared memory that they take, are those of data-center GPUs.
    if x.vllm_workspace:
        return (
            _QUEUE,
            f"partitions of {x.split} tokens for the given workspaces (paged_attention takes none and no such cuts)",
        )
    if x.split:
        return _QUEUE, f"split={x.split} cuts the tokens, and blocks draw the pieces"
    if gpu.arch not in CLUSTERED_ARCHS:
        return _QUEUE, f"blocks draw pieces of equal shares, as sm_{gpu.arch} has no clusters of this size"
    large, fp8_cache = x.sizes.head_dim > 128, arrays.ITEM_SIZE[x.cache] == 1
    few = _FEW_OF_LARGE_HEADS if large else _FEW_IN_FP8 if fp8_cache else _FEW
    room = x.sizes.max_blocks * x.sizes.block_size
    what = f"{items} items (sequences, times kv heads, times blocks of rows)"
    for most, dealt in few.items():
        if items <= most:
            is_short = room <= _AT_ONCE_TOKENS * dealt.cluster * (4 << dealt.wide)
            why = f"{what}: a cluster of {dealt.cluster} blocks for each (up to {most} items)"
            return dealt._replace(at_once=1) if is_short else dealt, why
    blocks, resident = _EVEN_CLUSTER * items, _MAX_BLOCKS * gpu.multiprocessors
    at_once = 2 if fp8_cache and not large else 1
    if resident < items <= _BLOCK_ITEMS * resident and not large:
        dealt = _ALONE_IN_FP8 if fp8_cache and x.few_rows else Dealt(1, "EITHER", at_once=at_once)
        why = f"{what}: a block for each (from {resident + 1} to {_BLOCK_ITEMS * resident} items)"
        if room <= _EVEN_TOKENS:
            return dealt._replace(dealing="CLUSTERS"), f"{why}, as room for {room} tokens {_ARE_EVEN}"
        return dealt, f"{why}, or a queue where the lengths are uneven"
    if blocks > resident:
        more = f"{_EVEN_CLUSTER} blocks for each are more than the {resident} that run at once"
        return _QUEUE, f"{what}: blocks draw pieces of equal shares, as {more}"
    wide = blocks <= gpu.multiprocessors and not large
    why = f"{what}: a cluster of {_EVEN_CLUSTER} blocks for each (up to {resident // _EVEN_CLUSTER} items)"
    if room <= _EVEN_TOKENS:
        even = f"{why}, as room for {room} tokens {_ARE_EVEN}"
        return Dealt(_EVEN_CLUSTER, "CLUSTERS", wide, 100 << wide, at_once), even
    # Measured on an H200: two stages of 64 KiB are faster here than three, for even lengths and for others. Over an
    # 8-bit cache such pairs take 39.8 us for 8 even sequences of 8192 tokens, where the queue takes 45.4, and for
    # others at most 6% more than it.
    why += ", or a queue where the lengths are uneven"
    return Dealt(_EVEN_CLUSTER, "EITHER", wide, 136 if wide else 100, at_once), why


def deal(gpu: Gpu, x: Request) -> Deal:
    """The variant and the grid of a call; what depends on the lengths is left to the device."""
    sizes, choice = x.sizes, _choose(gpu, x)
    row_blocks = -(-x.group_rows // choice.rows)
    items = sizes.seqs * sizes.kv_heads * row_blocks
    piece_tokens = x.split or unit_tokens()
    max_pieces = max(1, -(-sizes.max_blocks * sizes.block_size // piece_tokens))
    if items * max_pieces > MAX_UNITS or sizes.seqs * sizes.query_tokens * sizes.heads > MAX_UNITS:
        wanted = f"at most {MAX_UNITS} pieces of {piece_tokens} tokens in all"
        check.fail("block_tables", wanted, f"{sizes.seqs} sequences of {sizes.max_blocks} blocks")
    rows = min(choice.rows, x.group_rows)
    variant, threads, shared_bytes, *_ = choice
    cluster, dealing = choice.dealt.cluster, choice.dealt.dealing
    if dealing == "CLUSTERS":
        return Deal(variant, items * cluster, threads, shared_bytes, rows, row_blocks, 0, 0, choice.why)
    all_pieces = items * max_pieces
    blocks = shares = min(all_pieces, choice.blocks * gpu.multiprocessors)
    if dealing == "EITHER" and cluster == 1:
        blocks = max(items, shares)
    elif dealing == "EITHER":
        # Whole clusters: all that are resident, for the queue, and one for each item.
        blocks = shares = max(items, blocks // cluster) * cluster
    if not x.split:
        # As many as there are shares at most, and by rounding up less than one more for each item.
        all_pieces = min(all_pieces, shares + items)
    slots = 0 if x.vllm_workspace or max_pieces == 1 else all_pieces * rows
    return Deal(variant, blocks, threads, shared_bytes, rows, row_blocks, slots, 1 + items, choice.why, shares)


# --- a call -------------------------------------------------------------------------------------------


class Sparse(NamedTuple):
    """vLLM's block-sparse pattern, by the names in the kernels' parameters."""

    sparse_local: int = 0
    sparse_stride: int = 0
    sparse_size: int = 64
    sparse_head_step: int = 0
    sparse_rank: int = 0


class Call(NamedTuple):
    """A call that has been checked."""

    query: Array
    cache: str  # dtype
    layout: str
    sizes: Sizes
    aligned: bool  # whether all that is read is at multiples of 16 bytes
    fields: dict[str, Any]  # of the kernels' parameters


def _check_cache_dtype(key_cache: Array, value_cache: Array, query: Array, kv_cache_dtype: str) -> str:
    """Check the caches' dtypes; returns what they hold, which for bytes is `kv_cache_dtype`."""
    expect_place("key_cache", key_cache, query, "query")
    expect_place("value_cache", value_cache, query, "query")
    found = key_cache.dtype
    if kv_cache_dtype == "auto":
        if found == "uint8":
            check.fail("kv_cache_dtype", "'fp8_e4m3' or 'fp8_e5m2' for a cache of bytes", "'auto'")
        cache = found
        check.dtype("key_cache", found, (query.dtype, *fp8.DTYPES))
    else:
        cache = fp8.FORMATS[check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)]
        check.dtype("key_cache", found, ("uint8", cache))
    check.dtype("value_cache", value_cache.dtype, (found,))
    return cache


def _check_caches(
    key_cache: Array, value_cache: Array, layout: str, cache: str, head_dim: int
) -> tuple[int, int, int, dict[str, int]]:
    """Check the caches' shapes and strides; returns blocks, kv_heads, block_size and the strides in bytes by field."""
    shape = key_cache.shape
    axes: dict[str, int | None]
    if layout == "flash":
        symbols: tuple[str, ...] = "blocks", "block_size", "kv_heads", "head_dim"
        check.dimensions("key_cache", shape, symbols, {5: 'layout="vllm"'})
        blocks, block_size, kv_heads, _ = shape
        wanted = value_wanted = (*shape[:3], head_dim)
        text = value_text = f"[{', '.join(symbols)}]"
        axes = {"block": 0, "token": 1, "head": 2}
        outer = 3
    else:
        symbols = "blocks", "kv_heads", "head_dim / x", "block_size", "x"
        check.dimensions("key_cache", shape, symbols, {4: 'paged_attention with layout="flash"'})
        x = 16 // arrays.ITEM_SIZE[cache]
        if head_dim % x:
            check.fail(
                "query", f"of a head_dim that is a multiple of {x} for a cache of {cache} in this layout", head_dim
            )
        blocks, kv_heads, _, block_size, _ = shape
        wanted = (blocks, kv_heads, head_dim // x, block_size, x)
        value_wanted = (blocks, kv_heads, head_dim, block_size)
        text, value_text = f"[{', '.join(symbols)}]", "[blocks, kv_heads, head_dim, block_size]"
        axes = {"block": 0, "token": None, "head": 1}
        outer = 2
    check.shape("key_cache", shape, wanted, text)
    check.shape("value_cache", value_cache.shape, value_wanted, value_text)
    if kv_heads < 1:
        check.fail("key_cache", "of at least one kv head", f"shape {list(shape)}")
    if block_size % 8 or not 8 <= block_size <= MAX_BLOCK_SIZE:
        check.fail("key_cache", f"of blocks of a multiple of 8 tokens, at most {MAX_BLOCK_SIZE}", block_size)
    distances = {}
    for name, array in (("key", key_cache), ("value", value_cache)):
        inner, strides = array.shape[outer:], array.strides[outer:]
        fits = (n <= 1 or a == b for n, a, b in zip(inner, strides, strides_of(inner), strict=True))
        if blocks and not all(fits):
            last = {1: "dimension", 2: "two dimensions", 3: "three dimensions"}[len(inner)]
            check.fail(f"{name}_cache", f"contiguous along its last {last}", f"strides {strides} (in elements) there")
        for step, axis in axes.items():
            # Along an axis of one element the stride does not matter.
            one = axis is None or array.shape[axis] <= 1
            distances[f"{name}_{step}"] = 0 if one else array.strides[axis] * array.item_size  # type: ignore[index]
    return blocks, kv_heads, block_size, distances


def check_aligned(name: str, array: Array) -> None:
    if array.alignment < 16:
        check.fail(name, "at a multiple of 16 bytes", f"an address that is a multiple of {array.alignment}")


def check_call(
    inputs: tuple[Any, Any, Any, Any, Any],
    scales: tuple[Any, Any, Any],
    layout: str,
    kv_cache_dtype: str,
    several: bool,
) -> Call:
    """Check the five arrays that come first, and the scales of scores, keys and values.

    `several`: the query may have several tokens per sequence, and the scale of the scores may be None.
    """
    query, key_cache, value_cache, block_tables, seq_lens = inputs
    scale, k_scale, v_scale = scales
    expect_array("query", query, DTYPES)
    check.one_of("layout", layout, LAYOUTS)
    shape, strides = query.shape, query.strides
    if len(shape) == 3:
        seqs, heads, head_dim = shape
        query_tokens, query_strides = 1, (strides[0], 0, strides[1])
    elif len(shape) == 4 and several:
        seqs, query_tokens, heads, head_dim = shape
        query_strides = strides[:3]
    else:
        wanted = "[seqs, heads, head_dim]" + (" or [seqs, query_tokens, heads, head_dim]" if several else "")
        check.fail("query", f"of shape {wanted}", list(shape))
    most = template.constants(scalar.file)["MAX_DIM"]
    if head_dim % 8 or not 8 <= head_dim <= most:
        check.fail("query", f"of a head_dim that is a multiple of 8 in [8, {most}]", head_dim)
    if strides[-1] != 1 and 0 not in shape:
        check.fail("query", "contiguous along its last dimension", f"strides {strides} (in elements)")
    cache = _check_cache_dtype(key_cache, value_cache, query, kv_cache_dtype)
    blocks, kv_heads, block_size, distances = _check_caches(key_cache, value_cache, layout, cache, head_dim)
    if heads % kv_heads:
        check.fail("query", f"of a multiple of {kv_heads} heads (kv_heads of key_cache)", heads)
    symbols = ("seqs", "max_blocks")
    max_blocks, table_row = expect_table("block_tables", block_tables, query, "query", seqs, symbols)
    expect("seq_lens", seq_lens, query, "query", ("int32",), (seqs,), "[seqs]")
    scale = head_dim**-0.5 if scale is None and several else check.number("scale", scale)
    key_scale, key_factor = fp8.scale_of("k_scale", k_scale, query, "query")
    value_scale, value_factor = fp8.scale_of("v_scale", v_scale, query, "query")
    sizes = Sizes(seqs, query_tokens, heads, kv_heads, head_dim, blocks, block_size, max_blocks)
    steps = [a * query.item_size for a, n in zip(query_strides, sizes[:3], strict=True) if n > 1]
    alignment = min(query.alignment, key_cache.alignment, value_cache.alignment)
    fields = {
        **dict(zip(("query", "keys", "values", "tables", "lengths"), inputs, strict=True)),
        **{"key_scale": key_scale, "value_scale": value_scale, "out_scale": value_factor},
        **dict(zip(("query_seq", "query_token", "query_head"), query_strides, strict=True)),
        **distances,
        "table_row": table_row,
        "scale": _scale_of_scores(scale, key_factor),
    }
    aligned = alignment == 16 and not any(x % 16 for x in (*steps, *distances.values()))
    return Call(query, cache, layout, sizes, aligned, fields)


def _scale_of_scores(scale: float, key_scale: float) -> float:
    if not abs(scale * key_scale) <= _LARGEST_SCALE:
        check.fail("scale", f"of at most {_LARGEST_SCALE:g}, with k_scale", scale * key_scale)
    return scale * key_scale


def check_per_head(name: str, array: Any, call: Call) -> None:
    if array is not None:
        expect(name, array, call.query, "query", ("float32",), (call.sizes.heads,), "[heads]")


def attend(
    call: Call, split: int, variant: str, sparse: Sparse, workspaces: tuple[Array, Array, Array] | None, **fields: Any
) -> None:
    """Launch the kernel of a call; `fields` are the parameters that differ between the public functions."""
    query, sizes, vllm_workspace = call.query, call.sizes, workspaces is not None
    if sparse.sparse_stride <= 1:
        sparse = sparse._replace(sparse_stride=0)
    extras = fields["slopes"] is not None or fields["softcap"] != 0 or sparse.sparse_stride > 0
    wanted = (query.dtype, call.cache, call.layout, sizes, extras, split, vllm_workspace, call.aligned, variant)
    plan = deal(query.gpu, Request(*wanted))
    if plan.blocks == 0:
        return
    counters = partial = maxima = sums = None
    if plan.counters:
        counters = empty((plan.counters,), "int32")
        clearing = _clear_counters.variant(_CLEARING)
        own = {"counters": counters, "count": plan.counters}
        why = f"blocks draw pieces: {plan.counters} counters of them are set to 0 before"
        launch(clearing, -(-plan.counters // _CLEARING), _CLEARING, 0, why=why, **own)
    if plan.slots:
        partial = empty((plan.slots, sizes.head_dim), "float32")
        maxima, sums = empty((plan.slots,), "float32"), empty((plan.slots,), "float32")
    if workspaces is not None:
        sums, maxima, partial = workspaces
    if not sizes.blocks:
        # The kernel reads block 0 in place of a bad one. Here is none, so there must be room for no token.
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
