"""Attention of the last tokens of each sequence over a paged KV cache, and the merging of such results."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from cukern.reference import paged_attention as twin
from cukern.runtime import arrays, check, fp8
from cukern.runtime.compile import Instance
from cukern.runtime.cuda import runtime
from cukern.runtime.kernel import Kernel, Variant, arch_of_device, clear, multiprocessors

__all__ = ["merge_attention_states", "paged_attention", "paged_attention_v1", "paged_attention_v2"]

DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("vllm", "flash")
VARIANTS = ("auto", "specialized", "dynamic", "scalar")
MAX_DIM = 256
MAX_BLOCK_SIZE = 2**16
#: Pieces of 64 tokens, or of `split`, over all sequences, kv heads and blocks of rows that share one.
MAX_UNITS = 2**31 - 2**16
PARTITION = twin.PARTITION
UNIT_TOKENS = 64  # UNIT_TOKENS of the template
SCALAR_ROWS = 4  # ROWS of the template `attend_scalar`
_MOST_BLOCKS = 2  # per multiprocessor: launch bounds of the template
_SHARED_PER_MULTIPROCESSOR = 81  # the driver's attribute
_RESERVED_SHARED = 1024  # bytes of each block
#: Units that a block of threads takes at least, measured on an H200.
_LEAST_UNITS = 4
_LARGEST_SCALE = 1e30
#: Sizes of clusters; items times size is at most _CLUSTERED, so that all of them run at once.
_CLUSTERS = (16, 8, 4)
_CLUSTERED = 128
_CLUSTERED_ARCHS = ("90a", "100a", "103a")

#: Dimensions of a head and tokens of a block that have variants of their own.
SPECIALIZED = [
    (head_dim, block_size)
    for head_dim in (
        64,  # GPT-OSS, Qwen2-0.5B, Llama-3.2-1B
        80,  # Phi-2, Qwen2-VL's vision tower
        96,  # Phi-3-mini
        112,  # Zamba, Yi-VL
        120,  # H2O-Danube
        128,  # Llama, Qwen, Mistral
        192,  # Nemotron
        256,  # Gemma
    )
    for block_size in (16, 32, 64)
]
_CUDA_TYPE = {**arrays.CUDA_TYPE, "float8_e4m3fn": "__nv_fp8_e4m3", "float8_e5m2": "__nv_fp8_e5m2"}

_PARAMS = "16P10q21i3f"
_attend = Kernel("paged_attention", "attend", _PARAMS, compile_s=1.1)
_scalar = Kernel("paged_attention", "attend_scalar", _PARAMS)
_merge = Kernel("paged_attention", "merge_states", "6Pqi")


class _Form(NamedTuple):
    """Template arguments of `attend` and what follows from them."""

    dtype: str
    cache: str
    layout: str
    head_dim: int  # 0: dynamic
    dims: int
    block_size: int  # 0: dynamic
    team: int
    extras: bool
    cluster: int = 1

    @property
    def warps(self) -> int:
        return 2 if self.dims > 128 else 4

    @property
    def _stage_bytes(self) -> int:
        """Of a stage of every team."""
        chunks = self.dims * arrays.ITEM_SIZE[self.cache] // 16
        if self.layout == "flash" and chunks % 8:
            chunks |= 1
        return self.warps // self.team * 2 * 16 * 16 * chunks

    @property
    def stages(self) -> int:
        # Measured on an H200: two blocks of a multiprocessor with three stages of 32 KB, one less where larger heads
        # take their place or clusters of 16 blocks must find it.
        most = 100 << 10 if self.cluster == 1 and self.dims <= 128 else 68 << 10
        return min(max(most // self._stage_bytes, 2), 4)

    def shared_bytes(self, rows: int) -> int:
        """The last stage is as large as the results of `rows` rows that are merged in its place."""
        merged = self.warps // self.team + (self.cluster > 1)
        return (self.stages - 1) * self._stage_bytes + max(self._stage_bytes, merged * rows * (self.dims + 8) * 4)

    @property
    def static_bytes(self) -> int:
        """Shared memory that the template declares, at most."""
        return 1024 + (self.dims // 16 * 512 * self.warps if self.dims > 128 else 0)


def _variant(form: _Form) -> Variant:
    return _attend.variant(
        _CUDA_TYPE[form.dtype],
        _CUDA_TYPE[form.cache],
        form.layout.upper(),
        form.head_dim,
        form.dims,
        form.block_size,
        form.team,
        str(form.extras).lower(),
        form.stages,
        form.cluster,
        max_shared_bytes=form.shared_bytes(16 * form.team),
        large_clusters=form.cluster > 8,
    )


def _specialized_form(
    dtype: str,
    cache: str,
    layout: str,
    head_dim: int,
    block_size: int,
    team: int = 1,
    extras: bool = False,
    cluster: int = 1,
) -> _Form:
    return _Form(dtype, cache, layout, head_dim, -(-head_dim // 16) * 16, block_size, team, extras, cluster)


# Every block size and both 16-bit formats compile to the same instructions but for constants, so one of each is held
# to the promise that registers do not spill.
_attend.specialized = [
    _variant(_specialized_form("bfloat16", cache, layout, head_dim, 16, team)).instance
    for layout in LAYOUTS
    for cache, head_dim, team in [
        *(("bfloat16", head_dim, 1) for head_dim in sorted({d for d, _ in SPECIALIZED})),
        ("bfloat16", 128, 2),
        ("bfloat16", 128, 4),
        ("float8_e4m3fn", 128, 1),
        ("float8_e5m2", 128, 1),
    ]
]
_attend.at_import = [
    _variant(_specialized_form(dtype, dtype, layout, 128, 16)).instance
    for dtype in ("bfloat16", "float16")
    for layout in LAYOUTS
]

_registered = set(SPECIALIZED)


def specialize(*, head_dim: int, block_size: int) -> list[Instance]:
    """Give these sizes variants of their own in this process and say which; see `cukern.specialize`.

    They are for up to 16 query rows per kv head, without softcap, slopes or a block-sparse pattern, over a cache of
    the query's dtype; others of these sizes are compiled at their first use.

    Raises ValueError unless head_dim is a multiple of 8 of at most 256 and block_size a multiple of 16.
    """
    check.integer("head_dim", head_dim, 8, MAX_DIM)
    if head_dim % 8:
        check.fail("head_dim", "a multiple of 8", head_dim)
    check.integer("block_size", block_size, 16, MAX_BLOCK_SIZE)
    if block_size % 16:
        check.fail("block_size", "a multiple of 16", block_size)
    _registered.add((head_dim, block_size))
    _plan.cache_clear()
    return [
        _variant(_specialized_form(dtype, dtype, layout, head_dim, block_size)).instance
        for dtype in ("bfloat16", "float16")
        for layout in LAYOUTS
    ]


class _Plan(NamedTuple):
    """A variant and how it is launched."""

    variant: Variant
    blocks: int
    threads: int
    shared_bytes: int
    rows: int  # of a partial result
    row_blocks: int
    #: The workspace, in elements of 4 bytes: where the maxima, the sums and the counters begin, and its size.
    maxima_at: int
    sums_at: int
    counters_at: int
    size: int


class _Sizes(NamedTuple):
    seqs: int
    query_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    block_size: int
    max_blocks: int


@functools.cache
def _shared_per_multiprocessor(device: int) -> int:
    return runtime.deviceGetAttribute(_SHARED_PER_MULTIPROCESSOR, device)


def _unfit(dtype: str, cache: str, sizes: _Sizes, aligned: bool) -> str:
    """Why tensor cores cannot do it, if so."""
    if dtype == "float32":
        return "float32 is not computed on tensor cores"
    if sizes.block_size % 16:
        return f"blocks of {sizes.block_size} tokens are no multiple of 16"
    if sizes.head_dim * arrays.ITEM_SIZE[cache] % 16:
        return f"a head of {sizes.head_dim} in {cache} is no multiple of 16 bytes"
    return "" if aligned else "an array or one of its strides is no multiple of 16 bytes"


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: str,
    cache: str,
    layout: str,
    sizes: _Sizes,
    extras: bool,
    split: int,
    narrow: bool,
    aligned: bool,
    variant: str,
    device: int,
) -> _Plan:
    """How the work is dealt out; what depends on the lengths is left to the device."""
    check.one_of("variant", variant, VARIANTS)
    reason = _unfit(dtype, cache, sizes, aligned)
    special = (sizes.head_dim, sizes.block_size) in _registered
    if variant in ("specialized", "dynamic") and reason:
        check.fail("variant", "'auto' or 'scalar' here", f"{variant!r}: {reason}")
    if variant == "specialized" and not special:
        got = f"'specialized': there is none for heads of {sizes.head_dim} and blocks of {sizes.block_size} tokens"
        check.fail("variant", "'auto', 'dynamic' or 'scalar' here", f"{got} (cukern.specialize adds one)")
    group_rows = sizes.query_tokens * (sizes.heads // sizes.kv_heads)
    cluster = 1
    if variant == "scalar" or reason:
        wide = str(aligned).lower()
        chosen = _scalar.variant(_CUDA_TYPE[dtype], _CUDA_TYPE[cache], layout.upper(), wide)
        threads, shared_bytes, rows, most_blocks = 128, 0, SCALAR_ROWS, _MOST_BLOCKS
    else:
        warps = 2 if sizes.head_dim > 128 else 4
        team = next(n for n in (1, 2, 4) if 16 * n >= group_rows or n == warps)
        clustered = max(1, sizes.seqs) * sizes.kv_heads * -(-group_rows // (16 * team))
        # Clusters of 16 blocks and the shared memory that they take are those of data-center GPUs.
        if not split and arch_of_device(device) in _CLUSTERED_ARCHS:
            cluster = next((n for n in _CLUSTERS if n * clustered <= _CLUSTERED), 1)
        if special and variant != "dynamic":
            form = _specialized_form(dtype, cache, layout, sizes.head_dim, sizes.block_size, team, extras, cluster)
        else:
            dims = next(n for n in (64, 128, 256) if n >= sizes.head_dim)
            form = _Form(dtype, cache, layout, 0, dims, 0, team, extras, cluster)
        threads, rows = 32 * form.warps, 16 * team
        chosen, shared_bytes = _variant(form), form.shared_bytes(min(rows, group_rows))
        each = shared_bytes + form.static_bytes + _RESERVED_SHARED
        most_blocks = max(1, min(_MOST_BLOCKS, _shared_per_multiprocessor(device) // each))
    row_blocks = -(-group_rows // rows)
    items = sizes.seqs * sizes.kv_heads * row_blocks
    max_pieces = max(1, -(-sizes.max_blocks * sizes.block_size // (split or UNIT_TOKENS)))
    if items * max_pieces > MAX_UNITS or sizes.seqs * sizes.query_tokens * sizes.heads > MAX_UNITS:
        wanted = f"at most {MAX_UNITS} pieces of {split or UNIT_TOKENS} tokens in all"
        check.fail("block_tables", wanted, f"{sizes.seqs} sequences of {sizes.max_blocks} blocks")
    if cluster > 1:
        return _Plan(chosen, items * cluster, threads, shared_bytes, min(rows, group_rows), row_blocks, 0, 0, 0, 0)
    resident = most_blocks * multiprocessors(device)
    most_pieces = items * max_pieces
    if not split:
        # Rounding up adds less than one piece per item to as many as there are blocks.
        most_pieces = min(most_pieces, resident + items)
    part_rows = min(rows, group_rows)
    slots = 0 if narrow or max_pieces == 1 else most_pieces * part_rows
    counters_at = slots * (sizes.head_dim + 2)
    return _Plan(
        chosen,
        min(most_pieces, resident),
        threads,
        shared_bytes,
        part_rows,
        row_blocks,
        slots * sizes.head_dim,
        slots * (sizes.head_dim + 1),
        counters_at,
        counters_at + 1 + items,
    )


def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return strides == wanted or all(size <= 1 or a == b for size, a, b in zip(shape, strides, wanted, strict=True))


class _Cache(NamedTuple):
    """The caches as the kernels take them: strides in bytes between blocks, tokens and heads."""

    dtype: str
    blocks: int
    kv_heads: int
    block_size: int
    strides: tuple[int, ...]


def _check_caches(
    key_cache: Any,
    value_cache: Any,
    layout: str,
    kv_cache_dtype: str,
    query_dtype: str,
    head_dim: int,
    library: arrays.Library,
    device: int | None,
) -> _Cache:
    arrays.same_place("key_cache", key_cache, "query", library, device)
    arrays.same_place("value_cache", value_cache, "query", library, device)
    found = library.dtype(key_cache)
    if kv_cache_dtype == "auto":
        cache = found
        if cache != query_dtype and cache not in fp8.DTYPES:
            if cache == "uint8":
                check.fail("kv_cache_dtype", "'fp8_e4m3' or 'fp8_e5m2' for a cache of bytes", "'auto'")
            check.dtype("key_cache", cache, (query_dtype, *fp8.DTYPES))
    else:
        check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES)
        cache = fp8.FORMATS[kv_cache_dtype]
        if found not in ("uint8", cache):
            check.dtype("key_cache", found, ("uint8", cache))
    if library.dtype(value_cache) != found:
        check.dtype("value_cache", library.dtype(value_cache), (found,))
    item = arrays.ITEM_SIZE[cache]
    shape, value_shape = tuple(key_cache.shape), tuple(value_cache.shape)
    strides, value_strides = library.strides(key_cache), library.strides(value_cache)
    inner_strides: tuple[int, ...]
    value_inner_strides: tuple[int, ...]
    picks: tuple[int | None, ...]
    symbols: tuple[str, ...]
    wanted: tuple[int, ...]
    if layout == "flash":
        symbols = "blocks", "block_size", "kv_heads", "head_dim"
        if len(shape) != 4:
            check.dimensions("key_cache", shape, symbols)
        blocks, block_size, kv_heads, _ = shape
        wanted = (blocks, block_size, kv_heads, head_dim)
        inner, value_inner = shape[3:], value_shape[3:]
        inner_strides, value_inner_strides = (1,), (1,)
        text = value_text = f"[{', '.join(symbols)}]"
        value_wanted = wanted
        picks = (0, 1, 2)
    else:
        symbols = "blocks", "kv_heads", "head_dim / x", "block_size", "x"
        if len(shape) != 5:
            check.dimensions("key_cache", shape, symbols)
        x = 16 // item
        if head_dim % x:
            check.fail(
                "query", f"of a head_dim that is a multiple of {x} for a cache of {cache} in this layout", head_dim
            )
        blocks, kv_heads, _, block_size, _ = shape
        wanted = (blocks, kv_heads, head_dim // x, block_size, x)
        value_wanted = (blocks, kv_heads, head_dim, block_size)
        inner, value_inner = shape[2:], value_shape[2:]
        inner_strides, value_inner_strides = (block_size * x, x, 1), (block_size, 1)
        text, value_text = f"[{', '.join(symbols)}]", "[blocks, kv_heads, head_dim, block_size]"
        picks = (0, None, 1)
    if shape != wanted:
        check.shape("key_cache", shape, wanted, text)
    if value_shape != value_wanted:
        check.shape("value_cache", value_shape, value_wanted, value_text)
    if kv_heads < 1:
        check.fail("key_cache", "of at least one kv head", f"shape {list(shape)}")
    if block_size % 8 or not 8 <= block_size <= MAX_BLOCK_SIZE:
        check.fail("key_cache", f"of blocks of a multiple of 8 tokens, at most {MAX_BLOCK_SIZE}", block_size)
    outer = len(shape) - len(inner)
    for name, of_shape, of_strides, of_wanted in (
        ("key_cache", inner, strides[outer:], inner_strides),
        ("value_cache", value_inner, value_strides[outer:], value_inner_strides),
    ):
        if blocks and of_strides != of_wanted and not _strides_fit(of_shape, of_strides, of_wanted):
            last = {1: "dimension", 2: "two dimensions", 3: "three dimensions"}[len(of_wanted)]
            check.fail(name, f"contiguous along its last {last}", f"strides {of_strides} (in elements) there")
    # Between blocks, tokens and heads; of what there is only one the distance does not matter.
    distances = (
        0 if i is None or of_shape[i] <= 1 else of_strides[i] * item
        for of_shape, of_strides in ((shape, strides), (value_shape, value_strides))
        for i in picks
    )
    return _Cache(cache, blocks, kv_heads, block_size, tuple(distances))


def _check_out(name: str, array: Any, library: arrays.Library, device: int | None) -> None:
    if device is not None and library.address(array) % 16:
        check.fail(name, "at a multiple of 16 bytes", f"address {library.address(array):#x}")


class _Call(NamedTuple):
    """What has been checked of a call."""

    library: arrays.Library
    device: int | None
    dtype: str
    sizes: _Sizes
    cache: _Cache
    query_strides: tuple[int, ...]
    table_row: int
    scale: float
    value_scale: float
    key_scale_address: int
    value_scale_address: int


def _check_call(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    layout: str,
    scale: Any,
    k_scale: Any,
    v_scale: Any,
    kv_cache_dtype: str,
    several: bool,
) -> _Call:
    library, device = arrays.place("query", query)
    dtype = library.dtype(query)
    if dtype not in DTYPES:
        check.dtype("query", dtype, DTYPES)
    if layout not in LAYOUTS:
        check.one_of("layout", layout, LAYOUTS)
    shape, strides = tuple(query.shape), library.strides(query)
    query_strides: tuple[int, ...]
    if len(shape) == 3:
        seqs, heads, head_dim = shape
        query_tokens, query_strides = 1, (strides[0], 0, strides[1])
    elif len(shape) == 4 and several:
        seqs, query_tokens, heads, head_dim = shape
        query_strides = strides[:3]
    else:
        wanted = "[seqs, heads, head_dim]" + (" or [seqs, query_tokens, heads, head_dim]" if several else "")
        check.fail("query", f"of shape {wanted}", list(shape))
    if head_dim % 8 or not 8 <= head_dim <= MAX_DIM:
        check.fail("query", f"of a head_dim that is a multiple of 8 in [8, {MAX_DIM}]", head_dim)
    if strides[-1] != 1 and 0 not in shape:
        check.fail("query", "contiguous along its last dimension", f"strides {tuple(strides)} (in elements)")
    cache = _check_caches(key_cache, value_cache, layout, kv_cache_dtype, dtype, head_dim, library, device)
    if heads % cache.kv_heads:
        check.fail("query", f"of a multiple of {cache.kv_heads} heads (kv_heads of key_cache)", heads)
    symbols = ("seqs", "max_blocks")
    max_blocks, table_row = arrays.table("block_tables", block_tables, "query", library, device, seqs, symbols)
    arrays.expect("seq_lens", seq_lens, "query", library, device, ("int32",), (seqs,), "[seqs]")
    scale = head_dim**-0.5 if scale is None else check.number("scale", scale)
    key_scale_address, key_scale = fp8.scale("k_scale", k_scale, "query", library, device)
    value_scale_address, value_scale = fp8.scale("v_scale", v_scale, "query", library, device)
    if not abs(scale * key_scale) <= _LARGEST_SCALE:
        check.fail("scale", f"of at most {_LARGEST_SCALE:g}, with k_scale", scale * key_scale)
    sizes = _Sizes(seqs, query_tokens, heads, cache.kv_heads, head_dim, cache.blocks, cache.block_size, max_blocks)
    return _Call(
        library,
        device,
        dtype,
        sizes,
        cache,
        query_strides,
        table_row,
        scale * key_scale,
        value_scale,
        key_scale_address,
        value_scale_address,
    )


class _Sparse(NamedTuple):
    """vLLM's block-sparse pattern."""

    local_blocks: int = 0
    vert_stride: int = 0
    block_size: int = 64
    head_sliding_step: int = 0
    tp_rank: int = 0


