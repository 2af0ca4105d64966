"""Embedding lookups, with sinusoidal or learned positions."""

from __future__ import annotations

import math
from typing import Any

from cukern.reference import embedding as twin
from cukern.runtime import arrays, check, template
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    type_name,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, launch, outputs, run_twin
from cukern.runtime.vectors import ceil_div, why_width

__all__ = ["embedding_lookup", "embedding_lookup_sine_position_encoding"]

DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64")
VARIANTS = ("auto", "wide", "narrow")
MAX_ROWS = 2**30
MAX_HIDDEN = 2**22
MAX_POSITION = 2**62
_WIDEST = 16

_copy = Kernel("embedding/embedding_copy", "embedding_copy")
_add = Kernel("embedding/embedding_add", "embedding_add")


def _variant(dtype: str, width: int, add: bool) -> Variant:
    return _add.variant(arrays.CUDA_TYPE[dtype], width) if add else _copy.variant(width)


_copy.at_import = [_copy.variant(_WIDEST).instance]
_add.at_import = [_variant(dtype, _WIDEST, add=True).instance for dtype in ("float16", "bfloat16")]
_copy.specialized = _copy.at_import
_add.specialized = [_variant(dtype, _WIDEST, add=True).instance for dtype in DTYPES]


def _looked_up(embedding_table: Any, word_ids: Any, *_: Any, **__: Any) -> Result:
    shape = (*word_ids.shape, embedding_table.shape[1])
    return Result(shape, dtype_name(embedding_table), "[*word_ids.shape, hidden]")


def _check_words(word_ids: Any, table: Array) -> tuple[Any, int]:
    """Check word_ids. Return the number of all words, and the number of words per sequence."""
    if not isinstance(word_ids, Array) or not word_ids.shape:
        got = [] if isinstance(word_ids, Array) else type_name(word_ids)
        check.fail("word_ids", "an array [batch] or [batch, ...]", got, TypeError)
    batch, *others = word_ids.shape
    expect("word_ids", word_ids, table, "embedding_table", INDEX_DTYPES, word_ids.shape, "")
    if batch > MAX_ROWS // max(math.prod(others), 1):
        check.fail("word_ids", f"of at most {MAX_ROWS} ids", batch * math.prod(others))
    return batch * math.prod(others) if others else batch, others[-1] if others else 1


def _check_positions(
    name: str, position_table: Any, step: Any, position_ids: Any, table: Array, word_ids: Array, period: int
) -> tuple[int, Any, bool]:
    """Check the positions. Return their number, the step, and whether all words have the same position."""
    if position_table is None:
        step = check.integer("step", step, 0, MAX_POSITION)
        if position_ids is not None:
            check.fail("position_ids", "None without a position_table", type_name(position_ids))
        if step:
            check.fail("step", "0 without a position_table", step)
        return 0, step, False
    like, hidden = "embedding_table", table.shape[1]
    expect_place(name, position_table, table, like)
    check.dimensions(name, position_table.shape, ("positions", "hidden"))
    positions = position_table.shape[0]
    expect(name, position_table, table, like, (table.dtype,), (positions, hidden), "[positions, hidden]")
    if position_ids is None:
        high = positions - max(period, 1)
        if high < 0:
            check.fail(name, f"of at least {max(period, 1)} positions", positions)
        return positions, check.integer("step", step, 0, high, "positions, less those of a sequence"), False
    step = check.integer("step", step, 0, MAX_POSITION)
    expect_place("position_ids", position_ids, table, like)
    one_position = position_ids.shape == (1,) and word_ids.shape != (1,)
    shape = (1,) if one_position else word_ids.shape
    expect("position_ids", position_ids, table, like, INDEX_DTYPES, shape, "that of word_ids, or [1]")
    return positions, step, one_position


def _width(variant: str, table: Array, row_bytes: int, *others: Array | None) -> int:
    """Return the bytes per load. `others`: the other arrays that the kernel accesses."""
    check.one_of("variant", variant, VARIANTS)
    if variant == "narrow":
        return table.item_size
    alignment = min(x.alignment for x in (table, *others) if x is not None)
    width = math.gcd(row_bytes, alignment)
    if variant == "wide" and width < _WIDEST:
        why = f"rows of {row_bytes} bytes at addresses that are multiples of {alignment}"
        check.fail("variant", "'auto' or 'narrow' here", f"'wide': {why}")
    return width


