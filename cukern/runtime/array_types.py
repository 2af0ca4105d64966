"""The types of the arrays that the public functions take and return, for a type checker.

A checker reads the arrays of a call as of one library, and the result as of the same one: tensors in, tensors out. The
dtype and the shape of an ndarray are no part of it, since results have others. Where a program has no torch, a checker
knows no tensors, and takes any type for one.

The functions themselves handle descriptions of arrays: within cukern mypy takes these types for Any (pyproject.toml).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch


class Array(Protocol):
    """An array of any library: NumPy, CuPy, PyTorch, and those that exchange arrays by DLPack, such as JAX."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


#: An array that a public function takes. Results are of the arguments' library.
AnyArray = TypeVar("AnyArray", "np.ndarray[Any, Any]", "torch.Tensor", Array)
#: An array that the function writes.
WrittenArray = TypeVar("WrittenArray", "np.ndarray[Any, Any]", "torch.Tensor", Array)
