"""Sampling: the twin against independent formulas and its distribution, the kernels against the twin."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from cukern.ops import sampling
from cukern.ops.sampling import choose as op
from cukern.reference import sampling as twin
from cukern.runtime import arrays, describe, generators, template
from cukern.runtime.cuda import cupy
from cukern.runtime.gpu import Gpu, of_arch
from cukern.runtime.kernel import KERNELS, arch_of_device
from cukern.runtime.op import OPS
from cukern.testing import assert_matches
from tests.buffers import Buffer, on_gpu, place, to_numpy
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401
from tests.specs import CALLS, SPECS

Array = NDArray[Any]
Options = dict[str, Any]
NAN, INF = np.nan, np.inf
DTYPES = ("float32", "float16", "bfloat16")
#: The samplers of one token per row, and the parameters that each takes.
SAMPLERS = {
    "sampling_from_logits": (),
    "sampling_from_probs": (),
    "top_k_sampling_from_probs": ("top_k",),
    "top_p_sampling_from_probs": ("top_p",),
    "min_p_sampling_from_probs": ("min_p",),
    "top_k_top_p_sampling_from_logits": ("top_k", "top_p"),
    "top_k_top_p_sampling_from_probs": ("top_k", "top_p"),
    "sample": ("temperature", "top_k", "top_p", "min_p"),
}
#: The functions that return rows, and their parameter.
WHOLE_ROWS = {
    "softmax": "temperature",
    "top_k_renorm_probs": "top_k",
    "top_p_renorm_probs": "top_p",
    "top_k_mask_logits": "top_k",
}
CHAIN = "chain_speculative_sampling"


def takes_probs(name: str) -> bool:
    return name.endswith("probs")


def first_argument(name: str) -> str:
    return "probs" if takes_probs(name) else "logits"


def test_each_function_is_tested_here() -> None:
    assert sorted([*SAMPLERS, *WHOLE_ROWS, CHAIN]) == sorted(sampling.__all__)


# --- where the tests of the semantics run ---------------------------------------------------------------


def forms() -> tuple[str, ...]:
    """The variants that this GPU has."""
    return ("cluster", "block") if int(arch_of_device(0).rstrip("a")) >= 90 else ("block",)


class Place(NamedTuple):
    """Calls a function with NumPy arrays, in host memory or with a variant on the GPU; its results are NumPy arrays."""

    form: str | None

    def put(self, array: Array) -> Any:
        return on_gpu(array) if self.form else array

    def __call__(self, name: str, *args: Any, **options: Any) -> Any:
        function = getattr(cukern, name)
        if self.form is None:
            return function(*args, **options)
        options = {key: on_gpu(value) for key, value in options.items()}
        results = function(*map(on_gpu, args), **options, variant=self.form)
        return tuple(map(to_numpy, results)) if isinstance(results, tuple) else to_numpy(results)


@pytest.fixture(
    params=[None, *(pytest.param(form, marks=pytest.mark.gpu) for form in ("cluster", "block"))],
    ids=["numpy", "cluster", "block"],
)
def run(request: pytest.FixtureRequest) -> Place:
    if request.param and request.param not in forms():
        pytest.skip("this GPU has no clusters")
    return Place(request.param)


# --- the random numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        # The known answers that come with the authors' Random123, for philox4x32-10.
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_numbers(counter: str, key: str, want: str) -> None:
    words, (low, high), wanted = ([int(x, 16) for x in text.split()] for text in (counter, key, want))
    assert twin.philox(np.array(words, np.uint32), high << 32 | low).tolist() == wanted
    # Many counters at once give what each gives alone.
    many = np.array([[0, 0, 0, 0], words], np.uint32)
    assert twin.philox(many, high << 32 | low)[1].tolist() == wanted


def test_the_counter_is_the_group_the_round_the_place_and_the_offset() -> None:
    stream = twin.Stream(0x299F31D0A4093822, 0x0370734413198A2E)
    known = [[0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]]
    assert twin.random_bits(np.array([0x243F6A88]), 0x85A308D3, stream).tolist() == known
    # The place is beside the round, in 24 bits.
    assert twin.random_bits(np.array([0x243F6A88]), 0xD3, stream._replace(place=0x85A308)).tolist() == known
    # A negative number counts as the unsigned one of the same bits.
    signed, unsigned = (twin.random_bits(np.arange(9), 0, twin.Stream(*x)) for x in ((-1, -2), (2**64 - 1, 2**64 - 2)))
    assert np.array_equal(signed, unsigned)


def test_uniform_numbers_are_below_one() -> None:
    assert twin.uniform(np.array([0, 255, 256, 2**32 - 1], np.uint32)).tolist() == [0, 0, 2**-24, 1 - 2**-24]


# --- the kept sets against torch --------------------------------------------------------------------------


def kept_by_torch(
    x: torch.Tensor,
    weights: torch.Tensor,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    joint: bool = False,
) -> torch.Tensor:
    """The mask of the tokens that can be drawn, from a sort and a running sum in float64."""
    vocab = len(x)
    order = torch.sort(x, descending=True, stable=True).indices
    sorted_weights = weights[order].double()
    kept = torch.arange(vocab) < (vocab if top_k is None else top_k)
    total = (sorted_weights if joint else sorted_weights * kept).sum()
    if top_p is not None and top_p < 1:
        nucleus = sorted_weights.cumsum(0) - sorted_weights < top_p * total
        nucleus[0] = True
        kept &= nucleus
    if min_p is not None:
        kept &= sorted_weights >= min_p * sorted_weights[0]
    kept &= sorted_weights > 0
    mask = torch.empty(vocab, dtype=torch.bool)
    mask[order] = kept
    return mask


def last_of(weights: Array, *_: Any) -> int:
    """The least likely token that can be drawn, in place of `race`."""
    order = twin.order(weights)
    return int(order[weights[order] > 0][-1])


# Weights and shares whose sums and products are exact, so that many tie.
WEIGHTS = st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any)
SIXTEENTHS = st.integers(0, 16).map(lambda n: n / 16)
#: With this temperature the weight of an integer logit is a power of two.
BINARY = float(np.log2(np.e))


@settings(max_examples=400)
@given(st.data(), WEIGHTS, SIXTEENTHS, SIXTEENTHS, st.booleans(), st.booleans())
def test_the_kept_set_is_torchs(
    data: st.DataObject, weights: list[int], top_p: float, min_p: float, joint: bool, logits: bool
) -> None:
    top_k = data.draw(st.integers(1, len(weights)))
    x = np.array(weights, np.float32)
    w = torch.from_numpy(x)
    if logits:
        w = torch.where(w > 0, 2.0**w, 0)
        x = np.where(x > 0, x, -INF).astype(np.float32)
    wanted = kept_by_torch(torch.from_numpy(x), w, top_k, top_p, min_p, joint)
    # Top-p refuses tokens until one is kept. If the race always gives the last token, that is the last one kept, and
    # what is kept is a prefix of the order.
    with patch.object(twin, "race", last_of):
        got = twin.draw(x, BINARY if logits else None, top_k, top_p, min_p, twin.Stream(0, 0), joint)
    order = torch.sort(torch.from_numpy(x), descending=True, stable=True).indices
    kept = int(wanted.sum())
    assert wanted[order[:kept]].all()
    assert got.valid and got.id == int(order[kept - 1])
    assert got.logprob == pytest.approx(float(torch.log(w[got.id].double() / w.double().sum())), abs=1e-12)


@given(st.data(), st.lists(st.integers(-4, 4), min_size=1, max_size=30))
def test_rows_of_the_kept_are_torchs(data: st.DataObject, integers: list[int]) -> None:
    x = np.array([integers], np.float32)
    probs = torch.from_numpy(x[0]).clamp(min=0)
    top_k, top_p = data.draw(st.integers(1, len(integers))), data.draw(SIXTEENTHS)
    for name, value in (("top_k_renorm_probs", top_k), ("top_p_renorm_probs", top_p)):
        want = torch.zeros(len(integers))
        if probs.any():
            kept = kept_by_torch(probs, probs, **{WHOLE_ROWS[name]: value})
            want = torch.where(kept, probs, 0).double()
            want = (want / want.sum()).float()
        assert_matches("sampling.renormalized", getattr(cukern, name)(x, value)[0], want)
    values, ids = torch.sort(torch.from_numpy(x[0]), descending=True, stable=True)
    want = torch.full((len(integers),), -INF)
    want[ids[:top_k]] = values[:top_k]
    assert torch.equal(torch.from_numpy(cukern.top_k_mask_logits(x, top_k)[0]), want)


@pytest.mark.parametrize("temperature", [None, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_is_torchs(dtype: str, temperature: float | None, run: Place, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((3, 1500)) * 4).astype(arrays.numpy_dtype(dtype))
    x[0, ::3] = -INF
    want = torch.softmax(torch.from_numpy(x.astype(np.float64)) / (temperature or 1), dim=1).float()
    assert_matches("sampling.probs", run("softmax", x, temperature), want)
    temperatures = np.array([0.5, 1, 3], np.float32)
    scaled = x.astype(np.float64) / temperatures[:, None].astype(np.float64)
    want = torch.softmax(torch.from_numpy(scaled), dim=1).float()
    assert_matches("sampling.probs", run("softmax", x, temperatures), want)


def rows_of_an_infinite_temperature(dtype: str) -> Array:
    """Rows whose logits lie far apart, and -inf."""
    largest = float(np.finfo(np.float32).max) if dtype == "float32" else 60000.0
    rows = np.zeros((3, 1500))
    rows[0, ::3] = -INF
    rows[1, :], rows[1, 7], rows[1, 8] = -largest, largest, -INF
    rows[2, :] = np.arange(1500) - 700
    return rows.astype(arrays.numpy_dtype(dtype))


@pytest.mark.parametrize("temperature", [INF, np.float32(INF), np.array([INF, INF, INF], np.float32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_temperature_makes_finite_logits_equal(dtype: str, temperature: Any, run: Place) -> None:
    x = rows_of_an_infinite_temperature(dtype)
    finite = np.isfinite(x.astype(np.float32))
    want = (finite / finite.sum(axis=1, keepdims=True)).astype(np.float32)
    assert_matches("sampling.probs", run("softmax", x, temperature), want)
    for options in ({}, {"min_p": 1.0}, {"min_p": 0.3}, {"top_k": 3}, {"top_k": 700}, {"top_p": 0.5}):
        drawn = [run("sample", x, temperature=temperature, seed=seed, **options).tolist() for seed in range(12)]
        assert all(finite[row, id] for ids in drawn for row, id in enumerate(ids))
        assert len({ids[1] for ids in drawn}) > 1, f"{options}: all draws take one token"


def test_an_infinite_temperature_has_the_logarithm_of_the_count(run: Place) -> None:
    x = rows_of_an_infinite_temperature("float32")
    _, logprobs = run("sample", x, temperature=INF, seed=1, return_logprobs=True)
    assert_matches("sampling.logprobs", logprobs, -np.log(np.isfinite(x).sum(axis=1)).astype(np.float32))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_each_word_for_no_limit_keeps_all(dtype: str, run: Place, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((4, 1500)) * 2).astype(np.float32)
    seeds = np.arange(4, dtype=np.int64) + 5
    want = run("sample", x, seed=seeds)
    assert (want != x.argmax(axis=1)).any()
    for count in (None, 0, -1, 1500, 1501, 10**9, 10**30):
        np.testing.assert_array_equal(run("sample", x, seed=seeds, top_k=count), want)
    np.testing.assert_array_equal(run("sample", x, seed=seeds, top_k=np.array([0, -1, 1500, 2**31 - 1], dtype)), want)
    one = np.array([1, -1, 1, 0], dtype)
    np.testing.assert_array_equal(run("sample", x, seed=seeds, top_k=one), np.where(one == 1, x.argmax(axis=1), want))


# --- distributions ----------------------------------------------------------------------------------------


def p_value(counts: Array, probs: Array) -> float:
    """The probability that draws from `probs` have a chi-squared statistic as large as that of `counts`, or larger."""
    possible = probs > 0
    if counts[~possible].any():
        return 0.0
    expected = counts.sum() * probs[possible] / probs.sum()
    assert expected.min() >= 5, "too few draws"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def test_the_p_value_is_that_of_tables() -> None:
    # The 0.999 quantiles of the chi-squared distribution with 1, 5 and 30 degrees of freedom.
    for freedom, quantile in ((1, 10.828), (5, 20.515), (30, 59.703)):
        expected = np.full(freedom + 1, 1e6)
        step = np.sqrt(quantile * 1e6 / 2)
        counts = expected + step * np.array([1, -1, *[0] * (freedom - 1)])
        assert p_value(counts, expected) == pytest.approx(0.001, rel=1e-3)
    assert p_value(np.array([99, 1, 0]), np.array([1.0, 0, 0])) == 0


def biased(probs: Array, share: float) -> Array:
    """`probs` with `share` of their sum moved from the most to the least likely token."""
    probs = probs / probs.sum()
    least = np.where(probs > 0, probs, INF).argmin()
    moved = probs.copy()
    moved[probs.argmax()] -= share
    moved[least] += share
    assert moved.min() >= 0
    return moved


def assert_distributed(ids: Array, probs: Array, share: float) -> None:
    """Check that the ids come from `probs`, and that they are enough to tell it from a bias of a few percent."""
    counts = np.bincount(ids, minlength=len(probs)).astype(np.float64)
    assert len(counts) == len(probs)
    assert p_value(counts, probs) > 1e-4
    if np.count_nonzero(probs) > 1:
        assert p_value(counts, biased(probs, share)) < 1e-4


@dataclass(frozen=True)
class Shape:
    """A vocabulary, and the ids in it that can be drawn; draws are counted by id modulo `bins`."""

    vocab: int
    ids: tuple[int, ...] | None = None
    bins: int | None = None

    def weights(self) -> Array:
        rng = np.random.default_rng(17)
        weights = np.zeros(self.vocab)
        if self.ids is None:
            weights[:] = rng.uniform(0.5, 1.5, self.vocab)
        else:
            weights[list(self.ids)] = rng.permutation(np.arange(3, 3 + len(self.ids)))
        return weights


SHAPES = {
    "a few": Shape(10, tuple(range(10))),
    "within a group": Shape(1024, (0, 1, 2, 3, 128, 129, 131, 256, 515, 640, 898, 899)),
    "in several tiles": Shape(3000, (0, 5, 40, 133, 1023, 1024, 1030, 2047, 2048, 2500, 2998, 2999)),
    "all": Shape(50257, None, 61),
}
DISTRIBUTIONS: list[tuple[str, Options]] = [
    ("sampling_from_logits", {}),
    ("sampling_from_probs", {}),
    ("top_k_sampling_from_probs", {"top_k": 7}),
    ("top_p_sampling_from_probs", {"top_p": 0.8}),
    ("top_p_sampling_from_probs", {"top_p": 0.3}),  # many rounds
    ("min_p_sampling_from_probs", {"min_p": 0.6}),
    ("top_k_top_p_sampling_from_logits", {"top_k": 8, "top_p": 0.85}),
    ("top_k_top_p_sampling_from_logits", {"top_k": 8, "top_p": 0.6, "filter_apply_order": "joint"}),
    ("top_k_top_p_sampling_from_probs", {"top_k": 8, "top_p": 0.85}),
    ("top_k_top_p_sampling_from_probs", {"top_k": 8, "top_p": 0.6, "filter_apply_order": "joint"}),
    ("sample", {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.2}),
]
#: Draws of a case, and the share that a bias must have to be seen. On the GPU they are many more, in less time.
DRAWS = {None: (1500, 0.06), "cluster": (2**16, 0.015), "block": (2**16, 0.015)}


def distribution(weights: Array, name: str, params: Options) -> tuple[Array, Array]:
    """The row to draw from, of logits or probabilities, and the probabilities of its tokens."""
    probs = takes_probs(name)
    with np.errstate(divide="ignore"):
        x = (weights / 64 if probs else np.log(weights)).astype(np.float32)
    options = dict(params)
    temperature = options.pop("temperature", 1.0)
    joint = options.pop("filter_apply_order", "") == "joint"
    values = torch.from_numpy(x)
    w = values.double() if probs else torch.softmax(values.double() / temperature, dim=0)
    kept = kept_by_torch(values, w, joint=joint, **options)
    return x, torch.where(kept, w / w[kept].sum(), 0).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "params"), DISTRIBUTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_distribution(name: str, params: Options, shape: str, run: Place) -> None:
    if run.form is None and shape in ("a few", "all"):
        pytest.skip("takes the twin too long")
    where = SHAPES[shape]
    x, probs = distribution(where.weights(), name, params)
    draws, share = DRAWS[run.form]
    # One row in memory; the draws are those of its places in the batch.
    ids = run(name, x[None], **params, indices=np.zeros(draws, np.int32), seed=1)
    assert ids.shape == (draws,) and probs[ids].all()
    if where.bins:
        bins = np.arange(where.vocab) % where.bins
        ids, probs = bins[ids], np.bincount(bins, probs)
    assert_distributed(ids, probs, share)


@pytest.mark.parametrize("randomness", ["seeds", "offsets", "wide offsets"])
def test_the_distribution_over_seeds_and_offsets(randomness: str, run: Place) -> None:
    draws, share = DRAWS[run.form]
    x, probs = distribution(SHAPES["within a group"].weights(), "sampling_from_probs", {})
    numbers = np.arange(draws)
    options = {
        "seeds": {"seed": numbers, "offset": 5},
        # A seed per row, so that the places do not enter.
        "offsets": {"seed": np.full(draws, -3), "offset": (7 * numbers + 100).astype(np.int32)},
        # Many of them differ in their high words alone.
        "wide offsets": {"seed": np.full(draws, 11), "offset": (numbers // 16 << 32) + numbers % 16},
    }[randomness]
    ids = run("sampling_from_probs", x[None], indices=np.zeros(draws, np.int64), **options)
    assert_distributed(ids, probs, share)


def test_each_round_of_top_p_draws_anew(run: Place) -> None:
    # Half of the draws are refused, in one group: with the same random numbers again they would give the first token.
    draws, share = (6000, 0.06) if run.form is None else (2**16, 0.02)
    x, probs = distribution(np.arange(1.0, 5.0), "top_p_sampling_from_probs", {"top_p": 0.5})
    ids = run("top_p_sampling_from_probs", x[None], 0.5, indices=np.zeros(draws, np.int32), seed=2)
    assert_distributed(ids, probs, share)


def test_draws_do_not_depend_on_each_other(run: Place) -> None:
    # Pairs of draws at neighbouring offsets, at the same offset of two streams, and at neighbouring places.
    draws = 1500 if run.form is None else 2**15
    x, probs = distribution(np.arange(1.0, 6.0), "sampling_from_probs", {})
    both = np.outer(probs, probs).ravel()
    one = {"indices": np.zeros(draws, np.int32)}
    fives, numbers = np.full(draws, 5), np.arange(draws)
    first = run("sampling_from_probs", x[None], seed=fives, offset=numbers, **one)
    for seed, offset in ((fives, numbers + draws), (fives + 1, numbers), (5, numbers)):
        second = run("sampling_from_probs", x[None], seed=seed, offset=offset, **one)
        # The first row has the place 0, which does not enter.
        same = int(np.isscalar(seed))
        assert second[0] == first[0] or not same
        assert p_value(np.bincount((5 * first + second)[same:], minlength=25), both) > 1e-3
    many = {"indices": np.repeat(0, 2 * draws)}
    for seed, offset in ((np.full(2 * draws, 5), np.arange(2 * draws)), (5, 9), (5, None)):
        ids = run("sampling_from_probs", x[None], seed=seed, offset=offset, **many)
        assert p_value(np.bincount(5 * ids[::2] + ids[1::2], minlength=25), both) > 1e-3


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_an_array_of_one_seed_or_offset_is_that_of_all_rows(run: Place, dtype: str, rng: np.random.Generator) -> None:
    # As a captured step has its number.
    x = rng.random((40, 300), np.float32)
    want = run("sampling_from_probs", x, seed=5, offset=9)
    assert (want != run("sampling_from_probs", x, seed=5, offset=10)).any()
    for shape in ((), (1,)):
        seed, offset = (np.full(shape, value, dtype) for value in (5, 9))
        np.testing.assert_array_equal(run("sampling_from_probs", x, seed=seed, offset=9), want)
        np.testing.assert_array_equal(run("sampling_from_probs", x, seed=5, offset=offset), want)
        # The place of the one row of a batch is 0, so that it does not matter what the array is.
        assert run("sampling_from_probs", x[:1], seed=seed, offset=offset).tolist() == [want[0]]


# --- seeds from generators ----------------------------------------------------------------------------------


def call_of(name: str, put: Callable[[Array], Any]) -> Callable[..., Any]:
    """A call of a function that draws, on five rows; its result is the ids as a list."""
    if name == CHAIN:
        probs = np.full((5, 4, 3000), 1 / 3000, np.float32)
        arguments: tuple[Any, ...] = put(probs[:, :3].copy()), put(np.zeros((5, 3), np.int32)), put(probs)
    else:
        values = {"top_k": 2000, "top_p": 0.9, "min_p": 0.5}
        arguments = put(np.full((5, 3000), 0.5, np.float32)), *(values[x] for x in SAMPLERS[name] if name != "sample")

    def call(**options: Any) -> Any:
        ids = getattr(cukern, name)(*arguments, **options)
        return to_numpy(ids[0] if isinstance(ids, tuple) else ids).tolist()

    return call


DRAWING = [*SAMPLERS, CHAIN]


def reset_numpy() -> None:
    """Seed NumPy's own generator, which is the legacy one."""
    np.random.seed(7)  # noqa: NPY002


