"""Rows of tokens in the order of their experts, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.formats.quantized import BLOCK
from cukern.ops.moe_permute import choose as kernels
from cukern.ops.moe_permute.choose import (
    MAX_PAIRS,
    SORT_VARIANTS,
    SUM_DTYPES,
    SUM_VARIANTS,
    RowsConfig,
    SortConfig,
    choose_permute,
    choose_permute_quantized,
    choose_unpermute,
    copied_class,
    pairs_class,
    width_of,
)
from cukern.ops.moe_permute.sorting import (
    MAX_BLOCK_SIZE,
    MAX_EXPERTS,
    check_ids,
    check_map,
    checked_config,
    keep,
    launch_pairs,
    workspace_of,
)
from cukern.reference import moe_permute as twin
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import ITEM_SIZE, AnyArray, Library, Size, View, WrittenArray, is_array
from cukern.runtime.compile import Instance
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.describe import Result, dtype_name
from cukern.runtime.op import operator
from cukern.runtime.view import contiguous, read, read_beside, read_like, row_stride

__all__ = ["moe_permute", "moe_sum", "moe_unpermute", "permute_rows"]

ROW_DTYPES = tuple(name for name in ITEM_SIZE if name != "bool")
MAX_HIDDEN = 2**24

#: What earlier calls chose, by the alignment, the slots of a token and the class of a call: the rows are free.
ROWS = Decisions((0,), (0,), (0,))
QUANTIZED = Decisions((0,), (0,), (0,), (0,))
PERMUTED = Decisions((0,), (0,), (0,), (), (0,))
UNPERMUTED = Decisions((0,), (0,), (0,), (0,), ())
SUMMED = Decisions((0,), (0,))


def specialize(*, topk: int, dtype: str = "bfloat16") -> list[Instance]:
    """Give this topk an unpermute kernel of its own in this process and say which; see `cukern.specialize`."""
    check.one_of("dtype", dtype, SUM_DTYPES)
    check.integer("topk", topk, 1, kernels.MAX_SPECIALIZED_TOPK)
    kernels.registered.add(topk)
    choose_unpermute.cache_clear()
    UNPERMUTED.clear()
    SUMMED.clear()
    return [kernels.unpermute_variant(dtype, 16, topk).instance]


# --- checks -------------------------------------------------------------------------------------------


def check_hidden(name: str, hidden: int) -> None:
    if hidden > MAX_HIDDEN:
        check.fail(name, f"of a hidden size up to {MAX_HIDDEN}", hidden)


def _slots(shape: Sequence[int], tokens: int) -> int:
    """The slots of each token, by the shape of the rows of all pairs; -1 where it does not fit, or does not say."""
    if len(shape) == 2:
        return shape[1] if shape[0] == tokens else -1
    return -1 if not tokens or shape[0] % tokens else shape[0] // tokens


def _read_inverse(name: str, inverse: Any, like: View, like_name: str) -> tuple[View, int]:
    """Check the rows of all pairs, [tokens, topk] or flat; returns them, and the slots of each token of `like`."""
    view = read_beside(name, inverse, like, like_name)
    shape, tokens = view.shape, like.shape[0]
    topk, wanted = shape[1] if len(shape) == 2 else 1, shape
    if len(shape) == 1 and _slots(shape, tokens) >= 0:
        topk = _slots(shape, tokens)
    elif len(shape) != 1 or tokens:
        wanted = tokens, topk
    else:
        wanted = (0,)
    return read_like(name, view, like, like_name, ("int32",), wanted, "[tokens, topk] or [tokens * topk]"), topk


def _address(view: View | None) -> int:
    return 0 if view is None else view.address


def _array(view: View | None) -> Any:
    return None if view is None else view.array


# --- launches -----------------------------------------------------------------------------------------


def _launch(config: RowsConfig, library: Library, device: int, tokens: int, values: tuple[Any, ...]) -> None:
    """Launch the kernel of a config for at least one token."""
    x, y, _ = config.block
    if tokens < y:
        y, config = tokens, config._replace(block=(x, tokens, 1))
    runtime.launch(config, library, device, (-(-tokens // y) * config.blocks, 1, 1), values)


def launch_permute(
    config: RowsConfig, library: Library, device: int, hidden_states: int, inverse: int, out: int, tokens: int,
    rows: int, row_stride: int, scale: int = 0, out_scale: int = 0, scale_stride: int = 0,
) -> None:  # fmt: skip
    """Launch `permute_rows` of `tokens` rows to `rows`, with the addresses of its arrays; `scale` is 0 without scales.

    Strides are in elements. Nothing is launched where there is nothing to copy.
    """
    if tokens and rows:
        strides = row_stride // config.unit, scale_stride
        values = (hidden_states, inverse, out, scale, out_scale, *strides, rows, tokens)  # of PERMUTE_FIELDS
        _launch(config, library, device, tokens, values)


def launch_permute_quantized(
    config: RowsConfig, library: Library, device: int, hidden_states: int, inverse: int, out_q: int, out_s: int,
    tokens: int, rows: int, row_stride: int,
) -> None:  # fmt: skip
    """Launch `permute_quantized` of `tokens` rows to `rows`, with the addresses of its arrays.

    `row_stride` is in elements. Nothing is launched where there is nothing to write.
    """
    if tokens and rows:
        values = hidden_states, inverse, out_q, out_s, 2 * row_stride, rows, tokens  # of QUANTIZED_FIELDS
        _launch(config, library, device, tokens, values)


def launch_unpermute(
    config: RowsConfig, library: Library, device: int, out: int, permuted: int, topk_weights: int, inverse: int,
    end: int, tokens: int, rows: int, row_stride: int,
) -> None:  # fmt: skip
    """Launch `moe_unpermute` of `rows` rows to `tokens`, with the addresses of its arrays.

    `topk_weights`, `inverse` and `end` may be 0. `end` is the address of the last number of expert_first_token_offset;
    `row_stride` is in elements. Nothing is launched where there is nothing to write.
    """
    if tokens:
        stride = row_stride // config.unit
        values = permuted, topk_weights, inverse, end, out, stride, rows, tokens  # of SUM_FIELDS
        _launch(config, library, device, tokens, values)


# --- permute_rows -------------------------------------------------------------------------------------


def _permuted_rows(hidden_states: Any, inverse: Any, rows: Any = None) -> Result:
    rows = math.prod(inverse.shape) if rows is None else rows
    return Result((rows, hidden_states.shape[1]), dtype_name(hidden_states), "[rows, hidden]")


@operator("permuted", _permuted_rows)
def permute_rows(
    hidden_states: AnyArray, inverse: AnyArray, rows: Size | None = None, *, out: AnyArray | None = None
) -> AnyArray:
    """Copy the row of each token to the rows of its pairs: out[inverse[t, s]] = hidden_states[t].

    Each row is read once, whatever topk is. Rows of `out` that no pair has are not written.

    Args:
        hidden_states: [tokens, hidden] of any dtype, such as activations, or the scales of quantized ones; rows may
            be strided.
        inverse: int32 [tokens, topk] or [tokens * topk], from `moe_sort`. An entry outside of [0, rows) is left out.
        rows: the rows of the result; tokens * topk by default.
        out: [rows, hidden] to write into and return.

    Returns:
        [rows, hidden], in the dtype and library and on the device of `hidden_states`; in host memory, rows that no pair
        has are 0 where `out` is not given.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    arrays = hidden_states, inverse, out
    decision = ROWS.find((), arrays)
    if decision is not None:
        library, tokens = decision.library, hidden_states.shape[0]
        stride, hidden, dtype, row_bytes = decision.own
        topk = _slots(inverse.shape, tokens)
        count = tokens * topk if rows is None else rows
        address, into = library.address(hidden_states), 0 if out is None else library.address(out)
        config = decision.choices.get(((address | into) % 16, copied_class(tokens * row_bytes), topk))
        if (
            config is not None
            and type(count) is int
            and (rows is None or 0 <= count <= MAX_PAIRS)
            and (out is None or out.shape[0] == count)
        ):
            device = decision.device
            if out is None:
                out = library.allocate((count, hidden), dtype, device)
                into = library.address(out)
            launch_permute(
                config, library, device, address, library.address(inverse), into, tokens, count, stride,
            )  # fmt: skip
            return out
    return _decide_rows(decision, arrays, rows)


