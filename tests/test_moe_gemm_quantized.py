"""Products in FP8 by blocks whose activation is quantized again."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cukern
from cukern.fused_moe.buffers import is_vector_aligned
from cukern.fused_moe.layer import _Numbers
from cukern.ops.moe_gemm import fp8, moe_gemm_quantized
from cukern.runtime import gpu
from cukern.runtime.op import forget_plans
from tests.buffers import POISON, on_gpu, same_bits, to_numpy
from tests.plans import plan_of
from tests.test_moe_gemm import E4M3, made

#: Groups of no rows, of parts of 64 rows and of both blocks of a cluster; more experts than a warp looks at.
GROUPS = [([3, 0, 4], 272), ([64, 65, 1, 127, 129, 192, 193, 255, 257], 400), ([1] * 40 + [300], 144)]
#: Where the arrays are, and the blocks of a cluster.
PLACES = [(np.asarray, 1), *(pytest.param(on_gpu, x, marks=pytest.mark.gpu) for x in (1, 2))]
HOPPER = gpu.of_arch("90a")
#: The weights of a small layer, and their scales.
SMALL = {
    **{"w1": np.zeros((8, 256, 512), E4M3), "w1_scale": np.zeros((8, 2, 4), np.float32)},
    **{"w2": np.zeros((8, 512, 128), E4M3), "w2_scale": np.zeros((8, 4, 1), np.float32)},
}
WIDE_SCALE = np.zeros((8, 4, 32), np.float32)


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that sets how many blocks a cluster has."""

    def use(cluster: int) -> None:
        monkeypatch.setattr(fp8, "_FP8_ALONE", 1 << 31 if cluster == 1 else -1)
        forget_plans()

    yield use
    monkeypatch.undo()
    forget_plans()


