"""Permute the rows of tokens into the order of their experts, and sum the rows of each token afterwards."""

from __future__ import annotations

import math
from typing import Any

from cukern.formats.quantized import BLOCK, SMALLEST
from cukern.ops.moe_permute import choose as kernels
from cukern.ops.moe_permute.choose import MAX_PAIRS, SORT_VARIANTS, SUM_DTYPES, SUM_VARIANTS
from cukern.ops.moe_permute.sorting import MAX_BLOCK_SIZE, MAX_EXPERTS, check_ids, check_map
from cukern.reference import moe_permute as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray, Size, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_aligned,
    expect_array,
    expect_contiguous,
    expect_place,
    expect_row_stride,
)
from cukern.runtime.op import forget_plans, op
from cukern.runtime.plan import outputs, run_twin

__all__ = ["moe_permute", "moe_sum", "moe_unpermute", "permute_rows"]

ROW_DTYPES = tuple(name for name in arrays.ITEM_SIZE if name != "bool")
MAX_HIDDEN = 2**24


def specialize(*, topk: int, dtype: str = "bfloat16") -> list[Instance]:
    """Register an unpermute kernel for this topk in this process, and return its instance; see `cukern.specialize`."""
    check.one_of("dtype", dtype, SUM_DTYPES)
    check.integer("topk", topk, 1, kernels.MAX_SPECIALIZED_TOPK)
    kernels.registered.add(topk)
    forget_plans()
    return [kernels.unpermute_variant(dtype, 16, topk).instance]


def _check_hidden(name: str, hidden: int) -> None:
    if hidden > MAX_HIDDEN:
        check.fail(name, f"of a hidden size up to {MAX_HIDDEN}", hidden)


def _topk_of(name: str, inverse: Any, like: Array, like_name: str) -> int:
    """Check an inverse permutation, and return topk."""
    expect_place(name, inverse, like, like_name)
    shape, tokens = inverse.shape, like.shape[0]
    topk = shape[1] if len(shape) == 2 else 1
    wanted: tuple[Any, ...] = (tokens, topk)
    if len(shape) == 1:
        if not tokens:
            wanted = (0,)
        elif shape[0] % tokens == 0:
            topk, wanted = shape[0] // tokens, shape
    expect(name, inverse, like, like_name, ("int32",), wanted, "[tokens, topk] or [tokens * topk]")
    return topk


def _permuted_rows(hidden_states: Any, inverse: Any, rows: Any = None) -> Result:
    rows = math.prod(inverse.shape) if rows is None else rows
    return Result((rows, hidden_states.shape[1]), dtype_name(hidden_states), "[rows, hidden]")


@op(twin.permute_rows, "permuted", _permuted_rows)
def permute_rows(
    hidden_states: AnyArray, inverse: AnyArray, rows: Size | None = None, *, out: AnyArray | None = None
) -> AnyArray:
    """Copy the row of each token to the rows of its (token, slot) pairs: out[inverse[t, s]] = hidden_states[t].

    Args:
        hidden_states: [tokens, hidden] of any dtype; rows may be strided.
        inverse: int32 [tokens, topk] or [tokens * topk], from `moe_sort`. Entries outside of [0, rows) are skipped.
        rows: the number of rows of the result; tokens * topk by default.
        out: [rows, hidden] to write into and return.

    Returns:
        [rows, hidden], in the dtype and library and on the device of `hidden_states`. Rows without a pair are not
        written; in host memory they are 0 if `out` is not given. The errors are as in `moe_sort`.
    """
    tokens, hidden = expect_array("hidden_states", hidden_states, ROW_DTYPES, ("tokens", "hidden")).shape
    _check_hidden("hidden_states", hidden)
    row_stride = expect_row_stride("hidden_states", hidden_states)
    topk = _topk_of("inverse", inverse, hidden_states, "hidden_states")
    if rows is not None:
        rows = check.integer("rows", rows, 0, MAX_PAIRS)
    out = outputs(out, hidden_states, "hidden_states", _permuted_rows(hidden_states, inverse, rows))
    if hidden_states.on_host:
        return run_twin()
    if topk and tokens != 0 and (rows is None or rows != 0):
        kernels.launch_permute(hidden_states, row_stride, inverse, topk, out)
    return out


