"""Tokens that are quantized as they are permuted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukern
from cukern.ops.moe_permute import permute_quantized
from tests.buffers import same_bits

torch = pytest.importorskip("torch")

#: tokens, topk, hidden, and the share of pairs that have no row.
CASES = {
    "one token": (1, 8, 7168, 0.0),
    "parts of rows": (16, 8, 7168, 0.3),
    "a group": (33, 2, 128, 0.2),
    "more slots than lanes": (5, 11, 640, 0.5),
    "several tokens of a block": (301, 3, 384, 0.1),
    "no slots": (4, 0, 256, 0.0),
    "no tokens": (0, 4, 256, 0.0),
}


def made(rng: np.random.Generator, tokens: int, topk: int, hidden: int, without: float) -> tuple[Any, Any, int]:
    """Activations whose groups differ by orders of magnitude, the rows of all pairs, and how many rows there are."""
    x = rng.standard_normal((tokens, hidden)) * np.exp(rng.uniform(-20, 20, (tokens, hidden // 128))).repeat(128, 1)
    if tokens:
        x[0, :128] = 0
        x[-1, -1] = np.nan
    rows = tokens * topk
    inverse = rng.permutation(rows).astype(np.int32)
    inverse[rng.random(rows) < without] = -1
    inverse[inverse == rows - 1] = rows + 5  # past the end
    return torch.from_numpy(x).bfloat16(), torch.from_numpy(inverse.reshape(tokens, topk)), rows


def outputs(rows: int, hidden: int, device: str = "cpu") -> tuple[Any, Any]:
    q = torch.full((rows, hidden), 0x55, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return q, torch.full((rows, hidden // 128), -7.0, device=device)


def compared(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    same_bits(got[0].cpu().view(torch.uint8).numpy(), want[0].view(torch.uint8).numpy())
    same_bits(got[1].cpu().numpy(), want[1].numpy())


@pytest.mark.parametrize(("tokens", "topk", "hidden", "without"), CASES.values(), ids=CASES)
def test_is_a_quantization_and_a_permutation(
    tokens: int, topk: int, hidden: int, without: float, rng: np.random.Generator
) -> None:
    x, inverse, rows = made(rng, tokens, topk, hidden, without)
    got, want = outputs(rows, hidden), outputs(rows, hidden)
    permute_quantized(x, inverse, out_q=got[0], out_s=got[1])
    q, scale = cukern.per_token_group_quant_fp8(x, 128)
    for t, s in np.argwhere((inverse.numpy() >= 0) & (inverse.numpy() < rows)):
        want[0][inverse[t, s]], want[1][inverse[t, s]] = q[t], scale[t]
    compared(got, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(2, 192).bfloat16()}, "groups of 128"),
        ({"hidden_states": torch.zeros(2, 260).bfloat16()[:, :256]}, "multiples of 16 bytes"),
        ({"hidden_states": torch.zeros(2, 256)}, "hidden_states"),
        ({"out_q": torch.zeros(4, 128, dtype=torch.uint8)}, "out_q"),
        ({"out_q": torch.zeros(4, 256)}, "out_q"),
        ({"out_s": torch.zeros(4, 4)}, "out_s"),
        ({"inverse": torch.zeros(3, 2, dtype=torch.int32)}, "inverse"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    q, scale = outputs(4, 256)
    given = {"hidden_states": torch.zeros(2, 256).bfloat16(), "inverse": torch.zeros(2, 2, dtype=torch.int32)}
    with pytest.raises((ValueError, TypeError), match=message):
        permute_quantized(**{**given, "out_q": q, "out_s": scale, **change})


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "topk", "hidden", "without"), CASES.values(), ids=CASES)
def test_the_kernel(tokens: int, topk: int, hidden: int, without: float, dtype: str, rng: np.random.Generator) -> None:
    x, inverse, rows = made(rng, tokens, topk, hidden, without)
    x = x.to(getattr(torch, dtype))
    got, want = outputs(rows, hidden, "cuda"), outputs(rows, hidden)
    permute_quantized(x.cuda(), inverse.cuda(), out_q=got[0], out_s=got[1])
    permute_quantized(x, inverse, out_q=want[0], out_s=want[1])
    compared(got, want)


@pytest.mark.gpu
def test_addresses_that_do_not_fit_are_refused() -> None:
    x, inverse, (q, scale) = torch.zeros(513).bfloat16().cuda(), torch.zeros(2, 1).int().cuda(), outputs(2, 256, "cuda")
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        permute_quantized(x[1:].view(2, 256), inverse, out_q=q, out_s=scale)
