"""The MoE gates: the twin against independent formulas and worked examples, the kernel against the twin."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import e, log
from types import SimpleNamespace
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
from cukern.ops import moe_gate as op
from cukern.ops.moe_gate import choose as kernels
from cukern.reference import moe_gate as twin
from cukern.runtime import arrays, template
from cukern.runtime.cuda import cupy
from cukern.runtime.op import OPS
from cukern.testing import assert_matches
from tests.buffers import OnlyDLPack, on_gpu, zeros
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
Routing = tuple[Array, Array]
FUNCTIONS = tuple(op.__all__)
GROUPED = ("moe_fused_gate", "biased_grouped_topk", "grouped_topk")
NAN, INF = np.nan, np.inf
POISON = {"float32": NAN, "int32": 12345}


@dataclass(frozen=True)
class Case:
    """Sizes and options of a routing; `topk` includes the shared experts."""

    experts: int
    groups: int = 1
    topk_group: int = 1
    topk: int = 8
    scoring: str = "sigmoid"
    biased: bool = True
    renormalize: bool = True
    shared: int = 0
    scaling: float = 1.0
    scale_output: bool = False

    def route(self, module: Any, logits: Any, bias: Any, **options: Any) -> tuple[Any, Any]:
        """The routing by `module`: cukern, or the twin."""
        rest = (self.shared, self.scaling, self.scale_output)
        options |= {"scoring_func": self.scoring}
        if self.biased:
            sizes = (self.groups, self.topk_group, self.topk)
            return module.moe_fused_gate(logits, bias, *sizes, *rest, renormalize=self.renormalize, **options)
        sizes = (self.topk, self.renormalize, self.groups, self.topk_group)
        return module.grouped_topk(None, logits, *sizes, *rest, **options)


# --- inputs whose ids are certain -----------------------------------------------------------------------
#
# The GPU's exp2 and reciprocal are approximations, so two choices a few units in the last place apart may swap their
# order. Rows where that could change the ids are drawn again, so that ids can be compared exactly. Exact ties stay:
# equal logits with equal biases give equal bits in the kernel and in the twin.

MARGIN = 1e-5


def exact_scores(logits: Array, scoring: str) -> Array:
    """The scores in float64, by the formulas."""
    x = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        if scoring == "sigmoid":
            return 1 / (1 + np.exp(-x))
        if scoring == "sqrtsoftplus":
            return np.sqrt(np.logaddexp(0, x))
        largest = np.finfo(np.float32).max
        x = np.clip(x, -largest, largest)
        exponentials = np.exp(x - x.max(axis=-1, keepdims=True, initial=-largest, where=~np.isnan(x)))
        return exponentials / np.nansum(exponentials, axis=-1, keepdims=True)


def is_certain(logits: Array, bias: Array, case: Case, margin: float) -> Array:
    """Whether no decision about the ids of a row hangs on less than `margin`, exact ties apart: bool [tokens]."""
    tokens = len(logits)
    x, b = logits.astype(np.float64), np.broadcast_to(bias.astype(np.float64), logits.shape)
    with np.errstate(invalid="ignore"):
        choice = np.where(np.isnan(x) | np.isneginf(x), -INF, exact_scores(logits, case.scoring) + b)
    choice[np.isnan(choice)] = -INF
    # Logit and bias of each choice: equal ones tie exactly. Experts at -inf are ordered by their ids alone.
    made_of = np.zeros(choice.shape, complex)
    made_of.real, made_of.imag = np.where(choice > -INF, (x, b), 0)

    size = case.experts // case.groups
    certain = np.ones(tokens, bool)
    if case.topk_group < case.groups:
        by_group = choice.reshape(tokens, case.groups, size)
        two_best = np.argsort(-by_group, axis=-1, kind="stable")[..., :2]
        with np.errstate(invalid="ignore"):
            scores = np.take_along_axis(by_group, two_best, axis=-1).sum(axis=-1)
        scores[np.isnan(scores)] = -INF
        parts = np.take_along_axis(made_of.reshape(by_group.shape), two_best, axis=-1)
        parts[scores == -INF] = 0
        order = np.argsort(-scores, axis=-1, kind="stable")
        at = case.topk_group
        last = np.take_along_axis(scores, order[:, at - 1 : at], axis=-1)
        next_one = np.take_along_axis(scores, order[:, at : at + 1], axis=-1)
        parts_of_last = np.take_along_axis(parts, order[:, at - 1, None, None], axis=1)
        with np.errstate(invalid="ignore"):
            apart = last[:, 0] - next_one[:, 0] >= 2 * margin
            near = (np.abs(scores - last) < 2 * margin) | (np.abs(scores - next_one) < 2 * margin)
        certain = apart | (~near | (parts == parts_of_last).all(axis=-1)).all(axis=-1)
        kept = np.zeros((tokens, case.groups), bool)
        np.put_along_axis(kept, order[:, : case.topk_group], True, axis=-1)
        outside = np.repeat(~kept, size, axis=-1)
        choice = np.where(outside, -INF, choice)
        made_of = np.where(outside, 0, made_of)

    order = np.argsort(-choice, axis=-1, kind="stable")
    in_order, made_of = (np.take_along_axis(x, order, axis=-1) for x in (choice, made_of))
    last = in_order[:, case.topk - case.shared - 1, None]
    with np.errstate(invalid="ignore"):
        apart = in_order[:, :-1] - in_order[:, 1:] >= margin
        irrelevant = in_order[:, :-1] < last - margin
    return certain & (apart | irrelevant | (made_of[:, :-1] == made_of[:, 1:])).all(axis=-1)


def draw(
    case: Case,
    tokens: int,
    rng: np.random.Generator,
    dtype: str = "float32",
    *,
    bias: Array | None = None,
    bias_dtype: str = "float32",
    sample: Callable[[int], Array] | None = None,
) -> Routing:
    """Logits [tokens, experts] and a bias [experts] whose ids are certain.

    `sample(count)` draws `count` rows of logits.
    """
    if sample is None:
        sample = lambda count: rng.normal(0, 1.5, (count, case.experts))  # noqa: E731
    if bias is None:
        # With many slots and a narrow spread, some two of the chosen would always be close.
        spread = 3 if case.topk >= 64 else 0.05 if case.scoring == "softmax" else 0.2
        bias = rng.normal(0, spread, case.experts)
    bias = bias.astype(arrays.numpy_dtype(bias_dtype))
    logits = sample(tokens).astype(arrays.numpy_dtype(dtype))
    if not case.biased:
        return logits, bias  # the logits themselves order the experts
    for _ in range(100):
        doubtful = ~is_certain(logits, bias, case, MARGIN)
        if not doubtful.any():
            return logits, bias
        logits[doubtful] = sample(np.count_nonzero(doubtful)).astype(logits.dtype)
    raise AssertionError(f"{case}: {np.count_nonzero(doubtful)} rows stay doubtful")


def assert_same_bits(one: Routing, other: Routing) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def assert_routing(got: tuple[Any, Any], want: Routing) -> None:
    assert_matches("moe_gate.ids", got[1], want[1])
    assert_matches("moe_gate.weights", got[0], want[0])


def test_a_row_that_rounding_decides_is_not_certain() -> None:
    bias = np.zeros(4, np.float32)
    rows = np.array([[0, 1e-6, -3, -4], [0, 0, -3, -4], [0, 1, -4, -4 + 1e-6], [0, 1, 2, 2.1]], np.float32)
    assert is_certain(rows, bias, Case(4, topk=2), MARGIN).tolist() == [False, True, True, True]
    # The scores of the two groups differ by less than the margin; tie exactly; or are equal sums of other parts.
    rows = np.array([[2, 0, 2, 1e-6], [2, 0, 2, 0], [2, 0, 1, 1]], np.float32)
    assert is_certain(rows, bias, Case(4, 2, 1, 1), MARGIN).tolist() == [False, True, True]
    bias = np.array([0.25, 0, 0, 0.25], np.float32)
    rows = np.array([[2, 1, 1, 2], [2, 1, 2, 1]], np.float32)
    assert is_certain(rows, bias, Case(4, 2, 1, 1), MARGIN).tolist() == [True, False]


# --- where the tests of the semantics run ---------------------------------------------------------------


@contextlib.contextmanager
def forced(form: str | int) -> Iterator[str]:
    """The `variant` argument that gives a variant by its name, or a specialized kernel by its position.

    A specialized configuration has several, for few tokens up to many.
    """
    if isinstance(form, str):
        yield form
        return
    choose = kernels.choose

    def choose_one(*arguments: Any) -> Any:
        whole = choose(*arguments)
        return whole._replace(specialized=whole.specialized[form:][:1])

    with patch.object(kernels, "choose", choose_one):
        forget()
        yield "specialized"
    forget()


def forget() -> None:
    """Drop the plans, so that the next calls make new ones."""
    for name in FUNCTIONS:
        OPS[name].forget()


class Place(NamedTuple):
    """A caller of functions: takes and returns NumPy arrays, and runs the twin or, with a form, the kernel."""

    form: str | int | None

    def __call__(self, name: str, *args: Any, **options: Any) -> Routing:
        function = getattr(cukern, name)
        if name.startswith("topk_"):
            shape = (len(args[0]), options.pop("topk"))
            args = (np.full(shape, POISON["float32"], np.float32), np.full(shape, POISON["int32"], np.int32), *args)
        if self.form is None:
            return function(*args, **options)
        options = {key: on_gpu(value) for key, value in options.items()}
        with forced(self.form) as variant:
            weights, ids = function(*map(on_gpu, args), **options, variant=variant)
        return cupy.asnumpy(weights), cupy.asnumpy(ids)


@pytest.fixture(params=[None, pytest.param("dynamic", marks=pytest.mark.gpu)], ids=["numpy", "dynamic"])
def route(request: pytest.FixtureRequest) -> Place:
    """The twin and the dynamic kernel, which take any sizes."""
    return Place(request.param)


@pytest.fixture(
    params=[None, *(pytest.param(form, marks=pytest.mark.gpu) for form in (0, -1, "dynamic"))],
    ids=["numpy", "specialized for few tokens", "specialized for many tokens", "dynamic"],
)
def route_model(request: pytest.FixtureRequest) -> Place:
    """The twin and all kernels: for sizes with specialized ones, 256 experts in 8 groups, or 128 or 256 in one."""
    return Place(request.param)


def row(experts: int, values: dict[int, float], others: float = 0.0) -> Array:
    """One token's logits, or a bias."""
    x = np.full(experts, others, np.float32)
    x[list(values)] = list(values.values())
    return x


def deepseek(route: Place, logits: Array, bias: Array | None = None, **options: Any) -> Routing:
    """8 of 256 experts in 4 of 8 groups of 32."""
    bias = np.zeros(256, np.float32) if bias is None else bias
    return route("moe_fused_gate", np.atleast_2d(logits), bias, 8, 4, 8, **options)


# --- worked examples ------------------------------------------------------------------------------------

# sigmoid(log(3)) = 3/4, sigmoid(0) = 1/2, sigmoid(-log(3)) = 1/4
UP, MIDDLE, DOWN = log(3), 0.0, -log(3)


@pytest.mark.parametrize(
    ("bias", "ids", "weights"),
    [
        # Both groups score 3/4 + 1/4: the lower one.
        ([0, 0, 0, 0], [0, 1], [3 / 4, 1 / 4]),
        # 1 against 1.1: the other group, ordered by 0.75 > 0.35.
        ([0, 0, 0.1, 0], [3, 2], [3 / 4, 1 / 4]),
        # 1.6 against 1: expert 1, at 0.85, now comes first but keeps its weight.
        ([0, 0.6, 0, 0], [1, 0], [1 / 4, 3 / 4]),
    ],
)
def test_sigmoid_by_hand(route: Place, bias: list[float], ids: list[int], weights: list[float]) -> None:
    logits = np.array([[UP, DOWN, DOWN, UP]], np.float32)
    got = route("moe_fused_gate", logits, np.array(bias, np.float32), 2, 1, 2)
    assert_routing(got, (np.array([weights], np.float32), np.array([ids], np.int32)))


