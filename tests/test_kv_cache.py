"""The paged KV cache: the twin against torch's indexing, the kernels against the twin."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_kv_cache, harness
from cukern.ops import kv_cache as op
from cukern.ops.kv_cache import choose as parts
from cukern.ops.kv_cache.swap_blocks import runs_of
from cukern.reference import kv_cache as twin
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from cukern.testing import assert_matches
from tests.buffers import GUARD, POISON, as_torch, same_bits
from tests.pretended import PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
DTYPES = ("float32", "float16", "bfloat16")
FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
SCALED = "fp8_ds_mla"
BLOCKS, FLASH, MLA, COPY, GATHER = (
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "concat_and_cache_mla",
    "copy_blocks",
    "gather_cache",
)


# --- inputs -------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    return (30 * rng.standard_normal(shape)).astype(arrays.numpy_dtype(dtype))


def packed(rng: np.random.Generator, tokens: int, blocks: int, block_size: int) -> Array:
    """Slots of ragged sequences, one after the other, some of which begin in the middle of a block."""
    free = iter(rng.permutation(blocks).tolist())
    slots: list[int] = []
    while len(slots) < tokens:
        place = int(rng.integers(block_size)) if rng.random() < 0.3 else 0
        for _ in range(int(rng.integers(1, 4))):
            block = next(free, None)
            if block is None:
                return np.array((slots + [-1] * tokens)[:tokens], np.int64)
            slots += range(block * block_size + place, (block + 1) * block_size)
            place = 0
        slots = slots[: len(slots) - int(rng.integers(block_size))]
    return np.array(slots[:tokens], np.int64)


def slots_of(kind: str, rng: np.random.Generator, tokens: int, blocks: int, block_size: int) -> Array:
    slots = blocks * block_size
    if kind == "packed":
        return packed(rng, tokens, blocks, block_size)
    if kind == "one per block":
        return rng.permutation(blocks)[:tokens] * block_size + rng.integers(0, block_size, min(tokens, blocks))
    if kind == "any order":
        return rng.permutation(slots)[:tokens]
    in_order = np.arange(tokens) + {"in order": 0, "shifted": 5, "holes": 3}[kind]
    if kind == "holes":
        for share, what in ((0.1, -1), (0.05, -(2**63)), (0.05, slots), (0.05, 2**40)):
            in_order[rng.random(tokens) < share] = what
    return in_order


KINDS = ("in order", "shifted", "packed", "one per block", "any order", "holes")


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: int
    head_dim: int
    block_size: int
    kind: str
    extra: int = 0  # rows of the keys past the tokens
    skip: int = 0  # elements between a 256-byte boundary and each array
    gap: int = 0  # heads between those of the caches, which must stay as they are

    @property
    def blocks(self) -> int:
        return self.tokens + 3 if self.kind == "one per block" else -(-self.tokens // self.block_size) + 5


# --- worked examples ----------------------------------------------------------------------------------


def test_the_layouts_by_hand(put: Callable[[Any], Any]) -> None:
    # Two tokens of one head of 8 elements; blocks of 4 places. Slot 6 is place 2 of block 1; -1 is left out.
    key = put(np.arange(24, dtype=np.float32).reshape(3, 1, 8))
    value = put(100 + np.arange(24, dtype=np.float32).reshape(3, 1, 8))
    slots = put(np.array([6, -1, 1], np.int64))
    key_cache, value_cache = put(np.zeros((2, 1, 2, 4, 4), np.float32)), put(np.zeros((2, 1, 8, 4), np.float32))
    assert cukern.reshape_and_cache(key, value, key_cache, value_cache, slots, "auto", None, None) is None
    want_keys, want_values = np.zeros((2, 1, 2, 4, 4), np.float32), np.zeros((2, 1, 8, 4), np.float32)
    want_keys[1, 0, 0, 2], want_keys[1, 0, 1, 2] = [0, 1, 2, 3], [4, 5, 6, 7]
    want_keys[0, 0, 0, 1], want_keys[0, 0, 1, 1] = [16, 17, 18, 19], [20, 21, 22, 23]
    want_values[1, 0, :, 2], want_values[0, 0, :, 1] = range(100, 108), range(116, 124)
    same_bits(key_cache, want_keys)
    same_bits(value_cache, want_values)

    caches = [put(np.zeros((2, 4, 1, 8), np.float32)) for _ in range(2)]
    assert cukern.reshape_and_cache_flash(key, value, *caches, slots, "auto", 1.0, 1.0) is None
    for cache, first in zip(caches, (0, 100), strict=True):
        want = np.zeros((2, 4, 1, 8), np.float32)
        want[1, 2, 0], want[0, 1, 0] = first + np.arange(8), first + np.arange(16, 24)
        same_bits(cache, want)


def test_an_mla_cache_and_its_gathering_by_hand(put: Callable[[Any], Any]) -> None:
    kv_c, k_pe = np.arange(12, dtype=np.float16).reshape(3, 4), 50 + np.arange(6, dtype=np.float16).reshape(3, 1, 2)
    cache = put(np.zeros((3, 2, 6), np.float16))
    slots = put(np.array([5, 2, 3], np.int64))
    assert cukern.concat_and_cache_mla(put(kv_c), put(k_pe), cache, slots, "auto", None) is None
    want = np.zeros((3, 2, 6), np.float16)
    want[2, 1], want[1, 0], want[1, 1] = [0, 1, 2, 3, 50, 51], [4, 5, 6, 7, 52, 53], [8, 9, 10, 11, 54, 55]
    same_bits(cache, want)

    # Sequences of 3, 0 and 1 tokens; the first one starts in the middle of a block, the last one past its first block.
    table, lengths = np.array([[1, 2, 9], [9, 9, 9], [9, 2, 9]], np.int32), np.array([0, 3, 3, 4], np.int32)
    dst = put(np.full((5, 6), 7, np.float16))
    starts = put(np.array([1, 0, 3], np.int32))
    assert cukern.gather_cache(cache, dst, put(table), put(lengths), 3, starts) is None
    same_bits(dst, np.stack([want[1, 1], want[2, 0], want[2, 1], want[2, 1], np.full(6, 7, np.float16)]))
    # What lies before a sequence is left out.
    dst, starts = put(np.full((4, 6), 7, np.float16)), put(np.array([-2, -1, -9], np.int32))
    cukern.gather_cache(cache, dst, put(table), put(lengths), 3, starts)
    same_bits(dst, np.stack([*np.full((2, 6), 7, np.float16), want[1, 0], np.full(6, 7, np.float16)]))


def test_fp8_by_hand(put: Callable[[Any], Any]) -> None:
    # Ties to even, saturation, and the smallest numbers, with a scale of 0.5.
    numbers = [8, 17, 19, 1e6, -1e6, 2**-10, 3 * 2**-10, np.inf]
    key = put(np.array(numbers, np.float32).reshape(1, 1, 8))
    for name, want in {
        "fp8": [16, 32, 40, 448, -448, 2**-9, 3 * 2**-9, 448],
        "fp8_e5m2": [16, 32, 40, 57344, -57344, 2**-9, 3 * 2**-9, 57344],
    }.items():
        caches = [put(np.zeros((1, 2, 1, 8), np.uint8)) for _ in range(2)]
        scale = put(np.array([0.5], np.float32))
        cukern.reshape_and_cache_flash(key, key, *caches, put(np.array([1], np.int64)), name, scale, 0.5)
        for cache in caches:
            stored = arrays.library_of(cache).to_numpy(cache)[0, 1, 0].view(FP8.get(name, ml_dtypes.float8_e4m3fn))
            assert stored.astype(np.float64).tolist() == want


def parts_of(cache: Any) -> tuple[Array, Array, Array]:
    """Latents, scales and rotary numbers of tokens of 656 bytes, [tokens, 512], [tokens, 4] and [tokens, 64]."""
    rows = np.ascontiguousarray(arrays.library_of(cache).to_numpy(cache)).view(np.uint8).reshape(-1, 656)
    latents, scales, rotary = (np.ascontiguousarray(x) for x in (rows[:, :512], rows[:, 512:528], rows[:, 528:]))
    return latents.view(ml_dtypes.float8_e4m3fn), scales.view(np.float32), rotary.view(ml_dtypes.bfloat16)


def test_latents_with_scales_by_hand(put: Callable[[Any], Any]) -> None:
    kv_c, k_pe = np.zeros((2, 512), np.float16), np.zeros((2, 64), np.float16)
    kv_c[0, :6] = [448, 17, -19, -0.0, 2**-10, 3 * 2**-10]  # of scale 1: ties to even
    kv_c[0, 254:256] = 132, -225  # the second group: 225 / 448 is just over 1 / 2, so its scale is 1
    kv_c[0, 256] = 2**-10  # the third one has the smallest scale, 2**-13
    kv_c[0, 384:387] = [7, 1, 0.3]  # the last one, of 7 / 448 = 1 / 64
    k_pe[0, :3] = [1 + 2**-8, 1 + 3 * 2**-8, -5]  # ties to even
    kv_c[1], k_pe[1] = 1, 2
    cache = put(np.zeros((2, 3, 656), np.uint8))
    slots = put(np.array([4, -1], np.int64))
    assert cukern.concat_and_cache_mla(put(kv_c), put(k_pe), cache, slots, SCALED, None) is None
    latents, scales, rotary = parts_of(cache)
    stored = latents[4].astype(np.float64)
    assert stored[:6].tolist() == [448, 16, -20, 0, 0, 2**-8] and np.signbit(stored[3])
    assert stored[254:257].tolist() == [128, -224, 8] and stored[384:387].tolist() == [448, 64, 20]
    assert np.count_nonzero(stored) == 10
    assert scales[4].tolist() == [1, 1, 2.0**-13, 2.0**-6]
    assert rotary[4, :3].tolist() == [1, 1 + 2**-6, -5] and not rotary[4, 3:].any()
    assert not any(x.view(np.uint8)[[0, 1, 2, 3, 5]].any() for x in (latents, scales, rotary))

    dst = put(np.full((2, 576), 7, np.float32))
    table, lengths = put(np.array([[1]], np.int32)), put(np.array([0, 2], np.int32))
    assert cukern.gather_cache(cache, dst, table, lengths, 1, kv_cache_dtype=SCALED) is None
    got = arrays.library_of(dst).to_numpy(dst)
    assert not got[0].any()
    assert got[1, :6].tolist() == [448, 16, -20, 0, 0, 2**-8] and got[1, 384:387].tolist() == [7, 1, 20 / 64]
    assert got[1, 254:257].tolist() == [128, -224, 2**-10] and got[1, 512:515].tolist() == [1, 1 + 2**-6, -5]
    bits = put(np.zeros((2, 656), np.uint8))
    cukern.gather_cache(cache, bits, table, lengths, 1, kv_cache_dtype=SCALED)
    same_bits(bits, arrays.library_of(cache).to_numpy(cache)[1, :2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_in_a_group(put: Callable[[Any], Any], dtype: str) -> None:
    kv_c = np.full((1, 512), 2, arrays.numpy_dtype(dtype))
    kv_c[0, [3, 9]] = -np.nan, 448  # NaN is left out of the scale,
    kv_c[0, 128:256] = np.nan  # also where a group has nothing else;
    kv_c[0, [300, 301]] = -np.inf, np.nan  # an infinity makes the scale infinite
    k_pe = np.full((1, 64), 3, kv_c.dtype)
    k_pe[0, :2] = np.nan, -np.inf
    cache = put(np.zeros((1, 1, 656), np.uint8))
    cukern.concat_and_cache_mla(put(kv_c), put(k_pe), cache, put(np.array([0], np.int64)), SCALED, None)
    latents, scales, rotary = (x[0].astype(np.float32) for x in parts_of(cache))
    want = np.full(512, 2, np.float32)
    want[[3, 9]] = np.nan, 448
    want[128:256], want[256:384] = np.nan, 0
    want[[300, 301]] = np.nan
    want[384:] = 256
    np.testing.assert_array_equal(latents, want)
    assert scales.tolist() == [1, 2.0**-13, np.inf, 2.0**-7]
    np.testing.assert_array_equal(rotary, [np.nan, -np.inf, *[3] * 62])
    dst = put(np.zeros((1, 576), kv_c.dtype))
    table, lengths = put(np.array([[0]], np.int32)), put(np.array([0, 1], np.int32))
    cukern.gather_cache(cache, dst, table, lengths, 1, kv_cache_dtype=SCALED)
    got = arrays.library_of(dst).to_numpy(dst)[0].astype(np.float32)
    assert np.isnan(got[256:384]).all() and np.isnan(got[[3, 128, 255, 512]]).all() and got[513] == -np.inf
    assert got[9] == 448 and set(got[384:512]) == {2}


def test_empty_calls(put: Callable[[Any], Any]) -> None:
    for tokens, heads, dim, blocks in ((0, 2, 8, 3), (3, 0, 8, 3), (3, 2, 0, 3), (3, 2, 8, 0)):
        key, slots = put(np.ones((tokens, heads, dim), np.float32)), put(np.zeros(tokens, np.int64))
        keys, values = (
            put(np.zeros((blocks, heads, dim // 4, 8, 4), np.float32)),
            put(np.zeros((blocks, heads, dim, 8), np.float32)),
        )
        cukern.reshape_and_cache(key, key, keys, values, slots, "auto", None, None)
        flash = [put(np.zeros((blocks, 8, heads, dim), np.float32)) for _ in range(2)]
        cukern.reshape_and_cache_flash(key, key, *flash, slots, "auto", None, None)
        cache, rows = put(np.zeros((blocks, 8, heads + dim), np.float32)), put(np.ones((tokens, heads), np.float32))
        cukern.concat_and_cache_mla(rows, put(np.ones((tokens, dim), np.float32)), cache, slots, "auto", None)
        scaled, new = put(np.zeros((blocks, 8, 656), np.uint8)), put(np.ones((tokens, 576), np.float32))
        cukern.concat_and_cache_mla(new[:, :512], new[:, 512:], scaled, slots, SCALED, None)
        pairs = put(np.zeros((0, 2), np.int64))
        cukern.copy_blocks([keys], [keys.copy()], pairs)
        table, lengths = put(np.zeros((1, 2), np.int32)), put(np.array([0, tokens], np.int32))
        cukern.gather_cache(flash[0], key.copy(), table, lengths, 0 if blocks else 1)
        cukern.gather_cache(scaled, new, table, lengths, 0 if blocks else 1, kv_cache_dtype=SCALED)
    cukern.copy_blocks([], [], put(np.zeros((0, 2), np.int64)))


# --- the twin against torch's indexing ------------------------------------------------------------------


def stored(x: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """What an FP8 cache stores, by torch's rounding."""
    if name == "auto":
        return x
    kind = torch.float8_e5m2 if name.endswith("e5m2") else torch.float8_e4m3fn
    largest = torch.finfo(kind).max
    return (x.float() / scale).clamp(-largest, largest).to(kind).view(torch.uint8)


