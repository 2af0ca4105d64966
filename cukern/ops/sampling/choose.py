"""Sampling: the kernels, the checks, and the launches."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import arrays, check, generators, template
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_contiguous,
    expect_row_stride,
)
from cukern.runtime.each import Each
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import asked, check_each_call, each_call, launch, outputs, run_twin

DTYPES = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
#: The dtypes of a parameter that need not be an integer.
NUMBERS = ("float32", *INTEGERS)
VARIANTS = ("auto", "cluster", "block")
ORDERS = ("top_k_first", "joint")
MAX_VOCAB = 2**20
MAX_BATCH = 2**24
CLUSTER = 8
#: Two limits of a block's shared memory. Every GPU from sm_80 on has 96 KiB for a block. With 44 KiB per block, a
#: multiprocessor of an H200 holds five blocks.
_MAX_SHARED_BYTES = 96 * 1024
_LARGE_BATCH_SHARED_BYTES = 44 * 1024

_sample = Kernel("sampling/sample", "sample", compile_s=1.6)
_argmax = Kernel("sampling/argmax", "argmax")
_renormalize = Kernel("sampling/renormalize", "renormalize", compile_s=0.6)


def _shared_bytes(tiles: int, cached_tiles: int, group_max_tiles: int, segments_per_tile: int) -> int:
    """Return the shared memory of a block, as `Row::bytes` in sampling/row.cuh does."""
    constants = template.constants(_sample.file)
    fixed = 2 * tiles * 16 + constants["CAPACITY"] * 8 + tiles * segments_per_tile * 4
    return fixed + group_max_tiles * 128 + cached_tiles * constants["TILE"] * 4


def _launched() -> Launched:
    sizes = 30, 3, 4, 8
    return Launched(0, _shared_bytes(*sizes), sizes, _MAX_SHARED_BYTES)


def sampler(dtype: str, probs: bool, cluster: int) -> Variant:
    return _sample.variant(arrays.CUDA_TYPE[dtype], probs, cluster, launched=_launched())


def best_taker(dtype: str, cluster: int) -> Variant:
    return _argmax.variant(arrays.CUDA_TYPE[dtype], cluster)


def renormalizer(dtype: str, mode: str, cluster: int) -> Variant:
    return _renormalize.variant(arrays.CUDA_TYPE[dtype], mode, cluster, launched=_launched())


# The most used instances. All others are compiled at their first use.
_sample.at_import = [
    sampler(dtype, probs, CLUSTER).instance
    for dtype, probs in (("float32", False), ("bfloat16", False), ("float32", True))
]
_argmax.at_import = [best_taker(dtype, CLUSTER).instance for dtype in ("float32", "bfloat16")]
_renormalize.at_import = [renormalizer("float32", "SOFTMAX", CLUSTER).instance]


class Plan(NamedTuple):
    cluster: int  # blocks per row
    threads: int
    shared_bytes: int
    layout: dict[str, int]
    why: str  # of the cluster
    why_threads: str


def plan_of(values: Array, batch: Any, variant: str, cache: bool) -> Plan:
    """Return how blocks share the rows. With `cache`, blocks keep tiles in shared memory for later passes."""
    check.one_of("variant", variant, VARIANTS)
    gpu, constants = values.gpu, template.constants(_sample.file)
    clusters = gpu.compute_capability >= 90
    if variant == "cluster" and not clusters:
        check.fail("variant", "'auto' or 'block' on a GPU without clusters (before sm_90)", "'cluster'")
    max_warps, min_warps, tile = constants["MAX_WARPS"], constants["MIN_WARPS"], constants["TILE"]
    tiles = -(-values.shape[-1] // tile)
    # A short row gets one block, which has enough warps for all of its tiles.
    cluster = 1 if variant == "block" or not clusters or (variant == "auto" and tiles <= max_warps) else CLUSTER
    tiles_per_block = -(-tiles // cluster)
    # In a small batch, two blocks per multiprocessor hold all rows, and a block has about one warp per tile.
    max_small_batch = 2 * gpu.multiprocessors // cluster
    is_small = batch <= max_small_batch
    warps = max_warps if is_small else min_warps if not cache or batch <= 5 * gpu.multiprocessors // cluster else 8
    warps = min(warps, max(tiles_per_block, min_warps))
    segments_per_tile = 32
    while segments_per_tile > 1 and tiles * segments_per_tile > constants["MAX_SEGMENTS"]:
        segments_per_tile //= 2
    # In a large batch, a block caches only some of its tiles, so that more blocks are resident. Later passes read the
    # other tiles from L2.
    limit = _MAX_SHARED_BYTES if is_small else _LARGE_BATCH_SHARED_BYTES
    group_max_tiles = min(tiles_per_block, (_MAX_SHARED_BYTES - _shared_bytes(tiles, 0, 0, segments_per_tile)) // 128)
    used = _shared_bytes(tiles, 0, group_max_tiles, segments_per_tile)
    cached = min(tiles_per_block, max(0, limit - used) // (4 * tile)) if cache else 0
    layout = {
        "tiles": tiles,
        "tiles_per_block": tiles_per_block,
        "cached_tiles": cached,
        "segments_per_tile": segments_per_tile,
        "group_max_tiles": group_max_tiles,
    }
    share = f"a row of {tiles} x {tile} tokens: {cluster} {'block' if cluster == 1 else 'blocks, a cluster,'} per row"
    why_limit = f" (one up to {max_warps} x {tile})" if clusters else " (no clusters before sm_90)"
    why_threads = f"{batch} rows ({'up to' if is_small else 'over'} {max_small_batch}): {warps} warps per block"
    shared_bytes = _shared_bytes(tiles, cached, group_max_tiles, segments_per_tile)
    return Plan(cluster, 32 * warps, shared_bytes, layout, asked(variant) or share + why_limit, why_threads)


def _within(low: float, high: float, wanted: str) -> Callable[[str, Any], float]:
    """Make a function of an argument's name and value: it checks that the value is a number in [low, high]."""

    def convert(name: str, value: Any) -> float:
        found = check.number(name, value)
        if not low <= found <= high:
            check.fail(name, wanted, found)
        return found

    return convert


