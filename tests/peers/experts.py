"""vLLM's fused experts over cukern's layers: its functions, its modular kernels and their configurations, made thin.

vLLM 0.10.2 says with flags what is quantized, 0.33.0 with a configuration; both become a `Quantization` here. A layer
runs by `cukern.fused_experts`, a batched one by `cukern.fused_moe` with `BatchedAutoExperts`. `NaiveBatchedExperts` is
vLLM's reference in torch, which the batched layer must agree with: here it is the layer of tokens in their own order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch

import cukern
from cukern import fused_moe as layers
from cukern.compat._limits import refuse
from cukern.runtime.activation import ACTIVATIONS

_FP8 = torch.float8_e4m3fn


class Quantization(NamedTuple):
    """What is quantized, and in which groups."""

    dtype: Any = None  # None or torch.float8_e4m3fn
    per_act_token: bool = False
    block_shape: tuple[int, int] | None = None
    scales: Mapping[str, Any] = MappingProxyType({})  # w1_scale, w2_scale, a1_scale and a2_scale, those that there are

    @classmethod
    def of_flags(cls, given: dict[str, Any]) -> Quantization:
        """From the arguments of vLLM 0.10.2."""
        for name, value in given.items():
            if name.startswith(("use_int", "use_mxfp")) and value:
                refuse("fused_experts", name, "False", value)
        per_token = bool(given.get("per_act_token_quant") or given.get("per_channel_quant"))
        dtype = _FP8 if given.get("use_fp8_w8a8") else None
        return cls(dtype, per_token, given.get("block_shape")).with_scales(given)

    @classmethod
    def of_config(cls, config: Any) -> Quantization:
        """From a configuration of vLLM 0.33.0."""
        if config is None:
            return cls()
        for name in ("w1_zp", "w2_zp", "gemm1_clamp_limit", "a1_gscale"):
            if getattr(config, name, None) is not None:
                refuse("fused_experts", name, "None", getattr(config, name))
        if config.quant_dtype not in (None, _FP8, torch.bfloat16, torch.float16):
            refuse("fused_experts", "quant_dtype", "float8_e4m3fn", config.quant_dtype)
        dtype = config.quant_dtype if config.quant_dtype == _FP8 else None
        return cls(dtype, config.per_act_token_quant, config.block_shape).with_scales(vars(config))

    def with_scales(self, given: dict[str, Any]) -> Quantization:
        names = ("w1_scale", "w2_scale", "a1_scale", "a2_scale")
        found = {name: given[name] for name in names if given.get(name) is not None}
        if self.block_shape is not None and tuple(self.block_shape) != (128, 128):
            refuse("fused_experts", "block_shape", "[128, 128]", self.block_shape)
        return self._replace(scales={**self.scales, **{name: self._shaped(name, x) for name, x in found.items()}})

    def _shaped(self, name: str, scale: Any) -> Any:
        """vLLM's scales of a tensor are [experts, 1, 1] too, those of channels [experts, n, 1]."""
        if name.startswith("a"):
            return scale.reshape(1)
        if self.block_shape is not None:
            return scale
        return scale.reshape(scale.shape[0], -1).squeeze(-1) if scale.ndim > 1 else scale

    def config(self) -> layers.FusedMoEQuantConfig:
        if self.dtype is None:
            if self.scales:
                refuse("fused_experts", "w1_scale", "None without FP8", self.scales)
            return layers.FusedMoEQuantConfig()
        blocks = None if self.block_shape is None else (128, 128)
        per_token = self.per_act_token and blocks is None
        return layers.FusedMoEQuantConfig("float8_e4m3fn", per_token, blocks, **self.scales)


def _word(activation: Any) -> str:
    word = str(getattr(activation, "value", activation))
    known = [*ACTIVATIONS, *(f"{name}_no_mul" for name in ACTIVATIONS)]
    if word not in known:
        refuse("fused_experts", "activation", f"one of {', '.join(ACTIVATIONS)}", word)
    return word


def _layer(
    quant: Quantization, x: Any, w1: Any, w2: Any, weights: Any, ids: Any, activation: Any, **options: Any
) -> Any:
    return cukern.fused_experts(x, w1, w2, weights, ids, activation=_word(activation), quant=quant.config(), **options)


