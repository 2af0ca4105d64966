"""The decoder's attention: the twin against torch and worked examples, the kernels against the twin."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from math import log
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from cukern.ops import decoder_attention as op
from cukern.reference import decoder_attention as twin
from cukern.runtime import arrays, gpu
from cukern.runtime.cuda import cupy
from cukern.runtime.describe import Array as Described
from cukern.runtime.op import OPS
from cukern.testing import assert_matches
from tests.buffers import as_torch, normal, on_gpu, same_bits, zeros
from tests.plans import plan_of

Array = NDArray[Any]
NAN, INF = np.nan, np.inf
OUT = "decoder_attention.out"


class Masked(NamedTuple):
    """The arguments of `masked_attention`, in order."""

    q: Any
    k: Any
    v: Any
    bias_q: Any
    bias_k: Any
    bias_v: Any
    key_cache: Any
    value_cache: Any
    step: Any


class Cross(NamedTuple):
    """The arguments of `cross_attention`, in order."""

    q: Any
    bias_q: Any
    key_memory: Any
    value_memory: Any
    memory_lengths: Any


def masked(
    rng: np.random.Generator,
    batch: int,
    heads: int,
    dim: int,
    step: int,
    dtype: str = "float32",
    max_steps: int | None = None,
    bias: str | None = "float32",
) -> Masked:
    """Random arguments; entries that must not be read are NaN."""
    shape = (step + 2 if max_steps is None else max_steps, batch, heads, dim)
    caches = [normal(rng, shape, dtype) for _ in range(2)]
    for cache in caches:
        cache[step - 1 :] = NAN
    biases = [None if bias is None else normal(rng, (heads * dim,), bias) for _ in range(3)]
    return Masked(*(normal(rng, (batch, heads * dim), dtype) for _ in range(3)), *biases, *caches, step)


def cross(
    rng: np.random.Generator,
    lengths: list[int],
    memory_len: int,
    heads: int,
    dim: int,
    dtype: str = "float32",
    bias: str | None = "float32",
) -> Cross:
    """Random arguments; entries that must not be read are NaN."""
    batch = len(lengths)
    memories = [normal(rng, (batch, memory_len, heads, dim), dtype) for _ in range(2)]
    for memory in memories:
        for b, length in enumerate(lengths):
            memory[b, max(length, 0) :] = NAN
    bias_q = None if bias is None else normal(rng, (heads * dim,), bias)
    return Cross(normal(rng, (batch, heads * dim), dtype), bias_q, *memories, np.array(lengths, np.int32))


def copies(arguments: Any) -> Any:
    return type(arguments)(*(np.array(x) if arrays.is_array(x) else x for x in arguments))


# --- the twin -------------------------------------------------------------------------------------------


def torch_attention(query: Array, key: Array, value: Array, scale: float | None) -> Array:
    """Torch's attention: query [batch, heads, dim], key and value [batch, heads, entries, dim], in float64."""
    q, k, v = (torch.from_numpy(x.astype(np.float64)) for x in (query[:, :, None], key, value))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)[:, :, 0].numpy()


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("bias", [None, "float32", "own"])
@pytest.mark.parametrize("dtype", op.DTYPES)
def test_the_twin_is_torchs_attention(dtype: str, bias: str | None, scale: float | None, rng: Any) -> None:
    bias = dtype if bias == "own" else bias
    x = masked(rng, 3, 2, 20, 17, dtype, bias=bias)
    before = copies(x)
    got = cukern.masked_attention(*x, scale=scale)
    query, key, value = (
        (row.astype(np.float32) + (0 if b is None else b.astype(np.float32))).reshape(3, 2, 20)
        for row, b in zip(x[:3], x[3:6], strict=True)
    )
    own = arrays.numpy_dtype(dtype)
    for cache, new, old in (x.key_cache, key, before.key_cache), (x.value_cache, value, before.value_cache):
        same_bits(cache[16], new.astype(own))
        same_bits(np.delete(cache, 16, 0), np.delete(old, 16, 0))
    entries = (np.moveaxis(cache[:17], 0, 2) for cache in (x.key_cache, x.value_cache))
    want = torch_attention(query, *entries, scale).reshape(3, 40).astype(own)
    assert_matches(OUT, got, want)

    y = cross(rng, [9, 1, 12], 12, 2, 20, dtype, bias)
    got = cukern.cross_attention(*y, scale=scale)
    query = y.q.astype(np.float32) + (0 if bias is None else y.bias_q.astype(np.float32))
    for b, length in enumerate(y.memory_lengths):
        entries = (np.moveaxis(memory[b : b + 1, :length], 1, 2) for memory in y[2:4])
        want = torch_attention(query[b].reshape(1, 2, 20), *entries, scale)
        assert_matches(OUT, got[b], want.reshape(40).astype(own))


