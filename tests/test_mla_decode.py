"""Latent attention at decode time: the twin against torch and brute force, the kernels against the twin."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from cukern.ops.mla_decode import choose as op
from cukern.reference import mla_decode as twin
from cukern.runtime import arrays, gpu, nvrtc, sources
from cukern.runtime import plan as runtime_plan
from cukern.runtime.cuda import cupy
from cukern.runtime.each import Each
from cukern.runtime.kernel import arch_of_device
from cukern.runtime.op import OPS, forget_plans
from cukern.runtime.plan import Trace, Workspace
from cukern.testing import assert_matches
from tests.buffers import POISON, Buffer, as_torch, on_gpu, same_bits, to_numpy, zeros
from tests.plans import plan_of

Array = NDArray[Any]
NAN, INF = np.nan, np.inf
OUT, LSE = "mla_decode.out", "mla_decode.lse"
DTYPES = ("bfloat16", "float16")
#: 1 - cosine similarity of all results of a call, as FlashMLA's own tests bound it.
COSINE = 5e-6
#: Blocks of a part up to which the plan must be the twin's.
MOST_BLOCKS = 2**30 - 2**10
#: Entries of block tables that may not be read.
JUNK = (2147480000, -1, -2147480000, 2**31 - 1)


class Case(NamedTuple):
    """Arguments of `flash_mla_with_kvcache`; slots without a token are NaN."""

    q: Any
    k_cache: Any
    block_table: Any
    cache_seqlens: Any
    head_dim_v: int
    options: dict[str, Any]  # causal, is_fp8_kvcache, indices, attn_sink, softmax_scale
    latents: list[Array]  # of each sequence, [tokens, kv_heads, head_dim], float64

    def run(self, metadata: Any = None, num_splits: Any = None, **more: Any) -> Any:
        inputs = self.q, self.k_cache, self.block_table, self.cache_seqlens, self.head_dim_v
        return cukern.flash_mla_with_kvcache(*inputs, metadata, num_splits, **{**self.options, **more})

    def twin(self) -> tuple[Array, Array]:
        inputs = self.q, self.k_cache, self.block_table, self.cache_seqlens, self.head_dim_v
        return twin.flash_mla_with_kvcache(*inputs, None, None, **self.options)

    def wanted(self, variant: str = "auto") -> tuple[Array, Array]:
        """The twin's results, of rounded values where the variant rounds those of an 8-bit cache."""
        if not self.options.get("is_fp8_kvcache") or not rounds(self, variant):
            return self.twin()

        def rounded(cache: Array | None) -> Array | None:
            if cache is None:
                return None
            unpacked = twin.dequantize_paged if is_paged(self) else twin.dequantize
            with np.errstate(over="ignore", invalid="ignore"):
                # Float32 first, as the products of numbers and scales are there: a product that it rounds to half of a
                # unit in the last place of `q.dtype` would be rounded otherwise from float64.
                return unpacked(cache, self.q.dtype).astype(np.float32).astype(self.q.dtype)

        values, extra = rounded(self.k_cache), rounded(self.options.get("extra_k_cache"))
        return self._replace(k_cache=values).with_options(is_fp8_kvcache=False, extra_k_cache=extra).twin()

    def with_options(self, **more: Any) -> Case:
        return self._replace(options={**self.options, **more})

    @property
    def plan_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `get_mla_metadata` takes to plan for it."""
        _, query_tokens, heads, _ = self.q.shape
        kv_heads, indices = self.k_cache.shape[2], self.options.get("indices")
        sparse = {} if indices is None else {"num_heads_q": heads, "topk": indices.shape[2]}
        if self.options.get("extra_indices_in_kvcache") is not None:
            sparse["extra_topk"] = self.options["extra_indices_in_kvcache"].shape[2]
        names = "topk_length", "extra_topk_length"
        sparse |= {name: self.options[name] for name in names if self.options.get(name) is not None}
        return (self.cache_seqlens, query_tokens * heads // kv_heads, kv_heads), sparse


def is_paged(x: Case) -> bool:
    """Whether the pages of its 8-bit cache have two parts."""
    return bool(x.options.get("is_fp8_kvcache")) and x.q.shape[3] == 512


def rounds(x: Case, variant: str) -> bool:
    """Whether this variant rounds the values of an 8-bit cache: "wgmma" does, which "auto" is from 33 rows on."""
    if is_paged(x):
        return True
    rows = x.q.shape[2] // x.k_cache.shape[2] * (1 if x.options.get("indices") is not None else x.q.shape[1])
    return variant == "wgmma" or (variant == "auto" and rows > 32 and arch_of_device(0) == "90a")


def pack(latents: Array) -> Array:
    """Slots [..., 656] of an 8-bit cache from [..., 576]: 4 tiles of 128 by their largest, the rest in bfloat16."""
    tiles = latents[..., :512].astype(np.float32).reshape(*latents.shape[:-1], 4, 128)
    scales = (np.abs(tiles).max(-1) / 448).astype(np.float32)
    numbers = (tiles / scales[..., None]).astype(ml_dtypes.float8_e4m3fn).reshape(*latents.shape[:-1], 512)
    rotary = np.ascontiguousarray(latents[..., 512:].astype(ml_dtypes.bfloat16))
    return np.concatenate([numbers.view(np.uint8), scales.view(np.uint8), rotary.view(np.uint8)], -1)


def unpack(slots: Array, dtype: Any) -> Array:
    """What `pack` kept, as torch has it, in float64; the rotary part as numbers of `dtype`."""
    flat = torch.from_numpy(np.ascontiguousarray(slots).reshape(-1, 656))
    kind = getattr(torch, np.dtype(dtype).name)
    numbers = flat[:, :512].clone().view(torch.float8_e4m3fn).double().view(-1, 4, 128)
    scales = flat[:, 512:528].clone().view(torch.float32).double()
    rotary = flat[:, 528:].clone().view(torch.bfloat16).to(kind)
    whole = torch.cat([(numbers * scales[:, :, None]).flatten(1), rotary.double()], 1)
    return whole.numpy().reshape(*slots.shape[:-1], 576)


def paged(
    rng: np.random.Generator,
    lengths: list[int],
    heads: int,
    kv_heads: int = 1,
    query_tokens: int = 1,
    page_size: int = 64,
    dtype: str = "bfloat16",
    head_dim: int = 576,
    head_dim_v: int = 512,
    fp8: bool = False,
    topk: int | None = None,
    sharpness: float = 10.0,
    **options: Any,
) -> Case:
    """Random arguments: latents of magnitude 0.1, as the tolerances take for granted; what may not be read is NaN.

    Scores are of magnitude sharpness / 10. With `topk` also indices, of slots of all sequences, some of them -1.
    """
    kind = arrays.numpy_dtype(dtype)
    counts = [max(length, 0) for length in lengths]
    needed = [ceil(count / page_size) for count in counts]
    dense = np.clip(rng.standard_normal((sum(counts), kv_heads, head_dim), np.float32) / 10, -1, 1)
    stored = pack(dense) if fp8 else dense.astype(kind)
    ids = rng.permutation(sum(needed) + 3).astype(np.int32)
    table = np.resize(np.array(JUNK, np.int32), (len(lengths), max(needed, default=0) + 2))
    poison = np.uint8(0xFF) if fp8 else NAN
    cache = np.full((len(ids) * page_size, *stored.shape[1:]), poison, stored.dtype)
    taken = start = 0
    written = []
    for row, count, pages in zip(table, counts, needed, strict=True):
        own = ids[taken : taken + pages]
        slots = (own[:, None].astype(np.int64) * page_size + np.arange(page_size)).ravel()[:count]
        cache[slots] = stored[start : start + count]
        row[:pages] = own
        written.append(slots)
        taken, start = taken + pages, start + count
    if fp8:
        options["is_fp8_kvcache"] = True
    if topk is not None:
        filled = np.concatenate([*written, [-1]])
        indices = rng.choice(filled, (len(lengths), query_tokens, topk)).astype(np.int32)
        indices[rng.random(indices.shape) < 0.1] = rng.choice([-1, -(2**31), -7])
        options["indices"] = indices
    q = (sharpness * rng.standard_normal((len(lengths), query_tokens, heads, head_dim), np.float32)).astype(kind)
    latents = unpack(stored, kind) if fp8 else stored.astype(np.float64)
    return Case(
        q,
        cache.reshape(len(ids), page_size, *stored.shape[1:]),
        table,
        np.array(lengths, np.int32),
        head_dim_v,
        options,
        np.split(latents, np.cumsum(counts)[:-1]),
    )


def assert_close(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    """Results and lse within the tolerances, the results also by their cosine."""
    assert_matches(OUT, got[0], want[0])
    assert_matches(LSE, got[1], want[1])
    x, y = (np.nan_to_num(a.astype(np.float64)) for a in (got[0], want[0]))
    difference = 1 - 2 * (x * y).sum() / max((x * x + y * y).sum(), 1e-12)
    if y.any():
        assert difference < COSINE, f"1 - cosine is {difference:.2e}"


# --- the twin against torch -----------------------------------------------------------------------------


def by_torch(q: Array, keys: Array, head_dim_v: int, scale: float, seen: Array, sinks: Array | None) -> list[Array]:
    """Attention in float64: q [s, h, d], keys [tokens, h_k, d], seen [s, tokens]; out [s, h, d_v], lse [h, s]."""
    ratio = q.shape[1] // keys.shape[1]
    k = torch.from_numpy(keys).transpose(0, 1).repeat_interleave(ratio, 0)
    scores = torch.from_numpy(q.astype(np.float64)).transpose(0, 1) @ k.mT * scale
    scores = scores.masked_fill(~torch.from_numpy(seen), -INF)
    lse = torch.logsumexp(scores, 2)
    # A sink is a token like any other, whose value is zero.
    sink = torch.full((q.shape[1],), -INF) if sinks is None else torch.from_numpy(sinks)
    joined = torch.cat([sink.double()[:, None, None].expand(-1, q.shape[0], 1), scores], 2)
    values = torch.nn.functional.pad(k[:, :, :head_dim_v], (0, 0, 1, 0))
    out = torch.softmax(joined, 2).nan_to_num(0) @ values
    empty = lse == -INF
    return [out.masked_fill(empty[..., None], 0).transpose(0, 1).numpy(), lse.masked_fill(empty, INF).numpy()]


def expected(x: Case) -> tuple[Array, Array]:
    """What torch makes of it."""
    batch, query_tokens, heads, head_dim = x.q.shape
    out = np.zeros((batch, query_tokens, heads, x.head_dim_v), x.q.dtype)
    lse = np.full((batch, heads, query_tokens), NAN, np.float32)
    scale = x.options.get("softmax_scale") or head_dim**-0.5
    sinks, indices = x.options.get("attn_sink"), x.options.get("indices")
    flat = x.k_cache.reshape(-1, *x.k_cache.shape[2:])
    for s in range(batch):
        if indices is None:
            tokens = len(x.latents[s])
            seen = np.ones((query_tokens, tokens), bool)
            if x.options.get("causal"):
                seen = np.tril(seen, tokens - query_tokens)
            out[s], lse[s] = by_torch(x.q[s], x.latents[s], x.head_dim_v, scale, seen, sinks)
            continue
        for i in range(query_tokens):
            slots = flat[indices[s, i][indices[s, i] >= 0]]
            keys = unpack(slots, x.q.dtype) if x.options.get("is_fp8_kvcache") else slots.astype(np.float64)
            seen = np.ones((1, len(keys)), bool)
            out[s, i : i + 1], lse[s, :, i : i + 1] = by_torch(
                x.q[s, i : i + 1], keys, x.head_dim_v, scale, seen, sinks
            )
    return out, lse


#: Lengths, then what else differs from 6 heads of bfloat16 over pages of 64; and why.
TORCH_TOO: dict[str, tuple[list[int], dict[str, Any]]] = {
    "plain": ([37, 0, 1, 64, 130, -4], {}),
    "several kv heads": ([37, 0, 65], {"kv_heads": 3}),
    "float16, pages of 16": ([37, 0, 16, 17], {"dtype": "float16", "page_size": 16}),
    "two tokens that see all": ([37, 0, 1], {"query_tokens": 2}),
    "causal": ([37, 0, 1, 2, 3, 64], {"query_tokens": 3, "causal": True}),
    "causal with one token": ([37, 0, 1], {"causal": True}),
    "other dimensions": ([37, 0, 1], {"head_dim": 48, "head_dim_v": 32}),
    "values that are whole keys": ([37, 0, 1], {"head_dim": 64, "head_dim_v": 64}),
    "scale": ([37, 5], {"softmax_scale": 0.2}),
    "sharp": ([200, 5], {"sharpness": 100.0}),
    "sinks": ([37, 0, 1], {"attn_sink": np.array([-3, 0, 1, 5, -INF, INF], np.float32)}),
    "sinks, causal": ([37, 0, 1], {"attn_sink": np.arange(6, dtype=np.float32), "query_tokens": 2, "causal": True}),
    "fp8": ([37, 0, 1], {"fp8": True}),
    "fp8, causal, float16": ([37, 0, 1], {"fp8": True, "query_tokens": 2, "causal": True, "dtype": "float16"}),
    "indices": ([37, 0, 100], {"topk": 20}),
    "indices, several tokens and kv heads": ([37, 50], {"topk": 70, "query_tokens": 3, "kv_heads": 2}),
    "indices, fp8, sinks": ([37, 50], {"topk": 9, "fp8": True, "attn_sink": np.arange(6, dtype=np.float32)}),
    "no indices at all": ([37, 50], {"topk": 0}),
}


@pytest.mark.parametrize(("lengths", "changes"), TORCH_TOO.values(), ids=TORCH_TOO)
def test_the_twin_is_torchs_attention(lengths: list[int], changes: dict[str, Any], rng: np.random.Generator) -> None:
    x = paged(rng, lengths, 6, **changes)
    got, want = x.run(), expected(x)
    assert got[0].dtype == x.q.dtype and got[1].dtype == np.float32
    # Both round once.
    assert np.abs(got[0].astype(np.float64) - want[0].astype(np.float64)).max() <= 2**-9
    assert_close(got, want)
    assert (got[1] == INF).any() == (want[1] == INF).any()
    # How the work is cut changes nothing.
    args, sparse = x.plan_arguments
    for ours, theirs in zip(x.run(*cukern.get_mla_metadata(*args, **sparse)), got, strict=True):
        same_bits(ours, theirs)


@pytest.mark.parametrize("kind", ["uint8", "int8", "float8_e4m3fn", "tensor", "float8 tensor"])
def test_a_cache_of_bytes(kind: str, rng: np.random.Generator) -> None:
    x = paged(rng, [19, 3, 0], 4, fp8=True)
    # All codes occur.
    first = x.block_table[0, 0]
    x.k_cache[first, 0, 0, :256] = np.arange(256, dtype=np.uint8)
    x.k_cache[first, 0, 0, [0x7F, 0xFF]] = 0
    want = x.twin()
    x.latents[0][0] = unpack(x.k_cache[first, 0], x.q.dtype)
    assert_close(want, expected(x))
    if "tensor" in kind:
        given = [as_torch(a) for a in x[:4]]
        if "float8" in kind:
            given[1] = given[1].view(torch.float8_e4m3fn)
        x = Case(*given, *x[4:])
    else:
        x = x._replace(k_cache=x.k_cache.view(arrays.numpy_dtype(kind)))
    for ours, theirs in zip(x.run(), want, strict=True):
        assert_matches(OUT if theirs is want[0] else LSE, ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_concat_and_cache_mla_writes(dtype: str, rng: np.random.Generator) -> None:
    x = paged(rng, [100], 3, dtype=dtype)
    slots = x.block_table[0, np.arange(100) // 64].astype(np.int64) * 64 + np.arange(100) % 64
    tokens = x.k_cache.reshape(-1, 576)[slots]
    cache = np.full((len(x.k_cache), 64, 656), 0xFF, np.uint8)
    cukern.concat_and_cache_mla(tokens[:, :512], tokens[:, 512:], cache, slots, "fp8_ds_mla", None)
    want = x._replace(k_cache=x.k_cache.astype(np.float64))
    stored = twin.dequantize(cache.reshape(-1, 656)[slots], tokens.dtype)
    assert np.abs(stored - tokens.astype(np.float64)).max() < 2**-5
    want.k_cache.reshape(-1, 576)[slots] = stored
    for ours, theirs in zip(x._replace(k_cache=cache[:, :, None]).run(is_fp8_kvcache=True), want.twin(), strict=True):
        same_bits(ours, theirs)


def test_a_slot_by_hand() -> None:
    slot = np.zeros(656, np.uint8)
    slot[[0, 127, 128, 511]] = 0x38, 0xB8, 0x40, 0x01  # 1, -1, 2, 2**-9
    slot[512:528] = np.array([1, 0.5, 3, 4], np.float32).view(np.uint8)
    slot[528:532] = 0x80, 0x3F, 0x00, 0xC0  # 1, -2
    got = twin.dequantize(slot, np.float32)
    assert got.shape == (576,) and np.count_nonzero(got) == 6
    assert got[[0, 127, 128, 511, 512, 513]].tolist() == [1, -1, 1, 4 * 2**-9, 1, -2]


# --- how work is dealt out ------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What `get_mla_metadata` gives."""

    metadata: Array
    num_splits: Array

    def visits(self, blocks: list[int]) -> list[list[tuple[int, int, int]]]:
        """(sequence, first block, end) that each part does, as the kernels read them."""
        of_parts = []
        for first, first_block, last, last_end, _, *rest in self.metadata.tolist():
            assert rest == [0, 0, 0]
            if first == len(blocks):
                of_parts.append([])
                continue
            of_parts.append(
                [
                    (i, first_block if i == first else 0, last_end if i == last else blocks[i])
                    for i in range(first, last + 1)
                ]
            )
        return of_parts


