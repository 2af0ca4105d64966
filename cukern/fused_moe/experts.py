"""The experts of a mixture-of-experts layer: two grouped GEMMs with the activation between them.

In the standard format the first GEMM reads rows sorted by expert, in one of two ways:

- gather: the GEMM reads the rows through an index. Layers with few rows per expert gather, because reading the weights
  takes most of their time.
- permute: a separate kernel copies the rows into expert order, and the GEMM reads the copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from cukern.formats.fused_moe import GROUP, NOT_QUANTIZED, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.formats.weights import rows_of_weights
from cukern.fused_moe.buffers import aligned, arch_of, dtype_of, gpu_of, is_vector_aligned, typed_view
from cukern.fused_moe.modular_kernel import ExpertTokensMetadata, FusedMoEPermuteExpertsUnpermute, Workspaces
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
from cukern.runtime.vectors import ceil_div

Formats = tuple[FusedMoEActivationFormat, FusedMoEActivationFormat]
STANDARD: Formats = (FusedMoEActivationFormat.Standard,) * 2
BATCHED: Formats = (FusedMoEActivationFormat.BatchedExperts,) * 2
#: With 16-bit weights and many rows per expert, the first GEMM gathers if `w1` has at most this many rows. On an H200
#: gathering slows the GEMM by 5% and saves the permute copy. The GEMM's time grows with the rows of `w1`, and the
#: copy's time does not. Both ways take the same time at 7800 rows of `w1`.
GATHERED_COLUMNS = 8192


def gathers(expected_rows: Any, arch: str | None) -> bool:
    """Return whether the first GEMM gathers.

    Only two kernels gather 8-bit rows: "stream" (up to STREAM_ROWS rows per expert) and "mma" (GPUs other than Hopper).
    """
    return expected_rows <= STREAM_ROWS or arch not in (None, "90a")


def expected_rows_of(tokens: Any, topk: int, experts: int) -> Any:
    """Return the number of rows per expert that determines the GEMMs' tile size.

    For up to STREAM_ROWS tokens, the result is the number of tokens, because one expert may get all tokens. With a
    smaller tile the GEMM would then read the expert's weights twice.
    """
    return tokens if tokens <= STREAM_ROWS else max(ceil_div(tokens * topk, experts), STREAM_ROWS + 1)


def inter_of(w1: Any, activation: str) -> int:
    """Return the intermediate size: the number of columns of the second GEMM's input."""
    return rows_of_weights(w1) // (2 if is_gated(activation) else 1)


def _first_rows(workspace: Any, rows: Any) -> Any:
    return workspace if workspace.shape[0] is rows or workspace.shape[0] == rows else workspace[:rows]


