"""Layers with biases, interleaved gates, without a gate, of any size, with strides, and FP8 with scales per tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import cukern
from cukern import fused_moe
from cukern.fused_moe import FusedMoEModularKernel, FusedMoEQuantConfig
from cukern.fused_moe.example import Layer, random_layer
from cukern.fused_moe.prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from cukern.reference import fused_moe as twin
from cukern.reference.moe_gemm import values_of_b
from cukern.runtime.activation import is_gated
from cukern.runtime.kernel import arch_of_device
from tests.activations import activated
from tests.buffers import on_gpu, same_bits, to_numpy
from tests.test_fused_moe_combinations import as_tensor
from tests.test_moe_gemm_epilogue import padded

Array = NDArray[Any]
GPT_OSS = {"activation": "swigluoai", "gemm1_interleaved": True}

#: Forms of a layer by their reason: quantization, sizes, and numbers of the configuration besides the activation.
FORMS: dict[str, tuple[str | None, dict[str, int], dict[str, Any]]] = {
    "bias": (None, {}, {}),
    "gpt-oss": ("mxfp4", {}, GPT_OSS),
    "gpt-oss, alpha and limit": ("mxfp4", {}, {**GPT_OSS, "gemm1_alpha": 1.0, "gemm1_clamp_limit": 1.5}),
    "interleaved": (None, {}, GPT_OSS),
    "nvfp4": ("nvfp4", {}, {"activation": "gelu"}),
    "no gate": (None, {}, {"activation": "relu2_no_mul"}),
    "no gate, mxfp4": ("mxfp4", {}, {"activation": "gelu_no_mul"}),
    "fp8": ("fp8", {}, {}),
    "fp8, interleaved": ("fp8", {}, GPT_OSS),
    "fp8, no gate": ("fp8", {}, {"activation": "relu2_no_mul"}),
    "fp8 per tensor": ("fp8", {}, {"per_act_token_quant": False}),
    "fp8 per tensor, no gate": ("fp8", {}, {"per_act_token_quant": False, "activation": "silu_no_mul"}),
    "fp8 per tensor, odd": ("fp8", {"inter": 131, "hidden": 77}, {"per_act_token_quant": False}),
    "fp8 in blocks": ("fp8_block", {}, {}),
    "fp8 in blocks, interleaved": ("fp8_block", {}, GPT_OSS),
    "odd sizes": (None, {"inter": 131, "hidden": 77}, {}),
    "odd sizes, gpt-oss": (None, {"inter": 131, "hidden": 77}, GPT_OSS),
    "odd sizes, fp8": ("fp8", {"inter": 131, "hidden": 77}, {}),
    "odd sizes, nvfp4": ("nvfp4", {"inter": 48, "hidden": 80}, {}),
}


def formed(
    rng: np.random.Generator, quantization: str | None, sizes: dict[str, int], numbers: dict[str, Any], tokens: int = 9
) -> tuple[Layer, str]:
    """A layer with biases, and its activation."""
    numbers = dict(numbers)
    activation = numbers.pop("activation", "silu")
    given = {"experts": 4, "inter": 128, "hidden": 256, "topk": 2} | sizes
    layer = random_layer(rng, tokens, quantization=quantization, **given)
    if not is_gated(activation):
        inter, of_w1 = given["inter"], ("w1", "w1_scale")
        scales = {k: v if k not in of_w1 or v.ndim < 2 else cut(v, inter) for k, v in layer.config.scales.items()}
        layer = layer._replace(w1=cut(layer.w1, inter))
    else:
        scales = dict(layer.config.scales)
    if quantization == "fp8" and numbers.get("per_act_token_quant") is False:
        scales |= {f"w{i}_scale": scales[f"w{i}_scale"].max(1) for i in (1, 2)}
    dtype = layer.hidden_states.dtype
    scales["w1_bias"] = rng.standard_normal(layer.w1.shape[:2], np.float32)
    scales["w2_bias"] = rng.standard_normal(layer.w2.shape[:2], np.float32).astype(dtype)
    return layer._replace(config=FusedMoEQuantConfig.make(quantization, **scales, **numbers)), activation


def cut(array: Array, rows: int) -> Array:
    """The first half of the rows of w1, or of their scales."""
    return np.ascontiguousarray(array[:, : rows if array.shape[1] == 2 * rows else -(-array.shape[1] // 2)])


def by_torch(layer: Layer, activation: str) -> torch.Tensor:
    """Token by token in float64, with the numbers that the weights stand for, and no rounding between."""
    config = layer.config

    def product(name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        own = [getattr(config, f"{name}_{what}") for what in ("scale", "global_scale", "bias")]
        scale, global_scale, bias = (None if s is None else s[expert] for s in own)
        b = values_of_b(getattr(layer, name)[expert], scale, global_scale, len(x)).astype(np.float64)
        return torch.from_numpy(b) @ x + torch.from_numpy(bias.astype(np.float64))

    x = torch.from_numpy(layer.hidden_states.astype(np.float64))
    out = torch.zeros_like(x)
    for token, (ids, factors) in enumerate(zip(layer.topk_ids, layer.topk_weights, strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            sums = product("w1", int(expert), x[token])
            if not is_gated(activation):
                y = activated(activation.removesuffix("_no_mul"), sums)
            else:
                gate, up = (sums[::2], sums[1::2]) if config.gemm1_interleaved else sums.chunk(2)
                y = activated(activation, gate, up, config.gemm1_alpha, config.gemm1_clamp_limit)
            out[token] += product("w2", int(expert), y) * float(factor)
    return out


def distance(got: Any, want: Any) -> float:
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def named(layer: Layer, **options: Any) -> Any:
    """The layer by the arguments of the function, without a configuration."""
    config = layer.config
    form = {} if config.name != "fp8" else {"per_act_token_quant": config.per_act_token_quant}
    return cukern.fused_experts(*layer.arrays, quant=config.name, **config.scales, **config.form, **form, **options)


@pytest.mark.parametrize("name", FORMS)
def test_the_twin_against_torch(name: str, rng: np.random.Generator) -> None:
    layer, activation = formed(rng, *FORMS[name])
    got = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
    # FP8 rounds activations to 4 bits of precision twice.
    assert distance(got, by_torch(layer, activation)) < (0.06 if "fp8" in name else 0.01)


@pytest.mark.parametrize("name", FORMS)
def test_functions_and_classes_compute_what_the_twin_does(name: str, rng: np.random.Generator) -> None:
    layer, activation = formed(rng, *FORMS[name])
    want = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
    same_bits(cukern.fused_experts(*layer.arrays, activation=activation, quant=layer.config), want)
    same_bits(named(layer, activation=activation), want)
    tensors = layer.map(as_tensor("cpu"))
    same_bits(to_numpy(named(tensors, activation=activation)), want)
    for experts in pairs(layer.config):
        got = FusedMoEModularKernel(*experts)(*layer.arrays, activation=activation)
        assert distance(got, want) < 0.01


def pairs(config: FusedMoEQuantConfig) -> list[tuple[Any, Any]]:
    """Tokens in their own order, gathered and permuted, and batched."""
    batched = [fused_moe.BatchedAutoExperts(config), fused_moe.NaiveBatchedExperts(config)]
    return [
        (MoEPrepareAndFinalizeNoEP(), fused_moe.AutoExperts(config)),
        *((BatchedPrepareAndFinalize(16, 4), experts) for experts in batched),
    ]


def test_strides_of_weights_change_nothing(rng: np.random.Generator) -> None:
    for name in ("bias", "gpt-oss", "fp8"):
        layer, activation = formed(rng, *FORMS[name])
        want = named(layer, activation=activation)
        views = layer._replace(w1=padded(layer.w1), w2=padded(layer.w2))
        assert not views.w1.flags.c_contiguous
        same_bits(named(views, activation=activation), want)


def test_rows_of_no_expert_have_no_part_in_the_scale_of_all(rng: np.random.Generator) -> None:
    layer, activation = formed(rng, *FORMS["fp8 per tensor"])
    ids = layer.topk_ids.copy()
    ids[3:, 1] = -1
    layer = layer._replace(topk_ids=ids)
    want = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
    for experts in pairs(layer.config):
        assert distance(FusedMoEModularKernel(*experts)(*layer.arrays, activation=activation), want) < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w1_bias": np.zeros((4, 255), np.float32)}, "w1_bias must be of shape [4, 256], got [4, 255]"),
        ({"w2_bias": np.zeros((4, 256))}, "w2_bias must be float32 or bfloat16, got float64"),
        ({"interleaved": True, "activation": "silu_no_mul"}, "interleaved must be False without a gate"),
        ({"interleaved": 2}, "interleaved must be one of False, True, got 2"),
        ({"limit": -1.0}, "limit must be at least 0, got -1.0"),
        ({"per_act_token_quant": True}, "per_act_token_quant must be False unless the activations are FP8"),
        ({"activation": "swigluoai_no_mul"}, "activation must be one of 'silu', 'gelu'"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], message: str, rng: np.random.Generator) -> None:
    layer = random_layer(rng, 9, experts=4, inter=128, hidden=256, topk=2)
    with pytest.raises((TypeError, ValueError)) as found:
        cukern.fused_experts(*layer.arrays, **changes)
    assert message in str(found.value)


def test_numbers_beside_a_configuration_are_refused(rng: np.random.Generator) -> None:
    layer = random_layer(rng, 9, experts=4, inter=128, hidden=256, topk=2)
    for changes in ({"alpha": 2.0}, {"interleaved": True}, {"per_act_token_quant": False}):
        with pytest.raises(ValueError, match="since quant holds them"):
            cukern.fused_experts(*layer.arrays, quant=FusedMoEQuantConfig(), **changes)


# --- the kernels ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("name", FORMS)
def test_layers_on_a_gpu(name: str, tokens: int, rng: np.random.Generator) -> None:
    layer, activation = formed(rng, *FORMS[name], tokens=tokens)
    want = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
    got = to_numpy(named(layer.map(on_gpu), activation=activation))
    assert distance(got, want) < (0.03 if "fp8" in name else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bias", "gpt-oss", "no gate, mxfp4", "fp8 per tensor", "odd sizes"])
def test_batched_layers_on_a_gpu(name: str, rng: np.random.Generator) -> None:
    layer, activation = formed(rng, *FORMS[name])
    want = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
    there = layer.map(on_gpu)
    for experts in pairs(there.config):
        got = to_numpy(FusedMoEModularKernel(*experts)(*there.arrays, activation=activation))
        assert distance(got, want) < (0.03 if "fp8" in name else 0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss, alpha and limit", "no gate, mxfp4"])
def test_layers_of_prepared_weights(name: str, tokens: int, rng: np.random.Generator) -> None:
    if arch_of_device(0) != "90a":
        pytest.skip("prepared weights are for sm_90a")
    layer, activation = formed(rng, *FORMS[name], tokens=tokens)
    want = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
    there = layer.map(on_gpu)
    config = there.config
    w1, w2 = (cukern.prepare_weights(getattr(there, f"w{i}"), getattr(config, f"w{i}_scale")) for i in (1, 2))
    biases = {"w1_bias": config.w1_bias, "w2_bias": config.w2_bias}
    got = cukern.fused_experts(
        there.hidden_states, w1, w2, there.topk_weights, there.topk_ids, quant="mxfp4", activation=activation,
        **biases, **config.form,
    )  # fmt: skip
    assert distance(to_numpy(got), want) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8 per tensor", "gpt-oss", "odd sizes"])
def test_layers_replay_in_a_cuda_graph(name: str, rng: np.random.Generator) -> None:
    """What waits for the GPU cannot be captured; a scale of all tokens is found anew at each replay."""
    (first, activation), (second, _) = (formed(rng, *FORMS[name], tokens=33) for _ in range(2))
    second = second._replace(
        hidden_states=(second.hidden_states * 4).astype(first.hidden_states.dtype),
        w1=first.w1,
        w2=first.w2,
        config=first.config,
    )
    there = first.map(as_tensor("cuda"))
    named(there, activation=activation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = named(there, activation=activation)
    for layer in (second, first):
        moved = layer.map(as_tensor("cuda"))
        for array in ("hidden_states", "topk_weights", "topk_ids"):
            getattr(there, array).copy_(getattr(moved, array))
        out.fill_(np.nan)
        graph.replay()
        want = twin.fused_experts(*layer.arrays, activation=activation, quant=layer.config)
        assert distance(to_numpy(out), want) < (0.03 if "fp8" in name else 0.01)
