"""The experts: the two grouped GEMMs of a mixture-of-experts layer, with the activation between them.

A layer in the standard format first sorts its tokens by expert. A layer with 16-bit weights and a single token skips
the sort (`routed_experts`). After the sort the first GEMM reads its rows in one of two ways:

- gather: the GEMM reads each token through an index. Layers with few rows per expert gather, because they spend most
  of their time on reading weights. 16-bit weights gather any number of rows if `w1` has at most GATHERED_COLUMNS rows.
- permute: a separate kernel first copies the rows into expert order. All other layers permute.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from cukern.formats.fused_moe import GROUP, NOT_QUANTIZED, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.formats.weights import rows_of_weights
from cukern.fused_moe.buffers import aligned, arch_of, dtype_of, gpu_of, is_of_units, part
from cukern.fused_moe.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEPermuteExpertsUnpermute,
    Workspaces,
)
from cukern.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOp,
)
from cukern.ops.moe_gemm import moe_gemm, moe_gemm_batched, moe_gemm_quantized
from cukern.ops.moe_gemm.fp8 import quantizes
from cukern.ops.moe_gemm.product import STREAM_ROWS
from cukern.ops.moe_gemm.routed import DTYPES as ROUTED_DTYPES
from cukern.ops.moe_gemm.routed import fits, routed_experts
from cukern.ops.moe_permute import moe_sort, moe_unpermute, permute_quantized, permute_rows
from cukern.ops.quantization import per_token_group_quant_fp8, scaled_fp8_quant, silu_and_mul_quant
from cukern.runtime import arrays
from cukern.runtime.activation import is_gated
from cukern.runtime.describe import same_shape
from cukern.runtime.vectors import ceil_div

Formats = tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]
STANDARD: Formats = (FusedMoEActivationFormat.Standard,) * 2
BATCHED: Formats = (FusedMoEActivationFormat.BatchedExperts,) * 2
#: With 16-bit weights and many rows per expert, the first GEMM gathers if `w1` has at most this many rows. On an H200
#: gathering slows the GEMM by 5%, and the GEMM's time grows with the rows of `w1`. Gathering saves the permute copy,
#: which reads and writes 2 bytes per element at about 4 TB/s. The break-even is at 7800 rows of `w1`.
GATHERED_COLUMNS = 8192


def gathers(expected_rows: Any, arch: str | None) -> bool:
    """Return whether the first GEMM should gather its rows.

    Two kernels can gather 8-bit rows: "stream", for up to STREAM_ROWS rows, and "mma", for GPUs other than Hopper.
    """
    return expected_rows <= STREAM_ROWS or arch not in (None, "90a")


def expected_rows_of(tokens: Any, topk: int, experts: int) -> Any:
    """Return the expected number of rows per expert. The GEMMs choose their tile size for this number.

    With more than STREAM_ROWS tokens, return the mean. Otherwise return the number of tokens, because a single expert
    may get all of them: with a smaller tile that expert would need two tiles, and its weights would be read twice.
    """
    return tokens if tokens <= STREAM_ROWS else max(ceil_div(tokens * topk, experts), STREAM_ROWS + 1)


def inter_of(w1: Any, activation: str) -> int:
    """Return the intermediate size, which is the number of columns of the second GEMM's input."""
    return rows_of_weights(w1) // (2 if is_gated(activation) else 1)


def _rows_of(workspace: Any, rows: Any) -> Any:
    """Return the first `rows` rows of a workspace."""
    return workspace if workspace.shape[0] is rows or workspace.shape[0] == rows else workspace[:rows]


