"""Self-attention or cross-attention over sequences of different lengths without padding."""

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
#: "wgmma" (Hopper only) and "mma" use tensor cores. "fma" computes products in float32, for all dtypes and alignments.
VARIANTS = ("auto", "wgmma", "mma", "fma")
MAX_DIM = 256
MAX_HEADS = 2**16 - 1
MAX_TOKENS = 2**31 - 2**16

#: Padded head dimensions.
DIMS = (
    32,  # all-MiniLM-L6, BGE-small, E5-small
    64,  # BERT, RoBERTa, DistilBERT, XLM-R, BART, Marian, BGE, E5
    128,  # encoders made of Llama, Qwen and Mistral
    256,  # Gemma
)
WGMMA_DIMS = (64, 128)
_LOG2_E = 1.4426950408889634
#: "wgmma" takes the maximum of the scores before it multiplies them by the scale, so the scale must be positive.
_SMALLEST_WGMMA_SCALE = 1e-30
_LARGEST_STRIDE = 2**40  # bytes in a tensor map

_wgmma = Kernel("varlen_attention/attention_wgmma", "attention_wgmma", compile_s=0.7)
_mma = Kernel("varlen_attention/attention_mma", "attention_mma")
_fma = Kernel("varlen_attention/attention_fma", "attention_fma")


def _padded_dim(dim: int) -> int:
    return next(padded_dim for padded_dim in DIMS if padded_dim >= dim)


class _Config(NamedTuple):
    variant: Variant
    queries: int  # queries of a block
    padded_dim: int


def _keys(padded_dim: int) -> int:
    """Return the keys per tile, so that a block needs at most 99 KiB of shared memory, as every GPU from sm_80 has."""
    return 64 if padded_dim <= 128 else 32


def _by_mma(dtype: str, dim: int) -> _Config:
    padded_dim, sizes = _padded_dim(dim), template.constants(_mma.file)
    keys, queries = _keys(padded_dim), sizes["QUERIES"]
    shared = 2 * padded_dim * (queries + 4 * keys)  # queries, and two stages of keys and values
    launched = Launched(sizes["MMA_THREADS"], shared)
    return _Config(_mma.variant(arrays.CUDA_TYPE[dtype], padded_dim, keys, launched=launched), queries, padded_dim)


def _by_wgmma(dtype: str, dim: int) -> _Config:
    padded_dim, sizes = next(x for x in WGMMA_DIMS if x >= dim), template.constants(_wgmma.file)
    # A multiprocessor holds two blocks with heads of up to 64 elements, or one block with larger heads.
    warpgroups, blocks = (2, 2) if padded_dim == 64 else (3, 1)
    queries = 64 * warpgroups
    # Shared memory holds queries, stages of keys and values, 1024 bytes for alignment, and 56 bytes of barriers.
    shared = 2 * padded_dim * (queries + 2 * sizes["STAGES"] * sizes["KEYS"]) + 1024 + 56
    arguments = arrays.CUDA_TYPE[dtype], padded_dim, warpgroups, blocks, "true"
    return _Config(_wgmma.variant(*arguments, launched=Launched(128 * warpgroups, shared)), queries, padded_dim)


def _by_fma(dtype: str, dim: int, wide: bool) -> _Config:
    padded_dim = _padded_dim(dim)
    tile = _keys(padded_dim)
    # Shared memory holds queries, keys or values, and softmax weights, all in float32. Each row has 16 bytes of
    # padding.
    shared = 4 * tile * (2 * (padded_dim + 4) + tile + 4)
    width = 16 if wide else arrays.ITEM_SIZE[dtype]
    launched = Launched(template.constants(_fma.file)["FMA_THREADS"], shared)
    return _Config(_fma.variant(arrays.CUDA_TYPE[dtype], padded_dim, tile, width, launched=launched), tile, padded_dim)


_wgmma.at_import = [_by_wgmma("float16", 64).variant.instance]
_wgmma.specialized = [
    _by_wgmma(dtype, padded_dim).variant.instance for dtype in ("float16", "bfloat16") for padded_dim in WGMMA_DIMS
]
_mma.at_import = [_by_mma("float16", 64).variant.instance]
_mma.specialized = [_by_mma(dtype, dim).variant.instance for dtype in ("float16", "bfloat16") for dim in DIMS]
# Only unaligned rows need 16-bit instances of this kernel. They are compiled at first use.
_fma.specialized = [_by_fma("float32", dim, True).variant.instance for dim in DIMS]


def _strides(name: str, array: Array) -> tuple[int, int]:
    """Return the strides of tokens and heads in bytes."""
    if array.strides[2] != 1 and array.shape[2] > 1 and all(size != 0 for size in array.shape):
        check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")
    return array.strides[0] * array.item_size, array.strides[1] * array.item_size


