"""Beam search: the best continuations, a step, and the tokens of each beam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.reference import beam_search as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, Result, dtype_name, expect, expect_array, expect_contiguous, expect_one
from cukern.runtime.kernel import Kernel
from cukern.runtime.op import op
from cukern.runtime.plan import asked, check_each_call, empty, launch, outputs, run_twin
from cukern.runtime.vectors import ceil_div, why_width

__all__ = ["beam_search_step", "beam_topk", "gather_tree", "update_kv_cache"]

DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "uint8")
TOPK_VARIANTS = ("auto", "narrow", "wide")
CACHE_VARIANTS = ("auto", "vector", "scalar")
MAX_CANDIDATES = 2**31 - 1  # ids into beams * vocab are int32
_MAX_BLOCKS = 2**31 - 1
_TREE_ENTRIES = 2048
#: For each variant: the number of thread groups (beam_search/selection.cuh) and the largest k.
_GROUPS = {"narrow": (32, 16), "wide": (256, 128)}  # "wide": THREADS and MAX_K of the template
#: This number of blocks occupies a GPU. To reach it with few rows, each row is cut into more chunks.
_BLOCKS_WANTED = 512
#: 16-byte vectors in a memory line of 128 bytes. A chunk of a row is a whole number of lines.
_VECTORS_PER_LINE = 8
#: The range of `length ** length_penalty`, the divisor of a score. The limits and their inverses fit in float32.
_PENALTY_RANGE = (1e-30, 1e30)
_LARGEST_RATE = 1e30
#: The number of blocks per multiprocessor when caches are reordered. Four blocks have enough loads in flight.
_RESIDENT_BLOCKS = 4

_chunks = Kernel("beam_search/topk_chunks", "topk_chunks")
_merge = Kernel("beam_search/topk_merge", "topk_merge")
_step = Kernel("beam_search/beam_step", "beam_step")
_tree = Kernel("beam_search/gather_tree", "gather_tree")
_cache = Kernel("beam_search/reorder_cache", "reorder_cache")

for _name, (_groups, _) in _GROUPS.items():
    _chunks.specialized += [_chunks.variant(arrays.CUDA_TYPE[dtype], _groups).instance for dtype in DTYPES]
    _merge.specialized.append(_merge.variant(_groups).instance)
    _step.specialized += [_step.variant(_groups, *flags).instance for flags in ((), (True,))]
_tree.specialized = [_tree.variant(_TREE_ENTRIES).instance]
_cache.specialized = [_cache.variant(w, *flags).instance for flags in ((), (True,)) for w in (16, 8, 4, 2, 1)]
for _kernel in (_chunks, _merge, _tree):
    _kernel.at_import = _kernel.specialized
_step.at_import = [_step.variant(_groups).instance for _groups, _ in _GROUPS.values()]
_cache.at_import = [_cache.variant(16).instance]


def _depth(k: int, lists: int) -> int:
    """Return d. The merge derives a lower bound on the k-th best of all keys from the d-th key of each sorted list."""
    return min(max(1, ceil_div(2 * k, lists)), k)


class _Selection(NamedTuple):
    chunks: int  # per row
    vectors: int  # of 16 bytes, per chunk
    groups: int
    why: str


def _selection(dtype: str, batch: int, beams: int, vocab: int, k: int, variant: str) -> _Selection:
    check.one_of("variant", variant, TOPK_VARIANTS)
    if beams < 1 or vocab < 1 or beams * vocab > MAX_CANDIDATES:
        check.fail("log_probs", f"of 1 to {MAX_CANDIDATES} candidates (beams * vocab)", f"{beams} * {vocab}")
    most = _step.constant("MAX_K")
    check.integer("k", k, 1, min(most, beams * vocab), f"the candidates, at most {most}")
    name = ("narrow" if k <= _GROUPS["narrow"][1] else "wide") if variant == "auto" else variant
    groups, most = _GROUPS[name]
    if k > most:
        check.fail("variant", f"'wide' for more than {most} results", repr(variant))
    threads, rows, row_vectors = _chunks.constant("THREADS"), batch * beams, vocab // (16 // arrays.ITEM_SIZE[dtype])
    fewest, finest = ceil_div(row_vectors, threads * _chunks.constant("LOADS")), ceil_div(row_vectors, threads)
    chunks = max(1, fewest, min(ceil_div(_BLOCKS_WANTED, max(rows, 1)), finest))
    vectors = max(1, ceil_div(row_vectors, chunks * _VECTORS_PER_LINE)) * _VECTORS_PER_LINE
    chunks = max(1, ceil_div(row_vectors, vectors))
    if rows * chunks > _MAX_BLOCKS:
        check.fail("log_probs", f"of at most {_MAX_BLOCKS} chunks of {vectors} * 16 bytes", rows * chunks)
    limit = f"up to {_GROUPS['narrow'][1]}" if name == "narrow" else f"from {_GROUPS['narrow'][1] + 1}"
    why = asked(variant) or f"{name}: {k} results, {groups} groups of threads ({limit} results)"
    return _Selection(chunks, vectors, groups, why)


def _why_step(device_step: bool) -> str:
    return "the step is an array, which the kernel reads" if device_step else "the step is a number"


def _check_log_probs(log_probs: Any) -> None:
    expect_contiguous("log_probs", expect_array("log_probs", log_probs, DTYPES, ("batch", "beams", "vocab")))


def _rate(diversity_rate: Any) -> float:
    rate = check.number("diversity_rate", diversity_rate)
    if abs(rate) > _LARGEST_RATE:
        check.fail("diversity_rate", f"in [{-_LARGEST_RATE}, {_LARGEST_RATE}]", rate)
    return rate


def _outputs(out: Any, first: Array, first_name: str, results: list[Result], names: str) -> Any:
    wanted = f"{len(results)} arrays ({names})"
    if isinstance(out, (tuple, list)) and len(out) != len(results):
        check.fail("out", wanted, f"{len(out)} arrays", TypeError)
    return outputs(out, first, first_name, *results, names=wanted)


def _select(log_probs: Array, scores: Array | None, k: int, selection: _Selection, rate: float) -> dict[str, Any]:
    """Find the best keys of each chunk or each beam. Return the kernel fields that describe the lists of these keys."""
    (batch, beams, vocab), threads, chunks = log_probs.shape, _chunks.constant("THREADS"), selection.chunks
    rows = batch * beams
    keys = empty((rows * chunks * k,), "int64")
    launch(
        _chunks.variant(arrays.CUDA_TYPE[log_probs.dtype], selection.groups), rows * chunks, threads,
        why=f"{selection.why}; first pass, {rows} rows in {chunks} chunks each ({_BLOCKS_WANTED} blocks wanted)",
        log_probs=log_probs, scores=scores, best=keys,
        beams=beams, vocab=vocab, chunks=chunks, vectors=selection.vectors, k=k,
    )  # fmt: skip
    depth = _depth(k, chunks)
    if not rate:
        return {"lists": keys, "count": beams * chunks, "depth": _depth(k, beams * chunks), "beam_depth": depth}
    # The diversity term depends on a candidate's rank in its beam, so the lists of each beam are merged first.
    ranked = empty((rows * k,), "int64")
    launch(
        _merge.variant(selection.groups), rows, threads,
        why=f"{selection.why}; a pass for the ranks in each beam, which diversity_rate needs",
        lists=keys, values=None, ids=None, best=ranked,
        count=chunks, k=k, depth=depth, beam_depth=depth, diversity_rate=rate,
    )  # fmt: skip
    return {"lists": ranked, "count": beams, "depth": _depth(k, beams), "beam_depth": _depth(k, beams)}


def _topk_results(log_probs: Any, k: int, **_: Any) -> list[Result]:
    return [Result((log_probs.shape[0], k), dtype, "[batch, k]") for dtype in ("float32", "int32")]


@op(twin.beam_topk, "values, ids", _topk_results)
def beam_topk(
    log_probs: AnyArray,
    k: int,
    *,
    diversity_rate: float = 0.0,
    out: tuple[AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Find the k best continuations of each batch entry, over all its beams and the whole vocabulary.

    Args:
        log_probs: [batch, beams, vocab], float32, float16 or bfloat16, contiguous, such as log-probabilities plus the
            score of their beam. beams * vocab < 2**31.
        k: at most 128 and beams * vocab.
        diversity_rate: added r times, in float32, to the r-th best candidate of each beam, for r from 0 to
            k - 1. As in FasterTransformer, a negative rate gives the penalty of Li, Monroe and Jurafsky
            (arXiv:1611.08562).
        out: a pair (values, ids) to write into, which may not overlap `log_probs`.
        variant: "narrow" for k up to 16, "wide" for any k; "auto" chooses.

    Returns (values, ids), best first; ties go to the lower id. values are float32 [batch, k], including the diversity
    term. ids are int32 [batch, k], with beam = id // vocab and token = id % vocab. NaN counts as -inf, and -0 as 0.

    Raises ValueError or TypeError for arguments that do not fit. The two stages are FasterTransformer's
    `topk_stage_1_opt3` and `topk_stage_2_opt3`.
    """
    _check_log_probs(log_probs)
    if type(k) is not int:
        k = check.integer("k", k, 1)
    batch, beams, vocab = log_probs.shape
    selection = _selection(log_probs.dtype, batch, beams, vocab, k, variant)
    rate = _rate(diversity_rate)
    values, ids = _outputs(out, log_probs, "log_probs", _topk_results(log_probs, k), "values, ids")
    if log_probs.on_host:
        return run_twin(variant, TOPK_VARIANTS)
    if batch:
        lists = _select(log_probs, None, k, selection, rate)
        launch(
            _merge.variant(selection.groups), batch, _merge.constant("THREADS"),
            why=f"{selection.why}; last pass, which merges the lists of a batch entry",
            **lists, values=values, ids=ids, best=None, k=k, diversity_rate=0.0,
        )  # fmt: skip
    return values, ids


