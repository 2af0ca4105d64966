"""Fuse the operations before the attention in an attention layer, during this package's `generate`.

One matrix multiplication computes q, k and v. `fused_qk_norm_rope_and_cache` applies norms and rotary embedding, and
writes the cache. The calls of both replace known statements in the source text of the model's `forward`.
"""

from __future__ import annotations

import ast
import itertools
from typing import Any

import torch

import cukern
from cukern.integrations.transformers import _norms, _products
from cukern.integrations.transformers._cache import CACHE_NAMES, PagedLayer
from cukern.integrations.transformers._state import DTYPES, State, active

_NAMES = ("q_proj", "k_proj", "v_proj")
_ROTARY = "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"
_UPDATE = "key_states, value_states = {cache}.update(key_states, value_states, self.layer_idx{more})"
#: Further arguments of the cache update, which depend on the version of transformers.
_EXTRA_ARGUMENTS = "", ", cache_kwargs", ", kwargs=kwargs"


def _product(name: str, states: str, norm: str = "") -> str:
    inner = f"self.{name}(hidden_states).view(hidden_shape)"
    return f"{states} = {f'self.{norm}({inner})' if norm else inner}.transpose(1, 2)"


def _texts() -> dict[str, tuple[bool, str]]:
    """Map each replaceable source text to a pair: whether it normalizes the heads, and the name of the cache."""
    value = _product("v_proj", "value_states")
    plain = _product("q_proj", "query_states"), _product("k_proj", "key_states"), value
    normed = _product("q_proj", "query_states", "q_norm"), _product("k_proj", "key_states", "k_norm"), value
    after = *plain, "query_states = self.q_norm(query_states)", "key_states = self.k_norm(key_states)"
    found = {}
    begins = (plain, False), (normed, True), (after, True)
    for (begin, norms), cache, more in itertools.product(begins, CACHE_NAMES, _EXTRA_ARGUMENTS):
        options = ['cache_kwargs = {"sin": sin, "cos": cos}'] * ("cache_kwargs" in more)
        update = "\n    ".join((*options, _UPDATE.format(cache=cache, more=more)))
        lines = *begin, "cos, sin = position_embeddings", _ROTARY, f"if {cache} is not None:\n    {update}"
        found[ast.unparse(ast.parse("\n".join(lines)))] = norms, cache
    return found


_TEXTS = _texts()


def fused(body: list[ast.stmt]) -> tuple[list[ast.stmt], bool | None]:
    """Replace known statements by a call of `states`. The known statements still run if `states` returns None.

    Return the new statements, and whether the replaced statements normalize the heads (None: nothing was replaced).
    """
    for count in (6, 8):
        for begin in range(len(body) - count + 1):
            known = body[begin : begin + count]
            found = _TEXTS.get("\n".join(map(ast.unparse, known)))
            if found is None:
                continue
            norms, cache = found
            arguments = f"self, hidden_states, position_embeddings, {cache}, {norms}"
            text = f"_cukern_states = _cukern_heads({arguments})\nif _cukern_states is None:\n    pass\nelse:\n    pass"
            call, branch = ast.parse(text).body
            assert isinstance(branch, ast.If)
            branch.body = known
            branch.orelse = ast.parse("query_states, key_states, value_states = _cukern_states").body
            made = [ast.copy_location(x, known[0]) for x in (call, branch)]
            return [*body[:begin], *made, *body[begin + count :]], norms
    return body, None


def _layer(module: Any, cache: Any, key: torch.Tensor) -> PagedLayer | None:
    """Return a module's cache layer, allocated for keys [batch, kv_heads, tokens, head_dim], or None."""
    layer = cache.layers[module.layer_idx]
    if type(layer) is not PagedLayer:
        return None
    if not layer.is_initialized:
        layer.lazy_initialization(key, key)
    return layer


def _norm_arguments(module: Any, norms: bool) -> tuple[Any, Any, float | None, float] | None:
    """Return both norm weights, epsilon and weight_offset, or None if the norms cannot be fused."""
    if not norms:
        return None, None, None, 0.0
    q_constants, k_constants = (
        getattr(module, name).__dict__.get(_norms.NORM_CONSTANTS) for name in ("q_norm", "k_norm")
    )
    if q_constants is None or q_constants != k_constants:
        return None
    weights = [getattr(getattr(module, name), "weight", None) for name in ("q_norm", "k_norm")]
    if any(x is not None and (x.dim() != 1 or len(x) != module.head_dim) for x in weights):
        return None
    return *(None if x is None else x.detach() for x in weights), *q_constants  # type: ignore[return-value]


def states(
    module: Any, hidden_states: torch.Tensor, position_embeddings: Any, cache: Any, norms: bool, formula: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Write the new keys and values to the cache. Return the queries, and all keys and values of the cache.

    Return None if the original statements must run.
    """
    session = active.session
    if torch.compiler.is_compiling() or session is None or cache is None:
        return None
    if getattr(session, "slots", None) is None or cache is not session.cache:
        return None
    joined, norm, dim = _products.joined_weights(module, _NAMES), _norm_arguments(module, norms), module.head_dim
    cos, sin = position_embeddings
    if joined is None or norm is None or not joined.takes(hidden_states.dtype) or cos.dim() != 3:
        return None
    columns = cos.shape[-1]
    if hidden_states.dtype not in DTYPES:
        return None
    if cos.dtype != hidden_states.dtype and (cos.dtype != torch.float32 or not formula.takes_float32):
        return None
    rotary_dim = columns * 2 // formula.halves
    if dim % 16 or dim > 512 or rotary_dim % 16 or rotary_dim > dim or cos.dtype != sin.dtype:
        return None
    batch, tokens, hidden = hidden_states.shape
    rows = joined.product(hidden_states.reshape(-1, hidden)).view(batch * tokens, -1, dim)
    kv_heads = module.k_proj.weight.shape[0] // dim
    query, key, value = rows.split([rows.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    layer = _layer(module, cache, key.view(batch, tokens, kv_heads, dim).transpose(1, 2))
    if layer is None or layer.pages is None:
        return None
    cos, sin = (x.expand(batch, tokens, columns).reshape(-1, columns) for x in (cos, sin))
    weights, (epsilon, offset) = norm[:2], norm[2:]
    cukern.fused_qk_norm_rope_and_cache(
        query, key, value, cos, sin, *layer.pages, session.slots.slots, *weights, epsilon, weight_offset=offset,
        layout=formula.layout, rotary_dim=rotary_dim,
    )  # fmt: skip
    assert layer.keys is not None and layer.values is not None
    return query.view(batch, tokens, -1, dim).transpose(1, 2), layer.keys, layer.values


def prepare(module: Any, state: State) -> bool:
    """Join the weights of q, k and v. Return whether that is possible."""
    sizes = getattr(module, "head_dim", None), getattr(module, "layer_idx", None)
    return all(isinstance(x, int) for x in sizes) and _products.join(module, _NAMES, state)
