"""The activations, gated and with a bias: the twin against torch, the kernels against the twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_moe_activation, harness
from cukern.ops.moe_activation import WITH_BIAS
from cukern.reference import moe_activation as twin
from cukern.runtime import activation as activations
from cukern.runtime import arrays, template
from cukern.runtime.cuda import cupy
from cukern.runtime.rows import MAX_ROW, tile
from cukern.testing import assert_matches
from tests.activations import activated
from tests.buffers import Buffer, as_torch, place, same_bits

Array = NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")
NAMES = activations.ACTIVATIONS
WRAPPERS = {function: name for name in NAMES if hasattr(cukern, function := f"{name}_and_mul")}


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return (3 * rng.standard_normal(shape)).astype(arrays.numpy_dtype(dtype))


def biased_matches(got: Any, want: Array) -> None:
    assert_matches("moe_activation.biased", got, want)


def matches(got: Any, want: Array) -> None:
    assert_matches("moe_activation.out", got, want)


# --- the twin -----------------------------------------------------------------------------------------


def by_torch(name: str, x: torch.Tensor) -> torch.Tensor:
    """torch's activation, in float64."""
    gate, up = x.double().chunk(2, -1)
    return activated(name, gate, up)


def test_the_kernels_have_the_alpha_and_the_limit_of_the_host() -> None:
    for file in ("moe_activation", "add_bias_act"):
        text = template.text(f"moe_activation/{file}")
        (declared,) = re.findall(r"\bconstexpr float ALPHA = ([\d.]+)f, LIMIT = ([\d.]+)f;", text)
        assert (*map(float, declared),) == (activations.ALPHA, activations.LIMIT)
        assert text.count(f"{activations.ALPHA}f") == 1


def test_the_numbers_of_activations_are_those_of_the_kernels() -> None:
    assert NAMES[:5] == ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2")
    constants = template.constants("moe_activation/add_bias_act")
    numbers = [constants[name.upper()] for name in dict.fromkeys([*NAMES, *WITH_BIAS])]
    assert len({*numbers}) == len(numbers)
    assert [activations.number(name) for name in NAMES] == numbers[: len(NAMES)]


@pytest.mark.parametrize("name", NAMES)
def test_the_twin_is_what_torch_has(name: str, rng: np.random.Generator) -> None:
    x = draw(rng, (40, 64), "float32") * 3
    np.testing.assert_allclose(twin.moe_activation(x, name), by_torch(name, torch.from_numpy(x)), 2e-6, 2e-6)


def test_by_hand(put: Callable[[Any], Any]) -> None:
    x = put(np.array([[0.0, 1, -2, 9, 2, 3, 4, 20]], np.float32))
    got = {name: arrays.library_of(x).to_numpy(cukern.moe_activation(x, name))[0] for name in NAMES}  # type: ignore[union-attr]
    np.testing.assert_allclose(got["relu2"], [0, 3, 0, 1620])
    # 0 * silu(2), 1 * silu(3), -2 * silu(4), 9 * silu(20)
    last = arrays.library_of(x).to_numpy(cukern.mul_and_silu(x))[0]  # type: ignore[union-attr]
    np.testing.assert_allclose(last, [0, 3 * 0.9525741, -8 * 0.9820138, 180], 1e-5)
    np.testing.assert_allclose(got["silu"], [0, 3 * 0.7310586, -8 * 0.1192029, 180 * 0.9998766], 1e-5)
    np.testing.assert_allclose(got["swigluoai"][3], 7 * 8, 1e-4)
    for function, name in WRAPPERS.items():
        matches(getattr(cukern, function)(x), arrays.library_of(x).to_numpy(cukern.moe_activation(x, name)))  # type: ignore[union-attr]