@pytest.mark.parametrize("name", DRAWING)
def test_numpys_generators_give_seeds(name: str) -> None:
    call = call_of(name, lambda array: array)
    reset_numpy()
    first, second = call(), call()
    assert first != second
    reset_numpy()
    assert [call(), call()] == [first, second]
    for kind in (np.random.default_rng, np.random.RandomState):
        drawn, one, other = kind(3), kind(3), kind(4)
        found = [call(generator=drawn), call(generator=drawn)]
        assert [call(generator=one), call(generator=one)] == found and found[0] != found[1]
        assert call(generator=other) != found[0]
        # It is not asked where there is a seed.
        before = kind(3)
        call(seed=1, generator=before)
        assert call(generator=before) == found[0]


def test_the_twin_draws_its_own_seed() -> None:
    x = np.zeros((5, 3000), np.float32)
    reset_numpy()
    first, second = twin.sample(x), twin.sample(x)
    reset_numpy()
    assert cukern.sample(x).tolist() == first.tolist() != second.tolist()
    generators = [np.random.default_rng(3), np.random.default_rng(3)]
    assert np.array_equal(twin.sample(x, generator=generators[0]), cukern.sample(x, generator=generators[1]))


@pytest.mark.parametrize("name", DRAWING)
def test_torchs_cpu_generator_gives_seeds(name: str) -> None:
    call = call_of(name, torch.from_numpy)
    torch.manual_seed(7)
    first, second = call(), call()
    assert first != second
    torch.manual_seed(7)
    assert [call(), call()] == [first, second]
    generator = torch.Generator().manual_seed(7)
    assert [call(generator=generator), call(generator=generator)] == [first, second]
    # What is drawn is one seed for the batch.
    seed = torch.empty((), dtype=torch.int64).random_(generator=generator.manual_seed(7))
    assert call(seed=seed) == first
    wanted = "generator must be a torch.Generator like the tensors, got numpy.random.mtrand.RandomState"
    with pytest.raises(TypeError, match=re.escape(wanted)):
        call(generator=np.random.RandomState(0))


@pytest.mark.parametrize("name", DRAWING)
def test_a_call_draws_once(name: str, pretended: PretendedGPU) -> None:  # noqa: F811
    """A plan draws nothing, and each call of it one seed, for the scalars or as an address."""
    call = call_of(name, torch.from_numpy)
    drawn = iter([generators.Drawn(11, 12), generators.Drawn(2**64 - 1, 2**64 - 4), generators.Drawn(address=4096)])
    seen: list[Any] = []

    def draw(*call: Any) -> generators.Drawn:
        seen.append(call)
        return next(drawn)

    generator = torch.Generator()
    checked = patch.object(generators, "expect", lambda *call: call[-1])
    with patch.object(generators, "draw", draw), checked, counted(name) as said:
        for _ in range(3):
            call(generator=generator)
    assert said.call_count == 2
    assert seen == [(arrays.library_of(torch.empty(0)), 0, generator)] * 3
    fields = [launch.fields for launch in pretended.launches]
    assert [(x["scalar_seed"], x["scalar_offset"], x["seed"]) for x in fields] == [
        (11, 12, 0), (2**64 - 1, 2**64 - 4, 0), (0, 0, 4096),
    ]  # fmt: skip
    bits = template.constants("sampling/sample")
    assert all(x["by_row_index"] == 1 and x["wide"] & x["single"] & bits["SEED"] and not x["offset"] for x in fields)


def counted(name: str) -> Any:
    """A mock that counts the plans of a function."""
    return patch.object(OPS[name], "record", side_effect=OPS[name].record)


def test_by_place_is_for_one_seed() -> None:
    x = np.ones((4, 99), np.float32)
    for seed, by_place in ((1, 1), (np.array(1), 1), (np.array([1]), 1), (np.arange(4), 0)):
        (step,) = plan_of("sample", x, seed=seed)[0].steps
        assert step.fields["by_row_index"] == by_place


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWING)
def test_torchs_cuda_generator_gives_seed_and_offset(name: str, compiled: None) -> None:
    call = call_of(name, lambda array: torch.from_numpy(array).cuda())
    torch.cuda.manual_seed(7)
    default = torch.cuda.default_generators[0]
    first = call()
    assert (default.initial_seed(), default.get_offset()) == (7, 4)
    torch.rand(9, device="cuda")
    offset = default.get_offset()
    second = call()
    assert default.get_offset() == offset + 4
    assert [call(seed=7), call(seed=7, offset=offset)] == [first, second] and first != second
    torch.manual_seed(7)
    assert call() == first
    own = torch.Generator("cuda").manual_seed(7)
    # Enough calls for the plan's text.
    found = [call(generator=own) for _ in range(8)]
    assert found == [call(seed=7, offset=4 * i) for i in range(8)] and default.get_offset() == 4
    assert own.get_offset() == 32
    for wrong, error, message in (
        (torch.Generator(), ValueError, "generator must be on cuda:0 like the tensors, got one on cpu"),
        (np.random.default_rng(0), TypeError, "generator must be a torch.Generator like the tensors, got numpy."),
    ):
        for _ in range(2):
            with pytest.raises(error, match=re.escape(message)):
                call(generator=wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["default", "own"])
def test_each_replay_of_a_graph_draws_anew(own: bool, compiled: None) -> None:
    x = torch.zeros(64, 3000, device="cuda")
    cukern.sample(x, seed=1)  # loads the kernel
    torch.cuda.synchronize()
    generator = torch.Generator("cuda") if own else torch.cuda.default_generators[0]
    options = {"generator": generator} if own else {}
    graph = torch.cuda.CUDAGraph()
    if own:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        both = cukern.sample(x, **options), cukern.sample(x, **options)

    def replays(seed: int) -> list[list[int]]:
        generator.manual_seed(seed)
        found = []
        for _ in range(3):
            for ids in both:
                ids.fill_(-7)
            graph.replay()
            found += [ids.tolist() for ids in both]
        return found

    found = replays(5)
    assert len({tuple(ids) for ids in found}) == 6
    assert all(len({*ids}) > 32 and min(ids) >= 0 for ids in found)
    assert replays(5) == found and replays(6) != found


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAWING)
def test_cupys_generators_give_seeds(name: str, compiled: None) -> None:
    call = call_of(name, cupy.asarray)
    cupy.random.seed(7)
    first, second = call(), call()
    assert first != second
    cupy.random.seed(7)
    assert [call(), call()] == [first, second]
    for kind in (cupy.random.RandomState, cupy.random.default_rng):
        own = kind(7), kind(7)
        found = [[call(generator=x), call(generator=x)] for x in own]
        assert found[0] == found[1] and found[0][0] != found[0][1]
    wanted = "generator must be a Generator or a RandomState of cupy.random like the arrays, got numpy."
    with pytest.raises(TypeError, match=re.escape(wanted)):
        call(generator=np.random.default_rng(0))


@pytest.mark.gpu
def test_cupy_cannot_draw_in_a_capture(compiled: None) -> None:
    x = cupy.zeros((4, 3000), np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cukern.sample(x, seed=1)  # loads the kernel, and leaves the stream memory for the ids
        stream.synchronize()
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="seed must be given while a stream is captured"):
                cukern.sample(x)
        finally:
            stream.end_capture()


# --- semantics, one by one ----------------------------------------------------------------------------------


