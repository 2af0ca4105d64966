"""Modules that stand for the rest of a peer, where it is not installed: what its test files import beside the kernels.

Python sources of the peer are taken from the folder of the tests as they are. Where one is not there, or needs what is
not installed, its names are placeholders: a test that uses one is skipped, and says which.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import cukern
from cukern.compat import sglang as compat_sglang
from cukern.compat import vllm as compat_vllm
from cukern.compat._limits import refuse
from cukern.compat.vllm import moe_permute_unpermute as permutation
from tests.peers import experts

ROOTS = ("vllm", "flashinfer", "sgl_kernel", "sglang", "xformers", "rich")


def placeholder(name: str) -> Any:
    """A class that skips the test that makes or calls one, and has placeholders for attributes.

    While a file is collected, a call gives another, or what it decorates.
    """

    def skip(_: Any, *args: Any, **kwargs: Any) -> Any:
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(f"needs {name} of the peer")
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else placeholder(f"{name}()")

    class Meta(type):
        def __iter__(cls) -> Any:
            return iter(())

        def __getitem__(cls, _: Any) -> Any:
            return cls

        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return placeholder(f"{name}.{attribute}")

    return Meta(name.rpartition(".")[2], (), {"__new__": skip, "__module__": "tests.peers"})


def _attribute_of(module: str) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{module}.{name}")

    return get


class _Module(Loader):
    """Loads a module of a peer from its source, or gives it placeholders."""

    def __init__(self, source: Path | None) -> None:
        self.source = source

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if self.source is not None:
            module.__file__ = str(self.source)  # Triton reads the sources of its kernels
            try:
                exec(compile(self.source.read_text(), str(self.source), "exec"), vars(module))
                return
            except Exception as error:  # whatever a peer's module meets without the peer
                print(f"tests.peers: {name} has placeholders ({type(error).__name__}: {error})", file=sys.stderr)
        vars(module)["__getattr__"] = _attribute_of(name)


class _Finder(MetaPathFinder):
    """Finds any module of the peers: packages are empty, with the sources of the folder below them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, child = fullname.rpartition(".")
        if fullname.partition(".")[0] not in ROOTS:
            return None
        # What a module has is no module of its own: `unittest.mock.patch` asks for each name of a path as one.
        known = vars(sys.modules[package]).get(child) if package in sys.modules else None
        if known is not None and not isinstance(known, ModuleType):
            return None
        source = self.folder.joinpath(*fullname.split(".")).with_suffix(".py")
        is_package = not source.exists()
        spec = ModuleSpec(fullname, _Module(None if is_package else source), is_package=is_package)
        spec.origin = str(source)
        return spec


# --- what is no kernel --------------------------------------------------------------------------------


def _no() -> bool:
    return False


class _Platform(SimpleNamespace):
    """vLLM's `current_platform` on an NVIDIA GPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_: name in ("is_cuda", "is_cuda_alike")
        return _attribute_of("vllm.platforms.current_platform")(name)


def _seed_everything(seed: int | None) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def _capability(wanted: Any, device_id: int = 0) -> bool:
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability(device_id)
    return (major, minor) >= wanted if isinstance(wanted, tuple) else major * 10 + minor >= wanted


class _DeviceCapability(NamedTuple):
    """A GPU's compute capability, as vLLM's platform gives it."""

    major: int
    minor: int

    def to_int(self) -> int:
        return self.major * 10 + self.minor


def _platform() -> _Platform:
    return _Platform(
        device_type="cuda",
        dispatch_key="CUDA",
        seed_everything=_seed_everything,
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_fp8_fnuz=_no,
        has_device_capability=_capability,
        get_device_capability=lambda device_id=0: _DeviceCapability(*torch.cuda.get_device_capability(device_id)),
        get_device_name=lambda device_id=0: torch.cuda.get_device_name(device_id),
        supports_fp8=lambda: True,
        import_kernels=lambda: None,
        simple_compile_backend="eager",
        use_sync_weight_loader=_no,
        support_deep_gemm=_no,
    )


def fp8_allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """`torch.allclose` that takes FP8 too."""
    return bool(torch.allclose(a.float(), b.float(), rtol, atol, equal_nan))


def fp8_ulp_distance(a: Any, b: Any) -> Any:
    """How many e4m3 numbers apart the elements are."""
    codes = [x.view(torch.uint8).int() for x in (a, b)]
    ordered = [torch.where(x >= 128, 128 - x, x) for x in codes]
    return (ordered[0] - ordered[1]).abs()


def _module(name: str, **names: Any) -> None:
    """Enter a module with these names, and placeholders for all others."""
    module = ModuleType(name)
    vars(module).update(names, __getattr__=_attribute_of(name), __path__=[])
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


# --- vLLM's operators ---------------------------------------------------------------------------------


def _into(function: Callable[..., Any]) -> Callable[..., None]:
    def call(out: Any, x: Any, *_: Any) -> None:
        function(x, out=out)

    return call


def _scaled(out: Any, x: Any, scale: Any, group_shape: Any = None) -> None:
    sys.modules["vllm._custom_ops"].scaled_fp8_quant(x, scale, output=out, group_shape=group_shape)


def _scaled_dynamically(out: Any, x: Any, scale: Any, bound: Any = None, per_token: bool = False) -> None:
    _, found = cukern.scaled_fp8_quant(x, None, None, bound, per_token, out)
    scale.copy_(found)


def _quantized(out: Any, x: Any, norm: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> None:
    """A fused norm and quantization as vLLM rounds it, to 16 bits in between: cukern's is at most one step away."""
    if residual is None:
        cukern.rms_norm_quant(x, weight, epsilon, scale=scale, out_q=out)
    else:
        cukern.fused_add_rms_norm_quant(x, residual, weight, epsilon, scale=scale, out_q=out)
    rounded, _ = cukern.scaled_fp8_quant(norm, scale)
    assert int(fp8_ulp_distance(out, rounded).max()) <= 1
    out.copy_(rounded)


