"""What the seams take, for code that runs without vLLM."""

from __future__ import annotations

from cukern.formats.fused_moe import GROUP
from cukern.formats.quantized import MXFP4_GROUP

#: The compute capability whose GPUs the benchmarks compare with vLLM.
CAPABILITY = (9, 0)
#: The hidden and the intermediate size of experts are multiples of this. 8 elements of 16 bits are a vector load.
UNITS = {"16-bit": 8, "FP8 block": GROUP, "MXFP4": MXFP4_GROUP}
#: Elements of an attention head: the limit of `varlen_attention`, and of the tensor cores in `paged_attention`.
MAX_HEAD_SIZE = 256


def why_not_head(head_size: int) -> str | None:
    """Return why attention does not take heads of this size, or None."""
    if head_size % 8 or not 0 < head_size <= MAX_HEAD_SIZE:
        return f"heads of {head_size}, not of a multiple of 8 up to {MAX_HEAD_SIZE}"
    return None


def why_not_sizes(what: str, hidden_dim: int, intermediate_size_per_partition: int) -> str | None:
    """Return why the experts `what`, a key of `UNITS`, do not take these sizes, or None."""
    unit, sizes = UNITS[what], {"hidden_dim": hidden_dim}
    sizes["intermediate_size_per_partition"] = intermediate_size_per_partition
    return next((f"{name} is {x}, not a multiple of {unit}" for name, x in sizes.items() if x % unit), None)
