"""Compile and launch three simplified versions of `cuda_src/moe_gemm/wgmma.cu`: the files `moe_gemm_steps/*.cu`.

Each computes the result of `cukern.moe_gemm(a, b, expert_offsets)` in bfloat16, without the function's other options.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cukern.commands import Resources, resources
from cukern.runtime import arrays, compile, nvrtc, sources
from cukern.runtime.cuda import cupy, driver, runtime
from cukern.runtime.kernel import arch_of_device
from cukern.runtime.tensor_map import encode

FOLDER = Path(__file__).with_suffix("")
_KERNEL = "multiply"
# Alignment in bytes of swizzled tiles in shared memory.
_ALIGNMENT = 1024


class Step(NamedTuple):
    """Describe a CUDA file: its name, and the tile sizes and the block size that its constants define."""

    name: str
    rows: int
    columns: int
    threads: int
    shared_bytes: int = 0  # dynamic shared memory of all stages; 0: the kernel's is static
    is_mapped: bool = True  # the kernel copies its operands by TMA and needs Hopper

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.cu"

    @property
    def archs(self) -> tuple[str, ...]:
        """Return the architectures for which the tests compile the file."""
        return ("90a",) if self.is_mapped else ("80", "90a")


STEPS = (
    Step("1_tiles_mma", 128, 128, 256, is_mapped=False),
    Step("2_tma_wgmma", 128, 128, 128, 2 * (128 + 128) * 128),
    Step("3_warp_specialized", 128, 256, 288, 4 * (128 + 256) * 128),
)


class Compiled(NamedTuple):
    """Hold a cubin, the mangled name of its kernel, and the kernel's registers and spills."""

    cubin: bytes
    name: str
    resources: Resources


@functools.cache
def compiled(step: Step, arch: str) -> Compiled:
    """Compile a step by NVRTC. This needs no GPU."""
    folders = sources.CUDA_SRC, compile.cuda_include_directory()
    options = [f"-arch=sm_{arch}", "-std=c++17", "-default-device", "-Xptxas=-v", *(f"-I{x}" for x in folders)]
    cubin, name, log = nvrtc.compile_cubin(step.path.read_text(), str(step.path), _KERNEL, options)
    return Compiled(cubin, name, resources({"log": log}))


@functools.cache
def _function(step: Step, device: int) -> Any:
    """Load a step's kernel on the current device, which must be `device`."""
    cubin, name, _ = compiled(step, arch_of_device(device))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.cubin")
        path.write_bytes(cubin)
        kernel = cupy.RawModule(path=str(path)).get_function(name)
        if step.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = step.shared_bytes + _ALIGNMENT
        assert kernel.kernel.ptr  # accessing `ptr` loads the kernel from the file
    return kernel


def _parameters(step: Step, a: int, b: int, out: int, offsets: int, rows: int, experts: int, n: int, k: int) -> bytes:
    """Return the bytes of the step's struct `StepParams`. `a`, `b`, `out` and `offsets` are addresses."""
    if not step.is_mapped:
        return struct.pack("4Q4i", a, b, out, offsets, rows, experts, n, k)
    # A box has 64 numbers along k, which are 128 bytes. The maps have four dimensions, because `tma_load` takes four.
    row, all_rows, all_weights = 2 * k, 2 * k * rows, 2 * k * n * experts
    a_map = encode(a, "bfloat16", (k, rows, 1, 1), (row, all_rows, all_rows), (64, step.rows, 1, 1))
    b_map = encode(b, "bfloat16", (k, n, experts, 1), (row, row * n, all_weights), (64, step.columns, 1, 1))
    packed = struct.pack("128s128s2Q3i", a_map, b_map, out, offsets, experts, n, k)
    return packed.ljust(-(-len(packed) // 64) * 64, b"\0")  # a tensor map is aligned to 64 bytes, so is the size


def multiply(step: Step, a: Any, b: Any, expert_offsets: Any, out: Any = None) -> Any:
    """Compute out[r] = a[r] b[e]^T for the rows r of each expert e by a step's kernel.

    All arrays are CuPy arrays or torch tensors on a GPU.

    Args:
        a: [rows, k] bfloat16, or its bits (uint16).
        b: weights [experts, n, k], of the same dtype. n and k are multiples of 8.
        expert_offsets: int32 [experts + 1]; expert e has the rows from expert_offsets[e] up to, but not including,
            expert_offsets[e + 1].
        out: [rows, n], of the dtype of a.

    Returns:
        `out`. Rows that belong to no expert are not written.
    """
    library = arrays.library_of(a)
    assert library is not None
    (rows, k), (experts, n, _), device = a.shape, b.shape, library.device(a)
    assert b.shape[2] == k and n % 8 == k % 8 == 0 and tuple(expert_offsets.shape) == (experts + 1,)
    if out is None:
        out = library.empty((rows, n), library.dtype(a), a)
    if not rows:
        return out
    addresses = [library.address(x) for x in (a, b, out, expert_offsets)]
    assert all(address % 16 == 0 for address in addresses[:3])
    runtime.setDevice(device)
    packed = _parameters(step, *addresses, rows, experts, n, k)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    # Blocks along y: the largest possible number of tiles. The last tile of each group may be partial.
    tiles = (rows + min(experts, rows) * (step.rows - 1)) // step.rows
    shared_bytes = step.shared_bytes and step.shared_bytes + _ALIGNMENT
    driver.launchKernel(
        _function(step, device).kernel.ptr, math.ceil(n / step.columns), tiles, 1, step.threads, 1, 1, shared_bytes,
        library.stream(device), ctypes.addressof(pointers), 0,
    )  # fmt: skip
    return out


def median_us(call: Callable[[], Any], repeats: int = 50) -> float:
    """Return the median time of a call in microseconds, on torch's current stream, measured by CUDA events."""
    import torch

    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