def _quantized_norm(out: Any, x: Any, weight: Any, scale: Any, epsilon: float) -> None:
    _quantized(out, x, cukern.rms_norm(x, weight, epsilon), None, weight, scale, epsilon)


def _quantized_sum(out: Any, x: Any, residual: Any, weight: Any, scale: Any, epsilon: float) -> None:
    norm, total = x.clone(memory_format=torch.contiguous_format), residual.clone()
    cukern.fused_add_rms_norm(norm, total, weight, epsilon)
    _quantized(out, x, norm, residual, weight, scale, epsilon)


def _bounded(found: tuple[Any, Any], rounded: tuple[Any, Any]) -> tuple[Any, Any]:
    """Fused FP8 and scales as vLLM rounds them, `rounded`: cukern's are at most a step of both formats away."""
    (q, scales), (wanted, wanted_scales) = found, rounded
    wanted_scales = wanted_scales.reshape(scales.shape)
    torch.testing.assert_close(scales, wanted_scales, rtol=2**-6, atol=0)
    assert int(fp8_ulp_distance(q, wanted).max()) <= 1
    return q.copy_(wanted), scales.copy_(wanted_scales)


def _quantized_activation(out: Any, x: Any, scale: Any) -> None:
    """A fused activation and quantization as vLLM rounds it, to 16 bits in between: cukern's is at most a step away."""
    cukern.silu_and_mul_quant(x, scale=scale, out_q=out)
    gate, up = x.chunk(2, -1)
    rounded, _ = cukern.scaled_fp8_quant(torch.nn.functional.silu(gate) * up, scale)
    assert int(fp8_ulp_distance(out, rounded).max()) <= 1
    out.copy_(rounded)


def _norm_of(x: Any, weight: Any, epsilon: float, residual: Any) -> Any:
    """The norm as vLLM rounds it: before the weight too."""
    if residual is None:
        return cukern.rms_norm(x.contiguous(), None, epsilon) * weight
    norm, total = x.clone(memory_format=torch.contiguous_format), residual.clone()
    cukern.fused_add_rms_norm(norm, total, None, epsilon)
    return norm * weight


def _norm_by_tokens(x: Any, weight: Any, epsilon: float, dtype: Any, scale_ub: Any = None, residual: Any = None) -> Any:
    norm = _norm_of(x, weight, epsilon, residual)
    found = compat_vllm.rms_norm_dynamic_per_token_quant(x, weight, epsilon, dtype, scale_ub, residual)
    return _bounded(found, cukern.scaled_fp8_quant(norm, None, None, None, True))


