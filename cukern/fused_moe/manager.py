"""Set up the exchange of tokens between ranks.

The ranks find out whose memory they can map, choose a backend, and allocate the buffers.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cukern.fused_moe.modular_kernel import FusedMoEPrepareAndFinalize
from cukern.fused_moe.nccl import NcclPrepareAndFinalize, RowExchange, expert_ranks
from cukern.fused_moe.push import PushPrepareAndFinalize, Turns
from cukern.fused_moe.two_level import TwoLevelPrepareAndFinalize
from cukern.ops.all_to_all import AllToAllError, AllToAllState
from cukern.ops.all_to_all.layout import MAX_RANKS, MAX_TOKENS, MAX_TOPK
from cukern.ops.all_to_all.memory import check_peer
from cukern.runtime import arrays, check, kernel, windows
from cukern.runtime.cuda import current_device, runtime
from cukern.runtime.describe import type_name

BACKENDS = ("push", "nccl", "two_level")
#: The source files of a layer's kernels. All kernels must be loaded before any kernel waits for another rank.
_STEMS = ("all_to_all", "moe_permute", "moe_gemm", "quantization", "moe_activation")

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
        """Return the checked sizes. Raises TypeError or ValueError, which name the argument."""
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
        given = None
        if expert_rank is not None:
            given = tuple(expert_ranks(expert_rank, num_experts, ranks).tolist())
        if num_experts % ranks == 0 or given is None:
            # If expert_rank equals the default order, replace it by None. So ranks that pass the default order agree
            # with ranks that pass None, and no table is needed to compute the owner of an expert.
            in_order = tuple(expert_ranks(None, num_experts, ranks).tolist())
            given = None if given == in_order else given
        return cls(num_experts, max_num_tokens, hidden, topk, given, ranks_per_host, bool(apart), deadline_s, backend)

    def of_state(self, experts: int, tokens: int, expert_rank: Sequence[int] | None) -> dict[str, Any]:
        """Return the keyword arguments for an `AllToAllState`."""
        return {
            "max_tokens": tokens, "hidden": self.hidden, "topk": self.topk, "num_experts": experts,
            "expert_rank": expert_rank, "apart": self.apart, "deadline_s": self.deadline_s,
        }  # fmt: skip


class _Offer(NamedTuple):
    """The data that each rank sends to all other ranks during setup."""

    sizes: Sizes
    host: str
    bus: str | None  # PCI bus id of the rank's GPU; None: host memory


def choose(sizes: Sizes, hosts: Sequence[Sequence[int]], unreached: Sequence[Mapping[int, str]]) -> str:
    """Return the backend of a group.

    Args:
        sizes: the arguments that the ranks share.
        hosts: the ranks of each host.
        unreached: for each rank, the ranks whose memory it cannot map, with the reasons. For a rank in host memory
            these are all ranks.

    Raises ValueError if the group cannot use the backend in `sizes`. The message gives the reason.
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
    """Return the ranks of each host. Ranks with the same host name are on one host.

    With `ranks_per_host`, that many consecutive ranks count as one host instead.
    """
    if ranks_per_host is not None:
        return [[*range(start, start + ranks_per_host)] for start in range(0, len(names), ranks_per_host)]
    return [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]


