"""Time the token exchange between GPUs of a host, beside the bandwidth of stores into a peer's memory and NCCL."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks import several
from benchmarks.several import Calls, Case, Clock
from cukern.ops.all_to_all import AllToAllState

RANKS = 2
TOKENS = (1, 8, 32, 128, 512, 4096)
FP8, BF16 = "float8_e4m3fn", "bfloat16"
_GROUP = 128  # numbers per scale
_DEADLINE_S = 5.0


class Sizes(NamedTuple):
    """The sizes of an exchange. `tokens` is per rank."""

    ranks: int
    tokens: int
    hidden: int = 7168
    topk: int = 8
    experts: int = 256

    def named(self, dtype: str) -> dict[str, int | str]:
        return {**self._asdict(), "dtype": dtype}

    @property
    def calls(self) -> int:
        """The calls in a graph."""
        return 40 if self.tokens < 1000 else 10


def goes_there(sizes: Sizes) -> float:
    """Return the probability that a token with random experts has an expert on a given rank."""
    elsewhere = sizes.experts - sizes.experts // sizes.ranks
    return 1 - math.comb(elsewhere, sizes.topk) / math.comb(sizes.experts, sizes.topk)


def dispatched_bytes(sizes: Sizes, dtype: str) -> int:
    """Return the bytes that a rank sends: rows and scales to ranks with their experts, ids and weights to all ranks."""
    row = sizes.hidden + 4 * sizes.hidden // _GROUP if dtype == FP8 else 2 * sizes.hidden
    others = sizes.tokens * (sizes.ranks - 1)
    return round(others * (goes_there(sizes) * row + 8 * sizes.topk))


def combined_bytes(sizes: Sizes) -> int:
    """Return the bytes that a rank sends back: a 16-bit row for each token that it received."""
    return round(sizes.tokens * (sizes.ranks - 1) * goes_there(sizes) * 2 * sizes.hidden)


class Tokens(NamedTuple):
    """The tokens of a rank."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def random_tokens(sizes: Sizes, device: torch.device, seed: int) -> Tokens:
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(sizes.tokens, sizes.hidden, generator=generator, device=device).to(torch.bfloat16)
    scores = torch.rand(sizes.tokens, sizes.experts, generator=generator, device=device)
    weights, ids = scores.topk(sizes.topk, dim=1)
    return Tokens(rows, weights / weights.sum(dim=1, keepdim=True), ids.int())


def _states(sizes: Sizes, clock: Clock) -> list[AllToAllState]:
    return AllToAllState.local(
        [clock.device(rank).index for rank in clock.ranks],
        max_tokens=sizes.tokens,
        hidden=sizes.hidden,
        topk=sizes.topk,
        num_experts=sizes.experts,
        deadline_s=_DEADLINE_S,
    )


def _sets(clock: Clock, sizes: Sizes, calls: int) -> int:
    """Return the number of different inputs: enough to exceed L2, at most one for each call of a graph."""
    return min(calls, max(2, math.ceil(3 * clock.l2_bytes / (sizes.tokens * sizes.hidden * 2))))


