"""Properties of a GPU that a plan may use."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cukern.runtime import check
from cukern.runtime.cuda import runtime
from cukern.runtime.kernel import arch_of_device

# Values of CUdevice_attribute.
_MULTIPROCESSORS, _SHARED_PER_MULTIPROCESSOR, _SHARED_PER_BLOCK = 16, 81, 97


class Gpu(NamedTuple):
    """A GPU. Shared memory is in bytes."""

    arch: str  # compile target, such as "90a"
    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int

    @property
    def compute_capability(self) -> int:
        """10 * major version + minor version."""
        return int(self.arch.rstrip("a"))


_SHARED = {"80": (164 << 10, 163 << 10), "86": (100 << 10, 99 << 10), "89": (100 << 10, 99 << 10),
           "90a": (228 << 10, 227 << 10), "100a": (228 << 10, 227 << 10), "120a": (100 << 10, 99 << 10)}  # fmt: skip
#: Multiprocessors of the cards that `explain` and `compile` know, from NVIDIA's data sheets. The first card of an
#: architecture represents it.
_MULTIPROCESSORS_OF = {
    "80": {"A100": 108, "A30": 56},
    "86": {"A40": 84, "A10": 72, "A10G": 80, "RTX A6000": 84, "RTX 3090": 82},
    "89": {"L40S": 142, "L40": 142, "L4": 58, "RTX 4090": 128},
    "90a": {"H200": 132, "H100": 132, "H800": 132, "GH200": 132, "H20": 78},
    "100a": {"B200": 148},
    "120a": {"RTX PRO 6000": 188, "RTX 5090": 170},
}
#: Cards by name. The names leave out "NVIDIA", the memory size and the board type.
CARDS = {
    name: Gpu(arch, count, *_SHARED[arch]) for arch, of in _MULTIPROCESSORS_OF.items() for name, count in of.items()
}
#: The GPU that represents each architecture in plans without a GPU.
BY_ARCH = {arch: CARDS[next(iter(of))] for arch, of in _MULTIPROCESSORS_OF.items()}
#: Architectures and cards before Ampere, which lack instructions that the kernels use.
_BEFORE_AMPERE = ("60", "61", "62", "70", "72", "75", "P100", "P40", "P4", "V100", "TITAN V", "T4", "RTX 2080 TI")
#: Data-center architectures, whose clusters have up to 16 blocks.
CLUSTERED_ARCHS = ("90a", "100a", "103a")


@functools.cache
def of_device(device: int) -> Gpu:
    """Return a device's GPU, without creating a context."""
    attributes = (_MULTIPROCESSORS, _SHARED_PER_MULTIPROCESSOR, _SHARED_PER_BLOCK)
    return Gpu(arch_of_device(device), *(runtime.deviceGetAttribute(x, device) for x in attributes))


def refuse_old(name: str) -> None:
    text = name.strip().upper()
    if text.removeprefix("NVIDIA ").removeprefix("TESLA ").removeprefix("SM_") in _BEFORE_AMPERE:
        check.fail("arch", "a GPU of compute capability 8.0 or later", repr(name.strip()))


def of_arch(name: str) -> Gpu:
    """Return the GPU for "90a", "sm_90a", "90", or a card such as "H200"."""
    text = name.strip().upper().removeprefix("NVIDIA ") if isinstance(name, str) else ""
    if text in CARDS:
        return CARDS[text]
    refuse_old(str(name))
    arch = text.removeprefix("SM_").lower()
    found = BY_ARCH.get(arch) or BY_ARCH.get(f"{arch}a")
    if found is None:
        check.fail(
            "arch", f"one of {', '.join(sorted(BY_ARCH, key=len))}, or a card such as H200, L40S or A100", repr(name)
        )
    return found
