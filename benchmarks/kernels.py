"""What a call runs on the GPU, kernel by kernel."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any


def kernels_of(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """What `call` runs on the GPU, in order, each kernel or copy with its microseconds, by torch.profiler.

    They are counted from the end of the one before, where a kernel's blocks took their places earlier. The call is made
    twice: the first time loads its kernels.
    """
    import torch

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells of itself on stderr
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
    """Names, begins and ends as names and times, in order; each time begins no earlier than the one before ended."""
    found, ended = [], 0.0
    for name, begin, end in sorted(events, key=lambda event: event[1]):
        found.append((name, max(0.0, end - max(begin, ended))))
        ended = max(ended, end)
    return found
