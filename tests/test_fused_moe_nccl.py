"""The exchange of tokens by `torch.distributed`: processes with the gloo backend against the twin in one."""

from __future__ import annotations

import datetime
import itertools
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from numpy.typing import NDArray

from cukern.fused_moe import (
    AutoExperts,
    FusedMoEModularKernel,
    FusedMoEQuantConfig,
    NcclPrepareAndFinalize,
    RowExchange,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOp,
)
from cukern.fused_moe.combinations import refusal
from cukern.fused_moe.example import Layer, random_layer
from cukern.reference import fused_moe as twin
from tests.buffers import same_bits, to_numpy
from tests.test_fused_moe_combinations import as_tensor, compare

Array = NDArray[Any]

EXPERTS, INTER, HIDDEN, TOPK = 8, 128, 256, 3
DEADLINE = 90.0  # seconds, for all cases of a group of processes
put = as_tensor("cpu")


class Case(NamedTuple):
    """A layer over several ranks; `tokens` of each rank are taken in turn."""

    quantization: str | None = None
    tokens: tuple[int, ...] = (5, 9)
    ids: str = "random"
    expert_rank: str | None = None
    shared: bool = False
    on_input: bool = False
    own_map: bool = False
    dtype: str = "bfloat16"
    ids_dtype: str = "int32"
    chunk_size: int | str | None = "default"
    by_slot: bool = False


CASES = {
    "16 bits": Case(),
    "float16": Case(dtype="float16", ids_dtype="int64"),
    "FP8 in blocks": Case("fp8_block"),
    "FP8 per token": Case("fp8"),
    "FP8, static": Case("fp8 static"),
    "MXFP4": Case("mxfp4"),
    "NVFP4": Case("nvfp4"),
    "uneven batches": Case("fp8_block", (1, 17, 4, 30)),
    "a rank without tokens": Case(None, (6, 0)),
    "FP8 and a rank without tokens": Case("fp8 static", (0, 3, 5, 0)),
    "tokens on one rank alone": Case("fp8", (0, 0, 0, 7), "one rank"),
    "no tokens at all": Case("fp8_block", (0,)),
    "ids of no expert": Case("fp8_block", (9, 4), "some missing", ids_dtype="int64"),
    "uint32 ids": Case(None, (9, 4), "large", ids_dtype="uint32"),
    "no id of an expert": Case(None, (3, 5), "all missing"),
    "all tokens to one expert": Case("fp8", (3, 8), "one expert"),
    "an expert twice": Case(None, (3, 8), "twice"),
    "experts in turn": Case("fp8_block", (7, 2), "random", "in turn"),
    "uneven experts": Case(None, (7, 2), "some missing", "uneven"),
    "shared experts": Case("fp8_block", (4, 6), "random", "in turn", shared=True),
    "weights on the input": Case("fp8", (4, 6), "top one", on_input=True),
    "the caller's map": Case(None, (4, 6), own_map=True),
    "chunks": Case("fp8", (11, 6), chunk_size=4),
    "experts that leave the sum": Case(None, (5, 2), "some missing", by_slot=True),
}


class BySlot(AutoExperts):
    """Leaves the weights and the sum to the prepare/finalize class, as [tokens, topk, hidden]."""

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
        return super().workspace_shapes(M, N, K, topk, *rest)._replace(output=(M, topk, K))

    def apply(self, output: Any, *args: Any) -> None:
        hidden_states, w1, w2, _, ids, *rest = args
        for slot in range(ids.shape[1]):
            own = output[:, slot].contiguous()
            ones, own_ids = output.new_ones((len(ids), 1), dtype=torch.float32), ids[:, slot : slot + 1].contiguous()
            super().apply(own, hidden_states, w1, w2, ones, own_ids, *rest)
            output[:, slot] = own


def expert_ranks(case: Case, ranks: int) -> list[int] | None:
    if case.expert_rank == "in turn":
        return [expert % ranks for expert in range(EXPERTS)]
    if case.expert_rank == "uneven":
        return [*range(ranks), *[ranks - 1] * (EXPERTS - ranks)][::-1]
    return None


