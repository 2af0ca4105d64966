"""A call that repeats a plan launches, or raises, what it does without one."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cukern.runtime.op import OPS
from tests.buffers import as_torch
from tests.pretended import Launch, PretendedGPU, pretended  # noqa: F401
from tests.specs import CALLS, STEM_OF

#: The exchange needs memory of several ranks.
KEYS = [key for key in CALLS if STEM_OF[key.split()[0]] != "all_to_all"]
CHANGED_CALLS = 100


def _moved(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins `elements` elements behind a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + elements + 16, dtype=x.dtype)
    start = -memory.data_ptr() // x.element_size() % (16 // x.element_size()) + elements
    moved = memory[start : start + x.numel()].view(x.shape)
    moved.copy_(x)
    return moved


def _wide(x: torch.Tensor, gap: int | None = None) -> torch.Tensor:
    """A copy whose rows have gaps between them, by default as long as a row."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + (x.shape[-1] if gap is None else gap))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


CHANGES: list[Any] = [
    lambda x: x.clone(),
    lambda x: _moved(x, 1),
    lambda x: _moved(x, 8),
    lambda x: x[:1],
    lambda x: x[:0],
    lambda x: x[1:],
    lambda x: torch.cat([x, x]),
    _wide,
    lambda x: _wide(x, 1),
    lambda x: _wide(x, 1)[:1],
    lambda x: x[1:2],
    lambda x: x[::2],
    lambda x: x[:1].expand(3 * x.shape[0], *x.shape[1:]),
    lambda x: x.flip(0)[:1].expand(x.shape),
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: x.to(torch.float16),
    lambda x: x.to(torch.int64),
    lambda x: x.to(torch.float32, copy=True).requires_grad_(),
    lambda x: x.unsqueeze(0),
    lambda x: None,
    lambda x: np.zeros(x.shape, np.float32),
]


def _tensors(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_tensors, value))
    return as_torch(value) if isinstance(value, np.ndarray) else value


def _results(returned: Any) -> Any:
    """Tensors to write such results into."""
    return tuple(x.clone() if isinstance(x, torch.Tensor) else as_torch(x) for x in returned)


def _rows(values: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    """All arrays with as many rows as most have, cut to fewer or repeated."""
    sizes = [x.shape[0] for x in values.values() if isinstance(x, torch.Tensor) and x.ndim]
    if not sizes:
        return values
    size, count = max(set(sizes), key=sizes.count), rng.choice((0, 1, 2, -1))

    def changed(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(changed, x))
        if not isinstance(x, torch.Tensor) or not x.ndim or x.shape[0] != size:
            return x
        return torch.cat([x, x]) if count < 0 else x[:count]

    return {name: changed(x) for name, x in values.items()}


def _another(x: Any, rng: random.Random) -> Any:
    """Another value for an argument, or for an element of a tuple."""
    if isinstance(x, torch.Tensor):
        return rng.choice(CHANGES)(x) if x.ndim else x.clone()
    if isinstance(x, tuple):
        i = rng.randrange(len(x))
        return (*x[:i], _another(x[i], rng), *x[i + 1 :])
    if type(x) in (int, float, bool):
        return rng.choice((x, x + 1, float(x), bool(x), int(x), np.int64(int(x)), None, str(x)))
    return x


def _changed(given: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    values = _rows(given, rng) if rng.random() < 0.4 else dict(given)
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice([*values])
        values[name] = _another(values[name], rng)
    return values


def _said(launch: Launch, arrays: list[torch.Tensor]) -> Any:
    """A launch, with addresses by the array that they are of."""

    def place(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: place(x) for name, x in value.items()}
        if isinstance(value, list):
            return [*map(place, value)]
        if not isinstance(value, int) or value < 1 << 32:
            return value
        return next((i for i, x in enumerate(arrays) if x.data_ptr() == value), "made")

    return launch.variant, launch.grid, launch.block, launch.shared_bytes, place(launch.fields)


@contextlib.contextmanager
def without_plans() -> Iterator[None]:
    """Calls make their plans anew."""
    kept = {name: dict(op.kinds) for name, op in OPS.items()}
    for op in OPS.values():
        op.kinds.clear()
    yield
    for name, op in OPS.items():
        op.kinds.clear()
        op.kinds.update(kept[name])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.filterwarnings("ignore")
def test_a_call_repeats_no_other_plan(key: str, pretended: PretendedGPU) -> None:  # noqa: F811
    call, rng = CALLS[key], random.Random(key)
    names: list[Any] = [*range(len(call.args)), *call.options]
    values = dict(zip(names, [*call.args, *call.options.values()], strict=True))
    given = {name: _tensors(x) for name, x in values.items()}
    if call.name in ("moe_fused_gate", "merge_attention_states", "moe_sort"):
        given["out"] = _results(call.function(*call.args, **{**call.options, "out": None}))

    def outcome(values: dict[Any, Any]) -> Any:
        pretended.launches.clear()
        options = {name: x for name, x in values.items() if isinstance(name, str)}
        try:
            returned = call.function(*[values[i] for i in range(len(call.args))], **options)
        except Exception as error:
            return type(error), str(error)
        results = returned if isinstance(returned, (tuple, list)) else (returned,)
        shapes = [
            (x.dtype, x.shape, getattr(x, "strides", None) or x.stride()) if hasattr(x, "shape") else x for x in results
        ]
        flat = [y for x in values.values() for y in (x if isinstance(x, tuple) else (x,))]
        arrays = [x for x in flat if isinstance(x, torch.Tensor)]
        return shapes, [_said(launch, arrays) for launch in pretended.launches]

    of_call, hits = outcome(given), 0
    for _ in range(CHANGED_CALLS):
        changed = _changed(given, rng)
        with without_plans():
            wanted = outcome(changed)
        for _ in range(3):
            assert outcome(changed) == wanted, {name: getattr(x, "shape", x) for name, x in changed.items()}
        hits += bool(wanted[1]) and not isinstance(wanted[0], type)
    assert hits or not of_call[1]  # of no rows nothing is launched