def different_rows(rng: np.random.Generator, rows: int, vocab: int) -> tuple[Array, Options]:
    """Logits, and parameters per row."""
    x = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    return x, {
        "temperature": rng.uniform(0.5, 2, rows).astype(np.float32),
        "top_k": rng.integers(1, vocab + 1, rows).astype(np.int32),
        "top_p": rng.uniform(0.3, 1, rows).astype(np.float32),
        "min_p": rng.uniform(0, 0.1, rows).astype(np.float32),
        "seed": rng.integers(-(2**63), 2**63 - 1, rows),
        "offset": rng.integers(0, 2**31, rows).astype(np.int32),
    }


@pytest.mark.parametrize("vocab", [5, 1000, 2300])
def test_a_token_depends_on_its_own_row_alone(vocab: int, run: Place, rng: np.random.Generator) -> None:
    x, params = different_rows(rng, 12, vocab)
    want = run("sample", x, **params)
    # At another place of the batch.
    order = rng.permutation(12)
    assert np.array_equal(run("sample", x[order], **{k: v[order] for k, v in params.items()}), want[order])
    # By `indices`, in batches of another size, with integers of both widths.
    for dtype in (np.int32, np.int64):
        chosen = order[:7].astype(dtype)
        mine = {k: v[chosen].astype(np.int64) if k in ("top_k", "offset") else v[chosen] for k, v in params.items()}
        ids = run("sample", x, indices=chosen, **mine)
        assert ids.dtype == dtype and np.array_equal(ids, want[chosen])
    # One row by itself, its parameters as numbers or as one number for all.
    for i in range(12):
        own = {k: v[i].item() for k, v in params.items()}
        assert run("sample", x[i : i + 1], **own).tolist() == [want[i]]
        arrays_ = {k: np.array(v[i]) for k, v in params.items()} | {"seed": params["seed"][[i, i]]}
        assert run("sample", np.repeat(x[i : i + 1], 2, axis=0), **arrays_).tolist() == [want[i]] * 2


@pytest.mark.parametrize("offset", [None, 9, np.array(9), np.full(300, 9)], ids=["none", "number", "one", "per row"])
def test_equal_rows_draw_apart_where_they_have_one_seed(offset: Any, run: Place) -> None:
    x = np.zeros((300, 1000), np.float32)
    ids = run("sampling_from_logits", x, seed=3, offset=offset)
    assert len(set(ids.tolist())) > 200
    # The place in the batch enters, not the row that is drawn from.
    zeros = np.zeros(300, np.int32)
    assert np.array_equal(run("sampling_from_logits", x, seed=3, offset=offset, indices=zeros), ids)
    # At the place 0 it is as if it did not enter: so the first row draws as any does that has this seed of its own.
    own = run("sampling_from_logits", x, seed=np.full(300, 3), offset=offset)
    assert own.tolist() == [ids[0]] * 300
    others = [{"seed": 4, "offset": offset}, {"seed": 3 + 2**32, "offset": offset}, {"seed": 3, "offset": 300}]
    for other in others:
        assert np.count_nonzero(ids == run("sampling_from_logits", x, **other)) < 10


def test_a_chain_has_one_seed_or_one_per_row(run: Place) -> None:
    # Drafts that the draft model is sure of and the target gives half of the probability: half of them are accepted.
    drafts = np.zeros((200, 3), np.int32)
    probs = np.full((200, 4, 8), 1 / 14, np.float32)
    probs[:, :, 0] = 0.5
    certain = np.zeros((200, 3, 8), np.float32)
    certain[:, :, 0] = 1
    ids, accepted, _ = run(CHAIN, certain, drafts, probs, seed=5)
    assert len({tuple(row) for row in ids.tolist()}) > 10 and {*accepted.tolist()} == {0, 1, 2, 3}
    own = run(CHAIN, certain, drafts, probs, seed=np.full(200, 5))
    assert (own[0] == ids[0]).all() and (own[1] == accepted[0]).all()


@pytest.mark.parametrize("vocab", [1, 4, 1000, 5000])
def test_greedy(vocab: int, run: Place, rng: np.random.Generator) -> None:
    x = rng.integers(0, 9, (20, vocab)).astype(np.float32)
    best = x.argmax(axis=1)  # the lowest of those that tie
    for name, params in (
        ("sample", {"temperature": 0}),
        ("sample", {"temperature": 0.0, "top_k": vocab, "top_p": 0.9, "min_p": 0.1}),
        ("sample", {"temperature": 1e-35}),
        ("sample", {"temperature": np.zeros(20, np.float32)}),
        ("sample", {"top_k": 1, "temperature": 3}),
        ("sample", {"top_k": 1, "min_p": 1, "top_p": 0.5}),
        ("top_k_top_p_sampling_from_logits", {"top_k": 1, "top_p": 1}),
        ("top_k_top_p_sampling_from_logits", {"top_k": vocab, "top_p": 0}),
        ("top_k_sampling_from_probs", {"top_k": 1}),
        ("top_k_sampling_from_probs", {"top_k": np.ones(20, np.int64)}),
        ("top_p_sampling_from_probs", {"top_p": 0}),
        ("top_p_sampling_from_probs", {"top_p": np.zeros(20, np.float32)}),
        ("top_k_top_p_sampling_from_probs", {"top_k": vocab, "top_p": 0.0, "filter_apply_order": "joint"}),
    ):
        values = x + 1 if takes_probs(name) else x
        assert np.array_equal(run(name, values, **params, seed=1), best), (name, params)


@pytest.mark.parametrize("vocab", [12, 3000])
def test_filters_that_keep_all_change_nothing(vocab: int, run: Place, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, vocab)).astype(np.float32)
    probs = np.exp(x)
    want = run("sampling_from_logits", x, seed=1)
    ones, zeros = np.ones(40, np.float32), np.zeros(40, np.float32)
    for params in (
        {"temperature": None},
        {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0},
        {"temperature": ones, "top_k": np.full(40, vocab), "top_p": ones, "min_p": zeros},
    ):
        assert np.array_equal(run("sample", x, **params, seed=1), want)
    for top_k, top_p in ((None, None), (vocab, 1), (np.full(40, vocab), ones)):
        assert np.array_equal(run("top_k_top_p_sampling_from_logits", x, top_k, top_p, seed=1), want)
    want = run("sampling_from_probs", probs, seed=1)
    for name, value in (
        ("top_k_sampling_from_probs", None),
        ("top_k_sampling_from_probs", vocab),
        ("top_p_sampling_from_probs", None),
        ("top_p_sampling_from_probs", 1),
        ("min_p_sampling_from_probs", None),
        ("min_p_sampling_from_probs", 0),
    ):
        assert np.array_equal(run(name, probs, value, seed=1), want)


@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_none_keeps_all(name: str, run: Place, rng: np.random.Generator) -> None:
    x = rng.random((3, 50)).astype(np.float32)
    all_of_them = {"softmax": 1.0, "top_p_renorm_probs": 1.0}.get(name, 50)
    np.testing.assert_array_equal(run(name, x, None), run(name, x, all_of_them))


def test_min_p_of_one_leaves_the_best(run: Place) -> None:
    # All best tokens that tie are left.
    x = np.array([[0.25, 1, 0.5, 1]], np.float32)
    for name, values in (("min_p_sampling_from_probs", x), ("sample", x)):
        ids = run(name, values, min_p=1, indices=np.zeros(100, np.int32), seed=2)
        assert set(ids.tolist()) == {1, 3}


@pytest.mark.parametrize("name", ["sampling_from_probs", "top_k_sampling_from_probs", "top_p_sampling_from_probs"])
def test_what_has_no_probability_is_never_drawn(name: str, run: Place, rng: np.random.Generator) -> None:
    x = np.zeros((1, 2500), np.float32)
    x[0, [3, 1024, 2499]] = [0.2, 0.5, 0.3]
    x[0, [4, 77, 2000]] = [-1, -0.0, -INF]
    params = {"top_k_sampling_from_probs": {"top_k": 100}, "top_p_sampling_from_probs": {"top_p": 0.9999}}
    ids = run(name, x, **params.get(name, {}), indices=np.zeros(200, np.int32), seed=2)
    assert set(ids.tolist()) == {3, 1024, 2499}
    x = np.full((1, 2500), -INF, np.float32)
    x[0, [3, 1024]] = 0
    for logits_params in ({}, {"top_k": 50}, {"top_p": 0.99}, {"top_k": 600, "min_p": 0.01}):
        ids = run("sample", x, **logits_params, indices=np.zeros(200, np.int32), seed=2)
        assert set(ids.tolist()) == {3, 1024}