_DENSE = _Sparse()


def _launch(
    call: _Call,
    layout: str,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    alibi_slopes: Any,
    sinks: Any,
    out: Any,
    lse: Any,
    window: int,
    softcap: float,
    split: int,
    variant: str,
    sparse: _Sparse = _DENSE,
    workspaces: tuple[Any, Any, Any] | None = None,
    max_splits: int = 0,
) -> None:
    library, device, sizes, cache = call.library, call.device, call.sizes, call.cache
    assert device is not None
    address = library.address
    addresses = address(query), address(key_cache), address(value_cache)
    item = arrays.ITEM_SIZE[call.dtype]
    together = addresses[0] | addresses[1] | addresses[2]
    for stride in cache.strides:
        together |= stride
    for stride, size in zip(call.query_strides, (sizes.seqs, sizes.query_tokens, sizes.heads), strict=True):
        if size > 1:
            together |= stride * item
    extras = alibi_slopes is not None or softcap != 0 or sparse.vert_stride > 1
    plan = _plan(
        call.dtype,
        cache.dtype,
        layout,
        sizes,
        extras,
        split,
        workspaces is not None,
        not together % 16,
        variant,
        device,
    )
    if plan.blocks == 0:
        return
    stream = library.stream(device)
    partial = maxima = sums = counters = 0
    if plan.size:
        # Held until the launch: else another thread that uses the stream could be given it before.
        workspace = library.empty((plan.size,), "float32", query)
        base = address(workspace)
        partial, maxima, sums = base, base + 4 * plan.maxima_at, base + 4 * plan.sums_at
        counters = base + 4 * plan.counters_at
        clear(device, stream, counters, 4 * (plan.size - plan.counters_at))
    if workspaces is not None:
        sums, maxima, partial = map(address, workspaces)
    plan.variant.launch(
        device,
        stream,
        (plan.blocks, 1, 1),
        (plan.threads, 1, 1),
        plan.shared_bytes,
        *addresses,
        address(block_tables),
        address(seq_lens),
        0 if alibi_slopes is None else address(alibi_slopes),
        0 if sinks is None else address(sinks),
        call.key_scale_address,
        call.value_scale_address,
        address(out),
        0 if lse is None else address(lse),
        partial,
        maxima,
        sums,
        counters,
        counters + 4,
        *call.query_strides,
        *cache.strides,
        call.table_row,
        sizes.seqs,
        sizes.query_tokens,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.heads // sizes.kv_heads,
        plan.row_blocks,
        sizes.blocks,
        sizes.block_size,
        # A cache without blocks has room for no token: not even for what the kernel reads in place of a bad block.
        sizes.max_blocks if sizes.blocks else 0,
        window,
        split,
        _LEAST_UNITS,
        plan.rows,
        max_splits,
        workspaces is not None,
        sparse.local_blocks,
        sparse.vert_stride if sparse.vert_stride > 1 else 0,
        sparse.block_size,
        sparse.head_sliding_step,
        sparse.tp_rank,
        call.scale,
        softcap,
        call.value_scale,
    )


