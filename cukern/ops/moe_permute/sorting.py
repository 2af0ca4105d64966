"""The sort of (token, slot) pairs by expert."""

from __future__ import annotations

from typing import Any

from cukern.ops.moe_permute import choose as kernels
from cukern.ops.moe_permute.choose import MAX_PAIRS, SORT_VARIANTS
from cukern.reference import moe_permute as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, expect, expect_array, expect_contiguous
from cukern.runtime.op import op
from cukern.runtime.plan import outputs, run_twin
from cukern.runtime.vectors import ceil_div, divisor

__all__ = ["moe_align_block_size", "moe_sort", "moe_sort_batched"]

ID_DTYPES = ("int32", "int64", "uint32")
#: The expert map, and one count for each warp and expert, must fit into shared memory.
MAX_EXPERTS = 4096
MAX_BLOCK_SIZE = 2**15


def check_ids(topk_ids: Any) -> tuple[Any, int]:
    tokens, topk = expect_array("topk_ids", topk_ids, ID_DTYPES, ("tokens", "topk")).shape
    if not topk:
        check.fail("topk_ids", "of at least one expert for each token", f"shape {list(topk_ids.shape)}")
    if tokens * topk > MAX_PAIRS:
        check.fail("topk_ids", f"of at most {MAX_PAIRS} ids", tokens * topk)
    expect_contiguous("topk_ids", topk_ids)
    return tokens, topk


def check_map(expert_map: Any, topk_ids: Array, num_experts: int, name: str = "num_experts") -> None:
    if expert_map is not None:
        expect("expert_map", expert_map, topk_ids, "topk_ids", ("int32",), (num_experts,), f"[{name}]")


def _check_experts(topk_ids: Array, num_experts: Any, expert_map: Any, num_local_experts: Any) -> tuple[int, int]:
    """Return the number of all experts, and the number of experts on this rank."""
    num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    check_map(expert_map, topk_ids, num_experts)
    if num_local_experts is not None:
        return num_experts, check.integer("num_local_experts", num_local_experts, 1, num_experts, "num_experts")
    if expert_map is not None:
        check.fail("num_local_experts", "given with expert_map", "None", TypeError)
    return num_experts, num_experts


def _sorted(topk_ids: Any, num_experts: Any, *, num_local_experts: Any = None, **_: Any) -> list[Result]:
    tokens, topk = topk_ids.shape
    experts = num_experts if num_local_experts is None else num_local_experts
    return [
        Result((experts + 1,), "int32", "[experts + 1]"),
        Result((tokens * topk,), "int32", "[tokens * topk]"),
        Result((tokens, topk), "int32", "[tokens, topk]"),
    ]


