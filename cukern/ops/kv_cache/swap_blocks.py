"""`swap_blocks`: copies of cache blocks between host and device memory by the driver."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cukern.ops.kv_cache.choose import CACHE_DTYPES
from cukern.reference import kv_cache as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import Array, strides_of
from cukern.runtime.cuda import current_device, runtime


class _Memory(NamedTuple):
    array: Any
    library: arrays.Library
    device: int | None  # None: host memory
    blocks: int


def _memory_of(name: str, cache: Any, block_bytes: int) -> _Memory:
    array = arrays.enter(name, cache)
    library = arrays.library_of(array)
    assert library is not None
    dtype, shape, strides = library.dtype(array), tuple(array.shape), library.strides(array)
    check.dtype(name, dtype, CACHE_DTYPES)
    size = math.prod(shape) * arrays.ITEM_SIZE[dtype]
    pairs = zip(shape, strides, strides_of(shape), strict=True)
    if size and any(n != 1 and stride != wanted for n, stride, wanted in pairs):
        check.fail(name, "contiguous", f"strides {strides} (in elements)")
    if size % block_bytes:
        check.fail(name, f"of whole blocks of {block_bytes} bytes (block_size_in_bytes)", f"{size} bytes")
    return _Memory(array, library, library.device(array), size // block_bytes)


def _pairs_of(block_mapping: Any, src: _Memory, dst: _Memory) -> NDArray[np.int64]:
    mapping = arrays.enter("block_mapping", block_mapping)
    library = arrays.library_of(mapping)
    assert library is not None
    device = library.device(mapping)
    if device is not None:
        check.fail("block_mapping", "in host memory, where it is read", f"one on CUDA device {device}")
    check.dtype("block_mapping", library.dtype(mapping), ("int64",))
    if len(mapping.shape) != 2 or mapping.shape[1] != 2:
        check.fail("block_mapping", "of shape [pairs, 2]", list(mapping.shape))
    pairs = library.to_numpy(mapping)
    for i, (name, cache) in enumerate((("src", src), ("dst", dst))):
        outside = pairs[(pairs[:, i] < 0) | (pairs[:, i] >= cache.blocks), i]
        if outside.size:
            check.fail("block_mapping", f"of blocks of {name} in [0, {cache.blocks})", int(outside[0]))
    return pairs


def runs_of(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Merge pairs of blocks that are consecutive in both caches.

    Return [runs, 3]: first block in the source, first block in the destination, number of blocks.
    """
    first = np.flatnonzero(np.r_[True, (np.diff(pairs, axis=0) != 1).any(axis=1)]) if len(pairs) else np.arange(0)
    return np.column_stack([pairs[first], np.diff(np.r_[first, len(pairs)])])


def swap_blocks(src: Array, dst: Array, block_size_in_bytes: int, block_mapping: Array) -> None:
    """Copy blocks between caches in host memory or on a GPU: dst[j] = src[i] for each pair (i, j) of block_mapping.

    Args:
        src, dst: contiguous arrays of any cache dtype and library, in host memory or on one GPU.
        block_size_in_bytes: a divisor of the bytes of src and of dst.
        block_mapping: int64 [pairs, 2], in host memory. A block that one pair writes must be in no other pair.

    The driver copies runs of blocks on the current stream, without a kernel or a torch operator. With pinned memory the
    copies are asynchronous: the host must wait for the stream before it reads dst or changes src. With other host
    memory a CUDA graph cannot capture the call.

    Raises:
        TypeError: an unsupported dtype, or mixed libraries.
        ValueError: an argument that does not fit; the message names it.

    The function is from vLLM.
    """
    block_bytes = check.integer("block_size_in_bytes", block_size_in_bytes, 1)
    source, target = _memory_of("src", src, block_bytes), _memory_of("dst", dst, block_bytes)
    if source.device is not None and target.device not in (None, source.device):
        check.fail("dst", f"in host memory or on CUDA device {source.device} like src", f"one on {target.device}")
    pairs = _pairs_of(block_mapping, source, target)
    if source.device is None and target.device is None:
        of_src, of_dst = (x.library.to_numpy(x.array) for x in (source, target))
        return twin.swap_blocks(of_src, of_dst, block_bytes, pairs)
    on_device = source if target.device is None else target
    device = on_device.device
    assert device is not None
    kind = runtime.memcpyDeviceToDevice
    if source.device is None:
        kind = runtime.memcpyHostToDevice
    elif target.device is None:
        kind = runtime.memcpyDeviceToHost
    begin, end = source.library.address(source.array), target.library.address(target.array)
    with current_device(device):
        stream = on_device.library.stream(device)
        for first, to, blocks in runs_of(pairs).tolist():
            runtime.memcpyAsync(end + to * block_bytes, begin + first * block_bytes, blocks * block_bytes, kind, stream)
    return None
