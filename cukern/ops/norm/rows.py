"""Describe arrays as rows for all norms, and choose the threads per row."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from cukern.reference import norm as twin
from cukern.runtime import arrays, check
from cukern.runtime.describe import Array, expect_strided
from cukern.runtime.plan import asked
from cukern.runtime.rows import MAX_ROW, MAX_ROWS
from cukern.runtime.vectors import divisor

DTYPES = ("float32", "float16", "bfloat16")
#: "specialized" is compiled for one width; it and "dynamic" load 16 bytes at a time. "scalar" loads single elements.
VARIANTS = ("auto", "specialized", "dynamic", "scalar")

_WARP = 32
_WARP_BLOCK = 256  # threads per block if at most one warp processes a row
_ITEMS = 4  # vectors of `twin.VECTOR` elements per thread if more than one warp processes a row


class Tile(NamedTuple):
    threads: int  # threads per row
    items: int  # vectors of `twin.VECTOR` elements in registers, per thread
    block: int  # threads per block


def tile(dtype: str, width: int, fixed: bool, wide: bool, group: int = 0) -> Tile:
    """Return the threads and registers for a row. `group` is the number of elements that share a scale, or 0."""
    vectors = max(1, -(-width // twin.VECTOR))
    if vectors > twin.COLUMNS:
        # A register holds two 16-bit elements of a 16-byte load, but only one element that is loaded alone.
        return Tile(twin.COLUMNS, 2 if wide and arrays.ITEM_SIZE[dtype] == 2 else 1, twin.COLUMNS)
    columns = 1 << (vectors - 1).bit_length()
    threads = columns // 2 if columns <= 2 * _WARP else max(columns // _ITEMS, _WARP)
    threads = max(threads, group // twin.VECTOR, 1)
    return Tile(threads, -(-(vectors if fixed else columns) // threads), threads if threads > _WARP else _WARP_BLOCK)


# --- rows ---------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Arrays of the same shape [..., width], described as arrays [outer, inner, width]."""

    total: int  # outer * inner
    inner: int
    strides: list[tuple[int, int] | None]  # outer and inner, in elements


