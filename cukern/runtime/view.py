"""The arrays of a call, each read once, and their checks.

Each failure names the argument, what was wanted and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from cukern.runtime import arrays, check
from cukern.runtime.arrays import View

Reader = Callable[[str, Any], View]
#: The reader of each type seen so far.
READERS: dict[type, Reader] = {}


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
    view = view_of(name, x)
    if view is None:
        check.fail(name, "an array (NumPy, CuPy, torch, or any with __dlpack__)", type(x).__name__, TypeError)
    if dtypes and view.dtype not in dtypes:
        check.dtype(name, view.dtype, dtypes)
    if symbols and len(view.shape) != len(symbols):
        check.dimensions(name, view.shape, symbols)
    return view


def read_near(name: str, x: Any, like: View, like_name: str, dtypes: Collection[str]) -> View:
    """`x`, an array or its view, is of the library and on the device of `like`, and has one of these dtypes.

    Raises TypeError for another library or dtype, ValueError for another device.
    """
    view = x if type(x) is View else view_of(name, x)
    if view is None or view.library is not like.library or (view.foreign is not None and like.foreign is None):
        found = type(x) if view is None else type(view.foreign) if view.foreign is not None else view.library.array_type
        wanted = f"a {like.library.name} array like {like_name}"
        check.fail(name, wanted, f"{found.__module__}.{found.__name__}", TypeError)
    if view.device != like.device:
        check.fail(name, f"on {_place(like)} like {like_name}", f"one on {_place(view)}")
    if view.dtype not in dtypes:
        check.dtype(name, view.dtype, dtypes)
    return view


def read_like(
    name: str, x: Any, like: View, like_name: str, dtypes: Collection[str], shape: tuple[int, ...], symbols: str
) -> View:
    """`x` is as for `read_near`, and contiguous with this shape, which messages also give in `symbols`.

    Raises ValueError for another shape and for strides that do not fit.
    """
    view = read_near(name, x, like, like_name, dtypes)
    if view.shape != shape:
        check.shape(name, view.shape, shape, symbols)
    if view.strides != (1,) and not view.is_contiguous:
        check.fail(name, "contiguous", f"strides {view.strides} (in elements)")
    return view


def _place(view: View) -> str:
    return "the CPU" if view.device is None else f"CUDA device {view.device}"


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
