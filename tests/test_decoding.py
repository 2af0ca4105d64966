"""Decoding: the twins against independent formulas and worked examples, the kernels against the twins."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from benchmarks import bench_decoding, harness
from cukern.ops.decoding import logits as op
from cukern.reference import decoding as twin
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from cukern.testing import assert_matches
from tests.buffers import on_gpu
from tests.plans import plan_of

Array = NDArray[Any]
NAN, INF = np.nan, np.inf
DTYPES = op.DTYPES


def from_gpu(array: Any) -> Any:
    return cupy.asnumpy(array)


def assert_same(got: Any, want: Any) -> None:
    for ours, theirs in zip(*((x if isinstance(x, (tuple, list)) else (x,)) for x in (got, want)), strict=True):
        assert_matches("decoding.values", ours, theirs)


def word_list(words: list[list[int]], size: int | None = None) -> Array:
    """Words in FasterTransformer's layout."""
    flat = [token for word in words for token in word]
    ends = np.cumsum([len(word) for word in words]).tolist()
    size = len(flat) if size is None else size
    return np.array([flat + [0] * (size - len(flat)), ends + [-1] * (size - len(ends))], np.int32)


i32 = lambda *values: np.array(values, np.int32)  # noqa: E731


# --- worked examples ------------------------------------------------------------------------------------


@pytest.fixture(params=[None, *(pytest.param(v, marks=pytest.mark.gpu) for v in ("wide", "narrow"))])
def call(request: pytest.FixtureRequest) -> Any:
    """Call a function with NumPy arrays, in host memory or on the GPU; those that it changes in place are changed."""

    def run(name: str, *args: Any, **options: Any) -> Any:
        function = getattr(cukern, name)
        if request.param is None:
            return function(*args, **options)
        if name in ("update_logits", "apply_penalties"):
            width = 16 // args[0].itemsize
            options["variant"] = "narrow" if args[0].shape[1] % width else request.param
        moved = [on_gpu(x) for x in args]
        results = function(*moved, **{key: on_gpu(x) for key, x in options.items()})
        for ours, theirs in zip(args, moved, strict=True):
            if isinstance(ours, np.ndarray) and ours.flags.writeable:
                ours[...] = from_gpu(theirs)
        return tuple(map(from_gpu, results)) if isinstance(results, tuple) else from_gpu(results)

    return run


def test_decoding_init(call: Any) -> None:
    ids, length, finished, score = call("decoding_init", i32(3, 1, 2))
    assert_same((ids, length), (i32(3, 1, 2), i32(0, 0, 0)))
    assert_same((finished, score), (np.zeros(3, bool), np.zeros(3, np.float32)))


