"""Rotary position embedding, alone or fused with norms and the store to the KV cache."""

from __future__ import annotations

import operator
from typing import Any

from cukern.formats.rotary import LAYOUTS, has_second_half
from cukern.ops.kv_cache.choose import check_slots, distances, expect_dimensions
from cukern.ops.norm.rows import expect_epsilon
from cukern.reference import rotary_embedding as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.describe import Array, expect, expect_array, expect_place
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, launch, run_twin
from cukern.runtime.vectors import ceil_div, divisor, why_width

__all__ = ["fused_qk_norm_rope_and_cache", "rotary_embedding"]

DTYPES = ("float32", "float16", "bfloat16")
#: "wide" loads 16 bytes at a time, "narrow" one element.
VARIANTS = ("auto", "wide", "narrow")
MAX_ROWS = 2**31 - 2**12
#: "narrow" has one thread per pair of rotated elements of a head, and a block of 256 threads processes whole heads. So
#: a head has at most 256 pairs.
MAX_ROTARY_DIM = 512
_WIDEST = 16

_kernel = Kernel("rotary_embedding/rotate", "rotary_embedding")


def _variant(dtype: str, angle_dtype: str, wide: bool, layout: str) -> Variant:
    loaded, stored = ("PAIRS" if in_pairs else "HALVES" for in_pairs in LAYOUTS[layout])
    vector = _WIDEST // arrays.ITEM_SIZE[dtype] if wide else 1
    return _kernel.variant(arrays.CUDA_TYPE[dtype], arrays.CUDA_TYPE[angle_dtype], vector, loaded, stored)


_kernel.at_import = [_variant("bfloat16", "bfloat16", True, layout).instance for layout in ("half", "deinterleaved")]
_kernel.specialized = [
    _variant(dtype, angle_dtype, True, layout).instance
    for dtype in DTYPES
    for angle_dtype in dict.fromkeys((dtype, "float32"))
    for layout in LAYOUTS
]


def _expect_heads(name: str, array: Array, rotary_dim: int) -> None:
    """Require `rotary_dim` contiguous elements per head, and heads that do not overlap."""
    if array.shape[-1] < rotary_dim:
        check.fail(name, f"of a head_dim of at least {rotary_dim} (rotary_dim)", array.shape[-1])
    strides, width = array.strides, array.shape[-1]
    if any(n == 0 for n in array.shape):
        return
    if strides[-1] != 1 and width > 1:
        check.fail(name, "contiguous along its last dimension", f"strides {strides} (in elements)")
    outer = [(abs(x), n) for x, n in zip(strides[:-1], array.shape[:-1], strict=True) if n > 1]
    for stride, count in sorted(outer, key=operator.itemgetter(0)):
        if stride < width:
            check.fail(name, "of heads that do not overlap", f"strides {strides} (in elements)")
        width = stride * (count - 1) + width