@op(twin.moe_sort, "expert_offsets, row_token, inverse", _sorted)
def moe_sort(
    topk_ids: AnyArray,
    num_experts: int,
    *,
    expert_map: AnyArray | None = None,
    num_local_experts: int | None = None,
    out: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Sort the pairs (token, slot) by expert. The sort is stable: pairs of the same expert keep their order.

    Args:
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. Ids outside of [0, num_experts), such as -1, have
            no expert.
        num_experts: the range of the ids, at most 4096.
        expert_map: int32 [num_experts], maps each expert to its number on this rank. An entry outside of [0,
            num_local_experts), such as -1, means that the expert is not on this rank.
        num_local_experts: the number of experts on this rank; required with expert_map. Without it: num_experts.
        out: a triple to write into and return.
        variant: "auto", or a variant by name: "one_block", "many_blocks" (each block counts all pairs itself),
            "counted" (a separate launch counts first), "chunks" (each block ranks all pairs; at most 2048 pairs) or
            "clusters" (the blocks of a cluster exchange their counts; at most 65536 pairs, on a data-center GPU from
            Hopper on). "chunks" and "clusters" take at most 512 experts. All variants give the same results.

    Returns:
        expert_offsets int32 [experts + 1]: the first row of each expert, then the end of all rows.
        row_token int32 [tokens * topk]: the token of each row; 0 from row expert_offsets[-1] on.
        inverse int32 [tokens, topk]: the row of each pair; -1 if its expert is not on this rank.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: unsupported shapes, strides, devices or sizes.
    """
    tokens, topk = check_ids(topk_ids)
    num_experts, experts = _check_experts(topk_ids, num_experts, expert_map, num_local_experts)
    names = "a triple (expert_offsets, row_token, inverse)"
    out = outputs(out, topk_ids, "topk_ids", *_sorted(topk_ids, experts), names=names)
    if topk_ids.on_host:
        return run_twin(variant, SORT_VARIANTS)
    results: dict[str, Any] = dict(zip(("offsets", "rows", "inverse"), out, strict=True))
    results["topk"] = divisor(topk)
    kernels.launch_sort(topk_ids, num_experts, experts, expert_map, variant, tokens * topk, **results)
    return out


def _sorted_batched(
    topk_ids: Any, num_experts: Any, max_tokens: Any, *, num_local_experts: Any = None, **_: Any
) -> list[Result]:
    experts = num_experts if num_local_experts is None else num_local_experts
    return [Result((experts,), "int32", "[experts]"), Result(tuple(topk_ids.shape), "int32", "[tokens, topk]")]


@op(twin.moe_sort_batched, "expert_num_tokens, positions", _sorted_batched)
def moe_sort_batched(
    topk_ids: AnyArray,
    num_experts: int,
    max_tokens: int,
    *,
    expert_map: AnyArray | None = None,
    num_local_experts: int | None = None,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Sort the pairs (token, slot) by expert (stably). Each expert gets a batch of `max_tokens` rows.

    Args:
        topk_ids, num_experts, expert_map, num_local_experts, variant: as in `moe_sort`. The errors are the same.
        max_tokens: rows per expert. If an expert has more pairs, its last pairs do not get a row.
        out: a pair to write into and return.

    Returns:
        expert_num_tokens int32 [experts]: the number of rows that have a pair.
        positions int32 [tokens, topk]: the row of each pair in [0, experts * max_tokens); -1 if it has no row. This is
            `inverse` of `permute_rows` and `inv_permuted_idx` of `moe_unpermute`.
    """
    check_ids(topk_ids)
    num_experts, experts = _check_experts(topk_ids, num_experts, expert_map, num_local_experts)
    max_tokens = check.integer("max_tokens", max_tokens, 1, MAX_PAIRS // experts)
    results = _sorted_batched(topk_ids, experts, max_tokens)
    out = outputs(out, topk_ids, "topk_ids", *results, names="a pair (expert_num_tokens, positions)")
    if topk_ids.on_host:
        return run_twin(variant, SORT_VARIANTS)
    fields = {"offsets": out[0], "inverse": out[1], "max_tokens": max_tokens}
    kernels.launch_sort(topk_ids, num_experts, experts, expert_map, variant, **fields)
    return out


def _aligned(
    topk_ids: Any, block_size: Any, num_experts: Any, expert_map: Any = None, pad_sorted_ids: bool = False, **_: Any
) -> list[Result]:
    pairs = topk_ids.shape[0] * topk_ids.shape[1]
    rows = twin.aligned_rows(pairs, num_experts, block_size, pad_sorted_ids)
    return [Result((rows,), "int32"), Result((ceil_div(rows, block_size),), "int32"), Result((1,), "int32")]


@op(twin.moe_align_block_size, "sorted_token_ids, expert_ids, num_tokens_post_pad", _aligned)
def moe_align_block_size(
    topk_ids: AnyArray,
    block_size: int,
    num_experts: int,
    expert_map: AnyArray | None = None,
    pad_sorted_ids: bool = False,
    *,
    ignore_invalid_experts: bool = False,
    out: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Sort the pairs (token, slot) by expert (stably), and pad the pairs of each expert to whole blocks of rows.

    Args:
        topk_ids, num_experts, variant: as in `moe_sort`. The errors are the same.
        block_size: rows per block, at most 32768.
        expert_map: int32 [num_experts]: maps each expert to the number that is written to expert_ids, such as -1 for an
            expert that is not on this rank.
        pad_sorted_ids: round the size of sorted_token_ids up to a multiple of block_size.
        ignore_invalid_experts: with expert_map, leave out the pairs of experts that it maps to a number outside of
            [0, num_experts), and order the blocks by the mapped number. If False, these pairs get blocks, too.
        out: a triple of arrays to write into and return. The first two may be longer than the results; they are filled
            to their ends. The second may also have rows // block_size elements, as in SGLang.

    Returns:
        sorted_token_ids int32 [rows]: the pair token * topk + slot of each row; tokens * topk for padding. rows is
            tokens * topk + num_experts * (block_size - 1); with fewer pairs than experts at most tokens * topk *
            block_size.
        expert_ids int32 [ceil(rows / block_size)]: the expert of each block; -1 for unused blocks.
        num_tokens_post_pad int32 [1]: the rows of all used blocks.

    The interface is vLLM's `moe_align_block_size`. Unlike in vLLM, unused blocks have the expert -1, and the sort is
    stable.
    """
    tokens, topk = check_ids(topk_ids)
    num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    block_size = check.integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
    check_map(expert_map, topk_ids, num_experts)
    results = _aligned(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids)
    (rows,) = results[0].shape
    if rows > MAX_PAIRS:
        check.fail("block_size", f"such that there are at most {MAX_PAIRS} rows", f"{block_size} with {rows} rows")
    if out is None:
        found = outputs(None, topk_ids, "topk_ids", *results)
    else:
        # `rows // block_size` is enough, because only complete blocks are used.
        fewest = Result((rows // block_size,), "int32")
        found = kernels.aligned_outputs(out, topk_ids, [results[0], fewest, results[2]])
    (rows,), (groups,), _ = (array.shape for array in found)
    if topk_ids.on_host:
        return run_twin(variant, SORT_VARIANTS)
    early, id_of = (expert_map, None) if ignore_invalid_experts else (None, expert_map)
    fields = {"id_of": id_of, "rows": found[0], "group_ids": found[1], "end_of_rows": found[2], "fill": tokens * topk}
    fields |= {"block_size": block_size, "group_rows": block_size, "groups": groups, "group_fill": -1}
    kernels.launch_sort(topk_ids, num_experts, num_experts, early, variant, rows, **fields)
    return found
