"""Memory that other ranks can map. A rank is a GPU of this process, or another process of this host.

The memory comes from cudaMalloc, because CUDA's interprocess handles cannot share a memory pool, such as torch's
expandable segments.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
from collections.abc import Sequence
from pathlib import Path

from cukern.runtime.cuda import cupy, current_device, libcuda, runtime

_LAZY_PEER_ACCESS = 1  # flag of cudaIpcOpenMemHandle
_PORTABLE_MAPPED = 1 | 2  # flags of cudaHostAlloc: for all devices, at one address
_NON_BLOCKING = 1  # the stream does not wait for the default stream, where a kernel may be waiting
_ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled
_ANY_TO_ANY = 4  # cudaMemcpyDefault
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def allocate(device: int, size: int) -> int:
    """Return the address of `size` zero bytes on a device."""
    with current_device(device):
        address = runtime.malloc(size)
        runtime.memset(address, 0, size)
        runtime.deviceSynchronize()
    return address


def free(device: int, address: int) -> None:
    with current_device(device):
        runtime.free(address)


def allocate_on_host(size: int) -> int:
    """Return the address of `size` zero bytes of host memory that every device can write."""
    address = runtime.hostAlloc(size, _PORTABLE_MAPPED)
    ctypes.memset(address, 0, size)
    return address


def free_on_host(address: int) -> None:
    runtime.freeHost(address)


def handle_of(device: int, address: int) -> bytes:
    """Return a handle for memory from `allocate`, which another process of this host can map."""
    with current_device(device):
        return bytes(runtime.ipcGetMemHandle(address))


def map_handle(device: int, handle: bytes) -> int:
    """Map another process's memory. Return its address for `device`."""
    with current_device(device):
        return runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS)


def unmap(device: int, address: int) -> None:
    with current_device(device):
        runtime.ipcCloseMemHandle(address)


def why_no_access(device: int, peer: int) -> str | None:
    """Return why kernels of `device` cannot use the memory of `peer`; None if they can.

    The kernels add atomically to signals in the peer's memory. NVLink supports such atomics, PCIe does not.
    """
    if device == peer:
        return None
    if not runtime.deviceCanAccessPeer(device, peer):
        return "they are not linked"
    value = ctypes.c_int()
    if libcuda().cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer) or not value.value:
        return "their link has no atomics, as NVLink has"
    return None


def enable_peer_access(device: int, peer: int) -> None:
    """Let kernels of `device` use the memory of `peer`. Raises ValueError if they cannot."""
    if why := why_no_access(device, peer):
        raise ValueError(f"CUDA device {device} cannot use the memory of CUDA device {peer}: {why}")
    if device == peer:
        return
    with current_device(device):
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            if error.status != _ALREADY_ENABLED:
                raise


def make_stream(device: int) -> int:
    with current_device(device):
        return runtime.streamCreateWithFlags(_NON_BLOCKING)


def destroy_stream(device: int, stream: int) -> None:
    with current_device(device):
        runtime.streamDestroy(stream)


def write_word(device: int, stream: int, source: int, addresses: Sequence[int], value: int) -> None:
    """Write an int32 to each address without waiting, even while a kernel of the device runs.

    `source` is the address of an int32 from `allocate_on_host`. An allocation here would wait for the kernel.
    """
    ctypes.c_int.from_address(source).value = value
    with current_device(device):
        for address in addresses:
            runtime.memcpyAsync(address, source, 4, _ANY_TO_ANY, stream)
        runtime.streamSynchronize(stream)


def bus_id(device: int) -> str:
    """Return a device's PCI address, the same in all processes of its host."""
    return runtime.deviceGetPCIBusId(device)


@functools.cache
def host_id() -> str:
    """Return an identifier that no other running host has."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def array_at(device: int, address: int, size: int, owner: object) -> object:
    """Return a CuPy array of `size` bytes at an address. It keeps `owner` alive."""
    memory = cupy.cuda.UnownedMemory(address, size, owner, device)
    return cupy.ndarray((size,), "uint8", cupy.cuda.MemoryPointer(memory, 0))
