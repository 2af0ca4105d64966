"""Tensors that are made when something else than this package asks for them: what a kernel can take in parts."""

from __future__ import annotations

from typing import Any

import torch


class Deferred(torch.Tensor):
    """A tensor that stands for another one. Any function of torch, or attribute, makes that one and takes it.

    Functions of this package look for the subclass first, and take its parts.
    """

    def made(self) -> torch.Tensor:
        """The tensor that it stands for."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_made(args), **_made(kwargs or {}))


def _made(x: Any) -> Any:
    """The same with all deferred tensors made, also in tuples, lists and dicts."""
    if isinstance(x, Deferred):
        return x.made()
    if type(x) in (tuple, list):
        return type(x)(map(_made, x))
    return {name: _made(value) for name, value in x.items()} if type(x) is dict else x


def plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself."""
    return x.made() if isinstance(x, Deferred) else x


class Sum(Deferred):
    """What a layer returns while `generate` runs: `residual + hidden_states`, for the next norm to add up."""

    @staticmethod
    def of(hidden_states: torch.Tensor, residual: torch.Tensor) -> Sum:
        self = residual.as_subclass(Sum)
        # Through __dict__: an attribute that is set, or read, is none of torch's.
        self.__dict__.update(_parts=(hidden_states, residual), _made=None)
        return self

    def made(self) -> torch.Tensor:
        own = object.__getattribute__(self, "__dict__")
        if own["_made"] is None:
            hidden_states, residual = own["_parts"]
            own["_made"] = residual + hidden_states
        return own["_made"]  # type: ignore[no-any-return]

    def parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The terms; None where the sum is there already."""
        own = object.__getattribute__(self, "__dict__")
        return None if own["_made"] is not None else own["_parts"]

    def keep(self, made: torch.Tensor) -> None:
        """Take the sum, of a kernel that has added up, and may have written it over a term."""
        object.__getattribute__(self, "__dict__")["_made"] = made


class Ids(Deferred):
    """Ids of experts in int32, as the gates write them, which stand for int64."""

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