def test_the_twin_with_columns_in_pairs_and_bounds(rng: np.random.Generator) -> None:
    x = draw(rng, (40, 64), "float32") * 3
    halves = np.concatenate([x[:, ::2], x[:, 1::2]], 1)
    for name in NAMES:
        np.testing.assert_array_equal(twin.moe_activation(x, name, interleaved=True), twin.moe_activation(halves, name))
    gate, up = (torch.from_numpy(y).double() for y in (x[:, ::2], x[:, 1::2]))
    want = activated("swigluoai", gate, up, 0.5, 1.5)
    np.testing.assert_allclose(twin.swigluoai_and_mul(x, 0.5, 1.5, interleaved=True), want, 2e-6, 2e-6)
    # Other activations have neither.
    np.testing.assert_array_equal(twin.moe_activation(x, alpha=9.0, limit=0.0), twin.moe_activation(x))


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinities(put: Callable[[Any], Any], name: str) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 0, -100, 100, 1], np.float32)
    gate, up = np.meshgrid(special, special)
    x = np.concatenate([gate, up], axis=1)
    matches(cukern.moe_activation(put(x), name), twin.moe_activation(x, name))


def biased_by_torch(name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """torch's activation of sums in float32, in float64."""
    return activated(name, (x.float() if bias is None else x.float() + bias.float()).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_BIAS)
def test_the_twin_with_a_bias_is_what_torch_has(name: str, dtype: str, rng: np.random.Generator) -> None:
    x, bias = draw(rng, (40, 32), dtype), draw(rng, (32,), dtype)
    epsilon = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for vector in (bias, None):
        got = twin.add_bias_act(x, vector, name)
        assert got.dtype == x.dtype
        want = biased_by_torch(name, as_torch(x), None if vector is None else as_torch(vector)).numpy()
        # torch's float64 loses digits where 1 + erf or 1 + tanh is near 0.
        # gelu_quick's 1.702 is a float32.
        least = {"float16": 6e-8}.get(dtype, 1e-14 if name != "gelu_quick" else 1e-10)
        np.testing.assert_allclose(got.astype(np.float64), want, epsilon, least)


def test_the_names_of_vllm(put: Callable[[Any], Any], rng: np.random.Generator) -> None:
    x = draw(rng, (5, 32), "float16")
    exchanged = np.concatenate([x[:, 16:], x[:, :16]], axis=1)
    matches(cukern.mul_and_silu(put(x)), twin.silu_and_mul(exchanged))
    for name, same in {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_quick": "gelu_quick"}.items():
        function, want = getattr(cukern, name), twin.add_bias_act(x, None, same)
        biased_matches(function(put(x)), want)
        into = put(x.copy())
        assert function(into, out=into) is into
        biased_matches(into, want)


def test_gelu_keeps_its_digits_where_it_is_near_0() -> None:
    # By tables of the normal distribution: P(z < -5) = 2.866515718e-7, P(z < -10) = 7.61985302e-24.
    got = cukern.bias_gelu(np.array([[-4.0, -9]], np.float32), np.array([-1, -1], np.float32))
    np.testing.assert_allclose(got[0], [-5 * 2.866515718e-7, -10 * 7.61985302e-24], 1e-7)


def test_with_a_bias_by_hand(put: Callable[[Any], Any]) -> None:
    x, bias = put(np.array([[0.0, 1, -2, 9]], np.float32)), put(np.array([1.0, 1, 1, 1], np.float32))
    to_numpy = arrays.library_of(x).to_numpy  # type: ignore[union-attr]
    np.testing.assert_allclose(to_numpy(cukern.add_bias_act(x, bias, "relu"))[0], [1, 2, 0, 10])
    quick = to_numpy(cukern.add_bias_act(x, bias, "gelu_quick"))[0]
    np.testing.assert_allclose(quick, [0.8457958, 1.9356586, -0.1542042, 10], 1e-6)
    np.testing.assert_allclose(to_numpy(cukern.bias_gelu(x, bias))[0], [0.8413447, 1.9544997, -0.1586553, 10], 1e-6)
    gelu = to_numpy(cukern.bias_gelu(x, bias, approximate="tanh"))[0]
    np.testing.assert_allclose(gelu, [0.8411920, 1.9545977, -0.1588080, 10], 1e-6)
    assert cukern.bias_gelu(x, bias, out=x) is x
    np.testing.assert_allclose(to_numpy(x)[0], [0.8413447, 1.9544997, -0.1586553, 10], 1e-6)


@pytest.mark.parametrize("name", WITH_BIAS)
def test_nan_and_infinities_with_a_bias(put: Callable[[Any], Any], name: str) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, 0, -100, 100, 1, 3e38, -3e38]], np.float32)
    for bias in (None, put(x[0, ::-1].copy())):
        want = twin.add_bias_act(x, None if bias is None else x[0, ::-1], name)
        biased_matches(cukern.add_bias_act(put(x), bias, name), want)
    assert np.isnan(twin.add_bias_act(x, None, name)[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_on_the_cpu(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 16).to(dtype)
    got = cukern.silu_and_mul(x)
    assert (got.dtype, got.shape) == (dtype, (2, 3, 8))
    torch.testing.assert_close(got, by_torch("silu", x).to(dtype))
    out = torch.full((2, 3, 8), 7, dtype=dtype)
    counts = torch.tensor([0, 2], dtype=torch.int32)
    assert cukern.moe_activation(x, expert_num_tokens=counts, out=out) is out
    assert (out[0] == 7).all() and (out[1, 2] == 7).all()
    torch.testing.assert_close(out[1, :2], got[1, :2])


# --- bad input ----------------------------------------------------------------------------------------

X = np.zeros((2, 3, 8), np.float32)
COUNTS = np.zeros(2, np.int32)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1, 2]}, TypeError, "x must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
    ({"x": X.astype(int)}, TypeError, "x must be float32 or float16 or bfloat16, got int64"),
    ({"x": X[..., :7]}, ValueError, "x must be of shape [..., 2 * inter], got [2, 3, 7]"),
    ({"x": X[0, 0, 0]}, TypeError, "x must be an array (NumPy, CuPy, torch, or any with __dlpack__), got float32"),
    ({"x": X[:, :, ::2]}, ValueError, "x must be contiguous along its last dimension, with all rows at one distance"),
    ({"x": X[:, :2]}, ValueError, "x must be contiguous along its last dimension, with all rows at one distance"),
    ({"activation": "tanh"}, ValueError, "activation must be one of 'silu', 'gelu', 'gelu_tanh'"),
    ({"expert_num_tokens": COUNTS.astype(np.int64)}, TypeError, "expert_num_tokens must be int32, got int64"),
    ({"expert_num_tokens": COUNTS[:1]}, ValueError, "expert_num_tokens must be of shape [experts] = [2], got [1]"),
    ({"x": X[0], "expert_num_tokens": COUNTS}, ValueError, "x must be of shape [experts, max_tokens, size], got"),
    ({"out": X}, ValueError, "out must be of shape [..., inter] = [2, 3, 4], got [2, 3, 8]"),
    ({"out": X[..., :4]}, ValueError, "out must be contiguous"),
    ({"out": X[..., :4].astype(np.float16)}, TypeError, "out must be float32, got float16"),
    ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'vector', 'scalar', got 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        cukern.moe_activation(**{"x": X} | change)