def _decide_rows(decision: Decision | None, arrays: tuple[Any, ...], rows: Any) -> Any:
    """Check a call of `permute_rows`, choose its kernel, keep the choice, launch."""
    x = read("hidden_states", arrays[0], ROW_DTYPES, ("tokens", "hidden"))
    tokens, hidden = x.shape
    check_hidden("hidden_states", hidden)
    stride = row_stride("hidden_states", x)
    inverse, topk = _read_inverse("inverse", arrays[1], x, "hidden_states")
    count = math.prod(inverse.shape) if rows is None else check.integer("rows", rows, 0, MAX_PAIRS)
    result, out = _permuted_rows(x, inverse, count), None
    if arrays[2] is not None:
        out = read_like("out", arrays[2], x, "hidden_states", result.dtypes, result.shape, result.symbols)
    if x.device is None:
        arguments = {"hidden_states": x, "inverse": inverse, "rows": count, "out": out}
        return runtime.run_twin(twin.permute_rows, x, (out,), arguments)
    library, device = x.library, x.device
    array = library.allocate(result.shape, x.dtype, device) if out is None else out.array
    if tokens and count and topk and hidden:
        row_bytes = hidden * ITEM_SIZE[x.dtype]
        width = width_of("hidden_states", x.dtype, hidden, stride, x.address, _address(out))
        copied = copied_class(tokens * row_bytes)
        config = choose_permute(x.dtype, hidden, topk, width, 0, copied)
        key, own = ((x.address | _address(out)) % 16, copied, topk), (stride, hidden, x.dtype, row_bytes)
        keep(ROWS, decision, (), arrays, x, key, config, own)
        launch_permute(
            config, library, device, x.address, inverse.address, library.address(array), tokens, count, stride,
        )  # fmt: skip
    return runtime.returned(array, out, x)


