"""Tensor maps: descriptions of arrays for the loads of the tensor memory accelerator (TMA), from Hopper on."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from cukern.runtime.cuda import libcuda

__all__ = ["TENSOR_MAP_BYTES", "encode"]

TENSOR_MAP_BYTES = 128
_ALIGNMENT = 64
_MOST_DIMS = 5
# Values of the driver's enumerations.
_TYPES = {"uint8": 0, "uint64": 4, "float16": 6, "float32": 7, "bfloat16": 9}
_INTERLEAVE_NONE = 0
_SWIZZLE_NONE, _SWIZZLE_128 = 0, 3
_PROMOTIONS = {128: 2, 256: 3}
_FILL_ZERO = 0


class _Buffers(threading.local):
    """Per-thread memory for the arguments of the driver's encode function and for the map that it writes."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _ALIGNMENT)
        here = ctypes.addressof(self.memory)
        self.map = here + -here % _ALIGNMENT
        self.dims, self.strides = (ctypes.c_uint64 * _MOST_DIMS)(), (ctypes.c_uint64 * _MOST_DIMS)()
        self.box, self.steps = (ctypes.c_uint32 * _MOST_DIMS)(), (ctypes.c_uint32 * _MOST_DIMS)(*[1] * _MOST_DIMS)


_buffers = _Buffers()


@functools.cache
def _encode_tiled() -> Any:
    function = libcuda().cuTensorMapEncodeTiled
    number, place = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [place, number, ctypes.c_uint32, place, *[place] * 4, *[number] * 4]
    return function


def encode(
    address: int,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promotion: int = 256,
    swizzled: bool = True,
) -> bytes:
    """Encode a tensor map (`CUtensorMap`) of an array in global memory, for tiles with 128-byte swizzle or none.

    Args:
        address: the address of the first element, a multiple of 16.
        dims: the number of elements along each dimension, the innermost first.
        strides: the bytes between neighbours along each dimension except the innermost, multiples of 16.
        box: the number of elements of a tile along each dimension, at most 256. A swizzled tile has 128 bytes along the
            innermost dimension.
        promotion: the smallest number of bytes that L2 fetches, 128 or 256.
        swizzled: whether a tile has the 128-byte swizzle; else its bytes are in the order of memory, without gaps.

    Elements of a tile outside the array are 0. Raises RuntimeError if the driver refuses the sizes.
    """
    rank, own = len(dims), _buffers
    own.dims[:rank], own.strides[: len(strides)], own.box[:rank] = [*dims], [*strides], [*box]
    status = _encode_tiled()(
        own.map, _TYPES[dtype], rank, address, ctypes.addressof(own.dims), ctypes.addressof(own.strides),
        ctypes.addressof(own.box), ctypes.addressof(own.steps), _INTERLEAVE_NONE,
        _SWIZZLE_128 if swizzled else _SWIZZLE_NONE, _PROMOTIONS[promotion], _FILL_ZERO,
    )  # fmt: skip
    if status:
        raise RuntimeError(f"no tensor map for {dtype} {dims}, strides {strides}, box {box}: CUDA error {status}")
    return ctypes.string_at(own.map, TENSOR_MAP_BYTES)
