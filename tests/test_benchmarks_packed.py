"""The benchmark of models with packed weights, in sizes for the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cukern.integrations.transformers as ck
from benchmarks import packed_models
from tests import checkpoints

SMALL: dict[str, Any] = {
    "gpt-oss-20b": checkpoints.SIZES | checkpoints.GPT_OSS,
    "qwen3-30b-a3b": checkpoints.SIZES | checkpoints.MOE,
}


@pytest.mark.filterwarnings("ignore:the model is on the CPU", "ignore:.*generation flags.*")
@pytest.mark.parametrize("name", packed_models.MODELS)
def test_a_random_checkpoint_is_measured(name: str, tmp_path: Path) -> None:
    sizes, quantization = packed_models.MODELS[name]
    small = {k: v for k, v in SMALL[name].items() if not k.endswith("_token_id")}
    packed_models.write_checkpoint(sizes | small, quantization, tmp_path, "cpu")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    own = "experts.gate_up_proj_blocks" if "gpt" in name else "experts.7.up_proj.weight_scale_inv"
    assert names[f"model.layers.1.mlp.{own}"] == "model-1.safetensors"
    with torch.no_grad():
        logits = ck.load(tmp_path)(input_ids=torch.arange(12)[None]).logits.float()
    assert 0.05 < logits.std() < 20
    found = list(packed_models.rows(name, tmp_path, "cpu", batches=(1, 3), length=5, prefill=(2, 6), runs=1))
    assert [x["phase"] for x in found] == ["load", "step", "step", "prefill"]
    assert all(x.get("us", x.get("s")) > 0 for x in found)
    assert found[1]["captured"] is False and found[1]["why"] == "the model is on the CPU"
