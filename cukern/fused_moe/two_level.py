"""Exchange tokens between hosts by `torch.distributed`, and within a host by memory stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cukern.formats.fused_moe import FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, Prepared
from cukern.fused_moe.nccl import NcclPrepareAndFinalize
from cukern.fused_moe.prepare_finalize import SeveralRanks
from cukern.fused_moe.push import PushPrepareAndFinalize
from cukern.fused_moe.topk_weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOp
from cukern.runtime import arrays, check
from cukern.runtime.describe import type_name


class TwoLevelPrepareAndFinalize(SeveralRanks):
    """Sends a token once to each host that has at least one of its experts, and from there to the experts' ranks.

    The local rank is the index of a rank on its host. `NcclPrepareAndFinalize` sends tokens between ranks with the same
    local rank. `PushPrepareAndFinalize` sends them to the experts' ranks on the host, and adds up these ranks' results
    in rank order. One row per host returns to the source rank, which adds the rows in host order. A CUDA graph cannot
    capture the call, because the host waits for the row counts.

    Args:
        group: a `torch.distributed.ProcessGroup` of the ranks that have this process's local rank, in host order; None:
            the default group.
        push: the exchange within this host. Its state has the experts of this host in ascending order. The `max_tokens`
            of the state is the number of hosts times `max_num_tokens`.
        num_experts, max_num_tokens, expert_load: as for `NcclPrepareAndFinalize`.
        expert_host: [num_experts], the host of each expert; every host has at least one.
        peers: the ranks of `group` that have this process's local rank, in host order; None: all ranks of `group`.

    Raises:
        TypeError, ValueError: invalid arguments.
        RuntimeError: `torch.distributed` has not been initialized.
    """

    def __init__(
        self,
        group: Any,
        push: PushPrepareAndFinalize,
        num_experts: int,
        *,
        expert_host: Sequence[int],
        max_num_tokens: int,
        expert_load: Any = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(push, PushPrepareAndFinalize):
            check.fail("push", "a PushPrepareAndFinalize", type_name(push), TypeError)
        self.inter_host = NcclPrepareAndFinalize(
            group, num_experts, max_num_tokens=max_num_tokens, expert_rank=expert_host, peers=peers
        )
        self.intra_host = push
        state, hosts = push.state, self.inter_host.ranks
        if state.num_experts != self.inter_host.num_local_experts:
            wanted = f"of a state with the {self.inter_host.num_local_experts} experts of this host"
            check.fail("push", wanted, state.num_experts)
        if state.max_tokens != hosts * max_num_tokens:
            wanted = f"of a state with max_tokens = {hosts} hosts * {max_num_tokens} (max_num_tokens)"
            check.fail("push", wanted, state.max_tokens)
        if push.expert_load is not None:
            check.fail("push", "without expert_load, which is an argument of its own here", "one with it")
        self.num_experts, self.num_local_experts = self.inter_host.num_experts, push.num_local_experts
        self.expert_load = expert_load
        self._host_experts = np.flatnonzero(np.asarray(expert_host) == self.inter_host.rank)
        self._device_arrays: dict[Any, tuple[Any, Any]] = {}
        self._received: tuple[Any, Any] | None = None

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return self.intra_host.activation_format

    def max_num_tokens_per_rank(self) -> int | None:
        return self.inter_host.max_num_tokens

    def num_dispatchers(self) -> int:
        return self.inter_host.ranks * self.intra_host.num_dispatchers()

    def sorts_tokens(self) -> bool:
        return self.intra_host.sorts_tokens()

    def expert_map(self, like: Any) -> Any:
        return self._on_device(like)[1]

    def _on_device(self, like: Any) -> tuple[Any, Any]:
        """Return the ids of this host's experts and the expert map, both on the device of `like`."""
        library = arrays.library_of(like)
        if library is None:
            check.fail("hidden_states", "a torch tensor", type_name(like), TypeError)
        key = library.name, library.device(like)
        if key not in self._device_arrays:
            full_map = np.full(self.num_experts, -1, np.int32)
            full_map[self._host_experts] = library.to_numpy(self.intra_host.expert_map(like))
            self._device_arrays[key] = library.from_numpy(self._host_experts, like), library.from_numpy(full_map, like)
        return self._device_arrays[key]

    def prepare_no_receive(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Callable[[], Prepared]:  # fmt: skip
        """Quantize the tokens, and send them to their experts' hosts and ranks.

        Takes the arguments of `NcclPrepareAndFinalize.prepare`. Returns a function with the result of
        `PushPrepareAndFinalize.prepare`, with ids among the experts of this host. Raises the errors of both methods.
        """
        self.intra_host.state.check()
        receive = self.inter_host.prepare_no_receive(
            a1, topk_weights, topk_ids, num_experts, None, apply_router_weight_on_input, quant_config
        )

        def send_within_host() -> Prepared:
            rows, scale, _, ids, weights = receive()
            # Convert ids among the experts of all hosts to ids among the experts of this host.
            host_ids = self.inter_host.expert_map(ids)[ids.clamp(min=0)].masked_fill(ids < 0, -1)
            self._received = weights, host_ids
            host_experts, full_map = self._on_device(ids)
            host_map = None if expert_map is None or expert_map is full_map else expert_map[host_experts]
            load = None
            if self.expert_load is not None:
                load = self.intra_host.expert_load = self.expert_load.new_zeros(len(host_experts))
            try:
                prepared = self.intra_host.send(rows, scale, weights, host_ids, host_map, quant_config)()
            finally:
                self.intra_host.expert_load = None
            if load is not None:
                self.expert_load.index_add_(0, host_experts, load)
            return prepared

        return send_within_host

    def finalize(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: TopKWeightAndReduce,
        expert_tokens_meta: ExpertTokensMetadata | None = None,
    ) -> None:  # fmt: skip
        """Add up the experts' weighted rows within the host, and send the sums to the source host.

        Raises:
            AllToAllError: an earlier call failed.
            RuntimeError: no `prepare` came before.
        """
        if self._received is None:
            raise RuntimeError(f"{type(self).__name__}.finalize must follow a prepare")
        weights, ids = self._received
        self._received = None
        rows = output.new_empty((len(ids), output.shape[1]))
        self.intra_host.finalize(
            rows, fused_expert_output, weights, ids, apply_router_weight_on_input, weight_and_reduce_impl,
            expert_tokens_meta,
        )  # fmt: skip
        self.inter_host.finalize(
            output, rows, topk_weights, topk_ids, apply_router_weight_on_input, TopKWeightAndReduceNoOp()
        )
