"""The kernels of `quantization`: their variants, and their launches on checked rows."""

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
#: "vector" processes 8 elements at a time, "scalar" processes one element at a time.
VARIANTS = ("auto", "vector", "scalar")
#: The group sizes for which a few lanes of a warp quantize a group. With any other size a whole block quantizes it.
GROUPS = (8, 16, 32, 64, 128, 256)

_groups = Kernel("quantization/quantize_groups", "quantize_groups")
_rows = Kernel("quantization/quantize_rows", "quantize_rows")
_magnitude = Kernel("quantization/largest_magnitude", "largest_magnitude")
_tensor = Kernel("quantization/quantize_tensor", "quantize_tensor")
_fp4 = Kernel("quantization/quantize_fp4", "quantize_fp4")
_read_fp4 = Kernel("quantization/dequantize_fp4", "dequantize_fp4")

_EACH = 8  # elements of a unit, if sizes and addresses allow it; otherwise a unit is one element
_GROUP_UNITS = 2  # the largest number of units of one group that a thread quantizes
_FP4_ITEMS = 4  # units per thread; a unit is 16 elements of a 16-bit dtype, or 8 of float32
_BLOCKS_PER_MULTIPROCESSOR, _MAGNITUDE_THREADS = 2, 1024
_READ_THREADS, _READ_ITEMS = 256, 4
#: A scale: a pair of an array (or None if there is no array) and a number, which is used without an array.
Scale = tuple[Array | None, Any]
_NO_BOUND: Scale = (None, float("inf"))


