"""The forms of kernels with dynamic shared memory: where a template and the host differ, nothing compiles."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cupy_backends.cuda.libs import nvrtc

import cukern.runtime.compile as compiler
from cukern.ops import moe_gemm
from cukern.runtime import sources, template
from cukern.runtime.compile import CompileError, Instance
from cukern.runtime.kernel import KERNELS, Kernel, Launched, Variant
from cukern.runtime.plan import launch

ARCH = "90a"
FORMS = {
    kernel.function: kernel
    for kernels in KERNELS.values()
    for kernel in kernels
    if "extern __shared__" in template.text(kernel.file)
}
#: What the shared memory of a form is made of: structs of that name, and sums of bytes.
_STRUCT = re.compile(
    r"\bstruct (?:alignas\(\w+\) )?\w*(?<!In)(?:Shared|Memory) [^;{}]*\{(?=\n)|\bstatic constexpr int BYTES = "
)


def _declaration(function: str) -> str:
    return f"constexpr Launch {function}_launch("


def _parts(kernel: Kernel) -> Iterator[tuple[str, int]]:
    """The places in the files of a kernel where its shared memory can grow: behind the begin of a struct or a sum."""
    path = sources.CUDA_SRC / f"{kernel.file}.cu"
    own = [x for x in sources.included([path], sources.CUDA_SRC)[0] if x.parent == path.parent]
    found = [(x, match.end()) for x in own for match in _STRUCT.finditer(x.read_text())]
    if not found:
        text = path.read_text()
        body = text.index("return {", text.index(_declaration(kernel.function)))
        found = [(path, text.index(",", body) + 1)]
    yield from ((file.relative_to(sources.CUDA_SRC).as_posix(), at) for file, at in found)


#: The forms that have a part, by its place.
PARTS: dict[tuple[str, int], list[Kernel]] = {}
for _form in FORMS.values():
    for _part in _parts(_form):
        PARTS.setdefault(_part, []).append(_form)


def _forget() -> None:
    for cached in (sources.source, template.text, template.params, template.struct_named, template.constants):
        cached.cache_clear()
    compiler._source_digest.cache_clear()


@pytest.fixture
def cuda_src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of cuda_src that a test may change, and a cache of its own."""
    if reason := compiler.available():
        pytest.skip(reason)
    shutil.copytree(sources.CUDA_SRC, tmp_path / "cuda_src")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "CUDA_SRC", tmp_path / "cuda_src")
    _forget()
    yield tmp_path / "cuda_src"
    monkeypatch.undo()
    _forget()


def _grow(path: Path, at: int, more: int) -> None:
    """Add bytes to a struct, or to a sum, that begins before `at`."""
    text = path.read_text()
    added = f"\n    char more[{more}];" if text[at - 1] == "{" else f" {more} + "
    path.write_text(text[:at] + added + text[at:])


def _instances(kernel: Kernel) -> list[Instance]:
    for weights, forms in moe_gemm.kernels.MMA_FORMS.items():  # the import has those of one format
        for form in forms:
            form.variant("bfloat16", weights, weights == "FP8", 0)
    return [variant.instance for variant in kernel.variants()]


def _refusals(instances: list[Instance]) -> str:
    """What NVRTC says against instances of one template, of which it compiles the assertions alone."""
    job = compiler._job(instances[0], ARCH)
    program = nvrtc.createProgram(compiler.program(instances), job["filename"], (), ())
    try:
        nvrtc.compileProgram(program, job["options"])
        return ""
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def test_every_kernel_with_dynamic_shared_memory_says_what_it_is_launched_with() -> None:
    assert len(FORMS) > 15
    for function, kernel in FORMS.items():
        file = f"cuda_src/{kernel.file}.cu"
        said = f"declare `{_declaration(function)}...)` in {file}, before the kernel: see cuda_src/common/launch.cuh"
        assert _declaration(function) in template.text(kernel.file), said
        assert kernel.variants(), f"no variant of {function} is listed at the import"
        for variant in kernel.variants():
            said = f"give `launched` to Kernel.variant for {variant}, with the bytes that {function}_launch says"
            assert f"{function}_launch<" in variant.instance.assertions and variant.launched.shared_bytes, said
            assert variant.launched.shared_bytes <= variant.max_shared_bytes, variant


@pytest.mark.parametrize("function", FORMS)
def test_the_template_and_the_host_say_the_same(function: str) -> None:
    if reason := compiler.available():
        pytest.skip(reason)
    assert not _refusals(_instances(FORMS[function]))


@pytest.mark.parametrize(("file", "at"), PARTS)
def test_more_shared_memory_is_refused(file: str, at: int, cuda_src: Path) -> None:
    kernels = PARTS[file, at]
    # A form that takes all shared memory is refused what does not fit.
    takes_all = ["all_for(" in (cuda_src / f"{kernel.file}.cu").read_text() for kernel in kernels]
    _grow(cuda_src / file, at, 1 << 16 if any(takes_all) else 512)
    _forget()
    refused = {kernel.function: _refusals(_instances(kernel)) for kernel in kernels}
    assert any(function in refusal for function, refusal in refused.items())


def test_a_form_whose_struct_grows_does_not_compile(cuda_src: Path) -> None:
    path, kernel = cuda_src / "moe_gemm/wgmma_layout.cuh", FORMS["gemm_wgmma"]
    path.write_text(path.read_text().replace("struct WgmmaShared {", "struct WgmmaShared {\n    char more[512];"))
    instance = kernel.specialized[0]
    with pytest.raises(CompileError, match=re.escape(f"{instance}: the host launches it with")):
        compiler.cubin(instance, ARCH)


@pytest.mark.parametrize("name", ["threads", "shared_bytes", "box"])
def test_what_the_host_has_wrong_is_refused(name: str) -> None:
    if reason := compiler.available():
        pytest.skip(reason)
    variant = next(x for x in FORMS["gemm_wgmma"].variants() if x.launched.box)
    launched = variant.launched._replace(**{name: getattr(variant.launched, name) + 32})
    wrong = replace(variant.instance, assertions=launched.assertions(variant.instance))
    assert compiler.cached_path(wrong, ARCH) != compiler.cached_path(variant.instance, ARCH)
    with pytest.raises(CompileError, match=re.escape(f"{wrong}: the host launches it with {launched._asdict()[name]}")):
        compiler.cubin(wrong, ARCH)


def test_shared_memory_that_nothing_asserts_is_not_launched() -> None:
    variant = Variant(Instance("folder/file", "function", ("float",)), Launched(), False)
    with pytest.raises(template.TemplateError, match=r"declare function_launch in cuda_src/folder/file\.cu"):
        launch(variant, 1, 32, 512)


def test_an_example_does_not_bound_the_shared_memory_of_other_calls() -> None:
    kernel = KERNELS["moe_permute"][0]
    with pytest.raises(template.TemplateError, match=f"{kernel.function}: Launched needs `most`"):
        kernel.variant("another type", launched=Launched(0, 84, (20,)))
