"""A replacement for FlashInfer's functions for the paged cache, `flashinfer.page`, with the same arguments and results.

The signatures match flashinfer-python 0.7.2.post1. Not covered: MLA caches and 4-bit caches. The functions in
`NOT_COVERED` raise NotImplementedError when called.
"""

from __future__ import annotations

from typing import Any

import torch

import cukern
from cukern.compat._limits import not_covered
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

NOT_COVERED = (
    "append_paged_mla_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "nvfp4_quantize_append_paged_mla_kv_cache",
)
__getattr__ = not_covered("cukern.compat.flashinfer.page", "flashinfer.page", names=NOT_COVERED)


def get_seq_lens(kv_indptr: AnyArray, kv_last_page_len: AnyArray, page_size: int) -> AnyArray:
    """Return the number of tokens of each sequence [batch].

    `kv_indptr` [batch + 1] contains the cumulative page counts, and `kv_last_page_len` [batch] the number of tokens in
    the last page of each sequence.
    """
    pages: Any = kv_indptr[1:] - kv_indptr[:-1]
    return torch.clamp(pages - 1, min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: AnyArray,
    seq_lens: AnyArray,
    nnz: int,
    batch_indices: AnyArray | None = None,
    positions: AnyArray | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Return the index of the sequence of each new token, and the token's position in the sequence, int32 [nnz] each.

    The new tokens from `append_indptr[b]` to `append_indptr[b + 1] - 1` are the last tokens of sequence b. Tokens after
    the last sequence get the sequence index -1 and the position 0. If `batch_indices` and `positions` are given, the
    results are written to them. A few small torch kernels compute the results.
    """
    ends: Any = append_indptr[1:]
    tokens = torch.arange(nnz, dtype=torch.int32, device=ends.device)
    sequences = torch.searchsorted(ends.contiguous(), tokens.to(ends.dtype), right=True)
    is_new = sequences < ends.shape[0]
    kept = sequences.clamp(max=ends.shape[0] - 1)
    places = torch.where(is_new, seq_lens[kept] - ends[kept] + tokens, 0).int()
    found: Any = torch.where(is_new, sequences, -1).int()
    return (
        found if batch_indices is None else batch_indices.copy_(found),
        places if positions is None else positions.copy_(places),
    )


def append_paged_kv_cache(
    append_key: AnyArray,
    append_value: AnyArray,
    batch_indices: AnyArray,
    positions: AnyArray,
    paged_kv_cache: Any,
    kv_indices: AnyArray,
    kv_indptr: AnyArray,
    kv_last_page_len: AnyArray,
    kv_layout: str = "NHD",
) -> None:
    """Call `cukern.reshape_and_cache_flash` for new tokens. Small torch kernels compute the slots of the tokens first.

    Token i has position `p = positions[i]` in sequence `b = batch_indices[i]`, and is stored in page
    `kv_indices[kv_indptr[b] + p // page_size]`. A token is not stored if its batch index is negative, or if its
    position is outside the pages of its sequence.
    `paged_kv_cache` is one tensor with keys and values along dimension 1, or a pair of tensors. `kv_last_page_len` is
    ignored. An FP8 cache stores the elements without a scale.
    """
    check.one_of("kv_layout", kv_layout, ("NHD", "HND"))
    if not isinstance(paged_kv_cache, (tuple, list)):
        paged_kv_cache = paged_kv_cache.unbind(dim=1)
    keys, values = (cache.transpose(1, 2) if kv_layout == "HND" else cache for cache in paged_kv_cache)
    page_size = keys.shape[1]
    sequences: Any = batch_indices.long().clamp(min=0)
    places: Any = positions.long()
    entry = kv_indptr[sequences].long() + places // page_size
    has_page = (batch_indices >= 0) & (places >= 0) & (entry < kv_indptr[sequences + 1])
    if not kv_indices.shape[0]:
        return
    pages = kv_indices[entry.clamp(0, kv_indices.shape[0] - 1)].long()
    slots = torch.where(has_page, pages * page_size + places % page_size, -1)
    cukern.reshape_and_cache_flash(append_key, append_value, keys, values, slots, "auto", None, None)
