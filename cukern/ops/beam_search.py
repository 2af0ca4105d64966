"""Beam search: the best continuations of all beams, the books of a step, and what follows from the parents."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.reference import beam_search as twin
from cukern.runtime import arrays, check
from cukern.runtime.kernel import Kernel, Variant

__all__ = ["beam_search_step", "beam_topk", "gather_tree", "update_kv_cache"]

DTYPES = ("float32", "float16", "bfloat16")
CACHE_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2", "uint8")
TOPK_VARIANTS = ("auto", "narrow", "wide")
CACHE_VARIANTS = ("auto", "vector", "scalar")
MAX_K = 128
MAX_BEAMS = 64
MAX_ENDS = 8
MAX_CANDIDATES = 2**31 - 1  # ids into beams * vocab are int32
_MAX_BLOCKS = 2**31 - 1
_THREADS = 256  # THREADS, LOADS, CACHE_THREADS, CACHE_LOADS and TREE_THREADS of the template
_LOADS = 8
_CACHE_THREADS = 256
_CACHE_LOADS = 4
_TREE_THREADS = 128
_TREE_ENTRIES = 2048
#: Groups of threads from whose maxima the bound is found, and the most results they are good for.
_GROUPS = {"narrow": (32, 16), "wide": (_THREADS, MAX_K)}
#: Few rows are cut into more chunks, until so many blocks keep a GPU busy.
_BLOCKS_WANTED = 512
#: Whole lines of memory.
_VECTORS_PER_LINE = 8
#: float32 holds these and their inverses with room to spare.
_PENALTY_RANGE = (1e-30, 1e30)
_LARGEST_RATE = 1e30

_chunks = Kernel("beam_search", "topk_chunks", "3P5i")
_merge = Kernel("beam_search", "topk_merge", "4P4if")
_step = Kernel("beam_search", "beam_step", "16P20i2f")
_tree = Kernel("beam_search", "gather_tree", "6P5i")
_cache = Kernel("beam_search", "reorder_cache", "5P6i")

for _name, (_groups, _) in _GROUPS.items():
    _chunks.specialized += [_chunks.variant(arrays.CUDA_TYPE[dtype], _groups).instance for dtype in DTYPES]
    _merge.specialized.append(_merge.variant(_groups).instance)
    _step.specialized.append(_step.variant(_groups).instance)
_tree.specialized = [_tree.variant(_TREE_ENTRIES).instance]
_cache.specialized = [_cache.variant(width).instance for width in (16, 8, 4, 2, 1)]
for _kernel in (_chunks, _merge, _step, _tree):
    _kernel.at_import = _kernel.specialized
_cache.at_import = [_cache.variant(16).instance]


class _Plan(NamedTuple):
    """How the candidates of a batch entry are cut up, and by which kernels they are selected."""

    chunks: int  # of a row
    vectors: int  # of 16 bytes in a chunk
    select: Variant
    merge: Variant
    step: Variant
    depth: int
    beam_depth: int


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _depth(k: int, lists: int) -> int:
    """How deep in `lists` lists of k entries the entries tell most about the k-th of all."""
    return min(max(1, _ceil_div(2 * k, lists)), k)


@functools.lru_cache(maxsize=1024)
def _plan(dtype: str, batch: int, beams: int, vocab: int, k: int, variant: str) -> _Plan:
    """Check the sizes against each other and choose the kernels and their grids."""
    check.one_of("variant", variant, TOPK_VARIANTS)
    if beams < 1 or vocab < 1 or beams * vocab > MAX_CANDIDATES:
        wanted = f"of 1 to {MAX_CANDIDATES} candidates (beams * vocab)"
        check.fail("log_probs", wanted, f"{beams} * {vocab}")
    check.integer("k", k, 1, min(MAX_K, beams * vocab), f"the candidates, at most {MAX_K}")
    name = ("narrow" if k <= _GROUPS["narrow"][1] else "wide") if variant == "auto" else variant
    groups, most = _GROUPS[name]
    if k > most:
        check.fail("variant", f"'wide' for more than {most} results", repr(variant))
    rows, whole = batch * beams, vocab // (16 // arrays.ITEM_SIZE[dtype])
    fewest, finest = _ceil_div(whole, _THREADS * _LOADS), _ceil_div(whole, _THREADS)
    chunks = max(1, fewest, min(_ceil_div(_BLOCKS_WANTED, max(rows, 1)), finest))
    lines = max(1, _ceil_div(whole, chunks * _VECTORS_PER_LINE))
    vectors = lines * _VECTORS_PER_LINE
    chunks = max(1, _ceil_div(whole, vectors))
    if rows * chunks > _MAX_BLOCKS:
        check.fail("log_probs", f"of at most {_MAX_BLOCKS} chunks of {vectors} * 16 bytes", rows * chunks)
    return _Plan(
        chunks,
        vectors,
        _chunks.variant(arrays.CUDA_TYPE[dtype], groups),
        _merge.variant(groups),
        _step.variant(groups),
        _depth(k, beams * chunks),
        _depth(k, chunks),
    )


def _check_log_probs(log_probs: Any) -> tuple[arrays.Library, int | None, str]:
    library, device, dtype = arrays.leader("log_probs", log_probs, DTYPES, ("batch", "beams", "vocab"))
    arrays.contiguous("log_probs", log_probs, library)
    return library, device, dtype


def _rate(diversity_rate: Any) -> float:
    rate = check.number("diversity_rate", diversity_rate)
    if abs(rate) > _LARGEST_RATE:
        check.fail("diversity_rate", f"in [{-_LARGEST_RATE}, {_LARGEST_RATE}]", rate)
    return rate


def _check_outs(out: Any, names: str, count: int) -> Any:
    if not isinstance(out, (tuple, list)) or len(out) != count:
        got = f"{len(out)} arrays" if isinstance(out, (tuple, list)) else type(out).__name__
        check.fail("out", f"{count} arrays ({names})", got, TypeError)
    return out


def _lists(
    library: arrays.Library,
    device: int,
    stream: int,
    log_probs: Any,
    scores: int,
    k: int,
    plan: _Plan,
    rate: float,
) -> tuple[Any, int, int, int]:
    """Launch what comes before the beams are merged: the keys, how many lists of k they are, and the two depths."""
    batch, beams, vocab = log_probs.shape
    rows, block = batch * beams, (_THREADS, 1, 1)
    keys = library.empty((rows * plan.chunks * k,), "int64", log_probs)
    plan.select.launch(
        device,
        stream,
        (rows * plan.chunks, 1, 1),
        block,
        0,
        library.address(log_probs),
        scores,
        library.address(keys),
        beams,
        vocab,
        plan.chunks,
        plan.vectors,
        k,
    )
    if not rate:
        return keys, beams * plan.chunks, plan.depth, plan.beam_depth
    # A beam's candidates get their bonus by rank, so each beam is merged by itself first.
    ranked = library.empty((rows * k,), "int64", log_probs)
    depth = plan.beam_depth
    lists = (library.address(keys), 0, 0, library.address(ranked), plan.chunks, k, depth, depth, rate)
    plan.merge.launch(device, stream, (rows, 1, 1), block, 0, *lists)
    return ranked, beams, _depth(k, beams), _depth(k, beams)


@arrays.takes_dlpack
def beam_topk(
    log_probs: Any,
    k: int,
    *,
    diversity_rate: float = 0.0,
    out: tuple[Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """The k best continuations of each batch entry, over all its beams and the whole vocabulary.

    Args:
        log_probs: [batch, beams, vocab], float32, float16 or bfloat16, contiguous: what orders the candidates, such as
            log-probabilities with the score of their beam added. beams * vocab < 2**31.
        k: how many, at most 128 and beams * vocab.
        diversity_rate: if not 0, the r-th best candidate of a beam (r from 0, of its k best) gets diversity_rate * r
            added, in float32, before the beams are compared. As in FasterTransformer the term is added: the penalty of
            Li, Monroe and Jurafsky (arXiv:1611.08562) is a negative rate.
        out: a pair (values, ids) to write into.
        variant: "narrow" for k up to 16, "wide" for any k; "auto" chooses.

    Returns (values, ids): float32 [batch, k] with the diversity term, exact without one for every dtype, and int32
    [batch, k], positions in beams * vocab (beam = id // vocab, token = id % vocab). Best first, ties to the lower id.
    NaN counts as -inf and comes back as -inf; -0 is 0. Where all that is left is -inf, the lowest ids follow.

    Raises ValueError or TypeError for what does not fit. The two stages are those of FasterTransformer's
    `topk_stage_1_opt3` and `topk_stage_2_opt3`; a result of `out` must not overlap `log_probs`.
    """
    library, device, dtype = _check_log_probs(log_probs)
    batch, beams, vocab = log_probs.shape
    if type(k) is not int:
        k = check.integer("k", k, 1)
    plan = _plan(dtype, batch, beams, vocab, k, variant)
    rate = _rate(diversity_rate)
    if out is not None:
        values, ids = _check_outs(out, "values, ids", 2)
        for name, array, kind in (("out[0]", values, "float32"), ("out[1]", ids, "int32")):
            arrays.expect(name, array, "log_probs", library, device, (kind,), (batch, k), "[batch, k]")
    if device is None:
        check.host_variant(variant, TOPK_VARIANTS)
        return arrays.on_host(twin.beam_topk, log_probs, log_probs, k, diversity_rate=rate, out=out)
    if out is None:
        values = library.empty((batch, k), "float32", log_probs)
        ids = library.empty((batch, k), "int32", log_probs)
    if batch:
        stream = library.stream(device)
        keys, count, depth, beam_depth = _lists(library, device, stream, log_probs, 0, k, plan, rate)
        plan.merge.launch(
            device,
            stream,
            (batch, 1, 1),
            (_THREADS, 1, 1),
            0,
            library.address(keys),
            library.address(values),
            library.address(ids),
            0,
            count,
            k,
            depth,
            beam_depth,
            0.0,
        )
    return out if out is not None else (values, ids)


_STATE = (
    ("scores", "float32"),
    ("finished_scores", "float32"),
    ("finished_lengths", "int32"),
    ("finished_ids", "int32"),
    ("finished_parents", "int32"),
)
_STEP_RESULTS = (("ids", "int32"), ("parents", "int32"), *_STATE, ("done", "bool"))


def _check_ends(end_id: Any) -> tuple[int, ...]:
    if hasattr(end_id, "__index__"):
        return (check.integer("end_id", end_id, -(2**31), 2**31 - 1),)
    if not isinstance(end_id, (tuple, list)) or not 1 <= len(set(end_id)) <= MAX_ENDS:
        wanted = f"an integer, or a tuple or list of 1 to {MAX_ENDS} of them"
        check.fail("end_id", wanted, f"{end_id!r} ({type(end_id).__name__})", TypeError)
    return tuple(sorted({check.integer("end_id", e, -(2**31), 2**31 - 1) for e in end_id}))


def _penalty(length: int, length_penalty: float) -> float:
    try:
        penalty = float(length) ** length_penalty
    except OverflowError:
        penalty = float("inf")
    low, high = _PENALTY_RANGE
    if not low <= penalty <= high:
        check.fail("length_penalty", f"such that {length} to it is in [{low}, {high}]", length_penalty)
    return penalty


@arrays.takes_dlpack
def beam_search_step(
    log_probs: Any,
    scores: Any,
    finished_scores: Any,
    finished_lengths: Any,
    finished_ids: Any,
    finished_parents: Any,
    done: Any,
    step: int,
    max_steps: int,
    end_id: int | Sequence[int],
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str | None = False,
    diversity_rate: float = 0.0,
    out: tuple[Any, ...] | None = None,
    variant: str = "auto",
) -> tuple[Any, ...]:
    """One step of a beam search: from the log-probabilities of the next token to the next beams.

    The search keeps `beams` running beams and a pool of the `beams` best finished hypotheses per batch entry, as
    transformers' `generate(num_beams=...)` does, and agrees with it token for token. (With one beam that is
    `early_stopping=True`: transformers then searches greedily and stops at the first end token.) Of the
    max(2, 1 + end tokens) * beams best continuations, those among the best `beams` that end go to the pool, with the
    score log-probability / length ** length_penalty; the best `beams` of those that do not end run on. In the last step
    all end.

    Args:
        log_probs: [batch, beams, vocab], float32, float16 or bfloat16, contiguous: the log-probabilities of the next
            token after each running beam, without the score of the beam.
        scores: float32 [batch, beams], the log-probabilities of the running beams. Before the first step: 0 for the
            first beam and -inf (or very low) for the others, which are the same beam then.
        finished_scores: float32 [batch, beams], the pool, best first; -inf before the first step.
        finished_lengths: int32 [batch, beams], how many tokens each has, the end token included; 0 for an empty place,
            as all are before the first step.
        finished_ids: int32 [batch, beams], the last token of each.
        finished_parents: int32 [batch, beams], the beam that the token was added to in that step.
        done: bool [batch], whether nothing can change the pool any more; False before the first step.
        step: from 0 on, below max_steps; the tokens that the beams have already.
        max_steps: the most tokens of a hypothesis.
        end_id: the token, or up to 8 of them, that ends a hypothesis; one outside of the vocabulary for none.
        length_penalty: > 0 favors long hypotheses, for the scores are negative.
        early_stopping: when a batch entry is done. False: when the pool is full, and the best running beam divided by
            the penalty of its present length is no better than the worst in it. True: when the pool is full. "never"
            (or None): as False, but with the length it could still reach if length_penalty > 0.
        diversity_rate: as in `beam_topk`; it decides what is chosen and has no part in the scores.
        out: eight arrays for the results. They may be the state's own, which are then updated in place, and rows of the
            [max_steps, batch, beams] arrays that `gather_tree` reads.
        variant: as in `beam_topk`, with the candidates for k.

    Returns (ids, parents, scores, finished_scores, finished_lengths, finished_ids, finished_parents, done): the new
    token of each running beam and the beam it continues, int32 [batch, beams], and the new state, so that a loop is
    `ids[step], parents[step], *state = beam_search_step(log_probs, *state, step, ...)`. Nothing waits for the GPU;
    `done` says when it is worth stopping. At the end `gather_tree(ids, parents, finished_lengths, end_id,
    last_ids=finished_ids, last_parents=finished_parents)` has the tokens of the pool.

    A NaN counts as -inf, and what scores -inf never enters the pool. At most 64 beams and 128 candidates; more tokens
    in the vocabulary than end ids. Raises ValueError or TypeError for what does not fit.
    """
    library, device, dtype = _check_log_probs(log_probs)
    batch, beams, vocab = log_probs.shape
    ends = _check_ends(end_id)
    if not 1 <= beams <= MAX_BEAMS:
        check.fail("log_probs", f"of 1 to {MAX_BEAMS} beams", beams)
    if vocab <= max(1, len(ends)):
        check.fail("log_probs", f"of more than {max(1, len(ends))} tokens in the vocabulary (end_id)", vocab)
    k = max(2, 1 + len(ends)) * beams
    if k > MAX_K:
        wanted = f"of at most {MAX_K // max(2, 1 + len(ends))} beams with {len(ends)} end ids"
        check.fail("log_probs", wanted, beams)
    plan = _plan(dtype, batch, beams, vocab, k, variant)
    max_steps = check.integer("max_steps", max_steps, 1, 2**31 - 1)
    step = check.integer("step", step, 0, max_steps - 1, "below max_steps")
    length_penalty = check.number("length_penalty", length_penalty)
    rate = _rate(diversity_rate)
    never = early_stopping is None or early_stopping == "never"
    if not (never or early_stopping is False or early_stopping is True):
        check.fail("early_stopping", "False, True, None or 'never'", repr(early_stopping))
    penalty = _penalty(step + 1, length_penalty)
    furthest = _penalty(max_steps, length_penalty) if never and length_penalty > 0 else penalty

    state = (scores, finished_scores, finished_lengths, finished_ids, finished_parents)
    shape, symbols = (batch, beams), "[batch, beams]"
    for (name, kind), array in zip(_STATE, state, strict=True):
        arrays.expect(name, array, "log_probs", library, device, (kind,), shape, symbols)
    arrays.expect("done", done, "log_probs", library, device, ("bool",), (batch,), "[batch]")
    if out is not None:
        _check_outs(out, ", ".join(name for name, _ in _STEP_RESULTS), len(_STEP_RESULTS))
        for i, ((_, kind), array) in enumerate(zip(_STEP_RESULTS, out, strict=True)):
            expected = ((batch,), "[batch]") if kind == "bool" else (shape, symbols)
            arrays.expect(f"out[{i}]", array, "log_probs", library, device, (kind,), *expected)
    if device is None:
        check.host_variant(variant, TOPK_VARIANTS)
        sizes = (step, max_steps, ends)
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "diversity_rate": rate}
        return arrays.on_host(twin.beam_search_step, log_probs, log_probs, *state, done, *sizes, out=out, **options)
    if out is None:
        out = tuple(library.empty((batch,) if kind == "bool" else shape, kind, log_probs) for _, kind in _STEP_RESULTS)
    if batch:
        stream = library.stream(device)
        keys, count, depth, beam_depth = _lists(
            library, device, stream, log_probs, library.address(scores), k, plan, rate
        )
        plan.step.launch(
            device,
            stream,
            (batch, 1, 1),
            (_THREADS, 1, 1),
            0,
            library.address(keys),
            library.address(log_probs),
            *map(library.address, state),
            library.address(done),
            *map(library.address, out),
            count,
            k,
            depth,
            beam_depth,
            beams,
            vocab,
            DTYPES.index(dtype),
            rate != 0,
            step + 1,
            step + 1 == max_steps,
            early_stopping is True,
            len(ends),
            *ends,
            *(0,) * (MAX_ENDS - len(ends)),
            penalty,
            furthest,
        )
    return out


@arrays.takes_dlpack
def gather_tree(
    ids: Any,
    parents: Any,
    lengths: Any,
    end_id: int,
    *,
    last_ids: Any = None,
    last_parents: Any = None,
    out: Any = None,
) -> Any:
    """The tokens of each beam, from the tokens and parents of all steps.

    Args:
        ids: int32 [max_steps, batch, beams], contiguous: the token that each beam got in each step.
        parents: int32 of the same shape, the beam of the step before that it was added to; one that is out of range is
            taken for the nearest that is not.
        lengths: int32 [batch] or [batch, beams], how many steps count; None for all. Clamped to [0, max_steps].
        end_id: fills the result after the first end_id of a beam, and from its length on.
        last_ids, last_parents: both or neither, int32 [batch, beams]: what stands for the token and the parent of a
            beam's last step (that of its length), as for the finished hypotheses of `beam_search_step`.
        out: int32 like ids, to write into; not ids or parents themselves.

    Returns int32 [max_steps, batch, beams]. At most 64 beams. Arguments and result are those of TensorFlow Addons'
    `gather_tree`, `lengths` its `max_sequence_lengths`. Raises ValueError or TypeError for what does not fit.
    """
    library, device = arrays.place("ids", ids)
    if len(ids.shape) != 3:
        check.dimensions("ids", tuple(ids.shape), ("max_steps", "batch", "beams"))
    shape = tuple(ids.shape)
    max_steps, batch, beams = shape
    if not 1 <= beams <= MAX_BEAMS:
        check.fail("ids", f"of 1 to {MAX_BEAMS} beams", beams)
    if max(max_steps, batch) > 2**31 - 1:
        check.fail("ids", "of less than 2**31 steps and batch entries", list(shape))

    def expect(name: str, array: Any, shape: tuple[int, ...], symbols: str) -> None:
        arrays.expect(name, array, "ids", library, device, ("int32",), shape, symbols)

    expect("ids", ids, shape, "[max_steps, batch, beams]")
    expect("parents", parents, shape, "[max_steps, batch, beams]")
    if lengths is not None:
        per_beam = len(getattr(lengths, "shape", ())) == 2
        expect(
            "lengths", lengths, (batch, beams) if per_beam else (batch,), "[batch, beams]" if per_beam else "[batch]"
        )
    if (last_ids is None) != (last_parents is None):
        missing = "last_ids" if last_ids is None else "last_parents"
        check.fail(missing, "given where the other one of last_ids and last_parents is", "None")
    if last_ids is not None:
        expect("last_ids", last_ids, (batch, beams), "[batch, beams]")
        expect("last_parents", last_parents, (batch, beams), "[batch, beams]")
    end_id = check.integer("end_id", end_id, -(2**31), 2**31 - 1)
    if out is not None:
        expect("out", out, shape, "[max_steps, batch, beams]")
    if device is None:
        last = {"last_ids": last_ids, "last_parents": last_parents}
        return arrays.on_host(twin.gather_tree, ids, ids, parents, lengths, end_id, out=out, **last)
    if out is None:
        out = library.empty(shape, "int32", ids)
    if max_steps and batch:
        _tree.variant(_TREE_ENTRIES).launch(
            device,
            library.stream(device),
            (batch, 1, 1),
            (_TREE_THREADS, 1, 1),
            0,
            library.address(ids),
            library.address(parents),
            0 if lengths is None else library.address(lengths),
            0 if last_ids is None else library.address(last_ids),
            0 if last_parents is None else library.address(last_parents),
            library.address(out),
            max_steps,
            batch,
            beams,
            lengths is not None and len(lengths.shape) == 2,
            end_id,
        )
    return out


def _overlap(one: int, other: int, size: int) -> bool:
    return one < other + size and other < one + size


@arrays.takes_dlpack
def update_kv_cache(
    key_cache: Any,
    value_cache: Any,
    parents: Any,
    step: int,
    *,
    out: tuple[Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """Let the keys and values follow their beams: what the parent had cached is the beam's past.

    Args:
        key_cache: [max_steps, batch * beams, heads, dim], contiguous, as in `masked_attention`; float32, float16,
            bfloat16, an 8-bit float, or uint8.
        value_cache: the same shape and dtype.
        parents: int32 [batch, beams], the beam of the same batch entry that each beam continues; one that is out of
            range is taken for the nearest that is not.
        step: how many entries there are to move, from the first on; at most max_steps.
        out: a pair like the caches whose first `step` entries are written: other arrays, as FasterTransformer keeps two
            pairs and swaps them, or the caches themselves. In place a beam that stays where it was costs nothing.
        variant: "vector" moves 16 bytes at a time, "scalar" single elements; "auto" the most that the sizes allow.

    Returns `out`, or two new arrays [step, batch * beams, heads, dim]. At most 64 beams. Raises ValueError or TypeError
    for what does not fit, and for results that overlap the caches in part.
    """
    library, device = arrays.place("key_cache", key_cache)
    if len(key_cache.shape) != 4:
        check.dimensions("key_cache", tuple(key_cache.shape), ("max_steps", "batch * beams", "heads", "dim"))
    if len(getattr(parents, "shape", ())) != 2:
        check.dimensions("parents", tuple(getattr(parents, "shape", ())), ("batch", "beams"))
    shape, symbols = tuple(key_cache.shape), "[max_steps, batch * beams, heads, dim]"
    max_steps, _, heads, dim = shape
    batch, beams = parents.shape
    if not 1 <= beams <= MAX_BEAMS:
        check.fail("parents", f"of 1 to {MAX_BEAMS} beams", beams)
    dtype = library.dtype(key_cache)
    check.dtype("key_cache", dtype, CACHE_DTYPES)
    wanted = (max_steps, batch * beams, heads, dim)
    for name, array in (("key_cache", key_cache), ("value_cache", value_cache)):
        arrays.expect(name, array, "key_cache", library, device, (dtype,), wanted, symbols)
    arrays.expect("parents", parents, "key_cache", library, device, ("int32",), (batch, beams), "[batch, beams]")
    step = check.integer("step", step, 0, max_steps, "max_steps")
    check.one_of("variant", variant, CACHE_VARIANTS)
    if out is not None:
        _check_outs(out, "keys, values", 2)
        for i, array in enumerate(out):
            arrays.expect(f"out[{i}]", array, "key_cache", library, device, (dtype,), shape, symbols)

    item_size = arrays.ITEM_SIZE[dtype]
    row_bytes = heads * dim * item_size
    addresses = [library.address(key_cache), library.address(value_cache)]
    size = max_steps * batch * beams * row_bytes
    new = [] if out is None else [library.address(array) for array in out]
    for i, address in enumerate(new):
        in_place = address == addresses[i] and not _overlap(address, addresses[1 - i], size)
        if not in_place and any(_overlap(address, a, size) for a in (*addresses, *new[:i])):
            check.fail(f"out[{i}]", "the cache itself or clear of both caches and of the other result", "an overlap")
    if device is None:
        check.host_variant(variant, CACHE_VARIANTS)
        halves = None if out is None else (out[0][:step], out[1][:step])
        results = arrays.on_host(twin.update_kv_cache, key_cache, key_cache, value_cache, parents, step, out=halves)
        return results if out is None else out
    if out is None:
        out = tuple(library.empty((step, *shape[1:]), dtype, key_cache) for _ in range(2))
        new = [library.address(array) for array in out]
    bits = row_bytes
    for address in (*addresses, *new):
        bits |= address
    width = next(w for w in (16, 8, 4, 2, 1) if bits % w == 0)
    if variant == "vector" and width < 16:
        check.fail("variant", "'auto' or 'scalar' where rows are not whole 16-byte vectors", repr(variant))
    if variant == "scalar":
        width = item_size
    row = row_bytes // width
    if step and batch and row:
        columns = min(row, _CACHE_THREADS * _CACHE_LOADS // beams)
        tiles = _ceil_div(row, columns)
        blocks = 2 * step * batch * tiles
        if blocks > _MAX_BLOCKS or beams * row > 2**31 - 1:
            check.fail("key_cache", f"of at most {_MAX_BLOCKS} tiles in step entries", blocks)
        _cache.variant(width).launch(
            device,
            library.stream(device),
            (blocks, 1, 1),
            (_CACHE_THREADS, 1, 1),
            0,
            *addresses,
            *new,
            library.address(parents),
            step,
            batch,
            beams,
            row,
            columns,
            tiles,
        )
    return out  # type: ignore[return-value]


def _step_results(log_probs: Any) -> list[tuple[Any, tuple[int, ...], str]]:
    batch, beams, _ = log_probs.shape
    return [(log_probs, (batch,) if kind == "bool" else (batch, beams), kind) for _, kind in _STEP_RESULTS]


def _cache_results(key_cache: Any, step: int) -> list[tuple[Any, tuple[int, ...], str]]:
    return [(key_cache, (step, *key_cache.shape[1:]), str(key_cache.dtype).removeprefix("torch."))] * 2


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are. There the
#: `early_stopping` "never" is None.
TORCH_OPS: dict[str, Any] = {
    "beam_topk(Tensor log_probs, int k, *, float diversity_rate=0.0, str variant='auto') "
    "-> (Tensor values, Tensor ids)": (
        lambda log_probs, k, **_: [
            (log_probs, (log_probs.shape[0], k), "float32"),
            (log_probs, (log_probs.shape[0], k), "int32"),
        ]
    ),
    "beam_search_step(Tensor log_probs, Tensor scores, Tensor finished_scores, Tensor finished_lengths, "
    "Tensor finished_ids, Tensor finished_parents, Tensor done, int step, int max_steps, int[1] end_id, *, "
    "float length_penalty=1.0, bool? early_stopping=False, float diversity_rate=0.0, str variant='auto') "
    "-> (Tensor ids, Tensor parents, Tensor new_scores, Tensor new_finished_scores, Tensor new_finished_lengths, "
    "Tensor new_finished_ids, Tensor new_finished_parents, Tensor new_done)": (
        lambda log_probs, *_, **__: _step_results(log_probs)
    ),
    "gather_tree(Tensor ids, Tensor parents, Tensor? lengths, int end_id, *, Tensor? last_ids=None, "
    "Tensor? last_parents=None) -> (Tensor tokens)": lambda ids, *_, **__: [(ids, tuple(ids.shape), "int32")],
    "update_kv_cache(Tensor key_cache, Tensor value_cache, Tensor parents, int step, *, str variant='auto') "
    "-> (Tensor keys, Tensor values)": (
        lambda key_cache, value_cache, parents, step, **_: _cache_results(key_cache, step)
    ),
}
