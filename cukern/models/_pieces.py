"""What a decoder does between the ops of cukern, on the arrays of each library, beside what all models share.

`pieces_of` gives these for an array: `ArrayPieces` is the NumPy form, which defines the results and serves CuPy too,
`TorchPieces` the torch form. Methods whose name ends in an underscore change their first array. None of them waits for
a GPU, except `host`, so that a step made of them can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukern.models._layers import ArrayLayers, TorchLayers
from cukern.runtime import arrays, check
from cukern.runtime.cuda import cupy


class ArrayPieces(ArrayLayers):
    """The operations on NumPy arrays, and on CuPy arrays where `xp` is CuPy."""

    is_cuda_torch = False

    def full(self, shape: tuple[int, ...], value: Any, dtype: str) -> Any:
        return self.xp.full(shape, value, arrays.numpy_dtype(dtype))

    def put(self, x: np.ndarray[Any, Any]) -> Any:
        """A NumPy array where the weights are."""
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

    # --- what becomes of the logits ---------------------------------------------------------------------

    def log_softmax(self, x: Any) -> Any:
        """float32, contiguous, from logits [rows, vocab] of any dtype."""
        y = self.float32(x)
        y = y - y.max(-1, keepdims=True)
        return y - self.xp.log(self.xp.exp(y).sum(-1, keepdims=True))

    def force_(self, scores: Any, ids: Sequence[int]) -> None:
        """0 for tokens in all rows, -inf for all others."""
        scores[...] = -np.inf
        scores[:, [*ids]] = 0

    # --- a step whose number is in an array, int64 [1] --------------------------------------------------

    def low_word(self, x: Any) -> Any:
        """The low half of `x` int64 [1], int32 [1], in the same memory: all these machines are little-endian."""
        return x.view(np.int32)[:1]

    def add_(self, x: Any, n: int) -> None:
        x += n

    def assign_column_(self, x: Any, column: Any, value: Any) -> None:
        """`value` [rows, ...] into a column of `x` [rows, columns, ...]."""
        x[:, column] = value[:, None]

    def forbid_below_(self, scores: Any, ids: Sequence[int], length: Any, least: int) -> None:
        """-inf for tokens in all rows where length is less than `least`."""
        ids = [*ids]
        scores[:, ids] = self.xp.where(length < least, np.float32(-np.inf), scores[:, ids])

    def forbid_repeats_(self, scores: Any, history: Any, length: Any, size: int) -> None:
        """-inf for each token that would complete `size` tokens in a row that history [rows, :length] has already."""
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


class TorchPieces(TorchLayers):
    """The operations on torch tensors, on the CPU or a CUDA device."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        self.is_cuda_torch = device.type == "cuda"

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

    # --- what becomes of the logits ---------------------------------------------------------------------

    def log_softmax(self, x: Any) -> Any:
        return self._torch.log_softmax(x.float(), -1)

    def force_(self, scores: Any, ids: Sequence[int]) -> None:
        scores.fill_(-math.inf)
        for token in ids:
            scores[:, token].fill_(0)

    # --- a step whose number is in a tensor, int64 [1] --------------------------------------------------

    def low_word(self, x: Any) -> Any:
        return x.view(self._torch.int32)[:1]

    def add_(self, x: Any, n: int) -> None:
        x.add_(n)

    def assign_column_(self, x: Any, column: Any, value: Any) -> None:
        x.index_copy_(1, column, value.unsqueeze(1))

    def forbid_below_(self, scores: Any, ids: Sequence[int], length: Any, least: int) -> None:
        is_short = length < least
        for token in ids:
            scores[:, token].masked_fill_(is_short, -math.inf)

    def forbid_repeats_(self, scores: Any, history: Any, length: Any, size: int) -> None:
        windows = history.shape[1] - size + 1
        if windows < 1:
            return
        places = self._torch.arange(size - 1, device=self.device) + (length - size + 1)
        latest = history.index_select(1, places.clamp_(min=0))
        found = self._torch.arange(windows, device=self.device) <= length - size
        for i in range(size - 1):
            found = found & (history[:, i : i + windows] == latest[:, i : i + 1])
        last = history[:, size - 1 :].long()
        values = self._torch.full(last.shape, math.inf, device=self.device).masked_fill_(found, -math.inf)
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