def _lookup(
    embedding_table: Any,
    word_ids: Any,
    position_name: str,
    position_table: Any,
    step: Any,
    position_ids: Any,
    scale: bool,
    out: Any,
    variant: str,
) -> Any:
    table = expect_array("embedding_table", embedding_table, DTYPES, ("vocab", "hidden"))
    vocab, hidden = table.shape
    if hidden > MAX_HIDDEN:
        check.fail("embedding_table", f"of a hidden size of at most {MAX_HIDDEN}", hidden)
    expect_contiguous("embedding_table", table)
    rows, period = _check_words(word_ids, table)
    positions, step, one_position = _check_positions(
        position_name, position_table, step, position_ids, table, word_ids, period
    )
    out = outputs(out, table, "embedding_table", _looked_up(table, word_ids))
    if table.on_host:
        return run_twin(variant, VARIANTS)

    row_bytes = hidden * table.item_size
    width = _width(variant, table, row_bytes, out, position_table)
    if hidden == 0 or not all(word_ids.shape):
        return out
    constants = template.constants(_copy.file)
    threads = constants["THREADS"]
    chunks = row_bytes // width
    log2_threads_per_row = min((chunks - 1).bit_length(), threads.bit_length() - 1)
    rows_per_block = (threads >> log2_threads_per_row) * constants["ROWS_AT_ONCE"]
    launch(
        _variant(table.dtype, width, position_table is not None),
        (ceil_div(rows, rows_per_block), -(-chunks >> log2_threads_per_row)),
        threads,
        why=asked(variant) or why_width(width, "rows of the tables and out"),
        table=table,
        ids=word_ids,
        position_table=position_table,
        position_ids=position_ids,
        out=out,
        vocab=vocab,
        positions=positions,
        step=step,
        rows=rows,
        chunks=chunks,
        log2_threads_per_row=log2_threads_per_row,
        period=period,
        ids_are_int64=word_ids.dtype == "int64",
        position_ids_are_int64=position_ids is not None and position_ids.dtype == "int64",
        one_position=one_position,
        scale=math.sqrt(hidden) if scale else 1.0,
    )
    return out


@op(twin.refusing(twin.embedding_lookup), "rows", _looked_up)
def embedding_lookup(
    embedding_table: AnyArray,
    word_ids: AnyArray,
    position_table: AnyArray | None = None,
    step: int = 0,
    *,
    position_ids: AnyArray | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Look up rows of a table of embeddings, and add rows of a table of learned positions.

        out[i] = embedding_table[word_ids[i]] + position_table[position[i]]

    The sum is computed in float32 and rounded once. Without `position_table`, rows are copied bit for bit.

    Words (tokens) of shape [batch] are all at position `step`. The words of each row of [batch, seq] are at the
    positions `step`, `step + 1`, ... With `position_ids`, word i is at `step + position_ids[i]`.

    Args:
        embedding_table: [vocab, hidden], float32, float16 or bfloat16, contiguous.
        word_ids: int32 or int64, [batch], [batch, seq] or with more dimensions, contiguous.
        position_table: [positions, hidden], of the dtype of `embedding_table`, or None.
        step: an int, such that all positions are in the table.
        position_ids: int32 or int64, of the shape of `word_ids`, or [1] for all words.
        out: [*word_ids.shape, hidden], written and returned.
        variant: "auto", "wide" (loads of 16 bytes) or "narrow" (one element).

    Returns:
        [*word_ids.shape, hidden] of the dtype of `embedding_table`. An id or position out of range raises ValueError in
        host memory. On a GPU it gives zeros, because a check would need a synchronization.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.
    """
    return _lookup(embedding_table, word_ids, "position_table", position_table, step, position_ids, False, out, variant)


@op(
    twin.refusing(twin.embedding_lookup_sine_position_encoding),
    "rows",
    lambda embedding_table, _, word_ids, *__, **___: _looked_up(embedding_table, word_ids),
)
def embedding_lookup_sine_position_encoding(
    embedding_table: AnyArray,
    position_encoding: AnyArray,
    word_ids: AnyArray,
    step: int,
    *,
    position_ids: AnyArray | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Look up embeddings, scale them, and add the encodings of their positions.

        out[i] = embedding_table[word_ids[i]] * sqrt(hidden) + position_encoding[position[i]]

    Arguments, results and errors are as in `embedding_lookup`, with `position_encoding` for `position_table`.

    The function is from FasterTransformer (v2.1). The caller computes `position_encoding`. Scale and encoding are from
    "Attention Is All You Need" (arXiv:1706.03762).
    """
    if position_encoding is None:
        check.fail("position_encoding", "an array [positions, hidden]", "None", TypeError)
    return _lookup(
        embedding_table, word_ids, "position_encoding", position_encoding, step, position_ids, True, out, variant
    )
