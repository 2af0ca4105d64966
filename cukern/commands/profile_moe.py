"""`cukern profile-moe`: a trace of one forward pass of the fused mixture-of-experts layer."""

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
from typing import Any

import numpy as np

from cukern.commands import UserError
from cukern.fused_moe import FusedMoEModularKernel
from cukern.fused_moe.combinations import (
    EXPERTS,
    PREPARE_FINALIZE,
    make_experts,
    make_prepare_finalize,
    quantizations_of,
)
from cukern.fused_moe.config import GROUP, QUANTIZATIONS
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
        "each stage and op: of the calls with a GPU, of the NumPy twins without one."
    )


def _layer(args: argparse.Namespace) -> Layer:
    """The arguments of the layer, in NumPy. Raises UserError for a pair of classes or sizes that make no layer."""
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
    sizes = {name: getattr(args, name) for name in _SIZES}
    return random_layer(np.random.default_rng(0), **sizes, quantization=quantization)


class HostTrace:
    """The host's time in the public functions of `cukern.ops` and in the layer's stages, as a Chrome trace."""

    _STAGES = ("forward", "prepare", "prepare_no_receive", "workspace_shapes", "apply", "finalize")

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._open: list[tuple[FrameType, str, float]] = []

    def _name(self, frame: FrameType) -> str | None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == "cukern.runtime.op":
            # The body of an op runs only where a plan is made.
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
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _torch_with_gpu() -> Any:
    """The module torch, if it is installed and can use a GPU of this machine; else None."""
    if not kernel.device_count():
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _place(torch: Any) -> Callable[[Any], Any]:
    """A function that moves an array to where the layer runs: torch's GPU, else CuPy's, else host memory."""
    if torch is not None:
        like = torch.empty(0, device="cuda")
        library: Any = arrays.library_of(like)
        return lambda array: library.from_numpy(array, like)
    if kernel.device_count():
        from cukern.runtime.cuda import cupy

        # CuPy has no FP8: it takes the bytes.
        return lambda array: cupy.asarray(array.view(np.uint8) if "float8" in array.dtype.name else array)
    return lambda array: array


def run(args: argparse.Namespace) -> int:
    """Run a layer a few times, trace one more forward pass, and write the trace."""
    if not args.trace.absolute().parent.is_dir():
        raise UserError(f"--trace {args.trace}: there is no folder {args.trace.parent}")
    layer = _layer(args)
    torch = _torch_with_gpu()
    layer = layer.map(_place(torch))
    pf = make_prepare_finalize(args.pf_type, args.tokens, args.experts)
    module = FusedMoEModularKernel(pf, make_experts(args.experts_type, layer.config, pf.activation_format))

    if torch is not None:
        for _ in range(3):
            module(*layer.arrays)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            module(*layer.arrays)
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(args.trace))
        print(f"wrote {args.trace}: the kernels of one forward pass, by torch.profiler")
        return 0
    module(*layer.arrays)
    trace = HostTrace()
    with trace.running():
        module(*layer.arrays)
    trace.save(args.trace)
    what = "of its calls on the GPU" if kernel.device_count() else "of its NumPy twins"
    print(f"wrote {args.trace}: {len(trace.events)} stages of one forward pass, the host's time {what}")
    return 0
