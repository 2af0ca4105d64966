"""Attention over a batch of sequences of different lengths without padding: self-attention or cross-attention."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.reference import varlen_attention as twin
from cukern.runtime import arrays, check, template
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, dtype_name, expect, expect_array, expect_place, same_shape
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, launch, outputs, run_twin, tensor_map

__all__ = ["varlen_attention"]

DTYPES = ("float32", "float16", "bfloat16")
#: "wgmma" (Hopper only) and "mma" (all GPUs) use tensor cores, and take 16-bit arrays. "fma" computes products in
#: float32, and takes all dtypes and alignments.
VARIANTS = ("auto", "wgmma", "mma", "fma")
MAX_DIM = 256
MAX_HEADS = 2**16 - 1
MAX_TOKENS = 2**31 - 2**16

#: Head dimensions of the instances. A call uses the smallest one that is at least its head dimension.
DIMS = (
    32,  # all-MiniLM-L6, BGE-small, E5-small
    64,  # BERT, RoBERTa, DistilBERT, XLM-R, BART, Marian, BGE, E5
    128,  # encoders made of Llama, Qwen and Mistral
    256,  # Gemma
)
#: Head dimensions of the instances of "wgmma".
WGMMA_DIMS = (64, 128)
_LOG2_E = 1.4426950408889634
#: "wgmma" takes the maximum of a query's dot products before it multiplies by the scale, so the scale must be positive.
_SMALLEST_WGMMA_SCALE = 1e-30
_LARGEST_STRIDE = 2**40  # the largest stride in a tensor map, in bytes

_wgmma = Kernel("varlen_attention/attention_wgmma", "attention_wgmma", compile_s=0.7)
_mma = Kernel("varlen_attention/attention_mma", "attention_mma")
_fma = Kernel("varlen_attention/attention_fma", "attention_fma")


def _room(dim: int) -> int:
    return next(room for room in DIMS if room >= dim)


class _Choice(NamedTuple):
    """A variant, and the sizes of its blocks."""

    variant: Variant
    queries: int  # the number of queries that a block processes
    room: int  # the largest head dimension that the instance can process


def _keys(room: int) -> int:
    """Return the keys per tile, so that a block fits in the 99 KiB of shared memory of any GPU from sm_80 on."""
    return 64 if room <= 128 else 32


def _by_mma(dtype: str, dim: int) -> _Choice:
    room, sizes = _room(dim), template.constants(_mma.file)
    keys, queries = _keys(room), sizes["QUERIES"]
    shared = 2 * room * (queries + 4 * keys)  # queries, and two stages of keys and values
    launched = Launched(sizes["MMA_THREADS"], shared)
    return _Choice(_mma.variant(arrays.CUDA_TYPE[dtype], room, keys, launched=launched), queries, room)


def _by_wgmma(dtype: str, dim: int) -> _Choice:
    room, sizes = next(room for room in WGMMA_DIMS if room >= dim), template.constants(_wgmma.file)
    # Two blocks are resident on a multiprocessor. With heads above 64 there is room for one block only.
    warpgroups, blocks = (2, 2) if room == 64 else (3, 1)
    queries = 64 * warpgroups
    # Queries, stages of keys and values, up to 1024 bytes for their alignment, and barriers.
    shared = 2 * room * (queries + 2 * sizes["STAGES"] * sizes["KEYS"]) + 1024 + 56
    arguments = arrays.CUDA_TYPE[dtype], room, warpgroups, blocks, "true"
    return _Choice(_wgmma.variant(*arguments, launched=Launched(128 * warpgroups, shared)), queries, room)


def _by_fma(dtype: str, dim: int, wide: bool) -> _Choice:
    room = _room(dim)
    tile = _keys(room)
    # In float32: queries, a tile of keys or values, and softmax weights. Each row has 16 bytes of padding.
    shared = 4 * tile * (2 * (room + 4) + tile + 4)
    width = 16 if wide else arrays.ITEM_SIZE[dtype]
    launched = Launched(template.constants(_fma.file)["FMA_THREADS"], shared)
    return _Choice(_fma.variant(arrays.CUDA_TYPE[dtype], room, tile, width, launched=launched), tile, room)


_wgmma.at_import = [_by_wgmma("float16", 64).variant.instance]
_wgmma.specialized = [
    _by_wgmma(dtype, room).variant.instance for dtype in ("float16", "bfloat16") for room in WGMMA_DIMS
]
_mma.at_import = [_by_mma("float16", 64).variant.instance]
_mma.specialized = [_by_mma(dtype, room).variant.instance for dtype in ("float16", "bfloat16") for room in DIMS]
# 16-bit instances are compiled at their first use, because only unaligned rows need them.
_fma.specialized = [_by_fma("float32", room, True).variant.instance for room in DIMS]


def _strides(name: str, array: Array) -> tuple[int, int]:
    """Return the strides of tokens and of heads, in bytes. Raises ValueError unless each head is contiguous."""
    if array.strides[2] != 1 and array.shape[2] > 1 and all(size != 0 for size in array.shape):
        check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")
    return array.strides[0] * array.item_size, array.strides[1] * array.item_size


class _Heads(NamedTuple):
    """An array [tokens, heads, dim], and its strides of tokens and of heads in bytes."""

    name: str
    array: Array
    strides: tuple[int, int]

    def map_strides(self) -> tuple[int, int] | None:
        """Return the strides for a tensor map; None if a tensor map cannot have them."""
        # A dimension of size 1 may have any stride.
        only = self.array.shape[2] * self.array.item_size
        found = [
            stride if 0 < stride < _LARGEST_STRIDE else only if size == 1 else 0
            for size, stride in zip(self.array.shape[:2], self.strides, strict=True)
        ]
        return (found[0], found[1]) if found[0] and found[1] else None

    def map(self, tokens: int) -> Any:
        """Return a tensor map whose boxes hold 64 columns of one head for `tokens` tokens."""
        strides = self.map_strides()
        assert strides is not None
        (rows, heads, dim), (between_rows, between_heads) = self.array.shape, strides
        # L2 promotion is 128 bytes. A head may have only 128 bytes, so a larger promotion would fetch another head.
        return tensor_map(
            self.array,
            self.array.dtype,
            (dim, heads, rows, 1),
            (between_heads, between_rows, between_rows),
            (template.constants(_wgmma.file)["COLUMNS"], 1, tokens, 1),
            promotion=128,
        )


def _no_wgmma(inputs: list[_Heads], scale: float, arch: str) -> str:
    """Return why "wgmma" cannot compute a call that "mma" can; empty if it can."""
    if arch != "90a":
        return f"this GPU is of sm_{arch}, not sm_90a"
    dim = inputs[0].array.shape[2]
    if dim > WGMMA_DIMS[-1]:
        return f"heads are of {dim}, more than {WGMMA_DIMS[-1]}"
    for x in inputs:
        if x.array.shape[0] == 0:
            return f"{x.name} has no tokens"
        if x.map_strides() is None:
            return f"{x.name} has strides of {x.strides[0]} and {x.strides[1]} bytes"
    return "" if scale >= _SMALLEST_WGMMA_SCALE else f"scale is below {_SMALLEST_WGMMA_SCALE:g}"


def _launch_wgmma(
    choice: _Choice, grid: tuple[Any, int], inputs: list[_Heads], why: str, fields: dict[str, Any]
) -> None:
    sizes = template.constants(_wgmma.file)
    maps = {f"{x.name}_map": x.map(sizes["BOX" if x.name == "q" else "KEYS"]) for x in inputs}
    maps |= {f"{x.name}_box_map": x.map(sizes["BOX"]) for x in inputs if x.name != "q"}
    launch(choice.variant, grid, why=why, **maps, p=fields)


def _check(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """Raise TypeError or ValueError unless the arrays fit one another."""
    expect_array("q", q, DTYPES, ("tokens", "heads", "dim"))
    tokens, heads, dim = q.shape
    if not (1 <= dim <= MAX_DIM and 1 <= heads <= MAX_HEADS):
        check.fail("q", f"of 1 to {MAX_HEADS} heads of a dim in [1, {MAX_DIM}]", f"{heads} heads of {dim}")
    for name, array in (("k", k), ("v", v)):
        expect_place(name, array, q, "q")
        check.dtype(name, array.dtype, (q.dtype,))
        check.dimensions(name, array.shape, ("memory_tokens", "kv_heads", "dim"))
    memory_tokens, kv_heads, _ = k.shape
    if k.shape[2] != dim or not kv_heads or heads % kv_heads:
        check.fail("k", f"of a divisor of {heads} heads of {dim}, like q", f"{kv_heads} heads of {k.shape[2]}")
    if not same_shape(v, k.shape):
        check.shape("v", v.shape, tuple(k.shape), "[memory_tokens, kv_heads, dim]")
    for name, size in (("q", tokens), ("k", memory_tokens)):
        if size > MAX_TOKENS:
            check.fail(name, f"of at most {MAX_TOKENS} tokens", size)
    expect_place("cu_seqlens_q", cu_seqlens_q, q, "q")
    check.dimensions("cu_seqlens_q", cu_seqlens_q.shape, ("sequences + 1",))
    count = cu_seqlens_q.shape[0]
    if count < 1:
        check.fail("cu_seqlens_q", "of shape [sequences + 1], with a 0 first", "an empty array")
    expect("cu_seqlens_q", cu_seqlens_q, q, "q", ("int32",), (count,), "[sequences + 1]")
    if cu_seqlens_k is not None:
        expect("cu_seqlens_k", cu_seqlens_k, q, "q", ("int32",), (count,), "[sequences + 1]")
    elif memory_tokens != tokens:
        check.fail("k", "of as many tokens as q where there is no cu_seqlens_k", memory_tokens)


def _attended(q: Any, *_: Any, **__: Any) -> Result:
    return Result(q.shape, dtype_name(q), "[tokens, heads, dim]")


@op(
    twin.varlen_attention,
    "attended",
    _attended,
)
def varlen_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray,
    cu_seqlens_k: AnyArray | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Attend within each sequence of a batch without padding.

    Sequence s has the queries cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1. Its keys and values are the same rows of `k`
    and `v`, or with cu_seqlens_k the rows cu_seqlens_k[s] ... cu_seqlens_k[s + 1] - 1. For query i of a sequence and
    its keys j,

        out[i, h] = sum over j of softmax(scale * q[i, h] . k[j, h // group])[j] * v[j, h // group]

    with group = heads / kv_heads, by an online softmax in float32. Queries without keys, and rows after the last
    sequence, get zeros. Only rows of sequences are read. The bits of a result depend on its own sequence alone.

    Args:
        q: [tokens, heads, dim], float32, float16 or bfloat16, dim at most 256, contiguous along the last dimension.
            Tokens and heads may be strided, so q, k and v may be slices of the output of one QKV projection: for
            example, q may be qkv.view(tokens, 3, heads, dim)[:, 0].
        k, v: [memory_tokens, kv_heads, dim], of the dtype of `q`, with strides as `q` may have them; kv_heads divides
            heads.
        cu_seqlens_q: int32 [sequences + 1], the start of each sequence: 0, then sums of lengths, which may be 0. The
            last one is at most `tokens`. Numbers in host memory are checked. On a GPU a check would take a
            synchronization; the kernel stays within the arrays for any numbers.
        cu_seqlens_k: the same for the sequences of keys and values, for cross-attention. None: cu_seqlens_q is used,
            and memory_tokens must equal tokens.
        scale: a factor of the scores; 1 / sqrt(dim) if None.
        causal: True: the last query of a sequence sees all of its keys, and each query sees one key less than the next
            query. Infinities and NaN in values may affect queries that do not see these values.
        out: [tokens, heads, dim], contiguous, to write into and return; it shares no memory with q, k and v.
        variant: "auto", or a kernel by name: "wgmma" (Hopper's tensor cores; needs what "mma" needs, dim of at most 128
            and a positive scale), "mma" (tensor cores; needs a 16-bit dtype, aligned rows and dim a multiple of 8) or
            "fma" (products in float32, for all arrays). "wgmma" and "mma" round the softmax weights to the dtype before
            the multiplication by the values. "auto" takes the first of the three variants that can compute the call.
            The lengths do not affect the choice.

    Returns:
        [tokens, heads, dim] of the dtype of `q`, in the library and on the device of `q`. A NaN among the scores of a
        query makes its result NaN. Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The semantics are as in FlashAttention's `flash_attn_varlen_func`. That function also takes the largest lengths,
    which the grid of this function does not need. The layout is as in FasterTransformer's and Effective Transformer's
    batches without padding.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k)
    tokens, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else check.number("scale", scale)
    inputs = [_Heads(name, array, _strides(name, array)) for name, array in (("q", q), ("k", k), ("v", v))]
    out = outputs(out, q, "q", _attended(q))
    if q.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if tokens == 0:
        return out
    wide = min(array.alignment for array in (q, k, v, out)) == 16 and dim * q.item_size % 16 == 0
    wide = wide and all(stride % 16 == 0 for x in inputs for stride in x.strides)
    none = "there is none for float32" if q.item_size == 4 else ""
    none = none or ("" if wide else "there is none for rows that are not 16-byte aligned")
    if variant == "mma" and none:
        check.fail("variant", "'auto' or 'fma' here", f"'mma': {none}")
    no_wgmma = ""
    if variant in ("auto", "wgmma"):
        no_wgmma = none or _no_wgmma(inputs, scale, q.gpu.arch)
    if variant == "wgmma" and no_wgmma:
        check.fail("variant", "'auto', 'mma' or 'fma' here", f"'wgmma': {no_wgmma}")
    # The choice must not depend on the lengths or the batch, so that the bits of a result depend on its own sequence
    # alone.
    is_wgmma = variant in ("auto", "wgmma") and not no_wgmma
    if none or variant == "fma":
        choice = _by_fma(q.dtype, dim, wide)
        why = "float32" if q.item_size == 4 else "rows that are not 16-byte aligned"
        why = f"{why}: fma, the slow general kernel (16 bits in aligned rows take tensor cores)"
    else:
        choice = _by_wgmma(q.dtype, dim) if is_wgmma else _by_mma(q.dtype, dim)
        why = (
            "wgmma, Hopper's tensor cores"
            if is_wgmma
            else f"mma, tensor cores of every GPU, as wgmma cannot: {no_wgmma}"
        )
        why = f"16 bits in aligned rows: {why}"
    why = f"{asked(variant) or why}; heads of {dim} in room for {choice.room}, {choice.queries} queries a block"
    grid = tokens // choice.queries + cu_seqlens_q.shape[0], heads
    fields = {
        **{x.name: x.array for x in inputs},
        "out": out,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        **{f"{x.name}_strides": x.strides for x in inputs},
        "tokens": tokens,
        "memory_tokens": k.shape[0],
        "sequences": cu_seqlens_q.shape[0] - 1,
        "heads": heads,
        "group": heads // k.shape[1],
        "dim": dim,
        "causal": causal,
        "scale": scale * _LOG2_E,
    }
    if is_wgmma:
        _launch_wgmma(choice, grid, inputs, why, fields)
    else:
        launch(choice.variant, grid, why=why, **fields)
    return out
