"""Launches that overlap: which kernels may be launched so, and that they wait for what came before them."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch

import cukern
from cukern.runtime import overlap, sources
from cukern.runtime.kernel import KERNELS
from cukern.runtime.op import forget_plans
from tests.buffers import same_bits, to_numpy

#: Kernels that begin when all before them have ended, with why.
ALONE = {
    **dict.fromkeys(("all_to_all/dispatch", "all_to_all/combine"), "they wait for other GPUs"),
    **dict.fromkeys(
        ("mla_decode/attend_wgmma", "moe_gemm/fp4_wgmma", "moe_gemm/fp8_blocks"),
        "measured: up to 6% slower where blocks took their places early",
    ),
}
FILES = sorted({kernel.file for kernels in KERNELS.values() for kernel in kernels})


@pytest.mark.parametrize("file", FILES)
def test_a_file_waits_in_all_of_its_kernels_first_of_all_or_in_none(file: str) -> None:
    """What a kernel touched before it waits might still be written by the one before it."""
    source = sources.source(file)
    heads = re.findall(r"__global__[^;{]*?\w+\(const __grid_constant__ \w+ \w+\) \{\n(.*)\n", source)
    assert len(heads) == source.count("__global__") > 0
    waiting = "wait_for_earlier_kernels();", "begin_behind_earlier_kernels();"
    wanted = f"cuda_src/{file}.cu: include common/overlap.cuh, and begin the kernel with one of {waiting}"
    assert {head.strip() in waiting for head in heads} == {overlap.waits(file)}, wanted
    assert overlap.waits(file) == (file not in ALONE), wanted


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ('#include "common/overlap.cuh"\n__global__ void f() { begin_behind_earlier_kernels(); }', True),
        (' #  include\t"common/overlap.cuh" // waits\n__global__ void\nf()\n{ renamed ( ) ; }', True),
        ('#include "common/warp.cuh"\n// as common/overlap.cuh: begin_behind_earlier_kernels();\n', False),
        ('// #include "common/overlap.cuh"\n__global__ void f() {}', False),
    ],
)
def test_a_kernel_that_waits_is_known_by_the_header(source: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "source", lambda file: source)
    assert overlap.waits.__wrapped__("probe") == waits


def test_kernels_overlap_from_hopper_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch() -> None:
        pass

    monkeypatch.setattr(overlap, "launcher", lambda: launch)
    assert overlap.overlapping("norm/rms_norm", "90a") is launch
    assert overlap.overlapping("norm/rms_norm", "120a") is launch
    assert overlap.overlapping("norm/rms_norm", "89") is None
    assert overlap.overlapping("all_to_all/dispatch", "90a") is None


class FakeDriver:
    """Remembers what a launch hands over."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.launched: list[tuple[Any, ...]] = []

    def launch(self, config: bytes, function: int, pointers: int, extra: None) -> int:
        class Config(ctypes.Structure):  # as cuda.h has it
            _fields_ = (
                ("sizes", ctypes.c_uint * 7),
                ("stream", ctypes.c_void_p),
                ("attributes", ctypes.c_void_p),
                ("count", ctypes.c_uint),
            )

        assert len(config) == ctypes.sizeof(Config) == 56
        read = Config.from_buffer_copy(config)
        attribute = ctypes.string_at(read.attributes, 72)
        identity, value = (int.from_bytes(attribute[i : i + 4], "little") for i in (0, 8))
        self.launched.append((list(read.sizes), read.stream, read.count, identity, value, function, pointers, extra))
        return self.status


@pytest.fixture(name="launcher")
def fresh_launcher() -> Any:
    overlap.launcher.cache_clear()
    yield overlap.launcher
    overlap.launcher.cache_clear()


def test_a_launch_hands_the_driver_what_it_was_given(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(0)

    class Library:
        @property
        def cuLaunchKernelEx(self) -> Any:
            def launch(*arguments: Any) -> int:
                return fake.launch(*arguments)

            return launch

    monkeypatch.setattr(overlap, "libcuda", Library)
    launcher()(1234, 7, 6, 5, 4, 3, 2, 1000, 77, 4096, 0)
    # 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
    assert fake.launched == [([7, 6, 5, 4, 3, 2, 1000], 77, 1, 6, 1, 1234, 4096, None)]


def test_without_the_driver_s_function_launches_do_not_overlap(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "libcuda", object)
    assert launcher() is None
    assert overlap.overlapping("norm/rms_norm", "90a") is None


@pytest.mark.gpu
@pytest.mark.stem("runtime")
def test_a_refused_launch_raises_the_driver_s_error() -> None:
    from cupy_backends.cuda.api import driver

    cukern.rms_norm(torch.ones(1, 64, device="cuda"), torch.ones(64, device="cuda"))
    launch = overlap.launcher()
    assert launch is not None
    variant = next(v for kernel in KERNELS["norm"] for v in kernel.variants() if 0 in v.functions)
    buffer = ctypes.create_string_buffer(4096)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    with pytest.raises(driver.CUDADriverError, match="CUDA_ERROR_INVALID_VALUE"):
        launch(variant.load(0), 1, 1, 1, 4096, 1, 1, 0, 0, ctypes.addressof(pointers), 0)


def _chain(x: torch.Tensor, weight: torch.Tensor, steps: int) -> torch.Tensor:
    """Steps each of which reads all that the one before it wrote, in two buffers that take turns."""
    buffers = [torch.empty_like(x), torch.empty_like(x)]
    for i in range(steps):
        cukern.rms_norm(x, weight, out=buffers[i % 2])
        x = buffers[i % 2]
    return x


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.stem("runtime")
@pytest.mark.parametrize("rows", [1, 300, 20000])
@pytest.mark.parametrize("captured", [False, True])
def test_kernels_see_all_that_earlier_ones_wrote(rows: int, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a chain of kernels that overlap are those of one whose launches do not."""
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 512, device="cuda", generator=generator)
    weight = torch.rand(512, device="cuda", generator=generator) + 0.5
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "launcher", lambda: None)
        forget_plans()
        want = to_numpy(_chain(x, weight, 40))
    forget_plans()
    if captured:
        _chain(x, weight, 2)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = _chain(x, weight, 40)
        for _ in range(3):
            got.zero_()
            graph.replay()
    else:
        got = _chain(x, weight, 40)
    same_bits(to_numpy(got), want)


@pytest.mark.gpu
@pytest.mark.stem("runtime")
def test_a_kernel_begins_while_the_one_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper the launches are programmatic ones: seen by which function launches, not by their time."""
    launched: list[str] = []
    original = overlap.overlapping

    def noted(file: str, arch: str) -> Any:
        launch = original(file, arch)
        launched.append("overlapping" if launch is not None else "plain")
        return launch

    monkeypatch.setattr(overlap, "overlapping", noted)
    forget_plans()
    cukern.rms_norm(torch.ones(1, 64, device="cuda"), torch.ones(64, device="cuda"))
    major, _ = torch.cuda.get_device_capability()
    assert launched == ["overlapping" if major >= 9 else "plain"]
    forget_plans()
