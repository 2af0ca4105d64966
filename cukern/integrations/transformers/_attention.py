"""The attention of an enabled model: `paged_attention` for decoding, and `varlen_attention` for prefill.

A decoding step has one new token per sequence. `paged_attention` needs pages, so the cache [batch, kv_heads, tokens,
head_dim] is viewed as overlapping pages of 16 tokens: every token except the last 15 starts a page. So a sequence may
start at any token, for example after padding.

The last page of a sequence must not extend past the cache. If it would, full pages cover the last tokens of the
sequence. The last entry of the block table is then the page that starts at the first token. It covers the remaining
tokens. The order of the keys does not matter for one query token.
"""

from __future__ import annotations

import dis
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import cukern
from cukern.integrations.transformers._rewrite import read_globals, undecorated_forward
from cukern.integrations.transformers._state import DTYPES, NAME, Notes, State, active, is_traced, wants_gradient

PAGE = 16
MAX_HEAD_DIM = 256
_ROWS, _SPANS = "_cukern_rows", "_cukern_spans"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


class Rows(NamedTuple):
    starts: torch.Tensor  # int64 [batch]
    lengths: torch.Tensor  # int32 [batch]
    shortest: int | None  # None: unknown on the host

    @classmethod
    def of_all(cls, batch: int, tokens: int, device: torch.device) -> Rows:
        starts = torch.zeros(batch, dtype=torch.int64, device=device)
        return cls(starts, torch.full((batch,), tokens, dtype=torch.int32, device=device), tokens)

    @classmethod
    def of_mask(cls, mask: torch.Tensor, batch: int) -> Rows | None:
        """Return the tokens that a mask, bool [batch or 1, 1, 1, tokens], shows; None if a sequence has gaps.

        During tracing or capture the host cannot read the mask. A sequence with gaps then gets a length that exceeds
        every cache, which makes its result NaN.
        """
        seen = mask[:, 0, 0].expand(batch, -1)
        lengths, starts = seen.sum(-1, dtype=torch.int32), seen.int().argmax(-1)
        range_count = (seen[:, 1:] & ~seen[:, :-1]).sum(-1) + seen[:, 0]
        if is_traced():
            return cls(starts, torch.where(range_count > 1, 2**30 + 1, lengths).int(), None)
        max_ranges, shortest = torch.stack([range_count.max(), lengths.min().to(range_count.dtype)]).tolist()
        return None if max_ranges > 1 else cls(starts, lengths, shortest)


def _rows(mask: torch.Tensor | None, query: torch.Tensor, tokens: int) -> Rows | None:
    """Return the tokens that a step attends to. Read a mask once for all layers that share it."""
    batch = query.shape[0]
    if mask is None:
        return Rows.of_all(batch, tokens, query.device)
    if torch.compiler.is_compiling():
        return Rows.of_mask(mask, batch)
    found = getattr(mask, _ROWS, ())
    if found == ():
        found = Rows.of_mask(mask, batch)
        setattr(mask, _ROWS, found)
    return found  # type: ignore[return-value]


class Pages(NamedTuple):
    """A cache viewed as pages. The block tables list each sequence's pages."""

    keys: torch.Tensor  # [blocks, PAGE, kv_heads, head_dim], overlapping
    values: torch.Tensor
    block_tables: torch.Tensor  # int32 [batch, pages]
    lengths: torch.Tensor