class _GemmExperts(FusedMoEPermuteExpertsUnpermute):
    """Base class of the experts that run grouped GEMMs, in either activation format.

    Args:
        quant_config: the number format of the weights.
        gather: whether the first GEMM gathers the tokens instead of reading a permuted copy. None: the shapes decide.
    """

    formats: ClassVar[Formats] = STANDARD

    def __init__(self, quant_config: FusedMoEQuantConfig = NOT_QUANTIZED, *, gather: bool | None = None) -> None:
        super().__init__(quant_config)
        self.gather = gather

    @property
    def activation_formats(self) -> Formats:
        return self.formats

    @property
    def batched(self) -> bool:
        return self.activation_formats is BATCHED

    def supports_chunking(self) -> bool:
        return not self.batched

    def supports_expert_map(self) -> bool:
        return not self.batched

    def supports_sorted_tokens(self) -> bool:
        return not self.batched

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate() if self.batched else TopKWeightAndReduceNoOp()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        rows = M * (local_num_experts if self.batched else topk)
        return self._workspaces(rows, N, K, (local_num_experts, M, K) if self.batched else (M, K), dtype)

    def sorted_workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int, dtype: str
    ) -> Workspaces:
        rows = M * topk
        return self._workspaces(rows, N, K, (rows, K), dtype, reduces=False)

    def _workspaces(
        self, rows: Any, N: int, K: int, output: tuple[Any, ...], dtype: str, reduces: bool = True
    ) -> Workspaces:
        """Return the shapes of the workspaces for GEMMs of `rows` rows.

        The second GEMM writes to the output. In the standard format with `reduces` it writes to a workspace instead.
        """
        # In the standard format with `reduces`, workspace13 contains the permuted rows, then the second GEMM's result.
        # Without `reduces` the output array contains both. Batched input is not permuted.
        workspace13 = (rows, K) if reduces and not self.batched else (0, K)
        return Workspaces(workspace13, (rows, N // 2), output, dtype)

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
        tokens, topk = topk_ids.shape
        rows = tokens * topk
        expected_rows = expected_rows_of(tokens, topk, global_num_experts)
        arguments = (w1, w2, activation, workspace13, workspace2, expected_rows)
        if self.batched:
            assert expert_tokens_meta is not None
            self._batched(output, hidden_states, a1q_scale, expert_tokens_meta.expert_num_tokens, *arguments)
            return
        given = None if expert_tokens_meta is None else expert_tokens_meta.sorted
        weights = None if apply_router_weight_on_input else topk_weights
        if not given and self._is_routed(output, hidden_states, w1, w2, topk_ids, global_num_experts):
            config = self.quant_config
            routed_experts(
                output, hidden_states, w1, w2, weights, topk_ids, _rows_of(workspace2, rows), global_num_experts,
                activation, expert_map=expert_map, w1_bias=config.w1_bias, w2_bias=config.w2_bias, **config.form,
            )  # fmt: skip
            return
        expert_offsets, row_token, inverse = given or moe_sort(
            topk_ids, global_num_experts, expert_map=expert_map, num_local_experts=w1.shape[0]
        )
        gather = self.gather
        if gather is None:
            gather = self._gathers(expected_rows, arch_of(output), rows_of_weights(w1))
        where = (expert_offsets, row_token if gather else None, inverse)
        by_row = output if given else self._product_rows(workspace13, (rows, rows_of_weights(w2)), dtype_of(output))
        self._standard(by_row, hidden_states, a1q_scale, rows, where, *arguments)
        if not given:
            moe_unpermute(output, by_row, weights, inverse)

    def _is_routed(self, output: Any, x: Any, w1: Any, w2: Any, topk_ids: Any, all_experts: int) -> bool:
        """Return whether the GEMMs take the router's ids directly, so that the tokens need not be sorted."""
        return False

    def _gathers(self, expected_rows: Any, arch: str | None, columns: int) -> bool:
        """Return whether the first GEMM gathers; `columns` is the number of rows of `w1`."""
        return gathers(expected_rows, arch)

    def _product_rows(self, workspace13: Any, shape: tuple[Any, Any], dtype: str) -> Any:
        """Return the rows of the workspace that receive the result of the second GEMM."""
        return workspace13 if same_shape(workspace13, shape) else workspace13[: shape[0]]

    def _standard(
        self,
        by_row: Any,
        a: Any,
        a_scale: Any,
        rows: int,
        where: tuple[Any, Any, Any],
        w1: Any,
        w2: Any,
        activation: str,
        workspace13: Any,
        workspace2: Any,
        expected_rows: int,
    ) -> None:
        """Write the result of the second GEMM into `by_row` [rows, hidden], in expert order."""
        expert_offsets, row_token, inverse = where
        workspace2 = _rows_of(workspace2, rows)
        config = self.quant_config
        if row_token is None:
            a = permute_rows(a, inverse, rows, out=by_row)
        activated = moe_gemm(
            a,
            w1,
            expert_offsets,
            b_scale=config.w1_scale,
            b_global_scale=config.w1_global_scale,
            row_token=row_token,
            bias=config.w1_bias,
            activation=activation,
            **config.form,
            expected_m=expected_rows,
            out=workspace2,
        )
        moe_gemm(
            activated,
            w2,
            expert_offsets,
            b_scale=config.w2_scale,
            b_global_scale=config.w2_global_scale,
            bias=config.w2_bias,
            expected_m=expected_rows,
            out=by_row,
        )

    def _batched(
        self,
        output: Any,
        a: Any,
        a_scale: Any,
        expert_num_tokens: Any,
        w1: Any,
        w2: Any,
        activation: str,
        workspace13: Any,
        workspace2: Any,
        expected_rows: int,
    ) -> None:
        config = self.quant_config
        activated = moe_gemm_batched(
            a,
            w1,
            expert_num_tokens,
            b_scale=config.w1_scale,
            b_global_scale=config.w1_global_scale,
            bias=config.w1_bias,
            activation=activation,
            **config.form,
            expected_m=expected_rows,
            out=workspace2.reshape(*a.shape[:2], inter_of(w1, activation)),
        )
        moe_gemm_batched(
            activated,
            w2,
            expert_num_tokens,
            b_scale=config.w2_scale,
            b_global_scale=config.w2_global_scale,
            bias=config.w2_bias,
            expected_m=expected_rows,
            out=output,
        )


class _Fp8GemmExperts(_GemmExperts):
    """Base class of the FP8 experts, which also quantize the input of the second GEMM."""

    def takes_unquantized(self, hidden_states: Any) -> bool:
        # With one scale per group of elements, the kernel that permutes the rows also quantizes them.
        return self.quant_config.is_in_groups and not self.batched and is_of_units(hidden_states)

    @property
    def _group(self) -> int | None:
        """Return the number of elements of a row that share a scale. None: there is one scale per row or per tensor."""
        return GROUP if self.quant_config.is_in_groups else None

    def _scales(self, columns: int) -> int:
        """Return the number of scales of a row of `columns` elements. It is 0 if all rows share one scale."""
        if self.quant_config.is_in_groups:
            return columns // GROUP
        return 1 if self.quant_config.per_act_token_quant else 0

    def _workspaces(
        self, rows: Any, N: int, K: int, output: tuple[Any, ...], dtype: str, reduces: bool = True
    ) -> Workspaces:
        # workspace13 contains the result of the first GEMM. Later it contains the result of the second GEMM, unless the
        # second GEMM writes to the output. workspace2 contains quantized rows and their scales. If the first GEMM also
        # applies and quantizes the activation, workspace13 contains its quantized input instead of its result.
        wide = rows * ((max(N, K) if reduces and not self.batched else N) * arrays.ITEM_SIZE[dtype])
        if not reduces and not self.batched:
            wide = max(wide, aligned(rows * K) + rows * self._scales(K) * arrays.ITEM_SIZE["float32"])
        columns = N // 2 if self.batched else max(N // 2, K)
        quantized = aligned(rows * columns) + rows * self._scales(columns) * arrays.ITEM_SIZE["float32"]
        return Workspaces((wide,), (quantized,), output, "uint8")

    def _quantized(self, workspace2: Any, shape: tuple[Any, ...], columns: int) -> tuple[Any, Any]:
        """Return views of a workspace for quantized rows [*shape, columns] and their scales; None: one shared scale."""
        rows, scales = functools.reduce(operator.mul, shape), self._scales(columns)
        q = part(workspace2, 0, (*shape, columns), "float8_e4m3fn")
        if not scales:
            return q, None
        return q, part(workspace2, aligned(rows * columns), (*shape, scales), "float32")

    def _fuses(self, activation: str, w1: Any, expected_rows: Any, like: Any) -> bool:
        """Return whether the first GEMM also applies the activation and quantizes its result."""
        config = self.quant_config
        if not config.block_shape or config.w1_bias is not None or config.quantizes_activated(activation):
            return False
        return bool(quantizes(expected_rows, w1.shape[0], w1.shape[1], gpu_of(like))) and is_of_units(w1)

    def _first_form(self, activation: str) -> dict[str, Any]:
        """Return further arguments of the first GEMM: the bias, and the activation if the GEMM applies it."""
        config = self.quant_config
        if not config.quantizes_activated(activation):
            return {"bias": config.w1_bias}
        return {"bias": config.w1_bias, "activation": activation, **config.form}

    def _activate(self, gate_up: Any, activation: str, expert_num_tokens: Any, q: Any, scale: Any) -> Any:
        """Apply the activation to the first GEMM's result, and quantize it into `q` and `scale`. Return the scales."""
        config = self.quant_config
        static = config.a2_scale
        if config.quantizes_activated(activation):
            if config.is_in_groups:
                per_token_group_quant_fp8(gate_up, GROUP, expert_num_tokens=expert_num_tokens, out_q=q, out_s=scale)
                return scale
            per_token = config.per_act_token_quant
            _, found = scaled_fp8_quant(gate_up, static, None, None, per_token, q, expert_num_tokens=expert_num_tokens)
            return found
        silu_and_mul_quant(
            gate_up,
            activation,
            group_size=self._group,
            scale=static,
            expert_num_tokens=expert_num_tokens,
            out_q=q,
            out_s=scale,
        )
        return static.reshape(1) if scale is None else scale

    def _product_rows(self, workspace13: Any, shape: tuple[Any, Any], dtype: str) -> Any:
        return part(workspace13, 0, shape, dtype)

    def _standard(
        self,
        by_row: Any,
        a: Any,
        a_scale: Any,
        rows: int,
        where: tuple[Any, Any, Any],
        w1: Any,
        w2: Any,
        activation: str,
        workspace13: Any,
        workspace2: Any,
        expected_rows: int,
    ) -> None:
        dtype = dtype_of(by_row)
        expert_offsets, row_token, inverse = where
        config = self.quant_config
        experts = w1.shape[0]
        inter = inter_of(w1, activation)
        columns = inter if config.quantizes_activated(activation) else rows_of_weights(w1)
        is_unquantized = config.is_in_groups and a_scale is None
        fuses = row_token is None and self._fuses(activation, w1, expected_rows, by_row)
        if row_token is None:
            # A first GEMM that also quantizes its result reads workspace13 and writes workspace2.
            q, scale = self._quantized(workspace13 if fuses else workspace2, (rows,), a.shape[1])
            if is_unquantized:
                permute_quantized(a, inverse, out_q=q, out_s=scale)
                a, a_scale = q, scale
            else:
                a = permute_rows(a, inverse, rows, out=q)
                if scale is not None:
                    a_scale = permute_rows(a_scale, inverse, rows, out=scale)
        elif is_unquantized:
            a, a_scale = per_token_group_quant_fp8(a, GROUP)
        product = {"a_scale": a_scale, "b_scale": config.w1_scale, "out_dtype": dtype, "expected_m": expected_rows}
        if fuses:
            q, scale = self._quantized(workspace2, (rows,), inter)
            moe_gemm_quantized(a, w1, expert_offsets, activation=activation, out_q=q, out_s=scale, **product)
            a_scale = scale
        else:
            gate_up = part(workspace13, 0, (rows, columns), dtype)
            form = self._first_form(activation)
            moe_gemm(a, w1, expert_offsets, row_token=row_token, **form, out=gate_up, **product)
            q, scale = self._quantized(workspace2, (1, rows), inter)
            # Pass all rows as one batch entry up to the end of the last expert's rows. Later rows are undefined.
            a_scale = self._activate(gate_up.reshape(1, rows, columns), activation, expert_offsets[experts:], q, scale)
        moe_gemm(
            q.reshape(rows, inter),
            w2,
            expert_offsets,
            a_scale=a_scale if scale is None else a_scale.reshape(rows, -1),
            b_scale=config.w2_scale,
            bias=config.w2_bias,
            out_dtype=dtype,
            expected_m=expected_rows,
            out=by_row,
        )

    def _batched(
        self,
        output: Any,
        a: Any,
        a_scale: Any,
        expert_num_tokens: Any,
        w1: Any,
        w2: Any,
        activation: str,
        workspace13: Any,
        workspace2: Any,
        expected_rows: int,
    ) -> None:
        dtype = dtype_of(output)
        config = self.quant_config
        shape, inter = tuple(a.shape[:2]), inter_of(w1, activation)
        columns = inter if config.quantizes_activated(activation) else rows_of_weights(w1)
        gate_up = moe_gemm_batched(
            a,
            w1,
            expert_num_tokens,
            a_scale=a_scale,
            b_scale=config.w1_scale,
            **self._first_form(activation),
            out_dtype=dtype,
            expected_m=expected_rows,
            out=part(workspace13, 0, (*shape, columns), dtype),
        )
        q, scale = self._quantized(workspace2, shape, inter)
        a_scale = self._activate(gate_up, activation, expert_num_tokens, q, scale)
        if scale is not None and not config.is_in_groups:
            a_scale = a_scale.reshape(shape)
        moe_gemm_batched(
            q,
            w2,
            expert_num_tokens,
            a_scale=a_scale,
            b_scale=config.w2_scale,
            bias=config.w2_bias,
            out_dtype=dtype,
            expected_m=expected_rows,
            out=output,
        )


class GroupedGemmExperts(_GemmExperts):
    """Experts with float16 or bfloat16 weights, in the standard format.

    Every kernel for these weights can gather. With many rows per expert the layer gathers if gathering costs less than
    the permute copy (GATHERED_COLUMNS). A single token is not sorted.
    """

    def _is_routed(self, output: Any, x: Any, w1: Any, w2: Any, topk_ids: Any, all_experts: int) -> bool:
        if self.gather is not None or arch_of(output) is None or dtype_of(output) not in ROUTED_DTYPES:
            return False
        tokens, topk = topk_ids.shape
        return fits(tokens, topk, w1, w2, all_experts) and all(map(is_of_units, (output, x, w1, w2)))

    def _gathers(self, expected_rows: Any, arch: str | None, columns: int) -> bool:
        return columns <= GATHERED_COLUMNS or super()._gathers(expected_rows, arch, columns)


class BatchedGroupedGemmExperts(_GemmExperts):
    """Experts with float16 or bfloat16 weights, in the batched format."""

    formats = BATCHED


class Fp8BlockExperts(_Fp8GemmExperts):
    """Experts with FP8 weights in blocks of 128 x 128 and activations in groups of 1 x 128, in the standard format."""

    quantizations = ("fp8_block",)


class BatchedFp8BlockExperts(_Fp8GemmExperts):
    """Experts with FP8 weights in blocks of 128 x 128 and activations in groups of 1 x 128, in the batched format."""

    formats = BATCHED
    quantizations = ("fp8_block",)


class _EitherFormat(_GemmExperts):
    """Base class of the experts whose activation format is an argument.

    Args:
        quant_config: the number format of the weights.
        use_batched_format: True for tokens batched by expert, False for the standard format.
        gather: as for `_GemmExperts`, for the standard format only.
    """

    def __init__(
        self,
        quant_config: FusedMoEQuantConfig = NOT_QUANTIZED,
        *,
        use_batched_format: bool = False,
        gather: bool | None = None,
    ) -> None:
        super().__init__(quant_config, gather=gather)
        self._formats = BATCHED if use_batched_format else STANDARD

    @property
    def activation_formats(self) -> Formats:
        return self._formats


class Fp8Experts(_EitherFormat, _Fp8GemmExperts):
    """Experts with FP8 weights and activations: weight scales per tensor or channel, others per tensor or token."""

    quantizations = ("fp8",)


class Fp4Experts(_EitherFormat):
    """Experts with MXFP4 or NVFP4 weights, which the kernel converts to 16 bits, and 16-bit activations.

    With weights that are not prepared, the first GEMM gathers any number of rows. The kernel for prepared weights loads
    permuted rows by TMA. On an H200 this makes a layer of 16 or 64 tokens 1 to 16 us faster than gathering does. With
    one token it saves about as much time as the permute copy costs.
    """

    quantizations = ("mxfp4", "nvfp4")

    def _gathers(self, expected_rows: Any, arch: str | None, columns: int) -> bool:
        return not self.quant_config.is_prepared


class Fp8RowsFp4Experts(_EitherFormat, _Fp8GemmExperts):
    """Experts with MXFP4 weights prepared for FP8 rows, and FP8 activations in groups of 128. They always permute."""

    quantizations = ("mxfp4_fp8",)

    def _gathers(self, expected_rows: Any, arch: str | None, columns: int) -> bool:
        return False


def _of_the_chosen(name: str) -> Callable[..., Any]:
    """Return a method that calls the method `name` of `self.chosen`."""

    def method(self: _ChosenExperts, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.chosen, name)(*args, **kwargs)

    return functools.wraps(getattr(_GemmExperts, name))(method)


class _ChosenExperts(FusedMoEPermuteExpertsUnpermute):
    """Base class of the experts that forward each call to an object of the class for their quantization."""

    quantizations = (None, "fp8_block", "fp8", "mxfp4", "nvfp4", "mxfp4_fp8")
    use_batched_format: ClassVar[bool] = False

    def __init__(self, quant_config: FusedMoEQuantConfig = NOT_QUANTIZED) -> None:
        super().__init__(quant_config)
        self.chosen = self._choose(quant_config)

    def _choose(self, config: FusedMoEQuantConfig) -> _GemmExperts:
        if config.name == "fp8":
            return Fp8Experts(config, use_batched_format=self.use_batched_format)
        if config.name == "mxfp4_fp8":
            return Fp8RowsFp4Experts(config, use_batched_format=self.use_batched_format)
        if config.name in ("mxfp4", "nvfp4"):
            return Fp4Experts(config, use_batched_format=self.use_batched_format)
        if config.name == "fp8_block":
            return (BatchedFp8BlockExperts if self.use_batched_format else Fp8BlockExperts)(config)
        return (BatchedGroupedGemmExperts if self.use_batched_format else GroupedGemmExperts)(config)

    @property
    def activation_formats(self) -> Formats:
        return self.chosen.activation_formats

    supports_chunking = _of_the_chosen("supports_chunking")
    supports_expert_map = _of_the_chosen("supports_expert_map")
    supports_sorted_tokens = _of_the_chosen("supports_sorted_tokens")
    takes_unquantized = _of_the_chosen("takes_unquantized")
    finalize_weight_and_reduce_impl = _of_the_chosen("finalize_weight_and_reduce_impl")
    workspace_shapes = _of_the_chosen("workspace_shapes")
    sorted_workspace_shapes = _of_the_chosen("sorted_workspace_shapes")

    def apply(self, *args: Any, **kwargs: Any) -> None:  # a method of its own, because a profiler looks for its name
        self.chosen.apply(*args, **kwargs)


class AutoExperts(_ChosenExperts):
    """Experts with weights of any quantization, in the standard format. The shapes decide whether they gather."""


class BatchedAutoExperts(_ChosenExperts):
    """Experts with weights of any quantization, in the batched format."""

    use_batched_format = True
