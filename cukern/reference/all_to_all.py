"""The exchange of tokens between ranks, in NumPy.

A rank is a thread, or several ranks take turns in one thread. Each rank has receive buffers in host memory that the
other ranks write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cukern.reference.moe_permute import moe_unpermute
from cukern.reference.quantization import per_token_group_quant_fp8

Array = NDArray[Any]

GROUP = 128
DISPATCH, COMBINE = 0, 1
PAST_DEADLINE, ABORTED, OVER_CAPACITY, OTHER_CALL = 1, 2, 3, 4


class Failure(NamedTuple):
    """A rank's first failed wait.

    `rank` is the rank whose data did not arrive, `phase` is dispatch or combine, and `step` is the index of the call.
    """

    code: int
    rank: int
    phase: int
    step: int


class HostRanks:
    """The receive buffers and signals of all ranks, in host memory.

    Args:
        max_tokens: the largest number of tokens of a rank in a call.
        topk: the number of experts per token.
        owner: int [experts], the rank of each expert.
        deadline_s: seconds until a wait fails.
    """

    def __init__(self, ranks: int, max_tokens: int, hidden: int, topk: int, owner: Array, deadline_s: float) -> None:
        self.ranks, self.max_tokens, self.hidden, self.topk = ranks, max_tokens, hidden, topk
        self.owner, self.deadline_s = owner, deadline_s
        rows = ranks * max_tokens
        # The received data, by [receiving rank, buffer]. Token `token` of rank `source` is in row
        # `source * max_tokens + token`.
        self.rows = np.zeros((ranks, 2, rows * hidden * 2), np.uint8)
        self.scales = np.zeros((ranks, 2, rows * max(1, -(-hidden // GROUP))), np.float32)
        self.ids = np.full((ranks, 2, rows, topk), -1, np.int32)
        self.weights = np.zeros((ranks, 2, rows, topk), np.float32)
        #: The results that each source rank gets back. Keys are (token, expert rank), or (token, slot) if `apart`.
        #: Values are (combine index, result row).
        self.partial: list[dict[tuple[int, int], tuple[int, Array]]] = [{} for _ in range(ranks)]
        # The signals and sizes, by [receiving rank, source rank].
        self.dispatched = np.zeros((ranks, ranks), np.int64)
        self.entered = np.zeros((ranks, ranks), np.int64)
        self.batches = np.zeros((ranks, 2, ranks, 2), np.int64)  # [rank, step % 2, source]: (tokens, buffer)
        self.dispatches = np.zeros(ranks, np.int64)
        self.combines = np.zeros(ranks, np.int64)
        self.buffer = np.zeros(ranks, np.int64)
        self.failures: list[Failure | None] = [None] * ranks
        self.aborted: int | None = None
        self.changed = threading.Condition()

    def fail(self, rank: int, code: int, other: int, phase: int, step: int) -> None:
        if self.failures[rank] is None:
            self.failures[rank] = Failure(code, other, phase, step)
            self.abort(rank)

    def abort(self, rank: int) -> None:
        """Make the waits of all ranks fail. The error blames `rank`."""
        with self.changed:
            if self.aborted is None:
                self.aborted = rank
            self.changed.notify_all()

    def wait(self, rank: int, phase: int, step: int, arrived: Callable[[int], bool]) -> bool:
        """Wait until `arrived(source)` is true for all source ranks. Return False after the deadline or an abort."""
        if self.failures[rank] is not None:
            return False

        def missing() -> int | None:
            return next((source for source in range(self.ranks) if not arrived(source)), None)

        with self.changed:
            done = self.changed.wait_for(lambda: missing() is None or self.aborted is not None, self.deadline_s)
            late, aborted = missing(), self.aborted
        if late is None:
            return True
        if done and aborted is not None:
            self.fail(rank, ABORTED, aborted, phase, step)
        else:
            self.fail(rank, PAST_DEADLINE, late, phase, step)
        return False

    def add(self, signal: Array, place: Any, value: int) -> None:
        with self.changed:
            signal[place] = value
            self.changed.notify_all()

    def owners(self, ids: Array) -> Array:
        """Return the rank of each expert in `ids`; -1 for an invalid id."""
        valid = (ids >= 0) & (ids < len(self.owner))
        return np.where(valid, self.owner[np.where(valid, ids, 0)], -1)


def send(
    host: HostRanks, rank: int, buffer: int, hidden_states: Array, scales: Array | None, weights: Array, ids: Array,
    quantize: bool,
) -> None:  # fmt: skip
    """Store a rank's tokens in the receive buffers of the ranks that have the tokens' experts."""
    step = int(host.dispatches[rank])
    if step and host.buffer[rank] == buffer:
        for other in range(host.ranks):
            host.add(host.entered, (other, rank), step + 1)
        host.wait(rank, DISPATCH, step, lambda source: host.entered[rank, source] > step)
    if host.failures[rank] is not None:
        return
    if quantize:
        hidden_states, scales = per_token_group_quant_fp8(hidden_states, GROUP)
    tokens, places = len(hidden_states), rank * host.max_tokens + np.arange(len(hidden_states))
    rows = (
        np.ascontiguousarray(hidden_states)
        .view(np.uint8)
        .reshape(tokens, hidden_states.shape[1] * hidden_states.itemsize)
    )
    owners = host.owners(ids)
    for to in range(host.ranks):
        goes = (owners == to).any(axis=1)
        host.rows[to, buffer, : rows.shape[1] * host.ranks * host.max_tokens].reshape(-1, rows.shape[1])[
            places[goes]
        ] = rows[goes]
        if scales is not None:
            columns = scales.shape[1]
            host.scales[to, buffer, : columns * host.ranks * host.max_tokens].reshape(-1, columns)[places[goes]] = (
                scales[goes]
            )
        host.ids[to, buffer, places] = np.where(owners >= 0, ids, -1)
        host.weights[to, buffer, places] = weights
        host.batches[to, step % 2, rank] = tokens, buffer
        host.add(host.dispatched, (to, rank), step + 1)


def receive(host: HostRanks, rank: int, buffer: int, expert_load: Array | None) -> tuple[Array, Array]:
    """Wait for tokens of all source ranks. Return their weights and ids."""
    step = int(host.dispatches[rank])
    host.dispatches[rank], host.buffer[rank] = step + 1, buffer
    there = host.wait(rank, DISPATCH, step, lambda source: host.dispatched[rank, source] > step)
    batches = host.batches[rank, step % 2]
    if there and (batches[:, 1] != buffer).any():
        host.fail(rank, OTHER_CALL, int(np.flatnonzero(batches[:, 1] != buffer)[0]), DISPATCH, step)
        there = False
    ids, weights = host.ids[rank, buffer].copy(), host.weights[rank, buffer].copy()
    given = np.zeros((host.ranks, host.max_tokens), bool)
    for source, (tokens, _) in enumerate(batches if there else []):
        given[source, :tokens] = True
    ids[~given.reshape(-1)], weights[~given.reshape(-1)] = -1, 0
    if expert_load is not None:
        np.add.at(expert_load, ids[host.owners(ids) == rank], 1)
    return weights, ids


def send_back(
    host: HostRanks, rank: int, buffer: int, expert_output: Array, inverse: Array | None, weighted: bool, apart: bool
) -> None:
    """Store results for the received tokens in the buffers of the source ranks."""
    step, dispatch = int(host.combines[rank]), int(host.dispatches[rank]) - 1
    if host.failures[rank] is not None:
        return
    batches = host.batches[rank, dispatch % 2, :, 0]
    rows = expert_output.reshape(-1, expert_output.shape[-1])
    for source, token in [(source, token) for source, tokens in enumerate(batches.tolist()) for token in range(tokens)]:
        place, to = source * host.max_tokens + token, host.partial[source]
        here = host.owners(host.ids[rank, buffer, place]) == rank
        if not here.any():
            continue
        if inverse is None:
            to[token, rank] = step, rows[place].copy()
            continue
        own = inverse[place]
        if ((own[here] < 0) | (own[here] >= len(rows))).any():
            host.fail(rank, OVER_CAPACITY, rank, COMBINE, step)
            return
        if apart:
            for slot in np.flatnonzero(here):
                to[token, int(slot)] = step, rows[own[slot]].copy()
            continue
        weights = host.weights[rank, buffer, place] if weighted else np.ones(len(own), np.float32)
        out = np.empty((1, rows.shape[1]), rows.dtype)
        to[token, rank] = step, moe_unpermute(out, rows, weights[None], np.where(here, own, -1)[None])[0]
    with host.changed:
        host.changed.notify_all()


def receive_back(
    host: HostRanks, rank: int, weights: Array | None, ids: Array, apart: bool, dtype: np.dtype[Any]
) -> Array:
    """Wait for the results of this rank's tokens. Return each token's sum."""
    step = int(host.combines[rank])
    host.combines[rank] = step + 1
    owners, own = host.owners(ids), host.partial[rank]
    # A token's partial results in summation order: one per slot if `apart`, else one per rank.
    parts = [np.flatnonzero(x >= 0).tolist() if apart else sorted({*x[x >= 0].tolist()}) for x in owners]
    needed: dict[int, list[tuple[int, int]]] = {}
    for token, part in ((token, part) for token, of_token in enumerate(parts) for part in of_token):
        needed.setdefault(int(owners[token, part]) if apart else part, []).append((token, part))
    nothing = -1, None

    def arrived(source: int) -> bool:
        return all(own.get(place, nothing)[0] == step for place in needed.get(source, ()))

    out = np.zeros((len(ids), host.hidden), np.float32)
    if not host.wait(rank, COMBINE, step, arrived):
        return np.full_like(out, np.nan).astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for token, part in ((token, part) for token, of_token in enumerate(parts) for part in of_token):
            weight = weights[token, part] if apart and weights is not None else np.float32(1)
            out[token] += own[token, part][1].astype(np.float32) * weight
        return out.astype(dtype)


def all_to_all_dispatch(
    state: Any,
    hidden_states: Array,
    topk_weights: Array,
    topk_ids: Array,
    *,
    scales: Array | None = None,
    quantize: bool = False,
    expert_load: Array | None = None,
    return_receiver: bool = False,
) -> Any:
    host, rank, buffer = state.host, state.rank, state.begin_dispatch()
    send(host, rank, buffer, hidden_states, scales, topk_weights, topk_ids, quantize)
    columns = scales.shape[1] if scales is not None else hidden_states.shape[1] // GROUP if quantize else 0

    def receiver() -> Any:
        weights, ids = receive(host, rank, buffer, expert_load)
        state.end_dispatch(len(topk_ids))
        dtype = "float8_e4m3fn" if quantize or hidden_states.itemsize == 1 else hidden_states.dtype.name
        return state.received(hidden_states, buffer, dtype, columns, weights, ids)

    return receiver if return_receiver else receiver()


def all_to_all_combine(
    state: Any,
    expert_output: Array,
    topk_weights: Array | None,
    topk_ids: Array,
    *,
    inverse: Array | None = None,
    apart: bool = False,
    out: Array | None = None,
    return_receiver: bool = False,
) -> Any:
    host, rank, buffer = state.host, state.rank, state.begin_combine(topk_ids)
    send_back(host, rank, buffer, expert_output, inverse, topk_weights is not None, apart)

    def receiver() -> Array:
        state.end_combine()
        result = receive_back(host, rank, topk_weights, topk_ids, apart, expert_output.dtype)
        if out is None:
            return result
        out[...] = result
        return out

    return receiver if return_receiver else receiver()
