"""Quantization to 8 bits (FP8, int8) with a scale per tensor, row or group, and to 4 bits."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP, SMALLEST, SMALLEST_FP8
from cukern.ops.moe_activation import check_halves
from cukern.ops.quantization import choose as launches
from cukern.ops.quantization.choose import DTYPES, VARIANTS, Input
from cukern.reference import quantization as twin
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray, Size, WrittenArray
from cukern.runtime.describe import Result, expect, expect_array, expect_contiguous, expect_place
from cukern.runtime.fp8 import scale_of, scales_result
from cukern.runtime.op import op
from cukern.runtime.plan import outputs, run_twin
from cukern.runtime.rows import MAX_ROWS, rows_of

__all__ = [
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "per_token_group_quant_fp8",
    "per_token_group_quant_int8",
    "quantize_mxfp4",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul_quant",
]

FP8 = "float8_e4m3fn"
#: The smallest `eps`: with smaller scales, x / scale might be rounded wrongly.
MIN_EPS = 1e-20
_ONE = "a number or a float32 array of one element"


# --- 8 bits -------------------------------------------------------------------------------------------


def _scaled_fp8_results(
    input: Any, scale: Any = None, num_token_padding: Any = None, scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False, *_: Any, **__: Any,
) -> list[Result]:  # fmt: skip
    shape = tuple(input.shape)
    if num_token_padding is not None:
        shape = (max(num_token_padding, shape[0]), *shape[1:])
    one = scale is not None or not use_per_token_if_dynamic
    return [Result(shape, FP8, "[tokens, ..., hidden]"), Result((1,) if one else (*shape[:-1], 1), "float32")]


@op(twin.scaled_fp8_quant, "quantized, scales", _scaled_fp8_results)
def scaled_fp8_quant(
    input: AnyArray,
    scale: AnyArray | float | None = None,
    num_token_padding: Size | None = None,
    scale_ub: AnyArray | float | None = None,
    use_per_token_if_dynamic: bool = False,
    output: WrittenArray | None = None,
    *,
    expert_num_tokens: AnyArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Quantize to FP8 (e4m3) with one given scale, one computed scale, or a computed scale for each token.

        largest = min(max |input|, scale_ub); max |input| is over the whole input or over a token, without NaN
        scale   = max(largest, 1 / 512) / 448
        out     = e4m3(input / scale), rounded to nearest (ties to even), saturated to +-448; NaN stays NaN

    Args:
        input: [tokens, ..., hidden], float32, float16 or bfloat16; rows at a constant stride.
        scale: a number, or a float32 array of one element, instead of a computed scale.
        num_token_padding: the minimum number of rows of the results. Rows past the tokens are undefined.
        scale_ub: a number, or a float32 array of one element: an upper bound for `largest`.
        use_per_token_if_dynamic: without a scale, compute one for each token.
        output: an array to write into and return, float8_e4m3fn or uint8.
        expert_num_tokens: int32 [experts], for input of [experts, max_tokens, hidden]: the tokens of each expert. Rows
            past them are neither read nor written.
        variant: "auto", "vector" (8 elements at a time; needs aligned rows) or "scalar". All give the same bits.

    Returns:
        out [tokens, ..., hidden] in float8_e4m3fn (uint8 in CuPy), and the scale, float32 [1] or [tokens, ..., 1], as a
        new array. `out * scale` approximates the input.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: unsupported shapes, strides, devices or sizes.

    The interface is vLLM's `scaled_fp8_quant`.
    """
    expect_array("input", input, DTYPES)
    rows = rows_of("input", input, expert_num_tokens)
    if num_token_padding is not None and expert_num_tokens is not None:
        check.fail("num_token_padding", "None with expert_num_tokens", "one")
    if num_token_padding is not None:
        if len(input.shape) < 2:
            check.dimensions("input", input.shape, ("tokens", "hidden"))
        num_token_padding = check.integer("num_token_padding", num_token_padding, 0, MAX_ROWS)
    given = None if scale is None else scale_of("scale", scale, input, "input")
    upper = None
    if scale_ub is not None:
        if given is not None:
            check.fail("scale_ub", "None with a scale", "one")
        upper = scale_of("scale_ub", scale_ub, input, "input")
    results = _scaled_fp8_results(input, scale, num_token_padding, scale_ub, use_per_token_if_dynamic)
    q, s = outputs((output, None), input, "input", *results, names=("output", ""))
    if input.on_host:
        return run_twin(variant, VARIANTS)
    source = Input("input", input, rows, variant)
    if given is None and use_per_token_if_dynamic:
        launches.quantize_groups(source, "E4M3", 0, q, s, float(SMALLEST_FP8), upper=upper)
    else:
        launches.quantize_tensor(source, "E4M3", q, s, given, upper=upper)
    return q, s


