"""Attention over a paged KV cache: the twin against torch and brute force, the kernels against the twin."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from cukern.ops import paged_attention as op
from cukern.ops.paged_attention import checks
from cukern.ops.paged_attention import choose as parts
from cukern.reference import paged_attention as twin
from cukern.runtime import arrays, gpu
from cukern.runtime.cuda import cupy
from cukern.runtime.kernel import arch_of_device, instances
from cukern.runtime.op import forget_plans
from cukern.testing import assert_matches
from tests.buffers import POISON, Buffer, as_torch, normal, on_gpu, same_bits, zeros
from tests.pretended import Launch, PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
NAN, INF = np.nan, np.inf
OUT, LSE = "paged_attention.out", "paged_attention.lse"
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("vllm", "flash")
FP8 = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
#: What stands in block tables where nothing may be read.
JUNK = (2147480000, -1, -2147480000, 2**31 - 1)


class Case(NamedTuple):
    """The arguments of `paged_attention`, in order, and its layout; then keys and values as they were before.

    Slots without a token are NaN, and so are those that a window leaves out.
    """

    query: Any
    key_cache: Any
    value_cache: Any
    block_tables: Any
    seq_lens: Any
    layout: str
    keys: list[Array]  # of each sequence, [tokens, kv_heads, head_dim]
    values: list[Array]

    @property
    def args(self) -> tuple[Any, ...]:
        return self[:5]

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[3 if self.layout == "vllm" else 1]

    @property
    def kv_heads(self) -> int:
        return self.key_cache.shape[1 if self.layout == "vllm" else 2]


def in_layout(keys: Array, values: Array, layout: str) -> tuple[Array, Array]:
    """Caches from dense blocks, both [blocks, block_size, kv_heads, head_dim]."""
    if layout == "flash":
        return keys, values
    blocks, block_size, kv_heads, head_dim = keys.shape
    x = 16 // keys.itemsize
    split = keys.reshape(blocks, block_size, kv_heads, head_dim // x, x)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)), np.ascontiguousarray(values.transpose(0, 2, 3, 1))


def paged(
    rng: np.random.Generator,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str = "float32",
    cache: str | None = None,
    layout: str = "vllm",
    query_tokens: int | None = None,
    window: int | None = None,
) -> Case:
    """Random arguments: normal queries and keys, values in [-1, 1]; what may not be read is poisoned."""
    stored = arrays.numpy_dtype(cache or dtype)
    counts = [max(length, 0) for length in lengths]
    needed = [ceil(count / block_size) for count in counts]
    shape = (sum(counts), kv_heads, head_dim)
    dense = [rng.standard_normal(shape, np.float32), rng.uniform(-1, 1, shape).astype(np.float32)]
    dense = [x.astype(stored) for x in dense]

    ids = rng.permutation(sum(needed) + 3).astype(np.int32)
    tables = np.resize(np.array(JUNK, np.int32), (len(lengths), max(needed, default=0) + 2))
    caches = [np.full((len(ids) * block_size, kv_heads, head_dim), NAN, stored) for _ in range(2)]
    taken = start = 0
    for table, count, blocks in zip(tables, counts, needed, strict=True):
        own = ids[taken : taken + blocks]
        first = 0 if window is None else max(0, max(0, count - (query_tokens or 1)) - window + 1)
        slots = (own[:, None].astype(np.int64) * block_size + np.arange(block_size)).ravel()[first:count]
        for paged_one, x in zip(caches, dense, strict=True):
            paged_one[slots] = x[start + first : start + count]
        table[first // block_size : blocks] = own[first // block_size :]
        taken, start = taken + blocks, start + count
    blocks_shape = (len(ids), block_size, kv_heads, head_dim)
    key_cache, value_cache = in_layout(caches[0].reshape(blocks_shape), caches[1].reshape(blocks_shape), layout)

    rows = (len(lengths), heads, head_dim) if query_tokens is None else (len(lengths), query_tokens, heads, head_dim)
    of_each = (np.split(x.astype(np.float64), np.cumsum(counts)[:-1]) for x in dense)
    query = normal(rng, rows, dtype)
    return Case(query, key_cache, value_cache, tables, np.array(lengths, np.int32), layout, *of_each)


def slopes_of(heads: int) -> Array:
    """ALiBi's slopes for a power of two of heads."""
    return (2.0 ** (-8 * np.arange(1, heads + 1) / heads)).astype(np.float32)


def launch(x: Case, variant: str = "auto", **options: Any) -> tuple[Array, Array]:
    """Result and lse of `paged_attention` on the GPU, in NumPy."""
    out, lse = Buffer(x.query.shape, x.query.dtype.name), Buffer(x.query.shape[:-1], "float32")
    options = {key: on_gpu(value) for key, value in options.items()}
    options = {"layout": x.layout, "kv_cache_dtype": FP8.get(x.key_cache.dtype.name, "auto"), **options}
    given = [on_gpu(a) for a in x.args]
    pair = out.array, lse.array
    # What the allocator hands out next is not zero.
    cupy.full(2**22, POISON, cupy.uint8)
    assert cukern.paged_attention(*given, **options, out=pair, return_lse=True, variant=variant) is pair
    return out.numpy(), lse.numpy()


def rows_of(x: Case, chosen: list[int]) -> Case:
    """Some of its sequences, over the same caches."""
    return x._replace(query=x.query[chosen], block_tables=x.block_tables[chosen], seq_lens=x.seq_lens[chosen])


def repeated(x: Case, times: int) -> Case:
    return rows_of(x, list(range(len(x.query))) * times)


class Place(NamedTuple):
    """Calls `paged_attention` with arrays there, or one variant on the GPU; results and lse are in NumPy."""

    variant: str | None

    def __call__(self, x: Case, **options: Any) -> tuple[Array, Array]:
        if self.variant is None:
            return cukern.paged_attention(*x.args, layout=x.layout, return_lse=True, **options)
        out, lse = launch(x, self.variant, **options)
        if isinstance(x.query, np.ndarray):
            # A large batch is dealt out in another way.
            many_out, many_lse = launch(repeated(x, 20), self.variant, **options)
            assert_matches(OUT, many_out, np.concatenate([out] * 20))
            assert_matches(LSE, many_lse, np.concatenate([lse] * 20))
        return out, lse


@pytest.fixture(
    params=[None, *(pytest.param(v, marks=pytest.mark.gpu) for v in ("specialized", "dynamic", "scalar"))],
    ids=["numpy", "specialized", "dynamic", "scalar"],
)
def attend(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


#: What every variant takes.
TAKEN_BY_ALL = {"heads": 8, "kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float16"}


# --- the twin against torch -----------------------------------------------------------------------------


def bias_of(case: Case, s: int, slopes: Array | None, window: int | None) -> torch.Tensor:
    """What is added to the scores of a sequence, [heads, query_tokens, tokens]: -inf for what is not seen."""
    tokens, query_tokens = len(case.keys[s]), 1 if case.query.ndim == 3 else case.query.shape[1]
    ones = torch.ones(query_tokens, tokens, dtype=torch.float64)
    seen = ones.tril(tokens - query_tokens)
    if window is not None:
        seen = seen.triu(tokens - query_tokens - window + 1)
    bias = torch.zeros_like(ones).masked_fill(seen == 0, -INF).expand(case.query.shape[-2], -1, -1)
    if slopes is not None:
        distance = torch.arange(tokens)[None] - torch.arange(tokens - query_tokens, tokens)[:, None]
        bias = bias + torch.from_numpy(slopes).double()[:, None, None] * distance
    return bias


def of_sequence(case: Case, s: int) -> list[torch.Tensor]:
    """Query, keys and values of a sequence, [heads, tokens, head_dim], in float64."""
    query = case.query[s].astype(np.float64)
    query = query[None] if query.ndim == 2 else query
    ratio = query.shape[1] // case.kv_heads
    q, k, v = (torch.from_numpy(x).transpose(0, 1) for x in (query, case.keys[s], case.values[s]))
    return [q, k.repeat_interleave(ratio, 0), v.repeat_interleave(ratio, 0)]


#: For the test: what torch takes, and the arguments that ask for the same.
TORCH_TOO: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window of 1": {"window": 1},
    "window inside a block": {"window": 5},
    "window over blocks": {"window": 20},
    "window longer than all": {"window": 1000},
    "alibi": {"alibi_slopes": slopes_of(6)},
    "alibi and window": {"alibi_slopes": slopes_of(6), "window": 18},
}


@pytest.mark.parametrize("options", TORCH_TOO.values(), ids=TORCH_TOO)
@pytest.mark.parametrize("query_tokens", [None, 1, 2, 5, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_twin_is_torchs_attention(
    layout: str, query_tokens: int | None, options: dict[str, Any], rng: np.random.Generator
) -> None:
    window, slopes = options.get("window"), options.get("alibi_slopes")
    lengths = [37, 0, 1, 16, 3, 33, -4]
    x = paged(rng, lengths, 6, 2, 24, 8, layout=layout, query_tokens=query_tokens, window=window)
    got, got_lse = cukern.paged_attention(*x.args, layout=layout, return_lse=True, **options)
    want, want_lse = np.zeros_like(x.query), np.full(x.query.shape[:-1], -INF, np.float32)
    for s, length in enumerate(lengths):
        if length <= 0:
            continue
        q, k, v = of_sequence(x, s)
        bias, scale = bias_of(x, s, slopes, window), options.get("scale", 24**-0.5)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        sums = torch.logsumexp(q @ k.mT * scale + bias, 2)
        attended[sums == -INF] = 0  # a query token before the first cached one
        want[s] = attended.transpose(0, 1).numpy().reshape(want[s].shape)
        want_lse[s] = sums.T.numpy().reshape(want_lse[s].shape)
    assert_matches(OUT, got, want)
    assert_matches(LSE, got_lse, want_lse)
    same_bits(cukern.paged_attention(*x.args, layout=layout, **options), got)
    same_bits(cukern.paged_attention(*x.args, layout=layout, split=64, **options), got)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 1.5, 30.0])
@pytest.mark.parametrize("query_tokens", [None, 4])
def test_softcap_and_sinks(
    query_tokens: int | None, softcap: float | None, with_sinks: bool, rng: np.random.Generator
) -> None:
    lengths, slopes = [37, 0, 1, 3], slopes_of(6)
    x = paged(rng, lengths, 6, 3, 16, 8, query_tokens=query_tokens, window=9)
    sinks = normal(rng, (6,), "float32") * 3 if with_sinks else None
    options = {"softcap": softcap, "sinks": sinks, "alibi_slopes": slopes, "window": 9, "scale": 0.7}
    got, got_lse = cukern.paged_attention(*x.args, return_lse=True, **options)
    for s in range(len(lengths)):
        q, k, v = of_sequence(x, s)
        scores = q @ k.mT * 0.7
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + bias_of(x, s, slopes, 9)
        # A sink is a key like any other, whose value is zero.
        sink = torch.full((6,), -INF) if sinks is None else torch.from_numpy(sinks)
        scores = torch.cat([sink.double()[:, None, None].expand(-1, q.shape[1], 1), scores], 2)
        padded = torch.nn.functional.pad(v, (0, 0, 1, 0))
        want = (torch.softmax(scores, 2).nan_to_num(0) @ padded).transpose(0, 1)
        assert_matches(OUT, got[s], want.numpy().reshape(got[s].shape).astype(np.float32))
        want_lse = torch.logsumexp(scores, 2).T
        assert_matches(LSE, got_lse[s], want_lse.numpy().reshape(got_lse[s].shape).astype(np.float32))