@op(twin.permute_quantized)
def permute_quantized(
    hidden_states: AnyArray, inverse: AnyArray, *, out_q: WrittenArray, out_s: WrittenArray
) -> tuple[AnyArray, AnyArray]:
    """Quantize rows in groups of 128 as `per_token_group_quant_fp8` does, and permute them, in one launch.

    The layers of cukern call this function, which is not public.

    Args:
        hidden_states: float16 or bfloat16 [tokens, hidden], with rows at multiples of 16 bytes; hidden is a multiple of
            128.
        inverse: int32 [tokens, topk], as in `permute_rows`.
        out_q: e4m3 [rows, hidden] (uint8 in CuPy), written, at a multiple of 16 bytes. Rows without a pair are not
            written.
        out_s: float32 [rows, hidden / 128], written: the scales.

    Raises:
        TypeError, ValueError: an unsupported dtype, shape or address.
    """
    name = "hidden_states"
    tokens, hidden = expect_array(name, hidden_states, ("float16", "bfloat16"), ("tokens", "hidden")).shape
    _check_hidden(name, hidden)
    row_stride = expect_row_stride(name, hidden_states)
    if hidden % BLOCK or row_stride * hidden_states.item_size % 16 or hidden_states.alignment < 16:
        check.fail(name, f"of whole groups of {BLOCK}, in rows at multiples of 16 bytes", list(hidden_states.shape))
    topk = _topk_of("inverse", inverse, hidden_states, name)
    rows = out_q.shape[0]
    kinds = ("float8_e4m3fn", "uint8")
    expect("out_q", out_q, hidden_states, name, kinds, (rows, hidden), "[rows, hidden]")
    expect("out_s", out_s, hidden_states, name, ("float32",), (rows, hidden // BLOCK), "[rows, hidden / 128]")
    expect_aligned("out_q", out_q)
    if hidden_states.on_host:
        return run_twin()
    if topk and tokens != 0 and rows != 0 and hidden:
        kernels.launch_permute_quantized(hidden_states, row_stride, inverse, topk, out_q, out_s, float(SMALLEST))
    return out_q, out_s


def _padded_rows(pairs: Any, experts: Any, block_size: Any) -> Any:
    return -(-(pairs + experts * (block_size - 1)) // block_size) * block_size


def _permuted(
    hidden_states: Any,
    a1q_scale: Any,
    topk_ids: Any,
    n_expert: Any,
    n_local_expert: Any = -1,
    expert_map: Any = None,
    align_block_size: Any = None,
    fill_invalid_expert: Any = -1,
    permuted_hidden_states: Any = None,
    **_: Any,
) -> list[Any]:
    """Describe the results. A result that the caller passed is returned unchanged."""
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


def _check_scale(a1q_scale: Any, hidden_states: Array) -> bool:
    """Check the scales, and return whether they have a row per token."""
    if a1q_scale is None:
        return False
    expect_place("a1q_scale", a1q_scale, hidden_states, "hidden_states")
    if len(a1q_scale.shape) <= 1:
        return False
    check.dtype("a1q_scale", a1q_scale.dtype, ("float32", "int32"))
    shape = (hidden_states.shape[0], a1q_scale.shape[-1])
    check.shape("a1q_scale", a1q_scale.shape, shape, "[tokens, groups]")
    expect_row_stride("a1q_scale", a1q_scale)
    return True


@op(twin.moe_permute, "permuted, scale, expert_first_token_offset, inv_permuted_idx, m_indices", _permuted)
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
    """Group the rows of all pairs (token, slot) by expert: sort the pairs, then copy rows and scales in one launch.

    Args:
        hidden_states: [tokens, hidden] of any dtype; rows may be strided.
        a1q_scale: float32 or int32 [tokens, groups], permuted like hidden_states. An array of fewer dimensions is
            returned unchanged. None: no scales.
        topk_ids, expert_map: as in `moe_sort`.
        n_expert, n_local_expert: num_experts and num_local_experts of `moe_sort`. n_local_expert -1 means n_expert.
        align_block_size: pad the rows of each expert to a multiple of this number, as DeepGEMM's contiguous layout
            requires.
        fill_invalid_expert: the value of m_indices for the rows after the last expert's rows.
        permuted_hidden_states: [rows, hidden] to write into and return.
        variant: the variant of the sort, as in `moe_sort`. The errors are the same.

    Returns:
        permuted_hidden_states [rows, hidden]. rows is tokens * topk; with align_block_size, it is tokens * topk +
            n_expert * (align_block_size - 1), rounded up to a multiple of align_block_size. Rows without a pair are not
            written.
        a1q_scale [rows, groups], permuted; None if it was None.
        expert_first_token_offset int64 [n_local_expert + 1]: the first row of each expert, then the end of all rows.
        inv_permuted_idx int32 [tokens * topk]: the row of each pair; -1 if its expert is not on this rank.
        m_indices int32 [rows]: the expert of each row, padding included; None without align_block_size.

    The interface is vLLM's `moe_permute`. Unlike in vLLM, pairs whose expert is not on this rank get no rows.
    """
    tokens, hidden = expect_array("hidden_states", hidden_states, ROW_DTYPES, ("tokens", "hidden")).shape
    _check_hidden("hidden_states", hidden)
    row_stride = expect_row_stride("hidden_states", hidden_states)
    expect_place("topk_ids", topk_ids, hidden_states, "hidden_states")
    _, topk = check_ids(topk_ids)
    check.shape("topk_ids", topk_ids.shape, (tokens, topk), "[tokens, topk]")
    experts = n_expert = check.integer("n_expert", n_expert, 1, MAX_EXPERTS)
    if n_local_expert != -1:
        experts = check.integer("n_local_expert", n_local_expert, 1, n_expert, "n_expert")
    check_map(expert_map, topk_ids, n_expert, "n_expert")
    permutes_scale = _check_scale(a1q_scale, hidden_states)
    block_size, group_fill = 1, 0
    if align_block_size is not None:
        block_size = check.integer("align_block_size", align_block_size, 1, MAX_BLOCK_SIZE)
    results = _permuted(hidden_states, a1q_scale, topk_ids, n_expert, experts, None, align_block_size)
    rows = results[0].shape[0]
    if align_block_size is not None:
        if rows > MAX_PAIRS:
            got = f"{block_size} with {rows} rows"
            check.fail("align_block_size", f"such that there are at most {MAX_PAIRS} rows", got)
        group_fill = check.integer("fill_invalid_expert", fill_invalid_expert, -(2**31), 2**31 - 1)
    if permuted_hidden_states is not None:
        like, dtypes = (hidden_states, "hidden_states"), (hidden_states.dtype,)
        given = expect(
            "permuted_hidden_states", permuted_hidden_states, *like, dtypes, (rows, hidden), "[rows, hidden]"
        )
        results[0] = given
    found = outputs(None, hidden_states, "hidden_states", *results)
    if hidden_states.on_host:
        return run_twin(variant, SORT_VARIANTS)
    permuted, scale, offsets, inverse, m_indices = found
    fields = {"offsets_long": offsets, "inverse": inverse, "group_ids": m_indices, "block_size": block_size}
    fields |= {"groups": rows, "group_fill": group_fill}
    kernels.launch_sort(topk_ids, n_expert, experts, expert_map, variant, **fields)
    if tokens != 0:
        scales = (a1q_scale, scale) if permutes_scale and scale.shape[1] else (None, None)
        kernels.launch_permute(hidden_states, row_stride, inverse, topk, permuted, *scales)
    return found


def _check_slots(topk_weights: Any, inv_permuted_idx: Any, out: Array) -> Any:
    """Check topk_weights and inv_permuted_idx, and return topk. At least one of them must be given."""
    tokens = out.shape[0]
    if inv_permuted_idx is None and topk_weights is not None:
        expect_place("topk_weights", topk_weights, out, "out")
        check.dimensions("topk_weights", topk_weights.shape, ("tokens", "topk"))
        topk = topk_weights.shape[1]
    else:
        topk = _topk_of("inv_permuted_idx", inv_permuted_idx, out, "out")
    if topk_weights is not None:
        shape: tuple[Any, ...] = getattr(topk_weights, "shape", ())
        # Without tokens, only topk_weights determines topk.
        if len(shape) == 2 and shape[1] != topk and not tokens:
            topk = shape[1]
        expect("topk_weights", topk_weights, out, "out", ("float32",), (tokens, topk), "[tokens, topk]")
    return topk


def _end_of_rows(offsets: Any, out: Array) -> Array:
    """Check expert_first_token_offset, and return its last element as an array [1]."""
    name = "expert_first_token_offset"
    expect_place(name, offsets, out, "out")
    if len(offsets.shape) != 1 or not offsets.shape[0]:
        check.fail(name, "of shape [experts + 1]", list(offsets.shape))
    expect(name, offsets, out, "out", ("int64", "int32"), offsets.shape, "[experts + 1]")
    # The kernel reads the low four bytes of an int64.
    return offsets[offsets.shape[0] - 1 :]


@op(twin.moe_unpermute)
def moe_unpermute(
    out: WrittenArray,
    permuted_hidden_states: AnyArray,
    topk_weights: AnyArray | None,
    inv_permuted_idx: AnyArray,
    expert_first_token_offset: AnyArray | None = None,
    *,
    variant: str = "auto",
) -> AnyArray:
    """Add up the weighted rows of each token: out[t] = sum over s of topk_weights[t, s] * row[inv[t, s]].

    The slots are added in order. Each multiplication and each addition is rounded to float32, and the complete sum is
    rounded to the dtype of `out`. All variants give the same bits.

    Args:
        out: [tokens, hidden], written: float32, float16 or bfloat16.
        permuted_hidden_states: [rows, hidden], of the same dtype; rows may be strided.
        topk_weights: float32 [tokens, topk]; None: all are 1.
        inv_permuted_idx: int32 [tokens, topk] or [tokens * topk], from `moe_permute` or `moe_sort`. A slot whose row is
            outside of [0, rows), such as -1, adds nothing, even if its weight is NaN. None (then topk_weights is
            required): the rows of token t are the topk rows from t * topk on.
        expert_first_token_offset: int64 or int32 [experts + 1], from the function that gave inv_permuted_idx. Rows from
            its last element on add nothing.
        variant: "auto", "specialized" (topk fixed at compile time) or "dynamic". The errors are as in `moe_sort`.

    Returns:
        out.

    The interface is vLLM's `moe_unpermute`.
    """
    _, hidden = expect_array("out", out, SUM_DTYPES, ("tokens", "hidden")).shape
    _check_hidden("out", hidden)
    expect_contiguous("out", out)
    src = expect_place("permuted_hidden_states", permuted_hidden_states, out, "out")
    check.dtype("permuted_hidden_states", src.dtype, (out.dtype,))
    check.dimensions("permuted_hidden_states", src.shape, ("rows", "hidden"))
    rows = src.shape[0]
    check.shape("permuted_hidden_states", src.shape, (rows, hidden), "[rows, hidden]")
    if rows > MAX_PAIRS:
        check.fail("permuted_hidden_states", f"of at most {MAX_PAIRS} rows", rows)
    row_stride = expect_row_stride("permuted_hidden_states", src)
    topk = _check_slots(topk_weights, inv_permuted_idx, out)
    end = None if expert_first_token_offset is None else _end_of_rows(expert_first_token_offset, out)
    if out.on_host:
        run_twin(variant, SUM_VARIANTS)
        return out
    # If topk is 0, the kernel needs no weights and no rows: all sums are 0.
    weights, inverse = (topk_weights, inv_permuted_idx) if topk else (None, None)
    kernels.launch_sum("out", src, rows, row_stride, out, topk, variant, weights=weights, inverse=inverse, offsets=end)
    return out


def _summed(input: Any, output: Any = None, **_: Any) -> Any:
    return output if output is not None else Result((input.shape[0], input.shape[2]), dtype_name(input))


@op(twin.moe_sum, "sum", _summed)
def moe_sum(input: AnyArray, output: WrittenArray | None = None, *, variant: str = "auto") -> AnyArray:
    """Add up the slots of each token in float32: output[t] = sum over s of input[t, s], rounded once to the dtype.

    Args:
        input: [tokens, topk, hidden], float32, float16 or bfloat16, contiguous.
        output: [tokens, hidden], of the same dtype, to write into and return.
        variant: as in `moe_unpermute`. The errors are the same.

    Returns:
        output, or a new array.

    The interface is vLLM's `moe_sum`.
    """
    tokens, topk, hidden = expect_array("input", input, SUM_DTYPES, ("tokens", "topk", "hidden")).shape
    _check_hidden("input", hidden)
    expect_contiguous("input", input)
    if tokens * topk > MAX_PAIRS:
        check.fail("input", f"of at most {MAX_PAIRS} rows", tokens * topk)
    if output is not None:
        expect("output", output, input, "input", (input.dtype,), (tokens, hidden), "[tokens, hidden]")
    output = outputs(None, input, "input", _summed(input, output))
    if input.on_host:
        return run_twin(variant, SUM_VARIANTS)
    no_arrays = dict.fromkeys(("weights", "inverse", "offsets"))
    kernels.launch_sum("input", input, tokens * topk, hidden, output, topk, variant, **no_arrays)
    return output
