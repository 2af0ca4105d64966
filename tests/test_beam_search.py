"""Beam search: the twin against torch, worked examples and transformers; the kernels against the twin."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from cukern.ops import beam_search as op
from cukern.reference import beam_search as twin
from cukern.runtime import arrays, template
from cukern.runtime.cuda import cupy
from cukern.testing import assert_matches
from tests.plans import plan_of

Array = NDArray[Any]
NAN, INF = np.nan, np.inf
RESULTS = {
    "beam_topk": ("values", "ids"),
    "beam_search_step": (
        "ids",
        "parents",
        "scores",
        "finished_scores",
        "finished_lengths",
        "finished_ids",
        "finished_parents",
        "done",
    ),
    "gather_tree": ("tokens",),
    "update_kv_cache": ("keys", "values"),
}
CONSTANTS = template.constants("beam_search/topk_chunks")
POISON = {"float32": NAN, "float16": NAN, "bfloat16": NAN, "int32": 12345, "bool": True, "uint8": 77}


def to_device(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(to_device, value))
    return cupy.asarray(value) if isinstance(value, np.ndarray) else value


def to_host(value: Any) -> Any:
    return tuple(map(to_host, value)) if isinstance(value, tuple) else cupy.asnumpy(value)


def on_gpu(name: str, *args: Any, **options: Any) -> Any:
    """A function of cukern on copies of the arrays on the GPU, its results in NumPy."""
    options = {key: to_device(value) for key, value in options.items()}
    return to_host(getattr(cukern, name)(*map(to_device, args), **options))


def in_numpy(name: str, *args: Any, **options: Any) -> Any:
    return getattr(cukern, name)(*args, **options)


@pytest.fixture(params=[in_numpy, pytest.param(on_gpu, marks=pytest.mark.gpu)], ids=["numpy", "gpu"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


def assert_same(name: str, got: Any, want: Any) -> None:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for result, ours, theirs in zip(RESULTS[name], got, want, strict=True):
        assert_matches(f"beam_search.{result}", ours, theirs)


# --- beam_topk: what is chosen --------------------------------------------------------------------------


def test_topk_by_hand(run: Callable[..., Any]) -> None:
    log_probs = np.array([[[-1, -3, -2], [-2.5, -0.5, -4]]], np.float32)
    values, ids = run("beam_topk", log_probs, 4)
    assert ids.tolist() == [[4, 0, 2, 3]]
    assert values.tolist() == [[-0.5, -1, -2, -2.5]]


def test_ties_go_to_the_lower_id(run: Callable[..., Any]) -> None:
    log_probs = np.zeros((2, 3, 700), np.float32)
    log_probs[0, 2, 5:9] = 1
    log_probs[1, 0, 650:], log_probs[1, 1, :4] = -0.0, 0.0
    values, ids = run("beam_topk", log_probs, 6)
    assert ids.tolist() == [[1405, 1406, 1407, 1408, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert values.tolist() == [[1, 1, 1, 1, 0, 0], [0] * 6]


@pytest.mark.parametrize("value", [NAN, -INF], ids=str)
def test_what_is_no_number_comes_last_and_lowest_first(run: Callable[..., Any], value: float) -> None:
    log_probs = np.full((2, 2, 5000), value, np.float32)
    log_probs[0, 1, 4321], log_probs[0, 0, 2], log_probs[1, 0, 0] = -5, -7, NAN
    values, ids = run("beam_topk", log_probs, 5)
    assert ids.tolist() == [[9321, 2, 0, 1, 3], [0, 1, 2, 3, 4]]
    assert values.tolist() == [[-5, -7, -INF, -INF, -INF], [-INF] * 5]


def test_infinity_comes_first(run: Callable[..., Any]) -> None:
    log_probs = np.zeros((1, 2, 40), np.float32)
    log_probs[0, 1, 3] = log_probs[0, 0, 39] = INF
    values, ids = run("beam_topk", log_probs, 3)
    assert ids.tolist() == [[39, 43, 0]] and values.tolist() == [[INF, INF, 0]]


def test_the_diversity_rate_is_added_by_rank_within_a_beam(run: Callable[..., Any]) -> None:
    log_probs = np.array([[[-1, -1.25, -1.5, -9], [-1.75, -2, -5, -9]]], np.float32)
    # A penalty of 1 per rank: -1, -2.25, -3.5 against -1.75, -3, -7.
    values, ids = run("beam_topk", log_probs, 4, diversity_rate=-1.0)
    assert ids.tolist() == [[0, 4, 1, 5]] and values.tolist() == [[-1, -1.75, -2.25, -3]]
    # A bonus of 1: the beams' own best four become -1, -0.25, 0.5, -6 and -1.75, -1, -3, -6.
    values, ids = run("beam_topk", log_probs, 4, diversity_rate=1.0)
    assert ids.tolist() == [[2, 1, 0, 5]] and values.tolist() == [[0.5, -0.25, -1, -1]]
    # Only the best k of a beam take part: of two, the third is not seen.
    _, ids = run("beam_topk", log_probs, 2, diversity_rate=1.0)
    assert ids.tolist() == [[1, 0]]


def _distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape[1:]))
    return np.stack([rng.permutation(count) for _ in range(shape[0])]).reshape(shape).astype(np.float32) - count


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 1000), (2, 7, 33), (1, 64, 50)], ids=str)
def test_the_twin_is_torchs_topk(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    log_probs = _distinct(rng, shape)
    k = min(int(np.prod(shape[1:])), 20)
    want = torch.from_numpy(log_probs).flatten(1).topk(k)
    assert_same("beam_topk", twin.beam_topk(log_probs, k), (want.values.numpy(), want.indices.int().numpy()))


def test_the_twins_diversity_is_a_composition_of_torchs_topk(rng: np.random.Generator) -> None:
    log_probs = _distinct(rng, (5, 4, 30)) / 64
    own = torch.from_numpy(log_probs).topk(6, dim=-1)
    # The values are multiples of 1/64, of which thirds make no ties.
    values = own.values - torch.arange(6) / 3
    ids = own.indices + 30 * torch.arange(4)[:, None]
    best = values.flatten(1).topk(6)
    want = best.values.numpy(), ids.flatten(1).gather(1, best.indices).int().numpy()
    assert_same("beam_topk", twin.beam_topk(log_probs, 6, diversity_rate=-1 / 3), want)


@pytest.mark.parametrize("dtype", op.DTYPES)
def test_half_precision_is_exact_in_float32(run: Callable[..., Any], dtype: str, rng: np.random.Generator) -> None:
    log_probs = rng.normal(size=(2, 3, 999)).astype(arrays.numpy_dtype(dtype))
    want = run("beam_topk", log_probs.astype(np.float32), 12)
    assert_same("beam_topk", run("beam_topk", log_probs, 12), want)


def test_an_empty_batch_gives_empty_results(run: Callable[..., Any]) -> None:
    values, ids = run("beam_topk", np.empty((0, 4, 50), np.float32), 3)
    assert (values.shape, values.dtype, ids.shape, ids.dtype) == ((0, 3), np.float32, (0, 3), np.int32)
    results = run("beam_search_step", np.empty((0, 4, 50), np.float32), *first_state(0, 4), 0, 5, 1)
    assert [x.shape for x in results] == [(0, 4)] * 7 + [(0,)]
    assert run("gather_tree", *np.empty((2, 3, 0, 4), np.int32), None, 0).shape == (3, 0, 4)
    caches = np.empty((2, 5, 0, 2, 8), np.float32)
    keys, _ = run("update_kv_cache", *caches, np.empty((0, 4), np.int32), 3)
    assert keys.shape == (3, 0, 2, 8)


# --- beam_search_step -----------------------------------------------------------------------------------


def first_state(batch: int, beams: int) -> tuple[Array, ...]:
    scores = np.zeros((batch, beams), np.float32)
    scores[:, 1:] = -1e9
    pool = np.full((batch, beams), -INF, np.float32)
    return (scores, pool, *np.zeros((3, batch, beams), np.int32), np.zeros(batch, bool))


END = 3


def test_two_steps_by_hand(run: Callable[..., Any]) -> None:
    """Two beams, five tokens, of which 3 ends."""
    low = -20.0
    log_probs = np.array([[[-1, low, -4, -2, -3], [0, 0, 0, 0, 0]]], np.float32)
    results = run("beam_search_step", log_probs, *first_state(1, 2), 0, 3, END)
    ids, parents, scores, pool, lengths, last_ids, last_parents, done = results
    # Token 3 is second best and ends; token 4 runs in its place.
    assert (ids.tolist(), parents.tolist(), scores.tolist()) == ([[0, 4]], [[0, 0]], [[-1, -3]])
    assert pool.tolist() == [[-2, -INF]]
    assert (lengths.tolist(), last_ids[0, 0], last_parents[0, 0], done.tolist()) == ([[1, 0]], END, 0, [False])
    # Both end: totals -1.5 (beam 0) and -3.25 (beam 1), over a length of 2. The best that runs has -5.
    log_probs = np.array([[[-4, low, low, -0.5, low], [-5, low, low, -0.25, low]]], np.float32)
    results = run("beam_search_step", log_probs, *results[2:], 1, 3, END)
    ids, parents, scores, pool, lengths, last_ids, last_parents, done = results
    assert (ids.tolist(), parents.tolist(), scores.tolist()) == ([[0, 0]], [[0, 1]], [[-5, -8]])
    assert (pool.tolist(), lengths.tolist()) == ([[-0.75, -1.625]], [[2, 2]])
    assert (last_ids.tolist(), last_parents.tolist()) == ([[END, END]], [[0, 1]])
    # -5 / 2 cannot better -1.625.
    assert done.tolist() == [True]
    # The pool of a search that is done stays as it is.
    again = run("beam_search_step", np.zeros((1, 2, 5), np.float32), *results[2:], 2, 3, END)
    for before, after in zip(results[3:], again[3:], strict=True):
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "done"),
    [(False, 1.0, True), (True, 1.0, True), ("never", 1.0, False), (None, 1.0, False), ("never", 0.0, True)],
)
def test_when_a_search_is_done(run: Callable[..., Any], early_stopping: Any, length_penalty: float, done: bool) -> None:
    # One beam: -1 ends, and -2 runs, which over ten tokens could still become -0.2.
    log_probs = np.array([[[-2, -9, -9, -1]]], np.float32)
    options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    results = run("beam_search_step", log_probs, *first_state(1, 1), 0, 10, END, **options)
    assert results[3].tolist() == [[-1]] and results[-1].tolist() == [done]
    # A pool that is not full stops nothing, unless it is the last step.
    log_probs[0, 0, 0] = -0.5
    for max_steps in (2, 1):
        results = run("beam_search_step", log_probs, *first_state(1, 1), 0, max_steps, END, **options)
        assert results[3].tolist() == ([[-INF]] if max_steps == 2 else [[-0.5]])
        assert results[-1].tolist() == [max_steps == 1]


def test_an_old_hypothesis_comes_before_a_new_one_that_ties(run: Callable[..., Any]) -> None:
    scores, pool, lengths, last_ids, last_parents, done = first_state(1, 2)
    pool[0], lengths[0], last_ids[0], last_parents[0] = [-1, -2], [1, 1], [7, 8], [1, 1]
    log_probs = np.array([[[-8, -9, -7, -4], [0, 0, 0, 0]]], np.float32)
    scores[0] = [0, -100]
    results = run("beam_search_step", log_probs, scores, pool, lengths, last_ids, last_parents, done, 1, 9, END)
    assert results[3].tolist() == [[-1, -2]] and results[5].tolist() == [[7, 8]]
    log_probs[0, 0, END] = -2
    results = run("beam_search_step", log_probs, scores, pool, lengths, last_ids, last_parents, done, 1, 9, END)
    assert results[3].tolist() == [[-1, -1]] and results[5].tolist() == [[7, END]]


def test_several_tokens_may_end(run: Callable[..., Any]) -> None:
    log_probs = np.log(np.array([[[0.4, 0.3, 0.15, 0.1, 0.05]] * 2], np.float32))
    results = run("beam_search_step", log_probs, *first_state(1, 2), 0, 5, (0, 2, 0))
    assert results[0].tolist() == [[1, 3]]
    assert results[4].tolist() == [[1, 0]] and results[5][0, 0] == 0


def test_no_token_ends_outside_of_the_vocabulary(run: Callable[..., Any]) -> None:
    log_probs = np.zeros((1, 2, 5), np.float32)
    results = run("beam_search_step", log_probs, *first_state(1, 2), 0, 5, -1)
    assert results[0].tolist() == [[0, 1]] and not results[4].any()


def test_a_nan_and_what_cannot_be_never_finish(run: Callable[..., Any]) -> None:
    log_probs = np.full((1, 2, 5), NAN, np.float32)
    log_probs[0, 0, 1] = -1
    results = run("beam_search_step", log_probs, *first_state(1, 2), 0, 1, END)
    assert results[0].tolist()[0][0] == 1
    assert results[3].tolist() == [[-1, -INF]] and results[4].tolist() == [[1, 0]]


def test_diversity_chooses_and_has_no_part_in_the_scores(run: Callable[..., Any]) -> None:
    scores, *rest = first_state(1, 2)
    scores[0] = [0, -1]
    log_probs = np.array([[[-1, -1.25, -1.5, -9], [-1, -1.25, -5, -9]]], np.float32)
    plain = run("beam_search_step", log_probs, scores, *rest, 0, 5, END)
    assert (plain[0].tolist(), plain[1].tolist()) == ([[0, 1]], [[0, 0]])
    diverse = run("beam_search_step", log_probs, scores, *rest, 0, 5, END, diversity_rate=-1.0)
    assert (diverse[0].tolist(), diverse[1].tolist(), diverse[2].tolist()) == ([[0, 0]], [[0, 1]], [[-1, -2]])


def test_the_state_may_be_updated_in_place(run: Callable[..., Any], rng: np.random.Generator) -> None:
    log_probs = rng.normal(size=(3, 4, 60)).astype(np.float32)
    state = first_state(3, 4)
    history = np.full((2, 7, 3, 4), 12345, np.int32)
    for step in range(3):
        want = in_numpy("beam_search_step", log_probs, *state, step, 9, END, diversity_rate=-0.1)
        place = to_device if run is on_gpu else tuple
        x, *placed = place((log_probs, *state))
        out = (*place(tuple(history[:, step])), *placed)
        assert cukern.beam_search_step(x, *placed, step, 9, END, diversity_rate=-0.1, out=out) is out
        got = to_host(out) if run is on_gpu else out
        assert_same("beam_search_step", got, want)
        state = tuple(x.copy() for x in got[2:])


@pytest.mark.parametrize("shape", [(1,), ()], ids=str)
def test_a_step_in_an_array_is_that_step(
    run: Callable[..., Any], shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    log_probs = rng.normal(size=(6, 4, 40)).astype(np.float32)
    log_probs[..., END] += 2
    state = random_state(rng, 6, 4)
    ways = list(itertools.product((False, True, "never"), (1.0, -0.5, 0.0, 0.6, 2.5), (0.0, -0.5)))
    for step in (0, 3, 9):
        for early_stopping, length_penalty, rate in ways:
            way = {"early_stopping": early_stopping, "length_penalty": length_penalty, "diversity_rate": rate}
            want = run("beam_search_step", log_probs, *state, step, 10, END, **way)
            got = run("beam_search_step", log_probs, *state, np.full(shape, step, np.int32), 10, END, **way)
            for ours, theirs in zip(got, want, strict=True):
                np.testing.assert_array_equal(ours, theirs)


# --- against transformers -------------------------------------------------------------------------------


def tiny_model(seed: int, vocab: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    # A wide initialization makes logits that differ.
    config = GPT2Config(
        vocab_size=vocab, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.6,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def search(
    model: Any, prompt: torch.Tensor, beams: int, max_steps: int, end_id: Any, fill: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Beam search with cukern on the model's device: the tokens [batch, beams, max_steps], their lengths and scores."""
    batch, device = len(prompt), prompt.device
    state = tuple(torch.from_numpy(x).to(device) for x in first_state(batch, beams))
    ids, parents = torch.empty(2, max_steps, batch, beams, dtype=torch.int32, device=device)
    running = prompt[:, None].expand(-1, beams, -1)
    for step in range(max_steps):
        with torch.no_grad():
            logits = model(input_ids=running.flatten(0, 1)).logits[:, -1]
        log_probs = logits.float().log_softmax(-1).view(batch, beams, -1)
        ids[step], parents[step], *state = cukern.beam_search_step(
            log_probs, *state, step, max_steps, end_id, **options
        )
        running = running.gather(1, parents[step].long()[:, :, None].expand(-1, -1, running.shape[2]))
        running = torch.cat([running, ids[step].long()[:, :, None]], dim=2)
        if state[-1].all():
            break
    _, scores, lengths, last_ids, last_parents, done = state
    assert bool(done.all())
    tokens = cukern.gather_tree(ids, parents, lengths, fill, last_ids=last_ids, last_parents=last_parents)
    return tokens.permute(1, 2, 0), lengths, scores


