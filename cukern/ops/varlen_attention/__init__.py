"""Attention of many tokens per sequence, without padding: over packed keys and values, or over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cukern.ops.varlen_attention.choose import MAX_DIM, VARIANTS, Call, Heads, attend
from cukern.reference import varlen_attention as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_place,
    expect_table,
)  # fmt: skip
from cukern.runtime.op import op
from cukern.runtime.plan import outputs, run_twin

__all__ = ["varlen_attention"]

DTYPES = ("float32", "float16", "bfloat16")
MAX_HEADS = 2**16 - 1
MAX_TOKENS = 2**30
MAX_PAGE_SIZE = 2**16
_UNLIMITED = 2**30  # the field of a window without a limit


def _strides(name: str, array: Array) -> tuple[int, ...]:
    """Return the strides of tokens, heads and pages, in bytes. Raises ValueError unless each head is contiguous."""
    if array.strides[-1] != 1 and array.shape[-1] > 1 and all(size != 0 for size in array.shape):
        check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")
    *pages, tokens, heads, _ = (stride * array.item_size for stride in array.strides)
    return (tokens, heads, *pages)


def _check_heads(q: Any, k: Any, v: Any, paged: bool) -> None:
    """Raise TypeError or ValueError unless queries, keys and values fit one another."""
    expect_array("q", q, DTYPES, ("tokens", "heads", "dim"))
    tokens, heads, dim = q.shape
    if not (1 <= dim <= MAX_DIM and 1 <= heads <= MAX_HEADS):
        check.fail("q", f"of 1 to {MAX_HEADS} heads of a dim in [1, {MAX_DIM}]", f"{heads} heads of {dim}")
    symbols = ("pages", "page_size", "kv_heads", "dim") if paged else ("memory_tokens", "kv_heads", "dim")
    for name, array in (("k", k), ("v", v)):
        expect_place(name, array, q, "q")
        check.dtype(name, array.dtype, (q.dtype,))
        takers = {3: "varlen_attention without block_table"} if paged else {4: "varlen_attention with block_table"}
        check.dimensions(name, array.shape, (*symbols[:-1], "dim" if name == "k" else "dim_v"), takers)
    *outer, kv_heads, _ = k.shape
    if k.shape[-1] != dim or not kv_heads or heads % kv_heads:
        check.fail("k", f"of a divisor of {heads} heads of {dim}, like q", f"{kv_heads} heads of {k.shape[-1]}")
    dim_v = v.shape[-1]
    check.shape("v", v.shape, (*outer, kv_heads, dim_v), f"[{', '.join(symbols[:-1])}, dim_v]")
    if not 1 <= dim_v <= MAX_DIM:
        check.fail("v", f"of a dim_v in [1, {MAX_DIM}]", dim_v)
    if paged and (k.shape[1] % 8 or not 8 <= k.shape[1] <= MAX_PAGE_SIZE):
        check.fail("k", f"of pages of a multiple of 8 tokens, at most {MAX_PAGE_SIZE}", k.shape[1])
    for name, size in (("q", tokens), ("k", k.shape[0])):
        if size > MAX_TOKENS:
            check.fail(name, f"of at most {MAX_TOKENS} {'pages' if paged and name == 'k' else 'tokens'}", size)


def _check_lengths(q: Array, k: Array, sums: Any, key_sums: Any, used: Any, table: Any) -> int:
    """Check the lengths and the block table. Return the elements between the rows of the table."""
    expect_place("cu_seqlens_q", sums, q, "q")
    check.dimensions("cu_seqlens_q", sums.shape, ("sequences + 1",))
    count = sums.shape[0]
    if count < 1:
        check.fail("cu_seqlens_q", "of shape [sequences + 1], with a 0 first", "an empty array")
    expect("cu_seqlens_q", sums, q, "q", ("int32",), (count,), "[sequences + 1]")
    if key_sums is not None:
        expect("cu_seqlens_k", key_sums, q, "q", ("int32",), (count,), "[sequences + 1]")
    if used is not None:
        expect("seqused_k", used, q, "q", ("int32",), (count - 1,), "[sequences]")
    if table is None:
        if key_sums is None and k.shape[0] != q.shape[0]:
            check.fail("k", "of as many tokens as q where there is no cu_seqlens_k", k.shape[0])
        return 0
    if used is None and key_sums is None:
        check.fail("seqused_k", "the lengths of the sequences in the cache, with block_table", None)
    return int(expect_table("block_table", table, q, "q", count - 1, ("sequences", "max_pages"))[1])


def _window(window: Any, causal: bool) -> tuple[int, int]:
    """Return the limits of a window, left and right."""
    if window is None:
        window = (-1, -1)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        check.fail("window", "a pair (left, right) of integers, -1 for no limit", window, TypeError)
    left, right = (check.integer(f"window[{i}]", x, -1) for i, x in enumerate(window))
    limits = [_UNLIMITED if x < 0 else min(x, _UNLIMITED) for x in (left, right)]
    return limits[0], 0 if causal else limits[1]


def _results(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> list[Result]:
    attended = Result((*q.shape[:-1], v.shape[-1]), dtype_name(q), "[tokens, heads, dim_v]")
    return [attended, Result((q.shape[1], q.shape[0]), "float32", "[heads, tokens]")]


@op(twin.varlen_attention, "attended, lse", _results)
def varlen_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None,
    *,
    block_table: AnyArray | None = None,
    seqused_k: AnyArray | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    return_lse: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Attend within each sequence of a batch without padding.

    Sequence s has the query rows cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1. Its keys and values are in packed rows,
    or in the pages of a cache. With n queries and m keys, query i has position m - n + i, and sees the keys j from
    position - left to position + right. With g = heads / kv_heads, by an online softmax in float32,

        score[j] = scale * q[i, h] . k[j, h // g];    with softcap: softcap * tanh(score / softcap)
        denominator = sum over j of exp(score[j]);    with sinks: + exp(sinks[h])
        out[i, h] = sum over j of exp(score[j]) / denominator * v[j, h // g]
        lse[h, i] = log(denominator)

    A query that sees no key, and rows after the last sequence, get zeros, and an lse of the sink, or -inf without
    sinks. The bits of a row depend on its own sequence alone. With "wgmma" and "mma" tiles of keys begin at fixed
    positions of the sequence, so a row has the same bits if its sequence comes in one call or in chunks.

    Args:
        q: [tokens, heads, dim], float32, float16 or bfloat16, dim at most 256, contiguous along the last dimension.
            Tokens and heads may be strided, so q, k and v may be slices of the output of one QKV projection: for
            example, q may be qkv.view(tokens, 3, heads, dim)[:, 0].
        k, v: [memory_tokens, kv_heads, dim] and [memory_tokens, kv_heads, dim_v], of the dtype of `q`; kv_heads divides
            heads. With block_table: [pages, page_size, kv_heads, dim] and [..., dim_v], where page_size is a multiple
            of 8. All strides but the last are free.
        cu_seqlens_q: int32 [sequences + 1], the start of each sequence: 0, then sums of lengths, which may be 0. The
            last one is at most `tokens`. Numbers in host memory are checked. On a GPU a check would take a
            synchronization; the kernel stays within the arrays for any numbers.
        cu_seqlens_k: the same for the sequences of keys and values. None without block_table: cu_seqlens_q is used, and
            memory_tokens must equal tokens.
        block_table: int32 [sequences, max_pages]; rows may be strided. Key j of sequence s is in slot j % page_size of
            page block_table[s, j // page_size]. Entries for keys that no query of the sequence sees are not used.
        seqused_k: int32 [sequences], the number of keys of each sequence. With block_table it gives the lengths; if it
            is None, cu_seqlens_k gives them. Without block_table it limits the lengths by cu_seqlens_k.
        scale: a factor of the scores; 1 / sqrt(dim) if None.
        causal: True: a window's right limit is 0.
        window: (left, right), the number of keys that a query sees before and after its position; -1: no limit.
            `paged_attention(window=W)` has the window (W - 1, 0). A hidden key has a weight of 0, but infinities and
            NaN in its value may affect the result.
        softcap: from 1e-30 to 1e30, limits the scores to the range from -softcap to softcap, by the formula above.
        sinks: float32, bfloat16 or float16 [heads], the score of an additional key whose value is 0.
        return_lse: also return lse, for `merge_attention_states(lse_heads_first=True)`.
        out: [tokens, heads, dim_v], contiguous, to write into and return; it shares no memory with q, k and v. With
            return_lse a pair.
        variant: "auto", or a kernel by name: "wgmma" (Hopper's tensor cores; needs what "mma" needs, arrays with
            elements and positive strides, and a scale of at least 1e-30), "mma" (tensor cores; needs a 16-bit dtype,
            aligned rows and dims that are multiples of 8) or "fma" (products in float32, for all arrays). "wgmma" and
            "mma" round the softmax weights to the dtype before the multiplication by the values. "auto" takes the first
            of the three variants that can compute the call. The lengths do not affect the choice.

    Returns:
        out [tokens, heads, dim_v] of the dtype of `q`, in the library and on the device of `q`; with return_lse
        (out, lse) with lse float32 [heads, tokens]. A NaN among the scores of a query makes its result NaN. If a length
        exceeds its row of the block table, or a query sees a page outside the cache, nothing is read there, and the
        result is NaN; other queries of the sequence may be NaN, too. Arrays in host memory go through the NumPy
        reference.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The arguments mean what they mean in FlashAttention's `flash_attn_varlen_func`. That function also takes the largest
    lengths, which this function does not need. The layout is as in FasterTransformer's and Effective Transformer's
    batches without padding, paged attention is from vLLM (Kwon et al., 2023), and sinks from Xiao et al. (2023).
    """
    paged = block_table is not None
    _check_heads(q, k, v, paged)
    between_tables = _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else check.number("scale", scale)
    left, right = _window(window, causal)
    if softcap is not None:
        softcap = check.number("softcap", softcap)
        if not 1e-30 <= softcap <= 1e30:
            check.fail("softcap", "in [1e-30, 1e30]", softcap)
    if sinks is not None:
        expect("sinks", sinks, q, "q", DTYPES, (heads,), "[heads]")
    inputs = [Heads(name, array, _strides(name, array)) for name, array in (("q", q), ("k", k), ("v", v))]
    results = _results(q, k, v)
    found = outputs(out, q, "q", *results[: 1 + return_lse], names="a pair (out, lse) with return_lse")
    attended, lse = found if return_lse else (found, None)
    if q.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if tokens == 0:
        return found
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_k, block_table
    call = _call(inputs, lengths, between_tables, attended, scale, softcap or 0.0)
    attend(call, variant, {"lse": lse, "sinks": sinks, "left": left, "right": right})
    return found


