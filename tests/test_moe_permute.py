"""Grouping tokens by expert: the twin against sorts and loops, the kernels against the twin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from benchmarks import bench_moe_permute, harness
from cukern.ops.moe_permute import choose as kernels
from cukern.ops.moe_permute import rows as of_rows
from cukern.ops.moe_permute import sorting
from cukern.reference import moe_permute as twin
from cukern.runtime import arrays, gpu
from cukern.runtime.cuda import cupy
from cukern.runtime.op import OPS, forget_plans
from tests.buffers import POISON, Buffer, OnlyDLPack, normal, on_gpu, place, same_bits
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
NAN = np.nan
DTYPES = ("float32", "float16", "bfloat16")


# --- inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A routing: `skew` is the share of ids that name the same expert; `local` experts are here."""

    tokens: int
    topk: int
    experts: int
    skew: float = 0.0
    local: int = 0  # 0: all, and no map
    ids: str = "int32"

    def draw(self, rng: np.random.Generator) -> tuple[Array, Array | None]:
        """The ids, some of which name no expert, and the map."""
        low = 0 if self.ids == "uint32" else -1
        ids = rng.integers(low, self.experts + 1, (self.tokens, self.topk))
        ids[rng.random(ids.shape) < self.skew] = self.experts // 2
        expert_map = None
        if self.local:
            expert_map = np.full(self.experts, -1, np.int32)
            expert_map[rng.permutation(self.experts)[: self.local]] = rng.permutation(self.local)
        return ids.astype(self.ids), expert_map


def sort_options(case: Case, expert_map: Any) -> dict[str, Any]:
    return {} if expert_map is None else {"expert_map": expert_map, "num_local_experts": case.local}


# --- worked examples ----------------------------------------------------------------------------------

# Three tokens of two slots: expert 0 has pair 2, expert 1 pair 5, expert 3 pairs 0 and 4; 1 and 3 name none.
IDS = np.array([[3, 4], [0, -1], [3, 1]], np.int32)


def test_the_sort_by_hand(put: Callable[[Any], Any]) -> None:
    for dtype in sorting.ID_DTYPES[:2]:
        offsets, row_token, inverse = cukern.moe_sort(put(IDS.astype(dtype)), 4)
        same_bits(offsets, np.array([0, 1, 2, 2, 4], np.int32))
        same_bits(row_token, np.array([1, 2, 0, 2, 0, 0], np.int32))
        same_bits(inverse, np.array([[2, -1], [0, -1], [3, 1]], np.int32))


def test_the_sort_with_a_map_by_hand(put: Callable[[Any], Any]) -> None:
    # Experts 3 and 1 are here, as 0 and 1; the 7 in the map is no local expert.
    expert_map = put(np.array([7, 1, -1, 0], np.int32))
    offsets, row_token, inverse = cukern.moe_sort(put(IDS), 4, expert_map=expert_map, num_local_experts=2)
    same_bits(offsets, np.array([0, 2, 3], np.int32))
    same_bits(row_token, np.array([0, 2, 2, 0, 0, 0], np.int32))
    same_bits(inverse, np.array([[0, -1], [-1, -1], [1, 2]], np.int32))


def test_the_batched_sort_by_hand(put: Callable[[Any], Any]) -> None:
    counts, positions = cukern.moe_sort_batched(put(IDS), 4, 2)
    same_bits(counts, np.array([1, 1, 0, 2], np.int32))
    same_bits(positions, np.array([[6, -1], [0, -1], [7, 2]], np.int32))
    # Each expert has one row, so the second pair of expert 3 is left out.
    expert_map = put(np.array([7, 1, -1, 0], np.int32))
    out = put(np.full(2, 9, np.int32)), put(np.full((3, 2), 9, np.int32))
    options = {"expert_map": expert_map, "num_local_experts": 2, "out": out}
    assert cukern.moe_sort_batched(put(IDS), 4, 1, **options) is out
    same_bits(out[0], np.array([1, 1], np.int32))
    same_bits(out[1], np.array([[0, -1], [-1, -1], [-1, 1]], np.int32))


def test_blocks_by_hand(put: Callable[[Any], Any]) -> None:
    ids, expert_map = put(IDS), put(np.array([-1, 1, -1, 0], np.int32))
    rows = 6 + 4 * 2
    sorted_ids = np.array([2, 6, 6, 5, 6, 6, 0, 4] + [6] * (rows - 8), np.int32)
    for mapping, names in ((None, [0, 1, 3]), (expert_map, [-1, 1, 0])):
        got = cukern.moe_align_block_size(ids, 3, 4, mapping)
        same_bits(got[0], sorted_ids)
        same_bits(got[1], np.array([*names, -1, -1], np.int32))
        same_bits(got[2], np.array([9], np.int32))
    got = cukern.moe_align_block_size(ids, 3, 4, expert_map, True, ignore_invalid_experts=True)
    same_bits(got[0], np.array([0, 4, 6, 5] + [6] * 11, np.int32))
    same_bits(got[1], np.array([0, 1, -1, -1, -1], np.int32))
    same_bits(got[2], np.array([6], np.int32))
    # Into longer arrays, which are filled.
    out = tuple(put(np.full(n, 77, np.int32)) for n in (rows + 2, 8, 1))
    assert cukern.moe_align_block_size(ids, 3, 4, out=out) is out
    for array, want in zip(out, ([*sorted_ids, 6, 6], [0, 1, 3, *[-1] * 5], [9]), strict=True):
        same_bits(array, np.array(want, np.int32))


def test_rows_by_hand(put: Callable[[Any], Any]) -> None:
    hidden = np.array([[1, 10], [2, 20], [3, 30]], np.float32)
    scale = np.array([[0.5], [0.25], [2]], np.float32)
    permuted, scales, offsets, inverse, m_indices = cukern.moe_permute(put(hidden), put(scale), put(IDS), 4)
    same_bits(permuted[:4], hidden[[1, 2, 0, 2]])
    same_bits(scales[:4], scale[[1, 2, 0, 2]])
    same_bits(offsets, np.array([0, 1, 2, 2, 4], np.int64))
    same_bits(inverse, np.array([2, -1, 0, -1, 3, 1], np.int32))
    assert m_indices is None
    weights = put(np.array([[2, NAN], [0.5, NAN], [1, 3]], np.float32))
    out = put(np.full((3, 2), NAN, np.float32))
    assert cukern.moe_unpermute(out, permuted, weights, inverse, offsets) is out
    same_bits(out, np.array([[2, 20], [1, 10], [12, 120]], np.float32))
    cukern.moe_unpermute(out, permuted, None, inverse)
    same_bits(out, np.array([[1, 10], [2, 20], [6, 60]], np.float32))
    # A row at the end of all rows adds nothing.
    cukern.moe_unpermute(out, permuted, None, inverse, offsets[:4])
    same_bits(out, np.array([[0, 0], [2, 20], [3, 30]], np.float32))