@settings(max_examples=30)
@given(st.data())
def test_the_twin_against_indexing(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens, heads, dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)), 16 * data.draw(st.integers(1, 3))
    block_size, name = data.draw(st.sampled_from([1, 8, 16])), data.draw(st.sampled_from(["auto", *FP8]))
    dtype = getattr(torch, data.draw(st.sampled_from(DTYPES)))
    blocks = -(-tokens // block_size) + 2
    slots = torch.from_numpy(rng.permutation(blocks * block_size)[:tokens])
    slots[torch.from_numpy(rng.random(tokens) < 0.2)] = -1
    key, value = (torch.from_numpy(draw(rng, (tokens, heads, dim), "float32")).to(dtype) for _ in range(2))
    kind = dtype if name == "auto" else torch.uint8
    x = 16 // kind.itemsize
    scales = torch.tensor(0.3), torch.tensor([1.7])
    keys, values = (
        torch.zeros(blocks, heads, dim // x, block_size, x, dtype=kind),
        torch.zeros(blocks, heads, dim, block_size, dtype=kind),
    )
    cukern.reshape_and_cache(key, value, keys, values, slots, name, *scales)
    flash = [torch.zeros(blocks, block_size, heads, dim, dtype=kind) for _ in range(2)]
    cukern.reshape_and_cache_flash(key, value, *flash, slots, name, *scales)
    flat = keys.permute(0, 3, 1, 2, 4).reshape(-1, heads, dim), values.permute(0, 3, 1, 2).reshape(-1, heads, dim)
    inside = slots >= 0
    for cache, other, new, scale in zip(flat, flash, (key, value), scales, strict=True):
        want = torch.zeros_like(cache)
        want[slots[inside]] = stored(new, name, scale.item())[inside]
        assert torch.equal(cache, want)
        assert torch.equal(other.flatten(0, 1), want)
    latent = torch.zeros(blocks, block_size, heads * dim + dim, dtype=kind)
    cukern.concat_and_cache_mla(key.flatten(1), value[:, 0], latent, slots, name, scales[0])
    want = torch.zeros_like(latent).flatten(0, 1)
    want[slots[inside]] = stored(torch.cat([key.flatten(1), value[:, 0]], 1), name, 0.3 if name != "auto" else 1)[
        inside
    ]
    assert torch.equal(latent.flatten(0, 1), want)


def draw_latents(rng: np.random.Generator, tokens: int, dtype: str) -> tuple[Array, Array]:
    """Groups of every magnitude of the dtype, whose quotients are halfway between two numbers of E4M3.

    The largest of some is 448 times a power of two, or next to it, where the scale doubles.
    """
    low, high = (-24, 15) if dtype == "float16" else (-148, 120)
    shape = (tokens, 4, 128)
    largest = np.exp2(rng.integers(low, high, (tokens, 4, 1)))
    middles = rng.integers(16, 33, shape) / 32 * np.exp2(-rng.integers(0, 20, shape))
    random = np.exp2(-12 * rng.random(shape))
    ratios = np.where(rng.random(shape) < 0.5, middles, random) * rng.choice([-1, 1], shape)
    ratios[rng.random(shape) < 0.05] = -0.0
    bits = {"float32": 23, "float16": 10, "bfloat16": 7}[dtype]
    edge = rng.random((tokens, 4)) < 0.5
    ratios[edge, 5] = 1.75 * (1 + rng.integers(-1, 2, np.count_nonzero(edge)) * 2.0**-bits)
    kind = arrays.numpy_dtype(dtype)
    kv_c = (largest * ratios).reshape(tokens, 512).astype(np.float32).astype(kind)
    rotary = np.exp2(rng.uniform(low, high, (tokens, 64))) * rng.choice([-1, 1], (tokens, 64))
    return kv_c, rotary.astype(np.float32).astype(kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_with_scales_against_torch(dtype: str, rng: np.random.Generator) -> None:
    kv_c, k_pe = map(as_torch, draw_latents(rng, 500, dtype))
    groups = kv_c.float().view(-1, 4, 128)
    # As in FlashMLA's tests; in float64, where no logarithm is rounded to a whole number.
    scales = (groups.abs().amax(-1) / torch.full((1,), 448.0)).clamp_min(1e-4).double().log2().ceil().exp2().float()
    assert 0 < (scales == 2.0**-13).float().mean() < 1
    latents = (groups / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(-1, 512)
    rows = torch.cat([x.view(torch.uint8) for x in (latents, scales, k_pe.bfloat16())], dim=1)
    slots = torch.from_numpy(rng.permutation(64 * 9)[:500])
    for kind in (torch.uint8, torch.float8_e4m3fn):
        both = torch.zeros(9, 2, 64, 656, dtype=torch.uint8).view(kind)
        # Blocks apart in memory, k_pe with a dimension of size 1, and a scale that is not used.
        scale = torch.full((1,), 3.0)
        cukern.concat_and_cache_mla(kv_c, k_pe[:, None], both[:, 1], slots, SCALED, scale)
        want = torch.zeros(64 * 9, 656, dtype=torch.uint8)
        want[slots] = rows
        assert torch.equal(both[:, 1].view(torch.uint8).flatten(0, 1), want) and not both[:, 0].view(torch.uint8).any()
        for back in DTYPES:
            dst = torch.zeros(64 * 9, 576, dtype=getattr(torch, back))
            table = torch.arange(9, dtype=torch.int32)[None]
            lengths = torch.tensor([0, 64 * 9], dtype=torch.int32)
            cukern.gather_cache(both[:, 1], dst, table, lengths, 1, kv_cache_dtype=SCALED)
            numbers = (latents.float().view(-1, 4, 128) * scales[..., None]).view(-1, 512)
            assert torch.equal(dst[slots, :512], numbers.to(dst.dtype))
            assert torch.equal(dst[slots, 512:], k_pe.bfloat16().to(dst.dtype))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_gathering_undoes_storing(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = torch.from_numpy(rng.permutation(len(lengths) * 5).reshape(-1, 5).astype(np.int32))
    starts = torch.from_numpy(rng.integers(0, 5, len(lengths)).astype(np.int32))
    rows = torch.from_numpy(draw(rng, (sum(lengths), 6), "float16"))
    slots = [
        int(table[b, u // 4]) * 4 + u % 4
        for b, length in enumerate(lengths)
        for u in range(int(starts[b]), int(starts[b]) + length)
    ]
    cache = torch.zeros(len(lengths) * 5, 4, 6, dtype=torch.float16)
    cukern.concat_and_cache_mla(rows[:, :4], rows[:, 4:], cache, torch.tensor(slots, dtype=torch.int64), "auto", None)
    cu_seq_lens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    dst = torch.zeros_like(rows)
    cukern.gather_cache(cache, dst, table, cu_seq_lens, len(lengths), starts)
    assert torch.equal(dst, rows)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gathering_converts_as_torch_does(name: str, dtype: str) -> None:
    kind = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    cache = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 64)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    want = (cache.view(kind).float() * torch.tensor(1.3)).to(getattr(torch, dtype))[0]
    for src, how in ((cache, name), (cache.view(kind), "auto")):
        dst = torch.zeros(4, 64, dtype=getattr(torch, dtype))
        cukern.gather_cache(src, dst, table, lengths, 1, kv_cache_dtype=how, scale=torch.tensor(1.3))
        assert torch.equal(dst.isnan(), want.isnan()) and torch.equal(dst.nan_to_num(), want.nan_to_num())
    same = torch.zeros(4, 64, dtype=torch.uint8)
    cukern.gather_cache(cache, same, table, lengths, 1)
    assert torch.equal(same, cache[0])


def test_copy_blocks_copies_in_every_layer(put: Callable[[Any], Any], rng: np.random.Generator) -> None:
    # 70 caches take two launches; the layouts of keys and values differ.
    keys, values = ([draw(rng, shape, "float16") for _ in range(35)] for shape in ((9, 2, 4, 8), (9, 8, 8)))
    pairs = np.array([[0, 3], [1, 4], [1, 5], [2, 99], [-1, 6], [2, 7]], np.int64)
    got = [put(x.copy()) for x in keys], [put(x.copy()) for x in values]
    assert cukern.copy_blocks(*got, put(pairs)) is None
    for old, new in zip((*keys, *values), (*got[0], *got[1]), strict=True):
        want = old.copy()
        want[3], want[4], want[5], want[7] = old[0], old[1], old[1], old[2]
        same_bits(new, want)


@pytest.mark.parametrize("layers", [1, 3, 65])
def test_copy_blocks_of_caches_without_values(put: Callable[[Any], Any], layers: int, rng: np.random.Generator) -> None:
    caches = [rng.integers(0, 256, (6, 4, 656)).astype(np.uint8) for _ in range(layers)]
    got = [put(x.copy()) for x in caches]
    assert cukern.copy_blocks(got, [], put(np.array([[0, 3], [5, 1]], np.int64))) is None
    for old, new in zip(caches, got, strict=True):
        want = old.copy()
        want[3], want[1] = old[0], old[5]
        same_bits(new, want)


def swapped(src: Array, dst: Array, pairs: Array) -> Array:
    """What `dst` holds when its blocks are copied one by one."""
    want = dst.copy()
    for source, target in pairs.tolist():
        want[target] = src[source]
    return want


PAIRS = np.array([[0, 3], [1, 4], [2, 5], [5, 0], [7, 2]], np.int64)


@pytest.mark.parametrize("dtype", [*DTYPES, "uint8"])
def test_blocks_swapped_in_host_memory(dtype: str, rng: np.random.Generator) -> None:
    src, dst = draw(rng, (8, 3, 5), dtype), draw(rng, (6, 15), dtype)  # blocks of as many bytes, in another layout
    want, block_bytes = swapped(src.reshape(8, 15), dst, PAIRS), src[0].nbytes
    for into, pairs in ((dst.copy(), PAIRS), (as_torch(dst.copy()), torch.from_numpy(PAIRS))):
        # The libraries may differ.
        assert cukern.swap_blocks(src, into, block_bytes, pairs) is None
        same_bits(into, want)
    cukern.swap_blocks(src, dst[:0], block_bytes, PAIRS[:0])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    runs = runs_of(np.array(pairs, np.int64).reshape(-1, 2)).tolist()
    assert [(first + i, to + i) for first, to, blocks in runs for i in range(blocks)] == pairs
    ends = [(first + blocks, to + blocks) for first, to, blocks in runs[:-1]]
    assert all(tuple(run[:2]) != end for run, end in zip(runs[1:], ends, strict=True))


def _bad_swaps() -> Iterator[Any]:
    yield {"src": [1.0]}, TypeError, "src must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"
    yield (
        {"dst": np.zeros((4, 6))},
        TypeError,
        "dst must be float32 or float16 or bfloat16 or uint8 or float8_e4m3fn or",
    )
    yield {"src": np.zeros((6, 4), np.float32).T}, ValueError, "src must be contiguous, got strides (1, 4)"
    wanted = "dst must be of whole blocks of 24 bytes (block_size_in_bytes), got 112"
    yield {"dst": np.zeros((4, 7), np.float32)}, ValueError, wanted
    yield {"block_size_in_bytes": 0}, ValueError, "block_size_in_bytes must be an integer"
    yield {"block_size_in_bytes": 24.0}, TypeError, "block_size_in_bytes must be an integer"
    yield {"block_mapping": np.zeros((1, 2), np.int32)}, TypeError, "block_mapping must be int64, got int32"
    yield {"block_mapping": np.zeros(2, np.int64)}, ValueError, "block_mapping must be of shape [pairs, 2], got [2]"
    yield {"block_mapping": np.array([[0, 0], [4, 0]])}, ValueError, "block_mapping must be of blocks of src in [0, 4)"
    yield {"block_mapping": np.array([[0, -1]])}, ValueError, "block_mapping must be of blocks of dst in [0, 5), got -1"


@pytest.mark.parametrize(("changes", "error", "message"), list(_bad_swaps()))
def test_a_bad_swap_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    src, dst = np.zeros((4, 6), np.float32), np.full((5, 6), np.nan, np.float32)
    good = {"src": src, "dst": dst, "block_size_in_bytes": 24, "block_mapping": np.array([[0, 4]])}
    with pytest.raises(error, match=re.escape(message)):
        cukern.swap_blocks(**good | changes)
    assert np.isnan(dst).all()


# --- arrays of every library, in host memory --------------------------------------------------------------


def test_strided_caches_in_host_memory(rng: np.random.Generator) -> None:
    new = torch.from_numpy(draw(rng, (5, 3, 16), "float32")).bfloat16()
    slots = torch.tensor([0, 9, -1, 31, 40])
    for kind, name in ((torch.bfloat16, "auto"), (torch.float8_e4m3fn, "auto"), (torch.uint8, "fp8")):
        both = torch.zeros(4, 2, 8, 3, 16).to(kind)
        cukern.reshape_and_cache_flash(new, new, both[:, 0], both[:, 1], slots, name, None, None)
        want = torch.zeros(32, 3, 16).to(kind)
        how = "auto" if kind == torch.bfloat16 else "fp8"
        want.view(torch.uint8 if how == "fp8" else kind)[[0, 9, 31]] = stored(new, how, 1)[[0, 1, 3]]
        for i in range(2):
            assert torch.equal(both[:, i].flatten(0, 1).view(torch.uint8), want.view(torch.uint8))


# --- bad arguments --------------------------------------------------------------------------------------


def good_arguments(name: str) -> dict[str, Any]:
    f32 = np.float32
    new = {"key": np.zeros((3, 2, 8), f32), "value": np.zeros((3, 2, 8), f32)}
    how = {"slot_mapping": np.zeros(3, np.int64), "kv_cache_dtype": "auto"}
    scales = {"k_scale": np.ones(1, f32), "v_scale": 1.0}
    return {
        BLOCKS: {
            **new, "key_cache": np.zeros((4, 2, 2, 8, 4), f32), "value_cache": np.zeros((4, 2, 8, 8), f32), **how,
            **scales,
        },
        FLASH: {
            **new, "key_cache": np.zeros((4, 8, 2, 8), f32), "value_cache": np.zeros((4, 8, 2, 8), f32), **how, **scales
        },
        MLA: {
            "kv_c": np.zeros((3, 8), f32), "k_pe": np.zeros((3, 4), f32), "kv_cache": np.zeros((4, 8, 12), f32), **how,
            "scale": None,
        },
        COPY: {
            "key_caches": [np.zeros((4, 6), f32)] * 2, "value_caches": [np.zeros((4, 6), f32)] * 2,
            "block_mapping": np.zeros((1, 2), np.int64),
        },
        GATHER: {
            "src_cache": np.zeros((4, 8, 6), f32), "dst": np.zeros((5, 6), f32),
            "block_table": np.zeros((2, 3), np.int32),
            "cu_seq_lens": np.array([0, 2, 5], np.int32), "batch_size": 2, "seq_starts": np.zeros(2, np.int32),
        },
    }[name]  # fmt: skip


ANYTHING = "must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"
ONE_ELEMENT = "must be a number or an array of one element, got an array of shape"


def floats(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def halves(*shape: int) -> Array:
    return np.zeros(shape, np.float16)


def octets(*shape: int) -> Array:
    return np.zeros(shape, np.uint8)


# Calls with a bad argument: (function, changed arguments, error, message).


def _bad_keys_and_values() -> Iterator[Any]:
    for name in (BLOCKS, FLASH):
        yield name, {"key": [1.0]}, TypeError, f"key {ANYTHING}"
        yield name, {"key": np.zeros((3, 2, 8))}, TypeError, "key must be float32 or float16 or bfloat16, got float64"
        yield name, {"key": floats(3, 16)}, ValueError, "key must be of shape [tokens, kv_heads, head_dim], got"
        yield name, {"key": floats(3, 8, 2).swapaxes(1, 2)}, ValueError, "key must be contiguous within each row"
        yield name, {"value": halves(3, 2, 8)}, TypeError, "value must be float32, got float16"
        yield name, {"value": floats(3, 2, 4)}, ValueError, "value must be of shape [tokens, kv_heads, head_dim]"
        yield name, {"value": torch.zeros(3, 2, 8)}, TypeError, "value must be a NumPy array like key, got torch.Tensor"


def _bad_caches() -> Iterator[Any]:
    for name, other, symbols in (
        (BLOCKS, FLASH, "[blocks, kv_heads, head_dim / x, block_size, x]"),
        (FLASH, BLOCKS, "[blocks, block_size, kv_heads, head_dim]"),
    ):
        cache = good_arguments(other)["key_cache"]
        message = f"key_cache must be of shape {symbols}, got {list(cache.shape)}, which {other} takes"
        yield name, {"key_cache": cache}, ValueError, message
    for name in (BLOCKS, FLASH):
        good = good_arguments(name)
        key_cache, value_cache = good["key_cache"], good["value_cache"]
        wanted = "key_cache must be float32 or float8_e4m3fn or float8_e5m2, got"
        yield name, {"key_cache": key_cache.astype(np.float16)}, TypeError, f"{wanted} float16"
        yield name, {"key_cache": key_cache.astype(np.uint8)}, TypeError, f"{wanted} uint8"
        yield name, {"kv_cache_dtype": "fp8"}, TypeError, "key_cache must be uint8 or float8_e4m3fn, got float32"
        yield name, {"kv_cache_dtype": "fp8_e5m2"}, TypeError, "key_cache must be uint8 or float8_e5m2, got float32"
        many = "kv_cache_dtype must be one of 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2', got"
        yield name, {"kv_cache_dtype": "int8"}, ValueError, f"{many} 'int8'"
        yield name, {"kv_cache_dtype": ["fp8"]}, ValueError, f"{many} ['fp8']"
        yield name, {"key_cache": key_cache[0]}, ValueError, "key_cache must be of shape [blocks, "
        yield name, {"key_cache": key_cache[:, :, :1]}, ValueError, "key_cache must be of shape [blocks, "
        yield name, {"value_cache": value_cache[:3]}, ValueError, "value_cache must be of shape [blocks, "
        yield name, {"value_cache": value_cache.astype(np.float16)}, TypeError, "value_cache must be float32, got"
        yield name, {"key_cache": np.repeat(key_cache, 2, -1)[..., ::2]}, ValueError, "key_cache must be contiguous but"
        repeated = np.broadcast_to(value_cache[:1], value_cache.shape)
        wanted = (
            "value_cache must be an array with memory of its own for each element, got one that repeats its elements"
        )
        yield name, {"value_cache": repeated}, ValueError, wanted
    yield BLOCKS, {"key_cache": floats(4, 2, 1, 8, 8)}, ValueError, "[4, 2, 2, 8, 4], got [4, 2, 1, 8, 8]"
    odd = {"key": floats(3, 2, 6), "value": floats(3, 2, 6)}
    wanted = "key must be of a head_dim that is a multiple of the 4 elements in 16 bytes of key_cache, got 6"
    yield BLOCKS, odd, ValueError, wanted


def _bad_scales() -> Iterator[Any]:
    for name in (BLOCKS, FLASH):
        yield name, {"k_scale": "1"[:0]}, TypeError, "k_scale must be a number, got '' (str)"
        yield name, {"v_scale": floats(2)}, ValueError, f"v_scale {ONE_ELEMENT} [2]"
        yield name, {"v_scale": np.ones(1)}, TypeError, "v_scale must be float32, got float64"
        yield name, {"k_scale": torch.ones(1)}, TypeError, "k_scale must be a NumPy array like key, got torch.Tensor"
        yield name, {"v_scale": np.nan}, ValueError, "v_scale must be a finite number, got nan"


def _bad_slots() -> Iterator[Any]:
    for name, like, rows in ((BLOCKS, "key", 3), (FLASH, "key", 3), (MLA, "kv_c", 3)):
        yield name, {"slot_mapping": np.zeros(3, np.int32)}, TypeError, "slot_mapping must be int64, got int32"
        yield name, {"slot_mapping": np.zeros((3, 1), np.int64)}, ValueError, "slot_mapping must be of shape [tokens]"
        yield name, {"slot_mapping": np.zeros(6, np.int64)[::2]}, ValueError, "slot_mapping must be contiguous, got"
        wanted = f"slot_mapping must be of at most the {rows} tokens of {like}, got 4"
        yield name, {"slot_mapping": np.zeros(4, np.int64)}, ValueError, wanted
        yield name, {"slot_mapping": [0, 1, 2]}, TypeError, f"slot_mapping must be a NumPy array like {like}"


def _bad_latents() -> Iterator[Any]:
    yield MLA, {"kv_c": np.zeros((3, 8))}, TypeError, "kv_c must be float32 or float16 or bfloat16, got float64"
    yield MLA, {"k_pe": halves(3, 4)}, TypeError, "k_pe must be float32, got float16"
    yield MLA, {"k_pe": floats(2, 4)}, ValueError, "k_pe must be of shape [tokens, rope_dim] = [3, 4], got [2, 4]"
    yield MLA, {"k_pe": floats(3, 2, 4)}, ValueError, "k_pe must be of shape [tokens, rope_dim], got [3, 2, 4]"
    yield MLA, {"k_pe": floats(4, 3).T}, ValueError, "k_pe must be contiguous within each row, got strides (1, 3)"
    wanted = "kv_cache must be of shape [blocks, block_size, kv_lora_rank + rope_dim] = [4, 8, 12], got [4, 8, 13]"
    yield MLA, {"kv_cache": floats(4, 8, 13)}, ValueError, wanted
    yield MLA, {"kv_cache": floats(32, 12)}, ValueError, "kv_cache must be of shape [blocks, block_size, kv_lora"
    yield MLA, {"scale": floats(3)}, ValueError, f"scale {ONE_ELEMENT} [3]"


def _bad_latents_with_scales() -> Iterator[Any]:
    scaled = {"kv_c": halves(3, 512), "k_pe": halves(3, 64), "kv_cache_dtype": SCALED}
    scaled["kv_cache"] = octets(4, 8, 656)
    many = "kv_cache_dtype must be one of 'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2', 'fp8_ds_mla', got 'fp8_mla'"
    for changes, error, message in (
        ({"kv_c": halves(3, 256)}, ValueError, "kv_c must be of a kv_lora_rank of 512 for 'fp8_ds_mla', got"),
        ({"k_pe": halves(3, 32)}, ValueError, "k_pe must be of a rope_dim of 64 or 0 for 'fp8_ds_mla', got 32"),
        ({"kv_cache": halves(4, 8, 656)}, TypeError, "kv_cache must be uint8 or float8_e4m3fn, got float16"),
        ({"kv_cache": octets(4, 8, 576)}, ValueError, "[blocks, block_size, 656] = [4, 8, 656], got [4"),
        ({"kv_cache": octets(4, 8, 1, 656)}, ValueError, "of shape [blocks, block_size, 656], got [4, 8"),
        ({"kv_cache": octets(4, 8, 1312)[..., ::2]}, ValueError, "kv_cache must be contiguous but for"),
        ({"kv_cache_dtype": "fp8_mla"}, ValueError, many),
        ({"scale": "one"}, TypeError, "scale must be a number, got 'one' (str)"),
    ):  # fmt: skip
        yield MLA, scaled | changes, error, message
    scaled = {"src_cache": octets(4, 8, 656), "dst": halves(5, 576), "kv_cache_dtype": SCALED}
    for changes, error, message in (
        ({"src_cache": octets(4, 8, 640)}, ValueError, "[4, 8, 656], got [4, 8, 640]"),
        ({"src_cache": np.zeros((4, 8, 656), FP8["fp8_e5m2"])}, TypeError, "src_cache must be uint8 or float8_e4m3fn"),
        ({"dst": halves(5, 656)}, ValueError, "dst must be of shape [tokens, 576] = [5, 576], got [5, 656]"),
        ({"dst": octets(5, 576)}, ValueError, "dst must be of shape [tokens, ...] = ['tokens', 656]"),
        ({"dst": np.zeros((5, 576))}, TypeError, "dst must be uint8 or float32 or float16 or bfloat16, got float64"),
    ):  # fmt: skip
        yield GATHER, scaled | changes, error, message


def _bad_copies() -> Iterator[Any]:
    caches = good_arguments(COPY)["key_caches"]
    yield COPY, {"key_caches": caches[0]}, TypeError, "key_caches must be a list of arrays, one per layer, got ndarray"
    yield COPY, {"value_caches": caches[:1]}, ValueError, "value_caches must be of the 2 layers of key_caches, got 1"
    yield COPY, {"key_caches": []}, ValueError, "value_caches must be of the 0 layers of key_caches, got 2"
    yield COPY, {"value_caches": None}, TypeError, "value_caches must be a list of arrays, one per layer, got NoneType"
    yield COPY, {"key_caches": [[1], [2]]}, TypeError, f"key_caches[0] {ANYTHING}"
    yield (
        COPY,
        {"key_caches": [caches[0], caches[0].astype(np.float16)]},
        TypeError,
        "key_caches[1] must be float32, got float16",
    )
    wanted = "key_caches[0] must be float32 or float16 or bfloat16 or uint8 or float8_e4m3fn or float8_e5m2, got int64"
    yield COPY, {"key_caches": [caches[0].astype(np.int64)] * 2}, TypeError, wanted
    wanted = "value_caches[1] must be of 4 blocks of 6 elements like key_caches[0], got shape [4, 7]"
    yield COPY, {"value_caches": [caches[0], floats(4, 7)]}, ValueError, wanted
    wanted = "value_caches[0] must be with its blocks at the distance of those of key_caches[0], got strides (12, 1)"
    yield COPY, {"value_caches": [floats(4, 12)[:, :6], caches[0]]}, ValueError, wanted
    yield COPY, {"key_caches": [floats(6, 4).T] * 2}, ValueError, "key_caches[0] must be contiguous within each"
    yield COPY, {"block_mapping": np.zeros((1, 2), np.int32)}, TypeError, "block_mapping must be int64, got int32"
    yield COPY, {"block_mapping": np.zeros((1, 3), np.int64)}, ValueError, "block_mapping must be of shape [pairs, 2]"
    yield (
        COPY,
        {"block_mapping": np.zeros(2, np.int64)},
        ValueError,
        "block_mapping must be of shape [pairs, 2], got [2]",
    )


def _bad_gathers() -> Iterator[Any]:
    yield (
        GATHER,
        {"src_cache": np.zeros((4, 8, 6))},
        TypeError,
        "src_cache must be float32 or float16 or bfloat16 or uint8",
    )
    yield GATHER, {"src_cache": floats(4)}, ValueError, "src_cache must be of shape [blocks, block_size, ...]"
    yield GATHER, {"dst": floats(5, 7)}, ValueError, "dst must be of shape [tokens, ...] = ['tokens', 6] like src"
    yield GATHER, {"dst": halves(5, 6)}, TypeError, "dst must be float32, got float16"
    yield GATHER, {"dst": floats(6, 5).T}, ValueError, "dst must be contiguous within each row"
    wanted = "src_cache must be float16 or float8_e4m3fn or float8_e5m2, got uint8"
    yield GATHER, {"src_cache": octets(4, 8, 6), "dst": halves(5, 6)}, TypeError, wanted
    yield (
        GATHER,
        {"kv_cache_dtype": "int8"},
        ValueError,
        "kv_cache_dtype must be one of 'auto', 'fp8', 'fp8_e4m3', 'fp8_e",
    )
    yield GATHER, {"block_table": np.zeros((2, 3), np.int64)}, TypeError, "block_table must be int32, got int64"
    yield GATHER, {"block_table": np.zeros(3, np.int32)}, ValueError, "block_table must be of shape [batch, max_blocks]"
    wanted = "batch_size must be an integer in [0, 2] (the rows of block_table), got"
    yield GATHER, {"batch_size": 3}, ValueError, f"{wanted} 3"
    yield GATHER, {"batch_size": 2.0}, TypeError, f"{wanted} 2.0 (float)"
    yield (
        GATHER,
        {"cu_seq_lens": np.zeros(2, np.int32)},
        ValueError,
        "cu_seq_lens must be of at least 3 elements for batch",
    )
    yield GATHER, {"cu_seq_lens": np.zeros(3, np.int64)}, TypeError, "cu_seq_lens must be int32, got int64"
    yield (
        GATHER,
        {"seq_starts": np.zeros(1, np.int32)},
        ValueError,
        "seq_starts must be of at least 2 elements for batch",
    )
    yield (
        GATHER,
        {"scale": floats(2)},
        ValueError,
        f"scale {ONE_ELEMENT} [2]",
    )


BAD_CALLS = [
    *_bad_keys_and_values(),
    *_bad_caches(),
    *_bad_scales(),
    *_bad_slots(),
    *_bad_latents(),
    *_bad_latents_with_scales(),
    *_bad_copies(),
    *_bad_gathers(),
]


@pytest.mark.parametrize(("name", "changes", "error", "message"), BAD_CALLS)
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = good_arguments(name)
    getattr(cukern, name)(**arguments)
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)


# --- the choice of a variant ------------------------------------------------------------------------------


@given(st.sampled_from(["store_rows", "gather_rows"]), st.integers(1, 2**24))
def test_a_tile_covers_a_row(kernel: str, columns: int) -> None:
    tile = parts.tile_of(kernel, columns)
    tile_rows, tile_columns = tile.fields["tile_rows"], tile.fields["tile_columns"]
    assert tile.chunks * tile_columns >= columns > (tile.chunks - 1) * tile_columns
    threads, items = parts.THREADS_ITEMS[kernel]
    assert tile_rows >= 1 and tile_rows * tile_columns <= threads * items
    assert tile.chunks < 2**16


def test_a_few_tokens_share_their_windows(pretended: PretendedGPU) -> None:  # noqa: F811
    new, slots = torch.empty(900, 2, 64, dtype=torch.bfloat16), torch.zeros(900, dtype=torch.int64)
    caches = torch.empty(9, 2, 8, 16, 8, dtype=new.dtype), torch.empty(9, 2, 64, 16, dtype=new.dtype)
    address = [x.data_ptr() for x in (new, *caches, slots)]
    side = {"src": address[0], "src_stride": 256, "block_stride": 4096, "head_stride": 2048}
    sizes = {"slot_mapping": address[3], "slots": 144, "columns": 128, "head_dim": 64, "block_size": 16}
    for tokens, blocks, shared in ((2, 8, "8"), (64, 16, "8"), (512, 128, "8"), (513, 17, "1"), (900, 29, "1")):
        cukern.reshape_and_cache(new[:tokens], new[:tokens], *caches, slots[:tokens], "auto", None, 2.0)
        launch = pretended.launches[-1]
        assert str(launch.variant.instance).endswith(f"{shared}>")
        assert launch.grid == (blocks, 1, 2)
        assert launch.fields["key"] == {**side, "cache": address[1], "scale": {"array": 0, "number": 1.0}}
        assert launch.fields["value"] == {**side, "cache": address[2], "scale": {"array": 0, "number": 2.0}}
        assert launch.fields.items() >= {**sizes, "tokens": tokens}.items()


def test_64_caches_are_copied_by_a_launch(pretended: PretendedGPU) -> None:  # noqa: F811
    keys, values = ([torch.empty(9, 100, dtype=torch.uint8) for _ in range(35)] for _ in range(2))
    pairs = torch.zeros(3, 2, dtype=torch.int64)
    cukern.copy_blocks(keys, values, pairs)
    addresses = [x.data_ptr() for x in (*keys, *values)]
    launches = pretended.launches
    assert [launch.fields["cache"] for launch in launches] == [addresses[:64], [*addresses[64:], *[0] * 58]]
    for launch, caches in zip(launches, (64, 6), strict=True):
        assert launch.grid == (3, caches, 1)
        rest = {"block_mapping": pairs.data_ptr(), "block_stride": 100, "blocks": 9, "columns": 25, "splits": 1}
        assert launch.fields.items() >= rest.items()


def test_a_list_is_compared_as_a_whole() -> None:
    alike = [torch.empty(4, 6) for _ in range(6)]
    lists = [
        alike, [*alike[:5], torch.empty(6, 4).T], [torch.empty(4, 7), *alike[1:]], [*alike[:5], alike[5].half()],
        [torch.empty(4, 7)] * 6,
    ]  # fmt: skip
    library = arrays.library_of(alike[0])
    assert library is not None
    for one, other in itertools.product(lists, lists):
        assert library.alike(one)(*other) is (one is other)


# --- the benchmarks -----------------------------------------------------------------------------------


def test_the_baselines_compute_the_same() -> None:
    cases = bench_kv_cache.cases()
    assert {case.op for case in cases} == set(op.__all__)
    rows = [(case.op, str(case.case), case.variant) for case in cases]
    assert len(set(rows)) == len(rows)
    assert len([b for case in cases for b in case.baselines.values() if b.slow]) <= 2
    for case in bench_kv_cache.cases(small=True):
        ours = case.call(*harness.inputs(case, 0, "cpu"))
        # Slow baselines are torch.compile of others, whose C++ compiler takes seconds.
        baselines = [b for b in case.baselines.values() if not b.slow]
        assert baselines
        for baseline in baselines:
            assert case.agree is not None and case.agree(ours, baseline.load()(*harness.inputs(case, 0, "cpu")))


# --- the kernels against the twin --------------------------------------------------------------------------


class Buffer:
    """An array on the GPU and its like in host memory, both poisoned; `skip` elements past a 256-byte boundary."""

    def __init__(self, shape: tuple[int, ...], dtype: str, skip: int = 0) -> None:
        kind = arrays.numpy_dtype(dtype)
        first = GUARD + skip * kind.itemsize
        size = int(np.prod(shape)) * kind.itemsize
        self._host = np.full(first + size + GUARD, POISON, np.uint8)
        self._device = cupy.full(first + size + GUARD, POISON, cupy.uint8)
        self.host = self._host[first : first + size].view(kind).reshape(shape)
        self.device = self._device[first : first + size].view(kind).reshape(shape)

    def check(self) -> None:
        """Check that both sides have the same bits, also around the array."""
        np.testing.assert_array_equal(cupy.asnumpy(self._device), self._host)


def place(values: Array, skip: int = 0) -> Any:
    """`values` on the GPU, `skip` elements past a 256-byte boundary."""
    buffer = Buffer(values.shape, values.dtype.name, skip)
    buffer.device[...] = cupy.asarray(values)
    return buffer.device


def compare(case: Case, dtype: str, how: str, rng: np.random.Generator) -> None:
    """Check that both layouts get the twin's bits, and that nothing else changes."""
    tokens, heads, dim, size = case.tokens, case.heads, case.head_dim, case.block_size
    kind = dtype if how == "auto" else "uint8"
    x = 16 // arrays.ITEM_SIZE[kind]
    fused = draw(rng, (tokens + case.extra, 2 * heads * dim), dtype)
    on_device = place(fused, case.skip)
    new, moved = (
        [y[:, i * heads * dim : (i + 1) * heads * dim].reshape(-1, heads, dim) for i in range(2)]
        if isinstance(y, np.ndarray)
        else [y[:, i * heads * dim :][:, : heads * dim].reshape(-1, heads, dim) for i in range(2)]
        for y in (fused, on_device)
    )
    slots = slots_of(case.kind, rng, tokens, case.blocks, size).astype(np.int64)
    scales = np.array([0.37], np.float32), 1.7
    options = (cupy.asarray(slots), how, cupy.asarray(scales[0]), scales[1])
    all_heads = heads + case.gap

    keys = Buffer((case.blocks, all_heads, dim // x, size, x), kind, case.skip)
    values = Buffer((case.blocks, all_heads, dim, size), kind, case.skip)
    assert cukern.reshape_and_cache(*moved, keys.device[:, :heads], values.device[:, :heads], *options) is None
    twin.reshape_and_cache(*new, keys.host[:, :heads], values.host[:, :heads], slots, how, *scales)
    keys.check()
    values.check()

    both = Buffer((case.blocks, 2, size, all_heads, dim), kind, case.skip)
    ours, theirs = ([y[:, i, :, :heads] for i in range(2)] for y in (both.device, both.host))
    cukern.reshape_and_cache_flash(*moved, *ours, *options)
    twin.reshape_and_cache_flash(*new, *theirs, slots, how, *scales)
    both.check()

    latent = Buffer((case.blocks, size, (heads + 1) * dim), kind, case.skip)
    rows, parts = ([y[0].reshape(-1, heads * dim), y[1][:, :1]] for y in (new, moved))
    cukern.concat_and_cache_mla(*parts, latent.device, *options[:2], options[2])
    twin.concat_and_cache_mla(rows[0], rows[1][:, 0], latent.host, slots, how, scales[0])
    latent.check()


CASES = {
    "one token": Case(1, 1, 16, 16, "in order"),
    "one block": Case(16, 1, 16, 16, "in order"),
    "less than a run": Case(7, 2, 32, 16, "in order"),
    "blocks of 8": Case(100, 2, 64, 8, "packed"),
    "blocks of 24": Case(100, 2, 64, 24, "packed"),
    "blocks of 64": Case(200, 2, 128, 64, "packed"),
    "blocks of 5, no runs": Case(60, 2, 32, 5, "in order"),
    "blocks of 1": Case(40, 2, 32, 1, "any order"),
    "more columns than a block of threads takes": Case(70, 5, 176, 16, "packed"),
    "more tokens than a small batch": Case(1100, 1, 32, 16, "packed"),
    "rows past the tokens": Case(50, 2, 32, 16, "shifted", extra=9),
    "heads that are not ours": Case(50, 2, 32, 16, "packed", gap=3),
    "off alignment": Case(50, 2, 32, 16, "packed", skip=1),
    "off alignment, more tokens": Case(600, 1, 32, 16, "shifted", skip=2),
}
FORMATS = [(dtype, "auto") for dtype in DTYPES] + [
    ("bfloat16", "fp8"),
    ("float16", "fp8_e5m2"),
    ("float32", "fp8_e4m3"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "how"), FORMATS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_sizes(case: Case, dtype: str, how: str, rng: np.random.Generator) -> None:
    compare(case, dtype, how, rng)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "how"), FORMATS)
@pytest.mark.parametrize("tokens", [77, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_any_slots(kind: str, tokens: int, dtype: str, how: str, rng: np.random.Generator) -> None:
    compare(Case(tokens, 2, 64, 16, kind), dtype, how, rng)


SANITIZED = {
    "runs": (Case(70, 1, 64, 16, "packed"), "bfloat16", "auto"),
    "holes": (Case(530, 1, 16, 8, "holes"), "float32", "auto"),
    "fp8": (Case(70, 2, 32, 16, "packed", extra=3), "float16", "fp8"),
    "off alignment": (Case(40, 2, 16, 16, "shifted", skip=1), "bfloat16", "auto"),
}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("case", "dtype", "how"), SANITIZED.values(), ids=SANITIZED)
def test_each_path_stays_inside_its_arrays(case: Case, dtype: str, how: str, rng: np.random.Generator) -> None:
    compare(case, dtype, how, rng)


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    case = Case(
        data.draw(st.integers(1, 700)), data.draw(st.integers(1, 5)), 16 * data.draw(st.integers(1, 12)),
        data.draw(st.sampled_from([1, 7, 8, 16, 32, 40])), data.draw(st.sampled_from(KINDS)),
        data.draw(st.integers(0, 3)), data.draw(st.sampled_from([0, 0, 1, 4])), data.draw(st.integers(0, 2)),
    )  # fmt: skip
    compare(case, *data.draw(st.sampled_from(FORMATS)), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [1, 3, 20, 100])
@pytest.mark.parametrize(("dtype", "how"), FORMATS)
def test_rows_of_any_head_dim(dim: int, dtype: str, how: str, rng: np.random.Generator) -> None:
    new = [draw(rng, (50, 3, dim), dtype) for _ in range(2)]
    kind = dtype if how == "auto" else "uint8"
    caches = [Buffer((6, 16, 3, dim), kind) for _ in range(2)]
    slots = slots_of("any order", rng, 50, 6, 16).astype(np.int64)
    cukern.reshape_and_cache_flash(*map(place, new), *(c.device for c in caches), cupy.asarray(slots), how, 0.3, None)
    twin.reshape_and_cache_flash(*new, *(c.host for c in caches), slots, how, 0.3, None)
    for cache in caches:
        cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("how", FP8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_is_rounded_as_the_twin_rounds(dtype: str, how: str) -> None:
    numbers = np.arange(65536, dtype=np.uint16).view(arrays.numpy_dtype(dtype)).reshape(64, 8, 128)
    slots = np.arange(64)
    for scale in (1.0, 0.5, 0.3, 0.0123, 7.7, 448 / 6.1, 0.0, 1e30):
        got = [cupy.zeros(shape, cupy.uint8) for shape in ((4, 8, 8, 16, 16), (4, 8, 128, 16))]
        want = [np.zeros(x.shape, np.uint8) for x in got]
        device_scale = cupy.full(1, scale, cupy.float32)
        new = cupy.asarray(numbers)
        cukern.reshape_and_cache(new, new, *got, cupy.asarray(slots), how, device_scale, scale)
        twin.reshape_and_cache(numbers, numbers, *want, slots, how, scale, scale)
        for one, other in zip(got, want, strict=True):
            assert_matches("kv_cache.cache", cupy.asnumpy(one).view(FP8[how]), other.view(FP8[how]))


def compare_latents(
    tokens: int, block_size: int, kind: str, dtype: str, rng: np.random.Generator, skip: int = 0, extra: int = 0
) -> None:
    """The twin's bytes, and from them the twin's numbers, each `skip` elements past a 256-byte boundary."""
    blocks = tokens + 3 if kind == "one per block" else -(-tokens // block_size) + 5
    kv_c, k_pe = draw_latents(rng, tokens + extra, dtype)
    fused = place(np.concatenate([k_pe, kv_c], axis=1), skip)
    slots = slots_of(kind, rng, tokens, blocks, block_size).astype(np.int64)
    both = Buffer((blocks, 2, block_size, 656), "uint8", skip)
    moved = fused[:, 64:], fused[:, None, :64], both.device[:, 1], cupy.asarray(slots)
    assert cukern.concat_and_cache_mla(*moved, SCALED, None) is None
    twin.concat_and_cache_mla(kv_c, k_pe, both.host[:, 1], slots, SCALED, None)
    both.check()

    both.host[:, 1], both.device[:, 1] = 0, 0  # what is stored below is all that is there
    every = np.arange(min(tokens, blocks * block_size))
    cukern.concat_and_cache_mla(*moved[:3], cupy.asarray(every), SCALED, None)
    twin.concat_and_cache_mla(kv_c, k_pe, both.host[:, 1], every, SCALED, None)
    table = rng.permutation(blocks).astype(np.int32)[None]
    lengths = np.array([0, blocks * block_size - 1], np.int32)
    for back in DTYPES:
        dst = Buffer((blocks * block_size, 576), back, skip)
        given = cupy.asarray(table), cupy.asarray(lengths), 1
        assert cukern.gather_cache(both.device[:, 1], dst.device, *given, kv_cache_dtype=SCALED) is None
        twin.gather_cache(both.host[:, 1], dst.host, table, lengths, 1, kv_cache_dtype=SCALED)
        dst.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_latents_with_scales(kind: str, dtype: str, rng: np.random.Generator) -> None:
    compare_latents(300, 16, kind, dtype, rng)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("tokens", "block_size", "skip", "extra", "dtype"), [
    (1, 64, 0, 0, "bfloat16"), (3, 64, 1, 0, "float16"), (5, 1, 0, 2, "float32"), (9, 7, 1, 0, "float32"),
    (70, 64, 0, 3, "float16"), (37, 16, 2, 0, "bfloat16"), (33, 5, 8, 0, "float16"),
])  # fmt: skip
def test_latents_with_scales_of_any_sizes(
    tokens: int, block_size: int, skip: int, extra: int, dtype: str, rng: np.random.Generator
) -> None:
    compare_latents(tokens, block_size, "holes", dtype, rng, skip, extra)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_without_rotary_numbers(put: Callable[[Any], Any], dtype: str, rng: np.random.Generator) -> None:
    kv_c, _ = draw_latents(rng, 5, dtype)
    slots = put(np.array([5, 2, -1, 0, 3], np.int64))
    caches = []
    for rope_dim in (0, 64):
        caches.append(put(np.full((2, 3, 656), 255, np.uint8)))
        k_pe = put(np.zeros((5, rope_dim), kv_c.dtype))
        cukern.concat_and_cache_mla(put(kv_c), k_pe, caches[-1], slots, SCALED, None)
    same_bits(caches[0], arrays.library_of(caches[1]).to_numpy(caches[1]))
    rotary = parts_of(caches[0])[2].view(np.uint16)
    assert not rotary[[0, 2, 3, 5]].any() and (rotary[[1, 4]] == 0xFFFF).all()


@pytest.mark.gpu
@settings(max_examples=20)
@given(st.data())
def test_latents_with_scales_of_random_sizes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens, block_size = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([1, 7, 16, 64, 80]))
    kind, dtype = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(DTYPES))
    skip, extra = data.draw(st.sampled_from([0, 0, 1, 4, 16])), data.draw(st.integers(0, 3))
    compare_latents(tokens, block_size, kind, dtype, rng, skip, extra)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_quotients_are_rounded_as_the_twin_rounds(dtype: str, rng: np.random.Generator) -> None:
    kv_c, k_pe = draw_latents(rng, 4000, dtype)
    got, slots = cupy.zeros((125, 32, 656), cupy.uint8), np.arange(4000)
    cukern.concat_and_cache_mla(cupy.asarray(kv_c), cupy.asarray(k_pe), got, cupy.asarray(slots), SCALED, None)
    want = np.zeros(got.shape, np.uint8)
    twin.concat_and_cache_mla(kv_c, k_pe, want, slots, SCALED, None)
    same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_a_slot_named_twice_holds_one_of_its_tokens(rng: np.random.Generator) -> None:
    tokens = 96
    new = np.broadcast_to(np.arange(tokens, dtype=np.float32)[:, None, None], (tokens, 2, 32)).copy()
    slots = rng.integers(0, 32, tokens)
    slots[:32], slots[40:72] = np.arange(32), np.arange(32)
    keys, values = Buffer((3, 2, 8, 16, 4), "float32"), Buffer((3, 2, 32, 16), "float32")
    moved = cupy.asarray(new)
    cukern.reshape_and_cache(moved, moved, keys.device, values.device, cupy.asarray(slots), "auto", None, None)
    by_slot = (
        cupy.asnumpy(keys.device).transpose(0, 3, 1, 2, 4).reshape(48, -1),
        cupy.asnumpy(values.device).transpose(0, 3, 1, 2).reshape(48, -1),
    )
    for cache in by_slot:
        for slot in range(32):
            assert set(cache[slot]) <= set(np.flatnonzero(slots == slot))
        assert (cache[32:].view(np.uint8) == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kind", "how"), [
    ("float16", "float16", "auto"), ("uint8", "uint8", "auto"), ("float32", "float32", "fp8"),
    ("bfloat16", "uint8", "fp8"), ("float32", "uint8", "fp8_e5m2"), ("float16", "uint8", "fp8_e4m3"),
])  # fmt: skip
@pytest.mark.parametrize(("batch", "entry", "block_size"), [
    (1, (576,), 16), (5, (2, 64), 16), (40, (3,), 5), (3000, (8,), 8), (3, (1100,), 16), (33, (4, 128), 64),
])  # fmt: skip
def test_gathering(
    batch: int, entry: tuple[int, ...], block_size: int, dtype: str, kind: str, how: str, rng: np.random.Generator
) -> None:
    lengths = rng.integers(0, 100 if batch < 100 else 3, batch) * (rng.random(batch) < 0.7)
    cu_seq_lens = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    src = rng.integers(0, 120, (60, block_size, *entry[:-1], entry[-1] * arrays.ITEM_SIZE[kind]), np.uint8)
    src = src.view(arrays.numpy_dtype(kind))
    starts = rng.integers(0, 40, batch).astype(np.int32) if batch != 5 else None
    table = rng.integers(0, 60, (batch, 140 // block_size + 2)).astype(np.int32)
    # One entry in ten lies outside of the cache, whether a token needs it or not.
    table[rng.random(table.shape) < 0.1] = 2147480000
    dst = Buffer((int(cu_seq_lens[-1]) + 5, *entry), dtype)
    wide = cupy.full((batch, table.shape[1] + 3), -1, cupy.int32)
    wide[:, : table.shape[1]] = cupy.asarray(table)
    options = {"kv_cache_dtype": how, "scale": np.float32(0.37)}
    given = [cupy.asarray(x) if x is not None else None for x in (cu_seq_lens, starts)]
    moved = wide[:, : table.shape[1]], given[0], batch, given[1]
    assert cukern.gather_cache(place(src), dst.device, *moved, **options) is None
    twin.gather_cache(src, dst.host, table, cu_seq_lens, batch, starts, **options)
    dst.check()


@pytest.mark.gpu
@pytest.mark.sanitize
def test_gathering_and_copying_with_bad_indices(rng: np.random.Generator) -> None:
    src, table = draw(rng, (6, 8, 24), "float16"), rng.integers(-(2**31), 2**31, (3, 4)).astype(np.int32)
    table[:, ::2] %= 6
    dst = Buffer((40, 24), "float16")
    lengths, moved_table = np.array([0, 20, 21, 200], np.int32), cupy.asarray(table)
    for some in ([0, 2**31 - 1, 9], [-5, -(2**31), 2**31 - 8], [3, -1, -19]):
        starts = np.array(some, np.int32)
        cukern.gather_cache(place(src), dst.device, moved_table, cupy.asarray(lengths), 3, cupy.asarray(starts))
        twin.gather_cache(src, dst.host, table, lengths, 3, starts)
        dst.check()
    cache = Buffer((6, 50), "uint8", 1)
    pairs = np.array([[0, 5], [2**40, 1], [1, -(2**63)], [6, 2], [2, 6], [1, 4]], np.int64)
    cache.host[:3] = cache.host[:3] + np.arange(3, dtype=np.uint8)[:, None]
    cache.device[...] = cupy.asarray(cache.host)
    cukern.copy_blocks([cache.device], [cupy.zeros((6, 50), cupy.uint8)], cupy.asarray(pairs))
    twin.copy_blocks([cache.host], [np.zeros((6, 50), np.uint8)], pairs)
    cache.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
@pytest.mark.parametrize("places", ["numpy cupy", "cupy numpy", "cupy cupy", "cpu cuda", "cuda cpu", "cuda numpy"])
def test_blocks_swapped_between_memories(places: str, dtype: str, rng: np.random.Generator) -> None:
    arrays_of: dict[str, Callable[[Array], Any]] = {
        "numpy": np.array,
        "cupy": cupy.asarray,
        "cpu": lambda x: as_torch(x).clone(),
        "cuda": lambda x: as_torch(x).cuda(),
    }
    src, dst = draw(rng, (8, 3, 5), dtype), draw(rng, (6, 3, 5), dtype)
    want, (first, second) = swapped(src, dst, PAIRS), places.split()
    got, moved = arrays_of[second](dst), arrays_of[first](src)
    if "cuda" in places:
        torch.cuda.synchronize()
    cukern.swap_blocks(moved, got, src[0].nbytes, torch.from_numpy(PAIRS))
    cupy.cuda.runtime.deviceSynchronize()
    same_bits(got.cpu() if second == "cuda" else got, want)


@pytest.mark.gpu
def test_a_swap_is_of_the_current_stream_and_of_a_graph() -> None:
    src, back = torch.zeros(8, 1 << 20, device="cuda"), torch.zeros(8, 1 << 20).pin_memory()
    mapping, block_bytes = torch.tensor([[0, 1], [1, 2], [5, 0]]), src[0].nbytes
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what follows must wait for it
        src.copy_(torch.arange(8.0, device="cuda")[:, None].expand_as(src))
        cukern.swap_blocks(src, back, block_bytes, mapping)
    stream.synchronize()
    assert back[:, 0].tolist() == back[:, -1].tolist() == [5, 0, 1, 0, 0, 0, 0, 0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cukern.swap_blocks(src, back, block_bytes, mapping)
    src += 10
    graph.replay()
    torch.cuda.synchronize()
    assert back[:3, 7].tolist() == [15, 10, 11]


@pytest.mark.gpu
def test_a_swap_with_its_mapping_on_the_device_is_refused() -> None:
    cache = cupy.zeros((4, 6), cupy.float32)
    with pytest.raises(ValueError, match="block_mapping must be in host memory, where it is read, got one on CUDA"):
        cukern.swap_blocks(cache, cache, 24, cupy.zeros((1, 2), cupy.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 32, 40])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((9, 3, 5), "float16"), ((9, 4, 16, 40), "float32"), ((9, 4099), "uint8")]
)
def test_copying_in_all_layers(layers: int, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    keys, values = ([rng.integers(0, 99, shape).astype(dtype) for _ in range(layers)] for _ in range(2))
    ours = [place(x) for x in keys], [place(x) for x in values]
    pairs = np.array([[0, 3], [1, 4], [1, 5], [8, 7]], np.int64)
    cukern.copy_blocks(*ours, cupy.asarray(pairs))
    twin.copy_blocks(keys, values, pairs)
    for got, want in zip((*ours[0], *ours[1]), (*keys, *values), strict=True):
        same_bits(got, want)


@pytest.mark.gpu
@pytest.mark.large(9)
def test_more_than_2_31_elements() -> None:
    """Blocks at the far end of a cache, which the rows of the call themselves do not fill."""
    # Not for the sanitizer, which would take minutes. 16384 elements in a block, so that the last ones lie far out.
    blocks = 2**17 + 100
    key, value = (torch.randn(40, 8, 128, device="cuda").half() for _ in range(2))
    slots = torch.arange(blocks * 16 - 40, blocks * 16, device="cuda")
    keys, values = (torch.empty(blocks, 16, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
    cukern.reshape_and_cache_flash(key, value, keys, values, slots, "auto", None, None)
    assert torch.equal(keys.view(-1, 8, 128)[-40:], key) and torch.equal(values.view(-1, 8, 128)[-40:], value)
    dst = torch.empty_like(key)
    table = torch.arange(blocks - 3, blocks, dtype=torch.int32, device="cuda")[None]
    lengths = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    cukern.gather_cache(keys, dst, table, lengths, 1)
    assert torch.equal(dst, keys[-3:].flatten(0, 1)[:40])
    pair = torch.tensor([[blocks - 1, blocks - 90]], device="cuda")
    cukern.copy_blocks([keys], [values], pair)
    assert torch.equal(keys[-90], keys[-1]) and torch.equal(values[-90], values[-1])
    by_head = keys.view(blocks, 8, 16, 16, 8), values.view(blocks, 8, 128, 16)
    for batch in (slots, slots.flip(0)):
        cukern.reshape_and_cache(key, value, *by_head, batch, "auto", None, None)
        order = slice(None) if batch is slots else torch.arange(39, -1, -1, device="cuda")
        last = by_head[0][-3:].permute(0, 3, 1, 2, 4).reshape(48, 8, 128), by_head[1][-3:].permute(0, 3, 1, 2)
        assert torch.equal(last[0][-40:], key[order])
        assert torch.equal(last[1].reshape(48, 8, 128)[-40:], value[order])
    del keys, values, by_head, last
    blocks = 2**31 // (64 * 656) + 100
    scaled, rows = torch.empty(blocks, 64, 656, dtype=torch.uint8, device="cuda"), torch.randn(40, 576, device="cuda")
    slots = torch.arange(blocks * 64 - 40, blocks * 64, device="cuda")
    cukern.concat_and_cache_mla(rows[:, :512], rows[:, 512:], scaled, slots, SCALED, None)
    near = torch.empty(1, 64, 656, dtype=torch.uint8, device="cuda")
    cukern.concat_and_cache_mla(rows[:, :512], rows[:, 512:], near, slots - (blocks - 1) * 64, SCALED, None)
    stored = near[0, -40:].clone()
    assert torch.equal(scaled[-1, -40:], stored)
    dst = torch.empty(2, 40, 576, device="cuda")
    for i, (cache, block) in enumerate(((scaled, blocks - 1), (near, 0))):
        table = torch.tensor([[block]], dtype=torch.int32, device="cuda")
        cache[block, :40] = stored
        cukern.gather_cache(cache, dst[i], table, lengths, 1, kv_cache_dtype=SCALED)
    assert torch.equal(dst[0], dst[1])