class _Heads(NamedTuple):
    name: str
    array: Array
    strides: tuple[int, int]

    def map_strides(self) -> tuple[int, int] | None:
        """Return the strides for a tensor map, or None if a tensor map cannot have such strides."""
        # A dimension of size 1 may have any stride.
        row_bytes = self.array.shape[2] * self.array.item_size
        found = [
            stride if 0 < stride < _LARGEST_STRIDE else row_bytes if size == 1 else 0
            for size, stride in zip(self.array.shape[:2], self.strides, strict=True)
        ]
        return (found[0], found[1]) if found[0] and found[1] else None

    def map(self, tokens: int) -> Any:
        """Return a tensor map. Each box holds 64 columns of one head for `tokens` tokens."""
        strides = self.map_strides()
        assert strides is not None
        (rows, heads, dim), (between_rows, between_heads) = self.array.shape, strides
        # A head may have only 128 bytes, so a larger L2 promotion would fetch another head.
        return tensor_map(
            self.array,
            self.array.dtype,
            (dim, heads, rows, 1),
            (between_heads, between_rows, between_rows),
            (template.constants(_wgmma.file)["COLUMNS"], 1, tokens, 1),
            promotion=128,
        )


def _no_wgmma(inputs: list[_Heads], scale: float, arch: str) -> str:
    """Return why "wgmma" cannot compute a call that "mma" can compute; "" if it can."""
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
    config: _Config, grid: tuple[Any, int], inputs: list[_Heads], why: str, fields: dict[str, Any]
) -> None:
    sizes = template.constants(_wgmma.file)
    maps = {f"{x.name}_map": x.map(sizes["BOX" if x.name == "q" else "KEYS"]) for x in inputs}
    maps |= {f"{x.name}_box_map": x.map(sizes["BOX"]) for x in inputs if x.name != "q"}
    launch(config.variant, grid, why=why, **maps, p=fields)


def _check(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
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

    Sequence s has the queries cu_seqlens_q[s] ... cu_seqlens_q[s + 1] - 1. In the same way, cu_seqlens_k gives the
    keys and values of each sequence. For query i and the keys j of the same sequence,

        out[i, h] = sum over j of softmax(scale * q[i, h] . k[j, h // group])[j] * v[j, h // group]

    Here group = heads / kv_heads. Queries without keys, and rows after the last sequence, get zeros. The bits of a
    result depend on its own sequence alone.

    Args:
        q: [tokens, heads, dim], float32, float16 or bfloat16, dim at most 256, contiguous along dim. Tokens and heads
            may be strided, as in slices of a QKV projection.
        k, v: [memory_tokens, kv_heads, dim], of the dtype of `q`, strided like `q`; kv_heads divides heads.
        cu_seqlens_q: int32 [sequences + 1]: 0, then running sums of the lengths, at most `tokens`. Values are checked
            in host memory only. On a GPU the kernel stays within the arrays for any values.
        cu_seqlens_k: the same for keys and values (cross-attention); None: cu_seqlens_q, and memory_tokens is tokens.
        scale: a factor of the scores; 1 / sqrt(dim) if None.
        causal: True: the last query of a sequence attends to all keys, and each earlier query to one key less than the
            next query. Infinities and NaN in values may affect queries that do not attend to them.
        out: [tokens, heads, dim], contiguous, written and returned; it shares no memory with q, k and v.
        variant: "auto" (the first that fits, whatever the lengths), or a kernel by name: "wgmma" (Hopper; dim at most
            128, a positive scale, and all that "mma" needs), "mma" (tensor cores; a 16-bit dtype, aligned rows, dim a
            multiple of 8) or "fma" (products in float32). "wgmma" and "mma" round the softmax weights to the dtype.

    Returns:
        [tokens, heads, dim] of the dtype of `q`. A NaN among the scores of a query makes its result NaN.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    FlashAttention's `flash_attn_varlen_func` has the same semantics, and also takes the largest lengths.
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
    no_tensor_cores = "there is none for float32" if q.item_size == 4 else ""
    no_tensor_cores = no_tensor_cores or ("" if wide else "there is none for rows that are not 16-byte aligned")
    if variant == "mma" and no_tensor_cores:
        check.fail("variant", "'auto' or 'fma' here", f"'mma': {no_tensor_cores}")
    no_wgmma = ""
    if variant in ("auto", "wgmma"):
        no_wgmma = no_tensor_cores or _no_wgmma(inputs, scale, q.gpu.arch)
    if variant == "wgmma" and no_wgmma:
        check.fail("variant", "'auto', 'mma' or 'fma' here", f"'wgmma': {no_wgmma}")
    # The choice of the kernel does not depend on the batch, so that the bits of a result depend only on its own
    # sequence.
    is_wgmma = variant in ("auto", "wgmma") and not no_wgmma
    if no_tensor_cores or variant == "fma":
        config = _by_fma(q.dtype, dim, wide)
        why = "float32" if q.item_size == 4 else "rows that are not 16-byte aligned"
        why = f"{why}: fma, the slow general kernel (16 bits in aligned rows take tensor cores)"
    else:
        config = _by_wgmma(q.dtype, dim) if is_wgmma else _by_mma(q.dtype, dim)
        why = (
            "wgmma, Hopper's tensor cores"
            if is_wgmma
            else f"mma, tensor cores of every GPU, as wgmma cannot: {no_wgmma}"
        )
        why = f"16 bits in aligned rows: {why}"
    why = f"{asked(variant) or why}; heads of {dim} in room for {config.padded_dim}, {config.queries} queries a block"
    grid = tokens // config.queries + cu_seqlens_q.shape[0], heads
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
        _launch_wgmma(config, grid, inputs, why, fields)
    else:
        launch(config.variant, grid, why=why, **fields)
    return out
