"""Layers over several ranks by stores into each other's memory, and the manager that sets them up.

Without a GPU the ranks are in host memory, in a thread each, and what they give has the bits of the twin.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import itertools
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from numpy.typing import NDArray

from cukern.fused_moe import (
    All2AllManager,
    AutoExperts,
    BatchedAutoExperts,
    FusedMoEModularKernel,
    FusedMoEQuantConfig,
    NcclPrepareAndFinalize,
    PushPrepareAndFinalize,
    TopKWeightAndReduceDelegate,
    TwoLevelPrepareAndFinalize,
)
from cukern.fused_moe.example import Layer, random_layer
from cukern.fused_moe.manager import Sizes, choose, hosts_of
from cukern.fused_moe.push import Turns
from cukern.ops.all_to_all import AllToAllError, AllToAllState
from cukern.reference import fused_moe as twin
from tests.buffers import same_bits, to_numpy
from tests.test_fused_moe_combinations import PLACES, as_tensor, compare, one_process

Array = NDArray[Any]

EXPERTS, INTER, HIDDEN, TOPK = 8, 128, 256, 3
QUANTIZATIONS = (None, "fp8_block", "fp8", "fp8 static", "mxfp4", "nvfp4")
DEADLINE = 90.0  # seconds, for processes

quantizations = pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=str)
formats = pytest.mark.parametrize("batched", [False, True], ids=["contiguous", "batched"])
SIZES: dict[str, Any] = {"num_experts": EXPERTS, "max_num_tokens": 7, "hidden": HIDDEN, "topk": TOPK}


class Ranks(NamedTuple):
    """A layer of all experts, and who has what.

    Attributes:
        layer: with the tokens of all ranks.
        counts: the tokens of each rank.
        expert_rank: the rank of each expert, or None.
        options: of the layer's call.
    """

    layer: Layer
    counts: list[int]
    expert_rank: list[int] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def owner(self) -> Array:
        count = len(self.layer.w1)
        return np.array(self.expert_rank) if self.expert_rank else np.arange(count) // (count // self.ranks)

    def tokens_of(self, rank: int) -> slice:
        ends = [0, *itertools.accumulate(self.counts)]
        return slice(ends[rank], ends[rank + 1])

    def of_rank(self, rank: int) -> Layer:
        return self.layer.of_rank(self.tokens_of(rank), self.owner == rank)

    def wanted(self) -> Array:
        """The bits of the result: the sums of each rank's experts, rounded, added up in the order of the ranks."""
        total = np.zeros(self.layer.hidden_states.shape, np.float32)
        for rank in range(self.ranks):
            here = self.owner == rank
            own = self.layer.of_rank(slice(None), here)
            expert_map = np.where(here, here.cumsum() - 1, -1).astype(np.int32)
            out = twin.fused_experts(*own.arrays, quant=own.config, expert_map=expert_map, **self.options)
            total += out.astype(np.float32)
        return total.astype(self.layer.hidden_states.dtype)

    def sizes(self, **others: Any) -> dict[str, Any]:
        x, ids = self.layer.hidden_states, self.layer.topk_ids
        most = max(1, *self.counts)
        sizes = {"num_experts": len(self.layer.w1), "max_num_tokens": most, "hidden": x.shape[1], "topk": ids.shape[1]}
        return {**sizes, "expert_rank": self.expert_rank, "deadline_s": 60.0, **others}


def made(
    rng: np.random.Generator, counts: list[int], quantization: str | None = None, dtype: str = "bfloat16",
    topk: int = TOPK,
) -> Ranks:  # fmt: skip
    """Random ranks with these numbers of tokens."""
    name = quantization and quantization.removesuffix(" static")
    layer = random_layer(rng, sum(counts), EXPERTS, INTER, HIDDEN, topk, name, dtype)
    if quantization == "fp8 static":
        scales = {f"{a}_scale": np.array([0.02], np.float32) for a in ("a1", "a2")}
        layer = layer._replace(config=FusedMoEQuantConfig.fp8(**layer.config.scales, **scales))
    return Ranks(layer, counts)


def uneven(ranks: int) -> list[int]:
    """Tokens of each rank: different numbers, and none on the second."""
    return [7, 0, 4, 1, 6, 2, 0, 5][:ranks]