@pytest.mark.parametrize("vocab", [1, 7, 1500, 20_001, 151_936])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_logit_of_any_row(vocab: int, dtype: str, run: Place, rng: np.random.Generator) -> None:
    x = rng.standard_normal((11, vocab)).astype(np.float32)
    x[1], x[2, -1], x[3], x[4] = -INF, NAN, NAN, -INF
    x[4, -1], x[5, [vocab // 2, -1]], x[6, [0, vocab // 3]] = -5, INF, 99
    x[7] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
    x[8], x[9, vocab // 3 :] = -INF, -INF
    x[8, vocab // 2] = NAN
    x = x.astype(arrays.numpy_dtype(dtype))
    want = np.where(np.isnan(x.astype(np.float32)).any(1), 0, x.astype(np.float32).argmax(1))
    assert want[5] == vocab // 2 and want[6] == want[7] == 0 and want[4] == vocab - 1
    order = np.array([4, 0, 10, 5, 6, 2, 0], np.int64)
    for params in ({"temperature": 0}, {"temperature": np.zeros(11, np.float32)}):
        np.testing.assert_array_equal(run("sample", x, **params, seed=1), want)
    ids = run("sample", x, temperature=0, seed=1, indices=order)
    assert ids.dtype == np.int64 and ids.tolist() == want[order].tolist()


@pytest.mark.parametrize("vocab", [1, 7, 1500])
@pytest.mark.parametrize("name", SAMPLERS)
def test_rows_that_hold_nothing_to_draw(name: str, vocab: int, run: Place, rng: np.random.Generator) -> None:
    choices = {"temperature": 0.7, "top_k": max(1, vocab // 2), "top_p": 0.7, "min_p": 0.1}
    params = {key: choices[key] for key in SAMPLERS[name]}
    x = rng.random((6, vocab)).astype(np.float32) + 0.5
    nothing = 0.0 if takes_probs(name) else -INF
    x[1] = nothing
    x[2, -1] = NAN
    x[3, :] = NAN
    x[4, 0] = NAN
    x[4, 1:] = nothing
    want_valid = [True, False, False, False, False, True]
    seeds = np.arange(6)
    sound = run(name, x[[0, 5]], **params, seed=seeds[[0, 5]])
    ids, valid, logprobs = run(name, x, **params, seed=seeds, return_valid=True, return_logprobs=True)
    assert valid.dtype == bool and valid.tolist() == want_valid
    assert ids.dtype == np.int32 and ids.tolist() == [sound[0], 0, 0, 0, 0, sound[1]]
    assert np.isneginf(logprobs[1:5]).all() and np.isfinite(logprobs[[0, 5]]).all()
    assert np.array_equal(run(name, x, **params, seed=seeds), ids)
    if takes_probs(name):
        x[0, 0] = INF
        x[5, :] = -1
        ids, valid = run(name, x, **params, seed=1, return_valid=True)
        assert not valid.any() and not ids.any()


def test_infinite_logits_are_the_largest(run: Place) -> None:
    x = np.zeros((1, 2000), np.float32)
    x[0, [7, 1999]] = INF
    x[0, 8] = -INF
    for params in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}, {"temperature": 50.0}):
        results = run(
            "sample", x, **params, indices=np.zeros(100, np.int32), seed=2, return_valid=True, return_logprobs=True
        )
        assert set(results[0].tolist()) == {7, 1999} and results[1].all()
        assert_matches("sampling.logprobs", results[2], np.full(100, np.log(0.5), np.float32))
    assert run("sample", x, temperature=0).tolist() == [7]
    want = np.zeros((1, 2000), np.float32)
    want[0, [7, 1999]] = 0.5
    assert_matches("sampling.probs", run("softmax", x), want)
    want[0, 1999], want[0, 7] = 0, 1
    assert_matches("sampling.probs", run("softmax", x, 0), want)
    want = np.full((1, 2000), -INF, np.float32)
    want[0, [7, 1999]], want[0, 0] = INF, 0
    np.testing.assert_array_equal(run("top_k_mask_logits", x, 3), want)


def test_probabilities_of_the_smallest_numbers(run: Place) -> None:
    # Below the smallest normal float32, where the hardware's logarithm would give up.
    weights = np.array([3, 1, 2, 6, 4] * 200)
    x = (weights * 2.0**-140).astype(np.float32)[None]
    options = {"indices": np.zeros(100, np.int32), "seed": 2, "return_valid": True}
    for name, params in (
        ("sampling_from_probs", {}),
        ("top_k_sampling_from_probs", {"top_k": 10}),
        ("top_k_sampling_from_probs", {"top_k": 600}),
        ("top_p_sampling_from_probs", {"top_p": 0.5}),
    ):
        got = run(name, x, **params, **options)
        # A factor of the row that is a power of two changes nothing.
        want = run(name, weights.astype(np.float32)[None], **params, **options)
        np.testing.assert_array_equal(got[0], want[0])
        assert got[1].all()


def test_sums_that_are_no_normal_numbers_still_draw(run: Place) -> None:
    # A share of the smallest number rounds to all of it, and the sum of the largest numbers is infinite.
    for weight in (1e-45, 3e38):
        x = np.zeros((1, 3000), np.float32)
        x[0, [4, 5, 6]] = weight  # one group
        options = {"indices": np.zeros(200, np.int32), "seed": 2}
        for name, params in (
            ("top_k_sampling_from_probs", {"top_k": 2}),
            ("top_k_top_p_sampling_from_probs", {"top_k": 2, "top_p": 0.9}),
            ("sampling_from_probs", {}),
            ("top_p_sampling_from_probs", {"top_p": 0.9}),
        ):
            kept = {4, 5} if "top_k" in name else {4, 5, 6}
            assert set(run(name, x, **params, **options).tolist()) <= kept


def test_renormalizing_the_smallest_numbers(run: Place) -> None:
    # The reciprocal of their sum is no float32.
    weights = np.array([[3, 1, 2, 6, 4]], np.float32)
    x = weights * np.float32(2.0**-140)
    for name, value in (("top_k_renorm_probs", 5), ("top_k_renorm_probs", 3), ("top_p_renorm_probs", 0.6)):
        assert_matches("sampling.renormalized", run(name, x, value), run(name, weights, value))


@pytest.mark.parametrize("name", SAMPLERS)
def test_log_probabilities(name: str, run: Place, rng: np.random.Generator) -> None:
    choices = {"temperature": 0.7, "top_k": 60, "top_p": 0.7, "min_p": 0.1}
    params = {key: choices[key] for key in SAMPLERS[name]}
    x = rng.standard_normal((20, 1500)).astype(np.float32) * 2
    values = np.exp(x) if takes_probs(name) else x
    ids, logprobs = run(name, values, **params, seed=1, return_logprobs=True)
    # The probability is that in the row before any filter, after the temperature.
    want = torch.log_softmax(torch.from_numpy(x.astype(np.float64)) / params.get("temperature", 1), dim=1)
    want = want[torch.arange(20), torch.from_numpy(ids).long()].float()
    assert_matches("sampling.logprobs", logprobs, want)


def test_the_bias_is_added_before_all_else(run: Place, rng: np.random.Generator) -> None:
    x = rng.standard_normal((30, 1300)).astype(np.float32)
    bias = (rng.standard_normal(1300) * 3).astype(np.float32)
    bias[[5, 1200]] = [-INF, 4]
    params = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "seed": 4, "return_logprobs": True}
    got, want = run("sample", x, bias=bias, **params), run("sample", x + bias, **params)
    assert np.array_equal(got[0], want[0])
    assert_matches("sampling.logprobs", got[1], want[1])
    assert np.array_equal(run("sample", x, bias=bias, temperature=0), (x + bias).argmax(axis=1))
    # In float32, not in the dtype of the logits: 2048 + 1.5 is 2049.5, and no float16.
    x = np.array([[2048, 2050]], np.float16)
    for first, best in ((1.5, 1), (2.5, 0)):
        bias = np.array([first, 0], np.float16)
        assert run("sample", x, bias=bias, temperature=0).tolist() == [best]


def test_the_bookkeeping_of_a_step(run: Place) -> None:
    x = np.zeros((5, 1100), np.float32)
    for i, id in enumerate((7, 1099, 3, 1099, 0)):
        x[i, id] = 100
    finished = run.put(np.array([False, False, True, True, False]))
    length = run.put(np.array([4, 0, 9, 2, 2**31 - 5], np.int32))
    bookkeeping = {"finished": finished, "end_id": 1099, "sequence_length": length}
    ids, valid, logprobs = run("sample", x, seed=1, **bookkeeping, return_valid=True, return_logprobs=True)
    assert ids.tolist() == [7, 1099, 1099, 1099, 0]
    assert to_numpy(finished).tolist() == [False, True, True, True, False]
    assert to_numpy(length).tolist() == [5, 1, 9, 2, 2**31 - 4]
    assert valid.all() and logprobs[2:4].tolist() == [0, 0]
    # The next step leaves those alone that have ended.
    x[1] = NAN
    assert run("sample", x, seed=1, **bookkeeping).tolist() == [7, 1099, 1099, 1099, 0]
    assert to_numpy(length).tolist() == [6, 1, 9, 2, 2**31 - 3]
    # Nor does it where the largest logit is all that is asked for.
    own = run.put(np.array([3, 3, 3, 3, 3], np.int32))
    ends = run.put(np.array([False, False, True, True, False]))
    asked = {"finished": ends, "end_id": 7, "sequence_length": own, "temperature": 0}
    assert run("sample", x, seed=1, **asked).tolist() == [7, 0, 7, 7, 0]
    assert to_numpy(ends).tolist() == [True, False, True, True, False]
    assert to_numpy(own).tolist() == [4, 4, 3, 3, 4]
    # Without `finished` every row counts as going on.
    run("sample", x, seed=1, sequence_length=length)
    assert to_numpy(length).tolist() == [7, 2, 10, 3, 2**31 - 2]
    # An end that is not drawn ends nothing.
    finished = run.put(np.zeros(5, bool))
    run("sample", x[[0, 2, 2, 4, 4]], seed=1, finished=finished, end_id=5)
    assert not to_numpy(finished).any()


def test_rows_that_cannot_be_normalized(run: Place) -> None:
    x = np.array([[NAN, 1, 2], [0, 0, 0], [-INF, -INF, -INF], [0, -INF, 0], [-1, 1, 3]], np.float32)
    third, half = [0, 0.25, 0.75], [0.5, 0, 0.5]
    got = run("softmax", x)
    assert np.isnan(got[0]).all() and got[2].tolist() == [0, 0, 0] and got[3].tolist() == half
    for name, value in (("top_k_renorm_probs", 2), ("top_k_renorm_probs", 3), ("top_p_renorm_probs", 1)):
        got = run(name, x, value)
        assert np.isnan(got[0]).all() and not got[1:4].any()
        assert got[4].tolist() == third
    got = run("top_k_mask_logits", x, 2)
    want = np.array([[NAN, 1, 2], [0, 0, -INF], [-INF, -INF, -INF], [0, -INF, 0], [-INF, 1, 3]], np.float32)
    np.testing.assert_array_equal(got, want)


def test_renormalizing_by_hand(run: Place) -> None:
    x = np.array([[1, 4, 1, 2]], np.float32) / 8
    for top_k, want in ((1, [0, 1, 0, 0]), (2, [0, 4 / 6, 0, 2 / 6]), (3, [1 / 7, 4 / 7, 0, 2 / 7])):
        assert_matches("sampling.renormalized", run("top_k_renorm_probs", x, top_k), np.array([want], np.float32))
    # The token whose probability reaches p is kept; at p = 1/2 the best does so alone.
    for top_p, want in ((0, [0, 1, 0, 0]), (0.5, [0, 1, 0, 0]), (0.51, [0, 4 / 6, 0, 2 / 6]), (0.8, [1, 4, 0, 2])):
        wanted = np.array([want], np.float32)
        assert_matches("sampling.renormalized", run("top_p_renorm_probs", x, top_p), wanted / wanted.sum())
    # top_p is a share of the row's own sum.
    assert_matches("sampling.renormalized", run("top_p_renorm_probs", 40 * x, 0.6), run("top_p_renorm_probs", x, 0.6))
    many = np.repeat(x, 3, axis=0)
    for dtype in (np.int32, np.int64):
        got = run("top_k_renorm_probs", many, np.array([1, 4, 2], dtype))
        assert np.count_nonzero(got, axis=1).tolist() == [1, 4, 2]
        got = run("top_k_mask_logits", many, np.array([1, 4, 2], dtype))
        assert np.isfinite(got).sum(axis=1).tolist() == [1, 4, 2]
    got = run("top_p_renorm_probs", many, np.array([1, 0.25, 0.625], np.float32))
    assert np.count_nonzero(got, axis=1).tolist() == [4, 1, 2]


def test_the_order_of_the_filters(run: Place) -> None:
    # Of 4, 2, 1, 1: the best two sum to 6, of which 0.7 is 4.2 > 4; of all, 0.7 is 5.6; 0.45 of 6 is less than 4.
    x = np.array([[4, 2, 1, 1]], np.float32)
    for top_p, first, joint in ((0.7, {0, 1}, {0, 1}), (0.6, {0}, {0, 1}), (0.45, {0}, {0})):
        for name, values in (
            ("top_k_top_p_sampling_from_probs", x),
            ("top_k_top_p_sampling_from_logits", np.log(x)),
            ("sample", np.log(x)),
        ):
            for order, want in (("top_k_first", first), ("joint", joint)):
                options = {"filter_apply_order": order, "indices": np.zeros(100, np.int32), "seed": 8}
                ids = run(name, values, top_k=2, top_p=top_p, **options)
                assert set(ids.tolist()) == want, (name, top_p, order)


@pytest.mark.parametrize("name", SAMPLERS)
def test_empty_batches(name: str, run: Place) -> None:
    choices = {"temperature": 0.7, "top_k": 2, "top_p": 0.7, "min_p": 0.1}
    params = {key: choices[key] for key in SAMPLERS[name]}
    none = np.zeros((0, 5), np.float32)
    results = run(name, none, **params, return_valid=True, return_logprobs=True)
    assert [(r.shape, r.dtype.name) for r in results] == [((0,), "int32"), ((0,), "bool"), ((0,), "float32")]
    no_index = np.zeros(0, np.int32)
    assert run(name, np.ones((3, 5), np.float32), **params, indices=no_index).shape == (0,)
    assert run(name, none, **params, indices=no_index).shape == (0,)


def test_empty_rows(run: Place) -> None:
    for name, value in (
        ("softmax", 1.0),
        ("top_k_renorm_probs", 2),
        ("top_p_renorm_probs", 0.5),
        ("top_k_mask_logits", 2),
    ):
        assert run(name, np.zeros((0, 5), np.float32), value).shape == (0, 5)
    results = run(CHAIN, np.zeros((0, 2, 5), np.float32), np.zeros((0, 2), np.int32), np.zeros((0, 3, 5), np.float32))
    assert [r.shape for r in results] == [(0, 3), (0,), (0,)]


# --- chain speculative sampling -----------------------------------------------------------------------------


def one_hot(*ids: int, vocab: int = 4) -> Array:
    return np.eye(vocab, dtype=np.float32)[list(ids)]


def test_a_chain_by_hand(run: Place) -> None:
    target = one_hot(2, 0, 3, 1)  # the target's tokens are certain
    draft = np.full((3, 4), 0.25, np.float32)
    for drafted, ids, accepted, emitted in (
        ([2, 0, 3], [2, 0, 3, 1], 3, 3),
        ([1, 0, 3], [2, -1, -1, -1], 2, 0),
        ([2, 1, 3], [2, 0, -1, -1], 2, 1),
        ([2, 0, 0], [2, 0, 3, -1], 2, 2),
        ([0, 1, 0], [2, -1, -1, -1], 0, 0),
        # A draft outside of the vocabulary is refused.
        ([2, 4, 3], [2, 0, -1, -1], 2, 1),
        ([-1, 0, 2**31 - 1], [2, -1, -1, -1], 1, 0),
    ):
        got = run(CHAIN, draft[None], np.array([drafted], np.int32), target[None], seed=1)
        assert [r.dtype.name for r in got] == ["int32"] * 3
        assert [r.tolist() for r in got] == [[ids], [accepted], [emitted]], drafted
    # Without drafts a token is drawn from the target.
    got = run(CHAIN, np.zeros((1, 0, 4), np.float32), np.zeros((1, 0), np.int32), target[None, :1], seed=1)
    assert [r.tolist() for r in got] == [[[2]], [0], [0]]


def test_drafts_like_the_target_are_all_accepted(run: Place, rng: np.random.Generator) -> None:
    probs = rng.dirichlet(np.ones(300), (20, 6)).astype(np.float32)
    drafted = rng.integers(0, 300, (20, 5)).astype(np.int32)
    ids, accepted, emitted = run(CHAIN, probs[:, :5].copy(), drafted, probs, seed=1)
    assert np.array_equal(ids[:, :5], drafted) and (ids[:, 5] >= 0).all()
    assert accepted.tolist() == emitted.tolist() == [5] * 20
    # Refused for being outside of the vocabulary, where target - draft is 0 everywhere: the target alone is drawn from.
    drafted[:, 2] = 300
    ids, accepted, emitted = run(CHAIN, probs[:, :5].copy(), drafted, probs, seed=1)
    assert accepted.tolist() == [4] * 20 and emitted.tolist() == [2] * 20
    assert (ids[:, 2] >= 0).all() and (ids[:, 2] < 300).all() and (ids[:, 3:] == -1).all()
    assert np.array_equal(ids[:, 2], run("sampling_from_probs", probs[:, 2].copy(), seed=1))


@pytest.mark.parametrize("vocab", [6, 1500])
def test_a_chain_emits_what_the_target_would(vocab: int, run: Place) -> None:
    batch, share = (2000, 0.06) if run.form is None else (2**15, 0.02)
    rng = np.random.default_rng(3)
    where = np.sort(rng.choice(vocab, 6, replace=False))
    target, draft = np.zeros((3, vocab), np.float32), np.zeros((2, vocab), np.float32)
    target[:, where] = np.array([[3, 5, 1, 2, 4, 1], [1, 1, 6, 3, 2, 3], [4, 4, 2, 2, 3, 1]]) / 16
    draft[:, where] = np.array([[4, 3, 3, 2, 2, 2], [5, 2, 2, 3, 2, 2]]) / 16
    drafted = np.stack([rng.choice(vocab, batch, p=d / d.sum()) for d in draft.astype(np.float64)], axis=1)
    ids, accepted, emitted = run(
        CHAIN,
        np.repeat(draft[None], batch, axis=0),
        drafted.astype(np.int32),
        np.repeat(target[None], batch, axis=0),
        seed=21,
    )
    assert_distributed(ids[:, 0], target[0], share)
    assert_distributed(ids[emitted >= 1, 1], target[1], 2 * share)
    assert_distributed(ids[emitted == 2, 2], target[2], 2 * share)
    assert (ids >= 0).sum(axis=1).tolist() == (emitted + 1).tolist()
    # A draft is accepted with the overlap of the two distributions.
    overlap = np.minimum(target[:2], draft).sum(axis=1)
    first = np.array([(emitted >= 1).sum(), (emitted == 0).sum()])
    assert p_value(first, np.array([overlap[0], 1 - overlap[0]])) > 1e-3
    both = np.bincount(accepted, minlength=3)
    one = overlap[0] * (1 - overlap[1]) + overlap[1] * (1 - overlap[0])
    assert p_value(both, np.array([(1 - overlap).prod(), one, overlap.prod()])) > 1e-3


# --- results in `out`, and arrays of every library, in host memory -----------------------------------------------


def test_results_go_into_out(rng: np.random.Generator) -> None:
    x = rng.random((4, 30)).astype(np.float32)
    want = cukern.sampling_from_probs(x, seed=3, return_valid=True, return_logprobs=True)
    out = np.full(4, -7, np.int32)
    assert cukern.sampling_from_probs(x, seed=3, out=out) is out
    np.testing.assert_array_equal(out, want[0])
    out = (np.full(4, -7, np.int32),)
    assert cukern.sampling_from_probs(x, seed=3, out=out) is out
    np.testing.assert_array_equal(out[0], want[0])
    # In the order in which they are returned.
    three = (np.full(4, -7, np.int32), np.zeros(4, bool), np.full(4, NAN, np.float32))
    assert cukern.sampling_from_probs(x, seed=3, return_valid=True, return_logprobs=True, out=three) is three
    two = [np.full(4, -7, np.int32), np.full(4, NAN, np.float32)]
    assert cukern.sampling_from_probs(x, seed=3, return_logprobs=True, out=two) is two
    for got, wanted in zip((*three, *two), (*want, want[0], want[2]), strict=True):
        np.testing.assert_array_equal(got, wanted)
    for name, value in (("softmax", 0.5), ("top_k_renorm_probs", 3), ("top_p_renorm_probs", 0.5)):
        rows = np.full((4, 30), NAN, np.float32)
        wanted = getattr(cukern, name)(x, value)
        assert getattr(cukern, name)(x, value, out=rows) is rows
        np.testing.assert_array_equal(rows, wanted)
        rows = x.copy()
        assert getattr(cukern, name)(rows, value, out=rows) is rows
        np.testing.assert_array_equal(rows, wanted)
    tensor = torch.full((4,), -7, dtype=torch.int32)
    assert cukern.sampling_from_probs(torch.from_numpy(x), seed=3, out=tensor) is tensor
    np.testing.assert_array_equal(tensor.numpy(), want[0])
    drafts = np.zeros((1, 1, 4), np.float32), np.zeros((1, 1), np.int32), np.eye(4, dtype=np.float32)[None, :2]
    chain = tuple(np.full(shape, -7, np.int32) for shape in ((1, 2), (1,), (1,)))
    assert cukern.chain_speculative_sampling(*drafts, out=chain) is chain
    assert [r.tolist() for r in chain] == [[[0, 1]], [1], [1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_on_the_cpu(dtype: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 200)).astype(arrays.numpy_dtype(dtype))
    tensor = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype))
    k, p = np.array([1, 3, 9, 40, 199, 200], np.int32), np.linspace(0.2, 1, 6).astype(np.float32)
    params = {"top_k": k, "top_p": p, "seed": np.arange(6), "offset": np.array(4)}
    tensors = {key: torch.from_numpy(value) for key, value in params.items()}
    want = cukern.sample(x, **params, return_valid=True, return_logprobs=True)
    got = cukern.sample(tensor, **tensors, return_valid=True, return_logprobs=True)
    assert [t.dtype for t in got] == [torch.int32, torch.bool, torch.float32]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    for name, value in (("softmax", p), ("top_k_renorm_probs", k), ("top_p_renorm_probs", p), ("top_k_mask_logits", k)):
        result = getattr(cukern, name)(tensor.abs(), torch.from_numpy(value))
        assert result.dtype == (torch.float32 if name == "softmax" else tensor.dtype)
        np.testing.assert_array_equal(to_numpy(result), getattr(cukern, name)(np.abs(x), value))
    finished, length = torch.zeros(6, dtype=torch.bool), torch.zeros(6, dtype=torch.int32)
    ids = cukern.sample(tensor, seed=1, finished=finished, end_id=5, sequence_length=length)
    assert length.tolist() == [1] * 6 and finished.tolist() == (ids == 5).tolist()


def test_strided_rows_in_host_memory(rng: np.random.Generator) -> None:
    wide = rng.random((4, 50)).astype(np.float32)
    for x in (wide[:, 3:40], wide[::-2, 1:]):
        for name, value in (("top_p_sampling_from_probs", 0.7), ("top_k_renorm_probs", 5), ("softmax", 0.5)):
            options = {"seed": 1} if name in SAMPLERS else {}
            function = getattr(cukern, name)
            np.testing.assert_array_equal(function(x, value, **options), function(x.copy(), value, **options))


# --- bad arguments --------------------------------------------------------------------------------------------


def good_arguments(name: str) -> Options:
    """All arguments of the function but `out` and those that need others."""
    if name == CHAIN:
        return {
            "draft_probs": np.ones((3, 2, 6), np.float32),
            "draft_token_ids": np.zeros((3, 2), np.int32),
            "target_probs": np.ones((3, 3, 6), np.float32),
            "seed": 1,
            "offset": np.zeros(3, np.int64),
        }
    values = {first_argument(name): np.ones((3, 6), np.float32)}
    params = {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.5}
    if name in WHOLE_ROWS:
        return values | {WHOLE_ROWS[name]: params[WHOLE_ROWS[name]]}
    more = {"bias": np.zeros(6, np.float32), "finished": np.zeros(3, bool), "end_id": 5}
    if name != "sample":
        more = {}
    return values | {key: params[key] for key in SAMPLERS[name]} | {"seed": 1, "offset": np.zeros(3, np.int32)} | more


def _bad_numbers(name: str) -> Iterator[Any]:
    """Bad values of the parameters of sampling that the function `name` takes."""
    first, f32 = first_argument(name), np.float32
    named = SAMPLERS.get(name) or (WHOLE_ROWS.get(name, ""),)
    for p in ("top_p", "min_p", "temperature"):
        if p not in named:
            continue
        least, range_ = (
            ("in [0, 1] (None for no limit)", "[0, 1] (None for no limit)")
            if p != "temperature"
            else ("at least 0", f"[{0 if name == 'sample' else 0.0}, inf]")
        )
        yield {p: -0.5}, ValueError, f"{p} must be {least}, got -0.5"
        yield {p: NAN}, ValueError, f"{p} must be a finite number, got nan"
        infinity = -INF if p == "temperature" else INF
        yield {p: infinity}, ValueError, f"{p} must be a finite number, got {infinity}"
        yield {p: "0.x"}, TypeError, f"{p} must be a number, got '0.x' (str)"
        yield {p: np.zeros(3)}, TypeError, f"{p} must be float32 or int32 or int64, got float64"
        yield {p: np.zeros(3, bool)}, TypeError, f"{p} must be float32 or int32 or int64, got bool"
        yield {p: np.array([0, 1, -1])}, ValueError, f"{p} must be in {range_}, got -1"
        yield {p: np.zeros(2, f32)}, ValueError, f"{p} must be of shape [batch] = [3], got [2]"
        yield {p: np.zeros((3, 1), f32)}, ValueError, f"{p} must be of shape [batch] = [3], got [3, 1]"
        yield {p: np.zeros(6, f32)[::2]}, ValueError, f"{p} must be contiguous, got strides (2,)"
        yield {p: torch.zeros(3)}, TypeError, f"{p} must be a NumPy array like {first}, got torch.Tensor"
        range_ = f"{p} must be in {range_}, got"
        yield {p: np.array([0, 0.5, -0.5], f32)}, ValueError, f"{range_} -0.5"
        yield {p: np.array([0, NAN, 1], f32)}, ValueError, f"{range_} nan"
        if p != "temperature":
            yield {p: 1.5}, ValueError, f"{p} must be {least}, got 1.5"
            yield {p: np.array([0, 2, 1], f32)}, ValueError, f"{range_} 2.0"
    if "top_k" in named:
        wanted = "top_k must be an integer in [1, 6] (the vocabulary; None for no limit), got"
        in_array = "top_k must be in [1, 6] (None for no limit), got"
        if name == "sample":
            wanted = "top_k must be an integer of at least -1 (-1, 0 and None for no limit), got"
            in_array = "top_k must be in [-1, inf] (None for no limit), got"
            yield {"top_k": -2}, ValueError, f"{wanted} -2"
        else:
            yield {"top_k": 0}, ValueError, f"{wanted} 0"
            yield {"top_k": 7}, ValueError, f"{wanted} 7"
            yield {"top_k": np.array([1, 0, 6])}, ValueError, f"{in_array} 0"
            yield {"top_k": np.array([1, 7, 6])}, ValueError, f"{in_array} 7"
        yield {"top_k": 2.0}, TypeError, f"{wanted} 2.0 (float)"
        yield {"top_k": True}, TypeError, f"{wanted} True (bool)"
        yield {"top_k": np.ones(3, f32)}, TypeError, "top_k must be int32 or int64, got float32"
        yield {"top_k": np.ones(4, np.int32)}, ValueError, "top_k must be of shape [batch] = [3], got [4]"
        yield {"top_k": np.array([1, -2, 6])}, ValueError, f"{in_array} -2"


def _bad_rows(name: str) -> Iterator[Any]:
    """Bad values of the first argument, and of `variant`."""
    first, f32 = first_argument(name), np.float32
    anything = "an array (NumPy, CuPy, torch, or any with __dlpack__), got list"
    yield {first: [[1.0, 2.0]]}, TypeError, f"{first} must be {anything}"
    yield {first: np.ones((3, 6))}, TypeError, f"{first} must be float32 or float16 or bfloat16, got float64"
    yield {first: np.ones((3, 6), np.int32)}, TypeError, f"{first} must be float32 or float16 or bfloat16, got int32"
    yield {first: np.ones(6, f32)}, ValueError, f"{first} must be of shape [batch, vocab], got [6]"
    yield {first: np.ones((3, 1, 6), f32)}, ValueError, f"{first} must be of shape [batch, vocab], got [3, 1, 6]"
    vocabulary = f"{first} must be of a vocabulary in [1, 1048576], got"
    yield {first: np.ones((3, 0), f32)}, ValueError, f"{vocabulary} 0"
    yield {first: np.broadcast_to(f32(1), (3, 2**20 + 1))}, ValueError, f"{vocabulary} 1048577"
    many = np.broadcast_to(f32(1), (2**24 + 1, 6))
    yield {first: many}, ValueError, f"{first} must be of at most 16777216 rows, got 16777217"
    apart = f"{first} must be contiguous along its last dimension, got strides"
    yield {first: np.ones((3, 12), f32)[:, ::2]}, ValueError, f"{apart} (12, 2)"
    yield {first: np.ones((6, 3), f32).T}, ValueError, f"{apart} (1, 3)"
    yield {first: np.ones((3, 6), f32)[:, ::-1]}, ValueError, f"{apart} (6, -1)"
    runs = "variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got"
    yield {"variant": "block"}, ValueError, f"{runs} 'block'"
    yield {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'cluster', 'block', got 'fast'"


def _bad_streams(like: str) -> Iterator[Any]:
    yield {"seed": None}, ValueError, "offset must be given together with seed, got no seed"
    without = {"seed": None, "offset": None}
    wanted = "generator must be a Generator or a RandomState of numpy.random like the arrays, got"
    yield without | {"generator": 3}, TypeError, f"{wanted} builtins.int"
    yield without | {"generator": torch.Generator()}, TypeError, f"{wanted} torch._C.Generator"
    for p in ("seed", "offset"):
        wanted = f"{p} must be an integer in [-9223372036854775808, 18446744073709551615], got"
        yield {p: 1.5}, TypeError, f"{wanted} 1.5 (float)"
        yield {p: 2**64}, ValueError, f"{wanted} 18446744073709551616"
        yield {p: -(2**63) - 1}, ValueError, f"{wanted} -9223372036854775809"
        yield {p: np.ones(3, np.uint64)}, TypeError, f"{p} must be int32 or int64, got uint64"
        yield {p: np.ones(2, np.int64)}, ValueError, f"{p} must be of shape [batch] = [3], got [2]"
        yield {p: np.ones(6, np.int64)[::2]}, ValueError, f"{p} must be contiguous, got strides (2,)"
        yield {p: torch.ones(3, dtype=torch.int64)}, TypeError, f"{p} must be a NumPy array like {like}, got torch.Tens"


def _bad_samplers(name: str) -> Iterator[Any]:
    first, f32 = first_argument(name), np.float32
    yield {"indices": [0, 1, 2]}, TypeError, "indices must be an integer array [batch], got list"
    yield {"indices": 1}, TypeError, "indices must be an integer array [batch], got int"
    yield {"indices": np.zeros((3, 1), np.int32)}, TypeError, "indices must be an integer array [batch], got (3, 1)"
    yield {"indices": np.zeros(3, f32)}, TypeError, "indices must be int32 or int64, got float32"
    yield {"indices": np.array([0, 3, 1])}, ValueError, "indices must be in [0, 2], got 3"
    yield {"indices": np.array([0, 2, -1])}, ValueError, "indices must be in [0, 2], got -1"
    yield (
        {"indices": torch.zeros(3, dtype=torch.int32)},
        TypeError,
        f"indices must be a NumPy array like {first}, got torch.Tensor",
    )
    yield {first: np.ones((0, 6), f32), "indices": np.zeros(3, np.int32)}, ValueError, "of at least one row for the ind"
    # The batch is that of the tokens, here of the indices.
    yield {"indices": np.zeros(4, np.int32)}, ValueError, "offset must be of shape [batch] = [4], got [3]"
    ids, valid, logprobs = np.zeros(3, np.int32), np.zeros(3, bool), np.zeros(3, f32)
    yield {"out": ids.astype(np.int64)}, TypeError, "out must be int32, got int64"
    wide = {"indices": np.zeros(3, np.int64)}
    yield wide | {"out": ids}, TypeError, "out must be int64, got int32"
    yield {"out": np.zeros(4, np.int32)}, ValueError, "out must be of shape [batch] = [3], got [4]"
    yield {"out": np.zeros(6, np.int32)[::2]}, ValueError, "out must be contiguous, got strides (2,)"
    yield {"out": torch.zeros(3, dtype=torch.int32)}, TypeError, f"out must be a NumPy array like {first}, got torch"
    yield {"out": (ids, valid)}, ValueError, "out must be ids, got 2 arrays"
    both = {"return_valid": True, "return_logprobs": True}
    yield both | {"out": ids}, ValueError, "out must be ids and valid and logprobs, got 1 arrays"
    yield both | {"out": (ids, valid, valid)}, TypeError, "out[2] must be float32, got bool"
    yield both | {"out": (ids, logprobs, valid)}, TypeError, "out[1] must be bool, got float32"
    yield both | {"out": (ids, valid, np.zeros(2, f32))}, ValueError, "out[2] must be of shape [batch] = [3], got [2]"


def _bad_chains() -> Iterator[Any]:
    f32 = np.float32
    many = "draft_probs must be float32 or float16 or bfloat16, got float64"
    yield {"draft_probs": [1.0]}, TypeError, "draft_probs must be an array (NumPy, CuPy, torch, or any with __dlpack"
    yield {"draft_probs": np.ones((3, 2, 6))}, TypeError, many
    yield {"draft_probs": np.ones((3, 6), f32)}, ValueError, "draft_probs must be of shape [batch, drafts, vocab], got "
    yield {"draft_probs": np.ones((3, 2, 0), f32)}, ValueError, "of a vocabulary in [1, 1048576], got 0"
    wide = np.broadcast_to(f32(1), (3, 2, 2**20 + 1))
    yield {"draft_probs": wide}, ValueError, "of a vocabulary in [1, 1048576], got 1048577"
    rows = np.broadcast_to(f32(1), (2**22, 4, 6))
    yield {"draft_probs": rows}, ValueError, "draft_probs must be of at most 16777216 rows in all, got"
    strided = np.ones((3, 4, 6), f32)[:, ::2]
    yield {"draft_probs": strided}, ValueError, "draft_probs must be contiguous, got strides (24, 12, 1)"
    shape = "draft_token_ids must be of shape [batch, drafts] = [3, 2], got"
    yield {"draft_token_ids": np.zeros((3, 3), np.int32)}, ValueError, f"{shape} [3, 3]"
    yield {"draft_token_ids": np.zeros((3, 2), np.int64)}, TypeError, "draft_token_ids must be int32, got int64"
    yield {"draft_token_ids": [[0, 1]]}, TypeError, "draft_token_ids must be a NumPy array like draft_probs, got"
    shape = "target_probs must be of shape [batch, drafts + 1, vocab] = [3, 3, 6], got"
    yield {"target_probs": np.ones((3, 2, 6), f32)}, ValueError, f"{shape} [3, 2, 6]"
    yield {"target_probs": np.ones((3, 3, 7), f32)}, ValueError, f"{shape} [3, 3, 7]"
    yield {"target_probs": np.ones((3, 3, 6), np.float16)}, TypeError, "target_probs must be float32, got float16"
    yield {"target_probs": torch.ones(3, 3, 6)}, TypeError, "target_probs must be a NumPy array like draft_probs, got"
    yield {"target_probs": np.ones((3, 6, 6), f32)[:, ::2]}, ValueError, "target_probs must be contiguous, got"
    out = [np.zeros((3, 3), np.int32), np.zeros(3, np.int32), np.zeros(3, np.int32)]
    three = "out must be three arrays (ids, accepted, emitted), got"
    yield {"out": out[:2]}, TypeError, f"{three} list"
    yield {"out": out[0]}, TypeError, f"{three} ndarray"
    yield {"out": (out[1], out[1], out[2])}, ValueError, "out[0] must be of shape [batch, ...] = [3, 3], got [3]"
    yield {"out": (out[0], out[1], np.zeros(3, np.int64))}, TypeError, "out[2] must be int32, got int64"
    yield {"variant": "cluster"}, ValueError, "variant must be 'auto' for arrays in host memory"


def _bad_calls() -> Iterator[Any]:
    """(function, changed arguments, error, message)."""
    f32 = np.float32
    for name in SAMPLERS:
        for bad in (_bad_rows(name), _bad_numbers(name), _bad_streams(first_argument(name)), _bad_samplers(name)):
            for changes, error, message in bad:
                # With indices the values have rows of their own.
                rows = message.replace("[batch, vocab]", "[rows, vocab]") if "indices" in changes else message
                yield name, changes, error, rows
        if name == "sample" or name.startswith("top_k_top_p"):
            message = "filter_apply_order must be one of 'top_k_first', 'joint', got 'top_p_first'"
            yield name, {"filter_apply_order": "top_p_first"}, ValueError, message
    for name in WHOLE_ROWS:
        first = first_argument(name)
        for bad in (_bad_rows(name), _bad_numbers(name)):
            for changes, error, message in bad:
                yield name, changes, error, message
        shape = "out must be of shape [batch, vocab] = [3, 6], got"
        yield name, {"out": np.ones((3, 7), f32)}, ValueError, f"{shape} [3, 7]"
        yield name, {"out": np.ones((3, 6))}, TypeError, "out must be float32, got float64"
        yield name, {"out": np.ones((3, 12), f32)[:, ::2]}, ValueError, "out must be contiguous, got strides (12, 2)"
        yield name, {"out": torch.ones(3, 6)}, TypeError, f"out must be a NumPy array like {first}, got torch.Tensor"
    halves = np.ones((3, 6), np.float16)
    yield "softmax", {"logits": halves, "out": halves.copy()}, TypeError, "out must be float32, got float16"
    masked = {"logits": halves, "out": np.ones((3, 6), f32)}
    yield "top_k_mask_logits", masked, TypeError, "out must be float16, got float32"
    bias = "bias must be of shape [vocab] = [6], got [7]"
    yield "sample", {"bias": np.zeros(7, f32)}, ValueError, bias
    yield "sample", {"bias": np.zeros(6, np.float16)}, TypeError, "bias must be float32, got float16"
    yield "sample", {"bias": torch.zeros(6)}, TypeError, "bias must be a NumPy array like logits, got torch.Tensor"
    yield "sample", {"end_id": None}, ValueError, "end_id must be given together with finished, got None"
    yield "sample", {"finished": None}, ValueError, "end_id must be given together with finished, got 5"
    wanted = "end_id must be an integer in [0, 5] (the vocabulary), got"
    yield "sample", {"end_id": 6}, ValueError, f"{wanted} 6"
    yield "sample", {"end_id": -1}, ValueError, f"{wanted} -1"
    yield "sample", {"end_id": 1.0}, TypeError, f"{wanted} 1.0 (float)"
    yield "sample", {"finished": np.zeros(3, np.uint8)}, TypeError, "finished must be bool, got uint8"
    yield "sample", {"finished": np.zeros(4, bool)}, ValueError, "finished must be of shape [batch] = [3], got [4]"
    lengths = "sequence_length must be"
    yield "sample", {"sequence_length": np.zeros(3, np.int64)}, TypeError, f"{lengths} int32, got int64"
    yield "sample", {"sequence_length": np.zeros(2, np.int32)}, ValueError, f"{lengths} of shape [batch] = [3], got [2]"
    for changes, error, message in (*_bad_chains(), *_bad_streams("draft_probs")):
        yield CHAIN, changes, error, message


@pytest.mark.parametrize("name", [*SAMPLERS, *WHOLE_ROWS, CHAIN])
def test_bad_arguments_are_named(name: str) -> None:
    getattr(cukern, name)(**good_arguments(name))
    calls = [call[1:] for call in _bad_calls() if call[0] == name]
    assert len(calls) > 15
    for changes, error, message in calls:
        arguments = good_arguments(name) | changes
        before = {k: v.copy() for k, v in arguments.items() if isinstance(v, np.ndarray) and v.size < 1000}
        with pytest.raises(error, match=re.escape(message)):
            getattr(cukern, name)(**arguments)
        for key, value in before.items():
            np.testing.assert_array_equal(arguments[key], value)


def test_numpy_numbers_are_taken() -> None:
    x = np.ones((3, 6), np.float32)
    params = {"temperature": np.float32(0.5), "top_k": np.int64(3), "top_p": np.float64(0.5), "min_p": np.float16(0.25)}
    plain = {key: value.item() for key, value in params.items()}
    for more in ({"seed": np.uint64(2**64 - 1), "offset": np.int8(-3)}, {"seed": -1, "offset": 2**64 - 3}):
        np.testing.assert_array_equal(cukern.sample(x, **params, **more), cukern.sample(x, **plain, seed=-1, offset=-3))


# --- the choice of a variant ----------------------------------------------------------------------------


def plan_on(gpu: Gpu, vocab: int, batch: int, variant: str, cache: bool) -> op.Plan:
    place = describe.Place(arrays.NUMPY, 0, gpu)
    values = describe.Array("float32", (batch, vocab), (vocab, 1), 16, place, 0)
    return op.plan_of(values, batch, variant, cache)


def test_a_plan_covers_the_row() -> None:
    h200 = of_arch("90a")
    for vocab in (1, 1023, 1024, 1025, 6144, 16384, 16385, 32000, 50257, 128256, 300_000, 2**20):
        for variant in ("auto", "cluster", "block"):
            for batch in (1, 33, 34, 1000):
                for cache in (False, True):
                    plan = plan_on(h200, vocab, batch, variant, cache)
                    tiles, tiles_per_block = plan.layout["tiles"], plan.layout["tiles_per_block"]
                    assert tiles * 1024 >= vocab > (tiles - 1) * 1024
                    assert plan.cluster * tiles_per_block >= tiles
                    assert 0 <= plan.layout["cached_tiles"] <= (tiles_per_block if cache else 0)
                    assert plan.shared_bytes <= op._MAX_SHARED_BYTES
                    assert plan.threads % 32 == 0 and 192 <= plan.threads <= 512
                    segments_per_tile = plan.layout["segments_per_tile"]
                    assert segments_per_tile in (1, 2, 4, 8, 16, 32)
                    assert segments_per_tile == 1 or tiles * segments_per_tile <= 256
    assert plan_on(h200, 128256, 1, "auto", True).cluster == op.CLUSTER
    assert plan_on(h200, 1000, 1, "auto", True).cluster == 1
    assert plan_on(h200, 1000, 1, "cluster", True).cluster == op.CLUSTER
    assert plan_on(of_arch("80"), 128256, 1, "auto", True).cluster == 1
    message = "variant must be 'auto' or 'block' on a GPU without clusters (before sm_90), got 'cluster'"
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_on(of_arch("80"), 128256, 1, "cluster", True)
    with pytest.raises(ValueError, match="variant must be one of 'auto', 'cluster', 'block', got 'fast'"):
        plan_on(of_arch("80"), 128256, 1, "fast", True)


def test_a_launch_has_the_numbers_and_the_batch_of_its_call(pretended: PretendedGPU) -> None:  # noqa: F811
    x = torch.ones(4, 50257)

    def fields_of(name: str, *args: Any, **options: Any) -> Options:
        getattr(cukern, name)(*args, **options)
        return pretended.launches[-1].fields

    with counted("sample") as said:
        for i in range(9):
            numbers = {"temperature": 0.5, "top_k": 5, "top_p": 0.75, "min_p": 0.125, "seed": i, "offset": -i}
            for more in ({}, {"temperature": 1.5 + i, "top_k": 6 + i, "top_p": 1 / (2 + i), "min_p": i / 16}):
                fields = fields_of("sample", x, **numbers | more)
                wanted = {**numbers, **more, "offset": -i % 2**64}
                assert {key: fields[f"scalar_{key}"] for key in wanted} == pytest.approx(wanted)
    assert said.call_count == 2 + 9
    for k in (1, 96, 97, 50000, 50257):
        cached = fields_of("top_k_sampling_from_probs", x, k, seed=1)["layout"]["cached_tiles"]
        assert pretended.launches[-1].fields["scalar_top_k"] == k
        assert (cached > 0) == (template.constants("sampling/sample")["MAX_LIST_K"] < k < 50257)
    # Batches whose blocks all run at once, of which nearly all do, and of which few do.
    for batch in (*range(1, 300, 7), 10_000):
        rows, plan = x[:1].expand(batch, -1), plan_on(of_arch("90a"), 50257, batch, "auto", True)
        own = {"top_p": rows[:, 0].clone(), "seed": torch.arange(batch), "finished": rows[:, 0] < 0, "end_id": 3}
        for name, args, options in (("top_p_sampling_from_probs", (0.5,), {"seed": 1}), ("sample", (), own)):
            fields = fields_of(name, rows, *args, **options)
            launch = pretended.launches[-1]
            assert (launch.grid, launch.block, launch.shared_bytes) == (
                (batch * op.CLUSTER, 1, 1), (plan.threads, 1, 1), plan.shared_bytes,
            )  # fmt: skip
            assert fields["layout"] == plan.layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": -2}, "top_k must be an integer of at least -1"),
        ({"top_p": 1.5}, "top_p must be in [0, 1]"),
        ({"seed": 2**64}, "seed must be an integer in [-9223372036854775808, 18446744073709551615]"),
        ({"offset": -(2**64)}, "offset must be an integer in [-9223372036854775808, 18446744073709551615]"),
    ],
)
def test_each_number_is_checked_where_a_plan_is_used_again(
    change: Options,
    message: str,
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    good = {"logits": torch.ones(4, 50257), "seed": 1, "offset": 2, "top_k": 100, "top_p": 0.5}
    for _ in range(3):
        cukern.sample(**good)
    with pytest.raises(ValueError, match=re.escape(message)):
        cukern.sample(**good | change)
    assert len(pretended.launches) == 3


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ({"temperature": 0}, "argmax"),
        ({"temperature": 0.0, "top_p": 0.5, "indices": np.arange(4)}, "argmax"),
        ({"temperature": 0.0, "finished": np.zeros(4, np.bool_), "end_id": 3}, "argmax"),
        ({"temperature": 0, "seed": None}, "sample"),
        ({"temperature": 0, "return_valid": True}, "sample"),
        ({"temperature": 0, "bias": np.zeros(50257, np.float32)}, "sample"),
        ({"temperature": np.zeros(4, np.float32)}, "sample"),
        ({"temperature": 0.5}, "sample"),
        ({}, "sample"),
    ],
)
def test_the_largest_logit_alone_has_a_kernel(options: Options, function: str) -> None:
    trace, _ = plan_of("sample", np.ones((4, 50257), np.float32), **{"seed": 1} | options)
    assert [step.variant.instance.function for step in trace.steps] == [function]