def agree_with_transformers(device: str, beams: int, seed: int, **options: Any) -> int:
    """Compare all hypotheses of a search; how many of them ended with an end token before the last step."""
    vocab, max_steps, end_id = 37, 12, options.pop("end_id")
    model = tiny_model(seed, vocab).to(device)
    prompt = torch.randint(vocab, (3, 4), generator=torch.Generator().manual_seed(seed)).to(device)
    greedy = beams == 1
    # What fills the result after the end: no token, but a greedy search of transformers passes it to the model.
    fill = end_id if greedy else vocab
    tokens, lengths, scores = search(model, prompt, beams, max_steps, end_id, fill, **options)
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, num_return_sequences=beams, do_sample=False,
        max_new_tokens=max_steps, eos_token_id=end_id, pad_token_id=fill, use_cache=False,
        return_dict_in_generate=True, output_scores=True, **({} if greedy else options),
    )  # fmt: skip
    want = torch.full((3, beams, max_steps), fill, dtype=torch.int32, device=device)
    theirs = generated.sequences[:, prompt.shape[1] :].view(3, beams, -1)
    want[..., : theirs.shape[2]] = theirs
    np.testing.assert_array_equal(tokens.cpu().numpy(), want.cpu().numpy())
    if not greedy:
        got, wanted = (x.flatten().cpu().numpy() for x in (scores, generated.sequences_scores))
        np.testing.assert_allclose(got, wanted, rtol=2e-5)
    return int((lengths < max_steps).sum())