_STATE = (
    ("scores", "float32"),
    ("finished_scores", "float32"),
    ("finished_lengths", "int32"),
    ("finished_ids", "int32"),
    ("finished_parents", "int32"),
)
_STEP_RESULTS = (("ids", "int32"), ("parents", "int32"), *_STATE, ("done", "bool"))


def _step_results(log_probs: Any, *_: Any, **__: Any) -> list[Result]:
    batch, beams, _ = log_probs.shape
    done = Result((batch,), "bool", "[batch]")
    return [Result((batch, beams), dtype, "[batch, beams]") for _, dtype in _STEP_RESULTS[:-1]] + [done]


def _check_ends(end_id: Any) -> tuple[int, ...]:
    """Return the ids of the end tokens, sorted and without duplicates."""
    if hasattr(end_id, "__index__"):
        return (check.integer("end_id", end_id, -(2**31), 2**31 - 1),)
    most = _step.constant("MAX_ENDS")
    if not isinstance(end_id, (tuple, list)) or not 1 <= len(set(end_id)) <= most:
        wanted = f"an integer, or a tuple or list of 1 to {most} of them"
        check.fail("end_id", wanted, f"{end_id!r} ({type(end_id).__name__})", TypeError)
    return tuple(sorted({check.integer("end_id", e, -(2**31), 2**31 - 1) for e in end_id}))


