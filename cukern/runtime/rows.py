"""Rows of equal length with one stride, and their tiles for elementwise kernels."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from cukern.runtime import check
from cukern.runtime.arrays import strides_of
from cukern.runtime.describe import Array, expect
from cukern.runtime.vectors import divisor

#: The kernels count rows in 31 bits, and round up to whole tiles.
MAX_ROWS = 2**31 - 2**12
#: The most elements of a row. A grid has at most 2^16 - 1 chunks of 256 vectors, and a vector may be one element.
MAX_ROW = (2**16 - 1) * 256


class Rows(NamedTuple):
    total: int
    size: int
    distance: int  # row stride in elements
    batch: int  # rows of each expert with `counts`, else 1
    counts: Any  # int32 [experts], used rows; None: all


def rows_of(name: str, array: Array, expert_num_tokens: Any = None) -> Rows:
    """Describe `array` as rows. With expert_num_tokens it is [experts, max_tokens, size].

    Raises ValueError unless rows are contiguous with one stride.
    """
    shape, all_strides, batch, counts = array.shape, array.strides, 1, None
    if not shape:
        check.dimensions(name, shape, ("...", "size"))
    size = distance = shape[-1]
    if size > MAX_ROW:
        check.fail(name, f"of rows of at most {MAX_ROW} elements", size)
    # The stride of a dimension of size 1 does not matter.
    outer = [(n, stride) for n, stride in zip(shape[:-1], all_strides, strict=False) if n != 1]
    lengths, strides = [n for n, _ in outer], (*(stride for _, stride in outer), all_strides[-1])
    count = math.prod(lengths)
    if count > MAX_ROWS:
        check.fail(name, f"of at most {MAX_ROWS} rows", count)
    if strides == strides_of((*lengths, size)):
        pass
    elif count > 1 and size:
        fits, span = all_strides[-1] == 1 or size == 1, 0
        for length, stride in reversed(outer):
            if length > 1:
                if not span:
                    distance = span = stride
                fits, span = fits and stride == span, stride * length
        if not fits or distance < 0:
            wanted = "contiguous along its last dimension, with all rows at one distance"
            check.fail(name, wanted, f"strides {all_strides} (in elements)")
    elif size > 1 and count and all_strides[-1] != 1:
        check.fail(name, "contiguous along its last dimension", f"strides {all_strides} (in elements)")
    if expert_num_tokens is not None:
        check.dimensions(name, shape, ("experts", "max_tokens", "size"))
        batch = shape[-2]
        counts = expect("expert_num_tokens", expert_num_tokens, array, name, ("int32",), shape[:1], "[experts]")
    return Rows(count, size, distance, batch, counts)


class Tile(NamedTuple):
    """The elements of one block: `rows` whole rows, or one of the `chunks` of a long row."""

    threads: int
    rows: int
    chunks: int
    geometry: tuple[int, ...]  # columns, tile_rows, tile_columns, Divisor by threads per row

    @property
    def fields(self) -> dict[str, Any]:
        columns, tile_rows, tile_columns, *by_threads = self.geometry
        return {
            "columns": columns,
            "tile_rows": tile_rows,
            "tile_columns": tile_columns,
            "by_threads": tuple(by_threads),
        }


@functools.lru_cache(maxsize=1024)
def tile(columns: int, items: int, lanes: int = 1, most_threads: int = 256) -> Tile:
    """Return the tile for rows of `columns` vectors, with `items` vectors per thread, and a multiple of `lanes` threads
    per row."""
    chunks = max(1, -(-columns // (most_threads * items)))
    row_threads = max(1, -(-columns // (chunks * items * lanes))) * lanes
    rows = most_threads // row_threads if chunks == 1 else 1
    threads = -(-rows * row_threads // 32) * 32
    return Tile(threads, rows, chunks, (columns, rows, row_threads * items, *divisor(row_threads)))