def _call(
    inputs: list[Heads], lengths: tuple[Any, Any, Any, Any], table_stride: int, out: Array, scale: float, softcap: float
) -> Call:
    """Return the checked arguments of a call, with the fields of the kernels' parameters."""
    q, k, v = (x.array for x in inputs)
    cu_seqlens_q, cu_seqlens_k, seqused_k, table = lengths
    dims = [x.shape[-1] * x.item_size for x in (q, v)]
    aligned = min(x.alignment for x in (q, k, v, out)) == 16 and not any(x % 16 for x in dims)
    aligned = aligned and all(stride % 16 == 0 for x in inputs for stride in x.strides)
    sequences, page_size = cu_seqlens_q.shape[0] - 1, 1 if table is None else k.shape[1]
    fields = {
        **{x.name: x.array for x in inputs},
        "out": out,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_q if cu_seqlens_k is None and table is None else cu_seqlens_k,
        "seqused_k": seqused_k,
        "block_table": table,
        "table_stride": table_stride,
        "q_strides": inputs[0].strides,
        "k_strides": (*inputs[1].strides, 0)[:3],
        "v_strides": (*inputs[2].strides, 0)[:3],
        "tokens": q.shape[0],
        "rows": k.shape[0],
        "page_size": page_size,
        "max_pages": 0 if table is None else table.shape[1],
        "sequences": sequences,
        "heads": q.shape[1],
        "group": q.shape[1] // k.shape[-2],
        "dim": q.shape[-1],
        "dim_v": v.shape[-1],
    }
    return Call(inputs, sequences, table, page_size, scale, softcap, aligned, fields)
