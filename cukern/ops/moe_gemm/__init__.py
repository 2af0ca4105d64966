"""Grouped GEMMs of a mixture of experts (MoE): multiply the rows routed to each expert by that expert's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cukern.formats.quantized import BLOCK, SMALLEST
from cukern.formats.weights import is_prepared, rows_of_weights
from cukern.ops.moe_gemm import checks, dense, fma, folded, fp8, kernels, stream_one
from cukern.ops.moe_gemm.checks import DTYPES, FP8_DTYPES, HALF_DTYPES
from cukern.ops.moe_gemm.prepare import MAX_COUNT, prepare_weights, restore_weights
from cukern.ops.moe_gemm.product import STREAM_ROWS, VECTOR_COLUMNS, Product
from cukern.reference import moe_gemm as twin
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.activation import is_gated
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_aligned,
    expect_array,
    expect_contiguous,
    expect_place,
)
from cukern.runtime.op import op, operator
from cukern.runtime.performance import advise
from cukern.runtime.plan import asked, empty, note, outputs, run_twin

__all__ = ["moe_gemm", "moe_gemm_batched", "prepare_weights", "quantized_matmul", "restore_weights"]

VARIANTS = ("auto", "wgmma", "mma", "stream", "fma")
#: sm_80 to sm_87 have no instruction that converts FP8, so the conversion is slow and "auto" does not use "stream" for
#: FP8 weights.
_NO_FP8_ARCHS = ("80", "86", "87")
#: For `cukern.explain`.
_DESCRIPTIONS = {
    "stream": "which reads the weights once for a few rows",
    "wgmma": "Hopper's tensor cores",
    "mma": "tensor cores of every GPU",
    "fma": "the slow general kernel, without tensor cores",
}
#: For unprepared 4-bit weights "auto" uses "mma". This takes up to 3 times as long as with weights from
#: `prepare_weights` (measured with n = 4096 and k = 7168).
PREPARE = (
    "weights of 4 bits that are not prepared take up to 3 times as long on Hopper: call "
    "cukern.prepare_weights(weights, scales) once, and pass its result as the weights, without their scales"
)


# --- the choice -----------------------------------------------------------------------------------------


def _why_not(variant: str, x: Product) -> str:
    """Return why a variant cannot compute the grouped GEMM; empty if it can."""
    if variant == "fma":
        return ""
    if x.a.dtype == "float32":
        return "a is float32"
    if not x.is_of_vectors:
        return "rows or addresses are no multiples of 16 bytes"
    why_not_wgmma = fp8.why_not_fp8_wgmma if x.weights == "FP8" else kernels.why_not_wgmma
    reasons = {"wgmma": why_not_wgmma, "mma": kernels.why_not_mma, "stream": kernels.why_not_stream}
    return reasons[variant](x)


def _best(x: Product) -> tuple[str, str]:
    arch, most = x.a.gpu.arch, x.row_limit(STREAM_ROWS)
    may_stream = x.weights != "FP8" or arch not in _NO_FP8_ARCHS
    few = may_stream and x.expects(STREAM_ROWS)
    refused: dict[str, list[str]] = {}
    for variant in ("stream",) * few + ("wgmma", "mma", "fma"):
        reason = _why_not(variant, x)
        if not reason:
            break
        refused.setdefault(reason, []).append(variant)
    why = [f"{x.expected}: {variant}, {_DESCRIPTIONS[variant]}"]
    if not may_stream:
        why[0] += f" (no stream: sm_{arch} has no instruction that converts FP8)"
    elif variant == "stream" or (not few and x.weights in kernels.STREAM_FORMS and variant != "fma"):
        why[0] += f" ({'stream only ' * (variant != 'stream')}up to {most} an expert)"
    why += [f"{', '.join(names)} cannot: {reason}" for reason, names in refused.items()]
    if variant == "fma":
        why.append(_fast(x))
    return variant, "; ".join(why)


def _fast(x: Product) -> str:
    """Return what a call needs to use tensor cores. It is part of the reason for "fma"."""
    if x.a.dtype == "float32":
        return f"tensor cores take {' and '.join(HALF_DTYPES)}"
    if not x.is_of_vectors:
        sizes = f"k of multiples of {x.vector_elements} and results of multiples of {VECTOR_COLUMNS} columns"
        return f"the others take {sizes}, at multiples of 16 bytes"
    return "weights without a stride take mma"


def _kernel(variant: str, x: Product) -> tuple[Callable[[Product], None], str]:
    """Return the function that launches `variant`, and the reason. Only the device knows the group sizes."""
    if x.is_prepared:
        for name, array in (("a", x.a), ("b", x.b), ("out", x.out)):
            expect_aligned(name, array, " with prepared weights")
        if x.weights == "FOLDED":
            if reason := kernels.why_not_prepared(variant, x):
                check.fail("b", "weights of 8 bits", f"MXFP4 prepared for FP8 rows: {reason}")
            return folded.folded_wgmma, asked(variant) or f"{x.expected}: MXFP4 weights prepared for FP8 rows"
        if reason := kernels.why_not_prepared(variant, x):
            check.fail("b", "weights that are not prepared", f"prepared ones: {reason}")
        return kernels.fp4_wgmma, asked(variant) or f"{x.expected}: {x.weights} weights that are prepared"
    why = asked(variant)
    if variant == "auto":
        variant, why = _best(x)
        if variant == "mma" and x.weights in ("MXFP4", "NVFP4") and not kernels.why_not_prepared("auto", x):
            advise(PREPARE)
            why += f"; {PREPARE}"
        in_order = x._replace(row_token=None)
        if variant == "mma" and x.weights == "FP8" and x.row_token is not None and not _why_not("wgmma", in_order):
            why += "; rows in the order of the experts (cukern.moe_permute) take wgmma"
    elif reason := _why_not(variant, x):
        check.fail("variant", "'auto' or another here", f"{variant!r}: {reason}")
    if variant == "wgmma":
        return fp8.fp8_wgmma if x.weights == "FP8" else kernels.wgmma, why
    return {"mma": kernels.mma, "stream": stream_one.stream, "fma": fma.fma}[variant], why


def _quantizing(x: Product, out_scale: Array, dtype: str) -> tuple[Callable[[Product], None], str]:
    if reason := _why_not("wgmma", x):
        check.fail("a", "of a call that Hopper's kernel can do", reason)
    ranges = f"up to {fp8.FP8_QUANTIZED_ROWS} an expert and above {fp8.FP8_TAIL_ROWS}"
    why = f"{x.expected}: a layer's first product quantizes its activation ({ranges}, where that takes less time)"
    return lambda x: fp8.fp8_quantized(x, out_scale, dtype, float(SMALLEST)), why


# --- the arguments ---------------------------------------------------------------------------------------


def _product(
    a: Any, b: Any, *_: Any, row_token: Any = None, activation: Any = None, out_dtype: Any = None, **__: Any
) -> Result:
    rows = a.shape[:-1] if row_token is None else row_token.shape
    dtype, half = dtype_name(a), " / 2" if is_gated(activation) else ""
    if dtype not in DTYPES:
        dtype = out_dtype or "bfloat16"
    symbols = f"[experts, max_tokens, n{half}]" if len(rows) == 2 else f"[rows, n{half}]"
    n = rows_of_weights(b)
    return Result((*rows, n // 2 if half else n), dtype, symbols)


def _quantized_outputs(
    a: Array, b_scales: str, activation: str | None, activated: Result, out: Any, out_scale: Any
) -> Any:
    """Return the arrays of the quantized result and its scales. `activated`: the result before it is quantized."""
    rows, columns = activated.shape
    if b_scales != "block":
        check.fail("b_scale", "by blocks, with a result that is quantized", f"one by {b_scales}")
    if not is_gated(activation):
        check.fail("activation", "one with a gate, with a result that is quantized", repr(activation))
    if columns % BLOCK:
        check.fail("b", f"of n that is a multiple of {2 * BLOCK}, with a result that is quantized", 2 * columns)
    results = (
        Result((rows, columns), FP8_DTYPES[0], "[rows, n / 2]"),
        Result((rows, columns // BLOCK), "float32", f"[rows, n / {2 * BLOCK}]"),
    )
    return outputs((out, out_scale), a, "a", *results, names=("out_q", "out_s"))


def _multiply(
    a: Any,
    b: Any,
    offsets: Any,
    scales: tuple[Any, Any, Any],
    row_token: Any,
    bias: Any,
    activation_arguments: tuple[str | None, float, float, bool],
    out_dtype: str | None,
    out: Any,
    expected_m: Any,
    variant: str,
    out_scale: Any = None,
) -> Any:
    """Check the arguments and launch. The caller has checked the dtype and dimensions of `a`.

    `scales`: (a_scale, b_scale, b_global_scale). `activation_arguments`: (activation, alpha, limit, interleaved).
    `out_scale`: the scales that `moe_gemm_quantized` writes.
    """
    (a_scale, b_scale, b_global_scale), (activation, alpha, limit, interleaved) = scales, activation_arguments
    expect_contiguous("a", a)
    offsets_name = "expert_num_tokens" if len(a.shape) == 3 else "expert_offsets"
    optional = {"a_scale": a_scale, "b_scale": b_scale, "b_global_scale": b_global_scale, "row_token": row_token}
    given = {name: array for name, array in optional.items() if array is not None}
    expect_place("b", b, a, "a")
    for name, array in {offsets_name: offsets, **given}.items():
        expect_contiguous(name, expect_place(name, array, a, "a"))
    number, gated = activations.function_number(activation, optional=True), is_gated(activation)
    alpha, limit = activations.check_bounds(alpha, limit)
    if check.one_of("interleaved", interleaved, (False, True)) and not gated:
        check.fail("interleaved", "False without a gate", f"True with activation {activation!r}")
    checks.check_sizes(a, b, offsets, row_token, gated)
    formats = checks.formats(a, b, a_scale, b_scale, b_global_scale)
    is_fp8 = a.dtype not in DTYPES
    if out_dtype is None and is_fp8 and isinstance(out, Array) and out.dtype in HALF_DTYPES:
        out_dtype = out.dtype
    if out_dtype is not None:
        check.one_of("out_dtype", out_dtype, HALF_DTYPES if is_fp8 else (a.dtype,))
    expected_m = None if expected_m is None else check.integer("expected_m", expected_m, 0)
    result = _product(a, b, row_token=row_token, activation=activation, out_dtype=out_dtype)
    if bias is not None:
        shape = b.shape[0], rows_of_weights(b)
        expect("bias", bias, a, "a", ("float32", result.dtype), shape, "[experts, n]")
    if out_scale is None:
        out = outputs(out, a, "a", result)
    else:
        out, out_scale = _quantized_outputs(a, formats[2], activation, result, out, out_scale)
    if a.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    rows, experts, n, k = result.shape[-2], b.shape[0], rows_of_weights(b), a.shape[-1]
    if rows == 0:
        return out if out_scale is None else (out, out_scale)
    if len(a.shape) == 2:  # only the GPU knows a batched call's used rows
        note(flops=2 * rows * n * k // (2 if is_fp8 else 1))  # FP8 runs at twice the rate
    sizes = len(a.shape) == 3, rows, experts, n, k
    is_bounded = activation == "swigluoai" and (alpha, limit) != (activations.ALPHA, activations.LIMIT)
    flags = {"biased": bias is not None, "bounded": is_bounded, "scale_of_expert": formats[1] == "expert"}
    epilogue = kernels.epilogue(number, is_gated=gated, interleaved=interleaved, **flags)
    x = Product(
        a, b, out, offsets, *scales, row_token, *sizes, *formats, epilogue, gated, expected_m, is_prepared(b),
        interleaved, bias, alpha, limit, variant != "auto" and expected_m is not None,
    )  # fmt: skip
    launch, why = _kernel(variant, x) if out_scale is None else _quantizing(x, out_scale, out_dtype or "bfloat16")
    launch(x._replace(why=why))
    return out if out_scale is None else (out, out_scale)


# --- the functions --------------------------------------------------------------------------------------


@op(twin.moe_gemm, "product", _product)
def moe_gemm(
    a: AnyArray,
    b: AnyArray,
    expert_offsets: AnyArray,
    *,
    a_scale: AnyArray | None = None,
    b_scale: AnyArray | None = None,
    b_global_scale: AnyArray | None = None,
    row_token: AnyArray | None = None,
    bias: AnyArray | None = None,
    activation: str | None = None,
    alpha: float = activations.ALPHA,
    limit: float = activations.LIMIT,
    interleaved: bool = False,
    out_dtype: str | None = None,
    out: AnyArray | None = None,
    expected_m: int | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Multiply the rows of each expert by its weights: `out[r] = a[r] @ b[e].T` for the rows r of expert e.

    A group is the rows of an expert. Groups may have any size and are not padded. Sums are accumulated in float32 and
    rounded once. The same arguments give the same bits.

    Args:
        a: [rows, k] bfloat16, float16, float32 (always by "fma") or FP8 (e4m3; uint8 in CuPy, which has no such dtype).
        b: weights [experts, n, k] of the dtype of `a`. With a 16-bit `a` also uint8 [experts, n, k / 2]: 4-bit e2m1
            elements, two per byte, the first in the low 4 bits. On Hopper also weights prepared by
            `cukern.prepare_weights`; with an FP8 `a`, MXFP4 weights prepared with a_dtype="float8_e4m3fn". Rows of `b`
            are contiguous, with any stride between them. 16-bit and 32-bit weights may be the view `w.transpose(1, 2)`
            of a contiguous array [experts, k, n], which is not copied. With 4-bit weights k must be a multiple of the
            elements that share a scale. The fast kernels need n to be a multiple of 8 (gated: 16), k a multiple of 8
            (16-bit weights), 16 (8-bit) or 32 (4-bit), addresses that are multiples of 16 bytes, and rows without gaps
            (on Hopper with 16-bit and 8-bit weights: strides that are multiples of 16 bytes).
        expert_offsets: int32 or int64 [experts + 1], ascending from 0: expert e has rows expert_offsets[e] to
            expert_offsets[e + 1] - 1. Clamped to the number of rows.
        a_scale: with FP8, float32: [rows, ceil(k / 128)], or [rows], [rows, 1] or [1].
        b_scale: with FP8 and the first shape of a_scale, float32 [experts, ceil(n / 128), ceil(k / 128)], a scale per
            block of 128 x 128 weights: the sum over each 128 elements along k is multiplied by both scales. With the
            other shapes of a_scale, float32 [experts] or [experts, n]. With 4-bit weights, bytes: [experts, n, k / 32]
            for MXFP4, powers of two (E8M0, 2^-100 to 2^33), or [experts, n, k / 16] for NVFP4, e4m3. None with prepared
            weights, which contain their scales. Prepared MXFP4 weights with a float16 `a` need scales in 2^-17 to 2^7.
        b_global_scale: with NVFP4, float32 [experts], which multiplies the weights: the inverse of the global_scale of
            `dequantize_nvfp4`.
        row_token: int32 [rows]. `a` is then [tokens, k], row r of the GEMM is a[row_token[r]], and `a_scale` has a row
            per token. Indices outside of `a` are clamped.
        bias: float32 or of the result's dtype, [experts, n], added to the sums in float32.
        activation: with a gate: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2", see `cukern.moe_activation`. The
            result then has n / 2 columns: activate(gate, up) of the float32 sums. Without a gate, in vLLM's names:
            "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul" or "relu2_no_mul".
        alpha, limit: the constants of "swigluoai".
        interleaved: True: rows 2 j and 2 j + 1 of an expert's weights (and bias) are gate j and up j, as in gpt-oss.
            False: the first n / 2 rows are gates, the others are ups.
        out_dtype: with FP8 "bfloat16", the default, or "float16"; otherwise the dtype of `a`.
        out: [rows, n] or [rows, n / 2], to write into. Rows from expert_offsets[experts] on are not written.
        expected_m: a hint for "auto" and the tile sizes, as in DeepGEMM: the largest number of rows expected for an
            expert. None: the mean number of rows per expert.
        variant: "wgmma" (Hopper; 16-bit weights, 8-bit weights without row_token, prepared 4-bit weights), "mma",
            "stream" (a GEMV with 16-bit and 8-bit weights, but not a view of [experts, k, n]; reads the weights again
            for every few rows), "fma" (all sizes, strides and addresses; no tensor cores) or "auto": "stream" if
            expected_m is at most 4, or without expected_m if the mean is at most 2 rows per expert; otherwise the first
            of "wgmma", "mma" and "fma" that can compute the call. With many rows, calling `moe_permute` first is faster
            than row_token if the rows have 8-bit elements or n is above about 8000.

    Returns:
        `out`, or a new array in the library and on the device of `a`. Rows that belong to no expert are undefined.

    Raises:
        TypeError: a value that is not an array, or an array of another library or a wrong dtype.
        ValueError: another device, a wrong shape, strides, an unknown name, or a variant that cannot compute the
            product; with prepared weights also an address that is not a multiple of 16.

    With an FP8 `a` and MXFP4 weights, the weights are converted to e4m3 exactly if the scales of a row of weights
    differ by a factor of at most 2^14 (`prepare_weights`). The only additional error, compared with a bfloat16 `a`, is
    then the rounding of `a` to FP8: 2.6% of the results' root mean square in the NumPy reference, for normally
    distributed rows and weights and k = 4096. Compared with a GEMM without any quantization, the error is 11.7% with an
    FP8 `a` and 11.4% with a bfloat16 `a`.

    The rows are in DeepGEMM's contiguous layout. As in `torch._grouped_mm`, groups need no alignment.
    """
    expect_array("a", a, (*DTYPES, *FP8_DTYPES), ("tokens", "k"))
    scales = a_scale, b_scale, b_global_scale
    activation_arguments = activation, alpha, limit, interleaved
    return _multiply(
        a, b, expert_offsets, scales, row_token, bias, activation_arguments, out_dtype, out, expected_m, variant
    )


