"""Time the cases of every `bench_<stem>.py` on the GPU.

A bench file has a function `cases()` that returns a list of `Case`s; `python -m cukern bench` measures them.

- The GPU time of a call is the time of a CUDA graph of many calls, divided by their number: the median of several
  replays. Each call has its own inputs and results, and before a replay the L2 cache is filled with other data. A call
  therefore finds only data in L2 that all calls share. The calls follow one another as in a model, so on Hopper the
  launches of cukern overlap the end of the kernel before them (0.65 us each). Other libraries overlap if they use
  programmatic dependent launch.
- The floor of a case is the limit of the hardware. It is the longest of three times: an empty kernel, the bytes of the
  case at the bandwidth of a copy, and its flops at the rate of a large matrix product. All three rates are measured in
  the same run.
- The host time is the time of an eager call without waiting for its result.
- Some calls cannot be captured in a graph, because they wait for the GPU or replay graphs themselves. The wall clock
  times them, until the result is ready. The same holds for baselines.
"""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cupy
import torch

#: Maximum calls with different inputs in one graph, even if that many inputs fit in L2.
MAX_SETS = 256
MIN_REPLAY_US = 300.0
_L2_TIMES = 3
#: The driver clears freed memory asynchronously: on an H200, after 4 GiB, reads take 14% longer for 10 ms.
_CLEARING_S_PER_BYTE, _CLEARED_S = 1e-11, 0.005
_COPY_BYTES = 2**30
_MATRIX = 8192
_HOST_BATCH = 50
_HOST_BATCHES = 21
#: The first call may compile and allocate, and the second may capture graphs.
_WALL_WARM_UPS = 2
_WALL_CALLS, _WALL_S = 3, 1.0
#: Seconds between repeated attempts to stop a call that exceeds its limit.
_INSIST_S = 3.0


@dataclass(frozen=True)
class Baseline:
    """A function that a user could call instead of the op.

    Args:
        load: imports or compiles it, and returns a function of the case's inputs. An ImportError, in `load` or in the
            first call, means that the library is not installed.
        slow: preparing it takes seconds.
        prepared: the function does what a user does once for many calls (a plan, repacked weights, workspaces), and
            returns a function without arguments. Only the latter is timed.
        agree: replaces the `agree` of the case, for a result that may differ in another way.
        eager: the wall clock times it, even if the case is not eager.
        once: the wall clock times a single call after the call that is compared, because a call takes many seconds.
        limit_s: the limit in seconds for comparison and timing. A baseline that exceeds it is a problem.
    """

    load: Callable[[], Callable[..., Any]]
    slow: bool = False
    prepared: bool = False
    agree: Callable[[Any, Any], bool] | None = None
    eager: bool = False
    once: bool = False
    limit_s: float | None = None


@dataclass(frozen=True)
class Case:
    """One row of the results.

    Args:
        op: the name of the public function.
        case: the dtype, and sizes by name, with the names that the templates use.
        variant: the kernel that is measured.
        inputs: makes random arguments for `call`, on the device of the given generator. It must make all large arrays
            that a call reads or writes, because only the arguments differ between calls.
        call: runs the op on the arguments.
        bytes: the least number of bytes that the op must read and write.
        flops: the floating-point operations of the op's matrix product. 0: they do not count for the floor.
        baselines: functions of PyTorch or Triton that compute the same result, by name.
        peers: kernels of other libraries, by name.
        agree: whether a baseline's result agrees with the op's. A baseline that disagrees is not timed.
        right: for ops with several correct results: whether a result is correct for given inputs. It checks the results
            of the op and of the baselines.
        host: also measure the host time.
        eager: the wall clock times the case and its baselines.
        parts: returns the GPU time of the parts of a call, in microseconds by name. It runs on a GPU, with the inputs.
    """

    op: str
    case: Mapping[str, int | str]
    variant: str
    inputs: Callable[[torch.Generator], tuple[Any, ...]]
    call: Callable[..., Any]
    bytes: int
    flops: int = 0
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    peers: Mapping[str, Baseline] = field(default_factory=dict)
    agree: Callable[[Any, Any], bool] | None = None
    right: Callable[[tuple[Any, ...], Any], bool] | None = None
    host: bool = False
    eager: bool = False
    parts: Callable[..., Mapping[str, float]] | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs. A case of `several.Case` takes more than one."""
        return 1

    @property
    def has_baselines(self) -> bool:
        return bool(self.baselines or self.peers)

    def __str__(self) -> str:
        return f"{self.op} {' '.join(f'{name}={value}' for name, value in self.case.items())} {self.variant}"


@dataclass(frozen=True)
class Ceilings:
    """The rates that the GPU reached in this run."""

    kernel_us: float
    copy_tb_s: float
    matmul_tflop_s: float | None

    def floor_us(self, case: Case) -> float:
        compute = case.flops / self.matmul_tflop_s / 1e6 if self.matmul_tflop_s else 0.0
        return max(self.kernel_us, case.bytes / self.copy_tb_s / 1e6, compute)


def nbytes(values: Any) -> int:
    """Return the bytes of the arrays in nested tuples and lists."""
    if isinstance(values, (tuple, list)):
        return sum(map(nbytes, values))
    return getattr(values, "nbytes", 0)


def inputs(case: Case, seed: int, device: str) -> tuple[Any, ...]:
    """Return the arguments of a case's `call`; the same seed gives the same arguments."""
    return case.inputs(torch.Generator(device).manual_seed(seed))


