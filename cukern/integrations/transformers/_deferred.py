"""Tensors that are computed only when other code reads them. A kernel can use the tensors they are made of instead."""

from __future__ import annotations

from typing import Any

import torch


class Deferred(torch.Tensor):
    """A placeholder for another tensor. Any torch function or attribute access computes that tensor and uses it.

    Functions of this package check for the subclasses first, and use the tensors that the placeholder is made of.
    """

    def made(self) -> torch.Tensor:
        """Compute the tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_made(args), **_made(kwargs or {}))


def _made(x: Any) -> Any:
    """Return `x` with all deferred tensors computed, also in tuples, lists and dicts."""
    if isinstance(x, Deferred):
        return x.made()
    if type(x) in (tuple, list):
        return type(x)(map(_made, x))
    return {name: _made(value) for name, value in x.items()} if type(x) is dict else x


def plain(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, computed if it is deferred."""
    return x.made() if isinstance(x, Deferred) else x


class Sum(Deferred):
    """`residual + hidden_states`, which a layer returns during `generate` so that the next norm can add the two."""

    @staticmethod
    def of(hidden_states: torch.Tensor, residual: torch.Tensor) -> Sum:
        self = residual.as_subclass(Sum)
        # Use __dict__, because setting or reading an attribute would compute the sum.
        self.__dict__.update(_parts=(hidden_states, residual), _made=None)
        return self

    def made(self) -> torch.Tensor:
        own = object.__getattribute__(self, "__dict__")
        if own["_made"] is None:
            hidden_states, residual = own["_parts"]
            own["_made"] = residual + hidden_states
        return own["_made"]  # type: ignore[no-any-return]

    def parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the terms; None if the sum has been computed."""
        own = object.__getattribute__(self, "__dict__")
        return None if own["_made"] is not None else own["_parts"]

    def keep(self, made: torch.Tensor) -> None:
        """Store the sum that a kernel has computed. The kernel may have overwritten one of the terms with it."""
        object.__getattribute__(self, "__dict__")["_made"] = made


class Ids(Deferred):
    """The int32 expert ids that a gate has written. They are converted to int64 when other code reads them."""

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
