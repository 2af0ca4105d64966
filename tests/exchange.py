"""Exchanges between ranks for the tests: what a rank is given, its calls one by one, and ranks that are processes.

python -m tests.exchange FOLDER RANK       one rank of a `Job`, which `Processes` writes into the folder
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cukern
from cukern.ops.all_to_all import GROUP
from cukern.reference.quantization import per_token_group_quant_fp8
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from tests.buffers import Array, OnlyDLPack, as_torch, normal, on_gpu

#: How rows travel: as they are, in FP8 that is made on the way, or in FP8 with the caller's scales or without any.
FORMS = ("plain", "quantize", "scaled", "bytes")
#: How rows come back: each token's sum; the sum of its slots' rows, weighted or not, or of rows in batches of the
#: experts; slots apart, weighted or not.
MODES = ("summed", "slots", "unweighted", "batched", "apart", "apart unweighted")
#: So many places at which the rows of experts begin in one sequence of random numbers.
_BEGINNINGS = 50_000


class Case(NamedTuple):
    """The sizes of an exchange, and how its rows travel. `tokens` are those of each rank in the first step."""

    tokens: tuple[int, ...]
    hidden: int = 256
    topk: int = 4
    num_experts: int = 16
    expert_rank: tuple[int, ...] | None = None
    dtype: str = "bfloat16"
    id_dtype: str = "int32"
    form: str = "plain"
    mode: str = "slots"
    to_one: bool = False  # all slots to the first expert
    max_tokens: int = 0  # 0: one more than any rank has
    turning: bool = True  # from step to step each rank takes the next one's number of tokens

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    def tokens_of(self, rank: int, step: int) -> int:
        """The tokens of a rank in a step."""
        return self.tokens[(rank + step * self.turning) % self.ranks]

    @property
    def most(self) -> int:
        return self.max_tokens or max(self.tokens) + 1

    @property
    def places(self) -> int:
        return self.ranks * self.most

    @property
    def owner(self) -> Array:
        """The rank of each expert."""
        if self.expert_rank is not None:
            return np.array(self.expert_rank)
        return np.repeat(np.arange(self.ranks), self.num_experts // self.ranks)

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of `AllToAllState.local` and `connect`."""
        return {
            "max_tokens": self.most,
            "hidden": self.hidden,
            "topk": self.topk,
            "num_experts": self.num_experts,
            "expert_rank": self.expert_rank,
            "apart": self.mode.startswith("apart"),
        }

    def local(self, devices: Sequence[int | None] | None = None, deadline_s: float = 20.0) -> list[Any]:
        """The states of all ranks; in host memory by default."""
        devices = [None] * self.ranks if devices is None else devices
        return cukern.AllToAllState.local(devices, **self.sizes, deadline_s=deadline_s)


class Batch(NamedTuple):
    """What a rank sends in a step."""

    hidden_states: Array
    topk_weights: Array
    topk_ids: Array
    scales: Array | None


def batch_of(case: Case, rank: int, step: int = 0) -> Batch:
    """The tokens of a rank in a step; some ids are of no expert."""
    rng = np.random.default_rng([17, step, rank])
    tokens = case.tokens_of(rank, step)
    weights = rng.random((tokens, case.topk), np.float32)
    ids = rng.integers(-1, case.num_experts + 1, (tokens, case.topk))
    if case.to_one:
        ids[:] = 0
    hidden, scales = normal(rng, (tokens, case.hidden), case.dtype), None
    if case.form in ("scaled", "bytes"):
        hidden, scales = per_token_group_quant_fp8(hidden, GROUP)
    return Batch(hidden, weights, ids.astype(case.id_dtype), scales if case.form == "scaled" else None)


def output_of(case: Case, rank: int, step: int, inverse: Array | None, here: Array) -> Array:
    """What a rank's experts give: random rows, and NaN in those that no slot has.

    The rows are parts of one sequence of random numbers, which begin at random places: many rows are soon made.
    """
    rng = np.random.default_rng([23, step, rank])
    count = case.places * (1 if inverse is None else case.topk)
    if case.mode == "batched":
        count = int((case.owner == rank).sum()) * room_of(case)
    used = np.flatnonzero(here.any(1)) if inverse is None else inverse[here]
    numbers = np.lib.stride_tricks.sliding_window_view(
        normal(rng, (_BEGINNINGS + case.hidden - 1,), case.dtype), case.hidden
    )
    rows = np.full((max(count, 1), case.hidden), np.nan, numbers.dtype)
    rows[used] = numbers[rng.integers(0, _BEGINNINGS, len(used))]
    return rows.reshape(-1, room_of(case), case.hidden) if case.mode == "batched" and count else rows


def room_of(case: Case) -> int:
    """The rows that each expert has room for: enough for all slots, or for more than random ids give it."""
    return case.places * case.topk if case.to_one or case.places < 64 else case.places // 2


