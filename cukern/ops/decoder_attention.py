"""Attention of one new token per sequence, over a decoder's cache or an encoder's memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.reference import decoder_attention as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_one,
    expect_row_stride,
    expect_strided,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import forget_plans, op
from cukern.runtime.plan import asked, empty, launch, outputs, run_twin

__all__ = ["cross_attention", "masked_attention"]

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "specialized", "dynamic")
#: DEVICE_STEP: the kernel reads the step from device memory. SHARED_KV: several query rows attend to one encoder
#: memory.
MODES = ("PLAIN", "DEVICE_STEP", "SHARED_KV")
MAX_DIM = 256
#: A query row is one head of one sequence.
MAX_ROWS = 2**30
MAX_ENTRIES = 2**30
MAX_STEP_ELEMENTS = 2**31 - 1
_MAX_SPLITS = 256
#: A multiprocessor holds this number of warps at a time, because the kernel uses 128 registers per thread.
_RESIDENT_WARPS = 16
_LOG2_E = 1.4426950408889634

#: Head dimensions with their own instances, and models that have them.
SPECIALIZED = {
    64: "GPT-2, BERT-like decoders, T5, BART, Whisper",
    128: "Llama, Qwen, Mistral",
    256: "Gemma",
}
_AT_IMPORT = [(dtype, dim) for dtype in ("float16", "bfloat16") for dim in (64, 128)]

_kernel = Kernel("decoder_attention/decoder_attention", "decoder_attention")
_combine = Kernel("decoder_attention/combine", "combine")


class _LaneLayout(NamedTuple):
    """Template arguments: how the lanes of a warp share the elements of a row."""

    vector: int  # elements per load
    lanes: int
    chunks: int
    steps: int  # cache entries that a warp processes per round


def _lane_layout(dtype: str, dim: int, wide: bool) -> _LaneLayout:
    """Return the layout for heads of `dim` elements. `wide`: a load is 16 bytes, otherwise one element."""
    vector = 16 // arrays.ITEM_SIZE[dtype] if wide else 1
    loads = -(-dim // vector)
    if wide:
        lanes = next(n for n in (8, 16, 32) if n >= loads or n == 32)
        chunks = 1 if loads <= lanes else 2
        # With more cache entries per round, a warp would need too many registers.
        return _LaneLayout(vector, lanes, chunks, 8 // chunks)
    chunks = next(n for n in (2, 4, 8) if 32 * n >= loads)
    return _LaneLayout(vector, 32, chunks, 16 // chunks)


def _variant(dtype: str, fixed_dim: int, layout: _LaneLayout, mode: str = "PLAIN") -> Variant:
    # PLAIN is the template's default. It is left out to shorten the names of instances.
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
    """Register instances for this head dimension, and return them; see `cukern.specialize`.

    Raises ValueError unless dim is a multiple of 8, at most 256.
    """
    check.integer("dim", dim, 8, MAX_DIM)
    if dim % 8:
        check.fail("dim", "a multiple of 8 (the dynamic variant takes all others)", dim)
    _registered.add(dim)
    forget_plans()
    return [_variant(dtype, dim, _lane_layout(dtype, dim, wide=True)).instance for dtype in DTYPES]


def _choose(dtype: str, dim: int, aligned: bool, variant: str, mode: str = "PLAIN") -> tuple[Variant, _LaneLayout, str]:
    """Return the instance, its layout and the reason. `aligned`: addresses are multiples of 16 bytes."""
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
    max_splits: int  # bound for the allocation of partial results
    split_steps: Any


def _max_unsplit_tokens(warps: int, steps: int, new: int) -> int:
    """Return the most tokens that one block processes alone. With more tokens, two blocks share a sequence, and each
    of their warps has at least two rounds."""
    return (4 * warps - 1) * steps + new


def _full_warps(columns: int, multiprocessors: int) -> int:
    """Return the warps per block for long sequences."""
    most = _kernel.constant("MAX_WARPS")
    return most if columns * most <= _RESIDENT_WARPS * multiprocessors else most // 2


def _why_grid(grid: _Grid, tokens: Any, new: int, steps: int, multiprocessors: int) -> str:
    warps, resident = _full_warps(grid.columns, multiprocessors), _RESIDENT_WARPS * multiprocessors
    min_split_tokens = _max_unsplit_tokens(warps, steps, new) + 1
    blocks = f"{grid.columns} x {grid.warps} warps for the heads"
    if grid.max_splits > 1:
        busy = f"so that {multiprocessors} multiprocessors have work (from {min_split_tokens} tokens on)"
        return f"{blocks}: {tokens} tokens in {grid.splits} splits, {busy}"
    if resident // (warps * grid.columns) < 2:
        return f"{blocks}: no splits, as two of {warps} warps are too many ({resident} warps run at once)"
    return f"{blocks}: no splits ({tokens} tokens; from {min_split_tokens} on)"


def _grid(rows: int, tokens: Any, new: int, lanes: int, steps: int, multiprocessors: int) -> _Grid:
    """Return the grid for `tokens` tokens per sequence; the last `new` tokens are not in the cache yet.

    A block processes a column of 32 / lanes query rows. It has fewer warps if there are few tokens, or if not all
    blocks would otherwise be resident at once. If one block per column leaves multiprocessors idle, several blocks
    share a sequence. Each of their warps has at least two rounds of `steps` entries.
    """
    columns = -(-rows // (32 // lanes))
    resident = _RESIDENT_WARPS * multiprocessors
    warps = _full_warps(columns, multiprocessors)
    while warps > 1 and tokens <= warps // 2 * steps + new:
        warps //= 2
    max_splits = min(resident // (warps * columns), _MAX_SPLITS)
    rounds = -(-(tokens - new) // steps)
    if max_splits < 2 or tokens <= _max_unsplit_tokens(warps, steps, new):
        return _Grid(columns, warps, 1, 1, max(1, rounds) * steps)
    # All warps that share a sequence do the same number of rounds, each of `steps` entries.
    splits = min(max_splits, rounds // (2 * warps))
    split_rounds = -(-rounds // (splits * warps)) * warps
    return _Grid(columns, warps, -(-rounds // split_rounds), max_splits, split_rounds * steps)


def _check_memories(q: Any, symbols: tuple[str, ...], shared: bool, **memories: Any) -> tuple[int, ...]:
    """Check `q`, keys and values, and return the shape of the keys. `shared`: `q` may have more rows than the keys."""
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
    """Return the row stride of [batch, heads * dim] in elements."""
    return expect_row_stride(name, expect_strided(name, array, q, "q", (q.dtype,), q.shape, "[batch, heads * dim]"))


def _is_float(q: Array, biases: dict[str, Any]) -> bool:
    """Check the biases, and return whether they are float32."""
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
    """Launch the kernels. `new` is the number of tokens that are not in the cache yet. `fields` are the parameters that
    the two ops fill differently."""
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
    if grid.max_splits > 1:
        partial = empty((grid.max_splits, rows, dim), "float32")
        statistics = empty((grid.max_splits, rows, 2), "float32")
    results = {"out": out, "partial": partial, "statistics": statistics, "rows": rows, "dim": dim}
    fields |= {"q": q, "keys": keys, "values": values, "heads": heads, "bias_is_float": bias_is_float}
    fields |= {"split_steps": grid.split_steps, "scale": scale * _LOG2_E}
    why += f"; {_why_grid(grid, tokens, new, layout.steps, q.gpu.multiprocessors)}"
    if mode == "DEVICE_STEP":
        why += "; step is an array, so the grid is that of max_steps"
    launch(found, (grid.columns, grid.splits), 32 * grid.warps, 0, why=why, **results, **fields)
    if grid.max_splits > 1:
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
    """Append a token to the cache of each sequence, and attend over the cache (a decoder's self-attention).

    k + bias_k and v + bias_v, rounded to the caches' dtype, become the last entry of the caches. The result for head h
    of sequence b is a sum over the cache entries s < step:

        out[b, h] = sum of softmax(scale * (q + bias_q)[b, h] . key_cache[:, b, h])[s] * value_cache[s, b, h]

    If all scores are -inf, the result is zeros. A NaN among a head's scores makes its result NaN.

    Args:
        q, k, v: the new token [batch, heads * dim], float32, float16 or bfloat16, dim at most 256. Each row is
            contiguous; rows may be strided, as in slices of a QKV projection.
        bias_q, bias_k, bias_v: [heads * dim], float32 or the dtype of `q`, all of one dtype; None adds nothing.
        key_cache, value_cache: [max_steps, batch, heads, dim], of the dtype of `q`, contiguous. Written.
        step: the number of tokens, including the new one, in [1, max_steps]: an int, or an int32 array [1] or []. A GPU
            array is read and clamped by the kernel, so one captured CUDA graph serves every step; the grid and the
            order of the sums are chosen for max_steps.
        scale: a factor of the scores; 1 / sqrt(dim) if None.
        out: [batch, heads * dim], written and returned.
        variant: "auto", "specialized" (dim fixed at compile time) or "dynamic".

    Returns:
        [batch, heads * dim] of the dtype of `q`. If the sequences are few and long, several blocks share each sequence.
        Their partial results are in memory from the caller's allocator.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The layout is from FasterTransformer (v2.1). The online softmax is from Milakov and Gimelshein (arXiv:1805.02867).
    The split over the sequence is from Flash-Decoding.
    """
    symbols = "max_steps", "batch", "heads", "dim"
    max_steps, *_ = _check_memories(q, symbols, False, key_cache=key_cache, value_cache=value_cache)
    fields: dict[str, Any] = {f"{name}_stride": _row_stride(name, x, q) for name, x in (("q", q), ("k", k), ("v", v))}
    fields |= {"k": k, "v": v, "bias_q": bias_q, "bias_k": bias_k, "bias_v": bias_v, "lengths": None}
    most, step_on_device = min(max_steps, MAX_ENTRIES), isinstance(step, Array)
    if step_on_device:
        expect_one("step", step, q, "q", "int32")
        check.integer("max_steps of key_cache", max_steps, 1, MAX_ENTRIES)
    tokens = most if step_on_device else check.integer("step", step, 1, most, "max_steps")
    fields |= {"entries": tokens - 1, "step": step if step_on_device else None, "beams": 1}
    fields |= {"batch_stride": q.shape[1], "step_stride": q.shape[0] * q.shape[1]}
    mode = "DEVICE_STEP" if step_on_device else "PLAIN"
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
    """Attend over an encoder's memory (a decoder's cross-attention).

    The result for head h of sequence b is a sum over the entries s < memory_lengths[b]:

        out[b, h] = sum of softmax(scale * (q + bias_q)[b, h] . key_memory[b, :, h])[s] * value_memory[b, s, h]

    A length of 0 gives zeros. With beams, row i of `q` attends to the memory of sequence i // beams.

    Args:
        q: [batch, heads * dim] or [batch * beams, heads * dim], float32, float16 or bfloat16, dim at most 256, with
            contiguous rows at any stride.
        bias_q: [heads * dim], float32 or the dtype of `q`; None adds nothing.
        key_memory, value_memory: [batch, memory_len, heads, dim], of the dtype of `q`, contiguous.
        memory_lengths: int32 [batch], in [0, memory_len]. Other lengths raise ValueError in host memory, and are
            clamped on a GPU.
        scale, out, variant: as in `masked_attention`, and so are results and errors.

    The function is from FasterTransformer's decoder (v2.1). Keys and values are already projected.
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
    beams = fields["beams"] = q.shape[0] // max(shape[0], 1)
    mode = "SHARED_KV" if beams > 1 else "PLAIN"
    return _attend(q, key_memory, value_memory, entries, 0, scale, out, variant, mode, **fields)
