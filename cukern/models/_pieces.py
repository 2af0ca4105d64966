"""What a decoder does between the ops of cukern, on the arrays of each library.

`pieces_of` gives these for an array: `ArrayPieces` is the NumPy form, which defines the results and serves CuPy too,
`TorchPieces` the torch form. Dense products are the array library's own, which on a GPU is cuBLAS. All else computes in
float32 and rounds once. Methods whose name ends in an underscore change their first array. None of them waits for a
GPU, except `host`, so that a step made of them can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import arrays, check
from cukern.runtime.cuda import cupy, current_device

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
_SQRT_HALF = math.sqrt(0.5)
_erf = np.vectorize(math.erf, otypes=[np.float32])


class Words(NamedTuple):
    """Where the words of a batch lie: one sequence after the other, without padding."""

    cu_seqlens: Any  # int32 [batch + 1], the words before each sequence, then all
    max_seq_len: int
    bounds: Sequence[int]  # cu_seqlens in host memory


class ArrayPieces:
    """The operations on NumPy arrays, and on CuPy arrays where `xp` is CuPy."""

    is_cuda_torch = False

    def __init__(self, xp: Any, device: int | None) -> None:
        self.xp = xp
        self.device = device

    # --- arrays -----------------------------------------------------------------------------------------

    def cast(self, x: Any, dtype: str) -> Any:
        """`x`, contiguous and of a dtype by its name."""
        return self.xp.ascontiguousarray(x, arrays.numpy_dtype(dtype))

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return self.xp.concatenate(parts)

    def full(self, shape: tuple[int, ...], value: Any, dtype: str) -> Any:
        if self.xp is np:
            return np.full(shape, value, arrays.numpy_dtype(dtype))
        with current_device(self.device or 0):
            return self.xp.full(shape, value, arrays.numpy_dtype(dtype))

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        """A NumPy array where the weights are."""
        if self.xp is np:
            return x
        with current_device(self.device or 0):
            return self.xp.asarray(x)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return x if self.xp is np else self.xp.asnumpy(x)

    def assign_(self, x: Any, value: Any) -> None:
        """`value`, an array or a number, into all of `x`."""
        x[...] = value

    def assign_rows_(self, x: Any, rows: Any, value: Any) -> None:
        x[rows] = value

    def take(self, x: Any, rows: Any) -> Any:
        """New rows of `x`, by int64 indices."""
        return x[rows]

    def flat_parents(self, parents: Any) -> Any:
        """int64 [batch * beams], the row of each parent, from parents [batch, beams]."""
        batch, beams = parents.shape
        return (parents + beams * self.xp.arange(batch)[:, None]).reshape(-1)

    def float32(self, x: Any) -> Any:
        return x.astype(np.float32)

    # --- a layer ----------------------------------------------------------------------------------------

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """x [rows, in] times weight [out, in] transposed, plus bias [out]; [rows, out]."""
        if self.xp is np and x.dtype != np.float32:
            # NumPy adds up products of 16 bits in 16 bits.
            y = self.float32(x) @ self.float32(weight).T
            return (y if bias is None else y + self.float32(bias)).astype(x.dtype)
        y = x @ weight.T
        return y if bias is None else y + bias

    def bias_activation(self, x: Any, bias: Any, name: str) -> Any:
        """The activation of x + bias."""
        y = self.float32(x) + self.float32(bias)
        if name == "relu":
            return self.xp.maximum(y, np.float32(0)).astype(x.dtype)
        if name == "silu":
            return (y * (np.float32(0.5) * (1 + self.xp.tanh(np.float32(0.5) * y)))).astype(x.dtype)
        half = np.float32(0.5) * y
        if name == "gelu_tanh":
            inner = np.float32(math.sqrt(2 / math.pi)) * (y + np.float32(0.044715) * y * y * y)
            return (half * (1 + self.xp.tanh(inner))).astype(x.dtype)
        return (half * (1 + self._erf(y * np.float32(_SQRT_HALF)))).astype(x.dtype)

    def _erf(self, x: Any) -> Any:
        if self.xp is np:
            return _erf(x) if x.size else x
        from cupyx.scipy.special import erf

        return erf(x)

    def add_bias(self, x: Any, bias: Any, residual: Any) -> Any:
        return (self.float32(x) + self.float32(bias) + self.float32(residual)).astype(x.dtype)

    def layer_norm(self, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
        """(x - mean) / sqrt(variance + epsilon) * weight + bias of each row, by the variance of all its elements."""
        y = self.float32(x)
        y = y - y.mean(-1, keepdims=True)
        variance = (y * y).mean(-1, keepdims=True)
        y = y / self.xp.sqrt(variance + np.float32(epsilon)) * self.float32(weight) + self.float32(bias)
        return y.astype(x.dtype)

    def add_bias_layer_norm(self, x: Any, bias: Any, residual: Any, weight: Any, norm_bias: Any, epsilon: float) -> Any:
        """The layer norm of x + bias + residual."""
        total = self.float32(x) + self.float32(bias) + self.float32(residual)
        return self.layer_norm(total, weight, norm_bias, epsilon).astype(x.dtype)

    def attention(self, qkv: Any, heads: int, words: Words) -> Any:
        """softmax(q k' / sqrt(head_dim)) v of each sequence with itself.

        qkv [words, 3 * hidden] holds q, k and v by heads one after the other; the result is [words, hidden].
        """
        hidden = qkv.shape[1] // 3
        out = self.xp.empty((len(qkv), hidden), qkv.dtype)
        scale = np.float32((hidden // heads) ** -0.5)
        for first, last in zip(words.bounds[:-1], words.bounds[1:], strict=True):
            if first == last:
                continue
            by_head = self.float32(qkv[first:last]).reshape(last - first, 3, heads, hidden // heads)
            q, k, v = by_head.transpose(1, 2, 0, 3)
            scores = q @ k.transpose(0, 2, 1) * scale
            weights = self.xp.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights @ v / weights.sum(-1, keepdims=True)
            out[first:last] = mixed.transpose(1, 0, 2).reshape(last - first, hidden)
        return out

    # --- what becomes of the logits ---------------------------------------------------------------------

    def log_softmax(self, x: Any) -> Any:
        """float32, contiguous, from logits [rows, vocab] of any dtype."""
        y = self.float32(x)
        y = y - y.max(-1, keepdims=True)
        return y - self.xp.log(self.xp.exp(y).sum(-1, keepdims=True))

    def forbid_(self, scores: Any, ids: Sequence[int]) -> None:
        """-inf for tokens in all rows."""
        scores[:, [*ids]] = -np.inf

    def force_(self, scores: Any, ids: Sequence[int]) -> None:
        """0 for tokens in all rows, -inf for all others."""
        scores[...] = -np.inf
        scores[:, [*ids]] = 0

    def forbid_repeats_(self, scores: Any, history: Any, length: int, size: int) -> None:
        """-inf for each token that would complete `size` tokens in a row that history [rows, :length] has already."""
        windows = length - size + 1
        if windows < 1:
            return
        latest = history[:, length - size + 1 : length]
        found = self.xp.ones((len(history), windows), bool)
        for i in range(size - 1):
            found &= history[:, i : i + windows] == latest[:, i : i + 1]
        last = history[:, size - 1 : size - 1 + windows]
        values = self.xp.where(found, np.float32(-np.inf), np.float32(np.inf))
        self.xp.minimum.at(scores, (self.xp.arange(len(history))[:, None], last), values)


class TorchPieces:
    """The operations on torch tensors, on the CPU or a CUDA device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._functional = torch.nn.functional
        self.device = device
        self.is_cuda_torch = device.type == "cuda"

    # --- arrays -----------------------------------------------------------------------------------------

    def cast(self, x: Any, dtype: str) -> Any:
        return x.detach().to(getattr(self._torch, dtype)).contiguous()

    def concatenate(self, parts: Sequence[Any]) -> Any:
        return self._torch.cat([*parts])

    def full(self, shape: tuple[int, ...], value: Any, dtype: str) -> Any:
        return self._torch.full(shape, value, dtype=getattr(self._torch, dtype), device=self.device)

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(x)).to(self.device)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return x.cpu().numpy()

    def assign_(self, x: Any, value: Any) -> None:
        if isinstance(value, self._torch.Tensor):
            x.copy_(value)
        else:
            x.fill_(value)

    def assign_rows_(self, x: Any, rows: Any, value: Any) -> None:
        x.index_copy_(0, rows, value)

    def take(self, x: Any, rows: Any) -> Any:
        return x.index_select(0, rows)

    def flat_parents(self, parents: Any) -> Any:
        batch, beams = parents.shape
        first = beams * self._torch.arange(batch, device=self.device)
        return (parents + first[:, None]).reshape(-1)

    def float32(self, x: Any) -> Any:
        return x.float()

    # --- a layer ----------------------------------------------------------------------------------------

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        return self._functional.linear(x, weight, bias)

    def bias_activation(self, x: Any, bias: Any, name: str) -> Any:
        y, functional = x.float() + bias.float(), self._functional
        if name == "relu":
            return functional.relu(y).to(x.dtype)
        if name == "silu":
            return functional.silu(y).to(x.dtype)
        return functional.gelu(y, approximate="tanh" if name == "gelu_tanh" else "none").to(x.dtype)

    def add_bias(self, x: Any, bias: Any, residual: Any) -> Any:
        return (x.float() + bias.float() + residual.float()).to(x.dtype)

    def layer_norm(self, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
        y = self._functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), epsilon)
        return y.to(x.dtype)

    def add_bias_layer_norm(self, x: Any, bias: Any, residual: Any, weight: Any, norm_bias: Any, epsilon: float) -> Any:
        total = x.float() + bias.float() + residual.float()
        return self.layer_norm(total, weight, norm_bias, epsilon).to(x.dtype)

    def attention(self, qkv: Any, heads: int, words: Words) -> Any:
        """See `ArrayPieces.attention`. Tensors of 16 bits on a GPU go to torch's variable-length attention."""
        hidden = qkv.shape[1] // 3
        by_head = qkv.view(len(qkv), 3, heads, hidden // heads)
        if self.is_cuda_torch and qkv.dtype != self._torch.float32:
            from torch.nn.attention.varlen import varlen_attn

            longest = words.max_seq_len
            mixed = varlen_attn(*by_head.unbind(1), words.cu_seqlens, words.cu_seqlens, longest, longest)
            return mixed.reshape(len(qkv), hidden)
        out = qkv.new_empty((len(qkv), hidden))
        for first, last in zip(words.bounds[:-1], words.bounds[1:], strict=True):
            if first < last:
                q, k, v = by_head[first:last].permute(1, 2, 0, 3)
                mixed = self._functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
                out[first:last] = mixed.transpose(0, 1).reshape(last - first, hidden)
        return out

    # --- what becomes of the logits ---------------------------------------------------------------------

    def log_softmax(self, x: Any) -> Any:
        return self._torch.log_softmax(x.float(), -1)

    def forbid_(self, scores: Any, ids: Sequence[int]) -> None:
        for token in ids:
            scores[:, token].fill_(-math.inf)

    def force_(self, scores: Any, ids: Sequence[int]) -> None:
        scores.fill_(-math.inf)
        for token in ids:
            scores[:, token].fill_(0)

    def forbid_repeats_(self, scores: Any, history: Any, length: int, size: int) -> None:
        windows = length - size + 1
        if windows < 1:
            return
        latest = history[:, length - size + 1 : length]
        found = self._torch.ones((len(history), windows), dtype=self._torch.bool, device=self.device)
        for i in range(size - 1):
            found &= history[:, i : i + windows] == latest[:, i : i + 1]
        last = history[:, size - 1 : size - 1 + windows].long()
        values = self._torch.full(found.shape, math.inf, device=self.device).masked_fill_(found, -math.inf)
        scores.scatter_reduce_(1, last, values, "amin")


Pieces = ArrayPieces | TorchPieces


def pieces_of(name: str, array: Any) -> Pieces:
    """The operations for the library and the device of an array, the argument `name`."""
    library = arrays.library_of(array)
    if library is None:
        check.fail(name, "an array of NumPy, CuPy or torch", type(array).__name__, TypeError)
    if library.name == "torch":
        return TorchPieces(array.device)
    return ArrayPieces(np if library is arrays.NUMPY else cupy, library.device(array))