def made(name: str, ranks: int) -> tuple[Case, list[Layer], Array]:
    """A case, the layer of all experts with the tokens of each rank, and the rank of each expert."""
    case = CASES[name]
    rng = np.random.default_rng(zlib.crc32(f"{name} {ranks}".encode()))
    counts = [case.tokens[rank % len(case.tokens)] for rank in range(ranks)]
    quantization = case.quantization and case.quantization.removesuffix(" static")
    topk = 1 if case.ids == "top one" else TOPK
    layer = random_layer(rng, sum(counts), EXPERTS, INTER, HIDDEN, topk, quantization, case.dtype)
    if case.on_input:
        # A single weight is 1 otherwise.
        layer = layer._replace(topk_weights=rng.random(layer.topk_weights.shape, np.float32) + np.float32(0.3))
    if case.quantization == "fp8 static":
        scales = {f"{a}_scale": np.array([0.02], np.float32) for a in ("a1", "a2")}
        layer = layer._replace(config=FusedMoEQuantConfig.fp8(**layer.config.scales, **scales))
    ids = layer.topk_ids.astype(np.int64)
    given = expert_ranks(case, ranks)
    of_expert = np.array(given) if given else np.arange(EXPERTS) // (EXPERTS // ranks)
    if case.ids == "some missing":
        ids = np.where(rng.random(ids.shape) < 0.4, rng.choice([-1, EXPERTS, 10**6, -7], ids.shape), ids)
    elif case.ids == "large":
        ids = np.where(rng.random(ids.shape) < 0.4, 2**32 - 1, ids)
    elif case.ids == "all missing":
        ids = np.full_like(ids, -1)
    elif case.ids == "one expert":
        ids = np.where(np.arange(topk) == 1, 5, np.full_like(ids, -1))
    elif case.ids == "twice":
        ids[:, 2] = ids[:, 0]
    elif case.ids == "one rank":
        ids = ids % (EXPERTS // ranks)
    layer = layer._replace(topk_ids=ids.astype(case.ids_dtype))
    ends = np.cumsum([0, *counts])
    fields = ("hidden_states", "topk_weights", "topk_ids")
    own = [{name: getattr(layer, name)[a:b] for name in fields} for a, b in itertools.pairwise(ends)]
    return case, [layer._replace(**each) for each in own], of_expert


def local(layer: Layer, here: Array) -> Layer:
    """The layer with the experts that are here alone."""
    config = layer.config
    own = {k: s if k in ("a1_scale", "a2_scale") else s[here] for k, s in config.scales.items()}
    config = FusedMoEQuantConfig(config.quant_dtype, config.per_act_token_quant, config.block_shape, **own)
    return layer._replace(w1=layer.w1[here], w2=layer.w2[here], config=config)


def permuted(layer: Layer) -> Layer:
    """The layer with its experts the other way round."""
    return local(layer, np.arange(len(layer.w1))[::-1])


def shared_experts(hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states * 2


def run_case(name: str, rank: int, ranks: int, put: Callable[[Array], torch.Tensor]) -> dict[str, Any]:
    """What this rank gets, in NumPy; `put` makes tensors of arrays."""
    case, layers, of_expert = made(name, ranks)
    here = of_expert == rank
    layer = local(layers[rank], here)
    load = put(np.full(EXPERTS, 100, np.int32))
    pf = NcclPrepareAndFinalize(None, EXPERTS, expert_rank=expert_ranks(case, ranks), expert_load=load)
    options: dict[str, Any] = {"apply_router_weight_on_input": case.on_input}
    if case.own_map:
        layer = permuted(layer)
        options["expert_map"] = put(np.where(here, here.sum() - here.cumsum(), -1).astype(np.int32))
    there = layer.map(put)
    experts = (BySlot if case.by_slot else AutoExperts)(there.config)
    shared = shared_experts if case.shared else None
    module = FusedMoEModularKernel(pf, experts, shared, chunk_size=case.chunk_size)
    assert module.fused_experts is experts and pf.num_local_experts == here.sum()
    results = [module(*there.arrays, **options) for _ in range(2)]
    found: dict[str, Any] = {"load": to_numpy(load)}
    if case.shared:
        same_bits(results[0][0], to_numpy(shared_experts(there.hidden_states)))
        results = [out for _, out in results]
    same_bits(results[0], to_numpy(results[1]))
    return {**found, "out": to_numpy(results[0])}


def raised(function: Callable[[], Any]) -> str:
    """The exception that a call raises, in words."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def layers_that_differ(rank: int, ranks: int) -> Iterator[tuple[str, str]]:
    """What each rank says of a last rank with another layer; the group works on after each."""
    rng = np.random.default_rng(0)
    is_last = rank == ranks - 1

    def run(experts: int, hidden: int, topk: int, quantization: str | None, expert_rank: list[int] | None) -> str:
        layer = random_layer(rng, 4, experts, INTER, hidden, topk, quantization)
        pf = NcclPrepareAndFinalize(None, experts, expert_rank=expert_rank)
        own = local(layer, pf.expert_rank == rank).map(put)
        return raised(lambda: FusedMoEModularKernel(pf, AutoExperts(own.config))(*own.arrays))

    same: tuple[Any, ...] = (EXPERTS, HIDDEN, TOPK, None, None)
    yield "nothing", run(*same)
    others = {
        "num_experts": (2 * EXPERTS, *same[1:]),
        "hidden_states' hidden size": (EXPERTS, 128, *same[2:]),
        "topk_ids' topk": (EXPERTS, HIDDEN, 2, None, None),
        "the dtype and quantization": (EXPERTS, HIDDEN, TOPK, "fp8_block", None),
        "expert_rank": (*same[:4], [expert % ranks for expert in range(EXPERTS)]),
    }
    for name, other in others.items():
        yield name, run(*(other if is_last else same))
    yield "nothing", run(*same)


def exchanges(rank: int, ranks: int) -> Iterator[RowExchange]:
    """Exchanges with one other rank: in a group of the two, and in the group of all, in either order."""
    half = ranks // 2
    pairs = [[first, first + half] for first in range(half)]
    groups = [torch.distributed.new_group(pair) for pair in pairs]
    own = rank % half
    yield RowExchange(groups[own])
    yield RowExchange(None, pairs[own])
    yield RowExchange(None, pairs[own][::-1])
    # Some one way, some the other.
    yield RowExchange(None, pairs[own][:: -1 if own else 1])


def exchanged(exchange: RowExchange) -> None:
    """Rows of several dtypes to the two ranks of an exchange, all sent before any is received."""
    rank, ranks = exchange.rank, 2
    assert exchange.ranks == ranks
    pending = []
    for dtype in (torch.int32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
        tokens = 3 + rank
        values = (torch.arange(tokens)[:, None] + 16 * rank + torch.zeros(1, 5)).to(dtype)
        # Token t of rank r goes to each rank q for which r + t is no multiple of q + 2.
        goes = (torch.arange(tokens)[:, None] + rank) % torch.arange(2, ranks + 2) != 0
        pending.append((values, goes, *exchange.dispatch(values, goes, {"five": 5})))
    for values, goes, receive, route in pending:
        rows = receive()
        sent = ((16 * source + t, source + t) for source in range(ranks) for t in range(3 + source))
        want = torch.tensor([value for value, number in sent if number % (rank + 2)], dtype=torch.float32)
        assert rows.dtype == values.dtype
        assert torch.equal(rows.float(), want[:, None].to(values.dtype).float().expand(-1, 5))
        # Each rank adds its number to what goes back, in another dtype.
        back = exchange.combine(rows.float() + 1000 * rank, route)
        for t in range(len(values)):
            for r in range(ranks):
                position = int(route.positions[t, r])
                assert (position >= 0) == bool(goes[t, r])
                if position >= 0:
                    assert torch.equal(back[position], values[t].float() + 1000 * r)


def process(rank: int, ranks: int, folder: str, backend: str, device: str) -> None:
    """One rank: all cases, and what they gave into a file."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=DEADLINE / 2),
    )
    found: dict[str, Any] = {name: run_case(name, rank, ranks, as_tensor(device)) for name in CASES}
    if device == "cpu":
        found["differ"] = list(layers_that_differ(rank, ranks))
        for exchange in exchanges(rank, ranks):
            exchanged(exchange)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_processes(ranks: int, folder: Path, backend: str = "gloo", device: str = "cpu") -> list[dict[str, Any]]:
    """What the cases give on each of so many ranks. Processes that take too long are killed."""
    arguments = (ranks, str(folder), backend, device)
    context = torch.multiprocessing.spawn(process, arguments, nprocs=ranks, join=False)
    end = time.monotonic() + DEADLINE
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < end, f"{ranks} processes have not ended in {DEADLINE} s"
    finally:
        for each in context.processes:
            if each.is_alive():
                each.kill()
                each.join()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def wanted(layer: Layer, of_expert: Array, ranks: int, on_input: bool) -> Array:
    """The bits of a rank's result: the sums of each rank's experts, rounded, added up in the order of the ranks."""
    total = np.zeros(layer.hidden_states.shape, np.float32)
    for rank in range(ranks):
        here = of_expert == rank
        expert_map = np.where(here, here.cumsum() - 1, -1).astype(np.int32)
        own = local(layer, here)
        options = {"expert_map": expert_map, "apply_router_weight_on_input": on_input}
        total += twin.fused_experts(*own.arrays, quant=own.config, **options).astype(np.float32)
    return total.astype(layer.hidden_states.dtype)


def check_all(found: list[dict[str, Any]], ranks: int, bits: bool) -> None:
    """Compare all cases with the twin; to the bit where the twin did the products."""
    for name in CASES:
        case, layers, of_expert = made(name, ranks)
        every_id = np.concatenate([layer.topk_ids.astype(np.int64).ravel() for layer in layers])
        counts = np.bincount(every_id[(every_id >= 0) & (every_id < EXPERTS)], minlength=EXPERTS)
        for rank, layer in enumerate(layers):
            got, on_input = found[rank][name]["out"], case.on_input
            try:
                if bits:
                    same_bits(got, wanted(layer, of_expert, ranks, on_input))
                options = {"apply_router_weight_on_input": on_input}
                compare(layer, got, twin.fused_experts(*layer.arrays, quant=layer.config, **options))
                # Two calls were counted on top of 100.
                want_load = 100 + 2 * np.where(of_expert == rank, counts, 0)
                np.testing.assert_array_equal(found[rank][name]["load"], want_load)
            except AssertionError as error:
                raise AssertionError(f"{name}, rank {rank} of {ranks}: {error}") from None


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_gets_what_one_rank_computes(ranks: int, tmp_path: Path) -> None:
    found = in_processes(ranks, tmp_path)
    check_all(found, ranks, bits=True)
    for rank in range(ranks):
        for name, message in found[rank]["differ"]:
            if name == "nothing":
                assert message == "nothing"
                continue
            assert message.startswith(f"RuntimeError: {name}")
            # The last rank sees the first that differs from it, the others see the last.
            assert "must be the same on all ranks of the group" in message
            assert message.endswith(f"on rank {ranks - 1 if rank < ranks - 1 else 0}")


# --- on one rank ----------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def one(**options: Any) -> tuple[NcclPrepareAndFinalize, Layer]:
    layer = random_layer(np.random.default_rng(0), 5, 4, INTER, HIDDEN, 2, options.pop("quantization", None))
    return NcclPrepareAndFinalize(None, 4, **options), layer.map(put)


@pytest.mark.usefixtures("group")
def test_one_rank_is_a_group_too() -> None:
    pf, layer = one(max_num_tokens=5)
    assert (pf.rank, pf.ranks, pf.num_dispatchers(), pf.max_num_tokens_per_rank()) == (0, 1, 1, 5)
    assert pf.topk_indices_dtype() is None and pf.has_prepare_no_receive() and not pf.sorts_tokens()
    assert refusal(pf, AutoExperts()) is None
    module = FusedMoEModularKernel(pf, AutoExperts())
    host = random_layer(np.random.default_rng(0), 5, 4, INTER, HIDDEN, 2)
    same_bits(module(*layer.arrays), twin.fused_experts(*host.arrays))
    assert pf.expert_map(layer.w1) is pf.expert_map(layer.w2)
    np.testing.assert_array_equal(pf.expert_map(host.w1), np.arange(4, dtype=np.int32))


def test_there_must_be_a_group() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed must be initialized \(init_process_group\)"):
        NcclPrepareAndFinalize(None, 4)


ROWS = torch.zeros(3, 8)
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "group=3": (TypeError, "group must be a torch.distributed.ProcessGroup or None, got int"),
    "group=torch.distributed.GroupMember.NON_GROUP_MEMBER": (
        ValueError, "group must be a group that this process is in, got NON_GROUP_MEMBER",
    ),
    "num_experts=0": (ValueError, "num_experts must be an integer of at least 1, got 0"),
    "max_num_tokens=0": (ValueError, "max_num_tokens must be an integer of at least 1, got 0"),
    "expert_rank=[0, 0]": (ValueError, "expert_rank must be of 4 ranks, one for each expert, got 2"),
    "expert_rank=[0, 0, 1, 0]": (ValueError, "expert_rank[2] must be an integer in [0, 0], got 1"),
    "expert_rank=[0, 0, 0.5, 0]": (TypeError, "expert_rank[2] must be an integer in [0, 0], got 0.5 (float)"),
    "expert_load=[0]": (TypeError, "expert_load must be a torch tensor or None, got list"),
    "expert_load=torch.zeros(4)": (TypeError, "expert_load must be int32, got float32"),
    "expert_load=torch.zeros(3, dtype=torch.int32)": (
        ValueError, "expert_load must be of shape [num_experts] = [4], got [3]",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("change", REFUSED)
def test_a_bad_class_is_refused(change: str) -> None:
    kind, message = REFUSED[change]
    arguments = {"group": None, "num_experts": 4, **eval(f"dict({change})")}
    with pytest.raises(kind) as error:
        NcclPrepareAndFinalize(arguments.pop("group"), arguments.pop("num_experts"), **arguments)
    assert str(error.value) == message


@pytest.mark.usefixtures("group")
def test_experts_that_no_rank_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 3)
    with pytest.raises(ValueError, match="num_experts must be a multiple of the 3 ranks of the group, or expert_rank"):
        NcclPrepareAndFinalize(None, 4)
    with pytest.raises(ValueError, match="expert_rank must be of at least one expert on each rank, got none on rank 1"):
        NcclPrepareAndFinalize(None, 4, expert_rank=[0, 2, 2, 0])


@pytest.mark.usefixtures("group")
def test_bad_input_is_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    pf, layer = one(max_num_tokens=5)
    x, weights, ids = layer.hidden_states, layer.topk_weights, layer.topk_ids
    none = FusedMoEQuantConfig()
    scales = {name: torch.ones(4) for name in ("w1_scale", "w2_scale")}
    found_scale = FusedMoEQuantConfig.fp8(**scales, a2_scale=torch.ones(1))
    good: dict[str, Any] = {
        "a1": x, "topk_weights": weights, "topk_ids": ids, "num_experts": 4, "expert_map": None,
        "apply_router_weight_on_input": False, "quant_config": none,
    }  # fmt: skip
    monkeypatch.setattr(torch.distributed, "all_to_all_single", None)
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"a1": to_numpy(x)}, TypeError, "hidden_states must be a torch tensor, since torch.distributed moves it"),
        ({"topk_ids": to_numpy(ids)}, TypeError, "topk_ids must be a torch tensor, since"),
        ({"topk_weights": to_numpy(weights)}, TypeError, "topk_weights must be a torch tensor, since"),
        ({"a1": x.to("meta")}, ValueError, "hidden_states must be a cpu or cuda"),
        ({"a1": x[0]}, ValueError, "hidden_states must be of shape [tokens, hidden], got [256]"),
        ({"topk_ids": ids[:4]}, ValueError, "topk_ids must be of shape [tokens, topk] = [5, 2], got [4, 2]"),
        ({"topk_weights": weights[:, :1]}, ValueError, "topk_weights must be of shape [tokens, topk] = [5, 2]"),
        ({"topk_weights": weights.double()}, TypeError, "topk_weights must be float32, got float64"),
        (
            {name: torch.cat([good[name]] * 2) for name in ("a1", "topk_weights", "topk_ids")}, ValueError,
            "hidden_states must be of at most 5 tokens (max_num_tokens), got 10",
        ),
        ({"num_experts": 8}, ValueError, "global_num_experts must be 4, the experts of all ranks, got 8"),
        ({"expert_map": np.arange(4)}, TypeError, "expert_map must be a torch tensor, since"),
        ({"expert_map": torch.arange(3)}, ValueError, "expert_map must be of shape [num_experts] = [4], got [3]"),
        (
            {"expert_map": torch.tensor([0, 1, -1, 2])}, ValueError,
            "expert_map must be one with the experts of rank 0 (expert_rank), got one with others",
        ),
        ({"quant_config": found_scale}, ValueError, "quant_config must be a1_scale given, or a scale per token"),
    ]  # fmt: skip
    for change, kind, message in refused:
        with pytest.raises(kind) as error:
            pf.prepare(**{**good, **change})
        assert str(error.value).startswith(message)
    with pytest.raises(RuntimeError, match=r"^NcclPrepareAndFinalize.finalize must follow a prepare$"):
        pf.finalize(torch.empty_like(x), x, weights, ids, False, TopKWeightAndReduceNoOp())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"^NcclPrepareAndFinalize must not run while a CUDA graph is captured.*Push"
    ):
        pf.prepare(**good)
    with pytest.raises(RuntimeError, match=r"^RowExchange.dispatch must not run while a CUDA graph is captured"):
        pf.exchange.dispatch(ROWS, torch.ones(3, 1, dtype=torch.bool))