def test_a_sequence_step_by_step_is_causal_attention(rng: np.random.Generator) -> None:
    steps, batch, heads, dim = 9, 2, 3, 8
    q, k, v = (normal(rng, (steps, batch, heads * dim), "float32") for _ in range(3))
    caches = [np.full((steps, batch, heads, dim), NAN, np.float32) for _ in range(2)]
    got = [cukern.masked_attention(q[s], k[s], v[s], None, None, None, *caches, s + 1) for s in range(steps)]
    by_head = (torch.from_numpy(x).view(steps, batch, heads, dim).permute(1, 2, 0, 3) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True)
    assert_matches(OUT, np.stack(got), want.permute(2, 0, 1, 3).reshape(steps, batch, heads * dim).numpy())


class Place(NamedTuple):
    """Calls a function with NumPy arrays, there or on the GPU; the result is in NumPy, and what was written too."""

    variant: str | None

    def __call__(self, name: str, arguments: Any, **options: Any) -> Array:
        function = getattr(cukern, name)
        if self.variant is None:
            return function(*arguments, **options)
        device = [cupy.asarray(x) if arrays.is_array(x) else x for x in arguments]
        result = cupy.asnumpy(function(*device, variant=self.variant, **options))
        for host, there in zip(arguments, device, strict=True):
            if arrays.is_array(host):
                host[...] = cupy.asnumpy(there)
        return result


