"""The activation between the two GEMMs of a feed-forward layer: gated, or with a bias."""

from __future__ import annotations

from typing import Any

from cukern.reference import moe_activation as twin
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, dtype_name, expect, expect_array
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, launch, outputs, run_twin
from cukern.runtime.rows import rows_of, tile
from cukern.runtime.vectors import ceil_div, divisor, why_width

__all__ = [
    "add_bias_act",
    "bias_gelu",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "moe_activation",
    "mul_and_silu",
    "relu2_and_mul",
    "silu_and_mul",
    "swigluoai_and_mul",
]

DTYPES = ("float32", "float16", "bfloat16")
#: "vector" handles 16 bytes at a time, "scalar" one element.
VARIANTS = ("auto", "vector", "scalar")
#: Activations without a gate. The CUDA template has the same names in capitals.
WITH_BIAS = ("gelu", "gelu_tanh", "silu", "relu", "gelu_quick")
#: The values of the argument `approximate` of `torch.nn.functional.gelu`.
_APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}

_kernel = Kernel("moe_activation/moe_activation", "moe_activation")
_bias_kernel = Kernel("moe_activation/add_bias_act", "add_bias_act")
_ITEMS = 2
_ROWS = 2  # rows per thread, which share the bias


def _variant(
    dtype: str, activation: int, width: int, gate_last: bool = False, interleaved: bool = False, bounded: bool = False
) -> Variant:
    arguments = arrays.CUDA_TYPE[dtype], activation, width, _ITEMS
    flags = gate_last, interleaved, bounded
    # False flags at the end are left out, because the template has defaults for them.
    given = flags[: max((i + 1 for i, flag in enumerate(flags) if flag), default=0)]
    return _kernel.variant(*arguments, *map(bool, given))


_kernel.at_import = [_variant("bfloat16", activations.number("silu"), 16).instance]
_kernel.specialized = [
    _variant(dtype, activations.number(name), 16).instance for name in activations.ACTIVATIONS for dtype in DTYPES
]


def _bias_variant(dtype: str, activation: str, width: int) -> Variant:
    return _bias_kernel.variant(arrays.CUDA_TYPE[dtype], activation.upper(), width, _ROWS)


_bias_kernel.at_import = [_bias_variant("float16", "gelu", 16).instance]
_bias_kernel.specialized = [_bias_variant(dtype, name, 16).instance for name in WITH_BIAS for dtype in DTYPES]


def check_halves(name: str, array: Array) -> int:
    """Return the size of half a row. Raises ValueError for an odd size."""
    if not array.shape or int(array.shape[-1]) % 2:
        check.fail(name, "of shape [..., 2 * inter]", list(array.shape))
    return int(array.shape[-1]) // 2