SEARCHES = [
    # (beams, length_penalty, early_stopping, end_id)
    (1, 1.0, True, 5),
    (2, 1.0, False, 5),
    (2, 0.0, "never", (5, 6)),
    (3, 2.0, "never", 5),
    (3, -1.0, True, (1, 5, 9)),
    (4, 1.0, False, (5, 6)),
    (4, 0.6, True, 5),
    (5, -0.5, "never", 5),
    (6, 1.0, "never", (5, 6)),
    (7, 0.0, False, 5),
    (8, 1.3, False, 5),
    (8, 1.0, True, (5, 6)),
]


def _agree(device: str, beams: int, length_penalty: float, early_stopping: Any, end_id: Any) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    ends = list(end_id) if isinstance(end_id, tuple) else end_id
    ended = [agree_with_transformers(device, beams, seed, end_id=ends, **options) for seed in (1, 2, 3)]
    assert sum(ended) > 0, "no hypothesis ended: the test says nothing about that"


@pytest.mark.parametrize(("beams", "length_penalty", "early_stopping", "end_id"), SEARCHES)
def test_token_for_token_with_transformers(beams: int, length_penalty: float, early_stopping: Any, end_id: Any) -> None:
    _agree("cpu", beams, length_penalty, early_stopping, end_id)


@pytest.mark.gpu
@pytest.mark.parametrize(("beams", "length_penalty", "early_stopping", "end_id"), SEARCHES[::3])
def test_token_for_token_with_transformers_on_the_gpu(
    beams: int, length_penalty: float, early_stopping: Any, end_id: Any
) -> None:
    # The CPU's tests need transformers; the GPU's machine may lack it.
    pytest.importorskip("transformers")
    _agree("cuda", beams, length_penalty, early_stopping, end_id)


# --- gather_tree ----------------------------------------------------------------------------------------


def test_gather_tree_by_hand(run: Callable[..., Any]) -> None:
    # The example of TensorFlow's own test.
    ids = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [-1, -1, -1]], np.int32)[:, None]
    parents = np.array([[0, 0, 0], [0, 1, 1], [2, 1, 2], [-1, -1, -1]], np.int32)[:, None]
    tokens = run("gather_tree", ids, parents, np.array([3], np.int32), 10)
    assert tokens[:, 0].tolist() == [[2, 2, 2], [6, 5, 6], [7, 8, 9], [10, 10, 10]]


def test_what_follows_the_end_is_the_end(run: Callable[..., Any]) -> None:
    ids = np.array([[4, 9], [9, 4], [5, 6], [9, 7]], np.int32)[:, None]
    parents = np.tile(np.arange(2, dtype=np.int32), (4, 1, 1))
    tokens = run("gather_tree", ids, parents, None, 9)
    assert tokens[:, 0].T.tolist() == [[4, 9, 9, 9], [9, 9, 9, 9]]


def test_a_length_of_zero_and_one_too_large(run: Callable[..., Any]) -> None:
    ids = np.arange(6, dtype=np.int32).reshape(2, 1, 3)
    parents = np.tile(np.arange(3, dtype=np.int32), (2, 1, 1))
    lengths = np.array([[0, -4, 9]], np.int32)
    assert run("gather_tree", ids, parents, lengths, 7)[:, 0].tolist() == [[7, 7, 2], [7, 7, 5]]
    assert (run("gather_tree", ids, parents, np.zeros(1, np.int32), 7) == 7).all()
    last = {"last_ids": np.full((1, 3), 6, np.int32), "last_parents": np.array([[1, 1, 1]], np.int32)}
    assert run("gather_tree", ids, parents, lengths, 7, **last)[:, 0].tolist() == [[7, 7, 1], [7, 7, 6]]
    none = np.empty((0, 1, 3), np.int32)
    assert run("gather_tree", none, none, None, 7).shape == (0, 1, 3)


def test_parents_out_of_range_are_the_nearest(run: Callable[..., Any]) -> None:
    ids = np.arange(6, dtype=np.int32).reshape(2, 1, 3)
    parents = np.array([[9, 9, 9], [-7, 2**31 - 1, -(2**31)]], np.int32)[:, None]
    assert run("gather_tree", ids, parents, None, 77)[0, 0].tolist() == [0, 2, 0]


