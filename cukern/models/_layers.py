"""The array operations of a model for NumPy, CuPy and torch: linear layers, attention, buffers, logits, pooling.

`ArrayLayers` runs on NumPy and CuPy, and documents the methods of `TorchLayers` too. The results on NumPy arrays are
the reference. In this package a "word" is a token that is not padding.

- Matrix multiplications use the array library. All other operations compute in float32 and round once, and the result
  of a sequence depends only on that sequence.
- A method whose name ends in an underscore writes to its first array argument.
- `host` and `flat_nonzero` make the host wait for the GPU. On CuPy, `pool` also does so if `Words.bounds` is None. A
  CUDA graph can capture all other methods.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.ops.varlen_attention import varlen_attention
from cukern.runtime import arrays, check
from cukern.runtime.cuda import cupy, current_device

DTYPES = ("float32", "float16", "bfloat16")
#: Maps transformers' names to the names in `add_bias_act`.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class Affine(NamedTuple):
    """A weight and a bias: [out, in] and [out] for a linear layer, [hidden] and [hidden] for a layer norm."""

    weight: Any
    bias: Any


class Words(NamedTuple):
    """The bounds of each sequence in a batch without padding."""

    cu_seqlens: Any  # int32 [batch + 1]: the index of each sequence's first word, then the number of words
    bounds: Sequence[int] | None = None

    def on_host(self) -> Sequence[int]:
        """Return `cu_seqlens` as Python ints. Without `bounds` this waits for the GPU."""
        if self.bounds is not None:
            return self.bounds
        library = arrays.library_of(self.cu_seqlens)
        assert library is not None
        return library.to_numpy(self.cu_seqlens).tolist()


class ArrayLayers:
    """The operations on arrays of `xp`: NumPy or CuPy."""

    is_cuda_torch = False

    def __init__(self, xp: Any, device: int | None) -> None:
        self.xp = xp
        self.device = device

    def place(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the operations. It makes the weights' CUDA device current or silences NumPy warnings."""
        if self.device is None:
            return np.errstate(over="ignore", invalid="ignore")
        return current_device(self.device)

    def cast(self, x: Any, dtype: str) -> Any:
        return self.xp.ascontiguousarray(x.astype(arrays.numpy_dtype(dtype), copy=False))

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return self.xp.concatenate(parts, axis)

    def pad_rows(self, x: Any, rows: int) -> Any:
        return self.xp.concatenate([x, self.xp.zeros((rows - len(x), x.shape[1]), x.dtype)])

    def arange(self, n: int) -> Any:
        return self.xp.arange(n)

    def flat_nonzero(self, x: Any) -> Any:
        """Return the int64 indices of the nonzero elements of the flattened array."""
        return self.xp.flatnonzero(x)

    def cu_seqlens(self, lengths: Any) -> Any:
        """Return the cumulative sums of `lengths` [batch] after a leading 0, int32 [batch + 1]."""
        sums = self.xp.zeros(len(lengths) + 1, np.int32)
        sums[1:] = lengths.cumsum()
        return sums

    def full(self, shape: tuple[int, ...], value: Any, dtype: str) -> Any:
        return self.xp.full(shape, value, arrays.numpy_dtype(dtype))

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        return self.xp.asarray(x)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return x if self.xp is np else self.xp.asnumpy(x)

    def is_capturing(self) -> bool:
        return self.xp is not np and bool(self.xp.cuda.get_current_stream().is_capturing())

    def assign_(self, x: Any, value: Any) -> None:
        x[...] = value

    def assign_rows_(self, x: Any, rows: Any, value: Any) -> None:
        x[rows] = value

    def take(self, x: Any, rows: Any) -> Any:
        return x[rows]

    def flat_parents(self, parents: Any) -> Any:
        """Convert beam indices [batch, beams] to int64 row indices in [batch * beams, ...]."""
        batch, beams = parents.shape
        return (parents + beams * self.xp.arange(batch)[:, None]).reshape(-1)

    def float32(self, x: Any) -> Any:
        return x.astype(np.float32)

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """Return x [rows, in] @ weight.T + bias, [rows, out], with weight [out, in] and bias [out]."""
        if self.xp is np and x.dtype != np.float32:
            # NumPy accumulates products of 16-bit matrices in 16 bits, so compute in float32.
            y = self.float32(x) @ self.float32(weight).T
            return (y if bias is None else y + self.float32(bias)).astype(x.dtype)
        y = x @ weight.T
        return y if bias is None else y + bias

    def attention(self, qkv: Any, heads: int, words: Words, variant: str = "auto") -> Any:
        """Return the self-attention softmax(q k^T / sqrt(head_dim)) v within each sequence, [words, hidden].

        A row of `qkv` [words, 3 * hidden] contains q, k and v, each [heads, head_dim].
        """
        return _attention(qkv, heads, words, variant)

    def clipped(self, x: Any, bound: float) -> Any:
        """Clip `x` to [-bound, bound] if it is float16."""
        return x.clip(-bound, bound) if x.dtype == np.float16 else x

    def log_softmax(self, x: Any) -> Any:
        y = self.float32(x)
        y = y - y.max(-1, keepdims=True)
        return y - self.xp.log(self.xp.exp(y).sum(-1, keepdims=True))

    def force_(self, scores: Any, ids: Sequence[int]) -> None:
        """Set the scores of `ids` to 0, and all other scores to -inf."""
        scores[...] = -np.inf
        scores[:, [*ids]] = 0

    # --- a step whose index is in an array, int64 [1] ---------------------------------------------------

    def low_int32(self, x: Any) -> Any:
        """View the low 32 bits of an int64 [1] as int32 [1], in little-endian memory."""
        return x.view(np.int32)[:1]

    def add_(self, x: Any, n: int) -> None:
        x += n

    def assign_column_(self, x: Any, column: Any, value: Any) -> None:
        """Write `value` [rows, ...] to a column of `x` [rows, columns, ...]."""
        x[:, column] = value[:, None]

    def forbid_below_(self, scores: Any, ids: Sequence[int], length: Any, min_length: int) -> None:
        """Set the scores of `ids` to -inf if `length` < `min_length`."""
        ids = [*ids]
        scores[:, ids] = self.xp.where(length < min_length, np.float32(-np.inf), scores[:, ids])

    def forbid_repeats_(self, scores: Any, history: Any, length: Any, size: int) -> None:
        """Forbid each token that would repeat an n-gram (`size` tokens) of `history[row, :length]`."""
        windows = history.shape[1] - size + 1
        if windows < 1:
            return
        latest = history[:, (length - size + 1 + self.xp.arange(size - 1)).clip(0)]
        found = self.xp.broadcast_to(self.xp.arange(windows) <= length - size, (len(history), windows))
        for i in range(size - 1):
            found = found & (history[:, i : i + windows] == latest[:, i : i + 1])
        last = history[:, size - 1 :]
        values = self.xp.where(found, np.float32(-np.inf), np.float32(np.inf))
        self.xp.minimum.at(scores, (self.xp.arange(len(history))[:, None], last), values)

    def pool(self, x: Any, words: Words, mode: str) -> Any:
        """Return one vector per sequence, float32 [batch, hidden]; zeros for an empty sequence.

        `mode` "cls" takes the first word's hidden state. "mean" and "max" reduce over all words.
        """
        bounds = words.on_host()
        out = self.xp.zeros((len(bounds) - 1, x.shape[1]), np.float32)
        for row, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                seq = self.float32(x[first:last])
                out[row] = seq[0] if mode == "cls" else seq.max(0) if mode == "max" else seq.sum(0) / (last - first)
        return out

    def normalized(self, x: Any) -> Any:
        """Divide each row by its L2 norm. Rows of zeros stay zero."""
        length = self.xp.sqrt((x * x).sum(-1, keepdims=True))
        return x / self.xp.maximum(length, np.float32(1e-12))


