"""A call that has chosen its kernel: the launch on the caller's device and stream, or the NumPy reference.

A family's `choose` returns what all calls of one decision share, a `Config`. A call adds the grid and the values of its
own fields.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cukern.runtime import arrays, gpu
from cukern.runtime.arrays import Library, View
from cukern.runtime.cuda import current_device, runtime
from cukern.runtime.gpu import Gpu
from cukern.runtime.kernel import Variant
from cukern.runtime.template import Packer

_PARAMETER_BYTES = 4096  # of a kernel, at most


class Config(Protocol):
    """What a family's `choose` decides. `reason` is a format string of the fields and the `grid` of a launch."""

    @property
    def variant(self) -> Variant: ...
    @property
    def block(self) -> tuple[int, int, int]: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def pack(self) -> Packer: ...
    @property
    def reason(self) -> str: ...


#: `state` of each thread: its buffer for parameters, the address of the pointer to it, and the devices with a context.
THREAD = threading.local()


def thread_state() -> tuple[Any, int, set[int]]:
    """The state of this thread."""
    try:
        return THREAD.state
    except AttributeError:
        buffer = ctypes.create_string_buffer(_PARAMETER_BYTES)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        THREAD.keep = pointers
        THREAD.state = buffer, ctypes.addressof(pointers), set()
        return THREAD.state


def launch(
    config: Config,
    library: Library,
    device: int,
    grid: tuple[int, int, int],
    values: tuple[Any, ...],
    is_current: bool = False,
) -> None:
    """Launch a kernel on a device, with the values that `config.pack` names, in their order.

    A value is a number, an address (0 for a null pointer), or the bytes of an array or a struct within. `is_current`:
    the device has been made the current one of this thread.
    """
    if library.recorder is not None:
        return library.recorder.launch(config, grid, values)
    if not is_current and library.current_device() != device:
        with current_device(device):
            return launch(config, library, device, grid, values, is_current=True)
    try:
        buffer, pointers, devices = THREAD.state
    except AttributeError:
        buffer, pointers, devices = thread_state()
    if device not in devices:
        # A thread that never set a device has no context, and a launch by the driver would fail.
        runtime.setDevice(device)
        devices.add(device)
    (x, y, z), (i, j, k), pack = grid, config.block, config.pack
    start, function = config.variant.ready[device]
    values += pack.known
    pack.into(buffer, 0, *(values if pack.order is None else pack.order(values)))
    start(function, x, y, z, i, j, k, config.shared_bytes, library.stream(device), pointers, 0)


def asked(variant: str) -> str:
    """The reason for a kernel that the caller asks for; empty for "auto"."""
    return "" if variant == "auto" else f"variant={variant!r} asks for it"


def note(library: Library, **facts: Any) -> None:
    """Facts for `cukern.explain`: the `bytes` moved and the `flops` done."""
    if library.recorder is not None:
        library.recorder.note(**facts)


def gpu_of(view: View) -> Gpu:
    """The GPU that a call on a device is for."""
    recorder = view.library.recorder
    return gpu.of_device(view.device) if recorder is None else recorder.gpu  # type: ignore[arg-type, no-any-return]


def run_twin(twin: Callable[..., Any], like: View, out: Sequence[View | None], arguments: Mapping[str, Any]) -> Any:
    """The results of a NumPy reference, if any: in the arrays of `out`, else in new arrays of the library of `like`.

    Views among the arguments reach the twin as NumPy arrays in the caller's memory.
    """
    library = like.library
    if library.recorder is not None:
        return library.recorder.run_twin()
    given = {name: x.library.to_numpy(x.array) if type(x) is View else x for name, x in arguments.items()}
    results = twin(**given)
    if results is None:
        return None
    found, many = [], isinstance(results, (tuple, list))
    for result, into in zip(results if many else (results,), out, strict=True):
        if into is not None:
            memory = library.to_numpy(into.array)
            if not np.may_share_memory(memory, result):  # else the twin has written it
                memory[...] = result
        found.append(returned(library.from_numpy(result, like.array) if into is None else into.array, into, like))
    return tuple(found) if many else found[0]


def returned(array: Any, into: View | None, like: View) -> Any:
    """A result as the caller gets it: its own array if it gave one, `into`, else one of the library of `like`.

    For a `like` that is known by DLPack alone it is called after the launch: the library then waits for the kernel.
    """
    if into is not None:
        return array if into.foreign is None else into.foreign
    return array if like.foreign is None else arrays.leave(array, like.foreign)
