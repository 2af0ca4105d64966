"""Embedding lookups, with sinusoidal or learned positions."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from cukern.reference import embedding as twin
from cukern.runtime import arrays, check
from cukern.runtime.kernel import Kernel, Variant

__all__ = ["embedding_lookup", "embedding_lookup_sine_position_encoding"]

DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64")
VARIANTS = ("auto", "wide", "narrow")
MAX_ROWS = 2**30
MAX_HIDDEN = 2**22
MAX_POSITION = 2**62
_THREADS = 128  # THREADS and ROWS_AT_ONCE of the template
_ROWS_AT_ONCE = 4
_WIDEST = 16

_copy = Kernel("embedding", "embedding_copy", "5P3q7if")
_add = Kernel("embedding", "embedding_add", "5P3q7if")


def _variant(dtype: str, width: int, add: bool) -> Variant:
    return _add.variant(arrays.CUDA_TYPE[dtype], width) if add else _copy.variant(width)


_copy.at_import = [_copy.variant(_WIDEST).instance]
_add.at_import = [_variant(dtype, _WIDEST, add=True).instance for dtype in ("float16", "bfloat16")]
_copy.specialized = _copy.at_import
_add.specialized = [_variant(dtype, _WIDEST, add=True).instance for dtype in DTYPES]


class _Plan(NamedTuple):
    """What the sizes decide."""

    variant: Variant
    chunks: int  # loads per row
    log2_threads_per_row: int
    rows_per_block: int
    parts: int  # blocks that share a row


@functools.lru_cache(maxsize=1024)
def _plan(dtype: str, hidden: int, alignment: int, add: bool, variant: str) -> _Plan:
    """The variant and the grid; `alignment` is the largest power of two, up to 16, that divides the addresses."""
    check.one_of("variant", variant, VARIANTS)
    item_size = arrays.ITEM_SIZE[dtype]
    width = math.gcd(hidden * item_size, alignment)
    if variant == "wide" and width < _WIDEST:
        why = f"rows of {hidden * item_size} bytes at addresses that are multiples of {alignment}"
        check.fail("variant", "'auto' or 'narrow' here", f"'wide': {why}")
    if variant == "narrow":
        width = item_size
    chunks = hidden * item_size // width
    log2_threads = min(max(chunks - 1, 0).bit_length(), _THREADS.bit_length() - 1)
    rows_per_block = (_THREADS >> log2_threads) * _ROWS_AT_ONCE
    return _Plan(_variant(dtype, width, add), chunks, log2_threads, rows_per_block, -(-chunks >> log2_threads))


def _check_indices(
    name: str,
    array: Any,
    library: arrays.Library,
    device: int | None,
    shapes: tuple[tuple[int, ...], ...],
    symbols: str,
) -> None:
    shape = tuple(array.shape) if arrays.is_array(array) else None
    arrays.expect(
        name,
        array,
        "embedding_table",
        library,
        device,
        INDEX_DTYPES,
        shape if shape is not None and shape in shapes else shapes[0],
        symbols,
    )


def _check_range(name: str, array: Any, library: arrays.Library, offset: int, count: int, of: str) -> None:
    """Indices in host memory are in range."""
    indices = library.to_numpy(array)
    if indices.size and (indices.min() + offset < 0 or indices.max() + offset >= count):
        wanted = f"in [0, {count}) ({of})" if not offset else f"in [0, {count}) ({of}) after adding step = {offset}"
        check.fail(name, wanted, f"{indices.min()} to {indices.max()}")


def _lookup(
    embedding_table: Any,
    word_ids: Any,
    position_name: str,
    position_table: Any,
    step: Any,
    position_ids: Any,
    scaled: bool,
    out: Any,
    variant: str,
) -> Any:
    library, device, dtype = arrays.leader("embedding_table", embedding_table, DTYPES, ("vocab", "hidden"))
    vocab, hidden = embedding_table.shape
    if hidden > MAX_HIDDEN:
        check.fail("embedding_table", f"of a hidden size of at most {MAX_HIDDEN}", hidden)
    arrays.contiguous("embedding_table", embedding_table, library)
    ids_shape = tuple(getattr(word_ids, "shape", ()))
    if not arrays.is_array(word_ids) or not ids_shape:
        got = list(ids_shape) if arrays.is_array(word_ids) else type(word_ids).__name__
        check.fail("word_ids", "an array [batch] or [batch, ...]", got, TypeError)
    _check_indices("word_ids", word_ids, library, device, (ids_shape,), "")
    rows = math.prod(ids_shape)
    if rows > MAX_ROWS:
        check.fail("word_ids", f"of at most {MAX_ROWS} ids", rows)
    period = ids_shape[-1] if len(ids_shape) > 1 else 1

    positions = 0
    if position_table is not None:
        arrays.same_place(position_name, position_table, "embedding_table", library, device)
        if len(position_table.shape) != 2:
            check.dimensions(position_name, tuple(position_table.shape), ("positions", "hidden"))
        positions = position_table.shape[0]
        wanted_shape = positions, hidden
        arrays.expect(
            position_name,
            position_table,
            "embedding_table",
            library,
            device,
            (dtype,),
            wanted_shape,
            "[positions, hidden]",
        )
        if position_ids is None:
            high = positions - max(period, 1)
            if high < 0:
                check.fail(position_name, f"of at least {max(period, 1)} positions", positions)
            step = check.integer("step", step, 0, high, "positions, less those of a sequence")
        else:
            step = check.integer("step", step, 0, MAX_POSITION)
            _check_indices("position_ids", position_ids, library, device, (ids_shape, (1,)), "that of word_ids, or [1]")
    elif position_ids is not None or step != 0:
        name, value = ("step", step) if position_ids is None else ("position_ids", type(position_ids).__name__)
        check.fail(name, f"{'0' if position_ids is None else 'None'} without a position_table", value)
    result_shape = (*ids_shape, hidden)
    if out is not None:
        symbols = "[*word_ids.shape, hidden]"
        arrays.expect("out", out, "embedding_table", library, device, (dtype,), result_shape, symbols)

    if device is None:
        check.host_variant(variant, VARIANTS)
        _check_range("word_ids", word_ids, library, 0, vocab, "vocab")
        if position_ids is not None:
            _check_range("position_ids", position_ids, library, step, positions, "positions")
        if scaled:
            inputs = embedding_table, position_table, word_ids, step
            return arrays.on_host(
                twin.embedding_lookup_sine_position_encoding,
                embedding_table,
                *inputs,
                position_ids=position_ids,
                out=out,
            )
        inputs = embedding_table, word_ids, position_table, step
        return arrays.on_host(twin.embedding_lookup, embedding_table, *inputs, position_ids=position_ids, out=out)

    if out is None:
        out = library.empty(result_shape, dtype, embedding_table)
    table_address, out_address = library.address(embedding_table), library.address(out)
    position_address = 0 if position_table is None else library.address(position_table)
    alignment = math.gcd(table_address | out_address | position_address, _WIDEST)
    plan = _plan(dtype, hidden, alignment, position_table is not None, variant)
    if rows == 0 or hidden == 0:
        return out
    plan.variant.launch(
        device,
        library.stream(device),
        (-(-rows // plan.rows_per_block), plan.parts, 1),
        (_THREADS, 1, 1),
        0,
        table_address,
        library.address(word_ids),
        position_address,
        0 if position_ids is None else library.address(position_ids),
        out_address,
        vocab,
        positions,
        step,
        rows,
        plan.chunks,
        plan.log2_threads_per_row,
        period,
        library.dtype(word_ids) == "int64",
        position_ids is not None and library.dtype(position_ids) == "int64",
        position_ids is not None and tuple(position_ids.shape) != ids_shape,
        math.sqrt(hidden) if scaled else 1.0,
    )
    return out


@arrays.takes_dlpack
def embedding_lookup(
    embedding_table: Any,
    word_ids: Any,
    position_table: Any = None,
    step: int = 0,
    *,
    position_ids: Any = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """The rows of a table of embeddings, plus those of a table of learned positions.

        out[i] = embedding_table[word_ids[i]] + position_table[position[i]]

    added in float32 and rounded once; without a `position_table` the rows are copied, bit for bit. A word of `word_ids`
    [batch] is at position `step`, the words of a row of [batch, seq] are at `step`, `step + 1`, ..., and with
    `position_ids` a word is at `step + position_ids`.

    Args:
        embedding_table: [vocab, hidden], float32, float16 or bfloat16, contiguous; any hidden size.
        word_ids: int32 or int64, [batch] or [batch, seq], or of more dimensions, contiguous.
        position_table: [positions, hidden], of the dtype of `embedding_table`; None adds nothing.
        step: the position of the first word of each row, as an int, such that all positions are in the table.
        position_ids: int32 or int64, of the shape of `word_ids`, or [1] for all words.
        out: [*word_ids.shape, hidden], written and returned.
        variant: "auto", or a kernel by name: "wide" (loads of 16 bytes) or "narrow" (of one element).

    Returns:
        [*word_ids.shape, hidden] of the dtype of `embedding_table`, in its library and on its device. Arrays in host
        memory go through the NumPy twin.

    An id or a position out of range raises ValueError where it is in host memory. On a GPU, where to look at it would
    take a synchronization, its row is zeros, without a position added.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices, ids or sizes that do not fit; the message names the argument.
    """
    return _lookup(embedding_table, word_ids, "position_table", position_table, step, position_ids, False, out, variant)


@arrays.takes_dlpack
def embedding_lookup_sine_position_encoding(
    embedding_table: Any,
    position_encoding: Any,
    word_ids: Any,
    step: int,
    *,
    position_ids: Any = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """The embeddings of the words that a decoder begins a step with, scaled, plus the encoding of their position.

        out[i] = embedding_table[word_ids[i]] * sqrt(hidden) + position_encoding[position[i]]

    in float32, rounded once. What a word's position is, the other arguments, the results and the errors are as in
    `embedding_lookup` with `position_encoding` for `position_table`: the words of `word_ids` [batch] are at `step`.

    The function is FasterTransformer's `embedding_lookup_sine_position_encoding` (v2.1), for a table of encodings that
    the caller computes; the scale and the encoding are those of "Attention Is All You Need" (arXiv:1706.03762).
    """
    if position_encoding is None:
        check.fail("position_encoding", "an array [positions, hidden]", "None", TypeError)
    return _lookup(
        embedding_table, word_ids, "position_encoding", position_encoding, step, position_ids, True, out, variant
    )


def _results(embedding_table: Any, word_ids: Any) -> list[tuple[Any, tuple[int, ...], str]]:
    dtype = str(embedding_table.dtype).removeprefix("torch.")
    return [(embedding_table, (*word_ids.shape, embedding_table.shape[1]), dtype)]


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    "embedding_lookup(Tensor embedding_table, Tensor word_ids, Tensor? position_table=None, int step=0, *, "
    "Tensor? position_ids=None, str variant='auto') -> (Tensor rows)": (
        lambda embedding_table, word_ids, *_, **__: _results(embedding_table, word_ids)
    ),
    "embedding_lookup_sine_position_encoding(Tensor embedding_table, Tensor position_encoding, Tensor word_ids, "
    "int step, *, Tensor? position_ids=None, str variant='auto') -> (Tensor rows)": (
        lambda embedding_table, position_encoding, word_ids, *_, **__: _results(embedding_table, word_ids)
    ),
}
