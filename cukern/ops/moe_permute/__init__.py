"""The permutation of tokens by expert, for the grouped products of an MoE layer, and the way back."""

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