class _GemmExperts(FusedMoEPermuteExpertsUnpermute):
    """Base class of the experts that run grouped GEMMs.

    Args:
        quant_config: the number format of the weights.
        gather: whether the first GEMM gathers the tokens; None: the shapes decide.
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
        """Return the shapes for GEMMs of `rows` rows. Without `reduces`, the second GEMM writes to the output."""
        # workspace13 holds the permuted rows, then the second GEMM's result. It is empty without `reduces`, because the
        # output then holds both. It is also empty for batched input, which is not permuted.
        workspace13 = (rows, K) if reduces and not self.batched else (0, K)
        return Workspaces(workspace13, (rows, N // 2), output, dtype)

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: str,
        global_num_experts: int, expert_map: Any, a1q_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: ExpertTokensMetadata | None, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        tokens, topk = topk_ids.shape
        rows = tokens * topk
        expected_rows = expected_rows_of(tokens, topk, global_num_experts)
        arguments = (w1, w2, activation, workspace13, workspace2, expected_rows)
        if self.batched:
            assert expert_tokens_meta is not None
            self._batched(output, hidden_states, a1q_scale, expert_tokens_meta.expert_num_tokens, *arguments)
            return
        presorted = None if expert_tokens_meta is None else expert_tokens_meta.sorted
        weights = None if apply_router_weight_on_input else topk_weights
        if not presorted and self._is_routed(output, hidden_states, w1, w2, topk_ids, global_num_experts):
            config = self.quant_config
            routed_experts(
                output, hidden_states, w1, w2, weights, topk_ids, _first_rows(workspace2, rows), global_num_experts,
                activation, expert_map=expert_map, w1_bias=config.w1_bias, w2_bias=config.w2_bias, **config.form,
            )  # fmt: skip
            return
        expert_offsets, row_token, inverse = presorted or moe_sort(
            topk_ids, global_num_experts, expert_map=expert_map, num_local_experts=w1.shape[0]
        )
        gather = self.gather
        if gather is None:
            gather = self._gathers(expected_rows, arch_of(output), rows_of_weights(w1))
        permutation = (expert_offsets, row_token if gather else None, inverse)
        gemm2_out = output if presorted else self._gemm2_out(workspace13, (rows, rows_of_weights(w2)), dtype_of(output))
        self._standard(gemm2_out, hidden_states, a1q_scale, rows, permutation, *arguments)
        if not presorted:
            moe_unpermute(output, gemm2_out, weights, inverse)

    def _is_routed(self, output: Any, x: Any, w1: Any, w2: Any, topk_ids: Any, all_experts: int) -> bool:
        """Return whether the GEMMs take the router's ids, so that no sort is needed."""
        return False

    def _gathers(self, expected_rows: Any, arch: str | None, w1_rows: int) -> bool:
        return gathers(expected_rows, arch)

    def _gemm2_out(self, workspace13: Any, shape: tuple[Any, Any], dtype: str) -> Any:
        return workspace13 if workspace13.shape == shape else workspace13[: shape[0]]

    def _scales_and_bias(self, layer: str) -> dict[str, Any]:
        """Return the arguments of a GEMM with the weights `layer`, w1 or w2."""
        names = {"b_scale": "scale", "b_global_scale": "global_scale", "bias": "bias"}
        return {argument: getattr(self.quant_config, f"{layer}_{name}") for argument, name in names.items()}

    def _standard(
        self, gemm2_out: Any, a: Any, a_scale: Any, rows: int, permutation: tuple[Any, Any, Any], w1: Any, w2: Any,
        activation: str, workspace13: Any, workspace2: Any, expected_rows: int,
    ) -> None:  # fmt: skip
        """Write the second GEMM's result into `gemm2_out` [rows, hidden], in expert order."""
        expert_offsets, row_token, inverse = permutation
        workspace2 = _first_rows(workspace2, rows)
        if row_token is None:
            a = permute_rows(a, inverse, rows, out=gemm2_out)
        activated = moe_gemm(
            a, w1, expert_offsets, **self._scales_and_bias("w1"), row_token=row_token, activation=activation,
            **self.quant_config.form, expected_m=expected_rows, out=workspace2,
        )  # fmt: skip
        moe_gemm(activated, w2, expert_offsets, **self._scales_and_bias("w2"), expected_m=expected_rows, out=gemm2_out)

    def _batched(
        self, output: Any, a: Any, a_scale: Any, expert_num_tokens: Any, w1: Any, w2: Any, activation: str,
        workspace13: Any, workspace2: Any, expected_rows: int,
    ) -> None:  # fmt: skip
        out = workspace2.reshape(*a.shape[:2], inter_of(w1, activation))
        activated = moe_gemm_batched(
            a, w1, expert_num_tokens, **self._scales_and_bias("w1"), activation=activation, **self.quant_config.form,
            expected_m=expected_rows, out=out,
        )  # fmt: skip
        moe_gemm_batched(
            activated, w2, expert_num_tokens, **self._scales_and_bias("w2"), expected_m=expected_rows, out=output
        )


