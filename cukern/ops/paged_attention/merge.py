"""The merging of attention over two sets of tokens: its kernel, and a call."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from cukern.ops.paged_attention.choose import CUDA_TYPE, DTYPES
from cukern.reference import paged_attention as twin
from cukern.runtime import arrays, check, template
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import Library
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.template import Packer, packer
from cukern.runtime.view import contiguous, out_of, read, read_like

kernel = Kernel("paged_attention/merge_states", "merge_states")
#: Elements of a side from which a thread of `merge_states` has two vectors: with fewer, latency is the bound. Where
#: log-sum-exps are by heads it has one: then two take 40% longer on an H200.
_MANY_MERGED = 2**24
_FLOAT32 = ("float32",)
#: What earlier calls chose: the first size of a side is free. Where log-sum-exps are by heads, it is one of their last.
_BY_TOKENS = Decisions((0,), (0,), (0,), (0,), (0,), (0,))
_BY_HEADS = Decisions((0,), (0, 1), (0,), (0, 1), (0,), (0, 1))

#: The fields that each call gives, in this order. The decision fixes all others.
FIELDS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse", "rows", "tokens")


class Config(NamedTuple):
    """What all calls of a decision launch."""

    variant: Variant
    block: tuple[int, int, int]
    shared_bytes: int
    pack: Packer
    reason: str
    block_elements: int
    most: int  # elements of a side
    dtype: str
    heads_first: bool


def merge_variant(dtype: str, vector: int, heads_first: bool, each: int = 1, has_power: bool = False) -> Variant:
    """The variant of `merge_states`; with `each` above 1 it is `has_power`, of a power of two of vectors in a row."""
    form: list[str | int] = [each, "true"]
    return kernel.variant(CUDA_TYPE[dtype], vector, str(heads_first).lower(), *form if has_power else [])


@functools.lru_cache(maxsize=1024)
def choose(dtype: str, heads: int, head_dim: int, heads_first: bool, aligned: bool, many: bool) -> Config:
    """The kernel that merges states. `aligned`: all sides begin at multiples of 16 bytes; `many`: of many elements."""
    vector = 16 // arrays.ITEM_SIZE[dtype]
    if head_dim % vector or not aligned:
        vector = 1
    threads = template.constants(kernel.file)["MERGE_THREADS"]
    vectors = head_dim // vector
    has_power = vector > 1 and vectors & (vectors - 1) == 0
    each = 2 if has_power and not heads_first and many else 1
    reason = (
        f"vectors of {vector} numbers, {each} a thread (2 from {_MANY_MERGED} elements on, where rows are 2^n vectors)"
    )
    if vector == 1:
        reason = "one number at a time, which is slower: rows or addresses are no multiples of 16 bytes"
    fixed = {"head_dim": head_dim, "heads": heads if heads_first else 0, "shift": vectors.bit_length() - 1}
    pack = packer(kernel.file, kernel.function, FIELDS, fixed)
    variant = merge_variant(dtype, vector, heads_first, each, has_power)
    most = (2**31 - 1) * threads * vector
    return Config(variant, (threads, 1, 1), 0, pack, reason, each * threads * vector, most, dtype, heads_first)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, lse_heads_first: Any, out: Any, variant: Any
) -> tuple[Any, Any]:
    """Launch what an alike call has chosen, or check and choose; see `merge_attention_states`."""
    heads_first = check.flag("lse_heads_first", lse_heads_first)
    merged, lse = out_of(out, 2, "a pair (out, lse)")
    given, facts = (out_a, lse_a, out_b, lse_b, merged, lse), (heads_first, variant)
    decision = (_BY_HEADS if heads_first else _BY_TOKENS).find(facts, given)
    if decision is not None:
        library, rest = decision.library, decision.own
        address, rows = library.address, out_a.shape[0]
        at_a, at_b, at_lse_a, at_lse_b = address(out_a), address(out_b), address(lse_a), address(lse_b)
        bits = at_a | at_b | (0 if merged is None else address(merged))
        shape = (rows, *rest)
        elements = math.prod(shape)
        config = decision.choices.get((bits % 16 == 0, elements > _MANY_MERGED))
        if heads_first:
            agree = _agree(library, (lse_a, lse_b, lse), _lse_shape(shape, True))
        else:
            agree = lse_a.shape[0] == rows == lse_b.shape[0] and (lse is None or lse.shape[0] == rows)
        if (
            agree
            and config is not None
            and elements <= config.most
            and out_b.shape[0] == rows
            and (merged is None or merged.shape[0] == rows)
        ):
            found = launch(config, library, decision.device, (at_a, at_lse_a, at_b, at_lse_b), shape, merged, lse)
            return found if merged is None or lse is None else out
    found = _decide(decision, facts, given)
    return found if merged is None or lse is None else out


def _lse_shape(shape: tuple[int, ...], heads_first: bool) -> tuple[int, ...]:
    if not heads_first:
        return shape[:-1]
    *outer, tokens, heads, _ = shape
    return (*outer, heads, tokens)


def _agree(library: Library, logs: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Whether log-sum-exps by heads have this shape and are contiguous, where alike ones were."""
    first = math.prod(shape[1:])  # stride
    return all(x is None or (x.shape == shape and library.strides(x)[0] == first) for x in logs)


