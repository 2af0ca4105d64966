"""Plans that the first attention call makes, for `get_mla_metadata` without arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cukern.runtime import arrays, check
from cukern.runtime.op import OPS


@dataclasses.dataclass
class FlashMLASchedMeta:
    """A plan that the first call of `flash_mla_with_kvcache` makes and later calls use.

    It is valid for the sizes in `config` and the lengths of the first call.
    """

    have_initialized: bool = False
    config: tuple[Any, ...] | None = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


#: The names of the sizes in `FlashMLASchedMeta.config`.
_CONFIG = (
    *("batch", "query_tokens", "heads", "page_size", "kv_heads", "causal", "is_fp8_kvcache", "topk"),
    *("extra_page_size", "extra_topk"),
)


def plan_of_the_first_call(*args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else (FlashMLASchedMeta(), None)


def _sizes(given: Mapping[str, Any], name: str, dimensions: int) -> tuple[Any, ...] | None:
    shape = tuple(getattr(given.get(name), "shape", ()))
    return shape if len(shape) == dimensions else None


def _make_plan(given: Mapping[str, Any], config: tuple[Any, ...]) -> tuple[Any, Any]:
    """Make a plan. Return (None, None) if the checks of the call will raise an error."""
    batch, query_tokens, heads, _, kv_heads, _, _, topk, _, extra_topk = config
    if not kv_heads or not heads or heads % kv_heads:
        return None, None
    lengths, options = given["cache_seqlens"], {}
    if topk is not None:
        q = given["q"]
        own = q if arrays.library_of(q) else arrays.enter_all("q", q)
        library = arrays.library_of(own)
        assert library is not None
        lengths = library.empty((batch,), "int32", own)  # only its shape is read
        options = {"num_heads_q": heads, "topk": topk, "extra_topk": extra_topk or 0}
        options |= {name: given.get(name) for name in ("topk_length", "extra_topk_length")}
    if lengths is None:
        return None, None
    made = OPS["get_mla_metadata"].call(lengths, query_tokens * heads // kv_heads, kv_heads, **options)
    return made[0], made[1]


def attend_by_a_plan(*args: Any, **kwargs: Any) -> Any:
    """Call `flash_mla_with_kvcache` with the plan in a `FlashMLASchedMeta`. Return NotImplemented for other plans."""
    op = OPS["flash_mla_with_kvcache"]
    given = op.signature.bind(*args, **kwargs).arguments
    meta = given["tile_scheduler_metadata"]
    if not isinstance(meta, FlashMLASchedMeta):
        return NotImplemented
    if given["num_splits"] is not None:
        wanted = "None with what get_mla_metadata gave without arguments"
        check.fail("num_splits", wanted, type(given["num_splits"]).__name__, TypeError)
    q, cache = _sizes(given, "q", 4), _sizes(given, "k_cache", 4)
    plan, config = (meta.tile_scheduler_metadata, meta.num_splits), meta.config
    if q is not None and cache is not None:
        flags = [bool(given.get(name)) for name in ("causal", "is_fp8_kvcache")]
        extra_cache = _sizes(given, "extra_k_cache", 4)
        chosen = [_sizes(given, name, 3) for name in ("indices", "extra_indices_in_kvcache")]
        topk, extra_topk = [shape and shape[2] for shape in chosen]
        config = (*q[:3], *cache[1:3], *flags, topk, extra_cache and extra_cache[1], extra_topk)
        for name, planned, own in zip(_CONFIG, meta.config or config, config, strict=True):
            if planned != own:
                check.fail("tile_scheduler_metadata", f"of a call with the {name} of this one, {own}", planned)
        if meta.config is None:
            plan = _make_plan(given, config)
    results = op.call(**{**given, "tile_scheduler_metadata": plan[0], "num_splits": plan[1]})
    meta.tile_scheduler_metadata, meta.num_splits = plan
    meta.have_initialized, meta.config = True, config
    return results
