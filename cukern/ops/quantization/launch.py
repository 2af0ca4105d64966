"""The launches of `quantization`. They take addresses and numbers, allocate nothing and check nothing.

`x` is the address of `rows` rows, `stride` bytes apart. `counts` is 0, or the address of an int32 array [rows /
max_tokens]: the rows of an expert that are read and written. An expert has `max_tokens` rows, 1 without experts. A
scale is the address of a float32 or, where that is 0, a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from cukern.ops.quantization.choose import Config, TensorConfig
from cukern.runtime.arrays import Library
from cukern.runtime.launch import launch
from cukern.runtime.units import divisor

_NO_BOUND = float("inf")


def launch_groups(
    config: Config, library: Library, device: int, x: int, q: int, scales: int, rows: int, stride: int,
    counts: int = 0, max_tokens: int = 1, azp: int = 0, upper: int = 0, bound: float = _NO_BOUND,
) -> None:  # fmt: skip
    """Write quantized rows to `q` and their scales to `scales`, with a `config` of `choose_groups`.

    `azp` takes the zero points of INT8_AZP; `upper`, else `bound`, bounds the magnitudes that scales are made from.
    Column-major scales are [rows / max_tokens, groups, max_tokens].
    """
    _, _, _, _, _, tile_rows, blocks, chunks, groups, column_major, by_block, _ = config
    tiles = -(-rows // tile_rows) * blocks
    if tiles:
        multiplier, shift = divisor(max_tokens)
        between_rows, between_groups = (1, max_tokens) if column_major else (groups, 1)
        values: tuple[float, ...] = (  # of GROUPS_FIELDS
            x, counts, stride, rows, max_tokens, multiplier, shift, q, scales, max_tokens * groups, between_rows,
            between_groups,
        )  # fmt: skip
        if by_block:
            values += azp, upper, bound  # of BLOCK_FIELDS
        launch(config, library, device, (tiles, chunks, 1), values)


def launch_tensor(
    config: TensorConfig, library: Library, device: int, x: int, q: int, scale_out: int, rows: int, stride: int,
    workspace: Sequence[int] = (), counts: int = 0, max_tokens: int = 1, scale: int = 0, number: float = 1.0,
    azp: int = 0, azp_out: int = 0, upper: int = 0, bound: float = _NO_BOUND,
) -> None:  # fmt: skip
    """Write quantized rows to `q` and their one scale to `scale_out`, with a `config` of `choose_tensor`.

    `workspace` has the addresses of the parts that `config.workspace` asks for. The scale is `scale`, else `number`,
    unless it is found: then `upper`, else `bound`, bounds the magnitude that it is made from. `azp_out` takes the zero
    point `azp` of INT8_AZP.
    """
    magnitude, tensor, most_partials, _ = config
    multiplier, shift = divisor(max_tokens)
    partial = partials = 0
    if magnitude is not None:
        partial = workspace[0]
        tiles = -(-rows // magnitude.tile_rows) * magnitude.chunks
        partials = tiles if tiles < most_partials else most_partials
        values = x, counts, stride, rows, max_tokens, multiplier, shift, partial, tiles  # of MAGNITUDE_FIELDS
        launch(magnitude, library, device, (partials, 1, 1), values)
    # The scale is written also where there is nothing to quantize.
    grid = -(-rows // tensor.tile_rows) or 1, tensor.chunks, 1
    launch(tensor, library, device, grid, (  # of TENSOR_FIELDS
        x, counts, stride, rows, max_tokens, multiplier, shift, q, scale_out, azp_out, scale, number, azp, partial,
        partials, upper, bound,
    ))  # fmt: skip


def launch_fp4(
    config: Config, library: Library, device: int, x: int, packed: int, scales: int, rows: int, stride: int,
    scale: int = 0, number: float = 1.0,
) -> None:  # fmt: skip
    """Write rows in 4 bits to `packed` and their scales to `scales`; `scale`, else `number`, is the global scale."""
    tiles = -(-rows // config.tile_rows) * config.blocks
    if tiles:
        launch(config, library, device, (tiles, config.chunks, 1), (  # of FP4_FIELDS
            x, 0, stride, rows, 1, *divisor(1), packed, scales, scale, number,
        ))  # fmt: skip


def launch_read_fp4(
    config: Config, library: Library, device: int, packed: int, scales: int, out: int, units: int,
    scale: int = 0, number: float = 1.0,
) -> None:  # fmt: skip
    """Write to `out` the `units` times 8 numbers of `packed`; `scale`, else `number`, is the global scale."""
    if units:
        grid = -(-units // config.tile_rows), 1, 1
        launch(config, library, device, grid, (packed, scales, out, scale, number, units))  # of READ_FP4_FIELDS
