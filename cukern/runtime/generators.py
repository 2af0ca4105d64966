"""Draw seeds from the libraries' random generators, without waiting for a device."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import check
from cukern.runtime.arrays import Library
from cukern.runtime.cuda import cupy, runtime

#: Each draw advances the offset of a CUDA generator by 4, because torch keeps offsets at multiples of 4.
_STEP = 4
_lock = threading.Lock()


class Drawn(NamedTuple):
    """A seed and an offset of a random number stream."""

    seed: int = 0
    offset: int = 0
    address: int = 0  # device address of an int64 seed, which replaces `seed`; 0: none
    held: Any = None  # keeps the array at `address` alive


def expect(library: Library, device: int | None, generator: Any) -> Any:
    """Check that `generator` belongs to the library and the device (None: the host)."""
    of = f"{type(generator).__module__}.{type(generator).__name__}"
    if library.name == "torch":
        import torch

        if not isinstance(generator, torch.Generator):
            check.fail("generator", "a torch.Generator like the tensors", of, TypeError)
        wanted = torch.device("cpu") if device is None else torch.device("cuda", device)
        found = generator.device
        if found.type != wanted.type or found.index not in (None, wanted.index):
            check.fail("generator", f"on {wanted} like the tensors", f"one on {found}")
        return generator
    random = np.random if device is None else cupy.random
    if not isinstance(generator, (random.Generator, random.RandomState)):
        check.fail("generator", f"a Generator or a RandomState of {random.__name__} like the arrays", of, TypeError)
    return generator


def draw(library: Library, device: int | None, generator: Any = None) -> Drawn:
    """Draw a seed from `generator`, or from the library's default generator on the device (None: the host).

    For CUDA tensors the host reads the seed and advances the offset, as `torch.rand` does. Under stream capture torch
    draws the seed on the device at each replay; CuPy cannot, so its arrays raise RuntimeError.
    """
    if device is None:
        return Drawn(_torch_number(generator) if library.name == "torch" else numpy_seed(generator))
    stream = library.stream(device)
    # The default stream, 0, is never captured. Querying it while another stream is captured is an error.
    captured = bool(stream) and runtime.streamIsCapturing(stream)
    return (_draw_torch if library.name == "torch" else _draw_cupy)(device, generator, captured)


def numpy_seed(generator: Any = None) -> int:
    """Draw a 63-bit integer from a NumPy generator, by default the generator of `numpy.random.seed`."""
    if isinstance(generator, np.random.Generator):
        return int(generator.integers(2**63 - 1))
    return int((np.random if generator is None else generator).randint(2**63 - 1, dtype=np.int64))


def _torch_number(generator: Any) -> int:
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def _draw_torch(device: int, generator: Any, captured: bool) -> Drawn:
    import torch

    if captured:
        seed = torch.empty((), dtype=torch.int64, device=torch.device("cuda", device)).random_(generator=generator)
        return Drawn(address=seed.data_ptr(), held=seed)
    generator = torch.cuda.default_generators[device] if generator is None else generator
    with _lock:
        offset = generator.get_offset()
        generator.set_offset(offset + _STEP)
    return Drawn(generator.initial_seed(), offset)


def _draw_cupy(device: int, generator: Any, captured: bool) -> Drawn:
    if captured:
        check.fail("seed", "given while a stream is captured, because CuPy cannot draw then", "None", RuntimeError)
    if isinstance(generator, cupy.random.Generator):
        seed = generator.integers(2**63 - 1, size=1, dtype=np.int64)
    else:
        seed = (cupy.random.get_random_state() if generator is None else generator).tomaxint(1)
    return Drawn(address=seed.data.ptr, held=seed)