def test_aligned_rows_by_hand(put: Callable[[Any], Any]) -> None:
    hidden = np.array([[1, 10], [2, 20], [3, 30]], np.float32)
    for out in (None, put(np.full((15, 2), -7, np.float32))):
        got = cukern.moe_permute(put(hidden), None, put(IDS), 4, -1, None, 3, -5, out)
        assert out is None or got[0] is out
        assert got[1] is None
        same_bits(got[2], np.array([0, 3, 6, 6, 9], np.int64))
        same_bits(got[3], np.array([6, -1, 0, -1, 7, 3], np.int32))
        same_bits(got[4], np.array([0, 0, 0, 1, 1, 1, 3, 3, 3, -5, -5, -5, -5, -5, -5], np.int32))
        same_bits(got[0][[0, 3, 6, 7]], hidden[[1, 2, 0, 2]])
        if out is not None:
            same_bits(got[0][[1, 2, 4, 5, *range(8, 15)]], np.full((11, 2), -7, np.float32))


def test_a_scale_of_the_whole_tensor_is_returned(put: Callable[[Any], Any]) -> None:
    for scale in (np.ones(1, np.float32), np.ones((), np.float32)):
        scale = put(scale)
        assert cukern.moe_permute(put(np.ones((3, 2), np.float32)), scale, put(IDS), 4)[1] is scale


def test_sums_are_rounded_in_turn(put: Callable[[Any], Any]) -> None:
    # 2**24 + 1 is not a float32: added one after the other the ones are rounded away, added first they are not.
    rows = np.array([[[2**24], [1], [1]]], np.float32)
    same_bits(cukern.moe_sum(put(rows)), np.array([[2**24]], np.float32))
    same_bits(cukern.moe_sum(put(rows[:, ::-1].copy())), np.array([[2**24 + 2]], np.float32))
    halves = np.array([[[1], [2**-8], [2**-8]]], arrays.numpy_dtype("bfloat16"))
    same_bits(cukern.moe_sum(put(halves)), np.array([[1 + 2**-7]], halves.dtype))
    out = put(np.full((1, 1), NAN, np.float32))
    assert cukern.moe_sum(put(rows), out) is out
    same_bits(out, np.array([[2**24]], np.float32))


