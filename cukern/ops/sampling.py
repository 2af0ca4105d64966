"""Sampling: a token from each row of logits or probabilities."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from cukern.reference import sampling as twin
from cukern.runtime import arrays, check
from cukern.runtime.kernel import Kernel, Variant, arch_of_device, multiprocessors

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sample",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

DTYPES = ("float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
VARIANTS = ("auto", "cluster", "block")
ORDERS = ("top_k_first", "joint")
MAX_VOCAB = 2**20
MAX_BATCH = 2**24
CLUSTER = 8
# TILE, MIN_WARPS, MAX_WARPS, CAPACITY, MAX_TOPS and MAX_LISTED of the template.
_TILE = 1024
_MIN_WARPS, _MAX_WARPS = 6, 16
_CAPACITY, _MAX_TOPS, _LISTED = 192, 256, 96
# What every GPU from sm_80 on grants a block; and what lets five blocks run at once on an H200.
_MAX_SHARED_BYTES = 96 * 1024
_SHARED_BYTES_OF_MANY = 44 * 1024

# Layout { tiles, tiles_per_block, cached_tiles, tops_per_tile, topped_tiles } of the template.
_LAYOUT = "5i"
_sample = Kernel("sampling", "sample", f"17Pq2Q6i{_LAYOUT}3i3f", compile_s=1.6)
_renormalize = Kernel("sampling", "renormalize", f"5Pq2i{_LAYOUT}2i2f", compile_s=0.6)


def _sampler(dtype: str, probs: bool, cluster: int) -> Variant:
    flag = "true" if probs else "false"
    return _sample.variant(arrays.CUDA_TYPE[dtype], flag, cluster, max_shared_bytes=_MAX_SHARED_BYTES)


def _renormalizer(dtype: str, mode: str, cluster: int) -> Variant:
    return _renormalize.variant(arrays.CUDA_TYPE[dtype], mode, cluster, max_shared_bytes=_MAX_SHARED_BYTES)


# Blocks of clusters for what models give: logits in float32 or bfloat16, probabilities in float32. All else is compiled
# at its first use.
_sample.at_import = [
    _sampler(dtype, probs, CLUSTER).instance
    for dtype, probs in (("float32", False), ("bfloat16", False), ("float32", True))
]
_renormalize.at_import = [_renormalizer("float32", "SOFTMAX", CLUSTER).instance]


class _Plan(NamedTuple):
    """How the blocks of a row share it."""

    cluster: int
    threads: int
    shared_bytes: int
    tiles: int
    tiles_per_block: int
    cached_tiles: int
    tops_per_tile: int
    topped_tiles: int


@functools.lru_cache(maxsize=1024)
def _plan(vocab: int, batch: int, device: int, variant: str, cache: bool) -> _Plan:
    check.one_of("variant", variant, VARIANTS)
    clusters = int(arch_of_device(device).rstrip("a")) >= 90
    if variant == "cluster" and not clusters:
        check.fail("variant", "'auto' or 'block' on a GPU without clusters (before sm_90)", "'cluster'")
    tiles = -(-vocab // _TILE)
    # One block has a warp for each of so few tiles.
    cluster = 1 if variant == "block" or not clusters or (variant == "auto" and tiles <= _MAX_WARPS) else CLUSTER
    tiles_per_block = -(-tiles // cluster)
    blocks = batch * cluster / multiprocessors(device)  # per multiprocessor
    # Nearly a warp per tile, while there is room for all blocks at once.
    few = blocks <= 2
    warps = _MAX_WARPS if few else _MIN_WARPS if blocks <= 5 or not cache else 8
    warps = min(warps, max(tiles_per_block, _MIN_WARPS))
    tops_per_tile = 32
    while tops_per_tile > 1 and tiles * tops_per_tile > _MAX_TOPS:
        tops_per_tile //= 2
    # Of many rows only a part is kept, so that enough blocks run at once; the rest is read again from L2.
    limit = _MAX_SHARED_BYTES if few else _SHARED_BYTES_OF_MANY
    room = _MAX_SHARED_BYTES - 2 * tiles * 16 - _CAPACITY * 8 - tiles * tops_per_tile * 4
    topped = min(tiles_per_block, room // 128)
    used = _MAX_SHARED_BYTES - room + topped * 128
    cached = min(tiles_per_block, max(0, limit - used) // (4 * _TILE)) if cache else 0
    return _Plan(cluster, 32 * warps, used + cached * 4 * _TILE, tiles, tiles_per_block, cached, tops_per_tile, topped)


class _Parameter(NamedTuple):
    """A parameter as the kernel takes it: an array's address, or a number."""

    address: int
    wide: bool  # int64, not int32
    single: bool  # one for all rows
    number: Any