def _decide(decision: Decision | None, facts: tuple[bool, Any], given: tuple[Any, ...]) -> tuple[Any, Any]:
    """Check a call, choose its kernel, keep the choice, launch."""
    (heads_first, variant), (_, lse_a, out_b, lse_b, merged, lse) = facts, given
    a = read("out_a", given[0], DTYPES)
    library, shape, device = a.library, a.shape, a.device
    if len(shape) < 2 + heads_first or shape[-1] < 1:
        check.fail("out_a", f"of shape [..., {'tokens, ' if heads_first else ''}heads, head_dim]", list(shape))
    if shape[-1] > 2**16:
        check.fail("out_a", f"of a head_dim in [1, {2**16}]", shape[-1])
    check.one_of("variant", variant, ("auto",))
    contiguous("out_a", a)
    of_lse = (
        _lse_shape(shape, heads_first),
        "[..., heads, tokens] of out_a" if heads_first else "out_a's without head_dim",
    )
    b = read_like("out_b", out_b, a, "out_a", (a.dtype,), shape, "out_a's")
    lse_a = read_like("lse_a", lse_a, a, "out_a", _FLOAT32, *of_lse)
    lse_b = read_like("lse_b", lse_b, a, "out_a", _FLOAT32, *of_lse)
    if merged is not None:
        merged = read_like("out[0]", merged, a, "out_a", (a.dtype,), shape, "out_a's")
    if lse is not None:
        lse = read_like("out[1]", lse, a, "out_a", _FLOAT32, *of_lse)
    if device is None:
        arguments = {"out_a": a, "lse_a": lse_a, "out_b": b, "lse_b": lse_b, "lse_heads_first": heads_first}
        return runtime.run_twin(twin.merge_attention_states, a, (merged, lse), arguments)  # type: ignore[no-any-return]
    elements = math.prod(shape)
    aligned = (a.address | b.address | (0 if merged is None else merged.address)) % 16 == 0
    config = choose(a.dtype, shape[-2], shape[-1], heads_first, aligned, elements > _MANY_MERGED)
    if elements > config.most:
        check.fail("out_a", f"of at most {config.most} elements", f"shape {[*shape]}")
    # Where a size is 1, its stride does not matter, but it does to alike calls of more.
    given_views = [x for x in (a, b, lse_a, lse_b, merged, lse) if x is not None]
    dense = all(x.strides[0] == math.prod(x.shape[1:]) and x.strides[-1] == 1 for x in given_views)
    if a.foreign is None and library.recorder is None and dense and elements:
        if decision is None:
            decisions = _BY_HEADS if heads_first else _BY_TOKENS
            decision = decisions.keep(facts, given, library, device, shape[1:])
        decision.choices[aligned, elements > _MANY_MERGED] = config
    found, logs = launch(
        config, library, device, (a.address, lse_a.address, b.address, lse_b.address), shape,
        None if merged is None else merged.array, None if lse is None else lse.array,
    )  # fmt: skip
    return runtime.returned(found, merged, a), runtime.returned(logs, lse, a)


def launch(
    config: Config, library: Library, device: int, sides: tuple[int, ...], shape: tuple[int, ...], merged: Any, lse: Any
) -> tuple[Any, Any]:
    """Make the results that the caller does not give, and launch. `sides` are the addresses of what is read."""
    _, at_lse_a, _, at_lse_b = sides
    heads_first, elements, at_lse = config.heads_first, math.prod(shape), 0
    if merged is None:
        merged = library.allocate(shape, config.dtype, device)
    if lse is None:
        lse = library.allocate(_lse_shape(shape, heads_first), "float32", device)
        at_lse = library.address(lse)
    elif elements:
        at_lse = library.address(lse)
        if at_lse in (at_lse_a, at_lse_b):
            check.fail(
                "out[1]", "another array than lse_a and lse_b, which are read while it is written", "one of them"
            )
    if elements:
        rows, tokens = elements // shape[-1], shape[-3] if heads_first else 0
        values = (*sides, library.address(merged), at_lse, rows, tokens)  # of FIELDS
        runtime.launch(config, library, device, (-(-elements // config.block_elements), 1, 1), values)
    return merged, lse
