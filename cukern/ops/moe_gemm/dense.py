"""The operands of `quantized_matmul`, as `moe_gemm` takes them with one expert."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.formats.quantized import BLOCK, MXFP4_GROUP, NVFP4_GROUP, SMALLEST, SMALLEST_FP8
from cukern.formats.weights import UNIT_BYTES, is_folded, is_prepared, rows_of_weights
from cukern.ops.moe_gemm.checks import E8M0_DTYPES, FP8_DTYPES, HALF_DTYPES
from cukern.ops.quantization import choose as quantization
from cukern.runtime import check
from cukern.runtime.describe import Array, expect, expect_array, expect_contiguous, expect_one, expect_place
from cukern.runtime.plan import empty
from cukern.runtime.rows import rows_of

_BLOCKS = f"[ceil(n / {BLOCK}), ceil(k / {BLOCK})]"
_GROUPS = f"[rows, ceil(k / {BLOCK})]"


class Operands(NamedTuple):
    a: Array
    b: Array
    a_scale: Array | None
    b_scale: Array | None
    bias: Array | None


def _weights(x: Array, w: Any, w_scale: Any) -> tuple[Array, Array | None, str]:
    """Check the weights. Return them and their scales for one expert, and the kind of the scales of `x`."""
    expect_contiguous("w", expect_place("w", w, x, "x"))
    k = x.shape[1]
    if is_prepared(w):
        check.dtype("w", w.dtype, ("uint8",))
        if w.shape[0] != 1:
            check.fail("w", "of one expert", w.shape[0])
        if w.shape[3] == UNIT_BYTES[NVFP4_GROUP]:
            check.fail("w", "of FP8 or MXFP4", "prepared NVFP4 weights")
        if w_scale is not None:
            check.fail("w_scale", "None with prepared weights, which hold their scales", "an array")
        return w, None, "block" if is_folded(w) else ""
    check.dimensions("w", w.shape, ("n", "k"))
    check.dtype("w", w.dtype, FP8_DTYPES)
    n, columns = w.shape
    b = w.view((1, n, columns))
    if w_scale is None:
        check.fail("w_scale", "an array with weights that are not prepared", None, TypeError)
    if columns != k:
        if w.dtype != "uint8" or 2 * columns != k or k % MXFP4_GROUP:
            wanted = f"of shape [n, k] = [n, {k}], or of 4 bits and shape [n, k / 2] with k a multiple of {MXFP4_GROUP}"
            check.fail("w", wanted, list(w.shape))
        expect("w_scale", w_scale, x, "x", E8M0_DTYPES, (n, k // MXFP4_GROUP), f"[n, k / {MXFP4_GROUP}]")
        return b, w_scale.view((1, *w_scale.shape)), ""
    expect_contiguous("w_scale", expect_place("w_scale", w_scale, x, "x"))
    check.dtype("w_scale", w_scale.dtype, ("float32",))
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    if w_scale.shape == blocks:
        return b, w_scale.view((1, *blocks)), "block"
    if w_scale.shape in ((), (1,)):
        return b, w_scale.view((1,)), "row"
    if w_scale.shape in ((n,), (n, 1)):
        return b, w_scale.view((1, n)), "row"
    wanted = f"of shape {_BLOCKS} = {list(blocks)}, [n] = {[n]}, [n, 1] or [1]"
    check.fail("w_scale", wanted, list(w_scale.shape))


def _quantized(x: Array, x_scale: Any, kind: str) -> tuple[Array, Array]:
    """Record the quantization of a 16-bit `x` to FP8."""
    rows, k = x.shape
    q, source = empty((rows, k), FP8_DTYPES[0]), quantization.Input("x", x, rows_of("x", x), "auto")
    if kind == "block":
        if x_scale is not None:
            check.fail("x_scale", "None with a 16-bit x and scales in groups: pass x in FP8", "an array")
        if k % BLOCK:
            check.fail("x", f"of k that is a multiple of {BLOCK}, or in FP8", k)
        scales = empty((rows, k // BLOCK), "float32")
        if not x.on_host:
            quantization.quantize_groups(source, "E4M3", BLOCK, q, scales, float(SMALLEST))
    elif x_scale is None:
        scales = empty((rows, 1), "float32")
        if not x.on_host:
            quantization.quantize_groups(source, "E4M3", 0, q, scales, float(SMALLEST_FP8))
    else:
        expect_one("x_scale", expect_place("x_scale", x_scale, x, "x"), x, "x", "float32")
        scales = empty((1,), "float32")
        if not x.on_host:
            quantization.quantize_tensor(source, "E4M3", q, scales, (x_scale, 1.0))
    return q, scales


def operands(x: Any, w: Any, w_scale: Any, x_scale: Any, bias: Any) -> Operands:
    """Check the arguments, and record the quantization of `x` if the weights need FP8 rows."""
    expect_array("x", x, (*HALF_DTYPES, *FP8_DTYPES), ("rows", "k"))
    expect_contiguous("x", x)
    b, b_scale, kind = _weights(x, w, w_scale)
    rows, k = x.shape
    n = rows_of_weights(b)
    if not n:
        check.fail("w", "of at least one row", "none")
    if bias is not None:
        expect_contiguous("bias", expect_place("bias", bias, x, "x"))
        check.shape("bias", bias.shape, (n,), "[n]")
        bias = bias.view((1, n))
    if x.dtype in HALF_DTYPES:
        if kind:
            q, scales = _quantized(x, x_scale, kind)
            return Operands(q, b, scales, b_scale, bias)
        if x_scale is not None:
            check.fail("x_scale", f"None with {x.dtype} x and weights of 4 bits", "an array")
        return Operands(x, b, None, b_scale, bias)
    if not kind:
        check.fail("x", f"{' or '.join(HALF_DTYPES)} with these weights of 4 bits", x.dtype, TypeError)
    if x_scale is None:
        check.fail("x_scale", "an array with an FP8 x", None, TypeError)
    expect_contiguous("x_scale", expect_place("x_scale", x_scale, x, "x"))
    check.dtype("x_scale", x_scale.dtype, ("float32",))
    groups = rows, -(-k // BLOCK)
    if kind == "block":
        check.shape("x_scale", x_scale.shape, groups, _GROUPS)
    elif x_scale.shape not in ((1,), (rows,), (rows, 1)):
        check.fail("x_scale", f"of shape [1], [rows] = {[rows]} or [rows, 1]", list(x_scale.shape))
    return Operands(x, b, x_scale, b_scale, bias)