def _parameter(
    name: str,
    value: Any,
    leader: str,
    library: arrays.Library,
    device: int | None,
    batch: int,
    dtypes: tuple[str, ...],
    number: Callable[[str, Any], Any],
) -> _Parameter:
    if not arrays.is_array(value):
        return _Parameter(0, False, False, number(name, value))
    shape = tuple(value.shape)
    arrays.expect(name, value, leader, library, device, dtypes, shape and (batch,), "[batch]")
    return _Parameter(library.address(value), library.dtype(value) == "int64", not shape, number(name, None))


def _at_least_zero(default: float) -> Callable[[str, Any], float]:
    def convert(name: str, value: Any) -> float:
        if value is None:
            return default
        found = check.number(name, value)
        if found < 0:
            check.fail(name, "at least 0", found)
        return found

    return convert


def _share(default: float) -> Callable[[str, Any], float]:
    def convert(name: str, value: Any) -> float:
        if value is None:
            return default
        found = check.number(name, value)
        if not 0 <= found <= 1:
            check.fail(name, "in [0, 1]", found)
        return found

    return convert


_temperature, _top_p, _min_p = _at_least_zero(1.0), _share(1.0), _share(0.0)


def _count(vocab: int) -> Callable[[str, Any], int]:
    return lambda name, value: vocab if value is None else check.integer(name, value, 1, vocab, "the vocabulary")


def _word(name: str, value: Any) -> int:
    """A 64-bit number, of either sign."""
    return 0 if value is None else check.integer(name, value, -(2**63), 2**64 - 1) & (2**64 - 1)


def _check_rows(name: str, values: Any, symbol: str = "batch") -> tuple[arrays.Library, int | None, str, int, int, int]:
    """Library, device, dtype, rows, vocabulary and row stride of a matrix [rows, vocab]."""
    library, device, dtype = arrays.leader(name, values, DTYPES, (symbol, "vocab"))
    rows, vocab = values.shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail(name, f"of a vocabulary in [1, {MAX_VOCAB}]", vocab)
    if rows > MAX_BATCH:
        check.fail(name, f"of at most {MAX_BATCH} rows", rows)
    return library, device, dtype, rows, vocab, arrays.row_stride(name, values, library)


