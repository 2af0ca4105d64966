"""Exchange tokens between several hosts: by `torch.distributed` between hosts, and by memory stores within a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cukern.formats.fused_moe import FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEPrepareAndFinalize, Prepared
from cukern.fused_moe.nccl import NcclPrepareAndFinalize
from cukern.fused_moe.push import PushPrepareAndFinalize
from cukern.fused_moe.topk_weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOp
from cukern.runtime import arrays, check
from cukern.runtime.describe import type_name


class TwoLevelPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Sends a token once to each host that has at least one of its experts, and from there to the experts' ranks.

    The local rank is the index of a rank on its host. Level 1 (`NcclPrepareAndFinalize`) sends tokens between hosts,
    from each rank to the ranks with the same local rank. Level 2 (`PushPrepareAndFinalize`) sends the received tokens
    to the experts' ranks on the same host. The results return along the same route. Level 2 adds up the results of the
    host's ranks in rank order. One row per host then returns to the source rank, which adds the rows in host order. The
    CPU waits until it knows the numbers of rows, so a CUDA graph cannot capture the call.

    Args:
        group: a `torch.distributed.ProcessGroup` of the ranks with this local rank, in host order; with `peers`, any
            group that contains these ranks. None: the default group.
        push: the exchange within this host. The experts of its state are the experts of this host, in ascending order.
            The state's `max_tokens` is the number of hosts times `max_num_tokens`. `push` has no `expert_load`.
        num_experts: the number of experts of all hosts.
        expert_host: [num_experts], the host of each expert; every host has at least one.
        max_num_tokens: maximum tokens of a call on this rank.
        expert_load: int32 tensor [num_experts]. Each `prepare` adds to `expert_load[e]` the number of pairs (token,
            slot) that arrived for expert e, for each expert of this rank.
        peers: the ranks of the group with this local rank, in host order; None: all ranks, in their order.

    Raises:
        TypeError, ValueError: invalid arguments; the message names the argument.
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
        self.between = NcclPrepareAndFinalize(
            group, num_experts, max_num_tokens=max_num_tokens, expert_rank=expert_host, peers=peers
        )
        self.within = push
        state, hosts = push.state, self.between.ranks
        if state.num_experts != self.between.num_local_experts:
            wanted = f"of a state with the {self.between.num_local_experts} experts of this host"
            check.fail("push", wanted, state.num_experts)
        if state.max_tokens != hosts * max_num_tokens:
            wanted = f"of a state with max_tokens = {hosts} hosts * {max_num_tokens} (max_num_tokens)"
            check.fail("push", wanted, state.max_tokens)
        if push.expert_load is not None:
            check.fail("push", "without expert_load, which is an argument of its own here", "one with it")
        self.num_experts, self.num_local_experts = self.between.num_experts, push.num_local_experts
        self.expert_load = expert_load
        self._numbers = np.flatnonzero(np.asarray(expert_host) == self.between.rank)
        self._by_device: dict[Any, tuple[Any, Any]] = {}
        self._received: tuple[Any, Any] | None = None

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return self.within.activation_format

    def topk_indices_dtype(self) -> str | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return self.between.max_num_tokens

    def num_dispatchers(self) -> int:
        return self.between.ranks * self.within.num_dispatchers()

    def sorts_tokens(self) -> bool:
        return self.within.sorts_tokens()

    def expert_map(self, like: Any) -> Any:
        """Return the local index of each expert, -1 for experts of other ranks.

        The result is int32 [num_experts], in the library and on the device of `like`.
        """
        return self._of_device(like)[1]

    def _of_device(self, like: Any) -> tuple[Any, Any]:
        """Return the ids of this host's experts, int64, and the expert map, both on the device of `like`."""
        library = arrays.library_of(like)
        if library is None:
            check.fail("hidden_states", "a torch tensor", type_name(like), TypeError)
        key = library.name, library.device(like)
        if key not in self._by_device:
            whole = np.full(self.num_experts, -1, np.int32)
            whole[self._numbers] = library.to_numpy(self.within.expert_map(like))
            self._by_device[key] = library.from_numpy(self._numbers, like), library.from_numpy(whole, like)
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
        """Quantize the tokens, send them to their experts' hosts, and on each host to the experts' ranks.

        The arguments are the same as for `NcclPrepareAndFinalize.prepare`. The result has the same form as the result
        of `PushPrepareAndFinalize.prepare`, for the experts of this host.

        Raises:
            AllToAllError: an earlier call failed.
            TypeError, ValueError: invalid arguments; the message names the argument.
            RuntimeError: a CUDA graph is being captured; or the ranks disagree on the layer.
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
        """Send the tokens to their experts' hosts. Return a function that runs the rest of `prepare`."""
        self.within.state.check()
        receive = self.between.prepare_no_receive(
            a1, topk_weights, topk_ids, num_experts, None, apply_router_weight_on_input, quant_config
        )

        def onward() -> Prepared:
            rows, scale, _, ids, weights = receive()
            # Convert the ids from indices among all experts to indices among the experts of this host.
            own = self.between.expert_map(ids)[ids.clamp(min=0)].masked_fill(ids < 0, -1)
            self._received = weights, own
            numbers, whole = self._of_device(ids)
            within_map = None if expert_map is None or expert_map is whole else expert_map[numbers]
            load = None
            if self.expert_load is not None:
                load = self.within.expert_load = self.expert_load.new_zeros(len(numbers))
            try:
                prepared = self.within.send(rows, scale, weights, own, within_map, quant_config)()
            finally:
                self.within.expert_load = None
            if load is not None:
                self.expert_load.index_add_(0, numbers, load)
            return prepared

        return onward

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
        """Apply the router's weights, add up the experts' rows within the host, and send the sums to the source host.

        The arguments are the same as for `PushPrepareAndFinalize.finalize`.

        Raises:
            AllToAllError: an earlier call failed.
            RuntimeError: no `prepare` came before.
            TypeError, ValueError: invalid arguments; the message names the argument.
        """
        if self._received is None:
            raise RuntimeError(f"{type(self).__name__}.finalize must follow a prepare")
        weights, ids = self._received
        self._received = None
        rows = output.new_empty((len(ids), output.shape[1]))
        self.within.finalize(
            rows, fused_expert_output, weights, ids, apply_router_weight_on_input, weight_and_reduce_impl,
            expert_tokens_meta,
        )  # fmt: skip
        self.between.finalize(
            output, rows, topk_weights, topk_ids, apply_router_weight_on_input, TopKWeightAndReduceNoOp()
        )
