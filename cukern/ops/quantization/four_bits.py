"""A call that quantizes to 4 bits, or reads them: its checks, its result, and its launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.ops.quantization.choose import DTYPES, choose_fp4, choose_read_fp4
from cukern.ops.quantization.eight_bits import FP8, of_number, scale_of
from cukern.ops.quantization.launch import launch_fp4, launch_read_fp4
from cukern.reference import quantization as twin
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import Library
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.describe import Result
from cukern.runtime.rows import MAX_ROWS, rows_of_view
from cukern.runtime.view import contiguous, read, read_like

#: The numbers that share a scale, by the form of 4 bits.
GROUPS = {"MXFP4": MXFP4_GROUP, "NVFP4": NVFP4_GROUP}
#: What earlier calls chose, by the alignment of a call and the class of its first size.
QUANTIZED, READ = Decisions(), Decisions()


# --- to 4 bits ------------------------------------------------------------------------------------------


def results_of(form: str, shape: Sequence[Any]) -> tuple[Result, Result]:
    """The packed numbers and their scales, for an array of `shape`."""
    return Result((*shape[:-1], shape[-1] // 2), "uint8"), Result((*shape[:-1], shape[-1] // GROUPS[form]), "uint8")


def quantize_fp4(form: str, name: str, x: Any, scale: Any = None) -> Any:
    """Quantize `x`, which messages call `name`, as an alike call has chosen to, or check and choose."""
    scale, number = of_number(scale)
    facts, given = (form, number is None), (x, scale)
    decision = QUANTIZED.find(facts, given)
    if decision is not None:
        library, first, of = decision.library, x.shape[0], decision.own
        address = library.address(x)
        chosen = decision.choices.get((address % 16 == 0, first if first < 2 else 2))
        if chosen is not None and (of[0] or first * of[1] <= MAX_ROWS):
            number = 1.0 if number is None else check.number("input_global_scale", number)
            scale = 0 if scale is None else library.address(scale)
            return _quantize(chosen, library, decision.device, of, first, address, scale, number)
    return _decide(decision, facts, given, form, name, number)


def _quantize(
    chosen: tuple[Any, int], library: Library, device: int, of: tuple[Any, ...], first: int, address: int, scale: int,
    number: float,
) -> tuple[Any, Any]:  # fmt: skip
    """Make the results and launch. `chosen` is the config and the bytes between rows.

    `of` has whether the array is one row, where no size is free, the rows for each of the first size, and the shapes of
    the results without their first size.
    """
    is_row, inner, packed_shape, scales_shape = of
    config, stride = chosen
    if not is_row:
        packed_shape, scales_shape = (first, *packed_shape), (first, *scales_shape)
    packed, scales = library.allocate(packed_shape, "uint8", device), library.allocate(scales_shape, "uint8", device)
    rows, to = 1 if is_row else first * inner, (library.address(packed), library.address(scales))
    launch_fp4(config, library, device, address, *to, rows, stride, scale, number)
    return packed, scales


def _decide(
    decision: Decision | None, facts: tuple[Any, ...], given: tuple[Any, Any], form: str, name: str, number: Any
) -> Any:
    array, scale = given
    x = read(name, array, DTYPES)
    rows = rows_of_view(name, x)
    if rows.size % GROUPS[form]:
        check.fail(name, f"of whole groups of {GROUPS[form]} along its last dimension", rows.size)
    scale_view, number = scale_of("input_global_scale", scale, number, x, name)
    if x.device is None:
        if form == "MXFP4":
            return runtime.run_twin(twin.quantize_mxfp4, x, (None, None), {"x": x})
        arguments = {"input": x, "input_global_scale": scale_view or number}
        return runtime.run_twin(twin.scaled_fp4_quant, x, (None, None), arguments)
    stride, is_aligned = rows.distance * x.item_size, x.address % 16 == 0
    config = choose_fp4(x.dtype, rows.size, form, GROUPS[form], is_aligned and stride % 16 == 0, name)
    (packed, *_), (scales, *_) = results_of(form, x.shape)
    is_row, first = len(x.shape) == 1, x.shape[0]
    of = (True, 1, packed, scales) if is_row else (False, math.prod(x.shape[1:-1]), packed[1:], scales[1:])
    if x.foreign is None and x.library.recorder is None and (scale is None or scale_view is not None):
        if decision is None:
            decision = QUANTIZED.keep(facts, given, x.library, x.device, of, [() if is_row else (0,), ()])
        decision.choices[is_aligned, first if first < 2 else 2] = config, stride
    scale_address = scale_view.address if scale_view else 0
    found = _quantize((config, stride), x.library, x.device, of, first, x.address, scale_address, number)
    return tuple(runtime.returned(array, None, x) for array in found)


# --- from 4 bits ----------------------------------------------------------------------------------------

_SCALE_DTYPES = {"MXFP4": ("uint8", "float8_e8m0fnu"), "NVFP4": (FP8, "uint8")}


def dequantize_fp4(form: str, packed: Any, scale: Any, dtype: Any, global_scale: Any = None) -> Any:
    """Read numbers of 4 bits as an alike call has chosen to, or check and choose."""
    global_scale, number = of_number(global_scale)
    facts, given = (form, dtype, number is None), (packed, scale, global_scale)
    decision = READ.find(facts, given)
    if decision is not None:
        library, first, of = decision.library, packed.shape[0], decision.own
        address = library.address(packed)
        config = decision.choices.get((address % 4 == 0, first if first < 2 else 2))
        if config is not None and (of[0] or scale.shape[0] == first):
            number = 1.0 if number is None else check.number("global_scale", number)
            one = 0 if global_scale is None else library.address(global_scale)
            return _read(
                config, library, decision.device, of, dtype, first, address, library.address(scale), one, number
            )
    return _decide_to_read(decision, facts, given, form, number)


def _read(
    config: Any, library: Library, device: int, of: tuple[Any, ...], dtype: str, first: int, packed: int, scales: int,
    scale: int, number: float,
) -> Any:  # fmt: skip
    """Make the result and launch.

    `of` has whether the array is one row, where no size is free, the units of 8 numbers for each of the first size, and
    the shape of the result without its first size.
    """
    is_row, units, shape = of
    if not is_row:
        units, shape = units * first, (first, *shape)
    out = library.allocate(shape, dtype, device)
    launch_read_fp4(config, library, device, packed, scales, library.address(out), units, scale, number)
    return out


def _decide_to_read(
    decision: Decision | None, facts: tuple[Any, ...], given: tuple[Any, ...], form: str, number: Any
) -> Any:
    array, scale, global_scale = given
    group, dtype = GROUPS[form], facts[1]
    packed = read("packed", array, ("uint8",))
    check.one_of("dtype", dtype, DTYPES)
    if not packed.shape or packed.shape[-1] * 2 % group:
        check.fail("packed", f"of shape [..., k / 2] with k a multiple of {group}", [*packed.shape])
    contiguous("packed", packed)
    outer, k = packed.shape[:-1], packed.shape[-1] * 2
    symbols = f"[..., k / {group}]"
    scales = read_like("scale", scale, packed, "packed", _SCALE_DTYPES[form], (*outer, k // group), symbols)
    one, number = scale_of("global_scale", global_scale, number, packed, "packed")
    if packed.device is None:
        arguments = {"packed": packed, "scale": scales, "dtype": dtype}
        reference: Callable[..., Any] = twin.dequantize_mxfp4
        if form == "NVFP4":
            reference, arguments["global_scale"] = twin.dequantize_nvfp4, one or number
        return runtime.run_twin(reference, packed, (None,), arguments)
    is_aligned = packed.address % 4 == 0
    config = choose_read_fp4(dtype, form, is_aligned)
    first = packed.shape[0]
    of = (False, math.prod(outer[1:]) * k // 8, (*outer[1:], k)) if outer else (True, k // 8, (k,))
    if packed.foreign is None and packed.library.recorder is None and (global_scale is None or one is not None):
        if decision is None:
            free = [(0,), (0,), ()] if outer else [()] * 3
            decision = READ.keep(facts, given, packed.library, packed.device, of, free)
        decision.choices[is_aligned, first if first < 2 else 2] = config
    address = one.address if one else 0
    out = _read(
        config, packed.library, packed.device, of, dtype, first, packed.address, scales.address, address, number
    )
    return runtime.returned(out, None, packed)
