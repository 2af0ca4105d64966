"""A replacement for `flashinfer.page`, the paged cache of flashinfer-python 0.7.2.post1.

The functions in `NOT_COVERED` raise NotImplementedError.
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

    `kv_indptr` [batch + 1] holds cumulative page counts. `kv_last_page_len` [batch] holds the number of tokens in the
    last page of each sequence.
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
    """Return the sequence and the position of each new token, int32 [nnz] each.

    The new tokens from `append_indptr[b]` to `append_indptr[b + 1] - 1` are the last tokens of sequence b. Tokens after
    the last sequence get the sequence -1 and the position 0.
    """
    ends: Any = append_indptr[1:]
    tokens = torch.arange(nnz, dtype=torch.int32, device=ends.device)
    sequences = torch.searchsorted(ends.contiguous(), tokens.to(ends.dtype), right=True)
    is_new = sequences < ends.shape[0]
    clamped = sequences.clamp(max=ends.shape[0] - 1)
    new_positions = torch.where(is_new, seq_lens[clamped] - ends[clamped] + tokens, 0).int()
    new_indices: Any = torch.where(is_new, sequences, -1).int()
    return (
        new_indices if batch_indices is None else batch_indices.copy_(new_indices),
        new_positions if positions is None else positions.copy_(new_positions),
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
    """Call `cukern.reshape_and_cache_flash` for new tokens. `kv_last_page_len` is ignored.

    Token i is stored at position `p = positions[i]` of sequence `b = batch_indices[i]`, in page
    `kv_indices[kv_indptr[b] + p // page_size]`. A token with a negative b, or with p outside the sequence's pages, is
    not stored. `paged_kv_cache` is one tensor with keys and values along dimension 1, or a pair of tensors.
    """
    check.one_of("kv_layout", kv_layout, ("NHD", "HND"))
    if not isinstance(paged_kv_cache, (tuple, list)):
        paged_kv_cache = paged_kv_cache.unbind(dim=1)
    keys, values = (cache.transpose(1, 2) if kv_layout == "HND" else cache for cache in paged_kv_cache)
    page_size = keys.shape[1]
    sequences: Any = batch_indices.long().clamp(min=0)
    token_positions: Any = positions.long()
    page_index = kv_indptr[sequences].long() + token_positions // page_size
    has_page = (batch_indices >= 0) & (token_positions >= 0) & (page_index < kv_indptr[sequences + 1])
    if not kv_indices.shape[0]:
        return
    pages = kv_indices[page_index.clamp(0, kv_indices.shape[0] - 1)].long()
    slots = torch.where(has_page, pages * page_size + token_positions % page_size, -1)
    cukern.reshape_and_cache_flash(append_key, append_value, keys, values, slots, "auto", None, None)
