"""Gated and biased activations of a feed-forward layer, in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime.activation import ALPHA, LIMIT, is_gated
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # The kernel approximates exp2, the reciprocal and erf; their total relative error is about 2**-21. Rounding exp2's
    # argument adds an error that grows with the argument. Where erf is near -1, the reference's `1 + erf` has an error
    # of 2**-26 times `gate * up`, which is at most 60 in the tests. The kernel's polynomial then has an error of at
    # most 2**-24 times `up`.
    "out": {
        "float32": Tolerance(relative=2e-5, absolute=5e-6),
        "float16": Tolerance(relative=2**-10, absolute=5e-6),
        "bfloat16": Tolerance(relative=2**-7, absolute=5e-6),
    },
    # For float32 the kernel uses CUDA's accurate functions; exp's argument is at most 88 and rounded a few times. For
    # 16 bits it uses the approximations of the gated activations; gelu's error for a negative argument is at most
    # 2.3e-8. A subnormal 16-bit value near a rounding boundary may round the other way.
    "biased": {
        "float32": Tolerance(relative=3e-5, absolute=1e-37),
        "float16": Tolerance(relative=2**-10, absolute=9e-8),
        "bfloat16": Tolerance(relative=2**-7, absolute=3e-8),
    },
    # CUDA's normcdff is accurate to five units in the last place.
    "gelu": {"float32": Tolerance(relative=1e-6, absolute=1e-37)},
}

Array = NDArray[Any]

_erf = np.vectorize(math.erf, otypes=[np.float32])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def sides(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """Split rows [..., 2 * inter] into gates and ups, [..., inter] each.

    The gates are the first half of a row, or the even columns if `interleaved`.
    """
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    inter = x.shape[-1] // 2
    return x[..., :inter], x[..., inter:]


def activate_sums(name: str | None, sums: Array, alpha: float, limit: float, interleaved: bool) -> Array:
    """Apply an activation (None: none) to float32 sums. A gated activation halves the columns."""
    if name is None:
        return sums
    if not is_gated(name):
        return activate(name.removesuffix("_no_mul"), sums, np.ones_like(sums))
    return activate(name, *sides(sums, interleaved), alpha, limit)


def activate(name: str, gate: Array, up: Array, alpha: float = ALPHA, limit: float = LIMIT) -> Array:
    one, half = np.float32(1), np.float32(0.5)
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "silu":
            return gate / (one + np.exp(-gate)) * up
        if name == "gelu":
            return half * gate * (one + _erf(gate * np.float32(math.sqrt(0.5)))) * up
        if name == "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
            # Equal to (1 + tanh(z)) / 2, without losing bits where tanh is near -1.
            return gate / (one + np.exp(-2 * inner)) * up
        if name == "swigluoai":
            gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
            return gate / (one + np.exp(np.float32(-alpha) * gate)) * (up + one)
        if name == "relu2":
            gate = np.maximum(gate, np.float32(0))
            return gate * gate * up
    raise KeyError(name)


def valid_rows(shape: tuple[int, ...], expert_num_tokens: Array | None) -> Array:
    """Return which rows contain tokens: the first `expert_num_tokens[e]` of each expert, or all rows if it is None."""
    if expert_num_tokens is None:
        return np.ones(shape[:-1], bool)
    return np.arange(shape[1]) < expert_num_tokens[:, None]


def moe_activation(
    x: Array,
    activation: str = "silu",
    *,
    alpha: float = ALPHA,
    limit: float = LIMIT,
    interleaved: bool = False,
    expert_num_tokens: Array | None = None,
    out: Array | None = None,
) -> Array:
    inter = x.shape[-1] // 2
    if out is None:
        out = np.zeros((*x.shape[:-1], inter), x.dtype)
    rows = valid_rows(x.shape, expert_num_tokens)
    with np.errstate(over="ignore"):
        out[rows] = activate(activation, *sides(x[rows], interleaved), alpha, limit).astype(x.dtype)
    return out


def silu_and_mul(x: Array, *, out: Array | None = None) -> Array:
    return moe_activation(x, "silu", out=out)


def gelu_and_mul(x: Array, *, out: Array | None = None) -> Array:
    return moe_activation(x, "gelu", out=out)


def gelu_tanh_and_mul(x: Array, *, out: Array | None = None) -> Array:
    return moe_activation(x, "gelu_tanh", out=out)


def swigluoai_and_mul(
    x: Array, alpha: float = ALPHA, limit: float = LIMIT, *, interleaved: bool = False, out: Array | None = None
) -> Array:
    return moe_activation(x, "swigluoai", alpha=alpha, limit=limit, interleaved=interleaved, out=out)


def relu2_and_mul(x: Array, *, out: Array | None = None) -> Array:
    return moe_activation(x, "relu2", out=out)


def mul_and_silu(x: Array, *, out: Array | None = None) -> Array:
    return moe_activation(np.roll(x, x.shape[-1] // 2, axis=-1), "silu", out=out)


def add_bias_act(x: Array, bias: Array | None, activation: str = "gelu") -> Array:
    """Add in float32, activate in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = x.astype(np.float32)
        if bias is not None:
            z = z + bias.astype(np.float32)
        wide = z.astype(np.float64)
        if activation == "gelu":
            # Unlike 1 + erf, erfc keeps its bits where erf is near -1.
            y = 0.5 * wide * _erfc(wide * -math.sqrt(0.5))
        elif activation == "gelu_tanh":
            y = wide / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        elif activation == "silu":
            y = wide / (1 + np.exp(-wide))
        elif activation == "gelu_quick":
            y = wide / (1 + np.exp(-float(np.float32(ALPHA)) * wide))
        else:
            y = np.maximum(wide, 0)
        return y.astype(x.dtype)


def bias_gelu(x: Array, bias: Array | None, *, approximate: str = "none") -> Array:
    return add_bias_act(x, bias, "gelu_tanh" if approximate == "tanh" else "gelu")


def gelu_new(x: Array) -> Array:
    return add_bias_act(x, None, "gelu_tanh")


def gelu_fast(x: Array) -> Array:
    return add_bias_act(x, None, "gelu_tanh")


def gelu_quick(x: Array) -> Array:
    return add_bias_act(x, None, "gelu_quick")
