"""Sampling: the kernels, the division of a row among blocks, the checks, and the launches."""

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
    same_shape,
)
from cukern.runtime.each import Each
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import asked, check_each_call, each_call, launch, outputs, run_twin

DTYPES = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
#: The dtypes of an array for a parameter that need not be an integer, such as the temperature.
NUMBERS = ("float32", *INTEGERS)
VARIANTS = ("auto", "cluster", "block")
ORDERS = ("top_k_first", "joint")
MAX_VOCAB = 2**20
MAX_BATCH = 2**24
CLUSTER = 8
#: The maximum shared memory of a block. The first number fits every GPU from sm_80 on. With the second, five blocks are
#: resident per multiprocessor of an H200.
_MAX_SHARED_BYTES = 96 * 1024
_SHARED_BYTES_OF_MANY = 44 * 1024

_sample = Kernel("sampling/sample", "sample", compile_s=1.6)
_argmax = Kernel("sampling/argmax", "argmax")
_renormalize = Kernel("sampling/renormalize", "renormalize", compile_s=0.6)


def _shared_bytes(tiles: int, cached_tiles: int, topped_tiles: int, tops_per_tile: int) -> int:
    """Return the shared memory of a block in bytes. Each tile keeps its `tops_per_tile` largest values."""
    constants = template.constants(_sample.file)
    kept = 2 * tiles * 16 + constants["CAPACITY"] * 8 + tiles * tops_per_tile * 4
    return kept + topped_tiles * 128 + cached_tiles * constants["TILE"] * 4


def _launched() -> Launched:
    at = 30, 3, 4, 8
    return Launched(0, _shared_bytes(*at), at, _MAX_SHARED_BYTES)


def sampler(dtype: str, probs: bool, cluster: int) -> Variant:
    return _sample.variant(arrays.CUDA_TYPE[dtype], "true" if probs else "false", cluster, launched=_launched())


def best_taker(dtype: str, cluster: int) -> Variant:
    return _argmax.variant(arrays.CUDA_TYPE[dtype], cluster)


def renormalizer(dtype: str, mode: str, cluster: int) -> Variant:
    return _renormalize.variant(arrays.CUDA_TYPE[dtype], mode, cluster, launched=_launched())


# The most used instances, all with clusters: logits in float32 and bfloat16, probabilities in float32. All others are
# compiled at their first use.
_sample.at_import = [
    sampler(dtype, probs, CLUSTER).instance
    for dtype, probs in (("float32", False), ("bfloat16", False), ("float32", True))
]
_argmax.at_import = [best_taker(dtype, CLUSTER).instance for dtype in ("float32", "bfloat16")]
_renormalize.at_import = [renormalizer("float32", "SOFTMAX", CLUSTER).instance]


class Plan(NamedTuple):
    """How a row is divided among blocks."""

    cluster: int  # blocks per row
    threads: int
    shared_bytes: int
    layout: dict[str, int]
    why: str  # the reason for the cluster
    why_threads: str


