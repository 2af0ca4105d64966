"""Arrays of the caller's libraries: what they are, where they are, and how one like them is made.

Each library that is known here is a `Library`: it answers the same few questions with its arrays' own attributes, so
that a call costs no conversion. `library_of` finds it by the array's type. An array of any other library enters and
leaves by DLPack.
"""

from __future__ import annotations

import functools
import operator
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

#: A generator of random numbers of the arrays' library, such as `torch.Generator`.
Generator: TypeAlias = Any
#: A size that may differ between the calls of a compiled graph.
Size: TypeAlias = int

#: A shape, or a function that finds it in a call's environment.
Shape = tuple[int, ...] | Callable[[Sequence[Any]], tuple[int, ...]]

#: Names of the dtypes that have no native NumPy type.
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

#: The C++ type of a dtype in the templates.
CUDA_TYPE = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name such as "bfloat16"."""
    return _EXTENDED.get(name) or np.dtype(name)


_NUMPY_NAMES = {numpy_dtype(name): name for name in ITEM_SIZE}
#: CuPy has no FP8: its numbers are bytes there.
_CUPY_DTYPES = {name: numpy_dtype("uint8" if name.startswith("float8") else name) for name in ITEM_SIZE}


@functools.lru_cache(maxsize=1024)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order without gaps."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return tuple(strides)


def _with_free(shape: Sequence[int], strides: Sequence[int], free: tuple[int, ...]) -> tuple[Any, Any]:
    """A shape and strides with None for all that may differ; see `Library.alike`."""
    if free == (0,) and shape:
        return [None, *shape[1:]], list(strides)
    last = max(free, default=-1)
    return (
        [None if i in free else size for i, size in enumerate(shape)],
        [None if i < last else stride for i, stride in enumerate(strides)],
    )


class Quick(NamedTuple):
    """What a plan's text asks a library at every call: functions that need no `Library` to be called."""

    address: Callable[[Any], int]
    current_device: Callable[[], int]
    stream: Callable[[int], int]


_PART_ALIGNMENT = 256  # of the parts of a workspace, in bytes