def poison(state: AllToAllState, like: Any) -> None:
    """Fill a rank's window with NaN, so that what is read of places without a token shows."""
    for buffer in range(2):
        rows, scales, *_ = state.received(like, buffer, "bfloat16", HIDDEN // 128, None, None)
        scales[...] = float("nan")
        if isinstance(rows, torch.Tensor):
            rows.fill_(float("nan"))
        else:
            rows.view(np.uint16)[...] = 0x7FFF


def layer_on(
    manager: All2AllManager, own: Layer, batched: bool = False, shared: Any = None, **options: Any
) -> FusedMoEModularKernel:
    """The layer of a rank; `options` are those of `prepare_finalize`."""
    experts = (BatchedAutoExperts if batched else AutoExperts)(own.config)
    return FusedMoEModularKernel(manager.prepare_finalize(batched, **options), experts, shared)


def poison_all(managers: list[All2AllManager], put: Callable[[Any], Any]) -> None:
    """Poison the windows before any rank begins."""
    for manager in managers:
        assert manager.state is not None
        like = put_on(manager, put)(np.zeros(1, np.float32))
        with on_device_of(manager):
            poison(manager.state, like)
    if managers[0].device is not None:
        for device in {*[manager.device for manager in managers]}:
            torch.cuda.synchronize(device)


def on_device_of(manager: All2AllManager) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of a manager the current one, of torch and of CuPy."""
    return contextlib.nullcontext() if manager.device is None else torch.cuda.device(manager.device)


def put_on(manager: All2AllManager, put: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`put`, for the device of a manager."""

    def on_device(array: Any) -> Any:
        with on_device_of(manager):
            return put(array)

    return on_device


def rehearse(modules: list[FusedMoEModularKernel], owns: list[Layer], options: dict[str, Any]) -> None:
    """Make ready what the layers need at their first call, before one of them waits for another rank."""
    for module, own in zip(modules, owns, strict=True):
        assert isinstance(module.prepare_finalize, PushPrepareAndFinalize)
        with module.prepare_finalize.rehearsal():
            module(*own.arrays, **options)


def run_all(
    case: Ranks, managers: list[All2AllManager], put: Callable[[Array], Any], batched: bool = False, times: int = 2,
    **options: Any,
) -> Array:  # fmt: skip
    """What the ranks give, together, the same `times` times."""
    owns = [case.of_rank(manager.rank).map(put_on(manager, put)) for manager in managers]
    assert [manager.num_local_experts for manager in managers] == [len(own.w1) for own in owns]
    modules = [layer_on(each, own, batched, **options) for each, own in zip(managers, owns, strict=True)]
    if managers[0].device is not None:
        rehearse(modules, owns, case.options)
    poison_all(managers, put)

    def of_rank(manager: All2AllManager) -> Array:
        own, module = owns[manager.rank], modules[manager.rank]
        outs = [to_numpy(module(*own.arrays, **case.options)) for _ in range(times)]
        for out in outs[1:]:
            same_bits(out, outs[0])
        return outs[0]

    return np.concatenate(All2AllManager.run(managers, of_rank))


def on_host(case: Ranks, place: str = "NumPy", batched: bool = False, **options: Any) -> Array:
    """What ranks in host memory give."""
    apart = options.get("apart", False)
    managers = All2AllManager.local([None] * case.ranks, **case.sizes(apart=apart))
    return run_all(case, managers, PLACES[place], batched, **options)


# --- against one rank's layer -------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@quantizations
def test_ranks_give_what_one_rank_does(
    quantization: str | None, ranks: int, batched: bool, rng: np.random.Generator
) -> None:
    case = made(rng, uneven(ranks), quantization)
    place = "NumPy" if ranks != 4 else "tensors"
    got = on_host(case, place, batched)
    same_bits(got, case.wanted())
    compare(case.layer, got, twin.fused_experts(*case.layer.arrays, quant=case.layer.config))


def changed(rng: np.random.Generator, name: str) -> Ranks:
    """A case by its name."""
    topk = 1 if name == "weights on the input" else TOPK
    dtype = "float16" if name == "float16" else "bfloat16"
    quantization = {"weights on the input": "fp8", "experts in turn": "fp8_block", "float16": "fp8_block"}.get(name)
    counts = {"no tokens at all": [0] * 4, "tokens on one rank alone": [0, 0, 9, 0]}.get(name, [5, 0, 7, 2])
    case = made(rng, counts, quantization, dtype, topk)
    ids = case.layer.topk_ids
    if name == "ids of no expert":
        ids = np.where(rng.random(ids.shape) < 0.4, rng.choice([-1, EXPERTS, 10**6, -7], ids.shape), ids)
        ids = ids.astype(np.int64)
    elif name == "no id of an expert":
        ids = np.full_like(ids, -1)
    elif name == "all tokens to one expert":
        ids = np.where(np.arange(topk) == 1, 5, np.full_like(ids, -1))
    elif name == "an expert twice":
        ids[:, 2] = ids[:, 0]
    elif name == "experts in turn":
        case = case._replace(expert_rank=[expert % 4 for expert in range(EXPERTS)])
    elif name == "uneven experts":
        case = case._replace(expert_rank=[2, 0, 3, 1, 3, 3, 0, 3])
    elif name == "weights on the input":
        weights = rng.random(ids.shape, np.float32) + np.float32(0.3)
        case = case._replace(
            layer=case.layer._replace(topk_weights=weights), options={"apply_router_weight_on_input": True}
        )
    return case._replace(layer=case.layer._replace(topk_ids=ids))


CASES = (
    "ids of no expert", "no id of an expert", "all tokens to one expert", "an expert twice", "experts in turn",
    "uneven experts", "weights on the input", "no tokens at all", "tokens on one rank alone", "float16",
)  # fmt: skip


@formats
@pytest.mark.parametrize("name", CASES)
def test_cases_of_four_ranks(name: str, batched: bool, rng: np.random.Generator) -> None:
    case = changed(rng, name)
    same_bits(on_host(case, batched=batched), case.wanted())


@formats
@pytest.mark.parametrize("quantization", [None, "fp8_block"])
def test_apart_has_the_same_bits_for_any_number_of_ranks(
    quantization: str | None, batched: bool, rng: np.random.Generator
) -> None:
    case = made(rng, [13], quantization)
    want = on_host(case, batched=batched, apart=True)
    # What one rank gives without is what its experts' reduction does.
    same_bits(want, twin.fused_experts(*case.layer.arrays, quant=case.layer.config))
    differs = False
    for counts in ([6, 7], [1, 0, 9, 3], [0, 2, 3, 0, 1, 4, 3, 0]):
        case = case._replace(counts=counts)
        same_bits(on_host(case, batched=batched, apart=True), want)
        differs |= bool((on_host(case, batched=batched) != want).any())
    assert differs


@pytest.mark.parametrize("place", ["NumPy", "tensors"])
@formats
def test_the_load_of_the_experts_is_exact(batched: bool, place: str, rng: np.random.Generator) -> None:
    case = changed(rng, "ids of no expert")
    managers = All2AllManager.local([None] * 4, **case.sizes())
    put = PLACES[place]
    loads = [put(np.full(EXPERTS, 100, np.int32)) for _ in managers]

    def of_rank(manager: All2AllManager) -> None:
        own = case.of_rank(manager.rank).map(put)
        module = layer_on(manager, own, batched, expert_load=loads[manager.rank])
        for _ in range(3):
            module(*own.arrays)

    All2AllManager.run(managers, of_rank)
    ids = case.layer.topk_ids
    counts = np.bincount(ids[(ids >= 0) & (ids < EXPERTS)], minlength=EXPERTS)
    for rank, load in enumerate(loads):
        np.testing.assert_array_equal(to_numpy(load), 100 + 3 * np.where(case.owner == rank, counts, 0))


def test_shared_experts_run_between_sending_and_receiving(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = made(rng, [5, 3])
    managers = All2AllManager.local([None] * 2, **case.sizes())
    said: list[list[str]] = [[], []]
    arrange = PushPrepareAndFinalize._arrange

    def noted(self: PushPrepareAndFinalize, *given: Any) -> Any:
        said[self.state.rank].append("received")
        return arrange(self, *given)

    monkeypatch.setattr(PushPrepareAndFinalize, "_arrange", noted)

    def of_rank(manager: All2AllManager) -> tuple[Array, Array]:
        own = case.of_rank(manager.rank)
        host = manager.state.host  # type: ignore[union-attr]

        def shared(x: Array) -> Array:
            # This rank's tokens have left.
            assert (host.dispatched[:, manager.rank] == 1).all()
            said[manager.rank].append("shared")
            return x * 2

        return layer_on(manager, own, shared=shared)(*own.arrays)

    found = All2AllManager.run(managers, of_rank)
    assert said == [["shared", "received"]] * 2
    same_bits(np.concatenate([x for x, _ in found]), case.layer.hidden_states * 2)
    same_bits(np.concatenate([out for _, out in found]), case.wanted())


@formats
def test_a_map_of_another_order(batched: bool, rng: np.random.Generator) -> None:
    case = made(rng, [5, 3])
    managers = All2AllManager.local([None] * 2, **case.sizes())

    def of_rank(manager: All2AllManager) -> Array:
        here = np.flatnonzero(case.owner == manager.rank)[::-1]
        own = case.layer.of_rank(case.tokens_of(manager.rank), here)
        expert_map = np.full(EXPERTS, -1, np.int32)
        expert_map[here] = np.arange(len(here))
        return layer_on(manager, own, batched)(*own.arrays, expert_map=expert_map)

    same_bits(np.concatenate(All2AllManager.run(managers, of_rank)), case.wanted())


def test_a_map_without_an_expert_of_the_rank_is_found() -> None:
    case = made(np.random.default_rng(0), [4])
    ids = np.tile(np.arange(3, dtype=np.int32), (4, 1))
    own = case.layer._replace(topk_ids=ids)
    (manager,) = All2AllManager.local([None], **case.sizes())
    expert_map = np.arange(EXPERTS, dtype=np.int32)
    expert_map[1] = -1
    out = layer_on(manager, own)(*own.arrays, expert_map=expert_map)
    assert np.isnan(out.astype(np.float32)).all()
    with pytest.raises(AllToAllError, match=r"combine 0 of rank 0 failed: .*an expert_map without an expert"):
        manager.check()


# --- room ---------------------------------------------------------------------------------------------


def in_room(room: int) -> tuple[Ranks, list[All2AllManager], Callable[[All2AllManager], Array]]:
    """Two ranks, of which the second has 6 slots of expert 5, and fewer of each other one."""
    rng = np.random.default_rng(0)
    case = made(rng, [4, 4])
    ids = np.array([[0, 1, 5], [2, 3, 5], [4, 6, 5], [7, 0, 5], [1, 2, 5], [3, 4, 5], [6, 7, 0], [1, 2, 3]], np.int32)
    case = case._replace(layer=case.layer._replace(topk_ids=ids))
    managers = All2AllManager.local([None] * 2, **case.sizes())
    poison_all(managers, PLACES["NumPy"])

    def of_rank(manager: All2AllManager) -> Array:
        own = case.of_rank(manager.rank)
        return layer_on(manager, own, True, max_tokens_per_expert=room)(*own.arrays)

    return case, managers, of_rank


def test_a_room_that_is_enough() -> None:
    case, managers, of_rank = in_room(6)
    assert managers[0].prepare_finalize(True, max_tokens_per_expert=6).max_num_tokens_per_rank() == 4
    same_bits(np.concatenate(All2AllManager.run(managers, of_rank)), case.wanted())


def test_a_token_without_room_is_never_left_out() -> None:
    case, managers, of_rank = in_room(5)
    want = case.wanted().astype(np.float32)
    got = np.concatenate(All2AllManager.run(managers, of_rank)).astype(np.float32)
    # A row is right, or it is NaN: those of the rank without room for sure.
    is_nan = np.isnan(got).all(axis=1)
    assert is_nan[4:].all()
    np.testing.assert_array_equal(got[~is_nan], want[~is_nan])
    with pytest.raises(
        AllToAllError, match=r"^combine 0 of rank 1 failed: an expert of this rank has no row"
    ) as failed:
        managers[1].check()
    assert (failed.value.rank, failed.value.phase, failed.value.step) == (1, "combine", 0)
    with pytest.raises(AllToAllError, match=r"^combine 0 of rank 1"):
        managers[1].prepare_finalize()
    own = case.of_rank(1)
    assert managers[1].state is not None
    module = FusedMoEModularKernel(PushPrepareAndFinalize(managers[1].state), AutoExperts())
    with pytest.raises(AllToAllError, match=r"^combine 0 of rank 1"):
        module(*own.arrays)


# --- a rehearsal, turns, threads ----------------------------------------------------------------------


@formats
@pytest.mark.parametrize("quantization", [None, "fp8_block", "fp8", "fp8 static"])
def test_a_rehearsal_exchanges_nothing(quantization: str | None, batched: bool, rng: np.random.Generator) -> None:
    case = made(rng, [5, 3], quantization)
    managers = All2AllManager.local([None] * 2, **case.sizes())
    modules = [layer_on(each, case.of_rank(each.rank), batched) for each in managers]
    for manager, module in zip(managers, modules, strict=True):
        pf, own = module.prepare_finalize, case.of_rank(manager.rank)
        assert isinstance(pf, PushPrepareAndFinalize) and manager.state is not None
        # One thread, which would wait for the other rank.
        with pf.rehearsal():
            assert not module(*own.arrays).any()
        assert not manager.state.host.dispatches.any() and not manager.state.host.dispatched.any()
    got = All2AllManager.run(managers, lambda manager: modules[manager.rank](*case.of_rank(manager.rank).arrays))
    same_bits(np.concatenate(got), case.wanted())


def test_ranks_meet_between_sending_and_receiving() -> None:
    turns, order = Turns(3, 20.0), []

    def run(rank: int) -> None:
        for step in range(4):
            time.sleep(0.002 * rank)
            order.append((step, "sent"))
            turns.wait(rank, "dispatch")
            order.append((step, "received"))
            turns.wait(rank, "combine")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == [(step, what) for step in range(4) for what in ("sent",) * 3 + ("received",) * 3]


def test_a_rank_that_never_comes_to_its_turn_is_named() -> None:
    turns = Turns(2, 0.05)
    message = r"^dispatch 0 of rank 0 failed: rank 1 did not send within 0.05 s: each rank takes a thread of its own$"
    with pytest.raises(AllToAllError, match=message) as failed:
        turns.wait(0, "dispatch")
    assert (failed.value.rank, failed.value.phase, failed.value.step) == (1, "dispatch", 0)
    turns = Turns(2, 20.0)
    turns.abort(1)
    with pytest.raises(AllToAllError, match=r"^combine 0 of rank 0 failed: rank 1 gave up$"):
        turns.wait(0, "combine")


def test_a_layer_in_turns(rng: np.random.Generator) -> None:
    case = made(rng, [5, 3], "fp8_block")
    managers = All2AllManager.local([None] * 2, **case.sizes())
    turns = Turns(2, 20.0)
    for manager in managers:
        # As for ranks that share a GPU.
        manager._turns = turns
    same_bits(run_all(case, managers, PLACES["NumPy"]), case.wanted())
    # Two calls, of a dispatch and a combine each.
    assert turns._arrived == [4, 4]


def test_a_rank_that_raises_frees_the_others(rng: np.random.Generator) -> None:
    case = made(rng, [5, 3])
    managers = All2AllManager.local([None] * 2, **case.sizes())

    def of_rank(manager: All2AllManager) -> None:
        own = case.of_rank(manager.rank)
        if manager.rank:
            raise KeyError("of the second rank")
        layer_on(manager, own)(*own.arrays)

    start = time.monotonic()
    with pytest.raises(KeyError, match="of the second rank"):
        All2AllManager.run(managers, of_rank)
    assert time.monotonic() - start < 10
    with pytest.raises(AllToAllError, match="rank 1"):
        managers[0].check()


# --- what is refused ----------------------------------------------------------------------------------


def one(quantization: str | None = None, **options: Any) -> tuple[All2AllManager, Layer]:
    case = made(np.random.default_rng(0), [3], quantization)
    (manager,) = All2AllManager.local([None], **case.sizes(**options))
    return manager, case.layer


def test_the_push_refuses_what_does_not_fit() -> None:
    manager, layer = one()
    state = manager.state
    assert state is not None
    with pytest.raises(TypeError, match=r"^state must be an AllToAllState, got All2AllManager$"):
        PushPrepareAndFinalize(manager)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^max_tokens_per_expert must be None unless batched, got 2$"):
        PushPrepareAndFinalize(state, max_tokens_per_expert=2)
    with pytest.raises(ValueError, match=r"^max_tokens_per_expert must be an integer in \[1, 3\]"):
        PushPrepareAndFinalize(state, batched=True, max_tokens_per_expert=4)
    with pytest.raises(ValueError, match=r"^apart must be False for a state that was made without apart, got True$"):
        PushPrepareAndFinalize(state, apart=True)
    module = layer_on(manager, layer)
    x, w1, w2, weights, ids = layer.arrays
    routing = (weights, ids)
    twice = tuple(np.concatenate([each] * 2) for each in (x, *routing))
    fewer = tuple(np.ascontiguousarray(each[:, :2]) for each in routing)
    refused: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        (r"^w1 must be of the 8 experts of this rank \(num_local_experts\), got 4$", (x, w1[:4], w2[:4], *routing), {}),
        (r"^global_num_experts must be 8", (x, w1, w2, *routing), {"global_num_experts": 9}),
        (r"^topk_ids must be of shape \[tokens, topk\] = \[3, 3\]", (x, w1, w2, *fewer), {}),
        (r"^the number of tokens must be .* 3\]", (twice[0], w1, w2, *twice[1:]), {}),
        (r"^expert_map must be of shape", (x, w1, w2, *routing), {"expert_map": np.zeros((8, 1), np.int32)}),
    ]
    for message, arguments, options in refused:
        with pytest.raises(ValueError, match=message):
            module(*arguments, **options)
    # Nothing was sent.
    assert not state.host.dispatches.any()
    same_bits(module(*layer.arrays), twin.fused_experts(*layer.arrays))
    with pytest.raises(TypeError, match=r"^expert_tokens_meta must be what prepare returned, got None$"):
        module.prepare_finalize.finalize(x, x, weights, ids, False, TopKWeightAndReduceDelegate())


def test_a_scale_per_tensor_must_be_given() -> None:
    manager, layer = one("fp8")
    config = FusedMoEQuantConfig.fp8(**layer.config.scales, a2_scale=np.ones(1, np.float32))
    module = FusedMoEModularKernel(manager.prepare_finalize(), AutoExperts(config))
    with pytest.raises(
        ValueError, match=r"^quant_config must be a1_scale given, .*each rank would find another one, got"
    ):
        module(*layer.arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 7}, r"^num_experts must be a multiple of the 2 ranks"),
        ({"num_experts": 0}, r"^num_experts must be an integer of at least 1"),
        ({"max_num_tokens": 0}, r"^max_num_tokens must be an integer in \[1, "),
        ({"hidden": 100}, r"^hidden must be a multiple of 16, got 100$"),
        ({"topk": 33}, r"^topk must be an integer in \[1, 32\]"),
        ({"deadline_s": 0}, r"^deadline_s must be more than 0"),
        ({"expert_rank": [0] * 8}, r"^expert_rank must be of at least one expert on each rank, got none on rank 1$"),
        ({"expert_rank": [0, 1]}, r"^expert_rank must be of 8 ranks, one for each expert, got 2$"),
        ({"devices": [None, 0]}, r"^devices must be CUDA devices, or all None"),
        ({"devices": []}, r"^the number of devices must be an integer in \[1, "),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_local_managers_refuse(change: dict[str, Any], message: str) -> None:
    sizes = {**SIZES, **change}
    devices = sizes.pop("devices", [None, None])
    with pytest.raises(ValueError, match=message):
        All2AllManager.local(devices, **sizes)


