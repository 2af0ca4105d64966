"""Tokens to the ranks of their experts and back: the twin against formulas, the kernels against the twin."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cukern
from cukern import AllToAllError, AllToAllState
from cukern.commands import resources
from cukern.ops import all_to_all as op
from cukern.ops.all_to_all import layout as layouts
from cukern.ops.all_to_all import memory as parts
from cukern.reference import all_to_all as twin
from cukern.reference.quantization import per_token_group_quant_fp8
from cukern.runtime import arrays, gpu, kernel, template
from cukern.runtime import compile as compiler
from cukern.runtime.cuda import cupy
from cukern.runtime.op import OPS
from tests.buffers import Array, as_torch, same_bits
from tests.exchange import (
    FORMS,
    MODES,
    Batch,
    Case,
    Job,
    Outcome,
    Processes,
    Rank,
    Report,
    assert_same,
    at_once,
    batch_of,
    combine_in_turns,
    dispatch_in_turns,
    expected,
    from_twin,
    get,
    in_turns,
    put,
)
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401

H200 = gpu.of_arch("90a")

#: The experts of 4 ranks, dealt out as they come: the last rank has none.
DEALT = (2, 0, 1, 0, 2, 2, 1, 0, 0, 1, 2, 1, 0, 0, 2, 1)
UNEVEN = Case((5, 0, 7, 1), expert_rank=DEALT)
#: Exchanges that differ in what a kernel or the twin does for them, with what is special.
CASES = {
    "one rank": Case((6,)),
    "two ranks": Case((3, 4)),
    "uneven, a rank without tokens, one without experts": UNEVEN,
    "eight ranks": Case((2, 1, 3, 0, 2, 2, 1, 2)),
    "no tokens at all": Case((0, 0), max_tokens=3),
    "one expert a token": Case((4, 3), topk=1),
    "32 experts a token": Case((4, 3), topk=32, num_experts=64),
    "all to one expert": Case((5, 4), to_one=True),
    "float16, ids of 64 bits": Case((3, 4), dtype="float16", id_dtype="int64"),
    "the smallest rows": Case((3, 4), hidden=16),
    "rows of odd size": Case((3, 4), hidden=2064),
    **{f"rows {form}": Case((5, 0, 7, 1), hidden=384, form=form, expert_rank=DEALT) for form in FORMS[1:]},
    "quantized float16, ids of 64 bits": Case((3, 4), dtype="float16", form="quantize", id_dtype="int64"),
    **{f"back {mode}": UNEVEN._replace(mode=mode) for mode in MODES},
    "back apart, 8 ranks": Case((2, 1, 3, 0, 2, 2, 1, 2), mode="apart"),
    "back summed, float16": Case((3, 4), dtype="float16", mode="summed"),
}


def of_cases(*names: str) -> Any:
    return pytest.mark.parametrize("case", [pytest.param(CASES[x], id=x) for x in names or CASES])


# --- the twin against formulas ------------------------------------------------------------------------


def owner_of(case: Case, expert: int) -> int:
    """The rank of an expert, -1 for the id of none."""
    if not 0 <= expert < case.num_experts:
        return -1
    return case.expert_rank[expert] if case.expert_rank else expert // (case.num_experts // case.ranks)


def places_of(case: Case, step: int = 0) -> Iterator[tuple[int, int, int, list[int], Batch]]:
    """Source, token, place, ids and the batch of each token of an exchange."""
    for source in range(case.ranks):
        batch = batch_of(case, source, step)
        for token in range(len(batch.topk_ids)):
            yield source, token, source * case.most + token, batch.topk_ids[token].tolist(), batch


def check_dispatch(case: Case, rank: int, got: Outcome, step: int = 0, loads: int = 1) -> None:
    """What arrives at a rank is where it belongs; `loads` is how often each step's slots were counted."""
    ids = np.full((case.places, case.topk), -1, np.int32)
    weights = np.zeros((case.places, case.topk), np.float32)
    load = np.zeros(case.num_experts, np.int32)
    for _, token, place, own, batch in places_of(case, step):
        for slot, expert in enumerate(own):
            ids[place, slot] = expert if 0 <= expert < case.num_experts else -1
            load[expert if owner_of(case, expert) == rank else 0] += owner_of(case, expert) == rank
        weights[place] = batch.topk_weights[token]
        if rank not in [owner_of(case, x) for x in own]:
            continue
        row = batch.hidden_states[token : token + 1]
        scales = None if batch.scales is None else batch.scales[token]
        if case.form == "quantize":
            row, of_row = per_token_group_quant_fp8(row, 128)
            scales = of_row[0]
        np.testing.assert_array_equal(np.atleast_2d(got.rows[place]).view(np.uint8), row.view(np.uint8))
        if scales is not None:
            assert got.scales is not None
            np.testing.assert_array_equal(got.scales[place], scales)
    same_bits(got.topk_ids, ids)
    same_bits(got.topk_weights, weights)
    same_bits(got.expert_load, loads * load)


@of_cases()
def test_each_token_arrives_where_its_experts_are(case: Case) -> None:
    for rank, got in enumerate(from_twin(case)[0]):
        check_dispatch(case, rank, got)
        has_scales = case.form in ("quantize", "scaled")
        assert (got.scales is not None) is has_scales
        assert got.rows.shape == (case.places, case.hidden)


def bits_of(case: Case) -> torch.dtype:
    return getattr(torch, case.dtype)


def sums(case: Case, ranks: list[Rank], source: int) -> torch.Tensor:
    """What comes back to a rank, by loops in float32."""
    batch, kept = batch_of(case, source, ranks[0].step), bits_of(case)
    out = torch.zeros(len(batch.topk_ids), case.hidden, dtype=kept)
    apart, weighted = case.mode.startswith("apart"), case.mode in ("slots", "batched", "apart")
    for token in range(len(out)):
        place, total = source * case.most + token, torch.zeros(case.hidden)
        row_of: dict[int, list[torch.Tensor]] = {}
        for slot, expert in enumerate(batch.topk_ids[token].tolist()):
            rank = owner_of(case, expert)
            if rank < 0:
                continue
            rows = as_torch(get(ranks[rank].answered["expert_output"])).reshape(-1, case.hidden)
            if case.mode == "summed":
                row_of.setdefault(rank, [rows[place].float()])
                continue
            inverse = get(ranks[rank].answered["inverse"])
            row = rows[inverse[place, slot]].float()
            weight = batch.topk_weights[token, slot].item() if weighted else 1.0
            product = row * torch.tensor(weight, dtype=torch.float32)
            if apart:
                total = total + product
            else:
                row_of.setdefault(rank, []).append(product)
        for rank in sorted(row_of):
            part = torch.zeros(case.hidden)
            for row in row_of[rank]:
                part = part + row
            total = total + part.to(kept).float()
        out[token] = total.to(kept)
    return out


@of_cases()
def test_what_comes_back_is_added_up_in_order(case: Case) -> None:
    ranks = [Rank(state, case) for state in case.local()]
    for source, got in enumerate(in_turns(ranks)):
        same_bits(got.out, get(sums(case, ranks, source)))
        if case.mode == "slots" and case.tokens[source] and case.topk == 4:
            assert np.abs(got.out.astype(np.float32)).max() > 0.1


@of_cases(
    "two ranks", "uneven, a rank without tokens, one without experts", "eight ranks", "rows quantize", "back apart"
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_ranks_that_are_threads_get_what_turns_get(case: Case, split: bool) -> None:
    want = from_twin(case, 3)
    ranks = [Rank(state, case, split=split) for state in case.local()]

    def work(rank: Rank) -> list[Outcome]:
        found = []
        for step in range(3):
            time.sleep(0.003 * ((rank.state.rank + step) % case.ranks))  # another one is last each time
            found.append(rank.run(step))
        return found

    got = at_once(ranks, work)
    assert not [x for x in got if isinstance(x, Exception)]
    for step in range(3):
        assert_same([of_rank[step] for of_rank in got], want[step])


def test_the_load_of_experts_is_added_up() -> None:
    ranks = [Rank(state, UNEVEN) for state in UNEVEN.local()]
    in_turns(ranks, 0)
    for rank, got in enumerate(in_turns(ranks, 0)):
        check_dispatch(UNEVEN, rank, got, loads=2)


def layer(ranks: int, batch: Batch, apart: bool) -> Array:
    """The sum over experts of tokens, of which each rank has as many: expert e multiplies by 1 + e / 8."""
    tokens, experts = len(batch.hidden_states), 16
    each = tokens // ranks
    states = AllToAllState.local(
        [None] * ranks, max_tokens=each, hidden=64, topk=4, num_experts=experts, apart=apart, deadline_s=20.0
    )
    own = [Batch(*(None if x is None else x[r * each : (r + 1) * each] for x in batch)) for r in range(ranks)]
    receivers = [cukern.all_to_all_dispatch(s, *x[:3], return_receiver=True) for s, x in zip(states, own, strict=True)]
    back = []
    for state, sent, receiver in zip(states, own, receivers, strict=True):
        received = receiver()
        offsets, row_token, inverse = cukern.moe_sort(
            received.topk_ids, experts, expert_map=state.expert_map(received.topk_ids),
            num_local_experts=state.num_local_experts,
        )  # fmt: skip
        first = state.rank * (experts // ranks)
        factor = 1 + (first + np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))) / 8
        rows = received.hidden_states[row_token].astype(np.float32)
        rows[: offsets[-1]] *= factor[:, None].astype(np.float32)
        rows[offsets[-1] :] = np.nan
        back.append(
            cukern.all_to_all_combine(
                state, rows.astype(batch.hidden_states.dtype), sent.topk_weights, sent.topk_ids, inverse=inverse,
                apart=apart, return_receiver=True,
            )
        )  # fmt: skip
    return np.concatenate([receiver() for receiver in back])


def test_apart_gives_the_same_bits_for_any_number_of_ranks() -> None:
    batch = batch_of(Case((16,), hidden=64), 0)
    want = layer(1, batch, True)
    for ranks in (2, 4, 8):
        same_bits(layer(ranks, batch, True), want)
    # Sums by rank are rounded on their way, so that there the number of ranks shows.
    together = [layer(ranks, batch, False).astype(np.float32) for ranks in (1, 8)]
    assert (together[0] != together[1]).any()
    experts, hidden = np.arange(16), batch.hidden_states.astype(np.float64)
    valid = (batch.topk_ids >= 0) & (batch.topk_ids < 16)
    factor = np.where(valid, batch.topk_weights * (1 + experts[np.where(valid, batch.topk_ids, 0)] / 8), 0).sum(1)
    for got in (want.astype(np.float64), *together):
        np.testing.assert_allclose(got, hidden * factor[:, None], rtol=0.02, atol=0.02)


#: Where ranks are that take turns: on the host and on one GPU.
TURNS = pytest.mark.parametrize(
    "place", ["numpy", pytest.param("cupy:0", marks=[pytest.mark.gpu, pytest.mark.sanitize])]
)


def at(place: str, case: Case) -> list[Rank]:
    """The ranks of a case that take turns in a place."""
    return [Rank(state, case, place) for state in case.local(None if place == "numpy" else [0] * case.ranks)]


