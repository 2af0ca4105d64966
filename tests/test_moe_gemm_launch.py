"""Calls of grouped products as the driver gets them, on a GPU that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.ops.moe_gemm import launch as calls
from cukern.runtime import gpu
from cukern.runtime.decisions import Decisions
from cukern.runtime.tensor_map import Maps
from tests.pretended import PretendedGPU, pretended  # noqa: F401

BF16 = torch.bfloat16
A, B, OFFSETS = torch.zeros(64, 128, dtype=BF16), torch.zeros(4, 256, 128, dtype=BF16), torch.zeros(5).int()


def product(rows: int = 64, **given: Any) -> Any:
    return cukern.moe_gemm(torch.zeros(rows, 128, dtype=BF16), B, OFFSETS, **given)


@pytest.fixture
def chosen(pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> list[Any]:  # noqa: F811
    """The calls that are checked, as a list that grows."""
    found: list[Any] = []
    decide = calls._decide
    monkeypatch.setattr(gpu, "of_device", lambda device: gpu.of_arch("90a"))
    monkeypatch.setattr(calls, "_decide", lambda *args: [found.append(args), decide(*args)][1])
    for name in ("DECISIONS", "BATCHED_DECISIONS"):
        monkeypatch.setattr(calls, name, Decisions(*getattr(calls, name)._free))
    monkeypatch.setattr(Maps, "find", lambda self, library, address, rows=0: bytes(128))
    return found


def test_a_call_like_one_before_is_not_checked_again(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    for rows in (64, 3, 0, 64, 9000):
        assert product(rows).shape == (rows, 256)
    assert product(65, expected_m=2).shape == (65, 256)
    assert len(chosen) == 1
    names = [x.variant.instance.function for x in pretended.launches]
    assert names == ["gemm_wgmma", "gemm_stream", "gemm_wgmma", "gemm_wgmma", "gemm_stream"]
    assert [x.fields["rows"] for x in pretended.launches] == [64, 3, 64, 9000, 65]
    product(64, activation="silu")
    product(64, out=torch.zeros(64, 256, dtype=BF16))
    assert len(chosen) == 3


def test_other_alignment_takes_another_kernel(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    odd = torch.zeros(64 * 128 + 1, dtype=BF16)[1:].reshape(64, 128)
    for a in (A, odd, A, odd):
        cukern.moe_gemm(a, B, OFFSETS)
    assert len(chosen) == 2
    names = [x.variant.instance.function for x in pretended.launches]
    assert names == ["gemm_wgmma", "gemm_fma", "gemm_wgmma", "gemm_fma"]


def test_what_a_decision_does_not_hold_is_checked_at_every_call(
    chosen: list[Any],
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    product(expected_m=3)
    for bad in (-1, 3.0, 3.5, True, "3"):
        with pytest.raises((TypeError, ValueError), match=r"^expected_m must be an integer"):
            product(expected_m=bad)
    out = torch.zeros(64, 256, dtype=BF16)
    product(out=out)
    with pytest.raises(ValueError, match=r"^out must be of shape \[rows, n\] = \[63, 256\]"):
        product(63, out=out)
    tokens = torch.zeros(100).int()
    assert product(row_token=tokens).shape == (100, 256)
    with pytest.raises(ValueError, match=r"^a must be of at least one token, as row_token has rows"):
        product(0, row_token=tokens)
    assert len(pretended.launches) == 3


def test_a_scale_of_all_rows_is_not_one_of_each(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    a, b = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn)
    for rows, scales in ((64, 64), (64, 1), (32, 32), (32, 1), (64, 64)):
        cukern.moe_gemm(a[:rows], b, OFFSETS, a_scale=torch.ones(scales), b_scale=torch.ones(4))
    assert [x.fields["a_scale_step"] for x in pretended.launches] == [1, 0, 1, 0, 1]
    assert len(chosen) == 2
    with pytest.raises(ValueError, match=r"^a_scale must be of shape"):
        cukern.moe_gemm(a, b, OFFSETS, a_scale=torch.ones(32), b_scale=torch.ones(4))


def test_one_row_makes_no_scale_of_all_one_of_each(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    a, b = torch.zeros(66, 136).to(torch.float8_e4m3fn), torch.zeros(4, 256, 136).to(torch.float8_e4m3fn)
    for rows in (a[:64], a[1:2], a[1:33]):  # the latter two begin 8 bytes from a multiple of 16
        cukern.moe_gemm(rows, b, OFFSETS, a_scale=torch.ones(1), b_scale=torch.ones(4))
    assert [x.fields["a_scale_step"] for x in pretended.launches] == [0, 1, 0]


def test_a_hint_of_numpy_keeps_one_decision(chosen: list[Any]) -> None:
    for _ in range(5):
        product(expected_m=np.int64(3))
    (found,) = calls.DECISIONS._found.values()
    assert len(found) == 1


def test_batched_calls(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    counts = torch.zeros(4).int()
    for rows in (8, 8, 16):
        assert cukern.moe_gemm_batched(A.new_zeros(4, rows, 128), B, counts).shape == (4, rows, 256)
    assert len(chosen) == 2
    assert [(x.fields["rows"], x.fields["max_tokens"]) for x in pretended.launches] == [(32, 8), (32, 8), (64, 16)]


def test_gradients_are_refused(chosen: list[Any]) -> None:
    trained = B.clone().requires_grad_()
    with torch.no_grad():
        cukern.moe_gemm(A, trained, OFFSETS)
    with pytest.raises(RuntimeError, match=r"^b must be a tensor that does not require grad"):
        cukern.moe_gemm(A, trained, OFFSETS)
