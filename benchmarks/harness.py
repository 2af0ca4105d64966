"""The clock of the benchmarks: it times the cases of every `bench_<stem>.py` on the GPU.

A bench file has a function `cases()` that returns a list of `Case`s; `python -m cukern bench` measures them.

- The GPU time of a call is that of a CUDA graph of many calls, divided by their number: the median of several
  replays. Each call has inputs and results of its own, and before a replay the L2 cache is filled with other
  data, so that a call finds in L2 only data that all calls share. The calls follow one another as in a model, so that
  on Hopper cukern's launches overlap the end of the kernel before (0.65 us each); those of others do if they ask so.
- The floor of a case is what the hardware allows: the time of an empty kernel, or of moving the case's bytes at the
  bandwidth of a copy, or of computing its flops at the rate of a large product, whichever is longest. All three
  are measured in the same run.
- The host time is that of an eager call, without waiting for its result.
- A call that no graph can hold, because it asks the GPU for something or replays graphs of its own, is timed by the
  wall clock: as long as a user waits for its result. So are baselines of which that holds.
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

#: Calls with inputs of their own in one graph, at most, also where it takes more such inputs to exceed L2.
MAX_SETS = 256
MIN_REPLAY_US = 300.0
_L2_TIMES = 3
#: The driver clears freed memory in its own time: on an H200, after 4 GiB, all reads take 14% longer for 10 ms.
_CLEARING_S_PER_BYTE, _CLEARED_S = 1e-11, 0.005
_COPY_BYTES = 2**30
_MATRIX = 8192
_HOST_BATCH = 50
_HOST_BATCHES = 21
#: A call may make all things ready the first time and capture its graphs the second.
_WALL_WARM_UPS = 2
_WALL_CALLS, _WALL_S = 3, 1.0
#: Seconds after which what did not end at its limit is asked again.
_INSIST_S = 3.0


@dataclass(frozen=True)
class Baseline:
    """A function that a user could call instead of the op.

    Args:
        load: imports or compiles it and returns a function of the case's inputs. ImportError, from here or from the
            first call, says that it is not installed.
        slow: it takes seconds to get ready.
        prepared: the function returns another one without arguments, and only that one is timed. Before it, the first
            makes what a user makes once for many calls: a plan, repacked weights, workspaces.
        agree: replaces the case's, for a result that may differ in another way.
        eager: it is timed by the wall clock, also where the case is not.
        once: by the wall clock, one call behind the one that is compared is enough: it takes many seconds.
        limit_s: the seconds that comparing and timing may take; what does not end by then is a problem.
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
    """One line of the results.

    Args:
        op: the name of the public function.
        case: named sizes, in the vocabulary of the templates, and the dtype.
        variant: the kernel that is measured.
        inputs: makes random arguments for `call`, on the device of the generator it is given. All large arrays that a
            call reads or writes belong here, because only the arguments differ from call to call.
        call: runs the op on them.
        bytes: the least the op must read and write.
        flops: the floating-point operations it cannot avoid, if they are a matrix product's; 0 leaves them out.
        baselines: by name, the same in PyTorch or Triton.
        peers: by name, the kernels of other libraries.
        agree: whether a baseline's result agrees with the op's; a baseline that disagrees is not timed.
        right: for ops with several right results, whether a result is one of them for these inputs; it is asked of the
            op's and of the baselines' results.
        host: measure the host time too.
        eager: it is timed by the wall clock, and so are its baselines.
        parts: the GPU time of the parts of a call, in microseconds, by name; asked for on a GPU, with its inputs.
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
        """The GPUs that it takes; `several.Case` takes more."""
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
    """The bytes of the arrays in `values`, a nest of tuples and lists."""
    if isinstance(values, (tuple, list)):
        return sum(map(nbytes, values))
    return getattr(values, "nbytes", 0)


def inputs(case: Case, seed: int, device: str) -> tuple[Any, ...]:
    """The arguments of a case's `call`, the same for the same seed."""
    return case.inputs(torch.Generator(device).manual_seed(seed))


def input_sets(case: Case, l2_bytes: int, device: str) -> list[tuple[Any, ...]]:
    """Different inputs for as many calls as it takes to exceed L2: at least 2, at most `MAX_SETS`."""
    sets = [inputs(case, 0, device)]
    count = math.ceil(_L2_TIMES * l2_bytes / max(1, nbytes(sets[0])))
    return sets + [inputs(case, seed, device) for seed in range(1, min(max(count, 2), MAX_SETS))]