def _ends(states: Sequence[AllToAllState]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return functions that check and close all states."""

    def check() -> None:
        for state in states:
            state.check()

    def close() -> None:
        for state in states:
            state.close()

    return check, close


def inputs(sizes: Sizes, clock: Clock, sets: int) -> list[list[Tokens]]:
    """Return tokens by rank and set."""
    ranks = sizes.ranks
    return clock.on_all(lambda rank: [random_tokens(sizes, clock.device(rank), n * ranks + rank) for n in range(sets)])


def _dispatch(sizes: Sizes, dtype: str, clock: Clock) -> Calls:
    states, sets = _states(sizes, clock), _sets(clock, sizes, sizes.calls)
    tokens = inputs(sizes, clock, sets)

    def call(rank: int, number: int) -> Any:
        return cukern.all_to_all_dispatch(states[rank], *tokens[rank][number % sets], quantize=dtype == FP8)

    return Calls(call, sets, None, None, *_ends(states))


def _inverses(sizes: Sizes, clock: Clock, states: Sequence[AllToAllState], tokens: list[list[Tokens]]) -> list[Any]:
    """Return, by rank and set, the row of each received slot, with experts' rows in the order of the experts."""

    def inverse(rank: int, ids: torch.Tensor) -> torch.Tensor:
        here = states[rank].expert_map(ids), states[rank].num_local_experts
        return cukern.moe_sort(ids, sizes.experts, expert_map=here[0], num_local_experts=here[1])[2]

    found: list[Any] = [[] for _ in states]
    for number in range(len(tokens[0])):
        receivers = clock.on_all(
            lambda rank, number=number: cukern.all_to_all_dispatch(
                states[rank], *tokens[rank][number], return_receiver=True
            ),
        )
        received = clock.on_all(lambda rank, receivers=receivers: receivers[rank]())
        clock.synchronize()
        for rank, own in enumerate(clock.on_all(lambda rank, got=received: inverse(rank, got[rank].topk_ids))):
            found[rank].append(own)
    clock.synchronize()
    return found


def _combine(sizes: Sizes, variant: str, clock: Clock) -> Calls:
    """Return the calls of a combine after an FP8 dispatch. The dispatch is also timed alone."""
    sets = 2  # only two, because the rows of the experts take much memory
    states, tokens = _states(sizes, clock), inputs(sizes, clock, sets)
    by_slot = variant == "by slot"
    rows = sizes.ranks * sizes.tokens * (sizes.topk if by_slot else 1)
    shape = rows, sizes.hidden
    results = clock.on_all(lambda rank: [torch.randn(shape, device=clock.device(rank)).bfloat16() for _ in range(sets)])
    inverses = _inverses(sizes, clock, states, tokens) if by_slot else None

    def before(rank: int, number: int) -> Any:
        return cukern.all_to_all_dispatch(states[rank], *tokens[rank][number % sets], quantize=True)

    def call(rank: int, number: int) -> Any:
        before(rank, number)
        own, result = tokens[rank][number % sets], results[rank][number % sets]
        if inverses is None:
            return cukern.all_to_all_combine(states[rank], result, None, own.topk_ids)
        inverse = inverses[rank][number % sets]
        return cukern.all_to_all_combine(states[rank], result, own.topk_weights, own.topk_ids, inverse=inverse)

    return Calls(call, sets, before, None, *_ends(states))


# --- cases ----------------------------------------------------------------------------------------------


def _sent_sizes() -> tuple[int, ...]:
    """Return the bytes that a rank sends in each case."""
    found = {dispatched_bytes(Sizes(RANKS, tokens), dtype) for tokens in TOKENS for dtype in (FP8, BF16)}
    return tuple(sorted(found | {combined_bytes(Sizes(RANKS, tokens)) for tokens in TOKENS}))


def _of_processes(kind: str, name: str, case: Case) -> float:
    return several.of_processes(kind, case.gpus, _sent_sizes())[name, case.sent_bytes]


_BASELINES = {
    name: functools.partial(_of_processes, kind, name)
    for kind, name in (("nccl", "NCCL"), ("nccl", "NCCL eager"), ("symm_mem", "torch symm_mem"))
}


def _case(sizes: Sizes, op: str, variant: str, dtype: str) -> Case:
    is_dispatch = op == "all_to_all_dispatch"
    return Case(
        op=op,
        case=sizes.named(dtype),
        variant=variant,
        sent_bytes=dispatched_bytes(sizes, dtype) if is_dispatch else combined_bytes(sizes),
        begin=functools.partial(_dispatch, sizes, dtype)
        if is_dispatch
        else functools.partial(_combine, sizes, variant),
        calls=sizes.calls,
        baselines=_BASELINES,
        host=is_dispatch and sizes.tokens == 128,
    )


def cases() -> list[Case]:
    """Return cases with rows of DeepSeek-V3's width: dispatch in FP8 and 16 bits, combine of sums and of slots."""
    every = [Sizes(RANKS, tokens) for tokens in TOKENS]
    made = [_case(sizes, "all_to_all_dispatch", "auto", dtype) for dtype in (FP8, BF16) for sizes in every]
    return made + [
        _case(sizes, "all_to_all_combine", variant, BF16) for sizes in every for variant in ("by slot", "summed")
    ]
