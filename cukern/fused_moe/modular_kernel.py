"""The base classes of a fused mixture-of-experts layer, modeled on vLLM's FusedMoE modular kernel.

`prepare` sends the quantized tokens to the experts' ranks, `apply` runs the experts, and `finalize` sends the results
back. Either `apply` or `finalize` multiplies the results by the router's weights and adds them up for each token.
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

#: The default maximum number of tokens per call of `apply`, to limit the size of the workspaces.
CHUNK_SIZE = 32 * 1024


class SortedTokens(NamedTuple):
    """The pairs (token, slot), sorted by expert: the result of `moe_sort`. Slot s has the expert `topk_ids[token, s]`.

    Attributes:
        expert_offsets: int32 [local experts + 1], the first sorted row of each local expert, then the number of rows.
        row_token: int32 [tokens * topk], the token of each sorted row.
        inverse: int32 [tokens, topk], the sorted row of each pair (token, slot); -1: the expert is on another rank.
    """

    expert_offsets: Any
    row_token: Any
    inverse: Any


class ExpertTokensMetadata(NamedTuple):
    """The tokens of each expert.

    Attributes:
        expert_num_tokens: int32 [local experts], the number of tokens of each expert, for batched activations.
        positions: int32 [tokens, topk], the row of each pair (token, slot) in batched activations, where row i of
            expert e counts as e * rows per expert + i; -1: no row. None: only the prepare/finalize class knows the
            rows.
        sorted: the sorted tokens, if `sorts_tokens` of the prepare/finalize class returns True.
    """

    expert_num_tokens: Any = None
    positions: Any = None
    sorted: SortedTokens | None = None


class Prepared(NamedTuple):
    """The result of `prepare`.

    Attributes:
        a1q, a1q_scale: the activations in the prepare/finalize class's `activation_format`, and their scales.
        expert_tokens_meta: the tokens of each expert, if `a1q` is batched or sorted.
        topk_ids, topk_weights: the ids and weights of the tokens in `a1q`; None: the arguments of `prepare`.
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
    """Sends activations to the experts, and results back."""

    #: The required number of experts in w1; None: any number.
    num_local_experts: int | None = None

    @property
    @abc.abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format of the activations from `prepare` and of the results for `finalize`."""

    @abc.abstractmethod
    def topk_indices_dtype(self) -> str | None:
        """Return the required dtype of the top-k ids; None: any integer dtype."""

    @abc.abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """Return the maximum tokens of a call on one rank; None: any number."""

    @abc.abstractmethod
    def num_dispatchers(self) -> int:
        """Return the number of ranks that send tokens.

        Batched activations have `max_num_tokens_per_rank` rows for each pair of an expert and a sending rank.
        """

    def sorts_tokens(self) -> bool:
        """Return whether `prepare` always sets `ExpertTokensMetadata.sorted`.

        If True, `finalize` gets rows in expert order, applies the router's weights and adds up the rows.
        """
        return False

    def can_leave_unquantized(self) -> bool:
        """Return whether `prepare` takes NOT_QUANTIZED, which leaves the quantization to the experts."""
        return False

    def expert_map(self, like: Any) -> Any:
        """Return the default expert map, in the library and on the device of `like`.

        The map is int32 [experts of all ranks]: the local index of each expert, -1 for experts of other ranks. None:
        this rank has all experts.
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
            topk_weights, topk_ids: [tokens, topk]; a slot with an id outside [0, num_experts) adds nothing.
            num_experts: the number of experts of all ranks.
            expert_map: None, or a map that has the same experts on this rank as the map from `expert_map()`. Their
                local indices may differ.
            apply_router_weight_on_input: multiply the activations by their weights first (topk is 1).
            quant_config: the same on all ranks, except for the weights' scales. FP8 tokens that are sent to other ranks
                have one scale per token, one scale per 128 elements, or one static scale.
        """

    def has_prepare_no_receive(self) -> bool:
        """Return whether the class has `prepare_no_receive`."""
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
        """Send the tokens, and return a function that receives the other ranks' tokens.

        The returned function waits for the other ranks' tokens and returns `Prepared`. The layer runs the shared
        experts before it calls the function.
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
        """Send the experts' results back and add them up.

        Args:
            output: [tokens, hidden], written: the results for the tokens of the last `prepare`.
            fused_expert_output, expert_tokens_meta: the output of the experts' `apply`, and the metadata from
                `prepare`.
            topk_weights, topk_ids, apply_router_weight_on_input: as for `prepare`.
            weight_and_reduce_impl: the object that reduces this rank's rows.
        """


