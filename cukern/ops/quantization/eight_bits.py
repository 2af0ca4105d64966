"""A call that quantizes to 8 bits: its checks, its results, and its launches."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cukern.ops.quantization.choose import DTYPES, VARIANTS, Config, TensorConfig, choose_groups, choose_tensor
from cukern.ops.quantization.launch import launch_groups, launch_tensor
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import Library, View
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.describe import Result
from cukern.runtime.rows import MAX_ROWS, rows_of_view
from cukern.runtime.view import read, read_like, view_of

FP8 = "float8_e4m3fn"
#: The least eps: with smaller scales a quotient might not be rounded exactly.
_MIN_EPS = 1e-20
_INF = float("inf")
_NUMBERS = {float, int, np.float32, np.float64}  # the usual types of numbers
#: What earlier calls chose, by the alignment of a call and the class of its first size.
DECISIONS = Decisions()


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """What all calls of a public function that quantizes to 8 bits share."""

    twin: Callable[..., Any]
    name: str  # of the array to quantize
    dtype: str  # of the quantized numbers
    symbols: str  # the shape of the quantized numbers in messages
    options: tuple[str, ...]  # the arguments that decide and are no arrays
    outs: tuple[str, str] = ("", "")  # the arguments that are written
    is_activated: bool = False


class _Options(NamedTuple):
    """The options of all functions, with the values of a function that does not take them."""

    group_size: Any = None  # None: a scale for each row
    eps: Any = None
    column_major_scales: Any = False
    use_ue8m0: Any = False
    truncate: Any = False
    symmetric: Any = True
    use_per_token_if_dynamic: Any = True
    activation: Any = None
    variant: Any = "auto"


_FLAGS = "column_major_scales", "use_ue8m0", "truncate", "symmetric", "use_per_token_if_dynamic"


class _Chosen(NamedTuple):
    """What calls of a class share. The shapes of results are without their first size, which is free."""

    config: Any  # a TensorConfig for one scale, else a Config
    stride: int  # bytes between rows
    most: int  # the largest first size
    dtype: str  # of the quantized numbers
    is_row: bool  # of an array of one dimension, where no size is free
    inner: int  # rows for each of the first dimension
    max_tokens: int  # 0: the first size
    q: tuple[int, ...]
    s: tuple[int, ...]
    is_one: bool  # one scale for all
    is_turned: bool  # column-major scales
    has_zeros: bool  # zero points are a result


def results_of(
    function: Function, shape: Sequence[Any], group: Any, is_one: bool, is_turned: bool = False, padding: Any = None
) -> tuple[Result, Result]:
    """The quantized numbers and their scales, for an array of `shape`. `group` None is a scale for each row."""
    outer, k, symbol = tuple(shape[:-1]), shape[-1], "k"
    if function.is_activated:
        k, symbol = k // 2, "inter"
    if padding is not None:
        outer = (max(padding, outer[0]), *outer[1:])
    scales, symbols = (*outer, 1), "[..., 1]"
    if is_one:
        scales, symbols = (1,), "[1]"
    elif group is not None:
        scales, symbols = (*outer, k // group), f"[..., {symbol} / group_size]"
    if is_turned:
        symbols = "[..., k / group_size, tokens], transposed,"
    return Result((*outer, k), function.dtype, function.symbols), Result(scales, "float32", symbols, is_turned)


def of_number(scale: Any) -> tuple[Any, Any]:
    """A scale as an array and None, or as None and a number, which may differ at each call.

    A number of an unusual type passes as an array; `scale_of` reads it as a number.
    """
    return (None, scale) if type(scale) in _NUMBERS else (scale, None)


def quantize(
    facts: tuple[Any, ...], given: tuple[Any, ...], number: Any = None, bound: Any = None, padding: Any = None
) -> tuple[Any, ...]:
    """Quantize as an alike call has chosen to, or check and choose: the numbers, their scales and any zero points.

    `facts` begin with the function and the values of its options. `given` are the arrays: the rows, the rows in use,
    those to write into and, unless the function takes none, a scale, a bound of the magnitudes that it is found from,
    and a zero point. `number` and `bound` are a scale and a bound that are no arrays. `padding` is the least first size
    of the results.
    """
    decision = DECISIONS.find(facts, given)
    if decision is None:
        return _decide(None, facts, given, number, bound, padding)
    x, counts, q, s, scale, upper, azp = given if len(given) > 4 else (*given, None, None, None)
    library, first = decision.library, x.shape[0]
    address_of = library.address
    address = address_of(x)
    aligned = (address if q is None else address | 2 * address_of(q)) % 16 == 0
    chosen = decision.choices.get((aligned, first if first < 2 else 2))  # the stride of a size of 0 or 1 means nothing
    if (
        chosen is None
        or first > chosen.most
        or not (q is s is counts is padding is None or _fits(library, chosen, first, counts, q, s, padding))
    ):
        return _decide(decision, facts, given, number, bound, padding)
    return _launch(
        library, decision.device, chosen, address, first, first if padding is None else max(padding, first), q, s,
        0 if counts is None else address_of(counts), 0 if scale is None else address_of(scale),
        0 if upper is None else address_of(upper), 0 if azp is None else address_of(azp),
        1.0 if number is None else check.number("scale", number),
        check.number("scale_ub", bound) if bound is not None else _INF if upper is None else 1.0,
    )  # fmt: skip


def _fits(library: Library, chosen: _Chosen, first: int, counts: Any, q: Any, s: Any, padding: Any) -> bool:
    """Whether the free sizes of an alike call go together."""
    if padding is not None and (type(padding) is not int or not 0 <= padding <= MAX_ROWS):
        return False
    return chosen.is_row or (
        (counts is None or counts.shape[0] == first)
        and (q is None or q.shape[0] == (first if padding is None else max(padding, first)))
        and (s is None or chosen.is_one or s.shape[0] == first)
        and (s is None or chosen.max_tokens > 0 or library.strides(s) == (1, first))
    )


def _launch(
    library: Library, device: Any, chosen: _Chosen, x: int, first: int, outer: int, q: Any, s: Any, counts: int,
    scale: int, upper: int, azp: int, number: float, bound: float,
) -> tuple[Any, ...]:  # fmt: skip
    """Make the results that the caller does not give, and launch.

    `first` and `outer` are the first sizes of the array and of the results; `x` and those from `counts` to `azp` are
    addresses.
    """
    config, stride, _, dtype, is_row, inner, max_tokens, q_shape, s_shape, is_one, is_turned, has_zeros = chosen
    rows = 1 if is_row else first * inner
    if q is None:
        q = library.allocate(q_shape if is_row else (outer, *q_shape), dtype, device)
    shape = s_shape if is_one or is_row else (outer, *s_shape)
    if s is None:
        s = _column_major(library, shape, device) if is_turned else library.allocate(shape, "float32", device)
    found: tuple[Any, ...] = q, s
    azp_out = 0
    if has_zeros:
        zeros = library.allocate(shape, "int32", device)
        found, azp_out = (q, s, zeros), library.address(zeros)
    to, scales, tokens = library.address(q), library.address(s), max_tokens or first or 1
    if not is_one:
        launch_groups(config, library, device, x, to, scales, rows, stride, counts, tokens, azp_out, upper, bound)
        return found
    held, parts = library.workspace(config.workspace, device) if config.workspace else (None, ())
    launch_tensor(
        config, library, device, x, to, scales, rows, stride, parts, counts, tokens, scale, number, azp, azp_out, upper,
        bound,
    )  # fmt: skip
    del held  # the workspace, after the last launch
    return found


def _column_major(library: Library, shape: tuple[int, ...], device: int | None) -> Any:
    """An array for scales of this shape, with the rows side by side in memory."""
    *outer, rows, groups = shape
    return library.transposed(library.allocate((*outer, groups, rows), "float32", device))


# --- a call that no earlier one is like -----------------------------------------------------------------


def _decide(
    decision: Decision | None, facts: tuple[Any, ...], given: tuple[Any, ...], number: Any, bound: Any, padding: Any
) -> Any:
    """Check a call, choose its kernels, keep the choice, launch. `decision` is that of alike calls of other classes."""
    function, array, counts, q, s = facts[0], *given[:4]
    scale, upper, azp = given[4:] or (None, None, None)
    options = _Options(**dict(zip(function.options, facts[1:], strict=False)))
    name, own = function.name, options._replace(**{flag: check.flag(flag, getattr(options, flag)) for flag in _FLAGS})
    activation = activations.number(own.activation) if function.is_activated else 0
    x = read(name, array, DTYPES)
    if activation and (not x.shape or x.shape[-1] % 2):
        check.fail(name, "of shape [..., 2 * inter]", [*x.shape])
    rows = rows_of_view(name, x, counts)
    k = rows.size // 2 if activation else rows.size
    if padding is not None:
        padding = _padding(padding, x, name, counts)
    has_scale, has_upper = scale is not None or number is not None, upper is not None or bound is not None
    scale_view, number = scale_of("scale", scale, number, x, name)
    if has_scale and has_upper:
        check.fail("scale_ub", "None with a scale", "one")
    upper_view, bound = scale_of("scale_ub", upper, bound, x, name, none=_INF)
    group, smallest = _groups(function, own, k, has_scale)
    if own.column_major_scales and len(x.shape) < 2:
        check.dimensions(name, x.shape, ("...", "tokens", "k"))
    zero = _zero_point(azp, x, name, has_scale, own.symmetric)
    is_one = has_scale or not own.use_per_token_if_dynamic
    results = results_of(function, x.shape, group, is_one, own.column_major_scales, padding)
    to = [_out_of(*each, x, name) for each in zip(function.outs, (q, s), results, strict=True)]
    views = x, rows.counts, scale_view, upper_view, zero
    check.one_of("variant", own.variant, VARIANTS)
    if x.device is None:
        check.host_variant(own.variant, VARIANTS)
        arguments = own._asdict() | {
            name: x, "group_size": group, "expert_num_tokens": rows.counts, "num_token_padding": padding, "azp": zero,
            "scale": scale_view or (number if has_scale else None),
            "scale_ub": upper_view or (bound if has_upper else None),
        }  # fmt: skip
        return _run_twin(function, x, to, results[1], arguments)
    stride = rows.distance * x.item_size
    addresses_align = (x.address | 2 * (to[0].address if to[0] else 0)) % 16 == 0
    config = _choose(function, own, x, rows.total, k, group, smallest, is_one, has_scale, addresses_align, stride)
    blocks = 1 if isinstance(config, TensorConfig) else max(config.blocks, 1)
    if rows.total > MAX_ROWS // blocks:
        check.fail(name, f"of at most {MAX_ROWS} groups of such a size", rows.total * blocks)
    chosen, free = _chosen(x, config, stride, MAX_ROWS // blocks, results, is_one, rows.batch, not own.symmetric)
    is_plain = [a is not None for a in (x, counts, scale, upper, azp)] == [view is not None for view in views]
    first = x.shape[0]
    if is_plain and x.foreign is None and x.library.recorder is None:
        if decision is None:
            decision = DECISIONS.keep(facts, given, x.library, x.device, free=free[: len(given)])
        decision.choices[addresses_align, first if first < 2 else 2] = chosen
    scales: tuple[Any, ...] = *(view.address if view else 0 for view in views[1:]), number, bound
    q, s = (view and view.array for view in to)
    outer = results[0].shape[0]
    found = _launch(x.library, x.device, chosen, x.address, first, outer, q, s, *scales)
    return tuple(runtime.returned(*each, x) for each in zip(found, (*to, None), strict=False))


def _padding(padding: Any, x: View, name: str, counts: Any) -> int:
    """The least number of tokens of the results."""
    if counts is not None:
        check.fail("num_token_padding", "None with expert_num_tokens", "one")
    if len(x.shape) < 2:
        check.dimensions(name, x.shape, ("tokens", "hidden"))
    return check.integer("num_token_padding", padding, 0, MAX_ROWS)


def scale_of(
    name: str, array: Any, number: Any, like: View, like_name: str, none: Any = 1.0
) -> tuple[View | None, Any]:
    """A scale as the kernels take it: an array of one float32 or None, and the number to use where that is None.

    `array` is what the caller gives unless it is a `number`; `none` is the number for neither. Raises TypeError and
    ValueError for a value that is neither a finite number nor a float32 array of one element in the library and on the
    device of `like`.
    """
    if number is not None:
        return None, check.number(name, number)
    if array is None:
        return None, none
    view = view_of(name, array)
    if view is None:
        return None, check.number(name, array)
    read_like(name, view, like, like_name, ("float32",))
    if any(size != 1 for size in view.shape):
        check.fail(name, "a number or an array of one element", f"an array of shape {[*view.shape]}")
    return view, 1.0


def _zero_point(azp: Any, x: View, name: str, has_scale: bool, symmetric: bool) -> View | None:
    """The zero point that goes with a given scale."""
    if azp is None:
        if has_scale and not symmetric:
            check.fail("azp", "an int32 array of one element with a scale that is not symmetric", "None", TypeError)
        return None
    if not has_scale or symmetric:
        check.fail("azp", "None without a scale, or if symmetric", "one")
    view = read_like("azp", azp, x, name, ("int32",))
    if any(size != 1 for size in view.shape):
        check.fail("azp", "an array of one element", f"an array of shape {[*view.shape]}")
    return view


def _groups(function: Function, own: _Options, k: int, has_scale: bool) -> tuple[Any, float | None]:
    """The numbers that share a scale, None for a row, and the least magnitude that the caller gives."""
    group = own.group_size
    if "group_size" in function.options and not has_scale and not (function.is_activated and group is None):
        group = check.integer("group_size", group, 1)
        if k % group:
            check.fail(function.name, f"of whole groups of {group} along its last dimension", k)
    if "eps" not in function.options:
        return group, None
    smallest = check.number("eps", own.eps)
    if smallest < _MIN_EPS:
        check.fail("eps", f"a number of at least {_MIN_EPS}", own.eps)
    return group, smallest


def _out_of(name: str, array: Any, result: Result, x: View, x_name: str) -> View | None:
    """An array to write into, which fits a result; None where the call makes one."""
    if array is None:
        return None
    view, shape = view_of(name, array), result.shape
    if result.transposed:
        shape = _turned(shape)
        if view is not None and len(view.shape) > 1:
            view = view._replace(shape=_turned(view.shape), strides=_turned(view.strides))
    return read_like(name, array if view is None else view, x, x_name, result.dtypes, shape, result.symbols)


def _turned(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes or strides with the last two exchanged."""
    return *sizes[:-2], sizes[-1], sizes[-2]


