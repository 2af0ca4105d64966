"""Remove padding before layers that process words (tokens), and restore it before layers that process sequences."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from cukern.ops.padding.choose import (
    DTYPES,
    VARIANTS,
    fill_bits,
    launch_build,
    layout_of,
    specialize,  # noqa: F401  (found here by `cukern.specialize`)
)
from cukern.reference import padding as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray, Size
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    expect_strided,
    type_name,
)
from cukern.runtime.op import op
from cukern.runtime.op import operator as declare_operator
from cukern.runtime.plan import check_each_call, launch, outputs, run_twin
from cukern.runtime.rows import MAX_ROWS, rows_of
from cukern.runtime.vectors import ceil_div, vector_bytes

__all__ = [
    "add_qkv_bias_rebuild_padding",
    "build_sequence_length_padding_offset",
    "rebuild_sequence_length_padding",
    "remove_sequence_length_padding",
    "transpose_remove_padding",
]

MAX_HIDDEN = 2**24


# --- checks -------------------------------------------------------------------------------------------


def _lengths(batch: Any, max_seq_len: Any) -> tuple[Any, Any]:
    return check.integer("batch", batch, 0, MAX_ROWS), check.integer("max_seq_len", max_seq_len, 0, MAX_ROWS)


def _check_hidden(name: str, hidden: int) -> None:
    if hidden > MAX_HIDDEN:
        check.fail(name, f"of a hidden size up to {MAX_HIDDEN}", hidden)


def _padded_rows(batch: Any, max_seq_len: Any) -> Any:
    rows = batch * max_seq_len
    if rows > MAX_ROWS:
        check.fail("batch * max_seq_len", f"at most {MAX_ROWS}", rows)
    return rows


def _words(padding_offset: Any, like: Array, like_name: str, rows: Any) -> Any:
    """Check padding_offset. Return the number of words."""
    expect_place("padding_offset", padding_offset, like, like_name)
    check.dimensions("padding_offset", padding_offset.shape, ("words",))
    words = padding_offset.shape[0]
    expect("padding_offset", padding_offset, like, like_name, ("int32",), (words,), "[words]")
    if words > rows:
        check.fail("padding_offset", f"of at most the {rows} rows of the padded batch", words)
    return words


def _width(name: str, item_size: int, *sizes: int, arrays: tuple[Array, ...]) -> int:
    """Return the size in bytes of the widest vector that all row sizes, strides and addresses are multiples of."""
    return vector_bytes(
        name, functools.reduce(operator.or_, (*sizes, *(array.alignment for array in arrays))), item_size
    )


# --- the functions ------------------------------------------------------------------------------------


def _check_lengths(sequence_length: Any, max_seq_len: Any) -> Any:
    """Check the lengths. Return the number of rows of the padded batch."""
    expect_array("sequence_length", sequence_length, (), ("batch",))
    batch = sequence_length.shape[0]
    expect("sequence_length", sequence_length, sequence_length, "sequence_length", ("int32",), (batch,), "[batch]")
    if batch > MAX_ROWS:
        check.fail("sequence_length", f"of at most {MAX_ROWS} sequences", batch)
    return _padded_rows(batch, check.integer("max_seq_len", max_seq_len, 0, MAX_ROWS))


def _build_on_host(sequence_length: Any, max_seq_len: int, *, valid_word_num: int | None = None) -> Any:
    """Check the lengths, and run the NumPy reference."""
    outside = np.flatnonzero((sequence_length < 0) | (sequence_length > max_seq_len))
    if len(outside):
        wanted = f"in [0, {max_seq_len}] (max_seq_len)"
        check.fail(f"sequence_length[{outside[0]}]", wanted, sequence_length[outside[0]])
    total = int(sequence_length.sum(dtype=np.int64))
    if valid_word_num is not None and total != valid_word_num:
        check.fail("valid_word_num", f"{total}, the sum of sequence_length", valid_word_num)
    return twin.build_sequence_length_padding_offset(sequence_length, max_seq_len, valid_word_num=valid_word_num)


@op(lambda sequence_length, max_seq_len: _build_on_host(sequence_length, max_seq_len)[1])
def _count_words(sequence_length: Any, max_seq_len: Any) -> Any:
    _check_lengths(sequence_length, max_seq_len)
    cu_seqlens = outputs(None, sequence_length, "", Result((sequence_length.shape[0] + 1,), "int32"))
    if sequence_length.on_host:
        return run_twin()
    why = "first launch: the host reads the number of words, the size of padding_offset (valid_word_num gives it)"
    launch_build(sequence_length, max_seq_len, None, cu_seqlens, 0, f"{why}; ")
    return cu_seqlens


@op(_build_on_host)
def _build_offsets(sequence_length: Any, max_seq_len: Any, *, valid_word_num: Any) -> Any:
    rows = _check_lengths(sequence_length, max_seq_len)
    words = check.integer("valid_word_num", valid_word_num, 0, rows, "batch * max_seq_len")
    sizes = Result((words,), "int32"), Result((sequence_length.shape[0] + 1,), "int32")
    padding_offset, cu_seqlens = outputs(None, sequence_length, "", *sizes)
    if sequence_length.on_host:
        return run_twin()
    launch_build(sequence_length, max_seq_len, padding_offset, cu_seqlens, words)
    return padding_offset, cu_seqlens, words


def _built(sequence_length: Any, max_seq_len: Any, *, valid_word_num: Any = None) -> list[Any]:
    if valid_word_num is None:
        import torch

        valid_word_num = torch.library.get_ctx().new_dynamic_size()
    batch = sequence_length.shape[0]
    return [Result((valid_word_num,), "int32"), Result((batch + 1,), "int32"), valid_word_num]


@declare_operator("padding_offset, cu_seqlens, words", _built)
def build_sequence_length_padding_offset(
    sequence_length: AnyArray, max_seq_len: Size, *, valid_word_num: Size | None = None
) -> tuple[AnyArray, AnyArray, Size]:
    """Compute where each word (token) of a padded batch is: word w is in row `w + padding_offset[w]`.

    Without `valid_word_num` the host reads the number of words from the device. That takes a second launch and a
    synchronization, so a CUDA graph cannot capture the call.

    Args:
        sequence_length: int32 [batch], the number of words of each sequence, in [0, max_seq_len]. Another length raises
            ValueError in host memory, and is clamped on a GPU.
        max_seq_len: rows per sequence of the padded batch.
        valid_word_num: the sum of the lengths. Another number raises ValueError in host memory. On a GPU, a smaller
            number drops the last words. A larger one adds words outside of the batch: removing the padding gives zeros
            for them, and rebuilding it skips them.

    Returns:
        padding_offset int32 [valid_word_num]: for word w of sequence b, b * max_seq_len - cu_seqlens[b].
        cu_seqlens int32 [batch + 1]: the number of words before each sequence, then the sum, as for `varlen_attention`.
        valid_word_num: an int.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The function is from FasterTransformer, the method from ByteDance's Effective Transformer.
    """
    if valid_word_num is None:
        counted = _count_words(sequence_length, max_seq_len)
        if isinstance(counted, Array):  # no kernel has run, so there is no count: `cukern.explain` assumes no padding
            valid_word_num = sequence_length.shape[0] * max_seq_len
        else:
            valid_word_num = int(counted[-1])
    return _build_offsets(sequence_length, max_seq_len, valid_word_num=valid_word_num)


def _removed(src: Any, padding_offset: Any, **_: Any) -> Result:
    return Result((padding_offset.shape[0], src.shape[-1]), dtype_name(src), "[words, hidden]")


@op(twin.remove_sequence_length_padding, "words", _removed)
def remove_sequence_length_padding(
    src: AnyArray, padding_offset: AnyArray, *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Copy the words of a padded batch to consecutive rows: `out[w] = src[w + padding_offset[w]]`.

    Args:
        src: [batch, seq, hidden], float32, float16 or bfloat16; rows may be strided, with one stride.
        padding_offset: int32 [words], from `build_sequence_length_padding_offset`. A word whose row is outside of `src`
            becomes zeros.
        out: [words, hidden], written and returned.
        variant: "auto", "specialized" (sizes fixed at compile time) or "dynamic". Both give equal bits.

    Returns:
        [words, hidden] of the dtype of `src`.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The function is from FasterTransformer.
    """
    expect_array("src", src, DTYPES, ("batch", "seq", "hidden"))
    batch, seq, hidden = src.shape
    _check_hidden("src", hidden)
    rows = _padded_rows(batch, seq)
    return _remove_rows("remove", src, padding_offset, rows, rows_of("src", src).distance, 0, out, variant)


