"""The weight formats that `cukern.load` reads: how config.json names them, and the modules that hold them."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import FineGrainedFP8Config
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_utils import local_torch_dtype
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from cukern.formats.quantized import BLOCK
from cukern.formats.weights import UNIT_ROWS
from cukern.integrations.transformers import _experts
from cukern.integrations.transformers._packed import Mxfp4Experts, ScaledExperts, ScaledLinear

READ = "16-bit weights, FP8 (quant_method fp8 or compressed-tensors) and MXFP4 (quant_method mxfp4)"
_METHODS = ("", "fp8", "mxfp4", "compressed-tensors")
_FP4 = "fp4"
_STRATEGIES = ("tensor", "channel", "block")


def quantization_of(config: Any) -> dict[str, Any]:
    """Return the quantization_config of a configuration as a dictionary; empty if it has none."""
    for owner in (config, config.get_text_config(decoder=True)):
        if found := getattr(owner, "quantization_config", None):
            return dict(found) if isinstance(found, Mapping) else found.to_dict()
    return {}


def check(folder: Path, config: Any, quantization: Mapping[str, Any]) -> None:
    """Raise ValueError for a format that `cukern.load` does not read. The message names the format."""
    if found := _refused(config, quantization):
        raise ValueError(f"{folder / 'config.json'} names {found}, and cukern.load reads {READ}")


def _refused(config: Any, quantization: Mapping[str, Any]) -> str:
    method = str(quantization.get("quant_method", ""))
    bits = quantization.get("bits", quantization.get("w_bit"))
    if method not in _METHODS:
        return f"weights of {method.upper()}{f' with {bits} bits' if bits else ''}"
    for owner in (quantization, *(vars(x) for x in (config, config.get_text_config(decoder=True)))):
        if owner.get("expert_dtype", "fp8") == _FP4:
            return "experts of expert_dtype fp4"
    if method == "fp8":
        block, kind = quantization.get("weight_block_size", (BLOCK, BLOCK)), quantization.get("fmt", "e4m3")
        if kind != "e4m3":
            return f"FP8 weights of fmt {kind}"
        if block is not None and tuple(block) != (BLOCK, BLOCK):
            return f"FP8 weights in blocks of {' x '.join(map(str, block))}"
    if method == "compressed-tensors":
        return next(filter(None, map(_refused_group, _groups(quantization))), "")
    return ""


def _groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups: Mapping[str, Any] = quantization.get("config_groups") or {}
    return [group for group in groups.values() if isinstance(group, Mapping)]


def _refused_group(group: Mapping[str, Any]) -> str:
    """Return what a group of layers of compressed-tensors has that is not read; empty for FP8 with FP8 inputs."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if (bits, kind) != (8, "float"):
        return f"compressed-tensors weights of {bits}-bit {kind} (W{bits}A{inputs.get('num_bits', 16)})"
    if strategy not in _STRATEGIES:
        return f"compressed-tensors FP8 weights with scales by {strategy}"
    if strategy == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
        return f"compressed-tensors FP8 weights in blocks of {weights.get('block_structure')}"
    if (inputs.get("num_bits"), inputs.get("type")) != (8, "float"):
        return f"compressed-tensors FP8 weights with inputs of {inputs.get('num_bits', 16)} bits (W8A16)"
    return ""


# --- modules --------------------------------------------------------------------------------------------


def replace_modules(model: Any, quantization: Mapping[str, Any], names: Any, device: torch.device) -> list[Any]:
    """Replace modules of a model on the meta device by modules with packed weights.

    Args:
        model: the model of transformers, with 16-bit weights.
        quantization: the quantization_config.
        names: the names of the checkpoint's tensors.
        device: where the weights will be.

    Returns:
        The conversions of transformers between the checkpoint's tensors and the model's.
    """
    method = quantization.get("quant_method", "")
    if method == "fp8":
        config = FineGrainedFP8Config.from_dict(dict(quantization) | {"dequantize": False})
        quantizer = FineGrainedFP8HfQuantizer(config, pre_quantized=True)
        with local_torch_dtype(model.dtype):  # of biases
            quantizer._process_model_before_weight_loading(model)
        model.hf_quantizer = quantizer  # for save_pretrained
        model.config.quantization_config = config
        update = quantizer.update_weight_conversions
        # Releases before 5.21 take the conversions alone.
        models = [model] if "model" in inspect.signature(update).parameters else []
        found: list[Any] = update(get_model_conversion_mapping(model), *models)
        return found
    if method == "mxfp4":
        _pack_experts(model, names, device)
    if method == "compressed-tensors":
        _scale_layers(model, quantization)
    return [*_with_scales(get_model_conversion_mapping(model), model)]


