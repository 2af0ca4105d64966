"""The seam "experts": the classes that vLLM's modular kernel runs, and the choice of them.

vLLM chooses an experts class per layer. For FP8, vLLM asks each class of a backend whether it supports the layer, so
`install_seam` adds a class to a backend. For 16-bit weights and MXFP4, `install_seam` replaces the function that
chooses, in the module that imports it by name. The reasons: with LoRA, vLLM takes the first class of a backend without
a question; and the backend decides how vLLM converts MXFP4 weights. vLLM's own function chooses if the class of this
module does not support the layer.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import fp8
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp4Static,
)
from vllm.platforms import current_platform

import cukern
from cukern.formats.fused_moe import FusedMoEQuantConfig
from cukern.formats.weights import rows_of_weights
from cukern.integrations.vllm import install, report, say
from cukern.integrations.vllm._limits import CAPABILITY, why_not_sizes
from cukern.runtime import activation as activations

_STANDARD = mk.FusedMoEActivationFormat.Standard


class _Experts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Base class of the experts, which `cukern.fused_experts` computes in one call.

    `apply` reduces over the experts of a token and writes `output` last. vLLM's `workspace13` is the memory of
    `output`, so the class asks for no workspaces: `fused_experts` allocates its own from torch's allocator, which CUDA
    graphs keep in their memory pool.
    """

    what: ClassVar[str]  # a key of `UNITS`
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self.quant = self.make_quant()

    def make_quant(self) -> FusedMoEQuantConfig:
        """Return the number formats and scales for `cukern.fused_experts`."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        # The kernel that permutes the rows also quantizes them.
        return True

    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        why = cls.why_not(moe_config)
        if why is None:
            _, why = mk.FusedMoEExpertsModular.is_supported_config(
                cls, moe_config, weight_key, activation_key, activation_format
            )
        sizes = f"{moe_config.num_experts} of {moe_config.hidden_dim} x {moe_config.intermediate_size_per_partition}"
        what = cls.what if cls._supports_quant_scheme(weight_key, activation_key) else "otherwise quantized"
        report("experts", f"{what} experts, {sizes}", why)
        return why is None, why

    @classmethod
    def why_not(cls, moe_config: Any) -> str | None:
        """Return why the class does not run a layer, for the reasons that vLLM's own check does not know."""
        if moe_config.moe_backend != "auto":
            return f"moe_backend={moe_config.moe_backend} is asked for by name"
        if moe_config.moe_parallel_config.ep_size > 1:
            return f"ep_size is {moe_config.moe_parallel_config.ep_size}, and expert parallelism is not tested"
        if moe_config.in_dtype not in cls.dtypes:
            return f"the dtype is {moe_config.in_dtype}"
        if why := why_not_sizes(cls.what, moe_config.hidden_dim, moe_config.intermediate_size_per_partition):
            return why
        if moe_config.activation == MoEActivation.SILU and moe_config.swiglu_limit is not None:
            return f"silu has the limit {moe_config.swiglu_limit}"
        return None

    @staticmethod
    def activation_format() -> Any:
        return _STANDARD

    @staticmethod
    def _supports_current_device() -> bool:
        return bool(current_platform.is_device_capability(CAPABILITY))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return moe_parallel_config.ep_size == 1 and not moe_parallel_config.use_all2all_kernels

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        return (0,), (0,), (M, K)

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
        global_num_experts: int, expert_map: Any, a1q_scale: Any, a2_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        if apply_router_weight_on_input:
            # vLLM's `prepare` has multiplied the input by the weights.
            topk_weights = torch.ones_like(topk_weights)
        # A model's own router may give weights of 16 bits.
        cukern.fused_experts(
            hidden_states, w1, w2, topk_weights.float(), topk_ids, activation=activation.value, quant=self.quant,
            expert_map=expert_map, out=output,
        )  # fmt: skip


class CukernBf16Experts(_Experts):
    """Experts with weights of 16 bits: w1 [experts, 2 * inter, hidden] and w2 [experts, hidden, inter]."""

    what = "16-bit"

    def make_quant(self) -> FusedMoEQuantConfig:
        # vLLM's activation of this name takes gates and ups in turn, as in gpt-oss.
        interleaved = self.moe_config.activation == MoEActivation.SWIGLUOAI
        return FusedMoEQuantConfig(w1_bias=self.w1_bias, w2_bias=self.w2_bias, gemm1_interleaved=interleaved)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (None, None)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in (
            MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH, MoEActivation.SWIGLUOAI,
        )  # fmt: skip


