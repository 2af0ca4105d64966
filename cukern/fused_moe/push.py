"""Exchange tokens with other ranks by kernels that store into the memory of these ranks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cukern.formats.fused_moe import GROUP, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.buffers import dtype_of
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, Prepared, SortedTokens
from cukern.fused_moe.prepare_finalize import SeveralRanks, quantize_input, refuse_per_call_tensor_scale, weigh_input
from cukern.fused_moe.topk_weight_and_reduce import TopKWeightAndReduce
from cukern.ops.all_to_all import AllToAllError, AllToAllState, all_to_all_combine, all_to_all_dispatch
from cukern.ops.moe_permute import moe_sort, moe_sort_batched, permute_rows
from cukern.runtime import arrays, check
from cukern.runtime.cuda import current_device
from cukern.runtime.describe import type_name


class Turns:
    """A barrier on the host between sending and receiving. Ranks that share a GPU need it, each in its own thread.

    Kernels on one stream run one after the other, so the kernel that waits for a rank must be launched after the
    sending kernel of that rank.
    """

    def __init__(self, ranks: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._arrived = [0] * ranks
        self._gave_up: int | None = None
        self._changed = threading.Condition()

    def wait(self, rank: int, phase: str) -> None:
        """Wait until all ranks have sent. Raises AllToAllError after the deadline."""
        with self._changed:
            step = self._arrived[rank]
            self._arrived[rank] += 1
            self._changed.notify_all()
            end = time.monotonic() + self.deadline_s
            while self._gave_up is None and self._missing(step) is not None:
                if not self._changed.wait(end - time.monotonic()):
                    break
            missing, gave_up = self._missing(step), self._gave_up
        if missing is None:
            return
        why = f"rank {missing} did not send within {self.deadline_s:g} s: each rank takes a thread of its own"
        if gave_up is not None:
            missing, why = gave_up, f"rank {gave_up} gave up"
        # Each layer waits here twice (for dispatch and for combine), so `step // 2` counts layers.
        raise AllToAllError(f"{phase} {step // 2} of rank {rank} failed: {why}", missing, phase, step // 2)

    def _missing(self, step: int) -> int | None:
        return next((rank for rank, count in enumerate(self._arrived) if count <= step), None)

    def abort(self, rank: int) -> None:
        """Make all current and later waits raise an error that names `rank` as the cause."""
        with self._changed:
            if self._gave_up is None:
                self._gave_up = rank
            self._changed.notify_all()


class PushPrepareAndFinalize(SeveralRanks):
    """Stores tokens into the memory of their experts' ranks over NVLink (`all_to_all_dispatch`).

    A token is sent once to each rank that has at least one of its experts. The host never waits, so a CUDA graph can
    capture the layer. `all_to_all_combine` adds up the weighted rows in float32, first on each rank, then over the
    ranks in rank order. So the bits of a result do not depend on the order of arrival.

    All ranks must call their layers in the same order. The number of tokens may differ between ranks. Layers that run
    one after the other may share a state.

    Args:
        state: the buffers of this rank, and the addresses of the other ranks' buffers.
        batched: group the tokens by expert into [local experts, max_tokens_per_expert, hidden]. The tokens of an expert
            are sorted by source rank, then by token.
        max_tokens_per_expert: the number of rows per expert; None: enough rows for the tokens of all ranks. The results
            of excess tokens are NaN, and the next call or `state.check()` raises AllToAllError.
        apart: send back each expert's row instead of one sum per rank. The bits then do not depend on the number of
            ranks, but up to topk times as many bytes are sent. `state` must have been made with `apart`.
        expert_load: int32 [num_experts]. For each expert of this rank, `prepare` adds the number of pairs (token, slot)
            that arrived.
        turns: the barrier for ranks that share a GPU; `All2AllManager.local` sets it.

    Raises:
        TypeError, ValueError: invalid arguments.
    """

    def __init__(
        self,
        state: AllToAllState,
        *,
        batched: bool = False,
        max_tokens_per_expert: int | None = None,
        apart: bool = False,
        expert_load: Any = None,
        turns: Turns | None = None,
    ) -> None:
        if not isinstance(state, AllToAllState):
            check.fail("state", "an AllToAllState", type_name(state), TypeError)
        self.state, self.batched = state, bool(batched)
        self.max_received = state.ranks * state.max_tokens
        self.rows_per_expert = self.max_received
        if max_tokens_per_expert is not None:
            if not batched:
                check.fail("max_tokens_per_expert", "None unless batched", max_tokens_per_expert)
            name, most = "max_tokens_per_expert", "the tokens of all ranks"
            self.rows_per_expert = check.integer(name, max_tokens_per_expert, 1, self.max_received, most)
        if apart and not state.link.sizes.apart:
            check.fail("apart", "False for a state that was made without apart", True)
        self.apart, self.expert_load, self.turns = bool(apart), expert_load, turns
        self.num_local_experts: int = state.num_local_experts
        self._is_rehearsal = False

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts if self.batched else FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return self.state.max_tokens

    def num_dispatchers(self) -> int:
        return self.state.ranks

    def sorts_tokens(self) -> bool:
        return not self.batched

    def expert_map(self, like: Any) -> Any:
        return self.state.expert_map(like)

    def prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Prepared:  # fmt: skip
        """Quantize the tokens, send them to their experts' ranks, and sort the received tokens by expert.

        If `expert_map` lacks an expert of this rank, the result is NaN.

        Returns:
            The received tokens, and their ids and weights [ranks * max_tokens, topk]. A row without a token has the ids
            -1. In the standard format the tokens are [ranks * max_tokens, hidden], sorted by source rank, then by
            token. A row whose token has no expert on this rank is undefined.

        Raises:
            AllToAllError: an earlier call failed.
            TypeError, ValueError: invalid arguments.
        """
        arguments = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config)
        return self._prepare(*arguments, return_receiver=self.turns is not None)()

    def prepare_no_receive(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig,
    ) -> Callable[[], Prepared]:  # fmt: skip
        arguments = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config)
        return self._prepare(*arguments, return_receiver=True)

    def _prepare(
        self, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: int, expert_map: Any,
        apply_router_weight_on_input: bool, quant_config: FusedMoEQuantConfig, *, return_receiver: bool,
    ) -> Callable[[], Prepared]:  # fmt: skip
        if num_experts != self.state.num_experts:
            wanted = f"{self.state.num_experts}, the experts of all ranks (num_experts of the state)"
            check.fail("global_num_experts", wanted, num_experts)
        refuse_per_call_tensor_scale(quant_config)
        if apply_router_weight_on_input:
            a1 = weigh_input(a1, topk_weights)
        scale, in_blocks = None, quant_config.is_in_groups
        if not in_blocks:
            a1, scale = quantize_input(a1, quant_config)
        return self.send(
            a1, scale, topk_weights, topk_ids, expert_map, quant_config, in_blocks, return_receiver=return_receiver
        )

    def send(
        self,
        rows: Any,
        scale: Any,
        topk_weights: Any,
        topk_ids: Any,
        expert_map: Any,
        quant_config: FusedMoEQuantConfig,
        quantize: bool = False,
        *,
        return_receiver: bool = True,
    ) -> Callable[[], Prepared]:
        """Send `rows` with their `scale`. If `quantize`, the dispatch kernel computes a scale per GROUP elements.

        Return a function that arranges the received rows by expert. With `return_receiver`, that function also launches
        the receiving kernel. Otherwise the sending kernel also receives the rows.
        """
        scales = None if quant_config.a1_scale is not None else scale
        if self._is_rehearsal:
            columns = scales.shape[1] if scales is not None else self.state.hidden // GROUP if quantize else 0
            empty = self._empty_dispatch(rows, "float8_e4m3fn" if quantize else dtype_of(rows), columns)
            return lambda: self._arrange(empty, expert_map, quant_config)
        options = {} if self.expert_load is None else {"expert_load": self.expert_load}
        received = all_to_all_dispatch(
            self.state, rows, topk_weights, topk_ids, scales=scales, quantize=quantize,
            return_receiver=return_receiver, **options,
        )  # fmt: skip

        def receive() -> Prepared:
            self._wait_for_senders("dispatch")
            return self._arrange(received() if return_receiver else received, expert_map, quant_config)

        return receive

    def _wait_for_senders(self, phase: str) -> None:
        if self.turns is None:
            return
        try:
            self.turns.wait(self.state.rank, phase)
        except AllToAllError:
            self.state.abort()
            raise

    def _arrange(self, dispatched: Any, expert_map: Any, quant_config: FusedMoEQuantConfig) -> Prepared:
        """Sort the received rows by expert. If `batched`, copy the rows of each expert into one group."""
        rows, scales, weights, ids = dispatched
        count, experts = self.state.num_experts, self.num_local_experts
        if expert_map is None:
            expert_map = self.expert_map(rows)
        options = {"expert_map": expert_map, "num_local_experts": experts}
        if not self.batched:
            meta = ExpertTokensMetadata(sorted=SortedTokens(*moe_sort(ids, count, **options)))
        else:
            counts, positions = moe_sort_batched(ids, count, self.rows_per_expert, **options)
            meta = ExpertTokensMetadata(counts, positions)
            shape = (experts, self.rows_per_expert)
            # Received rows without a token are not in `positions`, so `permute_rows` does not read them.
            rows = permute_rows(rows, positions, experts * self.rows_per_expert).reshape(*shape, self.state.hidden)
            if scales is not None:
                columns = (scales.shape[1],) if quant_config.block_shape else ()
                scales = permute_rows(scales, positions, experts * self.rows_per_expert).reshape(*shape, *columns)
        if quant_config.a1_scale is not None:
            scales = quant_config.a1_scale.reshape(1)
        return Prepared(rows, scales, meta, ids, weights)

    def finalize(
        self, output: Any, fused_expert_output: Any, topk_weights: Any, topk_ids: Any,
        apply_router_weight_on_input: bool, weight_and_reduce_impl: TopKWeightAndReduce,
        expert_tokens_meta: ExpertTokensMetadata | None = None,
    ) -> None:  # fmt: skip
        """Multiply the experts' rows by the router's weights, add them up and send them back.

        Args:
            fused_expert_output: the rows of this rank's experts, [rows, hidden] in expert order, or batched.
            weight_and_reduce_impl: not used, because `all_to_all_combine` does the reduction.

        Raises:
            AllToAllError: an earlier call failed.
            TypeError, ValueError: invalid arguments.
        """
        if expert_tokens_meta is None:
            check.fail("expert_tokens_meta", "what prepare returned", "None", TypeError)
        if self._is_rehearsal:
            # CuPy fills an array with a kernel on the current device, so make the output's device current.
            with contextlib.nullcontext() if self.state.device is None else current_device(self.state.device):
                output[...] = 0
            return
        meta = expert_tokens_meta
        inverse = meta.positions if meta.sorted is None else meta.sorted.inverse
        receive = all_to_all_combine(
            self.state, fused_expert_output, None if apply_router_weight_on_input else topk_weights, topk_ids,
            inverse=inverse, apart=self.apart, out=output, return_receiver=self.turns is not None,
        )  # fmt: skip
        if self.turns is not None:
            self._wait_for_senders("combine")
            receive()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Make a layer skip the exchange and return zeros, within this context.

        If one process drives several GPUs, rehearse each layer with each shape. A layer's first call loads kernels and
        allocates memory, which may block while another kernel waits for a rank.
        """
        self._is_rehearsal = True
        try:
            yield
        finally:
            self._is_rehearsal = False

    def _empty_dispatch(self, like: Any, dtype: str, columns: int) -> Any:
        library: Any = arrays.library_of(like)
        shape = (self.max_received, self.state.topk)
        weights, ids = (
            library.from_numpy(x, like) for x in (np.zeros(shape, np.float32), np.full(shape, -1, np.int32))
        )
        return self.state.received(like, 0, dtype, columns, weights, ids)
