"""Well-known configurations, for models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from cukern.runtime import check

_QWEN3_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
#: All entries except "model_type" are arguments of the configuration class.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _QWEN3_MOE,
    "qwen3-30b-a3b-12-layers": _QWEN3_MOE | {"num_hidden_layers": 12},
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "tiny": _QWEN3_MOE | {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 2048,
    },
}  # fmt: skip


def configuration(name: str) -> PreTrainedConfig:
    """Return the configuration of the directory `name` if it has a config.json, otherwise `SHAPES[name]`."""
    if Path(name, "config.json").is_file():
        return AutoConfig.from_pretrained(name)
    if name not in SHAPES:
        check.fail("config", f"one of {', '.join(SHAPES)}, or a directory with a config.json", name)
    sizes = dict(SHAPES[name])
    return AutoConfig.for_model(sizes.pop("model_type"), bos_token_id=None, eos_token_id=None, **sizes)


@torch.no_grad()
def random_model(
    config: PreTrainedConfig, *, dtype: torch.dtype = torch.bfloat16, device: Any = "cuda", seed: int = 0
) -> Any:
    """Make a model with random weights, scaled so that hidden states have a magnitude of about 1."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if not x.is_floating_point():
            x.zero_()
        elif x.dim() == 1:
            x.fill_(1.0 if "norm" in name else 0.0)
        else:
            x.normal_(0, x.shape[-1] ** -0.5, generator=generator)
    _restore_angles(model, device)
    model.tie_weights()
    return model


def _restore_angles(model: Any, device: Any) -> None:
    """Recreate the rotary embedding modules, because their buffers are not in a checkpoint."""
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config"):
                setattr(owner, name, type(module)(module.config).to(device))
