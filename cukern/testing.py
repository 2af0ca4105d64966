"""The table of tolerances of all results, and the comparison that reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import arrays


class Tolerance(NamedTuple):
    """The allowed difference of a value from the wanted one: absolute + relative * |wanted|."""

    relative: float
    absolute: float


#: Tolerances by `stem.result`, then by the result's dtype. Integers and booleans are exact and have no entry.
TOLERANCES = {
    # The kernel's exp2, log2 and reciprocal are the hardware's approximations: each is good to about 2**-22, and a
    # logit's rounding on its way into exp2 counts as often as the logit is large.
    "moe_gate.weights": {"float32": Tolerance(relative=2e-5, absolute=1e-9)},
    # Scores are sums of dim float32 products, and their error is one of the weights; exp2 and the division are the
    # hardware's. A value near a rounding boundary of float16 or bfloat16 may fall on the other side of it.
    "decoder_attention.out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=4e-5),
        "bfloat16": Tolerance(relative=2**-7, absolute=4e-5),
    },
    # Weights are rounded to float16 or bfloat16 before their product with the values, which changes a result by up to
    # half a unit in the last place of the largest value, 1 in the tests. A result near a rounding boundary may fall on
    # the other side of it. In float32 the error is that of the scores.
    "paged_attention.out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-11),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-8),
    },
    # The same, of another kernel.
    "varlen_attention.out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-11),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-8),
    },
    # The logarithm of a sum of weights that are not rounded, so with the error of the scores: float32 sums of head_dim
    # products, and exp2. One missing token among some thousand exceeds it.
    "paged_attention.lse": {"float32": Tolerance(relative=2e-6, absolute=3e-5)},
    # The sum of that logarithm, which has the error of the largest score once more.
    "paged_attention.exp_sums": {"float32": Tolerance(relative=6e-5, absolute=0)},
    # Two weights in float32, rounded once at the end. Nearly equal terms of opposite signs cancel.
    "paged_attention.merged": {
        "float32": Tolerance(relative=2e-6, absolute=2e-6),
        "float16": Tolerance(relative=2**-10, absolute=2e-6),
        "bfloat16": Tolerance(relative=2**-7, absolute=2e-6),
    },
    # The tolerances of FlashMLA's tests, for latents of magnitude 0.1: weights are rounded to the query's dtype before
    # their product with the values, and the result once more. The tests also bound the cosine of all results.
    "mla_decode.out": dict.fromkeys(("float16", "bfloat16"), Tolerance(relative=2.01 / 128, absolute=8e-4)),
    # The logarithm of a sum of weights that are not rounded. An lse near 0 keeps the error of its largest score: a sum
    # of 576 products, added 16 at a time by a tensor core that drops bits below 2^-23 of a sum of magnitude 100, times
    # 1 / 24.
    "mla_decode.lse": {"float32": Tolerance(relative=1e-5, absolute=4e-5)},
    # Float32 sums of magnitude 1, in another order; or exact sums, and an activation by the hardware's exp2 and
    # reciprocal. A value near a rounding boundary may fall on the other side of it.
    "moe_gemm.out": {
        "float32": Tolerance(relative=2e-5, absolute=2e-5),
        "float16": Tolerance(relative=2**-10, absolute=1e-4),
        "bfloat16": Tolerance(relative=2**-7, absolute=1e-4),
    },
    # The same for FP8: Hopper adds up 128 products with 14 bits, to a sum of magnitude 1 (on an H200, of some hundred
    # thousand results none is off by more than 0.005).
    "moe_gemm.fp8_out": {
        "float16": Tolerance(relative=2**-10, absolute=2**-7),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-7),
    },
    # The activations and each expert's output are rounded on the way; one of these near a rounding boundary may fall on
    # the other side of it, by a unit in its last place. Outputs of an expert are of magnitude 1, of relu2 up to 16.
    "fused_moe.out": {
        "float32": Tolerance(relative=4e-5, absolute=4e-5),
        "float16": Tolerance(relative=2**-10, absolute=2**-7),
        "bfloat16": Tolerance(relative=2**-7, absolute=2**-4),
    },
    # An activation near a rounding boundary of FP8 that falls on the other side of it changes one term of a sum by up
    # to an eighth. Terms are of magnitude 2 / sqrt(inter), 0.2 in the tests, a few of a million five times as large,
    # and several of a sum may change so (on an H200, by 0.31 at most, of relu2). The tests also bound the norm of all
    # differences.
    "fused_moe.fp8_out": {
        "float16": Tolerance(relative=2**-7, absolute=0.375),
        "bfloat16": Tolerance(relative=2**-7, absolute=0.375),
    },
    # exp2, the reciprocal and the polynomial of gelu are approximations, good to about 2**-21 together; the argument of
    # exp2 is rounded, an error that grows with it. Where erf is near -1, the twin's 1 + erf cancels: its error is
    # 2**-26 of gate * up, at most 60 there in the tests; the kernel's polynomial is off by at most 2**-24 of up. A
    # value near a rounding boundary of float16 or bfloat16 may fall on the other side of it.
    "moe_activation.out": {
        "float32": Tolerance(relative=2e-5, absolute=5e-6),
        "float16": Tolerance(relative=2**-10, absolute=5e-6),
        "bfloat16": Tolerance(relative=2**-7, absolute=5e-6),
    },
    # Float32 by CUDA's accurate functions, where an argument of exp, at most 88, is rounded a few times; else the quick
    # forms of the gated activations, whose error is at most 2.3e-8 of gelu below 0. A value near a rounding boundary of
    # float16 or bfloat16 may fall on the other side of it, also below the normal numbers.
    "moe_activation.biased": {
        "float32": Tolerance(relative=3e-5, absolute=1e-37),
        "float16": Tolerance(relative=2**-10, absolute=9e-8),
        "bfloat16": Tolerance(relative=2**-7, absolute=3e-8),
    },
    # The normal distribution by CUDA, good to five units in the last place, and a product.
    "moe_activation.gelu": {"float32": Tolerance(relative=1e-6, absolute=1e-37)},
    # IEEE arithmetic in the same order on both sides, the reciprocal root included; all NaN count as equal.
    "norm.out": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
    "norm.quantized": {"float8_e4m3fn": Tolerance(relative=0, absolute=0)},
    "norm.scales": {"float32": Tolerance(relative=0, absolute=0)},
    # IEEE arithmetic in the same order on both sides; all NaN count as equal.
    "quantization.quantized": {"float8_e4m3fn": Tolerance(relative=0, absolute=0)},
    "quantization.scales": {"float32": Tolerance(relative=0, absolute=0)},
    "quantization.numbers": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
    # An activation's error changes the largest magnitude of a group, and may move a quotient over a rounding boundary:
    # to the next number of three bits, or by the smallest number of FP8.
    "quantization.activated": {"float8_e4m3fn": Tolerance(relative=2**-3, absolute=2**-9)},
    "quantization.activated_scales": {"float32": Tolerance(relative=2e-5, absolute=0)},
    # One addition and one division, in IEEE arithmetic on either side: less than a unit in the last place, so exact.
    "beam_search.values": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=2**-30, absolute=0)),
    "beam_search.keys": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=2**-30, absolute=0)),
    "beam_search.scores": {"float32": Tolerance(relative=2**-30, absolute=0)},
    "beam_search.finished_scores": {"float32": Tolerance(relative=2**-30, absolute=0)},
    # Copied, or one float32 product and one sum rounded to the dtype, not fused: IEEE arithmetic on both sides.
    "embedding.rows": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
    # Two float32 products and their sum, each rounded as IEEE says on both sides, and one rounding to the dtype.
    "rotary_embedding.heads": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
    # The argument of exp2, a logit's distance from the largest, at most 126, is rounded four times (on an H200, 6e-6 in
    # all for logits of magnitude 16). Results of exp2 below 2**-126 are 0.
    "sampling.probs": {"float32": Tolerance(relative=3e-5, absolute=2e-38)},
    # Logarithms of numbers from 2**-149 to 2**128 by the hardware, each good to 2**-22 of itself: one of a probability,
    # one of a sum. The sum itself adds 1e-6.
    "sampling.logprobs": {"float32": Tolerance(relative=1e-6, absolute=5e-5)},
    # A float32 sum of up to 2**20 probabilities in another order, and one product (on an H200, 3e-7 in all). A value
    # near a rounding boundary of float16 or bfloat16 may fall on the other side of it, also below the normal numbers.
    "sampling.renormalized": {
        "float32": Tolerance(relative=2e-6, absolute=1e-44),
        "float16": Tolerance(relative=2**-10, absolute=6e-8),
        "bfloat16": Tolerance(relative=2**-7, absolute=1e-40),
    },
    # Copied, or one float32 quotient rounded once to FP8, the same on both sides; all NaN count as equal.
    "kv_cache.cache": dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), Tolerance(relative=0, absolute=0)),
    # Hidden states of magnitude 1 to 3 after a few layers, beside transformers in float32: products in another order,
    # in 16 bits rounded after each operation.
    "models.hidden_states": {
        "float32": Tolerance(relative=0, absolute=2e-5),
        "float16": Tolerance(relative=0, absolute=2e-2),
        "bfloat16": Tolerance(relative=2**-7, absolute=6e-2),
    },
    # Means of hidden states, and their products and roots.
    "models.vectors": {"float32": Tolerance(relative=0, absolute=1e-5)},
    # Each product, sum and quotient is IEEE arithmetic in float32, not fused, in the same order on both sides.
    "decoding.values": dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(relative=0, absolute=0)),
}


def _to_numpy(name: str, array: Any) -> np.ndarray[Any, Any]:
    array = arrays.enter(name, array)
    library = arrays.library_of(array)
    assert library is not None
    return library.to_numpy(array)


def assert_matches(name: str, got: Any, want: Any) -> None:
    """The arrays `got` and `want`, of any library, are of one dtype and shape and hold the same values.

    Floats may differ by what `TOLERANCES[name]` allows for their dtype; NaN and infinities must be in the same places.
    All else is exact. `name` is `stem.result`, such as "moe_gate.weights".

    Raises AssertionError, which says where the largest difference is and how large; KeyError for floats that the table
    has no entry for.
    """
    __tracebackhide__ = True
    got, want = _to_numpy(name, got), _to_numpy(name, want)
    for what, ours, theirs in (("dtype", got.dtype, want.dtype), ("shape", got.shape, want.shape)):
        if ours != theirs:
            raise AssertionError(f"{name} is of {what} {ours}, not {theirs}")
    excess: np.ndarray[Any, Any]
    if want.dtype.kind in "biu":
        allowed = "none"
        excess = (got != want).astype(np.float64)
    else:
        tolerance = TOLERANCES[name][want.dtype.name]
        allowed = f"{tolerance.absolute} + {tolerance.relative} of the wanted value"
        # Where both are the same infinity or both NaN the difference is NaN, but there is none.
        x, y = got.astype(np.float64), want.astype(np.float64)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        bound = tolerance.absolute + tolerance.relative * np.where(np.isfinite(y), np.abs(y), 0)
        bound = np.where(np.isfinite(y), bound, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            excess = np.where(same, 0, np.nan_to_num(np.abs(x - y) / bound, nan=np.inf))
        excess = np.where(excess > 1, excess, 0)
    if not excess.any():
        return
    worst = np.unravel_index(excess.argmax(), excess.shape)
    at = ", ".join(map(str, worst))
    difference = np.abs(got[worst].astype(np.float64) - want[worst].astype(np.float64))
    raise AssertionError(
        f"{name} differs in {np.count_nonzero(excess)} of {excess.size} values, most at [{at}]: "
        f"got {got[worst]}, want {want[worst]}, difference {difference:.3g}, allowed {allowed}"
    )
