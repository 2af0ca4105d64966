"""Exchange tokens with the experts of other ranks by `torch.distributed`, which uses NCCL, or gloo for host memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.formats.fused_moe import FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEPrepareAndFinalize, Prepared
from cukern.fused_moe.prepare_finalize import quantize_input, weigh_input
from cukern.fused_moe.topk_weight_and_reduce import (
    DELEGATES,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOp,
)
from cukern.ops.moe_permute import moe_sort, moe_unpermute, permute_rows
from cukern.runtime import arrays, check
from cukern.runtime.describe import type_name

_ALIGNMENT = 16  # each array that is packed into a sent row starts at a multiple of this many bytes


class Route(NamedTuple):
    """Which rows one dispatch sent to which ranks. `RowExchange.combine` sends the results back along the same route.

    Attributes:
        positions: int32 [tokens, ranks]. `positions[t, r]` is the index, among all sent rows, of the row that sends
            token t to rank r; -1 if the token is not sent to that rank. Sent rows are sorted by rank, then by token.
        sent, received: the number of rows sent to each rank, and received from each rank.
    """

    positions: Any
    sent: list[int]
    received: list[int]


class RowExchange:
    """Sends rows to the ranks of a process group and back, with `all_to_all_single`, on any number of hosts.

    Rows of any dtype are sent as bytes. CUDA tensors use the group's backend for CUDA, such as NCCL. With gloo, CUDA
    tensors are copied to host memory and back.

    `peers` divides the group into sets of ranks that exchange rows only among themselves. A set does not need a process
    group, but all ranks of the whole group must make the same calls in the same order.

    Args:
        group: a `torch.distributed.ProcessGroup` that contains this process; None: the default group.
        peers: the ranks of the group that exchange rows with this rank, including this rank, in the same order on every
            peer; None: all ranks, in their order.

    Attributes:
        rank, ranks: the index of this process among the peers, and the number of peers.

    Raises:
        TypeError: a group of another type.
        RuntimeError: `torch.distributed` has not been initialized.
        ValueError: `group` or `peers` does not contain this process, or `peers` are not distinct ranks of the group.
    """

    def __init__(self, group: Any = None, peers: Sequence[int] | None = None) -> None:
        distributed = _torch().distributed
        if not distributed.is_available() or not distributed.is_initialized():
            raise RuntimeError("torch.distributed must be initialized (init_process_group) before its groups are used")
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            check.fail("group", "a group that this process is in", "NON_GROUP_MEMBER")
        if group is not None and not isinstance(group, distributed.ProcessGroup):
            check.fail("group", "a torch.distributed.ProcessGroup or None", type_name(group), TypeError)
        self.group = group
        own, self._size = distributed.get_rank(group), distributed.get_world_size(group)
        self._peers = [*range(self._size)] if peers is None else _check_peers(peers, own, self._size)
        # `torch.distributed` orders rows by the ranks of the group. `_order` lists the indices of the peers in that
        # order.
        self._order = sorted(range(len(self._peers)), key=self._peers.__getitem__)
        self.rank, self.ranks = self._peers.index(own), len(self._peers)
        of_each = (part.split(":", 1) for part in distributed.get_backend_config(group).split(","))
        self._backends: dict[str, str] = dict(of_each)

    def expect(self, name: str, array: Any) -> None:
        """Check that the argument `name` is a tensor on a device that one of the group's backends supports."""
        torch = _torch()
        if not isinstance(array, torch.Tensor):
            check.fail(name, "a torch tensor, since torch.distributed moves it", type_name(array), TypeError)
        kind = array.device.type
        if kind not in self._backends:
            able = " or ".join(self._backends)
            check.fail(name, f"a {able} tensor, for which the group has a backend", f"one of {kind}")

    def dispatch(
        self, rows: Any, destinations: Any, agreed: Mapping[str, int] | None = None
    ) -> tuple[Callable[[], Any], Route]:
        """Send each row once to each of its destination ranks. Every rank of the group must call this.

        The host waits until it knows how many rows it sends and receives, so a CUDA graph cannot capture the call. If a
        rank never calls this, the other ranks raise after the group's timeout.

        Args:
            rows: [tokens, columns] of any dtype, contiguous; columns and dtype are the same on all ranks.
            destinations: bool [tokens, ranks], on the device of `rows`; the ranks are the peers, in their order.
            agreed: integers that must be the same on all ranks, keyed by their names in the error message.

        Returns:
            A pair: a function that waits for the rows and returns them, and the route of the rows. The received rows
            are [received, columns], sorted by source rank, then by token.

        Raises:
            TypeError: an unsupported dtype or library.
            ValueError: shapes or devices that do not match; the message names the argument.
            RuntimeError: a CUDA graph is being captured; or a value in `agreed` differs between ranks, and then all
                ranks raise.
        """
        torch = _torch()
        _refuse_capture("RowExchange.dispatch")
        self.expect("rows", rows)
        self.expect("destinations", destinations)
        check.dimensions("rows", tuple(rows.shape), ("tokens", "columns"))
        check.shape("destinations", tuple(destinations.shape), (len(rows), self.ranks), "[tokens, ranks]")
        if destinations.dtype is not torch.bool:
            check.fail("destinations", "bool", destinations.dtype, TypeError)
        # Sort the pairs (token, rank) by rank with `moe_sort`, which usually sorts pairs (token, slot) by expert.
        each = torch.arange(self.ranks, dtype=torch.int32, device=rows.device)
        offsets, _, positions = moe_sort(torch.where(destinations, each, -1), self.ranks)
        sizes = {**(agreed or {}), "the bytes of a row": rows.shape[1] * rows.element_size()}
        sent, received = self._counts(offsets.diff(), sizes)
        sorted_rows = permute_rows(rows, positions, sum(sent))
        return self._move(sorted_rows, sent, received), Route(positions, sent, received)

    def combine(self, rows: Any, route: Route) -> Any:
        """Send one result row back for each received row. Every rank of the group must call this.

        Args:
            rows: [received, columns], in the order of the rows received; any dtype, contiguous.
            route: the route that the dispatch returned.

        Returns:
            [sent, columns]: the results, in the order of the rows that the dispatch sent. Row `route.positions[t, r]`
            is the result of rank r for token t.
        """
        self.expect("rows", rows)
        check.dimensions("rows", tuple(rows.shape), ("received", "columns"))
        wanted = (sum(route.received), rows.shape[1])
        check.shape("rows", tuple(rows.shape), wanted, "[received, columns]")
        return self._move(rows, route.received, route.sent)()

    def _counts(self, sent: Any, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Exchange the numbers of rows, and check that `sizes` are the same on all ranks.

        Return the number of rows sent to each rank, and the number of rows received from each rank.
        """
        torch = _torch()
        own = torch.tensor([list(sizes.values())], dtype=torch.int64, device=sent.device)
        table = torch.cat([sent.to(torch.int64)[:, None], own.expand(self.ranks, -1)], 1)
        # Copy both tables to the host in one transfer.
        one_each = [1] * self.ranks
        both = torch.cat([table, self._move(table, one_each, one_each)()], 1).tolist()
        width = 1 + len(sizes)
        for rank, row in enumerate(both):
            for (name, mine), theirs in zip(sizes.items(), row[width + 1 :], strict=True):
                if mine != theirs:
                    where = f"{mine} on rank {self._peers[self.rank]} and {theirs} on rank {self._peers[rank]}"
                    raise RuntimeError(f"{name} must be the same on all ranks of the group, got {where}")
        return [row[0] for row in both], [row[width] for row in both]

    def _move(self, rows: Any, sent: list[int], received: list[int]) -> Callable[[], Any]:
        """Start to send `sent[i]` rows to peer i, and to receive `received[i]` rows from it.

        Return a function that waits for the received rows and returns them.
        """
        torch = _torch()
        by_host = rows.is_cuda and self._backends["cuda"] == "gloo"
        # torch calls a single column contiguous even if its stride is not 1, but `view(uint8)` rejects such a tensor.
        is_plain = rows.is_contiguous() and rows.stride(1) == 1
        source = (rows if is_plain else rows.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
        source = _reordered(source.cpu() if by_host else source, sent, self._order)
        target = torch.empty((sum(received), source.shape[1]), dtype=torch.uint8, device=source.device)
        splits = self._of_group(received), self._of_group(sent)
        work = torch.distributed.all_to_all_single(target, source, *splits, group=self.group, async_op=True)

        def receive() -> Any:
            work.wait()
            places = sorted(range(self.ranks), key=self._order.__getitem__)
            by_peer = _reordered(target, [received[peer] for peer in self._order], places)
            return by_peer.to(rows.device).view(rows.dtype)

        return receive

    def _of_group(self, counts: list[int]) -> list[int]:
        """Convert row counts per peer to row counts per rank of the group. Ranks that are not peers get 0."""
        found = [0] * self._size
        for peer, count in zip(self._peers, counts, strict=True):
            found[peer] = count
        return found


class _Layout(NamedTuple):
    """The layout of a sent row, which packs one row of several tensors: first byte, bytes and dtype of each tensor."""

    parts: list[tuple[int, int, Any]]
    width: int

    @classmethod
    def of(cls, parts: Sequence[Any]) -> _Layout:
        """Return the layout of a row that contains one row of each of these tensors [tokens, columns]."""
        start, found = 0, []
        for part in parts:
            size = part.shape[1] * part.element_size()
            found.append((start, size, part.dtype))
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(found, start)

    def pack(self, parts: Sequence[Any]) -> Any:
        """Pack the tensors into rows of bytes, uint8 [tokens, width]."""
        torch = _torch()
        rows = torch.empty((len(parts[0]), self.width), dtype=torch.uint8, device=parts[0].device)
        for part, (start, size, _) in zip(parts, self.parts, strict=True):
            rows[:, start : start + size].view(part.dtype).copy_(part)
        return rows

    def unpack(self, rows: Any) -> list[Any]:
        """Return the tensors that the rows contain. Each is contiguous."""
        return [rows[:, start : start + size].contiguous().view(dtype) for start, size, dtype in self.parts]


class _Received(NamedTuple):
    """The data from `prepare` that `finalize` needs: the route, and the weights and ids of the received tokens."""

    route: Route
    topk_weights: Any
    topk_ids: Any


class NcclPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Sends tokens in the standard format to the ranks of their experts with `all_to_all_single`.

    The ranks may be on any number of hosts. A token is sent once to each rank that has at least one of its experts. One
    message contains the token's quantized activations with their scales, and the token's ids and weights. The receiving
    rank multiplies the results of its experts by the weights, adds them up, and sends one row back in the layer's
    dtype. The source rank adds these rows in float32 in rank order, and rounds once. So the bits of a result depend
    only on which ranks have which experts.

    All ranks of the group must call the layer, also ranks without tokens. The number of tokens may differ between ranks
    and calls. In `prepare` the host waits for the numbers of rows, so a CUDA graph cannot capture the layer;
    `PushPrepareAndFinalize` can be captured. If a rank never calls the layer, the other ranks wait until the group's
    timeout. Only one call may be in flight: `finalize` refers to the last `prepare`.

    Tensors on a GPU need an NCCL group, tensors in host memory a gloo group.

    Args:
        group: a `torch.distributed.ProcessGroup` that contains this process; None: the default group.
        num_experts: the number of experts of all ranks.
        max_num_tokens: maximum tokens of a call on this rank; None: any number.
        expert_rank: [num_experts], the rank that has each expert: a rank of the group or, with `peers`, an index in
            `peers`. None: num_experts / ranks experts per rank, in order. w1 and w2 contain the experts of a rank in
            ascending order.
        expert_load: int32 [num_experts]. Each `prepare` adds to `expert_load[e]` the number of pairs (token, slot) that
            arrived for expert e, for each expert of this rank. None: nothing is counted.
        peers: the ranks of the group that have the experts, as for `RowExchange`; None: all.

    Attributes:
        rank, ranks: the index of this process among the ranks with experts, and the number of these ranks.
        num_experts, num_local_experts: the number of experts of all ranks, and of this rank.

    Raises:
        TypeError: an argument of another type.
        ValueError: arguments that do not match; the message names the argument.
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
            _check_load(expert_load, self.num_experts)
        self._map = np.where(here, here.cumsum() - 1, -1).astype(np.int32)
        self._by_device: dict[tuple[str, Any, str], Any] = {}
        self._known_map: tuple[Any, int] | None = None
        self._received: _Received | None = None

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> str | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return self.max_num_tokens

    def num_dispatchers(self) -> int:
        return self.ranks

    def expert_map(self, like: Any) -> Any:
        """Return the local index of each expert, -1 for experts of other ranks.

        The result is int32 [num_experts], in the library and on the device of `like`.
        """
        return self._constant("expert_map", self._map, like)

    def _constant(self, name: str, values: Any, like: Any) -> Any:
        """Return `values` as an array in the library and on the device of `like`. The copy is cached per device."""
        library = arrays.library_of(like)
        if library is None:
            check.fail("hidden_states", "a torch tensor", type_name(like), TypeError)
        key = (library.name, library.device(like), name)
        if key not in self._by_device:
            self._by_device[key] = library.from_numpy(values, like)
        return self._by_device[key]

    def prepare(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> Prepared:
        """Quantize the tokens and send them to their experts' ranks. The host waits for the numbers of rows.

        Args:
            a1, topk_weights, topk_ids: torch tensors, as for the base class. An id that is not the id of an expert is
                not sent.
            num_experts: the `num_experts` of the class.
            expert_map: None, or a map with the same experts on this rank as `expert_map()`. The local indices may
                differ.
            apply_router_weight_on_input: multiply the tokens by their weights before they are sent.
            quant_config: the same on all ranks, except for the weights' scales. FP8 scales are per token, in blocks or
                static (`a1_scale`, the same on all ranks).

        Returns:
            The received tokens, sorted by source rank, with their scales, weights and ids. The ids are indices among
            the experts of all ranks.

        Raises:
            TypeError: an unsupported dtype or library.
            ValueError: invalid arguments; the message names the argument.
            RuntimeError: a CUDA graph is being captured; or the ranks disagree on the layer, and then all ranks raise.
        """
        return self.prepare_no_receive(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config
        )()

    def has_prepare_no_receive(self) -> bool:
        return True

    def prepare_no_receive(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> Callable[[], Prepared]:
        """Send the tokens. Return a function that waits for the received tokens and returns the result of `prepare`.

        The host waits until it knows how many rows arrive, but it does not wait for the rows.
        """
        _refuse_capture(type(self).__name__)
        self._check(a1, topk_weights, topk_ids, num_experts, expert_map, quant_config)
        torch = _torch()
        ids, destinations = self._destinations(topk_ids)
        x = weigh_input(a1, topk_weights) if apply_router_weight_on_input else a1
        a1q, scale = quantize_input(x, quant_config)
        is_static = quant_config.a1_scale is not None
        parts = [a1q, ids, topk_weights, *([] if scale is None or is_static else [scale])]
        layout = _Layout.of(parts)
        form = f"{a1.dtype} {quant_config.name} {is_static} {bool(apply_router_weight_on_input)}"
        agreed = {
            "num_experts": self.num_experts,
            "expert_rank (as a checksum)": zlib.crc32(self.expert_rank.tobytes()),
            "hidden_states' hidden size": a1.shape[1],
            "topk_ids' topk": topk_ids.shape[1],
            "the dtype and quantization (as a checksum)": zlib.crc32(form.encode()),
        }
        receive_rows, route = self.exchange.dispatch(layout.pack(parts), destinations, agreed)

        def receive() -> Prepared:
            own, own_ids, own_weights, *own_scale = layout.unpack(receive_rows())
            self._received = _Received(route, own_weights, own_ids)
            if self.expert_load is not None:
                here = self.expert_map(own)[own_ids.clamp(min=0)] >= 0
                counted = here.logical_and_(own_ids >= 0).to(torch.int32)
                self.expert_load.scatter_add_(0, own_ids.clamp(min=0).flatten().to(torch.int64), counted.flatten())
            a1_scale = own_scale[0] if own_scale else None
            if is_static:
                a1_scale = quant_config.a1_scale.reshape(1)
            return Prepared(own, a1_scale, None, own_ids, own_weights)

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
        """Check the arguments of `prepare` before anything is sent."""
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
        if quant_config.name == "fp8" and not quant_config.per_act_token_quant and quant_config.a1_scale is None:
            wanted_scale = (
                "a1_scale given, or a scale per token (per_act_token_quant): each rank would find another one"
            )
            check.fail("quant_config", wanted_scale, "a scale per tensor that is found at each call")
        if self.expert_load is not None and self.expert_load.device != a1.device:
            check.fail("expert_load", f"on {a1.device} like hidden_states", f"one on {self.expert_load.device}")

    def _check_map(self, expert_map: Any, a1: Any) -> None:
        """Check that `expert_map` has the same experts on this rank as `expert_rank`. A map is checked only once."""
        own = self.expert_map(a1)
        if expert_map is None or expert_map is own:
            return
        self.exchange.expect("expert_map", expert_map)
        check.shape("expert_map", tuple(expert_map.shape), (self.num_experts,), "[num_experts]")
        version = expert_map._version
        if self._known_map is not None and self._known_map[0] is expert_map and self._known_map[1] == version:
            return
        if not _torch().equal(expert_map >= 0, own >= 0):
            check.fail("expert_map", f"one with the experts of rank {self.rank} (expert_rank)", "one with others")
        self._known_map = (expert_map, version)

    def _destinations(self, topk_ids: Any) -> tuple[Any, Any]:
        """Return the ids as int32 (-1 if an id is not the id of an expert) and the destination ranks of each token.

        The destinations are bool [tokens, ranks].
        """
        torch = _torch()
        ids = topk_ids.to(torch.int64)
        ids = torch.where((ids >= 0) & (ids < self.num_experts), ids, -1)
        # Assign ids without an expert to an extra rank after the last one. The column of that rank is removed below.
        ranks = self._constant("expert_rank", np.append(self.expert_rank, self.ranks), topk_ids)[ids]
        destinations = torch.zeros((len(ids), self.ranks + 1), dtype=torch.bool, device=ids.device)
        destinations.scatter_(1, ranks, True)
        return ids.to(torch.int32), destinations[:, : self.ranks]

    def finalize(
        self,
        output: Any,
        fused_expert_output: Any,
        topk_weights: Any,
        topk_ids: Any,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
        expert_tokens_meta: ExpertTokensMetadata | None = None,
    ) -> None:
        """Send the results back and add them up.

        Args:
            output: [tokens, hidden], written, for the tokens of the last `prepare`.
            fused_expert_output: the experts' output for the received tokens. With `TopKWeightAndReduceNoOp` it is
                [received, hidden], the weighted sum over each token's experts. Otherwise it is the input of the
                reduction.
            weight_and_reduce_impl: the reduction of the experts' output. It uses the received ids and weights.
            topk_weights, topk_ids, apply_router_weight_on_input, expert_tokens_meta: the same as for `prepare`.

        Raises:
            RuntimeError: no `prepare` came before.
            ValueError: shapes that do not match; the message names the argument.
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


def _torch() -> Any:
    """Import torch only when it is needed, because the rest of cukern works without it."""
    import torch
    import torch.distributed

    return torch


def _check_peers(peers: Sequence[int], own: int, size: int) -> list[int]:
    """Check that `peers` are distinct ranks of a group of `size` ranks, and contain this rank `own`."""
    if not isinstance(peers, Sequence):
        check.fail("peers", "a sequence of ranks or None", type_name(peers), TypeError)
    found = [check.integer(f"peers[{i}]", peer, 0, size - 1) for i, peer in enumerate(peers)]
    if len({*found}) < len(found):
        check.fail("peers", "different ranks", found)
    if own not in found:
        check.fail("peers", f"ranks with this one, {own}, among them", found)
    return found


def _reordered(rows: Any, counts: list[int], order: list[int]) -> Any:
    """Split rows into chunks of `counts` rows, and concatenate the chunks in the given order."""
    if order == [*range(len(order))]:
        return rows
    parts = rows.split(counts)
    return _torch().cat([parts[place] for place in order])


def _refuse_capture(name: str) -> None:
    cuda = _torch().cuda
    # Check `is_initialized` first, because `is_current_stream_capturing` raises in a torch build without CUDA.
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        why = "it makes the host wait for the numbers of rows that travel; PushPrepareAndFinalize can be captured"
        raise RuntimeError(f"{name} must not run while a CUDA graph is captured: {why}")


def expert_ranks(expert_rank: Sequence[int] | None, num_experts: int, ranks: int) -> Any:
    """Check `expert_rank`, and return the rank of each expert, int64 [num_experts]."""
    if expert_rank is None:
        if num_experts % ranks:
            wanted = f"a multiple of the {ranks} ranks of the group, or expert_rank given"
            check.fail("num_experts", wanted, num_experts)
        return np.arange(num_experts, dtype=np.int64) // (num_experts // ranks)
    if len(expert_rank) != num_experts:
        check.fail("expert_rank", f"of {num_experts} ranks, one for each expert", len(expert_rank))
    of_each = np.array([check.integer(f"expert_rank[{i}]", r, 0, ranks - 1) for i, r in enumerate(expert_rank)])
    without = sorted({*range(ranks)} - {*of_each.tolist()})
    if without:
        check.fail("expert_rank", "of at least one expert on each rank", f"none on rank {without[0]}")
    return of_each.astype(np.int64)


def _check_load(expert_load: Any, num_experts: int) -> None:
    torch = _torch()
    if not isinstance(expert_load, torch.Tensor):
        check.fail("expert_load", "a torch tensor or None", type_name(expert_load), TypeError)
    check.dtype("expert_load", str(expert_load.dtype).removeprefix("torch."), ("int32",))
    check.shape("expert_load", tuple(expert_load.shape), (num_experts,), "[num_experts]")