def test_topp_init(call: Any) -> None:
    *state, offsets, ids = call("topp_init", i32(3, 1), 5)
    assert_same(state, call("decoding_init", i32(3, 1)))
    assert_same((offsets, ids), (i32(0, 5, 10), np.array([range(5)] * 2, np.int32)))
    *_, offsets, ids = call("topp_init", i32(), 5)
    assert_same((offsets, ids), (i32(0), np.zeros((0, 5), np.int32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_update_logits(call: Any, dtype: str) -> None:
    kind = arrays.numpy_dtype(dtype)
    logits = np.array([[1, 2, 3, 4], [NAN, 2, 3, 4], [1, -INF, INF, NAN]]).astype(kind)
    bias, finished = np.array([0.5, 0, -1, 2]).astype(kind), np.array([False, True, False])
    largest = float(torch.finfo(getattr(torch, dtype)).max)
    want = [[1.5, 2, 2, 6], [-largest, -largest, largest, -largest], [1.5, -INF, INF, NAN]]
    assert_same(call("update_logits", logits, bias, finished, 2), np.array(want).astype(kind))
    assert_same(call("update_logits", logits, None, finished, 2)[0], logits[0])
    assert_same(call("update_logits", logits, bias)[0], np.array(want[0]).astype(kind))
    assert_same(call("update_logits", logits), logits)


def test_the_bias_is_added_in_float32(call: Any) -> None:
    logits, bias = np.full((1, 8), 2048, np.float16), np.full(8, 1.5, np.float16)
    assert_same(call("update_logits", logits, bias), np.full((1, 8), 2050, np.float16))
    assert_same(call("update_logits", logits, np.full(8, 65000, np.float16)), np.full((1, 8), INF, np.float16))


def test_penalties_by_hand(call: Any) -> None:
    logits = np.array([[1, -1, 2, -2, 3, 0, 5, 6]], np.float32)
    sequence = {"output_ids": np.array([[0, 1, 2, 1, 2, 2, 7]], np.int32), "sequence_length": i32(6)}
    # Token 7 lies past the end. Tokens 0, 1 and 2 were seen 1, 2 and 3 times.
    got = call("apply_penalties", logits, repetition_penalty=2.0, **sequence)
    assert_same(got, np.array([[0.5, -2, 1, -2, 3, 0, 5, 6]], np.float32))
    got = call("apply_penalties", logits, presence_penalty=0.5, **sequence)
    assert_same(got, np.array([[0.5, -1.5, 1.5, -2, 3, 0, 5, 6]], np.float32))
    got = call("apply_penalties", logits, frequency_penalty=0.25, **sequence)
    assert_same(got, np.array([[0.75, -1.5, 1.25, -2, 3, 0, 5, 6]], np.float32))
    # Repetition first, the temperature last.
    got = call(
        "apply_penalties",
        logits,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        temperature=0.5,
        **sequence,
    )
    assert_same(got, np.array([[-0.5, -6, -0.5, -4, 6, 0, 10, 12]], np.float32))
    # Only the repetition penalty counts the prompt; token 1 is in both parts.
    got = call(
        "apply_penalties", logits, repetition_penalty=2.0, frequency_penalty=0.25, prompt_length=i32(3), **sequence
    )
    assert_same(got, np.array([[0.5, -2.25, 0.5, -2, 3, 0, 5, 6]], np.float32))


def test_masks_by_hand(call: Any) -> None:
    logits = np.array([[1, -1, 2, -2, 3, 0, 5, 6]], np.float32)
    prompt, output = np.zeros((2, 1, 8), bool)
    prompt[0, [0, 1]], output[0, [1, 7]] = True, True
    masks = {"prompt_mask": prompt, "output_mask": output}
    # Both parts get the repetition penalty, the generated part the presence penalty.
    got = call("apply_penalties", logits, repetition_penalty=2.0, **masks)
    assert_same(got, np.array([[0.5, -2, 2, -2, 3, 0, 5, 3]], np.float32))
    got = call("apply_penalties", logits, repetition_penalty=2.0, presence_penalty=0.5, temperature=0.5, **masks)
    assert_same(got, np.array([[1, -5, 4, -4, 6, 0, 10, 5]], np.float32))
    got = call("apply_penalties", logits, repetition_penalty=2.0, prompt_mask=prompt)
    assert_same(got, np.array([[0.5, -2, 2, -2, 3, 0, 5, 6]], np.float32))
    # Beside a sequence whose tokens are 2 (of the prompt), 1 and 1: a token that both have is penalized once.
    sequence = {"output_ids": i32(2, 1, 1)[None], "sequence_length": i32(3), "prompt_length": i32(1)}
    got = call(
        "apply_penalties",
        logits,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        **sequence,
        **masks,
    )
    assert_same(got, np.array([[0.5, -3, 1, -2, 3, 0, 5, 2.5]], np.float32))
    # Without a penalty they say nothing.
    assert_same(call("apply_penalties", logits, temperature=0.5, **masks), logits * 2)


def test_bad_words_by_hand(call: Any) -> None:
    logits = np.ones((3, 8), np.float32)
    sequence = {
        "output_ids": np.array([[3, 4, 5], [5, 3, 0], [4, 3, 4]], np.int32),
        "sequence_length": i32(3, 2, 1),
    }
    words = [[7], [4, 5, 1], [5, 3, 2], [4, 5], [3, 4, 5, 6], [4, 0]]
    want = np.ones((3, 8), np.float32)
    want[:, 7] = -INF
    want[0, [1, 6]] = -INF
    want[1, 2] = -INF
    want[2, [5, 0]] = -INF
    for size in (None, 40):
        assert_same(call("apply_penalties", logits, bad_words=word_list(words, size), **sequence), want)
    per_row = np.stack([word_list(words[i : i + 2], 6) for i in range(3)])
    want[...] = 1
    want[0, [7, 1]] = want[1, 2] = want[2, 5] = -INF
    assert_same(call("apply_penalties", logits, bad_words=per_row, **sequence), want)
    # Tokens outside of the vocabulary, words that are not well formed, and an empty list ban nothing.
    malformed = np.array([[1, 2, 3, 6], [1, 0, 9, 4]], np.int32)
    for bad, banned in ((word_list([[8], [-5]]), []), (malformed, [1]), (np.zeros((2, 0), np.int32), [])):
        want[...] = 1
        want[:, banned] = -INF
        assert_same(call("apply_penalties", logits, bad_words=bad, **sequence), want)


def test_the_minimum_length_by_hand(call: Any) -> None:
    logits = np.ones((4, 8), np.float32)
    lengths = {"sequence_length": i32(0, 2, 3, 9), "end_id": 6}
    got = call("apply_penalties", logits, min_length=3, **lengths)
    assert np.isneginf(got).nonzero()[0].tolist() == [0, 1] and np.isneginf(got[:2, 6]).all()
    got = call("apply_penalties", logits, min_length=i32(0, 3, 4, 9), prompt_length=i32(0, 0, 0, 1), **lengths)
    assert np.isneginf(got).nonzero()[0].tolist() == [1, 2, 3]
    # A logit of -inf stays -inf, whatever is applied to it.
    got = call("apply_penalties", np.full((4, 8), NAN, np.float32), min_length=3, temperature=0.5, **lengths)
    assert np.isneginf(got[:2, 6]).all() and np.isnan(got[2:]).all()


def test_the_temperature_by_hand(call: Any) -> None:
    logits = np.array([[1, -2, INF, -INF]] * 4, np.float32)
    got = call("apply_penalties", logits, temperature=np.array([2, 0, 0.5, NAN], np.float32))
    assert_same(got, np.array([[0.5, -1, INF, -INF], logits[0], [2, -4, INF, -INF], logits[0]], np.float32))
    for neither in (INF, -1, 1e-40):
        assert_same(call("apply_penalties", logits, temperature=np.full(4, neither, np.float32)), logits)
    for off in (None, 0.0, 1.0, 0):
        assert_same(call("apply_penalties", logits, temperature=off), logits)
    assert_same(call("apply_penalties", logits, temperature=np.array(2, np.float32))[1], got[0])


def test_stop_words_by_hand(call: Any) -> None:
    ids = np.array([[3, 4, 5], [3, 4, 5], [5, 5, 7], [1, 1, 1], [4, 5, 0]], np.int32)
    finished = np.array([False, False, False, True, False])
    words = word_list([[7], [4, 5], [3, 3, 4, 5]], 9)
    got = call("stop_words_criterion", ids, i32(3, 2, 99, 0, -1), words, finished)
    assert got.tolist() == finished.tolist() == [True, False, True, True, False]
    finished[:] = False
    words = np.stack([word_list(w, 4) for w in ([[4]], [[4]], [[5, 5, 7], [5]], [], [[4, 5]])])
    call("stop_words_criterion", ids, i32(3, 2, 3, 3, 2), words, finished)
    assert finished.tolist() == [False, True, True, False, True]


def test_update_finished_by_hand(call: Any) -> None:
    finished, length = np.array([False, False, True, True]), i32(4, 5, 6, 7)
    call("update_finished", i32(2, 9, 2, 9), finished, length, 2)
    assert finished.tolist() == [True, False, True, True]
    assert length.tolist() == [5, 6, 6, 7]


# --- against torch --------------------------------------------------------------------------------------


def test_the_twin_is_what_the_formulas_say(rng: np.random.Generator) -> None:
    # The formulas as vLLM states them, with scatters over the whole vocabulary.
    batch, vocab, length = 6, 50, 40
    logits = rng.normal(0, 3, (batch, vocab)).astype(np.float32)
    ids = rng.integers(0, 30, (batch, length)).astype(np.int32)
    lengths, prompts = i32(40, 0, 1, 20, 39, 7), i32(10, 0, 0, 20, 3, 7)
    repetition, presence, frequency = (rng.uniform(0.5, 2, batch).astype(np.float32) for _ in range(3))
    temperature = rng.uniform(0.1, 3, batch).astype(np.float32)
    got = cukern.apply_penalties(
        logits,
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        output_ids=ids,
        sequence_length=lengths,
        prompt_length=prompts,
    )
    x, place = torch.tensor(logits).double(), torch.arange(length)
    index = torch.tensor(ids).long()
    exists = place < torch.tensor(lengths)[:, None]
    generated = exists & (place >= torch.tensor(prompts)[:, None])
    zeros = torch.zeros(batch, vocab, dtype=torch.double)
    count = zeros.scatter_add(1, index, generated.double())
    seen = zeros.scatter_add(1, index, exists.double()) > 0
    r = torch.tensor(repetition).double()[:, None].expand(-1, vocab)
    x = torch.where(seen, torch.where(x > 0, x / r, x * r), x)
    x = x - torch.tensor(frequency)[:, None] * count - torch.tensor(presence)[:, None] * (count > 0)
    np.testing.assert_allclose(got, (x / torch.tensor(temperature)[:, None]).numpy(), rtol=2e-6, atol=1e-5)


def test_the_masks_are_vllms(rng: np.random.Generator) -> None:
    logits = torch.from_numpy(rng.normal(0, 3, (5, 70)).astype(np.float32))
    prompt, output = (torch.from_numpy(rng.random((5, 70)) < 0.2) for _ in range(2))
    penalties = torch.from_numpy(rng.uniform(0.5, 2, 5).astype(np.float32))
    # The definition in words of its `apply_repetition_penalties`.
    factor = torch.where(prompt | output, penalties[:, None], 1.0)
    want = torch.where(logits > 0, logits * (1 / factor), logits * factor)
    masks = {"prompt_mask": prompt, "output_mask": output}
    assert cukern.apply_penalties(logits, repetition_penalty=penalties, **masks, out=logits) is logits
    torch.testing.assert_close(logits, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_in_host_memory(dtype: str, rng: np.random.Generator) -> None:
    x, bias = torch.randn(3, 20).to(getattr(torch, dtype)), torch.randn(20).to(getattr(torch, dtype))
    finished = torch.tensor([False, True, False])
    got = cukern.update_logits(x, bias, finished, 4)
    want = (x.float() + bias.float()).to(x.dtype)
    want[1], want[1, 4] = -torch.finfo(x.dtype).max, torch.finfo(x.dtype).max
    assert got.dtype == x.dtype and torch.equal(got, want)
    original = x.clone()
    assert cukern.update_logits(x, bias, finished, 4, out=x) is x
    assert torch.equal(x, want) and not torch.equal(x, original)
    assert cukern.apply_penalties(x, temperature=2.0, out=x) is x
    assert torch.equal(x, (want.float() / 2).to(x.dtype))
    state = cukern.decoding_init(torch.tensor([5, 6], dtype=torch.int32))
    assert [t.dtype for t in state] == [torch.int32, torch.int32, torch.bool, torch.float32]
    got = cukern.update_finished(state[0], state[2], state[1], 5)
    assert got[0] is state[2] and got[1] is state[1]
    assert state[2].tolist() == [True, False] and state[1].tolist() == [1, 1]


def test_the_input_is_left_alone(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 1, (2, 9)).astype(np.float32)
    before, out = logits.copy(), np.empty((2, 12), np.float32)[:, :9]
    assert cukern.apply_penalties(logits, temperature=0.5, out=out) is out
    assert_same((logits, out), (before, before * 2))
    start, state = i32(1, 2), (i32(7, 7), i32(7, 7), np.ones(2, bool), np.ones(2, np.float32))
    assert cukern.decoding_init(start, out=state) == state
    assert_same(state, twin.decoding_init(start))


# --- bad arguments --------------------------------------------------------------------------------------

LOGITS = np.zeros((3, 8), np.float32)
IDS = np.zeros((3, 5), np.int32)
THREE = np.zeros(3, np.int32)
FLAGS = np.zeros(3, bool)
WORDS = word_list([[1, 2]])
SEQUENCE = {"output_ids": IDS, "sequence_length": THREE}
MASK = {"repetition_penalty": 2.0, "output_mask": np.zeros((3, 8), bool)}


@pytest.mark.parametrize(
    ("name", "args", "options", "error", "message"),
    [
        ("decoding_init", ([1],), {}, TypeError, "start_ids must be an array"),
        ("decoding_init", (FLAGS,), {}, TypeError, "start_ids must be int32, got bool"),
        ("decoding_init", (IDS,), {}, ValueError, "start_ids must be of shape [batch], got [3, 5]"),
        ("decoding_init", (THREE[::2],), {}, ValueError, "start_ids must be contiguous"),
        ("decoding_init", (THREE,), {"out": (THREE,)}, TypeError, "out must be 4 arrays (word_ids, sequence_length, "),
        ("decoding_init", (THREE,), {"out": (THREE, THREE, THREE, THREE)}, TypeError, "out[2] must be bool, got int32"),
        ("topp_init", (THREE, 0), {}, ValueError, "vocab must be an integer in [1, 1048576], got 0"),
        ("topp_init", (np.zeros(2048, np.int32), 2**20), {}, ValueError, "batch * vocab must be less than 2**31"),
        ("update_logits", (LOGITS[0],), {}, ValueError, "logits must be of shape [batch, vocab], got [8]"),
        ("update_logits", (LOGITS.astype(int),), {}, TypeError, "logits must be float32 or float16 or bfloat16"),
        ("update_logits", (LOGITS[:, ::2],), {}, ValueError, "logits must be contiguous along its last dimension"),
        ("update_logits", (LOGITS[:, :0],), {}, ValueError, "the vocabulary of logits must be in [1, 1048576], got 0"),
        ("update_logits", (LOGITS, LOGITS[0, :7]), {}, ValueError, "bias must be of shape [vocab] = [8], got [7]"),
        ("update_logits", (LOGITS, LOGITS[0].astype("f2")), {}, TypeError, "bias must be float32, got float16"),
        ("update_logits", (LOGITS, None, FLAGS), {}, TypeError, "end_id must be an integer where finished is given"),
        ("update_logits", (LOGITS, None, FLAGS, 8), {}, ValueError, "end_id must be an integer in [0, 7], got 8"),
        ("update_logits", (LOGITS, None, THREE, 2), {}, TypeError, "finished must be bool, got int32"),
        ("update_logits", (LOGITS,), {"out": LOGITS[:2]}, ValueError, "out must be of shape [batch, vocab] = [3, 8]"),
        ("update_logits", (LOGITS,), {"out": LOGITS.astype("f2")}, TypeError, "out must be float32, got float16"),
        ("update_logits", (LOGITS,), {"variant": "best"}, ValueError, "variant must be one of 'auto', 'wide'"),
        (
            "update_logits",
            (LOGITS,),
            {"variant": "wide"},
            ValueError,
            "variant must be 'auto' for arrays in host memory",
        ),
        (
            "update_logits",
            (LOGITS,),
            {"out": np.lib.stride_tricks.as_strided(np.zeros(16, np.float32), (3, 8), (4, 4))},
            ValueError,
            "out must be of rows that do not overlap",
        ),
        (
            "apply_penalties",
            (LOGITS,),
            {"temperature": -1.0},
            ValueError,
            "temperature must be a float32 of at least",
        ),
        (
            "apply_penalties",
            (LOGITS,),
            {"temperature": 1e39},
            ValueError,
            "temperature must be a float32 of at least",
        ),
        ("apply_penalties", (LOGITS,), {"temperature": NAN}, ValueError, "temperature must be a finite number"),
        ("apply_penalties", (LOGITS,), {"temperature": "hot"}, TypeError, "temperature must be a number"),
        ("apply_penalties", (LOGITS,), {"temperature": THREE}, TypeError, "temperature must be float32, got int32"),
        ("apply_penalties", (LOGITS,), {"temperature": LOGITS[0]}, ValueError, "temperature must be of shape [batch]"),
        (
            "apply_penalties",
            (LOGITS,),
            {"repetition_penalty": 0},
            ValueError,
            "repetition_penalty must be a positive n",
        ),
        (
            "apply_penalties",
            (LOGITS,),
            {"presence_penalty": 1e39},
            ValueError,
            "presence_penalty must be a float32, got 1e+39",
        ),
        ("apply_penalties", (LOGITS,), {"frequency_penalty": 1.0}, TypeError, "output_ids must be given with"),
        ("apply_penalties", (LOGITS,), {"bad_words": WORDS}, TypeError, "output_ids must be given with"),
        ("apply_penalties", (LOGITS,), MASK | {"bad_words": WORDS}, TypeError, "output_ids must be given with repet"),
        ("apply_penalties", (LOGITS,), MASK | {"frequency_penalty": 1.0}, TypeError, "with frequency penalties, whose"),
        ("apply_penalties", (LOGITS,), {"prompt_mask": LOGITS}, TypeError, "prompt_mask must be bool, got float32"),
        ("apply_penalties", (LOGITS,), {"output_mask": MASK["output_mask"][:2]}, ValueError, "output_mask must be of"),
        ("apply_penalties", (LOGITS,), {"output_mask": MASK["output_mask"][:, ::-1]}, ValueError, "must be contiguous"),
        (
            "apply_penalties",
            (LOGITS,),
            MASK | {"sequence_length": THREE, "output_ids": np.broadcast_to(np.int32(0), (3, 2**29))},
            ValueError,
            "max_length of output_ids must be at most 536870911 beside output_mask",
        ),
        ("apply_penalties", (LOGITS,), {"output_ids": IDS}, TypeError, "sequence_length must be given with"),
        ("apply_penalties", (LOGITS,), {"min_length": 2, "end_id": 1}, TypeError, "sequence_length must be given"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"min_length": 2}, TypeError, "end_id must be an integer where"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"min_length": 2.5}, TypeError, "min_length must be an integer"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"min_length": -2}, ValueError, "min_length must be an integer"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"end_id": -1}, ValueError, "end_id must be an integer in [0, 7]"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"output_ids": IDS[:2]}, ValueError, "output_ids must be of shape"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"output_ids": IDS.T[:3]}, ValueError, "output_ids must be contig"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"output_ids": IDS + 1.0}, TypeError, "output_ids must be int32"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"prompt_length": THREE[1:]}, ValueError, "prompt_length must be of"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"bad_words": THREE}, ValueError, "bad_words must be of shape [2, s"),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"bad_words": IDS}, ValueError, "bad_words must be of shape [2, s"),
        (
            "apply_penalties",
            (LOGITS,),
            SEQUENCE | {"bad_words": np.zeros((2, 2, 2), np.int32)},
            ValueError,
            "bad_words must be of shape [2, size] or [batch, 2, size] with batch = 3, got [2, 2, 2]",
        ),
        ("apply_penalties", (LOGITS,), SEQUENCE | {"bad_words": WORDS + 1.0}, TypeError, "bad_words must be int32"),
        ("stop_words_criterion", (THREE, THREE, WORDS, FLAGS), {}, ValueError, "output_ids must be of shape [batch, "),
        ("stop_words_criterion", (IDS, THREE[1:], WORDS, FLAGS), {}, ValueError, "sequence_length must be of shape"),
        ("stop_words_criterion", (IDS, THREE, IDS, FLAGS), {}, ValueError, "stop_words must be of shape [2, size]"),
        ("stop_words_criterion", (IDS, THREE, WORDS, THREE), {}, TypeError, "finished must be bool, got int32"),
        ("update_finished", (THREE, THREE, THREE, 2), {}, TypeError, "finished must be bool, got int32"),
        ("update_finished", (THREE, FLAGS, FLAGS, 2), {}, TypeError, "sequence_length must be int32, got bool"),
        ("update_finished", (THREE, FLAGS, THREE, None), {}, TypeError, "end_id must be an integer in [-1, "),
        ("update_finished", (THREE, FLAGS[1:], THREE, 2), {}, ValueError, "finished must be of shape [batch] = [3]"),
    ],
)
def test_a_bad_argument_is_named(
    name: str, args: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(*args, **options)


# --- plans ----------------------------------------------------------------------------------------------


def test_penalties_write_all_tokens_unless_they_are_in_place_without_a_temperature() -> None:
    x, y = np.zeros((2, 3, 64), np.float32)
    for out, whole in ((None, "true"), (y, "true"), (x, "false"), (x[:, :], "false")):
        trace, _ = plan_of("apply_penalties", x, repetition_penalty=1.5, **SEQUENCE, out=out)
        assert [step.variant.instance.arguments[-1] for step in trace.steps] == [whole]
    for temperature, launches in ((None, 0), (1.0, 0), (0.0, 0), (0.5, 1)):
        for out, more in ((x, 0), (y, launches == 0)):
            trace, _ = plan_of("apply_penalties", x, temperature=temperature, out=out)
            assert len(trace.steps) == launches + more
            # A plan that is kept serves calls in place alone, or others alone.
            assert trace.compares


def test_a_least_length_alone_is_a_penalty() -> None:
    x = np.zeros((2, 64), np.float32)
    lengths = np.zeros(2, np.int32)
    for out, whole in ((None, "true"), (x, "false")):
        trace, _ = plan_of("apply_penalties", x, min_length=3, sequence_length=lengths, end_id=1, out=out)
        assert [step.variant.instance.arguments[-2:] for step in trace.steps] == [("true", whole)]


def test_a_launch_has_the_numbers_and_the_batch_of_its_call() -> None:
    def steps(batch: int, temperature: Any, min_length: Any) -> list[Any]:
        numbers = {"temperature": temperature, "min_length": min_length, "end_id": 3}
        logits, lengths = np.zeros((batch, 64), np.float32), np.zeros(batch, np.int32)
        return plan_of("apply_penalties", logits, sequence_length=lengths, **numbers)[0].steps

    for batch, temperature, min_length in ((3, 0.5, 2), (2, 0.0, 0), (70, 7, 9)):
        (step,) = steps(batch, temperature, min_length)
        assert step.grid == (batch, 1, 1)
        assert [step.fields[name] for name in ("temperature", "min_length")] == [
            (None, temperature, 0), (None, min_length, 0)
        ]  # fmt: skip
    assert steps(0, 0.5, 2) == []
    for numbers, name in (((-1, 2), "temperature"), ((0.5, -1), "min_length")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            steps(70, *numbers)


# --- the kernels against the twins ----------------------------------------------------------------------


def draw(rng: np.random.Generator, batch: int, vocab: int, max_length: int, dtype: str) -> dict[str, Any]:
    """Logits, and sequences with many repeated tokens, ids outside of the vocabulary, and tokens past the end."""
    values = rng.normal(0, 3, (batch, vocab)).astype(arrays.numpy_dtype(dtype))
    for value in (NAN, INF, -INF, 0.0):
        values.flat[rng.integers(0, values.size, 1 + values.size // 500)] = value
    few = rng.integers(0, vocab, 1 + max_length // 4)
    few[::7] = (-1, vocab, 2**31 - 1, -(2**31))[int(rng.integers(4))]
    edges = (vocab - 1, vocab, op._TOKENS - 1, op._TOKENS)  # of the vocabulary, and of what a block works on
    few[:4] = edges[: len(few)]
    ids = rng.choice(few, (batch, max_length)).astype(np.int32)
    lengths = rng.integers(-2, max_length + 3, batch).astype(np.int32)
    lengths[: batch // 2] = max_length
    words = [rng.integers(0, vocab, rng.integers(1, 5)).tolist() for _ in range(20)]
    words += [[token] for token in edges]
    for row in ids:
        tail = int(rng.integers(0, min(4, max_length + 1)))
        words.append([*row[len(row) - tail :].tolist(), int(rng.integers(0, vocab))])
    return {
        "logits": values,
        "output_ids": ids,
        "sequence_length": lengths,
        "prompt_length": rng.integers(-1, max_length + 2, batch).astype(np.int32) // 2,
        "bad_words": word_list(words, sum(map(len, words)) + 5),
        "min_length": rng.integers(0, max_length + 1, batch).astype(np.int32),
        "temperature": rng.uniform(0.1, 2, batch).astype(np.float32),
        "repetition_penalty": rng.uniform(0.5, 2, batch).astype(np.float32),
        "presence_penalty": rng.uniform(-2, 2, batch).astype(np.float32),
        "frequency_penalty": rng.uniform(-2, 2, batch).astype(np.float32),
        "prompt_mask": rng.random((batch, vocab)) < 0.05,
        "output_mask": rng.random((batch, vocab)) < 0.05,
    }


HISTORY = ("output_ids", "sequence_length")
FEATURES = (
    ("temperature",),
    ("repetition_penalty", *HISTORY),
    ("presence_penalty", "frequency_penalty", "prompt_length", *HISTORY),
    ("bad_words", *HISTORY),
    ("repetition_penalty", "prompt_mask", "output_mask"),
    ("repetition_penalty", "presence_penalty", "output_mask"),
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_length", "prompt_mask", *HISTORY),
    ("min_length", "sequence_length", "prompt_length"),
    (),
    None,  # all of them
)


def check_penalties(case: dict[str, Any], features: tuple[str, ...] | None, variant: str) -> None:
    """Compare with the twin: into a new array, in place, and into rows that are apart."""
    options = {k: v for k, v in case.items() if k != "logits" and (features is None or k in features)}
    batch, vocab = case["logits"].shape
    if "min_length" in options:
        options["end_id"] = vocab // 2
    want = twin.apply_penalties(case["logits"], **options)
    moved = {key: on_gpu(value) for key, value in options.items()}
    logits = on_gpu(case["logits"])
    assert_same(from_gpu(cukern.apply_penalties(logits, **moved, variant=variant)), want)
    assert_same(from_gpu(logits), case["logits"])
    cukern.apply_penalties(logits, **moved, out=logits, variant=variant)
    assert_same(from_gpu(logits), want)
    width = 16 // case["logits"].itemsize
    wide = np.full((batch, vocab + 3 * width), 7, case["logits"].dtype)
    wide[:, width : width + vocab] = case["logits"]
    rows, poisoned = on_gpu(wide), on_gpu(np.full_like(wide, NAN))
    for out in (poisoned, rows):
        inner = out[:, width : width + vocab]
        assert cukern.apply_penalties(rows[:, width : width + vocab], **moved, out=inner, variant=variant) is inner
        filled = from_gpu(out)
        assert_same(filled[:, width : width + vocab], want)
        outside = np.delete(filled, np.s_[width : width + vocab], axis=1).astype(np.float32)
        assert np.isnan(outside).all() if out is poisoned else (outside == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("features", FEATURES, ids=lambda f: "all" if f is None else "+".join(f) or "none")
@pytest.mark.parametrize(("dtype", "variant"), list(itertools.product(DTYPES, ("wide", "narrow"))))
def test_penalties(dtype: str, variant: str, features: tuple[str, ...] | None, rng: np.random.Generator) -> None:
    # Several slices of the vocabulary, of which the last is not whole; a history that takes several rounds.
    check_penalties(draw(rng, 3, 8192 * 2 + 1000, 5000, dtype), features, variant)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("dtype", "vocab", "variant"), [("float32", 8200, "wide"), ("bfloat16", 101, "narrow")])
def test_penalties_stay_inside_their_arrays(dtype: str, vocab: int, variant: str, rng: np.random.Generator) -> None:
    for features in FEATURES:
        check_penalties(draw(rng, 2, vocab, 30, dtype), features, variant)


@pytest.mark.gpu
@given(data=st.data())
@settings(max_examples=40)
def test_penalties_of_random_sizes(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 300))
    vocab = data.draw(st.one_of(st.integers(1, 40), st.integers(8180, 8210), st.integers(1, 40000)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    case = draw(rng, max(batch, 1), vocab, length, data.draw(st.sampled_from(DTYPES)))
    case = {k: v if k == "bad_words" else v[:batch] for k, v in case.items()}
    check_penalties(case, data.draw(st.sampled_from(FEATURES)), "auto")


@pytest.mark.gpu
def test_numbers_are_like_arrays_of_them(rng: np.random.Generator) -> None:
    case = draw(rng, 3, 500, 40, "float32")
    names = ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_length")
    numbers = {name: case[name][1].item() for name in names} | {"end_id": 3}
    want = twin.apply_penalties(**case | numbers)
    moved = {key: on_gpu(value) for key, value in case.items()}
    assert_same(from_gpu(cukern.apply_penalties(**moved | numbers)), want)
    scalars = {name: on_gpu(case[name][1:2].reshape(())) for name in names}
    assert_same(from_gpu(cukern.apply_penalties(**moved | scalars, end_id=3)), want)
    per_row = {"bad_words": np.stack([word_list([[1]], 4), word_list([[2], [3]], 4), word_list([], 4)])}
    moved["bad_words"] = on_gpu(per_row["bad_words"])
    assert_same(from_gpu(cukern.apply_penalties(**moved | numbers)), twin.apply_penalties(**case | numbers | per_row))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("skips", [(1, 0), (0, 2), (4, 3)])
def test_masks_off_alignment(skips: tuple[int, int], rng: np.random.Generator) -> None:
    case = draw(rng, 2, 8200, 30, "float32")
    options = {name: case[name] for name in ("repetition_penalty", "presence_penalty")}
    masks = {name: case[name] for name in ("prompt_mask", "output_mask")}
    moved = {name: on_gpu(value) for name, value in options.items()}
    moved |= {name: on_gpu(mask, skip) for (name, mask), skip in zip(masks.items(), skips, strict=True)}
    want = twin.apply_penalties(case["logits"], **options, **masks)
    assert_same(from_gpu(cukern.apply_penalties(on_gpu(case["logits"]), **moved)), want)


@pytest.mark.gpu
def test_a_long_sequence_of_one_token(rng: np.random.Generator) -> None:
    length = 32768
    ids = np.full((2, length), 5, np.int32)
    ids[1, ::2] = 8
    options = {"output_ids": ids, "sequence_length": i32(length, length), "frequency_penalty": 0.25}
    logits = np.zeros((2, 9), np.float32)
    got = from_gpu(cukern.apply_penalties(on_gpu(logits), **{k: on_gpu(v) for k, v in options.items()}))
    assert got[0, 5] == -length / 4 and got[1, 5] == got[1, 8] == -length / 8
    assert np.count_nonzero(got) == 3


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_updated_logits(dtype: str, rng: np.random.Generator) -> None:
    for batch, vocab in ((0, 8), (1, 1), (3, 50257), (5, 4104), (2, 8192)):
        case = draw(rng, max(batch, 1), vocab, 1, dtype)["logits"]
        logits, bias = case[:batch], rng.normal(0, 1, vocab).astype(case.dtype)
        for finished, b in itertools.product((None, rng.random(batch) < 0.5), (None, bias)):
            want = twin.update_logits(logits, b, finished, vocab - 1)
            for variant in ("auto", "narrow"):
                moved = [on_gpu(x) for x in (logits, b, finished)]
                got = cukern.update_logits(*moved, vocab - 1, variant=variant)
                assert_same((from_gpu(got), from_gpu(moved[0])), (want, logits))
                cukern.update_logits(*moved, vocab - 1, out=moved[0], variant=variant)
                assert_same(from_gpu(moved[0]), want)


@pytest.mark.gpu
def test_rows_that_are_not_aligned(rng: np.random.Generator) -> None:
    x = on_gpu(rng.normal(0, 1, (4, 70)).astype(np.float32))
    for rows in (x[:, 1:65], x[:, :64], x[::2, :68][:, :63]):
        want = twin.apply_penalties(from_gpu(rows), temperature=0.3)
        assert_same(from_gpu(cukern.apply_penalties(rows, temperature=0.3)), want)
        assert_same(from_gpu(cukern.update_logits(rows)), from_gpu(rows))
        for function in (cukern.apply_penalties, cukern.update_logits):
            with pytest.raises(ValueError, match="variant must be 'auto' or 'narrow' where rows are not"):
                function(rows, variant="wide")


@pytest.mark.gpu
def test_sequences_and_logits_in_rows_that_are_apart(rng: np.random.Generator) -> None:
    case = draw(rng, 3, 9000, 40, "float32") | {"end_id": 5}
    want = twin.apply_penalties(**case)
    moved = {key: on_gpu(value) for key, value in case.items()}
    # Every second row of a wider array, the last one first.
    ids, logits = np.full((6, 47), 5, np.int32), np.full((6, 9004), NAN, np.float32)
    ids[::-2, 3:43], logits[::-2, :9000] = case["output_ids"], case["logits"]
    moved["output_ids"], moved["logits"] = on_gpu(ids)[::-2, 3:43], on_gpu(logits)[::-2, :9000]
    assert_same(from_gpu(cukern.apply_penalties(**moved)), want)
    assert_same(from_gpu(cukern.update_logits(moved["logits"])), case["logits"])
    finished = rng.random(3) < 0.3
    stopped = cukern.stop_words_criterion(
        moved["output_ids"], moved["sequence_length"], moved["bad_words"], on_gpu(finished)
    )
    want = twin.stop_words_criterion(case["output_ids"], case["sequence_length"], case["bad_words"], finished.copy())
    assert_same(from_gpu(stopped), want)
    # One row of logits for all sequences.
    one = case["logits"][:1]
    want = twin.apply_penalties(**case | {"logits": np.repeat(one, 3, axis=0)})
    moved["logits"] = cupy.broadcast_to(on_gpu(one), (3, 9000))
    assert_same(from_gpu(cukern.apply_penalties(**moved)), want)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("batch", [0, 1, 255, 256, 257, 1000])
def test_the_state_of_sequences(batch: int, rng: np.random.Generator) -> None:
    start = rng.integers(0, 100, batch).astype(np.int32)
    poison = lambda want: tuple(on_gpu(np.full(x.shape, 77).astype(x.dtype)) for x in want)  # noqa: E731
    want = twin.decoding_init(start)
    out = poison(want)
    assert cukern.decoding_init(on_gpu(start), out=out) == out
    assert_same(tuple(map(from_gpu, out)), want)
    for vocab in (1, 2047, 2049) if batch < 300 else (3,):
        want = twin.topp_init(start, vocab)
        out = poison(want)
        cukern.topp_init(on_gpu(start), vocab, out=out)
        assert_same(tuple(map(from_gpu, out)), want)
    ids = rng.integers(0, 3, (batch, 20)).astype(np.int32)
    lengths = rng.integers(-1, 23, batch).astype(np.int32)
    finished, words = rng.random(batch) < 0.3, word_list([[1, 1], [2, 0, 1], *[[0] * n for n in range(3, 40)]])
    arguments = [on_gpu(x) for x in (ids, lengths, words, finished)]
    assert cukern.stop_words_criterion(*arguments) is arguments[-1]
    assert_same(from_gpu(arguments[-1]), twin.stop_words_criterion(ids, lengths, words, finished.copy()))
    arguments = [on_gpu(x) for x in (start, finished, lengths)]
    cukern.update_finished(*arguments, 7)
    want = twin.update_finished(start, finished.copy(), lengths.copy(), 7)
    assert_same((from_gpu(arguments[1]), from_gpu(arguments[2])), want)


# --- the benchmark --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", bench_decoding.cases(), ids=str)
def test_the_baselines_of_the_benchmark_compute_the_same(case: harness.Case) -> None:
    # The benchmark's own cases, on sizes for the CPU and without compiling.
    sizes = {"batch": 2, "vocab": 600, "length": 40}
    small = (
        bench_decoding._update(sizes["batch"], sizes["vocab"])
        if case.op == "update_logits"
        else bench_decoding._penalties(**sizes, in_place=case.variant == "in place")
    )
    assert small.agree is not None
    for name, baseline in small.baselines.items():
        if baseline.slow:
            continue
        ours, theirs = (harness.inputs(small, 0, "cpu") for _ in range(2))
        before = ours[0].clone()
        got = small.call(*ours)
        assert small.agree(got, baseline.load()(*theirs)), name
        assert not small.agree(before, got)
