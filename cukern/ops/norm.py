"""RMS norm of rows, with a residual added before it and FP8 quantization after it."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

from cukern.reference import norm as twin
from cukern.reference.quantization import SMALLEST, SMALLEST_FP8
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Array, Result, dtype_name, expect, expect_array, expect_place, same_shape
from cukern.runtime.fp8 import scale_of
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.late import late
from cukern.runtime.op import OPS, op
from cukern.runtime.plan import launch, outputs, run_twin
from cukern.runtime.rows import MAX_ROW, MAX_ROWS
from cukern.runtime.units import divisor

__all__ = ["fused_add_rms_norm", "fused_add_rms_norm_quant", "rms_norm", "rms_norm_quant"]

DTYPES = ("float32", "float16", "bfloat16")
#: "specialized" has a fixed width and "dynamic" takes any; both load 16 bytes at a time, "scalar" one element.
VARIANTS = ("auto", "specialized", "dynamic", "scalar")
FP8 = "float8_e4m3fn"
#: Columns that share a scale: those of a few lanes of a warp.
GROUPS = (32, 64, 128)

#: Widths with variants of their own; those of heads and latents have no residual.
SPECIALIZED_HEADS = [
    128,  # the heads of q and k in Qwen3
    512,  # DeepSeek-V3's kv_a
    1536,  # DeepSeek-V3's q_a
]
SPECIALIZED = [
    2048,  # Qwen3-30B-A3B, Llama-3.2-1B
    2880,  # gpt-oss
    4096,  # Llama-3-8B, Qwen3-8B, Mixtral-8x7B
    5120,  # Qwen3-32B, Llama-4
    7168,  # DeepSeek-V3, Kimi-K2
    8192,  # Llama-3-70B
]

_kernel = Kernel("norm", "rms_norm", compile_s=0.8)
_WARP = 32
_NARROW_THREADS = 256  # threads of a block where a row has at most a warp
_ITEMS = 4  # units per thread, where a row has more than a warp


class _Form(NamedTuple):
    """The dtypes of a variant, and what it computes."""

    dtype: str
    weight_dtype: str
    add: bool = False
    result: str = "PLAIN"
    group: int = 0


class _Tile(NamedTuple):
    """The threads of a variant."""

    threads: int  # per row
    items: int  # units that a thread keeps in registers
    block: int  # threads per block


def _tile(form: _Form, width: int, fixed: bool, wide: bool) -> _Tile:
    units = max(1, -(-width // twin.EACH))
    if units > twin.COLUMNS:
        # Elements that are loaded one by one take a register each, as float32 does.
        return _Tile(twin.COLUMNS, 2 if wide and arrays.ITEM_SIZE[form.dtype] == 2 else 1, twin.COLUMNS)
    columns = 1 << (units - 1).bit_length()
    threads = columns // 2 if columns <= 2 * _WARP else max(columns // _ITEMS, _WARP)
    threads = max(threads, form.group // twin.EACH, 1)
    return _Tile(threads, -(-(units if fixed else columns) // threads), threads if threads > _WARP else _NARROW_THREADS)


def _variant(form: _Form, width: int, fixed: bool, wide: bool) -> Variant:
    tile = _tile(form, width, fixed, wide)
    return _kernel.variant(
        arrays.CUDA_TYPE[form.dtype],
        arrays.CUDA_TYPE[form.weight_dtype],
        form.result,
        form.group,
        str(form.add).lower(),
        width if fixed else 0,
        tile.threads,
        tile.items,
        16 if wide else arrays.ITEM_SIZE[form.dtype],
        tile.block,
    )


_registered: set[int] = set()


def _variants(width: int, dtype: str, adds: tuple[bool, ...] = (False, True)) -> list[Instance]:
    return [_variant(_Form(dtype, dtype, add), width, True, True).instance for add in adds]


def _list_instances() -> None:
    adds = dict.fromkeys(SPECIALIZED_HEADS, (False,)) | dict.fromkeys(SPECIALIZED, (False, True))
    _registered.update(adds)
    # Other dtypes, weights of float32, FP8 and other widths are compiled at their first use.
    _kernel.at_import = [x for width in adds for x in _variants(width, "bfloat16", adds[width])]
    fp8 = [
        _Form("bfloat16", "bfloat16", add, result, group)
        for add in (False, True)
        for result, group in (("BY_TENSOR", 0), ("BY_ROW", 0), ("BY_GROUP", 128))
    ]
    _kernel.specialized = [
        *(x for dtype in DTYPES for width in adds for x in _variants(width, dtype, adds[width])),
        *(_variant(form, 7168, True, True).instance for form in fp8),
        *(_variant(_Form(x, x, add), width, False, True).instance
          for x in DTYPES for width in (64, 8192, 65536) for add in (False, True)),
    ]  # fmt: skip


_list_instances()


def specialize(*, width: int, dtype: str = "bfloat16") -> list[Instance]:
    """Give a width variants of its own in this process and say which; see `cukern.specialize`.

    Raises ValueError for a width that is not a multiple of 8.
    """
    check.one_of("dtype", dtype, DTYPES)
    check.integer("width", width, 1, MAX_ROW)
    if width % twin.EACH:
        check.fail("width", f"a multiple of {twin.EACH}", width)
    _registered.add(width)
    for name in __all__:
        OPS[name].forget()
    return _variants(width, dtype)


# --- rows ---------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Arrays [..., width] as rows [outer, inner, width] with two strides."""

    total: Any  # outer * inner
    inner: int
    strides: list[tuple[int, int] | None]  # of each array, outer and inner, in elements