BIAS = np.zeros(8, np.float32)
BAD_BIAS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("add_bias_act", {"x": X.astype(int)}, TypeError, "x must be float32 or float16 or bfloat16, got int64"),
    ("add_bias_act", {"x": X[:, :2]}, ValueError, "x must be contiguous along its last dimension, with all rows at"),
    ("add_bias_act", {"bias": BIAS[:7]}, ValueError, "bias must be of shape [inter] = [8], got [7]"),
    ("add_bias_act", {"bias": BIAS.astype(np.float16)}, TypeError, "bias must be float32, got float16"),
    ("add_bias_act", {"bias": [1.0]}, TypeError, "bias must be a NumPy array like x, got builtins.list"),
    ("add_bias_act", {"activation": "relu2"}, ValueError, "activation must be one of 'gelu', 'gelu_tanh', 'silu',"),
    ("add_bias_act", {"out": X[0]}, ValueError, "out must be of shape [..., inter] = [2, 3, 8], got [3, 8]"),
    ("add_bias_act", {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'vector', 'scalar', got 'fast'"),
    ("bias_gelu", {"approximate": "erf"}, ValueError, "approximate must be one of 'none', 'tanh', got 'erf'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "error", "message"), BAD_BIAS)
def test_bad_input_with_a_bias_is_refused(
    name: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**{"x": X, "bias": BIAS} | change)


def test_host_memory_has_only_the_variant_auto() -> None:
    with pytest.raises(ValueError, match="variant must be 'auto' for arrays in host memory"):
        cukern.moe_activation(X, variant="scalar")


# --- the launch -----------------------------------------------------------------------------------------


@given(
    st.integers(0, MAX_ROW), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 16, 32]), st.sampled_from([256, 1024])
)
def test_a_tile_covers_a_row(columns: int, items: int, lanes: int, most: int) -> None:
    columns -= columns % lanes
    plan = tile(columns, items, lanes, most)
    shown, rows, tile_columns, *_ = plan.geometry
    assert shown == columns and tile_columns % lanes == 0
    assert plan.chunks * tile_columns >= columns and plan.chunks < 2**16
    assert rows >= 1 and rows * tile_columns <= plan.threads * items
    assert plan.threads % 32 == 0 and 32 <= plan.threads <= most


# --- benchmarks ---------------------------------------------------------------------------------------


def test_the_benchmark_compares_the_same_thing() -> None:
    for case in bench_moe_activation.cases():
        small = bench_moe_activation.shrunk(case)
        ours, theirs = (harness.inputs(small, 0, "cpu") for _ in range(2))
        assert small.agree is not None
        assert small.agree(small.call(*ours), small.baselines["torch"].load()(*theirs))


# --- on the GPU ---------------------------------------------------------------------------------------

SHAPES = {
    "one": (1, 16),
    "one row": (1, 4096),
    "odd": (5, 2 * 77),
    "many short rows": (3000, 32),
    "long": (3, 2 * 20000),
    "three dimensions": (3, 5, 2 * 768),
    "a vector": (512,),
    "no rows": (0, 64),
    "no columns": (4, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_is_the_twin(shape: tuple[int, ...], dtype: str, name: str, rng: np.random.Generator) -> None:
    x = draw(rng, shape, dtype)
    want = twin.moe_activation(x, name)
    variants = ["auto", "scalar"] + ["vector"] * (want.shape[-1] * want.itemsize % 16 == 0)
    for variant in variants:
        out = Buffer(want.shape, dtype)
        assert cukern.moe_activation(cupy.asarray(x), name, out=out.array, variant=variant) is out.array
        matches(out.numpy(), want)
    if want.size and "vector" not in variants:
        with pytest.raises(ValueError, match="variant must be 'auto' or 'scalar' here, got 'vector'"):
            cukern.moe_activation(cupy.asarray(x), name, variant="vector")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_with_columns_in_pairs_is_the_twin(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> None:
    x = draw(rng, shape, dtype)
    for form in ({}, {"alpha": 0.5, "limit": 1.5}):
        for interleaved in (False, True):
            want = twin.moe_activation(x, "swigluoai", interleaved=interleaved, **form)
            for variant in ("auto", "scalar"):
                out = Buffer(want.shape, dtype)
                options = {"out": out.array, "variant": variant, "interleaved": interleaved, **form}
                cukern.moe_activation(cupy.asarray(x), "swigluoai", **options)
                matches(out.numpy(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_with_the_gate_last_is_the_twin(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> None:
    x = draw(rng, shape, dtype)
    want = twin.mul_and_silu(x)
    out = Buffer(want.shape, dtype)
    assert cukern.mul_and_silu(cupy.asarray(x), out=out.array) is out.array
    matches(out.numpy(), want)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(5, 2 * 77), (3, 5, 64)])
def test_rows_apart_and_off_alignment(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    x = draw(rng, shape, dtype)
    for skip, apart in ((1, 0), (0, 3), (0, 16)):
        out = Buffer((*shape[:-1], shape[-1] // 2), dtype, skip)
        cukern.moe_activation(place(x, skip, apart), out=out.array)
        matches(out.numpy(), twin.moe_activation(x))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("inter", [24, 5])
def test_rows_past_the_count_are_not_touched(inter: int, rng: np.random.Generator) -> None:
    x, counts = draw(rng, (4, 6, 2 * inter), "float16"), np.array([0, 6, 2, 9], np.int32)
    valid = twin.valid_rows(x.shape, counts)
    x[~valid] = np.nan
    out = Buffer((4, 6, inter), "float16")
    before = cupy.asnumpy(out.array)
    cukern.moe_activation(cupy.asarray(x), expert_num_tokens=cupy.asarray(counts), out=out.array)
    got = out.numpy()
    matches(got[valid], twin.moe_activation(x[valid]))
    np.testing.assert_array_equal(got[~valid].view(np.uint16), before[~valid].view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_BIAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_with_a_bias_is_the_twin(
    shape: tuple[int, ...], dtype: str, name: str, rng: np.random.Generator
) -> None:
    x, bias = draw(rng, shape, dtype), draw(rng, shape[-1:], dtype)
    for vector in (bias, None):
        want, on_gpu = twin.add_bias_act(x, vector, name), None if vector is None else cupy.asarray(vector)
        results = []
        for variant in ["auto", "scalar"] + ["vector"] * (want.shape[-1] * want.itemsize % 16 == 0):
            out = Buffer(want.shape, dtype)
            got = cukern.add_bias_act(cupy.asarray(x), on_gpu, name, out=out.array, variant=variant)
            assert got is out.array
            results.append(out.numpy())
            biased_matches(results[-1], want)
            if (dtype, name) == ("float32", "gelu"):
                assert_matches("moe_activation.gelu", results[-1], want)
            same_bits(results[-1], results[0])
        into = cupy.asarray(x)
        assert cukern.add_bias_act(into, on_gpu, name, out=into) is into
        same_bits(into, results[0])


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(5, 77), (3, 5, 64), (7, 4096)])
def test_rows_with_a_bias_apart_and_off_alignment(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    x, bias = draw(rng, shape, dtype), draw(rng, shape[-1:], dtype)
    for skip, apart in ((0, 0), (1, 0), (0, 3), (0, 16)):
        out = Buffer(shape, dtype, skip)
        cukern.bias_gelu(place(x, skip, apart), place(bias, skip), out=out.array)
        biased_matches(out.numpy(), twin.bias_gelu(x, bias))


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    st.integers(0, 70), st.integers(0, 700), st.sampled_from([*WITH_BIAS]), st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)  # fmt: skip
def test_random_shapes_with_a_bias(rows: int, inter: int, name: str, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, bias = draw(rng, (rows, inter), dtype), draw(rng, (inter,), dtype)
    got = cukern.add_bias_act(cupy.asarray(x), cupy.asarray(bias), name)
    biased_matches(got, twin.add_bias_act(x, bias, name))


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.integers(0, 70), st.integers(0, 700), st.sampled_from(NAMES), st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_random_shapes(rows: int, inter: int, name: str, dtype: str, seed: int) -> None:
    x = draw(np.random.default_rng(seed), (rows, 2 * inter), dtype)
    matches(cukern.moe_activation(cupy.asarray(x), name), twin.moe_activation(x, name))


@pytest.mark.gpu
def test_a_cuda_graph_follows_its_inputs(rng: np.random.Generator) -> None:
    x, counts = torch.zeros(3, 8, 64, device="cuda"), torch.zeros(3, dtype=torch.int32, device="cuda")
    out = torch.zeros(3, 8, 32, device="cuda")
    cukern.moe_activation(x, "gelu", expert_num_tokens=counts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cukern.moe_activation(x, "gelu", expert_num_tokens=counts, out=out)
    for numbers in ([1, 8, 0], [8, 2, 3]):
        values, host = draw(rng, (3, 8, 64), "float32"), np.array(numbers, np.int32)
        x.copy_(torch.from_numpy(values))
        counts.copy_(torch.from_numpy(host))
        out.fill_(7)
        graph.replay()
        matches(
            out, twin.moe_activation(values, "gelu", expert_num_tokens=host, out=np.full((3, 8, 32), 7, np.float32))
        )