def _uint64_bits(name: str, value: Any) -> int:
    return check.integer(name, value, -(2**63), 2**64 - 1) & (2**64 - 1)


def _temperature(name: str, value: Any) -> float:
    if isinstance(value, (float, np.floating)) and value == np.inf:
        return np.inf
    return _within(0, np.inf, "at least 0")(name, value)


def _check_top_k(name: str, value: Any, vocab: int) -> int:
    return check.integer(name, value, 1, vocab, "the vocabulary; None for no limit")


def any_top_k(name: str, value: Any, vocab: int) -> int:
    """Return top_k; -1, 0 and numbers above the vocabulary size mean the whole vocabulary."""
    count = check.integer(name, value, -1, why="-1, 0 and None for no limit")
    return count if 1 <= count < vocab else vocab


_fraction = _within(0, 1, "in [0, 1] (None for no limit)")
#: The rule of a sampling parameter: the dtypes of an array, the function that checks a number, and the number that
#: replaces None.
_Rule = tuple[tuple[str, ...], Callable[[str, Any], Any], Any]
_RULES: dict[str, _Rule] = {
    "seed": (INTEGERS, _uint64_bits, 0),
    "offset": (INTEGERS, _uint64_bits, 0),
    "temperature": (NUMBERS, _temperature, 1.0),
    "top_p": (NUMBERS, _fraction, 1.0),
    "min_p": (NUMBERS, _fraction, 0.0),
}


#: A function that checks top_k. It takes the name, the value and the vocabulary size, and returns the number.
_TopKCheck = Callable[[str, Any, int], int]


def _parameters(
    first_name: str, first: Array, batch: Any, given: dict[str, Any], top_k_check: _TopKCheck = _check_top_k
) -> dict[str, Any]:
    """Return the kernel's fields for the sampling parameters. An array of one element applies to all rows."""
    vocab, bits = first.shape[-1], template.constants(_sample.file)
    rules: dict[str, _Rule] = {
        "top_k": (INTEGERS, lambda name, value: top_k_check(name, value, vocab), vocab),
        **_RULES,
    }
    fields: dict[str, Any] = {"wide": 0, "integral": 0, "single": 0}
    for name, (dtypes, convert, number) in rules.items():
        value, array = given.get(name), None
        if isinstance(value, Array):
            single = not value.shape or (value.shape == (1,) and batch != 1)
            shape = value.shape if single else (batch,)
            array = expect(name, value, first, first_name, dtypes, shape, "[batch]")
            fields["wide"] |= bits[name.upper()] * (array.dtype == "int64")
            fields["integral"] |= bits[name.upper()] * (dtypes is NUMBERS and array.dtype in INTEGERS)
            fields["single"] |= bits[name.upper()] * single
        elif value is not None:
            number = _checked(functools.partial(convert, name), value)
        fields |= {name: array, f"scalar_{name}": number}
    return fields


