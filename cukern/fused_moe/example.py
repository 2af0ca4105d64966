"""Make random layers with any quantization, for tests and examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cukern.formats.fused_moe import GROUP, NOT_QUANTIZED, FusedMoEQuantConfig
from cukern.reference import quantization as twin
from cukern.runtime import arrays, check

Array = NDArray[Any]

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


class Layer(NamedTuple):
    """The arguments of `cukern.fused_experts`."""

    hidden_states: Any
    w1: Any
    w2: Any
    topk_weights: Any
    topk_ids: Any
    config: FusedMoEQuantConfig

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self[:5]

    def map(self, function: Callable[[Any], Any]) -> Layer:
        """Return a layer whose arrays are the results of `function` for this layer's arrays."""
        config = self.config
        scales = {name: function(value) for name, value in config.scales.items()}
        config = FusedMoEQuantConfig(**config.numbers, **scales)
        return Layer(*[function(array) for array in self.arrays], config)  # type: ignore[call-arg]

    def of_rank(self, tokens: slice, here: Any) -> Layer:
        """Return the arguments for one rank: the `tokens`, and the experts that the array `here` selects."""
        full_config = self.config
        scales = {k: s if k in ("a1_scale", "a2_scale") else s[here] for k, s in full_config.scales.items()}
        config = FusedMoEQuantConfig(**full_config.numbers, **scales)
        x, weights, ids = (x[tokens] for x in (self.hidden_states, self.topk_weights, self.topk_ids))
        return Layer(x, self.w1[here], self.w2[here], weights, ids, config)


def _fp8(values: Array, scale: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        quotient = np.where(scale > 0, values / scale, 0)
    return np.clip(quotient, -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


def quantize_weights(
    weights: Array, quantization: str | None, dtype: str = "bfloat16"
) -> tuple[Array, dict[str, Array]]:
    """Quantize float32 weights [experts, n, k]. Return the weights, and a dict with "scale" and, for NVFP4,
    "global_scale".

    With "fp8" each output channel has a scale.
    """
    experts, n, k = weights.shape
    if quantization is None:
        return weights.astype(arrays.numpy_dtype(dtype)), {}
    if quantization == "fp8_block":
        padded = np.zeros((experts, -(-n // GROUP) * GROUP, -(-k // GROUP) * GROUP), np.float32)
        padded[:, :n, :k] = weights
        blocks = padded.reshape(experts, -1, GROUP, padded.shape[2] // GROUP, GROUP)
        scale = (np.abs(blocks).max(axis=(2, 4)) / _E4M3_MAX).astype(np.float32)
        element_scale = scale.repeat(GROUP, axis=1).repeat(GROUP, axis=2)[:, :n, :k]
        return _fp8(weights, element_scale), {"scale": scale}
    if quantization == "fp8":
        scale = (np.abs(weights).max(axis=2) / _E4M3_MAX).astype(np.float32)
        return _fp8(weights, scale[:, :, None]), {"scale": scale}
    if quantization == "mxfp4":
        packed, scale = twin.quantize_mxfp4(weights)
        return packed, {"scale": scale}
    if quantization == "nvfp4":
        largest = np.maximum(np.abs(weights).max(axis=(1, 2)), np.float32(1e-30))
        global_scale = (_E4M3_MAX * _E2M1_MAX / largest).astype(np.float32)
        quantized = [twin.scaled_fp4_quant(w, s) for w, s in zip(weights, global_scale, strict=True)]
        packed, scale = (np.stack(x) for x in zip(*quantized, strict=True))
        return packed, {"scale": scale, "global_scale": (1 / global_scale).astype(np.float32)}
    check.one_of("quantization", quantization, (None, "fp8_block", "fp8", "mxfp4", "nvfp4"))
    raise AssertionError


def random_layer(
    rng: np.random.Generator,
    tokens: int,
    experts: int,
    inter: int,
    hidden: int,
    topk: int,
    quantization: str | None = None,
    dtype: str = "bfloat16",
) -> Layer:
    """Return a NumPy layer with normally distributed weights and random experts for each token.

    The layer's outputs have a magnitude of about 1.
    """

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    made: dict[str, Array] = {}
    scales: dict[str, Array] = {}
    # w2 is multiplied by 2 to compensate for the activation, which makes the values smaller.
    for name, weights in (
        ("w1", normal(experts, 2 * inter, hidden) / math.sqrt(hidden)),
        ("w2", normal(experts, hidden, inter) * (2 / math.sqrt(inter))),
    ):
        made[name], weight_scales = quantize_weights(weights, quantization, dtype)
        scales |= {f"{name}_{key}": scale for key, scale in weight_scales.items()}
    config = FusedMoEQuantConfig.make(quantization, **scales) if quantization else NOT_QUANTIZED
    ids = rng.random((tokens, experts)).argsort(axis=1)[:, :topk].astype(np.int32)
    factors = rng.random((tokens, topk), np.float32) + np.float32(0.1)
    factors /= factors.sum(axis=1, keepdims=True)
    x = normal(tokens, hidden).astype(arrays.numpy_dtype(dtype))
    return Layer(x, made["w1"], made["w2"], factors, ids, config)