# --- permute_quantized --------------------------------------------------------------------------------


@operator()
def permute_quantized(
    hidden_states: AnyArray, inverse: AnyArray, *, out_q: WrittenArray, out_s: WrittenArray
) -> tuple[AnyArray, AnyArray]:
    """`per_token_group_quant_fp8` in groups of 128, and `permute_rows` of what it gives, in a launch. For layers.

    Args:
        hidden_states: float16 or bfloat16 [tokens, hidden], of rows at multiples of 16 bytes; hidden is a multiple of
            128.
        inverse: int32 [tokens, topk], as in `permute_rows`.
        out_q: e4m3 [rows, hidden], in CuPy uint8, at a multiple of 16 bytes, to write into. Rows that no pair has are
            not written.
        out_s: float32 [rows, hidden / 128], to write the scales into.

    Raises:
        TypeError, ValueError: a dtype, a shape or an address that is not taken.
    """
    arrays = hidden_states, inverse, out_q, out_s
    decision = QUANTIZED.find((), arrays)
    if decision is not None:
        library, tokens, rows = decision.library, hidden_states.shape[0], out_q.shape[0]
        topk = _slots(inverse.shape, tokens)
        address, into = library.address(hidden_states), library.address(out_q)
        config = decision.choices.get(((address | into) % 16, topk))
        if config is not None and out_s.shape[0] == rows:
            launch_permute_quantized(
                config, library, decision.device, address, library.address(inverse), into, library.address(out_s),
                tokens, rows, decision.own,
            )  # fmt: skip
            return out_q, out_s
    return _decide_quantized(decision, arrays)