@pytest.mark.usefixtures("group")
def test_a_layer_with_other_experts_is_refused() -> None:
    pf, layer = one()
    module = FusedMoEModularKernel(pf, AutoExperts())
    fewer = layer._replace(w1=layer.w1[:3], w2=layer.w2[:3])
    with pytest.raises(ValueError, match=r"w1 must be of the 4 experts of this rank \(num_local_experts\), got 3"):
        module(*fewer.arrays)
    with pytest.raises(TypeError, match="hidden_states must be a torch tensor, got list"):
        module([[1.0]], *layer.arrays[1:])
    with pytest.raises(TypeError, match=r"hidden_states must be a torch tensor, since torch.distributed moves it"):
        module(*(to_numpy(array) for array in layer.arrays))


@pytest.mark.usefixtures("group")
def test_a_map_that_was_changed_is_compared_again() -> None:
    pf, layer = one()
    module = FusedMoEModularKernel(pf, AutoExperts())
    own_map = torch.arange(4, dtype=torch.int32)
    module(*layer.arrays, expert_map=own_map)
    module(*layer.arrays, expert_map=own_map)
    own_map[2] = -1
    with pytest.raises(ValueError, match="expert_map must be one with the experts of rank 0"):
        module(*layer.arrays, expert_map=own_map)