def _group_results(dtype: str) -> Any:
    def results(
        x: Any, group_size: int, eps: float = 1e-10, *, column_major_scales: bool = False, **_: Any
    ) -> list[Result]:
        scales, symbols = (*x.shape[:-1], x.shape[-1] // group_size), "[..., k / group_size]"
        if column_major_scales:
            symbols = "[..., k / group_size, tokens], transposed,"
        return [Result(x.shape, dtype, "[..., k]"), Result(scales, "float32", symbols, column_major_scales)]

    return results


def _group_size(group_size: Any, k: int) -> int:
    group_size = check.integer("group_size", group_size, 1)
    if k % group_size:
        check.fail("x", f"of whole groups of {group_size} along its last dimension", k)
    return group_size


def _per_token_group_quant(
    x: Any, group_size: int, eps: float, column_major_scales: bool, use_ue8m0: bool, expert_num_tokens: Any,
    out_q: Any, out_s: Any, variant: str, fmt: str,
) -> tuple[Any, Any]:  # fmt: skip
    dtype = FP8 if fmt == "E4M3" else "int8"
    expect_array("x", x, DTYPES)
    rows = rows_of("x", x, expert_num_tokens)
    group_size = _group_size(group_size, rows.size)
    if check.number("eps", eps) < MIN_EPS:
        check.fail("eps", f"a number of at least {MIN_EPS}", eps)
    if column_major_scales and len(x.shape) < 2:
        check.dimensions("x", x.shape, ("...", "tokens", "k"))
    results = _group_results(dtype)(x, group_size, column_major_scales=column_major_scales)
    q, s = outputs((out_q, out_s), x, "x", *results, names=("out_q", "out_s"))
    if x.on_host:
        return run_twin(variant, VARIANTS)
    source = Input("x", x, rows, variant)
    launches.quantize_groups(
        source, fmt, group_size, q, s, eps, power_of_two=use_ue8m0, column_major=column_major_scales
    )
    return q, s


@op(twin.per_token_group_quant_fp8, "x_q, x_s", _group_results(FP8))
def per_token_group_quant_fp8(
    x: AnyArray,
    group_size: int,
    eps: float = 1e-10,
    *,
    column_major_scales: bool = False,
    use_ue8m0: bool = False,
    expert_num_tokens: AnyArray | None = None,
    out_q: WrittenArray | None = None,
    out_s: WrittenArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Quantize to FP8 (e4m3) with a scale for each group of neighbouring elements of a token.

        scale = max(max |x|, eps) / 448; max |x| is over a group, without NaN
        x_q   = e4m3(x / scale), rounded to nearest (ties to even), saturated to +-448; NaN stays NaN

    Args:
        x: [..., k], float32, float16 or bfloat16; rows at a constant stride.
        group_size: divides k; powers of two from 8 to 256 are fast.
        eps: lower limit of max |x|, at least 1e-20.
        column_major_scales: make x_s a transposed view of an array [..., k / group_size, tokens].
        use_ue8m0: round the scales up to powers of two.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, k]: the tokens of each expert. Rows past
            them are neither read nor written.
        out_q, out_s: arrays to write into and return; out_q float8_e4m3fn or uint8.
        variant: as in `scaled_fp8_quant`. The errors are the same.

    Returns:
        x_q [..., k] in float8_e4m3fn (uint8 in CuPy), and x_s float32 [..., k / group_size].

    The interface is vLLM's `per_token_group_quant_fp8`. Groups of 1 x 128 elements are from the DeepSeek-V3 technical
    report (arXiv:2412.19437, section 3.3).
    """
    options = column_major_scales, use_ue8m0, expert_num_tokens, out_q, out_s, variant
    return _per_token_group_quant(x, group_size, eps, *options, "E4M3")


@op(twin.per_token_group_quant_int8, "x_q, x_s", _group_results("int8"))
def per_token_group_quant_int8(
    x: AnyArray,
    group_size: int,
    eps: float = 1e-10,
    *,
    column_major_scales: bool = False,
    truncate: bool = False,
    expert_num_tokens: AnyArray | None = None,
    out_q: WrittenArray | None = None,
    out_s: WrittenArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Quantize to int8 with a scale for each group of neighbouring elements of a token: max(max |x|, eps) / 127.

    Arguments, results and errors are as in `per_token_group_quant_fp8`, but x_q is int8, and NaN becomes 0.

    Args:
        truncate: round x_q towards zero, as vLLM and SGLang do. The error is then up to one scale instead of half a
            scale.
    """
    options = column_major_scales, False, expert_num_tokens, out_q, out_s, variant
    return _per_token_group_quant(x, group_size, eps, *options, "INT8_TRUNCATE" if truncate else "INT8")


def _scaled_int8_results(
    input: Any, scale: Any = None, azp: Any = None, symmetric: bool = True, **_: Any
) -> list[Result | None]:
    shape = (*input.shape[:-1], 1) if scale is None else (1,)
    zero = None if symmetric else Result(shape, "int32")
    return [Result(input.shape, "int8"), Result(shape, "float32"), zero]


@op(twin.scaled_int8_quant, "quantized, scales, zero_points", _scaled_int8_results)
def scaled_int8_quant(
    input: AnyArray,
    scale: AnyArray | float | None = None,
    azp: AnyArray | None = None,
    symmetric: bool = True,
    *,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """Quantize to int8 with one given scale, or with a scale and optionally a zero point for each token.

        given       out = clamp(round(input / scale) + azp, -128, 127)
        symmetric   scale = max(max |input|, 1e-10) / 127
        otherwise   scale = max((max input - min input) / 255, max(max |input|, 1e-10) / 2**22),
                    azp = round(-128 - min input / scale)

    Because of the term with 2**22, input / scale is so small that float32 represents the rounded quotient exactly. The
    scale of finite elements is finite. Rounding is to nearest, ties to even. NaN does not affect the scale, and is
    quantized like 0.

    Args:
        input: [..., hidden], float32, float16 or bfloat16; rows at a constant stride.
        scale: a number, or a float32 array of one element.
        azp: the zero point, an int32 array of one element; only with a given scale and symmetric=False.
        symmetric: True: without a zero point.
        variant: as in `scaled_fp8_quant`. The errors are the same.

    Returns:
        out int8 [..., hidden], the scale, float32 [1] or [..., 1], and the zero point, int32 in the same shape, or
        None. Scale and zero point are new arrays. `(out - azp) * scale` approximates the input.

    The interface is vLLM's `scaled_int8_quant`.
    """
    expect_array("input", input, DTYPES)
    rows = rows_of("input", input)
    given = None if scale is None else scale_of("scale", scale, input, "input")
    if azp is not None:
        if given is None or symmetric:
            check.fail("azp", "None without a scale, or if symmetric", "one")
        expect_place("azp", azp, input, "input")
        check.dtype("azp", azp.dtype, ("int32",))
        if any(size != 1 for size in azp.shape):
            check.fail("azp", "an array of one element", f"an array of shape {list(azp.shape)}")
    elif given is not None and not symmetric:
        check.fail("azp", "an int32 array of one element with a scale that is not symmetric", "None", TypeError)
    q, s, zero = outputs(None, input, "input", *_scaled_int8_results(input, scale, azp, symmetric))
    if input.on_host:
        return run_twin(variant, VARIANTS)
    source, fmt = Input("input", input, rows, variant), "INT8" if symmetric else "INT8_AZP"
    if given is not None:
        launches.quantize_tensor(source, fmt, q, s, given, azp=azp, azp_out=zero)
    else:
        launches.quantize_groups(source, fmt, 0, q, s, float(SMALLEST), azp=zero)
    return q, s, zero


def _activated_results(
    x: Any, activation: str = "silu", *, group_size: Any = 128, scale: Any = None, **_: Any
) -> list[Result]:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    return [Result(shape, FP8, "[..., inter]"), scales_result(shape, "inter", group_size, scale)]


@op(twin.silu_and_mul_quant, "quantized, scales", _activated_results)
def silu_and_mul_quant(
    x: AnyArray,
    activation: str = "silu",
    *,
    group_size: int | None = 128,
    scale: AnyArray | float | None = None,
    expert_num_tokens: AnyArray | None = None,
    out_q: WrittenArray | None = None,
    out_s: WrittenArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Compute a gated activation in float32, and quantize it to FP8 (e4m3) without rounding it to another dtype first.

    The activation is as in `cukern.moe_activation`. Scales of groups are as in `cukern.per_token_group_quant_fp8`.
    Other scales are as in `cukern.scaled_fp8_quant`.

    Args:
        x: [..., 2 * inter], float32, float16 or bfloat16; the first half of a row is the gate; rows at a
            constant stride.
        activation: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2".
        group_size: divides inter; None: one scale for each token.
        scale: one scale for all elements: a number, or a float32 array of one element; only with group_size None.
        expert_num_tokens, out_q, out_s, variant: as in `per_token_group_quant_fp8`. The errors are the same.

    Returns:
        q [..., inter] in float8_e4m3fn (uint8 in CuPy), and scales float32 [..., inter / group_size], [..., 1] or [1].
    """
    number = activations.number(activation)
    expect_array("x", x, DTYPES)
    inter = check_halves("x", x)
    rows = rows_of("x", x, expert_num_tokens)
    given = None if scale is None else scale_of("scale", scale, x, "x")
    if given is None and group_size is not None:
        group_size = _group_size(group_size, inter)
    results = _activated_results(x, activation, group_size=group_size, scale=scale)
    q, s = outputs((out_q, out_s), x, "x", *results, names=("out_q", "out_s"))
    if x.on_host:
        return run_twin(variant, VARIANTS)
    source = Input("x", x, rows, variant, number)
    if given is not None:
        launches.quantize_tensor(source, "E4M3", q, s, given)
    else:
        smallest = SMALLEST_FP8 if group_size is None else SMALLEST
        launches.quantize_groups(source, "E4M3", group_size or 0, q, s, float(smallest))
    return q, s


# --- 4 bits -------------------------------------------------------------------------------------------


def _fp4_results(group: int) -> Any:
    def results(x: Any, *_: Any) -> list[Result]:
        return [Result((*x.shape[:-1], x.shape[-1] // each), "uint8") for each in (2, group)]

    return results


def _quantize_fp4(name: str, x: Any, fmt: str, group: int, global_scale: Any = None) -> Any:
    expect_array(name, x, DTYPES)
    rows = rows_of(name, x)
    if rows.size % group:
        check.fail(name, f"of whole groups of {group} along its last dimension", rows.size)
    given = scale_of("input_global_scale", global_scale, x, name)
    packed, scales = outputs(None, x, name, *_fp4_results(group)(x))
    if x.on_host:
        return run_twin()
    launches.quantize_fp4(Input(name, x, rows, "auto"), fmt, group, packed, scales, given)
    return packed, scales


@op(twin.quantize_mxfp4, "packed, scale", _fp4_results(MXFP4_GROUP))
def quantize_mxfp4(x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Quantize to MXFP4: 4-bit floats (e2m1), with a power of two as the scale of each 32 neighbouring elements.

        scale = 2**(floor(log2(max |x|)) - 2), between 2**-127 and 2**125; the maximum is over a group
        value = e2m1(x / scale): the nearest of +-0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to the even code

    Args:
        x: [..., k], float32, float16 or bfloat16, k a multiple of 32; rows at a constant stride.

    Returns:
        packed uint8 [..., k / 2], two elements per byte, the first in the low 4 bits, and scale uint8 [..., k / 32] in
        E8M0: byte b means 2**(b - 127); 255 means NaN, for a group with an infinity or NaN.

    Raises:
        TypeError: an unsupported dtype.
        ValueError: unsupported shapes, strides or sizes.

    The format and its scales are from the OCP Microscaling Formats specification 1.0 (section 6.3).
    """
    return _quantize_fp4("x", x, "MXFP4", MXFP4_GROUP)


@op(twin.scaled_fp4_quant, "packed, scale", _fp4_results(NVFP4_GROUP))
def scaled_fp4_quant(input: AnyArray, input_global_scale: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Quantize to NVFP4: 4-bit floats (e2m1), with an FP8 scale for each 16 neighbours and one global scale.

        scale = e4m3(input_global_scale * (max |input| / 6)); the maximum is over a group, without NaN
        value = e2m1(input * (input_global_scale / scale)): the nearest of +-0, 0.5, 1, 1.5, 2, 3, 4 and 6, ties to the
                even code; 0 if the scale is 0; NaN becomes 0

    Args:
        input: [..., k], float32, float16 or bfloat16, k a multiple of 16; rows at a constant stride.
        input_global_scale: a number, or a float32 array of one element. 448 * 6 / max |input| uses the full range of
            the FP8 scales.

    Returns:
        packed uint8 [..., k / 2], as from `quantize_mxfp4`, and scale uint8 [..., k / 16], e4m3, row by row (vLLM: in
        the swizzled order of Blackwell's tensor cores). value * scale / input_global_scale approximates the input.

    The errors are as in `quantize_mxfp4`. The interface is vLLM's `scaled_fp4_quant`.
    """
    if input_global_scale is None:
        check.fail("input_global_scale", _ONE, "None", TypeError)
    return _quantize_fp4("input", input, "NVFP4", NVFP4_GROUP, input_global_scale)


def _read_results(packed: Any, *rest: Any, dtype: str = "bfloat16") -> Result:
    given = rest[-1] if rest and isinstance(rest[-1], str) else dtype
    return Result((*packed.shape[:-1], packed.shape[-1] * 2), given)


def _dequantize_fp4(
    packed: Any, scale: Any, dtype: str, fmt: str, group: int, scale_dtypes: tuple[str, ...], global_scale: Any = None
) -> Any:
    expect_array("packed", packed, ("uint8",))
    check.one_of("dtype", dtype, DTYPES)
    if not packed.shape or packed.shape[-1] * 2 % group:
        check.fail("packed", f"of shape [..., k / 2] with k a multiple of {group}", list(packed.shape))
    expect_contiguous("packed", packed)
    shape = (*packed.shape[:-1], packed.shape[-1] * 2 // group)
    expect("scale", scale, packed, "packed", scale_dtypes, shape, f"[..., k / {group}]")
    given = scale_of("global_scale", global_scale, packed, "packed")
    out = outputs(None, packed, "packed", _read_results(packed, dtype=dtype))
    if packed.on_host:
        return run_twin()
    launches.dequantize_fp4(packed, scale, fmt, out, given)
    return out


@op(twin.dequantize_mxfp4, "numbers", _read_results)
def dequantize_mxfp4(packed: AnyArray, scale: AnyArray, dtype: str = "bfloat16") -> AnyArray:
    """Unpack the result of `cukern.quantize_mxfp4`: value * 2**(scale - 127), rounded once.

    Args:
        packed: uint8 [..., k / 2], two elements per byte, the first in the low 4 bits; contiguous.
        scale: uint8 or float8_e8m0fnu [..., k / 32]; contiguous.
        dtype: "float32", "float16" or "bfloat16".

    Returns:
        [..., k].

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: unsupported shapes, strides, devices or sizes.
    """
    return _dequantize_fp4(packed, scale, dtype, "MXFP4", MXFP4_GROUP, ("uint8", "float8_e8m0fnu"))


@op(twin.dequantize_nvfp4, "numbers", _read_results)
def dequantize_nvfp4(packed: AnyArray, scale: AnyArray, global_scale: AnyArray, dtype: str = "bfloat16") -> AnyArray:
    """Unpack the result of `cukern.scaled_fp4_quant`: value * (scale / global_scale), rounded once.

    Args:
        packed, dtype: as in `dequantize_mxfp4`. The errors are the same.
        scale: float8_e4m3fn or uint8 [..., k / 16]; contiguous.
        global_scale: the input_global_scale of the quantization, a number or a float32 array of one element. Its
            inverse is the b_global_scale of `cukern.moe_gemm`.

    Returns:
        [..., k].
    """
    if global_scale is None:
        check.fail("global_scale", _ONE, "None", TypeError)
    return _dequantize_fp4(packed, scale, dtype, "NVFP4", NVFP4_GROUP, (FP8, "uint8"), global_scale)
