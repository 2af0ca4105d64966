"""Products of any sizes, addresses and strides, on every GPU, without tensor cores: their tiles and their launches."""

from __future__ import annotations

import functools

from cukern.ops.moe_gemm.kernels import Chosen, Config, Product, _flag, chosen, config_of, constant, tiles_of
from cukern.runtime import arrays
from cukern.runtime.kernel import Kernel, Variant

_fma = Kernel("moe_gemm/fma", "gemm_fma")

#: Rows of a tile of `gemm_fma`.
FMA_TOKENS = (16, 64)


def fma_variant(out_dtype: str, weights: str, is_by_blocks: bool, epilogue: int, tokens: int) -> Variant:
    return _fma.variant(arrays.CUDA_TYPE[out_dtype], weights, _flag(is_by_blocks), epilogue, tokens)


# Compiled at its first use, as few models have such sizes.
_fma.specialized = [fma_variant("bfloat16", "PLAIN", False, 0, tokens).instance for tokens in FMA_TOKENS]


@functools.lru_cache(maxsize=1024)
def _config(x: Product, tokens: int) -> Config:
    variant, (expert, row) = fma_variant(x.out_dtype, x.weights, x.is_by_blocks, x.epilogue, tokens), x.b_strides
    return config_of(x, variant, constant(_fma, "FMA_THREADS"), b_row=row, b_expert=expert)


def fma(x: Product, why: str) -> Chosen:
    tokens = next((tokens for tokens in FMA_TOKENS[:-1] if x.expects(tokens)), FMA_TOKENS[-1])
    strips = -(-x.columns // (constant(_fma, "FMA_WEIGHTS") // (2 if x.is_gated else 1)))
    why = f"{why}; {tiles_of(FMA_TOKENS, tokens, x)}"
    return chosen(x, _config(x.without_counts, tokens), why, x.tiles(tokens, strips))
