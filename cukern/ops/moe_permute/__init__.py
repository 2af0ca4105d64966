"""Permute the rows of tokens into the order of their experts, for the grouped GEMMs of an MoE layer, and back."""

from cukern.ops.moe_permute.rows import moe_permute, moe_sum, moe_unpermute, permute_rows
from cukern.ops.moe_permute.rows import permute_quantized as permute_quantized
from cukern.ops.moe_permute.rows import specialize as specialize
from cukern.ops.moe_permute.sorting import moe_align_block_size, moe_sort, moe_sort_batched

__all__ = [
    "moe_align_block_size",
    "moe_permute",
    "moe_sort",
    "moe_sort_batched",
    "moe_sum",
    "moe_unpermute",
    "permute_rows",
]