@functools.lru_cache(maxsize=1024)
def _lay_out(sizes: tuple[int, ...]) -> tuple[int, list[int]]:
    """The bytes of a workspace of parts of these sizes, and where each part begins."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _PART_ALIGNMENT) * _PART_ALIGNMENT
    return end, starts


class View(NamedTuple):
    """What a call reads of an array, once. `strides` are in elements; `device` is None for host memory."""

    array: Any
    library: Library
    address: int  # 0 in host memory
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int | None
    #: The caller's array where it is known by DLPack alone: `array` shares its memory.
    foreign: Any = None

    @property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides its address."""
        return 16 if self.address % 16 == 0 else self.address & -self.address

    @property
    def item_size(self) -> int:
        return ITEM_SIZE[self.dtype]

    @property
    def on_host(self) -> bool:
        """Whether it is in host memory, where the NumPy reference runs."""
        return self.device is None

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in C order without gaps."""
        wanted = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):  # noqa: B905
            if stride != wanted and size != 1:
                return 0 in self.shape
            wanted *= size
        return True


#: `View` without the Python code of a named tuple, which takes twice as long.
_view: Callable[[type[View], tuple[Any, ...]], View] = tuple.__new__


class Library:
    """An array library. `device` is the index of a CUDA device, or None for host memory."""

    name: str
    array_type: type
    #: Whether `op` and `straight` read its arrays themselves, as tensors: `read` would be a tenth of a call's time.
    reads_as_tensor = False
    #: None: plans of this library have no text.
    quick: Quick | None = None
    #: Whether an array that requires gradients is refused now: the kernels have no backward.
    wants_gradients: Callable[[], bool] = staticmethod(lambda: False)
    #: What takes the launches of arrays that are only described (`cukern.runtime.described`); None: the driver.
    recorder: Any = None

    def view(self, name: str, array: Any) -> View:
        """What a call reads of an array, which messages call `name`.

        Raises TypeError for an array without memory of its own, ValueError for one on another kind of device,
        RuntimeError for one that requires gradients.
        """
        raise NotImplementedError

    def alike(self, arrays: Sequence[Any], free: Sequence[tuple[int, ...]]) -> Callable[..., bool]:
        """A function that compares other arrays with these: whether all but their addresses is the same.

        `free` has the dimensions of each array whose size may differ, too; a stride may where a later dimension does.
        """
        known = [*map(self._layout, arrays, free)]
        return lambda *others: [*map(self._layout, others, free)] == known

    def _layout(self, array: Any, free: tuple[int, ...]) -> tuple[Any, ...]:
        """All that `alike` compares of an array."""
        shape, strides = _with_free(array.shape, self.strides(array), free)
        return array.dtype, shape, strides, self.device(array)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        """An uninitialized array on a device, from the library's own allocator."""
        raise NotImplementedError

    def allocator(self, device: int) -> Callable[[tuple[int, ...], str], Any]:
        """`allocate` on a device, for a call that makes several arrays."""
        return lambda shape, dtype: self.allocate(shape, dtype, device)

    def transposed(self, array: Any) -> Any:
        """An array that was made for a call, with its last two dimensions exchanged."""
        return array.swapaxes(-1, -2)

    def workspace(self, sizes: Sequence[int], device: int) -> tuple[Any, list[int]]:
        """One allocation for parts of these sizes in bytes: its array, and the address of each part.

        The caller holds the array up to its last launch: else the allocator could give it to another thread.
        """
        end, starts = _lay_out(tuple(sizes))
        array = self.allocate((end,), "uint8", device)
        address = self.address(array)
        return array, [address + start for start in starts]

    def read(self, array: Any, signature: list[Any]) -> int:
        """The address of an array; all else that a plan may know of it is added to a call's signature.

        The shape is last but one of what is added. All of it is as the library has it: the types keep the words of two
        libraries apart.
        """
        raise NotImplementedError

    def read_all(self, arrays: Sequence[Any], signature: list[Any]) -> list[int]:
        """`read` for many arrays of one type."""
        return [self.read(array, signature) for array in arrays]

    def maker(
        self, shape: Shape, dtype: str, device: int | None, is_current: bool = True
    ) -> Callable[[Sequence[Any]], Any]:
        """A function of a call's environment that allocates an array on `device`.

        Unless `is_current`, the library's own current device may be another one.
        """
        raise NotImplementedError

    def current_device(self) -> int:
        """The current CUDA device of this thread."""
        return runtime.getDevice()

    def dtype(self, array: Any) -> str:
        return array.dtype.name

    def device(self, array: Any, name: str = "an array") -> int | None:
        """The device of an array, which messages call `name`."""
        raise NotImplementedError

    def address(self, array: Any) -> int:
        raise NotImplementedError

    def strides(self, array: Any) -> tuple[int, ...]:
        """Strides in elements."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """An uninitialized array on the device of `like`, from the library's own allocator."""
        return self.allocate(shape, dtype, self.device(like))

    def stream(self, device: int) -> int:
        """The handle of the caller's current stream on a device."""
        raise NotImplementedError

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        raise NotImplementedError

    def from_bytes(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        """A CuPy array of bytes as one of this library, in the same memory."""
        raise NotImplementedError


class _NumPy(Library):
    name = "NumPy"
    array_type = np.ndarray

    def view(self, name: str, array: Any) -> View:
        return _view(View, (array, self, 0, array.dtype.name, array.shape, self.strides(array), None, None))

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        return np.empty(shape, numpy_dtype(dtype))

    def read(self, array: Any, signature: list[Any]) -> int:
        signature += array.dtype, array.strides, array.shape, "host"
        return 0

    def device(self, array: Any, name: str = "an array") -> None:
        return None

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def strides(self, array: Any) -> tuple[int, ...]:
        size = array.itemsize
        return tuple([s // size for s in array.strides])

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return array


class _CuPy(Library):
    name = "CuPy"
    array_type = cupy.ndarray if cupy is not None else type(None)

    def view(self, name: str, array: Any) -> View:
        memory, dtype, size = array.data, array.dtype, array.itemsize
        strides = tuple([s // size for s in array.strides])
        name = _NUMPY_NAMES.get(dtype) or dtype.name
        return _view(View, (array, self, memory.ptr, name, array.shape, strides, memory.device_id, None))

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        if device == runtime.getDevice():
            return cupy.ndarray(shape, _CUPY_DTYPES[dtype])
        with current_device(device):  # type: ignore[arg-type]
            return cupy.ndarray(shape, _CUPY_DTYPES[dtype])

    def _layout(self, array: Any, free: tuple[int, ...]) -> tuple[Any, ...]:
        return array.dtype, *_with_free(array.shape, array.strides, free), array.data.device_id

    def read(self, array: Any, signature: list[Any]) -> int:
        memory = array.data
        signature += array.dtype, array.strides, array.shape, memory.device_id
        return memory.ptr

    def maker(
        self, shape: Shape, dtype: str, device: int | None, is_current: bool = True
    ) -> Callable[[Sequence[Any]], Any]:
        empty, kind = cupy.empty, _CUPY_DTYPES[dtype]
        if callable(shape):
            return lambda environment: empty(shape(environment), kind)
        return lambda environment: empty(shape, kind)

    def device(self, array: Any, name: str = "an array") -> int:
        return array.data.device_id

    def address(self, array: Any) -> int:
        return array.data.ptr

    def strides(self, array: Any) -> tuple[int, ...]:
        size = array.itemsize
        return tuple([s // size for s in array.strides])

    def stream(self, device: int) -> int:
        return cupy.cuda.get_current_stream(device).ptr

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        return cupy.asnumpy(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        with current_device(like.data.device_id):
            return cupy.asarray(array)

    def from_bytes(self, memory: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return memory.view(_CUPY_DTYPES[dtype]).reshape(shape)


_TENSOR_FACTS = operator.attrgetter("dtype", "shape", "device")
#: Lists of tensors of one length that are kept, to compare others with.
_MOST_LISTS = 8


class _Torch(Library):
    name = "torch"
    reads_as_tensor = True

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.array_type = torch.Tensor
        self._empty = torch.empty
        #: In a build for CUDA all devices with a number are CUDA's.
        self._is_for_cuda = torch.version.cuda is not None
        self.wants_gradients = torch.is_grad_enabled
        self._names = {
            dtype: name for name in ITEM_SIZE if isinstance(dtype := getattr(torch, name, None), torch.dtype)
        }
        self._dtypes = {name: dtype for dtype, name in self._names.items()}
        # Private names of torch. Each has a substitute where a version lacks it.
        native = getattr(torch, "_C", None)
        stream, device = (getattr(native, f"_cuda_get{name}", None) for name in ("CurrentRawStream", "Device"))
        # The allocation of torch.compile's own code, which takes two thirds of the time of torch.empty.
        guards = getattr(getattr(native, "_dynamo", None), "guards", None)
        self._empty_cuda: Callable[..., Any] | None = getattr(guards, "_empty_strided_cuda", None)
        # The guards of torch.compile, which compare many tensors with others in a fifth of the time of reading them.
        self._guards: Callable[..., Any] | None = getattr(guards, "TensorGuards", None)
        self._lists: dict[int, list[tuple[Callable[..., bool], tuple[Any, ...]]]] = {}
        if device is not None and stream is not None:
            self.quick = Quick(torch.Tensor.data_ptr, device, stream)
        # Functions of C, which a call asks without a step through Python.
        self.current_device = device or super().current_device  # type: ignore[method-assign]
        self.address = torch.Tensor.data_ptr  # type: ignore[method-assign]
        # The public torch.cuda.current_stream() builds an object and costs 40 times as much.
        self.stream = stream or (lambda device: torch.cuda.current_stream(device).cuda_stream)  # type: ignore[method-assign]

    def view(self, name: str, array: Any) -> View:
        try:
            address = array.data_ptr()
        except RuntimeError:  # sparse, for example
            got = f"{type(array).__name__} of layout {array.layout}"
            check.fail(name, "a strided tensor with memory of its own", got, TypeError)
        device = array.get_device()
        if device < 0 or not self._is_for_cuda:
            device = self.device(array, name)
        if array.requires_grad and self.wants_gradients():
            check.refuse_gradient(name)
        dtype = self._names.get(array.dtype) or self.dtype(array)
        return _view(View, (array, self, address, dtype, tuple(array.shape), array.stride(), device, None))

    def alike(self, arrays: Sequence[Any], free: Sequence[tuple[int, ...]]) -> Callable[..., bool]:
        if self._guards is None:
            return super().alike(arrays, free)
        # The guards take one tensor once.
        first = [[*map(id, arrays)].index(id(x)) for x in arrays]
        once = [*dict.fromkeys(first)]
        each = [_with_free(arrays[i].shape, arrays[i].stride(), free[i]) for i in once]
        sizes, strides = zip(*each, strict=True)
        guards = self._guards(*[arrays[i] for i in once], dynamic_dims_sizes=[*sizes], dynamic_dims_strides=[*strides])
        if len(once) == len(arrays):
            return guards.check  # type: ignore[no-any-return]
        check_once = guards.check
        again = [(i, j, self.alike([arrays[i]], [free[i]])) for i, j in enumerate(first) if i != j]

        def is_alike(*others: Any) -> bool:
            if not check_once(*[others[i] for i in once]):
                return False
            return all(others[i] is others[j] or is_one_alike(others[i]) for i, j, is_one_alike in again)

        return is_alike

    def _layout(self, array: Any, free: tuple[int, ...]) -> tuple[Any, ...]:
        return *super()._layout(array, free), array.requires_grad

    def _allocate(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array on the current device."""
        dims = len(shape)
        # Counts of rows that never repeat would fill the cache of strides.
        strides = (1,) if dims == 1 else (shape[1] or 1, 1) if dims == 2 else strides_of(shape)
        return self._empty_cuda(shape, strides, self._dtypes[dtype])  # type: ignore[misc]

    def allocator(self, device: int) -> Callable[[tuple[int, ...], str], Any]:
        is_current = self._empty_cuda is not None and self.current_device() == device
        return self._allocate if is_current else super().allocator(device)

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
        if device is not None and self._empty_cuda is not None and self.current_device() == device:
            # As in `_allocate`, without a further call.
            dims = len(shape)
            strides = (1,) if dims == 1 else (shape[1] or 1, 1) if dims == 2 else strides_of(shape)
            return self._empty_cuda(shape, strides, self._dtypes[dtype])
        place = self._torch.device("cpu") if device is None else self._torch.device("cuda", device)
        return self._empty(shape, dtype=self._dtypes[dtype], device=place)

    def read(self, array: Any, signature: list[Any]) -> int:
        signature += array.dtype, array.stride(), array.shape, array.get_device()
        return array.data_ptr()

    def read_all(self, arrays: Sequence[Any], signature: list[Any]) -> list[int]:
        tensor, known = self._torch.Tensor, self._lists.setdefault(len(arrays), [])
        for is_alike, words in known:
            if is_alike(*arrays):
                signature += words
                break
        else:
            # Usually all are alike, such as the caches of all layers: then one stands for all, which hashes faster.
            facts = [*zip(map(_TENSOR_FACTS, arrays), map(tensor.stride, arrays), strict=True)]
            words = (facts[0], "all") if facts.count(facts[0]) == len(facts) else (*facts,)
            if self._guards is not None and len(known) < _MOST_LISTS:
                guards = self._guards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                known.append((guards.check, words))
            signature += words
        return [*map(tensor.data_ptr, arrays)]

    def maker(
        self, shape: Shape, dtype: str, device: int | None, is_current: bool = True
    ) -> Callable[[Sequence[Any]], Any]:
        empty, kind = self._empty_cuda, self._dtypes[dtype]
        if empty is None or not is_current:
            general, place = self._empty, self._torch.device("cuda", device)
            if callable(shape):
                return lambda environment: general(shape(environment), dtype=kind, device=place)
            return lambda environment: general(shape, dtype=kind, device=place)
        if callable(shape):

            def make(environment: Sequence[Any]) -> Any:
                found = shape(environment)
                return empty(found, strides_of(found), kind)

            return make
        strides = strides_of(shape)
        return lambda environment: empty(shape, strides, kind)

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
            # NumPy knows these only through ml_dtypes, so the bits travel as integers.
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
        # Not by DLPack, which makes one stream wait for another: a graph may be capturing.
        tensor = self._torch.as_tensor(memory, device=self._torch.device("cuda", memory.data.device_id))
        return tensor.view(self._dtypes[dtype]).view(shape)


NUMPY = _NumPy()
CUPY = _CuPy()
#: The library of each type seen so far; None for what is no array, or known by DLPack alone.
KNOWN: dict[type, Library | None] = {np.ndarray: NUMPY}


def _find(kind: type) -> Library | None:
    """The library of a type seen for the first time; None for what is no array, or known by DLPack alone."""
    if issubclass(kind, np.ndarray):
        return NUMPY
    if cupy is not None and issubclass(kind, cupy.ndarray):
        return CUPY
    # There are tensors only where torch has been imported; to import it here would take seconds.
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return next((x for x in KNOWN.values() if isinstance(x, _Torch)), None) or _Torch()
    return None


def library_of(array: Any) -> Library | None:
    """The library of an array; None for what is no array, or known by DLPack alone."""
    kind = type(array)
    try:
        return KNOWN[kind]
    except KeyError:
        library = KNOWN[kind] = _find(kind)
        return library


def is_array(value: Any) -> bool:
    """Whether a value that may be a number is an array; NumPy's scalars are numbers."""
    return hasattr(value, "shape") and not isinstance(value, np.generic)


_DLPACK_CPU, _DLPACK_CUDA = 1, (2, 13)  # kDLCPU; kDLCUDA and kDLCUDAManaged


def enter(name: str, array: Any) -> Any:
    """An array of a library known here, sharing the memory of `array`.

    Raises TypeError for what is no array, ValueError for one on another kind of device.
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
    """`array` in the library of the foreign array `like`, if that library takes arrays by DLPack."""
    namespace = getattr(like, "__array_namespace__", None)
    take = getattr(namespace(), "from_dlpack", None) if namespace else None
    return take(array) if take else array


def enter_all(name: str, value: Any) -> Any:
    """`value`, in which arrays that are known by DLPack alone are replaced by those that `enter` makes of them."""
    if isinstance(value, (tuple, list)):
        return type(value)(enter_all(name, x) for x in value)
    return enter(name, value) if hasattr(value, "__dlpack__") else value
