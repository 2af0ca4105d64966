"""The fused mixture-of-experts layer: the twin against torch, the classes against the twin."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_fused_moe
from cukern import fused_moe
from cukern.__main__ import main
from cukern.fused_moe import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEModularKernel,
    FusedMoEQuantConfig,
    MoEPrepareAndFinalizeNoEP,
    NaiveBatchedExperts,
    Prepared,
    SortedTokens,
)
from cukern.fused_moe.combinations import EXPERTS, PREPARE_FINALIZE
from cukern.fused_moe.example import Layer, quantize_weights, random_layer
from cukern.reference import fused_moe as twin
from cukern.reference.moe_gemm import values_of_b
from cukern.runtime import arrays, kernel, overlap
from cukern.runtime.activation import ACTIVATIONS
from cukern.runtime.cuda import driver
from cukern.testing import assert_matches
from tests.activations import activated
from tests.buffers import same_bits, to_numpy
from tests.pretended import Launch, PretendedGPU, pretended  # noqa: F401
from tests.test_fused_moe_combinations import PLACES, as_tensor, compare, places

Array = NDArray[Any]
DTYPES = ("bfloat16", "float16")
QUANTIZATIONS = (None, *fused_moe.QUANTIZATIONS)
NAN = np.nan

dtypes = pytest.mark.parametrize("dtype", DTYPES)
quantizations = pytest.mark.parametrize("quantization", QUANTIZATIONS)


def small(rng: np.random.Generator, quantization: str | None = None, tokens: int = 9, **sizes: Any) -> Layer:
    sizes = {"experts": 4, "inter": 128, "hidden": 256, "topk": 2} | sizes
    return random_layer(rng, tokens, quantization=quantization, **sizes)


def call(layer: Layer, **options: Any) -> Any:
    quant = layer.config if layer.config.name else None
    return cukern.fused_experts(*layer.arrays, quant=quant, **options)


def twin_of(layer: Layer, **options: Any) -> Array:
    return twin.fused_experts(*layer.arrays, quant=layer.config, **options)


def standard(layer: Layer, name: str = "AutoExperts", **options: Any) -> FusedMoEModularKernel:
    return FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), EXPERTS[name](layer.config), **options)


# --- the twin -------------------------------------------------------------------------------------------


def by_torch(layer: Layer, activation: str = "silu", on_input: bool = False) -> torch.Tensor:
    """Token by token in float64, with the numbers that the weights stand for, and no rounding between."""
    hidden, config = layer.hidden_states.shape[1], layer.config
    inter = layer.w1.shape[1] // 2

    def weights(name: str, expert: int, k: int) -> torch.Tensor:
        scales = [getattr(config, f"{name}_{what}") for what in ("scale", "global_scale")]
        own = [None if s is None else s[expert] for s in scales]
        return torch.from_numpy(values_of_b(getattr(layer, name)[expert], own[0], own[1], k).astype(np.float64))

    x = torch.from_numpy(layer.hidden_states.astype(np.float64))
    out = torch.zeros_like(x)
    for token, (ids, factors) in enumerate(zip(layer.topk_ids, layer.topk_weights, strict=True)):
        for expert, factor in zip(ids, factors, strict=True):
            if not 0 <= expert < len(layer.w1):
                continue
            row = x[token] * (float(factor) if on_input else 1)
            gate, up = (weights("w1", expert, hidden) @ row).chunk(2)
            y = weights("w2", expert, inter) @ activated(activation, gate, up)
            out[token] += y * (1 if on_input else float(factor))
    return out


def distance(got: Array, want: torch.Tensor) -> float:
    difference = torch.from_numpy(got.astype(np.float64)) - want
    return float(difference.norm() / want.norm())


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_twin_against_torch(activation: str, dtype: str, rng: np.random.Generator) -> None:
    layer = small(rng, dtype=dtype)
    layer.topk_ids[2, 0] = -1
    layer.topk_ids[4] = 77
    got = twin_of(layer, activation=activation)
    assert got.dtype.name == dtype
    assert not got[4].any()
    assert distance(got, by_torch(layer, activation)) < (4e-3 if dtype == "bfloat16" else 5e-4)


# What FP8 activations cost is a few percent; 4-bit weights are compared with what they stand for.
@pytest.mark.parametrize(
    ("quantization", "bound"), [("fp8_block", 0.05), ("fp8", 0.05), ("mxfp4", 4e-3), ("nvfp4", 4e-3)]
)
def test_the_twin_of_quantized_layers_against_torch(quantization: str, bound: float, rng: np.random.Generator) -> None:
    layer = small(rng, quantization)
    assert distance(twin_of(layer), by_torch(layer)) < bound


def test_the_twin_with_weights_on_the_input(rng: np.random.Generator) -> None:
    layer = small(rng, topk=1)
    layer = layer._replace(topk_weights=np.linspace(0.1, 2, 9, dtype=np.float32).reshape(9, 1))
    got = twin_of(layer, apply_router_weight_on_input=True)
    assert distance(got, by_torch(layer, on_input=True)) < 8e-3
    assert distance(got, by_torch(layer)) > 0.05


def test_the_layer_by_hand() -> None:
    # Each expert has one number in each of the gate, up and w2: silu(1) * 2, times 3 or times -8, in place 3.
    x = np.full((1, 8), 0, ml_dtypes.bfloat16)
    x[0, 0] = 1
    w1 = np.zeros((2, 16, 8), ml_dtypes.bfloat16)
    w1[:, 0, 0] = 1
    w1[:, 8, 0] = 2
    w2 = np.zeros((2, 8, 8), ml_dtypes.bfloat16)
    w2[0, 3, 0], w2[1, 3, 0] = 3, -8
    weights, ids = np.array([[0.5, 0.25]], np.float32), np.array([[1, 0]], np.int64)
    got = cukern.fused_experts(x, w1, w2, weights, ids).astype(np.float64)
    wanted = 2 / (1 + math.exp(-1)) * (0.5 * -8 + 0.25 * 3)
    assert got[0, 3] == pytest.approx(wanted, rel=1e-2)
    assert np.count_nonzero(got) == 1


# --- the function ---------------------------------------------------------------------------------------


@places
@quantizations
def test_the_function_computes_what_the_twin_does(
    quantization: str | None, place: str, rng: np.random.Generator
) -> None:
    layer = small(rng, quantization)
    layer.topk_ids[1, 1] = -1
    there = layer.map(PLACES[place])
    got = call(there)
    assert type(got) is type(there.hidden_states)
    compare(layer, got, twin_of(layer))
    named = cukern.fused_experts(*there.arrays, quant=there.config.name, **there.config.scales)
    same_bits(named, to_numpy(got))
    same_bits(twin.fused_experts(*layer.arrays, quant=layer.config.name, **layer.config.scales), twin_of(layer))


@places
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, place: str, rng: np.random.Generator) -> None:
    layer = small(rng, tokens=tokens)
    got = call(layer.map(PLACES[place]))
    assert tuple(got.shape) == (tokens, 256)
    assert_matches("fused_moe.out", got, twin_of(layer))


def _scaled(layer: Layer, **scales: Any) -> dict[str, Any]:
    return {"quant": layer.config.name, **{**layer.config.scales, **scales}}


# What is changed in a layer of a quantization, or the keywords, and what is said of it.
BAD: dict[str, tuple[str | None, dict[str, Any], type[Exception], str]] = {
    "no array": (None, {"hidden_states": [[1.0]]}, TypeError, "hidden_states must be an array (NumPy, CuPy, torch"),
    "float32": (
        "fp8", {"hidden_states": np.zeros((9, 256), np.float32)}, TypeError,
        "hidden_states must be bfloat16 or float16, got float32",
    ),
    "dimensions": (
        None, {"hidden_states": np.zeros(9, np.float16)}, ValueError,
        "hidden_states must be of shape [tokens, hidden], got [9]",
    ),
    "another dtype": (None, {"w1": np.zeros((4, 256, 256), np.float16)}, TypeError, "w1 must be bfloat16, got float16"),
    "w1": (
        None, {"w1": np.zeros((4, 256, 128), ml_dtypes.bfloat16)}, ValueError,
        "w1 must be of shape [experts, 2 * inter, hidden] = [4, 256, 256], got [4, 256, 128]",
    ),
    "odd w1": (
        None, {"w1": np.zeros((4, 255, 256), ml_dtypes.bfloat16)}, ValueError,
        "w1 must be of shape [experts, 2 * inter, hidden], none of them 0, got [4, 255, 256]",
    ),
    "w2": (
        None, {"w2": np.zeros((4, 128, 256), ml_dtypes.bfloat16)}, ValueError,
        "w2 must be of shape [experts, hidden, inter] = [4, 256, 128], got [4, 128, 256]",
    ),
    "flat w2": (
        None, {"w2": np.zeros((4, 128), ml_dtypes.bfloat16)}, ValueError,
        "w2 must be of shape [experts, n, k], got [4, 128]",
    ),
    "ids": (
        None, {"topk_ids": np.zeros((8, 2), np.int32)}, ValueError,
        "topk_ids must be of shape [tokens, topk] = [9, 2], got [8, 2]",
    ),
    "flat ids": (
        None, {"topk_ids": np.zeros(9, np.int32)}, ValueError, "topk_ids must be of shape [tokens, topk], got [9]",
    ),
    "float ids": (
        None, {"topk_ids": np.zeros((9, 2), np.float32)}, TypeError,
        "topk_ids must be int32 or int64 or uint32, got float32",
    ),
    "weights": (
        None, {"topk_weights": np.zeros((9, 3), np.float32)}, ValueError,
        "topk_weights must be of shape [tokens, topk] = [9, 2], got [9, 3]",
    ),
    "bfloat16 weights": (
        None, {"topk_weights": np.zeros((9, 2), ml_dtypes.bfloat16)}, TypeError,
        "topk_weights must be float32, got bfloat16",
    ),
    "activation": (None, {"activation": "tanh"}, ValueError, "activation must be one of 'silu', 'gelu', 'gelu_tanh'"),
    "short map": (
        None, {"expert_map": np.zeros(3, np.int32)}, ValueError,
        "expert_map must be of at least the 4 experts of w1, got 3",
    ),
    "map dtype": (None, {"expert_map": np.zeros(4, np.int64)}, TypeError, "expert_map must be int32, got int64"),
    "map": (
        None, {"expert_map": np.zeros((4, 1), np.int32)}, ValueError,
        "expert_map must be of shape [global_num_experts], got [4, 1]",
    ),
    "weights on two inputs": (
        None, {"apply_router_weight_on_input": True}, ValueError,
        "topk_ids must be of one expert per token with apply_router_weight_on_input, got 2 per token",
    ),
    "out": (
        None, {"out": np.zeros((9, 128), ml_dtypes.bfloat16)}, ValueError,
        "out must be of shape [tokens, hidden] = [9, 256], got [9, 128]",
    ),
    "strides": (
        None, {"hidden_states": np.zeros((9, 512), ml_dtypes.bfloat16)[:, ::2]}, ValueError,
        "hidden_states must be contiguous, got strides",
    ),
    "another library": (
        None, {"w1": torch.zeros(4, 256, 256)}, TypeError, "w1 must be a NumPy array like hidden_states",
    ),
    "quant": (None, {"quant": 8}, TypeError, "quant must be a FusedMoEQuantConfig, its name, or None, got int"),
    "quant's name": (
        None, {"quant": "int4"}, ValueError,
        "quant must be one of 'fp8_block', 'fp8', 'mxfp4', 'nvfp4', 'mxfp4_fp8', got 'int4'",
    ),
    "no scales": (
        None, {"quant": "fp8_block"}, ValueError, "w1_scale must be the scales of fp8_block, got None",
    ),
    "scales of nothing": (
        None, {"w1_scale": np.ones(4, np.float32)}, ValueError,
        "w1_scale must be None with no quantization, got ndarray",
    ),
    "scales of blocks": (
        "fp8_block", {"w2_scale": np.ones((4, 2), np.float32)}, ValueError,
        "w2_scale must be of shape [4, 2, 1], got [4, 2]",
    ),
    "scales of channels": (
        "fp8", {"w1_scale": np.ones((4, 3), np.float32)}, ValueError,
        "w1_scale must be of shape [4] or [4, 256], got [4, 3]",
    ),
    "scales' dtype": (
        "mxfp4", {"w1_scale": np.ones((4, 256, 8), np.float32)}, TypeError,
        "w1_scale must be uint8 or float8_e8m0fnu or float8_e4m3fn, got float32",
    ),
    "static scales": (
        "fp8", {"a2_scale": np.ones(2, np.float32)}, ValueError,
        "a2_scale must be of shape [1] or [1, 1] or [], got [2]",
    ),
    "a static scale of blocks": (
        "fp8_block", {"a2_scale": np.ones(1, np.float32)}, ValueError,
        "a2_scale must be None with fp8_block, got ndarray",
    ),
    "no global scale": (
        "nvfp4", {"w1_global_scale": None}, ValueError, "w1_global_scale must be the scales of nvfp4, got None",
    ),
    "weights of 16 bits": (
        "mxfp4", {"w1": np.zeros((4, 256, 256), ml_dtypes.bfloat16)}, TypeError, "w1 must be uint8, got bfloat16",
    ),
    "bytes": (
        "mxfp4", {"w1": np.zeros((4, 256, 256), np.uint8)}, ValueError,
        "w1 must be of shape [experts, 2 * inter, hidden] = [4, 256, 128], got [4, 256, 256]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused(case: str, rng: np.random.Generator) -> None:
    quantization, changes, kind, message = BAD[case]
    layer = small(rng, quantization)
    arguments = dict(zip(Layer._fields[:5], layer.arrays, strict=True))
    options = {**_scaled(layer), **changes} if quantization else changes
    with pytest.raises(kind, match=re.escape(message)):
        cukern.fused_experts(**{**arguments, **options})


def test_a_configuration_and_scales_are_too_many(rng: np.random.Generator) -> None:
    layer = small(rng, "fp8")
    with pytest.raises(ValueError, match="w1_scale must be None, since quant holds the scales and biases, got ndarray"):
        cukern.fused_experts(*layer.arrays, quant=layer.config, w1_scale=layer.config.w1_scale)


@pytest.mark.parametrize(("quantization", "inter"), [("fp8_block", 64), ("mxfp4", 48), ("nvfp4", 8)])
def test_sizes_that_do_not_fit_a_group_are_refused(
    quantization: str | None, inter: int, rng: np.random.Generator
) -> None:
    layer = small(rng, quantization)
    w1 = layer.w1[:, : 2 * inter]
    with pytest.raises(ValueError, match="w1 must be of an inter that is a multiple of"):
        call(layer._replace(w1=np.ascontiguousarray(w1)))


# --- quantization configurations ------------------------------------------------------------------------


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"quant_dtype": "int8"},
            "quant_dtype must be one of None, 'float8_e4m3fn', 'mxfp4', 'nvfp4', 'mxfp4_fp8', got 'int8'",
        ),
        (
            {"quant_dtype": "float8_e4m3fn", "block_shape": (64, 64)},
            "block_shape must be None, or (128, 128) with float8_e4m3fn, got (64, 64) with float8_e4m3fn",
        ),
        (
            {"block_shape": (128, 128)},
            "block_shape must be None, or (128, 128) with float8_e4m3fn, got (128, 128) with None",
        ),
        (
            {"per_act_token_quant": True},
            "per_act_token_quant must be False unless the activations are FP8 without blocks, got True with no quant",
        ),
        (
            {"quant_dtype": "mxfp4", "w1_scale": ONE, "w2_scale": ONE, "w1_global_scale": ONE},
            "w1_global_scale must be None with mxfp4, got ndarray",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_means_nothing_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedMoEQuantConfig(**arguments)


def test_configurations_by_name() -> None:
    made = {
        "fp8_block": FusedMoEQuantConfig.fp8_block(ONE, ONE),
        "fp8": FusedMoEQuantConfig.fp8(ONE, ONE),
        "mxfp4": FusedMoEQuantConfig.mxfp4(ONE, ONE),
        "nvfp4": FusedMoEQuantConfig.nvfp4(ONE, ONE, ONE, ONE),
    }
    assert {name: config.name for name, config in made.items()} == {name: name for name in made}
    assert made["fp8"].per_act_token_quant
    assert not FusedMoEQuantConfig.fp8(ONE, ONE, ONE, ONE).per_act_token_quant
    assert FusedMoEQuantConfig().name is None


@places
def test_static_scales_per_tensor(place: str, rng: np.random.Generator) -> None:
    layer = small(rng, "fp8")
    per_tensor = {name: np.full(4, scale.max(), np.float32) for name, scale in layer.config.scales.items()}
    for a1 in (None, np.full(1, 0.01, np.float32)):
        config = FusedMoEQuantConfig.fp8(**per_tensor, a1_scale=a1, a2_scale=np.full(1, 0.02, np.float32))
        own = layer._replace(config=config)
        got = call(own.map(PLACES[place]))
        compare(own, got, twin_of(own))
        assert not np.array_equal(twin_of(own), twin_of(layer))


def test_quantized_weights_stand_for_the_weights(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((2, 128, 256), np.float32)
    for quantization, bound in {"fp8_block": 0.04, "fp8": 0.04, "mxfp4": 0.2, "nvfp4": 0.15}.items():
        packed, scales = quantize_weights(weights, quantization)
        for expert in range(2):
            own = {name: scale[expert] for name, scale in scales.items()}
            values = values_of_b(packed[expert], own["scale"], own.get("global_scale"), 256)
            assert np.linalg.norm(values - weights[expert]) < bound * np.linalg.norm(weights[expert])
    with pytest.raises(ValueError, match="quantization must be one of"):
        quantize_weights(weights, "int4")


# --- the modular kernel ---------------------------------------------------------------------------------


class Recorded(MoEPrepareAndFinalizeNoEP):
    """Notes what is called, and can be told to misfit."""

    def __init__(self, **properties: Any) -> None:
        self.calls: list[str] = []
        self.properties = properties

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        return self.properties.get("format", FusedMoEActivationFormat.Standard)

    def topk_indices_dtype(self) -> str | None:
        return self.properties.get("ids")

    def prepare(self, *args: Any) -> Prepared:
        self.calls.append("prepare")
        return super().prepare(*args)

    def has_prepare_no_receive(self) -> bool:
        return self.properties.get("no_receive", False)

    def prepare_no_receive(self, *args: Any) -> Callable[[], Prepared]:
        if not self.has_prepare_no_receive():
            return super(MoEPrepareAndFinalizeNoEP, self).prepare_no_receive(*args)
        self.calls.append("send")

        def receive() -> Prepared:
            self.calls.append("receive")
            return MoEPrepareAndFinalizeNoEP.prepare(self, *args)

        return receive

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("finalize")
        super().finalize(*args, **kwargs)


def test_parts_that_do_not_fit_are_refused_with_the_reason(rng: np.random.Generator) -> None:
    experts = EXPERTS["GroupedGemmExperts"]()
    batched = FusedMoEActivationFormat.BatchedExperts
    refused = {
        "Recorded gives activations in the format Standard, and NaiveBatchedExperts takes BatchedExperts": (
            Recorded(), NaiveBatchedExperts(),
        ),
        "Recorded wants topk_ids in uint16, and GroupedGemmExperts takes int32, int64, uint32": (
            Recorded(ids="uint16"), experts,
        ),
        "Recorded is batched and does not say for how many tokens there is room (max_num_tokens_per_rank)": (
            Recorded(format=batched), NaiveBatchedExperts(),
        ),
        "GroupedGemmExperts computes with float16 and bfloat16, and its quantization is fp8": (
            Recorded(), EXPERTS["GroupedGemmExperts"](FusedMoEQuantConfig.fp8(ONE, ONE)),
        ),
        "Fp4Experts computes with mxfp4 or nvfp4, and its quantization is none": (Recorded(), EXPERTS["Fp4Experts"]()),
    }  # fmt: skip
    for message, parts in refused.items():
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            FusedMoEModularKernel(*parts)
    with pytest.raises(
        TypeError, match="prepare_finalize must be a FusedMoEPrepareAndFinalize, got GroupedGemmExperts"
    ):
        FusedMoEModularKernel(experts, experts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fused_experts must be a FusedMoEPermuteExpertsUnpermute, got Recorded"):
        FusedMoEModularKernel(Recorded(), Recorded())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shared_experts must be a function of hidden_states, got int"):
        FusedMoEModularKernel(Recorded(), experts, 3)  # type: ignore[arg-type]
    pf = PREPARE_FINALIZE["BatchedPrepareAndFinalize"](4, 4)  # type: ignore[call-arg]
    with pytest.raises(
        ValueError, match="chunk_size must be None: NaiveBatchedExperts does not support chunking, got 8"
    ):
        FusedMoEModularKernel(pf, NaiveBatchedExperts(), chunk_size=8)
    with pytest.raises(ValueError, match="chunk_size must be an integer of at least 1, got 0"):
        standard(small(rng), chunk_size=0)


def test_a_batch_has_room_for_so_many(rng: np.random.Generator) -> None:
    layer = small(rng)
    pf = PREPARE_FINALIZE["BatchedPrepareAndFinalize"](8, 4)  # type: ignore[call-arg]
    module = FusedMoEModularKernel(pf, NaiveBatchedExperts())
    with pytest.raises(
        ValueError, match=re.escape("hidden_states must be of at most 8 tokens (max_num_tokens), got 9")
    ):
        module(*layer.arrays)
    pf = PREPARE_FINALIZE["BatchedPrepareAndFinalize"](9, 3)  # type: ignore[call-arg]
    module = FusedMoEModularKernel(pf, NaiveBatchedExperts())
    with pytest.raises(
        ValueError, match=re.escape("w1 must be of the 3 experts of this rank (num_local_experts), got 4")
    ):
        module(*layer.arrays)
    three = layer._replace(w1=layer.w1[:3], w2=layer.w2[:3])
    with pytest.raises(ValueError, match=re.escape("w1 must be of 3 experts (num_local_experts), or expert_map given")):
        module(*three.arrays, global_num_experts=4)


def test_the_ids_have_the_dtype_that_is_asked_for(rng: np.random.Generator) -> None:
    layer = small(rng)
    module = FusedMoEModularKernel(Recorded(ids="int64"), EXPERTS["GroupedGemmExperts"]())
    with pytest.raises(TypeError, match="topk_ids must be int64, got int32"):
        module(*layer.arrays)
    module(*layer._replace(topk_ids=layer.topk_ids.astype(np.int64)).arrays)


@quantizations
@pytest.mark.parametrize("gather", [True, False, None])
def test_chunks_change_nothing(gather: bool | None, quantization: str | None, rng: np.random.Generator) -> None:
    layer = small(rng, quantization)
    want = twin_of(layer)
    for chunk_size in (1, 4, 9, 100, None):
        module = standard(layer, chunk_size=chunk_size)
        module.fused_experts.chosen.gather = gather  # type: ignore[attr-defined]
        same_bits(module(*layer.arrays), want)


@quantizations
def test_nothing_is_read_that_was_not_written(
    quantization: str | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = small(rng, quantization)
    ids = layer.topk_ids.copy()
    ids[::2, 1] = -1
    layer = layer._replace(topk_ids=ids)
    want = twin_of(layer)
    original = type(arrays.NUMPY).empty

    def poisoned(self: Any, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        made = original(self, shape, dtype, like)
        made.view(np.uint8)[...] = 0xFF  # NaN in every float
        return made

    monkeypatch.setattr(type(arrays.NUMPY), "empty", poisoned)
    for name in ("AutoExperts", "BatchedAutoExperts"):
        pf = PREPARE_FINALIZE["MoEPrepareAndFinalizeNoEP" if name == "AutoExperts" else "BatchedPrepareAndFinalize"]
        made = pf() if name == "AutoExperts" else pf(12, 4)  # type: ignore[call-arg]
        same_bits(FusedMoEModularKernel(made, EXPERTS[name](layer.config))(*layer.arrays), want)


@pytest.mark.parametrize("no_receive", [False, True])
def test_shared_experts(no_receive: bool, rng: np.random.Generator) -> None:
    layer = small(rng)
    pf = Recorded(no_receive=no_receive)

    def shared(hidden_states: Array) -> Array:
        pf.calls.append("shared")
        return hidden_states + hidden_states

    module = FusedMoEModularKernel(pf, EXPERTS["GroupedGemmExperts"](), shared)
    of_shared, out = module(*layer.arrays)
    same_bits(of_shared, layer.hidden_states + layer.hidden_states)
    same_bits(out, twin_of(layer))
    first = ["send", "shared", "receive"] if no_receive else ["prepare", "shared"]
    assert pf.calls == [*first, "finalize"]
    of_shared, out = module(*small(rng, tokens=0).arrays)
    assert of_shared.shape == out.shape == (0, 256)


def test_prepare_no_receive_is_optional() -> None:
    with pytest.raises(NotImplementedError, match="Recorded has no prepare_no_receive"):
        Recorded().prepare_no_receive(None, None, None, 1, None, False, FusedMoEQuantConfig())


def test_the_number_of_experts_may_be_told(rng: np.random.Generator) -> None:
    layer = small(rng)
    module = standard(layer)
    same_bits(module(*layer.arrays, global_num_experts=4), twin_of(layer))
    expert_map = np.array([3, -1, 0, 1, 2], np.int32)
    same_bits(module(*layer.arrays, global_num_experts=5, expert_map=expert_map), twin_of(layer, expert_map=expert_map))
    with pytest.raises(ValueError, match="global_num_experts must be 5, what expert_map has, got 4"):
        module(*layer.arrays, global_num_experts=4, expert_map=expert_map)


def test_experts_that_take_no_map_refuse_one(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = small(rng)
    module = standard(layer, "GroupedGemmExperts")
    monkeypatch.setattr(type(module.fused_experts), "supports_expert_map", lambda self: False)
    with pytest.raises(ValueError, match="expert_map must be None: GroupedGemmExperts does not support one"):
        module(*layer.arrays, expert_map=np.arange(4, dtype=np.int32))


# --- weights and sums -----------------------------------------------------------------------------------


@places
def test_who_weighs_and_adds_up(place: str, rng: np.random.Generator) -> None:
    put = PLACES[place]
    tokens, topk, hidden, experts, room = 5, 2, 16, 3, 6
    ids = np.array([[0, 2], [2, 1], [2, -1], [7, 0], [1, 2]], np.int32)
    weights = rng.random((tokens, topk), np.float32)
    by_slot = rng.standard_normal((tokens, topk, hidden)).astype(np.float16)
    there = (ids >= 0) & (ids < experts)
    factors = np.where(there, weights, 0)[:, :, None]
    want = (factors[:, 0] * by_slot[:, 0].astype(np.float32) + factors[:, 1] * by_slot[:, 1]).astype(np.float16)
    batched = np.full((experts, room, hidden), NAN, np.float16)
    count = np.zeros(experts, int)
    for token, slot in zip(*np.nonzero(there), strict=True):
        expert = ids[token, slot]
        batched[expert, count[expert]] = by_slot[token, slot]
        count[expert] += 1

    def applied(impl: Any, rows: Array, on_input: bool = False, meta: Any = None) -> Any:
        output = put(np.full((tokens, hidden), NAN, np.float16))
        impl.apply(output, put(rows), put(weights), put(ids), on_input, meta)
        return output

    same_bits(applied(fused_moe.TopKWeightAndReduceNaiveBatched(), batched), want)
    # Slots of no expert have no part in a batch, but all that is contiguous counts.
    all_slots = (weights[:, 0, None] * by_slot[:, 0] + weights[:, 1, None] * by_slot[:, 1]).astype(np.float16)
    contiguous = fused_moe.TopKWeightAndReduceContiguous()
    same_bits(applied(contiguous, by_slot), all_slots)
    unweighed = (by_slot[:, 0].astype(np.float32) + by_slot[:, 1]).astype(np.float16)
    same_bits(applied(contiguous, by_slot, on_input=True), unweighed)
    same_bits(applied(fused_moe.TopKWeightAndReduceNoOp(), want), want)
    with pytest.raises(RuntimeError, match="must choose a TopKWeightAndReduce in place of the Delegate"):
        applied(fused_moe.TopKWeightAndReduceDelegate(), want)
    with pytest.raises(
        ValueError, match=re.escape("fused_expert_output must be of shape [tokens, topk, hidden] = [5, 2")
    ):
        applied(contiguous, batched)
    positions = np.zeros((tokens, topk), np.int32) - 1
    nothing = ExpertTokensMetadata(put(count.astype(np.int32)), put(positions))
    assert not to_numpy(applied(fused_moe.TopKWeightAndReduceNaiveBatched(), batched, meta=nothing)).any()


class BySlot(EXPERTS["GroupedGemmExperts"]):  # type: ignore[misc]
    """Leaves the weights and the sum to the prepare/finalize class."""

    def finalize_weight_and_reduce_impl(self) -> Any:
        return fused_moe.TopKWeightAndReduceDelegate()

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
        return super().workspace_shapes(M, N, K, topk, *rest)._replace(output=(M, topk, K))

    def apply(self, output: Any, *args: Any) -> None:
        hidden_states, w1, w2, _, ids, *rest = args
        for slot in range(ids.shape[1]):
            own = output[:, slot].copy()
            ones = np.ones((len(ids), 1), np.float32)
            super().apply(own, hidden_states, w1, w2, ones, np.ascontiguousarray(ids[:, slot : slot + 1]), *rest)
            output[:, slot] = own


@pytest.mark.parametrize("chunk_size", [4, None])
def test_a_new_class_of_experts_fits_in(chunk_size: int | None, rng: np.random.Generator) -> None:
    layer = small(rng)
    module = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), BySlot(), chunk_size=chunk_size)
    same_bits(module(*layer.arrays), twin_of(layer))


# --- tokens that prepare sorts, and tokens of other ranks -----------------------------------------------


class Sorting(MoEPrepareAndFinalizeNoEP):
    """Sorts the tokens, and weighs and adds up the experts' rows in its own `finalize`."""

    def __init__(self, local_experts: int) -> None:
        self.local_experts = local_experts
        self.says = self.sorts = True

    def sorts_tokens(self) -> bool:
        return self.says

    def prepare(self, *args: Any) -> Prepared:
        prepared = super().prepare(*args)
        _, _, ids, num_experts, expert_map, _, _ = args
        local = {} if expert_map is None else {"expert_map": expert_map, "num_local_experts": self.local_experts}
        found = SortedTokens(*cukern.moe_sort(ids, num_experts, **local))
        return prepared._replace(expert_tokens_meta=ExpertTokensMetadata(sorted=found)) if self.sorts else prepared

    def finalize(self, *args: Any, expert_tokens_meta: Any = None) -> None:
        output, rows, weights, ids, on_input, impl = args
        assert isinstance(impl, fused_moe.TopKWeightAndReduceDelegate)
        assert tuple(rows.shape) == (ids.shape[0] * ids.shape[1], output.shape[1])
        cukern.moe_unpermute(output, rows, None if on_input else weights, expert_tokens_meta.sorted.inverse)


