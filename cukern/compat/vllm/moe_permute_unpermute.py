"""A replacement for `vllm.model_executor.layers.fused_moe.moe_permute_unpermute` of vLLM 0.33.0.

If the expert of a pair (token, slot) is on another rank, `inv_permuted_idx` is -1; in vLLM it is a row after the rows
of the last expert.
"""

from __future__ import annotations

from typing import Any

import torch

import cukern
from cukern.compat._limits import not_covered, unless_default
from cukern.runtime.arrays import AnyArray

__all__ = ["moe_permute", "moe_permute_unpermute_supported", "moe_unpermute"]

NOT_COVERED = ("get_moe_permute_scratch", "moe_prepare_scatter")
__getattr__ = not_covered(
    "cukern.compat.vllm.moe_permute_unpermute",
    "vllm.model_executor.layers.fused_moe.moe_permute_unpermute",
    names=NOT_COVERED,
)


def moe_permute(
    hidden_states: AnyArray,
    a1q_scale: AnyArray | None,
    topk_ids: AnyArray,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: AnyArray | None = None,
    permuted_hidden_states: AnyArray | None = None,
    scratch: Any = None,
) -> tuple[AnyArray, AnyArray | None, AnyArray, AnyArray, AnyArray]:
    """Call `cukern.moe_permute`, and also return `permuted_idx`, int32 [tokens * topk].

    Element i of `permuted_idx` is `token * topk + slot` for the pair (token, slot) in row i, or `tokens * topk` if row
    i has no pair. Refuses `scratch`.
    """
    unless_default("moe_permute", None, scratch=scratch)
    rows, scales, offsets, inverse, _ = cukern.moe_permute(
        hidden_states,
        a1q_scale,
        topk_ids,
        n_expert,
        n_local_expert,
        expert_map,
        permuted_hidden_states=permuted_hidden_states,
    )
    pairs = inverse.numel()
    # The pairs without a row are written to an extra last element, which is not returned.
    permuted = torch.full((pairs + 1,), pairs, dtype=torch.int32, device=inverse.device)
    numbers = torch.arange(pairs, dtype=torch.int32, device=inverse.device)
    permuted.scatter_(0, torch.where(inverse < 0, pairs, inverse).long(), numbers)
    return rows, scales, offsets, inverse, permuted[:pairs]


def moe_unpermute(
    out: AnyArray,
    permuted_hidden_states: AnyArray,
    topk_weights: AnyArray,
    inv_permuted_idx: AnyArray,
    expert_first_token_offset: AnyArray | None = None,
) -> None:
    """Call `cukern.moe_unpermute`."""
    cukern.moe_unpermute(out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset)


def moe_permute_unpermute_supported() -> bool:
    """Return True, on every GPU that cukern supports."""
    return True
