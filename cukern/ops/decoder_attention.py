"""Attention of one new token per sequence: over the decoder's own cache, and over the encoder's memory."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from cukern.reference import decoder_attention as twin
from cukern.runtime import arrays, check
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.kernel import multiprocessors as _multiprocessors

__all__ = ["cross_attention", "masked_attention"]

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "specialized", "dynamic")
MAX_DIM = 256
#: Rows are (sequence, head) pairs.
MAX_ROWS = 2**30
MAX_ENTRIES = 2**30
MAX_STEP_ELEMENTS = 2**31 - 1
_MAX_WARPS = 8  # MAX_WARPS of the template
_MAX_SPLITS = 256
#: Warps that a multiprocessor holds, at the 128 registers per thread of the template's launch bounds.
_RESIDENT_WARPS = 16
_LOG2_E = 1.4426950408889634

#: Dimensions of a head that have variants of their own.
SPECIALIZED = (
    64,  # GPT-2, BERT-like decoders, T5, BART, Whisper
    128,  # Llama, Qwen, Mistral
    256,  # Gemma
)
_AT_IMPORT = [(dtype, dim) for dtype in ("float16", "bfloat16") for dim in (64, 128)]

_kernel = Kernel("decoder_attention", "decoder_attention", "12P4q7if")
_combine = Kernel("decoder_attention", "combine", "3P3i")


class _Form(NamedTuple):
    """How the lanes of a warp share the elements of a row; template arguments."""

    vector: int  # elements per load
    lanes: int
    chunks: int
    steps: int  # entries at once


def _form(dtype: str, dim: int, wide: bool) -> _Form:
    """The form for a dimension, with loads of 16 bytes if `wide`, else of one element."""
    vector = 16 // arrays.ITEM_SIZE[dtype] if wide else 1
    loads = -(-dim // vector)
    if wide:
        lanes = next(n for n in (8, 16, 32) if n >= loads or n == 32)
        chunks = 1 if loads <= lanes else 2
        # More entries at once would not fit the registers.
        return _Form(vector, lanes, chunks, 8 // chunks)
    chunks = next(n for n in (2, 4, 8) if 32 * n >= loads)
    return _Form(vector, 32, chunks, 16 // chunks)


def _variant(dtype: str, fixed_dim: int, form: _Form) -> Variant:
    return _kernel.variant(arrays.CUDA_TYPE[dtype], fixed_dim, *form)


def _combiner(dtype: str) -> Variant:
    return _combine.variant(arrays.CUDA_TYPE[dtype])


_kernel.specialized = [_variant(t, d, _form(t, d, wide=True)).instance for t in DTYPES for d in SPECIALIZED]
_kernel.at_import = [_variant(t, d, _form(t, d, wide=True)).instance for t, d in _AT_IMPORT]
_combine.at_import = [_combiner(dtype).instance for dtype in ("float16", "bfloat16")]

_registered = set(SPECIALIZED)


def specialize(*, dim: int) -> list[Instance]:
    """Give this dimension of a head variants of its own in this process and say which; see `cukern.specialize`.

    Raises ValueError unless dim is a multiple of 8, so that rows are whole 16-byte loads, and at most 256.
    """
    check.integer("dim", dim, 8, MAX_DIM)
    if dim % 8:
        check.fail("dim", "a multiple of 8 (the dynamic variant takes all others)", dim)
    _registered.add(dim)
    _choose.cache_clear()
    return [_variant(dtype, dim, _form(dtype, dim, wide=True)).instance for dtype in DTYPES]


class _Choice(NamedTuple):
    variant: Variant
    combiner: Variant
    form: _Form


@functools.lru_cache(maxsize=1024)
def _choose(dtype: str, dim: int, aligned: bool, variant: str) -> _Choice:
    """The variant for a dimension; `aligned` says whether keys and values begin at multiples of 16 bytes."""
    check.one_of("variant", variant, VARIANTS)
    wide = aligned and dim * arrays.ITEM_SIZE[dtype] % 16 == 0
    form = _form(dtype, dim, wide)
    specialized = wide and dim in _registered
    if variant == "specialized" and not specialized:
        reason = f"there is none for heads of {dim} in {dtype}" if aligned else "the arrays are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {reason} (cukern.specialize adds one)")
    fixed_dim = dim if specialized and variant != "dynamic" else 0
    return _Choice(_variant(dtype, fixed_dim, form), _combiner(dtype), form)


class _Grid(NamedTuple):
    columns: int
    warps: int  # per block
    splits: int
    split_steps: int


@functools.lru_cache(maxsize=8192)
def _grid(rows: int, entries: int, lanes: int, steps: int, multiprocessors: int) -> _Grid:
    """How the work is dealt out to blocks and warps.

    A block has fewer warps where that lets all of them run at the same time. When even full blocks for each column of
    rows leave multiprocessors idle, the sequence is split among blocks, as long as each warp has two rounds of entries.
    """
    columns = -(-rows // (32 // lanes))
    rounds = -(-entries // steps)
    resident = _RESIDENT_WARPS * multiprocessors
    warps = _MAX_WARPS if columns * _MAX_WARPS <= resident else _MAX_WARPS // 2
    while warps > 1 and warps // 2 >= rounds:
        warps //= 2
    splits = max(1, min(resident // (warps * columns), rounds // (2 * warps), _MAX_SPLITS))
    if splits > 1:
        # Every warp of a split gets equally many rounds.
        split_rounds = -(-rounds // (splits * warps)) * warps
        splits = -(-rounds // split_rounds)
    else:
        split_rounds = max(1, rounds)
    return _Grid(columns, warps, splits, split_rounds * steps)


def _sizes(name: str, array: Any, symbols: tuple[str, ...], q: Any) -> tuple[int, ...]:
    """The shape of a cache or memory, which says how many heads there are, after checking it against `q`."""
    shape = tuple(getattr(array, "shape", ()))
    if len(shape) != 4:
        if not arrays.is_array(array):
            check.fail(name, f"an array [{', '.join(symbols)}]", type(array).__name__, TypeError)
        check.dimensions(name, shape, symbols)
    batch, heads, dim = shape[symbols.index("batch")], *shape[2:]
    if not (1 <= dim <= MAX_DIM and heads >= 1):
        check.fail(name, f"of at least one head, of a dim in [1, {MAX_DIM}]", f"{heads} heads of {dim}")
    if len(q.shape) != 2:
        check.dimensions("q", tuple(q.shape), ("batch", "heads * dim"))
    if q.shape[0] != batch or q.shape[1] != heads * dim:
        check.shape("q", tuple(q.shape), (batch, heads * dim), f"[batch, heads * dim] (those of {name})")
    if batch * heads > MAX_ROWS or batch * heads * dim > MAX_STEP_ELEMENTS:
        wanted = f"of at most {MAX_ROWS} heads and {MAX_STEP_ELEMENTS} elements per step"
        check.fail(name, wanted, f"{batch} x {heads} heads of {dim}")
    return shape


def _rows(
    name: str, array: Any, library: arrays.Library, device: int | None, dtype: str, shape: tuple[int, int]
) -> int:
    """Check one of the new rows [batch, heads * dim]; the distance between rows, in elements."""
    arrays.same_place(name, array, "q", library, device)
    if library.dtype(array) != dtype:
        check.dtype(name, library.dtype(array), (dtype,))
    if array.shape != shape:
        check.shape(name, tuple(array.shape), shape, "[batch, heads * dim]")
    return arrays.row_stride(name, array, library)


def _biases(
    biases: tuple[tuple[str, Any], ...], library: arrays.Library, device: int | None, dtype: str, width: int
) -> bool:
    """Check the biases that are there; whether they are float32."""
    first = None
    for name, bias in biases:
        if bias is None:
            continue
        arrays.expect(name, bias, "q", library, device, ("float32", dtype), (width,), "[heads * dim]")
        found = library.dtype(bias)
        if first is not None and found != first[1]:
            check.fail(name, f"{first[1]} like {first[0]}", found, TypeError)
        first = first or (name, found)
    return first is not None and first[1] == "float32"


def _scale(scale: Any, dim: int) -> float:
    return dim**-0.5 if scale is None else check.number("scale", scale)


def _launch(
    q: Any,
    new: tuple[Any, Any] | None,
    biases: tuple[Any, Any, Any],
    keys: Any,
    values: Any,
    lengths: Any,
    out: Any,
    library: arrays.Library,
    device: int,
    dtype: str,
    sizes: tuple[int, int, int],
    row_strides: tuple[int, int, int],
    step_stride: int,
    batch_stride: int,
    entries: int,
    bias_is_float: bool,
    scale: float,
    variant: str,
) -> Any:
    batch, heads, dim = sizes
    key_address, value_address = library.address(keys), library.address(values)
    choice = _choose(dtype, dim, not (key_address | value_address) % 16, variant)
    if out is None:
        out = library.empty((batch, heads * dim), dtype, q)
    rows = batch * heads
    if rows == 0:
        return out
    form = choice.form
    grid = _grid(rows, entries, form.lanes, form.steps, _multiprocessors(device))
    stream, out_address = library.stream(device), library.address(out)
    partial_address = statistics_address = 0
    if grid.splits > 1:
        partial = library.empty((grid.splits, rows, dim), "float32", q)
        statistics = library.empty((grid.splits, rows, 2), "float32", q)
        partial_address, statistics_address = library.address(partial), library.address(statistics)
    address = library.address
    choice.variant.launch(
        device,
        stream,
        (grid.columns, grid.splits, 1),
        (32 * grid.warps, 1, 1),
        0,
        address(q),
        *((address(new[0]), address(new[1])) if new else (0, 0)),
        *(0 if bias is None else address(bias) for bias in biases),
        key_address,
        value_address,
        0 if lengths is None else address(lengths),
        out_address,
        partial_address,
        statistics_address,
        *row_strides,
        batch_stride,
        step_stride,
        rows,
        heads,
        dim,
        entries,
        grid.split_steps,
        bias_is_float,
        scale * _LOG2_E,
    )
    if grid.splits > 1:
        choice.combiner.launch(
            device,
            stream,
            (rows, 1, 1),
            (-(-dim // 32) * 32, 1, 1),
            0,
            partial_address,
            statistics_address,
            out_address,
            rows,
            dim,
            grid.splits,
        )
    return out


@arrays.takes_dlpack
def masked_attention(
    q: Any,
    k: Any,
    v: Any,
    bias_q: Any,
    bias_k: Any,
    bias_v: Any,
    key_cache: Any,
    value_cache: Any,
    step: int,
    *,
    scale: float | None = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Append a token to each sequence's keys and values, and attend over all of them: the decoder's self-attention.

    The biases are added in float32. k + bias_k and v + bias_v are rounded to the caches' dtype and written at index
    `step - 1`, and count as they were written. With the entries s = 0 ... step - 1 of head h of sequence b,

        out[b, h] = sum of softmax(scale * (q + bias_q)[b, h] . key_cache[:, b, h])[s] * value_cache[s, b, h]

    in float32, by an online softmax. Entries from `step` on are not read. A score of -inf weighs 0; if all are, the
    result is zeros. A NaN among a head's scores makes its result NaN.

    Args:
        q, k, v: the new token [batch, heads * dim], float32, float16 or bfloat16, contiguous along the last dimension;
            rows may be strided, as those of a fused projection are. A head's dim is at most 256.
        bias_q, bias_k, bias_v: [heads * dim], float32 or the dtype of `q`, all of one dtype; None adds nothing.
        key_cache, value_cache: [max_steps, batch, heads, dim], of the dtype of `q`, contiguous, written at step - 1.
            They say how many heads there are.
        step: the number of tokens, the new one included, in [1, max_steps].
        scale: of the scores; 1 / sqrt(dim) if None.
        out: [batch, heads * dim], written and returned.
        variant: "auto", or a kernel by name: "specialized" (the dim fixed at compile time) or "dynamic".

    Returns:
        [batch, heads * dim] of the dtype of `q`, in the library and on the device of `q`. Arrays in host memory go
        through the NumPy twin. When few heads leave most of a GPU idle, the sequence is split among blocks, with
        partial results in memory from the caller's allocator.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The layout and the count of steps are those of FasterTransformer's decoder (v2.1); the online softmax is that of
    Milakov and Gimelshein (arXiv:1805.02867), the split over the sequence that of Flash-Decoding.
    """
    library, device = arrays.place("q", q)
    dtype = library.dtype(q)
    if dtype not in DTYPES:
        check.dtype("q", dtype, DTYPES)
    max_steps, batch, heads, dim = shape = _sizes("key_cache", key_cache, ("max_steps", "batch", "heads", "dim"), q)
    new_shape = batch, heads * dim
    q_stride = _rows("q", q, library, device, dtype, new_shape)
    k_stride = _rows("k", k, library, device, dtype, new_shape)
    v_stride = _rows("v", v, library, device, dtype, new_shape)
    named = ("bias_q", bias_q), ("bias_k", bias_k), ("bias_v", bias_v)
    bias_is_float = _biases(named, library, device, dtype, heads * dim)
    symbols = "[max_steps, batch, heads, dim]"
    arrays.expect("key_cache", key_cache, "q", library, device, (dtype,), shape, symbols)
    arrays.expect("value_cache", value_cache, "q", library, device, (dtype,), shape, symbols)
    step = check.integer("step", step, 1, min(max_steps, MAX_ENTRIES), "max_steps")
    scale = _scale(scale, dim)
    if out is not None:
        arrays.expect("out", out, "q", library, device, (dtype,), new_shape, "[batch, heads * dim]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        inputs = q, k, v, bias_q, bias_k, bias_v, key_cache, value_cache, step
        return arrays.on_host(twin.masked_attention, q, *inputs, scale=scale, out=out)
    return _launch(
        q,
        (k, v),
        (bias_q, bias_k, bias_v),
        key_cache,
        value_cache,
        None,
        out,
        library,
        device,
        dtype,
        (batch, heads, dim),
        (q_stride, k_stride, v_stride),
        batch * heads * dim,
        heads * dim,
        step - 1,
        bias_is_float,
        scale,
        variant,
    )


@arrays.takes_dlpack
def cross_attention(
    q: Any,
    bias_q: Any,
    key_memory: Any,
    value_memory: Any,
    memory_lengths: Any,
    *,
    scale: float | None = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Attend over the encoder's memory, of a length of its own for each sequence.

    With the entries s = 0 ... memory_lengths[b] - 1 of head h of sequence b,

        out[b, h] = sum of softmax(scale * (q + bias_q)[b, h] . key_memory[b, :, h])[s] * value_memory[b, s, h]

    in float32. Entries from memory_lengths[b] on are not read; a length of 0 gives zeros.

    Args:
        q: [batch, heads * dim], float32, float16 or bfloat16, contiguous along the last dimension; rows may be strided.
        bias_q: [heads * dim], float32 or the dtype of `q`; None adds nothing.
        key_memory, value_memory: [batch, memory_len, heads, dim], of the dtype of `q`, contiguous, dim at most 256.
        memory_lengths: int32 [batch], each in [0, memory_len]. Lengths in host memory are checked; on a GPU the kernel
            clamps them, since to look at them would take a synchronization.
        scale, out, variant: as in `masked_attention`.

    Returns, and raises, what `masked_attention` does, and ValueError for a length in host memory that is out of range.

    The function is the cross attention of FasterTransformer's decoder (v2.1), over keys and values that are already
    projected.
    """
    library, device = arrays.place("q", q)
    dtype = library.dtype(q)
    if dtype not in DTYPES:
        check.dtype("q", dtype, DTYPES)
    batch, memory_len, heads, dim = shape = _sizes("key_memory", key_memory, ("batch", "memory_len", "heads", "dim"), q)
    new_shape = batch, heads * dim
    q_stride = _rows("q", q, library, device, dtype, new_shape)
    bias_is_float = _biases((("bias_q", bias_q),), library, device, dtype, heads * dim)
    symbols = "[batch, memory_len, heads, dim]"
    arrays.expect("key_memory", key_memory, "q", library, device, (dtype,), shape, symbols)
    arrays.expect("value_memory", value_memory, "q", library, device, (dtype,), shape, symbols)
    arrays.expect("memory_lengths", memory_lengths, "q", library, device, ("int32",), (batch,), "[batch]")
    if memory_len > MAX_ENTRIES:
        check.fail("key_memory", f"of at most {MAX_ENTRIES} entries", memory_len)
    scale = _scale(scale, dim)
    if out is not None:
        arrays.expect("out", out, "q", library, device, (dtype,), new_shape, "[batch, heads * dim]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        lengths = library.to_numpy(memory_lengths)
        if batch and (lengths.min() < 0 or lengths.max() > memory_len):
            check.fail("memory_lengths", f"in [0, {memory_len}] (memory_len)", lengths.tolist())
        inputs = q, bias_q, key_memory, value_memory, memory_lengths
        return arrays.on_host(twin.cross_attention, q, *inputs, scale=scale, out=out)
    return _launch(
        q,
        None,
        (bias_q, None, None),
        key_memory,
        value_memory,
        memory_lengths,
        out,
        library,
        device,
        dtype,
        (batch, heads, dim),
        (q_stride, 0, 0),
        heads * dim,
        memory_len * heads * dim,
        memory_len,
        bias_is_float,
        scale,
        variant,
    )


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    "masked_attention(Tensor q, Tensor k, Tensor v, Tensor? bias_q, Tensor? bias_k, Tensor? bias_v, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, int step, *, float? scale=None, str variant='auto') "
    "-> (Tensor attended)": lambda q, *_, **__: [(q, q.shape, str(q.dtype).removeprefix("torch."))],
    "cross_attention(Tensor q, Tensor? bias_q, Tensor key_memory, Tensor value_memory, Tensor memory_lengths, *, "
    "float? scale=None, str variant='auto') -> (Tensor attended)": (
        lambda q, *_, **__: [(q, q.shape, str(q.dtype).removeprefix("torch."))]
    ),
}
