"""Run the steps of a search as CUDA graphs if possible, and copy the results of each step to the host.

On a GPU the host reads the results of a step after it has enqueued the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from cukern.models._layers import Layers

Seen = tuple[int, list[Any]]


class StepGraphs:
    """The CUDA graphs of a search's steps. Ordinary steps share one graph, and each `kind` of other steps has its own.

    The first step is not captured: it loads the kernels, and cuBLAS chooses its algorithms. The second step is captured
    in a graph, and all later steps replay the graph. A step with a non-empty `kind`, which launches extra kernels, is
    captured the second time that its kind occurs. All graphs share one memory pool. Sharing is safe because the graphs
    run one after the other, and because the results of a step are in the buffers of the search, outside the pool.
    Only steps on torch tensors on a CUDA device are captured.
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
            # `torch.cuda.graph` would wait for the device and empty torch's cache before each capture.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        self._graphs[kind] = graph
        return graph


class Watch(Protocol):
    """Copies the results of a search's steps to host memory."""

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        """Yield each step that is ready, with its results in NumPy. Call this after `step` was enqueued.

        `shown` are the arrays on the GPU that contain the results of `step`.
        """

    def rest(self) -> Iterator[Seen]:
        """Yield the steps that `after` has not yielded, with their results. This waits for the GPU."""


class _Now:
    """Yields the results of a step immediately after the step is enqueued."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        yield step, [None if x is None else self._layers.host(x).copy() for x in shown]

    def rest(self) -> Iterator[Seen]:
        yield from ()


class _Slot(NamedTuple):
    """The host memory that receives a copy of the results of one step."""

    copies: list[Any]  # pinned memory
    values: list[np.ndarray[Any, Any] | None]  # NumPy views of `copies`
    event: Any  # recorded after the copies


def _slot(shown: list[Any]) -> _Slot:
    import torch

    copies = [None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in shown]
    return _Slot(copies, [None if x is None else x.numpy() for x in copies], torch.cuda.Event())


class _OneLater:
    """Yields the results of a step after the next step is enqueued, so the GPU does not idle. For torch on CUDA."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []  # two slots, used in turn
        self._waiting: list[tuple[int, _Slot]] = []

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        import torch

        with torch.cuda.device(shown[0].device):
            if len(self._slots) < 2:
                self._slots.append(_slot(shown))
            slot = self._slots[step % 2]
            for copy, x in zip(slot.copies, shown, strict=True):
                if copy is not None:
                    copy.copy_(x, non_blocking=True)
            slot.event.record()
        self._waiting.append((step, slot))
        if len(self._waiting) > 1:
            yield self._pop()

    def _pop(self) -> Seen:
        step, slot = self._waiting.pop(0)
        slot.event.synchronize()
        # Copy, because two steps later the slot is overwritten.
        return step, [None if x is None else x.copy() for x in slot.values]

    def rest(self) -> Iterator[Seen]:
        while self._waiting:
            yield self._pop()


def watch(layers: Layers) -> Watch:
    """Return a `Watch` for a search on the arrays of `layers`, starting at step 0."""
    return _OneLater() if layers.is_cuda_torch else _Now(layers)
