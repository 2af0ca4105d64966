"""The kernels of `quantization`, their variants and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.formats.quantized import SMALLEST_FP8
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.describe import Array
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.plan import asked, empty, launch
from cukern.runtime.rows import MAX_ROWS, Rows, tile
from cukern.runtime.vectors import ceil_div, divisor

DTYPES = ("float32", "float16", "bfloat16")
#: "vector" processes 8 elements at a time, "scalar" one.
VARIANTS = ("auto", "vector", "scalar")
#: A group of one of these sizes is quantized by a few lanes of a warp. Any other group is quantized by a block.
GROUPS = (8, 16, 32, 64, 128, 256)

_groups = Kernel("quantization/quantize_groups", "quantize_groups")
_rows = Kernel("quantization/quantize_rows", "quantize_rows")
_magnitude = Kernel("quantization/largest_magnitude", "largest_magnitude")
_tensor = Kernel("quantization/quantize_tensor", "quantize_tensor")
_fp4 = Kernel("quantization/quantize_fp4", "quantize_fp4")
_read_fp4 = Kernel("quantization/dequantize_fp4", "dequantize_fp4")

_VECTOR = 8  # elements per vector, if sizes and addresses allow it; otherwise one
_GROUP_VECTORS = 2  # vectors of one group that a thread quantizes, at most
_FP4_ITEMS = 4  # vectors per thread
_BLOCKS_PER_MULTIPROCESSOR, _MAGNITUDE_THREADS = 2, 1024
_READ_THREADS, _READ_ITEMS = 256, 4
#: Either (an array of one element, 1.0), or (None, a number).
Scale = tuple[Array | None, Any]
_NO_BOUND: Scale = (None, float("inf"))


def _items(dtype: str, activation: int, vector: int) -> int:
    """Return the number of vectors per thread: 4 if a vector is one element, otherwise as many as load 64 bytes."""
    return 4 if vector == 1 else max(1, 64 // (vector * arrays.ITEM_SIZE[dtype] * (2 if activation else 1)))


def _group_vectors(dtype: str, activation: int, group: int) -> int:
    """Return how many vectors of a group a thread quantizes: so few that eight threads load a line of 128 bytes."""
    return max(1, min(_GROUP_VECTORS, group // (8 * _VECTOR), _items(dtype, activation, _VECTOR)))


def _groups_variant(dtype: str, fmt: str, activation: int, group: int) -> Variant:
    vectors = _group_vectors(dtype, activation, group)
    items = _items(dtype, activation, _VECTOR) // vectors
    return _groups.variant(arrays.CUDA_TYPE[dtype], fmt, activation, group, vectors, items)


def _rows_variant(dtype: str, fmt: str, activation: int, vector: int) -> Variant:
    return _rows.variant(arrays.CUDA_TYPE[dtype], fmt, activation, vector, _items(dtype, activation, vector))


def _magnitude_variant(dtype: str, vector: int) -> Variant:
    return _magnitude.variant(arrays.CUDA_TYPE[dtype], vector, _items(dtype, 0, vector))


def _tensor_variant(dtype: str, fmt: str, activation: int, vector: int, dynamic: bool) -> Variant:
    items = _items(dtype, activation, vector)
    return _tensor.variant(arrays.CUDA_TYPE[dtype], fmt, activation, vector, items, dynamic)


def _fp4_vector(dtype: str) -> int:
    return 2 * _VECTOR if arrays.ITEM_SIZE[dtype] == 2 else _VECTOR


def _fp4_variant(dtype: str, fmt: str, width: int) -> Variant:
    vector = _fp4_vector(dtype)
    return _fp4.variant(arrays.CUDA_TYPE[dtype], fmt, vector, width, _FP4_ITEMS)


def _read_fp4_variant(dtype: str, fmt: str, aligned: bool) -> Variant:
    return _read_fp4.variant(arrays.CUDA_TYPE[dtype], fmt, aligned, _READ_THREADS, _READ_ITEMS)


def _list_instances() -> None:
    # The instances of FP8 layers are compiled at import.
    silu, bfloat16 = activations.number("silu"), "bfloat16"
    _groups.at_import = [_groups_variant(bfloat16, "E4M3", activation, 128).instance for activation in (0, silu)]
    _rows.at_import = [_rows_variant(bfloat16, "E4M3", activation, _VECTOR).instance for activation in (0, silu)]
    _magnitude.at_import = [_magnitude_variant(bfloat16, _VECTOR).instance]
    _tensor.at_import = [_tensor_variant(bfloat16, "E4M3", 0, _VECTOR, dynamic).instance for dynamic in (False, True)]
    for dtype in DTYPES:
        for activation in (0, silu):
            _groups.specialized += [_groups_variant(dtype, "E4M3", activation, group).instance for group in (64, 128)]
            _rows.specialized.append(_rows_variant(dtype, "E4M3", activation, _VECTOR).instance)
            _tensor.specialized.append(_tensor_variant(dtype, "E4M3", activation, _VECTOR, False).instance)
        _groups.specialized += [_groups_variant(dtype, fmt, 0, 128).instance for fmt in ("INT8", "INT8_TRUNCATE")]
        _rows.specialized += [_rows_variant(dtype, fmt, 0, _VECTOR).instance for fmt in ("INT8", "INT8_AZP")]
        _tensor.specialized += [_tensor_variant(dtype, fmt, 0, _VECTOR, False).instance for fmt in ("INT8", "INT8_AZP")]
        _tensor.specialized.append(_tensor_variant(dtype, "E4M3", 0, _VECTOR, True).instance)
        _magnitude.specialized.append(_magnitude_variant(dtype, _VECTOR).instance)
        _fp4.specialized += [_fp4_variant(dtype, fmt, 16).instance for fmt in ("MXFP4", "NVFP4")]
        _read_fp4.specialized += [_read_fp4_variant(dtype, fmt, True).instance for fmt in ("MXFP4", "NVFP4")]


_list_instances()


class Input(NamedTuple):
    """The rows to quantize. With a gated activation, an input row is twice as long as a row of the result."""

    name: str
    x: Array
    rows: Rows
    variant: str
    activation: int = 0

    @property
    def k(self) -> int:
        return self.rows.size // 2 if self.activation else self.rows.size

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the CUDA struct `Rows`."""
        rows, batch = self.rows, max(self.rows.batch, 1)
        distance = rows.distance * self.x.item_size
        return {"in": (self.x, rows.counts, distance, rows.total, batch, divisor(batch))}

    def vector(self, q: Array, group: int) -> tuple[int, str]:
        """Return the elements per vector, and the reason. Raises ValueError for a variant that cannot be used."""
        x, name = self.x, self.name
        wide = x.alignment == 16 and q.alignment >= _VECTOR and self.rows.distance * x.item_size % 16 == 0
        wide = wide and (self.k | group) % _VECTOR == 0
        why = f"rows of {name} are not 16-byte aligned, or a row or a group is not a multiple of {_VECTOR}"
        check.one_of("variant", self.variant, VARIANTS)
        if self.variant == "vector" and not wide:
            check.fail("variant", "'auto' or 'scalar' here", f"'vector': {why}")
        if not wide:
            why = f"scalar, the slow general kernel: {why}; vector takes aligned rows of multiples of {_VECTOR}"
        else:
            why = f"vector: rows of {name} are 16-byte aligned multiples of {_VECTOR}"
        return _VECTOR if wide and self.variant != "scalar" else 1, asked(self.variant) or why


