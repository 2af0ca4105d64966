"""Read the properties of the caller's arrays, access their memory, and create arrays.

A `Library` reads the attributes of its own arrays, so a call converts nothing. Arrays of other libraries pass through
DLPack: `enter` converts arguments, `leave` converts results.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from cukern.runtime import check
from cukern.runtime.array_types import AnyArray as AnyArray
from cukern.runtime.array_types import Array as Array
from cukern.runtime.array_types import WrittenArray as WrittenArray
from cukern.runtime.cuda import cupy, current_device, need_cupy, runtime

#: A random number generator, such as `torch.Generator`.
Generator: TypeAlias = Any
#: A size that may be symbolic in a compiled graph.
Size: TypeAlias = int

#: Dtypes that NumPy gets from ml_dtypes.
_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
}

ITEM_SIZE = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}

#: C++ types in the templates.
CUDA_TYPE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return _EXTENDED.get(name) or np.dtype(name)


_NUMPY_NAMES = {numpy_dtype(name): name for name in ITEM_SIZE}
#: CuPy has no FP8 dtypes, so its FP8 arrays have dtype uint8.
_CUPY_DTYPES = {name: numpy_dtype("uint8" if name.startswith("float8") else name) for name in ITEM_SIZE}


@functools.lru_cache(maxsize=1024)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides in elements of a C-contiguous array."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return tuple(strides)


_WORKSPACE_ALIGNMENT = 256  # bytes; the alignment of each array in a workspace


@functools.lru_cache(maxsize=1024)
def lay_out(sizes: tuple[int, ...]) -> tuple[int, list[int]]:
    """Return the size of a workspace for arrays of `sizes`, and the start of each array, all in bytes."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return end, starts


