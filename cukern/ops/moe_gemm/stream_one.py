"""`gemm_stream_one`: a GEMM of few rows with one expert, or of a layer without experts."""

from __future__ import annotations

from typing import NamedTuple

from cukern.ops.moe_gemm import kernels
from cukern.ops.moe_gemm.product import Product
from cukern.runtime import activation as activations
from cukern.runtime import arrays
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.plan import launch

_kernel = Kernel("moe_gemm/stream_one", "gemm_stream_one")
#: {rows of `a` per tile: resident blocks per multiprocessor}. With one more block, registers would spill.
TOKENS = {1: 5, 2: 4}
_VECTOR_ELEMENTS = 8


class StreamTile(NamedTuple):
    """Template arguments of `gemm_stream_one`."""

    pairs: int  # of weight rows that a warp processes at a time
    loads: int  # of 16 bytes of each row, in flight
    split: int  # warps per row of weights

    @property
    def numbers(self) -> int:
        """Elements of a row of weights that are in flight."""
        return self.split * self.loads * 32 * _VECTOR_ELEMENTS


#: In ascending order of elements in flight. On an H200 the fastest tile is the first with the whole row in flight.
TILES = StreamTile(2, 4, 1), StreamTile(2, 4, 2), StreamTile(1, 8, 2)


def tile_for(k: int) -> StreamTile:
    return next((tile for tile in TILES if tile.numbers >= k), TILES[-1])


def variant_of(tokens: int, dtype: str, epilogue: int, tile: StreamTile) -> Variant:
    resident = min(TOKENS[tokens], 6 - tile.pairs)
    return _kernel.variant(arrays.CUDA_TYPE[dtype], tokens, epilogue, *tile, resident)


# The instances of Qwen3's layers.
_kernel.specialized = [
    variant_of(tokens, "bfloat16", epilogue, tile).instance
    for tokens in TOKENS
    for epilogue in (0, activations.number("silu"))
    for tile in TILES
]


def stream(x: Product) -> None:
    is_of_one_expert = x.weights == "PLAIN" and x.experts == 1 and not x.is_batched and x.row_token is None
    if not (is_of_one_expert and x.expects(max(TOKENS))):
        kernels.stream(x)
        return
    few = next(tokens for tokens in TOKENS if x.expects(tokens))
    tile = tile_for(x.k)
    warps = _kernel.constant("ONE_WARPS")
    blocks = -(-x.n // (2 * tile.pairs * (warps // tile.split))), x.tiles(few)
    why = f"{x.why}; the rows are of one expert (up to {x.row_limit(max(TOKENS))}), so none is looked for; "
    why += f"{tile.numbers} of the {x.k} numbers of a row of weights under way at once"
    launch(variant_of(few, x.out.dtype, x.epilogue, tile), blocks, 32 * warps, why=why, **x.fields())
