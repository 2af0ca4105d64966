"""The types of the arrays that the public functions take and return, for a type checker.

For a type checker, all arrays of a call and its results belong to one library: tensors in, tensors out. The dtype and
the shape of an ndarray are not part of the type, because results have other dtypes and shapes. If torch is not
installed, the checker does not know the type Tensor, and accepts any type in its place.

The functions themselves handle descriptions of arrays. Within cukern mypy treats these types as Any (pyproject.toml).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch


class Array(Protocol):
    """An array of any library: NumPy, CuPy, PyTorch, and libraries that exchange arrays by DLPack, such as JAX."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


#: An array that a public function takes. Results belong to the library of the arguments.
AnyArray = TypeVar("AnyArray", "np.ndarray[Any, Any]", "torch.Tensor", Array)
#: An array that a function writes.
WrittenArray = TypeVar("WrittenArray", "np.ndarray[Any, Any]", "torch.Tensor", Array)