def _checked(convert: Callable[[Any], Any], value: Any) -> Any:
    """Check a number. If it may differ at each call of a plan, check it at each call."""
    return check_each_call(convert, value) if isinstance(value, Each) else convert(value)


#: (seed, offset, generator)
Randomness = tuple[Any, Any, Any]


def _stream(
    name: str,
    first: Array,
    batch: Any,
    randomness: Randomness,
    filters: dict[str, Any],
    top_k_check: _TopKCheck = _check_top_k,
) -> dict[str, Any]:
    seed, offset, generator = randomness
    fields = _parameters(name, first, batch, {"seed": seed, "offset": offset, **filters}, top_k_check)
    bits = template.constants(_sample.file)
    fields["by_row_index"] = not isinstance(seed, Array) or fields["single"] & bits["SEED"] != 0
    if seed is not None:
        return fields
    if offset is not None:
        check.fail("offset", "given together with seed", "no seed")
    draw, numbers = _generator(first, generator)
    drawn = each_call(draw, generators.Drawn(), *numbers)
    for place, name in enumerate(("scalar_seed", "scalar_offset", "seed")):
        fields[name] = each_call(operator.itemgetter(place), generators.Drawn()[place], drawn)
    fields["wide"] |= bits["SEED"]
    fields["single"] |= bits["SEED"]
    return fields


def _generator(first: Array, generator: Any) -> tuple[Callable[..., generators.Drawn], tuple[Any, ...]]:
    """Return a function that draws a seed, and the arguments to call it with: () for the default generator."""
    library, device = first.place.library, first.place.device
    draw = functools.partial(generators.draw, library, device)
    if generator is None:
        return draw, ()
    return draw, (_checked(functools.partial(generators.expect, library, device), generator),)


def _run_reference(first: Array, randomness: Randomness, variant: str) -> Any:
    """Let the NumPy reference draw the tokens."""
    seed, _, generator = randomness
    if seed is not None:
        return run_twin(variant, VARIANTS)
    draw, numbers = _generator(first, generator)
    given = [x.value for x in numbers]
    return run_twin(variant, VARIANTS, lambda: {"seed": draw(*given).seed})


def _check_rows(name: str, values: Any, symbol: str = "batch") -> tuple[Any, int, Any]:
    rows, vocab = expect_array(name, values, DTYPES, (symbol, "vocab")).shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail(name, f"of a vocabulary in [1, {MAX_VOCAB}]", vocab)
    if rows > MAX_BATCH:
        check.fail(name, f"of at most {MAX_BATCH} rows", rows)
    return rows, vocab, expect_row_stride(name, values)


_OPTIONAL: tuple[str, ...] = ("second", "valid", "logprobs", "indices", "finished", "sequence_length", "joint")
_OPTIONAL += ("draft_ids", "accepted", "emitted", "drafts")


def _launch_sampler(values: Array, probs: bool, batch: Any, variant: str, rereads: bool, **fields: Any) -> None:
    plan = plan_of(values, batch, variant, rereads)
    if not batch:
        return
    launch(
        sampler(values.dtype, probs, plan.cluster),
        batch * plan.cluster,
        plan.threads,
        plan.shared_bytes,
        why=f"{plan.why}; {plan.why_threads}; rows are read {'again' if rereads else 'once'}",
        values=values,
        vocab=values.shape[-1],
        layout=plan.layout,
        **dict.fromkeys(_OPTIONAL) | fields,
    )