def _as_pages(x: torch.Tensor) -> torch.Tensor | None:
    """View keys or values [batch, kv_heads, tokens, head_dim] as overlapping pages, if the strides allow it."""
    batch, heads, tokens, dim = x.shape
    batch_stride, head_stride, token_stride, dim_stride = x.stride()
    if batch == 1:
        batch_stride = tokens * token_stride
    if dim_stride != 1 or token_stride <= 0 or batch_stride % token_stride or tokens < PAGE:
        return None
    blocks = (batch - 1) * (batch_stride // token_stride) + tokens - PAGE + 1
    return x.as_strided((blocks, PAGE, heads, dim), (token_stride, token_stride, head_stride, 1))


def _sequence_distance(x: torch.Tensor) -> int:
    return 0 if x.shape[0] == 1 else x.stride(0) // x.stride(2)


def tables(starts: torch.Tensor, distance: int, pages: int) -> torch.Tensor:
    """Return block tables [batch, pages]. Sequence i starts at token `i * distance + starts[i]`."""
    batch = torch.arange(len(starts), device=starts.device) * distance
    first = (batch + starts)[:, None]
    return (first + torch.arange(pages, device=starts.device) * PAGE).int()


def _tables_without_slack(rows: Rows, distance: int, tokens: int) -> torch.Tensor:
    """Return block tables whose last page starts at the first token, so that no page exceeds the cache."""
    batch = torch.arange(len(rows.starts), device=rows.starts.device) * distance
    first = (batch + rows.starts)[:, None]
    remainder, full_pages = (rows.lengths % PAGE)[:, None], (rows.lengths // PAGE)[:, None]
    page = torch.arange(-(-tokens // PAGE), device=rows.starts.device)
    return torch.where(page < full_pages, first + remainder + page * PAGE, first).int()


def _pages(key: torch.Tensor, value: torch.Tensor, rows: Rows, mask: torch.Tensor | None) -> Pages | None:
    keys, values = _as_pages(key), _as_pages(value)
    distance = _sequence_distance(key)
    if keys is None or values is None or keys.shape != values.shape or distance != _sequence_distance(value):
        return None
    session = active.session
    if session is not None and mask is not None and mask is session.mask:
        block_tables = session.block_tables(distance)
    elif torch.compiler.is_compiling() or mask is None:
        block_tables = _tables_without_slack(rows, distance, key.shape[2])
    else:
        kept = mask.__dict__.setdefault("_cukern_tables", {})
        block_tables = kept.get((distance, key.shape[2]))
        if block_tables is None:
            block_tables = kept[distance, key.shape[2]] = _tables_without_slack(rows, distance, key.shape[2])
    return Pages(keys, values, block_tables, rows.lengths)


class Spans(NamedTuple):
    """The tokens of a prefill's sequences: two sequences for each row of the batch, its padding and its tokens."""

    cu_seqlens_q: torch.Tensor  # int32 [2 * batch + 1]
    cu_seqlens_k: torch.Tensor
    seqused_k: torch.Tensor  # int32 [2 * batch]
    causal: bool
    window: tuple[int, int]

    @classmethod
    def of(cls, padding: torch.Tensor, queries: int, keys: int, end: int, causal: bool, window: int) -> Spans:
        """Row i of the batch has the keys padding[i] ... end - 1, and its last query is at key end - 1."""
        batch, device = len(padding), padding.device
        rows = torch.arange(batch, device=device)
        query_padding = (padding - (end - queries)).clamp(0, queries)

        def sums(size: int, first: torch.Tensor) -> torch.Tensor:
            starts = torch.stack([rows * size, rows * size + first], 1).flatten()
            return torch.cat([starts, starts.new_tensor([batch * size])]).int()

        used = torch.stack([padding, end - padding], 1).flatten().int()
        limits = (window - 1, 0) if causal and window < end else (-1, -1)
        return cls(sums(queries, query_padding), sums(keys, padding), used, causal, limits)

    @classmethod
    def of_mask(cls, mask: torch.Tensor, batch: int) -> Spans | None:
        """Return the spans of a causal mask, bool [batch or 1, 1, queries, keys], or None for any other mask.

        The mask may have padding on the left, and a window. This function waits for the mask on the host.
        """
        queries, keys = mask.shape[2:]
        seen = mask[:, 0].any(1)
        padding, place = seen.int().argmax(1), torch.arange(keys, device=mask.device)
        end, window = torch.stack([(seen * (place + 1)).max(), mask[:, 0].sum(2).max()]).tolist()
        if end < queries:
            return None
        position = torch.arange(end - queries, end, device=mask.device)[:, None]
        wanted = (place <= position) & (place > position - window) & (place >= padding[:, None, None])
        # Queries of the padding may see anything, because nobody reads their results.
        if not ((mask[:, 0] == wanted) | (position < padding[:, None, None])).all():
            return None
        return cls.of(padding.expand(batch), queries, keys, end, True, window)


def _spans(module: Any, query: torch.Tensor, keys: int, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> Any:
    """Return the spans of a prefill, once for all layers that share a mask. Return None for a mask of another kind."""
    batch, _, queries, _ = query.shape
    if mask is None:
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        none = torch.zeros(batch, dtype=torch.int64, device=query.device)
        # A static cache also has room for later tokens, which must not be visible.
        return Spans.of(none, queries, keys, queries if causal else keys, bool(causal), keys + 1)
    if is_traced():
        return None
    found = getattr(mask, _SPANS, ())
    if found == ():
        found = Spans.of_mask(mask, batch)
        setattr(mask, _SPANS, found)
    return found


def _prefill(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """Run `varlen_attention` on many new tokens per sequence. Return None for a mask that it does not support."""
    spans = _spans(module, query, key.shape[2], mask, kwargs)
    if spans is None:
        return None
    sinks = kwargs.get("s_aux")
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    with torch.no_grad():
        out = cukern.varlen_attention(
            q, k, v, spans.cu_seqlens_q, spans.cu_seqlens_k, seqused_k=spans.seqused_k, causal=spans.causal,
            window=spans.window, scale=None if scaling is None else float(scaling), softcap=kwargs.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )  # fmt: skip
    return out.view(len(query), query.shape[2], *out.shape[1:])  # type: ignore[no-any-return]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return the mask for transformers' `AttentionMaskInterface`: bool, True where a token is visible; None: all
    tokens.

    Steps of `generate` use their session's mask. All other calls use transformers' mask for sdpa.
    """
    session = active.session
    if session is not None and session.tokens and q_length == 1:
        if mask_function is causal_mask_function and kv_length == session.tokens:
            return session.mask  # type: ignore[no-any-return]
        allow_is_causal_skip = False
    return sdpa_mask(  # type: ignore[no-any-return]
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **kwargs,
    )  # fmt: skip


def _why_not(query: Any, key: Any, value: Any, mask: Any, dropout: float, kwargs: dict[str, Any]) -> str:
    queries, dims = query.shape[2], (key.shape[-1], value.shape[-1])
    if (queries == 1 and dims[0] != dims[1]) or dims[0] % 8 or dims[1] % 8 or max(dims) > MAX_HEAD_DIM:
        return f"heads of {dims[0]} and {dims[1]}"
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return "dtypes"
    if queries > 1 and query.dtype == torch.float32:
        return "prefill in float32, which has no tensor cores"
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or tuple(mask.shape[1:3]) != (1, queries)):
        return "a mask of several heads, or of numbers"
    if mask is not None and mask.shape[-1] != key.shape[2]:
        return "a mask of another length"
    if dropout or kwargs.get("position_bias") is not None or query.shape[1] % key.shape[1]:
        return "dropout or a bias"
    return "gradients" if wants_gradient(query, key, value) else ""


def attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, as a function for transformers' `AttentionInterface`.

    The query is [batch, heads, tokens, head_dim], and the result is [batch, tokens, heads, head_dim].
    """
    out = None
    if not _why_not(query, key, value, attention_mask, dropout, kwargs):
        if query.shape[2] == 1:
            out = _step(query, key, value, attention_mask, scaling, kwargs)
        else:
            out = _prefill(module, query, key, value, attention_mask, scaling, kwargs)
    if out is not None:
        return out, None
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        return _composed(module, query, key, value, attention_mask, scaling, kwargs), None
    forward = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return forward(  # type: ignore[no-any-return]
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """Run `paged_attention` on one new token per sequence. Return None if the cache cannot be viewed as pages."""
    rows = _rows(mask, query, key.shape[2])
    if rows is None or (rows.shortest is not None and rows.shortest < PAGE):
        return None
    pages = _pages(key, value, rows, mask)
    if pages is None:
        return None
    sinks, softcap = kwargs.get("s_aux"), kwargs.get("softcap")
    with torch.no_grad():
        out: torch.Tensor = cukern.paged_attention(  # type: ignore[assignment]
            query[:, :, 0], pages.keys, pages.values, pages.block_tables, pages.lengths, layout="flash",
            scale=None if scaling is None else float(scaling), softcap=softcap,
            sinks=None if sinks is None else sinks.detach().float().contiguous(),
        )  # fmt: skip
        session = active.session
        has_room = session is not None and session.tokens == key.shape[2]  # for a page after each sequence
        if rows.shortest is None and mask is not None and not has_room:
            # Compute a sequence shorter than PAGE without pages, because its page may extend past the cache.
            out = torch.where(
                (rows.lengths < PAGE)[:, None, None], _one_token(query, key, value, mask, scaling, kwargs), out
            )
    return out[:, None]


def _one_token(query: Any, key: Any, value: Any, mask: Any, scaling: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    return _composed(None, query, key, value, mask, scaling, kwargs)[:, 0]


def _composed(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Compute attention with torch operations, because sdpa supports neither a softcap nor sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if kwargs.get("softcap") is not None:
        scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
    if mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
        # A static cache also has room for later tokens, which must not be visible.
        mask = mask.tril(0 if module is not None and key.shape[2] > query.shape[2] else key.shape[2] - query.shape[2])
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        floor = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, floor) if mask.dtype == torch.bool else scores + mask
    if (sinks := kwargs.get("s_aux")) is not None:
        sink_scores = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2).contiguous()


def _attention_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if _REGISTRY in read_globals(module)]


def _tells_sdpa(module: Any) -> bool:
    constants = getattr(getattr(undecorated_forward(module), "__code__", None), "co_consts", ())
    return any(x == "sdpa" or (isinstance(x, tuple) and "sdpa" in x) for x in constants)


def _extends_mask(module: Any) -> bool:
    """Return whether a module's `forward` extends its mask with floats, which fails for a bool mask."""
    code = getattr(undecorated_forward(module), "__code__", None)
    if code is None or not {"cat", "pad", "concat"} & {*code.co_names}:
        return False
    return any(x.opname == "STORE_FAST" and x.argval == "attention_mask" for x in dis.get_instructions(code))


def _why_not_replaceable(module: Any) -> str:
    if _tells_sdpa(module):
        return "a forward of its configuration tells sdpa from other attentions"
    if _extends_mask(module):
        return "a forward of its configuration joins its mask with numbers"
    return ""


def _why_not_paged(module: Any) -> str:
    keys, values = (getattr(module, name, None) for name in ("qk_head_dim", "v_head_dim"))
    keys = getattr(module, "head_dim", None) if not isinstance(keys, int) else keys
    if isinstance(keys, int) and isinstance(values, int) and keys != values:
        return f"its keys have {keys} numbers and its values {values}"
    if isinstance(keys, int) and (keys % 8 or keys > MAX_HEAD_DIM):
        return f"its heads have {keys} numbers, and the kernel takes multiples of 8 up to {MAX_HEAD_DIM}"
    return ""


def enable(model: Any, state: State, notes: Notes) -> None:
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    if not getattr(model, "_supports_attention_backend", False) and not getattr(model, "_supports_sdpa", False):
        notes.kept.add("attention", model, "transformers gives it no choice of an attention")
        return
    modules = _attention_modules(model)
    if not modules:
        notes.kept.add("attention", model, f"no forward that can be read names {_REGISTRY}")
        return
    configs = {id(module.config): module.config for module in (model, *modules) if hasattr(module, "config")}
    for config in list(configs.values()):
        for name in getattr(config, "sub_configs", {}) or {}:
            if (sub_config := getattr(config, name, None)) is not None:
                configs[id(sub_config)] = sub_config
    unsupported = {id(module.config): why for module in modules if (why := _why_not_replaceable(module))}
    for key in unsupported:
        del configs[key]
    for config in configs.values():
        before = config._attn_implementation
        config._attn_implementation_internal = NAME
        state.undo.append(
            lambda config=config, before=before: setattr(config, "_attn_implementation_internal", before)  # type: ignore[misc]
        )
    for module in modules:
        if id(module.config) in unsupported:
            notes.kept.add("attention", module, unsupported[id(module.config)])
        elif reason := _why_not_paged(module):
            notes.kept.add("attention", module, f"sdpa, since {reason}")
        else:
            notes.replaced.add(
                "attention", module, "paged_attention for a step over a cache, varlen_attention for more tokens"
            )
