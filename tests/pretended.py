"""A fixture that pretends a GPU: a call runs completely, except for the calls of the CUDA driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from cukern.runtime import arrays, gpu, op, plan, template, tensor_map
from cukern.runtime.kernel import Variant


class Launch(NamedTuple):
    """A launch as the driver receives it, with the fields of `Params` by name."""

    variant: Variant
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    device: int
    fields: dict[str, Any]


def _unpacked(layout: template.Struct, packed: bytes, start: int = 0) -> dict[str, Any]:
    """Return the fields of a struct by name; a nested struct is a dict."""
    fields: dict[str, Any] = {}
    for name, (offset, kind) in layout.fields.items():
        if isinstance(kind, template.Array):
            at = start + offset
            fields[name] = packed[at : at + kind.size]
            if isinstance(kind.of, template.Scalar):
                fields[name] = [*struct.unpack_from(f"={kind.count}{kind.of.code}", packed, at)]
        elif isinstance(kind, template.Struct):
            fields[name] = _unpacked(kind, packed, start + offset)
        else:
            (fields[name],) = struct.unpack_from(f"={kind.code}", packed, start + offset)
    return fields


class PretendedGPU:
    """A pretended H200 with the number `device`, which holds all tensors. Another device may be the current one."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.device = self.current = 0
        self.is_there = True  # False after the fixture, so that no later call repeats its plans
        self.set_devices: list[int] = []

    def start(self, variant: Variant, function: int, *numbers: int) -> None:
        *sizes, shared_bytes, stream, pointers, extra = numbers
        assert (function, extra) == (1000 + self.current, 0)
        address = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0]
        layout = template.params(variant.instance.file, variant.instance.function)
        fields = _unpacked(layout, ctypes.string_at(address, layout.size))
        grid, block = tuple(sizes[:3]), tuple(sizes[3:])
        self.launches.append(Launch(variant, grid, block, shared_bytes, stream, self.current, fields))

    @contextlib.contextmanager
    def make_current(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before


class _Ready:
    """The launch function of a variant, by device."""

    def __init__(self, gpu: PretendedGPU, variant: Variant) -> None:
        self.gpu, self.variant = gpu, variant

    def __getitem__(self, device: Any) -> Any:
        return functools.partial(self.gpu.start, self.variant), 1000 + device


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGPU]:
    """Treat tensors in host memory as tensors on a GPU, and record the launches in `launches`."""
    there, library = PretendedGPU(), arrays.library_of(torch.empty(0))
    assert library is not None

    def view(name: str, x: Any) -> arrays.View:
        return type(library).view(library, name, x)._replace(device=there.device)

    def allocate(shape: tuple[int, ...], dtype: str, device: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def alike(given: Sequence[torch.Tensor]) -> Callable[..., bool]:
        in_memory, device = type(library).alike(library, given), there.device
        return lambda *others: there.is_there and there.device == device and in_memory(*others)

    monkeypatch.setattr(library, "alike", alike)
    monkeypatch.setattr(library, "view", view)
    monkeypatch.setattr(library, "allocate", allocate)
    monkeypatch.setattr(library, "maker", lambda *arguments: functools.partial(allocate, *arguments))
    monkeypatch.setattr(library, "device", lambda array, name="": there.device)
    monkeypatch.setattr(library, "current_device", lambda: there.current)
    monkeypatch.setattr(library, "stream", lambda device: 77 + device)
    monkeypatch.setattr(plan, "encode", lambda *arguments: bytes(tensor_map.TENSOR_MAP_BYTES))
    monkeypatch.setattr(plan, "runtime", SimpleNamespace(setDevice=there.set_devices.append))
    monkeypatch.setattr(plan, "current_device", there.make_current)
    monkeypatch.setattr(gpu, "of_device", lambda device: gpu.of_arch("H200"))
    monkeypatch.setattr(plan, "_thread", plan._Thread())
    monkeypatch.setattr(Variant, "ready", property(lambda self: _Ready(there, self), lambda self, of: None))
    yield there
    there.is_there = False
    op.forget_plans()
