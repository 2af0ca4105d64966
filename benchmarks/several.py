"""Time cases on several GPUs of one host. Each GPU is a rank; one process drives all ranks.

Calls of different ranks wait for one another, so they are timed together: each GPU has a CUDA graph of many calls, and
all graphs are replayed at the same time, back to back. The time of a call is the mean over the GPUs, and the median of
several such runs. Some calls, such as a combine, cannot run alone. Such a call is timed together with the call before
it, in turns with the call before it alone; the difference is its time. Calls rotate through several inputs. The inputs
of few tokens stay in L2, because in a model the kernel that makes them also leaves them there.

The floor of a case is the longer of two times: an empty kernel, and the bytes that a rank sends to other ranks, at the
bandwidth of a kernel that only stores into a peer's memory while the peer does the same. A minimal exchange is a
baseline: one store of 16 bytes to each peer, a flag after it, and the wait for the flags of the peers. Both rates are
measured in the same run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cupy
import numpy
import torch

from benchmarks import harness
from benchmarks.processes import NOT_HERE
from cukern.runtime import windows

_STORED_BYTES = 2**28
_STORES_PER_GRAPH, _EXCHANGES_PER_GRAPH = 4, 200
_REPLAYS_PER_SPAN = 5
_HOST_CALLS, _HOST_ROUNDS = 20, 21
_PROCESSES_S = 90.0

#: Names of baselines that are not kernels of another library.
MINIMAL_EXCHANGE, SAME_ROWS = "minimal exchange", "same rows on one GPU"

_SOURCE = r"""
extern "C" __global__ void store(uint4* to, long long units) {
    const long long each = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < units; i += each)
        to[i] = make_uint4(i, 1, 2, 3);
}

struct Mail {
    uint4 word;
    unsigned long long flag;
};

// Thread r exchanges with rank r. A rank that never comes ends the wait after 5 s.
extern "C" __global__ void exchange(Mail* const* boxes, unsigned long long* epoch, int rank) {
    const unsigned long long step = *epoch + 1;
    const int other = threadIdx.x;
    __syncthreads();
    if (other != rank) {
        Mail* const there = boxes[other] + rank;
        there->word = make_uint4(step, 1, 2, 3);
        asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(&there->flag), "l"(step) : "memory");
        const unsigned long long* const here = &boxes[rank][other].flag;
        unsigned long long begin = 0, now = 0, seen = 0;
        // The clock takes as long as several looks.
        for (int looks = 0; seen < step && now - begin < 5000000000ull; ++looks) {
            asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(here) : "memory");
            if (looks % 256 == 255) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
            if (looks == 255) begin = now;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) *epoch = step;
}
"""
_MAIL_BYTES = 32


class Calls(NamedTuple):
    """The functions of a case after its setup.

    Attributes:
        call: takes a rank and the number of the call; makes the call on that rank's GPU, which is the current device.
        sets: the number of different inputs. Call `n` uses the inputs `n % sets`.
        before: the first part of `call`, which is not timed; None: all of `call` is timed.
        alone: for a baseline on one GPU, a call on GPU 0 with the inputs of the given number; None: no such baseline.
        check: raises if an exchange has failed.
        close: frees what `begin` allocated.
    """

    call: Callable[[int, int], Any]
    sets: int
    before: Callable[[int, int], Any] | None
    alone: Callable[[int], Any] | None
    check: Callable[[], None]
    close: Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One row of the results, measured on several GPUs.

    Args:
        op: the name of the public function.
        case: sizes by name, including `ranks`, the number of GPUs.
        variant: the kernel that is measured.
        sent_bytes: the bytes that a rank sends to the other ranks in a call.
        begin: sets the case up on the GPUs of a clock.
        calls: the calls in a graph; an even number, because buffers alternate.
        baselines: functions by name that measure the same exchange in other processes, in microseconds. An ImportError
            means that the library is not installed.
        host: also measure the host time.
    """

    op: str
    case: Mapping[str, int | str]
    variant: str
    sent_bytes: int
    begin: Callable[[Clock], Calls]
    calls: int = 40
    baselines: Mapping[str, Callable[[Case], float]] = field(default_factory=dict)
    host: bool = False

    @property
    def gpus(self) -> int:
        return int(self.case["ranks"])

    @property
    def has_baselines(self) -> bool:
        return bool(self.baselines)

    def __str__(self) -> str:
        return f"{self.op} {' '.join(f'{name}={value}' for name, value in self.case.items())} {self.variant}"


@dataclass(frozen=True)
class Ceilings(harness.Ceilings):
    """The rates that the GPUs reached in this run. `peer_tb_s` is the rate per direction, with both directions busy."""

    peer_tb_s: float = math.nan
    exchange_us: float = math.nan

    def exchange_floor_us(self, sent_bytes: int) -> float:
        """Return the least time that a rank needs to send these bytes."""
        return max(self.kernel_us, sent_bytes / self.peer_tb_s / 1e6)