class View(NamedTuple):
    """Properties of an array. `strides` are in elements; `device` is None for host memory."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int | None


class Library:
    """An array library. `device` is a CUDA device index, or None for host memory."""

    name: str
    array_type: type
    #: Whether gradients are enabled. If so, arrays that require gradients are refused: the kernels have no backward.
    wants_gradients: Callable[[], bool] = staticmethod(lambda: False)

    def view(self, name: str, array: Any) -> View:
        """Return the properties of an array. Error messages call the array `name`.

        Raises TypeError for an array without memory, ValueError for an unsupported device, RuntimeError for an array
        that requires gradients.
        """
        raise NotImplementedError

    def alike(self, arrays: Sequence[Any]) -> Callable[..., bool]:
        """Return a function that tells whether other arrays have the dtypes, shapes, strides and devices of
        `arrays`."""
        known = [*map(self._layout, arrays)]
        return lambda *others: [*map(self._layout, others)] == known

    def _layout(self, array: Any) -> tuple[Any, ...]:
        return array.dtype, array.shape, array.strides, self.device(array)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        """Return an uninitialized array."""
        raise NotImplementedError

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        """Return a function that calls `allocate`. Call it only while `device` is the thread's current device."""
        return functools.partial(self.allocate, shape, dtype, device)

    def current_device(self) -> int:
        return runtime.getDevice()

    def dtype(self, array: Any) -> str:
        return array.dtype.name

    def device(self, array: Any, name: str = "an array") -> int | None:
        raise NotImplementedError

    def address(self, array: Any) -> int:
        raise NotImplementedError

    def strides(self, array: Any) -> tuple[int, ...]:
        """Return the strides in elements."""
        size = array.itemsize
        return tuple([s // size for s in array.strides])

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return self.allocate(shape, dtype, self.device(like))

    def stream(self, device: int) -> int:
        """Return the handle of the caller's current stream."""
        raise NotImplementedError

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        raise NotImplementedError

    def from_bytes(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of this library that shares the memory of a CuPy byte array."""
        raise NotImplementedError


class _NumPy(Library):
    name = "NumPy"
    array_type = np.ndarray

    def view(self, name: str, array: Any) -> View:
        return View(array.ctypes.data, array.dtype.name, array.shape, self.strides(array), None)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        return np.empty(shape, numpy_dtype(dtype))

    def device(self, array: Any, name: str = "an array") -> None:
        return None

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return array


class _CuPy(Library):
    name = "CuPy"
    array_type = cupy.ndarray if cupy is not None else type(None)

    def view(self, name: str, array: Any) -> View:
        memory, dtype = array.data, array.dtype
        return View(
            memory.ptr, _NUMPY_NAMES.get(dtype) or dtype.name, array.shape, self.strides(array), memory.device_id
        )

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        if device == runtime.getDevice():
            return cupy.ndarray(shape, _CUPY_DTYPES[dtype])
        with current_device(device):  # type: ignore[arg-type]
            return cupy.ndarray(shape, _CUPY_DTYPES[dtype])

    def _layout(self, array: Any) -> tuple[Any, ...]:
        return array.dtype, array.shape, array.strides, array.data.device_id

    def device(self, array: Any, name: str = "an array") -> int:
        return array.data.device_id

    def address(self, array: Any) -> int:
        return array.data.ptr

    def stream(self, device: int) -> int:
        return cupy.cuda.get_current_stream(device).ptr

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return cupy.asnumpy(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        with current_device(like.data.device_id):
            return cupy.asarray(array)

    def from_bytes(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return memory.view(_CUPY_DTYPES[dtype]).reshape(shape)


class _Torch(Library):
    name = "torch"

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.array_type = torch.Tensor
        self._empty = torch.empty
        #: In a CUDA build of torch, every device with an index is a CUDA device.
        self._is_for_cuda = torch.version.cuda is not None
        self.wants_gradients = torch.is_grad_enabled
        self._names = {
            dtype: name for name in ITEM_SIZE if isinstance(dtype := getattr(torch, name, None), torch.dtype)
        }
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        # These names are private to torch. If torch lacks one, a public function is used instead.
        native = getattr(torch, "_C", None)
        stream, device = (getattr(native, f"_cuda_get{name}", None) for name in ("CurrentRawStream", "Device"))
        # torch.compile's allocation function takes two thirds of the time of torch.empty.
        guards = getattr(getattr(native, "_dynamo", None), "guards", None)
        self._empty_cuda: Callable[..., Any] | None = getattr(guards, "_empty_strided_cuda", None)
        # Comparing many tensors by torch.compile's guards is five times as fast as reading their attributes in Python.
        self._guards: Callable[..., Any] | None = getattr(guards, "TensorGuards", None)
        # These are C functions, so calls run no Python code.
        self.current_device = device or super().current_device  # type: ignore[method-assign]
        self.address = torch.Tensor.data_ptr  # type: ignore[method-assign]
        # torch.cuda.current_stream() builds an object and takes 40 times as long as the private function.
        self.stream = stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)  # type: ignore[method-assign]

    def view(self, name: str, array: Any) -> View:
        try:
            address = array.data_ptr()
        except RuntimeError:  # for example a sparse tensor
            got = f"{type(array).__name__} of layout {array.layout}"
            check.fail(name, "a strided tensor with memory of its own", got, TypeError)
        device = array.get_device()
        if device < 0 or not self._is_for_cuda:
            device = self.device(array, name)
        if array.requires_grad and self.wants_gradients():
            check.refuse_gradient(name)
        dtype = self._names.get(array.dtype) or self.dtype(array)
        return View(address, dtype, tuple(array.shape), array.stride(), device)

    def alike(self, arrays: Sequence[Any]) -> Callable[..., bool]:
        if self._guards is None:
            return super().alike(arrays)
        # TensorGuards refuse a tensor that occurs twice, so duplicates are compared separately.
        first = [[*map(id, arrays)].index(id(x)) for x in arrays]
        once = [*dict.fromkeys(first)]
        guards = self._guards(*[arrays[i] for i in once], dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if len(once) == len(arrays):
            return guards.check  # type: ignore[no-any-return]
        check_once = guards.check
        again = [(i, j, self.alike([arrays[i]])) for i, j in enumerate(first) if i != j]

        def matches(*others: Any) -> bool:
            if not check_once(*[others[i] for i in once]):
                return False
            return all(others[i] is others[j] or is_one_alike(others[i]) for i, j, is_one_alike in again)

        return matches

    def _layout(self, array: Any) -> tuple[Any, ...]:
        return array.dtype, array.shape, array.stride(), array.get_device(), array.requires_grad

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        if self._empty_cuda is None:
            return super().maker(shape, dtype, device)
        return functools.partial(self._empty_cuda, shape, strides_of(shape), self._dtypes[dtype])

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        if device is not None and self._empty_cuda is not None and self.current_device() == device:
            return self._empty_cuda(shape, strides_of(shape), self._dtypes[dtype])
        place = self._torch.device("cpu") if device is None else self._torch.device("cuda", device)
        return self._empty(shape, dtype=self._dtypes[dtype], device=place)

    def dtype(self, array: Any) -> str:
        return self._names.get(array.dtype) or str(array.dtype).removeprefix("torch.")

    def device(self, array: Any, name: str = "an array") -> int | None:
        if array.is_cuda:
            return array.get_device()
        if array.device.type != "cpu":
            check.fail(name, "on a CUDA device or the CPU", f"one on {array.device}")
        return None

    def strides(self, array: Any) -> tuple[int, ...]:
        return array.stride()

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        array = array.detach().cpu()
        name = self.dtype(array)
        if name in _EXTENDED:
            # NumPy has these dtypes only through ml_dtypes, so pass the bits as integers.
            carrier = {1: self._torch.uint8, 2: self._torch.int16}[ITEM_SIZE[name]]
            return array.view(carrier).numpy().view(_EXTENDED[name])
        return array.numpy()

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        array = np.ascontiguousarray(array)
        name = array.dtype.name
        if name in _EXTENDED:
            carrier = {1: np.uint8, 2: np.int16}[array.itemsize]
            tensor = self._torch.from_numpy(array.view(carrier)).view(self._dtypes[name])
        else:
            tensor = self._torch.from_numpy(array)
        return tensor.to(like.device)

    def from_bytes(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        # DLPack would make one stream wait for another, which may fail during graph capture.
        tensor = self._torch.as_tensor(memory, device=self._torch.device("cuda", memory.data.device_id))
        return tensor.view(self._dtypes[dtype]).view(shape)


NUMPY = _NumPy()
CUPY = _CuPy()
#: Maps a type to the result of `library_of`.
KNOWN: dict[type, Library | None] = {np.ndarray: NUMPY}


def _find(kind: type) -> Library | None:
    if issubclass(kind, np.ndarray):
        return NUMPY
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return CUPY
    # A tensor exists only if torch is imported. Importing torch here would take seconds.
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return next((x for x in KNOWN.values() if isinstance(x, _Torch)), None) or _Torch()
    return None


def library_of(array: Any) -> Library | None:
    """Return an array's library; None if it is only known by DLPack, or not an array."""
    kind = type(array)
    try:
        return KNOWN[kind]
    except KeyError:
        library = KNOWN[kind] = _find(kind)
        return library


def is_array(value: Any) -> bool:
    """Return whether a value is an array; NumPy scalars are not."""
    return hasattr(value, "shape") and not isinstance(value, np.generic)


_DLPACK_CPU, _DLPACK_CUDA = 1, (2, 13)  # kDLCPU; kDLCUDA and kDLCUDAManaged


def enter(name: str, array: Any) -> Any:
    """Convert an array of any library to a known library, without a copy.

    Raises TypeError for a value that is no array, ValueError for an unsupported device.
    """
    if library_of(array) is not None:
        return array
    if not (hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")):
        wanted = "an array (NumPy, CuPy, torch, or any with __dlpack__)"
        check.fail(name, wanted, type(array).__name__, TypeError)
    kind, _ = array.__dlpack_device__()
    if kind == _DLPACK_CPU:
        return np.from_dlpack(array)
    if int(kind) in _DLPACK_CUDA:
        need_cupy("an array on a GPU")
        return cupy.from_dlpack(array)
    check.fail(name, "on a CUDA device or in host memory", f"DLPack device type {int(kind)}")


def leave(array: Any, like: Any) -> Any:
    """Convert `array` to the library of `like` if that library takes DLPack, else return it unchanged."""
    namespace = getattr(like, "__array_namespace__", None)
    take = getattr(namespace(), "from_dlpack", None) if namespace else None
    return take(array) if take else array


def enter_all(name: str, value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(enter_all(name, x) for x in value)
    return enter(name, value) if hasattr(value, "__dlpack__") else value