class _Fp8GemmExperts(_GemmExperts):
    """Base class of the FP8 experts, which also quantize the input of the second GEMM."""

    def takes_unquantized(self, hidden_states: Any) -> bool:
        # The kernel that permutes rows can also quantize them, with one scale per group of elements.
        return self.quant_config.is_in_groups and not self.batched and is_vector_aligned(hidden_states)

    def _scales(self, columns: int) -> int:
        """Return the number of scales of a row of `columns` elements; 0: all rows share one scale."""
        if self.quant_config.is_in_groups:
            return columns // GROUP
        return 1 if self.quant_config.per_act_token_quant else 0

    def _workspaces(
        self, rows: Any, N: int, K: int, output: tuple[Any, ...], dtype: str, reduces: bool = True
    ) -> Workspaces:
        # workspace13 holds the first GEMM's result, and later the second GEMM's result if `reduces`. workspace2 holds
        # quantized rows and their scales. If the first GEMM also quantizes its result, it reads its quantized input
        # from workspace13 and writes to workspace2.
        workspace13_bytes = rows * ((max(N, K) if reduces and not self.batched else N) * arrays.ITEM_SIZE[dtype])
        if not reduces and not self.batched:
            workspace13_bytes = max(
                workspace13_bytes, aligned(rows * K) + rows * self._scales(K) * arrays.ITEM_SIZE["float32"]
            )
        columns = N // 2 if self.batched else max(N // 2, K)
        workspace2_bytes = aligned(rows * columns) + rows * self._scales(columns) * arrays.ITEM_SIZE["float32"]
        return Workspaces((workspace13_bytes,), (workspace2_bytes,), output, "uint8")

    def _quantized(self, workspace2: Any, shape: tuple[Any, ...], columns: int) -> tuple[Any, Any]:
        """Return two views of a workspace: the quantized rows [*shape, columns], and their scales or None."""
        rows, scales = functools.reduce(operator.mul, shape), self._scales(columns)
        q = typed_view(workspace2, 0, (*shape, columns), "float8_e4m3fn")
        if not scales:
            return q, None
        return q, typed_view(workspace2, aligned(rows * columns), (*shape, scales), "float32")

    def _fuses(self, activation: str, w1: Any, expected_rows: Any, like: Any) -> bool:
        """Return whether the first GEMM also applies the activation and quantizes its result."""
        config = self.quant_config
        if not config.block_shape or config.w1_bias is not None or config.quantizes_activated(activation):
            return False
        return bool(quantizes(expected_rows, w1.shape[0], w1.shape[1], gpu_of(like))) and is_vector_aligned(w1)

    def _epilogue_args(self, activation: str) -> dict[str, Any]:
        """Return the first GEMM's bias, and the activation if the GEMM applies it."""
        config = self.quant_config
        if not config.quantizes_activated(activation):
            return {"bias": config.w1_bias}
        return {"bias": config.w1_bias, "activation": activation, **config.form}

    def _activate(self, gate_up: Any, activation: str, expert_num_tokens: Any, q: Any, scale: Any) -> Any:
        """Apply the activation, unless the GEMM has applied it. Quantize into `q` and `scale`. Return the scales."""
        config = self.quant_config
        static = config.a2_scale
        if config.quantizes_activated(activation):
            if config.is_in_groups:
                per_token_group_quant_fp8(gate_up, GROUP, expert_num_tokens=expert_num_tokens, out_q=q, out_s=scale)
                return scale
            per_token = config.per_act_token_quant
            _, scales = scaled_fp8_quant(gate_up, static, None, None, per_token, q, expert_num_tokens=expert_num_tokens)
            return scales
        # One scale covers GROUP elements, a row, or all rows.
        options: dict[str, Any] = {"group_size": GROUP if config.is_in_groups else None, "scale": static}
        silu_and_mul_quant(gate_up, activation, **options, expert_num_tokens=expert_num_tokens, out_q=q, out_s=scale)
        return static.reshape(1) if scale is None else scale

    def _gemm2_out(self, workspace13: Any, shape: tuple[Any, Any], dtype: str) -> Any:
        return typed_view(workspace13, 0, shape, dtype)

    def _standard(
        self, gemm2_out: Any, a: Any, a_scale: Any, rows: int, permutation: tuple[Any, Any, Any], w1: Any, w2: Any,
        activation: str, workspace13: Any, workspace2: Any, expected_rows: int,
    ) -> None:  # fmt: skip
        dtype = dtype_of(gemm2_out)
        expert_offsets, row_token, inverse = permutation
        config = self.quant_config
        experts = w1.shape[0]
        inter = inter_of(w1, activation)
        columns = inter if config.quantizes_activated(activation) else rows_of_weights(w1)
        is_unquantized = config.is_in_groups and a_scale is None
        fuses = row_token is None and self._fuses(activation, w1, expected_rows, gemm2_out)
        if row_token is None:
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
        gemm1_args = {"a_scale": a_scale, "b_scale": config.w1_scale, "out_dtype": dtype, "expected_m": expected_rows}
        if fuses:
            q, scale = self._quantized(workspace2, (rows,), inter)
            moe_gemm_quantized(a, w1, expert_offsets, activation=activation, out_q=q, out_s=scale, **gemm1_args)
            a_scale = scale
        else:
            gate_up = typed_view(workspace13, 0, (rows, columns), dtype)
            epilogue_args = self._epilogue_args(activation)
            moe_gemm(a, w1, expert_offsets, row_token=row_token, **epilogue_args, out=gate_up, **gemm1_args)
            q, scale = self._quantized(workspace2, (1, rows), inter)
            # Pass the rows as one batch entry with `expert_offsets[experts]` rows, because later rows are undefined.
            a_scale = self._activate(gate_up.reshape(1, rows, columns), activation, expert_offsets[experts:], q, scale)
        a_scale = a_scale if scale is None else a_scale.reshape(rows, -1)
        moe_gemm(
            q.reshape(rows, inter), w2, expert_offsets, a_scale=a_scale, **self._scales_and_bias("w2"),
            out_dtype=dtype, expected_m=expected_rows, out=gemm2_out,
        )  # fmt: skip

    def _batched(
        self, output: Any, a: Any, a_scale: Any, expert_num_tokens: Any, w1: Any, w2: Any, activation: str,
        workspace13: Any, workspace2: Any, expected_rows: int,
    ) -> None:  # fmt: skip
        dtype = dtype_of(output)
        config = self.quant_config
        shape, inter = tuple(a.shape[:2]), inter_of(w1, activation)
        columns = inter if config.quantizes_activated(activation) else rows_of_weights(w1)
        gemm_args: dict[str, Any] = {"out_dtype": dtype, "expected_m": expected_rows}
        gate_up = moe_gemm_batched(
            a, w1, expert_num_tokens, a_scale=a_scale, b_scale=config.w1_scale, **self._epilogue_args(activation),
            out=typed_view(workspace13, 0, (*shape, columns), dtype), **gemm_args,
        )  # fmt: skip
        q, scale = self._quantized(workspace2, shape, inter)
        a_scale = self._activate(gate_up, activation, expert_num_tokens, q, scale)
        if scale is not None and not config.is_in_groups:
            a_scale = a_scale.reshape(shape)
        moe_gemm_batched(
            q, w2, expert_num_tokens, a_scale=a_scale, **self._scales_and_bias("w2"), out=output, **gemm_args
        )