class Clock:
    """The clock on the first `gpus` CUDA devices, one device per rank. A time is the median of `replays` runs."""

    def __init__(self, replays: int, gpus: int) -> None:
        self.replays, self.ranks = replays, range(gpus)
        self.one_gpu = harness.Timer(replays)
        self.l2_bytes = self.one_gpu.l2_bytes
        self._streams = [torch.cuda.Stream(rank) for rank in self.ranks]
        for device, peer in itertools.permutations(self.ranks, 2):
            windows.enable_peer_access(device, peer)

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[torch.cuda.Stream]:
        """Make a rank's GPU, and the clock's stream on it, the current ones of torch and of CuPy."""
        with torch.cuda.device(rank), cupy.cuda.Device(rank), harness.current(self._streams[rank]):
            yield self._streams[rank]

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank's tensors."""
        return torch.device("cuda", rank)

    def on_all(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function for each rank with that rank's GPU current. Return the results."""
        made = []
        for rank in self.ranks:
            with self.on(rank):
                made.append(function(rank))
        return made

    def synchronize(self) -> None:
        for rank in self.ranks:
            torch.cuda.synchronize(rank)

    def warm_up(self, call: Callable[[int, int], Any], calls: int = 2) -> None:
        """Make the first calls of each rank in its own thread: loading a module may wait for a call that waits."""

        def first(rank: int) -> None:
            with self.on(rank):
                for number in range(calls):
                    call(rank, number)

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(first, self.ranks))
        self.synchronize()

    def graphs(self, call: Callable[[int, int], Any], calls: int) -> list[torch.cuda.CUDAGraph]:
        """Return a CUDA graph of `calls` calls for each GPU."""
        made = []
        for rank in self.ranks:
            with self.on(rank) as stream:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
                    for number in range(calls):
                        call(rank, number)
            made.append(graph)
        return made

    def span_us(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> float:
        """Return the time of one replay of all graphs together: the mean over the GPUs, in microseconds."""
        self.synchronize()
        starts = [torch.cuda.Event(enable_timing=True) for _ in self.ranks]
        ends = [torch.cuda.Event(enable_timing=True) for _ in self.ranks]
        # The first replay uploads the graph, and keeps the GPUs busy while the host queues the other replays.
        for replay in range(1 + _REPLAYS_PER_SPAN):
            for rank, graph in enumerate(graphs):
                with self.on(rank) as stream:
                    if replay == 1:
                        starts[rank].record(stream)
                    graph.replay()
        for rank in self.ranks:
            with self.on(rank) as stream:
                ends[rank].record(stream)
        self.synchronize()
        spans = (start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))
        return statistics.mean(spans) * 1e3 / _REPLAYS_PER_SPAN

    def gpu_us(
        self, call: Callable[[int, int], Any], calls: int, before: Callable[[int, int], Any] | None = None
    ) -> float:
        """Return the GPU time of `call` minus the time of `before`, if given, in microseconds per call."""
        whole = self.graphs(call, calls)
        part = None if before is None else self.graphs(before, calls)
        spans = [self.span_us(whole) - (0.0 if part is None else self.span_us(part)) for _ in range(self.replays)]
        return statistics.median(spans) / calls

    def host_us(self, call: Callable[[int, int], Any]) -> float:
        """Return the host time of an eager call of one rank, in microseconds."""
        rounds = []
        for _ in range(1 + _HOST_ROUNDS):
            self.synchronize()
            spent = 0.0
            for number in range(_HOST_CALLS):
                for rank in self.ranks:
                    with self.on(rank):
                        start = time.perf_counter()
                        call(rank, number)
                        spent += time.perf_counter() - start
            rounds.append(spent)
        self.synchronize()
        return statistics.median(rounds[1:]) / (_HOST_CALLS * len(self.ranks)) * 1e6

    def ceilings(self, matrix: bool = False) -> Ceilings:
        """Measure the rates that floors are computed from. Measure matrix products only if `matrix`."""
        one = self.one_gpu.ceilings(matrix)
        module = cupy.RawModule(code=_SOURCE)
        return Ceilings(
            one.kernel_us, one.copy_tb_s, one.matmul_tflop_s, self._peer_tb_s(module), self._exchange_us(module)
        )

    def _peer_tb_s(self, module: cupy.RawModule) -> float:
        store = module.get_function("store")
        memory = [windows.allocate(rank, _STORED_BYTES) for rank in self.ranks]
        blocks = 4 * torch.cuda.get_device_properties(0).multi_processor_count

        def call(rank: int, number: int) -> None:
            # Each GPU stores into one other GPU, and one other GPU stores into it.
            there = memory[(rank + 1 + number % (len(memory) - 1)) % len(memory)]
            store((blocks,), (512,), (there, _STORED_BYTES // 16))

        try:
            self.warm_up(call)
            return _STORED_BYTES / self.gpu_us(call, _STORES_PER_GRAPH) / 1e6
        finally:
            for rank, address in enumerate(memory):
                windows.free(rank, address)

    def _exchange_us(self, module: cupy.RawModule) -> float:
        ranks = len(self.ranks)
        exchange = module.get_function("exchange")
        memory = [windows.allocate(rank, (ranks + 1) * _MAIL_BYTES) for rank in self.ranks]
        boxes = [torch.tensor(memory, dtype=torch.int64, device=self.device(rank)) for rank in self.ranks]
        self.synchronize()

        def call(rank: int, number: int) -> None:
            epoch = memory[rank] + ranks * _MAIL_BYTES
            exchange((1,), (ranks,), (boxes[rank].data_ptr(), epoch, numpy.int32(rank)))

        try:
            self.warm_up(call)
            return self.gpu_us(call, _EXCHANGES_PER_GRAPH)
        finally:
            for rank, address in enumerate(memory):
                windows.free(rank, address)


def measure(
    case: Case, clock: Clock, ceilings: Ceilings, baselines: bool = True, slow: bool = True
) -> harness.Measurement:
    """Time a case. If `baselines` and `slow`, also time its baselines, which run in other processes."""
    calls = case.begin(clock)
    times: dict[str, float] = {}
    problems = []
    floor_us = ceilings.exchange_floor_us(case.sent_bytes)
    try:
        clock.warm_up(calls.call)
        us = clock.gpu_us(calls.call, case.calls, calls.before)
        calls.check()
        host_us = round(clock.host_us(calls.call), 3) if case.host else None
        calls.check()
        if calls.alone is not None:
            times[SAME_ROWS] = clock.one_gpu.gpu_us(calls.alone, [(number,) for number in range(calls.sets)])
            floor_us += times[SAME_ROWS]
        else:
            times[MINIMAL_EXCHANGE] = ceilings.exchange_us
    finally:
        clock.synchronize()
        calls.close()
        torch.cuda.empty_cache()
    for name, baseline in case.baselines.items() if baselines and slow else ():
        try:
            times[name] = baseline(case)
        except ImportError:
            continue
        except Exception as error:
            problems.append(
                f"{case}: {name} failed: {type(error).__name__}: {(str(error) or repr(error)).splitlines()[-1]}"
            )
    row = {
        "op": case.op,
        "case": dict(case.case),
        "variant": case.variant,
        "us": round(us, 3),
        "floor_us": round(floor_us, 3),
        "baselines": {name: round(value, 3) for name, value in times.items()},
        "host_us": host_us,
    }
    return harness.Measurement(row, problems)


# --- other libraries, with a process for each GPU ---------------------------------------------------------


def of_processes(kind: str, ranks: int, sizes: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """Return times of `benchmarks.processes`, in microseconds by name and bytes. Each GPU has its own process.

    Args:
        kind: "nccl" or "symm_mem".
        sizes: the total bytes that each rank sends to the other ranks.

    Raises:
        ImportError: this build of PyTorch does not have the kind.
        RuntimeError: the processes failed.
    """
    found = _outcome(kind, ranks, sizes)
    if isinstance(found, Exception):
        raise found
    return found


@functools.cache
def _outcome(kind: str, ranks: int, sizes: tuple[int, ...]) -> dict[tuple[str, int], float] | Exception:
    """Return the times, or the error that a run of the processes gave. All cases share one run."""
    with tempfile.TemporaryDirectory() as folder:
        common = [sys.executable, "-m", "benchmarks.processes", kind, folder, str(ranks), ",".join(map(str, sizes))]
        root = Path(__file__).resolve().parents[1]
        logs = [Path(folder) / f"log{rank}" for rank in range(ranks)]
        with contextlib.ExitStack() as stack:
            begun = [
                subprocess.Popen(
                    [*common, str(rank)], cwd=root, stdout=stack.enter_context(log.open("w")), stderr=subprocess.STDOUT
                )
                for rank, log in enumerate(logs)
            ]
            codes = _ended(begun)
        answer = Path(folder) / "times.json"
        if any(codes) or not answer.is_file():
            if NOT_HERE in codes:
                return ImportError(f"{kind} is not in this build of PyTorch")
            failed = next((rank for rank, code in enumerate(codes) if code), 0)
            said = logs[failed].read_text()[-2000:].strip()
            return RuntimeError(f"process {failed} ended with status {codes[failed]}: {said}")
        return {(name, size): us for name, size, us in json.loads(answer.read_text())}


def _ended(begun: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Return the exit status of each process. If one process fails or is late, kill the others."""
    end = time.monotonic() + _PROCESSES_S
    while any(process.poll() is None for process in begun):
        if time.monotonic() > end or any(process.poll() for process in begun):
            time.sleep(2)  # let the other processes report their errors
            for process in begun:
                process.kill()
            break
        time.sleep(0.1)
    return [process.wait() for process in begun]