@pytest.mark.usefixtures("group")
def test_results_of_other_shapes_are_refused() -> None:
    pf, layer = one()
    x, weights, ids = layer.hidden_states, layer.topk_weights, layer.topk_ids
    arguments = (x, weights, ids, 4, None, False, FusedMoEQuantConfig())
    no_op = TopKWeightAndReduceNoOp()
    pf.prepare(*arguments)
    with pytest.raises(ValueError, match=r"output must be of shape \[tokens, hidden\] = \[5, 256\], got \[4, 256\]"):
        pf.finalize(torch.empty_like(x[:4]), x, weights, ids, False, no_op)
    with pytest.raises(
        ValueError, match=r"fused_expert_output must be of shape \[received, hidden\] = \[5, 256\], got"
    ):
        pf.finalize(torch.empty_like(x), x[:4], weights, ids, False, no_op)
    with pytest.raises(ValueError, match=r"fused_expert_output must be of shape \[tokens, topk, hidden\]"):
        pf.finalize(torch.empty_like(x), x, weights, ids, False, TopKWeightAndReduceContiguous())


@pytest.mark.usefixtures("group")
def test_bad_rows_are_refused() -> None:
    exchange = RowExchange()
    everywhere = torch.ones(3, 1, dtype=torch.bool)
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        (to_numpy(ROWS), everywhere, TypeError, "rows must be a torch tensor"),
        (ROWS[0], everywhere, ValueError, "rows must be of shape [tokens, columns], got [8]"),
        (ROWS, everywhere[:2], ValueError, "destinations must be of shape [tokens, ranks] = [3, 1], got [2, 1]"),
        (ROWS, everywhere.int(), TypeError, "destinations must be bool, got torch.int32"),
        (ROWS, everywhere.numpy(), TypeError, "destinations must be a torch tensor"),
    ]
    for rows, destinations, kind, message in refused:
        with pytest.raises(kind) as error:
            exchange.dispatch(rows, destinations)
        assert str(error.value).startswith(message)
    receive, route = exchange.dispatch(ROWS, everywhere)
    assert torch.equal(receive(), ROWS)
    # One column is contiguous with any stride.
    column = torch.arange(3.0).as_strided((3, 1), (1, 0))
    assert column.is_contiguous() and torch.equal(exchange.combine(column, route), column)
    with pytest.raises(ValueError, match=r"rows must be of shape \[received, columns\] = \[3, 8\], got \[2, 8\]"):
        exchange.combine(ROWS[:2], route)
    with pytest.raises(ValueError, match=r"rows must be of shape \[received, columns\], got \[3\]"):
        exchange.combine(ROWS[:, 0], route)