@pytest.fixture(
    params=[None, *(pytest.param(v, marks=pytest.mark.gpu) for v in ("specialized", "dynamic"))],
    ids=["numpy", "specialized", "dynamic"],
)
def attend(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


def by_hand(weights: list[float], dim: int = 64) -> Masked:
    """One head, whose softmax gives these weights to the entries, the last one new; entry s holds the value s + 1."""
    steps = len(weights)
    keys, values = (np.full((steps + 1, 1, 1, dim), NAN, np.float32) for _ in range(2))
    for s, weight in enumerate(weights):
        keys[s], values[s] = 0, s + 1
        keys[s, ..., 1] = log(weight) if weight else -INF
    q = np.zeros((1, dim), np.float32)
    q[0, 1] = 2  # with the scale of 1/2 the score is the key's second element
    k, v = keys[steps - 1].reshape(1, dim).copy(), values[steps - 1].reshape(1, dim).copy()
    keys[steps - 1], values[steps - 1] = NAN, NAN
    return Masked(q, k, v, None, None, None, keys, values, steps)


@pytest.mark.parametrize(
    ("weights", "want"),
    [
        ([1], 1),  # its own value
        ([1, 3], 7 / 4),
        ([1, 0, 1], 2),  # a score of -inf weighs nothing
        ([0, 0], 0),  # and so do all of them
        ([1] * 100, 101 / 2),
        ([1e-30, 1, 1e30, 2e30], 11 / 3),
    ],
)
def test_weights_by_hand(attend: Place, weights: list[float], want: float) -> None:
    x = by_hand(weights)
    got = attend("masked_attention", x, scale=0.5)
    assert_matches(OUT, got, np.full((1, 64), want, np.float32))
    same_bits(x.key_cache[x.step - 1].reshape(1, 64), x.k)
    same_bits(x.value_cache[x.step - 1].reshape(1, 64), x.v)
    assert np.isnan(x.key_cache[x.step :]).all() and np.isnan(x.value_cache[x.step :]).all()


def test_the_new_entry_counts_as_it_was_written(attend: Place) -> None:
    one = np.ones(64, np.float32)
    bfloat16 = arrays.numpy_dtype("bfloat16")
    rows = [np.ones((1, 64), bfloat16) for _ in range(3)]
    caches = [np.full((2, 1, 1, 64), NAN, bfloat16) for _ in range(2)]
    # 1 + 2^-9 is 1 in bfloat16.
    x = Masked(*rows, None, one * 2**-9, one * 2**-9, *caches, 1)
    assert (attend("masked_attention", x) == 1).all()
    assert (x.key_cache[0] == 1).all() and (x.value_cache[0] == 1).all() and np.isnan(x.key_cache[1]).all()


def test_lengths_of_zero_and_of_all(attend: Place, rng: np.random.Generator) -> None:
    x = cross(rng, [0, 7, 1, 0], 7, 3, 64)
    got = attend("cross_attention", x)
    assert not got[[0, 3]].any()
    assert_matches(OUT, got, twin.cross_attention(*x))
    assert_matches(OUT, got[2], x.value_memory[2, 0].reshape(-1))


@pytest.mark.parametrize("place", ["cached", "new", "query", "value"])
def test_nan_stays_in_its_head(attend: Place, place: str, rng: np.random.Generator) -> None:
    x = masked(rng, 2, 4, 64, 30)
    want = twin.masked_attention(*copies(x))
    if place == "cached":
        x.key_cache[11, 1, 2, 5] = NAN
    elif place == "value":
        x.value_cache[11, 1, 2, 5] = NAN
    else:
        (x.k if place == "new" else x.q)[1, 2 * 64 + 5] = NAN
    got = attend("masked_attention", x).reshape(2, 4, 64)
    touched = np.zeros((2, 4, 64), bool)
    touched[1, 2, 5 if place == "value" else slice(None)] = True
    assert (np.isnan(got) == touched).all()
    assert_matches(OUT, got[~touched], want.reshape(2, 4, 64)[~touched])


@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
def test_a_step_in_an_array_is_that_step(attend: Place, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    for step in (1, 2, 9, 40):
        x = masked(rng, 2, 3, 64, step, max_steps=40)
        wanted = copies(x)
        want = twin.masked_attention(*wanted)
        assert_matches(OUT, attend("masked_attention", x._replace(step=np.full(shape, step, np.int32))), want)
        for cache, other in ((x.key_cache, wanted.key_cache), (x.value_cache, wanted.value_cache)):
            same_bits(cache, other)


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_the_beams_of_a_sequence_share_its_memory(attend: Place, beams: int, rng: np.random.Generator) -> None:
    x = cross(rng, [7, 0, 20], 20, 2, 64)
    rows = normal(rng, (3 * beams, 128), "float32")
    each = Cross(rows, x.bias_q, *(np.repeat(a, beams, 0) for a in x[2:]))
    assert_matches(OUT, attend("cross_attention", x._replace(q=rows)), twin.cross_attention(*each))


def test_an_empty_batch_and_an_empty_memory(attend: Place, rng: np.random.Generator) -> None:
    assert attend("masked_attention", masked(rng, 0, 2, 64, 3)).shape == (0, 128)
    assert attend("cross_attention", cross(rng, [], 5, 2, 64)).shape == (0, 128)
    assert attend("cross_attention", cross(rng, [0, 0], 0, 2, 64)).tolist() == [[0] * 128] * 2


# --- arrays in host memory ------------------------------------------------------------------------------


def test_rows_of_a_fused_projection(rng: np.random.Generator) -> None:
    x = masked(rng, 3, 2, 8, 5)
    want = twin.masked_attention(*copies(x))
    fused = np.concatenate(x[:3], axis=1)
    q, k, v = fused[:, :16], fused[:, 16:32], fused[:, 32:]
    same_bits(cukern.masked_attention(q, k, v, *copies(x)[3:]), want)
    tensors = [as_torch(a) if arrays.is_array(a) else a for a in x]
    views = torch.from_numpy(fused).split(16, dim=1)
    same_bits(cukern.masked_attention(*views, *tensors[3:]).numpy(), want)


# --- bad arguments --------------------------------------------------------------------------------------


GOOD = {
    "masked_attention": lambda: dict(  # noqa: C408
        q=zeros(2, 24), k=zeros(2, 24), v=zeros(2, 24), bias_q=zeros(24), bias_k=zeros(24), bias_v=zeros(24),
        key_cache=np.full((4, 2, 3, 8), 7, np.float32), value_cache=np.full((4, 2, 3, 8), 7, np.float32), step=3,
        out=np.full((2, 24), NAN, np.float32),
    ),
    "cross_attention": lambda: dict(  # noqa: C408
        q=zeros(2, 24), bias_q=zeros(24), key_memory=zeros(2, 4, 3, 8), value_memory=zeros(2, 4, 3, 8),
        memory_lengths=np.array([4, 0], np.int32), out=np.full((2, 24), NAN, np.float32),
    ),
}  # fmt: skip


def _bad_calls() -> Iterator[Any]:
    dtypes = "float32 or float16 or bfloat16"
    for name in op.__all__:
        cache = "key_cache" if name == "masked_attention" else "key_memory"
        values = cache.replace("key", "value")
        layout = "max_steps, batch" if name == "masked_attention" else "batch, memory_len"
        shape = (4, 2) if name == "masked_attention" else (2, 4)
        for changes, error, message in (
            ({"q": [1.0]}, TypeError, "q must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
            ({"q": zeros(2, 24, dtype=np.float64)}, TypeError, f"q must be {dtypes}, got float64"),
            ({"q": zeros(48)}, ValueError, "q must be of shape [batch, heads * dim], got [48]"),
            ({"q": zeros(2, 23)}, ValueError, f"those of {cache}) = [2, 24], got [2, 23]"),
            ({"q": zeros(24, 2).T}, ValueError, "q must be contiguous along its last dimension, got strides (1, 2)"),
            ({"bias_q": zeros(23)}, ValueError, "bias_q must be of shape [heads * dim] = [24], got [23]"),
            ({"bias_q": zeros(24, dtype=np.float16)}, TypeError, "bias_q must be float32, got float16"),
            ({"bias_q": zeros(48)[::2]}, ValueError, "bias_q must be contiguous, got strides (2,)"),
            ({"bias_q": torch.zeros(24)}, TypeError, "bias_q must be a NumPy array like q, got torch.Tensor"),
            ({cache: 3}, TypeError, f"{cache} must be an array [{layout}, heads, dim], got int"),
            ({cache: zeros(2, 24)}, ValueError, f"{cache} must be of shape [{layout}, heads, dim], got [2, 24]"),
            ({cache: zeros(*shape, 1, 257)}, ValueError, f"{cache} must be of at least one head, of a dim in"),
            ({cache: zeros(*shape, 3, 8, dtype=np.float16)}, TypeError, f"{cache} must be float32, got float16"),
            ({values: zeros(*shape, 3, 9)}, ValueError, f"{values} must be of shape [{layout}, heads, dim] = "),
            ({values: zeros(*shape, 3, 16)[..., ::2]}, ValueError, f"{values} must be contiguous, got strides"),
            ({"scale": NAN}, ValueError, "scale must be a finite number, got nan"),
            ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'specialized', 'dynamic', got 'fast'"),
            ({"variant": "dynamic"}, ValueError, "variant must be 'auto' for arrays in host memory"),
            ({"out": zeros(2, 23)}, ValueError, "out must be of shape [batch, heads * dim] = [2, 24], got [2, 23]"),
            ({"out": zeros(2, 24, dtype=np.float16)}, TypeError, "out must be float32, got float16"),
        ):  # fmt: skip
            yield pytest.param(name, changes, error, message, id=f"{name} {message[:40]}")
    for changes, error, message in (
        ({"k": zeros(3, 24)}, ValueError, "k must be of shape [batch, heads * dim] = [2, 24], got [3, 24]"),
        ({"v": zeros(2, 24, dtype=np.float16)}, TypeError, "v must be float32, got float16"),
        ({"v": None}, TypeError, "v must be a NumPy array like q, got builtins.NoneType"),
        ({"step": 0}, ValueError, "step must be an integer in [1, 4] (max_steps), got 0"),
        ({"step": 5}, ValueError, "step must be an integer in [1, 4] (max_steps), got 5"),
        ({"step": 2.0}, TypeError, "step must be an integer in [1, 4] (max_steps), got 2.0 (float)"),
        ({"step": np.array([0], np.int32)}, ValueError, "step must be an integer in [1, 4] (max_steps), got 0"),
        ({"step": np.array(5, np.int32)}, ValueError, "step must be an integer in [1, 4] (max_steps), got 5"),
        ({"step": np.array([3])}, TypeError, "step must be int32, got int64"),
        ({"step": np.array([3, 3], np.int32)}, ValueError, "step must be of shape [1] = [1], got [2]"),
        ({"step": torch.tensor([3], dtype=torch.int32)}, TypeError, "step must be a NumPy array like q, got torch"),
    ):
        yield pytest.param("masked_attention", changes, error, message, id=message[:40])
    for lengths, error, message in (
        ([5, 0], ValueError, "memory_lengths must be in [0, 4] (memory_len), got [5, 0]"),
        ([1, -1], ValueError, "memory_lengths must be in [0, 4] (memory_len), got [1, -1]"),
        ([1], ValueError, "memory_lengths must be of shape [batch] = [2], got [1]"),
    ):
        changes = {"memory_lengths": np.array(lengths, np.int32)}
        yield pytest.param("cross_attention", changes, error, message, id=message)
    message = "q must be of a multiple of 2 rows (the batch of key_memory), got 5"
    yield pytest.param("cross_attention", {"q": zeros(5, 24)}, ValueError, message, id=message)
    message = "memory_lengths must be int32, got int64"
    yield pytest.param("cross_attention", {"memory_lengths": np.array([1, 2])}, TypeError, message, id=message)


@pytest.mark.parametrize(("name", "changes", "error", "message"), list(_bad_calls()))
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = GOOD[name]()
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)
    # Nothing is written before all has been checked.
    assert np.isnan(arguments["out"]).all()
    assert (arguments.get("key_cache", 7) == np.float32(7)).all()


@pytest.mark.parametrize("name", op.__all__)
def test_good_arguments_are_taken(name: str) -> None:
    arguments = GOOD[name]()
    assert getattr(cukern, name)(**arguments) is arguments["out"]
    assert not np.isnan(arguments["out"]).any()


def test_biases_of_two_dtypes_are_refused() -> None:
    x = {key: a.astype(np.float16) if arrays.is_array(a) else a for key, a in GOOD["masked_attention"]().items()}
    with pytest.raises(TypeError, match="bias_v must be float16 like bias_q, got float32"):
        cukern.masked_attention(**x | {"bias_k": None, "bias_v": zeros(24)})


# --- the choice of a variant ----------------------------------------------------------------------------


def test_what_is_compiled_at_import_is_what_is_called() -> None:
    dtypes = "float16", "bfloat16"
    wanted = {op._choose(dtype, dim, True, "auto")[0].instance for dtype in dtypes for dim in (64, 128)}
    assert set(op._kernel.at_import) == wanted
    assert set(op._combine.at_import) == {op._combiner(dtype).instance for dtype in dtypes}


@pytest.mark.parametrize("dtype", op.DTYPES)
def test_a_form_holds_its_dim(dtype: str) -> None:
    item_size = arrays.ITEM_SIZE[dtype]
    for dim, aligned in itertools.product(range(1, op.MAX_DIM + 1), (False, True)):
        vector, lanes, chunks, steps = form = op._choose(dtype, dim, aligned, "auto")[1]
        assert dim % vector == 0 and dim <= vector * lanes * chunks
        assert vector * item_size == (16 if aligned and dim * item_size % 16 == 0 else item_size)
        assert steps * chunks in (8, 16) and form == op._choose(dtype, dim, aligned, "dynamic")[1]


@given(
    rows=st.integers(1, 5000),
    entries=st.integers(0, 200_000),
    new=st.integers(0, 1),
    lanes=st.sampled_from([8, 16, 32]),
    steps=st.sampled_from([2, 4, 8]),
    multiprocessors=st.integers(1, 200),
)
def test_the_grid_covers_all_entries(
    rows: int, entries: int, new: int, lanes: int, steps: int, multiprocessors: int
) -> None:
    grid = op._grid(rows, entries + new, new, lanes, steps, multiprocessors)
    columns, warps, splits, most_splits, split_steps = grid
    assert columns * (32 // lanes) >= rows > (columns - 1) * (32 // lanes)
    assert warps in (1, 2, 4, 8) and split_steps % steps == 0 and split_steps > 0
    assert splits * split_steps >= entries and 1 <= splits <= most_splits <= op._MAX_SPLITS
    assert (splits > 1) == (most_splits > 1)
    if splits > 1:
        assert (splits - 1) * split_steps < entries
        assert split_steps >= 2 * warps * steps and columns * splits * warps <= op._RESIDENT_WARPS * multiprocessors


def test_the_grid_at_known_sizes() -> None:
    for rows, entries, lanes, wanted in (
        # 64 x 16 heads of 64 in bfloat16 fill 132 multiprocessors with 8 warps per column, in one wave.
        (64 * 16, 1023, 8, (256, 8, 1, 1, 1024)),
        # A few more rows would not fit with 8, but do with 4.
        (300 * 4, 1023, 8, (300, 4, 1, 1, 1024)),
        # One sequence does not: its 16 columns are split.
        (32, 4095, 16, (16, 8, 16, 16, 256)),
        (32, 1000, 16, (16, 8, 6, 16, 192)),
        # The first token of all has nothing to read.
        (1, 0, 8, (1, 1, 1, 1, 8)),
        (100_000, 1000, 8, (25_000, 4, 1, 1, 1000)),
    ):
        assert op._grid(rows, entries, 0, lanes, 8, 132) == op._grid(rows, entries + 1, 1, lanes, 8, 132) == wanted


@pytest.mark.parametrize(
    ("batch", "dim", "step", "wanted"),
    [
        (1, 64, 249, "Whisper); 1 x 8 warps for the heads: no splits (249 tokens; from 250 on)"),
        (1, 64, 250, "250 tokens in 2 splits, so that 132 multiprocessors have work (from 250 tokens on)"),
        (600, 64, 1500, "600 x 4 warps for the heads: no splits, as two of 4 warps are too many (2112 warps run"),
        (1, 64, 9, "heads of 64 in aligned rows: specialized (GPT-2, BERT-like decoders, T5, BART, Whisper); "),
        (1, 72, 9, "dynamic: no instance has heads of 72 (cukern.specialize('masked_attention', dim=72) makes one)"),
        (1, 33, 9, "dynamic, with slow loads of one number: keys and values or heads of 33 are not 16-byte aligned"),
    ],
)  # fmt: skip
def test_the_reason_for_a_kernel(batch: int, dim: int, step: int, wanted: str) -> None:
    row, cache = np.zeros((batch, 4 * dim), np.float16), np.zeros((1500, batch, 4, dim), np.float16)
    x = Masked(row, row, row, None, None, None, cache, cache, step)
    first, *others = plan_of("masked_attention", *x)[0].steps
    assert wanted in first.why
    assert [x.why for x in others] == ["what 2 splits found is put together: a block for each of 4 rows"] * (
        step == 250
    )


@pytest.mark.parametrize(("batch", "heads"), [(1, 4), (64, 16), (600, 8)])
def test_the_launches_of_a_step(batch: int, heads: int) -> None:
    row, cache = np.zeros((batch, heads * 64), np.float16), np.zeros((1500, batch, heads, 64), np.float16)
    x = Masked(row, row, row, None, None, None, cache, cache, 1)
    for step in (*range(1, 300), *range(300, 1500, 37), 1500):
        attend, *combine = plan_of("masked_attention", *x._replace(step=step))[0].steps
        splits = attend.grid[1]
        assert attend.fields["entries"] == step - 1 <= splits * attend.fields["split_steps"]
        assert [combiner.fields["splits"] for combiner in combine] == [splits] * (splits > 1)
    for step in (0, 1501, 2.0, True, 1000.0):
        with pytest.raises((TypeError, ValueError), match=re.escape("step must be an integer in [1, 1500]")):
            plan_of("masked_attention", *x._replace(step=step))


def test_a_step_on_the_device_has_the_grid_of_the_most_steps() -> None:
    row, cache = np.zeros((2, 256), np.float16), np.zeros((1500, 2, 4, 64), np.float16)
    x = Masked(row, row, row, None, None, None, cache, cache, np.array([3], np.int32))
    (attend, *_), (longest, *_) = (
        plan_of("masked_attention", *x._replace(step=step))[0].steps for step in (x.step, 1500)
    )
    assert attend.variant.instance.arguments == (*longest.variant.instance.arguments, "DEVICE_STEP")
    assert attend.grid == longest.grid and attend.grid[1] > 1
    assert isinstance(attend.fields["step"], Described)


def test_specialize_adds_a_dim() -> None:
    with patch.object(op, "_registered", set(op.SPECIALIZED)):
        made = op.specialize(dim=96)
        assert [i.arguments[1] for i in made] == [96] * 3
        assert op._choose("float16", 96, True, "auto")[0].instance in made
        for dim, error, message in (
            (20, ValueError, "dim must be a multiple of 8"),
            (264, ValueError, "dim must be an integer in [8, 256], got 264"),
            (8.0, TypeError, "dim must be an integer in [8, 256]"),
        ):
            with pytest.raises(error, match=re.escape(message)):
                op.specialize(dim=dim)  # type: ignore[arg-type]
    OPS["masked_attention"].forget()
    OPS["cross_attention"].forget()


def test_a_variant_that_is_not_there_is_refused() -> None:
    for dtype, dim, aligned, message in (
        ("float16", 96, True, "there is none for heads of 96 in float16"),
        ("float16", 64, False, "the arrays are not 16-byte aligned"),
    ):
        with pytest.raises(ValueError, match=f"variant must be 'auto' or 'dynamic' here, got 'specialized': {message}"):
            op._choose(dtype, dim, aligned, "specialized")


# --- the kernels against the twin -----------------------------------------------------------------------

GUARD = 64


def launch(name: str, arguments: Any, skip: int = 0, **options: Any) -> Array:
    """Run on the GPU; the result lies between words that must stay, and what else is written goes back."""
    device = [on_gpu(x, skip if getattr(x, "ndim", 0) == 4 else 0) for x in arguments]
    q = arguments.q
    buffer = cupy.asarray(np.full(q.size + 2 * GUARD, NAN, q.dtype))
    out = buffer[GUARD : GUARD + q.size].reshape(q.shape)
    assert getattr(cukern, name)(*device, out=out, **options) is out
    words = cupy.asnumpy(buffer)
    assert np.isnan(np.delete(words, slice(GUARD, GUARD + q.size))).all(), "written outside of the result"
    for host, there in zip(arguments, device, strict=True):
        if arrays.is_array(host):
            host[...] = cupy.asnumpy(there)
    return words[GUARD : GUARD + q.size].reshape(q.shape)


@contextlib.contextmanager
def a_gpu_of(multiprocessors: int) -> Iterator[None]:
    """Plans are as for a GPU of so many multiprocessors."""
    known = gpu.of_device(0)._replace(multiprocessors=multiprocessors)
    declared = [OPS[name] for name in op.__all__]
    try:
        with patch.object(gpu, "of_device", lambda device: known):
            for one in declared:
                one.forget()
            yield
    finally:
        for one in declared:
            one.forget()


def variants_of(dtype: str, dim: int) -> list[str]:
    wide = dim * arrays.ITEM_SIZE[dtype] % 16 == 0
    return ["auto", "dynamic"] + (["specialized"] if wide and dim in op.SPECIALIZED else [])


def compare(arguments: Any, **options: Any) -> None:
    """Every variant gives what the twin gives, split or not, and writes what it writes and nothing else."""
    name = "masked_attention" if isinstance(arguments, Masked) else "cross_attention"
    expected = copies(arguments)
    lengths = {}
    if isinstance(arguments, Cross):
        clamped = np.clip(arguments.memory_lengths, 0, arguments.key_memory.shape[1])
        expected, lengths = expected._replace(memory_lengths=clamped), {4: arguments.memory_lengths}
    want = getattr(twin, name)(*expected, **options)
    dtype, dim = arguments.q.dtype.name, arguments[-3].shape[3]
    ways = [(variant, skip, multiprocessors) for variant in variants_of(dtype, dim) for skip in (0,)
            for multiprocessors in (1, 132)]  # fmt: skip
    ways.append(("auto", 1, 132))
    for variant, skip, multiprocessors in ways:
        given = copies(arguments)
        with a_gpu_of(multiprocessors):
            got = launch(name, given, skip, variant=variant, **options)
        assert_matches(OUT, got, want)
        for i, (ours, theirs) in enumerate(zip(given, expected, strict=True)):
            if arrays.is_array(ours):
                same_bits(ours, lengths.get(i, theirs))


#: batch, heads, dim, step; and why.
MASKED = {
    "the common head": (3, 8, 64, 77),
    "a head of 128": (2, 4, 128, 65),
    "a head of 256": (2, 3, 256, 40),
    "the first token of all": (2, 2, 64, 1),
    "the second": (2, 2, 64, 2),
    "one step beyond a round": (1, 4, 64, 66),
    "rows that do not fill a warp": (1, 1, 64, 30),
    "a last column in part": (3, 3, 64, 30),
    "many splits, joined 32 at a time": (1, 1, 128, 5000),
    "splits of several rows": (2, 2, 64, 2000),
    "idle lanes": (2, 3, 80, 50),
    "idle lanes, wide": (2, 2, 136, 50),
    "a tiny head": (5, 7, 8, 20),
    "one element": (2, 3, 1, 20),
    "odd": (2, 3, 33, 50),
    "odd, two lengths of a warp": (2, 2, 127, 30),
    "the largest odd": (1, 3, 255, 600),
    "16 bytes in float32 only": (2, 2, 100, 50),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize("sizes", MASKED.values(), ids=MASKED)
def test_masked(sizes: tuple[int, int, int, int], dtype: str, rng: np.random.Generator) -> None:
    compare(masked(rng, *sizes, dtype, bias="float32" if sizes[2] % 2 else dtype))


#: lengths, memory_len, heads, dim
CROSS = {
    "ragged": ([50, 0, 17, 1], 50, 4, 64),
    "several sequences in a warp": ([50, 3, 0, 17, 31], 50, 1, 64),
    "three heads": ([9, 64, 33], 64, 3, 64),
    "out of range, so clamped": ([-5, 99, 2**31 - 1, -(2**31)], 40, 2, 128),
    "splits that begin beyond the end": ([1500, 3, 0, 700], 1500, 1, 128),
    "wide": ([20, 45], 45, 2, 256),
    "odd": ([20, 45], 45, 3, 37),
    "idle lanes": ([20, 45, 0], 45, 5, 72),
    "an empty memory": ([0, 3], 0, 2, 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize("sizes", MASKED.values(), ids=MASKED)
def test_a_step_on_the_device(sizes: tuple[int, int, int, int], dtype: str, rng: np.random.Generator) -> None:
    # Where there are several splits for the most steps, all but the first may begin beyond this one.
    x = masked(rng, *sizes, dtype, max_steps=2 * sizes[3] + 600, bias="float32" if sizes[2] % 2 else dtype)
    compare(x._replace(step=np.array([sizes[3]], np.int32)))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dim", [64, 33])
def test_a_step_out_of_range_is_the_nearest_that_is_not(dim: int, rng: np.random.Generator) -> None:
    # The caches are exactly as large as they must be.
    for asked, taken in ((-(2**31), 1), (-1, 1), (0, 1), (21, 20), (2**31 - 1, 20)):
        x = masked(rng, 2, 3, dim, taken, "float16", max_steps=20)
        expected = copies(x)
        want = twin.masked_attention(*expected)
        assert_matches(OUT, launch("masked_attention", x._replace(step=np.array([asked], np.int32))), want)
        same_bits(x.key_cache, expected.key_cache)
        same_bits(x.value_cache, expected.value_cache)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "heads", "steps"), [(1, 2, 700), (40, 16, 70)])
def test_one_graph_serves_all_steps(batch: int, heads: int, steps: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(steps, 3, batch, heads * 64, device="cuda").bfloat16()
    ours, theirs = ([torch.full((steps, batch, heads, 64), NAN, device="cuda").bfloat16() for _ in range(2)]
                    for _ in range(2))  # fmt: skip
    rows, step = torch.empty_like(inputs[0]), torch.ones(1, dtype=torch.int32, device="cuda")
    # Loads the kernels, as a capture cannot.
    out = cukern.masked_attention(*inputs[0], None, None, None, *ours, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cukern.masked_attention(*rows, None, None, None, *ours, step, out=out)
        step.add_(1)
    for s in range(steps):
        rows.copy_(inputs[s])
        graph.replay()
        want = cukern.masked_attention(*inputs[s], None, None, None, *theirs, s + 1)
        if s % 9 == 0 or s == steps - 1:
            assert_matches(OUT, out.cpu(), want.cpu())
    assert step.item() == steps + 1
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize("sizes", CROSS.values(), ids=CROSS)
def test_beams_that_share_a_memory(
    sizes: tuple[list[int], int, int, int], dtype: str, rng: np.random.Generator
) -> None:
    lengths, _, heads, dim = sizes
    x = cross(rng, *sizes, dtype, bias=dtype)
    for beams in (2, 5):
        compare(x._replace(q=normal(rng, (beams * len(lengths), heads * dim), dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize("sizes", CROSS.values(), ids=CROSS)
def test_cross(sizes: tuple[list[int], int, int, int], dtype: str, rng: np.random.Generator) -> None:
    compare(cross(rng, *sizes, dtype, bias=dtype))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dim", [64, 72, 33])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_path_stays_inside_its_arrays(dtype: str, dim: int, rng: np.random.Generator) -> None:
    # Exactly as large as they must be, so that a read beyond the last entry leaves the array.
    for steps, multiprocessors in ((19, 132), (150, 132)):
        x = masked(rng, 1, 3, dim, steps, dtype, max_steps=steps)
        want = twin.masked_attention(*copies(x))
        with a_gpu_of(multiprocessors):
            assert_matches(OUT, launch("masked_attention", x), want)
    y = cross(rng, [19, 7], 19, 3, dim, dtype)
    assert_matches(OUT, launch("cross_attention", y), twin.cross_attention(*y))


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(op.DTYPES))
    heads, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 256))
    batch, entries = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 300))
    bias = data.draw(st.sampled_from([None, "float32", dtype]))
    scale = data.draw(st.sampled_from([None, 0.0, 0.05]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    compare(masked(rng, batch, heads, dim, entries, dtype, bias=bias), scale=scale)
    lengths = data.draw(st.lists(st.integers(-2, entries + 2), min_size=batch, max_size=batch))
    compare(cross(rng, lengths, entries, heads, dim, dtype, bias), scale=scale)


@pytest.mark.gpu
def test_large_scores(rng: np.random.Generator) -> None:
    # exp of such scores overflows unless the largest is taken off first.
    x = masked(rng, 2, 4, 64, 200)
    x.key_cache[:199] *= 30
    want = twin.masked_attention(*copies(x), scale=1.0)
    got = launch("masked_attention", x, scale=1.0)
    assert np.abs(got - want).max() < 2e-3


@pytest.mark.gpu
def test_strided_rows(rng: np.random.Generator) -> None:
    for dtype in op.DTYPES:
        x = masked(rng, 3, 2, 64, 40, dtype)
        want = twin.masked_attention(*copies(x))
        # 3 elements of something else before each row: no row is aligned for wide loads.
        fused = cupy.asarray(np.concatenate([x.q[:, :3], *x[:3]], axis=1))
        parts = [fused[:, 3 + 128 * i : 131 + 128 * i] for i in range(3)]
        got = cukern.masked_attention(*parts, *(on_gpu(a) for a in x[3:]))
        assert_matches(OUT, got, want)


@pytest.mark.gpu
@pytest.mark.large(9)
def test_more_than_2_31_elements() -> None:
    """Caches by step and memories by sequence, of which the last sequence lies farthest out."""
    # Not for the sanitizer, which would take minutes.
    steps, batch, heads, dim = 8400, 256, 16, 64
    torch.manual_seed(0)
    caches = [torch.empty(steps, batch, heads, dim, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
    assert caches[0].numel() > 2**31
    rows = [torch.randn(batch, heads * dim, device="cuda").bfloat16() for _ in range(3)]
    got = cukern.masked_attention(*rows, None, None, None, *caches, steps)
    library = arrays.library_of(got)
    assert library is not None
    for b in (0, batch - 1):
        one = [library.to_numpy(row[b : b + 1]) for row in rows]
        own = [library.to_numpy(cache[:, b : b + 1].contiguous()) for cache in caches]
        same_bits(own[0][-1].reshape(1, -1), one[1])
        assert_matches(OUT, got[b : b + 1].cpu(), twin.masked_attention(*one, None, None, None, *own, steps))
    del rows, own
    # The same memory as that of an encoder.
    memories = [cache.view(batch, steps, heads, dim) for cache in caches]
    lengths = torch.full((batch,), steps, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads * dim, device="cuda").bfloat16()
    got = cukern.cross_attention(q, None, *memories, lengths)
    last = [library.to_numpy(x[-1:]) for x in (q, *memories)]
    want = twin.cross_attention(last[0], None, last[1], last[2], np.array([steps]))
    assert_matches(OUT, got[-1:].cpu(), want)


# --- torch.ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_step_keeps_the_written_caches(device: str, rng: np.random.Generator) -> None:
    import cukern.torch_ops

    x = masked(rng, 2, 2, 64, 9)

    def step(q: Any, *rest: Any) -> Any:
        attended = cukern.masked_attention(q * 2, *rest)
        return attended + rest[5][8].flatten(1)  # the entry that has just been written

    given, wanted = ([as_torch(a).to(device) if arrays.is_array(a) else a for a in x] for _ in range(2))
    want = step(*wanted)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(got, want)
    assert torch.equal(given[6][:9], wanted[6][:9]) and torch.equal(given[7][:9], wanted[7][:9])
    torch.compiler.reset()
