"""Exchange tokens with other ranks by `torch.distributed`: NCCL, or gloo for host memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.formats.fused_moe import FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, Prepared
from cukern.fused_moe.prepare_finalize import SeveralRanks, quantize_input, refuse_per_call_tensor_scale, weigh_input
from cukern.fused_moe.topk_weight_and_reduce import (
    DELEGATES,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOp,
)
from cukern.ops.moe_permute import moe_sort, moe_unpermute, permute_rows
from cukern.runtime import arrays, check
from cukern.runtime.describe import type_name

_ALIGNMENT = 16  # bytes; alignment of each array in a sent row


class Route(NamedTuple):
    """The rows that a `RowExchange.dispatch` sent.

    Attributes:
        positions: int32 [tokens, ranks]. Element [t, r] is the index, among all sent rows, of the row that was sent to
            rank r for token t; -1: none. Sent rows are sorted by rank, then by token.
        sent, received: the number of rows sent to, and received from, each rank.
    """

    positions: Any
    sent: list[int]
    received: list[int]


class RowExchange:
    """Sends rows to the ranks of a process group and back, with `all_to_all_single`, on any number of hosts.

    With gloo, CUDA tensors are copied to host memory and back. All ranks of the group must make the same calls in the
    same order.

    Args:
        group: a `torch.distributed.ProcessGroup` that contains this process; None: the default group.
        peers: the ranks of the group that exchange rows among themselves, including this rank, in the same order on
            every peer; None: all ranks.

    Attributes:
        rank, ranks: the index of this process among the peers, and the number of peers.

    Raises:
        TypeError, ValueError: an invalid `group` or `peers`.
        RuntimeError: `torch.distributed` has not been initialized.
    """

    def __init__(self, group: Any = None, peers: Sequence[int] | None = None) -> None:
        distributed = import_torch().distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise RuntimeError("torch.distributed must be initialized (init_process_group) before its groups are used")
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            check.fail("group", "a group that this process is in", "NON_GROUP_MEMBER")
        if group is not None and not isinstance(group, distributed.ProcessGroup):
            check.fail("group", "a torch.distributed.ProcessGroup or None", type_name(group), TypeError)
        self.group = group
        group_rank, self._size = distributed.get_rank(group), distributed.get_world_size(group)
        self._peers = [*range(self._size)] if peers is None else _check_peers(peers, group_rank, self._size)
        # The peers' indices, sorted by group rank. `all_to_all_single` also orders rows by group rank.
        self._order = sorted(range(len(self._peers)), key=self._peers.__getitem__)
        self.rank, self.ranks = self._peers.index(group_rank), len(self._peers)
        backends = (part.split(":", 1) for part in distributed.get_backend_config(group).split(","))
        self._backends: dict[str, str] = dict(backends)

    def expect(self, name: str, array: Any) -> None:
        """Check that `array`, the argument `name`, is a tensor on a device for which the group has a backend."""
        torch = import_torch()
        if not isinstance(array, torch.Tensor):
            check.fail(name, "a torch tensor, since torch.distributed moves it", type_name(array), TypeError)
        kind = array.device.type
        if kind not in self._backends:
            able = " or ".join(self._backends)
            check.fail(name, f"a {able} tensor, for which the group has a backend", f"one of {kind}")

    def dispatch(
        self, rows: Any, destinations: Any, agreed: Mapping[str, int] | None = None
    ) -> tuple[Callable[[], Any], Route]:
        """Send each row once to each of its destination ranks.

        The host waits for the row counts, so a CUDA graph cannot capture the call. If a rank of the group never calls
        `dispatch`, the other ranks raise after the group's timeout.

        Args:
            rows: [tokens, columns], contiguous; columns and dtype are the same on all ranks.
            destinations: bool [tokens, ranks], on the device of `rows`.
            agreed: integers that must be the same on all ranks, keyed by their names in the error message.

        Returns:
            A function, and the route. The function waits for the received rows and returns them: [received, columns],
            sorted by source rank, then by token.

        Raises:
            TypeError, ValueError: invalid arguments.
            RuntimeError: a CUDA graph is being captured, or `agreed` differs between ranks.
        """
        torch = import_torch()
        _refuse_capture("RowExchange.dispatch")
        self.expect("rows", rows)
        self.expect("destinations", destinations)
        check.dimensions("rows", tuple(rows.shape), ("tokens", "columns"))
        check.shape("destinations", tuple(destinations.shape), (len(rows), self.ranks), "[tokens, ranks]")
        if destinations.dtype is not torch.bool:
            check.fail("destinations", "bool", destinations.dtype, TypeError)
        # Treat ranks as experts, so that `moe_sort` sorts the pairs (token, rank) by rank.
        rank_ids = torch.arange(self.ranks, dtype=torch.int32, device=rows.device)
        offsets, _, positions = moe_sort(torch.where(destinations, rank_ids, -1), self.ranks)
        agreed_sizes = {**(agreed or {}), "the bytes of a row": rows.shape[1] * rows.element_size()}
        sent, received = self._counts(offsets.diff(), agreed_sizes)
        sorted_rows = permute_rows(rows, positions, sum(sent))
        return self._all_to_all(sorted_rows, sent, received), Route(positions, sent, received)

    def combine(self, rows: Any, route: Route) -> Any:
        """Send one result row back for each received row.

        Args:
            rows: [received, columns], contiguous, in the order of the received rows.
            route: from `dispatch`.

        Returns:
            [sent, columns]. Row `route.positions[t, r]` is the result of rank r for token t.
        """
        self.expect("rows", rows)
        check.dimensions("rows", tuple(rows.shape), ("received", "columns"))
        wanted = (sum(route.received), rows.shape[1])
        check.shape("rows", tuple(rows.shape), wanted, "[received, columns]")
        return self._all_to_all(rows, route.received, route.sent)()

    def _counts(self, sent: Any, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Return the numbers of rows sent to and received from each rank. Check that `sizes` are equal on all ranks."""
        torch = import_torch()
        local_sizes = torch.tensor([list(sizes.values())], dtype=torch.int64, device=sent.device)
        table = torch.cat([sent.to(torch.int64)[:, None], local_sizes.expand(self.ranks, -1)], 1)
        ones = [1] * self.ranks
        both = torch.cat([table, self._all_to_all(table, ones, ones)()], 1).tolist()
        width = 1 + len(sizes)
        for rank, row in enumerate(both):
            for (name, mine), theirs in zip(sizes.items(), row[width + 1 :], strict=True):
                if mine != theirs:
                    where = f"{mine} on rank {self._peers[self.rank]} and {theirs} on rank {self._peers[rank]}"
                    raise RuntimeError(f"{name} must be the same on all ranks of the group, got {where}")
        return [row[0] for row in both], [row[width] for row in both]

    def _all_to_all(self, rows: Any, sent: list[int], received: list[int]) -> Callable[[], Any]:
        """Start to exchange rows with all peers. Return a function that waits for the received rows."""
        torch = import_torch()
        through_host = rows.is_cuda and self._backends["cuda"] == "gloo"
        # torch calls a single column contiguous even if its stride is not 1, but `view(uint8)` rejects such a tensor.
        is_plain = rows.is_contiguous() and rows.stride(1) == 1
        source = (rows if is_plain else rows.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
        source = _reorder_chunks(source.cpu() if through_host else source, sent, self._order)
        target = torch.empty((sum(received), source.shape[1]), dtype=torch.uint8, device=source.device)
        splits = self._group_counts(received), self._group_counts(sent)
        work = torch.distributed.all_to_all_single(target, source, *splits, group=self.group, async_op=True)

        def receive() -> Any:
            work.wait()
            inverse_order = sorted(range(self.ranks), key=self._order.__getitem__)
            by_peer = _reorder_chunks(target, [received[peer] for peer in self._order], inverse_order)
            return by_peer.to(rows.device).view(rows.dtype)

        return receive

    def _group_counts(self, counts: list[int]) -> list[int]:
        """Convert row counts per peer to row counts per rank of the group."""
        group_counts = [0] * self._size
        for peer, count in zip(self._peers, counts, strict=True):
            group_counts[peer] = count
        return group_counts


class _RowLayout(NamedTuple):
    """The layout of a sent row, which packs one row of each tensor.

    `fields` has (first byte, number of bytes, dtype) of each tensor.
    """

    fields: list[tuple[int, int, Any]]
    width: int

    @classmethod
    def of(cls, tensors: Sequence[Any]) -> _RowLayout:
        start, fields = 0, []
        for tensor in tensors:
            size = tensor.shape[1] * tensor.element_size()
            fields.append((start, size, tensor.dtype))
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(fields, start)

    def pack(self, tensors: Sequence[Any]) -> Any:
        torch = import_torch()
        rows = torch.empty((len(tensors[0]), self.width), dtype=torch.uint8, device=tensors[0].device)
        for tensor, (start, size, _) in zip(tensors, self.fields, strict=True):
            rows[:, start : start + size].view(tensor.dtype).copy_(tensor)
        return rows

    def unpack(self, rows: Any) -> list[Any]:
        return [rows[:, start : start + size].contiguous().view(dtype) for start, size, dtype in self.fields]


class _Received(NamedTuple):
    """The data that `prepare` stores for `finalize`: the route, and the weights and ids of the received tokens."""

    route: Route
    topk_weights: Any
    topk_ids: Any


class NcclPrepareAndFinalize(SeveralRanks):
    """Sends tokens in the standard format to their experts' ranks with `all_to_all_single`, on any number of hosts.

    A token is sent once to each rank that has at least one of its experts. The receiving rank returns the weighted sum
    over its experts in the layer's dtype. The source rank adds these rows in float32 in rank order, and rounds once. So
    the bits of a result depend only on the placement of the experts.

    All ranks must call the layer, even without tokens. The number of tokens may differ between ranks and calls. The
    host waits for the row counts, so a CUDA graph cannot capture the layer. If a rank never calls the layer, the other
    ranks wait until the group's timeout. `finalize` refers to the last `prepare`, so only one call may be in flight.

    Args:
        group, peers: the ranks that have the experts, as for `RowExchange`.
        num_experts: the number of experts of all ranks.
        max_num_tokens: maximum tokens of a call on this rank; None: any number.
        expert_rank: [num_experts], the rank of each expert; with `peers`, an index in `peers`. None: an equal share per
            rank, in order. w1 and w2 hold the experts of a rank in ascending order.
        expert_load: int32 [num_experts]. For each expert of this rank, `prepare` adds the number of pairs (token, slot)
            that arrived.

    Attributes:
        rank, ranks: the index of this process among the ranks with experts, and the number of these ranks.

    Raises:
        TypeError, ValueError: invalid arguments.
        RuntimeError: `torch.distributed` has not been initialized.
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        *,
        max_num_tokens: int | None = None,
        expert_rank: Sequence[int] | None = None,
        expert_load: Any = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        self.exchange = RowExchange(group, peers)
        self.rank, self.ranks = self.exchange.rank, self.exchange.ranks
        self.num_experts = check.integer("num_experts", num_experts, 1)
        self.max_num_tokens = None if max_num_tokens is None else check.integer("max_num_tokens", max_num_tokens, 1)
        self.expert_rank = expert_ranks(expert_rank, self.num_experts, self.ranks)
        here = self.expert_rank == self.rank
        self.num_local_experts = int(here.sum())
        self.expert_load = expert_load
        if expert_load is not None:
            _check_expert_load(expert_load, self.num_experts)
        self._map = np.where(here, here.cumsum() - 1, -1).astype(np.int32)
        self._device_arrays: dict[tuple[str, Any, str], Any] = {}
        self._known_map: tuple[Any, int] | None = None
        self._received: _Received | None = None

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        return self.ranks

    def expert_map(self, like: Any) -> Any:
        return self._constant("expert_map", self._map, like)

    def _constant(self, name: str, values: Any, like: Any) -> Any:
        """Return `values` in the library and on the device of `like`, cached per device."""
        library = arrays.library_of(like)
        if library is None:
            check.fail("hidden_states", "a torch tensor", type_name(like), TypeError)
        key = (library.name, library.device(like), name)
        if key not in self._device_arrays:
            self._device_arrays[key] = library.from_numpy(values, like)
        return self._device_arrays[key]

    def prepare_no_receive(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Callable[[], Prepared]:  # fmt: skip
        """Quantize the tokens and send them to their experts' ranks.

        Returns:
            A function that returns the received tokens, sorted by source rank, with ids among the experts of all ranks.

        Raises:
            TypeError, ValueError: invalid arguments.
            RuntimeError: a CUDA graph is being captured, or the ranks disagree on the layer.
        """
        _refuse_capture(type(self).__name__)
        self._check(a1, topk_weights, topk_ids, num_experts, expert_map, quant_config)
        torch = import_torch()
        ids, destinations = self._destinations(topk_ids)
        x = weigh_input(a1, topk_weights) if apply_router_weight_on_input else a1
        a1q, scale = quantize_input(x, quant_config)
        is_static = quant_config.a1_scale is not None
        tensors = [a1q, ids, topk_weights, *([] if scale is None or is_static else [scale])]
        layout = _RowLayout.of(tensors)
        format_key = f"{a1.dtype} {quant_config.name} {is_static} {bool(apply_router_weight_on_input)}"
        agreed = {
            "num_experts": self.num_experts,
            "expert_rank (as a checksum)": zlib.crc32(self.expert_rank.tobytes()),
            "hidden_states' hidden size": a1.shape[1],
            "topk_ids' topk": topk_ids.shape[1],
            "the dtype and quantization (as a checksum)": zlib.crc32(format_key.encode()),
        }
        receive_rows, route = self.exchange.dispatch(layout.pack(tensors), destinations, agreed)

        def receive() -> Prepared:
            tokens, received_ids, received_weights, *received_scale = layout.unpack(receive_rows())
            self._received = _Received(route, received_weights, received_ids)
            if self.expert_load is not None:
                here = self.expert_map(tokens)[received_ids.clamp(min=0)] >= 0
                counted = here.logical_and_(received_ids >= 0).to(torch.int32)
                self.expert_load.scatter_add_(0, received_ids.clamp(min=0).flatten().to(torch.int64), counted.flatten())
            a1_scale = received_scale[0] if received_scale else None
            if is_static:
                a1_scale = quant_config.a1_scale.reshape(1)
            return Prepared(tokens, a1_scale, None, received_ids, received_weights)

        return receive

    def _check(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        quant_config: FusedMoEQuantConfig,
    ) -> None:
        for name, array in (("hidden_states", a1), ("topk_weights", topk_weights), ("topk_ids", topk_ids)):
            self.exchange.expect(name, array)
            if array.device != a1.device:
                check.fail(name, f"on {a1.device} like hidden_states", f"one on {array.device}")
            check.dimensions(name, tuple(array.shape), ("tokens", "hidden" if array is a1 else "topk"))
        wanted = (len(a1), topk_ids.shape[1])
        check.shape("topk_ids", tuple(topk_ids.shape), wanted, "[tokens, topk]")
        check.shape("topk_weights", tuple(topk_weights.shape), wanted, "[tokens, topk]")
        check.dtype("topk_weights", str(topk_weights.dtype).removeprefix("torch."), ("float32",))
        if self.max_num_tokens is not None and len(a1) > self.max_num_tokens:
            check.fail("hidden_states", f"of at most {self.max_num_tokens} tokens (max_num_tokens)", len(a1))
        if num_experts != self.num_experts:
            check.fail("global_num_experts", f"{self.num_experts}, the experts of all ranks", num_experts)
        self._check_map(expert_map, a1)
        refuse_per_call_tensor_scale(quant_config)
        if self.expert_load is not None and self.expert_load.device != a1.device:
            check.fail("expert_load", f"on {a1.device} like hidden_states", f"one on {self.expert_load.device}")

    def _check_map(self, expert_map: Any, a1: Any) -> None:
        """Check that `expert_map` has this rank's experts. Check each map once, because this waits for the GPU."""
        local_map = self.expert_map(a1)
        if expert_map is None or expert_map is local_map:
            return
        self.exchange.expect("expert_map", expert_map)
        check.shape("expert_map", tuple(expert_map.shape), (self.num_experts,), "[num_experts]")
        version = expert_map._version
        if self._known_map is not None and self._known_map[0] is expert_map and self._known_map[1] == version:
            return
        if not import_torch().equal(expert_map >= 0, local_map >= 0):
            check.fail("expert_map", f"one with the experts of rank {self.rank} (expert_rank)", "one with others")
        self._known_map = (expert_map, version)

    def _destinations(self, topk_ids: Any) -> tuple[Any, Any]:
        """Return the ids as int32 (-1: no expert), and the destination ranks of each token, bool [tokens, ranks]."""
        torch = import_torch()
        ids = topk_ids.to(torch.int64)
        ids = torch.where((ids >= 0) & (ids < self.num_experts), ids, -1)
        # Invalid ids (-1) select the last element of the appended array, an extra rank. The column of the extra rank is
        # removed below.
        ranks = self._constant("expert_rank", np.append(self.expert_rank, self.ranks), topk_ids)[ids]
        destinations = torch.zeros((len(ids), self.ranks + 1), dtype=torch.bool, device=ids.device)
        destinations.scatter_(1, ranks, True)
        return ids.to(torch.int32), destinations[:, : self.ranks]

    def finalize(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: TopKWeightAndReduce,
        expert_tokens_meta: ExpertTokensMetadata | None = None,
    ) -> None:  # fmt: skip
        """Send the results back and add them up. `weight_and_reduce_impl` uses the received ids and weights.

        Raises:
            RuntimeError: no `prepare` came before.
            ValueError: shapes that do not match.
        """
        if self._received is None:
            raise RuntimeError(f"{type(self).__name__}.finalize must follow a prepare")
        route, weights, ids = self._received
        tokens, hidden = len(route.positions), output.shape[1]
        check.shape("output", tuple(output.shape), (tokens, hidden), "[tokens, hidden]")
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = DELEGATES[self.activation_format]()
        rows = fused_expert_output
        if not isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOp):
            rows = output.new_empty((len(ids), hidden))
            weight_and_reduce_impl.apply(
                rows, fused_expert_output, weights, ids, apply_router_weight_on_input, expert_tokens_meta
            )
        check.shape("fused_expert_output", tuple(rows.shape), (len(ids), hidden), "[received, hidden]")
        self._received = None
        moe_unpermute(output, self.exchange.combine(rows, route), None, route.positions)


