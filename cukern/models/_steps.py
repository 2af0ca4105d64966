"""Run the steps of a search as CUDA graphs if possible, and let the host read the results of a step one step later."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from cukern.models._layers import Layers

Seen = tuple[int, list[Any]]


class StepGraphs:
    """The CUDA graphs of a search's steps: one for ordinary steps, and one for each `kind` of step with extra kernels.

    The first step runs uncaptured, which loads the kernels and lets cuBLAS choose its algorithms. The second step is
    captured, and all later steps replay it. A step of a non-empty kind is captured the second time that the kind
    occurs. All graphs share one memory pool. This is safe because they run one after the other, and because a step
    keeps its results in the buffers of the search. Only torch tensors on a CUDA device are captured.
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
    """Gives the host the results of the steps of a search."""

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        """Yield the steps whose results the host can read after `step` was enqueued, with the results as NumPy arrays.

        `shown` are the arrays that `step` writes its results to.
        """

    def rest(self) -> Iterator[Seen]:
        """Yield the remaining steps with their results. This waits for a GPU."""


class _Now:
    """Yields the results of each step at once."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        yield step, [None if x is None else self._layers.host(x).copy() for x in shown]

    def rest(self) -> Iterator[Seen]:
        yield from ()


class _Slot(NamedTuple):
    """The host memory that receives the arrays of a step."""

    copies: list[Any]  # pinned memory
    values: list[np.ndarray[Any, Any] | None]  # NumPy views of `copies`
    event: Any  # recorded after the copies


def _slot(shown: list[Any]) -> _Slot:
    import torch

    copies = [None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in shown]
    return _Slot(copies, [None if x is None else x.numpy() for x in copies], torch.cuda.Event())


class _OneLater:
    """Yields the results of a step after the next step is enqueued, so that the GPU never idles. For torch on CUDA."""

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
        # Copy, because the step after the next one reuses the memory.
        return step, [None if x is None else x.copy() for x in slot.values]

    def rest(self) -> Iterator[Seen]:
        while self._waiting:
            yield self._pop()


def watch(layers: Layers) -> Watch:
    """Return a `Watch` for a search on the arrays of `layers`, starting at step 0."""
    return _OneLater() if layers.is_cuda_torch else _Now(layers)
