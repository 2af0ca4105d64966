"""Time the activations beside PyTorch's operations, eager and compiled, and gated ones beside SGLang and vLLM."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

#: Tokens and the width of a half: experts of DeepSeek-V3, Qwen3-30B-A3B and Mixtral.
SIZES = ((8192, 2048), (8192, 768), (4096, 14336), (64, 2048), (1, 2048))
#: Tokens and width without a gate: BERT-base (half of 64 x 512 positions valid), BERT-large, one short text.
BIASED = ((16384, 3072), (16384, 4096), (16, 1536))


def by_torch(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    functional = torch.nn.functional

    def run(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        if name == "swigluoai":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        if name == "relu2":
            return functional.relu(gate).square() * up
        if name == "silu":
            return functional.silu(gate) * up
        return functional.gelu(gate, approximate="tanh" if name == "gelu_tanh" else "none") * up

    return run


def _compiled(name: str) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(by_torch(name), dynamic=False)

    return Baseline(load, slow=True)


def _vllm(name: str) -> Callable[..., Any]:
    importlib.import_module("vllm._custom_ops")
    function = getattr(torch.ops._C, f"{name}_and_mul")

    def run(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), x.shape[1] // 2)
        function(out, x)
        return out

    return run


def _peers(name: str, dtype: str) -> dict[str, Baseline]:
    """Return the kernels of vLLM 0.26 and sglang-kernel 0.4. Their swigluoai takes gate and up interleaved: none."""
    if name not in ("silu", "gelu", "gelu_tanh"):
        return {}
    peers = {"vLLM": Baseline(lambda: _vllm(name))}
    if dtype != "float32":
        peers["SGLang"] = Baseline(lambda: getattr(importlib.import_module("sgl_kernel"), f"{name}_and_mul"))
    return peers


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether results are close: PyTorch rounds each step to the dtype of its arguments."""
    return torch.allclose(ours.float(), theirs.float(), rtol=2**-5, atol=2**-5)


def _case(tokens: int, inter: int, name: str, dtype: str, host: bool = False) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, 2 * inter, generator=generator, device=generator.device)
        return (x.to(getattr(torch, dtype)),)

    return Case(
        op="moe_activation",
        case={"tokens": tokens, "inter": inter, "activation": name, "dtype": dtype},
        variant="vector",
        inputs=inputs,
        call=lambda x: cukern.moe_activation(x, name),
        bytes=3 * tokens * inter * ITEM_SIZE[dtype],
        baselines={"torch": Baseline(lambda: by_torch(name)), "torch.compile": _compiled(name)},
        peers=_peers(name, dtype),
        agree=agree,
        host=host,
    )


def _biased(tokens: int, inter: int, name: str = "gelu", dtype: str = "float16") -> Case:
    functional = torch.nn.functional
    approximate = "tanh" if name == "gelu_tanh" else "none"

    def plain(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + bias, approximate=approximate)

    def compiled() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(plain, dynamic=False)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        shapes, device = ((tokens, inter), (inter,)), generator.device
        return tuple(torch.randn(*s, generator=generator, device=device).to(getattr(torch, dtype)) for s in shapes)

    return Case(
        op="bias_gelu",
        case={"tokens": tokens, "inter": inter, "activation": name, "dtype": dtype},
        variant="vector",
        inputs=inputs,
        call=lambda x, bias: cukern.bias_gelu(x, bias, approximate=approximate),
        bytes=2 * tokens * inter * ITEM_SIZE[dtype],
        baselines={"torch": Baseline(lambda: plain), "torch.compile": Baseline(compiled, slow=True)},
        agree=agree,
        host=tokens == 16,
    )


#: Functions with other vLLM names, and their formulas in torch.
_VLLMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mul_and_silu": lambda x: x.chunk(2, -1)[0] * torch.nn.functional.silu(x.chunk(2, -1)[1]),
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def _of_vllm(tokens: int, inter: int, name: str, dtype: str = "bfloat16") -> Case:
    halves = 2 if name == "mul_and_silu" else 1

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        x = torch.randn(tokens, halves * inter, generator=generator, device=generator.device)
        return (x.to(getattr(torch, dtype)),)

    def compiled() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(_VLLMS[name], dynamic=False)

    def vllm() -> Callable[..., Any]:
        importlib.import_module("vllm._custom_ops")
        function = getattr(torch.ops._C, name)

        def run(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty(tokens, inter)
            function(out, x)
            return out

        return run

    return Case(
        op=name,
        case={"tokens": tokens, "inter": inter, "dtype": dtype},
        variant="vector",
        inputs=inputs,
        call=getattr(cukern, name),
        bytes=(halves + 1) * tokens * inter * ITEM_SIZE[dtype],
        baselines={"torch": Baseline(lambda: _VLLMS[name]), "torch.compile": Baseline(compiled, slow=True)},
        peers={"vLLM": Baseline(vllm)},
        agree=agree,
    )


def shrunk(case: Case) -> Case:
    """Return the case with few tokens and columns, for a machine without a GPU."""
    sizes = case.case
    if case.op in _VLLMS:
        return _of_vllm(4, 32, case.op)
    if case.op == "bias_gelu":
        return _biased(4, 32, str(sizes["activation"]), str(sizes["dtype"]))
    return dataclasses.replace(
        _case(min(int(sizes["tokens"]), 4), 32, str(sizes["activation"]), str(sizes["dtype"])), variant=case.variant
    )


def cases() -> list[Case]:
    """Return all cases, the headline first."""
    silu = [_case(tokens, inter, "silu", "bfloat16", host=tokens == 64) for tokens, inter in SIZES]
    others = [_case(*SIZES[0], name, "bfloat16") for name in ("gelu", "gelu_tanh", "swigluoai", "relu2")]
    dtypes = [_case(*SIZES[0], "silu", dtype) for dtype in ("float16", "float32")]
    biased = [_biased(*sizes) for sizes in BIASED]
    more = [_biased(*BIASED[0], "gelu_tanh"), _biased(*BIASED[0], dtype="float32")]
    of_vllm = [_of_vllm(*SIZES[0], name) for name in _VLLMS]
    return [*silu, *others, *dtypes, *biased, *more, *of_vllm]
