"""A call of a grouped product: its checks, its result, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cukern.formats.quantized import BLOCK
from cukern.formats.weights import is_prepared, rows_of_weights
from cukern.ops.moe_gemm import kernels
from cukern.ops.moe_gemm.checks import DTYPES, FP8_DTYPES, check_bias, check_sizes, formats_of
from cukern.ops.moe_gemm.choose import HALF_DTYPES, VARIANTS, choose
from cukern.ops.moe_gemm.kernels import Product
from cukern.ops.moe_gemm.prepare import MAX_COUNT
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.activation import is_gated
from cukern.runtime.arrays import View
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.describe import Result, dtype_name
from cukern.runtime.view import contiguous, read, read_beside, read_like

#: The products by alignment, and their launches by alignment and numbers of rows, of each kind of call. The numbers of
#: rows of `a`, a_scale, row_token and the results are free; in batched calls no size is free.
DECISIONS = Decisions((0,), (), (), (0,), (), (), (0,), (), (0,), (0,))
BATCHED_DECISIONS = Decisions(*[()] * 10)
_MAX_LAUNCHES = 4096  # of a kind of call that are kept


def multiply(
    arrays: tuple[Any, ...], facts: tuple[Any, ...], expected_m: Any, twin: Callable[..., Any], is_batched: bool = False
) -> Any:
    """Launch a product as an alike call, or check and choose first; the result.

    `arrays` are a, b, the offsets or the numbers of rows, a_scale, b_scale, b_global_scale, row_token, bias, out, and
    the scales of a result that is quantized. `facts` are activation, alpha, limit, interleaved, out_dtype, variant, and
    whether the result is quantized.
    """
    decision = (BATCHED_DECISIONS if is_batched else DECISIONS).find(facts, arrays)
    if decision is None or not (expected_m is None or (type(expected_m) is int and expected_m >= 0)):
        return _decide(decision, arrays, facts, expected_m, twin, is_batched)
    a, _, _, a_scale, _, _, row_token, _, out, out_scale = arrays
    library, device, choices = decision.library, decision.device, decision.choices
    tokens = a.shape[-2]
    rows = tokens if row_token is None else row_token.shape[0]
    address_of = library.address
    addresses = [0 if x is None else address_of(x) for x in arrays]
    misaligned = (addresses[0] | addresses[1] | addresses[8]) % 16
    product = choices.get(misaligned)
    if not is_batched and (
        (a_scale is not None and a_scale.shape[0] != (1 if decision.own == "one" else tokens))
        or (out is not None and out.shape[0] != rows)
        or (out_scale is not None and out_scale.shape[0] != rows)
        or max(rows, tokens) > MAX_COUNT
        or (row_token is not None and not tokens)
    ):
        return _decide(None, arrays, facts, expected_m, twin, is_batched)
    if product is None:
        return _decide(decision, arrays, facts, expected_m, twin, is_batched)
    if out is None:
        shape = (product.experts, rows, product.columns) if is_batched else (rows, product.columns)
        out = library.allocate(shape, product.out_dtype, device)
        addresses[8] = address_of(out)
    if rows:
        key = misaligned, rows, tokens, expected_m
        found = choices.get(key)
        if found is None:
            if len(choices) >= _MAX_LAUNCHES:
                choices.clear()
                choices[misaligned] = product
            found = choices[key] = choose(product.of(rows, tokens, expected_m))
        kernels.launch(found, library, device, addresses)
    return out if out_scale is None else (out, out_scale)


def result_of(
    a: Any, b: Any, *_: Any, row_token: Any = None, activation: Any = None, out_dtype: Any = None, **__: Any
) -> Result:
    """The result of a product that is not quantized."""
    rows = a.shape[:-1] if row_token is None else row_token.shape
    dtype, half = dtype_name(a), " / 2" if is_gated(activation) else ""
    if dtype not in DTYPES:
        dtype = out_dtype or "bfloat16"
    symbols = f"[experts, max_tokens, n{half}]" if len(rows) == 2 else f"[rows, n{half}]"
    n = rows_of_weights(b)
    return Result((*rows, n // 2 if half else n), dtype, symbols)


class Checked(NamedTuple):
    """A call that has been checked."""

    views: tuple[Any, ...]  # in the order of `multiply`'s arrays, None for what is not given
    formats: tuple[str, str, str]  # of the weights, of the scales of `a` and of `b`
    result: Result
    facts: tuple[Any, ...]


def check_call(given: tuple[Any, ...], facts: tuple[Any, ...], is_batched: bool = False) -> Checked:
    """Check a call; `given` are arrays or their views, in the order of `multiply`.

    Raises TypeError or ValueError for arguments that do not fit each other.
    """
    activation, alpha, limit, interleaved, out_dtype, variant, quantizes = facts
    symbols = ("experts", "max_tokens", "k") if is_batched else ("tokens", "k")
    a = read("a", given[0], FP8_DTYPES if quantizes else (*DTYPES, *FP8_DTYPES), symbols)
    contiguous("a", a)
    b = read_beside("b", given[1], a, "a")
    names = "expert_num_tokens" if is_batched else "expert_offsets", "a_scale", "b_scale", "b_global_scale", "row_token"
    others: list[Any] = [None] * len(names)
    for i, (name, array) in enumerate(zip(names, given[2:7], strict=True)):
        if not i or array is not None:
            others[i] = read_beside(name, array, a, "a")
            contiguous(name, others[i])
    offsets, a_scale, b_scale, b_global_scale, row_token = others
    activations.function_number(activation, optional=True)
    gated, (alpha, limit) = is_gated(activation), activations.check_bounds(alpha, limit)
    interleaved = check.flag("interleaved", check.one_of("interleaved", interleaved, (False, True)))
    if interleaved and not gated:
        check.fail("interleaved", "False without a gate", f"True with activation {activation!r}")
    check_sizes(a, b, offsets, row_token, gated)
    formats = formats_of(a, b, a_scale, b_scale, b_global_scale)
    is_fp8, out = a.dtype not in DTYPES, given[8]
    if out_dtype is None and is_fp8 and out is not None and not quantizes:
        found = read_beside("out", out, a, "a").dtype
        out_dtype = found if found in HALF_DTYPES else None
    if out_dtype is not None:
        out_dtype = check.one_of("out_dtype", out_dtype, HALF_DTYPES if is_fp8 else (a.dtype,))
    result = result_of(a, b, row_token=row_token, activation=activation, out_dtype=out_dtype)
    bias = None if given[7] is None else check_bias(given[7], b.shape[0], rows_of_weights(b), a, result.dtype)
    outs = _results(a, formats[2], activation, result, given[8:], quantizes)
    if a.on_host:
        check.host_variant(variant, VARIANTS)
    variant = check.one_of("variant", variant, VARIANTS)
    facts = activation, alpha, limit, interleaved, out_dtype, variant, quantizes
    return Checked((a, b, *others, bias, *outs), formats, result, facts)


def product_of(x: Checked, out: View) -> Product:
    """The product of a call that writes `out`. Raises ValueError for prepared weights without 16-byte alignment."""
    a, b, offsets, *_, row_token, bias, _, _ = x.views
    activation, alpha, limit, interleaved, _, variant, quantizes = x.facts
    (weights, a_scales, b_scales), gated = x.formats, is_gated(activation)
    is_bounded = activation == "swigluoai" and (alpha, limit) != (activations.ALPHA, activations.LIMIT)
    flags = {"biased": bias is not None, "bounded": is_bounded, "scale_of_expert": a_scales == "expert"}
    number = activations.function_number(activation, optional=True)
    in_memory = _in_memory(b) if weights == "TRANSPOSED" else b
    is_strided, (_, lines, line, *_) = not in_memory.is_contiguous, in_memory.shape
    if is_prepared(b):
        for name, array in (("a", a), ("b", b), ("out", out)):
            if array.alignment < 16:
                wanted = "at a multiple of 16 bytes with prepared weights"
                check.fail(name, wanted, f"an address that is a multiple of {array.alignment}")
    return Product(
        a.dtype, x.result.dtype, weights, a_scales, b_scales, len(a.shape) == 3, row_token is not None, b.shape[0],
        rows_of_weights(b), a.shape[-1], kernels.epilogue(number, is_gated=gated, interleaved=interleaved, **flags),
        gated, interleaved, quantizes, b.item_size, in_memory.strides[:2] if is_strided else (lines * line, line),
        is_strided, b.shape if is_prepared(b) else (), all(y.alignment >= 16 for y in (a, b, out)),
        2 if offsets.dtype == "int64" else 1, bias is not None and bias.dtype == "float32", alpha, limit,
        runtime.gpu_of(a), variant,
    )  # fmt: skip


def _decide(
    decision: Decision | None, given: tuple[Any, ...], facts: tuple[Any, ...], expected_m: Any,
    twin: Callable[..., Any], is_batched: bool,
) -> Any:  # fmt: skip
    """Check a call, choose its kernel, keep the choice, launch. `decision` is of alike calls of other alignment."""
    x = check_call(given, facts, is_batched)
    if expected_m is not None:
        expected_m = check.integer("expected_m", expected_m, 0)
    *views, into, scales = x.views
    (a, b), result = views[:2], x.result
    if a.on_host:
        return runtime.run_twin(twin, a, (into,) if scales is None else (into, scales), _of_twin(x, is_batched))
    rows, library, device = result.shape[-2], a.library, a.device
    out = into or read("out", library.allocate(result.shape, result.dtype, device))
    if rows:
        if not is_batched:  # batched, only the GPU knows how many rows there are
            flops = 2 * rows * rows_of_weights(b) * a.shape[-1]
            runtime.note(library, flops=flops if a.dtype in DTYPES else flops // 2)  # FP8: at twice the rate
        product = product_of(x, out)
        chosen = choose(product.of(rows, a.shape[-2], expected_m))
        if a.foreign is None and library.recorder is None:
            # One token has a scale of its own that is also one for all.
            if decision is None or decision.own != product.a_scales:
                decisions = BATCHED_DECISIONS if is_batched else DECISIONS
                decision = decisions.keep(facts, given, library, device, product.a_scales)
            misaligned = (a.address | b.address | (0 if into is None else out.address)) % 16
            decision.choices[misaligned] = product
        kernels.launch(chosen, library, device, [0 if y is None else y.address for y in (*views, out, scales)])
    made = runtime.returned(out.array, into, a)
    return made if scales is None else (made, runtime.returned(scales.array, scales, a))


def _in_memory(b: View) -> View:
    """Transposed weights with the dimensions in the order of memory."""
    shape, strides = ((of[0], of[2], of[1]) for of in (b.shape, b.strides))
    return b._replace(shape=shape, strides=strides)


def _results(
    a: View, b_scales: str, activation: str | None, result: Result, given: Sequence[Any], quantizes: bool
) -> tuple[Any, ...]:
    """The views of what the caller gives for the results; `result`: the one without quantization."""
    if not quantizes:
        out = given[0]
        if out is not None:
            out = read_like("out", out, a, "a", result.dtypes, result.shape, result.symbols)
        return out, None
    rows, columns = result.shape
    if b_scales != "block":
        check.fail("b_scale", "by blocks, with a result that is quantized", f"one by {b_scales}")
    if not is_gated(activation):
        check.fail("activation", "one with a gate, with a result that is quantized", repr(activation))
    if columns % BLOCK:
        check.fail("b", f"of n that is a multiple of {2 * BLOCK}, with a result that is quantized", 2 * columns)
    shape = rows, columns // BLOCK
    return (
        read_like("out_q", given[0], a, "a", FP8_DTYPES, (rows, columns), "[rows, n / 2]"),
        read_like("out_s", given[1], a, "a", ("float32",), shape, f"[rows, n / {2 * BLOCK}]"),
    )


def _of_twin(x: Checked, is_batched: bool) -> dict[str, Any]:
    """The arguments of the NumPy reference."""
    a, b, offsets, a_scale, b_scale, b_global_scale, row_token, bias, out, out_scale = x.views
    activation, alpha, limit, interleaved, out_dtype, _, quantizes = x.facts
    given = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "out_dtype": out_dtype, "activation": activation}
    given["expert_num_tokens" if is_batched else "expert_offsets"] = offsets
    if quantizes:
        return {**given, "out_q": out, "out_s": out_scale}
    given |= {"b_global_scale": b_global_scale, "bias": bias, "out": out}
    given |= {"alpha": alpha, "limit": limit, "interleaved": interleaved}
    return given if is_batched else {**given, "row_token": row_token}