def _items(dtype: str, activation: int, each: int) -> int:
    """Return the units per thread: four single elements, or units of `each` elements that add up to 64 loaded bytes."""
    return 4 if each == 1 else max(1, 64 // (each * arrays.ITEM_SIZE[dtype] * (2 if activation else 1)))


def _group_units(dtype: str, activation: int, group: int) -> int:
    """Return how many units of a group one thread quantizes: few enough that eight threads load a 128-byte line."""
    return max(1, min(_GROUP_UNITS, group // (8 * _EACH), _items(dtype, activation, _EACH)))


def _groups_variant(dtype: str, form: str, activation: int, group: int) -> Variant:
    units = _group_units(dtype, activation, group)
    items = _items(dtype, activation, _EACH) // units
    return _groups.variant(arrays.CUDA_TYPE[dtype], form, activation, group, units, items)


def _rows_variant(dtype: str, form: str, activation: int, each: int) -> Variant:
    return _rows.variant(arrays.CUDA_TYPE[dtype], form, activation, each, _items(dtype, activation, each))


def _magnitude_variant(dtype: str, each: int) -> Variant:
    return _magnitude.variant(arrays.CUDA_TYPE[dtype], each, _items(dtype, 0, each))


def _tensor_variant(dtype: str, form: str, activation: int, each: int, dynamic: bool) -> Variant:
    items = _items(dtype, activation, each)
    return _tensor.variant(arrays.CUDA_TYPE[dtype], form, activation, each, items, str(dynamic).lower())


def _fp4_each(dtype: str) -> int:
    return 2 * _EACH if arrays.ITEM_SIZE[dtype] == 2 else _EACH


def _fp4_variant(dtype: str, form: str, width: int) -> Variant:
    each = _fp4_each(dtype)
    return _fp4.variant(arrays.CUDA_TYPE[dtype], form, each, width, _FP4_ITEMS)


def _read_fp4_variant(dtype: str, form: str, aligned: bool) -> Variant:
    return _read_fp4.variant(arrays.CUDA_TYPE[dtype], form, str(aligned).lower(), _READ_THREADS, _READ_ITEMS)


def _list_instances() -> None:
    # The instances of FP8 layers are compiled at import, all others at their first use.
    silu, bfloat16 = activations.number("silu"), "bfloat16"
    _groups.at_import = [_groups_variant(bfloat16, "E4M3", activation, 128).instance for activation in (0, silu)]
    _rows.at_import = [_rows_variant(bfloat16, "E4M3", activation, _EACH).instance for activation in (0, silu)]
    _magnitude.at_import = [_magnitude_variant(bfloat16, _EACH).instance]
    _tensor.at_import = [_tensor_variant(bfloat16, "E4M3", 0, _EACH, dynamic).instance for dynamic in (False, True)]
    for dtype in DTYPES:
        for activation in (0, silu):
            _groups.specialized += [_groups_variant(dtype, "E4M3", activation, group).instance for group in (64, 128)]
            _rows.specialized.append(_rows_variant(dtype, "E4M3", activation, _EACH).instance)
            _tensor.specialized.append(_tensor_variant(dtype, "E4M3", activation, _EACH, False).instance)
        _groups.specialized += [_groups_variant(dtype, form, 0, 128).instance for form in ("INT8", "INT8_CUT")]
        _rows.specialized += [_rows_variant(dtype, form, 0, _EACH).instance for form in ("INT8", "INT8_AZP")]
        _tensor.specialized += [_tensor_variant(dtype, form, 0, _EACH, False).instance for form in ("INT8", "INT8_AZP")]
        _tensor.specialized.append(_tensor_variant(dtype, "E4M3", 0, _EACH, True).instance)
        _magnitude.specialized.append(_magnitude_variant(dtype, _EACH).instance)
        _fp4.specialized += [_fp4_variant(dtype, form, 16).instance for form in ("MXFP4", "NVFP4")]
        _read_fp4.specialized += [_read_fp4_variant(dtype, form, True).instance for form in ("MXFP4", "NVFP4")]


_list_instances()


class Input(NamedTuple):
    """The rows to quantize, from the argument `name`. With a gated activation the result rows are half as long."""

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
        """The fields of the template's Rows."""
        rows, batch = self.rows, max(self.rows.batch, 1)
        distance = rows.distance * self.x.item_size
        return {"in": (self.x, rows.counts, distance, rows.total, batch, divisor(batch))}

    def each(self, q: Array, group: int) -> tuple[int, str]:
        """Return the elements per unit, 8 or 1, and the reason. Raises ValueError for a variant that cannot be used."""
        x, name = self.x, self.name
        wide = x.alignment == 16 and q.alignment >= _EACH and self.rows.distance * x.item_size % 16 == 0
        wide = wide and (self.k | group) % _EACH == 0
        why = f"rows of {name} are not 16-byte aligned, or a row or a group is not a multiple of {_EACH}"
        check.one_of("variant", self.variant, VARIANTS)
        if self.variant == "vector" and not wide:
            check.fail("variant", "'auto' or 'scalar' here", f"'vector': {why}")
        if not wide:
            why = f"scalar, the slow general kernel: {why}; vector takes aligned rows of multiples of {_EACH}"
        else:
            why = f"vector: rows of {name} are 16-byte aligned multiples of {_EACH}"
        return _EACH if wide and self.variant != "scalar" else 1, asked(self.variant) or why


def quantize_groups(
    of: Input, form: str, group: int, q: Array, s: Array, smallest: float, *, power_of_two: bool = False,
    column_major: bool = False, upper: Scale | None = None, azp: Array | None = None,
) -> None:  # fmt: skip
    """Quantize with one scale for every `group` neighbouring elements of a row. A `group` of 0 is a whole row."""
    dtype, activation, k, total = of.x.dtype, of.activation, of.k, of.rows.total
    if total == 0 or (group and k == 0):
        check.one_of("variant", of.variant, VARIANTS)
        return
    each, why = of.each(q, group)
    items, groups = _items(dtype, activation, each), k // group if group else 1
    if column_major:
        of = of._replace(rows=of.rows._replace(batch=of.x.shape[-2]))
    batch = of.rows.batch
    fields = {**of.fields, "q": q, "smallest": smallest, "power_of_two": bool(power_of_two)}
    fields["scales"] = (s, batch * groups, *((1, batch) if column_major else (groups, 1)))
    if each == _EACH and group in GROUPS:
        units = _group_units(dtype, activation, group)
        plan = tile(k // (each * units), items // units, group // (each * units))
        grid = ceil_div(total, plan.rows), plan.chunks
        variant = _groups_variant(dtype, form, activation, group)
        launch(variant, grid, plan.threads, why=why, **fields, tile=plan.fields)
        return
    blocks, columns = total * groups, (group or k) // each
    if blocks > MAX_ROWS:
        check.fail(of.name, f"of at most {MAX_ROWS} groups of such a size", blocks)
    threads = min(1024, max(1, -(-columns // (items * 32))) * 32)
    fields |= {"azp": azp, "upper": upper or _NO_BOUND, "groups": groups, "by_groups": divisor(groups)}
    lanes_take = ", ".join(map(str, GROUPS))
    why += f"; a block for each group of {group} (a few lanes take {lanes_take})" if group else "; a block for each row"
    launch(_rows_variant(dtype, form, activation, each), blocks, threads, why=why, **fields, columns=columns)


def quantize_tensor(
    of: Input, form: str, q: Array, s: Array, scale: Scale | None, *, upper: Scale | None = None,
    azp: Array | None = None, azp_out: Array | None = None,
) -> None:  # fmt: skip
    """Quantize with one scale: `scale`, or the scale of the largest magnitude if `scale` is None."""
    dtype, activation, k, total, fields = of.x.dtype, of.activation, of.k, of.rows.total, of.fields
    each, why = of.each(q, 0)
    items, columns = _items(dtype, activation, each), k // each
    partial, partials = None, 0
    if scale is None and total > 0 and k:
        plan = tile(columns, items, 1, _MAGNITUDE_THREADS)
        tiles = ceil_div(total, plan.rows) * plan.chunks
        most = _BLOCKS_PER_MULTIPROCESSOR * of.x.gpu.multiprocessors
        partial, partials = empty((most,), "float32"), min(tiles, most)
        own = {**fields, "partial": partial, "tiles": tiles, "chunks": plan.chunks, "tile": plan.fields}
        first = f"first pass, for the largest magnitude: {_BLOCKS_PER_MULTIPROCESSOR} blocks a multiprocessor at most"
        launch(_magnitude_variant(dtype, each), partials, plan.threads, why=f"{first}; {why}", **own)
        why = f"second pass, which reads the maximum of {partials} blocks; {why}"
    plan = tile(columns, items)
    fields |= {"q": q, "scale_out": s, "azp_out": azp_out, "scale": scale or (None, 1.0), "azp": azp}
    fields |= {"upper": upper or _NO_BOUND, "partial": partial, "partials": partials, "tile": plan.fields}
    variant = _tensor_variant(dtype, form, activation, each, scale is None)
    # The scale is written even if there is nothing to quantize.
    grid = ceil_div(total, plan.rows) if total > 0 else 1, plan.chunks
    launch(variant, grid, plan.threads, why=why, **fields, smallest=float(SMALLEST_FP8))


def quantize_fp4(of: Input, form: str, group: int, packed: Array, scales: Array, global_scale: Scale) -> None:
    """Quantize rows of whole groups to 4 bits."""
    x, rows = of.x, of.rows
    if rows.total == 0 or rows.size == 0:
        return
    width = 16 if x.alignment == 16 and rows.distance * x.item_size % 16 == 0 else x.item_size
    each = _fp4_each(x.dtype)
    plan = tile(rows.size // each, _FP4_ITEMS, group // each)
    fields = {**of.fields, "packed": packed, "scales": scales, "global": global_scale, "tile": plan.fields}
    grid = ceil_div(rows.total, plan.rows), plan.chunks
    why = f"rows of {of.name} are 16-byte aligned: loads of {width} bytes"
    if width < 16:
        why = f"rows of {of.name} are not 16-byte aligned: loads of {width} bytes, which are slower"
    launch(_fp4_variant(x.dtype, form, width), grid, plan.threads, why=why, **fields)


def dequantize_fp4(packed: Array, scales: Array, form: str, out: Array, global_scale: Scale) -> None:
    """Unpack 4-bit numbers, and write their values to `out`."""
    units = packed.size // (_EACH // 2)
    if units == 0:
        return
    fields = {"packed": packed, "scales": scales, "out": out, "global": global_scale, "units": units}
    aligned = packed.alignment >= _EACH // 2
    variant = _read_fp4_variant(out.dtype, form, aligned)
    why = f"packed is {'' if aligned else 'not '}aligned to the {_EACH // 2} bytes of {_EACH} numbers"
    why += ": a load for all of them" if aligned else ": a load for each byte, which is slower"
    launch(variant, ceil_div(units, _READ_THREADS * _READ_ITEMS), _READ_THREADS, why=why, **fields)
