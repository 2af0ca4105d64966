"""The base classes of a fused mixture-of-experts layer, modeled on vLLM's FusedMoE modular kernel.

A forward pass has three steps:

- `prepare` quantizes the activations and sends them to the experts' ranks.
- The experts' `apply` permutes the tokens, runs both GEMMs with the activation between them, and unpermutes the rows.
- `finalize` sends the results back. It also multiplies them by the router's weights and adds them up for each token,
  unless `apply` has done so.

`FusedMoEModularKernel` combines a `FusedMoEPrepareAndFinalize` with a `FusedMoEPermuteExpertsUnpermute`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from cukern.formats.fused_moe import NOT_QUANTIZED, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.formats.weights import rows_of_weights
from cukern.fused_moe.buffers import dtype_of, empty
from cukern.fused_moe.output import ID_DTYPES, layer_output
from cukern.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOp,
)
from cukern.runtime import check
from cukern.runtime.activation import is_gated
from cukern.runtime.describe import same_shape

#: Default maximum tokens per call of `apply`, if the experts support chunking. It limits the size of the workspaces.
CHUNK_SIZE = 32 * 1024


class SortedTokens(NamedTuple):
    """The result of `moe_sort`: the pairs (token, slot) of activations in the standard format, sorted by expert.

    Attributes:
        expert_offsets: int32 [local experts + 1], the first row of each expert, then the end of all rows.
        row_token: int32 [tokens * topk], the token of each row.
        inverse: int32 [tokens, topk], the row of each pair; -1 if the pair's expert is on another rank.
    """

    expert_offsets: Any
    row_token: Any
    inverse: Any


class ExpertTokensMetadata(NamedTuple):
    """Which tokens each expert gets. `prepare` returns it.

    Attributes:
        expert_num_tokens: int32 [local experts], for batched activations; else None.
        positions: int32 [tokens, topk], for batched activations reshaped to [experts * max_tokens, hidden]: the row of
            each token and slot, or -1 for a slot without a row. None: only the prepare/finalize class knows the rows.
        sorted: the sorted tokens in the standard format, from a prepare/finalize class with `sorts_tokens`. The experts
            then neither sort nor apply the router's weights; `finalize` applies the weights and adds up the rows.
    """

    expert_num_tokens: Any = None
    positions: Any = None
    sorted: SortedTokens | None = None


class Prepared(NamedTuple):
    """The result of `prepare`.

    Attributes:
        a1q: the activations, in the `activation_format` of the class, quantized if the configuration says so.
        a1q_scale: the scales of the activations, or None.
        expert_tokens_meta: the tokens of each expert, if `a1q` is batched or the class sorts the tokens; else None.
        topk_ids, topk_weights: the ids and weights of the tokens in `a1q`; None: the same as the arguments of
            `prepare`.
    """

    a1q: Any
    a1q_scale: Any = None
    expert_tokens_meta: ExpertTokensMetadata | None = None
    topk_ids: Any = None
    topk_weights: Any = None


class Workspaces(NamedTuple):
    """The shapes of two workspaces and of the experts' output, and the dtype of the workspaces."""

    workspace13: tuple[int, ...]
    workspace2: tuple[int, ...]
    output: tuple[int, ...]
    dtype: str