def _activated(x: Any, *_: Any, **__: Any) -> Result:
    return Result((*x.shape[:-1], x.shape[-1] // 2), dtype_name(x), "[..., inter]")


@op(twin.moe_activation, "activated", _activated)
def moe_activation(
    x: AnyArray,
    activation: str = "silu",
    *,
    alpha: float = activations.ALPHA,
    limit: float = activations.LIMIT,
    interleaved: bool = False,
    expert_num_tokens: AnyArray | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Activate the gate of each token and multiply it with the up projection: activate(gate) * up.

    The first half of a row of `x` is the gate, the second half the up projection:

        silu        gate * sigmoid(gate) * up
        gelu        gate * (1 + erf(gate / sqrt(2))) / 2 * up
        gelu_tanh   gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3))) / 2 * up
        swigluoai   g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1), with g = min(gate, limit)
        relu2       max(gate, 0)**2 * up

    Args:
        x: [..., 2 * inter], float32, float16 or bfloat16; rows at a constant stride.
        activation: one of the names above.
        alpha, limit: the constants of swigluoai.
        interleaved: whether columns 2 j and 2 j + 1 of a row are gate j and up j, as in gpt-oss.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, 2 * inter]: the tokens of each expert. Rows
            past them are neither read nor written.
        out: an array to write into and return.
        variant: "auto", "vector" (16 bytes at a time; needs aligned rows) or "scalar". All give the same bits.

    Returns:
        [..., inter], in the dtype and library and on the device of `x`, computed in float32 and rounded once.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: unsupported shapes, strides, devices or sizes.
    """
    return _gated(x, activation, expert_num_tokens, out, variant, options=(alpha, limit, interleaved))


def _gated(
    x: Any,
    activation: str,
    expert_num_tokens: Any,
    out: Any,
    variant: str = "auto",
    gate_last: bool = False,
    options: tuple[float, float, bool] = (activations.ALPHA, activations.LIMIT, False),
) -> Any:
    """Compute a gated activation. With `gate_last` the second half of a row is the gate.

    `options` is (alpha, limit, interleaved).
    """
    number = activations.number(activation)
    alpha, limit = activations.check_bounds(*options[:2])
    interleaved = check.one_of("interleaved", options[2], (False, True))
    bounded = activation == "swigluoai" and (alpha, limit) != (activations.ALPHA, activations.LIMIT)
    expect_array("x", x, DTYPES)
    inter = check_halves("x", x)
    rows = rows_of("x", x, expert_num_tokens)
    out = outputs(out, x, "x", _activated(x))
    if x.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if rows.total == 0 or inter == 0:
        return out
    item_size = x.item_size
    wide = min(x.alignment, out.alignment) == 16 and (inter | rows.distance) * item_size % 16 == 0
    if variant == "vector" and not wide:
        check.fail("variant", "'auto' or 'scalar' here", "'vector': rows of x or out are not 16-byte aligned")
    width = 16 if wide and variant != "scalar" else item_size
    plan = tile(inter * item_size // width, _ITEMS)
    launch(
        _variant(x.dtype, number, width, gate_last, interleaved, bounded),
        (ceil_div(rows.total, plan.rows), plan.chunks),
        plan.threads,
        why=asked(variant) or why_width(width, "rows of x and out"),
        x=x,
        out=out,
        counts=rows.counts,
        x_stride=rows.distance * item_size,
        rows=rows.total,
        max_tokens=rows.batch,
        by_max_tokens=divisor(rows.batch),
        alpha=alpha,
        limit=limit,
        **plan.fields,
    )
    return out


@op(twin.silu_and_mul, "activated", _activated)
def silu_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `moe_activation` with "silu". vLLM's operator takes `out` first."""
    return moe_activation(x, "silu", out=out)


@op(twin.gelu_and_mul, "activated", _activated)
def gelu_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `moe_activation` with "gelu". vLLM's operator takes `out` first."""
    return moe_activation(x, "gelu", out=out)


@op(twin.gelu_tanh_and_mul, "activated", _activated)
def gelu_tanh_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `moe_activation` with "gelu_tanh". vLLM's operator takes `out` first."""
    return moe_activation(x, "gelu_tanh", out=out)


@op(twin.swigluoai_and_mul, "activated", _activated)
def swigluoai_and_mul(
    x: AnyArray,
    alpha: float = activations.ALPHA,
    limit: float = activations.LIMIT,
    *,
    interleaved: bool = False,
    out: AnyArray | None = None,
) -> AnyArray:
    """Run `moe_activation` with "swigluoai", the activation of gpt-oss.

    `alpha`, `limit` and `interleaved` are as in `moe_activation`. vLLM's operator takes `out` first, and is always
    interleaved.
    """
    return moe_activation(x, "swigluoai", alpha=alpha, limit=limit, interleaved=interleaved, out=out)


@op(twin.relu2_and_mul, "activated", _activated)
def relu2_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `moe_activation` with "relu2"."""
    return moe_activation(x, "relu2", out=out)


@op(twin.mul_and_silu, "activated", _activated)
def mul_and_silu(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `silu_and_mul` with the halves of a row exchanged: x[..., :inter] * silu(x[..., inter:]).

    All else is as in `moe_activation`. vLLM's operator takes `out` first.
    """
    return _gated(x, "silu", None, out, gate_last=True)