@places
@quantizations
@pytest.mark.parametrize("gather", [True, False])
def test_finalize_may_add_up_the_rows_of_sorted_tokens(
    gather: bool, quantization: str | None, place: str, rng: np.random.Generator
) -> None:
    layer = small(rng, quantization)
    layer.topk_ids[3, 1] = -1
    # Every other expert of eight is here: the sort of `prepare` knows it, and that of the experts would not.
    expert_map = np.full(8, -1, np.int32)
    expert_map[::2] = [2, 0, 3, 1]
    there = layer.map(PLACES[place])
    module = FusedMoEModularKernel(Sorting(4), EXPERTS["AutoExperts"](there.config))
    module.fused_experts.chosen.gather = gather  # type: ignore[attr-defined]
    plain = standard(there)
    plain.fused_experts.chosen.gather = gather  # type: ignore[attr-defined]
    same_bits(module(*there.arrays), to_numpy(plain(*there.arrays)))
    mapped = {"expert_map": PLACES[place](expert_map)}
    got = module(*there.arrays, **mapped)
    same_bits(got, to_numpy(plain(*there.arrays, **mapped)))
    compare(layer, got, twin_of(layer, expert_map=expert_map))


@quantizations
def test_sorted_tokens_need_no_more_than_their_workspaces(
    quantization: str | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = small(rng, quantization)
    layer.topk_ids[::2, 1] = -1
    want = twin_of(layer)
    experts = EXPERTS["AutoExperts"](layer.config)
    sizes = (9, 256, 256, 2, 4, 4, "bfloat16")
    ours, plain = experts.sorted_workspace_shapes(*sizes), experts.workspace_shapes(*sizes)
    assert ours.output == (18, 256)
    assert math.prod(ours.workspace13) <= math.prod(plain.workspace13)
    assert ours.workspace2 == plain.workspace2
    original = type(arrays.NUMPY).empty

    def poisoned(self: Any, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        made = original(self, shape, dtype, like)
        made.view(np.uint8)[...] = 0xFF  # NaN in every float
        return made

    monkeypatch.setattr(type(arrays.NUMPY), "empty", poisoned)
    # The experts do not sort again.
    monkeypatch.setattr("cukern.fused_moe.experts.moe_sort", None)
    for gather in (True, False):
        experts.chosen.gather = gather  # type: ignore[attr-defined]
        same_bits(FusedMoEModularKernel(Sorting(4), experts)(*layer.arrays), want)


def test_weights_on_the_input_of_sorted_tokens(rng: np.random.Generator) -> None:
    layer = small(rng, topk=1)
    layer = layer._replace(topk_weights=np.linspace(0.1, 2, 9, dtype=np.float32).reshape(9, 1))
    module = FusedMoEModularKernel(Sorting(4), EXPERTS["GroupedGemmExperts"]())
    got = module(*layer.arrays, apply_router_weight_on_input=True)
    same_bits(got, twin_of(layer, apply_router_weight_on_input=True))


def test_sorted_tokens_are_refused_where_they_do_not_fit(rng: np.random.Generator) -> None:
    layer = small(rng)
    # BySlot as experts that know nothing of sorted tokens.
    experts = BySlot()
    experts.supports_sorted_tokens = lambda: False  # type: ignore[method-assign]
    message = "Sorting sorts the tokens and adds up the experts' rows itself, and BySlot takes no sorted tokens"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        FusedMoEModularKernel(Sorting(4), experts)
    assert not NaiveBatchedExperts().supports_sorted_tokens()
    assert not EXPERTS["BatchedAutoExperts"]().supports_sorted_tokens()
    with pytest.raises(NotImplementedError, match="NaiveBatchedExperts takes no tokens that have been sorted"):
        NaiveBatchedExperts().sorted_workspace_shapes(9, 256, 256, 2, 4, 4, "bfloat16")
    with pytest.raises(ValueError, match="chunk_size must be None: Sorting sorts all tokens together, got 4"):
        FusedMoEModularKernel(Sorting(4), EXPERTS["GroupedGemmExperts"](), chunk_size=4)
    pf = Sorting(4)
    pf.sorts = False
    message = "Sorting.prepare must return expert_tokens_meta.sorted: sorts_tokens() is True"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        FusedMoEModularKernel(pf, EXPERTS["GroupedGemmExperts"]())(*layer.arrays)
    pf.sorts, pf.says = True, False
    message = "Sorting.prepare must return no expert_tokens_meta.sorted: sorts_tokens() is False"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        FusedMoEModularKernel(pf, EXPERTS["GroupedGemmExperts"]())(*layer.arrays)


class Received(MoEPrepareAndFinalizeNoEP):
    """Brings the first rank of two the tokens of both, and takes its own results, the last ones, back out."""

    def __init__(self, others: Layer) -> None:
        self.others = others
        self.finalized: list[Any] = []

    def num_dispatchers(self) -> int:
        return 2

    def expert_map(self, like: Any) -> Any:
        return np.array([-1, 1, -1, 0], np.int32)

    def prepare(self, a1: Any, topk_weights: Any, topk_ids: Any, *rest: Any) -> Prepared:
        num_experts, expert_map, *options = rest
        assert num_experts == 4 and expert_map.tolist() == [-1, 1, -1, 0]
        a1, topk_weights, topk_ids = (
            np.concatenate([theirs, own])
            for theirs, own in zip(
                (self.others.hidden_states, self.others.topk_weights, self.others.topk_ids),
                (a1, topk_weights, topk_ids),
                strict=True,
            )
        )
        prepared = super().prepare(a1, topk_weights, topk_ids, num_experts, expert_map, *options)
        return prepared._replace(topk_weights=topk_weights, topk_ids=topk_ids)

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        output, fused, self.finalized = args[0], args[1], args[2:4]
        others = len(self.others.hidden_states)
        assert len(fused) == len(output) + others
        output[...] = fused[others:]


@quantizations
@pytest.mark.parametrize("own_tokens", [0, 3, 5])
@pytest.mark.parametrize("others", [0, 4])
def test_the_experts_get_the_received_ids_and_finalize_the_callers(
    others: int, own_tokens: int, quantization: str | None, rng: np.random.Generator
) -> None:
    layer = small(rng, quantization, tokens=own_tokens, experts=2)
    layer.topk_ids[...] = rng.integers(0, 4, layer.topk_ids.shape)
    theirs = small(rng, quantization, tokens=others, experts=2)
    pf = Received(theirs)
    module = FusedMoEModularKernel(pf, EXPERTS["AutoExperts"](layer.config), chunk_size=4)
    got = module(*layer.arrays)
    same_bits(got, twin_of(layer, expert_map=pf.expert_map(None)))
    assert [id(array) for array in pf.finalized] == [id(layer.topk_weights), id(layer.topk_ids)]


# --- launches -------------------------------------------------------------------------------------------


def said(launch: Launch) -> Any:
    """All of a launch but where its arrays are."""

    def numbers(fields: dict[str, Any]) -> Any:
        found = {name: numbers(x) if isinstance(x, dict) else x for name, x in fields.items()}
        return {name: x for name, x in found.items() if not isinstance(x, int) or x < 1 << 32}

    return launch.variant, launch.grid, launch.block, launch.shared_bytes, numbers(launch.fields)


@pytest.mark.parametrize("tokens", [1, 3, 64, 700])
@quantizations
@pytest.mark.filterwarnings("ignore::cukern.PerformanceWarning")
def test_a_layer_launches_what_its_classes_do(
    quantization: str | None,
    tokens: int,
    rng: np.random.Generator,
    pretended: PretendedGPU,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_moe.buffers, "arch_of_device", lambda device: "90a")
    forms: list[dict[str, Any]] = [{}, {"activation": "swigluoai"}, {"expert_map": torch.zeros(12).int()}]
    forms.append({"apply_router_weight_on_input": True})
    for options in forms:
        layer = small(rng, quantization, tokens, topk=1 if options is forms[-1] else 2).map(as_tensor("cpu"))
        found = []
        for route in (call, call, call, lambda layer, **options: standard(layer)(*layer.arrays, **options)):
            assert route(layer, **options).shape == layer.hidden_states.shape
            found.append([*map(said, pretended.launches)])
            pretended.launches.clear()
        assert found[0] and found[0] == found[1] == found[2] == found[3]


# --- commands and benchmarks ----------------------------------------------------------------------------


def test_doctor_says_which_classes_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["doctor", "--moe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [tuple(line.split(maxsplit=2)) for line in lines if line.split()[:1] and line.split()[0] in EXPERTS]
    assert list(dict.fromkeys(row[0] for row in rows)) == list(EXPERTS)
    standard, batched, *_ = PREPARE_FINALIZE
    able = {row[:2]: row[2].strip() for row in rows}
    assert able["Fp8Experts", standard] == able["Fp8Experts", batched] == "fp8"
    assert able["GroupedGemmExperts", standard] == "16 bits"
    assert able["BatchedFp8BlockExperts", batched] == "fp8_block"
    assert ("GroupedGemmExperts", batched) not in able
    reason = (
        "MoEPrepareAndFinalizeNoEP gives activations in the format Standard, and NaiveBatchedExperts takes BatchedExp"
    )
    assert any(reason in line for line in lines)


@pytest.mark.parametrize(
    ("pf_name", "experts_name"),
    [("MoEPrepareAndFinalizeNoEP", "AutoExperts"), ("BatchedPrepareAndFinalize", "Fp4Experts")],
)
def test_profile_writes_a_trace(
    pf_name: str, experts_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "device_count", lambda: 0)
    path = tmp_path / "trace.json"
    sizes = [f"--{name}={value}" for name, value in {"tokens": 5, "experts": 3, "inter": 128, "hidden": 128}.items()]
    arguments = ["profile-moe", "--pf-type", pf_name, "--experts-type", experts_name, "--trace", str(path), *sizes]
    assert main(arguments) == 0
    assert f"wrote {path}: " in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names[0] == "FusedMoEModularKernel.forward"
    assert f"{pf_name}.prepare" in names and f"{experts_name}.apply" in names and f"{pf_name}.finalize" in names
    gemm = "moe_gemm" if experts_name == "AutoExperts" else "moe_gemm_batched"
    assert names.count(gemm) == 2 and "moe_unpermute" in names
    whole = events[0]
    for event in events:
        assert event["ph"] == "X" and event["dur"] >= 0
        assert whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["--experts-type", "NaiveBatchedExperts"],
            "MoEPrepareAndFinalizeNoEP gives activations in the format Standard",
        ),
        (["--quant", "mxfp4"], "--quant must be one of none with GroupedGemmExperts, got mxfp4"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--topk", "9"], "--topk must be at most --experts, 8, got 9"),
        (["--inter", "100"], "--inter must be a multiple of 128, got 100"),
        (["--trace", "no/such/folder/x.json"], "--trace no/such/folder/x.json: there is no folder no/such/folder"),
    ],
)
def test_profile_refuses(changes: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "GroupedGemmExperts"]
    assert main(["profile-moe", *given, "--trace", str(tmp_path / "trace.json"), *changes]) == 2
    assert message in capsys.readouterr().err


CASES = [case for case in bench_fused_moe.cases() if case.gpus == 1]


def test_the_cases_are_those_of_the_models() -> None:
    assert len({json.dumps(case.case) for case in CASES}) == len(CASES) == 38
    sizes = ["tokens", "experts", "inter", "hidden", "topk", "dtype"]
    assert all([key for key in case.case if key != "activation"] == sizes for case in CASES)
    # At one token of Mixtral, the weights of two experts.
    assert CASES[0].bytes == pytest.approx(2 * 3 * 14336 * 4096 * 2, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_benchmark_on_small_sizes(dtype: str) -> None:
    case = bench_fused_moe._case(bench_fused_moe.Sizes(4, 128, 256, 2), 24, dtype)
    inputs = case.inputs(torch.Generator().manual_seed(0))
    ours = case.call(*inputs)
    assert torch.isfinite(ours.float()).all() and 0.01 < float(ours.float().std()) < 10
    if "torch" in case.baselines:
        assert case.agree is not None
        assert case.agree(ours, case.baselines["torch"].load()(*inputs))
        assert not case.agree(ours, ours.roll(1, 0))


def test_the_benchmark_of_gpt_oss_on_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_fused_moe, "GPT_OSS", bench_fused_moe.Sizes(4, 96, 64, 2))
    case = bench_fused_moe._gpt_oss(5)
    inputs = case.inputs(torch.Generator().manual_seed(0))
    given, biases = inputs[:7], inputs[-2:]
    got = case.call(*given, *biases)
    assert case.case["activation"] == "swigluoai"
    assert torch.isfinite(got.float()).all()
    prepared = [cukern.prepare_weights(w, s) for w, s in zip(given[1:3], given[5:7], strict=True)]
    torch.testing.assert_close(case.call(*given, *prepared, *biases), got)


# --- on a GPU -------------------------------------------------------------------------------------------


def cuda(layer: Layer) -> Layer:
    return layer.map(as_tensor("cuda"))


def test_where_the_first_product_gathers() -> None:
    def gathers(name: str, rows: int, columns: int, arch: str = "90a") -> bool:
        return EXPERTS[name]()._gathers(rows, arch, columns)  # type: ignore[attr-defined]

    assert gathers("GroupedGemmExperts", 1024, 8192)
    assert not gathers("GroupedGemmExperts", 1024, 8193)
    assert gathers("GroupedGemmExperts", 4, 28672) and gathers("GroupedGemmExperts", 1024, 28672, "80")
    assert gathers("Fp8BlockExperts", 4, 4096) and not gathers("Fp8BlockExperts", 5, 4096)


@pytest.mark.gpu
@dtypes
@quantizations
@pytest.mark.parametrize("tokens", [1, 3, 40, 300], ids=["one", "few", "gathered", "permuted"])
def test_layers_on_a_gpu(tokens: int, quantization: str | None, dtype: str, rng: np.random.Generator) -> None:
    layer = small(rng, quantization, tokens=tokens, dtype=dtype)
    ids = np.where(rng.random(layer.topk_ids.shape) < 0.1, -1, layer.topk_ids).astype(np.int64)
    layer = layer._replace(topk_ids=ids)
    for activation in ACTIVATIONS if tokens == 40 else ("silu",):
        compare(layer, call(cuda(layer), activation=activation), twin_of(layer, activation=activation))


@pytest.mark.gpu
@quantizations
@pytest.mark.parametrize("gather", [True, False])
def test_gathered_and_permuted_chunks_on_a_gpu(
    gather: bool, quantization: str | None, rng: np.random.Generator
) -> None:
    layer = small(rng, quantization, tokens=70, experts=6)
    module_layer = cuda(layer)
    want = twin_of(layer)
    for chunk_size in (16, None):
        module = standard(module_layer, chunk_size=chunk_size)
        module.fused_experts.chosen.gather = gather  # type: ignore[attr-defined]
        compare(layer, module(*module_layer.arrays), want)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("quantization", [None, "fp8_block"])
def test_small_layers_of_either_format(quantization: str | None, rng: np.random.Generator) -> None:
    layer = small(rng, quantization, tokens=5, hidden=128, experts=3)
    layer.topk_ids[1, 0] = -1
    there = layer.map(PLACES["CuPy"])
    want = twin_of(layer)
    compare(layer, call(there), want)
    pf = PREPARE_FINALIZE["BatchedPrepareAndFinalize"](6, 3)  # type: ignore[call-arg]
    module = FusedMoEModularKernel(pf, EXPERTS["BatchedAutoExperts"](there.config))
    compare(layer, module(*there.arrays), want)


@pytest.mark.gpu
@quantizations
def test_few_launches_and_no_waiting(
    quantization: str | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = cuda(small(rng, quantization, tokens=1))
    call(layer)
    launched = []
    overlapping = overlap.overlapping

    def counting(file: str, arch: str) -> Callable[..., None]:
        launch = overlapping(file, arch) or driver.launchKernel

        def counted(*sizes: int) -> None:
            launched.append(sizes)
            launch(*sizes)

        return counted

    monkeypatch.setattr(overlap, "overlapping", counting)
    variants = [variant for own in kernel.KERNELS.values() for one in own for variant in one.variants()]
    for variant in variants:
        variant.ready.clear()  # it keeps what it launches with
    call(layer)
    launched.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for variant in variants:
            variant.ready.clear()
    assert 0 < len(launched) <= 6, launched


@pytest.mark.gpu
@quantizations
def test_layers_replay_in_a_cuda_graph(quantization: str | None, rng: np.random.Generator) -> None:
    first, second = (small(rng, quantization, tokens=33) for _ in range(2))
    second = second._replace(w1=first.w1, w2=first.w2, config=first.config)
    there = cuda(first)
    call(there)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(there)
    for layer in (second, first):
        for name in ("hidden_states", "topk_weights", "topk_ids"):
            getattr(there, name).copy_(getattr(cuda(layer), name))
        out.fill_(NAN)
        graph.replay()
        compare(layer, out, twin_of(layer))


@pytest.mark.gpu
@settings(max_examples=25)
@given(
    tokens=st.integers(1, 90),
    experts=st.integers(1, 40),
    inter=st.integers(1, 5),
    hidden=st.integers(1, 6),
    topk=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
    quantization=st.sampled_from(QUANTIZATIONS),
)
def test_layers_of_any_shape(
    tokens: int, experts: int, inter: int, hidden: int, topk: int, seed: int, missing: float, quantization: str | None
) -> None:
    rng = np.random.default_rng(seed)
    unit = 128 if quantization in ("fp8_block", "fp8") else 32
    sizes = {"experts": experts, "inter": inter * unit, "hidden": hidden * unit, "topk": min(topk, experts)}
    layer = small(rng, quantization, tokens=tokens, **sizes)
    ids = np.where(rng.random(layer.topk_ids.shape) < missing, -1, layer.topk_ids)
    layer = layer._replace(topk_ids=ids.astype(np.int32))
    compare(layer, call(cuda(layer)), twin_of(layer))


@pytest.mark.gpu
def test_profile_traces_the_kernels(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = ["--pf-type", "MoEPrepareAndFinalizeNoEP", "--experts-type", "AutoExperts", "--trace", str(path)]
    assert main(["profile-moe", *arguments]) == 0
    text = path.read_text()
    assert "sort_chunks" in text
    assert "gemm_" in text