def _norm_by_blocks(
    x: Any,
    weight: Any,
    epsilon: float,
    dtype: Any,
    group_size: list[int],
    scale_ub: Any = None,
    residual: Any = None,
    *layout: Any,
) -> Any:
    norm = _norm_of(x, weight, epsilon, residual)
    arguments = x, weight, epsilon, dtype, group_size, scale_ub, residual, *layout
    found = compat_vllm.rms_norm_per_block_quant(*arguments)
    return _bounded(found, cukern.per_token_group_quant_fp8(norm, group_size[1]))


def _activation_by_blocks(x: Any, group_size: int, *others: Any, **options: Any) -> Any:
    found = compat_vllm.silu_and_mul_per_block_quant(x, group_size, *others, **options)
    gate, up = x.chunk(2, -1)
    return _bounded(found, cukern.per_token_group_quant_fp8(torch.nn.functional.silu(gate) * up, group_size))


def _by_groups(x: Any, q: Any, scales: Any, group_size: int, eps: float, low: float, high: float, *flags: Any) -> None:
    if flags and flags[0]:
        raise NotImplementedError("per_token_group_fp8_quant: use_ue8m0 must be False with cukern")
    _, found = cukern.per_token_group_quant_fp8(x, group_size, eps, out_q=q)
    scales.copy_(found)


def _by_groups_of_int8(x: Any, q: Any, scales: Any, group_size: int, eps: float, *_: Any) -> None:
    _, found = cukern.per_token_group_quant_int8(x, group_size, eps, truncate=True, out_q=q)
    scales.copy_(found)


def _activation_of_experts(y: Any, counts: Any, group_size: int = 128, eps: float = 1e-10) -> tuple[Any, Any]:
    """vLLM 0.10.2's `silu_mul_fp8_quant_deep_gemm`."""
    found: tuple[Any, Any] = cukern.silu_and_mul_quant(y, "silu", group_size=group_size, expert_num_tokens=counts)
    return found


class _Operators:
    """A namespace of `torch.ops`: the operators below, and placeholders."""

    def __init__(self, name: str, **operators: Any) -> None:
        self.name = name
        vars(self).update(operators)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"torch.ops.{self.name}.{name}")


