"""An encoder layer on a batch without padding: self-attention within each sequence, then feed-forward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.models._layers import Affine, Layers, Words, library_of
from cukern.ops.moe_activation import add_bias_act
from cukern.ops.moe_gemm import moe_gemm
from cukern.ops.norm import fused_add_layer_norm, layer_norm
from cukern.runtime import gpu

#: Pre-norm layers clip float16 hidden states to this magnitude, as transformers does.
_LARGEST_HALF = 65504.0 - 1000
#: From this many rows on, a GEMM with fused bias and activation is faster than a cuBLAS GEMM and an elementwise kernel.
_FUSED_ROWS = 4096
#: Up to this many rows, the attention kernel "mma" is faster than the default (mma 3.5 us, default 4.0 us on an H200).
_FEW_ROWS = 64
#: The activations that `moe_gemm` supports without a gate.
_FUSED = ("gelu", "gelu_tanh", "silu")


class EncoderLayerWeights(NamedTuple):
    """The weights of a layer, all of one dtype, contiguous, in one library and on one device."""

    qkv: Affine  # [3 * hidden, hidden]: query, key and value
    out: Affine  # [hidden, hidden]
    self_norm: Affine
    up: Affine  # [inter, hidden]
    down: Affine  # [hidden, inter]
    final_norm: Affine


class EncoderLayer:
    """An encoder layer with `EncoderLayerWeights`, with biases in all linear layers.

        x = norm(x + self_attention(x));  x = norm(x + feed_forward(x))

    With `normalize_before` (mBART): x = x + self_attention(norm(x)); x = x + feed_forward(norm(x)). A layer has four
    matrix multiplications: the fused QKV projection, the output projection of the attention, and two in the
    feed-forward. Fused kernels between them add the biases and residuals, normalize, and apply the activation.

    Args:
        layers: the operations on the weights' arrays.
        weights: the layer's weights.
        heads: the number of attention heads.
        activation: the feed-forward's activation, one of `add_bias_act`'s.
        epsilon: epsilon of the layer norms.
        normalize_before: True for a pre-norm layer, False for a post-norm layer.
        product_rows: the number of rows of each matrix multiplication, so that a row has the same bits in any batch;
            None: all rows at once.
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
        # moe_gemm is called with a single expert that owns all rows. It clamps the end offset to the number of rows.
        self._all_rows = layers.put(np.array([0, 2**31 - 1], np.int32)) if self._may_fuse() else None

    def __call__(self, x: Any, words: Words) -> Any:
        """Run the layer on the hidden states `x` [words, hidden]. Return the new hidden states."""
        weights = self.weights
        h = self._norm(x, weights.self_norm) if self.normalize_before else x
        qkv = self._linear(h, *weights.qkv)
        # The attention kernels "mma" and "auto" give different bits. `product_rows` promises the same bits in any
        # batch, so with `product_rows` all batches use "auto".
        is_few = self._chooses_by_rows and len(qkv) <= _FEW_ROWS and qkv.shape[1] // self.heads % 24 == 0
        attended = self.layers.attention(qkv, self.heads, words, "mma" if is_few else "auto")
        x = self._add(attended, weights.out, x, weights.self_norm)
        h = self._norm(x, weights.final_norm) if self.normalize_before else x
        x = self._add(self._up(h), weights.down, x, weights.final_norm)
        return self.layers.clipped(x, _LARGEST_HALF) if self.normalize_before else x

    def _may_choose(self) -> bool:
        """Return whether kernels are chosen by the number of rows.

        They are for 16-bit weights on a Hopper GPU, without `product_rows`.
        """
        weight = self.weights.up.weight
        device = library_of("weights.up.weight", weight).device(weight)
        if self.product_rows is not None or device is None or weight.dtype.itemsize != 2:
            return False
        return gpu.of_device(device).arch == "90a"

    def _may_fuse(self) -> bool:
        """Return whether a single kernel can compute the linear layer `up` and the activation."""
        return (
            self._chooses_by_rows
            and self.activation in _FUSED
            and all(n % 8 == 0 for n in self.weights.up.weight.shape)
        )

    def _up(self, x: Any) -> Any:
        """Return activation(x @ weight.T + bias) for the linear layer `up`."""
        weight, bias = self.weights.up
        if self._all_rows is not None and len(x) >= _FUSED_ROWS:
            activation = f"{self.activation}_no_mul"
            return moe_gemm(x, weight[None], self._all_rows, bias=bias[None], activation=activation)
        y = self._linear(x, weight)
        return add_bias_act(y, bias, self.activation, out=y)

    def _norm(self, x: Any, norm: Affine) -> Any:
        return layer_norm(x, *norm, self.epsilon)

    def _add(self, term: Any, product: Affine, residual: Any, norm: Affine) -> Any:
        """Apply the linear layer `product` to `term`, and add `residual`. A post-norm layer then normalizes the sum."""
        if self.normalize_before:
            return self._linear(term, *product) + residual
        y = self._linear(term, product.weight)
        return fused_add_layer_norm(y, residual, *norm, self.epsilon, input_bias=product.bias, out=y)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """Return x @ weight.T + bias. With `product_rows`, split the multiplication into chunks of that many rows."""
        linear, at_once, rows = self.layers.linear, self.product_rows, len(x)
        if at_once is None or rows == 0:
            return linear(x, weight, bias)
        filled = self.layers.rows_filled(x, -(-rows // at_once) * at_once)
        starts = range(0, len(filled), at_once)
        return self.layers.concatenate([linear(filled[i : i + at_once], weight, bias) for i in starts])[:rows]