class All2AllManager:
    """Sets up the exchange of tokens between this rank and the other ranks. It chooses a backend and allocates memory.

    - "push" (`PushPrepareAndFinalize`): all ranks are on one host and can map each other's memory.
    - "two_level" (`TwoLevelPrepareAndFinalize`): there are several hosts, all with the same number of ranks, at least
      two. The ranks of a host can map each other's memory.
    - "nccl" (`NcclPrepareAndFinalize`): all other cases.

    Each rank of the group makes a manager. Arguments other than `device` must be the same on all ranks; otherwise all
    ranks raise. `local` makes the managers of all ranks in one process.

    The class corresponds to vLLM's class of this name.

    Args:
        group: a `torch.distributed.ProcessGroup` that contains this process; None: the default group.
        num_experts: the number of experts of all ranks.
        max_num_tokens: maximum tokens of a call on a rank.
        hidden: the hidden size, a multiple of 16.
        topk: the number of experts of a token, at most 32.
        device: the CUDA device of this rank, a number or a `torch.device`; None: torch's current device, or host memory
            if torch has no GPU. "cpu" is host memory too.
        expert_rank: [num_experts], the rank that owns each expert; every rank owns at least one. None: the experts are
            split evenly, in order.
        ranks_per_host: treat this many consecutive ranks as one host; None: use the real hosts.
        apart: reserve the memory that `prepare_finalize` with `apart` needs to return the same bits for any number of
            ranks; "push" only.
        deadline_s: with "push", the seconds after which a rank stops waiting for another rank and fails. The other
            backends use the group's timeout.
        backend: one of auto, push, nccl, two_level.

    Attributes:
        rank, ranks: the index of this rank in the group, and the size of the group.
        backend: push, nccl or two_level.
        device: the CUDA device; None: host memory.
        num_experts, num_local_experts: the number of experts of all ranks, and of this rank.
        state: the `AllToAllState` of this rank; None with nccl.

    Raises:
        TypeError, ValueError: invalid arguments, or arguments that differ between ranks; with "push", GPUs that cannot
            map each other's memory. The message names the argument and the rank, and all ranks raise.
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

        def offer() -> _Offer:
            own = Sizes.checked(
                ranks, num_experts=num_experts, max_num_tokens=max_num_tokens, hidden=hidden, topk=topk,
                expert_rank=expert_rank, ranks_per_host=ranks_per_host, apart=apart, deadline_s=deadline_s,
                backend=backend,
            )  # fmt: skip
            found.append(_device(device))
            return _Offer(own, windows.host_id(), None if found[0] is None else windows.bus_id(found[0]))

        offers = self._together(offer)
        sizes = offers[self.rank].sizes
        for other, theirs in enumerate(offers):
            for name, own, its in zip(sizes._fields, sizes, theirs.sizes, strict=True):
                if own != its:
                    check.fail(name, f"the same on all ranks, {own} on rank {self.rank}", f"{its} on rank {other}")
        self._hold(sizes, ranks, found[0])
        hosts = hosts_of([each.host for each in offers], sizes.ranks_per_host)
        unreached = self._together(lambda: _unreached(self.rank, self.device, offers))
        self.backend = choose(sizes, hosts, unreached)
        if self.backend == "push":
            options = sizes.of_state(sizes.num_experts, sizes.max_num_tokens, sizes.expert_rank)
            self.state = AllToAllState.connect(self.rank, ranks, self._gpu(), self._gather, **options)
        elif self.backend == "two_level":
            self._connect_two_levels(hosts)
        self._together(self._load)

    def _hold(self, sizes: Sizes, ranks: int, device: int | None) -> None:
        """Set the attributes that `__init__` and `local` have in common."""
        self.sizes, self.ranks, self.device, self.num_experts = sizes, ranks, device, sizes.num_experts
        self.owner = expert_ranks(sizes.expert_rank, sizes.num_experts, ranks)
        self.state = None
        self._peers: list[int] | None = None  # two_level: on each host, the rank with the same index as this rank
        self._turns: Turns | None = None
        self._of_process: list[All2AllManager] = []  # `local`: the managers of all ranks
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
        """Return the managers of all ranks in this process, with the backend push, for notebooks and tests.

        If each rank has its own GPU, a single thread may call the layers of the ranks one after the other, once they
        have been rehearsed (`PushPrepareAndFinalize.rehearsal`). Ranks in host memory and ranks that share a GPU need
        one thread per rank, which `run` starts. Ranks that share a GPU must also use the same stream.

        Args:
            devices: the CUDA device of each rank; several ranks may share a device. All None: ranks in host memory.
            num_experts, max_num_tokens, hidden, topk, expert_rank, apart, deadline_s: as for the class.

        Raises:
            TypeError, ValueError: invalid arguments, or devices that cannot map each other's memory.
        """
        ranks = len(devices)
        check.integer("the number of devices", ranks, 1, MAX_RANKS)
        sizes = Sizes.checked(
            ranks, num_experts=num_experts, max_num_tokens=max_num_tokens, hidden=hidden, topk=topk,
            expert_rank=expert_rank, apart=apart, deadline_s=deadline_s, backend="push",
        )  # fmt: skip
        options = sizes.of_state(sizes.num_experts, sizes.max_num_tokens, sizes.expert_rank)
        states = AllToAllState.local(devices, **options)
        shared = devices[0] is not None and len({*devices}) < ranks
        turns = Turns(ranks, sizes.deadline_s) if shared else None
        managers = [cls.__new__(cls) for _ in states]
        for manager, state in zip(managers, states, strict=True):
            manager._hold(sizes, ranks, state.device)
            manager.rank, manager.group, manager.backend, manager.state = state.rank, None, "push", state
            manager._turns, manager._of_process = turns, managers
            manager._load()
        return managers

    @staticmethod
    def run(managers: Sequence[All2AllManager], function: Callable[[All2AllManager], Result]) -> list[Result]:
        """Call `function` with each of the `managers`, each in its own thread. `local` returns the managers.

        In each thread the device of the manager is current. Returns the results in order. If a call raises, all ranks
        are aborted, and `run` raises the first exception.
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
            running = [pool.submit(run, manager) for manager in managers]
        if failed:
            raise failed[0]
        return [each.result() for each in running]

    # --- the set-up -----------------------------------------------------------------------------------

    def _gather(self, value: Any) -> list[Any]:
        """Send `value` to all ranks. Return the values of all ranks."""
        distributed = _torch().distributed
        found = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def _together(self, action: Callable[[], Result]) -> list[Result]:
        """Call `action` on all ranks. Return the results of all ranks. If one `action` raises, all ranks raise."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = error
        found = self._gather((result, None if problem is None else f"{type(problem).__name__}: {problem}"))
        if problem is not None:
            raise problem
        for rank, (_, said) in enumerate(found):
            if said is not None:
                raise ValueError(f"rank {rank} could not set up the exchange: {said}")
        return [value for value, _ in found]

    def _gpu(self) -> int:
        assert self.device is not None
        return self.device

    def _load(self) -> None:
        """Load the compiled kernels of a layer. Loading may block later, while a kernel waits for another rank."""
        if self.state is not None and self.device is not None:
            kernel.load_all(_STEMS, self.device, compiles=False)

    def _connect_two_levels(self, hosts: list[list[int]]) -> None:
        """Set up both levels: the peers on the other hosts, and the exchange within this host."""
        sizes = self.sizes
        host = next(index for index, ranks in enumerate(hosts) if self.rank in ranks)
        place = hosts[host].index(self.rank)
        # Use the existing group for the peers instead of a new group. torch may give a new group the name of a group
        # that another rank has already destroyed. The new group could then wait forever for addresses in the store.
        self._peers = [ranks[place] for ranks in hosts]
        host_of, place_of = np.zeros(self.ranks, np.int64), np.zeros(self.ranks, np.int64)
        for index, ranks in enumerate(hosts):
            host_of[ranks], place_of[ranks] = index, np.arange(len(ranks))
        self._expert_host = host_of[self.owner]
        here = place_of[self.owner[self._expert_host == host]]
        options = sizes.of_state(len(here), len(hosts) * sizes.max_num_tokens, here.tolist())

        def gather_here(value: Any) -> list[Any]:
            found = self._gather(value)
            return [found[rank] for rank in hosts[host]]

        self.state = self._together_each(
            lambda: AllToAllState.connect(place, len(hosts[host]), self._gpu(), gather_here, **options)
        )

    def _together_each(self, action: Callable[[], Result]) -> Result:
        """Call `action` on all ranks. Return the result of this rank. If one `action` raises, all ranks raise."""
        found: list[Result] = []
        self._together(lambda: found.append(action()))
        return found[0]

    # --- the layer's part -----------------------------------------------------------------------------

    @property
    def num_local_experts(self) -> int:
        """The number of experts of this rank."""
        return int((self.owner == self.rank).sum())

    def expert_map(self, like: Any) -> Any:
        """Return the local index of each expert, -1 for experts of other ranks.

        The result is int32 [num_experts], in the library and on the device of `like`.
        """
        library = arrays.library_of(like)
        if library is None:
            check.fail("like", "an array", type_name(like), TypeError)
        key = library.name, library.device(like)
        if key not in self._maps:
            here = self.owner == self.rank
            places = np.where(here, here.cumsum() - 1, -1).astype(np.int32)
            self._maps[key] = library.from_numpy(places, like)
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
            batched: group the tokens by expert, [local experts, max_tokens_per_expert, hidden]; not with nccl.
            max_tokens_per_expert: with `batched`, the number of rows per expert; None: the maximum tokens of all ranks.
            apart: return the same bits for any number of ranks; the manager must have been made with `apart`.
            expert_load: int32 [num_experts]. Each call adds to `expert_load[e]` the number of pairs (token, slot) that
                arrived for expert e, for each expert of this rank.

        Raises:
            AllToAllError: an earlier call failed.
            TypeError, ValueError: invalid arguments, or arguments that the backend does not support; the message names
                the argument.
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

    # --- while it runs, and the end -------------------------------------------------------------------

    def check(self) -> None:
        """Raise AllToAllError if an earlier call has failed. Call this regularly in a loop that replays a CUDA graph.

        The error names the rank, the phase and the step. Raises ValueError if the manager is closed.
        """
        if self._closed:
            check.fail("manager", "open", "a closed one")
        if self.state is not None:
            self.state.check()

    def abort(self) -> None:
        """Make every rank stop waiting for other ranks. The next call on each rank raises AllToAllError.

        This ends only the waits of "push". A wait in `torch.distributed` lasts until the group's timeout.
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
        for device in {each.device for each in self._of_process or [self]}:
            if device is not None:
                with current_device(device):
                    runtime.deviceSynchronize()
        if wait and not self._of_process:
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