def _convert_fp8(output: Any, x: Any, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Bytes of FP8 from numbers over a scale, or numbers from bytes times it: how vLLM's files make their caches."""
    dtype = torch.float8_e5m2 if "e5m2" in kv_dtype else torch.float8_e4m3fn
    if output.element_size() == 1:
        most = torch.finfo(dtype).max
        output.view(dtype).copy_((x.float() / scale).clamp(-most, most))
    else:
        output.copy_(x.view(dtype).float() * scale)


def _swap_blocks(src: Any, dst: Any, *sizes_and_mapping: Any) -> None:
    """`swap_blocks`, also without the bytes of a block, as in vLLM 0.10.2."""
    *sizes, mapping = sizes_and_mapping
    block_bytes = sizes[0] if sizes else src.stride(0) * src.element_size()
    cukern.swap_blocks(src, dst, block_bytes, mapping)


def _gather_and_maybe_dequant_cache(src: Any, dst: Any, table: Any, ends: Any, fifth: Any, *others: Any) -> None:
    """`gather_and_maybe_dequant_cache`, also with the batch as the fifth argument, as in vLLM 0.10.2."""
    if not isinstance(fifth, int):
        compat_vllm.gather_and_maybe_dequant_cache(src, dst, table, ends, fifth, *others)
        return
    kv_cache_dtype, scale, *starts = others
    cukern.gather_cache(src, dst, table, ends, fifth, *starts, kv_cache_dtype=kv_cache_dtype, scale=scale)


def _fused_topk(
    hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, indices_type: Any = None
) -> tuple[Any, Any, Any]:
    """vLLM's function of this name over its `topk_softmax`."""
    weights, *ids = (
        torch.empty(hidden_states.shape[0], topk, dtype=dtype or torch.int32, device=hidden_states.device)
        for dtype in (torch.float32, indices_type, torch.int32)
    )
    compat_vllm.topk_softmax(weights, *ids, gating_output, renormalize)
    return weights, ids[0], ids[1]


def _moe_permute(*args: Any, **kwargs: Any) -> Any:
    """`moe_permute`, also with `align_block_size`, as in vLLM 0.10.2, whose function is cukern's."""
    function = cukern.moe_permute if "align_block_size" in kwargs else permutation.moe_permute
    return function(*args, **kwargs)


def _enter_operators() -> None:
    vars(sys.modules["vllm.model_executor.layers.fused_moe.moe_permute_unpermute"])["moe_permute"] = _moe_permute
    vars(sys.modules["vllm.model_executor.layers.fused_moe"])["fused_topk"] = _fused_topk
    ops = sys.modules["vllm._custom_ops"]
    vars(ops).update(
        convert_fp8=_convert_fp8,
        swap_blocks=_swap_blocks,
        gather_and_maybe_dequant_cache=_gather_and_maybe_dequant_cache,
        rms_norm_dynamic_per_token_quant=_norm_by_tokens,
        rms_norm_per_block_quant=_norm_by_blocks,
        silu_and_mul_per_block_quant=_activation_by_blocks,
    )
    names = ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_new", "gelu_fast", "gelu_quick")
    activations = {name: _into(getattr(cukern, name)) for name in names}
    torch.ops._C = _Operators(
        "_C",
        rms_norm=ops.rms_norm,
        fused_add_rms_norm=ops.fused_add_rms_norm,
        static_scaled_fp8_quant=_scaled,
        dynamic_scaled_fp8_quant=_scaled_dynamically,
        dynamic_per_token_scaled_fp8_quant=functools.partial(_scaled_dynamically, per_token=True),
        rms_norm_static_fp8_quant=_quantized_norm,
        fused_add_rms_norm_static_fp8_quant=_quantized_sum,
        silu_and_mul_quant=_quantized_activation,
        per_token_group_fp8_quant=_by_groups,
        per_token_group_quant_int8=_by_groups_of_int8,
        apply_repetition_penalties_=ops.apply_repetition_penalties,
        **activations,
    )
    torch.ops._moe_C = _Operators("_moe_C", moe_sum=ops.moe_sum)
    torch.ops._C_cache_ops = _Operators("_C_cache_ops")


def _enter_experts() -> None:
    """vLLM's layers of experts, by the modules of 0.10.2 and of 0.33.0."""
    root = "vllm.model_executor.layers.fused_moe"
    kernels = {
        "fused_experts": experts.fused_experts,
        "fused_moe": experts.fused_moe_of(_fused_topk),
        "fused_topk": _fused_topk,
    }
    parts = {
        "fused_moe": kernels | {"modular_triton_fused_moe": experts.modular_triton_fused_moe},
        "config": experts.configs(),
        "modular_kernel": {"FusedMoEModularKernel": experts.FusedMoEKernel, "FusedMoEKernel": experts.FusedMoEKernel},
        "all2all_utils": {"maybe_make_prepare_finalize": lambda *_, **__: None},
        "prepare_finalize": {},
        "prepare_finalize.batched": {"BatchedPrepareAndFinalize": experts.BatchedPrepareAndFinalize},
        "experts.triton_moe": {"TritonExperts": experts.TritonExperts},
        "batched_deep_gemm_moe": {"silu_mul_fp8_quant_deep_gemm": _activation_of_experts},
    }
    batched = ("BatchedPrepareAndFinalize", "BatchedTritonExperts", "NaiveBatchedExperts")
    names = {name: getattr(experts, name) for name in (*batched, "invoke_moe_batched_triton_kernel")}
    for module in ("fused_batched_moe", "experts.fused_batched_moe"):
        parts[module] = names
    # The gates are vLLM's own sources over its kernels of gates, which are cukern's.
    gates = importlib.import_module(f"{root}.fused_moe")
    names_of_gates = ("grouped_topk", "fused_grouped_topk")
    parts["fused_moe"] |= {name: vars(gates)[name] for name in names_of_gates if name in vars(gates)}
    for module, found in parts.items():
        _module(f"{root}.{module}", **found)
    # The package has the function `fused_moe` of 0.10.2, not the module of that name, and activations of 0.33.0.
    activation = importlib.import_module(f"{root}.activation")
    vars(sys.modules[root]).update(kernels, MoEActivation=activation.MoEActivation)
    products = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    for name in ("w8a8_block_fp8_matmul", "w8a8_triton_block_scaled_mm"):
        vars(products)[name] = experts.refused(name, "A", "the rows of experts (moe_gemm)", "those of one matrix")
    for module, found in experts.unknown_weights().items():
        path = f"vllm.model_executor.layers.quantization.utils.{module}"
        if module == "quant_utils":
            vars(importlib.import_module(path)).update(found)
        else:
            _module(path, **found)


def _flash_mla_with_kvcache(*args: Any, descale_q: Any = None, descale_k: Any = None, **kwargs: Any) -> Any:
    """vLLM's function of this name, which takes FP8 queries and caches too."""
    if descale_q is not None or descale_k is not None:
        refuse("flash_mla_with_kvcache", "descale_q", "None", "the scale of FP8 queries")
    return compat_vllm.flash_mla_with_kvcache(*args, **kwargs)


def _enter_flash_mla() -> None:
    """vLLM's modules around its build of FlashMLA."""
    of_fp8 = experts.refused("flash_mla_with_kvcache_fp8", "q", "of 16 bits", "float8_e4m3fn")
    names = {
        "get_mla_metadata": compat_vllm.get_flash_mla_metadata,
        "flash_mla_with_kvcache": _flash_mla_with_kvcache,
        "flash_mla_with_kvcache_fp8": of_fp8,
        "get_mla_metadata_dense_fp8": of_fp8,
        "is_flashmla_supported": lambda: (True, None),
        "is_flashmla_dense_supported": lambda: (True, None),
    }
    _module("vllm.attention.ops.flashmla", **names)
    _module("vllm.v1.attention.ops.flashmla", **names)


def _open(name: str, module: ModuleType) -> None:
    """Let a module that `enable` entered have placeholders for what it does not know."""
    own, others = vars(module).get("__getattr__"), _attribute_of(name)

    def get(attribute: str) -> Any:
        try:
            return own(attribute) if own else others(attribute)
        except AttributeError:
            return others(attribute)

    vars(module)["__getattr__"] = get


def _shared_memory(device: int = 0) -> int:
    """Bytes of shared memory that a block may have."""
    return (
        torch.cuda.get_device_properties(device).shared_memory_per_block_optin if torch.cuda.is_available() else 2**16
    )


def _triton(maths: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's `triton_utils` has: Triton, or of it what is no kernel."""
    try:
        import triton
        from triton import language
    except ImportError:
        return {"HAS_TRITON": False, "triton": SimpleNamespace(**maths, jit=placeholder("triton.jit"))}
    return {"HAS_TRITON": True, "triton": triton, "tl": language}


#: vLLM's configuration, with all of its own operators.
CONFIG = SimpleNamespace(
    compilation_config=SimpleNamespace(
        custom_ops=["all"],
        enabled_custom_ops=Counter(),
        disabled_custom_ops=Counter(),
        backend="eager",
        level=0,
        mode=0,
        use_inductor=False,
        static_forward_context={},
    ),
    scheduler_config=SimpleNamespace(),
)


def _enter_config() -> None:
    def with_given(of: SimpleNamespace) -> Callable[..., SimpleNamespace]:
        return lambda **given: SimpleNamespace(**vars(of) | given)

    _module(
        "vllm.config",
        CompilationConfig=with_given(CONFIG.compilation_config),
        CompilationLevel=SimpleNamespace(NO_COMPILATION=0, DYNAMO_AS_IS=1, DYNAMO_ONCE=2, PIECEWISE=3),
        VllmConfig=with_given(CONFIG),
        get_cached_compilation_config=functools.cache(lambda: CONFIG.compilation_config),
        get_current_vllm_config=lambda: CONFIG,
        get_current_vllm_config_or_none=lambda: CONFIG,
        set_current_vllm_config=lambda *_, **__: contextlib.nullcontext(),
    )


def _reference_norm(x: Any, weight: Any, epsilon: float, *_: Any) -> Any:
    """vLLM's norm in torch, the reference of its fused norms; its other files would compare it with itself."""
    if "test_fused_quant_layernorm" not in os.environ.get("PYTEST_CURRENT_TEST", ""):
        pytest.skip("needs the layers of vllm, which compute the norm and its reference alike here")
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype)


def _reference_sum(x: Any, residual: Any, weight: Any, epsilon: float, *_: Any) -> Any:
    _reference_norm(x, weight, epsilon)  # which may skip the case
    total = x.float() + residual.float()
    y = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype), total.to(x.dtype)


