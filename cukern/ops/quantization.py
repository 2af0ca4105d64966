"""Quantization to 8 bits, FP8 or int8, with one scale, one for each row or one for each group; and to 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cukern.ops.moe_activation import check_halves
from cukern.reference import quantization as twin
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check, fp8
from cukern.runtime.kernel import Kernel, Variant, multiprocessors
from cukern.runtime.rows import MAX_ROWS, Rows, rows_of_array, tile
from cukern.runtime.units import divisor

__all__ = [
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "per_token_group_quant_fp8",
    "per_token_group_quant_int8",
    "quantize_mxfp4",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "silu_and_mul_quant",
]

DTYPES = ("float32", "float16", "bfloat16")
#: "vector": 8 numbers at a time; "scalar": one.
VARIANTS = ("auto", "vector", "scalar")
FP8 = "float8_e4m3fn"
#: What an array of FP8 numbers may say that its bytes are.
FP8_DTYPES = (FP8, "uint8")
_RESULTS = {"E4M3": FP8_DTYPES, "INT8": ("int8",), "INT8_AZP": ("int8",)}
#: Groups that a few lanes of a warp quantize; a block takes one of any other size.
GROUPS = (8, 16, 32, 64, 128, 256)
#: Below it a quotient might not be rounded exactly.
MIN_EPS = 1e-20

_ROWS, _SCALE, _SCALES, _TILE = "2Pq2iIi", "Pf4x", "P3q", "3iIi"
_groups = Kernel("quantization", "quantize_groups", f"{_ROWS}P{_SCALES}fi{_TILE}")
_rows = Kernel("quantization", "quantize_rows", f"{_ROWS}P{_SCALES}P{_SCALE}f2iIii")
_magnitude = Kernel("quantization", "largest_magnitude", f"{_ROWS}P2i{_TILE}")
_tensor = Kernel("quantization", "quantize_tensor", f"{_ROWS}3P{_SCALE}2Pi4x{_SCALE}f{_TILE}")
_fp4 = Kernel("quantization", "quantize_fp4", f"{_ROWS}2P{_SCALE}{_TILE}")
_read_fp4 = Kernel("quantization", "dequantize_fp4", f"3P{_SCALE}q")

_EACH = 8  # numbers that a thread takes at a time, where sizes and addresses allow it
_GROUP_UNITS = 2  # so many times of a group, which then computes its scale less often
_FP4_ITEMS = 4  # units of a thread, of 16 numbers or, of float32, 8
_BLOCKS_PER_MULTIPROCESSOR, _MAGNITUDE_THREADS = 2, 1024
_READ_THREADS, _READ_ITEMS = 256, 4
_INFINITY = float("inf")
_NO_SCALE = 0, 1.0


def _items(dtype: str, activation: int, each: int) -> int:
    """So many units of a thread are 64 bytes to load."""
    return 4 if each == 1 else max(1, 64 // (each * arrays.ITEM_SIZE[dtype] * (2 if activation else 1)))


def _group_units(dtype: str, activation: int, group: int) -> int:
    """So many units of a group a thread takes: eight neighbours still load whole lines."""
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
    # What FP8 layers call. All else is compiled when it is first used.
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
        _groups.specialized.append(_groups_variant(dtype, "INT8", 0, 128).instance)
        _rows.specialized += [_rows_variant(dtype, form, 0, _EACH).instance for form in ("INT8", "INT8_AZP")]
        _tensor.specialized += [_tensor_variant(dtype, form, 0, _EACH, False).instance for form in ("INT8", "INT8_AZP")]
        _tensor.specialized.append(_tensor_variant(dtype, "E4M3", 0, _EACH, True).instance)
        _magnitude.specialized.append(_magnitude_variant(dtype, _EACH).instance)
        _fp4.specialized += [_fp4_variant(dtype, form, 16).instance for form in ("MXFP4", "NVFP4")]
        _read_fp4.specialized += [_read_fp4_variant(dtype, form, True).instance for form in ("MXFP4", "NVFP4")]


_list_instances()


# --- checks -------------------------------------------------------------------------------------------


def _leader(name: str, x: Any) -> tuple[arrays.Library, int | None, str]:
    library, device = arrays.place(name, x)
    dtype = library.dtype(x)
    if dtype not in DTYPES:
        check.dtype(name, dtype, DTYPES)
    return library, device, dtype


def _result(
    name: str, out: Any, like: str, x: Any, library: arrays.Library, device: int | None, dtypes: tuple[str, ...],
    shape: tuple[int, ...], symbols: str,
) -> Any:  # fmt: skip
    """The array to write: `out` if there is one, else a new one of the first of `dtypes` that the library has."""
    if out is None:
        # CuPy has no FP8.
        return library.empty(shape, "uint8" if library is arrays.CUPY and dtypes is FP8_DTYPES else dtypes[0], x)
    arrays.expect(name, out, like, library, device, dtypes, shape, symbols)
    return out


def _host(library: arrays.Library, value: Any) -> Any:
    """An argument for the twin."""
    return library.to_numpy(value) if arrays.is_array(value) else value


def _group_size(group_size: Any, k: int) -> int:
    group_size = check.integer("group_size", group_size, 1)
    if k % group_size:
        check.fail("x", f"of whole groups of {group_size} along its last dimension", k)
    return group_size


# --- launches -----------------------------------------------------------------------------------------


def _each(name: str, dtype: str, x_address: int, q_address: int, rows: Rows, k: int, group: int, variant: str) -> int:
    """How many numbers a thread takes at a time."""
    item_size = arrays.ITEM_SIZE[dtype]
    wide = (x_address | rows.distance * item_size) % 16 == 0 and (q_address | k | group) % _EACH == 0
    if variant == "auto":
        return _EACH if wide else 1
    check.one_of("variant", variant, VARIANTS)
    if variant == "vector" and not wide:
        why = f"rows of {name} are not 16-byte aligned, or a row or a group is not a multiple of {_EACH}"
        check.fail("variant", "'auto' or 'scalar' here", f"'vector': {why}")
    return _EACH if variant == "vector" else 1


def _row_fields(x_address: int, dtype: str, rows: Rows) -> tuple[int, ...]:
    distance = rows.distance * arrays.ITEM_SIZE[dtype]
    batch = max(rows.batch, 1)
    return x_address, rows.counts, distance, rows.total, batch, *divisor(batch)


def _quantize_groups(
    name: str, library: arrays.Library, device: int, x: Any, dtype: str, rows: Rows, k: int, activation: int, form: str,
    variant: str, group: int, q: Any, s: Any, smallest: float, *, power_of_two: bool = False,
    column_major: bool = False, upper: tuple[int, float] = (0, _INFINITY), azp: Any = None,
) -> None:  # fmt: skip
    """Give each `group` neighbours of the rows of [rows, k] a scale of their own."""
    if rows.total == 0 or (group and k == 0):
        check.one_of("variant", variant, VARIANTS)
        return
    addresses = library.address(x), library.address(q)
    each = _each(name, dtype, *addresses, rows, k, group, variant)
    groups = k // group if group else 1
    fields = _row_fields(addresses[0], dtype, rows)
    expert = rows.batch * groups
    strides = (expert, 1, rows.batch) if column_major else (expert, groups, 1)
    results = addresses[1], library.address(s), *strides
    stream = library.stream(device)
    if each == _EACH and group in GROUPS and upper == (0, _INFINITY) and azp is None and form != "INT8_AZP":
        units = _group_units(dtype, activation, group)
        plan = tile(k // (each * units), _items(dtype, activation, each) // units, group // (each * units))
        grid, block = (-(-rows.total // plan.rows), plan.chunks, 1), (plan.threads, 1, 1)
        _groups_variant(dtype, form, activation, group).launch(
            device, stream, grid, block, 0, *fields, *results, smallest, int(power_of_two), *plan.geometry
        )
        return
    if rows.total * groups > MAX_ROWS:
        check.fail(name, f"of at most {MAX_ROWS} groups of such a size", rows.total * groups)
    columns = (group or k) // each
    threads = min(1024, max(1, -(-columns // (_items(dtype, activation, each) * 32))) * 32)
    _rows_variant(dtype, form, activation, each).launch(
        device,
        stream,
        (rows.total * groups, 1, 1),
        (threads, 1, 1),
        0,
        *fields,
        *results,
        0 if azp is None else library.address(azp),
        *upper,
        smallest,
        int(power_of_two),
        groups,
        *divisor(groups),
        columns,
    )


def _quantize_tensor(
    name: str, library: arrays.Library, device: int, x: Any, dtype: str, rows: Rows, k: int, activation: int, form: str,
    variant: str, q: Any, s: Any, scale: tuple[int, float] | None, *, upper: tuple[int, float] = (0, _INFINITY),
    azp: tuple[Any, Any] | None = None,
) -> None:  # fmt: skip
    """Quantize rows with `scale`, or without one with that of the largest magnitude."""
    addresses = library.address(x), library.address(q)
    each = _each(name, dtype, *addresses, rows, k, 0, variant)
    fields = _row_fields(addresses[0], dtype, rows)
    items, columns, stream = _items(dtype, activation, each), k // each, library.stream(device)
    partial, partials = 0, 0
    if scale is None and rows.total and k:
        plan = tile(columns, items, 1, _MAGNITUDE_THREADS)
        tiles = -(-rows.total // plan.rows) * plan.chunks
        partials = min(tiles, _BLOCKS_PER_MULTIPROCESSOR * multiprocessors(device))
        maxima = library.empty((partials,), "float32", x)
        partial = library.address(maxima)
        _magnitude_variant(dtype, each).launch(
            device, stream, (partials, 1, 1), (plan.threads, 1, 1), 0, *fields, partial, tiles, plan.chunks,
            *plan.geometry,
        )  # fmt: skip
    plan = tile(columns, items)
    # The scale is written also where there is nothing to quantize.
    grid = max(1, -(-rows.total // plan.rows)), plan.chunks, 1
    _tensor_variant(dtype, form, activation, each, scale is None).launch(
        device,
        stream,
        grid,
        (plan.threads, 1, 1),
        0,
        *fields,
        addresses[1],
        library.address(s),
        library.address(azp[1]) if azp else 0,
        *(scale or _NO_SCALE),
        library.address(azp[0]) if azp else 0,
        partial,
        partials,
        *upper,
        float(twin.SMALLEST_FP8),
        *plan.geometry,
    )


# --- 8 bits -------------------------------------------------------------------------------------------


@arrays.takes_dlpack
def scaled_fp8_quant(
    input: Any,
    scale: Any = None,
    num_token_padding: int | None = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Any = None,
    *,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """FP8 (e4m3) with one scale, given or found, or one for each token.

        largest = min(max |input|, scale_ub), over all of it or over a token; NaN does not count
        scale   = max(largest, 1 / 512) / 448
        out     = e4m3(input / scale), to nearest, ties to even, 448 at most; NaN stays NaN

    Args:
        input: [tokens, ..., hidden], float32, float16 or bfloat16; rows may be strided, all by one distance.
        scale: a number, or a float32 array of one element on the device of `input`, instead of the scale above.
        num_token_padding: make `out`, and scales of tokens, of at least so many tokens; what is there is undefined.
        scale_ub: a number, or a float32 array of one element: a bound of the largest magnitude.
        use_per_token_if_dynamic: without a scale, find one for each token.
        output: an array to write into and return, float8_e4m3fn, or uint8 for its bytes.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        out [tokens, ..., hidden] in float8_e4m3fn, in CuPy uint8, and the scale, float32 [1] or [tokens, ..., 1]; a
        given one as an array of its own. input is about out * scale. Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `scaled_fp8_quant`.
    """
    library, device, dtype = _leader("input", input)
    rows = rows_of_array("input", input, library, device)
    shape = tuple(input.shape)
    if num_token_padding is not None:
        if len(shape) < 2:
            check.dimensions("input", shape, ("tokens", "hidden"))
        shape = (max(check.integer("num_token_padding", num_token_padding, 0), shape[0]), *shape[1:])
    dynamic = scale is None
    given = None if dynamic else fp8.scale("scale", scale, "input", library, device)
    upper = (0, _INFINITY)
    if scale_ub is not None:
        if not dynamic:
            check.fail("scale_ub", "None with a scale", "one")
        upper = fp8.scale("scale_ub", scale_ub, "input", library, device)
    q = _result("output", output, "input", input, library, device, FP8_DTYPES, shape, "[tokens, ..., hidden]")
    per_token = dynamic and use_per_token_if_dynamic
    s = library.empty((*shape[:-1], 1) if per_token else (1,), "float32", input)
    if device is None:
        check.host_variant(variant, VARIANTS)
        own = library.to_numpy(s)
        args = [_host(library, a) for a in (input, scale, num_token_padding, scale_ub, use_per_token_if_dynamic, q)]
        own[...] = twin.scaled_fp8_quant(*args)[1]
    elif per_token:
        common = "input", library, device, input, dtype, rows, rows.size, 0, "E4M3", variant
        _quantize_groups(*common, 0, q, s, float(twin.SMALLEST_FP8), upper=upper)
    else:
        common = "input", library, device, input, dtype, rows, rows.size, 0, "E4M3", variant
        _quantize_tensor(*common, q, s, given, upper=upper)
    return q, s


def _per_token_group_quant(
    function: Callable[..., Any], x: Any, group_size: int, eps: float, column_major_scales: bool, use_ue8m0: bool,
    expert_num_tokens: Any, out_q: Any, out_s: Any, variant: str, form: str,
) -> tuple[Any, Any]:  # fmt: skip
    library, device, dtype = _leader("x", x)
    rows = rows_of_array("x", x, library, device, expert_num_tokens)
    k = rows.size
    group_size = _group_size(group_size, k)
    if check.number("eps", eps) < MIN_EPS:
        check.fail("eps", f"a number of at least {MIN_EPS}", eps)
    shape, scales = tuple(x.shape), (*x.shape[:-1], k // group_size)
    q = _result("out_q", out_q, "x", x, library, device, _RESULTS[form], shape, "[..., k]")
    if column_major_scales:
        if len(shape) < 2:
            check.dimensions("x", shape, ("...", "tokens", "k"))
        turned = None if out_s is None else out_s.swapaxes(-1, -2)
        columns = (*scales[:-2], scales[-1], scales[-2])
        symbols = "[..., k / group_size, tokens], transposed,"
        turned = _result("out_s", turned, "x", x, library, device, ("float32",), columns, symbols)
        s = turned.swapaxes(-1, -2) if out_s is None else out_s
    else:
        s = _result("out_s", out_s, "x", x, library, device, ("float32",), scales, "[..., k / group_size]")
    if device is None:
        check.host_variant(variant, VARIANTS)
        if rows.total and k:
            options = {"column_major_scales": column_major_scales, "expert_num_tokens": expert_num_tokens}
            options |= {"out_q": q, "out_s": s} | ({"use_ue8m0": True} if use_ue8m0 else {})
            options = {key: _host(library, value) for key, value in options.items()}
            function(library.to_numpy(x), group_size, eps, **options)
    else:
        common = "x", library, device, x, dtype, rows, k, 0, form, variant, group_size, q, s
        _quantize_groups(*common, eps, power_of_two=use_ue8m0, column_major=column_major_scales)
    return q, s


@arrays.takes_dlpack
def per_token_group_quant_fp8(
    x: Any,
    group_size: int,
    eps: float = 1e-10,
    *,
    column_major_scales: bool = False,
    use_ue8m0: bool = False,
    expert_num_tokens: Any = None,
    out_q: Any = None,
    out_s: Any = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """FP8 (e4m3) with a scale for each group of neighbours of a token.

        scale = max(max |x|, eps) / 448, over a group; NaN does not count
        x_q   = e4m3(x / scale), to nearest, ties to even, 448 at most; NaN stays NaN

    Args:
        x: [..., k], float32, float16 or bfloat16; rows may be strided, all by one distance.
        group_size: divides k; powers of two from 8 to 256 are the fast ones.
        eps: at least 1e-20.
        column_major_scales: scales with the tokens side by side in memory: x_s is a transposed view, of [..., k /
            group_size, tokens].
        use_ue8m0: scales are rounded up to a power of two.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, k]: how many tokens of each expert count.
            Those past them are neither read nor written.
        out_q, out_s: arrays to write into and return; out_q float8_e4m3fn, or uint8 for its bytes.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        x_q [..., k] in float8_e4m3fn, in CuPy uint8, and x_s float32 [..., k / group_size]. Arrays in host memory go
        through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `per_token_group_quant_fp8`; the scales of 1 x 128 are those
    of the DeepSeek-V3 technical report (arXiv:2412.19437, section 3.3).
    """
    return _per_token_group_quant(
        twin.per_token_group_quant_fp8, x, group_size, eps, column_major_scales, use_ue8m0, expert_num_tokens,
        out_q, out_s, variant, "E4M3",
    )  # fmt: skip


@arrays.takes_dlpack
def per_token_group_quant_int8(
    x: Any,
    group_size: int,
    eps: float = 1e-10,
    *,
    column_major_scales: bool = False,
    expert_num_tokens: Any = None,
    out_q: Any = None,
    out_s: Any = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """int8 with a scale for each group of neighbours of a token: max(max |x|, eps) / 127.

    Arguments, results and errors are those of `per_token_group_quant_fp8`, but x_q is int8, rounded to nearest, ties
    to even (vLLM's function of this name cuts off), and NaN becomes 0.
    """
    return _per_token_group_quant(
        twin.per_token_group_quant_int8, x, group_size, eps, column_major_scales, False, expert_num_tokens, out_q,
        out_s, variant, "INT8",
    )  # fmt: skip


@arrays.takes_dlpack
def scaled_int8_quant(
    input: Any, scale: Any = None, azp: Any = None, symmetric: bool = True, *, variant: str = "auto"
) -> tuple[Any, Any, Any | None]:
    """int8 with a given scale, or one for each token; and a zero point, unless it is symmetric.

        given       out = clamp(round(input / scale) + azp, -128, 127)
        symmetric   scale = max(max |input|, 1e-10) / 127
        otherwise   scale = max((max input - min input) / 255, max(max |input|, 1e-10) / 2**22),
                    azp = round(-128 - min input / scale)

    The second bound keeps input / scale, where all of a token is about the same, among the integers that float32 has.
    Rounding is to the nearest, ties to even. NaN does not count, and becomes what 0 does.

    Args:
        input: [..., hidden], float32, float16 or bfloat16; rows may be strided, all by one distance.
        scale: a number, or a float32 array of one element on the device of `input`.
        azp: with a scale, and if it is not symmetric, the zero point: an int32 array of one element.
        symmetric: without a zero point.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        out int8 [..., hidden], the scale, float32 [1] or [..., 1], and the zero point, int32 in the same shape, or
        None; given ones as arrays of their own. input is about (out - azp) * scale. Arrays in host memory go through
        the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `scaled_int8_quant`.
    """
    library, device, dtype = _leader("input", input)
    rows = rows_of_array("input", input, library, device)
    static = scale is not None
    given = fp8.scale("scale", scale, "input", library, device) if static else None
    if azp is not None:
        if not static or symmetric:
            check.fail("azp", "None without a scale, or if symmetric", "one")
        arrays.same_place("azp", azp, "input", library, device)
        if library.dtype(azp) != "int32":
            check.dtype("azp", library.dtype(azp), ("int32",))
        if any(size != 1 for size in azp.shape):
            check.fail("azp", "an array of one element", f"an array of shape {list(azp.shape)}")
    elif static and not symmetric:
        check.fail("azp", "an int32 array of one element with a scale that is not symmetric", "None", TypeError)
    shape = (1,) if static else (*input.shape[:-1], 1)
    q = library.empty(tuple(input.shape), "int8", input)
    s = library.empty(shape, "float32", input)
    zero = None if symmetric else library.empty(shape, "int32", input)
    if device is None:
        check.host_variant(variant, VARIANTS)
        results = twin.scaled_int8_quant(*(_host(library, a) for a in (input, scale, azp, symmetric)))
        for array, result in zip((q, s, zero), results, strict=True):
            if array is not None:
                library.to_numpy(array)[...] = result
        return q, s, zero
    form = "INT8" if symmetric else "INT8_AZP"
    common = "input", library, device, input, dtype, rows, rows.size, 0, form, variant
    if static:
        _quantize_tensor(*common, q, s, given, azp=None if symmetric else (azp, zero))
    else:
        _quantize_groups(*common, 0, q, s, float(twin.SMALLEST), azp=zero)
    return q, s, zero


@arrays.takes_dlpack
def silu_and_mul_quant(
    x: Any,
    activation: str = "silu",
    *,
    group_size: int | None = 128,
    scale: Any = None,
    expert_num_tokens: Any = None,
    out_q: Any = None,
    out_s: Any = None,
    variant: str = "auto",
) -> tuple[Any, Any]:
    """FP8 (e4m3) of a gated activation, which is not rounded in between.

    What is quantized is activate(gate, up) in float32, as `cukern.moe_activation` has it, with the scales of
    `cukern.per_token_group_quant_fp8`, or of `cukern.scaled_fp8_quant` if there is one for each token or for all.

    Args:
        x: [..., 2 * inter], float32, float16 or bfloat16, the gate half first; rows may be strided, all by one
            distance.
        activation: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2".
        group_size: divides inter; powers of two from 8 to 256 are the fast ones. None: one scale for each token.
        scale: a number, or a float32 array of one element on the device of `x`: the scale of all, without groups.
        expert_num_tokens: int32 [experts], for x of [experts, max_tokens, 2 * inter]: how many tokens of each expert
            count. Those past them are neither read nor written.
        out_q, out_s: arrays to write into and return; out_q float8_e4m3fn, or uint8 for its bytes.
        variant: "auto", or a kernel by name: "vector" (8 numbers at a time, from aligned rows) or "scalar". Both give
            the same bits.

    Returns:
        q [..., inter] in float8_e4m3fn, in CuPy uint8, and scales float32 [..., inter / group_size], [..., 1] or [1].
        Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    number = activations.number(activation)
    library, device, dtype = _leader("x", x)
    inter = check_halves("x", x)
    rows = rows_of_array("x", x, library, device, expert_num_tokens)
    given = None
    scales: tuple[int, ...]
    if scale is not None:
        given = fp8.scale("scale", scale, "x", library, device)
        scales, symbols = (1,), "[1]"
    elif group_size is None:
        scales, symbols = (*x.shape[:-1], 1), "[..., 1]"
    else:
        group_size = _group_size(group_size, inter)
        scales, symbols = (*x.shape[:-1], inter // group_size), "[..., inter / group_size]"
    shape = (*x.shape[:-1], inter)
    q = _result("out_q", out_q, "x", x, library, device, FP8_DTYPES, shape, "[..., inter]")
    s = _result("out_s", out_s, "x", x, library, device, ("float32",), scales, symbols)
    if device is None:
        check.host_variant(variant, VARIANTS)
        options = {"scale": scale, "expert_num_tokens": expert_num_tokens, "out_q": q, "out_s": s}
        options = {key: _host(library, value) for key, value in options.items()}
        twin.silu_and_mul_quant(library.to_numpy(x), activation, group_size=group_size, **options)
        return q, s
    common = "x", library, device, x, dtype, rows, inter, number, "E4M3", variant
    if scale is not None:
        _quantize_tensor(*common, q, s, given)
    elif group_size is None:
        _quantize_groups(*common, 0, q, s, float(twin.SMALLEST_FP8))
    else:
        _quantize_groups(*common, group_size, q, s, float(twin.SMALLEST))
    return q, s


# --- 4 bits -------------------------------------------------------------------------------------------


def _quantize_fp4(name: str, x: Any, form: str, group: int, global_scale: Any = None) -> tuple[Any, Any]:
    library, device, dtype = _leader(name, x)
    rows = rows_of_array(name, x, library, device)
    if rows.size % group:
        check.fail(name, f"of whole groups of {group} along its last dimension", rows.size)
    given = fp8.scale("input_global_scale", global_scale, name, library, device)
    packed = library.empty((*x.shape[:-1], rows.size // 2), "uint8", x)
    scale = library.empty((*x.shape[:-1], rows.size // group), "uint8", x)
    if rows.total == 0 or rows.size == 0:
        return packed, scale
    if device is None:
        given_scale = () if form == "MXFP4" else (_host(library, global_scale),)
        function: Callable[..., Any] = twin.quantize_mxfp4 if form == "MXFP4" else twin.scaled_fp4_quant
        results = function(library.to_numpy(x), *given_scale)
        for array, result in zip((packed, scale), results, strict=True):
            library.to_numpy(array)[...] = result
        return packed, scale
    address, item_size = library.address(x), arrays.ITEM_SIZE[dtype]
    width = 16 if (address | rows.distance * item_size) % 16 == 0 else item_size
    each = _fp4_each(dtype)
    plan = tile(rows.size // each, _FP4_ITEMS, group // each)
    _fp4_variant(dtype, form, width).launch(
        device,
        library.stream(device),
        (-(-rows.total // plan.rows), plan.chunks, 1),
        (plan.threads, 1, 1),
        0,
        *_row_fields(address, dtype, rows),
        library.address(packed),
        library.address(scale),
        *given,
        *plan.geometry,
    )
    return packed, scale


@arrays.takes_dlpack
def quantize_mxfp4(x: Any) -> tuple[Any, Any]:
    """MXFP4: 4-bit floats (e2m1) with a power of two as the scale of each 32 neighbours.

        scale = 2**(floor(log2(max |x|)) - 2), between 2**-127 and 2**125, over a group
        value = e2m1(x / scale): 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, the nearest, ties to the even code

    Args:
        x: [..., k], float32, float16 or bfloat16, k a multiple of 32; rows may be strided, all by one distance.

    Returns:
        packed uint8 [..., k / 2], the first number of two in the low half, and scale uint8 [..., k / 32]: b stands for
        2**(b - 127) (E8M0), and 255, for a group with an infinity or NaN, for NaN. Arrays in host memory go through the
        NumPy twin.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes, strides or sizes that do not fit; the message names the argument.

    The format and the way to its scales are those of the OCP Microscaling Formats specification 1.0 (section 6.3).
    """
    return _quantize_fp4("x", x, "MXFP4", twin.MXFP4_GROUP)


@arrays.takes_dlpack
def scaled_fp4_quant(input: Any, input_global_scale: Any) -> tuple[Any, Any]:
    """NVFP4: 4-bit floats (e2m1) with an FP8 scale for each 16 neighbours, and one for all.

        scale = e4m3(input_global_scale * (max |input| / 6)), over a group; NaN does not count
        value = e2m1(input * (input_global_scale / scale)): 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign, the nearest, ties
                to the even code, 0 where the scale is 0; NaN becomes 0

    Args:
        input: [..., k], float32, float16 or bfloat16, k a multiple of 16; rows may be strided, all by one distance.
        input_global_scale: a number, or a float32 array of one element on the device of `input`. 448 * 6 / max |input|
            over all of it uses the whole range of the scales.

    Returns:
        packed uint8 [..., k / 2], the first number of two in the low half, and scale uint8 [..., k / 16], the bytes of
        e4m3 numbers, row by row: not in the swizzled order that Blackwell's matrix units read, which is what vLLM's
        function returns. input is about value * scale / input_global_scale. Arrays in host memory go through the NumPy
        twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.

    The function, its arguments and their order are vLLM's `scaled_fp4_quant`.
    """
    if input_global_scale is None:
        check.fail("input_global_scale", "a number or a float32 array of one element", "None", TypeError)
    return _quantize_fp4("input", input, "NVFP4", twin.NVFP4_GROUP, input_global_scale)


def _dequantize_fp4(
    packed: Any, scale: Any, dtype: str, form: str, group: int, scale_dtypes: tuple[str, ...], global_scale: Any = None
) -> Any:
    library, device = arrays.place("packed", packed)
    if library.dtype(packed) != "uint8":
        check.dtype("packed", library.dtype(packed), ("uint8",))
    check.one_of("dtype", dtype, DTYPES)
    if not packed.shape or packed.shape[-1] * 2 % group:
        check.fail("packed", f"of shape [..., k / 2] with k a multiple of {group}", list(packed.shape))
    arrays.contiguous("packed", packed, library)
    k = packed.shape[-1] * 2
    scales = (*packed.shape[:-1], k // group)
    arrays.expect("scale", scale, "packed", library, device, scale_dtypes, scales, f"[..., k / {group}]")
    given = fp8.scale("global_scale", global_scale, "packed", library, device)
    out = library.empty((*packed.shape[:-1], k), dtype, packed)
    units = k // _EACH
    for size in packed.shape[:-1]:
        units *= size
    if units == 0:
        return out
    if device is None:
        args = [_host(library, a) for a in ((packed, scale) if form == "MXFP4" else (packed, scale, global_scale))]
        function: Callable[..., Any] = twin.dequantize_mxfp4 if form == "MXFP4" else twin.dequantize_nvfp4
        library.to_numpy(out)[...] = function(*args, dtype)
        return out
    address = library.address(packed)
    _read_fp4_variant(dtype, form, address % 4 == 0).launch(
        device,
        library.stream(device),
        (-(-units // (_READ_THREADS * _READ_ITEMS)), 1, 1),
        (_READ_THREADS, 1, 1),
        0,
        address,
        library.address(scale),
        library.address(out),
        *given,
        units,
    )
    return out


@arrays.takes_dlpack
def dequantize_mxfp4(packed: Any, scale: Any, dtype: str = "bfloat16") -> Any:
    """The numbers that `cukern.quantize_mxfp4` packed: value * 2**(scale - 127), rounded once.

    Args:
        packed: uint8 [..., k / 2], the first number of two in the low half; contiguous.
        scale: uint8 or float8_e8m0fnu [..., k / 32]; contiguous.
        dtype: "float32", "float16" or "bfloat16".

    Returns:
        [..., k]. Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    return _dequantize_fp4(packed, scale, dtype, "MXFP4", twin.MXFP4_GROUP, ("uint8", "float8_e8m0fnu"))


@arrays.takes_dlpack
def dequantize_nvfp4(packed: Any, scale: Any, global_scale: Any, dtype: str = "bfloat16") -> Any:
    """The numbers that `cukern.scaled_fp4_quant` packed: value * (scale / global_scale), rounded once.

    Args:
        packed: uint8 [..., k / 2], the first number of two in the low half; contiguous.
        scale: float8_e4m3fn, or uint8 for its bytes, [..., k / 16]; contiguous.
        global_scale: the one that the numbers were quantized with, a number or a float32 array of one element. It
            divides; what multiplies in a product, such as the b_global_scale of `cukern.moe_gemm`, is its inverse.
        dtype: "float32", "float16" or "bfloat16".

    Returns:
        [..., k]. Arrays in host memory go through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit; the message names the argument.
    """
    if global_scale is None:
        check.fail("global_scale", "a number or a float32 array of one element", "None", TypeError)
    return _dequantize_fp4(packed, scale, dtype, "NVFP4", twin.NVFP4_GROUP, FP8_DTYPES, global_scale)


# --- torch --------------------------------------------------------------------------------------------


def _scaled_fp8_results(
    input: Any,
    scale: Any = None,
    num_token_padding: Any = None,
    scale_ub: Any = None,
    use_per_token_if_dynamic: bool = False,
    output: Any = None,
    **options: Any,
) -> Any:
    shape = input.shape if num_token_padding is None else (max(num_token_padding, input.shape[0]), *input.shape[1:])
    one = scale is not None or not use_per_token_if_dynamic
    return (input, shape, FP8), (input, (1,) if one else (*shape[:-1], 1), "float32")


def _group_results(dtype: str) -> Callable[..., Any]:
    def results(
        x: Any, group_size: int, eps: float = 1e-10, *, column_major_scales: bool = False, **options: Any
    ) -> Any:
        groups = x.shape[-1] // group_size
        scales: Any = (x, (*x.shape[:-1], groups), "float32")
        if column_major_scales:
            columns = x.new_empty((*x.shape[:-2], groups, x.shape[-2]))
            scales = columns.float().swapaxes(-1, -2)
        return (x, x.shape, dtype), scales

    return results


def _scaled_int8_results(input: Any, scale: Any = None, azp: Any = None, symmetric: bool = True, **options: Any) -> Any:
    shape = (*input.shape[:-1], 1) if scale is None else (1,)
    return (input, input.shape, "int8"), (input, shape, "float32"), None if symmetric else (input, shape, "int32")


def _activated_results(
    x: Any, activation: str = "silu", *, group_size: Any = 128, scale: Any = None, **options: Any
) -> Any:
    inter = x.shape[-1] // 2
    scales = (1,) if scale is not None else (*x.shape[:-1], 1 if group_size is None else inter // group_size)
    return (x, (*x.shape[:-1], inter), FP8), (x, scales, "float32")


def _fp4_results(group: int) -> Callable[..., Any]:
    def results(x: Any, *rest: Any) -> Any:
        k = x.shape[-1]
        return tuple((x, (*x.shape[:-1], k // each), "uint8") for each in (2, group))

    return results


def _read_results(packed: Any, *rest: Any, dtype: str = "bfloat16") -> Any:
    given = rest[-1] if rest and isinstance(rest[-1], str) else dtype
    return ((packed, (*packed.shape[:-1], packed.shape[-1] * 2), given),)


#: For `cukern.torch_ops`: the schema of each operator, and what its results are.
TORCH_OPS: dict[str, Any] = {
    "scaled_fp8_quant(Tensor input, Tensor? scale=None, SymInt? num_token_padding=None, Tensor? scale_ub=None, "
    "bool use_per_token_if_dynamic=False, Tensor(a!)? output=None, *, str variant='auto') "
    "-> (Tensor quantized, Tensor scales)": _scaled_fp8_results,
    "per_token_group_quant_fp8(Tensor x, int group_size, float eps=1e-10, *, bool column_major_scales=False, "
    "bool use_ue8m0=False, Tensor? expert_num_tokens=None, Tensor(a!)? out_q=None, Tensor(b!)? out_s=None, "
    "str variant='auto') -> (Tensor x_q, Tensor x_s)": _group_results(FP8),
    "per_token_group_quant_int8(Tensor x, int group_size, float eps=1e-10, *, bool column_major_scales=False, "
    "Tensor? expert_num_tokens=None, Tensor(a!)? out_q=None, Tensor(b!)? out_s=None, str variant='auto') "
    "-> (Tensor x_q, Tensor x_s)": _group_results("int8"),
    "scaled_int8_quant(Tensor input, Tensor? scale=None, Tensor? azp=None, bool symmetric=True, *, str variant='auto') "
    "-> (Tensor quantized, Tensor scales, Tensor? zero_points)": _scaled_int8_results,
    "silu_and_mul_quant(Tensor x, str activation='silu', *, int? group_size=128, Tensor? scale=None, "
    "Tensor? expert_num_tokens=None, Tensor(a!)? out_q=None, Tensor(b!)? out_s=None, str variant='auto') "
    "-> (Tensor quantized, Tensor scales)": _activated_results,
    "quantize_mxfp4(Tensor x) -> (Tensor packed, Tensor scale)": _fp4_results(twin.MXFP4_GROUP),
    "dequantize_mxfp4(Tensor packed, Tensor scale, str dtype='bfloat16') -> (Tensor numbers)": _read_results,
    "scaled_fp4_quant(Tensor input, Tensor input_global_scale) -> (Tensor packed, Tensor scale)": _fp4_results(
        twin.NVFP4_GROUP
    ),
    "dequantize_nvfp4(Tensor packed, Tensor scale, Tensor global_scale, str dtype='bfloat16') "
    "-> (Tensor numbers)": _read_results,
}
