"""The gated activation between the two projections of a feed-forward layer."""

from __future__ import annotations

from typing import Any

from cukern.reference import moe_activation as twin
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, dtype_name, expect_array
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.late import ceil_div
from cukern.runtime.op import op
from cukern.runtime.plan import launch, outputs, run_twin
from cukern.runtime.rows import rows_of, tile
from cukern.runtime.units import divisor

__all__ = [
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "moe_activation",
    "relu2_and_mul",
    "silu_and_mul",
    "swigluoai_and_mul",
]

DTYPES = ("float32", "float16", "bfloat16")
#: "vector": 16 bytes at a time; "scalar": one element.
VARIANTS = ("auto", "vector", "scalar")
_kernel = Kernel("moe_activation", "moe_activation")
_ITEMS = 2


def _variant(dtype: str, activation: int, width: int) -> Variant:
    return _kernel.variant(arrays.CUDA_TYPE[dtype], activation, width, _ITEMS)


# Other activations and dtypes, and rows that are not aligned, are compiled at their first use.
_kernel.at_import = [_variant("bfloat16", activations.number("silu"), 16).instance]
_kernel.specialized = [
    _variant(dtype, activations.number(name), 16).instance for name in activations.ACTIVATIONS for dtype in DTYPES
]


def check_halves(name: str, array: Array) -> int:
    """The size of each half of the rows of `array`. Raises ValueError for rows of an odd size."""
    if not array.shape or int(array.shape[-1]) % 2:
        check.fail(name, "of shape [..., 2 * inter]", list(array.shape))
    return int(array.shape[-1]) // 2


def _activated(x: Any, *_: Any, **__: Any) -> Result:
    return Result((*x.shape[:-1], x.shape[-1] // 2), dtype_name(x), "[..., inter]")


@op(
    twin.moe_activation,
    "moe_activation(Tensor x, str activation='silu', *, Tensor? expert_num_tokens=None, str variant='auto') "
    "-> (Tensor activated)",
    _activated,
    rows={"rows": ("x", "expert_num_tokens", "out")},
)
def moe_activation(
    x: AnyArray,
    activation: str = "silu",
    *,
    expert_num_tokens: AnyArray | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Activate the gate of each token and multiply it with the up projection: activate(gate) * up.

    The first half of a row of `x` is the gate, the second half the up projection:

        silu        gate * sigmoid(gate) * up
        gelu        gate * (1 + erf(gate / sqrt(2))) / 2 * up
        gelu_tanh   gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate**3))) / 2 * up
        swigluoai   min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1)
        relu2       max(gate, 0)**2 * up

    Args:
        x: [..., 2 * inter], float32, float16 or bfloat16; rows may be strided, with one stride for all.
        activation: one of the names above.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, 2 * inter]: the rows of each expert that
            hold tokens, the first ones. Rows after them are neither read nor written.
        out: an array to write into and return.
        variant: "auto", or a kernel by name: "vector" (16 bytes at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        [..., inter], in the dtype and library and on the device of `x`, computed in float32 and rounded once. Arrays in
        host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    number = activations.number(activation)
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
        _variant(x.dtype, number, width),
        (ceil_div(rows.total, plan.rows), plan.chunks),
        plan.threads,
        x=x,
        out=out,
        counts=rows.counts,
        x_stride=rows.distance * item_size,
        rows=rows.total,
        max_tokens=rows.batch,
        by_max_tokens=divisor(rows.batch),
        **plan.fields,
    )
    return out


def _alias(name: str) -> Any:
    """Declare a function of one activation."""
    return op(getattr(twin, name), f"{name}(Tensor x) -> (Tensor activated)", _activated, rows={"rows": ("x", "out")})


@_alias("silu_and_mul")
def silu_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """`moe_activation` with "silu"; vLLM's operator of this name, which takes `out` first."""
    return moe_activation(x, "silu", out=out)


@_alias("gelu_and_mul")
def gelu_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """`moe_activation` with "gelu"; vLLM's operator of this name, which takes `out` first."""
    return moe_activation(x, "gelu", out=out)


@_alias("gelu_tanh_and_mul")
def gelu_tanh_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """`moe_activation` with "gelu_tanh"; vLLM's operator of this name, which takes `out` first."""
    return moe_activation(x, "gelu_tanh", out=out)


@_alias("swigluoai_and_mul")
def swigluoai_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """`moe_activation` with "swigluoai", the activation of gpt-oss with its limit of 7.

    The two projections are halves of a row here, where vLLM's operator of this name has them interleaved.
    """
    return moe_activation(x, "swigluoai", out=out)


@_alias("relu2_and_mul")
def relu2_and_mul(x: AnyArray, *, out: AnyArray | None = None) -> AnyArray:
    """`moe_activation` with "relu2"."""
    return moe_activation(x, "relu2", out=out)
