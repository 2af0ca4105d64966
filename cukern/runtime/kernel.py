"""Kernels and their instances on each device.

A `Kernel` is one `__global__` template of `cuda_src`. Its `Variant` for each set of template arguments is loaded on a
device at the first launch there.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from cukern.runtime import compile, overlap, template
from cukern.runtime.compile import Instance
from cukern.runtime.cuda import cupy, current_device, driver, need_cupy, runtime
from cukern.runtime.progress import progress

#: Kernels by stem (see `Kernel`). Importing the op modules fills it.
KERNELS: dict[str, list[Kernel]] = {}

#: One lock per device. A single lock could deadlock: loading a module may wait for a running kernel, which may wait for
#: another device.
_load_locks: dict[int, threading.Lock] = {}
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # a driver attribute of a function


class Launched(NamedTuple):
    """The launch configuration that the host computes.

    If calls differ in shared memory, `shared_bytes` is the value for the sizes `at`, and `most` is the maximum. A
    static assertion compares these fields with the template's `<kernel>_launch` (cuda_src/common/launch.cuh).
    """

    threads: int = 0  # the maximum if calls differ; 0: not asserted
    shared_bytes: int = 0  # dynamic shared memory
    at: tuple[int, ...] = ()
    most: int = 0
    box: int = 0  # rows of a TMA box; 0: not asserted

    def assertions(self, instance: Instance) -> str:
        function, _, arguments = instance.expression.partition("<")
        says = f"{function}_launch<{arguments}({', '.join(map(str, self.at))})"
        return "".join(
            f'static_assert({says}.{name} == {number}, "{instance}: the host launches it with {number} {name}");\n'
            for name, number in (("threads", self.threads), ("shared_bytes", self.shared_bytes), ("box", self.box))
            if number
        )


_WITHOUT_SHARED_MEMORY = Launched()


class Variant:
    """A template instance that can be launched on any device."""

    __slots__ = ("_modules", "functions", "instance", "large_clusters", "launched", "max_shared_bytes", "ready")

    def __init__(self, instance: Instance, launched: Launched, large_clusters: bool) -> None:
        self.instance = instance
        self.launched = launched
        self.max_shared_bytes = launched.most or launched.shared_bytes
        self.large_clusters = large_clusters
        self.functions: dict[int, int] = {}  # the driver's handle by device, where the kernel is loaded
        self._modules: dict[int, Any] = {}
        self.ready = _Ready(self)

    def __repr__(self) -> str:
        return f"Variant({self.instance})"

    def load(self, device: int) -> int:
        """Return the driver's handle of the kernel on `device`, the current device. Load the kernel if needed."""
        if device in self.functions:
            return self.functions[device]
        path, name = compile.cubin(self.instance, arch_of_device(device))
        with _load_locks.setdefault(device, threading.Lock()):
            if device not in self.functions:
                module = cupy.RawModule(path=str(path))
                kernel = module.get_function(name)
                if self.max_shared_bytes:
                    kernel.max_dynamic_shared_size_bytes = self.max_shared_bytes
                if self.large_clusters:
                    driver.funcSetAttribute(kernel.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
                self._modules[device] = module
                self.functions[device] = kernel.kernel.ptr
        return self.functions[device]


class _Ready(dict[Any, tuple[Callable[..., None], int]]):
    """Maps a device to a variant's launch function and driver handle.

    The first look-up of a device loads the kernel there. During this look-up, the device must be current.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    def __missing__(self, device: int) -> tuple[Callable[..., None], int]:
        start = overlap.overlapping(self._variant.instance.file, arch_of_device(device)) or driver.launchKernel
        found = self[device] = start, self._variant.load(device)
        return found


class Kernel:
    """A `__global__` template of `cuda_src/<file>.cu` that takes one parameter struct.

    `stem` is the file's folder if it has one, else the file: "mla_decode" for "mla_decode/plan". `compile_s` estimates
    how many seconds the slowest instance takes to compile.
    """

    def __init__(self, file: str, function: str, compile_s: float = 0.3) -> None:
        self.file = file
        self.stem = file.partition("/")[0]
        self.function = function
        self.compile_s = compile_s
        self._variants: dict[tuple[str | int, ...], Variant] = {}
        #: Instances that `import cukern` compiles on a machine with a GPU.
        self.at_import: list[Instance] = []
        #: Instances for well-known sizes. Tests check that their registers do not spill.
        self.specialized: list[Instance] = []
        #: Per architecture, the specialized instances that no plan uses there; they are not compiled for it.
        self.unused: dict[str, list[Instance]] = {}
        KERNELS.setdefault(self.stem, []).append(self)

    def specialize_by_arch(self, given: dict[str, list[Instance]]) -> None:
        self.specialized = list(dict.fromkeys(instance for instances in given.values() for instance in instances))
        self.unused = {arch: [i for i in self.specialized if i not in instances] for arch, instances in given.items()}

    def variant(
        self, *arguments: str | int, launched: Launched = _WITHOUT_SHARED_MEMORY, large_clusters: bool = False
    ) -> Variant:
        """Return the variant with these template arguments, the same object at every call. A bool is a C++ bool.

        Dynamic shared memory requires `launched`; clusters of more than 8 blocks require `large_clusters`.
        """
        arguments = tuple([str(x).lower() if isinstance(x, bool) else x for x in arguments])
        variant = self._variants.get(arguments)
        if variant is None:
            if launched.at and not launched.most:
                raise template.TemplateError(
                    f"{self.function}: Launched needs `most` where a call decides the shared memory"
                )
            instance = Instance(self.file, self.function, arguments)
            instance = replace(instance, assertions=launched.assertions(instance))
            made = Variant(instance, launched, large_clusters)
            # If two threads store a variant here, both use the variant that is stored first.
            variant = self._variants.setdefault(arguments, made)
        return variant

    def constant(self, name: str) -> int:
        """Return an integer that the kernel's file, or a file that it includes, declares."""
        return template.constants(self.file)[name]

    def variants(self) -> list[Variant]:
        return [*self._variants.values()]


def specialize(op: str | Callable[..., Any], **sizes: Any) -> tuple[str, ...]:
    """Compile variants for these sizes, for every GPU of the machine, and use them in this process.

    `op` is a function of cukern or its name: `cukern.specialize("moe_fused_gate", experts=96, groups=4)`. All functions
    of its family use the variants. docs/tools.md lists the `sizes` of each family.

    Returns the kernels, each as a function and its template arguments.

    Raises ValueError for sizes that the kernel cannot take, TypeError for an op without such kernels or for unknown
    sizes, RuntimeError without a compiler.
    """
    made = specialized(op, **sizes)
    archs = sorted({arch_of_device(d) for d in range(device_count())})
    compile.compile_all([(i, arch) for arch in archs for i in compile.missing(made, arch)])
    return tuple(map(str, made))


def specialized(op: str | Callable[..., Any], **sizes: Any) -> list[Instance]:
    """Register and return the variants of `specialize`, without compiling them."""
    function = getattr(sys.modules["cukern"], op, None) if isinstance(op, str) else op
    # The function belongs to the module or package `cukern.ops.<stem>`.
    module = sys.modules.get(".".join(getattr(function, "__module__", "").split(".")[:3]))
    register = getattr(module, "specialize", None)
    if not getattr(module, "__name__", "").startswith("cukern.ops.") or register is None:
        raise TypeError(f"op must be a function of cukern with specialized variants, or its name, got {op!r}")
    name, taken = getattr(function, "__name__", op), inspect.signature(register)
    sizes = getattr(module, "DEFAULTS", {}).get(name, {}) | sizes
    try:
        taken.bind(**sizes)
    except TypeError as error:
        raise TypeError(f"the sizes of {name} are {', '.join(taken.parameters)}: {error}") from None
    if reason := compile.available():
        state = f"NVRTC cannot be used here ({reason.splitlines()[0]})"
        raise RuntimeError(f"cukern.specialize compiles, and {state}: run `python -m cukern doctor`")
    return register(**sizes)  # type: ignore[no-any-return]


def device_count() -> int:
    """Return the number of CUDA devices; 0 without CuPy or a driver. Creates no context."""
    if cupy is None:
        return 0
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return 0


def arch_of_device(device: int) -> str:
    """Return a device's compile target, such as "90a". Creates no context."""
    need_cupy("a call on a GPU")
    major, minor = (runtime.deviceGetAttribute(attribute, device) for attribute in (75, 76))
    return compile.arch_of((major, minor))


def _archs_from_nvml() -> list[str] | None:
    """Return the compile targets of all GPUs of the machine; None if NVML fails."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        count, major, minor = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int()
        archs, handle = set(), ctypes.c_void_p()
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for i in range(0 if failed else count.value):
            failed = failed or nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
            failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
            archs.add(compile.arch_of((major.value, minor.value)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else sorted(archs)


def present_archs() -> list[str]:
    """Return the compile targets of the machine's GPUs.

    NVML is asked first, because CUDA takes a fifth of a second and memory of each GPU. NVML ignores
    CUDA_VISIBLE_DEVICES, so a value that hides all GPUs is checked before.
    """
    if cupy is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    archs = _archs_from_nvml()
    if archs is None:
        archs = sorted({arch_of_device(d) for d in range(device_count())})
    return archs


def instances(stem: str | None = None) -> Iterator[Instance]:
    """Yield the instances that are compiled at import, of one stem or all.

    Slow compilations come first, so that all workers end at about the same time.
    """
    kernels = KERNELS[stem] if stem else [own for kernels in KERNELS.values() for own in kernels]
    for kernel in sorted(kernels, key=lambda kernel: -kernel.compile_s):
        yield from kernel.at_import


def load_all(
    stems: Iterable[str], device: int, wanted: Callable[[Instance], bool] = lambda instance: True, compiles: bool = True
) -> None:
    """Load the variants of `stems` that `wanted` selects.

    Loading may wait for running kernels, so do not call this while a kernel waits for another rank. Without `compiles`,
    uncached variants are skipped.
    """
    arch = arch_of_device(device)
    found = [
        variant
        for stem in stems
        for kernel in KERNELS[stem]
        for variant in kernel.variants()
        if device not in variant.functions and wanted(variant.instance)
        if variant.instance not in kernel.unused.get(arch, ())
    ]
    absent = compile.missing([x.instance for x in found], arch)
    if compiles and absent:
        compile.compile_all([(instance, arch) for instance in absent])
    left_out = set() if compiles else {*absent}
    with current_device(device):
        for variant in found:
            if variant.instance not in left_out:
                variant.load(device)


def compile_at_import() -> None:
    """Fill the cache with `instances()` for every GPU of the machine, unless `CUKERN_COMPILE=lazy`.

    A failure is only a warning, because the op that needs the kernel raises the error.
    """
    mode = os.environ.get("CUKERN_COMPILE", "import")
    if mode not in ("import", "lazy"):
        raise ValueError(f"CUKERN_COMPILE must be 'import' or 'lazy', got {mode!r}")
    if mode == "lazy":
        return
    try:
        archs = present_archs()
        # Without a lasting cache folder every start would compile everything again.
        if not archs or compile.cache_problem():
            return
        work = [(i, arch) for arch in archs for i in compile.missing(instances(), arch)]
        if work:
            compile_with_progress(work)
    except Exception as error:
        warnings.warn(
            f"compiling cukern's kernels failed: {error}\nRun `python -m cukern doctor`.", RuntimeWarning, stacklevel=3
        )


def compile_with_progress(work: list[tuple[Instance, str]], what: str = "compiling kernels") -> None:
    if not work:
        return
    with progress(what, len(work)) as advance:
        advance(0)
        compile.compile_all(work, lambda instance, arch: advance(1))
