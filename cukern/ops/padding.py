"""Padding: drop it before the layers that treat each word alone, put it back before those that need whole sequences."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cukern.reference import padding as twin
from cukern.runtime import arrays, check
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import Kernel, Variant
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
#: Rows of a padded batch: the kernels count them in 31 bits, and round up to whole tiles.
MAX_ROWS = 2**31 - 2**12
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

_GEOMETRY, _HEADS = "4iIi", "3iIiIi"
_NO_HEADS = (0,) * 7  # what _HEADS has fields
_build = Kernel("padding", "build_padding_offset", "3P5i")
_remove = Kernel("padding", "remove_padding", f"3Pqi{_GEOMETRY}{_HEADS}")
_rebuild = Kernel("padding", "rebuild_padding", f"3PqiI{_GEOMETRY}")
_add_bias = Kernel("padding", "add_bias_rebuild_padding", f"10P3qi{_GEOMETRY}{_HEADS}")

# Measured on an H200.
_THREADS_ITEMS = {"remove": (256, 2), "transpose_remove": (256, 2), "rebuild": (256, 2), "add_bias": (128, 4)}
_MAX_COLUMNS = 1024  # of a specialized row, in units of 16 bytes
_LENGTHS = 4  # LENGTHS of the template
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
    _plan.cache_clear()
    return _variants(config, dtype)


# --- what the sizes decide ----------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What the sizes of a row decide, worked out once for each set of them."""

    variant: Variant
    threads: int
    columns: int
    tile_rows: int
    chunks: int  # tiles side by side in a row
    geometry: tuple[int, ...]  # the fields of Geometry after `rows`
    head_columns: int
    by_head_columns: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _plan(kernel: str, dtype: str, hidden: int, head_dim: int, width: int, variant: str) -> _Plan:
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
    geometry = (columns, tile_rows, tile_columns, *divisor(tile_columns))
    by_head_columns = divisor(max(head_columns, 1))
    return _Plan(chosen, threads, columns, tile_rows, chunks, geometry, head_columns, by_head_columns)