@pytest.mark.parametrize(("renormalize", "weights"), [(False, [0.4, 0.3]), (True, [4 / 7, 3 / 7])])
def test_softmax_by_hand(route: Place, renormalize: bool, weights: list[float]) -> None:
    logits = np.log(np.array([[1, 2, 3, 4]], np.float32))
    got = route("topk_softmax", logits, renormalize, topk=2)
    assert_routing(got, (np.array([weights], np.float32), np.array([[3, 2]], np.int32)))


def test_sqrtsoftplus_by_hand(route: Place) -> None:
    # sqrt(log(1 + exp(x))) is 2, 1 and 3.
    logits = np.log(np.expm1(np.array([[4, 1, 9]], np.float64))).astype(np.float32)
    got = route(
        "moe_fused_gate", logits, np.zeros(3, np.float32), 1, 1, 2, renormalize=False, scoring_func="sqrtsoftplus"
    )
    assert_routing(got, (np.array([[3, 2]], np.float32), np.array([[2, 0]], np.int32)))


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_small_scores_keep_their_digits(route: Place, scoring: str) -> None:
    # Where exp(x) is far below 1, 1 + exp(x) rounds most of its digits away.
    logits = np.array([[-2, -3, -4, -6, -8, -9, -10, -12]], np.float32)
    weights, ids = route("grouped_topk", None, logits, 8, False, scoring_func=scoring)
    assert ids.tolist() == [list(range(8))]
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    if scoring == "sqrtsoftplus":
        scores = np.sqrt(np.log1p(np.exp(logits.astype(np.float64))))
    assert_matches("moe_gate.weights", weights, scores.astype(np.float32))


def test_softcapping_by_hand(route: Place) -> None:
    # 2 tanh(x / 2) is log(3) for x = 2 artanh(log(3) / 2), and 2 for a huge logit.
    logits = np.array([[0, 2 * np.arctanh(log(3) / 2), 1e30]], np.float32)
    got = route("topk_softmax", logits, False, 2.0, topk=3)
    weights = np.array([[e**2, 3, 1]]) / (1 + 3 + e**2)
    assert_routing(got, (weights.astype(np.float32), np.array([[2, 1, 0]], np.int32)))


def test_shared_experts_by_hand(route: Place) -> None:
    logits = np.array([[UP, DOWN, MIDDLE, MIDDLE]], np.float32)
    args = (logits, np.zeros(4, np.float32), 1, 1, 4, 2, 2.5)
    ids = np.array([[0, 2, 4, 5]], np.int32)  # two routed ones, then experts + 0 and experts + 1
    raw = np.array([[3 / 4, 1 / 2, 1.25 / 2.5, 1.25 / 2.5]], np.float32)
    assert_routing(route("moe_fused_gate", *args, renormalize=False), (raw, ids))
    # Divided by the sum of the routed ones, not of all.
    assert_routing(route("moe_fused_gate", *args), (raw / np.float32(1.25), ids))
    assert_routing(route("moe_fused_gate", *args, True), (raw * np.float32(2), ids))
    assert_routing(route("moe_fused_gate", *args, True, renormalize=False), (raw * np.float32(2.5), ids))


@pytest.mark.parametrize("name", ["topk_sigmoid", "topk_softmax"])
def test_shared_experts_without_groups_by_hand(route: Place, name: str) -> None:
    # As vLLM's operator scales: the weights, renormalized or not.
    logits = np.array([[UP, DOWN, MIDDLE, MIDDLE]] if name == "topk_sigmoid" else [[log(4), 0, log(2), 0]], np.float32)
    ids = np.array([[0, 2, 4, 5]], np.int32)
    routed = np.array([3 / 4, 1 / 2] if name == "topk_sigmoid" else [1 / 2, 1 / 4], np.float32)
    raw = np.concatenate([routed, [routed.sum() / 2.5] * 2]).astype(np.float32)[None]
    options = {"topk": 4, "num_fused_shared_experts": 2, "routed_scaling_factor": 2.5}
    unscaled = {"apply_routed_scaling_factor_on_output": False}
    assert_routing(route(name, logits, False, **options, **unscaled), (raw, ids))
    assert_routing(route(name, logits, True, **options, **unscaled), (raw / routed.sum(), ids))
    assert_routing(route(name, logits, False, **options), (raw * np.float32(2.5), ids))
    assert_routing(route(name, logits, True, **options), (raw / routed.sum() * np.float32(2.5), ids))
    options = {"topk": 2, "routed_scaling_factor": 2.5}
    for renormalize in (False, True):
        plain = route(name, logits, renormalize, topk=2)[0]
        assert_routing(route(name, logits, renormalize, **options), (plain * np.float32(2.5), ids[:, :2]))


def test_the_scaling_factor_is_applied_only_when_asked(route: Place) -> None:
    logits, bias = np.array([[UP, DOWN, MIDDLE]], np.float32), np.zeros(3, np.float32)
    ids = np.array([[0, 2]], np.int32)
    plain = np.array([[0.6, 0.4]], np.float32)
    assert_routing(route("moe_fused_gate", logits, bias, 1, 1, 2, 0, 2.5), (plain, ids))
    assert_routing(route("moe_fused_gate", logits, bias, 1, 1, 2, 0, 2.5, True), (plain * np.float32(2.5), ids))


@pytest.mark.parametrize("name", ["biased_grouped_topk", "grouped_topk"])
@pytest.mark.parametrize("shared", [0, 1])
def test_sglangs_functions_scale_what_they_renormalize(route: Place, name: str, shared: int) -> None:
    logits = np.array([[UP, DOWN, MIDDLE]], np.float32)
    options: dict[str, Any] = {"scoring_func": "sigmoid", "num_fused_shared_experts": shared}
    given = (None, logits, *([np.zeros(3, np.float32)] if name[0] == "b" else []), 2 + shared)
    for renormalize in (False, True):
        plain, ids = route(name, *given, renormalize, routed_scaling_factor=2.5, **options)
        options["apply_routed_scaling_factor_on_output"] = True
        scaled = route(name, *given, renormalize, routed_scaling_factor=2.5, **options)
        assert_routing(scaled, (plain * np.float32(2.5 if renormalize else 1), ids))
        del options["apply_routed_scaling_factor_on_output"]


# --- semantics, one by one ------------------------------------------------------------------------------


def test_ties_go_to_the_lower_expert_and_the_lower_group(route_model: Place) -> None:
    weights, ids = deepseek(route_model, np.zeros(256, np.float32))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert_matches("moe_gate.weights", weights, np.full((1, 8), 1 / 8, np.float32))
    # Groups 1 and 6 lead; of the others, which tie, 0 and 2 are kept.
    _, ids = deepseek(route_model, row(256, {200: 1, 40: 1}))
    assert ids.tolist() == [[40, 200, 0, 1, 2, 3, 4, 5]]
    _, ids = deepseek(route_model, row(256, {200: 1, 40: 1, 0: -1, 33: 1, 70: 0.5, 255: 0.5}))
    assert ids.tolist() == [[33, 40, 200, 70, 255, 32, 34, 35]]
    # All groups are as good, so the lower half is kept, though the upper half has more to offer.
    leads = [32 * group + 7 * lead for group in range(8) for lead in range(2)]
    logits = row(256, dict.fromkeys(leads, 1.0) | {32 * group + 3: 1.0 for group in range(4, 8)})
    _, ids = route_model("moe_fused_gate", logits[None], np.zeros(256, np.float32), 8, 4, 12)
    assert ids.tolist() == [[0, 7, 32, 39, 64, 71, 96, 103, 1, 2, 3, 4]]


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_zeros_of_both_signs_tie(route_model: Place, first: float) -> None:
    # Patterns that put the zeros of one sign into whole lanes of the specialized and of the dynamic kernel.
    for others in ([0, 1, 2, 3], list(range(64)), list(range(0, 256, 32)), list(range(1, 256, 2))):
        logits = row(256, dict.fromkeys(others, first), others=-first)
        _, ids = route_model("topk_softmax", logits[None], topk=8)
        assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_zeros_of_both_signs_tie_between_groups(route: Place) -> None:
    logits = row(64, {0: -0.0, 1: -0.0, 2: -0.0, 3: -0.0}, others=0.0)
    _, ids = route("grouped_topk", None, logits[None], 4, True, 16, 2)
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("value", [NAN, -INF], ids=str)
def test_nan_and_minus_infinity_rank_last_with_weight_0(route_model: Place, value: float) -> None:
    # Fewer than topk experts are left: the lowest of the others fill up.
    logits = row(256, {7: 1.0, 100: 2.0, 33: 0.0}, others=value)
    for name in ("topk_softmax", "topk_sigmoid"):
        weights, ids = route_model(name, logits[None], True, topk=8)
        assert ids.tolist() == [[100, 7, 33, 0, 1, 2, 3, 4]]
        assert weights[0, 3:].tolist() == [0] * 5
        assert weights[0, :3].sum() == pytest.approx(1)
    # Groups 0, 1 and 3 have one number each, so their scores are -inf, like those of all other groups.
    weights, ids = deepseek(route_model, logits)
    assert ids.tolist() == [[100, 7, 33, 0, 1, 2, 3, 4]]
    assert weights[0, 3:].tolist() == [0] * 5


def test_a_group_without_two_numbers_is_not_preferred(route_model: Place) -> None:
    # The best expert of all is alone in its group.
    logits = row(256, dict.fromkeys(range(224, 255), NAN) | {255: 9.0})
    _, ids = deepseek(route_model, logits)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # A group with one number ties with groups without any, even if that number is infinite.
    _, ids = deepseek(route_model, row(256, {3: 0.0}, others=NAN), row(256, {3: INF}))
    assert ids.tolist() == [[3, 0, 1, 2, 4, 5, 6, 7]]


def test_nan_in_a_kept_group_comes_before_the_other_groups(route: Place) -> None:
    logits = np.array([[-1, -2, -3, 5, 4, NAN]], np.float32)
    _, ids = route("moe_fused_gate", logits, np.zeros(6, np.float32), 2, 1, 3)
    assert ids.tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", kernels.SCORING)
def test_a_row_of_nan_gets_the_lowest_experts_and_no_weight(route: Place, scoring: str, renormalize: bool) -> None:
    logits = np.array([[NAN] * 12, [-INF] * 12, [NAN, -INF] * 6], np.float32)
    for case in (Case(12, 3, 2, 5), Case(12, 3, 2, 5, shared=1), Case(12, 1, 1, 5, biased=False)):
        case = replace(case, scoring=scoring, renormalize=renormalize)
        args = (case.topk, renormalize, case.groups, case.topk_group, case.shared)
        if case.biased:
            bias = np.arange(12, dtype=np.float32)
            got = route("biased_grouped_topk", None, logits, bias, *args, scoring_func=scoring)
        else:
            got = route("grouped_topk", None, logits, *args, scoring_func=scoring)
        wanted = [[0, 1, 2, 3, 12 if case.shared else 4]] * 3
        assert got[1].tolist() == wanted
        assert not got[0].any()


def test_a_row_of_nan_in_the_models_sizes(route_model: Place) -> None:
    weights, ids = deepseek(route_model, np.full((2, 256), NAN, np.float32))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]] * 2
    assert not weights.any()


@pytest.mark.parametrize("scoring", kernels.SCORING)
def test_infinity_ranks_first(route: Place, scoring: str) -> None:
    logits = np.array([[0, 1, INF, 0.5], [0, INF, INF, 0.5]], np.float32)
    for biased in (True, False):
        name, bias = ("biased_grouped_topk", [np.zeros(4, np.float32)]) if biased else ("grouped_topk", [])
        weights, ids = route(name, None, logits, *bias, 3, True, scoring_func=scoring)
        # Beside an infinity all softmax scores are 0 and tie; the logits themselves still differ.
        tied = biased and scoring == "softmax"
        assert ids.tolist() == ([[2, 0, 1], [1, 2, 0]] if tied else [[2, 1, 3], [1, 2, 3]])
        assert np.isfinite(weights).all()
        if scoring != "sigmoid":
            assert_matches("moe_gate.weights", weights, np.array([[1, 0, 0], [0.5, 0.5, 0]], np.float32))
        else:
            scores = np.array([[1, e / (1 + e), e**0.5 / (1 + e**0.5)], [1, 1, e**0.5 / (1 + e**0.5)]])
            scores /= scores.sum(axis=-1, keepdims=True)
            assert_matches("moe_gate.weights", weights, scores.astype(np.float32))