def _enter_ir() -> None:
    total = SimpleNamespace(maybe_inplace=_reference_sum)
    _module("vllm.ir")
    _module("vllm.ir.ops", rms_norm=_reference_norm, fused_add_rms_norm=total)


def _enter_flashinfer_utils() -> None:
    """What FlashInfer's files ask of the GPU; there is nothing to compile ahead."""
    _module(
        "flashinfer.utils",
        get_compute_capability=torch.cuda.get_device_capability,
        device_support_pdl=lambda device: torch.cuda.get_device_capability(device)[0] >= 9,
        has_flashinfer_jit_cache=lambda: True,
    )


def _align_used_blocks(ids: Any, experts: int, block_size: int, rows: Any, blocks: Any, end: Any, *others: Any) -> None:
    """SGLang's `moe_align_block_size`, which leaves blocks that are not used as they are; cukern gives them -1.

    SGLang's kernel and its reference read the memory of the experts' numbers as if they were contiguous, which those
    of its tests are not; cukern minds strides.
    """
    ids = ids.as_strided(ids.shape, (ids.shape[1], 1))
    found = torch.empty_like(blocks)
    compat_sglang.moe_align_block_size(ids, experts, block_size, rows, found, end, *others)
    is_used = torch.arange(blocks.shape[0], device=blocks.device) * block_size < end
    assert bool((found[~is_used] == -1).all())
    blocks.copy_(torch.where(is_used, found, blocks))


