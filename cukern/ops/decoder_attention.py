"""Attention of one new token per sequence: over the decoder's own cache, and over the encoder's memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.reference import decoder_attention as twin
from cukern.runtime import arrays, check, template
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_one,
    expect_place,
    expect_row_stride,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import forget_plans, op
from cukern.runtime.plan import asked, empty, launch, outputs, run_twin

__all__ = ["cross_attention", "masked_attention"]

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "specialized", "dynamic")
#: The values of the template argument MODE. LATE_STEP: the kernel reads the step from device memory. SHARED_MEMORY:
#: several query rows attend to the same encoder memory (this is not CUDA's shared memory).
MODES = ("PLAIN", "LATE_STEP", "SHARED_MEMORY")
MAX_DIM = 256
#: The largest number of query rows. A query row is one head of one sequence.
MAX_ROWS = 2**30
MAX_ENTRIES = 2**30
MAX_STEP_ELEMENTS = 2**31 - 1
_MAX_SPLITS = 256
#: Resident warps of a multiprocessor, at the 128 registers per thread of the template's launch bounds.
_RESIDENT_WARPS = 16
_LOG2_E = 1.4426950408889634

#: Head dimensions with variants of their own, and the models that have them.
SPECIALIZED = {
    64: "GPT-2, BERT-like decoders, T5, BART, Whisper",
    128: "Llama, Qwen, Mistral",
    256: "Gemma",
}
_AT_IMPORT = [(dtype, dim) for dtype in ("float16", "bfloat16") for dim in (64, 128)]

_kernel = Kernel("decoder_attention/decoder_attention", "decoder_attention")
_combine = Kernel("decoder_attention/combine", "combine")


class _LaneLayout(NamedTuple):
    """How the lanes of a warp share the elements of a row: template arguments."""

    vector: int  # elements per load
    lanes: int
    chunks: int
    steps: int  # the number of cache entries (cached tokens) that a warp processes at once


def _lane_layout(dtype: str, dim: int, wide: bool) -> _LaneLayout:
    """Return the layout for heads of `dim` elements. A load reads 16 bytes if `wide`, else one element."""
    vector = 16 // arrays.ITEM_SIZE[dtype] if wide else 1
    loads = -(-dim // vector)
    if wide:
        lanes = next(n for n in (8, 16, 32) if n >= loads or n == 32)
        chunks = 1 if loads <= lanes else 2
        # More entries at once would need too many registers.
        return _LaneLayout(vector, lanes, chunks, 8 // chunks)
    chunks = next(n for n in (2, 4, 8) if 32 * n >= loads)
    return _LaneLayout(vector, 32, chunks, 16 // chunks)


def _variant(dtype: str, fixed_dim: int, layout: _LaneLayout, mode: str = "PLAIN") -> Variant:
    # PLAIN is the template's default. It is left out of the arguments to keep the names of instances short.
    return _kernel.variant(arrays.CUDA_TYPE[dtype], fixed_dim, *layout, *[mode] * (mode != "PLAIN"))


def _combiner(dtype: str) -> Variant:
    return _combine.variant(arrays.CUDA_TYPE[dtype])


_kernel.specialized = [
    _variant(t, d, _lane_layout(t, d, wide=True), mode).instance for mode in MODES for t in DTYPES for d in SPECIALIZED
]
_kernel.at_import = [_variant(t, d, _lane_layout(t, d, wide=True)).instance for t, d in _AT_IMPORT]
_combine.at_import = [_combiner(dtype).instance for dtype in ("float16", "bfloat16")]

_registered = set(SPECIALIZED)


def specialize(*, dim: int) -> list[Instance]:
    """Register variants for this head dimension in this process, and return their instances; see `cukern.specialize`.

    Raises ValueError unless dim is a multiple of 8, so that rows are whole 16-byte loads, and at most 256.
    """
    check.integer("dim", dim, 8, MAX_DIM)
    if dim % 8:
        check.fail("dim", "a multiple of 8 (the dynamic variant takes all others)", dim)
    _registered.add(dim)
    forget_plans()
    return [_variant(dtype, dim, _lane_layout(dtype, dim, wide=True)).instance for dtype in DTYPES]


def _choose(dtype: str, dim: int, aligned: bool, variant: str, mode: str = "PLAIN") -> tuple[Variant, _LaneLayout, str]:
    """Return the variant for a head dimension, its layout, and the reason.

    `aligned`: the addresses of keys and values are multiples of 16 bytes.
    """
    check.one_of("variant", variant, VARIANTS)
    wide = aligned and dim * arrays.ITEM_SIZE[dtype] % 16 == 0
    layout = _lane_layout(dtype, dim, wide)
    specialized = wide and dim in _registered
    if variant == "specialized" and not specialized:
        reason = f"there is none for heads of {dim} in {dtype}" if aligned else "the arrays are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {reason} (cukern.specialize adds one)")
    fixed_dim = dim if specialized and variant != "dynamic" else 0
    if specialized:
        why = f"heads of {dim} in aligned rows: specialized ({SPECIALIZED.get(dim, 'by cukern.specialize')})"
    elif wide:
        why = f"dynamic: no instance has heads of {dim}"
        if dim % 8 == 0:
            why += f" (cukern.specialize('masked_attention', dim={dim}) makes one)"
    else:
        why = f"dynamic, with slow loads of one number: keys and values or heads of {dim} are not 16-byte aligned"
    return _variant(dtype, fixed_dim, layout, mode), layout, asked(variant) or why


class _Grid(NamedTuple):
    columns: int
    warps: int  # warps per block
    splits: Any
    most_splits: int  # an upper bound of `splits`; partial results have room for it
    split_steps: Any


def _most_unsplit(warps: int, steps: int, new: int) -> int:
    """Return the largest number of tokens of a sequence that is not split among blocks.

    A warp processes `steps` cache entries per round. A longer sequence is split among two blocks, because each warp
    then still has at least two rounds.
    """
    return (4 * warps - 1) * steps + new


def _full_warps(columns: int, multiprocessors: int) -> int:
    """Return the number of warps per block for sequences that are long enough to give every warp work."""
    most = template.constants("decoder_attention/decoder_attention")["MAX_WARPS"]
    return most if columns * most <= _RESIDENT_WARPS * multiprocessors else most // 2


def _why_grid(grid: _Grid, tokens: Any, new: int, steps: int, multiprocessors: int) -> str:
    """Return why the sequence is split, or why not."""
    warps, resident = _full_warps(grid.columns, multiprocessors), _RESIDENT_WARPS * multiprocessors
    least = _most_unsplit(warps, steps, new) + 1
    blocks = f"{grid.columns} x {grid.warps} warps for the heads"
    if grid.most_splits > 1:
        busy = f"so that {multiprocessors} multiprocessors have work (from {least} tokens on)"
        return f"{blocks}: {tokens} tokens in {grid.splits} splits, {busy}"
    if resident // (warps * grid.columns) < 2:
        return f"{blocks}: no splits, as two of {warps} warps are too many ({resident} warps run at once)"
    return f"{blocks}: no splits ({tokens} tokens; from {least} on)"


def _grid(rows: int, tokens: Any, new: int, lanes: int, steps: int, multiprocessors: int) -> _Grid:
    """Return the grid for `tokens` tokens per sequence. The last `new` tokens are not in the cache yet.

    A block has fewer warps if otherwise not all blocks would be resident, or if there are too few tokens to give every
    warp work. If one block for each column of rows leaves multiprocessors idle, the sequence is split among several
    blocks, as long as each warp has at least two rounds. In a round a warp processes `steps` entries.
    """
    columns = -(-rows // (32 // lanes))
    resident = _RESIDENT_WARPS * multiprocessors
    warps = _full_warps(columns, multiprocessors)
    while warps > 1 and tokens <= warps // 2 * steps + new:
        warps //= 2
    most_splits = min(resident // (warps * columns), _MAX_SPLITS)
    rounds = -(-(tokens - new) // steps)
    if most_splits < 2 or tokens <= _most_unsplit(warps, steps, new):
        return _Grid(columns, warps, 1, 1, max(1, rounds) * steps)
    # A split has a multiple of `warps` groups of entries, so that each warp gets the same number of rounds.
    splits = min(most_splits, rounds // (2 * warps))
    split_rounds = -(-rounds // (splits * warps)) * warps
    return _Grid(columns, warps, -(-rounds // split_rounds), most_splits, split_rounds * steps)


def _check_memories(q: Any, symbols: tuple[str, ...], shared: bool, **memories: Any) -> tuple[int, ...]:
    """Check `q`, and the keys and values in `memories` (a decoder's caches or an encoder's memory). Return their shape.

    `shared`: `q` may have several rows for each sequence of the memories.
    """
    expect_array("q", q, DTYPES)
    (name, first), *_ = memories.items()
    if not isinstance(first, Array):
        check.fail(name, f"an array [{', '.join(symbols)}]", type(first).__name__, TypeError)
    check.dimensions(name, first.shape, symbols)
    batch, heads, dim = first.shape[symbols.index("batch")], *first.shape[2:]
    if not (1 <= dim <= MAX_DIM and heads >= 1):
        check.fail(name, f"of at least one head, of a dim in [1, {MAX_DIM}]", f"{heads} heads of {dim}")
    check.dimensions("q", q.shape, ("batch", "heads * dim"))
    if shared and q.shape[0] > batch > 0 and q.shape[0] % batch:
        check.fail("q", f"of a multiple of {batch} rows (the batch of {name})", q.shape[0])
    if shared and batch:
        batch *= max(1, q.shape[0] // batch)
    check.shape("q", q.shape, (batch, heads * dim), f"[batch, heads * dim] (those of {name})")
    if batch * heads > MAX_ROWS or batch * heads * dim > MAX_STEP_ELEMENTS:
        wanted = f"of at most {MAX_ROWS} heads and {MAX_STEP_ELEMENTS} elements per step"
        check.fail(name, wanted, f"{batch} x {heads} heads of {dim}")
    for name, memory in memories.items():
        expect(name, memory, q, "q", (q.dtype,), first.shape, f"[{', '.join(symbols)}]")
    return first.shape


def _row_stride(name: str, array: Any, q: Array) -> int:
    """Check an array of new rows [batch, heads * dim]. Return the distance between rows, in elements."""
    expect_place(name, array, q, "q")
    check.dtype(name, array.dtype, (q.dtype,))
    check.shape(name, array.shape, q.shape, "[batch, heads * dim]")
    return expect_row_stride(name, array)


def _is_float(q: Array, biases: dict[str, Any]) -> bool:
    """Check the biases that are given. Return whether they are float32."""
    given = {name: bias for name, bias in biases.items() if bias is not None}
    first = next(iter(given), "")
    for name, bias in given.items():
        expect(name, bias, q, "q", ("float32", q.dtype), q.shape[1:], "[heads * dim]")
        if bias.dtype != given[first].dtype:
            check.fail(name, f"{given[first].dtype} like {first}", bias.dtype, TypeError)
    return bool(given) and given[first].dtype == "float32"


def _attend(
    q: Array,
    keys: Array,
    values: Array,
    tokens: Any,
    new: int,
    scale: Any,
    out: Any,
    variant: str,
    mode: str,
    **fields: Any,
) -> Any:
    """Check and launch either attention function, over `tokens` tokens. The last `new` tokens are not in the cache yet.

    `mode` is one of `MODES`. `fields` are the kernel's parameters that differ between the functions.
    """
    heads, dim = keys.shape[2:]
    bias_is_float = _is_float(q, {name: fields[name] for name in ("bias_q", "bias_k", "bias_v")})
    scale = dim**-0.5 if scale is None else check.number("scale", scale)
    out = outputs(out, q, "q", _attended(q))
    if q.on_host:
        return run_twin(variant, VARIANTS)
    found, layout, why = _choose(q.dtype, dim, min(keys.alignment, values.alignment) == 16, variant, mode)
    rows = q.shape[0] * heads
    if rows == 0:
        return out
    grid = _grid(rows, tokens, new, layout.lanes, layout.steps, q.gpu.multiprocessors)
    partial = statistics = None
    if grid.most_splits > 1:
        partial = empty((grid.most_splits, rows, dim), "float32")
        statistics = empty((grid.most_splits, rows, 2), "float32")
    results = {"out": out, "partial": partial, "statistics": statistics, "rows": rows, "dim": dim}
    fields |= {"q": q, "keys": keys, "values": values, "heads": heads, "bias_is_float": bias_is_float}
    fields |= {"split_steps": grid.split_steps, "scale": scale * _LOG2_E}
    why += f"; {_why_grid(grid, tokens, new, layout.steps, q.gpu.multiprocessors)}"
    if mode == "LATE_STEP":
        why += "; step is an array, so the grid is that of max_steps"
    launch(found, (grid.columns, grid.splits), 32 * grid.warps, 0, why=why, **results, **fields)
    if grid.most_splits > 1:
        why = f"what {grid.splits} splits found is put together: a block for each of {rows} rows"
        launch(_combiner(q.dtype), rows, -(-dim // 32) * 32, 0, why=why, **results, splits=grid.splits)
    return out


def _attended(q: Any, *_: Any, **__: Any) -> Result:
    return Result(q.shape, dtype_name(q), "[batch, heads * dim]")


@op(twin.masked_attention, "attended", _attended)
def masked_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    bias_q: AnyArray | None,
    bias_k: AnyArray | None,
    bias_v: AnyArray | None,
    key_cache: WrittenArray,
    value_cache: WrittenArray,
    step: int | AnyArray,
    *,
    scale: float | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Compute the decoder's self-attention: append a token to each sequence's keys and values, and attend over them.

    The biases are added in float32. k + bias_k and v + bias_v are rounded to the caches' dtype and written at index
    `step - 1`. The attention uses the rounded numbers. With the entries s = 0 ... step - 1 of head h of sequence b,

        out[b, h] = sum of softmax(scale * (q + bias_q)[b, h] . key_cache[:, b, h])[s] * value_cache[s, b, h]

    in float32, by an online softmax. Entries from `step` on are not read. A score of -inf has weight 0. If all scores
    are -inf, the result is zeros. A NaN among a head's scores makes its result NaN.

    Args:
        q, k, v: the new token [batch, heads * dim], float32, float16 or bfloat16, contiguous along the last dimension.
            Rows may be strided, so q, k and v may be slices of the output of one QKV projection. dim is at most 256.
        bias_q, bias_k, bias_v: [heads * dim], float32 or the dtype of `q`, all of one dtype; None adds nothing.
        key_cache, value_cache: [max_steps, batch, heads, dim], of the dtype of `q`, contiguous, written at step - 1.
            Their shape sets the number of heads.
        step: the number of tokens, the new one included, in [1, max_steps]: an int, or an int32 array [1] or [] on the
            device of `q`. An array in host memory is checked. On a GPU the kernel reads it and clamps it to that range,
            so that one captured CUDA graph can run every step. With an array, the grid, the split among blocks and the
            order of the sums are chosen for max_steps.
        scale: a factor of the scores; 1 / sqrt(dim) if None.
        out: [batch, heads * dim], written and returned.
        variant: "auto", or a kernel by name: "specialized" (the dim fixed at compile time) or "dynamic".

    Returns:
        [batch, heads * dim] of the dtype of `q`, in the library and on the device of `q`. Arrays in host memory go
        through the NumPy reference. When few heads leave most of a GPU idle, the sequence is split among blocks, with
        partial results in memory from the caller's allocator.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The layout and the count of steps are from FasterTransformer's decoder (v2.1), the online softmax from Milakov and
    Gimelshein (arXiv:1805.02867), and the split over the sequence from Flash-Decoding.
    """
    symbols = "max_steps", "batch", "heads", "dim"
    max_steps, *_ = _check_memories(q, symbols, False, key_cache=key_cache, value_cache=value_cache)
    fields: dict[str, Any] = {f"{name}_stride": _row_stride(name, x, q) for name, x in (("q", q), ("k", k), ("v", v))}
    fields |= {"k": k, "v": v, "bias_q": bias_q, "bias_k": bias_k, "bias_v": bias_v, "lengths": None}
    most, is_late = min(max_steps, MAX_ENTRIES), isinstance(step, Array)
    if is_late:
        expect_one("step", step, q, "q", "int32")
        check.integer("max_steps of key_cache", max_steps, 1, MAX_ENTRIES)
    tokens = most if is_late else check.integer("step", step, 1, most, "max_steps")
    fields |= {"entries": tokens - 1, "step": step if is_late else None, "copies": 1}
    fields |= {"batch_stride": q.shape[1], "step_stride": q.shape[0] * q.shape[1]}
    mode = "LATE_STEP" if is_late else "PLAIN"
    return _attend(q, key_cache, value_cache, tokens, 1, scale, out, variant, mode, **fields)


