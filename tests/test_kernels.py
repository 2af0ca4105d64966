"""Every template, compiled for every architecture: that it can be, and that registers do not spill."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cupy_backends.cuda.libs import nvrtc as nvrtc_binding

import cukern.runtime.compile as compiler
from cukern.commands import Resources, resources
from cukern.runtime import sources
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import KERNELS, Kernel
from tests.specs import SPECS

ARCHS = ("90a", "80", "100a", "120a")


def _at_first_use(kernel: Kernel) -> list[Instance]:
    listed = {*kernel.at_import, *kernel.specialized}
    variants = SPECS[kernel.stem].at_first_use()
    found = dict.fromkeys(x.instance for x in variants if x.instance.function == kernel.function)
    return [instance for instance in found if instance not in listed]


def _work(kernel: Kernel, arch: str) -> list[Instance]:
    """All that the op lists for `arch`; of what is compiled at its first use all for sm_90a, and half for sm_80.

    What a later GPU is given of it takes no other path through the templates than sm_90a. The same is true of the
    instances that a spec calls alike.
    """
    spec = SPECS[kernel.stem]
    rest = {"90a": _at_first_use(kernel), "80": _at_first_use(kernel)[::2]}.get(arch, [])
    if arch == "80":
        rest = [instance for instance in rest if not spec.needs_cluster(instance)]
    listed = [*dict.fromkeys((*kernel.at_import, *kernel.specialized))]
    if spec.alike > 1 and arch != "90a":
        others = [instance for instance in kernel.specialized if instance not in kernel.at_import]
        listed = [*kernel.at_import, *others[ARCHS.index(arch) :: spec.alike]]
    return [instance for instance in listed if instance not in kernel.unused.get(arch, ())] + rest


EVERY_KERNEL = {f"{k.stem}.{k.function}": k for kernels in KERNELS.values() for k in kernels}


def _templates() -> Iterator[tuple[str, str]]:
    """The stem and the name of each `__global__` template."""
    for path in sources.CUDA_SRC.rglob("*.cu*"):
        stem = Path(path.relative_to(sources.CUDA_SRC).parts[0]).stem
        for head in re.findall(r"__global__\b([^{;]*)\{", path.read_text()):
            # The parameters are the last pair of parentheses; those before them are of the launch bounds.
            yield stem, re.findall(r"(\w+)\s*\(", head)[-1]


def test_each_template_has_an_instance() -> None:
    templates = set(_templates())
    assert templates
    assert templates == {(kernel.stem, kernel.function) for kernel in EVERY_KERNEL.values()}
    for name, kernel in EVERY_KERNEL.items():
        assert any(_work(kernel, arch) for arch in ARCHS), f"no instance of {name} is compiled by a test"


def test_each_instance_is_compiled_for_some_architecture() -> None:
    for kernel in EVERY_KERNEL.values():
        listed = {*kernel.at_import, *kernel.specialized}
        assert listed <= {instance for arch in ARCHS for instance in _work(kernel, arch)}
        assert all(unused <= listed for unused in map(set, kernel.unused.values()))


def _common_work(kernel: Kernel, arch: str) -> list[Instance]:
    """What the import compiles, for sm_90a, and one instance of each other template; for sm_80 one of each."""
    every = _work(kernel, arch)
    at_import = [instance for instance in kernel.at_import if instance in every] if arch == "90a" else []
    return at_import or every[:1]


#: Instances of one program: an instance of rms_norm takes half the time of a program of its own, and with all 127 in
#: one program two thirds.
AT_ONCE = 16


def compile_together(instances: list[Instance], arch: str) -> dict[Instance, Resources]:
    """Compile instances of one template as one program, which reads the headers once; what each takes."""
    job = compiler._job(instances[0], arch)
    program = nvrtc_binding.createProgram(compiler.program(instances), job["filename"], (), ())
    try:
        for instance in instances:
            nvrtc_binding.addNameExpression(program, instance.expression)
        try:
            nvrtc_binding.compileProgram(program, job["options"])
        except nvrtc_binding.NVRTCError:
            pytest.fail(nvrtc_binding.getProgramLog(program), pytrace=False)
        log = nvrtc_binding.getProgramLog(program)
        entries = dict(
            re.findall(r"Compiling entry function '(\S+)'(.*?)(?=Compiling entry function|\Z)", log, re.DOTALL)
        )
        return {
            instance: resources({"log": entries[nvrtc_binding.getLoweredName(program, instance.expression)]})
            for instance in instances
        }
    finally:
        nvrtc_binding.destroyProgram(program)


def compile_and_find_spills(kernel: Kernel, instances: list[Instance], arch: str) -> dict[str, int]:
    """Compile instances; the bytes that registers spill where they may spill none."""
    release = compiler.nvrtc_version().rpartition(".")[0]
    spec = SPECS[kernel.stem]
    allowed = spec.allowed_spills.get((kernel.function, arch), {}).get(release, 0)
    spilled, taken_by = {}, {}
    for begin in range(0, len(instances), AT_ONCE):
        taken_by |= compile_together(instances[begin : begin + AT_ONCE], arch)
    for instance, taken in taken_by.items():
        assert taken.registers > 0
        is_held = instance in kernel.specialized or spec.none_spills
        if is_held and taken.spill_bytes > allowed:
            spilled[str(instance)] = taken.spill_bytes
    return spilled


@pytest.mark.parametrize("arch", ["90a", "80"])
@pytest.mark.parametrize("name", EVERY_KERNEL)
def test_each_template_compiles(name: str, arch: str) -> None:
    kernel = EVERY_KERNEL[name]
    spilled = compile_and_find_spills(kernel, _common_work(kernel, arch), arch)
    assert not spilled, f"bytes that are spilled on sm_{arch}"


@pytest.mark.rare
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", EVERY_KERNEL)
def test_every_instance_compiles_and_the_specialized_do_not_spill(name: str, arch: str) -> None:
    kernel = EVERY_KERNEL[name]
    spilled = compile_and_find_spills(kernel, _work(kernel, arch), arch)
    assert not spilled, f"bytes that are spilled on sm_{arch}"
