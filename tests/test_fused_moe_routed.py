"""Layers of one token: both products by the router's ids, with the bits of the sorted path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.fused_moe.example import Layer, random_layer
from cukern.ops.moe_gemm import routed
from cukern.reference import fused_moe as twin
from cukern.runtime.op import forget_plans
from tests.buffers import same_bits, to_numpy
from tests.pretended import PretendedGPU, pretended  # noqa: F401
from tests.test_fused_moe_combinations import as_tensor, compare

ROUTED = ["gemm_stream_routed", "gemm_stream_summed"]


def layer_of(rng: np.random.Generator, tokens: int = 1, **sizes: Any) -> Layer:
    return random_layer(rng, tokens, **{"experts": 6, "inter": 128, "hidden": 256, "topk": 2} | sizes)


def kernels_of(layer: Layer, **options: Any) -> list[str]:
    found = cukern.explain(cukern.fused_experts, *layer.arrays, arch="90a", **options)
    return [launch.kernel.partition("<")[0] for launch in found.launches]


@pytest.fixture
def up_to_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(routed, "MOST_TOKENS", 2)
    forget_plans()
    yield
    forget_plans()


def test_one_token_is_not_sorted(rng: np.random.Generator) -> None:
    layer = layer_of(rng)
    assert kernels_of(layer) == ROUTED
    assert kernels_of(layer._replace(topk_ids=layer.topk_ids.astype(np.int64))) == ROUTED
    assert kernels_of(layer, expert_map=np.arange(6, dtype=np.int32)) == ROUTED
    assert kernels_of(layer, w1_bias=np.zeros((6, 256), np.float32), activation="swigluoai", interleaved=True) == ROUTED
    assert kernels_of(layer_of(rng, topk=1), apply_router_weight_on_input=True) == ["unpermute_rows", *ROUTED]
    without_gate = layer._replace(w1=layer.w1[:, :128].copy())
    assert kernels_of(without_gate, activation="relu2_no_mul") == ROUTED


def test_what_else_is_sorted(rng: np.random.Generator) -> None:
    sizes: dict[str, Any]
    for sizes in ({"tokens": 2}, {"experts": 1, "topk": 1}, {"experts": 40, "topk": 33}, {"inter": 60}):
        assert kernels_of(layer_of(rng, **sizes))[0] == "sort_chunks", sizes
    layer = layer_of(rng)
    strided = np.zeros((6, 256, 264), layer.w1.dtype)[:, :, :256]
    assert kernels_of(layer._replace(w1=strided))[0] == "sort_chunks"


def test_one_token_after_two(rng: np.random.Generator, pretended: PretendedGPU) -> None:  # noqa: F811
    layers = {tokens: layer_of(rng, tokens).map(as_tensor("cpu")) for tokens in (1, 2)}
    for tokens in (1, 1, 2, 1, 2, 2, 1):
        pretended.launches.clear()
        cukern.fused_experts(*layers[tokens].arrays)
        names = [x.variant.instance.function for x in pretended.launches]
        assert names == ROUTED if tokens == 1 else names[0] == "sort_chunks"
    values = [layers[2].hidden_states.clone(), *layers[2].arrays, torch.zeros(4, 128).bfloat16(), 6]
    with pytest.raises(ValueError, match=r"^hidden_states must be a layer of at most 1 tokens"):
        routed.routed_experts(*values)


def test_forms_have_rows_in_equal_parts() -> None:
    assert [routed.tile_for(k)[:2] for k in (8, 512, 768, 2048, 2880, 4096, 7168, 14336)] == [
        (4, 1), (4, 2), (2, 3), (1, 8), (1, 6), (1, 8), (1, 7), (1, 8),
    ]  # fmt: skip
    assert [routed.slots_for(*x) for x in ((8, 128, 128), (2, 8, 8), (1, 4, 4), (8, 32, 256), (6, 64, 64))] == [
        4, 2, 1, 1, 4,
    ]  # fmt: skip


def test_bad_arrays_are_refused(rng: np.random.Generator) -> None:
    layer = layer_of(rng)
    values = [layer.hidden_states.copy(), *layer.arrays, np.empty((2, 128), layer.w1.dtype), 6]
    with pytest.raises(ValueError, match="hidden_states must be on a GPU, got an array in host memory"):
        routed.routed_experts(*values)


# --- on a GPU -------------------------------------------------------------------------------------------

SHAPES = [
    {},
    {"experts": 128, "inter": 768, "hidden": 2048, "topk": 8},
    {"experts": 5, "inter": 16, "hidden": 8, "topk": 3},
    {"experts": 9, "inter": 1000, "hidden": 264, "topk": 9},
    {"experts": 4, "inter": 2056, "hidden": 520, "topk": 1},
    {"experts": 20, "inter": 40, "hidden": 4104, "topk": 16},
]
FORMS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu_tanh"},
    {"activation": "swigluoai", "interleaved": True, "alpha": 1.5, "limit": 3.0},
    {"activation": "relu2_no_mul"},
]


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", SHAPES)
def test_the_bits_are_those_of_the_sorted_path(
    sizes: dict[str, Any], dtype: str, rng: np.random.Generator, up_to_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = as_tensor("cuda")
    # Weights are made once, since the largest take seconds.
    whole = layer_of(rng, 2, dtype=dtype, **sizes)
    without_gate = whole._replace(w1=whole.w1[:, : whole.w1.shape[1] // 2].copy())
    layers = {gated: (own, move(own.w1), move(own.w2)) for gated, own in ((True, whole), (False, without_gate))}
    for tokens, form, biased in itertools.product((1, 2), FORMS, (False, True)):
        layer, *weights = layers[form.get("activation") != "relu2_no_mul"]
        experts, n, hidden = layer.w1.shape
        ids, topk_weights = layer.topk_ids[:tokens], layer.topk_weights[:tokens]
        ids = np.where(rng.random(ids.shape) < 0.2, -1, ids).astype(np.int64)
        ids[rng.random(ids.shape) < 0.1] = 2**32
        layer = layer._replace(
            hidden_states=rng.standard_normal((tokens, hidden), np.float32).astype(layer.w1.dtype),
            topk_ids=ids,
            topk_weights=np.where(ids % 2**32 != ids, np.nan, topk_weights).astype(np.float32),
        )
        options = dict(form)
        places = rng.permutation(experts).astype(np.int32)
        options["expert_map"] = np.where(places % 3 == 2, -1, places)
        if biased:
            options |= {"w1_bias": rng.normal(size=(experts, n)).astype(np.float32)}
            options |= {"w2_bias": rng.normal(size=(experts, hidden)).astype(layer.w1.dtype)}
        x, *routing = (move(array) for array in (layer.hidden_states, layer.topk_weights, layer.topk_ids))
        given = {name: move(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        found = []
        for most in (2, 0):
            monkeypatch.setattr(routed, "MOST_TOKENS", most)
            forget_plans()
            out = torch.full_like(x, torch.nan)
            found.append(cukern.fused_experts(x, *weights, *routing, out=out, **given))
        same_bits(found[0], to_numpy(found[1]))
        compare(layer, found[0], twin.fused_experts(*layer.arrays, **options))


@pytest.mark.gpu
def test_one_token_in_a_graph(rng: np.random.Generator) -> None:
    first, second = layer_of(rng), layer_of(rng)
    second = second._replace(w1=first.w1, w2=first.w2)
    there = first.map(as_tensor("cuda"))
    cukern.fused_experts(*there.arrays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cukern.fused_experts(*there.arrays)
    for layer in (second, first):
        for name in ("hidden_states", "topk_weights", "topk_ids"):
            getattr(there, name).copy_(as_tensor("cuda")(getattr(layer, name)))
        out.fill_(torch.nan)
        graph.replay()
        compare(layer, out, twin.fused_experts(*layer.arrays))