def quantize_groups(
    source: Input, fmt: str, group: int, q: Array, s: Array, smallest: float, *, power_of_two: bool = False,
    column_major: bool = False, upper: Scale | None = None, azp: Array | None = None,
) -> None:  # fmt: skip
    """Quantize with one scale per `group` neighbouring elements of a row, or with one scale per row if `group` is 0."""
    dtype, activation, k, total = source.x.dtype, source.activation, source.k, source.rows.total
    if total == 0 or (group and k == 0):
        check.one_of("variant", source.variant, VARIANTS)
        return
    vector, why = source.vector(q, group)
    items, groups = _items(dtype, activation, vector), k // group if group else 1
    if column_major:
        source = source._replace(rows=source.rows._replace(batch=source.x.shape[-2]))
    batch = source.rows.batch
    fields = {**source.fields, "q": q, "smallest": smallest, "power_of_two": bool(power_of_two)}
    fields["scales"] = (s, batch * groups, *((1, batch) if column_major else (groups, 1)))
    if vector == _VECTOR and group in GROUPS:
        vectors = _group_vectors(dtype, activation, group)
        plan = tile(k // (vector * vectors), items // vectors, group // (vector * vectors))
        grid = ceil_div(total, plan.rows), plan.chunks
        variant = _groups_variant(dtype, fmt, activation, group)
        launch(variant, grid, plan.threads, why=why, **fields, tile=plan.fields)
        return
    blocks, columns = total * groups, (group or k) // vector
    if blocks > MAX_ROWS:
        check.fail(source.name, f"of at most {MAX_ROWS} groups of such a size", blocks)
    threads = min(1024, max(1, -(-columns // (items * 32))) * 32)
    fields |= {"azp": azp, "upper": upper or _NO_BOUND, "groups": groups, "by_groups": divisor(groups)}
    lanes_take = ", ".join(map(str, GROUPS))
    why += f"; a block for each group of {group} (a few lanes take {lanes_take})" if group else "; a block for each row"
    launch(_rows_variant(dtype, fmt, activation, vector), blocks, threads, why=why, **fields, columns=columns)


def quantize_tensor(
    source: Input, fmt: str, q: Array, s: Array, scale: Scale | None, *, upper: Scale | None = None,
    azp: Array | None = None, azp_out: Array | None = None,
) -> None:  # fmt: skip
    """Quantize with `scale`. If it is None, compute a scale from the largest magnitude."""
    dtype, activation, k, total, fields = source.x.dtype, source.activation, source.k, source.rows.total, source.fields
    vector, why = source.vector(q, 0)
    items, columns = _items(dtype, activation, vector), k // vector
    partial, partials = None, 0
    if scale is None and total > 0 and k:
        plan = tile(columns, items, 1, _MAGNITUDE_THREADS)
        tiles = ceil_div(total, plan.rows) * plan.chunks
        max_blocks = _BLOCKS_PER_MULTIPROCESSOR * source.x.gpu.multiprocessors
        partial, partials = empty((max_blocks,), "float32"), min(tiles, max_blocks)
        pass_fields = {**fields, "partial": partial, "tiles": tiles, "tiles_per_row": plan.chunks, "tile": plan.fields}
        first = f"first pass, for the largest magnitude: {_BLOCKS_PER_MULTIPROCESSOR} blocks a multiprocessor at most"
        launch(_magnitude_variant(dtype, vector), partials, plan.threads, why=f"{first}; {why}", **pass_fields)
        why = f"second pass, which reads the maximum of {partials} blocks; {why}"
    plan = tile(columns, items)
    fields |= {"q": q, "scale_out": s, "azp_out": azp_out, "scale": scale or (None, 1.0), "azp": azp}
    fields |= {"upper": upper or _NO_BOUND, "partial": partial, "partials": partials, "tile": plan.fields}
    variant = _tensor_variant(dtype, fmt, activation, vector, scale is None)
    # The scale is written even if there are no elements.
    grid = ceil_div(total, plan.rows) if total > 0 else 1, plan.chunks
    launch(variant, grid, plan.threads, why=why, **fields, smallest=float(SMALLEST_FP8))


def quantize_fp4(source: Input, fmt: str, group: int, packed: Array, scales: Array, global_scale: Scale) -> None:
    x, rows = source.x, source.rows
    if rows.total == 0 or rows.size == 0:
        return
    width = 16 if x.alignment == 16 and rows.distance * x.item_size % 16 == 0 else x.item_size
    vector = _fp4_vector(x.dtype)
    plan = tile(rows.size // vector, _FP4_ITEMS, group // vector)
    fields = {**source.fields, "packed": packed, "scales": scales, "global": global_scale, "tile": plan.fields}
    grid = ceil_div(rows.total, plan.rows), plan.chunks
    why = f"rows of {source.name} are 16-byte aligned: loads of {width} bytes"
    if width < 16:
        why = f"rows of {source.name} are not 16-byte aligned: loads of {width} bytes, which are slower"
    launch(_fp4_variant(x.dtype, fmt, width), grid, plan.threads, why=why, **fields)


def dequantize_fp4(packed: Array, scales: Array, fmt: str, out: Array, global_scale: Scale) -> None:
    vectors = packed.size // (_VECTOR // 2)
    if vectors == 0:
        return
    fields = {"packed": packed, "scales": scales, "out": out, "global": global_scale, "vectors": vectors}
    aligned = packed.alignment >= _VECTOR // 2
    variant = _read_fp4_variant(out.dtype, fmt, aligned)
    why = f"packed is {'' if aligned else 'not '}aligned to the {_VECTOR // 2} bytes of {_VECTOR} numbers"
    why += ": a load for all of them" if aligned else ": a load for each byte, which is slower"
    launch(variant, ceil_div(vectors, _READ_THREADS * _READ_ITEMS), _READ_THREADS, why=why, **fields)
