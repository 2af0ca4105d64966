"""How steps are run: as CUDA graphs where they can be, and watched by the host without waiting for the latest one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from cukern.models._layers import Layers

Seen = tuple[int, list[Any]]


class StepGraphs:
    """The graphs of the steps of one search, by position.

    A step runs as it is the first time, which loads its kernels and lets the products choose their algorithms; it is
    captured the second time. All graphs share one pool of memory: they are replayed one after the other, and what
    outlives a step is in the search's buffers. Where the arrays are no torch tensors of a CUDA device, every step runs
    as it is.
    """

    def __init__(self, layers: Layers) -> None:
        self._captures = layers.is_cuda_torch
        self._device = layers.device
        self._graphs: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._pool: Any = None
        self._stream: Any = None

    def run(self, position: int, step: Callable[[], None]) -> None:
        if not self._captures:
            step()
        elif position in self._graphs:
            self._graphs[position].replay()
        elif position in self._seen:
            self._capture(position, step).replay()
        else:
            self._seen.add(position)
            step()

    def _capture(self, position: int, step: Callable[[], None]) -> Any:
        import torch

        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            # Not `torch.cuda.graph`, which waits for the device and empties torch's cache before each capture.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        self._graphs[position] = graph
        return graph


class Watch(Protocol):
    """What the host sees of a search."""

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        """The steps that can be seen now that `step` was enqueued, with their arrays `shown` in NumPy."""

    def rest(self) -> Iterator[Seen]:
        """The steps that were not seen yet, for which a GPU is waited for."""


class _Now:
    """Each step at once."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        yield step, [None if x is None else self._layers.host(x).copy() for x in shown]

    def rest(self) -> Iterator[Seen]:
        yield from ()


class _OneLater:
    """A step on a CUDA device, by torch, once the next one is enqueued: the GPU always has something to do."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, list[Any], Any]] = []

    def after(self, step: int, shown: list[Any]) -> Iterator[Seen]:
        import torch

        with torch.cuda.device(shown[0].device):
            copies = [None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in shown]
            for copy, x in zip(copies, shown, strict=True):
                if copy is not None:
                    copy.copy_(x, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._waiting.append((step, copies, event))
        while len(self._waiting) > 1:
            yield self._pop()

    def _pop(self) -> Seen:
        step, copies, event = self._waiting.pop(0)
        event.synchronize()
        return step, [None if x is None else x.numpy() for x in copies]

    def rest(self) -> Iterator[Seen]:
        while self._waiting:
            yield self._pop()


def watch(layers: Layers) -> Watch:
    """What watches a search on the arrays of `layers`."""
    return _OneLater() if layers.is_cuda_torch else _Now(layers)