class Outcome(NamedTuple):
    """What a rank got in a step, in NumPy; 0 where rows and scales may hold anything."""

    rows: Array
    scales: Array | None
    topk_weights: Array
    topk_ids: Array
    expert_load: Array
    out: Array


def put(place: str, array: Array | None) -> Any:
    """A copy of an array where a rank is: on "numpy", "cpu", "foreign", or on "cupy:0", "cuda:0", "foreign cuda:0"."""
    if array is None:
        return None
    library, _, device = place.partition(":")
    if library == "numpy":
        return array.copy()
    if library == "foreign":
        return OnlyDLPack(array.copy())
    if library in ("cupy", "foreign cuda"):
        with cupy.cuda.Device(int(device)):
            copy = on_gpu(array)
        return OnlyDLPack(copy) if library == "foreign cuda" else copy
    return as_torch(array).to(place)


def get(array: Any) -> Any:
    """An array in NumPy; FP8 as its bytes."""
    if array is None:
        return None
    array = array.array if isinstance(array, OnlyDLPack) else array
    library = arrays.library_of(array)
    assert library is not None
    with array.device if library is arrays.CUPY else contextlib.nullcontext():
        found = library.to_numpy(array)
    return (found.view(np.uint8) if found.dtype.name.startswith("float8") else found).copy()


class Rank:
    """One rank and its calls; with `split` each call sends first and receives later."""

    def __init__(self, state: Any, case: Case, place: str = "numpy", split: bool = True) -> None:
        self.state, self.case, self.place, self.split = state, case, place, split
        self.load = put(place, np.zeros(case.num_experts, np.int32))
        self.step = 0

    def take(self, step: int) -> None:
        """The arguments of a dispatch."""
        batch = batch_of(self.case, self.state.rank, step)
        given = {name: put(self.place, x) for name, x in batch._asdict().items() if x is not None}
        self.step = step
        self.arguments = given | {"quantize": self.case.form == "quantize", "expert_load": self.load}

    def send(self) -> None:
        self.receiver = cukern.all_to_all_dispatch(self.state, **self.arguments, return_receiver=self.split)

    def receive(self) -> None:
        self.received = self.receiver() if self.split else self.receiver
        ids = get(self.received.topk_ids)
        valid = (ids >= 0) & (ids < self.case.num_experts)
        self.here = valid & (self.case.owner[np.where(valid, ids, 0)] == self.state.rank)

    def sorted(self, ids: Any) -> Any:
        """The row of each slot, by the ids that came here."""
        case, like = self.case, arrays.enter("topk_ids", ids)
        mapped = {"expert_map": self.state.expert_map(like), "num_local_experts": self.state.num_local_experts}
        if not self.state.num_local_experts:  # which the sort does not take
            return put(self.place, np.full((case.places, case.topk), -1, np.int32))
        if case.mode == "batched":
            return cukern.moe_sort_batched(like, case.num_experts, room_of(case), **mapped)[1]
        return cukern.moe_sort(like, case.num_experts, **mapped)[2]

    def answer(self) -> None:
        """The arguments of a combine."""
        case = self.case
        inverse = None if case.mode == "summed" else self.sorted(self.received.topk_ids)
        output = output_of(case, self.state.rank, self.step, get(inverse), self.here)
        weighted = case.mode not in ("summed", "unweighted", "apart unweighted")
        self.answered = {
            "expert_output": put(self.place, output),
            "topk_weights": self.arguments["topk_weights"] if weighted else None,
            "topk_ids": self.arguments["topk_ids"],
            "inverse": inverse,
            "apart": case.mode.startswith("apart"),
        }

    def send_back(self, **options: Any) -> None:
        options = {**self.answered, **options}
        self.receiver = cukern.all_to_all_combine(self.state, **options, return_receiver=self.split)

    def receive_back(self) -> None:
        self.out = self.receiver() if self.split else self.receiver

    @property
    def outcome(self) -> Outcome:
        here = self.here.any(1)
        rows, scales = get(self.received.hidden_states), get(self.received.scales)
        for array in (rows, scales):
            if array is not None:
                array[~here] = 0
        weights, ids = get(self.received.topk_weights), get(self.received.topk_ids)
        return Outcome(rows, scales, weights, ids, get(self.load), get(self.out))

    def run(self, step: int) -> Outcome:
        """A step, for a rank that has a thread or a process of its own."""
        self.take(step)
        self.send()
        self.receive()
        self.answer()
        self.send_back()
        self.receive_back()
        return self.outcome


def in_turns(ranks: Sequence[Rank], step: int = 0) -> list[Outcome]:
    """A step of all ranks in one thread."""
    dispatch_in_turns(ranks, step)
    combine_in_turns(ranks)
    return [rank.outcome for rank in ranks]