def test_nothing(put: Callable[[Any], Any]) -> None:
    for tokens, topk, hidden in ((0, 2, 6), (3, 2, 0)):
        ids = put(np.full((tokens, topk), -1, np.int32))
        offsets, row_token, inverse = cukern.moe_sort(ids, 5)
        same_bits(offsets, np.zeros(6, np.int32))
        same_bits(row_token, np.zeros(tokens * topk, np.int32))
        same_bits(inverse, np.full((tokens, topk), -1, np.int32))
        sorted_ids, expert_ids, end = cukern.moe_align_block_size(ids, 4, 5)
        same_bits(sorted_ids, np.full(tokens * topk if not tokens else 6 + 15, tokens * topk, np.int32))
        same_bits(expert_ids, np.full(0 if not tokens else 6, -1, np.int32))
        same_bits(end, np.zeros(1, np.int32))
        x, scale = put(np.ones((tokens, hidden), np.float32)), put(np.ones((tokens, 2), np.float32))
        for align in (None, 4):
            got = cukern.moe_permute(x, scale, ids, 5, align_block_size=align)
            assert got[0].shape == ((tokens * topk if align is None else -(-(tokens * topk + 15) // 4) * 4), hidden)
            same_bits(got[2], np.zeros(6, np.int64))
        assert cukern.permute_rows(x, inverse).shape == (tokens * topk, hidden)
        assert cukern.permute_rows(x, inverse.reshape(-1), 0).shape == (0, hidden)
        out = put(np.full((tokens, hidden), NAN, np.float32))
        assert cukern.moe_unpermute(out, x, put(np.ones((tokens, topk), np.float32)), got[3]) is out
        assert cukern.moe_sum(put(np.ones((tokens, topk, hidden), np.float32))).shape == (tokens, hidden)
    out = put(np.full((2, 3), NAN, np.float32))
    cukern.moe_unpermute(out, put(np.ones((0, 3), np.float32)), None, put(np.zeros((2, 2), np.int32)))
    same_bits(out, np.zeros((2, 3), np.float32))
    same_bits(cukern.moe_sum(put(np.ones((2, 0, 3), np.float32))), np.zeros((2, 3), np.float32))


# --- the twin against torch's sort, and loops ---------------------------------------------------------------


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 7), st.booleans(), st.integers(0, 2**31))
def test_the_sort_is_torchs(tokens: int, topk: int, experts: int, mapped: bool, seed: int) -> None:
    case = Case(tokens, topk, experts, local=max(1, experts // 2) if mapped else 0)
    ids, expert_map = case.draw(np.random.default_rng(seed))
    local = case.local or experts
    numbers = [(-1 if not 0 <= i < experts else i if expert_map is None else int(expert_map[i])) for i in ids.ravel()]
    keys = torch.tensor([n if n >= 0 else local for n in numbers], dtype=torch.int64)
    order = torch.sort(keys, stable=True).indices
    counts = torch.bincount(keys, minlength=local + 1)[:local]
    end = int(counts.sum())
    offsets, row_token, inverse = cukern.moe_sort(ids, experts, **sort_options(case, expert_map))
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    assert row_token.tolist() == [*(order[:end] // topk).tolist(), *[0] * (tokens * topk - end)]
    want = torch.full((tokens * topk,), -1)
    want[order[:end]] = torch.arange(end)
    assert inverse.ravel().tolist() == want.tolist()


@given(
    st.integers(0, 12), st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.integers(0, 2**31)
)
def test_the_blocks_are_those_of_a_loop(
    tokens: int, topk: int, experts: int, block_size: int, pad: bool, seed: int
) -> None:
    ids, _ = Case(tokens, topk, experts).draw(np.random.default_rng(seed))
    wanted_ids: list[int] = []
    wanted_experts: list[int] = []
    for expert in range(experts):
        pairs = np.flatnonzero(ids.ravel() == expert).tolist()
        pairs += [ids.size] * (-len(pairs) % block_size)
        wanted_ids += pairs
        wanted_experts += [expert] * (len(pairs) // block_size)
    sorted_ids, expert_ids, end = cukern.moe_align_block_size(ids, block_size, experts, None, pad)
    assert end.tolist() == [len(wanted_ids)]
    assert sorted_ids.tolist() == wanted_ids + [ids.size] * (len(sorted_ids) - len(wanted_ids))
    assert expert_ids.tolist() == wanted_experts + [-1] * (len(expert_ids) - len(wanted_experts))
    assert len(expert_ids) == -(-len(sorted_ids) // block_size)
    if pad and ids.size >= experts:
        assert len(sorted_ids) % block_size == 0


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 7), st.integers(1, 6), st.integers(0, 2**31))
def test_the_batches_are_those_of_a_loop(tokens: int, topk: int, experts: int, max_tokens: int, seed: int) -> None:
    ids, _ = Case(tokens, topk, experts).draw(np.random.default_rng(seed))
    taken = [0] * experts
    wanted = []
    for expert in ids.ravel().tolist():
        there = 0 <= expert < experts and taken[expert] < max_tokens
        wanted.append(expert * max_tokens + taken[expert] if there else -1)
        taken[expert if there else 0] += there
    counts, positions = cukern.moe_sort_batched(ids, experts, max_tokens)
    assert counts.tolist() == taken
    assert positions.ravel().tolist() == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("align", [None, 4])
def test_a_layer_through_its_rows(dtype: str, align: int | None, rng: np.random.Generator) -> None:
    """With experts that multiply by a constant, the way there and back gives the weighted sum of their products."""
    tokens, topk, experts, hidden = 11, 3, 5, 12
    ids = torch.from_numpy(rng.integers(-1, experts, (tokens, topk)))
    x = torch.from_numpy(normal(rng, (tokens, hidden), "float32")).to(getattr(torch, dtype))
    weights = torch.from_numpy(rng.random((tokens, topk), np.float32))
    permuted, _, offsets, inverse, _ = cukern.moe_permute(x, None, ids, experts, align_block_size=align)
    for expert in range(experts):
        permuted[offsets[expert] : offsets[expert + 1]] *= expert + 1
    out = torch.empty_like(x)
    cukern.moe_unpermute(out, permuted, weights, inverse, offsets)
    factors = torch.where(ids >= 0, weights * (ids + 1), 0).sum(1)
    torch.testing.assert_close(out.float(), x.float() * factors[:, None], rtol=2e-2, atol=2e-2)
    slots = torch.where(ids[..., None] >= 0, x[:, None] * (ids[..., None] + 1), 0).to(x.dtype)
    torch.testing.assert_close(cukern.moe_sum(slots).float(), slots.float().sum(1), rtol=1e-2, atol=1e-2)


# --- arrays of every library, in host memory --------------------------------------------------------------


def test_results_go_into_out(rng: np.random.Generator) -> None:
    out = np.full(5, -7, np.int32), np.full(6, -7, np.int32), np.full((3, 2), -7, np.int32)
    assert cukern.moe_sort(IDS, 4, out=out) is out
    for got, want in zip(out, cukern.moe_sort(IDS, 4), strict=True):
        same_bits(got, want)
    x = torch.from_numpy(normal(rng, (3, 4), "float32"))
    inverse = torch.tensor([[2, -1], [0, 9], [3, 1]], dtype=torch.int32)
    rows = torch.full((5, 4), 7.0)
    assert cukern.permute_rows(x, inverse, 5, out=rows) is rows
    assert torch.equal(rows, torch.cat([x[[1, 2, 0, 2]], torch.full((1, 4), 7.0)]))
    assert torch.equal(cukern.permute_rows(x.bfloat16(), inverse.flatten(), 4), x[[1, 2, 0, 2]].bfloat16())


# --- bad arguments --------------------------------------------------------------------------------------

SORT, BATCHED, ALIGN, ROWS, PERMUTE, UNPERMUTE, SUM = (
    "moe_sort", "moe_sort_batched", "moe_align_block_size", "permute_rows", "moe_permute", "moe_unpermute", "moe_sum",
)  # fmt: skip


def good_arguments(name: str) -> dict[str, Any]:
    x, f32 = np.zeros((3, 4), np.float32), np.float32
    arguments: dict[str, dict[str, Any]] = {
        SORT: {"topk_ids": IDS, "num_experts": 4},
        BATCHED: {"topk_ids": IDS, "num_experts": 4, "max_tokens": 3},
        ALIGN: {"topk_ids": IDS, "block_size": 4, "num_experts": 4},
        ROWS: {"hidden_states": x, "inverse": np.arange(6, dtype=np.int32).reshape(3, 2)},
        PERMUTE: {"hidden_states": x, "a1q_scale": np.zeros((3, 2), f32), "topk_ids": IDS, "n_expert": 4},
        UNPERMUTE: {
            "out": x.copy(), "permuted_hidden_states": np.zeros((6, 4), f32), "topk_weights": np.zeros((3, 2), f32),
            "inv_permuted_idx": np.arange(6, dtype=np.int32), "expert_first_token_offset": np.zeros(5, np.int64),
        },
        SUM: {"input": np.zeros((3, 2, 4), f32)},
    }  # fmt: skip
    return arguments[name]


F32, I32 = np.float32, np.int32
ANYTHING = "an array (NumPy, CuPy, torch, or any with __dlpack__), got list"


def _bad_ids_and_experts() -> Iterator[Any]:
    """Calls of all that sort: function, changed arguments, error, message."""
    for name in (SORT, BATCHED, ALIGN, PERMUTE):
        experts = "n_expert" if name == PERMUTE else "num_experts"
        if name != PERMUTE:
            yield name, {"topk_ids": [[1]]}, TypeError, f"topk_ids must be {ANYTHING}"
        yield (
            name,
            {"topk_ids": IDS.astype(np.int16)},
            TypeError,
            "topk_ids must be int32 or int64 or uint32, got int16",
        )
        yield name, {"topk_ids": IDS[0]}, ValueError, "topk_ids must be of shape [tokens, topk], got [2]"
        yield name, {"topk_ids": IDS[:, :0]}, ValueError, "topk_ids must be of at least one expert for each token, got"
        yield name, {"topk_ids": IDS.T.copy().T}, ValueError, "topk_ids must be contiguous, got strides (1, 3)"
        yield name, {experts: 0}, ValueError, f"{experts} must be an integer in [1, 4096], got 0"
        yield name, {experts: 4097}, ValueError, f"{experts} must be an integer in [1, 4096], got 4097"
        yield name, {experts: 4.0}, TypeError, f"{experts} must be an integer in [1, 4096], got 4.0 (float)"
        more = {"num_local_experts": 2} if name in (SORT, BATCHED) else {}
        short = f"expert_map must be of shape [{experts}] = [4], got [3]"
        yield name, {"expert_map": np.zeros(3, I32), **more}, ValueError, short
        yield name, {"expert_map": np.zeros(4, np.int64), **more}, TypeError, "expert_map must be int32, got int64"
        yield name, {"expert_map": torch.zeros(4), **more}, TypeError, "expert_map must be a NumPy array like topk_ids"
        host = "variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got 'counted'"
        yield name, {"variant": "counted"}, ValueError, host
        names = "variant must be one of 'auto', 'one_block', 'many_blocks', 'counted', 'chunks', 'clusters', got 'fast'"
        yield name, {"variant": "fast"}, ValueError, names


def _bad_sorts() -> Iterator[Any]:
    for name in (SORT, BATCHED):
        wanted = "num_local_experts must be given with expert_map, got None"
        yield name, {"expert_map": np.zeros(4, I32)}, TypeError, wanted
        for value in (0, 5):
            wanted = f"num_local_experts must be an integer in [1, 4] (num_experts), got {value}"
            yield name, {"num_local_experts": value}, ValueError, wanted
    for value in (0, 2**28 + 1):
        wanted = f"max_tokens must be an integer in [1, 268435456], got {value}"
        yield BATCHED, {"max_tokens": value}, ValueError, wanted
    yield BATCHED, {"out": [IDS]}, TypeError, "out must be a pair (expert_num_tokens, positions), got list"
    batched = [np.zeros(4, I32), np.zeros((3, 2), I32)]
    yield BATCHED, {"out": [batched[1], batched[1]]}, ValueError, "out[0] must be of shape [experts] = [4], got [3, 2]"
    triple = [np.zeros(5, I32), np.zeros(6, I32), np.zeros((3, 2), I32)]
    wanted = "out must be a triple (expert_offsets, row_token, inverse), got"
    yield SORT, {"out": triple[:2]}, TypeError, f"{wanted} list"
    yield SORT, {"out": triple[0]}, TypeError, f"{wanted} ndarray"
    yield SORT, {"out": [triple[1], *triple[1:]]}, ValueError, "out[0] must be of shape [experts + 1] = [5], got [6]"
    yield SORT, {"out": [*triple[:2], triple[2].astype(np.int64)]}, TypeError, "out[2] must be int32, got int64"
    aligned = [np.zeros(n, I32) for n in (18, 5, 1)]
    wanted = "out must be a triple (sorted_token_ids, expert_ids, num_tokens_post_pad), got"
    yield ALIGN, {"out": aligned[:2]}, TypeError, f"{wanted} list"
    yield ALIGN, {"out": [aligned[0][:17], *aligned[1:]]}, ValueError, "out[0] must be of at least 18 elements, got 17"
    yield ALIGN, {"out": [aligned[0], aligned[2], aligned[2]]}, ValueError, "out[1] must be of at least 4 elements, got"
    yield ALIGN, {"out": [*aligned[:2], aligned[1]]}, ValueError, "out[2] must be of 1 elements, got 5"
    yield ALIGN, {"out": [*aligned[:2], aligned[2][0]]}, TypeError, "out[2] must be a NumPy array like topk_ids, got"
    yield ALIGN, {"out": [aligned[0], aligned[1].astype(F32), aligned[2]]}, TypeError, "out[1] must be int32, got"
    yield ALIGN, {"out": [np.zeros(36, I32)[::2], *aligned[1:]]}, ValueError, "out[0] must be contiguous, got strides"
    yield (
        ALIGN,
        {"out": [np.zeros((9, 2), I32), *aligned[1:]]},
        ValueError,
        "out[0] must be of shape [rows], got [9, 2]",
    )
    for value in (0, 2**15 + 1):
        yield ALIGN, {"block_size": value}, ValueError, f"block_size must be an integer in [1, 32768], got {value}"
    yield ALIGN, {"block_size": 4.0}, TypeError, "block_size must be an integer in [1, 32768], got 4.0 (float)"


def _bad_rows() -> Iterator[Any]:
    for name in (ROWS, PERMUTE):
        yield name, {"hidden_states": [1.0]}, TypeError, f"hidden_states must be {ANYTHING}"
        yield name, {"hidden_states": np.zeros((3, 4), complex)}, TypeError, "hidden_states must be float32 or"
        yield name, {"hidden_states": np.zeros(3, F32)}, ValueError, "hidden_states must be of shape [tokens, hidden]"
        strides = "hidden_states must be contiguous along its last dimension, got strides (1, 3)"
        yield name, {"hidden_states": np.zeros((4, 3), F32).T}, ValueError, strides
    both = "inverse must be of shape [tokens, topk] or [tokens * topk]"
    yield ROWS, {"inverse": np.zeros((2, 3), I32)}, ValueError, f"{both} = [3, 3], got [2, 3]"
    yield ROWS, {"inverse": np.zeros(4, I32)}, ValueError, f"{both} = [3, 1], got [4]"
    yield ROWS, {"inverse": np.zeros((3, 2), np.int64)}, TypeError, "inverse must be int32, got int64"
    yield ROWS, {"inverse": [0]}, TypeError, "inverse must be a NumPy array like hidden_states, got builtins.list"
    yield ROWS, {"rows": -1}, ValueError, "rows must be an integer in [0, 1073741824], got -1"
    yield ROWS, {"rows": 6.0}, TypeError, "rows must be an integer in [0, 1073741824], got 6.0 (float)"
    yield ROWS, {"out": np.zeros((5, 4), F32)}, ValueError, "out must be of shape [rows, hidden] = [6, 4], got [5, 4]"
    yield ROWS, {"out": np.zeros((6, 4))}, TypeError, "out must be float32, got float64"


def _bad_permutations() -> Iterator[Any]:
    yield PERMUTE, {"topk_ids": IDS[:2]}, ValueError, "topk_ids must be of shape [tokens, topk] = [3, 2], got [2, 2]"
    yield PERMUTE, {"topk_ids": torch.from_numpy(IDS)}, TypeError, "topk_ids must be a NumPy array like hidden_states"
    wanted = "a1q_scale must be of shape [tokens, groups] = [3, 2], got [2, 2]"
    yield PERMUTE, {"a1q_scale": np.zeros((2, 2), F32)}, ValueError, wanted
    yield PERMUTE, {"a1q_scale": np.zeros((3, 2))}, TypeError, "a1q_scale must be float32 or int32, got float64"
    yield (
        PERMUTE,
        {"a1q_scale": 1.0},
        TypeError,
        "a1q_scale must be a NumPy array like hidden_states, got builtins.float",
    )
    for value in (0, 5):
        wanted = f"n_local_expert must be an integer in [1, 4] (n_expert), got {value}"
        yield PERMUTE, {"n_local_expert": value}, ValueError, wanted
    wanted = "align_block_size must be an integer in [1, 32768], got 0"
    yield PERMUTE, {"align_block_size": 0}, ValueError, wanted
    wanted = "fill_invalid_expert must be an integer in [-2147483648, 2147483647], got 0.5 (float)"
    yield PERMUTE, {"align_block_size": 2, "fill_invalid_expert": 0.5}, TypeError, wanted
    wanted = "permuted_hidden_states must be of shape [rows, hidden] = [6, 4], got [5, 4]"
    yield PERMUTE, {"permuted_hidden_states": np.zeros((5, 4), F32)}, ValueError, wanted


def _bad_sums() -> Iterator[Any]:
    yield UNPERMUTE, {"out": [0.0]}, TypeError, f"out must be {ANYTHING}"
    yield UNPERMUTE, {"out": np.zeros((3, 4), I32)}, TypeError, "out must be float32 or float16 or bfloat16, got int32"
    yield UNPERMUTE, {"out": np.zeros((4, 3), F32).T}, ValueError, "out must be contiguous, got strides (1, 3)"
    name = "permuted_hidden_states"
    yield UNPERMUTE, {name: np.zeros((6, 4), np.float16)}, TypeError, f"{name} must be float32, got float16"
    yield UNPERMUTE, {name: np.zeros((6, 5), F32)}, ValueError, f"{name} must be of shape [rows, hidden] = [6, 4], got"
    yield UNPERMUTE, {name: np.zeros(6, F32)}, ValueError, f"{name} must be of shape [rows, hidden], got [6]"
    wanted = "topk_weights must be of shape [tokens, topk] = [3, 2], got [3, 3]"
    yield UNPERMUTE, {"topk_weights": np.zeros((3, 3), F32)}, ValueError, wanted
    yield UNPERMUTE, {"topk_weights": np.zeros((3, 2))}, TypeError, "topk_weights must be float32, got float64"
    wanted = "inv_permuted_idx must be of shape [tokens, topk] or [tokens * topk] = [3, 1], got [5]"
    yield UNPERMUTE, {"inv_permuted_idx": np.zeros(5, I32)}, ValueError, wanted
    name = "expert_first_token_offset"
    yield UNPERMUTE, {name: np.zeros(0, I32)}, ValueError, f"{name} must be of shape [experts + 1], got [0]"
    yield UNPERMUTE, {name: np.zeros(5, F32)}, TypeError, f"{name} must be int64 or int32, got float32"
    yield SUM, {"input": np.zeros((3, 2), F32)}, ValueError, "input must be of shape [tokens, topk, hidden], got [3, 2]"
    yield SUM, {"input": np.zeros((2, 3, 4), F32).swapaxes(0, 1)}, ValueError, "input must be contiguous, got strides"
    yield SUM, {"output": np.zeros((3, 5), F32)}, ValueError, "output must be of shape [tokens, hidden] = [3, 4], got"
    for name in (UNPERMUTE, SUM):
        host = "variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got 'dynamic'"
        yield name, {"variant": "dynamic"}, ValueError, host
        yield (
            name,
            {"variant": "fast"},
            ValueError,
            "variant must be one of 'auto', 'specialized', 'dynamic', got 'fast'",
        )


BAD_CALLS = [*_bad_ids_and_experts(), *_bad_sorts(), *_bad_rows(), *_bad_permutations(), *_bad_sums()]


@pytest.mark.parametrize(("name", "changes", "error", "message"), BAD_CALLS)
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = good_arguments(name)
    getattr(cukern, name)(**arguments)
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)


# --- the choice of a variant ------------------------------------------------------------------------------


@given(
    st.integers(0, kernels.MAX_PAIRS),
    st.integers(1, sorting.MAX_EXPERTS),
    st.integers(0, sorting.MAX_EXPERTS),
    st.booleans(),
)
def test_the_blocks_of_a_sort_cover_all_pairs(pairs: int, experts: int, mapped: int, one_block: bool) -> None:
    for capacity in (0, pairs, twin.aligned_rows(pairs, experts, 16, True)):
        split = kernels.split_pairs(experts, mapped, one_block, 1024, pairs, capacity)
        per_block, per_warp, warps = split.pairs_per_block, split.pairs_per_warp, split.warps
        assert (split.blocks - 1) * per_block < max(pairs, 1) <= split.blocks * per_block
        assert (split.blocks > 1) == (not one_block and pairs > kernels._PAIRS_PER_BLOCK)
        assert 1 <= warps <= split.threads // 32 and per_warp * warps >= per_block and per_warp % 32 == 0
        assert split.threads % 32 == 0 and split.threads <= 1024
        assert split.shared_bytes <= kernels._MAX_SHARED_BYTES
        assert 4 * ((3 + warps) * (experts + 1) + (mapped + 1 if mapped else 0)) <= split.shared_bytes
        assert split.blocks == 1 or not split.rows_in_shared
        assert (split.blocks - 1) * per_block + warps * per_warp < 2**31


@given(st.integers(1, 2**20), st.integers(1, of_rows.MAX_HIDDEN // 16), st.sampled_from([(256, 4), (256, 1), (128, 1)]))
def test_tiles_cover_all_rows(tokens: int, columns: int, shape: tuple[int, int]) -> None:
    threads, items = shape
    tiles = kernels.tile_rows(tokens, columns, threads, items)
    tile_columns, chunks = tiles.tiling["tile_columns"], tiles.tiling["tiles"]
    x, y = tiles.threads
    assert x * y <= threads and x * items >= tile_columns
    assert (chunks - 1) * tile_columns < columns <= chunks * tile_columns
    assert tiles.blocks % chunks == 0 and (tiles.blocks // chunks - 1) * y < tokens <= tiles.blocks // chunks * y


@given(st.integers(1, 2**14), st.integers(1, 2**10), st.integers(0, 9))
def test_blocks_cover_all_tokens(tokens: int, hidden: int, few: int) -> None:
    for count in (tokens, few + 1):
        (launched,) = steps_of("moe_sum", np.empty((count, 1, hidden), np.float32))
        chunks = launched.fields["tiling"]["tiles"]
        blocks, (_, y, _) = launched.grid[0], launched.block
        assert blocks % chunks == 0 and (blocks // chunks - 1) * y < count <= blocks // chunks * y


def steps_of(name: str, *args: Any, **options: Any) -> list[Any]:
    """The launches of a call on an H200."""
    return plan_of(name, *args, **options)[0].steps


def sizes_of(name: str, *args: Any, **options: Any) -> list[tuple[int, ...]]:
    """The grids, blocks and shared bytes of the launches of a call."""
    return [(step.grid[0], *step.block[:2], step.shared_bytes) for step in steps_of(name, *args, **options)]


def test_the_launches_of_a_sort_follow_the_number_of_tokens() -> None:
    for mapped in (0, 64):
        options = {"expert_map": np.zeros(64, np.int32), "num_local_experts": 64} if mapped else {}
        # By sort_chunks: chunks of 32 pairs that a block ranks, and blocks of a cluster.
        for counts, chunks, cluster in (
            ((0, 1, 5, 64), 16, 1),
            ((65, 66, 256), 64, 1),
            ((257, 300, 4096, 8192), 16, 8),
        ):
            for tokens in counts:
                split = kernels.split_chunks(64, mapped, chunks, cluster, tokens * 8, tokens * 8)
                args = "moe_sort", np.empty((tokens, 8), np.int32), 64
                assert sizes_of(*args, **options) == [(split.blocks, split.threads, 1, split.shared_bytes)]
                assert steps_of(*args, **options)[0].variant.instance.arguments[2:] == (chunks, cluster)
        for variant, counts in (("one_block", (0, 1, 5, 5000)), ("auto", (8193, 9000, 2**20))):
            for tokens in counts:
                split = kernels.split_pairs(64, mapped, variant == "one_block", 1024, tokens * 8, tokens * 8)
                ids = np.empty((tokens, 8), np.int32)
                *counting, sorting = sizes_of("moe_sort", ids, 64, **options, variant=variant)
                assert sorting == (split.blocks, split.threads, 1, split.shared_bytes)
                counted = [(split.blocks, 1024, 1, 4 * (66 + mapped + (mapped > 0)) - 4)]
                assert counting == ([] if variant == "one_block" else counted)


@given(
    st.integers(0, kernels._CLUSTERED_PAIRS),
    st.integers(1, kernels._CHUNKED_EXPERTS),
    st.integers(0, sorting.MAX_EXPERTS),
    st.sampled_from([(16, 1), (64, 1), (16, 8)]),
)
def test_the_chunks_of_a_sort_cover_all_pairs(pairs: int, experts: int, mapped: int, form: tuple[int, int]) -> None:
    chunks, cluster = form
    pairs = min(pairs, 32 * chunks) if cluster == 1 else pairs
    split = kernels.split_chunks(experts, mapped, chunks, cluster, pairs, pairs)
    turns = chunks // 16
    assert split.threads % 32 == 0 and max(experts, 1) <= split.threads <= 512
    assert split.threads * turns * (split.blocks if cluster > 1 else 1) >= pairs
    assert split.blocks % cluster == 0 and split.blocks * kernels._ROWS_PER_BLOCK >= (pairs if cluster == 1 else 0)


def test_what_sort_chunks_does_not_take_is_sorted_by_sort_pairs() -> None:
    def of(name: str, *args: Any, **options: Any) -> tuple[str, tuple[Any, ...]]:
        instance = steps_of(name, *args, **options)[-1].variant.instance
        return instance.function, instance.arguments

    few, many = np.zeros((9, 8), np.int32), np.zeros((9000, 8), np.int32)
    assert of("moe_sort", few, 512) == ("sort_chunks", ("unsigned", 9, 16, 1))
    assert of("moe_sort", few.astype(np.int64), 32) == ("sort_chunks", ("unsigned long long", 5, 16, 1))
    assert of("moe_align_block_size", few, 16, 256) == ("sort_chunks", ("unsigned", 8, 16, 1))
    for name, args in (("moe_sort", (few, 513)), ("moe_sort", (many, 512))):
        assert of(name, *args)[0] == "sort_pairs"
        for variant in ("chunks", "clusters"):
            if variant == "clusters" or args[0] is many or args[1] > 512:
                with pytest.raises(ValueError, match=f"variant must be .*, got '{variant}' with"):
                    of(name, *args, variant=variant)
    assert of("moe_sort", few, 8, variant="clusters") == ("sort_chunks", ("unsigned", 5, 16, 8))
    assert of("moe_permute", np.zeros((9, 64), np.float16), None, few, 64)[0] == "permute_rows"
    # The map, with counts for many chunks of many experts, is more than fits a block.
    mapping = {"expert_map": np.zeros(4096, np.int32), "num_local_experts": 512}
    assert of("moe_sort", np.zeros((200, 8), np.int32), 4096, **mapping)[1][2:] == (16, 8)


def test_a_block_has_threads_for_few_rows() -> None:
    def sizes(tokens: int) -> list[tuple[int, ...]]:
        return sizes_of("permute_rows", np.zeros((tokens, 64), np.float16), np.zeros((tokens, 2), np.int32))

    # A row is 8 units, and a block takes 32 rows.
    assert [sizes(tokens) for tokens in (1, 31)] == [[(1, 8, 1, 0)], [(1, 8, 31, 0)]]
    assert [sizes(tokens) for tokens in (32, 33)] == [[(1, 8, 32, 0)], [(2, 8, 32, 0)]]
    assert not sizes(0)


def test_a_permutation_is_one_plan() -> None:
    x, ids, scale = np.zeros((600, 64), np.float16), np.zeros((600, 8), np.int32), np.zeros((600, 4), np.float32)
    for variant, count in (("auto", 2), ("counted", 3)):
        trace, _ = plan_of("moe_permute", x, scale, ids, 64, align_block_size=16, variant=variant)
        assert [step.variant.instance.function for step in trace.steps][-2:] == ["sort_pairs", "permute_rows"]
        assert len(trace.steps) == count
        rows = 600 * 8 + 64 * 15
        results = [
            ((rows, 64), "float16"),
            ((rows, 4), "float32"),
            ((65,), "int64"),
            ((4800,), "int32"),
            ((rows,), "int32"),
        ]
        assert trace.made[:5] == results
        assert len(trace.made) == (6 if variant == "counted" else 5)


def test_what_a_launch_writes_and_reads(pretended: PretendedGPU) -> None:  # noqa: F811
    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    ids, row_token, x, rows = zeros(6, 8), zeros(48), zeros(6, 256).bfloat16(), zeros(48, 256).bfloat16()
    weights, out = zeros(6, 8).float(), [zeros(10), zeros(48), zeros(6, 8)]
    for dtype in (torch.int32, torch.int64) * 3:
        found = cukern.moe_sort(ids, 9, out=(None, row_token, None))  # type: ignore[arg-type]
        assert found[1] is row_token and found[2].shape == (6, 8)
        names, fields = ("offsets", "rows", "inverse"), pretended.launches[-1].fields
        assert [fields[name] for name in names] == [array.data_ptr() for array in found]
        assert cukern.moe_sort(ids, 9, out=out) is out  # type: ignore[arg-type, comparison-overlap]
        # A sum reads the end of all rows.
        offsets = zeros(10, dtype=dtype)
        cukern.moe_unpermute(x, rows, weights, ids, offsets)
        assert pretended.launches[-1].fields["offsets"] == offsets[9:].data_ptr()
        # A sort of many pairs counts into a workspace.
        cukern.moe_sort(zeros(9000, 8), 20)
        counting, sort = pretended.launches[-2:]
        assert [launched.variant.instance.function for launched in (counting, sort)] == ["count_pairs", "sort_pairs"]
        assert counting.grid == sort.grid and counting.fields["counts"] == sort.fields["counts"] != 0
        assert counting.fields["pairs_per_block"] == sort.fields["pairs_per_block"]


@pytest.fixture
def own_configurations() -> Iterator[None]:
    """Restore the registered configurations after a test that specializes some."""
    before = set(kernels.registered)
    yield
    kernels.registered.clear()
    kernels.registered.update(before)
    for name in ("moe_unpermute", "moe_sum"):
        OPS[name].forget()


def test_specialize_adds_variants(own_configurations: None) -> None:
    def chosen(topk: int, width: int = 16, variant: str = "auto") -> Any:
        return kernels.sum_variant("bfloat16", topk, width, variant).instance

    for topk in kernels.SPECIALIZED:
        assert chosen(topk) == chosen(topk, variant="specialized") in kernels._unpermute.specialized
        assert chosen(topk, 8).arguments[2] == chosen(topk, variant="dynamic").arguments[2] == 0
    for topk, width in ((3, 16), (8, 4)):
        with pytest.raises(ValueError, match="variant must be 'auto' or 'dynamic' here"):
            chosen(topk, width, "specialized")
    assert chosen(10).arguments[2] == 0
    made = of_rows.specialize(topk=10)
    assert chosen(10) in made
    compiler.compile_all([(i, "90a") for i in compiler.missing(made, "90a")])
    with pytest.raises(ValueError, match=r"topk must be an integer in \[1, 64\], got 65"):
        of_rows.specialize(topk=65)


# --- the benchmarks -----------------------------------------------------------------------------------


def test_the_baselines_compute_the_same() -> None:
    cases = bench_moe_permute.cases()
    assert {case.op for case in cases} == set(cukern.ops.moe_permute.__all__)
    rows = [(case.op, str(case.case), case.variant) for case in cases]
    assert len(set(rows)) == len(rows)
    for case in cases:
        if case.case["tokens"] == bench_moe_permute.SMALL.tokens:
            ours = case.call(*harness.inputs(case, 0, "cpu"))
            assert case.baselines
            for baseline in case.baselines.values():
                assert case.agree is not None and case.agree(ours, baseline.load()(*harness.inputs(case, 0, "cpu")))


# --- the kernels against the twin --------------------------------------------------------------------------


def compare_sorts(case: Case, rng: np.random.Generator, variant: str, block_size: int = 16) -> None:
    """Assert that all results of the sort are the twin's, and that nothing is written beside arrays given to it."""
    ids, expert_map = case.draw(rng)
    on_device, mapping = cupy.asarray(ids), None if expert_map is None else cupy.asarray(expert_map)
    options = sort_options(case, mapping)
    want = twin.moe_sort(ids, case.experts, **sort_options(case, expert_map))
    outs = [Buffer(x.shape, "int32") for x in want]
    given = tuple(out.array for out in outs)
    assert cukern.moe_sort(on_device, case.experts, **options, out=given, variant=variant) is given
    for out, expected in zip(outs, want, strict=True):
        same_bits(out.numpy(), expected)
    for max_tokens in (1, 1 + case.tokens * case.topk // case.experts, case.tokens + 1):
        want_batched = twin.moe_sort_batched(ids, case.experts, max_tokens, **sort_options(case, expert_map))
        outs = [Buffer(x.shape, "int32") for x in want_batched]
        given = tuple(out.array for out in outs)
        got = cukern.moe_sort_batched(on_device, case.experts, max_tokens, **options, out=given, variant=variant)
        assert got is given
        for out, expected in zip(outs, want_batched, strict=True):
            same_bits(out.numpy(), expected)
    for ignore, pad in ((False, True), (True, False)):
        more = {"ignore_invalid_experts": ignore}
        aligned = cukern.moe_align_block_size(
            on_device, block_size, case.experts, mapping, pad, **more, variant=variant
        )
        for got, expected in zip(
            aligned, twin.moe_align_block_size(ids, block_size, case.experts, expert_map, pad, **more), strict=True
        ):
            same_bits(got, expected)
        # Arrays of the caller's, as long as needed or longer: those of SGLang, with a block for no expert, and more.
        for longer in (0, block_size - 1, 9000):
            blocks = len(aligned[1]) + longer if longer else len(aligned[0]) // block_size
            outs = [Buffer((size,), "int32") for size in (len(aligned[0]) + longer, blocks, 1)]
            given = tuple(out.array for out in outs)
            got = cukern.moe_align_block_size(
                on_device, block_size, case.experts, mapping, pad, **more, out=given, variant=variant
            )
            assert got is given
            want_longer = tuple(np.empty(x.array.shape, np.int32) for x in outs)
            twin.moe_align_block_size(ids, block_size, case.experts, expert_map, pad, **more, out=want_longer)
            for out, expected in zip(outs, want_longer, strict=True):
                same_bits(out.numpy(), expected)


SORTS = {
    "one pair": Case(1, 1, 1),
    "one token": Case(1, 8, 256),
    "no token": Case(0, 8, 256),
    "less than a warp": Case(3, 7, 60),
    "a decoding batch": Case(64, 8, 128),
    "a share of the experts": Case(64, 8, 256, local=32),
    "long ids": Case(70, 6, 160, ids="int64"),
    "long ids and a share": Case(700, 6, 160, local=20, ids="int64"),
    "unsigned ids": Case(33, 5, 64, ids="uint32"),
    "one expert": Case(300, 4, 1),
    "one expert has nearly all": Case(900, 8, 64, skew=0.95),
    "around a block's pairs": Case(1025, 2, 8),
    "a block and a pair": Case(2049, 1, 32),
    "more experts than threads": Case(333, 5, 1030),
    "the most experts": Case(129, 16, 4096),
    "the most experts and a map": Case(129, 16, 4096, local=4096),
    "topk of 64": Case(77, 64, 64),
    "odd": Case(911, 7, 37, local=11),
}


def takes(case: Case, variant: str) -> bool:
    """Whether a variant sorts the case."""
    pairs, experts = case.tokens * case.topk, case.experts
    if variant == "clusters":
        clustered = gpu.of_device(0).arch in gpu.CLUSTERED_ARCHS
        return clustered and experts <= kernels._CHUNKED_EXPERTS and pairs <= kernels._CLUSTERED_PAIRS
    return variant != "chunks" or (experts <= kernels._CHUNKED_EXPERTS and pairs <= 32 * kernels._CHUNKS[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", kernels.SORT_VARIANTS)
@pytest.mark.parametrize("case", SORTS.values(), ids=SORTS)
def test_sorts_of_any_sizes(case: Case, variant: str, rng: np.random.Generator) -> None:
    if takes(case, variant):
        compare_sorts(case, rng, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [1, 2, 100, 128])
def test_blocks_of_any_size(block_size: int, rng: np.random.Generator) -> None:
    few, many = Case(100, 4, 30), Case(900, 4, 30, skew=0.5)
    for case, variant in ((few, "one_block"), (few, "chunks"), (many, "counted"), (many, "clusters")):
        if takes(case, variant):
            compare_sorts(case, rng, variant, block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["auto", "many_blocks", "counted"])
@pytest.mark.parametrize("case", [Case(4096, 8, 256), Case(8192, 8, 256, 0.7), Case(40_000, 8, 300)], ids=str)
def test_sorts_of_many_pairs(case: Case, variant: str, rng: np.random.Generator) -> None:
    compare_sorts(case, rng, variant, 64)


def compare_rows(
    case: Case,
    hidden: int,
    dtype: str,
    rng: np.random.Generator,
    variant: str = "auto",
    skip: int = 0,
    apart: int = 0,
    align: int | None = None,
) -> None:
    """Assert that rows permuted and summed up have the twin's bits, and that rows without a pair are not touched."""
    ids, expert_map = case.draw(rng)
    x, scale = normal(rng, (case.tokens, hidden), dtype), rng.random((case.tokens, 3), np.float32)
    local, mapping = case.local or -1, None if expert_map is None else cupy.asarray(expert_map)
    want = twin.moe_permute(x, scale, ids, case.experts, local, expert_map, align)
    assert want[1] is not None
    there = np.sort(want[3][want[3] >= 0])
    rest = np.setdiff1d(np.arange(len(want[0])), there)
    out = Buffer(want[0].shape, dtype, skip)
    permuted, scales, offsets, inverse, m_indices = cukern.moe_permute(
        place(x, skip, apart),
        place(scale, 0, apart),
        cupy.asarray(ids),
        case.experts,
        local,
        mapping,
        align,
        -1,
        out.array,
    )
    assert permuted is out.array
    same_bits(out.numpy()[there], want[0][there])
    assert (np.ascontiguousarray(out.numpy()[rest]).view(np.uint8) == POISON).all()
    same_bits(scales[there], want[1][there])
    same_bits(offsets, want[2])
    same_bits(inverse, want[3])
    assert m_indices is None if align is None else (cupy.asnumpy(m_indices) == want[4]).all()

    rows = want[0].copy()
    rows[rest] = NAN
    weights = rng.random(ids.shape, np.float32)
    weights.reshape(-1)[want[3] < 0] = NAN
    for factors in (weights, None):
        result = Buffer(x.shape, dtype, skip)
        on_device = None if factors is None else place(factors)
        cukern.moe_unpermute(result.array, place(rows, skip, apart), on_device, inverse, offsets, variant=variant)
        expected = np.empty_like(x)
        twin.moe_unpermute(expected, rows, factors, want[3])
        same_bits(result.numpy(), expected)
    slots = normal(rng, (case.tokens, case.topk, hidden), dtype)
    result = Buffer(x.shape, dtype, skip)
    cukern.moe_sum(on_gpu(slots, skip), result.array, variant=variant)
    same_bits(result.numpy(), twin.moe_sum(slots))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "hidden"),
    [
        (Case(1, 8, 16), 7168),
        (Case(40, 8, 32, local=8), 2880),
        (Case(9, 12, 16), 33),
        (Case(50, 1, 4), 1),
        (Case(30, 3, 8), 100),
        (Case(2, 64, 64), 520),
        (Case(3, 9, 9), 70_000),
        (Case(300, 4, 16), 8),
    ],
    ids=str,
)
def test_rows_of_any_sizes(case: Case, hidden: int, dtype: str, rng: np.random.Generator) -> None:
    compare_rows(case, hidden, dtype, rng)
    compare_rows(case, hidden, dtype, rng, align=8)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["specialized", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", kernels.SPECIALIZED)
def test_the_models_topk(topk: int, dtype: str, variant: str, rng: np.random.Generator) -> None:
    compare_rows(Case(60, topk, 32), 1024, dtype, rng, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("skip", "apart"), [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 8), (3, 5)])
def test_arrays_off_alignment_and_rows_apart(skip: int, apart: int, dtype: str, rng: np.random.Generator) -> None:
    compare_rows(Case(20, 4, 8), 64, dtype, rng, "auto", skip, apart)


@pytest.mark.gpu
def test_each_number_of_units_in_flight(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(kernels, "_FEW_VECTORS", 0)
    forget_plans()
    for hidden in (8, 1000, 4096, 14336, 20_000):
        compare_rows(Case(30, 5, 8), hidden, "float16", rng)
    forget_plans()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "float32"])
def test_rows_of_other_dtypes(dtype: str, rng: np.random.Generator) -> None:
    inverse = rng.permutation(60).astype(np.int32).reshape(20, 3)
    inverse[3, 1], inverse[5, 0] = -1, 2**31 - 1
    for hidden in (1, 7, 56, 128):
        x = rng.integers(0, 100, (20, hidden)).astype(dtype)
        out = Buffer((60, hidden), dtype)
        cukern.permute_rows(cupy.asarray(x), cupy.asarray(inverse), 60, out=out.array)
        same_bits(out.numpy(), twin.permute_rows(x, inverse, 60, out=np.full(1, POISON, "u1").repeat(out.numpy().nbytes)
                                                 .view(dtype).reshape(60, hidden)))  # fmt: skip


@pytest.mark.gpu
def test_fp8_tensors_are_moved() -> None:
    x = torch.randn(5, 256, device="cuda").to(torch.float8_e4m3fn)
    inverse = cukern.moe_sort(torch.tensor([[1, 0]] * 5, device="cuda"), 2)[2]
    got = cukern.permute_rows(x, inverse)
    assert got.dtype == x.dtype and torch.equal(got.view(torch.uint8), torch.cat([x, x]).view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("variant", ["one_block", "many_blocks", "counted"])
@pytest.mark.parametrize("case", [Case(150, 8, 40, local=9), Case(1500, 1, 300, 0.5), Case(0, 2, 5)], ids=str)
def test_each_sort_stays_inside_its_arrays(case: Case, variant: str, rng: np.random.Generator) -> None:
    compare_sorts(case, rng, variant, 8)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("hidden", "dtype", "variant", "skip"),
    [(64, "bfloat16", "specialized", 0), (5000, "float16", "dynamic", 0), (33, "float32", "auto", 1)],
)
def test_rows_stay_inside_their_arrays(
    hidden: int, dtype: str, variant: str, skip: int, rng: np.random.Generator
) -> None:
    compare_rows(Case(6, 4, 8), hidden, dtype, rng, variant, skip)
    compare_rows(Case(6, 4, 8, local=2), hidden, dtype, rng, variant, skip, 0, 4)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_bad_rows_do_no_harm(rng: np.random.Generator) -> None:
    inverse = rng.integers(-(2**31), 2**31, (20, 4)).astype(np.int32)
    inverse[::2] = rng.permutation(40).reshape(10, 4)
    x, weights = normal(rng, (20, 64), "float16"), rng.random((20, 4), np.float32)
    out = Buffer((40, 64), "float16")
    cukern.permute_rows(cupy.asarray(x), cupy.asarray(inverse), 40, out=out.array)
    same_bits(out.numpy(), twin.permute_rows(x, inverse, 40))
    for end in (None, -5, 17, 2**40 + 3):
        offsets = None if end is None else np.array([0, end], np.int64)
        result, expected = Buffer((20, 64), "float16"), np.empty_like(x)
        on_device = None if offsets is None else cupy.asarray(offsets)
        cukern.moe_unpermute(result.array, out.array, cupy.asarray(weights), cupy.asarray(inverse), on_device)
        if end is not None and end > 2**31:
            offsets = np.array([0, end % 2**32], np.int64)
        twin.moe_unpermute(expected, out.numpy(), weights, inverse, offsets)
        same_bits(result.numpy(), expected)


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    experts = data.draw(st.integers(1, 300))
    case = Case(
        data.draw(st.integers(0, 400)),
        data.draw(st.integers(1, 20)),
        experts,
        data.draw(st.sampled_from([0.0, 0.0, 0.9])),
        data.draw(st.integers(0, experts)),
        data.draw(st.sampled_from(sorting.ID_DTYPES)),
    )
    variant = data.draw(st.sampled_from(kernels.SORT_VARIANTS))
    if variant == "chunks":
        assume(case.tokens * case.topk <= 32 * kernels._CHUNKS[-1])
    compare_sorts(case, rng, variant, data.draw(st.integers(1, 70)))
    align = data.draw(st.sampled_from([None, None, 16]))
    compare_rows(case, data.draw(st.integers(1, 300)), data.draw(st.sampled_from(DTYPES)), rng, align=align)


@pytest.mark.gpu
def test_special_values_are_copied_bit_for_bit(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 2**16, (40, 64), np.uint16)
    inverse = rng.permutation(80).astype(np.int32).reshape(40, 2)
    for dtype in ("float16", "bfloat16"):
        x = bits.view(arrays.numpy_dtype(dtype))
        same_bits(cukern.permute_rows(cupy.asarray(x), cupy.asarray(inverse)), twin.permute_rows(x, inverse))
        with np.errstate(all="ignore"):
            got = cupy.asnumpy(cukern.moe_sum(cupy.asarray(x.reshape(10, 4, 64)))).astype(np.float32)
            want = twin.moe_sum(x.reshape(10, 4, 64)).astype(np.float32)
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.large(5)
def test_rows_past_2_to_the_31_elements() -> None:
    tokens, hidden = 2, 2**20
    rows = 2**11 + 8
    x = torch.randn(tokens, hidden, device="cuda").half()
    inverse = torch.tensor([[0, rows - 1], [rows - 2, 5]], dtype=torch.int32, device="cuda")
    permuted = cukern.permute_rows(x, inverse, rows)
    assert torch.equal(permuted[rows - 1], x[0]) and torch.equal(permuted[rows - 2], x[1])
    out = torch.empty_like(x)
    assert torch.equal(cukern.moe_unpermute(out, permuted, None, inverse), (x.float() * 2).half())


@pytest.mark.gpu
def test_a_side_stream_and_a_cuda_graph() -> None:
    ids = torch.randint(-1, 64, (3000, 8), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    x, weights = torch.randn(3000, 512, device="cuda").bfloat16(), torch.rand(3000, 8, device="cuda")
    few = ids[:50].contiguous()

    def run() -> list[Any]:
        permuted, _, offsets, inverse, indices = cukern.moe_permute(x, None, ids, 64, align_block_size=16)
        out = cukern.moe_unpermute(torch.empty_like(x), permuted, weights, inverse, offsets)
        return [out, offsets, inverse, indices, *cukern.moe_sort(few, 64), *cukern.moe_align_block_size(ids, 64, 64)]

    want = [result.clone() for result in run()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = run()
    stream.synchronize()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = run()
    ids.copy_(ids.flip(0))
    few.copy_(ids[:50])
    x.copy_(x.flip(0))
    weights.copy_(weights.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(got, run(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(got[0], want[0].flip(0))


@pytest.mark.gpu
def test_all_libraries_get_the_same(rng: np.random.Generator) -> None:
    ids, _ = Case(40, 4, 12).draw(rng)
    x = normal(rng, (40, 96), "float32")
    want = twin.moe_permute(x, None, ids, 12)
    there = np.sort(want[3][want[3] >= 0])
    tensors = cukern.moe_permute(torch.from_numpy(x).cuda(), None, torch.from_numpy(ids).cuda(), 12)
    foreign = cukern.moe_permute(OnlyDLPack(cupy.asarray(x)), None, OnlyDLPack(cupy.asarray(ids)), 12)
    for got in (tensors, foreign):
        same_bits(got[0][there], want[0][there])
        same_bits(got[2], want[2])
        same_bits(got[3], want[3])
