"""Sampling functions in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import check
from cukern.runtime.generators import numpy_seed
from cukern.runtime.tolerance import Tolerance

TOLERANCES = {
    # exp2's argument, the scaled difference of a logit to the largest logit, is rounded four times. Its magnitude is at
    # most 126, because the kernel's exp2 turns results below 2**-126 into 0. The total error on an H200 is 6e-6 for
    # logits of magnitude 16.
    "probs": {"float32": Tolerance(relative=3e-5, absolute=2e-38)},
    # The kernel takes two hardware logarithms, of a probability and of a sum of probabilities. Their arguments are
    # between 2**-149 and 2**128, and their relative error is 2**-22. The sum adds an error of 1e-6.
    "logprobs": {"float32": Tolerance(relative=1e-6, absolute=5e-5)},
    # The kernel sums up to 2**20 float32 probabilities in another order than NumPy, then multiplies once. The error is
    # 3e-7 on an H200. A subnormal 16-bit value near a rounding boundary may round the other way.
    "renormalized": {
        "float32": Tolerance(relative=2e-6, absolute=1e-44),
        "float16": Tolerance(relative=2**-10, absolute=6e-8),
        "bfloat16": Tolerance(relative=2**-7, absolute=1e-40),
    },
}

Array = np.ndarray[Any, Any]

#: `race` divides the vocabulary into tiles of TILE ids, and a tile into 32 groups of GROUP ids. Group `lane` of tile
#: `t` has the ids `TILE * t + 128 * j + 4 * lane + c` with j < 8 and c < 4.
TILE = 1024
GROUP = 32
LARGEST = float(np.finfo(np.float32).max)
#: The largest factor for logits. At temperature 0 it gives the most likely token probability 1.
GREEDY_SCALE = 1e30


def philox(counter: Array, key: int) -> Array:
    """Return Philox4x32-10 (Salmon et al., 2011): four 32-bit numbers [..., 4] per counter, for a 64-bit key."""
    x, y, z, w = (np.asarray(counter[..., i], np.uint64) for i in range(4))
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for round in range(10):
        key_x = np.uint64(((key & 0xFFFFFFFF) + round * 0x9E3779B9) & 0xFFFFFFFF)
        key_y = np.uint64(((key >> 32) + round * 0xBB67AE85) & 0xFFFFFFFF)
        product_x, product_z = np.uint64(0xD2511F53) * x, np.uint64(0xCD9E8D57) * z
        x, y, z, w = (
            (product_z >> shift) ^ y ^ key_x,
            product_z & mask,
            (product_x >> shift) ^ w ^ key_y,
            product_x & mask,
        )
    return np.stack([x, y, z, w], axis=-1).astype(np.uint32)


class Stream(NamedTuple):
    """A row's random number stream. `place` is the row's index if all rows share a seed, else 0."""

    seed: int
    offset: int
    place: int = 0


def streams(batch: int, seed: Any, offset: Any, generator: Any) -> list[Stream]:
    seed = numpy_seed(generator) if seed is None else seed
    seeds, offsets = (np.broadcast_to(np.asarray(x, object), batch) for x in (seed, 0 if offset is None else offset))
    shared = np.size(seed) == 1
    return [Stream(int(seeds[i]), int(offsets[i]), i if shared else 0) for i in range(batch)]


def random_bits(groups: Array, round: int, stream: Stream) -> Array:
    """Return four 32-bit random numbers [n, 4] for each of `groups` [n]."""
    seed, offset = stream.seed & (2**64 - 1), stream.offset & (2**64 - 1)
    counter = np.empty((len(groups), 4), np.uint32)
    counter[:] = [0, round ^ stream.place << 8, offset & 0xFFFFFFFF, offset >> 32]
    counter[:, 0] = groups
    return philox(counter, seed)


def uniform(bits: Array) -> Array:
    return (bits >> np.uint32(8)) * 2.0**-24


class Drawn(NamedTuple):
    id: int
    valid: bool
    logprob: float


def order(x: Array) -> Array:
    """Return the ids sorted by value, largest first; of equal values the lower id is first."""
    return np.lexsort((np.arange(len(x)), -x))


def race(weights: Array, round: int, stream: Stream) -> int:
    """Sample an id with probability weights[id] / sum(weights).

    Draw an exponential random number per group of ids, and divide it by the group's total weight. The smallest quotient
    wins. Then sample an id of that group.
    """
    tiles = -(-len(weights) // TILE)
    padded = np.zeros(tiles * TILE)
    padded[: len(weights)] = weights
    groups = padded.reshape(tiles, 8, 32, 4).transpose(0, 2, 1, 3).reshape(tiles * 32, GROUP)
    bits = random_bits(np.arange(len(groups)), round, stream)
    time = -np.log1p(-(bits[:, 0] + 0.5) * 2.0**-32)
    with np.errstate(divide="ignore"):
        winner = int(np.argmax(np.log(groups.sum(axis=1)) - np.log(time)))
    shares = groups[winner]
    up_to = shares.cumsum()
    place = int(np.flatnonzero((up_to > uniform(bits[winner, 1]) * up_to[-1]) & (shares > 0))[0])
    return winner // 32 * TILE + place // 4 * 128 + winner % 32 * 4 + place % 4


def scale_of(temperature: float) -> float:
    """Return log2(e) / temperature, at most GREEDY_SCALE so that the kernel's exponents do not overflow."""
    scale = np.log2(np.e) / temperature if temperature else np.inf
    return scale if 0 < scale < GREEDY_SCALE or temperature == np.inf else GREEDY_SCALE