def _common_stride(lengths: tuple[Any, ...], strides: tuple[int, ...]) -> int | None:
    """The stride of dimensions taken as one; None if they cannot be."""
    common, span = 0, None
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if type(length) is int and length == 1:
            continue
        if span is None:
            common = stride
        elif stride != span:
            return None
        span = stride * length
    return common


def _rows(**given: Array | None) -> _Rows:
    """The rows of arrays of one shape. Raises ValueError where two strides are not enough."""
    first = next(array for array in given.values() if array is not None)
    lengths = first.shape[:-1]
    total = lengths[0] if len(lengths) == 1 else functools.reduce(operator.mul, lengths, 1)
    found: list[tuple[int, int] | None]
    for split in range(len(lengths), 0, -1) if lengths else (0,):
        found = []
        for array in given.values():
            if array is None:
                found.append(None)
                continue
            halves = (0, split), (split, len(lengths))
            parts = [_common_stride(lengths[i:j], array.strides[i:j]) for i, j in halves]
            if None in parts:
                break
            found.append((parts[0], parts[1]))  # type: ignore[arg-type]
        if len(found) == len(given):
            return _Rows(total, functools.reduce(operator.mul, lengths[split:], 1), found)
    name, array = next((name, x) for name, x in given.items() if x is not None and not x.is_contiguous)
    wanted = "of rows with at most two strides, and those over the same dimensions as in the other arrays"
    check.fail(name, wanted, f"strides {array.strides}")


def _expect_rows(name: str, array: Array, written: bool = False) -> None:
    """Raises ValueError unless each row is contiguous and, if they are written, no two rows overlap."""
    width, strides = array.shape[-1], array.strides
    apart = strides[-1] != 1 and width > 1
    overlap = written and any(abs(x) < width and n != 1 for x, n in zip(strides[:-1], array.shape[:-1], strict=True))
    if (apart or overlap) and all(n != 0 for n in array.shape):  # the strides of an empty array mean nothing
        wanted = "contiguous along its last dimension" if apart else "of rows that do not overlap"
        check.fail(name, wanted, f"strides {strides} (in elements)")