def _launch_argmax(values: Array, batch: Any, variant: str, **fields: Any) -> None:
    plan = plan_of(values, batch, variant, False)
    cluster = plan.cluster
    if not batch:
        return
    warps = _argmax.constant("MAX_ARGMAX_WARPS")
    vectors = -(-values.shape[-1] * values.item_size // 16)
    launch(
        best_taker(values.dtype, cluster),
        batch * cluster,
        32 * min(warps, -(-vectors // (32 * cluster))),
        why=f"greedy, the temperature is 0: the largest logit alone; {plan.why}",
        values=values,
        vocab=values.shape[-1],
        **fields,
    )


def _is_greedy(filters: dict[str, Any], seed: Any) -> bool:
    """Return whether the largest logit wins. Without a seed return False, because the call must then advance a
    generator."""
    temperature = filters.get("temperature")
    return not (temperature is None or isinstance(temperature, Array) or seed is None) and bool(temperature == 0)


def _batch_of(name: str, values: Array, rows: Any, indices: Any) -> Any:
    if indices is None:
        return rows
    shape = getattr(indices, "shape", type(indices).__name__)
    if not isinstance(shape, tuple) or len(shape) != 1:
        check.fail("indices", "an integer array [batch]", shape, TypeError)
    batch = expect("indices", indices, values, name, INTEGERS, shape, "[batch]").shape[0]
    if batch and not rows:
        check.fail(name, "of at least one row for the indices", f"{rows} rows")
    return batch


def _check_step(
    name: str, values: Array, batch: Any, bias: Any, finished: Any, end_id: int | None, sequence_length: Any
) -> int:
    """Return end_id, or -1."""
    vocab = values.shape[-1]
    if bias is not None:
        expect("bias", bias, values, name, (values.dtype,), (vocab,), "[vocab]")
    if (finished is None) != (end_id is None):
        check.fail("end_id", "given together with finished", repr(end_id))
    if finished is not None:
        expect("finished", finished, values, name, ("bool",), (batch,), "[batch]")
        end_id = check.integer("end_id", end_id, 0, vocab - 1, "the vocabulary")
    if sequence_length is not None:
        expect("sequence_length", sequence_length, values, name, ("int32",), (batch,), "[batch]")
    return -1 if end_id is None else end_id


_RESULTS = {"ids": "int32", "valid": "bool", "logprobs": "float32"}


def _results(name: str, values: Array, batch: Any, indices: Any, wanted: list[str], out: Any) -> list[Array]:
    given = out if out is None or isinstance(out, (tuple, list)) else [out]
    if given is not None and len(given) != len(wanted):
        check.fail("out", " and ".join(wanted), f"{len(given)} arrays")
    dtypes = _RESULTS if indices is None else _RESULTS | {"ids": indices.dtype}
    results = [Result((batch,), dtypes[label], "[batch]") for label in wanted]
    made = outputs(given[0] if given and len(given) == 1 else given, values, name, *results)
    return list(made) if len(results) > 1 else [made]


def _rereads(fields: dict[str, Any], vocab: int) -> bool:
    """Return whether the kernel reads rows more than once. With a small top_k, the first pass lists all candidates, and
    no other pass follows."""
    top_k, top_p, min_p = (fields[f"scalar_{x}"] for x in ("top_k", "top_p", "min_p"))
    by_row = any(fields[x] is not None for x in ("top_k", "top_p", "min_p"))
    is_large = fields["top_k"] is not None or top_k > _sample.constant("MAX_LIST_K")
    return is_large and (by_row or top_k < vocab or top_p < 1 or min_p > 0)


def draw(
    name: str,
    values: Any,
    randomness: Randomness,
    indices: Any,
    return_valid: bool,
    return_logprobs: bool,
    out: Any,
    variant: str,
    filter_apply_order: str = "top_k_first",
    bias: Any = None,
    finished: Any = None,
    end_id: int | None = None,
    sequence_length: Any = None,
    top_k_check: _TopKCheck = _check_top_k,
    **filters: Any,
) -> Any:
    rows, vocab, stride = _check_rows(name, values, "batch" if indices is None else "rows")
    joint = check.one_of("filter_apply_order", filter_apply_order, ORDERS) == "joint"
    batch = _batch_of(name, values, rows, indices)
    fields = _stream(name, values, batch, randomness, filters, top_k_check)
    end_id = _check_step(name, values, batch, bias, finished, end_id, sequence_length)
    wanted = ["ids", *["valid"] * return_valid, *["logprobs"] * return_logprobs]
    made = _results(name, values, batch, indices, wanted, out)
    if values.on_host:
        return _run_reference(values, randomness, variant)
    if indices is not None:
        fields["wide"] |= _sample.constant("INDICES") * (indices.dtype == "int64")
    shared_fields = {
        "indices": indices,
        "finished": finished,
        "sequence_length": sequence_length,
        "row_stride": stride,
        "rows": rows,
        "end_id": end_id,
        **dict(zip(wanted, made, strict=True)),
    }
    if len(wanted) == 1 and bias is None and name == "logits" and _is_greedy(filters, randomness[0]):
        is_wide = indices is not None and indices.dtype == "int64"
        _launch_argmax(values, batch, variant, **shared_fields, wide=is_wide)
    else:
        rereads = _rereads(fields, vocab)
        _launch_sampler(
            values, name == "probs", batch, variant, rereads, second=bias, joint=joint, **shared_fields, **fields
        )
    return tuple(made) if len(made) > 1 else made if isinstance(out, (tuple, list)) else made[0]


def ids_of(values: Any, *_: Any, indices: Any = None, **__: Any) -> Result:
    by = values if indices is None else indices
    return Result((by.shape[0],), "int32" if indices is None else dtype_name(indices))


def like_rows(values: Any, *_: Any, **__: Any) -> Result:
    return Result(tuple(values.shape), dtype_name(values), "[batch, vocab]")


def probabilities_of(values: Any, *_: Any, **__: Any) -> Result:
    return like_rows(values)._replace(dtype="float32")


def whole_rows(mode: str, name: str, values: Any, parameter: str, value: Any, out: Any, variant: str) -> Any:
    batch, vocab, stride = _check_rows(name, values)
    fields = _parameters(name, values, batch, {parameter: value})
    out = outputs(out, values, name, probabilities_of(values) if mode == "SOFTMAX" else like_rows(values))
    if values.on_host:
        return run_twin(variant, VARIANTS)
    plan = plan_of(values, batch, variant, True)
    if batch:
        used = {
            field: fields[field] if x == parameter else None
            for x in ("temperature", "top_p", "top_k")
            for field in (x, f"scalar_{x}")
        }
        launch(
            renormalizer(values.dtype, mode, plan.cluster),
            batch * plan.cluster,
            plan.threads,
            plan.shared_bytes,
            why=f"{plan.why}; {plan.why_threads}",
            values=values,
            out=out,
            row_stride=stride,
            vocab=vocab,
            layout=plan.layout,
            **{flag: fields[flag] != 0 for flag in ("wide", "integral", "single")},
            **used,
        )
    return out


def verified(draft_probs: Any, *_: Any, **__: Any) -> list[Result]:
    batch, drafts, _vocab = draft_probs.shape
    return [Result(shape, "int32", "[batch, ...]") for shape in ((batch, drafts + 1), (batch,), (batch,))]


def verify(
    draft_probs: Any, draft_token_ids: Any, target_probs: Any, randomness: Randomness, out: Any, variant: str
) -> Any:
    first, like = expect_array("draft_probs", draft_probs, DTYPES, ("batch", "drafts", "vocab")), "draft_probs"
    batch, drafts, vocab = first.shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail("draft_probs", f"of a vocabulary in [1, {MAX_VOCAB}]", vocab)
    if batch > MAX_BATCH // (drafts + 1):
        check.fail("draft_probs", f"of at most {MAX_BATCH} rows in all", batch * drafts)
    expect_contiguous("draft_probs", first)
    expect("draft_token_ids", draft_token_ids, first, like, ("int32",), (batch, drafts), "[batch, drafts]")
    shape = (batch, drafts + 1, vocab)
    expect("target_probs", target_probs, first, like, (first.dtype,), shape, "[batch, drafts + 1, vocab]")
    fields = _stream(like, first, batch, randomness, {})
    names = "three arrays (ids, accepted, emitted)"
    ids, accepted, emitted = outputs(out, first, like, *verified(first), names=names)
    if first.on_host:
        return _run_reference(first, randomness, variant)
    _launch_sampler(
        target_probs,
        True,
        batch,
        variant,
        False,
        second=first,
        ids=ids,
        # The kernel verifies drafts if this pointer is not null. If `drafts` is 0, it reads nothing there, so any
        # address, such as `ids`, will do.
        draft_ids=draft_token_ids if drafts else ids,
        accepted=accepted,
        emitted=emitted,
        row_stride=vocab,
        rows=batch * (drafts + 1),
        end_id=-1,
        drafts=drafts,
        **fields,
    )
    return ids, accepted, emitted