def test_infinity_in_the_models_sizes(route_model: Place) -> None:
    weights, ids = deepseek(route_model, row(256, {250: INF, 3: -INF}), renormalize=False)
    assert ids.tolist() == [[250, 0, 1, 2, 4, 5, 6, 7]]
    assert_matches("moe_gate.weights", weights, np.array([[1] + [0.5] * 7], np.float32))


def test_a_bias_of_nan_and_infinities(route_model: Place) -> None:
    bias = row(256, {0: NAN, 1: -INF, 2: INF, 200: -1.0})
    weights, ids = deepseek(route_model, np.zeros(256, np.float32), bias)
    assert ids.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9]]
    assert_matches("moe_gate.weights", weights, np.full((1, 8), 1 / 8, np.float32))
    bias = row(256, {5: 0.0, 6: 1.0}, others=NAN)
    weights, ids = deepseek(route_model, np.zeros(256, np.float32), bias)
    assert ids.tolist() == [[6, 5, 0, 1, 2, 3, 4, 7]]
    assert_matches("moe_gate.weights", weights, np.array([[0.5, 0.5] + [0] * 6], np.float32))


def test_a_logit_of_minus_infinity_ranks_last_whatever_its_bias(route_model: Place) -> None:
    weights, ids = deepseek(route_model, row(256, {9: -INF}), row(256, {9: INF}))
    assert 9 not in ids
    assert (weights > 0).all()


def test_the_group_score_is_the_sum_of_two_with_a_bias_and_the_best_without(route: Place) -> None:
    logits = np.array([[2, -9, 1, 1]], np.float32)
    _, ids = route("biased_grouped_topk", None, logits, np.zeros(4, np.float32), 1, True, 2, 1)
    assert ids.tolist() == [[2]]
    _, ids = route("grouped_topk", None, logits, 1, True, 2, 1)
    assert ids.tolist() == [[0]]


def test_groups_of_one_expert(route: Place) -> None:
    logits = np.array([[0, 3, 1, 2, -1]], np.float32)
    bias = np.array([0, 0, 0, 0, 5], np.float32)
    _, ids = route("moe_fused_gate", logits, bias, 5, 3, 3)
    assert ids.tolist() == [[4, 1, 3]]


def test_only_the_kept_groups_are_routed_to(route_model: Place) -> None:
    # Experts 0, 32, 64, ... lead their groups; 224 is the best of all in the worst group.
    leads = {32 * group: 2.0 - group / 10 for group in range(7)}
    logits = row(256, leads | {224: 3.0} | dict.fromkeys(range(225, 256), -9.0))
    _, ids = deepseek(route_model, logits)
    assert ids.tolist() == [[0, 32, 64, 96, 1, 2, 3, 4]]


