"""Few rows of one expert, or of a layer without experts: `gemm_stream` where nothing has to be found first."""

from __future__ import annotations

from typing import NamedTuple

from cukern.ops.moe_gemm import kernels
from cukern.ops.moe_gemm.kernels import Product
from cukern.runtime import activation as activations
from cukern.runtime import arrays
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.plan import launch

_kernel = Kernel("moe_gemm/stream_one", "gemm_stream_one")
#: Rows of a tile, and the blocks of a multiprocessor: with more, registers would spill.
TOKENS = {1: 5, 2: 4, 4: 3}
_WARPS, _UNIT_NUMBERS = 4, 8
#: Blocks that a launch should have: two for each multiprocessor of an H200.
_BLOCKS = 264


class Form(NamedTuple):
    """The sizes among the template arguments but the tokens."""

    pairs: int  # of rows of weights that a warp has
    loads: int  # of each row, under way at once
    split: int  # warps that share a row


def form_for(n: int, k: int) -> Form:
    """The form for weights [n, k]: as few warps share a row as cover it at once, in blocks for all multiprocessors."""
    loads = -(-k // (32 * _UNIT_NUMBERS))
    pairs = 2 if loads <= 4 and n // (4 * _WARPS) >= _BLOCKS else 1
    of_lane = 8 // pairs

    def suffices(split: int) -> bool:
        return split * of_lane >= loads and n * split // (2 * pairs * _WARPS) >= _BLOCKS

    return Form(pairs, of_lane, next((x for x in (1, 2) if suffices(x)), 4))


def variant_of(tokens: int, dtype: str, epilogue: int, form: Form) -> Variant:
    resident = min(TOKENS[tokens], 6 - form.pairs)
    return _kernel.variant(arrays.CUDA_TYPE[dtype], tokens, epilogue, *form, resident)


# For Qwen3's layers; others are compiled at their first use.
_kernel.specialized = [
    variant_of(tokens, "bfloat16", epilogue, form).instance
    for tokens in TOKENS
    for epilogue in (0, activations.number("silu"))
    for form in (Form(1, 8, 1), Form(1, 8, 2), Form(1, 8, 4), Form(2, 4, 1))
]


def _is_one(x: Product) -> bool:
    """Whether `gemm_stream_one` can do what `gemm_stream` can: few rows of one expert, in 16 bits."""
    is_plain = x.weights == "PLAIN" and x.experts == 1 and not x.is_batched and x.row_token is None
    return is_plain and x.expects(max(TOKENS))


def stream(x: Product) -> None:
    """Launch the variant "stream"."""
    if not _is_one(x):
        kernels.stream(x)
        return
    few = next((tokens for tokens in (1, 2) if x.expects(tokens)), 4)
    form = form_for(x.n, x.k)
    blocks = -(-x.n // (2 * form.pairs * (_WARPS // form.split))), x.tiles(few)
    launch(variant_of(few, x.out.dtype, x.epilogue, form), blocks, 32 * _WARPS, **x.fields())