def _enter_sglang_utils() -> None:
    """What SGLang's references ask of the machine, which is one with NVIDIA's GPUs; they are run as they are."""
    others = ("is_cpu", "is_hip", "is_musa", "is_npu", "is_xpu", "cpu_has_amx_support", "get_bool_env_var")
    others += ("is_sm100_supported", "is_sm120_supported")
    answers = dict.fromkeys(others, lambda *_, **__: False)
    _module(
        "sglang.srt.utils",
        **answers,
        is_cuda=lambda: True,
        get_compiler_backend=lambda *_, **__: "eager",
        ceil_align=lambda a, b: -(-a // b) * b,
        ceil_div=lambda a, b: -(-a // b),
    )


def _opcheck(operator: Any, *_: Any, **__: Any) -> dict[str, str]:
    """Nothing: the operators are no operators of torch here; cukern's own are checked by its own tests.

    A test of nothing else is skipped.
    """
    if "_opcheck" in os.environ.get("PYTEST_CURRENT_TEST", ""):
        pytest.skip("needs operators of vllm in torch")
    return {}


def _enter_test_utils(folder: Path) -> None:
    """What vLLM's test files share: references in torch of its own, without the checks of its operators."""
    source = folder / "tests" / "kernels" / "utils.py"
    module = ModuleType("tests.kernels.utils")
    sys.modules[module.__name__] = module
    if source.exists():
        _Module(source).exec_module(module)
    checks = {"opcheck": _opcheck, "DEFAULT_OPCHECK_TEST_UTILS": (), "ALL_OPCHECK_TEST_UTILS": ()}
    vars(module).update(checks, fp8_allclose=fp8_allclose, fp8_ulp_distance=fp8_ulp_distance)
    vars(module)["__getattr__"] = _attribute_of(module.__name__)


def install(folder: Path) -> None:
    """Put the modules in place; `cukern.compat.enable` has entered those of the kernels."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ROOTS:
            _open(name, module)
    sys.meta_path.append(_Finder(folder))
    if "as far as cukern has it" in str(sys.modules["flashinfer"].__doc__):
        _enter_flashinfer_utils()
    if "as far as cukern has it" in str(sys.modules["sgl_kernel"].__doc__):
        _enter_sglang_utils()
        vars(sys.modules["sgl_kernel"])["moe_align_block_size"] = _align_used_blocks
    if "as far as cukern has it" not in str(sys.modules["vllm"].__doc__):
        return  # the real one
    maths = {
        "cdiv": lambda a, b: -(-a // b),
        "round_up": lambda a, b: -(-a // b) * b,
        "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
    }
    _enter_config()
    _enter_ir()
    _module("vllm.platforms", current_platform=_platform())
    _module("vllm.triton_utils", **_triton(maths))
    _module("vllm.utils", get_max_shared_memory_bytes=_shared_memory, has_deep_gemm=_no, **maths)
    _module("vllm.utils.math_utils", **maths)
    _module("vllm.utils.torch_utils", set_random_seed=_seed_everything)
    _module("vllm.utils.import_utils", has_deep_gemm=_no, has_triton_kernels=_no)
    _module("tests.utils")
    ops = vars(sys.modules["vllm._custom_ops"])
    ops["get_max_shared_memory_per_block_device_attribute"] = _shared_memory
    _enter_operators()
    _enter_experts()
    _enter_flash_mla()
    _enter_test_utils(folder)
