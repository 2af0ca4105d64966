"""The state of a rank in an exchange between ranks.

Each rank owns one window: a region of its memory that all ranks map, and into which all other ranks write. The progress
of a rank counts its completed dispatches and combines.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cukern.ops.all_to_all.layout import ALIGNMENT, MAX_RANKS, STRUCTS, Layout, Sizes
from cukern.reference import all_to_all as twin
from cukern.runtime import arrays, check, kernel, template, windows
from cukern.runtime.cuda import current_device, libcuda, runtime

_PHASES = ("dispatch", "combine")
_WORD_BYTES = ctypes.sizeof(ctypes.c_int)
_FAILURE_BYTES = 4 * _WORD_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class AllToAllError(RuntimeError):
    """An exchange between ranks failed. All further calls with the state fail, too.

    Attributes:
        rank: the rank that did not send in time, or that gave up.
        phase: "dispatch" or "combine".
        step: the index of the failed call among the calls of its phase, from 0 on.
    """

    def __init__(self, message: str, rank: int, phase: str, step: int) -> None:
        super().__init__(message)
        self.rank, self.phase, self.step = rank, phase, step

    def __reduce__(self) -> Any:
        return type(self), (*self.args, self.rank, self.phase, self.step)


class Dispatched(NamedTuple):
    """The tokens that a rank received. Token t of source rank s is in row s * max_tokens + t of each array.

    Attributes:
        hidden_states: [ranks * max_tokens, hidden], in the rank's window, valid until its next dispatch begins. Rows of
            tokens without an expert on this rank are undefined.
        scales: float32 [ranks * max_tokens, columns], in the window too, or None.
        topk_weights: float32 [ranks * max_tokens, topk]; 0 past the tokens of a source.
        topk_ids: int32 [ranks * max_tokens, topk], ids among all experts; -1 past the tokens of a source.
    """

    hidden_states: Any
    scales: Any
    topk_weights: Any
    topk_ids: Any


@dataclass(frozen=True, eq=False)
class Link:
    """The attributes of a state that a plan depends on. A Link is hashed by identity, which is fast."""

    device: int | None
    rank: int
    ranks: int
    windows: tuple[int, ...]
    progress: int
    failure: int
    rank_of: int
    sharing: int  # ranks on the GPU of this rank
    sizes: Sizes
    layout: Layout
    host: Any  # the windows of the NumPy reference, for ranks in host memory

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the kernels' struct `Ranks`."""
        return {
            "windows": (*self.windows, *[0] * (MAX_RANKS - self.ranks)),
            "progress": self.progress,
            "failure": self.failure,
            "rank_of": self.rank_of or None,
            "timeout_ns": int(self.sizes.deadline_s * 1e9),
            "rank": self.rank,
            "ranks": self.ranks,
            "experts": self.sizes.num_experts,
            "experts_per_rank": max(1, self.sizes.num_experts // self.ranks),
        }


class _Memory:
    """The window of one rank, its private memory, and its mappings of other windows.

    `release` frees the memory. Garbage collection frees it, too, unless another rank of this process has memory. In
    that case the next call of the constructor or of `release` frees it. At that time no kernel of this process may wait
    for another rank.
    """

    def __init__(self, device: int, sizes: Sizes, layout: Layout, ranks: int) -> None:
        _free_abandoned()
        self.device = device
        self._taken = contextlib.ExitStack()
        _in_use.add(self._taken)
        self._collected = weakref.finalize(self, _abandon, self._taken)
        self._collected.atexit = False
        try:
            self.failure = windows.allocate_on_host(_FAILURE_BYTES + _WORD_BYTES)
            self._taken.callback(windows.free_on_host, self.failure)
            # The stream is for `abort`. If `abort` itself created a stream or pinned memory, it would wait for the
            # running kernels.
            self.stream = windows.make_stream(device)
            self._taken.callback(windows.destroy_stream, device, self.stream)
            self.window = self._allocate(layout.size)
            progress = -(-template.struct_named(STRUCTS, "Progress").size // ALIGNMENT) * ALIGNMENT
            self.progress = self._allocate(progress + sizes.num_experts * 4)
            self.rank_of = 0
            if sizes.expert_rank is not None:
                self.rank_of = self.progress + progress
                owner = sizes.owner(ranks)
                with current_device(device):
                    runtime.memcpy(self.rank_of, owner.ctypes.data, owner.nbytes, 1)
        except Exception:
            self.release()
            raise

    def release(self) -> None:
        if self._collected.detach():
            _in_use.discard(self._taken)
            _abandoned.append(self._taken)
            _free_abandoned()

    def _allocate(self, size: int) -> int:
        address = windows.allocate(self.device, size)
        self._taken.callback(windows.free, self.device, address)
        return address

    def map(self, handle: bytes) -> int:
        """Map the window of another process."""
        address = windows.map_handle(self.device, handle)
        self._taken.callback(windows.unmap, self.device, address)
        return address

    def write_word(self, addresses: Sequence[int], value: int) -> None:
        """Write `value` as an int32 to addresses in windows, without waiting for running kernels."""
        windows.write_word(self.device, self.stream, self.failure + _FAILURE_BYTES, addresses, value)


@contextlib.contextmanager
def _in_any_capture() -> Iterator[None]:
    """Let this thread free memory during a CUDA graph capture. Otherwise cudaFree would break the capture."""
    mode = ctypes.c_int(_RELAXED)
    libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


#: `_in_use` has the resources of all live `_Memory` objects of this process. `_abandoned` has the resources of
#: garbage-collected `_Memory` objects that are not yet freed.
_in_use: set[contextlib.ExitStack] = set()
_abandoned: list[contextlib.ExitStack] = []


def _abandon(taken: contextlib.ExitStack) -> None:
    """Free the resources of a garbage-collected `_Memory`, unless another rank of this process has memory.

    Garbage may be collected between the launches of two ranks. cudaFree waits for all running kernels of its device, so
    it would never return while the kernel of the first rank waits for the second rank.
    """
    _in_use.discard(taken)
    _abandoned.append(taken)
    if not _in_use:
        _free_abandoned()


def _free_abandoned() -> None:
    with contextlib.suppress(IndexError):  # another thread may free the last one
        while _abandoned:
            taken = _abandoned.pop()
            # After a kernel has failed, every CUDA call fails, so errors are ignored.
            with _in_any_capture(), contextlib.suppress(runtime.CUDARuntimeError, RuntimeError):
                taken.close()


class AllToAllState:
    """The state of one rank in an exchange between ranks, created by `local` or `connect`.

    A window is a region of a rank's memory into which all other ranks write. It has two buffers for received tokens,
    between which dispatches alternate, and one buffer for the results of a combine. A replayed CUDA graph uses the
    buffers of its capture. All ranks must make the same calls and replays in the same order.

    Attributes:
        rank, ranks: the index of this rank, and the number of ranks.
        device: the CUDA device; None for ranks in host memory, which the NumPy reference simulates.
        max_tokens, hidden, topk, num_experts: as for `local`.
    """

    def __init__(self, link: Link, memory: _Memory | None) -> None:
        """`memory` is None in host memory."""
        self.link = link
        self.rank, self.ranks, self.device, self.host = link.rank, link.ranks, link.device, link.host
        self.max_tokens, self.hidden, self.topk, self.num_experts = link.sizes[:4]
        self._failure = None if memory is None else (ctypes.c_int * 4).from_address(memory.failure)
        self._memory = memory
        self._buffer = 1  # of the latest dispatch
        self._open: str | None = None  # the phase that is sent and not received
        self._dispatched: int | None = None  # tokens of the latest dispatch; None after its combine
        self._closed = self._gave_up = False
        self._views: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._maps: dict[Any, Any] = {}

    @classmethod
    def local(
        cls,
        devices: Sequence[int | None],
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        num_experts: int,
        expert_rank: Sequence[int] | None = None,
        apart: bool = False,
        deadline_s: float = 30.0,
    ) -> list[AllToAllState]:
        """Create the states of all ranks in this process.

        If several ranks share a stream, all of them must send (with `return_receiver`) before one of them receives.
        Otherwise the first rank waits for later launches until its deadline. The same holds for ranks in host memory
        that share a thread.

        Args:
            devices: the CUDA device of each rank, which ranks may share; all None: the ranks are in host memory.
            max_tokens: the largest number of tokens of a rank in a call.
            hidden: the elements of a row, a multiple of 16.
            topk: the experts of a token, at most 32.
            num_experts: the experts of all ranks.
            expert_rank: the rank of each expert, [num_experts]; None: the same number of consecutive experts per rank.
            apart: reserve the additional memory that a combine with `apart` needs.
            deadline_s: seconds until a wait for another rank fails.

        Raises:
            ValueError: unsupported sizes; devices that cannot map each other's memory.
        """
        ranks = len(devices)
        sizes = Sizes.checked(ranks, max_tokens, hidden, topk, num_experts, apart, deadline_s, expert_rank)
        layout = Layout.of(sizes, ranks)
        if None in devices:
            if any(device is not None for device in devices):
                check.fail("devices", "CUDA devices, or all None", list(devices))
            host = twin.HostRanks(ranks, sizes.max_tokens, sizes.hidden, sizes.topk, sizes.owner(ranks), deadline_s)
            links = [Link(None, r, ranks, (0,) * ranks, 0, 0, 0, ranks, sizes, layout, host) for r in range(ranks)]
            return [cls(link, None) for link in links]
        given = [_checked_device("devices", device) for device in devices]
        for device in {*given}:
            for peer in {*given}:
                windows.enable_peer_access(device, peer)
        memories = [_Memory(device, sizes, layout, ranks) for device in given]
        addresses = tuple(memory.window for memory in memories)
        states = [
            cls(_link(memory, rank, addresses, given.count(memory.device), sizes, layout), memory)
            for rank, memory in enumerate(memories)
        ]
        for device in {*given}:
            kernel.load_all(("all_to_all",), device, sizes.takes)
        return states

    @classmethod
    def connect(
        cls,
        rank: int,
        ranks: int,
        device: int,
        all_gather: Callable[[Any], Sequence[Any]],
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        num_experts: int,
        expert_rank: Sequence[int] | None = None,
        apart: bool = False,
        deadline_s: float = 30.0,
    ) -> AllToAllState:
        """Create the state of this process's rank. Each rank is a process on the same host that calls this function.

        Args:
            rank, ranks: the index of this rank, and the number of ranks.
            device: the CUDA device of this rank.
            all_gather: a function that takes an object of this rank and returns the objects of all ranks in order, such
                as a wrapper of `torch.distributed.all_gather_object`.
            max_tokens, hidden, topk, num_experts, expert_rank, apart, deadline_s: as for `local`.

        Raises:
            ValueError: unsupported sizes; sizes that differ between ranks; ranks on several hosts; devices that cannot
                map each other's memory. If one rank raises an exception, all ranks do.
        """

        def own() -> tuple[Any, ...]:
            sizes = Sizes.checked(ranks, max_tokens, hidden, topk, num_experts, apart, deadline_s, expert_rank)
            return check.integer("rank", rank, 0, ranks - 1), ranks, windows.host_id(), sizes

        # Compare the sizes of all ranks before any memory is allocated.
        offers = _gather(all_gather, own)
        _check_offers(offers)
        sizes: Sizes = offers[rank][-1]
        layout = Layout.of(sizes, ranks)
        memory: _Memory | None = None

        def window() -> tuple[str, bytes]:
            nonlocal memory
            _checked_device("device", device)
            if rank == 0:  # rank 0 compiles, and the other ranks find the kernels in the cache
                kernel.load_all(("all_to_all",), device, sizes.takes)
            memory = _Memory(device, sizes, layout, ranks)
            return windows.bus_id(device), windows.handle_of(device, memory.window)

        def addresses() -> tuple[int, ...]:
            assert memory is not None
            found = []
            for other, (bus, handle) in enumerate(handles):
                if other != rank:
                    check_peer(device, bus, other)
                found.append(memory.window if other == rank else memory.map(handle))
            kernel.load_all(("all_to_all",), device, sizes.takes)
            return tuple(found)

        try:
            handles = _gather(all_gather, window)
            # A rank may begin only after all ranks have mapped its window.
            mapped = _gather(all_gather, addresses)[rank]
        except Exception:
            if memory is not None:
                memory.release()
            raise
        assert memory is not None
        sharing = sum(bus == handles[rank][0] for bus, _ in handles)
        return cls(_link(memory, rank, mapped, sharing, sizes, layout), memory)

    # --- the order of calls ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an error if an earlier call has failed.

        A call returns before the GPU has finished it, so the next dispatch or combine reports its failure. Replays of a
        CUDA graph do not report failures, so call `check` now and then in a loop of replays.

        Raises AllToAllError if a call has failed, and ValueError if the state is closed.
        """
        self.expect_open()
        found = self._failed_wait()
        if found is None:
            if self._gave_up:
                raise AllToAllError(f"rank {self.rank} has given up by abort()", self.rank, "dispatch", -1)
            return
        code, rank, phase, step = found
        name = _PHASES[phase]
        why = {
            twin.PAST_DEADLINE: f"rank {rank} did not come within {self.link.sizes.deadline_s:g} s",
            twin.ABORTED: f"rank {rank} gave up",
            twin.OVER_CAPACITY: "an expert of this rank has no row for a token: more tokens than it has room for, or "
            "an expert_map without an expert that expert_rank gives to this rank",
            twin.OTHER_CALL: f"rank {rank} made other calls before",
        }[code]
        raise AllToAllError(f"{name} {step} of rank {self.rank} failed: {why}", rank, name, step)

    def _failed_wait(self) -> twin.Failure | None:
        if self._failure is None:
            return self.host.failures[self.rank]
        return twin.Failure(*self._failure) if self._failure[0] else None

    def expect_open(self) -> None:
        if self._closed:
            check.fail("state", "open", "a closed one")

    def begin_dispatch(self) -> int:
        """Begin a dispatch, and return the index of its buffer.

        Raises RuntimeError if an earlier call has not been received.
        """
        self.check()
        if self._open is not None:
            raise RuntimeError(f"the {self._open} before must be received first: call its receiver")
        self._open, self._buffer = _PHASES[0], 1 - self._buffer
        return self._buffer

    def end_dispatch(self, tokens: int) -> None:
        self._open, self._dispatched = None, tokens

    def begin_combine(self, topk_ids: Any) -> int:
        """Begin a combine, and return the buffer index of the dispatch before it.

        Raises RuntimeError if no dispatch has been received, and ValueError if the number of tokens differs from the
        dispatch.
        """
        self.check()
        if self._open is not None or self._dispatched is None:
            raise RuntimeError("all_to_all_combine must follow an all_to_all_dispatch that has been received")
        if topk_ids.shape and topk_ids.shape[0] != self._dispatched:
            wanted = f"of the {self._dispatched} tokens that were dispatched"
            check.fail("topk_ids", wanted, f"{topk_ids.shape[0]} tokens")
        self._open = _PHASES[1]
        return self._buffer

    def end_combine(self) -> None:
        self._open = self._dispatched = None

    def undo(self) -> None:
        """Undo the beginning of a call that was refused before its launch."""
        if self._open == _PHASES[0]:
            self._buffer = 1 - self._buffer
        self._open = None

    # --- arrays ---------------------------------------------------------------------------------------

    def received(self, like: Any, buffer: int, dtype: str, columns: int, weights: Any, ids: Any) -> Dispatched:
        """Return the result of a dispatch into `buffer`: views of this rank's window, in the library of `like`.

        A row has elements of `dtype` and `columns` scales. `weights` and `ids` are the received weights and ids.
        """
        library = arrays.library_of(like)
        key = library, buffer, dtype, columns
        if key not in self._views:
            places = self.ranks * self.max_tokens
            rows = self._view(like, "rows", buffer, (places, self.hidden), dtype)
            scales = self._view(like, "scales", buffer, (places, columns), "float32") if columns else None
            self._views[key] = rows, scales
        return Dispatched(*self._views[key], weights, ids)

    def _view(self, like: Any, part: str, buffer: int, shape: tuple[int, ...], dtype: str) -> Any:
        size = math.prod(shape) * arrays.ITEM_SIZE[dtype]
        library = arrays.library_of(like)
        assert library is not None
        if self.host is not None:
            memory = getattr(self.host, part)[self.rank, buffer].view(np.uint8)[:size]
            return library.from_numpy(memory.view(arrays.numpy_dtype(dtype)).reshape(shape), like)
        assert self.device is not None
        address = self.link.windows[self.rank] + getattr(self.link.layout, part)[buffer]
        return library.from_bytes(windows.array_at(self.device, address, size, self._memory), shape, dtype)

    def expert_map(self, like: Any) -> Any:
        """Return int32 [num_experts] on the device of `like`: the index of each expert on this rank, or -1."""
        library = arrays.library_of(like)
        if library is None:
            check.fail("like", "an array", type(like).__name__, TypeError)
        key = library, library.device(like)
        if key not in self._maps:
            own = self.link.sizes.owner(self.ranks) == self.rank
            found = np.where(own, np.cumsum(own) - 1, -1).astype(np.int32)
            self._maps[key] = library.from_numpy(found, like)
        return self._maps[key]

    @property
    def num_local_experts(self) -> int:
        """The number of experts on this rank."""
        return int((self.link.sizes.owner(self.ranks) == self.rank).sum())

    # --- the end --------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Make all waits of all ranks fail at once, and make their next calls raise AllToAllError."""
        self._gave_up = True
        if self.host is not None:
            self.host.abort(self.rank)
        elif not self._closed:
            assert self._memory is not None
            offset, _ = template.struct_named(STRUCTS, "Signals").fields["abort"]
            self._memory.write_word([x + offset for x in self.link.windows], 1 + self.rank)

    def close(self) -> None:
        """Free this rank's memory. The calls of all ranks must have ended before any rank closes."""
        self._closed = True
        self._views.clear()
        if self._memory is not None:
            self._memory.release()


def _checked_device(name: str, device: Any) -> int:
    count = kernel.device_count()
    return check.integer(name, device, 0, count - 1, f"{count} CUDA devices are seen")


def _gather(all_gather: Callable[[Any], Sequence[Any]], make: Callable[[], Any]) -> list[Any]:
    """Return the results of `make` on all ranks. If it raises an exception on one rank, the others raise ValueError."""
    own: Any = None
    problem: Exception | None = None
    try:
        own = make()
    except Exception as error:
        problem = error
    offers = [*all_gather((own, None if problem is None else str(problem)))]
    if problem is not None:
        raise problem
    for other, (_, said) in enumerate(offers):
        if said is not None:
            raise ValueError(f"rank {other} could not connect: {said}")
    return [offer for offer, _ in offers]


def _link(memory: _Memory, rank: int, addresses: tuple[int, ...], sharing: int, sizes: Sizes, layout: Layout) -> Link:
    return Link(
        memory.device, rank, len(addresses), addresses, memory.progress, memory.failure, memory.rank_of, sharing, sizes,
        layout, None,
    )  # fmt: skip


def _check_offers(offers: Sequence[Any]) -> None:
    """Raise ValueError if ranks differ in host or sizes. All ranks compare the same data, so all raise the error."""
    _, ranks, host, sizes = offers[0]
    for other, (its_rank, its_ranks, its_host, its_sizes) in enumerate(offers):
        names = ("ranks", *sizes._fields)
        for name, first, its in zip(names, (ranks, *sizes), (its_ranks, *its_sizes), strict=True):
            if first != its:
                check.fail(name, f"the same on all ranks, {first} on rank 0", f"{its} on rank {other}")
        if its_rank != other:
            wanted = "a function that gives the ranks' objects in their order"
            check.fail("all_gather", wanted, f"that of rank {its_rank} as number {other}")
        if its_host != host:
            raise ValueError(f"rank {other} is on another host than rank 0, so neither can map the other's memory")
    if len(offers) != ranks:
        check.fail("all_gather", f"a function that gives the objects of {ranks} ranks", len(offers))


def check_peer(device: int, bus: str, other: int) -> None:
    """Raise ValueError if `device` cannot map the memory of the GPU of rank `other`."""
    for peer in range(kernel.device_count()):
        if windows.bus_id(peer) == bus:
            if why := windows.why_no_access(device, peer):
                raise ValueError(f"CUDA device {device} cannot use the memory of rank {other}: {why}")
            return
    raise ValueError(f"the GPU of rank {other} ({bus}) must be visible to this process (CUDA_VISIBLE_DEVICES)")