def random_tree(rng: np.random.Generator, max_steps: int, batch: int, beams: int) -> tuple[Array, Array]:
    ids = rng.integers(0, 30, (max_steps, batch, beams), np.int32)
    return ids, rng.integers(0, beams, ids.shape, np.int32)


def test_the_tree_is_what_one_gets_by_carrying_the_sequences_along(rng: np.random.Generator) -> None:
    ids, parents = random_tree(rng, 9, 4, 5)
    sequences = np.empty((4, 5, 0), np.int32)
    for step in range(9):
        sequences = np.take_along_axis(sequences, parents[step][:, :, None], axis=1)
        sequences = np.concatenate([sequences, ids[step][:, :, None]], axis=2)
    np.testing.assert_array_equal(twin.gather_tree(ids, parents, None, -1).transpose(1, 2, 0), sequences)


# --- update_kv_cache ------------------------------------------------------------------------------------


def random_caches(
    rng: np.random.Generator, steps: int, batch: int, beams: int, heads: int, dim: int, dtype: str = "float32"
) -> tuple[Array, Array, Array]:
    kind = arrays.numpy_dtype(dtype)
    caches = (rng.normal(size=(2, steps, batch * beams, heads, dim)) * 9).astype(np.int8).astype(kind)
    return caches[0].copy(), caches[1].copy(), rng.integers(0, beams, (batch, beams), np.int32)


def test_the_caches_are_those_of_torchs_index_select(run: Callable[..., Any], rng: np.random.Generator) -> None:
    keys, values, parents = random_caches(rng, 6, 3, 4, 2, 8)
    rows = torch.from_numpy((parents + 4 * np.arange(3)[:, None]).reshape(-1))
    want = tuple(torch.from_numpy(x[:5]).index_select(1, rows).numpy() for x in (keys, values))
    assert_same("update_kv_cache", run("update_kv_cache", keys, values, parents, 5), want)


def test_only_the_steps_so_far_are_written(run: Callable[..., Any], rng: np.random.Generator) -> None:
    keys, values, parents = random_caches(rng, 6, 2, 3, 2, 8)
    parents[0] = [7, -3, 1]  # the nearest that is not out of range
    want = tuple(x.copy() for x in twin.update_kv_cache(keys, values, parents, 4))
    for in_place in (False, True):
        arguments = [x.copy() for x in (keys, values)]
        if run is on_gpu:
            arguments = list(map(to_device, arguments))
        out = tuple(arguments) if in_place else tuple(x * 0 + 5 for x in arguments)
        place = to_device(parents) if run is on_gpu else parents
        assert cukern.update_kv_cache(*arguments, place, 4, out=out) is out
        got = to_host(out) if run is on_gpu else out
        assert_same("update_kv_cache", tuple(x[:4] for x in got), want)
        for after, before in zip(got, (keys, values), strict=True):
            np.testing.assert_array_equal(after[4:], before[4:] if in_place else np.full_like(before[4:], 5))


# --- arrays of every library in host memory -------------------------------------------------------------


def good_arguments(name: str) -> dict[str, Any]:
    """Arguments by keyword, so that their names are tested as well."""
    rng = np.random.default_rng(0)
    log_probs = rng.normal(size=(2, 3, 20)).astype(np.float32)
    if name == "beam_topk":
        return {"log_probs": log_probs, "k": 4}
    if name == "beam_search_step":
        names = ("scores", "finished_scores", "finished_lengths", "finished_ids", "finished_parents", "done")
        state = dict(zip(names, first_state(2, 3), strict=True))
        return {"log_probs": log_probs, **state, "step": 0, "max_steps": 5, "end_id": 2}
    if name == "gather_tree":
        ids, parents = random_tree(rng, 5, 2, 3)
        return {"ids": ids, "parents": parents, "lengths": np.array([4, 5], np.int32), "end_id": 1}
    keys, values, parents = random_caches(rng, 5, 2, 3, 2, 4)
    return {"key_cache": keys, "value_cache": values, "parents": parents, "step": 4}


def outs(name: str, change: Callable[[Array], Any] = lambda x: x) -> Any:
    """Poisoned arrays for the results of the good arguments."""
    arguments = good_arguments(name)
    results = getattr(cukern, name)(**arguments)
    if name == "update_kv_cache":
        results = arguments["key_cache"], arguments["value_cache"]
    if not isinstance(results, tuple):
        return change(np.full_like(results, POISON[results.dtype.name]))
    return tuple(change(np.full_like(x, POISON[x.dtype.name])) for x in results)


# --- bad arguments --------------------------------------------------------------------------------------


