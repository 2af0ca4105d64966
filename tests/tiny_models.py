"""Tiny random models of every class of transformers that takes an experts implementation."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import torch
import transformers

_MODELS = Path(transformers.__file__).parent / "models"
_DECORATED = re.compile(r"^@use_experts_implementation.*?^class (\w+)", re.MULTILINE | re.DOTALL)

#: Numbers of a configuration that are small, by their names.
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16, "ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "expert_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16, "dense_intermediate_size": 24, "mlp_dim": 24, "dim": 32,
    "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "num_experts_per_token": 2,
    "n_group": 2, "topk_group": 1, "num_group": 2, "moe_topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "qk_head_dim": 16, "v_head_dim": 16, "max_position_embeddings": 128, "sliding_window": 12, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_head_dim": 8, "linear_num_heads": 4,
    "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_state": 8,
    "ssm_state_size": 8, "mamba_n_groups": 1, "n_groups": 1, "mamba_chunk_size": 8, "chunk_size": 8, "mamba_dt_rank": 4,
    "global_head_dim": 8, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8, "depth": 1, "out_hidden_size": 32, "num_heads": 4, "embed_dim": 32,
    "o_lora_rank": 8, "o_groups": 2, "hc_mult": 2, "attention_k_eq_v": False, "unpadded_vocab_size": 96,
}  # fmt: skip
#: What some configurations need besides, by the folder of their model.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
OF_MODEL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_HYBRID, "mlp_layer_types": ["dense", "sparse"]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.5,
        }
    },
    "glm5_next": {"qk_rope_head_dim": 0, "head_dim": 0, "mlp_layer_types": ["dense", "sparse"], **_HYBRID},
    "granitemoehybrid": _HYBRID,
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": {**_HYBRID, "mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "qwen3_5_moe": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp": {
        **_HYBRID,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
#: Models of texts and images whose text part is made alone: the other parts would take most of the time.
TEXT_ALONE = {
    "deepseek_ocr2", "dots3_note", "ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "mistral_large4", "muse_spark",
    "qwen3_omni_moe",
}  # fmt: skip


def experts_classes() -> list[tuple[str, str]]:
    """(folder, class) of all classes that transformers decorates with `use_experts_implementation`."""
    found = []
    for file in sorted(_MODELS.glob("*/modeling_*.py")):
        found += [(file.parent.name, name) for name in _DECORATED.findall(file.read_text())]
    return found


def _accepted(config_class: Any) -> set[str]:
    """The names that a configuration takes, its parents' and those of its attribute map too."""
    names: set[str] = set()
    for owner in config_class.__mro__:
        names |= set(getattr(owner, "__annotations__", {}))
        if "__init__" in owner.__dict__:
            names |= set(inspect.signature(owner.__init__).parameters)
    return names | set(getattr(config_class, "attribute_map", {}))


def small(config_class: Any, folder: str) -> dict[str, Any]:
    """The arguments of a small configuration."""
    names = _accepted(config_class)
    made = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # each head has its own keys, made of the latents
        made["num_key_value_heads"] = made["num_attention_heads"]
    for name, own in (getattr(config_class, "sub_configs", None) or {}).items():
        if hasattr(own, "model_type") and own.__name__ != "AutoConfig":
            made[name] = small(own, folder)
    own = OF_MODEL.get(folder, {})
    return {**made, **{name: value for name, value in own.items() if name in names}}


def model_class(folder: str, experts: str) -> Any:
    """The smallest class of a model with a head that has these experts."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    classes = [x for _, x in inspect.getmembers(module, inspect.isclass) if x.__module__ == module.__name__]
    models = [x for x in classes if issubclass(x, transformers.PreTrainedModel) and x.config_class is not None]
    prefix = re.sub(r"(Text)?(Moe|MoE)?Experts$|Experts$", "", experts)
    heads = ("TextModel",) if folder in TEXT_ALONE else ("ForConditionalGeneration",)
    suffixes = "ForCausalLM", *heads, "ForTokenClassification", "Model"
    # Of a module of several models, those whose name begins as that of the experts does come first.
    for begin, wanted in [*itertools.product([prefix], suffixes), *itertools.product([""], suffixes)]:
        if found := [x for x in models if x.__name__.startswith(begin) and x.__name__.endswith(wanted)]:
            return min(found, key=lambda x: len(x.__name__))
    raise LookupError(f"{folder} has no model")


def tiny(folder: str, experts: str) -> Any:
    """A model with these experts, small, with random numbers, in float32 on the CPU."""
    made = model_class(folder, experts)
    config = made.config_class(**small(made.config_class, folder))
    config._attn_implementation_internal = "eager"
    torch.manual_seed(0)
    model = made(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if x.is_floating_point() and "inv_freq" not in name and x.dim() > 0:
            spread = 0.3 if x.dim() > 1 else 0.05
            around = x.data if x.dim() == 1 else 0
            x.data.copy_(around + torch.randn(x.shape, generator=generator) * spread * (0.5 if x.dim() > 1 else 1))
    return model