def _draw(
    name: str,
    values: Any,
    probs: bool,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    seed: Any,
    offset: Any,
    indices: Any = None,
    bias: Any = None,
    finished: Any = None,
    end_id: int | None = None,
    sequence_length: Any = None,
    order: str = "top_k_first",
    return_valid: bool,
    return_logprobs: bool,
    out: Any,
    variant: str,
) -> Any:
    """All samplers of one token per row: check, choose a variant, launch."""
    library, device, dtype, rows, vocab, stride = _check_rows(name, values, "batch" if indices is None else "rows")
    joint = check.one_of("filter_apply_order", order, ORDERS) == "joint"
    batch = rows
    if indices is not None:
        if len(getattr(indices, "shape", ())) != 1:
            check.fail(
                "indices", "an integer array [batch]", getattr(indices, "shape", type(indices).__name__), TypeError
            )
        batch = indices.shape[0]
        arrays.expect("indices", indices, name, library, device, INTEGERS, (batch,), "[batch]")
        if batch and not rows:
            check.fail(name, "of at least one row for the indices", f"{rows} rows")

    def parameter(label: str, value: Any, dtypes: tuple[str, ...], number: Callable[[str, Any], Any]) -> _Parameter:
        return _parameter(label, value, name, library, device, batch, dtypes, number)

    heat = parameter("temperature", temperature, ("float32",), _temperature)
    k = parameter("top_k", top_k, INTEGERS, _count(vocab))
    p = parameter("top_p", top_p, ("float32",), _top_p)
    least = parameter("min_p", min_p, ("float32",), _min_p)
    stream = parameter("seed", random.getrandbits(64) if seed is None else seed, INTEGERS, _word)
    place = parameter("offset", offset, INTEGERS, _word)
    if bias is not None:
        arrays.expect("bias", bias, name, library, device, (dtype,), (vocab,), "[vocab]")
    if (finished is None) != (end_id is None):
        check.fail("end_id", "given together with finished", repr(end_id))
    if finished is not None:
        arrays.expect("finished", finished, name, library, device, ("bool",), (batch,), "[batch]")
        end_id = check.integer("end_id", end_id, 0, vocab - 1, "the vocabulary")
    if sequence_length is not None:
        arrays.expect("sequence_length", sequence_length, name, library, device, ("int32",), (batch,), "[batch]")

    results = [("ids", "int32"), *([("valid", "bool")] * return_valid), *([("logprobs", "float32")] * return_logprobs)]
    if out is None:
        made = [library.empty((batch,), kind, values) for _, kind in results] if device is not None else []
    else:
        made = list(out) if isinstance(out, (tuple, list)) else [out]
        if len(made) != len(results):
            check.fail("out", " and ".join(label for label, _ in results), f"{len(made)} arrays")
        for i, (_, kind) in enumerate(results):
            label = "out" if len(results) == 1 else f"out[{i}]"
            arrays.expect(label, made[i], name, library, device, (kind,), (batch,), "[batch]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        _check_host_range("temperature", temperature, library, 0, float("inf"))
        _check_host_range("top_k", top_k, library, 1, vocab)
        _check_host_range("top_p", top_p, library, 0, 1)
        _check_host_range("min_p", min_p, library, 0, 1)
        _check_host_range("indices", indices, library, 0, rows - 1)
        return arrays.on_host(
            twin.step,
            values,
            values,
            probs,
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            offset,
            indices,
            joint,
            return_valid,
            return_logprobs,
            bias,
            finished,
            end_id,
            sequence_length,
            out=out,
        )

    filters = bool(k.address or p.address or least.address) or k.number < vocab or p.number < 1 or least.number > 0
    # A small k leaves little to read again.
    again = filters and (k.address != 0 or k.number > _LISTED)
    plan = _plan(vocab, batch, device, variant, again)
    if batch:
        named = {label: library.address(array) for (label, _), array in zip(results, made, strict=True)}
        _sampler(dtype, probs, plan.cluster).launch(
            device,
            library.stream(device),
            (batch * plan.cluster, 1, 1),
            (plan.threads, 1, 1),
            plan.shared_bytes,
            library.address(values),
            library.address(bias) if bias is not None else 0,
            named["ids"],
            named.get("valid", 0),
            named.get("logprobs", 0),
            heat.address,
            p.address,
            least.address,
            k.address,
            stream.address,
            place.address,
            library.address(indices) if indices is not None else 0,
            library.address(finished) if finished is not None else 0,
            library.address(sequence_length) if sequence_length is not None else 0,
            0,
            0,
            0,
            stride,
            stream.number,
            place.number,
            offset is None,
            rows,
            vocab,
            k.number,
            -1 if end_id is None else end_id,
            0,
            *plan[3:],
            k.wide
            | stream.wide << 1
            | place.wide << 2
            | (indices is not None and library.dtype(indices) == "int64") << 3,
            k.single | stream.single << 1 | place.single << 2 | heat.single << 3 | p.single << 4 | least.single << 5,
            joint,
            heat.number,
            p.number,
            least.number,
        )
    if out is not None:
        return out
    return made[0] if len(made) == 1 else tuple(made)


def _check_host_range(name: str, value: Any, library: arrays.Library, low: float, high: float) -> None:
    """Parameters in host memory are checked; the kernel clamps those on a device."""
    if not arrays.is_array(value):
        return
    found = library.to_numpy(value)
    if found.size and not ((found >= low) & (found <= high)).all():
        check.fail(name, f"in [{low}, {high}]", found[~((found >= low) & (found <= high))][0])


@arrays.takes_dlpack
def sampling_from_logits(
    logits: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Draw a token from the softmax of each row.

    Args:
        logits: [rows, vocab], float32, float16 or bfloat16, contiguous along the vocabulary, of at most 2^20 tokens;
            rows may be strided. +inf counts as the largest finite number.
        seed: the stream of random numbers: an int, or an int32 or int64 array, [batch] or [] (one for all). None takes
            one from Python's `random`, at the call: a CUDA graph replays it.
        offset: the place in the stream, likewise; take another at each step. None gives row i the offset i. A token
            depends on the seed, the offset, the values and the parameters of its own row, and on nothing else: not on
            its place, the batch size or the variant. So rows that agree in all of them draw alike.
        indices: integers [batch]: the row that each token is drawn from, if not its own; out of range they are clamped.
        return_valid: also return bool [batch]: False for a row that holds NaN, or nothing that can be drawn. Its id
            is 0.
        return_logprobs: also return float32 [batch]: the logarithm of the token's probability in its row before any
            filter, after the temperature.
        out: the array, or the tuple of them, to write into and return.
        variant: "auto", or a kernel by name: "cluster" (8 blocks per row, sm_90 and later) or "block". Both return
            the same tokens.

    Returns:
        ids int32 [batch], in the library and on the device of the first argument; a tuple with what else was asked for.
        Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or numbers that do not fit; the message names the argument. Parameters in
            arrays on a device are clamped instead.

    The functions and the order of their arguments are FlashInfer's. The draw is a race of groups of 32 tokens,
    the exponential form of the Gumbel-max trick, with random numbers from Philox (Salmon et al., 2011).
    """
    return _draw(
        "logits",
        logits,
        False,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def sampling_from_probs(
    probs: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Draw a token from each row of probabilities [rows, vocab].

    They need not sum to 1; what is below 0 counts as 0. The other arguments, results and errors are as in
    `sampling_from_logits`.
    """
    return _draw(
        "probs",
        probs,
        True,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def top_k_sampling_from_probs(
    probs: Any,
    top_k: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Draw a token from the `top_k` most probable of each row.

    Args:
        probs: [rows, vocab], as in `sampling_from_probs`.
        top_k: how many tokens are kept, an int in [1, vocab] or an int32 or int64 array [batch]; ties go to the lower
            id. None keeps all.

    The other arguments, results and errors are as in `sampling_from_logits`.
    """
    return _draw(
        "probs",
        probs,
        True,
        top_k=top_k,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def top_p_sampling_from_probs(
    probs: Any,
    top_p: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Draw a token from the nucleus of each row: the fewest most probable tokens whose sum reaches `top_p`.

    Args:
        probs: [rows, vocab], as in `sampling_from_probs`; the sum is compared with `top_p` times that of the row.
        top_p: a float in [0, 1] or a float32 array [batch]. The token whose probability reaches it is kept, and always
            the most probable one; ties go to the lower id. None keeps all.

    The other arguments, results and errors are as in `sampling_from_logits`. The method is that of "The curious case of
    neural text degeneration" (arXiv:1904.09751), had by rejection as in FlashInfer.
    """
    return _draw(
        "probs",
        probs,
        True,
        top_p=top_p,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def min_p_sampling_from_probs(
    probs: Any,
    min_p: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Draw a token from those at least `min_p` times as probable as the most probable one.

    Args:
        probs: [rows, vocab], as in `sampling_from_probs`.
        min_p: a float in [0, 1] or a float32 array [batch]. None keeps all.

    The other arguments, results and errors are as in `sampling_from_logits`. The method is that of "Turning up the
    heat: min-p sampling" (arXiv:2407.01082).
    """
    return _draw(
        "probs",
        probs,
        True,
        min_p=min_p,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def top_k_top_p_sampling_from_logits(
    logits: Any,
    top_k: Any,
    top_p: Any,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Draw a token from what both top-k and top-p leave of the softmax of each row.

    Args:
        logits: [rows, vocab], as in `sampling_from_logits`.
        top_k: as in `top_k_sampling_from_probs`.
        top_p: as in `top_p_sampling_from_probs`.
        filter_apply_order: "top_k_first" compares with `top_p` the share of the `top_k` tokens' sum, "joint" that of
            the whole row's.

    The other arguments, results and errors are as in `sampling_from_logits`.
    """
    return _draw(
        "logits",
        logits,
        False,
        top_k=top_k,
        top_p=top_p,
        order=filter_apply_order,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def top_k_top_p_sampling_from_probs(
    probs: Any,
    top_k: Any,
    top_p: Any,
    *,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """`top_k_top_p_sampling_from_logits` from probabilities [rows, vocab], as in `sampling_from_probs`."""
    return _draw(
        "probs",
        probs,
        True,
        top_k=top_k,
        top_p=top_p,
        order=filter_apply_order,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


@arrays.takes_dlpack
def sample(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    filter_apply_order: str = "top_k_first",
    seed: Any = None,
    offset: Any = None,
    indices: Any = None,
    bias: Any = None,
    finished: Any = None,
    end_id: int | None = None,
    sequence_length: Any = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """A decoding step's sampling, in one kernel: bias, temperature, top-k, top-p, min-p, the draw, the bookkeeping.

    Args:
        logits: [rows, vocab], as in `sampling_from_logits`.
        temperature: divides the logits; a float of at least 0 or a float32 array [batch]. 0 takes the largest logit,
            the lower id on ties.
        top_k, top_p, filter_apply_order: as in `top_k_top_p_sampling_from_logits`, after the temperature.
        min_p: as in `min_p_sampling_from_probs`, after the temperature.
        bias: [vocab] of the dtype of `logits`, added to each row in float32.
        finished: bool [batch]. A row that is finished gets `end_id` (and the log-probability 0); one that draws
            `end_id` becomes so, in place.
        end_id: the id of the end, with `finished` only.
        sequence_length: int32 [batch], increased in place where a row was not finished.

    The other arguments, results and errors are as in `sampling_from_logits`. The step is FasterTransformer's (its
    sampling kernels), with the filters of today's servers.
    """
    return _draw(
        "logits",
        logits,
        False,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        order=filter_apply_order,
        bias=bias,
        finished=finished,
        end_id=end_id,
        sequence_length=sequence_length,
        seed=seed,
        offset=offset,
        indices=indices,
        return_valid=return_valid,
        return_logprobs=return_logprobs,
        out=out,
        variant=variant,
    )


def _whole_rows(
    mode: str,
    run_twin: Callable[..., Any],
    name: str,
    values: Any,
    parameter: str,
    value: Any,
    out: Any,
    variant: str,
) -> Any:
    """The functions that return rows: check, choose a variant, launch."""
    library, device, dtype, batch, vocab, stride = _check_rows(name, values)
    heat = k = p = _Parameter(0, False, False, 0)
    if parameter == "temperature":
        heat = _parameter(parameter, value, name, library, device, batch, ("float32",), _temperature)
        host_range = (0.0, float("inf"))
    elif parameter == "top_k":
        k = _parameter(parameter, value, name, library, device, batch, INTEGERS, _count(vocab))
        host_range = (1, vocab)
    else:
        p = _parameter(parameter, value, name, library, device, batch, ("float32",), _top_p)
        host_range = (0, 1)
    kind = "float32" if mode == "SOFTMAX" else dtype
    if out is not None:
        arrays.expect("out", out, name, library, device, (kind,), (batch, vocab), "[batch, vocab]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        _check_host_range(parameter, value, library, *host_range)
        return arrays.on_host(run_twin, values, values, value, out=out)
    plan = _plan(vocab, batch, device, variant, True)
    result = library.empty((batch, vocab), kind, values) if out is None else out
    if batch:
        _renormalizer(dtype, mode, plan.cluster).launch(
            device,
            library.stream(device),
            (batch * plan.cluster, 1, 1),
            (plan.threads, 1, 1),
            plan.shared_bytes,
            library.address(values),
            library.address(result),
            heat.address,
            p.address,
            k.address,
            stride,
            vocab,
            k.number,
            *plan[3:],
            k.wide,
            k.single or heat.single or p.single,
            heat.number,
            p.number,
        )
    return result


@arrays.takes_dlpack
def softmax(logits: Any, temperature: Any = None, *, out: Any = None, variant: str = "auto") -> Any:
    """The softmax of logits / temperature, as FlashInfer's.

    Args:
        logits: [batch, vocab], as in `sampling_from_logits`.
        temperature: a float of at least 0 or a float32 array [batch]; None is 1. 0 puts all on the largest logit, the
            lower id on ties.
        out: float32 [batch, vocab] to write into and return.
        variant: as in `sampling_from_logits`.

    Returns probabilities float32 [batch, vocab]. A row that holds NaN becomes NaN, one of -inf alone 0. Raises what
    `sampling_from_logits` does.
    """
    return _whole_rows("SOFTMAX", twin.softmax, "logits", logits, "temperature", temperature, out, variant)


@arrays.takes_dlpack
def top_k_renorm_probs(probs: Any, top_k: Any, *, out: Any = None, variant: str = "auto") -> Any:
    """The `top_k` largest probabilities of each row divided by their sum, 0 elsewhere, as FlashInfer's.

    Args:
        probs: [batch, vocab], as in `sampling_from_probs`.
        top_k: an int in [1, vocab] or an int32 or int64 array [batch]; ties go to the lower id. None keeps all.
        out: an array like `probs` to write into and return; `probs` itself will do.
        variant: as in `sampling_from_logits`.

    Returns an array like `probs`. A row that holds NaN becomes NaN, one without anything above 0 becomes 0. Raises what
    `sampling_from_logits` does.
    """
    return _whole_rows("TOP_K_RENORM", twin.top_k_renorm_probs, "probs", probs, "top_k", top_k, out, variant)


@arrays.takes_dlpack
def top_p_renorm_probs(probs: Any, top_p: Any, *, out: Any = None, variant: str = "auto") -> Any:
    """The nucleus of each row divided by its sum, 0 elsewhere, as FlashInfer's.

    Args:
        probs: [batch, vocab], as in `sampling_from_probs`.
        top_p: a float in [0, 1] or a float32 array [batch], with the meaning it has in `top_p_sampling_from_probs`.

    The other arguments, results and errors are as in `top_k_renorm_probs`.
    """
    return _whole_rows("TOP_P_RENORM", twin.top_p_renorm_probs, "probs", probs, "top_p", top_p, out, variant)


@arrays.takes_dlpack
def top_k_mask_logits(logits: Any, top_k: Any, *, out: Any = None, variant: str = "auto") -> Any:
    """The `top_k` largest logits of each row, -inf elsewhere, as FlashInfer's.

    `logits` [batch, vocab] is as in `sampling_from_logits`, the other arguments and the errors are as in
    `top_k_renorm_probs`. Returns an array like `logits`; a row that holds NaN is returned as it is.
    """
    return _whole_rows("TOP_K_MASK", twin.top_k_mask_logits, "logits", logits, "top_k", top_k, out, variant)


@arrays.takes_dlpack
def chain_speculative_sampling(
    draft_probs: Any,
    draft_token_ids: Any,
    target_probs: Any,
    *,
    seed: Any = None,
    offset: Any = None,
    out: tuple[Any, Any, Any] | None = None,
    variant: str = "auto",
) -> tuple[Any, Any, Any]:
    """Verify a chain of draft tokens, so that what is emitted is distributed as the target model's own tokens.

    Draft n is accepted with probability min(1, target / draft) of its token. At the first refusal a token is drawn
    from max(target - draft, 0), renormalized; where all are accepted, from the target's last row.

    Args:
        draft_probs: the draft model's probabilities [batch, drafts, vocab], float32, float16 or bfloat16, contiguous.
        draft_token_ids: int32 [batch, drafts]; one out of the vocabulary is refused.
        target_probs: the target model's probabilities [batch, drafts + 1, vocab], of the same dtype, contiguous.
        seed, offset, variant: as in `sampling_from_logits`.
        out: the three arrays to write into and return.

    Returns:
        ids int32 [batch, drafts + 1]: the accepted drafts, the token drawn, then -1;
        accepted int32 [batch]: how many drafts would be accepted, each for itself;
        emitted int32 [batch]: how many were, before the first refusal.

    Raises TypeError and ValueError as `sampling_from_logits` does. The function is FlashInfer's; the method is that of
    "Accelerating large language model decoding with speculative sampling" (arXiv:2302.01318).
    """
    library, device, dtype = arrays.leader("draft_probs", draft_probs, DTYPES, ("batch", "drafts", "vocab"))
    batch, drafts, vocab = draft_probs.shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail("draft_probs", f"of a vocabulary in [1, {MAX_VOCAB}]", vocab)
    if batch * (drafts + 1) > MAX_BATCH:
        check.fail("draft_probs", f"of at most {MAX_BATCH} rows in all", batch * drafts)
    arrays.contiguous("draft_probs", draft_probs, library)
    like = "draft_probs"
    arrays.expect(
        "draft_token_ids", draft_token_ids, like, library, device, ("int32",), (batch, drafts), "[batch, drafts]"
    )
    shape = (batch, drafts + 1, vocab)
    arrays.expect("target_probs", target_probs, like, library, device, (dtype,), shape, "[batch, drafts + 1, vocab]")
    stream = _parameter(
        "seed", random.getrandbits(64) if seed is None else seed, like, library, device, batch, INTEGERS, _word
    )
    place = _parameter("offset", offset, like, library, device, batch, INTEGERS, _word)
    shapes = ((batch, drafts + 1), (batch,), (batch,))
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 3:
            check.fail("out", "three arrays (ids, accepted, emitted)", type(out).__name__, TypeError)
        for i, wanted in enumerate(shapes):
            arrays.expect(f"out[{i}]", out[i], like, library, device, ("int32",), wanted, "[batch, ...]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        return arrays.on_host(
            twin.chain_speculative_sampling,
            draft_probs,
            draft_probs,
            draft_token_ids,
            target_probs,
            seed=seed,
            offset=offset,
            out=out,
        )
    plan = _plan(vocab, batch, device, variant, False)
    ids, accepted, emitted = (library.empty(s, "int32", draft_probs) for s in shapes) if out is None else out
    if batch:
        _sampler(dtype, True, plan.cluster).launch(
            device,
            library.stream(device),
            (batch * plan.cluster, 1, 1),
            (plan.threads, 1, 1),
            plan.shared_bytes,
            library.address(target_probs),
            library.address(draft_probs),
            library.address(ids),
            *(0, 0, 0, 0, 0, 0),
            stream.address,
            place.address,
            *(0, 0, 0),
            # Even without any drafts this says that there are some to verify.
            library.address(draft_token_ids) or library.address(ids),
            library.address(accepted),
            library.address(emitted),
            vocab,
            stream.number,
            place.number,
            offset is None,
            batch * (drafts + 1),
            vocab,
            vocab,
            -1,
            drafts,
            *plan[3:],
            stream.wide << 1 | place.wide << 2,
            stream.single << 1 | place.single << 2,
            0,
            1.0,
            1.0,
            0.0,
        )
    return ids, accepted, emitted


def _ids(values: Any, *_: Any, indices: Any = None, **__: Any) -> tuple[tuple[Any, tuple[int, ...], str], ...]:
    return ((values, (values.shape[0] if indices is None else indices.shape[0],), "int32"),)


def _row_results(kind: str | None = None) -> Callable[..., Any]:
    return lambda values, *_, **__: ((values, tuple(values.shape), kind or str(values.dtype).removeprefix("torch.")),)


def _chain(draft_probs: Any, *_: Any, **__: Any) -> tuple[tuple[Any, tuple[int, ...], str], ...]:
    batch, drafts, _vocab = draft_probs.shape
    return tuple((draft_probs, shape, "int32") for shape in ((batch, drafts + 1), (batch,), (batch,)))


_RANDOM = "Tensor? seed=None, Tensor? offset=None"
_ONE_PER_ROW = f"{_RANDOM}, Tensor? indices=None, str variant='auto') -> Tensor ids"
_ORDER = "str filter_apply_order='top_k_first'"
#: For `cukern.torch_ops`. The operators return the ids alone; their parameters are tensors of [batch] or no dimension.
TORCH_OPS: dict[str, Any] = {
    f"sampling_from_logits(Tensor logits, *, {_ONE_PER_ROW}": _ids,
    f"sampling_from_probs(Tensor probs, *, {_ONE_PER_ROW}": _ids,
    f"top_k_sampling_from_probs(Tensor probs, Tensor? top_k, *, {_ONE_PER_ROW}": _ids,
    f"top_p_sampling_from_probs(Tensor probs, Tensor? top_p, *, {_ONE_PER_ROW}": _ids,
    f"min_p_sampling_from_probs(Tensor probs, Tensor? min_p, *, {_ONE_PER_ROW}": _ids,
    f"top_k_top_p_sampling_from_logits(Tensor logits, Tensor? top_k, Tensor? top_p, *, {_ORDER}, {_ONE_PER_ROW}": _ids,
    f"top_k_top_p_sampling_from_probs(Tensor probs, Tensor? top_k, Tensor? top_p, *, {_ORDER}, {_ONE_PER_ROW}": _ids,
    "sample(Tensor logits, *, Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    f"{_ORDER}, {_RANDOM}, Tensor? indices=None, Tensor? bias=None, Tensor(a!)? finished=None, int? end_id=None, "
    "Tensor(b!)? sequence_length=None, str variant='auto') -> Tensor ids": _ids,
    "softmax(Tensor logits, Tensor? temperature=None, *, str variant='auto') -> Tensor probs": _row_results("float32"),
    "top_k_renorm_probs(Tensor probs, Tensor? top_k, *, str variant='auto') -> Tensor renormalized": _row_results(),
    "top_p_renorm_probs(Tensor probs, Tensor? top_p, *, str variant='auto') -> Tensor renormalized": _row_results(),
    "top_k_mask_logits(Tensor logits, Tensor? top_k, *, str variant='auto') -> Tensor masked": _row_results(),
    f"chain_speculative_sampling(Tensor draft_probs, Tensor draft_token_ids, Tensor target_probs, *, {_RANDOM}, "
    "str variant='auto') -> (Tensor ids, Tensor accepted, Tensor emitted)": _chain,
}