def test_the_tile_is_the_templates() -> None:
    assert template.constants("sampling/sample")["TILE"] == twin.TILE


MODES = ("SOFTMAX", "TOP_K_RENORM", "TOP_P_RENORM", "TOP_K_MASK")


def all_instances(clusters: tuple[int, ...] = (1, op.CLUSTER)) -> list[Any]:
    """Every instance that a call can launch."""
    found = [op.sampler(dtype, probs, cluster) for dtype in DTYPES for probs in (False, True) for cluster in clusters]
    found += [op.renormalizer(dtype, mode, cluster) for dtype in DTYPES for mode in MODES for cluster in clusters]
    return [variant.instance for variant in found]


# --- the operators of torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_step(device: str) -> None:
    call = CALLS["sample temperature top_k top_p min_p seed offset bias finished end_id sequence_length"]
    logits = call.on(device).args[0]

    def step(logits: torch.Tensor, options: Options) -> Any:
        drawn = cukern.sample(logits * 2, **options)
        probs = cukern.softmax(logits)
        return drawn, cukern.top_k_sampling_from_probs(probs, options["top_k"], seed=options["seed"])

    ours, theirs = (call.on(device).options for _ in range(2))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert all(map(torch.equal, compiled(logits, theirs), step(logits, ours)))
        assert all(torch.equal(ours[key], theirs[key]) for key in ("finished", "sequence_length"))
    torch.compiler.reset()