def block_by_block(blocks: list[int], load: int) -> list[list[list[int]]]:
    """The greedy filling as it is told, a block at a time: [sequence, first block, end] of each part."""
    parts: list[list[list[int]]] = [[]]
    room = load
    for i, count in enumerate(blocks):
        if room < twin.FIXED + min(count, 1):
            parts.append([])
            room = load
        parts[-1].append([i, 0, 0])
        room -= twin.FIXED
        for block in range(count):
            if not room:
                parts.append([[i, block, block]])
                room = load - twin.FIXED
            parts[-1][-1][2] = block + 1
            room -= 1
    return parts if blocks else []


def check_plan(plan: Plan, blocks: list[int], parts: int) -> None:
    visits = plan.visits(blocks)
    assert len(visits) == parts and plan.num_splits[0] == 0
    # Every block of every sequence once, in order, and every sequence in as many visits as it says.
    all_visits = [visit for part in visits for visit in part]
    splits = [0] * len(blocks)
    expected_visits = iter(all_visits)
    for i, count in enumerate(blocks):
        done = -1
        while done != count:
            sequence, first, end = next(expected_visits)
            assert sequence == i and first == max(done, 0) and (end > first or end == count == 0)
            splits[i] += 1
            done = end
    assert next(expected_visits, None) is None
    assert np.diff(plan.num_splits).tolist() == splits
    for row, part in zip(plan.metadata.tolist(), visits, strict=True):
        if part:
            before = [v for v in all_visits[: all_visits.index(part[0])] if v[0] == part[0][0]]
            assert row[4] == len(before)
    # No part above the load, and none is possible with a smaller one.
    loads = [sum(twin.FIXED + end - first for _, first, end in part) for part in visits]
    total = sum(loads)
    for load in range(twin.FIXED + 1, max(loads, default=0) + 2 * twin.FIXED + 2):
        dealt = block_by_block(blocks, load)
        if len(dealt) <= parts:
            break
    assert max(loads, default=0) <= load
    assert load <= max(-(-total // parts), 1) + 2 * twin.FIXED
    assert [[list(visit) for visit in part] for part in visits] == dealt + [[]] * (parts - len(dealt))


@settings(max_examples=200)
@example([1, 4, 11, 1, 11, 0, 11, 11, 5, 1, 11, 11], 9)  # the total divided by the parts is load enough
@given(st.lists(st.integers(0, 60) | st.integers(0, 3), max_size=40), st.integers(1, 40))
def test_every_block_is_dealt_out_once(blocks: list[int], parts: int) -> None:
    check_plan(Plan(*twin.plan(blocks, parts)), blocks, parts)


@pytest.mark.parametrize(
    ("blocks", "parts", "rows", "splits"),
    [
        ([], 2, [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], [0]),
        ([0], 2, [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], [0, 1]),
        ([0, 0, 0], 2, [[0, 0, 1, 0, 0], [2, 0, 2, 0, 0]], [0, 1, 2, 3]),
        # 10 + 5 + 5 for two visits: 10 each.
        ([10], 2, [[0, 0, 0, 5, 0], [0, 5, 0, 10, 1]], [0, 2]),
        ([128], 4, [[0, 0, 0, 32, 0], [0, 32, 0, 64, 1], [0, 64, 0, 96, 2], [0, 96, 0, 128, 3]], [0, 4]),
        # A load of 20: 5 + 5 and 5 + 5 of the second sequence; then 5 + 6 of it and 5 + 3. With 19 one block is left.
        ([5, 11, 3], 2, [[0, 0, 1, 5, 0], [1, 5, 2, 3, 1]], [0, 1, 3, 4]),
        ([6, 6, 6], 3, [[0, 0, 0, 6, 0], [1, 0, 1, 6, 0], [2, 0, 2, 6, 0]], [0, 1, 2, 3]),
        ([1, 0], 4, [[0, 0, 0, 1, 0], [1, 0, 1, 0, 0], [2, 0, 0, 0, 0], [2, 0, 0, 0, 0]], [0, 1, 2]),
    ],
)
def test_plans_by_hand(blocks: list[int], parts: int, rows: list[list[int]], splits: list[int]) -> None:
    metadata, num_splits = twin.plan(blocks, parts)
    assert metadata[:, :5].tolist() == rows and num_splits.tolist() == splits


def test_the_plan_of_lengths() -> None:
    lengths = np.array([64 * 40, 0, -9, 1, 64, 65, 4096], np.int32)
    blocks = [40, 0, 0, 1, 1, 2, 64]
    for args, parts in (((128, 1), 66), ((16, 1), 132), ((1, 2), 66), ((129, 1), 44), ((64 * 133, 1), 1), ((0, 3), 44)):
        plan = Plan(*cukern.get_mla_metadata(lengths, *args))
        assert plan.metadata.dtype == plan.num_splits.dtype == np.int32
        assert plan.metadata.shape == (parts, 8) and plan.num_splits.shape == (8,)
        check_plan(plan, blocks, parts)
    # Of 3 query tokens of 32 heads, 16 for each kv head: 21 sequences.
    plan = Plan(*cukern.get_mla_metadata(lengths, 48, 2, num_heads_q=32, topk=130))
    assert plan.metadata.shape == (66, 8)
    check_plan(plan, [3] * 21, 66)
    # Rows are those of one query token.
    plan = Plan(*cukern.get_mla_metadata(lengths, 384, 1, num_heads_q=128, topk=1))
    assert plan.metadata.shape == (66, 8) and plan.num_splits.shape == (22,)
    # Heads that say nothing new.
    for ours, theirs in zip(
        cukern.get_mla_metadata(lengths, 128, 1, num_heads_q=64), cukern.get_mla_metadata(lengths, 128, 1), strict=True
    ):
        same_bits(ours, theirs)
    plan = Plan(*cukern.get_mla_metadata(lengths[:0], 16, 1))
    assert (plan.metadata == 0).all() and plan.num_splits.tolist() == [0]


def test_plans_of_tensors() -> None:
    lengths = np.array([64 * 40, 0, 1], np.int32)
    want = cukern.get_mla_metadata(lengths, 16, 1)
    given = torch.from_numpy(lengths)
    out = torch.full((132, 8), -7, dtype=torch.int32), torch.full((4,), -7, dtype=torch.int32)
    assert cukern.get_mla_metadata(given, 16, 1, out=out) is out
    for got in (out, cukern.get_mla_metadata(given, 16, 1)):
        for ours, theirs in zip(got, want, strict=True):
            assert type(ours) is torch.Tensor
            same_bits(ours.numpy(), theirs)


# --- arrays in host memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("topk", [None, 10], ids=["", "indices"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_tensors_go_through_the_twin(dtype: str, topk: int | None, fp8: bool, rng: np.random.Generator) -> None:
    x = paged(rng, [20, 0, 3], 4, 2, dtype=dtype, fp8=fp8, topk=topk, attn_sink=np.arange(4, dtype=np.float32))
    want = x.twin()
    options = {key: as_torch(value) if arrays.is_array(value) else value for key, value in x.options.items()}
    given = Case(*map(as_torch, x[:4]), x.head_dim_v, options, x.latents)
    if topk is not None:
        given = given._replace(block_table=None, cache_seqlens=None)
    got = given.run()
    assert all(type(a) is torch.Tensor for a in got)
    assert_close(tuple(a.float().numpy().astype(b.dtype) for a, b in zip(got, want, strict=True)), want)
    out, lse = torch.full_like(got[0], NAN), torch.full_like(got[1], NAN)
    returned = given.run(out=out)
    assert returned[0] is out and torch.equal(out, got[0]) and torch.equal(returned[1], got[1])
    returned = given.run(out=(out.fill_(NAN), lse))
    assert returned[0] is out and returned[1] is lse
    assert torch.equal(out, got[0]) and torch.equal(lse, got[1])


# --- bad arguments --------------------------------------------------------------------------------------


def _int32(*shape: int) -> Array:
    return zeros(*shape, dtype=np.int32)


def _half(*shape: int) -> Array:
    return zeros(*shape, dtype=np.float16)


def _good_attention() -> dict[str, Any]:
    return dict(  # noqa: C408
        q=_half(2, 3, 4, 64), k_cache=_half(5, 16, 2, 64), block_table=_int32(2, 3), cache_seqlens=_int32(2),
        head_dim_v=32, tile_scheduler_metadata=_int32(7, 8), num_splits=_int32(3), attn_sink=zeros(4),
        out=(np.full((2, 3, 4, 32), NAN, np.float16), np.full((2, 4, 3), NAN, np.float32)),
    )  # fmt: skip


def _good_metadata() -> dict[str, Any]:
    return dict(  # noqa: C408
        cache_seqlens=_int32(2), num_heads_per_head_k=6, num_heads_k=2, num_heads_q=4, topk=100,
        out=(np.full((66, 8), -7, np.int32), np.full(7, -7, np.int32)),
    )  # fmt: skip


GOOD = {"flash_mla_with_kvcache": _good_attention, "get_mla_metadata": _good_metadata}


def _fp8() -> dict[str, Any]:
    return {
        "is_fp8_kvcache": True, "q": _half(2, 3, 4, 576), "k_cache": zeros(5, 16, 2, 656, dtype=np.uint8),
        "head_dim_v": 512, "out": None,
    }  # fmt: skip


def _sparse() -> dict[str, Any]:
    return {"indices": _int32(2, 3, 10), "num_splits": _int32(7), "block_table": None, "cache_seqlens": None}


def _bad_chosen() -> Iterator[Any]:
    """Calls with bad indices, lengths of these, and second caches."""
    fp8, sparse = _fp8(), _sparse()
    extra = sparse | {"extra_k_cache": _half(5, 7, 2, 64), "extra_indices_in_kvcache": _int32(2, 3, 9)}
    paged = fp8 | sparse | {"q": _half(2, 3, 4, 512), "k_cache": zeros(5, 16, 1, 584, dtype=np.uint8)}
    for changes, error, message in (
        ({**fp8, "q": _half(2, 3, 4, 512)}, ValueError, "indices must be given with is_fp8_kvcache and a head_dim of"),
        ({**paged, "k_cache": zeros(5, 16, 1, 656, dtype=np.uint8)}, ValueError,
         "k_cache must be of shape [pages, page_size, kv_heads, slot_bytes] = [5, 16, 1, 584], got [5, 16, 1, 656]"),
        ({**paged, "k_cache": zeros(5, 16, 2, 584, dtype=np.uint8)}, ValueError,
         "k_cache must be of one kv head with slots of 584 bytes, got 2"),
        ({**paged, "k_cache": zeros(5, 16, 1, 600, dtype=np.uint8)[..., :584]}, ValueError,
         "k_cache must be contiguous within a page, got strides (9600, 600, 600, 1) (in elements)"),
        ({"topk_length": _int32(2)}, ValueError, "indices must be given with topk_length, got None"),
        ({"extra_k_cache": _half(5, 16, 2, 64)}, ValueError, "indices must be given with extra_k_cache, got None"),
        ({**sparse, "topk_length": _int32(3)}, ValueError, "topk_length must be of shape [batch] = [2], got [3]"),
        ({**sparse, "topk_length": zeros(2)}, TypeError, "topk_length must be int32, got float32"),
        ({**sparse, "topk_length": 3}, TypeError, "topk_length must be a NumPy array like q, got builtins.int"),
        ({**sparse, "extra_topk_length": _int32(2)}, ValueError, "extra_k_cache must be given with extra_topk_length"),
        ({**sparse, "extra_indices_in_kvcache": _int32(2, 3, 1)}, ValueError, "extra_k_cache must be given with extra"),
        ({**sparse, "extra_k_cache": _half(5, 7, 2, 64)}, TypeError, "extra_indices_in_kvcache must be given with"),
        ({**extra, "extra_k_cache": zeros(5, 7, 2, 64)}, TypeError, "extra_k_cache must be float16, got float32"),
        ({**extra, "extra_k_cache": _half(5, 7, 2, 80)}, ValueError, "extra_k_cache must be of shape [pages, page"),
        ({**extra, "extra_k_cache": _half(5, 7, 1, 64)}, ValueError,
         "extra_k_cache must be of 2 kv heads like k_cache, got 1"),
        ({**extra, "extra_indices_in_kvcache": _int32(2, 1, 9)}, ValueError,
         "extra_indices_in_kvcache must be of shape [batch, query_tokens, topk] = [2, 3, 9], got [2, 1, 9]"),
        ({**extra, "extra_topk_length": _int32(1)}, ValueError, "extra_topk_length must be of shape [batch] = [2]"),
    ):  # fmt: skip
        yield pytest.param("flash_mla_with_kvcache", changes, error, message, id=message[:60])


def _bad_calls() -> Iterator[Any]:
    fp8, sparse = _fp8(), _sparse()
    out, lse = _good_attention()["out"]
    kind = "k_cache must be of shape [pages, page_size, kv_heads, head_dim]"
    for changes, error, message in (
        ({"q": [1.0]}, TypeError, "q must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
        ({"q": zeros(2, 3, 4, 64)}, TypeError, "q must be bfloat16 or float16, got float32"),
        ({"q": _half(2, 4, 64)}, ValueError, "q must be of shape [batch, query_tokens, heads, head_dim], got [2, 4,"),
        ({"q": _half(2, 3, 4, 24)}, ValueError, "q must be of a head_dim that is a multiple of 16 in [16, 576], got"),
        ({"q": _half(2, 3, 4, 0)}, ValueError, "q must be of a head_dim that is a multiple of 16 in [16, 576], got 0"),
        ({"q": _half(2, 3, 4, 592)}, ValueError, "q must be of a head_dim that is a multiple of 16 in [16, 576], got"),
        ({"q": _half(2, 3, 4, 128)[..., ::2]}, ValueError,
         "q must be contiguous along its last dimension, got strides (1536, 512, 128, 2) (in elements)"),
        ({"q": _half(2, 3, 5, 64)}, ValueError,
         "q must be of a multiple of 2 heads (kv_heads of k_cache), and at least one, got 5"),
        ({"q": _half(2, 3, 0, 64)}, ValueError, "q must be of a multiple of 2 heads (kv_heads of k_cache), and at"),
        ({"k_cache": None}, TypeError, "k_cache must be a NumPy array like q, got builtins.NoneType"),
        ({"k_cache": torch.zeros(5, 16, 2, 64)}, TypeError, "k_cache must be a NumPy array like q, got torch.Tensor"),
        ({"k_cache": zeros(5, 16, 2, 64)}, TypeError, "k_cache must be float16, got float32"),
        ({"k_cache": _half(5, 16, 64)}, ValueError, f"{kind}, got [5, 16, 64]"),
        ({"k_cache": _half(5, 16, 2, 80)}, ValueError, f"{kind} = [5, 16, 2, 64], got [5, 16, 2, 80]"),
        ({"k_cache": _half(5, 24, 2, 64)}, ValueError,
         "k_cache must be of pages of a multiple of 16 tokens, at most 65536, without indices, got 24"),
        ({**sparse, "k_cache": _half(5, 0, 2, 64)}, ValueError, "k_cache must be of pages of at least one and at most"),
        ({"k_cache": _half(5, 0, 2, 64)}, ValueError, "k_cache must be of pages of a multiple of 16 tokens, at most"),
        ({"k_cache": _half(5, 16, 0, 64)}, ValueError, "k_cache must be of at least one and at most 65535 kv heads"),
        ({"k_cache": _half(5, 16, 2, 128)[..., ::2]}, ValueError, "k_cache must be contiguous along its last"),
        ({"is_fp8_kvcache": True}, TypeError, "k_cache must be uint8 or int8 or float8_e4m3fn, got float16"),
        ({"is_fp8_kvcache": "yes"}, ValueError, "is_fp8_kvcache must be one of False, True, got 'yes'"),
        ({**fp8, "q": _half(2, 3, 4, 64)}, ValueError, "q must be of a head_dim of 576 or 512 with is_fp8_"),
        ({**fp8, "head_dim_v": 256}, ValueError, "head_dim_v must be 512 with is_fp8_kvcache, got 256"),
        ({**fp8, "k_cache": zeros(5, 16, 2, 576, dtype=np.uint8)}, ValueError,
         "k_cache must be of shape [pages, page_size, kv_heads, slot_bytes] = [5, 16, 2, 656], got [5, 16, 2, 576]"),
        ({**fp8, "is_fp8_kvcache": False}, TypeError, "k_cache must be float16, got uint8"),
        ({"head_dim_v": 80}, ValueError, "head_dim_v must be a multiple of 16 in [16, 64] (head_dim of q), got 80"),
        ({"head_dim_v": 20}, ValueError, "head_dim_v must be a multiple of 16 in [16, 64] (head_dim of q), got 20"),
        ({"head_dim_v": 0}, ValueError, "head_dim_v must be an integer of at least 1, got 0"),
        ({"head_dim_v": 32.0}, TypeError, "head_dim_v must be an integer of at least 1, got 32.0 (float)"),
        ({"block_table": None}, TypeError, "block_table must be an array, unless there are indices, got None"),
        ({"cache_seqlens": None}, TypeError, "cache_seqlens must be an array, unless there are indices, got None"),
        ({"block_table": zeros(2, 3, dtype=np.int64)}, TypeError, "block_table must be int32, got int64"),
        ({"block_table": _int32(6)}, ValueError, "block_table must be of shape [batch, max_pages], got [6]"),
        ({"block_table": _int32(3, 3)}, ValueError, "block_table must be of shape [batch, max_pages] = [2, 3], got"),
        ({"block_table": _int32(2, 6)[:, ::2]}, ValueError, "block_table must be contiguous along its last dimension"),
        ({"cache_seqlens": zeros(2, dtype=np.int64)}, TypeError, "cache_seqlens must be int32, got int64"),
        ({"cache_seqlens": _int32(3)}, ValueError, "cache_seqlens must be of shape [batch] = [2], got [3]"),
        ({"cache_seqlens": [1, 2]}, TypeError, "cache_seqlens must be a NumPy array like q, got builtins.list"),
        ({"tile_scheduler_metadata": None}, TypeError,
         "tile_scheduler_metadata must be given, like num_splits (or neither), got None"),
        ({"num_splits": None}, TypeError, "num_splits must be given, like tile_scheduler_metadata (or neither), got"),
        ({"tile_scheduler_metadata": _int32(7, 5)}, ValueError,
         "tile_scheduler_metadata must be of shape [parts, 8] = [7, 8], got [7, 5]"),
        ({"tile_scheduler_metadata": _int32(56)}, ValueError, "tile_scheduler_metadata must be of shape [parts, 8] ="),
        ({"tile_scheduler_metadata": _int32(0, 8)}, ValueError,
         "tile_scheduler_metadata must be of 1 to 65535 parts, got 0"),
        ({"tile_scheduler_metadata": zeros(7, 8)}, TypeError, "tile_scheduler_metadata must be int32, got float32"),
        ({"tile_scheduler_metadata": _int32(7, 16)[:, ::2]}, ValueError, "tile_scheduler_metadata must be contiguous"),
        ({"num_splits": _int32(2)}, ValueError, "num_splits must be of shape [sequences + 1] = [3], got [2]"),
        ({"num_splits": zeros(3, dtype=np.int64)}, TypeError, "num_splits must be int32, got int64"),
        ({**sparse, "num_splits": _int32(3)}, ValueError, "num_splits must be of shape [sequences + 1] = [7], got [3]"),
        ({"softmax_scale": INF}, ValueError, "softmax_scale must be a finite number, got inf"),
        ({"softmax_scale": "one"}, TypeError, "softmax_scale must be a number, got 'one' (str)"),
        ({"softmax_scale": 1e31}, ValueError, "softmax_scale must be of at most 1e+30, got 1e+31"),
        ({"causal": 2}, ValueError, "causal must be one of False, True, got 2"),
        ({**sparse, "causal": True}, ValueError, "causal must be False with indices, got True"),
        ({**sparse, "indices": zeros(2, 3, 10, dtype=np.int64)}, TypeError, "indices must be int32, got int64"),
        ({**sparse, "indices": _int32(2, 10)}, ValueError,
         "indices must be of shape [batch, query_tokens, topk], got [2, 10]"),
        ({**sparse, "indices": _int32(2, 4, 10)}, ValueError,
         "indices must be of shape [batch, query_tokens, topk] = [2, 3, 10], got [2, 4, 10]"),
        ({**sparse, "indices": _int32(2, 3, 20)[..., ::2]}, ValueError, "indices must be contiguous along its last"),
        ({**sparse, "indices": [0]}, TypeError, "indices must be a NumPy array like q, got builtins.list"),
        ({"attn_sink": zeros(2)}, ValueError, "attn_sink must be of shape [heads] = [4], got [2]"),
        ({"attn_sink": _half(4)}, TypeError, "attn_sink must be float32, got float16"),
        ({"attn_sink": 1.0}, TypeError, "attn_sink must be a NumPy array like q, got builtins.float"),
        ({"out": out[..., :16]}, ValueError,
         "out must be of shape [batch, query_tokens, heads, head_dim_v] = [2, 3, 4, 32], got [2, 3, 4, 16]"),
        ({"out": zeros(2, 3, 4, 32)}, TypeError, "out must be float16, got float32"),
        ({"out": _half(2, 3, 4, 64)[..., ::2]}, ValueError, "out must be contiguous, got strides (768, 256, 64, 2)"),
        ({"out": (out,)}, ValueError, "out must be an array, or a pair (out, lse), got 1 of them"),
        ({"out": (out[:1], lse)}, ValueError, "out[0] must be of shape [batch, query_tokens, heads, head_dim_v] = [2,"),
        ({"out": (out, lse[:, :3])}, ValueError,
         "out[1] must be of shape [batch, heads, query_tokens] = [2, 4, 3], got [2, 3, 3]"),
        ({"out": (out, _half(2, 4, 3))}, TypeError, "out[1] must be float32, got float16"),
        ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'wgmma', 'mma', 'dynamic', got 'fast'"),
        ({"variant": "mma"}, ValueError, "variant must be 'auto' for arrays in host memory"),
    ):  # fmt: skip
        yield pytest.param("flash_mla_with_kvcache", changes, error, message, id=message[:60])
    for changes, error, message in (
        ({"cache_seqlens": [1]}, TypeError, "cache_seqlens must be an array (NumPy, CuPy, torch, or any with"),
        ({"cache_seqlens": zeros(2, dtype=np.int64)}, TypeError, "cache_seqlens must be int32, got int64"),
        ({"cache_seqlens": _int32(2, 2)}, ValueError, "cache_seqlens must be of shape [batch], got [2, 2]"),
        ({"cache_seqlens": _int32(4)[::2]}, ValueError, "cache_seqlens must be contiguous, got strides (2,)"),
        ({"num_heads_per_head_k": -1}, ValueError, "num_heads_per_head_k must be an integer in [0, "),
        ({"num_heads_per_head_k": 6.0}, TypeError, "num_heads_per_head_k must be an integer in [0, "),
        ({"num_heads_k": 0}, ValueError, "num_heads_k must be an integer in [1, 65535], got 0"),
        ({"num_heads_k": None}, TypeError, "num_heads_k must be an integer in [1, 65535], got None (NoneType)"),
        ({"num_heads_q": None}, ValueError, "num_heads_q must be given with topk, got None"),
        ({"num_heads_q": 3}, ValueError, "num_heads_q must be a multiple of num_heads_k (2), got 3"),
        ({"num_heads_q": 8}, ValueError,
         "num_heads_q must be a divisor of num_heads_per_head_k * num_heads_k (12), got 8"),
        ({"num_heads_q": 0}, ValueError, "num_heads_q must be an integer in [1, "),
        ({"topk": -1}, ValueError, "topk must be an integer in [0, "),
        ({"topk": 1.5}, TypeError, "topk must be an integer in [0, "),
        ({"topk": None, "topk_length": _int32(2)}, ValueError, "topk_length must be None without topk, got an array"),
        ({"topk": None, "extra_topk_length": _int32(2)}, ValueError, "extra_topk_length must be None without topk"),
        ({"topk_length": _int32(3)}, ValueError, "topk_length must be of shape [batch] = [2], got [3]"),
        ({"topk": None, "extra_topk": 5}, ValueError, "extra_topk must be 0 without topk, got 5"),
        ({"extra_topk": -1}, ValueError, "extra_topk must be an integer in [0, "),
        ({"extra_topk": 3, "extra_topk_length": zeros(2)}, TypeError, "extra_topk_length must be int32, got float32"),
        ({"out": _int32(66, 8)}, TypeError, "out must be a pair (tile_scheduler_metadata, num_splits), got ndarray"),
        ({"out": (_int32(65, 8), _int32(7))}, ValueError, "out[0] must be of shape [parts, 8] = [66, 8], got [65, 8]"),
        ({"out": (_int32(66, 8), _int32(6))}, ValueError, "out[1] must be of shape [sequences + 1] = [7], got [6]"),
        ({"out": (_int32(66, 8), zeros(7))}, TypeError, "out[1] must be int32, got float32"),
    ):  # fmt: skip
        yield pytest.param("get_mla_metadata", changes, error, message, id=message[:60])


@pytest.mark.parametrize(("name", "changes", "error", "message"), [*_bad_calls(), *_bad_chosen()])
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = GOOD[name]()
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)
    # Nothing is written before all has been checked.
    for array in arguments["out"]:
        assert (np.isnan(array) if array.dtype.kind != "i" else array == -7).all()


@pytest.mark.parametrize("name", GOOD)
def test_good_arguments_are_taken(name: str) -> None:
    arguments = GOOD[name]()
    returned = getattr(cukern, name)(**arguments)
    for ours, theirs in zip(returned, arguments["out"], strict=True):
        assert ours is theirs
        assert not (np.isnan(ours) if ours.dtype.kind != "i" else ours == -7).any()


# --- the choice of a variant ----------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes and options that a variant is chosen by; by default DeepSeek-V3's on an H200."""

    dtype: str = "bfloat16"
    variant: str = "auto"
    heads: int = 128
    query_tokens: int = 1
    kv_heads: int = 1
    dims: tuple[int, int] = (576, 512)
    is_fp8: bool = False
    topk: int = -1
    batch: int = 128
    pages: int = 1000
    page_size: int = 64
    cache_strides: tuple[int, int, int] = (64 * 576, 576, 0)
    has_plan: bool = True
    is_steep: bool = True  # softmax_scale is well above 0


H200 = gpu.of_arch("90a")


def shaped(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> Array:
    """An array of this shape without the memory for it."""
    kind = arrays.numpy_dtype(dtype)
    apart = np.cumprod((1, *shape[:0:-1]))[::-1] if strides is None else np.array(strides)
    return np.lib.stride_tricks.as_strided(np.empty(16, kind), shape, tuple(apart * kind.itemsize))


class Launches(NamedTuple):
    """What the plan of a call says."""

    trace: Trace
    returned: Any

    @property
    def attend(self) -> Any:
        return next(x for x in self.trace.steps if x.variant.instance.function.startswith("attend"))

    @property
    def combine(self) -> Any:
        return next(x for x in self.trace.steps if x.variant.instance.function == "combine_parts")

    @property
    def map(self) -> Each | None:
        """The tensor map."""
        return self.attend.fields.get("map")


def launches_of(x: Sizes, on: gpu.Gpu = H200) -> Launches:
    is_sparse, slot = x.topk >= 0, 656 if x.is_fp8 else x.dims[0]
    arguments: dict[str, Any] = {
        "q": shaped((x.batch, x.query_tokens, x.heads, x.dims[0]), x.dtype),
        "k_cache": shaped(
            (x.pages, x.page_size, x.kv_heads, slot), "uint8" if x.is_fp8 else x.dtype, (*x.cache_strides, 1)
        ),
        "block_table": None if is_sparse else _int32(x.batch, 100),
        "cache_seqlens": None if is_sparse else _int32(x.batch),
        "head_dim_v": x.dims[1],
        "tile_scheduler_metadata": None,
        "num_splits": None,
        "softmax_scale": None if x.is_steep else 1e-31,
        "is_fp8_kvcache": x.is_fp8,
        "indices": shaped((x.batch, x.query_tokens, x.topk), "int32") if is_sparse else None,
        "variant": x.variant,
    }
    if x.has_plan:
        sequences = x.batch * (x.query_tokens if is_sparse else 1)
        rows = x.heads // x.kv_heads * (1 if is_sparse else x.query_tokens)
        parts = twin.parts_of(rows, x.kv_heads, on.multiprocessors)
        arguments |= {"tile_scheduler_metadata": _int32(parts, 8), "num_splits": _int32(sequences + 1)}
    declared = OPS["flash_mla_with_kvcache"]
    trace, returned, _ = declared.record(declared.kind_of((), arguments), (*arguments.values(),), on)
    return Launches(trace, returned)


@pytest.mark.parametrize(
    ("x", "arch", "wanted"),
    [
        (Sizes(), "90a", "128 query rows for each kv head of a sequence: wgmma (mma up to 16); 66 parts of the "),
        (Sizes(heads=16), "90a", "16 query rows for each kv head of a sequence: mma (up to 16); 132 parts"),
        (Sizes(heads=32, is_fp8=True), "90a", ": mma (up to 32); "),
        (Sizes(heads=33, is_fp8=True), "90a", ": wgmma (mma up to 32); "),
        (Sizes(heads=33, is_fp8=True), "90a", "two warpgroups load the tokens of an 8-bit cache, which TMA"),
        (Sizes(topk=64), "90a", "two warpgroups load the tokens by indices, which TMA cannot copy"),
        (Sizes(), "80", "mma, as wgmma cannot: this GPU is of sm_80, not sm_90a; 54 parts"),
        (Sizes(dims=(192, 128)), "90a", "dynamic, the slow general kernel: heads of 576 and 512 have a faster one"),
        (Sizes(variant="dynamic"), "90a", "variant='dynamic' asks for it"),
        (Sizes(has_plan=False), "90a", "66 parts of the tokens, so that 132 multiprocessors have work"),
    ],
)  # fmt: skip
def test_the_reason_for_a_kernel(x: Sizes, arch: str, wanted: str) -> None:
    assert wanted in launches_of(x, gpu.of_arch(arch)).attend.why


def test_the_reasons_for_a_plan_and_for_what_puts_parts_together() -> None:
    own = "no plan is given (get_mla_metadata makes one for all layers of a step); "
    for batch, chain in ((48, "sequences"), (49, "parts")):
        step = launches_of(Sizes(batch=batch, has_plan=False)).trace.steps[0]
        assert step.why.startswith(f"{own}{batch} sequences in 66 parts: a chain over the {chain} (from 49 to 4096 ")
    for heads, batch, wanted in (
        (64, 1, "64 rows, a block for each 128 columns"),
        (65, 1, "65 rows, a block for each ("),
    ):
        assert wanted in launches_of(Sizes(heads=heads, batch=batch)).combine.why
    assert "513 rows, a warp for each (from 513 rows on)" in launches_of(Sizes(heads=27, batch=19)).combine.why


@pytest.mark.parametrize("arch", gpu.BY_ARCH)
def test_a_gpu_is_given_what_is_compiled_for_it(arch: str) -> None:
    calls = [Sizes(variant="mma", heads=heads, is_fp8=is_fp8) for heads in (16, 32, 64) for is_fp8 in (False, True)]
    given = {launches_of(x, gpu.of_arch(arch)).attend.variant.instance for x in calls}
    assert given == {*op.attend_mma.specialized} - {*op.attend_mma.unused[arch]}


def forms() -> set[Any]:
    kinds = [((576, 512), False, False), ((576, 512), True, False), ((0, 0), False, False)]
    kinds += [((576, 512), True, True), ((512, 512), True, True)]
    return {
        op.best_mma_config("bfloat16", is_fp8, rows, of_head, most, has_extra)
        for of_head, is_fp8, has_extra in kinds
        for rows in (1, 16, 17, 32, 33, 64, 1000)
        for most in map(op.mma_shared_bytes, gpu.BY_ARCH.values())
    }


def test_every_gpu_has_the_shared_memory() -> None:
    # Those that a GPU is given fit it; and the template takes as much as the host says.
    for most in map(op.mma_shared_bytes, gpu.BY_ARCH.values()):
        for rows in (16, 32, 64):
            for is_fp8 in (False, True):
                assert op.best_mma_config("bfloat16", is_fp8, rows, (576, 512), most).shared_bytes <= most
    kinds = {"bfloat16": "__nv_bfloat16"}
    lines = [
        f"static_assert(MmaConfig<{kinds[f.dtype]}, {', '.join(str(x).lower() for x in f[1:])}>::BYTES "
        f'== {f.shared_bytes}, "");'
        for f in sorted(forms())
    ]
    source = "\n".join(['#include "mla_decode/mma_form.cuh"', *lines, "template <int N> __global__ void probe() {}"])
    options = ["-arch=sm_90a", "-std=c++17", f"-I{sources.CUDA_SRC}", f"-I{compiler.cuda_include_directory()}"]
    nvrtc.compile_cubin(source, "probe.cu", "probe<0>", options)


BF16 = "__nv_bfloat16"


@pytest.mark.parametrize(
    ("x", "function", "arguments", "grid"),
    [
        (Sizes(), "attend_wgmma", (BF16, "false", "false"), (2, 1, 66)),
        (Sizes("float16", variant="wgmma", heads=16), "attend_wgmma", ("__half", "false", "false"), (1, 1, 132)),
        (Sizes(query_tokens=2), "attend_wgmma", (BF16, "false", "false"), (4, 1, 33)),
        (Sizes(kv_heads=2, cache_strides=(1152 * 64, 1152, 576)), "attend_wgmma", (BF16,), (1, 2, 66)),
        # Where TMA copies nothing, two warpgroups load, but for queries of float16 over 8 bits.
        (Sizes(is_fp8=True), "attend_two_loaders", (BF16, "true", "false"), (2, 1, 66)),
        (Sizes(heads=160, is_fp8=True, topk=9), "attend_two_loaders", (BF16, "true", "true"), (3, 1, 44)),
        (Sizes("float16", is_fp8=True), "attend_wgmma", ("__half", "true", "false"), (2, 1, 66)),
        (Sizes("float16", topk=2048), "attend_two_loaders", ("__half", "false", "true"), (2, 1, 66)),
        (Sizes(heads=64, topk=2048), "attend_two_loaders", (BF16, "false", "true"), (1, 1, 132)),
        (Sizes(heads=8, query_tokens=3, is_fp8=True), "attend_mma", (BF16, "true", 32), (1, 1, 132)),
        (Sizes("float16", topk=2048, is_fp8=True), "attend_wgmma", ("__half", "true", "true"), (2, 1, 66)),
        (Sizes(topk=5, variant="wgmma", heads=1), "attend_two_loaders", (BF16, "false", "true"), (1, 1, 132)),
        # Without a tensor map strides and pages may be any.
        (Sizes(is_fp8=True, pages=0), "attend_two_loaders", (BF16, "true", "false"), (2, 1, 66)),
        (Sizes(topk=2048, cache_strides=(0, 576, 0)), "attend_two_loaders", (BF16, "false", "true"), (2, 1, 66)),
        (Sizes(is_steep=False), "attend_mma", (BF16, "false", 64), (2, 1, 66)),
        (Sizes(variant="mma"), "attend_mma", (BF16, "false", 64), (2, 1, 66)),
        (Sizes(is_fp8=True, variant="mma"), "attend_mma", (BF16, "true", 64), (2, 1, 66)),
        (Sizes(heads=16, is_fp8=True), "attend_mma", (BF16, "true", 16), (1, 1, 132)),
        (Sizes(heads=8, query_tokens=3, is_fp8=True, variant="mma"), "attend_mma", (BF16, "true", 32), (1, 1, 132)),
        (Sizes(topk=2048, variant="mma"), "attend_mma", (BF16, "false", 64), (2, 1, 66)),
        # With indices each query token is a sequence of its own.
        (Sizes(topk=2048, heads=16, query_tokens=3), "attend_mma", (BF16, "false", 16), (1, 1, 132)),
        (Sizes(variant="dynamic"), "attend_mma", (BF16, "false", 32), (4, 1, 66)),
        (Sizes(dims=(64, 64), heads=5), "attend_mma", (BF16, "false", 16), (1, 1, 132)),
        (Sizes(pages=0), "attend_mma", (BF16, "false", 64), (2, 1, 66)),
        (Sizes(cache_strides=(0, 576, 0)), "attend_mma", (BF16, "false", 64), (2, 1, 66)),
    ],
    ids=str,
)
def test_the_variant_for_a_call(
    x: Sizes, function: str, arguments: tuple[Any, ...], grid: tuple[int, int, int]
) -> None:
    got = launches_of(x)
    instance = got.attend.variant.instance
    assert (instance.function, instance.arguments[: len(arguments)]) == (function, arguments)
    assert got.attend.grid == grid
    if function == "attend_mma":
        special = x.dims == (576, 512) and x.variant != "dynamic"
        assert instance.arguments[-2:] == ((576, 512) if special else (0, 0))
    plain = not x.is_fp8 and x.topk < 0
    assert (got.map is not None) == (function == "attend_wgmma" and plain)
    # The workspace: 2 results and lse for each part, and if need be the plan.
    rows = x.heads // x.kv_heads * (1 if x.topk >= 0 else x.query_tokens)
    slots, sequences = 2 * grid[2] * x.kv_heads * rows, x.batch * (x.query_tokens if x.topk >= 0 else 1)
    needed = [slots * x.dims[1] * 4, slots * 4, grid[2] * 32, (sequences + 1) * 4]
    aligned = [-(-size // 256) * 256 for size in needed]
    assert Workspace(got.trace, got.returned).bytes == sum(aligned[:2])
    whole = launches_of(x._replace(has_plan=False))
    unplanned = whole.trace
    assert Workspace(unplanned, whole.returned).bytes == sum(aligned)
    assert [x.variant.instance.function for x in unplanned.steps] == ["plan_parts", function, "combine_parts"]


@pytest.mark.parametrize(
    ("x", "arguments", "grid"),
    [
        (Sizes(), (BF16, 512, 1, 4), (4, 1, 66)),
        (Sizes(batch=1), (BF16, 512, 8, 4), (128, 1, 1)),
        (Sizes(batch=3), (BF16, 512, 8, 4), (3 * 128, 1, 1)),
        (Sizes(batch=1, heads=3), (BF16, 512, 8, 1), (3, 1, 4)),
        (Sizes(batch=1, heads=6, kv_heads=2, query_tokens=2, variant="mma"), (BF16, 512, 8, 1), (6, 2, 4)),
        # More parts than sequences: most have something to put together.
        (Sizes(batch=7, query_tokens=2, topk=100), (BF16, 512, 1, 4), (16, 1, 66)),
        (Sizes("float16", variant="dynamic"), ("__half", 0, 1, 5), (4, 1, 66)),
    ],
    ids=str,
)
def test_how_parts_are_put_together(x: Sizes, arguments: tuple[Any, ...], grid: tuple[int, int, int]) -> None:
    got = launches_of(x).combine
    assert (got.variant.instance.arguments, got.grid) == (arguments, grid)


@pytest.mark.parametrize(
    ("sequences", "parts", "threads", "has_table"),
    [
        *(
            (0, 1, 256, False),
            (48, 132, 256, False),
            (49, 132, 384, True),
            (384, 255, 384, True),
            (385, 66, 768, True),
        ),
        *((4096, 66, 768, True), (4097, 66, 256, False), (100, 256, 256, False)),
    ],
)
def test_the_memory_of_the_plan(sequences: int, parts: int, threads: int, has_table: bool) -> None:
    assert op.plan_threads(sequences, parts) == threads
    shared_bytes, table_bytes = op.plan_shared_bytes(sequences, threads)
    assert shared_bytes <= 99 << 10 and table_bytes % 16 == 0
    # The parts of the sequences take the table's place.
    assert table_bytes >= 4 * sequences if has_table else table_bytes == 0


def test_the_tensor_map_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_plan, "encode", lambda *args: args)

    def tensor_map(x: Sizes) -> Any:
        found = launches_of(x)
        assert found.map is not None and found.map.function is not None
        (cache,) = found.map.operands
        address, dtype, *sizes, promotion, swizzled = found.map.function(cache.address)
        assert cache.source == 1 and cache.address and not cache.offset
        assert (address, dtype, promotion, swizzled) == (cache.address, x.dtype, 256, True)
        return sizes

    dims, strides, box = tensor_map(Sizes())
    assert (dims, strides, box) == ((576, 1, 64, 1000), (1152, 1152, 64 * 1152), (64, 1, 64, 1))
    for page_size, tokens in ((16, 16), (48, 16), (80, 16), (96, 32), (128, 64), (192, 64)):
        apart = page_size * 3 * 640, 640, page_size * 640
        x = Sizes(variant="wgmma", heads=6, kv_heads=3, page_size=page_size, cache_strides=apart)
        dims, strides, box = tensor_map(x)
        assert dims == (576, 3, page_size, 1000) and strides == tuple(2 * n for n in reversed(x.cache_strides))
        assert box == (64, 1, tokens, 1)


def test_a_variant_that_is_not_there_is_refused() -> None:
    for x, wanted, reason in (
        (Sizes(dims=(64, 64)), "'auto', 'mma' or 'dynamic' here", "heads are of 64 and 64, not 576 and 512"),
        (Sizes(pages=0), "'auto', 'mma' or 'dynamic' here", "the cache has no pages"),
        (Sizes(is_steep=False), "'auto', 'mma' or 'dynamic' here", "softmax_scale is below 1e-30"),
        (
            Sizes(cache_strides=(64 * 576, 0, 0)),
            "'auto', 'mma' or 'dynamic' here",
            "k_cache has a stride of 0 elements",
        ),
    ):
        message = f"variant must be {wanted}, got 'wgmma': {reason}"
        with pytest.raises(ValueError, match=re.escape(message)):
            launches_of(x._replace(variant="wgmma"))
    message = "variant must be 'auto' or 'dynamic' here, got 'mma': there is none for heads of 64 and 64"
    with pytest.raises(ValueError, match=re.escape(message)):
        launches_of(Sizes(dims=(64, 64), variant="mma"))
    with pytest.raises(ValueError, match="variant must be one of 'auto', 'wgmma', 'mma', 'dynamic', got 'fast'"):
        launches_of(Sizes(variant="fast"))
    blackwell = gpu.of_arch("100a")
    with pytest.raises(ValueError, match="got 'wgmma': this GPU is of sm_100a, not sm_90a"):
        launches_of(Sizes(variant="wgmma"), blackwell)
    assert launches_of(Sizes(), blackwell).attend.variant.instance.function == "attend_mma"


# --- corners, in the twin and in each variant -----------------------------------------------------------


def variants_of(x: Case) -> list[str]:
    """What can be asked for."""
    if (x.q.shape[3], x.head_dim_v) != (576, 512) and not is_paged(x):
        return ["auto", "dynamic"]
    mapped = not x.options.get("is_fp8_kvcache") and x.options.get("indices") is None
    takes = arch_of_device(0) == "90a" and (x.k_cache.size or not mapped) and x.options.get("softmax_scale", 1) > 0
    return ["auto", *["wgmma"] * bool(takes), "mma", "dynamic"]


def there(x: Case) -> Case:
    """The same on the GPU."""
    options = {key: on_gpu(value) for key, value in x.options.items()}
    given = [a if a is None else on_gpu(a) for a in x[:4]]
    if is_paged(x):
        given[1] = pages_there(x.k_cache)
        if options.get("extra_k_cache") is not None:
            options["extra_k_cache"] = pages_there(x.options["extra_k_cache"])
    return Case(given[0], given[1], given[2], given[3], x.head_dim_v, options, x.latents)


def pages_there(cache: Any) -> Any:
    """Pages of two parts on the GPU, as far apart as here: at multiples of 16 bytes."""
    if not isinstance(cache, np.ndarray):
        return cache
    pages, page_size = cache.shape[:2]
    distance = cache.strides[0]
    flat = cupy.full((pages, distance), 0xFF, cupy.uint8)
    flat[:, : page_size * 584] = cupy.asarray(np.ascontiguousarray(cache).reshape(pages, -1))
    return cupy.lib.stride_tricks.as_strided(flat, cache.shape, (distance, 584, 584, 1))


def plan_there(x: Case) -> list[Any]:
    """The plan for a case that is on the GPU, made by the kernel."""
    args, sparse = x.plan_arguments
    sequences = x.q.shape[0] * (x.q.shape[1] if sparse else 1)
    rows = (x.q.shape[2] if sparse else x.q.shape[1] * x.q.shape[2]) // args[2]
    parts = twin.parts_of(rows, args[2], gpu.of_device(0).multiprocessors)
    made = [Buffer((parts, 8), "int32"), Buffer((sequences + 1,), "int32")]
    pair = tuple(buffer.array for buffer in made)
    assert cukern.get_mla_metadata(*args, **sparse, out=pair) is pair
    for buffer in made:
        buffer.numpy()  # nothing was written around it
    return list(pair)


def launch(x: Case, variant: str = "auto", planned: bool = True) -> tuple[Array, Array]:
    """Result and lse of `flash_mla_with_kvcache` on the GPU, in NumPy, of a case here or there."""
    given = there(x)
    batch, query_tokens, heads, _ = x.q.shape
    out = Buffer((batch, query_tokens, heads, x.head_dim_v), x.q.dtype.name)
    lse = Buffer((batch, heads, query_tokens), "float32")
    plan = plan_there(given) if planned else []
    # What the allocator hands out next is not zero.
    cupy.full(2**24, POISON, cupy.uint8)
    returned = given.run(*plan, out=(out.array, lse.array), variant=variant)
    assert returned[0] is out.array and returned[1] is lse.array
    return out.numpy(), lse.numpy()


class Place(NamedTuple):
    """Runs a case there: once by the twin, or by each variant that takes it."""

    on_device: bool

    def __call__(self, x: Case) -> Iterator[tuple[Array, Array]]:
        if not self.on_device:
            yield x.run()
            return
        for variant in variants_of(x):
            yield launch(x, variant)
            yield launch(x, variant, planned=False)

    def variants(self, x: Case) -> Iterator[tuple[tuple[Array, Array], tuple[Array, Array]]]:
        """The same, each with what it should be."""
        if not self.on_device:
            yield x.run(), x.twin()
            return
        for variant in variants_of(x):
            yield launch(x, variant), x.wanted(variant)
            yield launch(x, variant, planned=False), x.wanted(variant)

    @property
    def library(self) -> Any:
        return cupy if self.on_device else np


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.gpu)], ids=["numpy", "gpu"])
def attend(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


def is_nan(array: Array) -> Array:
    return np.isnan(array.astype(np.float32))


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_rows_with_nothing_to_attend_to(
    attend: Place, query_tokens: int, with_sinks: bool, rng: np.random.Generator
) -> None:
    sinks = {"attn_sink": np.array([0, 100, INF, -INF], np.float32)} if with_sinks else {}
    lengths = [0, -7, 2, 300, -(2**31)]
    x = paged(rng, lengths, 4, query_tokens=query_tokens, causal=True, **sinks)
    want = x.twin()
    for out, lse in attend(x):
        assert not out[[0, 1, 4]].any() and (lse[[0, 1, 4]] == INF).all()
        if query_tokens == 3:
            # A sequence shorter than the query: its first token stands before the cache, the second sees one token.
            assert not out[2, 0].any() and (lse[2, :, 0] == INF).all()
            if not with_sinks:
                assert (out[2, 1] == x.latents[2][0, 0, :512].astype(out.dtype)).all()
        assert np.isfinite(lse[3]).all()
        assert_close((out, lse), want)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_a_bad_page_makes_its_sequence_nan(attend: Place, fp8: bool, rng: np.random.Generator) -> None:
    # Also one in the middle of a sequence that many parts share.
    lengths = [100, 200, 17, 200, 5000, 333, 2, 900]
    x = paged(rng, lengths, 16, query_tokens=2, causal=True, fp8=fp8)
    x.block_table[1, 0] = len(x.k_cache)
    x.block_table[3, 3] = -1
    x.block_table[4, 40] = 2147480000
    x.block_table[6, 0] = -(2**31)
    x.cache_seqlens[5] = x.block_table.shape[1] * 64 + 1
    x.cache_seqlens[7] = 2**31 - 1
    bad, good = [1, 3, 4, 5, 6, 7], [0, 2]
    for (out, lse), want in attend.variants(x):
        assert is_nan(out[bad]).all() and np.isnan(lse[bad]).all()
        assert_close((out[good], lse[good]), (want[0][good], want[1][good]))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_a_bad_slot_makes_its_query_token_nan(attend: Place, fp8: bool, rng: np.random.Generator) -> None:
    x = paged(rng, [100, 2000], 16, query_tokens=3, topk=700, page_size=16, fp8=fp8)
    indices, slots = x.options["indices"], len(x.k_cache) * 16
    indices[0, 1, 5], indices[1, 0, 699], indices[1, 2, 640] = slots, 2**31 - 1, slots + 1
    x = x._replace(block_table=None)
    for (out, lse), want in attend.variants(x):
        assert is_nan(out).all(3)[..., 0].tolist() == [[False, True, False], [True, False, True]]
        assert (is_nan(out) == is_nan(want[0])).all() and (np.isnan(lse) == np.isnan(want[1])).all()
        assert_close((out, lse), want)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_skipped_indices(attend: Place, fp8: bool, rng: np.random.Generator) -> None:
    # Whole tiles of them, at the start, in the middle, at the end, all over; and all but one.
    x = paged(rng, [600, 90, 50, 70, 20], 24, topk=450, fp8=fp8)
    indices = x.options["indices"]
    indices[0, 0, :64], indices[1, 0, 64:256], indices[2, 0, 320:], indices[3] = -1, -1, -1, -1
    indices[4], indices[4, 0, 300] = -1, x.block_table[4, 0] * 64 + 7
    want = x.twin()
    assert (want[1] == INF).all((1, 2)).tolist() == [False, False, False, True, False]
    for got, mine in attend.variants(x):
        assert_close(got, mine)


def test_a_cache_without_pages_has_no_token(attend: Place, rng: np.random.Generator) -> None:
    x = paged(rng, [100, 0], 4)
    x = x._replace(k_cache=x.k_cache[:0])
    for out, lse in attend(x):
        assert is_nan(out[0]).all() and np.isnan(lse[0]).all()
        assert not out[1].any() and (lse[1] == INF).all()
    x = x.with_options(indices=np.array([[[-1, 0]], [[-1, -1]]], np.int32))
    for out, lse in attend(x):
        assert is_nan(out[0]).all() and np.isnan(lse[0]).all()
        assert not out[1].any() and (lse[1] == INF).all()


@pytest.mark.parametrize("place_of_nan", ["query", "latent", "rotary"])
def test_nan_stays_where_it_belongs(attend: Place, place_of_nan: str, rng: np.random.Generator) -> None:
    x = paged(rng, [40, 90, 700], 6, 2)
    want = x.twin()
    touched = np.zeros(x.q.shape[:3], bool)
    if place_of_nan == "query":
        x.q[1, 0, 4, 9] = NAN
        touched[1, 0, 4] = True
    else:
        x.k_cache[x.block_table[1, 1], 3, 1, 500 if place_of_nan == "latent" else 575] = NAN  # token 67
        touched[1, 0, 3:] = True
    for out, lse in attend(x):
        assert (is_nan(out) == touched[..., None]).all() and (np.isnan(lse) == touched.transpose(0, 2, 1)).all()
        sees = ~touched[:, 0]
        assert_close((out[:, 0][sees], lse[..., 0][sees]), (want[0][:, 0][sees], want[1][..., 0][sees]))


def test_scores_of_minus_infinity_weigh_nothing(attend: Place, rng: np.random.Generator) -> None:
    # The score is twice the first rotary number, -inf for all tokens, all but one, all of the first 256.
    x = paged(rng, [40, 20, 300], 3, softmax_scale=1.0)
    x.q[...] = 0
    x.q[..., 512] = 2
    seen = [np.zeros(40, bool), np.arange(20) == 7, np.arange(300) >= 256]
    for table, of_tokens in zip(x.block_table, seen, strict=True):
        tokens = np.arange(len(of_tokens))
        x.k_cache[table[tokens // 64], tokens % 64, 0, 512] = np.where(of_tokens, 0, -INF)
    for out, lse in attend(x):
        assert not out[0].any() and (lse[0] == INF).all()
        for s, count in (1, 1), (2, 44):
            want = x.latents[s][seen[s], 0, :512].mean(0).astype(out.dtype)
            assert_matches(OUT, out[s, 0], np.stack([want] * 3))
            assert_matches(LSE, lse[s], np.full((3, 1), np.log(count), np.float32))


def strided(x: Case, xp: Any) -> dict[str, Case]:
    """The same arguments as parts of larger arrays, which hold NaN elsewhere; `xp` is their library."""
    batch, query_tokens, heads, head_dim = x.q.shape
    table = xp.full((batch, x.block_table.shape[1] + 5), JUNK[0], np.int32)[:, : x.block_table.shape[1]]
    table[...] = x.block_table
    fused = xp.full((batch, query_tokens + 2, heads + 4, head_dim + 8), NAN, x.q.dtype)
    fused = fused[:, 1 : query_tokens + 1, 3 : heads + 3, 8:]
    fused[...] = x.q
    tokens_last = xp.ascontiguousarray(x.q.transpose(2, 1, 0, 3)).transpose(2, 1, 0, 3)
    pages, page_size, kv_heads, slot = x.k_cache.shape
    layers = xp.full((pages, 3, page_size, kv_heads, slot), NAN, x.k_cache.dtype)[:, 1]
    wide = xp.full((pages, page_size, kv_heads, slot + 64), NAN, x.k_cache.dtype)[..., :slot]
    heads_first = xp.ascontiguousarray(x.k_cache.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    pages_last = xp.ascontiguousarray(x.k_cache.transpose(1, 2, 0, 3)).transpose(2, 0, 1, 3)
    layers[...] = wide[...] = x.k_cache
    return {
        "query": x._replace(q=fused),
        "query, tokens last": x._replace(q=tokens_last),
        "block_table": x._replace(block_table=table),
        "a layer of all": x._replace(k_cache=layers),
        "slots apart": x._replace(k_cache=wide),
        "heads before tokens": x._replace(k_cache=heads_first),
        "pages last": x._replace(k_cache=pages_last),
    }


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_strides(attend: Place, kv_heads: int, rng: np.random.Generator) -> None:
    x = paged(rng, [50, 0, 170, 64], 4, kv_heads, query_tokens=2, dtype="float16", causal=True)
    want = x.twin()
    for name, case in strided(there(x) if attend.on_device else x, attend.library).items():
        assert name
        for got in attend(case):
            assert_close(got, want)


def test_strides_of_indices(attend: Place, rng: np.random.Generator) -> None:
    x = paged(rng, [50, 170], 4, query_tokens=2, topk=30, page_size=32)
    want, xp = x.twin(), attend.library
    indices = xp.full((2, 5, 40), 2**31 - 1, np.int32)[:, 1:3, 3:33]
    indices[...] = xp.asarray(x.options["indices"])
    for got in attend(x.with_options(indices=indices)):
        assert_close(got, want)


@pytest.mark.parametrize("topk", [None, 0, 5], ids=["", "no indices", "indices"])
def test_nothing_to_do(attend: Place, topk: int | None, rng: np.random.Generator) -> None:
    for batch, query_tokens in (0, 1), (0, 0), (2, 0):
        x = paged(rng, [3] * batch, 4, query_tokens=query_tokens, topk=topk)
        for out, lse in attend(x):
            assert out.shape == (batch, query_tokens, 4, 512) and lse.shape == (batch, 4, query_tokens)
    # No cache at all, and no room in the table.
    x = paged(rng, [0, 0], 4, topk=topk)
    x = x._replace(k_cache=x.k_cache[:0], block_table=x.block_table[:, :0])
    for out, lse in attend(x):
        assert not out.any() and (lse == INF).all()
    if topk is None:
        x.cache_seqlens[1] = 1
        for out, _ in attend(x):
            assert not out[0].any() and is_nan(out[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(attend: Place, dtype: str, rng: np.random.Generator) -> None:
    # exp of such scores overflows unless the largest is taken off first, and the largest comes late.
    x = paged(rng, [200, 1000], 8, dtype=dtype, softmax_scale=30.0)
    last = x.block_table[1, 999 // 64], 999 % 64
    x.k_cache[last] = (3 * x.k_cache[last].astype(np.float32)).astype(x.k_cache.dtype)
    want = x.twin()
    assert np.abs(want[1]).max() > 1000
    for out, lse in attend(x):
        # What rounds a score of 1000 by 2**-23 of itself, several times, does so to each weight.
        assert np.abs(out.astype(np.float32) - want[0].astype(np.float32)).max() < 2**-8
        assert np.abs(lse / want[1] - 1).max() < 1e-5


# --- the kernels against the twin -----------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _compiled_on_all_cores(request: pytest.FixtureRequest) -> None:
    """Compile in parallel what the GPU tests would compile one by one, where many of them run."""
    own = [item for item in request.session.items if item.path == request.path and item.get_closest_marker("gpu")]
    if len(own) < 50:
        return
    needed = set()
    for dtype, heads, variant in itertools.product(DTYPES, (16, 32, 64), op.VARIANTS[1:]):
        for is_fp8, topk, batch in itertools.product((False, True), (-1, 100), (1, 3, 8, 500)):
            x = Sizes(dtype, variant, heads, is_fp8=is_fp8, topk=topk, batch=batch)
            with contextlib.suppress(ValueError):  # where there is none
                found = launches_of(x, gpu.of_device(0))
                needed |= {found.attend.variant.instance, found.combine.variant.instance}
    arch = arch_of_device(0)
    compiler.compile_all([(i, arch) for i in compiler.missing(needed, arch)])


def compare(x: Case) -> None:
    """Every variant gives what the twin gives, with a plan made ahead and without."""
    given = there(x)
    for variant in variants_of(x):
        want = x.wanted(variant)
        assert not is_nan(want[0]).any()
        for planned in (True, False):
            assert_close(launch(given, variant, planned), want)


EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]

#: Lengths, heads, then what else differs from bfloat16 over pages of 64; and why.
CASES: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "DeepSeek-V3": ([1000, 1, 0, 777], 128, {}),
    "DeepSeek-V3, float16": ([1000, 1, 0, 777], 128, {"dtype": "float16"}),
    "DeepSeek-V3 with a draft, over 8 GPUs": (EDGES, 16, {"query_tokens": 2, "causal": True}),
    "DeepSeek-V3 with a draft": ([300, 0, 2, 65], 128, {"query_tokens": 2, "causal": True}),
    "block edges": (EDGES, 64, {}),
    "block edges, float16, 3 tokens": (EDGES, 16, {"dtype": "float16", "query_tokens": 3, "causal": True}),
    "3 tokens that see all": (EDGES, 16, {"query_tokens": 3}),
    "one head": (EDGES, 1, {}),
    "3 heads of 3 tokens": (EDGES, 3, {"query_tokens": 3, "causal": True}),
    "a row more than a block has": (EDGES, 65, {}),
    "a row more than two blocks have": ([70, 300, 0], 43, {"query_tokens": 3, "causal": True}),
    "two kv heads": (EDGES, 32, {"kv_heads": 2, "query_tokens": 2, "causal": True}),
    "every head its own": ([70, 0, 129], 5, {"kv_heads": 5}),
    "pages of 16": (EDGES, 16, {"page_size": 16}),
    "pages of 48": ([*EDGES, 48, 49, 97], 16, {"page_size": 48}),
    "pages of 128": ([*EDGES, 256, 257], 16, {"page_size": 128}),
    "pages of 80, several kv heads and tokens": (
        EDGES, 12, {"page_size": 80, "kv_heads": 3, "query_tokens": 2, "causal": True}),
    "one sequence in many parts": ([8192], 128, {}),
    "one sequence in many parts, few heads": ([8192], 3, {"query_tokens": 2, "causal": True}),
    "a part of many sequences": ([5, 40, 0, 77] * 100, 16, {}),
    "long and short": ([5000] + [3] * 40 + [2500], 16, {}),
    "sharp": ([700, 100], 16, {"sharpness": 100.0}),
    "scale": ([700, 100], 16, {"softmax_scale": 0.1}),
    "negative scale": ([700, 100], 16, {"softmax_scale": -0.05}),
    "negative scale, 128 heads": ([700, 100], 128, {"softmax_scale": -0.05}),
    "negative scale, fp8": ([700, 100], 16, {"softmax_scale": -0.05, "fp8": True}),
    "no scale": (EDGES, 64, {"softmax_scale": 0.0}),
    "sinks": ([700, 100, 0, 3000], 16, {"attn_sink": np.linspace(-2, 9, 16, dtype=np.float32)}),
    "extreme sinks": ([700, 5000], 4, {"attn_sink": np.array([INF, -INF, 100, -100], np.float32)}),
    "head_dim 64, all of it value": (EDGES, 16, {"head_dim": 64, "head_dim_v": 64}),
    "head_dim 48 and 16": (EDGES, 16, {"head_dim": 48, "head_dim_v": 16, "dtype": "float16"}),
    "head_dim 320 and 256": (EDGES, 33, {"head_dim": 320, "head_dim_v": 256, "query_tokens": 2, "causal": True}),
    "head_dim 576 and 576": ([700, 0, 100], 16, {"head_dim_v": 576, "page_size": 48}),
    "head_dim 528 and 272, in parts": ([5000, 70], 3, {"head_dim": 528, "head_dim_v": 272}),
    "head_dim 16": (EDGES, 1, {"head_dim": 16, "head_dim_v": 16}),
    "fp8": ([1000, 1, 0, 777], 128, {"fp8": True}),
    "fp8, block edges": (EDGES, 16, {"fp8": True}),
    "fp8, float16, causal": (EDGES, 16, {"fp8": True, "dtype": "float16", "query_tokens": 3, "causal": True}),
    "fp8, pages of 48, kv heads": (EDGES, 6, {"fp8": True, "page_size": 48, "kv_heads": 2}),
    "fp8, 128 heads, pages of 16, float16": (
        [*EDGES, 1000], 128, {"fp8": True, "page_size": 16, "dtype": "float16"}),
    "fp8, a draft and kv heads": (EDGES, 64, {"fp8": True, "kv_heads": 2, "query_tokens": 2, "causal": True}),
    "fp8, a part of many sequences": ([5, 40, 0, 77, 300] * 80, 64, {"fp8": True}),
    "fp8, in parts": ([5000], 16, {"fp8": True, "attn_sink": np.linspace(-2, 9, 16, dtype=np.float32)}),
    "indices": ([3000, 700], 128, {"topk": 512}),
    "indices, 3 tokens": ([300, 70], 16, {"topk": 65, "query_tokens": 3}),
    "indices, float16, kv heads, pages of 16": ([300], 6, {"topk": 200, "kv_heads": 2, "dtype": "float16",
                                                           "page_size": 16}),
    "indices, a part of many queries": ([300] * 70, 64, {"topk": 140, "query_tokens": 3}),
    "indices, one tile each": ([300] * 70, 32, {"topk": 64, "query_tokens": 3}),
    "indices, fp8, a part of many queries": ([300] * 70, 64, {"topk": 140, "query_tokens": 3, "fp8": True}),
    "indices, fp8, float16, kv heads": ([300], 70, {"topk": 300, "kv_heads": 2, "fp8": True, "dtype": "float16"}),
    "indices, one query in many parts": ([3000], 64, {"topk": 2048}),
    "indices, fp8": ([300, 70], 128, {"topk": 130, "fp8": True, "query_tokens": 2}),
    "indices, fp8, sinks": ([300, 70], 16, {"topk": 1, "fp8": True, "attn_sink": np.zeros(16, np.float32)}),
    "indices, head_dim 64": ([300, 70], 16, {"topk": 100, "head_dim": 64, "head_dim_v": 48}),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "heads", "changes"), CASES.values(), ids=CASES)
def test_the_kernels(lengths: list[int], heads: int, changes: dict[str, Any], rng: np.random.Generator) -> None:
    compare(paged(rng, lengths, heads, **changes))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("heads", "changes"),
    [
        (18, {"query_tokens": 2, "causal": True}),
        (3, {"page_size": 16, "dtype": "float16"}),
        (3, {"fp8": True, "kv_heads": 3}),
        (3, {"topk": 70, "query_tokens": 2}),
        (3, {"topk": 70, "fp8": True}),
        (3, {"head_dim": 48, "head_dim_v": 32, "page_size": 48}),
    ],
    ids=str,
)
def test_each_path_stays_inside_its_arrays(heads: int, changes: dict[str, Any], rng: np.random.Generator) -> None:
    # A table and a cache exactly as large as they must be, so that a read beyond what is needed leaves an array.
    x = paged(rng, [150, 0, 17], heads, **changes)
    page_size = x.k_cache.shape[1]
    counts = [ceil(n / page_size) for n in (150, 0, 17)]
    kept = np.concatenate([row[:n] for row, n in zip(x.block_table, counts, strict=True)])
    table = np.full((3, counts[0]), JUNK[0], np.int32)
    for row, n, start in zip(table, counts, np.cumsum([0, *counts]), strict=False):
        row[:n] = np.arange(start, start + n)
    options = dict(x.options)
    if "topk" in changes:
        new_ids = np.full(len(x.k_cache), -1)
        new_ids[kept] = np.arange(len(kept))
        pages, places = np.divmod(np.maximum(options["indices"], 0), page_size)
        moved = np.where(options["indices"] < 0, -1, new_ids[pages] * page_size + places)
        options["indices"] = moved.astype(np.int32)
    compare(x._replace(k_cache=x.k_cache[kept], block_table=table, options=options))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "page_size"), [(128, 64), (16, 16)], ids=str)
def test_every_token_counts(heads: int, page_size: int, dtype: str, fp8: bool, rng: np.random.Generator) -> None:
    # Each row looks for one token, and finds its value: whichever is misplaced or left out shows.
    length = 1060
    signs = (rng.integers(0, 2, (length, 1, 576)) * 2 - 1).astype(np.float32)
    x = paged(rng, [length], heads, dtype=dtype, page_size=page_size, fp8=fp8)
    tokens = np.arange(length)
    stored = pack(signs) if fp8 else signs.astype(x.q.dtype)
    x.k_cache[x.block_table[0, tokens // page_size], tokens % page_size] = stored
    rows = ceil(length / heads) + 3
    target = (np.arange(rows)[:, None] * heads + np.arange(heads)) % length
    many = x._replace(
        q=signs[target, 0].astype(x.q.dtype)[:, None],
        block_table=np.repeat(x.block_table, rows, 0),
        cache_seqlens=np.full(rows, length, np.int32),
    ).with_options(softmax_scale=0.25)
    want = signs[target, 0, :512].astype(x.q.dtype)[:, None]
    for variant in variants_of(many):
        for planned in (True, False):
            out, lse = launch(many, variant, planned)
            assert np.abs(out.astype(np.float32) - want.astype(np.float32)).max() <= 2**-7
            assert np.abs(lse / 144 - 1).max() < 1e-5


@pytest.mark.gpu
def test_the_same_bits_every_time(rng: np.random.Generator) -> None:
    for x in (
        paged(rng, [5000], 16, query_tokens=2, causal=True),
        paged(rng, [700, 0, 1, 64] * 30, 64),
        paged(rng, [3000, 500], 16, topk=600, fp8=True),
    ):
        given = there(x)
        for variant in variants_of(x):
            first = launch(given, variant)
            for planned in (True, False, True):
                for ours, theirs in zip(launch(given, variant, planned), first, strict=True):
                    same_bits(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [128, 64, 100])
# Several visits to a part, of all residues of 2 and 4 tiles, some without tokens; and visits of many tiles.
@pytest.mark.parametrize("lengths", [[700, 0, 1, 64, 65, 333] * 15, [6000, 1, 0, 3001] * 12], ids=["short", "long"])
@pytest.mark.parametrize(
    ("dtype", "fp8", "topk"),
    [("bfloat16", True, None), ("bfloat16", True, 330), ("bfloat16", False, 330), ("float16", False, 330)],
)
def test_two_loading_warpgroups_give_the_bits_of_one(
    dtype: str,
    fp8: bool,
    topk: int | None,
    lengths: list[int],
    heads: int,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {} if topk is None else {"topk": topk}
    given = there(paged(rng, lengths, heads, dtype=dtype, fp8=fp8, **options))
    if "wgmma" not in variants_of(given):
        pytest.skip("needs wgmma")
    found = [launch(given, "wgmma")]
    monkeypatch.setattr(op, "takes_two_loaders", lambda work: False)
    forget_plans()
    try:
        found.append(launch(given, "wgmma"))
    finally:
        monkeypatch.undo()
        forget_plans()
    for ours, theirs in zip(*found, strict=True):
        same_bits(ours, theirs)


@pytest.mark.gpu
def test_what_is_returned_without_out(rng: np.random.Generator) -> None:
    for lengths in ([3000], [20, 0, 100]):
        x = paged(rng, lengths, 16)
        given = there(x)
        out, lse = given.run(*plan_there(given))
        assert type(out) is type(lse) is cupy.ndarray
        for ours, theirs in zip((out, lse), launch(x), strict=True):
            same_bits(cupy.asnumpy(ours), theirs)
        made = cupy.empty_like(out)
        out, lse = given.run(out=made)
        assert out is made
        assert_close((cupy.asnumpy(out), cupy.asnumpy(lse)), x.twin())


@pytest.mark.gpu
def test_what_is_off_alignment_is_refused(rng: np.random.Generator) -> None:
    x = there(paged(rng, [20, 100], 4, 2))
    flat = cupy.zeros(x.q.size + 8, x.q.dtype)
    shifted = flat[4 : x.q.size + 4].reshape(x.q.shape)
    wide = cupy.zeros((*x.k_cache.shape[:3], 580), x.k_cache.dtype)[..., :576]
    for case, message in (
        (x._replace(q=shifted), "q must be at a multiple of 16 bytes, and so its strides"),
        (x._replace(k_cache=wide), "k_cache must be at a multiple of 16 bytes, and so its strides"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            case.run()
    out = cupy.zeros(x.q.size + 8, x.q.dtype)[4 : 2 * 4 * 512 + 4].reshape(2, 1, 4, 512)
    with pytest.raises(ValueError, match="out must be at a multiple of 16 bytes, got address"):
        x.run(out=out)
    metadata, splits = plan_there(x)
    moved = cupy.zeros(metadata.size + 4, np.int32)[1 : metadata.size + 1].reshape(metadata.shape)
    with pytest.raises(ValueError, match="tile_scheduler_metadata must be at a multiple of 16 bytes, got address"):
        x.run(moved, splits)


@pytest.mark.gpu
def test_a_wrong_plan_stays_inside_its_arrays(rng: np.random.Generator) -> None:
    # The results are undefined, but nothing may be written outside of them, and the next call must be right.
    x = paged(rng, [700, 0, 100], 16, query_tokens=2)
    given, want = there(x), x.twin()
    for variant in variants_of(x):
        for values in (-(2**31), -1, 0, 1, 3, 1000, 2**31 - 1):
            metadata, splits = cupy.full((66, 8), values, np.int32), cupy.full(4, values, np.int32)
            metadata[::3] = cupy.asarray(rng.integers(-5, 20, (22, 8)), np.int32)
            splits[1:3] = cupy.asarray(rng.integers(-5, 200, 2), np.int32)
            out, lse = Buffer((3, 2, 16, 512), "bfloat16"), Buffer((3, 16, 2), "float32")
            given.run(metadata, splits, out=(out.array, lse.array), variant=variant)
            out.numpy(), lse.numpy()
        assert_close(launch(given, variant), want)


@pytest.mark.gpu
@settings(max_examples=60)
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    head_dim, head_dim_v = data.draw(st.sampled_from([(576, 512), (576, 512), (80, 48)]))
    changes: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    changes["fp8"] = head_dim == 576 and data.draw(st.booleans())
    changes["dtype"] = data.draw(st.sampled_from(DTYPES))
    changes["page_size"] = 16 * data.draw(st.integers(1, 9))
    changes["query_tokens"] = data.draw(st.integers(1, 4))
    kv_heads = changes["kv_heads"] = data.draw(st.sampled_from([1, 1, 2, 3]))
    heads = kv_heads * data.draw(st.integers(1, 70) | st.sampled_from([16, 64, 128]))
    lengths = data.draw(st.lists(st.integers(-1, 70) | st.integers(0, 900), min_size=1, max_size=7))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    if data.draw(st.booleans()):
        changes["topk"] = data.draw(st.integers(0, 200))
    else:
        changes["causal"] = data.draw(st.booleans())
    if data.draw(st.booleans()):
        changes["attn_sink"] = rng.uniform(-2, 6, heads).astype(np.float32)
    compare(paged(rng, lengths, heads, **changes))


# --- the plan on the GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("batch", [0, 1, 2, 31, 32, 33, 64, 65, 128, 384, 385, 1030, 5000])
def test_the_plan_of_the_gpu_is_the_twins(
    batch: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "MULTIPROCESSORS", gpu.of_device(0).multiprocessors)
    for most in (0, 1, 64, 200, 5000, 2**31):
        lengths = rng.integers(-1, most, batch, np.int64, endpoint=most < 2**31).astype(np.int32)
        for args in ((128, 1), (16, 1), (6, 2), (10**6, 1)):
            given = cupy.asarray(lengths)
            made = [
                Buffer((twin.parts_of(*args, gpu.of_device(0).multiprocessors), 8), "int32"),
                Buffer((batch + 1,), "int32"),
            ]
            cukern.get_mla_metadata(given, *args, out=[buffer.array for buffer in made])
            got = [buffer.numpy() for buffer in made]
            if np.maximum(lengths, 0).sum(dtype=np.int64) // len(got[0]) < MOST_BLOCKS * 64:
                for ours, theirs in zip(got, twin.get_mla_metadata(lengths, *args), strict=True):
                    same_bits(ours, theirs)
    for topk in (0, 1, 2048):
        got = cukern.get_mla_metadata(cupy.asarray(lengths), 48, 1, num_heads_q=16, topk=topk)
        want = twin.get_mla_metadata(lengths, 48, 1, num_heads_q=16, topk=topk)
        for ours, theirs in zip(got, want, strict=True):
            same_bits(cupy.asnumpy(ours), theirs)


@pytest.mark.gpu
@settings(max_examples=200)
@given(st.lists(st.integers(-1, 300) | st.integers(0, 9000), max_size=100), st.integers(1, 9000), st.integers(1, 4))
def test_any_plan_of_the_gpu_is_the_twins(lengths: list[int], rows: int, times: int) -> None:
    lengths *= times  # by sequences, and by parts
    lengths_here = np.array(lengths, np.int32)
    got = [cupy.asnumpy(a) for a in cukern.get_mla_metadata(cupy.asarray(lengths_here), rows, 1)]
    want = twin.plan([-(-max(n, 0) // 64) for n in lengths], twin.parts_of(rows, 1, gpu.of_device(0).multiprocessors))
    for ours, theirs in zip(got, want, strict=True):
        same_bits(ours, theirs)


# --- a second cache, numbers of indices, pages of any size ----------------------------------------------


def pack_paged(latents: Array, gap: int = 0) -> Array:
    """Pages [pages, page_size, 1, 584] of [pages, page_size, 1, 512], by powers of two; `gap` bytes between pages."""
    pages, page_size = latents.shape[:2]
    tiles = latents[..., :448].astype(np.float32).reshape(pages, page_size, 7, 64)
    exponents = np.ceil(np.log2(np.maximum(np.abs(tiles).max(-1) / 448, 1e-4)))
    numbers = (tiles / 2.0 ** exponents[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    rotary = np.ascontiguousarray(latents[:, :, 0, 448:].astype(ml_dtypes.bfloat16)).view(np.uint8)
    flat = np.full((pages, page_size * 584 + gap), 0xFF, np.uint8)
    flat[:, : page_size * 576] = np.concatenate([numbers.reshape(pages, page_size, 448), rotary], -1).reshape(pages, -1)
    scales = flat[:, page_size * 576 : page_size * 584].reshape(pages, page_size, 8)
    scales[..., :7] = exponents + 127
    flat[:, page_size * 576 : page_size * 584] = scales.reshape(pages, -1)
    strides = flat.shape[1], 584, 584, 1
    return np.lib.stride_tricks.as_strided(flat, (pages, page_size, 1, 584), strides)


def unpack_paged(cache: Array, dtype: Any) -> Array:
    """What `pack_paged` kept, [slots, 1, 512], as torch has it, in float64."""
    pages, page_size = cache.shape[:2]
    flat = torch.from_numpy(np.ascontiguousarray(cache)).reshape(pages, -1)
    tokens = flat[:, : page_size * 576].reshape(-1, 576)
    scales = flat[:, page_size * 576 :].reshape(-1, 8)[:, :7].clone().view(torch.float8_e8m0fnu).double()
    numbers = tokens[:, :448].clone().view(torch.float8_e4m3fn).double().view(-1, 7, 64)
    rotary = tokens[:, 448:].clone().view(torch.bfloat16).to(getattr(torch, np.dtype(dtype).name)).double()
    return torch.cat([(numbers * scales[:, :, None]).flatten(1), rotary], 1)[:, None].numpy()


class Chosen(NamedTuple):
    """A cache whose tokens indices name: what nobody attends to is NaN, what does not count points anywhere."""

    cache: Array
    indices: Array
    lengths: Array | None
    latents: Array  # [slots, kv_heads, head_dim], float64
    seen: Array  # bool like the indices


def chosen(
    rng: np.random.Generator, kind: str, sizes: tuple[int, int, int], kv_heads: int, dtype: Any, page_size: int,
    with_lengths: bool,
) -> Chosen:  # fmt: skip
    """A cache of `kind` "16 bits", "656" or "584"; sizes are the batch, the query tokens and topk."""
    batch, _, topk = sizes
    pages, head_dim = 700 // page_size + 2, 512 if kind == "584" else 576
    slots = pages * page_size
    dense = np.clip(rng.standard_normal((slots, kv_heads, head_dim), np.float32) / 10, -1, 1)
    indices = rng.integers(0, slots, sizes).astype(np.int32)
    indices[rng.random(sizes) < 0.1] = rng.choice([-1, -7])
    lengths, counts = None, np.ones(sizes, bool)
    if with_lengths:
        lengths = rng.integers(0, topk + 1, batch).astype(np.int32)
        lengths[:2] = [-3, topk + 9][: len(lengths[:2])]
        counts = np.broadcast_to((np.arange(topk) < lengths[:, None])[:, None], sizes)
        indices = np.where(counts, indices, rng.choice(np.array([*JUNK, slots], np.int32), sizes))
    seen = counts & (indices >= 0)
    unused = np.ones(slots, bool)
    unused[indices[seen]] = False
    if kind == "16 bits":
        cache = dense.astype(dtype)
        latents = cache.astype(np.float64)
        cache[unused] = NAN
        cache = cache.reshape(pages, page_size, kv_heads, head_dim)
    elif kind == "656":
        cache = pack(dense)
        latents = unpack(cache, dtype)
        cache[unused] = 0xFF
        cache = cache.reshape(pages, page_size, kv_heads, 656)
    else:
        cache = pack_paged(dense.reshape(pages, page_size, 1, 512), -page_size * 584 % 576)
        latents = unpack_paged(cache, dtype)
        flat = np.lib.stride_tricks.as_strided(cache, (pages, page_size * 584), (cache.strides[0], 1))
        for slot in np.flatnonzero(unused):
            page, place = divmod(int(slot), page_size)
            flat[page, place * 576 : place * 576 + 576] = 0xFF
            flat[page, page_size * 576 + place * 8 :][:8] = 0xFF
    return Chosen(cache, indices, lengths, latents, seen)


def sparse(
    rng: np.random.Generator, kind: str, batch: int, heads: int, topk: int, page_size: int, *,
    extra: tuple[int, int] | None = None, query_tokens: int = 1, kv_heads: int = 1, dtype: str = "bfloat16",
    lengths: str = "", **options: Any,
) -> tuple[Case, list[Chosen]]:  # fmt: skip
    """A case by indices; `extra` is topk and the page size of a second cache, `lengths` names those that are given."""
    numpy_dtype = arrays.numpy_dtype(dtype)
    own = chosen(rng, kind, (batch, query_tokens, topk), kv_heads, numpy_dtype, page_size, "own" in lengths)
    both = [own]
    options |= {"indices": own.indices, "is_fp8_kvcache": kind != "16 bits", "topk_length": own.lengths}
    if extra is not None:
        more = chosen(rng, kind, (batch, query_tokens, extra[0]), kv_heads, numpy_dtype, extra[1], "extra" in lengths)
        both.append(more)
        options |= {"extra_k_cache": more.cache, "extra_indices_in_kvcache": more.indices}
        options |= {"extra_topk_length": more.lengths}
    q = (10 * rng.standard_normal((batch, query_tokens, heads, own.latents.shape[2]), np.float32)).astype(numpy_dtype)
    return Case(q, own.cache, None, np.zeros(batch, np.int32), 512, options, []), both


def of_both(x: Case, both: list[Chosen]) -> tuple[Array, Array]:
    """What torch makes of it."""
    sinks = x.options.get("attn_sink")
    out, lse = np.zeros((*x.q.shape[:3], 512)), np.zeros((x.q.shape[0], x.q.shape[2], x.q.shape[1]))
    for at in np.ndindex(x.q.shape[:2]):
        keys = np.concatenate([own.latents[own.indices[at][own.seen[at]]] for own in both])
        seen = np.ones((1, len(keys)), bool)
        found = by_torch(x.q[at][None], keys, 512, x.q.shape[3] ** -0.5, seen, sinks)
        out[at], lse[at[0], :, at[1]] = found[0][0], found[1][:, 0]
    return out.astype(x.q.dtype), lse.astype(np.float32)


#: Kind of cache, batch, heads, topk, page size; then what else there is.
CHOSEN: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    "pages of 1": ("16 bits", 3, 128, 100, 1, {}),
    "pages of 61, few heads": ("16 bits", 3, 3, 200, 61, {"query_tokens": 2}),
    "lengths": ("16 bits", 4, 128, 300, 64, {"lengths": "own"}),
    "a second cache, kv heads, float16": (
        "16 bits", 2, 6, 90, 69, {"extra": (130, 2), "kv_heads": 2, "dtype": "float16", "lengths": "extra"}),
    "656, pages of 2": ("656", 3, 64, 576, 2, {"query_tokens": 3}),
    "656, lengths, few heads": ("656", 4, 16, 300, 53, {"lengths": "own", "query_tokens": 3}),
    "656, a second cache": ("656", 3, 128, 64, 61, {"extra": (576, 64), "lengths": "own extra"}),
    "656, a second cache, few heads, float16": ("656", 3, 5, 64, 61, {"extra": (5, 700), "dtype": "float16"}),
    "584": ("584", 3, 64, 576, 69, {"query_tokens": 2}),
    "584, one head": ("584", 2, 1, 65, 1, {}),
    "584, a second cache, sinks": (
        "584", 5, 128, 64, 64,
        {"extra": (200, 69), "lengths": "own extra", "attn_sink": np.linspace(-2, 9, 128, dtype=np.float32)}),
    "584, a second cache without lengths, float16": ("584", 2, 33, 1, 2, {"extra": (512, 61), "dtype": "float16"}),
    "584, only the second cache": ("584", 3, 64, 0, 64, {"extra": (130, 2), "lengths": "extra"}),
    "584, one query in many parts": ("584", 1, 128, 600, 64, {"extra": (600, 256)}),
    "584, a part of many queries": ("584", 70, 64, 140, 64, {"extra": (70, 53), "lengths": "own", "query_tokens": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOSEN)
def test_the_twin_of_chosen_tokens_is_torchs_attention(name: str, rng: np.random.Generator) -> None:
    kind, batch, heads, topk, page_size, changes = CHOSEN[name]
    x, both = sparse(rng, kind, min(batch, 5), heads, topk, page_size, **changes)
    assert_close(x.run(), of_both(x, both))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOSEN)
def test_the_kernels_of_chosen_tokens(name: str, rng: np.random.Generator) -> None:
    kind, batch, heads, topk, page_size, changes = CHOSEN[name]
    x, _ = sparse(rng, kind, batch, heads, topk, page_size, **changes)
    compare(x)


@pytest.mark.gpu
@settings(max_examples=60)
@given(st.data())
def test_random_chosen_tokens(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["16 bits", "656", "584"]))
    kv_heads = 1 if kind == "584" else data.draw(st.sampled_from([1, 1, 2]))
    heads = kv_heads * data.draw(st.integers(1, 70) | st.sampled_from([16, 64, 128]))
    sizes, page_sizes = st.integers(0, 300), st.sampled_from([1, 2, 16, 53, 64, 69, 576, 1000])
    changes: dict[str, Any] = {"kv_heads": kv_heads, "query_tokens": data.draw(st.integers(1, 3))}
    changes["dtype"] = data.draw(st.sampled_from(DTYPES))
    changes["lengths"] = data.draw(st.sampled_from(["", "own", "extra", "own extra"]))
    if data.draw(st.booleans()):
        changes["extra"] = data.draw(sizes), data.draw(page_sizes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch, topk, page_size = data.draw(st.integers(1, 7)), data.draw(sizes), data.draw(page_sizes)
    compare(sparse(rng, kind, batch, heads, topk, page_size, **changes)[0])


@pytest.mark.parametrize("kind", ["16 bits", "656", "584"])
def test_a_bad_slot_of_the_second_cache(attend: Place, kind: str, rng: np.random.Generator) -> None:
    x, _ = sparse(rng, kind, 2, 40, 90, 61, extra=(100, 69), query_tokens=2)
    x.options["extra_indices_in_kvcache"][1, 0, 99] = x.options["extra_k_cache"].shape[0] * 69
    for (out, lse), want in attend.variants(x):
        assert is_nan(out).all(3)[..., 0].tolist() == [[False, False], [True, False]]
        assert (np.isnan(lse) == np.isnan(want[1])).all()
        assert_close((out, lse), want)


@pytest.mark.parametrize("kind", ["16 bits", "656", "584"])
def test_no_index_that_counts(attend: Place, kind: str, rng: np.random.Generator) -> None:
    x, _ = sparse(rng, kind, 3, 40, 90, 61, extra=(100, 69), lengths="own extra")
    x.options["topk_length"][:], x.options["extra_topk_length"][:] = [0, -5, 0], [-(2**31), 0, 1]
    x.options["extra_indices_in_kvcache"][2, 0, 0] = -1
    for out, lse in attend(x):
        assert not out.any() and (lse == INF).all()


@pytest.mark.parametrize(
    ("kind", "heads", "changes", "function", "last", "plan"),
    [
        ("16 bits", 64, {}, "attend_two_loaders", ("false", "true"), (256,)),
        ("656", 128, {}, "attend_two_loaders", ("true", "true"), (256,)),
        ("16 bits", 128, {"lengths": "own"}, "attend_wgmma", ("false", "true", "true"), (256, "true")),
        ("656", 128, {"extra": (9, 5)}, "attend_wgmma", ("true", "true", "true"), (256,)),
        ("656", 128, {"extra": (9, 5), "lengths": "extra"}, "attend_wgmma", ("true",) * 3, (256, "true")),
        ("656", 16, {}, "attend_mma", (576, 512), (256,)),
        ("656", 16, {"extra": (9, 5)}, "attend_mma", (576, 512, "true"), (256,)),
        ("584", 128, {}, "attend_wgmma", ("true", "true", "true", 584), (256,)),
        ("584", 1, {"lengths": "own"}, "attend_wgmma", ("true", "true", "true", 584), (256, "true")),
    ],
)
def test_the_kernels_for_chosen_tokens(
    kind: str, heads: int, changes: Any, function: str, last: Any, plan: Any, rng: np.random.Generator
) -> None:
    x, _ = sparse(rng, kind, 2, heads, 70, 64, **changes)
    arguments = dict(zip(x._fields[:5], x[:5], strict=True)) | x.options
    trace, _ = plan_of("flash_mla_with_kvcache", **arguments, tile_scheduler_metadata=None, num_splits=None)
    found = {step.variant.instance.function: step.variant.instance.arguments for step in trace.steps}
    assert found[function][-len(last) :] == last and found["plan_parts"] == plan
    assert len(found[function]) == len(last) + (5 if function == "attend_mma" else 1)


def test_the_plan_of_lengths_of_indices() -> None:
    lengths, extra = np.array([0, 100, 9999], np.int32), np.array([65, -1, 64], np.int32)
    got = cukern.get_mla_metadata(
        lengths, 128, 1, num_heads_q=64, topk=200, topk_length=lengths, extra_topk=64, extra_topk_length=extra
    )
    blocks = [ceil(n / 64) for n in (64, 64, 100, 100, 264, 264)]
    for ours, theirs in zip(got, twin.plan(blocks, 132), strict=True):
        same_bits(ours, theirs)


@pytest.mark.gpu
def test_the_plan_of_lengths_of_indices_on_the_gpu(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "MULTIPROCESSORS", gpu.of_device(0).multiprocessors)
    for batch in (1, 5, 400):
        lengths, extra = (rng.integers(-5, 3000, batch).astype(np.int32) for _ in range(2))
        for pair in ((lengths, extra), (lengths, None), (None, extra)):
            options = {"num_heads_q": 64, "topk": 2048, "extra_topk": 500}
            options |= {"topk_length": pair[0], "extra_topk_length": pair[1]}
            want = twin.get_mla_metadata(lengths, 192, 1, **options)
            there = {name: None if x is None else cupy.asarray(x) for name, x in zip(
                ("topk_length", "extra_topk_length"), pair, strict=True)}  # fmt: skip
            got = cukern.get_mla_metadata(cupy.asarray(lengths), 192, 1, **options | there)
            for ours, theirs in zip(got, want, strict=True):
                same_bits(cupy.asnumpy(ours), theirs)


@pytest.mark.parametrize("place", ["numpy", "tensors", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_plan_of_the_first_call(place: str, rng: np.random.Generator) -> None:
    def moved(array: Any) -> Any:
        if not arrays.is_array(array):
            return array
        return array if place == "numpy" else as_torch(array).to("cuda" if place == "cuda" else "cpu")

    x, _ = sparse(rng, "656", 3, 16, 90, 61, extra=(100, 69), lengths="own extra")
    x = x._replace(q=moved(x.q), k_cache=moved(x.k_cache), cache_seqlens=None)
    x = x.with_options(**{name: moved(value) for name, value in x.options.items()})
    meta, splits = cukern.get_mla_metadata()
    assert splits is None and not meta.have_initialized
    assert cukern.get_mla_metadata()[0] is not meta
    with pytest.raises(ValueError, match="topk_length must be of shape"):
        x.run(meta, None, topk_length=x.options["topk_length"][:2])
    assert not meta.have_initialized
    first = x.run(meta, None)
    plan = meta.tile_scheduler_metadata
    assert meta.have_initialized and type(plan) is type(x.q)
    for own, other, alone in zip(first, x.run(meta, None), x.run(None, None), strict=True):
        assert (own == other).all() and (own == alone).all()
    assert meta.tile_scheduler_metadata is plan
    indices = x.options["indices"]
    for changes, name, got in (
        ({"indices": indices[..., :80]}, "topk of this one, 80", "90"),
        ({"extra_k_cache": x.options["extra_k_cache"][:, :68]}, "extra_page_size of this one, 68", "69"),
    ):
        with pytest.raises(ValueError, match=f"tile_scheduler_metadata must be of a call with the {name}, got {got}"):
            x.run(meta, None, **changes)
    with pytest.raises(TypeError, match="num_splits must be None with what get_mla_metadata gave without arguments"):
        x.run(meta, plan)
    with pytest.raises(TypeError, match="missing a required argument: 'cache_seqlens'"):
        cukern.get_mla_metadata(topk=3)


# --- torch, streams, graphs -----------------------------------------------------------------------------


def tensors(x: Case) -> Case:
    options = {key: as_torch(value).cuda() if arrays.is_array(value) else value for key, value in x.options.items()}
    return Case(*(as_torch(a).cuda() for a in x[:4]), x.head_dim_v, options, x.latents)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"fp8": True}, {"topk": 90}, {"topk": 90, "fp8": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors(dtype: str, changes: dict[str, Any], rng: np.random.Generator) -> None:
    for lengths in ([3000], [20, 0, 100]):
        x = paged(rng, lengths, 16, dtype=dtype, **changes)
        want, given = x.twin(), tensors(x)
        args, sparse = given.plan_arguments
        plan = cukern.get_mla_metadata(*args, **sparse)
        assert all(type(a) is torch.Tensor and a.is_cuda for a in plan)
        got = given.run(*plan)
        assert all(type(a) is torch.Tensor and a.is_cuda for a in got)
        assert_close(tuple(map(to_numpy, got)), want)
        if "fp8" in changes:
            for kind in (torch.int8, torch.float8_e4m3fn):
                again = given._replace(k_cache=given.k_cache.view(kind)).run()
                assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
        if "topk" in changes:
            again = given._replace(block_table=None, cache_seqlens=None).run()
            assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))


@pytest.mark.gpu
def test_arrays_of_two_places_are_refused(rng: np.random.Generator) -> None:
    x = tensors(paged(rng, [20, 3], 4))
    plan = cukern.get_mla_metadata(x.cache_seqlens, 4, 1)
    for name in ("k_cache", "block_table", "cache_seqlens"):
        for other, error, message in (
            (getattr(x, name).cpu(), ValueError, f"{name} must be on CUDA device 0 like q, got one on the CPU"),
            (np.zeros(3), TypeError, f"{name} must be a torch array like q, got numpy.ndarray"),
        ):
            with pytest.raises(error, match=re.escape(message)):
                x._replace(**{name: other}).run(*plan)
    with pytest.raises(ValueError, match="num_splits must be on CUDA device 0 like q, got one on the CPU"):
        x.run(plan[0], plan[1].cpu())


@pytest.mark.gpu
def test_a_cuda_graph_follows_lengths_and_pages(rng: np.random.Generator) -> None:
    # One graph for all steps of a batch whose sequences grow, end and begin: it makes the plan anew.
    capacity = 4000
    x = paged(rng, [capacity] * 4, 16, query_tokens=2, causal=True)
    given, full = tensors(x), x.block_table
    made = torch.empty(4, 2, 16, 512, dtype=torch.bfloat16, device="cuda"), torch.empty(4, 16, 2, device="cuda")
    plan = cukern.get_mla_metadata(given.cache_seqlens, 32, 1)

    def step() -> list[Any]:
        cukern.get_mla_metadata(given.cache_seqlens, 32, 1, out=plan)
        results = [given.run(*plan, out=made, variant=variant) for variant in variants_of(x)[:1]]
        results += [given.run(*plan, variant=variant) for variant in variants_of(x)]
        return [*results, given.run()]

    step()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for lengths in ([capacity] * 4, [1, 0, 3999, 17], [0, 0, 0, 0], [700, 701, 702, 703]):
        x.cache_seqlens[:] = lengths
        x.q[...] = (10 * rng.standard_normal(x.q.shape)).astype(x.q.dtype)
        x.block_table[...] = full[rng.permutation(4)]
        for row, length in zip(x.block_table, lengths, strict=True):
            row[ceil(length / 64) :] = JUNK[0]
        for ours, theirs in ((given.q, x.q), (given.block_table, x.block_table)):
            ours.copy_(as_torch(theirs))
        given.cache_seqlens.copy_(as_torch(x.cache_seqlens))
        for pair in results:
            for tensor in pair:
                tensor.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        want = x.twin()
        for pair in results:
            assert_close(tuple(map(to_numpy, pair)), want)


@pytest.mark.gpu
@pytest.mark.large(5)
def test_more_than_2_31_elements(rng: np.random.Generator) -> None:
    """Pages and slots at the far end of a cache, by each variant."""
    # Not for the sanitizer, which would take minutes.
    x = paged(rng, [700, 0, 33], 16, query_tokens=2, causal=True)
    pages, used = 2**31 // (64 * 576) + 64, len(x.k_cache)
    assert used < 64
    want, given = x.twin(), tensors(x)
    cache = torch.full((pages, 64, 1, 576), NAN, dtype=torch.bfloat16, device="cuda")
    cache[-used:] = given.k_cache
    needed = np.isin(x.block_table, JUNK, invert=True)
    table = np.where(needed, x.block_table + (pages - used), x.block_table).astype(np.int32)
    given = given._replace(k_cache=cache, block_table=as_torch(table).cuda())
    for variant in variants_of(x):
        assert_close(tuple(map(to_numpy, given.run(variant=variant))), want)
    # The same tokens by their slots.
    slots = (table[0, np.arange(700) // 64] * 64 + np.arange(700) % 64).astype(np.int32)
    indices = torch.from_numpy(np.broadcast_to(slots, (1, 1, 700)).copy()).cuda()
    sparse = given._replace(q=given.q[:1, 1:], options={"indices": indices})
    for variant in variants_of(x._replace(options={"indices": slots})):
        assert_close(tuple(map(to_numpy, sparse.run(variant=variant))), (want[0][:1, 1:], want[1][:1, :, 1:]))


# --- torch.ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_step_is_the_step(device: str, rng: np.random.Generator) -> None:
    import cukern.torch_ops

    x = paged(rng, [40, 1, 170], 4)
    given = [as_torch(a).to(device) for a in x[:4]]

    def step(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any) -> Any:
        plan = cukern.get_mla_metadata(cache_seqlens, 4, 1)
        out, lse = cukern.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, *plan)
        made = torch.empty_like(out), torch.empty_like(lse)
        cukern.flash_mla_with_kvcache(q * 2, k_cache, block_table, cache_seqlens, 512, None, None, 1 / 48, out=made)
        return out - made[0], lse - made[1], out, *plan

    want = step(*given)
    assert want[0].abs().max() < 2**-9 and want[1].abs().max() < 1e-5
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs)
    torch.compiler.reset()