@op(twin.cross_attention, "attended", _attended)
def cross_attention(
    q: AnyArray,
    bias_q: AnyArray | None,
    key_memory: AnyArray,
    value_memory: AnyArray,
    memory_lengths: AnyArray,
    *,
    scale: float | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Attend over the encoder's memory (the decoder's cross-attention). Each sequence of the memory has its own length.

    With the entries s = 0 ... memory_lengths[b] - 1 of head h of sequence b,

        out[b, h] = sum of softmax(scale * (q + bias_q)[b, h] . key_memory[b, :, h])[s] * value_memory[b, s, h]

    in float32. Entries from memory_lengths[b] on are not read; a length of 0 gives zeros. `q` may have several rows for
    each sequence of the memory, such as the beams of a search: row i attends to the memory of sequence i // beams.

    Args:
        q: [batch, heads * dim], or [batch * beams, heads * dim], float32, float16 or bfloat16, contiguous along the
            last dimension; rows may be strided.
        bias_q: [heads * dim], float32 or the dtype of `q`; None adds nothing.
        key_memory, value_memory: [batch, memory_len, heads, dim], of the dtype of `q`, contiguous, dim at most 256.
        memory_lengths: int32 [batch], each in [0, memory_len]. Lengths in host memory are checked; on a GPU the kernel
            clamps them, because a check would take a synchronization.
        scale, out, variant: as in `masked_attention`.

    Results and errors are as in `masked_attention`, with ValueError for a length in host memory that is out of range.

    The function is the cross attention of FasterTransformer's decoder (v2.1), over keys and values that are already
    projected.
    """
    symbols = "batch", "memory_len", "heads", "dim"
    shape = _check_memories(q, symbols, True, key_memory=key_memory, value_memory=value_memory)
    expect("memory_lengths", memory_lengths, q, "q", ("int32",), shape[:1], "[batch]")
    entries = shape[1]
    if entries > MAX_ENTRIES:
        check.fail("key_memory", f"of at most {MAX_ENTRIES} entries", entries)
    fields: dict[str, Any] = {"bias_q": bias_q, "lengths": memory_lengths, "entries": entries}
    fields |= {"q_stride": _row_stride("q", q, q), "batch_stride": entries * q.shape[1], "step_stride": q.shape[1]}
    fields |= dict.fromkeys(("k", "v", "bias_k", "bias_v", "k_stride", "v_stride", "step"))
    copies = fields["copies"] = q.shape[0] // max(shape[0], 1)
    mode = "SHARED_MEMORY" if copies > 1 else "PLAIN"
    return _attend(q, key_memory, value_memory, entries, 0, scale, out, variant, mode, **fields)
