"""`prepare_weights`, `restore_weights`: convert 4-bit weights to the memory layout of Hopper's kernels and back."""

from __future__ import annotations

from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import FOLDED_BYTES, FOLDED_K, UNIT_BYTES, UNIT_K, UNIT_ROWS, is_folded
from cukern.ops.moe_gemm import folded, kernels
from cukern.reference import moe_gemm as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, expect_aligned, expect_array, expect_contiguous, expect_place
from cukern.runtime.op import op
from cukern.runtime.plan import outputs, run_twin

__all__ = ["prepare_weights", "restore_weights"]

_SYMBOLS = "[experts, n / 8, ceil(k / 64), bytes]"
_FOLDED_SYMBOLS = "[experts, n / 8, ceil(k / 128), bytes]"
#: The values of `a_dtype` for FP8 activations. None stands for 16-bit activations.
A_DTYPES = ("float8_e4m3fn",)
SCALE_DTYPES = ("uint8", "float8_e8m0fnu", "float8_e4m3fn")
MAX_EXPERTS = 4096
MAX_COUNT = 2**31 - 2**12


def prepared_format(b: Array, k: int) -> str:
    """Return the format of prepared weights, "MXFP4" or "NVFP4", after a check of their shape."""
    expect_array("b", b, ("uint8",), ("experts", "n / 8", "ceil(k / 64)", "bytes"))
    sizes = tuple(UNIT_BYTES.values())
    if b.shape[2] != -(-k // UNIT_K) or b.shape[3] not in sizes:
        wanted = f"of shape {_SYMBOLS} = [.., .., {-(-k // UNIT_K)}, {sizes[0]} (MXFP4) or {sizes[1]} (NVFP4)]"
        check.fail("b", f"{wanted}, as prepare_weights makes it", list(b.shape))
    return "MXFP4" if b.shape[3] == UNIT_BYTES[MXFP4_GROUP] else "NVFP4"


def check_folded(b: Array, k: int) -> None:
    """Check the shape of weights that are prepared for FP8 activations. A row has k elements."""
    expect_array("b", b, ("uint8",), ("experts", "n / 8", "ceil(k / 128)", "bytes"))
    units = -(-k // FOLDED_K)
    if b.shape[2:] != (units, FOLDED_BYTES):
        wanted = f"of shape {_FOLDED_SYMBOLS} = [.., .., {units}, {FOLDED_BYTES}] (MXFP4)"
        check.fail("b", f"{wanted}, as prepare_weights makes it with a_dtype='float8_e4m3fn'", list(b.shape))


def _prepared(b: Any, b_scale: Any, *_: Any, a_dtype: Any = None, **__: Any) -> Result:
    experts, n, half = b.shape
    if a_dtype is not None:
        shape = experts, n // UNIT_ROWS, -(-2 * half // FOLDED_K), FOLDED_BYTES
        return Result(shape, "uint8", _FOLDED_SYMBOLS)
    size = UNIT_BYTES[NVFP4_GROUP if b_scale.shape[-1] * NVFP4_GROUP == 2 * half else MXFP4_GROUP]
    return Result((experts, n // UNIT_ROWS, -(-2 * half // UNIT_K), size), "uint8", _SYMBOLS)


@op(twin.prepare_weights, "prepared", _prepared)
def prepare_weights(
    b: AnyArray, b_scale: AnyArray, *, a_dtype: str | None = None, out: AnyArray | None = None
) -> AnyArray:
    """Convert 4-bit weights and their scales to the memory layout that Hopper's kernel for 4-bit weights reads.

    Call this function once per model. Pass the result to `moe_gemm`, `moe_gemm_batched` and the layers as the weights,
    without b_scale; its four dimensions mark it as prepared. Prepared weights work on Hopper only. On an H200, a GEMM
    with unprepared MXFP4 weights takes 1.8 times as long as with prepared weights for 256 experts of 8 rows, and 3.1
    times as long for 8 experts of 1024 rows. The first call with unprepared weights warns
    (`cukern.PerformanceWarning`).

    Args:
        b: uint8 [experts, n, k / 2], contiguous: 4-bit e2m1 elements, two per byte, the first one in the low 4 bits. n
            must be a multiple of 8, and k a multiple of 32.
        b_scale: bytes [experts, n, k / 32] for MXFP4, powers of two (E8M0); or [experts, n, k / 16] for NVFP4, e4m3
            numbers without NaN. Contiguous.
        a_dtype: the dtype of `a` in later calls of `moe_gemm`. None: bfloat16 or float16. "float8_e4m3fn": FP8, only
            with MXFP4.
        out: uint8 [experts, n / 8, ceil(k / 64), 272 or 288], to write into; [experts, n / 8, ceil(k / 128), 544] with
            `a_dtype`.

    Returns:
        `out`, or a new array. Its last dimension is a unit of 8 rows and 64 elements along k, in 272 bytes (MXFP4) or
        288 bytes (NVFP4): first the elements, 256 bytes, then the scales (`cuda_src/moe_gemm/fp4_prepared.cuh`). E8M0
        scales are at most 2^34, which stands for infinity. Weights with an NVFP4 scale of 0 become 0. A negative scale
        becomes positive, and its weights change their sign. Elements past k are 0.

        With a_dtype="float8_e4m3fn", a unit is 8 rows and 128 elements along k, in 544 bytes: 512 bytes of elements,
        then the scales (`cuda_src/moe_gemm/folded_prepared.cuh`). Stored are the largest exponent E among the scales of
        each row and, for each scale 2^e of 32 elements, the difference E - e, clamped to 19. For an element x, a GEMM
        uses the e4m3 number nearest to x * 2^(6 + e - E) (ties to even), times 2^(E - 6). This value is exact if E - e
        is at most 14. Otherwise its error is at most 2^(E - 16), and from E - e = 19 on the value is 0. A row with a
        NaN scale is NaN. A row with E below -120 is 0.

    Raises:
        TypeError: a value that is not an array, or an array of another library or a wrong dtype.
        ValueError: another device, a wrong shape, strides, or an address that is not a multiple of 16.
    """
    expect_array("b", b, ("uint8",), ("experts", "n", "k / 2"))
    expect_contiguous("b", b)
    expect_contiguous("b_scale", expect_place("b_scale", b_scale, b, "b"))
    experts, n, half = b.shape
    k = 2 * half
    _check_sizes("b", experts, n, k)
    check.dtype("b_scale", b_scale.dtype, SCALE_DTYPES)
    shapes = {group: (experts, n, k // group) for group in UNIT_BYTES}
    if b_scale.shape not in shapes.values():
        wanted = f"of shape [experts, n, k / 32] = {list(shapes[MXFP4_GROUP])} (MXFP4) or "
        wanted += f"[experts, n, k / 16] = {list(shapes[NVFP4_GROUP])} (NVFP4)"
        check.fail("b_scale", wanted, list(b_scale.shape))
    weights = "MXFP4" if b_scale.shape == shapes[MXFP4_GROUP] else "NVFP4"
    if a_dtype is not None:
        check.one_of("a_dtype", a_dtype, A_DTYPES)
        if weights == "NVFP4":
            wanted = f"of shape [experts, n, k / 32] = {list(shapes[MXFP4_GROUP])} (MXFP4) with a_dtype={a_dtype!r}"
            check.fail("b_scale", wanted, list(b_scale.shape))
    kind = "float8_e8m0fnu" if weights == "MXFP4" else "float8_e4m3fn"
    check.dtype("b_scale", b_scale.dtype, (kind, "uint8"))
    out = outputs(out, b, "b", _prepared(b, b_scale, a_dtype=a_dtype))
    if b.on_host:
        return run_twin()
    expect_aligned("b", b)
    expect_aligned("out", out)
    if a_dtype is None:
        kernels.convert(weights, b, b_scale, out, k)
    else:
        folded.convert(b, b_scale, out, k)
    return out


def _restored(prepared: Any, k: int | None = None, *_: Any, **__: Any) -> list[Result]:
    experts, eights, units, size = prepared.shape
    k = units * (FOLDED_K if is_folded(prepared) else UNIT_K) if k is None else k
    group = NVFP4_GROUP if size == UNIT_BYTES[NVFP4_GROUP] else MXFP4_GROUP
    n = eights * UNIT_ROWS
    return [
        Result((experts, n, k // 2), "uint8", "[experts, n, k / 2]"),
        Result((experts, n, k // group), "uint8", f"[experts, n, k / {group}]"),
    ]


@op(twin.restore_weights, "b, b_scale", _restored)
def restore_weights(
    prepared: AnyArray, k: int | None = None, *, out: tuple[AnyArray | None, AnyArray | None] | None = None
) -> tuple[AnyArray, AnyArray]:
    """Convert the result of `cukern.prepare_weights` back to its arguments: the 4-bit weights and their scales.

    Args:
        prepared: uint8 [experts, n / 8, ceil(k / 64), 272 or 288] or [experts, n / 8, ceil(k / 128), 544], contiguous.
        k: the number of elements in a row, a multiple of 32. None: the largest k that `prepared` can hold.
        out: a pair of arrays to write into.

    Returns:
        b, uint8 [experts, n, k / 2], and b_scale, uint8 [experts, n, k / 32] or [experts, n, k / 16]: the arguments of
        `prepare_weights`, with the changes that its description lists. From weights prepared for FP8 activations, each
        scale is at least 2^-19 times the largest scale of its row.

    Raises:
        TypeError: a value that is not an array, or an array of a wrong dtype.
        ValueError: a wrong shape, strides, or an address that is not a multiple of 16.
    """
    expect_array("prepared", prepared, ("uint8",), ("experts", "n / 8", "ceil(k / 64)", "bytes"))
    expect_contiguous("prepared", prepared)
    experts, eights, units, size = prepared.shape
    sizes = tuple(UNIT_BYTES.values())
    if size not in (*sizes, FOLDED_BYTES):
        wanted = f"of {sizes[0]} (MXFP4) or {sizes[1]} (NVFP4) bytes in its last dimension"
        check.fail("prepared", f"{wanted}, or {FOLDED_BYTES} (for FP8 rows)", size)
    unit = FOLDED_K if size == FOLDED_BYTES else UNIT_K
    if k is not None:
        k = check.integer("k", k, 1)
        if k % 32 or -(-k // unit) != units:
            first = " or ".join(str(x) for x in range((units - 1) * unit + 32, units * unit + 1, 32))
            check.fail("k", f"{first}, for {units} units of {unit}", k)
    all_k = units * unit if k is None else k
    _check_sizes("prepared", experts, eights * UNIT_ROWS, all_k)
    b, b_scale = outputs(out, prepared, "prepared", *_restored(prepared, k), names="a pair (b, b_scale)")
    for name, array in (("out[0]", b), ("out[1]", b_scale)):
        expect_contiguous(name, array)
    if prepared.on_host:
        return run_twin()
    expect_aligned("prepared", prepared)
    if size == FOLDED_BYTES:
        folded.convert(b, b_scale, prepared, all_k, restores=True)
    else:
        kernels.convert("MXFP4" if size == sizes[0] else "NVFP4", b, b_scale, prepared, all_k, restores=True)
    return b, b_scale


def _check_sizes(name: str, experts: int, n: int, k: int) -> None:
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail(name, f"of at least one and at most {MAX_EXPERTS} experts", experts)
    if n % UNIT_ROWS or not 0 < n <= MAX_COUNT:
        check.fail(name, f"of n that is a positive multiple of {UNIT_ROWS}", n)
    if k % MXFP4_GROUP or not 0 < k <= MAX_COUNT:
        check.fail(name, f"of k that is a positive multiple of {MXFP4_GROUP}", k)
