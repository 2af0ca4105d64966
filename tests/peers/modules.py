"""Modules that stand for the rest of a peer, where it is not installed: what its test files import beside the kernels.

Python sources of the peer are taken from the folder of the tests as they are. Where one is not there, or needs what is
not installed, its names are placeholders: a test that uses one is skipped, and says which.
"""

from __future__ import annotations

import contextlib
import enum
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
from cukern.compat import vllm as compat_vllm
from cukern.compat._limits import refuse
from cukern.compat.flash_attn import vllm_flash_attn
from tests.peers import experts, operators
from tests.peers.placeholders import attribute_of, placeholder

ROOTS = ("vllm", "flashinfer", "sgl_kernel", "sglang", "xformers", "rich")


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
        vars(module)["__getattr__"] = attribute_of(name)


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
        return attribute_of("vllm.platforms.current_platform")(name)


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
        set_additional_forward_context=lambda *_, **__: {},
    )


def _module(name: str, **names: Any) -> None:
    """Enter a module with these names, and placeholders for all others."""
    module = ModuleType(name)
    vars(module).update(names, __getattr__=attribute_of(name), __path__=[])
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def _enter_operators() -> None:
    vars(sys.modules["vllm.model_executor.layers.fused_moe.moe_permute_unpermute"])["moe_permute"] = (
        operators.moe_permute
    )
    vars(sys.modules["vllm.model_executor.layers.fused_moe"])["fused_topk"] = operators.fused_topk
    ops = sys.modules["vllm._custom_ops"]
    vars(ops).update(
        convert_fp8=operators.convert_fp8,
        moe_align_block_size=operators.align_blocks,
        swap_blocks=operators.swap_blocks,
        gather_and_maybe_dequant_cache=operators.gather_and_maybe_dequant_cache,
        rms_norm_dynamic_per_token_quant=operators.norm_by_tokens,
        rms_norm_per_block_quant=operators.norm_by_blocks,
    )
    names = ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_new", "gelu_fast", "gelu_quick")
    activations = {name: operators.into(getattr(cukern, name)) for name in names}
    torch.ops._C = operators.Operators(
        "_C",
        rms_norm=ops.rms_norm,
        fused_add_rms_norm=ops.fused_add_rms_norm,
        static_scaled_fp8_quant=operators.scaled,
        dynamic_scaled_fp8_quant=operators.scaled_dynamically,
        dynamic_per_token_scaled_fp8_quant=functools.partial(operators.scaled_dynamically, per_token=True),
        rms_norm_static_fp8_quant=operators.quantized_norm,
        fused_add_rms_norm_static_fp8_quant=operators.quantized_sum,
        silu_and_mul_quant=operators.quantized_activation,
        per_token_group_fp8_quant=operators.by_groups,
        per_token_group_quant_int8=operators.by_groups_of_int8,
        apply_repetition_penalties_=ops.apply_repetition_penalties,
        **activations,
    )
    torch.ops._moe_C = operators.Operators("_moe_C", moe_sum=ops.moe_sum)
    torch.ops._C_cache_ops = operators.Operators("_C_cache_ops")


def _enter_experts() -> None:
    """vLLM's layers of experts, by the modules of 0.10.2 and of 0.33.0."""
    root = "vllm.model_executor.layers.fused_moe"
    kernels = {
        "fused_experts": experts.fused_experts,
        "fused_moe": experts.fused_moe_of(operators.fused_topk),
        "fused_topk": operators.fused_topk,
    }
    parts = {
        "fused_moe": kernels | {"modular_triton_fused_moe": experts.modular_triton_fused_moe},
        "config": experts.configs(),
        "modular_kernel": {"FusedMoEModularKernel": experts.FusedMoEKernel, "FusedMoEKernel": experts.FusedMoEKernel},
        "all2all_utils": {"maybe_make_prepare_finalize": lambda *_, **__: None},
        "prepare_finalize": {},
        "prepare_finalize.batched": {"BatchedPrepareAndFinalize": experts.BatchedPrepareAndFinalize},
        "experts.triton_moe": {"TritonExperts": experts.TritonExperts},
        "batched_deep_gemm_moe": {"silu_mul_fp8_quant_deep_gemm": operators.activation_of_experts},
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


def _enter_flash_attention() -> None:
    """vLLM's module of its builds of FlashAttention."""
    _module(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=vllm_flash_attn.flash_attn_varlen_func,
        is_fa_version_supported=lambda version: version in (2, 3),
        fa_version_unsupported_reason=lambda version: None,
    )


def _open(name: str, module: ModuleType) -> None:
    """Let a module that `enable` entered have placeholders for what it does not know."""
    own, others = vars(module).get("__getattr__"), attribute_of(name)

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


class _CUDAGraphMode(enum.Enum):
    """vLLM's modes of CUDA graphs, of which there is none here."""

    NONE = 0

    def is_valid_runtime_mode(self) -> bool:
        return True


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
        fast_moe_cold_start=False,
    ),
    scheduler_config=SimpleNamespace(),
    parallel_config=SimpleNamespace(
        data_parallel_size=1,
        data_parallel_rank=0,
        decode_context_parallel_size=1,
        use_sequence_parallel_moe=False,
        is_moe_model=None,
    ),
)


def _enter_config() -> None:
    def with_given(of: SimpleNamespace) -> Callable[..., SimpleNamespace]:
        return lambda **given: SimpleNamespace(**vars(of) | given)

    _module(
        "vllm.config",
        CompilationConfig=with_given(CONFIG.compilation_config),
        CUDAGraphMode=_CUDAGraphMode,
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
    vars(module).update(checks, fp8_allclose=operators.fp8_allclose, fp8_ulp_distance=operators.fp8_ulp_distance)
    vars(module)["__getattr__"] = attribute_of(module.__name__)


def install(folder: Path) -> None:
    """Put the modules in place; `cukern.compat.enable` has entered those of the kernels."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ROOTS:
            _open(name, module)
    # Before the last finder, by which cukern.compat refuses the submodules that it lacks.
    sys.meta_path.insert(-1, _Finder(folder))
    if "as far as cukern has it" in str(sys.modules["flashinfer"].__doc__):
        _enter_flashinfer_utils()
    if "as far as cukern has it" in str(sys.modules["sgl_kernel"].__doc__):
        _enter_sglang_utils()
        vars(sys.modules["sgl_kernel"])["moe_align_block_size"] = operators.align_used_blocks
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
    _module("vllm.utils.mem_utils", get_max_shared_memory_bytes=_shared_memory)
    _module("vllm.utils.math_utils", **maths)
    _module("vllm.utils.torch_utils", set_random_seed=_seed_everything)
    _module("vllm.utils.import_utils", has_deep_gemm=_no, has_triton_kernels=_no)
    _module("tests.utils")
    ops = vars(sys.modules["vllm._custom_ops"])
    ops["get_max_shared_memory_per_block_device_attribute"] = _shared_memory
    _enter_operators()
    _enter_experts()
    _enter_flash_mla()
    _enter_flash_attention()
    _enter_test_utils(folder)