def test_a_manager_that_is_closed() -> None:
    managers = All2AllManager.local([None] * 2, **SIZES)
    with managers[0] as manager:
        assert (manager.rank, manager.ranks, manager.backend, manager.device) == (0, 2, "push", None)
        np.testing.assert_array_equal(managers[1].expert_map(np.ones(1)), [-1, -1, -1, -1, 0, 1, 2, 3])
        with pytest.raises(TypeError, match=r"^like must be an array, got int$"):
            manager.expert_map(1)
        with pytest.raises(ValueError, match=r"^apart must be False for a manager that was made without apart"):
            manager.prepare_finalize(apart=True)
    manager.close()
    for call in (manager.check, manager.prepare_finalize):
        with pytest.raises(ValueError, match=r"^manager must be open, got a closed one$"):
            call()
    with pytest.raises(KeyError), managers[1]:
        raise KeyError("inside")


# --- the choice of the way ----------------------------------------------------------------------------


def sizes(**others: Any) -> Sizes:
    return Sizes.checked(8, **{**SIZES, **others})


NOBODY: list[dict[int, str]] = [{}] * 8
TWO_HOSTS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_way_is_chosen_by_who_reaches_whom() -> None:
    everyone, far = [[*range(8)]], [{}, {}, {0: "rank 0 is not linked"}, *NOBODY[3:]]
    assert choose(sizes(), everyone, NOBODY) == "push"
    assert choose(sizes(), TWO_HOSTS, NOBODY) == "two_level"
    assert choose(sizes(), [[each] for each in range(8)], NOBODY) == "nccl"
    assert choose(sizes(), [[0, 1, 2], [3, 4, 5, 6, 7]], NOBODY) == "nccl"
    assert choose(sizes(), everyone, far) == "nccl"
    assert choose(sizes(), TWO_HOSTS, far) == "nccl"
    # Ranks 0 and 2 are on two hosts, so that it does not matter.
    assert choose(sizes(), [[0, 1, 4, 5], [2, 3, 6, 7]], far) == "two_level"
    assert choose(sizes(backend="nccl"), everyone, NOBODY) == "nccl"
    assert choose(sizes(apart=True), everyone, NOBODY) == "push"


