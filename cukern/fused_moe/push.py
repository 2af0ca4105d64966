"""Exchange tokens with the experts of other ranks: kernels store the tokens directly into the other ranks' memory."""

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
    """A barrier on the host between sending and receiving, for ranks that share a GPU.

    Such ranks are threads of one process. Kernels on one stream run one after the other, so a kernel that waits for
    another rank must be launched after the sending kernel of that rank.
    """

    def __init__(self, ranks: int, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._arrived = [0] * ranks
        self._gave_up: int | None = None
        self._changed = threading.Condition()

    def wait(self, rank: int, phase: str) -> None:
        """Wait until all ranks have sent. Raises AllToAllError if a rank does not send within the deadline."""
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
        # A call of the layer passes two barriers, one for the dispatch and one for the combine.
        raise AllToAllError(f"{phase} {step // 2} of rank {rank} failed: {why}", missing, phase, step // 2)

    def _missing(self, step: int) -> int | None:
        return next((rank for rank, count in enumerate(self._arrived) if count <= step), None)

    def abort(self, rank: int) -> None:
        """Make all current and later waits raise an error that names `rank` as the cause."""
        with self._changed:
            if self._gave_up is None:
                self._gave_up = rank
            self._changed.notify_all()


class PushPrepareAndFinalize(FusedMoEPrepareAndFinalize):
    """Stores tokens into the memory of their experts' ranks over NVLink (`all_to_all_dispatch`).

    A token is sent once to each rank that has at least one of its experts. The tokens are quantized before the
    dispatch, or by the dispatch kernel. The host never waits, and a CUDA graph can capture the layer. The received
    tokens are sorted by expert. `all_to_all_combine` multiplies the experts' rows by the router's weights and adds them
    up in float32. First the receiving rank adds the rows of its own experts, and then the source rank adds these sums
    in rank order. So the bits of a result do not depend on the order in which tokens arrive.

    All ranks must call their layers in the same order. The number of tokens may differ between ranks. Layers that run
    one after the other may share a state.

    Args:
        state: the buffers of this rank, and the addresses of the other ranks' buffers.
        batched: group the tokens by expert, [local experts, max_tokens_per_expert, hidden]. The tokens of an expert are
            in the order of source rank and token.
        max_tokens_per_expert: the number of rows per expert; None: the maximum tokens of all ranks. If an expert gets
            more tokens than rows, the results of the excess tokens are NaN, and the next call or `state.check()` raises
            AllToAllError.
        apart: send back each expert's row separately instead of one sum per rank. A result then has the same bits for
            any number of ranks, but up to topk times as many bytes are sent. `state` must have been made with `apart`.
        expert_load: int32 [num_experts]. Each `prepare` adds to `expert_load[e]` the number of pairs (token, slot) that
            arrived for expert e, for each expert of this rank.
        turns: the barrier for ranks of one process that share a GPU; `All2AllManager.local` sets it.

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
            a1, topk_weights, topk_ids: as for the base class, on the device of the state. An id that is not the id of
                an expert is not sent.
            num_experts: the `num_experts` of the state.
            expert_map: None, or a map with the same experts on this rank as `expert_map()`. The local indices may
                differ. If an expert of this rank is missing in the map, the result is NaN.
            apply_router_weight_on_input: multiply the tokens by their weights before they are sent.
            quant_config: the same on all ranks, except for the weights' scales. FP8 scales are per token, in blocks or
                static (`a1_scale`, the same on all ranks).

        Returns:
            The received tokens, with their ids and weights. Standard format: `ranks * max_tokens` rows, sorted by
            source rank, then by token; a row is undefined if its token has no expert on this rank. Batched format: the
            tokens grouped by expert. In both formats the ids and weights are [ranks * max_tokens, topk]. The id is -1
            in a row without a token.

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
        """Send the tokens. Return a function that makes the GPU wait for the received rows and returns `Prepared`."""
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

        With `return_receiver` the returned function also launches the kernel that receives the rows. Without it, the
        kernel that sends the rows also receives them.
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
        """Send `rows` with their scales `scale`. With `quantize`, the dispatch kernel quantizes the rows in blocks.

        Returns a function that arranges the received rows by expert. With `return_receiver` that function also launches
        the kernel that receives the rows. Without it, the kernel that sends the rows also receives them. The other
        arguments are the same as for `prepare`.
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
        """Wait on the host until all ranks have sent, if ranks share a GPU."""
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
            # Received rows without a token are not in `positions`, so `permute_rows` does not read them.
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
            fused_expert_output: the output rows of this rank's experts, [rows, hidden] in expert order, or batched.
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
            # CuPy fills an array with a kernel on the current device, so make the device of the array current.
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
        """Return a context in which a call of a layer skips the exchange, runs without tokens and returns zeros.

        The first call of a layer loads kernels and allocates memory. Both may block while another kernel of the process
        waits for a rank. So if one process drives several GPUs, first call each layer with each shape in a rehearsal.
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
    """Raise ValueError if the activations have a per-tensor scale that each call computes.

    Each rank would compute another scale.
    """
    if quant_config.name == "fp8" and not quant_config.per_act_token_quant and quant_config.a1_scale is None:
        wanted = "a1_scale given, or a scale per token (per_act_token_quant): each rank would find another one"
        check.fail("quant_config", wanted, "a scale per tensor that is found at each call")
