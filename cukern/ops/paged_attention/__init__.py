"""Attention of the last tokens of each sequence over a paged KV cache, and the merging of such results."""

from __future__ import annotations

from typing import Any

from cukern.ops.paged_attention import choose as kernels
from cukern.ops.paged_attention.launch import DECISIONS, PARTITION, attend, decide, decide_vllm
from cukern.ops.paged_attention.merge import merge_states
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Result, dtype_name
from cukern.runtime.fp8 import array_of
from cukern.runtime.op import operator
from cukern.runtime.view import out_of

__all__ = ["merge_attention_states", "paged_attention", "paged_attention_v1", "paged_attention_v2"]


def specialize(*, head_dim: int, block_size: int) -> list[Instance]:
    """Give these sizes variants of their own in this process and say which; see `cukern.specialize`.

    They are compiled for up to 16 rows per kv head, without softcap, slopes or a block-sparse pattern, over a cache of
    the query's dtype. The other forms of these sizes are compiled at their first use.

    Raises ValueError unless head_dim is a multiple of 8 of at most 256 and block_size a multiple of 16.
    """
    check.integer("head_dim", head_dim, 8, kernels.DIMS[-1])
    if head_dim % 8:
        check.fail("head_dim", "a multiple of 8", head_dim)
    check.integer("block_size", block_size, 16, kernels.MAX_BLOCK_SIZE)
    if block_size % 16:
        check.fail("block_size", "a multiple of 16", block_size)
    kernels.registered.add((head_dim, block_size))
    kernels.choose.cache_clear()
    DECISIONS.clear()
    return kernels.of_own_dtype(head_dim, block_size)


def _attended(query: Any, *_: Any, **__: Any) -> Result:
    return Result(query.shape, dtype_name(query), "query's")


def _logs(query: Any) -> Result:
    return Result(query.shape[:-1], "float32", "query's without head_dim")


@operator("attended, lse", lambda query, *_, **__: [_attended(query), _logs(query)])
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
            contiguous along the last dimension. head_dim is a multiple of 8, at most 512, and
            on tensor cores 256.
        key_cache, value_cache: layout "vllm": [blocks, kv_heads, head_dim / x, block_size, x] with x elements in 16
            bytes, and [blocks, kv_heads, head_dim, block_size]; layout "flash": both [blocks, block_size, kv_heads,
            head_dim]. Of the query's dtype, float8_e4m3fn or float8_e5m2, or bytes (uint8) that `kv_cache_dtype`
            says the format of. block_size is a multiple of 8. The distance between blocks is free (and between heads;
            in "flash", tokens too), so that slices of an array [blocks, 2, ...] do.
        block_tables: int32 [seqs, max_blocks]; rows may be strided. Entries of tokens past a
            sequence's length, or before its window, are not used.
        seq_lens: int32 [seqs], tokens in the cache, those of this query included. 0 or less: no tokens.
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
        out: a contiguous array to write the result into, at a multiple of 16 bytes; with `return_lse` a pair.
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
    returns_lse = check.flag("return_lse", return_lse)
    own, lse = out_of(out, 2, "a pair (out, lse) with return_lse") if returns_lse else (out, None)
    given = (
        query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, sinks, array_of(k_scale),
        array_of(v_scale), own, lse, None, None, None,
    )  # fmt: skip
    facts = layout, window, softcap, kv_cache_dtype, returns_lse, split, variant
    attended, lse_found = attend(decide, facts, given, (scale, k_scale, v_scale))
    if not returns_lse:
        return attended
    return (attended, lse_found) if own is None or lse is None else out


@operator()
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
    given = (
        query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, None, array_of(k_scale),
        array_of(v_scale), out, None, None, None, None,
    )  # fmt: skip
    facts = (
        0, num_kv_heads, block_size, kv_cache_dtype, tp_rank, blocksparse_local_blocks,
        blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip
    attend(decide_vllm, facts, given, (scale, k_scale, v_scale), max_seq_len)


@operator()
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
    given = (
        query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, None, array_of(k_scale),
        array_of(v_scale), out, None, exp_sums, max_logits, tmp_out,
    )  # fmt: skip
    facts = (
        PARTITION, num_kv_heads, block_size, kv_cache_dtype, tp_rank, blocksparse_local_blocks,
        blocksparse_vert_stride, blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip
    attend(decide_vllm, facts, given, (scale, k_scale, v_scale), max_seq_len)


def _like_a_side(out_a: Any, *_: Any, lse_heads_first: bool = False, **__: Any) -> list[Result]:
    lse = Result(out_a.shape[:-1], "float32", "out_a's without head_dim")
    if lse_heads_first:
        *outer, tokens, heads, _ = out_a.shape
        lse = Result((*outer, heads, tokens), "float32", "[..., heads, tokens] of out_a")
    return [Result(out_a.shape, dtype_name(out_a), "out_a's"), lse]


@operator("merged, lse", _like_a_side)
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
        lse_a, lse_b: float32 [..., heads], natural logarithms. Where one is -inf or +inf, its side is over no tokens
            (FlashAttention 2 and FlashMLA say so with +inf) and counts for nothing, even if it is NaN.
        lse_heads_first: lse_a, lse_b and the lse that is returned are [..., heads, tokens], as vLLM and
            `flash_mla_with_kvcache` have them, for out_a and out_b of [..., tokens, heads, head_dim].
        out: a pair of arrays (out, lse) to write into; the first may be `out_a` or `out_b`, the second neither lse.
        variant: "auto".

    Returns:
        (out, lse), like those of a side. Where both sides are over no tokens: 0 and -inf.

    Raises:
        TypeError: what is no array, or has the wrong dtype or library.
        ValueError: a shape, stride or device that does not fit.

    The identity is that of FlashAttention's and FlashInfer's merges (Ye et al., 2024). vLLM's `merge_attn_states` and
    SGLang's `merge_state_v2` give the same.
    """
    return merge_states(out_a, lse_a, out_b, lse_b, lse_heads_first, out, variant)
