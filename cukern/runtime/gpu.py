"""The properties of a GPU on which a plan may depend."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cukern.runtime import check
from cukern.runtime.cuda import runtime
from cukern.runtime.kernel import arch_of_device

# Numbers of the driver's device attributes.
_MULTIPROCESSORS, _SHARED_PER_MULTIPROCESSOR, _SHARED_PER_BLOCK = 16, 81, 97


class Gpu(NamedTuple):
    """A GPU; shared memory is in bytes."""

    arch: str  # the compile target, such as "90a"
    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int

    @property
    def compute_capability(self) -> int:
        """10 times the major version plus the minor one."""
        return int(self.arch.rstrip("a"))


#: A GPU of each architecture, for plans that are explained on a machine without one.
BY_ARCH = {
    "80": Gpu("80", 108, 164 << 10, 163 << 10),  # A100
    "86": Gpu("86", 84, 100 << 10, 99 << 10),  # A40
    "89": Gpu("89", 142, 100 << 10, 99 << 10),  # L40S
    "90a": Gpu("90a", 132, 228 << 10, 227 << 10),  # H100, H200
    "100a": Gpu("100a", 148, 228 << 10, 227 << 10),  # B200
    "120a": Gpu("120a", 188, 100 << 10, 99 << 10),  # RTX PRO 6000
}
#: The architecture of each card, by its name without "NVIDIA", the memory size and the board.
CARDS = {
    "A100": "80", "A30": "80",
    "A10": "86", "A10G": "86", "A40": "86", "RTX 3090": "86", "RTX A6000": "86",
    "L4": "89", "L40": "89", "L40S": "89", "RTX 4090": "89",
    "H100": "90a", "H200": "90a", "H800": "90a", "H20": "90a", "GH200": "90a",
    "B200": "100a", "GB200": "100a",
    "RTX 5090": "120a", "RTX PRO 6000": "120a",
}  # fmt: skip
#: The architectures of data centers that have clusters of blocks.
CLUSTERED_ARCHS = ("90a", "100a", "103a")


@functools.cache
def of_device(device: int) -> Gpu:
    """The GPU of a CUDA device. Makes no context."""
    attributes = (_MULTIPROCESSORS, _SHARED_PER_MULTIPROCESSOR, _SHARED_PER_BLOCK)
    return Gpu(arch_of_device(device), *(runtime.deviceGetAttribute(x, device) for x in attributes))


def of_arch(name: str) -> Gpu:
    """Return a GPU of an architecture, which is named as "90a", "sm_90a", "90" or by a card, as "H200".

    Raises ValueError for a name that is not known here.
    """
    text = name.strip().upper() if isinstance(name, str) else name
    if isinstance(text, str):
        text = CARDS.get(text.removeprefix("NVIDIA "), text.removeprefix("SM_").lower())
        if f"{text}a" in BY_ARCH:
            text = f"{text}a"
    if text not in BY_ARCH:
        check.fail("arch", f"one of {', '.join(BY_ARCH)}, or a card such as H200, L40S or A100", repr(name))
    return BY_ARCH[text]
