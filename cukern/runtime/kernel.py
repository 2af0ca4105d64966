"""The kernels of the library, and their instances on each device.

A `Kernel` is one `__global__` template of `cuda_src`. It has a `Variant` for each set of template arguments, which is
loaded on a device at its first launch there. `cukern.runtime.plan` launches it.
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

from cukern.runtime import compile, overlap
from cukern.runtime.compile import Instance
from cukern.runtime.cuda import cupy, current_device, driver, need_cupy, runtime
from cukern.runtime.progress import progress
from cukern.runtime.template import TemplateError

#: Maps a stem (see `Kernel`) to its kernels. The imports of the op modules add the kernels.
KERNELS: dict[str, list[Kernel]] = {}

#: A lock for each device. One lock for all devices could cause a deadlock: loading a module may wait for a kernel on
#: that device, and the kernel may wait for another device.
_load_locks: dict[int, threading.Lock] = {}
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # a function attribute of the driver


class Launched(NamedTuple):
    """The launch configuration of a block, as the host computes it.

    If the shared memory differs between calls, `shared_bytes` is the value for the example sizes `at`, and `most` is
    the largest possible value. The function `<kernel>_launch` in the template (see cuda_src/common/launch.cuh) computes
    the same numbers, and a static assertion compares them.
    """

    threads: int = 0  # the largest number, if it differs between calls; 0: not asserted
    shared_bytes: int = 0  # dynamic shared memory
    at: tuple[int, ...] = ()
    most: int = 0
    box: int = 0  # rows of a TMA box; 0: not asserted

    def assertions(self, instance: Instance) -> str:
        """Return the assertions that are compiled with an instance."""
        function, _, arguments = instance.expression.partition("<")
        says = f"{function}_launch<{arguments}({', '.join(map(str, self.at))})"
        return "".join(
            f'static_assert({says}.{name} == {number}, "{instance}: the host launches it with {number} {name}");\n'
            for name, number in (("threads", self.threads), ("shared_bytes", self.shared_bytes), ("box", self.box))
            if number
        )


_WITHOUT_SHARED_MEMORY = Launched()


class Variant:
    """A template instance, which can be launched on any device that it can be compiled for."""

    __slots__ = ("_functions", "_modules", "instance", "large_clusters", "launched", "max_shared_bytes", "ready")

    def __init__(self, instance: Instance, launched: Launched, large_clusters: bool) -> None:
        self.instance = instance
        self.launched = launched
        self.max_shared_bytes = launched.most or launched.shared_bytes
        self.large_clusters = large_clusters
        self._functions: dict[int, int] = {}
        self._modules: dict[int, Any] = {}
        self.ready = _Ready(self)

    def __repr__(self) -> str:
        return f"Variant({self.instance})"

    def is_loaded(self, device: int) -> bool:
        return device in self._functions

    def launcher(self, device: int) -> Callable[..., None]:
        """Return the function that launches the kernel on `device`, with the arguments of `driver.launchKernel`."""
        return overlap.overlapping(self.instance.file, arch_of_device(device)) or driver.launchKernel

    def load(self, device: int) -> int:
        """Load the kernel on `device`, which must be current, if needed. Return the driver's handle."""
        if device in self._functions:
            return self._functions[device]
        path, name = compile.cubin(self.instance, arch_of_device(device))
        with _load_locks.setdefault(device, threading.Lock()):
            if device not in self._functions:
                module = cupy.RawModule(path=str(path))
                kernel = module.get_function(name)
                if self.max_shared_bytes:
                    kernel.max_dynamic_shared_size_bytes = self.max_shared_bytes
                if self.large_clusters:
                    driver.funcSetAttribute(kernel.kernel.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
                self._modules[device] = module
                self._functions[device] = kernel.kernel.ptr
        return self._functions[device]


class _Ready(dict[Any, tuple[Callable[..., None], int]]):
    """Maps a device to the launch function of a variant and the driver's handle, which are added at the first launch.

    At the first launch on a device, the device must be the current device.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant

    def __missing__(self, device: int) -> tuple[Callable[..., None], int]:
        found = self[device] = self._variant.launcher(device), self._variant.load(device)
        return found


class Kernel:
    """A `__global__` template `function` of `cuda_src/<file>.cu`, which takes one struct of parameters.

    The stem is the folder of the file, or the file if it is in no folder: "mla_decode" for "mla_decode/plan".
    `compile_s` is roughly the seconds that the slowest instance takes to compile.
    """

    def __init__(self, file: str, function: str, compile_s: float = 0.3) -> None:
        self.file = file
        self.stem = file.partition("/")[0]
        self.function = function
        self.compile_s = compile_s
        self._variants: dict[tuple[str | int, ...], Variant] = {}
        #: Instances compiled when cukern is imported on a machine with a GPU.
        self.at_import: list[Instance] = []
        #: Instances for well-known sizes. The tests check that their registers do not spill.
        self.specialized: list[Instance] = []
        #: For each architecture, the specialized instances that no plan uses on it. They are not compiled for it.
        self.unused: dict[str, list[Instance]] = {}
        KERNELS.setdefault(self.stem, []).append(self)

    def specialize_by_arch(self, given: dict[str, list[Instance]]) -> None:
        """Set the specialized instances of each architecture. An instance is not compiled for other architectures."""
        self.specialized = list(dict.fromkeys(instance for instances in given.values() for instance in instances))
        self.unused = {arch: [i for i in self.specialized if i not in instances] for arch, instances in given.items()}

    def variant(
        self,
        *arguments: str | int,
        launched: Launched = _WITHOUT_SHARED_MEMORY,
        large_clusters: bool = False,
    ) -> Variant:
        """Return the variant with these template arguments, the same object at every call.

        `launched` is required for dynamic shared memory, `large_clusters` for clusters of more than 8 blocks.
        """
        variant = self._variants.get(arguments)
        if variant is None:
            if launched.at and not launched.most:
                raise TemplateError(f"{self.function}: Launched needs `most` where a call decides the shared memory")
            instance = Instance(self.file, self.function, arguments)
            instance = replace(instance, assertions=launched.assertions(instance))
            made = Variant(instance, launched, large_clusters)
            # If two threads get here, both use the variant that is stored first.
            variant = self._variants.setdefault(arguments, made)
        return variant

    def variants(self) -> list[Variant]:
        """Return the variants that have been asked for."""
        return [*self._variants.values()]


def specialize(op: str | Callable[..., Any], **sizes: Any) -> tuple[str, ...]:
    """Compile variants for these sizes, for every GPU of the machine, and use them in this process.

    `op` is a function of cukern or its name: `cukern.specialize("moe_fused_gate", experts=96, groups=4)`. The variants
    serve all functions of its family. docs/tools.md lists the `sizes` of each family; the error for a wrong size names
    them.

    Returns the kernels, each as a function and its template arguments.

    Raises ValueError for sizes that the specialized kernel cannot take, TypeError for an op without such kernels or for
    sizes of other names, RuntimeError if there is no compiler.
    """
    made = specialized(op, **sizes)
    archs = sorted({arch_of_device(d) for d in range(device_count())})
    compile.compile_all([(i, arch) for arch in archs for i in compile.missing(made, arch)])
    return tuple(map(str, made))


def specialized(op: str | Callable[..., Any], **sizes: Any) -> list[Instance]:
    """Return the variants of `specialize` for these sizes, and use them in this process. Errors are the same."""
    function = getattr(sys.modules["cukern"], op, None) if isinstance(op, str) else op
    # The function's stem is the module or package `cukern.ops.<stem>`.
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
    """Return the number of CUDA devices of this process; 0 without CuPy or a driver. Creates no context."""
    if cupy is None:
        return 0
    try:
        return runtime.getDeviceCount()
    except runtime.CUDARuntimeError:
        return 0


def arch_of_device(device: int) -> str:
    """Return the compile target of a device, such as "90a". Creates no context."""
    need_cupy("a call on a GPU")
    major, minor = (runtime.deviceGetAttribute(attribute, device) for attribute in (75, 76))
    return compile.arch_of((major, minor))


def _archs_from_nvml() -> list[str] | None:
    """Return the compile targets of all GPUs of the machine; None if NVML cannot tell."""
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
    """Return the compile targets of the GPUs of this machine.

    CUDA takes a fifth of a second and some memory of each GPU to answer, so NVML is asked first. NVML ignores
    CUDA_VISIBLE_DEVICES, so this function checks whether the variable hides all GPUs.
    """
    if cupy is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    archs = _archs_from_nvml()
    if archs is None:
        archs = sorted({arch_of_device(d) for d in range(device_count())})
    return archs


def instances(stem: str | None = None) -> Iterator[Instance]:
    """Yield the instances that are compiled at import, of one stem or all of them.

    The instances that compile slowest come first, so that all workers end at about the same time.
    """
    kernels = KERNELS[stem] if stem else [own for kernels in KERNELS.values() for own in kernels]
    for kernel in sorted(kernels, key=lambda kernel: -kernel.compile_s):
        yield from kernel.at_import


def load_all(
    stems: Iterable[str],
    device: int,
    wanted: Callable[[Instance], bool] = lambda instance: True,
    compiles: bool = True,
) -> None:
    """Load the requested variants of the kernels of `stems` on a device.

    Loading a module may wait for running kernels, so do not call this function while a kernel waits for another rank.
    `wanted` selects instances. If `compiles` is false, variants that are not in the cache are skipped.
    """
    arch = arch_of_device(device)
    found = [
        variant
        for stem in stems
        for kernel in KERNELS[stem]
        for variant in kernel.variants()
        if not variant.is_loaded(device) and wanted(variant.instance)
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
    """Make sure that the cache has every instance of `instances()` for every GPU of this machine.

    With `CUKERN_COMPILE=lazy` each instance is compiled at its first launch instead. A failure is only a warning: the
    op that needs the kernel raises the error.
    """
    mode = os.environ.get("CUKERN_COMPILE", "import")
    if mode not in ("import", "lazy"):
        raise ValueError(f"CUKERN_COMPILE must be 'import' or 'lazy', got {mode!r}")
    if mode == "lazy":
        return
    try:
        archs = present_archs()
        # Without a lasting cache folder, every start would compile all of them again.
        if not archs or compile.cache_problem():
            return
        work = [(i, arch) for arch in archs for i in compile.missing(instances(), arch)]
        if work:
            compile_with_progress(work)
    except Exception as error:
        warnings.warn(
            f"compiling cukern's kernels failed: {error}\nRun `python -m cukern doctor`.",
            RuntimeWarning,
            stacklevel=3,
        )


def compile_with_progress(work: list[tuple[Instance, str]], what: str = "compiling kernels") -> None:
    """Call `compile.compile_all`, and show its progress."""
    if not work:
        return
    with progress(what, len(work)) as advance:
        advance(0)
        compile.compile_all(work, lambda instance, arch: advance(1))