@pytest.mark.parametrize(
    ("hosts", "unreached", "options", "message"),
    [
        (TWO_HOSTS, NOBODY, {"backend": "push"}, "'nccl' or 'two_level' or 'auto', since the ranks are on 2"),
        ([[*range(8)]], [{1: "no link"}, *NOBODY[1:]], {"backend": "push"}, "'nccl' or 'auto', since no link"),
        ([[*range(8)]], NOBODY, {"backend": "two_level"}, "since all ranks are on one host (ranks_per_host simulates"),
        ([[0, 1], [*range(2, 8)]], NOBODY, {"backend": "two_level"}, "since the hosts have 2, 6 ranks"),
        (TWO_HOSTS, NOBODY, {"apart": True}, "False with the backend 'two_level': only 'push'"),
        ([[*range(8)]], [{1: "no link"}, *NOBODY[1:]], {"apart": True}, "(no link), got True"),
    ],
)  # fmt: skip
def test_a_way_that_cannot_be_is_refused(hosts: Any, unreached: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        choose(sizes(**options), hosts, unreached)
    assert message in str(refused.value)


def test_experts_in_their_order_are_the_default() -> None:
    assert sizes(expert_rank=[*range(8)]) == sizes()
    assert sizes(expert_rank=[*range(8)][::-1]).expert_rank == (7, 6, 5, 4, 3, 2, 1, 0)
    assert sizes(num_experts=9, expert_rank=[*range(8), 0]).expert_rank == (*range(8), 0)


def test_hosts_are_found_by_name_or_simulated() -> None:
    assert hosts_of(["a", "b", "a", "b"], None) == [[0, 2], [1, 3]]
    assert hosts_of(["a"] * 6, 2) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"^ranks_per_host must be a divisor of the number of ranks, 8, got 3$"):
        sizes(ranks_per_host=3)
    with pytest.raises(ValueError, match=r"^backend must be one of 'auto', 'push', 'nccl', 'two_level', got 'deepep'$"):
        sizes(backend="deepep")


