"""Padding: drop it before the layers that treat each word alone, put it back before those that need whole sequences."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import numpy as np

from cukern.reference import padding as twin
from cukern.runtime import arrays, check, template
from cukern.runtime.compile import Instance
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    same_shape,
    type_name,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.late import ceil_div, checked, late
from cukern.runtime.op import forget_plans, op
from cukern.runtime.op import operator as declare_operator
from cukern.runtime.plan import launch, outputs, run_twin
from cukern.runtime.rows import MAX_ROWS, rows_of
from cukern.runtime.units import divisor, unit_width

__all__ = [
    "add_qkv_bias_rebuild_padding",
    "build_sequence_length_padding_offset",
    "rebuild_sequence_length_padding",
    "remove_sequence_length_padding",
    "transpose_remove_padding",
]

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "specialized", "dynamic")
MAX_HIDDEN = 2**24
WIDTHS = (16, 8, 4, 2)  # bytes of a load, a store and a unit; what the alignment of a call allows


class Config(NamedTuple):
    """Sizes worth variants of their own."""

    hidden: int
    head_dim: int


SPECIALIZED = [
    Config(768, 64),  # BERT-base, RoBERTa-base, ViT-B
    Config(1024, 64),  # BERT-large, XLM-RoBERTa-large, BGE-M3
    Config(4096, 128),  # Llama-3-8B and the embedding models made of Mistral-7B
]

_build = Kernel("padding", "build_padding_offset")
_remove = Kernel("padding", "remove_padding")
_rebuild = Kernel("padding", "rebuild_padding")
_add_bias = Kernel("padding", "add_bias_rebuild_padding")

# Measured on an H200.
_THREADS_ITEMS = {"remove": (256, 2), "transpose_remove": (256, 2), "rebuild": (256, 2), "add_bias": (128, 4)}
_MAX_COLUMNS = 1024  # of a specialized row, in units of 16 bytes
_FEW_SEQUENCES = 1024  # which a small block scans in one tile
_BUILD_BLOCKS = 256  # at most so many blocks sum the lengths up


def _shape(kernel: str, columns: int) -> tuple[int, int]:
    """Threads and loads of each; a specialized row of so many units is one tile wide."""
    threads, items = _THREADS_ITEMS[kernel]
    while threads * items < columns:
        threads *= 2
    return threads, items


def _variant(kernel: str, dtype: str, width: int, columns: int = 0, head_columns: int = 0) -> Variant:
    shape = _shape(kernel, columns)
    if kernel == "add_bias":
        return _add_bias.variant(arrays.CUDA_TYPE[dtype], width, columns, head_columns, *shape)
    if kernel == "rebuild":
        return _rebuild.variant(width, columns, *shape)
    if kernel == "remove":
        return _remove.variant(width, columns, "false", 0, *shape)
    return _remove.variant(width, columns, "true", head_columns, *shape)


def _variants(config: Config, dtype: str) -> list[Instance]:
    per_unit = WIDTHS[0] // arrays.ITEM_SIZE[dtype]
    columns, head_columns = config.hidden // per_unit, config.head_dim // per_unit
    return [_variant(kernel, dtype, WIDTHS[0], columns, head_columns).instance for kernel in _THREADS_ITEMS]


_registered: set[tuple[Config, int]] = set()  # with the size of an element


def _list_instances() -> None:
    by_function: dict[str, dict[Instance, None]] = {}
    for dtype in DTYPES:
        dynamic = [_variant(kernel, dtype, WIDTHS[0]).instance for kernel in _THREADS_ITEMS]
        # Other widths, and float32 in the models' sizes, are compiled when they are first used.
        specialized = [i for config in SPECIALIZED for i in _variants(config, dtype)]
        _registered.update((config, arrays.ITEM_SIZE[dtype]) for config in SPECIALIZED)
        for instance in dynamic + (specialized if dtype != "float32" else []):
            by_function.setdefault(instance.function, {})[instance] = None
        for kernel in (_remove, _rebuild, _add_bias):
            own = [i for i in specialized if i.function == kernel.function and i not in kernel.specialized]
            kernel.specialized = kernel.specialized + own
    for kernel in (_remove, _rebuild, _add_bias):
        kernel.at_import = list(by_function[kernel.function])
    _build.at_import = [_build.variant(threads).instance for threads in (256, 1024)]


_list_instances()


def specialize(*, hidden: int, head_dim: int = 64, dtype: str = "float16") -> list[Instance]:
    """Give these sizes variants of their own in this process and say which; see `cukern.specialize`.

    Raises ValueError where the specialized kernels cannot lay the rows out: hidden must be whole heads, a head whole
    units of 16 bytes, and a row at most 1024 of them.
    """
    check.one_of("dtype", dtype, DTYPES)
    check.integer("hidden", hidden, 1)
    check.integer("head_dim", head_dim, 1, hidden)
    item_size = arrays.ITEM_SIZE[dtype]
    most = _MAX_COLUMNS * WIDTHS[0] // item_size
    if hidden > most or hidden % head_dim or head_dim * item_size % WIDTHS[0]:
        wanted = f"a multiple of head_dim up to {most}, and head_dim one of {WIDTHS[0] // item_size}"
        check.fail("hidden", wanted, f"{hidden} with head_dim {head_dim}")
    config = Config(hidden, head_dim)
    _registered.add((config, item_size))
    forget_plans()
    return _variants(config, dtype)


# --- what the sizes decide ----------------------------------------------------------------------------


class _Layout(NamedTuple):
    """A kernel, and how rows of a size are laid out over its blocks."""

    variant: Variant
    threads: int
    tile_rows: int
    chunks: int  # tiles side by side in a row
    geometry: dict[str, Any]  # fields of the template's Geometry, but for `rows`
    head_columns: int

    def heads(self, heads: Any, max_seq_len: Any) -> dict[str, Any]:
        """The template's Heads."""
        by_sizes = {"by_max_seq_len": divisor(max_seq_len), "by_head_columns": divisor(max(self.head_columns, 1))}
        return {"heads": heads, "max_seq_len": max_seq_len, "head_columns": self.head_columns} | by_sizes


