"""The checks of a grouped GEMM."""

from __future__ import annotations

from cukern.formats.quantized import BLOCK, MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import is_prepared, rows_of_weights
from cukern.ops.moe_gemm.prepare import MAX_COUNT, MAX_EXPERTS, check_folded, prepared_format
from cukern.runtime import check
from cukern.runtime.describe import Array, expect, expect_contiguous, expect_weights, is_transposed

HALF_DTYPES = ("bfloat16", "float16")
#: float32 GEMMs do not use tensor cores; they are for CPUs and for comparisons.
DTYPES = (*HALF_DTYPES, "float32")
#: CuPy has no e4m3 dtype and passes the bytes as uint8.
FP8_DTYPES = ("float8_e4m3fn", "uint8")
E8M0_DTYPES = ("float8_e8m0fnu", "uint8")


def check_sizes(a: Array, b: Array, offsets: Array, row_token: Array | None, gated: bool) -> None:
    """Check the dtypes and shapes of all arrays except the scales and the bias."""
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
    check_strides(b)
    experts, n = b.shape[0], rows_of_weights(b)
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("b", f"of at least one and at most {MAX_EXPERTS} experts", experts)
    # With a gated activation a tile of prepared weights has 8 gate rows and 8 up rows.
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


def check_strides(b: Array) -> None:
    """Check that prepared weights, and the rows of other weights, are contiguous.

    16-bit and 32-bit weights may have contiguous columns instead.
    """
    if is_prepared(b):
        expect_contiguous("b", b)
    else:
        expect_weights("b", b)


def formats(
    a: Array, b: Array, a_scale: Array | None, b_scale: Array | None, b_global_scale: Array | None
) -> tuple[str, str, str]:
    """Return the fields `weights`, `a_scales` and `b_scales` of `Product`."""
    is_fp8 = a.dtype not in DTYPES
    if is_fp8 and is_prepared(b):
        check_folded_scales(a, a_scale, b_scale, b_global_scale)
        return "FOLDED", "block", "group"
    plain = "TRANSPOSED" if is_transposed(b) else "PLAIN"
    formats = ("FP8", *fp8_scales(a, b, a_scale, b_scale)) if is_fp8 else (plain, "", "")
    if not is_fp8 and a_scale is not None:
        check.fail("a_scale", f"None with {a.dtype} a", "an array")
    if not is_fp8 and b.dtype == "uint8":
        return fp4_format(a, b, b_scale, b_global_scale), "", "group"
    if b_global_scale is not None:
        check.fail("b_global_scale", "None without weights of 4 bits", "an array")
    if not is_fp8 and b_scale is not None:
        check.fail("b_scale", f"None with {b.dtype} b", "an array")
    return formats


def fp8_scales(a: Array, b: Array, a_scale: Array | None, b_scale: Array | None) -> tuple[str, str]:
    """Check the FP8 scales. Return the fields `a_scales` and `b_scales` of `Product`."""
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
    # `a_scale` [experts] is one scale per expert. With one expert, [1] means one scale for all rows.
    if len(rows) == 2 and len(shape) == 1 and shape[0] == experts != 1:
        return "expert", "one" if len(b_scale.shape) == 1 else "column"
    flat = shape[:-1] if len(shape) > len(rows) and shape[-1] == 1 else shape
    is_by_row = len(flat) == len(rows) and flat == rows
    if not is_by_row and (len(shape) != 1 or shape[0] != 1):
        one = "[1], [experts]," if len(rows) == 2 else "[1],"
        wanted = f"of shape {one} [{symbol}] = {list(rows)} or [{symbol}, 1], as b_scale is not by blocks"
        check.fail("a_scale", wanted, list(shape))
    return "row" if is_by_row else "one", "one" if len(b_scale.shape) == 1 else "column"


def check_folded_scales(a: Array, a_scale: Array | None, b_scale: Array | None, b_global_scale: Array | None) -> None:
    if a_scale is None:
        check.fail("a_scale", "an array with FP8", None, TypeError)
    check.dtype("a_scale", a_scale.dtype, ("float32",))
    symbol = "experts, max_tokens" if len(a.shape) == 3 else "tokens"
    wanted = (*a.shape[:-1], -(-a.shape[-1] // BLOCK))
    check.shape("a_scale", a_scale.shape, wanted, f"[{symbol}, ceil(k / {BLOCK})], with MXFP4 weights,")
    refuse_scales_of_prepared(b_scale)
    refuse_global_scale_of_mxfp4(b_global_scale)


def refuse_scales_of_prepared(b_scale: Array | None) -> None:
    if b_scale is not None:
        check.fail("b_scale", "None with prepared weights, which hold their scales", "an array")


def refuse_global_scale_of_mxfp4(b_global_scale: Array | None) -> None:
    if b_global_scale is not None:
        check.fail("b_global_scale", "None with MXFP4", "an array")


def fp4_format(a: Array, b: Array, b_scale: Array | None, b_global_scale: Array | None) -> str:
    """Check the scales of 4-bit weights, and return the format: "MXFP4" or "NVFP4"."""
    experts, n, k = *b.shape[:2], a.shape[-1]
    shapes = (experts, n, k // MXFP4_GROUP), (experts, n, k // NVFP4_GROUP)
    if is_prepared(b):
        weights = prepared_format(b, k)
        refuse_scales_of_prepared(b_scale)
    elif b_scale is None:
        check.fail("b_scale", "an array with weights of 4 bits", None, TypeError)
    elif b_scale.shape == shapes[0] and k % MXFP4_GROUP == 0:
        weights = "MXFP4"
        check.dtype("b_scale", b_scale.dtype, E8M0_DTYPES)
    elif b_scale.shape == shapes[1]:
        weights = "NVFP4"
        check.dtype("b_scale", b_scale.dtype, FP8_DTYPES)
    else:
        wanted = f"of shape [experts, n, k / {MXFP4_GROUP}] = {list(shapes[0])} (MXFP4) or "
        wanted += f"[experts, n, k / {NVFP4_GROUP}] = {list(shapes[1])} (NVFP4)"
        check.fail("b_scale", wanted, list(b_scale.shape))
    if weights == "MXFP4":
        refuse_global_scale_of_mxfp4(b_global_scale)
    elif b_global_scale is None:
        check.fail("b_global_scale", "an array with NVFP4", None, TypeError)
    else:
        expect("b_global_scale", b_global_scale, a, "a", ("float32",), (experts,), "[experts]")
    return weights
