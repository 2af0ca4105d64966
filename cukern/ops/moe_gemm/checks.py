"""The checks of a grouped product's arrays against each other, and what their formats are."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import BLOCK, MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import is_prepared, rows_of_weights
from cukern.ops.moe_gemm.choose import HALF_DTYPES
from cukern.ops.moe_gemm.prepare import MAX_COUNT, MAX_EXPERTS, check_folded, prepared_format
from cukern.runtime import check
from cukern.runtime.arrays import View
from cukern.runtime.view import contiguous, expect_weights, is_transposed, read_like

#: float32 is for models on a CPU and for comparisons: its products have no tensor cores.
DTYPES = (*HALF_DTYPES, "float32")
#: The dtypes of e4m3. CuPy has no such dtype, and gives their bytes.
FP8_DTYPES = ("float8_e4m3fn", "uint8")
E8M0_DTYPES = ("float8_e8m0fnu", "uint8")


def check_sizes(a: View, b: View, offsets: View, row_token: View | None, gated: bool) -> None:
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
        read_like("expert_num_tokens", offsets, a, "a", ("int32",), (experts,), "[experts]")
    else:
        read_like("expert_offsets", offsets, a, "a", ("int32", "int64"), (experts + 1,), "[experts + 1]")
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


def _check_strides(b: View) -> None:
    """Rows of weights are contiguous, or of 16 bits and 32 their columns; prepared ones have no gaps between them."""
    if is_prepared(b):
        contiguous("b", b)
    else:
        expect_weights("b", b)


def check_bias(bias: Any, experts: int, n: int, a: View, dtype: str) -> View:
    return read_like("bias", bias, a, "a", ("float32", dtype), (experts, n), "[experts, n]")


def formats_of(
    a: View, b: View, a_scale: View | None, b_scale: View | None, b_global_scale: View | None
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


def _fp8_scales(a: View, b: View, a_scale: View | None, b_scale: View | None) -> tuple[str, str]:
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


def _check_folded_scales(a: View, a_scale: View | None, b_scale: View | None, b_global_scale: View | None) -> None:
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


def _fp4_format(a: View, b: View, b_scale: View | None, b_global_scale: View | None) -> str:
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


def _check_global_scale(a: View, experts: int, weights: str, b_global_scale: View | None) -> None:
    if weights == "MXFP4":
        if b_global_scale is not None:
            check.fail("b_global_scale", "None with MXFP4", "an array")
        return
    if b_global_scale is None:
        check.fail("b_global_scale", "an array with NVFP4", None, TypeError)
    read_like("b_global_scale", b_global_scale, a, "a", ("float32",), (experts,), "[experts]")