def weights_of(x: Array, top: float, scale: float) -> Array:
    """Return exp2((x - top) * scale). With scale 0 every finite logit has weight 1."""
    return np.exp2((x.astype(np.float64) - top) * scale) if scale else (x > -np.inf).astype(np.float64)


def draw(
    x: Array,
    temperature: float | None,
    top_k: int,
    top_p: float,
    min_p: float,
    stream: Stream,
    joint: bool,
) -> Drawn:
    """Sample a token from one row of logits, or of probabilities if `temperature` is None."""
    probs = temperature is None
    x = np.maximum(x, 0) if probs else np.minimum(x, LARGEST)
    top = float(x.max())
    if np.isnan(top) or not (0 < top <= LARGEST if probs else top >= -LARGEST):
        return Drawn(0, False, -np.inf)
    scale = 0.0 if temperature is None else scale_of(temperature)
    greedy = top_k == 1 or scale == GREEDY_SCALE
    ids = order(x)
    weights = x.astype(np.float64) if probs else weights_of(x, top, scale)
    kept = np.zeros(len(x), bool)
    kept[ids[:top_k] if 1 <= top_k < len(x) else ids] = True
    total = weights.sum() if joint else weights[kept].sum()
    if min_p > 0 and (probs or scale):
        kept &= x >= (top * min(min_p, 1) if probs else top + np.log2(min(min_p, 1)) / scale)
    id = int(ids[0])
    rank = np.empty(len(x), np.int64)
    rank[ids] = np.arange(len(x))
    round = 0
    # If the best token alone reaches top_p, choose it without a random draw.
    while not greedy and not (top_p < 1 and top_p * total <= weights[ids[0]]):
        id = race(np.where(kept, weights, 0), round, stream)
        better = rank < rank[id]
        # Accept the id if the better tokens' total probability is below top_p. Otherwise keep only those tokens.
        if not top_p < 1 or weights[better].sum() < top_p * total:
            break
        kept &= better
        round += 1
    return Drawn(id, True, float(np.log(weights[id] / weights.sum())))