# --- with torch.distributed ---------------------------------------------------------------------------


def test_a_manager_of_one_process(rng: np.random.Generator) -> None:
    with pytest.raises(RuntimeError, match=r"^torch.distributed must be initialized"):
        All2AllManager(**SIZES)
    case = made(rng, [6])
    with one_process():
        with pytest.raises(
            ValueError, match=r"^backend must be 'nccl' or 'auto', since rank 0 is in host memory.*local"
        ):
            All2AllManager(**SIZES, device="cpu", backend="push")
        with pytest.raises(ValueError, match=r"^hidden must be a multiple of 16, got 8?"):
            All2AllManager(**{**SIZES, "hidden": 24}, device="cpu")
        with All2AllManager(**SIZES, device="cpu") as manager:
            assert (manager.rank, manager.ranks, manager.backend, manager.device) == (0, 1, "nccl", None)
            pf = manager.prepare_finalize()
            assert isinstance(pf, NcclPrepareAndFinalize) and pf.max_num_tokens == 7
            there = case.layer.map(as_tensor("cpu"))
            same_bits(FusedMoEModularKernel(pf, AutoExperts())(*there.arrays), case.wanted())
            assert manager.expert_map(there.w1).tolist() == [*range(8)]
            with pytest.raises(ValueError, match=r"^batched must be False with the backend 'nccl', got True$"):
                manager.prepare_finalize(True)
            with pytest.raises(
                ValueError, match=r"^max_tokens_per_expert must be None with the backend 'nccl', got 2$"
            ):
                manager.prepare_finalize(max_tokens_per_expert=2)


def two_level(
    state: AllToAllState, group: Any, expert_host: list[int], batched: bool = False, **options: Any
) -> TwoLevelPrepareAndFinalize:
    push = PushPrepareAndFinalize(state, batched=batched)
    return TwoLevelPrepareAndFinalize(group, push, EXPERTS, expert_host=expert_host, max_num_tokens=7, **options)