@op(twin.moe_gemm_batched, "product", _product)
def moe_gemm_batched(
    a: AnyArray,
    b: AnyArray,
    expert_num_tokens: AnyArray,
    *,
    a_scale: AnyArray | None = None,
    b_scale: AnyArray | None = None,
    b_global_scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    activation: str | None = None,
    alpha: float = activations.ALPHA,
    limit: float = activations.LIMIT,
    interleaved: bool = False,
    out_dtype: str | None = None,
    out: AnyArray | None = None,
    expected_m: int | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Multiply the rows of each expert by its weights, with max_tokens rows for every expert: `out[e] = a[e] @ b[e].T`.

    Args:
        a: [experts, max_tokens, k], as in `moe_gemm`.
        b, b_scale, b_global_scale, bias, activation, alpha, limit, interleaved, out_dtype, variant: as in `moe_gemm`.
        expert_num_tokens: int32 [experts], the number of rows of each expert. Other rows are not read.
        a_scale: with FP8, float32: [experts, max_tokens, ceil(k / 128)], [experts, max_tokens], [experts, max_tokens,
            1], [experts] or [1].
        out: [experts, max_tokens, n] or, with a gate, [experts, max_tokens, n / 2], to write into.
        expected_m: as in `moe_gemm`. None: max_tokens.

    Returns:
        `out`, or a new array in the library and on the device of `a`. Rows from expert_num_tokens[e] on are not
        written.

    Raises:
        TypeError, ValueError: the errors of `moe_gemm`.

    The rows are in DeepGEMM's masked layout.
    """
    expect_array("a", a, (*DTYPES, *FP8_DTYPES), ("experts", "max_tokens", "k"))
    scales = a_scale, b_scale, b_global_scale
    activation_arguments = activation, alpha, limit, interleaved
    return _multiply(
        a, b, expert_num_tokens, scales, None, bias, activation_arguments, out_dtype, out, expected_m, variant
    )


@op(twin.moe_gemm_quantized)
def moe_gemm_quantized(
    a: AnyArray,
    b: AnyArray,
    expert_offsets: AnyArray,
    *,
    a_scale: AnyArray,
    b_scale: AnyArray,
    activation: str = "silu",
    out_dtype: str | None = None,
    out_q: WrittenArray,
    out_s: WrittenArray,
    expected_m: int | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Compute the first GEMM of a gated FP8 layer, apply the activation, and quantize the result to FP8.

    The results have the same bits as from `moe_gemm`, then `silu_and_mul_quant`. The sums are rounded to `out_dtype`
    before the activation. Each group of 128 neighbouring values v = activate(gate, up) is divided by its scale:
    scale = max(max |v|, 1e-10) / 448.

    Args:
        a, b, expert_offsets, a_scale, b_scale, out_dtype, expected_m: as in `moe_gemm` with scales by blocks. n must be
            a multiple of 256.
        activation: one with a gate, as in `moe_gemm`.
        out_q: e4m3 [rows, n / 2] (uint8 in CuPy), to write into. Rows that belong to no expert are not written.
        out_s: float32 [rows, n / 256], to write the scales into.

    Raises:
        TypeError, ValueError: the errors of `moe_gemm`; also ValueError on GPUs other than Hopper.
    """
    expect_array("a", a, FP8_DTYPES, ("tokens", "k"))
    scales, activation_arguments = (a_scale, b_scale, None), (activation, activations.ALPHA, activations.LIMIT, False)
    return _multiply(
        a, b, expert_offsets, scales, None, None, activation_arguments, out_dtype, out_q, expected_m, "auto", out_s
    )  # fmt: skip


# --- one matrix of weights ------------------------------------------------------------------------------

#: {(library, device): int32 [0, MAX_COUNT]}, which assigns all rows of any product to one expert.
_all_rows: dict[tuple[str, int | None], Any] = {}


def _offsets_of_one(x: Any) -> Any:
    if isinstance(x, Array):  # from `cukern.explain`, which launches nothing
        return empty((2,), "int32")
    like: Any = arrays.enter("x", x)
    library: Any = arrays.library_of(like)
    key = library.name, library.device(like, "x")
    found = _all_rows.get(key)
    if found is None:
        found = library.from_numpy(np.array([0, MAX_COUNT], np.int32), like)
        if type(found) is library.array_type:  # tracing makes tensors without memory, of a subclass
            _all_rows[key] = found
    return found


@op(twin.quantized_matmul)
def _quantized_matmul(
    x: Any,
    w: Any,
    w_scale: Any,
    offsets: Any,
    *,
    x_scale: Any,
    bias: Any,
    out_dtype: Any,
    out: Any,
    expected_m: Any,
    variant: Any,
) -> Any:
    """Record the quantization of `x`, where the weights need it, and the product with one expert."""
    operands = dense.operands(x, w, w_scale, x_scale, bias)
    if x.dtype in HALF_DTYPES:
        if out_dtype is not None:
            check.one_of("out_dtype", out_dtype, (x.dtype,))
        out_dtype = x.dtype
    scales = operands.a_scale, operands.b_scale, None
    unfused = None, activations.ALPHA, activations.LIMIT, False
    return _multiply(
        operands.a, operands.b, offsets, scales, None, operands.bias, unfused, out_dtype, out, expected_m, variant
    )


def _matmul_result(x: Any, w: Any, *_: Any, out_dtype: Any = None, **__: Any) -> Result:
    dtype = dtype_name(x)
    n = rows_of_weights(w) if is_prepared(w) else w.shape[0]
    return Result((x.shape[0], n), dtype if dtype in HALF_DTYPES else out_dtype or "bfloat16", "[rows, n]")


@operator("product", _matmul_result)
def quantized_matmul(
    x: AnyArray,
    w: AnyArray,
    w_scale: AnyArray | None,
    *,
    x_scale: AnyArray | None = None,
    bias: AnyArray | None = None,
    out_dtype: str | None = None,
    out: AnyArray | None = None,
    expected_m: int | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Multiply rows by one matrix of quantized weights: `out = x @ w.T + bias`, with the weights dequantized.

    The sums are in float32 and are rounded once. With FP8 weights, a 16-bit `x` is quantized to FP8 first: for scales
    by blocks as `per_token_group_quant_fp8(x, 128)`, otherwise as `scaled_fp8_quant` with `x_scale`, or with a scale
    per row if `x_scale` is None.

    Args:
        x: [rows, k], contiguous: bfloat16, float16, or FP8 (e4m3; uint8 in CuPy).
        w: contiguous weights. FP8: [n, k] float8_e4m3fn or uint8. MXFP4 for a 16-bit `x`: uint8 [1, n / 8, ceil(k /
            64), 272] from `cukern.prepare_weights` (on Hopper), or uint8 [n, k / 2], two e2m1 elements per byte, the
            first in the low 4 bits. MXFP4 for FP8 rows (on Hopper): uint8 [1, n / 8, ceil(k / 128), 544], from
            `prepare_weights` with a_dtype="float8_e4m3fn"; a 16-bit `x` is then quantized in groups of 128.
        w_scale: the factors of the weights. FP8: float32 [ceil(n / 128), ceil(k / 128)] (blocks of 128 x 128), [] or
            [1] (one for the matrix), or [n] or [n, 1] (one for each row of `w`). MXFP4 [n, k / 2]: E8M0 bytes [n, k /
            32]. None with prepared weights, which contain their scales.
        x_scale: the factors of an FP8 `x`, float32: [rows, ceil(k / 128)] with scales by blocks and with MXFP4 for FP8
            rows, otherwise [rows], [rows, 1] or [1]. With a 16-bit `x` and FP8 weights without blocks, a static
            scale, float32 [] or [1], that quantizes `x`.
        bias: float32 or of the result's dtype, [n], added to the sums in float32.
        out_dtype: with an FP8 `x`, "bfloat16" (the default) or "float16"; otherwise the dtype of `x`.
        out: [rows, n], to write into.
        expected_m, variant: as in `moe_gemm`. The choice of the kernel and of its tiles depends on the number of rows,
            n and k. With both arguments set, the bits of a row depend neither on other rows nor on the number of rows.

    Returns:
        `out`, or a new array [rows, n] in the library and on the device of `x`.

    Raises:
        TypeError: a value that is not an array, or an array of another library or a wrong dtype.
        ValueError: another device, a wrong shape, strides, a k that is not a multiple of 128 with a 16-bit `x` that is
            quantized in groups, or a variant that cannot compute the product.

    The first call on a device copies 8 bytes to it, so call the function once before a CUDA graph is captured.

    Example:
        >>> import numpy as np, cukern, ml_dtypes
        >>> x = np.ones((2, 128), ml_dtypes.bfloat16)
        >>> w = np.full((3, 128), 2, ml_dtypes.float8_e4m3fn)
        >>> cukern.quantized_matmul(x, w, np.full((1, 1), 0.5, np.float32)).astype(np.float32)
        array([[128., 128., 128.],
               [128., 128., 128.]], dtype=float32)

    The blocks and groups are from the DeepSeek-V3 technical report (arXiv:2412.19437, section 3.3).
    """
    return _quantized_matmul(
        x, w, w_scale, _offsets_of_one(x), x_scale=x_scale, bias=bias, out_dtype=out_dtype, out=out,
        expected_m=expected_m, variant=variant,
    )  # fmt: skip