def step(
    values: Array,
    probs: bool,
    randomness: tuple[Any, Any, Any],
    indices: Array | None,
    return_valid: bool,
    return_logprobs: bool,
    filter_apply_order: str = "top_k_first",
    bias: Array | None = None,
    finished: Array | None = None,
    end_id: int | None = None,
    sequence_length: Array | None = None,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
) -> Any:
    """Sample a token for each row of `values` [rows, vocab], probabilities or logits. All samplers call this function.

    `randomness` is (seed, offset, generator).
    """
    rows = np.arange(len(values)) if indices is None else np.clip(indices, 0, len(values) - 1)
    batch, vocab = len(rows), values.shape[1]
    dtype = np.int32 if indices is None else indices.dtype
    ids, valid, logprobs = np.zeros(batch, dtype), np.ones(batch, bool), np.zeros(batch, np.float32)
    parameters = (
        1.0 if temperature is None else temperature,
        vocab if top_k is None else top_k,
        1.0 if top_p is None else top_p,
        0.0 if min_p is None else min_p,
    )
    stream = streams(batch, *randomness)
    by_row = [np.broadcast_to(np.asarray(parameter, object), batch) for parameter in parameters]
    joint = filter_apply_order == "joint"
    for i in range(batch):
        if finished is not None and finished[i]:
            ids[i] = -1 if end_id is None else end_id
            continue
        x = values[rows[i]].astype(np.float32)
        if bias is not None:
            x = x + bias.astype(np.float32)
        own_temperature, k, p, own_min_p = (parameter[i] for parameter in by_row)
        kept = int(k), float(p), float(own_min_p)
        ids[i], valid[i], logprobs[i] = draw(x, None if probs else own_temperature, *kept, stream[i], joint)
        if sequence_length is not None:
            sequence_length[i] += 1
        if finished is not None:
            finished[i] = ids[i] == end_id
    wanted = (ids, *([valid] if return_valid else []), *([logprobs] if return_logprobs else []))
    return wanted if len(wanted) > 1 else ids


