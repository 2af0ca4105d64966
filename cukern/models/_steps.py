"""Run the steps of a search as CUDA graphs if possible, and copy their results to the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from cukern.models._layers import Layers

StepResult = tuple[int, list[Any]]


class StepGraphs:
    """The CUDA graphs of a search's steps, for torch tensors on a CUDA device.

    The first step is not captured, because kernels are loaded in it and cuBLAS chooses its algorithms. A graph captures
    the second step, and later steps replay it. A step with a non-empty `kind` has extra kernels. Each kind has its own
    graph, captured at the second step of this kind. All graphs share a memory pool, because they run one after the
    other and write their results outside the pool.
    """

    def __init__(self, layers: Layers) -> None:
        self._captures = layers.is_cuda_torch
        self._device = layers.device
        self._graphs: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None
        self._stream: Any = None

    def run(self, kind: Hashable, step: Callable[[], None]) -> None:
        if not self._captures:
            step()
        elif kind in self._graphs:
            self._graphs[kind].replay()
        elif kind in self._seen or (not kind and self._seen):
            self._capture(kind, step).replay()
        else:
            self._seen.add(kind)
            step()

    def _capture(self, kind: Hashable, step: Callable[[], None]) -> Any:
        import torch

        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            # `torch.cuda.graph` would wait for the device and empty torch's cache.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        self._graphs[kind] = graph
        return graph


class Watch(Protocol):
    def after(self, step: int, outputs: list[Any]) -> Iterator[StepResult]:
        """Yield the steps whose results are on the host. `outputs` are the results of the enqueued step `step`."""

    def remaining(self) -> Iterator[StepResult]:
        """Wait for the GPU, and yield the steps that `after` has not yielded."""


class _Immediate:
    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def after(self, step: int, outputs: list[Any]) -> Iterator[StepResult]:
        yield step, [None if x is None else self._layers.host(x).copy() for x in outputs]

    def remaining(self) -> Iterator[StepResult]:
        yield from ()


class _Slot(NamedTuple):
    copies: list[Any]  # pinned memory
    values: list[np.ndarray[Any, Any] | None]  # NumPy views of `copies`
    event: Any  # recorded after the copies


def _slot(outputs: list[Any]) -> _Slot:
    import torch

    copies = [None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in outputs]
    return _Slot(copies, [None if x is None else x.numpy() for x in copies], torch.cuda.Event())


class _Delayed:
    """Yields a step's results after enqueuing the next step, so that the GPU does not idle."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []  # two, used in turn
        self._waiting: list[tuple[int, _Slot]] = []

    def after(self, step: int, outputs: list[Any]) -> Iterator[StepResult]:
        import torch

        with torch.cuda.device(outputs[0].device):
            if len(self._slots) < 2:
                self._slots.append(_slot(outputs))
            slot = self._slots[step % 2]
            for copy, x in zip(slot.copies, outputs, strict=True):
                if copy is not None:
                    copy.copy_(x, non_blocking=True)
            slot.event.record()
        self._waiting.append((step, slot))
        if len(self._waiting) > 1:
            yield self._pop()

    def _pop(self) -> StepResult:
        step, slot = self._waiting.pop(0)
        slot.event.synchronize()
        # Copy the values, because the step after the next one overwrites the slot.
        return step, [None if x is None else x.copy() for x in slot.values]

    def remaining(self) -> Iterator[StepResult]:
        while self._waiting:
            yield self._pop()


def watch(layers: Layers) -> Watch:
    return _Delayed() if layers.is_cuda_torch else _Immediate(layers)
