"""The sort of (token, slot) pairs by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cukern.ops.moe_permute import choose as kernels
from cukern.ops.moe_permute.choose import (
    MAX_PAIRS,
    SORT_VARIANTS,
    SortConfig,
    choose_sort,
    pairs_class,
    sort_workspace,
    split_sort,
)
from cukern.reference import moe_permute as twin
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import AnyArray, Library, View
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.describe import Result
from cukern.runtime.op import operator
from cukern.runtime.view import contiguous, out_of, read, read_like

__all__ = ["moe_align_block_size", "moe_sort", "moe_sort_batched"]

ID_DTYPES = ("int32", "int64", "uint32")
#: The counts of each warp of a block, and the map, must fit into shared memory.
MAX_EXPERTS = 4096
MAX_BLOCK_SIZE = 2**15
_MAX_CHOICES = 1024  # of a decision
_INT32 = ("int32",)

#: What earlier calls chose, by the class of their pairs: the number of tokens is free.
SORTS = Decisions((0,), (), (), (0,), (0,))
BATCHED = Decisions((0,), (), (), (0,))
ALIGNED = Decisions((0,), (), (0,), (0,), ())


# --- checks -------------------------------------------------------------------------------------------


def keep(
    decisions: Decisions, decision: Decision | None, facts: tuple[Any, ...], arrays: tuple[Any, ...], like: View,
    key: Any, choice: Any, own: Any = None,
) -> None:  # fmt: skip
    """Keep a choice for calls like this one, which has passed its checks; `decision` has the choices of alike calls."""
    if like.foreign is None and like.library.recorder is None:
        if decision is None:
            decision = decisions.keep(facts, arrays, like.library, like.device, own)  # type: ignore[arg-type]
        if len(decision.choices) >= _MAX_CHOICES:
            decision.choices.clear()
        decision.choices[key] = choice


def check_ids(ids: View) -> tuple[int, int]:
    """Check topk_ids; returns its tokens and topk."""
    check.dtype("topk_ids", ids.dtype, ID_DTYPES)
    check.dimensions("topk_ids", ids.shape, ("tokens", "topk"))
    tokens, topk = ids.shape
    if not topk:
        check.fail("topk_ids", "of at least one expert for each token", f"shape {list(ids.shape)}")
    if tokens * topk > MAX_PAIRS:
        check.fail("topk_ids", f"of at most {MAX_PAIRS} ids", tokens * topk)
    contiguous("topk_ids", ids)
    return tokens, topk


def check_map(expert_map: Any, ids: View, num_experts: int, name: str = "num_experts") -> View | None:
    if expert_map is None:
        return None
    return read_like("expert_map", expert_map, ids, "topk_ids", _INT32, (num_experts,), f"[{name}]")


def _check_experts(
    ids: View, num_experts: Any, expert_map: Any, num_local_experts: Any
) -> tuple[int, int, View | None]:
    """Check the experts; returns the number of all, the number of the local ones, and the map."""
    num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    mapping = check_map(expert_map, ids, num_experts)
    if num_local_experts is not None:
        experts = check.integer("num_local_experts", num_local_experts, 1, num_experts, "num_experts")
        return num_experts, experts, mapping
    if expert_map is not None:
        check.fail("num_local_experts", "given with expert_map", "None", TypeError)
    return num_experts, num_experts, mapping


def _read_out(out: Sequence[Any], ids: View, results: Sequence[Result]) -> list[View | None]:
    return [
        None if x is None else read_like(f"out[{i}]", x, ids, "topk_ids", _INT32, result.shape, result.symbols)
        for i, (x, result) in enumerate(zip(out, results, strict=True))
    ]


def checked_config(
    ids: View, topk: int, num_experts: int, experts: int, mapping: View | None, variant: str, block_size: int = 1,
    group_rows: int = 0, group_fill: int = 0,
) -> SortConfig:  # fmt: skip
    """`choose_sort` for a call on a device. Raises ValueError for a variant that does not take the call."""
    gpu, pairs, is_mapped = runtime.gpu_of(ids), ids.shape[0] * ids.shape[1], mapping is not None
    # A refusal names the number of pairs; the choice below knows its class alone.
    mapped = num_experts if is_mapped else 0
    kernels.form_of(variant, experts, mapped, group_rows in (0, block_size), gpu.arch, pairs)
    return choose_sort(
        ids.dtype, topk, num_experts, experts, is_mapped, gpu, pairs_class(pairs), variant, block_size, group_rows,
        group_fill,
    )  # fmt: skip


# --- launches -----------------------------------------------------------------------------------------


def launch_sort(
    config: SortConfig, library: Library, device: int, topk_ids: int, expert_map: int, expert_offsets: int,
    row_token: int, inverse: int, pairs: int, workspace: Sequence[int],
) -> None:  # fmt: skip
    """Launch `moe_sort` of `pairs` pairs, with the addresses of its arrays; `expert_map` is 0 without a map.

    `workspace` has the addresses of the parts that `sort_workspace` lists.
    """
    pointers = topk_ids, expert_map, 0, expert_offsets, 0, row_token, inverse, 0, 0
    launch_pairs(config, library, device, pointers, pairs, pairs, workspace)


def launch_pairs(
    config: SortConfig, library: Library, device: int, pointers: tuple[int, ...], pairs: int, capacity: int,
    workspace: Sequence[int], fill: int = 0, groups: int = 0, max_tokens: int = 0,
) -> None:  # fmt: skip
    """Launch a sort. `pointers` are the addresses of SORT_FIELDS; `capacity` is the size of `rows`, 0 without it."""
    kernel, grid, own = split_sort(config, pairs, capacity)
    counts = workspace[0] if workspace else 0
    values = (*pointers, pairs, capacity, fill, groups, max_tokens, counts, *own)
    if config.counting is not None:
        runtime.launch(config.counting, library, device, grid, values)
    runtime.launch(kernel, library, device, grid, values)


def workspace_of(config: SortConfig, library: Library, device: int, pairs: int) -> tuple[Any, Sequence[int]]:
    """The workspace of a sort: its array, which is held up to the last launch, and the addresses of its parts."""
    return library.workspace(sort_workspace(config, pairs), device) if config.counting is not None else (None, ())


def _returned(out: Any, found: Any, views: Sequence[View | None], ids: View) -> Any:
    """The results as the caller gets them: its own `out` where that has all."""
    if found is None or all(view is not None for view in views):
        return found and out  # None where the twin is only recorded
    return tuple([runtime.returned(x, view, ids) for x, view in zip(found, views, strict=True)])


def _decide(
    decisions: Decisions, decision: Decision | None, facts: tuple[Any, ...], arrays: tuple[Any, ...], out: Any,
    results: Callable[..., list[Result]], of_host: Callable[..., Any], run: Callable[..., Any], *numbers: Any,
) -> Any:  # fmt: skip
    """Check a call of `moe_sort` or `moe_sort_batched`, choose its kernels, keep the choice, launch.

    `numbers` has max_tokens, where there are batches.
    """
    num_experts, num_local_experts, variant = facts
    topk_ids, expert_map, *given = arrays
    ids = read("topk_ids", topk_ids)
    tokens, topk = check_ids(ids)
    num_experts, experts, mapping = _check_experts(ids, num_experts, expert_map, num_local_experts)
    numbers = tuple(check.integer("max_tokens", x, 1, MAX_PAIRS // experts) for x in numbers)
    own = dict(zip(("max_tokens",), numbers, strict=False))
    views = _read_out(given, ids, results(ids, experts, **own))
    variant = str(check.one_of("variant", variant, SORT_VARIANTS))
    if ids.device is None:
        check.host_variant(variant, SORT_VARIANTS)
        arguments = {"topk_ids": ids, "num_experts": num_experts, "expert_map": mapping, "num_local_experts": experts}
        return _returned(out, runtime.run_twin(of_host, ids, views, arguments | own), views, ids)
    config = checked_config(ids, 1 if numbers else topk, num_experts, experts, mapping, variant)
    keep(decisions, decision, facts, arrays, ids, pairs_class(tokens * topk), config)
    given = [None if view is None else view.array for view in views]
    addresses = ids.address, 0 if mapping is None else mapping.address
    found = run(config, ids.library, ids.device, *addresses, tokens, topk, out, *given, **own)
    return _returned(out, found, views, ids)


# --- moe_sort -----------------------------------------------------------------------------------------


def _sorted(topk_ids: Any, num_experts: Any, *, num_local_experts: Any = None, **_: Any) -> list[Result]:
    tokens, topk = topk_ids.shape
    experts = num_experts if num_local_experts is None else num_local_experts
    return [
        Result((experts + 1,), "int32", "[experts + 1]"),
        Result((tokens * topk,), "int32", "[tokens * topk]"),
        Result((tokens, topk), "int32", "[tokens, topk]"),
    ]


@operator("expert_offsets, row_token, inverse", _sorted)
def moe_sort(
    topk_ids: AnyArray,
    num_experts: int,
    *,
    expert_map: AnyArray | None = None,
    num_local_experts: int | None = None,
    out: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Sort the pairs (token, slot) by expert, stably: pairs of one expert stay in their order.

    One launch of a parallel counting sort; where there are many pairs, a launch before it that counts.

    Args:
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. An id outside of [0, num_experts), such as -1, has
            no expert.
        num_experts: the number of experts that the ids name, at most 4096.
        expert_map: int32 [num_experts]: the local number of each expert. An expert with a number outside of
            [0, num_local_experts), such as -1, is not here.
        num_local_experts: the number of experts here; required with expert_map, else num_experts.
        out: a triple to write into and return.
        variant: "auto", or by name: "one_block", "many_blocks" (each counts all pairs itself), "counted" (by the
            launch before), "chunks" (each block ranks all pairs, at most 2048) or "clusters" (of blocks that tell each
            other their counts; at most 65536 pairs, on a data-center GPU from Hopper on). The last two take at most 512
            experts. All give the same.

    Returns:
        expert_offsets int32 [experts + 1]: the first row of each expert, and last the end of all rows.
        row_token int32 [tokens * topk]: the token of each row; 0 from expert_offsets[-1] on.
        inverse int32 [tokens, topk]: the row of each pair; -1 if its expert is not here.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    expert_offsets, row_token, inverse = out_of(out, 3, "a triple (expert_offsets, row_token, inverse)")
    arrays = topk_ids, expert_map, expert_offsets, row_token, inverse
    facts = num_experts, num_local_experts, variant
    decision = SORTS.find(facts, arrays)
    if decision is not None:
        tokens, topk = topk_ids.shape
        pairs, library = tokens * topk, decision.library
        config = decision.choices.get(pairs_class(pairs))
        if (
            config is not None
            and (row_token is None or row_token.shape[0] == pairs)
            and (inverse is None or inverse.shape[0] == tokens)
        ):
            mapping = 0 if expert_map is None else library.address(expert_map)
            return _sort(
                config, library, decision.device, library.address(topk_ids), mapping, tokens, topk, out,
                expert_offsets, row_token, inverse,
            )  # fmt: skip
    return _decide(SORTS, decision, facts, arrays, out, _sorted, twin.moe_sort, _sort)


def _sort(
    config: SortConfig, library: Library, device: int, topk_ids: int, expert_map: int, tokens: int, topk: int,
    out: Any, expert_offsets: Any, row_token: Any, inverse: Any,
) -> Any:  # fmt: skip
    """Make the results that the caller does not give, and launch; `topk_ids` and `expert_map` are addresses."""
    pairs = tokens * topk
    if expert_offsets is None or row_token is None or inverse is None:
        make = library.allocator(device)
        expert_offsets = make((config.experts + 1,), "int32") if expert_offsets is None else expert_offsets
        row_token = make((pairs,), "int32") if row_token is None else row_token
        inverse = make((tokens, topk), "int32") if inverse is None else inverse
        out = expert_offsets, row_token, inverse
    address = library.address
    pointers = topk_ids, expert_map, 0, address(expert_offsets), 0, address(row_token), address(inverse), 0, 0
    _held, workspace = workspace_of(config, library, device, pairs)
    launch_pairs(config, library, device, pointers, pairs, pairs, workspace)
    return out


# --- moe_sort_batched ---------------------------------------------------------------------------------


def _sorted_batched(
    topk_ids: Any, num_experts: Any, max_tokens: Any, *, num_local_experts: Any = None, **_: Any
) -> list[Result]:
    experts = num_experts if num_local_experts is None else num_local_experts
    return [Result((experts,), "int32", "[experts]"), Result(tuple(topk_ids.shape), "int32", "[tokens, topk]")]


@operator("expert_num_tokens, positions", _sorted_batched)
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
    """Sort the pairs (token, slot) by expert, stably, into batches: every expert has `max_tokens` rows.

    Args:
        topk_ids, num_experts, expert_map, num_local_experts, variant: as in `moe_sort`.
        max_tokens: the rows of each expert. Where an expert has more pairs, its last ones are left out.
        out: a pair to write into and return.

    Returns:
        expert_num_tokens int32 [experts]: the rows of each expert that pairs have.
        positions int32 [tokens, topk]: the row of each pair in [0, experts * max_tokens), -1 if it has none; the
            `inverse` of `permute_rows` and `moe_unpermute`.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    expert_num_tokens, positions = out_of(out, 2, "a pair (expert_num_tokens, positions)")
    arrays = topk_ids, expert_map, expert_num_tokens, positions
    facts = num_experts, num_local_experts, variant
    decision = BATCHED.find(facts, arrays)
    if decision is not None:
        tokens, topk = topk_ids.shape
        library, config = decision.library, decision.choices.get(pairs_class(tokens * topk))
        if (
            config is not None
            and type(max_tokens) is int
            and 1 <= max_tokens <= MAX_PAIRS // config.experts
            and (positions is None or positions.shape[0] == tokens)
        ):
            mapping = 0 if expert_map is None else library.address(expert_map)
            return _sort_batched(
                config, library, decision.device, library.address(topk_ids), mapping, tokens, topk, out,
                expert_num_tokens, positions, max_tokens,
            )  # fmt: skip
    more = _sorted_batched, twin.moe_sort_batched, _sort_batched, max_tokens
    return _decide(BATCHED, decision, facts, arrays, out, *more)