def test_the_bias_chooses_and_does_not_weigh(route_model: Place) -> None:
    logits = row(256, {17: UP}, others=DOWN)
    weights, ids = deepseek(route_model, logits, row(256, {3: 2.0}), renormalize=False)
    assert ids.tolist() == [[3, 17, 0, 1, 2, 4, 5, 6]]
    assert_matches("moe_gate.weights", weights, np.array([[1 / 4, 3 / 4] + [1 / 4] * 6], np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_float32_bias_is_not_rounded_to_the_input(route_model: Place, dtype: str) -> None:
    # 1 + 2**-12 rounds to 1 in both dtypes, and the sum of score and bias to that of the others.
    bias = row(256, {100: 1 + 2**-12}, others=1.0)
    _, ids = deepseek(route_model, np.zeros((1, 256), arrays.numpy_dtype(dtype)), bias)
    assert ids.tolist() == [[100, 0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [("float32", "bfloat16"), ("float32", "float64"), ("float16", "float64"), ("bfloat16", "float16")],
)
def test_a_bias_of_any_float_dtype_is_used_as_float32(
    route_model: Place, dtype: str, bias_dtype: str, rng: np.random.Generator
) -> None:
    logits, bias = draw(Case(256, 8, 4), 20, rng, dtype, bias_dtype=bias_dtype)
    bias[3], bias[77] = NAN, -INF
    want = deepseek(route_model, logits, bias.astype(np.float32))
    assert_same_bits(deepseek(route_model, logits, bias), want)


def test_a_float64_bias_past_float32_is_infinite(route: Place) -> None:
    bias = np.array([0, 1e300, 0, -1e300])
    _, ids = route("moe_fused_gate", np.zeros((1, 4), np.float32), bias, 1, 1, 4)
    assert ids.tolist() == [[1, 0, 2, 3]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(route_model: Place, dtype: str, rng: np.random.Generator) -> None:
    logits = rng.normal(size=(33, 256)).astype(arrays.numpy_dtype(dtype))
    bias = rng.normal(size=256).astype(arrays.numpy_dtype(dtype))
    wide = deepseek(route_model, logits.astype(np.float32), bias.astype(np.float32))
    assert_same_bits(deepseek(route_model, logits, bias), wide)
    assert_same_bits(deepseek(route_model, logits, bias.astype(np.float32)), wide)


@pytest.mark.parametrize("kind", ["int", "int32", "int64", "int32 scalar"])
@pytest.mark.parametrize("valid", [0, 3, 10])
def test_rows_past_the_valid_ones_are_padding(
    route_model: Place, valid: int, kind: str, rng: np.random.Generator
) -> None:
    logits = rng.normal(size=(10, 256)).astype(np.float32)
    count = valid if kind == "int" else np.array([valid], kind.split()[0])
    if kind.endswith("scalar"):
        count = count.reshape(())  # type: ignore[union-attr]
    want = deepseek(route_model, logits)
    weights, ids = deepseek(route_model, logits, num_token_non_padded=count)
    assert_same_bits((weights[:valid], ids[:valid]), (want[0][:valid], want[1][:valid]))
    assert (ids[valid:] == -1).all()
    assert (weights[valid:] == 0).all()


def test_the_shared_experts_of_padding_are_padding_too(route: Place) -> None:
    args = (np.zeros((2, 6), np.float32), np.zeros(6, np.float32), 1, 1, 4, 2, 2.5)
    weights, ids = route("moe_fused_gate", *args, num_token_non_padded=1)
    assert ids.tolist() == [[0, 1, 6, 7], [-1] * 4]
    assert (weights[0] > 0).all()
    assert not weights[1].any()


@pytest.mark.parametrize("count", [-1, 2**40])
def test_a_count_on_the_device_may_be_out_of_range(route: Place, count: int) -> None:
    _, ids = route("topk_softmax", np.ones((3, 5), np.float32), topk=2, num_token_non_padded=np.array([count]))
    assert ids.tolist() == ([[-1, -1]] if count < 0 else [[0, 1]]) * 3


def test_no_tokens_give_empty_results(route_model: Place) -> None:
    weights, ids = deepseek(route_model, np.empty((0, 256), np.float32))
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((0, 8), np.float32, (0, 8), np.int32)


def test_the_functions_are_one_gate(route_model: Place, rng: np.random.Generator) -> None:
    logits, bias = draw(Case(256, 8, 4), 20, rng)
    options = {"num_token_non_padded": 15}
    gate = route_model("moe_fused_gate", logits, bias, 8, 4, 8, 1, 2.5, True, **options)
    hidden_states = np.empty((20, 3), np.float32)
    same = route_model("biased_grouped_topk", hidden_states, logits, bias, 8, True, 8, 4, 1, 2.5, True, **options)
    assert_same_bits(same, gate)

    gate = route_model("moe_fused_gate", logits, bias, 1, 1, 8, renormalize=False)
    assert_same_bits(route_model("topk_sigmoid", logits, False, bias, topk=8), gate)
    assert_same_bits(route_model("biased_grouped_topk", None, logits, bias, 8, False), gate)

    softmax = route_model("grouped_topk", hidden_states, logits, 8, True)
    assert_same_bits(route_model("topk_softmax", logits, True, topk=8), softmax)
    sigmoid = route_model("grouped_topk", None, logits, 8, True, scoring_func="sigmoid")
    assert_same_bits(route_model("topk_sigmoid", logits, True, topk=8), sigmoid)


def test_topk_softmax_takes_a_bias_for_the_choice(route: Place, rng: np.random.Generator) -> None:
    logits, bias = draw(Case(64, 1, 1, 6, "softmax"), 20, rng)
    got = route("topk_softmax", logits, False, 0.0, bias, topk=6)
    assert_same_bits(got, route("moe_fused_gate", logits, bias, 1, 1, 6, renormalize=False, scoring_func="softmax"))


def test_a_softcap_leaves_the_order_of_the_logits(route: Place, rng: np.random.Generator) -> None:
    # So far above the cap, tanh of all these is 1 in float32.
    logits = rng.permuted(np.tile(np.arange(1000, 1040, dtype=np.float32), (5, 1)), axis=1)
    weights, ids = route("topk_softmax", logits, True, 5.0, topk=8)
    np.testing.assert_array_equal(ids, np.argsort(-logits)[:, :8])
    assert_matches("moe_gate.weights", weights, np.full((5, 8), 1 / 8, np.float32))


# --- the twin against a composition of torch operators --------------------------------------------------

_TORCH_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
}


def composed(case: Case, logits: Array, bias: Array) -> Routing:
    """The routing in float64, composed of torch's operators."""
    scores = _TORCH_SCORES[case.scoring](torch.from_numpy(logits.astype(np.float64)))
    choice = scores + torch.from_numpy(bias.astype(np.float64)) if case.biased else scores
    if case.groups > 1:
        by_group = choice.unflatten(1, (case.groups, -1))
        size = by_group.shape[2]
        group_scores = by_group.topk(min(2, size) if case.biased else 1, dim=-1).values.sum(dim=-1)
        best = group_scores.topk(case.topk_group, dim=-1).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
        choice = choice.masked_fill(dropped.repeat_interleave(size, dim=1), -INF)
    ids = choice.topk(case.topk - case.shared, dim=-1).indices
    weights = scores.gather(1, ids)
    total = weights.sum(dim=-1, keepdim=True)
    ids = torch.cat([ids, torch.arange(case.experts, case.experts + case.shared).expand(len(ids), -1)], dim=1)
    weights = torch.cat([weights, (total / case.scaling).expand(-1, case.shared)], dim=1)
    if case.renormalize:
        weights = weights / total
    if case.scale_output and (case.renormalize or case.biased):  # grouped_topk scales what it renormalizes
        weights = weights * case.scaling
    return weights.float().numpy(), ids.int().numpy()


COMPOSED = {
    "DeepSeek-V3": Case(256, 8, 4, 8, scaling=2.5, scale_output=True),
    "DeepSeek-V3 with a fused shared expert": Case(256, 8, 4, 9, shared=1, scaling=2.5),
    "DeepSeek-V2: the best of a group, no bias": Case(160, 8, 3, 6, "softmax", biased=False, scaling=16.0),
    "Kimi-K2": Case(384, topk=8, scaling=2.827, scale_output=True),
    "Qwen3-Next": Case(512, 1, 1, 10, "softmax", biased=False),
    "OLMoE: no division": Case(64, 1, 1, 8, "softmax", biased=False, renormalize=False),
    "Mixtral": Case(8, 1, 1, 2, "softmax", biased=False),
    "sqrtsoftplus": Case(256, 1, 1, 6, "sqrtsoftplus", scaling=1.5, scale_output=True),
    "softmax with a bias": Case(64, 1, 1, 6, "softmax", renormalize=False),
    "groups of odd size, two shared experts": Case(60, 12, 5, 9, shared=2, scaling=0.5),
    "groups of one expert": Case(24, 24, 7, 7),
    "one expert": Case(1, topk=1),
    "all experts": Case(40, topk=40),
}


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("case", COMPOSED.values(), ids=COMPOSED)
def test_the_twin_is_what_torch_computes(case: Case, dtype: str, rng: np.random.Generator) -> None:
    if not case.biased:
        # torch does not define the order of ties, so the logits of a row must differ after rounding.
        values = np.linspace(-4, 4, case.experts).astype(arrays.numpy_dtype(dtype))
        values = np.unique(values.astype(np.float32))
        case = replace(case, experts=len(values) // case.groups * case.groups)
        tile = np.tile(values[: case.experts], (101, 1))
        logits, bias = draw(case, 101, rng, dtype, sample=lambda count: rng.permuted(tile[:count], axis=1))
    else:
        logits, bias = draw(case, 101, rng, dtype)
    assert_routing(case.route(twin, logits, bias), composed(case, logits, bias))


@settings(max_examples=60)
@given(st.data())
def test_the_twin_is_what_torch_computes_for_any_sizes(data: st.DataObject) -> None:
    case = data.draw(cases(max_experts=80))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits, bias = draw(case, data.draw(st.integers(1, 9)), rng)
    assert_routing(case.route(twin, logits, bias), composed(case, logits, bias))


@st.composite
def cases(draw: st.DrawFn, max_experts: int) -> Case:
    """Any allowed sizes with at most 48 routed slots, so that `draw` finds certain rows."""
    experts = draw(st.integers(1, max_experts))
    groups = draw(st.sampled_from([g for g in range(1, experts + 1) if experts % g == 0]))
    topk_group = draw(st.integers(1, groups))
    shared = draw(st.integers(0, 2))
    return Case(
        experts,
        groups,
        topk_group,
        shared + draw(st.integers(1, min(topk_group * (experts // groups), 48))),
        draw(st.sampled_from(kernels.SCORING)),
        draw(st.booleans()),
        draw(st.booleans()),
        shared,
        draw(st.sampled_from([1.0, 2.5])),
        draw(st.booleans()),
    )


def test_topk_softmax_is_torchs_softmax_and_topk(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(50, 100)).astype(np.float32)
    out = np.full((50, 7), NAN, np.float32), np.full((50, 7), 12345, np.int32)
    got = cukern.topk_softmax(*out, logits, moe_softcapping=1.5)
    assert got[0] is out[0] and got[1] is out[1]
    weights, ids = torch.softmax(1.5 * torch.tanh(torch.from_numpy(logits) / 1.5), dim=-1).topk(7)
    assert_routing(out, (weights.numpy(), ids.int().numpy()))


# --- arrays of every library, in host memory ------------------------------------------------------------


class WithNamespace(OnlyDLPack):
    """An array of a library with the array API's `from_dlpack`, which takes results back."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: ("theirs", np.from_dlpack(array)))


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_cpu_tensors_go_through_the_twin(dtype: str, rng: np.random.Generator) -> None:
    logits = torch.from_numpy(rng.normal(size=(20, 256)).astype(np.float32)).to(getattr(torch, dtype))
    bias = torch.from_numpy(rng.normal(size=256).astype(np.float32))
    want = twin.moe_fused_gate(logits.float().numpy(), bias.numpy(), 8, 4, 8)
    weights, ids = cukern.moe_fused_gate(logits, bias, 8, 4, 8)
    assert (type(weights), weights.dtype, type(ids), ids.dtype) == (
        torch.Tensor,
        torch.float32,
        torch.Tensor,
        torch.int32,
    )
    assert_same_bits((weights.numpy(), ids.numpy()), want)
    # The bias in the input's dtype, a count, and tensors to write into.
    out = torch.full((20, 8), NAN), torch.full((20, 8), 12345, dtype=torch.int32)
    count = torch.tensor([7])
    returned = cukern.moe_fused_gate(logits, bias.to(logits.dtype), 8, 4, 8, num_token_non_padded=count, out=out)
    assert returned[0] is out[0] and returned[1] is out[1]
    rounded = bias.to(logits.dtype).float().numpy()
    want = twin.moe_fused_gate(logits.float().numpy(), rounded, 8, 4, 8, num_token_non_padded=7)
    assert_same_bits((out[0].numpy(), out[1].numpy()), want)


def test_numpy_bfloat16_is_that_of_ml_dtypes(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(9, 256)).astype(arrays.numpy_dtype("bfloat16"))
    weights, ids = cukern.grouped_topk(None, logits, 8, True)
    assert (type(weights), weights.dtype, ids.dtype) == (np.ndarray, np.float32, np.int32)
    assert_same_bits((weights, ids), cukern.grouped_topk(None, logits.astype(np.float32), 8, True))


def test_foreign_arrays_enter_by_dlpack(rng: np.random.Generator) -> None:
    logits, bias = rng.normal(size=(9, 256)).astype(np.float32), rng.normal(size=256).astype(np.float32)
    want = cukern.moe_fused_gate(logits, bias, 8, 4, 8, num_token_non_padded=5)
    for one in (OnlyDLPack(logits), OnlyDLPack(torch.from_numpy(logits))):
        for other in (OnlyDLPack(bias), bias):
            for count in (5, OnlyDLPack(np.array([5]))):
                assert_same_bits(cukern.moe_fused_gate(one, other, 8, 4, 8, num_token_non_padded=count), want)
    results = cukern.moe_fused_gate(WithNamespace(logits), bias, 8, 4, 8, num_token_non_padded=5)
    assert [result[0] for result in results] == ["theirs", "theirs"]
    assert_same_bits((results[0][1], results[1][1]), want)
    out = np.full((9, 8), NAN, np.float32), np.full((9, 8), 12345, np.int32)
    foreign = OnlyDLPack(out[0]), OnlyDLPack(out[1])
    assert cukern.moe_fused_gate(OnlyDLPack(logits), bias, 8, 4, 8, num_token_non_padded=5, out=foreign) == foreign
    assert_same_bits(out, want)


def test_out_is_written_and_returned(rng: np.random.Generator) -> None:
    logits = rng.normal(size=(9, 256)).astype(np.float32)
    weights, ids = np.full((9, 8), NAN, np.float32), np.full((9, 8), 12345, np.int32)
    returned = cukern.grouped_topk(None, logits, 8, True, out=(weights, ids))
    assert returned[0] is weights and returned[1] is ids
    assert_same_bits((weights, ids), cukern.grouped_topk(None, logits, 8, True))


def test_the_input_is_left_alone(route_model: Place, rng: np.random.Generator) -> None:
    logits = rng.normal(size=(9, 256)).astype(np.float32)
    before = logits.copy()
    deepseek(route_model, logits)
    np.testing.assert_array_equal(logits, before)


def test_a_token_depends_on_its_own_row_alone(route_model: Place, rng: np.random.Generator) -> None:
    # By the number of tokens, other kernels take a call.
    logits, bias = rng.normal(0, 1.5, (600, 256)).astype(np.float32), rng.normal(0, 0.2, 256).astype(np.float32)
    want = deepseek(route_model, logits, bias)
    order = rng.permutation(600)
    for chosen in (order, order[:1], order[:7], order[:64], np.repeat(order[:3], 200)):
        got = deepseek(route_model, logits[chosen], bias)
        assert_same_bits(got, (want[0][chosen], want[1][chosen]))


# --- bad arguments --------------------------------------------------------------------------------------

LOGITS = dict.fromkeys(FUNCTIONS, "gating_output") | {"moe_fused_gate": "input"}
BIAS = dict.fromkeys(set(FUNCTIONS) - {"grouped_topk"}, "correction_bias") | {"moe_fused_gate": "bias"}


def good_arguments(name: str) -> dict[str, Any]:
    """Arguments that `name` takes, by keyword, so that the names are tested as well."""
    logits, bias = np.zeros((5, 256), np.float32), np.zeros(256, np.float32)
    out = np.full((5, 8), POISON["float32"], np.float32), np.full((5, 8), POISON["int32"], np.int32)
    if not name.startswith("topk_"):
        arguments = {"num_expert_group": 8, "topk_group": 4, "topk": 8, "out": out}
        if name != "moe_fused_gate":
            arguments |= {"hidden_states": None, "renormalize": True}
    else:
        arguments = {"topk_weights": out[0], "topk_ids": out[1]}
    arguments[LOGITS[name]] = logits
    if name in BIAS:
        arguments[BIAS[name]] = bias
    return arguments


#: The functions that take a bias.
BIASED = tuple(name for name in FUNCTIONS if name in BIAS)
#: The functions that write into arguments.
WRITING = tuple(name for name in FUNCTIONS if name.startswith("topk_"))


def bad(
    names: str | tuple[str, ...], changes: dict[str, Any], error: type[Exception], message: str, what: str
) -> Iterator[Any]:
    """Calls of these functions with changed arguments, their error and its message.

    LOGITS and BIAS stand for the names that these arguments have in each function.
    """
    for name in (names,) if isinstance(names, str) else names:
        own = {{"LOGITS": LOGITS[name], "BIAS": BIAS.get(name)}.get(k, k): v for k, v in changes.items()}
        text = message.replace("LOGITS", LOGITS[name]).replace("BIAS", BIAS.get(name, ""))
        yield pytest.param(name, own, error, text, id=f"{name}: {what}")


def _bad_logits() -> Iterator[Any]:
    def logits(value: Any, error: type[Exception], message: str, what: str) -> Iterator[Any]:
        yield from bad(FUNCTIONS, {"LOGITS": value}, error, f"LOGITS must be {message}", what)

    anything = "an array (NumPy, CuPy, torch, or any with __dlpack__)"
    dtypes = "float32 or float16 or bfloat16"
    yield from logits(zeros(5, 256, dtype=np.float64), TypeError, f"{dtypes}, got float64", "logits float64")
    yield from logits(zeros(5, 256, dtype=np.int32), TypeError, f"{dtypes}, got int32", "logits int32")
    yield from logits(zeros(256), ValueError, "of shape [tokens, experts], got [256]", "logits of one dimension")
    yield from logits(zeros(1, 5, 256), ValueError, "of shape [tokens, experts], got [1, 5, 256]", "logits of three")
    contiguous = "contiguous along its last dimension, got strides"
    yield from logits(zeros(256, 5).T, ValueError, f"{contiguous} (1, 5) (in elements)", "logits transposed")
    yield from logits(zeros(5, 512)[:, ::2], ValueError, f"{contiguous} (512, 2) (in elements)", "every second logit")
    many = np.broadcast_to(zeros(1, 256), (2**30 + 1, 256))
    yield from logits(many, ValueError, "of at most 1073741824 tokens, got 1073741825", "too many logits")
    for nothing in ([[1.0, 2.0]], 3, "logits"):
        yield from bad(
            GROUPED,
            {"LOGITS": nothing, "out": None},
            TypeError,
            f"LOGITS must be {anything}, got {type(nothing).__name__}",
            f"logits a {type(nothing).__name__}",
        )
    for experts in (0, 1025):
        message = f"LOGITS must be of 1 to 1024 experts, got {experts}"
        changes = {"LOGITS": zeros(5, experts), "BIAS": zeros(experts)}
        yield from bad(BIASED, changes, ValueError, message, f"{experts} experts")
        yield from bad("grouped_topk", {"LOGITS": zeros(5, experts)}, ValueError, message, f"{experts} experts")


def _bad_sizes() -> Iterator[Any]:
    for name, low in (("num_expert_group", 1), ("topk_group", 1), ("topk", 1), ("num_fused_shared_experts", 0)):
        for value in (2.0, True, "2", np.float32(2)):
            message = f"{name} must be an integer of at least {low}, got {value!r} ({type(value).__name__})"
            yield from bad(GROUPED, {name: value}, TypeError, message, f"{name} {value!r}")
    yield from bad(
        "moe_fused_gate", {"topk": None}, TypeError, "topk must be an integer of at least 1, got None", "topk None"
    )
    for value, message in (
        (0, "an integer in [1, 256], got 0"),
        (-8, "an integer in [1, 256], got -8"),
        (257, "an integer in [1, 256], got 257"),
        (7, "a divisor of the 256 experts, got 7"),
    ):
        changes = {"num_expert_group": value}
        yield from bad(GROUPED, changes, ValueError, f"num_expert_group must be {message}", f"{value} groups")
    for value in (0, 9):
        message = f"topk_group must be an integer in [1, 8] (num_expert_group), got {value}"
        yield from bad(GROUPED, {"topk_group": value}, ValueError, message, f"{value} kept groups")
    why = "(the experts of the kept groups, at most 512, plus shared ones)"
    for changes, span, value in (
        ({"topk": 0}, "[1, 128]", 0),
        ({"topk": 129}, "[1, 128]", 129),
        ({"topk": 33, "topk_group": 1}, "[1, 32]", 33),
        ({"topk": 2, "num_fused_shared_experts": 2}, "[3, 130]", 2),
        ({"topk": 131, "num_fused_shared_experts": 2}, "[3, 130]", 131),
    ):
        message = f"topk must be an integer in {span} {why}, got {value}"
        yield from bad(GROUPED, changes, ValueError, message, f"topk {changes}")
    changes = {"LOGITS": zeros(5, 1024), "BIAS": zeros(1024), "topk": 513, "topk_group": 8}
    message = f"topk must be an integer in [1, 512] {why}, got 513"
    yield from bad(("moe_fused_gate", "biased_grouped_topk"), changes, ValueError, message, "topk 513")
    message = "num_fused_shared_experts must be an integer of at least 0, got -1"
    yield from bad(GROUPED, {"num_fused_shared_experts": -1}, ValueError, message, "-1 shared experts")


def _bad_numbers_and_names() -> Iterator[Any]:
    for value in ("x", [2.5]):
        message = f"routed_scaling_factor must be a number, got {value!r} ({type(value).__name__})"
        yield from bad(GROUPED, {"routed_scaling_factor": value}, TypeError, message, f"scaling {value!r}")
    message = "routed_scaling_factor must be a number, got None (NoneType)"
    yield from bad("moe_fused_gate", {"routed_scaling_factor": None}, TypeError, message, "scaling None")
    for value in (NAN, INF):
        message = f"routed_scaling_factor must be a finite number, got {value}"
        yield from bad(GROUPED, {"routed_scaling_factor": value}, ValueError, message, f"scaling {value}")
    changes = {"routed_scaling_factor": 0, "num_fused_shared_experts": 1}
    message = "routed_scaling_factor must be nonzero with fused shared experts, got 0.0"
    yield from bad(GROUPED, changes, ValueError, message, "shared experts scaled by 0")
    message = "moe_softcapping must be a number, got 'x' (str)"
    yield from bad("topk_softmax", {"moe_softcapping": "x"}, TypeError, message, "softcap 'x'")
    message = "moe_softcapping must be a finite number, got inf"
    yield from bad("topk_softmax", {"moe_softcapping": INF}, ValueError, message, "softcap inf")
    message = "scoring_func must be one of 'sigmoid', 'softmax', 'sqrtsoftplus', got 'tanh'"
    yield from bad(GROUPED, {"scoring_func": "tanh"}, ValueError, message, "scoring tanh")
    message = "variant must be one of 'auto', 'specialized', 'dynamic', got 'fast'"
    yield from bad(FUNCTIONS, {"variant": "fast"}, ValueError, message, "variant fast")
    for variant in ("specialized", "dynamic"):
        message = f"variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got '{variant}'"
        yield from bad(FUNCTIONS, {"variant": variant}, ValueError, message, f"variant {variant} in host memory")


def _bad_biases() -> Iterator[Any]:
    for value, error, message, what in (
        (zeros(256, dtype=np.int32), TypeError, "float32 or float16 or bfloat16 or float64, got int32", "of integers"),
        (zeros(255), ValueError, "of shape [experts] = [256], got [255]", "too short"),
        (zeros(1, 256), ValueError, "of shape [experts] = [256], got [1, 256]", "of two dimensions"),
        (zeros(512)[::2], ValueError, "contiguous, got strides (2,) (in elements)", "strided"),
        (torch.zeros(256), TypeError, "a NumPy array like LOGITS, got torch.Tensor", "of another library"),
        ([0.0] * 256, TypeError, "a NumPy array like LOGITS, got builtins.list", "a list"),
    ):
        yield from bad(BIASED, {"BIAS": value}, error, f"BIAS must be {message}", f"bias {what}")
    for name in ("moe_fused_gate", "biased_grouped_topk"):
        yield from bad(name, {"BIAS": None}, TypeError, "BIAS must be an array [experts], got None", "no bias")


def _bad_counts_of_tokens() -> Iterator[Any]:
    for value, error, message in (
        (-1, ValueError, "an integer in [0, 5] (tokens), got -1"),
        (6, ValueError, "an integer in [0, 5] (tokens), got 6"),
        (2.0, TypeError, "an integer in [0, 5] (tokens), got 2.0 (float)"),
        (np.zeros(1, np.int16), TypeError, "int32 or int64, got int16"),
        (np.zeros(1, np.float32), TypeError, "int32 or int64, got float32"),
        (np.zeros(2, np.int32), ValueError, "of shape [1] = [1], got [2]"),
        (torch.tensor([3]), TypeError, "a NumPy array like LOGITS, got torch.Tensor"),
    ):
        what = f"count {value!r}"
        changes = {"num_token_non_padded": value}
        yield from bad(FUNCTIONS, changes, error, f"num_token_non_padded must be {message}", what)


def _bad_results() -> Iterator[Any]:
    results = {
        "weights": [
            (zeros(5, 8, dtype=np.float64), TypeError, "float32, got float64", "float64"),
            (zeros(4, 8), ValueError, "of shape [tokens, topk] = [5, 8], got [4, 8]", "too short"),
            (zeros(8, 5).T, ValueError, "contiguous, got strides (1, 5) (in elements)", "transposed"),
            (torch.zeros(5, 8), TypeError, "a NumPy array like LOGITS, got torch.Tensor", "of another library"),
        ],
        "ids": [
            (zeros(5, 8, dtype=np.int64), TypeError, "int32, got int64", "int64"),
            (zeros(4, 8, dtype=np.int32), ValueError, "of shape [tokens, topk] = [5, 8], got [4, 8]", "too short"),
            (zeros(8, 5, dtype=np.int32).T, ValueError, "contiguous, got strides (1, 5) (in elements)", "transposed"),
        ],
    }
    out = good_arguments("moe_fused_gate")["out"]
    for index, (result, values) in enumerate(results.items()):
        for value, error, message, what in values:
            pair = (out[0], value) if index else (value, out[1])
            name = f"out[{index}]"
            yield from bad(GROUPED, {"out": pair}, error, f"{name} must be {message}", f"{name} {what}")
            name = f"topk_{result}"
            yield from bad(WRITING, {name: value}, error, f"{name} must be {message}", f"{name} {what}")
    for value in (out[0], (out[0],), 3):
        message = f"out must be a pair (weights, ids), got {type(value).__name__}"
        yield from bad(GROUPED, {"out": value}, TypeError, message, f"out a {type(value).__name__}")
    for value in (None, zeros(8, dtype=np.int32)):
        message = "topk_ids must be an int32 array [tokens, topk], got"
        yield from bad(WRITING, {"topk_ids": value}, TypeError, message, f"topk_ids {type(value).__name__}")
    foreign = {"LOGITS": OnlyDLPack(zeros(5, 256)), "out": 7}
    yield from bad(GROUPED, foreign, TypeError, "out must be a pair (weights, ids), got int", "no pair")


def _bad_hidden_states() -> Iterator[Any]:
    message = "hidden_states must be of 5 tokens like gating_output, got 4"
    changes = {"hidden_states": zeros(4, 7)}
    yield from bad(("biased_grouped_topk", "grouped_topk"), changes, ValueError, message, "hidden states of 4 tokens")


BAD_CALLS = [
    *_bad_logits(), *_bad_sizes(), *_bad_numbers_and_names(), *_bad_biases(), *_bad_counts_of_tokens(), *_bad_results(),
    *_bad_hidden_states(),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "error", "message"), BAD_CALLS)
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = good_arguments(name)
    results = arguments.get("out") or (arguments["topk_weights"], arguments["topk_ids"])
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)
    # Nothing is written before all has been checked.
    assert np.isnan(results[0]).all()
    assert (results[1] == POISON["int32"]).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_good_arguments_are_taken(name: str) -> None:
    weights, ids = getattr(cukern, name)(**good_arguments(name))
    assert ids.tolist() == [list(range(8))] * 5
    assert not np.isnan(weights).any()


def test_numpy_integers_are_taken() -> None:
    arguments = good_arguments("moe_fused_gate")
    arguments |= {name: np.int64(arguments[name]) for name in ("num_expert_group", "topk_group", "topk")}
    arguments |= {"num_fused_shared_experts": np.int32(1), "num_token_non_padded": np.int64(3)}
    _, ids = cukern.moe_fused_gate(**arguments)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 256]] * 3 + [[-1] * 8] * 2


def test_tensors_on_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="on a CUDA device or the CPU, got one on meta"):
        cukern.grouped_topk(None, torch.zeros(5, 256, device="meta"), 8, True)


# --- the choice of a variant ----------------------------------------------------------------------------


class Model(NamedTuple):
    why: str
    topk_group: int
    topk: int


#: For each of SPECIALIZED, the model or the reason, and how many groups and experts that model chooses.
MODELS = {
    (256, 8, "sigmoid", True): Model("DeepSeek-V3", 4, 8),
    (256, 16, "sigmoid", True): Model("a group for each lane", 8, 8),
    (128, 4, "sigmoid", True): Model("groups of four lanes", 2, 8),
    (128, 8, "sigmoid", True): Model("groups of two lanes", 4, 8),
    (384, 1, "sigmoid", True): Model("Kimi-K2", 1, 8),
    (256, 1, "sigmoid", True): Model("MiniMax-M2", 1, 8),
    (160, 1, "sigmoid", True): Model("GLM-4.5", 1, 8),
    (128, 1, "sigmoid", True): Model("GLM-4.5-Air", 1, 8),
    (512, 1, "any", False): Model("Qwen3-Next", 1, 10),
    (256, 1, "any", False): Model("256 experts by the softmax", 1, 8),
    (128, 1, "any", False): Model("Qwen3 and Llama-4", 1, 8),
    (64, 1, "any", False): Model("OLMoE", 1, 8),
    (32, 1, "any", False): Model("gpt-oss-20b", 1, 4),
    (8, 1, "any", False): Model("Mixtral", 1, 2),
}


def test_each_specialized_configuration_is_tested() -> None:
    assert sorted(MODELS) == sorted(config[:4] for config in kernels.SPECIALIZED)
    at_import = {
        instance for kernel in (kernels._kernel, kernels._by_warp, kernels._by_thread) for instance in kernel.at_import
    }
    assert set(kernels._kernel.specialized) < set(kernels._kernel.at_import)
    for (experts, groups, scoring, biased), (_, topk_group, topk) in MODELS.items():
        for dtype in kernels.DTYPES:
            case = Case(experts, groups, topk_group, topk, "softmax" if scoring == "any" else scoring, biased)
            assert variants_of(case, dtype)
            used = [*variants_of(case, dtype), choices(case, dtype).dynamic.variant]
            assert {variant.instance for variant in used} <= at_import


def choices(case: Case, dtype: str = "float32", softcap: bool = False, bias_dtype: str = "float32") -> Any:
    sizes = (case.groups, case.topk_group, case.topk, case.shared)
    return kernels.choose(dtype, case.experts, sizes, case.scoring, bias_dtype if case.biased else None, softcap)


def forms_of(case: Case, dtype: str = "float32") -> list[str | int]:
    """All kernels for a case, as `forced` takes them."""
    return [*range(len(choices(case, dtype).specialized)), "dynamic"]


def variants_of(case: Case, dtype: str = "float32") -> list[Any]:
    return [kernel.variant for kernel in choices(case, dtype).specialized]


def test_the_variant_follows_from_the_sizes() -> None:
    deepseek = Case(256, 8, 4, 8)
    assert variants_of(deepseek)
    assert variants_of(Case(256, 8, 3, 5)) == variants_of(deepseek)
    assert not set(variants_of(deepseek, "bfloat16")) & set(variants_of(deepseek))
    without = Case(256, topk=8, biased=False)
    assert variants_of(without) == variants_of(replace(without, scoring="softmax")) != []
    for other in (Case(256, 4, 2, 8), Case(255, topk=8), Case(256, 8, 4, 8, "softmax"), Case(256, 8, 4, 33)):
        assert forms_of(other) == ["dynamic"]
    assert not choices(without, softcap=True).specialized
    # A bias of another float dtype has the same kernels in instances of their own.
    for dtype, bias_dtype in itertools.product(kernels.DTYPES, kernels.BIAS_DTYPES):
        found, usual = (choices(deepseek, dtype, bias_dtype=x) for x in (bias_dtype, "float32"))
        same = bias_dtype in ("float32", dtype)
        for one, other in zip((found.dynamic, *found.specialized), (usual.dynamic, *usual.specialized), strict=True):
            assert (one.variant is other.variant) == same and one[1:] == other[1:]
            shared = len(other.variant.instance.arguments)
            assert one.variant.instance.arguments[:shared] == other.variant.instance.arguments
    # The dynamic variant that is chosen holds all experts.
    for experts in range(1, kernels.MAX_EXPERTS + 1):
        *_, lanes, values, _ = choices(Case(experts, topk=1)).dynamic.variant.instance.arguments
        assert lanes * values >= experts


def test_the_kernel_of_few_tokens_follows_from_the_slots() -> None:
    def first(case: Case) -> Any:
        return choices(case).specialized[0].variant.instance

    for topk, function in ((12, "gate_by_warp"), (13, "moe_gate")):
        assert first(Case(256, topk=topk)).function == function
    # A shared expert's slot is no other step.
    assert first(Case(256, topk=13, shared=1)).function == "gate_by_warp"
    assert first(Case(256, topk=13)).arguments[4] == 32
    for scoring, own in (("softmax", "SOFTMAX"), ("sigmoid", "ANY"), ("sqrtsoftplus", "ANY")):
        (chosen,) = choices(Case(8, topk=2, scoring=scoring, biased=False)).specialized
        instance = chosen.variant.instance
        assert (chosen.max_tokens, chosen.threads) == (kernels.MAX_TOKENS, 128)
        assert (instance.function, instance.arguments) == ("gate_by_thread", ("float", 8, own))


def test_the_dynamic_kernel_hands_choices_on_where_lanes_are_full_and_groups_whole_lanes() -> None:
    by_lanes = [Case(256, 8, 4, 8), Case(256, 16, 9, 8), Case(256, 4, 2, 8), Case(256, 2, 1, 16)]
    others = [Case(256, 1, 1, 8), Case(252, 4, 2, 8), Case(160, 8, 3, 6), Case(240, 8, 3, 6), Case(16, 16, 9, 8)]
    others += [Case(256, 32, 8, 8), Case(512, 8, 4, 8), Case(256, 8, 4, 17)]
    for case in by_lanes + others:
        chosen = choices(case).dynamic
        assert (chosen.variant.instance.arguments[2] == "LANE_ALIGNED") == (case in by_lanes), case
        if case in by_lanes:
            assert case.groups << chosen.fields["log2_lanes_per_group"] == chosen.lanes == 16


def launches_of(logits: Array, bias: Array, **options: Any) -> Any:
    """The launches of a DeepSeek-V3 layer on an H200."""
    return plan_of("moe_fused_gate", logits, bias, 8, 4, 8, **options)[0].steps


def rows_apart(tokens: int, stride: int = 1024, skip: int = 0) -> Array:
    """Logits of 256 experts, any number of tokens in little memory, `skip` bytes from an aligned address."""
    whole = zeros(2048)
    start = (-whole.ctypes.data % 16 + skip) // 4
    return np.lib.stride_tricks.as_strided(whole[start:], (tokens, 256), (stride, 4))


def test_the_lanes_follow_from_the_tokens() -> None:
    bias = rows_apart(1)[0]
    counts = (1, 64, 512, 513, 4096, 4097, 16384, 16385, kernels.MAX_TOKENS)
    for tokens, lanes in zip(counts, (0, 0, 0, 32, 32, 16, 16, 8, 8), strict=True):
        (launched,) = launches_of(rows_apart(tokens), bias)
        instance = launched.variant.instance
        assert (instance.function, lanes) == ("gate_by_warp", 0) or instance.arguments[4] == lanes
        assert launched.grid == (-(-tokens * (lanes or 32) // 64), 1, 1)
    assert not launches_of(rows_apart(0), bias)


def test_a_kernel_of_wide_loads_takes_aligned_rows() -> None:
    logits, bias = rows_apart(3), rows_apart(1)[0]
    for own_logits, own_bias, experts in (
        (logits, bias, 256),
        (rows_apart(1, 1028), bias, 256),  # one row is aligned whatever its stride
        (rows_apart(3, 1028), bias, 0),
        (rows_apart(3, skip=4), bias, 0),
        (logits, rows_apart(1, skip=4)[0], 0),
    ):
        (launched,) = launches_of(own_logits, own_bias)
        assert launched.variant.instance.arguments[1] == experts


def test_every_call_is_checked(pretended: PretendedGPU) -> None:  # noqa: F811
    logits, bias = torch.zeros(9, 256), torch.zeros(256)
    good = {"num_token_non_padded": 5, "routed_scaling_factor": 2.5, "renormalize": True, "scoring_func": "sigmoid"}
    kernels.choose.cache_clear()
    for valid in (5, 9, 0, 7):
        cukern.moe_fused_gate(logits, bias, 8, 4, 8, **good | {"num_token_non_padded": valid})
    assert [launched.fields["valid"] for launched in pretended.launches] == [5, 9, 0, 7]
    assert sum(kernels.choose.cache_info()[:2]) == 2  # a plan is kept from the second call on
    for name, value, message in (
        ("num_token_non_padded", 10, "num_token_non_padded must be an integer in [0, 9] (tokens), got 10"),
        ("routed_scaling_factor", INF, "routed_scaling_factor must be a finite number, got inf"),
        ("renormalize", 2, "renormalize must be one of False, True, got 2"),
        ("scoring_func", ["sigmoid"], "scoring_func must be one of 'sigmoid', 'softmax', 'sqrtsoftplus', got"),
        ("num_fused_shared_experts", 8, "topk must be an integer in [9, 136]"),
        ("bias", bias[:255], "bias must be of shape [experts] = [256], got [255]"),
    ):
        arguments = {"input": logits, "bias": bias, "num_expert_group": 8, "topk_group": 4, "topk": 8, **good}
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            cukern.moe_fused_gate(**arguments | {name: value})
    # A number that equals an integer is refused all the same.
    with pytest.raises(TypeError, match=re.escape("topk must be an integer of at least 1, got 8.0 (float)")):
        cukern.moe_fused_gate(logits, bias, 8, 4, 8.0)
    assert len(pretended.launches) == 4


def test_an_array_for_a_number_is_refused(pretended: PretendedGPU) -> None:  # noqa: F811
    logits, bias = torch.zeros(9, 256), torch.zeros(256)
    with pytest.raises(TypeError, match=r"^routed_scaling_factor must be a number, got an array \(Tensor\)"):
        cukern.moe_fused_gate(logits, bias, 8, 4, 8, 0, torch.tensor(2.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^topk must be an integer of at least 1, got an array \(Tensor\)"):
        cukern.moe_fused_gate(logits, bias, 8, 4, torch.tensor(8))  # type: ignore[arg-type]
    assert not pretended.launches


@pytest.mark.parametrize(
    ("form", "experts", "biased", "function"),
    [
        ("dynamic", 256, True, "moe_gate"),
        ("auto", 256, False, "gate_by_warp"),
        ("dynamic", 8, False, "moe_gate"),
        ("auto", 8, False, "gate_by_thread"),
    ],
)
def test_the_fields_of_a_launch(
    form: str,
    experts: int,
    biased: bool,
    function: str,
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    x, bias = torch.zeros(9, 512)[:, :experts], torch.zeros(experts) if biased else None
    out, count = (torch.zeros(9, 3), torch.zeros(9, 3, dtype=torch.int32)), torch.tensor([7])
    options = {"num_token_non_padded": count, "out": out, "variant": form, "scoring_func": "softmax"}
    scaling = (1, 2.5, True)
    if bias is None:
        cukern.grouped_topk(None, x, 3, True, 1, 1, *scaling, **options)
    else:
        cukern.moe_fused_gate(x, bias, 1, 1, 3, *scaling, **options)
    (launched,) = pretended.launches
    want = {
        "logits": x.data_ptr(), "bias": 0 if bias is None else bias.data_ptr(), "weights": out[0].data_ptr(),
        "ids": out[1].data_ptr(), "valid_on_device": count.data_ptr(), "row_stride": 512, "tokens": 9, "valid": 9,
        "experts": experts, "groups": 1, "topk_group": 1, "topk": 2, "shared": 1,
        "scoring": kernels.of_template("SOFTMAX"), "group_by_two": int(biased), "renormalize": 1,
        "bias_is_float": int(biased), "valid_is_int64": 1,
        "shared_scale": np.float32(0.4), "output_scale": 2.5, "softcap": 0,
    }  # fmt: skip
    own = {name: value for name, value in launched.fields.items() if name in want}
    assert own == {name: value for name, value in want.items() if name in own}
    assert {*launched.fields} - {*want} <= {"capacity", "group_size", "log2_lanes_per_group", "group_magic"}
    assert launched.variant.instance.function == function


def _all_sizes() -> Iterator[tuple[int, int]]:
    for experts in range(1, kernels.MAX_EXPERTS + 1):
        for groups in range(1, experts + 1):
            if experts % groups == 0:
                yield experts, groups


@pytest.fixture
def own_configurations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the specialized configurations after a test that adds some."""
    monkeypatch.setattr(kernels, "registered", set(kernels.registered))
    yield
    kernels.choose.cache_clear()
    forget()


def test_no_variant_asks_for_more_shared_memory_than_it_may_have(own_configurations: None) -> None:
    # Dynamic shared memory of a block without the driver's attribute, and the most with it on every GPU.
    granted, most = 48 * 1024, 99 * 1024
    for experts, groups in _all_sizes():
        case = Case(experts, groups, groups, min(experts, kernels.MAX_TOPK))
        taken = choices(case).dynamic
        assert taken.shared_bytes <= taken.variant.max_shared_bytes <= most, case
        with contextlib.suppress(ValueError):
            op.specialize(experts=experts, groups=groups)
        for dtype in kernels.DTYPES:
            for taken in choices(replace(case, topk=1), dtype).specialized:
                assert taken.shared_bytes <= max(granted, taken.variant.max_shared_bytes), case


def test_specialize_lays_the_experts_out(own_configurations: None) -> None:
    accepted = 0
    for experts, groups in _all_sizes():
        try:
            made = op.specialize(experts=experts, groups=groups)
        except ValueError:
            # No number of lanes has whole groups and at most 32 experts per lane.
            assert not any(experts % n == 0 and n % groups == 0 and experts <= 32 * n for n in (4, 8, 16, 32))
            continue
        accepted += 1
        assert {instance.arguments[0] for instance in made} == {arrays.CUDA_TYPE[dtype] for dtype in kernels.DTYPES}
        for instance in made:
            assert instance.arguments[1:3] == (experts, groups)
            if instance.function == "gate_by_warp":
                assert experts % 32 == 0 and 32 % groups == 0 and experts <= 1024
                continue
            lanes, values = instance.arguments[4:6]
            assert lanes * values == experts
            assert lanes % groups == 0
            assert values <= 32
    assert accepted > 100


@pytest.mark.parametrize(
    "sizes",
    [
        {"experts": 96, "groups": 4},
        {"experts": 1024, "groups": 32},  # the most of everything
        {"experts": 72, "groups": 8, "scoring_func": "sqrtsoftplus"},  # nine experts in each lane: single loads
        {"experts": 4},  # a lane for each
        {"experts": 32, "groups": 32},  # likewise, and a group
        {"experts": 100, "biased": False},
    ],
    ids=str,
)
def test_specialize_adds_a_variant(sizes: dict[str, Any], own_configurations: None) -> None:
    scoring, biased = sizes.get("scoring_func", "sigmoid"), sizes.get("biased", True)
    case = Case(sizes["experts"], sizes.get("groups", 1), 1, 1, scoring, biased)
    assert forms_of(case) == ["dynamic"]
    cukern.specialize("moe_fused_gate", **sizes)
    made = [variant for dtype in kernels.DTYPES for variant in variants_of(case, dtype)]
    assert {variant.instance.arguments[0] for variant in made} == {arrays.CUDA_TYPE[dtype] for dtype in kernels.DTYPES}
    compiler.compile_all([(variant.instance, "90a") for variant in made])
    cukern.specialize(cukern.topk_sigmoid, **sizes)  # again, by the function: the same
    assert [variant for dtype in kernels.DTYPES for variant in variants_of(case, dtype)] == made


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"experts": 96, "groups": 3}, ValueError, "experts and groups must be sizes where a group is whole lanes"),
        ({"experts": 1025}, ValueError, "experts must be an integer in [1, 1024], got 1025"),
        ({"experts": 0}, ValueError, "experts must be an integer in [1, 1024], got 0"),
        ({"experts": 96.0}, TypeError, "experts must be an integer in [1, 1024], got 96.0 (float)"),
        ({"experts": 96, "groups": 97}, ValueError, "groups must be an integer in [1, 96], got 97"),
        ({"experts": 96, "scoring_func": "any"}, ValueError, "scoring_func must be one of 'sigmoid', 'softmax'"),
        ({"experts": 96, "topk": 8}, TypeError, "unexpected keyword argument 'topk'"),
        ({}, TypeError, "experts"),
    ],
)
def test_specialize_refuses(sizes: dict[str, Any], error: type[Exception], message: str) -> None:
    before = set(kernels.registered)
    with pytest.raises(error, match=re.escape(message)):
        cukern.specialize("moe_fused_gate", **sizes)
    assert kernels.registered == before


# --- the kernel against the twin ------------------------------------------------------------------------

GUARD = 64


class Results:
    """Poisoned arrays to write into, each between guard words that must not change."""

    def __init__(self, tokens: int, topk: int, skip: int = 0) -> None:
        self._shape = tokens, topk
        self._from = GUARD + skip
        self._to = self._from + tokens * topk
        self._buffers = [cupy.asarray(np.full(self._to + GUARD, poison, dtype)) for dtype, poison in POISON.items()]
        self.out = tuple(buffer[self._from : self._to].reshape(self._shape) for buffer in self._buffers)

    def numpy(self) -> Routing:
        """The results, after a check of the guard words."""
        results = []
        for buffer, poison in zip(self._buffers, POISON.values(), strict=True):
            words = cupy.asnumpy(buffer)
            around = np.concatenate([words[: self._from], words[self._to :]])
            np.testing.assert_array_equal(around, np.full_like(around, poison), "written outside of the results")
            results.append(words[self._from : self._to].reshape(self._shape))
        return results[0], results[1]


def launch(case: Case, logits: Any, bias: Any, form: str | int = "auto", **options: Any) -> Routing:
    """Route on the GPU into poisoned arrays."""
    results = Results(len(logits), case.topk)
    options = {key: on_gpu(value) for key, value in options.items()}
    with forced(form) as variant:
        returned = case.route(cukern, on_gpu(logits), on_gpu(bias), out=results.out, variant=variant, **options)
    assert returned[0] is results.out[0] and returned[1] is results.out[1]
    return results.numpy()


def compare(case: Case, logits: Array, bias: Array, **options: Any) -> Routing:
    """Assert that every kernel matches the twin, and that all kernels return the same bits."""
    got = launch(case, logits, bias, **options)
    assert_routing(got, case.route(twin, logits, bias, **options))
    for form in forms_of(case):
        assert_same_bits(launch(case, logits, bias, form, **options), got)
    return got


def model_cases(config: kernels.Config) -> Iterator[Case]:
    """Uses of a specialized configuration that take each path through the kernel, with each scoring."""
    experts, groups, fixed, biased = config[:4]
    _, topk_group, topk = MODELS[config[:4]]
    capacity = template.constants(kernels._kernel.file)["CAPACITY"]
    ways = {
        (topk_group, topk): "as the model does",
        (1, 1): "the least",
        (topk_group, capacity): "the longest list",
        (groups, capacity + 1): "too long a list, so dynamic",
        (topk_group, 2 * topk_group + 1): "more than the kept groups' second best vouch for",
        (topk_group, 8): "a choice of every lane, if there are 8",
        (topk_group, 9): "more than there are lanes then",
        (topk_group, 16): "a choice of every lane, if there are 16",
        (topk_group, 17): "more than there are lanes then",
    }
    for scoring in kernels.SCORING if fixed == "any" else [fixed]:
        for index, (topk_group, topk) in enumerate(ways):
            if topk <= min(topk_group * experts // groups, 32):
                # Both values of each flag, in turn.
                yield Case(experts, groups, topk_group, topk, scoring, biased, renormalize=index % 2 == 0)
        yield Case(experts, groups, groups, 3, scoring, biased, shared=1, scaling=2.5, scale_output=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("config", kernels.SPECIALIZED, ids=lambda config: MODELS[config[:4]].why)
def test_models(config: kernels.Config, dtype: str, rng: np.random.Generator) -> None:
    for case in model_cases(config):
        compare(case, *draw(case, 77, rng, dtype, bias_dtype=rng.choice(["float32", dtype])))


ODD = {
    "one expert": Case(1, topk=1),
    "two experts in two groups": Case(2, 2, 1, 1),
    "fewer experts than lanes, all chosen": Case(7, topk=7),
    "as many experts as lanes": Case(32, topk=6),
    "one more": Case(33, topk=5),
    "Qwen1.5-MoE: lanes with one expert and with two": Case(60, topk=4),
    "three groups of eleven": Case(33, 3, 2, 22),
    "groups of five": Case(60, 12, 5, 9),
    "DeepSeek-V2": Case(160, 8, 3, 6),
    "ten groups of 25": Case(250, 10, 3, 20),
    "40 groups of 25": Case(1000, 40, 7, 32),
    "a group is one expert": Case(96, 96, 33, 31),
    "1024 groups of one expert": Case(1024, 1024, 100, 20),
    "two experts in a group": Case(64, 32, 5, 9),
    "all groups kept": Case(60, 12, 12, 9),
    "one group kept, all of it chosen": Case(48, 6, 1, 8),
    "257 experts: the second size of a lane": Case(257, topk=8),
    "512 experts: it is full": Case(512, 4, 2, 8),
    "513 experts: the third size of a lane": Case(513, 27, 5, 8),
    "1024 experts: it is full": Case(1024, topk=32),
    "a lane has one choice more than it can": Case(256, topk=33),
    "two rounds of the list": Case(1024, topk=64),
    "a longer list": Case(1000, topk=200),
    "all 512 experts": Case(512, topk=512),
    "the most slots of the most experts": Case(1024, 8, 8, 512),
    "nothing but shared experts and one": Case(20, 4, 2, 9, shared=8, scaling=0.5),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ODD.values(), ids=ODD)
def test_any_sizes(case: Case, rng: np.random.Generator) -> None:
    dtypes = itertools.cycle(kernels.DTYPES)
    for scoring, biased in itertools.product(kernels.SCORING, (True, False)):
        way = replace(case, scoring=scoring, biased=biased, renormalize=biased)
        # A half precision input has too few values for so many certain slots.
        dtype = "float32" if case.topk >= 64 else next(dtypes)
        compare(way, *draw(way, 45, rng, dtype))


@pytest.mark.gpu
@settings(max_examples=60)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    case = data.draw(cases(max_experts=kernels.MAX_EXPERTS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = data.draw(st.sampled_from(kernels.DTYPES))
    compare(case, *draw(case, data.draw(st.integers(1, 70)), rng, dtype))


PATHS = {
    "groups": Case(256, 8, 4, 8),
    "groups, a threshold from the lanes, shared experts": Case(256, 8, 4, 16, shared=1, scaling=2.5),
    "no groups": Case(384, topk=8),
    "no bias, softmax": Case(128, 1, 1, 8, "softmax", biased=False),
    "no bias, softmax of the whole row": Case(512, 1, 1, 10, "softmax", biased=False, renormalize=False),
    "few experts": Case(8, 1, 1, 2, "softmax", biased=False),
    "dynamic, groups of odd size": Case(250, 10, 3, 20, "sqrtsoftplus"),
    "dynamic, the most of everything": Case(1024, 1024, 600, 512, biased=False),
}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", PATHS.values(), ids=PATHS)
def test_each_path_stays_inside_its_arrays(case: Case, dtype: str, rng: np.random.Generator) -> None:
    # The last block is not full, and the last rows end where the allocation ends.
    logits, bias = draw(case, 13, rng, dtype)
    count = np.array([11], "int32" if dtype == "float32" else "int64")
    compare(case, logits, bias, num_token_non_padded=count)


# --- rows made to be difficult --------------------------------------------------------------------------

DIFFICULT = {
    "DeepSeek-V3": Case(256, 8, 4, 8),
    "Kimi-K2": Case(384, topk=8),
    "Qwen3": Case(128, 1, 1, 8, "softmax", biased=False),
    "Mixtral": Case(8, 1, 1, 2, "softmax", biased=False, renormalize=False),
    "odd groups": Case(250, 10, 3, 20),
    "odd groups, no bias": Case(250, 10, 3, 20, "softmax", biased=False),
    "many slots, no bias": Case(1000, 1, 1, 100, "sqrtsoftplus", biased=False, renormalize=False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("case", DIFFICULT.values(), ids=DIFFICULT)
def test_rows_with_nan_and_infinities(case: Case, dtype: str, rng: np.random.Generator) -> None:
    def sample(count: int) -> Array:
        x = rng.normal(0, 1.5, (count, case.experts))
        # A random share of each row, from few to nearly all.
        share = rng.random((count, 1))
        x = np.where(rng.random(x.shape) < share, rng.choice([NAN, -INF], x.shape), x)
        x[rng.random(x.shape) < 0.5 / case.experts] = INF
        x[rng.random(count) < 0.1] = NAN
        return x

    bias = rng.normal(0, 0.2, case.experts)
    bias[rng.permutation(case.experts)[:3]] = NAN, INF, -INF
    compare(case, *draw(case, 150, rng, dtype, bias=bias, sample=sample))


#: Rows of equal logits whose sigmoids are normal float32 numbers, and those of smaller ones.
LOW_LOGITS = (-80.0, -86.0, -88.0, -1000.0)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_sum_of_0_divides_nothing(groups: int) -> None:
    logits = np.repeat(np.array(LOW_LOGITS, np.float32)[:, None], 64, axis=1)
    weights, ids = cukern.moe_fused_gate(logits, np.zeros(64, np.float32), groups, 1, 4)
    np.testing.assert_array_equal(weights, np.repeat([[0.25], [0.25], [0], [0]], 4, axis=1).astype(np.float32))
    np.testing.assert_array_equal(ids, np.tile(np.arange(4), (4, 1)))
    weights, _ = cukern.grouped_topk(None, logits, 4, True, scoring_func="softmax")
    assert (weights == 0.25).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case(256, 8, 4, 8),
        Case(384, topk=8),
        Case(8, 1, 1, 2, "sigmoid", biased=False),
        Case(250, 10, 3, 20),
        Case(128, 1, 1, 8, "sqrtsoftplus", biased=False),
    ],
)
def test_rows_of_low_logits(case: Case, dtype: str, rng: np.random.Generator) -> None:
    logits, bias = draw(case, len(LOW_LOGITS), rng, dtype, bias=np.zeros(case.experts) if case.biased else None)
    logits[:] = np.array(LOW_LOGITS)[:, None]
    compare(case, logits, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("case", DIFFICULT.values(), ids=DIFFICULT)
def test_rows_with_many_ties(case: Case, dtype: str, rng: np.random.Generator) -> None:
    def sample(count: int) -> Array:
        few = rng.choice([-1.0, 0.0, -0.0, 0.5, 2.0], (count, case.experts))
        # In the first rows all experts tie, and in some others all but a few.
        return np.where(rng.random((count, 1)) < 0.3, np.where(rng.random(few.shape) < 0.02, few, 0.5), few)

    bias = rng.choice([0.0, 0.3125], case.experts, p=[0.98, 0.02])
    logits, bias = draw(case, 150, rng, dtype, bias=bias, sample=sample)
    logits[0], logits[1] = 1, 1 if case.biased else -0.0
    compare(case, logits, bias)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("order", ["ascending", "descending", "down the lanes", "up the lanes"])
def test_sorted_rows_overflow_the_list(order: str, biased: bool, rng: np.random.Generator) -> None:
    # The best choices of one lane: consecutive experts when specialized, every 32nd when dynamic.
    position = np.arange(256)
    if order.endswith("lanes"):
        position = position.reshape(8, 32).T.ravel().argsort()
    if order in ("ascending", "up the lanes"):
        position = position[::-1]

    def sample(count: int) -> Array:
        return np.ascontiguousarray(-np.sort(-rng.normal(0, 1.5, (count, 256)), axis=1)[:, position])

    for case in (Case(256, topk=8, biased=biased), Case(256, topk=16, biased=biased), Case(256, 8, 4, 8)):
        logits, bias = draw(case, 19, rng, bias=np.zeros(256), sample=sample)
        compare(case, logits, bias)


def wild(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bits: every kind of NaN, infinity, denormal and huge number."""
    kind = arrays.numpy_dtype(dtype)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("case", [Case(256, 8, 4, 8), Case(252, 4, 2, 8), Case(20, 5, 2, 6)], ids=str)
def test_the_dynamic_kernels_agree_bit_for_bit(case: Case, dtype: str, rng: np.random.Generator) -> None:
    tokens = kernels.UP_TO_TOKENS[16] + 37
    logits, bias = wild(rng, (tokens, case.experts), dtype), rng.normal(0, 0.1, case.experts).astype(np.float32)
    logits[::2] = rng.normal(0, 1, (tokens + 1) // 2)[:, None].astype(logits.dtype)  # all experts of a row tie
    logits[1::4] = rng.normal(0, 1, (logits[1::4].shape)).astype(logits.dtype)
    weights, ids = launch(case, logits, bias, "dynamic")
    for part in (slice(0, 9000), slice(9000, tokens)):
        assert_same_bits(launch(case, np.ascontiguousarray(logits[part]), bias, "dynamic"), (weights[part], ids[part]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("config", kernels.SPECIALIZED, ids=lambda config: MODELS[config[:4]].why)
def test_the_variants_agree_bit_for_bit_on_anything(
    config: kernels.Config, dtype: str, rng: np.random.Generator
) -> None:
    for case in model_cases(config):
        bias_dtype = rng.choice(["float32", dtype])
        for logits, bias in (
            (wild(rng, (100, case.experts), dtype), wild(rng, (case.experts,), bias_dtype)),
            (rng.normal(0, 1, (500, case.experts)), rng.normal(0, 0.1, case.experts)),
            (rng.normal(0, 30, (100, case.experts)), rng.normal(0, 0.1, case.experts)),
        ):
            logits = logits.astype(arrays.numpy_dtype(dtype))
            bias = bias.astype(arrays.numpy_dtype(bias_dtype))
            weights, ids = launch(case, logits, bias, "dynamic")
            for form in forms_of(case, dtype):
                assert_same_bits(launch(case, logits, bias, form), (weights, ids))
            # For any input, ids are valid indices and weights finite factors.
            assert np.isfinite(weights).all() and (weights >= 0).all()
            in_order = np.sort(ids, axis=1)
            assert (np.diff(in_order, axis=1) > 0).all()
            assert in_order.min() >= 0 and in_order.max() < case.experts + case.shared


# --- layouts, sizes and places --------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(256, 8, 4, 8), Case(8, 1, 1, 2, biased=False)], ids=["DeepSeek-V3", "Mixtral"])
def test_few_tokens(case: Case, rng: np.random.Generator) -> None:
    # Around the number of tokens of a warp and of a block in each layout.
    for tokens in (*range(1, 10), 15, 16, 17, 31, 32, 33):
        compare(case, *draw(case, tokens, rng))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_many_tokens(dtype: str, rng: np.random.Generator) -> None:
    # More tokens than all resident blocks of a large GPU take, and not a whole number of blocks.
    tokens = 40_003
    for case in (Case(256, 8, 4, 8), Case(128, 1, 1, 8, "softmax", biased=False)):
        rows, bias = draw(case, 997, rng, dtype)
        want = case.route(twin, rows, bias)
        at = np.arange(tokens) % 997
        logits = on_gpu(rows[at])
        for form in ("auto", *forms_of(case, dtype)):
            weights, ids = launch(case, logits, bias, form, num_token_non_padded=tokens - 1)
            assert_routing((weights[:-1], ids[:-1]), (want[0][at[:-1]], want[1][at[:-1]]))
            assert (ids[-1] == -1).all() and not weights[-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_strided_rows(dtype: str, rng: np.random.Generator) -> None:
    case = Case(256, 8, 4, 8)
    logits, bias = draw(case, 30, rng, dtype)
    want = compare(case, logits, bias)
    # 264 elements are a whole number of 16 bytes in every dtype, so the specialized kernels take them.
    wide = np.full((30, 264), NAN, logits.dtype)
    wide[:, :256] = logits
    x = on_gpu(wide)[:, :256]
    for form in ("auto", *forms_of(case, dtype)):
        assert_same_bits(launch(case, x, bias, form), want)
        assert_same_bits(launch(case, x[::3], bias, form), (want[0][::3], want[1][::3]))
        assert_same_bits(launch(case, x[::-1], bias, form), (want[0][::-1], want[1][::-1]))
        # All rows are one row.
        same = cupy.broadcast_to(x[7:8], (5, 256))
        assert_same_bits(launch(case, same, bias, form), (want[0][[7] * 5], want[1][[7] * 5]))
    # One row is aligned whatever its stride.
    odd = np.full((3, 257), NAN, logits.dtype)
    odd[0, :256] = logits[0]
    assert_same_bits(launch(case, on_gpu(odd)[:1, :256], bias, "specialized"), (want[0][:1], want[1][:1]))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_rows_that_are_not_aligned_go_to_the_dynamic_variant(dtype: str, rng: np.random.Generator) -> None:
    case = Case(256, 8, 4, 8)
    logits, bias = draw(case, 10, rng, dtype)
    want = launch(case, logits, bias)
    shifted, narrow = np.zeros((10, 264), logits.dtype), np.zeros((10, 257), logits.dtype)
    shifted[:, 1:257] = narrow[:, :256] = logits
    long_bias = np.zeros(257, bias.dtype)
    long_bias[1:] = bias
    for own_logits, own_bias in (
        (on_gpu(shifted)[:, 1:257], on_gpu(bias)),
        (on_gpu(narrow)[:, :256], on_gpu(bias)),  # only its first row is aligned
        (on_gpu(logits), on_gpu(long_bias)[1:]),
    ):
        assert_same_bits(launch(case, own_logits, own_bias), want)
        with pytest.raises(ValueError, match=r"variant must be 'auto' or 'dynamic' here.*not 16-byte aligned"):
            launch(case, own_logits, own_bias, "specialized")


@pytest.mark.gpu
def test_there_is_no_specialized_variant_for_other_sizes() -> None:
    message = "there is none for 250 experts in 10 groups with scoring sigmoid with a bias"
    with pytest.raises(ValueError, match=message):
        launch(Case(250, 10, 3, 8), np.zeros((2, 250), np.float32), np.zeros(250, np.float32), "specialized")


@pytest.mark.gpu
def test_results_that_are_not_aligned(rng: np.random.Generator) -> None:
    case = Case(256, 8, 4, 7)
    logits, bias = draw(case, 21, rng)
    for skip in (1, 2, 3):
        results = Results(21, 7, skip)
        case.route(cukern, on_gpu(logits), on_gpu(bias), out=results.out)
        assert_same_bits(results.numpy(), launch(case, logits, bias))


@pytest.mark.gpu
def test_specialize_serves_the_next_call(own_configurations: None, rng: np.random.Generator) -> None:
    for case in (
        Case(96, 4, 2, 8),
        Case(1024, 32, 8, 8),
        Case(72, 8, 4, 8, "sqrtsoftplus"),
        Case(4, topk=3),
        Case(100, 1, 1, 5, "softmax", biased=False),
        Case(64, 8, 2, 5, "softmax", biased=False),
    ):
        logits, bias = draw(case, 40, rng)
        with pytest.raises(ValueError, match="variant must be"):
            launch(case, logits, bias, "specialized")
        cukern.specialize(
            "moe_fused_gate",
            experts=case.experts,
            groups=case.groups,
            scoring_func=case.scoring,
            biased=case.biased,
        )
        assert forms_of(case) != ["dynamic"]
        compare(case, logits, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_softcapping(dtype: str, rng: np.random.Generator) -> None:
    logits = rng.normal(0, 10, (60, 128)).astype(arrays.numpy_dtype(dtype))
    for cap, renormalize in itertools.product((5.0, 30.0), (True, False)):
        want = Place(None)("topk_softmax", logits, renormalize, cap, topk=8)
        for variant in ("auto", "dynamic"):
            assert_routing(Place(variant)("topk_softmax", logits, renormalize, cap, topk=8), want)
        with pytest.raises(ValueError, match="variant must be 'auto' or 'dynamic' here"):
            Place("specialized")("topk_softmax", logits, renormalize, cap, topk=8)


# --- PyTorch, DLPack, streams, graphs, threads and devices ----------------------------------------------


def tensors(*values: Array, device: str = "cuda") -> list[torch.Tensor]:
    return [arrays._Torch().from_numpy(x, torch.empty(0, device=device)) for x in values]


def poisoned_tensors(tokens: int, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full((tokens, topk), POISON["int32"], dtype=torch.int32, device="cuda")
    return torch.full((tokens, topk), NAN, device="cuda"), ids


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_tensors(dtype: str, rng: np.random.Generator) -> None:
    case = Case(256, 8, 4, 8)
    logits, bias = draw(case, 21, rng, dtype)
    want = launch(case, logits, bias)
    x, b = tensors(logits, bias)
    for variant in kernels.VARIANTS:
        results = case.route(cukern, x, b, variant=variant)
        assert all(isinstance(r, torch.Tensor) and r.device == x.device for r in results)
        assert_same_bits((results[0].cpu().numpy(), results[1].cpu().numpy()), want)
    # The bias in the input's dtype, rows apart, a count on the device, and tensors to write into.
    wide = torch.full((21, 320), NAN, dtype=x.dtype, device="cuda")
    wide[:, :256] = x
    for integer, shape in itertools.product((torch.int32, torch.int64), ((), (1,))):
        out = poisoned_tensors(21, 8)
        count = torch.full(shape, 13, dtype=integer, device="cuda")
        case.route(cukern, wide[:, :256], b.to(x.dtype), num_token_non_padded=count, out=out)
        rounded = bias.astype(logits.dtype)
        padded = launch(case, logits, rounded, num_token_non_padded=13)
        assert_same_bits((out[0].cpu().numpy(), out[1].cpu().numpy()), padded)


@pytest.mark.gpu
def test_threads_do_not_interfere(rng: np.random.Generator) -> None:
    cases = [Case(256, 8, 4, 8), Case(256, 8, 2, 5, shared=1, scaling=2.5), Case(250, 10, 3, 20), Case(384, topk=8)]
    inputs = [draw(case, 50 + 10 * i, rng) for i, case in enumerate(cases)]
    wants = [launch(case, *x) for case, x in zip(cases, inputs, strict=True)]
    start = threading.Barrier(len(cases))
    failures: list[BaseException] = []

    def call(case: Case, arguments: Routing, want: Routing) -> None:
        try:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                on_device = [on_gpu(x) for x in arguments]
                start.wait()
                results = [case.route(cukern, *on_device) for _ in range(100)]
                stream.synchronize()
                for result in results:
                    assert_same_bits((cupy.asnumpy(result[0]), cupy.asnumpy(result[1])), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=x) for x in zip(cases, inputs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.gpu
@pytest.mark.large(6)
def test_more_than_2_31_elements() -> None:
    """Many rows, by each variant, and three rows that are 2^30 elements apart."""
    # Not for the sanitizer, which would take minutes. Without a bias, so that any row is certain.
    case = Case(256, 1, 1, 8, "softmax", biased=False)
    boundary = 2**31 // 256
    tokens = boundary + 5000
    torch.manual_seed(0)
    x = torch.empty(tokens, 256, dtype=torch.bfloat16, device="cuda").normal_()
    # At its start, around the boundary, and at its end.
    parts = [slice(0, 50), slice(boundary // 2 - 50, boundary // 2 + 50), slice(boundary - 50, boundary + 50)]
    parts.append(slice(tokens - 50, tokens))
    library = arrays.library_of(x)
    assert library is not None
    for variant in ("specialized", "dynamic"):
        out = poisoned_tensors(tokens, 8)
        case.route(cukern, x, None, out=out, variant=variant)
        for part in parts:
            want = case.route(twin, library.to_numpy(x[part]), None)
            assert_routing((out[0][part].cpu(), out[1][part].cpu()), want)
        assert not torch.isnan(out[0]).any()
        # Rows that are far apart: the third starts past the boundary.
        rows = x.view(-1).as_strided((3, 256), (2**30, 1))
        assert_routing(case.route(cukern, rows, None, variant=variant), case.route(twin, library.to_numpy(rows), None))