def import_torch() -> Any:
    import torch
    import torch.distributed

    return torch


def _check_peers(peers: Sequence[int], group_rank: int, size: int) -> list[int]:
    if not isinstance(peers, Sequence):
        check.fail("peers", "a sequence of ranks or None", type_name(peers), TypeError)
    found = [check.integer(f"peers[{i}]", peer, 0, size - 1) for i, peer in enumerate(peers)]
    if len({*found}) < len(found):
        check.fail("peers", "different ranks", found)
    if group_rank not in found:
        check.fail("peers", f"ranks with this one, {group_rank}, among them", found)
    return found


def _reorder_chunks(rows: Any, counts: list[int], order: list[int]) -> Any:
    """Split `rows` into chunks, chunk i with `counts[i]` rows, and concatenate the chunks in `order`."""
    if order == [*range(len(order))]:
        return rows
    chunks = rows.split(counts)
    return import_torch().cat([chunks[index] for index in order])


def _refuse_capture(name: str) -> None:
    cuda = import_torch().cuda
    # `is_current_stream_capturing` raises in a torch build without CUDA.
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        why = "it makes the host wait for the numbers of rows that travel; PushPrepareAndFinalize can be captured"
        raise RuntimeError(f"{name} must not run while a CUDA graph is captured: {why}")


