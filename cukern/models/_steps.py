"""How steps are run: as a CUDA graph where they can be, and watched by the host without waiting for the latest one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from cukern.models._layers import Layers

Seen = tuple[int, list[Any]]


class StepGraphs:
    """The graph of the steps of one search; one more for each kind of step that does more than the others.

    The first step runs as it is, which loads the kernels and lets the products choose their algorithms. The second one
    is captured, and replayed for all further ones. A step of a kind, which is anything but empty, has kernels of its
    own, and is captured the second time that one comes. All graphs share one pool of memory: they are replayed one
    after the other, and what outlives a step is in the search's buffers. Where the arrays are no torch tensors of a
    CUDA device, every step runs as it is.
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
            # Not `torch.cuda.graph`, which waits for the device and empties torch's cache before each capture.
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        self._graphs[kind] = graph
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


class _Slot(NamedTuple):
    """Where the host gets what a step shows."""

    copies: list[Any]  # in pinned memory
    values: list[np.ndarray[Any, Any] | None]  # the same memory
    event: Any  # which says that they are there


def _slot(shown: list[Any]) -> _Slot:
    import torch

    copies = [None if x is None else torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in shown]
    return _Slot(copies, [None if x is None else x.numpy() for x in copies], torch.cuda.Event())


class _OneLater:
    """A step on a CUDA device, by torch, once the next one is enqueued: the GPU always has something to do."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []  # two, in turns
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
        # The second step from this one gets the same memory.
        return step, [None if x is None else x.copy() for x in slot.values]

    def rest(self) -> Iterator[Seen]:
        while self._waiting:
            yield self._pop()


def watch(layers: Layers) -> Watch:
    """What watches a search on the arrays of `layers`, from its step 0 on."""
    return _OneLater() if layers.is_cuda_torch else _Now(layers)
