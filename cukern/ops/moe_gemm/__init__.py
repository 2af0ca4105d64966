"""Grouped products of a mixture of experts: each expert's weights times the rows of its tokens."""

from __future__ import annotations

from cukern.ops.moe_gemm.launch import multiply, result_of
from cukern.ops.moe_gemm.prepare import prepare_weights, restore_weights
from cukern.reference import moe_gemm as twin
from cukern.runtime import activation as activations
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.op import operator

__all__ = ["moe_gemm", "moe_gemm_batched", "prepare_weights", "restore_weights"]


@operator("product", result_of)
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
    arrays = a, b, expert_offsets, a_scale, b_scale, b_global_scale, row_token, bias, out, None
    facts = activation, alpha, limit, interleaved, out_dtype, variant, False
    return multiply(arrays, facts, expected_m, twin.moe_gemm)


@operator("product", result_of)
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
    arrays = a, b, expert_num_tokens, a_scale, b_scale, b_global_scale, None, bias, out, None
    facts = activation, alpha, limit, interleaved, out_dtype, variant, False
    return multiply(arrays, facts, expected_m, twin.moe_gemm_batched, is_batched=True)


@operator()
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
    arrays = a, b, expert_offsets, a_scale, b_scale, None, None, None, out_q, out_s
    facts = activation, activations.ALPHA, activations.LIMIT, False, out_dtype, "auto", True
    return multiply(arrays, facts, expected_m, twin.moe_gemm_quantized)
