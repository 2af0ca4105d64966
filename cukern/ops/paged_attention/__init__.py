"""Attention from the last tokens of each sequence over a paged KV cache, and the merge of two attention results."""

from __future__ import annotations

import math
from typing import Any

from cukern.ops.paged_attention.checks import DTYPES, Sparse, check_call, check_per_head
from cukern.ops.paged_attention.choose import (
    CUDA_TYPE,
    VARIANTS,
    attend,
    specialize,  # noqa: F401  (found here by `cukern.specialize`)
    unit_tokens,
)
from cukern.reference import paged_attention as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_aligned,
    expect_array,
    expect_contiguous,
    expect_place,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import check_each_call, each_call, launch, outputs, run_twin
from cukern.runtime.vectors import ceil_div

__all__ = ["merge_attention_states", "paged_attention", "paged_attention_v1", "paged_attention_v2"]

PARTITION = twin.PARTITION
_merge = Kernel("paged_attention/merge_states", "merge_states")
#: From this many elements on, a thread of `merge_states` merges two 16-byte vectors instead of one. With fewer elements
#: the kernel is bound by latency. With lse_heads_first a thread always merges one vector, because two take 40% longer
#: on an H200.
_MANY_MERGED = 2**24


def _attended(query: Any, *_: Any, **__: Any) -> Result:
    return Result(query.shape, dtype_name(query), "query's")


def _logs(query: Any) -> Result:
    return Result(query.shape[:-1], "float32", "query's without head_dim")


