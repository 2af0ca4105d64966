"""Attention without padding: the twin against torch, the kernels against the twin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_varlen_attention, harness
from cukern.ops.varlen_attention import choose
from cukern.reference import varlen_attention as twin
from cukern.runtime import arrays, gpu, plan
from cukern.runtime.cuda import cupy
from cukern.runtime.kernel import arch_of_device
from cukern.runtime.sources import CUDA_SRC
from cukern.testing import assert_matches
from tests.buffers import Buffer, as_torch, on_gpu, same_bits, to_numpy
from tests.plans import plan_of

Array = NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")


class Batch(NamedTuple):
    """The arrays of a call; rows of no sequence are NaN."""

    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array | None

    def on_gpu(self, skip: int = 0) -> tuple[Any, ...]:
        *rows, of_queries, of_keys = self
        return (*(on_gpu(x, skip) for x in rows), on_gpu(of_queries), on_gpu(of_keys))


def sums(lengths: Any) -> Array:
    return np.cumsum([0, *lengths]).astype(np.int32)


def draw(
    rng: np.random.Generator, lengths: Any, dim: int, dtype: str = "float32", *, key_lengths: Any = None,
    heads: int = 2, kv_heads: int | None = None, left_over: int = 3,
) -> Batch:  # fmt: skip
    """Random rows; values are of magnitude 1 at most, as the tolerances say."""
    of_queries, of_keys = sums(lengths), None if key_lengths is None else sums(key_lengths)
    last = of_queries if of_keys is None else of_keys

    def rows(cu_seqlens: Array, heads: int) -> Array:
        made = rng.standard_normal((cu_seqlens[-1] + left_over, heads, dim)).astype(arrays.numpy_dtype(dtype))
        made[cu_seqlens[-1] :] = np.nan
        return made

    q, k, v = rows(of_queries, heads), rows(last, kv_heads or heads), rows(last, kv_heads or heads)
    # NumPy releases differ in the dtype of clipped bfloat16 numbers.
    return Batch(q, k, np.clip(v, -1, 1).astype(v.dtype), of_queries, of_keys)


def sanitized(value: object) -> Any:
    """Return a parameter whose cases also run under the sanitizer; racecheck takes seconds for each."""
    return pytest.param(value, marks=pytest.mark.sanitize)


def matches(got: Any, want: Array) -> None:
    assert_matches("varlen_attention.out", got, want)


# --- the twin -----------------------------------------------------------------------------------------


def by_torch(
    batch: Batch, scale: float | None = None, causal: bool = False, window: tuple[int, int] = (-1, -1),
    softcap: float | None = None, sinks: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """The formulas in float64, with a mask of all pairs of a query and a key, and a softmax over keys and sink."""
    q, k, v = (torch.from_numpy(x.astype(np.float64)).swapaxes(0, 1) for x in batch[:3])
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    of_queries, of_keys = batch.cu_seqlens_q, batch.cu_seqlens_q if batch.cu_seqlens_k is None else batch.cu_seqlens_k
    out = np.zeros((*batch.q.shape[:2], batch.v.shape[2]))
    sink = torch.full((len(q), 1, 1), -torch.inf) if sinks is None else torch.from_numpy(sinks)[:, None, None].double()
    lse = sink[:, 0].expand(-1, len(batch.q)).clone().numpy()
    for s in range(len(of_queries) - 1):
        rows, memory = slice(*of_queries[s : s + 2]), slice(*of_keys[s : s + 2])
        n, m = rows.stop - rows.start, memory.stop - memory.start
        distance = torch.arange(m) - (m - n + torch.arange(n))[:, None]  # of a key from the query's position
        left, right = window[0] if window[0] >= 0 else m + n, 0 if causal else window[1] if window[1] >= 0 else m + n
        scores = q[:, rows] @ k[:, memory].mT * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill((distance < -left) | (distance > right), -torch.inf)
        scores = torch.cat([scores, sink.expand(-1, n, 1)], 2)
        lse[:, rows] = torch.logsumexp(scores, 2)
        # The softmax of a query that sees nothing is NaN.
        out[rows] = (torch.softmax(scores, 2)[..., :-1].nan_to_num() @ v[:, memory]).swapaxes(0, 1)
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "key_lengths", "kv_heads"),
    [
        ([3, 0, 17, 1], None, 4),
        ([3, 0, 17, 1], [5, 4, 2, 0], 4),
        ([1, 1], [9, 30], 2),
        ([40], None, 1),
        ([], None, 4),
        ([0, 0], [0, 3], 4),
    ],
)
def test_the_twin_is_what_torch_has(
    lengths: Any, key_lengths: Any, kv_heads: int, causal: bool, rng: np.random.Generator
) -> None:
    batch = draw(rng, lengths, 8, key_lengths=key_lengths, heads=4, kv_heads=kv_heads)
    for scale in (None, 0.7):
        got = cukern.varlen_attention(*batch, scale=scale, causal=causal)
        np.testing.assert_allclose(got, by_torch(batch, scale, causal)[0], 1e-6, 1e-6)


#: Options of a call, with [heads] for `sinks`.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "causal window": {"window": (9, 4), "causal": True},
    "left": {"window": (0, -1)},
    "right": {"window": (-1, 3), "scale": 0.7},
    "softcap": {"softcap": 1.5, "causal": True},
    "sinks": {"sinks": True, "window": (20, 0)},
    "all": {"sinks": True, "window": (20, 0), "softcap": 30.0, "scale": 0.3},
}


def with_sinks(options: dict[str, Any], heads: int, rng: np.random.Generator, dtype: str = "float32") -> dict[str, Any]:
    """Options with random numbers for `sinks`, one of them so small that it changes nothing."""
    if "sinks" not in options:
        return options
    sinks = rng.standard_normal(heads).astype(arrays.numpy_dtype(dtype))
    sinks[0] = -np.inf
    return options | {"sinks": sinks}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_windows_sinks_and_softcap_are_what_torch_has(options: dict[str, Any], rng: np.random.Generator) -> None:
    options = with_sinks(options, 4, rng)
    for lengths, key_lengths in (([3, 0, 17, 1], None), ([3, 1, 17, 2], [30, 0, 9, 40])):
        batch = draw(rng, lengths, 8, key_lengths=key_lengths, heads=4, kv_heads=2)
        got, lse = cukern.varlen_attention(*batch, **options, return_lse=True)
        out, logs = by_torch(batch, **options)
        np.testing.assert_allclose(got, out, 1e-6, 1e-6)
        np.testing.assert_allclose(lse, logs, 1e-6, 1e-6)
        same_bits(got, cukern.varlen_attention(*batch, **options))


class Paged(NamedTuple):
    """The same sequences in a paged cache. Pages that no query sees are not in the table, all others are NaN."""

    k: Array
    v: Array
    block_table: Array
    seqused_k: Array


def paged(batch: Batch, page_size: int, rng: np.random.Generator, left: int = -1) -> Paged:
    """Put the keys and values of a batch into pages in random order. `left` is the left limit of the window."""
    of_keys = batch.cu_seqlens_q if batch.cu_seqlens_k is None else batch.cu_seqlens_k
    lengths, query_lengths = np.diff(of_keys), np.diff(batch.cu_seqlens_q)
    counts = -(-lengths // page_size)
    order = iter(rng.permutation(int(counts.sum()) + 2))
    shape = int(counts.sum()) + 2, page_size
    k, v = (np.full((*shape, *x.shape[1:]), np.nan, x.dtype) for x in (batch.k, batch.v))
    table = np.full((len(lengths), int(counts.max(initial=0)) + 1), -(2**31), np.int32)
    for s, (begin, n) in enumerate(zip(of_keys, lengths, strict=False)):
        first = 0 if left < 0 else max(0, n - query_lengths[s] - left) // page_size
        for j in range(first, counts[s]):
            page = table[s, j] = next(order)
            rows = slice(begin + j * page_size, begin + min(int(n), (j + 1) * page_size))
            k[page, : rows.stop - rows.start], v[page, : rows.stop - rows.start] = batch.k[rows], batch.v[rows]
    return Paged(k, v, table, lengths.astype(np.int32))


@pytest.mark.parametrize("page_size", [8, 16, 24])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_paged_cache_holds_the_same(options: dict[str, Any], page_size: int, rng: np.random.Generator) -> None:
    options = with_sinks(options, 4, rng)
    batch = draw(rng, [3, 0, 17, 1], 8, key_lengths=[30, 5, 17, 0], heads=4, kv_heads=2)
    want = cukern.varlen_attention(*batch, **options, return_lse=True)
    k, v, table, used = paged(batch, page_size, rng, options.get("window", (-1, 0))[0])
    for lengths in ({"seqused_k": used}, {"cu_seqlens_k": batch.cu_seqlens_k}):
        got = cukern.varlen_attention(
            batch.q, k, v, batch.cu_seqlens_q, block_table=table, **lengths, **options, return_lse=True
        )
        for a, b in zip(got, want, strict=True):
            same_bits(a, b)


def test_used_keys_of_packed_sequences(rng: np.random.Generator) -> None:
    batch = draw(rng, [3, 2], 8, key_lengths=[7, 9])
    got = cukern.varlen_attention(*batch, seqused_k=np.array([4, 100], np.int32), causal=True)
    k, v = (np.concatenate([x[:4], x[7:16]]) for x in (batch.k, batch.v))
    same_bits(got, cukern.varlen_attention(batch.q, k, v, batch.cu_seqlens_q, sums([4, 9]), causal=True))


def test_a_window_is_the_one_of_paged_attention(put: Callable[[Any], Any], rng: np.random.Generator) -> None:
    batch = draw(rng, [2, 2, 2], 16, key_lengths=[40, 2, 33], heads=4, kv_heads=2, left_over=0)
    k, v, table, used = paged(batch, 16, rng)
    sinks = rng.standard_normal(4).astype(np.float32)
    for window in (1, 7, 100):
        given = [put(x) for x in (k, v, table, used)]
        options = {"sinks": put(sinks), "softcap": 3.0, "return_lse": True}
        want, want_lse = cukern.paged_attention(
            put(batch.q.reshape(3, 2, 4, 16)), *given, layout="flash", window=window, **options
        )
        got, lse = cukern.varlen_attention(
            put(batch.q), *given[:2], put(batch.cu_seqlens_q), block_table=given[2], seqused_k=given[3],
            window=(window - 1, 0), **options,
        )  # fmt: skip
        matches(got, to_numpy(want).reshape(6, 4, 16))
        assert_matches("varlen_attention.lse", lse, to_numpy(want_lse).reshape(6, 4).T)


def test_a_page_outside_of_the_cache(put: Callable[[Any], Any], rng: np.random.Generator) -> None:
    batch = draw(rng, [3, 2, 2], 8, key_lengths=[20, 20, 20], left_over=0)
    k, v, table, used = paged(batch, 8, rng)
    table[0, 2], table[1, 0] = len(k), -1
    used[2] = table.shape[1] * 8 + 1
    got, lse = (
        to_numpy(x)
        for x in cukern.varlen_attention(
            put(batch.q), put(k), put(v), put(batch.cu_seqlens_q), block_table=put(table), seqused_k=put(used),
            causal=True, return_lse=True,
        )
    )  # fmt: skip
    assert np.isnan(got).all() and np.isnan(lse).all()
    # A page that no query sees may be anything.
    got = cukern.varlen_attention(
        put(batch.q[3:5]), put(k), put(v), put(sums([2])), block_table=put(table[1:2]), seqused_k=put(used[1:2]),
        causal=True, window=(4, 0),
    )  # fmt: skip
    assert np.isfinite(to_numpy(got)).all()


def test_by_hand(put: Callable[[Any], Any]) -> None:
    ln3 = np.log(3)
    q = np.array([[[1.0]], [[1]], [[2]]], np.float32)
    k = np.array([[[0.0]], [[ln3]], [[5]]], np.float32)
    v = np.array([[[0.0]], [[4]], [[7]]], np.float32)
    lengths = put(np.array([0, 2, 3], np.int32))
    got = to_numpy(cukern.varlen_attention(put(q), put(k), put(v), lengths, scale=1.0))
    np.testing.assert_allclose(got[:, 0, 0], [3, 3, 7], 1e-6)  # weights 1/4 and 3/4, then one key
    got = to_numpy(cukern.varlen_attention(put(q), put(k), put(v), lengths, scale=1.0, causal=True))
    np.testing.assert_allclose(got[:, 0, 0], [0, 3, 7], 1e-6)


def test_causal_sees_from_the_end(put: Callable[[Any], Any]) -> None:
    # All scores are equal, so a result is the mean of the values that its query sees.
    q, k, v = (np.zeros((n, 1, 2), np.float32) for n in (4, 6, 6))
    v[:, 0, 0] = [1, 2, 4, 8, 16, 32]
    of_queries, of_keys = np.array([0, 1, 4], np.int32), np.array([0, 4, 6], np.int32)
    got = to_numpy(cukern.varlen_attention(*map(put, (q, k, v, of_queries, of_keys)), causal=True))
    # One query over four keys sees all of them; of three over two, the first sees none.
    np.testing.assert_allclose(got[:, 0, 0], [15 / 4, 0, 16, 24], 1e-6)


def test_rows_outside_of_the_sequences_change_nothing(rng: np.random.Generator) -> None:
    lengths = [5, 0, 9]
    clean = draw(rng, lengths, 16, left_over=0)
    spoiled = Batch(*(np.concatenate([x, np.full_like(x[:6], np.nan)]) for x in clean[:3]), *clean[3:])
    got = cukern.varlen_attention(*spoiled)
    same_bits(got[:14], cukern.varlen_attention(*clean))
    assert not got[14:].any()


def test_infinities_and_nan(put: Callable[[Any], Any], rng: np.random.Generator) -> None:
    batch = draw(rng, [4, 3, 2], 4, heads=1, left_over=0)
    batch.q[1], batch.k[5], batch.k[7:] = np.nan, np.nan, -np.inf
    batch.q[7] = abs(batch.q[7])  # whose scores all are -inf
    got = to_numpy(cukern.varlen_attention(*(put(x) for x in batch[:4])))
    assert np.isnan(got[1]).all() and np.isnan(got[4:7]).all()
    assert np.isfinite(got[[0, 2, 3]]).all() and not got[7].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_on_the_cpu(dtype: torch.dtype) -> None:
    product = torch.randn(11, 3 * 2 * 16).to(dtype)
    q, k, v = product.view(11, 3, 2, 16).unbind(1)  # parts of a fused product
    lengths = torch.tensor([0, 4, 11], dtype=torch.int32)
    got = cukern.varlen_attention(q, k, v, lengths)
    assert (got.dtype, got.shape) == (dtype, (11, 2, 16))
    want = [
        torch.nn.functional.scaled_dot_product_attention(*(x[rows].transpose(0, 1).float() for x in (q, k, v)))
        for rows in (slice(0, 4), slice(4, 11))
    ]
    torch.testing.assert_close(got.float(), torch.cat(want, 1).transpose(0, 1), rtol=2**-6, atol=2**-6)
    out = torch.empty(11, 2, 16, dtype=dtype)
    assert cukern.varlen_attention(q, k, v, lengths, out=out) is out and torch.equal(out, got)


# --- bad input ----------------------------------------------------------------------------------------

Q = np.zeros((6, 4, 8), np.float32)
K = np.zeros((5, 2, 8), np.float32)
LENGTHS, KEY_LENGTHS = np.array([0, 2, 6], np.int32), np.array([0, 5, 5], np.int32)


def many(rows: NDArray[Any]) -> NDArray[Any]:
    """The first row as one token more than an array may have, without their memory."""
    return np.broadcast_to(rows[:1], (2**30 + 1, *rows.shape[1:]))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": [1.0]}, TypeError, "q must be an array (NumPy, CuPy, torch, or any with"),
    ({"q": Q.astype(int)}, TypeError, "q must be float32 or float16 or bfloat16, got int64"),
    ({"q": Q[0]}, ValueError, "q must be of shape [tokens, heads, dim], got [4, 8]"),
    ({"q": Q[:, :0]}, ValueError, "q must be of 1 to 65535 heads of a dim in [1, 256], got 0 heads of 8"),
    ({"q": np.zeros((6, 4, 257), np.float32)}, ValueError, "q must be of 1 to 65535 heads of a dim in [1, 256], got"),
    ({"q": Q[:, :, ::2], "k": K[:, :, :4], "v": K[:, :, :4]}, ValueError, "q must be contiguous along its last dimen"),
    ({"k": K[0]}, ValueError, "k must be of shape [memory_tokens, kv_heads, dim], got [2, 8]"),
    ({"k": K[:, :, :4]}, ValueError, "k must be of a divisor of 4 heads of 8, like q, got 2 heads of 4"),
    ({"k": np.zeros((5, 3, 8), np.float32)}, ValueError, "k must be of a divisor of 4 heads of 8, like q, got 3 heads"),
    ({"k": K.astype(np.float16)}, TypeError, "k must be float32, got float16"),
    ({"k": torch.zeros(5, 2, 8)}, TypeError, "k must be a NumPy array like q, got torch.Tensor"),
    ({"v": K[:4]}, ValueError, "v must be of shape [memory_tokens, kv_heads, dim_v] = [5, 2, 8], got"),
    # The check of the tokens comes before the check of the lengths.
    ({"q": many(Q), "cu_seqlens_q": LENGTHS[:0]}, ValueError, "q must be of at most 1073741824 tokens, got 1073741825"),
    ({"k": many(K), "v": many(K), "cu_seqlens_q": LENGTHS[:0]}, ValueError, "k must be of at most 1073741824 tokens"),
    ({"cu_seqlens_q": LENGTHS[:0]}, ValueError, "cu_seqlens_q must be of shape [sequences + 1], with a 0 first, got"),
    ({"cu_seqlens_q": LENGTHS[None]}, ValueError, "cu_seqlens_q must be of shape [sequences + 1], got [1, 3]"),
    ({"cu_seqlens_q": LENGTHS.astype(np.int64)}, TypeError, "cu_seqlens_q must be int32, got int64"),
    ({"cu_seqlens_q": np.array([0, 3, 2], np.int32)}, ValueError, "cu_seqlens_q must be 0, then sums of lengths up"),
    ({"cu_seqlens_q": np.array([1, 3, 4], np.int32)}, ValueError, "cu_seqlens_q must be 0, then sums of lengths up"),
    ({"cu_seqlens_q": np.array([0, 3, 7], np.int32)}, ValueError, "at most, got [0, 3, 7]"),
    ({"cu_seqlens_k": KEY_LENGTHS[:2]}, ValueError, "cu_seqlens_k must be of shape [sequences + 1] = [3], got [2]"),
    ({"cu_seqlens_k": np.array([0, 3, 6], np.int32)}, ValueError, "cu_seqlens_k must be 0, then sums of lengths up"),
    ({"cu_seqlens_k": None}, ValueError, "k must be of as many tokens as q where there is no cu_seqlens_k, got 5"),
    ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
    ({"causal": 2}, ValueError, "causal must be one of False, True, got 2"),
    ({"out": Q[:, :2]}, ValueError, "out must be of shape [tokens, heads, dim_v] = [6, 4, 8], got"),
    ({"v": np.zeros((5, 2, 300), np.float32)}, ValueError, "v must be of a dim_v in [1, 256], got 300"),
    ({"k": K[None], "v": K[None]}, ValueError, "got [1, 5, 2, 8], which varlen_attention with block_table takes"),
    ({"window": 5}, TypeError, "window must be a pair (left, right) of integers, -1 for no limit, got 5"),
    ({"window": (1, 2, 3)}, TypeError, "window must be a pair (left, right) of integers, -1 for"),
    ({"window": (-2, 0)}, ValueError, "window[0] must be an integer of at least -1, got -2"),
    ({"window": (3, 0.5)}, TypeError, "window[1] must be an integer of at least -1, got 0.5 (float)"),
    ({"softcap": 0.0}, ValueError, "softcap must be in [1e-30, 1e30], got 0.0"),
    ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks must be of shape [heads] = [4], got [3]"),
    ({"sinks": np.zeros(4)}, TypeError, "sinks must be float32 or float16 or bfloat16, got float64"),
    ({"seqused_k": KEY_LENGTHS}, ValueError, "seqused_k must be of shape [sequences] = [2], got [3]"),
    ({"out": Q, "return_lse": True}, TypeError, "out must be a pair (out, lse) with return_lse, got ndarray"),
    ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'wgmma', 'mma', 'fma', got"),
    ({"variant": "fma"}, ValueError, "variant must be 'auto' for arrays in host memory"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": K, "cu_seqlens_q": LENGTHS, "cu_seqlens_k": KEY_LENGTHS}
    with pytest.raises(error, match=re.escape(message)):
        cukern.varlen_attention(**arguments | change)


PAGES, TABLE, USED = np.zeros((3, 8, 2, 8), np.float32), np.zeros((2, 4), np.int32), np.array([9, 5], np.int32)
BAD_PAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": K}, ValueError, "k must be of shape [pages, page_size, kv_heads, dim], got [5, 2, 8], which"),
    ({"k": PAGES[:, :4], "v": PAGES[:, :4]}, ValueError, "k must be of pages of a multiple of 8 tokens, at most"),
    ({"v": PAGES[:2]}, ValueError, "v must be of shape [pages, page_size, kv_heads, dim_v] = [3, 8, 2, 8], got"),
    ({"block_table": TABLE[:1]}, ValueError, "block_table must be of shape [sequences, max_pages] = [2, 4], got"),
    ({"block_table": TABLE[0]}, ValueError, "block_table must be of shape [sequences, max_pages], got [4]"),
    ({"block_table": TABLE.astype(np.int64)}, TypeError, "block_table must be int32, got int64"),
    ({"seqused_k": None}, ValueError, "seqused_k must be the lengths of the sequences in the cache"),
    ({"seqused_k": USED.astype(np.int64)}, TypeError, "seqused_k must be int32, got int64"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD_PAGES)
def test_bad_pages_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"q": Q, "k": PAGES, "v": PAGES, "cu_seqlens_q": LENGTHS, "block_table": TABLE, "seqused_k": USED}
    cukern.varlen_attention(**arguments)
    with pytest.raises(error, match=re.escape(message)):
        cukern.varlen_attention(**arguments | change)


# --- the launch -----------------------------------------------------------------------------------------


def planned(batch: Batch, arch: str = "90a", **options: Any) -> Any:
    """The launch of the attention kernel, the last one of a plan."""
    return plan_of("varlen_attention", *batch, on=arch, **options)[0].steps[-1]


def test_plans(rng: np.random.Generator) -> None:
    half, single = (draw(rng, [70, 0, 30], 64, dtype, left_over=0) for dtype in ("float16", "float32"))
    for step, why in (
        (planned(half, variant="mma"), "variant='mma' asks for it"),
        (
            planned(half, "80"),
            "16 bits in aligned rows: mma, tensor cores of every GPU, as wgmma cannot: "
            "this GPU is of sm_80, not sm_90a",
        ),
    ):
        found = step.variant.instance
        assert (found.function, found.arguments) == ("attention_mma", ("__half", 64, 64))
        assert (*step.grid[:2], step.block[0]) == (100 // 64 + 4, 2, 128)
        assert step.why == f"{why}; heads of 64 in room for 64, tiles of 64 tokens of 1 heads"
    step = planned(single)
    assert step.why.startswith("float32: fma, the slow general kernel (16 bits in aligned rows take tensor cores)")
    assert planned(draw(rng, [9], 33, "float16")).why.startswith("rows that are not 16-byte aligned: fma, the slow")
    found = step.variant.instance
    assert found.function == "attention_fma" and found.arguments == ("float", 64, 64, 16) and step.block[0] == 256
    assert planned(half, variant="fma").variant.instance.arguments == ("__half", 64, 64, 16)
    # Smaller tiles for large heads, loads of one element for rows that are not aligned.
    assert planned(draw(rng, [9], 160, "float16"), "80").variant.instance.arguments == ("__half", 256, 32)
    assert planned(draw(rng, [9], 160)).variant.instance.arguments == ("float", 256, 32, 16)
    assert planned(draw(rng, [9], 33, "float16")).variant.instance.arguments == ("__half", 64, 64, 2)
    for batch, reason in ((single, "for float32"), (draw(rng, [9], 33, "float16"), "for rows that are not")):
        with pytest.raises(ValueError, match=f"'auto' or 'fma' here, got 'mma': there is none {reason}"):
            planned(batch, variant="mma")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "pack", "fma_pack"),
    [(8, 8, 1, 1), (32, 8, 4, 4), (14, 2, 7, 7), (48, 1, 48, 24), (128, 1, 64, 32), (71, 1, 1, 1)],
)
def test_the_heads_of_a_kv_head_share_a_tile(
    heads: int, kv_heads: int, pack: int, fma_pack: int, rng: np.random.Generator
) -> None:
    batch = draw(rng, [100], 192, "float16", heads=heads, kv_heads=kv_heads, left_over=0)
    for variant, wanted, rows in (("mma", pack, 64), ("fma", fma_pack, 32)):
        step = planned(batch, variant=variant)
        assert step.fields["pack"] == wanted and step.grid[:2] == (100 // (rows // wanted) + 2, heads // wanted)
    step = planned(batch)
    assert step.fields["p"]["pack"] == pack and step.fields["warpgroup_tokens"] == 64 // pack


def planned_maps(batch: Batch, **options: Any) -> dict[str, tuple[Any, ...]]:
    """What the tensor maps of a plan are made of: dims, strides, box, promotion and whether it is swizzled."""
    made: dict[str, tuple[Any, ...]] = {}

    def encode(address: str, dtype: str, *how: Any) -> bytes:
        made[address] = how
        return bytes(128)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "encode", encode)
        fields = planned(batch, **options).fields
        for name in ("q", "k", "v"):
            fields[f"{name}_map"].function(name)
    return made


def test_plans_by_wgmma(rng: np.random.Generator) -> None:
    for dtype, dim, arguments in (
        ("float16", 32, ("__half", 64, 64, 3, 128, 2, 4)),
        ("float16", 64, ("__half", 64, 64, 3, 128, 2, 4)),
        ("bfloat16", 96, ("__nv_bfloat16", 128, 128, 2, 128, 1, 3)),
        ("bfloat16", 200, ("__nv_bfloat16", 256, 256, 2, 64, 1, 2)),
    ):
        batch = draw(rng, [300, 0, 30], dim, dtype, heads=4, kv_heads=2, left_over=0)
        room, tokens = arguments[1], 32 * arguments[3]
        for variant, why in (
            ("auto", "16 bits in aligned rows: wgmma, Hopper's tensor cores"),
            ("wgmma", "variant='wgmma' asks for it"),
        ):
            schedule, step = plan_of("varlen_attention", *batch, variant=variant)[0].steps
            assert schedule.fields["tile_tokens"] == tokens and schedule.grid == (1, 1, 1)
            found = step.variant.instance
            assert (found.function, found.arguments) == ("attention_wgmma", arguments)
            # Persistent blocks, at most one for each tile.
            assert (*step.grid[:2], step.block[0]) == (min(132, 2 * (330 // tokens + 4)), 1, 128 * (arguments[3] + 1))
            assert step.shared_bytes == step.variant.max_shared_bytes <= gpu.of_arch("90a").shared_per_block
            assert step.why == f"{why}; heads of {dim} in room for {room}, tiles of {tokens} tokens of 2 heads"
        maps, row = planned_maps(batch), dim * 2
        assert maps == {
            "q": ((dim, 4, 330, 1), (row, 4 * row, 4 * row), (64, 2, 32, 1), 128, True),
            **dict.fromkeys(("k", "v"), ((dim, 2, 330, 1), (row, 2 * row, 2 * row), (64, 1, 64, 1), 128, True)),
        }
    # Any distance does along a dimension of size 1, but a map takes none of 0.
    one = draw(rng, [1], 64, "float16", heads=1, left_over=0)
    k = np.lib.stride_tricks.as_strided(one.k, one.k.shape, (0, -16, 2))
    assert planned_maps(one._replace(k=k))["k"][:2] == ((64, 1, 1, 1), (128, 128, 128))


@pytest.mark.parametrize(
    ("page_size", "dim", "box"), [(8, 64, 8), (16, 64, 16), (24, 64, 8), (48, 128, 16), (256, 128, 64), (64, 256, 64)]
)
def test_boxes_of_pages(page_size: int, dim: int, box: int, rng: np.random.Generator) -> None:
    batch = draw(rng, [9, 3], dim, "float16", key_lengths=[300, 3], left_over=0)
    k, v, table, used = paged(batch, page_size, rng)
    maps = planned_maps(Batch(batch.q, k, v, batch.cu_seqlens_q, None), block_table=table, seqused_k=used)
    row = dim * 2
    assert maps["k"] == ((dim, 2, page_size, len(k)), (row, 2 * row, page_size * 2 * row), (64, 1, box, 1), 128, True)


def test_what_wgmma_does_not_take(rng: np.random.Generator) -> None:
    half = draw(rng, [70, 0, 30], 64, "float16", left_over=0)
    shared_key = half._replace(k=np.broadcast_to(half.k[:, :1], half.k.shape))
    no_keys = draw(rng, [9], 64, "float16", key_lengths=[0], left_over=0)
    for batch, arch, options, reason in (
        (half, "80", {}, "this GPU is of sm_80, not sm_90a"),
        (half, "100a", {}, "this GPU is of sm_100a, not sm_90a"),
        (shared_key, "90a", {}, "k has strides of 256 and 0 bytes"),
        (no_keys, "90a", {}, "k has no tokens"),
        (half, "90a", {"scale": 0.0}, "scale is below 1e-30"),
        (half, "90a", {"scale": -1.0}, "scale is below 1e-30"),
    ):
        step = planned(batch, arch, **options)
        assert step.variant.instance.function == "attention_mma" and f"as wgmma cannot: {reason};" in step.why
        with pytest.raises(ValueError, match=f"'auto', 'mma' or 'fma' here, got 'wgmma': {reason}"):
            planned(batch, arch, **options, variant="wgmma")
    for batch, reason in (
        (draw(rng, [9], 64), "there is none for float32"),
        (draw(rng, [9], 33, "float16"), "there is none for rows that are not 16-byte aligned"),
    ):
        with pytest.raises(ValueError, match=f"got 'wgmma': {reason}"):
            planned(batch, variant="wgmma")


def test_a_block_fits_into_the_shared_memory_of_any_gpu() -> None:
    for dim in range(1, choose.MAX_DIM + 1):
        for found in (choose.by_mma("float16", dim), choose.by_fma("float32", dim, False)):
            assert found.dims[0] >= dim
            assert found.variant.max_shared_bytes <= min(x.shared_per_block for x in gpu.BY_ARCH.values())
        assert choose.by_wgmma("float16", dim, dim).variant.max_shared_bytes <= gpu.of_arch("90a").shared_per_block


def tile_of(block: int, lengths: Array, tokens: int, tile: int) -> tuple[int, int]:
    """The sequence of a block's tile and its first row in it, as `sequences.cuh` finds them."""
    sequences, first, count = len(lengths) - 1, 0, len(lengths)

    def begin(s: int) -> int:
        return 0 if s == 0 else min(max(int(lengths[s]), 0), tokens)

    while count > 1:
        step = -(-count // 32)
        before = [p < count and begin(first + p) // tile + first + p <= block for p in range(0, 32 * step, step)]
        last = max(sum(before) - 1, 0) * step
        first, count = first + last, min(step, count - last)
    assert 0 <= first <= sequences
    return first, (block - (begin(first) // tile + first)) * tile


@given(st.lists(st.integers(0, 150), max_size=80), st.integers(0, 150), st.sampled_from([32, 64]))
def test_the_blocks_have_each_row_once(lengths: list[int], left_over: int, tile: int) -> None:
    cu_seqlens = sums(lengths)
    tokens = int(cu_seqlens[-1]) + left_over
    covered = np.zeros(tokens, int)
    for block in range(tokens // tile + len(cu_seqlens)):
        s, position = tile_of(block, cu_seqlens, tokens, tile)
        first = int(cu_seqlens[s]) + position
        end = int(cu_seqlens[s + 1]) if s < len(lengths) else tokens
        assert position >= 0
        covered[first : min(end, first + tile)] += 1
    assert (covered == 1).all()


def test_the_blocks_are_found_as_above() -> None:
    source = " ".join((CUDA_SRC / "varlen_attention/sequences.cuh").read_text().split())
    for line in (
        "return s == 0 ? 0 : min(max(__ldg(cu_seqlens + s), 0), rows);",
        "int s = 0, count = p.sequences + 1;",
        "const int step = (count + 31) / 32, place = int(threadIdx.x % 32) * step;",
        "begin_of(p.cu_seqlens_q, s + place, p.tokens) / tile_tokens + s + place <= index;",
        "const int last = max(__popc(__ballot_sync(FULL_WARP, before)) - 1, 0) * step;",
        "s += last, count = min(step, count - last);",
        "const int position = (index - (begin / tile_tokens + s)) * tile_tokens;",
    ):
        assert line in source


# --- benchmarks ---------------------------------------------------------------------------------------


def test_the_benchmark_compares_the_same_thing() -> None:
    for case in bench_varlen_attention.cases(small=True):
        ours, theirs = (harness.inputs(case, 0, "cpu") for _ in range(2))
        assert case.agree is not None
        if "torch" in case.baselines:
            assert case.agree(case.call(*ours), case.baselines["torch"].load()(*theirs)())
            continue
        options = dict(case.case)
        q, k, v, sums_of_q, table, lengths, sinks = theirs
        if table is not None:  # the pages in order
            n = int(lengths[0])
            k, v = (x[table.long()].flatten(1, 2)[:, :n].flatten(0, 1) for x in (k, v))
            sums_of_k = torch.arange(len(lengths) + 1) * n
        batch = Batch(*(x.float().numpy() for x in (q, k, v)), sums_of_q.numpy(), None if table is None else sums_of_k)
        window = (int(options["window"]) - 1, 0)
        want, _ = by_torch(batch, None, True, window, float(options["softcap"]), sinks.numpy())
        assert case.agree(case.call(*ours), torch.from_numpy(want))


# --- on the GPU ---------------------------------------------------------------------------------------

LENGTHS_OF = {
    "one row": [1],
    "a tile": [64],
    "one more than a tile": [65],
    "ragged, with empty ones": [5, 0, 70, 1, 64, 0, 130, 33],
    "several tiles": [300, 17],
    "about a tile": [63, 127, 128, 129, 191, 193, 257, 512],
    "many short ones": [*range(5)] * 30,
    "none": [],
    "empty ones": [0, 0, 0],
}


def is_hopper() -> bool:
    return arch_of_device(0) == "90a"


def variants_of(batch: Batch) -> list[str]:
    dim = batch.q.shape[2]
    has_mma = batch.q.itemsize == 2 and dim * 2 % 16 == 0
    has_wgmma = has_mma and is_hopper() and len(batch.k) > 0
    return ["auto", "fma", *["mma"] * has_mma, *["wgmma"] * has_wgmma]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS_OF.values(), ids=LENGTHS_OF)
def test_the_kernel_is_the_twin(lengths: Any, dtype: str, causal: bool, rng: np.random.Generator) -> None:
    for dim, heads, kv_heads in ((64, 3, 3), (32, 4, 2), (128, 2, 1), (128, 7, 1)):
        batch = draw(rng, lengths, dim, dtype, heads=heads, kv_heads=kv_heads)
        want = twin.varlen_attention(*batch, causal=causal)
        for variant in variants_of(batch):
            out = Buffer(want.shape, dtype)
            given = batch.on_gpu()
            assert cukern.varlen_attention(*given, causal=causal, out=out.array, variant=variant) is out.array
            matches(out.numpy(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_other_lengths(dtype: str, causal: bool, rng: np.random.Generator) -> None:
    for lengths, key_lengths in (([1, 1, 1], [300, 0, 64]), ([100, 33, 2, 0], [70, 200, 0, 9]), ([3], [1])):
        batch = draw(rng, lengths, 64, dtype, key_lengths=key_lengths)
        want = twin.varlen_attention(*batch, scale=0.2, causal=causal)
        for variant in variants_of(batch):
            matches(cukern.varlen_attention(*batch.on_gpu(), scale=0.2, causal=causal, variant=variant), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_the_kernels(options: dict[str, Any], dtype: str, rng: np.random.Generator) -> None:
    for dim, heads, kv_heads in ((64, 8, 1), (128, 4, 2), (256, 2, 1)):
        options = with_sinks(options, heads, rng, dtype)
        given = {name: on_gpu(x) if name == "sinks" else x for name, x in options.items()}
        batch = draw(
            rng, [70, 1, 0, 200, 3], dim, dtype, key_lengths=[300, 150, 9, 200, 2], heads=heads, kv_heads=kv_heads
        )
        want, want_lse = twin.varlen_attention(*batch, **options, return_lse=True)
        for variant in variants_of(batch):
            out, lse = Buffer(want.shape, dtype), Buffer(want_lse.shape, "float32")
            cukern.varlen_attention(
                *batch.on_gpu(), **given, variant=variant, return_lse=True, out=(out.array, lse.array)
            )
            matches(out.numpy(), want)
            assert_matches("varlen_attention.lse", lse.numpy(), want_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, sanitized(24), sanitized(64), 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_paged_kernels(page_size: int, dtype: str, rng: np.random.Generator) -> None:
    for dim, options in ((64, {"causal": True}), (128, {"window": (40, 0)}), (256, {"softcap": 9.0, "causal": True})):
        batch = draw(rng, [70, 1, 0, 3], dim, dtype, key_lengths=[300, 150, 9, 2], heads=4, kv_heads=2)
        want = twin.varlen_attention(*batch, **options)
        k, v, table, used = (on_gpu(x) for x in paged(batch, page_size, rng, options.get("window", (-1, 0))[0]))
        q, sums_of_q = on_gpu(batch.q), on_gpu(batch.cu_seqlens_q)
        for variant in variants_of(batch):
            out = Buffer(want.shape, dtype)
            cukern.varlen_attention(
                q, k, v, sums_of_q, block_table=table, seqused_k=used, **options, variant=variant, out=out.array
            )
            matches(out.numpy(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_chunk_has_the_bits_of_the_whole(dim: int, rng: np.random.Generator) -> None:
    """The last queries of a sequence, over the cache of all its keys, whatever is in the same call."""
    batch = draw(rng, [700], dim, "bfloat16", heads=4, kv_heads=1, left_over=0)
    k, v, table, used = (on_gpu(x) for x in paged(batch, 16, rng))
    for variant in [x for x in variants_of(batch) if x != "fma"]:
        whole = to_numpy(cukern.varlen_attention(*batch.on_gpu(), causal=True, variant=variant))
        for chunk in (1, 2, 65, 300):
            q = on_gpu(np.concatenate([batch.q[:5], batch.q[-chunk:]]))
            got = cukern.varlen_attention(
                q, k, v, on_gpu(sums([5, chunk])), block_table=table.repeat(2, 0), seqused_k=used.repeat(2),
                causal=True, variant=variant,
            )  # fmt: skip
            same_bits(to_numpy(got)[5:], whole[-chunk:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 24, 40, sanitized(77), 96, sanitized(128), 136, sanitized(256)])
def test_heads_of_any_size(dim: int, dtype: str, rng: np.random.Generator) -> None:
    batch = draw(rng, [70, 3], dim, dtype)
    want = twin.varlen_attention(*batch)
    for variant in variants_of(batch):
        matches(cukern.varlen_attention(*batch.on_gpu(), variant=variant), want)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_fused_product_and_rows_off_alignment(dtype: str, rng: np.random.Generator) -> None:
    batch = draw(rng, [40, 0, 90], 64, dtype)
    want = twin.varlen_attention(*batch)
    matches(cukern.varlen_attention(*batch.on_gpu(skip=1)), want)
    q, k, v = (cupy.asarray(np.stack(batch[:3], axis=1))[:, i] for i in range(3))
    lengths = cupy.asarray(batch.cu_seqlens_q)
    matches(cukern.varlen_attention(q, k, v, lengths), want)
    by_head = cupy.asarray(np.ascontiguousarray(batch.q.swapaxes(0, 1))).swapaxes(0, 1)
    matches(cukern.varlen_attention(by_head, k, v, lengths), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(dtype: str, rng: np.random.Generator) -> None:
    lengths = [9, 66, 0, 20, 300]
    batch = draw(rng, lengths, 64, dtype)
    for variant in variants_of(batch):
        together = to_numpy(cukern.varlen_attention(*batch.on_gpu(), variant=variant))
        for first, length in zip(batch.cu_seqlens_q, lengths, strict=False):
            rows = slice(first, first + length)
            alone = Batch(*(x[rows].copy() for x in batch[:3]), sums([length]), None)
            same_bits(cukern.varlen_attention(*alone.on_gpu(), variant=variant), together[rows])


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("variant", choose.VARIANTS)
def test_wrong_sums_of_lengths_stay_within_the_arrays(variant: str, rng: np.random.Generator) -> None:
    if variant == "wgmma" and not is_hopper():
        pytest.skip("needs sm_90a")
    batch = draw(rng, [90], 64, "float16", left_over=0)
    for wrong in ([0, 50, 20, 90], [5, -3, 1000, 2], [0, 2**31 - 1, -(2**31), 7], [9, 9, 9, 9]):
        out = Buffer(batch.q.shape, "float16")
        lengths = cupy.asarray(np.array(wrong, np.int32))
        given = batch.on_gpu()[:3]
        cukern.varlen_attention(*given, lengths, causal=True, out=out.array, variant=variant)
        cukern.varlen_attention(*given, lengths, lengths[::-1].copy(), out=out.array, variant=variant)
        out.numpy()


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_of_other_sequences_is_seen(dim: int, dtype: str, rng: np.random.Generator) -> None:
    """Every other sequence is NaN, before, between and behind the others, also where it shares their tiles."""
    lengths = [5, 70, 3, 1, 130, 64, 9, 128, 7, 200, 40]
    batch = draw(rng, lengths, dim, dtype)
    bad = np.zeros(len(batch.q), bool)
    for s in range(0, len(lengths), 2):
        bad[batch.cu_seqlens_q[s] : batch.cu_seqlens_q[s + 1]] = True
    bad[batch.cu_seqlens_q[-1] :] = True
    for x in batch[:3]:
        x[bad] = np.nan
    for causal in (False, True):
        want = twin.varlen_attention(*batch, causal=causal)
        assert np.isfinite(want[~bad].astype(np.float32)).all()
        for variant in variants_of(batch):
            got = to_numpy(cukern.varlen_attention(*batch.on_gpu(), causal=causal, variant=variant))
            matches(got[~bad], want[~bad])
            assert np.isnan(got[bad][: -batch.q.shape[0] + batch.cu_seqlens_q[-1]].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_that_rise_and_fall(dtype: str, dim: int, rising: bool, rng: np.random.Generator) -> None:
    """The largest score of a row is in any tile; some rows have scores of -inf alone, in a tile or in all.

    Where scores rise, "wgmma" raises the references of rows in several tiles.
    """
    batch = draw(rng, [700, 300], dim, dtype, heads=1, left_over=0)
    if dim == 192:  # as DeepSeek-V3, not absorbed
        batch = batch._replace(v=np.ascontiguousarray(batch.v[..., :128]))
    places = np.arange(700) if rising else rng.permutation(700)
    batch.k[:700, 0] *= np.linspace(0.1, 8 if rising else 4, 700)[places, None].astype(batch.k.dtype)
    batch.k[700:] = -np.inf
    batch.q[700:] = abs(batch.q[700:]) + batch.q.dtype.type(1)
    batch.k[:128, :, 0], batch.q[:700, :, 0] = -np.inf, abs(batch.q[:700, :, 0]) + batch.q.dtype.type(1)
    want = twin.varlen_attention(*batch)
    assert np.isfinite(want[:700].astype(np.float32)).all() and not want[700:].any()
    for variant in variants_of(batch):
        matches(cukern.varlen_attention(*batch.on_gpu(), variant=variant), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_many_tiles_of_few_keys(dim: int, rng: np.random.Generator) -> None:
    """Warpgroups of "wgmma" that are a tile of queries apart do not take each other's turns, which would hang."""
    batch = draw(rng, [2048] * 4, dim, "bfloat16", heads=16, kv_heads=2, left_over=0).on_gpu()
    options: dict[str, Any] = {"causal": True, "window": (127, 0)}
    want = cukern.varlen_attention(*batch, variant="mma", **options)
    for _ in range(20):
        got = cukern.varlen_attention(*batch, variant="wgmma", **options)
    matches(got, to_numpy(want))


@pytest.mark.gpu
def test_a_cuda_graph_follows_the_lengths(rng: np.random.Generator) -> None:
    batch = draw(rng, [70, 30, 0], 64, "float16", left_over=0)
    tensors = [as_torch(x).cuda() for x in batch[:4]]
    out = torch.empty_like(tensors[0])
    cukern.varlen_attention(*tensors, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cukern.varlen_attention(*tensors, out=out)
    for lengths in ([100, 0, 0], [1, 64, 35], [2, 3, 4]):
        tensors[3].copy_(torch.from_numpy(sums(lengths)))
        out.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        matches(out, twin.varlen_attention(*batch[:3], sums(lengths)))


@pytest.mark.gpu
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 5000)), max_size=6), st.sampled_from([64, 128, 96, 256]),
    st.sampled_from([8, 16, 40, 64]), st.sampled_from([(1, 1), (4, 4), (6, 2), (8, 1)]), st.booleans(),
    st.sampled_from([-1, 0, 5, 130, 1000]), st.sampled_from([-1, 0, 7]), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_random_paged_batches(
    lengths: list[tuple[int, int]], dim: int, page_size: int, heads: tuple[int, int], causal: bool, left: int,
    right: int, has_sinks: bool, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    of_queries, of_keys = [n for n, _ in lengths], [m for _, m in lengths]
    batch = draw(rng, of_queries, dim, "bfloat16", key_lengths=of_keys, heads=heads[0], kv_heads=heads[1])
    options: dict[str, Any] = {"causal": causal, "window": (left, right)}
    sinks = rng.standard_normal(heads[0]).astype(np.float32) if has_sinks else None
    want, want_lse = twin.varlen_attention(*batch, **options, sinks=sinks, return_lse=True)
    k, v, table, used = (on_gpu(x) for x in paged(batch, page_size, rng, left))
    got, lse = cukern.varlen_attention(
        on_gpu(batch.q), k, v, on_gpu(batch.cu_seqlens_q), block_table=table, seqused_k=used, **options,
        sinks=None if sinks is None else on_gpu(sinks), return_lse=True,
    )  # fmt: skip
    matches(got, want)
    assert_matches("varlen_attention.lse", lse, want_lse)


@pytest.mark.gpu
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), max_size=6), st.integers(1, 140),
    st.sampled_from([(1, 1), (4, 4), (6, 2)]), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_random_shapes(
    lengths: list[tuple[int, int]], dim: int, heads: tuple[int, int], dtype: str, causal: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    of_queries, of_keys = [n for n, _ in lengths], [m for _, m in lengths]
    batch = draw(rng, of_queries, dim, dtype, key_lengths=of_keys, heads=heads[0], kv_heads=heads[1])
    got = cukern.varlen_attention(*batch.on_gpu(), causal=causal)
    matches(got, twin.varlen_attention(*batch, causal=causal))
