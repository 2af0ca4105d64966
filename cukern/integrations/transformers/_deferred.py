"""Tensors that are computed only when other code reads them.

A kernel of this package can use the inputs of such a tensor instead, so that the tensor need not be computed.
"""

from __future__ import annotations

from typing import Any

import torch


class Deferred(torch.Tensor):
    """A placeholder for a tensor. Any torch function or attribute access computes the tensor and uses it.

    Functions of this package check for the subclasses first, and use the inputs of the computation instead.
    """

    def made(self) -> torch.Tensor:
        """Compute the tensor and return it."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_made(args), **_made(kwargs or {}))


def _made(x: Any) -> Any:
    """Replace the deferred tensors in `x`, also in tuples, lists and dicts, by the computed tensors."""
    if isinstance(x, Deferred):
        return x.made()
    if type(x) in (tuple, list):
        return type(x)(map(_made, x))
    return {name: _made(value) for name, value in x.items()} if type(x) is dict else x


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor. If it is deferred, compute it first."""
    return x.made() if isinstance(x, Deferred) else x


class Sum(Deferred):
    """The deferred sum `residual + hidden_states`. A layer returns it during `generate`.

    The norm of the next layer then adds the two tensors in its own kernel.
    """

    @staticmethod
    def of(hidden_states: torch.Tensor, residual: torch.Tensor) -> Sum:
        self = residual.as_subclass(Sum)
        # Write to `__dict__`, because setting an attribute would compute the sum.
        self.__dict__.update(_parts=(hidden_states, residual), _made=None)
        return self

    def made(self) -> torch.Tensor:
        own = object.__getattribute__(self, "__dict__")
        if own["_made"] is None:
            hidden_states, residual = own["_parts"]
            own["_made"] = residual + hidden_states
        return own["_made"]  # type: ignore[no-any-return]

    def parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `hidden_states` and `residual`. Return None if the sum has been computed."""
        own = object.__getattribute__(self, "__dict__")
        return None if own["_made"] is not None else own["_parts"]

    def keep(self, made: torch.Tensor) -> None:
        """Store the sum that a kernel has computed. The kernel may have overwritten `hidden_states` or `residual`."""
        object.__getattribute__(self, "__dict__")["_made"] = made


class Ids(Deferred):
    """The int32 expert ids of a router. They are converted to int64 only when other code reads them."""

    @staticmethod
    def of(ids: torch.Tensor) -> Ids:
        self = ids.as_subclass(Ids)
        self.__dict__["_raw"] = ids
        return self

    @property
    def raw(self) -> torch.Tensor:
        return object.__getattribute__(self, "__dict__")["_raw"]  # type: ignore[no-any-return]

    def made(self) -> torch.Tensor:
        return self.raw.long()
