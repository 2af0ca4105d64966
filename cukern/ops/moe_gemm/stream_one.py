"""`gemm_stream_one`: few rows and one expert (or a layer without experts), so no row has to look up its expert."""

from __future__ import annotations

from typing import NamedTuple

from cukern.ops.moe_gemm import kernels
from cukern.ops.moe_gemm.product import Product
from cukern.runtime import activation as activations
from cukern.runtime import arrays
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.plan import launch

_kernel = Kernel("moe_gemm/stream_one", "gemm_stream_one")
#: The tile sizes in rows, and for each the resident blocks per multiprocessor. With one more block, registers would
#: spill.
TOKENS = {1: 5, 2: 4}
_UNIT_NUMBERS = 8


class StreamTile(NamedTuple):
    """The template arguments that say how warps read the rows of weights."""

    pairs: int  # pairs of rows of weights that a warp multiplies
    loads: int  # 16-byte loads of each row in flight
    split: int  # warps that share a row

    @property
    def numbers(self) -> int:
        """Elements of a row that are in flight."""
        return self.split * self.loads * 32 * _UNIT_NUMBERS


#: The tiles, in ascending order of the elements in flight. On an H200 the first tile that has a whole row in flight is
#: the fastest.
TILES = StreamTile(2, 4, 1), StreamTile(2, 4, 2), StreamTile(1, 8, 2)


def tile_for(k: int) -> StreamTile:
    """Return the tile for rows of k weights."""
    return next((tile for tile in TILES if tile.numbers >= k), TILES[-1])


def variant_of(tokens: int, dtype: str, epilogue: int, tile: StreamTile) -> Variant:
    resident = min(TOKENS[tokens], 6 - tile.pairs)
    return _kernel.variant(arrays.CUDA_TYPE[dtype], tokens, epilogue, *tile, resident)


# The instances of Qwen3's layers are compiled ahead of time, all others at their first use.
_kernel.specialized = [
    variant_of(tokens, "bfloat16", epilogue, tile).instance
    for tokens in TOKENS
    for epilogue in (0, activations.number("silu"))
    for tile in TILES
]


def _is_one(x: Product) -> bool:
    """Return whether `gemm_stream_one` can compute the product: few rows of one expert, in 16 bits."""
    is_plain = x.weights == "PLAIN" and x.experts == 1 and not x.is_batched and x.row_token is None
    return is_plain and x.expects(max(TOKENS))


def stream(x: Product) -> None:
    """Launch the variant "stream": `gemm_stream_one` if it can compute the product, else `gemm_stream`."""
    if not _is_one(x):
        kernels.stream(x)
        return
    few = next(tokens for tokens in TOKENS if x.expects(tokens))
    tile = tile_for(x.k)
    warps = kernels.constant(_kernel, "ONE_WARPS")
    blocks = -(-x.n // (2 * tile.pairs * (warps // tile.split))), x.tiles(few)
    why = f"{x.why}; the rows are of one expert (up to {x.most(max(TOKENS))}), so none is looked for; "
    why += f"{tile.numbers} of the {x.k} numbers of a row of weights under way at once"
    launch(variant_of(few, x.out.dtype, x.epilogue, tile), blocks, 32 * warps, why=why, **x.fields())