def bad(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> Any:
    """A call of a function with changed arguments, and its error."""
    return pytest.param(name, changes, error, message, id=f"{name} {message[:60]}")


def _bad_selections() -> Iterator[Any]:
    """Calls of `beam_topk` and `beam_search_step`, of what they have in common."""
    for name in ("beam_topk", "beam_search_step"):
        log_probs = np.zeros((2, 3, 20), np.float32)
        for value, error, message in (
            ([1.0], TypeError, "an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
            (log_probs.astype(np.float64), TypeError, "float32 or float16 or bfloat16, got float64"),
            (log_probs[0], ValueError, "of shape [batch, beams, vocab], got [3, 20]"),
            (np.zeros((2, 3, 40), np.float32)[..., ::2], ValueError, "contiguous, got strides (120, 40, 2)"),
        ):
            yield bad(name, {"log_probs": value}, error, f"log_probs must be {message}")
        message = "diversity_rate must be a finite number, got nan"
        yield bad(name, {"diversity_rate": NAN}, ValueError, message)
        yield bad(name, {"diversity_rate": 1e35}, ValueError, "diversity_rate must be in [-1e+30, 1e+30], got 1e+35")
        message = "variant must be one of 'auto', 'narrow', 'wide', got 'fast'"
        yield bad(name, {"variant": "fast"}, ValueError, message)
        message = "variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got 'wide'"
        yield bad(name, {"variant": "wide"}, ValueError, message)
        count = len(RESULTS[name])
        yield bad(name, {"out": 3}, TypeError, f"out must be {count} arrays (")
        yield bad(name, {"out": outs(name)[:1]}, TypeError, f"{', '.join(RESULTS[name])}), got 1 arrays")
        wrong = (outs(name)[0].astype(np.float64), *outs(name)[1:])
        kind = outs(name)[0].dtype.name
        yield bad(name, {"out": wrong}, TypeError, f"out[0] must be {kind}, got float64")
        wrong = (*outs(name)[:-1], outs(name)[-1][:1])
        yield bad(name, {"out": wrong}, ValueError, f"out[{count - 1}] must be of shape [batch")


def _bad_topks() -> Iterator[Any]:
    """Calls of `beam_topk`."""
    span = "k must be an integer in [1, 60] (the candidates, at most 128), got"
    for value in (0, -1, 61):
        yield bad("beam_topk", {"k": value}, ValueError, f"{span} {value}")
    yield bad("beam_topk", {"k": 2.0}, TypeError, "k must be an integer of at least 1, got 2.0 (float)")
    changes: dict[str, Any] = {"log_probs": np.zeros((1, 2, 100), np.float32), "k": 129}
    yield bad(
        "beam_topk", changes, ValueError, "k must be an integer in [1, 128] (the candidates, at most 128), got 129"
    )
    changes = {"log_probs": np.zeros((1, 2, 100), np.float32), "k": 17, "variant": "narrow"}
    yield bad("beam_topk", changes, ValueError, "variant must be 'wide' for more than 16 results, got 'narrow'")
    huge = np.broadcast_to(np.zeros(1, np.float32), (0, 2, 2**30))
    message = f"log_probs must be of 1 to {2**31 - 1} candidates (beams * vocab), got 2 * {2**30}"
    yield bad("beam_topk", {"log_probs": huge}, ValueError, message)
    for shape in ((2, 0, 5), (2, 5, 0)):
        message = f"log_probs must be of 1 to {2**31 - 1} candidates (beams * vocab), got {shape[1]} * {shape[2]}"
        yield bad("beam_topk", {"log_probs": np.zeros(shape, np.float32)}, ValueError, message)


def _bad_steps() -> Iterator[Any]:
    """Calls of `beam_search_step`."""
    step = "beam_search_step"
    for name, kind in (*op._STATE, ("done", "bool")):
        good = good_arguments(step)[name]
        yield bad(step, {name: np.zeros(good.shape, np.int64)}, TypeError, f"{name} must be {kind}, got int64")
        shape = "[batch] = [2]" if name == "done" else "[batch, beams] = [2, 3]"
        message = f"{name} must be of shape {shape}, got {[1, *good.shape[1:]]}"
        yield bad(step, {name: good[:1]}, ValueError, message)
        message = f"{name} must be a NumPy array like log_probs, got torch.Tensor"
        yield bad(step, {name: torch.from_numpy(good)}, TypeError, message)
    for value, error, message in (
        (-1, ValueError, "an integer in [0, 4] (below max_steps), got -1"),
        (5, ValueError, "an integer in [0, 4] (below max_steps), got 5"),
        (1.0, TypeError, "an integer in [0, 4] (below max_steps), got 1.0 (float)"),
        (np.array([5], np.int32), ValueError, "an integer in [0, 4] (below max_steps), got 5"),
        (np.array(-1, np.int32), ValueError, "an integer in [0, 4] (below max_steps), got -1"),
        (np.array([1]), TypeError, "int32, got int64"),
        (np.array([1, 1], np.int32), ValueError, "of shape [1] = [1], got [2]"),
    ):
        yield bad(step, {"step": value}, error, f"step must be {message}")
    message = "max_steps must be an integer in [1, 2147483647], got 0"
    yield bad(step, {"max_steps": 0}, ValueError, message)
    ends = "end_id must be an integer, or a tuple or list of 1 to 8 of them, got"
    for value in ((), tuple(range(9)), "2", 2.0, None):
        yield bad(step, {"end_id": value}, TypeError, f"{ends} {value!r}")
    yield bad(step, {"end_id": (1, 2.5)}, TypeError, "end_id must be an integer in [-2147483648, 2147483647], got 2.5")
    message = "early_stopping must be False, True, None or 'never', got 'always'"
    yield bad(step, {"early_stopping": "always"}, ValueError, message)
    yield bad(step, {"early_stopping": 1}, ValueError, "early_stopping must be False, True, None or 'never', got 1")
    message = "length_penalty must be such that 5 ** length_penalty is in [1e-30, 1e+30], got"
    for value in (1e4, -60.0):
        changes = {"step": 4, "length_penalty": value}
        yield bad(step, changes, ValueError, f"{message} {value}")
        # Of a step on the device that of the last one is looked at.
        yield bad(step, changes | {"step": np.array([0], np.int32)}, ValueError, f"{message} {value}")
    yield bad(step, {"length_penalty": INF}, ValueError, "length_penalty must be a finite number, got inf")
    for beams, ends, message in (
        (65, 1, "of 1 to 64 beams, got 65"),
        (43, (1, 2), "of at most 42 beams with 2 end ids, got 43"),
    ):
        state = dict(zip(list(good_arguments(step))[1:7], first_state(2, beams), strict=True))
        changes = {"log_probs": np.zeros((2, beams, 20), np.float32), **state, "end_id": ends}
        yield bad(step, changes, ValueError, f"log_probs must be {message}")
    changes = {"log_probs": np.zeros((2, 3, 2), np.float32), "end_id": (0, 1)}
    message = "log_probs must be of more than 2 tokens in the vocabulary (end_id), got 2"
    yield bad(step, changes, ValueError, message)


def _bad_trees() -> Iterator[Any]:
    """Calls of `gather_tree`."""
    tree = "gather_tree"
    ids = good_arguments(tree)["ids"]
    for name, value, error, message in (
        ("ids", ids[0], ValueError, "of shape [max_steps, batch, beams], got [2, 3]"),
        ("ids", ids.astype(np.int64), TypeError, "int32, got int64"),
        ("ids", "x", TypeError, "an array"),
        ("ids", np.zeros((5, 2, 65), np.int32), ValueError, "of 1 to 64 beams, got 65"),
        ("parents", ids[:4], ValueError, "of shape [max_steps, batch, beams] = [5, 2, 3], got [4, 2, 3]"),
        ("parents", np.zeros((5, 2, 6), np.int32)[..., ::2], ValueError, "contiguous, got strides"),
        ("lengths", np.zeros(3, np.int32), ValueError, "of shape [batch] = [2], got [3]"),
        ("lengths", np.zeros((2, 2), np.int32), ValueError, "of shape [batch, beams] = [2, 3], got [2, 2]"),
        ("lengths", 4, TypeError, "a NumPy array like ids, got builtins.int"),
        ("last_parents", np.zeros((2, 3), np.int32), ValueError, ""),
        ("out", np.zeros((5, 2, 3), np.int64), TypeError, "int32, got int64"),
        ("end_id", 1.5, TypeError, "an integer in [-2147483648, 2147483647], got 1.5 (float)"),
    ):
        text = f"{name} must be {message}" if message else "last_ids must be given where the other one of last_ids"
        yield bad(tree, {name: value}, error, text)


def _bad_caches() -> Iterator[Any]:
    """Calls of `update_kv_cache`."""
    cache = "update_kv_cache"
    keys = good_arguments(cache)["key_cache"]
    symbols = "[max_steps, batch * beams, heads, dim]"
    for name, value, error, message in (
        ("key_cache", keys[0], ValueError, f"of shape {symbols}, got [6, 2, 4]"),
        ("key_cache", keys.astype(np.int64), TypeError, "float32 or float16 or bfloat16 or"),
        ("value_cache", keys.astype(np.float16), TypeError, "float32, got float16"),
        ("value_cache", keys[:4], ValueError, f"of shape {symbols} = [5, 6, 2, 4], got [4, 6, 2, 4]"),
        ("parents", np.zeros(6, np.int32), ValueError, "of shape [batch, beams], got [6]"),
        ("parents", np.zeros((2, 3), np.int64), TypeError, "int32, got int64"),
        ("parents", np.zeros((1, 65), np.int32), ValueError, "of 1 to 64 beams, got 65"),
        ("step", 6, ValueError, "an integer in [0, 5] (max_steps), got 6"),
        ("step", np.array([6], np.int32), ValueError, "an integer in [0, 5] (max_steps), got 6"),
        ("step", np.array([-1], np.int32), ValueError, "an integer in [0, 5] (max_steps), got -1"),
        ("step", np.zeros(2, np.int32), ValueError, "of shape [1] = [1], got [2]"),
        ("variant", "fast", ValueError, "one of 'auto', 'vector', 'scalar', got 'fast'"),
        ("variant", "vector", ValueError, "'auto' for arrays in host memory"),
        ("out", keys, TypeError, "2 arrays (keys, values), got ndarray"),
    ):
        yield bad(cache, {name: value}, error, f"{name} must be {message}")
    message = f"key_cache must be of shape {symbols} = [5, 4, 2, 4], got [5, 6, 2, 4]"
    yield bad(cache, {"parents": np.zeros((2, 2), np.int32)}, ValueError, message)
    both = np.zeros((6, 6, 2, 4), np.float32)
    spare = np.zeros((5, 6, 2, 4), np.float32)
    overlap = "the cache itself or clear of both caches and of the other result, got an overlap"
    changes = {"key_cache": both[:5], "value_cache": spare, "out": (both[1:], spare)}
    yield bad(cache, changes, ValueError, f"out[0] must be {overlap}")
    changes = {"key_cache": both[:5], "value_cache": spare, "out": (spare, both[:5])}
    yield bad(cache, changes, ValueError, f"out[0] must be {overlap}")
    changes = {"out": (both[1:], both[:5])}
    yield bad(cache, changes, ValueError, f"out[1] must be {overlap}")


BAD_CALLS = [*_bad_selections(), *_bad_topks(), *_bad_steps(), *_bad_trees(), *_bad_caches()]


@pytest.mark.parametrize(("name", "changes", "error", "message"), BAD_CALLS)
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"out": outs(name)} | good_arguments(name) | changes
    out = arguments["out"] if isinstance(arguments["out"], tuple) else ()
    before = [np.copy(x) for x in out]
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments)
    # Nothing is written before all has been checked.
    for old, new in zip(before, out, strict=True):
        np.testing.assert_array_equal(new, old)