@pytest.mark.usefixtures("group")
def test_bad_peers_are_refused() -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        ([1], ValueError, "peers[0] must be an integer in [0, 0], got 1"),
        ([0.0], TypeError, "peers[0] must be an integer in [0, 0], got 0.0"),
        (0, TypeError, "peers must be a sequence of ranks or None, got int"),
        ([0, 0], ValueError, "peers must be different ranks, got [0, 0]"),
        ([], ValueError, "peers must be ranks with this one, 0, among them, got []"),
    ]
    for peers, kind, message in refused:
        with pytest.raises(kind) as error:
            RowExchange(None, peers)
        assert str(error.value).startswith(message)
    assert NcclPrepareAndFinalize(None, EXPERTS, peers=[0]).ranks == 1


# --- on a GPU -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.waits
@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("nccl", 2), ("gloo", 2)])
def test_each_rank_on_a_gpu(backend: str, ranks: int, tmp_path: Path) -> None:
    if backend == "nccl" and ranks > torch.cuda.device_count():
        pytest.skip("NCCL takes a GPU for each rank")
    check_all(in_processes(ranks, tmp_path, backend, "cuda"), ranks, bits=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("group")
def test_a_cuda_graph_captures_no_exchange() -> None:
    pf, layer = one()
    there = layer.map(to_numpy).map(as_tensor("cuda"))
    module = FusedMoEModularKernel(pf, AutoExperts())
    module(*there.arrays)
    with (
        pytest.raises(RuntimeError, match=r"NcclPrepareAndFinalize must not run while a CUDA graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        module(*there.arrays)