def _layout(kernel: str, dtype: str, hidden: int, head_dim: int, width: int, variant: str) -> _Layout:
    """Choose the variant; `head_dim` is 0 where the layout is not by heads."""
    check.one_of("variant", variant, VARIANTS)
    item_size = arrays.ITEM_SIZE[dtype]
    columns, head_columns = hidden * item_size // width, head_dim * item_size // width
    known = width == WIDTHS[0] and any(
        size == item_size and config.hidden == hidden and head_dim in (0, config.head_dim)
        for config, size in _registered
    )
    if variant == "specialized" and not known:
        by_head = f" in heads of {head_dim}" if head_dim else ""
        why = f"there is none for hidden {hidden}{by_head} in {dtype}, or the rows are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {why} (cukern.specialize adds one)")
    fixed = known and variant != "dynamic"
    chosen = _variant(kernel, dtype, width, columns, head_columns) if fixed else _variant(kernel, dtype, width)
    threads, items = _shape(kernel, columns if fixed else 0)
    chunks = -(-columns // (threads * items))
    tile_columns = -(-columns // chunks)
    tile_rows = threads * items // tile_columns
    geometry: dict[str, Any] = {"columns": columns, "tile_rows": tile_rows, "tile_columns": tile_columns}
    geometry["by_tile_columns"] = divisor(tile_columns)
    return _Layout(chosen, threads, tile_rows, chunks, geometry, head_columns)


def _fill_bits(fill: Any, dtype: str) -> int:
    """`fill` as the kernel takes it: the element, twice if it has two bytes."""
    try:
        fill = float(fill)
    except (TypeError, ValueError):
        check.fail("fill", "a number", f"{fill!r} ({type(fill).__name__})", TypeError)
    return _element_bits(fill, math.copysign(1, fill), dtype)


@functools.lru_cache(maxsize=256)
def _element_bits(fill: float, sign: float, dtype: str) -> int:
    """0.0 and -0.0 are equal, and differ in their `sign`."""
    with np.errstate(over="ignore"):
        element = np.full(4 // arrays.ITEM_SIZE[dtype], fill, arrays.numpy_dtype(dtype))
    return int(element.view(np.uint32)[0])


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
    """How many words there are, once `padding_offset` has been checked."""
    expect_place("padding_offset", padding_offset, like, like_name)
    check.dimensions("padding_offset", padding_offset.shape, ("words",))
    words = padding_offset.shape[0]
    expect("padding_offset", padding_offset, like, like_name, ("int32",), (words,), "[words]")
    if words > rows:
        check.fail("padding_offset", f"of at most the {rows} rows of the padded batch", words)
    return words


def _width(name: str, item_size: int, *sizes: int, arrays: tuple[Array, ...]) -> int:
    """Bytes of a unit, for rows and distances of so many bytes in arrays of these alignments."""
    return unit_width(name, functools.reduce(operator.or_, (*sizes, *(array.alignment for array in arrays))), item_size)


# --- the functions ------------------------------------------------------------------------------------


def _check_lengths(sequence_length: Any, max_seq_len: Any) -> Any:
    """The rows of the padded batch."""
    expect_array("sequence_length", sequence_length, (), ("batch",))
    batch = sequence_length.shape[0]
    expect("sequence_length", sequence_length, sequence_length, "sequence_length", ("int32",), (batch,), "[batch]")
    if batch > MAX_ROWS:
        check.fail("sequence_length", f"of at most {MAX_ROWS} sequences", batch)
    return _padded_rows(batch, check.integer("max_seq_len", max_seq_len, 0, MAX_ROWS))


def _launch_build(
    sequence_length: Array, max_seq_len: Any, padding_offset: Array | None, cu_seqlens: Array, words: Any
) -> None:
    batch = sequence_length.shape[0]
    threads = 256 if batch <= _FEW_SEQUENCES else 1024
    words_per_block = late(_words_per_block, words, threads)
    launch(
        _build.variant(threads),
        late(_blocks, words, words_per_block),
        threads,
        lengths=sequence_length,
        padding_offset=padding_offset,
        cu_seqlens=cu_seqlens,
        words=words,
        batch=batch,
        max_seq_len=max_seq_len,
        words_per_block=words_per_block,
        first_step=late(_first_step, batch, threads * template.constants("padding")["LENGTHS"]),
    )


def _words_per_block(words: int, threads: int) -> int:
    return threads * max(1, -(-words // (threads * _BUILD_BLOCKS)))


def _blocks(words: int, words_per_block: int) -> int:
    return max(1, -(-words // words_per_block))


def _first_step(batch: int, tile: int) -> int:
    """The largest power of two below the sequences of a tile."""
    in_tile = min(batch, tile)
    return 1 << (in_tile - 1).bit_length() - 1 if in_tile > 1 else 0


def _build_on_host(sequence_length: Any, max_seq_len: int, *, valid_word_num: int | None = None) -> Any:
    """The twin, for lengths that can be looked at."""
    outside = np.flatnonzero((sequence_length < 0) | (sequence_length > max_seq_len))
    if len(outside):
        wanted = f"in [0, {max_seq_len}] (max_seq_len)"
        check.fail(f"sequence_length[{outside[0]}]", wanted, sequence_length[outside[0]])
    total = int(sequence_length.sum(dtype=np.int64))
    if valid_word_num is not None and total != valid_word_num:
        check.fail("valid_word_num", f"{total}, the sum of sequence_length", valid_word_num)
    return twin.build_sequence_length_padding_offset(sequence_length, max_seq_len, valid_word_num=valid_word_num)


@op(lambda sequence_length, max_seq_len: _build_on_host(sequence_length, max_seq_len)[1], {}, late=("max_seq_len",))
def _count_words(sequence_length: Any, max_seq_len: Any) -> Any:
    """The words before each sequence, and of all."""
    expect_array("sequence_length", sequence_length)
    _check_lengths(sequence_length, max_seq_len)
    cu_seqlens = outputs(None, sequence_length, "", Result((sequence_length.shape[0] + 1,), "int32"))
    if sequence_length.on_host:
        return run_twin()
    _launch_build(sequence_length, max_seq_len, None, cu_seqlens, 0)
    return cu_seqlens


@op(_build_on_host, {}, rows={"batch": ("sequence_length",)}, late=("max_seq_len", "valid_word_num"))
def _build_offsets(sequence_length: Any, max_seq_len: Any, *, valid_word_num: Any) -> Any:
    """`build_sequence_length_padding_offset` of a known number of words."""
    rows = _check_lengths(sequence_length, max_seq_len)
    words = checked(_check_words, valid_word_num, rows)
    sizes = Result((words,), "int32"), Result((sequence_length.shape[0] + 1,), "int32")
    padding_offset, cu_seqlens = outputs(None, sequence_length, "", *sizes)
    if sequence_length.on_host:
        return run_twin()
    _launch_build(sequence_length, max_seq_len, padding_offset, cu_seqlens, words)
    return padding_offset, cu_seqlens, words


def _check_words(words: Any, rows: int) -> int:
    return check.integer("valid_word_num", words, 0, rows, "batch * max_seq_len")


def _built(sequence_length: Any, max_seq_len: Any, *, valid_word_num: Any = None) -> list[Any]:
    if valid_word_num is None:
        import torch

        valid_word_num = torch.library.get_ctx().new_dynamic_size()
    batch = sequence_length.shape[0]
    return [Result((valid_word_num,), "int32"), Result((batch + 1,), "int32"), valid_word_num]


@declare_operator(
    "build_sequence_length_padding_offset(Tensor sequence_length, SymInt max_seq_len, *, "
    "SymInt? valid_word_num=None) -> (Tensor padding_offset, Tensor cu_seqlens, SymInt words)",
    _built,
)
def build_sequence_length_padding_offset(
    sequence_length: Any, max_seq_len: int, *, valid_word_num: int | None = None
) -> tuple[Any, Any, int]:
    """Where each word of a padded batch lies: word w in row w + padding_offset[w], for all functions that follow.

    With `valid_word_num`, a launch and no host synchronization. Without it the host must learn how large
    `padding_offset` is: two launches, and between them it waits for the stream and reads one number (so the call cannot
    be captured in a CUDA graph).

    Args:
        sequence_length: int32 [batch], the words of each sequence, in [0, max_seq_len]. The kernel clamps those that
            are not; in host memory they are an error.
        max_seq_len: rows per sequence of the padded batch.
        valid_word_num: the sum of the lengths, where the caller knows it. In host memory another number is an error.
            On a GPU it is taken as the size of `padding_offset`: words past the sum get an offset that leads past all
            rows, and the other functions give them zeros and write them nowhere; with a number below the sum the last
            words are missing.

    Returns:
        padding_offset int32 [valid_word_num]: for word w of sequence b, b * max_seq_len - cu_seqlens[b].
        cu_seqlens int32 [batch + 1]: the words before each sequence, and of all, as variable-length attention takes it.
        valid_word_num: an int.

    Raises:
        TypeError: a dtype, or a library, that is not taken.
        ValueError: shapes, strides, lengths or sizes that do not fit; the message names the argument.

    The function is FasterTransformer's `build_sequence_length_padding_offset`, the method that of ByteDance's Effective
    Transformer; this one is a parallel scan.
    """
    if valid_word_num is None:
        valid_word_num = int(_count_words(sequence_length, max_seq_len)[-1])
    return _build_offsets(sequence_length, max_seq_len, valid_word_num=valid_word_num)


def _removed(src: Any, padding_offset: Any, **_: Any) -> Result:
    return Result((padding_offset.shape[0], src.shape[-1]), dtype_name(src), "[words, hidden]")


@op(
    twin.remove_sequence_length_padding,
    "remove_sequence_length_padding(Tensor src, Tensor padding_offset, *, str variant='auto') -> (Tensor words)",
    _removed,
    rows={"batch": ("src",), "words": ("padding_offset", "out")},
)
def remove_sequence_length_padding(src: Any, padding_offset: Any, *, out: Any = None, variant: str = "auto") -> Any:
    """The rows of a padded batch that hold words, one after the other: out[w] = src[w + padding_offset[w]].

    Args:
        src: [batch, seq, hidden], float32, float16 or bfloat16; rows may be strided, all by one distance. What it holds
            as padding is not read.
        padding_offset: int32 [words], from `build_sequence_length_padding_offset`. A word that it places in no row of
            `src` becomes zeros.
        out: an array to write into and return.
        variant: "auto", or a kernel by name: "specialized" (sizes fixed at compile time) or "dynamic". Both copy bits.

    Returns:
        [words, hidden], in the dtype and library and on the device of `src`. Arrays in host memory go through the
        NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function is FasterTransformer's `remove_sequence_length_padding`.
    """
    expect_array("src", src, DTYPES, ("batch", "seq", "hidden"))
    batch, seq, hidden = src.shape
    _check_hidden("src", hidden)
    rows = _padded_rows(batch, seq)
    return _remove_rows("remove", src, padding_offset, rows, rows_of("src", src).distance, 0, out, variant)


def _removed_by_head(src: Any, padding_offset: Any, **_: Any) -> Result:
    shape = padding_offset.shape[0], src.shape[1] * src.shape[3]
    return Result(shape, dtype_name(src), "[words, heads * dim]")


@op(
    twin.transpose_remove_padding,
    "transpose_remove_padding(Tensor src, Tensor padding_offset, *, str variant='auto') -> (Tensor words)",
    _removed_by_head,
    rows={"batch": ("src",), "words": ("padding_offset", "out")},
)
def transpose_remove_padding(src: Any, padding_offset: Any, *, out: Any = None, variant: str = "auto") -> Any:
    """What attention returns by heads, as rows of words without padding.

    out[w, h * dim + d] = src[b, h, s, d], with b * seq + s = w + padding_offset[w].

    Args:
        src: [batch, heads, seq, dim], float32, float16 or bfloat16, contiguous.
        padding_offset, out, variant: as in `remove_sequence_length_padding`, and so are the errors.

    Returns:
        [words, heads * dim], in the dtype and library and on the device of `src`.

    The function is what FasterTransformer calls `transpose_rebuild_padding`, although it removes.
    """
    expect_array("src", src, DTYPES, ("batch", "heads", "seq", "dim"))
    batch, heads, seq, dim = src.shape
    _check_hidden("src", heads * dim)
    expect_contiguous("src", src)
    return _remove_rows("transpose_remove", src, padding_offset, _padded_rows(batch, seq), 0, heads, out, variant)


def _remove_rows(
    kernel: str, src: Array, padding_offset: Any, rows: Any, row_stride: int, heads: int, out: Any, variant: str
) -> Any:
    """Launch either function that removes; `heads` is 0 where the layout is not by heads."""
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
    layout = _layout(kernel, src.dtype, hidden, dim if heads else 0, width, variant)
    launch(
        layout.variant,
        (ceil_div(words, layout.tile_rows), layout.chunks),
        layout.threads,
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


@op(
    twin.rebuild_sequence_length_padding,
    "rebuild_sequence_length_padding(Tensor src, Tensor padding_offset, SymInt batch, SymInt max_seq_len, *, "
    "float fill=0.0, str variant='auto') -> (Tensor padded)",
    _rebuilt,
    rows={"words": ("src", "padding_offset"), "batch": ("out",)},
    late=("batch", "fill"),
)
def rebuild_sequence_length_padding(
    src: Any,
    padding_offset: Any,
    batch: int,
    max_seq_len: int,
    *,
    fill: float = 0.0,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Rows of words back in their places in a padded batch, in one launch that writes every element.

    Args:
        src: [words, hidden], float32, float16 or bfloat16; rows may be strided.
        padding_offset: int32 [words], from `build_sequence_length_padding_offset` for the same batch and max_seq_len:
            w + padding_offset[w] grows strictly. A word that it places in no row is left out. With offsets that do not
            grow so, which rows are filled is undefined.
        batch, max_seq_len: sizes of the padded batch.
        fill: what the rows without a word hold, rounded to the dtype; any float, infinities and NaN included.
        out, variant: as in `remove_sequence_length_padding`, and so are the errors.

    Returns:
        [batch, max_seq_len, hidden], in the dtype and library and on the device of `src`.

    The function is FasterTransformer's `rebuild_sequence_length_padding`, which leaves the padding as it was.
    """
    expect_array("src", src, DTYPES, ("words", "hidden"))
    hidden = src.shape[1]
    _check_hidden("src", hidden)
    row_stride = rows_of("src", src).distance
    batch, max_seq_len = _lengths(batch, max_seq_len)
    rows = _padded_rows(batch, max_seq_len)
    words = _words(padding_offset, src, "src", rows)
    if not same_shape(src, (words, hidden)):
        check.shape("src", src.shape, (words, hidden), "[words, hidden]")
    if isinstance(fill, Array):
        check.fail("fill", "a number", type_name(fill), TypeError)
    fill_bits = checked(_fill_bits, fill, src.dtype)
    out = outputs(out, src, "src", _rebuilt(src, padding_offset, batch, max_seq_len))
    if src.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if rows == 0 or hidden == 0:
        return out
    item_size = src.item_size
    width = _width("src", item_size, hidden * item_size, row_stride * item_size, arrays=(src, out))
    layout = _layout("rebuild", src.dtype, hidden, 0, width, variant)
    launch(
        layout.variant,
        (ceil_div(rows, layout.tile_rows), layout.chunks),
        layout.threads,
        src=src,
        padding_offset=padding_offset,
        out=out,
        row_stride=row_stride * item_size // width,
        words=words,
        fill=fill_bits,
        geometry=layout.geometry | {"rows": rows},
    )
    return out


def _rebuilt_by_head(q: Any, *args: Any, **_: Any) -> list[Result]:
    batch, max_seq_len, heads = args[-3:]
    shape = batch, heads, max_seq_len, q.shape[1] // heads
    return [Result(shape, dtype_name(q), "[batch, heads, max_seq_len, dim]")] * 3


@op(
    twin.add_qkv_bias_rebuild_padding,
    "add_qkv_bias_rebuild_padding(Tensor q, Tensor k, Tensor v, Tensor bias_q, Tensor bias_k, Tensor bias_v, "
    "Tensor padding_offset, SymInt batch, SymInt max_seq_len, int heads, *, str variant='auto') "
    "-> (Tensor padded_q, Tensor padded_k, Tensor padded_v)",
    _rebuilt_by_head,
    rows={"words": ("q", "k", "v", "padding_offset"), "batch": ("out",)},
    late=("batch",),
)
def add_qkv_bias_rebuild_padding(
    q: Any,
    k: Any,
    v: Any,
    bias_q: Any,
    bias_k: Any,
    bias_v: Any,
    padding_offset: Any,
    batch: int,
    max_seq_len: int,
    heads: int,
    *,
    out: tuple[Any, Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any, Any]:
    """Queries, keys and values of words, with their biases, in the padded layout by heads of attention; one launch.

    For word w in row b * max_seq_len + s: out[b, h, s, d] = q[w, h * dim + d] + bias_q[h * dim + d], added in float32
    and rounded once. The padded positions are zero. The same for k and v.

    Args:
        q, k, v: [words, hidden], float32, float16 or bfloat16, all of one dtype; rows may be strided, so that they may
            be parts of one product.
        bias_q, bias_k, bias_v: [hidden], of the same dtype, contiguous.
        padding_offset, batch, max_seq_len: as in `rebuild_sequence_length_padding`.
        heads: divides hidden.
        out: a triple (q, k, v) to write into and return.
        variant: as in `remove_sequence_length_padding`, and so are the errors. Both variants return the same bits.

    Returns:
        Three arrays [batch, heads, max_seq_len, dim] in the dtype and library and on the device of `q`.

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
        expect_place(name, array, q, "q")
        check.dtype(name, array.dtype, (q.dtype,))
        if not same_shape(array, (words, hidden)):
            check.shape(name, array.shape, (words, hidden), "[words, hidden]")
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
    layout = _layout("add_bias", q.dtype, hidden, dim, width, variant)
    launch(
        layout.variant,
        (ceil_div(rows, layout.tile_rows), layout.chunks, 3),
        layout.threads,
        src=(q, k, v),
        bias=biases,
        out=out,
        padding_offset=padding_offset,
        row_stride=[stride // width for stride in row_strides],
        words=words,
        geometry=layout.geometry | {"rows": rows},
        heads=layout.heads(heads, max_seq_len),
    )
    return out