def test_numpy_integers_are_taken() -> None:
    arguments = good_arguments("beam_search_step")
    arguments |= {"step": np.int64(0), "max_steps": np.int32(5), "end_id": np.int64(2)}
    assert_same("beam_search_step", cukern.beam_search_step(**arguments), cukern.beam_search_step(**arguments))
    arguments = good_arguments("beam_topk")
    assert_same("beam_topk", cukern.beam_topk(arguments["log_probs"], np.int32(4)), cukern.beam_topk(**arguments))


# --- plans ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, -0.5])
def test_a_launch_has_the_step_of_its_call(rate: float) -> None:
    arguments = good_arguments("beam_search_step") | {"diversity_rate": rate, "length_penalty": 2.0}
    for step in range(5):
        launches = plan_of("beam_search_step", **arguments | {"step": step})[0].steps
        assert [launch.variant.instance.function for launch in launches] == [
            "topk_chunks", *["topk_merge"] * (rate != 0), "beam_step"
        ]  # fmt: skip
        fields = [launches[-1].fields[name] for name in ("length", "last", "penalty", "furthest_penalty")]
        assert fields == [step + 1, step == 4, (step + 1) ** 2, (step + 1) ** 2]
    for step in (-1, 5):
        with pytest.raises(
            ValueError, match=re.escape(f"step must be an integer in [0, 4] (below max_steps), got {step}")
        ):
            plan_of("beam_search_step", **arguments | {"step": step})


def test_a_plan_in_place_serves_no_results_that_overlap() -> None:
    keys, values, parents = random_caches(np.random.default_rng(0), 5, 2, 3, 2, 4)
    (placed,) = plan_of("update_kv_cache", keys, values, parents, 4, out=(keys, values))[0].computed
    k, v = (x.ctypes.data for x in (keys, values))
    assert [x.address for x in placed.operands[1:]] == [k, v, k, v]
    far = max(k, v) + 2 * keys.nbytes
    for results, fits in (
        ((k, v), True), ((far, v), True), ((far, far + keys.nbytes), True),
        ((v, k), False), ((k + 16, v), False), ((far, far), False), ((far, far + 16), False),
    ):  # fmt: skip
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="an overlap"):
            placed.function(keys.nbytes, k, v, *results)
    for step in (0, 1, 4):
        launches = plan_of("update_kv_cache", keys, values, parents, step, out=(keys, values))[0].steps
        assert [launch.fields["steps"] for launch in launches] == [step] * (step > 0)


# --- the choice of a variant ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", op.DTYPES)
def test_the_chunks_cover_a_row_and_fit_a_block(dtype: str) -> None:
    items = 16 // arrays.ITEM_SIZE[dtype]
    sizes = (1, 3, items, 50, 257 * items, 2048 * items, 2049 * items, 32000, 50257, 128256, 2**20, 2**31 - 1)
    for vocab, batch in itertools.product(sizes, (0, 1, 32, 1000)):
        selection = op._selection(dtype, batch, 1, vocab, 1, "auto")
        assert 1 <= selection.vectors <= CONSTANTS["THREADS"] * CONSTANTS["LOADS"]
        assert selection.chunks * selection.vectors >= vocab // items > (selection.chunks - 1) * selection.vectors - 1
    assert op._selection("float32", 32, 4, 128256, 4, "auto").chunks == 16