class FusedMoEPrepareAndFinalize(abc.ABC):
    """Quantizes the activations and sends them to the experts (`prepare`), and sends the results back (`finalize`)."""

    #: The number of experts on this rank, which must equal the number of experts in w1. None: any number.
    num_local_experts: int | None = None

    @property
    @abc.abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format of the activations that `prepare` returns and of the results that `finalize` takes."""

    @abc.abstractmethod
    def topk_indices_dtype(self) -> str | None:
        """Return the dtype that the top-k ids must have. None: any integer dtype."""

    @abc.abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """Return the maximum number of tokens of a call on one rank. None: any number."""

    @abc.abstractmethod
    def num_dispatchers(self) -> int:
        """Return the number of ranks that send tokens.

        Batched activations have `max_num_tokens_per_rank` rows per expert for each of these ranks.
        """

    def sorts_tokens(self) -> bool:
        """Return whether `prepare` always sets `ExpertTokensMetadata.sorted`.

        If so, `finalize` gets the experts' rows [tokens * topk, hidden] in expert order. `finalize` then multiplies the
        rows by the router's weights, and adds up the rows of each token.
        """
        return False

    def can_leave_unquantized(self) -> bool:
        """Return whether `prepare` may be called with NOT_QUANTIZED. The experts then quantize the activations."""
        return False

    def expert_map(self, like: Any) -> Any:
        """Return the expert map that a call without the argument `expert_map` uses.

        The map is int32 [experts of all ranks]: the local index of each expert, -1 for experts of other ranks. It is in
        the library and on the device of `like`. None: this rank has all experts.
        """
        return None

    @abc.abstractmethod
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
        """Quantize the activations and send them to the experts.

        Args:
            a1: [tokens, hidden], float16 or bfloat16.
            topk_weights: float32 [tokens, topk].
            topk_ids: [tokens, topk]; a slot whose id is outside [0, num_experts) adds nothing.
            num_experts: the number of experts of all ranks.
            expert_map: int32 [num_experts], the local index of each expert, -1 for experts of other ranks; None: this
                rank has all experts.
            apply_router_weight_on_input: multiply the activations by their weights first (topk is 1).
            quant_config: the configuration of the experts.
        """

    def has_prepare_no_receive(self) -> bool:
        """Return whether the class implements `prepare_no_receive`."""
        return False

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
        """Send the tokens, and return a function that waits for the other ranks' tokens and returns `Prepared`.

        The layer runs the shared experts before it calls that function.
        """
        raise NotImplementedError(f"{type(self).__name__} has no prepare_no_receive")

    @abc.abstractmethod
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
        """Send the experts' results back and add them up into `output`.

        Args:
            output: [tokens, hidden], written, for the tokens of the call of `prepare`.
            fused_expert_output: the output of the experts' `apply`, for the tokens that `prepare` returned.
            topk_weights, topk_ids, apply_router_weight_on_input: the same as for `prepare`.
            weight_and_reduce_impl: the reduction that adds up the rows of this rank's experts for each token.
            expert_tokens_meta: the metadata that `prepare` returned.
        """


class FusedMoEPermuteExpertsUnpermute(abc.ABC):
    """Runs the experts: permute, GEMM with w1, activation, quantization, GEMM with w2, unpermute.

    Args:
        quant_config: the number format of the weights.
    """

    #: The quantizations that the class supports, by `FusedMoEQuantConfig.name`.
    quantizations: ClassVar[tuple[str | None, ...]] = (None,)

    def __init__(self, quant_config: FusedMoEQuantConfig = NOT_QUANTIZED) -> None:
        self.quant_config = quant_config

    @property
    @abc.abstractmethod
    def activation_formats(self) -> tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]:
        """The formats of the input and of the output."""

    @abc.abstractmethod
    def supports_chunking(self) -> bool:
        """Return whether the tokens may be split into chunks, with one call of `apply` per chunk."""

    @abc.abstractmethod
    def supports_expert_map(self) -> bool:
        """Return whether `apply` takes an expert map. Batched experts do not, because `prepare` has applied the map."""

    def supports_sorted_tokens(self) -> bool:
        """Return whether `apply` takes tokens that `prepare` has sorted (`ExpertTokensMetadata.sorted`)."""
        return False

    def takes_unquantized(self, hidden_states: Any) -> bool:
        """Return whether `apply` can quantize these activations, so that `prepare` does not have to.

        Args:
            hidden_states: the input of the layer, [tokens, hidden].
        """
        return False

    @abc.abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Return the reduction for `finalize`. It is `TopKWeightAndReduceNoOp` if `apply` does the reduction."""

    @abc.abstractmethod
    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        """Return the shapes of the workspaces and of the output for a call of `apply`.

        Args:
            M: the number of tokens; in the batched format the maximum tokens of an expert.
            N, K: the shape of w1 is [local experts, N, K]. N is twice the intermediate size, and K is the hidden size.
            topk, global_num_experts, local_num_experts: the numbers of experts of a token, of all ranks, and of this
                rank.
            dtype: the dtype of the layer's input and output.
        """

    def sorted_workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        """Return the shapes for sorted tokens. The output is the result of the second GEMM, [M * topk, K]."""
        raise NotImplementedError(f"{type(self).__name__} takes no tokens that have been sorted")

    @abc.abstractmethod
    def apply(
        self,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: str,
        global_num_experts: int,
        expert_map: Any,
        a1q_scale: Any,
        workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Run the experts and write their results to `output`.

        The arrays have the shapes from `workspace_shapes`. The contents of the workspaces are undefined before and
        after the call.

        With `expert_tokens_meta.sorted`, the shapes come from `sorted_workspace_shapes`. `output` then gets the result
        of the second GEMM: one row per pair (token, slot), in expert order, not multiplied by the router's weights.
        Rows from index `expert_offsets[-1]` on are undefined.

        Args:
            output: written, in the output format of `activation_formats`.
            hidden_states, a1q_scale: the activations that `prepare` returned, and their scales or None.
            w1, w2: the weights of the local experts, as the layer takes them.
            topk_weights, topk_ids: [tokens, topk], for the tokens in `hidden_states`.
            activation: the name of the activation between the GEMMs.
            global_num_experts: the number of experts that `topk_ids` refers to.
            expert_map: int32 [global_num_experts], the local index of each expert or -1; None: ids are local.
            workspace13, workspace2: arrays of the shapes and the dtype that `workspace_shapes` asked for.
            expert_tokens_meta: the metadata that `prepare` returned, or None.
            apply_router_weight_on_input: whether the tokens have already been multiplied by the router's weights. If
                so, the results are not multiplied.
        """


def refusal(prepare_finalize: FusedMoEPrepareAndFinalize, fused_experts: FusedMoEPermuteExpertsUnpermute) -> str | None:
    """Return the reason why the two objects cannot form a layer. Return None if they can."""
    pf, experts = type(prepare_finalize).__name__, type(fused_experts).__name__
    sent = prepare_finalize.activation_format
    taken, given = fused_experts.activation_formats
    if sent is not taken:
        return f"{pf} gives activations in the format {sent.name}, and {experts} takes {taken.name}"
    if given is not sent:
        return f"{experts} gives its output in the format {given.name}, and {pf} takes {sent.name}"
    name = fused_experts.quant_config.name
    if name not in fused_experts.quantizations:
        able = " or ".join(str(q or "float16 and bfloat16") for q in fused_experts.quantizations)
        return f"{experts} computes with {able}, and its quantization is {name or 'none'}"
    id_dtype = prepare_finalize.topk_indices_dtype()
    if id_dtype not in (None, *ID_DTYPES):
        return f"{pf} wants topk_ids in {id_dtype}, and {experts} takes {', '.join(ID_DTYPES)}"
    if prepare_finalize.sorts_tokens() and not fused_experts.supports_sorted_tokens():
        return f"{pf} sorts the tokens and adds up the experts' rows itself, and {experts} takes no sorted tokens"
    if sent is FusedMoEActivationFormat.BatchedExperts and prepare_finalize.max_num_tokens_per_rank() is None:
        return f"{pf} is batched and does not say for how many tokens there is room (max_num_tokens_per_rank)"
    return None


class FusedMoEModularKernel:
    """A mixture-of-experts layer that combines two objects: one moves the tokens, and the other runs the experts.

    Args:
        prepare_finalize: quantizes the tokens, sends them to the experts, and combines the results.
        fused_experts: runs the GEMMs; its `quant_config` holds the quantization and the scales.
        shared_experts: a function of hidden_states that computes the experts that every token uses. If the
            prepare/finalize class has `prepare_no_receive`, the function runs while the tokens of other ranks arrive.
        chunk_size: maximum tokens per call of `apply`, which limits the size of the workspaces; None: no maximum. The
            default is 32768 if the experts support chunking and the prepare/finalize class does not sort the tokens.
            Sorted tokens are always a single chunk.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: two objects that cannot form a layer; the message gives the reason.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
        shared_experts: Callable[[Any], Any] | None = None,
        *,
        chunk_size: int | str | None = "default",
    ) -> None:
        for name, part, kind in (
            ("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalize),
            ("fused_experts", fused_experts, FusedMoEPermuteExpertsUnpermute),
        ):
            if not isinstance(part, kind):
                check.fail(name, f"a {kind.__name__}", type(part).__name__, TypeError)
        if shared_experts is not None and not callable(shared_experts):
            check.fail("shared_experts", "a function of hidden_states", type(shared_experts).__name__, TypeError)
        if reason := refusal(prepare_finalize, fused_experts):
            raise ValueError(reason)
        sorts = prepare_finalize.sorts_tokens()
        if chunk_size == "default":
            chunk_size = CHUNK_SIZE if fused_experts.supports_chunking() and not sorts else None
        elif chunk_size is not None:
            chunk_size = check.integer("chunk_size", chunk_size, 1)
            if not fused_experts.supports_chunking():
                check.fail("chunk_size", f"None: {type(fused_experts).__name__} does not support chunking", chunk_size)
            if sorts:
                wanted = f"None: {type(prepare_finalize).__name__} sorts all tokens together"
                check.fail("chunk_size", wanted, chunk_size)
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self.shared_experts = shared_experts
        self.chunk_size: Any = chunk_size
        self._weight_and_reduce = (
            TopKWeightAndReduceDelegate() if sorts else fused_experts.finalize_weight_and_reduce_impl()
        )
        self._in_place = isinstance(self._weight_and_reduce, TopKWeightAndReduceNoOp)

    def forward(
        self,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        *,
        activation: str = "silu",
        global_num_experts: int = -1,
        expert_map: Any = None,
        apply_router_weight_on_input: bool = False,
        out: Any = None,
    ) -> Any:
        """Run the layer: send each token through its experts, and add up the results.

        Args:
            hidden_states: [tokens, hidden], float16, bfloat16 or, without quantization, float32.
            w1: [local experts, 2 * inter, hidden], the gate's rows first; without a gate [local experts, inter,
                hidden]. 4-bit weights are uint8 with half the columns, because a byte contains two elements.
            w2: [local experts, hidden, inter].
            topk_weights: float32 [tokens, topk].
            topk_ids: int32 or int64 [tokens, topk]; a slot whose id is not the id of an expert adds nothing.
            activation: silu, gelu, gelu_tanh, swigluoai or relu2; without a gate silu_no_mul, gelu_no_mul,
                gelu_tanh_no_mul or relu2_no_mul.
            global_num_experts: the number of experts of all ranks; -1: the length of expert_map or, without a map, the
                number of experts in w1.
            expert_map: int32 [global_num_experts], the index of each expert in w1 and w2, -1 for experts of other
                ranks; None: the map of the prepare/finalize class.
            apply_router_weight_on_input: multiply the input by the weights instead of the output; topk must be 1.
            out: [tokens, hidden], written and returned.

        Returns:
            [tokens, hidden]. With shared experts a pair: the result of the shared experts, and [tokens, hidden].

        Raises:
            TypeError: an unsupported dtype or library.
            ValueError: shapes, devices or options that do not match; the message names the argument.
        """
        pf, experts = self.prepare_finalize, self.fused_experts
        config = experts.quant_config
        if expert_map is None:
            expert_map = pf.expert_map(hidden_states)
        options = {} if expert_map is None else {"expert_map": expert_map}
        output = layer_output(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, config.name, apply_router_weight_on_input,
            out=out, form=tuple(config.form.values()), **options, **config.scales,
        )  # fmt: skip
        if pf.num_local_experts not in (None, w1.shape[0]):
            check.fail("w1", f"of the {pf.num_local_experts} experts of this rank (num_local_experts)", w1.shape[0])
        all_experts = self._all_experts(w1, global_num_experts, expert_map)
        id_dtype = pf.topk_indices_dtype()
        if id_dtype is not None:
            check.dtype("topk_ids", dtype_of(topk_ids), (id_dtype,))
        tokens, hidden = hidden_states.shape
        # A rank without tokens must still receive and process the tokens of other ranks.
        if not hidden or (not tokens and pf.num_dispatchers() == 1):
            return output if self.shared_experts is None else (self.shared_experts(hidden_states), output)
        leaves = pf.can_leave_unquantized() and experts.takes_unquantized(hidden_states)
        of_input = NOT_QUANTIZED if leaves else config
        prepared, shared = self._prepare(
            hidden_states, topk_weights, topk_ids, all_experts, expert_map, apply_router_weight_on_input, of_input
        )
        ids = topk_ids if prepared.topk_ids is None else prepared.topk_ids
        weights = topk_weights if prepared.topk_weights is None else prepared.topk_weights
        fused = self._apply(
            output, prepared, hidden_states, w1, w2, weights, ids, activation, all_experts, expert_map,
            apply_router_weight_on_input,
        )  # fmt: skip
        pf.finalize(
            output, fused, topk_weights, topk_ids, apply_router_weight_on_input, self._weight_and_reduce,
            expert_tokens_meta=prepared.expert_tokens_meta,
        )  # fmt: skip
        return output if self.shared_experts is None else (shared, output)

    def _all_experts(self, w1: Any, global_num_experts: int, expert_map: Any) -> int:
        """Return the number of experts of all ranks."""
        experts = self.fused_experts
        all_experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
        if global_num_experts != -1:
            check.integer("global_num_experts", global_num_experts, 1)
            if expert_map is not None and global_num_experts != all_experts:
                check.fail("global_num_experts", f"{all_experts}, what expert_map has", global_num_experts)
            all_experts = global_num_experts
        # `prepare` has already applied the map to batched activations.
        is_standard = self.prepare_finalize.activation_format is FusedMoEActivationFormat.Standard
        if expert_map is not None and is_standard and not experts.supports_expert_map():
            check.fail("expert_map", f"None: {type(experts).__name__} does not support one", "an array")
        return all_experts

    def _prepare(self, hidden_states: Any, *others: Any) -> tuple[Prepared, Any]:
        """Call `prepare` and the shared experts. Return both results; without shared experts the second is None.

        If the class has `prepare_no_receive`, the tokens of other ranks arrive while the shared experts run.
        """
        pf = self.prepare_finalize
        if self.shared_experts is None:
            return pf.prepare(hidden_states, *others), None
        if pf.has_prepare_no_receive():
            receive = pf.prepare_no_receive(hidden_states, *others)
            shared = self.shared_experts(hidden_states)
            return receive(), shared
        prepared = pf.prepare(hidden_states, *others)
        return prepared, self.shared_experts(hidden_states)

    def _apply(
        self,
        output: Any,
        prepared: Prepared,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        weights: Any,
        ids: Any,
        activation: str,
        all_experts: int,
        expert_map: Any,
        apply_router_weight_on_input: bool,
    ) -> Any:
        """Run the experts on chunks of tokens.

        Return the result. It is `output` if the experts can write to `output`, and a new array otherwise.
        """
        experts, dtype, hidden = self.fused_experts, dtype_of(hidden_states), hidden_states.shape[1]
        a1q, scale, meta = prepared.a1q, prepared.a1q_scale, prepared.expert_tokens_meta
        rows, inter2, topk = a1q.shape[-2], rows_of_weights(w1) * (1 if is_gated(activation) else 2), ids.shape[1]
        chunk = rows if self.chunk_size is None or rows <= self.chunk_size else self.chunk_size
        sorts = self.prepare_finalize.sorts_tokens()
        if sorts is not (meta is not None and meta.sorted is not None):
            name, what = type(self.prepare_finalize).__name__, "expert_tokens_meta.sorted"
            raise RuntimeError(
                f"{name}.prepare must return {what if sorts else 'no ' + what}: sorts_tokens() is {sorts}"
            )
        shapes_of = experts.sorted_workspace_shapes if sorts else experts.workspace_shapes
        shapes = shapes_of(chunk, inter2, hidden, topk, all_experts, w1.shape[0], dtype)
        if not rows:
            return empty(shapes.output, dtype, hidden_states)
        workspace13 = empty(shapes.workspace13, shapes.dtype, hidden_states)
        workspace2 = empty(shapes.workspace2, shapes.dtype, hidden_states)
        rest = (activation, all_experts, expert_map)
        whole = shapes.output if chunk is rows else (rows, *shapes.output[1:])
        same = self._in_place and same_shape(output, whole)
        fused = output if same else empty(whole, dtype, hidden_states)
        if chunk is rows:
            experts.apply(
                fused, a1q, w1, w2, weights, ids, *rest, scale, workspace13, workspace2, meta,
                apply_router_weight_on_input,
            )  # fmt: skip
            return fused
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            own_scale = scale if scale is None or scale.shape[0] != rows else scale[part]
            experts.apply(
                fused[part], a1q[part], w1, w2, weights[part], ids[part], *rest, own_scale, workspace13, workspace2,
                meta, apply_router_weight_on_input,
            )  # fmt: skip
        return fused

    __call__ = forward
