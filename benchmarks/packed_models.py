"""Time models with packed weights: load a random checkpoint in its own format, then run prefills and steps.

    python -m benchmarks.packed_models gpt-oss-20b --json FILE

A row is a dictionary: the seconds to load files in the page cache, the GiB of GPU memory after it, or the microseconds
of a step over a cache of 1024 tokens or of a prefill (the median of the runs, by the wall clock).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

import cukern.integrations.transformers as ck
from benchmarks.bench_transformers import Models, _our_step
from cukern.integrations.transformers import _formats, _load, _shapes

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
#: By name: the configuration, and the quantization of the checkpoint. The default configuration of gpt_oss has the
#: sizes of gpt-oss-120b.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-oss-20b": ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}, _MXFP4),
    "qwen3-30b-a3b": (_shapes.SHAPES["qwen3-30b-a3b"], _FP8),
}
LENGTH, BATCHES, PREFILL = 1024, (1, 16, 64), (16, 1024)
_RUNS, _WARM_UP = 32, 4


def _random(name: str, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers for a tensor of a checkpoint, so that hidden states have a magnitude of about 1."""
    device = generator.device
    if x.dtype == torch.uint8:
        low, high = (116, 122) if name.endswith("_scales") else (0, 256)
        return torch.randint(low, high, x.shape, generator=generator, device=device, dtype=torch.uint8)
    numbers = torch.randn(x.shape, generator=generator, device=device)
    if x.dtype == torch.float8_e4m3fn:
        return (numbers * 100).clamp(-448, 448).to(x.dtype)
    if name.endswith("_scale_inv"):
        return torch.rand(x.shape, generator=generator, device=device) / 2000
    if x.dim() == 1:
        return torch.full_like(numbers, 1.0 if "norm" in name else 0.0).to(x.dtype)
    return (numbers * x.shape[-1] ** -0.5).to(x.dtype)


def write_checkpoint(sizes: dict[str, Any], quantization: dict[str, Any], folder: Path, device: Any) -> None:
    """Write a checkpoint with random weights, with a file for each layer."""
    sizes = dict(sizes)
    config = AutoConfig.for_model(sizes.pop("model_type"), bos_token_id=None, eos_token_id=None, **sizes)
    model = _load._empty_model(config, torch.bfloat16)
    conversions = _formats.replace_modules(model, quantization, (), torch.device(device))
    model._weight_conversions = [x for x in conversions if isinstance(x, WeightConverter)]
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, x in model.state_dict().items():
        layer = name.split(".layers.")[1].split(".")[0] if ".layers." in name else "others"
        parts.setdefault(layer, {})[name] = x
    generator, where = torch.Generator(device).manual_seed(0), {}
    for layer, part in parts.items():
        made = {name: _random(name, x, generator) for name, x in part.items()}
        tensors = {name: x.contiguous().cpu() for name, x in revert_weight_conversion(model, made).items()}
        save_file(tensors, folder / f"model-{layer}.safetensors", {"format": "pt"})
        where.update(dict.fromkeys(tensors, f"model-{layer}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    named = {"architectures": [type(model).__name__], "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | named))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_us(run: Callable[[], Any], device: torch.device, runs: int) -> float:
    times = []
    for i in range(_WARM_UP + runs):
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        times += [time.perf_counter() - begin] * (i >= _WARM_UP)
    return statistics.median(times) * 1e6


def rows(name: str, folder: Path, device: Any, batches: tuple[int, ...] = BATCHES, length: int = LENGTH,
         prefill: tuple[int, int] = PREFILL, runs: int = _RUNS) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Load a checkpoint, and yield the rows of its measurements."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of the writing of the checkpoint
    begin = time.perf_counter()
    model = ck.load(folder, device=device)
    _synchronize(device)
    row: dict[str, Any] = {"model": name, "phase": "load", "s": time.perf_counter() - begin}
    if device.type == "cuda":
        row["gib"] = torch.cuda.memory_allocated(device) / 2**30
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    yield row
    made = Models(name, model, model)
    for batch in batches:
        step = _our_step(made, batch, length)
        us = _median_us(step, device, runs)
        session = next(iter(model.__dict__["_cukern"].sessions.values()))
        graph = {"captured": session.captures, "why": session.why}
        yield {"model": name, "phase": "step", "batch": batch, "length": length, "us": us, **graph}
    ids = torch.randint(model.config.vocab_size, prefill, device=device)

    @torch.no_grad()
    def run() -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

    us = _median_us(run, device, max(runs // 8, 1))
    yield {"model": name, "phase": "prefill", "batch": prefill[0], "length": prefill[1], "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="append the rows to this file, one a line")
    args = parser.parse_args()
    sizes, quantization = MODELS[args.model]
    if args.layers is not None:
        sizes = sizes | {"num_hidden_layers": args.layers}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(sizes, quantization, Path(folder), args.device)
        for row in rows(args.model, Path(folder), args.device):
            print(json.dumps(row), flush=True)
            if args.json is not None:
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
