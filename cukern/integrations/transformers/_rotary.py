"""Rotary embedding: the function that attention modules call for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
from cukern.integrations.transformers._rewrite import own_forward, rewritten
from cukern.integrations.transformers._state import Notes, State, wants_gradient

_PREFIX = "apply_rotary_pos_emb"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Form(NamedTuple):
    """What a function of transformers computes."""

    layout: str
    halves: int  # of rotary_dim in cos: 2, or 1 where one half stands for both

    def __str__(self) -> str:
        return f"rotary_embedding, {self.layout}"


@torch.no_grad()
def _form_of(function: Callable[..., Any]) -> Form | None:
    """The form of a function, found by what it gives for random numbers; None for another formula."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    query, key = normal(2, 4, 5, 16), normal(2, 2, 5, 16)
    for halves in (2, 1):
        # Halves of cos are the same in all models, and some functions read one alone.
        cos, sin = (normal(2, 5, 8).repeat(1, 1, halves) for _ in range(2))
        try:
            wanted = function(query.clone(), key.clone(), cos, sin)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue
        if not isinstance(wanted, tuple) or [x.shape for x in wanted] != [query.shape, key.shape]:
            continue
        for layout in ("half", "interleaved", "deinterleaved"):
            got = cukern.rotary_embedding(query.clone(), key.clone(), cos, sin, layout=layout, rotary_dim=16)
            if all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(got, wanted, strict=True)):
                return Form(layout, halves)
    return None


def _in_place(function: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """The replacement of a function of transformers, which it calls for what the kernel does not take."""

    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs.keys() - {"unsqueeze_dim"}:
            return function(*args, **kwargs)
        q, k, cos, sin = args
        dim = cos.shape[-1] * 2 // form.halves
        fits = (
            q.dim() == k.dim() == 4
            and cos.dim() == sin.dim() == 3
            and q.dtype == k.dtype
            and q.dtype in _DTYPES
            and cos.dtype in (q.dtype, torch.float32)
            and sin.dtype == cos.dtype
            and q.stride(-1) == k.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
            and all(stride or size == 1 for x in (q, k) for size, stride in zip(x.shape, x.stride(), strict=True))
            and dim <= min(q.shape[-1], k.shape[-1], 512)
            and not wants_gradient(q, k)
        )
        if not fits:
            return function(*args, **kwargs)
        with torch.no_grad():
            cukern.rotary_embedding(q, k, cos, sin, layout=form.layout, rotary_dim=dim, **kwargs)
        return q, k

    return rotate


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    """Let the attention modules of the model rotate in place."""
    forms: dict[Any, Form | None] = {}
    made: dict[Any, Any] = {}
    for module in model.modules():
        written = inspect.unwrap(type(module).forward)
        code, scope = getattr(written, "__code__", None), getattr(written, "__globals__", {})
        names = [x for x in (code.co_names if code else ()) if x.startswith(_PREFIX) and x in scope]
        if not names or "forward" in module.__dict__:
            continue
        own = {name: scope[name] for name in names}
        for function in own.values():
            if function not in forms:
                forms[function] = _form_of(function)
        found = {name: (function, form) for name, function in own.items() if (form := forms[function]) is not None}
        for name in own.keys() - found.keys():
            notes.kept.add("rotary", module, f"the formula of {name} is none of rotary_embedding's")
        if not found:
            continue
        if written not in made:
            forward = own_forward(module)
            functions = {name: _in_place(function, form) for name, (function, form) in found.items()}
            made[written] = None if forward is None else rewritten(forward, functions)
        if made[written] is None:
            notes.kept.add("rotary", module, "its forward is wrapped, or cannot be read")
            continue
        state.replace_forward(module, made[written])
        notes.replaced.add("rotary", module, ", ".join(sorted({str(form) for _, form in found.values()})))