# --- the kernels against the twin -----------------------------------------------------------------------------------


class Tally:
    """Counts rows, and those with another id than the twin's, where rounding may have decided."""

    def __init__(self) -> None:
        self.rows = self.other = 0

    def check(self) -> None:
        assert self.other <= self.rows // 1000, f"{self.other} of {self.rows} ids are not the twin's"


def compare(
    name: str, values: Array, params: Options, tally: Tally | None = None, *, skip: int = 0, apart: int = 0
) -> None:
    """A sampler gives the twin's ids, and the same ones in each variant, whatever else is asked for."""
    options = {"seed": 1234, **params}
    with np.errstate(all="ignore"):
        want = getattr(twin, name)(values, **options, return_valid=True, return_logprobs=True)
    batch = len(want[0])
    x = place(values, skip, apart)
    options = {key: on_gpu(value) for key, value in options.items()}
    first = None
    for variant in forms():
        buffers = [Buffer((batch,), kind, skip) for kind in (want[0].dtype.name, "bool", "float32")]
        out = tuple(buffer.array for buffer in buffers)
        function = getattr(cukern, name)
        function(x, **options, return_valid=True, return_logprobs=True, out=out, variant=variant)
        alone = Buffer((batch,), want[0].dtype.name)
        function(x, **options, out=alone.array, variant=variant)
        ids, valid, logprobs = (buffer.numpy() for buffer in buffers)
        np.testing.assert_array_equal(alone.numpy(), ids)
        if first is None:
            first = ids
            same = ids == want[0]
            if tally is None:
                np.testing.assert_array_equal(ids, want[0])
            else:
                tally.rows += batch
                tally.other += int(np.count_nonzero(~same))
        np.testing.assert_array_equal(ids, first)
        # Whatever rounding does, an id is in the vocabulary.
        assert (ids >= 0).all() and (ids < values.shape[1]).all()
        np.testing.assert_array_equal(valid, want[1])
        assert_matches("sampling.logprobs", logprobs[same], want[2][same])