@pytest.mark.parametrize(("place", "cluster"), PLACES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai"])
@pytest.mark.parametrize(("counts", "k"), GROUPS, ids=str)
def test_a_quantized_activation_is_that_of_two_calls(
    counts: list[int], k: int, activation: str, place: Any, cluster: int, clusters: Any, rng: np.random.Generator
) -> None:
    clusters(cluster)
    for n, dtype in ((256, "bfloat16"), (768, "float16")):
        x = made(rng, counts, n, k, "fp8 block", spare=2).arguments
        bytes_of = {name: place(x[name].view(np.uint8)) for name in ("a", "b")}
        given = {**bytes_of, **{name: place(x[name]) for name in ("expert_offsets", "a_scale", "b_scale")}}
        rows = sum(counts)
        q, s = cukern.silu_and_mul_quant(cukern.moe_gemm(**given, out_dtype=dtype), activation)
        out_q = place(np.full((rows + 2, n // 2), POISON, np.uint8))
        out_s = place(np.full((rows + 2, n // 256), np.nan, np.float32))
        moe_gemm_quantized(**given, activation=activation, out_dtype=dtype, out_q=out_q, out_s=out_s)
        same_bits(to_numpy(out_q)[:rows], to_numpy(q)[:rows].view(np.uint8))
        same_bits(to_numpy(out_s)[:rows], to_numpy(s)[:rows])
        assert (to_numpy(out_q)[rows:] == POISON).all()
        assert np.isnan(to_numpy(out_s)[rows:]).all()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_kernel_stays_inside_its_arrays(cluster: int, clusters: Any, rng: np.random.Generator) -> None:
    # Stages are filled once; see tests/test_moe_gemm_fp8.py.
    clusters(cluster)
    x = made(rng, [19, 0, 33], 256, 160, "fp8 block", spare=0).arguments
    given = {name: x[name].view(np.uint8) if name in ("a", "b") else x[name] for name in x}
    given = {name: given[name] for name in ("a", "b", "expert_offsets", "a_scale", "b_scale")}
    want_q, want_s = np.zeros((52, 128), np.uint8), np.zeros((52, 1), np.float32)
    moe_gemm_quantized(**given, activation="silu", out_dtype="bfloat16", out_q=want_q, out_s=want_s)
    out_q, out_s = on_gpu(np.full((52, 128), POISON, np.uint8)), on_gpu(np.full((52, 1), np.nan, np.float32))
    on_the_gpu = {name: on_gpu(value) for name, value in given.items()}
    moe_gemm_quantized(**on_the_gpu, activation="silu", out_dtype="bfloat16", out_q=out_q, out_s=out_s)
    np.testing.assert_allclose(to_numpy(out_s), want_s, rtol=0.02)
    ours, theirs = (x.view(E4M3).astype(np.float32) for x in (to_numpy(out_q), want_q))
    assert np.abs(ours - theirs).max() <= 32  # a step of the largest numbers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": (2, 128, 128), "b_scale": (2, 1, 1), "out_q": (4, 64)}, "b must be of n that is a multiple of 256"),
        ({"out_q": (4, 256)}, r"out_q must be of shape \[rows, n / 2\]"),
        ({"out_s": (4, 2)}, r"out_s must be of shape \[rows, n / 256\]"),
        ({"b_scale": (2,), "a_scale": (4,)}, "b_scale must be by blocks"),
        ({"activation": "relu2_no_mul"}, "activation must be one with a gate"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    shapes = {"a": (4, 128), "b": (2, 256, 128), "a_scale": (4, 1), "b_scale": (2, 2, 1), "out_q": (4, 128)}
    shapes |= {"out_s": (4, 1), **changes}
    given: dict[str, Any] = {"activation": shapes.pop("activation")} if "activation" in changes else {}
    given |= {name: np.zeros(x, "float32" if "_s" in name else E4M3) for name, x in shapes.items()}
    with pytest.raises(ValueError, match=message):
        moe_gemm_quantized(expert_offsets=np.array([0, 1, 4], np.int32), **given)


@pytest.mark.parametrize(
    ("rows", "experts", "n", "want"),
    [
        (4, 32, 4096, False),  # the weights are streamed
        (5, 32, 4096, True),
        (16, 32, 4096, True),
        (128, 32, 4096, True),
        (129, 32, 4096, False),  # the plain product has tiles with tails
        (600, 8, 4096, False),
        (1024, 8, 4096, True),
        (8192, 4, 4096, True),
        (16, 8, 256, False),  # with twice the weights, tiles for half of the multiprocessors
        (16, 32, 4096 + 128, False),
    ],
)
def test_where_the_activation_is_quantized(rows: int, experts: int, n: int, want: bool) -> None:
    assert fp8.quantizes(rows, experts, n, HOPPER) is want
    assert not fp8.quantizes(rows, experts, n, None)
    assert not fp8.quantizes(rows, experts, n, gpu.of_arch("100a"))


def launched(tokens: int, **more: Any) -> list[str]:
    """The kernels of a layer with 8 experts on Hopper."""
    w1, w2 = np.zeros((8, 4096, 512), E4M3), np.zeros((8, 512, 2048), E4M3)
    scales = {"w1_scale": np.zeros((8, 32, 4), np.float32), "w2_scale": np.zeros((8, 4, 16), np.float32)}
    x, ids = np.zeros((tokens, 512), "bfloat16"), np.zeros((tokens, 2), np.int32)
    given = {"hidden_states": x, "w1": w1, "w2": w2, "topk_weights": ids.astype(np.float32), "topk_ids": ids}
    given |= {"activation": "silu", "quant": _Numbers("fp8_block", ()), "apply_router_weight_on_input": False}
    trace, _ = plan_of("_layer", **given | scales | more)
    return [step.variant.instance.function for step in trace.steps]


def test_weights_of_units() -> None:
    whole = np.zeros(4096 + 64, np.uint8)
    start = -whole.ctypes.data % 16
    rows = whole[start : start + 4096].reshape(16, 256)
    assert is_vector_aligned(rows)
    assert not is_vector_aligned(rows[:, :128])
    assert not is_vector_aligned(whole[start + 8 :])


@pytest.mark.parametrize(
    ("tokens", "more", "count"),
    [
        (4, {}, 0),
        (64, {}, 1),
        (512, {}, 1),
        (2048, {}, 0),
        (64, SMALL, 0),
        (2048, {"activation": "relu2_no_mul", "w2": np.zeros((8, 512, 4096), E4M3), "w2_scale": WIDE_SCALE}, 0),
        (2048, {"w1": np.zeros((8, 4096, 512 + 8), E4M3)[..., :512]}, 0),
        (2048, {"w1_bias": np.zeros((8, 4096), np.float32)}, 0),
        (2048, {"quant": _Numbers("fp8_block", (("gemm1_interleaved", True),))}, 0),
    ],
    ids=["4", "64", "512", "2048", "small", "no gate", "strides", "bias", "interleaved"],
)
def test_a_layer_quantizes_in_its_first_product(tokens: int, more: dict[str, Any], count: int) -> None:
    functions = launched(tokens, **more)
    assert functions.count("gemm_fp8_blocks") == count
    # The tokens are quantized as they are permuted, unless the first product gathers them.
    assert functions.count("permute_quantized") == (tokens > 4)
    assert functions.count("quantize_groups") == (tokens <= 4) + 1 - count


def test_compiled_graphs_keep_the_product(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("cukern.torch_ops")
    x = made(rng, [3, 2], 256, 128, "fp8 block").arguments
    given = {name: torch.from_numpy(x[name].view(np.uint8)).view(torch.float8_e4m3fn) for name in ("a", "b")}
    given |= {name: torch.from_numpy(x[name]) for name in ("expert_offsets", "a_scale", "b_scale")}
    wanted = cukern.silu_and_mul_quant(cukern.moe_gemm(**given))
    out_q, out_s = (torch.zeros_like(array) for array in wanted)
    compiled = torch.compile(lambda **more: moe_gemm_quantized(**more), fullgraph=True, backend="aot_eager")
    for got in (compiled(**given, out_q=out_q, out_s=out_s), (out_q, out_s)):
        for mine, want in zip(got, wanted, strict=True):
            same_bits(to_numpy(mine[:5].view(torch.uint8)), to_numpy(want[:5].view(torch.uint8)))
