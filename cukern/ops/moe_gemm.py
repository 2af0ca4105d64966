"""Grouped products of a mixture of experts: each expert's weights times the rows of its tokens."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from cukern.reference import moe_gemm as twin
from cukern.reference.moe_gemm import BLOCK
from cukern.reference.quantization import MXFP4_GROUP, NVFP4_GROUP
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.cuda import runtime
from cukern.runtime.kernel import Kernel, Variant, arch_of_device, multiprocessors
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES, encode

__all__ = ["moe_gemm", "moe_gemm_batched"]

DTYPES = ("bfloat16", "float16")
#: Numbers of e4m3; CuPy has no such dtype, and gives their bytes.
FP8_DTYPES = ("float8_e4m3fn", "uint8")
E8M0_DTYPES = ("float8_e8m0fnu", "uint8")
VARIANTS = ("auto", "wgmma", "mma", "stream")
#: Of rows, n and k: the kernels count them in 31 bits, and round up to whole tiles.
MAX_COUNT = 2**31 - 2**12
MAX_EXPERTS = 4096


class _Group(NamedTuple):
    """What the shapes and the dtypes of a call say."""

    is_batched: bool
    rows: int  # of the product; of each expert, if batched
    tokens: int  # rows of `a`
    experts: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    weights: str  # "16", "fp8", "mxfp4" or "nvfp4"
    a_scale: str  # "", "block", "row" or "one"
    b_scale: str  # "", "block", "column", "one" or "group"
    activation: int
    is_gathered: bool
    offset_words: int
    #: That a group has at most, as far as the host can tell; a hint.
    expected_rows: int

    @property
    def all_rows(self) -> int:
        return self.rows * self.experts if self.is_batched else self.rows

    def tiles(self, rows: int) -> int:
        """Tiles of so many rows that there are at most, each group's last one not full."""
        if self.is_batched:
            return self.experts * -(-self.rows // rows)
        used = min(self.experts, self.rows)
        return (self.rows + used * (rows - 1)) // rows

    @property
    def columns(self) -> int:
        return self.n // 2 if self.activation else self.n

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.experts, self.rows, self.columns) if self.is_batched else (self.rows, self.columns)


_Kind = tuple[str, tuple[int, ...]]  # dtype and shape