def _common_stride(lengths: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the stride of several dimensions merged into one; None if they cannot be merged."""
    common, next_stride = 0, None
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length == 1:
            continue
        if next_stride is None:
            common = stride
        elif stride != next_stride:
            return None
        next_stride = stride * length
    return common


def rows_of(**given: Array | None) -> Rows:
    """Describe arrays of the same shape as rows. Raises ValueError if an array needs more than two strides."""
    first = next(array for array in given.values() if array is not None)
    lengths = first.shape[:-1]
    total = math.prod(lengths)
    found: list[tuple[int, int] | None]
    for split in range(len(lengths), 0, -1) if lengths else (0,):
        found = []
        for array in given.values():
            if array is None:
                found.append(None)
                continue
            dimension_ranges = (0, split), (split, len(lengths))
            merged = [_common_stride(lengths[i:j], array.strides[i:j]) for i, j in dimension_ranges]
            if None in merged:
                break
            found.append((merged[0], merged[1]))  # type: ignore[arg-type]
        if len(found) == len(given):
            return Rows(total, math.prod(lengths[split:]), found)
    name, array = next((name, x) for name, x in given.items() if x is not None and not x.is_contiguous)
    wanted = "of rows with at most two strides, and those over the same dimensions as in the other arrays"
    check.fail(name, wanted, f"strides {array.strides}")


class Layout(NamedTuple):
    total: int
    wide: bool  # whether all arrays allow loads of 16 bytes
    fields: dict[str, Any]  # of the kernel's Params


def layout(width: int, vectors: Collection[Array | None], **given: Array | None) -> Layout:
    """Return the kernel's fields for rows. `given` maps fields to arrays; `vectors` are arrays [width] or None."""
    total, inner, strides = rows_of(**given)
    name = next(iter(given))
    if total > MAX_ROWS:
        check.fail(name, f"of at most {MAX_ROWS} rows", total)
    fields: dict[str, Any] = {}
    wide = width % twin.VECTOR == 0 and all(vector is None or vector.alignment == 16 for vector in vectors)
    for (name, array), pair in zip(given.items(), strides, strict=True):
        if array is None or pair is None:
            fields[name] = None
            continue
        load_bytes, in_bytes = twin.VECTOR if array.item_size == 1 else 16, [x * array.item_size for x in pair]
        wide = wide and array.alignment >= load_bytes and all(x % load_bytes == 0 for x in in_bytes)
        fields[name] = (array, *in_bytes)
    sizes = {"rows": total, "inner": inner, "by_inner": divisor(max(inner, 1)), "width": width}
    return Layout(total, wide, fields | sizes | {"per_width": 1 / max(width, 1)})


def blocks(rows: int, tile: Tile) -> int:
    return max(1, -(-rows // (tile.block // tile.threads)))


def is_fixed(variant: str, width: int, wide: bool, registered: Collection[int]) -> bool:
    """Return whether a specialized variant is used."""
    known = wide and width in registered
    if variant == "specialized" and not known:
        why = f"there is none for width {width}, or rows are not 16-byte aligned (cukern.specialize adds one)"
        check.fail("variant", "'auto', 'dynamic' or 'scalar' here", f"'specialized': {why}")
    if variant == "dynamic" and not wide:
        why = f"rows, the weight or the bias are not 16-byte aligned, or width is not a multiple of {twin.VECTOR}"
        check.fail("variant", "'auto' or 'scalar' here", f"'dynamic': {why}")
    return known and variant in ("auto", "specialized")


def reason(variant: str, dtype: str, width: int, wide: bool, fixed: bool, models: Mapping[int, str]) -> str:
    """Return why a launch uses its instance. `models` maps widths to models."""
    if fixed:
        return f"{asked(variant, '; ')}specialized for width {width} ({models.get(width, 'by cukern.specialize')})"
    if variant != "auto":
        return asked(variant)
    if wide:
        add = f'cukern.specialize("rms_norm", width={width}, dtype={dtype!r}) compiles one of each norm'
        return f"dynamic, loads of 16 bytes: no specialized instance has width {width}; {add}"
    why = f"width {width} is not a multiple of {twin.VECTOR}"
    if width % twin.VECTOR == 0:
        why = "rows, the weight or the bias are not 16-byte aligned"
    return f"scalar, the slow general kernel: {why}, as the faster kernels need"


# --- checks -------------------------------------------------------------------------------------------


def width_of(name: str, array: Array) -> int:
    if not array.shape:
        check.dimensions(name, array.shape, ("...", "width"))
    width = int(array.shape[-1])
    if width > MAX_ROW:
        check.fail(name, f"of rows of at most {MAX_ROW} elements", width)
    expect_rows(name, array)
    return width


def expect_rows(name: str, array: Array, written: bool = False) -> None:
    """Raise ValueError unless each row is contiguous and, if `written`, no two rows overlap."""
    width, strides = array.shape[-1], array.strides
    is_strided = strides[-1] != 1 and width > 1
    overlap = written and any(abs(x) < width and n != 1 for x, n in zip(strides[:-1], array.shape[:-1], strict=True))
    if (is_strided or overlap) and all(n != 0 for n in array.shape):
        wanted = "contiguous along its last dimension" if is_strided else "of rows that do not overlap"
        check.fail(name, wanted, f"strides {strides} (in elements)")


def expect_like(name: str, array: Any, input: Array, written: bool = True) -> Array:
    expect_strided(name, array, input, "input", (input.dtype,), input.shape, "[..., width]")
    expect_rows(name, array, written)
    return array


def expect_epsilon(epsilon: Any) -> float:
    if check.number("epsilon", epsilon) < 0:
        check.fail("epsilon", "a number of at least 0", epsilon)
    return float(epsilon)