class GroupedGemmExperts(_GemmExperts):
    """Experts with float16 or bfloat16 weights, in the standard format."""

    def _is_routed(self, output: Any, x: Any, w1: Any, w2: Any, topk_ids: Any, all_experts: int) -> bool:
        if self.gather is not None or arch_of(output) is None or dtype_of(output) not in ROUTED_DTYPES:
            return False
        tokens, topk = topk_ids.shape
        return fits(tokens, topk, w1, w2, all_experts) and all(map(is_vector_aligned, (output, x, w1, w2)))

    def _gathers(self, expected_rows: Any, arch: str | None, w1_rows: int) -> bool:
        return w1_rows <= GATHERED_COLUMNS or super()._gathers(expected_rows, arch, w1_rows)


class BatchedGroupedGemmExperts(_GemmExperts):
    """`GroupedGemmExperts` in the batched format."""

    formats = BATCHED


class Fp8BlockExperts(_Fp8GemmExperts):
    """Experts with FP8 weights and FP8 activations, in the standard format.

    One scale covers a block of 128 x 128 weights, or 128 elements of an activation row.
    """

    quantizations = ("fp8_block",)


class BatchedFp8BlockExperts(_Fp8GemmExperts):
    """`Fp8BlockExperts` in the batched format."""

    formats = BATCHED
    quantizations = ("fp8_block",)


class _EitherFormat(_GemmExperts):
    """Base class of the experts whose activation format is an argument.

    Args:
        use_batched_format: True: tokens batched by expert; False: the standard format.
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
    """Experts with FP8 weights (scales per tensor or channel) and FP8 activations (scales per tensor or token)."""

    quantizations = ("fp8",)


class Fp4Experts(_EitherFormat):
    """Experts with MXFP4 or NVFP4 weights and 16-bit activations. The kernel converts the weights to 16 bits.

    The kernel for prepared weights loads permuted rows by TMA. On an H200 this saves 1 to 16 us over gathering, in a
    layer of 16 or 64 tokens.
    """

    quantizations = ("mxfp4", "nvfp4")

    def _gathers(self, expected_rows: Any, arch: str | None, w1_rows: int) -> bool:
        return not self.quant_config.is_prepared


class Fp8RowsFp4Experts(_EitherFormat, _Fp8GemmExperts):
    """Experts with FP8 activations (one scale per 128 elements) and MXFP4 weights prepared for FP8 activations."""

    quantizations = ("mxfp4_fp8",)

    def _gathers(self, expected_rows: Any, arch: str | None, w1_rows: int) -> bool:
        return False


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: _ChosenExperts, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.chosen, name)(*args, **kwargs)

    return functools.wraps(getattr(_GemmExperts, name))(method)


class _ChosenExperts(FusedMoEPermuteExpertsUnpermute):
    """Base class of the experts that forward each call to the class for their quantization."""

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

    supports_chunking = _delegate("supports_chunking")
    supports_expert_map = _delegate("supports_expert_map")
    supports_sorted_tokens = _delegate("supports_sorted_tokens")
    takes_unquantized = _delegate("takes_unquantized")
    finalize_weight_and_reduce_impl = _delegate("finalize_weight_and_reduce_impl")
    workspace_shapes = _delegate("workspace_shapes")
    sorted_workspace_shapes = _delegate("sorted_workspace_shapes")

    def apply(self, *args: Any, **kwargs: Any) -> None:  # not `_delegate`, because a profiler looks for this name
        self.chosen.apply(*args, **kwargs)


class AutoExperts(_ChosenExperts):
    """Experts with weights of any quantization, in the standard format."""


class BatchedAutoExperts(_ChosenExperts):
    """`AutoExperts` in the batched format."""

    use_batched_format = True