def compare_rows(name: str, values: Array, value: Any, *, skip: int = 0, apart: int = 0) -> None:
    """A function of whole rows gives the twin's, but for the length of a nucleus where rounding decides it."""
    with np.errstate(all="ignore"):
        want = getattr(twin, name)(values, value)
    x, value_there = place(values, skip, apart), on_gpu(value)
    first = None
    for variant in forms():
        out = Buffer(want.shape, want.dtype.name, skip)
        assert getattr(cukern, name)(x, value_there, out=out.array, variant=variant) is out.array
        got = out.numpy()
        if name == "top_k_mask_logits":
            np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
        elif name == "top_p_renorm_probs":
            shares = np.broadcast_to(value, len(values))
            for row, share, ours, theirs in zip(values, shares, got, want, strict=True):
                assert_nucleus(row, float(share), ours, theirs)
        else:
            assert_matches("sampling.probs" if name == "softmax" else "sampling.renormalized", got, want)
        if want.dtype == values.dtype:
            # Into its own input.
            own = place(values, skip)
            getattr(cukern, name)(own, value_there, out=own, variant=variant)
            np.testing.assert_array_equal(cupy.asnumpy(own).astype(np.float32), got.astype(np.float32))
        if first is None:
            first = got
        np.testing.assert_array_equal(np.isfinite(got) & (got > 0), np.isfinite(first) & (first > 0))


def assert_nucleus(row: Array, share: float, got: Array, want: Array) -> None:
    """`got` is `row` renormalized over a nucleus, the twin's or one whose sum differs from p by rounding."""
    x = np.maximum(row.astype(np.float64), 0)
    total = x.sum()
    if not (np.isfinite(total) and total > 0) or share >= 1:
        assert_matches("sampling.renormalized", got, want)
        return
    order = twin.order(x)
    before = x[order].cumsum() - x[order]
    fewest, most = (max(1, int(np.sum(before < share * total * (1 + epsilon)))) for epsilon in (-1e-6, 1e-6))
    failures = []
    for kept in range(fewest, most + 1):
        wanted = np.zeros(len(x))
        wanted[order[:kept]] = x[order[:kept]] / x[order[:kept]].sum()
        try:
            assert_matches("sampling.renormalized", got, wanted.astype(row.dtype))
            return
        except AssertionError as error:
            failures.append(error)
    raise AssertionError(f"no nucleus of {fewest} to {most} tokens: {failures[0]}")