@op(twin.paged_attention, "attended, lse", lambda query, *_, **__: [_attended(query), _logs(query)])
def paged_attention(
    query: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    *,
    layout: str = "vllm",
    scale: float | None = None,
    alibi_slopes: AnyArray | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: AnyArray | None = None,
    k_scale: AnyArray | float | None = None,
    v_scale: AnyArray | float | None = None,
    kv_cache_dtype: str = "auto",
    return_lse: bool = False,
    split: int | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Attend from the last tokens of each sequence over its keys and values in a paged cache.

    Query token i of a sequence has position = seq_len - query_tokens + i and sees the tokens t <= position. With g =
    heads / kv_heads, the function computes in float32:

        score[t] = scale * k_scale * query[i, h] . key[t, h // g]
                   with softcap:      score = softcap * tanh(score / softcap)
                   with alibi_slopes: score = score + alibi_slopes[h] * (t - position)
        denominator = sum over t of exp(score[t]);     with sinks: + exp(sinks[h])
        out[i, h] = v_scale * sum over t of exp(score[t]) / denominator * value[t, h // g]
        lse[i, h] = log(denominator)

    Token t is in slot t % block_size of block block_tables[s, t // block_size]. The tensor-core variants round the
    softmax weights to the query's dtype (with an 8-bit cache to float16) before the sum over values.

    Args:
        query: [seqs, heads, head_dim] or [seqs, query_tokens, heads, head_dim], float32, float16 or bfloat16,
            contiguous along the last dimension. head_dim is a multiple of 8, at most 512, and at most 256 on tensor
            cores.
        key_cache, value_cache: layout "vllm": [blocks, kv_heads, head_dim / x, block_size, x] with x elements in 16
            bytes, and [blocks, kv_heads, head_dim, block_size]; layout "flash": both [blocks, block_size, kv_heads,
            head_dim]. Of the query's dtype, float8_e4m3fn or float8_e5m2, or uint8 with a `kv_cache_dtype`. block_size
            is a multiple of 8. Blocks and heads, and in "flash" also tokens, may be strided, as in slices of an array
            [blocks, 2, ...].
        block_tables: int32 [seqs, max_blocks]; rows may be strided. Entries after the end of a sequence, or before its
            window, are not used.
        seq_lens: int32 [seqs], tokens in the cache, including the tokens of the query. A number below 0 counts as 0.
        layout: "vllm" or "flash".
        scale: head_dim ** -0.5 by default.
        alibi_slopes: float32 [heads].
        window: the maximum number of tokens that a query token sees, including itself.
        softcap: limits the scores to the range from -softcap to softcap.
        sinks: float32 [heads], the score of an additional token whose value is 0.
        k_scale, v_scale: a number, or float32 of one element on the device of `query`.
        kv_cache_dtype: "auto" (the dtype of the arrays), "fp8" or "fp8_e4m3", "fp8_e5m2".
        return_lse: also return lse: float32, of the query's shape without head_dim.
        split: None: the device divides the tokens evenly among thread blocks. A multiple of 64: each sequence is
            divided at multiples of this number, so that a row has the same bits in any batch. The workspace then holds
            head_dim float32 numbers for each of about seqs * query_tokens * heads * max_blocks * block_size / split
            partial results.
        out: a contiguous array to write the result into, at a multiple of 16 bytes; with `return_lse` a pair.
        variant: "auto", "specialized", "dynamic" (tensor cores, for 16-bit queries and block sizes that are multiples
            of 16) or "scalar" (everything).

    Returns:
        out, like `query`; with `return_lse` (out, lse). If a query token does not see any token, its out is 0, and its
        lse is the sink, or -inf without sinks. On a GPU the lengths and block ids cannot be checked before the launch.
        If a length or id points outside the table or the cache, or a length is above 2**30, nothing is read there, and
        the rows of that sequence are NaN. A NaN or infinite value may affect all rows that share its kv head, even rows
        that do not see its token.

    Raises:
        TypeError: a value that is not an array, or has the wrong dtype or library.
        ValueError: a shape, stride, device or option that does not fit.

    If a CuPy stream captures a CUDA graph, the workspace is returned to CuPy's pool after the capture, although replays
    use it. Therefore allocate nothing from that pool between replays, or capture with torch, whose graphs have their
    own memory pools.

    Sources: paged attention is from vLLM (Kwon et al., 2023), the division into equal shares from Stream-K (Osama et
    al., 2023), and sinks from Xiao et al. (2023).
    """
    inputs = query, key_cache, value_cache, block_tables, seq_lens
    call = check_call(inputs, (scale, k_scale, v_scale), layout, kv_cache_dtype, True)
    check_per_head("alibi_slopes", alibi_slopes, call)
    check_per_head("sinks", sinks, call)
    if window is not None:
        window = check.integer("window", window, 1)
    if softcap is not None:
        softcap = check.number("softcap", softcap)
        if not 1e-30 <= softcap <= 1e30:
            check.fail("softcap", "in [1e-30, 1e30]", softcap)
    if split is not None:
        split = check.integer("split", split, unit_tokens(), 2**30)
        if split % unit_tokens():
            check.fail("split", f"a multiple of {unit_tokens()}", split)
    results = (_attended(query), _logs(query)) if return_lse else (_attended(query),)
    found = outputs(out, query, "query", *results, names="a pair (out, lse) with return_lse")
    attended, lse = found if return_lse else (found, None)
    expect_aligned("out[0]" if return_lse else "out", attended)
    if query.on_host:
        return run_twin(variant, VARIANTS)
    fields = {"out": attended, "lse": lse, "slopes": alibi_slopes, "sinks": sinks}
    fields |= {"window": min(window or 0, 2**30), "softcap": softcap or 0.0}
    attend(call, split or 0, variant, Sparse(), None, **fields)
    return found


def _check_length(longest: float, max_seq_len: Any) -> None:
    """Check max_seq_len. `longest` is the number of tokens in all partitions of exp_sums."""
    if check.integer("max_seq_len", max_seq_len, 0) > longest:
        least = f"of at least {ceil_div(max_seq_len, PARTITION)} partitions (of {PARTITION} of max_seq_len)"
        check.fail("exp_sums", least, int(longest) // PARTITION)


def _as_vllm(
    out: Any,
    workspaces: tuple[Any, Any, Any] | None,
    inputs: tuple[Any, Any, Any, Any, Any],
    sizes: tuple[int, int, Any],
    alibi_slopes: Any,
    scales: tuple[Any, Any, Any],
    kv_cache_dtype: str,
    sparse: Sparse,
) -> None:
    """Launch `paged_attention_v1` or, with `workspaces`, `paged_attention_v2`."""
    query, (num_kv_heads, block_size, max_seq_len) = inputs[0], sizes
    call = check_call(inputs, scales, "vllm", kv_cache_dtype, False)
    shape, kv_heads, of_cache = query.shape, call.sizes.kv_heads, call.sizes.block_size
    expect("out", out, query, "query", (query.dtype,), shape, "query's")
    expect_aligned("out", out)
    for name, size, wanted in (("num_kv_heads", num_kv_heads, kv_heads), ("block_size", block_size, of_cache)):
        if check.integer(name, size, 1) != wanted:
            check.fail(name, f"{wanted} (of key_cache)", size)
    check_per_head("alibi_slopes", alibi_slopes, call)
    for name, value in zip(("local_blocks", "vert_stride", "block_size", "head_sliding_step"), sparse[:4], strict=True):
        check.integer(f"blocksparse_{name}", value, -(2**20) if name == "head_sliding_step" else 0, 2**20)
    check.integer("tp_rank", sparse.sparse_rank, 0, 2**20)
    if sparse.sparse_stride > 1 and (sparse.sparse_size == 0 or sparse.sparse_size % of_cache):
        check.fail("blocksparse_block_size", f"a multiple of block_size ({of_cache})", sparse.sparse_size)
    max_splits, longest = 0, math.inf
    if workspaces is not None:
        exp_sums, max_logits, tmp_out = workspaces
        expect_place("exp_sums", exp_sums, query, "query")
        if len(exp_sums.shape) == 3:
            max_splits, longest = exp_sums.shape[-1], exp_sums.shape[-1] * PARTITION
    if isinstance(max_seq_len, Array):  # raises here, because check_each_call would check the address of the array
        check.integer("max_seq_len", max_seq_len, 0)
    check_each_call(_check_length, longest, max_seq_len)
    if workspaces is not None:
        statistics, symbols = (*shape[:2], max_splits), "[seqs, heads, max_partitions]"
        for name, array in (("exp_sums", exp_sums), ("max_logits", max_logits)):
            expect(name, array, query, "query", ("float32",), statistics, symbols)
        symbols = "[seqs, heads, max_partitions, head_dim]"
        expect("tmp_out", tmp_out, query, "query", (query.dtype,), (*statistics, shape[2]), symbols)
        expect_aligned("tmp_out", tmp_out)
    if query.on_host:
        return run_twin()
    split = 0 if workspaces is None else PARTITION
    fields = {"out": out, "lse": None, "slopes": alibi_slopes, "sinks": None, "window": 0, "softcap": 0.0}
    return attend(call, split, "auto", sparse, workspaces, **fields)


@op(twin.paged_attention_v1, numbers=("max_seq_len",))
def paged_attention_v1(
    out: WrittenArray,
    query: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    num_kv_heads: int,
    scale: float,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: AnyArray | None,
    kv_cache_dtype: str,
    k_scale: AnyArray | float | None,
    v_scale: AnyArray | float | None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attend from the last token of each sequence, with the arguments of vLLM's operator of the same name.

    The function writes into `out` the result of `paged_attention` in layout "vllm" for one query token per sequence.

    Args:
        out: [seqs, heads, head_dim], like `query`.
        query: [seqs, heads, head_dim], float32, float16 or bfloat16; sequences may be strided.
        key_cache, value_cache: [blocks, kv_heads, head_dim / x, block_size, x], [blocks, kv_heads, head_dim,
            block_size].
        num_kv_heads, block_size: must equal the sizes of the caches.
        scale: factor of the scores.
        block_tables: int32 [seqs, max_blocks].
        seq_lens: int32 [seqs], none above `max_seq_len`.
        max_seq_len: an upper bound of the lengths.
        alibi_slopes: float32 [heads], or None; slope * (token - seq_len + 1) is added to a score.
        kv_cache_dtype: "auto" (the dtype of the caches), "fp8" or "fp8_e4m3", "fp8_e5m2".
        k_scale, v_scale: float32 of one element, a number, or None.
        tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
            blocksparse_head_sliding_step: vLLM's block-sparse pattern, which is used if vert_stride is above 1. A head
            then sees a block b of blocksparse_block_size tokens only if b is among the last local_blocks blocks, or if
            (b + offset) % vert_stride == 0. The offset is (tp_rank * heads + head) * step + 1, or (tp_rank * kv_heads +
            kv_head) * -step + 1 if the step is negative. Block ids must be valid even for blocks that no head sees.

    Raises:
        TypeError: a value that is not an array, or has the wrong dtype or library.
        ValueError: a shape, stride, device or number that does not fit.

    Unlike vLLM's v1 kernel, this function divides long sequences among blocks, so v2 is not needed for long sequences.
    """
    _as_vllm(
        out, None, (query, key_cache, value_cache, block_tables, seq_lens),
        (num_kv_heads, block_size, max_seq_len), alibi_slopes, (scale, k_scale, v_scale), kv_cache_dtype,
        Sparse(blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step,
               tp_rank),
    )  # fmt: skip


@op(twin.paged_attention_v2, numbers=("max_seq_len",))
def paged_attention_v2(
    out: WrittenArray,
    exp_sums: WrittenArray,
    max_logits: WrittenArray,
    tmp_out: WrittenArray,
    query: AnyArray,
    key_cache: AnyArray,
    value_cache: AnyArray,
    num_kv_heads: int,
    scale: float,
    block_tables: AnyArray,
    seq_lens: AnyArray,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: AnyArray | None,
    kv_cache_dtype: str,
    k_scale: AnyArray | float | None,
    v_scale: AnyArray | float | None,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Run `paged_attention_v1` in partitions of 512 tokens, with the arguments of vLLM's operator of the same name.

    Args:
        out: as in `paged_attention_v1`. The same holds for all arguments that are not listed here.
        exp_sums, max_logits: float32 [seqs, heads, max_partitions] with at least ceil(max_seq_len / 512) partitions.
            The function writes the sum of exp(score - maximum) and the maximum score of each partition.
        tmp_out: [seqs, heads, max_partitions, head_dim], like `query`. The function writes the attention result of each
            partition.

    Raises:
        TypeError, ValueError: the errors of `paged_attention_v1`.

    The sums of a row are computed in the same order in any batch. `paged_attention` is faster, and needs no workspaces.
    """
    _as_vllm(
        out, (exp_sums, max_logits, tmp_out), (query, key_cache, value_cache, block_tables, seq_lens),
        (num_kv_heads, block_size, max_seq_len), alibi_slopes, (scale, k_scale, v_scale), kv_cache_dtype,
        Sparse(blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step,
               tp_rank),
    )  # fmt: skip


def _like_a_side(out_a: Any, *_: Any, lse_heads_first: bool = False, **__: Any) -> list[Result]:
    lse = Result(out_a.shape[:-1], "float32", "out_a's without head_dim")
    if lse_heads_first:
        *outer, tokens, heads, _ = out_a.shape
        lse = Result((*outer, heads, tokens), "float32", "[..., heads, tokens] of out_a")
    return [Result(out_a.shape, dtype_name(out_a), "out_a's"), lse]


def merge_variant(dtype: str, vector: int, heads_first: bool, each: int = 1, has_power: bool = False) -> Variant:
    """Return the variant for `each` vectors per thread. `has_power`: a row has 2^n vectors; else `each` must be 1."""
    form: list[str | int] = [each, True]
    return _merge.variant(CUDA_TYPE[dtype], vector, heads_first, *form if has_power else [])


def _not_read(written: int, *read: int) -> int:
    """Return the address of a written array, which must not be the address of a read array."""
    if written and written in read:
        check.fail("out[1]", "another array than lse_a and lse_b, which are read while it is written", "one of them")
    return written


@op(twin.merge_attention_states, "merged, lse", _like_a_side)
def merge_attention_states(
    out_a: AnyArray,
    lse_a: AnyArray,
    out_b: AnyArray,
    lse_b: AnyArray,
    *,
    lse_heads_first: bool = False,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Merge attention over two sets of tokens into attention over both of them.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Args:
        out_a, out_b: [..., heads, head_dim], float32, float16 or bfloat16, contiguous.
        lse_a, lse_b: float32 [..., heads], natural logarithms. -inf or +inf (FlashAttention 2, FlashMLA) means that the
            set of tokens is empty. Its output is ignored, even if it is NaN.
        lse_heads_first: lse_a, lse_b and the returned lse are [..., heads, tokens], as in vLLM and
            `flash_mla_with_kvcache`, and out_a and out_b are [..., tokens, heads, head_dim].
        out: a pair of arrays (out, lse) to write into. The first may be `out_a` or `out_b`. The second must not be
            lse_a or lse_b.
        variant: "auto".

    Returns:
        (out, lse), like `out_a` and `lse_a`. If both sets are empty, out is 0 and lse is -inf.

    Raises:
        TypeError: a value that is not an array, or has the wrong dtype or library.
        ValueError: a shape, stride or device that does not fit.

    FlashAttention and FlashInfer merge by the same identity (Ye et al., 2024). vLLM's `merge_attn_states` and SGLang's
    `merge_state_v2` give the same results.
    """
    shape = expect_array("out_a", out_a, DTYPES).shape
    heads_first = bool(lse_heads_first)
    if len(shape) < 2 + heads_first or shape[-1] < 1:
        check.fail("out_a", f"of shape [..., {'tokens, ' if heads_first else ''}heads, head_dim]", list(shape))
    if shape[-1] > 2**16:
        check.fail("out_a", f"of a head_dim in [1, {2**16}]", shape[-1])
    check.one_of("variant", variant, ("auto",))
    expect_contiguous("out_a", out_a)
    results = _like_a_side(out_a, lse_heads_first=heads_first)
    expect("out_b", out_b, out_a, "out_a", (out_a.dtype,), shape, results[0].symbols)
    for name, array in (("lse_a", lse_a), ("lse_b", lse_b)):
        expect(name, array, out_a, "out_a", ("float32",), results[1].shape, results[1].symbols)
    merged, lse = outputs(out, out_a, "out_a", *results, names="a pair (out, lse)")
    if out_a.on_host:
        return run_twin()
    if any(size == 0 for size in shape[:-1]):
        return merged, lse
    vector = 16 // out_a.item_size
    if shape[-1] % vector or min(out_a.alignment, out_b.alignment, merged.alignment) < 16:
        vector = 1
    threads = _merge.constant("MERGE_THREADS")
    row, most = math.prod(shape[1:]), (2**31 - 1) * threads * vector
    if shape[0] > most // row:
        check.fail("out_a", f"of at most {most} elements", f"shape {list(shape)}")
    vectors = shape[-1] // vector
    has_power = vector > 1 and vectors & (vectors - 1) == 0
    each = 2 if has_power and not heads_first and shape[0] > _MANY_MERGED // row else 1
    why = (
        f"vectors of {vector} numbers, {each} a thread (2 from {_MANY_MERGED} elements on, where rows are 2^n vectors)"
    )
    if vector == 1:
        why = "one number at a time, which is slower: rows or addresses are no multiples of 16 bytes"
    launch(
        merge_variant(out_a.dtype, vector, heads_first, each, has_power),
        -(-shape[0] * (row // vector) // (each * threads)),
        threads,
        why=why,
        out_a=out_a,
        lse_a=lse_a,
        out_b=out_b,
        lse_b=lse_b,
        out=merged,
        lse=lse if out is None else each_call(_not_read, 0, lse, lse_a, lse_b),
        rows=shape[0] * (row // shape[-1]),
        head_dim=shape[-1],
        heads=shape[-2] if heads_first else 0,
        tokens=shape[-3] if heads_first else 0,
        shift=vectors.bit_length() - 1,
    )
    return merged, lse
