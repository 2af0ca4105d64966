"""The kernel that takes a grouped product, and why."""

from __future__ import annotations

from cukern.ops.moe_gemm import fma, folded, fp8, kernels, stream_one
from cukern.ops.moe_gemm.kernels import Chosen, Product
from cukern.runtime import check
from cukern.runtime.launch import asked

HALF_DTYPES = ("bfloat16", "float16")
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


def _why_not(variant: str, x: Product) -> str:
    """The reason why a variant cannot do it; empty if it can."""
    if variant == "fma":
        return ""
    if x.a_dtype == "float32":
        return "a is float32"
    if not x.is_of_units:
        return "rows or addresses are no multiples of 16 bytes"
    why_not_wgmma = fp8.why_not_fp8_wgmma if x.weights == "FP8" else kernels.why_not_wgmma
    reasons = {"wgmma": why_not_wgmma, "mma": kernels.why_not_mma, "stream": kernels.why_not_stream}
    return reasons[variant](x)


def _best(x: Product) -> tuple[str, str]:
    """The variant for "auto", and why."""
    arch, most = x.gpu.arch, x.most(kernels.STREAM_ROWS)
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
    if x.a_dtype == "float32":
        return f"tensor cores take {' and '.join(HALF_DTYPES)}"
    if not x.is_of_units:
        sizes = f"k of multiples of {x.unit} and results of multiples of {kernels.UNIT_COLUMNS} columns"
        return f"the others take {sizes}, at multiples of 16 bytes"
    return "weights without a stride take mma"


def choose(x: Product) -> Chosen:
    """The launch of a product with its numbers of rows; what depends on the offsets is left to the device.

    Raises ValueError for a variant that cannot do it.
    """
    variant = x.variant
    if x.quantizes:
        if reason := _why_not("wgmma", x):
            check.fail("a", "of a call that Hopper's kernel can do", reason)
        ranges = f"up to {fp8.FP8_QUANTIZED_ROWS} an expert and above {fp8.FP8_TAIL_ROWS}"
        why = f"{x.expected}: a layer's first product quantizes its activation ({ranges}, where that takes less time)"
        return fp8.fp8_quantized(x, why)
    if x.prepared:
        is_folded = x.weights == "FOLDED"
        if reason := kernels.why_not_prepared(variant, x):
            wanted = "weights of 8 bits" if is_folded else "weights that are not prepared"
            check.fail("b", wanted, f"{'MXFP4 prepared for FP8 rows' if is_folded else 'prepared ones'}: {reason}")
        if is_folded:
            return folded.folded_wgmma(x, asked(variant) or f"{x.expected}: MXFP4 weights prepared for FP8 rows")
        return kernels.fp4_wgmma(x, asked(variant) or f"{x.expected}: {x.weights} weights that are prepared")
    why, advice = asked(variant), ""
    if variant == "auto":
        variant, why = _best(x)
        if _is_better_prepared(variant, x):
            advice = PREPARE
            why += f"; {PREPARE}"
        if variant == "mma" and x.weights == "FP8" and x.gathers and not _why_not("wgmma", x._replace(gathers=False)):
            why += "; rows in the order of the experts (cukern.moe_permute) take wgmma"
    elif reason := _why_not(variant, x):
        check.fail("variant", "'auto' or another here", f"{variant!r}: {reason}")
    if variant == "wgmma":
        return fp8.fp8_wgmma(x, why) if x.weights == "FP8" else kernels.wgmma(x, why)
    found = {"mma": kernels.mma, "stream": stream_one.stream, "fma": fma.fma}[variant](x, why)
    return found._replace(advice=advice) if advice else found


def _is_better_prepared(variant: str, x: Product) -> bool:
    """Whether there is a faster kernel for the same weights of 4 bits, once they are prepared."""
    return variant == "mma" and x.weights in ("MXFP4", "NVFP4") and not kernels.why_not_prepared("auto", x)
