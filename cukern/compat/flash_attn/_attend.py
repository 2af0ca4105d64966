"""Attention over packed tokens, dense batches and caches by `cukern.varlen_attention`, for FlashAttention's functions.

`function` is the public function's name in error messages. `options` are arguments of `cukern.varlen_attention`, but a
`softcap` of 0 means none, as in FlashAttention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import cukern
from cukern.compat._limits import refuse
from cukern.compat.flashinfer.page import append_paged_kv_cache, get_batch_indices_positions
from cukern.runtime import check


def refuse_unless_zero(function: str, **numbers: float) -> None:
    """Raise NotImplementedError if one of the `numbers` is not 0."""
    for name, value in numbers.items():
        if value:
            refuse(function, name, "0", value)


def _refuse_float8(function: str, **arrays: torch.Tensor) -> None:
    for name, array in arrays.items():
        if array.element_size() == 1:
            refuse(function, name, "of float16, bfloat16 or float32", array.dtype)


@functools.lru_cache(maxsize=256)
def _kept_starts(count: int, length: int, device: torch.device) -> torch.Tensor:
    # The copy from host memory synchronizes its stream, so calls on other streams may read the result.
    return (torch.arange(count + 1, dtype=torch.int32, device="cpu") * length).to(device)


def _starts(sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return cu_seqlens of sequences of equal length. `sizes` are the number of sequences and their length."""
    count, length = sizes
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A CUDA graph writes this array at each replay, so calls outside the graph must not read it.
        return torch.arange(count + 1, dtype=torch.int32, device=device) * length
    return _kept_starts(count, length, device)


def _attend(q: Any, k: Any, v: Any, *cu_seqlens: Any, softcap: float, **options: Any) -> Any:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return cukern.varlen_attention(q, k, v, *cu_seqlens, softcap=softcap if softcap > 0 else None, **options)


def packed(
    function: str, q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, out: Any = None, **options: Any
) -> Any:
    """Compute attention for q [tokens, heads, dim]. With return_lse, return (out, lse [heads, tokens])."""
    _refuse_float8(function, q=q, k=k, v=v)
    if options["return_lse"]:
        out = out, None
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, out=out, **options)


def _by_batch(found: Any, batch: int, tokens: int) -> Any:
    """Return a result, or a pair (out, lse), as [batch, tokens, heads, dim_v] and [batch, heads, tokens]."""
    if not isinstance(found, tuple):
        return found.unflatten(0, (batch, tokens))
    out, lse = found
    return _by_batch(out, batch, tokens), lse.unflatten(1, (batch, tokens)).transpose(0, 1).contiguous()


def dense(function: str, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Compute attention for q [batch, tokens, heads, dim] and k, v [batch, keys, kv_heads, dim]."""
    _refuse_float8(function, q=q, k=k, v=v)
    starts = [_starts(x.shape[:2], x.device) for x in (q, k)]
    found = _attend(*(x.flatten(0, 1) for x in (q, k, v)), *starts, **options)
    return _by_batch(found, *q.shape[:2])


def _store(k: Any, v: Any, caches: tuple[Any, Any], table: Any, used: Any, cu_seqlens_new: Any) -> Any:
    """Store new keys and values behind the `used` ones. Return the new lengths."""
    if cu_seqlens_new is None:
        cu_seqlens_new = _starts(k.shape[:2], k.device)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    used = used + cu_seqlens_new[1:] - cu_seqlens_new[:-1]
    places = get_batch_indices_positions(cu_seqlens_new, used, k.shape[0])
    pages = table.flatten(), _starts(table.shape, k.device), used
    append_paged_kv_cache(k.contiguous(), v.contiguous(), *places, caches, *pages)
    return used


def with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    used: Any,
    rows: Any,
    table: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_new: Any = None,
    **options: Any,
) -> Any:
    """Store k and v, if there are any, and compute attention for q over the cache.

    `used` and `rows` are FlashAttention's `cache_seqlens` and `cache_batch_idx`. Without `table`, each row of the cache
    is a page.
    """
    function = "flash_attn_with_kvcache"
    _refuse_float8(function, q=q, k_cache=k_cache, v_cache=v_cache)
    starts = _starts(q.shape[:2], q.device) if cu_seqlens_q is None else cu_seqlens_q
    batch, length = starts.shape[0] - 1, k_cache.shape[1]
    are_all_rows = table is None and rows is None
    if are_all_rows and k_cache.shape[0] != batch:
        check.fail("k_cache", f"of {batch} rows, like q", k_cache.shape[0])
    # Rows that follow each other in memory are packed sequences, whose length may be any number.
    are_packed = are_all_rows and all(x.stride(0) == length * x.stride(1) for x in (k_cache, v_cache))
    if not are_packed and length % 8:
        refuse(function, "k_cache", "of pages, or of rows, of a multiple of 8 tokens", length)
    if k is not None and (v is None or used is None):
        check.fail("v" if v is None else "cache_seqlens", "given with k", None)
    if table is None:
        table = (_starts((batch, 1), q.device)[:-1] if rows is None else rows)[:, None]
    elif rows is not None:
        table = table[rows]
    if used is None or isinstance(used, int):
        used = table.shape[1] * length if used is None else used
        used = torch.full((batch,), used, dtype=torch.int32, device=q.device)
    if k is not None:
        used = _store(k, v, (k_cache, v_cache), table, used, cu_seqlens_new)
    keys = k_cache, v_cache, starts, None
    if are_packed:
        keys = k_cache.flatten(0, 1), v_cache.flatten(0, 1), starts, _starts((batch, length), q.device)
    options |= {"seqused_k": used, "block_table": None if are_packed else table}
    if cu_seqlens_q is not None:
        return _attend(q, *keys, **options)
    return _by_batch(_attend(q.flatten(0, 1), *keys, **options), *q.shape[:2])
