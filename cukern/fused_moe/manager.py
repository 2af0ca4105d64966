"""Set up the exchange of tokens between ranks: choose a backend, and allocate the buffers."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cukern.fused_moe.modular_kernel import FusedMoEPrepareAndFinalize
from cukern.fused_moe.nccl import NcclPrepareAndFinalize, RowExchange, expert_ranks, import_torch
from cukern.fused_moe.push import PushPrepareAndFinalize, Turns
from cukern.fused_moe.two_level import TwoLevelPrepareAndFinalize
from cukern.ops.all_to_all import AllToAllError, AllToAllState
from cukern.ops.all_to_all.layout import MAX_RANKS, MAX_TOKENS, MAX_TOPK
from cukern.ops.all_to_all.memory import check_peer
from cukern.runtime import arrays, check, kernel, windows
from cukern.runtime.cuda import current_device, runtime
from cukern.runtime.describe import type_name

BACKENDS = ("push", "nccl", "two_level")
_KERNEL_SOURCES = ("all_to_all", "moe_permute", "moe_gemm", "quantization", "moe_activation")

Result = TypeVar("Result")


class Sizes(NamedTuple):
    """The arguments that must be the same on all ranks."""

    num_experts: int
    max_num_tokens: int
    hidden: int
    topk: int
    expert_rank: tuple[int, ...] | None
    ranks_per_host: int | None
    apart: bool
    deadline_s: float
    backend: str

    @classmethod
    def checked(
        cls, ranks: int, *, num_experts: Any, max_num_tokens: Any, hidden: Any, topk: Any, expert_rank: Any = None,
        ranks_per_host: Any = None, apart: Any = False, deadline_s: Any = 30.0, backend: Any = "auto",
    ) -> Sizes:  # fmt: skip
        check.one_of("backend", backend, ("auto", *BACKENDS))
        num_experts = check.integer("num_experts", num_experts, 1)
        max_num_tokens = check.integer("max_num_tokens", max_num_tokens, 1, MAX_TOKENS)
        hidden = check.integer("hidden", hidden, 16)
        if hidden % 16:
            check.fail("hidden", "a multiple of 16", hidden)
        topk = check.integer("topk", topk, 1, MAX_TOPK)
        deadline_s = check.number("deadline_s", deadline_s)
        if deadline_s <= 0:
            check.fail("deadline_s", "more than 0", deadline_s)
        if ranks_per_host is not None:
            ranks_per_host = check.integer("ranks_per_host", ranks_per_host, 1)
            if ranks % ranks_per_host:
                check.fail("ranks_per_host", f"a divisor of the number of ranks, {ranks}", ranks_per_host)
        owners = None
        if expert_rank is not None:
            owners = tuple(expert_ranks(expert_rank, num_experts, ranks).tolist())
        if num_experts % ranks == 0 or owners is None:
            # Replace the default order by None. A rank that passes the default order then agrees with a rank that
            # passes None, and the owner of an expert is computed without a table.
            in_order = tuple(expert_ranks(None, num_experts, ranks).tolist())
            owners = None if owners == in_order else owners
        return cls(num_experts, max_num_tokens, hidden, topk, owners, ranks_per_host, bool(apart), deadline_s, backend)

    def state_options(self, experts: int, tokens: int, expert_rank: Sequence[int] | None) -> dict[str, Any]:
        return {
            "max_tokens": tokens, "hidden": self.hidden, "topk": self.topk, "num_experts": experts,
            "expert_rank": expert_rank, "apart": self.apart, "deadline_s": self.deadline_s,
        }  # fmt: skip


class _RankInfo(NamedTuple):
    """The data that each rank sends to all other ranks during setup."""

    sizes: Sizes
    host: str
    bus: str | None  # PCI bus id of the rank's GPU; None: host memory


def choose(sizes: Sizes, hosts: Sequence[Sequence[int]], unreached: Sequence[Mapping[int, str]]) -> str:
    """Return the backend of a group. Raises ValueError with the reason if the group cannot use `sizes.backend`.

    Args:
        hosts: the ranks of each host.
        unreached: for each rank, the ranks whose memory it cannot map, with the reasons.
    """
    why_not = {"push": "", "nccl": "", "two_level": ""}
    missing = next(
        ((rank, other) for host in hosts for rank in host for other in host if other in unreached[rank]), None
    )
    if missing is not None:
        rank, other = missing
        why_not["push"] = why_not["two_level"] = unreached[rank][other]
    counts = [len(host) for host in hosts]
    if len(hosts) > 1:
        why_not["push"] = f"the ranks are on {len(hosts)} hosts"
    elif counts[0] > MAX_RANKS:
        why_not["push"] = f"there are {counts[0]} ranks, and it takes {MAX_RANKS}"
    if len(hosts) == 1:
        why_not["two_level"] = "all ranks are on one host (ranks_per_host simulates several)"
    elif {*counts} != {counts[0]} or counts[0] == 1:
        why_not["two_level"] = (
            f"the hosts have {', '.join(map(str, counts))} ranks, and it takes as many on each, over 1"
        )
    elif counts[0] > MAX_RANKS:
        why_not["two_level"] = f"a host has {counts[0]} ranks, and it takes {MAX_RANKS}"
    chosen = sizes.backend
    if chosen == "auto":
        chosen = next(name for name in ("push", "two_level", "nccl") if not why_not[name])
    elif why_not[chosen]:
        able = " or ".join(repr(name) for name, why in why_not.items() if not why)
        check.fail("backend", f"{able} or 'auto', since {why_not[chosen]}", repr(chosen))
    if sizes.apart and chosen != "push":
        why = f" ({why_not['push']})" if why_not["push"] else ""
        check.fail("apart", f"False with the backend {chosen!r}: only 'push' brings rows back one by one{why}", True)
    return chosen


def hosts_of(names: Sequence[str], ranks_per_host: int | None) -> list[list[int]]:
    """Return the ranks of each host: ranks with the same host name, or `ranks_per_host` consecutive ranks."""
    if ranks_per_host is not None:
        return [[*range(start, start + ranks_per_host)] for start in range(0, len(names), ranks_per_host)]
    return [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]


class All2AllManager:
    """Sets up the exchange of tokens between ranks, like vLLM's class of this name. It chooses a backend:

    - "push" (`PushPrepareAndFinalize`) if all ranks are on one host and can map each other's memory.
    - "two_level" (`TwoLevelPrepareAndFinalize`) if several hosts have the same number of ranks, at least two, and the
      ranks of a host can map each other's memory.
    - "nccl" (`NcclPrepareAndFinalize`) in all other cases.

    Each rank of the group makes a manager, with the same arguments except `device`.

    Args:
        group: a `torch.distributed.ProcessGroup` that contains this process; None: the default group.
        num_experts: the number of experts of all ranks.
        max_num_tokens: the maximum number of tokens of a call on a rank.
        hidden: the hidden size, a multiple of 16.
        topk: the number of experts of a token, at most 32.
        device: the CUDA device of this rank; "cpu": host memory. None: torch's current device, or host memory if
            torch has no GPU.
        expert_rank: [num_experts], the rank of each expert; every rank has at least one. None: an equal share per rank,
            in order.
        ranks_per_host: treat this many consecutive ranks as one host.
        apart: reserve the memory that `prepare_finalize(apart=True)` needs; only with the backend "push".
        deadline_s: seconds after which a rank stops waiting for another rank ("push"). The other backends use the
            group's timeout.
        backend: auto, push, nccl or two_level.

    Attributes:
        rank, ranks: the index of this rank in the group, and the size of the group.
        state: the `AllToAllState` of this rank; None with nccl.

    Raises:
        TypeError, ValueError: invalid arguments, or arguments that differ between ranks; with "push", GPUs that cannot
            map each other's memory. All ranks raise.
        RuntimeError: `torch.distributed` has not been initialized.
    """

    state: AllToAllState | None

    def __init__(
        self,
        group: Any = None,
        *,
        num_experts: int,
        max_num_tokens: int,
        hidden: int,
        topk: int,
        device: Any = None,
        expert_rank: Sequence[int] | None = None,
        ranks_per_host: int | None = None,
        apart: bool = False,
        deadline_s: float = 30.0,
        backend: str = "auto",
    ) -> None:
        exchange = RowExchange(group)
        ranks = exchange.ranks
        self.rank, self.group = exchange.rank, group
        found: list[int | None] = []

        def rank_info() -> _RankInfo:
            local_sizes = Sizes.checked(
                ranks, num_experts=num_experts, max_num_tokens=max_num_tokens, hidden=hidden, topk=topk,
                expert_rank=expert_rank, ranks_per_host=ranks_per_host, apart=apart, deadline_s=deadline_s,
                backend=backend,
            )  # fmt: skip
            found.append(_device(device))
            return _RankInfo(local_sizes, windows.host_id(), None if found[0] is None else windows.bus_id(found[0]))

        infos = self._run_on_all_ranks(rank_info)
        sizes = infos[self.rank].sizes
        for other, theirs in enumerate(infos):
            for name, local, remote in zip(sizes._fields, sizes, theirs.sizes, strict=True):
                if local != remote:
                    check.fail(name, f"the same on all ranks, {local} on rank {self.rank}", f"{remote} on rank {other}")
        self._set_common_attributes(sizes, ranks, found[0])
        hosts = hosts_of([info.host for info in infos], sizes.ranks_per_host)
        unreached = self._run_on_all_ranks(lambda: _unmappable_ranks(self.rank, self.device, infos))
        self.backend = choose(sizes, hosts, unreached)
        if self.backend == "push":
            options = sizes.state_options(sizes.num_experts, sizes.max_num_tokens, sizes.expert_rank)
            self.state = AllToAllState.connect(self.rank, ranks, self._gpu(), self._gather, **options)
        elif self.backend == "two_level":
            self._connect_two_levels(hosts)
        self._run_on_all_ranks(self._load)

    def _set_common_attributes(self, sizes: Sizes, ranks: int, device: int | None) -> None:
        self.sizes, self.ranks, self.device, self.num_experts = sizes, ranks, device, sizes.num_experts
        self.owner = expert_ranks(sizes.expert_rank, sizes.num_experts, ranks)
        self.state = None
        self._peers: list[int] | None = None  # two_level: the rank with this rank's local index, on each host
        self._turns: Turns | None = None
        self._local_managers: list[All2AllManager] = []  # of all ranks; only set by `local`
        self._maps: dict[Any, Any] = {}
        self._closed = False

    @classmethod
    def local(
        cls,
        devices: Sequence[int | None],
        *,
        num_experts: int,
        max_num_tokens: int,
        hidden: int,
        topk: int,
        expert_rank: Sequence[int] | None = None,
        apart: bool = False,
        deadline_s: float = 30.0,
    ) -> list[All2AllManager]:
        """Make the managers of all ranks in this process, for notebooks and tests. Their backend is "push".

        If each rank has its own GPU, one thread may call the ranks' layers in turn, after a
        `PushPrepareAndFinalize.rehearsal`. Otherwise each rank needs a thread (`run`). Ranks that share a GPU must also
        use the same stream.

        Args:
            devices: the CUDA device of each rank; ranks may share a device. All None: ranks in host memory.

        Raises:
            TypeError, ValueError: invalid arguments, or devices that cannot map each other's memory.
        """
        ranks = len(devices)
        check.integer("the number of devices", ranks, 1, MAX_RANKS)
        sizes = Sizes.checked(
            ranks, num_experts=num_experts, max_num_tokens=max_num_tokens, hidden=hidden, topk=topk,
            expert_rank=expert_rank, apart=apart, deadline_s=deadline_s, backend="push",
        )  # fmt: skip
        options = sizes.state_options(sizes.num_experts, sizes.max_num_tokens, sizes.expert_rank)
        states = AllToAllState.local(devices, **options)
        shared = devices[0] is not None and len({*devices}) < ranks
        turns = Turns(ranks, sizes.deadline_s) if shared else None
        managers = [cls.__new__(cls) for _ in states]
        for manager, state in zip(managers, states, strict=True):
            manager._set_common_attributes(sizes, ranks, state.device)
            manager.rank, manager.group, manager.backend, manager.state = state.rank, None, "push", state
            manager._turns, manager._local_managers = turns, managers
            manager._load()
        return managers

    @staticmethod
    def run(managers: Sequence[All2AllManager], function: Callable[[All2AllManager], Result]) -> list[Result]:
        """Call `function` with each manager from `local`. Each call runs in its own thread, on the manager's device.

        Return the results in order. If a call raises, abort all ranks and raise the first exception.
        """
        failed: list[BaseException] = []

        def run(manager: All2AllManager) -> Result:
            try:
                if manager.device is None:
                    return function(manager)
                with current_device(manager.device):
                    return function(manager)
            except BaseException as error:
                failed.append(error)
                manager.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(len(managers)) as pool:
            futures = [pool.submit(run, manager) for manager in managers]
        if failed:
            raise failed[0]
        return [future.result() for future in futures]

    # --- setup ----------------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any]:
        distributed = import_torch().distributed
        found = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def _run_on_all_ranks(self, action: Callable[[], Result]) -> list[Result]:
        """Call `action` on all ranks, and return all results. If one raises, all ranks raise."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = error
        found = self._gather((result, None if problem is None else f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        for rank, (_, message) in enumerate(found):
            if message is not None:
                raise ValueError(f"rank {rank} could not set up the exchange: {message}")
        return [value for value, _ in found]

    def _gpu(self) -> int:
        assert self.device is not None
        return self.device

    def _load(self) -> None:
        """Load a layer's kernels in advance, because loading may block while a kernel waits for another rank."""
        if self.state is not None and self.device is not None:
            kernel.load_all(_KERNEL_SOURCES, self.device, compiles=False)

    def _connect_two_levels(self, hosts: list[list[int]]) -> None:
        sizes = self.sizes
        host = next(index for index, ranks in enumerate(hosts) if self.rank in ranks)
        local_rank = hosts[host].index(self.rank)
        # Do not make a torch group of the peers. Torch may give it the name of a group that another rank has already
        # destroyed, and would then wait forever.
        self._peers = [ranks[local_rank] for ranks in hosts]
        host_of, local_rank_of = np.zeros(self.ranks, np.int64), np.zeros(self.ranks, np.int64)
        for index, ranks in enumerate(hosts):
            host_of[ranks], local_rank_of[ranks] = index, np.arange(len(ranks))
        self._expert_host = host_of[self.owner]
        local_owners = local_rank_of[self.owner[self._expert_host == host]]
        options = sizes.state_options(len(local_owners), len(hosts) * sizes.max_num_tokens, local_owners.tolist())

        def gather_here(value: Any) -> list[Any]:
            found = self._gather(value)
            return [found[rank] for rank in hosts[host]]

        self.state = self._run_on_all_ranks_own_result(
            lambda: AllToAllState.connect(local_rank, len(hosts[host]), self._gpu(), gather_here, **options)
        )

    def _run_on_all_ranks_own_result(self, action: Callable[[], Result]) -> Result:
        """Like `_run_on_all_ranks`, but return only this rank's result."""
        found: list[Result] = []
        self._run_on_all_ranks(lambda: found.append(action()))
        return found[0]

    # --- layers -------------------------------------------------------------------------------------

    @property
    def num_local_experts(self) -> int:
        """The number of experts of this rank."""
        return int((self.owner == self.rank).sum())

    def expert_map(self, like: Any) -> Any:
        """Return int32 [num_experts]: the local index of each expert, -1 for experts of other ranks.

        The array is in the library and on the device of `like`.
        """
        library = arrays.library_of(like)
        if library is None:
            check.fail("like", "an array", type_name(like), TypeError)
        key = library.name, library.device(like)
        if key not in self._maps:
            here = self.owner == self.rank
            local_index = np.where(here, here.cumsum() - 1, -1).astype(np.int32)
            self._maps[key] = library.from_numpy(local_index, like)
        return self._maps[key]

    def prepare_finalize(
        self,
        batched: bool = False,
        *,
        max_tokens_per_expert: int | None = None,
        apart: bool = False,
        expert_load: Any = None,
    ) -> FusedMoEPrepareAndFinalize:
        """Return the prepare/finalize object of this rank. Layers that run one after the other may share it.

        Args:
            batched, max_tokens_per_expert: as for `PushPrepareAndFinalize`; not with nccl.
            apart: let layers return the same bits for any number of ranks; the manager must have been made with
                `apart`.
            expert_load: as for the class of the returned object.

        Raises:
            AllToAllError: an earlier call failed.
            TypeError, ValueError: arguments that are invalid or that the backend does not support.
        """
        self.check()
        sizes = self.sizes
        if apart and not sizes.apart:
            check.fail("apart", "False for a manager that was made without apart", True)
        if self.state is None:
            if batched:
                check.fail("batched", "False with the backend 'nccl'", True)
            if max_tokens_per_expert is not None:
                check.fail("max_tokens_per_expert", "None with the backend 'nccl'", max_tokens_per_expert)
            return NcclPrepareAndFinalize(
                self.group, self.num_experts, max_num_tokens=sizes.max_num_tokens, expert_rank=sizes.expert_rank,
                expert_load=expert_load,
            )  # fmt: skip
        if self._peers is None:
            return PushPrepareAndFinalize(
                self.state, batched=batched, max_tokens_per_expert=max_tokens_per_expert, apart=apart,
                expert_load=expert_load, turns=self._turns,
            )  # fmt: skip
        push = PushPrepareAndFinalize(self.state, batched=batched, max_tokens_per_expert=max_tokens_per_expert)
        return TwoLevelPrepareAndFinalize(
            self.group, push, self.num_experts, expert_host=self._expert_host.tolist(),
            max_num_tokens=sizes.max_num_tokens, expert_load=expert_load, peers=self._peers,
        )  # fmt: skip

    # --- errors and shutdown --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AllToAllError if an earlier call has failed, or ValueError if the manager is closed.

        AllToAllError names the rank, the phase and the step. Call `check` regularly while a CUDA graph is replayed.
        """
        if self._closed:
            check.fail("manager", "open", "a closed one")
        if self.state is not None:
            self.state.check()

    def abort(self) -> None:
        """Make every rank stop waiting for other ranks. The next call on each rank raises AllToAllError.

        A wait in `torch.distributed` is not stopped, and lasts until the group's timeout.
        """
        if self._turns is not None:
            self._turns.abort(self.rank)
        if self.state is not None and not self._closed:
            self.state.abort()

    def close(self) -> None:
        """Wait for the other ranks, unless a call has failed. Then free the memory. All ranks must call this."""
        if self._closed:
            return
        try:
            self.check()
        except AllToAllError:
            self._close(wait=False)
        else:
            self._close(wait=True)

    def _close(self, wait: bool) -> None:
        self._closed = True
        # Other ranks of this process may still be storing into this rank's memory.
        for device in {manager.device for manager in self._local_managers or [self]}:
            if device is not None:
                with current_device(device):
                    runtime.deviceSynchronize()
        if wait and not self._local_managers:
            self._gather(None)
        if self.state is not None:
            self.state.close()

    def __enter__(self) -> All2AllManager:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            # Do not wait, because the other ranks may never call `close`.
            self.abort()
            self._close(wait=False)


def _device(device: Any) -> int | None:
    """Return the CUDA device of an argument `device`; None: host memory."""
    torch = import_torch()
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_available() and kernel.device_count() else None
    if isinstance(device, (str, torch.device)):
        place = torch.device(device)
        if place.type == "cpu":
            return None
        if place.type != "cuda":
            check.fail("device", "a CUDA device or the CPU", device)
        device = torch.cuda.current_device() if place.index is None else place.index
    if not kernel.device_count():
        check.fail("device", "None: there is no GPU here", device)
    return check.integer("device", device, 0, kernel.device_count() - 1)


def _unmappable_ranks(rank: int, device: int | None, infos: Sequence[_RankInfo]) -> dict[int, str]:
    """Return the ranks whose memory `rank` cannot map, with the reasons."""
    found = {}
    for other, info in enumerate(infos):
        if device is None or info.bus is None:
            where = rank if device is None else other
            why = f"rank {where} is in host memory, which only ranks of one process share (All2AllManager.local)"
            found[other] = why
        elif info.host != infos[rank].host:
            found[other] = f"rank {other} is on another host than rank {rank}"
        elif other != rank:
            try:
                check_peer(device, info.bus, other)
            except ValueError as error:
                found[other] = f"{error} (rank {rank})"
    return found