class _Stream:
    """A torch stream in the protocol by which CuPy takes it; torch itself speaks it only from 2.9 on."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream.cuda_stream


@contextlib.contextmanager
def current(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make `stream` the current one of torch and of CuPy."""
    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(_Stream(stream)):
        yield


class Timer:
    """The clock, on the current CUDA device. `replays` of a graph give one median."""

    device = "cuda"

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._stream = torch.cuda.Stream()
        self._filler = torch.zeros(_L2_TIMES * self.l2_bytes // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    def gpu_us(self, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
        """The GPU time of `call`, in microseconds per call."""
        # The inputs were made on another stream.
        torch.cuda.synchronize()
        with current(self._stream):
            # Kernels are compiled and loaded here, and tuned: none of that may happen during a capture.
            for arguments in sets[:3]:
                call(*arguments)
        torch.cuda.synchronize()
        us = self._replay(call, sets, 1)
        # A second pass finds its inputs in L2, unless the other inputs have displaced them.
        if us < MIN_REPLAY_US and nbytes(list(sets)) > _L2_TIMES / 2 * self.l2_bytes:
            passes = math.ceil(MIN_REPLAY_US / us)
            us = self._replay(call, sets, passes) / passes
        torch.cuda.empty_cache()
        return us / len(sets)

    def _replay(self, call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], passes: int) -> float:
        """The median time of a graph of `passes` over all inputs, in microseconds."""
        graph = torch.cuda.CUDAGraph()
        # Results are kept, or each call would get the memory of the one before, which is in L2.
        results: list[Any] = [None] * len(sets)
        with current(self._stream):
            # Relaxed, because CuPy may have to grow its pool for the results.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="relaxed"):
                for _ in range(passes):
                    for i, arguments in enumerate(sets):
                        results[i] = call(*arguments)
            torch.cuda.synchronize()
            time.sleep(_CLEARED_S + _CLEARING_S_PER_BYTE * torch.cuda.max_memory_reserved())
            torch.cuda.reset_peak_memory_stats()
            # The first replay uploads the graph. It also keeps the GPU busy while the others are queued, so that
            # none of them waits for the host.
            graph.replay()
            spans = []
            for _ in range(self.replays):
                # Reading leaves no dirty lines behind, which the calls would then have to write back.
                torch.sum(self._filler, dim=0, out=self._sum)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                spans.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in spans) * 1e3

    def host_us(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
        """The time that an eager call keeps the host, in microseconds."""
        batches = []
        for _ in range(1 + _HOST_BATCHES):
            # The GPU catches up between batches: a full launch queue would make the host wait.
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_HOST_BATCH):
                call(*arguments)
            batches.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(batches[1:]) / _HOST_BATCH * 1e6

    def wall_us(self, call: Callable[..., Any], arguments: tuple[Any, ...], once: bool = False) -> float:
        """The time from an eager call to its result, in microseconds, once a few calls have made all things ready.

        It is the median of `replays` calls, or of fewer where they take long; that of one call alone with `once`.
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
        """Measure the rates that floors are computed from; that of matrix products only if `matrix`."""
        empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
        kernel_us = self.gpu_us(lambda: empty((1,), (32,), ()), [()] * MAX_SETS)

        # By a kernel: in a graph, copy_ is a memory node, which reached two thirds of a kernel's bandwidth on an H200.
        there, back = (torch.randn(_COPY_BYTES // 4, device="cuda") for _ in range(2))
        copy_us = self.gpu_us(lambda to, source: torch.neg(source, out=to), [(there, back), (back, there)])
        del there, back

        tflop_s = None
        if matrix:
            # Random: zeros take less power, so that the clock would be too high.
            sets = [
                tuple(torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
                for _ in range(2)
            ]
            tflop_s = 2 * _MATRIX**3 / self.gpu_us(torch.matmul, sets) / 1e6
        return Ceilings(kernel_us, 2 * _COPY_BYTES / copy_us / 1e6, tflop_s)


@dataclass
class Measurement:
    """The row of a case for the results, and a line for each baseline that could not be timed."""

    row: dict[str, Any]
    problems: list[str]


@contextlib.contextmanager
def limited(seconds: float | None) -> Iterator[None]:
    """Raise TimeoutError in what runs for longer, in the main thread; None: there is no limit."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: a compiler may take an exception for its own.
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
    """Time a case and those of its baselines that are installed, if `baselines`; the slow ones only if `slow`.

    A baseline's failure is a problem in the measurement, and so is one that has not ended when `time.monotonic` is
    `until`; the op's own failure is raised.
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
    """Whether `function`, loaded of the baseline, finds what the op does."""
    # Two sets of the same inputs: a result written in place must not be compared with itself.
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