def _per_head(name: str, array: Any, call: _Call) -> None:
    if array is not None:
        expected = ("float32",), (call.sizes.heads,), "[heads]"
        arrays.expect(name, array, "query", call.library, call.device, *expected)


@arrays.takes_dlpack
def paged_attention(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    layout: str = "vllm",
    scale: float | None = None,
    alibi_slopes: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_cache_dtype: str = "auto",
    return_lse: bool = False,
    split: int | None = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Attend from the last tokens of each sequence over its keys and values in a paged cache.

    Query token i of a sequence stands at position = seq_len - query_tokens + i and sees the tokens t <= position, its
    own among them. With g = heads / kv_heads,

        score[t] = scale * k_scale * query[i, h] . key[t, h // g]
                   then softcap * tanh(score / softcap), then + alibi_slopes[h] * (t - position)
        out[i, h] = v_scale * sum of softmax(score)[t] * value[t, h // g],     exp(sinks[h]) joining its denominator
        lse[i, h] = log of that denominator

    in float32 (the weights are rounded to the query's dtype before the sum, over an 8-bit cache to float16, except by
    variant "scalar"). Token t is slot t % block_size of block block_tables[s, t // block_size]. The cache is read once
    for all heads and query tokens that share a kv head.

    Args:
        query: [seqs, heads, head_dim] or [seqs, query_tokens, heads, head_dim], float32, float16 or bfloat16,
            contiguous along the last dimension. head_dim is a multiple of 8, at most 256.
        key_cache, value_cache: layout "vllm": [blocks, kv_heads, head_dim / x, block_size, x] with x elements in 16
            bytes, and [blocks, kv_heads, head_dim, block_size]; layout "flash": both [blocks, block_size, kv_heads,
            head_dim]. Of the query's dtype, float8_e4m3fn or float8_e5m2, or bytes (uint8) that `kv_cache_dtype`
            says the format of. block_size is a multiple of 8. The distance between blocks is free (and between heads;
            in "flash", tokens too), so that slices of an array [blocks, 2, ...] do.
        block_tables: int32 [seqs, max_blocks]; rows may be strided. Entries for tokens that a sequence has not, or
            that lie before its window, are not used.
        seq_lens: int32 [seqs], tokens in the cache, those of this query included. Up to 0: no tokens.
        layout: "vllm" or "flash".
        scale: head_dim ** -0.5 by default.
        alibi_slopes: float32 [heads].
        window: how many tokens a query token sees at most, its own included.
        softcap: bounds the scores.
        sinks: float32 [heads], logits of a token without value.
        k_scale, v_scale: a number, or float32 of one element on the device of `query`.
        kv_cache_dtype: "auto" (the arrays say), "fp8" or "fp8_e4m3", "fp8_e5m2".
        return_lse: return lse too: float32, of the query's shape without head_dim.
        split: None deals the tokens out evenly, by the lengths, on the device. A multiple of 64 cuts each sequence at
            its multiples instead: then a row has the same bits whatever else is in the batch. The workspace is then as
            large as max_blocks asks for, about seqs * query_tokens * heads * max_blocks * block_size / split heads in
            float32.
        out: an array like the (contiguous) result to write into, at a multiple of 16 bytes; with `return_lse` a pair.
        variant: "auto", "specialized", "dynamic" (tensor cores, for 16-bit queries and block sizes that are multiples
            of 16) or "scalar" (everything).

    Returns:
        out, like `query`; with `return_lse` (out, lse). A row that sees no token is 0 and -inf (its sink, if there is
        one). On a GPU lengths and block ids cannot be checked ahead: where one points outside the table or the cache
        (or a length is above 2**30), nothing is read there and the rows of that sequence are NaN. A value that is NaN
        or infinite may reach all rows that share its kv head, also those that do not see its token.

    Raises:
        TypeError: what is no array, or has the wrong dtype or library.
        ValueError: a shape, stride, device or option that does not fit.

    Paged attention is vLLM's (Kwon et al., 2023); cutting by equal shares is Stream-K's idea (Osama et al., 2023);
    sinks are those of Xiao et al. (2023). A CuPy stream that captures a graph leaves the workspace to CuPy's pool: let
    nothing else be allocated there between replays, or capture with torch, whose graphs have pools of their own.
    """
    call = _check_call(
        query, key_cache, value_cache, block_tables, seq_lens, layout, scale, k_scale, v_scale, kv_cache_dtype, True
    )
    library, device = call.library, call.device
    _per_head("alibi_slopes", alibi_slopes, call)
    _per_head("sinks", sinks, call)
    if window is not None:
        window = check.integer("window", window, 1)
    if softcap is not None:
        softcap = check.number("softcap", softcap)
        if not 1e-30 <= softcap <= 1e30:
            check.fail("softcap", "in [1e-30, 1e30]", softcap)
    if split is not None:
        split = check.integer("split", split, UNIT_TOKENS, 2**30)
        if split % UNIT_TOKENS:
            check.fail("split", f"a multiple of {UNIT_TOKENS}", split)
    shape = tuple(query.shape)
    lse = None
    if out is not None:
        attended = out
        if return_lse:
            if not isinstance(out, (tuple, list)) or len(out) != 2:
                check.fail("out", "a pair (out, lse) with return_lse", type(out).__name__, TypeError)
            attended, lse = out
            arrays.expect("out[1]", lse, "query", library, device, ("float32",), shape[:-1], "query's without head_dim")
        name = "out[0]" if return_lse else "out"
        arrays.expect(name, attended, "query", library, device, (call.dtype,), shape, "query's")
        _check_out(name, attended, library, device)
    if device is None:
        check.host_variant(variant, VARIANTS)
        options = {
            "layout": layout,
            "scale": scale,
            "alibi_slopes": alibi_slopes,
            "window": window,
            "softcap": softcap,
            "sinks": sinks,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "kv_cache_dtype": kv_cache_dtype,
            "return_lse": return_lse,
            "split": split,
        }
        inputs = query, key_cache, value_cache, block_tables, seq_lens
        return arrays.on_host(twin.paged_attention, query, *inputs, out=out, **options)
    if out is None:
        attended = library.empty(shape, call.dtype, query)
        if return_lse:
            lse = library.empty(shape[:-1], "float32", query)
    _launch(
        call,
        layout,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        alibi_slopes,
        sinks,
        attended,
        lse,
        min(window or 0, 2**30),
        softcap or 0.0,
        split or 0,
        variant,
    )
    if out is not None:
        return out
    return (attended, lse) if return_lse else attended


def _as_vllm(
    function: Any,
    out: Any,
    workspaces: tuple[Any, Any, Any] | None,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    sparse: _Sparse,
) -> None:
    call = _check_call(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        "vllm",
        check.number("scale", scale),
        k_scale,
        v_scale,
        kv_cache_dtype,
        False,
    )
    library, device, sizes = call.library, call.device, call.sizes
    shape = tuple(query.shape)
    arrays.expect("out", out, "query", library, device, (call.dtype,), shape, "query's")
    _check_out("out", out, library, device)
    if check.integer("num_kv_heads", num_kv_heads, 1) != sizes.kv_heads:
        check.fail("num_kv_heads", f"{sizes.kv_heads} (of key_cache)", num_kv_heads)
    if check.integer("block_size", block_size, 1) != sizes.block_size:
        check.fail("block_size", f"{sizes.block_size} (of key_cache)", block_size)
    max_seq_len = check.integer("max_seq_len", max_seq_len, 0)
    _per_head("alibi_slopes", alibi_slopes, call)
    for name, value in zip(("local_blocks", "vert_stride", "block_size", "head_sliding_step"), sparse[:4], strict=True):
        check.integer(f"blocksparse_{name}", value, -(2**20) if name == "head_sliding_step" else 0, 2**20)
    check.integer("tp_rank", sparse.tp_rank, 0, 2**20)
    if sparse.vert_stride > 1 and (sparse.block_size == 0 or sparse.block_size % sizes.block_size):
        check.fail("blocksparse_block_size", f"a multiple of block_size ({sizes.block_size})", sparse.block_size)
    max_splits = 0
    if workspaces is not None:
        exp_sums, max_logits, tmp_out = workspaces
        arrays.same_place("exp_sums", exp_sums, "query", library, device)
        max_splits = exp_sums.shape[-1] if len(exp_sums.shape) == 3 else 0
        if len(exp_sums.shape) == 3 and max_splits < -(-max_seq_len // PARTITION):
            wanted = f"of at least {-(-max_seq_len // PARTITION)} partitions (of {PARTITION} of max_seq_len)"
            check.fail("exp_sums", wanted, max_splits)
        statistics = (*shape[:2], max_splits)
        symbols = "[seqs, heads, max_partitions]"
        for name, array in (("exp_sums", exp_sums), ("max_logits", max_logits)):
            arrays.expect(name, array, "query", library, device, ("float32",), statistics, symbols)
        partial = (*statistics, shape[2])
        symbols = "[seqs, heads, max_partitions, head_dim]"
        arrays.expect("tmp_out", tmp_out, "query", library, device, (call.dtype,), partial, symbols)
        _check_out("tmp_out", tmp_out, library, device)
    if device is None:
        inputs = query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len
        written = [library.to_numpy(x) for x in (out, *(workspaces or ()))]
        rest = [
            library.to_numpy(x) if arrays.is_array(x) else x
            for x in (*inputs, alibi_slopes, kv_cache_dtype, k_scale, v_scale)
        ]
        local, stride, size, step, rank = sparse
        function(*written, *rest, rank, local, stride, size, step)
        return
    _launch(
        call,
        "vllm",
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        alibi_slopes,
        None,
        out,
        None,
        0,
        0.0,
        0 if workspaces is None else PARTITION,
        "auto",
        sparse,
        workspaces,
        max_splits,
    )


@arrays.takes_dlpack
def paged_attention_v1(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attend from the last token of each sequence, with the arguments of vLLM's operator of that name.

    What `paged_attention` computes in layout "vllm" for one query token, written into `out`.

    Args:
        out: [seqs, heads, head_dim], like `query`.
        query: [seqs, heads, head_dim], float32, float16 or bfloat16; its first stride is free.
        key_cache, value_cache: [blocks, kv_heads, head_dim / x, block_size, x], [blocks, kv_heads, head_dim,
            block_size].
        num_kv_heads, block_size: those of the caches.
        scale: of the scores.
        block_tables: int32 [seqs, max_blocks].
        seq_lens: int32 [seqs], none above `max_seq_len`.
        max_seq_len: the greatest length there may be.
        alibi_slopes: float32 [heads], or None; slope * (token - seq_len + 1) joins a score.
        kv_cache_dtype: "auto" (of the caches), "fp8" or "fp8_e4m3", "fp8_e5m2".
        k_scale, v_scale: float32 of one element, a number, or None.
        tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
            blocksparse_head_sliding_step: with a vert_stride above 1 a head sees the tokens of a block b of
            blocksparse_block_size tokens if b is among the last local_blocks, or if (b + offset) % vert_stride == 0,
            with offset = (tp_rank * heads + head) * step + 1, or (tp_rank * kv_heads + kv_head) * -step + 1 for a
            negative step. The ids of blocks that no head sees must be valid too.

    Raises:
        TypeError: what is no array, or has the wrong dtype or library.
        ValueError: a shape, stride, device or number that does not fit.

    Unlike vLLM's kernel this one splits long sequences, so that there is no need to choose between v1 and v2.
    """
    sparse = _Sparse(
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        tp_rank,
    )
    _as_vllm(
        twin.paged_attention_v1,
        out,
        None,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        sparse,
    )


@arrays.takes_dlpack
def paged_attention_v2(
    out: Any,
    exp_sums: Any,
    max_logits: Any,
    tmp_out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1` in partitions of 512 tokens, with the arguments of vLLM's operator of that name.

    Args:
        out: as in `paged_attention_v1`, like all that is not named here.
        exp_sums, max_logits: float32 [seqs, heads, max_partitions] with at least ceil(max_seq_len / 512) partitions:
            written, for the partitions of each sequence's length, with the greatest score and the sum of
            exp(score - greatest).
        tmp_out: [seqs, heads, max_partitions, head_dim], like `query`: written with each partition's own attention.

    Raises:
        TypeError, ValueError: as `paged_attention_v1`.

    The sums of a row are formed in the same order whatever else is in the batch. Where the workspaces are not
    wanted, `paged_attention` is faster.
    """
    sparse = _Sparse(
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        tp_rank,
    )
    _as_vllm(
        twin.paged_attention_v2,
        out,
        (exp_sums, max_logits, tmp_out),
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        sparse,
    )


@arrays.takes_dlpack
def merge_attention_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, variant: str = "auto"
) -> Any:
    """Merge attention over two sets of tokens into attention over both of them.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Args:
        out_a, out_b: [..., heads, head_dim], float32, float16 or bfloat16, contiguous.
        lse_a, lse_b: float32 [..., heads], natural logarithms. Where one is -inf, its side counts for nothing, even if
            it is NaN.
        out: a pair of arrays (out, lse) to write into; the first may be `out_a` or `out_b`, the second neither lse.
        variant: "auto".

    Returns:
        (out, lse), like those of a side. Where both lse are -inf: 0 and -inf.

    Raises:
        TypeError: what is no array, or has the wrong dtype or library.
        ValueError: a shape, stride or device that does not fit.

    The identity is that of FlashAttention's and FlashInfer's merges (Ye et al., 2024).
    """
    library, device = arrays.place("out_a", out_a)
    dtype = library.dtype(out_a)
    if dtype not in DTYPES:
        check.dtype("out_a", dtype, DTYPES)
    shape = tuple(out_a.shape)
    if len(shape) < 2 or shape[-1] < 1:
        check.fail("out_a", "of shape [..., heads, head_dim]", list(shape))
    if not 1 <= shape[-1] <= 2**16:
        check.fail("out_a", f"of a head_dim in [1, {2**16}]", shape[-1])
    check.one_of("variant", variant, ("auto",))
    like = "out_a's"
    arrays.expect("out_a", out_a, "out_a", library, device, (dtype,), shape, like)
    arrays.expect("out_b", out_b, "out_a", library, device, (dtype,), shape, like)
    like = "out_a's without head_dim"
    arrays.expect("lse_a", lse_a, "out_a", library, device, ("float32",), shape[:-1], like)
    arrays.expect("lse_b", lse_b, "out_a", library, device, ("float32",), shape[:-1], like)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            check.fail("out", "a pair (out, lse)", type(out).__name__, TypeError)
        arrays.expect("out[0]", out[0], "out_a", library, device, (dtype,), shape, "out_a's")
        arrays.expect("out[1]", out[1], "out_a", library, device, ("float32",), shape[:-1], like)
    if device is None:
        return arrays.on_host(twin.merge_attention_states, out_a, out_a, lse_a, out_b, lse_b, out=out)
    merged, lse = out or (library.empty(shape, dtype, out_a), library.empty(shape[:-1], "float32", out_a))
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if rows == 0:
        return out or (merged, lse)
    addresses = [library.address(x) for x in (out_a, lse_a, out_b, lse_b, merged, lse)]
    if addresses[5] in (addresses[1], addresses[3]):
        check.fail("out[1]", "another array than lse_a and lse_b, which are read while it is written", "one of them")
    vector = 16 // arrays.ITEM_SIZE[dtype]
    if shape[-1] % vector or (addresses[0] | addresses[2] | addresses[4]) % 16:
        vector = 1
    blocks = -(-rows * (shape[-1] // vector) // 128)
    if blocks > 2**31 - 1:
        check.fail("out_a", f"of at most {(2**31 - 1) * 128 * vector} elements", f"shape {list(shape)}")
    _merge.variant(_CUDA_TYPE[dtype], vector).launch(
        device, library.stream(device), (blocks, 1, 1), (128, 1, 1), 0, *addresses, rows, shape[-1]
    )
    return out or (merged, lse)


def _like(array: Any, *_: Any, **__: Any) -> tuple[Any, Any, str]:
    return array, array.shape, str(array.dtype).removeprefix("torch.")


def _logs_like(array: Any) -> tuple[Any, Any, str]:
    return array, array.shape[:-1], "float32"


_VLLM = (
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, Tensor block_tables, "
    "Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor? k_scale, "
    "Tensor? v_scale, int tp_rank=0, int blocksparse_local_blocks=0, int blocksparse_vert_stride=0, "
    "int blocksparse_block_size=64, int blocksparse_head_sliding_step=0) -> ()"
)
_PAGED = (
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, *, str layout='vllm', "
    "float? scale=None, Tensor? alibi_slopes=None, int? window=None, float? softcap=None, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, str kv_cache_dtype='auto', int? split=None, str variant='auto') -> "
)
#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    f"paged_attention{_PAGED}(Tensor attended)": lambda query, *_, **__: [_like(query)],
    f"paged_attention.lse{_PAGED}(Tensor attended, Tensor lse)": (
        lambda query, *_, **__: [_like(query), _logs_like(query)]
    ),
    f"paged_attention_v1(Tensor(a!) out, {_VLLM}": None,
    f"paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, Tensor(d!) tmp_out, {_VLLM}": None,
    "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, str variant='auto') "
    "-> (Tensor merged, Tensor lse)": lambda out_a, *_, **__: [_like(out_a), _logs_like(out_a)],
}
