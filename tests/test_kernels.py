"""Every template, compiled for every architecture: that it can be, and that registers do not spill."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cupy_backends.cuda.libs import nvrtc as nvrtc_binding

import cukern.runtime.compile as compiler
from cukern.commands import Resources, resources
from cukern.ops import _kv_cache as kv_cache_parts
from cukern.ops import _mla_decode as mla_decode_parts
from cukern.ops import (
    _moe_permute,
    _quantization,
    _sampling,
    decoder_attention,
    embedding,
    moe_activation,
    moe_gate,
    moe_gemm,
    norm,
    paged_attention,
    rotary_embedding,
    varlen_attention,
)
from cukern.ops import _padding as padding_parts
from cukern.ops import _paged_attention as paged_attention_parts
from cukern.ops.moe_gemm import routed
from cukern.runtime import arrays
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import KERNELS, Kernel, Variant

ARCHS = ("90a", "80", "100a", "120a")
DTYPES = ("float32", "float16", "bfloat16")
SHARED_BYTES = {"99 KiB": 99 << 10, "163 KiB": 163 << 10, "227 KiB": 227 << 10}


def _kinds(dtype: str) -> Iterator[int]:
    """Bytes of a load, from the widest to one element."""
    return (width for width in (16, 8, 4, 2, 1) if width >= arrays.ITEM_SIZE[dtype])


def _decoder_attention() -> Iterator[Variant]:
    op = decoder_attention
    for dtype, dim, wide in itertools.product(DTYPES, range(1, op.MAX_DIM + 1), (False, True)):
        yield op._choose(dtype, dim, wide, "dynamic")[0]
        yield op._combiner(dtype)
        if dtype == "bfloat16":
            yield from (op._choose(dtype, dim, wide, "dynamic", mode)[0] for mode in op.MODES[1:])


def _embedding() -> Iterator[Variant]:
    for dtype, add in itertools.product(DTYPES, (False, True)):
        for width in _kinds(dtype):
            yield embedding._variant(dtype, width, add)


def _rotary_embedding() -> Iterator[Variant]:
    op = rotary_embedding
    for dtype, wide, layout in itertools.product(DTYPES, (False, True), op.LAYOUTS):
        yield from (op._variant(dtype, angles, wide, layout) for angles in dict.fromkeys((dtype, "float32")))
    for dtype, layout, norms in itertools.product(DTYPES, op.LAYOUTS, (True, False)):
        for head_dim, other in ((32, dtype), (64, "float32"), (128, dtype), (256, dtype), (512, "float32")):
            yield op._fused_variant(dtype, other, other, head_dim, layout, norms)


def _kv_cache() -> Iterator[Variant]:
    op = kv_cache_parts
    for dtype, cache_format in itertools.product(DTYPES, ("SAME", "E4M3")):
        for aligned, parts in itertools.product((True, False), (1, op.PARTS)):
            yield op.blocks_variant(dtype, cache_format, aligned, parts)
        for width in op.WIDTHS if cache_format == "SAME" else _kinds(dtype):
            yield op.gather_variant(dtype, cache_format, width)
            for concat in (False, True):
                yield op.rows_variant(dtype, cache_format, width, concat)
    for dtype, aligned in itertools.product(DTYPES, (True, False)):
        yield op.store_latents_variant(dtype, aligned)
        yield op.gather_latents_variant(dtype, aligned)
    for width in op.WIDTHS:
        yield op.copy_variant(width)
    # E5M2 has other conversions than E4M3, and the same paths.
    yield op.rows_variant("float16", "E5M2", 2, False)
    yield op.blocks_variant("float32", "E5M2", True, op.PARTS)
    yield op.gather_variant("float32", "E5M2", 4)


def _mla_decode() -> Iterator[Variant]:
    op = mla_decode_parts
    for rows, most in itertools.product((16, 32), SHARED_BYTES.values()):
        yield op.mma_variant(op.best_form("bfloat16", False, rows, (0, 0), most))
    yield op.mma_variant(op.best_form("float16", True, 16, (576, 512), SHARED_BYTES["227 KiB"]))
    yield op.wgmma_variant("float16", False, False)
    yield op.wgmma_variant("float16", False, True, 656)
    yield op.wgmma_variant("float16", True, True)
    yield op.two_loaders_variant("float16", False, True)
    for rows, (dims, is_fp8) in itertools.product(
        (16, 64), (((576, 512), False), ((576, 512), True), ((512, 512), True))
    ):
        yield op.mma_variant(op.best_form("bfloat16", is_fp8, rows, dims, SHARED_BYTES["99 KiB"], True))
        yield op.mma_variant(op.best_form("bfloat16", is_fp8, rows, dims, SHARED_BYTES["227 KiB"], True))
    yield op.combine_variant("float16", 0, op.ONE_BLOCK)


def _moe_activation() -> Iterator[Variant]:
    yield moe_activation._variant("bfloat16", 1, 2)
    yield moe_activation._variant("float32", 1, 4)
    yield moe_activation._variant("bfloat16", 1, 16, gate_last=True)
    yield moe_activation._variant("float16", 1, 2, gate_last=True)
    yield moe_activation._bias_variant("float16", "gelu", 2)
    yield moe_activation._bias_variant("float32", "gelu", 4)


def _moe_gate() -> Iterator[Variant]:
    # A bias of each float dtype that the instances of the import do not take, in each way of loading it.
    op = moe_gate.kernels
    config = op.SPECIALIZED[0]
    for dtype, lanes, bias_type in (("bfloat16", 32, "__half"), ("float32", 8, "double"), ("float16", 16, "double")):
        yield op._variant(dtype, config, lanes, (bias_type,))
    # One warp per token for more slots than gate_by_warp deals, and that one with another bias and other scores.
    yield op._variant("float32", config, 32)
    yield op._by_warp_variant("bfloat16", config, ("double",))
    yield op._by_warp_variant("float32", op.Config(1024, 1, "softmax", biased=True))
    yield op._dynamic("float32", 16, 16, ("__nv_bfloat16",))
    yield op._dynamic("float16", 32, 32, ("double",))


def _moe_gemm() -> Iterator[Variant]:
    op = moe_gemm.kernels
    yield op.WGMMA_FORMS[-1].variant("float16", 0)
    yield moe_gemm.fp8.Fp8Wgmma(128, 1).variant("bfloat16", False, 0)
    yield moe_gemm.fp8.Fp8Wgmma(256, 2).variant("bfloat16", True, 1)
    yield moe_gemm.fp8.Fp8Wgmma(288, 2).variant("float16", True, 0)
    yield op.stream_variant(1, "bfloat16", "FP8", False, 0)
    one = moe_gemm.stream_one
    for tokens, dtype in itertools.product(one.TOKENS, ("bfloat16", "float16")):
        for form in one.FORMS:
            yield one.variant_of(tokens, dtype, 65 if dtype == "bfloat16" else 0, form)
    for k in (256, 512, 768, 1280, 2048, 7168):
        yield routed.routed_variant("float16", 65, routed.form_for(k))
        yield routed.summed_variant("float16", 64, routed.form_for(k), 2)
    for weights in ("MXFP4", "NVFP4"):
        yield from (op.prepare_variant(weights), op.prepare_variant(weights, True))
        yield op.FP4_FORMS[-1].variant("float16", weights, 1, False)
    yield from (moe_gemm.folded.prepare_variant(), moe_gemm.folded.prepare_variant(True))
    yield moe_gemm.folded.FOLDED_FORMS[-1].variant("float16", 1)
    of_4_bits = itertools.product(("MXFP4", "NVFP4"), ("bfloat16", "float16"))
    for (weights, dtype), most in itertools.product((("FP8", "bfloat16"), *of_4_bits), SHARED_BYTES.values()):
        is_by_blocks = weights == "FP8"
        form = op.MMA_FORMS[weights][2].fit(weights, is_by_blocks, most)
        yield form.variant(dtype, weights, is_by_blocks, 0)


def _permutations() -> Iterator[Variant]:
    op = _moe_permute
    yield op.count_variant(8)
    for experts, (chunks, cluster) in itertools.product((32, 256, 512), ((16, 1), (64, 1), (32, 8))):
        yield op.chunks_variant(8, experts, chunks, cluster)
    for width, items in itertools.product((8, 4, 2, 1), (1, op._PERMUTE_ITEMS)):
        yield op.permute_variant(width, items)
    for dtype in DTYPES:
        for width in _kinds(dtype):
            yield op.unpermute_variant(dtype, width, 0)


def _norm() -> Iterator[Variant]:
    op = norm
    for dtype, add, width in itertools.product(DTYPES, (False, True), (8, 2048, 9000)):
        yield op._variant(op._Form(dtype, dtype, add), width, False, False)
    for width, wide in itertools.product((8, 1024, 9000), (False, True)):
        yield op._variant(op._Form("bfloat16", "float32", True), width, False, wide)
    for dtype, (result, group) in itertools.product(DTYPES, (("BY_TENSOR", 0), ("BY_ROW", 0), ("BY_GROUP", 32))):
        for width, wide in ((64, False), (9056, True)):
            yield op._variant(op._Form(dtype, dtype, True, result, group), width, False, wide)
    for dtype, add, width in itertools.product(DTYPES, (False, True), (8, 2048, 9000)):
        yield op._layer_variant(op._Form(dtype, dtype, add), width, False, False)
    for width, wide in itertools.product((8, 1024, 9000), (False, True)):
        yield op._layer_variant(op._Form("bfloat16", "float32", True), width, False, wide)


def _padding() -> Iterator[Variant]:
    for name, dtype in itertools.product(padding_parts.THREADS_ITEMS, DTYPES):
        for width in _kinds(dtype):
            yield padding_parts.variant_of(name, dtype, width)


def _paged_attention() -> Iterator[Variant]:
    op = paged_attention_parts
    dynamic = op.Form("bfloat16", "bfloat16", "vllm", 0, 128, 0, 2, True)
    for dims, layout in ((64, "vllm"), (128, "flash"), (256, "vllm")):
        yield dynamic._replace(dims=dims, layout=layout).variant
    pairs, alone = op.Dealt(2, "EITHER", True, 136), op.Dealt(1, "EITHER", at_once=2)
    few = [op._FEW[7], op._FEW[15], pairs, alone]
    for layout, dealt in zip(("flash", "vllm", "flash", "flash", "vllm"), (op.Dealt(), *few), strict=True):
        yield dynamic._replace(layout=layout, dealt=dealt, extras=False).variant
    for cache, dealt in (("float8_e4m3fn", op._FEW_IN_FP8[15]), ("bfloat16", op.Dealt(1, "CLUSTERS"))):
        yield dynamic._replace(cache=cache, dealt=dealt).variant
    # Up to 8 rows, with extras and large heads.
    few_rows = dynamic._replace(team=1, rows=8)
    for dims, cache, dealt in ((128, "float8_e5m2", op._ALONE_IN_FP8), (256, "bfloat16", op._FEW_OF_LARGE_HEADS[8])):
        yield few_rows._replace(dims=dims, cache=cache, dealt=dealt).variant
    yield op.scalar.variant("float", "float", "VLLM", "true")
    yield op.scalar.variant("__half", "__nv_fp8_e5m2", "FLASH", "false")
    yield paged_attention._merge.variant("float", 4, "false")
    yield paged_attention._merge.variant("float", 1, "true")
    for heads_first in (True, False):
        yield paged_attention.merge_variant("bfloat16", 8, heads_first, 1 if heads_first else 2, True)


def _quantizations() -> Iterator[Variant]:
    op = _quantization
    yield op._groups_variant("float16", "E4M3", 4, 8)
    yield op._rows_variant("bfloat16", "INT8_AZP", 0, 1)
    yield op._magnitude_variant("float16", 1)
    yield op._tensor_variant("float32", "INT8_AZP", 0, 1, False)
    yield op._fp4_variant("float16", "NVFP4", 2)
    yield op._read_fp4_variant("float32", "NVFP4", False)


def _samplers() -> Iterator[Variant]:
    op = _sampling
    # Each takes a second or two, so each dtype, mode and cluster appears, but not with all others.
    yield op.sampler("bfloat16", True, 1)
    yield op.sampler("float16", False, op.CLUSTER)
    yield op.best_taker("float16", 1)
    yield op.renormalizer("float16", "SOFTMAX", 1)
    yield op.renormalizer("bfloat16", "TOP_P_RENORM", 1)
    yield op.renormalizer("float32", "TOP_K_MASK", op.CLUSTER)
    yield op.renormalizer("float16", "TOP_K_RENORM", op.CLUSTER)


def _varlen_attention() -> Iterator[Variant]:
    for dtype, dim, wide in itertools.product(DTYPES, varlen_attention.DIMS, (False, True)):
        yield varlen_attention._by_fma(dtype, dim, wide).variant


#: What is compiled at its first use, by stem: one of each path through the templates.
AT_FIRST_USE = {
    "decoder_attention": _decoder_attention,
    "embedding": _embedding,
    "kv_cache": _kv_cache,
    "mla_decode": _mla_decode,
    "moe_activation": _moe_activation,
    "moe_gate": _moe_gate,
    "moe_gemm": _moe_gemm,
    "moe_permute": _permutations,
    "norm": _norm,
    "padding": _padding,
    "paged_attention": _paged_attention,
    "quantization": _quantizations,
    "rotary_embedding": _rotary_embedding,
    "sampling": _samplers,
    "varlen_attention": _varlen_attention,
}
#: The stems of which no such variant spills.
NONE_SPILLS = {
    "decoder_attention", "embedding", "kv_cache", "moe_activation", "moe_gate", "moe_gemm", "moe_permute", "norm",
    "padding", "rotary_embedding", "varlen_attention",
}  # fmt: skip

#: The stems that list every product of their template parameters: for an architecture other than sm_90a, one of so many
#: is compiled beside those of the import. The numbers divide none of the sides, so that each value comes.
MANY_ALIKE = {"all_to_all": 5}

#: Bytes that some releases of NVRTC spill all the same, by kernel and architecture: a few registers of the most that a
#: thread can have there, or of the 128 with which a multiprocessor holds two blocks. All other releases spill none.
ALLOWED_SPILLS = {
    ("all_to_all.combine_tokens", "90a"): {"13.5": 76},
    ("decoder_attention.decoder_attention", "120a"): {"13.0": 24},
    ("decoding.apply_penalties", "100a"): {"12.8": 16, "12.9": 16},
    ("mla_decode.attend_mma", "100a"): {"12.9": 52},
    ("moe_gate.moe_gate", "80"): {"13.5": 8},
    ("moe_gate.moe_gate", "90a"): {"13.5": 8},
    ("moe_gemm.gemm_fp8_blocks", "90a"): {"13.5": 112},
    ("moe_gemm.gemm_stream_routed", "90a"): {"13.5": 8},
}


def _at_first_use(kernel: Kernel) -> list[Instance]:
    listed = {*kernel.at_import, *kernel.specialized}
    variants = AT_FIRST_USE[kernel.stem]() if kernel.stem in AT_FIRST_USE else ()
    found = dict.fromkeys(x.instance for x in variants if x.instance.function == kernel.function)
    return [instance for instance in found if instance not in listed]


def _work(kernel: Kernel, arch: str) -> list[Instance]:
    """All that the op lists for `arch`; of what is compiled at its first use all for sm_90a, and half for sm_80.

    What a later GPU is given of it takes no other path through the templates than sm_90a. The same is true of what an
    op of `MANY_ALIKE` lists.
    """
    rest = {"90a": _at_first_use(kernel), "80": _at_first_use(kernel)[::2]}.get(arch, [])
    if (kernel.function, arch) == ("attend", "80"):
        rest = [instance for instance in rest if instance.arguments[9] == 1]  # there are no clusters of blocks
    listed = [*dict.fromkeys((*kernel.at_import, *kernel.specialized))]
    if kernel.stem in MANY_ALIKE and arch != "90a":
        others = [instance for instance in kernel.specialized if instance not in kernel.at_import]
        listed = [*kernel.at_import, *others[ARCHS.index(arch) :: MANY_ALIKE[kernel.stem]]]
    return [instance for instance in listed if instance not in kernel.unused.get(arch, ())] + rest


EVERY_KERNEL = {f"{k.stem}.{k.function}": k for kernels in KERNELS.values() for k in kernels}


def _templates() -> Iterator[tuple[str, str]]:
    """The stem and the name of each `__global__` template."""
    for path in compiler.CUDA_SRC.rglob("*.cu*"):
        stem = Path(path.relative_to(compiler.CUDA_SRC).parts[0]).stem
        for head in re.findall(r"__global__\b([^{;]*)\{", path.read_text()):
            # The parameters are the last pair of parentheses; those before them are of the launch bounds.
            yield stem, re.findall(r"(\w+)\s*\(", head)[-1]


def test_each_template_has_an_instance() -> None:
    templates = set(_templates())
    assert templates
    assert templates == {(kernel.stem, kernel.function) for kernel in EVERY_KERNEL.values()}
    for name, kernel in EVERY_KERNEL.items():
        assert any(_work(kernel, arch) for arch in ARCHS), f"no instance of {name} is compiled by a test"


def test_all_sides_of_the_sampling_templates_are_compiled() -> None:
    types, clusters = {"float", "__half", "__nv_bfloat16"}, {1, _sampling.CLUSTER}
    modes = {"sample": {"true", "false"}, "renormalize": {"SOFTMAX", "TOP_K_RENORM", "TOP_P_RENORM", "TOP_K_MASK"}}
    for kernel in KERNELS["sampling"]:
        compiled = [instance.arguments for instance in _work(kernel, "90a")]
        sides = [types, *([modes[kernel.function]] if kernel.function in modes else []), clusters]
        assert [set(values) for values in zip(*compiled, strict=True)] == sides


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
    program = nvrtc_binding.createProgram(job["source"], job["filename"], (), ())
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
    allowed = ALLOWED_SPILLS.get((f"{kernel.stem}.{kernel.function}", arch), {}).get(release, 0)
    spilled, taken_by = {}, {}
    for begin in range(0, len(instances), AT_ONCE):
        taken_by |= compile_together(instances[begin : begin + AT_ONCE], arch)
    for instance, taken in taken_by.items():
        assert taken.registers > 0
        is_held = instance in kernel.specialized or kernel.stem in NONE_SPILLS
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