def test_the_bound_is_always_below_k_entries() -> None:
    for k, lists in itertools.product(range(1, CONSTANTS["MAX_K"] + 1), (*range(1, 300), 1024, 10**6)):
        depth = op._depth(k, lists)
        assert 1 <= depth <= k
        assert -(-k // depth) <= lists  # so many lists must reach the bound


# --- the kernels against the twin -----------------------------------------------------------------------


def poisoned(results: tuple[tuple[tuple[int, ...], str], ...]) -> tuple[Any, ...]:
    return tuple(to_device(np.full(shape, POISON[dtype], dtype)) for shape, dtype in results)


def topk_on_gpu(log_probs: Any, k: int, **options: Any) -> Any:
    shape = (log_probs.shape[0], k)
    out = poisoned(((shape, "float32"), (shape, "int32")))
    assert cukern.beam_topk(log_probs, k, out=out, **options) is out
    return to_host(out)


def shifted(array: Array, items: int) -> Any:
    """A copy on the GPU that starts `items` elements after an aligned address, among others."""
    buffer = np.full(array.size + 64, POISON[array.dtype.name], array.dtype)
    buffer[items : items + array.size] = array.ravel()
    return to_device(buffer)[items : items + array.size].reshape(array.shape)


def compare_topk(log_probs: Array, k: int, rate: float = 0.0, shift: int = 0) -> None:
    want = twin.beam_topk(log_probs, k, diversity_rate=rate)
    variants = ("narrow", "wide") if k <= op._GROUPS["narrow"][1] else ("auto",)
    for variant in variants:
        got = topk_on_gpu(shifted(log_probs, shift), k, diversity_rate=rate, variant=variant)
        assert_same("beam_topk", got, want)


TOPK = {
    "one of everything": (1, 1, 1, 1),
    "fewer candidates than a vector": (2, 1, 3, 2),
    "all of a small vocabulary": (3, 4, 7, 28),
    "less than a chunk": (5, 4, 1000, 8),
    "a chunk and a bit": (2, 3, 9001, 4),
    "GPT-2": (2, 4, 50257, 8),
    "Llama 3": (1, 4, 128256, 8),
    "one beam": (3, 1, 32000, 2),
    "the most narrow": (2, 8, 5003, 16),
    "the least wide": (2, 8, 5003, 17),
    "64 beams": (1, 64, 2051, 128),
    "more lists than threads": (1, 64, 9000, 128),
    "few lists, many results": (1, 1, 40000, 128),
    "a large batch": (300, 2, 100, 4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize("sizes", TOPK.values(), ids=TOPK)
def test_topk(sizes: tuple[int, int, int, int], dtype: str, rng: np.random.Generator) -> None:
    *shape, k = sizes
    log_probs = (rng.normal(size=shape) * 3).astype(arrays.numpy_dtype(dtype))
    compare_topk(log_probs, k, shift=int(rng.integers(8)))
    if shape[2] <= 10000:
        compare_topk(log_probs, k, rate=float(rng.choice([-0.75, 0.25])))


def difficult(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Array:
    """Rows whose best values fill the list of a block, or nearly."""
    x = rng.normal(size=shape)
    if kind == "all equal":
        x[:] = 1.5
    elif kind == "descending":
        x = -np.sort(-x)
    elif kind == "ascending":
        x = np.sort(x)
    elif kind == "few values":
        x = np.round(x)
    elif kind == "masked":
        x[rng.random(shape) > 0.002] = -INF
    elif kind == "NaN and infinities":
        x = np.where(rng.random(shape) < 0.3, rng.choice([NAN, -INF, INF], shape, p=[0.7, 0.2999, 0.0001]), x)
    elif kind == "all NaN":
        x[:] = NAN
    elif kind == "one beam leads":
        x[:, 0] += 100
    elif kind == "zeros of both signs":
        x = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    return x


DIFFICULT = (
    "all equal",
    "descending",
    "ascending",
    "few values",
    "masked",
    "NaN and infinities",
    "all NaN",
    "one beam leads",
    "zeros of both signs",
)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", DIFFICULT)
def test_topk_of_difficult_rows(kind: str, rng: np.random.Generator) -> None:
    dtypes = itertools.cycle(op.DTYPES)
    for shape, k in (((3, 4, 9001), 4), ((1, 16, 12000), 32), ((1, 2, 70000), 16), ((2, 3, 700), 128)):
        for rate in (0.0, 0.5):
            x = difficult(rng, kind, shape).astype(arrays.numpy_dtype(next(dtypes)))
            compare_topk(x, k, rate, int(rng.integers(4)))


@pytest.mark.gpu
@settings(max_examples=60)
@given(st.data())
def test_topk_of_random_sizes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab = data.draw(st.integers(1, 5000) | st.integers(1, 40))
    shape = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9)), vocab)
    k = data.draw(st.integers(1, min(CONSTANTS["MAX_K"], shape[1] * vocab)))
    kind = data.draw(st.sampled_from([*DIFFICULT, "plain", "plain"]))
    dtype = arrays.numpy_dtype(data.draw(st.sampled_from(op.DTYPES)))
    rate = data.draw(st.sampled_from([0.0, 0.0, -0.5, 0.5]))
    compare_topk(difficult(rng, kind, shape).astype(dtype), k, rate, data.draw(st.integers(0, 7)))


def random_state(rng: np.random.Generator, batch: int, beams: int) -> tuple[Array, ...]:
    """A state whose pools are empty, part full, full, and of searches that are done."""
    scores = -np.sort(rng.exponential(4, (batch, beams))).astype(np.float32)
    lengths = rng.integers(1, 9, (batch, beams), np.int32)
    lengths[np.arange(beams) >= rng.integers(0, beams + 2, (batch, 1))] = 0
    pool = -np.sort(rng.exponential(2, (batch, beams))).astype(np.float32)
    pool[lengths == 0] = -INF
    last_ids, last_parents = rng.integers(0, beams, (2, batch, beams), np.int32)
    return scores, pool, lengths, last_ids, last_parents, rng.random(batch) < 0.2


def step_on_gpu(log_probs: Array, state: tuple[Array, ...], *args: Any, **options: Any) -> Any:
    shape = log_probs.shape[:2]
    kinds = ["int32", "int32", "float32", "float32", "int32", "int32", "int32"]
    out = poisoned((*((shape, kind) for kind in kinds), (shape[:1], "bool")))
    placed = to_device(log_probs), *map(to_device, state)
    assert cukern.beam_search_step(*placed, *args, out=out, **options) is out
    return to_host(out)


STEPS = {
    "one beam": (3, 1, 50, 5, 4),
    "four beams": (5, 4, 3000, 5, 4),
    "eight beams, two ends": (4, 8, 999, (5, 6), 4),
    "a small vocabulary, many ends": (40, 3, 5, (0, 1, 2), 4),
    "64 beams": (2, 64, 300, 5, 4),
    "Llama 3": (1, 4, 128256, (128001, 128009), 4),
    "the last step": (6, 5, 40, 5, 9),
    "the first step": (6, 5, 40, 5, 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize("sizes", STEPS.values(), ids=STEPS)
def test_step(sizes: tuple[int, int, int, Any, int], dtype: str, rng: np.random.Generator) -> None:
    batch, beams, vocab, ends, step = sizes
    options = itertools.product((False, True, "never"), (1.0, -0.5, 0.0, 2.5), (0.0, -0.5))
    for i, (early_stopping, length_penalty, rate) in enumerate(options):
        if vocab > 10000 and i % 5:
            continue
        x = rng.normal(size=(batch, beams, vocab)) * 3
        # End tokens are likely, so that hypotheses end.
        x[..., list(ends) if isinstance(ends, tuple) else [ends]] += rng.choice([0.0, 6.0], (batch, beams, 1))
        x[rng.random(x.shape) < 0.05] = -INF
        x = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True))).astype(arrays.numpy_dtype(dtype))
        state = first_state(batch, beams) if step == 0 else random_state(rng, batch, beams)
        args = (step, 10, ends)
        way = {"early_stopping": early_stopping, "length_penalty": length_penalty, "diversity_rate": rate}
        want = twin.beam_search_step(x, *state, *args, **way)
        k = max(2, 1 + len(set(ends)) if isinstance(ends, tuple) else 2) * beams
        for variant in ("narrow", "wide") if k <= op._GROUPS["narrow"][1] else ("wide",):
            assert_same("beam_search_step", step_on_gpu(x, state, *args, variant=variant, **way), want)


@pytest.mark.gpu
def test_a_whole_search_is_that_of_the_twin(rng: np.random.Generator) -> None:
    batch, beams, vocab, max_steps = 5, 6, 60, 15
    table = rng.normal(size=(vocab, vocab)) * 2
    table = (table - np.log(np.exp(table).sum(axis=-1, keepdims=True))).astype(np.float32)
    histories = []
    for place in (in_numpy, on_gpu):
        state, tokens = first_state(batch, beams), np.zeros((batch, beams), np.int32)
        history: list[Any] = []
        for step in range(max_steps):
            ids, parents, *state = place("beam_search_step", table[tokens], *state, step, max_steps, END)
            history.append((ids, parents))
            tokens = ids
        ids, parents = (np.stack(x) for x in zip(*history, strict=True))
        last = {"last_ids": state[3], "last_parents": state[4]}
        histories.append((place("gather_tree", ids, parents, state[2], END, **last), *state))
    assert (histories[0][3] > 0).all()
    for got, want in zip(histories[1], histories[0], strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 5), (40, 2, 64), (33, 5, 1), (500, 3, 4), (2100, 1, 2)], ids=str)
