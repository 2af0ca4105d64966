"""A layer as the driver gets it, on a GPU that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.formats.fused_moe import FusedMoEQuantConfig
from cukern.fused_moe import AutoExperts, FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, launches, layer
from cukern.fused_moe import modular_kernel as modular
from cukern.runtime.decisions import Decisions
from tests.pretended import Launch, PretendedGPU, pretended  # noqa: F401

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
EXPERTS, INTER, HIDDEN, TOPK = 8, 256, 512, 2


def weights_of(quant: str | None, inter: int = INTER, per_channel: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """w1, w2 and the arguments of a quantization."""
    sizes = (2 * inter, HIDDEN), (HIDDEN, inter)
    if quant in ("mxfp4", "nvfp4"):
        w1, w2 = (torch.zeros(EXPERTS, n, k // 2, dtype=torch.uint8) for n, k in sizes)
        group = 32 if quant == "mxfp4" else 16
        scales = [torch.zeros(EXPERTS, n, k // group, dtype=torch.uint8) for n, k in sizes]
    elif quant in ("prepared", "mxfp4_fp8"):
        unit, size = (128, 544) if quant == "mxfp4_fp8" else (64, 272)
        w1, w2 = (torch.zeros(EXPERTS, n // 8, k // unit, size, dtype=torch.uint8) for n, k in sizes)
        return w1, w2, {"quant": "mxfp4_fp8" if quant == "mxfp4_fp8" else "mxfp4"}
    else:
        w1, w2 = (torch.zeros(EXPERTS, n, k, dtype=BF16 if quant is None else E4M3) for n, k in sizes)
        if quant is None:
            return w1, w2, {}
        shapes = [(EXPERTS, n // 128, k // 128) if quant == "fp8_block" else (EXPERTS,) for n, k in sizes]
        scales = [torch.ones(shape) for shape in shapes]
    given = {"quant": quant, "w1_scale": scales[0], "w2_scale": scales[1]}
    if quant == "nvfp4":
        given |= {"w1_global_scale": torch.ones(EXPERTS), "w2_global_scale": torch.ones(EXPERTS)}
    return w1, w2, given


def call(tokens: int, w1: Any, w2: Any, topk: int = TOPK, **given: Any) -> Any:
    x = torch.zeros(tokens, HIDDEN, dtype=BF16)
    return cukern.fused_experts(x, w1, w2, torch.zeros(tokens, topk), torch.zeros(tokens, topk).int(), **given)


@pytest.fixture
def decided(pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> list[Any]:  # noqa: F811
    """The calls that are checked, as a list that grows."""
    found: list[Any] = []
    decide = layer._decide
    monkeypatch.setattr(layer, "_decide", lambda *args: [found.append(args), decide(*args)][1])
    monkeypatch.setattr(layer, "DECISIONS", Decisions(*layer.DECISIONS._free))
    return found


def said(launch: Launch) -> Any:
    """All of a launch but where its arrays are."""

    def numbers(fields: dict[str, Any]) -> Any:
        return {
            name: numbers(x) if isinstance(x, dict) else x
            for name, x in fields.items()
            if not (isinstance(x, int) and x > 1 << 32) and not isinstance(x, bytes)
        }

    return launch.variant, launch.grid, launch.block, launch.shared_bytes, numbers(launch.fields)


CASES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "16 bits": (None, {}),
    "16 bits, permuted": (None, {"inter": 8192}),
    "16 bits, swigluoai": (None, {"activation": "swigluoai", "alpha": 1.5, "interleaved": True, "bias": True}),
    "16 bits, expert map": (None, {"map": True}),
    "16 bits, weights on input": (None, {"topk": 1, "apply_router_weight_on_input": True}),
    "FP8 by blocks": ("fp8_block", {}),
    "FP8 by blocks, activated": ("fp8_block", {"activation": "gelu", "bias": True}),
    "FP8 by blocks, quantized by the product": ("fp8_block", {"inter": 2048}),
    "FP8 by blocks, weights on input": ("fp8_block", {"topk": 1, "apply_router_weight_on_input": True}),
    "FP8, a scale of each token": ("fp8", {}),
    "FP8, a scale of all": ("fp8", {"per_act_token_quant": False}),
    "FP8, static scales": ("fp8", {"a1_scale": torch.ones(1), "a2_scale": torch.ones(1)}),
    "FP8, one static scale": ("fp8", {"a2_scale": torch.ones(1), "activation": "swigluoai", "alpha": 1.5}),
    "MXFP4": ("mxfp4", {}),
    "NVFP4": ("nvfp4", {}),
    "prepared MXFP4": ("prepared", {"bias": True}),
    "MXFP4 and FP8": ("mxfp4_fp8", {}),
}


@pytest.mark.parametrize("tokens", [1, 3, 64, 700])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::cukern.PerformanceWarning")
def test_the_launches_are_those_of_the_modular_kernel(
    case: str,
    tokens: int,
    decided: list[Any],
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    quant, options = CASES[case]
    given = dict(options)
    inter, topk = given.pop("inter", INTER), given.get("topk", TOPK)
    w1, w2, own = weights_of(quant, inter)
    given |= own
    if given.pop("bias", False):
        given |= {"w1_bias": torch.zeros(EXPERTS, 2 * inter), "w2_bias": torch.zeros(EXPERTS, HIDDEN)}
    if given.pop("map", False):
        given["expert_map"] = torch.zeros(3 * EXPERTS).int()
    for _ in range(2):
        assert call(tokens, w1, w2, **given).shape == (tokens, HIDDEN)
    assert len(decided) == 1
    count = len(pretended.launches) // 2
    found = [*map(said, pretended.launches)]
    assert found[:count] == found[count:]

    names = ("gemm1_alpha", "gemm1_clamp_limit", "gemm1_interleaved")
    numbers = {
        own: given.pop(name)
        for own, name in zip(names, ("alpha", "limit", "interleaved"), strict=True)
        if name in given
    }
    scales = {name: given.pop(name) for name in [*given] if name.endswith(("scale", "bias", "per_act_token_quant"))}
    config = FusedMoEQuantConfig.make(given.pop("quant", None), **numbers, **scales)
    whole = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), AutoExperts(config))
    given.pop("topk", None)
    x, ids = torch.zeros(tokens, HIDDEN, dtype=BF16), torch.zeros(tokens, topk).int()
    pretended.launches.clear()
    whole(x, w1, w2, torch.zeros(tokens, topk), ids, **given)
    assert found[:count] == [*map(said, pretended.launches)]


def test_a_call_like_one_before_is_not_checked_again(decided: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    w1, w2, _ = weights_of(None)
    for tokens in (9, 700, 0, 9):
        assert call(tokens, w1, w2).shape == (tokens, HIDDEN)
    assert len(decided) == 1
    out = torch.zeros(9, HIDDEN, dtype=BF16)
    assert call(9, w1, w2, out=out) is out
    assert pretended.launches[-1].fields["out"] == out.data_ptr()
    call(9, w1.clone(), w2, out=out)
    assert len(decided) == 2


def test_what_a_decision_does_not_hold_is_checked_at_every_call(decided: list[Any]) -> None:
    w1, w2, _ = weights_of(None)
    out = torch.zeros(9, HIDDEN, dtype=BF16)
    call(9, w1, w2, out=out)
    with pytest.raises(ValueError, match=r"^out must be of shape \[tokens, hidden\] = \[8, 512\]"):
        call(8, w1, w2, out=out)
    x, ids = torch.zeros(9, HIDDEN, dtype=BF16), torch.zeros(9, TOPK).int()
    with pytest.raises(ValueError, match=r"^topk_weights must be of shape \[tokens, topk\] = \[9, 2\]"):
        cukern.fused_experts(x, w1, w2, torch.zeros(8, TOPK), ids, out=out)
    trained = w1.clone().requires_grad_()
    with torch.no_grad():
        call(9, trained, w2)
    with pytest.raises(RuntimeError, match=r"^w1 must be a tensor that does not require grad"):
        call(9, trained, w2)


def test_arrays_that_are_not_aligned(decided: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    w1, w2, _ = weights_of(None)
    x = torch.zeros(9 * HIDDEN + 1, dtype=BF16)[1:].reshape(9, HIDDEN)
    ids = torch.zeros(9, TOPK).int()
    call(9, w1, w2)
    for _ in range(2):
        cukern.fused_experts(x, w1, w2, torch.zeros(9, TOPK), ids)
    assert len(decided) == 3
    names = [launched.variant.instance.function for launched in pretended.launches]
    assert names.count("gemm_fma") == 2 and names.count("gemm_wgmma") == 4


def test_a_layer_in_chunks(
    decided: list[Any],
    pretended: PretendedGPU,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (launches, modular):
        monkeypatch.setattr(module, "CHUNK_SIZE", 40)
    for quant in (None, "fp8_block", "fp8"):
        w1, w2, given = weights_of(quant)
        pretended.launches.clear()
        out = call(100, w1, w2, **given)
        written = [x.fields["out"] for x in pretended.launches if "unpermute" in x.variant.instance.function]
        assert written == [out.data_ptr() + start * HIDDEN * 2 for start in (0, 40, 80)]


def test_configurations_are_told_apart(decided: list[Any]) -> None:
    w1, w2, given = weights_of("fp8_block")
    scales = {name: given[name] for name in ("w1_scale", "w2_scale")}
    for alpha in (1.5, 1.7, 1.5):
        config = FusedMoEQuantConfig.make("fp8_block", gemm1_alpha=alpha, **scales)
        call(9, w1, w2, quant=config, activation="swigluoai")
    assert len(decided) == 2
    call(9, w1, w2, **given)
    assert len(decided) == 3
    with pytest.raises(ValueError, match=r"^w1_scale must be None, since quant holds the scales and biases"):
        call(9, w1, w2, quant=config, w1_scale=scales["w1_scale"])
    with pytest.raises(ValueError, match=r"alpha, limit, interleaved and per_act_token_quant must be as they are"):
        call(9, w1, w2, quant=config, alpha=3.0)
    assert np.isfinite(config.gemm1_alpha)
