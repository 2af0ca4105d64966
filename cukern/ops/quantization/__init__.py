"""Quantization to 8 bits (FP8, int8), with a scale for all, for each row or for each group; and to 4 bits."""

from __future__ import annotations

from typing import Any

from cukern.ops.quantization.eight_bits import FP8, Function, of_number, quantize, results_of
from cukern.ops.quantization.four_bits import dequantize_fp4, quantize_fp4
from cukern.ops.quantization.four_bits import results_of as results_of_fp4
from cukern.reference import quantization as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray, Size, WrittenArray
from cukern.runtime.describe import Result
from cukern.runtime.op import operator

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

_ONE = "a number or a float32 array of one element"


# --- 8 bits -------------------------------------------------------------------------------------------

_scaled_fp8 = Function(
    twin.scaled_fp8_quant, "input", FP8, "[tokens, ..., hidden]", ("use_per_token_if_dynamic", "variant"),
    ("output", ""),
)  # fmt: skip


def _scaled_fp8_results(
    input: Any, scale: Any = None, num_token_padding: Any = None, scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False, *_: Any, **__: Any,
) -> tuple[Result, Result]:  # fmt: skip
    is_one = scale is not None or not use_per_token_if_dynamic
    return results_of(_scaled_fp8, input.shape, None, is_one, padding=num_token_padding)


@operator("quantized, scales", _scaled_fp8_results)
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
    """FP8 (e4m3) with one scale, given or found, or one for each token.

        largest = min(max |input|, scale_ub), over all of it or over a token; NaN is left out
        scale   = max(largest, 1 / 512) / 448
        out     = e4m3(input / scale), to nearest, ties to even, 448 at most; NaN stays NaN

    Args:
        input: [tokens, ..., hidden], float32, float16 or bfloat16; rows may be strided, all by one distance.
        scale: a number, or a float32 array of one element on the device of `input`, instead of the scale above.
        num_token_padding: make `out`, and scales of tokens, of at least so many tokens; what is there is undefined.
        scale_ub: a number, or a float32 array of one element: a bound of the largest magnitude.
        use_per_token_if_dynamic: without a scale, find one for each token.
        output: an array to write into and return, float8_e4m3fn, or uint8 for its bytes.
        expert_num_tokens: int32 [experts], for input of [experts, max_tokens, hidden]: the tokens of each expert. Rows
            past them are neither read nor written, and have no part in the scale.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        out [tokens, ..., hidden] in float8_e4m3fn, in CuPy uint8, and the scale, float32 [1] or [tokens, ..., 1]; a
        given one as an array of its own. input is about out * scale. Arrays in host memory go through the NumPy
        reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `scaled_fp8_quant`.
    """
    scale, number = of_number(scale)
    scale_ub, bound = of_number(scale_ub)
    facts = (
        _scaled_fp8, use_per_token_if_dynamic, variant, number is None, bound is None, num_token_padding is None,
    )  # fmt: skip
    given = input, expert_num_tokens, output, None, scale, scale_ub, None
    return quantize(facts, given, number, bound, num_token_padding)


_GROUPS = "group_size", "eps", "column_major_scales", "use_ue8m0", "variant"
_fp8_groups = Function(twin.per_token_group_quant_fp8, "x", FP8, "[..., k]", _GROUPS, ("out_q", "out_s"))


def _group_results(function: Function) -> Any:
    return lambda x, group_size, *_, column_major_scales=False, **__: results_of(
        function, x.shape, group_size, False, column_major_scales
    )


@operator("x_q, x_s", _group_results(_fp8_groups))
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
    """FP8 (e4m3) with a scale for each group of neighbours of a token.

        scale = max(max |x|, eps) / 448, over a group; NaN is left out
        x_q   = e4m3(x / scale), to nearest, ties to even, 448 at most; NaN stays NaN

    Args:
        x: [..., k], float32, float16 or bfloat16; rows may be strided, all by one distance.
        group_size: divides k; powers of two from 8 to 256 are the fast ones.
        eps: at least 1e-20.
        column_major_scales: scales with the tokens side by side in memory: x_s is a transposed view, of [..., k /
            group_size, tokens].
        use_ue8m0: scales are rounded up to a power of two.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, k]: the tokens of each expert. Rows past
            them are neither read nor written.
        out_q, out_s: arrays to write into and return; out_q float8_e4m3fn, or uint8 for its bytes.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        x_q [..., k] in float8_e4m3fn, in CuPy uint8, and x_s float32 [..., k / group_size]. Arrays in host memory go
        through the NumPy reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `per_token_group_quant_fp8`; the scales of 1 x 128 are those
    of the DeepSeek-V3 technical report (arXiv:2412.19437, section 3.3).
    """
    facts = _fp8_groups, group_size, eps, column_major_scales, use_ue8m0, variant
    return quantize(facts, (x, expert_num_tokens, out_q, out_s))