# --- the launch ---------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    """The checked arguments of a norm."""

    input: Array
    residual: Array | None
    weight: Array | None
    epsilon: float
    weight_offset: float
    width: int
    variant: str

    def launch(
        self, out: Array, result: str = "PLAIN", group: int = 0, scales: Array | None = None, scale: Any = (None, 0.0)
    ) -> None:
        """Write the norm to `out` and, if quantized, its scales to `scales`; `scale` is a given one."""
        weight_dtype = self.input.dtype if self.weight is None else self.weight.dtype
        form = _Form(self.input.dtype, weight_dtype, self.residual is not None, result, group)
        total, inner, strides = _rows(input=self.input, residual=self.residual, out=out)
        if total > MAX_ROWS:
            check.fail("input", f"of at most {MAX_ROWS} rows", total)
        if (total == 0 or self.width == 0) and result == "PLAIN":
            return
        fields: list[Any] = []
        wide = self.width % twin.EACH == 0 and (self.weight is None or self.weight.alignment == 16)
        for array, apart in zip((self.input, self.residual, out), strides, strict=True):
            if array is None or apart is None:
                fields.append(None)
                continue
            unit, between = twin.EACH if array.item_size == 1 else 16, [x * array.item_size for x in apart]
            wide = wide and array.alignment >= unit and all(x % unit == 0 for x in between)
            fields.append((array, *between))
        choice = form, self.width, self._is_fixed(wide), wide and self.variant != "scalar"
        tile = _tile(*choice)
        launch(
            _variant(*choice),
            late(_blocks, total, tile.block // tile.threads),
            tile.block,
            x=fields[0],
            residual=fields[1],
            out=fields[2],
            weight=self.weight,
            scales=scales,
            scale=scale,
            rows=total,
            inner=inner,
            by_inner=divisor(max(inner, 1)),
            width=self.width,
            per_width=1 / max(self.width, 1),
            epsilon=self.epsilon,
            offset=self.weight_offset,
            smallest=float(SMALLEST if result == "BY_GROUP" else SMALLEST_FP8),
        )

    def _is_fixed(self, wide: bool) -> bool:
        """Whether the variant has a fixed width. Raises ValueError for a variant that there is not."""
        known = wide and self.width in _registered
        if self.variant == "specialized" and not known:
            why = f"there is none for width {self.width}, or rows are not 16-byte aligned (cukern.specialize adds one)"
            check.fail("variant", "'auto', 'dynamic' or 'scalar' here", f"'specialized': {why}")
        if self.variant == "dynamic" and not wide:
            why = f"rows or the weight are not 16-byte aligned, or width is not a multiple of {twin.EACH}"
            check.fail("variant", "'auto' or 'scalar' here", f"'dynamic': {why}")
        return known and self.variant in ("auto", "specialized")


def _blocks(rows: int, rows_of_block: int) -> int:
    return max(1, -(-rows // rows_of_block))


def _check(
    input: Any, residual: Any, weight: Any, epsilon: float, weight_offset: float, variant: str, adds: bool
) -> _Norm:
    """Check the arguments that all norms have."""
    expect_array("input", input, DTYPES)
    if not input.shape:
        check.dimensions("input", input.shape, ("...", "width"))
    width = int(input.shape[-1])
    if width > MAX_ROW:
        check.fail("input", f"of rows of at most {MAX_ROW} elements", width)
    _expect_rows("input", input)
    if adds:
        _expect_like("residual", residual, input)
    if weight is not None:
        expect("weight", weight, input, "input", dict.fromkeys((input.dtype, "float32")), (width,), "[width]")
    if check.number("epsilon", epsilon) < 0:
        check.fail("epsilon", "a number of at least 0", epsilon)
    epsilon, offset = float(epsilon), check.number("weight_offset", weight_offset)
    return _Norm(input, residual if adds else None, weight, epsilon, offset, width, variant)


def _expect_like(name: str, array: Any, input: Array) -> Array:
    """Check an array that is written, of the shape and dtype of `input`."""
    expect_place(name, array, input, "input")
    check.dtype(name, array.dtype, (input.dtype,))
    if not same_shape(array, input.shape):
        check.shape(name, array.shape, input.shape, "[..., width]")
    _expect_rows(name, array, written=True)
    return array


# --- the functions ------------------------------------------------------------------------------------


def _normalized(input: Any, *_: Any, **__: Any) -> Result:
    return Result(input.shape, dtype_name(input), "[..., width]")


@op(
    twin.rms_norm,
    "rms_norm(Tensor input, Tensor? weight, float epsilon=1e-06, *, float weight_offset=0.0, str variant='auto') "
    "-> (Tensor normalized)",
    _normalized,
    rows={"rows": ("input", "out")},
)
def rms_norm(
    input: AnyArray,
    weight: AnyArray,
    epsilon: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Divide rows by the root of the mean of their squares, and multiply them by a weight.

        out = input * (1 / sqrt(mean(input**2) + epsilon)) * (weight + weight_offset)

    Args:
        input: [..., width], float32, float16 or bfloat16. Each row is contiguous; rows may have two strides, such as
            those of tokens and heads where q is a part of the product for q, k and v.
        weight: [width], in the dtype of `input` or float32; None: 1.
        epsilon: at least 0.
        weight_offset: 1 for models that store the weight minus 1, as Gemma does.
        out: an array to write into and return, with strides as `input` may have them; may be `input` itself.
        variant: "auto", or a kernel by name: "specialized" (a width of `cukern.ops.norm.SPECIALIZED` or added by
            `cukern.specialize`), "dynamic" (any multiple of 8, from aligned rows) or "scalar". All give the same bits.

    Returns:
        [..., width], in the dtype and library and on the device of `input`. It is computed in float32 and rounded once,
        at the end, as by FlashInfer and PyTorch; vLLM, and Llama in transformers, also round before the multiplication
        by the weight. The bits of a row do not depend on the other rows. A row with NaN becomes NaN. In a row with an
        infinity, that becomes NaN and all else 0; where the sum of squares overflows float32, all becomes 0. Arrays in
        host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or numbers that do not fit; the message names the argument.

    vLLM's function of this name takes `out` first.
    """
    norm = _check(input, None, weight, epsilon, weight_offset, variant, False)
    if out is None:
        out = outputs(None, input, "input", _normalized(input))
        if input.on_host:
            return run_twin(variant, VARIANTS)
    else:
        _expect_like("out", out, input)
        if input.on_host:
            run_twin(variant, VARIANTS)
            return out
    check.one_of("variant", variant, VARIANTS)
    norm.launch(out)
    return out


@op(
    twin.fused_add_rms_norm,
    "fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor? weight, float epsilon=1e-06, *, "
    "float weight_offset=0.0, str variant='auto') -> ()",
    rows={"rows": ("input", "residual")},
)
def fused_add_rms_norm(
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    epsilon: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """`rms_norm` of a sum, in place: `residual` becomes input + residual, and `input` the norm of that.

    The norm is that of the rounded sum: the bits are those of the two steps.

    Args:
        input, residual: [..., width], float32, float16 or bfloat16, of one dtype; rows as `rms_norm` takes them. Both
            are written.
        weight, epsilon, weight_offset, variant: as in `rms_norm`.

    Returns:
        input and residual.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or numbers that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `fused_add_rms_norm`.
    """
    norm = _check(input, residual, weight, epsilon, weight_offset, variant, True)
    _expect_rows("input", input, written=True)
    if input.on_host:
        run_twin(variant, VARIANTS)
        return input, residual
    check.one_of("variant", variant, VARIANTS)
    norm.launch(input)
    return input, residual


def _quantized(input: Any, *_: Any, group_size: Any = 128, scale: Any = None, **__: Any) -> list[Result]:
    outer, width = input.shape[:-1], input.shape[-1]
    if scale is not None:
        scales = Result((1,), "float32", "[1]")
    elif group_size is None:
        scales = Result((*outer, 1), "float32", "[..., 1]")
    else:
        scales = Result((*outer, width // group_size), "float32", "[..., width / group_size]")
    return [Result(input.shape, FP8, "[..., width]"), scales]


def _quantize(norm: _Norm, group_size: Any, scale: Any, out_q: Any, out_s: Any) -> Any:
    input = norm.input
    given = None if scale is None else scale_of("scale", scale, input, "input")
    if given is None and group_size is not None:
        check.one_of("group_size", group_size, GROUPS)
        if norm.width % group_size:
            check.fail("input", f"of whole groups of {group_size} along its last dimension", norm.width)
    results = _quantized(input, group_size=group_size, scale=scale)
    q, s = outputs((out_q, out_s), input, "input", *results, names=("out_q", "out_s"))
    if input.on_host:
        return run_twin(norm.variant, VARIANTS)
    check.one_of("variant", norm.variant, VARIANTS)
    if given is not None:
        norm.launch(q, "BY_TENSOR", scales=s, scale=given)
    elif group_size is None:
        norm.launch(q, "BY_ROW", scales=s)
    else:
        norm.launch(q, "BY_GROUP", group_size, s)
    return q, s


_QUANT_OPTIONS = (
    "Tensor? weight, float epsilon=1e-06, *, int? group_size=128, Tensor? scale=None, float weight_offset=0.0, "
    "Tensor(b!)? out_q=None, Tensor(c!)? out_s=None, str variant='auto') -> (Tensor quantized, Tensor scales)"
)


@op(
    twin.rms_norm_quant,
    f"rms_norm_quant(Tensor input, {_QUANT_OPTIONS}",
    _quantized,
    rows={"rows": ("input", "out_q", "out_s")},
    late=("scale",),
)
def rms_norm_quant(
    input: AnyArray,
    weight: AnyArray,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = 128,
    scale: AnyArray | None = None,
    weight_offset: float = 0.0,
    out_q: AnyArray | None = None,
    out_s: AnyArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Quantize `rms_norm` to FP8 (e4m3), without rounding it to the dtype in between.

    The norm in float32 is quantized with the scales of `cukern.silu_and_mul_quant`:

        scale = max(max |norm|, 1e-10) / 448 over a group, or max(max |norm|, 1 / 512) / 448 over a row, or `scale`
        q     = e4m3(norm / scale), to nearest, ties to even, 448 at most; NaN stays NaN

    Args:
        input, weight, epsilon, weight_offset, variant: as in `rms_norm`.
        group_size: 32, 64 or 128, a divisor of the width; None: one scale per row.
        scale: one scale for all, in place of groups: a number, or a float32 array of one element on the device of
            `input`.
        out_q, out_s: arrays to write into and return; out_q is float8_e4m3fn, or uint8 for its bytes.

    Returns:
        q [..., width] in float8_e4m3fn, in CuPy uint8, and scales float32 [..., width / group_size], [..., 1] or [1].
        Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or numbers that do not fit; the message names the argument.
    """
    return _quantize(
        _check(input, None, weight, epsilon, weight_offset, variant, False), group_size, scale, out_q, out_s
    )


@op(
    twin.fused_add_rms_norm_quant,
    f"fused_add_rms_norm_quant(Tensor input, Tensor(a!) residual, {_QUANT_OPTIONS}",
    _quantized,
    rows={"rows": ("input", "residual", "out_q", "out_s")},
    late=("scale",),
)
def fused_add_rms_norm_quant(
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = 128,
    scale: AnyArray | None = None,
    weight_offset: float = 0.0,
    out_q: AnyArray | None = None,
    out_s: AnyArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """`rms_norm_quant` of a sum: `residual` becomes input + residual, rounded to the dtype, and q the norm of that.

    Arguments, results and errors are those of `rms_norm_quant`. `residual` is as in `fused_add_rms_norm`; `input` is
    only read.
    """
    return _quantize(
        _check(input, residual, weight, epsilon, weight_offset, variant, True), group_size, scale, out_q, out_s
    )