def test_two_levels_refuse_a_state_that_does_not_fit() -> None:
    def state(**others: Any) -> AllToAllState:
        given = {"max_tokens": 7, "hidden": HIDDEN, "topk": TOPK, "num_experts": EXPERTS, **others}
        return AllToAllState.local([None], **given)[0]

    hosts = [0] * EXPERTS
    with one_process():
        with pytest.raises(ValueError, match=r"^push must be of a state with the 8 experts of this host, got 4$"):
            two_level(state(num_experts=4), None, hosts)
        with pytest.raises(
            ValueError, match=r"^push must be of a state with max_tokens = 1 hosts \* 7 \(max_num_tokens\)"
        ):
            two_level(state(max_tokens=14), None, hosts)
        with pytest.raises(TypeError, match=r"^push must be a PushPrepareAndFinalize, got AllToAllState$"):
            TwoLevelPrepareAndFinalize(None, state(), 8, expert_host=hosts, max_num_tokens=7)  # type: ignore[arg-type]
        own = PushPrepareAndFinalize(state(), expert_load=np.zeros(8, np.int32))
        with pytest.raises(ValueError, match=r"^push must be without expert_load"):
            TwoLevelPrepareAndFinalize(None, own, 8, expert_host=hosts, max_num_tokens=7)
        pf = two_level(state(), None, hosts)
        out = torch.zeros(1, HIDDEN)
        with pytest.raises(RuntimeError, match=r"^TwoLevelPrepareAndFinalize.finalize must follow a prepare$"):
            pf.finalize(out, out, out, out, False, TopKWeightAndReduceDelegate())


DIFFERENCES: dict[str, Any] = {
    "num_experts": 4, "max_num_tokens": 8, "hidden": 128, "topk": 2, "expert_rank": [0, 1] * 4, "ranks_per_host": 2,
    "apart": True, "deadline_s": 5.0, "backend": "nccl",
}  # fmt: skip
#: The cases of two levels: the quantization, whether batched, the rank of each expert.
TWO_LEVELS: dict[str, tuple[str | None, bool, list[int] | None]] = {
    "16 bits": (None, False, None),
    "FP8 in blocks, in turn": ("fp8_block", False, [expert % 4 for expert in range(EXPERTS)]),
    "FP8 per token, batched": ("fp8", True, None),
    "FP8, static, uneven": ("fp8 static", False, [3, 0, 2, 3, 1, 3, 0, 1]),
}


def ranks_of(name: str) -> tuple[Ranks, bool]:
    """The ranks of a case of two levels, two on each of two hosts, and whether it is batched."""
    quantization, batched, expert_rank = TWO_LEVELS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    case = made(rng, [5, 0, 7, 2], quantization)
    ids = np.where(rng.random(case.layer.topk_ids.shape) < 0.2, -1, case.layer.topk_ids)
    return case._replace(expert_rank=expert_rank, layer=case.layer._replace(topk_ids=ids)), batched


def wanted_of_hosts(case: Ranks) -> Array:
    """The bits of a result over two hosts: the sums of the hosts, each rounded, added up in their order."""
    total = np.zeros(case.layer.hidden_states.shape, np.float32)
    for host in range(2):
        of_host = case.owner // 2 == host
        ids = case.layer.topk_ids
        here = (ids >= 0) & of_host[np.where(ids >= 0, ids, 0)]
        own = case._replace(layer=case.layer._replace(topk_ids=np.where(here, ids, -1)))
        total += own.wanted().astype(np.float32)
    return total.astype(case.layer.hidden_states.dtype)


def on_two_levels(host: int) -> dict[str, list[tuple[Array, Array]]]:
    """What the ranks of a host give, and their loads: two threads of this process, with a group each."""
    groups = [torch.distributed.new_group([0, 1]) for _ in range(2)]
    put, found = as_tensor("cpu"), {}
    for name in TWO_LEVELS:
        case, batched = ranks_of(name)
        expert_host, place = case.owner // 2, case.owner % 2
        here = expert_host == host
        sizes = {"max_tokens": 14, "hidden": HIDDEN, "topk": TOPK, "deadline_s": 60.0}
        states = AllToAllState.local([None] * 2, num_experts=int(here.sum()), expert_rank=place[here].tolist(), **sizes)

        def of_rank(
            index: int, states: Any = states, case: Ranks = case, batched: bool = batched, hosts: Array = expert_host
        ) -> tuple[Array, Array]:
            own = case.of_rank(2 * host + index).map(put)
            load = torch.full((EXPERTS,), 100, dtype=torch.int32)
            options = {"batched": batched, "expert_load": load, "peers": [None, [0, 1]][index]}
            pf = two_level(states[index], groups[index], hosts.tolist(), **options)
            experts = (BatchedAutoExperts if batched else AutoExperts)(own.config)
            shared, module = (lambda x: x + 1), FusedMoEModularKernel(pf, experts)
            same_bits(
                to_numpy(FusedMoEModularKernel(pf, experts, shared)(*own.arrays)[1]), to_numpy(module(*own.arrays))
            )
            # A map with the experts the other way round.
            backwards = case.owner == 2 * host + index
            numbers = np.flatnonzero(backwards)[::-1]
            own = case.layer.of_rank(case.tokens_of(2 * host + index), numbers).map(put)
            expert_map = np.full(EXPERTS, -1, np.int32)
            expert_map[numbers] = np.arange(len(numbers))
            module = FusedMoEModularKernel(pf, (BatchedAutoExperts if batched else AutoExperts)(own.config))
            return to_numpy(module(*own.arrays, expert_map=put(expert_map))), to_numpy(load)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found[name] = [*pool.map(of_rank, range(2))]
    return found