def _candidates(beams: int, vocab: int, end_count: int) -> int:
    """Return how many candidates a step finds, so that at least `beams` of them do not end the sequence."""
    max_k, max_beams = _step.constant("MAX_K"), _step.constant("MAX_BEAMS")
    if not 1 <= beams <= max_beams:
        check.fail("log_probs", f"of 1 to {max_beams} beams", beams)
    if vocab <= max(1, end_count):
        check.fail("log_probs", f"of more than {max(1, end_count)} tokens in the vocabulary (end_id)", vocab)
    per_beam_count = max(2, 1 + end_count)
    if per_beam_count * beams > max_k:
        check.fail("log_probs", f"of at most {max_k // per_beam_count} beams with {end_count} end ids", beams)
    return per_beam_count * beams


def _penalty(length: int, length_penalty: float) -> float:
    """Return the divisor of the log-probability of a hypothesis of this length."""
    try:
        penalty = float(length) ** length_penalty
    except OverflowError:
        penalty = float("inf")
    low, high = _PENALTY_RANGE
    if not low <= penalty <= high:
        check.fail("length_penalty", f"such that {length} ** length_penalty is in [{low}, {high}]", length_penalty)
    return penalty


@op(
    twin.beam_search_step,
    "ids, parents, new_scores, new_finished_scores, new_finished_lengths, new_finished_ids, new_finished_parents, "
    "new_done",
    _step_results,
)
def beam_search_step(
    log_probs: AnyArray,
    scores: AnyArray,
    finished_scores: AnyArray,
    finished_lengths: AnyArray,
    finished_ids: AnyArray,
    finished_parents: AnyArray,
    done: AnyArray,
    step: int | AnyArray,
    max_steps: int,
    end_id: int | Sequence[int],
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str | None = False,  # the operator takes None for "never"
    diversity_rate: float = 0.0,
    out: tuple[AnyArray, ...] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, ...]:
    """Run one step of a beam search, from the log-probabilities of the next token to the next beams.

    The search keeps `beams` running beams and a pool of the `beams` best finished hypotheses per batch entry, and
    agrees token for token with transformers' `generate(num_beams=...)`. (With one beam pass `early_stopping=True`.) The
    step finds the max(2, 1 + number of end tokens) * beams best continuations. The best `beams` continuations without
    an end token become the running beams. If one of the best `beams` continuations ends with an end token, it enters
    the pool, with the score log-probability / length ** length_penalty. In the last step all continuations count as
    ended.

    Args:
        log_probs: [batch, beams, vocab], float32, float16 or bfloat16, contiguous: the log-probabilities of the next
            token, without the score of the beam.
        scores: float32 [batch, beams], the log-probabilities of the running beams; before the first step 0 for the
            first beam and -inf for the others, because all beams are equal.
        finished_scores: float32 [batch, beams], the pool, best first; -inf before the first step.
        finished_lengths: int32 [batch, beams], the tokens of each finished hypothesis, including the end token; 0 for
            an empty entry, as before the first step.
        finished_ids: int32 [batch, beams], the last token of each finished hypothesis.
        finished_parents: int32 [batch, beams], the beam that this token continues.
        done: bool [batch], whether the pool can no longer change; False before the first step.
        step: the number of tokens that the beams have, below max_steps. An int, or an int32 array [1] or [] on the
            device of `log_probs`, which the kernel clamps, so that one captured CUDA graph can run every step.
        max_steps: the largest number of tokens of a hypothesis.
        end_id: one or up to 8 ids of tokens that end a hypothesis. An id outside of the vocabulary ends none.
        length_penalty: a positive number favors long hypotheses, because scores are negative.
        early_stopping: when a batch entry is done. True: when the pool is full. False: when the pool is full and the
            best running beam would not enter it, because its log-probability / length ** length_penalty is at most the
            worst score of the pool. "never" (or None): as False, but with max_steps as the length if length_penalty >
            0.
        diversity_rate: as in `beam_topk`. It affects which continuations are chosen, but not their scores.
        out: eight arrays for the results. They may be the arrays of the state, and rows of the [max_steps, batch,
            beams] arrays that `gather_tree` reads.
        variant: as in `beam_topk`, where k is the number of continuations that the step finds.

    Returns (ids, parents, scores, finished_scores, finished_lengths, finished_ids, finished_parents, done). ids and
    parents are int32 [batch, beams]: the new token of each running beam, and the beam that it continues. All others are
    the new state, so a loop is `ids[step], parents[step], *state = beam_search_step(log_probs, *state, step, ...)`. At
    the end `gather_tree(ids, parents, finished_lengths, end_id, last_ids=finished_ids, last_parents=finished_parents)`
    returns the tokens of the pool.

    A NaN counts as -inf, and continuations with a score of -inf never enter the pool. A step takes at most 64 beams and
    finds at most 128 continuations. The vocabulary must have more tokens than there are end ids. Errors are as in
    `beam_topk`.
    """
    _check_log_probs(log_probs)
    batch, beams, vocab = log_probs.shape
    end_ids = _check_ends(end_id)
    k = _candidates(beams, vocab, len(end_ids))
    selection = _selection(log_probs.dtype, batch, beams, vocab, k, variant)
    max_steps = check.integer("max_steps", max_steps, 1, 2**31 - 1)
    device_step = isinstance(step, Array)
    length_penalty = check.number("length_penalty", length_penalty)
    rate = _rate(diversity_rate)
    never = early_stopping is None or early_stopping == "never"
    if not (never or early_stopping is False or early_stopping is True):
        check.fail("early_stopping", "False, True, None or 'never'", repr(early_stopping))
    is_furthest = never and length_penalty > 0
    device_fields: dict[str, Any] = {"max_steps": max_steps, "length_penalty": length_penalty, "step": None}
    if device_step:
        expect_one("step", step, log_probs, "log_probs", "int32")
        # The penalties of lengths 1 and max_steps bound all penalties. The penalty of length 1 is 1 and needs no check.
        furthest = _penalty(max_steps, length_penalty)
        device_fields["step"], length, last, penalty = step, 0, 0, 0.0
    else:
        length = check.integer("step", step, 0, max_steps - 1, "below max_steps") + 1
        last, penalty = int(length == max_steps), _penalty(length, length_penalty)
        furthest = _penalty(max_steps, length_penalty) if is_furthest else penalty

    state = (scores, finished_scores, finished_lengths, finished_ids, finished_parents)
    for (name, dtype), array in zip(_STATE, state, strict=True):
        expect(name, array, log_probs, "log_probs", (dtype,), (batch, beams), "[batch, beams]")
    expect("done", done, log_probs, "log_probs", ("bool",), (batch,), "[batch]")
    names = [name for name, _ in _STEP_RESULTS]
    out = _outputs(out, log_probs, "log_probs", _step_results(log_probs), ", ".join(names))
    if log_probs.on_host:
        return run_twin(variant, TOPK_VARIANTS)
    if batch:
        lists = _select(log_probs, scores, k, selection, rate)
        launch(
            _step.variant(selection.groups, *[True] * device_step), batch, _step.constant("THREADS"),
            why=f"{selection.why}; last pass, which merges the lists and steps; {_why_step(device_step)}",
            **lists, log_probs=log_probs, **dict(zip(names[2:], (*state, done), strict=True)),
            **{f"new_{name}": array for name, array in zip(names, out, strict=True)},
            k=k, beams=beams, vocab=vocab, dtype=DTYPES.index(log_probs.dtype), diverse=rate != 0,
            length=length, last=last, stop_when_full=early_stopping is True, end_count=len(end_ids),
            end_ids=(*end_ids, *(0,) * (_step.constant("MAX_ENDS") - len(end_ids))),
            penalty=penalty, furthest_penalty=0.0 if device_step and not is_furthest else furthest, **device_fields,
        )  # fmt: skip
    return out