def fused_experts(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    inplace: bool = False,
    activation: Any = "silu",
    apply_router_weight_on_input: bool = False,
    quant_config: Any = None,
    expert_map: Any = None,
    global_num_experts: int = -1,
    **given: Any,
) -> Any:
    """vLLM's function, with the flags of 0.10.2 or the configuration of 0.33.0."""
    quant = Quantization.of_flags(given) if quant_config is None else Quantization.of_config(quant_config)
    options = {"expert_map": expert_map, "apply_router_weight_on_input": apply_router_weight_on_input}
    if inplace:
        options["out"] = hidden_states
    return _layer(quant, hidden_states, w1, w2, topk_weights, topk_ids, activation, **options)


def fused_moe_of(fused_topk: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM 0.10.2's `fused_moe`: its gate, and the experts."""

    def fused_moe(
        hidden_states: Any, w1: Any, w2: Any, gating_output: Any, topk: int, renormalize: bool, **given: Any
    ) -> Any:
        weights, ids, _ = fused_topk(hidden_states, gating_output, topk, renormalize)
        return fused_experts(hidden_states, w1, w2, weights, ids, **given)

    # The names of 0.33.0's module, which this function hides: a test of its launcher puts its own kernel there.
    vars(fused_moe).update(
        fused_moe_kernel=None,
        invoke_fused_moe_triton_kernel=refused(
            "invoke_fused_moe_triton_kernel", "config", "left out", "one of Triton's"
        ),
    )
    return fused_moe


# --- vLLM's modular kernels ---------------------------------------------------------------------------


class _Experts:
    """The second part of a kernel, made with the flags of 0.10.2, or with configurations."""

    batched = False

    def __init__(self, *configs: Any, quant_config: Any = None, moe_config: Any = None, **flags: Any) -> None:
        config = quant_config if quant_config is not None else (configs[-1] if configs else None)
        self.quant = Quantization.of_flags(flags) if config is None else Quantization.of_config(config)


class TritonExperts(_Experts):
    """Tokens in their own order."""


class NaiveBatchedExperts(_Experts):
    """vLLM's reference of the batched layer."""


class BatchedTritonExperts(_Experts):
    """Tokens batched by expert."""

    batched = True

    @staticmethod
    def _supports_current_device() -> NoReturn:
        refuse("BatchedTritonExperts", "_supports_current_device", "left out", "a question about vLLM's kernel")

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return bool(_word(activation))


class BatchedPrepareAndFinalize:
    """The first part of a batched kernel."""

    def __init__(self, max_num_tokens: int, num_local_experts: int, num_dispatchers: int, rank: int) -> None:
        if num_dispatchers != 1 or rank != 0:
            refuse("BatchedPrepareAndFinalize", "num_dispatchers", "1", num_dispatchers)
        self.sizes = max_num_tokens, num_local_experts


class FusedMoEKernel:
    """vLLM's kernel of two parts; 0.10.2 calls it, and gives the scales then."""

    def __init__(self, prepare_finalize: Any, fused_experts: _Experts, *_: Any, **__: Any) -> None:
        self.prepare_finalize, self.experts = prepare_finalize, fused_experts

    def apply(
        self,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any = "silu",
        global_num_experts: int = -1,
        expert_map: Any = None,
        apply_router_weight_on_input: bool = False,
        **scales: Any,
    ) -> Any:
        quant = self.experts.quant.with_scales(scales)
        if not self.experts.batched:
            options = {"expert_map": expert_map, "apply_router_weight_on_input": apply_router_weight_on_input}
            return _layer(quant, hidden_states, w1, w2, topk_weights, topk_ids, activation, **options)
        prepare = layers.BatchedPrepareAndFinalize(*self.prepare_finalize.sizes)
        kernel = layers.FusedMoEModularKernel(prepare, layers.BatchedAutoExperts(quant.config()))
        return kernel.forward(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=_word(activation),
            global_num_experts=global_num_experts,
            expert_map=expert_map,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )

    __call__ = apply


def modular_triton_fused_moe(**flags: Any) -> FusedMoEKernel:
    """vLLM 0.10.2's kernel of tokens in their own order."""
    return FusedMoEKernel(None, TritonExperts(**flags))


def invoke_moe_batched_triton_kernel(
    a: Any,
    b: Any,
    c: Any,
    expert_num_tokens: Any,
    compute_type: Any,
    a_scale: Any,
    b_scale: Any,
    b_zp: Any,
    use_fp8_w8a8: bool,
    use_int8_w8a16: bool,
    use_int4_w4a16: bool,
    config: Any,
    per_act_token_quant: bool,
    block_shape: Any = None,
) -> None:
    """vLLM's batched product, by `cukern.moe_gemm_batched`."""
    for name, value in (("use_int8_w8a16", use_int8_w8a16), ("use_int4_w4a16", use_int4_w4a16), ("b_zp", b_zp)):
        if value:
            refuse("invoke_moe_batched_triton_kernel", name, "False", value)
    scales = {}
    if use_fp8_w8a8:
        quant = Quantization(_FP8, per_act_token_quant, block_shape).with_scales({"w1_scale": b_scale})
        # vLLM's scales of rows are [experts, rows, 1], of an expert [experts, 1, 1], of groups [experts, rows, groups].
        rows = a_scale if block_shape is not None else a_scale.reshape(a_scale.shape[0], -1).squeeze(-1)
        scales = {"a_scale": rows, "b_scale": quant.scales["w1_scale"]}
    cukern.moe_gemm_batched(a, b, expert_num_tokens, out=c, **scales)


# --- vLLM's configurations ----------------------------------------------------------------------------


class FusedMoEQuantConfig(SimpleNamespace):
    """vLLM 0.33.0's, as far as the fields are cukern's."""

    @classmethod
    def make(
        cls, quant_dtype: Any = None, per_act_token_quant: bool = False, block_shape: Any = None, **fields: Any
    ) -> FusedMoEQuantConfig:
        given = {"w1_scale": None, "w2_scale": None, "a1_scale": None, "a2_scale": None} | fields
        return cls(quant_dtype=quant_dtype, per_act_token_quant=per_act_token_quant, block_shape=block_shape, **given)


def fp8_w8a8_moe_quant_config(
    w1_scale: Any, w2_scale: Any, per_act_token_quant: bool = False, block_shape: Any = None, **fields: Any
) -> FusedMoEQuantConfig:
    fields.pop("per_out_ch_quant", None)  # w1_scale tells
    return FusedMoEQuantConfig.make(
        _FP8, per_act_token_quant, block_shape, w1_scale=w1_scale, w2_scale=w2_scale, **fields
    )


def refused(function: str, argument: str, wanted: str, got: str) -> Callable[..., NoReturn]:
    """A function of vLLM that prepares what cukern's layers do not take: it says so before the work."""

    def call(*_: Any, **__: Any) -> NoReturn:
        refuse(function, argument, wanted, got)

    return call


def configs() -> dict[str, Any]:
    """The names of `vllm.model_executor.layers.fused_moe.config`."""
    integers = refused("fused_experts", "w1", "of floating-point numbers or of MXFP4, NVFP4", "weights of integers")
    return {
        "FusedMoEQuantConfig": FusedMoEQuantConfig,
        "FUSED_MOE_UNQUANTIZED_CONFIG": FusedMoEQuantConfig.make(),
        "FusedMoEConfig": SimpleNamespace,
        "FusedMoEParallelConfig": SimpleNamespace(make_no_parallel=SimpleNamespace),
        "RoutingMethodType": SimpleNamespace(TopK=1),
        "fp8_w8a8_moe_quant_config": fp8_w8a8_moe_quant_config,
        "int4_w4a16_moe_quant_config": integers,
        "int8_w8a16_moe_quant_config": integers,
    }


#: What of vLLM makes weights that cukern's layers do not take, by module: Marlin's packing, and integers.
UNKNOWN_WEIGHTS = {
    "marlin_utils_fp4": ("rand_marlin_weight_mxfp4_like", "rand_marlin_weight_nvfp4_like"),
    "marlin_utils_fp8": ("marlin_quant_fp8_torch",),
    "marlin_utils_test": ("awq_marlin_quantize", "marlin_quantize"),
    "quant_utils": ("quantize_weights",),
}


def unknown_weights() -> dict[str, dict[str, Any]]:
    """Functions that refuse, by module of `vllm.model_executor.layers.quantization.utils`."""
    wanted = "rows of floating-point numbers, or of MXFP4 or NVFP4 as they are"
    return {
        module: {name: refused("fused_experts", "w1", wanted, f"those of {name}") for name in names}
        for module, names in UNKNOWN_WEIGHTS.items()
    }