_int8_groups = Function(
    twin.per_token_group_quant_int8, "x", "int8", "[..., k]",
    ("group_size", "eps", "column_major_scales", "truncate", "variant"), ("out_q", "out_s"),
)  # fmt: skip


@operator("x_q, x_s", _group_results(_int8_groups))
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
    """int8 with a scale for each group of neighbours of a token: max(max |x|, eps) / 127.

    Arguments, results and errors are those of `per_token_group_quant_fp8`, but x_q is int8, rounded to nearest, ties
    to even, and NaN becomes 0.

    Args:
        truncate: x_q is rounded towards zero, as by the functions of vLLM and SGLang; its error is up to a whole scale;
            that of rounding to nearest is up to half a scale.
    """
    facts = _int8_groups, group_size, eps, column_major_scales, truncate, variant
    return quantize(facts, (x, expert_num_tokens, out_q, out_s))


_scaled_int8 = Function(twin.scaled_int8_quant, "input", "int8", "[..., hidden]", ("symmetric", "variant"))


def _scaled_int8_results(
    input: Any, scale: Any = None, azp: Any = None, symmetric: bool = True, **_: Any
) -> list[Result | None]:
    quantized, scales = results_of(_scaled_int8, input.shape, None, scale is not None)
    return [quantized, scales, None if symmetric else scales._replace(dtype="int32")]