def input_sets(case: Case, l2_bytes: int, device: str) -> list[tuple[Any, ...]]:
    """Return different inputs for several calls, enough to exceed L2: at least 2, at most `MAX_SETS`."""
    sets = [inputs(case, 0, device)]
    count = math.ceil(_L2_TIMES * l2_bytes / max(1, nbytes(sets[0])))
    return sets + [inputs(case, seed, device) for seed in range(1, min(max(count, 2), MAX_SETS))]


class _Stream:
    """A torch stream with the protocol that CuPy accepts. torch itself has it from 2.9 on."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


@contextlib.contextmanager
def current(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make `stream` the current stream of torch and of CuPy."""
    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(_Stream(stream)):
        yield


class Timer:
    """The clock on the current CUDA device. A time is the median of `replays` replays of a graph."""

    device = "cuda"

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._stream = torch.cuda.Stream()
        self._filler = torch.zeros(_L2_TIMES * self.l2_bytes // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    def gpu_us(self, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
        """Return the GPU time of `call`, in microseconds per call."""
        # The inputs were made on another stream.
        torch.cuda.synchronize()
        with current(self._stream):
            # Compile, load and autotune kernels first, because a capture cannot.
            for arguments in sets[:3]:
                call(*arguments)
        torch.cuda.synchronize()
        us = self._replay(call, sets, 1)
        # Repeat short graphs. A second pass finds its inputs in L2 unless the other inputs have displaced them.
        if us < MIN_REPLAY_US and nbytes(list(sets)) > _L2_TIMES / 2 * self.l2_bytes:
            passes = math.ceil(MIN_REPLAY_US / us)
            us = self._replay(call, sets, passes) / passes
        torch.cuda.empty_cache()
        return us / len(sets)

    def _replay(self, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], passes: int) -> float:
        """Return the median time of a graph of `passes` passes over all inputs, in microseconds."""
        graph = torch.cuda.CUDAGraph()
        # Keep the results. Otherwise a call writes into the memory of the call before it, which is in L2.
        results: list[Any] = [None] * len(sets)
        with current(self._stream):
            # Relaxed mode, because CuPy may grow its pool for the results.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="relaxed"):
                for _ in range(passes):
                    for i, arguments in enumerate(sets):
                        results[i] = call(*arguments)
            torch.cuda.synchronize()
            time.sleep(_CLEARED_S + _CLEARING_S_PER_BYTE * torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
            # The first replay uploads the graph. It also keeps the GPU busy while the host queues the other replays.
            graph.replay()
            spans = []
            for _ in range(self.replays):
                # Fill L2 by reading, because the calls would have to write dirty lines back.
                torch.sum(self._filler, dim=0, out=self._sum)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                spans.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in spans) * 1e3

    def host_us(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        """Return the host time of an eager call, in microseconds."""
        batches = []
        for _ in range(1 + _HOST_BATCHES):
            # Synchronize between batches: a full launch queue would block the host.
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_HOST_BATCH):
                call(*arguments)
            batches.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(batches[1:]) / _HOST_BATCH * 1e6

    def wall_us(self, call: Callable[..., Any], arguments: tuple[Any, ...], once: bool = False) -> float:
        """Return the time from an eager call to its result, in microseconds, after warm-up calls.

        This is the median of `replays` calls, or of fewer calls if they take long. With `once` it is one call, without
        warm-up.
        """
        seconds: list[float] = []
        warm_ups, calls = (0, 1) if once else (_WALL_WARM_UPS, self.replays)
        for number in range(warm_ups + calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(*arguments)
            torch.cuda.synchronize()
            if number >= warm_ups:
                seconds.append(time.perf_counter() - start)
            if len(seconds) >= _WALL_CALLS and sum(seconds) > _WALL_S:
                break
        torch.cuda.empty_cache()
        return statistics.median(seconds) * 1e6

    def ceilings(self, matrix: bool) -> Ceilings:
        """Measure the rates that floors are computed from. Measure matrix products only if `matrix`."""
        empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
        kernel_us = self.gpu_us(lambda: empty((1,), (32,), ()), [()] * MAX_SETS)

        # Copy with a kernel: in a graph, copy_ is a memory node, which reached two thirds of the bandwidth on an H200.
        there, back = (torch.randn(_COPY_BYTES // 4, device="cuda") for _ in range(2))
        copy_us = self.gpu_us(lambda to, source: torch.neg(source, out=to), [(there, back), (back, there)])
        del there, back

        tflop_s = None
        if matrix:
            # Use random numbers: zeros take less power, which would raise the clock rate.
            sets = [
                tuple(torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
                for _ in range(2)
            ]
            tflop_s = 2 * _MATRIX**3 / self.gpu_us(torch.matmul, sets) / 1e6
        return Ceilings(kernel_us, 2 * _COPY_BYTES / copy_us / 1e6, tflop_s)


@dataclass
class Measurement:
    """The row of a case for the results, and a message for each baseline that could not be timed."""

    row: dict[str, Any]
    problems: list[str]


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in code of the main thread that runs for longer than `seconds`; None means no limit."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Raise it repeatedly, because a compiler may catch the exception.
    signal.setitimer(signal.ITIMER_REAL, seconds, _INSIST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def measure(
    case: Case,
    timer: Timer,
    ceilings: Ceilings,
    baselines: bool = True,
    slow: bool = True,
    until: float | None = None,
) -> Measurement:
    """Time a case. If `baselines`, also time its installed baselines; slow baselines only if `slow`.

    A baseline that fails, or that is not finished at the time `until` of `time.monotonic`, adds a message to
    `problems`. A failure of the op itself is raised.
    """
    sets = [inputs(case, 0, timer.device)] if case.eager else input_sets(case, timer.l2_bytes, timer.device)
    problems = []
    row: dict[str, Any] = {
        "op": case.op,
        "case": dict(case.case),
        "variant": case.variant,
        "us": round(timer.wall_us(case.call, sets[0]) if case.eager else timer.gpu_us(case.call, sets), 3),
        "floor_us": round(ceilings.floor_us(case), 3),
        "baselines": {},
        "host_us": round(timer.host_us(case.call, sets[0]), 3) if case.host else None,
    }
    if case.parts is not None and torch.device(timer.device).type == "cuda" and torch.cuda.is_available():
        row["parts"] = {name: round(us, 1) for name, us in case.parts(*sets[0]).items()}
    for name, baseline in _wanted({**case.baselines, **case.peers}, baselines, slow):
        left = [x for x in (baseline.limit_s, None if until is None else until - time.monotonic()) if x is not None]
        if left and min(left) <= 0:
            problems.append(f"{case}: {name} was not timed, since the run's time was over")
            continue
        try:
            with limited(min(left, default=None)):
                function = baseline.load()
                if not agrees(case, baseline, function, timer.device):
                    problems.append(f"{case}: {name} disagrees with the op, so it was not timed")
                    continue
                us = _wall_us if case.eager or baseline.eager else _gpu_us
                row["baselines"][name] = round(us(baseline, function, timer, sets), 3)
        except ImportError:
            continue
        except Exception as error:
            problems.append(_problem(case, name, error))
    return Measurement(row, problems)


def agrees(case: Case, baseline: Baseline, function: Callable[..., Any], device: str) -> bool:
    """Return whether `function`, which the baseline loaded, returns the op's result."""
    # Use two copies of the inputs: otherwise a result written in place would be compared with itself.
    ours, theirs = (inputs(case, 0, device) for _ in range(2))
    mine = case.call(*ours)
    other = function(*theirs)() if baseline.prepared else function(*theirs)
    if case.right is not None and not (case.right(ours, mine) and case.right(theirs, other)):
        return False
    agree = baseline.agree or case.agree
    return agree is None or agree(mine, other)


def _wall_us(baseline: Baseline, function: Callable[..., Any], timer: Timer, sets: Sequence[tuple[Any, ...]]) -> float:
    call, arguments = (function(*sets[0]), ()) if baseline.prepared else (function, sets[0])
    return timer.wall_us(call, arguments, baseline.once)


def _gpu_us(baseline: Baseline, function: Callable[..., Any], timer: Timer, sets: Sequence[tuple[Any, ...]]) -> float:
    if not baseline.prepared:
        return timer.gpu_us(function, sets)
    return timer.gpu_us(_run, [(function(*arguments), *arguments) for arguments in sets])


def _run(prepared: Callable[[], Any], *_: Any) -> Any:
    return prepared()


def _wanted(baselines: Mapping[str, Baseline], any_at_all: bool, slow: bool) -> Iterable[tuple[str, Baseline]]:
    return [(name, b) for name, b in baselines.items() if any_at_all and (slow or not b.slow)]


def _problem(case: Case, name: str, error: Exception) -> str:
    reason = (str(error).strip() or repr(error)).splitlines()[0]
    return f"{case}: {name} failed: {type(error).__name__}: {reason}"
