"""Tensor maps: descriptions of arrays for loads by the tensor memory accelerator (TMA), from Hopper on."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from cukern.runtime.cuda import libcuda

__all__ = ["TENSOR_MAP_BYTES", "encode"]

TENSOR_MAP_BYTES = 128
_ALIGNMENT = 64
_MAX_DIMS = 5
# Values of the driver's enumerations.
_TYPES = {"uint8": 0, "uint64": 4, "float16": 6, "float32": 7, "bfloat16": 9}
_INTERLEAVE_NONE = 0
_SWIZZLE_NONE, _SWIZZLE_128 = 0, 3
_PROMOTIONS = {128: 2, 256: 3}
_FILL_ZERO = 0


class _Buffers(threading.local):
    """Per-thread memory for the driver's encode function."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _ALIGNMENT)
        here = ctypes.addressof(self.memory)
        self.map = here + -here % _ALIGNMENT
        self.dims, self.strides = (ctypes.c_uint64 * _MAX_DIMS)(), (ctypes.c_uint64 * _MAX_DIMS)()
        self.box, self.steps = (ctypes.c_uint32 * _MAX_DIMS)(), (ctypes.c_uint32 * _MAX_DIMS)(*[1] * _MAX_DIMS)


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
    """Encode a tensor map (`CUtensorMap`) of an array in global memory. TMA fills elements outside the array with 0.

    Args:
        address: the address of the first element, a multiple of 16.
        dims: sizes, innermost first.
        strides: in bytes, multiples of 16, for all dimensions but the innermost.
        box: tile sizes, at most 256. The innermost is 128 bytes if swizzled.
        promotion: bytes of an L2 fetch, 128 or 256.
        swizzled: whether tiles have the 128-byte swizzle.
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