def _removed_by_head(src: Any, padding_offset: Any, **_: Any) -> Result:
    shape = padding_offset.shape[0], src.shape[1] * src.shape[3]
    return Result(shape, dtype_name(src), "[words, heads * dim]")


@op(twin.transpose_remove_padding, "words", _removed_by_head)
def transpose_remove_padding(
    src: AnyArray, padding_offset: AnyArray, *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Copy the words of an attention result [batch, heads, seq, dim] to consecutive rows.

        out[w, h * dim + d] = src[b, h, s, d], with b * seq + s = w + padding_offset[w]

    Args:
        src: [batch, heads, seq, dim], float32, float16 or bfloat16, contiguous.
        padding_offset, out, variant: as in `remove_sequence_length_padding`, and so are the errors.

    Returns:
        [words, heads * dim] of the dtype of `src`.

    The function is FasterTransformer's `transpose_rebuild_padding`.
    """
    expect_array("src", src, DTYPES, ("batch", "heads", "seq", "dim"))
    batch, heads, seq, dim = src.shape
    _check_hidden("src", heads * dim)
    expect_contiguous("src", src)
    return _remove_rows("transpose_remove", src, padding_offset, _padded_rows(batch, seq), 0, heads, out, variant)


def _remove_rows(
    kernel: str, src: Array, padding_offset: Any, rows: Any, row_stride: int, heads: int, out: Any, variant: str
) -> Any:
    """Launch a kernel that removes padding. `heads` is 0 if rows are not divided into heads."""
    words = _words(padding_offset, src, "src", rows)
    result = _removed_by_head(src, padding_offset) if heads else _removed(src, padding_offset)
    out = outputs(out, src, "src", result)
    if src.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    hidden, dim, item_size = result.shape[1], src.shape[-1], src.item_size
    if words == 0 or hidden == 0:
        return out
    width = _width("src", item_size, dim * item_size, row_stride * item_size, arrays=(src, out))
    layout = layout_of(kernel, src.dtype, hidden, dim if heads else 0, width, variant)
    launch(
        layout.variant,
        (ceil_div(words, layout.tile_rows), layout.chunks),
        layout.threads,
        why=layout.why,
        src=src,
        padding_offset=padding_offset,
        out=out,
        row_stride=row_stride * item_size // width,
        padded_rows=rows,
        geometry=layout.geometry | {"rows": words},
        heads=layout.heads(heads, src.shape[2]) if heads else None,
    )
    return out


def _rebuilt(src: Any, padding_offset: Any, batch: Any, max_seq_len: Any, **_: Any) -> Result:
    return Result((batch, max_seq_len, src.shape[1]), dtype_name(src), "[batch, max_seq_len, hidden]")


@op(twin.rebuild_sequence_length_padding, "padded", _rebuilt, numbers=("fill",))
def rebuild_sequence_length_padding(
    src: AnyArray,
    padding_offset: AnyArray,
    batch: Size,
    max_seq_len: Size,
    *,
    fill: float = 0.0,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Copy words back to their rows of a padded batch, and fill the other rows.

    Args:
        src: [words, hidden], float32, float16 or bfloat16; rows may be strided.
        padding_offset: int32 [words], from `build_sequence_length_padding_offset`. Unless w + padding_offset[w] ascends
            strictly, it is undefined which rows are filled. A word whose row is outside of the batch is skipped.
        batch, max_seq_len: sizes of the padded batch.
        fill: any float, rounded to the dtype.
        out, variant: as in `remove_sequence_length_padding`, and so are the errors.

    Returns:
        [batch, max_seq_len, hidden] of the dtype of `src`.

    The function is from FasterTransformer, which does not write the padding.
    """
    expect_array("src", src, DTYPES, ("words", "hidden"))
    hidden = src.shape[1]
    _check_hidden("src", hidden)
    row_stride = rows_of("src", src).distance
    batch, max_seq_len = _lengths(batch, max_seq_len)
    rows = _padded_rows(batch, max_seq_len)
    words = _words(padding_offset, src, "src", rows)
    check.shape("src", src.shape, (words, hidden), "[words, hidden]")
    if isinstance(fill, Array):
        check.fail("fill", "a number", type_name(fill), TypeError)
    fill_word = check_each_call(fill_bits, fill, src.dtype)
    out = outputs(out, src, "src", _rebuilt(src, padding_offset, batch, max_seq_len))
    if src.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if rows == 0 or hidden == 0:
        return out
    item_size = src.item_size
    width = _width("src", item_size, hidden * item_size, row_stride * item_size, arrays=(src, out))
    layout = layout_of("rebuild", src.dtype, hidden, 0, width, variant)
    launch(
        layout.variant,
        (ceil_div(rows, layout.tile_rows), layout.chunks),
        layout.threads,
        why=layout.why,
        src=src,
        padding_offset=padding_offset,
        out=out,
        row_stride=row_stride * item_size // width,
        tokens=words,
        fill=fill_word,
        geometry=layout.geometry | {"rows": rows},
    )
    return out


def _rebuilt_by_head(q: Any, *args: Any, **_: Any) -> list[Result]:
    batch, max_seq_len, heads = args[-3:]
    shape = batch, heads, max_seq_len, q.shape[1] // heads
    return [Result(shape, dtype_name(q), "[batch, heads, max_seq_len, dim]")] * 3


@op(twin.add_qkv_bias_rebuild_padding, "padded_q, padded_k, padded_v", _rebuilt_by_head)
def add_qkv_bias_rebuild_padding(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    bias_q: AnyArray,
    bias_k: AnyArray,
    bias_v: AnyArray,
    padding_offset: AnyArray,
    batch: Size,
    max_seq_len: Size,
    heads: int,
    *,
    out: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Add biases to queries, keys and values, and copy them, divided into heads, to a padded batch.

    For word w in row b * max_seq_len + s,

        out[b, h, s, d] = q[w, h * dim + d] + bias_q[h * dim + d]

    The sum is rounded once. k and v get their biases in the same way. Padding becomes zeros.

    Args:
        q, k, v: [words, hidden], float32, float16 or bfloat16; rows may be strided.
        bias_q, bias_k, bias_v: [hidden], of the same dtype, contiguous.
        padding_offset, batch, max_seq_len: as in `rebuild_sequence_length_padding`.
        heads: a divisor of hidden.
        out: a triple (q, k, v) to write into and return.
        variant: as in `remove_sequence_length_padding`, and so are the errors.

    Returns:
        Three arrays [batch, heads, max_seq_len, dim] of the dtype of `q`.

    The function is FasterTransformer's `add_QKV_bias_rebuild_padding`.
    """
    expect_array("q", q, DTYPES, ("words", "hidden"))
    hidden, item_size = q.shape[1], q.item_size
    _check_hidden("q", hidden)
    batch, max_seq_len = _lengths(batch, max_seq_len)
    rows = _padded_rows(batch, max_seq_len)
    words = _words(padding_offset, q, "q", rows)
    heads = check.integer("heads", heads, 1)
    if hidden % heads:
        check.fail("heads", f"a divisor of the hidden size {hidden}", heads)
    row_strides = []
    for name, array in (("q", q), ("k", k), ("v", v)):
        expect_strided(name, array, q, "q", (q.dtype,), (words, hidden), "[words, hidden]")
        row_strides.append(rows_of(name, array).distance * item_size)
    for name, array in (("bias_q", bias_q), ("bias_k", bias_k), ("bias_v", bias_v)):
        expect(name, array, q, "q", (q.dtype,), (hidden,), "[hidden]")
    results = _rebuilt_by_head(q, batch, max_seq_len, heads)
    out = outputs(out, q, "q", *results, names="a triple (q, k, v)")
    if q.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if rows == 0 or hidden == 0:
        return out
    dim, biases = hidden // heads, (bias_q, bias_k, bias_v)
    width = _width("q", item_size, dim * item_size, *row_strides, arrays=(q, k, v, *biases, *out))
    layout = layout_of("add_bias", q.dtype, hidden, dim, width, variant)
    launch(
        layout.variant,
        (ceil_div(rows, layout.tile_rows), layout.chunks, 3),
        layout.threads,
        why=layout.why,
        src=(q, k, v),
        bias=biases,
        out=out,
        padding_offset=padding_offset,
        row_stride=[stride // width for stride in row_strides],
        tokens=words,
        geometry=layout.geometry | {"rows": rows},
        heads=layout.heads(heads, max_seq_len),
    )
    return out
