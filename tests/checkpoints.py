"""Tiny checkpoints in the formats of published models, and the references that their weights stand for.

A reference is the stock model of transformers with dequantized weights in float32. With FP8 weights, its layers
quantize their inputs as `fp8_linear` of transformers does (in groups of 128), or as vLLM does (by rows, or by a scale).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Quantize = Callable[[torch.Tensor], torch.Tensor]
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
#: One layer of heads with a dense MLP, and one with experts. `kv_a_proj_with_mqa` has a partial block of rows.
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64, "v_head_dim": 64, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96, "sliding_window": 12}


def random_stock(model_type: str, **sizes: Any) -> Any:
    """Make a stock model in float32 whose weights have the values of bfloat16."""
    config = AutoConfig.for_model(model_type, **SIZES | sizes)
    config._experts_implementation_internal = "eager"
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            if x.is_floating_point() and "inv_freq" not in name:
                around, spread = (1.0, 0.1) if x.dim() == 1 and "norm" in name else (0.0, x.shape[-1] ** -0.5)
                # Then few pairs of tokens are nearly as good, and another expert of a near tie changes few tokens.
                spread *= 3 if "lm_head" in name else 0.3 if "down_proj" in name else 1
                x.copy_((torch.randn(x.shape, generator=generator) * spread + around).bfloat16())
    return model


# --- formats --------------------------------------------------------------------------------------------


def fp8_by(w: torch.Tensor, shape: str, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights [n, k] with a scale per "block", "channel" or "tensor".

    Return the FP8 weights, the scales and the dequantized weights.
    """
    n, k = w.shape
    rows, columns = {"block": (128, 128), "channel": (1, k), "tensor": (n, k)}[shape]
    padded = F.pad(w, (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:n, :k]
    q = (w / wide).to(FP8)
    return q, scale, q.float() * wide


def mxfp4_of(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights [..., n, k] to MXFP4. Return blocks [..., n, k / 32, 16], scales and the values."""
    groups = w.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-6))) - 2
    scaled = groups / torch.exp2(exponent)
    code = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    values = (_E2M1[code] * scaled.sign() * torch.exp2(exponent)).flatten(-2)
    code = (code + 8 * (scaled < 0)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent[..., 0] + 127).to(torch.uint8), values


def by_groups(x: torch.Tensor) -> torch.Tensor:
    """Quantize rows to FP8 in groups of 128, and dequantize."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(FP8).float() * scale).flatten(-2).to(x.dtype)


def by_rows(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1 / 512) / 448
    return ((x.float() / scale).to(FP8).float() * scale).to(x.dtype)


def by_scale(scale: float) -> Quantize:
    """Return a function that quantizes to FP8 with a static scale, and dequantizes."""
    return lambda x: ((x.float() / scale).clamp(-448, 448).to(FP8).float() * scale).to(x.dtype)


# --- references -----------------------------------------------------------------------------------------


def _experts_forward(module: Any, quantize: Quantize) -> Any:
    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(len(module.down_proj)):
            rows, slots = torch.where(ids == expert)
            inner = module._apply_gate(F.linear(quantize(x[rows]), module.gate_up_proj[expert]))
            own = F.linear(quantize(inner), module.down_proj[expert])
            out.index_add_(0, rows, (own * weights[rows, slots, None]).to(out.dtype))
        return out

    return forward


@dataclass
class Checkpoint:
    """A checkpoint, and the stock model with its dequantized weights."""

    folder: Path
    stock: Any
    tensors: dict[str, torch.Tensor]
    quantization: dict[str, Any]
    quantized: dict[str, Quantize] = field(default_factory=dict)  # the inputs of a module

    def reference(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the stock model in `dtype`, whose layers with FP8 weights quantize their inputs."""
        model = copy.deepcopy(self.stock).to(dtype)
        for name, quantize in self.quantized.items():
            module = model.get_submodule(name)
            if isinstance(module, torch.nn.Linear):
                module.forward = lambda x, m=module, q=quantize: F.linear(q(x), m.weight, m.bias)
            else:
                module.forward = _experts_forward(module, quantize)
        return model

    def write(self, files: int = 1) -> Path:
        """Write config.json and the tensors, distributed over `files` files."""
        config = self.stock.config.to_dict() | {"dtype": "bfloat16", "architectures": [type(self.stock).__name__]}
        if self.quantization:
            config["quantization_config"] = self.quantization
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(config))
        names = sorted(self.tensors)
        parts = [names[i::files] for i in range(files)]
        if files == 1:
            save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})
            return self.folder
        where = {}
        for i, part in enumerate(parts, 1):
            file = f"model-{i:05d}-of-{files:05d}.safetensors"
            save_file({name: self.tensors[name] for name in part}, self.folder / file, {"format": "pt"})
            where.update(dict.fromkeys(part, file))
        (self.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return self.folder


def _write_back(model: Any, name: str, values: torch.Tensor) -> None:
    """Write a weight of a checkpoint into the stock model, which merges the experts of a layer."""
    module = model.get_submodule(_module_of(name))
    if isinstance(module, torch.nn.Linear):
        module.weight.copy_(values)
        return
    expert, projection = re.findall(r"experts\.(\d+)\.(\w+)", name)[0]
    if projection == "down_proj":
        module.down_proj[int(expert)] = values
    else:
        halves = module.gate_up_proj[int(expert)].chunk(2)
        halves[projection == "up_proj"].copy_(values)


def _state(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names of a checkpoint."""
    state: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
    return {name: x for name, x in state.items() if not (name == "lm_head.weight" and model.config.tie_word_embeddings)}


def _module_of(name: str) -> str:
    """Return the module of a weight of a checkpoint. The experts of a layer are one module."""
    name = name.removesuffix(".weight")
    return name.split(".experts.")[0] + ".experts" if ".experts." in name else name


def _is_linear(model: Any, name: str) -> bool:
    if not name.endswith(".weight"):
        return False
    return ".experts." in name or isinstance(model.get_submodule(_module_of(name)), torch.nn.Linear)


def _unquantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors in bfloat16, except a bias that DeepSeek-V3 keeps in float32."""
    return {name: x.clone() if "e_score_correction" in name else x.bfloat16() for name, x in tensors.items()}


def fp8(
    folder: Path, model_type: str, *, by: str = "block", scale_fmt: str = "", static: bool = False, **sizes: Any
) -> Checkpoint:
    """Make a checkpoint of quant_method fp8, with scales by "block" or "tensor".

    The first layer's `o_proj` is not converted.
    """
    stock = random_stock(model_type, **sizes)
    tensors = _unquantized(_state(stock))
    kept = ["lm_head", "model.layers.0.self_attn.o_proj"]
    quantization: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128] if by == "block" else None,
        "modules_to_not_convert": kept,
        "activation_scheme": "static" if static else "dynamic",
    } | ({"scale_fmt": scale_fmt} if scale_fmt else {})  # fmt: skip
    made = Checkpoint(folder, stock, tensors, quantization)
    with torch.no_grad():
        for name, x in _state(stock).items():
            module = _module_of(name)
            if not _is_linear(stock, name) or module in kept:
                continue
            q, scale, values = fp8_by(x, by, bool(scale_fmt))
            scale = scale if by == "block" else scale.reshape(())
            _write_back(stock, name, values)
            tensors[name], tensors[f"{name}_scale_inv"] = q, scale.to(E8M0) if scale_fmt else scale
            made.quantized[module] = by_groups if by == "block" else by_rows
            if static:
                tensors[f"{name.removesuffix('.weight')}.activation_scale"] = torch.tensor(0.05)
                made.quantized[module] = by_scale(0.05)
    return made


def mxfp4(folder: Path, **sizes: Any) -> Checkpoint:
    """Make a checkpoint of gpt-oss."""
    stock = random_stock("gpt_oss", **GPT_OSS | sizes)
    tensors = _unquantized(_state(stock))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    made = Checkpoint(folder, stock, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
    with torch.no_grad():
        for name, x in stock.state_dict().items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                blocks, scales, values = mxfp4_of(x.transpose(1, 2))
                x.copy_(values.transpose(1, 2))
                del tensors[name]
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    return made


def compressed(
    folder: Path, strategy: str, model_type: str = "llama", static: bool = False, **sizes: Any
) -> Checkpoint:
    """Make a checkpoint of compressed-tensors, with FP8 weights."""
    stock = random_stock(model_type, **sizes)
    tensors = _unquantized(_state(stock))
    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
    }
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor" if static else "token", "dynamic": not static}
    quantization = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", r"re:.*layers\.0\.self_attn\.q_proj"],
    }  # fmt: skip
    made = Checkpoint(folder, stock, tensors, quantization)
    with torch.no_grad():
        for name, x in _state(stock).items():
            module = _module_of(name)
            if not _is_linear(stock, name) or module in ("lm_head", "model.layers.0.self_attn.q_proj"):
                continue
            q, scale, values = fp8_by(x, strategy)
            tensors[name], tensors[f"{name}_scale"] = q, scale
            if strategy == "tensor":
                tensors[f"{name}_scale"] = scale.reshape(1)
            elif strategy == "channel":  # scales of 16 bits
                tensors[f"{name}_scale"] = scale.bfloat16()
                values = q.float() * scale.bfloat16().float()
            _write_back(stock, name, values)
            made.quantized[module] = by_groups if strategy == "block" else by_rows
            if static:
                tensors[f"{name.removesuffix('.weight')}.input_scale"] = torch.tensor([0.05])
                made.quantized[module] = by_scale(0.05)
    return made
