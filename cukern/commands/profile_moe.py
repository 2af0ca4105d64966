"""`cukern profile-moe`: trace one forward pass of the fused mixture-of-experts layer."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from cukern.commands import UserError, writing
from cukern.formats.fused_moe import GROUP, QUANTIZATIONS
from cukern.fused_moe import All2AllManager, FusedMoEModularKernel, FusedMoEPrepareAndFinalize, PushPrepareAndFinalize
from cukern.fused_moe.combinations import (
    EXPERTS,
    PREPARE_FINALIZE,
    make_experts,
    make_prepare_finalize,
    quantizations_of,
)
from cukern.fused_moe.example import Layer, random_layer
from cukern.runtime import arrays, kernel
from cukern.runtime.op import OPS

_SIZES = {"tokens": 256, "experts": 8, "inter": 512, "hidden": 1024, "topk": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pf-type", required=True, choices=PREPARE_FINALIZE, help="the prepare/finalize class")
    parser.add_argument("--experts-type", required=True, choices=EXPERTS, help="the experts class")
    parser.add_argument(
        "--trace", required=True, type=Path, metavar="FILE", help="the trace, for chrome://tracing or ui.perfetto.dev"
    )
    parser.add_argument(
        "--quant", choices=("none", *QUANTIZATIONS), help="of the weights (default: the first that the pair takes)"
    )
    for name, value in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default: {value}")
    parser.epilog = (
        "With a GPU and PyTorch, the trace is torch.profiler's and has the kernels. Else it has the host's time in\n"
        "each stage and op: of the calls with a GPU, of the NumPy references without one.\n"
        "PushPrepareAndFinalize runs on all GPUs of this machine; NcclPrepareAndFinalize in the processes that\n"
        "torchrun starts, each of which writes a trace with its rank in the name. --tokens are those of each rank,\n"
        "--experts those of all."
    )


def _layer(args: argparse.Namespace, ranks: int) -> Layer:
    """Return the layer's arguments for all ranks, in NumPy."""
    able, why_not = quantizations_of(args.pf_type, args.experts_type)
    if not able:
        raise UserError(why_not)
    quantization = able[0] if args.quant is None else None if args.quant == "none" else args.quant
    if quantization not in able:
        names = ", ".join(str(q or "none") for q in able)
        raise UserError(f"--quant must be one of {names} with {args.experts_type}, got {args.quant}")
    for name in _SIZES:
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.topk > args.experts:
        raise UserError(f"--topk must be at most --experts, {args.experts}, got {args.topk}")
    for name in ("inter", "hidden"):
        if getattr(args, name) % GROUP:
            raise UserError(f"--{name} must be a multiple of {GROUP}, got {getattr(args, name)}")
    if args.experts % ranks:
        raise UserError(f"--experts must be a multiple of the {ranks} ranks, got {args.experts}")
    sizes = {name: getattr(args, name) for name in _SIZES} | {"tokens": args.tokens * ranks}
    return random_layer(np.random.default_rng(0), **sizes, quantization=quantization)


class HostTrace:
    """Records a Chrome trace of the host time of `cukern.ops`' public functions and of the layer's stages."""

    _STAGES = ("forward", "prepare", "prepare_no_receive", "workspace_shapes", "apply", "finalize")

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._open: list[tuple[FrameType, str, float]] = []

    def _name(self, frame: FrameType) -> str | None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "cukern.runtime.op":
            # An op's body runs only while its plan is recorded, so measure the method `call`.
            called = frame.f_locals["op"].name if name == "call" else "_"
            return None if called.startswith("_") else called
        if module.startswith("cukern.ops."):
            return name if name in frame.f_globals.get("__all__", ()) and name not in OPS else None
        own = frame.f_locals.get("self")
        if name in self._STAGES and module.startswith("cukern.fused_moe."):
            return f"{type(own).__name__}.{name}"
        return None

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := self._name(frame)):
            self._open.append((frame, name, time.perf_counter()))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            _, name, start = self._open.pop()
            self.events.append(
                {
                    "name": name, "ph": "X", "ts": start * 1e6, "dur": (time.perf_counter() - start) * 1e6,
                    "pid": os.getpid(), "tid": threading.get_native_id(), "cat": "host",
                }
            )  # fmt: skip

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        previous = sys.getprofile()
        sys.setprofile(self._hook)
        try:
            yield
        finally:
            sys.setprofile(previous)

    def save(self, path: Path) -> None:
        events = sorted(self.events, key=lambda event: event["ts"])
        with writing(path) as temporary:
            temporary.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _torch_with_gpu() -> Any:
    if not kernel.device_count():
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _place(torch: Any, device: Any) -> Callable[[Any], Any]:
    """Return a function that moves an array to a rank's device. Without a GPU the function returns its argument."""
    if torch is not None:
        like = torch.empty(0, device=device)
        library: Any = arrays.library_of(like)
        return lambda array: library.from_numpy(array, like)
    if device is None:
        return lambda array: array
    from cukern.runtime.cuda import cupy, current_device

    def put(array: Any) -> Any:
        with current_device(device):
            # CuPy has no FP8 dtypes.
            return cupy.asarray(array.view(np.uint8) if "float8" in array.dtype.name else array)

    return put


