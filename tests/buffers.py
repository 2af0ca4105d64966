"""Arrays on the GPU that show what a kernel wrote where it should not, and what it read where it must not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cukern.runtime import arrays
from cukern.runtime.cuda import cupy

Array = NDArray[Any]
#: Bytes before and after each array that a kernel writes; each is of this value, before and after.
GUARD, POISON = 512, 0xA5


class Buffer:
    """A poisoned array on the GPU between guards; `skip` elements past a 256-byte boundary."""

    def __init__(self, shape: tuple[int, ...], dtype: str, skip: int = 0) -> None:
        kind = arrays.numpy_dtype(dtype)
        self._from = GUARD + skip * kind.itemsize
        self._to = self._from + int(np.prod(shape)) * kind.itemsize
        self._bytes = cupy.full(self._to + GUARD, POISON, cupy.uint8)
        inside = self._bytes[self._from : self._to]
        self.array = inside.view(kind).reshape(shape) if inside.size else cupy.empty(shape, kind)

    def numpy(self) -> Array:
        around = cupy.concatenate([self._bytes[: self._from], self._bytes[self._to :]])
        assert (around == POISON).all(), "written outside of the results"
        return cupy.asnumpy(self.array)


def place(values: Array, skip: int = 0, apart: int = 0) -> Any:
    """`values` on the GPU, off alignment, their rows apart; between and behind them NaN."""
    wide = np.full((*values.shape[:-1], values.shape[-1] + apart), np.nan, values.dtype)
    wide[..., : values.shape[-1]] = values
    buffer = Buffer(wide.shape, values.dtype.name, skip)
    buffer.array[...] = cupy.asarray(wide)
    return buffer.array[..., : values.shape[-1]]