def plan_of(values: Array, batch: Any, variant: str, cache: bool) -> Plan:
    """Return the plan for `batch` rows. With `cache` the blocks keep elements in shared memory, to read them again."""
    check.one_of("variant", variant, VARIANTS)
    gpu, constants = values.gpu, template.constants(_sample.file)
    clusters = gpu.compute_capability >= 90
    if variant == "cluster" and not clusters:
        check.fail("variant", "'auto' or 'block' on a GPU without clusters (before sm_90)", "'cluster'")
    most_warps, least_warps, tile = constants["MAX_WARPS"], constants["MIN_WARPS"], constants["TILE"]
    tiles = -(-values.shape[-1] // tile)
    # If one block has enough warps for all tiles of a row, a cluster is not used.
    cluster = 1 if variant == "block" or not clusters or (variant == "auto" and tiles <= most_warps) else CLUSTER
    tiles_per_block = -(-tiles // cluster)
    # A block gets about one warp per tile if the batch is so small that two blocks per multiprocessor hold all rows.
    most_few = 2 * gpu.multiprocessors // cluster
    few = batch <= most_few
    warps = most_warps if few else least_warps if not cache or batch <= 5 * gpu.multiprocessors // cluster else 8
    warps = min(warps, max(tiles_per_block, least_warps))
    tops_per_tile = 32
    while tops_per_tile > 1 and tiles * tops_per_tile > constants["MAX_TOPS"]:
        tops_per_tile //= 2
    # With many rows, each block caches only some tiles of its row in shared memory, so that more blocks are resident.
    # Later passes over the row read the other tiles from L2.
    limit = _MAX_SHARED_BYTES if few else _SHARED_BYTES_OF_MANY
    topped = min(tiles_per_block, (_MAX_SHARED_BYTES - _shared_bytes(tiles, 0, 0, tops_per_tile)) // 128)
    used = _shared_bytes(tiles, 0, topped, tops_per_tile)
    cached = min(tiles_per_block, max(0, limit - used) // (4 * tile)) if cache else 0
    layout = {
        "tiles": tiles,
        "tiles_per_block": tiles_per_block,
        "cached_tiles": cached,
        "tops_per_tile": tops_per_tile,
        "topped_tiles": topped,
    }
    share = f"a row of {tiles} x {tile} tokens: {cluster} {'block' if cluster == 1 else 'blocks, a cluster,'} per row"
    limits = f" (one up to {most_warps} x {tile})" if clusters else " (no clusters before sm_90)"
    taken = f"{batch} rows ({'up to' if few else 'over'} {most_few}): {warps} warps per block"
    shared_bytes = _shared_bytes(tiles, cached, topped, tops_per_tile)
    return Plan(cluster, 32 * warps, shared_bytes, layout, asked(variant) or share + limits, taken)


def _within(low: float, high: float, wanted: str) -> Callable[[str, Any], float]:
    """Return a function (name, value) that checks that the value is a number in [low, high], and returns it."""

    def convert(name: str, value: Any) -> float:
        found = check.number(name, value)
        if not low <= found <= high:
            check.fail(name, wanted, found)
        return found

    return convert


def _word(name: str, value: Any) -> int:
    """Check a signed or unsigned 64-bit integer, and return its bits as an unsigned integer."""
    return check.integer(name, value, -(2**63), 2**64 - 1) & (2**64 - 1)


def _temperature(name: str, value: Any) -> float:
    """Check a number of at least 0, which may be infinite."""
    if isinstance(value, (float, np.floating)) and value == np.inf:
        return np.inf
    return _within(0, np.inf, "at least 0")(name, value)


def _count(name: str, value: Any, vocab: int) -> int:
    """Check the argument top_k: an integer in [1, vocab]."""
    return check.integer(name, value, 1, vocab, "the vocabulary; None for no limit")


def any_count(name: str, value: Any, vocab: int) -> int:
    """Check the argument top_k. -1, 0 and numbers above the vocabulary size mean the whole vocabulary."""
    count = check.integer(name, value, -1, why="-1, 0 and None for no limit")
    return count if 1 <= count < vocab else vocab


_share = _within(0, 1, "in [0, 1] (None for no limit)")
#: The rule for a parameter: the allowed dtypes of an array, a function that checks a number, and the number for None.
_Rule = tuple[tuple[str, ...], Callable[[str, Any], Any], Any]
#: The rules of all parameters except top_k.
_RULES: dict[str, _Rule] = {
    "seed": (INTEGERS, _word, 0),
    "offset": (INTEGERS, _word, 0),
    "temperature": (NUMBERS, _temperature, 1.0),
    "top_p": (NUMBERS, _share, 1.0),
    "min_p": (NUMBERS, _share, 0.0),
}


#: The type of a function that checks top_k, given the name, the value and the vocabulary size.
_Count = Callable[[str, Any, int], int]


def _parameters(
    first_name: str, first: Array, batch: Any, given: dict[str, Any], count: _Count = _count
) -> dict[str, Any]:
    """Return the kernel's fields for the sampling parameters.

    A parameter is an array [batch]; or an array of one element, or a number, which applies to all rows.
    """
    vocab, bits = first.shape[-1], template.constants(_sample.file)
    rules: dict[str, _Rule] = {"top_k": (INTEGERS, lambda name, value: count(name, value, vocab), vocab), **_RULES}
    fields: dict[str, Any] = {"wide": 0, "integral": 0, "single": 0}
    for name, (dtypes, convert, number) in rules.items():
        value, array = given.get(name), None
        if isinstance(value, Array):
            single = not value.shape or not (same_shape(value, (batch,)) or not same_shape(value, (1,)))
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
    """Check a number. If the number may differ at each call of a plan, check it at each call."""
    return check_each_call(convert, value) if isinstance(value, Each) else convert(value)


#: The type of the tuple (seed, offset, generator), the arguments of a sampling function.
Randomness = tuple[Any, Any, Any]


def _stream(
    name: str, first: Array, batch: Any, randomness: Randomness, filters: dict[str, Any], count: _Count = _count
) -> dict[str, Any]:
    """Return the kernel's fields for the parameters, the seed and the offset.

    If the caller passes no seed, a generator gives seed and offset at each call.
    """
    seed, offset, generator = randomness
    fields = _parameters(name, first, batch, {"seed": seed, "offset": offset, **filters}, count)
    bits = template.constants(_sample.file)
    fields["by_place"] = not isinstance(seed, Array) or fields["single"] & bits["SEED"] != 0
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
    """Return a function that draws a seed, and its arguments: the caller's generator, or () for the default one."""
    library, device = first.place.library, first.place.device
    draw = functools.partial(generators.draw, library, device)
    if generator is None:
        return draw, ()
    return draw, (_checked(functools.partial(generators.expect, library, device), generator),)


def _leave_to_twin(first: Array, randomness: Randomness, variant: str) -> Any:
    """Let the NumPy reference draw the tokens. If the caller passes no seed, a generator draws one first."""
    seed, _, generator = randomness
    if seed is not None:
        return run_twin(variant, VARIANTS)
    draw, numbers = _generator(first, generator)
    given = [x.value for x in numbers]
    return run_twin(variant, VARIANTS, lambda: {"seed": draw(*given).seed})


def _check_rows(name: str, values: Any, symbol: str = "batch") -> tuple[Any, int, Any]:
    """Check a matrix [rows, vocab]. Return the number of rows, the vocabulary size and the row stride."""
    rows, vocab = expect_array(name, values, DTYPES, (symbol, "vocab")).shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail(name, f"of a vocabulary in [1, {MAX_VOCAB}]", vocab)
    if rows > MAX_BATCH:
        check.fail(name, f"of at most {MAX_BATCH} rows", rows)
    return rows, vocab, expect_row_stride(name, values)


#: Fields that only some samplers set.
_OPTIONAL: tuple[str, ...] = ("second", "valid", "logprobs", "indices", "finished", "sequence_length", "joint")
_OPTIONAL += ("draft_ids", "accepted", "emitted", "drafts")


def _launch_sampler(values: Array, probs: bool, batch: Any, variant: str, again: bool, **fields: Any) -> None:
    """Launch the kernel that draws tokens. `again`: the kernel reads rows more than once."""
    plan = plan_of(values, batch, variant, again)
    if not batch:
        return
    launch(
        sampler(values.dtype, probs, plan.cluster),
        batch * plan.cluster,
        plan.threads,
        plan.shared_bytes,
        why=f"{plan.why}; {plan.why_threads}; rows are read {'again' if again else 'once'}",
        values=values,
        vocab=values.shape[-1],
        layout=plan.layout,
        **dict.fromkeys(_OPTIONAL) | fields,
    )


def _launch_argmax(values: Array, batch: Any, variant: str, **fields: Any) -> None:
    """Launch the kernel that finds the largest value of each row."""
    plan = plan_of(values, batch, variant, False)
    cluster = plan.cluster
    if not batch:
        return
    warps = template.constants(_argmax.file)["MAX_ARGMAX_WARPS"]
    units = -(-values.shape[-1] * values.item_size // 16)
    launch(
        best_taker(values.dtype, cluster),
        batch * cluster,
        32 * min(warps, -(-units // (32 * cluster))),
        why=f"greedy, the temperature is 0: the largest logit alone; {plan.why}",
        values=values,
        vocab=values.shape[-1],
        **fields,
    )


def _is_greedy(filters: dict[str, Any], seed: Any) -> bool:
    """Return whether the call only has to find the largest logit of each row (temperature 0).

    Return False without a seed, because the call must then advance a generator.
    """
    temperature = filters.get("temperature")
    return not (temperature is None or isinstance(temperature, Array) or seed is None) and bool(temperature == 0)


def _batch_of(name: str, values: Array, rows: Any, indices: Any) -> Any:
    """Return the batch size: the number of indices, or without `indices` the number of rows."""
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
    """Check the arguments of `sample` other than the parameters. Return end_id, or -1 if there is none."""
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
    """Return the arrays [batch] for the `wanted` results: new arrays, or the arrays of `out` (one array or a tuple)."""
    given = out if out is None or isinstance(out, (tuple, list)) else [out]
    if given is not None and len(given) != len(wanted):
        check.fail("out", " and ".join(wanted), f"{len(given)} arrays")
    dtypes = _RESULTS if indices is None else _RESULTS | {"ids": indices.dtype}
    results = [Result((batch,), dtypes[label], "[batch]") for label in wanted]
    made = outputs(given[0] if given and len(given) == 1 else given, values, name, *results)
    return list(made) if len(results) > 1 else [made]


def _reads_again(fields: dict[str, Any], vocab: int) -> bool:
    """Return whether the kernel reads rows more than once.

    Filters need further passes. A small top_k does not, because the kernel then lists the top tokens in its first pass.
    """
    top_k, top_p, min_p = (fields[f"scalar_{x}"] for x in ("top_k", "top_p", "min_p"))
    by_row = any(fields[x] is not None for x in ("top_k", "top_p", "min_p"))
    is_large = fields["top_k"] is not None or top_k > template.constants(_sample.file)["MAX_LISTED"]
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
    count: _Count = _count,
    **filters: Any,
) -> Any:
    """Check and launch a function that draws one token per row. `count` checks top_k."""
    rows, vocab, stride = _check_rows(name, values, "batch" if indices is None else "rows")
    joint = check.one_of("filter_apply_order", filter_apply_order, ORDERS) == "joint"
    batch = _batch_of(name, values, rows, indices)
    fields = _stream(name, values, batch, randomness, filters, count)
    end_id = _check_step(name, values, batch, bias, finished, end_id, sequence_length)
    wanted = ["ids", *["valid"] * return_valid, *["logprobs"] * return_logprobs]
    made = _results(name, values, batch, indices, wanted, out)
    if values.on_host:
        return _leave_to_twin(values, randomness, variant)
    if indices is not None:
        fields["wide"] |= template.constants(_sample.file)["INDICES"] * (indices.dtype == "int64")
    common = {
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
        _launch_argmax(values, batch, variant, **common, wide=is_wide)
    else:
        again = _reads_again(fields, vocab)
        _launch_sampler(values, name == "probs", batch, variant, again, second=bias, joint=joint, **common, **fields)
    return tuple(made) if len(made) > 1 else made if isinstance(out, (tuple, list)) else made[0]


def ids_of(values: Any, *_: Any, indices: Any = None, **__: Any) -> Result:
    by = values if indices is None else indices
    return Result((by.shape[0],), "int32" if indices is None else dtype_name(indices))


def like_rows(values: Any, *_: Any, **__: Any) -> Result:
    return Result(tuple(values.shape), dtype_name(values), "[batch, vocab]")


def probabilities_of(values: Any, *_: Any, **__: Any) -> Result:
    return like_rows(values)._replace(dtype="float32")


def whole_rows(mode: str, name: str, values: Any, parameter: str, value: Any, out: Any, variant: str) -> Any:
    """Check and launch a function that returns whole rows: softmax, renormalized or masked rows."""
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
    """Check and launch `chain_speculative_sampling`."""
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
        return _leave_to_twin(first, randomness, variant)
    _launch_sampler(
        target_probs,
        True,
        batch,
        variant,
        False,
        second=first,
        ids=ids,
        # With 0 drafts the pointer is any non-null one, because null tells the kernel that this call does not verify.
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
