"""What a model does to arrays besides the ops: dense products, attention without padding, pooling, and bookkeeping.

`layers_of` gives these for an array: `ArrayLayers` is the NumPy form, which defines the results and serves CuPy too,
`TorchLayers` the torch form. Dense products are the array library's own, which on a GPU is cuBLAS. All else computes in
float32 and rounds once, and what it gives for a sequence depends on that sequence alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import arrays
from cukern.runtime.cuda import cupy, current_device


class Words(NamedTuple):
    """Where the words of a batch lie: one sequence after the other, without padding."""

    cu_seqlens: Any  # int32 [batch + 1], the words before each sequence, then all
    max_seq_len: int  # at least the length of the longest sequence
    bounds: Sequence[int] | None = None  # cu_seqlens, where the host knows it

    def on_host(self) -> Sequence[int]:
        """cu_seqlens in host memory, for which a GPU is waited for unless the host knows it."""
        if self.bounds is not None:
            return self.bounds
        library = arrays.library_of(self.cu_seqlens)
        assert library is not None
        return library.to_numpy(self.cu_seqlens).tolist()


class ArrayLayers:
    """The operations on NumPy arrays, and on CuPy arrays where `xp` is CuPy."""

    def __init__(self, xp: Any, device: int | None) -> None:
        self.xp = xp
        self.device = device

    def place(self) -> contextlib.AbstractContextManager[None]:
        """The context of the operations: the weights' device is the current one, and what overflows is infinite."""
        if self.device is None:
            return np.errstate(over="ignore", invalid="ignore")
        return current_device(self.device)

    # --- arrays -----------------------------------------------------------------------------------------

    def cast(self, x: Any, dtype: str) -> Any:
        """`x`, contiguous and of a dtype by its name."""
        return self.xp.ascontiguousarray(x, arrays.numpy_dtype(dtype))

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return self.xp.concatenate(parts, axis)

    def rows_filled(self, x: Any, rows: int) -> Any:
        """`x` [n, columns] with rows of zeros after it, [rows, columns]."""
        return self.xp.concatenate([x, self.xp.zeros((rows - len(x), x.shape[1]), x.dtype)])

    def arange(self, n: int) -> Any:
        return self.xp.arange(n)

    def flat_nonzero(self, x: Any) -> Any:
        """The places in C order of what is not 0, int64."""
        return self.xp.flatnonzero(x)

    def cu_seqlens(self, lengths: Any) -> Any:
        """int32 [batch + 1] from the lengths [batch]."""
        sums = self.xp.zeros(len(lengths) + 1, np.int32)
        sums[1:] = lengths.cumsum()
        return sums

    def _float(self, x: Any) -> Any:
        return x.astype(np.float32)

    # --- a layer ----------------------------------------------------------------------------------------

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """x [rows, in] times weight [out, in] transposed, plus bias [out]; [rows, out]."""
        if self.xp is np and x.dtype != np.float32:
            # NumPy adds up products of 16 bits in 16 bits.
            y = self._float(x) @ self._float(weight).T
            return (y if bias is None else y + self._float(bias)).astype(x.dtype)
        y = x @ weight.T
        return y if bias is None else y + bias

    def attention(self, qkv: Any, heads: int, words: Words) -> Any:
        """softmax(q k' / sqrt(head_dim)) v of each sequence with itself.

        qkv [words, 3 * hidden] holds q, k and v by heads one after the other; the result is [words, hidden].
        """
        hidden = qkv.shape[1] // 3
        out = self.xp.empty((len(qkv), hidden), qkv.dtype)
        scale = np.float32((hidden // heads) ** -0.5)
        bounds = words.on_host()
        for first, last in itertools.pairwise(bounds):
            if first == last:
                continue
            by_head = self._float(qkv[first:last]).reshape(last - first, 3, heads, hidden // heads)
            q, k, v = by_head.transpose(1, 2, 0, 3)
            scores = q @ k.transpose(0, 2, 1) * scale
            weights = self.xp.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights @ v / weights.sum(-1, keepdims=True)
            out[first:last] = mixed.transpose(1, 0, 2).reshape(last - first, hidden)
        return out

    # --- a vector for each sequence ---------------------------------------------------------------------

    def pool(self, x: Any, words: Words, mode: str) -> Any:
        """The first word of each sequence ("cls"), or the mean or max of its words; float32 [batch, hidden].

        An empty sequence has zeros.
        """
        bounds = words.on_host()
        out = self.xp.zeros((len(bounds) - 1, x.shape[1]), np.float32)
        for row, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                own = self._float(x[first:last])
                out[row] = own[0] if mode == "cls" else own.max(0) if mode == "max" else own.sum(0) / (last - first)
        return out

    def normalized(self, x: Any) -> Any:
        """Rows over their lengths; rows of zeros stay."""
        length = self.xp.sqrt((x * x).sum(-1, keepdims=True))
        return x / self.xp.maximum(length, np.float32(1e-12))


class TorchLayers:
    """The operations on torch tensors, on the CPU or a CUDA device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._functional = torch.nn.functional
        self.device = device

    def place(self) -> contextlib.AbstractContextManager[None]:
        """See `ArrayLayers.place`: torch finds the device by the tensors."""
        return contextlib.nullcontext()

    # --- arrays -----------------------------------------------------------------------------------------

    def cast(self, x: Any, dtype: str) -> Any:
        return x.detach().to(getattr(self._torch, dtype)).contiguous()

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return self._torch.cat([*parts], axis)

    def rows_filled(self, x: Any, rows: int) -> Any:
        return self._functional.pad(x, (0, 0, 0, rows - len(x)))

    def arange(self, n: int) -> Any:
        return self._torch.arange(n, device=self.device)

    def flat_nonzero(self, x: Any) -> Any:
        return x.reshape(-1).nonzero().reshape(-1)

    def cu_seqlens(self, lengths: Any) -> Any:
        sums = self._torch.zeros(len(lengths) + 1, dtype=self._torch.int32, device=self.device)
        self._torch.cumsum(lengths, 0, dtype=self._torch.int32, out=sums[1:])
        return sums

    # --- a layer ----------------------------------------------------------------------------------------

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        return self._functional.linear(x, weight, bias)

    def attention(self, qkv: Any, heads: int, words: Words) -> Any:
        """See `ArrayLayers.attention`. Tensors of 16 bits on a GPU go to torch's variable-length attention."""
        hidden = qkv.shape[1] // 3
        by_head = qkv.view(len(qkv), 3, heads, hidden // heads)
        if qkv.is_cuda and qkv.dtype != self._torch.float32:
            from torch.nn.attention.varlen import varlen_attn

            q, k, v = by_head.unbind(1)
            longest = words.max_seq_len
            mixed = varlen_attn(q, k, v, words.cu_seqlens, words.cu_seqlens, longest, longest)
            return mixed.reshape(len(qkv), hidden)
        out = qkv.new_empty((len(qkv), hidden))
        bounds = words.on_host()
        for first, last in itertools.pairwise(bounds):
            if first < last:
                q, k, v = by_head[first:last].permute(1, 2, 0, 3)
                mixed = self._functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
                out[first:last] = mixed.transpose(0, 1).reshape(last - first, hidden)
        return out

    # --- a vector for each sequence ---------------------------------------------------------------------

    def pool(self, x: Any, words: Words, mode: str) -> Any:
        """See `ArrayLayers.pool`. The words of a sequence are added up one after the other, whatever the batch."""
        offsets = words.cu_seqlens.long()
        lengths = offsets.diff()[:, None]
        if mode == "cls":
            first = offsets[:-1].clamp(max=max(len(x) - 1, 0))
            rows = x[first].float() if len(x) else x.new_zeros((len(first), x.shape[1])).float()
        else:
            kind = "max" if mode == "max" else "sum"
            # `unsafe` leaves out a check of the offsets, for which the host would wait.
            rows = self._torch.segment_reduce(x.float(), kind, offsets=offsets, axis=0, unsafe=True)
            if mode == "mean":
                rows = rows / lengths.clamp(min=1)
        return rows.masked_fill(lengths == 0, 0)

    def normalized(self, x: Any) -> Any:
        return self._functional.normalize(x, dim=-1)


Layers = ArrayLayers | TorchLayers


def layers_of(array: Any) -> Layers:
    """The operations for the library and the device of an array."""
    library = arrays.library_of(array)
    assert library is not None
    if library.name == "torch":
        return TorchLayers(array.device)
    return ArrayLayers(np if library is arrays.NUMPY else cupy, library.device(array))