# --- with a bias --------------------------------------------------------------------------------------


def _as_given(x: Any, *_: Any, **__: Any) -> Result:
    return Result(x.shape, dtype_name(x), "[..., inter]")


@op(twin.add_bias_act, "activated", _as_given)
def add_bias_act(
    x: AnyArray, bias: AnyArray | None, activation: str = "gelu", *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Add a bias to each row, and apply an activation to the sums z = x + bias:

        gelu        z * (1 + erf(z / sqrt(2))) / 2
        gelu_tanh   z * (1 + tanh(sqrt(2 / pi) * (z + 0.044715 * z**3))) / 2
        silu        z * sigmoid(z)
        relu        max(z, 0)
        gelu_quick  z * sigmoid(1.702 * z)

    Args:
        x: [..., inter], float32, float16 or bfloat16; rows at a constant stride.
        bias: [inter], in the dtype of `x`; None: 0.
        activation: one of the names above.
        out: an array to write into and return; may be `x` itself.
        variant: as in `moe_activation`. The errors are the same.

    Returns:
        [..., inter], in the dtype and library and on the device of `x`, computed in float32 and rounded once. NaN stays
        NaN.

    FasterTransformer's kernel has the same name.
    """
    check.one_of("activation", activation, WITH_BIAS)
    expect_array("x", x, DTYPES)
    rows = rows_of("x", x)
    if bias is not None:
        expect("bias", bias, x, "x", (x.dtype,), (rows.size,), "[inter]")
    out = outputs(out, x, "x", _as_given(x))
    if x.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if rows.total == 0 or rows.size == 0:
        return out
    alignment = min(array.alignment for array in (x, bias, out) if array is not None)
    wide = alignment == 16 and (rows.size | rows.distance) * x.item_size % 16 == 0
    if variant == "vector" and not wide:
        check.fail("variant", "'auto' or 'scalar' here", "'vector': rows of x or out, or bias, are not 16-byte aligned")
    width = 16 if wide and variant != "scalar" else x.item_size
    plan = tile(rows.size * x.item_size // width, 1)
    launch(
        _bias_variant(x.dtype, activation, width),
        (ceil_div(rows.total, plan.rows * _ROWS), plan.chunks),
        plan.threads,
        why=asked(variant) or why_width(width, "rows of x and out, and bias"),
        x=x,
        bias=bias,
        out=out,
        x_stride=rows.distance * x.item_size,
        rows=rows.total,
        **plan.fields,
    )
    return out


@op(twin.bias_gelu, "activated", _as_given)
def bias_gelu(
    x: AnyArray, bias: AnyArray | None, *, approximate: str = "none", out: AnyArray | None = None
) -> AnyArray:
    """Run `add_bias_act` with "gelu", or with "gelu_tanh" if `approximate` is "tanh" (`torch.nn.functional.gelu`)."""
    check.one_of("approximate", approximate, _APPROXIMATE)
    return add_bias_act(x, bias, _APPROXIMATE[approximate], out=out)


@op(twin.gelu_new, "activated", _as_given)
def gelu_new(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `add_bias_act` with "gelu_tanh" and no bias. vLLM's operator takes `out` first.

    Only the result is rounded to the dtype of `x`. vLLM also rounds the cube, the tanh and the sum.
    """
    return add_bias_act(x, None, "gelu_tanh", out=out)


@op(twin.gelu_fast, "activated", _as_given)
def gelu_fast(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `gelu_new` under another name: the formulas are equal. vLLM's operator takes `out` first."""
    return add_bias_act(x, None, "gelu_tanh", out=out)


@op(twin.gelu_quick, "activated", _as_given)
def gelu_quick(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """Run `add_bias_act` with "gelu_quick" and no bias (CLIP). vLLM's operator takes `out` first."""
    return add_bias_act(x, None, "gelu_quick", out=out)