@functools.lru_cache(maxsize=4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    wanted = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return 0 in shape or all(a == b or size == 1 for size, a, b in zip(shape, strides, wanted, strict=True))


def _kind(name: str, array: Any, library: arrays.Library, device: int | None) -> _Kind:
    """The dtype and the shape of an array that is where `a` is, and contiguous."""
    if arrays.library_of(array) is not library or library.device(array) != device:
        arrays.same_place(name, array, "a", library, device)
    shape = tuple(array.shape)
    if not _is_contiguous(shape, library.strides(array)):
        arrays.contiguous(name, array, library)
    return library.dtype(array), shape


def _expect(name: str, kind: _Kind, dtypes: tuple[str, ...], shape: tuple[int, ...], symbols: str) -> None:
    check.dtype(name, kind[0], dtypes)
    check.shape(name, kind[1], shape, symbols)


def _fp8_scales(
    is_batched: bool, rows: tuple[int, ...], b_shape: tuple[int, ...], a_scale: _Kind | None, b_scale: _Kind | None
) -> tuple[str, str]:
    """How `a`, of so many rows, and `b` of 8 bits are scaled."""
    for name, kind in (("a_scale", a_scale), ("b_scale", b_scale)):
        if kind is None:
            check.fail(name, "an array with FP8", None, TypeError)
        check.dtype(name, kind[0], ("float32",))
    assert a_scale is not None and b_scale is not None
    experts, n, k = b_shape
    blocks = -(-k // BLOCK)
    symbol = "experts, max_tokens" if is_batched else "tokens"
    if len(b_scale[1]) == 3:
        shape = experts, -(-n // BLOCK), blocks
        check.shape("b_scale", b_scale[1], shape, f"[experts, ceil(n / {BLOCK}), ceil(k / {BLOCK})]")
        check.shape("a_scale", a_scale[1], (*rows, blocks), f"[{symbol}, ceil(k / {BLOCK})], as b_scale is by blocks,")
        return "block", "block"
    if b_scale[1] not in ((experts,), (experts, n)):
        wanted = f"of shape [experts] = {[experts]}, [experts, n] = {[experts, n]} or by blocks"
        check.fail("b_scale", wanted, list(b_scale[1]))
    if a_scale[1] not in ((1,), rows, (*rows, 1)):
        wanted = f"of shape [1], [{symbol}] = {list(rows)} or [{symbol}, 1], as b_scale is not by blocks"
        check.fail("a_scale", wanted, list(a_scale[1]))
    return "one" if a_scale[1] == (1,) else "row", "one" if len(b_scale[1]) == 1 else "column"


def _fp4_weights(b_shape: tuple[int, ...], b_scale: _Kind | None, b_global_scale: _Kind | None, k: int) -> str:
    """Which format weights of 4 bits have."""
    if b_scale is None:
        check.fail("b_scale", "an array with weights of 4 bits", None, TypeError)
    experts, n, _ = b_shape
    shapes = (experts, n, k // MXFP4_GROUP), (experts, n, k // NVFP4_GROUP)
    if b_scale[1] == shapes[0]:
        check.dtype("b_scale", b_scale[0], E8M0_DTYPES)
        if b_global_scale is not None:
            check.fail("b_global_scale", "None with MXFP4", "an array")
        return "mxfp4"
    if b_scale[1] == shapes[1]:
        check.dtype("b_scale", b_scale[0], FP8_DTYPES)
        if b_global_scale is None:
            check.fail("b_global_scale", "an array with NVFP4", None, TypeError)
        _expect("b_global_scale", b_global_scale, ("float32",), (experts,), "[experts]")
        return "nvfp4"
    wanted = f"of shape [experts, n, k / {MXFP4_GROUP}] = {list(shapes[0])} (MXFP4) or "
    wanted += f"[experts, n, k / {NVFP4_GROUP}] = {list(shapes[1])} (NVFP4)"
    check.fail("b_scale", wanted, list(b_scale[1]))


@functools.lru_cache(maxsize=4096)
def _group(
    is_batched: bool,
    a: _Kind,
    b: _Kind,
    offsets: _Kind,
    a_scale: _Kind | None,
    b_scale: _Kind | None,
    b_global_scale: _Kind | None,
    row_token: _Kind | None,
    activation: str | None,
    out_dtype: str | None,
    out: _Kind | None,
    expected_m: int | None,
) -> _Group:
    """Check the arguments against each other, by their dtypes and shapes."""
    (dtype, a_shape), (b_dtype, b_shape) = a, b
    is_fp8, k = dtype not in DTYPES, a_shape[-1]
    check.dtype("b", b_dtype, FP8_DTYPES if is_fp8 else (dtype, "uint8"))
    if len(b_shape) != 3:
        check.dimensions("b", b_shape, ("experts", "n", "k"))
    experts, n, _ = b_shape
    is_fp4 = not is_fp8 and b_dtype == "uint8"
    wanted = (experts, n, k // 2 if is_fp4 else k)
    check.shape("b", b_shape, wanted, "[experts, n, k / 2]" if is_fp4 else "[experts, n, k]")
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("b", f"of at least one and at most {MAX_EXPERTS} experts", experts)
    number = activations.number(activation, optional=True)
    multiple = 16 if number else 8
    if n % multiple or not 0 < n <= MAX_COUNT:
        why = " (with an activation, gate and up)" if number else ""
        check.fail("b", f"of n that is a positive multiple of {multiple}{why}", n)
    # Rows of weights are whole units of 16 bytes.
    multiple = 32 if is_fp4 else 16 if is_fp8 else 8
    if k % multiple or not 0 < k <= MAX_COUNT:
        check.fail("a", f"of k that is a positive multiple of {multiple}", k)
    tokens, rows = a_shape[-2], a_shape[-2]
    if is_batched:
        check.shape("a", a_shape, (experts, tokens, k), "[experts, max_tokens, k]")
        _expect("expert_num_tokens", offsets, ("int32",), (experts,), "[experts]")
    else:
        _expect("expert_offsets", offsets, ("int32", "int64"), (experts + 1,), "[experts + 1]")
    if row_token is not None:
        check.dtype("row_token", row_token[0], ("int32",))
        if len(row_token[1]) != 1:
            check.dimensions("row_token", row_token[1], ("rows",))
        rows = row_token[1][0]
    if max(rows, tokens) * (experts if is_batched else 1) > MAX_COUNT:
        check.fail("a", f"of at most {MAX_COUNT} rows", list(a_shape))
    if row_token is not None and rows and not tokens:
        check.fail("a", "of at least one token, as row_token has rows", list(a_shape))
    weights, scales = "16", ("", "")
    if is_fp8:
        weights, scales = "fp8", _fp8_scales(is_batched, a_shape[:-1], b_shape, a_scale, b_scale)
    elif a_scale is not None:
        check.fail("a_scale", f"None with {dtype} a", "an array")
    if is_fp4:
        weights, scales = _fp4_weights(b_shape, b_scale, b_global_scale, k), ("", "group")
    elif b_global_scale is not None:
        check.fail("b_global_scale", "None without weights of 4 bits", "an array")
    if weights == "16" and b_scale is not None:
        check.fail("b_scale", f"None with {b_dtype} b", "an array")
    if out_dtype is None:
        out_dtype = dtype if not is_fp8 else out[0] if out is not None and out[0] in DTYPES else "bfloat16"
    check.one_of("out_dtype", out_dtype, DTYPES if is_fp8 else (dtype,))
    offset_words = 2 if offsets[0] == "int64" else 1
    is_gathered = row_token is not None
    if expected_m is not None:
        expected_rows = check.integer("expected_m", expected_m, 0)
    else:
        expected_rows = rows if is_batched else -(-rows // experts)
        if expected_rows > _STREAM_MEAN:
            expected_rows = max(expected_rows, _STREAM_ROWS + 1)
    expected_rows = min(max(expected_rows, 1), MAX_COUNT)
    sizes = is_batched, rows, tokens, experts, n, k
    group = _Group(*sizes, dtype, out_dtype, weights, *scales, number, is_gathered, offset_words, expected_rows)
    if out is not None:
        half = " / 2" if number else ""
        symbols = f"[experts, max_tokens, n{half}]" if is_batched else f"[rows, n{half}]"
        _expect("out", out, (out_dtype,), group.out_shape, symbols)
    return group


_SHARED_PER_BLOCK = 97  # the driver's attribute
#: "stream" is taken up to so many rows that a group is expected to have at most, or on average: of groups that all have
#: as many it is the fastest for two, and of those with up to four, most of which have fewer, too.
_STREAM_ROWS, _STREAM_MEAN = 4, 2
#: Without an instruction that converts FP8: what "stream" does per weight and row must be little.
_NO_FP8_ARCHS = ("80", "86", "87")
_MAX_GRID_Y = 2**16 - 1

#: The fields of GemmParams, and of MappedGemmParams, whose maps are aligned to 64 bytes.
_PARAMS = "8P10i"
_MAPPED_PARAMS = f"{_PARAMS}24x{TENSOR_MAP_BYTES}s{TENSOR_MAP_BYTES}s"
_wgmma = Kernel("moe_gemm", "gemm_wgmma", _MAPPED_PARAMS, compile_s=1.5)
_fp8_wgmma = Kernel("moe_gemm", "gemm_fp8_wgmma", _MAPPED_PARAMS)
_mma = Kernel("moe_gemm", "gemm_mma", _PARAMS)
_stream = Kernel("moe_gemm", "gemm_stream", _PARAMS)

_FORMATS = {"16": "PLAIN", "fp8": "FP8", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}


class _Map(NamedTuple):
    """What `tensor_map.encode` takes, but for the address."""

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    promotion: int = 256


class _Plan(NamedTuple):
    """A kernel, how it is launched, and what of its parameters is known ahead."""

    kernel: Variant
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    sizes: tuple[int, ...]
    b_map: _Map | None = None
    a_map: _Map | None = None


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _sizes(group: _Group, together: int = 0) -> tuple[int, ...]:
    """GemmParams from `rows` on."""
    sizes = group.all_rows, group.tokens, group.experts, group.n, group.k, group.offset_words
    max_tokens = group.rows if group.is_batched else 0
    return *sizes, max_tokens, group.a_scale == "row", group.b_scale == "column", together


# --- 16 bits, by warpgroups -----------------------------------------------------------------------------

_WEIGHTS = 128  # of a tile: two warpgroups have 64 each
_DEPTH = 64  # numbers of 16 bits in a stage
_BLOCK_SHARED_BYTES, _ALL_SHARED_BYTES = 227 << 10, 228 << 10  # of Hopper: a block's, a multiprocessor's
_RESERVED_BYTES = 1 << 10  # for the system, in each block
#: What a block can have, by architecture; sm_86 and 89 are like sm_120a.
_SHARED_BYTES = {"80": 163 << 10, "90a": 227 << 10, "100a": 227 << 10, "120a": 99 << 10}


class _Wgmma(NamedTuple):
    """Template arguments of `gemm_wgmma`, but for the type and the activation."""

    tokens: int  # 8, 16, 32, 64, 128 or 288
    stages: int = 0  # 0: as many as fit
    cluster: int = 1  # or 2
    blocks: int = 1  # of a multiprocessor
    is_streamed: bool = False
    together: int = 8  # no template argument

    @property
    def box(self) -> int:
        return 32 if self.tokens >= 64 else self.tokens // 2 if self.tokens >= 16 else 8

    @property
    def threads(self) -> int:
        return 256 + (128 if self.tokens > 128 else 32)

    @property
    def shared_bytes(self) -> int:
        stage = (_WEIGHTS + self.tokens) * _DEPTH * 2
        staged_rows = 32 if self.tokens > 128 else 64 if self.tokens == 128 else 16 if self.tokens >= 16 else 8
        staging = 2 * 2 * staged_rows * _DEPTH * 2
        barriers = -(-(16 * self.stages + 8) // 16) * 16 + 16 * self.stages
        # The tiles begin at a multiple of 1024 bytes.
        return 1024 + self.stages * stage + staging + barriers

    @property
    def with_stages(self) -> _Wgmma:
        if self.stages:
            return self
        most = min(_BLOCK_SHARED_BYTES, _ALL_SHARED_BYTES // self.blocks - _RESERVED_BYTES)
        stages = 1
        while self._replace(stages=stages + 1).shared_bytes <= most:
            stages += 1
        return self._replace(stages=stages)

    def variant(self, dtype: str, activation: int) -> Variant:
        arguments = *self[:4], _flag(self.is_streamed)
        most = _BLOCK_SHARED_BYTES
        return _wgmma.variant(arrays.CUDA_TYPE[dtype], activation, *arguments, max_shared_bytes=most)


#: By the rows that a group is likely to have at most. Few of them: weights are all that is read, each once.
_WGMMA_FORMS = (
    (8, _Wgmma(8, blocks=3, is_streamed=True)),
    (16, _Wgmma(16, blocks=2, is_streamed=True)),
    (32, _Wgmma(32, blocks=2, is_streamed=True)),
    (64, _Wgmma(64, cluster=2, blocks=2, is_streamed=True)),
    (128, _Wgmma(128, cluster=2)),
    (MAX_COUNT, _Wgmma(288, cluster=2)),
)
_DEVIATIONS = 2.5  # of random routing: so far above the mean few groups are
_TOKENS_OF_TILES = 256  # of the largest form, where a group has several


def _wgmma_form(group: _Group, count: int) -> _Wgmma:
    """`count`: of multiprocessors."""
    rows = group.expected_rows
    likely = rows if group.is_batched else rows + _DEVIATIONS * rows**0.5
    form = next(form for most, form in _WGMMA_FORMS if likely <= most)
    # Large tiles read the least, but small ones can be spread over all multiprocessors.
    tiles = group.experts * -(-rows // _TOKENS_OF_TILES) * -(-group.n // 128)
    if form is _WGMMA_FORMS[-1][1] and 2 * tiles <= count:
        form = _WGMMA_FORMS[-2][1]
    return form.with_stages


def _wgmma_plan(group: _Group, count: int) -> _Plan:
    form = _wgmma_form(group, count)
    experts, n, k, rows = group.experts, group.n, group.k, group.all_rows
    strips = -(-n // (form.cluster * _WEIGHTS))
    clusters = min(group.tiles(min(form.tokens, _TOKENS_OF_TILES)) * strips, count * form.blocks // form.cluster)
    # What is read once in all should be fetched as it is asked for (3% faster on an H200).
    promotion = 128 if form.is_streamed else 256
    b_map = _Map(
        group.dtype, (k, n, experts, 1), (k * 2, n * k * 2, experts * n * k * 2), (_DEPTH, _WEIGHTS, 1, 1), promotion
    )
    if group.activation:
        # Rows of 8 gates, their 8 ups, the next 8 gates, and so on.
        b_map = _Map(
            group.dtype,
            (k, 8, 2, n // 16, experts),
            (k * 2, n // 2 * k * 2, 8 * k * 2, n * k * 2),
            (_DEPTH, 8, 2, _WEIGHTS // 16, 1),
            promotion,
        )
    return _Plan(
        form.variant(group.dtype, group.activation),
        (clusters * form.cluster, 1, 1),
        (form.threads, 1, 1),
        form.shared_bytes,
        _sizes(group, form.together),
        b_map,
        _Map(group.dtype, (k, rows, 1, 1), (k * 2, rows * k * 2, rows * k * 2), (_DEPTH, form.box, 1, 1), promotion),
    )


# --- 8 bits, by warpgroups ------------------------------------------------------------------------------

_FP8_THREADS, _FP8_BOX, _FP8_COLUMNS = 384, 64, 128
#: By the rows of a tile: stages of them and of weights, 192 KiB in all.
_FP8_STAGES = {256: 4, 128: 6}


class _Fp8Wgmma(NamedTuple):
    """Template arguments of `gemm_fp8_wgmma`, but for the type, the scales and the activation."""

    tokens: int  # 128 or 256
    cluster: int  # 1 or 2

    def variant(self, out_dtype: str, is_by_blocks: bool, activation: int) -> Variant:
        form = self.tokens, self.cluster, _FP8_STAGES[self.tokens], _flag(is_by_blocks)
        most = _BLOCK_SHARED_BYTES
        return _fp8_wgmma.variant(arrays.CUDA_TYPE[out_dtype], *form, activation, max_shared_bytes=most)


def _fp8_strips(group: _Group) -> int:
    return -(-group.columns // (_FP8_COLUMNS // 2 if group.activation else _FP8_COLUMNS))


def _fp8_form(group: _Group, count: int) -> _Fp8Wgmma:
    rows, strips = group.expected_rows, _fp8_strips(group)
    # The blocks of a cluster share rows; an odd strip leaves one without work.
    cluster = 2 if rows > _FP8_BOX and (strips % 2 == 0 or strips >= 16) else 1

    def cost(tokens: int) -> float:
        tiles = -(-rows // tokens) * group.experts * -(-strips // cluster)
        boxes = -(-min(rows, tokens) // _FP8_BOX)
        return -(-tiles // max(count // cluster, 1)) * max(boxes, 1.2)

    return _Fp8Wgmma(128 if rows <= 128 or cost(128) < 0.9 * cost(256) else 256, cluster)


def _fp8_wgmma_plan(group: _Group, count: int) -> _Plan:
    form, rows = _fp8_form(group, count), group.all_rows
    experts, n, k = group.experts, group.n, group.k
    tiles = group.tiles(form.tokens) * -(-_fp8_strips(group) // form.cluster)
    columns = _FP8_COLUMNS // 2 if group.activation else _FP8_COLUMNS
    return _Plan(
        form.variant(group.out_dtype, group.b_scale == "block", group.activation),
        (form.cluster * min(max(count // form.cluster, 1), tiles), 1, 1),
        (_FP8_THREADS, 1, 1),
        _BLOCK_SHARED_BYTES,
        _sizes(group),
        _Map("uint8", (k, n, experts, 1), (k, n * k, experts * n * k), (BLOCK, columns, 1, 1)),
        _Map("uint8", (k, rows, 1, 1), (k, rows * k, rows * k), (BLOCK, _FP8_BOX, 1, 1)),
    )


# --- every GPU ------------------------------------------------------------------------------------------


class _Mma(NamedTuple):
    """Template arguments of `gemm_mma` that say how work is cut."""

    tokens: int  # of a block, and weights
    weights: int
    token_warps: int
    weight_warps: int
    step: int  # along k
    stages: int  # at most
    blocks: int  # of a multiprocessor

    @property
    def threads(self) -> int:
        return self.token_warps * self.weight_warps * 32


#: By what the weights are, for few tokens and many.
_MMA_4 = (
    _Mma(16, 256, 1, 4, 128, 3, 3),
    _Mma(32, 256, 1, 4, 128, 4, 2),
    _Mma(64, 256, 1, 8, 128, 5, 1),
    _Mma(128, 128, 2, 4, 128, 5, 1),
)
_MMA_FORMS = {
    "16": (
        _Mma(16, 128, 1, 4, 64, 4, 3),
        _Mma(32, 128, 1, 4, 64, 4, 2),
        _Mma(64, 256, 1, 8, 64, 5, 1),
        _Mma(128, 256, 2, 4, 64, 4, 1),
    ),
    "fp8": (
        _Mma(16, 128, 1, 4, 128, 4, 3),
        _Mma(32, 128, 1, 4, 128, 3, 3),
        _Mma(64, 128, 2, 4, 128, 5, 1),
        _Mma(128, 128, 2, 4, 128, 5, 1),
    ),
    "mxfp4": _MMA_4,
    "nvfp4": _MMA_4,
}
#: MXFP4 with float16 has sums over 32 besides, which take registers.
_MMA_MXFP4_FLOAT16 = (*_MMA_4[:3], _Mma(128, 128, 4, 2, 128, 5, 1))


def _stage_bytes(form: _Mma, weights: str, is_by_blocks: bool) -> int:
    """`MmaTile<...>::BYTES`."""
    is_fp4 = weights in ("mxfp4", "nvfp4")
    a_line = form.step if weights == "fp8" else form.step * 2
    b_line = form.step // 2 if is_fp4 else a_line
    scales = 0
    if is_fp4:
        groups = form.step // (MXFP4_GROUP if weights == "mxfp4" else NVFP4_GROUP)
        scales = form.weights * (groups // 4 + 1) * 4
    elif is_by_blocks:
        scales = (form.tokens + form.weights // 8) * 4
    return -(-(form.tokens * a_line + form.weights * b_line + scales) // 128) * 128


def _fit(form: _Mma, weights: str, is_by_blocks: bool, most: int) -> _Mma:
    """With as many stages as fit, where a block can have `most` bytes of shared memory."""
    each = _stage_bytes(form, weights, is_by_blocks)

    def room(blocks: int) -> int:
        # The system's part, and as much for what the kernel has before what is aligned to that.
        return (most + _RESERVED_BYTES) // blocks - 2 * _RESERVED_BYTES

    blocks = form.blocks
    while blocks > 1 and min(form.stages, 3) * each > room(blocks):
        blocks -= 1
    if weights == "16" and room(blocks) // each < 3:
        form = form._replace(step=form.step // 2, stages=form.stages * 2)
        each //= 2
    return form._replace(stages=min(form.stages, room(blocks) // each), blocks=blocks)


def _mma_variant(form: _Mma, group: _Group) -> Variant:
    is_by_blocks = group.b_scale == "block"
    arguments = _FORMATS[group.weights], *form, group.activation, _flag(is_by_blocks)
    shared_bytes = form.stages * _stage_bytes(form, group.weights, is_by_blocks)
    return _mma.variant(arrays.CUDA_TYPE[group.out_dtype], *arguments, max_shared_bytes=shared_bytes)


def _mma_plan(group: _Group, most_shared_bytes: int) -> _Plan:
    is_special = group.weights == "mxfp4" and group.dtype == "float16"
    forms = _MMA_MXFP4_FLOAT16 if is_special else _MMA_FORMS[group.weights]
    form = next((form for form in forms if group.expected_rows <= form.tokens), forms[-1])
    form = _fit(form, group.weights, group.b_scale == "block", most_shared_bytes)
    kernel = _mma_variant(form, group)
    blocks = group.tiles(form.tokens) * -(-group.n // form.weights)
    return _Plan(kernel, (blocks, 1, 1), (form.threads, 1, 1), kernel.max_shared_bytes, _sizes(group))


# --- few rows of each expert ----------------------------------------------------------------------------


class _Stream(NamedTuple):
    """Template arguments of `gemm_stream` that say how work is cut."""

    pairs: int  # of rows of weights, of a warp
    warps: int
    loads: int  # of each row, under way
    blocks: int  # of a multiprocessor


_STREAM_FORMS = {"16": _Stream(2, 4, 4, 3), "fp8": _Stream(1, 8, 2, 2)}
#: Rows of a group for which the weights are read once.
_STREAM_TOKENS = (1, 2, 4, 8)


def _stream_tokens(group: _Group) -> int:
    return next((tokens for tokens in _STREAM_TOKENS if group.expected_rows <= tokens), _STREAM_TOKENS[-1])


def _stream_variant(group: _Group) -> Variant:
    tokens, form = _stream_tokens(group), _STREAM_FORMS[group.weights]
    if tokens == _STREAM_TOKENS[-1]:
        # As many blocks as else would leave too few registers.
        form = form._replace(blocks=form.blocks - 1)
    flags = _FORMATS[group.weights], _flag(group.b_scale == "block"), tokens, group.activation
    return _stream.variant(arrays.CUDA_TYPE[group.out_dtype], *flags, *form)


def _stream_plan(group: _Group) -> _Plan:
    form = _STREAM_FORMS[group.weights]
    columns, tiles = -(-group.n // (2 * form.warps * form.pairs)), group.tiles(_stream_tokens(group))
    return _Plan(_stream_variant(group), (columns, tiles, 1), (32 * form.warps, 1, 1), 0, _sizes(group))


# --- the choice -----------------------------------------------------------------------------------------


@functools.cache
def _shared_per_block(device: int) -> int:
    return runtime.deviceGetAttribute(_SHARED_PER_BLOCK, device)


def _why_not(variant: str, group: _Group, device: int) -> str:
    """Why a variant cannot do it, if so."""
    if variant == "wgmma":
        if arch_of_device(device) != "90a":
            return f"this GPU is of sm_{arch_of_device(device)}, not sm_90a"
        if group.is_gathered:
            return "rows are gathered"
        if group.weights in ("mxfp4", "nvfp4"):
            return "weights are of 4 bits"
        if group.activation and group.b_scale == "block" and group.n % (2 * _FP8_BOX):
            return f"the halves of n ({group.n}) are no multiples of {_FP8_BOX}, with scales by blocks"
    if variant == "stream":
        if group.weights in ("mxfp4", "nvfp4"):
            return "weights are of 4 bits"
        if group.tiles(_stream_tokens(group)) > _MAX_GRID_Y:
            return "there may be too many groups of rows"
        # Units of 16 bytes, which the kernel counts in 32 bits.
        units = group.k * arrays.ITEM_SIZE[group.dtype] // 16
        a_rows = group.tokens * (group.experts if group.is_batched else 1)
        if max(a_rows, group.n) * units > 2**32:
            return "a, or the weights of one expert, are larger than 64 GiB"
    return ""


@functools.lru_cache(maxsize=4096)
def _plan(group: _Group, variant: str, device: int) -> _Plan:
    """How a call runs; what depends on the offsets is left to the device."""
    check.one_of("variant", variant, VARIANTS)
    if variant == "auto":
        arch = arch_of_device(device)
        most = 0 if group.weights == "fp8" and arch in _NO_FP8_ARCHS else _STREAM_ROWS
        few = group.expected_rows <= most and not _why_not("stream", group, device)
        variant = "stream" if few else "mma" if _why_not("wgmma", group, device) else "wgmma"
    elif reason := _why_not(variant, group, device):
        check.fail("variant", "'auto' or another here", f"{variant!r}: {reason}")
    if variant == "mma":
        return _mma_plan(group, _shared_per_block(device))
    if variant == "stream":
        return _stream_plan(group)
    count = multiprocessors(device)
    return _fp8_wgmma_plan(group, count) if group.weights == "fp8" else _wgmma_plan(group, count)


def _check_alignment(**addresses: int) -> None:
    for name, address in addresses.items():
        if address % 16:
            check.fail(name, "at a multiple of 16 bytes", f"address {address:#x}")


_USUAL = _Group(False, 8, 8, 8, 4096, 4096, "bfloat16", "bfloat16", "16", "", "", 0, False, 1, 1)
_USUAL_FP8 = _USUAL._replace(dtype="float8_e4m3fn", weights="fp8", a_scale="block", b_scale="block")
_GATED = _USUAL._replace(activation=activations.number("silu"))
_wgmma.specialized = [
    form.with_stages.variant("bfloat16", x.activation).instance for x in (_USUAL, _GATED) for _, form in _WGMMA_FORMS
]
_fp8_wgmma.specialized = [
    _Fp8Wgmma(tokens, cluster).variant("bfloat16", True, 0).instance for tokens in _FP8_STAGES for cluster in (1, 2)
]
_stream.specialized = [
    _stream_variant(x._replace(expected_rows=rows)).instance
    for x in (_USUAL, _GATED, _USUAL_FP8)
    for rows in _STREAM_TOKENS
]
# For want of an instruction that converts FP8.
_stream.unused = {"80": [_stream_variant(_USUAL_FP8._replace(expected_rows=rows)).instance for rows in _STREAM_TOKENS]}
_mma.specialize_by_arch(
    {
        arch: [_mma_variant(_fit(form, "16", False, most), _USUAL).instance for form in _MMA_FORMS["16"]]
        for arch, most in _SHARED_BYTES.items()
    }
)
# The rest is compiled at its first use: what is best depends on the GPU and on the model.
_wgmma.at_import = [
    form.with_stages.variant("bfloat16", x.activation).instance
    for x in (_USUAL, _GATED)
    for _, form in _WGMMA_FORMS[-1:]
]
_stream.at_import = [_stream_variant(x).instance for x in (_USUAL, _GATED)]


def _multiply(
    is_batched: bool,
    a: Any,
    b: Any,
    offsets: Any,
    a_scale: Any,
    b_scale: Any,
    b_global_scale: Any,
    row_token: Any,
    activation: str | None,
    out_dtype: str | None,
    out: Any,
    expected_m: int | None,
    variant: str,
) -> Any:
    """Check the arguments of either function, and run it."""
    symbols = ("experts", "max_tokens", "k") if is_batched else ("tokens", "k")
    library, device, _ = arrays.leader("a", a, (*DTYPES, *FP8_DTYPES), symbols)
    group = _group(
        is_batched,
        _kind("a", a, library, device),
        _kind("b", b, library, device),
        _kind("expert_num_tokens" if is_batched else "expert_offsets", offsets, library, device),
        None if a_scale is None else _kind("a_scale", a_scale, library, device),
        None if b_scale is None else _kind("b_scale", b_scale, library, device),
        None if b_global_scale is None else _kind("b_global_scale", b_global_scale, library, device),
        None if row_token is None else _kind("row_token", row_token, library, device),
        activation,
        out_dtype,
        None if out is None else _kind("out", out, library, device),
        expected_m,
    )
    if device is None:
        check.host_variant(variant, VARIANTS)
        function: Any = twin.moe_gemm_batched if is_batched else twin.moe_gemm
        options = {"a_scale": a_scale, "b_scale": b_scale, "b_global_scale": b_global_scale, "activation": activation}
        if not is_batched:
            options["row_token"] = row_token
        if out is not None:
            # Straight into its memory: some rows stay as they are.
            function = functools.partial(function, out=library.to_numpy(out))
        result = arrays.on_host(function, a, a, b, offsets, **options, out_dtype=group.out_dtype)
        return result if out is None else out
    address = library.address
    if not group.all_rows:
        check.one_of("variant", variant, VARIANTS)
        return library.empty(group.out_shape, group.out_dtype, a) if out is None else out
    plan = _plan(group, variant, device)
    if out is None:
        out = library.empty(group.out_shape, group.out_dtype, a)
    a_at, b_at, out_at = address(a), address(b), address(out)
    if (a_at | b_at | out_at) % 16:
        _check_alignment(a=a_at, b=b_at, out=out_at)
    maps: tuple[bytes, ...] = ()
    if plan.b_map is not None and plan.a_map is not None:
        maps = encode(b_at, *plan.b_map), encode(a_at, *plan.a_map)
    plan.kernel.launch(
        device,
        library.stream(device),
        plan.grid,
        plan.block,
        plan.shared_bytes,
        a_at,
        b_at,
        out_at,
        0 if a_scale is None else address(a_scale),
        0 if b_scale is None else address(b_scale),
        address(offsets),
        0 if row_token is None else address(row_token),
        0 if b_global_scale is None else address(b_global_scale),
        *plan.sizes,
        *maps,
    )
    return out


@arrays.takes_dlpack
def moe_gemm(
    a: Any,
    b: Any,
    expert_offsets: Any,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    b_global_scale: Any = None,
    row_token: Any = None,
    activation: str | None = None,
    out_dtype: str | None = None,
    out: Any = None,
    expected_m: int | None = None,
    variant: str = "auto",
) -> Any:
    """Multiply the rows of each expert by its weights: out[r] = a[r] b[e]^T for the rows r of expert e.

    Groups may be of any sizes, none of them padded; the device alone knows them. Sums are formed in float32, and
    rounded once; the same arguments give the same bits.

    Args:
        a: [rows, k] bfloat16, float16 or FP8 (e4m3; CuPy, which has no such dtype, gives its bytes as uint8).
        b: weights [experts, n, k] of the dtype of `a`; or, where that is of 16 bits, uint8 [experts, n, k / 2]: numbers
            of 4 bits (e2m1), two in a byte, the low half first. n must be a multiple of 8, k one of 8 in 16 bits, of 16
            in 8, of 32 in 4.
        expert_offsets: int32 or int64 [experts + 1], ascending from 0: expert e has rows expert_offsets[e] to
            expert_offsets[e + 1] - 1. What lies outside of the rows counts as their end.
        a_scale: with FP8, float32: [rows, ceil(k / 128)], or [rows], [rows, 1] or [1].
        b_scale: with FP8, float32: in the first case [experts, ceil(n / 128), ceil(k / 128)], one of each block of 128
            x 128 weights, and products are added up in float32 every 128 of k; else [experts] or [experts, n]. With 4
            bits, bytes: [experts, n, k / 32], powers of two (E8M0; of those, 2^-100 to 2^33): MXFP4; or
            [experts, n, k / 16], numbers of e4m3: NVFP4.
        b_global_scale: with NVFP4, float32 [experts], which multiplies all of an expert: the inverse of what
            `dequantize_nvfp4` divides by.
        row_token: int32 [rows]; row r is a[row_token[r]], and `a` is [tokens, k], `a_scale` by token. A number that
            names no token is taken for the nearest that does.
        activation: of a gated layer: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2", see `cukern.moe_activation`.
            The result has n / 2 columns, activate(gate, up) of the sums in float32: the gate is the first half of n,
            which must be a multiple of 16.
        out_dtype: with FP8 "bfloat16", the default, or "float16"; else it is that of `a`.
        out: [rows, n] or [rows, n / 2], to write into. Rows from expert_offsets[experts] on are not written.
        expected_m: rows that a group is expected to have at most: a hint, as in DeepGEMM, by which "auto" and the sizes
            of tiles are chosen. None: by the mean.
        variant: "wgmma" (Hopper; 16 bits and 8, no row_token), "mma", "stream" (16 bits and 8; reads the weights anew
            for every few rows) or "auto": "stream" for at most 4 rows, or a mean of 2, then "wgmma" where it can. More
            rows are better permuted than gathered.

    Returns:
        `out`, or an array like `a`, in which rows of no expert have no particular value.

    Raises:
        TypeError: for what is no array, of another library, or of a wrong dtype.
        ValueError: for another device, a wrong shape, strides, an address that is no multiple of 16, an unknown name,
            or a variant that cannot do it.

    The groups are those of DeepGEMM's contiguous layout, without its alignment, and of `torch._grouped_mm`.
    """
    scales = a_scale, b_scale, b_global_scale
    return _multiply(False, a, b, expert_offsets, *scales, row_token, activation, out_dtype, out, expected_m, variant)


@arrays.takes_dlpack
def moe_gemm_batched(
    a: Any,
    b: Any,
    expert_num_tokens: Any,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    b_global_scale: Any = None,
    activation: str | None = None,
    out_dtype: str | None = None,
    out: Any = None,
    expected_m: int | None = None,
    variant: str = "auto",
) -> Any:
    """Multiply the rows of each expert by its weights, where every expert has room for as many: out[e] = a[e] b[e]^T.

    Args:
        a: [experts, max_tokens, k], as in `moe_gemm`.
        b, b_scale, b_global_scale, activation, out_dtype, variant: as in `moe_gemm`.
        expert_num_tokens: int32 [experts], how many rows of each expert there are; the rest is not read.
        a_scale: with FP8, float32: [experts, max_tokens, ceil(k / 128)], or [experts, max_tokens], the same with a last
            dimension of 1, or [1].
        out: [experts, max_tokens, n] or, with an activation, [experts, max_tokens, n / 2], to write into. Rows past the
            count are not written.
        expected_m: as in `moe_gemm`. None: max_tokens.

    Returns:
        `out`, or an array like `a`, in which rows past the count have no particular value.

    Raises:
        TypeError, ValueError: as `moe_gemm` does.

    This is DeepGEMM's masked layout.
    """
    scales = a_scale, b_scale, b_global_scale
    return _multiply(True, a, b, expert_num_tokens, *scales, None, activation, out_dtype, out, expected_m, variant)


def _result(a: Any, b: Any, *, activation: str | None, out_dtype: str | None, row_token: Any) -> list[Any]:
    rows = a.shape[:-1] if row_token is None else row_token.shape
    dtype = str(a.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        dtype = out_dtype or "bfloat16"
    return [(a, (*rows, b.shape[1] // (1 if activation is None else 2)), dtype)]


def _contiguous_result(
    a: Any,
    b: Any,
    expert_offsets: Any,
    *,
    row_token: Any = None,
    activation: str | None = None,
    out_dtype: str | None = None,
    **options: Any,
) -> list[Any]:
    return _result(a, b, activation=activation, out_dtype=out_dtype, row_token=row_token)


def _batched_result(
    a: Any,
    b: Any,
    expert_num_tokens: Any,
    *,
    activation: str | None = None,
    out_dtype: str | None = None,
    **options: Any,
) -> list[Any]:
    return _result(a, b, activation=activation, out_dtype=out_dtype, row_token=None)


_SCALES = "Tensor? a_scale=None, Tensor? b_scale=None, Tensor? b_global_scale=None, "
_OPTIONS = "str? activation=None, str? out_dtype=None, int? expected_m=None, str variant='auto') -> (Tensor product)"
#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    f"moe_gemm(Tensor a, Tensor b, Tensor expert_offsets, *, {_SCALES}Tensor? row_token=None, {_OPTIONS}": (
        _contiguous_result
    ),
    f"moe_gemm_batched(Tensor a, Tensor b, Tensor expert_num_tokens, *, {_SCALES}{_OPTIONS}": _batched_result,
}