class TorchLayers:
    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._functional = torch.nn.functional
        self.device = device
        self.is_cuda_torch = device.type == "cuda"

    def place(self) -> contextlib.AbstractContextManager[None]:
        """Return an empty context, because torch takes the device from the tensors."""
        return contextlib.nullcontext()

    def cast(self, x: Any, dtype: str) -> Any:
        return x.detach().to(getattr(self._torch, dtype)).contiguous()

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return self._torch.cat([*parts], axis)

    def pad_rows(self, x: Any, rows: int) -> Any:
        return self._functional.pad(x, (0, 0, 0, rows - len(x)))

    def arange(self, n: int) -> Any:
        return self._torch.arange(n, device=self.device)

    def flat_nonzero(self, x: Any) -> Any:
        return x.reshape(-1).nonzero().reshape(-1)

    def cu_seqlens(self, lengths: Any) -> Any:
        sums = self._torch.zeros(len(lengths) + 1, dtype=self._torch.int32, device=self.device)
        self._torch.cumsum(lengths, 0, dtype=self._torch.int32, out=sums[1:])
        return sums

    def full(self, shape: tuple[int, ...], value: Any, dtype: str) -> Any:
        return self._torch.full(shape, value, dtype=getattr(self._torch, dtype), device=self.device)

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(x)).to(self.device)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return x.cpu().numpy()

    def is_capturing(self) -> bool:
        return self.is_cuda_torch and self._torch.cuda.is_current_stream_capturing()

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

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        return self._functional.linear(x, weight, bias)

    def attention(self, qkv: Any, heads: int, words: Words, variant: str = "auto") -> Any:
        return _attention(qkv, heads, words, variant)

    def clipped(self, x: Any, bound: float) -> Any:
        return x.clip(-bound, bound) if x.dtype == self._torch.float16 else x

    def log_softmax(self, x: Any) -> Any:
        return self._torch.log_softmax(x.float(), -1)

    def force_(self, scores: Any, ids: Sequence[int]) -> None:
        scores.fill_(-math.inf)
        for token in ids:
            scores[:, token].fill_(0)

    def low_int32(self, x: Any) -> Any:
        return x.view(self._torch.int32)[:1]

    def add_(self, x: Any, n: int) -> None:
        x.add_(n)

    def assign_column_(self, x: Any, column: Any, value: Any) -> None:
        x.index_copy_(1, column, value.unsqueeze(1))

    def forbid_below_(self, scores: Any, ids: Sequence[int], length: Any, min_length: int) -> None:
        is_short = length < min_length
        for token in ids:
            scores[:, token].masked_fill_(is_short, -math.inf)

    def forbid_repeats_(self, scores: Any, history: Any, length: Any, size: int) -> None:
        windows = history.shape[1] - size + 1
        if windows < 1:
            return
        latest_indices = self._torch.arange(size - 1, device=self.device) + (length - size + 1)
        latest = history.index_select(1, latest_indices.clamp_(min=0))
        found = self._torch.arange(windows, device=self.device) <= length - size
        for i in range(size - 1):
            found = found & (history[:, i : i + windows] == latest[:, i : i + 1])
        last = history[:, size - 1 :].long()
        values = self._torch.full(last.shape, math.inf, device=self.device).masked_fill_(found, -math.inf)
        scores.scatter_reduce_(1, last, values, "amin")

    def pool(self, x: Any, words: Words, mode: str) -> Any:
        """Pool the words in order, so that a sum does not depend on the batch."""
        offsets = words.cu_seqlens.long()
        lengths = offsets.diff()[:, None]
        if not len(x):
            # In `segment_reduce` some torch releases divide by the number of rows, which is 0 here.
            return self.full((len(lengths), x.shape[1]), 0, "float32")
        if mode == "cls":
            rows = x[offsets[:-1].clamp(max=len(x) - 1)].float()
        else:
            kind = "max" if mode == "max" else "sum"
            # `unsafe` skips a check that makes the host wait for the GPU.
            rows = self._torch.segment_reduce(x.float(), kind, offsets=offsets, axis=0, unsafe=True)
            if mode == "mean":
                rows = rows / lengths.clamp(min=1)
        return rows.masked_fill(lengths == 0, 0)

    def normalized(self, x: Any) -> Any:
        # Add in a fixed order: the order of torch's sum depends on the number of rows.
        squares = x * x
        while (n := squares.shape[1]) > 1:
            folded = squares[:, : n // 2] + squares[:, n // 2 : n // 2 * 2]
            squares = self._torch.cat((folded, squares[:, -1:]), 1) if n % 2 else folded
        return x / squares.sqrt().clamp(min=1e-12)


Layers = ArrayLayers | TorchLayers


def _attention(qkv: Any, heads: int, words: Words, variant: str) -> Any:
    by_head = qkv.reshape(len(qkv), 3, heads, qkv.shape[1] // 3 // heads)
    attended = varlen_attention(by_head[:, 0], by_head[:, 1], by_head[:, 2], words.cu_seqlens, variant=variant)
    return attended.reshape(len(qkv), qkv.shape[1] // 3)


def place(device: int | None) -> str:
    """Return the name of a device for messages: "the CPU" or "CUDA device 0"."""
    return "the CPU" if device is None else f"CUDA device {device}"


def library_of(name: str, array: Any) -> arrays.Library:
    """Return the library of the array argument `name`, or raise TypeError."""
    library = arrays.library_of(array)
    if library is None:
        check.fail(name, "an array of NumPy, CuPy or torch", type(array).__name__, TypeError)
    return library


def layers_of(name: str, array: Any) -> Layers:
    """Return the operations for an array's library and device. Raises the errors of `library_of`."""
    library = library_of(name, array)
    if library.name == "torch":
        return TorchLayers(array.device)
    return ArrayLayers(np if library is arrays.NUMPY else cupy, library.device(array))