class _Rank(NamedTuple):
    module: FusedMoEModularKernel
    layer: Layer

    def __call__(self) -> None:
        self.module(*self.layer.arrays)


def _rank(args: argparse.Namespace, pf: FusedMoEPrepareAndFinalize, layer: Layer, put: Callable[[Any], Any]) -> _Rank:
    there = layer.map(put)
    return _Rank(FusedMoEModularKernel(pf, make_experts(args.experts_type, there.config, pf.activation_format)), there)


def _part(layer: Layer, rank: int, ranks: int) -> Layer:
    """Return a rank's equal share of the tokens and experts."""
    tokens, experts = len(layer.hidden_states) // ranks, len(layer.w1) // ranks
    first = rank * experts
    return layer.of_rank(slice(rank * tokens, (rank + 1) * tokens), np.arange(first, first + experts))


@contextlib.contextmanager
def _processes(args: argparse.Namespace) -> Iterator[tuple[Any, int, int]]:
    """Yield torch, the rank of this process and the number of ranks, 1 without torchrun."""
    try:
        import torch
        import torch.distributed
    except ImportError:
        raise UserError(f"{args.pf_type} moves torch tensors, and torch cannot be imported") from None
    devices, started = kernel.device_count(), "RANK" in os.environ
    if devices > 1 and not started:
        command = f"torchrun --nproc-per-node {devices} -m cukern profile-moe --pf-type {args.pf_type} ..."
        raise UserError(f"{args.pf_type} takes a process for each GPU: {command}")
    if devices:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # Without torchrun, use an in-memory store, because it needs no network port.
    own = {} if started else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("nccl" if devices else "gloo", **own)
    try:
        yield torch, torch.distributed.get_rank(), torch.distributed.get_world_size()
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _ranks(args: argparse.Namespace) -> Iterator[list[_Rank]]:
    devices = kernel.device_count()
    if args.pf_type.startswith("Nccl"):
        with _processes(args) as (torch, rank, ranks):
            if ranks > 1:
                args.trace = args.trace.with_suffix(f".{rank}{args.trace.suffix}")
            own = _part(_layer(args, ranks), rank, ranks)
            pf = make_prepare_finalize(args.pf_type, args.tokens, args.experts)
            yield [_rank(args, pf, own, _place(torch, "cuda" if devices else "cpu"))]
        return
    torch = _torch_with_gpu()
    if not args.pf_type.startswith("Push"):
        layer = _layer(args, 1)
        pf = make_prepare_finalize(args.pf_type, args.tokens, args.experts)
        yield [_rank(args, pf, layer, _place(torch, 0 if devices else None))]
        return
    places: list[int | None] = [*range(devices)] or [None]
    layer = _layer(args, len(places))
    if len(places) > 1 and args.experts_type == "NaiveBatchedExperts":
        raise UserError(
            f"{args.experts_type} makes the host wait, so that a rank would wait for one that has not begun: "
            "CUDA_VISIBLE_DEVICES=0 runs it on one GPU"
        )
    sizes = {"num_experts": args.experts, "max_num_tokens": args.tokens, "hidden": args.hidden, "topk": args.topk}
    with contextlib.ExitStack() as stack:
        ranks_here = []
        for manager in All2AllManager.local(places, **sizes):
            stack.enter_context(manager)
            push = manager.prepare_finalize(args.pf_type.endswith(":batched"))
            assert isinstance(push, PushPrepareAndFinalize)
            own = _part(layer, manager.rank, manager.ranks)
            ranks_here.append(_rank(args, push, own, _place(torch, manager.device)))
            with push.rehearsal():
                ranks_here[-1]()
        yield ranks_here


def run(args: argparse.Namespace) -> int:
    if not args.trace.absolute().parent.is_dir():
        raise UserError(f"--trace {args.trace}: there is no folder {args.trace.parent}")
    if args.trace.is_dir():
        raise UserError(f"--trace {args.trace} is a folder")
    with _ranks(args) as ranks:
        torch = _torch_with_gpu()
        of_ranks = f" of {len(ranks)} ranks" if len(ranks) > 1 else ""
        if torch is not None:
            _trace_kernels(args.trace, ranks, torch)
            print(f"wrote {args.trace}: the kernels of one forward pass{of_ranks}, by torch.profiler")
            return 0
        for rank in ranks:
            rank()
        trace = HostTrace()
        with trace.running():
            for rank in ranks:
                rank()
        trace.save(args.trace)
        what = "of its calls on the GPU" if kernel.device_count() else "of its NumPy references"
        print(f"wrote {args.trace}: {len(trace.events)} stages of one forward pass{of_ranks}, the host's time {what}")
    return 0


def _trace_kernels(path: Path, ranks: list[_Rank], torch: Any) -> None:

    def run_all(times: int) -> None:
        for _ in range(times):
            for rank in ranks:
                rank()
        for device in {rank.layer.hidden_states.device for rank in ranks}:
            torch.cuda.synchronize(device)

    run_all(3)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run_all(1)
    with writing(path) as temporary:
        profile.export_chrome_trace(str(temporary))