class FusedMoEPermuteExpertsUnpermute(abc.ABC):
    """Runs the experts: permute, GEMM with w1, activation, quantization, GEMM with w2, unpermute.

    Args:
        quant_config: the number format of the weights.
    """

    #: The supported values of `FusedMoEQuantConfig.name`.
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
        """Return whether `apply` takes an expert map. For batched experts `prepare` has applied the map."""

    def supports_sorted_tokens(self) -> bool:
        """Return whether `apply` takes tokens sorted by `prepare` (`ExpertTokensMetadata.sorted`)."""
        return False

    def takes_unquantized(self, hidden_states: Any) -> bool:
        """Return whether `apply` can quantize the layer's input `hidden_states` [tokens, hidden]."""
        return False

    @abc.abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Return the reduction for `finalize`: `TopKWeightAndReduceNoOp` if `apply` reduces."""

    @abc.abstractmethod
    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        """Return the shapes of the workspaces and of the output for `apply`.

        Args:
            M: the number of tokens; in the batched format the maximum number of tokens of an expert.
            N, K: twice the intermediate size, and the hidden size.
            topk, global_num_experts, local_num_experts: the numbers of experts of a token, of all ranks, and of this
                rank.
            dtype: the dtype of the layer.
        """

    def sorted_workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        """Return the shapes of the workspaces and of the output for sorted tokens. The output is [M * topk, K]."""
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
        """Run the experts and write `output`.

        For sorted tokens, `output` gets the unweighted rows of the second GEMM in expert order, one per pair (token,
        slot). Rows from `expert_offsets[-1]` on are undefined.

        Args:
            output, workspace13, workspace2: of the shapes from `workspace_shapes` or, for sorted tokens,
                `sorted_workspace_shapes`.
            hidden_states, a1q_scale, expert_tokens_meta: the activations, their scales and the metadata from `prepare`.
            w1, w2: the weights of the local experts.
            topk_weights, topk_ids: [tokens, topk], for the tokens in `hidden_states`.
            activation: the activation between the GEMMs.
            global_num_experts: the number of experts that `topk_ids` refers to.
            expert_map: the local index of each expert, -1 for experts of other ranks; None: `topk_ids` are local
                indices.
            apply_router_weight_on_input: True: the tokens are already multiplied by the router's weights.
        """


def refusal(prepare_finalize: FusedMoEPrepareAndFinalize, fused_experts: FusedMoEPermuteExpertsUnpermute) -> str | None:
    """Return the reason why the two objects cannot form a layer; None if they can."""
    pf, experts = type(prepare_finalize).__name__, type(fused_experts).__name__
    pf_format = prepare_finalize.activation_format
    input_format, output_format = fused_experts.activation_formats
    if pf_format is not input_format:
        return f"{pf} gives activations in the format {pf_format.name}, and {experts} takes {input_format.name}"
    if output_format is not pf_format:
        return f"{experts} gives its output in the format {output_format.name}, and {pf} takes {pf_format.name}"
    name = fused_experts.quant_config.name
    if name not in fused_experts.quantizations:
        supported = " or ".join(str(q or "float16 and bfloat16") for q in fused_experts.quantizations)
        return f"{experts} computes with {supported}, and its quantization is {name or 'none'}"
    id_dtype = prepare_finalize.topk_indices_dtype()
    if id_dtype not in (None, *ID_DTYPES):
        return f"{pf} wants topk_ids in {id_dtype}, and {experts} takes {', '.join(ID_DTYPES)}"
    if prepare_finalize.sorts_tokens() and not fused_experts.supports_sorted_tokens():
        return f"{pf} sorts the tokens and adds up the experts' rows itself, and {experts} takes no sorted tokens"
    if pf_format is FusedMoEActivationFormat.BatchedExperts and prepare_finalize.max_num_tokens_per_rank() is None:
        return f"{pf} is batched and does not say for how many tokens there is room (max_num_tokens_per_rank)"
    return None


class FusedMoEModularKernel:
    """A mixture-of-experts layer: one object moves the tokens, and another runs the experts.

    Args:
        prepare_finalize, fused_experts: the two objects.
        shared_experts: a function of hidden_states for the experts that every token uses. If `prepare_finalize` has
            `prepare_no_receive`, the function runs while the tokens of other ranks arrive.
        chunk_size: the maximum number of tokens per call of `apply`, to limit the workspaces; None: no maximum. The
            default is 32768 if the experts support chunking and the tokens are not sorted, otherwise None.

    Raises:
        TypeError, ValueError: invalid arguments, or two objects that cannot form a layer.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
        shared_experts: Callable[[Any], Any] | None = None,
        *,
        chunk_size: int | str | None = "default",
    ) -> None:
        for name, component, kind in (
            ("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalize),
            ("fused_experts", fused_experts, FusedMoEPermuteExpertsUnpermute),
        ):
            if not isinstance(component, kind):
                check.fail(name, f"a {kind.__name__}", type(component).__name__, TypeError)
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
        """Run the layer. `cukern.fused_experts` documents the other arguments.

        Args:
            global_num_experts: the number of experts of all ranks; -1: the length of expert_map, or of w1 without a
                map.
            expert_map: None: the map of the prepare/finalize class.

        Returns:
            [tokens, hidden]. With shared experts a pair is returned: the shared experts' result, and
            [tokens, hidden].

        Raises:
            TypeError, ValueError: invalid arguments.
        """
        pf, experts = self.prepare_finalize, self.fused_experts
        config = experts.quant_config
        if expert_map is None:
            expert_map = pf.expert_map(hidden_states)
        options = {} if expert_map is None else {"expert_map": expert_map}
        output = layer_output(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, config.name, apply_router_weight_on_input,
            out=out, activation_options=tuple(config.form.values()), **options, **config.scales,
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
        experts_quantize = pf.can_leave_unquantized() and experts.takes_unquantized(hidden_states)
        input_config = NOT_QUANTIZED if experts_quantize else config
        prepared, shared = self._prepare(
            hidden_states, topk_weights, topk_ids, all_experts, expert_map, apply_router_weight_on_input, input_config
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
        """Call `prepare` and the shared experts. Return both results; the second may be None."""
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
        self, output: Any, prepared: Prepared, hidden_states: Any, w1: Any, w2: Any, weights: Any, ids: Any,
        activation: str, all_experts: int, expert_map: Any, apply_router_weight_on_input: bool,
    ) -> Any:  # fmt: skip
        """Run the experts on chunks of tokens. Return `output` if the experts can write to it, else a new array."""
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
        routing_args = (activation, all_experts, expert_map)
        fused_shape = shapes.output if chunk is rows else (rows, *shapes.output[1:])
        writes_output = self._in_place and output.shape == tuple(fused_shape)
        fused = output if writes_output else empty(fused_shape, dtype, hidden_states)
        if chunk is rows:
            experts.apply(
                fused, a1q, w1, w2, weights, ids, *routing_args, scale, workspace13, workspace2, meta,
                apply_router_weight_on_input,
            )  # fmt: skip
            return fused
        for start in range(0, rows, chunk):
            chunk_rows = slice(start, min(start + chunk, rows))
            chunk_scale = scale if scale is None or scale.shape[0] != rows else scale[chunk_rows]
            experts.apply(
                fused[chunk_rows], a1q[chunk_rows], w1, w2, weights[chunk_rows], ids[chunk_rows], *routing_args,
                chunk_scale, workspace13, workspace2, meta, apply_router_weight_on_input,
            )  # fmt: skip
        return fused

    __call__ = forward