def test_tree(shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    max_steps, batch, beams = shape
    ids, parents = random_tree(rng, *shape)
    parents[rng.random(shape) < 0.02] = rng.choice([-5, beams, 2**31 - 1])
    per_beam = rng.integers(-1, max_steps + 2, (batch, beams), np.int32)
    last = dict(zip(("last_ids", "last_parents"), rng.integers(0, beams, (2, batch, beams), np.int32), strict=True))
    for lengths, options in ((None, {}), (per_beam[:, 0].copy(), {}), (per_beam, {}), (per_beam, last)):
        for end_id in (4, 99):
            want = twin.gather_tree(ids, parents, lengths, end_id, **options)
            (out,) = poisoned(((shape, "int32"),))
            on_device = {key: to_device(value) for key, value in options.items()}
            args = to_device(ids), to_device(parents), None if lengths is None else to_device(lengths), end_id
            assert cukern.gather_tree(*args, out=out, **on_device) is out
            assert_same("gather_tree", to_host(out), want)


CACHES = {
    "one of everything": (1, 1, 1, 1, 1),
    "whole vectors": (5, 3, 4, 16, 64),
    "a row of odd size": (5, 3, 4, 3, 5),
    "rows of several tiles": (3, 2, 8, 32, 128),
    "64 beams": (3, 1, 64, 2, 24),
    "three beams in a row that is no multiple of the tile": (3, 2, 3, 11, 136),
    "more tiles than a GPU runs at once": (60, 8, 4, 8, 64),
}


@pytest.mark.parametrize("sizes", CACHES.values(), ids=CACHES)
def test_a_step_in_an_array_moves_as_many_entries(
    run: Callable[..., Any], sizes: tuple[int, ...], rng: np.random.Generator
) -> None:
    keys, values, parents = random_caches(rng, *sizes)
    for step in {0, sizes[0] // 2, sizes[0]}:
        want = twin.update_kv_cache(keys, values, parents, step)
        for in_place in (False, True):
            place = to_device if run is on_gpu else lambda x: x
            caches = tuple(place(x.copy()) for x in (keys, values))
            out = caches if in_place else tuple(place(np.full_like(x, NAN)) for x in (keys, values))
            cukern.update_kv_cache(*caches, place(parents), place(np.array([step], np.int32)), out=out)
            got = to_host(out) if run is on_gpu else out
            assert_same("update_kv_cache", tuple(x[:step] for x in got), want)
            for x, before in zip(got, (keys, values), strict=True):
                np.testing.assert_array_equal(x[step:], before[step:] if in_place else NAN)
        new = run("update_kv_cache", keys, values, parents, np.array(step, np.int32))
        assert_same("update_kv_cache", tuple(x[:step] for x in new), want)
        assert new[0].shape == keys.shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("sizes", CACHES.values(), ids=CACHES)
def test_caches(sizes: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    keys, values, parents = random_caches(rng, *sizes, dtype)
    steps = sizes[0]
    parents[rng.random(parents.shape) < 0.1] = rng.choice([-1, sizes[2], 2**31 - 1])
    for step in {steps, steps - 1}:
        want = twin.update_kv_cache(keys, values, parents, step)
        for shift, variant in ((0, "auto"), (1, "auto"), (2, "auto"), (0, "scalar")):
            for in_place in (False, True):
                caches = tuple(shifted(x, shift) for x in (keys, values))
                out = caches if in_place else poisoned(((keys.shape, dtype),) * 2)
                before = to_host(out)
                assert cukern.update_kv_cache(*caches, to_device(parents), step, out=out, variant=variant) is out
                got = to_host(out)
                assert_same("update_kv_cache", tuple(x[:step] for x in got), want)
                for x, y in zip(got, before, strict=True):
                    assert x[step:].tobytes() == y[step:].tobytes()
        assert_same("update_kv_cache", on_gpu("update_kv_cache", keys, values, parents, step), want)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_a_step_out_of_range_is_the_nearest_that_is_not(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4, 60)).astype(np.float32)
    state = random_state(rng, 3, 4)
    for asked, taken in ((-(2**31), 0), (-1, 0), (9, 8), (2**31 - 1, 8)):
        want = twin.beam_search_step(x, *state, taken, 9, END, length_penalty=0.7)
        got = step_on_gpu(x, state, cupy.array([asked], np.int32), 9, END, length_penalty=0.7)
        assert_same("beam_search_step", got, want)
    keys, values, parents = random_caches(rng, 6, 2, 3, 2, 8)
    for asked, taken in ((-(2**31), 0), (-1, 0), (7, 6), (2**31 - 1, 6)):
        out = poisoned(((keys.shape, "float32"),) * 2)
        cukern.update_kv_cache(*map(to_device, (keys, values, parents)), cupy.array([asked], np.int32), out=out)
        want = twin.update_kv_cache(keys, values, parents, taken)
        assert_same("update_kv_cache", tuple(x[:taken] for x in to_host(out)), want)
        assert all(np.isnan(x[taken:]).all() for x in to_host(out))


@pytest.mark.gpu
def test_one_graph_serves_all_steps(rng: np.random.Generator) -> None:
    batch, beams, vocab, max_steps = 5, 6, 60, 15
    table = torch.from_numpy(rng.normal(size=(vocab, vocab)).astype(np.float32)).cuda().log_softmax(-1)
    ids, parents, *state = (torch.from_numpy(x).cuda() for x in (
        *np.zeros((2, batch, beams), np.int32), *first_state(batch, beams)
    ))  # fmt: skip
    caches = torch.zeros(2, max_steps, batch * beams, 2, 8, device="cuda")
    step, length = torch.tensor([[0], [1]], dtype=torch.int32, device="cuda")

    def advance() -> None:
        cukern.beam_search_step(
            table[ids], *state, step, max_steps, END, length_penalty=0.6, out=(ids, parents, *state)
        )  # fmt: skip
        cukern.update_kv_cache(*caches, parents, length, out=tuple(caches))
        step.add_(1)
        length.add_(1)

    histories = []
    graph = torch.cuda.CUDAGraph()
    start = [x.clone() for x in (ids, *state, step, length)]
    advance()  # loads the kernels, as a capture cannot
    with torch.cuda.graph(graph):
        advance()
    for replays in (False, True):
        for x, value in zip((ids, *state, step, length), start, strict=True):
            x.copy_(value)
        caches.copy_(
            torch.arange(max_steps * batch * beams, device="cuda").view(1, max_steps, -1, 1, 1).expand_as(caches)
        )
        history: list[Any] = []
        for s in range(max_steps):
            if replays:
                graph.replay()
            else:
                new = cukern.beam_search_step(table[ids], *state, s, max_steps, END, length_penalty=0.6)
                for x, value in zip((ids, parents, *state), new, strict=True):
                    x.copy_(value)
                cukern.update_kv_cache(*caches, parents, s + 1, out=tuple(caches))
            history += [x.clone() for x in (ids, parents, *state, caches)]
        histories.append(history)
    for ours, theirs in zip(*histories, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_a_vector_variant_that_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    keys, values, parents = map(to_device, random_caches(rng, 2, 1, 2, 3, 5))
    with pytest.raises(ValueError, match="variant must be 'auto' or 'scalar' where rows are not whole"):
        cukern.update_kv_cache(keys, values, parents, 2, variant="vector")


@pytest.mark.gpu
@pytest.mark.sanitize
def test_each_kernel_stays_inside_its_arrays(rng: np.random.Generator) -> None:
    for dtype, shape, k, kind in (
        ("float32", (1, 2, 1027), 5, "plain"),
        ("bfloat16", (1, 2, 1027), 20, "plain"),
        ("float16", (1, 2, 4099), 8, "all equal"),  # raised bounds
        ("float32", (1, 1, 9001), 128, "masked"),
    ):
        compare_topk(difficult(rng, kind, shape).astype(arrays.numpy_dtype(dtype)), k, rate=-0.25 if k < 9 else 0.0)
    x = rng.normal(size=(2, 3, 50)).astype(np.float32)
    state = random_state(rng, 2, 3)
    want = twin.beam_search_step(x, *state, 4, 9, (5, 6))
    assert_same("beam_search_step", step_on_gpu(x, state, 4, 9, (5, 6)), want)
    ids, parents = random_tree(rng, 70, 2, 33)
    assert_same("gather_tree", on_gpu("gather_tree", ids, parents, None, 3), twin.gather_tree(ids, parents, None, 3))
    keys, values, parents = random_caches(rng, 3, 2, 3, 3, 8, "float16")
    want = twin.update_kv_cache(keys, values, parents, 2)
    assert_same("update_kv_cache", on_gpu("update_kv_cache", keys, values, parents, 2), want)
