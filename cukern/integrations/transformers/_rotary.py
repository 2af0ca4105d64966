"""Replace the functions that the attention modules of a model call for the rotary embedding."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cukern
from cukern.integrations.transformers import _heads
from cukern.integrations.transformers._regimes import REGIMES, difference
from cukern.integrations.transformers._rewrite import read_globals, rewritten, undecorated_forward
from cukern.integrations.transformers._state import DTYPES, Notes, State, active, is_traced, wants_gradient

_PREFIX = "apply_rotary_pos_emb"


class RotaryFormula(NamedTuple):
    layout: str
    halves: int  # 2 if cos has rotary_dim columns, which repeat for the second half; 1 for rotary_dim / 2
    takes_float32: bool  # whether 16-bit queries with float32 cos and sin give 16-bit results

    def __str__(self) -> str:
        return f"rotary_embedding, {self.layout}"


def _probe(
    function: Callable[..., Any], formula: RotaryFormula, angles: torch.dtype | None = None
) -> tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], torch.Tensor]]:
    """Return a rotary function and the kernel as functions of one array [batch, heads, tokens, head_dim].

    The array of both functions contains the heads of the queries, then the heads of the keys.
    """

    def inputs(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        # Make the two halves of cos and of sin equal, as in all models, because some functions read only one half.
        shape = rows.shape[0], rows.shape[2], rows.shape[3] // 2
        cos, sin = (torch.randn(shape, generator=generator).repeat(1, 1, formula.halves) for _ in range(2))
        query, key = rows.split([rows.shape[1] // 3 * 2, rows.shape[1] // 3], 1)
        dtype = angles or rows.dtype
        return query.contiguous(), key.contiguous(), cos.to(dtype), sin.to(dtype)

    def original(rows: torch.Tensor) -> Any:
        return torch.cat(function(*inputs(rows)), 1)

    def kernel(rows: torch.Tensor) -> torch.Tensor:
        made = cukern.rotary_embedding(*inputs(rows), layout=formula.layout, rotary_dim=rows.shape[-1])
        return torch.cat(made, 1)  # type: ignore[arg-type]

    return original, kernel


@torch.no_grad()
def _formula_of(function: Callable[..., Any]) -> tuple[RotaryFormula | None, str]:
    """Find a rotary function's formula on random inputs. Return (formula, "") or (None, reason)."""
    found: list[str] = []
    shapes = {"": (2, 6, 5, 16), " of one head and 7 tokens": (1, 3, 7, 16)}
    for halves, layout in itertools.product((2, 1), ("half", "interleaved", "deinterleaved")):
        formula = RotaryFormula(layout, halves, takes_float32=False)
        regime = difference(*_probe(function, formula), shapes)
        if regime == "":
            mixed = difference(*_probe(function, formula, torch.float32), shapes, regimes=REGIMES[-2:])
            return formula._replace(takes_float32=mixed == ""), ""
        found += [f"differs from rotary_embedding, {layout}, for {regime}"] * (regime is not None)
    return None, found[0] if found else "is none of rotary_embedding's"