def softmax_of(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def few(rng: np.random.Generator, rows: int, vocab: int, others: float) -> Array:
    """Up to seven tokens that can be drawn."""
    x = np.full((rows, vocab), others)
    for row in x:
        where = rng.choice(vocab, min(7, vocab), replace=False)
        row[where] = rng.random(len(where)) + 0.1
    return x


def hot(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    x = np.zeros((rows, vocab))
    x[np.arange(rows), rng.integers(0, vocab, rows)] = 1
    return x


Distribution = Callable[[np.random.Generator, int, int], Array]
LOGITS: dict[str, Distribution] = {
    "flat": lambda rng, n, v: rng.standard_normal((n, v)),
    "peaked": lambda rng, n, v: rng.standard_normal((n, v)) * 4,
    "all equal": lambda rng, n, v: np.full((n, v), 1.5),
    "many ties": lambda rng, n, v: np.round(rng.standard_normal((n, v)) * 2) / 2,
    "few finite": lambda rng, n, v: few(rng, n, v, -INF),
    "ascending": lambda rng, n, v: np.sort(rng.standard_normal((n, v)) * 2, axis=1),
    "descending": lambda rng, n, v: -np.sort(rng.standard_normal((n, v)) * 2, axis=1),
    "wide": lambda rng, n, v: rng.standard_normal((n, v)) * 1e4,
    "very wide": lambda rng, n, v: rng.standard_normal((n, v)) * 1e30,
    "far from 0": lambda rng, n, v: rng.standard_normal((n, v)) - 300,
}
PROBS: dict[str, Distribution] = {
    "flat": lambda rng, n, v: softmax_of(rng.standard_normal((n, v))),
    "peaked": lambda rng, n, v: softmax_of(rng.standard_normal((n, v)) * 4),
    # A power of two, so that sums are exact.
    "all equal": lambda rng, n, v: np.full((n, v), 2.0**-10),
    "many ties": lambda rng, n, v: rng.integers(0, 4, (n, v)) / 4,
    "one-hot": hot,
    "mostly 0": lambda rng, n, v: rng.random((n, v)) * (rng.random((n, v)) < 0.1),
    "few": lambda rng, n, v: few(rng, n, v, 0.0),
    "ascending": lambda rng, n, v: np.sort(softmax_of(rng.standard_normal((n, v)) * 2), axis=1),
    "descending": lambda rng, n, v: np.sort(softmax_of(rng.standard_normal((n, v)) * 2), axis=1)[:, ::-1],
    "mostly the smallest numbers": lambda rng, n, v: few(rng, n, v, 1e-40),
    "large": lambda rng, n, v: rng.random((n, v)) * 1e30,
}


def cases(vocab: int) -> list[tuple[str, Options]]:
    """The samplers with parameters for each path through the kernels."""
    counts = [k for k in (1, 2, 8, 16, 40, 96, 97, 500, vocab - 1, vocab) if 1 <= k <= vocab]
    found: list[tuple[str, Options]] = [("sampling_from_logits", {}), ("sampling_from_probs", {})]
    found += [("top_k_sampling_from_probs", {"top_k": k}) for k in counts]
    found += [("top_p_sampling_from_probs", {"top_p": p}) for p in (0, 0.1, 0.5, 0.9, 0.999, 1)]
    found += [("min_p_sampling_from_probs", {"min_p": p}) for p in (0, 0.02, 0.5, 1)]
    pairs = [(1, 0.9), (2, 0.7), (16, 0.9), (40, 0.9), (40, 0.1), (40, 1.0), (97, 0.5), (500, 0.999), (vocab, 0.9)]
    pairs.append((vocab - 1, 0.0))
    for k, p in pairs:
        if not 1 <= k <= vocab:
            continue
        for order in ("top_k_first", "joint"):
            params = {"top_k": k, "top_p": p, "filter_apply_order": order}
            found += [(f"top_k_top_p_sampling_from_{kind}", params) for kind in ("logits", "probs")]
    for params in (
        {"temperature": 0.7, "top_k": min(50, vocab), "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_k": min(500, vocab), "top_p": 0.95, "min_p": 0.001, "filter_apply_order": "joint"},
        {"temperature": 0.25, "min_p": 0.1},
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 0},
        {"min_p": 1},
    ):
        found.append(("sample", params))
    return found


def row_cases(vocab: int) -> list[tuple[str, Any]]:
    counts = [k for k in (1, 2, 16, 40, 96, 97, 500, vocab - 1, vocab) if 1 <= k <= vocab]
    return [
        *(("softmax", t) for t in (None, 0.5, 2.0, 0)),
        *(("top_k_renorm_probs", k) for k in counts),
        *(("top_k_mask_logits", k) for k in counts),
        *(("top_p_renorm_probs", p) for p in (0, 0.1, 0.5, 0.9, 0.999, 1)),
    ]


def draw(rng: np.random.Generator, name: str, kind: int, rows: int, vocab: int, dtype: str) -> Array:
    """From the distribution number `kind`."""
    distributions = list((PROBS if takes_probs(name) else LOGITS).values())
    with np.errstate(over="ignore"):
        return (
            distributions[kind % len(distributions)](rng, rows, vocab)
            .astype(np.float32)
            .astype(arrays.numpy_dtype(dtype))
        )


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile all instances, on all cores."""
    arch = arch_of_device(0)
    clusters = (1, op.CLUSTER) if "cluster" in forms() else (1,)
    compiler.compile_all([(i, arch) for i in compiler.missing(all_instances(clusters), arch)])


#: By vocabulary, how many distributions each case meets, and the batch. The twin takes 20 ms for a row of 128256.
SIZES = {
    1: (3, 2),
    7: (11, 3),
    1000: (11, 3),
    1024: (3, 2),
    1025: (3, 3),
    32000: (2, 1),
    50257: (1, 2),
    128256: (2, 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", SIZES)
def test_samplers(vocab: int, dtype: str, compiled: None, rng: np.random.Generator) -> None:
    kinds, batch = SIZES[vocab]
    tally = Tally()
    for i, (name, params) in enumerate(cases(vocab)):
        for n in range(kinds):
            # Over all cases and dtypes each distribution is met.
            values = draw(rng, name, i * kinds + n + DTYPES.index(dtype), batch, vocab, dtype)
            compare(name, values, params, tally)
    tally.check()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [300_000, 2**20])
def test_the_largest_vocabularies(vocab: int, compiled: None, rng: np.random.Generator) -> None:
    for i, (name, params) in enumerate(
        [
            ("sampling_from_logits", {}),
            ("top_k_sampling_from_probs", {"top_k": 40}),
            ("top_k_sampling_from_probs", {"top_k": 5000}),
            ("top_p_sampling_from_probs", {"top_p": 0.9}),
            ("sample", {"temperature": 0.8, "top_k": 97, "top_p": 0.9}),
            ("min_p_sampling_from_probs", {"min_p": 0.01}),
        ]
    ):
        # Each dtype, and with each another distribution.
        dtype = DTYPES[i % 3]
        compare(name, draw(rng, name, i % 2, 1 if vocab == 2**20 else 2, vocab, dtype), params)
    compare("top_k_sampling_from_probs", np.full((1, vocab), 2.0**-10, np.float32), {"top_k": vocab // 2})
    for name, value in (("softmax", 0.7), ("top_k_renorm_probs", 3000), ("top_k_mask_logits", 40)):
        compare_rows(name, draw(rng, name, 1, 1, vocab, "float32"), value)
    compare_rows("top_p_renorm_probs", draw(rng, "top_p_renorm_probs", 1, 1, vocab, "float32"), 0.9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [v for v in SIZES if v != 1024])
def test_whole_rows(vocab: int, dtype: str, compiled: None, rng: np.random.Generator) -> None:
    kinds, batch = SIZES[vocab]
    for i, (name, value) in enumerate(row_cases(vocab)):
        for n in range(min(kinds, 4)):
            values = draw(rng, name, i * kinds + n + DTYPES.index(dtype), batch, vocab, dtype)
            compare_rows(name, values, value)


def assert_whole_numbers_count(x: Array, dtype: Any) -> None:
    """Integers are taken for the floats of the same value by the functions of whole rows."""
    counts = np.arange(len(x)) % 3
    for name, value in (("softmax", counts), ("top_p_renorm_probs", np.minimum(counts, 1))):
        for integers in (value.astype(dtype), np.array(1, dtype)):
            values = cupy.asarray(np.exp(x.astype(np.float32)))
            got, want = (getattr(cukern, name)(values, cupy.asarray(y)) for y in (integers, integers.astype("float32")))
            np.testing.assert_array_equal(cupy.asnumpy(got), cupy.asnumpy(want))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 2051, 33000])
def test_parameters_per_row(vocab: int, dtype: str, compiled: None, rng: np.random.Generator) -> None:
    x, params = different_rows(rng, 40, vocab)
    x = x.astype(arrays.numpy_dtype(dtype))
    # Rows of all paths in one launch.
    params["top_k"][:8] = [1, 2, 16, 40, 96, 97, vocab - 1, vocab]
    params["top_p"][8:12] = [0, 1, 0.5, 1]
    params["min_p"][12:14] = [0, 1]
    params["temperature"][14:16] = [0, 1]
    params["top_k"][20:] = vocab
    params["top_p"][30:] = 1
    tally = Tally()
    for order in ("top_k_first", "joint"):
        compare("sample", x, {**params, "filter_apply_order": order}, tally)
    bias = (rng.standard_normal(vocab) * 2).astype(x.dtype)
    wide = {key: v.astype(np.int64) if v.dtype == np.int32 else v for key, v in params.items()}
    # Indices out of range are clamped there.
    indices = rng.integers(-9, 49, 40)
    compare("sample", x, {**wide, "bias": bias, "indices": indices}, tally)
    # Integers of both widths where floats are the rule, per row and one for all.
    for dtype_ in (np.int32, np.int64):
        whole = {key: rng.integers(0, 2, 40).astype(dtype_) for key in ("top_p", "min_p")}
        whole["temperature"] = rng.integers(0, 4, 40).astype(dtype_)
        compare("sample", x, {**params, **whole}, tally)
        compare("sample", x, {**params, **{key: v[:1].reshape(()) for key, v in whole.items()}}, tally)
        assert_whole_numbers_count(x[:8], dtype_)
    compare("sample", x, {key: v[:1].reshape(()) for key, v in params.items()}, tally)
    tally.check()
    for name, parameter in WHOLE_ROWS.items():
        values = np.exp(x.astype(np.float32)).astype(x.dtype) if takes_probs(name) else x
        for value in (params[parameter], params[parameter][20:21].reshape(())):
            compare_rows(name, values, value)
    # Parameters on a device are clamped.
    odd = {
        "top_k": np.array([0, -5, vocab + 1, 2**40, -(2**63), 3]),
        "top_p": np.array([-1, 2, 1e30, -INF, INF, 0.5], np.float32),
        "min_p": np.array([-1, 2, 0.5, 0, INF, 1e-30], np.float32),
        "temperature": np.array([-1, 1, 1e-40, INF, 1, 1e30], np.float32),
    }
    ids, valid = cukern.sample(cupy.asarray(x[:6]), **{k: on_gpu(v) for k, v in odd.items()}, return_valid=True)
    assert valid.all() and (ids >= 0).all() and (ids < vocab).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("skip", "apart"), [(0, 1), (0, 4), (0, 8), (1, 0), (2, 0), (4, 0), (3, 5)])
def test_rows_off_alignment_and_apart(
    skip: int, apart: int, dtype: str, compiled: None, rng: np.random.Generator
) -> None:
    for vocab in (1500, 2048, 4096):
        for name, params in (
            ("sampling_from_logits", {}),
            ("top_k_sampling_from_probs", {"top_k": 20}),
            ("top_p_sampling_from_probs", {"top_p": 0.8}),
            ("sample", {"top_k": 500, "min_p": 0.01}),
            ("sample", {"temperature": 0}),
        ):
            compare(name, draw(rng, name, 0, 3, vocab, dtype), params, skip=skip, apart=apart)
        for name, value in (("softmax", 0.7), ("top_k_renorm_probs", 30), ("top_p_renorm_probs", 0.8)):
            compare_rows(name, draw(rng, name, 1, 3, vocab, dtype), value, skip=skip, apart=apart)
        # One bias off alignment.
        x = draw(rng, "sample", 0, 2, vocab, dtype)
        bias = draw(rng, "sample", 1, 1, vocab, dtype)[0]
        got = cukern.sample(place(x, skip, apart), bias=place(bias, skip), top_p=0.9, seed=1234)
        np.testing.assert_array_equal(cupy.asnumpy(got), twin.sample(x, bias=bias, top_p=0.9, seed=1234))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLERS)
def test_any_batch_size_gives_the_same_ids(name: str, compiled: None, rng: np.random.Generator) -> None:
    # The number of blocks decides how many warps share a row.
    choices = {"temperature": 0.7, "top_k": 300, "top_p": 0.9, "min_p": 0.01}
    params = {key: choices[key] for key in SAMPLERS[name]}
    x = cupy.asarray(draw(rng, name, 0, 600, 20_000, "float32"))
    function = getattr(cukern, name)
    one, own = 3, cupy.arange(600)
    wants = [function(x, **params, seed=seed, return_logprobs=True) for seed in (one, own)]
    for variant in forms():
        for first, last in ((0, 1), (0, 5), (599, 600), (100, 150), (0, 300), (0, 600)):
            for seed, all_of in zip((one, own[first:last]), wants, strict=True):
                if seed is one and first:
                    continue  # the place of a row enters
                got = function(x[first:last], **params, seed=seed, return_logprobs=True, variant=variant)
                want = [result[first:last] for result in all_of]
                assert (got[0] == want[0]).all()
                assert_matches("sampling.logprobs", got[1], want[1])


def compare_chain(rng: np.random.Generator, batch: int, drafts: int, vocab: int, dtype: str, alike: float) -> None:
    kind = arrays.numpy_dtype(dtype)
    target = softmax_of(rng.standard_normal((batch, drafts + 1, vocab))).astype(kind)
    draft = softmax_of(rng.standard_normal((batch, drafts, vocab))).astype(kind)
    # Where draft and target agree, drafts are accepted; where an id is outside of the vocabulary, they are refused.
    same = rng.random((batch, drafts)) < alike
    draft[same] = target[:, :drafts][same]
    ids = rng.integers(0, vocab, (batch, drafts)).astype(np.int32)
    ids[rng.random((batch, drafts)) < 0.05] = vocab
    ids[rng.random((batch, drafts)) < 0.02] = -1
    want = twin.chain_speculative_sampling(draft, ids, target, seed=5)
    there = [cupy.asarray(x) for x in (draft, ids, target)]
    for variant in forms():
        out = [Buffer(r.shape, "int32") for r in want]
        cukern.chain_speculative_sampling(*there, seed=5, out=tuple(o.array for o in out), variant=variant)
        for got, wanted in zip(out, want, strict=True):
            np.testing.assert_array_equal(got.numpy(), wanted)
    streams = {"seed": rng.integers(0, 2**40, batch), "offset": rng.integers(0, 99, batch).astype(np.int32)}
    want = twin.chain_speculative_sampling(draft, ids, target, **streams)
    got = cukern.chain_speculative_sampling(*there, **{key: cupy.asarray(value) for key, value in streams.items()})
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(one), other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", [0, 1, 5, 31, 32, 33, 40])
def test_chains(drafts: int, dtype: str, compiled: None, rng: np.random.Generator) -> None:
    for batch, vocab, alike in ((7, 50, 0.5), (3, 1025, 0.9), (4, 3001, 1.0), (2, 5000, 0.95)):
        compare_chain(rng, batch, drafts, vocab, dtype, alike)


@pytest.mark.gpu
def test_a_chain_of_a_models_size(compiled: None, rng: np.random.Generator) -> None:
    compare_chain(rng, 5, 4, 128256, "float32", 0.6)
    compare_chain(rng, 2, 3, 50257, "bfloat16", 0.6)


SANITIZED = {
    "the first round": ("sampling_from_logits", {}, "flat", 3000),
    "one token": ("sampling_from_probs", {}, "flat", 1),
    "the list": ("top_k_sampling_from_probs", {"top_k": 12}, "flat", 3000),
    "the list, with ties": ("top_k_sampling_from_probs", {"top_k": 12}, "many ties", 2500),
    "the list and rounds": ("top_k_top_p_sampling_from_logits", {"top_k": 14, "top_p": 0.7}, "flat", 3000),
    "the list, jointly": (
        "top_k_top_p_sampling_from_probs",
        {"top_k": 14, "top_p": 0.1, "filter_apply_order": "joint"},
        "flat",
        2500,
    ),
    "more than the list takes": ("top_k_sampling_from_probs", {"top_k": 12}, "all equal", 3000),
    "the search": ("top_k_sampling_from_probs", {"top_k": 700}, "flat", 2999),
    "the search, with ties": ("top_k_sampling_from_probs", {"top_k": 700}, "all equal", 2999),
    "rounds": ("top_p_sampling_from_probs", {"top_p": 0.3}, "flat", 3000),
    "a min_p": ("min_p_sampling_from_probs", {"min_p": 0.2}, "flat", 1100),
    "greedy": ("sample", {"temperature": 0}, "many ties", 2100),
    "all": ("sample", {"temperature": 0.7, "top_k": 900, "top_p": 0.8, "min_p": 0.001}, "peaked", 3000),
}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("name", "params", "kind", "vocab"), SANITIZED.values(), ids=SANITIZED)
def test_each_path_of_the_samplers(name: str, params: Options, kind: str, vocab: int, rng: np.random.Generator) -> None:
    values = (PROBS if takes_probs(name) else LOGITS)[kind](rng, 2, vocab).astype(np.float32)
    compare(name, values, params)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_each_path_of_whole_rows(name: str, rng: np.random.Generator) -> None:
    distributions = PROBS if takes_probs(name) else LOGITS
    values = [0.5, 0] if name == "softmax" else [0.4] if name == "top_p_renorm_probs" else [12, 600]
    for kind in ("flat", "all equal"):
        for value in values:
            compare_rows(name, distributions[kind](rng, 2, 2999).astype(np.float32), value)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_each_path_of_a_chain_and_a_step(rng: np.random.Generator) -> None:
    compare_chain(rng, 3, 3, 1100, "float32", 0.6)
    compare_chain(rng, 1, 33, 40, "float32", 1.0)
    compare_chain(rng, 2, 0, 40, "float32", 0.0)
    x = rng.standard_normal((3, 1100)).astype(np.float32)
    finished, length = np.array([False, True, False]), np.array([1, 2, 3], np.int32)
    bias = rng.standard_normal(1100).astype(np.float32)
    for variant in forms():
        there = [cupy.asarray(a) for a in (finished, length)]
        step = {"end_id": 3, "top_p": 0.5, "seed": 1, "bias": cupy.asarray(bias), "variant": variant}
        ids = cukern.sample(cupy.asarray(x), finished=there[0], sequence_length=there[1], **step)
        here = [a.copy() for a in (finished, length)]
        want = twin.sample(
            x, finished=here[0], sequence_length=here[1], end_id=3, top_p=0.5, seed=1, bias=bias, min_p=0
        )
        for got, wanted in zip((ids, *there), (want, *here), strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(got), wanted)


@pytest.mark.gpu
@settings(max_examples=60)
@given(st.data())
def test_random_sizes_and_parameters(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab = data.draw(st.one_of(st.integers(1, 70), st.integers(1, 5000)))
    dtype = data.draw(st.sampled_from(DTYPES))
    name = data.draw(st.sampled_from(sorted({**SAMPLERS, **WHOLE_ROWS})))
    kind = data.draw(st.integers(0, 10))
    skip, apart = data.draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 8), (2, 6)]))
    values = draw(rng, name, kind, data.draw(st.integers(1, 3)), vocab, dtype)
    # No sum of equal values, or of few, has such a share, so that rounding decides no tie.
    shares = st.sampled_from([0.0, 0.0837, 0.3141, 0.5772, 0.9173, 1.0])
    params = {
        "temperature": data.draw(st.sampled_from([0.0, 0.37, 1.0, 2.71])),
        "top_k": data.draw(st.one_of(st.integers(1, vocab), st.integers(1, min(vocab, 100)))),
        "top_p": data.draw(shares),
        "min_p": data.draw(shares),
    }
    if name in WHOLE_ROWS:
        compare_rows(name, values, params[WHOLE_ROWS[name]], skip=skip, apart=apart)
        return
    chosen: Options = {key: params[key] for key in SAMPLERS[name]}
    if "top_k" in chosen and "top_p" in chosen:
        chosen["filter_apply_order"] = data.draw(st.sampled_from(op.ORDERS))
    # A rare draw in which rounding decides would look like an error, so there are few seeds.
    compare(name, values, chosen | {"seed": data.draw(st.integers(0, 999))}, skip=skip, apart=apart)


# --- PyTorch, DLPack, streams, graphs, threads and devices ------------------------------------------------------


@pytest.mark.gpu
def test_bad_arguments_on_the_gpu() -> None:
    logits = torch.zeros(3, 600, device="cuda")
    k, out = torch.ones(3, dtype=torch.int32, device="cuda"), torch.full((3,), -7, dtype=torch.int32, device="cuda")
    for changes, error, message in (
        ({"top_k": k.cpu()}, ValueError, "top_k must be on CUDA device 0 like logits, got one on the CPU"),
        ({"top_k": cupy.ones(3, "int32")}, TypeError, "top_k must be a torch array like logits, got cupy"),
        ({"top_k": -2}, ValueError, "top_k must be an integer of at least -1 (-1, 0 and None for no limit), got -2"),
        ({"seed": torch.tensor(1)}, ValueError, "seed must be on CUDA device 0 like logits, got one on the CPU"),
        ({"out": out.cpu()}, ValueError, "out must be on CUDA device 0 like logits, got one on the CPU"),
        ({"logits": logits[:, ::2]}, ValueError, "logits must be contiguous along its last dimension, got strides"),
        ({"logits": logits.double()}, TypeError, "logits must be float32 or float16 or bfloat16, got float64"),
        ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'cluster', 'block', got 'fast'"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            cukern.sample(**{"logits": logits, "top_k": k, "out": out, "seed": 1} | changes)
    assert (out == -7).all()


@pytest.mark.gpu
def test_threads_do_not_meet(compiled: None, rng: np.random.Generator) -> None:
    inputs = [(draw(rng, "sample", 0, 20 + 10 * i, 1000 + 700 * i, "float32"), 0.5 + i / 10) for i in range(4)]
    wants = [twin.sample(x, top_p=p, seed=i) for i, (x, p) in enumerate(inputs)]
    start = threading.Barrier(len(inputs))
    failures: list[BaseException] = []

    def call(i: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                x = cupy.asarray(inputs[i][0])
                start.wait()
                results = [cukern.sample(x, top_p=inputs[i][1], seed=i) for _ in range(100)]
                stream.synchronize()
                for result in results:
                    np.testing.assert_array_equal(cupy.asnumpy(result), wants[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.gpu
@pytest.mark.large(9)
def test_more_than_2_31_elements(compiled: None) -> None:
    """Draws that depend on the number of their row, and three rows that are 2^30 elements apart."""
    # Not for the sanitizer, which would take minutes.
    vocab = 32768
    rows = 2**31 // vocab + 5
    torch.manual_seed(0)
    x = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda").normal_()
    ends = [0, 2**30 // vocab, 2**31 // vocab - 1, 2**31 // vocab, rows - 1]
    some = to_numpy(x[ends])
    drawn = [
        twin.draw(row.astype(np.float32), 1.0, vocab, 0.9, 0.0, twin.Stream(3, 0, i), False).id
        for i, row in zip(ends, some, strict=True)
    ]
    for variant in forms():
        ids = cukern.sample(x, top_p=0.9, seed=3, variant=variant)
        assert ids[ends].tolist() == drawn
        masked = cukern.top_k_mask_logits(x, 100, variant=variant)
        np.testing.assert_array_equal(
            to_numpy(masked[ends]).astype(np.float32), twin.top_k_mask_logits(some, 100).astype(np.float32)
        )
        assert torch.isfinite(masked[-1]).sum() == 100
        del masked
        # Rows that are far apart.
        apart = x.view(-1).as_strided((3, 700), (2**30, 1))
        want = twin.sample(to_numpy(apart), seed=3)
        np.testing.assert_array_equal(cukern.sample(apart, seed=3, variant=variant).cpu().numpy(), want)


def test_all_sides_of_the_templates_are_compiled() -> None:
    types, clusters = {"float", "__half", "__nv_bfloat16"}, {1, op.CLUSTER}
    modes = {"sample": {"true", "false"}, "renormalize": {"SOFTMAX", "TOP_K_RENORM", "TOP_P_RENORM", "TOP_K_MASK"}}
    at_first_use = [variant.instance for variant in SPECS["sampling"].at_first_use()]
    for kernel in KERNELS["sampling"]:
        own = (x for x in at_first_use if x.function == kernel.function)
        compiled = [x.arguments for x in (*kernel.at_import, *kernel.specialized, *own)]
        sides = [types, *([modes[kernel.function]] if kernel.function in modes else []), clusters]
        assert [set(values) for values in zip(*compiled, strict=True)] == sides