class CukernFp8BlockExperts(_Experts):
    """Experts with FP8 weights, one scale per block of 128 x 128, and FP8 activations, one scale per 128 elements."""

    what = "FP8 block"

    def make_quant(self) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make(
            "fp8_block", w1_scale=self.w1_scale, w2_scale=self.w2_scale, w1_bias=self.w1_bias, w2_bias=self.w2_bias
        )

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SILU)


class CukernMxfp4Experts(_Experts):
    """Experts with MXFP4 weights, prepared by `cukern.prepare_weights`, and 16-bit activations, as in gpt-oss."""

    what = "MXFP4"
    dtypes = (torch.bfloat16,)  # the dtype of the biases

    def make_quant(self) -> FusedMoEQuantConfig:
        alpha, limit = self.quant_config.gemm1_alpha, self.quant_config.gemm1_clamp_limit
        return FusedMoEQuantConfig.mxfp4(
            w1_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            gemm1_alpha=activations.ALPHA if alpha is None else alpha,
            gemm1_clamp_limit=activations.LIMIT if limit is None else limit,
            gemm1_interleaved=True,
        )

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) == (kMxfp4Static, None)

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(activation == MoEActivation.SWIGLUOAI)

    def moe_problem_size(self, a1: Any, w1: Any, w2: Any, topk_ids: Any) -> tuple[int, int, int, int, int]:
        return w1.shape[0], a1.shape[0], rows_of_weights(w1), a1.shape[1], topk_ids.shape[1]


def prepare_in_place(weight: Any, scale: Any) -> None:
    """Replace the data of MXFP4 weights by prepared weights, which contain the scales, and empty the scales.

    Args:
        weight: a parameter, uint8 [experts, n, k / 2], as in the checkpoint.
        scale: a parameter, uint8 [experts, n, k / 32].
    """
    weight.data = cukern.prepare_weights(weight.data.contiguous(), scale.data.contiguous())
    scale.data = scale.data.new_empty(0)


def _choose_bf16(stock: Any) -> Any:
    @functools.wraps(stock)
    def choose(moe_config: Any) -> Any:
        if CukernBf16Experts.is_supported_config(CukernBf16Experts, moe_config, None, None, _STANDARD)[0]:
            return UnquantizedMoeBackend.TRITON, CukernBf16Experts  # vLLM does not convert the weights of this backend
        return stock(moe_config)

    return choose


def _classes_of_fp8(stock: Any) -> Any:
    @functools.wraps(stock)
    def classes(backend: Any) -> Any:
        # vLLM takes the first class of a backend that supports the layer, and does not convert the weights of TRITON.
        own = [CukernFp8BlockExperts] if backend is fp8.Fp8MoeBackend.TRITON else []
        return [*own, *stock(backend)]

    return classes


def _choose_mxfp4(stock: Any) -> Any:
    @functools.wraps(stock)
    def choose(config: Any, activation_key: Any = None) -> Any:
        if CukernMxfp4Experts.is_supported_config(CukernMxfp4Experts, config, kMxfp4Static, activation_key, _STANDARD)[
            0
        ]:
            # vLLM does not pad the weights of this backend, and gives it 16-bit activations. CUDA has no use for it.
            return Mxfp4MoeBackend.CPU, CukernMxfp4Experts
        return stock(config, activation_key)

    return choose


def _convert_mxfp4(stock: Any) -> Any:
    @functools.wraps(stock)
    def convert(
        mxfp4_backend: Any, layer: Any, w13_weight: Any, w2_weight: Any, w13_weight_scale: Any, w2_weight_scale: Any,
        w13_bias: Any = None, w2_bias: Any = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        tensors = w13_weight, w2_weight, w13_weight_scale, w2_weight_scale, w13_bias, w2_bias
        if mxfp4_backend is not Mxfp4MoeBackend.CPU:
            return stock(mxfp4_backend, layer, *tensors, *args, **kwargs)
        most = max(x.numel() + s.numel() for x, s in ((w13_weight, w13_weight_scale), (w2_weight, w2_weight_scale)))
        for weight, scale in ((w13_weight, w13_weight_scale), (w2_weight, w2_weight_scale)):
            prepare_in_place(weight, scale)
        say(f"cukern experts: prepares MXFP4 weights a tensor at a time, with {most / 2**20:.0f} MiB more at the peak")
        return tensors

    return convert


def install_seam() -> None:
    say(f"cukern {cukern.__version__} experts: offers 16-bit, FP8 block and MXFP4 experts without expert parallelism")
    install(unquantized_fused_moe_method, "select_unquantized_moe_backend", _choose_bf16)
    install(fp8, "backend_to_kernel_cls", _classes_of_fp8)
    install(mxfp4, "select_mxfp4_moe_backend", _choose_mxfp4)
    install(mxfp4, "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format", _convert_mxfp4)