def _tree_results(ids: Any, *_: Any, **__: Any) -> Result:
    return Result(tuple(ids.shape), "int32", "[max_steps, batch, beams]")


@op(twin.gather_tree, "tokens", _tree_results)
def gather_tree(
    ids: AnyArray, parents: AnyArray, lengths: AnyArray | None, end_id: int,
    *, last_ids: AnyArray | None = None, last_parents: AnyArray | None = None, out: AnyArray | None = None,
) -> AnyArray:  # fmt: skip
    """Return the tokens of each beam, from the tokens and parents of all steps.

    Args:
        ids: int32 [max_steps, batch, beams], contiguous: the token that each beam got in each step.
        parents: int32 of the same shape, the beam that each token continues; clamped to the beams.
        lengths: int32 [batch] or [batch, beams], the number of steps to use, clamped to [0, max_steps]; None for all.
        end_id: fills the result after the first end_id of a beam, and from the beam's length on.
        last_ids, last_parents: both or neither, int32 [batch, beams]: they replace the token and the parent of the last
            step of each beam (step lengths - 1), for the finished hypotheses of `beam_search_step`.
        out: int32 like ids, to write into; not ids or parents themselves.

    Returns int32 [max_steps, batch, beams]. At most 64 beams. TensorFlow Addons' `gather_tree` does the same, and names
    `lengths` "max_sequence_lengths". Errors are as in `beam_topk`.
    """
    shape = expect_array("ids", ids, symbols=("max_steps", "batch", "beams")).shape
    (max_steps, batch, beams), most = shape, _tree.constant("MAX_BEAMS")
    if not 1 <= beams <= most:
        check.fail("ids", f"of 1 to {most} beams", beams)
    if max(max_steps, batch) > 2**31 - 1:
        check.fail("ids", "of less than 2**31 steps and batch entries", list(shape))
    for name, array in (("ids", ids), ("parents", parents)):
        expect(name, array, ids, "ids", ("int32",), shape, "[max_steps, batch, beams]")
    per_beam = len(getattr(lengths, "shape", ())) == 2
    if lengths is not None and not per_beam:
        expect("lengths", lengths, ids, "ids", ("int32",), (batch,), "[batch]")
    if (last_ids is None) != (last_parents is None):
        missing = "last_ids" if last_ids is None else "last_parents"
        check.fail(missing, "given where the other one of last_ids and last_parents is", "None")
    per_beams = {"lengths": lengths if per_beam else None, "last_ids": last_ids, "last_parents": last_parents}
    for name, array in per_beams.items():
        if array is not None:
            expect(name, array, ids, "ids", ("int32",), (batch, beams), "[batch, beams]")
    end_id = check.integer("end_id", end_id, -(2**31), 2**31 - 1)
    out = outputs(out, ids, "ids", _tree_results(ids))
    if ids.on_host:
        return run_twin()
    if max_steps and batch:
        launch(
            _tree.variant(_TREE_ENTRIES), batch, _tree.constant("THREADS"),
            why=f"one kernel for all sizes: a block per batch entry, {_TREE_ENTRIES} tokens in shared memory at a time",
            ids=ids, parents=parents, lengths=lengths, last_ids=last_ids, last_parents=last_parents, out=out,
            steps=max_steps, batch=batch, beams=beams, length_per_beam=per_beam, end_id=end_id,
        )  # fmt: skip
    return out