@TURNS
@pytest.mark.parametrize(
    ("ids", "owner", "mode", "want"),
    [
        ([2, 0, 1], (0, 1, 2), "slots", 1.0),  # of three ranks: 2^30 - 2^30 + 1
        ([2, 0, 1], (0, 1, 2), "summed", 1.0),
        ([2, 0, 1], (0, 1, 2), "apart", 0.0),  # of the slots: 1 + 2^30 - 2^30
        ([0, 1, 2], (0, 1, 2), "apart", 1.0),
        ([2, 0, 1], (0, 0, 0), "slots", 0.0),
        ([0, 1, 2], (0, 0, 0), "slots", 1.0),
        ([2, 0, 1], (1, 1, 1), "slots", 0.0),
        ([2, 0, 1], (1, 1, 1), "apart", 0.0),
    ],
)
def test_the_order_of_the_sum(ids: list[int], owner: tuple[int, ...], mode: str, want: float, place: str) -> None:
    case = Case((1, 0, 0), hidden=16, topk=3, num_experts=3, expert_rank=owner, mode=mode, turning=False)
    ranks = at(place, case)
    for rank in ranks:
        rank.take(0)
        count = case.tokens_of(rank.state.rank, 0)
        rank.arguments["topk_ids"] = put(place, np.array([ids] * count, np.int32).reshape(count, 3))
        rank.arguments["topk_weights"] = put(place, np.ones((count, 3), np.float32))
    for rank in ranks:
        rank.send()
    for rank in ranks:
        rank.receive()
        rank.answer()
        rows = get(rank.answered["expert_output"])
        if mode == "summed":
            rows[0] = (2.0**30, -(2.0**30), 1.0)[rank.state.rank]
        else:
            for row, expert in zip(get(rank.answered["inverse"])[0], ids, strict=True):
                if row >= 0:
                    rows[row] = (2.0**30, -(2.0**30), 1.0)[expert]
        rank.answered["expert_output"] = put(place, rows)
    for rank in ranks:
        rank.send_back()
    for rank in ranks:
        rank.receive_back()
    assert (get(ranks[0].out).astype(np.float32) == want).all()


@TURNS
@pytest.mark.parametrize("mode", ["slots", "unweighted", "apart"])
def test_rows_that_are_named_for_slots_of_other_ranks_are_not_looked_at(mode: str, place: str) -> None:
    case = UNEVEN._replace(mode=mode)
    want, ranks = from_twin(case)[0], at(place, case)
    dispatch_in_turns(ranks, 0)
    for rank in ranks:
        rank.answer()
        inverse = get(rank.answered["inverse"])
        inverse[~rank.here] = 0
        rank.answered["inverse"] = put(place, inverse)
    for rank in ranks:
        rank.send_back()
    for rank in ranks:
        rank.receive_back()
    assert_same([rank.outcome for rank in ranks], want)


@settings(max_examples=40)
@given(st.data())
def test_any_exchange(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 5), "ranks")
    experts = data.draw(st.integers(1, 9), "experts")
    case = Case(
        tuple(data.draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks), "tokens")),
        hidden=128,
        topk=data.draw(st.integers(1, 6), "topk"),
        num_experts=experts,
        expert_rank=tuple(data.draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts), "owner")),
        dtype=data.draw(st.sampled_from(op.DTYPES), "dtype"),
        id_dtype=data.draw(st.sampled_from(op.ID_DTYPES), "ids"),
        form=data.draw(st.sampled_from(FORMS), "form"),
        mode=data.draw(st.sampled_from(MODES), "mode"),
    )
    own = [Rank(state, case) for state in case.local()]
    for step in range(4):  # from the third on buffers hold what came before
        outcomes = in_turns(own, step)
        for rank, got in enumerate(outcomes):
            fresh = got._replace(expert_load=np.zeros_like(got.expert_load)) if step else got
            check_dispatch(case, rank, fresh, step, loads=int(step == 0))
            same_bits(got.out, get(sums(case, own, rank)))


# --- arrays of any library ----------------------------------------------------------------------------


def check_library(case: Case, place: str, kind: type) -> list[Rank]:
    want = from_twin(case, 2)
    ranks = [Rank(state, case, place) for state in case.local()]
    for step in range(2):
        assert_same(in_turns(ranks, step), want[step])
    assert all(type(x) is kind for rank in ranks for x in (*rank.received, rank.out) if x is not None)
    return ranks


@of_cases("two ranks", "float16, ids of 64 bits", *(f"rows {form}" for form in FORMS[1:]), "back summed", "back apart")
def test_tensors_in_host_memory_go_through_the_twin(case: Case) -> None:
    ranks = check_library(case, "cpu", torch.Tensor)
    wanted = getattr(torch, case.dtype if case.form == "plain" else "float8_e4m3fn")
    assert ranks[0].received.hidden_states.dtype == wanted


@of_cases("two ranks", "float16, ids of 64 bits", "rows quantize", "back summed", "back apart")
def test_foreign_arrays_in_host_memory(case: Case) -> None:
    # NumPy exchanges neither bfloat16 nor FP8 by DLPack.
    check_library(case._replace(dtype="float16"), "foreign", np.ndarray)


def test_bytes_arrive_as_fp8() -> None:
    case = CASES["rows bytes"]._replace(tokens=(3,), expert_rank=None)
    (state,) = case.local()
    batch = batch_of(case, 0)
    got = cukern.all_to_all_dispatch(state, batch.hidden_states.view(np.uint8), batch.topk_weights, batch.topk_ids)
    assert got.hidden_states.dtype.name == "float8_e4m3fn" and got.scales is None
    (state,) = case.local()
    from_reference = twin.all_to_all_dispatch(
        state, batch.hidden_states.view(np.uint8), batch.topk_weights, batch.topk_ids
    )
    assert from_reference.hidden_states.dtype.name == "float8_e4m3fn"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("place", ["numpy", "cpu", "foreign"])