def _choose(
    function: Function, own: _Options, x: View, rows: int, k: int, group: int | None, smallest: float | None,
    is_one: bool, has_scale: bool, addresses_align: bool, stride: int,
) -> Config | TensorConfig:  # fmt: skip
    """The kernels of a call that is checked."""
    form = "E4M3" if function.dtype == FP8 else "INT8_CUT" if own.truncate else "INT8" if own.symmetric else "INT8_AZP"
    activation = activations.number(own.activation, optional=True)
    of_rows: dict[str, Any] = {
        "aligned": addresses_align and stride % 16 == 0, "activation": activation, "form": form,
        "variant": own.variant, "name": function.name,
    }  # fmt: skip
    if is_one:
        is_empty = rows == 0 or k == 0
        return choose_tensor(x.dtype, k, not has_scale, gpu=runtime.gpu_of(x), is_empty=is_empty, **of_rows)
    if rows == 0 or (group and k == 0):
        of_rows["variant"] = "auto"  # nothing is launched
    scales = {"smallest": smallest, "power_of_two": own.use_ue8m0, "column_major": own.column_major_scales}
    return choose_groups(x.dtype, k, group or 0, **scales, **of_rows)


def _chosen(
    x: View, config: Config | TensorConfig, stride: int, most_rows: int, results: tuple[Result, Result], is_one: bool,
    max_tokens: int, has_zeros: bool,
) -> tuple[_Chosen, list[tuple[int, ...]]]:  # fmt: skip
    """What the calls of a class share, and the free dimensions of the arrays of a call."""
    (q, dtype, *_), (s, _, _, is_turned) = results
    outer, max_tokens = x.shape[:-1], max_tokens or 1
    if not outer:
        return _Chosen(config, stride, MAX_ROWS, dtype, True, 1, 1, q, s, is_one, False, has_zeros), [()] * 7
    free: list[tuple[int, ...]] = [(0,), (0,), (0,), () if is_one else (0,), (), (), ()]
    if is_turned and len(outer) == 1:
        max_tokens, free[3] = 0, (0, 2)  # the distance between groups is the number of rows
    elif is_turned:
        max_tokens = outer[-1] or 1
    inner, s = math.prod(outer[1:]), s if is_one else s[1:]
    most = most_rows // max(inner, 1)
    return _Chosen(config, stride, most, dtype, False, inner, max_tokens, q[1:], s, is_one, is_turned, has_zeros), free


def _run_twin(
    function: Function, x: View, to: Sequence[View | None], scales: Result, arguments: dict[str, Any]
) -> tuple[Any, ...] | None:
    """The results of the NumPy reference, which takes some of the `arguments`; None for a call that is described."""
    takes, (q, s), made = inspect.signature(function.twin).parameters, to, None
    if scales.transposed and s is None and x.library.recorder is None:
        made = _column_major(x.library, scales.shape, None)
        s = x.library.view("", made)
    arguments |= dict(zip(function.outs, (q, s), strict=True))
    out = [q, s] if arguments["symmetric"] else [q, s, None]
    found = runtime.run_twin(
        lambda **given: [result for result in function.twin(**given) if result is not None],
        x, out, {name: value for name, value in arguments.items() if name in takes},
    )  # fmt: skip
    if found is None:
        return None
    return found if made is None else (found[0], runtime.returned(made, None, x))
