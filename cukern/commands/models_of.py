"""Sizes of the models for `cukern compile --for`, by name or from a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from cukern.commands import UserError, is_hub_id, no_directory
from cukern.runtime import arrays

_FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_MXFP4 = {"quant_method": "mxfp4"}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "vocab_size": 129280, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16", "quantization_config": _FP8_BLOCK,
}  # fmt: skip
_QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
_GPT_OSS_20B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
    "max_position_embeddings": 131072, "sliding_window": 128, "attention_bias": True, "torch_dtype": "bfloat16",
    "quantization_config": _MXFP4,
}  # fmt: skip
_LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
#: Maps a model name to checkpoints, and a checkpoint to its configuration with Hugging Face's keys.
NAMED: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek-v3": {"DeepSeek-V3": _DEEPSEEK_V3},
    "qwen3-moe": {
        "Qwen3-30B-A3B": _QWEN3_30B,
        "Qwen3-235B-A22B": {
            **_QWEN3_30B, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536
        },
    },
    "gpt-oss": {"gpt-oss-20b": _GPT_OSS_20B, "gpt-oss-120b": {**_GPT_OSS_20B, "num_local_experts": 128}},
    "llama": {
        "Llama-3.1-8B": _LLAMA_8B,
        "Llama-3.1-70B": {**_LLAMA_8B, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672},
    },
}  # fmt: skip


class Kind(NamedTuple):
    """The facts about a `model_type` that its configuration does not state."""

    has_experts: bool = False
    is_latent: bool = False  # attention over latents, as in DeepSeek-V3
    norms_heads: bool = False  # normalizes heads of queries and keys
    has_sinks: bool = False
    is_biased: bool = False  # biases in the experts
    scoring: str = "softmax"  # of the router
    activation: str = "silu"


KINDS = {
    "llama": Kind(),
    "mistral": Kind(),
    "qwen2": Kind(),
    "qwen3": Kind(norms_heads=True),
    "mixtral": Kind(has_experts=True),
    "qwen3_moe": Kind(has_experts=True, norms_heads=True),
    "gpt_oss": Kind(has_experts=True, has_sinks=True, is_biased=True, activation="swigluoai"),
    "deepseek_v3": Kind(has_experts=True, is_latent=True, scoring="sigmoid"),
    "kimi_k2": Kind(has_experts=True, is_latent=True, scoring="sigmoid"),
}
_DTYPES = tuple(arrays.CUDA_TYPE)


class Model(NamedTuple):
    """The sizes of a model; 0 or None for absent parts."""

    source: str  # name or file, for messages
    kind: Kind
    dtype: str
    quantization: str | None  # "fp8_block", "fp8", "mxfp4"
    hidden: int
    vocab: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int  # of dense layers
    window: int | None
    has_attention_bias: bool
    q_rank: int = 0
    kv_rank: int = 0
    rotary_dim: int = 0
    experts: int = 0
    topk: int = 0
    expert_inter: int = 0
    groups: int = 1
    topk_group: int = 1
    local_experts: int = 0  # per rank


def models_of(wanted: str) -> list[Model]:
    if wanted in NAMED:
        return [_model(config, wanted) for config in NAMED[wanted].values()]
    folder = Path(wanted)
    if not folder.is_dir():
        if is_hub_id(wanted):
            raise no_directory("--for", folder)
        raise UserError(f"--for must be one of {', '.join(NAMED)} or a model's directory, got {wanted!r}")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--for {wanted}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--for {wanted}: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--for {wanted}: {path} must hold an object, got {type(config).__name__}")
    return [_model(config, str(path))]


class _Reader:
    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config, self.source = config, source

    def refuse(self, name: str, wanted: str) -> UserError:
        got = repr(self.config[name]) if name in self.config else "nothing"
        return UserError(f"--for {self.source}: {name} must be {wanted}, got {got}")

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the value of the first key in `names` that exists, a positive integer."""
        name = next((name for name in names if self.config.get(name) is not None), None)
        if name is None and default is not None:
            return default
        value = self.config.get(name or "")
        if type(value) is not int or value < 1:
            raise self.refuse(name or " or ".join(names), "a positive integer")
        return value

    def one_of(self, name: str, value: Any, allowed: tuple[str, ...]) -> str:
        if value not in allowed:
            raise self.refuse(name, f"one of {', '.join(allowed)}")
        return str(value)

    def quantization(self) -> str | None:
        own = self.config.get("quantization_config")
        if own is None:
            return None
        inner = _Reader(own if isinstance(own, dict) else {}, f"{self.source}: quantization_config")
        method = inner.one_of("quant_method", inner.config.get("quant_method"), ("fp8", "mxfp4"))
        block = inner.config.get("weight_block_size")
        if method == "mxfp4" or block is None:
            return method
        if block != [128, 128]:
            raise inner.refuse("weight_block_size", "[128, 128]")
        return "fp8_block"


def _model(config: dict[str, Any], source: str) -> Model:
    read = _Reader(config, source)
    kind = KINDS[read.one_of("model_type", config.get("model_type"), tuple(KINDS))]
    dtype_key = "dtype" if "dtype" in config else "torch_dtype"
    heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    model = Model(
        source,
        kind,
        read.one_of(dtype_key, config.get(dtype_key) or "bfloat16", _DTYPES),
        read.quantization(),
        hidden,
        read.number("vocab_size"),
        read.number("max_position_embeddings"),
        heads,
        read.number("num_key_value_heads", default=heads),
        read.number("head_dim", default=max(hidden // heads, 1)),
        read.number("intermediate_size"),
        None if window is None else read.number("sliding_window"),
        bool(config.get("attention_bias", config["model_type"] == "qwen2")),
    )
    if not kind.is_latent and heads % model.kv_heads:
        raise read.refuse("num_key_value_heads", f"a divisor of the {heads} num_attention_heads")
    if kind.is_latent:
        rotary = read.number("qk_rope_head_dim")
        model = model._replace(
            q_rank=read.number("q_lora_rank"),
            kv_rank=read.number("kv_lora_rank"),
            rotary_dim=rotary,
            head_dim=read.number("qk_nope_head_dim") + rotary,
            kv_heads=1,
        )
    if kind.has_experts:
        experts = read.number("n_routed_experts", "num_experts", "num_local_experts")
        model = model._replace(
            experts=experts,
            local_experts=experts,
            topk=read.number("num_experts_per_tok"),
            expert_inter=read.number("moe_intermediate_size", "intermediate_size"),
            groups=read.number("n_group", default=1),
            topk_group=read.number("topk_group", default=1),
        )
    return model