@functools.lru_cache(maxsize=256)
def _fill_bits(fill: float, dtype: str) -> int:
    """`fill` as the kernel takes it: the element, twice if it has two bytes."""
    with np.errstate(over="ignore"):
        element = np.full(4 // arrays.ITEM_SIZE[dtype], fill, arrays.numpy_dtype(dtype))
    return int(element.view(np.uint32)[0])


# --- checks -------------------------------------------------------------------------------------------


def _row_stride(name: str, array: Any, library: arrays.Library) -> int:
    """The distance of the rows of [..., hidden], in elements.

    Raises ValueError unless each row is contiguous and all of them lie at one distance.
    """
    shape, strides = array.shape, library.strides(array)
    if 0 in shape:
        return 0
    fits = strides[-1] == 1 or shape[-1] == 1
    row_stride = shape[-1]
    if len(shape) == 2:
        if shape[0] > 1:
            row_stride = strides[0]
    elif shape[1] > 1:
        row_stride = strides[1]
        fits = fits and (shape[0] == 1 or strides[0] == row_stride * shape[1])
    elif shape[0] > 1:
        row_stride = strides[0]
    if not fits:
        wanted = "contiguous along its last dimension, with all rows at one distance"
        check.fail(name, wanted, f"strides {tuple(strides)} (in elements)")
    return row_stride


def _padded_rows(batch: Any, max_seq_len: Any) -> int:
    if type(batch) is not int:
        batch = check.integer("batch", batch, 0, MAX_ROWS)
    if type(max_seq_len) is not int:
        max_seq_len = check.integer("max_seq_len", max_seq_len, 0, MAX_ROWS)
    if batch < 0:
        check.integer("batch", batch, 0, MAX_ROWS)
    if max_seq_len < 0:
        check.integer("max_seq_len", max_seq_len, 0, MAX_ROWS)
    rows = batch * max_seq_len
    if rows > MAX_ROWS:
        check.fail("batch * max_seq_len", f"at most {MAX_ROWS}", rows)
    return rows


def _words(padding_offset: Any, like: str, library: arrays.Library, device: int | None, rows: int) -> int:
    """How many words there are, once `padding_offset` has been checked."""
    arrays.same_place("padding_offset", padding_offset, like, library, device)
    shape = padding_offset.shape
    if len(shape) != 1:
        check.dimensions("padding_offset", tuple(shape), ("words",))
    words = shape[0]
    arrays.expect("padding_offset", padding_offset, like, library, device, ("int32",), (words,), "[words]")
    if words > rows:
        check.fail("padding_offset", f"of at most the {rows} rows of the padded batch", words)
    return words


def _hidden(name: str, hidden: int) -> None:
    if hidden > MAX_HIDDEN:
        check.fail(name, f"of a hidden size up to {MAX_HIDDEN}", hidden)


# --- the functions ------------------------------------------------------------------------------------


@arrays.takes_dlpack
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
    library, device = arrays.place("sequence_length", sequence_length)
    if len(sequence_length.shape) != 1:
        check.dimensions("sequence_length", tuple(sequence_length.shape), ("batch",))
    batch = sequence_length.shape[0]
    arrays.expect(
        "sequence_length", sequence_length, "sequence_length", library, device, ("int32",), (batch,), "[batch]"
    )
    rows = _padded_rows(batch, max_seq_len)
    max_seq_len = int(max_seq_len)
    if batch > MAX_ROWS:
        check.fail("sequence_length", f"of at most {MAX_ROWS} sequences", batch)
    if valid_word_num is not None:
        why = "batch * max_seq_len"
        valid_word_num = check.integer("valid_word_num", valid_word_num, 0, rows, why)
    if device is None:
        lengths = library.to_numpy(sequence_length)
        outside = np.flatnonzero((lengths < 0) | (lengths > max_seq_len))
        if len(outside):
            wanted = f"in [0, {max_seq_len}] (max_seq_len)"
            check.fail(f"sequence_length[{outside[0]}]", wanted, lengths[outside[0]])
        if valid_word_num is not None and (total := int(lengths.sum(dtype=np.int64))) != valid_word_num:
            check.fail("valid_word_num", f"{total}, the sum of sequence_length", valid_word_num)
        return arrays.on_host(
            twin.build_sequence_length_padding_offset,
            sequence_length,
            sequence_length,
            max_seq_len,
            valid_word_num=valid_word_num,
        )

    cu_seqlens = library.empty((batch + 1,), "int32", sequence_length)
    threads = 256 if batch <= _FEW_SEQUENCES else 1024
    variant = _build.variant(threads)
    addresses = library.address(sequence_length), library.address(cu_seqlens)
    stream = library.stream(device)

    def launch(padding_offset: int, words: int) -> None:
        words_per_block = threads * max(1, -(-words // (threads * _BUILD_BLOCKS)))
        blocks = max(1, -(-words // words_per_block))
        in_tile = min(batch, threads * _LENGTHS)
        first_step = 1 << (in_tile - 1).bit_length() - 1 if in_tile > 1 else 0
        sizes = (words, batch, max_seq_len, words_per_block, first_step)
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        variant.launch(device, stream, grid, block, 0, addresses[0], padding_offset, addresses[1], *sizes)

    if valid_word_num is None:
        launch(0, 0)
        valid_word_num = int(library.to_numpy(cu_seqlens[batch:])[0])
        padding_offset = library.empty((valid_word_num,), "int32", sequence_length)
        if valid_word_num:
            launch(library.address(padding_offset), valid_word_num)
    else:
        padding_offset = library.empty((valid_word_num,), "int32", sequence_length)
        launch(library.address(padding_offset) if valid_word_num else 0, valid_word_num)
    return padding_offset, cu_seqlens, valid_word_num


@arrays.takes_dlpack
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
    library, device, dtype = arrays.leader("src", src, DTYPES, ("batch", "seq", "hidden"))
    batch, seq, hidden = src.shape
    _hidden("src", hidden)
    row_stride = _row_stride("src", src, library)
    rows = _padded_rows(batch, seq)
    words = _words(padding_offset, "src", library, device, rows)
    shape = (words, hidden)
    if out is not None:
        arrays.expect("out", out, "src", library, device, (dtype,), shape, "[words, hidden]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        return arrays.on_host(twin.remove_sequence_length_padding, src, src, padding_offset, out=out)
    if out is None:
        out = library.empty(shape, dtype, src)
    if words == 0 or hidden == 0:
        check.one_of("variant", variant, VARIANTS)
        return out
    item_size = arrays.ITEM_SIZE[dtype]
    addresses = library.address(src), library.address(out)
    width = unit_width("src", addresses[0] | addresses[1] | hidden * item_size | row_stride * item_size, item_size)
    plan = _plan("remove", dtype, hidden, 0, width, variant)
    plan.variant.launch(
        device,
        library.stream(device),
        (-(-words // plan.tile_rows), plan.chunks, 1),
        (plan.threads, 1, 1),
        0,
        addresses[0],
        library.address(padding_offset),
        addresses[1],
        row_stride * item_size // width,
        rows,
        words,
        *plan.geometry,
        *_NO_HEADS,
    )
    return out


@arrays.takes_dlpack
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
    library, device, dtype = arrays.leader("src", src, DTYPES, ("batch", "heads", "seq", "dim"))
    batch, heads, seq, dim = src.shape
    hidden = heads * dim
    _hidden("src", hidden)
    if 0 not in src.shape:
        arrays.contiguous("src", src, library)
    rows = _padded_rows(batch, seq)
    words = _words(padding_offset, "src", library, device, rows)
    shape = (words, hidden)
    if out is not None:
        arrays.expect("out", out, "src", library, device, (dtype,), shape, "[words, heads * dim]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        return arrays.on_host(twin.transpose_remove_padding, src, src, padding_offset, out=out)
    if out is None:
        out = library.empty(shape, dtype, src)
    if words == 0 or hidden == 0:
        check.one_of("variant", variant, VARIANTS)
        return out
    item_size = arrays.ITEM_SIZE[dtype]
    addresses = library.address(src), library.address(out)
    width = unit_width("src", addresses[0] | addresses[1] | dim * item_size, item_size)
    plan = _plan("transpose_remove", dtype, hidden, dim, width, variant)
    plan.variant.launch(
        device,
        library.stream(device),
        (-(-words // plan.tile_rows), plan.chunks, 1),
        (plan.threads, 1, 1),
        0,
        addresses[0],
        library.address(padding_offset),
        addresses[1],
        0,
        rows,
        words,
        *plan.geometry,
        heads,
        seq,
        plan.head_columns,
        *divisor(seq),
        *plan.by_head_columns,
    )
    return out


@arrays.takes_dlpack
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
    library, device, dtype = arrays.leader("src", src, DTYPES, ("words", "hidden"))
    hidden = src.shape[1]
    _hidden("src", hidden)
    row_stride = _row_stride("src", src, library)
    rows = _padded_rows(batch, max_seq_len)
    words = _words(padding_offset, "src", library, device, rows)
    if src.shape[0] != words:
        check.shape("src", tuple(src.shape), (words, hidden), "[words, hidden]")
    if type(fill) is not float:
        if arrays.is_array(fill):
            check.fail("fill", "a number", type(fill).__name__, TypeError)
        try:
            fill = float(fill)
        except (TypeError, ValueError):
            check.fail("fill", "a number", f"{fill!r} ({type(fill).__name__})", TypeError)
    shape = (int(batch), int(max_seq_len), hidden)
    if out is not None:
        arrays.expect("out", out, "src", library, device, (dtype,), shape, "[batch, max_seq_len, hidden]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        return arrays.on_host(
            twin.rebuild_sequence_length_padding, src, src, padding_offset, *shape[:2], fill=fill, out=out
        )
    if out is None:
        out = library.empty(shape, dtype, src)
    if rows == 0 or hidden == 0:
        check.one_of("variant", variant, VARIANTS)
        return out
    item_size = arrays.ITEM_SIZE[dtype]
    addresses = library.address(src) if words else 0, library.address(out)
    width = unit_width("src", addresses[0] | addresses[1] | hidden * item_size | row_stride * item_size, item_size)
    plan = _plan("rebuild", dtype, hidden, 0, width, variant)
    plan.variant.launch(
        device,
        library.stream(device),
        (-(-rows // plan.tile_rows), plan.chunks, 1),
        (plan.threads, 1, 1),
        0,
        addresses[0],
        library.address(padding_offset) if words else 0,
        addresses[1],
        row_stride * item_size // width,
        words,
        _fill_bits(fill, dtype),
        rows,
        *plan.geometry,
    )
    return out


@arrays.takes_dlpack
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
    library, device, dtype = arrays.leader("q", q, DTYPES, ("words", "hidden"))
    hidden = q.shape[1]
    _hidden("q", hidden)
    rows = _padded_rows(batch, max_seq_len)
    words = _words(padding_offset, "q", library, device, rows)
    if type(heads) is not int or heads < 1:
        heads = check.integer("heads", heads, 1)
    if hidden % heads:
        check.fail("heads", f"a divisor of the hidden size {hidden}", heads)
    item_size = arrays.ITEM_SIZE[dtype]
    row_strides = []
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array is not q:
            arrays.same_place(name, array, "q", library, device)
            if library.dtype(array) != dtype:
                check.dtype(name, library.dtype(array), (dtype,))
        if tuple(array.shape) != (words, hidden):
            check.shape(name, tuple(array.shape), (words, hidden), "[words, hidden]")
        row_strides.append(_row_stride(name, array, library) * item_size)
    for name, array in (("bias_q", bias_q), ("bias_k", bias_k), ("bias_v", bias_v)):
        arrays.expect(name, array, "q", library, device, (dtype,), (hidden,), "[hidden]")
    dim = hidden // heads
    shape = (int(batch), heads, int(max_seq_len), dim)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 3:
            check.fail("out", "a triple (q, k, v)", type(out).__name__, TypeError)
        for i, array in enumerate(out):
            symbols = "[batch, heads, max_seq_len, dim]"
            arrays.expect(f"out[{i}]", array, "q", library, device, (dtype,), shape, symbols)
    if device is None:
        check.host_variant(variant, VARIANTS)
        given = (q, k, v, bias_q, bias_k, bias_v, padding_offset)
        return arrays.on_host(
            twin.add_qkv_bias_rebuild_padding, q, *given, int(batch), int(max_seq_len), heads, out=out
        )
    if out is None:
        out = tuple(library.empty(shape, dtype, q) for _ in range(3))  # type: ignore[assignment]
    assert out is not None
    if rows == 0 or hidden == 0:
        check.one_of("variant", variant, VARIANTS)
        return out
    address = library.address
    sources = (address(q), address(k), address(v)) if words else (0, 0, 0)
    pointers = (*sources, address(bias_q), address(bias_k), address(bias_v), *map(address, out))
    mask = dim * item_size | row_strides[0] | row_strides[1] | row_strides[2]
    for pointer in pointers:
        mask |= pointer
    width = unit_width("q", mask, item_size)
    plan = _plan("add_bias", dtype, hidden, dim, width, variant)
    plan.variant.launch(
        device,
        library.stream(device),
        (-(-rows // plan.tile_rows), plan.chunks, 3),
        (plan.threads, 1, 1),
        0,
        *pointers,
        address(padding_offset) if words else 0,
        row_strides[0] // width,
        row_strides[1] // width,
        row_strides[2] // width,
        words,
        rows,
        *plan.geometry,
        heads,
        shape[2],
        plan.head_columns,
        *divisor(shape[2]),
        *plan.by_head_columns,
    )
    return out


# --- for PyTorch --------------------------------------------------------------------------------------


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _built(sequence_length: Any, max_seq_len: Any, *, valid_word_num: Any = None) -> tuple[Any, ...]:
    if valid_word_num is None:
        import torch

        valid_word_num = torch.library.get_ctx().new_dynamic_size()
    offsets = (sequence_length, (valid_word_num,), "int32")
    return offsets, (sequence_length, (sequence_length.shape[0] + 1,), "int32"), valid_word_num


def _removed(src: Any, padding_offset: Any, **_: Any) -> tuple[Any, ...]:
    return ((src, (padding_offset.shape[0], src.shape[-1]), _name(src)),)


def _removed_by_head(src: Any, padding_offset: Any, **_: Any) -> tuple[Any, ...]:
    return ((src, (padding_offset.shape[0], src.shape[1] * src.shape[3]), _name(src)),)


def _rebuilt(src: Any, padding_offset: Any, batch: Any, max_seq_len: Any, **_: Any) -> tuple[Any, ...]:
    return ((src, (batch, max_seq_len, src.shape[1]), _name(src)),)


def _rebuilt_by_head(q: Any, *args: Any, **_: Any) -> tuple[Any, ...]:
    batch, max_seq_len, heads = args[-3:]
    return ((q, (batch, heads, max_seq_len, q.shape[1] // heads), _name(q)),) * 3


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are; a number is itself.
TORCH_OPS: dict[str, Any] = {
    "build_sequence_length_padding_offset(Tensor sequence_length, SymInt max_seq_len, *, "
    "SymInt? valid_word_num=None) -> (Tensor padding_offset, Tensor cu_seqlens, SymInt words)": _built,
    "remove_sequence_length_padding(Tensor src, Tensor padding_offset, *, str variant='auto') "
    "-> (Tensor words)": _removed,
    "transpose_remove_padding(Tensor src, Tensor padding_offset, *, str variant='auto') "
    "-> (Tensor words)": _removed_by_head,
    "rebuild_sequence_length_padding(Tensor src, Tensor padding_offset, SymInt batch, SymInt max_seq_len, *, "
    "float fill=0.0, str variant='auto') -> (Tensor padded)": _rebuilt,
    "add_qkv_bias_rebuild_padding(Tensor q, Tensor k, Tensor v, Tensor bias_q, Tensor bias_k, Tensor bias_v, "
    "Tensor padding_offset, SymInt batch, SymInt max_seq_len, int heads, *, str variant='auto') "
    "-> (Tensor padded_q, Tensor padded_k, Tensor padded_v)": _rebuilt_by_head,
}
