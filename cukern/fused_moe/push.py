"""Send tokens to the experts of other ranks and back by stores into the peers' memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cukern.formats.fused_moe import GROUP, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.buffers import dtype_of
from cukern.fused_moe.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEPrepareAndFinalize,
    Prepared,
    SortedTokens,
)
from cukern.fused_moe.prepare_finalize import quantize_input, weigh_input
from cukern.fused_moe.topk_weight_and_reduce import TopKWeightAndReduce
from cukern.ops.all_to_all import AllToAllError, AllToAllState, all_to_all_combine, all_to_all_dispatch
from cukern.ops.moe_permute import moe_sort, moe_sort_batched, permute_rows
from cukern.runtime import arrays, check
from cukern.runtime.cuda import current_device
from cukern.runtime.describe import type_name


class Turns:
    """A barrier between sending and receiving, for ranks that share a GPU in one process, with a thread per rank.

    Kernels on one stream run one after the other. A kernel that waits for another rank must therefore be launched after
    the kernel with which that rank sends.
    """

    def __init__(self, ranks: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._arrived = [0] * ranks
        self._gave_up: int | None = None
        self._changed = threading.Condition()

    def wait(self, rank: int, phase: str) -> None:
        """Wait until all ranks have sent. Raises AllToAllError if one does not send within the deadline."""
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
        # Each step has two barriers: one for the dispatch and one for the combine.
        raise AllToAllError(f"{phase} {step // 2} of rank {rank} failed: {why}", missing, phase, step // 2)

    def _missing(self, step: int) -> int | None:
        return next((rank for rank, count in enumerate(self._arrived) if count <= step), None)

    def abort(self, rank: int) -> None:
        """Make all waits fail, and name `rank` as the cause."""
        with self._changed:
            if self._gave_up is None:
                self._gave_up = rank
            self._changed.notify_all()


class PushPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Stores tokens into the memory of their experts' ranks over NVLink (`all_to_all_dispatch`).

    A token is sent once to each rank that has at least one of its experts. The tokens are quantized before the
    dispatch, or by the dispatch kernel. The host never waits, and a CUDA graph can capture the layer. The received
    tokens are sorted by expert. `all_to_all_combine` multiplies the experts' rows by the router's weights and adds them
    up in float32: the receiving rank adds the rows of its own experts, then the source rank adds the sums in rank
    order. The bits of a result therefore do not depend on the order of arrival.

    All ranks call their layers in the same order; the number of tokens may differ between ranks. Layers that run one
    after the other may share a state.

    Args:
        state: this rank's part of the exchange.
        batched: group the tokens by expert, [local experts, max_tokens_per_expert, hidden]. The tokens of an expert are
            in the order of source rank and token.
        max_tokens_per_expert: the rows of each expert; None: the tokens of all ranks. If a token does not fit, its
            result is NaN, and the next call, or `state.check()`, raises AllToAllError.
        apart: send the experts' rows back unsummed, so that a result has the same bits for any number of ranks. This
            sends up to topk times the bytes, and needs a state that was made with `apart`.
        expert_load: int32 [num_experts]. For each expert of this rank, each `prepare` adds the number of pairs (token,
            slot) that arrived for the expert.
        turns: the barrier that ranks of one process need if they share a GPU; `All2AllManager.local` sets it.

    Raises:
        TypeError, ValueError: invalid arguments; the message names the argument.
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
        self.places = state.ranks * state.max_tokens
        self.room = self.places
        if max_tokens_per_expert is not None:
            if not batched:
                check.fail("max_tokens_per_expert", "None unless batched", max_tokens_per_expert)
            name, most = "max_tokens_per_expert", "the tokens of all ranks"
            self.room = check.integer(name, max_tokens_per_expert, 1, self.places, most)
        if apart and not state.link.sizes.apart:
            check.fail("apart", "False for a state that was made without apart", True)
        self.apart, self.expert_load, self.turns = bool(apart), expert_load, turns
        self.num_local_experts: int = state.num_local_experts
        self._rehearses = False

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts if self.batched else FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> str | None:
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        return self.state.max_tokens

    def num_dispatchers(self) -> int:
        return self.state.ranks

    def sorts_tokens(self) -> bool:
        return not self.batched

    def expert_map(self, like: Any) -> Any:
        return self.state.expert_map(like)

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
        """Quantize the tokens, send them to their experts' ranks, and sort the received tokens by expert.

        Args:
            a1, topk_weights, topk_ids: as for the base class, on the device of the state; an id that is not an expert's
                is not sent.
            num_experts: the `num_experts` of the state.
            expert_map: None, or a map with the same experts on this rank as `expert_map()`, perhaps at other indices.
                If the map lacks an expert of this rank, the result is NaN.
            apply_router_weight_on_input: multiply the tokens by their weights before they are sent.
            quant_config: the same on all ranks, except for the weights' scales. FP8 scales are per token, in blocks or
                static (`a1_scale`, the same on all ranks).

        Returns:
            The tokens received, with their ids and weights. Standard format: `ranks * max_tokens` rows, ordered by
            source rank and token; a row is undefined if its token has no expert on this rank. Batched: the tokens
            grouped by expert. The ids and weights are always [ranks * max_tokens, topk], with id -1 where there is no
            token.

        Raises:
            AllToAllError: an earlier call failed.
            TypeError, ValueError: invalid arguments; the message names the argument.
        """
        arguments = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config)
        return self._prepare(*arguments, return_receiver=self.turns is not None)()

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
        """Send the tokens, and return a function that makes the GPU wait for the rows and returns `Prepared`."""
        arguments = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config)
        return self._prepare(*arguments, return_receiver=True)

    def _prepare(
        self,
        a1: Any,
        topk_weights: Any,
        topk_ids: Any,
        num_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        *,
        return_receiver: bool,
    ) -> Callable[[], Prepared]:
        """Quantize and send the tokens. Return a function that arranges the received rows by expert.

        With `return_receiver` that function also receives the rows; otherwise the sending launch receives them.
        """
        if num_experts != self.state.num_experts:
            wanted = f"{self.state.num_experts}, the experts of all ranks (num_experts of the state)"
            check.fail("global_num_experts", wanted, num_experts)
        refuse_own_scales(quant_config)
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
        """Send `rows` with their `scale`; with `quantize`, the dispatch kernel quantizes the rows in blocks instead.

        Returns a function that arranges the received rows by expert. With `return_receiver` that function also receives
        the rows; otherwise the sending launch receives them. The other arguments are the same as for `prepare`.
        """
        scales = None if quant_config.a1_scale is not None else scale
        if self._rehearses:
            columns = scales.shape[1] if scales is not None else self.state.hidden // GROUP if quantize else 0
            nothing = self._nothing(rows, "float8_e4m3fn" if quantize else dtype_of(rows), columns)
            return lambda: self._arrange(nothing, expert_map, quant_config)
        options = {} if self.expert_load is None else {"expert_load": self.expert_load}
        received = all_to_all_dispatch(
            self.state, rows, topk_weights, topk_ids, scales=scales, quantize=quantize,
            return_receiver=return_receiver, **options,
        )  # fmt: skip

        def receive() -> Prepared:
            self._meet("dispatch")
            return self._arrange(received() if return_receiver else received, expert_map, quant_config)

        return receive

    def _meet(self, phase: str) -> None:
        """Wait until all ranks that share GPUs have sent."""
        if self.turns is None:
            return
        try:
            self.turns.wait(self.state.rank, phase)
        except AllToAllError:
            self.state.abort()
            raise

    def _arrange(self, dispatched: Any, expert_map: Any, quant_config: FusedMoEQuantConfig) -> Prepared:
        """Sort the received rows by expert, or group them by expert if `batched`."""
        rows, scales, weights, ids = dispatched
        count, experts = self.state.num_experts, self.num_local_experts
        if expert_map is None:
            expert_map = self.expert_map(rows)
        options = {"expert_map": expert_map, "num_local_experts": experts}
        if not self.batched:
            meta = ExpertTokensMetadata(sorted=SortedTokens(*moe_sort(ids, count, **options)))
        else:
            counts, positions = moe_sort_batched(ids, count, self.room, **options)
            meta = ExpertTokensMetadata(counts, positions)
            shape = (experts, self.room)
            # Rows without a token have no position, so `permute_rows` does not read them.
            rows = permute_rows(rows, positions, experts * self.room).reshape(*shape, self.state.hidden)
            if scales is not None:
                columns = (scales.shape[1],) if quant_config.block_shape else ()
                scales = permute_rows(scales, positions, experts * self.room).reshape(*shape, *columns)
        if quant_config.a1_scale is not None:
            scales = quant_config.a1_scale.reshape(1)
        return Prepared(rows, scales, meta, ids, weights)

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
        """Multiply the experts' rows by the router's weights, add them up and send them back.

        Args:
            output: [tokens, hidden], written, for the tokens of the last `prepare`.
            fused_expert_output: the rows of this rank's experts, [rows, hidden] in expert order, or batched.
            weight_and_reduce_impl: not used, because `all_to_all_combine` applies the weights and adds up the rows.
            topk_weights, topk_ids, apply_router_weight_on_input: the same as for `prepare`.
            expert_tokens_meta: the metadata that `prepare` returned.

        Raises:
            AllToAllError: an earlier call failed.
            RuntimeError: no `prepare` came before.
            TypeError, ValueError: invalid arguments; the message names the argument.
        """
        if expert_tokens_meta is None:
            check.fail("expert_tokens_meta", "what prepare returned", "None", TypeError)
        if self._rehearses:
            # CuPy fills an array with a kernel on the current device, so this makes the array's device current.
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
            self._meet("combine")
            receive()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Make layers skip the exchange: a call within this context runs without tokens and returns zeros.

        The first call of a layer loads kernels and allocates memory. Both may block while a kernel of the same process
        waits for another rank. If one process drives several GPUs, call each layer once with each shape in a rehearsal.
        """
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def _nothing(self, like: Any, dtype: str, columns: int) -> Any:
        """Return the result of a dispatch without tokens."""
        library: Any = arrays.library_of(like)
        shape = (self.places, self.state.topk)
        weights, ids = (
            library.from_numpy(x, like) for x in (np.zeros(shape, np.float32), np.full(shape, -1, np.int32))
        )
        return self.state.received(like, 0, dtype, columns, weights, ids)


def refuse_own_scales(quant_config: FusedMoEQuantConfig) -> None:
    """Raise ValueError for activations with a per-tensor scale that each call computes."""
    if quant_config.name == "fp8" and not quant_config.per_act_token_quant and quant_config.a1_scale is None:
        wanted = "a1_scale given, or a scale per token (per_act_token_quant): each rank would find another one"
        check.fail("quant_config", wanted, "a scale per tensor that is found at each call")
