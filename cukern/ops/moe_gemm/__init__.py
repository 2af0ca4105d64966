"""Grouped products of a mixture of experts: each expert's weights times the rows of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cukern.formats.quantized import BLOCK, MXFP4_GROUP, NVFP4_GROUP, SMALLEST
from cukern.formats.weights import is_prepared, rows_of_weights
from cukern.ops.moe_gemm import fma, folded, fp8, kernels, stream_one
from cukern.ops.moe_gemm.kernels import Product
from cukern.ops.moe_gemm.prepare import (
    MAX_COUNT,
    MAX_EXPERTS,
    check_folded,
    prepare_weights,
    prepared_format,
    restore_weights,
)
from cukern.reference import moe_gemm as twin
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.activation import is_gated
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    expect_weights,
    is_transposed,
)
from cukern.runtime.op import op
from cukern.runtime.performance import advise
from cukern.runtime.plan import asked, note, outputs, run_twin

__all__ = ["moe_gemm", "moe_gemm_batched", "prepare_weights", "restore_weights"]

HALF_DTYPES = ("bfloat16", "float16")
#: float32 is for models on a CPU and for comparisons: its products have no tensor cores.
DTYPES = (*HALF_DTYPES, "float32")
#: The dtypes of e4m3. CuPy has no such dtype, and gives their bytes.
FP8_DTYPES = ("float8_e4m3fn", "uint8")
E8M0_DTYPES = ("float8_e8m0fnu", "uint8")
VARIANTS = ("auto", "wgmma", "mma", "stream", "fma")
#: Architectures without an instruction that converts FP8: there "stream" would take too long for each weight.
_NO_FP8_ARCHS = ("80", "86", "87")
#: What the variants are, in words.
_WORDS = {
    "stream": "which reads the weights once for a few rows",
    "wgmma": "Hopper's tensor cores",
    "mma": "tensor cores of every GPU",
    "fma": "the slow general kernel, without tensor cores",
}
#: Of MXFP4 in bfloat16, 8 x 1024 rows and 256 x 8 of them (moe_gemm, n 4096, k 7168, "auto" and "mma").
PREPARE = (
    "weights of 4 bits that are not prepared take up to 3 times as long on Hopper: call "
    "cukern.prepare_weights(weights, scales) once, and pass its result as the weights, without their scales"
)


# --- the choice -----------------------------------------------------------------------------------------


def _why_not(variant: str, x: Product) -> str:
    """The reason why a variant cannot do it; empty if it can."""
    if variant == "fma":
        return ""
    if x.a.dtype == "float32":
        return "a is float32"
    if not x.is_of_units:
        return "rows or addresses are no multiples of 16 bytes"
    why_not_wgmma = fp8.why_not_fp8_wgmma if x.weights == "FP8" else kernels.why_not_wgmma
    reasons = {"wgmma": why_not_wgmma, "mma": kernels.why_not_mma, "stream": kernels.why_not_stream}
    return reasons[variant](x)


def _best(x: Product) -> tuple[str, str]:
    """The variant for "auto", and why."""
    arch, most = x.a.gpu.arch, x.most(kernels.STREAM_ROWS)
    may_stream = x.weights != "FP8" or arch not in _NO_FP8_ARCHS
    few = may_stream and x.expects(kernels.STREAM_ROWS)
    refused: dict[str, list[str]] = {}
    for variant in ("stream",) * few + ("wgmma", "mma", "fma"):
        reason = _why_not(variant, x)
        if not reason:
            break
        refused.setdefault(reason, []).append(variant)
    why = [f"{x.expected}: {variant}, {_WORDS[variant]}"]
    if not may_stream:
        why[0] += f" (no stream: sm_{arch} has no instruction that converts FP8)"
    elif variant == "stream" or (not few and x.weights in kernels.STREAM_FORMS and variant != "fma"):
        why[0] += f" ({'stream only ' * (variant != 'stream')}up to {most} an expert)"
    why += [f"{', '.join(names)} cannot: {reason}" for reason, names in refused.items()]
    if variant == "fma":
        why.append(_fast(x))
    return variant, "; ".join(why)


def _fast(x: Product) -> str:
    """What takes tensor cores, for a product that does not."""
    if x.a.dtype == "float32":
        return f"tensor cores take {' and '.join(HALF_DTYPES)}"
    if not x.is_of_units:
        sizes = f"k of multiples of {x.unit} and results of multiples of {kernels.UNIT_COLUMNS} columns"
        return f"the others take {sizes}, at multiples of 16 bytes"
    return "weights without a stride take mma"


def _kernel(variant: str, x: Product) -> tuple[Callable[[Product], None], str]:
    """The function that launches the variant, and why. What depends on the offsets is left to the device."""
    if x.is_prepared:
        for name, array in (("a", x.a), ("b", x.b), ("out", x.out)):
            if array.alignment < 16:
                check.fail(
                    name,
                    "at a multiple of 16 bytes with prepared weights",
                    f"an address that is a multiple of {array.alignment}",
                )
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
        if _is_better_prepared(variant, x):
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


def _is_better_prepared(variant: str, x: Product) -> bool:
    """Whether there is a faster kernel for the same weights of 4 bits, once they are prepared."""
    return variant == "mma" and x.weights in ("MXFP4", "NVFP4") and not kernels.why_not_prepared("auto", x)


def _quantizing(x: Product, out_scale: Array, dtype: str) -> tuple[Callable[[Product], None], str]:
    """The function that launches the product whose activation is quantized, and why."""
    if reason := _why_not("wgmma", x):
        check.fail("a", "of a call that Hopper's kernel can do", reason)
    ranges = f"up to {fp8.FP8_QUANTIZED_ROWS} an expert and above {fp8.FP8_TAIL_ROWS}"
    why = f"{x.expected}: a layer's first product quantizes its activation ({ranges}, where that takes less time)"
    return lambda x: fp8.fp8_quantized(x, out_scale, dtype, float(SMALLEST)), why


# --- the arguments ---------------------------------------------------------------------------------------


def _check_sizes(a: Array, b: Array, offsets: Array, row_token: Array | None, gated: bool) -> None:
    """Check the dtypes and the shapes of all arrays but the scales and the bias."""
    is_batched, is_fp8, (*_, tokens, k) = len(a.shape) == 3, a.dtype not in DTYPES, a.shape
    packed = ("uint8",) if a.dtype in HALF_DTYPES else ()
    check.dtype("b", b.dtype, FP8_DTYPES if is_fp8 else (a.dtype, *packed))
    is_fp4 = not is_fp8 and b.dtype == "uint8"
    is_folded = is_fp8 and is_prepared(b)
    if is_folded:
        check_folded(b, k)
        if row_token is not None:
            check.fail("row_token", "None with FP8 rows and MXFP4 weights: permute the rows", "an array")
    elif is_fp4 and is_prepared(b):
        prepared_format(b, k)
    else:
        check.dimensions("b", b.shape, ("experts", "n", "k"))
        if is_fp4 and k % NVFP4_GROUP:
            check.fail("a", f"of k that is a multiple of {NVFP4_GROUP} with weights of 4 bits", k)
        wanted = (*b.shape[:2], k // 2 if is_fp4 else k)
        check.shape("b", b.shape, wanted, "[experts, n, k / 2]" if is_fp4 else "[experts, n, k]")
    _check_strides(b)
    experts, n = b.shape[0], rows_of_weights(b)
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("b", f"of at least one and at most {MAX_EXPERTS} experts", experts)
    # Prepared rows come in units of 16 with their gates and ups.
    multiple = 1 if not gated else 16 if is_prepared(b) else 2
    if n % multiple or not 0 < n <= MAX_COUNT:
        why = f" multiple of {multiple} (with a gate)" if gated else " number"
        check.fail("b", f"of n that is a positive{why}", n)
    if not 0 < k <= MAX_COUNT:
        check.fail("a", "of k that is a positive number", k)
    if is_batched:
        check.shape("a", a.shape, (experts, tokens, k), "[experts, max_tokens, k]")
        expect("expert_num_tokens", offsets, a, "a", ("int32",), (experts,), "[experts]")
    else:
        expect("expert_offsets", offsets, a, "a", ("int32", "int64"), (experts + 1,), "[experts + 1]")
    rows = tokens
    if row_token is not None:
        check.dtype("row_token", row_token.dtype, ("int32",))
        check.dimensions("row_token", row_token.shape, ("rows",))
        rows = row_token.shape[0]
    most = MAX_COUNT // experts if is_batched else MAX_COUNT
    if rows > most or tokens > most:
        check.fail("a", f"of at most {MAX_COUNT} rows", list(a.shape))
    if row_token is not None and rows and not tokens:
        check.fail("a", "of at least one token, as row_token has rows", list(a.shape))


def _check_strides(b: Array) -> None:
    """Rows of weights are contiguous, or of 16 bits and 32 their columns; prepared ones have no gaps between them."""
    if is_prepared(b):
        expect_contiguous("b", b)
    else:
        expect_weights("b", b)


def _check_bias(bias: Array, experts: int, n: int, a: Array, dtype: str) -> None:
    expect("bias", bias, a, "a", ("float32", dtype), (experts, n), "[experts, n]")


def _formats(
    a: Array, b: Array, a_scale: Array | None, b_scale: Array | None, b_global_scale: Array | None
) -> tuple[str, str, str]:
    """The format of the weights, the scales of `a` and the scales of `b`: fields of `kernels.Product`."""
    is_fp8 = a.dtype not in DTYPES
    if is_fp8 and is_prepared(b):
        _check_folded_scales(a, a_scale, b_scale, b_global_scale)
        return "FOLDED", "block", "group"
    plain = "TRANSPOSED" if is_transposed(b) else "PLAIN"
    formats = ("FP8", *_fp8_scales(a, b, a_scale, b_scale)) if is_fp8 else (plain, "", "")
    if not is_fp8 and a_scale is not None:
        check.fail("a_scale", f"None with {a.dtype} a", "an array")
    if not is_fp8 and b.dtype == "uint8":
        return _fp4_format(a, b, b_scale, b_global_scale), "", "group"
    if b_global_scale is not None:
        check.fail("b_global_scale", "None without weights of 4 bits", "an array")
    if not is_fp8 and b_scale is not None:
        check.fail("b_scale", f"None with {b.dtype} b", "an array")
    return formats


def _fp8_scales(a: Array, b: Array, a_scale: Array | None, b_scale: Array | None) -> tuple[str, str]:
    """The scales of `a` and of `b` in FP8: fields of `kernels.Product`."""
    for name, array in (("a_scale", a_scale), ("b_scale", b_scale)):
        if array is None:
            check.fail(name, "an array with FP8", None, TypeError)
        check.dtype(name, array.dtype, ("float32",))
    assert a_scale is not None and b_scale is not None
    (experts, n, k), rows, shape = b.shape, a.shape[:-1], a_scale.shape
    blocks, symbol = -(-k // BLOCK), "experts, max_tokens" if len(rows) == 2 else "tokens"
    if len(b_scale.shape) == 3:
        wanted = f"[experts, ceil(n / {BLOCK}), ceil(k / {BLOCK})]"
        check.shape("b_scale", b_scale.shape, (experts, -(-n // BLOCK), blocks), wanted)
        check.shape("a_scale", shape, (*rows, blocks), f"[{symbol}, ceil(k / {BLOCK})], as b_scale is by blocks,")
        return "block", "block"
    if b_scale.shape not in ((experts,), (experts, n)):
        wanted = f"of shape [experts] = {[experts]}, [experts, n] = {[experts, n]} or by blocks"
        check.fail("b_scale", wanted, list(b_scale.shape))
    # A single token's scale counts as one by row.
    if len(rows) == 2 and len(shape) == 1 and shape[0] == experts != 1:
        return "expert", "one" if len(b_scale.shape) == 1 else "column"
    flat = shape[:-1] if len(shape) > len(rows) and shape[-1] == 1 else shape
    is_by_row = len(flat) == len(rows) and flat == rows
    if not is_by_row and (len(shape) != 1 or shape[0] != 1):
        one = "[1], [experts]," if len(rows) == 2 else "[1],"
        wanted = f"of shape {one} [{symbol}] = {list(rows)} or [{symbol}, 1], as b_scale is not by blocks"
        check.fail("a_scale", wanted, list(shape))
    return "row" if is_by_row else "one", "one" if len(b_scale.shape) == 1 else "column"


def _check_folded_scales(a: Array, a_scale: Array | None, b_scale: Array | None, b_global_scale: Array | None) -> None:
    """Check the scales of FP8 rows with MXFP4 weights."""
    if a_scale is None:
        check.fail("a_scale", "an array with FP8", None, TypeError)
    check.dtype("a_scale", a_scale.dtype, ("float32",))
    symbol = "experts, max_tokens" if len(a.shape) == 3 else "tokens"
    wanted = (*a.shape[:-1], -(-a.shape[-1] // BLOCK))
    check.shape("a_scale", a_scale.shape, wanted, f"[{symbol}, ceil(k / {BLOCK})], with MXFP4 weights,")
    if b_scale is not None:
        check.fail("b_scale", "None with prepared weights, which hold their scales", "an array")
    if b_global_scale is not None:
        check.fail("b_global_scale", "None with MXFP4", "an array")


def _fp4_format(a: Array, b: Array, b_scale: Array | None, b_global_scale: Array | None) -> str:
    """The format of weights of 4 bits."""
    experts, n, k = *b.shape[:2], a.shape[-1]
    if is_prepared(b):
        weights = prepared_format(b, k)
        if b_scale is not None:
            check.fail("b_scale", "None with prepared weights, which hold their scales", "an array")
        _check_global_scale(a, experts, weights, b_global_scale)
        return weights
    if b_scale is None:
        check.fail("b_scale", "an array with weights of 4 bits", None, TypeError)
    shapes = (experts, n, k // MXFP4_GROUP), (experts, n, k // NVFP4_GROUP)
    if b_scale.shape == shapes[0] and k % MXFP4_GROUP == 0:
        check.dtype("b_scale", b_scale.dtype, E8M0_DTYPES)
        _check_global_scale(a, experts, "MXFP4", b_global_scale)
        return "MXFP4"
    if b_scale.shape == shapes[1]:
        check.dtype("b_scale", b_scale.dtype, FP8_DTYPES)
        _check_global_scale(a, experts, "NVFP4", b_global_scale)
        return "NVFP4"
    wanted = f"of shape [experts, n, k / {MXFP4_GROUP}] = {list(shapes[0])} (MXFP4) or "
    wanted += f"[experts, n, k / {NVFP4_GROUP}] = {list(shapes[1])} (NVFP4)"
    check.fail("b_scale", wanted, list(b_scale.shape))


def _check_global_scale(a: Array, experts: int, weights: str, b_global_scale: Array | None) -> None:
    if weights == "MXFP4":
        if b_global_scale is not None:
            check.fail("b_global_scale", "None with MXFP4", "an array")
        return
    if b_global_scale is None:
        check.fail("b_global_scale", "an array with NVFP4", None, TypeError)
    expect("b_global_scale", b_global_scale, a, "a", ("float32",), (experts,), "[experts]")


def _expected(number: Any) -> Any:
    return None if number is None else check.integer("expected_m", number, 0)


def _product(
    a: Any, b: Any, *_: Any, row_token: Any = None, activation: Any = None, out_dtype: Any = None, **__: Any
) -> Result:
    """The result of either function."""
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
    """The arrays for a quantized result and its scales; `activated`: the result without quantization."""
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
    form: tuple[str | None, float, float, bool],
    out_dtype: str | None,
    out: Any,
    expected_m: Any,
    variant: str,
    out_scale: Any = None,
) -> Any:
    """The plan of either function, once `a` is known to have its dtype and its dimensions.

    `scales`: of `a`, of `b`, and the global ones; `form`: activation, alpha, limit and interleaved; `out_scale`: of
    `moe_gemm_quantized`, a result beside `out`.
    """
    (a_scale, b_scale, b_global_scale), (activation, alpha, limit, interleaved) = scales, form
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
    _check_sizes(a, b, offsets, row_token, gated)
    formats = _formats(a, b, a_scale, b_scale, b_global_scale)
    is_fp8 = a.dtype not in DTYPES
    if out_dtype is None and is_fp8 and isinstance(out, Array) and out.dtype in HALF_DTYPES:
        out_dtype = out.dtype
    if out_dtype is not None:
        check.one_of("out_dtype", out_dtype, HALF_DTYPES if is_fp8 else (a.dtype,))
    expected_m = _expected(expected_m)
    result = _product(a, b, row_token=row_token, activation=activation, out_dtype=out_dtype)
    if bias is not None:
        _check_bias(bias, b.shape[0], rows_of_weights(b), a, result.dtype)
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
    if len(a.shape) == 2:  # batched, only the GPU knows how many rows there are
        note(flops=2 * rows * n * k // (2 if is_fp8 else 1))  # FP8: at twice the rate
    sizes = len(a.shape) == 3, rows, experts, n, k
    is_bounded = activation == "swigluoai" and (alpha, limit) != (activations.ALPHA, activations.LIMIT)
    flags = {"biased": bias is not None, "bounded": is_bounded, "scale_of_expert": formats[1] == "expert"}
    epilogue = kernels.epilogue(number, is_gated=gated, interleaved=interleaved, **flags)
    x = Product(
        a, b, out, offsets, *scales, row_token, *sizes, *formats, epilogue, gated, expected_m, is_prepared(b),
        interleaved, bias, alpha, limit,
    )  # fmt: skip
    launch, why = _kernel(variant, x) if out_scale is None else _quantizing(x, out_scale, out_dtype or "bfloat16")
    launch(x._replace(why=why))
    return out if out_scale is None else (out, out_scale)


# --- the functions --------------------------------------------------------------------------------------


@op(
    twin.moe_gemm,
    "product",
    _product,
)
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
    """Multiply the rows of each expert by its weights: out[r] = a[r] b[e]^T for the rows r of expert e.

    Groups may be of any sizes, none of them padded; the device alone knows them. Sums are formed in float32, and
    rounded once; the same arguments give the same bits.

    Args:
        a: [rows, k] bfloat16, float16, float32 (always by "fma") or FP8 (e4m3; CuPy, which has no such dtype, gives its
            bytes as uint8).
        b: weights [experts, n, k] of the dtype of `a`; or, where that has 16 bits, uint8 [experts, n, k / 2]: numbers
            of 4 bits (e2m1), two in a byte, the low half first; or those prepared by `cukern.prepare_weights`, for
            Hopper; FP8 rows take MXFP4 weights prepared for them (a_dtype="float8_e4m3fn"). Rows are contiguous, and
            may have any stride. Of the dtype of `a` in 16 bits and 32, `b` may be the view `w.transpose(1, 2)` of an
            array [experts, k, n], which is not copied: n then is contiguous in place of k. n and k may be of any size,
            in 4 bits whole groups of a scale; fast are n of multiples of 8 (gated, of 16), k of multiples of 8 in 16
            bits, of 16 in 8, of 32 in 4, addresses at multiples of 16 bytes, and weights without strides or, on Hopper
            and in 16 bits or 8, with those of such multiples.
        expert_offsets: int32 or int64 [experts + 1], ascending from 0: expert e has rows expert_offsets[e] to
            expert_offsets[e + 1] - 1. Offsets outside of the rows count as their ends.
        a_scale: with FP8, float32: [rows, ceil(k / 128)], or [rows], [rows, 1] or [1].
        b_scale: with FP8, float32: in the first case [experts, ceil(n / 128), ceil(k / 128)], one of each block of 128
            x 128 weights, and products are added up in float32 every 128 of k; else [experts] or [experts, n]. With 4
            bits, bytes: [experts, n, k / 32], powers of two (E8M0; of those, 2^-100 to 2^33): MXFP4; or
            [experts, n, k / 16], numbers of e4m3: NVFP4. Prepared weights hold them; of those of MXFP4, with float16
            rows, 2^-17 to 2^7.
        b_global_scale: with NVFP4, float32 [experts], which multiplies all of an expert: the inverse of what
            `dequantize_nvfp4` divides by.
        row_token: int32 [rows]; row r is a[row_token[r]], and `a` is [tokens, k], `a_scale` by token. A number that
            names no token is taken for the nearest that does.
        bias: float32 or of the result's dtype, [experts, n], added to the sums in float32.
        activation: of a gated layer: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2", see `cukern.moe_activation`.
            The result has n / 2 columns, activate(gate, up) of the sums in float32; n must be even. Of a layer without
            a gate, by vLLM's names: "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul" or "relu2_no_mul", of each sum.
        alpha, limit: of "swigluoai".
        interleaved: rows 2 j and 2 j + 1 of an expert's weights (and bias) are gate j and its up, as in gpt-oss; else
            the gates are the first half of n.
        out_dtype: with FP8 "bfloat16", the default, or "float16"; else it is that of `a`.
        out: [rows, n] or [rows, n / 2], to write into. Rows from expert_offsets[experts] on are not written.
        expected_m: rows that a group is expected to have at most: a hint, as in DeepGEMM, by which "auto" and the sizes
            of tiles are chosen. None: by the mean.
        variant: "wgmma" (Hopper; 16 bits, 8 without row_token, prepared 4 bits), "mma", "stream" (16 bits and 8;
            reads the weights anew for every few rows), "fma" (all sizes, strides and addresses; without tensor cores)
            or "auto": "stream" for at most 4 rows, or a mean of 2, then "wgmma", "mma" and "fma", the first that can.
            Of these "stream" takes no view of [experts, k, n]; the others give the same bits for it.
            Many rows are better permuted than gathered where they are of 8 bits, or n is above some 8000.

    Returns:
        `out`, or an array like `a`, in which rows of no expert have no particular value.

    Raises:
        TypeError: for what is no array, of another library, or of a wrong dtype.
        ValueError: for another device, a wrong shape, strides, an unknown name, or a variant that cannot do it; with
            prepared weights also for an address that is no multiple of 16.

    FP8 rows and MXFP4 weights are multiplied in e4m3, and sums of 128 along k are added up in float32, times the row's
    a_scale. The weights there are what they are, exactly, where the scales of a row of weights differ by at most 2^14
    (see `prepare_weights`): what differs from bfloat16 rows is what FP8 takes from the rows. By the twin, of normal
    rows and normal weights quantized to MXFP4, k = 4096, the results differ by 2.6% of their root mean square; from
    those of numbers that are not quantized, by 11.7%, and those of bfloat16 rows by 11.4%.

    The groups are those of DeepGEMM's contiguous layout, without its alignment, and of `torch._grouped_mm`.
    """
    expect_array("a", a, (*DTYPES, *FP8_DTYPES), ("tokens", "k"))
    scales = a_scale, b_scale, b_global_scale
    form = activation, alpha, limit, interleaved
    return _multiply(a, b, expert_offsets, scales, row_token, bias, form, out_dtype, out, expected_m, variant)


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
    """Multiply the rows of each expert by its weights, where every expert has room for as many: out[e] = a[e] b[e]^T.

    Args:
        a: [experts, max_tokens, k], as in `moe_gemm`.
        b, b_scale, b_global_scale, bias, activation, alpha, limit, interleaved, out_dtype, variant: as in `moe_gemm`.
        expert_num_tokens: int32 [experts], how many rows of each expert there are; the rest is not read.
        a_scale: with FP8, float32: [experts, max_tokens, ceil(k / 128)], or [experts, max_tokens], the same with a last
            dimension of 1, [experts] or [1].
        out: [experts, max_tokens, n] or, with an activation, [experts, max_tokens, n / 2], to write into. Rows past the
            count are not written.
        expected_m: as in `moe_gemm`. None: max_tokens.

    Returns:
        `out`, or an array like `a`, in which rows past the count have no particular value.

    Raises:
        TypeError, ValueError: as `moe_gemm` does.

    This is DeepGEMM's masked layout.
    """
    expect_array("a", a, (*DTYPES, *FP8_DTYPES), ("experts", "max_tokens", "k"))
    scales = a_scale, b_scale, b_global_scale
    form = activation, alpha, limit, interleaved
    return _multiply(a, b, expert_num_tokens, scales, None, bias, form, out_dtype, out, expected_m, variant)


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
    """The first product of a gated layer in FP8 by blocks, with its activation, quantized again. For `fused_experts`.

    The bits are those of `moe_gemm` and `silu_and_mul_quant` behind it: sums are rounded to `out_dtype`, and v =
    activate(gate, up) of them is divided by max(max |v|, 1e-10) / 448 of 128 neighbours.

    Args:
        a, b, expert_offsets, a_scale, b_scale, out_dtype, expected_m: as in `moe_gemm` with scales by blocks; n must be
            a multiple of 256.
        activation: one with a gate, as in `moe_gemm`.
        out_q: e4m3 [rows, n / 2], in CuPy uint8, to write into. Rows of no expert are not written.
        out_s: float32 [rows, n / 256], to write the scales into.

    Raises:
        TypeError, ValueError: as `moe_gemm` does, and on other GPUs than Hopper.
    """
    expect_array("a", a, FP8_DTYPES, ("tokens", "k"))
    scales, form = (a_scale, b_scale, None), (activation, activations.ALPHA, activations.LIMIT, False)
    return _multiply(
        a, b, expert_offsets, scales, None, None, form, out_dtype, out_q, expected_m, "auto", out_s
    )  # fmt: skip
