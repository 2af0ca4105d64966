"""Tensor maps: how the tensor memory accelerator of Hopper and later GPUs finds tiles of an array."""

from __future__ import annotations

import ctypes
import functools

from cukern.runtime.cuda import libcuda

__all__ = ["TENSOR_MAP_BYTES", "encode"]

TENSOR_MAP_BYTES = 128
_ALIGNMENT = 64
# Values of the driver's enumerations.
_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "bfloat16": 9}
_INTERLEAVE_NONE = 0
_SWIZZLE_128 = 3
_PROMOTIONS = {128: 2, 256: 3}
_FILL_ZERO = 0


@functools.lru_cache(maxsize=256)
def encode(
    address: int,
    dtype: str,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    promotion: int = 256,
) -> bytes:
    """A tensor map (`CUtensorMap`) of an array in global memory, for tiles with 128-byte swizzle.

    Args:
        address: of the first element, a multiple of 16.
        dims: elements along each dimension, the innermost first.
        strides: bytes between neighbours along the second dimension and on, multiples of 16.
        box: elements of a tile along each dimension; 128 bytes along the innermost.
        promotion: bytes that L2 fetches at least, 128 or 256.

    What a tile has outside the array is 0. Raises RuntimeError where the driver refuses the sizes.
    """
    rank = len(dims)
    buffer = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _ALIGNMENT)
    here = ctypes.addressof(buffer)
    place = here + -here % _ALIGNMENT
    status = libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(_TYPES[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_INTERLEAVE_NONE),
        ctypes.c_int(_SWIZZLE_128),
        ctypes.c_int(_PROMOTIONS[promotion]),
        ctypes.c_int(_FILL_ZERO),
    )
    if status:
        raise RuntimeError(f"no tensor map for {dtype} {dims}, strides {strides}, box {box}: CUDA error {status}")
    return ctypes.string_at(place, TENSOR_MAP_BYTES)
