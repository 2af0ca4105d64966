"""The kernels of `quantization`, and which of them takes a call."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from cukern.formats.quantized import SMALLEST, SMALLEST_FP8
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.gpu import Gpu
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.rows import tile
from cukern.runtime.template import Packer, packer
from cukern.runtime.units import divisor

DTYPES = ("float32", "float16", "bfloat16")
#: "vector": 8 numbers at a time; "scalar": one.
VARIANTS = ("auto", "vector", "scalar")
#: Groups that a few lanes of a warp quantize; a block takes one of any other size.
GROUPS = (8, 16, 32, 64, 128, 256)

_groups = Kernel("quantization/quantize_groups", "quantize_groups")
_rows = Kernel("quantization/quantize_rows", "quantize_rows")
_magnitude = Kernel("quantization/largest_magnitude", "largest_magnitude")
_tensor = Kernel("quantization/quantize_tensor", "quantize_tensor")
_fp4 = Kernel("quantization/quantize_fp4", "quantize_fp4")
_read_fp4 = Kernel("quantization/dequantize_fp4", "dequantize_fp4")

_EACH = 8  # numbers of a unit, where sizes and addresses allow it; else 1
_GROUP_UNITS = 2  # most units of a group to a thread, which computes their scale once
_FP4_ITEMS = 4  # units of a thread; a unit has 16 numbers or, of float32, 8
_BLOCKS_PER_MULTIPROCESSOR, _MAGNITUDE_THREADS = 2, 1024
_READ_THREADS, _READ_ITEMS = 256, 4


def _items(dtype: str, activation: int, each: int) -> int:
    """Units of a thread: as many as are 64 bytes to load."""
    return 4 if each == 1 else max(1, 64 // (each * arrays.ITEM_SIZE[dtype] * (2 if activation else 1)))


def _group_units(dtype: str, activation: int, group: int) -> int:
    """Units of a group to a thread: few enough that eight neighbours load whole lines of 128 bytes."""
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
    # At import: what FP8 layers call. All else is compiled at its first use.
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


#: The fields that each call gives, in this order: of the rows, and of each kernel.
_ROWS = (
    "in.x", "in.counts", "in.stride", "in.rows", "in.max_tokens", "in.by_max_tokens.multiplier",
    "in.by_max_tokens.shift",
)  # fmt: skip
_SCALES = "scales.to", "scales.expert_stride", "scales.row_stride", "scales.group_stride"
_UPPER = "upper.array", "upper.number"
GROUPS_FIELDS = *_ROWS, "q", *_SCALES
BLOCK_FIELDS = *GROUPS_FIELDS, "azp", *_UPPER
MAGNITUDE_FIELDS = *_ROWS, "partial", "tiles"
TENSOR_FIELDS = (
    *_ROWS, "q", "scale_out", "azp_out", "scale.array", "scale.number", "azp", "partial", "partials", *_UPPER,
)  # fmt: skip
FP4_FIELDS = *_ROWS, "packed", "scales", "global.array", "global.number"
READ_FP4_FIELDS = "packed", "scales", "out", "global.array", "global.number", "units"


class Config(NamedTuple):
    """A kernel, with all that its launches for one decision share."""

    variant: Variant
    block: tuple[int, int, int]
    shared_bytes: int
    pack: Packer
    reason: str
    #: The grid: `blocks` x `chunks` blocks for each tile of `tile_rows` rows.
    tile_rows: int
    blocks: int
    chunks: int
    #: The scales of a row; whether they are column-major; whether each is found by a block.
    groups: int = 1
    column_major: bool = False
    by_block: bool = False
    #: Bytes of each part of the workspace.
    workspace: tuple[int, ...] = ()


class TensorConfig(NamedTuple):
    """The launches that quantize with one scale."""

    magnitude: Config | None  # the first pass, which finds the largest magnitude
    tensor: Config
    most_partials: int  # blocks of the first pass; each leaves a maximum
    workspace: tuple[int, ...]


def _config(
    variant: Variant, threads: int, names: tuple[str, ...], fixed: dict[str, Any], reason: str, tile_rows: int,
    blocks: int, chunks: int, *own: Any,
) -> Config:  # fmt: skip
    pack = packer(variant.instance.file, variant.instance.function, names, fixed)
    return Config(variant, (threads, 1, 1), 0, pack, reason, tile_rows, blocks, chunks, *own)


def _each(aligned: bool, numbers: int, variant: str, name: str) -> tuple[int, str]:
    """Numbers of a unit, 8 or 1, and why; 8 divides what divides `numbers`.

    Raises ValueError for a variant that does not take these arrays.
    """
    wide = aligned and numbers % _EACH == 0
    why = f"rows of {name} are not 16-byte aligned, or a row or a group is not a multiple of {_EACH}"
    check.one_of("variant", variant, VARIANTS)
    if variant == "vector" and not wide:
        check.fail("variant", "'auto' or 'scalar' here", f"'vector': {why}")
    if not wide:
        why = f"scalar, the slow general kernel: {why}; vector takes aligned rows of multiples of {_EACH}"
    else:
        why = f"vector: rows of {name} are 16-byte aligned multiples of {_EACH}"
    each = _EACH if wide and variant != "scalar" else 1
    return each, why if variant == "auto" else f"variant={variant!r} asks for it"


@functools.lru_cache(maxsize=4096)
def choose_groups(
    dtype: str, k: int, group: int, aligned: bool, *, activation: int = 0, form: str = "E4M3",
    smallest: float | None = None, power_of_two: bool = False, column_major: bool = False, variant: str = "auto",
    name: str = "x",
) -> Config:  # fmt: skip
    """The kernel that quantizes rows of `k` numbers with a scale for each `group` of them, or for each row.

    This is `per_token_group_quant_*`, `silu_and_mul_quant` without a scale, and `scaled_*_quant` with a scale for each
    token.

    Args:
        dtype: of the rows.
        group: divides k; 0 for one scale for each row.
        aligned: the addresses of the rows, the bytes between them and twice the address of the quantized numbers are
            multiples of 16.
        activation: its number (`runtime.activation.number`), 0 for none; with one a row has 2 * k numbers.
        form: "E4M3", "INT8", "INT8_CUT" or, with a zero point, "INT8_AZP".
        smallest: the least magnitude that a scale is made from. None: SMALLEST_FP8 for whole rows in E4M3, else
            SMALLEST.
        power_of_two: scales are rounded up to one.
        column_major: scales with the rows side by side in memory.
        variant: one of VARIANTS.
        name: what reasons and messages call the rows.

    Raises ValueError for a variant that does not take these rows.
    """
    each, why = _each(aligned, k | group, variant, name)
    items, groups = _items(dtype, activation, each), k // group if group else 1
    if smallest is None:
        smallest = float(SMALLEST_FP8 if form == "E4M3" and not group else SMALLEST)
    fixed: dict[str, Any] = {"smallest": smallest, "power_of_two": power_of_two}
    if each == _EACH and group in GROUPS:
        units = _group_units(dtype, activation, group)
        plan = tile(k // (each * units), items // units, group // (each * units))
        chosen = _groups_variant(dtype, form, activation, group)
        threads, tile_rows, blocks, chunks, fixed["tile"] = plan.threads, plan.rows, 1, plan.chunks, plan.fields
    else:
        columns = (group or k) // each
        threads = min(1024, max(1, -(-columns // (items * 32))) * 32)
        lanes_take = ", ".join(map(str, GROUPS))
        why += f"; a block for each group of {group} (a few lanes take {lanes_take})" if group else ""
        why += "" if group else "; a block for each row"
        chosen = _rows_variant(dtype, form, activation, each)
        tile_rows, blocks, chunks = 1, groups, 1
        fixed |= {"groups": groups, "by_groups": divisor(max(groups, 1)), "columns": columns}
    by_block = "groups" in fixed
    names, own = BLOCK_FIELDS if by_block else GROUPS_FIELDS, (groups, column_major, by_block)
    return _config(chosen, threads, names, fixed, why, tile_rows, blocks if groups else 0, chunks, *own)


@functools.lru_cache(maxsize=4096)
def choose_tensor(
    dtype: str, k: int, is_found: bool, aligned: bool, gpu: Gpu, *, is_empty: bool = False, activation: int = 0,
    form: str = "E4M3", variant: str = "auto", name: str = "x",
) -> TensorConfig:  # fmt: skip
    """The kernels that quantize rows of `k` numbers with one scale, given or found.

    This is `scaled_*_quant` without a scale for each token, and `silu_and_mul_quant` with a scale.

    Args:
        is_found: the largest magnitude decides the scale.
        is_empty: there is no row, or k is 0.

    `choose_groups` says the other arguments and the errors.
    """
    each, why = _each(aligned, k, variant, name)
    items, columns = _items(dtype, activation, each), k // each
    magnitude, most = None, 0
    if is_found and not is_empty:
        most = _BLOCKS_PER_MULTIPROCESSOR * gpu.multiprocessors
        plan = tile(columns, items, 1, _MAGNITUDE_THREADS)
        first = f"first pass, for the largest magnitude: {_BLOCKS_PER_MULTIPROCESSOR} blocks a multiprocessor at most"
        fixed: dict[str, Any] = {"chunks": plan.chunks, "tile": plan.fields}
        chosen = _magnitude_variant(dtype, each)
        reason = f"{first}; {why}"
        magnitude = _config(chosen, plan.threads, MAGNITUDE_FIELDS, fixed, reason, plan.rows, 1, plan.chunks)
        why = f"second pass, which reads the maximum of {{partials}} blocks; {why}"
    plan = tile(columns, items)
    fixed = {"smallest": float(SMALLEST_FP8), "tile": plan.fields}
    chosen = _tensor_variant(dtype, form, activation, each, is_found)
    tensor = _config(chosen, plan.threads, TENSOR_FIELDS, fixed, why, plan.rows, 1, plan.chunks)
    return TensorConfig(magnitude, tensor, most, (most * arrays.ITEM_SIZE["float32"],) if magnitude else ())


@functools.lru_cache(maxsize=1024)
def choose_fp4(dtype: str, k: int, form: str, group: int, aligned: bool, name: str) -> Config:
    """The kernel that quantizes rows of `k` numbers to 4 bits, with a scale for each `group`.

    `aligned`: the addresses of the rows and the bytes between them are multiples of 16. `form` is "MXFP4" or "NVFP4".
    """
    width, each = 16 if aligned else arrays.ITEM_SIZE[dtype], _fp4_each(dtype)
    plan = tile(k // each, _FP4_ITEMS, group // each)
    why = f"rows of {name} are 16-byte aligned: loads of {width} bytes"
    if width < 16:
        why = f"rows of {name} are not 16-byte aligned: loads of {width} bytes, which are slower"
    chosen, fixed = _fp4_variant(dtype, form, width), {"tile": plan.fields}
    return _config(chosen, plan.threads, FP4_FIELDS, fixed, why, plan.rows, 1 if k else 0, plan.chunks)


@functools.lru_cache(maxsize=1024)
def choose_read_fp4(dtype: str, form: str, aligned: bool) -> Config:
    """The kernel that reads numbers of 4 bits into `dtype`, with tiles of units of 8 numbers.

    `aligned`: the address of the packed numbers is a multiple of 4.
    """
    why = f"packed is {'' if aligned else 'not '}aligned to the {_EACH // 2} bytes of {_EACH} numbers"
    why += ": a load for all of them" if aligned else ": a load for each byte, which is slower"
    chosen = _read_fp4_variant(dtype, form, aligned)
    return _config(chosen, _READ_THREADS, READ_FP4_FIELDS, {}, why, _READ_THREADS * _READ_ITEMS, 1, 1)