def _decide_quantized(decision: Decision | None, arrays: tuple[Any, ...]) -> Any:
    """Check a call of `permute_quantized`, choose its kernel, keep the choice, launch."""
    name = "hidden_states"
    x = read(name, arrays[0], ("float16", "bfloat16"), ("tokens", "hidden"))
    tokens, hidden = x.shape
    check_hidden(name, hidden)
    stride = row_stride(name, x)
    if hidden % BLOCK or stride * x.item_size % 16 or (x.device is not None and x.address % 16):
        check.fail(name, f"of whole groups of {BLOCK}, in rows at multiples of 16 bytes", list(x.shape))
    inverse, topk = _read_inverse("inverse", arrays[1], x, name)
    q = read_beside("out_q", arrays[2], x, name)
    rows = q.shape[0] if q.shape else 0
    read_like("out_q", q, x, name, ("float8_e4m3fn", "uint8"), (rows, hidden), "[rows, hidden]")
    scale = read_like("out_s", arrays[3], x, name, ("float32",), (rows, hidden // BLOCK), "[rows, hidden / 128]")
    if q.device is not None and q.address % 16:
        check.fail("out_q", "at a multiple of 16 bytes", f"an address that is a multiple of {q.alignment}")
    if x.device is None:
        arguments = {"hidden_states": x, "inverse": inverse, "out_q": q, "out_s": scale}
        runtime.run_twin(twin.permute_quantized, x, (q, scale), arguments)
        return arrays[2:]
    if topk and tokens and rows and hidden:
        config = choose_permute_quantized(x.dtype, hidden, topk)
        keep(QUANTIZED, decision, (), arrays, x, ((x.address | q.address) % 16, topk), config, stride)
        launch_permute_quantized(
            config, x.library, x.device, x.address, inverse.address, q.address, scale.address, tokens, rows, stride,
        )  # fmt: skip
    return arrays[2:]


# --- moe_permute --------------------------------------------------------------------------------------


def _padded_rows(pairs: Any, experts: Any, block_size: Any) -> Any:
    return -(-(pairs + experts * (block_size - 1)) // block_size) * block_size


def _permuted(
    hidden_states: Any, a1q_scale: Any, topk_ids: Any, n_expert: Any, n_local_expert: Any = -1, expert_map: Any = None,
    align_block_size: Any = None, fill_invalid_expert: Any = -1, permuted_hidden_states: Any = None, **_: Any,
) -> list[Any]:  # fmt: skip
    """The results; those that the caller gave as they are."""
    rows = pairs = topk_ids.shape[0] * topk_ids.shape[1]
    m_indices, permuted, scale = None, permuted_hidden_states, a1q_scale
    if align_block_size is not None:
        rows = _padded_rows(pairs, n_expert, align_block_size)
        m_indices = Result((rows,), "int32")
    if permuted is None:
        permuted = Result((rows, hidden_states.shape[1]), dtype_name(hidden_states))
    if scale is not None and len(scale.shape) > 1:
        scale = Result((rows, scale.shape[1]), dtype_name(scale))
    experts = n_expert if n_local_expert == -1 else n_local_expert
    return [permuted, scale, Result((experts + 1,), "int64"), Result((pairs,), "int32"), m_indices]


def _read_scale(a1q_scale: Any, x: View) -> View | None:
    """Check the scales of hidden_states; None where they have no rows to permute."""
    if a1q_scale is None:
        return None
    scale = read_beside("a1q_scale", a1q_scale, x, "hidden_states")
    if len(scale.shape) <= 1:
        return None
    check.dtype("a1q_scale", scale.dtype, ("float32", "int32"))
    check.shape("a1q_scale", scale.shape, (x.shape[0], scale.shape[-1]), "[tokens, groups]")
    row_stride("a1q_scale", scale)
    return scale


class _Form(NamedTuple):
    """What alike calls of `moe_permute` share."""

    hidden: int
    dtype: str
    row_bytes: int
    row_stride: int
    scale: tuple[int, int, str] | None  # columns, row stride and dtype; None where no scales are permuted
    experts: int  # that the ids name
    block_size: int | None

    def rows(self, pairs: int) -> int:
        return pairs if self.block_size is None else _padded_rows(pairs, self.experts, self.block_size)


@operator("permuted, scale, expert_first_token_offset, inv_permuted_idx, m_indices", _permuted)
def moe_permute(
    hidden_states: AnyArray,
    a1q_scale: AnyArray | None,
    topk_ids: AnyArray,
    n_expert: int,
    n_local_expert: int = -1,
    expert_map: AnyArray | None = None,
    align_block_size: int | None = None,
    fill_invalid_expert: int = -1,
    permuted_hidden_states: WrittenArray | None = None,
    *,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray]:
    """Group the rows of all pairs (token, slot) by expert: a sort, and one launch that copies rows and scales.

    Args:
        hidden_states: [tokens, hidden] of any dtype; rows may be strided.
        a1q_scale: float32 or int32 [tokens, groups], the scales of quantized hidden_states, which are permuted like
            them; or of fewer dimensions, for the whole tensor, and returned as it is; or None.
        topk_ids: int32, int64 or uint32 [tokens, topk], contiguous. An id outside of [0, n_expert), such as -1, has no
            row.
        n_expert: the number of experts that the ids name, at most 4096.
        n_local_expert: the number of experts here; -1: n_expert.
        expert_map: int32 [n_expert]: the local number of each expert. An expert with a number outside of
            [0, n_local_expert), such as -1, is not here.
        align_block_size: pad the rows of each expert to a multiple of this, as DeepGEMM's contiguous layout requires.
        fill_invalid_expert: the value of m_indices for rows past the last expert's.
        permuted_hidden_states: [rows, hidden] to write into and return.
        variant: of the sort, as in `moe_sort`; all give the same.

    Returns:
        permuted_hidden_states [rows, hidden], with rows = tokens * topk; with align_block_size,
            tokens * topk + n_expert * (align_block_size - 1) rounded up to its next multiple. Rows of padding, and
            those past the last expert's, are not written.
        a1q_scale [rows, groups], likewise; None if it was.
        expert_first_token_offset int64 [n_local_expert + 1]: the first row of each expert, and last the end of all.
        inv_permuted_idx int32 [tokens * topk]: the row of each pair; -1 if its expert is not here.
        m_indices int32 [rows]: the expert of each row, padding included; None without align_block_size.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `moe_permute`. There, pairs without an expert here have rows past the last expert's.
    """
    arrays: tuple[Any, ...] = hidden_states, a1q_scale, topk_ids, expert_map, permuted_hidden_states
    facts = n_expert, n_local_expert, align_block_size, fill_invalid_expert, variant
    decision = PERMUTED.find(facts, arrays)
    if decision is not None:
        tokens, topk = topk_ids.shape
        library, form, permuted = decision.library, decision.own, permuted_hidden_states
        pairs, address = tokens * topk, library.address(hidden_states)
        rows, into = (
            pairs if form.block_size is None else form.rows(pairs),
            0 if permuted is None else library.address(permuted),
        )
        copied = copied_class(tokens * form.row_bytes)
        configs = decision.choices.get(((address | into) % 16, copied, pairs_class(pairs)))
        if (
            configs is not None
            and hidden_states.shape[0] == tokens
            and (form.scale is None or arrays[1].shape[0] == tokens)
            and rows <= MAX_PAIRS
            and (permuted is None or permuted.shape[0] == rows)
        ):
            return _permute(
                configs, library, decision.device, form, address, a1q_scale, library.address(topk_ids),
                0 if expert_map is None else library.address(expert_map), permuted, tokens, topk, rows,
            )  # fmt: skip
    return _decide_permute(decision, facts, arrays)


def _decide_permute(decision: Decision | None, facts: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
    """Check a call of `moe_permute`, choose its kernels, keep the choice, launch."""
    n_expert, n_local_expert, align_block_size, fill_invalid_expert, variant = facts
    x = read("hidden_states", arrays[0], ROW_DTYPES, ("tokens", "hidden"))
    tokens, hidden = x.shape
    check_hidden("hidden_states", hidden)
    stride = row_stride("hidden_states", x)
    ids = read_beside("topk_ids", arrays[2], x, "hidden_states")
    _, topk = check_ids(ids)
    check.shape("topk_ids", ids.shape, (tokens, topk), "[tokens, topk]")
    experts = n_expert = check.integer("n_expert", n_expert, 1, MAX_EXPERTS)
    if is_array(n_local_expert) or n_local_expert != -1:
        experts = check.integer("n_local_expert", n_local_expert, 1, n_expert, "n_expert")
    mapping = check_map(arrays[3], ids, n_expert, "n_expert")
    scale = _read_scale(arrays[1], x)
    block_size, group_fill = align_block_size, 0
    if block_size is not None:
        block_size = check.integer("align_block_size", block_size, 1, MAX_BLOCK_SIZE)
    of_scale = None if scale is None else (scale.shape[1], scale.strides[0], scale.dtype)
    form = _Form(hidden, x.dtype, hidden * ITEM_SIZE[x.dtype], stride, of_scale, n_expert, block_size)
    rows = form.rows(tokens * topk)
    if block_size is not None:
        if rows > MAX_PAIRS:
            got = f"{block_size} with {rows} rows"
            check.fail("align_block_size", f"such that there are at most {MAX_PAIRS} rows", got)
        group_fill = check.integer("fill_invalid_expert", fill_invalid_expert, -(2**31), 2**31 - 1)
    permuted = None
    if arrays[4] is not None:
        like = x, "hidden_states", (x.dtype,)
        permuted = read_like("permuted_hidden_states", arrays[4], *like, (rows, hidden), "[rows, hidden]")
    variant = str(check.one_of("variant", variant, SORT_VARIANTS))
    if x.device is None:
        check.host_variant(variant, SORT_VARIANTS)
        arguments = {
            "hidden_states": x, "a1q_scale": scale, "topk_ids": ids, "n_expert": n_expert, "n_local_expert": experts,
            "expert_map": mapping, "align_block_size": block_size, "fill_invalid_expert": group_fill,
            "permuted_hidden_states": permuted,
        }  # fmt: skip
        return _permute_on_host(x, permuted, arrays[1], arguments)
    sorts = checked_config(
        ids, 1, n_expert, experts, mapping, variant, block_size or 1, 0 if block_size is None else 1, group_fill
    )
    copies, columns = None, 0 if scale is None else scale.shape[1]
    copied = copied_class(tokens * form.row_bytes)
    if tokens and (hidden or columns):
        width = width_of("hidden_states", x.dtype, hidden, stride, x.address, _address(permuted))
        copies = choose_permute(x.dtype, hidden, topk, width, columns, copied)
    if tokens:
        key = (x.address | _address(permuted)) % 16, copied, pairs_class(tokens * topk)
        keep(PERMUTED, decision, facts, arrays, x, key, (sorts, copies), form)
    a1q_scale = arrays[1] if scale is None else scale.array
    first, scales, *found, m_indices = _permute(
        (sorts, copies), x.library, x.device, form, x.address, a1q_scale, ids.address, _address(mapping),
        _array(permuted), tokens, topk, rows,
    )  # fmt: skip
    return (
        runtime.returned(first, permuted, x),
        scales if scale is None else runtime.returned(scales, None, x),
        *[runtime.returned(array, None, x) for array in found],
        None if m_indices is None else runtime.returned(m_indices, None, x),
    )


def _permute_on_host(x: View, permuted: View | None, a1q_scale: Any, arguments: dict[str, Any]) -> Any:
    made = [0, *[1] * (arguments["a1q_scale"] is not None), 2, 3, *[4] * (arguments["align_block_size"] is not None)]
    into = [permuted, *[None] * (len(made) - 1)]
    found = runtime.run_twin(lambda **given: [twin.moe_permute(**given)[i] for i in made], x, into, arguments)
    if found is None:
        return None
    results = {1: a1q_scale} | dict(zip(made, found, strict=True))
    return tuple([results.get(i) for i in range(5)])


def _permute(
    configs: tuple[SortConfig, RowsConfig | None], library: Library, device: int, form: _Form, hidden_states: int,
    a1q_scale: Any, topk_ids: int, expert_map: int, permuted: Any, tokens: int, topk: int, rows: int,
) -> tuple[Any, Any, Any, Any, Any]:  # fmt: skip
    """Make the results that the caller does not give, and launch a sort and a copy.

    `hidden_states`, `topk_ids` and `expert_map` are addresses.
    """
    (sorts, copies), pairs, address, make = configs, tokens * topk, library.address, library.allocator(device)
    if permuted is None:
        permuted = make((rows, form.hidden), form.dtype)
    scale, scales = a1q_scale, (0, 0, 0)
    if form.scale is not None:
        columns, stride, dtype = form.scale
        scale = make((rows, columns), dtype)
        if columns:
            scales = address(a1q_scale), address(scale), stride
    offsets = make((sorts.experts + 1,), "int64")
    inverse = make((pairs,), "int32")
    m_indices = None if form.block_size is None else make((rows,), "int32")
    to, groups = address(inverse), 0 if m_indices is None else address(m_indices)
    pointers = topk_ids, expert_map, 0, 0, address(offsets), 0, to, groups, 0
    _held, workspace = workspace_of(sorts, library, device, pairs)
    launch_pairs(sorts, library, device, pointers, pairs, 0, workspace, 0, rows)
    if copies is not None:
        into = address(permuted)
        launch_permute(copies, library, device, hidden_states, to, into, tokens, rows, form.row_stride, *scales)
    return permuted, scale, offsets, inverse, m_indices


# --- sums ---------------------------------------------------------------------------------------------


def _read_slots(topk_weights: Any, inv_permuted_idx: Any, out: View) -> tuple[View | None, View | None, int]:
    """Check weights and rows of the slots, at least one of which is given; returns them and topk."""
    tokens, weights, inverse = out.shape[0], None, None
    if topk_weights is not None and inv_permuted_idx is None:
        weights = read_beside("topk_weights", topk_weights, out, "out")
        check.dimensions("topk_weights", weights.shape, ("tokens", "topk"))
        topk = weights.shape[1]
    else:
        inverse, topk = _read_inverse("inv_permuted_idx", inv_permuted_idx, out, "out")
    if topk_weights is not None:
        weights = weights or read_beside("topk_weights", topk_weights, out, "out")
        # Without tokens, a flat inv_permuted_idx has no elements and does not say what topk is.
        if len(weights.shape) == 2 and not tokens:
            topk = weights.shape[1]
        read_like("topk_weights", weights, out, "out", ("float32",), (tokens, topk), "[tokens, topk]")
    return weights, inverse, topk


def _read_offsets(offsets: Any, out: View) -> View:
    name = "expert_first_token_offset"
    view = read_beside(name, offsets, out, "out")
    if len(view.shape) != 1 or not view.shape[0]:
        check.fail(name, "of shape [experts + 1]", list(view.shape))
    return read_like(name, view, out, "out", ("int64", "int32"), view.shape, "[experts + 1]")


@operator()
def moe_unpermute(
    out: WrittenArray,
    permuted_hidden_states: AnyArray,
    topk_weights: AnyArray | None,
    inv_permuted_idx: AnyArray,
    expert_first_token_offset: AnyArray | None = None,
    *,
    variant: str = "auto",
) -> AnyArray:
    """Sum up the rows of each token, with weights: out[t] = sum over s of topk_weights[t, s] * row[inv[t, s]].

    Each product and each sum is rounded to float32, from the first slot to the last, and the result to the dtype: the
    bits do not depend on the variant.

    Args:
        out: [tokens, hidden], written: float32, float16 or bfloat16.
        permuted_hidden_states: [rows, hidden], of the same dtype; rows may be strided.
        topk_weights: float32 [tokens, topk]; None: all are 1.
        inv_permuted_idx: int32 [tokens, topk] or [tokens * topk], from `moe_permute` or `moe_sort`. A slot whose row is
            outside of [0, rows), such as -1, adds nothing, even if its weight is NaN. None, with topk_weights: token t
            has the rows from t * topk on.
        expert_first_token_offset: int64 or int32 [experts + 1], from the same function. Rows from its last number on
            add nothing either.
        variant: "auto", or a kernel by name: "specialized" (topk fixed at compile time) or "dynamic".

    Returns:
        out.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is vLLM's `moe_unpermute`.
    """
    arrays = out, permuted_hidden_states, topk_weights, inv_permuted_idx, expert_first_token_offset
    decision = UNPERMUTED.find((variant,), arrays)
    if decision is not None:
        library, (stride, behind) = decision.library, decision.own
        tokens, rows = out.shape[0], permuted_hidden_states.shape[0]
        slots: Any = topk_weights if inv_permuted_idx is None else inv_permuted_idx
        topk = _slots(slots.shape, tokens)
        into, address = library.address(out), library.address(permuted_hidden_states)
        config = decision.choices.get(((into | address) % 16, topk))
        if config is not None and rows <= MAX_PAIRS and (topk_weights is None or topk_weights.shape[0] == tokens):
            weights = 0 if topk_weights is None else library.address(topk_weights)
            inverse = 0 if inv_permuted_idx is None else library.address(inv_permuted_idx)
            end = 0 if expert_first_token_offset is None else library.address(expert_first_token_offset) + behind
            launch_unpermute(
                config, library, decision.device, into, address, weights, inverse, end, tokens, rows, stride
            )
            return out
    return _decide_unpermute(decision, arrays, variant)


def _decide_unpermute(decision: Decision | None, arrays: tuple[Any, ...], variant: Any) -> Any:
    """Check a call of `moe_unpermute`, choose its kernel, keep the choice, launch."""
    out = read("out", arrays[0], SUM_DTYPES, ("tokens", "hidden"))
    tokens, hidden = out.shape
    check_hidden("out", hidden)
    contiguous("out", out)
    name = "permuted_hidden_states"
    src = read_like(name, arrays[1], out, "out", (out.dtype,))
    check.dimensions(name, src.shape, ("rows", "hidden"))
    rows = src.shape[0]
    check.shape(name, src.shape, (rows, hidden), "[rows, hidden]")
    if rows > MAX_PAIRS:
        check.fail(name, f"of at most {MAX_PAIRS} rows", rows)
    stride = row_stride(name, src)
    weights, inverse, topk = _read_slots(arrays[2], arrays[3], out)
    offsets = None if arrays[4] is None else _read_offsets(arrays[4], out)
    variant = str(check.one_of("variant", variant, SUM_VARIANTS))
    if out.device is None:
        check.host_variant(variant, SUM_VARIANTS)
        arguments = {
            "out": out, "permuted_hidden_states": src, "topk_weights": weights, "inv_permuted_idx": inverse,
            "expert_first_token_offset": offsets,
        }  # fmt: skip
        runtime.run_twin(twin.moe_unpermute, out, (out,), arguments)
        return arrays[0]
    if tokens and hidden:
        width = width_of("out", out.dtype, hidden, stride, src.address, out.address)
        config = choose_unpermute(out.dtype, hidden, topk, width, variant)
        # The kernel reads an int32: of an int64 the low word.
        behind = 0 if offsets is None else (offsets.shape[0] - 1) * offsets.item_size
        if topk:
            key = (out.address | src.address) % 16, topk
            keep(UNPERMUTED, decision, (variant,), arrays, out, key, config, (stride, behind))
        else:  # nothing is read, and the sum is 0
            weights = inverse = None
        launch_unpermute(
            config, out.library, out.device, out.address, src.address, _address(weights), _address(inverse),
            _address(offsets) + behind, tokens, rows, stride,
        )  # fmt: skip
    return arrays[0]


def _summed(input: Any, output: Any = None, **_: Any) -> Any:
    return output if output is not None else Result((input.shape[0], input.shape[2]), dtype_name(input))


@operator("sum", _summed)
def moe_sum(input: AnyArray, output: WrittenArray | None = None, *, variant: str = "auto") -> AnyArray:
    """Sum up the slots of each token: output[t] = sum over s of input[t, s], in float32, then rounded to the dtype.

    Args:
        input: [tokens, topk, hidden], float32, float16 or bfloat16, contiguous.
        output: [tokens, hidden], of the same dtype, to write into and return.
        variant: as in `moe_unpermute`, and so are the errors.

    Returns:
        output, or a new array.

    The function is vLLM's `moe_sum`.
    """
    arrays = input, output
    decision = SUMMED.find((variant,), arrays)
    if decision is not None:
        library, device, (topk, hidden, dtype) = decision.library, decision.device, decision.own
        tokens, address = input.shape[0], library.address(input)
        config = decision.choices.get((address | (0 if output is None else library.address(output))) % 16)
        if config is not None and tokens * topk <= MAX_PAIRS and (output is None or output.shape[0] == tokens):
            if output is None:
                output = library.allocate((tokens, hidden), dtype, device)
            into, rows = library.address(output), tokens * topk
            launch_unpermute(config, library, device, into, address, 0, 0, 0, tokens, rows, hidden)
            return output
    return _decide_sum(decision, arrays, variant)


def _decide_sum(decision: Decision | None, arrays: tuple[Any, ...], variant: Any) -> Any:
    """Check a call of `moe_sum`, choose its kernel, keep the choice, launch."""
    x = read("input", arrays[0], SUM_DTYPES, ("tokens", "topk", "hidden"))
    tokens, topk, hidden = x.shape
    check_hidden("input", hidden)
    contiguous("input", x)
    if tokens * topk > MAX_PAIRS:
        check.fail("input", f"of at most {MAX_PAIRS} rows", tokens * topk)
    out, shape = None, (tokens, hidden)
    if arrays[1] is not None:
        out = read_like("output", arrays[1], x, "input", (x.dtype,), shape, "[tokens, hidden]")
    variant = str(check.one_of("variant", variant, SUM_VARIANTS))
    if x.device is None:
        check.host_variant(variant, SUM_VARIANTS)
        return runtime.run_twin(twin.moe_sum, x, (out,), {"input": x, "output": out})
    array = x.library.allocate(shape, x.dtype, x.device) if out is None else out.array
    if tokens and hidden:
        width = width_of("input", x.dtype, hidden, hidden, x.address, _address(out))
        config = choose_unpermute(x.dtype, hidden, topk, width, variant)
        key, own = (x.address | _address(out)) % 16, (topk, hidden, x.dtype)
        keep(SUMMED, decision, (variant,), arrays, x, key, config, own)
        into = x.library.address(array)
        launch_unpermute(config, x.library, x.device, into, x.address, 0, 0, 0, tokens, tokens * topk, hidden)
    return runtime.returned(array, out, x)
