"""List the kernels that a call runs on the GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any


def kernels_of(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return the kernels and copies that `call` runs on the GPU, in order, with microseconds from torch.profiler.

    With programmatic dependent launch, blocks of a kernel become resident before the previous kernel ends. The time of
    a kernel counts from the end of the previous one. The call runs twice: the first run loads its kernels.
    """
    import torch

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler's messages on stderr
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities) as profile:
            call()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not events:
        raise RuntimeError("torch.profiler has seen nothing on the GPU")
    return by_turns((event.name, event.time_range.start, event.time_range.end) for event in events)


def by_turns(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Convert names, begins and ends to names and times, in order. A time begins when the previous kernel has ended."""
    found, ended = [], 0.0
    for name, begin, end in sorted(events, key=lambda event: event[1]):
        found.append((name, max(0.0, end - max(begin, ended))))
        ended = max(ended, end)
    return found
