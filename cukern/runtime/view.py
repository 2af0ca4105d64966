"""The arrays of a call, each read once, and their checks.

Each failure names the argument, what was wanted and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from cukern.runtime import arrays, check
from cukern.runtime.arrays import View

Reader = Callable[[str, Any], View]
#: The reader of each type seen so far. A view is read as it is.
READERS: dict[type, Reader] = {View: lambda name, x: x}


def view_of(name: str, x: Any) -> View | None:
    """What a call reads of an array; None for what is no array. Raises as `arrays.Library.view`."""
    reader = READERS.get(type(x)) or _find_reader(x)
    return None if reader is None else reader(name, x)


def _find_reader(x: Any) -> Reader | None:
    library = arrays.library_of(x)
    if library is None and not hasattr(x, "__dlpack__"):
        return None
    return READERS.setdefault(type(x), _view_foreign if library is None else library.view)


def _view_foreign(name: str, x: Any) -> View:
    """The view of an array that is known by DLPack alone."""
    entered = arrays.enter(name, x)
    library = arrays.library_of(entered)
    assert library is not None
    return library.view(name, entered)._replace(foreign=x)


def read(name: str, x: Any, dtypes: Collection[str] = (), symbols: tuple[str, ...] = ()) -> View:
    """`x`, the array that decides where a call runs, has one of these dtypes and the dimensions `symbols`.

    Raises TypeError for a value that is no array and for another dtype, ValueError for other dimensions.
    """
    reader = READERS.get(type(x)) or _find_reader(x)
    if reader is None:
        check.fail(name, "an array (NumPy, CuPy, torch, or any with __dlpack__)", type(x).__name__, TypeError)
    view = reader(name, x)
    if dtypes and view.dtype not in dtypes:
        check.dtype(name, view.dtype, dtypes)
    if symbols and len(view.shape) != len(symbols):
        check.dimensions(name, view.shape, symbols)
    return view


def read_beside(name: str, x: Any, like: View, like_name: str) -> View:
    """`x`, an array or its view, is of the library and on the device of `like`, which messages call `like_name`.

    Raises TypeError for another library, ValueError for another device.
    """
    reader = READERS.get(type(x)) or _find_reader(x)
    if reader is None:
        _refuse_library(name, type(x), like, like_name)
    view = reader(name, x)
    library, device, foreign = view.library, view.device, view.foreign
    if library is not like.library or (foreign is not None and like.foreign is None):
        _refuse_library(name, library.array_type if foreign is None else type(foreign), like, like_name)
    if device != like.device:
        check.fail(name, f"on {_place(like)} like {like_name}", f"one on {_place(view)}")
    return view


def read_like(
    name: str,
    x: Any,
    like: View,
    like_name: str,
    dtypes: Collection[str],
    shape: tuple[int, ...] | None = None,
    symbols: str = "",
) -> View:
    """`x`, an array or its view, is of the library and on the device of `like`, and has one of these dtypes.

    With a `shape`, which messages also give in `symbols`, it has this shape and is contiguous. Raises TypeError for
    another library or dtype, ValueError for another device or shape, and for strides that do not fit.
    """
    view = read_beside(name, x, like, like_name)
    dtype = view.dtype
    if dtype not in dtypes:
        check.dtype(name, dtype, dtypes)
    if shape is not None:
        if view.shape != shape:
            check.shape(name, view.shape, shape, symbols)
        contiguous(name, view)
    return view


def _refuse_library(name: str, found: type, like: View, like_name: str) -> NoReturn:
    wanted = f"a {like.library.name} array like {like_name}"
    check.fail(name, wanted, f"{found.__module__}.{found.__name__}", TypeError)


def _place(view: View) -> str:
    return "the CPU" if view.device is None else f"CUDA device {view.device}"


def contiguous(name: str, view: View) -> None:
    """Raises ValueError unless the elements of `view` lie in C order without gaps."""
    if not view.is_contiguous:
        check.fail(name, "contiguous", f"strides {view.strides} (in elements)")


def _expect_lines(name: str, array: View) -> None:
    """Raises ValueError unless the last dimension of `array` is contiguous, and no stride is negative."""
    if not array.is_contiguous and ((array.strides[-1] != 1 and array.shape[-1] > 1) or min(array.strides) < 0):
        check.fail(name, "contiguous along its last dimension", f"strides {array.strides} (in elements)")


def is_transposed(weights: View) -> bool:
    """Whether weights [experts, n, k] lie as [experts, k, n]: n is contiguous, and k is not."""
    return weights.strides[-1] != 1 and weights.shape[-1] > 1 and not weights.is_contiguous


def expect_weights(name: str, weights: View) -> None:
    """Raises ValueError unless k of `weights` [experts, n, k] is contiguous, or n in 16 and 32 bits; none negative."""
    if weights.item_size == 1 or not is_transposed(weights):
        _expect_lines(name, weights)
    elif (weights.strides[1] != 1 and weights.shape[1] > 1) or min(weights.strides) < 0:
        wanted = "contiguous along its last dimension, or along the one before"
        check.fail(name, wanted, f"strides {weights.strides} (in elements)")


def read_table(name: str, x: Any, like: View, like_name: str, rows: int, symbols: tuple[str, str]) -> View:
    """`x` is an int32 matrix of `rows` rows, each contiguous, of the library and on the device of `like`.

    Raises TypeError for a library or a dtype, ValueError for a device, a shape or strides that do not fit.
    """
    view = read_like(name, x, like, like_name, ("int32",))
    check.dimensions(name, view.shape, symbols)
    if view.shape[0] != rows:
        check.shape(name, view.shape, (rows, view.shape[1]), f"[{', '.join(symbols)}]")
    row_stride(name, view)
    return view


def row_stride(name: str, matrix: View) -> int:
    """The distance between the rows of a matrix, in elements.

    Raises ValueError unless each row is contiguous.
    """
    between_rows, stride = matrix.strides
    if stride != 1 and matrix.shape[1] > 1 and matrix.shape[0]:
        check.fail(name, "contiguous along its last dimension", f"strides {between_rows, stride} (in elements)")
    return between_rows


def out_of(out: Any, count: int, words: str) -> Sequence[Any]:
    """The arrays of an `out` of several: `count` of them, each None where the call makes one.

    Raises TypeError for another number of them; `words` is what messages call it, such as "a pair (weights, ids)".
    """
    if out is None:
        return (None,) * count
    if not isinstance(out, (tuple, list)) or len(out) != count:
        check.fail("out", words, type(out).__name__, TypeError)
    return out