@pytest.mark.parametrize("form", ["array", "bytes", "tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_float8(dtype: str, cache: str, layout: str, form: str, rng: np.random.Generator) -> None:
    x = paged(rng, [19, 3, 0], 4, 2, 16, 8, dtype, cache, layout)
    # All codes occur.
    codes = np.arange(256, dtype=np.uint8).reshape(1, 8, 2, 16)
    for array, dense in zip(x[1:3], (codes, codes[:, ::-1]), strict=True):
        own = in_layout(dense.view(array.dtype), dense.view(array.dtype), layout)[array is x.value_cache]
        array[x.block_tables[0, 0]] = own[0]
    decoded = [
        torch.from_numpy(a.view(np.uint8).copy()).view(getattr(torch, cache)).float().numpy()
        for a in (x.key_cache, x.value_cache)
    ]
    assert np.isnan(decoded[0][x.block_tables[0, 0]]).any()
    if layout == "vllm":
        blocks, kv_heads, _, block_size, _ = x.key_cache.shape
        dense = decoded[0].transpose(0, 3, 1, 2, 4).reshape(blocks, block_size, kv_heads, 16)
        decoded[0] = in_layout(dense, dense, layout)[0]
    want = twin.paged_attention(x.query.astype(np.float32), *decoded, *x.args[3:], layout=layout, scale=0.25 * 0.5)
    scales = {"k_scale": np.array([0.5], np.float32), "v_scale": np.array(0.75, np.float32)}
    args, options = list(x.args), {"layout": layout, "scale": 0.25}
    if form == "bytes":
        args[1:3] = [a.view(np.uint8) for a in args[1:3]]
        options["kv_cache_dtype"] = FP8[cache]
    elif form == "tensor":
        args, scales = [as_torch(a) for a in args], {"k_scale": 0.5, "v_scale": 0.75}
    got = cukern.paged_attention(*args, **options, **scales)
    assert_matches(OUT, got, (0.75 * want).astype(arrays.numpy_dtype(dtype)))
    if cache == "float8_e4m3fn" and form == "bytes":
        options["kv_cache_dtype"] = "fp8"
        same_bits(cukern.paged_attention(*args, **options, **scales), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_rounds_once(dtype: str, rng: np.random.Generator) -> None:
    x = paged(rng, [40, 9], 4, 2, 32, 16, dtype)
    wide = [a.astype(np.float32) for a in x[1:3]]
    dense = wide[0].transpose(0, 3, 1, 2, 4).reshape(len(wide[0]), 16, 2, 32)
    key_cache, _ = in_layout(dense, dense, "vllm")
    want = twin.paged_attention(x.query.astype(np.float32), key_cache, wide[1], *x.args[3:])
    same_bits(twin.paged_attention(*x.args), want.astype(x.query.dtype))


# --- vLLM's functions -----------------------------------------------------------------------------------


class Sparse(NamedTuple):
    """The last arguments of `paged_attention_v1`."""

    tp_rank: int = 0
    local_blocks: int = 0
    vert_stride: int = 0
    block_size: int = 64
    head_sliding_step: int = 0


#: Blocks of 16 tokens, in a cache with blocks of 8.
SPARSE = {
    "local and vertical": Sparse(0, 2, 3, 16),
    "a vertical stripe of each head": Sparse(0, 1, 4, 16, 1),
    "a wider step": Sparse(0, 1, 5, 16, 2),
    "another rank": Sparse(1, 1, 5, 16, 3),
    "a stripe of each kv head": Sparse(0, 1, 4, 16, -1),
    "another rank's kv heads": Sparse(3, 2, 5, 16, -2),
    "nothing local": Sparse(0, 0, 3, 16, 1),
    "blocks as the cache's": Sparse(0, 1, 3, 8, 1),
    "a stride of 1 is dense": Sparse(0, 1, 1, 16, 1),
}


def seen_by_brute_force(length: int, heads: int, kv_heads: int, sparse: Sparse) -> Array:
    """[heads, tokens]: which tokens a head sees, one by one."""
    seen = np.ones((heads, length), bool)
    if sparse.vert_stride <= 1:
        return seen
    for h in range(heads):
        if sparse.head_sliding_step < 0:
            group = heads // kv_heads
            shift = 1 - sparse.head_sliding_step * (kv_heads * sparse.tp_rank + h // group)
        else:
            shift = 1 + sparse.head_sliding_step * (heads * sparse.tp_rank + h)
        last = (length - 1) // sparse.block_size
        for token in range(length):
            stripe = (token // sparse.block_size + shift) % sparse.vert_stride == 0
            near = last - token // sparse.block_size < sparse.local_blocks
            seen[h, token] = stripe or near
    return seen


def v1_args(x: Case, slopes: Array | None = None, sparse: Sparse = Sparse(), **changes: Any) -> list[Any]:  # noqa: B008
    """The arguments of `paged_attention_v1` behind those that it writes."""
    dtype = FP8.get(x.key_cache.dtype.name, "auto")
    caches = [a.view(np.uint8) if dtype != "auto" else a for a in (x.key_cache, x.value_cache)]
    rest = {
        "scale": x.query.shape[2] ** -0.5, "k_scale": np.ones(1, np.float32), "v_scale": np.ones(1, np.float32),
        "max_seq_len": max(x.seq_lens.tolist(), default=0), **changes,
    }  # fmt: skip
    return [
        x.query, *caches, x.kv_heads, rest["scale"], x.block_tables, x.seq_lens, x.block_size, rest["max_seq_len"],
        slopes, dtype, rest["k_scale"], rest["v_scale"], *sparse,
    ]  # fmt: skip


def workspaces(x: Case, partitions: int) -> list[Array]:
    """The arguments exp_sums, max_logits and tmp_out of `paged_attention_v2`, poisoned."""
    seqs, heads, head_dim = x.query.shape
    shape = (seqs, heads, partitions)
    return [
        np.full(shape, NAN, np.float32), np.full(shape, NAN, np.float32),
        np.full((*shape, head_dim), NAN, x.query.dtype),
    ]  # fmt: skip


def test_seen_blocks_by_hand() -> None:
    # 8 blocks of 16 tokens, the last in part. Block b is on the stripe of head h where b + h + 1 is a multiple of 4.
    x = seen_by_brute_force(120, 4, 2, Sparse(0, 1, 4, 16, 1))[:, ::16]
    assert [np.flatnonzero(row).tolist() for row in x] == [[3, 7], [2, 6, 7], [1, 5, 7], [0, 4, 7]]
    # Heads of a kv head share one: b + 2 * kv_head + 1.
    x = seen_by_brute_force(120, 4, 2, Sparse(0, 2, 4, 16, -2))[:, ::16]
    assert [np.flatnonzero(row).tolist() for row in x] == [[3, 6, 7], [3, 6, 7], [1, 5, 6, 7], [1, 5, 6, 7]]
    # On rank 1, head 0 is head 4.
    x = seen_by_brute_force(120, 4, 2, Sparse(1, 0, 3, 16, 1))[:, ::16]
    assert [np.flatnonzero(row).tolist() for row in x] == [[1, 4, 7], [0, 3, 6], [2, 5], [1, 4, 7]]


@pytest.mark.parametrize("sparse", SPARSE.values(), ids=SPARSE)
def test_the_twin_is_block_sparse(sparse: Sparse, rng: np.random.Generator) -> None:
    x = paged(rng, [130, 0, 1, 16, 33], 8, 4, 8, 8)
    slopes = slopes_of(8)
    out = np.full_like(x.query, NAN)
    assert cukern.paged_attention_v1(out, *v1_args(x, slopes, sparse)) is None
    for s, length in enumerate(x.seq_lens.tolist()):
        q, k, v = of_sequence(x, s)
        seen = torch.from_numpy(seen_by_brute_force(length, 8, 4, sparse))
        bias = bias_of(x, s, slopes, None).masked_fill(~seen[:, None], -INF)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).nan_to_num(0)
        assert_matches(OUT, out[s], want[:, 0].numpy().astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", [None, *FP8])
@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
def test_v1_v2_and_paged_attention_are_one(
    alibi: bool, cache: str | None, dtype: str, rng: np.random.Generator
) -> None:
    x = paged(rng, [600, 0, 1, 512, 513], 4, 2, 16, 8, dtype, cache)
    slopes = slopes_of(4) if alibi else None
    scales = {"k_scale": np.array([0.5], np.float32), "v_scale": np.array([0.75], np.float32)}
    want = cukern.paged_attention(*x.args, scale=0.3, alibi_slopes=slopes, **scales)
    args = v1_args(x, slopes, scale=0.3, **scales)
    for name, spaces in (("paged_attention_v1", []), ("paged_attention_v2", workspaces(x, 2))):
        out = np.full_like(x.query, NAN)
        assert getattr(cukern, name)(out, *spaces, *args) is None
        same_bits(out, want)


@pytest.mark.parametrize("sparse", [Sparse(), Sparse(0, 1, 20, 64, 1)], ids=["dense", "sparse"])
def test_the_workspaces_of_v2(sparse: Sparse, rng: np.random.Generator) -> None:
    x = paged(rng, [1100, 0, 1, 512, 513], 4, 2, 16, 8)
    slopes, out = slopes_of(4) / 100, np.full_like(x.query, NAN)
    exp_sums, max_logits, tmp_out = spaces = workspaces(x, 4)
    cukern.paged_attention_v2(out, *spaces, *v1_args(x, slopes, sparse, v_scale=2.0))
    for s, partitions in enumerate((3, 0, 1, 1, 2)):
        for space in spaces:
            assert np.isnan(space[s, :, partitions:]).all()
        if not partitions:
            continue
        # The whole, from what the partitions amount to.
        largest = max_logits[s, :, :partitions].max(1, keepdims=True)
        weights = np.exp(max_logits[s, :, :partitions] - largest) * exp_sums[s, :, :partitions]
        whole = (weights[..., None] * tmp_out[s, :, :partitions]).sum(1) / weights.sum(1)[:, None]
        assert_matches(OUT, out[s], whole)
        # Each of them, from its own tokens.
        q, k, _ = of_sequence(x, s)
        seen = torch.from_numpy(seen_by_brute_force(len(x.keys[s]), 4, 2, sparse))
        scores = (q @ k.mT / 4 + bias_of(x, s, slopes, None))[:, 0].masked_fill(~seen, -INF)
        for j, part in enumerate(scores.split(512, 1)):
            assert_matches(LSE, max_logits[s, :, j], part.amax(1).float().numpy())
            own_lse = torch.logsumexp(part, 1).float()
            with np.errstate(divide="ignore"):
                assert_matches(LSE, max_logits[s, :, j] + np.log(exp_sums[s, :, j]), own_lse.numpy())
            empty = (own_lse == -INF).numpy()
            assert not exp_sums[s, empty, j].any() and not tmp_out[s, empty, j].any()
    if sparse.vert_stride:
        assert (max_logits[0, :, 1] == -INF).any()


# --- merging --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_tokens", [None, 3])
def test_merged_parts_are_the_whole(query_tokens: int | None, dtype: str, rng: np.random.Generator) -> None:
    x = paged(rng, [64, 40, 100], 4, 2, 16, 8, dtype)
    want, want_lse = cukern.paged_attention(*x.args, return_lse=True)
    first, rest = np.array([24, 40, 8], np.int32), x.block_tables.copy()
    for table, cut in zip(rest, first, strict=True):
        table[: len(table) - cut // 8] = table[cut // 8 :].copy()
    parts = [
        cukern.paged_attention(*x.args[:3], tables, lengths, return_lse=True)
        for tables, lengths in ((x.block_tables, first), (rest, x.seq_lens - first))
    ]
    assert (parts[1][1][1] == -INF).all()
    flat = [a for part in parts for a in part]
    if query_tokens is not None:
        flat = [np.stack([a] * query_tokens, 1) for a in flat]
        want, want_lse = (np.stack([a] * query_tokens, 1) for a in (want, want_lse))
    for order in (flat, flat[2:] + flat[:2]):
        merged, lse = cukern.merge_attention_states(*order)
        # Each part has been rounded once already.
        assert np.abs(merged.astype(np.float32) - want.astype(np.float32)).max() < {"bfloat16": 2**-8}.get(
            dtype, 2**-11
        )
        assert_matches(LSE, lse, want_lse)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["numpy", "gpu"])
def test_merging_by_hand(on_device: bool) -> None:
    rows = [  # lse_a, lse_b, out (of 1 and 3), lse
        (0, 0, 2, np.log(2)),
        (np.log(3), 0, 1.5, np.log(4)),
        (-INF, 2, 3, 2),
        (5, -INF, 1, 5),
        (-INF, -INF, 0, -INF),
        (1000, 0, 1, 1000),
        (-1000, -1000, 2, -1000 + np.log(2)),
        (NAN, 1, NAN, NAN),
        (1, NAN, NAN, NAN),
        # What is wrong stays wrong.
        (NAN, -INF, NAN, NAN),
        (-INF, NAN, NAN, NAN),
        # No tokens, as FlashAttention 2 and FlashMLA say it.
        (INF, 0, 3, 0),
        (0, INF, 1, 0),
        (INF, INF, 0, -INF),
        (-INF, INF, 0, -INF),
        (INF, NAN, NAN, NAN),
    ]
    lse_a, lse_b, want, want_lse = np.ascontiguousarray(np.array(rows, np.float32).T)[:, :, None]
    out_a, out_b = (np.full((len(rows), 1, 8), value, np.float32) for value in (1, 3))
    out_a[np.isinf(lse_a)], out_b[np.isinf(lse_b)] = NAN, NAN
    given = out_a, lse_a, out_b, lse_b
    merged, lse = cukern.merge_attention_states(*(map(cupy.asarray, given) if on_device else given))
    assert_matches(OUT, merged, np.repeat(want[..., None], 8, 2))
    assert_matches(LSE, lse, want_lse)


@pytest.mark.parametrize("shape", [(3, 2, 8), (2, 5, 3, 8), (0, 4, 8)], ids=str)
def test_merging_with_the_heads_first(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    out_a, out_b = (normal(rng, shape, "float32") for _ in range(2))
    lse_a, lse_b = (normal(rng, shape[:-1], "float32") for _ in range(2))
    want, want_lse = cukern.merge_attention_states(out_a, lse_a, out_b, lse_b)
    by_head = [np.ascontiguousarray(lse.swapaxes(-1, -2)) for lse in (lse_a, lse_b)]
    out, lse = cukern.merge_attention_states(out_a, by_head[0], out_b, by_head[1], lse_heads_first=True)
    assert np.array_equal(out, want) and lse.shape == by_head[0].shape
    assert np.array_equal(lse.swapaxes(-1, -2), want_lse)


def test_latent_attention_in_parts(rng: np.random.Generator) -> None:
    # What flash_mla_with_kvcache returns is merged as it is, also where a part has no tokens: its lse is +inf there.
    cache, q = (normal(rng, shape, "bfloat16") for shape in ((4, 16, 1, 64), (2, 3, 4, 64)))
    table = np.array([[0, 1], [2, 3]], np.int32)

    def attend(blocks: slice, *lengths: int) -> Any:
        ends = np.array(lengths, np.int32)
        schedule = cukern.get_mla_metadata(ends, 12, 1)
        return cukern.flash_mla_with_kvcache(q, cache, table[:, blocks].copy(), ends, 32, *schedule)

    first, rest = attend(slice(0, 1), 16, 16), attend(slice(1, 2), 9, 0)
    assert np.isposinf(rest[1][1]).all()
    merged, lse = cukern.merge_attention_states(*first, *rest, lse_heads_first=True)
    want, want_lse = attend(slice(0, 2), 25, 16)
    assert np.abs(merged.astype(np.float32) - want.astype(np.float32)).max() < 2**-6
    assert np.abs(lse - want_lse).max() < 1e-5


# --- corners, in the twin and in each variant -----------------------------------------------------------


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("query_tokens", [None, 4])
def test_rows_that_see_no_token(
    attend: Place, query_tokens: int | None, with_sinks: bool, rng: np.random.Generator
) -> None:
    x = paged(rng, [0, -7, 2, 40, -(2**31)], **TAKEN_BY_ALL, query_tokens=query_tokens)
    sinks = normal(rng, (8,), "float32") if with_sinks else None
    empty = -INF if sinks is None else sinks
    out, lse = attend(x, sinks=sinks)
    assert not out[[0, 1, 4]].any()
    assert (lse[[0, 1, 4]] == empty).all() if sinks is None else np.abs(lse[[0, 1, 4]] - empty).max() < 1e-6
    if query_tokens:
        # A sequence shorter than the query: its first tokens stand before the cache.
        assert not out[2, :2].any() and np.abs(out[2, 2:].astype(np.float32)).min(-1).max() > 0
        assert np.allclose(lse[2, :2], empty, atol=1e-6)
        assert np.isfinite(lse[2, 2:]).all()
        if sinks is None:
            # The first token of all sees itself alone.
            assert_matches(OUT, out[2, 2], np.repeat(x.values[2][0], 4, 0).astype(np.float16))
    want, want_lse = twin.paged_attention(*x.args, sinks=sinks, return_lse=True)
    assert_matches(OUT, out, want)
    assert_matches(LSE, lse, want_lse)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("query_tokens", [None, 3])
def test_a_bad_block_id_makes_its_sequence_nan(
    attend: Place, query_tokens: int | None, split: int | None, layout: str, rng: np.random.Generator
) -> None:
    lengths = [100, 200, 17, 200, 200, 333, 2]
    x = paged(rng, lengths, **TAKEN_BY_ALL, query_tokens=query_tokens, layout=layout)
    x.block_tables[1, 0] = len(x.key_cache)
    x.block_tables[3, 12] = -1
    x.block_tables[4, 7] = 2147480000
    x.block_tables[6, 0] = -(2**31)
    room = x.block_tables.shape[1] * 16
    x.seq_lens[5] = room + 1
    out, lse = attend(x, split=split)
    bad = [1, 3, 4, 5, 6]
    assert np.isnan(out[bad].astype(np.float32)).all() and np.isnan(lse[bad]).all()
    want = twin.paged_attention(*x.args, layout=layout)
    assert_matches(OUT, out[[0, 2]], want[[0, 2]])
    assert np.isfinite(lse[[0, 2]]).all()
    x.seq_lens[:] = 2**31 - 1
    assert np.isnan(attend(x, split=split)[0].astype(np.float32)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_without_blocks_has_no_token(attend: Place, layout: str, rng: np.random.Generator) -> None:
    # Few sequences and many: by clusters, and not.
    for repeats in (1, 40):
        x = paged(rng, [100, 0] * repeats, **TAKEN_BY_ALL, layout=layout)
        x = x._replace(key_cache=x.key_cache[:0], value_cache=x.value_cache[:0])
        out, lse = attend(x)
        assert np.isnan(out[::2].astype(np.float32)).all() and np.isnan(lse[::2]).all()
        assert not out[1::2].any() and (lse[1::2] == -INF).all()


def test_a_bad_block_id_in_vllms_functions(rng: np.random.Generator) -> None:
    x = paged(rng, [100, 600, 0], **TAKEN_BY_ALL)
    x.block_tables[1, 33] = -1
    for name, spaces in (("paged_attention_v1", []), ("paged_attention_v2", workspaces(x, 2))):
        out = np.full_like(x.query, 7)
        getattr(cukern, name)(out, *spaces, *v1_args(x))
        assert np.isnan(out[1].astype(np.float32)).all() and not out[2].any()
        same_bits(out, twin.paged_attention(*x.args))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place_of_nan", ["query", "key", "value"])
def test_nan_stays_where_it_belongs(attend: Place, place_of_nan: str, layout: str, rng: np.random.Generator) -> None:
    x = paged(rng, [40, 90], **TAKEN_BY_ALL, layout=layout)
    want = twin.paged_attention(*x.args, layout=layout)
    touched = np.zeros(x.query.shape, bool)
    block, slot = x.block_tables[1, 4], 3  # token 67
    if place_of_nan == "query":
        x.query[1, 5, 9] = NAN
        touched[1, 5] = True
    elif place_of_nan == "key":
        x.key_cache[(block, 1, 1, slot, 1) if layout == "vllm" else (block, slot, 1, 9)] = NAN
        touched[1, 4:] = True
    else:
        x.value_cache[(block, 1, 9, slot) if layout == "vllm" else (block, slot, 1, 9)] = NAN
        touched[1, 4:, 9] = True
    got, _ = attend(x)
    assert (np.isnan(got.astype(np.float32)) == touched).all()
    assert_matches(OUT, got[~touched], want[~touched])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_minus_infinity_weigh_nothing(attend: Place, layout: str, rng: np.random.Generator) -> None:
    x = paged(rng, [40, 20, 300], **TAKEN_BY_ALL, layout=layout)
    # The score is twice the key's first element, which is -inf for all tokens, all but one, all of the first 256.
    x.query[...] = 0
    x.query[..., 0] = 2
    seen = [np.zeros(40, bool), np.arange(20) == 7, np.arange(300) >= 256]
    dense = np.zeros((len(x.key_cache) * 16, 2, 64), np.float16)
    for table, of_tokens in zip(x.block_tables, seen, strict=True):
        tokens = np.flatnonzero(~of_tokens)
        dense[table[tokens // 16] * 16 + tokens % 16, :, 0] = -INF
    dense = dense.reshape(-1, 16, 2, 64)
    out, lse = attend(x._replace(key_cache=in_layout(dense, dense, layout)[0]), scale=1.0)
    assert not out[0].any() and (lse[0] == -INF).all()
    for s, count in (1, 1), (2, 44):
        want = x.values[s][seen[s]].mean(0).repeat(4, 0).astype(np.float16)
        assert_matches(OUT, out[s], want)
        assert_matches(LSE, lse[s], np.full(8, np.log(count), np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100, 2**31 - 1])
@pytest.mark.parametrize("query_tokens", [None, 5])
def test_windows(attend: Place, query_tokens: int | None, window: int, layout: str, rng: np.random.Generator) -> None:
    # Blocks before the window have junk for an id, slots before it in the first block are NaN.
    x = paged(rng, [0, 1, 16, 17, 99, 300], **TAKEN_BY_ALL, query_tokens=query_tokens, window=window, layout=layout)
    out, lse = attend(x, window=window)
    want, want_lse = twin.paged_attention(*x.args, layout=layout, window=window, return_lse=True)
    assert not np.isnan(want.astype(np.float32)).any()
    assert_matches(OUT, out, want)
    assert_matches(LSE, lse, want_lse)
    if window == 1 and query_tokens is None:
        assert_matches(OUT, out[5], np.repeat(x.values[5][-1], 4, 0).astype(np.float16))


def strided(x: Case, xp: Any) -> dict[str, Case]:
    """The same arguments as parts of larger arrays, which hold NaN elsewhere; `xp` is their library."""
    as_strided = xp.lib.stride_tricks.as_strided
    seqs, heads, head_dim = x.query.shape
    tables = xp.full((seqs, x.block_tables.shape[1] + 5), JUNK[0], np.int32)[:, : x.block_tables.shape[1]]
    tables[...] = x.block_tables
    # One projection makes queries, keys and values.
    fused = xp.full((seqs, heads + 4, head_dim), NAN, x.query.dtype)[:, :heads]
    fused[...] = x.query
    # No row at a multiple of 16 bytes.
    flat = xp.full((seqs, heads * head_dim + 3), NAN, x.query.dtype)[:, 3:]
    shifted = as_strided(flat, x.query.shape, (flat.strides[0], *x.query.strides[1:]))
    shifted[...] = x.query
    # Keys and values of a block side by side.
    both = xp.full((len(x.key_cache), 2, *x.value_cache.shape[1:]), NAN, x.value_cache.dtype)
    keys = as_strided(both, x.key_cache.shape, (both.strides[0], *x.key_cache.strides[1:]))
    values = both[:, 1]
    keys[...], values[...] = x.key_cache, x.value_cache
    made = {
        "query": x._replace(query=fused),
        "query off alignment": x._replace(query=shifted),
        "block_tables": x._replace(block_tables=tables),
        "one array of caches": x._replace(key_cache=keys, value_cache=values),
    }
    if x.layout == "flash":
        beside = xp.stack([x.key_cache, x.value_cache], 2)
        made["side by side by token"] = x._replace(key_cache=beside[:, :, 0], value_cache=beside[:, :, 1])
        by_head = [xp.ascontiguousarray(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for a in x[1:3]]
        made["heads before tokens"] = x._replace(key_cache=by_head[0], value_cache=by_head[1])
    else:
        apart = [xp.repeat(a, 2, 1) for a in x[1:3]]
        for a in apart:
            a[:, 1::2] = NAN
        made["every other head"] = x._replace(key_cache=apart[0][:, ::2], value_cache=apart[1][:, ::2])
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(attend: Place, layout: str, rng: np.random.Generator) -> None:
    x = paged(rng, [50, 0, 17, 100], **TAKEN_BY_ALL, layout=layout)
    want = twin.paged_attention(*x.args, layout=layout)
    if attend.variant is None:
        cases = strided(x, np)
    else:
        cases = strided(Case(*map(on_gpu, x.args), *x[5:]), cupy)
    for name, case in cases.items():
        if name == "query off alignment" and attend.variant in ("specialized", "dynamic"):
            with pytest.raises(ValueError, match="variant must be"):
                attend(case)
            continue
        assert_matches(OUT, attend(case)[0], want)


def test_the_last_tokens_of_a_strided_query(attend: Place, rng: np.random.Generator) -> None:
    # Tokens of the projection [seqs, tokens, heads + ..., head_dim], of which the last few are attended from.
    x = paged(rng, [50, 3, 100], **TAKEN_BY_ALL, query_tokens=3)
    want, want_lse = twin.paged_attention(*x.args, return_lse=True)
    xp = np if attend.variant is None else cupy
    query = xp.full((3, 7, 12, 64), NAN, np.float16)[:, 4:, :8]
    query[...] = xp.asarray(x.query)
    out, lse = attend(x._replace(query=query))
    assert_matches(OUT, out, want)
    assert_matches(LSE, lse, want_lse)


@pytest.mark.parametrize("query_tokens", [None, 2])
def test_nothing_to_do(attend: Place, query_tokens: int | None, rng: np.random.Generator) -> None:
    x = paged(rng, [], **TAKEN_BY_ALL, query_tokens=query_tokens)
    assert [a.shape for a in attend(x)] == [x.query.shape, x.query.shape[:-1]]
    # No cache at all, and no room in the tables.
    x = paged(rng, [0, 0], **TAKEN_BY_ALL, query_tokens=query_tokens)
    x = x._replace(key_cache=x.key_cache[:0], value_cache=x.value_cache[:0], block_tables=x.block_tables[:, :0])
    out, lse = attend(x)
    assert not out.any() and (lse == -INF).all()
    x.seq_lens[1] = 1
    assert np.isnan(attend(x)[0][1].astype(np.float32)).all()


# --- arrays in host memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, *FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_tensors_go_through_the_twin(dtype: str, cache: str | None, rng: np.random.Generator) -> None:
    x = paged(rng, [20, 0, 3], 4, 2, 16, 8, dtype, cache)
    given = [as_torch(a) for a in x.args]
    want, want_lse = twin.paged_attention(*x.args, return_lse=True)
    got, lse = cukern.paged_attention(*given, return_lse=True)
    assert type(got) is torch.Tensor and type(lse) is torch.Tensor
    assert_matches(OUT, got, want)
    assert_matches(LSE, lse, want_lse)
    out = torch.full_like(given[0], NAN)
    assert cukern.paged_attention(*given, out=out) is out
    assert torch.equal(out, got)
    pair = out.fill_(NAN), torch.full_like(lse, NAN)
    assert cukern.paged_attention(*given, return_lse=True, out=pair) is pair
    assert torch.equal(out, got) and torch.equal(pair[1], lse)
    args = [as_torch(a) if arrays.is_array(a) else a for a in v1_args(x)]
    spaces = [as_torch(a) for a in workspaces(x, 1)]
    for name, written in (("paged_attention_v1", [out]), ("paged_attention_v2", [out, *spaces])):
        out.fill_(NAN)
        assert getattr(cukern, name)(*written, *args) is None
        assert torch.equal(out, got)


# --- bad arguments --------------------------------------------------------------------------------------


def _good_paged() -> dict[str, Any]:
    return dict(  # noqa: C408
        query=zeros(2, 4, 16), key_cache=zeros(3, 2, 4, 8, 4), value_cache=zeros(3, 2, 16, 8),
        block_tables=zeros(2, 3, dtype=np.int32), seq_lens=zeros(2, dtype=np.int32), alibi_slopes=zeros(4),
        sinks=zeros(4), k_scale=zeros(1), v_scale=zeros(1), out=np.full((2, 4, 16), NAN, np.float32),
    )  # fmt: skip


def _good_v1() -> dict[str, Any]:
    good = _good_paged()
    del good["sinks"]
    return good | dict(  # noqa: C408
        num_kv_heads=2, scale=0.25, block_size=8, max_seq_len=24, kv_cache_dtype="auto", tp_rank=0,
        blocksparse_local_blocks=1, blocksparse_vert_stride=2, blocksparse_block_size=16,
        blocksparse_head_sliding_step=1,
    )  # fmt: skip


def _good_v2() -> dict[str, Any]:
    spaces = np.full((2, 4, 2), NAN, np.float32), np.full((2, 4, 2), NAN, np.float32)
    return _good_v1() | dict(  # noqa: C408
        exp_sums=spaces[0], max_logits=spaces[1], tmp_out=np.full((2, 4, 2, 16), NAN, np.float32), max_seq_len=1024
    )


def _good_merge() -> dict[str, Any]:
    return dict(  # noqa: C408
        out_a=zeros(2, 4, 16), lse_a=zeros(2, 4), out_b=zeros(2, 4, 16), lse_b=zeros(2, 4),
        out=(np.full((2, 4, 16), NAN, np.float32), np.full((2, 4), NAN, np.float32)),
    )  # fmt: skip


GOOD = {
    "paged_attention": _good_paged,
    "paged_attention_v1": _good_v1,
    "paged_attention_v2": _good_v2,
    "merge_attention_states": _good_merge,
}
E4M3 = arrays.numpy_dtype("float8_e4m3fn")


_ALL = ("paged_attention", "paged_attention_v1", "paged_attention_v2")
_OWN, _VLLM, _V2 = _ALL[:1], _ALL[1:], _ALL[2:]
_KEY = "[blocks, kv_heads, head_dim / x, block_size, x]"
_FLASH = {"key_cache": zeros(3, 8, 2, 16), "value_cache": zeros(3, 8, 2, 16), "layout": "flash"}
_SHORT = zeros(2, 4, 2)


def _bad_queries_and_caches() -> Iterator[Any]:
    yield from (
        (_ALL, {"query": [1.0]}, TypeError, "query must be an array (NumPy, CuPy, torch, or any with"),
        (_ALL, {"query": zeros(2, 4, 16, dtype=float)}, TypeError,
         "query must be float32 or float16 or bfloat16, got float64"),
        (_VLLM, {"query": zeros(2, 64)}, ValueError, "query must be of shape [seqs, heads, head_dim], got [2, 64]"),
        (_VLLM, {"query": zeros(2, 1, 4, 16)}, ValueError, "query must be of shape [seqs, heads, head_dim], got"),
        (_OWN, {"query": zeros(2, 64)}, ValueError,
         "query must be of shape [seqs, heads, head_dim] or [seqs, query_tokens, heads, head_dim], got [2, 64]"),
        (_ALL, {"query": zeros(2, 4, 12)}, ValueError,
         "query must be of a head_dim that is a multiple of 8 in [8, 512], got 12"),
        (_ALL, {"query": zeros(2, 4, 520)}, ValueError, "multiple of 8 in [8, 512], got 520"),
        (_ALL, {"query": zeros(2, 4, 0)}, ValueError, "multiple of 8 in [8, 512], got 0"),
        (_ALL, {"query": zeros(2, 4, 32)[..., ::2]}, ValueError,
         "query must be contiguous along its last dimension, got strides (128, 32, 2)"),
        (_ALL, {"query": zeros(2, 3, 16)}, ValueError,
         "query must be of a multiple of 2 heads (kv_heads of key_cache), got 3"),
        (_ALL, {"key_cache": None}, TypeError, "key_cache must be a NumPy array like query, got builtins"),
        (_ALL, {"value_cache": torch.zeros(3, 2, 16, 8)}, TypeError,
         "value_cache must be a NumPy array like query, got torch.Tensor"),
        (_ALL, {"key_cache": zeros(3, 2, 4, 8, 4, dtype=np.float16)}, TypeError,
         "key_cache must be float32 or float8_e4m3fn or float8_e5m2, got float16"),
        (_ALL, {"value_cache": zeros(3, 2, 16, 8, dtype=np.float16)}, TypeError,
         "value_cache must be float32, got float16"),
        (_ALL, {"key_cache": zeros(3, 2, 1, 8, 16, dtype=np.uint8)}, ValueError,
         "kv_cache_dtype must be 'fp8_e4m3' or 'fp8_e5m2' for a cache of bytes, got 'auto'"),
        (_ALL, {"kv_cache_dtype": "fp8"}, TypeError, "key_cache must be uint8 or float8_e4m3fn, got float32"),
        (_ALL, {"kv_cache_dtype": "fp8_e5m2", "key_cache": zeros(3, 2, 1, 8, 16, dtype=E4M3)}, TypeError,
         "key_cache must be uint8 or float8_e5m2, got float8_e4m3fn"),
        (_ALL, {"kv_cache_dtype": "int8"}, ValueError,
         "kv_cache_dtype must be one of 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2', got 'int8'"),
        (_ALL, {"key_cache": zeros(3, 8, 2, 16)}, ValueError,
         f'key_cache must be of shape {_KEY}, got [3, 8, 2, 16], which paged_attention with layout="flash" takes'),
        (_ALL, {"key_cache": zeros(3, 2, 2, 8, 8)}, ValueError,
         f"key_cache must be of shape {_KEY} = [3, 2, 4, 8, 4], got [3, 2, 2, 8, 8]"),
        (_ALL, {"key_cache": zeros(3, 2, 3, 8, 4)}, ValueError, f"{_KEY} = [3, 2, 4, 8, 4], got [3, 2, 3, 8, 4]"),
        (_ALL, {"value_cache": zeros(4, 2, 16, 8)}, ValueError,
         "value_cache must be of shape [blocks, kv_heads, head_dim, block_size] = [3, 2, 16, 8], got [4, 2, 16, 8]"),
        (_ALL, {"value_cache": zeros(3, 2, 16, 16)}, ValueError, "= [3, 2, 16, 8], got [3, 2, 16, 16]"),
        (_ALL, {"key_cache": zeros(3, 0, 4, 8, 4), "value_cache": zeros(3, 0, 16, 8)}, ValueError,
         "key_cache must be of at least one kv head, got shape [3, 0, 4, 8, 4]"),
        (_ALL, {"key_cache": zeros(3, 2, 4, 12, 4), "value_cache": zeros(3, 2, 16, 12)}, ValueError,
         "key_cache must be of blocks of a multiple of 8 tokens, at most 65536, got 12"),
        (_ALL, {"key_cache": zeros(3, 2, 4, 16, 4)[:, :, :, ::2]}, ValueError,
         "key_cache must be contiguous along its last three dimensions, got strides (64, 8, 1) (in elements) there"),
        (_ALL, {"value_cache": zeros(3, 2, 16, 16)[..., ::2]}, ValueError,
         "value_cache must be contiguous along its last two dimensions, got strides (16, 2) (in elements) there"),
        (_ALL, {"query": zeros(2, 4, 24), "key_cache": zeros(3, 2, 1, 8, 16, dtype=E4M3),
                     "value_cache": zeros(3, 2, 24, 8, dtype=E4M3)}, ValueError,
         "query must be of a head_dim that is a multiple of 16 for a cache of float8_e4m3fn in this layout, got 24"),
    )  # fmt: skip


def _bad_tables_and_options() -> Iterator[Any]:
    yield from (
        (_ALL, {"block_tables": zeros(2, 3, dtype=np.int64)}, TypeError, "block_tables must be int32, got int64"),
        (_ALL, {"block_tables": zeros(6, dtype=np.int32)}, ValueError,
         "block_tables must be of shape [seqs, max_blocks], got [6]"),
        (_ALL, {"block_tables": zeros(3, 3, dtype=np.int32)}, ValueError,
         "block_tables must be of shape [seqs, max_blocks] = [2, 3], got [3, 3]"),
        (_ALL, {"block_tables": zeros(2, 6, dtype=np.int32)[:, ::2]}, ValueError,
         "block_tables must be contiguous along its last dimension, "),
        (_ALL, {"seq_lens": zeros(2, dtype=np.int64)}, TypeError, "seq_lens must be int32, got int64"),
        (_ALL, {"seq_lens": zeros(3, dtype=np.int32)}, ValueError, "seq_lens must be of shape [seqs] = [2], got [3]"),
        (_ALL, {"seq_lens": [1, 2]}, TypeError, "seq_lens must be a NumPy array like query, got builtins.list"),
        (_ALL, {"scale": INF}, ValueError, "scale must be a finite number, got inf"),
        (_ALL, {"alibi_slopes": zeros(2)}, ValueError, "alibi_slopes must be of shape [heads] = [4], got [2]"),
        (_ALL, {"alibi_slopes": zeros(4, dtype=np.float16)}, TypeError, "alibi_slopes must be float32, got float16"),
        (_ALL, {"k_scale": zeros(2)}, ValueError, "k_scale must be a number or an array of one element, got"),
        (_ALL, {"v_scale": zeros(1, dtype=np.float16)}, TypeError, "v_scale must be float32, got float16"),
        (_ALL, {"v_scale": "one"}, TypeError, "v_scale must be a number, got 'one' (str)"),
        (_ALL, {"k_scale": NAN}, ValueError, "k_scale must be a finite number, got nan"),
        (_ALL, {"out": _SHORT}, ValueError, "out must be of shape query's = [2, 4, 16], got [2, 4, 2]"),
        (_ALL, {"out": zeros(2, 4, 16, dtype=np.float16)}, TypeError, "out must be float32, got float16"),
        (_ALL, {"out": zeros(2, 4, 32)[..., ::2]}, ValueError, "out must be contiguous, got strides (128, 32, 2)"),
        (_OWN, {"layout": "hnd"}, ValueError, "layout must be one of 'vllm', 'flash', got 'hnd'"),
        (_OWN, {**_FLASH, "key_cache": zeros(3, 2, 4, 8, 4)}, ValueError,
         "key_cache must be of shape [blocks, block_size, kv_heads, head_dim], got [3, 2, 4, 8, 4], "
         'which layout="vllm" takes'),
        (_OWN, {**_FLASH, "key_cache": zeros(3, 8, 2, 8)}, ValueError, "= [3, 8, 2, 16], got [3, 8, 2, 8]"),
        (_OWN, {**_FLASH, "key_cache": zeros(3, 8, 2, 32)[..., ::2]}, ValueError,
         "key_cache must be contiguous along its last dimension, got strides (2,) (in elements) there"),
        (_OWN, {"sinks": zeros(2)}, ValueError, "sinks must be of shape [heads] = [4], got [2]"),
        (_OWN, {"sinks": 1.0}, TypeError, "sinks must be a NumPy array like query, got builtins.float"),
        (_OWN, {"window": 0}, ValueError, "window must be an integer of at least 1, got 0"),
        (_OWN, {"window": 2.0}, TypeError, "window must be an integer of at least 1, got 2.0 (float)"),
        (_OWN, {"softcap": 0.0}, ValueError, "softcap must be in [1e-30, 1e30], got 0.0"),
        (_OWN, {"softcap": NAN}, ValueError, "softcap must be a finite number, got nan"),
        (_OWN, {"split": 32}, ValueError, "split must be an integer in [64, 1073741824], got 32"),
        (_OWN, {"split": 100}, ValueError, "split must be a multiple of 64, got 100"),
        (_OWN, {"return_lse": True}, TypeError, "out must be a pair (out, lse) with return_lse, got ndarray"),
        (_OWN, {"return_lse": True, "out": (zeros(2, 4, 16), zeros(2, 3))}, ValueError,
         "out[1] must be of shape query's without head_dim = [2, 4], got [2, 3]"),
        (_OWN, {"return_lse": True, "out": (_SHORT, zeros(2, 4))}, ValueError,
         "out[0] must be of shape query's = [2, 4, 16], got [2, 4, 2]"),
        (_OWN, {"variant": "fast"}, ValueError,
         "variant must be one of 'auto', 'specialized', 'dynamic', 'scalar', got 'fast'"),
        (_OWN, {"variant": "scalar"}, ValueError, "variant must be 'auto' for arrays in host memory"),
        (_VLLM, {"num_kv_heads": 4}, ValueError, "num_kv_heads must be 2 (of key_cache), got 4"),
        (_VLLM, {"block_size": 16}, ValueError, "block_size must be 8 (of key_cache), got 16"),
        (_VLLM, {"max_seq_len": -1}, ValueError, "max_seq_len must be an integer of at least 0, got -1"),
        (_VLLM, {"scale": None}, TypeError, "scale must be a number, got None (NoneType)"),
        (_VLLM, {"tp_rank": -1}, ValueError, "tp_rank must be an integer in [0, "),
        (_VLLM, {"blocksparse_local_blocks": -1}, ValueError, "blocksparse_local_blocks must be an integer in"),
        (_VLLM, {"blocksparse_vert_stride": 2.0}, TypeError, "blocksparse_vert_stride must be an integer in"),
        (_VLLM, {"blocksparse_head_sliding_step": "1"}, TypeError, "blocksparse_head_sliding_step must be an int"),
        (_VLLM, {"blocksparse_block_size": 12}, ValueError,
         "blocksparse_block_size must be a multiple of block_size (8), got 12"),
        (_VLLM, {"blocksparse_block_size": 0}, ValueError, "blocksparse_block_size must be"),
        (_V2, {"max_seq_len": 1025}, ValueError,
         "exp_sums must be of at least 3 partitions (of 512 of max_seq_len), got 2"),
        (_V2, {"exp_sums": None}, TypeError, "exp_sums must be a NumPy array like query, got"),
        (_V2, {"exp_sums": zeros(2, 4)}, ValueError, "exp_sums must be of shape [seqs, heads, max_partitions"),
        (_V2, {"exp_sums": zeros(2, 4, 2, dtype=np.float16)}, TypeError, "exp_sums must be float32, got float16"),
        (_V2, {"max_logits": zeros(2, 4, 3)}, ValueError,
         "max_logits must be of shape [seqs, heads, max_partitions] = [2, 4, 2], got [2, 4, 3]"),
        (_V2, {"tmp_out": zeros(2, 4, 2, 8)}, ValueError,
         "tmp_out must be of shape [seqs, heads, max_partitions, head_dim] = [2, 4, 2, 16], got [2, 4, 2, 8]"),
        (_V2, {"tmp_out": zeros(2, 4, 2, 16, dtype=np.float16)}, TypeError, "tmp_out must be float32, got float16"),
    )  # fmt: skip


def _bad_merges() -> Iterator[Any]:
    yield from (
        ({"out_a": [1.0]}, TypeError, "out_a must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
        ({"out_a": zeros(2, 4, 16, dtype=int)}, TypeError, "out_a must be float32 or float16 or bfloat16, got int64"),
        ({"out_a": zeros(16)}, ValueError, "out_a must be of shape [..., heads, head_dim], got [16]"),
        ({"out_a": zeros(2, 4, 32)[..., ::2]}, ValueError, "out_a must be contiguous, got strides (128, 32, 2)"),
        ({"out_b": zeros(2, 4, 8)}, ValueError, "out_b must be of shape out_a's = [2, 4, 16], got [2, 4, 8]"),
        ({"out_b": zeros(2, 4, 16, dtype=np.float16)}, TypeError, "out_b must be float32, got float16"),
        ({"lse_a": zeros(2)}, ValueError, "lse_a must be of shape out_a's without head_dim = [2, 4], got [2]"),
        ({"lse_b": zeros(2, 4, dtype=np.float64)}, TypeError, "lse_b must be float32, got float64"),
        ({"lse_b": None}, TypeError, "lse_b must be a NumPy array like out_a, got builtins.NoneType"),
        ({"out": zeros(2, 4, 16)}, TypeError, "out must be a pair (out, lse), got ndarray"),
        ({"out": (zeros(2, 4, 8), zeros(2, 4))}, ValueError, "out[0] must be of shape out_a's = [2, 4, 16], got"),
        ({"out": (zeros(2, 4, 16), zeros(2, 3))}, ValueError, "out[1] must be of shape out_a's without head_dim = "),
        ({"variant": "scalar"}, ValueError, "variant must be one of 'auto', got 'scalar'"),
        ({"lse_heads_first": True}, ValueError,
         "lse_a must be of shape [..., heads, tokens] of out_a = [4, 2], got [2, 4]"),
        ({"lse_heads_first": True, "out_a": zeros(2, 16)}, ValueError,
         "out_a must be of shape [..., tokens, heads, head_dim], got [2, 16]"),
    )  # fmt: skip


def _bad_calls() -> Iterator[Any]:
    for names, changes, error, message in (*_bad_queries_and_caches(), *_bad_tables_and_options()):
        for name in names:
            yield pytest.param(name, changes, error, message, id=f"{name} {message[:60]}")
    for changes, error, message in _bad_merges():
        yield pytest.param("merge_attention_states", changes, error, message, id=message[:60])


@pytest.mark.parametrize(("name", "changes", "error", "message"), list(_bad_calls()))
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = GOOD[name]()
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)
    # Nothing is written before all has been checked.
    for array in written_by(arguments):
        assert np.isnan(array).all()


def written_by(arguments: dict[str, Any]) -> list[Array]:
    out = arguments["out"]
    spaces = [arguments[name] for name in ("exp_sums", "max_logits", "tmp_out") if name in arguments]
    return [*(out if isinstance(out, tuple) else (out,)), *spaces]


@pytest.mark.parametrize("name", GOOD)
def test_good_arguments_are_taken(name: str) -> None:
    arguments = GOOD[name]()
    returned = getattr(cukern, name)(**arguments)
    assert returned is (None if name[-2:] in ("v1", "v2") else arguments["out"])
    for array in written_by(arguments)[:1]:
        assert not np.isnan(array).any()


# --- the choice of a variant ----------------------------------------------------------------------------


class Sizes(NamedTuple):
    """What a plan is made from; unless told otherwise, Llama-3-8B's on an H200."""

    dtype: str = "bfloat16"
    cache: str = "bfloat16"
    layout: str = "vllm"
    extras: bool = False
    split: int = 0
    aligned: bool = True
    variant: str = "auto"
    query_tokens: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    seqs: int = 64
    max_blocks: int = 256


def plan(x: Sizes) -> parts.LaunchPlan:
    sizes = checks.Sizes(x.seqs, x.query_tokens, x.heads, x.kv_heads, x.head_dim, 5000, x.block_size, x.max_blocks)
    options = x.extras, x.split, False, x.aligned, x.variant
    return parts.plan_launch(gpu.of_arch("90a"), parts.Request(x.dtype, x.cache, x.layout, sizes, *options))


def test_every_gpu_has_the_shared_memory() -> None:
    # The least that a block may have since sm_80 are 99 KiB; clusters run on data-center GPUs only, with 227 KiB.
    pairs = [
        parts.Schedule(2, dealing, wide, 100 << wide) for dealing in ("CLUSTERS", "EITHER") for wide in (False, True)
    ]
    few = *parts._FEW_ITEMS.values(), *parts._FEW_ITEMS_FP8.values(), *parts._FEW_ITEMS_LARGE_HEADS.values()
    for dealt in (parts.Schedule(), *pairs, *few, parts._BLOCK_PER_ITEM_FP8):
        most = 99 if dealt == parts.Schedule() else 227
        for head_dim in range(8, 129 if dealt.wide else 257, 8):
            for cache in ("float16", "float8_e4m3fn"):
                for layout in LAYOUTS:
                    teams = (1, 2) if head_dim > 128 else (1, 2, 4)
                    for rows, team in ((8, 1), *((16, team) for team in teams)):
                        config = parts.specialized_config(
                            "float16", cache, layout, head_dim, 16, team, False, dealt, rows
                        )
                        assert config.shared_bytes(rows * team) + config.static_bytes <= most << 10, config


BF16, E5M2 = "__nv_bfloat16", "__nv_fp8_e5m2"


@pytest.mark.parametrize(
    ("x", "function", "arguments"),
    [
        (Sizes(), "attend", (BF16, BF16, "VLLM", 128, 128, 16, 1, "false")),
        (Sizes(variant="specialized", layout="flash"), "attend", (BF16, BF16, "FLASH", 128, 128, 16, 1, "false")),
        (Sizes(variant="dynamic"), "attend", (BF16, BF16, "VLLM", 0, 128, 0, 1, "false")),
        (Sizes(extras=True), "attend", (BF16, BF16, "VLLM", 128, 128, 16, 1, "true")),
        (Sizes(cache="float8_e5m2"), "attend", (BF16, E5M2, "VLLM", 128, 128, 16, 1, "false")),
        # 4 query tokens of 4 heads are 16 rows, 5 are more, 9 more than 32.
        (Sizes(query_tokens=4), "attend", (BF16, BF16, "VLLM", 128, 128, 16, 1, "false")),
        (Sizes(query_tokens=5), "attend", (BF16, BF16, "VLLM", 128, 128, 16, 2, "false")),
        (Sizes(query_tokens=9), "attend", (BF16, BF16, "VLLM", 128, 128, 16, 4, "false")),
        (Sizes(head_dim=72), "attend", (BF16, BF16, "VLLM", 0, 128, 0, 1, "false")),
        (Sizes(head_dim=8), "attend", (BF16, BF16, "VLLM", 0, 64, 0, 1, "false")),
        (Sizes(head_dim=200), "attend", (BF16, BF16, "VLLM", 0, 256, 0, 1, "false")),
        (Sizes(block_size=128), "attend", (BF16, BF16, "VLLM", 0, 128, 0, 1, "false")),
        (Sizes(block_size=24), "attend_scalar", (BF16, BF16, "VLLM", "true")),
        (Sizes(aligned=False), "attend_scalar", (BF16, BF16, "VLLM", "false")),
        (Sizes(variant="scalar"), "attend_scalar", (BF16, BF16, "VLLM", "true")),
        (Sizes(dtype="float32", cache="float32"), "attend_scalar", ("float", "float", "VLLM", "true")),
        (Sizes(cache="float8_e5m2", head_dim=120), "attend_scalar", (BF16, E5M2, "VLLM", "true")),
        (Sizes(head_dim=512), "attend_scalar", (BF16, BF16, "VLLM", "true", 512)),
    ],
    ids=str,
)
def test_the_variant_for_a_call(x: Sizes, function: str, arguments: tuple[Any, ...]) -> None:
    instance = plan(x).variant.instance
    assert (instance.function, instance.arguments[: len(arguments)]) == (function, arguments)


@pytest.mark.parametrize(
    ("x", "dealing", "cluster", "warps", "stages", "at_once", "rows", "fit", "blocks"),
    [
        # Clusters where items are few, then pairs of blocks for even lengths, which have the warps of two where each
        # has a multiprocessor to itself.
        (Sizes(seqs=7, heads=4, kv_heads=1), "CLUSTERS", 16, 4, 2, 1, 8, 2, 112),
        (Sizes(seqs=1), "CLUSTERS", 8, 8, 3, 1, 8, 1, 64),
        (Sizes(seqs=15, heads=4, kv_heads=1), "CLUSTERS", 8, 8, 3, 1, 8, 1, 120),
        (Sizes(seqs=2), "CLUSTERS", 4, 8, 3, 1, 8, 1, 64),
        (Sizes(seqs=30, heads=4, kv_heads=1), "CLUSTERS", 4, 8, 3, 1, 8, 1, 120),
        (Sizes(seqs=31, heads=4, kv_heads=1), "CLUSTERS", 2, 8, 3, 1, 8, 1, 62),
        (Sizes(seqs=4), "CLUSTERS", 2, 8, 3, 1, 8, 1, 64),
        (Sizes(seqs=5), "EITHER", 2, 8, 2, 1, 8, 1, 132),
        (Sizes(seqs=8), "EITHER", 2, 8, 2, 1, 8, 1, 132),
        (Sizes(seqs=9), "EITHER", 2, 4, 3, 1, 8, 2, 264),
        (Sizes(seqs=16), "EITHER", 2, 4, 3, 1, 8, 2, 264),
        (Sizes(seqs=17), "QUEUE", 1, 4, 3, 1, 16, 2, 264),
        (Sizes(seqs=33), "QUEUE", 1, 4, 3, 1, 16, 2, 264),
        # More items than blocks at once, up to four times as many: a block each.
        (Sizes(seqs=34), "EITHER", 1, 4, 3, 1, 8, 2, 272),
        (Sizes(seqs=132), "EITHER", 1, 4, 3, 1, 8, 2, 1056),
        (Sizes(seqs=133), "QUEUE", 1, 4, 3, 1, 16, 2, 264),
        # 8-bit caches: wide blocks have clusters only, and a team multiplies two tiles at once, where a warp may have
        # more than four.
        (Sizes(seqs=7, heads=4, kv_heads=1, cache="float8_e5m2"), "CLUSTERS", 16, 4, 4, 1, 8, 2, 112),
        (Sizes(seqs=7, heads=4, kv_heads=1, cache="float8_e5m2", max_blocks=257), "CLUSTERS", 16, 4, 4, 2, 8, 2, 112),
        (Sizes(seqs=1, cache="float8_e4m3fn"), "CLUSTERS", 8, 8, 4, 1, 8, 1, 64),
        (Sizes(seqs=1, cache="float8_e4m3fn", max_blocks=257), "CLUSTERS", 8, 8, 4, 2, 8, 1, 64),
        (Sizes(seqs=2, cache="float8_e4m3fn"), "CLUSTERS", 8, 4, 4, 2, 8, 2, 128),
        (Sizes(seqs=4, cache="float8_e4m3fn"), "CLUSTERS", 4, 4, 4, 2, 8, 2, 128),
        (Sizes(seqs=8, cache="float8_e4m3fn"), "EITHER", 2, 8, 4, 2, 8, 1, 132),
        (Sizes(seqs=8, cache="float8_e4m3fn", max_blocks=128), "CLUSTERS", 2, 8, 4, 2, 8, 1, 128),
        (Sizes(seqs=16, cache="float8_e4m3fn"), "EITHER", 2, 4, 4, 2, 8, 2, 264),
        # A block for each of many items over an 8-bit cache: four of up to 8 rows fit a multiprocessor, two of more.
        (Sizes(seqs=64, cache="float8_e4m3fn"), "EITHER", 1, 4, 3, 1, 8, 4, 528),
        (Sizes(seqs=64, cache="float8_e4m3fn", max_blocks=128), "CLUSTERS", 1, 4, 3, 1, 8, 4, 512),
        (Sizes(seqs=34, cache="float8_e4m3fn"), "EITHER", 1, 4, 3, 1, 8, 4, 528),
        (Sizes(seqs=64, cache="float8_e4m3fn", query_tokens=3), "EITHER", 1, 4, 4, 2, 16, 2, 512),
        (Sizes(seqs=133, cache="float8_e4m3fn"), "QUEUE", 1, 4, 4, 1, 16, 2, 264),
        # Up to 8 rows of a kv head are the second operand of the products, but where blocks draw pieces alone.
        (Sizes(seqs=1, query_tokens=2), "CLUSTERS", 8, 8, 3, 1, 8, 1, 64),
        (Sizes(seqs=1, heads=72), "CLUSTERS", 8, 8, 3, 1, 16, 1, 64),
        # Large heads have no wide blocks.
        (Sizes(seqs=1, head_dim=256), "CLUSTERS", 16, 2, 2, 1, 8, 2, 128),
        (Sizes(seqs=4, head_dim=256), "CLUSTERS", 4, 2, 2, 1, 8, 2, 128),
        (Sizes(seqs=8, head_dim=256), "EITHER", 2, 2, 2, 1, 8, 2, 264),
        (Sizes(seqs=64, head_dim=256), "QUEUE", 1, 2, 2, 1, 16, 2, 264),
        # Where there is no room for a long sequence, all lengths are even enough.
        (Sizes(seqs=8, max_blocks=128), "CLUSTERS", 2, 8, 3, 1, 8, 1, 128),
        (Sizes(seqs=16, max_blocks=128), "CLUSTERS", 2, 4, 3, 1, 8, 2, 256),
        (Sizes(seqs=16, max_blocks=129), "EITHER", 2, 4, 3, 1, 8, 2, 264),
        (Sizes(seqs=17, max_blocks=128), "QUEUE", 1, 4, 3, 1, 16, 2, 264),
        (Sizes(seqs=64, max_blocks=128), "CLUSTERS", 1, 4, 3, 1, 8, 2, 512),
        (Sizes(seqs=64, max_blocks=129), "EITHER", 1, 4, 3, 1, 8, 2, 512),
        # 40 query heads of 5 tokens are 25 rows, of a team of two warps.
        (Sizes(seqs=16, heads=40, query_tokens=5), "EITHER", 2, 4, 4, 1, 16, 2, 264),
        # With `split` a row has the same bits in any batch.
        (Sizes(seqs=1, split=512), "QUEUE", 1, 4, 3, 1, 16, 2, 64),
        (Sizes(seqs=16, split=512), "QUEUE", 1, 4, 3, 1, 16, 2, 264),
        (Sizes(seqs=64, split=512), "QUEUE", 1, 4, 3, 1, 16, 2, 264),
    ],
    ids=str,
)
def test_how_items_are_dealt(
    x: Sizes, dealing: str, cluster: int, warps: int, stages: int, at_once: int, rows: int, fit: int, blocks: int
) -> None:
    dealt = plan(x)
    assert dealt.variant.instance.arguments[8:] == (stages, cluster, warps, dealing, at_once, rows, fit)
    assert dealt.threads == 32 * warps
    assert dealt.blocks == blocks and dealt.blocks % cluster == 0
    items = x.seqs * x.kv_heads
    if dealing == "CLUSTERS":
        assert (dealt.slots, dealt.counters) == (0, 0)
    else:
        # As many pieces as the queue cuts at most.
        shares = 132 * fit if cluster == 1 and dealing == "EITHER" else blocks
        pieces = items * 8 if x.split else min(items * -(-x.max_blocks // 4), shares + items)
        assert dealt.shares == shares
        assert (dealt.slots, dealt.counters) == (pieces * dealt.rows, 1 + items)


GENERAL = "attend_scalar, the slow general kernel: "


@pytest.mark.parametrize(
    ("x", "wanted"),
    [
        (Sizes(), "heads of 128 and blocks of 16 tokens: specialized (Llama, Qwen, Mistral); 4 rows for each kv"),
        (Sizes(head_dim=72), "(cukern.specialize('paged_attention', head_dim=72, block_size=16) makes one)"),
        (Sizes(variant="dynamic"), "variant='dynamic' asks for it; "),
        (Sizes(variant="scalar", block_size=24), "variant='scalar' asks for it"),
        (Sizes(block_size=24, head_dim=72), f"{GENERAL}blocks of 24 tokens are no multiple of 16 (tensor cores take "),
        (Sizes(head_dim=72, cache="float8_e4m3fn"), f"{GENERAL}a head of 72 in float8_e4m3fn is no multiple of 16"),
        (Sizes(dtype="float32", cache="float32"), "take 16-bit queries, heads of whole 16 bytes up to 256, blocks of "),
        (Sizes(seqs=1, kv_heads=7, heads=28), "7 items (sequences, times kv heads, times blocks of rows): a cluster"),
        (Sizes(seqs=1, kv_heads=8), ": a cluster of 8 blocks for each (up to 15 items)"),
        (Sizes(seqs=33), "264 items (sequences, times kv heads, times blocks of rows): blocks draw pieces of equal"),
        (Sizes(seqs=34), ": a block for each (from 265 to 1056 items), or a queue where the lengths are uneven"),
        (Sizes(seqs=34, max_blocks=128), "items), as room for 2048 tokens is even enough (up to 2048)"),
        (Sizes(seqs=16), ": a cluster of 2 blocks for each (up to 132 items), or a queue"),
        (Sizes(split=512), "split=512 cuts the tokens, and blocks draw the pieces"),
    ],
)  # fmt: skip
def test_the_reason_for_a_kernel(x: Sizes, wanted: str) -> None:
    assert wanted in plan(x).why


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
def test_the_largest_heads_compile(cache: str, layout: str) -> None:
    if reason := compiler.available():
        pytest.skip(reason)
    compiler.cubin(plan(Sizes(cache=cache, layout=layout, head_dim=512)).variant.instance, "90a")


@pytest.mark.parametrize("variant", ["specialized", "dynamic"])
def test_a_variant_that_is_not_there_is_refused(variant: str) -> None:
    for x, reason in (
        (Sizes(dtype="float32", cache="float32"), "float32 is not computed on tensor cores"),
        (Sizes(block_size=24), "blocks of 24 tokens are no multiple of 16"),
        (Sizes(head_dim=120, cache="float8_e5m2"), "a head of 120 in float8_e5m2 is no multiple of 16 bytes"),
        (Sizes(aligned=False), "an array or one of its strides is no multiple of 16 bytes"),
        (Sizes(head_dim=512), "heads of 512 are larger than 256"),
    ):
        message = f"variant must be 'auto' or 'scalar' here, got '{variant}': {reason}"
        with pytest.raises(ValueError, match=re.escape(message)):
            plan(x._replace(variant=variant))
    if variant == "specialized":
        message = "'specialized': there is none for heads of 72 and blocks of 16 tokens (cukern.specialize adds one)"
        with pytest.raises(ValueError, match=re.escape(message)):
            plan(Sizes(head_dim=72, variant=variant))


def test_what_is_compiled_at_import_is_what_is_called() -> None:
    # Of many sequences on any GPU, and of all but those that are few on others than Hopper's.
    wanted = [plan(Sizes(t, t, layout, seqs=256)) for t in ("float16", "bfloat16") for layout in LAYOUTS]
    alone = [plan(Sizes(t, t, layout, seqs=1)) for t in ("float16", "bfloat16") for layout in LAYOUTS]
    at_import = set(instances("paged_attention"))
    clearing = {parts._clear_counters.variant(parts._CLEAR_THREADS).instance}
    wanted_instances = {p.variant.instance for p in wanted} | clearing
    assert wanted_instances <= at_import <= wanted_instances | {p.variant.instance for p in alone}


def test_specialize_adds_a_head_and_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_registered", set(parts.SPECIALIZED))
    made = op.specialize(head_dim=72, block_size=48)
    assert [i.arguments[3:6] for i in made] == [(72, 80, 48)] * 4
    assert plan(Sizes(head_dim=72, block_size=48, seqs=256)).variant.instance in made
    for sizes, error, message in (
        ({"head_dim": 20, "block_size": 16}, ValueError, "head_dim must be a multiple of 8, got 20"),
        ({"head_dim": 264, "block_size": 16}, ValueError, "head_dim must be an integer in [8, 256], got 264"),
        ({"head_dim": 64, "block_size": 24}, ValueError, "block_size must be a multiple of 16, got 24"),
        ({"head_dim": 64.0, "block_size": 16}, TypeError, "head_dim must be an integer in [8, 256], got 64.0 (float)"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            op.specialize(**sizes)  # type: ignore[arg-type]


@pytest.fixture
def h200(pretended: PretendedGPU) -> PretendedGPU:  # noqa: F811
    return pretended


def launched(h200: PretendedGPU, function: Any, *args: Any, **options: Any) -> list[Launch]:
    """The launches of a call on an H200."""
    before = len(h200.launches)
    function(*args, **options)
    return h200.launches[before:]


@pytest.mark.parametrize(
    ("tokens", "head_dim", "by_heads", "last", "grid"),
    [
        (64, 128, False, (1, "true"), 256),
        (4096, 128, False, (1, "true"), 16384),
        (8192, 128, False, (2, "true"), 16384),
        (8192, 128, True, ("true", 1, "true"), 32768),
        (8192, 96, False, ("false",), 24576),  # 12 vectors in a row
        (8192, 129, False, ("__nv_bfloat16", 1, "false"), 264192),
    ],
)
def test_how_states_are_merged(
    h200: PretendedGPU, tokens: int, head_dim: int, by_heads: bool, last: tuple[Any, ...], grid: int
) -> None:
    outs = [torch.empty(tokens, 32, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    lses = [torch.empty((32, tokens) if by_heads else (tokens, 32)) for _ in range(2)]
    options = {"lse_heads_first": True} if by_heads else {}
    (step,) = launched(h200, cukern.merge_attention_states, outs[0], lses[0], outs[1], lses[1], **options)
    assert step.variant.instance.arguments[-len(last) :] == last
    assert step.grid == (grid, 1, 1)
    assert 1 << step.fields["shift"] == head_dim // 8 or last[-1] == "false"
    assert (step.fields["rows"], step.fields["tokens"]) == (tokens * 32, tokens if by_heads else 0)


def test_the_launch_of_a_batch(h200: PretendedGPU) -> None:
    kinds = {"dtype": torch.bfloat16}
    out, query = torch.empty(64, 32, 128, **kinds), torch.empty(64, 48, 128, **kinds)[:, :32]
    caches = torch.empty(9, 8, 16, 16, 8, **kinds), torch.empty(9, 8, 128, 16, **kinds)
    tables, lengths = torch.zeros(64, 260, dtype=torch.int32)[:, :256], torch.zeros(64, dtype=torch.int32)
    options = {"k_scale": 0.5, "v_scale": torch.ones(1), "window": 100, "sinks": torch.zeros(32), "out": out}
    clearing, launch_ = launched(h200, cukern.paged_attention, query, *caches, tables, lengths, scale=0.25, **options)
    # 512 items with a block each. Cut by the shares of 264 blocks at once, they are at most 776 pieces of 4 rows.
    assert launch_.grid == (512, 1, 1) and clearing.grid == (3, 1, 1)
    counters, slots = 1 + 512, 776 * 4
    # One workspace: the counters, then the outputs, maxima and sums of pieces, each from a multiple of 256 bytes on.
    sizes = 4 * counters, 4 * slots * 128, 4 * slots
    taken = clearing.fields["counters"]
    partial, maxima, sums = (taken + start for start in itertools.accumulate(-(-size // 256) * 256 for size in sizes))
    at = {"taken": taken, "arrived": taken + 4, "partial": partial, "maxima": maxima, "sums": sums}
    assert clearing.fields == {"counters": taken, "count": counters}
    given = zip(("query", "keys", "values", "tables", "lengths"), (query, *caches, tables, lengths), strict=True)
    want = {
        **{name: array.data_ptr() for name, array in given}, "out": out.data_ptr(), "lse": 0, "slopes": 0, **at,
        "sinks": options["sinks"].data_ptr(), "key_scale": 0, "value_scale": options["v_scale"].data_ptr(),
        "query_seq": 48 * 128, "query_token": 0, "query_head": 128, "key_block": 32768, "key_token": 0,
        "key_head": 4096, "value_block": 32768, "value_token": 0, "value_head": 4096, "table_row": 260, "seqs": 64,
        "query_tokens": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "group": 4, "row_blocks": 1, "blocks": 9,
        "block_size": 16, "max_blocks": 256, "window": 100, "split": 0, "min_units": 4, "rows": 4, "max_splits": 0,
        "vllm_workspace": 0, "sparse_local": 0, "sparse_stride": 0, "sparse_size": 64, "sparse_head_step": 0,
        "sparse_rank": 0, "scale": 0.125, "softcap": 0.0, "out_scale": 1.0, "shares": 264,
    }  # fmt: skip
    assert launch_.fields == want


def test_the_launch_of_v2(h200: PretendedGPU) -> None:
    x = {"dtype": torch.float16}
    out, query, tmp_out = torch.empty(3, 4, 64, **x), torch.empty(3, 4, 64, **x), torch.empty(3, 4, 5, 64, **x)
    caches = torch.empty(9, 2, 8, 16, 8, **x), torch.empty(9, 2, 64, 16, **x)
    sums, maxima = torch.empty(3, 4, 5), torch.empty(3, 4, 5)
    places = torch.zeros(3, 160, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    args = (out, sums, maxima, tmp_out, query, *caches, 2, 0.25, *places, 16, 2500, None, "auto", None, 2)
    clearing, step = launched(h200, cukern.paged_attention_v2, *args, 1, 2, 3, 32, -1)
    fields, taken = step.fields, clearing.fields["counters"]
    assert clearing.fields["count"] == 1 + 3 * 2
    names = ("partial", "maxima", "sums", "taken", "arrived", "split", "max_splits", "vllm_workspace", "out_scale")
    want = (tmp_out.data_ptr(), maxima.data_ptr(), sums.data_ptr(), taken, taken + 4, 512, 5, 1, 2.0)
    assert tuple(fields[name] for name in names) == want
    sparse = {"sparse_local": 2, "sparse_stride": 3, "sparse_size": 32, "sparse_head_step": -1, "sparse_rank": 1}
    assert fields.items() >= sparse.items()


def good_tensors(name: str) -> dict[str, Any]:
    return {key: as_torch(x) if isinstance(x, np.ndarray) else x for key, x in GOOD[name]().items()}


def test_every_call_is_checked(h200: PretendedGPU) -> None:
    good = good_tensors("paged_attention") | {"k_scale": 0.5}
    for _ in range(3):
        cukern.paged_attention(**good)
    count = len(h200.launches)
    for name, bad, message in (
        ("seq_lens", good["seq_lens"][:1], "seq_lens must be of shape [seqs] = [2], got [1]"),
        ("block_tables", good["block_tables"][:1], "block_tables must be of shape [seqs, max_blocks] = [2, 3], got [1"),
        ("query", good["query"][:1], "block_tables must be of shape [seqs, max_blocks] = [1, 3], got [2, 3]"),
        ("out", good["out"][:1], "out must be of shape query's = [2, 4, 16], got [1, 4, 16]"),
        ("out", torch.zeros(129)[1:].view(2, 4, 16), "out must be at a multiple of 16 bytes, got an address"),
        ("query", good["query"].clone().requires_grad_(), "query must be a tensor that does not require grad"),
        ("scale", INF, "scale must be a finite number, got inf"),
        ("scale", 1e31, "scale must be of at most 1e+30, with k_scale, got 5e+30"),
        ("v_scale", True, "v_scale must be a number, got True (bool)"),
        ("window", True, "window must be an integer of at least 1, got True (bool)"),
        ("return_lse", 2, "return_lse must be one of False, True, got 2"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{re.escape(message)}"):
            cukern.paged_attention(**good | {name: bad})
    assert len(h200.launches) == count


def test_numbers_of_each_call(h200: PretendedGPU) -> None:
    good = good_tensors("paged_attention_v2")
    for scale, key, value, length in ((0.5, 2, 3.0, 9), (2, 0.25, 1, 1024), (1.0, None, 7, 0), (1.0, None, 7, 5)):
        numbers = {"scale": scale, "k_scale": key, "v_scale": value}
        cukern.paged_attention_v2(**good | numbers | {"max_seq_len": length})
        fields = h200.launches[-1].fields
        assert (fields["scale"], fields["out_scale"]) == (scale * (key or 1), value)
        with pytest.raises(ValueError, match=r"^exp_sums must be of at least 3 partitions"):
            cukern.paged_attention_v2(**good | numbers | {"max_seq_len": 1025})
        with pytest.raises(TypeError, match=r"^max_seq_len must be an integer"):
            cukern.paged_attention_v2(**good | numbers | {"max_seq_len": torch.ones(())})


# --- the kernels against the twin -----------------------------------------------------------------------


def variants_of(x: Case) -> list[str]:
    head_dim, fp8 = x.query.shape[-1], x.key_cache.dtype.itemsize == 1
    if x.query.dtype.name == "float32" or x.block_size % 16 or head_dim % (16 if fp8 else 8) or head_dim > 256:
        return ["auto", "scalar"]
    known = (head_dim, x.block_size) in parts.SPECIALIZED
    return ["auto", *["specialized"] * known, "dynamic", "scalar"]


def used_most() -> Iterator[Sizes]:
    """Of the calls on the GPU, those that need most of the kernels."""
    for i, (name, (_, heads, kv_heads, head_dim, block_size)) in enumerate(CASES.items()):
        for dtype in ("float16", "bfloat16") if name in IN_FLOAT16 else ("bfloat16",):
            layout = LAYOUTS[(i + DTYPES.index(dtype)) % 2]
            yield Sizes(dtype, dtype, layout, False, 0, True, "auto", 1, heads, kv_heads, head_dim, block_size)
    for (_, heads, kv_heads, head_dim, block_size), dtype, cache, layout in OF_FLOAT8.values():
        yield Sizes(dtype, cache, layout, False, 0, True, "auto", 1, heads, kv_heads, head_dim, block_size)
    for dtype, layout, extras in itertools.product(("float16", "bfloat16"), LAYOUTS, (False, True)):
        for query_tokens, head_dim in itertools.product((1, 5, 9), (64, 48)):
            yield Sizes(dtype, dtype, layout, extras, 0, True, "auto", query_tokens, 8, 2, head_dim)
    for dtype, cache, layout in itertools.product(DTYPES, (*DTYPES, *FP8), LAYOUTS):
        if cache in (dtype, *FP8):
            yield Sizes(dtype, cache, layout, variant="scalar")


@pytest.fixture(scope="module", autouse=True)
def _compiled_on_all_cores(request: pytest.FixtureRequest) -> None:
    """Compile in parallel what the GPU tests would compile one by one, where many of them run."""
    own = [item for item in request.session.items if item.path == request.path and item.get_closest_marker("gpu")]
    if len(own) < 100:
        return
    needed = set()
    for x in used_most():
        for variant, seqs in itertools.product((x.variant, "dynamic"), (1, 64)):
            with contextlib.suppress(ValueError):  # where there is none
                needed.add(plan(x._replace(variant=variant, seqs=seqs)).variant.instance)
    for (seqs, kv_heads, _), cache in itertools.product(DEALT.values(), ("bfloat16", "float8_e4m3fn")):
        sizes = {"heads": 5 * kv_heads, "kv_heads": kv_heads, "head_dim": 64, "seqs": seqs, "max_blocks": 190}
        needed.add(plan(Sizes(cache=cache, layout=LAYOUTS[seqs % 2], **sizes)).variant.instance)
    arch = arch_of_device(0)
    compiler.compile_all([(i, arch) for i in compiler.missing(needed, arch)])


def compare(x: Case, **options: Any) -> None:
    """Every variant gives what the twin gives, however the work is dealt out."""
    want, want_lse = twin.paged_attention(*x.args, layout=x.layout, return_lse=True, **options)
    assert not np.isnan(want.astype(np.float32)).any()
    longest = [int(x.seq_lens.argmax())]
    for variant in variants_of(x):
        for split in (None, 64):
            out, lse = launch(x, variant, split=split, **options)
            assert_matches(OUT, out, want)
            assert_matches(LSE, lse, want_lse)
        # A small batch is dealt out in another way.
        out, lse = launch(rows_of(x, longest), variant, **options)
        assert_matches(OUT, out, want[longest])
        assert_matches(LSE, lse, want_lse[longest])


EDGES = [0, 1, 15, 16, 17, 33, 63, 64, 65, 128, 200]

#: Lengths, heads, kv heads, head_dim, block_size; and why.
CASES: dict[str, tuple[list[int], int, int, int, int]] = {
    "Llama-3-8B, long and short": ([3000, 1, 0, 777], 32, 8, 128, 16),
    "block edges": (EDGES, 8, 2, 128, 16),
    "one sequence, in many parts": ([9000], 8, 2, 128, 32),
    "few, for whose lengths there is little room": ([500, 500, 511, 512, 1, 513, 480, 20, 700], 32, 8, 128, 16),
    "fewer, for wide blocks": ([300, 0, 257, 1, 310], 32, 8, 128, 16),
    "few of about one length": ([2100, 2100, 2111, 2112, 1, 2113, 2080, 2100, 2300], 32, 8, 128, 16),
    "few, of which one is long": ([60] * 8 + [3000], 32, 8, 128, 16),
    "fewer of about one length": ([2300, 0, 2257, 2299, 2310], 32, 8, 128, 16),
    "fewer, of which one is long": ([60, 3000, 0, 60, 60], 32, 8, 128, 16),
    "many of about one length, a block each": ([1100, 1101, 1088, 1090] * 9, 32, 8, 128, 16),
    "many with little room": ([500, 0, 511, 64, 1, 513] * 6, 32, 8, 128, 16),
    "many, of which none is cut": ([1600, 1280, 1000] * 14, 32, 8, 128, 16),
    "many, of which one is cut": ([100] * 35 + [5000], 32, 8, 128, 16),
    "more sequences than a warp has lanes": ([5, 40, 0, 77] * 20, 4, 1, 64, 16),
    "every head its own": ([70, 300], 8, 8, 128, 16),
    "7 heads of a kv head": ([70, 300, 0], 14, 2, 128, 64),
    "16 heads of a kv head": (EDGES, 16, 1, 64, 16),
    "more heads than a tile has rows": ([70, 300, 0, 1025], 40, 1, 64, 32),
    "Falcon-7B's 71 heads": (EDGES, 71, 1, 64, 64),
    "head_dim 80": (EDGES, 4, 1, 80, 16),
    "head_dim 96": (EDGES, 8, 1, 96, 32),
    "head_dim 112": (EDGES, 4, 4, 112, 16),
    "head_dim 120": (EDGES, 7, 1, 120, 16),
    "head_dim 192": (EDGES, 8, 1, 192, 64),
    "head_dim 256": (EDGES, 32, 2, 256, 16),
    "the least head_dim": (EDGES, 8, 2, 8, 16),
    "head_dim 40, not whole fragments": (EDGES, 4, 1, 40, 32),
    "head_dim 72": (EDGES, 16, 2, 72, 16),
    "head_dim 200": (EDGES, 8, 1, 200, 16),
    "head_dim 264, too large for tensor cores": (EDGES, 8, 1, 264, 16),
    "the largest head_dim": (EDGES, 4, 2, 512, 16),
    "blocks of 128": ([*EDGES, 129, 300], 8, 2, 128, 128),
    "blocks of 8": (EDGES, 4, 1, 64, 8),
    "blocks of 24": ([*EDGES, 24, 25, 47], 8, 2, 72, 24),
    "a block size of three tiles": ([*EDGES, 48, 49, 97], 8, 2, 64, 48),
}


#: Of these the two 16-bit dtypes are tried; they differ in what multiplies and what rounds.
IN_FLOAT16 = (
    "Llama-3-8B, long and short", "block edges", "more heads than a tile has rows", "Falcon-7B's 71 heads",
    "head_dim 256", "head_dim 40, not whole fragments", "blocks of 128", "blocks of 8",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in CASES for dtype in DTYPES if dtype != "float16" or name in IN_FLOAT16],
)
def test_the_kernels(name: str, dtype: str, rng: np.random.Generator) -> None:
    # Each layout in one of the 16-bit dtypes, to compile half as much.
    layout = LAYOUTS[(list(CASES).index(name) + DTYPES.index(dtype)) % 2]
    compare(paged(rng, *CASES[name], dtype, layout=layout))


#: Lengths, heads, kv heads, head_dim, block_size; the dtype, the cache's, the layout.
OF_FLOAT8: dict[str, tuple[tuple[Any, ...], str, str, str]] = {
    "Llama-3-8B": (([2000, 1, 0, 333], 32, 8, 128, 16), "bfloat16", "float8_e4m3fn", "flash"),
    "Llama-3-8B, vLLM": (([2000, 1, 0, 333], 32, 8, 128, 16), "bfloat16", "float8_e4m3fn", "vllm"),
    "e5m2": ((EDGES, 8, 1, 64, 32), "float16", "float8_e5m2", "vllm"),
    "e5m2, flash": ((EDGES, 8, 1, 64, 32), "float16", "float8_e5m2", "flash"),
    "e5m2, bfloat16": ((EDGES, 8, 1, 128, 16), "bfloat16", "float8_e5m2", "vllm"),
    "float16": ((EDGES, 8, 1, 128, 16), "float16", "float8_e4m3fn", "flash"),
    "71 heads": (([70, 300, 0], 71, 1, 64, 16), "bfloat16", "float8_e4m3fn", "vllm"),
    "head_dim 80": ((EDGES, 4, 1, 80, 16), "bfloat16", "float8_e4m3fn", "vllm"),
    "head_dim 112": ((EDGES, 4, 1, 112, 16), "bfloat16", "float8_e4m3fn", "flash"),
    "head_dim 192": ((EDGES, 4, 1, 192, 32), "bfloat16", "float8_e4m3fn", "vllm"),
    "head_dim 256": ((EDGES, 8, 2, 256, 64), "bfloat16", "float8_e4m3fn", "flash"),
    "head_dim 48": ((EDGES, 4, 2, 48, 16), "bfloat16", "float8_e4m3fn", "vllm"),
    "head_dim 48, flash": ((EDGES, 4, 2, 48, 48), "bfloat16", "float8_e4m3fn", "flash"),
    "a head of no whole 16 bytes": ((EDGES, 4, 1, 120, 16), "bfloat16", "float8_e4m3fn", "flash"),
    "the least head": ((EDGES, 4, 1, 8, 16), "float16", "float8_e5m2", "flash"),
    "blocks of 8": ((EDGES, 4, 1, 32, 8), "float16", "float8_e5m2", "vllm"),
    "blocks of 24": ((EDGES, 4, 1, 64, 24), "bfloat16", "float8_e4m3fn", "flash"),
    # A block each of up to 8 rows, of which four share a multiprocessor; of 9, two.
    "a block each": (([1100, 1101, 1088, 1090] * 9, 32, 8, 128, 16), "bfloat16", "float8_e4m3fn", "vllm"),
    "a block each, little room": (([500, 0, 511, 64, 1, 513] * 6, 32, 8, 128, 16), "float16", "float8_e5m2", "flash"),
    "a block each, 9 rows": (([700, 2100, 64] * 12, 72, 8, 64, 16), "bfloat16", "float8_e4m3fn", "flash"),
    "many, of which one is cut": (([100] * 35 + [5000], 64, 8, 128, 16), "bfloat16", "float8_e4m3fn", "flash"),
    "pairs": (([2100, 2111, 0, 2112, 1, 2113, 2080, 2300, 17], 32, 8, 128, 16), "bfloat16", "float8_e4m3fn", "vllm"),
    "pairs, of which one is long": (([60] * 4 + [3000], 32, 8, 128, 16), "bfloat16", "float8_e4m3fn", "flash"),
    "float32": ((EDGES, 4, 1, 64, 16), "float32", "float8_e4m3fn", "vllm"),
    "float32, flash": ((EDGES, 4, 1, 64, 16), "float32", "float8_e5m2", "flash"),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "dtype", "cache", "layout"), OF_FLOAT8.values(), ids=OF_FLOAT8)
def test_the_kernels_with_float8(
    sizes: tuple[Any, ...], dtype: str, cache: str, layout: str, rng: np.random.Generator
) -> None:
    x = paged(rng, *sizes, dtype, cache, layout)
    scales = {"k_scale": np.array([0.5], np.float32), "v_scale": np.array([0.75], np.float32)}
    compare(x, **scales)
    assert_matches(OUT, launch(x, k_scale=0.5, v_scale=0.75)[0], launch(x, **scales)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "float8_e4m3fn"])
@pytest.mark.parametrize(("heads", "query_tokens"), [
    *((rows, None) for rows in range(1, 10)), (1, 8), (2, 4), (3, 2), (2, 3), (3, 3), (1, 9),
])  # fmt: skip
def test_each_number_of_rows(heads: int, query_tokens: int | None, cache: str | None, rng: np.random.Generator) -> None:
    # Up to 8 rows of a kv head, of heads and query tokens, are the second operand of the products, more the first.
    layout = LAYOUTS[heads % 2]
    x = paged(rng, [100, 700, 0, 33, 2], 2 * heads, 2, 64, 16, "bfloat16", cache, layout, query_tokens, window=300)
    slopes = np.linspace(0.1, 0.6, 2 * heads, dtype=np.float32)
    compare(x, window=300, alibi_slopes=slopes, sinks=slopes)


@pytest.mark.gpu
def test_each_row_is_rescaled_by_itself(rng: np.random.Generator) -> None:
    # A bfloat16 query over 8 bits is divided by a power of two of each row, which the row's scores are multiplied by.
    x = paged(rng, [300, 70], 16, 2, 64, 16, "bfloat16", "float8_e4m3fn", query_tokens=None)
    magnitudes = 2.0 ** rng.permutation(np.arange(-8, 8) * 5)
    x.query[...] = (x.query.astype(np.float32) * magnitudes[:, None]).astype(x.query.dtype)
    compare(x, softcap=20.0)


@pytest.mark.gpu
def test_queries_beyond_float16_over_float8(rng: np.random.Generator) -> None:
    # A cache of 8 bits is multiplied in float16, and bfloat16 reaches further.
    for magnitude in (2.0**40, 2.0**-60):
        x = paged(rng, [30, 70], **{**TAKEN_BY_ALL, "dtype": "bfloat16"}, cache="float8_e4m3fn")
        x.query[...] = (x.query.astype(np.float32) * magnitude).astype(x.query.dtype)
        compare(x, scale=0.125 / magnitude)


#: Options of a call; {"heads": ...} and the like change the case.
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.4},
    "alibi": {"alibi_slopes": slopes_of(8)},
    "window": {"window": 37},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "softcap 30": {"softcap": 30.0, "scale": 1.0},
    "sinks": {"sinks": np.linspace(-2, 6, 8, dtype=np.float32)},
    "scales of the cache": {"k_scale": 0.7, "v_scale": np.array(0.6, np.float32)},
    "all": {
        "alibi_slopes": slopes_of(8), "window": 100, "softcap": 5.0, "sinks": np.linspace(-2, 6, 8, dtype=np.float32),
        "k_scale": np.array([0.7], np.float32), "v_scale": 0.6, "scale": 0.3,
    },
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [None, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], layout: str, query_tokens: int | None, rng: np.random.Generator) -> None:
    window = options.get("window")
    x = paged(rng, [0, 1, 36, 64, 700, 5], **TAKEN_BY_ALL, layout=layout, query_tokens=query_tokens, window=window)
    compare(x, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("query_tokens", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("heads", [(4, 1), (2, 2), (14, 2), (71, 1)], ids=str)
def test_several_query_tokens(heads: tuple[int, int], query_tokens: int, rng: np.random.Generator) -> None:
    layout, dtype = (("vllm", "bfloat16"), ("flash", "float16"))[(heads[0] + query_tokens) % 2]
    lengths = [0, 1, 2, 16, 33, 40, 129, 600]
    compare(paged(rng, lengths, *heads, 64, 16, dtype, layout=layout, query_tokens=query_tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache"), [
    ("bfloat16", None), ("float16", None), ("float32", None), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"),
])  # fmt: skip
def test_every_token_counts(dtype: str, cache: str | None, layout: str, rng: np.random.Generator) -> None:
    # Each row looks for one token, and finds its value: whichever is misplaced or left out shows.
    length, heads, kv_heads, head_dim = 1060, 8, 2, 128
    x = paged(rng, [length], heads, kv_heads, head_dim, 16, dtype, cache, layout)
    signs = (rng.integers(0, 2, (length, kv_heads, head_dim)) * 2 - 1).astype(x.key_cache.dtype)
    slots = (x.block_tables[0, : ceil(length / 16), None] * 16 + np.arange(16)).ravel()[:length]
    dense = np.full((len(x.key_cache) * 16, kv_heads, head_dim), NAN, x.key_cache.dtype)
    dense[slots] = signs
    dense = dense.reshape(-1, 16, kv_heads, head_dim)
    key_cache, _ = in_layout(dense, dense, layout)
    # Some head of each group looks for each token.
    kv_head = np.arange(heads) // (heads // kv_heads)
    target = (np.arange(length)[:, None] + np.arange(heads) % (heads // kv_heads) * 11) % length
    many = x._replace(
        query=signs[target, kv_head].astype(x.query.dtype),
        key_cache=key_cache,
        block_tables=np.repeat(x.block_tables, length, 0),
        seq_lens=np.full(length, length, np.int32),
    )
    want = x.values[0][target, kv_head].astype(x.query.dtype)
    for variant in variants_of(many):
        for split in (None, 64, 512):
            out, lse = launch(many, variant, scale=0.25, split=split)
            assert_matches(OUT, out, want)
            assert_matches(LSE, lse, np.full(lse.shape, 32, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [64, 512])
@pytest.mark.parametrize("variant", ["specialized", "dynamic", "scalar"])
@pytest.mark.parametrize("query_tokens", [None, 3])
def test_a_row_has_the_same_bits_in_any_batch(
    query_tokens: int | None, variant: str, split: int, rng: np.random.Generator
) -> None:
    lengths = [3000, 1, 0, 512, 513, 64, 65, 1500, 700]
    x = paged(rng, lengths, **TAKEN_BY_ALL, query_tokens=query_tokens)
    out, lse = launch(x, variant, split=split)
    for chosen in ([0], [4], [7, 1], [8, 6, 0, 2], list(reversed(range(9))), [0] * 40):
        # Tables that are longer, or shorter, too.
        widest = ceil(max(lengths[i] for i in chosen) / 16)
        tables = np.full((len(chosen), widest + 40 * (len(chosen) % 2)), JUNK[0], np.int32)
        for to, i in zip(tables, chosen, strict=True):
            to[:widest] = x.block_tables[i, :widest]
        part = x._replace(query=x.query[chosen], block_tables=tables, seq_lens=x.seq_lens[chosen])
        again, lse_again = launch(part, variant, split=split)
        same_bits(again, out[chosen])
        same_bits(lse_again, lse[chosen])


@pytest.mark.gpu
def test_what_is_returned_without_lse(rng: np.random.Generator) -> None:
    for lengths in ([3000], [20, 0, 100]):
        x = paged(rng, lengths, **TAKEN_BY_ALL)
        got = cukern.paged_attention(*map(on_gpu, x.args))
        assert type(got) is cupy.ndarray
        same_bits(cupy.asnumpy(got), launch(x)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(dtype: str, rng: np.random.Generator) -> None:
    # exp of such scores overflows unless the largest is taken off first.
    x = paged(rng, [200, 1000], 8, 2, 64, 16, dtype)
    want, want_lse = twin.paged_attention(*x.args, scale=30.0, return_lse=True)
    assert want_lse.min() > 300
    for variant in variants_of(x):
        out, lse = launch(x, variant, scale=30.0)
        # What rounds a score of 1000 by 2**-23 of itself, several times, does so to each weight.
        assert np.abs(out.astype(np.float32) - want.astype(np.float32)).max() < 2**-7
        assert np.abs(lse - want_lse).max() < 2e-3


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "cache", "head_dim", "block_size"), [
    ("bfloat16", None, 64, 16), ("float16", "float8_e4m3fn", 64, 16), ("float16", None, 40, 48),
    ("float32", None, 64, 8),
])  # fmt: skip
def test_each_path_stays_inside_its_arrays(
    dtype: str, cache: str | None, head_dim: int, block_size: int, layout: str, rng: np.random.Generator
) -> None:
    # Tables and caches exactly as large as they must be, so that a read beyond what is needed leaves an array.
    x = paged(rng, [150, 0, 17], 6, 2, head_dim, block_size, dtype, cache, layout)
    blocks = [ceil(n / block_size) for n in (150, 0, 17)]
    kept = np.concatenate([row[:n] for row, n in zip(x.block_tables, blocks, strict=True)])
    tables = np.full((3, blocks[0]), JUNK[0], np.int32)
    for row, n, start in zip(tables, blocks, np.cumsum([0, *blocks]), strict=False):
        row[:n] = np.arange(start, start + n)
    x = x._replace(key_cache=x.key_cache[kept], value_cache=x.value_cache[kept], block_tables=tables)
    compare(x)
    compare(x, window=20, softcap=3.0, sinks=np.zeros(6, np.float32), alibi_slopes=np.ones(6, np.float32) / 8)


#: Sequences and kv heads, and the longest sequence: each way in which items are dealt.
DEALT = {
    "clusters of 16": (1, 2, 300),
    "wide clusters of 8": (1, 8, 300),
    "wide clusters of 4": (2, 8, 300),
    "wide pairs": (5, 8, 300),
    "wide blocks that draw": (5, 8, 2900),
    "pairs": (17, 4, 300),
    "blocks that draw": (17, 4, 1500),
    "a block each": (34, 8, 60),
    "a block each, of uneven lengths": (34, 8, 700),
    "a block each, of which those at once draw": (34, 8, 2200),
}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("cache", [None, "float8_e4m3fn"])
@pytest.mark.parametrize(("seqs", "kv_heads", "longest"), DEALT.values(), ids=DEALT)
def test_each_dealing_stays_inside_its_arrays(
    seqs: int, kv_heads: int, longest: int, cache: str | None, rng: np.random.Generator
) -> None:
    # Tables have room for more than 2048 tokens, so that the lengths decide; 5 rows.
    lengths = [longest, *(int(n) for n in rng.integers(0, 60, seqs - 1))]
    x = paged(rng, lengths, 5 * kv_heads, kv_heads, 64, 16, "bfloat16", cache, LAYOUTS[seqs % 2])
    tables = np.full((seqs, 190), JUNK[0], np.int32)
    tables[:, : x.block_tables.shape[1]] = x.block_tables
    want, want_lse = twin.paged_attention(*x.args, layout=x.layout, return_lse=True)
    for _ in range(2):
        out, lse = launch(x._replace(block_tables=tables))
        assert_matches(OUT, out, want)
        assert_matches(LSE, lse, want_lse)


@pytest.mark.gpu
@settings(max_examples=60)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    # Few sizes, so that few kernels are compiled; all else is drawn.
    dtype, cache, layout = data.draw(
        st.sampled_from(
            [
                ("bfloat16", None, "vllm"),
                ("float16", "float8_e4m3fn", "flash"),
                ("float16", None, "flash"),
                ("float32", None, "vllm"),
            ]
        )
    )
    head_dim, block_size = data.draw(st.sampled_from([(48, 48), (32, 8)]))
    kv_heads, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    heads = kv_heads * ratio
    query_tokens = data.draw(st.none() | st.integers(1, 9))
    window = data.draw(st.none() | st.integers(1, 200))
    lengths = data.draw(st.lists(st.integers(-1, 40) | st.integers(0, 600), min_size=1, max_size=9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = paged(rng, lengths, heads, kv_heads, head_dim, block_size, dtype, cache, layout, query_tokens, window)
    options = {
        "alibi_slopes": rng.uniform(0, 0.5, heads).astype(np.float32) if data.draw(st.booleans()) else None,
        "sinks": normal(rng, (heads,), "float32") if data.draw(st.booleans()) else None,
        "softcap": data.draw(st.sampled_from([None, 3.0])),
        "window": window,
    }
    compare(x, **options)


# --- vLLM's functions on the GPU ------------------------------------------------------------------------


def launch_vllms(name: str, x: Case, partitions: int, *rest: Any, **changes: Any) -> list[Array]:
    """What `name` writes: out, and the workspaces of v2."""
    host = [np.full_like(x.query, NAN), *(workspaces(x, partitions) if name == "paged_attention_v2" else [])]
    written = [Buffer(a.shape, a.dtype.name) for a in host]
    for buffer, poison in zip(written, host, strict=True):
        buffer.array[...] = cupy.asarray(poison)
    assert getattr(cukern, name)(*(b.array for b in written), *map(on_gpu, v1_args(x, *rest, **changes))) is None
    return [buffer.numpy() for buffer in written]


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", SPARSE.values(), ids=SPARSE)
@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "ratio"), [
    ("bfloat16", 64, 16, 1), ("float16", 64, 16, 4), ("float16", 128, 16, 20), ("float32", 64, 8, 4),
])  # fmt: skip
def test_block_sparse_kernels(
    sparse: Sparse, dtype: str, head_dim: int, block_size: int, ratio: int, rng: np.random.Generator
) -> None:
    sparse = sparse._replace(block_size=sparse.block_size * block_size // 8)
    x = paged(rng, [130, 0, 1, 600, 33, 1100], 2 * ratio, 2, head_dim, block_size, dtype)
    slopes = slopes_of(2 * ratio) / 4 if ratio == 4 else None
    want = np.full_like(x.query, NAN)
    spaces = workspaces(x, 3)
    twin.paged_attention_v2(want, *spaces, *v1_args(x, slopes, sparse))
    for name in "paged_attention_v1", "paged_attention_v2":
        out, *written = launch_vllms(name, x, 3, slopes, sparse)
        assert_matches(OUT, out, want)
    compare_workspaces(written, spaces)
    (out,) = launch_vllms("paged_attention_v1", repeated(x, 20), 3, slopes, sparse)
    assert_matches(OUT, out, np.concatenate([want] * 20))


def compare_workspaces(got: list[Array], want: list[Array]) -> None:
    exp_sums, max_logits, tmp_out = got
    assert_matches("paged_attention.exp_sums", exp_sums, want[0])
    assert_matches(LSE, max_logits, want[1])
    assert_matches(OUT, tmp_out, want[2])


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_v1_and_v2_kernels(dtype: str, cache: str | None, rng: np.random.Generator) -> None:
    x = paged(rng, [2100, 0, 1, 511, 512, 513, 40], 8, 2, 64, 16, dtype, cache)
    scales = {"k_scale": np.array([0.8], np.float32), "v_scale": np.array([0.75], np.float32)}
    want, spaces = np.full_like(x.query, NAN), workspaces(x, 6)
    twin.paged_attention_v2(want, *spaces, *v1_args(x, slopes_of(8) / 50, **scales))
    for name in "paged_attention_v1", "paged_attention_v2":
        out, *written = launch_vllms(name, x, 6, slopes_of(8) / 50, **scales)
        assert_matches(OUT, out, want)
    # One partition more than any sequence has: it stays as it was.
    compare_workspaces(written, spaces)
    want = twin.paged_attention(*x.args)
    for name in "paged_attention_v1", "paged_attention_v2":
        assert_matches(OUT, launch_vllms(name, x, 6, k_scale=None, v_scale=None)[0], want)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [24, 48, 80])
def test_v2_fills_its_partitions_whatever_the_blocks(block_size: int, rng: np.random.Generator) -> None:
    # No multiple of these is 512, and there is not a partition to spare.
    x = paged(rng, [500, 512, 1020, 1024], 8, 2, 64, block_size, "float16")
    want, spaces = np.full_like(x.query, NAN), workspaces(x, 2)
    twin.paged_attention_v2(want, *spaces, *v1_args(x))
    assert not np.isnan(want.astype(np.float32)).any()
    out, *written = launch_vllms("paged_attention_v2", x, 2)
    assert_matches(OUT, out, want)
    compare_workspaces(written, spaces)


@pytest.mark.gpu
def test_v1_takes_a_strided_query_and_bad_ids(rng: np.random.Generator) -> None:
    x = paged(rng, [600, 30, 0], **TAKEN_BY_ALL)
    x.block_tables[1, 1] = len(x.key_cache)
    want = np.full_like(x.query, NAN)
    twin.paged_attention_v1(want, *v1_args(x))
    assert np.isnan(want[1].astype(np.float32)).all()
    wide = cupy.full((3, 12, 64), NAN, np.float16)
    wide[:, :8] = cupy.asarray(x.query)
    for name in "paged_attention_v1", "paged_attention_v2":
        out, *_ = launch_vllms(name, x._replace(query=wide[:, :8]), 2)
        assert_matches(OUT, out, want)


# --- merging on the GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    "shape", [(5, 3, 128), (1, 1, 8), (2, 3, 7, 40), (0, 4, 64), (300, 32, 64), (7, 1, 5)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_kernels(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    out_a, out_b = (rng.uniform(-1, 1, shape).astype(arrays.numpy_dtype(dtype)) for _ in range(2))
    lse_a, lse_b = (normal(rng, shape[:-1], "float32") * 4 for _ in range(2))
    lse_a.ravel()[::3], lse_b.ravel()[::5], lse_b.ravel()[::7] = -INF, -INF, INF
    out_a[np.isinf(lse_a)], out_b[np.isinf(lse_b)] = NAN, NAN
    want, want_lse = twin.merge_attention_states(out_a, lse_a, out_b, lse_b)
    by_head = [cupy.asarray(np.ascontiguousarray(lse.swapaxes(-1, -2))) for lse in (lse_a, lse_b)]
    out_by_head, lse_by_head = cukern.merge_attention_states(
        cupy.asarray(out_a), by_head[0], cupy.asarray(out_b), by_head[1], lse_heads_first=True
    )
    assert lse_by_head.shape == by_head[0].shape
    assert_matches("paged_attention.merged", out_by_head, want)
    assert_matches(LSE, lse_by_head.swapaxes(-1, -2), want_lse)
    given = [cupy.asarray(a) for a in (out_a, lse_a, out_b, lse_b)]
    out, lse = Buffer(shape, dtype), Buffer(shape[:-1], "float32")
    pair = out.array, lse.array
    assert cukern.merge_attention_states(*given, out=pair) is pair
    for got, got_lse in ((out.numpy(), lse.numpy()), cukern.merge_attention_states(*given)):
        assert_matches("paged_attention.merged", got, want)
        assert_matches(LSE, got_lse, want_lse)
    # In place, but for what other threads still read.
    if lse_a.size:
        with pytest.raises(ValueError, match="out\\[1\\] must be another array than lse_a and lse_b"):
            cukern.merge_attention_states(*given, out=(given[0], given[1]))
    merged_lse = cupy.empty_like(given[1])
    cukern.merge_attention_states(*given, out=(given[0], merged_lse))
    assert_matches("paged_attention.merged", given[0], want)
    assert_matches(LSE, merged_lse, want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_two_vectors_at_once_gives_the_same_bits(
    dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last block is not full; some sums are not plain numbers.
    shape = 37, 5, 128
    out_a, out_b = (rng.uniform(-1, 1, shape).astype(arrays.numpy_dtype(dtype)) for _ in range(2))
    lse_a, lse_b = (normal(rng, shape[:-1], "float32") * 4 for _ in range(2))
    lse_a.ravel()[::3], lse_b.ravel()[::5], out_a.ravel()[::11], out_b.ravel()[::11] = -INF, INF, 0, -0.0
    given, found = [cupy.asarray(a) for a in (out_a, lse_a, out_b, lse_b)], []
    for many in (2**24, 0):
        monkeypatch.setattr(op, "_MANY_MERGED", many)
        forget_plans()
        found.append(cukern.merge_attention_states(*given))
    forget_plans()
    for ours, theirs in zip(*found, strict=True):
        same_bits(ours, cupy.asnumpy(theirs))


@pytest.mark.gpu
def test_merged_prefix_and_suffix(rng: np.random.Generator) -> None:
    # A prefix that all sequences share, and what each has of its own.
    x = paged(rng, [400, 900, 464], **TAKEN_BY_ALL)
    want, want_lse = twin.paged_attention(*x.args, return_lse=True)
    prefix = x._replace(seq_lens=np.full(3, 400, np.int32))
    suffix = x._replace(block_tables=x.block_tables[:, 25:], seq_lens=x.seq_lens - 400)
    parts = [cupy.asarray(a) for part in (prefix, suffix) for a in launch(part)]
    out, lse = cukern.merge_attention_states(*parts)
    assert np.abs(cupy.asnumpy(out).astype(np.float32) - want.astype(np.float32)).max() < 2**-10
    assert_matches(LSE, lse, want_lse)


# --- torch, streams, graphs -----------------------------------------------------------------------------


def tensors(x: Case) -> list[torch.Tensor]:
    return [as_torch(a).cuda() for a in x.args]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, *FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors(dtype: str, cache: str | None, rng: np.random.Generator) -> None:
    # In several parts, and not.
    for lengths in ([3000], [20, 0, 100]):
        x = paged(rng, lengths, 8, 2, 64, 16, dtype, cache)
        want, want_lse = twin.paged_attention(*x.args, return_lse=True)
        given = tensors(x)
        got, lse = cukern.paged_attention(*given, return_lse=True)
        assert type(got) is torch.Tensor and got.is_cuda and lse.is_cuda
        assert_matches(OUT, got.cpu(), want)
        assert_matches(LSE, lse.cpu(), want_lse)
        if cache:
            given[1:3] = [a.view(torch.uint8) for a in given[1:3]]
            again = cukern.paged_attention(*given, kv_cache_dtype=FP8[cache])
            assert torch.equal(again, got)
        out = torch.full_like(got, NAN)
        args = [as_torch(a).cuda() if arrays.is_array(a) else a for a in v1_args(x)]
        cukern.paged_attention_v1(out, *args)
        assert_matches(OUT, out.cpu(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [None, 512])
def test_a_cuda_graph_follows_lengths_and_blocks(split: int | None, rng: np.random.Generator) -> None:
    # One graph for all steps of a batch whose sequences grow, end and begin.
    capacity = 4000
    x = paged(rng, [capacity] * 4, **TAKEN_BY_ALL)
    given, full = tensors(x), x.block_tables
    out, v1_out, v2_out = (torch.empty_like(given[0]) for _ in range(3))
    spaces = [as_torch(a).cuda() for a in workspaces(x, ceil(capacity / 512))]
    args = [as_torch(a).cuda() if arrays.is_array(a) else a for a in v1_args(x)]
    # The same tensors in all three.
    args[:3], args[5:7] = given[:3], given[3:]

    def step() -> Any:
        cukern.paged_attention_v1(v1_out, *args)
        cukern.paged_attention_v2(v2_out, *spaces, *args)
        return cukern.paged_attention(*given, out=out, split=split), cukern.paged_attention(
            *given, return_lse=True, split=split
        )

    step()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, (made, lse) = step()
    for lengths in ([capacity] * 4, [1, 0, 3999, 17], [0, 0, 0, 0], [700, 701, 702, 703]):
        x.seq_lens[:] = lengths
        x.query[...] = normal(rng, x.query.shape, "float16")
        tables = full[rng.permutation(4)]
        for row, length in zip(tables, lengths, strict=True):
            row[ceil(length / 16) :] = JUNK[0]
        x = x._replace(block_tables=tables)
        for i in (0, 3, 4):
            given[i].copy_(as_torch(x.args[i]))
        for tensor in (out, made, lse, v1_out, v2_out):
            tensor.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        want, want_lse = twin.paged_attention(*x.args, return_lse=True)
        for tensor in (out, made, v1_out, v2_out):
            assert_matches(OUT, tensor.cpu(), want)
        assert_matches(LSE, lse.cpu(), want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("seqs", [5, 9, 36])
def test_a_cuda_graph_follows_lengths_that_become_uneven(
    seqs: int, cache: str | None, rng: np.random.Generator
) -> None:
    # One launch takes clusters, or a block for each item, where the lengths are even, and else a queue of pieces.
    capacity = 3000
    x = paged(rng, [capacity] * seqs, 32, 8, 128, 16, "bfloat16", cache)
    given = tensors(x)
    cukern.paged_attention(*given, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made, lse = cukern.paged_attention(*given, return_lse=True)
    uneven = [20] * (seqs - 1)
    # 1500 tokens, beside short sequences, are more than others' clusters have, and still few enough for one block.
    longest = [*uneven, capacity], [capacity, *uneven], [*uneven, 1500]
    for lengths in ([700] * seqs, *longest, [0] * seqs, [*range(600, 600 + seqs)]):
        given[4].copy_(torch.tensor(lengths, dtype=torch.int32))
        x.seq_lens[:] = lengths
        want, want_lse = twin.paged_attention(*x.args, return_lse=True)
        kept = []
        for _ in range(2):
            made.fill_(NAN), lse.fill_(NAN)
            graph.replay()
            torch.cuda.synchronize()
            assert_matches(OUT, made.cpu(), want)
            assert_matches(LSE, lse.cpu(), want_lse)
            kept.append((made.clone(), lse.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.gpu
@pytest.mark.large(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_than_2_31_elements(layout: str, rng: np.random.Generator) -> None:
    """Blocks at the far end of a cache, in each layout and by each variant."""
    # Not for the sanitizer, which would take minutes.
    kv_heads, head_dim, block_size = 8, 128, 16
    block_bytes = kv_heads * head_dim * block_size
    blocks = 2**31 // block_bytes + 64
    x = paged(rng, [700, 0, 33], 32, kv_heads, head_dim, block_size, "bfloat16", "float8_e4m3fn", layout)
    want, want_lse = twin.paged_attention(*x.args, layout=layout, return_lse=True)
    used = len(x.key_cache)
    assert used < 64
    # Both caches in one array, with NaN but at its end.
    both = torch.full((blocks, 2, block_bytes), 0x7F, dtype=torch.uint8, device="cuda")
    for i, a in enumerate((x.key_cache, x.value_cache)):
        both[-used:, i] = torch.from_numpy(a.view(np.uint8).reshape(used, -1)).cuda()
    caches = [
        torch.as_strided(both, (blocks, *a.shape[1:]), (2 * block_bytes, *a.strides[1:]), i * block_bytes)
        for i, a in enumerate((x.key_cache, x.value_cache))
    ]
    needed = np.isin(x.block_tables, JUNK, invert=True)
    tables = np.where(needed, x.block_tables + (blocks - used), x.block_tables).astype(np.int32)
    rest = [as_torch(a).cuda() for a in (tables, x.seq_lens)]
    for variant in variants_of(x):
        got, lse = cukern.paged_attention(
            as_torch(x.query).cuda(),
            *caches,
            *rest,
            layout=layout,
            kv_cache_dtype="fp8",
            return_lse=True,
            variant=variant,
        )
        assert_matches(OUT, got.cpu(), want)
        assert_matches(LSE, lse.cpu(), want_lse)


# --- torch.ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operators(device: str, rng: np.random.Generator) -> None:
    import cukern.torch_ops

    def there(values: Any) -> list[Any]:
        return [as_torch(a).to(device) if arrays.is_array(a) else a for a in values]

    x = paged(rng, [40, 0, 17], 8, 2, 64, 16, "bfloat16")
    options = {"window": 20, "softcap": 3.0, "sinks": torch.zeros(8, device=device)}
    operator = torch.ops.cukern.paged_attention
    given = there(x.args)
    want, lse = cukern.paged_attention(*given, **options, return_lse=True)
    out, lse_out = torch.full_like(want, NAN), torch.full_like(lse, NAN)
    assert torch.equal(operator(*given, **options), want)
    assert all(torch.equal(a, b) for a, b in zip(operator.lse(*given, **options), (want, lse), strict=True))
    assert operator.out(*given, **options, attended=out) is None
    assert torch.equal(out, want)
    assert operator.lse_out(*given, **options, attended=out.fill_(NAN), lse=lse_out) is None
    assert torch.equal(out, want) and torch.equal(lse_out, lse)
    torch.library.opcheck(operator.default, tuple(given), options)
    torch.library.opcheck(operator.lse, tuple(given), options)
    torch.library.opcheck(operator.out, tuple(given), {**options, "attended": out})
    torch.library.opcheck(operator.lse_out, tuple(given), {**options, "attended": out, "lse": lse_out})

    for name in "paged_attention_v1", "paged_attention_v2":
        operator = getattr(torch.ops.cukern, name)
        poison = [np.zeros_like(x.query), *([np.zeros_like(a) for a in workspaces(x, 2)] if name[-1] == "2" else [])]
        args = there(v1_args(x, slopes_of(8), Sparse(0, 1, 2, 16, 1)))
        written, wanted = there(poison), there(poison)
        getattr(cukern, name)(*wanted, *args)
        assert operator(*written, *args) is None
        for ours, theirs in zip(written, wanted, strict=True):
            assert torch.equal(ours, theirs)
        torch.library.opcheck(operator.default, (*written, *args))

    states = [
        *cukern.paged_attention(*given, return_lse=True),
        *cukern.paged_attention(*given, return_lse=True, window=3),
    ]
    for ours, theirs in zip(
        torch.ops.cukern.merge_attention_states(*states), cukern.merge_attention_states(*states), strict=True
    ):
        assert torch.equal(ours, theirs)
    operator = torch.ops.cukern.merge_attention_states
    torch.library.opcheck(operator.default, tuple(states))
    torch.library.opcheck(operator.out, tuple(states), {"merged": out, "lse": lse_out})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_step_is_the_step(device: str, rng: np.random.Generator) -> None:
    import cukern.torch_ops

    x = paged(rng, [40, 1, 17], 4, 2, 64, 16)
    given = [as_torch(a).to(device) for a in x.args]

    def step(query: Any, key_cache: Any, value_cache: Any, block_tables: Any, seq_lens: Any) -> Any:
        out = torch.empty_like(query)
        args = query, key_cache, value_cache, 2, 0.125, block_tables, seq_lens, 16, 40, None, "auto", None, None
        cukern.paged_attention_v1(out, *args)
        tables = key_cache, value_cache, block_tables, seq_lens
        own = cukern.paged_attention(query * 2, *tables, scale=0.0625)
        again, lse = cukern.paged_attention(query, *tables, return_lse=True)
        twice, more = cukern.merge_attention_states(again, lse, own, lse)
        return out + own, out - own, twice - out, more - lse

    want = step(*given)
    for difference, value in zip(want[1:], (0, 0, np.log(2)), strict=True):
        assert (difference - value).abs().max() < 1e-5
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    torch.compiler.reset()