def test_results_go_into_out(place: str, split: bool) -> None:
    case = Case((3,), dtype="float16")
    want = from_twin(case)[0][0]
    rank = Rank(case.local()[0], case, place, split)
    out = put(place, np.full((3, case.hidden), np.nan, np.float16))
    dispatch_in_turns([rank], 0)
    rank.answer()
    rank.send_back(out=out)
    rank.receive_back()
    assert rank.out is out
    same_bits(get(out), want.out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", MODES)
def test_the_twins_own_functions_are_those_of_the_package(
    form: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((3, 4), form=form, mode=mode)
    want = from_twin(case, 2)
    monkeypatch.setattr(cukern, "all_to_all_dispatch", twin.all_to_all_dispatch)
    monkeypatch.setattr(cukern, "all_to_all_combine", twin.all_to_all_combine)
    ranks = [Rank(state, case) for state in case.local()]
    for step in range(2):
        assert_same(in_turns(ranks, step), want[step])
    ranks = [Rank(state, case, split=False) for state in case.local()]
    assert_same(at_once(ranks, lambda rank: rank.run(0)), want[0])


# --- buffers ------------------------------------------------------------------------------------------


def test_dispatches_without_a_combine_take_the_other_buffer_each_time() -> None:
    ranks = [Rank(state, UNEVEN) for state in UNEVEN.local()]
    rows = []
    for step in range(5):
        dispatch_in_turns(ranks, step)
        if step % 2:  # uneven use: every other dispatch has an answer
            combine_in_turns(ranks)
            for source, rank in enumerate(ranks):
                same_bits(get(rank.out), get(sums(UNEVEN, ranks, source)))
        rows.append(ranks[0].received.hidden_states)
    first = [x.ctypes.data for x in rows]
    assert first[0] == first[2] == first[4] != first[1] == first[3]


def test_rows_stay_until_the_next_dispatch_of_the_rank_begins() -> None:
    case = Case((2, 2))
    ranks = [Rank(state, case) for state in case.local()]
    want = [x.rows for x in from_twin(case)[0]]
    dispatch_in_turns(ranks, 0)
    kept = ranks[1].received.hidden_states
    here = ranks[1].here.any(1)
    ranks[0].take(1)
    ranks[0].send()  # the other rank is a dispatch ahead, and writes beside what this one reads
    same_bits(kept[here], want[1][here])


def test_a_buffer_that_is_used_again_waits_until_all_ranks_have_come_there() -> None:
    # As in a graph with an odd number of dispatches.
    host = twin.HostRanks(2, 2, 16, 1, np.array([0, 1]), 10.0)
    ids, weights = np.array([[1], [0]], np.int32), np.ones((2, 1), np.float32)
    rows = [np.full((2, 16), value, np.float16) for value in (1, 2)]
    for rank in range(2):
        twin.send(host, rank, 0, rows[0], None, weights, ids, False)
    for rank in range(2):
        twin.receive(host, rank, 0, None)
    first = threading.Thread(target=twin.send, args=(host, 0, 0, rows[1], None, weights, ids, False))
    first.start()
    time.sleep(0.1)
    of_rank_1 = host.rows[1, 0].view(np.float16).reshape(-1, 16)
    assert first.is_alive() and of_rank_1[0, 0] == 1
    twin.send(host, 1, 0, rows[1], None, weights, ids, False)
    first.join()
    assert of_rank_1[0, 0] == 2 and host.failures == [None, None]


# --- what is refused ----------------------------------------------------------------------------------

SIZES: dict[str, Any] = {"max_tokens": 4, "hidden": 128, "topk": 2, "num_experts": 4}

#: What is wrong with the sizes of two ranks, and the exception.
WRONG_SIZES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_tokens": 0}, ValueError, r"max_tokens must be an integer in \[1, 16777216\], got 0"),
    ({"max_tokens": 2.0}, TypeError, "max_tokens must be an integer in .*, got 2.0"),
    ({"max_tokens": 2**24 + 1}, ValueError, "max_tokens must be an integer"),
    ({"hidden": 8}, ValueError, "hidden must be an integer of at least 16, got 8"),
    ({"hidden": 24}, ValueError, "hidden must be a multiple of 16, got 24"),
    ({"topk": 0}, ValueError, r"topk must be an integer in \[1, 32\], got 0"),
    ({"topk": 33}, ValueError, r"topk must be an integer in \[1, 32\], got 33"),
    ({"num_experts": 0}, ValueError, "num_experts must be an integer in .*, got 0"),
    ({"num_experts": 5}, ValueError, "num_experts must be a multiple of the 2 ranks, or expert_rank given, got 5"),
    ({"max_tokens": 2**24, "hidden": 1024}, ValueError, "max_tokens must be such that the numbers of all ranks are"),
    ({"deadline_s": 0}, ValueError, "deadline_s must be more than 0 and at most 1000000000, got 0"),
    ({"deadline_s": 1e10}, ValueError, "deadline_s must be more than 0 and at most"),
    ({"deadline_s": float("inf")}, ValueError, "deadline_s must be a finite number, got inf"),
    ({"deadline_s": "soon"}, TypeError, "deadline_s must be a number, got 'soon'"),
    ({"expert_rank": 3}, TypeError, "expert_rank must be a sequence of ranks, or None, got int"),
    ({"expert_rank": [0, 1, 2, 0]}, ValueError, r"expert_rank must be an integer in \[0, 1\], got 2"),
    ({"expert_rank": [0, 1]}, ValueError, "expert_rank must be of 4 ranks, one for each expert, got 2"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG_SIZES, ids=[str(x[0]) for x in WRONG_SIZES])
def test_sizes_that_do_not_fit_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AllToAllState.local([None] * 2, **{**SIZES, **given})


def test_too_many_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_tokens must be such that the slots of all ranks are less than 2\*\*31"):
        AllToAllState.local([None] * 4, max_tokens=2**24, topk=32, hidden=16, num_experts=4)


@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        ([], ValueError, r"the number of ranks must be an integer in \[1, 16\], got 0"),
        ([None] * 17, ValueError, r"the number of ranks must be an integer in \[1, 16\], got 17"),
        ([None, 0], ValueError, r"devices must be CUDA devices, or all None, got \[None, 0\]"),
        ([999, 999], ValueError, r"devices must be an integer in \[0, -?\d+\] \(\d+ CUDA devices are seen\), got 999"),
        (["cuda", "cuda"], TypeError, "devices must be an integer .*, got 'cuda'"),
    ],
)
def test_devices_that_do_not_fit_are_refused(devices: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AllToAllState.local(devices, **{**SIZES, "num_experts": 16 * 17})


def a_call(tokens: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "hidden_states": rng.standard_normal((tokens, 128)).astype(np.float16),
        "topk_weights": rng.random((tokens, 2), np.float32),
        "topk_ids": np.array([[0, 3], [1, 1]], np.int32)[:tokens],
    }


F32, F8 = np.float32, arrays.numpy_dtype("float8_e4m3fn")
#: Arguments of a dispatch that do not fit, and the exception.
WRONG_DISPATCHES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no array", {"hidden_states": [[1.0]]}, TypeError, "hidden_states must be an array .*, got list"),
    (
        "dtype",
        {"hidden_states": np.zeros((2, 128), F32)},
        TypeError,
        "hidden_states must be bfloat16 or float16 or .*f",
    ),
    (
        "dimensions",
        {"hidden_states": np.zeros(128, F8)},
        ValueError,
        r"hidden_states must be of shape \[tokens, hidden\]",
    ),
    (
        "hidden",
        {"hidden_states": np.zeros((2, 64), np.float16)},
        ValueError,
        "hidden_states must be of 128 numbers a row",
    ),
    ("strides", {"hidden_states": np.zeros((128, 2), np.float16).T}, ValueError, "hidden_states must be contiguous"),
    (
        "tokens",
        a_call(2) | {"hidden_states": np.zeros((5, 128), np.float16)},
        ValueError,
        "tokens must be .*max_tokens",
    ),
    ("weights", {"topk_weights": None}, TypeError, "topk_weights must be an array"),
    ("weights dtype", {"topk_weights": np.zeros((2, 2))}, TypeError, "topk_weights must be float32, got float64"),
    ("weights shape", {"topk_weights": np.zeros((2, 3), F32)}, ValueError, "topk_weights must be of shape"),
    ("ids dtype", {"topk_ids": np.zeros((2, 2), np.int16)}, TypeError, "topk_ids must be int32 or int64, got int16"),
    ("ids shape", {"topk_ids": np.zeros((1, 2), np.int32)}, ValueError, r"topk_ids must be of shape \[tokens, topk\]"),
    ("library", {"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, TypeError, "topk_ids must be a NumPy array like"),
    ("scales", {"scales": np.ones((2, 1), F32)}, ValueError, "scales must be None unless hidden_states are in FP8"),
    (
        "scale columns",
        {"hidden_states": np.zeros((2, 128), F8), "scales": np.ones((2, 2), F32)},
        ValueError,
        r"scales must be of shape \[tokens, columns\], of at most 1 columns, got \[2, 2\]",
    ),
    (
        "quantized",
        {"hidden_states": np.zeros((2, 128), F8), "quantize": True},
        ValueError,
        "quantize must be False unless",
    ),
    ("load dtype", {"expert_load": np.zeros(4)}, TypeError, "expert_load must be int32, got float64"),
    ("load shape", {"expert_load": np.zeros(3, np.int32)}, ValueError, r"expert_load must be of shape \[num_experts\]"),
]


def named(wrong: list[tuple[str, dict[str, Any], type[Exception], str]]) -> Any:
    """A parametrization over wrong arguments."""
    return pytest.mark.parametrize(("given", "error", "message"), [pytest.param(*x, id=name) for name, *x in wrong])


@pytest.mark.parametrize("split", [False, True])
@named(WRONG_DISPATCHES)
def test_a_dispatch_that_does_not_fit_changes_nothing(
    given: dict[str, Any], error: type[Exception], message: str, split: bool
) -> None:
    (state,) = AllToAllState.local([None], **SIZES)
    with pytest.raises(error, match=message):
        cukern.all_to_all_dispatch(state, **{**a_call(), **given}, return_receiver=split)
    assert not state.host.dispatched.any() and not state.host.rows.any()
    for step in range(2):
        got = cukern.all_to_all_dispatch(state, **a_call())
        assert got.topk_ids[:3].tolist() == [[0, 3], [1, 1], [-1, -1]], step
    assert state.host.dispatches[0] == 2


#: Arguments of a combine that do not fit, and the exception.
WRONG_COMBINES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no array", {"expert_output": 3}, TypeError, "expert_output must be an array .*, got int"),
    ("dtype", {"expert_output": np.zeros((4, 128), F32)}, TypeError, "expert_output must be bfloat16 or float16"),
    ("hidden", {"expert_output": np.zeros((4, 64), np.float16)}, ValueError, "expert_output must be of shape .rows"),
    ("dimensions", {"expert_output": np.zeros((128,), np.float16)}, ValueError, "expert_output must be of shape"),
    ("strides", {"expert_output": np.zeros((4, 256), np.float16)[:, ::2]}, ValueError, "expert_output must be cont"),
    ("inverse dtype", {"inverse": np.zeros((4, 2), np.int64)}, TypeError, "inverse must be int32, got int64"),
    ("inverse shape", {"inverse": np.zeros((2, 2), np.int32)}, ValueError, "inverse must be of shape .ranks . max"),
    ("rows", {"inverse": None, "topk_weights": None, "expert_output": np.zeros((5, 128), np.float16)}, ValueError,
     r"expert_output must be of 4 rows, ranks \* max_tokens, without inverse, got 5"),
    ("weights", {"inverse": None}, ValueError, "topk_weights must be None without inverse"),
    ("apart", {"apart": True}, ValueError, "apart must be False without inverse, or for a state that was made without"),
    ("weights shape", {"topk_weights": np.zeros((2, 3), F32)}, ValueError, "topk_weights must be of shape .tok"),
    ("ids", {"topk_ids": np.zeros((2, 2))}, TypeError, "topk_ids must be int32 or int64, got float64"),
    ("ids dimensions", {"topk_ids": np.zeros(2, np.int32)}, ValueError, r"topk_ids must be of shape \[tokens, topk\]"),
    ("no dimensions", {"topk_ids": np.array(3, np.int32)}, ValueError, r"topk_ids must be of shape \[tokens, topk\]"),
    ("other tokens", {"topk_ids": np.zeros((1, 2), np.int32)}, ValueError,
     "topk_ids must be of the 2 tokens that were dispatched, got 1 tokens"),
    ("library", {"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}, TypeError, "topk_ids must be a NumPy array like"),
    ("out dtype", {"out": np.zeros((2, 128), F32)}, TypeError, "out must be float16, got float32"),
    ("out shape", {"out": np.zeros((3, 128), np.float16)}, ValueError, r"out must be of shape \[tokens, hidden\]"),
]  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
@named(WRONG_COMBINES)
def test_a_combine_that_does_not_fit_changes_nothing(
    given: dict[str, Any], error: type[Exception], message: str, split: bool
) -> None:
    (state,) = AllToAllState.local([None], **SIZES)
    call = a_call()
    cukern.all_to_all_dispatch(state, **call)
    right = {
        "expert_output": np.ones((4, 128), np.float16),
        "topk_weights": call["topk_weights"],
        "topk_ids": call["topk_ids"],
        "inverse": np.array([[0, 1], [2, 3], [-1, -1], [-1, -1]], np.int32),
    }
    with pytest.raises(error, match=message):
        cukern.all_to_all_combine(state, **{**right, **given}, return_receiver=split)
    assert not state.host.partial[0]
    got = cukern.all_to_all_combine(state, **right)
    np.testing.assert_allclose(got[:, 0], call["topk_weights"].sum(1), rtol=1e-3)


@TURNS
def test_a_call_that_one_rank_is_refused_keeps_it_in_step(place: str) -> None:
    case = Case((3, 4))
    want, ranks = from_twin(case, 3), at(place, case)
    for step in range(3):
        ranks[step % 2].take(step)
        wrong = ranks[step % 2].arguments | {"expert_load": put(place, np.zeros(3, np.int32))}
        with pytest.raises(ValueError, match="expert_load must be of shape"):
            cukern.all_to_all_dispatch(ranks[step % 2].state, **wrong)
        assert_same(in_turns(ranks, step), want[step])


@pytest.mark.parametrize("function", [cukern.all_to_all_dispatch, cukern.all_to_all_combine])
def test_what_is_no_state_is_refused(function: Callable[..., Any]) -> None:
    call = [*a_call().values()]
    with pytest.raises(TypeError, match="state must be an AllToAllState, got ndarray"):
        function(call[0], *call)


def test_arrays_elsewhere_than_the_state_are_refused() -> None:
    (state,) = AllToAllState.local([None], **SIZES)
    on_meta = {name: torch.from_numpy(x).to("meta") for name, x in a_call().items()}
    with pytest.raises(ValueError, match="must be on a CUDA device or the CPU, got one on meta"):
        cukern.all_to_all_dispatch(state, **on_meta)
    with pytest.raises(TypeError, match="like must be an array, got list"):
        state.expert_map([1])
    cukern.all_to_all_dispatch(state, **a_call())


def test_calls_in_a_wrong_order_are_refused() -> None:
    (state,) = AllToAllState.local([None], **SIZES)
    call = a_call()
    back = {"expert_output": np.zeros((4, 128), np.float16), "topk_weights": None, "topk_ids": call["topk_ids"]}
    follows = "all_to_all_combine must follow an all_to_all_dispatch that has been received"
    with pytest.raises(RuntimeError, match=follows):
        cukern.all_to_all_combine(state, **back)
    receiver = cukern.all_to_all_dispatch(state, **call, return_receiver=True)
    with pytest.raises(RuntimeError, match="the dispatch before must be received first: call its receiver"):
        cukern.all_to_all_dispatch(state, **call)
    with pytest.raises(RuntimeError, match=follows):
        cukern.all_to_all_combine(state, **back)
    receiver()
    with pytest.raises(RuntimeError, match="this call has been received: its receiver is called once"):
        receiver()
    receiver = cukern.all_to_all_combine(state, **back, return_receiver=True)
    with pytest.raises(RuntimeError, match="the combine before must be received first"):
        cukern.all_to_all_dispatch(state, **call)
    receiver()
    with pytest.raises(RuntimeError, match="its receiver is called once"):
        receiver()
    with pytest.raises(RuntimeError, match=follows):
        cukern.all_to_all_combine(state, **back)
    assert (state.host.dispatches[0], state.host.combines[0]) == (1, 1)


def test_a_closed_state_is_refused() -> None:
    (state,) = AllToAllState.local([None], **SIZES)
    receiver = cukern.all_to_all_dispatch(state, **a_call(), return_receiver=True)
    state.close()
    state.close()
    closed = "state must be open, got a closed one"
    for use in (receiver, state.check, lambda: cukern.all_to_all_dispatch(state, **a_call())):
        with pytest.raises(ValueError, match=closed):
            use()


def test_places_of_experts_on_their_ranks() -> None:
    states = UNEVEN.local()
    for rank, state in enumerate(states):
        own = [expert for expert, owner in enumerate(DEALT) if owner == rank]
        found = state.expert_map(np.zeros(1))
        assert found.dtype == np.int32 and state.num_local_experts == len(own)
        assert [int(found[x]) for x in own] == [*range(len(own))]
        assert (np.delete(found, own) == -1).all()
        assert state.expert_map(np.ones(2)) is found
        assert type(state.expert_map(torch.zeros(1))) is torch.Tensor
    assert [state.num_local_experts for state in states] == [6, 5, 5, 0]


# --- failures -----------------------------------------------------------------------------------------


def failed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, str, int, str]:
    """The attributes and the message of the AllToAllError that a call raises."""
    with pytest.raises(AllToAllError) as raised:
        function(*args, **kwargs)
    error = raised.value
    return error.rank, error.phase, error.step, str(error)


def test_a_rank_that_never_comes_to_a_dispatch() -> None:
    states = AllToAllState.local([None] * 3, **{**SIZES, "num_experts": 3}, deadline_s=0.3)
    call = a_call()
    load = np.zeros(3, np.int32)
    start = time.monotonic()
    got = at_once(states[:2], lambda state: cukern.all_to_all_dispatch(state, **call, expert_load=load))
    assert 0.25 < time.monotonic() - start < 5
    for received in got:
        assert (received.topk_ids == -1).all() and (received.topk_weights == 0).all()
    assert not load.any()
    # Who is late is named by the rank that waited for it longest; the others were told by that one.
    found = [failed(state.check) for state in states[:2]]
    for rank, (other, phase, step, message) in enumerate(found):
        assert (phase, step) == ("dispatch", 0)
        late = f"dispatch 0 of rank {rank} failed: rank 2 did not come within 0.3 s"
        assert message in (late, f"dispatch 0 of rank {rank} failed: rank {1 - rank} gave up")
        assert other == (2 if message == late else 1 - rank)
    assert 2 in [x[0] for x in found]
    # The one that comes too late has what was sent to it, but no answer.
    assert cukern.all_to_all_dispatch(states[2], **call).topk_ids[:2].tolist() == [[0, -1], [1, 1]]
    out = cukern.all_to_all_combine(states[2], np.zeros((12, 128), np.float16), None, call["topk_ids"])
    assert np.isnan(out).all()
    assert failed(states[2].check)[3] in {f"combine 0 of rank 2 failed: rank {rank} gave up" for rank in (0, 1)}
    for state in states[:2]:
        assert failed(cukern.all_to_all_dispatch, state, **call)[1:3] == ("dispatch", 0)


def after_one_step(deadline_s: float = 0.3, **sizes: Any) -> tuple[list[Any], dict[str, Any]]:
    """The states of two ranks which have made a step and a dispatch, and the arguments of a combine."""
    states, call = AllToAllState.local([None] * 2, **{**SIZES, **sizes}, deadline_s=deadline_s), a_call()
    back = {"expert_output": np.ones((8, 128), np.float16), "topk_weights": None, "topk_ids": call["topk_ids"]}
    for _ in range(2):
        for receiver in [cukern.all_to_all_dispatch(x, **call, return_receiver=True) for x in states]:
            receiver()
        if not states[0].host.combines.any():
            for receiver in [cukern.all_to_all_combine(x, **back, return_receiver=True) for x in states]:
                receiver()
    return states, back


def test_a_rank_that_never_comes_to_a_combine() -> None:
    states, back = after_one_step()
    got = cukern.all_to_all_combine(states[0], **back)
    assert np.isnan(got).all() and got.shape == (2, 128) and got.dtype == np.float16
    want = (1, "combine", 1, "combine 1 of rank 0 failed: rank 1 did not come within 0.3 s")
    assert failed(states[0].check) == want
    assert failed(cukern.all_to_all_combine, states[0], **back) == want
    # What the late one waited for had been sent, so that its combine is right; the next call fails.
    assert (cukern.all_to_all_combine(states[1], **back) == 1).any()


def test_a_rank_that_has_no_tokens_there_waits_for_none() -> None:
    states, back = after_one_step()
    none = {**back, "topk_ids": np.full((2, 2), -1, np.int32)}
    assert (cukern.all_to_all_combine(states[0], **none) == 0).all()
    states[0].check()


def test_a_combine_of_other_ids_than_were_dispatched_fails() -> None:
    states, back = after_one_step()
    other = {**back, "topk_ids": np.array([[0, 1], [1, 0]], np.int32)}  # token 0 and 1 were for rank 0 and 1; 0
    receivers = [cukern.all_to_all_combine(x, **{**other, "topk_ids": other["topk_ids"] + 2}, return_receiver=True)
                 for x in states]  # fmt: skip
    assert np.isnan(receivers[0]()).all()
    assert failed(states[0].check)[:3] == (1, "combine", 1)


def test_giving_up_frees_the_others_at_once() -> None:
    states, _ = after_one_step(deadline_s=30.0)
    waiting = threading.Timer(0.2, states[1].abort)
    waiting.start()
    start = time.monotonic()
    got = cukern.all_to_all_dispatch(states[0], **a_call())
    assert time.monotonic() - start < 10
    assert (got.topk_ids == -1).all()
    assert failed(states[0].check) == (1, "dispatch", 2, "dispatch 2 of rank 0 failed: rank 1 gave up")
    assert failed(states[1].check) == (1, "dispatch", -1, "rank 1 has given up by abort()")
    assert failed(cukern.all_to_all_dispatch, states[1], **a_call())[0] == 1


def test_what_has_arrived_is_received_after_another_rank_gave_up() -> None:
    states, back = after_one_step(deadline_s=30.0)
    receivers = [cukern.all_to_all_combine(x, **back, return_receiver=True) for x in states]
    states[1].abort()
    assert not np.isnan(receivers[0]()).any()
    states[0].check()
    assert (cukern.all_to_all_dispatch(states[0], **a_call()).topk_ids == -1).all()
    assert failed(states[0].check)[0] == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_slot_without_room_is_reported_by_all_ranks(apart: bool) -> None:
    states, back = after_one_step(deadline_s=30.0, apart=True)
    inverses = [np.arange(16, dtype=np.int32).reshape(8, 2) % 8 for _ in range(2)]
    inverses[1][1, 0] = inverses[1][0, 1] = -1  # slots of the tokens of rank 0; both have experts of rank 1
    receivers = [
        cukern.all_to_all_combine(
            x, back["expert_output"], None, back["topk_ids"], inverse=y, apart=apart, return_receiver=True
        )
        for x, y in zip(states, inverses, strict=True)
    ]
    assert all(np.isnan(receiver()).all() for receiver in receivers[::-1])
    assert failed(states[1].check)[:3] == (1, "combine", 1)
    assert "rank 1 failed: an expert of this rank has no row for a token" in failed(states[1].check)[3]
    assert failed(states[0].check)[3] == "combine 1 of rank 0 failed: rank 1 gave up"


def test_ranks_that_use_other_buffers_have_made_other_calls() -> None:
    states, _ = after_one_step(deadline_s=30.0)
    buffers = [0, 1]
    call = [*a_call().values()]
    for rank, buffer in enumerate(buffers):
        host = states[rank].host
        host.buffer[rank] = 1 - buffer  # as after a graph of its own
        twin.send(host, rank, buffer, call[0], None, call[1], call[2], False)
    for rank, buffer in enumerate(buffers):
        weights, ids = twin.receive(states[rank].host, rank, buffer, None)
        assert (ids == -1).all() and (weights == 0).all()
    assert failed(states[0].check) == (1, "dispatch", 2, "dispatch 2 of rank 0 failed: rank 1 made other calls before")
    assert failed(states[1].check)[1:3] == ("dispatch", 2)


def test_an_exception_is_pickled_with_its_attributes() -> None:
    # As torch's and multiprocessing's workers send it to their parents.
    error = AllToAllError("dispatch 3 of rank 0 failed", 1, "dispatch", 3)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.phase, copy.step) == (str(error), 1, "dispatch", 3)


# --- ranks that connect -------------------------------------------------------------------------------


class Gathering:
    """An all_gather of threads."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.slots: list[Any] = [None] * ranks
        self.calls = 0

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def all_gather(own: Any) -> list[Any]:
            self.slots[rank] = pickle.dumps(own)
            self.barrier.wait(20)
            found = [pickle.loads(x) for x in self.slots]
            self.calls += rank == 0
            self.barrier.wait(20)
            return found

        return all_gather


def connected(changes: list[dict[str, Any]], wrap: Any = None) -> list[Any]:
    """What `connect` gives or raises on each rank."""
    gathering = Gathering(len(changes))

    def connect(rank: int) -> Any:
        given = {"rank": rank, "ranks": len(changes), "device": 0, "all_gather": gathering.of(rank), **SIZES}
        return AllToAllState.connect(**{**given, **changes[rank]})

    return at_once(range(len(changes)), connect)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 256}, "hidden must be the same on all ranks, 128 on rank 0, got 256 on rank 1"),
        ({"max_tokens": 5}, "max_tokens must be the same on all ranks, 4 on rank 0, got 5 on rank 1"),
        ({"topk": 1}, "topk must be the same on all ranks, 2 on rank 0, got 1 on rank 1"),
        ({"num_experts": 8}, "num_experts must be the same on all ranks, 4 on rank 0, got 8 on rank 1"),
        ({"apart": True}, "apart must be the same on all ranks, False on rank 0, got True on rank 1"),
        ({"deadline_s": 3}, "deadline_s must be the same on all ranks, 30.0 on rank 0, got 3.0 on rank 1"),
        (
            {"expert_rank": [1, 0, 0, 1]},
            r"expert_rank must be the same on all ranks, None on rank 0, got \(1, 0, 0, 1\)",
        ),
        ({"ranks": 4}, "ranks must be the same on all ranks, 2 on rank 0, got 4 on rank 1"),
        (
            {"rank": 0},
            "all_gather must be a function that gives the ranks' objects in their order, got that of rank 0 as",
        ),
    ],
)
def test_ranks_that_differ_do_not_connect(change: dict[str, Any], message: str) -> None:
    for error in connected([{}, change]):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error


def test_one_rank_with_wrong_arguments_stops_all() -> None:
    first, second = connected([{"topk": 33}, {}])
    assert isinstance(first, ValueError) and str(first).startswith("topk must be an integer in [1, 32]")
    assert isinstance(second, ValueError) and str(second) == f"rank 0 could not connect: {first}"


def test_too_few_ranks_and_other_hosts_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in connected([{"ranks": 4}, {"ranks": 4}]):
        assert "all_gather must be a function that gives the objects of 4 ranks, got 2" in str(error)
    hosts = iter(("a", "b"))
    monkeypatch.setattr(parts.windows, "host_id", lambda: next(hosts))
    for error in connected([{}, {}]):
        assert str(error) == "rank 1 is on another host than rank 0, so neither can map the other's memory"


def test_a_device_that_is_not_there_stops_all_ranks() -> None:
    first, second = connected([{"device": 999}, {"device": 998}])
    assert "device must be an integer in" in str(first) and "CUDA devices are seen), got 999" in str(first)
    assert "got 998" in str(second)


class Memory:
    """Memory of a rank that is none, to see what becomes of it."""

    made: list[Memory] = []  # noqa: RUF012  (cleared by each test)

    def __init__(self, device: int, *_: Any) -> None:
        self.device, self.window, self.progress, self.failure, self.rank_of = device, 4096 * (device + 1), 0, 0, 0
        self.released, self.mapped = False, []
        Memory.made.append(self)

    def map(self, handle: bytes) -> int:
        self.mapped.append(handle)
        return 100 + handle[0]

    def release(self) -> None:
        self.released = True


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices that are not there."""
    Memory.made.clear()
    monkeypatch.setattr(parts, "_Memory", Memory)
    monkeypatch.setattr(kernel, "device_count", lambda: 8)
    monkeypatch.setattr(kernel, "load_all", lambda stems, device, wanted: None)
    monkeypatch.setattr(parts.windows, "bus_id", lambda device: f"bus {device}")
    monkeypatch.setattr(parts.windows, "handle_of", lambda device, address: bytes([device]))
    monkeypatch.setattr(parts, "check_peer", lambda device, bus, other: None)
    monkeypatch.setattr(parts, "_link", lambda *given: given)
    monkeypatch.setattr(AllToAllState, "__init__", lambda self, link, memory: setattr(self, "link", link))


class Windows:
    """What `cukern.runtime.windows` gives, without a GPU."""

    def __init__(self, room: int = 100) -> None:
        self.room, self.taken = room, ctypes.create_string_buffer(256)
        self.held: list[tuple[str, int]] = []

    def _take(self, what: str, address: int) -> int:
        if len(self.held) >= self.room:
            raise MemoryError(what)
        self.held.append((what, address))
        return address

    def _give_back(self, what: str, address: int) -> None:
        self.held.remove((what, address))

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Windows:
        """Put this in place of the module."""
        host = ctypes.addressof(self.taken)
        numbers = itertools.count(1)
        functions = {
            "allocate_on_host": lambda size: self._take("host", host),
            "free_on_host": lambda address: self._give_back("host", address),
            "make_stream": lambda device: self._take("stream", next(numbers)),
            "destroy_stream": lambda device, stream: self._give_back("stream", stream),
            "allocate": lambda device, size: self._take("memory", next(numbers)),
            "free": lambda device, address: self._give_back("memory", address),
            "map_handle": lambda device, handle: self._take("mapping", next(numbers)),
            "unmap": lambda device, address: self._give_back("mapping", address),
        }
        for name, function in functions.items():
            monkeypatch.setattr(parts.windows, name, function)
        monkeypatch.setattr(parts, "_in_any_capture", contextlib.nullcontext)
        forget_memories(monkeypatch)
        return self


def forget_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no memory of an earlier test count as one in use."""
    monkeypatch.setattr(parts, "_in_use", set())
    monkeypatch.setattr(parts, "_abandoned", [])


def a_memory() -> Any:
    link = a_link(2, max_tokens=4)
    return parts._Memory(0, link.sizes, link.layout, 2)


def test_memory_is_freed_once_by_hand_or_with_the_last_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows().use(monkeypatch)
    memory = a_memory()
    memory.map(b"")
    assert sorted(what for what, _ in windows.held) == ["host", "mapping", "memory", "memory", "stream"]
    memory.release()
    memory.release()
    assert not windows.held
    memory = a_memory()
    state = AllToAllState(a_link(2, max_tokens=4), memory)
    view = memory  # as an array in the window holds it
    del state, memory
    gc.collect()
    assert windows.held
    del view
    gc.collect()
    assert not windows.held
    state = AllToAllState(a_link(2, max_tokens=4), a_memory())
    state.check()
    state.close()
    assert not windows.held


@pytest.mark.parametrize("next_step", ["make", "release", "collect"])
def test_collected_memory_is_freed_when_no_kernel_waits(next_step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # To free waits for the kernels of a device, and one of them may wait for a rank that is not launched yet.
    windows = Windows().use(monkeypatch)
    first, second = a_memory(), a_memory()
    both = len(windows.held)
    del first
    gc.collect()
    assert len(windows.held) == both
    if next_step == "make":
        third = a_memory()
        assert len(windows.held) == both
        third.release()
        assert len(windows.held) == both // 2
    elif next_step == "release":
        second.release()
    second = None
    gc.collect()
    assert not windows.held


@pytest.mark.parametrize("room", range(4))
def test_memory_that_cannot_be_had_leaves_none_behind(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(room).use(monkeypatch)
    with pytest.raises(MemoryError):
        a_memory()
    assert not windows.held


def test_a_failure_that_a_kernel_notes_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows().use(monkeypatch)
    state = AllToAllState(a_link(2, max_tokens=4), a_memory())
    fields = template.struct_named("all_to_all/combine", "Failure").fields
    for name, value in {"rank": 1, "phase": twin.COMBINE, "step": 7, "code": twin.PAST_DEADLINE}.items():
        ctypes.c_int.from_buffer(windows.taken, fields[name][0]).value = value
    assert failed(state.check) == (1, "combine", 7, "combine 7 of rank 0 failed: rank 1 did not come within 2.5 s")
    state.close()


@pytest.mark.usefixtures("no_gpu_needed")
def test_each_rank_maps_the_windows_of_the_others() -> None:
    states = connected([{"device": 3}, {"device": 4}, {"device": 4}, {"device": 5, "num_experts": 4}])
    links = [state.link for state in states]
    assert [link[1] for link in links] == [0, 1, 2, 3]
    assert links[0][2] == (4096 * 4, 104, 104, 105)
    assert links[2][2] == (103, 104, 4096 * 5, 105)
    assert [link[3] for link in links] == [1, 2, 2, 1]  # ranks on the GPU
    assert not any(memory.released for memory in Memory.made)


@pytest.mark.usefixtures("no_gpu_needed")
def test_ranks_that_cannot_map_each_other_free_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_peer(device: int, bus: str, other: int) -> None:
        if (device, other) == (1, 2):
            raise ValueError("they are not linked")

    monkeypatch.setattr(parts, "check_peer", check_peer)
    found = connected([{"device": i} for i in range(4)])
    assert [str(x) for x in found] == [
        "they are not linked" if rank == 1 else "rank 1 could not connect: they are not linked" for rank in range(4)
    ]
    assert len(Memory.made) == 4 and all(memory.released for memory in Memory.made)


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_rank_that_is_lost_while_connecting_frees_memory() -> None:
    gathering = Gathering(1)

    def all_gather(own: Any) -> list[Any]:
        if gathering.calls:
            raise TimeoutError("the others did not come")
        return gathering.of(0)(own)

    with pytest.raises(TimeoutError):
        AllToAllState.connect(0, 1, 0, all_gather, **SIZES)
    assert [memory.released for memory in Memory.made] == [True]


# --- what the kernels are given, without a GPU --------------------------------------------------------


def test_the_constants_of_twin_and_template_agree() -> None:
    constants = template.constants("all_to_all/dispatch")
    names = ("PAST_DEADLINE", "ABORTED", "OVER_CAPACITY", "OTHER_CALL", "DISPATCH", "COMBINE", "GROUP")
    assert {name: constants[name] for name in names} == {name: getattr(twin, name) for name in names}
    combine = template.constants("all_to_all/combine")
    assert {name: combine[name] for name in names[:-1]} == {name: getattr(twin, name) for name in names[:-1]}
    shared = "MAX_RANKS", "SEND", "RECEIVE"
    assert {name: constants[name] for name in shared} == {name: getattr(layouts, name) for name in shared}
    failure = template.struct_named("all_to_all/dispatch", "Failure")
    assert failure.size == 16 and [*failure.fields] == ["code", "rank", "phase", "step"]
    assert parts._PHASES == ("dispatch", "combine") and (twin.DISPATCH, twin.COMBINE) == (0, 1)


def test_the_parts_of_a_window_do_not_overlap() -> None:
    for ranks, apart in itertools.product((1, 2, 16), (False, True)):
        sizes = layouts.Sizes.checked(ranks, 5, 272, 3, 16, apart, 1.0, None)
        layout = layouts.Layout.of(sizes, ranks)
        places = ranks * 5
        back = 5 * (max(ranks, 3) if apart else ranks)
        bytes_of = {"rows": places * 272 * 2, "scales": places * 3 * 4, "ids": places * 12, "weights": places * 12}
        spans = [(0, template.struct_named("all_to_all/dispatch", "Signals").size)]
        spans += [(start, start + size) for name, size in bytes_of.items() for start in getattr(layout, name)]
        spans += [(layout.partial, layout.partial + back * 272 * 2), (layout.flags, layout.flags + back * 4)]
        spans.sort()
        assert all(end <= start and start % 256 == 0 for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= layout.size


def a_link(ranks: int = 4, sharing: int = 1, max_tokens: int = 5000, **sizes: Any) -> parts.Link:
    """What a state on a GPU would have, at addresses that are none."""
    given = {
        "hidden": 384,
        "topk": 8,
        "num_experts": 64,
        "apart": True,
        "deadline_s": 2.5,
        "expert_rank": None,
        **sizes,
    }
    checked = layouts.Sizes.checked(ranks, max_tokens, **given)
    addresses = tuple(2**30 * (rank + 1) for rank in range(ranks))
    layout = layouts.Layout.of(checked, ranks)
    return parts.Link(0, 2 % ranks, ranks, addresses, 64, 128, 0, sharing, checked, layout, None)


def a_dispatch(tokens: int, link: parts.Link, quantize: bool = False, phases: int = 3) -> tuple[Any, ...]:
    rows = np.zeros((tokens, link.sizes.hidden), np.float16)
    routing = np.zeros((tokens, link.sizes.topk), np.float32), np.zeros((tokens, link.sizes.topk), np.int32)
    return rows, *routing, link, 1, quantize, phases


def a_combine(tokens: int, link: parts.Link, phases: int = 3) -> tuple[Any, ...]:
    rows = np.zeros((link.ranks * link.sizes.max_tokens, link.sizes.hidden), np.float16)
    return rows, None, np.zeros((tokens, link.sizes.topk), np.int32), link, 1, False, phases


def test_the_kernels_are_given_the_places_of_the_buffer(pretended: PretendedGPU) -> None:  # noqa: F811
    link = a_link()
    for quantize, width in ((False, 768), (True, 384)):
        op._dispatch(*[as_torch(x) if isinstance(x, np.ndarray) else x for x in a_dispatch(7, link, quantize)])
        fields = pretended.launches[-1].fields
        assert (fields["tokens"], fields["buffer"], fields["width"]) == (7, 1, width)
        assert [fields[f"{name}_at"] for name in ("rows", "scales", "ids", "weights")] == [
            of[1] for of in (link.layout.rows, link.layout.scales, link.layout.ids, link.layout.weights)
        ]
        ranks = fields["ranks"]
        assert ranks["windows"] == [*link.windows, *[0] * (layouts.MAX_RANKS - 4)]
        assert (ranks["progress"], ranks["failure"], ranks["rank_of"]) == (64, 128, 0)
        assert (ranks["rank"], ranks["ranks"], ranks["timeout_ns"]) == (2, 4, 2_500_000_000)
        assert (ranks["experts"], ranks["experts_per_rank"]) == (64, 16)


def of_registers(file: str, arguments: tuple[str | int, ...]) -> int:
    """The blocks that a multiprocessor of Hopper holds by the registers of an instance."""
    path, _ = compiler.cubin(compiler.Instance(f"all_to_all/{file}", f"{file}_tokens", arguments), "90a")
    note = compiler.read_note(path)
    assert note is not None
    per_warp = -(-resources(note).registers * 32 // 256) * 256  # they are given out by 256
    return 65536 // (per_warp * 8)


@pytest.mark.parametrize("sharing", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 200, 5000])
@pytest.mark.parametrize("phases", [layouts.SEND, layouts.RECEIVE, layouts.SEND | layouts.RECEIVE])
def test_all_blocks_are_resident_beside_those_of_the_ranks_that_share_the_gpu(
    sharing: int, tokens: int, phases: int
) -> None:
    # They wait for each other: one that is not resident would never come.
    link = a_link(8, sharing)
    for made, file in ((a_dispatch, "dispatch"), (a_combine, "combine")):
        trace, _ = plan_of(f"_{file}", *made(tokens, link, phases=phases))
        for step in trace.steps:
            most = of_registers(file, step.variant.instance.arguments) * H200.multiprocessors
            assert 1 <= step.grid[0] <= most // sharing
        # A call that receives counts itself, whether it has tokens or not.
        assert len(trace.steps) == 1 or phases == layouts.SEND


def test_some_blocks_send_on_the_smallest_part_of_a_gpu() -> None:
    values, made = a_combine(5, a_link(8, 8)), OPS["_combine"]
    trace, _, _ = made.record(made.kind_of(values, {}), values, on=H200._replace(multiprocessors=1))
    (step,) = trace.steps
    assert step.fields["senders"] == 1


def test_the_reasons_for_a_launch() -> None:
    link = a_link(8, 2)
    (sent,) = plan_of("_dispatch", *a_dispatch(5, link))[0].steps
    (summed,) = plan_of("_combine", *a_combine(5, link))[0].steps
    assert sent.why.startswith("send and receive in one launch, ") and "a block for each of 5 tokens" in sent.why
    assert "(that run at once, shared by the 2 ranks of the GPU)" in sent.why
    assert f"; {summed.fields['senders']} blocks send and " in summed.why
    assert f"vectors a thread ({layouts.MANY_VECTORS} from {layouts.MANY_TOKENS + 1} tokens on)" in summed.why


def test_a_launch_has_the_tokens_of_its_call() -> None:
    link = a_link()
    for tokens in (5, 9, 5000):
        for name, made in (("_dispatch", a_dispatch), ("_combine", a_combine)):
            (step,) = plan_of(name, *made(tokens, link))[0].steps
            assert step.fields["tokens"] == tokens


# --- the kernels against the twin ---------------------------------------------------------------------

LIBRARIES = pytest.mark.parametrize("library", ["cupy", "cuda"])


def two_gpus() -> None:
    if kernel.device_count() < 2:
        pytest.skip("there is one GPU")


def on_gpus(case: Case, devices: list[int], library: str = "cupy", split: bool = True, **options: Any) -> list[Rank]:
    """The ranks of a case on GPUs. Those that share one take turns, so they send first and receive later."""
    states = case.local(devices, **options)
    return [Rank(state, case, f"{library}:{state.device}", split) for state in states]


def check_steps(
    case: Case, ranks: list[Rank], steps: int = 3, before: Callable[[list[Rank]], None] | None = None
) -> None:
    """Steps of the ranks give the bits of the twin."""
    want = from_twin(case, steps)
    for step in range(steps):
        if before:
            before(ranks)
        assert_same(in_turns(ranks, step), want[step])
    for rank in ranks:
        rank.state.check()


@pytest.mark.gpu
@pytest.mark.sanitize
@of_cases()
def test_the_kernels_give_the_bits_of_the_twin(case: Case) -> None:
    check_steps(case, on_gpus(case, [0] * case.ranks, deadline_s=300.0))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "library"), [((9,), "cuda"), ((300, 513), "cupy"), ((5, 0, 300, 1), "cuda")])
def test_every_form_and_mode_gives_the_bits_of_the_twin(
    tokens: tuple[int, ...], form: str, mode: str, library: str
) -> None:
    # Up to 256 tokens come back as lines; more than 512 take large chunks, and their peers may take small ones.
    experts = DEALT if len(tokens) == 4 else None
    case = Case(tokens, hidden=1152, expert_rank=experts, form=form, mode=mode, id_dtype="int64")
    check_steps(case, on_gpus(case, [0] * case.ranks, library), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["summed", "slots", "apart"])
@pytest.mark.parametrize("hidden", [3584, 3600, 8064])
@pytest.mark.parametrize("tokens", [(3, 256), (257, 513), (513, 1)])
def test_rows_of_several_chunks(tokens: tuple[int, ...], hidden: int, mode: str) -> None:
    # A small chunk is 3584 numbers and a large one twice as many: rows of one, of an odd number, and of a part of one.
    case = Case(tokens, hidden=hidden, mode=mode)
    check_steps(case, on_gpus(case, [0, 0]), 2)


@pytest.mark.gpu
def test_foreign_arrays_on_the_gpu() -> None:
    case = Case((4, 3), dtype="float16")
    ranks = on_gpus(case, [0, 0], "foreign cuda")
    check_steps(case, ranks, 2)
    assert type(ranks[0].received.hidden_states) is type(ranks[0].out) is cupy.ndarray


@pytest.mark.gpu
@pytest.mark.waits
@LIBRARIES
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_two_gpus_at_once(form: str, mode: str, split: bool, library: str) -> None:
    two_gpus()
    case = Case((300, 211), hidden=1152, form=form, mode=mode)
    check_steps(case, on_gpus(case, [0, 1], library, split))


@pytest.mark.gpu
@pytest.mark.waits
@LIBRARIES
def test_ranks_that_share_two_gpus(library: str) -> None:
    two_gpus()
    for case in (UNEVEN, UNEVEN._replace(mode="apart"), CASES["rows quantize"]):
        check_steps(case, on_gpus(case, [0, 1, 1, 0], library))


@pytest.mark.gpu
@LIBRARIES
def test_a_gpu_that_is_not_the_current_one(library: str) -> None:
    two_gpus()
    case = Case((6, 3))
    ranks = on_gpus(case, [1, 1], library)
    check_steps(case, ranks)
    assert all(get_device(x) == 1 for x in (*ranks[0].received, ranks[0].out) if x is not None)


def get_device(array: Any) -> int | None:
    library = arrays.library_of(array)
    assert library is not None
    return library.device(array)


def poison(ranks: list[Rank]) -> None:
    """Fill the parts of all windows with NaN, except signals."""
    for rank in ranks:
        state, layout = rank.state, rank.state.link.layout
        rows = state.ranks * state.max_tokens
        back = state.max_tokens * max(state.ranks, state.topk if rank.case.mode.startswith("apart") else 1)
        sizes = {"rows": rows * state.hidden * 2, "scales": rows * max(1, state.hidden // 128) * 4}
        spans = [(start, size) for name, size in sizes.items() for start in getattr(layout, name)]
        with cupy.cuda.Device(state.device):
            for start, size in [*spans, (layout.partial, back * state.hidden * 2)]:
                cupy.cuda.runtime.memset(state.link.windows[state.rank] + start, 0xFF, size)
            cupy.cuda.runtime.deviceSynchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_a_window_leaks(form: str, mode: str) -> None:
    for tokens in ((5, 0, 7, 1), (300, 0, 1, 270)):
        case = Case(tokens, hidden=384, expert_rank=DEALT, form=form, mode=mode)
        check_steps(case, on_gpus(case, [0] * 4), before=poison)


@pytest.mark.gpu
@settings(max_examples=15)
@given(st.data())
def test_any_exchange_on_the_gpu(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6), "ranks")
    experts = data.draw(st.integers(1, 40), "experts")
    case = Case(
        tuple(data.draw(st.lists(st.sampled_from((0, 1, 2, 31, 260)), min_size=ranks, max_size=ranks), "tokens")),
        hidden=128 * data.draw(st.integers(1, 9), "hidden"),
        topk=data.draw(st.sampled_from((1, 2, 8, 31, 32)), "topk"),
        num_experts=experts,
        expert_rank=tuple(data.draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts), "owner")),
        dtype=data.draw(st.sampled_from(op.DTYPES), "dtype"),
        id_dtype=data.draw(st.sampled_from(op.ID_DTYPES), "ids"),
        form=data.draw(st.sampled_from(FORMS), "form"),
        mode=data.draw(st.sampled_from(("summed", "slots", "unweighted", "apart")), "mode"),
    )
    check_steps(case, on_gpus(case, [0] * ranks), 2)


@pytest.mark.gpu
@LIBRARIES
@pytest.mark.parametrize("split", [False, True])
def test_results_go_into_out_on_the_gpu(library: str, split: bool) -> None:
    case = Case((3,))
    want = from_twin(case)[0][0]
    (rank,) = on_gpus(case, [0], library, split)
    out = put(rank.place, np.full((3, case.hidden), np.nan, arrays.numpy_dtype("bfloat16")))
    dispatch_in_turns([rank], 0)
    rank.answer()
    rank.send_back(out=out)
    rank.receive_back()
    assert rank.out is out
    same_bits(get(out), want.out)


@pytest.mark.gpu
def test_arrays_of_another_place_are_refused() -> None:
    case = Case((3,))
    (rank,) = on_gpus(case, [0])
    rank.take(0)
    own = rank.arguments
    others = ["numpy", *(["cupy:1"] if kernel.device_count() > 1 else [])]
    for other in others:
        elsewhere = {name: put(other, x) for name, x in batch_of(case, 0)._asdict().items()}
        with pytest.raises(ValueError, match="hidden_states must be on CUDA device 0, as the state is, got one on"):
            cukern.all_to_all_dispatch(rank.state, *[*elsewhere.values()][:3])
        for name in ("topk_weights", "topk_ids"):
            with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
                cukern.all_to_all_dispatch(rank.state, **{**own, name: elsewhere[name]})
    (host,) = case.local()
    with pytest.raises(
        ValueError, match="hidden_states must be in host memory, as the state is, got one on CUDA device"
    ):
        cukern.all_to_all_dispatch(host, **own)
    check_steps(case, [rank], 1)


# --- streams and graphs -------------------------------------------------------------------------------

#: How long inputs are late, in cycles of the GPU: 10 ms, in which the host is through with every call.
LATE = 20_000_000


def copy_into(to: Any, value: Any) -> None:
    """Give an array the values of another one, on the current stream."""
    if isinstance(to, torch.Tensor):
        to.copy_(value)
    else:
        to.data.copy_from_device_async(value.data, value.nbytes)


@pytest.mark.gpu
@LIBRARIES
@pytest.mark.parametrize("form", ["plain", "quantize"])
def test_the_callers_stream(form: str, library: str) -> None:
    case, place = Case((5,), form=form), f"{library}:0"
    ours = Rank(case.local()[0], case)
    want = in_turns([ours])[0]
    given = [ours.arguments[x] for x in ("hidden_states", "topk_weights", "topk_ids")]
    given += [ours.answered[x] for x in ("expert_output", "inverse")]
    real, late = [put(place, x) for x in given], [put(place, np.zeros_like(x)) for x in given]
    (state,) = case.local([0])

    def step() -> tuple[Any, Any]:
        hidden, weights, ids, output, inverse = late
        got = cukern.all_to_all_dispatch(state, hidden, weights, ids, quantize=form == "quantize")
        return got, cukern.all_to_all_combine(state, output, weights, ids, inverse=inverse)

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        step()  # the stream has its memory, with results of zeros in it
        torch.cuda._sleep(LATE)
        for to, value in zip(late, real, strict=True):
            copy_into(to, value)
        got, out = step()
    stream.synchronize()
    same_bits(get(got.topk_ids), want.topk_ids)
    same_bits(get(got.topk_weights), want.topk_weights)
    here = ours.here.any(1)
    np.testing.assert_array_equal(get(got.hidden_states)[here], want.rows[here])
    same_bits(get(out), want.out)


class Graph:
    """Steps of one rank in a CUDA graph, on a stream of its own."""

    def __init__(self, state: Any, case: Case, dispatches: int) -> None:
        self.state, self.case, self.device = state, case, torch.device("cuda", state.device)
        self.place = f"cuda:{state.device}"
        batch = batch_of(case, state.rank)
        self.static = [put(self.place, np.zeros_like(x)) for x in batch[:3]]
        rows = np.zeros((case.places * case.topk, case.hidden), arrays.numpy_dtype(case.dtype))
        self.output = put(self.place, rows)
        self.map = state.expert_map(self.output)
        with torch.cuda.device(self.device):
            self.stream = torch.cuda.Stream(self.device)
            self.graph = torch.cuda.CUDAGraph()
            ids = torch.full((case.places, case.topk), -1, dtype=torch.int32, device=self.device)
            self.sort(ids)  # loads its kernels, as a capture cannot
            dtype, columns = ("float8_e4m3fn", case.hidden // 128) if case.form == "quantize" else (case.dtype, 0)
            for buffer in range(2):
                state.received(self.output, buffer, dtype, columns, None, None)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.results = [self.step() for _ in range(dispatches)]

    def sort(self, ids: Any) -> Any:
        local = self.state.num_local_experts
        return cukern.moe_sort(ids, self.case.num_experts, expert_map=self.map, num_local_experts=local)[2]

    def step(self) -> tuple[Any, Any]:
        hidden, weights, ids = self.static
        got = cukern.all_to_all_dispatch(self.state, hidden, weights, ids, quantize=self.case.form == "quantize")
        rows = got.hidden_states.view(torch.uint8).clone()  # another dispatch of the graph writes there
        inverse = self.sort(got.topk_ids)
        return (rows, got), cukern.all_to_all_combine(self.state, self.output, weights, ids, inverse=inverse)

    def take(self, ours: Rank) -> None:
        """The inputs of a rank of the twin."""
        given = [ours.arguments[x] for x in ("hidden_states", "topk_weights", "topk_ids")]
        given = [put(self.place, x) for x in (*given, ours.answered["expert_output"])]
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            for (_, got), out in self.results:
                got.topk_ids.fill_(-7)
                out.fill_(torch.nan)
            for to, value in zip((*self.static, self.output), given, strict=True):
                to.copy_(value)
            self.stream.synchronize()

    def replay(self) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.graph.replay()

    def check(self, ours: Rank) -> None:
        self.stream.synchronize()
        self.state.check()
        want, here = ours.outcome, ours.here.any(1)
        for (rows, got), out in self.results:
            same_bits(get(got.topk_ids), want.topk_ids)
            same_bits(get(got.topk_weights), want.topk_weights)
            theirs = np.ascontiguousarray(want.rows).view(np.uint8)
            np.testing.assert_array_equal(get(rows)[here], theirs[here])
            same_bits(get(out), want.out)


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("form", ["plain", "quantize"])
@pytest.mark.parametrize("dispatches", [1, 2, 3])
@pytest.mark.parametrize("devices", [[0], [0, 0], [0, 1]], ids=str)
def test_graphs_follow_their_inputs(devices: list[int], dispatches: int, form: str) -> None:
    # After an odd number the first dispatch of a replay takes the buffer of the last one before.
    if 1 in devices:
        two_gpus()
    case = Case((9, 300)[: len(devices)], hidden=384, form=form, turning=False)
    ours = [Rank(state, case) for state in case.local()]
    in_turns(ours)
    graphs = [Graph(state, case, dispatches) for state in case.local(devices)]
    for step in (0, 1, 2, 0, 0):
        in_turns(ours, step)
        for graph, rank in zip(graphs, ours, strict=True):
            graph.take(rank)
        for graph in graphs:
            graph.replay()
        for graph, rank in zip(graphs, ours, strict=True):
            graph.check(rank)


@pytest.mark.gpu
def test_a_graph_between_calls() -> None:
    # Calls and replays may follow each other as they like, if all ranks do the same.
    case = Case((9,))
    (ours,) = [Rank(state, case) for state in case.local()]
    (state,) = case.local([0])
    graph, eager = Graph(state, case, 1), Rank(state, case, "cupy:0")
    for step in range(6):
        want = in_turns([ours], step)
        if step % 3:
            graph.take(ours)
            graph.replay()
            graph.check(ours)
        else:
            got = in_turns([eager], step)
            assert_same([x._replace(expert_load=want[0].expert_load) for x in got], want)


@pytest.mark.gpu
def test_a_combine_answers_the_last_dispatch() -> None:
    # A replay between the two puts other tokens in the place of those that the combine knows.
    (state,) = AllToAllState.local([0], max_tokens=2, hidden=128, topk=1, num_experts=2)
    rows, weights, ids = (cupy.ones((2, n), kind) for n, kind in ((128, "float16"), (1, "float32"), (1, "int32")))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cukern.all_to_all_dispatch(state, rows, weights, ids)
        stream.begin_capture()
        cukern.all_to_all_dispatch(state, rows, weights, ids)
        graph = stream.end_capture()
        got = cukern.all_to_all_dispatch(state, rows, weights, ids)
        graph.launch(stream)
        out = cukern.all_to_all_combine(state, got.hidden_states.copy(), None, ids)
    stream.synchronize()
    assert np.isnan(cupy.asnumpy(out)).all()
    assert failed(state.check) == (0, "combine", 0, "combine 0 of rank 0 failed: rank 0 made other calls before")


@pytest.mark.gpu
@pytest.mark.waits
def test_a_graph_that_fails_gives_nothing_that_looks_right() -> None:
    case = Case((9, 9))
    ours = [Rank(state, case) for state in case.local()]
    states = case.local([0, 0], deadline_s=0.3)
    graphs = [Graph(state, case, 2) for state in states]
    in_turns(ours)
    graphs[0].take(ours[0])
    graphs[0].replay()
    graphs[0].stream.synchronize()
    for (_, got), out in graphs[0].results:
        assert (get(got.topk_ids) == -1).all() and not get(got.topk_weights).any()
        # A token without an expert, or with those of this rank alone, waits for no one, but comes after the failure.
        assert np.isnan(get(out).astype(np.float32)).all()
    for _ in range(2):
        assert failed(states[0].check)[:3] == (1, "dispatch", 0)
    start = time.monotonic()
    graphs[0].replay()
    graphs[0].stream.synchronize()
    assert time.monotonic() - start < 5


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("mode", ["slots", "apart"])
@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=str)
def test_a_thousand_runs_give_the_same_bits(devices: list[int], mode: str) -> None:
    if 1 in devices:
        two_gpus()
    case = Case((64, 300), hidden=1152, mode=mode)
    ranks = on_gpus(case, devices, "cuda", split=devices[0] == devices[1], deadline_s=60.0)
    want = in_turns(ranks)
    first = [(rank.received.topk_ids.clone(), rank.out.clone()) for rank in ranks]
    # Rows and ids that come twice are the same, and so is where the experts find them.
    rows = [rank.received.hidden_states.clone() for rank in ranks]
    masks = [torch.from_numpy(rank.here.any(1)).to(x.device) for rank, x in zip(ranks, rows, strict=True)]
    different = [torch.zeros((), dtype=torch.bool, device=x.device) for x in rows]
    for _ in range(1000):
        for rank in ranks:
            rank.send()
        for rank in ranks:
            rank.received = rank.receiver() if rank.split else rank.receiver
        for rank in ranks:
            rank.send_back()
        for rank in ranks:
            rank.receive_back()
        for i, rank in enumerate(ranks):
            with torch.cuda.device(rows[i].device):
                ids, out = first[i]
                arrived = rank.received.hidden_states.view(torch.int16) != rows[i].view(torch.int16)
                different[i] |= (arrived & masks[i][:, None]).any() | (rank.received.topk_ids != ids).any()
                different[i] |= (rank.out.view(torch.int16) != out.view(torch.int16)).any()
    for rank, found in zip(ranks, different, strict=True):
        rank.state.check()
        assert not found.item()
    assert_same(want, from_twin(case)[0])


# --- failures on the GPU ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.waits
@LIBRARIES
def test_a_rank_that_never_comes_on_the_gpu(library: str) -> None:
    case = Case((5, 4), form="plain")
    ranks = on_gpus(case, [0, 0], library, split=False, deadline_s=0.5)
    for rank in ranks:
        rank.take(0)
    torch.cuda.synchronize()
    start = time.monotonic()
    ranks[0].send()
    torch.cuda.synchronize()
    assert 0.4 < time.monotonic() - start < 5
    got = ranks[0].receiver
    assert (get(got.topk_ids) == -1).all() and not get(got.topk_weights).any() and not get(ranks[0].load).any()
    want = (1, "dispatch", 0, "dispatch 0 of rank 0 failed: rank 1 did not come within 0.5 s")
    assert failed(ranks[0].state.check) == want
    assert failed(cukern.all_to_all_dispatch, ranks[0].state, **ranks[0].arguments) == want
    # The late one may have what was sent to it, but no answer.
    start = time.monotonic()
    other, phase, step, message = failed(one_step, ranks[1])
    assert time.monotonic() - start < 5
    assert (other, step, message) == (0, 0, f"{phase} 0 of rank 1 failed: rank 0 gave up")
    if phase == "combine":
        assert np.isnan(get(ranks[1].receiver).astype(np.float32)).any()


def one_step(rank: Rank) -> None:
    """A step of a rank that looks after each call whether it failed."""
    rank.send()
    torch.cuda.synchronize()
    rank.state.check()
    rank.receive()
    rank.answer()
    rank.send_back()
    torch.cuda.synchronize()
    rank.state.check()


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("mode", ["summed", "slots", "apart"])
def test_a_rank_that_never_comes_to_a_combine_on_the_gpu(mode: str) -> None:
    case = Case((300, 9), mode=mode)
    ranks = on_gpus(case, [0, 0], deadline_s=0.5)
    want = from_twin(case)[0][0].out
    dispatch_in_turns(ranks, 0)
    ranks[0].answer()
    ranks[0].send_back()
    ranks[0].receive_back()
    cupy.cuda.get_current_stream().synchronize()
    out = get(ranks[0].out)
    lost = np.isnan(out.astype(np.float32)).any(1)
    same_bits(out[~lost], want[~lost])
    ids = batch_of(case, 0).topk_ids
    assert lost[((ids >= 8) & (ids < 16)).any(1)].all() and lost.any()
    assert failed(ranks[0].state.check)[:3] == (1, "combine", 0)


@pytest.mark.gpu
@pytest.mark.waits
def test_giving_up_frees_the_others_at_once_on_the_gpu() -> None:
    case = Case((5, 4))
    devices = [0, 1 % kernel.device_count()]
    ranks = on_gpus(case, devices, split=False, deadline_s=60.0)
    ranks[0].take(0)
    start = time.monotonic()
    ranks[0].send()
    time.sleep(0.2)  # its kernel waits
    ranks[1].state.abort()
    with cupy.cuda.Device(0):
        cupy.cuda.get_current_stream().synchronize()
    assert time.monotonic() - start < 10
    assert (get(ranks[0].receiver.topk_ids) == -1).all()
    assert failed(ranks[0].state.check) == (1, "dispatch", 0, "dispatch 0 of rank 0 failed: rank 1 gave up")
    assert failed(ranks[1].state.check) == (1, "dispatch", -1, "rank 1 has given up by abort()")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["slots", "batched", "apart"])
def test_a_slot_without_room_is_reported_on_the_gpu(mode: str) -> None:
    case = Case((5, 300), mode=mode)
    ranks = on_gpus(case, [0, 0], deadline_s=20.0)
    dispatch_in_turns(ranks, 0)
    for rank in ranks:
        rank.answer()
    inverse = get(ranks[1].answered["inverse"])
    place, slot = np.argwhere(ranks[1].here)[0]
    assert place < 5
    inverse[place, slot] = -1
    ranks[0].send_back()
    ranks[1].send_back(inverse=put("cupy:0", inverse))
    for rank in ranks[::-1]:
        rank.receive_back()
    cupy.cuda.get_current_stream().synchronize()
    assert failed(ranks[1].state.check)[:3] == (1, "combine", 0)
    assert "an expert of this rank has no row for a token" in failed(ranks[1].state.check)[3]
    # The place is a token of rank 0, which so has no answer for it.
    assert np.isnan(get(ranks[0].out)[place].astype(np.float32)).all()
    assert failed(ranks[0].state.check)[:3] == (1, "combine", 0)


@pytest.mark.gpu
def test_ranks_that_use_other_buffers_have_made_other_calls_on_the_gpu() -> None:
    case = Case((5, 4))
    ranks = on_gpus(case, [0, 0], deadline_s=20.0)
    ranks[1].state._buffer = 0  # as after a graph of its own
    for rank in ranks:
        rank.take(0)
        rank.send()
    for rank in ranks:
        assert (get(rank.receiver().topk_ids) == -1).all()
    assert failed(ranks[0].state.check) == (
        1,
        "dispatch",
        0,
        "dispatch 0 of rank 0 failed: rank 1 made other calls before",
    )
    assert failed(ranks[1].state.check)[1:3] == ("dispatch", 0)


@pytest.mark.gpu
def test_a_window_is_freed_with_its_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    free = parts.windows.free
    monkeypatch.setattr(parts.windows, "free", lambda device, address: (freed.append(address), free(device, address)))
    forget_memories(monkeypatch)
    case = Case((5,))
    ranks = on_gpus(case, [0])
    (got,) = in_turns(ranks)
    rows, window, here = ranks[0].received.hidden_states, ranks[0].state.link.windows[0], ranks[0].here.any(1)
    ranks.clear()
    gc.collect()
    assert not freed
    same_bits(get(rows)[here], got.rows[here])
    del rows
    gc.collect()
    assert len(freed) == 2 and window in freed


@pytest.mark.gpu
def test_a_state_may_be_collected_while_a_graph_is_captured() -> None:
    ranks = on_gpus(Case((5,)), [0])
    in_turns(ranks)
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x += 1
        kept = weakref.ref(ranks[0].state)
        ranks.clear()
        gc.collect()
        assert kept() is None
        x += 1
    graph.replay()
    assert x.tolist() == [2] * 8


@pytest.mark.gpu
@pytest.mark.large(34)
@pytest.mark.parametrize("apart", [False, True])
def test_rows_that_are_far_apart(apart: bool) -> None:
    # Not for the sanitizer, which would take minutes. Each buffer of a window has more than 2^32 bytes.
    tokens, hidden = 149_000, 7168
    states = AllToAllState.local(
        [0, 0], max_tokens=tokens, hidden=hidden, topk=2, num_experts=2, apart=True, deadline_s=60.0
    )
    ids = torch.tensor([[0, 1]], dtype=torch.int32, device="cuda").repeat(tokens, 1)
    weights = torch.full((tokens, 2), 0.5, device="cuda")
    given = [torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in states]
    receivers = [
        cukern.all_to_all_dispatch(state, x, weights, ids, return_receiver=True)
        for state, x in zip(states, given, strict=True)
    ]
    received = [receiver().hidden_states for receiver in receivers]
    for rows in received:
        assert all(torch.equal(rows[r * tokens : (r + 1) * tokens], x) for r, x in enumerate(given))
    receivers = []
    for rank, (state, rows) in enumerate(zip(states, received, strict=True)):
        inverse = torch.full((2 * tokens, 2), -1, dtype=torch.int32, device="cuda")
        inverse[:, rank] = torch.arange(2 * tokens, dtype=torch.int32, device="cuda")
        receivers.append(
            cukern.all_to_all_combine(state, rows, weights, ids, inverse=inverse, apart=apart, return_receiver=True)
        )
    # Each rank gives half of a row back: the sums are exact.
    assert all(torch.equal(receiver(), x) for receiver, x in zip(receivers, given, strict=True))
    for state in states:
        state.check()


# --- ranks that are processes -------------------------------------------------------------------------


def steps_of(ranks: int) -> tuple[Case, ...]:
    """Cases of one state: uneven, all to one expert, quantized, apart, and summed."""
    tokens = tuple((5, 0, 7, 1, 3, 300, 2, 4)[rank % 8] for rank in range(ranks))
    plain = Case(tokens, hidden=384, num_experts=24, max_tokens=300)
    changes: list[dict[str, Any]] = [{}, {"to_one": True}, {"form": "quantize"}, {"mode": "apart"}, {"mode": "summed"}]
    return tuple(plain._replace(**change) for change in changes)


def check_outcomes(job: Job, reports: list[Report | None]) -> list[list[Outcome]]:
    """What the ranks got before anything went wrong is what the twin gives. Returns that."""
    want = expected(job)
    for rank, report in enumerate(reports):
        for got, of_step in zip(report.outcomes if report else [], want, strict=False):
            assert_same([got], [of_step[rank]])
    return want


def check_processes(folder: Path, devices: tuple[int, ...]) -> None:
    cases = steps_of(len(devices))
    job = Job(cases, devices, 60.0, 2 * len(cases))
    reports = Processes(folder, job).run()
    assert [report and report.error for report in reports] == [None] * len(devices)
    assert all(report and len(report.outcomes) == job.steps for report in reports)
    check_outcomes(job, reports)


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_processes_that_share_a_gpu(ranks: int, tmp_path: Path) -> None:
    check_processes(tmp_path, (0,) * ranks)


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("each", [1, 2, 4])
def test_processes_on_two_gpus(each: int, tmp_path: Path) -> None:
    two_gpus()
    check_processes(tmp_path, (0, 1) * each)


def test_processes_of_other_sizes_do_not_connect(tmp_path: Path) -> None:
    # Needs no GPU: it is found before any memory is taken.
    job = Job(steps_of(2), (0, 0), 5.0, 1, ("sizes", 1, 0))
    message = "hidden must be the same on all ranks, 384 on rank 0, got 512 on rank 1"
    assert [report and report.error for report in Processes(tmp_path, job).run()] == [("ValueError", message)] * 2


#: The rank of three that fails, and the calls in which the others can notice.
FAULTY = 1
FAULTS = {
    "killed before": [("dispatch", 1)],
    "killed in dispatch": [("dispatch", 1), ("combine", 1)],
    "killed in combine": [("combine", 1), ("dispatch", 2)],
    "late": [("dispatch", 1)],
    "abort": [("dispatch", 1)],
    "capacity": [("combine", 1)],
}


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_fails(fault: str, tmp_path: Path) -> None:
    deadline_s = 20.0 if fault in ("abort", "capacity") else 1.5
    devices = (0, 1 % kernel.device_count(), 0)
    job = Job((Case((5, 4, 7), hidden=384, num_experts=24),), devices, deadline_s, 4, (fault, FAULTY, 1))
    reports = Processes(tmp_path, job).run()
    assert (reports[FAULTY] is None) is fault.startswith("killed")
    want = check_outcomes(job, reports)
    survivors = {rank: report for rank, report in enumerate(reports) if rank != FAULTY and report}
    assert len(survivors) == 2
    for rank, report in survivors.items():
        assert report.error and report.error[0] == "AllToAllError" and report.where
        who, phase, step = report.where
        assert (phase, step) in FAULTS[fault]
        # The first to notice names the rank that failed, the other one whom it heard it from.
        assert report.error[1].startswith(f"{phase} {step} of rank {rank} failed: rank {who} ")
        assert report.seconds < min(deadline_s, 5.0) + 4.0
        if phase == "dispatch":
            assert report.ids is not None and (report.ids == -1).all()
        else:
            assert report.out is not None
            lost = np.isnan(report.out.astype(np.float32)).any(1)
            assert lost.any()
            same_bits(report.out[~lost], want[step][rank].out[~lost])
    assert FAULTY in [report.where[0] for report in survivors.values() if report.where]
    own = reports[FAULTY]
    if fault == "capacity":
        assert own and own.where == (FAULTY, "combine", 1) and own.error and "has no row for a token" in own.error[1]