def expert_ranks(expert_rank: Sequence[int] | None, num_experts: int, ranks: int) -> Any:
    """Check `expert_rank`. Return the rank of each expert, int64 [num_experts]."""
    if expert_rank is None:
        if num_experts % ranks:
            wanted = f"a multiple of the {ranks} ranks of the group, or expert_rank given"
            check.fail("num_experts", wanted, num_experts)
        return np.arange(num_experts, dtype=np.int64) // (num_experts // ranks)
    if len(expert_rank) != num_experts:
        check.fail("expert_rank", f"of {num_experts} ranks, one for each expert", len(expert_rank))
    rank_of_expert = np.array([check.integer(f"expert_rank[{i}]", r, 0, ranks - 1) for i, r in enumerate(expert_rank)])
    without = sorted({*range(ranks)} - {*rank_of_expert.tolist()})
    if without:
        check.fail("expert_rank", "of at least one expert on each rank", f"none on rank {without[0]}")
    return rank_of_expert.astype(np.int64)


def _check_expert_load(expert_load: Any, num_experts: int) -> None:
    torch = import_torch()
    if not isinstance(expert_load, torch.Tensor):
        check.fail("expert_load", "a torch tensor or None", type_name(expert_load), TypeError)
    check.dtype("expert_load", str(expert_load.dtype).removeprefix("torch."), ("int32",))
    check.shape("expert_load", tuple(expert_load.shape), (num_experts,), "[num_experts]")