def _sort_batched(
    config: SortConfig, library: Library, device: int, topk_ids: int, expert_map: int, tokens: int, topk: int,
    out: Any, expert_num_tokens: Any, positions: Any, max_tokens: int,
) -> Any:  # fmt: skip
    """Make the results that the caller does not give, and launch; `topk_ids` and `expert_map` are addresses."""
    if expert_num_tokens is None or positions is None:
        make = library.allocator(device)
        expert_num_tokens = make((config.experts,), "int32") if expert_num_tokens is None else expert_num_tokens
        positions = make((tokens, topk), "int32") if positions is None else positions
        out = expert_num_tokens, positions
    address = library.address
    pointers = topk_ids, expert_map, 0, address(expert_num_tokens), 0, 0, address(positions), 0, 0
    pairs = tokens * topk
    _held, workspace = workspace_of(config, library, device, pairs)
    launch_pairs(config, library, device, pointers, pairs, 0, workspace, 0, 0, max_tokens)
    return out


# --- moe_align_block_size -----------------------------------------------------------------------------


def _aligned(
    topk_ids: Any, block_size: Any, num_experts: Any, expert_map: Any = None, pad_sorted_ids: bool = False, **_: Any
) -> list[Result]:
    rows = twin.aligned_rows(topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_size, pad_sorted_ids)
    return [Result((rows,), "int32"), Result((-(-rows // block_size),), "int32"), Result((1,), "int32")]


@operator("sorted_token_ids, expert_ids, num_tokens_post_pad", _aligned)
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
    """Sort the pairs by expert, stably, those of each expert padded to whole blocks of block_size rows.

    Args:
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. An id outside of [0, num_experts), such as -1, has
            no expert and is left out.
        block_size: rows of a block, at most 32768.
        num_experts: the number of experts that the ids name, at most 4096.
        expert_map: int32 [num_experts]: the number of each expert in expert_ids, such as -1 for one that is not here.
        pad_sorted_ids: make sorted_token_ids a whole number of blocks.
        ignore_invalid_experts: with expert_map, leave out the pairs of experts that it maps outside of
            [0, num_experts), instead of giving them blocks; the blocks are then ordered by mapped number.
        out: a triple to write into and return. The first two may be longer than the results and are filled to their
            ends; the second may also be of rows // block_size elements, as SGLang's is.
        variant: as in `moe_sort`; all give the same.

    Returns:
        sorted_token_ids int32 [rows]: the pair token * topk + slot of each row; tokens * topk for padding.
            rows = tokens * topk + num_experts * (block_size - 1) is enough for any ids; with fewer pairs than experts,
            tokens * topk * block_size where that is less.
        expert_ids int32 [ceil(rows / block_size)]: the expert of each block, -1 past the last.
        num_tokens_post_pad int32 [1]: the rows of all blocks.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `moe_align_block_size`, with -1 for the experts of unused blocks, and in a stable order.
    """
    given: Any = out_of(out, 3, "a triple (sorted_token_ids, expert_ids, num_tokens_post_pad)")
    arrays = topk_ids, expert_map, *given
    facts = block_size, num_experts, pad_sorted_ids, ignore_invalid_experts, variant, out is None
    decision = ALIGNED.find(facts, arrays)
    if decision is not None:
        tokens, topk = topk_ids.shape
        pairs, library = tokens * topk, decision.library
        config = decision.choices.get(pairs_class(pairs))
        own_experts, own_size, is_padded = decision.own
        rows = twin.aligned_rows(pairs, own_experts, own_size, is_padded)
        if config is not None and rows <= MAX_PAIRS:
            groups, fits = -(-rows // own_size), True
            if out is not None:
                least, fewest = rows, rows // own_size
                rows, groups = given[0].shape[0], given[1].shape[0]
                fits = least <= rows <= MAX_PAIRS and fewest <= groups <= MAX_PAIRS
            if fits:
                mapping = 0 if expert_map is None else library.address(expert_map)
                early, id_of = (mapping, 0) if ignore_invalid_experts else (0, mapping)
                pointers = library.address(topk_ids), early, id_of
                return _align(config, library, decision.device, pointers, pairs, rows, groups, out, *given)
    return _decide_aligned(decision, facts, arrays, out)


def _decide_aligned(decision: Decision | None, facts: tuple[Any, ...], arrays: tuple[Any, ...], out: Any) -> Any:
    """Check a call of `moe_align_block_size`, choose its kernels, keep the choice, launch."""
    block_size, num_experts, pad_sorted_ids, ignore_invalid_experts, variant, _ = facts
    topk_ids, expert_map, *given = arrays
    pad_sorted_ids = check.flag("pad_sorted_ids", pad_sorted_ids)
    ignore_invalid_experts = check.flag("ignore_invalid_experts", ignore_invalid_experts)
    ids = read("topk_ids", topk_ids)
    pairs = math.prod(check_ids(ids))
    num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
    block_size = check.integer("block_size", block_size, 1, MAX_BLOCK_SIZE)
    mapping = check_map(expert_map, ids, num_experts)
    rows = twin.aligned_rows(pairs, num_experts, block_size, pad_sorted_ids)
    if rows > MAX_PAIRS:
        check.fail("block_size", f"such that there are at most {MAX_PAIRS} rows", f"{block_size} with {rows} rows")
    groups = -(-rows // block_size)
    views: list[View | None] = [None, None, None]
    if out is not None:
        # The rows of all blocks are whole blocks, so that no part of one follows the last.
        least = rows, rows // block_size, 1
        found = [_read_aligned(i, x, ids, n) for i, (x, n) in enumerate(zip(given, least, strict=True))]
        views, rows, groups = [*found], found[0].shape[0], found[1].shape[0]
    variant = str(check.one_of("variant", variant, SORT_VARIANTS))
    if ids.device is None:
        check.host_variant(variant, SORT_VARIANTS)
        arguments = {
            "topk_ids": ids, "block_size": block_size, "num_experts": num_experts, "expert_map": mapping,
            "pad_sorted_ids": pad_sorted_ids, "ignore_invalid_experts": ignore_invalid_experts, "out": views,
        }  # fmt: skip
        return _returned(out, runtime.run_twin(_aligned_on_host, ids, views, arguments), views, ids)
    early, id_of = (mapping, None) if ignore_invalid_experts else (None, mapping)
    config = checked_config(ids, 1, num_experts, num_experts, early, variant, block_size, block_size, -1)
    own = num_experts, block_size, pad_sorted_ids
    keep(ALIGNED, decision, facts, arrays, ids, pairs_class(pairs), config, own)
    pointers = ids.address, 0 if early is None else early.address, 0 if id_of is None else id_of.address
    results = _align(
        config, ids.library, ids.device, pointers, pairs, rows, groups, out, *(view and view.array for view in views)
    )
    return _returned(out, results, views, ids)


def _aligned_on_host(out: list[View | None], **arguments: Any) -> Any:
    given: Any = tuple([view.library.to_numpy(view.array) for view in out if view is not None])
    return twin.moe_align_block_size(**arguments, out=given or None)


def _read_aligned(i: int, array: Any, ids: View, least: int) -> View:
    """Check an array of `out`; the first two may be longer than the results."""
    name = f"out[{i}]"
    view = read_like(name, array, ids, "topk_ids", _INT32)
    check.dimensions(name, view.shape, ("rows", "blocks", "1")[i : i + 1])
    (size,) = view.shape
    if size < least or (i == 2 and size > 1):
        check.fail(name, f"of {'at least ' if i < 2 else ''}{least} elements", size)
    if size > MAX_PAIRS:
        check.fail(name, f"of at most {MAX_PAIRS} elements", size)
    contiguous(name, view)
    return view


def _align(
    config: SortConfig, library: Library, device: int, pointers: tuple[int, int, int], pairs: int, rows: int,
    groups: int, out: Any, sorted_token_ids: Any, expert_ids: Any, num_tokens_post_pad: Any,
) -> Any:  # fmt: skip
    """Make the results where the caller gives none, and launch; `pointers` are the first ones of SORT_FIELDS."""
    if out is None:
        make = library.allocator(device)
        sorted_token_ids, expert_ids, num_tokens_post_pad = (make((n,), "int32") for n in (rows, groups, 1))
        out = sorted_token_ids, expert_ids, num_tokens_post_pad
    address = library.address
    results = 0, 0, address(sorted_token_ids), 0, address(expert_ids), address(num_tokens_post_pad)
    _held, workspace = workspace_of(config, library, device, pairs)
    launch_pairs(config, library, device, (*pointers, *results), pairs, rows, workspace, pairs, groups)
    return out
