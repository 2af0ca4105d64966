"""Paged attention: the checks of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.runtime import arrays, check, fp8, template
from cukern.runtime.arrays import strides_of
from cukern.runtime.describe import Array, expect, expect_array, expect_place, expect_table

LAYOUTS = ("vllm", "flash")
DTYPES = ("float32", "float16", "bfloat16")
MAX_BLOCK_SIZE = 2**16
_LARGEST_SCALE = 1e30


class Sizes(NamedTuple):
    """The sizes of a call, by the names of the kernels' parameters."""

    seqs: int
    query_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int
    block_size: int
    max_blocks: int


class Sparse(NamedTuple):
    """vLLM's block-sparse pattern, by the names of the kernels' parameters."""

    sparse_local: int = 0
    sparse_stride: int = 0
    sparse_size: int = 64
    sparse_head_step: int = 0
    sparse_rank: int = 0


class Call(NamedTuple):
    query: Array
    cache: str  # for a uint8 cache, the FP8 dtype
    layout: str
    sizes: Sizes
    aligned: bool  # all addresses and strides are multiples of 16 bytes
    fields: dict[str, Any]  # of the kernels' parameters


def _check_cache_dtype(key_cache: Array, value_cache: Array, query: Array, kv_cache_dtype: str) -> str:
    """Return the dtype of the elements of the caches. For uint8 caches kv_cache_dtype gives it."""
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
    """Return blocks, kv_heads, block_size, and the strides in bytes."""
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
            one = axis is None or array.shape[axis] <= 1
            distances[f"{name}_{step}"] = 0 if one else array.strides[axis] * array.item_size  # type: ignore[index]
    return blocks, kv_heads, block_size, distances


def check_call(
    inputs: tuple[Any, Any, Any, Any, Any],
    scales: tuple[Any, Any, Any],
    layout: str,
    kv_cache_dtype: str,
    several: bool,
) -> Call:
    """Check the first five arrays, and the scales of scores, keys and values.

    If `several`, the query may have several tokens per sequence, and the scale of the scores may be None.
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
    most = template.constants("paged_attention/attend_scalar")["MAX_DIM"]
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
    if not abs(scale * key_factor) <= _LARGEST_SCALE:
        check.fail("scale", f"of at most {_LARGEST_SCALE:g}, with k_scale", scale * key_factor)
    sizes = Sizes(seqs, query_tokens, heads, kv_heads, head_dim, blocks, block_size, max_blocks)
    steps = [a * query.item_size for a, n in zip(query_strides, sizes[:3], strict=True) if n > 1]
    alignment = min(query.alignment, key_cache.alignment, value_cache.alignment)
    fields = {
        **dict(zip(("query", "keys", "values", "tables", "lengths"), inputs, strict=True)),
        **{"key_scale": key_scale, "value_scale": value_scale, "out_scale": value_factor},
        **dict(zip(("query_seq", "query_token", "query_head"), query_strides, strict=True)),
        **distances,
        "table_row": table_row,
        "scale": scale * key_factor,
    }
    aligned = alignment == 16 and not any(x % 16 for x in (*steps, *distances.values()))
    return Call(query, cache, layout, sizes, aligned, fields)


def check_per_head(name: str, array: Any, call: Call) -> None:
    if array is not None:
        expect(name, array, call.query, "query", ("float32",), (call.sizes.heads,), "[heads]")