def _in_place(function: Callable[..., Any], formula: RotaryFormula) -> Callable[..., Any]:
    """Return a function that rotates in place on the kernel. Unsupported arguments go to `function`."""

    def rotate(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 4 or kwargs.keys() - {"unsqueeze_dim"}:
            return function(*args, **kwargs)
        q, k, cos, sin = args
        dim = cos.shape[-1] * 2 // formula.halves
        fits = (
            q.dim() == k.dim() == 4
            and cos.dim() == sin.dim() == 3
            and q.dtype == k.dtype
            and q.dtype in DTYPES
            and (cos.dtype == q.dtype or (cos.dtype == torch.float32 and formula.takes_float32))
            and sin.dtype == cos.dtype
            and q.stride(-1) == k.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
            and all(stride or size == 1 for x in (q, k) for size, stride in zip(x.shape, x.stride(), strict=True))
            and dim <= min(q.shape[-1], k.shape[-1], 512)
            and not wants_gradient(q, k)
        )
        if not fits:
            return function(*args, **kwargs)
        with torch.no_grad():
            cukern.rotary_embedding(q, k, cos, sin, layout=formula.layout, rotary_dim=dim, **kwargs)
        return q, k

    return rotate


#: The types of rotary embeddings whose angles depend on the sequence length.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def angles_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return cos and sin of the positions. In `generate` they come from a table, which saves nine small kernels."""
    session = None if torch.compiler.is_compiling() else active.session
    if session is None or args or kwargs or not getattr(session, "tokens", 0) or position_ids.dim() != 2:
        return type(self).forward(self, x, position_ids, *args, **kwargs)
    key = self, x.dtype
    if key not in session.angles:
        if is_traced():
            return type(self).forward(self, x, position_ids)
        session.angles[key] = _table(self, x, session.tokens)
    table = session.angles[key]
    if table is None:
        return type(self).forward(self, x, position_ids)
    rows = table.index_select(0, position_ids.flatten()).view(*position_ids.shape, -1)
    return rows.chunk(2, -1)


def _table(module: Any, x: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Return cos and sin of all positions, or None if they depend on more than the position."""
    if getattr(module, "rope_type", "default") in _LENGTH_DEPENDENT:
        return None

    def angles_of(positions: torch.Tensor) -> torch.Tensor | None:
        found = type(module).forward(module, x, positions[None])
        if not isinstance(found, tuple) or len(found) != 2 or found[0].shape[:2] != (1, len(positions)):
            return None
        return torch.cat([found[0][0], found[1][0]], -1)

    table = angles_of(torch.arange(tokens, device=x.device))
    probes = torch.tensor([0, 1, tokens // 2, tokens - 1], device=x.device)
    samples = angles_of(probes)
    return table if table is not None and samples is not None and torch.equal(table[probes], samples) else None


def _has_angles(module: Any) -> bool:
    if not type(module).__name__.endswith("RotaryEmbedding") or "forward" in module.__dict__:
        return False
    takes = list(inspect.signature(undecorated_forward(module)).parameters)
    return takes == ["self", "x", "position_ids"] and isinstance(getattr(module, "rope_type", "default"), str)


def _rewritten(module: Any, found: dict[str, tuple[Any, RotaryFormula]]) -> tuple[Callable[..., Any] | None, bool]:
    """Return a `forward` that rotates in place, and whether `_heads` can replace some of its statements."""
    functions = {name: _in_place(function, formula) for name, (function, formula) in found.items()}
    formula = found[_PREFIX][1] if _PREFIX in found else None
    matches: list[bool] = []

    def heads(module: Any, hidden_states: Any, angles: Any, cache: Any, norms: bool) -> Any:
        return _heads.states(module, hidden_states, angles, cache, norms, formula)

    def change(body: list[ast.stmt]) -> list[ast.stmt]:
        made, norms = _heads.fused(body)
        matches.append(norms is not None)
        return made if formula is not None else body

    made = rewritten(module, functions | {"_cukern_heads": heads}, change)
    return made, formula is not None and any(matches)


def enable(model: torch.nn.Module, state: State, notes: Notes) -> None:
    formulas: dict[Any, tuple[RotaryFormula | None, str]] = {}
    made: dict[Any, Any] = {}
    for module in filter(_has_angles, list(model.modules())):
        state.replace_forward(module, angles_forward)
        notes.replaced.add("rotary", module, "rows of a table, in generate of this package")
    for module in model.modules():
        rotary_functions = {
            name: function for name, function in read_globals(module).items() if name.startswith(_PREFIX)
        }
        if not rotary_functions or "forward" in module.__dict__:
            continue
        for function in rotary_functions.values():
            if function not in formulas:
                formulas[function] = _formula_of(function)
        found = {
            name: (function, formula)
            for name, function in rotary_functions.items()
            if (formula := formulas[function][0]) is not None
        }
        for name in sorted(rotary_functions.keys() - found.keys()):
            notes.kept.add("rotary", module, f"the formula of {name} {formulas[rotary_functions[name]][1]}")
        if not found:
            continue
        key = type(module).forward
        if key not in made:
            made[key] = _rewritten(module, found)
        forward, is_fused = made[key]
        if forward is None:
            notes.kept.add("rotary", module, "the source of its forward, or a wrapper around it, cannot be read")
            continue
        is_fused = is_fused and _heads.prepare(module, state)
        state.replace_forward(module, forward)
        how = ", ".join(sorted({str(formula) for _, formula in found.values()}))
        notes.replaced.add(
            "rotary", module, how + "; in generate of this package one product and one kernel" * is_fused
        )