@operator("quantized, scales, zero_points", _scaled_int8_results)
def scaled_int8_quant(
    input: AnyArray,
    scale: AnyArray | float | None = None,
    azp: AnyArray | None = None,
    symmetric: bool = True,
    *,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """int8 with a given scale, or one for each token; and a zero point, unless it is symmetric.

        given       out = clamp(round(input / scale) + azp, -128, 127)
        symmetric   scale = max(max |input|, 1e-10) / 127
        otherwise   scale = max((max input - min input) / 255, max(max |input|, 1e-10) / 2**22),
                    azp = round(-128 - min input / scale)

    The second bound keeps input / scale, where all of a token is about the same, among the integers that float32 has.
    The range max - min may pass float32's largest number: the scale of finite numbers is finite.
    Rounding is to the nearest, ties to even. NaN is left out of the scale, and quantized as 0 is.

    Args:
        input: [..., hidden], float32, float16 or bfloat16; rows may be strided, all by one distance.
        scale: a number, or a float32 array of one element on the device of `input`.
        azp: with a scale, and if it is not symmetric, the zero point: an int32 array of one element.
        symmetric: without a zero point.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        out int8 [..., hidden], the scale, float32 [1] or [..., 1], and the zero point, int32 in the same shape, or
        None; given ones as arrays of their own. input is about (out - azp) * scale. Arrays in host memory go through
        the NumPy reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `scaled_int8_quant`.
    """
    scale, number = of_number(scale)
    given = input, None, None, None, scale, None, azp
    found = quantize((_scaled_int8, symmetric, variant, number is None), given, number)
    return found if found is None or len(found) == 3 else (*found, None)


_activated = Function(
    twin.silu_and_mul_quant, "x", FP8, "[..., inter]", ("activation", "group_size", "variant"), ("out_q", "out_s"),
    is_activated=True,
)  # fmt: skip


@operator(
    "quantized, scales",
    lambda x, *_, group_size=128, scale=None, **__: results_of(_activated, x.shape, group_size, scale is not None),
)
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
    """FP8 (e4m3) of a gated activation, which is not rounded in between.

    What is quantized is activate(gate, up) in float32, as `cukern.moe_activation` has it, with the scales of
    `cukern.per_token_group_quant_fp8`, or of `cukern.scaled_fp8_quant` if there is one for each token or for all.

    Args:
        x: [..., 2 * inter], float32, float16 or bfloat16, the gate half first; rows may be strided, all by one
            distance.
        activation: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2".
        group_size: divides inter; powers of two from 8 to 256 are the fast ones. None: one scale for each token.
        scale: a number, or a float32 array of one element on the device of `x`: the scale of all, without groups.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, 2 * inter]: the tokens of each expert. Rows
            past them are neither read nor written.
        out_q, out_s: arrays to write into and return; out_q float8_e4m3fn, or uint8 for its bytes.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        q [..., inter] in float8_e4m3fn, in CuPy uint8, and scales float32 [..., inter / group_size], [..., 1] or [1].
        Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    if scale is None:
        return quantize((_activated, activation, group_size, variant), (x, expert_num_tokens, out_q, out_s))
    scale, number = of_number(scale)
    facts = _activated, activation, group_size, variant, number is None
    return quantize(facts, (x, expert_num_tokens, out_q, out_s, scale, None, None), number)


# --- 4 bits -------------------------------------------------------------------------------------------


@operator("packed, scale", lambda x: results_of_fp4("MXFP4", x.shape))
def quantize_mxfp4(x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """MXFP4: 4-bit floats (e2m1) with a power of two as the scale of each 32 neighbours.

        scale = 2**(floor(log2(max |x|)) - 2), between 2**-127 and 2**125, over a group
        value = e2m1(x / scale): 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, the nearest, ties to the even code

    Args:
        x: [..., k], float32, float16 or bfloat16, k a multiple of 32; rows may be strided, all by one distance.

    Returns:
        packed uint8 [..., k / 2], the first number of two in the low half, and scale uint8 [..., k / 32]: b stands for
        2**(b - 127) (E8M0), and 255, for a group with an infinity or NaN, for NaN. Arrays in host memory go through the
        NumPy reference.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes, strides or sizes that do not fit; the message names the argument.

    The format and the way to its scales are those of the OCP Microscaling Formats specification 1.0 (section 6.3).
    """
    return quantize_fp4("MXFP4", "x", x)


@operator("packed, scale", lambda input, input_global_scale: results_of_fp4("NVFP4", input.shape))
def scaled_fp4_quant(input: AnyArray, input_global_scale: AnyArray) -> tuple[AnyArray, AnyArray]:
    """NVFP4: 4-bit floats (e2m1) with an FP8 scale for each 16 neighbours, and one for all.

        scale = e4m3(input_global_scale * (max |input| / 6)), over a group; NaN is left out
        value = e2m1(input * (input_global_scale / scale)): 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, the nearest, ties
                to the even code, 0 where the scale is 0; NaN becomes 0

    Args:
        input: [..., k], float32, float16 or bfloat16, k a multiple of 16; rows may be strided, all by one distance.
        input_global_scale: a number, or a float32 array of one element on the device of `input`. 448 * 6 / max |input|
            over all of it uses the whole range of the scales.

    Returns:
        packed uint8 [..., k / 2], the first number of two in the low half, and scale uint8 [..., k / 16], the bytes of
        e4m3 numbers, row by row: not in the swizzled order that Blackwell's matrix units read, which is what vLLM's
        function returns. input is about value * scale / input_global_scale. Arrays in host memory go through the NumPy
        twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `scaled_fp4_quant`.
    """
    if input_global_scale is None:
        check.fail("input_global_scale", _ONE, "None", TypeError)
    return quantize_fp4("NVFP4", "input", input, input_global_scale)


def _read_results(packed: Any, *rest: Any, dtype: str = "bfloat16") -> Result:
    given = rest[-1] if rest and isinstance(rest[-1], str) else dtype
    return Result((*packed.shape[:-1], packed.shape[-1] * 2), given)


@operator("numbers", _read_results)
def dequantize_mxfp4(packed: AnyArray, scale: AnyArray, dtype: str = "bfloat16") -> AnyArray:
    """The numbers that `cukern.quantize_mxfp4` packed: value * 2**(scale - 127), rounded once.

    Args:
        packed: uint8 [..., k / 2], the first number of two in the low half; contiguous.
        scale: uint8 or float8_e8m0fnu [..., k / 32]; contiguous.
        dtype: "float32", "float16" or "bfloat16".

    Returns:
        [..., k]. Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    return dequantize_fp4("MXFP4", packed, scale, dtype)


@operator("numbers", _read_results)
def dequantize_nvfp4(packed: AnyArray, scale: AnyArray, global_scale: AnyArray, dtype: str = "bfloat16") -> AnyArray:
    """The numbers that `cukern.scaled_fp4_quant` packed: value * (scale / global_scale), rounded once.

    Args:
        packed: uint8 [..., k / 2], the first number of two in the low half; contiguous.
        scale: float8_e4m3fn, or uint8 for its bytes, [..., k / 16]; contiguous.
        global_scale: the one that the numbers were quantized with, a number or a float32 array of one element. It
            divides; what multiplies in a product, such as the b_global_scale of `cukern.moe_gemm`, is its inverse.
        dtype: "float32", "float16" or "bfloat16".

    Returns:
        [..., k]. Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    if global_scale is None:
        check.fail("global_scale", _ONE, "None", TypeError)
    return dequantize_fp4("NVFP4", packed, scale, dtype, global_scale)
