"""An encoder layer on a batch without padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import Affine, Layers, Words, library_of
from cukern.ops.moe_activation import add_bias_act
from cukern.ops.moe_gemm import moe_gemm
from cukern.ops.norm import fused_add_layer_norm, layer_norm
from cukern.runtime import gpu

#: Pre-norm layers clip float16 hidden states at this magnitude, as transformers does.
_FLOAT16_CLIP = 65504.0 - 1000
#: From this many rows on, a GEMM with fused bias and activation is faster than cuBLAS followed by another kernel.
_FUSED_MIN_ROWS = 4096
#: Up to this many rows, the attention kernel "mma" is faster than the default (3.5 instead of 4.0 us on an H200).
_MMA_MAX_ROWS = 64
_FUSED_ACTIVATIONS = ("gelu", "gelu_tanh", "silu")


class EncoderLayerWeights(NamedTuple):
    """The weights of a layer, all of one dtype, contiguous, in one library and on one device."""

    qkv: Affine  # [3 * hidden, hidden]: query, key and value
    out: Affine  # [hidden, hidden]
    self_norm: Affine
    up: Affine  # [inter, hidden]
    down: Affine  # [hidden, inter]
    final_norm: Affine


class EncoderLayer:
    """A transformer layer on words without padding. All linear layers have biases.

        x = norm(x + self_attention(x));  x = norm(x + feed_forward(x))

    With `normalize_before` (pre-norm, mBART): x = x + self_attention(norm(x)); x = x + feed_forward(norm(x)). Fused
    kernels do all work between the four matrix multiplications. `activation` is an activation of `add_bias_act`. With
    `product_rows` each matrix multiplication has `product_rows` rows, and a row has the same bits in any batch.
    """

    def __init__(
        self,
        layers: Layers,
        weights: EncoderLayerWeights,
        heads: int,
        *,
        activation: str,
        epsilon: float,
        normalize_before: bool = False,
        product_rows: int | None = None,
    ) -> None:
        self.layers, self.weights, self.heads = layers, weights, heads
        self.activation, self.epsilon = activation, epsilon
        self.normalize_before, self.product_rows = normalize_before, product_rows
        self._chooses_by_rows = self._may_choose()
        # The offsets of a single expert that owns all rows: moe_gemm clamps the end to the number of rows.
        self._all_rows = layers.put(np.array([0, 2**31 - 1], np.int32)) if self._may_fuse() else None

    def __call__(self, x: Any, words: Words) -> Any:
        """Return the new hidden states of `x` [words, hidden]."""
        weights = self.weights
        h = layer_norm(x, *weights.self_norm, self.epsilon) if self.normalize_before else x
        qkv = self._linear(h, *weights.qkv)
        # "mma" and "auto" give different bits, so with `product_rows` all batches use "auto".
        uses_mma = self._chooses_by_rows and len(qkv) <= _MMA_MAX_ROWS and qkv.shape[1] // self.heads % 24 == 0
        attended = self.layers.attention(qkv, self.heads, words, "mma" if uses_mma else "auto")
        x = self._add(attended, weights.out, x, weights.self_norm)
        h = layer_norm(x, *weights.final_norm, self.epsilon) if self.normalize_before else x
        x = self._add(self._up(h), weights.down, x, weights.final_norm)
        return self.layers.clipped(x, _FLOAT16_CLIP) if self.normalize_before else x

    def _may_choose(self) -> bool:
        """Return whether kernels may depend on the number of rows: 16-bit weights on Hopper, no `product_rows`."""
        weight = self.weights.up.weight
        device = library_of("weights.up.weight", weight).device(weight)
        if self.product_rows is not None or device is None or weight.dtype.itemsize != 2:
            return False
        return gpu.of_device(device).arch == "90a"

    def _may_fuse(self) -> bool:
        return (
            self._chooses_by_rows
            and self.activation in _FUSED_ACTIVATIONS
            and all(n % 8 == 0 for n in self.weights.up.weight.shape)
        )

    def _up(self, x: Any) -> Any:
        weight, bias = self.weights.up
        if self._all_rows is not None and len(x) >= _FUSED_MIN_ROWS:
            activation = f"{self.activation}_no_mul"
            return moe_gemm(x, weight[None], self._all_rows, bias=bias[None], activation=activation)
        y = self._linear(x, weight)
        return add_bias_act(y, bias, self.activation, out=y)

    def _add(self, term: Any, projection: Affine, residual: Any, norm: Affine) -> Any:
        """Return the sum linear(term) + residual. A post-norm layer also normalizes this sum."""
        if self.normalize_before:
            return self._linear(term, *projection) + residual
        y = self._linear(term, projection.weight)
        return fused_add_layer_norm(y, residual, *norm, self.epsilon, input_bias=projection.bias, out=y)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """Return x @ weight.T + bias. Each matrix multiplication has `product_rows` rows."""
        linear, chunk_rows, rows = self.layers.linear, self.product_rows, len(x)
        if chunk_rows is None or rows == 0:
            return linear(x, weight, bias)
        padded = self.layers.pad_rows(x, -(-rows // chunk_rows) * chunk_rows)
        starts = range(0, len(padded), chunk_rows)
        return self.layers.concatenate([linear(padded[i : i + chunk_rows], weight, bias) for i in starts])[:rows]
