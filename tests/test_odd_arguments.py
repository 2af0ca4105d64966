"""Odd values of one argument at a time: a call takes them, or refuses them by a sentence that names an argument."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cukern
from tests.spec import Call
from tests.specs import CALLS

SENTENCES = (TypeError, ValueError, NotImplementedError)
#: How many odd values of each argument are tried by the ordinary suite.
FEW = 4

NAN, INFINITY = float("nan"), float("inf")
PLAIN: tuple[Any, ...] = (
    *("x", b"x", "", [], [1], ["x"], (), {"a": 1}, object(), len, int, None, True, False, 1j),
    *(0, -1, 1, 3, 10**6, 2**31, -(2**31) - 1, 2**32, 2**63, 2**64, 10**30, -(10**30)),
    *(1.5, NAN, INFINITY, -INFINITY, 1e300, -1e300),
    *(np.float32(NAN), np.int64(-1), np.int64(2**62), np.bool_(True), np.array("x"), np.zeros(2, object)),
    *(np.zeros((), np.float32), np.zeros((0, 0), np.float32), np.zeros(3, np.float32)),
)
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "int64", "int32", "int16", "uint8", "bool")


def odd_tensors() -> Iterator[torch.Tensor]:
    for dtype in (getattr(torch, name) for name in DTYPES):
        yield from (torch.zeros(shape, dtype=dtype) for shape in ((), 0, 1))
    yield torch.zeros(2, 2, 2, 2, 2)
    yield torch.empty(3, device="meta")
    yield torch.zeros(3, 3).to_sparse()


def changed(given: torch.Tensor) -> Iterator[Any]:
    """A tensor with another dtype, shape, strides, library or numbers."""
    yield from (given.to(getattr(torch, name)) for name in DTYPES if name != "float8_e5m2")
    yield from (given[None], given.tolist(), [given], [given, given], (given,), [given, None], [given, "x"])
    if given.ndim:
        yield from (given[:0], given[..., :0], torch.cat([given, given]), given.expand(2, *given.shape))
        yield from (given.flatten(), given.flip(0), given.transpose(0, -1))
    if given.is_floating_point() and given.itemsize > 1:
        yield from (torch.full_like(given, NAN), torch.full_like(given, INFINITY), torch.full_like(given, -INFINITY))
    elif given.dtype in (torch.int32, torch.int64):
        yield from (torch.full_like(given, number) for number in (2**31 - 1, -(2**31), -1))


def odd_values(given: Any) -> list[Any]:
    """Odd values of an argument that a call gives as `given`."""
    values = [*PLAIN, *odd_tensors()]
    if isinstance(given, torch.Tensor):
        values += changed(given)
    elif isinstance(given, list):
        values += [given[:0], given * 2, tuple(given), [*given, None], [*given, "x"], [None] * len(given)]
    return values


def with_value(call: Call, name: str, value: Any) -> Call:
    """The call on copies of its arrays, with another value of an argument."""
    own = call.changed(lambda _, x: x.clone())
    given = {**own.given, name: value}
    args = tuple(given.pop(each) for each in [*own.given][: len(call.args)])
    return Call(call.name, args, given)


def described(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{type(value).__name__} {list(value.shape)} {value.dtype}"
    return repr(value)[:60]


def check_value(call: Call, name: str, value: Any) -> None:
    """The call runs, or raises a sentence that names one of its arguments."""
    odd = with_value(call, name, value)
    names = [*inspect.signature(call.function).parameters]
    raised = None
    try:
        call.function(*odd.args, **odd.options)
    except Exception as error:
        raised = error
    if raised is not None:
        said = f"{name}={described(value)} raises {type(raised).__name__}: {raised}"
        assert isinstance(raised, SENTENCES), said
        assert any(re.search(rf"\b{each}\b", str(raised)) for each in names), f"{said}, which names no argument"


def check_call(key: str, most: int | None) -> None:
    """Check `most` odd values of each argument of a call, always the same ones; None: all."""
    call, chosen = CALLS[key], random.Random(key)
    for name in inspect.signature(call.function).parameters:
        values = odd_values(call.given.get(name))
        for value in values if most is None else chosen.sample(values, most):
            check_value(call, name, value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", CALLS)
def test_few_odd_values_of_each_argument(key: str) -> None:
    check_call(key, FEW)


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", CALLS)
def test_odd_values_of_each_argument(key: str) -> None:
    check_call(key, None)


X, W = torch.zeros(2, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("name", "args", "options", "message"),
    [
        ("rms_norm", (X, X, W, 1e-6), {}, "rms_norm(input, weight, epsilon, *, weight_offset, out, variant): too many"),
        ("rms_norm", (), {}, "rms_norm(input, weight, epsilon, *, weight_offset, out, variant): missing a required"),
        (
            "softmax",
            (X,),
            {"t": 1},
            "softmax(logits, temperature, *, out, variant): got an unexpected keyword argument",
        ),
        ("sample", (X,), {"return_valid": 2**31}, "return_valid must be one of False, True, got 2147483648"),
        ("sample", (X,), {"return_valid": X}, "return_valid must be one of False, True, got Tensor"),
        ("sample", (X,), {"end_id": int, "finished": torch.zeros(2, dtype=torch.bool)}, "end_id must be an integer in"),
        ("softmax", (X, np.bool_(True)), {}, "temperature must be a number, got np.True_ (bool)"),
        (
            "softmax",
            (X.to_sparse(),),
            {},
            "logits must be a strided tensor with memory of its own, got Tensor of layout",
        ),
        ("softmax", (torch.empty(2, 8, device="meta"),), {}, "logits must be on a CUDA device or the CPU, got one on"),
        ("apply_penalties", (X,), {"output_ids": [1], "output_mask": X > 0}, "output_ids must be a torch array like"),
        ("embedding_lookup", (X, torch.zeros(2, dtype=torch.int32), X), {"step": 2**31}, "step must be an integer in"),
        (
            "embedding_lookup",
            (X, torch.zeros(2, dtype=torch.int32), X),
            {"step": 2**31, "position_ids": torch.zeros(2, dtype=torch.int32)},
            "position_ids must be in [0, 2) (positions) after adding step = 2147483648, got 0 to 0",
        ),
        ("grouped_topk", (X[0, 0], X, 2, True), {}, "hidden_states must be of shape [tokens, ...], got []"),
        ("scaled_fp8_quant", (X, None, 2**62), {}, "num_token_padding must be an integer in [0, 2147479552], got"),
    ],
)
def test_a_sentence_names_what_was_wrong(name: str, args: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        getattr(cukern, name)(*args, **options)


@pytest.mark.parametrize("weight", ["q_weight", "k_weight"])
@pytest.mark.parametrize("value", [[1.0], "x"])
def test_a_weight_that_is_no_array_is_named(weight: str, value: Any) -> None:
    call = next(x for key, x in CALLS.items() if key.startswith("fused_qk_norm_rope_and_cache"))
    odd = with_value(with_value(call, "epsilon", 1e-6), weight, value)
    with pytest.raises(TypeError, match=f"^{weight} must be a torch array like query, got builtins"):
        cukern.fused_qk_norm_rope_and_cache(*odd.args, **odd.options)