def _activation_of(experts: Any) -> Any:
    """Find the activation of an experts module on the meta device, by a copy with its weights on the CPU."""
    probe = copy.copy(experts)
    probe._parameters = {name: x if x is None else torch.empty(0) for name, x in experts._parameters.items()}
    matched = _experts.match_activation(probe)
    if not matched.is_fused:
        raise ValueError(
            f"{type(experts).__name__} has packed weights, and its activation is none of fused_experts{matched.why}"
        )
    return matched


def _pack_experts(model: Any, names: Any, device: torch.device) -> None:
    known: dict[type, Any] = {}
    for name, module in list(model.named_modules()):
        if not _experts.is_experts(module) or f"{name}.down_proj" in names:
            continue
        if type(module) not in known:
            known[type(module)] = _activation_of(module)
        matched = known[type(module)]
        if module.down_proj.shape[2] % UNIT_ROWS or module.gate_up_proj.shape[2] % UNIT_ROWS:
            raise ValueError(f"{name} has sizes that are no multiples of {UNIT_ROWS}, which packed MXFP4 weights need")
        model.set_submodule(name, Mxfp4Experts(module, device, matched.activation, matched.options))


def _is_listed(patterns: Any, name: str, module: torch.nn.Module) -> bool:
    """Return whether a list of compressed-tensors has a module: by its name, its class, or a pattern "re:..."."""
    return any(
        re.match(pattern[3:], name) is not None
        if pattern.startswith("re:")
        else pattern in (name, type(module).__name__)
        for pattern in patterns
    )


def _scale_shape(strategy: str, n: int, k: int) -> tuple[int, ...]:
    return {"tensor": (1,), "channel": (n, 1), "block": (-(-n // BLOCK), -(-k // BLOCK))}[strategy]


def _scale_layers(model: Any, quantization: Mapping[str, Any]) -> None:
    ignored = quantization.get("ignore") or ()
    for name, module in list(model.named_modules()):
        is_experts = _experts.is_experts(module)
        if _is_listed(ignored, name, module) or not (is_experts or type(module) is torch.nn.Linear):
            continue
        for group in _groups(quantization):
            # The experts of a checkpoint are linear layers.
            of_layer = torch.nn.Linear(1, 1, device="meta") if is_experts else module
            of_name = f"{name}.0.gate_proj" if is_experts else name
            if not _is_listed(group.get("targets") or (), of_name, of_layer):
                continue
            strategy, inputs = group["weights"]["strategy"], group["input_activations"]
            is_static = not inputs.get("dynamic", False)
            if not is_experts:
                shape = _scale_shape(strategy, *module.weight.shape)
                model.set_submodule(name, ScaledLinear(module, shape, is_static))
                break
            if is_static:
                raise ValueError(f"config.json names static scales of the activations of {name}, which are not read")
            matched = _activation_of(module)
            model.set_submodule(name, ScaledExperts(module, strategy, matched.activation, matched.options))
            break


def _with_scales(conversions: list[Any], model: Any) -> Iterator[Any]:
    """Yield the conversions, and copies that merge the scales of the experts' weights."""
    names = [name for name, _ in model.named_parameters()]
    for conversion in conversions:
        yield conversion
        if not isinstance(conversion, WeightConverter):
            continue
        sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
        if any(re.search(f"{targets[0]}_scale$", name) for name in names):
            from_scales, to_scales = ([f"{x}_scale" for x in patterns] for patterns in (sources, targets))
            made = WeightConverter(from_scales, to_scales, list(conversion.operations))
            made.scope_prefix, made.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
            yield made
