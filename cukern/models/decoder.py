"""A decoder layer: self-attention, cross-attention and feed-forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.models._layers import ACTIVATIONS, Affine, layers_of
from cukern.ops.decoder_attention import cross_attention, masked_attention
from cukern.ops.moe_activation import add_bias_act
from cukern.ops.norm import fused_add_layer_norm, layer_norm
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray

__all__ = ["Decoder", "DecoderWeights"]


class DecoderWeights(NamedTuple):
    """The weights of a layer, all of one dtype, contiguous, in one library and on one device."""

    qkv: Affine  # [3 * hidden, hidden]: query, key and value of the self-attention
    out: Affine
    self_norm: Affine
    cross_q: Affine
    cross_kv: Affine  # [2 * hidden, hidden]: key and value of the cross-attention
    cross_out: Affine
    cross_norm: Affine
    up: Affine  # [inter, hidden]
    down: Affine  # [hidden, inter]
    final_norm: Affine


class Decoder:
    """A decoder layer, like FasterTransformer's `Decoder`. All linear layers have biases.

        x = x + self_attention(norm(x));  x = x + cross_attention(norm(x), memory);  x = x + feed_forward(norm(x))

    The formula above is for `normalize_before` (pre-norm, as in FasterTransformer and mBART). A post-norm layer
    (Marian, BART) normalizes each sum `x + ...` instead of the inputs. Fused kernels after the matrix multiplications
    add the bias and the residual, and normalize.

    Args:
        weights: the layer's weights, NumPy, CuPy or torch arrays.
        heads: the number of heads of both attentions.
        activation: the feed-forward's activation: "gelu" (with the error function), "gelu_tanh", "relu" or "silu".
        normalize_before: True for a pre-norm layer, False for a post-norm layer.
        epsilon: epsilon of the layer norms.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        heads: int,
        *,
        activation: str = "gelu",
        normalize_before: bool = False,
        epsilon: float = 1e-5,
    ) -> None:
        self._layers = layers_of("weights", weights.qkv.weight)
        check.dimensions("weights.qkv.weight", weights.qkv.weight.shape, ("3 * hidden", "hidden"))
        self.hidden = int(weights.qkv.weight.shape[1])
        self.heads = check.integer("heads", heads, 1)
        if self.hidden % heads:
            check.fail("heads", f"a divisor of the hidden size {self.hidden}", heads)
        self.weights = weights
        self.activation = check.one_of("activation", activation, dict.fromkeys(ACTIVATIONS.values()))
        self.normalize_before = normalize_before
        self.epsilon = check.number("epsilon", epsilon)
        hidden, inter = self.hidden, weights.up.weight.shape[0]
        shapes = {"qkv": (3 * hidden, hidden), "cross_kv": (2 * hidden, hidden)}
        shapes |= {"up": (inter, hidden), "down": (hidden, inter)}
        for name, (weight, bias) in weights._asdict().items():
            wanted = (hidden,) if name.endswith("norm") else shapes.get(name, (hidden, hidden))
            check.shape(f"weights.{name}.weight", weight.shape, wanted, "that of the hidden size")
            check.shape(f"weights.{name}.bias", bias.shape, wanted[:1], "[out]")
        q, k, v = (weights.qkv.bias[i * hidden : (i + 1) * hidden] for i in range(3))
        self._biases = q, k, v

    def memory(self, states: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the keys and the values of encoder states [words, hidden]. Both are strided views [words, hidden]."""
        both = self._layers.linear(states, *self.weights.cross_kv)
        return both[:, : self.hidden], both[:, self.hidden :]

    def __call__(
        self,
        x: AnyArray,
        key_cache: AnyArray,
        value_cache: AnyArray,
        step: int | AnyArray,
        key_memory: AnyArray,
        value_memory: AnyArray,
        memory_lengths: AnyArray,
    ) -> AnyArray:
        """Run the layer on one new token per sequence.

        Args:
            x: [batch, hidden], of the weights' dtype.
            key_cache, value_cache: [max_steps, batch, heads, head_dim]; the new token is written at `step - 1`.
            step: the number of tokens of each sequence, including the new one, an int or an int32 array [1]. With an
                array, one CUDA graph serves all steps.
            key_memory, value_memory: [batch, memory_len, heads, head_dim], the results of `memory`; or [batch / beams,
                ...], where `beams` consecutive sequences share an entry.
            memory_lengths: int32 [batch] or [batch / beams], the number of encoder states of each sequence. With length
                0 the cross-attention returns zeros.

        Returns [batch, hidden] without waiting for a GPU. Raises the errors of `cukern.masked_attention` and
        `cukern.cross_attention`.
        """
        weights, layers, n = self.weights, self._layers, self.hidden
        check.dimensions("x", x.shape, ("batch", "hidden"))
        check.shape("x", x.shape, (x.shape[0], n), "[batch, hidden]")
        h = layer_norm(x, *weights.self_norm, self.epsilon) if self.normalize_before else x
        qkv = layers.linear(h, weights.qkv.weight)
        q, k, v = qkv[:, :n], qkv[:, n : 2 * n], qkv[:, 2 * n :]
        attended = masked_attention(q, k, v, *self._biases, key_cache, value_cache, step)
        x, h = self._add(attended, weights.out, x, weights.self_norm, weights.cross_norm)
        q = layers.linear(h, weights.cross_q.weight)
        attended = cross_attention(q, weights.cross_q.bias, key_memory, value_memory, memory_lengths)
        x, h = self._add(attended, weights.cross_out, x, weights.cross_norm, weights.final_norm)
        up = layers.linear(h, weights.up.weight)
        up = add_bias_act(up, weights.up.bias, self.activation, out=up)
        x, _ = self._add(up, weights.down, x, weights.final_norm, None)
        return x

    def _add(self, term: Any, projection: Affine, residual: Any, norm: Affine, next_norm: Affine | None) -> Any:
        """Return linear(term) + residual, normalized in a post-norm layer, and the input of the next sublayer."""
        layers, epsilon = self._layers, self.epsilon
        if self.normalize_before and next_norm is None:
            x = layers.linear(term, *projection) + residual
            return x, x
        y = layers.linear(term, projection.weight)
        if next_norm is not None and self.normalize_before:
            weight, bias = next_norm
            return y, fused_add_layer_norm(
                y, residual, weight, bias, epsilon, input_bias=projection.bias, residual_out=y
            )  # fmt: skip
        x = fused_add_layer_norm(y, residual, *norm, epsilon, input_bias=projection.bias, out=y)
        return x, x