def _check_angles(cos: Any, sin: Any, query: Array, unsqueeze_dim: int, rotary_dim: int | None) -> tuple[int, int]:
    """Check cos and sin. Return rotary_dim, and the number of columns of cos."""
    lengths = [n for i, n in enumerate(query.shape[:-1]) if i != unsqueeze_dim]
    symbols = "[tokens, rotary_dim]" if len(lengths) == 1 else "[batch or 1, tokens, rotary_dim]"
    for name, array in (("cos", cos), ("sin", sin)):
        expect_place(name, array, query, "query")
        check.dtype(name, array.dtype, dict.fromkeys((query.dtype, "float32")))
        shape = array.shape
        fits = len(shape) == len(query.shape) - 1 and shape[-2] == lengths[-1]
        if not fits or (len(lengths) == 2 and shape[0] != lengths[0] and shape[0] != 1):
            check.fail(name, f"of shape {symbols} with those of query, {lengths}", list(shape))
        if array.strides[-1] != 1 and shape[-1] > 1 and all(n != 0 for n in shape):
            check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")
    check.dtype("sin", sin.dtype, (cos.dtype,))
    columns = cos.shape[-1]
    if sin.shape[-1] != columns:
        check.fail("sin", f"of {columns} columns like cos", sin.shape[-1])
    rotary_dim = columns if rotary_dim is None else check.integer("rotary_dim", rotary_dim, 2, MAX_ROTARY_DIM)
    if rotary_dim % 2 or not 2 <= rotary_dim <= MAX_ROTARY_DIM:
        name = "cos" if rotary_dim == columns else "rotary_dim"
        check.fail(name, f"of an even rotary_dim in [2, {MAX_ROTARY_DIM}]", rotary_dim)
    if columns not in (rotary_dim, rotary_dim // 2):
        check.fail("cos", f"of {rotary_dim} (rotary_dim) or {rotary_dim // 2} columns", columns)
    return rotary_dim, columns


def _strides(array: Array, unsqueeze_dim: int) -> tuple[Any, Any, Any]:
    """Return the strides of batch entries, heads and tokens, in bytes."""
    outer = [x * array.item_size for x in array.strides[:-1]]
    head = outer.pop(unsqueeze_dim)
    return (outer[0] if len(outer) == 2 else 0), head, outer[-1]


def _angle_strides(array: Array, batch: Any) -> tuple[Any, Any]:
    """Return the strides of batch entries and tokens of cos or sin, in bytes."""
    if len(array.shape) == 2:
        return 0, array.strides[0] * array.item_size
    shared = array.shape[0] == 1 and batch != 1
    return 0 if shared else array.strides[0] * array.item_size, array.strides[1] * array.item_size


def _choose_wide(variant: str, half: int, columns: int, accessed: list[tuple[Array, tuple[Any, ...]]]) -> bool:
    """Return whether the kernel loads 16 bytes at a time."""
    check.one_of("variant", variant, VARIANTS)
    vector = _WIDEST // accessed[0][0].item_size
    wide = half % vector == 0 and columns % vector == 0
    wide = wide and all(x.alignment == _WIDEST and all(y % _WIDEST == 0 for y in strides) for x, strides in accessed)
    if variant == "wide" and not wide:
        why = "halves, addresses or strides are no multiples of 16 bytes"
        check.fail("variant", "'auto' or 'narrow' here", f"'wide': {why}")
    return wide and variant != "narrow"


@op(twin.rotary_embedding)
def rotary_embedding(
    query: WrittenArray,
    key: WrittenArray,
    cos: AnyArray,
    sin: AnyArray,
    *,
    layout: str = "half",
    rotary_dim: int | None = None,
    unsqueeze_dim: int = 1,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Rotate the heads of queries and keys by the angles of their positions, in place.

    For pair j < rotary_dim / 2 of elements (first, second), with the cosine c and the sine s of the token's angle j,

        first', second' = first * c - second * s, second * c + first * s

    The result is computed in float32 and rounded once. `layout` sets the elements of pair j. "half": x[j] and
    x[j + rotary_dim / 2] (Llama, Qwen). "interleaved": x[2 j] and x[2 j + 1] (GLM, GPT-J). "deinterleaved": pairs are
    read as in "interleaved" and written as in "half" (DeepSeek-V3 in transformers).

    Args:
        query: [tokens, heads, head_dim], or [batch, heads, tokens, head_dim] as in transformers; float32, float16 or
            bfloat16. Written. The last dimension is contiguous, and heads do not overlap.
        key: the same, with any number of heads and any head_dim. Written.
        cos, sin: [tokens, rotary_dim], or [batch or 1, tokens, rotary_dim], in the dtype of `query` or float32. In all
            layouts but "interleaved", the second element of pair j uses column j + rotary_dim / 2. If rotary_dim is
            given, rotary_dim / 2 columns are enough.
        layout: "half", "interleaved" or "deinterleaved".
        rotary_dim: even, at most 512 and at most head_dim; None: the number of columns of `cos`. The other elements of
            a head do not change.
        unsqueeze_dim: the dimension of the heads in `query` and `key`: 1, or 2 for [batch, tokens, heads, head_dim].
        variant: "auto", "wide" (loads of 16 bytes) or "narrow" (one element).

    Returns:
        query and key.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The method is by Su et al. (arXiv:2104.09864). The positional arguments are as in transformers'
    `apply_rotary_pos_emb`, which also rounds each product.
    """
    expect_array("query", query, DTYPES)
    if len(query.shape) not in (3, 4):
        check.fail("query", "of shape [tokens, heads, head_dim] or [batch, heads, tokens, head_dim]", list(query.shape))
    dims = len(query.shape)
    check.one_of("layout", layout, tuple(LAYOUTS))
    check.integer("unsqueeze_dim", unsqueeze_dim, 1, dims - 2)
    expect_place("key", key, query, "query")
    check.dtype("key", key.dtype, (query.dtype,))
    same = len(key.shape) == dims and all(i == unsqueeze_dim or key.shape[i] == query.shape[i] for i in range(dims - 1))
    if not same:
        check.fail("key", f"like query but for heads and head_dim, {list(query.shape)}", list(key.shape))
    rotary_dim, columns = _check_angles(cos, sin, query, unsqueeze_dim, rotary_dim)
    for name, array in (("query", query), ("key", key)):
        _expect_heads(name, array, rotary_dim)
    if query.on_host:
        run_twin(variant, VARIANTS)
        return query, key
    lengths = [n for i, n in enumerate(query.shape[:-1]) if i != unsqueeze_dim]
    batch, tokens = lengths if len(lengths) == 2 else (1, lengths[0])
    strides = {name: _strides(x, unsqueeze_dim) for name, x in (("query", query), ("key", key))}
    angles = {name: _angle_strides(x, batch) for name, x in (("cos", cos), ("sin", sin))}
    accessed = [(query, strides["query"]), (key, strides["key"]), (cos, angles["cos"]), (sin, angles["sin"])]
    half = rotary_dim // 2
    wide = _choose_wide(variant, half, columns, accessed)
    heads = query.shape[unsqueeze_dim] + key.shape[unsqueeze_dim]
    rows = batch * tokens * heads
    if rows > MAX_ROWS:
        check.fail("query", f"of at most {MAX_ROWS} heads of tokens, with those of key", rows)
    if rows == 0:
        return query, key
    threads = _kernel.constant("THREADS")
    head_threads = half // (_WIDEST // query.item_size if wide else 1)
    second = half if has_second_half(layout, columns, rotary_dim) else 0
    launch(
        _variant(query.dtype, cos.dtype, wide, layout),
        ceil_div(rows, threads // head_threads),
        threads,
        why=asked(variant) or why_width(_WIDEST if wide else query.item_size, "the halves of heads and of angles"),
        query=(query, *strides["query"]),
        key=(key, *strides["key"]),
        cos=cos,
        sin=sin,
        cos_batch_stride=angles["cos"][0],
        cos_token_stride=angles["cos"][1],
        sin_batch_stride=angles["sin"][0],
        sin_token_stride=angles["sin"][1],
        by_heads=divisor(heads),
        by_tokens=divisor(tokens),
        by_threads=divisor(head_threads),
        rows=rows,
        all_heads=heads,
        query_heads=query.shape[unsqueeze_dim],
        tokens=tokens,
        head_threads=head_threads,
        half=half,
        second_half=second,
    )
    return query, key


# --- norms, rotation and cache --------------------------------------------------------------------------

#: The elements of a vector. A lane holds two vectors of a head, so the 32 lanes of a warp hold at most 512 elements.
_VECTOR, MAX_HEAD_DIM = 8, 512
_fused = Kernel("rotary_embedding/norm_rotate_store", "norm_rotate_store")


def _lanes(head_dim: int) -> int:
    return max(1 << (head_dim // (2 * _VECTOR) - 1).bit_length(), 2)


def _fused_variant(dtype: str, weight_dtype: str, angle_dtype: str, head_dim: int, layout: str, norm: bool) -> Variant:
    loaded, stored = ("PAIRS" if in_pairs else "HALVES" for in_pairs in LAYOUTS[layout])
    types = (arrays.CUDA_TYPE[x] for x in (dtype, weight_dtype, angle_dtype))
    return _fused.variant(*types, _lanes(head_dim), loaded, stored, norm)


_BF16 = "bfloat16"
_fused.at_import = [_fused_variant(_BF16, _BF16, _BF16, 128, "half", norm).instance for norm in (True, False)]
_fused.specialized = [
    _fused_variant(dtype, dtype, dtype, head_dim, layout, norm).instance
    for dtype in DTYPES
    for head_dim in (64, 128, 256)
    for layout in LAYOUTS
    for norm in (True, False)
]


def _check_weights(query: Array, weights: dict[str, Any], epsilon: float | None, width: int) -> tuple[str, float]:
    """Return the dtype of the weights, and the epsilon (0 if there are no norms)."""
    given = {name: x for name, x in weights.items() if x is not None}
    for name, array in given.items():
        if epsilon is None:
            check.fail(name, "None without epsilon, as there is no norm", "an array")
        expect(name, array, query, "query", dict.fromkeys((query.dtype, "float32")), (width,), "[head_dim]")
    dtypes = {x.dtype for x in given.values()}
    if len(dtypes) > 1:
        check.fail("k_weight", "of the dtype of q_weight", weights["k_weight"].dtype)
    return dtypes.pop() if dtypes else query.dtype, 0.0 if epsilon is None else expect_epsilon(epsilon)


def _check_heads(
    heads: dict[str, Any], caches: dict[str, Any], slot_mapping: Any
) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Check the arrays. Return their strides in bytes, and the kernel parameters that describe the slots."""
    query, key, key_cache = heads["query"], heads["key"], caches["key_cache"]
    symbols = ("tokens", "heads", "head_dim")
    expect_array("query", query, DTYPES, symbols)
    tokens, _, head_dim = query.shape
    if head_dim % (2 * _VECTOR) or not 0 < head_dim <= MAX_HEAD_DIM:
        check.fail("query", f"of a head_dim that is a multiple of {2 * _VECTOR}, at most {MAX_HEAD_DIM}", head_dim)
    for name in ("key", "value"):
        expect_dimensions(name, heads[name], query, "query", (query.dtype,), symbols)
        check.shape(name, heads[name].shape, (tokens, key.shape[1], head_dim), "[tokens, kv_heads, head_dim]")
    strides: dict[str, tuple[Any, ...]] = {}
    for name, array in heads.items():
        _expect_heads(name, array, head_dim)
        strides[name] = _strides(array, 1)[:0:-1]
    of_cache = ("blocks", "block_size", "kv_heads", "head_dim")
    for name, cache in caches.items():
        expect_dimensions(name, cache, query, "query", (query.dtype,), of_cache)
        check.shape(name, cache.shape, (*key_cache.shape[:2], key.shape[1], head_dim), f"[{', '.join(of_cache)}]")
        strides[name] = distances(name, cache, 3, written=True)
    slots = check_slots(slot_mapping, query, "query", "key_cache", *key_cache.shape[:2])
    check.shape("slot_mapping", slot_mapping.shape, (tokens,), "[tokens]")
    return strides, {x: slots.fields[x] for x in ("slot_mapping", "slots", "block_size", "by_block_size")}


def _expect_aligned(given: dict[str, Array | None], strides: dict[str, tuple[Any, ...]]) -> None:
    """Require that all addresses and strides are multiples of 16 bytes."""
    for name, array in given.items():
        if array is None:
            continue
        if array.alignment < _WIDEST:
            check.fail(name, f"at a multiple of {_WIDEST} bytes", f"an address that is a multiple of {array.alignment}")
        if any(x % _WIDEST != 0 for x in strides.get(name, ())):
            check.fail(name, f"of strides of whole {_WIDEST} bytes", f"strides {array.strides} (in elements)")


@op(twin.fused_qk_norm_rope_and_cache)
def fused_qk_norm_rope_and_cache(
    query: WrittenArray,
    key: AnyArray,
    value: AnyArray,
    cos: AnyArray,
    sin: AnyArray,
    key_cache: WrittenArray,
    value_cache: WrittenArray,
    slot_mapping: AnyArray,
    q_weight: AnyArray | None = None,
    k_weight: AnyArray | None = None,
    epsilon: float | None = None,
    *,
    weight_offset: float = 0.0,
    layout: str = "half",
    rotary_dim: int | None = None,
) -> AnyArray:
    """Normalize and rotate queries and keys, and store keys and values in a paged cache.

    The results have the same bits as three calls: `rms_norm` on each head of query and key (if `epsilon` is given),
    then `rotary_embedding`, then `reshape_and_cache_flash`.

    Args:
        query: [tokens, heads, head_dim], float32, float16 or bfloat16; head_dim a multiple of 16, at most 512. Written.
            Tokens and heads may be strided by multiples of 16 bytes.
        key, value: [tokens, kv_heads, head_dim], of the same dtype, strided like `query`.
        cos, sin: [tokens, rotary_dim] or [tokens, rotary_dim / 2], as in `rotary_embedding`.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim] in the dtype of `query`. Written.
        slot_mapping: int64 [tokens]. A slot outside of the cache, such as -1, is skipped.
        q_weight, k_weight: [head_dim], in the dtype of `query` or float32; None: all weights are 1.
        epsilon: the epsilon of the norms; None: do not normalize.
        weight_offset: added to the weights; 1 for models that store the weights minus 1.
        layout: as in `rotary_embedding`.
        rotary_dim: a multiple of 16, at most head_dim; None: the number of columns of `cos`.

    Returns:
        query.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.
    """
    check.one_of("layout", layout, tuple(LAYOUTS))
    heads = {"query": query, "key": key, "value": value}
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    strides, slots = _check_heads(heads, caches, slot_mapping)
    rotary_dim, columns = _check_angles(cos, sin, query, 1, rotary_dim)
    head_dim = query.shape[2]
    if rotary_dim > head_dim or rotary_dim % (2 * _VECTOR):
        check.fail("rotary_dim", f"a multiple of {2 * _VECTOR}, at most the head_dim, {head_dim}", rotary_dim)
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    weight_dtype, own_epsilon = _check_weights(query, weights, epsilon, head_dim)
    offset = check.number("weight_offset", weight_offset)
    if query.on_host:
        run_twin()
        return query
    angles = {name: (x.strides[0] * x.item_size,) for name, x in (("cos", cos), ("sin", sin))}
    _expect_aligned({**heads, **caches, "cos": cos, "sin": sin, **weights}, {**strides, **angles})
    all_heads, threads = query.shape[1] + 2 * key.shape[1], _fused.constant("THREADS")
    rows = query.shape[0] * all_heads
    if rows > MAX_ROWS:
        check.fail("query", f"of at most {MAX_ROWS} heads of tokens, with those of key and value", rows)
    if rows == 0:
        return query
    launch(
        _fused_variant(query.dtype, weight_dtype, cos.dtype, head_dim, layout, epsilon is not None),
        ceil_div(rows, threads // _lanes(head_dim)),
        threads,
        why=f"head_dim {head_dim}: {_lanes(head_dim)} lanes per head, at most two vectors of {_VECTOR} numbers each",
        **{name: (x, *strides[name]) for name, x in {**heads, **caches}.items()},
        **slots,
        query_weight=q_weight,
        key_weight=k_weight,
        cos=cos,
        sin=sin,
        cos_stride=angles["cos"][0],
        sin_stride=angles["sin"][0],
        by_heads=divisor(all_heads),
        rows=rows,
        all_heads=all_heads,
        query_heads=query.shape[1],
        kv_heads=key.shape[1],
        vectors=head_dim // _VECTOR,
        pairs=rotary_dim // (2 * _VECTOR),
        second_half=rotary_dim // 2 if has_second_half(layout, columns, rotary_dim) else 0,
        inverse_head_dim=1 / head_dim,
        epsilon=own_epsilon,
        offset=offset,
    )
    return query