def dispatch_in_turns(ranks: Sequence[Rank], step: int) -> None:
    # Nothing that waits for a GPU comes between the ranks' launches.
    for rank in ranks:
        rank.take(step)
    for rank in ranks:
        rank.send()
    for rank in ranks:
        rank.receive()


def combine_in_turns(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.answer()
    for rank in ranks:
        rank.send_back()
    for rank in ranks:
        rank.receive_back()


def at_once(ranks: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """`work` of each rank, in threads; an exception in place of what it raises."""

    def caught(rank: Any) -> Any:
        try:
            return work(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(caught, ranks)]


@functools.lru_cache(8)
def from_twin(case: Case, steps: int = 1) -> list[list[Outcome]]:
    """What the twin gives, by step and rank; of the latest cases it is kept, since several tests want the same."""
    ranks = [Rank(state, case) for state in case.local()]
    return [in_turns(ranks, step) for step in range(steps)]


def assert_same(got: Sequence[Outcome], want: Sequence[Outcome]) -> None:
    """The same bits on every rank."""
    assert len(got) == len(want) > 0
    for rank, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for name, x, y in zip(Outcome._fields, ours, theirs, strict=True):
            if y is None:
                assert x is None, (rank, name)
                continue
            assert (x.dtype, x.shape) == (y.dtype, y.shape), (rank, name)
            x, y = (np.ascontiguousarray(z).view(f"u{y.itemsize}") for z in (x, y))
            np.testing.assert_array_equal(x, y, err_msg=f"{name} of rank {rank}")


# --- ranks that are processes -------------------------------------------------------------------------


class Job(NamedTuple):
    """What the processes of an exchange do: steps of `cases` in turn, and what goes wrong with one of them.

    `fault` is (what, rank, step): "killed before", "killed in dispatch" or "killed in combine"; "late", which never
    enters the step; "abort", which gives up while the others wait; "capacity", whose experts have too little room; and
    "sizes", which connects with another hidden.
    """

    cases: tuple[Case, ...]
    devices: tuple[int, ...]
    deadline_s: float
    steps: int
    fault: tuple[str, int, int] | None = None

    def fault_of(self, rank: int, step: int) -> tuple[str, str]:
        """What goes wrong in a step with this rank, and what with another one; "" for nothing."""
        what, who, at = self.fault or ("", -1, -1)
        return (what, "") if (who, at) == (rank, step) else ("", what if at == step else "")

    @property
    def largest(self) -> Case:
        """The case with what the state of all cases needs."""
        return next((case for case in self.cases if case.mode.startswith("apart")), self.cases[0])


class Report(NamedTuple):
    """What became of a rank: its outcomes, and the failure with what the call gave that failed."""

    outcomes: list[Outcome]
    error: tuple[str, str] | None = None  # class and message
    where: tuple[int, str, int] | None = None  # rank, phase and step of an AllToAllError
    seconds: float = 0.0  # from the entry of the failed call to the exception
    ids: Array | None = None  # of the call that failed
    out: Array | None = None


def gather_by_files(folder: Path, rank: int, ranks: int, timeout_s: float = 120.0) -> Callable[[Any], list[Any]]:
    """An all_gather between processes that see the same folder."""
    rounds = iter(range(1000))

    def all_gather(own: Any) -> list[Any]:
        number = next(rounds)
        unfinished = folder / f"{number}.{rank}.part"
        unfinished.write_bytes(pickle.dumps(own))
        unfinished.rename(folder / f"{number}.{rank}")
        end = time.monotonic() + timeout_s
        paths = [folder / f"{number}.{other}" for other in range(ranks)]
        while not all(path.exists() for path in paths):
            if time.monotonic() > end:
                raise TimeoutError(f"some of {[path.name for path in paths]} did not come")
            time.sleep(0.002)
        return [pickle.loads(path.read_bytes()) for path in paths]

    return all_gather


def _all_of(job: Job, states: Sequence[Any], places: Callable[[Any], str], split: bool) -> list[list[Rank]]:
    """The ranks of a job by case."""
    return [[Rank(state, case, places(state), split) for state in states] for case in job.cases]


def expected(job: Job) -> list[list[Outcome]]:
    """What the twin gives for the steps of a job, by step and rank."""
    ranks = _all_of(job, job.largest.local(), lambda _: "numpy", True)
    return [in_turns(ranks[step % len(ranks)], step) for step in range(job.steps)]


class Process:
    """One rank of a job, in this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.job: Job = pickle.loads((folder / "job").read_bytes())
        self.gather = gather_by_files(folder, rank, len(self.job.devices))
        self.outcomes: list[Outcome] = []
        self.state: Any = None
        self.entered = 0.0

    def connect(self) -> Any:
        job, device = self.job, self.job.devices[self.rank]
        sizes = job.largest.sizes
        if job.fault_of(self.rank, 0)[0] == "sizes":
            sizes["hidden"] += 128
        return cukern.AllToAllState.connect(
            self.rank, len(job.devices), device, self.gather, **sizes, deadline_s=job.deadline_s
        )

    def run(self) -> Report:
        try:
            self.state = self.connect()
        except Exception as error:
            return Report([], (type(error).__name__, str(error)))
        cupy.cuda.Device(self.state.device).use()
        ranks = [own for (own,) in _all_of(self.job, [self.state], lambda state: f"cupy:{state.device}", False)]
        for rank in ranks:  # the kernels between the calls are loaded before any rank waits
            rank.sorted(put(rank.place, np.zeros((rank.case.places, rank.case.topk), np.int32)))
        self.gather("loaded")
        for step in range(self.job.steps):
            rank = ranks[step % len(ranks)]
            try:
                if not self._step(rank, step):
                    return Report(self.outcomes)
            except cukern.AllToAllError as error:
                return self._failed(error, rank, time.monotonic() - self.entered)
        self.gather("done")  # a window is freed when no other rank stores into it
        self.state.close()
        return Report(self.outcomes)

    def _step(self, rank: Rank, step: int) -> bool:
        """One step; whether this rank took part in it."""
        mine, others = self.job.fault_of(self.rank, step)
        rank.take(step)
        if mine == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine == "late":
            time.sleep(2 * self.job.deadline_s)
            return False
        if mine == "abort":
            time.sleep(1.0)
            self.state.abort()
            return False
        self._before("dispatch", mine, others)
        rank.send()
        self._finish()
        rank.receive()
        rank.answer()
        options = {}
        if mine == "capacity":
            options["inverse"] = put(rank.place, np.full((rank.case.places, rank.case.topk), -1, np.int32))
        self._before("combine", mine, others)
        rank.send_back(**options)
        self._finish()
        rank.receive_back()
        self.outcomes.append(rank.outcome)
        return True

    def _before(self, call: str, mine: str, others: str) -> None:
        """Let a rank be killed while its kernel waits for the others, which come later."""
        if mine == f"killed in {call}":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if others == f"killed in {call}":
            time.sleep(1.0)
        self.entered = time.monotonic()

    def _finish(self) -> None:
        cupy.cuda.get_current_stream().synchronize()
        self.state.check()

    def _failed(self, error: Any, rank: Rank, seconds: float) -> Report:
        """The report of a call that failed, and of what it gave."""
        found = rank.receiver
        is_dispatch = isinstance(found, tuple)
        ids, out = (get(found.topk_ids), None) if is_dispatch else (None, get(found))
        where = error.rank, error.phase, error.step
        return Report(self.outcomes, (type(error).__name__, str(error)), where, seconds, ids, out)


class Processes:
    """The processes of a job, and their reports; None for one that was killed."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        (folder / "job").write_bytes(pickle.dumps(job))

    @contextlib.contextmanager
    def _started(self) -> Iterator[list[subprocess.Popen[str]]]:
        root = Path(__file__).resolve().parents[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        started: list[subprocess.Popen[str]] = []
        try:
            for rank in range(len(self.job.devices)):
                command = [sys.executable, "-m", "tests.exchange", str(self.folder), str(rank)]
                with (self.folder / f"log.{rank}").open("w") as log:
                    started.append(
                        subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, text=True)
                    )
            yield started
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()

    def run(self, timeout_s: float = 150.0) -> list[Report | None]:
        """The reports. Raises AssertionError, with what a process wrote, where one fails or takes too long."""
        end = time.monotonic() + timeout_s
        reports: list[Report | None] = []
        with self._started() as started:
            for rank, process in enumerate(started):
                try:
                    status = process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    status = None
                log = (self.folder / f"log.{rank}").read_text()
                if status == -signal.SIGKILL and self.job.fault and self.job.fault[1] == rank:
                    reports.append(None)
                    continue
                assert status is not None, f"rank {rank} did not end in {timeout_s} s:\n{log}"
                assert status == 0, f"rank {rank} ended with {status}:\n{log}"
                reports.append(pickle.loads((self.folder / f"report.{rank}").read_bytes()))
        return reports


#: Kept to the end of the process: another rank may still store into the window of one that failed.
KEPT: list[Process] = []


def main(folder: str, rank: str) -> None:
    KEPT.append(Process(Path(folder), int(rank)))
    report = KEPT[0].run()
    (Path(folder) / f"report.{rank}").write_bytes(pickle.dumps(report))


if __name__ == "__main__":
    # Under its own name, so that what is pickled here can be read elsewhere.
    from tests import exchange

    exchange.main(*sys.argv[1:])
