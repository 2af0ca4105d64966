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
TOKENS = {1: 5, 2: 4}
_UNIT_NUMBERS = 8


class Form(NamedTuple):
    """The sizes among the template arguments but the tokens."""

    pairs: int  # of rows of weights that a warp has
    loads: int  # of each row, under way at once
    split: int  # warps that share a row

    @property
    def numbers(self) -> int:
        """Of a row, under way at once."""
        return self.split * self.loads * 32 * _UNIT_NUMBERS


#: By the numbers that they have under way: on an H200 the first one that has a row at once is the fastest.
FORMS = Form(2, 4, 1), Form(2, 4, 2), Form(1, 8, 2)


def form_for(k: int) -> Form:
    """The form for rows of k weights."""
    return next((form for form in FORMS if form.numbers >= k), FORMS[-1])


def variant_of(tokens: int, dtype: str, epilogue: int, form: Form) -> Variant:
    resident = min(TOKENS[tokens], 6 - form.pairs)
    return _kernel.variant(arrays.CUDA_TYPE[dtype], tokens, epilogue, *form, resident)


# For Qwen3's layers; others are compiled at their first use.
_kernel.specialized = [
    variant_of(tokens, "bfloat16", epilogue, form).instance
    for tokens in TOKENS
    for epilogue in (0, activations.number("silu"))
    for form in FORMS
]


def _is_one(x: Product) -> bool:
    """Whether `gemm_stream_one` can do what `gemm_stream` can: few rows of one expert, in 16 bits."""
    is_plain = x.weights == "PLAIN" and x.experts == 1 and not x.is_batched and x.row_token is None
    return is_plain and x.expects(max(TOKENS))


def stream(x: Product) -> None:
    """Choose for the variant "stream"."""
    if not _is_one(x):
        kernels.stream(x)
        return
    few = next(tokens for tokens in TOKENS if x.expects(tokens))
    form = form_for(x.k)
    warps = kernels.constant(_kernel, "ONE_WARPS")
    blocks = -(-x.n // (2 * form.pairs * (warps // form.split))), x.tiles(few)
    why = f"{x.why}; the rows are of one expert (up to {x.most(max(TOKENS))}), so none is looked for; "
    why += f"{form.numbers} of the {x.k} numbers of a row of weights under way at once"
    launch(variant_of(few, x.out.dtype, x.epilogue, form), blocks, 32 * warps, why=why, **x.fields())