def sampling_from_logits(
    logits: Array,
    *,
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    return step(logits, False, (seed, offset, generator), indices, return_valid, return_logprobs)


def sampling_from_probs(
    probs: Array,
    *,
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    return step(probs, True, (seed, offset, generator), indices, return_valid, return_logprobs)


def top_k_sampling_from_probs(
    probs: Array,
    top_k: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    return step(probs, True, (seed, offset, generator), indices, return_valid, return_logprobs, top_k=top_k)


def top_p_sampling_from_probs(
    probs: Array,
    top_p: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    return step(probs, True, (seed, offset, generator), indices, return_valid, return_logprobs, top_p=top_p)


def min_p_sampling_from_probs(
    probs: Array,
    min_p: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    return step(probs, True, (seed, offset, generator), indices, return_valid, return_logprobs, min_p=min_p)


def top_k_top_p_sampling_from_logits(
    logits: Array,
    top_k: Any,
    top_p: Any,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    common = (seed, offset, generator), indices, return_valid, return_logprobs, filter_apply_order
    return step(logits, False, *common, top_k=top_k, top_p=top_p)


def top_k_top_p_sampling_from_probs(
    probs: Array,
    top_k: Any,
    top_p: Any,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    common = (seed, offset, generator), indices, return_valid, return_logprobs, filter_apply_order
    return step(probs, True, *common, top_k=top_k, top_p=top_p)


def sample(
    logits: Array,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
    indices: Array | None = None,
    bias: Array | None = None,
    finished: Array | None = None,
    end_id: int | None = None,
    sequence_length: Array | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
) -> Any:
    common = (seed, offset, generator), indices, return_valid, return_logprobs, filter_apply_order
    own = bias, finished, end_id, sequence_length
    return step(logits, False, *common, *own, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def softmax(logits: Array, temperature: Any = None) -> Array:
    result = np.empty(logits.shape, np.float32)
    temperatures = np.broadcast_to(1.0 if temperature is None else temperature, len(logits))
    for i, own_temperature in enumerate(temperatures):
        target = result[i]
        x = np.minimum(logits[i].astype(np.float32), LARGEST)
        top, scale = float(x.max()), scale_of(own_temperature)
        if np.isnan(top) or top < -LARGEST:
            target[:] = top if np.isnan(top) else 0
        elif scale == GREEDY_SCALE:
            target[:] = np.arange(len(x)) == order(x)[0]
        else:
            weights = weights_of(x, top, scale)
            target[:] = weights / weights.sum()
    return result


def _renormalized(probs: Array, count: Any) -> Array:
    """Keep the largest probabilities of each row, set the others to 0, and renormalize.

    `count(i, p)` returns how many probabilities of row i to keep. `p` holds the probabilities of the row, largest
    first.
    """
    result = np.empty(probs.shape, probs.dtype)
    for i, row in enumerate(probs):
        x = np.maximum(row.astype(np.float64), 0)
        total = x.sum()
        if np.isfinite(total) and total > 0:
            ids = order(x)
            x[ids[count(i, x[ids]) :]] = 0
            result[i] = x / x.sum()
        else:
            result[i] = np.nan if np.isnan(total) else 0
    return result


def top_k_renorm_probs(probs: Array, top_k: Any) -> Array:
    counts = np.broadcast_to(probs.shape[1] if top_k is None else top_k, len(probs))
    return _renormalized(probs, lambda i, x: counts[i] if counts[i] >= 1 else len(x))


def top_p_renorm_probs(probs: Array, top_p: Any) -> Array:
    shares = np.broadcast_to(1.0 if top_p is None else top_p, len(probs))

    def count(i: int, x: Array) -> int:
        # Keep a token if the better tokens' total probability is below top_p.
        return max(1, int(np.sum(x.cumsum() - x < shares[i] * x.sum()))) if shares[i] < 1 else len(x)

    return _renormalized(probs, count)


def top_k_mask_logits(logits: Array, top_k: Any) -> Array:
    result = logits.copy()
    for row, k in zip(result, np.broadcast_to(logits.shape[1] if top_k is None else top_k, len(logits)), strict=True):
        if k >= 1 and not np.isnan(row.astype(np.float32)).any():
            row[order(row.astype(np.float32))[k:]] = -np.inf
    return result


def chain_speculative_sampling(
    draft_probs: Array,
    draft_token_ids: Array,
    target_probs: Array,
    *,
    seed: Any = None,
    offset: Any = None,
    generator: Any = None,
) -> tuple[Array, Array, Array]:
    batch, drafts, vocab = draft_probs.shape
    ids = np.full((batch, drafts + 1), -1, np.int32)
    accepted, emitted = np.empty(batch, np.int32), np.empty(batch, np.int32)
    for i, stream in enumerate(streams(batch, seed, offset, generator)):
        draft, target = draft_probs[i].astype(np.float32), target_probs[i].astype(np.float32)
        bits = random_bits(np.arange(drafts), 0xFFFFFFFF, stream)
        accept = np.zeros(drafts, bool)
        for n, id in enumerate(draft_token_ids[i]):
            # Accept a draft token with probability min(1, target probability / draft probability).
            accept[n] = 0 <= id < vocab and uniform(bits[n, 2]) * draft[n, id] < target[n, id]
        accepted[i] = accept.sum()
        emitted[i] = n = drafts if accept.all() else int(np.argmin(accept))
        ids[i, :n] = draft_token_ids[i, :n]
        # After a rejection, sample from max(target - draft, 0). If all drafts are accepted, sample from the target.
        rest = np.maximum(target[n] - draft[n], 0) if n < drafts else target[n]
        drawn = draw(rest, None, vocab, 1.0, 0.0, stream, False)
        if not drawn.valid and n < drafts:
            drawn = draw(target[n], None, vocab, 1.0, 0.0, stream, False)
        ids[i, n] = drawn.id
    return ids, accepted, emitted


def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to raise ValueError for array elements out of range, and to take only keyword arguments."""

    @functools.wraps(function)
    def checked(**arguments: Any) -> Any:
        rows, vocab = next(arguments[x] for x in ("logits", "probs", "draft_probs") if x in arguments).shape[-2:]
        ranges = {
            "temperature": (0.0 if function is softmax else 0, np.inf),
            "top_k": (-1, np.inf) if function is sample else (1, vocab),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "indices": (0, rows - 1),
        }
        for name, (low, high) in ranges.items():
            found = arguments.get(name)
            if isinstance(found, np.ndarray):
                outside = found[~((found >= low) & (found <= high))]
                if outside.size:
                    note = " (None for no limit)" if name in ("top_k", "top_p", "min_p") else ""
                    check.fail(name, f"in [{low}, {high}]{note}", outside[0])
        return function(**arguments)

    return checked
