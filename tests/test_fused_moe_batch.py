"""The fused mixture-of-experts layer: what the bits of a token depend on."""

from __future__ import annotations

import numpy as np
import pytest

import cukern
from cukern.fused_moe.example import Layer, random_layer
from cukern.fused_moe.experts import expected_rows_of
from tests.buffers import same_bits, to_numpy
from tests.test_fused_moe import cuda, standard

EXPERTS, TOPK, TOKENS = 8, 2, 512
#: Numbers of tokens whose products are of several forms; the first is the fewest that are not streamed.
COUNTS = (5, 8, 17, 40, 64, 130, 300)


def some(layer: Layer, tokens: np.ndarray) -> Layer:
    """The layer with some of its tokens."""
    chosen = (getattr(layer, name)[tokens] for name in ("hidden_states", "topk_weights", "topk_ids"))
    return layer._replace(**dict(zip(("hidden_states", "topk_weights", "topk_ids"), chosen, strict=True)))


@pytest.mark.parametrize("tokens", [1, 2, 4, *COUNTS, TOKENS])
def test_four_tokens_are_streamed_and_five_are_not(tokens: int) -> None:
    rows = tokens * TOPK
    a, b = np.zeros((rows, 256), np.float16), np.zeros((EXPERTS, 512, 256), np.float16)
    offsets = np.linspace(0, rows, EXPERTS + 1).astype(np.int32)
    expected = expected_rows_of(tokens, TOPK, EXPERTS)
    for arch, many in (("90a", "gemm_wgmma"), ("80", "gemm_mma")):
        said = str(cukern.explain(cukern.moe_gemm, a, b, offsets, expected_m=expected, arch=arch))
        assert ("gemm_stream" if tokens <= 4 else many) in said


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_token_of_five_or_more_has_the_same_bits_in_any_batch(dtype: str, rng: np.random.Generator) -> None:
    layer = random_layer(rng, TOKENS, experts=EXPERTS, inter=512, hidden=1024, topk=TOPK, dtype=dtype)
    module = standard(cuda(layer))
    want = to_numpy(cukern.fused_experts(*cuda(layer).arrays))
    for count in COUNTS:
        for chosen in (np.arange(count), rng.permutation(TOKENS)[:count]):
            arrays = cuda(some(layer, chosen)).arrays
            for got in (cukern.fused_experts(*arrays), module(*arrays)):
                same_bits(to_numpy(got), want[chosen])