def process(rank: int, ranks: int, folder: str, device: str) -> None:
    """One of several processes; what it found goes into a file."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=DEADLINE / 2 if device == "cpu" else 3 * DEADLINE),
    )
    found = in_process_on_gpu(rank) if device == "cuda" else in_process(rank)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_process(rank: int) -> dict[str, Any]:
    """What one of two processes finds in host memory."""
    found: dict[str, Any] = {"differ": {}}
    for name, other in DIFFERENCES.items():
        try:
            All2AllManager(**{**SIZES, **({name: other} if rank else {})}, device="cpu")
        except ValueError as error:
            found["differ"][name] = str(error)
    try:
        All2AllManager(**{**SIZES, "hidden": 24 if rank else HIDDEN}, device="cpu")
    except ValueError as error:
        found["bad"] = str(error)
    case = made(np.random.default_rng(7), [5, 3], "fp8_block")
    with All2AllManager(**case.sizes(), device="cpu", ranks_per_host=1) as manager:
        own = case.of_rank(rank).map(as_tensor("cpu"))
        found["nccl"] = manager.backend, to_numpy(layer_on(manager, own)(*own.arrays))
    return {**found, "two levels": on_two_levels(rank)}


def in_processes(ranks: int, folder: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """What each process finds. Processes that take too long are killed."""
    context = torch.multiprocessing.spawn(process, (ranks, str(folder), device), nprocs=ranks, join=False)
    allowed = DEADLINE if device == "cpu" else 4 * DEADLINE
    end = time.monotonic() + allowed
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, f"{ranks} processes have not ended in {allowed} s"
    finally:
        for each in context.processes:
            if each.is_alive():
                each.kill()
                each.join()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def test_two_processes_that_are_hosts(tmp_path: Path) -> None:
    found = in_processes(2, tmp_path)
    for rank, each in enumerate(found):
        assert each["differ"].keys() == DIFFERENCES.keys()
        for name, other in DIFFERENCES.items():
            its = tuple(other) if name == "expert_rank" else other
            message = each["differ"][name]
            assert message.startswith(f"{name} must be the same on all ranks, "), message
            assert f"{its} on rank 1" in message and f" on rank {rank}, got " in message
    assert found[1]["bad"].startswith("hidden must be a multiple of 16, got 24")
    assert found[0]["bad"] == f"rank 1 could not set up the exchange: ValueError: {found[1]['bad']}"
    assert [each["nccl"][0] for each in found] == ["nccl"] * 2
    case = made(np.random.default_rng(7), [5, 3], "fp8_block")
    same_bits(np.concatenate([each["nccl"][1] for each in found]), case.wanted())
    for name in TWO_LEVELS:
        case, _ = ranks_of(name)
        of_ranks = [of_rank for each in found for of_rank in each["two levels"][name]]
        same_bits(np.concatenate([out for out, _ in of_ranks]), wanted_of_hosts(case))
        counts = np.bincount(case.layer.topk_ids[case.layer.topk_ids >= 0], minlength=EXPERTS)
        for rank, (_, load) in enumerate(of_ranks):
            np.testing.assert_array_equal(load, 100 + 3 * np.where(case.owner == rank, counts, 0))


# --- on a GPU -----------------------------------------------------------------------------------------


def placed(devices: list[int]) -> list[int]:
    """The devices of the ranks, if this machine has them."""
    if max(devices) >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    return devices


#: One rank, ranks that share a GPU, in turns, and ranks on GPUs of their own.
devices_of_ranks = pytest.mark.parametrize(
    "devices", [[0], [0, 0], [0, 0, 0, 0], [0, 1], [0, 1, 0, 1]], ids=lambda x: "-".join(map(str, x))
)


@pytest.mark.gpu
@pytest.mark.waits
@devices_of_ranks
@formats
@quantizations
def test_ranks_on_gpus(quantization: str | None, batched: bool, devices: list[int], rng: np.random.Generator) -> None:
    case = made(rng, uneven(len(placed(devices))), quantization)
    ids = np.where(rng.random(case.layer.topk_ids.shape) < 0.2, -1, case.layer.topk_ids)
    case = case._replace(layer=case.layer._replace(topk_ids=ids))
    managers = All2AllManager.local(devices, **case.sizes())
    got = run_all(case, managers, PLACES["CUDA tensors"], batched)
    compare(case.layer, got, twin.fused_experts(*case.layer.arrays, quant=case.layer.config))
    for manager in managers:
        manager.close()


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one GPU", "two GPUs"])
@pytest.mark.parametrize("tokens", [40, 600])
@formats
def test_more_tokens_on_gpus(tokens: int, batched: bool, devices: list[int], rng: np.random.Generator) -> None:
    case = made(rng, [tokens, tokens // 3][: len(placed(devices))], "fp8_block")
    case = case._replace(expert_rank=[1, 0, 0, 1, 1, 1, 0, 1])
    managers = All2AllManager.local(devices, **case.sizes())
    got = run_all(case, managers, PLACES["CuPy"], batched, times=3)
    compare(case.layer, got, twin.fused_experts(*case.layer.arrays, quant=case.layer.config))
    for manager in managers:
        manager.close()


@pytest.mark.gpu
@formats
def test_apart_has_the_same_bits_on_a_gpu(batched: bool, rng: np.random.Generator) -> None:
    case = made(rng, [16], "fp8_block")
    found = []
    # As many places each time, so that the experts take the same kernels.
    for counts in ([16], [8, 8], [4, 4, 4, 4]):
        case = case._replace(counts=counts)
        managers = All2AllManager.local([0] * len(counts), **case.sizes(apart=True))
        found.append(run_all(case, managers, PLACES["CUDA tensors"], batched, apart=True))
        same_bits(found[-1], found[0])
        for manager in managers:
            manager.close()


@pytest.mark.gpu
@pytest.mark.waits
@devices_of_ranks
def test_the_load_on_gpus(devices: list[int], rng: np.random.Generator) -> None:
    case = made(rng, uneven(len(placed(devices))))
    managers = All2AllManager.local(devices, **case.sizes())
    owns = [case.of_rank(each.rank).map(put_on(each, PLACES["CUDA tensors"])) for each in managers]
    loads = [torch.full((EXPERTS,), 100, dtype=torch.int32, device=f"cuda:{device}") for device in devices]
    modules = [layer_on(each, own, expert_load=load) for each, own, load in zip(managers, owns, loads, strict=True)]
    rehearse(modules, owns, {})
    for _ in range(3):
        All2AllManager.run(managers, lambda manager: modules[manager.rank](*owns[manager.rank].arrays))
    counts = np.bincount(case.layer.topk_ids.ravel(), minlength=EXPERTS)
    for rank, load in enumerate(loads):
        np.testing.assert_array_equal(to_numpy(load), 100 + 3 * np.where(case.owner == rank, counts, 0))


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("devices", [[0, 0], [0, 1]], ids=["one GPU", "two GPUs"])
def test_a_thousand_runs_have_the_same_bits(devices: list[int], rng: np.random.Generator) -> None:
    case = made(rng, [37, 21], "fp8_block")
    managers = All2AllManager.local(placed(devices), **case.sizes())
    owns = [case.of_rank(each.rank).map(put_on(each, PLACES["CUDA tensors"])) for each in managers]
    modules = [layer_on(each, own) for each, own in zip(managers, owns, strict=True)]
    rehearse(modules, owns, {})

    def number_of_different(run: Callable[[], torch.Tensor], times: int) -> torch.Tensor:
        first = run().clone()
        different = (~torch.isfinite(first)).any().to(torch.int64)
        for _ in range(times):
            different += (run() != first).any()
        return different

    # Torch's kernels too are loaded before one waits.
    assert [int(number_of_different(lambda own=own: own.hidden_states, 2)) for own in owns] == [0, 0]  # type: ignore[misc]

    def of_rank(manager: All2AllManager) -> int:
        own, module = owns[manager.rank], modules[manager.rank]
        return int(number_of_different(lambda: module(*own.arrays), 1000))

    assert All2AllManager.run(managers, of_rank) == [0, 0]


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize("devices", [[0], [0, 1]], ids=["one GPU", "two GPUs"])
@formats
@pytest.mark.parametrize("quantization", [None, "fp8_block"])
def test_a_graph_of_the_layer_with_changing_routing(
    quantization: str | None, batched: bool, devices: list[int], rng: np.random.Generator
) -> None:
    counts = [24, 17][: len(placed(devices))]
    case = made(rng, counts, quantization)
    managers = All2AllManager.local(devices, **case.sizes())
    owns = [case.of_rank(each.rank).map(put_on(each, PLACES["CUDA tensors"])) for each in managers]
    modules = [layer_on(each, own, batched) for each, own in zip(managers, owns, strict=True)]
    rehearse(modules, owns, {})

    def synchronize() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    # One thread drives both GPUs: a launch does not wait.
    for module, own in zip(modules, owns, strict=True):
        module(*own.arrays)
    synchronize()
    graphs, outs = [], []
    for device, module, own in zip(devices, modules, owns, strict=True):
        with torch.cuda.device(device):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outs.append(module(*own.arrays))
            graphs.append(graph)
    for _ in range(20):
        layer = random_layer(rng, sum(counts), EXPERTS, INTER, HIDDEN, TOPK)
        ids = np.where(rng.random(layer.topk_ids.shape) < 0.1, -1, layer.topk_ids)
        fields = {"hidden_states": layer.hidden_states, "topk_weights": layer.topk_weights, "topk_ids": ids}
        case = case._replace(layer=case.layer._replace(**fields))
        for rank, own in enumerate(owns):
            for name in fields:
                values = getattr(case.of_rank(rank), name)
                getattr(own, name).copy_(as_tensor("cpu")(np.ascontiguousarray(values)))
        for out in outs:
            out.fill_(float("nan"))
        synchronize()
        for device, graph in zip(devices, graphs, strict=True):
            with torch.cuda.device(device):
                graph.replay()
        synchronize()
        for manager in managers:
            manager.check()
        got = np.concatenate([to_numpy(out) for out in outs])
        compare(case.layer, got, twin.fused_experts(*case.layer.arrays, quant=case.layer.config))


@pytest.mark.gpu
def test_a_token_without_room_on_a_gpu(rng: np.random.Generator) -> None:
    case = made(rng, [6])
    ids = np.tile(np.array([5, 1, 2], np.int32), (6, 1))
    own = case.layer._replace(topk_ids=ids).map(PLACES["CUDA tensors"])
    (manager,) = All2AllManager.local([0], **case.sizes())
    out = layer_on(manager, own, True, max_tokens_per_expert=5)(*own.arrays)
    assert torch.isnan(out).any()
    right = twin.fused_experts(*case.layer._replace(topk_ids=ids).arrays)
    rows = to_numpy(out).astype(np.float32)
    kept = ~np.isnan(rows).any(axis=1)
    np.testing.assert_allclose(rows[kept], right[kept].astype(np.float32), rtol=2**-6, atol=2**-4)
    with pytest.raises(AllToAllError, match=r"^combine 0 of rank 0 failed: an expert of this rank has no row"):
        manager.check()


@pytest.mark.gpu
def test_the_push_refuses_arrays_of_another_place() -> None:
    case = made(np.random.default_rng(0), [3])
    there = case.layer.map(PLACES["CUDA tensors"])
    (on_gpu,), (in_memory,) = (All2AllManager.local([device], **case.sizes()) for device in (0, None))
    module = layer_on(on_gpu, case.layer)
    with pytest.raises(ValueError, match=r"^hidden_states must be on CUDA device 0, as the state is, got"):
        module(*case.layer.arrays)
    module = layer_on(in_memory, there)
    with pytest.raises(ValueError, match=r"^hidden_states must be in host memory, as the state is, got"):
        module(*there.arrays)
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=r"^devices must be an integer in \[0, "):
        All2AllManager.local([count], **case.sizes())


def in_process_on_gpu(rank: int) -> dict[str, Any]:
    """What one of four processes finds: by push on one host, then on two simulated ones."""
    found: dict[str, Any] = {}
    put = as_tensor("cuda")
    for name, options in {"push": {}, "two_level": {"ranks_per_host": 2}}.items():
        for batched in (False, True):
            case = made(np.random.default_rng(3), [5, 0, 7, 2], "fp8_block")
            case = case._replace(expert_rank=[3, 0, 2, 3, 1, 3, 0, 1])
            with All2AllManager(**case.sizes(deadline_s=60.0), **options) as manager:
                own = case.of_rank(rank).map(put)
                load = torch.full((EXPERTS,), 100, dtype=torch.int32, device="cuda")
                module = layer_on(manager, own, batched, expert_load=load)
                outs = [to_numpy(module(*own.arrays)) for _ in range(5)]
                for out in outs:
                    same_bits(out, outs[0])
                manager.check()
                assert manager.backend == name
                found[f"{name} {batched}"] = outs[0], to_numpy(load)
    return found


@pytest.mark.gpu
@pytest.mark.waits
def test_four_processes_on_the_gpus(tmp_path: Path) -> None:
    found = in_processes(4, tmp_path, "cuda")
    case = made(np.random.default_rng(3), [5, 0, 7, 2], "fp8_block")
    case = case._replace(expert_rank=[3, 0, 2, 3, 1, 3, 0, 1])
    want = twin.fused_experts(*case.layer.arrays, quant=case.layer.config)
    counts = np.bincount(case.layer.topk_ids.ravel(), minlength=EXPERTS)
    for name in found[0]:
        compare(case.layer, np.concatenate([each[name][0] for each in found]), want)
        for rank, each in enumerate(found):
            np.testing.assert_array_equal(each[name][1], 100 + 5 * np.where(case.owner == rank, counts, 0))
