"""Tensors that are computed only when other code reads them. A kernel can take their inputs instead."""

from __future__ import annotations

from typing import Any

import torch


class Deferred(torch.Tensor):
    """A placeholder for a tensor. Any torch function or attribute access computes the tensor."""

    def compute(self) -> torch.Tensor:
        """Return the computed tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_computed(args), **_computed(kwargs or {}))


def _computed(x: Any) -> Any:
    """Compute the deferred tensors in `x`, also in tuples, lists and dicts."""
    if isinstance(x, Deferred):
        return x.compute()
    if type(x) in (tuple, list):
        return type(x)(map(_computed, x))
    return {name: _computed(value) for name, value in x.items()} if type(x) is dict else x


def computed(x: torch.Tensor) -> torch.Tensor:
    return x.compute() if isinstance(x, Deferred) else x


class Sum(Deferred):
    """The sum `residual + hidden_states`, a layer's output in `generate`. The next layer's norm kernel adds the two."""

    @staticmethod
    def of(hidden_states: torch.Tensor, residual: torch.Tensor) -> Sum:
        self = residual.as_subclass(Sum)
        # Write to `__dict__`, because setting an attribute would compute the sum.
        self.__dict__.update(_parts=(hidden_states, residual), _made=None)
        return self

    def compute(self) -> torch.Tensor:
        fields = object.__getattribute__(self, "__dict__")
        if fields["_made"] is None:
            hidden_states, residual = fields["_parts"]
            fields["_made"] = residual + hidden_states
        return fields["_made"]  # type: ignore[no-any-return]

    def terms(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `hidden_states` and `residual`, or None if the sum has been computed."""
        fields = object.__getattribute__(self, "__dict__")
        return None if fields["_made"] is not None else fields["_parts"]

    def store(self, made: torch.Tensor) -> None:
        """Store the sum that a kernel has computed. The kernel may have overwritten `hidden_states` or `residual`."""
        object.__getattribute__(self, "__dict__")["_made"] = made


class Ids(Deferred):
    """The int32 expert ids of a router, converted to int64 only when other code reads them."""

    @staticmethod
    def of(ids: torch.Tensor) -> Ids:
        self = ids.as_subclass(Ids)
        self.__dict__["_raw"] = ids
        return self

    @property
    def raw(self) -> torch.Tensor:
        return object.__getattribute__(self, "__dict__")["_raw"]  # type: ignore[no-any-return]

    def compute(self) -> torch.Tensor:
        return self.raw.long()
