"""Tiles and launches of `gemm_fma`, the grouped GEMM without tensor cores."""

from __future__ import annotations

from cukern.ops.moe_gemm.kernels import tiles_of
from cukern.ops.moe_gemm.product import Product
from cukern.runtime import arrays
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.plan import launch

_fma = Kernel("moe_gemm/fma", "gemm_fma")

#: In rows.
FMA_TOKENS = (16, 64)


def fma_variant(out_dtype: str, weights: str, is_by_blocks: bool, epilogue: int, tokens: int) -> Variant:
    return _fma.variant(arrays.CUDA_TYPE[out_dtype], weights, is_by_blocks, epilogue, tokens)


# These instances are compiled at their first use, because few models need this kernel.
_fma.specialized = [fma_variant("bfloat16", "PLAIN", False, 0, tokens).instance for tokens in FMA_TOKENS]


def fma(x: Product) -> None:
    tokens = next((tokens for tokens in FMA_TOKENS[:-1] if x.expects(tokens)), FMA_TOKENS[-1])
    columns = _fma.constant("FMA_WEIGHTS") // (2 if x.is_gated else 1)
    strips = -(-x.out.shape[-1] // columns)
    launch(
        fma_variant(x.out.dtype, x.weights, x.is_by_blocks, x.epilogue, tokens),
        x.tiles(tokens, strips),
        _fma.constant("FMA_THREADS"),
        why=f"{x.why}; {tiles_of(FMA_TOKENS, tokens, x)}",
        **x.fields(),
        b_row=x.b_strides[1],
        b_expert=x.b_strides[0],
    )