def _torch() -> Any:
    """Import torch only when it is needed, because the rest of cukern works without it."""
    import torch
    import torch.distributed

    return torch


def _device(given: Any) -> int | None:
    """Return the CUDA device that an argument `device` means. Return None for host memory."""
    torch = _torch()
    if given is None:
        return torch.cuda.current_device() if torch.cuda.is_available() and kernel.device_count() else None
    if isinstance(given, (str, torch.device)):
        place = torch.device(given)
        if place.type == "cpu":
            return None
        if place.type != "cuda":
            check.fail("device", "a CUDA device or the CPU", given)
        given = torch.cuda.current_device() if place.index is None else place.index
    if not kernel.device_count():
        check.fail("device", "None: there is no GPU here", given)
    return check.integer("device", given, 0, kernel.device_count() - 1)


def _unreached(rank: int, device: int | None, offers: Sequence[_Offer]) -> dict[int, str]:
    """Return the ranks whose memory `rank` cannot map, with the reasons. A rank in host memory cannot map any."""
    found = {}
    for other, offer in enumerate(offers):
        if device is None or offer.bus is None:
            where = rank if device is None else other
            why = f"rank {where} is in host memory, which only ranks of one process share (All2AllManager.local)"
            found[other] = why
        elif offer.host != offers[rank].host:
            found[other] = f"rank {other} is on another host than rank {rank}"
        elif other != rank:
            try:
                check_peer(device, offer.bus, other)
            except ValueError as error:
                found[other] = f"{error} (rank {rank})"
    return found