def _overlap(one: int, other: int, size: int) -> bool:
    return one < other + size and other < one + size


def _expect_placed(size: int, keys: int, values: int, *results: int) -> None:
    """Raise ValueError if a result at these addresses overlaps a cache or another result. A result may be the cache
    that it replaces."""
    caches = keys, values
    for i, address in enumerate(results):
        in_place = address == caches[i] and not _overlap(address, caches[1 - i], size)
        if not in_place and any(_overlap(address, other, size) for other in (*caches, *results[:i])):
            wanted = "the cache itself or clear of both caches and of the other result"
            check.fail(f"out[{i}]", wanted, "an overlap")


def _cache_results(key_cache: Any, value_cache: Any, parents: Any, step: Any, **_: Any) -> list[Result]:
    shape = (key_cache.shape[0] if hasattr(step, "shape") else step, *key_cache.shape[1:])
    return [Result(shape, dtype_name(key_cache), "[max_steps, batch * beams, heads, dim]")] * 2


@op(twin.update_kv_cache, "keys, values", _cache_results)
def update_kv_cache(
    key_cache: AnyArray, value_cache: AnyArray, parents: AnyArray, step: int | AnyArray,
    *, out: tuple[AnyArray, AnyArray] | None = None, variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:  # fmt: skip
    """Reorder the cached keys and values, so that each beam gets the cache entries of its parent.

    Args:
        key_cache: [max_steps, batch * beams, heads, dim], contiguous, as in `masked_attention`; float32, float16,
            bfloat16, an 8-bit float, or uint8.
        value_cache: the same shape and dtype.
        parents: int32 [batch, beams], the beam of the same batch entry that each beam continues; clamped to the beams.
        step: the number of entries to reorder, at most max_steps; an int or an array, as in `beam_search_step`.
        out: a pair of arrays to write into: arrays like the caches, or the caches themselves. Only the first `step`
            entries are written. In place, a beam that is its own parent is not copied.
        variant: "vector" moves 16 bytes at a time, "scalar" single elements, and "auto" as many bytes as possible.

    Returns `out`, or two new arrays [step, batch * beams, heads, dim]. If `step` is an array, the new arrays are
    [max_steps, ...], and entries from `step` on are undefined. At most 64 beams. Errors are as in `beam_topk`. A result
    may be the cache that it replaces. Any other overlap with a cache is an error.
    """
    symbols = ("max_steps", "batch * beams", "heads", "dim")
    max_steps, _, heads, dim = expect_array("key_cache", key_cache, CACHE_DTYPES, symbols).shape
    check.dimensions("parents", getattr(parents, "shape", ()), ("batch", "beams"))
    (batch, beams), most = parents.shape, _cache.constant("MAX_BEAMS")
    if not 1 <= beams <= most:
        check.fail("parents", f"of 1 to {most} beams", beams)
    shape, dtypes = (max_steps, batch * beams, heads, dim), (key_cache.dtype,)
    for name, array in (("key_cache", key_cache), ("value_cache", value_cache)):
        expect(name, array, key_cache, "key_cache", dtypes, shape, f"[{', '.join(symbols)}]")
    expect("parents", parents, key_cache, "key_cache", ("int32",), (batch, beams), "[batch, beams]")
    device_step = isinstance(step, Array)
    if device_step:
        expect_one("step", step, key_cache, "key_cache", "int32")
    steps = max_steps if device_step else check.integer("step", step, 0, max_steps, "max_steps")
    check.one_of("variant", variant, CACHE_VARIANTS)
    item_size = key_cache.item_size
    row_bytes = heads * dim * item_size
    results = _cache_results(key_cache, value_cache, parents, steps if out is None else max_steps)
    new = _outputs(out, key_cache, "key_cache", results, "keys, values")
    if out is not None:
        size = max_steps * batch * beams * row_bytes
        check_each_call(_expect_placed, size, key_cache, value_cache, *new)
    if key_cache.on_host:
        return run_twin(variant, CACHE_VARIANTS)
    alignment = min(x.alignment for x in (key_cache, value_cache, *new))
    width = next(w for w in (16, 8, 4, 2, 1) if alignment % w == 0 and row_bytes % w == 0)
    if variant == "vector" and width < 16:
        check.fail("variant", "'auto' or 'scalar' where rows are not whole 16-byte vectors", repr(variant))
    if variant == "scalar":
        width = item_size
    vectors_per_row = row_bytes // width
    if vectors_per_row and batch and steps:
        threads = _cache.constant("THREADS")
        columns = min(vectors_per_row, threads * _cache.constant("LOADS") // beams)
        tiles = ceil_div(vectors_per_row, columns)
        blocks_per_step = 2 * batch * tiles
        if steps > _MAX_BLOCKS // blocks_per_step or beams * vectors_per_row > 2**31 - 1:
            check.fail("key_cache", f"of at most {_MAX_BLOCKS} tiles in step entries", steps * blocks_per_step)
        blocks = steps * blocks_per_step
        if device_step:
            blocks = min(blocks, _RESIDENT_BLOCKS * key_cache.gpu.multiprocessors)
        why = f"{asked(variant) or why_width(width, 'the rows of the caches')}; {_why_step(device_step)}"
        launch(
            _cache.variant(width, *[True] * device_step), blocks, threads, why=why,
            step=step if device_step else None,
            keys=key_cache, values=value_cache, new_keys=new[0], new_values=new[1], parents=parents,
            steps=steps, batch=batch, beams=beams, vectors_per_row=vectors_per_row, columns=columns, tiles=tiles,
        )  # fmt: skip
    return new
