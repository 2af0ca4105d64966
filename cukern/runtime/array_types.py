"""Array types of the public signatures, for a type checker.
All arrays of a call and its results have one library: tensors in, tensors out. The type of an ndarray leaves out dtype
and shape, because results have other dtypes and shapes. Without torch the checker accepts any type as a Tensor.

Within cukern mypy treats these types as Any (pyproject.toml), because the functions handle descriptions of arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch


class Array(Protocol):
    """An array of NumPy, CuPy, PyTorch, or a library that exchanges arrays by DLPack, such as JAX."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


AnyArray = TypeVar("AnyArray", "np.ndarray[Any, Any]", "torch.Tensor", Array)
#: An array that the function writes.
WrittenArray = TypeVar("WrittenArray", "np.ndarray[Any, Any]", "torch.Tensor", Array)
